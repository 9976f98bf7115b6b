"""eval.py end to end on the toy task: sampling, files, kill and resume, several ranks."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_eval import lcb_row, write_jsonl

import eval as evaluation
import grpo_ba
from verify import Verifier

ROOT = Path(__file__).resolve().parents[1]
TOY = ROOT / ".assets/toy-guesser"  # short responses, a third of them right
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def argv(out, flags):
    base = f"--model {TOY} --benchmarks {TOY}/eval.jsonl --preset toy --limit 12 --samples 4"
    return f"{base} --max_tokens 40 --out {out} {flags}".split()


def start(out, flags="", script=()):
    command = [sys.executable, *script, str(ROOT / "eval.py"), *argv(out, flags)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, **pipes)


def evaluate(out, flags=""):
    evaluation.evaluate(evaluation.parse(argv(out, flags)))
    return read(out)


def read(out):
    """(figures, {sample: row}, number of rows)"""
    (figures,) = json.loads((out / "eval/results.json").read_text()).values()
    rows = list(map(json.loads, (out / "eval/samples.jsonl").open()))
    figures.pop("settings")
    return figures, {(row["problem"], row["sample"]): row for row in rows}, len(rows)


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The folder of an uninterrupted evaluation, which others must equal."""
    out = tmp_path_factory.mktemp("whole")
    evaluate(out)
    return out


@pytest.fixture
def copy(whole, tmp_path):
    shutil.copytree(whole / "eval", tmp_path / "eval")
    return tmp_path


def test_an_evaluation_scores_the_toy_and_leaves_its_files(whole):
    figures, rows, count = read(whole)
    assert (figures["problems"], figures["k"], count) == (12, 4, 48)
    assert figures["avg@k"] == pytest.approx(100 * sum(r["reward"] for r in rows.values()) / 48)
    assert 0 < figures["avg@k"] < 100  # else the tests below could not tell samples apart
    assert all(row["tokens"] == 40 for row in rows.values() if row["truncated"])
    assert f"{figures['avg@k']:.1f}" in (whole / "eval/results.md").read_text()
    assert len({(row["problem"], row["response"]) for row in rows.values()}) > 24


def test_only_samples_of_the_same_weights_settings_and_golds_are_reused(whole, copy, monkeypatch):
    asked, real = [], evaluation.load_problems

    def ask(flags=""):
        with pytest.raises(KeyboardInterrupt):
            evaluate(copy, f"--batch_size 99 {flags}")
        return asked[-1]

    def generate(self, prompts, *_, **sampling):
        asked.append(len(prompts))
        raise KeyboardInterrupt

    monkeypatch.setattr(grpo_ba.TransformersEngine, "generate", generate)
    assert evaluate(copy) == read(whole)
    moved = shutil.copytree(TOY, copy / "moved")  # the times are kept
    assert evaluate(copy, f"--model {moved}") == read(whole)
    trained = shutil.copytree(TOY, copy / "trained", copy_function=shutil.copyfile)
    assert ask(f"--model {trained}") == ask("--temperature 0.5") == ask("--max_tokens 30") == 48
    assert ask("--samples 6") == 24  # they are only added
    write_jsonl(copy / "aime24.jsonl", [{"problem": "p", "answer": "1"}])
    assert ask(f"--benchmarks aime24 --data {copy} --samples 0") == 32
    vllm = SimpleNamespace(generate=lambda *x, **sampling: generate(None, *x))
    monkeypatch.setattr(grpo_ba, "VLLMEngine", lambda *_: vllm)
    (copy / "config.json").write_text('{"instruction": "suffix"}')  # how moved was trained
    assert ask(f"--model {moved}") == ask("--engine vllm") == 48
    change = lambda problems: [problems[0] | {"answer": ["9"]}, *problems[1:]]
    monkeypatch.setattr(evaluation, "load_problems", lambda *args: change(real(*args)))
    assert ask() == 4


