"""Run code that a model wrote, and score it: a sandbox made by the operating system or by E2B, and the code rewards.

    python sandbox.py program.py --tests=tests.txt                # a verdict for every test, in a tenth of a second
    python sandbox.py program.py --tests=tests.txt --runner=e2b   # in E2B's cloud: pip install e2b-code-interpreter

tests.txt holds one test a line, an indented line goes on with the test above. Exit status 0: all passed, 1: not
all, or nothing to run, 2: the sandbox itself failed. From Python:

    sandbox.run_tests([program], [["assert f(1) == 2", "assert f(5) == 7"]])
    # -> [Result(rate=0.5, verdicts=["pass", "fail"], values=[2, 6], error="")]
    sandbox.code(completions, [{"test_cases": [...]}, ...])                    # -> [1.0, 0.5, None]

Every test runs in a process and a folder of its own, without network, threads, other processes, other programs or
files but Python's own. Four layers see to that, and each stops most attacks without the others:

- namespaces: a root directory, a list of processes and a network of its own, in which there is nothing to attack
- Landlock: no file but those named can be opened, whatever path or link leads to it; no TCP
- seccomp: system calls that start processes, reach others, or are rarely needed and often attacked are refused
- limits: time, memory, open files, and what may be written

What the machine offers is tried and printed; the least is seccomp with one of the first two. Without namespaces a
program can make no folders, not use asyncio, and find out whether a path exists.

An exit status proves nothing, so the verdict does not come from where the program runs. What can it reach there? All
of its own process: builtins, modules, frames, trace functions, memory, open pipes. So nothing that decides is there:
- by value, for `assert f(..) == <literal>`: the program sends what f returned and this process compares. The expected
  value never enters the sandbox; who sends the right one without calling f has known the answer. So it is for tests
  that call f for many inputs (Calls) or give a program its standard input (Stdin): whoever asks compares.
- by judge, for every other test: the test runs in a second process, confined alike, that has never run a line of the
  program. The functions that it calls are pipes to the program's process, through which go arguments and results; what
  it compares, and with what, stays on its side. The kernel keeps the two apart: neither may trace or write the other.
  Through the pipes a program can have nothing run there but what the test has given it to call.
What comes back is data: builtin types and some of the standard library's (Decimal, Fraction, datetime, deque, dict
views, NumPy's arrays) are built anew, by type. Any other object stays where it is, and equals nothing but what its own
side says among such objects: a class that the program is asked for may define ==. Lists given to f change as it did.

A program imports what the Python that runs this has: its standard library and its site-packages, read-only. With
--threads it may start threads, within the same walls; what starts processes fails.

Needs Linux on x86-64 or aarch64 for the local sandbox (--runner=e2b also works on macOS and Windows), and nothing but
the standard library of Python 3.10 to 3.12.
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
    timeout_s: float = 5.0  # processor seconds for one test; on the clock three times as many
    program_s: float = 30.0  # seconds for all tests of a program; those that it leaves no time for are timeouts
    memory_mb: int = 1024  # address space of a test, in MB
    disk_mb: int = 64  # files that a test may write, in MB
    allow_unsafe: bool = False  # run programs also where the machine offers less than the safe minimum
    threads: bool = False  # let programs start threads; still no processes
    main_block: bool = True  # whether __name__ is "__main__" in a program, so that its main block runs
    parity: bool = False  # rewards as the reference computes them: the exit status is the verdict
    max_tokens: int = 256  # soft_overlong: tokens at which the reward reaches -1
    overlong_tokens: int = 64  # soft_overlong: tokens before max_tokens over which the reward falls from 0 to -1
    ngram: int = 3  # repetition: words in an n-gram
    max_penalty: float = -1.0  # repetition: reward of a completion that repeats one n-gram only


class Result(typing.NamedTuple):
    rate: float | None  # share of tests that passed; None: the sandbox failed, which says nothing about the program
    verdicts: list  # of every test: "pass", "fail", "timeout", "output limit" or "memory"; empty with rate None
    values: list  # what came back in every test by value; None for the others
    error: str = ""  # what failed, with rate None
    cpu_s: list = []  # processor seconds of every test, 0 where it did not begin  # noqa: RUF012


class SandboxError(Exception):
    """The machinery failed, not the program."""


# Three kinds of tests beside texts. What they bring back is what the program says: whoever asks compares it.


class Probe(str):
    """A test whose last line is an expression: its value comes back."""


class Calls(typing.NamedTuple):
    """A test that calls one function with one input after another, in one process, until a call raises.

    Its value: [(what a call returned, its processor seconds)]; "pass" if all calls returned. Objects that are no data
    come back as Opaque.
    """

    function: str  # an expression that gives it: f, or Solution().f
    inputs: list  # the arguments of every call
    limits: list  # processor seconds of every call
    timeout_s: float  # processor seconds of all, in place of the option
    most: int = 1 << 26  # bytes that may come back


class Stdin(typing.NamedTuple):
    """A test that runs the program alone, with a text as its standard input: what it prints comes back.

    "pass" if the program ends without an exception. After a timeout the other tests of the program are timeouts, too.
    """

    text: str
    most: int = 1 << 26  # bytes that may come back


class Opaque:
    """An object of a program that is no data, as far as it comes back: equal to nothing; callable, as a factory is."""

    def __call__(self):
        raise TypeError("this object is the program's")

    def __repr__(self):
        return "an object that is no data"


# ---- verdicts ------------------------------------------------------------------------------------------------------

LAUNCHER = Path(__file__).with_name("sandbox_inside.py").read_text("utf-8")  # its text is the program


def value_test(test):
    """(statements before it, call, expected value) of a test that ends in `assert f(..) == <literal>`; else None.

    Either way round, and with `is` for None, True and False. f is a name that neither Python nor the statements before
    give, and those only import and name literals: nothing that runs beside the program compares or knows the answer.
    """
    if len(test) > 20_000:  # deeper nesting than the parser's stack holds kills the process in Python 3.10
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            *before, last = ast.parse(test).body
        left, (operation,), (right,) = last.test.left, last.test.ops, last.test.comparators
        for call, literal in ((left, right), (right, left)):
            try:
                expected = ast.literal_eval(literal)
            except ValueError:
                continue
            given = {*dir(builtins)}
            for statement in before:
                if isinstance(statement, ast.Import | ast.ImportFrom):
                    given |= {alias.asname or alias.name for alias in statement.names}
                else:
                    ast.literal_eval(statement.value)
                    given |= {target.id for target in statement.targets}
            if "*" in given:
                return None
            # `is` is for None, True and False alone
            same = isinstance(operation, ast.Is) and (expected is None or isinstance(expected, bool))
            if isinstance(last, ast.Assert) and call.func.id not in given and (same or isinstance(operation, ast.Eq)):
                return "\n".join(map(ast.unparse, before)), ast.unparse(call), (expected, same)
    except (SyntaxError, ValueError, TypeError, AttributeError, RecursionError, MemoryError):
        return None  # of another form; if it is no Python at all, running it will say so


def plan(test, parity):
    """(what the launcher gets of a test, what it does not get: the expected value, or the text that a judge runs)."""
    if isinstance(test, Stdin):
        return {"mode": "stdin", "text": test.text, "cap": test.most}, None
    if isinstance(test, Calls):
        inputs = [wire(args, plain) for args in test.inputs]
        limits = {"limits": test.limits, "timeout_s": test.timeout_s, "cap": test.most}
        return {"mode": "calls", "call": test.function, "inputs": inputs} | limits, None
    found = None if parity else value_test(test)
    mode, before, call, secret = "judge", "", "", test
    if parity:
        mode, before = "status", test
    elif isinstance(test, Probe):
        mode, (before, _, call) = "value", test.rpartition("\n")
    elif found:
        mode, (before, call, secret) = "value", found
    cap = 65_536 + 40 * len(test)  # bytes; no value equal to a literal in the test is longer
    return {"mode": mode, "before": before, "call": call, "token": secrets.token_hex(16), "cap": cap}, secret


# what a forged line raises
FORGED = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError, ImportError)


def stays(kind, part):
    """For unwire(): the only kind of object that a program may speak of here."""
    return {"o": Opaque}[kind]()


def verdict(test, secret, row):
    """(pass, fail, timeout, output limit or memory; the value that came back) of a test, by the launcher's line."""
    if test["mode"] == "calls":
        return verdict_of_calls(test, row)
    if row["outcome"] != "done":
        return row["outcome"], None
    if test["mode"] == "stdin":
        return "fail" if row["status"] else "pass", row["data"].encode("latin-1").decode("utf-8", "replace")
    if test["mode"] == "status":
        return "fail" if row["status"] else "pass", None
    # Without the token the test has not returned, whatever has been written.
    if not row["data"].startswith(test["token"]):
        return "memory" if row["data"] == "memory" else "fail", None
    data = row["data"].removeprefix(test["token"])
    if test["mode"] == "judge":
        return "fail" if data else "pass", None
    # The value is made of types that we know here, so that == is ours and not the program's.
    try:
        objects = []  # what the value holds that is no data
        value = unwire(json.loads(data), lambda *form: objects.append(stays(*form)) or objects[-1])
        if isinstance(secret, Probe):
            return "pass", value
        want, same = secret
        return "pass" if (value is want if same else value == want) else "fail", None if objects else value
    except FORGED:
        return "fail", None  # a forged line, or an array, which is neither equal nor not


