"""The sandbox: attacks, verdicts, failures of its own, Ctrl-C, E2B without a network, the rewards.

The programs lie in tests/programs/, see read_cases().
"""

import ast
import contextlib
import ctypes
import functools
import http.server
import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
import types
import typing
from pathlib import Path

import pytest
from conftest import run

import sandbox
from jail import inside, wire

ROOT = Path(__file__).resolve().parent.parent
VALUE = ["assert f(1) == 2", "assert f(5) == 6"]
BY_LOOP = ["for y in [2]:\n    assert f(1) == y", "for y in [6]:\n    assert f(5) == y"]
PASS = ["pass"] * 2
GOOD = "def f(x):\n    return x + 1\n"
HEADER = re.compile(r"# (must|without namespaces|hole|options|with|value of): ?(.*)\n")


class Case(typing.NamedTuple):
    program: str
    tests: list
    must: list  # verdicts of the tests; a single one holds for all
    without: list  # the same where there are no namespaces
    options: dict  # of run_tests
    hole: str  # why the verdict is another one: a hole that is known


@functools.cache
def sections(group):
    """{name: (what stands before a program, the rest)} of tests/programs/GROUP.txt."""
    found = {}
    text = (ROOT / "tests" / "programs" / f"{group}.txt").read_text("utf-8")
    parts = re.split(r"^==== (.*)\n", text, flags=re.M)
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        said = {"must": "any"}
        while header := HEADER.match(body):
            said[header[1]] = header[2]
            body = body[header.end() :]
        found[name] = said, body
    return found


def prelude(name):
    """A program, or the beginning of one, of tests/programs/preludes.txt."""
    said, text = sections("preludes")[name]
    return prelude(said["with"]) + text if "with" in said else text


def read_cases(group, **names):
    """{name: Case} of tests/programs/GROUP.txt.

    "==== name" begins a program, "----" one of its tests. Lines before the program say what must
    happen: "# must: fail". "---- must: fail" does so for a test, and "---- = Probe('f(1)')" is a
    test that is the value of an expression, in which `names` are known, too.
    """
    cases = {}
    scope = vars(sandbox) | names
    for name, (said, body) in sections(group).items():
        program, *marks = re.split(r"^----(.*)\n", body, flags=re.M)
        if "value of" in said:
            program = eval(program)
        if "with" in said:
            program = prelude(said["with"]) + program
        tests = []
        must = []
        for mark, test in zip(marks[::2], marks[1::2], strict=True):
            word = re.match(r" must: ([a-z ]+)", mark)
            must.append(word[1].strip() if word else said["must"])
            expression = mark.partition(" = ")[2]
            tests.append(eval(expression, scope) if expression else test.removesuffix("\n"))
        cases[name] = Case(
            program=program,
            tests=tests,
            must=must or said["must"].split(", "),
            without=said.get("without namespaces", "").split(", "),
            options=eval(f"dict({said.get('options', '')})"),
            hole=said.get("hole", ""),
        )
    return cases


ATTACKS = read_cases("attacks")
FORGERIES = read_cases("forgeries")
JUDGED = FORGERIES["right"].tests
# Kinds of attacks that the layers stop: processes, files, network, signals, the kernel. The others
# need none of them.
KINDS = "1 2 8 9 10 11 12 13 22 23 24 26 27".split()
WALLS = [name for name in ATTACKS if name.split()[0] in KINDS]


def children(pid="self"):
    """Process ids of the children of a process; this one adopts orphans (see `closed`)."""
    found = set()
    for task in Path(f"/proc/{pid}/task").glob("*"):
        # a thread that has just ended
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found |= {*map(int, (task / "children").read_text().split())}
    return found


def descendants(pid):
    """Process ids of the children of a process, of theirs, and so on."""
    found = children(pid)
    return found.union(*map(descendants, found))


def alive(pid):
    """Whether a process runs; a zombie, which nobody has waited for yet, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition, seconds=60):
    """Return as soon as a condition holds; fails if it does not in that time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def gone(pids):
    """Whether processes have ended, or do within a second. Reaps them."""
    for pid in pids:
        deadline = time.monotonic() + 1
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
    return True


@pytest.fixture(scope="session")
def layers():
    """Without these, the attacks below are not for this machine."""
    try:
        found = sandbox.layers()
    except sandbox.SandboxError as error:
        pytest.fail(f"no sandbox: {error}")
    if not (found["seccomp"] and (found["namespaces"] or found["landlock"])):
        pytest.skip("no program can be confined: no seccomp, or neither namespaces nor Landlock")
    program = "import os\ntry:\n    os.fork()\nexcept OSError:\n    refused = True"
    (result,) = sandbox.run_tests([program], [["assert refused"]])
    assert result.rate == 1, "seccomp refuses no fork: no fork bombs here"
    return found


@pytest.fixture
def closed(layers, tmp_path, monkeypatch):
    """A victim outside the sandbox; afterwards it is as it was, and no process, file or connection
    is left.

    fill(program) puts its addresses into an attack.
    """
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become our children
    victim, scratch = tmp_path / "victim", tmp_path / "scratch"
    victim.mkdir()
    scratch.mkdir()
    (victim / "secret.txt").write_text("the secret")
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    monkeypatch.setenv("UNMASK_KEY", "the key")
    tcp = socket.create_server(("127.0.0.1", 0))
    port = tcp.getsockname()[1]
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", port))
    name = f"unmask-{os.getpid()}-{port}"
    abstract = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    abstract.bind("\0" + name)
    stream = socket.socket(socket.AF_UNIX)
    stream.bind(str(victim / "socket"))
    stream.listen()
    addresses = {"VICTIM": victim, "PORT": port, "SOCKET": name, "TRAINER": os.getpid()}

    def state():
        rows = []
        for path in [victim, *sorted(victim.rglob("*"))]:
            text = path.read_text() if path.is_file() else ""
            rows.append((path, *path.lstat()[:7], path.lstat().st_mtime, text))
        return rows

    def fill(program):
        for placeholder, address in addresses.items():
            program = program.replace(placeholder, str(address))
        return program

    before, ours = state(), children()
    priority, processors = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0)
    yield fill
    assert state() == before
    assert gone(children() - ours)
    assert not list(scratch.iterdir())
    assert (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0)) == (priority, processors)
    for path in ("/tmp/unmask-attack", "/etc/unmask-attack", "/root/unmask-attack"):
        try:
            assert not os.path.exists(path)
        except PermissionError:
            continue
    for listening in (tcp, udp, abstract, stream):
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            listening.recv(1) if listening.type == socket.SOCK_DGRAM else listening.accept()
        listening.close()


