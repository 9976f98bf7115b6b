"""eval.py end to end on the toy task: sampling, files, kill and resume, several ranks."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
import torch
from test_eval import STDIN, lcb_row, write_jsonl

import eval as evaluation
import grpo_ba
from verify import Verifier

ROOT = Path(__file__).resolve().parents[1]


def make_policy(tmp_path_factory, pytestconfig):
    """A run's checkpoint: a toy policy that was warmed up just long enough to guess, right or
    wrong, in the world where a guess is right half the time. Kept between test sessions."""
    run = tmp_path_factory.mktemp("runs") / "guesser"
    cache = getattr(pytestconfig, "cache", None)  # None with -p no:cacheprovider
    cache_dir = cache.mkdir("toy_policies") if cache else run.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(grpo_ba.TOY, "clean_steps", 1)
        patch.setitem(grpo_ba.TOY, "mixture_steps", 30)
        made = grpo_ba.toy_policy(grpo_ba.Config(toy_world="guesser", cache_dir=str(cache_dir)))
    config = {
        "aggregation": "balanced", "preset": "toy", "model": "", "toy_world": "guesser",
        "instruction": "none", "enable_thinking": False,
    }  # fmt: skip
    run.mkdir()
    (run / "config.json").write_text(json.dumps(config))
    return Path(shutil.copytree(made, run / "checkpoint"))


@pytest.fixture(scope="session")
def policy(tmp_path_factory, pytestconfig):
    return make_policy(tmp_path_factory, pytestconfig)


def argv(policy, out, *more):
    base = ["--model", policy, "--benchmarks", "toy", "--limit", 12, "--samples", 4]
    return [str(arg) for arg in [*base, "--max_tokens", 40, "--out", out, *more]]


def evaluate(policy, out, *more):
    evaluation.evaluate(evaluation.parse(argv(policy, out, *more)))
    return json.loads((out / "eval/results.json").read_text())["benchmarks"]["toy"]


def samples(out):
    rows = [json.loads(line) for line in (out / "eval/samples.jsonl").open()]
    return {(row["id"], row["sample"]): row for row in rows}


def start(*args, script=(sys.executable,), program=ROOT / "eval.py"):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*script, str(program), *args], env=environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.fixture(scope="session")
def whole(policy, tmp_path_factory):
    """One uninterrupted evaluation, which others must equal: (results, samples, folder)."""
    out = tmp_path_factory.mktemp("whole")
    return evaluate(policy, out), samples(out), out


def test_an_evaluation_scores_the_toy_and_leaves_its_files(whole):
    results, rows, out = whole
    assert (results["problems"], results["samples"], len(rows)) == (12, 4, 48)
    assert 0 < results["score"] < 1  # else the tests below could not tell samples apart
    assert set(results["pass"]) == {"1", "2", "4"}
    assert results["pass"]["1"] == pytest.approx(results["score"])
    assert "avg@k" in (out / "eval/results.md").read_text()
    row = rows["0", 0]
    assert set(row) == {
        "settings", "task", "id", "sample", "prompt_hash", "problem_hash", "response", "extracted",
        "gold", "reward", "reason", "finish_reason", "tokens", "sampling", "model",
    }  # fmt: skip
    texts = [{rows[str(i), sample]["response"] for sample in range(4)} for i in range(12)]
    assert sum(map(len, texts)) > 24  # samples of one problem are independent
    rewards = [row["reward"] for row in rows.values()]
    assert results["score"] == pytest.approx(sum(rewards) / len(rewards))
    assert all((row["extracted"] == row["gold"]) == bool(row["reward"]) for row in rows.values())


def test_the_same_command_again_samples_nothing(whole, policy, monkeypatch):
    results, _, out = whole
    monkeypatch.setattr(evaluation, "sample_and_score", None)
    before = (out / "eval/samples.jsonl").read_bytes()
    assert evaluate(policy, out) == results
    assert (out / "eval/samples.jsonl").read_bytes() == before


def test_samples_of_other_settings_weights_or_golds_are_not_reused(
    whole, policy, tmp_path, monkeypatch
):
    asked = []

    class Asked(Exception):
        pass

    def generate(self, prompts, *_, **__):
        asked.append(len(prompts))
        raise Asked

    out = tmp_path / "copy"
    (out / "eval").mkdir(parents=True)
    (out / "eval/samples.jsonl").write_bytes((whole[2] / "eval/samples.jsonl").read_bytes())
    monkeypatch.setattr(grpo_ba.TransformersEngine, "generate", generate)
    for more in (["--seed", 1], ["--temperature", 0.5], ["--max_tokens", 30]):
        with pytest.raises(Asked):
            evaluate(policy, out, *more)
    with pytest.raises(Asked):
        evaluate(policy, out, "--samples", 6)
    assert asked == [48, 48, 48, 24]  # more samples of the same settings are only added to
    real = evaluation.toy_problems
    monkeypatch.setattr(
        evaluation, "toy_problems",
        lambda *args: (None, [p | {"answer": "9"} if i == 3 else p
                              for i, p in enumerate(real(*args)[1])]),
    )  # fmt: skip
    with pytest.raises(Asked):
        evaluate(policy, out)
    weights = policy / "model.safetensors"
    stamp = weights.stat()
    os.utime(weights, (1, 1))
    try:
        with pytest.raises(Asked):
            evaluate(policy, out)
    finally:
        os.utime(weights, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert asked[4:] == [4, 48]


def test_a_checkpoints_generation_config_cannot_change_the_samples(whole, policy, tmp_path):
    path = policy / "generation_config.json"
    before = path.read_text() if path.exists() else None
    settings = {"temperature": 0.01, "top_k": 1, "do_sample": False, "repetition_penalty": 3.0}
    path.write_text(json.dumps({**json.loads(before or "{}"), **settings}))
    try:
        evaluate(policy, tmp_path)
    finally:
        path.write_text(before) if before else path.unlink()
    texts = {key: row["response"] for key, row in samples(tmp_path).items()}
    assert texts == {key: row["response"] for key, row in whole[1].items()}


@pytest.mark.parametrize("lines", [1, 25])
def test_an_evaluation_killed_in_the_middle_resumes_to_the_same_results(
    whole, policy, tmp_path, lines
):
    process = start(*argv(policy, tmp_path, "--batch_size", 4))
    path, deadline = tmp_path / "eval/samples.jsonl", time.monotonic() + 120
    while not path.exists() or path.read_bytes().count(b"\n") < lines:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    kept = path.read_bytes()
    kept = kept[: kept.rfind(b"\n") + 1]
    assert lines <= kept.count(b"\n") < 48  # every batch was written when it was done
    with open(path, "ab") as file:
        file.write(b'{"task": "toy", "id": "11", "samp')  # the line that death cut off
    assert evaluate(policy, tmp_path) == whole[0]
    assert path.read_bytes().startswith(kept)  # what was done was not done again
    assert path.read_bytes().count(b"\n") == 48
    texts = {key: row["response"] for key, row in samples(tmp_path).items()}
    assert texts == {key: row["response"] for key, row in whole[1].items()}


def test_responses_whose_sandbox_failed_are_sampled_anew(whole, policy, tmp_path):
    (tmp_path / "eval").mkdir()
    rows = list(whole[1].values())
    rows[5] = rows[5] | {"reason": "sandbox_error", "reward": 0.0}
    path = tmp_path / "eval/samples.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert evaluate(policy, tmp_path) == whole[0]
    assert path.read_bytes().count(b"\n") == 49


LATE = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
import eval
read_samples = eval.read_samples
def late(*args):
    time.sleep(2 * int(os.environ["RANK"]))
    return read_samples(*args)
eval.read_samples = late
eval.main()
"""


