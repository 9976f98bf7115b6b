"""Whole runs of grpo_ba.py: learning, files, crashes, Ctrl-C, presets, and a user's mistakes."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import matplotlib.image
import pytest
import torch
import transformers
from safetensors.torch import load_file

import grpo_ba
from verify import Verdict, Verifier, verify_math

ROOT = Path(__file__).resolve().parents[1]
draw_curves = grpo_ba.draw_curves
SMALL = "--prompts_per_step 4 --eval_problems 8 --max_response_tokens 60 --temperature 1.5"
RIGHT, WRONG = Verdict(1.0, "correct"), Verdict(0.0, "wrong")


def is_even(response, problem):
    """Gives the groups of any policy a spread."""
    return WRONG if sum(map(ord, response)) % 2 else RIGHT


def in_process(judge):
    """A Verifier without worker processes, which take seconds to start."""
    return SimpleNamespace(score=lambda *args: [judge(*pair) for pair in zip(*args, strict=True)])


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """An empty working directory; returns what trains the toy as `grpo_ba.py FLAGS` would, but in
    this process and without a picture, which takes a second, and returns the run's folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(grpo_ba, "draw_curves", lambda run: None)
    handler = signal.getsignal(signal.SIGINT)

    def run(flags, judge=lambda r, problem: verify_math(r, problem["answer"])):
        config = grpo_ba.parse(["--preset", "toy", *flags.split()])
        return tmp_path / grpo_ba.train(config, in_process(judge))

    yield run
    signal.signal(signal.SIGINT, handler)


def command(monkeypatch, flags):
    """All of `grpo_ba.py --preset toy FLAGS`, in this process."""
    monkeypatch.setattr(sys, "argv", ["grpo_ba.py", "--preset", "toy", *flags.split()])
    monkeypatch.setattr(grpo_ba, "Verifier", lambda **_: nullcontext(in_process(is_even)))
    grpo_ba.run_main(grpo_ba.main)


def read_lines(path):
    """Of a .jsonl file that must hold JSON alone: no NaN, no torn line."""
    refuse = {}.__getitem__
    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def column(run, key):
    return [line[key] for line in read_lines(run / "metrics.jsonl")]


def read_weights(folder):
    return {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}


assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)  # bit for bit, in nested dicts


def assert_same_run(*runs, checkpoints=1):
    """The same metrics (times aside), samples, parameters and optimizer; no leavings."""
    logs = []
    for run in runs:
        lines = [*read_lines(run / "metrics.jsonl"), *read_lines(run / "samples.jsonl")]
        logs.append([{k: line[k] for k in line if "seconds" not in k} for line in lines])
        assert not [*run.glob("*.tmp")] and len([*run.glob("checkpoint-*")]) <= checkpoints
    assert logs[0] == logs[1]
    assert_equal(*(read_weights(run / "checkpoint") for run in runs))
    assert_equal(*(torch.load(run / "checkpoint/trainer.pt") for run in runs))


# ---------- Learning


@pytest.mark.parametrize("rule", grpo_ba.AGGREGATIONS)
def test_the_toy_learns_under_each_rule(workspace, rule):
    settings = "--steps 6 --lr 4e-4 --max_response_tokens 60 --eval_problems 48 --eval_every 100"
    run = workspace(f"--aggregation {rule} {settings}")
    first, *_, last = column(run, "eval_accuracy")
    assert first < 0.15 and last > 0.4
    assert column(run, "reward")[-1] > column(run, "reward")[0] + 0.3


def test_a_reward_of_zero_for_everything_changes_nothing(workspace, toy):
    run = workspace(f"{SMALL} --steps 2", lambda *_: WRONG)
    assert_equal(read_weights(toy), read_weights(run / "checkpoint"))
    for key, value in {"reward": 0, "zero_spread": 1, "net_advantage": 0, "skipped": 2}.items():
        assert column(run, key) == [value, value]