# ---- attacks -------------------------------------------------------------------------------------
def run_cases(cases, tests=None, fill=str, **options):
    """{name: Result}; every program runs with its own options, and its own tests or these."""
    alike = {}
    for name, case in cases.items():
        alike.setdefault(repr(case.options), []).append(name)
    found = {}
    for names in alike.values():
        results = sandbox.run_tests(
            [fill(cases[name].program) for name in names],
            [tests or cases[name].tests for name in names],
            **options | cases[names[0]].options,
        )
        found |= zip(names, results, strict=True)
    return found


def as_must(must, verdict):
    if must == "not pass":
        return verdict != "pass"
    return must in ("any", verdict)


def differing(cases, results, namespaces=True):
    """{name: Result} where the verdicts are not what must happen."""
    found = {}
    for name, result in results.items():
        must = cases[name].must
        if not namespaces and cases[name].without[0]:
            must = cases[name].without
        if len(must) == 1:
            must = must * len(result.verdicts)
        if not result.verdicts or not all(map(as_must, must, result.verdicts)):
            found[name] = result
    return found


def attacks_that_differ(cases, closed, tests=VALUE, namespaces=True):
    """A third of a second is little on a busy machine: what came out wrong runs once more."""
    for timeout_s in (0.3, 10):
        limits = {"timeout_s": timeout_s, "memory_mb": 256, "workers": 2}
        results = run_cases(cases, tests, closed, **limits)
        wrong = differing(cases, results, namespaces)
        cases = {name: cases[name] for name in wrong}
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_attack(name, closed, layers):
    started = time.perf_counter()
    wrong = attacks_that_differ({name: ATTACKS[name]}, closed, namespaces=layers["namespaces"])
    assert not wrong
    assert time.perf_counter() - started < 6  # two tests of half a second, a busy machine


