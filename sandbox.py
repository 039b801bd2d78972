"""Run code that a model wrote, in a sandbox of the operating system or of E2B; the rewards. Prints.

    python sandbox.py program.py --tests=tests.txt                # a verdict for every test
    python sandbox.py program.py --tests=tests.txt --json         # the same as objects
    python sandbox.py program.py --tests=tests.txt --runner=e2b   # pip install e2b-code-interpreter

tests.txt holds one test per line; an indented line continues the test above. Exit status 0: all
passed, 1: not all, or nothing to run, 2: the sandbox failed, or there is no such flag. In Python:

    sandbox.run_tests([program], [["assert f(1) == 2", "assert f(5) == 7"]])
    # -> [Result(rate=0.5, verdicts=["pass", "fail"], values=[None, "6"], error="")]

A wrong program can pass two kinds of tests: those that unpickle, import, execute or format what it
wrote, and those that plain Python would pass as well (an empty array for numpy.allclose). What it
does not stop otherwise: all processes are forks of a template that reads no program or test. They
share its addresses and the seed of hash(), and see how many tests it has run. Record locks are the
machine's. Without namespaces a program can find out whether a path exists.

For every test the program runs in a process and a folder of its own, without network, threads,
other processes, other programs or any files but Python's own. Four layers enforce this, see
jail/inside.py:
- namespaces: a root directory, a list of processes and a network of its own
- Landlock: no file can be opened but those named, whatever path or link leads to it; no TCP
- seccomp: only the system calls that Python, NumPy and pandas need, with the arguments they need
- limits: time, memory, open files, and bytes written
The minimum is seccomp and one of the first two.

An exit status proves nothing: a program controls all of its own process, builtins, frames, memory,
open pipes. So nothing that decides is there. A test runs in a second process, the judge, confined
alike, that never runs a line of the program. The functions that it calls are pipes to the program's
process, for arguments and results (jail/wire.py). Through them a program can call nothing but what
the test has given it to call. The judge compares what comes back; this process reads its verdict, a
few bytes, and builds values only for Probe, and for Calls and Stdin without a check: for programs
that one trusts. What comes back is data: builtin types, some of the standard library's and NumPy's
are built anew, by type. Any other object stays in the program's process: two such are compared
there, and none equals data. A list that f changes in place is changed for the test, too.

What differs from plain Python: a program starts no processes, and no threads without --threads. It
cannot change the mode, the times or the links of a file (copyfile works, shutil.copy fails) or call
flock; without namespaces it cannot make folders, remove files (so no temporary files, no sqlite on
disk) or use asyncio. sys.exit('text') with input is no failure. It imports the standard library and
the site-packages of the Python that runs this, read-only. type() of an object of the other side is
no class of it; issubclass() finds no ABC of it. A test cannot subclass a program's class, let its
__exit__ suppress an exception, look at the __dict__ of its objects, copy or dump them (copy,
dataclasses, json), redirect its output or input, seed its random numbers, set its globals or see
them rebound, give it io.StringIO and the like, or get async generators, memoryviews, cyclic data.

It needs Linux on x86-64 or aarch64 (--runner=e2b does not) and Python 3.10 to 3.13, no package.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import http.client
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
import types
import typing
import urllib.request
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Options:
    # where programs run. local: this machine; e2b: E2B's cloud, with your key; HOST:PORT: an Open-R1
    # router, with its key
    runner: str = "local"
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

    def __post_init__(self):
        if self.runner not in ("local", "e2b") and ":" not in self.runner:
            raise ValueError(
                f"--runner={self.runner}: give local, e2b, or HOST:PORT of an Open-R1 router"
            )


class Result(typing.NamedTuple):
    # share of tests that passed; None: the sandbox failed, which says nothing about the program
    rate: float | None
    # of every test: "pass", "fail", "timeout", "output limit" or "memory"; empty with rate None
    verdicts: list
    # what Probe, Calls and Stdin ask for; of a failed test, as text, what f(..) gave in its last
    # line `assert f(..) == x`, or the exception that ended it or the program; else None
    values: list
    error: str = ""  # what failed, with rate None
    cpu_s: list = []  # processor seconds of every test, 0 where it did not begin  # noqa: RUF012


class SandboxError(OSError):
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


# ---- what is sent: the texts of jail/ ------------------------------------------------------------
def text_of(name):
    return Path(__file__).parent.joinpath(name).read_text("utf-8")


JAIL = {name: text_of(f"jail/{name}.py") for name in ("boot", "wire", "inside", "remote")}
compiled = functools.lru_cache(8)(compile)

# This process writes and reads values, too. Nothing else of jail/ runs in it.
values = types.ModuleType("jail.wire")
exec(compiled(JAIL["wire"], "<jail.wire>", "exec"), values.__dict__)


# ---- verdicts ------------------------------------------------------------------------------------
def plan(test, program, options):
    """The messages of a test: for the template, the judge and the program."""
    head = {"mode": "test", "limits": [], "timeout_s": options.timeout_s, "cap": 4096}
    judge = {"token": secrets.token_hex(16)}
    own = {"program": program}
    if isinstance(test, Stdin):
        head |= {"mode": "stdin", "most": test.most, "cap": test.most + 4096}
        judge["check"] = test.check
        own["input"] = test.text
    elif isinstance(test, Calls):
        head |= {"mode": "calls", "limits": test.limits, "timeout_s": test.timeout_s}
        head["cap"] = test.most + 64
        judge["call"] = test.function
        judge["inputs"] = [values.wire(arguments, values.plain) for arguments in test.inputs]
        judge["check"] = test.check
        judge["data"] = values.wire(test.data, values.opaque)
    elif isinstance(test, Probe):
        head |= {"mode": "value", "cap": 65_536 + 40 * len(test)}
        judge["before"], _, judge["call"] = test.rpartition("\n")
    else:
        judge["text"] = test
    return head, judge, own


def verdict(test, row, given):
    """(pass, fail, timeout, output limit or memory; what the test gives back), from the template's
    row and the bytes.
    """
    head, judge, _ = test
    mode = head["mode"]
    outcome = row["outcome"]
    got = None
    given, finished, last = given.rpartition(judge["token"].encode())
    if outcome == "done":
        outcome = "fail"  # without the judge's token the test has not finished
        if finished:
            outcome, got = json.loads(last)
    if mode == "test":
        return outcome, got
    if mode == "stdin":
        if outcome == "pass" and row["status"]:
            outcome = "fail"
        if judge["check"] or row["outcome"] != "done":
            return outcome, None
        return outcome, given.decode("utf-8", "replace")
    if mode == "calls":
        # of the calls that returned, whatever happened then
        lines = (given if finished else last).split(b"\n")[:-1]
        if judge["check"]:
            return outcome, len(lines)
        return outcome, [(values.unwire(form), s) for form, s in map(json.loads, lines)]
    if outcome == "pass":
        return outcome, values.unwire(json.loads(given))
    return outcome, None


# ---- the two runners: called with the tests of a program, they return [(row, what came back)] ----
class Template:
    """An interpreter that runs tests, each in processes of its own, see jail/inside.py.
    SandboxError if it fails.
    """

    def __init__(self, settings):
        # Without namespaces the launcher makes a folder and removes it; if the launcher was killed,
        # we do.
        self.folder = ""
        if not settings["namespaces"]:
            self.folder = f"{tempfile.gettempdir()}/sandbox-{secrets.token_hex(8)}"
        modules = []
        for name in ("wire", "inside"):
            modules.append((f"jail.{name}", compiled(JAIL[name], f"<jail.{name}>", "exec")))
        settings = json.dumps(settings | {"folder": self.folder})
        self.messages = [marshal.dumps(modules), settings.encode()]
        # nothing of our environment, which may hold keys; -I and -S keep our settings and packages
        # out as well
        self.process = subprocess.Popen(
            [sys.executable, "-IBS", "-c", JAIL["boot"]],
            env={
                "PATH": "/usr/bin:/bin",
                "LANG": "C.UTF-8",
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            },
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

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
        """End a launcher that hangs."""
        timer = threading.Timer(seconds, self.close)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def report(self):
        """The next (row, bytes) of its report."""
        line = self.process.stdout.readline()
        if line.endswith(b"\n"):
            row = json.loads(line)
            given = self.process.stdout.read(row["size"])
            if len(given) == row["size"]:
                return row, given
        raise SandboxError(self.complaint())

    def complaint(self):
        """The last line of the launcher's stderr, or the status that it ended with."""
        lines = self.process.stderr.read().decode(errors="replace").splitlines()
        if lines:
            return lines[-1]
        return f"the launcher ended with {self.process.wait()}"

    def run(self, tests, program_s):
        """[(row, what came back)] of the tests of a program; those for which there is no time left
        are timeouts.
        """
        end = time.monotonic() + program_s
        rows = []
        hangs = False
        with self.limited(program_s + 10):
            for i, (head, judge, program) in enumerate(tests):
                left_s = end - time.monotonic()
                if left_s <= 0 or hangs:
                    rows.append(({"outcome": "timeout", "cpu_s": 0.0}, b""))
                    continue
                head |= {"left_s": left_s, "first": i == 0, "tests": len(tests) - i}
                self.send(*(json.dumps(message).encode() for message in (head, judge, program)))
                row, given = self.report()
                rows.append((row, given))
                if row["outcome"] == "timeout":
                    hangs = head["mode"] == "stdin" or not row["loaded"]
        return rows

    def close(self):
        self.process.terminate()  # it ends all that it started, and waits for it
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()  # and the rest by PR_SET_PDEATHSIG
            self.process.wait()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)  # does not follow links


