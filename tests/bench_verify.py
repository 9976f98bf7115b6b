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

import verify
from verify import Verifier, verify_code, verify_math

DATA = ROOT.parent / "shared/data"
ATTACKS = [
    "9^{9^9}", "9^{9^{9^9}}", "(10^{10})!", "10^{10^{10}}", r"\sum_{n=1}^{10^9}\frac{1}{n^2}",
    r"\prod_{n=1}^{10^7} n", "2^{2^{40}}", r"\int_0^\infty e^{-x^3}\sin(x^5)dx",
    "(" * 300 + "5" + ")" * 300, r"\frac{1}{" * 60 + "2" + "}" * 60, "5" * 4000,
]  # fmt: skip


def ordinary_answers(count: int) -> tuple[list[str], list[str]]:
    """Golds of the benchmarks, boxed and respelled, half of them the answer to another problem."""
    golds = []
    for name in ("math500", "olympiadbench", "minerva_math", "gsm8k_train"):
        for line in (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            answer = json.loads(line)["answer"]
            golds.append(answer if isinstance(answer, str) else answer[0])
    rng = random.Random(0)
    golds = rng.sample(golds, count)
    answers = golds[: count // 2] + rng.sample(golds[count // 2 :], count - count // 2)
    spelled = [a.replace("$", "").replace(r"\frac", r"\dfrac").replace("+", " + ") for a in answers]
    return [rf"Let me see. The answer is \[ \boxed{{ {answer} }} \]" for answer in spelled], golds


def timed(function, *args) -> tuple[float, object]:
    begin = time.perf_counter()
    result = function(*args)
    return time.perf_counter() - begin, result


def bench_math(count: int = 2000) -> None:
    responses, golds = ordinary_answers(count)

    def bare_loop():
        def verdict(response, gold):
            parsed = math_verify.parse(f"${gold.replace('$', '')}$", parsing_timeout=None)
            answer = math_verify.parse(response, parsing_timeout=None)
            return math_verify.verify(parsed, answer, timeout_seconds=None)

        return [verdict(*pair) for pair in zip(responses, golds)]

    def our_loop():
        return [verify_math(*pair) for pair in zip(responses, golds)]

    bare_loop(), our_loop()  # imports, and the parser's tables
    bare, theirs = timed(bare_loop)
    verify.normalise.cache_clear(), verify._tree.cache_clear()
    ours, verdicts = timed(our_loop)
    agree = sum(a == bool(b.reward) for a, b in zip(theirs, verdicts))
    print(f"{count} ordinary answers, one process:")
    print(f"  bare loop over math_verify {count / bare:7.0f} answers/s")
    print(f"  verify_math                {count / ours:7.0f} answers/s, {bare / ours:.1f} x, "
          f"agrees on {agree}")  # fmt: skip
    for workers in (1, 2):
        with Verifier(workers) as verifier:
            start, _ = timed(verifier.score, responses[:2], golds[:2])
            first, _ = timed(verifier.score, responses, golds)  # fills the parser's tables
            later, _ = timed(verifier.score, responses, golds)
            print(f"  Verifier, {workers} worker(s)      {count / first:7.0f} answers/s at first, "
                  f"{count / later:.0f} later: {bare / first:.1f} x, {bare / later:.1f} x; "
                  f"start {start:.1f} s")  # fmt: skip
    mixed = list(zip(responses, golds))
    attacks = [(rf"\boxed{{{ATTACKS[i % len(ATTACKS)]}}}", "5") for i in range(count // 10)]
    with Verifier(2) as verifier:
        verifier.score(*zip(*mixed))
        plain, _ = timed(verifier.score, *zip(*mixed))
        mixed = random.Random(0).sample(mixed + attacks, len(mixed) + len(attacks))
        attacked, _ = timed(verifier.score, *zip(*mixed))
    print(f"  with {len(attacks)} time attacks among them: {attacked - plain:+.1f} s (limit 20 s)")


def bench_attacks() -> None:
    verify_math(r"\boxed{x+1}", "1+x")
    print("time attacks, seconds each (limit 2):")
    for attack in ATTACKS:
        seconds, verdict = timed(verify_math, rf"\boxed{{{attack}}}", "5")
        print(f"  {seconds:6.3f} {verdict.reason:12} {attack[:50]}")


def bench_sandbox(rounds: int = 60) -> None:
    """An honest one-test program against a bare interpreter; the two take turns, so that whatever
    else runs on the machine slows both alike."""
    response = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
    tests = [{"input": "3 4\n", "output": "7\n", "testtype": "stdin"}]
    verify_code(response, tests)  # probes the machine, once
    bare, ours = [], []
    for _ in range(rounds):
        command = [sys.executable, "-I", "-c", "pass"]
        bare.append(timed(lambda: subprocess.run(command, check=True))[0])  # noqa: B023
        seconds, verdict = timed(verify_code, response, tests)
        assert verdict.reason == "correct"
        ours.append(seconds)
    bare, ours = statistics.median(bare), statistics.median(ours)
    print(f"sandbox launch {ours * 1000:.1f} ms, bare interpreter {bare * 1000:.1f} ms: "
          f"ratio {ours / bare:.2f}, overhead {(ours - bare) * 1000:.1f} ms (limit 60)")  # fmt: skip


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # math_verify says that its timeouts are off
    if DATA.exists():
        bench_math()
    bench_attacks()
    bench_sandbox()