def slow(*values):
    """Parameters of a test that are left out of the quick run."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


QUICK = "all layers, one half", "all layers, the other half", "no namespaces", "judge"


@pytest.mark.parametrize("mode", [*QUICK, *slow("no namespaces, all attacks", "no Landlock")])
def test_attacks(mode, closed, layers, monkeypatch):
    chosen = [*ATTACKS]
    if mode.startswith("all layers"):
        chosen = chosen["other" in mode :: 2]
    tests = VALUE
    namespaces = layers["namespaces"]
    if mode.startswith("no namespaces"):
        if not layers["landlock"]:
            pytest.skip("this machine has no Landlock")
        namespaces = False
        monkeypatch.setattr(sandbox, "layers", lambda: layers | {"namespaces": False})
        if mode == "no namespaces":
            chosen = WALLS
    elif mode == "no Landlock":
        if not namespaces:
            pytest.skip("this machine allows no namespaces")
        monkeypatch.setattr(sandbox, "JAIL", changed({"landlock >= 3": "landlock >= 99"}))
    elif mode == "judge":
        chosen = [name for name in ATTACKS if name[:2] in "14 15 16 17 18 19 20 25".split()]
        tests = BY_LOOP
    cases = {name: ATTACKS[name] for name in chosen}
    assert not attacks_that_differ(cases, closed, tests, namespaces)


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as an ordinary user already")
@pytest.mark.parametrize("everything", [False, *slow(True)])
def test_attacks_as_an_ordinary_user_where_the_tests_run_as_root(closed, everything):
    """As user 65534, by an interpreter that it can read; hangs and memory are left to the others.

    Not everything: the attacks that the layers stop, where there are no namespaces. Everything:
    all, and forgeries.
    """
    pythons = [os.path.realpath(sys.executable), "/usr/bin/python3"]
    readable = [path for path in pythons if not path.startswith("/root") and os.path.exists(path)]
    if not readable or not shutil.which("setpriv"):
        pytest.skip("no interpreter that another user can read, or no setpriv")
    chosen = {}
    for name, case in ATTACKS.items():
        plain = case.must in (["fail"], ["pass"]) and name[:2] not in ("24", "25", "21")
        if plain and (everything or name in WALLS):
            chosen[name] = case
    forgeries = FORGERIES if everything else {}
    job = [(closed(case.program), VALUE) for case in chosen.values()]
    job += [(case.program, JUDGED[:5]) for case in forgeries.values()]
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o777)
        shutil.copy(ROOT / "sandbox.py", folder)
        shutil.copytree(ROOT / "jail", f"{folder}/jail")
        command = [*user, readable[0], "-B", "-c", prelude("ORDINARY")]
        given = json.dumps([job, [True, False] if everything else [False]])
        where = {"cwd": folder, "env": {"PATH": os.environ["PATH"], "TMPDIR": folder}}
        done = subprocess.run(command, input=given, capture_output=True, text=True, **where)
        left = {path.name for path in Path(folder).iterdir()}
    if done.returncode in (77, 127):
        pytest.skip("no Landlock, or no right to become another user")
    assert done.returncode == 0, done.stderr
    assert left == {"sandbox.py", "jail"}
    lines = done.stdout.splitlines()
    assert lines
    for number, line in enumerate(lines):
        uid, rows = json.loads(line)
        assert uid == 65534
        results = [sandbox.Result(*row) for row in rows]
        namespaces = len(lines) == 2 and number == 1
        found = dict(zip(chosen, results, strict=False))
        assert not differing(chosen, found, namespaces)
        forged = dict(zip(forgeries, results[len(chosen) :], strict=True))
        assert not differing(forgeries, forged)


# ---- forged passes -------------------------------------------------------------------------------
# what a machine may lack: replacements in the launcher; the first is a switch of layers()
WITHOUT = {
    "nothing": {},
    "namespaces": {},
    "Landlock": {"landlock >= 3": "landlock >= 99"},
    "seccomp": {"refused == 14": "refused == 99"},
    "any of them": {"landlock >= 3": "landlock >= 99", "refused == 14": "refused == 99"},
}


def changed(replacements):
    """sandbox.JAIL with other text in jail/inside.py."""
    text = sandbox.JAIL["inside"]
    for old, new in replacements.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    return sandbox.JAIL | {"inside": text}


@pytest.mark.parametrize(
    ("without", "tests"),
    [
        ("nothing", JUDGED[::3]),
        *(pytest.param(name, JUDGED, marks=pytest.mark.slow) for name in WITHOUT),
    ],
    ids=["nothing, some tests", *WITHOUT],
)
def test_no_forgery_passes_whatever_the_machine_lacks(without, tests, layers, monkeypatch):
    if without in ("namespaces", "any of them"):
        monkeypatch.setattr(sandbox, "layers", lambda: layers | {"namespaces": False})
    monkeypatch.setattr(sandbox, "JAIL", changed(WITHOUT[without]))
    results = run_cases(FORGERIES, tests, allow_unsafe=True, workers=2)
    assert not differing(FORGERIES, results)


def filtered(program, machine, call, *args):
    """What a seccomp filter returns for a system call: the few operations of the kernel's machine
    that it uses.
    """
    data = struct.pack("iIQ6Q", call, inside.MACHINES[machine][1], 0, *args, *[0] * (6 - len(args)))
    rows, at, held = list(struct.iter_unpack("HBBI", program)), 0, 0
    while True:
        operation, true, false, operand = rows[at]
        at += 1
        if operation == 0x06:
            return operand
        if operation == 0x20:
            held = int.from_bytes(data[operand : operand + 4], "little")
        else:
            compared = {0x15: held == operand, 0x35: held >= operand, 0x45: held & operand}
            at += true if compared[operation] else false


@pytest.mark.parametrize("machine", inside.MACHINES)
def test_the_filter_of_system_calls_allows_these_and_no_others(machine):
    allow, unknown, kill = 0x7FFF0000, 0x50026, 0x80000000
    column = inside.MACHINES[machine][0]
    number = {name: row[column] for name, row in inside.ALLOWED.items()}
    limited = {number[name] for name in (*inside.ARGUMENT, "clone")}
    allowed = {*number.values()} - limited - {None}
    listed = {"fcntl": (1, (8, 10, 15, 1024, 1026)), "ioctl": (1, (0x40086602, 0x5412))}
    listed["prctl"] = (0, (22, 4, 36))
    for threads, namespaces in itertools.product((False, True), (False, True)):
        code = inside.call_filter(machine, threads, namespaces)
        ask = functools.partial(filtered, code, machine)
        for call in {*range(500), 0x40000000, 0x40000000 + 59, -1} - limited:
            assert ask(call) == (allow if call in allowed else unknown), call
        for name, (i, wrong) in listed.items():
            for value in (*inside.ARGUMENT[name][1], *wrong):
                want = unknown if value in wrong else allow
                assert ask(number[name], *[0] * i, value) == want, (name, value)
        clone = [ask(number["clone"], flags) for flags in (0x3D0F00, 17, 0)]
        assert clone == [allow if threads else unknown, unknown, unknown]
        pairs = [ask(number["socketpair"], domain, 1, 0) for domain in (1, 2)]
        assert pairs == [allow if namespaces else unknown, unknown]
        nameless = [ask(number["openat"], 0, 0, flags) for flags in (2, 0x410002)]
        assert nameless == [allow, allow if namespaces else unknown]
    (other,) = {*inside.MACHINES} - {machine}
    assert filtered(code, other, 0) == kill


HEADERS = ["/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm-generic/unistd.h"]


@pytest.mark.parametrize("column", [0, 1])
def test_numbers_of_system_calls_are_those_of_the_kernel_headers(column):
    if not Path(HEADERS[column]).exists():
        pytest.skip("no kernel headers")
    text = Path(HEADERS[column]).read_text()
    numbers = {name: int(n) for name, n in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)}
    numbers.setdefault("newfstatat", numbers.get("fstatat"))
    calls = inside.ALLOWED
    ours = {name: row[column] for name, row in calls.items() if row[column] is not None}
    assert ours == {name: numbers.get(name) for name in ours}
    missing = {name for name, row in calls.items() if row[column] is None} & numbers.keys()
    assert not missing, "allowed on the other machine only"
    assert [*inside.MACHINES.values()][column][2] == numbers["capset"]


# ---- verdicts ------------------------------------------------------------------------------------
@pytest.mark.parametrize("group", ["verdicts", "trusted", "honest", "plain", "hostile"])
def test_verdicts(group, closed, layers):
    if group in ("honest", "plain") and not layers["namespaces"]:
        pytest.skip("asyncio and folders need namespaces")
    cases = read_cases(group)
    if not importlib.util.find_spec("numpy"):
        cases = {name: case for name, case in cases.items() if "numpy" not in str(case)}
    began_s = time.process_time()
    results = run_cases(cases, timeout_s=1 if group == "hostile" else 5)
    assert time.process_time() - began_s < 8, "a value holds up this process"
    assert not differing(cases, results, layers["namespaces"])
    if group == "plain":  # and so they do without a sandbox
        pairs = [(case.program, case.tests[0]) for case in cases.values()]
        command = [sys.executable, "-c", prelude("PLAIN")]
        done = subprocess.run(command, input=json.dumps(pairs), text=True, capture_output=True)
        assert done.stdout == "0" * len(pairs), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", read_cases("hostile"))
def test_no_value_holds_up_the_trainer(name, layers):
    cases = {name: read_cases("hostile")[name]}
    started = time.monotonic()
    assert not differing(cases, run_cases(cases, timeout_s=2))
    assert time.monotonic() - started < 8  # the limit on the clock is three times as long


def test_what_calls_return_comes_back_to_the_first_that_raises_or_is_late(closed):
    spin = "import time\nend = time.process_time() + {}\ndef f(x):\n"
    spin += "    while x == 2 and time.process_time() < end: pass\n    return {{x}}, iter([])\n"
    programs = [spin.format(9), spin.format(0.1), "def f(x):\n    return 1 / (x - 3)\n", ""]
    programs.append("class f:\n  def __init__(self, x): pass")
    test = sandbox.Calls("f", [[1], [2], [3]], [1.0] * 3, 4.0)
    late, good, raising, missing, objects = sandbox.run_tests(programs, [[test]] * 5)
    found = [result.verdicts[0] for result in (late, good, raising, missing, objects)]
    assert found == ["timeout", "pass", "fail", "fail", "pass"]
    assert [value[0] for value, _ in late.values[0]] == [{1}]
    assert [value[0] for value, _ in good.values[0]] == [{1}, {2}, {3}]
    assert all(isinstance(value[1], sandbox.values.Opaque) for value, _ in good.values[0])
    assert 0.05 < good.values[0][1][1] < 0.3
    assert [value for value, _ in raising.values[0]] == [-0.5, -1]
    assert missing.values == [[]]
    assert {type(value) for value, _ in objects.values[0]} == {sandbox.values.Opaque}


def test_the_limit_of_a_call_is_three_times_as_long_on_the_clock(closed):
    program = "import time\ndef f(x): time.sleep(20 * (x == 3))"
    test = sandbox.Calls("f", [[1], [2], [3]], [0.2] * 3, 9.0)
    (result,) = sandbox.run_tests([program], [[test]])
    assert (result.verdicts, len(result.values[0])) == (["timeout"], 2)


def test_calls_without_inputs_of_much_output_and_of_little_time_in_all(closed):
    test = sandbox.Calls("f", [[1], [2], [3]], [1.0] * 3, 4.0)
    spin = "import time\ndef f(x):\n    end = time.process_time() + 0.5\n"
    spin += "    while time.process_time() < end: pass\n"
    for program, changes, verdict in (
        (GOOD, {"inputs": [], "limits": []}, "pass"),
        ("1 / 0", {"inputs": [], "limits": []}, "fail"),
        ("def f(x): return 'x' * 1000", {"most": 900}, "output limit"),
        (spin, {"limits": [9.0] * 3, "timeout_s": 0.2}, "timeout"),
    ):
        (result,) = sandbox.run_tests([program], [[test._replace(**changes)]], timeout_s=9)
        assert result.verdicts == [verdict], program


def test_programs_read_standard_input_and_what_they_print_comes_back(closed):
    cases = read_cases("readers")
    tests = [sandbox.Stdin("1 2\n"), sandbox.Stdin("3 4")]
    results = run_cases(cases, tests, threads=True, main_block=False)
    for name, case in cases.items():
        if case.must == ["pass"]:
            assert results[name].values == [ast.literal_eval(line) for line in case.tests], name
    assert not differing(cases, results)
    programs = ["x = input()\nwhile x == '1 2': pass", "while True: print('x' * 1000)"]
    cases = [tests, [tests[0]._replace(most=10**5)]]
    results = sandbox.run_tests(programs, cases, timeout_s=0.3)
    assert [result.verdicts for result in results] == [["timeout"] * 2, ["output limit"]]


def test_carriage_returns_are_read_and_printed_as_they_are(closed):
    program = "import sys\nprint(repr(input()), repr(sys.stdin.read()), 'a\\rb\\r\\nc', end='\\r')"
    (result,) = sandbox.run_tests([program], [[sandbox.Stdin("x\r\ny\rz\n")]])
    assert result.values == ["'x\\r' 'y\\rz\\n' a\rb\r\nc\r"]


ENDLESS = '{"r": ["builtins.range", 0, 1000000000, 1]}'
BAD_FORMS = [  # a value that memory would not hold, from a short line
    *(f'{{"r": ["collections.{name}", {ENDLESS}]}}' for name in ("deque", "Counter")),
    *(f'{{"r": ["builtins.dict_{name}", {ENDLESS}]}}' for name in ("keys", "values", "items")),
    "9" * 60_000,
    '{"t":[' * 50_000 + "]}" * 50_000,
    "[" * 60_000,
    *(line for line in prelude("BAD FORMS").splitlines()),
]


def test_a_forged_form_is_refused_whatever_it_holds(tmp_path):
    """By the judge, which catches whatever is raised; what is no error is no other value than it
    says.
    """
    ran = json.dumps({"r": ["os.system", f"touch {tmp_path}/ran"]})
    for answer in ["", *BAD_FORMS, ran]:
        try:
            value = wire.unwire(json.loads(answer))
        except Exception:
            continue
        assert value != {1: [2]}, answer[:40]
    assert not [*tmp_path.iterdir()]
    assert wire.unwire(json.loads('{"d": [[{"i": "1"}, [{"i": "2"}]]]}')) == {1: [2]}


def test_what_a_failed_assert_got_comes_back(closed):
    asked = "f(1) == 2", "f(2.5) == 0", "f(1) > 3", "f('a') == 'b'", "g(3) == 9"
    tests = [f"assert {condition}" for condition in asked]
    (result,) = sandbox.run_tests([GOOD + "def g(x):\n    return [{x}, None]"], [tests])
    assert result.verdicts == ["pass", "fail", "fail", "fail", "fail"]
    error = 'TypeError: can only concatenate str (not "int") to str'
    assert result.values == [None, "3.5", "2", error, "[{3}, None]"]


def test_what_ended_a_test_or_its_program_comes_back(closed):
    programs = [
        GOOD,
        "class Wrong(Exception):\n    def __str__(self): return 'so'\ndef f(x): raise Wrong(x)",
        "def f(x):\n    return x +",
        "raise KeyError('\x1b[2J')",
        "import sys\nsys.exit(3)",
    ]
    tests = ["assert f(1) = 2", "assert g(1) == 2", "f(1)\nassert False, 'said'"]
    results = sandbox.run_tests(programs, [tests] * 5)
    assert [result.rate for result in results] == [0] * 5
    good, raising, broken, loading, leaving = [result.values for result in results]
    assert good[0].startswith("SyntaxError: ")
    assert good[1:] == ["NameError: name 'g' is not defined", None]
    assert raising[1:] == ["NameError: name 'g' is not defined", "Wrong: so"]
    assert broken == ["SyntaxError: invalid syntax (<program>, line 2)"] * 3
    assert loading == ["KeyError: '\\x1b[2J'"] * 3
    assert leaving == ["SystemExit: 3"] * 3


def test_rates_of_several_programs_and_results_as_they_come(closed):
    seen = {}
    programs, tests = [GOOD, "def f(x): return 2", "", GOOD], [VALUE, VALUE, VALUE, []]
    results = sandbox.run_tests(programs, tests, on_result=seen.__setitem__)
    assert [result.rate for result in results] == [1, 0.5, 0, 0]
    assert seen == dict(enumerate(results))
    assert sandbox.run_tests([], []) == []
    with pytest.raises(ValueError, match="shorter"):
        sandbox.run_tests(programs, [VALUE])
    with pytest.raises(ValueError, match="a list of tests for each program"):
        sandbox.run_tests(programs, [*VALUE, "x", "y"])
    with pytest.raises(TypeError, match="timeout"):
        sandbox.run_tests(programs, tests, timeout=3)


def test_a_program_of_ten_megabytes_runs(closed):
    (result,) = sandbox.run_tests(["#" + "x" * 10_000_000 + "\n" + GOOD], [VALUE[:1]])
    assert result.rate == 1


@pytest.mark.slow
def test_time_of_programs_that_hang_is_bounded_by_the_workers(closed):
    hang = "import time\ndef f(x): time.sleep(1000)"
    programs = [hang if i % 4 == 0 else GOOD for i in range(48)]
    started = time.perf_counter()
    results = sandbox.run_tests(programs, [VALUE[:1]] * 48, timeout_s=1, workers=6)
    seconds = time.perf_counter() - started
    wanted = [["timeout"] if i % 4 == 0 else ["pass"] for i in range(48)]
    assert [result.verdicts for result in results] == wanted
    # one after another the hangs alone would take 36 s
    assert seconds < 12 * 3 / 6 + 48 * 0.15, seconds


def test_no_exception_that_steers_a_test_is_taken_for_the_librarys():
    names = "asyncio.CancelledError unittest.case.SkipTest test.support.ResourceDenied"
    names += " numpy.testing.SkipTest"
    assert [wire.library_class(name) for name in names.split()] == [None] * 4
    assert wire.library_class("json.JSONDecodeError") is json.JSONDecodeError


def test_a_test_that_had_no_time_takes_nothing_from_the_next_program(closed):
    results = sandbox.run_tests([GOOD] * 8, [VALUE[:1]] * 8, timeout_s=2e-4, workers=1)
    for result in results:
        assert (result.error, *result.verdicts) in (("", "pass"), ("", "timeout")), results


def test_all_tests_of_a_program_share_its_time(closed):
    program = "import time\ndef f(x): time.sleep(1000)"
    started = time.perf_counter()
    (result,) = sandbox.run_tests([program], [VALUE * 10], timeout_s=0.5, program_s=1)
    assert result.verdicts == ["timeout"] * 20
    assert time.perf_counter() - started < 10


@pytest.mark.slow
def test_the_limit_is_processor_time_and_on_the_clock_three_times_as_much(closed):
    nap = "import time\ndef f(x):\n    time.sleep({0})\n    return x + 1\n"
    spin = "import time\ndef f(x):\n    while time.process_time() < {0}: pass\n    return x + 1\n"
    programs = [nap.format(1), nap.format(3), spin.format(0.2), spin.format(1.5)]
    for test in (VALUE[0], BY_LOOP[0]):
        results = sandbox.run_tests(programs, [[test]] * 4, timeout_s=0.6)
        assert [result.verdicts[0] for result in results] == ["pass", "timeout", "pass", "timeout"]
        assert [round(result.cpu_s[0], 1) < 0.2 for result in results] == [True, True, False, False]


def test_a_test_that_begins_just_before_the_end_is_a_timeout(closed):
    for program_s in (1e-6, 0.002, 0.01):
        (result,) = sandbox.run_tests([GOOD], [[*VALUE, *BY_LOOP]], program_s=program_s)
        assert result.rate is not None, result
        assert set(result.verdicts) <= {"pass", "timeout"}


@pytest.mark.slow
def test_where_there_are_no_namespaces_the_rest_holds(layers):
    """The kernel's own limit of 0 namespaces, set in one that ends with the test."""
    off = "echo 0 > /proc/sys/user/max_user_namespaces; exec "
    namespace = ["unshare", "--user", "--map-root-user", "bash", "-c"]
    if subprocess.run([*namespace, off + "true"], capture_output=True).returncode:
        pytest.skip("this machine has no user namespaces, or no unshare")
    chosen = ["-k", "attack or folder or disk or verdicts or main_block", "-m", "slow or not slow"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0"]
    command += ["tests/test_sandbox.py", *chosen]
    command = [*namespace, off + '"$@"', "bash", *command]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


def test_e2b_works_where_there_is_no_linux(closed, cloud):
    code = prelude("ELSEWHERE").format(url=cloud().url.removeprefix("http://"))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    said = ["[1.0, 0.0]", "the local sandbox needs Linux; use --runner=e2b"]
    assert done.stdout.splitlines() == said, done.stderr


# ---- what fails is the sandbox, not the program --------------------------------------------------
def test_a_killed_launcher_gives_none(closed):
    def killer():
        wait_for(lambda: children() - before)
        time.sleep(0.3)
        for pid in children() - before:
            os.kill(pid, signal.SIGKILL)

    before = children()
    thread = threading.Thread(target=killer)
    thread.start()
    (result,) = sandbox.run_tests(["import time\ntime.sleep(5)"], [VALUE])
    thread.join()
    assert result.rate is None
    assert result.error


def test_no_interpreter_gives_none(closed, monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    results = sandbox.run_tests([GOOD, GOOD], [VALUE, VALUE])
    assert [result.rate for result in results] == [None, None]
    assert "2 of 2 programs could not be run: [Errno 2]" in capsys.readouterr().err
    sandbox.layers.cache_clear()
    try:
        assert sandbox.run_tests([GOOD], [VALUE])[0].rate is None
    finally:
        sandbox.layers.cache_clear()


def test_no_disk_gives_none(closed, layers, tmp_path, monkeypatch):
    """With namespaces tests need none."""
    monkeypatch.setattr(sandbox, "layers", lambda: layers | {"namespaces": False})
    full = tmp_path / "full"
    full.mkdir()
    libc = ctypes.CDLL(None)
    mounted = libc.mount(b"none", str(full).encode(), b"tmpfs", 0, b"nr_inodes=1") == 0
    if not mounted:
        full.chmod(0o500)  # nothing can be made here either
        if os.access(full, os.W_OK):
            pytest.skip("root, who may not mount a file system: no disk is full for it")
    monkeypatch.setattr("tempfile.tempdir", str(full))
    try:
        (result,) = sandbox.run_tests([GOOD], [VALUE])
    finally:
        if mounted:
            libc.umount(str(full).encode())
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    assert result.rate is None
    assert ("No space left" if mounted else "Permission denied") in result.error


def test_a_failure_in_the_middle_leaves_the_other_programs_their_rates(closed, monkeypatch):
    confined = 'write(pipe, b"+")'
    unlucky = 'write(pipe, b"no luck" if "unlucky" in request["program"] else b"+")'
    monkeypatch.setattr(sandbox, "JAIL", changed({confined: unlucky}))
    results = sandbox.run_tests([GOOD, "unlucky = 1", ""], [VALUE] * 3)
    assert [result.rate for result in results] == [1, None, 0]
    assert results[1].error.startswith("a test process could not be confined: no luck")


def test_less_than_the_safe_minimum_is_refused_unless_told(closed, monkeypatch):
    nothing = {"namespaces": False, "landlock": 0, "seccomp": True}
    monkeypatch.setattr(sandbox, "layers", lambda: nothing)
    with pytest.raises(RuntimeError, match="allow_unsafe"):
        sandbox.run_tests([GOOD], [VALUE])
    assert sandbox.run_tests([GOOD], [VALUE], allow_unsafe=True)[0].rate == 1
    # the launcher looks for itself, too
    monkeypatch.setattr(sandbox, "JAIL", changed({"landlock >= 3": "landlock >= 99"}))
    monkeypatch.setattr(sandbox, "layers", lambda: nothing | {"landlock": 7})
    (result,) = sandbox.run_tests([GOOD], [VALUE])
    assert (result.rate, result.error) == (None, "less than the safe minimum")


def test_layers_are_printed_once(layers, capsys):
    sandbox.layers.cache_clear()
    for _ in range(2):
        sandbox.run_tests([GOOD], [VALUE])
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"sandbox: namespaces .*, Landlock .*, seccomp .*, limits on", line)


def test_interrupt_leaves_no_orphan_and_keeps_results(closed):
    """Ctrl-C while two programs hang and many wait: what was finished has been handed over."""
    done = {}

    def on_result(i, result):
        done[i] = result
        threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    programs = [GOOD, *["while True: pass"] * 50]
    limits = {"timeout_s": 60, "program_s": 60, "workers": 2}
    started = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        sandbox.run_tests(programs, [VALUE] * 51, on_result=on_result, **limits)
    assert time.perf_counter() - started < 10
    assert {i: result.rate for i, result in done.items()} == {0: 1}


@pytest.fixture(params=[True, False], ids=["namespaces", "no namespaces"])
def trainer(closed, layers, request):
    """start(program) runs Python that uses the sandbox, and is killed: nothing may be left of it.
    {namespaces} stands for whether there are any.
    """
    if request.param and not layers["namespaces"]:
        pytest.skip("this machine allows no namespaces")
    env = os.environ | {"TMPDIR": tempfile.gettempdir()}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}

    def start(program, **values):
        code = program.format(namespaces=request.param, **values)
        return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=env, text=True, **pipes)

    start.namespaces = request.param
    return start


