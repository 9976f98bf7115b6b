"""What the three rules do to a gradient's weights, on rollouts of the two toy policies, untrained.

    python tests/mechanism.py            # draws .assets/mechanism.png, in half a minute

Markers are means over bins of groups (a) or responses (b). Lines are theory, exact here:
(a) the share of a group's weight (weight * tokens * |A|, summed) on its right responses: token
    L+ / (L+ + L-), the mean lengths of right and wrong responses; sequence and balanced 1/2
(b) a token's weight over its sign's mean token's, against its response's length over its sign's
    mean response's: sequence 1 / length; token and balanced 1
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers as hf

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import grpo_ba
from verify import verify_math

WORLDS = {"guesser": "#aaaaaa", "rambler": "#d5d5d5"}
COLOURS = {"sequence": "#0072B2", "token": "#D55E00", "balanced": "#009E73"}


def sample_groups(world, num_groups=200):
    """(advantages, lengths), both [mixed groups, G]: of groups with right and wrong responses."""
    config = grpo_ba.Config(**grpo_ba.toy(f"toy-{world}"))
    tokenizer, G = hf.AutoTokenizer.from_pretrained(config.model), config.group_size
    model = grpo_ba.load_policy(config.model, "cpu")
    engine = grpo_ba.TransformersEngine(model, grpo_ba.stop_token_ids(tokenizer))
    problems = grpo_ba.load_problems(config.train_data)[:num_groups]
    for p in problems:
        p["prompt_ids"] = grpo_ba.encode_prompt(tokenizer, p["problem"], config.instruction)
    responses = grpo_ba.rollout(engine, problems, G, config, "mechanism")
    texts = [grpo_ba.response_text(tokenizer, response) for response in responses]
    rewards = [verify_math(text, problems[i // G]["answer"]).reward for i, text in enumerate(texts)]
    advantages = grpo_ba.group_advantages(torch.tensor(rewards).float().view(-1, G))
    lengths = torch.tensor([float(len(r.ids)) for r in responses]).view(-1, G)
    mixed = (advantages != 0).any(dim=1)
    return advantages[mixed], lengths[mixed]


def own_sign_mean(x, right):
    """[P, G]: the mean of x over the responses of the group that have the same sign."""
    signs = (right, ~right)
    return sum(s * (s * x).sum(dim=1, keepdim=True) / s.sum(dim=1, keepdim=True) for s in signs)


def measure(rule, advantages, lengths):
    """(x, y) of panel (a), one per group, and (x, y) of panel (b), one per response."""
    weights, right = grpo_ba.token_weights(rule, advantages, lengths), advantages > 0
    mass, typical = weights * lengths * advantages.abs(), own_sign_mean(lengths, right)
    ratio = (right * typical).amax(dim=1) / (~right * typical).amax(dim=1)  # L+ / L-
    share = (right * mass).sum(dim=1) / mass.sum(dim=1)
    relative = weights * typical / own_sign_mean(weights * lengths, right)
    return (ratio, share), ((lengths / typical).flatten(), relative.flatten())


def bin_means(x, y):
    """([x], [y]), one for each half doubling of x that holds five points or more."""
    bins = (2 * x.log2()).round()
    kept = [bins == b for b in bins.unique() if (bins == b).sum() >= 5]
    return [x[some].log2().mean().exp2() for some in kept], [y[some].mean() for some in kept]


def draw(groups, path):
    """groups {world: (advantages, lengths)} -> {rule: (slope in a, slope in b)}, and the picture."""
    from matplotlib.figure import Figure

    figure, slopes = Figure(figsize=(9, 3.9), dpi=200, layout="constrained"), {}
    panels, everything = figure.subplots(1, 2), [torch.cat(x) for x in zip(*groups.values())]
    panels[0].set_title("token: the longer sign outweighs the other", color=COLOURS["token"])
    panels[1].set_title("sequence: tokens of long responses count less", color=COLOURS["sequence"])
    for axes in panels:
        axes.set_xscale("log", base=2)
        axes.spines[["top", "right"]].set_visible(False)
    panels[1].set_yscale("log", base=2)
    x = torch.logspace(-4, 4, 100, base=2)
    half, one = 0 * x + 0.5, 0 * x + 1
    theory = {"sequence": (half, 1 / x), "token": (x / (1 + x), one), "balanced": (half, one)}
    for rule, colour in COLOURS.items():
        (ratio, share), (length, weight) = points = measure(rule, *everything)
        fits = (ratio, share), (length, weight.log2())
        slopes[rule] = [np.polyfit(x.log2(), y, 1)[0] for x, y in fits]
        ring = {"markersize": 10, "fillstyle": "none"} if rule == "balanced" else {}
        for i, axes in enumerate(panels):
            axes.plot(*bin_means(*points[i]), "o", color=colour, label=rule, **ring)
            axes.plot(x, theory[rule][i], color=colour, linewidth=1)
    for world in groups:  # where its groups lie
        x = measure("token", *groups[world])[0][0]
        height, edges = torch.full_like(x, 0.4 / len(x)), [2 ** (i / 4) for i in range(-16, 17)]
        panels[0].hist(x, edges, weights=height, color=WORLDS[world], label=f"groups of {world}")
    panels[0].set(xlim=(0.1, 16), ylim=(0, 1), ylabel="share of weight on right responses")
    panels[1].set(xlim=(0.14, 7), ylim=(0.14, 7), ylabel="weight of a token / mean of its sign")
    panels[0].set_xlabel("mean length of right / of wrong responses")
    panels[1].set_xlabel("length of a response / mean of its sign")
    panels[0].legend(loc="upper left", frameon=False)
    for axis in (panels[0].xaxis, panels[1].xaxis, panels[1].yaxis):
        axis.set_major_formatter("{x:g}")
    figure.savefig(path)
    return slopes


if __name__ == "__main__":
    torch.set_num_threads(1)  # the matrices are tiny
    groups = {world: sample_groups(world) for world in WORLDS}
    print({world: f"{len(lengths)} mixed groups" for world, (_, lengths) in groups.items()})
    for rule, (a, b) in draw(groups, ROOT / ".assets/mechanism.png").items():
        print(f"{rule:9} slope per doubling: (a) share of right {a:+.3f}, (b) log2 weight {b:+.3f}")
