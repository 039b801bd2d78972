"""More attacks on the sandbox, by tables: tests/programs/, and below. Slow.

A program here never computes what its test asks for. After every attack an honest program runs in
the same template. What still succeeds is a hole that is known, and says why: "# hole:" in the
files, HOLES here. "plain": a program does the same in plain Python, or in the benchmarks' own
executors.
"""

import ast
import os
import threading
import time
from pathlib import Path

import pytest
from test_sandbox import GOOD, prelude, read_cases, sections

import problems
import sandbox
from jail import inside

pytestmark = pytest.mark.slow

LIMITS = {"timeout_s": 3.0, "memory_mb": 512, "disk_mb": 8, "workers": 1}
EQUAL = "assert f(1) == 2"
CALLS = sandbox.Calls("f", [[1], [5]], [1.0, 1.0], 2.0)
CHECKED = CALLS._replace(check="def right(number, inputs, value): return value == [2, 6][number]")
PROBE = sandbox.Probe("f(1)")
PRINTED = sandbox.Stdin("1", check="def right(printed): return printed == '2'")
TESTS = {"CALLS": CALLS, "CHECKED": CHECKED, "PROBE": PROBE, "PRINTED": PRINTED}
X86 = pytest.mark.skipif(
    os.uname().machine != "x86_64", reason="the numbers of calls are those of x86-64"
)


@pytest.fixture(scope="module", autouse=True)
def layers():
    """Without these, the attacks below are not for this machine."""
    found = sandbox.layers()
    if not (found["seccomp"] and found["namespaces"] and found["landlock"]):
        pytest.skip("this machine lacks a layer")
    return found


def hole(why):
    return pytest.mark.xfail(strict=True, raises=AssertionError, reason=why)


def in_file(group):
    """One case of a test for each program of tests/programs/GROUP.txt."""
    rows = []
    for name, case in read_cases(group, **TESTS).items():
        marks = [hole(case.hole)] if case.hole else []
        rows.append(pytest.param(case, id=name, marks=marks))
    return pytest.mark.parametrize("case", rows)


def attack(program, *tests, **options):
    """The Result of a program; an honest one passes after it."""
    programs, cases = [program, GOOD], [[*tests], [EQUAL]]
    result, good = sandbox.run_tests(programs, cases, **(LIMITS | options))
    assert result.rate is not None, result
    assert good.verdicts == ["pass"], good
    return result


# ---- forging -------------------------------------------------------------------------------------
@in_file("forging")
def test_forging(case):
    """By what Python lets an object or a program do."""
    assert attack(case.program, *case.tests or [EQUAL]).verdicts[0] != "pass"


@in_file("messages")
def test_forging_by_messages(case):
    started = time.monotonic()
    result = attack(case.program, *case.tests or [EQUAL], timeout_s=1.0)
    assert result.verdicts[0] != "pass", result
    assert time.monotonic() - started < 10


@in_file("modes")
def test_modes_and_options(case):
    result = attack(case.program, *case.tests or [EQUAL], **case.options)
    assert result.verdicts[0] != "pass"


def test_the_ends_of_these_attacks_work():
    """An honest program behind each of them passes, so that what fails above is the attack."""
    talk = prelude("TALK") + "always(2)"
    for program in (talk, *(prelude(name) + GOOD for name in ("HOOK", "COMMON", "AROUND"))):
        assert attack(program, EQUAL).verdicts == ["pass"]
    # and where it runs in the judge this takes the token
    test = prelude("TOKEN") + "\nraise AssertionError"
    assert attack("x = 1", test).verdicts == ["pass"]


# ---- what comes back to the trainer --------------------------------------------------------------
@in_file("values")
def test_values_for_the_trainer(case):
    """No value equals 2."""
    result = attack(case.program, PROBE, CALLS, CHECKED, timeout_s=1.0)
    assert result.verdicts[2] != "pass", result
    assert not any(value == 2 for value in result.values[:1] if type(value) in (int, bool))
    assert result.values[2] == 0


def test_an_object_that_a_probe_brings_back_equals_nothing():
    result = attack("class A:\n    __eq__ = lambda *a: True\ndef f(x): return A()", PROBE)
    assert result.verdicts == ["pass"]
    assert all(result.values[0] != other for other in (1, 2, True, "", [], {}, ()))


SECONDS = {  # name: what stands where the processor seconds of a call should
    "seconds that are a word": "'x'",
    "seconds that are a list": "[[]] * 3",
    "seconds that are negative": "-5.0",
    "seconds that are not a number": "float('nan')",
    "seconds that are missing": "None",
    "seconds that are another form": "{1: 2}",
}