@pytest.mark.parametrize("at_once", [True, False])
def test_a_killed_trainer_takes_the_programs_with_it(trainer, at_once):
    """SIGKILL, which nobody can handle: the kernel ends the launcher, and so the test, which had
    asked it not to.
    """
    before, folder = children(), Path(tempfile.gettempdir())
    process = trainer(prelude("KILLED"))
    if at_once:  # as soon as there is anything to leave behind
        some = descendants if trainer.namespaces else lambda pid: [*folder.glob("sandbox-*")]
        wait_for(lambda: some(process.pid))
    else:
        # the template, its process 1, judge, program
        wait_for(lambda: len(descendants(process.pid)) == 3 + trainer.namespaces)
        time.sleep(0.5)
    assert process.poll() is None
    process.kill()
    process.communicate()
    assert gone(children() - before)  # orphans come to us
    assert not [*folder.iterdir()]


@pytest.mark.parametrize("size", [10, 5_000, -10_000, None])
def test_a_trainer_killed_while_its_launcher_starts(trainer, size):
    """When its launcher, which has hardly begun, has been sent so much of the job."""
    before = children()
    process = trainer(prelude("CUT SHORT"), size=size)
    process.communicate()
    assert process.returncode == -9
    assert gone(children() - before)


@pytest.mark.slow
def test_a_trainer_killed_at_any_moment(trainer):
    """A hundred trainers, each killed a little later after its launcher was started."""
    before = children()
    with trainer(prelude("KILLED LATER")) as process:
        for i in range(100):
            assert process.stdout.readline() == f"-{int(signal.SIGALRM)}\n"
            assert gone(children() - before - {process.pid}), i
            assert not [*Path(tempfile.gettempdir()).iterdir()], i
            print(file=process.stdin, flush=True)


