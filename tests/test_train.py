"""Whole runs of grpo_ba.py with the toy policy: learning, files, crashes, Ctrl-C, user's mistakes."""

import itertools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import pytest
import torch
import transformers
from safetensors.torch import load_file

import eval as evaluation
import grpo_ba
import verify
from grpo_ba import AGGREGATIONS, policy_loss

ROOT = Path(__file__).resolve().parents[1]
RULES = list(AGGREGATIONS)
WEIGHTS = "checkpoint/model.safetensors"
SMALL = ("--prompts_per_step", 4, "--max_response_tokens", 60, "--lr", 5e-4, "--eval_problems", 8)


def read_lines(path):
    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def read_metrics(run):
    return read_lines(run / "metrics.jsonl")


def without_times(lines):
    return [{k: v for k, v in line.items() if not k.startswith("seconds_")} for line in lines]


def assert_same_tensors(one, other):
    """Bit for bit, in nested dicts and lists too (an optimizer's state)."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same_tensors(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for pair in zip(one, other):
            assert_same_tensors(*pair)
    else:
        assert one == other


def assert_same_run(one, other):
    """The same metrics (times aside), samples, parameters, optimizer and random states."""
    assert without_times(read_metrics(one)) == without_times(read_metrics(other))
    assert read_lines(one / "samples.jsonl") == read_lines(other / "samples.jsonl")
    assert_same_tensors(*(load_file(run / WEIGHTS) for run in (one, other)))
    assert_same_tensors(*(torch.load(run / "checkpoint/trainer.pt") for run in (one, other)))
    assert not [p for folder in (one, other) for p in folder.glob("*.tmp")]
    assert not [p for folder in (one, other) for p in folder.glob("checkpoint.*")]


def last_line(capsys):
    """What a user's mistake says: one sentence, exit status 2 (see `mistake`)."""
    lines = capsys.readouterr().err.splitlines()
    lines = [line for line in lines if line.strip() and "%|" not in line]  # progress bars
    assert len(lines) == 1, lines
    return lines[0]


def mistake(capsys, action, *args):
    with pytest.raises(SystemExit) as caught:
        action(*args)
    assert caught.value.code == 2
    return last_line(capsys)


# ----------------------------------------------------------------------------------------
# Learning


@pytest.mark.parametrize("rule", RULES)
def test_the_toy_policy_learns_under_each_rule(workspace, rule):
    run = workspace(
        "--aggregation", rule, "--steps", 12, "--eval_every", 100, "--eval_problems", 64,
        "--save_every", 100, "--max_response_tokens", 120,
    )  # fmt: skip
    metrics = read_metrics(run)
    assert metrics[0]["eval_accuracy"] < 0.15
    assert metrics[-1]["eval_accuracy"] > 0.4  # .69 to .83 was seen
    rewards = [line["reward"] for line in metrics]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:2]) / 2 + 0.3


def test_a_reward_of_zero_for_everything_changes_nothing(workspace, toy, monkeypatch):
    zero = verify.Verdict(0.0, "wrong")
    monkeypatch.setattr(grpo_ba.Verifier, "score", lambda self, texts, _: [zero for _ in texts])
    run = workspace(*SMALL, "--steps", 2, "--weight_decay", 0.1)
    start = load_file(toy / "model.safetensors")
    assert_same_tensors(start, load_file(run / WEIGHTS))
    for line in read_metrics(run):
        assert line["reward"] == 0 and line["zero_spread"] == 1 and line["net_advantage"] == 0
        assert line["skipped"] == 2 and line["grad_norm"] == 0  # both minibatches


def test_a_step_with_a_loss_that_is_not_finite_leaves_the_weights_alone(
    workspace, toy, monkeypatch
):
    def nan_loss(logprobs, *others):
        loss, is_clipped = policy_loss(logprobs, *others)
        return loss * math.nan, is_clipped

    monkeypatch.setattr(grpo_ba, "policy_loss", nan_loss)
    run = workspace(*SMALL, "--steps", 2, "--max_response_tokens", 200)
    assert any(line["zero_spread"] < 1 for line in read_metrics(run))  # there was what to learn
    assert [line["skipped"] for line in read_metrics(run)] == [2, 2]
    start = load_file(toy / "model.safetensors")
    assert_same_tensors(start, load_file(run / WEIGHTS))
    assert torch.load(run / "checkpoint/trainer.pt")["optimizer"]["state"] == {}


