"""Speed of verify.py: python tests/bench_verify.py

Ratios and CPU time tell; the seconds depend on what else the machine does. Math answers come from
../shared/data, beside the checkout; without it only the attacks and the sandbox are measured.
"""

import json
import logging
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import math_verify

from verify import Verifier, require_sandbox, run_program, verify_math

DATA = ROOT.parent / "shared/data"
ATTACKS = [
    "9^{9^9}", "9^{9^{9^9}}", "(10^{10})!", "10^{10^{10}}", r"\sum_{n=1}^{10^9}\frac{1}{n^2}",
    r"\prod_{n=1}^{10^7} n", "2^{2^{40}}", r"\int_0^\infty e^{-x^3}\sin(x^5)dx",
    "(" * 300 + "5" + ")" * 300, r"\frac{1}{" * 60 + "2" + "}" * 60, "5" * 4000,
]  # fmt: skip


def timed(function, *args):
    begin = time.perf_counter()
    result = function(*args)
    return time.perf_counter() - begin, result


def ordinary_answers(count):
    """Golds of the benchmarks, boxed and respelled, half of them the answer to another problem."""
    golds, rng = [], random.Random(0)
    for name in ("math500", "olympiadbench", "minerva_math", "gsm8k_train"):
        for line in (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            answer = json.loads(line)["answer"]
            golds.append(answer if isinstance(answer, str) else answer[0])
    golds = rng.sample(golds, count)
    answers = golds[: count // 2] + rng.sample(golds[count // 2 :], count - count // 2)
    spelled = [a.replace("$", "").replace(r"\frac", r"\dfrac").replace("+", " + ") for a in answers]
    return [rf"Let me see. The answer is \[ \boxed{{ {answer} }} \]" for answer in spelled], golds


def bare(response, gold):
    parsed = math_verify.parse(f"${gold.replace('$', '')}$", parsing_timeout=None)
    answer = math_verify.parse(response, parsing_timeout=None)
    return math_verify.verify(parsed, answer, timeout_seconds=None)


def bench_math(count=2000):
    responses, golds = ordinary_answers(count)
    problems = [{"answer": gold} for gold in golds]
    for name, function in ("math_verify, bare", bare), ("verify_math", verify_math):
        list(map(function, responses[:200], golds[:200]))  # imports, and the parser's tables
        seconds, _ = timed(lambda f=function: list(map(f, responses, golds)))
        print(f"{name:20} {count / seconds:7.0f} answers/s in one process")
    attacks = [(rf"\boxed{{{ATTACKS[i % len(ATTACKS)]}}}", {"answer": "5"}) for i in range(100)]
    mixed = random.Random(0).sample(list(zip(responses, problems)) + attacks, count + 100)
    for workers in (1, 2):
        with Verifier(workers) as verifier:
            start, _ = timed(verifier.score, responses[:2], problems[:2])
            verifier.score(responses, problems)
            seconds, _ = timed(verifier.score, responses, problems)
            attacked, _ = timed(verifier.score, *zip(*mixed))
        print(f"Verifier, {workers} worker(s) {count / seconds:7.0f} answers/s, start {start:.1f} s; "
              f"100 time attacks among them: {attacked - seconds:+.1f} s")  # fmt: skip


def bench_sandbox(rounds=40):
    """A program against a bare interpreter; they take turns, so that load slows both alike."""
    command = [sys.executable, "-I", "-c", "pass"]
    sandbox, found = require_sandbox(False), {"bare": [], "sandbox": []}
    for _ in range(rounds):
        found["bare"].append(timed(subprocess.run, command)[0])
        found["sandbox"].append(timed(run_program, sandbox, "print(7)", "", "", 6.0)[0])
    ms = {name: 1000 * statistics.median(seconds) for name, seconds in found.items()}
    print(f"a program {ms['sandbox']:.1f} ms, a bare interpreter {ms['bare']:.1f} ms: ratio "
          f"{ms['sandbox'] / ms['bare']:.2f}, {ms['sandbox'] - ms['bare']:.1f} ms more (limit 60)")  # fmt: skip


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # math_verify says that its timeouts are off
    if DATA.exists():
        bench_math()
    bench_sandbox()
