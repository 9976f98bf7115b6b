"""The only teacher the policy has: scores math answers and programs, right or wrong.

    python verify.py FILE.jsonl          score {"response", "answer"} or {"response", "tests"} rows

Four parts, in reading order: what is a right answer; the pool of worker processes that puts a
deadline on every answer; the sandbox that runs programs; the command line.
"""

import argparse
import builtins
import contextlib
import functools
import importlib
import itertools
import json
import logging
import marshal
import math
import os
import re
import resource
import select
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unicodedata
import warnings
import zlib
from collections import Counter, deque
from dataclasses import asdict, dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path


@dataclass(frozen=True)
class Verdict:
    reward: float  # 1.0 or 0.0
    # correct, wrong, no_answer, unparseable, timeout, runtime_error, output_limit,
    # memory_limit or sandbox_error
    reason: str
    detail: str = ""


def fail(message: str):
    """A user's mistake: one sentence that names the field, the value and the mend; exit status 2."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    raise SystemExit(2)


# ----------------------------------------------------------------------------------------
# 1. What is a right answer. Structure is decided here, on the text: numbers, words, lists,
#    tuples, intervals, relations. math-verify's parser reads the algebra that is left, and two
#    expressions are equal when they agree to 30 digits at random points. math-verify's own
#    comparison is not used: simplify() is what hangs, and its absolute tolerance takes 2e-25
#    for 1.6e-19 and 1/2006! for 1/2004! (version 0.9.0, measured).

MAX_BOXES = 3  # more boxes than this with different contents is guessing, not answering
MAX_CHARS = 600  # the longest gold of MATH-500, Minerva and OlympiadBench has 273
MAX_ALGEBRA = 250  # characters that are given to the parser at once
MAX_DEPTH = 9  # of brackets; those golds have 4, and 70 cost the parser 2 s


class Unparseable(Exception):
    """The answer cannot be read as mathematics, or is refused unread."""


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


# Spelling: `normalise` writes one thing one way.

UNICODE = dict(
    re.findall(
        r"(\S) (\S*[A-Za-z] |\S+)",
        r"""− - – - — - ‐ - ‑ - ÷ / ⁄ / ∕ / × \cdot · \cdot ⋅ \cdot ∙ \cdot ≤ \le ⩽ \le ≥ \ge ⩾ \ge
        ≠ \ne ≈ \approx ∞ \infty ∪ \cup ∩ \cap ∈ \in ± \pm ∓ \mp ° ^\circ º ^\circ ∅ \emptyset
        ′ ' ’ ' ″ '' 、 , 。 . ⟨ ( ⟩ ) α \alpha β \beta γ \gamma δ \delta ε \epsilon θ \theta
        λ \lambda μ \mu ν \nu π \pi ρ \rho σ \sigma τ \tau φ \phi ϕ \phi ψ \psi ω \omega
        Δ \Delta Ω \Omega """,
    )
)
COMMANDS = dict(
    re.findall(
        r"(\w+)=(\S*)",
        r"""leq=\le leqslant=\le geq=\ge geqslant=\ge neq=\ne lt=< gt=> lg=\log_{10} times=\cdot ast=\cdot
        dfrac=\frac tfrac=\frac cfrac=\frac dbinom=\binom tbinom=\binom lbrace=\{ rbrace=\} lor=,
        vee=, langle=( rangle=) lvert=| rvert=| vert=| mid=| colon=: varnothing=\emptyset degree=
        left= right= middle= big= Big= bigl= bigr= Bigl= Bigr= bigg= Bigg= displaystyle=
        textstyle= limits= nolimits= bf= rm= it= large= Large= huge= quad=~ qquad=~ enspace=~""",
    )
)
FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp"
STYLES = r"text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf|tt)|mbox|operatorname|boldsymbol|bm"
NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)"
GROUP = r"\{(?:[^{}]|\{[^{}]*\})*\}"
END = r"(?![A-Za-z])"
THOUSANDS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_ANSWER = r"(?i:(?:the )?(?:final )?answer(?: is)?\s*:?\s*)"
SPELLING = [  # (pattern, replacement), in this order
    (r"\\(?:text)?color\s*\{\w*\}", ""),
    (rf"^\\text\{{\s*{_ANSWER}\}}|^{_ANSWER}|(?<=^\\text\{{){_ANSWER}", ""),
    (r"\\(?:left|right)\s*\.|\\\$|\\(?:pounds|euro)(?![A-Za-z])|[$\"€£¥₹¢]|(?<!\\)\\[()\[\]]", ""),
    (r"\{\}\s*(?=\^)", ""),  # 90{}^\circ
    (
        rf"\^\s*(?:\{{\s*\\(?:circ|degree)\s*\}}|\\(?:circ|degree){END})\s*(?:[CF]{END})?",
        " ",
    ),
    (r"\{([^{}]*)\\choose([^{}]*)\}", r"\\binom{\1}{\2}"),
    (r"\\([A-Za-z]+)", lambda m: COMMANDS.get(m[1], m[0])),
    (r"(?<=\d)(?:\{,\}|,\s*\\!|\\[,;:! ]|~)\s*(?=\d{3}(?!\d))", ""),  # 12{,}345 and 12\,345
    (r"(?:(?<=\\frac\{)|(?<=\}\{))\d{1,3}(?:,\d{3})+(?=\})", lambda m: m[0].replace(",", "")),
    (r"\{([,:])\}", r"\1"),
    (r"(?<!\\)\\[,;:!> ]|~|\s", " "),
    (r"^[\s*`]+|[\s*`]+$|\\(?=%)", ""),  # markdown's stars; 50\%
    (r"\*\*", "^"),
    (r"\*", r"\\cdot "),
    (r"(?<=\d)\s*x\s*(?=10\s*\^)", r"\\cdot "),  # 5 x 10^3
    (r"^(\d{1,3}),(\d{3})(\D*?(?:and|or)\W*?)(\d{1,3}),(\d{3})$", r"\1\2\3\4\5"),  # 2,500 and 7,500
    (r",?\s*(?:\\text\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)", ","),
    (r":=", "="),
    (r"<=", r"\\le "),
    (r">=", r"\\ge "),
    (r"!=|\\not\s*=", r"\\ne "),
    (r"\\not\s*\\in(?![A-Za-z])", r"\\notin "),
    (r"\\mathbb\s*([A-Z])", r"\\mathbb{\1}"),
    (r"(?<!\d)(\d*)\.(\d*)\\(?:overline|bar)\s*\{(\d+)\}", lambda m: _repeating(*m.groups())),
    (r"(?<=\d)\s*(?:\^\s*\{(?:\s*\\prime)+\s*\}|'+)$", ""),  # minutes and seconds of arc
    (r"'", r"^{\\prime}"),  # the parser drops x'
    (rf"\\text\{{\s*[Ii]nfinity\s*\}}|(?<![A-Za-z\\])(?:[Ii]nfinity|inf){END}", r"\\infty "),
    (rf"(?<![A-Za-z\\])({FUNCTIONS}|sqrt|pi|theta|alpha|beta|lambda){END}", r"\\\1 "),
    (r"\\sqrt\s*((?:\[\w+\])?)\s*(\w)", r"\\sqrt\1{\2}"),
    (r"\\frac\s*(\w)\s*(\w)", r"\\frac{\1}{\2}"),
    (r"\\frac\s*(\w)\s*\{", r"\\frac{\1}{"),
    (rf"(\\frac\s*{GROUP})\s*(\w)", r"\1{\2}"),
    (rf"\\sqrt\s*(\\frac\s*{GROUP}\s*{GROUP})", r"\\sqrt{\1}"),
    (
        r"(?<=\d)\s*(?:\\text\{)?\s*(thousand|million|billion|trillion)\b\s*\}?",
        lambda m: rf"\cdot 10^{{{THOUSANDS[m[1]]}}}",
    ),
    (rf"(?<![\w.\\])({NUMBER})[eE]([+-]?\d{{1,9}})(?![\w.])", r"\1\\cdot 10^{\2}"),  # 4.5e33
    (r"(?<![\w./])(\d+)\s+(\d+)/(\d+)(?![\w.])", r"\1\\frac{\2}{\3}"),  # 5 1/2
    (r"^(-?\d{1,3})((?: \d{3})+)$", lambda m: m[1] + m[2].replace(" ", "")),  # 12 345
    (r"\s+", " "),
    (r"(?<=\S),?\s*(?:\\text\s*\{,?\s*for (?:all|every|any|each)\b|\\forall(?![A-Za-z])).*$", ""),
    (r",?\s*\(?\w\s*\\in\s*\\mathbb\{[NZ]\}[\d_^{}+]*\)?$", ""),  # , k \in \mathbb{Z}
    (r"^(?:[\s,;:=]|\\approx)+|(?:[\s,;:]|(?<!\.)\.|\\\\)+$", ""),
]
SPELLING = [(re.compile(pattern), new) for pattern, new in SPELLING]


def _repeating(whole: str, fixed: str, period: str) -> str:
    """0.1\\overline{6} as a fraction."""
    over = int(whole + fixed + period) - int(whole + fixed or 0)
    return rf"\frac{{{over}}}{{{(10 ** len(period) - 1) * 10 ** len(fixed)}}}"


@functools.lru_cache(maxsize=1024)
def normalise(text: str) -> str:
    def nfkc(match: re.Match) -> str:
        return unicodedata.normalize("NFKC", match[0])

    # NFKC alone would read x² as x2 and 5½ as 51/2.
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda match: f"^{{{nfkc(match)}}}", text)
    text = re.sub(r"\\text\s*\{\s*(?:(°\s*[CF]?)|\\?[$€£¥₹¢])\s*\}", r"\1", text)
    text = re.sub(r"(\\text\s*\{[^{}^]*)\^\s*(?:\{(\d)\}|(\d))\s*\}", r"\1}^{\2\3}", text)  # cm²
    text = re.sub("[₀-₉]+", lambda match: f"_{{{nfkc(match)}}}", text)
    text = re.sub("[¼-¾⅐-⅞]", r" \g<0> ", text.replace("ℝ", r"\mathbb{R}"))
    text = re.sub("[^①-⑳]+", nfkc, text)  # ①②④ is no 124
    text = re.sub(r"√\s*(\d+|[A-Za-z])", r"\\sqrt{\1}", text).replace("√", r"\sqrt ")
    text = "".join(UNICODE.get(c, c) for c in text if unicodedata.category(c) != "Cf")
    for _ in range(3):  # styles nest
        text = re.sub(rf"\\(?:{STYLES})\s*\*?\s*\{{([^{{}}]*)\}}", _unstyle, text)
    text = re.sub(rf"\\(?!text\b)(?:{STYLES}|boxed|fbox|underline)\s*(?=\{{)", "", text)
    text = re.split(rf"\\(?:implies|[Rr]ightarrow|Longrightarrow){END}", text)[-1]
    for pattern, new in SPELLING:
        text = pattern.sub(new, text)
    while call := re.search(r"(\\sqrt|\^)\s*\(", text):  # sqrt(x+1), 2^(n+1)
        end = _closing(text, call.end() - 1)
        if end is None:
            break
        text = f"{text[: call.end(1)]}{{{text[call.end() : end]}}}{text[end + 1 :]}"
    return _unwrap(text)


def _unstyle(match: re.Match) -> str:
    """Only words stay in \\text{}: not \\mathbf{5}, \\operatorname{sin}, nor the 10 of "10 cm"."""
    word = match[1].strip(" ~")
    if "\\" in word:
        return f"{{{word}}}"
    before = match.string[: match.start()]
    # 10\text{ m}, 12\pi\text{ m}
    if word in (*LETTERS, "min") and re.search(r"(?:[\d}]|\\pi)(?:\s|~|\\[,;:! ])*$", before):
        return rf"\text{{{(UNITS | LETTERS)[word]}}}"
    if re.fullmatch(rf"{FUNCTIONS}|max|min|gcd|lcm", word):
        return f"\\{word} "
    number, words = re.match(r"([-+\d.,:/%\s]*)([\s\S]*)", match[1]).groups()
    spoken = re.search("[A-Za-z]{2}|[^\x00-\x7f]", words)
    number = " " * before[-1:].isalpha() + number  # \mu\mathrm{m} is no \mum
    return f"{number}\\text{{{words}}}" if spoken else number + words


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
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"([\^_])\s*\{\s*(\w)\s*\}", r"\1\2", text)
    return re.sub(r"\s+(?!\d)|(?<![\d,.])\s+|^\+", "", text)  # "5 6" is not 56


def _unwrap(text: str) -> str:
    """Drop the braces around the whole, and parentheses that make no tuple."""
    text = text.strip()
    while text[:1] in ("{", "(") and _closing(text, 0) == len(text) - 1:
        if text[0] + text[-1] == "()" and len(_split(text[1:-1], "[,;]")[0]) > 1:
            break
        if text[0] + text[-1] not in ("{}", "()"):
            break
        text = text[1:-1].strip()
    return text


def _same(answer: str, gold: str) -> bool:
    """Is the normalised answer the normalised gold? Peels one layer of structure at a time."""
    a, g = _unwrap(answer), _unwrap(gold)
    if _key(a) == _key(g):
        return bool(_key(a))
    g, g_unit = _strip_unit(g, False)
    is_number = bool(_number(g))
    if is_number:
        g = g if "," in a else g.replace(",", "")  # 4 \cdot 300 = 1200 for 1,200
        a = re.sub(r"_(?:\{(?:10|\\text\s?\{\s?ten\s?\})\}|\\text\s?\{\s?ten\s?\})$", "", a)
    a, a_unit = _strip_symbols(a) if is_number and not g_unit else _strip_unit(a, is_number)
    if a_unit and g_unit in UNITS and a_unit != g_unit:
        return False
    a, g = _unwrap(a), _unwrap(g)
    if (number := _same_number(a, g)) is not None:
        return number
    a_sides, g_sides = _split(a, RELATION), _split(g, RELATION)
    a_single, g_single = (len(_split(text, "[,;]")[0]) == 1 for text in (a, g))
    if a_single and a_sides[1] or g_single and g_sides[1]:
        return _same_relation(a, a_sides, g, g_sides)
    if g_single and (text := _same_text(a, g)) is not None:
        return text
    (a_kind, a_items), (g_kind, g_items) = _items(a), _items(g)
    if a_kind == "set" and g_kind == "()" and len(a_items) == 1:  # {(2,5)} for (2,5)
        return _same(a_items[0], g)
    if a_kind or g_kind:
        return _same_items(a_kind, a_items, g_kind, g_items)
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
            value = Fraction(whole or 0) + over / under  # whole: 5\frac{1}{2}
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
    if a.endswith("%") and not g.endswith("%") and _close(x[0] / 100, x[1], *y):
        return True
    if g.endswith("%") and not a.endswith("%") and _close(*x, y[0] / 100, y[1]):
        return True
    return _close(*x, *y)


# Units. Words inside \text{} after a number are dropped, whatever they are; bare ones must stand
# in this table. Where the gold is a number, so are other words and the products of SI's symbols:
# elsewhere "6 m" may be 6 times m. Two answers in different units of the table are different.

UNITS = """cm centimeter centimetre | mm millimeter | km kilometer kilometre | meter metre
 | inch inche | foot feet ft | yard | mile mi | kg kilogram | gram | mg | lb pound | liter litre
 | ml | hour hr | minute min | second sec | day | week | month | year yr | degree deg | radian rad
 | dollar usd | cent | percent percentage pct | unit | hz | kcal | joule | newton | watt | volt
 | ev | mph | kmh | pm p.m | am a.m | square | cubic | sq | per"""
UNITS = {word: line.split()[0] for line in UNITS.split("|") for word in line.split()}
LETTERS = {"m": "meter", "s": "second", "g": "gram", "h": "hour", "l": "liter", "in": "inch"}
_UNIT = "|".join(sorted(map(re.escape, UNITS | LETTERS), key=len, reverse=True))
UNIT = re.compile(
    rf"/?\s?(?:\^?\s?\{{?\s?\\text\s?\{{([^{{}}\d]*)\}}\s?\}}?|(?<=[\d}}\s/])({_UNIT})s?)"
    r"\s?(?:\^\s?(?:\{\s?-?\d\s?\}|\d))?[\s/.]*$",
    re.IGNORECASE,
)
NO_UNIT = re.compile(  # what changes the number, or denies it
    r"[,;]|\b(?:not?|non|less|more|most|least|than|over|under|about|except|mod|squared|cubed|factorial"
    r"|pi|sqrt|doubled?|twice|tripled|plus|minus|divided|remainder|choose|maybe|wrong|false|incorrect"
    r"|(?:times|point|base|root) (?:zero|one|two|three|four|five|six|seven|eight|nine|ten)"
    r"|half|halves|negative|below|above|minimum|maximum|max|undefined|infinite|bn|mn|lakhs?|crores?"
    r"|(?:hundred|dozen|thousand|\w*illion|score)s?"
    r"|thirds?|(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|\w+teen|\w+tie|hundred|thousand|million)ths?)\b"
    r"|[十百千万萬亿億半]|以上|以下|分之",
    re.IGNORECASE,
)
_SYMBOL = r"(?:[kMGTcmnpf]|\\mu\s?)?(?:mol|Hz|Pa|eV|bar|rad|cal|pc|\\Omega|\\AA|[mgsAKNJWVCFTLH])"
_SYMBOL = rf"(?>[a-z]{{3,}}|[A-Z]{{3}}|[一-鿿]+|[MLR]_\{{?\\odot\}}?|{_SYMBOL})"
_SYMBOL += r"(?:\^\s?(?:\{\s?-?\d\s?\}|\d))?"
_BETWEEN = r"(?:[\s/(){}.]|\\cdot)"
SYMBOLS = re.compile(  # atomic and possessive: one way to read it, or none
    rf"(.*\d[)}}]*(?:\\cdot)?)(?:\s|(?=[{{一-鿿])){_BETWEEN}*+"
    rf"((?>{_SYMBOL})(?>{_BETWEEN}++{_SYMBOL}){{0,5}}+){_BETWEEN}*+"
)


def _strip_unit(text: str, letters: bool) -> tuple[str, str]:
    """(text without its unit, the unit's name in the table or "")."""
    names = []
    while match := UNIT.search(text):
        word = (match[1] or match[2] or "").strip().lower()
        bare_letter = match[2] and word in LETTERS
        if match[0].startswith("^") and word not in ("th", "st", "nd", "rd", "o"):
            break  # 10^{\text{six}}
        number_before = re.search(r"\d|\\pi", text[: match.start()])
        if not number_before or NO_UNIT.search(word) or bare_letter and not letters:
            break
        text = text[: match.start()].strip()
        one = word if word.isalpha() else ""  # MeV is no eV
        names.append((UNITS | LETTERS).get(word, UNITS.get(word.rstrip("s"), one)))
    return text, names[0] if len(names) == 1 else ""


def _strip_symbols(text: str) -> tuple[str, str]:
    """As _strip_unit, where the gold is a number without a unit: 10 \\mathrm{N\\,m}, 10 apples."""
    match = SYMBOLS.fullmatch(re.sub(r"\\text\s?(?=\{)", "", text))
    if match and not NO_UNIT.search(match[2]):
        return match[1], ""
    return _strip_unit(text, letters=True)


# Lists, sets, tuples, intervals, unions, matrices, ratios.

MATRIX = re.compile(
    r"([^&]*?)\\begin\{([pb]?matrix|smallmatrix|array)\}(?:\{[lcr| ]*\})?(.*)\\end\{\2\}"
)


def _items(text: str) -> tuple[str, list[str]]:
    """("list" | "set" | its two brackets | "union" | ":" | a matrix' shape | "", the items)."""
    parts = _split(text, "[,;]")[0]
    if len(parts) > 1 or re.match(r"(?!\\\{|[(\[]).*\\(?:pm|mp)", text):
        return "list", _plus_minus(parts)
    for kind, separator in (("union", rf"\\cup{END}"), (":", ":")):
        parts = _split(text, separator)[0]
        if len(parts) > 1:
            return kind, parts
    if text.startswith(r"\{") and _closing(text, 1) == len(text) - 1:
        return "set", _plus_minus(_split(text[2:-2], "[,;]")[0])
    if text[:1] in ("(", "[") and _closing(text, 0) == len(text) - 1:
        parts = _split(text[1:-1], "[,;]")[0]
        return (text[0] + text[-1], parts) if len(parts) > 1 else _items(text[1:-1].strip())
    if _key(text) == r"\mathbb{R}":
        return "()", [r"-\infty", r"\infty"]
    if match := re.fullmatch(r"\\mathbb\{R\}(?:\\setminus|\\backslash|-)\\\{(.*)\\\}", _key(text)):
        holes = sorted(match[1].split(","), key=lambda hole: (_number(hole) or [0])[0])
        ends = [r"-\infty", *holes, r"\infty"]
        return "union", [f"({left},{right})" for left, right in itertools.pairwise(ends)]
    if match := MATRIX.fullmatch(text):
        rows = re.split(r"\\\\(?:\s*\[[\w.]*\])?", match[3])  # \\[0.5em]
        rows = [row.split("&") for row in rows if row.strip()]
        if len({len(row) for row in rows}) == 1:
            kind = "column" if len(rows[0]) == 1 else f"{len(rows)} x {len(rows[0])}"
            factor = match[1].replace("-", "-1") if match[1].strip() == "-" else match[1]
            scaled = rf"{factor}\cdot(%s)" if factor else "%s"
            return kind, [scaled % cell for row in rows for cell in row]
    return "", [text]


def _plus_minus(parts: list[str]) -> list[str]:
    """1 \\pm 2 is two items."""
    items = []
    for part in parts:
        plus = part.replace(r"\pm", "+").replace(r"\mp", "-")
        minus = part.replace(r"\pm", "-").replace(r"\mp", "+")
        items += [plus] if plus == minus else [plus, minus]
    return items


def _same_items(a_kind: str, a: list[str], g_kind: str, g: list[str]) -> bool:
    kinds = {a_kind, g_kind}
    if len(a) != len(g):
        return False
    if kinds <= {"list", "set"} or kinds == {"union"} or kinds == {"set", ""}:
        left = list(a)  # order is free: each gold item needs an answer item of its own
        for item in sorted(g, key=lambda item: _key(item) not in map(_key, a)):
            match = next((x for x in left if _key(x) == _key(item)), None)
            match = match or next((x for x in left if _same(x, item)), None)
            if match is None:
                return False
            left.remove(match)
        return True
    # (1,2) may be written 1,2, and a vector as a tuple; [1,2] is no (1,2), but [1,2,3] is (1,2,3).
    alike = len(kinds) == 1 or kinds <= {"()", "column", "list"}
    return (alike or len(g) > 2 and kinds <= {"()", "[]", "list"}) and all(map(_same, a, g))


# Relations. "x = 5" and "m+n = 33" name a number; "x+z = 1" does not, nor does "x = 6 = 5".

RELATION = rf"\\(?:le|ge|ne|in|approx|equiv){END}|[<>=]"
_ATOM = rf"(?:\\[A-Za-z]+{END}(?:\s?\{{\w+\}})?|[A-Za-z])"
_ATOM += r"(?:_(?:\{[^{}]*\}|\w|\\[A-Za-z]+(?:\s?\{[^{}]*\})?))?"
_ATOM = rf"(?:{_ATOM}(?:\^(?:\{{\\prime\}}|\*))?)+"
_CALL = r"(?:\((?:[^()]|\([^()]*\))*\)|\[[A-Z]\])?"  # f(f(2)), E[X]
_NAME = rf"(?:\\frac\{{{_ATOM}\}}\{{{_ATOM}\}}|\|{_ATOM}\||\[{_ATOM}\]|{_ATOM}{_CALL})"
NAME = re.compile(rf"{_NAME}|\({_NAME}(?:,{_NAME})+\)")
SUM = re.compile(rf"{_NAME}(?:\+{_NAME})*")
NO_NAME = re.compile(r"\\(?:sqrt|log|ln|exp|sum|int|prod|pi|infty)|^[ei]$")


def _is_name(text: str, pattern: re.Pattern = NAME) -> bool:
    text = _key(text)
    return len(text) < 60 and bool(pattern.fullmatch(text)) and not NO_NAME.search(text)


def _same_relation(a: str, a_relation: tuple, g: str, g_relation: tuple) -> bool:
    (a_sides, a_signs), (g_sides, g_signs) = a_relation, g_relation
    if not g_signs:
        if set(a_signs) - {"=", r"\in", r"\equiv", r"\approx"}:
            return False  # an inequality is no number, and restates the problem for an interval
        zero = (_number(g) or [None])[0] == 0
        while len(a_sides) > 1 and (_is_name(a_sides[0]) or not zero and _is_name(a_sides[0], SUM)):
            a_sides = a_sides[1:]
        if len(a_sides) == 2 and _is_name(a_sides[1]):  # 5 = x
            a_sides = a_sides[:1]
        if len(a_sides) == 2 and a_signs[-1] == r"\approx":
            claim = _rounds_to(*a_sides) or _rounds_to(*a_sides[::-1])
            return claim and any(_same(side, g) for side in a_sides)
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
        if _is_solved(g_sides) and not _is_solved(a_sides):
            return False  # 3x+2 = 17 restates the problem for x = 5
        return _same_equation(a_sides, a_signs[0], g_sides, g_signs[0])
    return False


def _is_solved(sides: list[str]) -> bool:
    """Is one side a name, and the other without any?"""
    name, value = sides if _is_name(sides[0]) else sides[::-1]
    return _is_name(name) and not re.search("[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", value))