def test_two_ranks_give_the_results_of_one(whole, policy, tmp_path):
    """Also when one reads what is done seconds after the other: none has written by then."""
    (tmp_path / "late.py").write_text(LATE)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    process = start(*argv(policy, tmp_path), script=torchrun, program=tmp_path / "late.py")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    results = json.loads((tmp_path / "eval/results.json").read_text())["benchmarks"]["toy"]
    assert results == whole[0]
    assert sorted(p.name for p in (tmp_path / "eval").iterdir()) == [
        "results.json", "results.md", "samples.jsonl",
    ]  # fmt: skip
    assert (tmp_path / "eval/samples.jsonl").read_bytes().count(b"\n") == 48  # the work was split
    assert samples(tmp_path).keys() == whole[1].keys()


def test_what_a_dead_rank_had_written_is_not_lost(whole, policy, tmp_path, monkeypatch):
    (tmp_path / "eval").mkdir()
    lines = [json.dumps(row) + "\n" for row in whole[1].values()]
    (tmp_path / "eval/samples.jsonl").write_text("".join(lines[:20]) + lines[20][:9])
    (tmp_path / "eval/samples.rank1.jsonl").write_text("".join(lines[20:]) + '{"torn')
    monkeypatch.setattr(evaluation, "sample_and_score", None)
    assert evaluate(policy, tmp_path) == whole[0]
    assert not (tmp_path / "eval/samples.rank1.jsonl").exists()


def test_what_is_done_is_read_without_keeping_the_texts(tmp_path):
    place = {key: 0 for key in evaluation.PLACE} | {"settings": "s", "response": "x" * 10_000}
    write_jsonl(tmp_path / "samples.jsonl", [place | {"sample": i} for i in range(500)])
    tracemalloc.start()
    assert len(evaluation.read_samples(tmp_path, "s")) == 500
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000  # the file has 5 MB; evaluations write gigabytes