def started(settings):
    """A Template, what it finds on this machine, and why namespaces are refused, or ""."""
    refused = ""
    for namespaces in (True, False):
        template = Template(settings | {"namespaces": namespaces})
        try:
            return template, template.start(), refused
        except SandboxError as error:
            template.close()
            refused = str(error)
    raise SandboxError(refused)


@functools.lru_cache(1)
def layers():
    """Try once what this machine offers, and print it: {"namespaces", "landlock": version or 0,
    "seccomp"}.
    """
    settings = dataclasses.asdict(Options(allow_unsafe=True)) | {"packages": []}
    template, found, refused = started(settings)
    template.close()
    print(
        f"sandbox: namespaces {f'off ({refused})' if refused else 'on'}, "
        f"Landlock {found['landlock'] or 'off'}, "
        f"seccomp {'on' if found['seccomp'] else 'off'}, limits on",
        file=sys.stderr,
    )
    return found


PACKAGES = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]


class Local:
    """Runs tests on this machine, in a Template for each that calls at a time. RuntimeError if the
    machine cannot confine them.
    """

    def __init__(self, options):
        if sys.platform != "linux":
            raise RuntimeError("the local sandbox needs Linux; use --runner=e2b")
        found = layers()
        safe = found["seccomp"] and (found["namespaces"] or found["landlock"])
        if not safe and not options.allow_unsafe:
            raise RuntimeError(
                "this machine cannot confine a program: it needs seccomp, and namespaces or "
                "Landlock 3; use --runner=e2b, or --allow_unsafe if nothing can be lost"
            )
        self.settings = dataclasses.asdict(options)
        self.settings |= {"namespaces": found["namespaces"], "packages": PACKAGES}
        self.all = []
        self.free = []  # those that run nothing
        self.closed = False

    def __call__(self, tests):
        try:
            template = self.free.pop()
        except IndexError:
            template = Template(self.settings)
            self.all.append(template)
            if self.closed:
                template.close()
            template.start()
        rows = template.run(tests, self.settings["program_s"])
        self.free.append(template)  # one that fails is not used again
        return rows

    def close(self):
        self.closed = True
        for template in self.all:
            template.close()


