"""Run code that a model wrote, and score it: a sandbox made by the operating system or by E2B, and the code rewards.

    python sandbox.py program.py --tests=tests.txt                # a verdict for every test, in a tenth of a second
    python sandbox.py program.py --tests=tests.txt --runner=e2b   # in E2B's cloud: pip install e2b-code-interpreter

tests.txt holds one test per line; an indented line continues the test above. Exit status 0: all passed, 1: not all, or
nothing to run, 2: the sandbox itself failed. From Python:

    sandbox.run_tests([program], [["assert f(1) == 2", "assert f(5) == 7"]])
    # -> [Result(rate=0.5, verdicts=["pass", "fail"], values=[2, 6], error="")]

Every test runs in a process and a folder of its own, without network, threads, other processes, other programs or any
files but Python's own. Four layers enforce this (sandbox_inside.py); each stops most attacks without the others:
- namespaces: a root directory, a list of processes and a network of its own, in which there is nothing to attack
- Landlock: no file can be opened but those named, whatever path or link leads to it; no TCP
- seccomp: system calls that start processes, reach others, or are rarely needed and often attacked are refused
- limits: time, memory, open files, and bytes written
The minimum is seccomp and one of the first two. Without namespaces a program cannot make folders or use asyncio, and
can find out whether a path exists.

An exit status proves nothing: a program controls all of its own process, builtins, frames, memory, open pipes. So
nothing that decides is there:
- by value, for `assert f(..) == <literal>`: the program's process sends what f returned, and this process compares. The
  expected value never enters the sandbox. So it is for Calls and Stdin, where the caller compares.
- by judge, for every other test: the test runs in a second process, confined alike, that never runs a line of the
  program. The functions that it calls are pipes to the program's process, for arguments and results. The kernel keeps
  the two apart, and through the pipes a program can call nothing but what the test has given it to call.
What comes back is data: builtin types, some of the standard library's and NumPy's are built anew, by type. Any other
object stays where it is, and equals only what its own side says among such objects. Lists that f changes are changed.

A program imports the standard library and the site-packages of the Python that runs this, read-only. The local sandbox
needs Linux on x86-64 or aarch64 (--runner=e2b does not), and only the standard library of Python 3.10 to 3.12.
"""

import ast
import builtins
import concurrent.futures
import contextlib
import dataclasses
import functools
import inspect
import json
import marshal
import math
import os
import random
import reprlib
import runpy
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import typing
import urllib.request
import warnings
from pathlib import Path

from sandbox_inside import opaque, plain, unwire, wire  # noqa: F401  problems.py measures values with opaque()


@dataclasses.dataclass(frozen=True)
class Options:
    runner: typing.Literal["local", "e2b"] = "local"  # where programs run: this machine, or E2B's cloud
    e2b_router_url: str = ""  # host:port of an Open-R1 router that holds the E2B key; with --runner=e2b
    workers: int = 0  # programs that run at a time; 0: one per CPU, or 2 E2B sandboxes
    timeout_s: float = 5.0  # processor seconds per test; the limit in wall-clock time is three times as long
    program_s: float = 30.0  # seconds for all tests of a program; tests that do not fit in are timeouts
    memory_mb: int = 1024  # address space of a test, in MB
    disk_mb: int = 64  # files that a test may write, in MB
    allow_unsafe: bool = False  # run programs even where the machine offers less than the safe minimum
    threads: bool = False  # let programs start threads; still no processes
    main_block: bool = True  # set __name__ to "__main__" in a program, so that its main block runs
    parity: bool = False  # rewards as the reference computes them: a test passes if the exit status is 0
    max_tokens: int = 256  # soft_overlong: tokens at which the reward reaches -1
    overlong_tokens: int = 64  # soft_overlong: tokens before max_tokens over which the reward falls from 0 to -1
    ngram: int = 3  # repetition: words in an n-gram
    max_penalty: float = -1.0  # repetition: reward of a completion that repeats a single n-gram


