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

SHARED = Path(__file__).resolve().parents[2] / "shared"
VERIFY = Path(verify.__file__)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

PROGRAM = "```python\nprint(int(input()) + 1)\n```"
TESTS = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}]


def box(answer):
    return rf"so \boxed{{{answer}}}"


def reasons(verdicts):
    return [verdict.reason for verdict in verdicts]


@pytest.fixture(scope="module")
def verifier():
    with Verifier(2) as pool:
        yield pool


@pytest.fixture
def hostile_worker(tmp_path, monkeypatch):
    """A pool whose workers are ill: the answers "hang", "sleep", "die", "eat", "print", "die once"
    do in verify_math what they say. (No known answer gets that far.)"""
    script = tmp_path / "worker.py"
    flag = tmp_path / "died"
    script.write_text(
        f"""
import os, signal, sys, time
sys.path.insert(0, {str(VERIFY.parent)!r})
import verify
honest = verify.verify_math
def ill(response, gold):
    if "hang" in response:
        9 ** 9 ** 9
    if "sleep" in response:
        time.sleep(99)
    if "die" in response and ("once" not in response or not os.path.exists({str(flag)!r})):
        open({str(flag)!r}, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if "eat" in response:
        return bytearray(3 << 30)
    if "print" in response:
        print('{{"reward": 1.0}}', flush=True)
        os.write(1, b"garbage")
    return honest(response, gold)
verify.verify_math = ill
verify._serve()
"""
    )
    monkeypatch.setattr(verify, "__file__", str(script))


def test_verdicts_come_in_the_order_of_the_responses(verifier):
    golds = [str(n) for n in range(300)]
    answers = [box(n if n % 3 else "x") for n in range(300)]
    verdicts = verifier.score(answers, golds)
    assert [v.reward for v in verdicts] == [float(n % 3 > 0) for n in range(300)]


def test_a_problem_is_a_gold_a_list_of_golds_or_a_row(verifier):
    problems = ["5", ["6", "5"], {"answer": "5", "id": 3}, {"answer": ["5"], "tests": None}]
    problems += [{"tests": TESTS, "func_name": None}]
    verdicts = verifier.score([box(5)] * 4 + [PROGRAM], problems)
    assert reasons(verdicts) == ["correct"] * 5
    assert verifier.score([], []) == []


def test_the_sandbox_is_announced_once_in_one_line(capfd):
    with Verifier(1) as pool:
        for _ in range(2):
            assert reasons(pool.score([PROGRAM], [{"tests": TESTS}])) == ["correct"]
    lines = [line for line in capfd.readouterr().err.splitlines() if "sandbox" in line]
    assert len(lines) == 1
    assert "process tree" in lines[0]


def test_code_is_refused_without_the_essential_protections(monkeypatch):
    for missing in ("process tree", "resources"):
        protections = dict.fromkeys(("namespaces", "process tree", "resources", "network"), True)
        monkeypatch.setattr(
            verify, "sandbox_protections", lambda p=protections, m=missing: p | {m: False}
        )
        with Verifier(1) as pool, pytest.raises(RuntimeError, match=missing):
            pool.score([PROGRAM], [{"tests": TESTS}])
    monkeypatch.setattr(verify, "sandbox_protections", lambda: protections | {"network": False})
    with Verifier(1) as pool, pytest.warns(UserWarning, match="network"):
        pool._check_sandbox()


@pytest.mark.parametrize(
    ("response", "problem", "complaint"),
    [
        (box(5), "", "row 1: .*gold"),
        (box(5), [], "row 1: .*gold"),
        (box(5), ["5", "$$"], "row 1: .*gold"),
        (box(5), None, "row 1: .*gold"),
        (box(5), {"id": 7}, "row 1: .*gold"),
        (None, "5", "row 1: .*response"),
        (PROGRAM, {"tests": []}, "row 1: .*tests"),
        (PROGRAM, {"tests": [{"input": "1"}]}, "row 1: .*test"),
        (PROGRAM, {"tests": [{**TESTS[0], "testtype": "functional"}]}, "row 1: .*func_name"),
    ],
)
def test_bad_data_is_an_error_that_names_the_row(verifier, response, problem, complaint):
    with pytest.raises(ValueError, match=complaint):
        verifier.score([box(5), response], ["5", problem])
    assert reasons(verifier.score([box(5)], ["5"])) == ["correct"]  # and the pool lives on