def answer(settings, tests):
    """What a template reports of the tests of a program, in E2B's cloud: see jail/remote.py."""
    template, *_ = started(settings | {"packages": PACKAGES})
    rows = template.run(tests, settings["program_s"])
    template.close()
    return [(row, given.decode("latin-1")) for row, given in rows]


class E2B:
    """Runs tests in E2B sandboxes, one for each calling thread, or through a router of Open-R1's
    protocol.
    """

    def __init__(self, options):
        self.url = "" if options.runner == "e2b" else options.runner
        self.seconds = int(options.program_s) + 30
        # no layer is required on a machine of one's own
        self.settings = dataclasses.asdict(options) | {"allow_unsafe": True}
        # the sandbox of each thread; those of all threads
        self.mine = threading.local()
        self.all = []
        self.closed = threading.Event()
        if not self.url:
            import e2b_code_interpreter as sdk  # pip install e2b-code-interpreter
            import httpx

            self.sdk = sdk
            self.lost = sdk.SandboxException, httpx.HTTPError

    def __call__(self, tests):
        job = json.dumps([text_of("sandbox.py"), JAIL, self.settings, tests])
        script = JAIL["remote"].replace('"JOB"', repr(job))
        output = self.routed(script) if self.url else self.direct(script)
        try:
            rows = json.loads(output.strip().splitlines()[-1])
        except (ValueError, IndexError):
            raise SandboxError(f"E2B: no report but {output[-200:]!r}") from None
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
                limited = isinstance(error, self.sdk.RateLimitException) or "429" in str(error)[:3]
            if not limited:  # it may be gone: the next try makes another
                self.mine.__dict__.pop("sandbox", None)
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
        url = self.url.rstrip("/") + "/execute_batch"
        if "://" not in url:
            url = f"http://{url}"
        request = urllib.request.Request(
            url, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=self.seconds + 30) as response:
                (answer,) = json.load(response)
            if answer["execution"] is None:
                raise SandboxError(answer["exception_str"])
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
    if options.workers:
        return options.workers
    if options.runner != "local":
        return 2
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # a container may have a share of their time
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return cores