def test_a_group_that_the_scorer_failed_on_is_left_out_and_counted(workspace):
    """As if its rewards had no spread: a failure taken for a wrong answer would teach."""

    def train(fourth):
        others = itertools.cycle([RIGHT, WRONG])
        verdicts = itertools.chain([RIGHT] * 3, [fourth], [RIGHT] * 4, others)
        return workspace(f"{SMALL} --steps 1 --eval_data=", lambda *_: next(verdicts))

    sandbox_error = Verdict(0.0, "sandbox_error")
    failed, alike = train(sandbox_error), train(RIGHT)
    assert_equal(*(read_weights(run / "checkpoint") for run in (failed, alike)))
    assert column(failed, "unscored") == [1 / 32] and column(failed, "zero_spread") == [1 / 4]
    assert column(failed, "reward") == [pytest.approx(19 / 31)]  # of those known
    assert column(failed, "grad_norm")[0] > 0
    run = workspace(f"{SMALL} --steps 1", lambda *_: sandbox_error)
    assert column(run, "reward") == [None] and column(run, "skipped") == [2]


@pytest.mark.skipif(not shutil.which("bwrap"), reason="programs are run by bubblewrap")
def test_training_on_code_is_scored_by_running_it(workspace, monkeypatch):
    test = {"input": "2\n3", "output": "5", "testtype": "functional"}
    row = {"problem": "a2b3?", "tests": [test], "func_name": "add"}
    Path("code.jsonl").write_text(json.dumps(row))
    bodies = itertools.cycle(["sum", "max"])
    program = "```python\ndef add(*numbers):\n    return {}(numbers)\n```"
    monkeypatch.setattr(grpo_ba, "response_text", lambda *_: program.format(next(bodies)))
    flags = "--preset toy --train_data code.jsonl --eval_data= --prompts_per_step 2 --steps 1"
    with Verifier(num_workers=1) as verifier:
        run = grpo_ba.train(grpo_ba.parse(flags.split()), verifier)
    assert column(run, "reward") == [0.5] and column(run, "zero_spread") == [0]


def test_every_pass_over_the_data_takes_each_problem_once_in_a_new_order():
    problems = [{"problem": i} for i in range(10)]
    config = grpo_ba.Config(prompts_per_step=4, seed=5)
    steps = [grpo_ba.step_problems(problems, config, step) for step in range(1, 11)]
    stream = [p["problem"] for batch in steps for p in batch]
    passes = {tuple(stream[i : i + 10]) for i in range(0, 40, 10)}
    assert len(passes) == 4 and all(sorted(one) == [*range(10)] for one in passes)
    assert steps[6] == grpo_ba.step_problems(problems, config, 7)  # whatever came before
    config.seed = 6
    assert steps[0] != grpo_ba.step_problems(problems, config, 1)


# ---------- Files

# What is null where no group has both signs, and what is where nothing is trained on.
SPREAD = {"length_pos", "length_neg", "length_gap", "weight_spread"}
TRAINED = {"approx_kl", "clip_low", "clip_high", "mismatch_kl", "mismatch_max", "tis_truncated"}
KEYS = SPREAD | TRAINED | {
    "step", "reward", "eval_accuracy", "eval_step", "length", "length_cv", "zero_spread",
    "truncated", "unscored", "entropy", "grad_norm", "lr", "skipped", "padding", "tokens",
    "net_advantage", "seconds_rollout", "seconds_score", "seconds_update", "seconds_eval",
}  # fmt: skip


def test_the_files_of_a_run(workspace, toy, monkeypatch):
    wandb = Mock()
    wandb.__spec__ = ModuleSpec("wandb", None)  # transformers looks for it
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(grpo_ba, "draw_curves", draw_curves)
    run = workspace(f"{SMALL} --steps 5 --eval_every 2 --name here --wandb 1")
    files = {"checkpoint", "config.json", "curves.png", "metrics.jsonl", "samples.jsonl"}
    files.add("checkpoint-5")
    assert {path.name for path in run.iterdir()} == files

    assert column(run, "step") == [1, 2, 3, 4, 5] and wandb.log.call_count == 5
    assert wandb.finish.call_count == 1
    assert column(run, "eval_step") == [0, None, 2, None, 5]
    assert column(run, "lr") == [2e-4] * 5
    for line in read_lines(run / "metrics.jsonl"):
        assert line.keys() == KEYS
        null = {key for key in line if line[key] is None} - {"eval_accuracy", "eval_step"}
        assert null == (SPREAD | TRAINED if line["zero_spread"] == 1 else set())
        assert (line["eval_accuracy"] is None) == (line["eval_step"] is None)
        assert line["tokens"] == 32 * line["length"]
    answers = {row["problem"]: [row["answer"]] for row in read_lines(toy / "train.jsonl")}
    samples = read_lines(run / "samples.jsonl")  # whole groups of each step
    assert {row["step"] for row in samples} == {1, 2, 3, 4, 5} and len(samples) % (5 * 8) == 0
    for i, row in enumerate(samples):
        assert row["problem"] == samples[i - i % 8]["problem"]
        assert row["answer"] == answers[row["problem"]]
        assert row["reward"] == verify_math(row["text"], row["answer"]).reward

    model = transformers.AutoModelForCausalLM.from_pretrained(run / "checkpoint")
    assert model.dtype == torch.float32
    assert not torch.equal(read_weights(toy)["model.norm.weight"], model.model.norm.weight)
    assert transformers.AutoTokenizer.from_pretrained(run / "checkpoint").eos_token == "<eos>"
    image = matplotlib.image.imread(run / "curves.png")[..., :3]
    assert min(image.shape[:2]) > 300  # neither small nor blank
    assert 0.005 < (abs(image - image[0, 0]).max(axis=2) > 0.1).mean() < 0.9


