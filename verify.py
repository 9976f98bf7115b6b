"""The only teacher the policy has: scores math answers and programs, right or wrong.

    python verify.py FILE.jsonl          score {"response", "answer"} or {"response", "tests"} rows

Four parts, in reading order: what is a right answer; the pool of worker processes that puts a
deadline on every answer; the sandbox that runs programs; the command line.
"""

import argparse
import functools
import itertools
import json
import math
import os
import re
import resource
import selectors
import subprocess
import sys
import threading
import time
import unicodedata
import zlib
from collections import Counter, deque
from dataclasses import asdict, dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Verdict:
    reward: float  # 1.0 or 0.0
    # correct, wrong, no_answer, unparseable, timeout, runtime_error, output_limit,
    # memory_limit or sandbox_error
    reason: str
    detail: str = ""


# ----------------------------------------------------------------------------------------
# 1. What is a right answer. Structure is decided here, on the text: numbers, words, lists,
#    tuples, intervals, relations. math-verify's parser reads what is left, plain algebra, and
#    two expressions are equal when they agree to 30 digits at random points. Its own comparison
#    is kept for sets only: simplify() is what hangs, and comparing differences with an absolute
#    tolerance takes 2e-25 for 1.6e-19 and 1/2006! for 1/2004! (math-verify 0.9.0, measured).

MAX_BOXES = 3  # more boxes than this with different contents is guessing, not answering
MAX_CHARS = 600  # the longest gold of MATH-500, Minerva and OlympiadBench has 273
MAX_DEPTH = 9  # the parser's time is exponential in nesting: 12 \fracs take 0.1 s, 20 take 22 s


class Unparseable(Exception):
    """The answer cannot be read as mathematics, or is refused unread. Not for golds."""


def extract_answer(response: str) -> str | None:
    """The last balanced, outermost \\boxed{...} of what follows the reasoning."""
    tail = response.rpartition("</think>")[2]
    if "<think>" in tail:
        return None
    open_braces, boxes = [], []  # one pass: "\boxed{" x 10,000 must not cost 10,000 scans
    for token in re.finditer(r"\\boxed\s*\{|\\(?!\\boxed)[\s\S]|[{}]", tail):
        if token[0] == "{":
            open_braces.append(None)
        elif token[0].startswith("\\boxed"):
            open_braces.append(token.end())
        elif token[0] == "}" and open_braces:
            start = open_braces.pop()
            if start is not None:
                while boxes and boxes[-1][0] > start:
                    boxes.pop()  # it was nested in this one
                boxes.append((start, tail[start : token.start()].strip()))
    if not boxes or len({content for _, content in boxes}) > MAX_BOXES:
        return None
    return boxes[-1][1]


# Unicode that NFKC leaves alone, as LaTeX. Superscripts and vulgar fractions go first, because
# NFKC would read x² as x2 and 5½ as 51/2.
UNICODE = {c: "-" for c in "−–—‐‑﹣"} | {c: r"\cdot " for c in "×·⋅∙✕∗"} | {"′": "'", "″": "''"}
UNICODE |= {"÷": "/", "⁄": "/", "∕": "/", "≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge "}
UNICODE |= {"≠": r"\ne ", "≈": r"\approx ", "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap "}
UNICODE |= {"∈": r"\in ", "±": r"\pm ", "∓": r"\mp ", "°": r"^\circ ", "º": r"^\circ "}
UNICODE |= {"∅": r"\emptyset ", "、": ",", "。": ".", "⟨": "(", "⟩": ")", "ℝ": r"\mathbb{R}"}
GREEK = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi o pi rho sigma"
GREEK = dict(zip("αβγδεζηθικλμνξοπρσ", GREEK.split())) | {"τ": "tau", "φ": "phi", "ϕ": "phi"}
GREEK |= {"χ": "chi", "ψ": "psi", "ω": "omega", "Δ": "Delta", "Γ": "Gamma", "Ω": "Omega"}
UNICODE |= {letter: f"\\{name} " for letter, name in GREEK.items()}
SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n"))
SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789"))

NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)"
FUNCTIONS = "sqrt|arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp"
FUNCTIONS += "|pi|theta|alpha|beta|lambda|infty"
STYLES = r"text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf|tt)|mbox|operatorname|boldsymbol|bm"
REWRITES = [  # (pattern, replacement, why), applied in this order
    (r"\\\$|\$|(?<!\\)\\[()\[\]]", "", "math delimiters and dollars"),
    (r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])\s*\.?", "", r"\left( \right."),
    (r"\\(?:displaystyle|textstyle|limits|nolimits)(?![A-Za-z])", "", ""),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac", ""),
    (r"\\[dt]binom(?![A-Za-z])", r"\\binom", ""),
    (r"\{,\}|,\s*\\!\s*", ",", r"12{,}345 and 12,\!345"),
    (r"(?<=\d)(?:\\[,;:!]|~|\\ )(?=\d{3}(?!\d))", "", r"12\,345"),
    (r"(?<!\\)\\[,;:!> ]|\\(?:q?quad|thinspace|enspace)(?![A-Za-z])|~|\s", " ", "spaces"),
    (r"\\%", "%", ""),
    (r"^\**|\**$", "", "markdown stars"),
    (r"\*\*", "^", "Python's power"),
    (r"\\(?:times|ast|cdot)(?![A-Za-z])|\*", r"\\cdot ", ""),
    (r"\\(?:lor|vee)(?![A-Za-z])|,?\s*(?:\\text\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)", ",", ""),
    (r"\\leq?(?:slant)?(?![A-Za-z])|<=", r"\\le ", ""),
    (r"\\geq?(?:slant)?(?![A-Za-z])|>=", r"\\ge ", ""),
    (r"\\neq?(?![A-Za-z])|!=", r"\\ne ", ""),
    (r"\\lt(?![A-Za-z])", "<", ""),
    (r"\\gt(?![A-Za-z])", ">", ""),
    (r"\\(?:lbrace|\{)", r"\\{", ""),
    (r"\\(?:rbrace|\})", r"\\}", ""),
    (r"\\langle(?![A-Za-z])", "(", "vectors"),
    (r"\\rangle(?![A-Za-z])", ")", ""),
    (r"\\(?:[lr]?vert|mid)(?![A-Za-z])", "|", ""),
    (r"\\varnothing", r"\\emptyset", ""),
    (r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?\s*[CF]?(?![A-Za-z])|\\degree", " ", "degrees"),
    (r"(?<=\d)\s*\^\s*\{(?:\s*\\prime)+\s*\}$|(?<=\d)'+$", "", "minutes and seconds of arc"),
    (r"'", r"^{\\prime}", "the parser drops x'"),
    (r"(?<![A-Za-z\\])(?:infinity|inf)(?![A-Za-z])", r"\\infty ", ""),
    (rf"(?<![A-Za-z\\])({FUNCTIONS})(?![A-Za-z])", r"\\\1 ", "pi/2"),
    (r"\\sqrt\s*(\d|[A-Za-z])", r"\\sqrt{\1}", r"\sqrt3"),
    (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", r"\frac12"),
    (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{", r"\frac1{2}"),
    (r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}", r"\frac{1}2"),
    (r"(?<=\d)\s*(?:\\text\{)?\s*thousand\b\s*\}?", r" \\cdot 10^{3}", "5 thousand"),
    (r"(?<=\d)\s*(?:\\text\{)?\s*million\b\s*\}?", r" \\cdot 10^{6}", "5 million"),
    (r"(?<=\d)\s*(?:\\text\{)?\s*billion\b\s*\}?", r" \\cdot 10^{9}", "5 billion"),
    (rf"(?<![\w.\\])({NUMBER})[eE]([+-]?\d{{1,9}})(?![\w.])", r"\1\\cdot 10^{\2}", "4.5e33"),
    (r"(?<![\w./])(\d+)\s+(\d+)/(\d+)(?![\w.])", r"\1\\frac{\2}{\3}", "5 1/2"),
    (r"^(-?\d{1,3})((?: \d{3})+)$", lambda m: m[1] + m[2].replace(" ", ""), "12 345"),
    (r"\s+", " ", ""),
    (r"^[\s,;:]+|[\s.,;:]+$", "", "trailing punctuation"),
]
REWRITES = [(re.compile(pattern), new) for pattern, new, _ in REWRITES]


def normalise(text: str) -> str:
    """One spelling for one thing, so that most answers are decided as strings."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda m: "^{%s}" % "".join(map(SUPERSCRIPTS.get, m[0])), text)
    text = re.sub("[₀-₉]+", lambda m: "_{%s}" % "".join(map(SUBSCRIPTS.get, m[0])), text)
    text = re.sub("[¼-¾⅐-⅞]", r" \g<0> ", text)
    text = unicodedata.normalize("NFKC", text)
    text = re.sub(r"√\s*(\d+|[A-Za-z])", r"\\sqrt{\1}", text).replace("√", r"\sqrt ")
    text = "".join(UNICODE.get(c, c) for c in text if unicodedata.category(c) != "Cf")
    for _ in range(3):  # styles nest; words stay in \text{}, anything else comes out of it
        text = re.sub(rf"\\(?:{STYLES})\s*\*?\s*\{{([^{{}}]*)\}}", _unstyle, text)
    text = re.sub(r"\\boxed\s*(?=\{)", "", text)
    text = re.split(r"\\(?:implies|iff|[Rr]ightarrow|Longrightarrow)(?![A-Za-z])", text)[-1]
    for pattern, new in REWRITES:
        text = pattern.sub(new, text)
    while call := re.search(r"(\\sqrt|\^)\s*\(", text):  # sqrt(x+1), 2^(n+1)
        end = _closing(text, call.end() - 1)
        if end is None:
            break
        text = f"{text[: call.end(1)]}{{{text[call.end() : end]}}}{text[end + 1 :]}"
    return text


def _unstyle(match: re.Match) -> str:
    word = match[1].strip()
    known = re.fullmatch(rf"(?:{FUNCTIONS}|max|min|gcd|lcm)", word)
    return f"\\{word} " if known else f"\\text{{{match[1]}}}" if re.search("[A-Za-z]{2}", word) else word


def _closing(text: str, start: int) -> int | None:
    """Where the bracket that opens at `start` closes; kinds may differ, as in [0,1)."""
    depth = 0
    for bracket in re.finditer(r"[()\[\]{}]", text[start:]):
        depth += 1 if bracket[0] in "([{" else -1
        if depth == 0:
            return start + bracket.start()
    return None


def _split(text: str, separator: str) -> tuple[list[str], list[str]]:
    """Parts and separators, split outside all brackets and environments."""
    parts, separators, depth, last = [], [], 0, 0
    for token in re.finditer(rf"\\begin\b|\\end\b|[()\[\]{{}}]|(?P<sep>{separator})", text):
        if not token["sep"]:
            depth += 1 if token[0] in ("(", "[", "{", r"\begin") else -1
        elif depth == 0:
            parts.append(text[last : token.start()].strip())
            separators.append(token[0])
            last = token.end()
    return parts + [text[last:].strip()], separators


def _key(text: str) -> str:
    """Answers with equal keys are equal."""
    text = re.sub(r"([\^_])\s*\{\s*(\w)\s*\}", r"\1\2", text)
    return re.sub(r"\s+(?!\d)|(?<![\d,.])\s+|^\+", "", text)  # "5 6" is not 56


def _unwrap(text: str) -> str:
    """Drop the braces or parentheses around the whole, where they make no tuple."""
    text = text.strip()
    while text[:1] in ("{", "(") and _closing(text, 0) == len(text) - 1:
        if {"{": "}", "(": ")"}[text[0]] != text[-1] or len(_split(text[1:-1], "[,;]")[0]) > 1:
            break
        text = text[1:-1].strip()
    return text


def _same(answer: str, gold: str) -> bool:
    """Is the normalised answer the normalised gold? Peels one layer of structure at a time."""
    a, g = _unwrap(answer), _unwrap(gold)
    if _key(a) == _key(g):
        return bool(_key(a))
    (a, a_unit), (g, g_unit) = _strip_unit(a, bool(_number(g))), _strip_unit(g, False)
    if a_unit and g_unit and a_unit != g_unit:
        return False
    a, g = _unwrap(a), _unwrap(g)
    if (number := _same_number(a, g)) is not None:
        return number
    (a_parts, _), (g_parts, _) = _split(a, "[,;]"), _split(g, "[,;]")
    a_relation, g_relation = _split(a, RELATION), _split(g, RELATION)
    if len(a_parts) == 1 and a_relation[1] or len(g_parts) == 1 and g_relation[1]:
        return _same_relation(a, a_relation, g, g_relation)
    (a_kind, a_items), (g_kind, g_items) = _items(a), _items(g)
    if a_kind or g_kind:
        return _same_items(a_kind, a_items, g_kind, g_items)
    if (text := _same_text(a, g)) is not None:
        return text
    return _same_expression(a, g)


# Numbers: exact, of any size. A decimal gold was rounded by whoever wrote it, an integer never.

_SIGNED = rf"([+-]?(?:\d{{1,3}}(?:,\d{{3}})+(?:\.\d*)?|{NUMBER}))"
PLAIN = re.compile(rf"{_SIGNED}(?:\\cdot10\^(?:\{{([+-]?\d+)\}}|(\d)))?")
POWER_OF_TEN = re.compile(r"([+-]?)10\^(?:\{([+-]?\d+)\}|(\d))")
_RATIO = rf"([+-]?)(\d+)??(?:\\frac\{{{_SIGNED}\}}\{{{_SIGNED}\}}|(?<!\d){_SIGNED}/{_SIGNED})"
RATIO = re.compile(_RATIO)


def _number(text: str) -> tuple[Fraction, bool] | None:
    """(exact value, is it a decimal or in scientific notation), if it is a plain number."""
    text = _key(text)
    if len(text) > 4000:  # Python's own limit on int(text) is 4300 digits
        return None
    if match := PLAIN.fullmatch(text) or POWER_OF_TEN.fullmatch(text):
        mantissa, *exponents = match.groups()
        power = int(exponents[0] or exponents[1] or 0)
        if abs(power) > 4000:
            return None
        if match.re is POWER_OF_TEN:
            return Fraction(mantissa + "1") * Fraction(10) ** power, False
        value = Fraction(mantissa.replace(",", "").rstrip(".")) * Fraction(10) ** power
        return value, "." in mantissa or any(exponents)
    if match := RATIO.fullmatch(text):
        sign, whole, *parts = match.groups()
        over, under = (Fraction(part.replace(",", "").rstrip(".")) for part in parts if part)
        if under and not (whole and (over < 0 or under < 0)):
            value = Fraction(whole or 0) + over / under
            return (-value if sign == "-" else value), False
    return None


def _close(a: Fraction, a_decimal: bool, g: Fraction, g_decimal: bool) -> bool:
    if g_decimal:
        return abs(a - g) <= abs(g) / 10_000
    if a_decimal and g.denominator > 1:
        return abs(a - g) <= abs(g) / 500_000  # 0.333333 is 1/3, 0.33 is not
    return a == g


def _same_number(a: str, g: str) -> bool | None:
    """None unless both are numbers. 50% answers 50% and 50 and 0.5, and so the other way."""
    x, y = _number(a.rstrip("% ")), _number(g.rstrip("% "))
    if not x or not y:
        return None
    if a.endswith("%") != g.endswith("%"):
        if a.endswith("%") and _close(x[0] / 100, x[1], *y):
            return True
        if g.endswith("%") and _close(*x, y[0] / 100, y[1]):
            return True
    return _close(*x, *y)


# Units. Words inside \text{} after a number are dropped whatever they are; bare ones must stand
# in this table. A single letter is a unit only when the gold is a number: "6 m" may be 6 times m.
# Two answers in different units of the table are different.

UNITS = """cm centimeter centimetre | mm millimeter | km kilometer kilometre | meter metre
 | inch inche | foot feet ft | yard | mile mi | kg kilogram | gram | mg | lb pound | liter litre
 | ml | hour hr | minute min | second sec | day | week | month | year yr | degree deg | radian rad
 | dollar usd | cent | percent | unit | hz | kcal | joule | newton | watt | volt | ev | mph | kmh
 | pm p.m | am a.m"""
UNIT_OF = {word: line.split()[0] for line in UNITS.split("|") for word in line.split()}
LETTER_UNIT_OF = {"m": "meter", "s": "second", "g": "gram", "h": "hour", "l": "liter", "in": "inch"}
_POWER = r"(?:\s*\^\s*(?:\{\s*-?\d\s*\}|\d))?"
TEXT_UNIT = re.compile(rf"(?:\s*\^?\s*\{{?\s*\\text\{{([^{{}}\d]*)\}}\s*\}}?{_POWER}[\s/]*)+$")
NO_UNIT = re.compile(r"\b(?:not?|less|more|most|least|than|over|under|about|except|dozen|mod)\b")


def _bare_unit(words: list[str]) -> re.Pattern:
    word = "|".join(sorted(map(re.escape, words), key=len, reverse=True))
    unit = rf"(?:(?:square|cubic|sq)\s+)?(?:{word})s?{_POWER}"
    return re.compile(rf"(?<=[\d}}\s])\s*{unit}(?:\s*(?:/|per|\\cdot|\s)\s*{unit})*\.?$", re.I)


BARE_UNIT = _bare_unit(list(UNIT_OF))
LETTER_UNIT = _bare_unit([*UNIT_OF, *LETTER_UNIT_OF])


def _strip_unit(text: str, letters: bool) -> tuple[str, str]:
    """(text without its unit, the unit's name in the table or "")."""
    match = TEXT_UNIT.search(text) or (LETTER_UNIT if letters else BARE_UNIT).search(text)
    if not match or not re.search(r"\d|\\pi", text[: match.start()]) or NO_UNIT.search(match[0]):
        return text, ""
    words = re.sub(r"\\text|[{}]", " ", match[0].lower()).strip()
    names = UNIT_OF | LETTER_UNIT_OF
    return text[: match.start()].strip(), names.get(words, names.get(words.rstrip("s"), ""))


# Lists, sets, tuples, intervals, unions, matrices, ratios.

RELATION = r"\\(?:le|ge|ne|in|approx|equiv|sim)(?![A-Za-z])|[<>=]"
MATRIX = re.compile(r"\\begin\{([pb]?matrix|smallmatrix|array)\}(?:\{[lcr| ]*\})?(.*)\\end\{\1\}")


def _items(text: str) -> tuple[str, list[str]]:
    """("union" | "list" | "set" | the two brackets | ":" | a matrix' shape | "", the items)."""
    parts = _split(text, "[,;]")[0]
    if len(parts) > 1 or re.search(r"\\pm|\\mp", text) and text[0] not in "([" and text[:2] != r"\{":
        return "list", _plus_minus(parts)
    for kind, separator in (("union", r"\\cup(?![A-Za-z])"), (":", ":")):
        parts = _split(text, separator)[0]
        if len(parts) > 1:
            return kind, parts
    if text.startswith(r"\{") and _closing(text, 1) == len(text) - 1:
        return "set", _plus_minus(_split(text[2:-2], "[,;]")[0])
    if text[:1] in ("(", "[") and _closing(text, 0) == len(text) - 1:
        parts = _split(text[1:-1], "[,;]")[0]
        if len(parts) > 1:
            return text[0] + text[-1], parts
        if text[0] == "[":
            return "", [text[1:-1]]
    if match := MATRIX.fullmatch(text):
        rows = [row.split("&") for row in re.split(r"\\\\(?:\[\w*\])?", match[2]) if row.strip()]
        if len({len(row) for row in rows}) == 1:
            kind = "column" if len(rows[0]) == 1 else f"{len(rows)} x {len(rows[0])}"
            return kind, [cell for row in rows for cell in row]
    return "", [text]


def _plus_minus(parts: list[str]) -> list[str]:
    """1 \\pm 2 is two items."""
    both = []
    for part in parts:
        if re.search(r"\\pm|\\mp", part):
            both += [re.sub(r"\\pm", "+", re.sub(r"\\mp", "-", part))]
            both += [re.sub(r"\\pm", "-", re.sub(r"\\mp", "+", part))]
        else:
            both.append(part)
    return both


def _same_items(a_kind: str, a: list[str], g_kind: str, g: list[str]) -> bool:
    if len(a) != len(g):
        return False
    kinds = {a_kind, g_kind}
    if kinds <= {"list", "set"} or kinds == {"union"} or kinds == {"set", ""}:
        left = list(a)  # order is free: pair each gold item with an answer item of its own
        for item in sorted(g, key=lambda item: _key(item) not in map(_key, a)):
            match = next((x for x in left if _key(x) == _key(item)), None)
            match = match or next((x for x in left if _same(x, item)), None)
            if match is None:
                return False
            left.remove(match)
        return True
    ordered = kinds <= {"()", "column", "list"} or kinds <= {"[]", "list"} or len(kinds) == 1
    if ordered or len(g) > 2 and kinds <= {"()", "[]", "column"}:
        return all(map(_same, a, g))
    return False


# Relations. "x = 5" and "m+n = 33" name a number; "x+z = 1" does not, nor does "x = 6 = 5".

_NAME = r"(?:\\?[A-Za-z]+|\\(?:overline|angle|vec|bar|hat)\s*\{?\w+\}?|\\text\{[^{}]*\})"
_NAME = rf"(?:{_NAME}(?:_(?:\{{[^{{}}]*\}}|\w))?(?:\^(?:\{{\\prime\}}|\\prime|\*))?)+"
_NAME = rf"(?:\\frac\{{{_NAME}\}}\{{{_NAME}\}}|\|{_NAME}\||\[{_NAME}\]|{_NAME}(?:\([^()=]*\))?)"
NAME = re.compile(rf"{_NAME}|\({_NAME}(?:,{_NAME})+\)")
NAMES = re.compile(rf"{_NAME}(?:\+{_NAME})*|\({_NAME}(?:,{_NAME})+\)")
NO_NAME = re.compile(r"\\(?:sqrt|log|ln|exp|sum|int|prod|pi|infty)|^(?:e|i)$")


def _is_name(text: str, pattern: re.Pattern = NAME) -> bool:
    text = _key(text)
    return len(text) < 60 and bool(pattern.fullmatch(text)) and not NO_NAME.search(text)


def _same_relation(a: str, a_relation, g: str, g_relation) -> bool:
    (a_sides, a_signs), (g_sides, g_signs) = a_relation, g_relation
    if not g_signs:
        if set(a_signs) - {"=", r"\in", r"\equiv", r"\approx", r"\sim"}:
            return False  # an inequality is no number, and restates the problem for an interval
        zero = _number(g) and _number(g)[0] == 0
        while len(a_sides) > 1 and _is_name(a_sides[0], NAME if zero else NAMES):
            a_sides = a_sides[1:]
        if r"\approx" in a_signs:
            return any(_same(side, g) for side in a_sides) and _all_near(a_sides)
        return all(_same(side, g) for side in a_sides)
    if not a_signs:
        if set(g_signs) <= {"=", r"\in"}:
            return _is_name(g_sides[0]) and _same(a, g_sides[-1])
        interval = _interval(g_sides, g_signs)
        return interval is not None and _same(a, interval[1])
    if a_signs[0] == g_signs[0] in ("=", r"\in") and _key(a_sides[0]) == _key(g_sides[0]):
        return set(a_signs) <= {"=", r"\in"} and all(_same(x, g_sides[-1]) for x in a_sides[1:])
    a_interval, g_interval = _interval(a_sides, a_signs), _interval(g_sides, g_signs)
    if a_interval and g_interval:
        return _key(a_interval[0]) == _key(g_interval[0]) and _same(a_interval[1], g_interval[1])
    if len(a_signs) == len(g_signs) == 1:
        return _same_equation(a_sides, a_signs[0], g_sides, g_signs[0])
    return False


def _interval(sides: list[str], signs: list[str]) -> tuple[str, str] | None:
    """0 < x < 1 as ("x", "(0,1)"); x \\in S as ("x", S)."""
    if signs == [r"\in"] and _is_name(sides[0]):
        return sides[0], sides[1]
    if set(signs) <= {">", r"\ge"}:
        sides = sides[::-1]
        signs = [{">": "<", r"\ge": r"\le"}[sign] for sign in signs[::-1]]
    if not set(signs) <= {"<", r"\le"} or len(sides) > 3:
        return None
    if len(sides) == 2:
        sides, signs = ([r"-\infty", *sides], ["<", *signs]) if _is_name(sides[0]) else (
            [*sides, r"\infty"], [*signs, "<"])
    if not _is_name(sides[1]):
        return None
    opening, closing = "(" if signs[0] == "<" else "[", ")" if signs[1] == "<" else "]"
    return sides[1], f"{opening}{sides[0]},{sides[2]}{closing}"


# Words, multiple choice, number bases: equal as text or not at all.

BASE = re.compile(r"\(?0*(\d[0-9A-Z]*)\)?_\{?(\d+)\}?")


def _words(text: str) -> str:
    text = re.sub(r"\\text\s*\{|[{}().,:;'\"!?\\]", " ", text).casefold()
    return re.sub(r"^\s*(?:an?|the)\s+|\s+", "", text)


def _same_text(a: str, g: str) -> bool | None:
    """None if neither is text."""
    if re.search("[A-Za-z]{2}", a) and _words(a) == _words(g):
        return True
    if re.fullmatch("[A-J]", g) and (choice := re.match(r"\(?([A-Ja-j])(?:\)|[.:]|$)", _bare(a))):
        return choice[1].upper() == g and not re.search(r"\([A-J]\)", _bare(a)[choice.end() :])
    a_base, g_base = BASE.fullmatch(_key(a)), BASE.fullmatch(_key(g))
    if a_base or g_base:
        return bool(a_base and g_base) and a_base.groups() == g_base.groups()
    if r"\text" in g and not re.search(r"[_^]\s*\{?\s*\\text", g) or re.fullmatch("[A-Za-z ]{4,}", g):
        return False
    return None


def _bare(text: str) -> str:
    return re.sub(r"\\text\s*\{|[{}\s]", "", text)


# Algebra: evaluated with 60 digits at random points; exactly, as long as it is rational.

MAX_BITS = 50_000  # of an exact rational; beyond it, 60 digits
MAX_NODES = 20_000  # evaluated per answer, the terms of sums included


@functools.cache
def _library():
    """Imported late: 0.3 to 2.5 s, and the caller of a pool never needs it."""
    import sympy
    from latex2sympy2_extended import latex2sympy2  # math-verify's parser
    from math_verify import verify
    from mpmath import mp

    mp = mp.clone()
    mp.dps = 60
    return sympy, latex2sympy2, verify, mp


@functools.lru_cache(maxsize=512)
def _tree(text: str):
    """The unevaluated sympy tree, or None. Never print or repr one: that is what hangs."""
    depth = itertools.accumulate({"{": 1, "(": 1, "[": 1, "}": -1, ")": -1, "]": -1}.get(c, 0) for c in text)
    if len(text) > MAX_CHARS or max(depth, default=0) > MAX_DEPTH:
        return None
    if re.search(r"!\s*!|\\(?:operatorname|det|gcd|lcm|lim|begin)|\\binom\{?\d{4}", text):
        return None  # the parser evaluates these while it reads
    text = re.sub(r"(?<![A-Za-z\\{])([EI])(?![A-Za-z])", r"\\mathcal{\1}", text)  # not e, not i
    _, latex2sympy2, _, _ = _library()
    try:
        return latex2sympy2.latex2sympy(
            text,
            is_real=True,
            normalization_config=None,
            conversion_config=latex2sympy2.ConversionConfig(lowercase_symbols=False),
        )
    except MemoryError:
        raise
    except Exception:  # the parser raises bare Exception, and what antlr and sympy raise
        return None


class _Evaluation:
    """The value of trees at the k-th point: Fractions while exact, else 60-digit mpmath."""

    def __init__(self, k: int, integers: bool):
        self.k, self.integers, self.nodes, self.opaque, self.bound = k, integers, 0, {}, {}
        self.mp = _library()[3]

    def random(self, name: str):
        """Between 0.4 and 2.4; at every second point the sign is random too."""
        seed = zlib.crc32(f"{name}@{self.k}".encode()) * 2654435761 % 2**32
        if self.integers:
            return Fraction(seed % 97 + 1)
        value = self.mp.mpf(seed) / 2**31 + self.mp.mpf("0.4")
        return -value if self.k % 2 and seed % 2 else value

    def __call__(self, node):
        value = self.evaluate(node)
        if isinstance(value, Fraction):
            if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
                return self.real(value)
        elif not self.mp.isfinite(value):
            raise ArithmeticError
        return value

    def real(self, value):
        if isinstance(value, Fraction):
            return _library()[3].mpf(value.numerator) / value.denominator
        return value

    def evaluate(self, node):
        sympy, mp = _library()[0], self.mp
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise OverflowError
        if node.is_Rational:
            return Fraction(node.p, node.q)
        if node.is_Float or node.is_NumberSymbol:
            return node._to_mpmath(mp.prec)
        if node.is_Symbol:
            if node.name in self.bound:
                return self.bound[node.name]
            return mp.mpc(0, 1) if node.name in ("i", "imath") else self.random(node.name)
        if node is sympy.I:
            return mp.mpc(0, 1)
        name = type(node).__name__
        if name in ("Sum", "Product"):
            return self.series(node, name)
        if name in ("Derivative", "Integral", "Limit"):  # never computed: equal if written alike
            return self.opaque.setdefault(node, self.random(f"{name}{len(self.opaque)}"))
        values = [self(argument) for argument in node.args]
        exact = all(isinstance(value, Fraction) for value in values)
        if name == "UnevaluatedExpr":
            return values[0]
        if name == "Add":
            total = sum(values if exact else map(self.real, values))
            size = max(abs(self.real(value)) for value in values)
            return total if exact or abs(total) > size * mp.mpf(10) ** -45 else mp.mpf(0)
        if name == "Mul":
            return math.prod(values) if exact else mp.fprod(map(self.real, values))
        if name == "Pow":
            return self.power(*values)
        if name in ("Abs", "Max", "Min"):
            return {"Abs": abs, "Max": max, "Min": min}[name](*values)
        if name in ("floor", "ceiling"):
            return Fraction(int(getattr(mp, name[:5].replace("ceili", "ceil"))(self.real(values[0]))))
        if name == "Mod":
            return values[0] % values[1]
        if name == "factorial" and exact and values[0].denominator == 1 and 0 <= values[0] < 3000:
            return Fraction(math.factorial(int(values[0])))
        if name == "binomial" and exact and all(v.denominator == 1 and 0 <= v < 3000 for v in values):
            return Fraction(math.comb(*map(int, values)))
        values = [self.real(value) for value in values]
        if any(abs(value) > 1e9 for value in values):
            raise OverflowError
        if name == "log":
            return mp.log(*values)
        if name in MP_FUNCTIONS:
            return getattr(mp, MP_FUNCTIONS[name])(*values)
        if isinstance(node, sympy.core.function.AppliedUndef):  # f(x): any function, at these values
            return self.random(name + ",".join(mp.nstr(value, 20) for value in values))
        raise NotImplementedError(name)

    def power(self, base, exponent):
        if isinstance(exponent, Fraction) and exponent.denominator == 1:
            exponent = int(exponent)
            if isinstance(base, Fraction):
                size = max(base.numerator.bit_length(), base.denominator.bit_length())
                if size * abs(exponent) <= MAX_BITS:
                    return base**exponent
        base, exponent = self.real(base), self.real(exponent)
        if base and abs(exponent) * (abs(self.mp.mag(base)) + 1) > 1e15:
            raise OverflowError  # a tower of powers
        return self.mp.power(base, exponent)

    def series(self, node, name: str):
        ((index, first, last),) = node.limits
        first, last = self(first), self(last)
        if not (isinstance(first, Fraction) and isinstance(last, Fraction)) or last - first > 2000:
            raise OverflowError
        total = Fraction(name == "Product")
        for value in range(int(first), int(last) + 1):
            self.bound[index.name] = Fraction(value)
            term = self(node.function)
            exact = isinstance(term, Fraction) and isinstance(total, Fraction)
            term, total = (term, total) if exact else (self.real(term), self.real(total))
            total = total + term if name == "Sum" else total * term
        self.bound.pop(index.name, None)
        return total


MP_FUNCTIONS = {name: name for name in "exp sin cos tan cot sec csc sinh cosh tanh".split()}
MP_FUNCTIONS |= {name: name for name in "asin acos atan acot asec acsc asinh acosh atanh".split()}
MP_FUNCTIONS |= {"factorial": "factorial", "gamma": "gamma", "binomial": "binomial"}


def _values(trees) -> list[list]:
    """The trees' values at the points where all of them have one; real ones at odd points."""
    sympy = _library()[0]
    constant = not any(tree.free_symbols for tree in trees)
    # Rounding is for whole numbers: \lceil n/2\rceil is \lfloor (n+1)/2\rfloor.
    integers = all(tree.has(sympy.floor, sympy.ceiling, sympy.Mod) for tree in trees)
    values = []
    for k in range(1 if constant else 8):
        evaluation = _Evaluation(k, integers)
        try:
            point = [evaluation.real(evaluation(tree)) if not constant else evaluation(tree) for tree in trees]
        except (ArithmeticError, ValueError, TypeError, AttributeError, NotImplementedError):
            continue
        # sqrt(a/b) is sqrt(a)/sqrt(b) where both are real; sqrt(x^2) is x nowhere below zero
        if k % 2 == 0 or not any(abs(v.imag) > 1e-40 for v in point):
            values.append(point)
    return values


def _tolerance(answer, gold) -> float:
    """Relative. As in _close: a decimal in the gold is rounded, one in the answer has 6 digits."""
    Float = _library()[0].Float
    return 1e-4 if gold.has(Float) else 2e-6 if answer.has(Float) else 1e-30


def _same_expression(a: str, g: str) -> bool:
    gold, answer = _tree(g), _tree(a)
    if answer is None:
        raise Unparseable(a[:80])
    if gold is None:
        return False
    if any(tree.has(_library()[0].Set) for tree in (gold, answer)):
        return False
    values = _values([answer, gold])
    if not values:
        return answer == gold
    tolerance = _tolerance(answer, gold)
    for x, y in values:
        if isinstance(x, Fraction) and isinstance(y, Fraction):
            return x == y
        if isinstance(y, Fraction) and y.denominator == 1:
            tolerance = 1e-12  # an integer
        x, y = (_Evaluation.real(None, v) for v in (x, y))
        if abs(x - y) > tolerance * max(abs(x), abs(y)):
            return False
    return True


def _all_near(sides: list[str]) -> bool:
    """5.196 \\approx 3\\sqrt3 is one claim, 5 \\approx 6 would be two."""
    trees = [_tree(side) for side in sides]
    if None in trees:
        return False
    values = _values(trees)
    return bool(values) and all(abs(x - v[0]) <= abs(v[0]) / 100 for v in values for x in v)


def _same_equation(a_sides, a_sign: str, g_sides, g_sign: str) -> bool:
    """left - right of one is a constant times that of the other, which for < is positive."""
    trees = [_tree(side) for side in (*a_sides, *g_sides)]
    if None in trees[:2]:
        raise Unparseable(" ".join(a_sides)[:80])
    if None in trees:
        return False
    ratios = [(a - b) / (c - d) for a, b, c, d in _values(trees) if abs(c - d) > 1e-30]
    tolerance = max(_tolerance(a, g) for a, g in zip(trees, trees[2:]))
    if len(ratios) < 2 or any(abs(r - ratios[0]) > tolerance * abs(r) for r in ratios):
        return False
    directions = {"<": 1, r"\le": 2, ">": -1, r"\ge": -2, "=": 3, r"\ne": 4}
    a_way, g_way = directions.get(a_sign), directions.get(g_sign)
    if a_sign in ("=", r"\ne"):
        return a_way == g_way and abs(ratios[0]) > 1e-30
    return a_way and a_way == (g_way if ratios[0].real > 0 else -g_way) if abs(ratios[0]) > 1e-30 else False


def math_equal(answer: str, gold: str) -> bool:
    """Is the answer (the content of the box) the gold?"""
    return _compare(answer, gold)[0]


def _compare(answer: str, gold: str) -> tuple[bool, str]:
    """(equal, why the answer cannot be read or "")."""
    if not normalise(gold):
        raise ValueError("empty gold")
    if answer.strip() == gold.strip():
        return True, ""
    if len(answer) > MAX_CHARS and not re.fullmatch(r"[\s\d,+-]{,100000}", answer):
        return False, f"answer of {len(answer)} characters"
    try:
        return _same(normalise(answer), normalise(gold)), ""
    except (Unparseable, RecursionError) as error:
        return False, str(error) or "nested too deeply"


def verify_math(response: str, gold: str | list[str]) -> Verdict:
    """Score a response; a list of golds means that any of them is right."""
    golds = [gold] if isinstance(gold, str) else list(gold)
    if not golds or not all(isinstance(g, str) and normalise(g) for g in golds):
        raise ValueError(f"empty gold: {gold!r}")
    answer = extract_answer(response)
    if not answer or not answer.strip():
        return Verdict(0.0, "no_answer")
    results = [_compare(answer, g) for g in golds]
    if any(equal for equal, _ in results):
        return Verdict(1.0, "correct")
    problem = next((why for _, why in results if why), "")
    return Verdict(0.0, "unparseable" if problem else "wrong", problem)


# ----------------------------------------------------------------------------------------
# 2. The worker pool. Every task has a deadline that holds whatever the worker does: the parent
#    kills it and starts another. Workers are fresh interpreters that run this file (subprocess
#    execs without a Python-level fork, and never imports the caller's __main__ as
#    multiprocessing would), so the caller may hold CUDA, vLLM and any number of threads. Tasks
#    and verdicts travel as JSON lines over pipes; no signal is touched in the caller.

WORKER_BYTES = 2 << 30  # address space; sympy and its friends take 0.3 GB
WORKER_TASKS = 1000  # then it is replaced: sympy's caches grow
SECONDS_START = 120  # for the imports, on a machine that is busy


def _worker() -> None:
    """Read a task a line from stdin, write a verdict a line to what was stdout."""
    reply = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # nothing that prints may write between the verdicts
    resource.setrlimit(resource.RLIMIT_AS, (WORKER_BYTES, resource.RLIM_INFINITY))
    math_equal("x+1", "1+y")  # imports and warms the parser up
    reply.write('"ready"\n')
    for line in sys.stdin.buffer:
        task = json.loads(line)
        try:
            if "tests" in task:
                verdict = verify_code(task["response"], task["tests"], task["func_name"], timeout=task["timeout"])
            else:
                # A worker whose parent is gone ends by itself: SIGXCPU, also inside C code.
                seconds = time.process_time() + task["timeout"] + 2
                resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), resource.RLIM_INFINITY))
                verdict = verify_math(task["response"], task["answer"])
            reply.write(json.dumps(asdict(verdict)) + "\n")
        except ValueError as error:
            reply.write(json.dumps(str(error)) + "\n")
        except MemoryError:
            reply.write(json.dumps(asdict(Verdict(0.0, "memory_limit"))) + "\n")
            return


class Verifier:
    """`with Verifier() as verifier: verdicts = verifier.score(responses, golds)`.

    timeout: seconds for one math answer. code_timeout: seconds for one test of a program.
    """

    def __init__(self, num_workers: int | None = None, timeout: float = 2.0, code_timeout: float = 6.0):
        self.num_workers = num_workers or len(os.sched_getaffinity(0))
        self.timeout, self.code_timeout = timeout, code_timeout
        self.workers: list[_Worker] = []
        self.lock = threading.Lock()
        self.failed_starts = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self) -> None:
        while self.workers:
            self.workers.pop().kill()

    def score(self, responses: list[str], golds_or_problems: list, progress: bool = False) -> list[Verdict]:
        """The i-th verdict is on the i-th response. A problem is a gold (a string, or a list of
        which any is right) or a dict: {"answer": gold} or {"tests": [...], "func_name": ...}."""
        if len(responses) != len(golds_or_problems):
            raise ValueError(f"{len(responses)} responses for {len(golds_or_problems)} problems")
        tasks = [self._task(i, *pair) for i, pair in enumerate(zip(responses, golds_or_problems))]
        if not tasks:
            return []
        bar = None
        if progress:
            from tqdm import tqdm

            bar = tqdm(total=len(tasks), desc="scoring", unit="answer")
        with self.lock:
            try:
                return self._run(tasks, bar)
            finally:
                for worker in [w for w in self.workers if w.task is not None]:
                    self._drop(worker)  # only after an exception
                if bar:
                    bar.close()

    def _task(self, i: int, response: str, problem) -> dict:
        problem = problem if isinstance(problem, dict) else {"answer": problem}
        if not isinstance(response, str):
            raise ValueError(f"row {i}: the response is {type(response).__name__}, not text")
        if problem.get("tests") is not None:
            tests = problem["tests"]
            if not isinstance(tests, list) or not tests:
                raise ValueError(f"row {i}: the list of tests is empty")
            task = {"tests": tests, "func_name": problem.get("func_name"), "timeout": self.code_timeout}
            return task | {"response": response, "seconds": (self.code_timeout + 1) * len(tests) + 10}
        answer = problem.get("answer")
        golds = answer if isinstance(answer, list) else [answer]
        if not golds or not all(isinstance(gold, str) and normalise(gold) for gold in golds):
            raise ValueError(f"row {i}: empty gold {answer!r}")
        return {"response": response, "answer": golds, "timeout": self.timeout, "seconds": self.timeout}

    def _run(self, tasks: list[dict], bar) -> list[Verdict]:
        waiting, verdicts, crashes = deque(range(len(tasks))), {}, Counter()
        with selectors.DefaultSelector() as selector:
            for worker in self.workers:
                selector.register(worker.process.stdout, selectors.EVENT_READ, worker)

            def settle(i: int, verdict: Verdict) -> None:
                verdicts[i] = verdict
                if bar:
                    bar.update()

            def lose(worker: _Worker) -> int | None:
                selector.unregister(worker.process.stdout)
                return self._drop(worker)

            while len(verdicts) < len(tasks):
                while len(self.workers) < min(self.num_workers, len(tasks) - len(verdicts)):
                    self.workers.append(worker := _Worker())
                    selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
                for worker in self.workers:
                    if waiting and worker.ready and worker.task is None:
                        worker.send(waiting.popleft(), tasks)
                now = time.monotonic()
                soonest = min((w.deadline for w in self.workers), default=now)
                for event, _ in selector.select(max(0.0, min(soonest - now, 60.0))):
                    worker = event.data
                    for reply in worker.receive():
                        i, worker.task, worker.deadline = worker.task, None, math.inf
                        if reply == "ready":
                            worker.ready, self.failed_starts = True, 0
                        elif isinstance(reply, str):
                            raise ValueError(f"row {i}: {reply}")
                        else:
                            settle(i, Verdict(**reply))
                    if worker.closed:
                        i, was_ready, code = worker.task, worker.ready, lose(worker)
                        self.failed_starts += not was_ready
                        if self.failed_starts > 3:
                            raise RuntimeError(f"verify.py's workers do not start (exit status {code})")
                        if i is None:
                            continue
                        crashes[i] += 1
                        if code == -24:  # SIGXCPU
                            settle(i, Verdict(0.0, "timeout"))
                        elif crashes[i] < 2:
                            waiting.appendleft(i)
                        else:
                            settle(i, Verdict(0.0, "sandbox_error", f"worker ended with {code} twice"))
                    elif worker.ready and worker.task is None and worker.tasks >= WORKER_TASKS:
                        lose(worker)
                for worker in [w for w in self.workers if w.deadline <= time.monotonic()]:
                    i, was_ready, _ = worker.task, worker.ready, lose(worker)
                    self.failed_starts += not was_ready
                    if i is not None:
                        settle(i, Verdict(0.0, "timeout", f"over {tasks[i]['seconds']:g} s"))
        return [verdicts[i] for i in range(len(tasks))]

    def _drop(self, worker: "_Worker") -> int | None:
        self.workers.remove(worker)
        return worker.kill()


class _Worker:
    def __init__(self):
        command = [sys.executable, os.path.abspath(__file__), "--worker"]
        keep = ("PATH", "LANG", "HOME", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
        env = {name: os.environ[name] for name in keep if name in os.environ}  # and no secrets
        env |= {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, bufsize=0
        )
        self.buffer, self.closed, self.ready, self.tasks = b"", False, False, 0
        self.task: int | None = None
        self.deadline = time.monotonic() + SECONDS_START

    def send(self, i: int, tasks: list[dict]) -> None:
        self.task, self.tasks = i, self.tasks + 1
        try:
            data = memoryview(json.dumps(tasks[i]).encode() + b"\n")
            while data:
                data = data[self.process.stdin.write(data) :]
        except BrokenPipeError:
            pass  # its end of file will be read next
        self.deadline = time.monotonic() + tasks[i]["seconds"]

    def receive(self) -> list:
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        self.closed = not data
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def kill(self) -> int | None:
        self.process.kill()
        self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait()


# ----------------------------------------------------------------------------------------
# 3. The sandbox.


def verify_code(response, tests, func_name=None, *, timeout=6.0, total_timeout=None) -> Verdict:
    raise NotImplementedError


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        _worker()