# ---- programs and their tests --------------------------------------------------------------------
def run_program(runner, program, tests, options):
    """The Result of one program."""
    if not tests:
        return Result(0.0, [], [])
    plans = [plan(test, program, options) for test in tests]
    try:
        rows = runner(plans)
    except OSError as error:
        return Result(None, [], [], str(error))
    verdicts = []
    found = []
    for test, (row, given) in zip(plans, rows, strict=True):
        try:
            outcome, value = verdict(test, row, given)
        except Exception:  # a value that cannot be made here is no value
            outcome = "fail"
            value = None
        verdicts.append(outcome)
        found.append(value)
    rate = verdicts.count("pass") / len(tests)
    return Result(rate, verdicts, found, "", [row["cpu_s"] for row, _ in rows])


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
    if any(isinstance(cases, str) for cases in tests):
        raise ValueError("tests is a list of tests for each program: [[test, ...], ...]")
    try:
        runner = Local(options) if options.runner == "local" else E2B(options)
    except OSError as error:
        print(f"sandbox: nothing can be run: {error}", file=sys.stderr)
        return [Result(None, [], [], str(error))] * len(programs)
    results = [None] * len(programs)
    pool = concurrent.futures.ThreadPoolExecutor(workers_of(options))  # each waits for a launcher
    try:
        futures = {}
        for i, (program, cases) in enumerate(zip(programs, tests, strict=True)):
            futures[pool.submit(run_program, runner, program, cases, options)] = i
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
    failed = [result.error for result in results if result.rate is None]
    if failed:
        print(
            f"sandbox: {len(failed)} of {len(results)} programs could not be run: {failed[0]}",
            file=sys.stderr,
        )
    return results


# ---- rewards: f(completions, rows, **options) -> one per completion, None where there is none
def block(completion):
    """The code of a completion that holds one block, fenced by ```python and ```, and ends with it
    and one newline. What a model thinks before, up to </think>, does not count.
    """
    head, fence, code = completion.rpartition("```python\n")
    parts = (head.rpartition("</think>")[2] + fence + code).split("```")
    thinks = "<think>" in parts[0]
    if thinks or len(parts) != 3 or parts[2] != "\n" or not parts[1].startswith("python\n"):
        return None
    return parts[1].removeprefix("python\n")


PARSE = """try:
    good = bool(ast.parse({!r}))
except (SyntaxError, ValueError):
    good = False
good"""


def parses(sources, **options):
    """Whether each text is Python, by a parser in the sandbox: None where the sandbox failed."""
    settings = Options(**options)
    workers = workers_of(settings)
    tests = [Probe(PARSE.format(source)) for source in sources]
    results = run_tests(
        ["import ast, warnings\nwarnings.simplefilter('ignore')"] * workers,
        [tests[i::workers] for i in range(workers)],
        **options | {"program_s": settings.timeout_s * len(sources) + 30, "allow_unsafe": True},
    )
    good = [None] * len(sources)
    for i, result in enumerate(results):
        if result.rate is not None:
            # None where it crashes the parser
            good[i::workers] = [value is True for value in result.values]
    return good


def code_format(completions, rows, **options):
    """1.0 if a completion ends in its only fenced Python block and a newline, and that parses; 0.5
    if not; 0.0 else; None where the sandbox failed.

    Ref: Open-R1's code_format_reward as used by Coupled-GRPO, arXiv:2506.20639.
    """
    sources = {}
    for i, completion in enumerate(completions):
        source = block(completion)
        if source is not None:
            sources[i] = source.strip()
    rewards = [0.0] * len(completions)
    good = parses([*sources.values()], **options)
    for i, parsed in zip(sources, good, strict=True):
        rewards[i] = {True: 1.0, False: 0.5, None: None}[parsed]
    return rewards


def syntax(completions, rows, **options):
    """1.0 if the code parses, else 0.0: the fenced block of a completion in code_format's form, or
    all of it.
    """
    sources = []
    for completion in completions:
        source = block(completion)
        sources.append(completion if source is None else source)
    return [None if good is None else float(good) for good in parses(sources, **options)]