def verdict_of_calls(test, row):
    """The same of Calls: the values of the calls that returned come back, whatever happened then."""
    values, lines = [], row.get("data", "").split("\n")
    with contextlib.suppress(*FORGED):
        for line in lines[:-1]:
            value, seconds = json.loads(line)
            values.append((unwire(value, stays), float(seconds)))
    if row["outcome"] != "done":
        return row["outcome"], values
    if row["loaded"] and len(values) == len(test["inputs"]):
        return "pass", values
    return "memory" if lines[-1] == "memory" else "fail", values


# ---- the two runners: called with a job, they give the lines of the launcher's report and its complaint, if any ------


# What an interpreter does to become a launcher: its code comes in front of the job, compiled, which saves 10 ms.
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

    job["judged"], [number, text] of each test by judge, goes behind the rest, where no program comes to know it.
    spawned(process) is called when it has started, so that another thread can kill it.
    """
    # With namespaces tests write to file systems of their own, and a trainer that is killed leaves no folder behind.
    # Without, the launcher makes a folder and removes it; so do we, if the launcher was killed.
    folder = "" if job["namespaces"] else f"{tempfile.gettempdir()}/sandbox-{secrets.token_hex(8)}"
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    # nothing of our environment, where keys may be; -I and -S keep our settings and packages out as well
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
    # first what it found, then a line for every test
    rows = [json.loads(line) for line in out.splitlines()]
    complete = process.returncode == 0 and len(rows) == len(job["tests"]) + 1
    lines = complaint.decode(errors="replace").splitlines() or [f"the launcher ended with {process.returncode}"]
    return rows, "" if complete else lines[-1]


@functools.lru_cache(1)
def layers():
    """What this machine allows, found by trying and printed once: {"namespaces", "landlock": version or 0, "seccomp"}.

    Raises SandboxError where the launcher does not even start.
    """
    job = dataclasses.asdict(Options(allow_unsafe=True)) | {"program": "", "tests": [], "judged": [], "packages": []}
    rows, refused = run_launcher(LAUNCHER, job | {"namespaces": True})
    if refused:
        rows, complaint = run_launcher(LAUNCHER, job | {"namespaces": False})
        if complaint:
            raise SandboxError(complaint)
    (found,) = rows
    namespaces, seccomp = f"off ({refused})" if refused else "on", "on" if found["seccomp"] else "off"
    landlock = found["landlock"] or "off"
    print(f"sandbox: namespaces {namespaces}, Landlock {landlock}, seccomp {seccomp}, limits on", file=sys.stderr)
    return found


class Local:
    """Runs jobs on this machine, each under a launcher of its own. RuntimeError where they cannot be confined."""

    def __init__(self, options):
        if sys.platform != "linux":
            raise RuntimeError("the local sandbox needs Linux; use --runner=e2b")
        found = layers()
        if not options.allow_unsafe and not (found["seccomp"] and (found["namespaces"] or found["landlock"])):
            advice = "use --runner=e2b, or --allow_unsafe where nothing can be lost"
            needed = "seccomp, and namespaces or Landlock 3"
            raise RuntimeError(f"this machine cannot confine a program (needed: {needed}); {advice}")
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


# What runs in a sandbox of E2B: the same launcher, with namespaces if they can be had there.
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


def cores():
    """How many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()  # macOS, Windows


