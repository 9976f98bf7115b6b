"""eval.py's data, statistics, replay, comparison and pictures. Sampling: test_eval_sampling.py."""

import base64
import itertools
import json
import pickle
import random
import statistics
import zlib
from pathlib import Path
from types import SimpleNamespace

import datasets
import matplotlib.image
import pytest

import eval as evaluation
from verify import verify_code, verify_math

SHARED = Path(__file__).resolve().parents[2] / "shared"
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared")


def write_jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def options(*argv):
    return evaluation.parse(["--model", "m", *map(str, argv)])


def one_sentence(capsys, action, *args):
    """Runs what must fail, and returns the one line it says."""
    with pytest.raises(SystemExit) as caught:
        action(*args)
    lines = capsys.readouterr().err.strip().splitlines()
    lines = [line for line in lines if "%|" not in line]  # progress bars
    assert caught.value.code == 2
    assert len(lines) == 1, lines
    return lines[0]


# ----------------------------------------------------------------------------------------
# Data


def fake_hub(monkeypatch, rows, columns):
    """datasets.load_dataset that gives `rows` rows of these columns and remembers its arguments."""
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return datasets.Dataset.from_list([columns] * rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


HUB_ROWS = {  # columns and gold forms of the hub's data sets
    "math500": ({"problem": "p", "answer": "\\frac{1}{2}", "level": 1}, "\\frac{1}{2}"),
    "aime24": ({"id": 60, "problem": "p", "answer": "025"}, "25"),
    "aime25": ({"problem": "p", "answer": "336^\\circ"}, "336"),
    "olympiadbench": ({"question": "p", "final_answer": ["$69$,$84$."], "context": None}, "69,84"),
    "minerva_math": ({"question": "p", "answer": "4.5e33"}, "4.5e33"),
}


@pytest.mark.parametrize("name", HUB_ROWS)
def test_hub_rows_become_problems_at_the_pinned_revision(name, monkeypatch):
    columns, gold = HUB_ROWS[name]
    benchmark = evaluation.BENCHMARKS[name]
    asked = fake_hub(monkeypatch, benchmark.rows, columns)
    problems = evaluation.load_benchmark(name)
    assert len(problems) == benchmark.rows
    assert problems[7] == {"id": "7", "problem": "p", "answer": gold}
    assert asked[0][0] == (benchmark.hub_id, benchmark.config or None)
    assert asked[0][1] == {"split": benchmark.split, "revision": benchmark.revision}


def test_the_six_benchmarks_have_the_published_sizes_and_samples():
    sizes = {name: (b.rows, b.samples) for name, b in evaluation.BENCHMARKS.items()}
    assert sizes == {
        "math500": (500, 4), "aime24": (30, 32), "aime25": (30, 32), "olympiadbench": (674, 4),
        "minerva_math": (272, 4), "livecodebench": (1055, 4),
    }  # fmt: skip


def test_missing_columns_are_named_beside_those_found(monkeypatch, capsys):
    fake_hub(monkeypatch, 272, {"problem": "p", "solution": "s"})
    message = one_sentence(capsys, evaluation.load_benchmark, "minerva_math")
    assert "question" in message
    assert "['problem', 'solution']" in message


def test_a_changed_row_count_is_an_error_on_the_hub_and_a_note_for_a_local_file(
    monkeypatch, capsys, tmp_path
):
    fake_hub(monkeypatch, 31, {"problem": "p", "answer": "1"})
    message = one_sentence(capsys, evaluation.load_benchmark, "aime24")
    assert "31" in message
    assert "30" in message
    write_jsonl(tmp_path / "aime24.jsonl", [{"problem": "p", "answer": "1"}] * 3)
    assert len(evaluation.load_benchmark("aime24", options("--data", tmp_path))) == 3
    assert "3 rows" in capsys.readouterr().out


def test_olympiadbench_golds_are_sets_and_contexts_come_first(tmp_path):
    rows = [
        {"question": "q", "final_answer": ["$f(x)=2 x$."], "context": "c"},
        {"question": "q", "final_answer": ["3", "$-5$"], "context": None},
        {"question": "q", "final_answer": ["$(1,2)$,$(3,4)$"], "context": ""},
    ]
    write_jsonl(tmp_path / "olympiadbench.jsonl", rows)
    problems = evaluation.load_benchmark("olympiadbench", options("--data", tmp_path))
    assert [p["problem"] for p in problems] == ["c\nq", "q", "q"]
    golds = [p["answer"] for p in problems]
    for i, box, right in (
        (1, "-5, 3", 1.0), (1, "3", 0.0), (1, "3, -5, 7", 0.0),
        (2, "(3,4), (1,2)", 1.0), (2, "(2,1), (3,4)", 0.0),
    ):  # fmt: skip
        assert verify_math(f"\\boxed{{{box}}}", golds[i]).reward == right, (golds[i], box)


def test_minerva_golds_in_scientific_notation_and_lists_of_variants_are_met(tmp_path):
    rows = [{"problem": "p", "answer": "4.5e33"}, {"problem": "p", "answer": ["0.01", "0.02"]}]
    write_jsonl(tmp_path / "minerva_math.jsonl", rows)
    first, second = evaluation.load_benchmark("minerva_math", options("--data", tmp_path))
    assert verify_math("\\boxed{4.5 \\times 10^{33}}", first["answer"]).reward == 1
    assert verify_math("\\boxed{4.5 \\times 10^{34}}", first["answer"]).reward == 0
    assert verify_math("\\boxed{0.02}", second["answer"]).reward == 1


def test_an_empty_gold_and_a_missing_file_are_one_sentence(tmp_path, capsys):
    write_jsonl(tmp_path / "math500.jsonl", [{"problem": "p", "answer": ""}])
    chosen = options("--data", tmp_path)
    assert "row 1" in one_sentence(capsys, evaluation.load_benchmark, "math500", chosen)
    message = one_sentence(capsys, evaluation.load_benchmark, "aime24", chosen)
    assert "aime24.jsonl" in message
    assert "math500.jsonl" in message


@needs_shared
@pytest.mark.parametrize("name", HUB_ROWS)
def test_the_real_problems_load_whole(name):
    problems = evaluation.load_benchmark(name, options("--data", SHARED / "data"))
    assert abs(len(problems) - evaluation.BENCHMARKS[name].rows) <= 1  # Qwen's copy has 675
    if name.startswith("aime"):
        assert all(0 <= int(p["answer"]) <= 999 and p["answer"][0] != "0" for p in problems)


# ----------------------------------------------------------------------------------------
# LiveCodeBench: rows in its exact schema, with programs of our own.


def encoded(tests):
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


def lcb_row(name, tests, func_name=None, private=encoded, **changes):
    public, hidden = tests[:1], tests[1:]
    return {
        "question_title": name, "question_content": f"solve {name}", "platform": "atcoder",
        "question_id": name, "contest_id": "c", "contest_date": "2024-03-02T19:30:00",
        "starter_code": f"class Solution:\n    def {func_name}(self, x):" if func_name else "",
        "difficulty": "easy", "public_test_cases": json.dumps(public),
        "private_test_cases": private(hidden),
        "metadata": json.dumps({"func_name": func_name} if func_name else {}),
    } | changes  # fmt: skip


STDIN = [{"input": f"{i}\n", "output": f"{i * i}\n", "testtype": "stdin"} for i in range(4)]
FUNCTIONAL = [
    {"input": f"{i}", "output": f"[{i}, {i + 1}]", "testtype": "functional"} for i in range(4)
]


def load_lcb(tmp_path, rows, *argv):
    write_jsonl(tmp_path / "livecodebench.jsonl", rows)
    return evaluation.load_benchmark("livecodebench", options("--data", tmp_path, *argv))


def test_livecodebench_scores_programs_on_public_and_encoded_private_tests(tmp_path):
    rows = [
        lcb_row("square", STDIN),
        lcb_row("pair", FUNCTIONAL, "pair"),
        lcb_row("plain", STDIN, private=json.dumps),  # some rows are not encoded
    ]
    square, pair, plain = load_lcb(tmp_path, rows)
    path = tmp_path / "livecodebench.jsonl"
    path.write_text("\n".join([*path.read_text().splitlines(), "", ""]).replace("\n", "\n\n"))
    square, pair, plain = evaluation.load_benchmark("livecodebench", options("--data", tmp_path))
    assert square["tests"]() == STDIN
    assert plain["tests"]() == STDIN
    assert pair["tests"]() == FUNCTIONAL
    assert (square["func_name"], pair["func_name"]) == (None, "pair")
    for problem, program, right in (
        (square, "print(int(input()) ** 2)", 1.0),
        (square, "print(int(input()))", 0.0),  # passes the first two: every test must pass
        (pair, "class Solution:\n    def pair(self, x):\n        return [x, x + 1]", 1.0),
        (pair, "class Solution:\n    def pair(self, x):\n        return [0, 1]", 0.0),
    ):
        text = f"```python\n{program}\n```"
        assert verify_code(text, problem["tests"](), problem["func_name"]).reward == right


@needs_shared
def test_livecodebench_rows_of_the_labelled_programs_are_scored_as_labelled(tmp_path):
    cases = map(json.loads, (SHARED / "cases/code_cases.jsonl").open())
    cases = [c for c in cases if c["passed"] is not None and len(json.dumps(c["tests"])) < 10_000]
    cases = [c for c in cases if c["tests"] and "ok" in c["name"]]
    rows = [lcb_row(c["name"], c["tests"], c["func_name"]) for c in cases]
    assert len(rows) >= 2
    for case, problem in zip(cases, load_lcb(tmp_path, rows), strict=True):
        verdict = verify_code(case["response"], problem["tests"](), problem["func_name"])
        assert (verdict.reward == 1) == case["passed"], case["name"]


def test_the_livecodebench_prompt_is_the_official_one(tmp_path):
    square, pair = load_lcb(tmp_path, [lcb_row("square", STDIN), lcb_row("p", FUNCTIONAL, "pair")])
    system, user = square["problem"]
    assert system["content"].endswith("matches the specification and passes all tests.")
    assert user["content"] == (
        "### Question:\nsolve square\n\n### Format: Read the inputs from stdin solve the problem and "
        "write the answer to stdout (do not directly test on the sample inputs). Enclose your code "
        "within delimiters as follows. Ensure that when the python program runs, it reads the "
        "inputs, runs the algorithm and writes output to STDOUT.\n```python\n# YOUR CODE HERE\n"
        "```\n\n### Answer: (use the provided format with backticks)\n\n"
    )
    assert (
        "```python\nclass Solution:\n    def pair(self, x):\n```" in pair["problem"][1]["content"]
    )


def test_the_date_window_includes_both_of_its_days(tmp_path, capsys):
    days = ["2024-01-31", "2024-02-01", "2024-02-29", "2024-03-01"]
    rows = [lcb_row(day, STDIN, contest_date=f"{day}T23:00:00") for day in days]
    window = ("--lcb_start", "2024-02-01", "--lcb_end", "2024-02-29")
    assert [p["id"] for p in load_lcb(tmp_path, rows, *window)] == days[1:3]
    window = ("--lcb_start", "20240201", "--lcb_end", "2024-W09-4")  # ISO dates too
    assert [p["id"] for p in load_lcb(tmp_path, rows, *window)] == days[1:3]
    message = one_sentence(capsys, load_lcb, tmp_path, rows, "--lcb_start", "2030-01-01")
    assert "--lcb_start" in message


def test_known_bad_problems_are_listed_and_left_out_only_when_asked(tmp_path, capsys):
    rows = [
        lcb_row("abc350_c", STDIN),
        lcb_row("3194", STDIN, question_title="find-the-peaks"),
        lcb_row("good", STDIN),
    ]
    assert len(load_lcb(tmp_path, rows)) == 3
    assert "abc350_c, 3194" in capsys.readouterr().out
    assert [p["id"] for p in load_lcb(tmp_path, rows, "--lcb_skip_bad")] == ["good"]


def test_a_release_is_the_files_up_to_it_by_hub_download(tmp_path, monkeypatch, capsys):
    asked = []

    def cached_file(repo, name, repo_type, revision):
        asked.append((repo, name, repo_type, revision))
        return str(write_jsonl(tmp_path / name, [lcb_row(name, STDIN)]))

    monkeypatch.setattr("transformers.utils.cached_file", cached_file)
    monkeypatch.setitem(evaluation.LCB_ROWS, "release_v3", 3)
    problems = evaluation.load_benchmark("livecodebench", options("--lcb_release", "release_v3"))
    assert [p["id"] for p in problems] == ["test.jsonl", "test2.jsonl", "test3.jsonl"]
    assert {(a, c, d) for a, b, c, d in asked} == {
        (
            "livecodebench/code_generation_lite",
            "dataset",
            "0fe84c3912ea0c4d4a78037083943e8f0c4dd505",
        )
    }
    message = one_sentence(
        capsys, evaluation.load_benchmark, "livecodebench", options("--lcb_release", "release_v2")
    )
    assert "found 2 rows, expected 511" in message


class Evil:
    def __reduce__(self):
        return print, ("pwned",)


def test_a_pickle_that_asks_for_code_is_refused(tmp_path, capsys):
    def private(_):
        return base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()

    message = one_sentence(capsys, load_lcb, tmp_path, [lcb_row("a", STDIN, private=private)])
    assert "builtins.print" in message
    assert "livecodebench.jsonl line 1" in message


def test_a_zip_bomb_ends_at_the_bound_without_being_unpacked(monkeypatch):
    bomb = base64.b64encode(zlib.compress(b"0" * 10_000_000)).decode()
    monkeypatch.setattr(evaluation, "MAX_TESTS_BYTES", 1_000_000)
    with pytest.raises(ValueError, match="1,000,000 bytes"):
        evaluation.decode_tests(bomb)


def test_a_pickle_cannot_make_the_decoder_allocate_gigabytes():
    payload = b"\x80\x04\x8c\x01ar\xff\xff\xff\x7f."  # LONG_BINPUT: memo slot 2**31 - 1
    with pytest.raises(ValueError):
        evaluation.decode_tests(base64.b64encode(zlib.compress(payload)).decode())


@pytest.mark.parametrize(
    "private", ["", "not base64!", "AAAA", encoded(STDIN)[:40], encoded([{"input": "1"}]), "[1]"]
)
def test_undecodable_tests_are_one_sentence_with_their_place(private, tmp_path, capsys):
    rows = [lcb_row("a", STDIN), lcb_row("b", STDIN, private_test_cases=private)]
    assert "livecodebench.jsonl line 2" in one_sentence(capsys, load_lcb, tmp_path, rows)


def test_a_problem_without_tests_or_columns_is_one_sentence(tmp_path, capsys):
    assert "no tests" in one_sentence(capsys, load_lcb, tmp_path, [lcb_row("a", [])])
    message = one_sentence(capsys, load_lcb, tmp_path, [{"question_id": "a", "prompt": "p"}])
    assert "private_test_cases" in message
    assert "['prompt', 'question_id']" in message


# ----------------------------------------------------------------------------------------
# Statistics


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_equals_exact_enumeration(n):
    for c in range(n + 1):
        responses = [1] * c + [0] * (n - c)
        for k in range(1, n + 1):
            draws = [any(draw) for draw in itertools.combinations(responses, k)]
            assert evaluation.pass_at_k(n, c, k) == pytest.approx(statistics.fmean(draws))
    with pytest.raises(ValueError, match=f"n = {n}"):
        evaluation.pass_at_k(n, 0, n + 1)


def test_standard_errors_are_those_of_a_simulation():
    """Problems differ in difficulty: what repeated draws of problems and responses vary by is what
    the error says, and far more than the binomial error of independent responses."""
    rng, scores, errors, naive = random.Random(0), [], [], []
    problems, samples = 40, 8
    for _ in range(2000):
        means = []
        for _ in range(problems):
            p = rng.betavariate(0.5, 0.5)
            means.append(sum(rng.random() < p for _ in range(samples)) / samples)
        score, error = evaluation.mean_and_error(means)
        scores.append(score)
        errors.append(error)
        naive.append((score * (1 - score) / (problems * samples)) ** 0.5)
    spread = statistics.stdev(scores)
    assert statistics.fmean(errors) == pytest.approx(spread, rel=0.05)
    assert statistics.fmean(naive) < 0.6 * spread
    assert evaluation.mean_and_error([1.0]) == (1.0, None)


def test_the_paired_bootstrap_covers_the_truth_and_is_narrower_than_an_unpaired_one():
    rng, covered, repeats = random.Random(1), 0, 200
    for _ in range(repeats):
        tasks = []
        for _ in range(2):
            hard = [rng.random() * 0.8 for _ in range(50)]
            b = [sum(rng.random() < p + 0.1 for _ in range(4)) / 4 for p in hard]
            a = [sum(rng.random() < p for _ in range(4)) / 4 for p in hard]
            tasks.append([x - y for x, y in zip(b, a)])
        mean, low, high = evaluation.paired_bootstrap(tasks, draws=500)
        assert low <= mean <= high
        covered += low <= 0.1 <= high
    assert 0.90 <= covered / repeats <= 0.985
    assert evaluation.paired_bootstrap([[0.0] * 9, [0.5] * 9]) == (0.25, 0.25, 0.25)


def sample(problem, reward, reason="", tokens=10, finish_reason="stop", **more):
    reason = reason or ("correct" if reward else "wrong")
    return {
        "id": str(problem), "problem_hash": "h", "reward": reward, "reason": reason,
        "tokens": tokens, "finish_reason": finish_reason, **more,
    }  # fmt: skip


def test_a_summary_is_right_on_a_hand_worked_example():
    rows = [sample(0, r) for r in (1, 1, 1, 0)] + [sample(1, r) for r in (0, 0, 0, 1)]
    rows[7] |= {"tokens": 90, "finish_reason": "length"}
    rows[6] |= {"reason": "no_answer"}
    s = evaluation.summarise("t", rows)
    assert (s["problems"], s["samples"], s["score"]) == (2, 4, 0.5)
    assert s["error"] == pytest.approx(0.25)  # means .75 and .25: sd .3536, over sqrt 2
    assert s["pass"] == {1: 0.5, 2: pytest.approx((1 + 0.5) / 2), 4: 1.0}
    assert (s["tokens"], s["truncated"], s["no_answer"]) == (20, 1 / 8, 1 / 8)
    assert s["per_problem"] == {"0 h": 0.75, "1 h": 0.25}


def test_ragged_samples_weigh_every_problem_the_same():
    rows = [sample(0, 1)] * 8 + [sample(1, 0)] * 2
    assert evaluation.summarise("t", rows)["score"] == 0.5


def test_sandbox_errors_count_apart_and_forbid_a_score_beyond_one_percent(capsys, tmp_path):
    rows = [sample(i % 50, 1) for i in range(200)]
    rows[0] = sample(0, 0, "sandbox_error")
    rows[1] = sample(1, 0, "sandbox_error")
    few = evaluation.summarise("t", rows)
    assert (few["score"], few["sandbox_errors"]) == (1.0, 0.01)
    more = [*rows[:2], sample(2, 0, "sandbox_error"), *rows[3:]]
    many = evaluation.summarise("t", more)
    assert (many["score"], many["pass"]) == (None, {})
    evaluation.finish(tmp_path, {}, {"a": rows, "b": more})
    table = capsys.readouterr().out
    assert "b: no score" in table
    assert "average" not in table
    assert json.loads((tmp_path / "results.json").read_text())["average"] is None


def test_a_k_that_only_a_sandbox_error_puts_out_of_reach_has_no_pass_rate():
    rows = [sample(0, 1) for _ in range(127)] + [sample(0, 0, "sandbox_error")]
    passes = evaluation.summarise("t", rows)["pass"]
    assert (passes[64], passes[128]) == (1.0, None)


def test_the_average_is_unweighted_over_benchmarks(tmp_path, capsys):
    rows = {"a": [sample(i, i % 2) for i in range(100)], "b": [sample(i, 1) for i in range(4)]}
    evaluation.finish(tmp_path, {}, rows)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["average"]["score"] == 0.75
    assert results["average"]["error"] == pytest.approx(results["benchmarks"]["a"]["error"] / 2)
    assert "| average |" in capsys.readouterr().out


# ----------------------------------------------------------------------------------------
# Replay


def replay(tmp_path, rows, *argv):
    path = write_jsonl(tmp_path / "given.jsonl", rows)
    evaluation.replay(evaluation.parse(["--responses", str(path), *argv]))
    return json.loads((tmp_path / "given/eval/results.json").read_text())["benchmarks"]


def test_replay_scores_given_responses_grouped_by_problem(tmp_path, capsys):
    rows = [
        {"problem": f"p{i}", "answer": str(i), "response": f"\\boxed{{{i + (s > i)}}}"}
        for s in range(4)
        for i in range(3)
    ]
    rows[-1] |= {"tokens": 7, "finish_reason": "length"}
    result = replay(tmp_path, rows)["given"]
    # problem i is right for samples 0..i
    assert (result["problems"], result["samples"]) == (3, 4)
    assert result["score"] == pytest.approx((1 / 4 + 2 / 4 + 3 / 4) / 3)
    assert (result["tokens"], result["truncated"]) == (7, 1.0)  # of those that say
    assert "pass@4" in capsys.readouterr().out
    saved = [json.loads(line) for line in (tmp_path / "given/eval/samples.jsonl").open()]
    assert [s["extracted"] for s in saved if s["gold"] == "0"] == ["0", "1", "1", "1"]
    assert [s["sample"] for s in saved if s["gold"] == "0"] == [0, 1, 2, 3]


def test_replay_scores_programs_and_keeps_tasks_apart(tmp_path):
    code = {"problem": "q", "tests": STDIN, "response": "```python\nprint(int(input())**2)\n```"}
    rows = [
        {"task": "code", **code},
        {"task": "math", "problem": "q", "answer": "1", "response": "I give up"},
    ]
    results = replay(tmp_path, rows)
    assert (results["code"]["score"], results["math"]["score"]) == (1.0, 0.0)
    assert results["math"]["no_answer"] == 1.0
    math = {"problem": "q", "answer": "1", "response": "\\boxed{1}"}
    assert replay(tmp_path, [math | {"task": 7}, math | {"task": None}]).keys() == {"7", "given"}


def test_replay_mistakes_are_one_sentence(tmp_path, capsys):
    row = {"problem": "p", "answer": "1", "response": "\\boxed{1}"}
    message = one_sentence(capsys, replay, tmp_path, [row, {"problem": "p", "response": "r"}])
    assert "row 2" in message
    assert "row 2" in one_sentence(capsys, replay, tmp_path, [row, row | {"answer": ""}])
    assert "row 2" in one_sentence(capsys, replay, tmp_path, [row, row | {"response": None}])
    message = one_sentence(capsys, replay, tmp_path, [row, row | {"tokens": "many"}])
    assert "row 2: tokens is 'many'; make it a number" in message
    assert "no rows" in one_sentence(capsys, replay, tmp_path, [])
    message = one_sentence(capsys, replay, tmp_path, [row, row], "--pass_k", "3")
    assert "--pass_k 3" in message
    missing = evaluation.parse(["--responses", str(tmp_path / "none.jsonl")])
    assert "none.jsonl" in one_sentence(capsys, evaluation.replay, missing)


@needs_shared
def test_replay_agrees_with_the_labels_of_the_math_cases(tmp_path):
    rows = [json.loads(line) for line in (SHARED / "cases/math_cases.jsonl").open()]
    rows = [row | {"problem": str(i)} for i, row in enumerate(rows) if row["correct"] is not None]
    replay(tmp_path, rows)
    saved = [json.loads(line) for line in (tmp_path / "given/eval/samples.jsonl").open()]
    agree = [bool(s["reward"]) == row["correct"] for s, row in zip(saved, rows, strict=True)]
    assert statistics.fmean(agree) >= 0.995


# ----------------------------------------------------------------------------------------
# Command line


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--benchmarks", "aime26"], "aime26"),
        (["--benchmarks", ","], "choose from math500"),
        (["--benchmarks", "math500,aime26"], "choose from math500, aime24"),
        (["--samples", "4", "--pass_k", "8"], "raise --samples"),
        (["--benchmarks", "math500", "aime24", "--pass_k", "8"], "samples, here 4"),
        (["--pass_k", "0"], "--pass_k 0"),
        (["--samples", "-1"], "--samples -1"),
        (["--temperature", "-0.5"], "--temperature -0.5"),
        (["--temperature", "0"], "--temperature 0"),
        (["--temperature", "nan"], "--temperature nan"),
        (["--batch_size", "0"], "--batch_size 0"),
        (["--lcb_start", "2024-2-30"], "YYYY-MM-DD"),
        (["--compare", "a", "b"], "one of --model"),
        (["--preset", "llama"], "'llama' (choose from 'auto', 'qwen3'"),
        (["--lcb_release", "v9"], "choose from 'release_v1'"),
        (["--modle", "m"], "--modle m; --help"),
    ],
)
def test_mistakes_on_the_command_line_are_one_sentence(argv, said, capsys):
    assert said in one_sentence(capsys, evaluation.parse, ["--model", "m", *argv])


