"""A training step against its floor and against TRL, in time and memory:

    python tests/bench_step.py [--rounds 3] [--json FILE] [--only WORDS] [--smollm2 DIR]

  floor  samples with our engine; then one forward and backward pass over as many tokens as are
         trained, unpadded, and with 4 minibatches the old logprobs of the last three. No optimizer
  ours   grpo_ba.train, from the rollout to the log line
  TRL    GRPOTrainer on the same lengths and rewards, with as many tokens in a forward pass, by its
         own clock (no optimizer either); loss_type is dapo and grpo in turn

A hook on the model ends each response, so all three sample the same planned lengths. A measurement
is a process of its own with one thread: CPU seconds, and peak memory beyond the imports. A row is
the median over the rounds; rollout_over_floor is our rollout over its bare forward passes. Last
comes how a step grows: the exponent is the slope of log seconds over log size.
"""

import argparse
import io
import itertools
import json
import math
import os
import resource
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import linear_regression, median
from types import SimpleNamespace

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
import transformers as hf
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import grpo_ba
from grpo_ba import append_jsonl, load_policy
from verify import verify_math

NUMBERS = itertools.count()
MIX = {"steps": 3, "max_response_tokens": 500}  # lognormal, from the median up to the limit
EQUAL = MIX | {"max_response_tokens": 60}
SMALL = MIX | {"steps": 1, "prompts_per_step": 4, "group_size": 4}
ROWS = [  # model, row, median length, fields of Config (8 prompts of 8 responses, 1 minibatch)
    ("tiny", "equal, 8 x 8", 60, EQUAL),
    ("tiny", "lognormal, 8 x 8", 60, MIX),
    ("tiny", "lognormal, 8 x 8, 4 minibatches", 60, MIX | {"minibatches": 4}),
    ("tiny", "lognormal, 8 x 8, checkpointing", 60, MIX | {"gradient_checkpointing": True}),
    ("tiny", "lognormal, 16 x 8", 60, MIX | {"prompts_per_step": 16}),
    ("tiny", "lognormal, 64 x 16", 60, SMALL | {"prompts_per_step": 64, "group_size": 16}),
    ("SmolLM2", "equal, 4 x 4", 60, SMALL | {"max_response_tokens": 60}),
    ("SmolLM2", "lognormal, 4 x 4", 60, SMALL),
    ("SmolLM2", "lognormal, 4 x 4, 4 minibatches", 60, SMALL | {"minibatches": 4}),
    ("SmolLM2", "lognormal, 4 x 4, checkpointing", 60, SMALL | {"gradient_checkpointing": True}),
]
GROWTH = {  # size -> median length, fields of Config
    "responses": {8 * P: (60, EQUAL | {"prompts_per_step": P}) for P in (8, 16, 32, 64, 128)},
    "tokens each": {n: (n, EQUAL | {"max_response_tokens": n}) for n in (64, 128, 256, 512, 1024)},
}
PROBLEMS = [{"problem": f"a{i // 100}b{i // 10 % 10}c{i % 10}?", "answer": "1"} for i in range(128)]


def make_tiny(folder):
    """A random Qwen3 of 0.8 M parameters: the toy, deeper."""
    torch.manual_seed(0)
    toy = grpo_ba.PRESETS["toy"]["model"]
    longer = {"num_hidden_layers": 5, "layer_types": None, "max_position_embeddings": 2048}
    config = hf.Qwen3Config(**hf.AutoConfig.from_pretrained(toy).to_dict() | longer)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    hf.AutoTokenizer.from_pretrained(toy).save_pretrained(folder)


