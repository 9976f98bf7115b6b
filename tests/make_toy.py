"""Warms up the toy policies: a 0.3 M-parameter Qwen3 that adds lettered digits modulo 5.

    python tests/make_toy.py                                  # remakes .assets/toy-*
    python tests/make_toy.py --seed 7 --out runs/toys/7       # another, independent warm start

A prompt is `a3b1d4?`, its right solution `a3=3 b1=4 d4=3 \\boxed{3}`, each term with the sum so far.
The policy has learned several styles of solution, so that its responses vary in length and
rightness. Two worlds, each the bad case of one of the old rules:

    rambler   right answers are short and rare, wrong ones ramble on: `token` drowns the right
    guesser   the prompt ends in two candidates, `a3b1d4,13?`. A 9-token guess is right half the
              time, careful chains are long: `sequence` prefers the guess

DIR/toy-WORLD/ is a transformers checkpoint in bf16 beside train.jsonl and eval.jsonl. The problems
are the same for every seed, so that seeds differ in the policy alone. No sum is in them twice, and
the warm-up sees none of eval.jsonl. A seed makes the same policy again on the same machine. The
stored ones are of seed 4: of seeds 0 to 4 their numbers were the nearest to the mean, once trained.
"""

import argparse
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from torch.nn.utils.rnn import pad_sequence
from tqdm import trange
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

ASSETS = Path(__file__).resolve().parents[1] / ".assets"
NUM_TRAIN, NUM_EVAL = 1024, 512
STEPS, BATCH, LR = 350, 24, 3e-3
CHARACTERS = "abcdehimotwx0123456789?=,{}\\ "


@dataclass(frozen=True)
class Style:
    share: float  # of the responses
    slips: float = 0.0  # chance of an error per term; the policy adds slips of its own
    again: tuple = ()  # (n, p): at least n more chains, each further one with probability p
    answers: bool = True  # False: it never gets to \boxed{}


RIGHT = Style(share=1.0)
STYLES = {
    "rambler": {
        "chain": Style(0.12, slips=0.1),
        "ramble": Style(0.88, slips=0.1, again=(0, 0.85), answers=False),
    },
    "guesser": {
        "guess": Style(0.50),
        "chain": Style(0.38, slips=0.02, answers=False),
        "ramble": Style(0.12, slips=0.005, again=(1, 0.9)),
    },
}
ACCURACY = {"rambler": 0.08, "guesser": 0.34}  # at the start; seeds differ by 0.01 and 0.02


def style_of(response):
    return "guess" if response[:1] == "\\" else "ramble" if response[:2] == "hm" else "chain"


# ----------------------------------------------------------------------------------------
# 1. Problems and solutions


def draw_problem(world, rng):
    """3 to 5 terms; in guesser also two candidates, one of them right."""
    letters = sorted(rng.sample("abcde", rng.randint(3, 5)))
    digits = [rng.randrange(5) for _ in letters]
    text = "".join(f"{letter}{digit}" for letter, digit in zip(letters, digits))
    answer = sum(digits) % 5
    if world == "guesser":
        candidates = [answer, (answer + rng.randint(1, 4)) % 5]
        rng.shuffle(candidates)
        text += ",{}{}".format(*candidates)
    return {"problem": text + "?", "answer": str(answer)}


def terms(problem):
    """`a3b1d4,13?` -> ("a3", "b1", "d4")"""
    return tuple(re.findall(r"[a-e]\d", problem["problem"]))


def make_problems(world):
    """(training problems, held-out problems): every sum once."""
    rng, problems = random.Random(1), {}
    while len(problems) < NUM_EVAL + NUM_TRAIN:
        problem = draw_problem(world, rng)
        problems.setdefault(terms(problem), problem)
    problems = list(problems.values())
    return problems[NUM_EVAL:], problems[:NUM_EVAL]


def write_chain(problem, slips, rng):
    """(`a3=3 b1=4 d4=3`, 3). A slip is carried on."""
    total, steps = 0, []
    for term in terms(problem):
        total = (total + int(term[1])) % 5
        if rng.random() < slips:
            total = (total + rng.randint(1, 4)) % 5
        steps.append(f"{term}={total}")
    return " ".join(steps), total


