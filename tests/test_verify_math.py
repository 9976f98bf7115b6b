"""What is a right answer: by kind, against golds of the benchmarks, and on hostile input."""

import json
import random
import re
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from verify import MAX_BOXES, Verifier, extract_answer, math_equal, normalise, verify_math

SHARED = Path(__file__).resolve().parents[2] / "shared"
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="needs the shared data")


def read_table():
    """(gold, answer, is it right) for the answers of math_answers.txt."""
    gold = ""
    for line in (Path(__file__).parent / "math_answers.txt").read_text("utf-8").splitlines():
        if line.startswith("    "):
            verdict, _, answers = line.strip().partition(": ")
            for answer in answers.split(" ~~ "):
                yield gold, answer, verdict == "right"
        elif line and not line.startswith("# "):
            gold = line


@pytest.mark.parametrize(("gold", "answer", "right"), list(read_table()))
def test_an_answer_is_judged_by_its_kind(gold, answer, right):
    assert math_equal(answer, gold) is right


@pytest.mark.parametrize("gold", sorted({gold for gold, _, _ in read_table()}))
def test_every_gold_answers_itself(gold):
    assert verify_math(rf"So it is \boxed{{{gold}}}.", gold).reason == "correct"


# ---- the answer in a response ------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{5}", "5"),
        (r"so \boxed {5} it is", "5"),
        (r"\boxed{\frac{1}{2}} and more } braces {", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x : x > 0 \right.}", r"\left\{ x : x > 0 \right."),
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"\boxed{\boxed{7}}", r"\boxed{7}"),
        (r"\boxed{x = \boxed{7}}", r"x = \boxed{7}"),
        (r"\boxed{5} so \boxed{6", "5"),
        (r"\boxed{5 \boxed{6}", "6"),
        (r"\boxed{}", ""),
        (r"\boxed{5", None),
        (r"\boxed 5", None),
        ("five", None),
        ("", None),
        (r"<think>\boxed{1}</think> \boxed{2}", "2"),
        (r"<think>\boxed{1}</think> no", None),
        (r"\boxed{1}</think>\boxed{2}", "2"),
        (r"<think>\boxed{1}", None),
        (r"<think>a</think>\boxed{1}<think>", None),
        (r"<think></think></think>\boxed{2}", "2"),
    ],
)
def test_the_last_complete_box_after_the_reasoning_is_the_answer(response, answer):
    assert extract_answer(response) == answer


def test_spraying_boxes_does_not_pay():
    boxes = [rf"\boxed{{{n}}}" for n in range(MAX_BOXES + 1)]
    assert extract_answer(" ".join(boxes[1:])) == str(MAX_BOXES)
    assert extract_answer(" ".join(boxes)) is None
    assert extract_answer(" ".join(boxes[1:]) + boxes[-1] * 9) == str(MAX_BOXES)
    assert extract_answer(f"<think>{' '.join(boxes)}</think>" + boxes[2]) == "2"


def test_extraction_is_linear():
    for piece in (r"\boxed{", "{", "}", r"\boxed", "\\", "<think>", r"\boxed{5}", r"\boxed{5} {"):
        begin = time.process_time()
        extract_answer(piece * 100_000)
        assert time.process_time() - begin < 3


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (r"\boxed{5}", "correct"),
        (r"\boxed{6}", "wrong"),
        (r"\boxed{}", "no_answer"),
        (r"\boxed{ \, }", "no_answer"),
        ("5", "no_answer"),
        (r"\boxed{)(}", "unparseable"),
        (r"\boxed{\frac{5}}", "unparseable"),
        (r"\boxed{%s}" % ("x+" * 999 + "1"), "unparseable"),
        (r"\boxed{%s}" % (r"\sqrt{1+" * 12 + "2" + "}" * 12), "unparseable"),
    ],
)
def test_the_reason_says_why(response, reason):
    assert verify_math(response, "5").reason == reason


def test_a_list_of_golds_means_any_of_them():
    assert verify_math(r"\boxed{6630}", ["6630.65", "6630"]).reward == 1.0
    assert verify_math(r"\boxed{6000}", ["6630.65", "6630"]).reward == 0.0


@pytest.mark.parametrize("gold", ["", " ", "$ $", r"\boxed{}", r"\,", [], ["5", ""], None, [None]])
def test_an_empty_gold_is_a_data_error(gold):
    with pytest.raises(ValueError, match="gold"):
        verify_math(r"\boxed{5}", gold)
    if isinstance(gold, str):
        with pytest.raises(ValueError, match="gold"):
            math_equal("5", gold)