def test_a_run_ends_with_a_score_of_the_policy_that_it_saved_and_makes_none_in_vain(workspace):
    judge, flags = Mock(side_effect=is_even), f"{SMALL} --steps 3 --eval_every 2 --eval_problems 60"
    run = workspace(flags, judge)
    problems = [call.args[1]["problem"] for call in judge.call_args_list]
    assert len(problems) == 60 + 3 * 32 + 60 and problems[:60] == problems[-60:]
    first, between, last = column(run, "eval_accuracy")
    assert between is None and first != last
    again = workspace(f"{flags} --model {run}/checkpoint", is_even)
    assert column(again, "eval_accuracy")[0] == last


def test_all_rules_start_alike_and_end_in_a_table(monkeypatch, workspace, capsys):
    command(monkeypatch, f"{SMALL} --aggregation all --steps 2 --eval_every 1")
    runs = [Path(f"runs/toy-{rule}") for rule in grpo_ba.AGGREGATIONS]
    *table, drawn_by = capsys.readouterr().out.splitlines()[-4:]
    for line, rule, run in zip(table, grpo_ba.AGGREGATIONS, runs):
        scores = column(run, "eval_accuracy")
        shown = f"accuracy: best {max(scores):.3f}, last {scores[-1]:.3f}"
        assert line.split() == [f"toy-{rule}", *shown.split()]
    assert drawn_by.endswith("python eval.py --compare " + " ".join(map(str, runs)))
    for key in ("reward", "tokens", "eval_accuracy", "length_gap"):
        assert len({column(run, key)[0] for run in runs}) == 1
    assert len({column(run, "weight_spread")[0] for run in runs}) > 1


# ---------- Crashes, Ctrl-C and resuming


class Crash(BaseException):
    """A stand-in for SIGKILL: nothing in the program catches it."""


def crash_at(monkeypatch, call):
    """The `call`-th file operation of a run never returns; if `call` is even it does not even begin.
    Returns the names of the calls."""
    calls = []

    def watched(function, *args, **kwargs):
        calls.append(function.__name__)
        crashes = len(calls) == call
        if call % 2 or not crashes:
            function(*args, **kwargs)
        if crashes:
            raise Crash

    for module, names in ((os, ("replace", "symlink")), (shutil, ("rmtree",)), (torch, ("save",)),
                          (grpo_ba, ("append_jsonl", "save"))):  # fmt: skip
        for name in names:
            monkeypatch.setattr(module, name, partial(watched, getattr(module, name)))
    return calls


def test_a_crash_at_any_file_operation_is_made_good(workspace, monkeypatch, tmp_path):
    sizes = "--prompts_per_step 2 --group_size 6 --max_response_tokens 16 --eval_data="
    flags = f"{SMALL} {sizes} --steps 2 --save_every 1 --name "
    with monkeypatch.context() as patch:
        calls = crash_at(patch, 0)
        whole = workspace(flags + "whole", is_even)
    assert len(calls) >= 16 and len({*calls}) == 5 and min(column(whole, "grad_norm")) > 0
    for call in range(2, len(calls) + 1):  # before the first, there is no run
        with monkeypatch.context() as patch, pytest.raises(Crash):
            crash_at(patch, call)
            workspace(f"{flags}{call}", is_even)
        run = tmp_path / f"runs/{call}"
        if call % 3 == 0:  # and a line that was being written
            log = run / "metrics.jsonl"
            log.write_text(log.read_text() + '{"step": 1, "rew')
        assert workspace(f"--resume {run}", is_even) == run
        # Only a crash between the last link and its clean-up leaves the checkpoint before.
        assert_same_run(run, whole, checkpoints=1 + (call >= len(calls) - 1))


