"""Run code that a model wrote, and score it: a sandbox made by the operating system or by E2B, and
the code rewards.

    python sandbox.py program.py --tests=tests.txt                # a verdict for every test, in a tenth of a second
    python sandbox.py program.py --tests=tests.txt --runner=e2b   # in E2B's cloud: pip install e2b-code-interpreter

tests.txt holds one test per line; an indented line continues the test above. Exit status 0: all
passed, 1: not all, or nothing to run, 2: the sandbox itself failed, or there is no such flag. From
Python:

    sandbox.run_tests([program], [["assert f(1) == 2", "assert f(5) == 7"]])
    # -> [Result(rate=0.5, verdicts=["pass", "fail"], values=[None, "6"], error="")]

For every test the program runs in a process and a folder of its own, without network, threads,
other processes, other programs or any files but Python's own. Four layers enforce this
(sandbox_inside.py):
- namespaces: a root directory, a list of processes and a network of its own, in which there is
nothing to attack
- Landlock: no file can be opened but those named, whatever path or link leads to it; no TCP
- seccomp: only the system calls that Python, NumPy and pandas need, with the arguments that they
need
- limits: time, memory, open files, and bytes written
The minimum is seccomp and one of the first two. A program cannot change the mode, the times or the
links of a file, so shutil.copy fails and copyfile works. Without namespaces it cannot make folders,
remove files or use asyncio, and can find out whether a path exists. All processes are forks of a
template that reads no program or test: they share its addresses and the seed of hash(), and see how
many tests it has run. Record locks are the machine's. An exit status proves nothing: a program
controls all of its own process, builtins, frames, memory, open pipes. So nothing that decides is
there. A test runs in a second process, the judge, confined alike, that never runs a line of the
program. The functions that it calls are pipes to the program's process, for arguments and results.
The kernel keeps the two apart, and through the pipes a program can call nothing but what the test
has given it to call. The judge also takes apart and compares what comes back, within its limits of
time and memory; this process reads its verdict, a few bytes, and builds values only for Probe, and
for Calls and Stdin without a check: for programs that one trusts. What comes back is data: builtin
types, some of the standard library's and NumPy's are built anew, by type. Any other object stays in
the program's process: two such are compared there, and none equals data. A list that f changes in
place is changed for the test, too. A wrong program can pass only two kinds of tests: those that
unpickle, import, execute or format what it wrote, and those that plain Python would pass as well
(an empty array for numpy.allclose). A test cannot subclass a program's class, compare type() of its
objects, look at their __dict__ or signature, copy or dump them (copy, dataclasses, json), redirect
the program's output or input, seed its random numbers, set its globals or see them rebound, give it
objects of the library such as io.StringIO, or get async generators, memoryviews, cyclic data. A
program imports the standard library and the site-packages of the Python that runs this, read-only.
The local sandbox needs Linux on x86-64 or aarch64 (--runner=e2b does not), and only the standard
library of Python 3.10 to 3.13.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import http.client
import inspect
import json
import marshal
import math
import os
import random
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
from pathlib import Path

from sandbox_wire import opaque, plain, unwire, wire


@dataclasses.dataclass(frozen=True)
class Options:
    # where programs run: this machine, or E2B's cloud
    runner: typing.Literal["local", "e2b"] = "local"
    # host:port of an Open-R1 router that holds the E2B key; with --runner=e2b
    e2b_router_url: str = ""
    workers: int = 0  # programs that run at a time; 0: one per CPU, or 2 E2B sandboxes
    # processor seconds per test; the limit in wall-clock time is three times as long
    timeout_s: float = 5.0
    # seconds for all tests of a program; tests that do not fit in are timeouts
    program_s: float = 30.0
    memory_mb: int = 1024  # address space of a test, in MB
    disk_mb: int = 64  # files that a test may write, in MB
    # run programs even where the machine offers less than the safe minimum
    allow_unsafe: bool = False
    # let programs start threads, as many as fit into their memory; still no processes
    threads: bool = False
    main_block: bool = True  # set __name__ to "__main__" in a program, so that its main block runs
    # rewards as the reference computes them: a test passes if the exit status is 0
    parity: bool = False
    max_tokens: int = 256  # soft_overlong: tokens at which the reward reaches -1


class Result(typing.NamedTuple):
    # share of tests that passed; None: the sandbox failed, which says nothing about the program
    rate: float | None
    # of every test: "pass", "fail", "timeout", "output limit" or "memory"; empty with rate None
    verdicts: list
    # what Probe, Calls and Stdin ask for; of a failed test what f(..) gave in its last line, if
    # that is
    values: list
    # `assert f(..) == x`, or the exception that ended it or the program, as text; else None
    error: str = ""  # what failed, with rate None
    cpu_s: list = []  # processor seconds of every test, 0 where it did not begin  # noqa: RUF012


class SandboxError(Exception):
    """The machinery failed, not the program."""


class Probe(str):
    """A test whose last line is an expression: its value comes back, and the caller compares it."""


class Calls(typing.NamedTuple):
    """A test that calls a function with one input after another, in one process; "pass" if all
    calls return.

    Its value: [(what a call returned, its processor seconds as the program's process says)], with
    Opaque for objects. With a check, the text of a program that defines right(number, inputs,
    value), the judge calls that, stops at the first value that is not right, and the value is the
    number of those that were: for programs that nobody trusts.
    """

    function: str  # an expression for the function: f, or Solution().f
    inputs: list  # the arguments of every call
    limits: list  # processor seconds of every call
    timeout_s: float  # processor seconds of all, in place of the option
    most: int = 1 << 26  # bytes that may come back
    check: str = ""
    data: typing.Any = None  # what the check finds under this name


class Stdin(typing.NamedTuple):
    """A test that runs the program alone, with a text as its standard input; "pass" if it ends
    without an exception.

    Its value is what the program prints. With a check, the text of a program that defines
    right(printed), the judge calls that instead. After a timeout the program's other tests are
    timeouts too.
    """

    text: str
    most: int = 1 << 26  # bytes that may come back
    check: str = ""


# ---- verdicts ------------------------------------------------------------------------------------------------------
def plan(test, program, options):
    """The messages of a test: for the template, the judge and the program."""
    head = {"mode": "test", "limits": [], "timeout_s": options.timeout_s, "cap": 4096}
    judge, own = {"token": secrets.token_hex(16)}, {"program": program}
    if isinstance(test, Stdin):
        head |= {"mode": "stdin", "most": test.most, "cap": test.most + 4096}
        return head, judge | {"check": test.check}, own | {"input": test.text}
    if isinstance(test, Calls):
        head |= {
            "mode": "calls",
            "limits": test.limits,
            "timeout_s": test.timeout_s,
            "cap": test.most + 64,
        }
        inputs, data = [wire(args, plain) for args in test.inputs], wire(test.data, opaque)
        asked = {"call": test.function, "inputs": inputs, "check": test.check, "data": data}
        return head, judge | asked, own
    if options.parity:
        return (
            head | {"mode": "status", "most": 0},
            judge | {"check": ""},
            {"program": f"{program}\n{test}"},
        )
    if isinstance(test, Probe):
        before, _, call = test.rpartition("\n")
        head |= {"mode": "value", "cap": 65_536 + 40 * len(test)}
        return head, judge | {"before": before, "call": call}, own
    return head, judge | {"text": test}, own


def verdict(test, row, given):
    """(pass, fail, timeout, output limit or memory; what the test gives back), from the template's
    row and the bytes.

    Without the judge's token the test has not finished.
    """
    head, judge, _ = test
    mode, outcome, got = head["mode"], row["outcome"], None
    given, finished, last = given.rpartition(judge["token"].encode())
    if outcome == "done":
        outcome, got = json.loads(last) if finished else ("fail", None)
    if mode in ("stdin", "status"):
        if outcome == "pass" and row["status"]:
            outcome = "fail"
        shown = mode == "stdin" and not judge["check"] and row["outcome"] == "done"
        return outcome, given.decode("utf-8", "replace") if shown else None
    if mode == "calls":
        lines = (given if finished else last).split(b"\n")[:-1]
        if judge["check"]:
            return outcome, len(lines)
        # of the calls that returned, whatever happened then
        values = [json.loads(line) for line in lines]
        return outcome, [(unwire(value), seconds) for value, seconds in values]
    if mode == "value" and outcome == "pass":
        return outcome, unwire(json.loads(given))
    return outcome, got if mode == "test" else None


# ---- the two runners: called with the tests of a program, they return [(row, what the test gave back)] -------------
# macOS, Windows
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
with contextlib.suppress(OSError, ValueError):  # a container may have a share of their time
    quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    CORES = min(CORES, math.ceil(int(quota) / int(period)))
INSIDE = "sandbox_wire", "sandbox_inside"
LAUNCHER = tuple(
    (name, Path(__file__).with_name(f"{name}.py").read_text("utf-8")) for name in INSIDE
)
# What an interpreter does to become a launcher: its code comes before the settings, compiled, which
# saves 20 ms.
BOOT = """import marshal, os, sys, types
code, size = b"", int(os.read(0, 16), 16)
while len(code) < size:
    code += os.read(0, size - len(code)) or sys.exit("whoever started this was killed")
for name, code in marshal.loads(code):
    module = sys.modules[name] = types.ModuleType(name)
    exec(code, module.__dict__)
module.launch()"""


@functools.lru_cache(4)
def compiled(launcher):
    return marshal.dumps([(name, compile(text, f"<{name}>", "exec")) for name, text in launcher])


class Template:
    """An interpreter that runs tests, each in processes of its own, see sandbox_inside.py.
    SandboxError if it fails.
    """

    def __init__(self, launcher, settings):
        # Without namespaces the launcher makes a folder and removes it; if the launcher was killed,
        # we do.
        self.folder = (
            ""
            if settings["namespaces"]
            else f"{tempfile.gettempdir()}/sandbox-{secrets.token_hex(8)}"
        )
        # nothing of our environment, which may hold keys; -I and -S keep our settings and packages
        # out as well
        env = {
            "PATH": "/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        command = [sys.executable, "-IBS", "-c", BOOT]
        self.process = subprocess.Popen(command, env=env, start_new_session=True, **pipes)
        self.messages = compiled(launcher), json.dumps(settings | {"folder": self.folder}).encode()

    def start(self):
        """What this machine offers: {"namespaces", "landlock": version or 0, "seccomp"}."""
        with self.limited(60):
            self.send(*self.messages)
            return self.report()[0]

    def send(self, *messages):
        try:
            for message in messages:
                self.process.stdin.write(b"%016x" % len(message) + message)
            self.process.stdin.flush()
        except BrokenPipeError:
            raise SandboxError(self.complaint()) from None

    @contextlib.contextmanager
    def limited(self, seconds):
        """Kill a launcher that hangs."""
        timer = threading.Timer(seconds, self.process.kill)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def report(self):
        """The next (row, bytes) of its report."""
        line = self.process.stdout.readline()
        row = json.loads(line) if line.endswith(b"\n") else {"size": 1}
        given = self.process.stdout.read(row["size"])
        if len(given) < row["size"]:
            raise SandboxError(self.complaint())
        return row, given

    def complaint(self):
        """The last line of the launcher's stderr, or the status that it ended with."""
        lines = self.process.stderr.read().decode(errors="replace").splitlines()
        return (lines or [f"the launcher ended with {self.process.wait()}"])[-1]

    def run(self, tests, program_s):
        """[(row, what came back)] of the tests of a program; those for which there is no time left
        are timeouts.
        """
        end, rows, hangs = time.monotonic() + program_s, [], False
        with self.limited(program_s + 10):
            for i, (head, judge, program) in enumerate(tests):
                row, given, left_s = (
                    {"outcome": "timeout", "cpu_s": 0.0},
                    b"",
                    end - time.monotonic(),
                )
                if left_s > 0 and not hangs:
                    head = head | {"left_s": left_s, "first": i == 0, "tests": len(tests) - i}
                    self.send(*(json.dumps(message).encode() for message in (head, judge, program)))
                    row, given = self.report()
                    hangs = row["outcome"] == "timeout" and (
                        head["mode"] == "stdin" or not row["loaded"]
                    )
                rows.append((row, given))
        return rows

    def close(self):
        self.process.kill()  # and with it, by PR_SET_PDEATHSIG, all that it started
        self.process.wait()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)  # does not follow links


@functools.lru_cache(1)
def layers():
    """Try once what this machine offers, and print it: {"namespaces", "landlock": version or 0,
    "seccomp"}.
    """
    settings, refused = dataclasses.asdict(Options(allow_unsafe=True)) | {"packages": []}, ""
    for settings["namespaces"] in (True, False):
        template = Template(LAUNCHER, settings)
        try:
            found = template.start()
            break
        except SandboxError as error:
            if refused:
                raise
            refused = error
        finally:
            template.close()
    namespaces = f"off ({refused})" if refused else "on"
    landlock, seccomp = found["landlock"] or "off", "on" if found["seccomp"] else "off"
    print(
        f"sandbox: namespaces {namespaces}, Landlock {landlock}, seccomp {seccomp}, limits on",
        file=sys.stderr,
    )
    return found


class Local:
    """Runs tests on this machine, in a Template for each thread. RuntimeError if the machine cannot
    confine them.
    """

    def __init__(self, options):
        if sys.platform != "linux":
            raise RuntimeError("the local sandbox needs Linux; use --runner=e2b")
        found = layers()
        if not options.allow_unsafe and not (
            found["seccomp"] and (found["namespaces"] or found["landlock"])
        ):
            needed = "seccomp, and namespaces or Landlock 3; use --runner=e2b, or --allow_unsafe if nothing can be lost"
            raise RuntimeError(f"this machine cannot confine a program: it needs {needed}")
        packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        self.settings = dataclasses.asdict(options) | {
            "namespaces": found["namespaces"],
            "packages": packages,
        }
        self.mine, self.all, self.closed = threading.local(), [], False

    def __call__(self, tests):
        template = getattr(self.mine, "template", None)
        try:
            if not template:
                template = self.mine.template = Template(LAUNCHER, self.settings)
                self.all.append(template)
                if self.closed:
                    template.close()
                template.start()
            return template.run(tests, self.settings["program_s"])
        except BaseException:
            self.mine.template = None  # the next program gets another
            raise

    def close(self):
        self.closed = True
        for template in [*self.all]:
            template.close()


# What runs in a sandbox of E2B: the same launcher. No minimum of layers is required on a machine of
# its own.
REMOTE = """import contextlib, functools, json, marshal, secrets, shutil, subprocess, sys, tempfile, threading, time
class SandboxError(Exception): pass
BOOT = {boot!r}
{sources}
settings, tests = json.loads({job!r})
settings |= {{"allow_unsafe": True}}
settings["packages"] = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
for settings["namespaces"] in (True, False):
    rows, complaint = [], ""
    try:
        template = Template({launcher!r}, settings)
        template.start()
        rows = [(row, given.decode("latin-1")) for row, given in template.run(tests, settings["program_s"])]
        template.close()
        break
    except SandboxError as error:
        complaint = str(error)
print(json.dumps([rows, complaint]))
"""


class E2B:
    """Runs tests in E2B sandboxes, one for each calling thread, or through a router of Open-R1's
    protocol.
    """

    def __init__(self, options):
        self.url, self.seconds = options.e2b_router_url, int(options.program_s) + 30
        self.settings = dataclasses.asdict(options)
        self.sources = inspect.getsource(compiled) + inspect.getsource(Template)
        # the sandbox of each thread; those of all threads
        self.mine, self.all = threading.local(), []
        self.closed = threading.Event()
        if not self.url:
            import e2b_code_interpreter as sdk  # pip install e2b-code-interpreter
            import httpx

            self.sdk, self.lost = sdk, (sdk.SandboxException, httpx.HTTPError)

    def __call__(self, tests):
        job = json.dumps([self.settings, tests])
        script = REMOTE.format(boot=BOOT, launcher=LAUNCHER, job=job, sources=self.sources)
        output = self.routed(script) if self.url else self.direct(script)
        try:
            rows, complaint = json.loads(output.strip().splitlines()[-1])
        except (ValueError, IndexError):
            raise SandboxError(f"E2B: no report but {output[-200:]!r}") from None
        if complaint:
            raise SandboxError(complaint)
        return [(row, given.encode("latin-1")) for row, given in rows]

    def direct(self, script):
        """Standard output of a script. At a rate limit or a lost sandbox it tries again, for about
        a minute.
        """
        end = time.monotonic() + self.seconds + 60
        # they differ between threads, by the random factor below
        for wait_s in (1, 2, 4, 8, 16, 32, 0):
            try:
                if not hasattr(self.mine, "sandbox"):
                    self.mine.sandbox = self.sdk.Sandbox.create(
                        timeout=20 * self.seconds, allow_internet_access=False
                    )
                    self.all.append(self.mine.sandbox)
                execution = self.mine.sandbox.run_code(script, timeout=self.seconds)
                if execution.error:
                    raise SandboxError(f"E2B: {execution.error.name}: {execution.error.value}")
                return "".join(execution.logs.stdout)
            except self.sdk.AuthenticationException as error:
                raise RuntimeError(f"E2B: {error}".splitlines()[0]) from None
            except self.lost as error:
                complaint = f"E2B: {type(error).__name__}: {error}".splitlines()[0]
                limited = isinstance(error, self.sdk.RateLimitException) or str(error).startswith(
                    "429"
                )
            if not limited and hasattr(self.mine, "sandbox"):
                del self.mine.sandbox  # it may be gone: the next try makes another
            if self.closed.wait(wait_s * random.uniform(0.5, 1)) or time.monotonic() > end:
                break
        raise SandboxError(complaint)

    def routed(self, script):
        """Standard output of a script from a router. It takes lists of scripts; we send each alone,
        in its turn.
        """
        body = {
            "scripts": [script],
            "languages": ["python"],
            "timeout": self.seconds,
            "request_timeout": self.seconds,
        }
        url = (self.url if "://" in self.url else f"http://{self.url}").rstrip(
            "/"
        ) + "/execute_batch"
        request = urllib.request.Request(
            url, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=self.seconds + 30) as response:
                (answer,) = json.load(response)
            if answer["execution"] is None:
                raise SandboxError(f"{url}: {answer['exception_str']}")
            return "".join(answer["execution"]["logs"]["stdout"])
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            raise SandboxError(f"{url}: {error}") from None

    def close(self):
        self.closed.set()
        while self.all:  # none with a router
            with contextlib.suppress(*self.lost):
                self.all.pop().kill()


def workers_of(options):
    """Programs that run at a time."""
    return options.workers or (2 if options.runner == "e2b" else CORES)


def run_tests(programs, tests, on_result=None, **options):
    """Run every program against its own tests: a list of Result, one per program.

    programs are source texts; tests, for each program, a list of source texts, each run after the
    program in a fresh process, or of Probe, Calls and Stdin; options are the fields of Options.
    Tests themselves share a process in fours: a test that sets decimal's precision or the limit of
    recursion sets it for the next, too. on_result(i, result) is called in this thread as programs
    finish, so that an interrupted caller keeps what it has. Nothing is left running.

    rate is passed / all tests, 0 without tests, and None where the sandbox failed: the launcher was
    killed, the disk is full, E2B cannot be reached. After a test that hangs while the program
    loads, all others are timeouts. RuntimeError where the machine offers less than the safe
    minimum.
    """
    options = Options(**options)
    if (
        min(options.timeout_s, options.program_s, options.memory_mb, options.disk_mb) <= 0
        or options.workers < 0
    ):
        raise ValueError(
            "timeout_s, program_s, memory_mb and disk_mb must be above 0, workers at least 0"
        )
    if any(isinstance(cases, str) for cases in tests):
        raise ValueError("tests is a list of tests for each program: [[test, ...], ...]")
    try:
        runner = E2B(options) if options.runner == "e2b" else Local(options)
    except (OSError, SandboxError) as error:
        print(f"sandbox: nothing can be run: {error}", file=sys.stderr)
        return [Result(None, [], [], str(error))] * len(programs)

    def run_program(program, cases):
        """The Result of one program; runs in a thread of the pool."""
        if not cases:
            return Result(0.0, [], [])
        plans = [plan(test, program, options) for test in cases]
        try:
            rows = runner(plans)
        except (OSError, SandboxError) as error:
            return Result(None, [], [], str(error))
        outcomes = []
        for test, row in zip(plans, rows, strict=True):
            try:
                outcomes.append(verdict(test, *row))
            except Exception:  # a value that cannot be made here is no value
                outcomes.append(("fail", None))
        verdicts, values = map(list, zip(*outcomes, strict=True))
        return Result(
            verdicts.count("pass") / len(cases),
            verdicts,
            values,
            "",
            [row["cpu_s"] for row, _ in rows],
        )

    results = [None] * len(programs)
    workers = workers_of(options)
    pool = concurrent.futures.ThreadPoolExecutor(workers)  # each thread waits for a launcher
    try:
        futures = {
            pool.submit(run_program, *pair): i
            for i, pair in enumerate(zip(programs, tests, strict=True))
        }
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
        print(
            f"sandbox: {len(failed)} of {len(results)} programs could not be run: {failed[0]}",
            file=sys.stderr,
        )
    return results


# ---- rewards: f(completions, rows, **options) -> a reward per completion, None where there is none ------------------
def block(completion):
    """The code of a completion that holds one block, fenced by ```python and ```, and ends with it
    and one newline.
    """
    _, *rest = completion.split("```")
    if len(rest) != 2 or rest[1] != "\n" or not rest[0].startswith("python\n"):
        return None
    return rest[0].removeprefix("python\n")


PARSE = "try:\n    good = bool(ast.parse({!r}))\nexcept (SyntaxError, ValueError):\n    good = False\ngood"


def parses(sources, options, exhausted=False):
    """Whether each text is Python, by a parser in the sandbox: None where that failed, `exhausted`
    where it crashed.
    """
    workers = workers_of(options)
    program = "import ast, warnings\nwarnings.simplefilter('ignore')"
    tests = [Probe(PARSE.format(source)) for source in sources]
    shares = [tests[i::workers] for i in range(workers)]
    limits = {"timeout_s": options.timeout_s, "program_s": options.timeout_s * len(sources) + 30}
    limits |= {"runner": options.runner, "e2b_router_url": options.e2b_router_url}
    good = [None] * len(sources)
    for i, result in enumerate(
        run_tests([program] * workers, shares, workers=workers, allow_unsafe=True, **limits)
    ):
        if result.rate is not None:
            good[i::workers] = [exhausted if value is None else value for value in result.values]
    return good


def code_format(completions, rows, **options):
    """1.0 if a completion ends in its only fenced Python block and a newline, and that parses; 0.5
    if not; 0.0 else.

    None where the sandbox failed; parity: also where the reference raises, at code that exhausts
    the parser. Ref: Open-R1's code_format_reward as used by Coupled-GRPO, arXiv:2506.20639.
    """
    options = Options(**options)
    exhausted = None if options.parity else False
    sources = {
        i: source.strip() for i, source in enumerate(map(block, completions)) if source is not None
    }
    rewards = [0.0] * len(completions)
    for i, good in zip(sources, parses([*sources.values()], options, exhausted), strict=True):
        rewards[i] = {True: 1.0, False: 0.5, None: None}[good]
    return rewards


def syntax(completions, rows, **options):
    """1.0 if the code parses, else 0.0: the fenced block of a completion in code_format's form, or
    all of it.
    """
    blocks = map(block, completions)
    sources = [
        completion if code is None else code
        for completion, code in zip(completions, blocks, strict=True)
    ]
    return [good if good is None else float(good) for good in parses(sources, Options(**options))]


def code(completions, rows, **options):
    """Share of rows[i]["test_cases"] that completion i passes, verdicts in rows[i]; 0.0 unless its
    code_format is 1.0.

    0.0 without tests, None where the sandbox failed. parity: the exit status is the verdict, so
    sys.exit(0) passes; one timeout makes the whole completion 0.0.
    Ref: Open-R1's code_reward as used by Coupled-GRPO, arXiv:2506.20639.
    """
    forms = code_format(completions, rows, **options)
    rewards = [None if form is None else 0.0 for form in forms]
    good = [i for i, form in enumerate(forms) if form == 1.0]
    results = run_tests(
        [block(completions[i]) for i in good], [rows[i]["test_cases"] for i in good], **options
    )
    for i, result in zip(good, results, strict=True):
        rewards[i] = 0.0 if options.get("parity") and "timeout" in result.verdicts else result.rate
        rows[i]["verdicts"] = result.verdicts
    return rewards


def binary_code(completions, rows, **options):
    """1.0 if all tests pass, else 0.0; None as `code`."""
    most = 0.99 if options.get("parity") else 1 - 1e-9  # the reference's threshold
    return [
        rate if rate is None else float(rate > most) for rate in code(completions, rows, **options)
    ]


def soft_overlong(completions, rows, max_tokens=256, overlong_tokens=64, **options):
    """0 up to max_tokens - overlong_tokens tokens (rows[i]["tokens"]), then falling linearly to -1
    at max_tokens.

    Ref: DAPO, arXiv:2503.14476, eq. 13.
    """
    over = (row["tokens"] - max_tokens + overlong_tokens for row in rows)
    return [-min(1.0, max(0.0, each / max(1, overlong_tokens))) for each in over]


def repetition(completions, rows, ngram=3, max_penalty=-1.0, **options):
    """max_penalty * (1 - distinct n-grams / all n-grams) of lower-case words; 0.0 with fewer than
    `ngram` words.

    Ref: Demystifying Long Chain-of-Thought, arXiv:2502.03373, appendix.
    """
    rewards = []
    for words in (completion.lower().split() for completion in completions):
        grams = list(zip(*(words[i:] for i in range(ngram)), strict=False))
        rewards.append(max_penalty * (1 - len(set(grams)) / len(grams)) if grams else 0.0)
    return rewards


TESTED = {code, binary_code}  # these run tests; the others need neither tests nor a safe sandbox
REWARDS = {
    reward.__name__: reward
    for reward in (code, binary_code, code_format, syntax, soft_overlong, repetition)
}


def find_reward(name):
    """A function of REWARDS by its name, or your own by `file.py:function`; ValueError if there is
    none.
    """
    if name in REWARDS:
        return REWARDS[name]
    path, _, function = name.rpartition(":")
    reward = runpy.run_path(path).get(function) if Path(path).is_file() else None
    if not callable(reward):
        raise ValueError(
            f"no reward {name!r}; there are {', '.join(REWARDS)}, and your own as file.py:function"
        )
    return reward


def score(rows, rewards, **options):
    """Rewards of completions, a list for each row, nan for None; rewards are {name: function}.
    Equal ones run once.

    Rows hold "text", the completion, "test_cases", "tokens"; the verdicts of the tests are left in
    them. RuntimeError names a function that fails.
    """
    keys = [(row["text"], id(row["test_cases"]), row["tokens"]) for row in rows]
    different = {}
    for key, row in zip(keys, rows, strict=True):
        different.setdefault(key, row)
    texts, columns = [row["text"] for row in different.values()], []
    for name, function in rewards.items():
        try:
            values = zip(different, function(texts, [*different.values()], **options), strict=True)
            columns.append(
                {key: math.nan if value is None else float(value) for key, value in values}
            )
        except Exception as error:  # whatever a user's function raises
            what = f"raised {type(error).__name__}: {error}; mend it, then go on with --resume"
            raise RuntimeError(f"the reward {name} {what}") from error
    for key, row in zip(keys, rows, strict=True):
        row["verdicts"] = different[key].get("verdicts", [])
    return [[values[key] for values in columns] for key in keys]


def check(**options):
    """1 if the sandbox passes a right program and fails a wrong one; else RuntimeError."""
    (result,) = run_tests(
        ["def f():\n    return 1"], [["assert f() == 1", "assert f() == 2"]], **options
    )
    if result.verdicts != ["pass", "fail"]:
        raise RuntimeError(f"the sandbox cannot be used: {result.error or result.verdicts}")
    return 1


def report(result, cases, as_json):
    """Print the verdicts: lines for a reader, or a JSON object for every test, and a last one for
    all.

    {"verdict": "fail", "test": "assert f(1) == 2", "got": "3"}; got is null where nothing was given
    {"passed": 1, "tests": 2, "rate": 0.5, "error": ""}; with an error rate is null, no tests before
    """
    rows = zip(result.verdicts, cases, result.values, strict=False)
    for outcome, case, value in rows:
        got = str(value) if outcome == "fail" and value is not None else None
        if as_json:
            print(json.dumps({"verdict": outcome, "test": case, "got": got}))
            continue
        # no escape sequences
        shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in got or "")
        print(f"{outcome:12} {case.splitlines()[0]}" + (f"    # got {shown}" if got else ""))
    passed = result.verdicts.count("pass")
    if as_json:
        counts = {"passed": passed, "tests": len(cases), "rate": result.rate}
        print(json.dumps(counts | {"error": result.error}))
    elif result.rate is not None:
        print(f"{passed} of {len(cases)} passed")


