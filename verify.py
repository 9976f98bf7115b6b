"""The policy's only teacher: scores math answers and programs, right or wrong.

python verify.py FILE.jsonl  # rows of {"response", "answer"} or {"response", "tests"}
"""

import argparse
import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import threading
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import sympy as sp
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy
from tqdm import tqdm


@dataclass(frozen=True)
class Verdict:
    reward: float  # 1.0 or 0.0
    reason: str  # correct, wrong, no_answer, timeout, runtime_error,
    detail: str = ""  # sandbox_error: the scorer failed, not the answer


def fail(message):
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    raise SystemExit(2)


# ---- 1. What is a right answer. A wrong one accepted is learnt and exploited, a right one
# refused costs a little signal: in doubt, the answer is no.

BALANCED = r"(?:[^{}\\]|\\.)*+"
for _ in range(8):  # deeper braces are nobody's answer
    BALANCED = rf"(?:[^{{}}\\]|\\.|\{{{BALANCED}\}})*+"


def extract_answer(response):
    """The last balanced \\boxed{...} after the reasoning; None if it is one of many guesses."""
    tail = response.rpartition("</think>")[2]
    boxes = re.findall(rf"(?s)\\boxed\s*\{{({BALANCED})\}}", tail)
    return boxes[-1].strip() if 0 < len(set(boxes)) < 4 and "<think>" not in tail else None


def gold_texts(gold):
    """The texts of which any is right; [] where the gold is unusable (NaN, an essay)."""
    texts = []
    for item in gold if isinstance(gold, list) else [gold]:
        if type(item) in (int, float) and abs(item) < 1e300:
            item = str(int(item) if item == int(item) else item)  # 123456.0 is an integer
        usable = isinstance(item, str) and len(item) <= 300
        if not usable or normalise(item).strip("+-{} ").lower() in ("", "nan", "inf"):
            return []
        texts.append(item)
    return texts


# Respell: one thing is written one way. A ~ comes before what was set as words.
SYMBOLS = r"−- –- ×\cdot ·\cdot ≤\le ≥\ge ≠\ne ∞\infty ∪\cup ∈\in ±\pm π\pi √\sqrt °^\circ ²^2 ³^3 ½\frac12"
SYMBOLS = {ord(s[0]): s[1:] + " " for s in SYMBOLS.split()}
SYMBOLS |= {wide: wide - 0xFEE0 for wide in range(0xFF01, 0xFF5F)}
BARE, REL = r"(?<![\\A-Za-z])", r"(?:[<>]|\\(?:[gl]eq?|in)\b)"
SPELLING = r"""\\[dtc]frac -> \\frac
(?<=\d)(?:\{,\}|,\\!|\\[,;: ]|[,~ ])(?=\d{3}(?!\d)(?!.*(?:[)\]]|\\\}))) -> # 12,345; not (12,345)
(?<!\\)\\[$,;:!> ()]|[$~]|\\(?:left|right)\b ?\.?|\\(?:displaystyle|boxed|q?quad)\b -> ␣
(?<![\d.])(\d+)\.0+(?![\d.]) -> \1 # 2.0
\\(?:text|math(?!bb|cal)|mbox|operatorname|bold)[a-z]* ?(?:\{ *([^{}]*)\})? -> ~\1␣
\s+ -> ␣
^[ :=*]+|(?:[ ,;:*]|(?<!\.)\.)+$|~(?!\(?[A-Za-z])|\\(?=%)|^\\forall[^,]*, ->
^[~(]*([A-J])[).:]+(?! *[,^_]|.*BARE(?:[A-Ja-j]\b|[A-Za-z]{2})).* -> \1 # (C) 12
,?[~ ]*BARE(?:and|or)\b -> ,␣
\\(?:approx|equiv)(?![a-z]) -> =
BARE(pi|sqrt|sin|cos|tan|log|ln)(?![A-Za-z]) -> \\\1
(\^|\\sqrt) ?\(([^()]*)\) -> \1{\2} # 2^(10)
\\(frac|sqrt) ?(\w) -> \\\1{\2} # \frac12
([_^]|\\frac\{[^{}]*\}) ?(\d+|[A-Za-z]) -> \1{\2}
\b(\d+\.?\d*)[eE]([+-]?\d+)\b -> \1\\cdot␣10^{\2} # 4.5e33
(?<![\w/.}^])(\d+) ?(\\frac\{\d+\}\{\d+\}|(?<= )\d+/\d+(?![\w.])) -> (\1+\2) # 5 1/2
 ?\(= \d+\.\d+\)$ ->
[~ ]*\(base (\d+)\)$|_\{\((\d+)\)\}$ -> _{\1\2}
^[(\[]([^()]+,[^()]+)[)\]]\^\{(?:T|\\top ?)\}$ -> (\1) # (1,2)^T
(?<![\w,]) |(?<!\w) (?!\d)| (?![\w~]) ->
^(?!.*REL.*REL)(.*BARE([a-z])(?![a-z])[^=]*?)[, (~]+(?:for )?\2 ?REL[^=,a-z]*(?:mathbb\{[A-Z]\})?\)?$ -> \1"""
SPELLING = SPELLING.replace("BARE", BARE).replace("REL", REL).splitlines()
SPELLING = [line.partition(" #")[0].split(" ->") for line in SPELLING]


