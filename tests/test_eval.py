"""eval.py's data, statistics, command line and comparisons. Sampling: test_eval_sampling.py."""

import base64
import itertools
import json
import pickle
import re
import statistics
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from matplotlib import colors, image

import eval as evaluation
from verify import verify_math


def write_jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(name, folder, *argv):
    argv = "--model", "m", "--data", folder, "--unsafe_code", *argv
    return evaluation.load_problems(name, evaluation.parse(list(map(str, argv))))


# Data
AIME, OLYMPIAD = {"problem": "p", "id": 60, "solution": "s"}, {"question": "q", "context": None}
HUB = [  # a row with the hub's columns, its problem and golds, a right and a wrong answer
    ("math500", {"problem": "p", "answer": "\\frac{1}{2}"}, "p", ["\\frac{1}{2}"], "0.5", "2"),
    ("aime24", AIME | {"answer": "025"}, "p", ["25"], "25", "0.25"),
    ("aime24", AIME | {"answer": 25}, "p", ["25"], "025", "5"),
    ("aime25", {"problem": "p", "answer": "336^\\circ"}, "p", ["336"], "336", "33"),
    ("olympiadbench", OLYMPIAD | {"final_answer": ["$69$,$84$."]}, "q", ["69,84"], "84, 69", "69"),
    ("olympiadbench", OLYMPIAD | {"final_answer": ["$-5$", "3"]}, "q", ["-5, 3"], "3, -5", "3"),
    ("olympiadbench", OLYMPIAD | {"final_answer": ["1"], "context": "c"}, "c\nq", ["1"], "1", "c"),
    ("minerva_math", {"question": "q", "answer": "4e33"}, "q", ["4e33"], "4 \\cdot 10^{33}", "4"),
    ("minerva_math", {"question": "q", "answer": ["0.01", "3"]}, "q", ["0.01", "3"], "3", "0.02"),
]
ROWS = {"math500": 500, "aime24": 30, "aime25": 30, "olympiadbench": 674, "minerva_math": 272}


@pytest.mark.parametrize("case", HUB)
def test_rows_of_the_hub_and_of_a_local_file_become_the_same_problems(case, tmp_path, monkeypatch):
    name, row, text, golds, right, wrong = case
    write_jsonl(tmp_path / f"{name}.jsonl", [row])
    asked, problems = [], [{"problem": text, "answer": golds}]
    assert load(name, tmp_path) == problems
    monkeypatch.setattr(evaluation.ba, "read_rows", lambda *args: asked.append(args) or [row])
    assert load(name, "") == problems
    source, revision, rows = evaluation.BENCHMARKS[name]
    assert (asked, rows) == ([(source, "test", revision)], ROWS[name])
    assert revision or name == "minerva_math"  # else it is pinned
    assert verify_math(f"\\boxed{{{right}}}", golds).reward == 1
    assert verify_math(f"\\boxed{{{wrong}}}", golds).reward == 0


def test_repeated_rows_count_once_and_a_sentence_says_so(tmp_path, capsys):
    rows = [{"problem": f"p{i % 30}", "answer": str(i % 30)} for i in range(960)]
    write_jsonl(tmp_path / "aime24.jsonl", rows)
    assert len(load("aime24", tmp_path)) == 30
    assert "30 different problems in 960 rows (expected: 30)" in capsys.readouterr().out


@pytest.mark.parametrize("gold", ["", None, [[1]], {"a": 1}, float("nan"), [], "no problem"])
def test_a_row_without_a_problem_or_usable_gold_is_named_in_one_sentence(gold, tmp_path, mistake):
    row = {"problem": "q" * (gold != "no problem"), "answer": gold}
    path = write_jsonl(tmp_path / "own.jsonl", [{"problem": "p", "answer": "1"}, row])
    assert "own.jsonl, row 2: " in mistake(load, str(path), "")


# LiveCodeBench: rows in its exact schema, with programs of our own.
STDIN = [{"input": f"{i}\n", "output": f"{i * i}\n", "testtype": "stdin"} for i in range(4)]
FUNCTIONAL = [{"input": f"{i}", "output": f"[{i}]", "testtype": "functional"} for i in range(4)]
packed = lambda data: base64.b64encode(zlib.compress(data)).decode()
encoded = lambda tests, protocol=4: packed(pickle.dumps(json.dumps(tests), protocol))