def _interval(sides: list[str], signs: list[str]) -> tuple[str, str] | None:
    """0 < x < 1 as ("x", "(0,1)"), x \\in S as ("x", S)."""
    if signs == [r"\in"] and _is_name(sides[0]):
        return sides[0], sides[1]
    if set(signs) <= {">", r"\ge"}:
        sides, signs = sides[::-1], [{">": "<", r"\ge": r"\le"}[sign] for sign in signs[::-1]]
    if len(sides) == 2 and _is_name(sides[0]):
        sides, signs = [r"-\infty", *sides], ["<", *signs]
    elif len(sides) == 2:
        sides, signs = [*sides, r"\infty"], [*signs, "<"]
    if not set(signs) <= {"<", r"\le"} or len(sides) != 3 or not _is_name(sides[1]):
        return None
    opening, closing = "(" if signs[0] == "<" else "[", ")" if signs[1] == "<" else "]"
    return sides[1], f"{opening}{sides[0]},{sides[2]}{closing}"


# Words, multiple choice, number bases: equal as text or not at all.

BASE = re.compile(r"\(?0*(\d[0-9A-Z]*)\)?_\{?(\d+)\}?")


def _words(text: str) -> str:
    text = re.sub(r"\\text\s*\{|[.:](?!\d)|(?<!\d)!|[{}(),;'\"?\\]", " ", text).casefold()
    return re.sub(r"^\s*(?:an?|the)\s+|\s+", "", text)


