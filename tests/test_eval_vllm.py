"""eval.py with real vLLM (on CPU or GPU); skipped where vLLM is not installed."""

import pytest

pytest.importorskip("vllm")

from test_eval_sampling import TORCHRUN, read, start


def run(out, engine, script=()):
    """In a process of its own: vLLM keeps its engine and its groups until the end."""
    process = start(out, f"--limit 40 --engine {engine}", script)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0 and "Traceback" not in output, output
    return read(out)


def test_vllm_scores_as_transformers_does_and_resumes_on_two_ranks(tmp_path):
    """Other random numbers, same policy: the scores differ by no more than they vary."""
    (a, rows, _), (b, _, _) = run(tmp_path / "a", "vllm"), run(tmp_path / "b", "transformers")
    assert 0 < a["avg@k"] < 100
    assert abs(a["avg@k"] - b["avg@k"]) < 4 * (a["s.e."] ** 2 + b["s.e."] ** 2) ** 0.5
    assert abs(a["tokens"] - b["tokens"]) < 0.3 * b["tokens"]
    assert all(row["tokens"] == 40 for row in rows.values() if row["truncated"])
    path = tmp_path / "a/eval/samples.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:57]) + lines[57][:30])
    assert run(tmp_path / "a", "vllm", TORCHRUN) == (a, rows, len(rows))
