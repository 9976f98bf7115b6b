"""A whole training step against its floor and against TRL: `python tests/bench_step.py [rounds]`.

A random Qwen3 of 2.6 M parameters stops at any token with probability 1/48, so lengths are mixed:
geometric with a mean of about 45, cut at 200. All three do the same work in turns, in one process
on one thread:
  floor   sample once; forward and backward once over as many tokens as are trained, unpadded
  ours    grpo_ba.train, from the rollout to the log line
  TRL     GRPOTrainer with loss_type dapo, the same model, batch and limits, no checkpointing
Printed: seconds a step, the median over rounds, and ratios, which alone mean something.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import grpo_ba
from grpo_ba import (
    Response,
    Sampling,
    TransformersEngine,
    group_advantages,
    response_logprobs,
    sample_seed,
)
from verify import Verdict

P, G, MAX_TOKENS, STEPS = 8, 8, 200, 4
PROBLEMS = [{"problem": f"a{i}b{j}?", "answer": "1"} for i in range(5) for j in range(5)]


def rewards_of(texts):
    return [float(sum(map(ord, text)) % 2) for text in texts]


class Verifier:  # scoring is measured in bench_verify.py
    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def score(self, texts, problems):
        return [Verdict(reward, "") for reward in rewards_of(texts)]


def make_checkpoint(folder):
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(
        vocab_size=48, hidden_size=256, intermediate_size=512, num_hidden_layers=4, head_dim=64,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )).save_pretrained(folder)  # fmt: skip
    grpo_ba.toy_tokenizer().save_pretrained(folder)


def make_config():
    flags = f"--model model --train_data problems.jsonl --instruction none --steps {STEPS} "
    flags += f"--prompts_per_step {P} --group_size {G} --max_prompt_tokens 16 --lr 1e-9 "
    flags += f"--max_response_tokens {MAX_TOKENS} --logprob_chunk 0 --save_every 99"
    return grpo_ba.parse(flags.split())


def ours():
    """Seconds of each step but the first, from log line to log line."""
    stamps, log = [], grpo_ba.RunFolder.log

    def stamp(self, *args):
        log(self, *args)
        stamps.append(time.perf_counter())

    grpo_ba.RunFolder.log = stamp
    try:
        grpo_ba.train(make_config())
    finally:
        grpo_ba.RunFolder.log = log
    return [after - before for before, after in pairwise(stamps)]


def floor():
    """The same steps of `ours`: the same prompts and seeds, so the same responses. They are trained
    on as rows of one length, which have as many tokens together and need no padding."""
    config, tokenizer = make_config(), grpo_ba.toy_tokenizer()
    model = grpo_ba.load_policy("model", "cpu")
    engine = TransformersEngine(model, [1])
    problems = grpo_ba.encode_problems([dict(p) for p in PROBLEMS], tokenizer, config)
    seconds = []
    for step in range(1, STEPS + 1):
        batch = grpo_ba.step_problems(problems, config, step)
        prompts = [p["prompt_ids"] for p in batch]
        seeds = [sample_seed(0, "rollout", step, p["place"], g) for p in batch for g in range(G)]
        start = time.perf_counter()
        responses = engine.generate(prompts, G, Sampling(MAX_TOKENS), seeds)
        rollout = time.perf_counter() - start
        rewards, _ = grpo_ba.score(Verifier(), tokenizer, responses, batch)
        trained = group_advantages(rewards).flatten().tolist()
        trained = [len(r.ids) for r, A in zip(responses, trained) if A]
        length = round(sum(trained) / len(trained))
        prompt_ids, ids = torch.tensor(prompts[0]), torch.full((length,), 5)
        rows = [Response(prompt_ids, ids, None, "")] * len(trained)
        start = time.perf_counter()
        response_logprobs(model, rows, 1.0, 0)[0].sum().backward()
        seconds.append(rollout + time.perf_counter() - start)
        model.zero_grad()
    return seconds[1:]


def trl_steps():
    import trl
    from datasets import Dataset
    from transformers import TrainerCallback

    stamps = []

    class Stamp(TrainerCallback):
        def on_step_end(self, *_, **__):
            stamps.append(time.perf_counter())

    args = trl.GRPOConfig(
        output_dir="trl", loss_type="dapo", num_generations=G, beta=0.0, use_cpu=True, bf16=False,
        per_device_train_batch_size=P * G, gradient_accumulation_steps=1, max_steps=STEPS,
        max_completion_length=MAX_TOKENS, report_to="none", save_strategy="no", disable_tqdm=True,
        learning_rate=1e-9, logging_steps=1000, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=Qwen3ForCausalLM.from_pretrained("model"), args=args, callbacks=[Stamp()],
        reward_funcs=lambda completions, **_: rewards_of(completions),
        train_dataset=Dataset.from_list([{"prompt": p["problem"]} for p in PROBLEMS]),
        processing_class=grpo_ba.toy_tokenizer(),
    )  # fmt: skip
    trainer.train()
    return [after - before for before, after in pairwise(stamps)]


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    torch.set_num_threads(1)
    grpo_ba.Verifier = Verifier
    seconds = {"floor": [], "ours": [], "TRL": []}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        make_checkpoint("model")
        Path("problems.jsonl").write_text("".join(json.dumps(p) + "\n" for p in PROBLEMS))
        for _ in range(rounds):
            for name, steps in (("floor", floor), ("ours", ours), ("TRL", trl_steps)):
                seconds[name].append(statistics.mean(steps()))
        os.chdir("/")
    median = {name: statistics.median(some) for name, some in seconds.items()}
    for name, value in median.items():
        print(f"{name:5} {value:7.3f} s a step   {value / median['floor']:5.2f} x the floor")
    print(f"TRL / ours {median['TRL'] / median['ours']:.2f}")


if __name__ == "__main__":
    main()