def test_the_ranks_of_torchrun_share_the_cores(monkeypatch):
    alone = Verifier().num_workers
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert Verifier().num_workers == max(1, alone // 2)
    assert Verifier(3).num_workers == 3


def test_lengths_must_agree(verifier):
    with pytest.raises(ValueError, match="2 responses for 1 problem"):
        verifier.score([box(5)] * 2, ["5"])
    with pytest.raises(ValueError, match="num_workers"):
        Verifier(-1)


def test_a_hang_costs_its_deadline_and_no_more(hostile_worker):
    ignored = signal.signal(signal.SIGPROF, signal.SIG_IGN)  # a caller may
    with Verifier(2, timeout=0.5) as pool:
        pool.score([box(5)] * 2, ["5"] * 2)  # started
        begin = time.monotonic()
        verdicts = pool.score([box(5), box("hang"), box(6), box("sleep"), box(5)], ["5"] * 5)
        assert time.monotonic() - begin < 10
    signal.signal(signal.SIGPROF, ignored)
    assert reasons(verdicts) == ["correct", "timeout", "wrong", "timeout", "correct"]
    # The hang is ended by the kernel after its CPU seconds, the sleep by the parent.
    assert [verdicts[1].detail, verdicts[3].detail] == ["over 0.5 s", "over 2 s"]


def test_a_dead_worker_is_replaced_and_its_task_tried_again_once(hostile_worker):
    with Verifier(1) as pool:
        verdicts = pool.score([box("die once"), box("die"), box(5)], ["5"] * 3)
    assert reasons(verdicts) == ["wrong", "sandbox_error", "correct"]


def test_memory_is_limited(hostile_worker):
    with Verifier(1) as pool:
        verdicts = pool.score([box("eat"), box(5)], ["5"] * 2)
    assert reasons(verdicts) == ["memory_limit", "correct"]


def test_what_a_worker_prints_is_no_verdict(hostile_worker):
    with Verifier(1) as pool:
        assert reasons(pool.score([box("print 5"), box(5)], ["5"] * 2))[1] == "correct"


def test_a_worker_that_cannot_start_is_an_error_not_a_hang(tmp_path, monkeypatch):
    script = tmp_path / "worker.py"
    script.write_text("raise SystemExit(3)")
    monkeypatch.setattr(verify, "__file__", str(script))
    with Verifier(1) as pool, pytest.raises(RuntimeError, match="does not start"):
        pool.score([box(5)], ["5"])


def test_workers_are_replaced_after_a_number_of_tasks(monkeypatch):
    monkeypatch.setattr(verify, "WORKER_TASKS", 20)
    with Verifier(1) as pool:
        pool.score([box(5)] * 19, ["5"] * 19)
        first = pool.workers[0].process.pid
        assert reasons(pool.score([box(5)] * 30, ["5"] * 30)) == ["correct"] * 30
        assert pool.workers[0].process.pid != first


def test_workers_killed_between_batches_do_not_matter(verifier):
    verifier.score([box(5)] * 4, ["5"] * 4)
    for worker in verifier.workers:
        os.kill(worker.process.pid, signal.SIGKILL)
    assert reasons(verifier.score([box(5)] * 4, ["5"] * 4)) == ["correct"] * 4


def test_any_thread_may_score_and_several_at_once(verifier):
    results = {}

    def score(n):
        results[n] = verifier.score([box(n)] * 20, [str(n)] * 20)

    threads = [threading.Thread(target=score, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [reasons(results[n]) for n in range(4)] == [["correct"] * 20] * 4


def test_the_callers_alarm_and_handlers_are_untouched():
    handler = signal.signal(signal.SIGALRM, lambda *_: None)
    before = {s: signal.getsignal(s) for s in signal.valid_signals()}
    signal.setitimer(signal.ITIMER_REAL, 1000)
    try:
        with Verifier(1) as pool:
            pool.score([box("x+1"), PROGRAM], ["1+x", {"tests": TESTS}])
        assert 900 < signal.getitimer(signal.ITIMER_REAL)[0] < 1000
        assert {s: signal.getsignal(s) for s in signal.valid_signals()} == before
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def test_a_worker_neither_imports_the_callers_main_nor_holds_its_secrets(tmp_path):
    script = tmp_path / "caller.py"
    script.write_text(
        f"""
import os, sys
sys.path.insert(0, {str(VERIFY.parent)!r})
print("imported", flush=True)
from verify import Verifier
with Verifier(1) as pool:  # at the top level, without a main guard
    print(pool.score([r"\\boxed{{5}}"], ["5"]))
    print(open(f"/proc/{{pool.workers[0].process.pid}}/environ").read().count("SECRET"))
"""
    )
    environment = {**os.environ, "HF_TOKEN": "SECRET"}
    out = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert out.count("imported") == 1
    assert out.endswith("'correct', detail='')]\n0\n")


def test_nothing_is_left_behind():
    def open_files():
        return {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                if os.path.exists(f"/proc/self/fd/{fd}")}  # fmt: skip

    before, threads = open_files(), threading.active_count()
    with Verifier(2) as pool:
        pool.score([box(5), PROGRAM] * 4, ["5", {"tests": TESTS}] * 4)
        pids = [worker.process.pid for worker in pool.workers]
    assert open_files() <= before
    assert threading.active_count() == threads
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_an_idle_worker_ends_with_its_parent():
    code = f"import sys, os; sys.path.insert(0, {str(VERIFY.parent)!r}); import verify\n"
    code += "pool = verify.Verifier(1); pool.score([r'\\boxed{5}'], ['5'])\n"
    code += "print(pool.workers[0].process.pid, flush=True); os._exit(0)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for _ in range(100):
        if not os.path.exists(f"/proc/{int(out.stdout)}"):
            break
        time.sleep(0.1)
    else:
        pytest.fail("the worker outlived its parent")


# ---- the command line ----------------------------------------------------------------------


def run(*args):
    command = [sys.executable, VERIFY, *args]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_scores_a_file(tmp_path):
    rows = [
        {"response": box(5), "answer": "5", "correct": True, "id": "a"},
        {"response": box(6), "answer": ["5", "7"], "correct": True},
        {"response": "none", "answer": "5", "correct": None},
        {"response": PROGRAM, "tests": TESTS, "func_name": None, "passed": True},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    result = run(path, "--workers", "1")
    assert result.returncode == 0, result.stderr
    scored = [json.loads(line) for line in (tmp_path / "rows.scored.jsonl").open()]
    assert [row["reason"] for row in scored] == ["correct", "wrong", "no_answer", "correct"]
    assert [{k: row[k] for k in given} for row, given in zip(scored, rows)] == rows
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rows.jsonl", "rows.scored.jsonl"]
    assert "accuracy 0.5000" in result.stdout
    assert "agrees with the label in 2 of 3" in result.stdout
    assert re.search(r"line 3: label True, wrong", result.stdout)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: not a JSON object"),
        ('{"answer": "5"}', 'line 2: "response"'),
        ('{"response": 5, "answer": "5"}', 'line 2: "response"'),
        ('{"response": "x"}', 'line 2: neither "answer" nor "tests"'),
        ('{"response": "x", "answer": ""}', "line 2: .*gold"),
        ('{"response": "x", "answer": 5}', "line 2: .*gold"),
        ('{"response": "```\\n1\\n```", "tests": [{}]}', "line 2: .*test"),
        ('{"response": "x", "tests": []}', "line 2: .*tests"),
    ],
)
def test_a_bad_line_is_reported_with_its_number(tmp_path, line, complaint):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"response": box(5), "answer": "5"}) + "\n" + line + "\n")
    result = run(path)
    assert result.returncode == 2
    assert re.search(complaint, result.stderr), result.stderr
    assert "Traceback" not in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["rows.jsonl"]


