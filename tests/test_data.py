"""From data sets to prompts: both schemas, every kind of gold, with small files of our own."""

import json
import math

import datasets
import pytest

import grpo_ba
from grpo_ba import encode_prompt, load_problems, load_task

BOXED = r"Please reason step by step, and put your final answer within \boxed{}."  # Qwen's
PLAIN = "{% for m in messages %}{{ m['content'] }}{% endfor %}"  # a template without any markers


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write_rows(path, rows):
    if path.suffix == ".parquet":
        path.parent.joinpath("folder").mkdir()
        datasets.Dataset.from_list(rows).to_parquet(path.parent / "folder/train.parquet")
        return str(path.parent / "folder")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_texts(path, *texts):
    return write_rows(path, [{"problem": text, "answer": "1"} for text in texts])


# ----------------------------------------------------------------------------------------
# Rows


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    "names", [("problem", "answer"), ("prompt", "solution"), ("question", "final_answer")]
)
def test_each_text_is_kept_once_and_conflicts_not_at_all(kind, names, tmp_path, capsys):
    pairs = [
        ("What is 6 * 7?", "42"),
        ("What is 7 - 10?", "-3"),
        (" What is 6 * 7?\n", "42"),
        ("What is 2 + 2?", "4"),
        ("What is 2 + 2?", "5"),  # one of the two is wrong, and nobody knows which
        ("What is nothing?", " "),
        ("", "1"),
    ]
    rows = [dict(zip(names, pair)) | {"difficulty": "3/8"} for pair in pairs]
    assert load_problems(write_rows(tmp_path / f"data.{kind}", rows)) == [
        {"problem": "What is 6 * 7?", "answer": ["42"]},
        {"problem": "What is 7 - 10?", "answer": ["-3"]},
    ]
    out = capsys.readouterr().out
    assert "2 of 7 rows" in out
    assert "'without a verifiable answer': 2, 'repeated or in conflict': 3" in out


ESSAY = "Suppose not; then there is a smallest one, and half of it is smaller still, so none is."
GOLDS = [
    (34, ["34"]), ("034", ["034"]), (0, ["0"]), (0.5, ["0.5"]), (123456.0, ["123456"]),
    (["1", 2, 3.0], ["1", "2", "3"]), (r"\frac{3}{4}", [r"\frac{3}{4}"]),
]  # fmt: skip
NOT_GOLDS = [
    None, [], [[1, 2]], ["1", None], ["1", ""], {"a": 1}, True, math.nan, [math.inf], "nan",
    "-inf", " ", ESSAY * 4, "9" * 301,
]  # fmt: skip


def test_golds_are_texts_integers_finite_numbers_or_flat_lists_of_these(tmp_path, capsys):
    golds = [*(gold for gold, _ in GOLDS), *NOT_GOLDS]
    rows = [{"problem": repr(gold), "answer": gold} for gold in golds]
    problems = load_problems(write_rows(tmp_path / "golds.jsonl", rows))
    assert [(p["problem"], p["answer"]) for p in problems] == [(repr(g), t) for g, t in GOLDS]
    assert f"'without a verifiable answer': {len(NOT_GOLDS)}" in capsys.readouterr().out


def test_a_parquet_column_of_numbers_with_a_gap_holds_integers_still(tmp_path):
    rows = [{"problem": "1?", "answer": 123456.0}, {"problem": "2?", "answer": None}]
    problems = load_problems(write_rows(tmp_path / "gap.parquet", rows))
    assert problems == [{"problem": "1?", "answer": ["123456"]}]


def test_rows_with_tests_are_code_and_may_stand_beside_maths(tmp_path):
    tests = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}]
    rows = [
        {"problem": "Add one.", "tests": tests},
        {"problem": "What is 1 + 1?", "answer": "2"},
        {"problem": "Write inc(x).", "tests": tests, "func_name": "inc"},
        {"answer": "3"},
    ]
    assert load_problems(write_rows(tmp_path / "code.jsonl", rows)) == [
        {"problem": "Add one.", "tests": tests, "func_name": None},
        {"problem": "What is 1 + 1?", "answer": ["2"]},
        {"problem": "Write inc(x).", "tests": tests, "func_name": "inc"},
    ]


def test_a_byte_order_mark_and_a_line_separator_end_no_row(tmp_path):
    problem = "first\u2028second\u0085third"
    line = json.dumps({"problem": problem, "answer": "1"}, ensure_ascii=False)
    (tmp_path / "data.jsonl").write_text(f"\ufeff{line}\n\n", encoding="utf-8")
    assert load_problems(str(tmp_path / "data.jsonl")) == [{"problem": problem, "answer": ["1"]}]