@pytest.mark.parametrize("namespaces", [True, False])
def test_a_trainer_that_adopts_orphans_has_no_zombies(namespaces, closed, layers, monkeypatch):
    """Process 1 of a container does, and waits for none of them."""
    if namespaces and not layers["namespaces"]:
        pytest.skip("this machine allows no namespaces")
    monkeypatch.setattr(sandbox, "layers", lambda: layers | {"namespaces": namespaces})
    before = children()
    hang = "while True: pass"
    for _ in range(3):
        sandbox.run_tests([GOOD, hang], [VALUE, VALUE[:1]], timeout_s=0.2, workers=2)
        assert children() == before

    def stop(i, result):
        raise InterruptedError

    with pytest.raises(InterruptedError):
        sandbox.run_tests([GOOD, *[hang] * 4], [VALUE] * 5, on_result=stop, workers=2)
    assert children() == before
    settings = {"packages": [], "namespaces": namespaces}
    for seconds in (0, 0.01, 0.02, 0.04, 0.08, 0.5):
        template = sandbox.Template(vars(sandbox.Options()) | settings)
        template.send(*template.messages)
        time.sleep(seconds)
        template.close()
        assert children() == before, seconds


def test_no_program_inherits_signals_that_a_trainer_ignores_or_blocks(closed):
    program = prelude("SIGNALS")
    numbers = {signal.SIGCHLD, signal.SIGTERM}
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {*numbers, signal.SIGALRM})
    try:
        started = time.monotonic()
        tests = [sandbox.Probe("state()"), "assert f() == 'late'"]
        (result,) = sandbox.run_tests([program], [tests])
        assert time.monotonic() - started < 4
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert result.values == [[[], [signal.SIGPIPE, signal.SIGXFSZ]], None]
    assert result.verdicts == PASS