def test_an_evaluation_killed_in_the_middle_resumes_to_the_same_results(whole, tmp_path):
    process = start(tmp_path, "--batch_size 4")
    path, deadline = tmp_path / "eval/samples.jsonl", time.monotonic() + 120
    while not path.exists() or path.read_bytes().count(b"\n") < 20:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    kept = path.read_bytes()[: path.read_bytes().rfind(b"\n") + 1]
    assert 20 <= kept.count(b"\n") < 48  # every batch was written when it was done
    path.write_bytes(kept + b'{"task": "toy", "problem": "11", "samp')  # cut off
    assert evaluate(tmp_path) == read(whole)
    assert path.read_bytes().startswith(kept)


def test_responses_whose_sandbox_failed_are_sampled_anew(whole, copy):
    path = copy / "eval/samples.jsonl"
    failed = path.read_text().count('"wrong"')
    path.write_text(path.read_text().replace('"wrong"', '"sandbox_error"'))
    assert failed > 0 and evaluate(copy) == (*read(whole)[:2], 48 + failed)


def test_two_ranks_give_the_results_of_one(whole, copy):
    path = copy / "eval/samples.jsonl"
    path.write_text("".join(path.open().readlines()[:15]))
    process = start(copy, "--batch_size 8", TORCHRUN)  # 16, 16, and 1: a rank has nothing to do
    assert process.wait(timeout=300) == 0, process.stdout.read()
    assert read(copy) == read(whole)


class Programmer:
    """A tokenizer of bytes, and an engine that writes a right, a wrong, a late and no program."""

    apply_chat_template = lambda self, messages, **_: list(messages[1]["content"].encode())
    decode = lambda self, ids, **_: bytes(ids.tolist()).decode()

    def generate(self, prompts, n, seeds, **sampling):
        assert all(bytes(prompt).startswith(b"### Question:\nsolve") for prompt in prompts)
        answers = "print(int(input())**2)", "print(0)", "while True: pass"
        texts = [*(f"```python\n{answer}\n```" for answer in answers), "I give up"]
        ids = [torch.tensor(list(texts[i % 4].encode())) for i in range(len(prompts))]
        return [grpo_ba.Response(torch.tensor([0]), x, x.float()) for x in ids]


def test_livecodebench_programs_are_sampled_and_run(tmp_path, monkeypatch):
    config = SimpleNamespace(model_type="x", max_position_embeddings=9)
    for name, made in (("AutoConfig", config), ("AutoTokenizer", Programmer())):
        source = SimpleNamespace(from_pretrained=lambda _, made=made: made)
        monkeypatch.setattr(evaluation.hf, name, source)
    made = {"stop_token_ids": [], "load_policy": None, "TransformersEngine": Programmer()}
    for name in made:
        monkeypatch.setattr(grpo_ba, name, lambda *_, name=name: made[name])
    monkeypatch.setattr(evaluation, "Verifier", lambda **k: Verifier(code_timeout=1.0, **k))
    write_jsonl(tmp_path / "livecodebench.jsonl", [lcb_row(name) for name in ("a", "b")])
    flags = f"--benchmarks livecodebench --data {tmp_path} --unsafe_code"
    figures, rows, _ = evaluate(tmp_path, flags)
    assert [row["reason"] for row in rows.values()][:3] == ["correct", "wrong", "timeout"]
    assert (figures["problems"], figures["k"], figures["avg@k"]) == (2, 4, 25)
    assert (figures["no answer"], figures["sandbox errors"]) == (25, 0)


@pytest.mark.parametrize(("flags", "said"), [
    ("--model no/model", "connect"), ("--benchmarks aime24", "HuggingFaceH4/aime_2024"),
    ("--benchmarks aime24 --data .", "aime24.jsonl"), ("--benchmarks none.jsonl", "none.jsonl"),
    ("--benchmarks livecodebench --data .", "no sandbox"),
])  # fmt: skip
def test_what_is_not_there_is_one_sentence(flags, said, tmp_path, mistake, monkeypatch):
    write_jsonl(tmp_path / "livecodebench.jsonl", [lcb_row("a")])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluation, "require_sandbox", lambda _: evaluation.fail("no sandbox"))
    assert said in mistake(grpo_ba.run_main, lambda: evaluate(tmp_path, flags))