def test_training_on_code_is_scored_by_running_it(
    tiny_qwen3, ascii_tokenizer, tmp_path, monkeypatch
):
    """Two steps on rows with `tests`, with a stand-in for the engine whose responses are programs:
    half of them right."""
    tokenizer = ascii_tokenizer("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    tokenizer.save_pretrained(tmp_path / "model")
    model = tiny_qwen3(vocab=len(tokenizer), dtype=torch.float32)
    model.config.max_position_embeddings = 2048
    model.save_pretrained(tmp_path / "model")
    stdin = [{"input": "2 3\n", "output": "5\n", "testtype": "stdin"}]
    call = [{"input": "2\n3", "output": "5", "testtype": "functional"}]
    rows = [
        {"problem": "Print the sum of two numbers.", "tests": stdin},
        {"problem": "Write add(a, b).", "tests": call, "func_name": "add"},
    ]
    (tmp_path / "code.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    programs = {
        rows[0]["problem"]: "print({}(map(int, input().split())))",
        rows[1]["problem"]: "def add(a, b):\n    return {}([a, b])",
    }

    class Programmer:
        def __init__(self, *_):
            pass

        def load_weights(self, model):
            pass

        def sleep(self):
            pass

        def generate(self, prompts, n, sampling, seeds, progress=""):
            responses = []
            for prompt in prompts:
                program = programs[tokenizer.decode(prompt)]
                for i in range(n):
                    text = f"```python\n{program.format('max' if i % 2 else 'sum')}\n```"
                    ids = torch.tensor([*tokenizer.encode(text), tokenizer.eos_token_id])
                    logprobs = torch.zeros(len(ids))
                    responses.append(grpo_ba.Response(torch.tensor(prompt), ids, logprobs, "stop"))
            return responses

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(grpo_ba, "TransformersEngine", Programmer)
    argv = "--model model --train_data code.jsonl --steps 2 --prompts_per_step 2 --group_size 4"
    argv = grpo_ba.parse([*argv.split(), "--tis_cap", "0", "--lr", "1e-2"])
    metrics = read_metrics(grpo_ba.train(argv))
    assert [line["reward"] for line in metrics] == [0.5, 0.5]
    assert all(line["zero_spread"] == 0 and line["grad_norm"] > 0 for line in metrics)


def test_every_pass_over_the_data_takes_each_problem_once_in_a_new_order():
    problems = [{"problem": str(i)} for i in range(10)]
    config = grpo_ba.Config(prompts_per_step=4, seed=5)
    steps = [grpo_ba.step_problems(problems, config, step) for step in range(1, 11)]
    assert [p["place"] for batch in steps for p in batch] == [0, 1, 2, 3] * 10
    stream = [p["problem"] for batch in steps for p in batch]
    passes = [stream[i : i + 10] for i in range(0, 40, 10)]
    assert all(sorted(one) == [str(i) for i in range(10)] for one in passes)
    assert len(set(map(tuple, passes))) == 4
    assert steps[6] == grpo_ba.step_problems(problems, config, 7)  # whatever came before
    other = grpo_ba.Config(prompts_per_step=4, seed=6)
    assert steps[0] != grpo_ba.step_problems(problems, other, 1)


# ----------------------------------------------------------------------------------------
# Files

KEYS = (
    "step reward eval_accuracy length length_pos length_neg length_gap length_cv zero_spread "
    "truncated entropy approx_kl clip_low clip_high grad_norm lr skipped tokens seconds_rollout "
    "seconds_score seconds_update seconds_eval net_advantage weight_spread"
)


def test_the_files_of_a_run(workspace, toy):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = workspace(*SMALL, "--steps", 5, "--eval_every", 2, "--name", "here",
                    "--aggregation", "sequence", "--lr_warmup_steps", 4)  # fmt: skip
    assert sorted(p.name for p in run.iterdir()) == [
        ".lock", "checkpoint", "config.json", "curves.png", "metrics.jsonl", "samples.jsonl",
    ]  # fmt: skip
    config = json.loads((run / "config.json").read_text())
    assert config["name"] == "here" and config["aggregation"] == "sequence" and config["steps"] == 5

    metrics = read_metrics(run)
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5]
    nullable = {
        "eval_accuracy",
        "eval_step",
        "mismatch_max",
        "length_pos",
        "length_neg",
        "length_gap",
        "weight_spread",
    }
    # And those of trained tokens, where there are none:
    nullable |= {"entropy", "approx_kl", "clip_low", "clip_high", "mismatch_kl", "tis_truncated"}
    for line in metrics:
        assert set(KEYS.split()) <= line.keys()
        for key, value in line.items():
            assert value is None and key in nullable or isinstance(value, int | float), key
        assert (line["length_gap"] is None) == (line["zero_spread"] == 1)
        assert line["tokens"] == 32 * line["length"]
    # Before every second step, and at the end.
    assert [line["eval_accuracy"] is None for line in metrics] == [False, True, False, True, False]
    assert [line["seconds_eval"] > 0 for line in metrics] == [True, False, True, False, True]
    assert [line["lr"] for line in metrics] == pytest.approx([1.25e-4, 2.5e-4, 3.75e-4, 5e-4, 5e-4])

    samples = read_lines(run / "samples.jsonl")
    assert [group["step"] for group in samples] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    reasons, exact = [], 0
    for group in samples:
        assert len(group["responses"]) == 8 and group["problem"] and group["answer"]
        for response in group["responses"]:
            right = verify.verify_math(response["text"], group["answer"]).reward
            assert response["reward"] == right
            cut = response["finish_reason"] == "length"
            characters = len(response["text"])  # each a token; EOS and unused ids show none
            assert response["length"] >= characters + (not cut)
            exact += response["length"] == characters + (not cut)
            reasons.append(cut)
    assert exact > 0.9 * len(reasons)
    assert 0 < sum(reasons) < len(reasons)  # a limit of 60 tokens cuts some
    assert any(line["truncated"] > 0 for line in metrics)

    model = AutoModelForCausalLM.from_pretrained(run / "checkpoint")
    assert model.dtype == torch.float32
    AutoTokenizer.from_pretrained(run / "checkpoint")
    start = load_file(toy / "model.safetensors")
    assert not torch.equal(start["model.norm.weight"], model.model.norm.weight)  # it has moved
    assert_drawn(run / "curves.png")


