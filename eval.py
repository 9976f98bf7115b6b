"""Evaluation and pictures (the evaluation itself lands next)."""

import json
import math
import sys
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator


def fail(message: str):
    print(f"eval.py: {message}", file=sys.stderr)
    raise SystemExit(2)


# ----------------------------------------------------------------------------------------
# 7. Pictures. Figure objects, no pyplot: nothing global is left in a trainer's process and no
#    display is needed. Sized for a README, labelled on the lines, safe for colour-blind readers.

# Okabe-Ito palette; a rule has the same colour in every picture.
COLORS = {"sequence": "#0072B2", "token": "#D55E00", "balanced": "#009E73"}
SPARE_COLORS = ["#CC79A7", "#E69F00", "#56B4E9", "#666666"]  # a fork's rules, runs without a rule
INK, GRAY, GRID, BLUE, ORANGE = "#333333", "#888888", "#E4E4E4", "#0072B2", "#D55E00"


def color_of(names: list[str]) -> dict[str, str]:
    """A colour per name: the rule's when the name holds one, else the next spare one."""
    spare = iter(SPARE_COLORS * len(names))
    rules = {name: next((rule for rule in COLORS if rule in name), None) for name in names}
    taken = list(rules.values())
    return {
        name: COLORS[rule] if rule and taken.count(rule) == 1 else next(spare)
        for name, rule in rules.items()
    }


def new_figure(width: float, height: float, rows: int, columns: int):
    figure = Figure(figsize=(width, height), dpi=160, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color=GRID, linewidth=0.7)
        panel.set_axisbelow(True)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.tick_params(colors=INK, labelsize=9)
    return figure, panels


def label_ends(panel, ends: list[tuple[float, float, str, str]], share: float) -> None:
    """Write each (x, y, text, color) at the end of its line; texts nearer to one another than this
    share of the panel's height move apart."""
    low, high = panel.get_ylim()
    gap = share * (high - low)
    ends = sorted((end for end in ends if not math.isnan(end[1])), key=lambda end: end[1])
    heights = [end[1] for end in ends]
    for _ in range(50):  # push neighbours apart by halves until all have room
        for i in range(len(heights) - 1):
            push = max(0.0, gap - (heights[i + 1] - heights[i])) / 2
            heights[i], heights[i + 1] = heights[i] - push, heights[i + 1] + push
    for (x, _, text, color), height in zip(ends, heights):
        panel.annotate(text, (x, height), (6, 0), textcoords="offset points", color=color,
                       va="center", fontsize=10, fontweight="bold", annotation_clip=False)  # fmt: skip