def test_a_resumed_run_keeps_its_settings_and_flags_given_win(workspace):
    flags = f"{SMALL} --eval_every 1 --max_response_tokens 20 --name "
    run, longer = (workspace(f"{flags}{steps} --steps {steps}", is_even) for steps in (2, 3))
    workspace(f"--resume {run} --steps 3 --lr 5e-4", is_even)
    assert column(run, "tokens") == column(longer, "tokens")
    assert column(run, "eval_step") == [0, 2, 3] and column(longer, "eval_step") == [0, 1, 3]
    state = torch.load(run / "checkpoint/trainer.pt")["optimizer"]
    assert state["param_groups"][0]["lr"] == 5e-4


def interrupt_at(*calls):
    """Ctrl-C while these responses are scored: 8 of the evaluation, then 32 of each step."""
    number = itertools.count()

    def judge(*response):
        if next(number) in calls:
            signal.raise_signal(signal.SIGINT)
        return is_even(*response)

    return judge


def test_ctrl_c_ends_the_step_saves_and_says_how_to_go_on(workspace, mistake, tmp_path):
    whole, run = workspace(f"{SMALL} --steps 4 --name whole", is_even), tmp_path / "runs/cut"
    said = mistake(workspace, f"{SMALL} --steps 4 --name cut", interrupt_at(50))
    assert "go on with --resume runs/cut" in said
    assert column(run, "step") == [1, 2]
    assert torch.load(run / "checkpoint/trainer.pt")["step"] == 2
    workspace(f"--resume {run}", is_even)
    assert_same_run(run, whole)


