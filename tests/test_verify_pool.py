"""The worker pool and the command line: deadlines, deaths, threads, and nothing left behind."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import verify
from verify import Verifier

VERIFY = Path(verify.__file__)
ILL = f"""
import os, sys, time
sys.path.insert(0, {str(VERIFY.parent)!r})
import verify
honest = verify.verify_math
verify.verify_math = lambda text, gold: exec(text[1:]) if text[0] == "!" else honest(text, gold)
verify.serve()
"""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def score(pool, texts, gold="5"):
    return [v.reason for v in pool.score(texts, [{"answer": gold}] * len(texts))]


@pytest.fixture
def worker_script(tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "__file__", str(tmp_path / "worker.py"))
    (tmp_path / "worker.py").write_text(ILL)
    return tmp_path / "worker.py"


CRIMES = "9 ** 9 ** 9; time.sleep(99); os.kill(os.getpid(), 9); os._exit(0); bytearray(3 << 30)"
FORGED = """print('{"reward": 1.0, "reason": "correct"}', flush=True)"""
ENDS = {"!" + crime: "timeout" for crime in [FORGED, *CRIMES.split("; ")]}
ENDS |= {"none": "no_answer", r"\boxed{6}": "wrong"}


def test_attacks_and_crashes_are_timeouts_and_cost_the_others_nothing(worker_script):
    asked = [text for crime in ENDS for text in (crime, r"\boxed{5}")]
    with Verifier(1, timeout=0.5) as pool:
        assert score(pool, asked) == [ENDS.get(text, "correct") for text in asked]
        (worker,) = pool.workers.values()
        time.sleep(0.7)  # an idle one has no deadline
        assert worker.poll() is None
        worker.kill()
        time.sleep(0.1)
        assert score(pool, [r"\boxed{5}"]) == ["correct"]
    worker_script.write_text("raise SystemExit(3)")
    with Verifier(2) as pool, pytest.raises(RuntimeError, match="does not start"):
        score(pool, [r"\boxed{5}"] * 9)


@pytest.mark.parametrize("problem", [{"answer": None}, {"answer": ""}, {}, {"tests": []}])
def test_an_unusable_problem_is_a_value_error_of_the_callers(problem):
    with Verifier(1) as pool:
        with pytest.raises(ValueError, match="gold|tests"):
            pool.score([r"\boxed{5}"] * 2, [{"answer": "5"}, problem])
        with pytest.raises(ValueError, match="shorter"):
            pool.score([r"\boxed{5}"], [])
        assert pool.score([], []) == [] and not pool.workers


def test_any_thread_may_score_in_order_and_nothing_of_the_callers_changes(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")  # ranks share the cores: one worker each
    handlers = {s: signal.getsignal(s) for s in signal.valid_signals()}
    Verifier(1).score([], [])  # tqdm keeps a thread of its own
    found, before = {}, (threading.active_count(), signal.setitimer(signal.ITIMER_REAL, 1000))
    with Verifier() as pool:
        ask = [
            lambda n=n: found.update({n: score(pool, [rf"\boxed{{{n}}}", "7"], n)})
            for n in range(3)
        ]
        threads = [threading.Thread(target=function) for function in ask]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        (worker,) = pool.workers.values()
        assert "torch" not in Path(f"/proc/{worker.pid}/maps").read_text()
    assert found == {n: ["correct", "no_answer"] for n in range(3)}
    assert 900 < signal.setitimer(signal.ITIMER_REAL, 0)[0] < 1000
    until = time.monotonic() + 10  # a cancelled timer's thread takes a moment to end
    while threading.active_count() > before[0] and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() == before[0]
    assert {s: signal.getsignal(s) for s in signal.valid_signals()} == handlers


CALLER = f"""
import os, signal, sys, threading
sys.path.insert(0, {str(VERIFY.parent)!r})
print("imported", flush=True)
import verify
verify.__file__ = sys.argv[2]
with verify.Verifier(1, timeout=99) as pool:  # at the top level, without a main guard
    pool.score([r"\\boxed{{5}}"], [{{"answer": "5"}}])
    print(*[worker.pid for worker in pool.workers.values()], flush=True)
    end = (os.killpg, (0, signal.SIGINT)) if sys.argv[1] == "interrupt" else (os._exit, (0,))
    threading.Timer(0.5, *end).start()
    pool.score(["!time.sleep(99)"] * 9, [{{"answer": "5"}}] * 9)
"""


@pytest.mark.parametrize("end", ["interrupt", "exit"])
def test_busy_workers_end_with_their_caller_and_import_no_main(end, worker_script):
    command = [sys.executable, "-c", CALLER, end, worker_script]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, start_new_session=True, timeout=60
    )
    imported, worker = done.stdout.split()
    for _ in range(50):  # who reaps orphans may be slow
        time.sleep(0.1 * os.path.exists(f"/proc/{worker}"))
    assert imported == "imported" and not os.path.exists(f"/proc/{worker}")
    assert done.stderr.count("Traceback") == done.stderr.count("KeyboardInterrupt\n")
    assert done.stderr.count("Traceback") == (end == "interrupt")


TESTS = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}]


def test_the_command_scores_a_file(tmp_path):
    rows = [{"response": r"\boxed{6}", "answer": a} for a in ("6", ["5", "7"])]
    rows += [{"response": "none", "answer": 5}, {"response": "```\nprint(2)\n```", "tests": TESTS}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    command = [sys.executable, VERIFY, tmp_path / "rows.jsonl", "--unsafe_code"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    scored = [json.loads(line) for line in (tmp_path / "rows.scored.jsonl").open()]
    assert [row["reason"] for row in scored] == ["correct", "wrong", "no_answer", "correct"]
    assert [{k: row[k] for k in given} for row, given in zip(scored, rows)] == rows
    assert result.stderr.count("without a sandbox") == 1
    assert re.search(r"correct +2 +50.0%", result.stdout) and "accuracy 0.5000" in result.stdout


BAD = ["{", "[1]", "5", '{"answer": "5"}', '{"response": 5, "answer": "5"}', '{"response": "x"}',
       '{"response": "x", "answer": ""}', '{"response": "x", "tests": [{}]}', None]  # fmt: skip


@pytest.mark.parametrize("line", BAD)
def test_bad_rows_and_files_are_one_sentence(tmp_path, line, monkeypatch, capsys):
    if line:
        (tmp_path / "rows.jsonl").write_text('{"response": "x", "answer": "5"}\n' + line)
    monkeypatch.setattr(sys, "argv", ["verify.py", str(tmp_path / "rows.jsonl")])
    with pytest.raises(SystemExit) as end:
        verify.main()
    (sentence,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and ("line 2" in sentence or not line)
    assert len(list(tmp_path.iterdir())) == bool(line)