@pytest.mark.parametrize("name", SECONDS)
def test_seconds_of_calls(name):
    """They come from the program's process: numbers, whatever it says."""
    timed = f"OPS['timed'] = lambda function, *args: (function(*args), {SECONDS[name]})\n"
    result = attack(prelude("HOOK") + timed + GOOD, CALLS)
    taken = "negative" in name or "not a number" in name  # else the calls have failed
    assert (result.verdicts, len(result.values[0])) == ((["pass"], 2) if taken else (["fail"], 0))
    for value, seconds in result.values[0]:
        assert value in (2, 6)
        assert type(seconds) is float
        assert 0 <= seconds <= LIMITS["timeout_s"]


@hole("the seconds of a call are the program's; the limits are the template's")
def test_seconds_that_are_too_few():
    """A call that takes half a second cannot say that it took none."""
    program = "import time\nOPS['timed'] = lambda function, *args: (function(*args), 0.0)\n"
    program += "def f(x):\n    end = time.process_time() + 0.3\n"
    program += "    while time.process_time() < end: pass\n    return x + 1"
    result = attack(prelude("HOOK") + program, CALLS)
    assert not result.values[0] or result.values[0][0][1] > 0.1, result


UNPRINTABLE = {  # name: what repr() of a wrong result is; the command prints it
    "surrogate in a text": "'\\ud800'",
    "escape sequence in a text": "'\\x1b]0;title\\x07'",
    "many lines in a text": "'a\\nb\\npass         assert f(1) == 2'",
}


@pytest.mark.parametrize("name", UNPRINTABLE)
def test_texts_for_the_terminal(name, tmp_path, capsys):
    program = f"class A:\n    def __repr__(s): return {UNPRINTABLE[name]}\ndef f(x): return A()"
    (tmp_path / "p.py").write_text(program)
    (tmp_path / "t.txt").write_text("assert f(1) == 2\n")
    assert sandbox.main(tmp_path / "p.py", tmp_path / "t.txt") == 1
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 2
    assert out.isascii()
    assert all(c.isprintable() for line in out.splitlines() for c in line)


@in_file("input")
def test_reading_input(case):
    tests = [PRINTED, PRINTED._replace(check="")]
    result = attack(case.program, *tests, timeout_s=0.7, threads=True)
    assert result.verdicts[0] != "pass", result
    assert result.values[0] is None


# ---- the kernel ----------------------------------------------------------------------------------
SYSTEM_CALLS = sections("system_calls")


@X86
@pytest.mark.parametrize("name", SYSTEM_CALLS)
def test_system_calls(name):
    """All of them are unknown to this kernel, as a program sees it."""
    called = ", ".join(f"({line})" for line in SYSTEM_CALLS[name][1].splitlines())
    result = attack(f"CALLED = [{called}]\n" + prelude("SYSTEM"), sandbox.Probe("attempt()"))
    assert result.verdicts == ["pass"]
    assert result.values == [[]]


CODES = sections("codes")


@X86
@pytest.mark.parametrize("name", CODES)
def test_machine_code(name):
    program = prelude("MACHINE CODE").replace("CODE", repr(CODES[name][1].strip()))
    assert attack(program, EQUAL).verdicts == ["fail"]


# ---- what a program can reach --------------------------------------------------------------------
@in_file("reaching")
def test_reaching(case):
    """attempt() returns what it should not have."""
    program = f"{prelude('COMMON')}HOST = {os.uname().nodename!r}\n{case.program}"
    result = attack(program, "zebrafish = 'zebrafish'\ngot = attempt()\nassert got == []")
    assert result.verdicts == ["pass"], result


# ---- what one test leaves for the next -----------------------------------------------------------
@in_file("leaving")
def test_leaving(case):
    """The program does something; its test is an expression of the next one that must be false."""
    programs = [
        prelude("AROUND") + case.program + GOOD,
        prelude("AROUND") + f"def f(x): return bool({case.tests[0]})",
    ]
    tests = [[EQUAL] * 2, ["assert f(1) is False"] * 2]
    for result in sandbox.run_tests(programs, tests, **LIMITS):
        assert result.verdicts == ["pass", "pass"], result


# a test of the first program, whose outcome the next one should not find in its own memory
MEMORY = {
    "value of a probe": sandbox.Probe("'left-by' + '-one'"),
    "values of calls": sandbox.Calls("f", [["left-by-"]], [1.0], 2.0),
    "what a program printed": sandbox.Stdin(""),
    "what a failed assertion got": "assert f('left-by-') == 2",
}