class E2B:
    """Runs jobs in E2B sandboxes, one for each thread that calls, or through a router of Open-R1's protocol.

    The safe minimum of layers is not asked for there, as the sandbox is a machine of its own.
    """

    def __init__(self, options):
        self.url, self.seconds = options.e2b_router_url, int(options.program_s) + 30
        self.mine, self.all = threading.local(), []  # the sandbox of each thread; those of all threads
        self.closed = threading.Event()
        if not self.url:
            try:
                import e2b_code_interpreter as sdk
                import httpx
            except ImportError as error:
                raise RuntimeError(f"{error}; pip install e2b-code-interpreter, or use --runner=local") from None
            self.sdk, self.lost = sdk, (sdk.SandboxException, httpx.HTTPError)

    def __call__(self, job):
        parts = {function.__name__: inspect.getsource(function) for function in (compiled, run_launcher)}
        parts |= {"boot": BOOT, "launcher": LAUNCHER, "job": json.dumps(job)}
        text = (self.routed if self.url else self.direct)(REMOTE.format(**parts))
        try:
            return json.loads(text.strip().splitlines()[-1])
        except (ValueError, IndexError):
            raise SandboxError(f"E2B: no report but {text[-200:]!r}") from None

    def direct(self, script):
        """Standard output of a script. Rate limits and lost sandboxes are tried again, for about a minute."""
        # waits that double, and differ between threads
        end = time.monotonic() + self.seconds + 60
        for wait_s in (1, 2, 4, 8, 16, 32, 0):
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
        """The same from a router, which takes lists of scripts: we send each by itself, when its turn comes."""
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

    programs: source texts. tests: for each program a list of source texts, each run after the program in a fresh
    process, or of Probe, Calls and Stdin. options: the fields of Options. on_result(i, result) is called in this thread
    as programs finish, so that an interrupted caller keeps what it has. However this is left, also by Ctrl-C, nothing
    goes on running.

    rate is passed / all tests, 0 without tests, and None where the sandbox failed: the launcher was killed, the disk is
    full, E2B cannot be reached. After a test that hangs while the program is loaded all others are timeouts. Time is at
    most programs * program_s / workers, plus start-up. Raises ValueError for limits of 0 or another number of lists
    than of programs, RuntimeError where the machine offers less than the safe minimum.
    """
    options = Options(**options)
    if min(options.timeout_s, options.program_s, options.memory_mb, options.disk_mb) <= 0 or options.workers < 0:
        raise ValueError("timeout_s, program_s, memory_mb and disk_mb are above 0, workers at least 0")
    if len(programs) != len(tests) or isinstance(tests, str) or any(isinstance(each, str) for each in tests):
        raise ValueError(f"{len(programs)} programs need as many lists of tests, not {len(tests)} of {type(tests)}")
    plans = [[plan(test, options.parity) for test in cases] for cases in tests]
    try:
        runner = E2B(options) if options.runner == "e2b" else Local(options)
    except (OSError, SandboxError) as error:
        print(f"sandbox: nothing can be run: {error}", file=sys.stderr)
        return [Result(None, [], [], str(error))] * len(programs)

    def run_program(program, cases):
        """The Result of one program; runs in a thread of the pool."""
        judged = [[i, text] for i, (test, text) in enumerate(cases) if test["mode"] == "judge"]
        job = dataclasses.asdict(options) | {"program": program, "tests": [t for t, _ in cases], "judged": judged}
        try:
            rows, complaint = runner(job) if cases else ([], "")
        except (OSError, SandboxError) as error:
            complaint = str(error)
        if complaint:
            return Result(None, [], [], complaint)
        outcomes = [verdict(test, secret, row) for (test, secret), row in zip(cases, rows[1:], strict=True)]
        verdicts, values = [outcome for outcome, _ in outcomes], [value for _, value in outcomes]
        seconds = [row["cpu_s"] for row in rows[1:]]
        return Result(verdicts.count("pass") / max(1, len(verdicts)), verdicts, values, "", seconds)

    # As many threads as programs run at a time; each waits for a launcher.
    results = [None] * len(programs)
    workers = options.workers or (2 if options.runner == "e2b" else cores())
    pool = concurrent.futures.ThreadPoolExecutor(workers)
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
    failed = [result.error for result in results if result.rate is None]
    if failed:
        print(f"sandbox: {len(failed)} of {len(results)} programs could not be run: {failed[0]}", file=sys.stderr)
    return results


# ---- rewards: f(completions, rows, **options) -> a reward per completion, None where there is none ------------------


def block(completion):
    """The code of a completion that holds one block, fenced by ```python and ```, and ends with it and one newline."""
    _, *rest = completion.split("```")
    if len(rest) != 2 or rest[1] != "\n" or not rest[0].startswith("python\n"):
        return None
    return rest[0].removeprefix("python\n")


def parses(sources, options, accept=()):
    """Whether each source text is Python, True or False; None where the sandbox failed.

    A parser may end its process or take all memory, so it runs in the sandbox, one program for every worker. A source
    at which it raises one of `accept` counts too.
    """
    workers = options.workers or cores()
    program = "import ast, warnings\nwarnings.simplefilter('ignore')"
    tests = [f"try:\n    ast.parse({source!r})\nexcept ({', '.join(accept)}):\n    pass" for source in sources]
    shares = [tests[i::workers] for i in range(workers)]
    limits = {"timeout_s": options.timeout_s, "program_s": options.timeout_s * len(sources) + 30}
    limits |= {"runner": options.runner, "e2b_router_url": options.e2b_router_url}
    good = [None] * len(sources)
    for i, result in enumerate(run_tests([program] * workers, shares, workers=workers, allow_unsafe=True, **limits)):
        if result.rate is not None:
            good[i::workers] = [outcome == "pass" for outcome in result.verdicts]
    return good


def code_format(completions, rows, **options):
    """1.0 if a completion is one fenced Python block, after any text, that parses; 0.5 if it does not; 0.0 else.

    The block must end the completion, with one newline after its fence. None where the sandbox failed;
    parity: also where the reference raises, at code that exhausts the parser.
    Ref: Open-R1's code_format_reward as used by Coupled-GRPO, arXiv:2506.20639.
    """
    options = Options(**options)
    blocks = [block(completion) for completion in completions]
    sources = {i: source.strip() for i, source in enumerate(blocks) if source is not None}
    rewards = [0.0] * len(completions)
    for i, good in zip(sources, parses(list(sources.values()), options), strict=True):
        rewards[i] = {True: 1.0, False: 0.5, None: None}[good]
    if options.parity:  # the reference expects these two errors alone
        bad = [i for i in sources if rewards[i] == 0.5]
        caught = parses([sources[i] for i in bad], options, accept=("SyntaxError", "ValueError"))
        for i in [i for i, was_caught in zip(bad, caught, strict=True) if not was_caught]:
            rewards[i] = None
    return rewards


def syntax(completions, rows, **options):
    """1.0 if the code parses, else 0.0: the fenced block of a completion in code_format's form, or all of it."""
    options = Options(**options)
    blocks = [block(completion) for completion in completions]
    sources = [completion if code is None else code for completion, code in zip(completions, blocks, strict=True)]
    return [good if good is None else float(good) for good in parses(sources, options)]