def assert_drawn(path):
    """A picture of some size, with axes, text and lines: neither blank nor of one colour."""
    image = matplotlib.image.imread(path)[..., :3]
    height, width, _ = image.shape
    assert height > 300 and width > 400
    pixels = image.reshape(-1, 3)
    ink = (abs(pixels - pixels[0]).max(axis=1) > 0.1).mean()
    assert 0.005 < ink < 0.9
    assert len({tuple(pixel) for pixel in (pixels * 255).astype(int)}) > 20


def user_flags(folder, model):
    """A model and problems of one's own: the toy's, as files. The training file also holds one of
    the held-out problems."""
    train, held_out = grpo_ba.toy_problems("rambler", 8)
    for name, problems in (("train", [*train[:40], held_out[0]]), ("held_out", held_out)):
        rows = [{"problem": p["problem"], "answer": p["answer"]} for p in problems]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--model", model, "--train_data", "train.jsonl", "--eval_data", "held_out.jsonl"]
    return [*flags, "--instruction", "none", "--max_prompt_tokens", 64, *SMALL]


def test_all_rules_are_compared_on_a_model_and_data_of_ones_own(workspace, toy, tmp_path, capsys):
    argv = [*user_flags(tmp_path, toy), "--aggregation", "all", "--steps", 2, "--eval_every", 1]
    grpo_ba.compare(grpo_ba.parse(list(map(str, argv))))
    out = capsys.readouterr().out
    assert "train.jsonl: 41 rows, 40 problems (1 in an evaluation set)" in out
    header, _, *rows = [line for line in out.splitlines() if line.startswith("|")]
    names = [cell.strip() for cell in header.split("|")[1:-1]]
    table = [dict(zip(names, (cell.strip() for cell in row.split("|")[1:-1]))) for row in rows]
    assert [row["rule"] for row in table] == RULES
    for row in table:
        metrics = read_metrics(Path(f"runs/small-{row['rule']}"))
        accuracies = [line["eval_accuracy"] for line in metrics]
        assert float(row["initial"]) == pytest.approx(accuracies[0], abs=6e-4)
        assert float(row["last"]) == pytest.approx(accuracies[-1], abs=6e-4)
        assert float(row["best"]) == pytest.approx(max(accuracies), abs=6e-4)
        net = sum(abs(line["net_advantage"]) for line in metrics) / len(metrics)
        assert float(row["abs(net advantage)"]) == pytest.approx(net, abs=6e-4)
    assert_drawn(tmp_path / "runs/compare.png")
    runs = [Path(f"runs/small-{rule}") for rule in RULES]
    first = [read_metrics(run)[0] for run in runs]  # the same start, data and seeds
    assert len({line["reward"] for line in first}) == len({line["tokens"] for line in first}) == 1
    assert len({line["eval_accuracy"] for line in first}) == 1
    assert_same_tensors(*(read_lines(run / "samples.jsonl")[0] for run in runs[:2]))


