"""The only teacher the policy has: scores math answers and programs, right or wrong.

python verify.py FILE.jsonl        rows of {"response", "answer"} or {"response", "tests"}
"""

import argparse
import contextlib
import functools
import json
import os
import re
import signal
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
from latex2sympy2_extended import latex2sympy2
from tqdm import tqdm


@dataclass(frozen=True)
class Verdict:
    reward: float  # 1.0 or 0.0
    reason: str  # correct, wrong, no_answer, unparseable, timeout, runtime_error, output_limit,
    detail: str = ""  # memory_limit; sandbox_error where the scorer failed, not the answer


def fail(message):
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    raise SystemExit(2)


# ----------------------------------------------------------------------------------------
# 1. What is a right answer. A wrong answer accepted is learnt and exploited, a right one refused
#    costs a little signal: where reading is in doubt, the answer is no.

BALANCED = r"(?:[^{}\\]|\\.)*+"
for _ in range(8):  # deeper braces are nobody's answer
    BALANCED = rf"(?:[^{{}}\\]|\\.|\{{{BALANCED}\}})*+"


def extract_answer(response: str) -> str | None:
    """The last balanced \\boxed{...} after the reasoning; None if it is one of many guesses."""
    tail = response.rpartition("</think>")[2]
    boxes = re.findall(rf"(?s)\\boxed\s*\{{({BALANCED})\}}", tail)
    return boxes[-1].strip() if len(set(boxes)) in (1, 2, 3) and "<think>" not in tail else None


def gold_texts(gold) -> list[str]:
    """The texts of which any is right; [] where the gold is unusable (NaN, nested, an essay)."""
    texts = []
    for item in gold if isinstance(gold, list) else [gold]:
        if type(item) in (int, float) and abs(item) < 1e300:
            item = str(int(item) if item == int(item) else item)  # 123456.0 is an integer
        usable = isinstance(item, str) and len(item) <= 300 and len(item.split()) <= 20
        if not usable or normalise(item).strip("+-{} ").lower() in ("", "nan", "inf"):
            return []
        texts.append(item)
    return texts


# Respell: one thing is written one way. A ~ comes before what was set as words.
SYMBOLS = r"−- –- ×\cdot ·\cdot ≤\le ≥\ge ≠\ne ∞\infty ∪\cup ∈\in ±\pm π\pi √\sqrt °^\circ ²^2 ³^3 ½\frac12"
SYMBOLS = {symbol[0]: symbol[1:] + " " for symbol in SYMBOLS.split()}
SYMBOLS |= {chr(wide): chr(wide - 0xFEE0) for wide in range(0xFF01, 0xFF5F)}
BRACES = latex2sympy2.NormalizationConfig(False, False, True, boxed="none")  # \frac12, \sqrt3
BARE = r"(?<![\\A-Za-z])"
SPELLING = r"""(?<=\d)(?:,\\!|,|\\[,;: ]|[ ~])(?=\d{3}(?!\d)(?![^(\[]*(?:[)\]]|\\\}))) -> # 12,345; not (12,345)
\^ ?(?:\\circ|\{ ?\\circ ?\})|\\(?:left|right)\b ?\.?|\\(?:displaystyle|boxed|q?quad)\b -> ␣
(?<!\\)\\[$,;:!> ()]|[$~] -> ␣
\\(?:text|math(?:rm|bf|it|sf)|mbox|operatorname|boldsymbol)[a-z]* ?(?:\{ *([^{}]*)\})? -> ~\1␣
^[ :=*]+|(?:[ ,;:*]|(?<!\.)\.)+$|~(?!\(?[A-Za-z])|\\(?=%)|^\\forall[^,]*, ->
^[~(]*([A-J])[).:]+(?! *[,^_]|.*BARE(?:[A-Ja-j]\b|[A-Za-z]{2})).* -> \1 # (C) 12
,?[~ ]*BARE(?:and|or)\b -> ,␣
\\(?:approx|equiv)(?![a-z]) -> =
 ?\\([gln]e)(?:q|qslant)?(?![a-z]) ? -> \\\1␣
(?<![\w.\\])(\d+\.?\d*)[eE]([+-]?\d+)(?![\w.]) -> \1\\cdot␣10^{\2} # 4.5e33
(?<![\w/.])(\d+) (\d+)/(\d+)(?![\w.]) -> \1\\frac{\2}{\3}
(?<![\w.}^])(\d+) ?(\\frac\{\d+\}\{\d+\}) -> (\1+\2) # 5\frac{1}{2}
BARE(pi|sin|cos|tan|log|ln)(?![A-Za-z])|\\*(sqrt) -> \\\1\2
' -> ^{\\prime} # else dropped
([_^]) ?(\d+|[A-Za-z]) -> \1{\2}
 ?\(= \d+\.\d+\)$ ->
[~ ]*\(base (\d+)\)$|_\{\((\d+)\)\}$ -> _{\1\2}
^[(\[]([^()\[\]]+,[^()\[\]]+)[)\]]\^\{(?:T|\\top ?)\}$ -> (\1) # (1,2)^T
(?<![\w,]) +|(?<=\w) ++(?![\w~])|(?<=,) ++(?!\d) ->
^(?!.*REL.*REL)(.*BARE([a-z])(?![a-z])[^=]*?)[, (~]+(?:for )?\2 ?REL[^=,a-z]*(?:mathbb\{[A-Z]\})?\)?$ -> \1"""
SPELLING = SPELLING.replace("BARE", BARE).replace("REL", r"(?:[<>]|\\(?:[gl]e|in)\b)").splitlines()
SPELLING = [line.partition(" #")[0].split(" ->") for line in SPELLING]


