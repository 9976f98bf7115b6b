"""Data on which a real pretrained model, SmolLM2-135M-Instruct, learns by GRPO on a CPU.

    python tests/small_sums.py --model DIR      # writes runs/small-sums-*.jsonl, prints the command

A problem is a sum of two numbers from 1 to 5. Four worked examples precede it as turns of the chat,
written into the problem's text in the model's own chat format: it answers `2 + 3 = \\boxed{5}` in 12
tokens, is right about one time in four, and more than half of the groups of eight are mixed. Five of
the 25 sums are held out: training neither asks nor shows them.
"""

import argparse
import json
import random
from pathlib import Path

EXAMPLES = 4
TURN = "{0} + {1}<|im_end|>\n<|im_start|>assistant\n{0} + {1} = \\boxed{{{2}}}<|im_end|>\n"
NEXT = "<|im_start|>user\n"  # the template opens the first turn and closes the last


def make_problems(asked, shown, n, rng):
    """n different problems, each with a sum of `asked` after examples from `shown`."""
    texts = {}
    while len(texts) < n:
        a, b = rng.choice(asked)
        examples = rng.sample([pair for pair in shown if pair != (a, b)], EXAMPLES)
        turns = [TURN.format(x, y, x + y) + NEXT for x, y in examples]
        texts["".join(turns) + f"{a} + {b}"] = str(a + b)
    return [{"problem": text, "answer": answer} for text, answer in texts.items()]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="folder of SmolLM2-135M-Instruct")
    options = parser.parse_args()
    rng, out = random.Random(0), Path("runs")
    sums = [(a, b) for a in range(1, 6) for b in range(1, 6)]
    rng.shuffle(sums)
    held_out, trained = sums[:5], sums[5:]
    out.mkdir(exist_ok=True)
    for name, asked, n in (("train", trained, 2000), ("eval", held_out, 256)):
        rows = make_problems(asked, trained, n, rng)
        path = out / f"small-sums-{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(
        f"python grpo_ba.py --name small-sums --model {options.model} --instruction none "
        "--train_data runs/small-sums-train.jsonl --eval_data runs/small-sums-eval.jsonl "
        "--max_prompt_tokens 256 --max_response_tokens 24 --micro_batch_tokens 1024 "
        "--prompts_per_step 8 --minibatches 1 --gradient_checkpointing no "
        "--steps 30 --eval_every 10 --lr 1e-5"
    )


if __name__ == "__main__":
    main()