def normalise(text):
    text = text.translate(SYMBOLS)
    for pattern, new in SPELLING:
        text = re.sub(pattern, new.strip().replace("␣", " "), text)
    return text


# What may follow a number; other words change it, as thirds do.
UNIT = "%|[ckmn]m|kg|ft|in|(?:square|unit|degree|dollar|(?:per)?cent|meter|hour|minute|day|way)s?"
UNIT = rf"(?:~[mgsh]|[~ ]*(?:{UNIT}))(?![A-Za-z])(?:\^\{{\d\}})?"
MEASURE = rf"((?=.*\d)(?:\\[a-z]+|[^A-Za-z~])*?|.*) ?((?:{UNIT} ?)*)"

# Read: math-verify's parser does the work; what it would misread is refused.
UNREAD = r"""~(?!\w\b)|:|'|[\d)}] ?_|\d[ {]+\d|(?<![a-z\]_])\{\d+\} ?[\d{]
|\^\{\(\w\)|\^\{[^{}]*(?:\}|\^\{[^{}]*)\^|\\(?:sum|prod|int|lim|gcd|phantom|top)(?![a-z])
|/\d+ ?[A-Za-z(]|BARE(?<!n\{)(?<!d\{)(?:[A-Za-z][a-z]{2}|NOT?\b)"""
UNREAD = UNREAD.replace("\n", "").replace("BARE", BARE)


class Reader(_Latex2Sympy):
    """The parser; but f(2) is a name, f^{-1}(x) no power and 2(3) not 2 + 3."""

    def convert_func(self, func):
        tree = super().convert_func(func)
        return sp.Symbol(func.getText()) if tree.atoms(sp.core.function.AppliedUndef) else tree

    def convert_postfix_list(self, postfixes, i=0):
        return functools.reduce(self.mul_flat, map(self.convert_postfix, postfixes))


@functools.lru_cache(256)
def read(text):
    """The unevaluated tree; T, E, I and gamma are letters in it."""
    if re.search(UNREAD, text):
        raise ValueError(text)
    text = re.sub(r"(?<!\\)([EIT])|\\([gG]amma)(?![a-z])", r"\\mathcal{\1\2}", text)
    return Reader(config=ConversionConfig(lowercase_symbols=False)).parse(text.replace("~", " "))


# Compare kinds, then values at random points; math-verify's own comparison hangs.
def same_value(a, g):
    if not isinstance(a, sp.Expr) or g.is_infinite or g.is_Integer and a.is_Rational:
        return a == g
    names, gap = g.free_symbols, sp.Add(a, -g, evaluate=False)
    digits = 60 if names else 2000  # 2^{999} is not 2^{999} - 1
    rounded = 1e-4 if g.has(sp.Float) else 2e-6 if a.has(sp.Float) and not g.is_Integer else 0
    for k in range(8 if names else 1):
        point = {sp.Symbol("i"): sp.I}
        for i, x in enumerate(sorted(names - point.keys(), key=str)):
            random = zlib.crc32(f"{x}{k}".encode())
            point[x] = sp.Rational(random * (-1) ** (k >> i % 3), 2**31)  # all signs
            if (x.name in "kmn" or k == 7) and gap.has(sp.floor, sp.ceiling):
                point[x] = sp.Integer(k if k % 2 else random % 10 ** (k + 1))
        error, x, y = (tree.evalf(15, subs=point, maxn=digits) for tree in (gap, a, g))
        near = abs(error) <= max(rounded, sp.Float(10) ** (30 - digits)) * abs(y)
        if not (near or k and sp.im(x) and sp.im(y)):  # sqrt(a/b) = sqrt(a)/sqrt(b)
            return False
    return a.free_symbols <= names  # 0x is no 0


