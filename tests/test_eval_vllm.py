"""eval.py with real vLLM (on CPU or GPU); skipped where vLLM is not installed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from test_eval_sampling import argv, make_policy, samples, start

# Each evaluation in a process of its own: vLLM keeps its engine and its groups until the end.


def run(policy, out, *more, script=(sys.executable,)):
    process = start(*argv(policy, out, "--engine", "vllm", *more), script=script)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert "Traceback" not in output, output
    return json.loads((out / "eval/results.json").read_text())["benchmarks"]["toy"]


@pytest.fixture(scope="session")
def policy(tmp_path_factory, pytestconfig):
    return make_policy(tmp_path_factory, pytestconfig)


@pytest.fixture(scope="session")
def by_vllm(policy, tmp_path_factory):
    out = tmp_path_factory.mktemp("vllm")
    return run(policy, out, "--limit", 40), out


def test_both_engines_score_a_policy_alike(by_vllm, policy, tmp_path):
    """Other random numbers, same policy: the scores differ by no more than they vary."""
    process = start(*argv(policy, tmp_path, "--limit", 40))
    assert process.wait(timeout=600) == 0
    other = json.loads((tmp_path / "eval/results.json").read_text())["benchmarks"]["toy"]
    vllm = by_vllm[0]
    assert 0 < vllm["score"] < 1
    assert (
        abs(vllm["score"] - other["score"]) < 4 * (vllm["error"] ** 2 + other["error"] ** 2) ** 0.5
    )
    assert abs(vllm["tokens"] - other["tokens"]) < 0.3 * other["tokens"]
    assert {row["finish_reason"] for row in samples(by_vllm[1]).values()} <= {"stop", "length"}


def test_a_vllm_evaluation_resumes_to_the_same_responses(by_vllm, policy, tmp_path):
    whole = by_vllm[1] / "eval/samples.jsonl"
    (tmp_path / "eval").mkdir()
    lines = whole.read_text().splitlines(keepends=True)
    (tmp_path / "eval/samples.jsonl").write_text("".join(lines[:57]) + lines[57][:30])
    assert run(policy, tmp_path, "--limit", 40, "--batch_size", 16) == by_vllm[0]
    texts = {key: row["response"] for key, row in samples(tmp_path).items()}
    assert texts == {key: row["response"] for key, row in samples(by_vllm[1]).items()}


def test_two_ranks_each_with_its_vllm_give_the_results_of_one(by_vllm, policy, tmp_path):
    """Also when one rank has nothing to do: vLLM's start is a common act of all ranks."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert run(policy, tmp_path, "--limit", 1, script=torchrun)["problems"] == 1
    assert run(policy, tmp_path, "--limit", 40, script=torchrun) == by_vllm[0]


def test_a_long_batch_of_seeded_prompts_is_not_cut_into_chunks(policy, tmp_path):
    """More prompt tokens than vLLM takes in a step: on CPU, a prompt in two chunks would crash."""
    rows = [{"problem": "a1b2c3?" * 40, "answer": "1"}] * 40
    (tmp_path / "math500.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = ("--benchmarks", "math500", "--data", tmp_path, "--preset", "toy", "--limit", 40)
    command = argv(policy, tmp_path, "--engine", "vllm", *more)
    result = subprocess.run(
        [sys.executable, str(Path(__file__).parents[1] / "eval.py"), *command, "--max_tokens", "8"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "eval/samples.jsonl").read_bytes().count(b"\n") == 160