class Result(typing.NamedTuple):
    rate: float | None  # share of tests that passed; None: the sandbox failed, which says nothing about the program
    verdicts: list  # of every test: "pass", "fail", "timeout", "output limit" or "memory"; empty with rate None
    values: list  # what came back in every test by value; None for the others
    error: str = ""  # what failed, with rate None
    cpu_s: list = []  # processor seconds of every test, 0 where it did not begin  # noqa: RUF012


class SandboxError(Exception):
    """The machinery failed, not the program."""


class Probe(str):
    """A test whose last line is an expression: its value comes back, and the caller compares it."""


class Calls(typing.NamedTuple):
    """A test that calls a function with one input after another, in one process; "pass" if all calls return.

    Its value: [(what a call returned, its processor seconds)], with Opaque for objects.
    """

    function: str  # an expression for the function: f, or Solution().f
    inputs: list  # the arguments of every call
    limits: list  # processor seconds of every call
    timeout_s: float  # processor seconds of all, in place of the option
    most: int = 1 << 26  # bytes that may come back


class Stdin(typing.NamedTuple):
    """A test that runs the program alone, with a text as its standard input; "pass" if it ends without an exception.

    Its value is what the program prints. After a timeout the program's other tests are timeouts too.
    """

    text: str
    most: int = 1 << 26  # bytes that may come back


class Opaque:
    """Stands for an object of a program that is not data: equal to nothing; callable, so that it can be a factory."""

    def __call__(self):
        raise TypeError("this object is the program's")


# ---- verdicts ------------------------------------------------------------------------------------------------------
def value_test(test):
    """(statements before it, call, expected value) of a test that ends in `assert f(..) == <literal>`; else None.

    Either way round, and with `is` for None, True and False. The statements before only import and name literals, and
    f is no builtin: nothing that runs beside the program compares or knows the answer.
    """
    if len(test) > 20_000:  # deeper nesting than the parser's stack holds kills the process in Python 3.10
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            *before, last = ast.parse(test).body
        left, (operation,), (right,) = last.test.left, last.test.ops, last.test.comparators
        call, literal = (left, right) if isinstance(left, ast.Call) else (right, left)
        expected = ast.literal_eval(literal)
        defined = {*dir(builtins)}
        for statement in before:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                defined |= {alias.asname or alias.name for alias in statement.names}
            else:
                ast.literal_eval(statement.value)
                defined |= {target.id for target in statement.targets}
        by_is = isinstance(operation, ast.Is) and (expected is None or isinstance(expected, bool))
        compares = isinstance(last, ast.Assert) and (by_is or isinstance(operation, ast.Eq))
        if compares and not {call.func.id, "*"} & defined:
            return "\n".join(map(ast.unparse, before)), ast.unparse(call), (expected, by_is)
    except (SyntaxError, ValueError, TypeError, AttributeError, RecursionError, MemoryError):
        return None  # of another form; if it is not Python at all, running it will say so


def plan(test, parity=False):
    """(what the launcher gets of a test, what it does not get: the expected value, or the text that a judge runs)."""
    if isinstance(test, Stdin):
        return {"mode": "stdin", "text": test.text, "cap": test.most}, None
    if isinstance(test, Calls):
        inputs = [wire(args, plain) for args in test.inputs]
        limits = {"limits": test.limits, "timeout_s": test.timeout_s, "cap": test.most}
        return {"mode": "calls", "call": test.function, "inputs": inputs} | limits, None
    mode, before, call, secret = "judge", "", "", test
    if parity:
        mode, before = "status", test
    elif isinstance(test, Probe):
        mode, (before, _, call) = "value", test.rpartition("\n")
    elif found := value_test(test):
        mode, (before, call, secret) = "value", found
    cap = 65_536 + 40 * len(test)  # bytes; no value equal to a literal in the test is longer
    return {"mode": mode, "before": before, "call": call, "token": secrets.token_hex(16), "cap": cap}, secret


# what a forged line raises
FORGED = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError, ImportError)


def object_of(tag, content):
    """For unwire(): the only kind of object that a program may send here."""
    return {"o": Opaque}[tag]()