def parts(tree, sums):
    """Its kind ("set", open ends, a matrix' shape, or "") and items; of x = 5, f(2) = 5 and, with
    sums, m+n = 5, those of 5, but 2x = 10 stays whole."""
    name = tree.lhs if isinstance(tree, sp.Eq) else sp.S.One
    number = name.atoms(sp.Number, sp.NumberSymbol, sp.Pow, sp.Function) or not name.free_symbols
    if not number and (sums or not name.is_Add):
        tree = tree.rhs
    if isinstance(tree, sp.FiniteSet | sp.Union):
        items = list(tree.args if isinstance(tree, sp.Union) else tree._unsorted_args)
        if len(items) > 1 or isinstance(items[0], sp.Set):
            return "set", items
        tree = items[0]
    if isinstance(tree, sp.Interval):
        return (tree.left_open, tree.right_open), [tree.start, tree.end]
    if isinstance(tree, sp.MatrixBase | sp.Tuple):
        wide = getattr(tree, "cols", 1) > 1  # a column is a tuple
        return tree.shape if wide else (True, True), list(tree)
    return "", [tree]


def same(a, g):
    if isinstance(a, sp.Eq) and isinstance(g, sp.Eq):
        return a.lhs == g.lhs and same(a.rhs, g.rhs)
    (a_kind, a_items), (g_kind, g_items) = parts(a, sums=g != 0), parts(g, sums=False)
    names = {y.lhs for y in g_items if isinstance(y, sp.Eq)}
    omitted = len(names) > 1 and names - a.free_symbols  # 1, 2 is not x = 1, y = 2
    if a_kind != g_kind or len(a_items) != len(g_items) or omitted:
        return False
    if g_kind == "set":  # in any order
        found = [sum(same(x, y) for x in a_items) for y in g_items]
        return 0 not in found and found == [sum(same(x, y) for x in g_items) for y in g_items]
    return all(map(same, a_items, g_items)) if g_kind else same_value(a_items[0], g_items[0])


def math_equal(answer, gold):
    """Is the content of a box the gold? Not if it cannot be read."""
    if len(answer) > 500:
        return False
    try:
        a, g = normalise(answer), normalise(gold)
        (a, a_unit), (g, g_unit) = (re.fullmatch(MEASURE, text).groups() for text in (a, g))
        other_unit = g_unit and a_unit.strip("~ ") not in ("", g_unit.strip("~ "))
        if other_unit or "%" in a_unit and not g_unit and not g.isdigit():  # 0.5% is no 0.5
            return False
        if "~" in g or re.fullmatch("[A-Za-z ]{3,}|[Nn]o", g):
            a, g = (re.sub(r"[\s{}()~\"\\]|[.,](?!\d)", "", x).casefold() for x in (a, g))
            return a == g
        return a == g or same(read(a), read(g))
    except Exception:  # noqa: BLE001, the parser raises it, and sympy anything
        return False


def verify_math(response, gold):
    """Scores a response; ValueError for a gold without texts."""
    golds, answer = gold_texts(gold), extract_answer(response)
    if not golds:
        raise ValueError(f"unusable gold: {gold!r:.80}")
    if not answer:
        return Verdict(0.0, "no_answer")
    right = any(math_equal(answer, text) for text in golds)
    return Verdict(float(right), "correct" if right else "wrong")


# ---- 2. The sandbox, bubblewrap: nothing to read but the system and the interpreter, nothing
# to write but an empty /work, no network, no environment, and one kill ends all. Not covered: bugs
# of the kernel, and the memory of 64 processes.

# Bounds for a child, which ends with the thread that started it; macOS has neither.
LIMITS = f"setpriv --pdeathsig KILL prlimit --as={2 << 30} --fsize={32 << 20} --stack={64 << 20}"
LIMITS = LIMITS.split() * (sys.platform == "linux")
SANDBOX = f"""env choom -n 1000 -- bwrap --unshare-ipc --unshare-pid --unshare-net --die-with-parent
--clearenv --proc /proc --dev /dev --remount-ro /dev --size {64 << 20} --perms 0777 --tmpfs /work
--chdir /work --ro-bind-try /usr /usr --ro-bind-try /lib /lib --ro-bind-try /lib64 /lib64"""
DRIVER = """
import json, os, sys
source, function = json.load(open(int(sys.argv[1])))
sys.setrecursionlimit(50_000)
sys.set_int_max_str_digits(0)
scope = {"__name__": "solution" if function else "__main__"}
for name in '''string re datetime collections heapq bisect copy math random statistics itertools
functools operator io sys json builtins typing'''.split():  # as LiveCodeBench does
    exec(f"from {name} import *; import {name}", scope)
scope["quit"] = sys.exit
sys.stdout = sys.stderr if function else sys.stdout  # no result
exec(compile(source, "main.py", "exec"), scope)
if function:
    args = [json.loads(line) for line in sys.stdin if line.strip()]
    solution = scope["Solution"]() if "Solution" in scope else None
    result = (getattr(solution, function, None) or scope[function])(*args)
    os.write(1, json.dumps(result).encode())
"""