def test_the_toy_compares_all_rules_in_both_worlds_with_the_same_seeds(monkeypatch, tmp_path):
    trained = []
    monkeypatch.setattr(grpo_ba, "train", lambda config: trained.append(config) or tmp_path)
    monkeypatch.setattr(evaluation, "rules_table", lambda runs: None)
    monkeypatch.setattr(evaluation, "draw_rules", lambda runs, path: drawn.update(runs))
    drawn = {}
    flags = "--preset toy --aggregation all --toy_seeds 2 --seed 5 --steps 3"
    grpo_ba.compare(grpo_ba.parse(flags.split()))
    runs = {(config.toy_world, config.aggregation, config.seed) for config in trained}
    assert len(trained) == 12
    assert runs == set(itertools.product(("rambler", "guesser"), RULES, (5, 6)))
    assert len({replace(c, toy_world="", aggregation="", seed=0).__repr__() for c in trained}) == 1
    assert {world: {rule: len(seeds) for rule, seeds in rules.items()} for world, rules in
            drawn.items()} == dict.fromkeys(("rambler", "guesser"), dict.fromkeys(RULES, 2))  # fmt: skip


def test_the_toys_held_out_problems_are_never_trained_on(monkeypatch):
    for world in ("rambler", "guesser"):
        train, held_out = grpo_ba.toy_problems(world, 256)
        assert len(train) >= 1024 and len(held_out) == 256
        digits = [{tuple(p["digits"]) for p in some} for some in (train, held_out)]
        assert not digits[0] & digits[1]
        assert grpo_ba.toy_problems(world, 256) == (train, held_out)
        rng, tokenizer = random.Random(0), grpo_ba.toy_tokenizer()
        for problem in train[:50]:
            assert int(problem["answer"]) == sum(problem["digits"]) % 5
            if world == "guesser":  # two candidates, one of them right
                candidates = problem["problem"].split(",")[1][:2]
                assert problem["answer"] in candidates and len(set(candidates)) == 2
            clean = grpo_ba.toy_solution(problem, world, rng, clean=True)
            assert verify.verify_math(clean, problem["answer"]).reward == 1
            text = problem["problem"] + grpo_ba.toy_solution(problem, world, rng)
            assert tokenizer.decode(tokenizer.encode(text)) == text
            assert len(tokenizer.encode(text)) == len(text)  # character by character