def normalise(text: str) -> str:
    text = " ".join("".join(SYMBOLS.get(c, c) for c in text).split()).replace("{,}", ",")
    text = latex2sympy2.normalize_latex(re.sub(r"\\[dtc]frac", r"\\frac", text), BRACES)
    for pattern, new in SPELLING:
        text = re.sub(pattern, new.strip().replace("␣", " "), text)
    return text


# What may follow a number; other words change it, as thirds and scores do.
UNIT = "%|[ckmn]m|kg|ft|in|(?:square|unit|degree|dollar|(?:per)?cent|meter|hour|minute|day|way)s?"
UNIT = rf"(?:~[mgshLJNWVAK]|[~ ]*(?:{UNIT}))(?![A-Za-z])(?:/[smh]\b)?(?:\^\{{-?\d\}})?"
MEASURE = rf"(?=.*\d)((?:\\[a-z]+|[^A-Za-z~])*?) ?((?:{UNIT} ?)*)"

# Read: math-verify's parser does the work; what it would misread is refused.
UNREAD = r"~(?!\w\b)|:|\) ?\{?\d|[\d)] ?_|\d\} ?_|\d[ {]+\d|(?<![a-z\]_])\{\d+\} ?[\d{]"
UNREAD += r"|\^\{\(\w\)|\^\{[^{}]*\}\^|\^\{[^{}]*\^\{[^{}]*\^|\\(?:sum|prod|int|lim|gcd|phantom|top)(?![a-z])"
UNREAD += rf"|/\d+ ?[A-Za-z(]|\b(?i:not?)\b|{BARE}(?<!n\{{)(?<!d\{{)[A-Za-z][a-z]{{2}}"
CASE = latex2sympy2.ConversionConfig(lowercase_symbols=False)


class Reader(latex2sympy2._Latex2Sympy):
    """The parser; but 2.0 is an integer, f(2) a name, f^{-1}(x) no power and 2(3) not 2 + 3."""

    def parse_number(self, text):
        number = sp.Rational(text)
        return number if number.is_Integer else sp.Float(text, 60)

    def convert_func(self, func):
        tree = super().convert_func(func)
        return sp.Symbol(func.getText()) if tree.atoms(sp.core.function.AppliedUndef) else tree

    def convert_postfix_list(self, postfixes, i=0):
        return functools.reduce(self.mul_flat, map(self.convert_postfix, postfixes))


