"""Several ranks over gloo: the same parameters as one rank, the same run folder, no hanging. Run as
a script, this file trains one run after the other, each given as flags of grpo_ba.py."""

import os
import signal
import subprocess
import sys
import time
from contextlib import chdir
from pathlib import Path

import pytest
from safetensors.torch import load_file

import grpo_ba
from verify import Verdict

ROOT = Path(__file__).resolve().parents[1]
# One held-out problem: the second rank has none to evaluate.
FLAGS = """--preset toy --eval_data=one.jsonl --prompts_per_step 4 --group_size 4 --steps 3 --lr 1e-3
    --temperature 1.5 --max_response_tokens 24 --save_every 9 --eval_every 2 """


class Scorer:
    """Rewards are a function of the response alone, so that groups have spread."""

    def score(self, texts, problems):
        assert len(texts) == len(problems)
        return [Verdict(float(sum(map(ord, text)) % 3 == 0), "") for text in texts]


def train_all(runs):
    for flags in runs:
        grpo_ba.train(grpo_ba.parse((FLAGS + flags).split()), Scorer())


def make_folder(folder):
    (folder / "one.jsonl").write_text('{"problem": "a4e4?", "answer": "3"}\n')
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


def start(folder, ranks, script, *args):
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *(torchrun if ranks > 1 else []), str(script), *args]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "STARTED_IN": str(folder)}
    return subprocess.Popen(
        command, cwd=folder, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )


def finish(folder, process, timeout=240):
    """Waits for it to end well; whatever happens, nothing of it is left."""
    try:
        errors = process.communicate(timeout=timeout)[1]
        assert process.returncode == 0, errors[-3000:]
    finally:
        for pid in processes(folder):
            os.kill(pid, signal.SIGKILL)


def weights(folder, name):
    return load_file(folder / f"runs/{name}/checkpoint/model.safetensors")


def metrics(folder, name):
    return list(grpo_ba.read_jsonl(folder / f"runs/{name}/metrics.jsonl"))


def largest_difference(one, other):
    return max((one[key] - other[key]).abs().max().item() for key in one)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One run on one rank, in this process, and three on two ranks, in one launch."""
    folder, handler = make_folder(tmp_path_factory.mktemp("ranks")), signal.getsignal(signal.SIGINT)
    zero = "--zero 1 --name zero", "--zero 1 --name cut --steps 2", "--resume runs/cut --steps 3"
    two = start(folder, 2, __file__, "--name two", *zero)
    with chdir(folder):
        train_all(["--name one"])
    signal.signal(signal.SIGINT, handler)
    finish(folder, two)
    return folder


@pytest.mark.parametrize("name", ["two", "zero", "cut"])
def test_two_ranks_end_with_the_parameters_of_one(runs, toy, name):
    """`zero` shards the optimizer; `cut` does so too and is resumed before its last step."""
    alone = weights(runs, "one")
    assert largest_difference(alone, load_file(toy / "model.safetensors")) > 2e-3  # it has moved
    assert largest_difference(alone, weights(runs, name)) < 5e-5


@pytest.mark.parametrize("name", ["two", "zero"])
def test_two_ranks_log_the_metrics_of_one(runs, name):
    alone, together = metrics(runs, "one"), metrics(runs, name)
    assert [line["step"] for line in together] == [1, 2, 3]
    for a, b in zip(alone, together):
        assert a["grad_norm"] > 0
        for key in a.keys() - {"padding"}:  # each rank cuts its own micro-batches
            if not key.startswith("seconds") and a[key] is not None:
                assert b[key] == pytest.approx(a[key], rel=1e-4, abs=3e-5), key


def test_only_rank_0_writes(runs):
    assert {path.name for path in (runs / "runs").iterdir()} == {"cut", "one", "two", "zero"}
    one, two = (runs / "runs/one", runs / "runs/two")
    assert {path.name for path in one.iterdir()} == {path.name for path in two.iterdir()}
    assert (one / "samples.jsonl").read_text() == (two / "samples.jsonl").read_text()


def test_a_killed_rank_ends_all_within_a_minute(tmp_path):
    flags = FLAGS.replace("one.jsonl", "") + "--steps 100000 --name killed"
    process = start(make_folder(tmp_path), 2, ROOT / "grpo_ba.py", *flags.split())
    deadline = time.monotonic() + 120
    try:
        while len(metrics(tmp_path, "killed")) < 2:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        rank_1 = [pid for pid, text in processes(tmp_path).items() if "\0RANK=1\0" in text]
        os.kill(min(rank_1), signal.SIGKILL)  # as the kernel does when memory runs out
        deadline = time.monotonic() + 60
        process.communicate(timeout=60)
        assert process.returncode != 0
        while left := processes(tmp_path):  # torchrun, rank 0, and the workers of both ranks
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
    finally:
        for pid in processes(tmp_path):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    grpo_ba.run_main(lambda: train_all(sys.argv[1:]))
    threads = [task.read_text() for task in Path("/proc/self/task").glob("*/comm")]
    if "vllm" not in sys.modules:  # else one of them may abort the process at its exit
        assert not any("gloo" in name for name in threads), threads