class Bytes:
    """A tokenizer whose tokens are bytes: it can say any program."""

    def apply_chat_template(self, messages, **_):
        return [byte for message in messages for byte in message["content"].encode()]

    def decode(self, ids, **_):
        return bytes(ids.tolist()).decode()


class Programmer:
    """An engine that answers each prompt with a right program, then wrong, late and no program."""

    answers = ("print(int(input())**2)", "print(0)", "while True: pass", None)

    def generate(self, prompts, n, sampling, seeds, progress=""):
        responses = []
        for i, prompt in enumerate(prompts):
            assert b"### Question:\nsolve" in bytes(prompt)
            program = self.answers[i % 4]
            text = f"```python\n{program}\n```" if program else "I give up"
            ids = torch.tensor(list(text.encode()))
            responses.append(grpo_ba.Response(torch.tensor(prompt), ids, ids.float(), "stop"))
        return responses


def test_livecodebench_programs_are_sampled_and_run(tmp_path, monkeypatch):
    names = {"model_type": "qwen3", "max_position_embeddings": 40_960}
    config = type("Config", (), {**names, "_commit_hash": None})
    monkeypatch.setattr(evaluation, "load_from_hub", lambda *_: config)
    monkeypatch.setattr(evaluation, "load_tokenizer", lambda _: Bytes())
    for name in ("stop_token_ids", "load_policy"):
        monkeypatch.setattr(evaluation, name, lambda *_: None)
    monkeypatch.setattr(evaluation, "TransformersEngine", lambda *_: Programmer())
    monkeypatch.setattr(evaluation, "Verifier", lambda: Verifier(code_timeout=1.0))
    rows = [lcb_row(name, STDIN) for name in ("a", "b")]
    write_jsonl(tmp_path / "livecodebench.jsonl", rows)
    base = ["--model", "coder", "--benchmarks", "livecodebench", "--data", tmp_path]
    evaluation.evaluate(evaluation.parse([str(a) for a in [*base, "--out", tmp_path]]))
    results = json.loads((tmp_path / "eval/results.json").read_text())["benchmarks"]
    summary = results["livecodebench"]
    assert (summary["problems"], summary["samples"], summary["score"]) == (2, 4, 0.25)
    assert (summary["no_answer"], summary["sandbox_errors"]) == (0.25, 0)
    reasons = [row["reason"] for row in samples(tmp_path).values()]
    assert reasons == ["correct", "wrong", "timeout", "no_answer"] * 2
    assert {row["gold"][:6] for row in samples(tmp_path).values()} == {"tests "}


def test_each_model_family_is_sampled_as_its_card_says(tmp_path):
    class Config:
        model_type, max_position_embeddings = "qwen3", 40_960

    def chosen(model="Qwen/Qwen3-1.7B", *more):
        options = evaluation.parse(["--model", str(model), *more])
        s, instruction, thinking = evaluation.choose_preset(options, Config)
        return s.temperature, s.top_p, s.top_k, s.min_p, s.max_tokens, instruction, thinking

    assert chosen() == (0.6, 0.95, 20, 0.0, 32_768, "suffix", True)
    plain = chosen("Qwen/Qwen3-1.7B", "--preset", "qwen3-non-thinking")
    assert plain == (0.7, 0.8, 20, 0.0, 32_768, "suffix", False)
    trained = {"aggregation": "token", "model": "Qwen/Qwen3-1.7B", "instruction": "none"}
    (tmp_path / "config.json").write_text(json.dumps(trained | {"enable_thinking": False}))
    assert chosen(tmp_path / "checkpoint") == (0.7, 0.8, 20, 0.0, 32_768, "none", False)
    Config.model_type, Config.max_position_embeddings = "qwen2", 4096
    math = chosen("Qwen/Qwen2.5-Math-7B")
    assert math == (0.6, 0.95, -1, 0.0, 3072, "system", False)
    assert chosen("org/other")[3:] == (0.0, 3072, "suffix", False)
    assert chosen("org/other", "--temperature", "1", "--max_tokens", "7")[:5] == (1, 0.95, -1, 0, 7)


def test_models_that_cannot_be_asked_are_one_sentence(policy, tmp_path, capsys):
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in policy.iterdir():
        if file.name != "chat_template.jinja":
            (bare / file.name).write_bytes(file.read_bytes())
    for model, more, said in (
        (bare, (), "chat template"),
        ("no/model", (), "no/model"),  # conftest.py: the hub is out of reach
        (policy, ("--benchmarks", "aime24"), "HuggingFaceH4/aime_2024"),
        (policy, ("--benchmarks", "aime24", "--data", tmp_path), "aime24.jsonl is missing"),
        (policy, ("--max_tokens", 510), "context of 512"),
    ):
        with pytest.raises(SystemExit) as caught:
            evaluate(model, tmp_path, *more)
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert caught.value.code == 2
        assert said in line