def test_a_second_ctrl_c_stops_at_once(workspace, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        workspace(f"{SMALL} --name cut", interrupt_at(50, 51))
    assert column(tmp_path / "runs/cut", "step") == [1]


def test_kills_and_ctrl_c_leave_no_trace(workspace, tmp_path, monkeypatch):
    """The real command with its worker processes, to which a terminal sends Ctrl-C as well."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    flags = f"{SMALL} --steps 11 --save_every 3 --eval_every 5 --name"
    whole, run = workspace(f"{flags} whole"), tmp_path / "runs/cut"
    flags, log, done = f"--preset toy {flags} cut", run / "metrics.jsonl", 0
    for sent, status, delay in ((9, -9, 0.3), (signal.SIGINT, 2, 0.1), (9, -9, 0.2)):
        started, command = time.time(), [sys.executable, ROOT / "grpo_ba.py", *flags.split()]
        pipe = {"stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, start_new_session=True, **pipe)
        while len([*grpo_ba.read_jsonl(log)]) <= done or log.stat().st_mtime < started:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.01)  # until the first step after the last checkpoint
        time.sleep(delay)
        os.killpg(process.pid, sent)
        errors = process.communicate()[1]
        assert process.returncode == status, errors
        assert errors.count("--resume") == (sent != 9) and "Traceback" not in errors
        saved, flags = run / "checkpoint/trainer.pt", "--resume runs/cut"
        done = torch.load(saved)["step"] if saved.exists() else 0
    workspace(flags)
    assert_same_run(run, whole)


# ---------- Models, presets and flags


def test_dropout_does_not_make_two_policies_of_one(tiny_qwen3, tmp_path):
    model = tiny_qwen3(dtype=torch.float32)
    model.config.attention_dropout = 0.5
    model.save_pretrained(tmp_path)
    model, ids = grpo_ba.load_policy(str(tmp_path), "cpu").train(), torch.arange(10)[None]
    assert torch.equal(model(ids).logits, model(ids).logits)


MODELS = {"qwen3-1.7b": ("Qwen/Qwen3-1.7B", 8192, "suffix"),
          "qwen2.5-math-7b": ("Qwen/Qwen2.5-Math-7B", 3072, "system")}  # fmt: skip
DATA = {"dapo": "open-r1/DAPO-Math-17k-Processed:all",
        "polaris": "POLARIS-Project/Polaris-Dataset-53K"}  # fmt: skip


@pytest.mark.parametrize(("model", "data"), itertools.product(MODELS, DATA))
def test_the_papers_settings_are_presets_and_later_flags_win(model, data):
    preset = ["--preset", f"{model}-{data}"]
    c = grpo_ba.parse(preset)
    assert (c.model, c.max_response_tokens, c.instruction) == MODELS[model]
    assert c.train_data == DATA[data] and c.eval_data.startswith("HuggingFaceH4/MATH-500,")
    assert (c.prompts_per_step, c.group_size, c.minibatches, c.lr) == (128, 8, 4, 1e-6)
    assert (c.clip_low, c.clip_high, c.temperature, c.normalize_std) == (0.2, 0.28, 1.0, True)
    c = grpo_ba.parse([*preset, "--lr=3e-6", "--eval-data=x", "--gradient_checkpointing=no"])
    assert (c.lr, c.eval_data, c.gradient_checkpointing, c.minibatches) == (3e-6, "x", False, 4)


@pytest.mark.parametrize(("flags", "cuda", "model", "preset"), [
    ("", False, grpo_ba.PRESETS["toy"]["model"], "toy"), ("", True, MODELS["qwen3-1.7b"][0], ""),
    ("--model x --tis_cap 0", False, "x", ""),
    ("--preset toy", True, grpo_ba.PRESETS["toy"]["model"], "toy"),
])  # fmt: skip
def test_without_a_gpu_and_a_model_it_is_the_toy(flags, cuda, model, preset, monkeypatch):
    monkeypatch.setattr(grpo_ba, "CUDA", cuda)
    c = grpo_ba.parse(flags.split())
    assert (c.model, c.preset, c.prompts_per_step) == (model, preset, 8 if preset else 128)


def test_a_gpu_preset_trains_a_small_model_with_its_vocabulary(workspace, toy, tiny_qwen3):
    tiny_qwen3(vocab=151_936).save_pretrained("model")  # most ids are none of the tokenizer's
    transformers.AutoTokenizer.from_pretrained(toy).save_pretrained("model")
    verdicts = itertools.cycle([RIGHT, WRONG, WRONG])
    data = f"--train_data {toy}/train.jsonl --eval_data= --instruction none --engine transformers"
    sizes = "--model model --steps 2 --prompts_per_step 4 --group_size 3 --max_response_tokens 6"
    run = workspace(f"--preset qwen3-1.7b-dapo {data} {sizes}", lambda *_: next(verdicts))
    assert min(column(run, "grad_norm")) > 0 and max(column(run, "mismatch_max")) < 1e-3
    assert min(column(run, "length")) == 6  # no stop token among so many
    assert column(run, "truncated") == [1, 1]


def test_help_has_a_line_for_every_field(capsys):
    pytest.raises(SystemExit, grpo_ba.parse, ["--help"])
    text = capsys.readouterr().out
    assert all(f"--{name}" in text for name in grpo_ba.Config.__dataclass_fields__)


MISTAKES = {  # flags -> what the sentence must name
    "--aggregation mean": "'mean' (choose from",
    "--agregation token": "--agregation token",
    "--steps 0": "--steps 0: must be",
    "--lr nan": "--lr nan: must be",
    "--preset tiny": "--preset: invalid choice: 'tiny' (choose from ",
    "--prompts_per_step 7": "--prompts_per_step 7: must be",
    "--aggregation all --resume old": "--aggregation all: starts new runs",
    "--resume nowhere": "nowhere",
    "--train_data no.jsonl": "no.jsonl",
    "--train_data no/data": "no/data",
    "--train_data torn.jsonl": "data torn.jsonl:",
    "--train_data list.jsonl": "data list.jsonl:",
    "--train_data other.jsonl": "data other.jsonl: no row with problem and answer",
    "--model nowhere": "",  # transformers' own words
    "--engine vllm": "vllm",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_a_mistake_is_named_in_one_sentence_and_leaves_no_run(
    flags, mistake, monkeypatch, workspace
):
    for name, text in {"torn": '{"prob', "list": "[1]", "other": '{"text": "1?"}'}.items():
        Path(f"{name}.jsonl").write_text(text)
    Path("old").mkdir()
    Path("old/config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "vllm", None)  # not installed
    line = mistake(command, monkeypatch, flags)
    assert line.startswith("grpo_ba.py: ") and MISTAKES[flags] in line
    assert not Path("runs").exists()


def test_a_full_gpu_is_one_sentence(mistake, monkeypatch):
    monkeypatch.setattr(grpo_ba, "train", Mock(side_effect=torch.OutOfMemoryError))
    assert "lower --micro_batch_tokens" in mistake(command, monkeypatch, "")