def load_planned(config, middle, stop_ids):
    """The policy, with B responses of planned lengths, always in the same order."""
    B, longest = config.prompts_per_step * config.group_size, config.max_response_tokens
    z = torch.special.ndtri((torch.arange(B) + 0.5) / B)  # quantiles of a normal distribution
    lengths = (middle * (longest / middle) ** (z / z.max())).round().long()
    lengths = lengths[torch.randperm(B, generator=torch.Generator().manual_seed(0))]
    t, served, own = 0, 0, None

    def hook(_, args, kwargs, output):
        nonlocal t, served, own
        if not kwargs.get("use_cache"):
            return  # trained on, not sampled
        logits = output.logits[:, -1]  # of token t of each response
        ids = args[0] if args else kwargs["input_ids"]
        t = 0 if ids.shape[1] > 1 else t + 1
        logits[:, stop_ids] = -math.inf
        if t == 1:  # at t = 0 ours has a row for each prompt only
            own = lengths.roll(-served)[: len(logits)]
            served = (served + len(logits)) % B
        if t > 0:
            own = own if len(own) == len(logits) else own[own > t]  # ours drops finished rows
            logits[own == t + 1] = -math.inf
            logits[own == t + 1, stop_ids[-1]] = 0.0

    model = load_policy(config.model, "cpu")
    model.register_forward_hook(hook, with_kwargs=True)
    return model


def score(texts, problems=None):
    """Every other response is right. No answer comes twice, so none from a cache of verify.py."""
    return [verify_math(rf"\boxed{{\frac{{{i}}}{{7}}}}", rf"\frac{{{i}}}{{{7 + i % 2}}}")
            for i in itertools.islice(NUMBERS, len(texts))]  # fmt: skip