def test_each_seed_warms_up_a_toy_policy_of_its_own(monkeypatch, tmp_path):
    """So that runs of several seeds are independent; those of one seed share it, rule by rule."""
    monkeypatch.setitem(grpo_ba.TOY, "clean_steps", 1)
    monkeypatch.setitem(grpo_ba.TOY, "mixture_steps", 1)

    def make(cache, **settings):
        config = grpo_ba.Config(cache_dir=str(tmp_path / cache), **settings)
        return load_file(Path(grpo_ba.toy_policy(config), "model.safetensors"))

    state = torch.get_rng_state()
    first = make("a", seed=1, aggregation="token")
    assert torch.equal(torch.get_rng_state(), state)  # else a run would hang on the cache
    assert_same_tensors(first, make("b", seed=1, aggregation="balanced"))
    assert not torch.equal(*(w["model.norm.weight"] for w in (first, make("a", seed=2))))
    assert len(list((tmp_path / "a").iterdir())) == 2


def test_no_evaluation_is_made_whose_score_a_later_one_would_replace(workspace, monkeypatch):
    scored, score = [], grpo_ba.score
    monkeypatch.setattr(grpo_ba, "score", lambda *args: scored.append(len(args[3])) or score(*args))
    run = workspace(*SMALL, "--steps", 3, "--eval_every", 2, "--eval_problems", 9)
    assert scored == [9, 4, 4, 4, 9]  # not also before step 3, whose line has the last score
    assert [line["eval_accuracy"] is None for line in read_metrics(run)] == [False, True, False]


# ----------------------------------------------------------------------------------------
# Crashes and resuming


class Crash(BaseException):
    """A stand-in for SIGKILL: nothing in the program catches it."""