# ---- what the processes of one template share: its memory as it was before any program -----------
def test_much_output_costs_the_trainer_no_memory(layers):
    program = "import sys\nsys.stdout.write('\\0' * (64 << 20))"
    test = sandbox.Stdin("", check="def right(printed): return False")
    tracemalloc.start()
    (result,) = sandbox.run_tests([program], [[test]])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert result.verdicts == ["fail"]
    assert peak < 20_000_000


def test_no_program_and_no_test_is_left_in_the_memory_of_the_next(closed):
    secret = "marked-" + "4711"
    programs = [f"text = {secret!r}\n{GOOD}", prelude("PAGES") + "kept = 'mine-' + str(40 + 2)\n"]
    marked = ["assert f(1) == 2", f"assert f(1) == 2 and {secret!r}"]
    looking = ["assert found('24-enim') > 0", "assert found('1174-dekram') == 0"]
    limits = {"workers": 1, "timeout_s": 20, "program_s": 60}
    results = sandbox.run_tests(programs, [marked, looking], **limits)
    assert [result.verdicts for result in results] == [PASS, PASS]


def test_random_numbers_differ_between_the_tests_of_a_program(closed):
    program = "import os, random, uuid\n"
    program += "def f():\n    return random.random(), os.urandom(4), str(uuid.uuid4())\n"
    (result,) = sandbox.run_tests([program], [[sandbox.Probe("f()")] * 3], workers=1)
    for values in zip(*result.values, strict=True):
        assert len(set(values)) == 3


