"""The GPU presets, small, on a CPU: a random model with Qwen3's real vocabulary."""

import json
import math

import pytest
import torch

import grpo_ba
from grpo_ba import PRESETS, parse

SMALL = [
    "--steps",
    "2",
    "--prompts_per_step",
    "4",
    "--group_size",
    "4",
    "--minibatches",
    "2",
    "--max_prompt_tokens",
    "64",
    "--max_response_tokens",
    "16",
    "--micro_batch_tokens",
    "512",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("preset")
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=151_936, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
        max_position_embeddings=256, bos_token_id=None, eos_token_id=1,
    ))  # fmt: skip
    model.save_pretrained(folder / "model")
    grpo_ba.toy_tokenizer().save_pretrained(folder / "model")
    rows = [{"problem": f"a{i}b{i}?", "answer": str(2 * i)} for i in range(8)]
    (folder / "problems.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.mark.parametrize("preset", ["qwen3-1.7b-dapo", "qwen2.5-math-7b-polaris"])
def test_a_preset_trains_a_local_model_on_local_data(folder, preset, monkeypatch):
    """Nothing is asked of the hub, and most sampled ids are none of the tokenizer's."""

    def score(verifier, tokenizer, responses, problems):
        rewards = torch.tensor([float(r.ids.sum() % 2) for r in responses])
        return rewards.view(len(problems), -1), [tokenizer.decode(r.ids) for r in responses]

    monkeypatch.chdir(folder)
    monkeypatch.setattr(grpo_ba, "score", score)
    data = ["--model", "model", "--train_data", "problems.jsonl"]
    config = parse(["--preset", preset, *data, *SMALL])
    assert config.gradient_checkpointing and config.lr == 1e-6  # the preset's
    run = grpo_ba.train(config)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["grad_norm"] > 0 and line["skipped"] == 0
        assert line["entropy"] == pytest.approx(math.log(151_936), rel=0.02)  # a random model's
        assert line["mismatch_max"] < 1e-4


@pytest.mark.parametrize("preset", [name for name in PRESETS if name.startswith("qwen")])
def test_later_flags_win_over_a_presets(preset):
    config = parse(["--preset", preset])
    assert (config.clip_low, config.clip_high, config.temperature) == (0.2, 0.28, 1.0)
    assert config.group_size == 8 and "math500" in config.exclude_data
    assert parse(["--preset", preset, "--lr", "3e-6"]).lr == 3e-6
    assert parse(["--preset", preset, "--eval_data", "aime24"]).eval_data == "aime24"


def test_own_local_data_replaces_a_presets_evaluation_sets_but_not_given_ones(folder):
    data = ["--preset", "qwen3-1.7b-dapo", "--train_data", str(folder / "problems.jsonl")]
    config = parse(data)
    assert config.eval_data == config.exclude_data == ""
    assert parse([*data, "--eval_data", "math500"]).eval_data == "math500"
