"""Which rule points best? A solvable model of one prompt, over length variation and length gap.

    python tests/phase_map.py            # draws .assets/phase_map.png, in minutes on a CPU

A policy's first token picks one of ten routes, two qualities x five lengths, by softmax(theta). Each
other token is good with probability sigmoid(phi) = 1/2. A route of good quality is right with
probability .98, another with .02. The true gradient is known; of the sampled ones all but the draw
of routes and rewards is integrated out. Two ways to earn the reward:

    one token     the route decides, the other tokens only add noise; the gradient is by theta
    every token   each good token adds a little (to first order); the gradient is by phi alone, so
                  that B below scales the score and leaves the order of the rules

Lengths vary by CV (coefficient of variation) within a quality, E[L | wrong] / E[L | right] = g, their
geometric mean is 24, and P(right) = p = .2. A step takes B groups of G = 8. A rule's score is the
cosine to expect, (mean step . true direction) / sqrt(|mean step|^2 + tr Cov / B). Gray: the best
rule leads by less than 2 standard errors (jackknife; the rules see the same groups). Line: token
beats sequence below it, where (1 + CV^2) (q + p/g) > q + p g with q = 1 - p; exact for large G.
"""

import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from grpo_ba import AGGREGATIONS, group_advantages, token_weights

COLOURS = {"sequence": "#0072B2", "token": "#D55E00", "balanced": "#009E73", "tie": "#cccccc"}
PANELS = {"one token, B = 1": 1, "one token, B = 8": 8, "one token, B = 64": 64, "every token": 8}
CVS, GAPS = np.linspace(0.05, 0.95, 10), 2 ** np.linspace(-1.5, 1.5, 13)
G, PASS, MEAN_LENGTH, BLOCKS = 8, 0.2, 24, 50
P_RIGHT = np.repeat([0.98, 0.02], 5)  # of the ten routes
CREDIT = 1e-4  # of a good token, in "every token"


def make_routes(cv, g):
    """(probability [10], length [10]) of each route. Lengths need not be whole numbers."""
    good = (PASS - P_RIGHT[-1]) / (P_RIGHT[0] - P_RIGHT[-1])  # share of the good quality
    normal = np.array([-1.2816, -0.5244, 0, 0.5244, 1.2816])  # five equally likely quantiles
    shapes = np.exp(np.linspace(0, 3, 3000)[:, None] * normal)
    shapes /= shapes.mean(axis=1, keepdims=True)
    shape = shapes[np.abs(shapes.std(axis=1) - cv).argmin()]  # [5], mean 1
    # Mean lengths of the two qualities, so that those of right and wrong responses are as wanted.
    shares = [good * P_RIGHT[0] / PASS, good * P_RIGHT[-1] / (1 - PASS)]  # of good routes in them
    mixture = [[share, 1 - share] for share in shares]
    means = np.linalg.solve(mixture, [MEAN_LENGTH * g**-0.5, MEAN_LENGTH * g**0.5])
    return np.repeat([good / 5, (1 - good) / 5], 5), np.outer(means, shape).ravel()


def step_gradients(every_token, cv, g, n, rng):
    """{rule: (gradients of n groups [n, D], variance that each adds by its other tokens [n])}, by
    theta (D = 10) or phi (D = 1). And the true direction [D]."""
    pi, lengths = make_routes(cv, g)
    route = rng.choice(10, (n, G), p=pi)
    right = rng.random((n, G)) < P_RIGHT[route]
    tokens = lengths[route] - 1
    # d log P(response) / d phi has mean 0 and variance tokens/4, and these means by reward:
    mean = CREDIT * tokens * np.where(right, 1, -(P_RIGHT / (1 - P_RIGHT))[route])
    A, L = group_advantages(torch.tensor(right, dtype=float)), torch.tensor(lengths[route])
    gradients, cells = {}, (np.arange(n)[:, None] * 10 + route).ravel()
    for rule in AGGREGATIONS:
        wA = (token_weights(rule, A, L) * A).numpy()  # [n, G]
        theta = np.bincount(cells, wA.ravel(), n * 10).reshape(n, 10)  # sums over equal routes
        theta -= wA.sum(axis=1, keepdims=True) * pi
        phi = (wA * mean).sum(axis=1, keepdims=True)
        gradients[rule] = phi if every_token else theta, (wA**2 * tokens / 4).sum(axis=1)
    direction = np.ones(1) if every_token else pi * (P_RIGHT - pi @ P_RIGHT)
    return gradients, direction / np.linalg.norm(direction)


def scores(x, noise, direction, B):
    """[1 + BLOCKS]: the score from all groups, and from all but one block (for the jackknife)."""
    columns = np.column_stack([x, (x**2).sum(axis=1), noise])
    blocks = columns.reshape(BLOCKS, -1, columns.shape[1]).mean(axis=1)
    means = np.vstack([blocks.mean(axis=0), (blocks.sum(axis=0) - blocks) / (BLOCKS - 1)])
    mean, square, noise = means[:, :-2], means[:, -2], means[:, -1]
    variance = square - (mean**2).sum(axis=1)
    signal = (mean**2).sum(axis=1) - variance / len(x)  # unbiased
    return mean @ direction / np.sqrt(signal.clip(0) + (variance + noise) / B)


def judge(every_token, B, cv, g, n, seed=0):
    """(the best rule or "tie", {rule: how far below the best it scores, as a share})."""
    gradients, direction = step_gradients(every_token, cv, g, n, np.random.default_rng(seed))
    results = {rule: scores(*x, direction, B) for rule, x in gradients.items()}
    first, second = sorted(results, key=lambda rule: -results[rule][0])[:2]
    lead = results[first] - results[second]
    error = np.sqrt((BLOCKS - 1) * lead[1:].var())
    losses = {rule: 1 - score[0] / results[first][0] for rule, score in results.items()}
    return first if lead[0] > 2 * error else "tie", losses


def draw(path=ROOT / ".assets/phase_map.png", n=100_000, cvs=CVS, gaps=GAPS):
    """Judges every cell on n groups, prints how the rules fare, draws the map."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    names, figure = list(COLOURS), Figure(figsize=(11, 3.3), dpi=160, layout="constrained")
    for axes, (title, B) in zip(figure.subplots(1, 4, sharey=True), PANELS.items()):
        cells = [judge(title == "every token", B, cv, g, n) for g in gaps for cv in cvs]
        best = [f"{name} {sum(winner == name for winner, _ in cells)}" for name in names]
        worst = [f"{rule} {max(losses[rule] for _, losses in cells):.1%}" for rule in AGGREGATIONS]
        print(f"{title}: best in {', '.join(best)}; most behind {', '.join(worst)}")
        winners = np.reshape([names.index(winner) for winner, _ in cells], (len(gaps), len(cvs)))
        axes.pcolormesh(cvs, gaps, winners, cmap=ListedColormap(COLOURS.values()), vmin=0, vmax=3)
        axes.set(title=title, xlabel="length variation CV", yscale="log", yticks=[0.5, 1, 2])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
    g, q = np.linspace(1, 3.08, 100), 1 - PASS
    axes.plot(np.sqrt((q + PASS * g) / (q + PASS / g) - 1), g, color="black")
    figure.axes[0].set_ylabel("length gap g, wrong / right")
    squares = [axes.plot([], [], "s", color=colour)[0] for colour in COLOURS.values()]
    figure.legend(squares, names, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path)


if __name__ == "__main__":
    torch.set_num_threads(1)
    draw()