def test_the_users_mistakes_are_one_sentence(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    for args in ([tmp_path / "none.jsonl"], [tmp_path / "empty.jsonl"], [tmp_path], [VERIFY]):
        result = run(*args)
        assert result.returncode == 2
        assert len(result.stderr.splitlines()) == 1, result.stderr
    for option in ("--workers", "--timeout", "--code-timeout"):
        assert run(tmp_path / "empty.jsonl", option, "0").returncode == 2
    assert "LiveCodeBench" in run("--help").stdout


def test_ctrl_c_ends_the_batch_and_its_workers(tmp_path):
    script = tmp_path / "caller.py"
    script.write_text(
        f"""
import os, signal, sys, threading
sys.path.insert(0, {str(VERIFY.parent)!r})
from verify import Verifier
with Verifier(1) as pool:
    pool.score([r"\\boxed{{5}}"], ["5"])
    print(pool.workers[0].process.pid, flush=True)
    threading.Timer(1, os.killpg, (0, signal.SIGINT)).start()
    program = "```python\\nwhile True: pass\\n```"
    pool.score([program], [{{"tests": [{{"input": "", "output": "", "testtype": "stdin"}}]}}])
"""
    )
    result = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
        timeout=60,
    )
    assert result.stderr.rstrip().endswith("KeyboardInterrupt")
    assert result.stderr.count("Traceback") == 1
    assert not os.path.exists(f"/proc/{int(result.stdout)}")


@pytest.mark.skipif(not SHARED.exists(), reason="needs the shared cases")
def test_the_labelled_programs_come_out_as_labelled(tmp_path):
    path = tmp_path / "code_cases.jsonl"
    path.write_text((SHARED / "cases/code_cases.jsonl").read_text())
    result = run("--code-timeout", "2", path)
    assert re.search(r"agrees with the label in (\d+) of \1\n", result.stdout), result.stdout