@functools.lru_cache(256)
def read(text: str):
    """The unevaluated tree. T, E, I and gamma are letters, not a transpose, exponent or constant."""
    if re.search(UNREAD, text):
        raise ValueError(text)
    text = re.sub(r"(?<!\\)([EIT])|\\([gG]amma)(?![a-z])", r"\\mathcal{\1\2}", text)
    return Reader(config=CASE).parse(text.replace("~", " "))


# Compare kinds, then values at random points. (math-verify's own comparison hangs.)
def same_value(a, g) -> bool:
    if not isinstance(g, sp.Expr) or g.is_infinite or g.is_Integer and a.is_Rational:
        return a == g
    names, gap = g.free_symbols, sp.Add(a, -g, evaluate=False)
    digits = 60 if names else 2000  # 2^{999} is not 2^{999} - 1
    rounded = 1e-4 if g.has(sp.Float) else 2e-6 if a.has(sp.Float) and not g.is_Integer else 0
    for k in range(8 if names else 1):
        point = {sp.Symbol("i"): sp.I}
        for i, x in enumerate(sorted(names - point.keys(), key=str)):
            random = zlib.crc32(f"{x}{k}".encode())
            point[x] = sp.Rational(random * (-1) ** (k >> i % 3), 2**31)  # every mixture of signs
            if (x.name in "kmn" or k == 7) and gap.has(sp.floor, sp.ceiling):
                point[x] = sp.Integer(k if k % 2 else random % 10 ** (k + 1))
        error, x, y = (tree.evalf(15, subs=point, maxn=digits) for tree in (gap, a, g))
        if k and sp.im(x) and sp.im(y):
            continue  # sqrt(a/b) = sqrt(a)/sqrt(b)
        if not abs(error) <= max(rounded, sp.Float(10) ** (30 - digits)) * abs(y):
            return False
    return a.free_symbols <= names  # 0x is no 0


def named(tree, sums: bool):
    """5 of x = 5, f(2) = 5 and, with sums, m+n = 5; but 2x = 10 and 6 = 5 stay whole."""
    name = tree.lhs if isinstance(tree, sp.Eq) else sp.S.One
    number = name.atoms(sp.Number, sp.NumberSymbol, sp.Pow, sp.Function) or not name.free_symbols
    return tree if number or name.is_Add and not sums else tree.rhs


def parts(tree):
    """Its kind ("set", which ends are open, a matrix' shape, or ""), its items."""
    if isinstance(tree, sp.FiniteSet | sp.Union):
        items = list(tree.args if isinstance(tree, sp.Union) else tree._unsorted_args)
        if len(items) > 1 or isinstance(items[0], sp.Set):
            return "set", items
        tree = items[0]
    if isinstance(tree, sp.Interval):
        return (tree.left_open, tree.right_open), [tree.start, tree.end]
    if isinstance(tree, sp.MatrixBase) and tree.cols > 1:
        return tree.shape, list(tree)
    vector = isinstance(tree, sp.MatrixBase | sp.Tuple)
    return ((True, True), list(tree)) if vector else (isinstance(tree, sp.Expr) and "", [tree])


def same(a, g) -> bool:
    if isinstance(a, sp.Eq) and isinstance(g, sp.Eq):
        return a.lhs == g.lhs and same(a.rhs, g.rhs)
    a, g = named(a, g != 0), named(g, False)
    if isinstance(g, sp.Rel | sp.And):  # 0 < x < 1 is (0,1), not the other way round
        return isinstance(a, sp.Set) and same(a, g.as_set())
    (a_kind, a_items), (g_kind, g_items) = parts(a), parts(g)
    if a_kind != g_kind or len(a_items) != len(g_items):
        return False
    if g_kind == "set":  # in any order
        found = [sum(same(x, y) for x in a_items) for y in g_items]
        return 0 not in found and found == [sum(same(x, y) for x in g_items) for y in g_items]
    return all(map(same, a_items, g_items)) if g_kind else same_value(a_items[0], g_items[0])