def lcb_row(name, tests=STDIN, func_name=None, private=encoded, **changes):
    return {
        "question_title": name, "question_content": f"solve {name}", "platform": "atcoder",
        "question_id": name, "contest_id": "c", "contest_date": "2024-03-02T19:30:00",
        "starter_code": f"class Solution:\n    def {func_name}(self, x):" if func_name else "",
        "difficulty": "easy", "public_test_cases": json.dumps(tests[:1]),
        "private_test_cases": private(tests[1:]),
        "metadata": json.dumps({"func_name": func_name} if func_name else {}),
    } | changes  # fmt: skip


def load_lcb(tmp_path, rows, *argv):
    write_jsonl(tmp_path / "livecodebench.jsonl", rows)
    problems = load("livecodebench", tmp_path, *argv)
    return {re.search("solve (.*)", p["problem"])[1]: p for p in problems}


def test_tests_are_public_ones_and_private_ones_in_any_encoding(tmp_path):
    rows = [lcb_row("square"), lcb_row("pair", FUNCTIONAL, "pair")]
    rows += [lcb_row("plain", private=json.dumps), lcb_row("old", private=lambda x: encoded(x, 3))]
    problems = load_lcb(tmp_path, rows)
    tests = {name: p["tests"]() for name, p in problems.items()}
    assert tests == {"square": STDIN, "pair": FUNCTIONAL, "plain": STDIN, "old": STDIN}
    assert [p["func_name"] for p in problems.values()] == [None, "pair", None, None]


def test_the_livecodebench_prompt_is_the_official_one(tmp_path):
    rows = [lcb_row("square"), lcb_row("p", FUNCTIONAL, "pair")]
    (system, square), (_, pair) = (p["messages"] for p in load_lcb(tmp_path, rows).values())
    assert (system["role"], square["role"]) == ("system", "user")
    assert system["content"].endswith("matches the specification and passes all tests.")
    assert square["content"] == (
        "### Question:\nsolve square\n\n### Format: Read the inputs from stdin solve the problem and "
        "write the answer to stdout (do not directly test on the sample inputs). Enclose your code "
        "within delimiters as follows. Ensure that when the python program runs, it reads the "
        "inputs, runs the algorithm and writes output to STDOUT.\n```python\n# YOUR CODE HERE\n"
        "```\n\n### Answer: (use the provided format with backticks)\n\n"
    )
    assert "within delimiters.\n```python\nclass Solution:\n    def pair(self" in pair["content"]


def test_problems_are_chosen_by_day_and_by_the_errata(tmp_path, mistake):
    days = ["2024-01-31", "2024-02-01", "2024-02-29", "2024-03-01"]
    rows = [lcb_row(day, contest_date=f"{day}T23:00:00") for day in days]
    assert list(load_lcb(tmp_path, rows, "--lcb_start", days[1], "--lcb_end", days[2])) == days[1:3]
    assert "--lcb_start" in mistake(load_lcb, tmp_path, rows, "--lcb_start", "2030-01-01")
    rows = [lcb_row("abc350_c"), lcb_row("good"), lcb_row("3194", question_title="find-the-peaks")]
    assert list(load_lcb(tmp_path, rows)) == ["abc350_c", "good", "3194"]
    assert list(load_lcb(tmp_path, rows, "--lcb_skip_bad")) == ["good"]


def test_a_release_is_the_raw_files_up_to_it_at_the_pinned_revision(tmp_path, monkeypatch, capsys):
    asked = []

    def download(repo, name, *more):
        asked.append((repo, name, *more))
        return str(write_jsonl(tmp_path / name, [lcb_row(name)]))

    monkeypatch.setattr(evaluation, "hf_hub_download", download)
    assert len(load("livecodebench", "", "--lcb_release", "release_v3")) == 3
    source, revision, _ = evaluation.BENCHMARKS["livecodebench"]
    names = "test.jsonl", "test2.jsonl", "test3.jsonl"
    assert asked == [(source, name, None, "dataset", revision) for name in names]
    assert "3 rows (expected: 612)" in capsys.readouterr().out


class Evil:
    __reduce__ = lambda self: (Path.touch, (Path("pwned"),))