def code(completions, rows, **options):
    """Share of rows[i]["test_cases"] that completion i passes; 0.0 unless its code_format is 1.0.

    0.0 without tests, None where the sandbox failed; rows[i]["verdicts"] tells how each test went. parity: the exit
    status is the verdict, so sys.exit(0) passes; one timeout makes the whole completion 0.0.
    Ref: Open-R1's code_reward as used by Coupled-GRPO, arXiv:2506.20639.
    """
    settings = Options(**options)
    forms = code_format(completions, rows, **options)
    rewards = [None if form is None else 0.0 for form in forms]
    # only what has the form is run
    good = [i for i, form in enumerate(forms) if form == 1.0]
    programs = [block(completions[i]) for i in good]
    tests = [rows[i]["test_cases"] for i in good]
    for i, result in zip(good, run_tests(programs, tests, **options), strict=True):
        rewards[i] = 0.0 if settings.parity and "timeout" in result.verdicts else result.rate
        rows[i]["verdicts"] = result.verdicts
    return rewards


def binary_code(completions, rows, **options):
    """1.0 if all tests pass, else 0.0; None as `code`."""
    return [rate if rate is None else float(rate > 0.99) for rate in code(completions, rows, **options)]


def soft_overlong(completions, rows, **options):
    """0 up to max_tokens - overlong_tokens tokens (rows[i]["tokens"]), then in a line to -1 at max_tokens.

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
    if options.max_penalty > 0:
        raise ValueError(f"max_penalty is {options.max_penalty}; a penalty is 0 or less")
    rewards = []
    for completion in completions:
        words = completion.lower().split()
        grams = list(zip(*(words[i:] for i in range(options.ngram)), strict=False))
        rewards.append(options.max_penalty * (1 - len(set(grams)) / len(grams)) if grams else 0.0)
    return rewards


TESTED = code, binary_code  # these run tests, the others need neither tests nor a sandbox that is safe
REWARDS = {reward.__name__: reward for reward in (code, binary_code, code_format, syntax, soft_overlong, repetition)}


def find_reward(name):
    """A function of REWARDS by its name, or your own by `file.py:function`; ValueError if there is none."""
    if name in REWARDS:
        return REWARDS[name]
    path, _, function = name.rpartition(":")
    if not Path(path).is_file():
        raise ValueError(f"no reward {name!r}; there are {', '.join(REWARDS)}, and your own as file.py:function")
    reward = runpy.run_path(path).get(function)
    if not callable(reward):
        raise ValueError(f"{path} has no function {function!r}")
    return reward


def main(program: Path, /, tests: Path, options: Options = Options()):
    """Print a verdict for every test of a file; the exit status of the command."""
    cases = []
    for line in filter(str.strip, tests.read_text("utf-8").splitlines()):
        if line[0].isspace() and cases:  # goes on with the test above
            cases[-1] += "\n" + line
        else:
            cases.append(line)
    if not cases:
        raise ValueError(f"{tests} holds no tests; write one a line, such as: assert f(1) == 2")
    (result,) = run_tests([program.read_text("utf-8")], [cases], **dataclasses.asdict(options))
    if result.rate is None:
        return 2
    for outcome, value, case in zip(result.verdicts, result.values, cases, strict=True):
        got = ""
        if outcome == "fail" and value is not None:
            with contextlib.suppress(ValueError):  # an integer that is too long to be printed
                got = f"    # got {reprlib.repr(value)}"
        print(f"{outcome:12} {case.splitlines()[0]}{got}")
    print(f"{result.verdicts.count('pass')} of {len(cases)} passed")
    return 0 if result.rate == 1 else 1


if __name__ == "__main__":
    import tyro

    try:
        status = tyro.cli(main, description=__doc__, config=(tyro.conf.OmitArgPrefixes,))
    except (ValueError, RuntimeError, OSError) as error:
        status = str(error)  # printed, and exit status 1
    sys.exit(status)