def code(completions, rows, **options):
    """Share of rows[i]["test_cases"] that completion i passes, verdicts in rows[i]; 0.0 unless its
    code_format is 1.0.

    0.0 without tests, None where the sandbox failed.
    Ref: Open-R1's code_reward as used by Coupled-GRPO, arXiv:2506.20639.
    """
    forms = code_format(completions, rows, **options)
    rewards = [None if form is None else 0.0 for form in forms]
    good = [i for i, form in enumerate(forms) if form == 1.0]
    programs = [block(completions[i]) for i in good]
    results = run_tests(programs, [rows[i]["test_cases"] for i in good], **options)
    for i, result in zip(good, results, strict=True):
        rewards[i] = result.rate
        rows[i]["verdicts"] = result.verdicts
    return rewards


def binary_code(completions, rows, **options):
    """1.0 if all tests pass, else 0.0; None as `code`."""
    return [
        None if rate is None else float(rate == 1) for rate in code(completions, rows, **options)
    ]


TESTED = {code, binary_code}  # these run tests; the others need neither tests nor a safe sandbox
REWARDS = {"code": code, "binary_code": binary_code, "code_format": code_format, "syntax": syntax}


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
    Equal ones run once. Rows hold "text", the completion, "test_cases", "tokens"; the verdicts of
    the tests are left in them. RuntimeError names a function that fails.
    """
    keys = [(row["text"], id(row["test_cases"]), row["tokens"]) for row in rows]
    different = dict(zip(keys, rows, strict=True))
    first = [*different.values()]
    scores = {key: [] for key in different}
    for name, function in rewards.items():
        try:
            given = function([row["text"] for row in first], first, **options)
            for key, value in zip(different, given, strict=True):
                scores[key].append(math.nan if value is None else float(value))
        except Exception as error:  # whatever a user's function raises
            what = f"raised {type(error).__name__}: {error}; mend it, then go on with --resume"
            raise RuntimeError(f"the reward {name} {what}") from error
    for key, row in zip(keys, rows, strict=True):
        row["verdicts"] = different[key].get("verdicts", [])
    return [scores[key] for key in keys]


def check(**options):
    """1 if the sandbox passes a right program and fails a wrong one; else RuntimeError."""
    tests = ["assert f() == 1", "assert f() == 2"]
    (result,) = run_tests(["def f():\n    return 1"], [tests], **options)
    if result.verdicts != ["pass", "fail"]:
        raise RuntimeError(f"the sandbox cannot be used: {result.error or result.verdicts}")
    return 1


# ---- the command ---------------------------------------------------------------------------------
def read_tests(path):
    """One test per line; an indented line continues the test above, # begins a comment."""
    tests = []
    for line in path.read_text("utf-8-sig").split("\n"):
        if not line.strip() or line.startswith("#"):
            continue
        if line[0].isspace() and tests:
            tests[-1] += "\n" + line
        else:
            tests.append(line)
    if not tests:
        raise ValueError(f"{path} holds no tests; write one per line, such as: assert f(1) == 2")
    return tests


def report(result, cases, as_json):
    """Print the verdicts: lines for a reader, or a JSON object for every test, and a last one for
    all.

    {"verdict": "fail", "test": "assert f(1) == 2", "got": "3"}; got is null where nothing was given
    {"passed": 1, "tests": 2, "rate": 0.5, "error": ""}; with an error rate is null, no tests before
    """
    for outcome, case, got in zip(result.verdicts, cases, result.values, strict=False):
        if as_json:
            print(json.dumps({"verdict": outcome, "test": case, "got": got}))
            continue
        line = f"{outcome:12} {case.splitlines()[0]}"
        if got:  # no escape sequences
            shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in got)
            line += f"    # got {shown}"
        print(line)
    passed = result.verdicts.count("pass")
    if as_json:
        last = {"passed": passed, "tests": len(cases), "rate": result.rate, "error": result.error}
        print(json.dumps(last))
    elif result.rate is not None:
        print(f"{passed} of {len(cases)} passed")


def main(program: Path, /, tests: Path, options: Options = Options(), json: bool = False):
    """Print a verdict for every test of a file; the exit status of the command.

    json: print an object for every test, and a last one for all
    """
    cases = read_tests(tests)
    (result,) = run_tests([program.read_text("utf-8-sig")], [cases], **dataclasses.asdict(options))
    report(result, cases, json)
    if result.rate is None:
        return 2
    return 0 if result.rate == 1 else 1


if __name__ == "__main__":
    try:
        import tyro

        if "--help" in sys.argv:
            print(__doc__)
        status = tyro.cli(main, description="", config=(tyro.conf.OmitArgPrefixes,))
    except KeyboardInterrupt:
        status = 130
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        path = getattr(error, "filename", None)
        print(f"{path}: {error.strerror}" if path else error, file=sys.stderr)
        status = 2 if isinstance(error, RuntimeError) else 1
    sys.exit(status)