HOSTILE = {  # name: private tests, and public ones where they are needed
    "a class": (packed(pickle.dumps(Evil())),), "a bomb": (packed(b"0" * 3_000_000),),
    "a huge memo slot": (packed(b"\x80\x04\x8c\x01ar\xff\xff\xff\x7f."),), "nothing": ("",),
    "not base64": ("not base64!",), "not zlib": ("AAAA",), "cut off": (encoded(STDIN)[:40],),
    "no output": (encoded([{"input": "1"}]),), "no list": (encoded({"input": "1"}),),
    "not tests": ("[1]",), "no text": (None,), "no tests": ("[]", "[]"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tests_are_one_sentence_and_nothing_runs(name, tmp_path, mistake, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluation, "MAX_TESTS_BYTES", 1_000_000)
    changes = dict(zip(("private_test_cases", "public_test_cases"), HOSTILE[name]))
    message = mistake(load_lcb, tmp_path, [lcb_row("a"), lcb_row("b", **changes)])
    assert "livecodebench, row 2: " in message
    assert ("1,000,000 bytes" in message) == (name in ("a bomb", "cut off", "nothing"))
    mixed = lcb_row("a", private=lambda x: packed(pickle.dumps([Evil(), json.dumps(x)])))
    assert load_lcb(tmp_path, [mixed])["a"]["tests"]() == STDIN  # cut out, the class is ignored
    assert not Path("pwned").exists()


# Statistics
@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_equals_exact_enumeration(n):
    c = np.arange(n + 1)
    for k in range(1, n + 1):
        draws = [itertools.combinations([1] * i + [0] * (n - i), k) for i in c]
        exact = [statistics.fmean(map(max, some)) for some in draws]
        assert evaluation.pass_at_k(np.full(n + 1, n), c, k) == pytest.approx(exact)


def test_the_paired_bootstrap_covers_the_truth_and_weighs_benchmarks_the_same():
    rng, covered = np.random.default_rng(1), 0
    for _ in range(200):  # two benchmarks of 50 problems, four responses each, b better by 0.1
        hard = 0.8 * rng.random(100)
        b, a = (rng.binomial(4, p) / 4 for p in (hard + 0.1, hard))
        index = pd.MultiIndex.from_product([("x", "y"), range(50)])
        _, low, high = evaluation.paired_bootstrap(pd.Series(b - a, index), draws=500)
        covered += low <= 0.1 <= high
    assert 0.90 <= covered / 200 <= 0.985
    differences = pd.concat({"x": pd.Series([0.0] * 9), "y": pd.Series([0.5] * 3)})
    assert evaluation.paired_bootstrap(differences) == [0.25, 0.25, 0.25]


def sample(problem, i, reward, reason=""):
    row = {"problem": str(problem), "sample": i, "reward": reward, "tokens": 10}
    return row | {"reason": reason or ("wrong", "correct")[reward], "truncated": False}


def test_a_summary_is_right_on_a_hand_worked_example():
    """Clustered by problem: means 0.75 and 0.25, so s.e. 0.3536 / sqrt 2, and not 0.18."""
    rows = [sample(i // 4, i % 4, reward) for i, reward in enumerate((1, 1, 1, 0, 1, 0, 0, 0))]
    rows[6] |= {"reason": "no_answer"}
    rows[7] |= {"tokens": 90, "truncated": True}
    summary = evaluation.summarise(rows)
    assert summary.pop("per_problem") == {"0": 75, "1": 25}
    assert summary == pytest.approx({
        "problems": 2, "k": 4, "avg@k": 50, "s.e.": 25, "pass@1": 50, "pass@2": 75, "pass@4": 100,
        "tokens": 20, "truncated": 12.5, "no answer": 12.5, "sandbox errors": 0,
    })  # fmt: skip


def test_sandbox_errors_are_neither_right_nor_wrong_and_beyond_1_percent_are_no_score(tmp_path):
    rows = [sample(i % 50, i // 50, 1) for i in range(200)]
    rows[:2] = [sample(i, 0, 0, "sandbox_error") for i in range(2)]
    few = evaluation.summarise(rows)
    assert (few["avg@k"], few["pass@4"], few["sandbox errors"]) == (100, 100, 1)
    many = evaluation.summarise([*rows, *rows[:1]])
    assert np.isnan([many["avg@k"], many["s.e."], many["pass@1"]]).all()
    assert many["per_problem"] == {}
    evaluation.report(tmp_path, "", {"few": rows, "many": [*rows, *rows[:1]]})
    assert "average of avg@k: nan" in (tmp_path / "results.md").read_text()


# Command line and presets
@pytest.mark.parametrize(("argv", "said"), [
    ("", "--model or --compare"), ("--model m --compare a b", "--model or --compare"),
    ("--model m --benchmarks aime26", "--benchmarks aime26: choose from math500"),
    ("--model m --samples -1", "--samples -1"), ("--model m --limit -5", "--limit -5"),
    ("--model m --batch_size 0", "--batch_size 0"), ("--modle m", "--modle"),
    ("--model m --temperature nan", "--temperature nan"), ("--model m --lcb_release v9", "v6"),
    ("--model m --preset llama", "invalid choice: 'llama'"),
])  # fmt: skip
def test_mistakes_on_the_command_line_are_one_sentence(argv, said, mistake):
    assert said in mistake(evaluation.parse, argv.split())


@pytest.mark.parametrize(("family", "context", "flags", "trained", "expected"), [
    ("qwen3", 40960, "", {}, (32768, 0.6, 0.95, 20, "suffix", True)),
    ("qwen3", 40960, "--preset qwen3-non-thinking", {}, (32768, 0.7, 0.8, 20, "suffix", False)),
    ("qwen3", 40960, "", {"instruction": "none", "enable_thinking": False},  # a run's config.json
     (32768, 0.7, 0.8, 20, "none", False)),
    ("qwen2", 4096, "", {}, (4096, 0.6, 0.95, -1, "system", False)),
    ("llama", 8192, "--temperature 1 --max_tokens 7", {}, (7, 1.0, 0.95, -1, "suffix", False)),
])  # fmt: skip
def test_a_family_is_asked_as_its_card_says(family, context, flags, trained, expected, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(trained))
    config = SimpleNamespace(model_type=family, max_position_embeddings=context)
    o = evaluation.parse(["--model", str(tmp_path / "checkpoint"), *flags.split()])
    s, instruction, thinking = evaluation.choose_preset(o, config)
    asked = s["max_tokens"], s["temperature"], s["top_p"], s.get("top_k", -1)
    assert (*asked, instruction, thinking) == expected


# Comparison
def make_results(folder, scores, place="eval"):
    """An evaluation in which problem i of task t has this score in %."""
    tasks = {task: {"per_problem": dict(enumerate(some))} for task, some in scores.items()}
    (folder / place).mkdir(parents=True)
    (folder / place / "results.json").write_text(json.dumps(tasks))
    return folder


def make_run(folder, rule, accuracies, seed=0, world="rambler"):
    """A training run of 20 steps, evaluated before every fifth and after the last."""
    steps = [{"step": i, "eval_step": None, "eval_accuracy": None} for i in range(1, 21)]
    for i, accuracy in zip((0, 5, 10, 15, 20), accuracies):
        steps[min(i, 19)] |= {"eval_step": i, "eval_accuracy": accuracy}
    write_jsonl(folder / "metrics.jsonl", steps)
    config = {"model": f"/x/{world}", "train_data": "train.jsonl", "aggregation": rule}
    (folder / "config.json").write_text(json.dumps(config | {"seed": seed}))
    return folder


@pytest.fixture
def compare(tmp_path, capsys):  # returns what it prints, with single spaces
    def run(*folders):
        argv = ["--compare", *folders, "--out", tmp_path]
        evaluation.compare(evaluation.parse(list(map(str, argv))))
        return " ".join(capsys.readouterr().out.split())

    return run


def colored(path, left, right):
    """The rules whose colour is seen in this part of the picture's width."""
    pixels = image.imread(path)[..., :3]
    pixels = pixels[:, int(left * pixels.shape[1]) : int(right * pixels.shape[1])]
    seen = lambda c: (abs(pixels - colors.to_rgb(c)) < 0.01).all(axis=-1).sum() > 100
    return {rule for rule, c in evaluation.COLORS.items() if seen(c)}


def test_comparison_pairs_the_problems_that_all_runs_have(tmp_path, compare):
    easy, hard = [100.0, 75.0, 50.0, 100.0] * 10, [25.0, 0.0, 50.0, 25.0] * 5
    a = make_results(tmp_path / "sequence", {"math500": [*easy, 0.0], "aime24": hard, "x": []})
    better = {"math500": easy, "aime24": [x + 25 for x in hard], "aime25": [1.0]}
    b = make_results(tmp_path / "balanced", better, "checkpoint/eval")
    table = compare(a, b)
    assert f"problems {a} {b} {b} - {a} " in table
    assert "math500 40 81.2 81.2 +0.0 [+0.0, +0.0] " in table  # difficulty cancels
    assert "aime24 20 25.0 50.0 +25.0 [+25.0, +25.0] " in table
    assert "average 60 53.1 65.6 +12.5 [+12.5, +12.5] " in table
    assert "aime25" not in table
    assert colored(tmp_path / "compare.png", 0, 1) == {"sequence", "balanced"}


def test_the_table_of_trainings_holds_means_over_seeds_and_the_paired_lead(tmp_path, compare):
    """`mean`: up from 0.1 for a quarter of the training, then flat: 0.3625 and 0.5375."""
    token, balanced = ([0.1, *[0.4] * 4], [0.1, *[0.6] * 4]), ([0.5625] * 5, [0.6375] * 5)
    runs = [make_run(tmp_path / f"t{i}", "token", token[i], i) for i in (0, 1)]
    runs += [make_run(tmp_path / f"b{i}", "balanced", balanced[i], i) for i in (1, 0)]
    even = [make_run(tmp_path / x, x, [0.9] * 5, 0, "guesser") for x in ("token", "balanced")]
    table = compare(*runs, *even)
    assert " token 0.100 0.500 0.500 0.450 0.150 0.050 2 of 2 " in table
    assert " balanced 0.600 0.600 0.600 0.600 " in table
    assert " token 0.900 0.900 0.900 0.900 0.000 - 0 of 1 " in table


def test_runs_of_one_rule_and_seed_are_lines_of_their_own(tmp_path, compare):
    a, b = (make_run(tmp_path / f"{x}", "token", [0.1, x, x, x, x]) for x in (1, 0.5))
    table = compare(a, b)
    assert f"rambler on train {a} 0.100 1.000 " in table and f" {b} 0.100 0.500 " in table


def test_worlds_and_benchmarks_are_panels_in_the_same_colours(tmp_path, compare, monkeypatch):
    figures, save = [], evaluation.Figure.savefig
    monkeypatch.setattr(evaluation.Figure, "savefig", lambda *x: (figures.append(x[0]), save(*x)))
    runs = [
        make_run(tmp_path / f"{world}{i}-{rule}", rule, [0.1, x + i / 9, x, 0.9, x], i, world)
        for world, i in itertools.product(("rambler", "guesser"), range(2))
        for rule, x in (("sequence", 0.3), ("token", 0.6), ("balanced", 0.8))
    ]
    for run in runs[:3]:
        make_results(run, {"math500": [50.0, 100.0], "aime24": [25.0, 0.0]})
    (tmp_path / "compare.png").touch()  # the last picture is among runs/*
    with open(runs[0] / "metrics.jsonl", "a") as file:
        file.write('{"step": 21, "rewa')  # the run is going on
    assert "average" in compare(*runs, tmp_path / "compare.png")
    for left, right in ((0, 0.3), (0.34, 0.65), (0.7, 1)):
        assert colored(tmp_path / "compare.png", left, right) == set(evaluation.COLORS)
    lines = [line.get_ydata()[1] for line in figures[0].axes[0].lines[:3]]  # two seeds, their mean
    assert lines == pytest.approx([0.3, 0.3 + 1 / 9, 0.3 + 0.5 / 9])
    assert len(figures[0].axes[2].collections) == 3  # error bars
    legends = [axes.get_legend_handles_labels()[1] for axes in figures[0].axes]
    assert legends[0] == legends[1]
    assert legends[0][0] == "sequence: best 0.90, last 0.30"
    assert legends[2] == [str(run) for run in runs[:3]]


def test_what_cannot_be_compared_is_one_sentence(tmp_path, mistake, compare):
    a, b = (make_results(tmp_path / task, {task: [100.0]}) for task in ("math500", "aime24"))
    run, blind = (make_run(tmp_path / f"{x}", "token", x) for x in ([0.1] * 5, []))
    for folders in ((a,), (a, b), (a, tmp_path / "missing"), (run, a), (run, blind)):
        assert "needs two runs" in mistake(compare, *folders)