def verdict(test, secret, row):
    """(pass, fail, timeout, output limit or memory; the value that came back) of a test, from the launcher's line."""
    if test["mode"] == "calls":  # the values of the calls that returned come back, whatever happened then
        values, lines = [], row.get("data", "").split("\n")
        with contextlib.suppress(*FORGED):
            for line in lines[:-1]:
                value, seconds = json.loads(line)
                values.append((unwire(value, object_of), float(seconds)))
        if row["outcome"] == "done" and row["loaded"] and len(values) == len(test["inputs"]):
            return "pass", values
        failure = "memory" if lines[-1] == "memory" else "fail"
        return failure if row["outcome"] == "done" else row["outcome"], values
    if row["outcome"] != "done":
        return row["outcome"], None
    if test["mode"] == "stdin":
        return "fail" if row["status"] else "pass", row["data"].encode("latin-1").decode("utf-8", "replace")
    if test["mode"] == "status":
        return "fail" if row["status"] else "pass", None
    # Without the token the test has not finished, whatever has been written.
    if not row["data"].startswith(test["token"]):
        return "memory" if row["data"] == "memory" else "fail", None
    data = row["data"].removeprefix(test["token"])
    if test["mode"] == "judge":
        return "fail" if data else "pass", None
    # The value is made of types that we know here, so that == is ours and not the program's.
    try:
        objects = []  # those in the value that are not data
        value = unwire(json.loads(data), lambda *form: objects.append(object_of(*form)) or objects[-1])
        if isinstance(secret, Probe):
            return "pass", value
        expected, by_is = secret
        passed = value is expected if by_is else value == expected
        return "pass" if passed else "fail", None if objects else value
    except FORGED:
        return "fail", None  # a forged line, or an array, which is neither equal nor not


# ---- the two runners: called with a job, they return the lines of the launcher's report and its complaint, if any ----
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()  # macOS, Windows
LAUNCHER = Path(__file__).with_name("sandbox_inside.py").read_text("utf-8")
# What an interpreter does to become a launcher: its code comes before the job, compiled, which saves 10 ms.
BOOT = """import marshal, os, sys
code, size = b"", int(os.read(0, 16), 16)
while len(code) < size:
    code += os.read(0, size - len(code)) or sys.exit("whoever started this was killed")
exec(marshal.loads(code))"""


@functools.lru_cache(4)
def compiled(launcher):
    return marshal.dumps(compile(launcher, "<launcher>", "exec"))


def run_launcher(launcher, job, spawned=lambda process: None):
    """Run a launcher on a job: the lines of its report, and its complaint if it failed. Leaves no process and no file.

    job["judged"], [number, text] of each test by judge, follows the rest, where no program can read it. Another thread
    can kill the process that spawned() is given.
    """
    # Without namespaces the launcher makes a folder and removes it; if the launcher was killed, we do.
    folder = "" if job["namespaces"] else f"{tempfile.gettempdir()}/sandbox-{secrets.token_hex(8)}"
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    # nothing of our environment, which may hold keys; -I and -S keep our settings and packages out as well
    env = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    try:
        command = [sys.executable, "-IBS", "-c", BOOT]
        with subprocess.Popen(command, env=env, start_new_session=True, **pipes) as process:
            spawned(process)
            try:
                messages = [job | {"folder": folder, "judged": None}, *job["judged"]]
                texts = [compiled(launcher), *(json.dumps(message).encode() for message in messages)]
                request = b"".join(b"%016x" % len(text) + text for text in texts)
                out, complaint = process.communicate(request, timeout=job["program_s"] + 10)
            finally:
                process.kill()  # and with it, by PR_SET_PDEATHSIG, all that it started
    except subprocess.TimeoutExpired:
        return [], "the launcher hangs"
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)  # does not follow links
    lines = out.splitlines()  # first the layers that it found, then one for every test
    if process.returncode == 0 and len(lines) == len(job["tests"]) + 1:
        return [json.loads(line) for line in lines], ""
    complaints = complaint.decode(errors="replace").splitlines() or [f"the launcher ended with {process.returncode}"]
    return [], complaints[-1]