@pytest.mark.parametrize("name", MEMORY)
@pytest.mark.parametrize("freed", [False, True])
def test_outcomes_of_the_test_before(name, freed):
    """They passed through the template; the processes of the next test are its copies. Freed:
    where no variable holds it any more, in pages of the heap, read by a call that forgives.
    """
    first = "def f(x): return x + 'one'\nprint('left-by-' + 'one')\n"
    second = "text = '-'.join(['left', 'by', 'one'])\ndef f(x): return found(text)"
    second = prelude("AROUND") + second
    tests = [[MEMORY[name]], ["assert f(1) is False"]]
    if freed:
        second = prelude("SCAN") + "def f(x): return scanned()"
        tests[0].append("assert f('a') == 'aone'")
    results = sandbox.run_tests([first, second], tests, **LIMITS)
    assert results[1].verdicts == ["pass"], results


def test_verdict_of_the_test_before():
    """A program cannot learn from its memory how the test before ended."""
    program = prelude("AROUND") + "def f(x): return found('\"pass\"') or found('\"fail\"')"
    result = attack(program, "assert f(1) is False", "assert f(1) is False")
    assert result.verdicts == ["pass", "pass"], result


NUMBERS = {  # name: an expression that tells the first test of a template from the second
    "variable of the template": "[f.f_locals['test']['first'] for f in frames() "
    "if 'test' in f.f_locals]",
    "folder": "os.getcwd()",
    "number of the process": "os.getpid()",
    "number of the device": "os.stat('.').st_dev",
    "address of an object": "id(os)",
    "descriptors": "[i for i in range(64) if not ends(os.fstat, i)]",
}
HOLES = {
    "number of the process": "process ids count the tests of a template",
    "variable of the template": "a program may see how many tests it has run",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[hole(HOLES[name])] if name in HOLES else []) for name in NUMBERS],
)
def test_number_of_the_test(name):
    """A program cannot tell the first of its tests from the second, but where HOLES says so."""
    program = prelude("AROUND") + f"def f(x): return {NUMBERS[name]}"
    result = attack(program, PROBE, PROBE)
    assert result.verdicts == ["pass", "pass"]
    assert result.values[0] == result.values[1], result


# ---- what costs much -----------------------------------------------------------------------------
@in_file("bombs")
def test_bombs(case):
    """It does not pass, in little time, and the next program is as fast as ever."""
    started, threads = time.monotonic(), threading.active_count()
    limits = {"timeout_s": 0.6, "memory_mb": 256, "threads": True}
    result = attack(case.program, *case.tests or [EQUAL], **limits)
    assert result.verdicts[0] != "pass", result
    assert time.monotonic() - started < 8
    assert threading.active_count() == threads


def test_disk_without_namespaces(layers, tmp_path, monkeypatch):
    """Fifty times the limit, allocated between two looks at the folder."""
    monkeypatch.setattr(sandbox, "layers", lambda: layers | {"namespaces": False})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = "import os\ndef f(x):\n    for i in range(50):\n        fd = os.open(str(i), 66)\n"
    program += "        os.posix_fallocate(fd, 0, 1 << 20)\n        os.close(fd)\n    return 2"
    (result,) = sandbox.run_tests([program], [[EQUAL]], **(LIMITS | {"disk_mb": 1}))
    assert result.verdicts != ["pass"], result
    assert not [*tmp_path.iterdir()]


@hole("--threads has no limit of its own but memory")
def test_number_of_threads():
    """What a program may start is far below what a machine has process ids for (32,768), whatever
    its memory.
    """
    program = "import _thread, threading\nthreading.stack_size(32768)\n"
    program += "lock = threading.Lock()\nlock.acquire()\ndef f(x):\n    n = 0\n    try:\n"
    program += "        for n in range(3000): _thread.start_new_thread(lock.acquire, ())\n"
    program += "    except Exception: pass\n    return n"
    result = attack(program, PROBE, threads=True, memory_mb=2048)
    assert result.values[0] is None or result.values[0] <= 512, result


# ---- the checks of problems.py: EvalPlus' rules for values ---------------------------------------
def plus(want):
    """Calls of f that are right if they return what is wanted, as EvalPlus compares."""
    inputs = [[len(want)]]
    problem = problems.Problem("HumanEval/0", "f", cases=problems.Plus(inputs, inputs, 0.0))
    known = problems.Expected([want], [2.0], 1 << 26)
    return problems.plus_tests(problem, [known, known])[0]


@in_file("checks")
def test_checks_of_values(case):
    want = ast.literal_eval(case.tests[0])
    result = attack(case.program, plus(want), timeout_s=2.0)
    assert result.verdicts == ["fail"], result
    assert attack(f"def f(n): return {want!r}", plus(want)).verdicts == ["pass"]


def test_processes_and_files_are_gone_after_all_of_this():
    tasks = Path("/proc/self/task")
    children = [pid for task in tasks.iterdir() for pid in (task / "children").read_text().split()]
    names = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children]
    assert not [name for name in names if b"marshal" in name]
    assert not [*Path("/dev/shm").glob("left*")]
    assert inside.OPERATIONS["len"] is len