@functools.cache
def require_sandbox(unsafe_code):
    """What stands before a command in the sandbox; fails, or warns, without one."""
    if unsafe_code:
        return print("warning: unsafe_code runs programs without a sandbox", file=sys.stderr)
    prefix = sys.base_prefix  # by --dir, or /root would be as closed as outside
    command = [*SANDBOX.split(), "--dir", prefix, "--ro-bind", prefix, prefix, "--remount-ro", "/"]
    if os.geteuid() == 0:  # NPROC would not bind root
        uid = 30_000 + os.getpid() % 30_000
        command += f"setpriv --clear-groups --reuid {uid} --regid {uid}".split()
    command += [*LIMITS, "--nproc=64", "--nofile=64"]
    if run_program(command, "print(6)", "", "", 20)[2] != "6":
        fail("programs need bubblewrap: `apt-get install bubblewrap`, or --unsafe_code")
    return command


def run_program(command, source, function, stdin, seconds):
    """-> why it failed or "", the end of stderr, what it printed or the function returned."""
    job, given, out, err = map(tempfile.TemporaryFile, ["w+b"] * 4, [0] * 4)  # unbuffered
    job.write(json.dumps([source, function]).encode())
    given.write(stdin.encode(errors="replace"))
    job.seek(0), given.seek(0)
    os.fchmod(given.fileno(), 0o666)  # it may open /dev/stdin, as another user
    python = [os.path.realpath(sys.executable), "-I", "-S", "-X", "utf8", "-c", DRIVER]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        process = subprocess.Popen(
            [*command, *python, str(job.fileno())], stdin=given, stdout=out, stderr=err, cwd=directory,
            pass_fds=[job.fileno()], start_new_session=True, env={"PATH": os.environ["PATH"]},
        )  # fmt: skip
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        status = process.wait()  # a timeout would poll
        timer.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
    text = lambda file: os.pread(file.fileno(), 32 << 20, 0).decode(errors="replace").strip()
    reason = "timeout" if status == -9 else "runtime_error" if status else ""
    reason = reason if job.tell() else "sandbox_error"  # the driver never read its job
    return reason, text(err).rpartition("\n")[2][:200], text(out)


# ---- 3. What is a right program: LiveCodeBench's rules, but results are strict JSON.


def extract_code(response):
    """The last fenced block after the reasoning; "" if there is none or one never closes."""
    tail = re.sub("```[^`\n]+```", "", response.rpartition("</think>")[2])  # no inline code
    parts = re.split(r"(?m)^[ \t]*`{3,}[^`\n]*$|`{3,}\w*\s*?$", tail)  # prose, code, prose ...
    closed = len(parts) > 2 and len(parts) % 2 and "<think>" not in tail
    return textwrap.dedent(parts[-2]) if closed else ""


def strict_json(text):
    """Its canonical text: 2.0 is 2, True is not 1, and NaN is a ValueError."""
    whole = lambda digits: int(x) if (x := float(digits)).is_integer() else x
    return json.dumps(json.loads(text, parse_float=whole, parse_constant=int), sort_keys=True)


def parse_tests(tests, func_name=None):
    """LiveCodeBench's as [(function or "", stdin, expected)]; ValueError for unusable ones."""
    try:
        kinds = {"stdin": "", "functional": func_name}
        jobs = [(kinds[test["testtype"]], test["input"], test["output"]) for test in tests]
        for job in jobs or [()]:
            function, stdin, want = map("".__add__, job)  # TypeError but for texts
            lines = [*filter(str.strip, stdin.split("\n")), want]
            [strict_json(line) for line in lines if function]
    except Exception as error:  # noqa: BLE001
        raise ValueError(f"these tests (or func_name) cannot be used: {error!r}") from None
    return jobs


def same_lines(got, want):
    """Equal lines after stripping, or lines of equal decimals; ValueError for more or fewer."""
    lines = (map(str.strip, text.strip().split("\n")) for text in (got, want))
    number = lambda line: [*map(Decimal, line.split())]
    return all(a == b or number(a) == number(b) for a, b in zip(*lines, strict=True))


