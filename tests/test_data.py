"""From data sets to prompts: every schema, with small files of made-up problems."""

import json
import uuid

import datasets
import pytest

import grpo_ba
from grpo_ba import BOXED, DAPO_PREFIX, DAPO_SUFFIX, encode_problems, encode_prompt, load_problems


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write_rows(folder, rows, kind="jsonl"):
    """One file of rows in one of the formats that a user may bring."""
    path = folder / f"problems.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(folder / "saved")
        next((folder / "saved").glob("*.arrow")).rename(path)
    return str(path)


def mistake(capsys, action, *args):
    """A user's mistake: exit status 2 and one sentence, which is returned."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        action(*args)
    lines = [line for line in capsys.readouterr().err.splitlines() if "%|" not in line]
    assert caught.value.code == 2 and len(lines) == 1, lines
    return lines[0]


KINDS = ["jsonl", "json", "parquet", "arrow"]

# ----------------------------------------------------------------------------------------
# Schemas


def dapo(problem, answer, whole=False):
    """A row of BytedTsinghua-SIA/DAPO-Math-17k."""
    content = problem if whole else DAPO_PREFIX + problem + DAPO_SUFFIX
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": content}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": str(uuid.uuid4())},  # differs between repetitions
    }


@pytest.mark.parametrize("kind", KINDS)
def test_raw_dapo_loses_its_instruction_its_repetitions_and_its_conflicts(kind, tmp_path, capsys):
    rows = [
        dapo("How many legs have 3 spiders?", "24"),
        dapo("What is 7 - 10?", "-3"),
        dapo("What is 2 + 2?", "4"),
        dapo("How many legs have 3 spiders?", "24"),
        dapo("What is 2 + 2?", "5"),  # one of the two is wrong, and nobody knows which
        dapo("A problem without the instruction: 1 + 1?", "2", whole=True),
        dapo("How many legs have 3 spiders?", "24"),
        dapo("What is nothing?", " "),
    ]
    assert load_problems(write_rows(tmp_path, rows, kind)) == [
        {"problem": "How many legs have 3 spiders?", "answer": "24"},
        {"problem": "What is 7 - 10?", "answer": "-3"},
        {"problem": "A problem without the instruction: 1 + 1?", "answer": "2"},
    ]
    said = capsys.readouterr().out
    assert "8 rows, 3 problems" in said
    assert "1 with conflicting answers" in said
    assert "1 without a verifiable answer" in said
    assert "3 repeated rows" in said
    assert "1 without DAPO's instruction, kept whole" in said


def test_stripping_the_instruction_eats_no_letter_of_the_problem(tmp_path):
    """str.lstrip(prefix) takes a set of characters: it would leave "12?" of the first problem."""
    problems = [
        "Solve the same: how much is 12?",
        "the line of stations has 5 stops; how many gaps are there?",
        'x is on its own after "Answer:"',
        'Remember 5, then put it on its own line. Which number was it? Answer: "5".',
    ]
    for problem in problems:
        assert problem.lstrip(DAPO_PREFIX).rstrip(DAPO_SUFFIX) != problem  # the trap is real
    path = write_rows(tmp_path, [dapo(problem, "1") for problem in problems])
    assert [row["problem"] for row in load_problems(path)] == problems


@pytest.mark.parametrize("kind", KINDS)
def test_processed_dapo_has_prompt_and_solution(kind, tmp_path):
    rows = [
        {"prompt": "What is 6 * 7?", "solution": "42", "data_source": "math_dapo",
         "reward_model": {"ground_truth": "42", "style": "rule"}},
        {"prompt": " What is 6 * 7?\n", "solution": "42", "data_source": "math_dapo",
         "reward_model": {"ground_truth": "42", "style": "rule"}},
    ]  # fmt: skip
    problems = load_problems(write_rows(tmp_path, rows, kind))
    assert problems == [{"problem": "What is 6 * 7?", "answer": "42"}]


@pytest.mark.parametrize("kind", KINDS)
def test_polaris_keeps_what_a_rule_can_check(kind, tmp_path, capsys):
    essay = (
        "Suppose not; then there is a smallest such number, and half of it is smaller still. " * 3
    )
    answers = [r"\frac{3}{4}", r"x \in [0, 1)", essay, "", "the 3rd of June", "$$", "**"]
    rows = [
        {"problem": f"Problem {i}", "answer": answer, "difficulty": "3/8"}
        for i, answer in enumerate(answers)
    ]
    problems = load_problems(write_rows(tmp_path, rows, kind))
    assert [p["answer"] for p in problems] == [answers[0], answers[1], answers[4]]
    assert problems[0].keys() == {"problem", "answer"}
    assert "4 without a verifiable answer" in capsys.readouterr().out


def test_golds_become_text_whatever_their_type(tmp_path):
    golds = [34, "034", 0, 0.5, ["1", 2], None, []]
    rows = [{"problem": f"Problem {i}", "answer": gold} for i, gold in enumerate(golds)]
    problems = load_problems(write_rows(tmp_path, rows))
    assert [p["answer"] for p in problems] == ["34", "034", "0", "0.5", ["1", "2"]]


def test_rows_with_tests_are_code_and_may_stand_beside_maths(tmp_path):
    tests = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}]
    rows = [
        {"problem": "Add one.", "tests": tests},
        {"problem": "What is 1 + 1?", "answer": "2"},
        {"problem": "Write inc(x).", "tests": tests, "func_name": "inc"},
    ]
    kind = {"input": "[1]", "output": "2", "testtype": "functional"}
    broken = ["1 -> 3", [{"input": "1", "output": "2"}], [kind], [tests[0], {}]]
    broken = [{"problem": f"Add {i}.", "tests": tests} for i, tests in enumerate(broken)]
    assert load_problems(write_rows(tmp_path, rows + broken)) == [
        {"problem": "Add one.", "tests": tests, "func_name": None},
        {"problem": "What is 1 + 1?", "answer": "2"},
        {"problem": "Write inc(x).", "tests": tests, "func_name": "inc"},
    ]


def test_a_line_separator_inside_a_problem_ends_no_row(tmp_path):
    path = tmp_path / "problems.jsonl"
    row = {"problem": "first\u2028second\u0085third", "answer": "1"}
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n\n", encoding="utf-8")
    assert load_problems(str(path)) == [row]


def test_problems_of_an_evaluation_set_are_kept_out(tmp_path, capsys):
    rows = [{"problem": p, "answer": "1"} for p in ("What  is\n1?", "What is one?", "What is 1!")]
    problems = load_problems(write_rows(tmp_path, rows), excluded={"What is 1?"})
    assert [p["problem"] for p in problems] == ["What is one?", "What is 1!"]
    assert "1 in an evaluation set" in capsys.readouterr().out


def test_a_run_keeps_all_its_evaluation_sets_out_of_training(tmp_path, capsys):
    """eval_data and every set of exclude_data; eval_problems of eval_data are evaluated on."""

    def write(name, problems):
        (tmp_path / name).mkdir()
        return write_rows(tmp_path / name, [{"problem": p, "answer": "1"} for p in problems])

    config = grpo_ba.Config(
        model="m", eval_problems=2, train_data=write("train", ["a", "b ", "c", "d", "e"]),
        eval_data=write("eval", [" b", "x", "y"]),
        exclude_data=",".join([write("other", ["c"]), write("third", ["e", "z"])]),
    )  # fmt: skip
    path, problems, held_out = grpo_ba.load_task(config)
    assert path == "m" and [p["problem"] for p in problems] == ["a", "d"]
    assert len(held_out) == 2 and {p["problem"] for p in held_out} < {"b", "x", "y"}
    assert grpo_ba.load_task(config)[2] == held_out  # the same in a resumed run
    assert "3 in an evaluation set" in capsys.readouterr().out
    config.exclude_data = "livecodebench"
    assert "livecodebench: only eval.py can run it" in mistake(capsys, grpo_ba.load_task, config)


def test_a_hub_id_may_name_its_configuration(monkeypatch):
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((*args, kwargs["split"]))
        return datasets.Dataset.from_list([{"prompt": "1?", "solution": "1"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for source in ("open-r1/DAPO-Math-17k-Processed:all", "POLARIS-Project/Polaris-Dataset-53K"):
        assert load_problems(source) == [{"problem": "1?", "answer": "1"}]
    assert asked == [
        ("open-r1/DAPO-Math-17k-Processed", "all", "train"),
        ("POLARIS-Project/Polaris-Dataset-53K", None, "train"),
    ]


def test_data_that_cannot_be_used_is_named_in_one_sentence(tmp_path, capsys):
    path = write_rows(tmp_path, [{"question": "1?", "gold": "1"}])
    line = mistake(capsys, load_problems, path)
    assert path in line and "the columns are ['gold', 'question']" in line
    path = write_rows(tmp_path, [{"problem": "1?", "answer": ""}])
    assert "no usable problem is left of 1 rows" in mistake(capsys, load_problems, path)
    (tmp_path / "torn.jsonl").write_text('{"problem": "1?", "answer": "1"}\n{"problem"')
    assert "cannot be read" in mistake(capsys, load_problems, str(tmp_path / "torn.jsonl"))
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and no more")
    assert "cannot be read" in mistake(capsys, load_problems, str(tmp_path / "torn.parquet"))
    assert "hub id that can be reached" in mistake(capsys, load_problems, "no-such/data")
    (tmp_path / "torn.jsonl").write_text('{"problem": "1?", "answer": "1"}\n\n[1]\n')
    line = mistake(capsys, load_problems, str(tmp_path / "torn.jsonl"))
    assert "line 3: not a JSON object" in line
    good = {"prompt": "1?", "solution": "1"}
    path = write_rows(tmp_path, [good, {"prompt": [{"content": "2?"}], "solution": "2"}])
    assert "the problem of row 2 is not text but [{'content'" in mistake(
        capsys, load_problems, path
    )
    for prompt in (None, [], "2?"):
        raw = {"prompt": prompt, "reward_model": {"ground_truth": "2"}}
        path = write_rows(tmp_path, [raw])
        assert "row 1 lacks DAPO-Math-17k's prompt" in mistake(capsys, load_problems, path)


def test_a_byte_order_mark_and_half_a_surrogate_do_no_harm(tmp_path, ascii_tokenizer):
    path = tmp_path / "problems.jsonl"
    text = '\ufeff{"problem": "1\\ud800?", "answer": "1"}\n'
    path.write_text(text, encoding="utf-8")
    problems = load_problems(str(path))
    assert problems == [{"problem": "1??", "answer": "1"}]


def test_a_row_may_lack_a_column_that_another_has(tmp_path, capsys):
    """As happens in .jsonl files; a column that is not needed chooses no schema."""
    rows = [
        {"problem": "1?", "answer": "1", "prompt": "x", "solution": "x"},
        {"problem": "2?"},
        {"answer": "3"},
    ]
    assert load_problems(write_rows(tmp_path, rows)) == [{"problem": "1?", "answer": "1"}]
    assert "2 without a verifiable answer" in capsys.readouterr().out


# ----------------------------------------------------------------------------------------
# Prompts. Templates of the kind that Qwen3 and Qwen2.5-Math have, in our words.

TURNS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
)
QWEN3 = TURNS + (
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
QWEN25 = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nA default.<|im_end|>\n{% endif %}"
    + TURNS
    + "{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<think>", "</think>")


def prompt_text(tokenizer, *args):
    ids = encode_prompt(tokenizer, *args)
    assert isinstance(ids, list) and all(isinstance(i, int) for i in ids)
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")  # one token, not its letters
    return tokenizer.decode(ids)


def test_the_prompt_of_qwen3(ascii_tokenizer):
    tokenizer = ascii_tokenizer(QWEN3, SPECIAL)
    start = f"<|im_start|>user\nWhat is 1?\n{BOXED}<|im_end|>\n<|im_start|>assistant\n"
    closed = start + "<think>\n\n</think>\n\n"  # no thinking: the block is there, and empty
    assert prompt_text(tokenizer, "What is 1?") == closed
    assert prompt_text(tokenizer, "What is 1?", "suffix", True) == start


def test_the_prompt_of_qwen2_5(ascii_tokenizer):
    tokenizer = ascii_tokenizer(QWEN25, SPECIAL)
    turns = "<|im_start|>user\nWhat is 1?<|im_end|>\n<|im_start|>assistant\n"
    expected = f"<|im_start|>system\n{BOXED}<|im_end|>\n{turns}"
    assert prompt_text(tokenizer, "What is 1?", "system") == expected  # and no default
    expected = f"<|im_start|>system\nA default.<|im_end|>\n{turns}"
    assert prompt_text(tokenizer, "What is 1?", "none") == expected


def test_ready_messages_are_used_as_they_are(ascii_tokenizer):
    tokenizer = ascii_tokenizer(QWEN3, SPECIAL)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1?"}]
    text = prompt_text(tokenizer, messages, "suffix", True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_boxed_instruction_is_qwens():
    assert BOXED == r"Please reason step by step, and put your final answer within \boxed{}."


def test_long_prompts_are_dropped_and_counted(ascii_tokenizer, capsys):
    tokenizer = ascii_tokenizer("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    problems = [{"problem": "x" * n, "answer": "1"} for n in (9, 10, 11, 30)]
    config = grpo_ba.Config(max_prompt_tokens=10, instruction="none")
    kept = encode_problems(problems, tokenizer, config)
    assert [len(p["prompt_ids"]) for p in kept] == [9, 10]
    assert "dropped 2 prompts of more than 10 tokens" in capsys.readouterr().out
    config = grpo_ba.Config(max_prompt_tokens=5, instruction="none")
    line = mistake(capsys, encode_problems, problems, tokenizer, config)
    assert "--max_prompt_tokens 5: no prompt is that short" in line


def test_code_gets_no_boxed_instruction(ascii_tokenizer):
    tokenizer = ascii_tokenizer("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    problems = [{"problem": "Add one.", "tests": [1]}, {"problem": "1?", "answer": "1"}]
    code, maths = encode_problems(problems, tokenizer, grpo_ba.Config())
    assert tokenizer.decode(code["prompt_ids"]) == "Add one."
    assert tokenizer.decode(maths["prompt_ids"]) == f"1?\n{BOXED}"


def test_a_tokenizer_without_chat_template_is_named(ascii_tokenizer, tmp_path, capsys):
    ascii_tokenizer(None).save_pretrained(tmp_path)
    line = mistake(capsys, grpo_ba.load_tokenizer, str(tmp_path))
    assert f"--model {tmp_path}: its tokenizer has no chat template" in line