def math_equal(answer: str, gold: str) -> bool | None:
    """Is the answer (a box's content) the gold? None if it cannot be read."""
    if len(answer) > 500:
        return None
    try:
        a, g = normalise(answer), normalise(gold)
        if measure := re.fullmatch(MEASURE, g):
            g, unit = measure.groups()
            said = re.fullmatch(MEASURE, a) or ["", a, ""]
            if unit and said[2] and unit.strip("~ ") != said[2].strip("~ "):
                return False
            if "%" not in said[2] or unit or g.isdigit():  # 0.5% is no 0.5
                a = said[1]
        if "~" in g or re.fullmatch("[A-Za-z ]{3,}|(?i:yes|no)", g):
            a, g = (re.sub(r"[\s{}()~\"\\]|[.,](?!\d)", "", x).casefold() for x in (a, g))
            return a == g
        return a == g or same(read(a), read(g))
    except Exception:  # noqa: BLE001, the parser raises it, and sympy anything
        return None


def verify_math(response: str, gold) -> Verdict:
    """Score a response; gold as in gold_texts, ValueError where that is empty."""
    golds, answer = gold_texts(gold), extract_answer(response)
    if not golds:
        raise ValueError(f"unusable gold: {gold!r:.80}")
    if not answer:
        return Verdict(0.0, "no_answer")
    equal = [math_equal(answer, text) for text in golds]
    reason = "correct" if True in equal else "wrong" if False in equal else "unparseable"
    return Verdict(float(reason == "correct"), reason)


# ----------------------------------------------------------------------------------------
# 2. Workers. A parser can hang where no exception reaches it, so every answer has a deadline that
#    ends in a kill. A worker is a fresh interpreter running this file, not a fork, as the caller
#    may hold CUDA and threads. Calls and verdicts are JSON lines over its pipes.

# Bounds what is started, and ends it with the thread that did; macOS has neither.
LIMITS = f"setpriv --pdeathsig KILL prlimit --as={2 << 30} --fsize={32 << 20} --stack={64 << 20}"
LIMITS = LIMITS.split() * (sys.platform == "linux")


def serve():
    replies, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no verdict
    print(verify_math(r"\boxed{\frac{2}{4}}", "0.5").reason, file=replies, flush=True)  # ready
    for line in sys.stdin:
        function, *args = json.loads(line)
        print(json.dumps(vars(globals()[function](*args))), file=replies, flush=True)


def check_problem(problem):
    """The tests of a program, None for mathematics; ValueError where it cannot be scored."""
    if "tests" in problem:
        return parse_tests(problem["tests"], problem.get("func_name"))
    if not gold_texts(problem.get("answer")):
        raise ValueError(f"unusable gold: {problem.get('answer')!r:.80}")


class Verifier(ThreadPoolExecutor):
    """`with Verifier() as verifier: ...`; seconds for a math answer, for a test of a program."""

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
        """Verdicts in order. A problem is {"answer": gold} or {"tests": ..., "func_name": ...}."""
        tests = [check_problem(problem) for problem in problems]
        if any(tests):
            require_sandbox(self.code_options[1])
        verdicts = self.map(self._score, zip(responses, problems, strict=True))
        return list(tqdm(verdicts, "scoring", len(responses), disable=not progress))

    def _score(self, pair):
        (response, problem), thread = pair, threading.get_ident()
        worker = self.workers.get(thread)
        if not worker or worker.poll() is not None:
            worker = self.workers[thread] = subprocess.Popen(
                [*LIMITS, sys.executable, os.path.abspath(__file__), "--worker"], text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0,  # Ctrl-C is not its
            )  # fmt: skip
            if not worker.stdout.readline():
                raise RuntimeError("verify.py's worker does not start; its error stands above")
        seconds, call = self.timeout, ["verify_math", response, problem.get("answer")]
        if tests := problem.get("tests"):
            seconds = 10 + (self.code_options[0] + 1) * len(tests)
            call = "verify_code", response, tests, problem.get("func_name"), *self.code_options
        timer = threading.Timer(seconds, worker.kill)
        timer.start()
        try:
            print(json.dumps(call), file=worker.stdin, flush=True)
            return Verdict(**json.loads(worker.stdout.readline()))
        except (BrokenPipeError, json.JSONDecodeError):  # killed, or crashed by the answer
            worker.wait()  # or the next one would meet it dying
            return Verdict(0.0, "timeout", f"after {seconds:g} s at most")
        finally:
            timer.cancel()