def crash_at(monkeypatch, call):
    """The `call`-th file operation of a run never returns: if `call` is odd, it has happened
    (torch.save's file is cut in half), else it has not begun. Returns the names of the calls."""
    calls = []

    def watched(function):
        def wrapper(*args, **kwargs):
            calls.append(function.__name__)
            if len(calls) == call:
                if call % 2:
                    function(*args, **kwargs)
                    for argument in args:
                        if function is torch.save and isinstance(argument, Path):
                            os.truncate(argument, argument.stat().st_size // 2)
                raise Crash
            return function(*args, **kwargs)

        return wrapper

    for module, name in (
        (os, "replace"), (os, "rename"), (shutil, "rmtree"), (torch, "save"),
        (grpo_ba.RunFolder, "log"), (grpo_ba.RunFolder, "save"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, watched(getattr(module, name)))
    return calls


CRASHES = ("--steps", 2, "--save_every", 1, "--prompts_per_step", 2, "--max_response_tokens", 40)


def test_a_crash_at_any_file_operation_is_made_good(workspace, monkeypatch, tmp_path):
    monkeypatch.setattr(evaluation, "draw_curves", lambda run: run)
    verdicts = [verify.Verdict(1.0, "correct"), verify.Verdict(0.0, "wrong")]  # there is a gradient
    monkeypatch.setattr(
        grpo_ba.Verifier, "score", lambda _, texts, __: verdicts * (len(texts) // 2)
    )
    with monkeypatch.context() as patch:
        calls = crash_at(patch, 0)
        whole = workspace(*SMALL, *CRASHES, "--name", "whole")
    assert {"replace", "rename", "rmtree", "save", "log"} <= set(calls) and len(calls) >= 15
    assert all(line["grad_norm"] > 0 for line in read_metrics(whole))
    for call in range(2, len(calls) + 1):  # before the first, there is no run
        with monkeypatch.context() as patch:
            crash_at(patch, call)
            with pytest.raises(Crash):
                workspace(*SMALL, *CRASHES, "--name", f"crash-{call}")
        run = tmp_path / f"runs/crash-{call}"
        if call > calls.index("rename") + 1:  # from the first checkpoint on, there is always one
            assert grpo_ba.find_checkpoint(run)
        if call % 3 == 0:  # and a line that was being written
            with open(run / "metrics.jsonl", "a") as file:
                file.write('{"step": 1, "rew')
        assert workspace("--resume", run) == run
        assert_same_run(run, whole)

    workspace("--resume", whole, "--steps", 3)  # a flag given beats the run's config
    longer = workspace(*SMALL, *CRASHES, "--steps", 3, "--name", "longer")
    assert [line["eval_step"] for line in read_metrics(longer)] == [0, None, 3]
    assert [line["eval_step"] for line in read_metrics(whole)] == [0, 2, 3]
    assert_same_tensors(*(load_file(run / WEIGHTS) for run in (whole, longer)))


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}  # the order of sums must not vary


def start(*args, cwd):
    command = [sys.executable, str(ROOT / "grpo_ba.py"), *map(str, args)]
    return subprocess.Popen(
        command, cwd=cwd, env=ENVIRONMENT, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def wait_for_lines(process, path, count):
    while process.poll() is None:
        if path.exists() and len(path.read_bytes().splitlines()) >= count:
            return
        time.sleep(0.01)
    raise AssertionError(process.communicate()[1])


def test_five_kills_at_random_moments_leave_no_trace(toy, tmp_path):
    """The real command with its worker processes, SIGKILLed five times, against an undisturbed
    run: the same metrics and, bit for bit, the same parameters and optimizer state."""
    settings = [*user_flags(tmp_path, toy), "--steps", 24, "--minibatches", 2, "--save_every", 3]
    settings += ["--eval_every", 5, "--lr_warmup_steps", 20]
    whole, run = tmp_path / "runs/whole", tmp_path / "runs/killed"
    undisturbed = start(*settings, "--name", "whole", cwd=tmp_path)  # beside the other
    rng, metrics, seen = random.Random(0), run / "metrics.jsonl", 0
    process = start(*settings, "--name", "killed", cwd=tmp_path)
    for _ in range(5):
        # A resumed run first drops the lines after its checkpoint, so count from there.
        wait_for_lines(process, metrics, seen - seen % 3 + 1)
        time.sleep(rng.uniform(0, 0.5))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL  # it was not done yet
        seen = len(metrics.read_bytes().splitlines())
        process = start("--resume", run, cwd=tmp_path)
    for last in (process, undisturbed):
        _, err = last.communicate()
        assert last.returncode == 0, err
    assert sum(line["grad_norm"] > 0 for line in read_metrics(run)) > 10
    assert_same_run(run, whole)


def test_ctrl_c_saves_and_says_so_in_one_line(toy, tmp_path):
    """A terminal sends SIGINT to all processes of the job, the verifier's workers too."""
    run = tmp_path / "runs/stopped"
    process = start(*user_flags(tmp_path, toy), "--steps", 500, "--save_every", 500,
                    "--name", "stopped", cwd=tmp_path)  # fmt: skip
    wait_for_lines(process, run / "metrics.jsonl", 2)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate()
    last = read_metrics(run)[-1]["step"]
    said = f"interrupted: saved after step {last}; go on with --resume runs/stopped"
    assert out.splitlines()[2:] == [said]  # after the two files' counts
    bars = [line for line in err.replace("\r", "\n").splitlines() if line.strip()]
    assert all("%|" in line for line in bars), err  # no traceback, no other word
    assert process.returncode == 130
    assert torch.load(run / "checkpoint/trainer.pt")["step"] == last


# ----------------------------------------------------------------------------------------
# A user's mistakes: one sentence, exit status 2, nothing loaded, nothing left behind

MISTAKES = {
    "--aggregation mean": "--aggregation mean: unknown; choose sequence, token, balanced or all",
    "--group_size 1": "--group_size 1: must be at least 2",
    "--lr=-1e-6": "--lr -1e-06: must be 0 or more",
    "--lr -1e-6": "argument --lr: expected one argument",  # argparse takes -1e-6 for a flag
    "--agregation token": "unrecognized arguments: --agregation token",
    "--steps many": "argument --steps: invalid int value: 'many'",
    "--toy_world mars": "invalid choice: 'mars' (choose from 'rambler', 'guesser')",
    "--lr nan": "--lr nan: must be 0 or more",
    "--weight_decay -1": "--weight_decay -1.0: must be 0 or more",
    "--temperature 0": "--temperature 0.0: must be more than 0",
    "--clip_low 1.5": "--clip_low 1.5: must be between 0 and 1",
    "--steps 0": "--steps 0: must be at least 1",
    "--prompts_per_step 7": "--prompts_per_step 7: must be a multiple of minibatches x ranks",
    "--micro_batch_tokens 100": "--micro_batch_tokens 100: must be at least 264",
    "--model x --train_data no.jsonl": "--train_data no.jsonl: there is no such file",
    "--eval_data no.parquet": "--eval_data no.parquet: there is no such file",
    "--model x": "--model and --train_data belong together",
    "--train_data x": "--model and --train_data belong together",
    "--preset tiny": "--preset tiny: unknown; choose one of toy, small, qwen3-1.7b-dapo",
    "--resume runs/none": "--resume runs/none: no config.json there",
    "--name a/b": "--name a/b: must be a new folder name",
    "--name taken": "--name taken: must be a new folder name",
    "--report_to abacus": "--report_to abacus: unknown; choose tensorboard, wandb",
    "--rollout_rows 7": "--rollout_rows 7: must be at least group_size = 8",
    "--clip_high inf": "--clip_high inf: must be more than 0, and finite",
    "--seed 9999999999999999999": "must be 0 or more, and less than 2**63",
    f"--name {'n' * 300}": "must be a new folder name",
    "--aggregation all --name x": "--aggregation all: names its own runs",
}


def test_a_resumed_runs_preset_and_fields_are_checked(capsys, tmp_path):
    config = {"preset": "toy", "steps": 7}  # a field that is not there keeps its default
    (tmp_path / "config.json").write_text(json.dumps(config))
    argv = ["--resume", str(tmp_path)]
    assert grpo_ba.parse(argv) == grpo_ba.parse([*argv, "--preset", "toy"])
    assert grpo_ba.parse(argv).steps == 7
    line = mistake(capsys, grpo_ba.parse, [*argv, "--preset", "small"])
    assert "--preset small: a resumed run keeps its own" in line
    line = mistake(capsys, grpo_ba.parse, [*argv, "--model", "x", "--train_data", "y"])
    assert "--model x: a resumed run keeps its own" in line
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint/config.json").write_text('{"model_type": "qwen3"}')
    line = mistake(capsys, grpo_ba.parse, ["--resume", str(tmp_path / "checkpoint")])
    assert "give the folder of a run" in line
    (tmp_path / "config.json").write_text(json.dumps(config | {"kl": 0.1}))
    assert "its config.json has kl, which this version does not know" in mistake(
        capsys, grpo_ba.parse, argv
    )


def test_a_run_is_trained_by_one_process_at_a_time(workspace, capsys, monkeypatch):
    run = workspace(*SMALL, "--steps", 1, "--name", "mine")
    code = (
        "import sys, fcntl\n"
        "file = open(sys.argv[1], 'w')\n"
        "fcntl.lockf(file, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\n"
        "input()"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, run / ".lock"], text=True,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    try:
        assert holder.stdout.readline() == "held\n"
        before = (run / "config.json").read_text()
        line = mistake(capsys, workspace, "--resume", run, "--steps", 2)
        assert "another process is training this run" in line
        assert (run / "config.json").read_text() == before and len(read_metrics(run)) == 1
    finally:
        holder.communicate("\n")
    monkeypatch.setattr(grpo_ba, "toy_policy", None)  # its checkpoint is all that it needs
    assert workspace("--resume", run, "--steps", 2, "--weight_decay", 0.5) == run
    state = torch.load(run / "checkpoint/trainer.pt")
    assert state["optimizer"]["param_groups"][0]["weight_decay"] == 0.5


def test_dropout_does_not_make_two_policies_of_one(tmp_path):
    """Ratios, clip shares and the mismatch compare passes over the same weights."""
    config = transformers.GPT2Config(vocab_size=11, n_positions=32, n_embd=8, n_layer=2, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    llama = transformers.LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=16, num_hidden_layers=1, head_dim=4,
        num_attention_heads=2, num_key_value_heads=1, attention_dropout=0.5,
    )  # fmt: skip
    transformers.LlamaForCausalLM(llama).save_pretrained(tmp_path / "llama")
    for name in ("gpt2", "llama"):
        model = grpo_ba.load_policy(str(tmp_path / name), "cpu").train()
        ids = torch.arange(10)[None]
        assert torch.equal(model(ids).logits, model(ids).logits), name


def test_a_cache_that_cannot_be_made_is_named_before_the_warm_up(capsys, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(transformers, "Qwen3ForCausalLM", None)
    config = grpo_ba.Config(cache_dir=str(tmp_path / "file"))
    assert "no folder can be made there" in mistake(capsys, grpo_ba.toy_policy, config)


def test_a_torn_checkpoint_is_named(toy, capsys, tmp_path):
    shutil.copytree(toy, tmp_path / "torn")
    os.truncate(tmp_path / "torn/model.safetensors", 1000)
    line = mistake(capsys, grpo_ba.load_policy, str(tmp_path / "torn"), "cpu")
    assert "cannot be loaded" in line


def test_flags_may_be_spelt_with_dashes(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text("")
    config = grpo_ba.parse(["--model", "x", "--train-data", str(file), "--group-size", "3"])
    assert (config.preset, config.train_data, config.group_size) == ("small", str(file), 3)
    qwen = grpo_ba.parse(["--preset", "qwen3-1.7b-dapo", "--train-data", str(file)])
    assert qwen.eval_data == qwen.exclude_data == ""  # as with --train_data


def test_a_head_of_more_than_one_product_is_refused(tmp_path, capsys):
    sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}  # fmt: skip
    for config, what in (
        (transformers.Gemma2Config(**sizes), "final_logit_softcapping"),
        (transformers.GraniteConfig(**sizes, logits_scaling=8.0), "logits_scaling"),
        (transformers.PhiConfig(**{**sizes, "num_key_value_heads": 2}), "a bias"),
    ):
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / what)
        line = mistake(capsys, grpo_ba.load_policy, str(tmp_path / what), "cpu")
        assert f"its head has {what}, and" in line


@pytest.mark.parametrize("argv", MISTAKES)
def test_a_mistake_is_named_in_one_sentence_before_anything_is_loaded(
    argv, capsys, tmp_path, monkeypatch
):
    from transformers import PreTrainedModel

    def refuse(*_, **__):
        raise AssertionError("something was loaded")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", refuse)
    monkeypatch.setattr(grpo_ba, "load_task", refuse)
    (tmp_path / "runs/taken").mkdir(parents=True)
    monkeypatch.setattr(sys, "argv", ["grpo_ba.py", *argv.split()])
    if "--preset" not in argv:
        sys.argv[1:1] = ["--preset", "toy"]
    assert MISTAKES[argv] in mistake(capsys, grpo_ba.main)
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["taken"]


def test_the_commands_exit_status_is_2_and_its_error_one_line(tmp_path):
    process = start("--preset", "toy", "--group_size", 1, cwd=tmp_path)
    out, err = process.communicate()
    assert (process.returncode, out) == (2, "")
    assert err == "grpo_ba.py: --group_size 1: must be at least 2\n"
    assert list(tmp_path.iterdir()) == []


def test_vllm_that_is_not_installed_is_named(capsys, monkeypatch):
    find = grpo_ba.importlib.util.find_spec
    monkeypatch.setattr(grpo_ba.importlib.util, "find_spec", lambda n: n != "vllm" and find(n))
    line = mistake(capsys, grpo_ba.parse, ["--preset", "toy", "--engine", "vllm"])
    assert "--engine vllm: not installed" in line


@pytest.mark.parametrize("preset", [name for name in grpo_ba.PRESETS if name[:4] == "qwen"])
def test_a_preset_whose_hub_cannot_be_reached_says_so(preset, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["grpo_ba.py", "--preset", preset])
    assert "cannot be" in mistake(capsys, grpo_ba.main)
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_outside_of_a_step_is_one_line(capsys, monkeypatch):
    def interrupt(config):
        raise KeyboardInterrupt

    monkeypatch.setattr(grpo_ba, "train", interrupt)
    monkeypatch.setattr(sys, "argv", ["grpo_ba.py", "--preset", "toy"])
    assert "interrupted outside of a step" in mistake(capsys, grpo_ba.main)


def test_help_shows_a_line_for_every_field(capsys):
    with pytest.raises(SystemExit) as caught:
        grpo_ba.parse(["--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert all(f"--{name}" in text for name in grpo_ba.Config.__dataclass_fields__)
