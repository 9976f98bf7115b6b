"""The toy: what tests/make_toy.py makes, and that the two stored ones keep its promises."""

import json
import re
from collections import Counter

import make_toy
import pytest
from transformers import AutoTokenizer

import grpo_ba


def read(world, name):
    path = make_toy.ASSETS / f"toy-{world}" / name
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(params=make_toy.STYLES)
def world(request):
    return request.param


def test_a_seed_makes_one_policy_again_and_another_seed_another(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_toy.make_toy(tmp_path / name, "rambler", seed, steps=1)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c
    assert len(a) < 620_000  # bf16


def test_the_warm_up_never_sees_a_held_out_sum(world, monkeypatch):
    seen, write = set(), make_toy.write_solution
    spy = lambda problem, *rest: seen.add(make_toy.terms(problem)) or write(problem, *rest)
    monkeypatch.setattr(make_toy, "write_solution", spy)
    make_toy.warm_up(world, 0, 2, make_toy.make_tokenizer())
    assert len(seen) > 100 and not seen & set(map(make_toy.terms, make_toy.make_problems(world)[1]))


def test_stored_problems_are_distinct_sums_with_right_answers(world):
    rows = read(world, "eval.jsonl") + read(world, "train.jsonl")
    assert (rows[512:], rows[:512]) == make_toy.make_problems(world)
    assert len({re.split("[,?]", row["problem"])[0] for row in rows}) == len(rows) == 512 + 1024
    for row in rows:
        assert row["answer"] == str(sum(map(int, re.findall(r"[a-e](\d)", row["problem"]))) % 5)
        assert world == "rambler" or {row["answer"]} < set(row["problem"][-3:-1])


def test_stored_policies_start_with_the_promised_accuracy_and_styles(world):
    folder = make_toy.ASSETS / f"toy-{world}"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), grpo_ba.load_policy(folder, "cpu")
    rows = read(world, "eval.jsonl")[:64]
    prompts = [grpo_ba.encode_prompt(tokenizer, row["problem"], "none") for row in rows]
    engine = grpo_ba.TransformersEngine(model, grpo_ba.stop_token_ids(tokenizer))
    responses = engine.generate(prompts, 4, list(range(256)), 200, 1.0)
    texts = [tokenizer.decode(r.ids, skip_special_tokens=True) for r in responses]
    shares = {style: n / 256 for style, n in Counter(map(make_toy.style_of, texts)).items()}
    promised = {name: style.share for name, style in make_toy.STYLES[world].items()}
    assert shares == pytest.approx(promised, abs=0.08)
    right = [t.endswith(f"\\boxed{{{rows[i // 4]['answer']}}}") for i, t in enumerate(texts)]
    assert sum(right) / 256 == pytest.approx(make_toy.ACCURACY[world], abs=0.05)