# ----------------------------------------------------------------------------------------
# 3. The sandbox, bubblewrap: no network, no environment, nothing to read but the system and the
#    interpreter, nothing to write but an empty /work, and one kill ends all. What is expected of
#    a program never enters. Not covered: bugs of the kernel, and the memory that 64 processes
#    take together (but the OOM killer takes them first).

SANDBOX = f"""env choom -n 1000 -- bwrap --unshare-ipc --unshare-pid --unshare-net --unshare-uts
--unshare-cgroup-try --die-with-parent --clearenv --proc /proc --dev /dev
--remount-ro /dev --size {64 << 20} --perms 0777 --tmpfs /work --chdir /work
--ro-bind-try /usr /usr --ro-bind-try /lib /lib --ro-bind-try /lib64 /lib64"""
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
sys.stdout = sys.stderr if function else sys.stdout  # what it prints is no result
exec(compile(source, "main.py", "exec"), scope)
if function:
    args = [json.loads(line) for line in sys.stdin if line.strip()]
    solution = scope["Solution"]() if "Solution" in scope else None
    result = (getattr(solution, function, None) or scope[function])(*args)
    os.write(1, json.dumps(result).encode())
"""


@functools.cache
def require_sandbox(unsafe_code):
    """The words before a command that run it in the sandbox; fails, or warns, without one."""
    if unsafe_code:
        return print("warning: unsafe_code runs programs without a sandbox", file=sys.stderr)
    command, prefix = SANDBOX.split(), Path(sys.base_prefix)
    for path in prefix.parents[-2::-1]:
        command += ["--dir", path]  # else /root would be as closed as outside
    command += ["--ro-bind", prefix, prefix, "--remount-ro", "/"]
    if os.geteuid() == 0:  # NPROC would not bind root
        uid = 30_000 + os.getpid() % 30_000
        drop = "--cap-drop ALL --cap-add CAP_SETUID --cap-add CAP_SETGID setpriv --clear-groups"
        command += f"{drop} --reuid {uid} --regid {uid}".split()
    command += [*LIMITS, "--nproc=64", "--nofile=64"]
    if run_program(command, "print(6)", "", "", 20)[2] != "6":
        fail("programs need bubblewrap to work: `apt-get install bubblewrap`, or --unsafe_code")
    return command


def run_program(command, source, function, stdin, seconds):
    """-> (why it failed or "", the end of stderr, what it printed or the function returned)."""
    job, given, out, err = map(tempfile.TemporaryFile, ["w+b"] * 4, [0] * 4)  # unbuffered
    job.write(json.dumps([source, function]).encode())
    given.write(stdin.encode(errors="replace"))
    job.seek(0), given.seek(0)
    os.fchmod(given.fileno(), 0o666)  # it may open /dev/stdin, as another user
    python = [os.path.realpath(sys.executable), "-I", "-S", "-B", "-X", "utf8", "-c", DRIVER]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        process = subprocess.Popen(
            [*command, *python, str(job.fileno())], stdin=given, stdout=out, stderr=err,
            pass_fds=[job.fileno()], start_new_session=True, cwd=directory,
            env={"PATH": os.environ["PATH"]},
        )  # fmt: skip
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        status = process.wait()  # with a timeout it would poll
        timer.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    printed, error = (os.pread(file.fileno(), 32 << 20, 0) for file in (out, err))
    full = 32 << 20 in (len(printed), len(error))
    printed, error = (text.decode(errors="replace").strip() for text in (printed, error))
    error = error.rpartition("\n")[2][:200]
    if not job.tell():  # the driver never read it: their offset is one
        return "sandbox_error", error, ""
    if full or status == -9:
        return "output_limit" if full else "timeout", error, ""
    if status == 137 or status and error.startswith("MemoryError"):
        return "memory_limit", error, ""
    return "runtime_error" if status else "", error, printed


# ----------------------------------------------------------------------------------------
# 4. What is a right program: LiveCodeBench's rules, but results are compared as strict JSON.


def strict_json(text):
    """No NaN, and 2.0 is 2; ValueError."""
    whole = lambda digits: int(x) if (x := float(digits)).is_integer() else x
    return json.loads(text, parse_float=whole, parse_constant=int)


def extract_code(response):
    """The last fenced block after the reasoning; None if there is none or one never closes."""
    tail = re.sub("```[^`\n]+```", "", response.rpartition("</think>")[2])  # no inline code
    parts = re.split(r"(?m)^[ \t]*`{3,}[^`\n]*$|`{3,}\w*\s*?$", tail)  # prose, code, prose ...
    closed = len(parts) > 2 and len(parts) % 2 and "<think>" not in tail
    return textwrap.dedent(parts[-2]) if closed else None


def parse_tests(tests, func_name=None):
    """LiveCodeBench's as [(function or "", stdin, expected)]; ValueError for unusable ones."""
    try:
        kinds = {"stdin": "", "functional": func_name}
        jobs = [(kinds[test["testtype"]], test["input"], test["output"]) for test in tests]
        for function, stdin, want in jobs or [()]:
            if function is None or not isinstance(stdin + want, str):
                raise ValueError("texts as input and output, and a func_name, are needed")
            lines = [*filter(str.strip, stdin.split("\n")), want] if function else []
            [strict_json(line) for line in lines]
    except Exception as error:  # noqa: BLE001
        raise ValueError(f"these tests cannot be used: {error!r}") from None
    return jobs