def _same_text(a: str, g: str) -> bool | None:
    """None if the gold is not text."""
    if re.fullmatch("[A-J]", g):
        bare = re.sub(r"\\text\s*\{|[{}]", "", a).strip()
        if choice := re.match(r"\(?\s*([A-Ja-j])\s*(?:\)|[.:]|$)", bare):  # (C), C. 12
            others = re.search(
                r"(?<![A-Za-z\\])(?:[A-J](?![A-Za-z])|[a-j]\s*(?:[).:,;]|$))", bare[choice.end() :]
            )
            return choice[1].upper() == g and not others
    a_base, g_base = BASE.fullmatch(_key(a)), BASE.fullmatch(_key(g))
    if a_base or g_base:
        return bool(a_base and g_base) and a_base.groups() == g_base.groups()
    if re.search(r"(?<![_^{])\s*\\text", g) or re.fullmatch("[A-Za-z ]{4,}|(?i:yes|no|odd)", g):
        return _words(a) == _words(g)
    return None


# Algebra: evaluated at random points, exactly while it is rational, else with 60 digits.

MAX_BITS = 50_000  # of an exact rational
AT_MOST = [  # what the parser takes exponential time for, found by timing all pairs of tokens
    (re.compile(rf"\\(?:{FUNCTIONS}|[Gg]amma){END}"), 8),
    (re.compile(r"(?:[_^]\s*(?:\\?\w+\s*(?:\{[^{}]*\})?|\{[^{}]*\})\s*){4}"), 0),  # x_1_1_1_1
    (re.compile(r"\|"), 8),
    # Evaluated while they are parsed, or for ever.
    (
        re.compile(
            rf"!\s*!|\\binom\s*\{{(?:\d{{4}}|[^{{}}]*(?:!|\^|\\binom))|amma\D{{0,9}}\d{{4}}|\\(?:operatorname|det|gcd|lcm|lim|begin){END}"
        ),
        0,
    ),
    (re.compile(r"\\(?:sum|prod|o?i+nt)(?![A-Za-z])"), 0),
]


