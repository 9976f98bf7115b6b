"""The three rules, trained in two toy worlds from many warm starts: the registered experiment.

    python tests/experiment.py --out runs/experiment                    # as registered below
    python tests/experiment.py --out runs/experiment --controls half-lr double-lr g-4
    python tests/experiment.py --out runs/quick --quick                 # two warm starts

A seed is a warm start by make_toy.py, an order of problems and a stream of random numbers; the
rules share all three. After a kill the same command goes on. Writes tables and DIR/results.json.

Registered before any run with seeds 1 to 12. Accuracy is on 512 held-out problems; `last` is after
the last step, `mean` over training (trapezoid, five evaluations), `drop` the best minus the last.
    H1  guesser, last: balanced above sequence, and token above sequence
    H2  rambler, mean: balanced above token
    H3  guesser, mean: token above balanced, against the paper
    H4  rambler, mean: balanced and sequence differ by less than .02
p is that of the exact sign-flip test, one-sided, on the paired differences: the share of the 2^n
ways to swap the two rules within seeds that give as large a mean. Unlike the t test it needs no
normal distribution; unlike the sign test it heeds sizes. Of two claims the larger p counts; H4
claims a difference above -.02 both ways. Holm over the four. Controls half-lr and double-lr give a
setting best-lr too: each rule at the rate, of the three, that is best on the other seeds.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: two processes on two cores

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import make_toy

import grpo_ba
from verify import verify_math

RULES = list(grpo_ba.AGGREGATIONS)
WORLDS = {"guesser": {"steps": 24, "eval_every": 6}, "rambler": {"steps": 20, "eval_every": 5}}
CONTROLS = {  # fields of Config, over those of the toy preset
    "half-lr": {"lr": 1e-4},
    "double-lr": {"lr": 4e-4},
    "minibatches-4": {"minibatches": 4},
    "g-4": {"group_size": 4, "prompts_per_step": 16},
    "g-16": {"group_size": 16, "prompts_per_step": 4},
    "no-std": {"normalize_std": False},
    "hot": {"lr": 1e-3, "steps": 100, "eval_every": 10},  # stability; chosen on seeds above 100
}
RATES = ["main", "half-lr", "double-lr"]
HYPOTHESES = {  # each pair (a, b) claims that a - b is above -margin
    "H1": ("guesser", "last", [("balanced", "sequence"), ("token", "sequence")], 0),
    "H2": ("rambler", "mean", [("balanced", "token")], 0),
    "H3": ("guesser", "mean", [("token", "balanced")], 0),
    "H4": ("rambler", "mean", [("balanced", "sequence"), ("sequence", "balanced")], 0.02),
}


class VerifierInProcess:
    """verify.py's verdicts without its worker processes: the toy's answers are harmless."""

    def score(self, responses, problems, progress=False):
        return [verify_math(r, p["answer"]) for r, p in zip(responses, problems, strict=True)]


def run_world(seed, world, out, controls):
    """One warm start, and each rule from it in each setting, where not yet done. A row for each."""
    rows, start = [], out / f"toys/{seed}/toy-{world}"
    if not (start / "eval.jsonl").exists():  # it is written last
        make_toy.make_toy(start, world, seed)
    data = {"train_data": f"{start}/train.jsonl", "eval_data": f"{start}/eval.jsonl"}
    for setting, rule in product(["main", *controls], RULES):
        run = out / f"{setting}/{world}-{rule}-{seed}"
        fields = grpo_ba.toy(f"toy-{world}") | WORLDS[world] | CONTROLS.get(setting, {}) | data
        fields |= {"model": str(start), "resume": str(run), "eval_problems": 512, "seed": seed}
        config = grpo_ba.Config(**fields, aggregation=rule)
        run.mkdir(parents=True, exist_ok=True)
        if config.steps not in [m["step"] for m in grpo_ba.read_jsonl(run / "metrics.jsonl")]:
            with open(run / "log", "a") as log, redirect_stdout(log), redirect_stderr(log):
                grpo_ba.train(config, VerifierInProcess())  # from its checkpoint, or from the start
        metrics = grpo_ba.read_jsonl(run / "metrics.jsonl")
        evaluations = [m for m in metrics if m["eval_step"] is not None]
        steps, curve = zip(*[(m["eval_step"], m["eval_accuracy"]) for m in evaluations])
        row = {"setting": setting, "world": world, "rule": rule, "seed": seed, "curve": curve}
        row |= {"last": curve[-1], "mean": np.trapezoid(curve, steps) / steps[-1]}
        row |= {"drop": max(curve) - curve[-1], "collapsed": float(curve[-1] < max(curve) / 2)}
        rows.append(row)
    return rows


def sign_flip_p(differences):
    """Exact, one-sided: how often random signs give a mean as large as that of these [n]."""
    signs = np.array(list(product((1, -1), repeat=len(differences))))
    sums = signs @ differences
    return (sums >= sums[0] - 1e-12).mean()


def holm(p_values):
    """Adjusted for their number, in the order given."""
    p, order = np.asarray(p_values), np.argsort(p_values)
    adjusted = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)).clip(max=1)
    return adjusted[np.argsort(order)]


def best_rates(frame):
    """The setting best-lr: each rule at the rate with the highest mean on the other seeds."""
    means = frame.loc[RATES]["mean"].unstack("setting")  # [(world, rule, seed), rates]
    others = means.groupby(["world", "rule"]).transform("sum") - means
    best = frame.loc[[(rate, *cell) for cell, rate in others.idxmax(axis=1).items()]]
    return pd.concat({"best-lr": best.droplevel("setting")}, names=["setting"])


def estimate(values):
    """Mean and its standard error."""
    return f"{values.mean():+.3f} ± {values.sem():.3f}"


def report(frame):
    """Prints the tables, returns {hypothesis: p}. The index pairs differences by seed."""
    pairs = [("balanced", "sequence"), ("balanced", "token"), ("token", "sequence")]
    titles = [*RULES, *(f"{a} - {b}" for a, b in pairs)]
    print("| setting, world, figure |", " | ".join(titles), "|\n|---|---|---|---|---|---|---|")
    for (setting, world), part in frame.groupby(["setting", "world"]):
        for figure in ("last", "mean", "drop", "collapsed"):
            by_rule = part[figure].unstack("rule")  # [seeds, rules]
            shown = [by_rule[rule] for rule in RULES] + [by_rule[a] - by_rule[b] for a, b in pairs]
            print(f"| {setting}, {world}, {figure} |", " | ".join(map(estimate, shown)), "|")
    p_values = {}
    for name, (world, figure, pairs, margin) in HYPOTHESES.items():
        by_rule = frame.loc["main", world][figure].unstack("rule")
        p_values[name] = max(sign_flip_p(by_rule[a] - by_rule[b] + margin) for a, b in pairs)
    print("\n| hypothesis | p | p, Holm |\n|---|---|---|")
    for name, adjusted in zip(HYPOTHESES, holm(list(p_values.values()))):
        print(f"| {name} | {p_values[name]:.4f} | {adjusted:.4f} |")
    return p_values


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--controls", nargs="+", default=[], choices=CONTROLS)
    parser.add_argument("--seeds", nargs=2, type=int, default=(1, 12), help="first and last")
    parser.add_argument("--quick", dest="seeds", action="store_const", const=(101, 102))
    options = parser.parse_args()
    seeds = range(options.seeds[0], options.seeds[1] + 1)
    jobs = product(seeds, WORLDS, [options.out.resolve()], [options.controls])
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        rows = [row for rows in pool.map(run_world, *zip(*jobs)) for row in rows]
    frame = pd.DataFrame(rows).set_index(["setting", "world", "rule", "seed"])
    if set(RATES[1:]) <= set(options.controls):
        frame = pd.concat([frame, best_rates(frame)])
    frame = frame.sort_index()
    results = {"p": report(frame), "runs": frame.reset_index().to_dict("records")}
    grpo_ba.write_atomic(options.out / "results.json", json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