def verify_code(response, tests, func_name=None, timeout=6.0, unsafe=False):
    """Runs the program on each test, in a fresh process, until one fails."""
    jobs, code = parse_tests(tests, func_name), extract_code(response)
    if not code.strip():
        return Verdict(0.0, "no_answer")
    command = ["env", "-i", *LIMITS] if unsafe else require_sandbox(False)
    for number, (function, stdin, want) in enumerate(jobs, 1):
        reason, error, printed = run_program(command, code, function, stdin, timeout)
        right, text = False, strict_json if function else str
        with contextlib.suppress(Exception):  # what it printed may be anything
            right = same_lines(text(printed), text(want))
        if reason or not right:
            return Verdict(0.0, reason or "wrong", f"test {number} of {len(jobs)}: {error}")
    return Verdict(1.0, "correct")


def verify(response, problem, *code_options):
    """Scores a response to {"answer": ...} or {"tests": ..., "func_name": ...}."""
    if "tests" in problem:
        return verify_code(response, problem["tests"], problem.get("func_name"), *code_options)
    return verify_math(response, problem.get("answer"))


# ---- 4. Workers. A parser can hang where no exception reaches it, so every answer has a
# deadline that ends in a kill. No worker is a fork: the caller may hold CUDA and threads.


def serve():
    replies, sys.stdout = sys.stdout, sys.stderr  # what libraries print is none
    print(verify_math(r"\boxed{\frac{2}{4}}", "0.5").reason, file=replies, flush=True)  # ready
    for line in sys.stdin:
        print(json.dumps(vars(verify(*json.loads(line)))), file=replies, flush=True)


class Verifier(ThreadPoolExecutor):
    """With a context. Its seconds are for a math answer and for each test of a program."""

    def __init__(self, num_workers=None, timeout=2.0, code_timeout=6.0, unsafe_code=False):
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's share the machine
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
        super().__init__(num_workers or max(1, cores // ranks))
        self.timeout, self.code_options = timeout, (code_timeout, unsafe_code)
        self.workers = {}  # of each thread

    def __exit__(self, *_):
        for worker in list(self.workers.values()):
            worker.kill()
            worker.wait()
        self.shutdown()

    def score(self, responses, problems, progress=False):
        """Verdicts in order; ValueError for a problem that cannot be scored."""
        for _, problem in zip(responses, problems, strict=True):
            verify("", problem)
        if any("tests" in problem for problem in problems):
            require_sandbox(self.code_options[1])
        verdicts = self.map(self._score, responses, problems)
        return list(tqdm(verdicts, "scoring", len(responses), disable=not progress))

    def _score(self, response, problem):
        worker = self.workers.get(threading.get_ident())
        if not worker or worker.poll() is not None:
            worker = self.workers[threading.get_ident()] = subprocess.Popen(
                [*LIMITS, sys.executable, __file__, "--worker"], text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0,  # Ctrl-C is not its
            )  # fmt: skip
            if not worker.stdout.readline():
                raise RuntimeError("the worker of verify.py does not start")
        seconds = self.timeout + (self.code_options[0] + 2) * len(problem.get("tests", ()))
        timer = threading.Timer(seconds, worker.kill)
        timer.start()
        try:
            own = {k: problem[k] for k in problem if k in ("answer", "tests", "func_name")}
            print(json.dumps([response, own, *self.code_options]), file=worker.stdin, flush=True)
            return Verdict(**json.loads(worker.stdout.readline()))
        except (OSError, ValueError):  # killed, or crashed by the answer
            worker.wait()  # or the next would meet it dying
            return Verdict(0.0, "timeout")
        finally:
            timer.cancel()


# ---- 5. The command line.


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--unsafe_code", action="store_true", help="run programs unprotected")
    options, rows, number = parser.parse_args(), [], 0
    try:
        for number, line in enumerate(options.file.read_text().rstrip().split("\n"), 1):
            rows.append(json.loads(line))
            verify("", rows[-1])
            if not isinstance(rows[-1].get("response"), str):
                raise TypeError('no text as "response"')
    except Exception as error:  # noqa: BLE001
        fail(f"{options.file}, line {number}: {error}")
    with Verifier(unsafe_code=options.unsafe_code) as verifier:
        verdicts = verifier.score([row["response"] for row in rows], rows, progress=True)
    output = options.file.with_suffix(".scored.jsonl")
    output.write_text("".join(json.dumps(row | vars(v)) + "\n" for row, v in zip(rows, verdicts)))
    counts = Counter(verdict.reason for verdict in verdicts)
    for reason, count in counts.most_common():
        print(f"{reason:15} {count:8,} {count / len(rows):8.1%}")
    print(f"accuracy {counts['correct'] / len(rows):.4f} of {len(rows):,}; wrote {output}")


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["--worker"] else main()
