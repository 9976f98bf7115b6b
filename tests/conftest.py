"""Fixtures: the toy, tiny models, responses made by hand, and what a user's mistake looks like."""

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: no test needs the network
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import pytest
import torch

import grpo_ba

torch.set_num_threads(1)  # the matrices are tiny: a second thread costs more than it brings


@pytest.fixture(scope="session")
def tiny_qwen3():
    """Makes Qwen3s with a few hundred random weights, large enough for sharp distributions."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    def make(vocab=11, dtype=torch.float64, tied=True, seed=0):
        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=vocab, hidden_size=8, intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=64,
            tie_word_embeddings=tied, initializer_range=0.5, bos_token_id=None, eos_token_id=0,
            pad_token_id=0,
        )  # fmt: skip
        return Qwen3ForCausalLM(config).to(dtype).eval()

    return make


@pytest.fixture(scope="session")
def make_responses():
    """Makes responses of given lengths, group by group. Token 0 is EOS and padding at once; every
    other response ends with it, the others are cut."""

    def make(lengths, vocab=11, seed=0):
        rng, responses = torch.Generator().manual_seed(seed), []
        for group in lengths:
            prompt = torch.randint(vocab, (2 + len(responses) % 4,), generator=rng)
            for length in group:
                ids = torch.randint(vocab, (length,), generator=rng)
                stops = length > 0 and len(responses) % 2 == 0
                if stops:
                    ids[-1] = 0
                logprobs = -3 * torch.rand(length, generator=rng)
                responses.append(grpo_ba.Response(prompt, ids, logprobs))
        return responses

    return make


@pytest.fixture(scope="session")
def ascii_tokenizer():
    """Makes tokenizers with a token per character, special tokens and a chat template."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    def make(chat_template, special=("<pad>", "<eos>")):
        characters = [*special, "\n", *map(chr, range(32, 127))]
        vocab = {character: i for i, character in enumerate(characters)}
        backend = Tokenizer(models.BPE(vocab, merges=[]))
        backend.decoder = decoders.Fuse()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend, pad_token=special[0], eos_token=special[1],
            extra_special_tokens=list(special),
        )  # fmt: skip
        tokenizer.chat_template = chat_template
        return tokenizer

    return make


@pytest.fixture(scope="session")
def toy():
    """The folder of the toy policy whose wrong answers ramble on, with its problems."""
    return ROOT / ".assets/toy-rambler"


@pytest.fixture
def mistake(capsys):
    """Runs what ends as a user's mistake must: exit status 2 and one line, which is returned."""

    def run(action, *args):
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            action(*args)
        lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
        lines = [line for line in lines if "%|" not in line]  # progress bars
        assert caught.value.code == 2 and len(lines) == 1, lines
        return lines[0]

    return run