def test_no_state_of_a_test_is_left_for_the_next(closed, layers):
    """Modules, builtins, caches, directories, signals: what a program changes is changed in its
    process alone.
    """
    tests = [sandbox.Probe("state()"), sandbox.Probe("change()"), sandbox.Probe("state()")]
    (result,) = sandbox.run_tests([prelude("STATE")], [tests], workers=1)
    before, other, after = result.values
    assert before == after
    if layers["namespaces"]:
        assert all(a != b for a, b in zip(before, other, strict=True))


# ---- E2B, without a network ----------------------------------------------------------------------
class Cloud(http.server.BaseHTTPRequestHandler):
    """What E2B's API, its sandboxes and an Open-R1 router answer; scripts are really run. State is
    in server.state.
    """

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, status, text=""):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def run(self, script):
        path = Path(tempfile.mkdtemp()) / "script.py"
        path.write_text(script)
        done = subprocess.run([sys.executable, path], capture_output=True, text=True)
        shutil.rmtree(path.parent)
        return done.stdout

    def do_DELETE(self):
        self.server.state.killed.append(self.path.rpartition("/")[2])
        self.answer(204)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        state = self.server.state
        status = state.failures.pop(0) if state.failures else 0
        if status:
            self.answer(status, json.dumps({"code": status, "message": "later"}))
        elif self.path == "/v2/sandboxes":
            state.created.append(body)
            names = {"sandboxID": f"sandbox{len(state.created)}", "templateID": "t"}
            names |= {"clientID": "c", "envdVersion": "0.4.0"}
            self.answer(201, json.dumps(names))
        elif self.path == "/execute":
            state.scripts.append(body["code"])
            out = self.run(body["code"]) if state.works else "no report"
            parts = [out[:50], out[50:], ""]  # standard output comes in parts
            rows = [json.dumps({"type": "stdout", "text": p, "timestamp": 1}) for p in parts]
            self.answer(200, "\n".join(rows) + "\n")
        elif self.path == "/execute_batch":
            state.scripts += body["scripts"]
            answers = []
            for script in body["scripts"]:
                if state.works:
                    execution = {"results": [], "error": None, "execution_count": 1}
                    execution["logs"] = {"stdout": [self.run(script)], "stderr": []}
                    answers.append({"execution": execution, "exception_str": None})
                else:
                    answers.append({"execution": None, "exception_str": "no sandbox"})
            self.answer(200, json.dumps(answers))
        else:
            self.answer(404)


@pytest.fixture
def cloud(layers, monkeypatch):
    """serve(port) starts a server and returns its state; there is a key, and waits between tries
    are short.
    """
    servers = []

    def serve(port=0):
        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Cloud)
        url = f"http://127.0.0.1:{server.server_port}"
        lists = {name: [] for name in ("failures", "created", "killed", "scripts")}
        server.state = types.SimpleNamespace(**lists, works=True, url=url)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return server.state

    monkeypatch.setenv("E2B_API_KEY", "e2b_" + "0" * 40)
    monkeypatch.setattr(sandbox.random, "uniform", lambda low, high: 0.01)
    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


E2B_TESTS = [*VALUE, "for x in (1,):\n    assert f(x) == 2"]


def run_on_e2b(**options):
    cases = read_cases("e2b")
    options = {"runner": "e2b"} | options
    assert not differing(cases, run_cases(cases, E2B_TESTS, **options))


def error_of(**options):
    """Why a program that is right could not be run there."""
    (result,) = sandbox.run_tests([GOOD], [VALUE], **{"runner": "e2b"} | options)
    assert (result.rate, result.verdicts) == (None, [])
    return result.error


@pytest.fixture
def e2b():
    pytest.importorskip("e2b_code_interpreter", reason="needs pip install e2b-code-interpreter")
    return pytest.importorskip("e2b")


def test_e2b_in_debug_mode_runs_the_same_harness(closed, cloud, e2b, monkeypatch):
    monkeypatch.setenv("E2B_DEBUG", "true")
    state = cloud(49999)
    state.failures = [0, 429, 0, 429]
    run_on_e2b()
    assert len(state.scripts) == 6
    state.works = False
    assert "no report" in error_of()


def test_e2b_makes_one_sandbox_per_worker_without_internet_and_ends_it(
    closed, cloud, e2b, monkeypatch
):
    state = cloud()
    monkeypatch.setenv("E2B_API_URL", state.url)
    monkeypatch.setenv("E2B_SANDBOX_URL", state.url)
    monkeypatch.setenv("E2B_HTTP_VERSION", "1.1")
    monkeypatch.delenv("E2B_DEBUG", raising=False)
    state.failures = [429] * 5 + [0, 0, 502]
    run_on_e2b(workers=1)
    assert len(state.created) == 2  # the first was lost at the 502
    assert len(state.killed) == 2
    for body in state.created:
        assert body["allow_internet_access"] is False or body["allowInternetAccess"] is False
    state.failures = [500] * 100
    assert "500" in error_of()