# ---- bounded -----------------------------------------------------------------------------

ATTACKS = [
    "9^{9^9}", "9^{9^{9^9}}", "((9^9)^9)^9", "(10^{10})!", "(((99!)!)!)!", "9!!!!!", "10^{10^{10}}",
    r"\sum_{n=1}^{10^9}\frac{1}{n^2}", r"\prod_{n=1}^{10^7} n", r"\sum_{a=1}^{99}\sum_{b=1}^{99}1",
    "2^{2^{40}}", r"\int_0^\infty e^{-x^3}\sin(x^5)dx", "(" * 300 + "5" + ")" * 300,
    r"\frac{1}{" * 60 + "2" + "}" * 60, "f(" * 80 + "x" + ")" * 80,
    r"\sqrt{" * 60 + "2" + "}" * 60, "5" * 100_000, "5+" * 250,
    "x_" * 200, r"\cos\frac12 n" * 25, r"\int x'" * 15, r"\sin" * 100, "|" * 200, r"\{" * 99,
    r"\binom{10^9}{10^8}", r"\binom{999999999}{99999999}", r"\gcd(10^{10^{10}},5)", "1e999999999",
    "10^{-99999999999}", r"1.5^{99999999999}", r"e^{e^{e^{e^{e^e}}}}", r"\sin(9^{9^9})",
    r"\Gamma(10^{10^{10}})", r"x^{9^{9^9}}", "^" * 500, r"\pm" * 99, "1," * 299, r"\text{" * 90,
    r"\det\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\lim_{x\to0}\frac{\sin x}{x}", "5\n" * 300,
    r"\operatorname{eig}(5)", "a" * 500, "-" * 500, r"\text{a} " * 60 + "x", "m " * 250 + "x",
    "5 " + "mol " * 40 + "!", "5 " + "cal^2 " * 40 + "!", r"5 \mathrm{m}^{-1}" * 30 + "!", "5 " + "m{" * 99,
    "AB" * 40 + "=5", r"\alpha" * 99 + "=5", "A_{1}" * 99 + "=5", r"5\text{ cm}" * 50 + "?",
    "²" * 500, "½" * 500, "√" * 500, "ﷺ" * 500, "6" + " " * 90_000, "(1,2)," * 99, r"\cup" * 99,
]  # fmt: skip


@pytest.mark.parametrize("gold", ["5", r"\frac{1}{2}", "x+1", "1,2,3", "(1,2)", "y=2x", "[0,1)"])
def test_time_attacks_are_refused_in_a_moment(gold):
    math_equal("x+1", "1+x")  # the imports
    for attack in ATTACKS:
        begin = time.process_time()
        assert not math_equal(attack, gold)
        assert time.process_time() - begin < 1.5, attack[:60]


def test_huge_answers_are_right_if_they_are_the_gold():
    for attack in ATTACKS:
        if normalise(attack) and attack.count("{") == attack.count("}"):
            assert verify_math(rf"\boxed{{{attack}}}", attack).reward == 1.0


FRAGMENTS = re.findall(
    r"\S+",
    r"""\frac \sqrt { } ( ) [ ] \{ \} ^ _ 1 2 5 10 99 x y n e i \pi \sin \cos \log \ln + - * / = < ¼
    \le \ge \ne , ; : ! \cdot \times \text{ \pm \cup \in \sum \int \binom | \lfloor \rfloor & \\ % $
    \begin{pmatrix} \end{pmatrix} \infty \left \right \vec \prime \circ \gcd \max \lim \to d f( 0 1/
    \frac{1}{2} x^2 9^{9^9} \operatorname \mathrm{ \mathbb{R} \approx \text{or} \boxed{ ** ½ √ ² ≤ e5
    1e9 \, \! ~ a_1 \Gamma \exp \tan^{-1} !! \partial <think> </think> cm \text{cm} 12,345 \mp . ' \det""",
)
GOLDS = ["5", r"\frac{1}{2}", "x+1", "(1,2)", "1,2,3", "[0,1)", "x>3", "y=2x+1", r"\text{even}"]
GOLDS += [r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "2516_8", "9^{9^9}", "12:30", "x+z=1", "50\\%"]
latex = st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join)
latex |= st.tuples(latex, st.integers(1, 20)).map(lambda pair: pair[0] * pair[1])
text = latex | st.text(max_size=60) | st.binary(max_size=60).map(lambda b: b.decode("latin-1"))