@functools.cache
def _library():
    """Imported late: it takes 0.3 to 2.5 s, and a pool's caller never needs it."""
    import sympy
    from latex2sympy2_extended import latex2sympy2  # math-verify's parser
    from mpmath import mp

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    mp = mp.clone()
    mp.dps = 60
    return sympy, latex2sympy2, mp


@functools.lru_cache(maxsize=512)
def _tree(text: str):
    """The unevaluated sympy tree, or None. Never print or repr one: that is what hangs."""
    steps = ({"{": 1, "(": 1, "[": 1, "}": -1, ")": -1, "]": -1}.get(c, 0) for c in text)
    if len(text) > MAX_ALGEBRA or max(itertools.accumulate(steps), default=0) > MAX_DEPTH:
        return None
    if any(len(pattern.findall(text)) > limit for pattern, limit in AT_MOST):
        return None
    text = re.sub(r"_\s*(?:\{\\odot\s*\}|\\odot)", "_{s}", text)
    # Letters that the parser takes for e, i and the gamma function, or does not know.
    text = re.sub(rf"\\(gamma|hbar){END}|\\(Gamma){END}(?!\s*[({{])", r"\\mathcal{\1\2}", text)
    text = re.sub(r"(\\[A-Za-z]+)|([EI])", lambda m: m[1] or rf"\mathcal{{{m[2]}}}", text)
    _, latex2sympy2, _ = _library()
    try:
        return latex2sympy2.latex2sympy(
            text,
            is_real=True,
            normalization_config=None,
            conversion_config=latex2sympy2.ConversionConfig(lowercase_symbols=False),
        )
    except Exception as error:  # the parser raises bare Exception, antlr and sympy their own
        if isinstance(error, MemoryError):
            raise
        return None


class _Point:
    """The k-th random point, called with a tree for its value there."""

    def __init__(self, k: int, integers: bool):
        self.k, self.integers, self.derivatives, self.mp = k, integers, {}, _library()[2]

    def value_of(self, name: str):
        """Between 0.4 and 2.4; at odd points half of the names are negative."""
        seed = zlib.crc32(f"{name}@{self.k}".encode()) * 2654435761 % 2**32
        if self.integers:
            return Fraction(seed % 97 + 1)
        value = self.mp.mpf(seed) / 2**31 + self.mp.mpf("0.4")
        return -value if self.k % 2 and seed % 2 else value

    def real(self, value):
        if isinstance(value, Fraction):
            return self.mp.mpf(value.numerator) / value.denominator
        return value

    def __call__(self, node):
        value = self.evaluate(node)
        if isinstance(value, Fraction):
            bits = max(value.numerator.bit_length(), value.denominator.bit_length())
            return value if bits <= MAX_BITS else self.real(value)
        if not self.mp.isfinite(value):
            raise ArithmeticError
        return value

    def evaluate(self, node):
        mp, name = self.mp, type(node).__name__
        if node.is_Rational:
            return Fraction(node.p, node.q)
        if node.is_Float or node.is_NumberSymbol:
            return mp.make_mpf(node._to_mpmath(mp.prec)._mpf_)
        if name == "ImaginaryUnit" or node.is_Symbol and node.name in ("i", "imath"):
            return mp.mpc(0, 1)
        if node.is_Symbol:
            return self.value_of(node.name)
        if name == "Derivative":  # equal to one written alike
            return self.derivatives.setdefault(node, self.value_of(f"{len(self.derivatives)}'"))
        values = [self(argument) for argument in node.args]
        exact = all(isinstance(value, Fraction) for value in values)
        whole = exact and all(value.denominator == 1 and 0 <= value < 3000 for value in values)
        if name == "Pow":
            return self.power(*values)
        if name == "factorial" and whole:
            return Fraction(math.factorial(int(values[0])))
        if name == "binomial" and whole:
            return Fraction(math.comb(*map(int, values)))
        if not exact:
            values = [self.real(value) for value in values]
        if name == "Add":
            total = sum(values)
            cancelled = not exact and abs(total) < max(map(abs, values)) * mp.mpf(10) ** -45
            return mp.mpf(0) if cancelled else total
        if name in SIMPLE:
            return SIMPLE[name](*values)
        if any(abs(value) > 1e9 for value in values):
            raise OverflowError
        values = [self.real(value) for value in values]
        if NUMERIC.fullmatch(name):
            value = getattr(mp, name)(*values)
            if name in ("tan", "cot", "sec", "csc") and abs(value) > 1e40:
                raise ZeroDivisionError  # a pole, but for rounding
            return value
        if isinstance(node, _library()[0].core.function.AppliedUndef):  # f(x), a function of x
            return self.value_of(name + ",".join(mp.nstr(value, 20) for value in values))
        raise NotImplementedError(name)

    def power(self, base, exponent):
        if isinstance(exponent, Fraction) and exponent.denominator == 1:
            exponent = int(exponent)
            if isinstance(base, Fraction):
                bits = max(base.numerator.bit_length(), base.denominator.bit_length())
                if bits * abs(exponent) <= MAX_BITS:
                    return base**exponent
        base, exponent = self.real(base), self.real(exponent)
        if base and abs(exponent) * (abs(self.mp.mag(base)) + 1) > 1e15:
            raise OverflowError  # a tower of powers
        return self.mp.power(base, exponent)


SIMPLE = {"Mul": lambda *values: math.prod(values), "UnevaluatedExpr": lambda value: value}
SIMPLE |= {"Abs": abs, "Max": max, "Min": min, "Mod": lambda a, b: a % b}
SIMPLE |= {"floor": lambda x: Fraction(math.floor(x)), "ceiling": lambda x: Fraction(math.ceil(x))}
NUMERIC = re.compile(
    "log|exp|a?(?:sin|cos|tan|cot|sec|csc)|sinh|cosh|tanh|factorial|gamma|binomial"
)


def _values(trees: list) -> list[list]:
    """The trees' values at the points where all of them have one."""
    sympy = _library()[0]
    constant = not any(tree.free_symbols for tree in trees)
    # Rounding is for whole numbers: \lceil n/2\rceil is \lfloor (n+1)/2\rfloor.
    integers = all(tree.has(sympy.floor, sympy.ceiling, sympy.Mod) for tree in trees)
    values = []
    for k in range(1 if constant else 8):
        point = _Point(k, integers)
        try:
            here = [point(tree) if constant else point.real(point(tree)) for tree in trees]
        except (ArithmeticError, ValueError, TypeError, AttributeError, NotImplementedError):
            continue
        # Where symbols may be negative only real values count: sqrt(a/b) is sqrt(a)/sqrt(b) where
        # both are real, and sqrt(x^2) is x nowhere below zero.
        if k % 2 == 0 or not any(abs(value.imag) > 1e-40 for value in here):
            values.append(here)
    return values


def _tolerance(answer, gold) -> float:
    """Relative. As in _close: a decimal in the gold is rounded, one in the answer has 6 digits."""
    decimal = _library()[0].Float
    return 1e-4 if gold.has(decimal) else 2e-6 if answer.has(decimal) else 1e-30


def _same_expression(a: str, g: str) -> bool:
    gold, answer = _tree(g), _tree(a)
    if answer is None:
        raise Unparseable(a[:80])
    if gold is None:
        return False
    values = _values([answer, gold])
    tolerance = _tolerance(answer, gold)
    for x, y in values:
        if isinstance(y, Fraction):
            if isinstance(x, Fraction):
                return x == y
            tolerance = 1e-12 if y.denominator == 1 else tolerance
        x, y = _Point.real(_Point(0, False), x), _Point.real(_Point(0, False), y)
        if abs(x - y) > tolerance * max(abs(x), abs(y)):
            return False
    return bool(values)


def _rounds_to(exact: str, rounded: str) -> bool:
    """2\\sqrt3 \\approx 3.46 is one claim; 5 \\approx 6 would be two."""
    number, tree = _number(rounded), _tree(exact)
    values = _values([tree]) if number and tree is not None else []
    mantissa, _, power = _key(rounded).partition("\\")
    unit = 10.0 ** -len(mantissa.partition(".")[2])
    if not values or power:
        return False
    most = min(0.51 * unit, 0.04 * abs(number[0]))  # 1/2 \approx 1 would be two claims, too
    return all(abs(x - number[0]) <= most for (x,) in values)


def _same_equation(a_sides: list[str], a_sign: str, g_sides: list[str], g_sign: str) -> bool:
    """left - right of one is a constant times that of the other, which for < is positive."""
    trees = [_tree(side) for side in (*a_sides, *g_sides)]
    if None in trees[:2]:
        raise Unparseable(" ".join(a_sides)[:80])
    if None in trees:
        return False
    ratios = [(a - b) / (c - d) for a, b, c, d in _values(trees) if abs(c - d) > 1e-30]
    tolerance = max(
        _tolerance(answer, gold) for answer, gold in itertools.product(trees[:2], trees[2:])
    )
    if len(ratios) < 2 or abs(ratios[0]) <= 1e-30:  # 0 > 0 is a multiple of anything
        return False
    if any(abs(r - ratios[0]) > tolerance * abs(r) for r in ratios):
        return False
    direction = {"<": 1, ">": -1, r"\le": 2, r"\ge": -2}
    if a_sign in direction and g_sign in direction:
        sign = 1 if ratios[0].real > 0 else -1
        return direction[a_sign] == sign * direction[g_sign]
    return a_sign == g_sign