def test_e2b_without_a_key_is_one_line(closed, e2b, monkeypatch):
    for name in ("E2B_API_KEY", "E2B_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match=r"E2B: .*key"):
        sandbox.run_tests([GOOD], [VALUE], runner="e2b")


def test_a_runner_that_is_none_is_refused():
    said = "--runner=nobody: give local, e2b, or HOST:PORT of an Open"
    with pytest.raises(ValueError, match=said):
        sandbox.run_tests([GOOD], [VALUE], runner="nobody")


def test_a_router_of_open_r1_runs_the_same_harness(closed, cloud):
    state = cloud()
    url = state.url.removeprefix("http://")
    run_on_e2b(runner=url)
    state.works = False
    assert error_of(runner=url).endswith("no sandbox")
    assert error_of(runner=f"{state.url}/") == f"{state.url}/execute_batch: no sandbox"
    assert error_of(runner="127.0.0.1:1")


# ---- rewards -------------------------------------------------------------------------------------
def fenced(program):
    return f"Here it is:\n```python\n{program}```\n"


def test_all_rewards_share_one_signature(closed, tmp_path):
    own = tmp_path / "own.py"
    own.write_text("def brevity(completions, rows, **_): return [*map(len, completions)]\n")
    completions = [fenced(GOOD), "", "no code"]
    rows = [{"test_cases": VALUE, "tokens": 10}] * 3
    names = [*sandbox.REWARDS, f"{own}:brevity"]
    got = {name: sandbox.find_reward(name)(completions, rows) for name in names}
    assert got.pop(f"{own}:brevity") == [*map(len, completions)]
    assert got.pop("syntax") == [1, 1, 0]
    assert got == {name: [1, 0, 0] for name in ("code", "binary_code", "code_format")}
    for wrong in ("speed", f"{own}:speed", "missing.py:f"):
        with pytest.raises(ValueError, match=r"speed|no reward"):
            sandbox.find_reward(wrong)
    with pytest.raises(TypeError, match="strict"):
        sandbox.code_format(completions, rows, strict=False)


def test_thinking_does_not_count_as_a_part_of_the_answer(closed):
    good, wrong = fenced(GOOD), fenced("def f(x): return x\n")
    tag = fenced(f"TAGS = '</think>', '<think>'\n{GOOD}")
    answers = {
        f"<think>\n{wrong}</think>\n{good}": (1, 1),
        f"{wrong}</think>\n{good}": (1, 1),
        f"<think>a</think>\n<think>{wrong}</think>\n{tag}": (1, 1),
        tag: (1, 1),
        f"<think>\n{good}</think>\n{wrong}": (0, 1),
        f"<think>\n{good}": (0, 0),
        f"<think>a</think>\n<think>\n{good}": (0, 0),
        f"<think>\n{good}</think>\nI am done.\n": (0, 0),
        f"<think>a</think>\n{wrong}{good}": (0, 0),
    }
    rows = [{"test_cases": VALUE}] * len(answers)
    both = [sandbox.REWARDS[name]([*answers], rows) for name in ("code", "code_format")]
    assert [*zip(*both, strict=True)] == [*answers.values()]


def test_one_failure_of_101_is_a_failure(monkeypatch):
    monkeypatch.setattr(sandbox, "code", lambda *_, **__: [100 / 101, 1.0, None])
    assert sandbox.binary_code([], []) == [0, 1, None]


def test_rewards_are_none_where_the_sandbox_failed(closed, monkeypatch):
    run_template, unlucky = sandbox.Template.run, "unlucky"

    def fails(template, tests, program_s):
        if unlucky in tests[0][2]["program"]:
            raise sandbox.SandboxError("no luck")
        return run_template(template, tests, program_s)

    monkeypatch.setattr(sandbox.Template, "run", fails)
    completions = [fenced(GOOD), fenced("unlucky = 1\n"), "prose", fenced("def")]
    rows = [{"test_cases": VALUE}] * 4
    assert sandbox.code(completions, rows) == [1, None, 0, 0]
    assert sandbox.binary_code(completions, rows) == [1, None, 0, 0]
    unlucky = ""
    assert sandbox.code_format(completions, rows) == [None, None, 0, None]
    assert sandbox.code(completions, rows) == [None, None, 0, None]
    assert sandbox.syntax(completions, rows) == [None] * 4


@pytest.mark.parametrize("longest", [False, *slow(True)])
def test_no_failure_of_the_parser_escapes(closed, longest):
    sources = [case.program for case in read_cases("parser").values()]
    sources = [*(sources if longest else sources[:-1]), "x = 1"]
    completions = [fenced(source + "\n") for source in sources]
    rewards = sandbox.code_format(completions, [{}] * len(sources))
    assert rewards[-1] == 1
    assert set(rewards[:-1]) <= {0.5, 1.0}
    assert rewards.count(0.5) >= len(sources) - 4


# ---- command line --------------------------------------------------------------------------------
def files(tmp_path, program, tests):
    """A program and its tests as files: what main() and the command take."""
    (tmp_path / "program.py").write_text(program)
    (tmp_path / "tests.txt").write_text(tests)
    return tmp_path / "program.py", tmp_path / "tests.txt"


def test_the_command_prints_a_verdict_for_every_test(layers, tmp_path):
    several = "assert f(1) == 2\n\nfor x in (1, 2):\n    assert f(x) == 2\n"
    program, tests = files(tmp_path, GOOD, several)
    done = run("sandbox.py", program, f"--tests={tests}", "--timeout_s=2")
    expected = ["pass         assert f(1) == 2", "fail         for x in (1, 2):", "1 of 2 passed"]
    assert done.stdout.splitlines() == expected
    assert done.returncode == 1
    assert done.stderr.startswith("sandbox: ")
    misspelt = run("sandbox.py", program, f"--tests={tests}", "--timeout=2")
    missing = run("sandbox.py", program, "--tests=missing.txt")
    assert misspelt.returncode == 2
    said = "missing.txt: No such file or directory\n"
    assert (missing.returncode, missing.stderr) == (1, said)
    assert "Traceback" not in misspelt.stderr


def test_values_are_shown_and_the_exit_status_says_whether_all_passed(layers, tmp_path, capsys):
    def status(program, tests, **options):
        return sandbox.main(*files(tmp_path, program, tests), sandbox.Options(**options))

    power = "def f(x):\n    return x ** 9999"
    assert status(power, "assert f(1) == 1\nassert f(-1) == 1\nassert f(9) == 1") == 1
    expected = ["fail         assert f(-1) == 1    # got -1", "fail         assert f(9) == 1"]
    assert capsys.readouterr().out.splitlines()[1:3] == expected
    same = "assert f('a\u2028b\x0c') == 'a\\u2028b\\x0c'\n"
    assert status("def f(x):\n    return x", same) == 0
    assert status("\ufeff" + GOOD, "\ufeffassert f(1) == 2\n") == 0  # byte order marks
    assert status(GOOD, "assert f(1) == 2\n", timeout_s=2) == 0
    assert status(GOOD, "f(1)\n", runner="127.0.0.1:1") == 2
    for nothing in ("\n", "# only a comment\n"):
        with pytest.raises(ValueError, match="holds no tests"):
            status(GOOD, nothing)


def test_with_json_the_command_prints_an_object_for_every_test(layers, tmp_path, capsys):
    loop = "for x in (1, 2):\n    assert f(x) == 2"
    paths = files(tmp_path, GOOD, f"assert f(1) == 2\n{loop}\nassert f(1) == 'a\x1b'\nf()\n")
    done = run("sandbox.py", paths[0], f"--tests={paths[1]}", "--json")
    *rows, last = map(json.loads, done.stdout.splitlines())
    missing = "TypeError: f() missing 1 required positional argument: 'x'"
    assert rows == [
        {"verdict": "pass", "test": "assert f(1) == 2", "got": None},
        {"verdict": "fail", "test": loop, "got": None},
        {"verdict": "fail", "test": "assert f(1) == 'a\x1b'", "got": "2"},
        {"verdict": "fail", "test": "f()", "got": missing},
    ]
    assert last == {"passed": 1, "tests": 4, "rate": 0.25, "error": ""}
    assert done.returncode == 1
    options = sandbox.Options(runner="127.0.0.1:1")
    assert sandbox.main(*paths, options, json=True) == 2
    row = json.loads(capsys.readouterr().out)
    assert row["rate"] is None
    assert "Connection refused" in row["error"]