@functools.lru_cache(1)
def layers():
    """Try once what this machine offers, and print it: {"namespaces", "landlock": version or 0, "seccomp"}."""
    job = dataclasses.asdict(Options(allow_unsafe=True)) | {"program": "", "tests": [], "judged": [], "packages": []}
    rows, refused = run_launcher(LAUNCHER, job | {"namespaces": True})
    if refused:
        rows, complaint = run_launcher(LAUNCHER, job | {"namespaces": False})
        if complaint:
            raise SandboxError(complaint)
    (found,) = rows
    namespaces = f"off ({refused})" if refused else "on"
    landlock, seccomp = found["landlock"] or "off", "on" if found["seccomp"] else "off"
    print(f"sandbox: namespaces {namespaces}, Landlock {landlock}, seccomp {seccomp}, limits on", file=sys.stderr)
    return found


class Local:
    """Runs jobs on this machine, each in a launcher of its own. RuntimeError if the machine cannot confine them."""

    def __init__(self, options):
        if sys.platform != "linux":
            raise RuntimeError("the local sandbox needs Linux; use --runner=e2b")
        found = layers()
        if not options.allow_unsafe and not (found["seccomp"] and (found["namespaces"] or found["landlock"])):
            needed = "seccomp, and namespaces or Landlock 3; use --runner=e2b, or --allow_unsafe if nothing can be lost"
            raise RuntimeError(f"this machine cannot confine a program: it needs {needed}")
        packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        self.settings = {"namespaces": found["namespaces"], "packages": packages}
        self.running, self.closed = set(), False

    def __call__(self, job):
        return run_launcher(LAUNCHER, job | self.settings, self.spawned)

    def spawned(self, process):
        self.running.add(process)
        if self.closed:  # while it started
            process.kill()

    def close(self):
        self.closed = True
        for process in list(self.running):
            process.kill()


# What runs in a sandbox of E2B: the same launcher. No minimum of layers is required on a machine of its own.
REMOTE = """import functools, json, marshal, os, secrets, shutil, subprocess, sys, tempfile
BOOT = {boot!r}
{compiled}
{run_launcher}
job = json.loads({job!r}) | {{"allow_unsafe": True}}
job["packages"] = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
for job["namespaces"] in (True, False):
    rows, complaint = run_launcher({launcher!r}, job)
    if not complaint:
        break
print(json.dumps([rows, complaint]))
"""