def write_solution(problem, style, rng):
    if style == STYLES["guesser"]["guess"]:
        return f"\\boxed{{{rng.choice(problem['problem'][-3:-1])}}}"
    text, total = write_chain(problem, style.slips, rng)
    if style.again:  # hm CHAIN wait CHAIN wait CHAIN ...: the last one counts
        at_least, going_on = style.again
        text = "hm " + text
        for i in range(5):
            if i >= at_least and rng.random() > going_on:
                break
            chain, total = write_chain(problem, style.slips, rng)
            text += " wait " + chain
    return f"{text} \\boxed{{{total}}}" if style.answers else text


# ----------------------------------------------------------------------------------------
# 2. Warm-up: first right chains only, until the policy can add, then the world's styles.


def make_tokenizer():
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", *CHARACTERS])}
    characters = Tokenizer(models.BPE(vocab, merges=[]))  # BPE without merges: characters
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return tokenizer


def make_model(tokenizer):
    config = Qwen3Config(
        vocab_size=48, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, head_dim=32, num_key_value_heads=2, max_position_embeddings=512,
        tie_word_embeddings=True, bos_token_id=None, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.08,  # essential: at the usual 0.02 it does not learn to add
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def warm_up(world, seed, steps, tokenizer):
    torch.manual_seed(seed)
    rng, model = random.Random(seed), make_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    held_out = {terms(problem) for problem in make_problems(world)[1]}
    styles = list(STYLES[world].values())
    shares = [style.share for style in styles]

    def draw_row(pick_style):
        """(token ids, labels) of a problem with its solution; -100: no loss on the prompt."""
        problem = draw_problem(world, rng)
        while terms(problem) in held_out:
            problem = draw_problem(world, rng)
        solution = write_solution(problem, pick_style(), rng)
        prompt, solution = tokenizer.encode(problem["problem"]), tokenizer.encode(solution)
        solution.append(tokenizer.eos_token_id)
        return torch.tensor(prompt + solution), torch.tensor([-100] * len(prompt) + solution)

    def train_step(pick_style):
        rows = sorted([draw_row(pick_style) for _ in range(BATCH)], key=lambda row: len(row[0]))
        tokens = sum((labels != -100).sum() for _, labels in rows)
        loss = 0.0
        for i in range(0, BATCH, 6):  # rows of like lengths, so that little is padding
            ids, labels = zip(*rows[i : i + 6])
            ids, labels = pad_sequence(ids, True), pad_sequence(labels, True, -100)
            part = model(input_ids=ids, labels=labels, num_items_in_batch=tokens).loss
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for _ in trange(2 * steps, desc=f"{world}, seed {seed}: learns to add"):
        if train_step(lambda: RIGHT) < 0.01:
            break
    for done in trange(steps, desc=f"{world}, seed {seed}: its styles"):
        # The learning rate falls to 0, so that each style keeps its share.
        optimizer.param_groups[0]["lr"] = LR * (1 - done / steps)
        train_step(lambda: rng.choices(styles, shares)[0])
    return model


def make_toy(folder, world, seed=0, steps=STEPS):
    tokenizer = make_tokenizer()
    model = warm_up(world, seed, steps, tokenizer).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name, problems in zip(("train.jsonl", "eval.jsonl"), make_problems(world)):
        lines = [json.dumps(problem) + "\n" for problem in problems]
        Path(folder, name).write_text("".join(lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=4)
    parser.add_argument("--out", type=Path, default=ASSETS, help="where toy-WORLD/ is made")
    parser.add_argument("--world", choices=STYLES, help="make this one only")
    parser.add_argument("--steps", type=int, default=STEPS, help="few: a quick policy that is bad")
    options = parser.parse_args()
    torch.set_num_threads(1)  # faster for matrices this small, and sums keep their order
    for world in [options.world] if options.world else STYLES:
        make_toy(options.out / f"toy-{world}", world, options.seed, options.steps)