def test_an_engine_that_is_not_installed_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    message = one_sentence(capsys, evaluation.check, evaluation.Options(model="m", engine="vllm"))
    assert "pip install" in message


def test_nothing_to_do_is_one_sentence_too(capsys):
    assert "--help" in one_sentence(capsys, evaluation.parse, [])


def test_every_option_explains_itself():
    for field in evaluation.Options.__dataclass_fields__.values():
        assert field.metadata["help"]


# ----------------------------------------------------------------------------------------
# Comparison and pictures


def is_drawn(path):
    """Not blank: several colours, on a part of the canvas."""
    pixels = matplotlib.image.imread(path)[..., :3]
    inked = (pixels < 0.9).any(axis=-1).mean()
    return path.exists() and 0.01 < inked < 0.9


def make_results(folder, scores):
    """An evaluation in which problem i of task t has this per-problem score."""
    rows = {
        task: [sample(i, int(s < 4 * v)) for i, v in enumerate(values) for s in range(4)]
        for task, values in scores.items()
    }
    (folder / "eval").mkdir(parents=True)
    evaluation.finish(folder / "eval", {}, rows)
    return str(folder)


def make_run(folder, rule, accuracies, steps=20, written=None):
    rows = []
    for step in range(1, (written or steps) + 1):
        evaluated = step == steps or (step - 1) % 5 == 0
        spread = step != 3
        rows.append({
            "step": step, "reward": step / 40, "length": 50.0,
            "eval_accuracy": accuracies[min(step // 5, len(accuracies) - 1)] if evaluated else None,
            "eval_step": step - (step != steps) if evaluated else None,
            "length_pos": 30.0 if spread else None, "length_neg": 80.0 if spread else None,
            "length_gap": 50.0 if spread else None,
            "entropy": 0.5 / step, "grad_norm": 1.0, "net_advantage": 0.3,
            "weight_spread": 2.0 if spread else None,
        })  # fmt: skip
    write_jsonl(folder / "metrics.jsonl", rows)
    config = {"aggregation": rule, "steps": steps, "toy_world": "rambler"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def compare(*argv):
    evaluation.compare(evaluation.parse(["--compare", *map(str, argv)]))


def test_comparison_pairs_problems_and_draws(tmp_path, capsys):
    easy, hard = [1.0, 0.75, 0.5, 1.0] * 10, [0.25, 0.0, 0.5, 0.25] * 10
    a = make_results(tmp_path / "sequence", {"math500": easy, "aime24": hard})
    b = make_results(tmp_path / "balanced/checkpoint", {"math500": easy, "aime24": [
        x + 0.25 for x in hard]})  # fmt: skip
    capsys.readouterr()
    compare(a, tmp_path / "balanced")
    out = capsys.readouterr().out
    lines = {line.split("|")[1].strip(): line for line in out.splitlines() if "|" in line}
    assert "balanced - sequence" in lines["%"]
    assert "+0.0 [+0.0, +0.0]" in lines["math500"]  # difficulty cancels: no doubt is left
    assert "+25.0 [+25.0, +25.0]" in lines["aime24"]
    assert "+12.5 [+12.5, +12.5]" in lines["average"]
    assert is_drawn(tmp_path / "eval/compare.png")
    capsys.readouterr()
    compare(b, a)  # a checkpoint can be named too
    assert "sequence - balanced" in capsys.readouterr().out


def test_comparison_uses_the_problems_that_all_runs_have(tmp_path, capsys, monkeypatch):
    a = make_results(tmp_path / "a", {"math500": [1.0, 1.0, 1.0, 0.0], "aime24": [0.5]})
    b = make_results(tmp_path / "b", {"math500": [0.0, 0.0], "aime24": [0.5]})
    capsys.readouterr()
    drawn = []
    monkeypatch.setattr(evaluation, "draw_compare", lambda *args: drawn.append(args[0]))
    compare(a, b)
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if "|" in line]
    cells = {row[1].strip(): [cell.strip() for cell in row[2:6]] for row in rows}
    assert cells["math500"][:3] == ["2", "100.0", "0.0"]
    assert cells["average"][1:3] == ["75.0", "25.0"]
    assert drawn[0]["math500"] == {"a": [1.0, 1.0], "b": [0.0, 0.0]}


def test_comparison_says_what_it_leaves_out(tmp_path, capsys):
    a = make_results(tmp_path / "a", {"math500": [1.0], "aime24": [0.5], "aime25": [0.5, 0.0]})
    b = make_results(tmp_path / "b", {"math500": [0.0], "minerva_math": [1.0], "aime25": [0.5]})
    # Of aime25 they have no problem in common.
    results = (tmp_path / "b/eval/results.json").read_text().replace("0 h", "0 other")
    (tmp_path / "b/eval/results.json").write_text(results.replace("0 other", "0 h", 1))
    capsys.readouterr()
    compare(a, b)
    assert ": aime24, aime25, minerva_math\n" in capsys.readouterr().out


def test_comparison_shows_best_against_last_accuracy(tmp_path, capsys):
    for rule, curve in (("sequence", [0.1, 0.5, 0.9, 0.6]), ("token", [0.1, 0.5, 0.7, 0.8])):
        make_results(make_run(tmp_path / rule, rule, curve), {"math500": [0.5, 1.0]})
    capsys.readouterr()
    (tmp_path / "token/eval").rename(tmp_path / "token/checkpoint")  # a checkpoint may be named
    compare(tmp_path / "sequence", tmp_path / "token/checkpoint", "--metrics")
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.startswith("| sequence"))
    cells = [cell.strip() for cell in row.split("|")[2:6]]
    assert cells == ["90.0", "60.0", "30.0", "10"]
    assert is_drawn(tmp_path / "eval/compare.png")


def test_comparison_mistakes_are_one_sentence(tmp_path, capsys):
    a = make_results(tmp_path / "a", {"math500": [1.0]})
    b = make_results(tmp_path / "b", {"aime24": [1.0]})
    capsys.readouterr()
    assert "two runs" in one_sentence(capsys, compare, a)
    assert "evaluate it first" in one_sentence(capsys, compare, a, tmp_path / "c")
    assert "no problem" in one_sentence(capsys, compare, a, b)
    c = make_results(tmp_path / "c", {"math500": [0.0]})
    assert "metrics.jsonl" in one_sentence(capsys, compare, a, c, "--metrics")


@pytest.fixture
def figures(monkeypatch):
    """The figures that were drawn."""
    drawn, save = [], evaluation.Figure.savefig

    def savefig(figure, *args, **kwargs):
        save(figure, *args, **kwargs)
        drawn.append(figure)

    monkeypatch.setattr(evaluation.Figure, "savefig", savefig)
    return drawn


def test_no_picture_cuts_anything_off(tmp_path, figures):
    names = [f"qwen3-1.7b-dapo-{rule}" for rule in ("sequence", "token", "balanced", "a", "b")]
    for tasks, runs, metrics in ((1, 2, ()), (1, 5, ("--metrics",)), (6, 3, ())):
        folders = []
        for name in names[:runs]:
            run = make_run(tmp_path / f"{tasks}{runs}" / name, "token", [0.1, 0.9, 0.5])
            tables = {task: [0.5, 1.0] for task in list(evaluation.BENCHMARKS)[:tasks]}
            folders.append(make_results(run, tables))
        compare(*folders, *metrics)
    evaluation.draw_curves(Path(folders[0]))
    for worlds in (1, 2):
        rules = {rule: [Path(folders[0])] * 3 for rule in evaluation.COLORS}
        evaluation.draw_rules({f"world {i}": rules for i in range(worlds)}, tmp_path / "r.png")
    assert len(figures) == 6
    for figure in figures:
        for panel in figure.axes:  # labels do not lie upon one another
            boxes = sorted((t.get_window_extent() for t in panel.texts), key=lambda box: box.y0)
            assert all(a.y1 <= b.y0 + 1 for a, b in itertools.pairwise(boxes))
        inked, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
        assert inked.xmin >= 0
        assert inked.ymin >= 0
        assert inked.xmax <= width
        assert inked.ymax <= height


def test_bars_are_scores_and_their_intervals_two_standard_errors(tmp_path, figures):
    scores = {"math500": {"token": [1.0, 0.0, 1.0, 0.0], "balanced": [1.0, 1.0, 1.0, 1.0]}}
    evaluation.draw_compare(scores, {}, tmp_path / "compare.png")
    token, balanced = [c for c in figures[0].axes[0].containers if hasattr(c, "patches")]
    assert (token.patches[0].get_height(), balanced.patches[0].get_height()) == (0.5, 1.0)
    ((low, high),) = (segment[:, 1] for segment in token.errorbar[2][0].get_segments())
    assert high - low == pytest.approx(2 * 1.96 * (1 / 3) ** 0.5 / 2)


def test_the_table_of_the_rules_holds_means_over_seeds(tmp_path):
    seeds = [
        make_run(tmp_path / str(last), "token", [0.1, last, last, last, last])
        for last in (0.4, 0.6)
    ]
    for run in seeds:
        rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
        write_jsonl(run / "metrics.jsonl", [row | {"length_gap": 7.0} for row in rows])
    table = evaluation.rules_table({"world": {"token": seeds}})
    cells = [cell.strip() for cell in table.splitlines()[2].split("|")[3:-1]]
    # `mean`: up from 0.1 for a quarter of the training, then flat
    assert cells == ["0.100", "0.500", "0.500", "0.450", "50.0", "+7.0", "0.300", "-"]


def test_the_table_says_by_how_much_balanced_leads(tmp_path):
    """Mean accuracy over training, paired by seed: 0.35, 0.45 against 0.25, 0.3 (flat curves)."""
    accuracies = {"balanced": (0.35, 0.45, 0.2), "token": (0.25, 0.3, 0.3), "fourth": (0.1,)}
    runs = {
        rule: [make_run(tmp_path / f"{rule}{i}", rule, [x, x, x, x, x]) for i, x in enumerate(some)]
        for rule, some in accuracies.items()
    }
    rows = evaluation.rules_table({"world": runs}).splitlines()[2:]
    cells = [row.split("|")[-2].strip() for row in rows]
    assert cells == ["-", "+0.050 ± 0.076, 2 of 3", "+0.250, 1 of 1"]  # 0.1, 0.15, -0.1
    alone = evaluation.rules_table({"world": {"token": runs["token"]}})
    assert alone.splitlines()[2].endswith(" - |")


def test_the_table_says_what_was_not_measured(tmp_path):
    """A run of one step is scored at its end only; no group of it had spread."""
    run = make_run(tmp_path / "run", "token", [0.25], steps=1)
    rows = [json.loads(line) | {"length_gap": None} for line in (run / "metrics.jsonl").open()]
    write_jsonl(run / "metrics.jsonl", rows)
    table = evaluation.rules_table({"world": {"token": [run]}})
    cells = [cell.strip() for cell in table.splitlines()[2].split("|")[3:-1]]
    assert cells == ["-", "0.250", "0.250", "-", "50.0", "-", "0.300", "-"]


def test_a_model_is_of_the_math_family_by_its_own_name_not_its_folders():
    config = SimpleNamespace(model_type="qwen2", max_position_embeddings=4096)
    for model, expected in (
        ("/data/mathilde/Qwen2-0.5B", "suffix"),
        ("Qwen/Qwen2.5-Math-7B", "system"),
    ):
        _, instruction, _ = evaluation.choose_preset(evaluation.Options(model=model), config)
        assert instruction == expected


def test_a_single_step_is_seen_in_every_panel(tmp_path, figures):
    evaluation.draw_curves(make_run(tmp_path / "run", "token", [0.1], written=1))
    (figure,) = figures
    lines = [line for panel in figure.axes for line in panel.get_lines()]
    assert len(lines) == 9
    assert all(line.get_marker() not in ("None", None, "") for line in lines)
    for low, high in (panel.get_xlim() for panel in figure.axes):
        assert low <= 0
        assert high >= 1


def test_a_rule_keeps_its_colour_beside_runs_named_after_it():
    names = ["balanced", "long-balanced", "base", "token"]
    colors = evaluation.color_of(names)
    assert colors["balanced"] == evaluation.COLORS["balanced"]
    assert colors["token"] == evaluation.COLORS["token"]
    assert len(set(colors.values())) == 4


def test_accuracy_is_over_updates_done(tmp_path):
    run = make_run(tmp_path / "run", "token", [0.1, 0.2, 0.3, 0.4, 0.5])
    x, y = evaluation.accuracy_curve(run)
    assert x == [0, 5, 10, 15, 20]  # lines 1, 6, 11, 16 before their update, line 20 after it
    assert y == [0.1, 0.2, 0.3, 0.4, 0.5]
    unfinished = make_run(tmp_path / "unfinished", "token", [0.1, 0.2], written=6)
    assert evaluation.accuracy_curve(unfinished)[0] == [0, 5]


@pytest.mark.parametrize("written", [1, 3, 20])
def test_curves_are_drawn_while_the_run_goes_on(tmp_path, written):
    run = make_run(tmp_path / "run", "token", [0.1, 0.5], written=written)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 21, "rewa')  # a line being written
    assert is_drawn(evaluation.draw_curves(run))


def test_rules_are_drawn_in_their_own_colours_one_panel_per_world(tmp_path):
    runs = {
        world: {
            rule: [make_run(tmp_path / f"{world}{rule}{s}", rule, [0.1, height]) for s in range(2)]
            for rule, height in (("sequence", 0.3), ("token", 0.6), ("balanced", 0.9))
        }
        for world in ("rambler", "guesser")
    }
    path = evaluation.draw_rules(runs, tmp_path / "compare.png")
    assert is_drawn(path)
    pixels = matplotlib.image.imread(path)[..., :3]
    half = pixels.shape[1] // 2
    assert len(set(evaluation.COLORS.values())) == 3
    for color in evaluation.COLORS.values():
        rgb = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        match = (abs(pixels - rgb) < 0.01).all(axis=-1)
        assert match[:, :half].sum() > 100, color
        assert match[:, half:].sum() > 100, color