def same_lines(got, want):
    """Equal lines after stripping, or lines of equal decimals."""
    got, want = ([*map(str.strip, text.strip().split("\n"))] for text in (got, want))
    return len(got) == len(want) and all(
        a == b or [*map(Decimal, a.split())] == [*map(Decimal, b.split())]
        for a, b in zip(got, want)
    )


def same_json(got, want):
    """Equal results: 2.0 is 2, but True is not 1."""
    got, want = (json.dumps(strict_json(text), sort_keys=True) for text in (got, want))
    return got == want


def verify_code(response, tests, func_name=None, timeout=6.0, unsafe=False):
    """Runs the program on each test, in a fresh process, until one fails or takes longer."""
    jobs, code = parse_tests(tests, func_name), extract_code(response)
    if not code or not code.strip():
        return Verdict(0.0, "no_answer")
    command = ["env", "-i", *LIMITS] if unsafe else require_sandbox(False)
    for number, (function, stdin, want) in enumerate(jobs, 1):
        reason, error, printed = run_program(command, code, function, stdin, timeout)
        right = False
        with contextlib.suppress(ValueError, ArithmeticError, RecursionError, MemoryError):
            right = (same_json if function else same_lines)(printed, want)
        if reason or not right:
            return Verdict(0.0, reason or "wrong", f"test {number} of {len(jobs)}: {error}")
    return Verdict(1.0, "correct")


# ----------------------------------------------------------------------------------------
# 5. The command line.


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--unsafe_code", action="store_true", help="run programs unprotected")
    options, rows, number = parser.parse_args(), [], 0
    try:
        for number, line in enumerate(options.file.read_text().rstrip().split("\n"), 1):
            rows.append(json.loads(line))
            check_problem(rows[-1])
            if not isinstance(rows[-1].get("response"), str):
                raise TypeError('it has no text as "response"')
    except (OSError, ValueError, AttributeError, TypeError) as error:
        fail(f"{options.file}, line {number}: {error}")
    with Verifier(unsafe_code=options.unsafe_code) as verifier:
        verdicts = verifier.score([row["response"] for row in rows], rows, progress=True)
    output = options.file.with_suffix(".scored.jsonl")
    scored = [json.dumps(row | vars(verdict)) + "\n" for row, verdict in zip(rows, verdicts)]
    output.write_text("".join(scored))
    for reason, count in Counter(verdict.reason for verdict in verdicts).most_common():
        print(f"{reason:15} {count:8,} {count / len(rows):8.1%}")
    accuracy = sum(verdict.reward for verdict in verdicts) / len(rows)
    print(f"accuracy {accuracy:.4f} of {len(rows):,}; wrote {output}")


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["--worker"] else main()