def math_equal(answer: str, gold: str) -> bool:
    """Is the answer (what stands in the box) the gold?"""
    return _compare(answer, gold)[0]


def _compare(answer: str, gold: str) -> tuple[bool, str]:
    """(equal, why the answer cannot be read or "")."""
    if not normalise(gold):
        raise ValueError("the gold answer is empty")
    if answer.strip() == gold.strip():
        return True, ""
    if len(answer) > MAX_CHARS and not re.fullmatch(r"[\s\d,+-]{,10000}", answer):
        return False, f"{len(answer)} characters"
    try:
        return _same(normalise(answer), normalise(gold)), ""
    except (Unparseable, RecursionError, ValueError, ArithmeticError) as error:
        return False, str(error)[:200] or type(error).__name__


def verify_math(response: str, gold: str | list[str]) -> Verdict:
    """Score a response; a list of golds means that any of them is right."""
    golds = [gold] if isinstance(gold, str) else gold
    if not golds or not all(isinstance(g, str) and normalise(g) for g in golds):
        raise ValueError(f"the gold answer is empty or not text: {gold!r}")
    answer = extract_answer(response)
    if answer is None or len(answer) <= MAX_CHARS and not normalise(answer):
        return Verdict(0.0, "no_answer")
    unread = ""
    for candidate in golds:
        equal, why = _compare(answer, candidate)
        if equal:
            return Verdict(1.0, "correct")
        unread = unread or why
    return Verdict(0.0, "unparseable", unread) if unread else Verdict(0.0, "wrong", answer[:80])


# ----------------------------------------------------------------------------------------
# 2. The worker pool. Every answer has a deadline that holds whatever the worker is doing: the
#    parent kills it and starts another. A worker is a fresh interpreter running this file, so it
#    is never forked from the caller and never imports the caller's __main__ (multiprocessing's
#    spawn would, with torch and vLLM); the caller may hold CUDA and any number of threads, and
#    no signal of its own is touched. Tasks and verdicts travel as JSON lines over pipes.

WORKER_BYTES = 2 << 30  # address space; sympy and all take 0.3 GB
WORKER_TASKS = 10_000  # then it is replaced, should a library leak; measured, 72 MB stay 72 MB
SECONDS_START = 120  # for its imports; 1 s, unless the machine is overloaded
WARM_UP = [  # parsed before a worker counts as ready: the parser builds its tables as it goes
    (r"\frac{1}{x+1}-\sqrt{2}", r"\frac{2^{n}}{3}+\binom{n}{2}!"),
    (r"y=-\frac{1}{2}x+\ln 3", r"2x+4y-3=|z|"),
    (r"2\sin(\pi t)+f(x)", r"a_{1}\cdot\lfloor n/2\rfloor+e^{-t}"),
]


class RowError(ValueError):
    """Bad data, not a bad answer: `row` is the index of the problem."""

    def __init__(self, row: int, message: str):
        super().__init__(f"row {row}: {message}")
        self.row, self.message = row, message