class E2B:
    """Runs jobs in E2B sandboxes, one for each calling thread, or through a router of Open-R1's protocol."""

    def __init__(self, options):
        self.url, self.seconds = options.e2b_router_url, int(options.program_s) + 30
        self.mine, self.all = threading.local(), []  # the sandbox of each thread; those of all threads
        self.closed = threading.Event()
        if not self.url:
            import e2b_code_interpreter as sdk  # pip install e2b-code-interpreter
            import httpx

            self.sdk, self.lost = sdk, (sdk.SandboxException, httpx.HTTPError)

    def __call__(self, job):
        sources = {function.__name__: inspect.getsource(function) for function in (compiled, run_launcher)}
        script = REMOTE.format(boot=BOOT, launcher=LAUNCHER, job=json.dumps(job), **sources)
        output = self.routed(script) if self.url else self.direct(script)
        try:
            return json.loads(output.strip().splitlines()[-1])
        except (ValueError, IndexError):
            raise SandboxError(f"E2B: no report but {output[-200:]!r}") from None

    def direct(self, script):
        """Standard output of a script. At a rate limit or a lost sandbox it tries again, for about a minute."""
        end = time.monotonic() + self.seconds + 60
        for wait_s in (1, 2, 4, 8, 16, 32, 0):  # they differ between threads, by the random factor below
            try:
                if not hasattr(self.mine, "sandbox"):
                    self.mine.sandbox = self.sdk.Sandbox.create(timeout=20 * self.seconds, allow_internet_access=False)
                    self.all.append(self.mine.sandbox)
                execution = self.mine.sandbox.run_code(script, timeout=self.seconds)
                if execution.error:
                    raise SandboxError(f"E2B: {execution.error.name}: {execution.error.value}")
                return "".join(execution.logs.stdout)
            except self.sdk.AuthenticationException as error:
                raise RuntimeError(f"E2B: {error}".splitlines()[0]) from None
            except self.lost as error:
                complaint = f"E2B: {type(error).__name__}: {error}".splitlines()[0]
                limited = isinstance(error, self.sdk.RateLimitException) or str(error).startswith("429")
            if not limited and hasattr(self.mine, "sandbox"):
                del self.mine.sandbox  # it may be gone: the next try makes another
            if self.closed.wait(wait_s * random.uniform(0.5, 1)) or time.monotonic() > end:
                break
        raise SandboxError(complaint)

    def routed(self, script):
        """The same from a router. It takes lists of scripts; we send each alone, when its turn comes."""
        body = {"scripts": [script], "languages": ["python"], "timeout": self.seconds, "request_timeout": self.seconds}
        url = (self.url if "://" in self.url else f"http://{self.url}").rstrip("/") + "/execute_batch"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self.seconds + 30) as response:
                (answer,) = json.load(response)
            if answer["execution"] is None:
                raise SandboxError(f"{url}: {answer['exception_str']}")
            return "".join(answer["execution"]["logs"]["stdout"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SandboxError(f"{url}: {error}") from None

    def close(self):
        self.closed.set()
        while self.all:  # none with a router
            with contextlib.suppress(*self.lost):
                self.all.pop().kill()


def run_tests(programs, tests, on_result=None, **options):
    """Run every program against its own tests: a list of Result, one per program.

    programs are source texts; tests, for each program, a list of source texts, each run after the program in a fresh
    process, or of Probe, Calls and Stdin; options are the fields of Options. on_result(i, result) is called in this
    thread as programs finish, so that an interrupted caller keeps what it has. It leaves nothing running.

    rate is passed / all tests, 0 without tests, and None where the sandbox failed: the launcher was killed, the disk is
    full, E2B cannot be reached. After a test that hangs while the program loads, all others are timeouts.
    RuntimeError where the machine offers less than the safe minimum.
    """
    options = Options(**options)
    if min(options.timeout_s, options.program_s, options.memory_mb, options.disk_mb) <= 0 or options.workers < 0:
        raise ValueError("timeout_s, program_s, memory_mb and disk_mb must be above 0, workers at least 0")
    if any(isinstance(cases, str) for cases in tests):
        raise ValueError("tests is a list of tests for each program: [[test, ...], ...]")
    plans = [[plan(test, options.parity) for test in cases] for cases in tests]
    try:
        runner = E2B(options) if options.runner == "e2b" else Local(options)
    except (OSError, SandboxError) as error:
        print(f"sandbox: nothing can be run: {error}", file=sys.stderr)
        return [Result(None, [], [], str(error))] * len(programs)

    def run_program(program, cases):
        """The Result of one program; runs in a thread of the pool."""
        if not cases:
            return Result(0.0, [], [])
        judged = [[i, text] for i, (test, text) in enumerate(cases) if test["mode"] == "judge"]
        job = dataclasses.asdict(options) | {"program": program, "tests": [t for t, _ in cases], "judged": judged}
        try:
            rows, complaint = runner(job)
        except (OSError, SandboxError) as error:
            complaint = str(error)
        if complaint:
            return Result(None, [], [], complaint)
        outcomes = [verdict(test, secret, row) for (test, secret), row in zip(cases, rows[1:], strict=True)]
        verdicts, values = map(list, zip(*outcomes, strict=True))
        return Result(verdicts.count("pass") / len(cases), verdicts, values, "", [row["cpu_s"] for row in rows[1:]])

    results = [None] * len(programs)
    workers = options.workers or (2 if options.runner == "e2b" else CORES)
    pool = concurrent.futures.ThreadPoolExecutor(workers)  # each thread waits for a launcher
    try:
        futures = {pool.submit(run_program, *pair): i for i, pair in enumerate(zip(programs, plans, strict=True))}
        for future in concurrent.futures.as_completed(futures):
            i = futures[future]
            results[i] = future.result()
            if on_result:
                on_result(i, results[i])
    finally:  # also after Ctrl-C: start no more, end what runs, wait for the threads
        pool.shutdown(wait=False, cancel_futures=True)
        runner.close()
        pool.shutdown()
        runner.close()  # of what was about to start
    if failed := [result.error for result in results if result.rate is None]:
        print(f"sandbox: {len(failed)} of {len(results)} programs could not be run: {failed[0]}", file=sys.stderr)
    return results


# ---- rewards: f(completions, rows, **options) -> a reward per completion, None where there is none ------------------
def block(completion):
    """The code of a completion that holds one block, fenced by ```python and ```, and ends with it and one newline."""
    _, *rest = completion.split("```")
    if len(rest) != 2 or rest[1] != "\n" or not rest[0].startswith("python\n"):
        return None
    return rest[0].removeprefix("python\n")


PARSE = "try:\n    good = bool(ast.parse({!r}))\nexcept (SyntaxError, ValueError):\n    good = False\ngood"


def parses(sources, options, exhausted=False):
    """Whether each text is Python, by a parser in the sandbox: None where that failed, `exhausted` where it crashed."""
    workers = options.workers or CORES
    program = "import ast, warnings\nwarnings.simplefilter('ignore')"
    tests = [Probe(PARSE.format(source)) for source in sources]
    shares = [tests[i::workers] for i in range(workers)]
    limits = {"timeout_s": options.timeout_s, "program_s": options.timeout_s * len(sources) + 30}
    limits |= {"runner": options.runner, "e2b_router_url": options.e2b_router_url}
    good = [None] * len(sources)
    for i, result in enumerate(run_tests([program] * workers, shares, workers=workers, allow_unsafe=True, **limits)):
        if result.rate is not None:
            good[i::workers] = [exhausted if value is None else value for value in result.values]
    return good


def code_format(completions, rows, **options):
    """1.0 if a completion ends in its only fenced Python block and a newline, and that parses; 0.5 if not; 0.0 else.

    None where the sandbox failed; parity: also where the reference raises, at code that exhausts the parser.
    Ref: Open-R1's code_format_reward as used by Coupled-GRPO, arXiv:2506.20639.
    """
    options = Options(**options)
    exhausted = None if options.parity else False
    sources = {i: source.strip() for i, source in enumerate(map(block, completions)) if source is not None}
    rewards = [0.0] * len(completions)
    for i, good in zip(sources, parses([*sources.values()], options, exhausted), strict=True):
        rewards[i] = {True: 1.0, False: 0.5, None: None}[good]
    return rewards


def syntax(completions, rows, **options):
    """1.0 if the code parses, else 0.0: the fenced block of a completion in code_format's form, or all of it."""
    blocks = map(block, completions)
    sources = [completion if code is None else code for completion, code in zip(completions, blocks, strict=True)]
    return [good if good is None else float(good) for good in parses(sources, Options(**options))]


def code(completions, rows, **options):
    """Share of rows[i]["test_cases"] that completion i passes, verdicts in rows[i]; 0.0 unless its code_format is 1.0.

    0.0 without tests, None where the sandbox failed. parity: the exit status is the verdict, so sys.exit(0) passes; one
    timeout makes the whole completion 0.0.
    Ref: Open-R1's code_reward as used by Coupled-GRPO, arXiv:2506.20639.
    """
    forms = code_format(completions, rows, **options)
    rewards = [None if form is None else 0.0 for form in forms]
    good = [i for i, form in enumerate(forms) if form == 1.0]
    results = run_tests([block(completions[i]) for i in good], [rows[i]["test_cases"] for i in good], **options)
    for i, result in zip(good, results, strict=True):
        late = options.get("parity") and "timeout" in result.verdicts
        rewards[i] = 0.0 if late else result.rate
        rows[i]["verdicts"] = result.verdicts
    return rewards


def binary_code(completions, rows, **options):
    """1.0 if all tests pass, else 0.0; None as `code`."""
    return [rate if rate is None else float(rate > 0.99) for rate in code(completions, rows, **options)]


def soft_overlong(completions, rows, **options):
    """0 up to max_tokens - overlong_tokens tokens (rows[i]["tokens"]), then falling linearly to -1 at max_tokens.

    Ref: DAPO, arXiv:2503.14476, eq. 13.
    """
    options = Options(**options)
    first = options.max_tokens - options.overlong_tokens
    return [-min(1.0, max(0.0, (row["tokens"] - first) / max(1, options.overlong_tokens))) for row in rows]


def repetition(completions, rows, **options):
    """max_penalty * (1 - distinct n-grams / all n-grams) of lower-case words; 0.0 with fewer than `ngram` words.

    Ref: Demystifying Long Chain-of-Thought, arXiv:2502.03373, appendix.
    """
    options = Options(**options)
    rewards = []
    for words in (completion.lower().split() for completion in completions):
        grams = list(zip(*(words[i:] for i in range(options.ngram)), strict=False))
        rewards.append(options.max_penalty * (1 - len(set(grams)) / len(grams)) if grams else 0.0)
    return rewards


TESTED = {code, binary_code}  # these run tests; the others need neither tests nor a safe sandbox
REWARDS = {reward.__name__: reward for reward in (code, binary_code, code_format, syntax, soft_overlong, repetition)}


def find_reward(name):
    """A function of REWARDS by its name, or your own by `file.py:function`; ValueError if there is none."""
    if name in REWARDS:
        return REWARDS[name]
    path, _, function = name.rpartition(":")
    reward = runpy.run_path(path).get(function) if Path(path).is_file() else None
    if not callable(reward):
        raise ValueError(f"no reward {name!r}; there are {', '.join(REWARDS)}, and your own as file.py:function")
    return reward


def score(rows, rewards, **options):
    """Rewards of completions, a list for each row, nan for None; rewards are {name: function}. Equal ones run once.

    Rows hold "text", the completion, "test_cases", "tokens"; the verdicts of the tests are left in them. RuntimeError
    names a function that fails.
    """
    keys = [(row["text"], id(row["test_cases"]), row["tokens"]) for row in rows]
    different = {}
    for key, row in zip(keys, rows, strict=True):
        different.setdefault(key, row)
    texts, columns = [row["text"] for row in different.values()], []
    for name, function in rewards.items():
        try:
            values = zip(different, function(texts, [*different.values()], **options), strict=True)
            columns.append({key: math.nan if value is None else float(value) for key, value in values})
        except Exception as error:  # whatever a user's function raises
            what = f"raised {type(error).__name__}: {error}; mend it, then go on with --resume"
            raise RuntimeError(f"the reward {name} {what}") from error
    for key, row in zip(keys, rows, strict=True):
        row["verdicts"] = different[key].get("verdicts", [])
    return [[values[key] for values in columns] for key in keys]


def check(**options):
    """1 if the sandbox passes a right program and fails a wrong one; else RuntimeError."""
    (result,) = run_tests(["def f():\n    return 1"], [["assert f() == 1", "assert f() == 2"]], **options)
    if result.verdicts != ["pass", "fail"]:
        raise RuntimeError(f"the sandbox cannot be used: {result.error or result.verdicts}")
    return 1


def main(program: Path, /, tests: Path, options: Options = Options()):
    """Print a verdict for every test of a file; the exit status of the command."""
    cases = []
    for line in filter(str.strip, tests.read_text("utf-8").splitlines()):
        if line[0].isspace() and cases:  # continues the test above
            cases[-1] += "\n" + line
        else:
            cases.append(line)
    if not cases:
        raise ValueError(f"{tests} holds no tests; write one per line, such as: assert f(1) == 2")
    (result,) = run_tests([program.read_text("utf-8")], [cases], **dataclasses.asdict(options))
    if result.rate is None:
        return 2
    for outcome, value, case in zip(result.verdicts, result.values, cases, strict=True):
        got = ""
        if outcome == "fail" and value is not None:
            with contextlib.suppress(ValueError):  # an integer too long to print
                got = f"    # got {reprlib.repr(value)}"
        print(f"{outcome:12} {case.splitlines()[0]}{got}")
    print(f"{result.verdicts.count('pass')} of {len(cases)} passed")
    return 0 if result.rate == 1 else 1


if __name__ == "__main__":
    import tyro

    try:
        status = tyro.cli(main, description=__doc__, config=(tyro.conf.OmitArgPrefixes,))
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        status = str(error)  # printed, and exit status 1
    sys.exit(status)
