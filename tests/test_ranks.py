"""Several ranks over gloo: the same parameters as one rank, the same run folder, no hanging."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]

# Each job is one training run of a random tiny model; rewards are a function of the response alone,
# so that groups have spread, and every rank gives the same response the same reward.
DRIVER = """
import json, sys
from pathlib import Path
sys.path.insert(0, {root!r})
import grpo_ba

from verify import Verdict

def score(verifier, texts, problems):
    assert len(texts) == len(problems)
    return [Verdict(float(sum(map(ord, text)) % 3 == 0), "correct") for text in texts]

grpo_ba.Verifier.score = score
common = dict(model="model", train_data="problems.jsonl", preset="small", prompts_per_step=4,
              eval_data="held_out.jsonl",  # one problem: the second rank has none to evaluate
              group_size=4, minibatches=2, max_response_tokens=12, lr=1e-3, lr_warmup_steps=2,
              micro_batch_tokens=1100, save_every=100, engine="transformers")
for job in json.loads(sys.argv[1]):
    grpo_ba.train(grpo_ba.Config(**{{**common, **job}}))
grpo_ba.leave_distributed()
threads = [task.read_text() for task in Path("/proc/self/task").glob("*/comm")]
if "vllm" not in sys.modules:  # else one of them may abort the process at its exit
    assert not any("gloo" in name for name in threads), threads
"""


def make_folder(folder):
    """Puts a random tiny Qwen3, nine problems and the driver into a folder."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    import grpo_ba

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=48, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=32,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048,
        tie_word_embeddings=True, initializer_range=0.1, eos_token_id=1, bos_token_id=None,
    ))  # fmt: skip
    model.save_pretrained(folder / "model")
    grpo_ba.toy_tokenizer().save_pretrained(folder / "model")
    problems = [{"problem": f"a{i}b{i + 1}?", "answer": str(i)} for i in range(9)]
    (folder / "problems.jsonl").write_text("\n".join(map(json.dumps, problems)))
    (folder / "held_out.jsonl").write_text(json.dumps({"problem": "a4e4?", "answer": "3"}))
    (folder / "driver.py").write_text(DRIVER.format(root=str(ROOT)))
    return folder


def processes(folder):
    """The live processes that were started in this folder or by one that was: {pid: environment}."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_text()  # empty for a zombie
        except OSError:
            continue  # it has just ended, or is another user's
        if f"STARTED_IN={folder}\0" in environment:
            found[int(process.name)] = environment
    return found


def start(folder, ranks, *jobs):
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *(torchrun if ranks > 1 else []), "driver.py", json.dumps(jobs)]
    return subprocess.Popen(
        command, cwd=folder, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "STARTED_IN": str(folder)},
    )  # fmt: skip


def weights(folder, name):
    return load_file(folder / "runs" / name / "checkpoint" / "model.safetensors")


def metrics(folder, name):
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All runs of this file that are meant to end well, in two launches."""
    folder = make_folder(tmp_path_factory.mktemp("ranks"))
    one = start(folder, 1, {"name": "one", "steps": 3})
    two = start(
        folder, 2,
        {"name": "two", "steps": 3},
        {"name": "zero", "steps": 3, "zero": True},
        {"name": "cut", "steps": 2, "zero": True},
        {"name": "cut", "resume": "runs/cut", "steps": 3, "zero": True},
    )  # fmt: skip
    try:
        for process in (one, two):
            _, errors = process.communicate(timeout=240)
            assert process.returncode == 0, errors[-3000:]
    finally:
        for pid in processes(folder):
            os.kill(pid, signal.SIGKILL)
    return folder


@pytest.mark.parametrize("name", ["two", "zero", "cut"])
def test_two_ranks_end_with_the_parameters_of_one(runs, name):
    """`zero` shards the optimizer; `cut` does so too and is resumed before its last step."""
    initial, alone, together = (
        load_file(runs / "model/model.safetensors"),
        weights(runs, "one"),
        weights(runs, name),
    )
    moved = max((alone[key] - initial[key]).abs().max() for key in alone)
    differ = max((alone[key] - together[key]).abs().max() for key in alone)
    assert moved > 2e-3  # 6 optimizer steps of 1e-3: there is something to agree about
    assert differ < 1e-5


@pytest.mark.parametrize("name", ["two", "zero", "cut"])
def test_two_ranks_log_the_metrics_of_one(runs, name):
    alone, together = metrics(runs, "one"), metrics(runs, name)
    assert [line["step"] for line in together] == [1, 2, 3]
    for a, b in zip(alone, together):
        assert a["skipped"] == 0 and a["grad_norm"] > 0
        assert a["eval_accuracy"] in ((None,) if a["step"] == 2 else (0, 1))
        for key in a.keys() - {"padding"}:  # each rank cuts its own micro-batches
            if not key.startswith("seconds") and a[key] is not None:
                assert b[key] == pytest.approx(a[key], rel=1e-4, abs=1e-6), key


def test_only_rank_0_writes(runs):
    assert sorted(path.name for path in (runs / "runs").iterdir()) == ["cut", "one", "two", "zero"]
    files = {path.name for path in (runs / "runs" / "two").iterdir()}
    assert files == {path.name for path in (runs / "runs" / "one").iterdir()}
    assert len(metrics(runs, "two")) == 3
    samples = (runs / "runs" / "two" / "samples.jsonl").read_text().splitlines()
    assert len(samples) == len((runs / "runs" / "one" / "samples.jsonl").read_text().splitlines())


def test_a_killed_rank_ends_all_within_a_minute(runs):
    process = start(runs, 2, {"name": "killed", "steps": 100_000})
    log = runs / "runs" / "killed" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    try:
        while not (log.exists() and len(log.read_text().splitlines()) >= 2):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        rank_1 = [pid for pid, text in processes(runs).items() if "\0RANK=1\0" in text]
        os.kill(min(rank_1), signal.SIGKILL)  # as the kernel does when memory runs out
        deadline = time.monotonic() + 60
        process.communicate(timeout=60)
        assert process.returncode != 0
        while left := processes(runs):  # torchrun, rank 0, and the workers of both ranks
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
    finally:
        for pid in processes(runs):
            os.kill(pid, signal.SIGKILL)