def _serve() -> None:
    """A worker: reads a task a line from stdin, writes a verdict a line to what was stdout."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever prints must not write between the verdicts
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (WORKER_BYTES, resource.RLIM_INFINITY))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the caller's way with it may be inherited
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    for answer, gold in WARM_UP:
        math_equal(answer, gold)
    replies.write('"ready"\n')
    for line in sys.stdin.buffer:
        task = json.loads(line)
        try:
            if "tests" in task:
                verdict = verify_code(
                    task["response"], task["tests"], task["func_name"], timeout=task["timeout"]
                )
            else:
                # CPU seconds: a busy machine makes no answer wrong. The signal is left to kill,
                # so it ends C code too, and the worker whose parent is gone.
                signal.setitimer(signal.ITIMER_PROF, task["timeout"])
                verdict = verify_math(task["response"], task["answer"])
                signal.setitimer(signal.ITIMER_PROF, 0)
            replies.write(json.dumps(asdict(verdict)) + "\n")
        except ValueError as error:
            replies.write(json.dumps(str(error)) + "\n")
        except MemoryError:
            replies.write(json.dumps(asdict(Verdict(0.0, "memory_limit"))) + "\n")
            return


class _Worker:
    def __init__(self):
        keep = ("PATH", "LANG", "HOME", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={name: os.environ[name] for name in keep if name in os.environ},  # no secrets
            process_group=0,  # the terminal's Ctrl-C is the caller's to answer
        )
        self.ready, self.closed, self.unread, self.tasks = False, False, b"", 0
        self.row: int | None = None  # of the task at work
        self.deadline = time.monotonic() + SECONDS_START

    def send(self, row: int, task: dict) -> None:
        self.row, self.tasks = row, self.tasks + 1
        data = memoryview(json.dumps(task).encode() + b"\n")
        try:
            while data:
                data = data[self.process.stdin.write(data) :]
        except BrokenPipeError:
            pass  # dead; its end of file will be read next
        self.deadline = time.monotonic() + task["seconds"]

    def receive(self):
        """Its reply, or None for the time being; `closed` if it has ended."""
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        self.closed = not data
        self.unread += data
        if not self.unread.endswith(b"\n"):
            return None
        reply, self.unread = json.loads(self.unread), b""
        self.ready, self.deadline = True, math.inf
        return reply

    def kill(self) -> int:
        self.process.kill()
        self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait()


class Verifier:
    """`with Verifier() as verifier: verdicts = verifier.score(responses, golds)`.

    timeout: CPU seconds for one math answer. code_timeout: seconds for one test of a program.
    """

    def __init__(
        self, num_workers: int | None = None, timeout: float = 2.0, code_timeout: float = 6.0
    ):
        cores = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's share the machine
        self.num_workers = num_workers or max(1, len(cores) // ranks)
        if self.num_workers < 1:
            raise ValueError(f"num_workers is {num_workers}; it takes at least one")
        self.timeout, self.code_timeout = timeout, code_timeout
        self.workers: list[_Worker] = []
        self.lock = threading.Lock()  # one batch at a time, from any thread
        self.protected = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self) -> None:
        while self.workers:
            self.workers.pop().kill()

    def score(
        self, responses: list[str], golds_or_problems: list, progress: bool = False
    ) -> list[Verdict]:
        """Verdicts in the order of the responses. A problem is a gold answer (text, or a list of
        which any is right), {"answer": gold} or {"tests": [...], "func_name": ...}."""
        if len(responses) != len(golds_or_problems):
            raise ValueError(f"{len(responses)} responses for {len(golds_or_problems)} problems")
        tasks = [
            self._task(row, *both) for row, both in enumerate(zip(responses, golds_or_problems))
        ]
        bar = None
        if progress:
            from tqdm import tqdm

            bar = tqdm(total=len(tasks), desc="scoring", unit="answer")
        with self.lock:
            try:
                return self._run(tasks, bar)
            finally:
                for worker in [w for w in self.workers if w.row is not None]:
                    self._drop(worker)  # after an exception: its task is nobody's
                if bar:
                    bar.close()

    def _task(self, row: int, response: str, problem) -> dict:
        """Data errors are raised here, before anything runs."""
        problem = problem if isinstance(problem, dict) else {"answer": problem}
        if not isinstance(response, str):
            raise RowError(row, f"the response is {type(response).__name__}, not text")
        task = {"response": response}
        if (tests := problem.get("tests")) is not None:
            if not isinstance(tests, list) or not tests:
                raise RowError(row, "the list of tests is empty")
            self._check_sandbox()
            seconds = (self.code_timeout + 1) * len(tests) + 10
            task |= {"tests": tests, "func_name": problem.get("func_name")}
            return task | {"timeout": self.code_timeout, "seconds": seconds}
        golds = problem.get("answer")
        golds = list(golds) if isinstance(golds, list | tuple) else [golds]
        if not golds or not all(isinstance(gold, str) and normalise(gold) for gold in golds):
            raise RowError(row, f"the gold answer is empty or not text: {problem.get('answer')!r}")
        return task | {"answer": golds, "timeout": self.timeout, "seconds": 4 * self.timeout}

    def _check_sandbox(self) -> None:
        """Say once what protects this machine, and refuse to run code without the essentials."""
        if not self.protected:
            protections = sandbox_protections()
            print(sandbox_summary(), file=sys.stderr)
            if not (protections["process tree"] and protections["resources"]):
                raise RuntimeError(f"refusing to run the policy's programs: {sandbox_summary()}")
            if not protections["network"]:
                warnings.warn("the policy's programs can reach the network", stacklevel=4)
            self.protected = True

    def _run(self, tasks: list[dict], bar) -> list[Verdict]:
        waiting, verdicts, deaths, failed_starts = deque(range(len(tasks))), {}, Counter(), 0

        def settle(row: int, *verdict) -> None:
            verdicts[row] = Verdict(*verdict)
            if bar:
                bar.update()

        while len(verdicts) < len(tasks):
            while len(self.workers) < min(self.num_workers, len(tasks) - len(verdicts)):
                self.workers.append(_Worker())
            for worker in self.workers:
                if waiting and worker.ready and worker.row is None:
                    row = waiting.popleft()
                    worker.send(row, tasks[row])
            poll = select.poll()  # select() fails beyond 1024 descriptors
            for worker in self.workers:
                poll.register(worker.process.stdout, select.POLLIN)
            soonest = min(worker.deadline for worker in self.workers) - time.monotonic()
            heard = {fd for fd, _ in poll.poll(1000 * max(0.0, min(soonest, 60.0)))}
            for worker in list(self.workers):
                row = worker.row
                if worker.process.stdout.fileno() in heard:
                    reply = worker.receive()
                    if reply == "ready":
                        failed_starts = 0
                    elif isinstance(reply, str):
                        raise RowError(row, reply)
                    elif reply:
                        worker.row = None
                        settle(row, *reply.values())
                        if worker.tasks >= WORKER_TASKS:
                            self._drop(worker)
                    if not worker.closed:
                        continue
                    code, started = self._drop(worker), worker.ready
                    failed_starts += not started
                    if failed_starts > 2:
                        raise RuntimeError(f"verify.py's worker does not start (status {code})")
                    if row is None:
                        continue
                    deaths[row] += 1
                    if code == -signal.SIGPROF:
                        settle(row, 0.0, "timeout", f"over {tasks[row]['timeout']:g} s")
                    elif deaths[row] < 2:
                        waiting.appendleft(row)  # the out-of-memory killer may have meant another
                    else:
                        settle(row, 0.0, "sandbox_error", f"its worker died twice, status {code}")
                elif worker.deadline <= time.monotonic():
                    self._drop(worker)
                    failed_starts += not worker.ready
                    if row is not None:
                        settle(row, 0.0, "timeout", f"over {tasks[row]['seconds']:g} s")
        return [verdicts[row] for row in range(len(tasks))]

    def _drop(self, worker: _Worker) -> int:
        self.workers.remove(worker)
        return worker.kill()


# ----------------------------------------------------------------------------------------
# 3. The sandbox: run a program that may be hostile, and find out what it printed.
#
#      scorer --exec--> supervisor --fork--> program
#
#    The scorer never forks itself (CUDA, vLLM, threads): it executes a bare interpreter, and that
#    builds the sandbox by ctypes, forks the program and waits for its end. The program gets code
#    and input; the expected output never leaves the scorer. One fresh process per test: 17 ms.
#
#    With namespaces, the program is PID 1 of its own, so its end is the end of all it started; it
#    has no network, and a root directory with nothing in it but the interpreter's libraries,
#    read-only, and an empty tmpfs /work. Where the kernel refuses them (Docker's seccomp, Ubuntu's
#    AppArmor), the fallback: the supervisor adopts, kills and reaps every descendant, and Landlock
#    shuts the files. Rlimits, no_new_privs and an unprivileged uid hold in both.
#
#    Contract: verify_code can be called in any thread and changes nothing in its process. It may
#    be killed at any time, SIGKILL included: its death signals the supervisor, which kills the
#    tree and removes its directory (only the fallback has one). Nobody has to tidy up after it.
#
#    It does NOT protect against: kernel bugs and side channels; the memory that 32 processes take
#    together (the limit is per process; but the OOM killer takes them first). The fallback
#    neither bounds the disk as a whole, nor hides other processes, nor closes UDP, and before
#    Linux 6.12 lets a program signal processes of its own user, the scorer among them.
#    There is only the standard library in it: no numpy.

LIMITS = {
    "AS": 2 << 30,  # address space of one process; contests allow 1 GiB at most
    "FSIZE": 64 << 20,  # one file, and in namespaces the whole of /work
    "NPROC": 32,  # threads count too
    "NOFILE": 64,
    "CORE": 0,
    "STACK": 128 << 20,  # the recursion limit is 50,000, as LiveCodeBench sets it
}
OUTPUT_BYTES = 10 << 20  # stdout, stderr and the result, each
LAUNCH_SECONDS = 20.0  # until the program starts: 20 ms, unless the machine is overloaded
# A virtual environment's python is a link that -S makes useless: take the one behind it.
PYTHON = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
# All the program can see of the file system: what `import` may have to load.
VISIBLE = sorted(
    {"/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache"}
    | {"/nix/store", sys.base_prefix, sys.base_exec_prefix}
)


def _launch(job):
    """The supervisor and, after the fork, the program. Runs in a bare interpreter and is shipped
    there as bytecode (nothing to compile), so everything it needs is imported inside."""
    import _signal  # `signal` itself would import enum: 4 ms
    import ctypes
    import os
    import resource
    import struct
    import sys

    libc = ctypes.CDLL(None, use_errno=True)
    directory, namespaces = job["directory"], job["namespaces"]
    devices = [f"/dev/{name}" for name in ("null", "zero", "random", "urandom")]

    def call(name, *args):
        encoded = [os.fsencode(a) if isinstance(a, str) else a for a in args]
        longs = [ctypes.c_long(a) if isinstance(a, int) else a for a in encoded]
        result = getattr(libc, name)(*longs)
        if result < 0:
            raise OSError(ctypes.get_errno(), f"{name}{args[:2]}")
        return result

    def mount(source, target, kind=None, flags=0, options=None):
        call("mount", source, target, kind, flags, options)

    def build_root(owner):
        """Enter a root of nothing but VISIBLE, some devices, /proc and /work. It is built on /proc
        because every machine has that directory and nothing of VISIBLE lies there."""
        top, nosuid_nodev, bind = "/proc", 2 | 4, 0x1000 | 0x4000  # MS_BIND | MS_REC
        mount(None, "/", None, 0x4000 | 0x40000)  # MS_REC | MS_PRIVATE: nothing leaks out
        mount("tmpfs", top, "tmpfs", nosuid_nodev, "size=1m,mode=755")
        for path in [*job["visible"], *devices]:
            if not os.path.exists(path) or os.path.exists(top + path):
                continue  # not on this machine, or inside a directory already bound
            if os.path.isdir(path):
                os.makedirs(top + path)
            else:
                os.makedirs(os.path.dirname(top + path), exist_ok=True)
                os.close(os.open(top + path, os.O_CREAT))
            if path not in devices:
                mount(path, top + path, None, bind)
        os.mkdir(top + "/work")
        os.mkdir(top + "/proc")
        for fd, name in enumerate(("stdin", "stdout", "stderr")):
            os.symlink(f"/proc/self/fd/{fd}", f"{top}/dev/{name}")
        # mount_setattr(AT_FDCWD, top, AT_RECURSIVE, {RDONLY | NOSUID | NODEV}): Linux >= 5.12
        call("syscall", 442, -100, top, 0x8000, struct.pack("4Q", 1 | 2 | 4, 0, 0, 0), 32)
        for path in devices:
            mount(path, top + path, None, bind)
        size = f"size={job['limits']['FSIZE']},nr_inodes=4096"
        mount("tmpfs", top + "/work", "tmpfs", nosuid_nodev, f"{size},mode=700,{owner}")
        try:
            mount("proc", top + "/proc", "proc", nosuid_nodev | 1 | 8)  # read-only, noexec
        except OSError:
            pass  # refused where a container masks its own; all it costs is /dev/stdin
        # chroot rather than pivot_root: inside a chroot the kernel refuses to make a user
        # namespace, and a process without capabilities cannot leave it.
        os.chroot(top)
        os.chdir("/work")

    def landlock():
        """The fallback's walls: read VISIBLE, write the working directory, touch nothing else."""
        abi = call("syscall", 444, None, 0, 1)
        every = 0x1FFF | (abi > 1) << 13 | (abi > 2) << 14 | (abi > 4) << 15
        # and no TCP (ABI 4); no signals and no abstract sockets of the outside (ABI 6)
        handled = struct.pack("3Q", every, (abi > 3) * 3, (abi > 5) * 3)
        rules = call("syscall", 444, handled, 24, 0)
        for path in [*job["visible"], *devices, directory]:
            if os.path.exists(path):
                read = 1 | 4 | 8 if os.path.isdir(path) else 4 | (path in devices) * 2
                allowed = every if path == directory else read
                fd = os.open(path, os.O_PATH)
                call("syscall", 445, rules, 1, struct.pack("=Qi", allowed, fd), 0)
                os.close(fd)
        call("syscall", 446, rules, 0)
        os.close(rules)

    # -- supervisor: a SIGTERM, from the scorer or by its death, ends the program ----------------
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)  # inherited as ignored, it would reap for us
    _signal.pthread_sigmask(_signal.SIG_BLOCK, {_signal.SIGTERM, _signal.SIGCHLD})
    call("prctl", 1, _signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != job["scorer"]:
        os._exit(1)  # the scorer died before that line
    call("prctl", 36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    os.umask(0o022)
    # RLIMIT_NPROC does not bind root, nor the root of a user namespace made by root (measured).
    # So real root turns the program into a uid nobody else has, and all its processes are its own;
    # anyone else keeps the uid and needs a user namespace to be allowed the other namespaces.
    with open("/proc/self/uid_map") as f:
        is_root = os.geteuid() == 0 and f.read().split() == ["0", "0", "4294967295"]
    uid = 2**30 + os.getpid() if is_root else os.geteuid()
    if namespaces:  # mount, IPC, PID and network
        kinds = 0x20000 | 0x8000000 | 0x20000000 | 0x40000000
        maps = {"setgroups": "deny", "uid_map": f"{2**16} {uid} 1"}
        maps["gid_map"] = f"{2**16} {os.getegid()} 1"
        call("unshare", kinds if is_root else kinds | 0x10000000)
        for name, text in {} if is_root else maps.items():
            with open(f"/proc/self/{name}", "w") as f:
                f.write(text)
    else:
        os.mkdir(directory, 0o700)
    program = os.fork()
    if program:
        for fd in (0, 1, 2, job["result"]):
            os.close(fd)
        status = b""
        while not status:
            if _signal.sigwait({_signal.SIGTERM, _signal.SIGCHLD}) == _signal.SIGTERM:
                os.kill(program, _signal.SIGKILL)
            while not status and (ended := os.wait4(-1, os.WNOHANG))[0]:  # or an adopted orphan
                if ended[0] == program:
                    status = b"exit %d %f" % (ended[1], ended[2].ru_utime + ended[2].ru_stime)
        try:  # its namespace has ended with it; without one, end what is left of the tree
            while True:
                os.waitpid(-1, os.WNOHANG)
                with open(f"/proc/self/task/{os.getpid()}/children") as f:
                    for pid in f.read().split():
                        os.kill(int(pid), _signal.SIGKILL)
                os.waitpid(-1, 0)
        except ChildProcessError:
            pass
        if not namespaces:
            import shutil

            os.chmod(directory, 0o700)
            for parent, names, _ in os.walk(directory):
                for path in (os.path.join(parent, name) for name in names):
                    if not os.path.islink(path):
                        os.chmod(path, 0o700)  # the program may have closed it to us
            shutil.rmtree(directory, ignore_errors=True)
        os.write(job["status"], status)
        os._exit(0)

    # -- program: put on the restraints, then run the code in this interpreter as __main__ -------
    # What fails before "ready" is the sandbox's fault, and stderr says what.
    os.setsid()
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
    with open("/proc/self/oom_score_adj", "w") as f:
        f.write("1000")  # out of memory? take this process, not the trainer
    if is_root:
        for path in (0, 1, 2) if namespaces else (0, 1, 2, directory):
            os.chown(path, uid, uid)  # the pipes too: it may open /dev/stdin
    if namespaces:
        build_root(f"uid={uid},gid={uid}" if is_root else f"uid={2**16},gid={2**16}")
    else:
        os.chdir(directory)
    for name, limit in job["limits"].items():
        kind = getattr(resource, "RLIMIT_" + name)
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))
    if is_root:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    call("capset", struct.pack("II", 0x20080522, 0), bytes(24))  # no capability is left
    call("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    call("prctl", 1, _signal.SIGKILL, 0, 0, 0)  # again: a change of uid clears it
    if not namespaces:
        try:
            landlock()
        except OSError:
            pass  # before Linux 5.13; the probe below notices
    os.umask(0o077)
    with open("main.py", "w", errors="replace") as f:
        f.write(job["source"])  # for tracebacks
    os.write(job["status"], b"ready ")
    os.close(job["status"])  # from here on the program cannot speak for the supervisor

    sys.setrecursionlimit(50_000)  # LiveCodeBench's
    getattr(sys, "set_int_max_str_digits", int)(0)  # to print 5,000 digits is no error
    sys.argv = ["main.py"]
    main = sys.modules["__main__"].__dict__
    main.clear()
    # A functional solution is a module, as in LiveCodeBench: its main guard stays shut.
    name = "solution" if job["function"] else "__main__"
    sys.modules[name] = sys.modules["__main__"]
    main.update(__name__=name, __builtins__=__builtins__, __file__="main.py")
    for line in job["imports"]:
        try:
            exec(line, main)  # noqa: S102 (to run code is what this file is for)
        except ImportError:
            pass
    exec(compile(job["source"], "main.py", "exec"), main)  # noqa: S102
    if job["function"]:
        import json

        owner = main["Solution"]() if "Solution" in main else None
        function = getattr(owner, job["function"], None) or main[job["function"]]
        result = function(*map(json.loads, job["args"]))
        with open(job["result"], "w") as f:
            f.write(json.dumps(result))


BOOT = """import marshal, sys
with open(int(sys.argv[1]), "rb") as f:
    code, job = marshal.load(f)
type(lambda: 0)(code, dict(globals()))(job)"""


@functools.cache
def _usual_imports():
    """name -> the import that binds it, for all the names LiveCodeBench star-imports. A program
    gets those it mentions: importing everything costs 15 ms, twice a bare start."""
    modules = "string re datetime collections heapq bisect copy math random statistics itertools"
    modules = (modules + " functools operator io sys json typing").split()
    found = {}
    for module in map(importlib.import_module, modules):
        for name in getattr(module, "__all__", [n for n in dir(module) if n[0] != "_"]):
            if not hasattr(builtins, name):  # math's pow must not hide the builtin one
                found[name] = f"from {module.__name__} import {name}"
    return found | {name: f"import {name}" for name in modules}


def _run(source, stdin, timeout, function=None, args=(), namespaces=True):
    """Run a program on one input -> (reason, detail, stdout, result). The reason is None if it
    ended by itself with exit code 0."""
    words = set(re.findall(r"(?<![.\w])[A-Za-z_]\w*", source))
    with contextlib.ExitStack() as stack:

        def opened(fd, mode):
            return stack.enter_context(open(fd, mode, buffering=0))

        job_file = opened(os.memfd_create("job"), "w+b")
        status, status_end = map(opened, os.pipe(), ("rb", "wb"))
        result, result_end = map(opened, os.pipe(), ("rb", "wb"))
        job = {
            "source": source,
            "imports": [line for name, line in _usual_imports().items() if name in words],
            "function": function,
            "args": list(args),
            "status": status_end.fileno(),
            "result": result_end.fileno(),
            "scorer": os.getpid(),
            "namespaces": namespaces,
            "directory": os.path.join(tempfile.gettempdir(), f"sandbox-{os.urandom(8).hex()}"),
            "visible": VISIBLE,
            "limits": {**LIMITS, "CPU": math.ceil(timeout) + 1},  # wall time runs out first
        }
        job_file.write(marshal.dumps((_launch.__code__, job)))
        job_file.seek(0)
        process = subprocess.Popen(
            [PYTHON, "-I", "-S", "-B", "-X", "utf8", "-c", BOOT, str(job_file.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={},
            cwd="/",
            pass_fds=(job_file.fileno(), status_end.fileno(), result_end.fileno()),
            start_new_session=True,
        )
        try:
            status_end.close()
            result_end.close()
            pipes = (status, process.stdout, process.stderr, result)
            reason, outputs = _exchange(process.stdin, stdin, pipes, timeout)
        finally:
            process.terminate()  # the supervisor ends and reaps its tree, then itself
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
            with process:  # closes its pipes and reaps it
                pass
    if reason:
        over = {"output_limit": f"{OUTPUT_BYTES} bytes", "timeout": f"{timeout:.3g} s"}
        return reason, f"over {over.get(reason, f'{LAUNCH_SECONDS:g} s to start')}", b"", b""
    status, stdout, stderr, result = outputs
    last_line = stderr[-2000:].decode(errors="replace").strip().rpartition("\n")[2]
    detail = "".join(c for c in last_line if c.isprintable())[:200]  # it may end on a terminal
    ended = re.fullmatch(r"ready exit (\d+) ([\d.]+)", status.decode())
    if not ended:
        return "sandbox_error", detail or "the supervisor was killed", b"", b""
    code = os.waitstatus_to_exitcode(int(ended[1]))
    if code == -9:  # by the kernel: out of CPU seconds, or else out of memory
        reason = "timeout" if float(ended[2]) > timeout else "memory_limit"
    elif code:
        reason = "memory_limit" if detail.startswith("MemoryError") else "runtime_error"
    return reason, f"killed by signal {-code}" if code < 0 else detail, bytes(stdout), bytes(result)


def _exchange(stdin, text, pipes, timeout):
    """Write `text` to stdin and read the pipes until all are closed, which the supervisor's end
    does -> (why it was cut short or None, what was read)."""
    text, received = memoryview(text), {pipe: bytearray() for pipe in pipes}
    started, deadline = False, time.monotonic() + LAUNCH_SECONDS
    with selectors.DefaultSelector() as selector:
        os.set_blocking(stdin.fileno(), False)
        selector.register(stdin, selectors.EVENT_WRITE)
        for pipe in pipes:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            events = selector.select(max(deadline - time.monotonic(), 0))
            if time.monotonic() >= deadline:
                return "timeout" if started else "sandbox_error", ()
            for key, _ in events:
                if key.fileobj is stdin:
                    try:
                        text = text[os.write(key.fd, text[: 1 << 16]) :]
                    except BrokenPipeError:  # one may answer without reading the input
                        text = text[:0]
                    if not text:
                        selector.unregister(stdin)
                        stdin.close()
                    continue
                data = os.read(key.fd, 1 << 16)
                received[key.fileobj] += data
                if not data:
                    selector.unregister(key.fileobj)
                if len(received[key.fileobj]) > OUTPUT_BYTES:
                    return "output_limit", ()
            if not started and received[pipes[0]].startswith(b"ready"):
                started, deadline = True, time.monotonic() + timeout
    return None, received.values()


# The probe tries what must not work. (A scorer that is PID 1 of a container shares its number with
# the program, which then meets itself: hence the second conditions.)
PROBE = """
import os, socket, time
def refused(attempt, *args):
    try:
        return not attempt(*args)
    except OSError:
        return True
def fork_many():
    for _ in range(100):
        if os.fork() == 0:
            time.sleep(9)
            os._exit(0)
    return True
def write(path):
    return open(path, "w")
def read(path):
    return len(open(path).read()) > 0
def send(address):
    return socket.socket(type=socket.SOCK_DGRAM).connect(address) is None
def signal(pid):
    return os.kill(pid, 0) is None and pid != os.getpid()
scorer, directory = input(), input()
print(refused(fork_many), refused(signal, int(scorer)), refused(send, ("127.0.0.1", 9)),
    refused(write, directory + "/probe"), refused(read, f"/proc/{scorer}/environ"))
"""


@functools.cache
def _probe(namespaces):
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o777)
        text = f"{os.getpid()}\n{directory}\n".encode()
        reason, detail, stdout, _ = _run(PROBE, text, 10.0, namespaces=namespaces)
    if reason:  # say why, for whoever wonders what Docker or the distribution forbids
        way = "namespaces" if namespaces else "the fallback, without namespaces,"
        warnings.warn(f"the sandbox by {way} does not work here: {detail}", stacklevel=1)
        return {}
    # It ended, so the supervisor has reaped all that it forked: the process tree is in hand.
    names = ("resources", "signals", "network", "files", "secrets")
    found = [word == b"True" for word in stdout.split()]
    return {"process tree": True, **dict(zip(names, found))}


def sandbox_protections() -> dict[str, bool]:
    """Which protections hold here: tried from inside the sandbox, once in a process."""
    for namespaces in (True, False) if sys.platform == "linux" else ():
        if protections := _probe(namespaces):
            return {"namespaces": namespaces, **protections}
    return {"namespaces": False, "process tree": False, "resources": False, "network": False}


def sandbox_summary():
    on = [name for name, holds in sandbox_protections().items() if holds]
    off = [name for name, holds in sandbox_protections().items() if not holds]
    return f"code sandbox: on: {', '.join(on) or 'nothing'}; off: {', '.join(off) or 'nothing'}"


# What is a right program: LiveCodeBench's rules, except that a functional result is compared as
# strict JSON.


def extract_code(response: str) -> str | None:
    """The last complete fenced block of what follows the reasoning; None if there is none or if
    the last fence never closes (a truncated response)."""
    if "<think>" in response and "</think>" not in response:
        return None
    code, block, fence = None, None, ""
    for line in response.rpartition("</think>")[2].replace("\r\n", "\n").split("\n"):
        mark = re.match(r"\s*(`{3,}|~{3,})(.*)", line)
        if block is None and mark and "`" not in mark[2]:
            block, fence, indent = [], mark[1], len(line) - len(line.lstrip())
        elif block is not None and mark and mark[1].startswith(fence) and not mark[2].strip():
            code, block = "\n".join(block), None
        elif block is not None:
            margin = len(line) - len(line.lstrip())
            block.append(line[min(indent, margin) :])  # a fence inside a list is indented
    return None if block is not None else code


def _same_output(got: str, want: str) -> bool:
    """Equal lines after stripping, or lines of numbers that are equal as decimals."""
    got, want = got.strip().split("\n"), want.strip().split("\n")
    return len(got) == len(want) and all(
        _same_line(a.strip(), b.strip()) for a, b in zip(got, want)
    )


def _same_line(got: str, want: str) -> bool:
    if got == want:
        return True
    got, want = got.split(), want.split()
    try:
        return len(got) == len(want) and all(Decimal(a) == Decimal(b) for a, b in zip(got, want))
    except ArithmeticError:  # not numbers
        return False


def _strict_json(text: str):
    """JSON without NaN and Infinity. Integers too long for int() become exact Decimals: int()
    refuses more than 4,300 digits, and to lift that limit would change it for the whole process."""

    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    def integer(digits):
        return int(digits) if len(digits) <= 4300 else Decimal(digits)

    try:
        return json.loads(text, parse_constant=refuse, parse_int=integer)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _same_value(got, want) -> bool:
    """Equal JSON values. It descends no deeper than `want`, which is not the program's."""
    if isinstance(want, list) and isinstance(got, list):
        return len(got) == len(want) and all(map(_same_value, got, want))
    if isinstance(want, dict) and isinstance(got, dict):
        return got.keys() == want.keys() and all(_same_value(got[k], want[k]) for k in want)
    numbers = [
        isinstance(x, int | float | Decimal) and not isinstance(x, bool) for x in (got, want)
    ]
    if not all(numbers):
        return type(got) is type(want) and got == want
    if isinstance(want, float):
        try:
            return math.isclose(got, want, rel_tol=1e-6, abs_tol=1e-6)
        except OverflowError:  # an integer beyond every float
            return False
    return got == want


def parse_tests(tests: list[dict], func_name: str | None) -> list[tuple]:
    """(kind, input, output) of each test; ValueError says which cannot be used, and why."""
    if not isinstance(tests, list) or not tests:
        raise ValueError("tests must be a non-empty list of {input, output, testtype}")
    jobs = []
    for number, test in enumerate(tests):
        try:
            text, want, kind = test["input"], test["output"], test["testtype"]
            if kind not in ("stdin", "functional") or not isinstance(text + want, str):
                raise ValueError(f"testtype {kind!r}")
            if kind == "functional":
                if not func_name:
                    raise ValueError("functional, but there is no func_name")
                text, want = [x for x in text.split("\n") if x.strip()], _strict_json(want)
                for line in text:
                    _strict_json(line)
            jobs.append((kind, text, want))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"test {number} cannot be decoded: {error!r}") from None
    return jobs


def verify_code(
    response: str,
    tests: list[dict],
    func_name: str | None = None,
    *,
    timeout: float = 6.0,
    total_timeout: float | None = None,
) -> Verdict:
    """Run the response's program on every test, a fresh process each, up to the first failure.
    `timeout` is the wall seconds of one test, `total_timeout` of all (default: LiveCodeBench's)."""
    jobs = parse_tests(tests, func_name)
    code = extract_code(response)
    if code is None or not code.strip():
        return Verdict(0.0, "no_answer", "no complete fenced block with code")
    protections = sandbox_protections()
    if not (protections["process tree"] and protections["resources"]):
        raise RuntimeError(f"not running code, it would be unprotected: {sandbox_summary()}")
    total = (timeout + 1) * len(tests) + 5 if total_timeout is None else total_timeout
    deadline = time.monotonic() + total
    for number, (kind, text, want) in enumerate(jobs):
        left = deadline - time.monotonic()
        where = f"test {number + 1} of {len(jobs)}"
        if left <= 0:
            return Verdict(0.0, "timeout", f"{where}: {total:g} s for the problem are over")
        function, args, stdin = (func_name, text, "") if kind == "functional" else (None, [], text)
        try:
            reason, detail, stdout, result = _run(
                code,
                stdin.encode("utf-8", "surrogatepass"),
                min(timeout, left),
                function,
                args,
                protections["namespaces"],
            )
        except OSError as error:  # no process, memory or descriptor to be had
            reason, detail = "sandbox_error", str(error)
        if reason:
            return Verdict(0.0, reason, f"{where}: {detail}")
        if kind == "stdin":
            right = _same_output(stdout.decode(errors="replace"), want)
        else:
            try:
                right = _same_value(_strict_json(result.decode()), want)
            except ValueError as error:  # none or more than one result, NaN, not UTF-8 ...
                right, where = False, f"{where}: {error}"
        if not right:
            return Verdict(0.0, "wrong", where)
    return Verdict(1.0, "correct")


# ----------------------------------------------------------------------------------------
# 4. The command line.


def read_rows(path: Path) -> tuple[list[dict], list[int]]:
    """The rows and their line numbers."""
    rows, numbers = [], []
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{path} cannot be read: {error}")
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            fail(f"{path}, line {number}: not JSON ({error})")
        if not isinstance(row, dict):
            fail(f"{path}, line {number}: not a JSON object")
        if not isinstance(row.get("response"), str):
            fail(f'{path}, line {number}: "response" is missing or not text')
        if row.get("answer") is None and row.get("tests") is None:
            fail(f'{path}, line {number}: neither "answer" nor "tests" is there to score it by')
        rows.append(row)
        numbers.append(number)
    if not rows:
        fail(f"{path} has no rows")
    return rows, numbers


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Score the responses in a JSON lines file, right or wrong. A row is "
        '{"response", "answer"} for mathematics (an answer that is a list means: any of these), or '
        '{"response", "tests", "func_name"} for a program, with tests as LiveCodeBench writes '
        'them: [{"input", "output", "testtype": "stdin" or "functional"}]. Other fields are kept. '
        "FILE.scored.jsonl gets each row with its reward, reason and detail. Where rows carry a "
        'label, "correct" or "passed", the table says how far the verdicts agree with it.',
    )
    parser.add_argument("file", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--workers", type=int, help="processes (default: one per core)")
    parser.add_argument(
        "--timeout", type=float, default=2.0, help="CPU seconds for a math answer (default: 2)"
    )
    parser.add_argument(
        "--code-timeout", type=float, default=6.0, help="seconds for one test (default: 6)"
    )
    options = parser.parse_args()
    if options.workers is not None and options.workers < 1:
        fail(f"--workers is {options.workers}; it takes at least one")
    if options.timeout <= 0 or options.code_timeout <= 0:
        fail("--timeout and --code-timeout are seconds above 0")
    rows, numbers = read_rows(options.file)
    try:
        with Verifier(options.workers, options.timeout, options.code_timeout) as verifier:
            verdicts = verifier.score([row["response"] for row in rows], rows, progress=True)
    except RowError as error:
        fail(f"{options.file}, line {numbers[error.row]}: {error.message}")
    output = options.file.with_suffix(".scored.jsonl")
    temporary = output.with_name(f"{output.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row | asdict(v)) + "\n" for row, v in zip(rows, verdicts))
    os.replace(temporary, output)

    for reason, count in Counter(verdict.reason for verdict in verdicts).most_common():
        print(f"{reason:15} {count:8,} {count / len(rows):8.1%}")
    print(
        f"accuracy {sum(verdict.reward for verdict in verdicts) / len(rows):.4f} of {len(rows):,}"
    )
    labels = [next((row[k] for k in ("correct", "passed") if k in row), None) for row in rows]
    labelled = [i for i, label in enumerate(labels) if label is not None]
    wrong = [i for i in labelled if bool(labels[i]) != bool(verdicts[i].reward)]
    if labelled:
        print(f"agrees with the label in {len(labelled) - len(wrong):,} of {len(labelled):,}")
    for i in wrong:
        name = rows[i].get("name") or rows[i].get("kind") or rows[i].get("id") or ""
        print(f"  line {numbers[i]}: label {labels[i]}, {verdicts[i].reason} {name}")
    print(f"wrote {output}")


if __name__ == "__main__":
    _serve() if sys.argv[1:] == ["--worker"] else main()