def main(program: Path, /, tests: Path, options: Options = Options(), json: bool = False):
    """Print a verdict for every test of a file; the exit status of the command.

    json: print an object for every test, and a last one for all, see report().
    """
    if missing := ", ".join(str(path) for path in (program, tests) if not path.is_file()):
        raise FileNotFoundError(
            f"{missing} is no file; name a program and, with --tests, a file of one test per line"
        )
    cases = []
    lines = [
        line
        for line in tests.read_text("utf-8-sig").split("\n")
        if line.strip() and not line.startswith("#")
    ]
    for line in lines:
        if line[0].isspace() and cases:  # continues the test above
            cases[-1] += "\n" + line
        else:
            cases.append(line)
    if not cases:
        raise ValueError(f"{tests} holds no tests; write one per line, such as: assert f(1) == 2")
    (result,) = run_tests([program.read_text("utf-8-sig")], [cases], **dataclasses.asdict(options))
    report(result, cases, json)
    if result.rate is None:
        return 2
    return 0 if result.rate == 1 else 1


if __name__ == "__main__":
    try:
        import tyro

        status = tyro.cli(main, description=__doc__, config=(tyro.conf.OmitArgPrefixes,))
    except KeyboardInterrupt:
        status = 130
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        advice = (
            f"; pip install {error.name.replace('_', '-')}"
            if isinstance(error, ModuleNotFoundError)
            else ""
        )
        print(f"{error}{advice}", file=sys.stderr)
        status = 2 if isinstance(error, RuntimeError) else 1
    sys.exit(status)