def save_figure(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    figure.savefig(part, format="png")
    return part.replace(path)


def read_run(run: Path) -> tuple[dict, list[dict]]:
    """config.json and metrics.jsonl of a training run; a line that is being written is left out."""
    metrics, config = Path(run, "metrics.jsonl"), Path(run, "config.json")
    if not metrics.exists():
        fail(f"{run} has no metrics.jsonl: name the folder of a training run")
    lines = metrics.read_text().split("\n")[:-1]
    return json.loads(config.read_text()) if config.exists() else {}, [json.loads(x) for x in lines]


def accuracy_curve(run: Path) -> tuple[list[int], list[float]]:
    """Held-out accuracy over updates done: 0 is the untrained policy. A step evaluates before its
    update, only the last step of a finished run after it."""
    config, rows = read_run(run)
    last = config.get("steps") or max((row["step"] for row in rows), default=0)
    done = [row for row in rows if row.get("eval_accuracy") is not None]
    x = [row["step"] if row["step"] == last else row["step"] - 1 for row in done]
    return x, [row["eval_accuracy"] for row in done]


def draw_curves(run: Path) -> Path:
    """runs/<name>/curves.png: does it learn, how long are right and wrong responses, is the policy
    healthy, and the two biases as numbers. Works while the run is going on."""
    config, rows = read_run(run)
    figure, panels = new_figure(11, 6.6, 2, 2)
    learning, lengths, health, biases = panels
    half = len(rows) // 50  # long runs get a running mean over the raw line; short ones stay raw

    def plot(panel, key: str, color: str) -> tuple[float, float]:
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        x, y = zip(*points) if points else ((), ())
        windows = [y[max(0, i - half) : i + half + 1] for i in range(len(y))]
        if half:
            panel.plot(x, y, color=color, linewidth=0.7, alpha=0.3)
        mean = [sum(window) / len(window) for window in windows]
        panel.plot(x, mean, color=color, linewidth=1.8)
        return (x[-1], mean[-1]) if points else (math.nan, math.nan)

    def plot_two(panel, key_left: str, label_left: str, key_right: str, label_right: str):
        """Two quantities, each with its own axis in the colour of its line."""
        right = panel.twinx()
        right.spines[["top", "left"]].set_visible(False)
        for side, key, label, color in (
            (panel, key_left, label_left, BLUE),
            (right, key_right, label_right, ORANGE),
        ):
            plot(side, key, color)
            side.set_ylabel(label, color=color)
            side.tick_params(axis="y", colors=color, labelsize=9)
        return right

    ends = [(*plot(learning, "reward", ORANGE), "training\nreward", ORANGE)]
    x, y = accuracy_curve(run)
    learning.plot(x, y, color=BLUE, linewidth=1.8, marker="o", markersize=4.5)
    ends += [(x[-1], y[-1], "held-out\naccuracy", BLUE)] if x else []
    learning.set(ylim=(-0.02, 1.02))
    learning.set_title("Does it learn?")
    label_ends(learning, ends, 0.16)

    keys = {"length_pos": ("right", BLUE), "length": ("all", GRAY), "length_neg": ("wrong", ORANGE)}
    ends = [(*plot(lengths, key, color), label, color) for key, (label, color) in keys.items()]
    lengths.set_title("Tokens per response (right: A > 0, wrong: A < 0)")
    lengths.set_ylim(0)
    label_ends(lengths, ends, 0.07)

    health.set_title("Is the policy healthy?")
    plot_two(health, "entropy", "entropy (nats)", "grad_norm", "gradient norm").set_ylim(0)
    health.set_ylim(0)

    biases.set_title("The two biases (0 and 1: none)")
    right = plot_two(biases, "net_advantage", "net advantage", "weight_spread", "weight spread")
    low, high = biases.get_ylim()  # noise of 1e-9 must not fill the panel
    biases.set_ylim(min(low, -0.5), max(high, 0.5))
    right.set_ylim(0, max(2, right.get_ylim()[1]))

    for panel in panels:
        panel.set_xlabel("step", fontsize=9, color=INK)
    rule, steps = config.get("aggregation", "?"), config.get("steps", "?")
    done = "" if rows and rows[-1]["step"] == steps else f", {len(rows)} of {steps} steps so far"
    figure.suptitle(f"{Path(run).name}: {rule} aggregation{done}", fontweight="bold", color=INK)
    return save_figure(figure, Path(run, "curves.png"))


def draw_rules(runs: dict[str, dict[str, list[Path]]], path: Path) -> Path:
    """runs/compare.png: held-out accuracy of {world: {rule: [run of each seed]}}, one panel per
    world. Thick: mean over seeds, where all have been evaluated. Thin: each seed."""
    figure, panels = new_figure(5.6 * len(runs), 4, 1, len(runs))
    counts = {len(seeds) for rules in runs.values() for seeds in rules.values()}
    for panel, (world, rules) in zip(panels, runs.items()):
        colors, ends = color_of(list(rules)), []
        for rule, seeds in rules.items():
            curves = [dict(zip(*accuracy_curve(run))) for run in seeds]
            x = sorted(set.intersection(*map(set, curves)))
            if not x:
                continue  # not evaluated yet
            mean = [sum(curve[step] for curve in curves) / len(curves) for step in x]
            for curve in curves if len(curves) > 1 else []:
                panel.plot(curve.keys(), curve.values(), color=colors[rule], lw=0.8, alpha=0.35)
            panel.plot(x, mean, color=colors[rule], lw=2.4, marker="o", markersize=4)
            ends.append((x[-1], mean[-1], f"{rule} {mean[-1]:.2f}", colors[rule]))
        panel.set_title(world, fontweight="bold", color=INK)
        panel.set_xlabel("updates", fontsize=9, color=INK)
        panel.set_ylim(0, 1)
        label_ends(panel, ends, 0.07)
    panels[0].set_ylabel("held-out accuracy", color=INK)
    seeds = " to ".join(str(count) for count in sorted({min(counts), max(counts)}))
    what = f"mean of {seeds} seeds (thin lines: each seed)" if seeds != "1" else "1 seed"
    figure.suptitle(f"Held-out accuracy while training: {what}", color=INK)
    return save_figure(figure, path)