def floor(config, middle, tokenizer, stop_ids):
    """This one, `ours` and `trl` return a list of steps, {"seconds": ...} and more."""
    model = load_planned(config, middle, stop_ids)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    engine = grpo_ba.TransformersEngine(model, stop_ids)
    problems = grpo_ba.load_task(config, tokenizer)[0][: config.prompts_per_step]
    first, weight, steps = len(problems[0]["prompt_ids"]), model.get_output_embeddings().weight, []

    def passes(responses):
        """As 16 rows of one length at a time: the mean of theirs, sorted."""
        lengths = sorted(first + len(r.ids) for r in responses)
        for some in (lengths[i : i + 16] for i in range(0, len(lengths), 16)):
            ids = torch.full((len(some), round(sum(some) / len(some))), 5)
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            logits = F.linear(hidden[:, first - 1 : -1].flatten(0, 1), weight)
            loss = F.cross_entropy(logits, ids[:, first:].flatten())
            if torch.is_grad_enabled():
                loss.backward()

    for _ in range(config.steps):
        start = time.process_time()
        responses = grpo_ba.rollout(engine, problems, config.group_size, config)
        model.train()
        if config.minibatches > 1:
            with torch.no_grad():
                passes(responses[len(responses) // config.minibatches :])
        passes(responses)
        steps.append({"seconds": time.process_time() - start})
        model.zero_grad()
    return steps


def ours(config, middle, tokenizer, stop_ids):
    steps, forward = [], []  # forward: when each of the engine's forward passes began and ended

    def load(*_):
        model = load_planned(config, middle, stop_ids)  # called as a whole by the engine only
        model.register_forward_pre_hook(lambda *_: forward.append(time.process_time()))
        model.register_forward_hook(lambda *_: forward.append(time.process_time()), prepend=True)
        return model

    def log(path, rows):
        append_jsonl(path, rows)
        if path.name == "metrics.jsonl":
            seconds = time.process_time() - forward[0]
            in_forward = sum(forward[1::2]) - sum(forward[::2])
            steps.append(rows[0] | {"seconds": seconds, "seconds_forward": in_forward})
            forward.clear()

    grpo_ba.load_policy, grpo_ba.append_jsonl = load, log
    grpo_ba.save = grpo_ba.draw_curves = lambda *_: None
    grpo_ba.train(config, SimpleNamespace(score=score))
    return steps


def trl(config, middle, tokenizer, stop_ids, loss_type):
    B, M = config.prompts_per_step * config.group_size, config.minibatches
    rows = min(B // M, 2 ** int(math.log2(config.micro_batch_tokens // config.max_response_tokens)))
    args = GRPOConfig(
        output_dir="trl", loss_type=loss_type, num_generations=config.group_size, use_cpu=True,
        per_device_train_batch_size=rows, gradient_accumulation_steps=B // M // rows, bf16=False,
        steps_per_generation=B // rows, max_steps=config.steps * M, learning_rate=config.lr,
        max_completion_length=config.max_response_tokens, save_strategy="no", report_to="none",
        gradient_checkpointing=config.gradient_checkpointing, disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    prompts = [{"prompt": [{"role": "user", "content": p["problem"]}]} for p in PROBLEMS]
    trainer = GRPOTrainer(
        model=load_planned(config, middle, stop_ids), args=args, processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [v.reward for v in score(completions)],
        train_dataset=Dataset.from_list(prompts),
    )  # fmt: skip
    trainer.train()
    seconds = [log["step_time"] for log in trainer.state.log_history if "step_time" in log]
    return [{"seconds": sum(seconds[i : i + M])} for i in range(0, len(seconds), M)]


def measure(work, folder, middle, fields, directory):
    """Medians over the steps of one of the three, in this process."""
    os.chdir(directory)
    sys.stdout = sys.stderr = io.StringIO()
    torch.set_num_threads(1)
    time.perf_counter = time.process_time  # the clock of grpo_ba.train and of TRL
    append_jsonl("problems.jsonl", PROBLEMS)
    same = {"train_data": "problems.jsonl", "eval_data": "", "instruction": "none", "lr": 1e-9,
            "minibatches": 1, "micro_batch_tokens": 4096, "gradient_checkpointing": False}  # fmt: skip
    config = grpo_ba.Config(model=folder, **same | fields)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    steps = work(config, middle, tokenizer, grpo_ba.stop_token_ids(tokenizer))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak  # in KiB
    keys = [key for key, value in steps[0].items() if isinstance(value, float)]
    return {"gigabytes": peak / 1e6} | {key: median(step[key] for step in steps) for key in keys}


def in_a_process(*args):
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    with pool, tempfile.TemporaryDirectory() as directory:
        return pool.submit(measure, *args, directory).result()


def compare(rounds, *row):
    """The measured part of a row of the table."""
    results = []
    for i in range(rounds):
        kinds = floor, ours, partial(trl, loss_type=("dapo", "grpo")[i % 2])
        f, o, t = (in_a_process(kind, *row) for kind in kinds)
        results.append({
            "ours_over_floor": o["seconds"] / f["seconds"],
            "rollout_over_floor": o["seconds_rollout"] / o["seconds_forward"],
            "trl_over_ours": t["seconds"] / o["seconds"],
            "padding": o["padding"],
            "memory_over_trl": o["gigabytes"] / t["gigabytes"],
            "score_over_ours": o["seconds_score"] / o["seconds"],
            "seconds": o["seconds"],
            "gigabytes": o["gigabytes"],
        })  # fmt: skip
    medians = {key: round(median(result[key] for result in results), 3) for key in results[0]}
    return medians | {"ours_over_floor_rounds": [round(r["ours_over_floor"], 3) for r in results]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write the table to this file")
    parser.add_argument("--only", default="", help="rows whose model and name have this in them")
    parser.add_argument("--smollm2", help="folder of SmolLM2-135M; else its rows are left out")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as tiny:
        make_tiny(tiny)
        folders, table = {"tiny": tiny, "SmolLM2": options.smollm2}, []
        for model, name, *row in ROWS:
            if folders[model] and options.only in f"{model} {name}":
                table.append({"model": model, "row": name})
                table[-1] |= compare(options.rounds, folders[model], *row)
                print(table[-1], flush=True)
        if options.json:
            Path(options.json).write_text(json.dumps(table, indent=2))
        for what, rows in GROWTH.items() if options.only in "growth" else ():
            for size, row in rows.items():
                rows[size] = o = in_a_process(ours, tiny, *row)
                print(f"{size} {what}: {o['seconds']:.3f} s, {o['gigabytes']:.3f} GB", flush=True)
            logs = [math.log(n) for n in rows], [math.log(r["seconds"]) for r in rows.values()]
            print(f"exponent {linear_regression(*logs).slope:.2f}", flush=True)


if __name__ == "__main__":
    main()