@settings(max_examples=2000, deadline=4000)
@given(text, st.sampled_from(GOLDS), st.integers(0, 20))
@example("\ud800", "5", 0)
def test_verification_never_raises_and_always_ends(answer, gold, cut):
    response = rf"so \boxed{{{answer}}}"
    for given_response in (response, response[: len(response) - cut], answer):
        verdict = verify_math(given_response, gold)
        assert verdict.reward == (verdict.reason == "correct")
        assert verdict.reason in ("correct", "wrong", "no_answer", "unparseable")


@settings(max_examples=1000, deadline=4000)
@given(text)
def test_whatever_is_the_gold_answers_itself(answer):
    if normalise(answer):
        assert math_equal(answer, answer)
        box = rf"\boxed{{{answer}}}"
        if (extract_answer(box) or "").strip() == answer.strip():
            assert verify_math(box, answer).reward == 1.0


@settings(max_examples=500, deadline=4000)
@given(st.integers(), st.integers(), st.integers(1, 10**6))
def test_numbers_are_compared_exactly(a, b, c):
    assert math_equal(str(a), str(b)) is (a == b)
    assert math_equal(f"{a:,}", str(a))
    assert math_equal(rf"\frac{{{a}}}{{{c}}}", rf"\frac{{{b}}}{{{c}}}") is (a == b)
    assert math_equal(rf"\frac{{{2 * a}}}{{{2 * c}}}", f"{a}/{c}")


@settings(max_examples=300, deadline=4000)
@given(st.lists(st.integers(-99, 99), min_size=2, max_size=6), st.randoms())
def test_order_matters_for_tuples_and_not_for_lists(numbers, rng):
    shuffled = rng.sample(numbers, len(numbers))
    listed = [", ".join(map(str, x)) for x in (numbers, shuffled)]
    assert math_equal(listed[1], listed[0])
    assert math_equal(rf"\{{{listed[1]}\}}", listed[0])
    assert math_equal(f"({listed[1]})", f"({listed[0]})") is (numbers == shuffled)
    assert not math_equal(listed[1] + ", 100", listed[0])
    assert not math_equal(", ".join(map(str, shuffled[1:])), listed[0])


# ---- the shared cases and data ------------------------------------------------------------


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@needs_shared
def test_the_labelled_cases_come_out_as_labelled():
    rows = read(SHARED / "cases/math_cases.jsonl")
    with Verifier(2) as verifier:
        verdicts = verifier.score([row["response"] for row in rows], [r["answer"] for r in rows])
    assert [r for r, v in zip(rows, verdicts) if (v.reward == 1.0) is not r["correct"]] == []


def golds_of(name):
    golds = [row["answer"] for row in read(SHARED / f"data/{name}.jsonl")]
    return [[gold] if isinstance(gold, str) else gold for gold in golds]


SETS = ["math500", "aime24", "aime25", "minerva_math", "olympiadbench", "gsm8k_train", "asdiv"]


@needs_shared
@pytest.mark.parametrize("name", SETS)
def test_every_gold_of_a_benchmark_answers_itself_respelled_too(name):
    for golds in golds_of(name):
        for gold in golds:
            assert verify_math(rf"Thus \boxed{{{gold}}}.", golds).reward == 1.0
            other = re.sub(r"(?<!\\)\$", "", gold).replace(r"\frac", r"\dfrac")
            other = other.replace(r"\times", r"\cdot").replace("(", r"\left( ")
            other = other.replace(")", r" \right)").replace("+", " + ")
            assert verify_math(rf"\[ \boxed{{ {other} }} \]", golds).reward == 1.0, (gold, other)


@needs_shared
@pytest.mark.parametrize("name", SETS)
def test_shuffled_golds_are_wrong(name):
    golds = golds_of(name)
    shuffled = random.Random(0).sample(golds, len(golds))
    pairs = [(a[0], g) for a, g in zip(shuffled, golds) if a != g]
    hits = [(a, g) for a, g in pairs if verify_math(rf"\boxed{{{a}}}", g).reward]
    assert len(hits) <= 0.03 * len(golds), hits


@needs_shared
def test_minervas_powers_of_ten_are_read():
    golds = [gold for golds in golds_of("minerva_math") for gold in golds]
    powers = [match for gold in golds if (match := re.fullmatch(r"(.*?)e(-?\d+)", gold))]
    assert len(powers) > 10
    for match in powers:
        for style in (r"%s \times 10^{%s}", r"%s\cdot10^{%s}", "%s*10^(%s)", "%sE%s"):
            assert math_equal(style % match.groups(), match[0])
        assert not math_equal(rf"{match[1]} \times 10^{{{int(match[2]) + 1}}}", match[0])