def test_a_hub_id_may_name_its_configuration_and_its_split_is_taken_or_the_first(monkeypatch):
    def load_dataset(*asked, revision):
        calls.append((*asked, revision))
        return {split: [{"problem": split}] for split in ("first", "train", "test")[:size]}

    calls = []
    monkeypatch.setattr(grpo_ba, "load_dataset", load_dataset)
    for source, split, size, found in (
        ("open-r1/DAPO-Math-17k-Processed:all", "train", 3, "train"),
        ("HuggingFaceH4/aime_2024", "test", 1, "first"),
    ):
        assert grpo_ba.read_rows(source, split, "v1") == [{"problem": found}]
    assert calls == [
        ("open-r1/DAPO-Math-17k-Processed", "all", "v1"),
        ("HuggingFaceH4/aime_2024", None, "v1"),
    ]


# ----------------------------------------------------------------------------------------
# Prompts. Templates of the kind that Qwen3 and Qwen2.5-Math have, in our words.

TURNS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
)
NO_THINKING = "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
DEFAULT = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}"
QWEN3, QWEN25 = TURNS + NO_THINKING + "{% endif %}", DEFAULT + TURNS + "{% endif %}"
SPECIAL = ("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<think>", "</think>")
ASSISTANT = "<|im_start|>assistant\n"
READY = [{"role": "system", "content": "Hi."}, {"role": "user", "content": "1?"}]


def turn(role, text):
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


@pytest.mark.parametrize(
    ("template", "arguments", "expected"),
    [
        # Without thinking the block is there, and empty.
        (QWEN3, ("1?",), turn("user", f"1?\n{BOXED}") + ASSISTANT + "<think>\n\n</think>\n\n"),
        (QWEN3, ("1?", "suffix", True), turn("user", f"1?\n{BOXED}") + ASSISTANT),
        (QWEN25, ("1?", "system"), turn("system", BOXED) + turn("user", "1?") + ASSISTANT),
        (QWEN25, ("1?", "none"), turn("system", "Help.") + turn("user", "1?") + ASSISTANT),
        (QWEN3, (READY, "suffix", True), turn("system", "Hi.") + turn("user", "1?") + ASSISTANT),
    ],
)
def test_the_prompts_of_qwen3_qwen25_and_ready_messages(
    template, arguments, expected, ascii_tokenizer
):
    tokenizer = ascii_tokenizer(template, SPECIAL)
    ids = encode_prompt(tokenizer, *arguments)
    assert isinstance(ids, list) and tokenizer.decode(ids) == expected
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")  # one token, not its letters


def test_all_evaluation_sets_are_kept_out_and_the_first_is_evaluated(
    tmp_path, capsys, ascii_tokenizer
):
    other = write_rows(tmp_path / "other.jsonl", [{"question": "e", "final_answer": "not ours"}])
    sets = [
        write_texts(tmp_path / "eval.jsonl", " b", *"vwxyz"),
        write_texts(tmp_path / "c.jsonl", "c"),
    ]
    train = write_texts(tmp_path / "train.jsonl", "a", "b ", "c", "d", "e")
    config = grpo_ba.Config(
        train_data=train, eval_data=",".join([*sets, other]), eval_problems=3, instruction="none"
    )
    problems, held_out = load_task(config, ascii_tokenizer(PLAIN))
    assert [p["problem"] for p in problems] == ["a", "d"]
    assert len(held_out) == 3 and {p["problem"] for p in held_out} < set("bvwxyz")
    assert [p["problem"] for p in held_out] != ["b", "v", "w"]  # of all the file, not of its start
    assert load_task(config, ascii_tokenizer(PLAIN))[1] == held_out  # the same in a resumed run
    assert "'in an evaluation set': 3" in capsys.readouterr().out


def test_long_prompts_are_dropped_and_counted(tmp_path, capsys, ascii_tokenizer):
    x, y = (write_texts(tmp_path / f"{c}.jsonl", *(c * n for n in (9, 10, 11, 30))) for c in "xy")
    config = grpo_ba.Config(train_data=x, eval_data=y, max_prompt_tokens=10, instruction="none")
    for problems in load_task(config, ascii_tokenizer(PLAIN)):
        assert sorted(len(p["prompt_ids"]) for p in problems) == [9, 10]
    assert capsys.readouterr().out.count("prompts: 2 to train on, 2 to evaluate") == 1


def test_code_gets_no_boxed_instruction_and_needs_a_sandbox(tmp_path, ascii_tokenizer, monkeypatch):
    asked, tokenizer = [], ascii_tokenizer(PLAIN)
    monkeypatch.setattr(grpo_ba, "require_sandbox", asked.append)
    rows = [{"problem": "1?", "answer": "1"}, {"problem": "Add one.", "tests": [{"input": "1"}]}]
    for count, unsafe in ((1, False), (2, True)):
        data = write_rows(tmp_path / f"{count}.jsonl", rows[:count])
        problems, _ = load_task(
            grpo_ba.Config(train_data=data, eval_data="", unsafe_code=unsafe), tokenizer
        )
        texts = [tokenizer.decode(p["prompt_ids"]) for p in problems]
        assert texts == [f"1?\n{BOXED}", "Add one."][:count]
    assert asked == [True]  # for the file with code alone
