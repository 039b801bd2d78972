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

An exit status proves nothing, so the verdict is
- by value, for `assert <call> == <literal>`: the program sends what the call returned, this process compares, and the
  expected value never enters the sandbox. Subclasses of builtin types count as their builtin value, NumPy's as lists;
  objects of any other class fail;
- by token, for every other test: a random token is written after the test has returned. A program that searches the
  interpreter's frames for it can pass, and so can one whose objects claim to equal anything.

Needs Linux on x86-64 or aarch64 for the local sandbox, and nothing but the standard library of Python 3.10 to 3.12.
"""

import ast
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import functools
import inspect
import json
import os
import random
import reprlib
import resource
import runpy
import secrets
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
import typing
import urllib.request
import warnings
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Options:
    runner: typing.Literal["local", "e2b"] = "local"  # where programs run: this machine, or E2B's cloud
    e2b_router_url: str = ""  # host:port of an Open-R1 router that holds the E2B key; with --runner=e2b
    workers: int = 0  # programs that run at a time; 0: one per CPU, or 2 E2B sandboxes
    timeout_s: float = 5.0  # seconds for one test
    program_s: float = 30.0  # seconds for all tests of a program; those that it leaves no time for are timeouts
    memory_mb: int = 1024  # address space of a test, in MB
    disk_mb: int = 64  # files that a test may write, in MB
    allow_unsafe: bool = False  # run programs also where the machine offers less than the safe minimum
    parity: bool = False  # rewards as the reference computes them: the exit status is the verdict
    strict_newline: bool = True  # code_format asks for exactly one newline after the closing fence
    max_tokens: int = 256  # soft_overlong: tokens at which the reward reaches -1
    overlong_tokens: int = 64  # soft_overlong: tokens before max_tokens over which the reward falls from 0 to -1
    ngram: int = 3  # repetition: words in an n-gram
    max_penalty: float = -1.0  # repetition: reward of a completion that repeats one n-gram only


class Result(typing.NamedTuple):
    rate: float | None  # share of tests that passed; None: the sandbox failed, which says nothing about the program
    verdicts: list  # of every test: "pass", "fail", "timeout", "output limit" or "memory"; empty with rate None
    values: list  # what came back in every test by value; None for the others
    error: str = ""  # what failed, with rate None


class SandboxError(Exception):
    """The machinery failed, not the program."""


# ---- the launcher: this section runs from its text, in an interpreter of its own ------------------------------------
#
# run_launcher() starts it once for every program: launch() -> run_confined() for every test -> run_test() in a fork.

# what a program may read beside Python itself; /proc is not among it
READABLE = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/urandom")
# system calls that a program is refused: (x86-64, aarch64); those from 424 on are refused without being named
# fmt: off
DENIED = {
    "fork": (57, None), "vfork": (58, None), "clone": (56, 220), "execve": (59, 221), "execveat": (322, 281),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "ptrace": (101, 117), "process_vm_readv": (310, 270), "kcmp": (312, 272),
    "process_vm_writev": (311, 271), "prlimit64": (302, 261), "prctl": (157, 167), "setpriority": (141, 140),
    "sched_setaffinity": (203, 122), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274), "ioprio_set": (251, 30), "migrate_pages": (256, 238), "move_pages": (279, 239),
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "memfd_create": (319, 279),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "mq_open": (240, 180), "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, None), "fchown": (93, 55),
    "lchown": (94, None), "fchownat": (260, 54), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "utime": (132, None),
    "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88), "link": (86, None), "linkat": (265, 37),
    "mknod": (133, None), "mknodat": (259, 33), "inotify_add_watch": (254, 27), "reboot": (169, 142),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
}
# fmt: on
MACHINES = {"x86_64": (0, 0xC000003E, 72, 126), "aarch64": (1, 0xC00000B7, 25, 91)}  # column, audit, fcntl, capset


def check(returned, what):
    """Raise OSError for a C function that returned -1."""
    if returned == -1:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return returned


def enter_namespaces(libc, scratch, readable):
    """Go on as process 1 of new user, mount, process, network, IPC and name namespaces, in a root of its own.

    The root holds `readable`, read-only, and /.sandbox, a name under which no interpreter is installed. The process
    that called stays behind and exits with the new one.
    """
    uid, gid = os.getuid(), os.getgid()
    # mounts, host name, IPC, users, processes, network: none is shared with the machine
    check(libc.unshare(0x20000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000), "unshare")
    # Inside, we are user 65534 with all capabilities over these namespaces, and none over anything else.
    for name, text in (("setgroups", "deny"), ("uid_map", f"65534 {uid} 1"), ("gid_map", f"65534 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    # The next child is process 1 of the new list of processes: when it ends, the kernel kills all others in it.
    first = os.fork()
    if first:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF)
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: the one that stayed behind was killed
    # A small file system in memory becomes the root; what may be read is mounted into it from the old one.
    root = scratch.encode()
    check(libc.mount(b"none", b"/", None, 0x44000, None), "private mounts")  # MS_REC | MS_PRIVATE
    check(libc.mount(b"tmpfs", root, b"tmpfs", 6, b"size=1m,nr_inodes=4k,mode=755"), "tmpfs")
    for path in sorted(map(os.fsencode, readable), key=len):  # parents before what lies in them
        if os.path.isdir(path):
            if os.path.exists(root + path):
                continue
            os.makedirs(root + path)
        else:
            os.makedirs(os.path.dirname(root + path), exist_ok=True)
            open(root + path, "w").close()
        check(libc.mount(path, root + path, None, 0x5000, None), "bind")  # MS_BIND | MS_REC
    os.mkdir(root + b"/.sandbox")
    # Swap the roots, let go of the old one, and make the new one and all below it read-only.
    os.chdir(root)
    pivot_root = DENIED["pivot_root"][MACHINES[os.uname().machine][0]]
    check(libc.syscall(pivot_root, b".", b"."), "pivot_root")
    check(libc.umount2(b".", 2), "umount")
    os.chdir("/")
    flags = struct.pack("4Q", 3, 0, 0, 0)  # MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID
    check(libc.syscall(442, -100, b"/", 0x8000, flags, 32), "mount_setattr")


def restrict_files(libc, job, writable):
    """Landlock: read and execute below job["readable"], all below `writable`, nothing else; no TCP, no signals out."""
    abi = job["landlock"]
    rights = 0xFFFF if abi >= 5 else 0x7FFF  # all that the kernel knows: what is not allowed below is refused
    size = 8 if abi < 4 else 16 if abi < 6 else 24  # files; since 4 also TCP, since 6 abstract sockets and signals
    ruleset = check(libc.syscall(444, struct.pack("3Q", rights, 3, 3)[:size], size, 0), "landlock")
    for path in [*job["readable"], writable]:
        allowed = 6 if path.startswith("/dev/") else 13  # write and read a file; execute, read a file, list a folder
        if path == writable:
            # new folders only where each test has a file system: overfull() does not look into them
            allowed = rights if job["namespaces"] else rights - 128
        if not os.path.isdir(path):
            allowed &= 7  # the rights that a file can have
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        check(libc.syscall(445, ruleset, 1, struct.pack("=Qi", allowed, fd), 0), "landlock rule")
        os.close(fd)
    check(libc.syscall(446, ruleset, 0), "landlock restrict")
    os.close(ruleset)


def call_filter(machine, allowed):
    """A seccomp filter, bytes: EPERM for the calls in DENIED but not in `allowed`, and for fcntl that sends signals.

    From 424 on, numbers are the same on all machines: io_uring, pidfds, clone3, the new mount calls and what is to
    come. ENOSYS makes the C library fall back to the old ones. The x32 calls of x86-64 lie there too.
    """
    column, audit, fcntl, _ = MACHINES[machine]
    denied = [row[column] for name, row in DENIED.items() if row[column] is not None and name not in allowed]
    # A row: operation, rows to skip if true, if false, operand; 0x20 loads, 0x15 is ==, 0x35 is >=, 6 returns.
    n = len(denied)
    rows = [(0x20, 0, 0, 4), (0x15, 1, 0, audit), (6, 0, 0, 0x80000000)]  # calls of another machine: kill
    rows += [(0x20, 0, 0, 0), (0x35, n + 7, 0, 424)]  # the number of the call
    rows += [(0x15, n - i + 5, 0, number) for i, number in enumerate(denied)]
    rows += [(0x15, 0, 4, fcntl), (0x20, 0, 0, 24)]  # its second argument
    rows += [(0x15, 3, 0, 8), (0x15, 2, 0, 10), (0x15, 1, 0, 15)]  # F_SETOWN, F_SETSIG, F_SETOWN_EX
    rows += [(6, 0, 0, 0x7FFF0000), (6, 0, 0, 0x50001), (6, 0, 0, 0x50026)]  # allow, EPERM, ENOSYS
    return b"".join(struct.pack("HBBI", *row) for row in rows)


def wire(value):
    """What json.dumps makes an exact copy of: a value of builtin types, or of their subclasses. TypeError for others.

    Calls the builtin type's own methods: what a subclass says of itself does not count.
    """
    if hasattr(value, "tolist"):  # NumPy; a class of the program's own can as well return what it likes
        value = value.tolist()
    if isinstance(value, int) and not isinstance(value, bool):
        return {"i": int.__format__(value, "x")}  # decimal digits are limited to 4,300
    if isinstance(value, complex):
        return {"c": [complex.real.__get__(value), complex.imag.__get__(value)]}
    if isinstance(value, dict):
        return {"d": [[wire(key), wire(item)] for key, item in dict.items(value)]}
    if isinstance(value, list):
        return [wire(item) for item in list.__iter__(value)]
    if isinstance(value, bytes | bytearray):
        return {"b": b"".join([value]).decode("latin-1")}
    for name, kind in (("t", tuple), ("s", set), ("s", frozenset)):
        if isinstance(value, kind):
            return {name: [wire(item) for item in kind.__iter__(value)]}
    return value  # None, bool, float, str and their subclasses; json refuses all others


def run_test(libc, job, test, folder, pipe):
    """In a process of its own: give up all rights, run the program, run the test, and write the outcome to the pipe.

    That is "+" when the restrictions hold, "=" when the program has run, then the token and in value mode the value; or
    "memory". Never returns.
    """
    write, leave, dumps, exact = os.write, os._exit, json.dumps, wire  # before the program can put others there
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: no core, whatever the system does with cores
    os.setsid()
    os.chdir(folder)
    os.environ.update(HOME=folder, TMPDIR=folder, PYTHONPATH=":".join(job["packages"]))
    sys.path += job["packages"]
    job["tests"].clear()  # the others are none of its business

    # Limits of the kernel. NPROC 0 refuses new threads and processes to an ordinary user, seccomp also to root.
    limits = {"CPU": int(job["timeout_s"]) + 1, "AS": job["memory_mb"] << 20, "FSIZE": job["disk_mb"] << 20}
    for name, limit in (limits | {"NOFILE": 64, "CORE": 0, "NPROC": 0}).items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, without which an ordinary user may not install the two below
    if job["landlock"]:
        restrict_files(libc, job, folder)
    if job["seccomp"]:
        # No capabilities, so that root is an ordinary user too; then the filter judges every call from here on.
        machine = os.uname().machine
        check(libc.syscall(MACHINES[machine][3], struct.pack("Ii", 0x20080522, 0), bytes(24)), "capset")
        # asyncio needs a socketpair; where nothing can be reached from it, let it have one
        allowed = {"execve"} if test["mode"] == "status" else {"socketpair"} if job["namespaces"] else set()
        code = ctypes.create_string_buffer(call_filter(machine, allowed))
        check(libc.prctl(22, 2, struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(code)), 0, 0), "seccomp")
    write(pipe, b"+")

    if test["mode"] == "status":
        python = os.path.realpath(sys._base_executable)  # sys.executable of a virtual environment is not readable here
        os.execv(python, [python, "-B", "-c", job["program"] + "\n" + test["before"]])
    # From here on nothing in this process can be trusted: of what comes through the pipe, only the token counts.
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(job["program"], "<program>", "exec"), main.__dict__)
        write(pipe, b"=")
        exec(compile(test["before"], "<test>", "exec"), main.__dict__)
        answer = ""
        if test["mode"] == "value":
            answer = dumps(exact(eval(compile(test["call"], "<test>", "eval"), main.__dict__)))
        write(pipe, (test["token"] + answer).encode())
    except MemoryError:
        write(pipe, b"memory")
    finally:
        leave(0)


def overfull(folder, megabytes):
    """Whether a folder, which holds no folders, holds more than `megabytes` or more than 2,000 files."""
    sizes = []
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            sizes.append(entry.stat(follow_symlinks=False).st_blocks * 512)
    return len(sizes) > 2000 or sum(sizes) > megabytes << 20


def follow_test(job, pid, pipe, folder, cap, deadline):
    """Read what a test writes until it exits: (outcome "done", "timeout" or "output limit", bytes, exit status)."""
    data, waiting, look = b"", [pipe], time.monotonic() + 0.1
    while (now := time.monotonic()) < deadline:
        if not waiting:  # the pipe is closed, the process should be gone in a moment
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return "done", data, os.waitstatus_to_exitcode(status)
            time.sleep(0.0005)
        elif select.select(waiting, [], [], min(0.1, deadline - now))[0]:
            chunk = os.read(pipe, 65536)
            data += chunk
            waiting = waiting if chunk else []
        if len(data) > cap:
            return "output limit", b"", None
        if not job["namespaces"] and now > look:  # no file system of its own that could be full
            look = now + 0.1
            if overfull(folder, job["disk_mb"]):
                return "output limit", b"", None
    return "timeout", data, None


def run_confined(libc, job, i, report, deadline):
    """Run test i in a folder and a process of its own, of which nothing is left: the line of the report on it."""
    test, folder = job["tests"][i], f"{job['folder']}/{i}"
    if job["namespaces"]:
        folder = "/.sandbox"
        size = f"size={job['disk_mb']}m,nr_inodes=2k,mode=700".encode()
        check(libc.mount(b"tmpfs", b"/.sandbox", b"tmpfs", 6, size), "tmpfs")
    else:
        os.mkdir(folder, 0o700)

    ours, theirs = os.pipe()  # the only way out of the test
    pid = os.fork()
    if not pid:
        try:
            os.close(ours)
            report.close()
            os.dup2(1, 2)
            run_test(libc, job, test, folder, theirs)
        except BaseException as error:  # nobody but run_test may go on in this process
            os.write(theirs, repr(error).encode())
        finally:
            os._exit(1)
    os.close(theirs)
    outcome, data, status = follow_test(job, pid, ours, folder, test["cap"], deadline)
    os.close(ours)

    if status is None:  # it still runs
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if job["namespaces"]:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(-1, signal.SIGKILL)  # all of this process namespace but ourselves
            while os.waitpid(-1, 0):
                pass
        check(libc.umount2(b"/.sandbox", 2), "umount")
    if data[:1] != b"+" and outcome != "output limit":  # it failed before the program ran: no verdict
        sys.exit(f"a test process could not be confined: {data.decode(errors='replace')}")
    data, loaded = data[1:].removeprefix(b"="), data[1:2] == b"="
    return {"outcome": outcome, "data": data.decode("latin-1"), "status": status, "loaded": loaded}


def launch():
    """Read a job from standard input, close what can be closed for all its tests, run them, report a line for each."""
    libc = ctypes.CDLL(None, use_errno=True)
    job = json.load(sys.stdin.buffer)
    # The report goes to a copy of standard output that no test inherits; what programs print goes nowhere.
    report, null = open(os.dup(1), "w"), os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: end with whoever started this
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when memory runs out, the kernel takes this process before the trainer

    # Ask the kernel what it offers. Namespaces were tried before, by layers(), in a launcher without tests.
    landlock = libc.syscall(444, None, 0, 1)
    job["landlock"] = landlock if landlock >= 3 else 0  # older ones let files be truncated
    refused = libc.prctl(22, 2, None, 0, 0) == -1 and ctypes.get_errno()
    job["seccomp"] = os.uname().machine in MACHINES and refused == 14  # EFAULT: known, only there was no filter
    job["readable"] = [path for path in (sys.base_prefix, *job["packages"], *READABLE) if os.path.exists(path)]
    if job["namespaces"]:
        enter_namespaces(libc, "/proc", job["readable"])  # mounts its root there, where nothing readable lies
    found = {layer: job[layer] for layer in ("namespaces", "landlock", "seccomp")}
    print(json.dumps(found), file=report, flush=True)
    if not job["allow_unsafe"] and not (job["seccomp"] and (job["namespaces"] or job["landlock"])):
        sys.exit("less than the safe minimum")

    # One test after another, until their time is over or the program itself does not end.
    end, hangs = time.monotonic() + job["program_s"], False
    for i, test in enumerate(job["tests"]):
        deadline, row = min(time.monotonic() + job["timeout_s"], end), {"outcome": "timeout"}
        if deadline > time.monotonic() and not hangs:
            row = run_confined(libc, job, i, report, deadline)
            hangs = row["outcome"] == "timeout" and test["mode"] != "status" and not row["loaded"]
        print(json.dumps(row), file=report, flush=True)


# ---- verdicts ------------------------------------------------------------------------------------------------------

LAUNCHER = (
    "import contextlib, ctypes, json, os, resource, select, signal, struct, sys, time, types\n# "
    + Path(__file__).read_text("utf-8").split("# ---- ")[1]
    + "\nlaunch()"
)


def value_test(test):
    """(statements before it, call, expected value) of a test that ends in `assert <call> == <literal>`; else None.

    Either way round, and with `is` for None, True and False.
    """
    if len(test) > 20_000:  # deeper nesting than the parser's stack holds kills the process in Python 3.10
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            *before, last = ast.parse(test).body
        left, (operator,), (right,) = last.test.left, last.test.ops, last.test.comparators
        for call, literal in ((left, right), (right, left)):
            try:
                expected = ast.literal_eval(literal)
            except ValueError:
                continue
            # `is` is for None, True and False alone; a test without a call compares nothing of the program's
            same = isinstance(operator, ast.Is) and (expected is None or isinstance(expected, bool))
            called = any(isinstance(node, ast.Call) for part in (*before, call) for node in ast.walk(part))
            if isinstance(last, ast.Assert) and called and (same or isinstance(operator, ast.Eq)):
                return "\n".join(map(ast.unparse, before)), ast.unparse(call), (expected, same)
    except (SyntaxError, ValueError, TypeError, AttributeError, RecursionError, MemoryError):
        return None  # of another form; if it is no Python at all, running it will say so


def plan(test, parity):
    """(what the launcher gets of a test, the expected value, which it does not get)."""
    found = None if parity else value_test(test)
    before, call, expected = found or (test, "", None)
    mode = "status" if parity else "value" if found else "token"
    cap = 65_536 + 40 * len(test)  # bytes; no value equal to a literal in the test is longer
    return {"mode": mode, "before": before, "call": call, "token": secrets.token_hex(16), "cap": cap}, expected


def unwire(item):
    """The value of its JSON form; ValueError, TypeError or AttributeError for anything that wire() does not write."""
    if isinstance(item, list):
        return [unwire(part) for part in item]
    if not isinstance(item, dict):
        return item
    ((kind, part),) = item.items()
    if kind == "i":
        return int(part, 16)
    if kind == "c":
        return complex(*part)
    if kind == "b":
        return part.encode("latin-1")
    if kind == "d":
        return {unwire(key): unwire(value) for key, value in part}
    return {"t": tuple, "s": frozenset}[kind](map(unwire, part))


def verdict(test, expected, row):
    """(pass, fail, timeout, output limit or memory; the value that came back) of a test, by the launcher's line."""
    if row["outcome"] != "done":
        return row["outcome"], None
    if test["mode"] == "status":
        return "fail" if row["status"] else "pass", None
    # Without the token the test has not returned, whatever the program has written.
    if not row["data"].startswith(test["token"]):
        return "memory" if row["data"] == "memory" else "fail", None
    data = row["data"].removeprefix(test["token"])
    if test["mode"] == "token":
        return "fail" if data else "pass", None
    # The value is made of builtin types here, so that == is ours and not the program's.
    want, same = expected
    try:
        value = unwire(json.loads(data))
        return "pass" if value == want and (not same or type(value) is type(want)) else "fail", value
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError):
        return "fail", None  # a forged line


# ---- the two runners: called with a job, they give the lines of the launcher's report and its complaint, if any ------


def run_launcher(launcher, job, spawned=lambda process: None):
    """Run a launcher on a job: the lines of its report, and its complaint if it failed. Leaves no process and no file.

    spawned(process) is called when it has started, so that another thread can kill it.
    """
    # With namespaces tests write to file systems of their own, and a trainer that is killed leaves no folder behind.
    folder = "" if job["namespaces"] else tempfile.mkdtemp(prefix="sandbox-")
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    # nothing of our environment, where keys may be; -I and -S keep our settings and packages out as well
    env = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    try:
        command = [sys.executable, "-IBS", "-c", launcher]
        with subprocess.Popen(command, env=env, start_new_session=True, **pipes) as process:
            spawned(process)
            try:
                request = json.dumps(job | {"folder": folder}).encode()
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
    job = dataclasses.asdict(Options(allow_unsafe=True)) | {"program": "", "tests": [], "packages": []}
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
REMOTE = """import json, os, shutil, subprocess, sys, tempfile
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
        parts = {"run_launcher": inspect.getsource(run_launcher), "launcher": LAUNCHER, "job": json.dumps(job)}
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
    process. options: the fields of Options. on_result(i, result) is called in this thread as programs finish, so that
    an interrupted caller keeps what it has. However this is left, also by Ctrl-C, nothing goes on running.

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
        job = dataclasses.asdict(options) | {"program": program, "tests": [test for test, _ in cases]}
        try:
            rows, complaint = runner(job) if cases else ([], "")
        except (OSError, SandboxError) as error:
            complaint = str(error)
        if complaint:
            return Result(None, [], [], complaint)
        judged = [verdict(test, expected, row) for (test, expected), row in zip(cases, rows[1:], strict=True)]
        verdicts, values = [outcome for outcome, _ in judged], [value for _, value in judged]
        return Result(verdicts.count("pass") / max(1, len(verdicts)), verdicts, values)

    # As many threads as programs run at a time; each waits for a launcher.
    results = [None] * len(programs)
    workers = options.workers or (2 if options.runner == "e2b" else len(os.sched_getaffinity(0)))
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


def block(completion, strict_newline=True):
    """The code of a completion that holds one block, fenced by ```python and ```, and ends with it; else None."""
    _, *rest = completion.split("```")
    if len(rest) != 2 or not rest[0].startswith("python\n"):
        return None
    return rest[0].removeprefix("python\n") if rest[1] == "\n" or (rest[1] == "" and not strict_newline) else None


def parses(sources, options, accept=()):
    """Whether each source text is Python, True or False; None where the sandbox failed.

    A parser may end its process or take all memory, so it runs in the sandbox, one program for every worker. A source
    at which it raises one of `accept` counts too.
    """
    workers = options.workers or len(os.sched_getaffinity(0))
    program = "import ast, warnings\nwarnings.simplefilter('ignore')"
    tests = [f"try:\n    ast.parse({source!r})\nexcept ({', '.join(accept)}):\n    pass" for source in sources]
    shares = [tests[i::workers] for i in range(workers)]
    limits = {"timeout_s": options.timeout_s, "program_s": options.timeout_s * len(sources) + 30}
    good = [None] * len(sources)
    for i, result in enumerate(run_tests([program] * workers, shares, workers=workers, allow_unsafe=True, **limits)):
        if result.rate is not None:
            good[i::workers] = [outcome == "pass" for outcome in result.verdicts]
    return good


def code_format(completions, rows, **options):
    """1.0 if a completion is one fenced Python block, after any text, that parses; 0.5 if it does not; 0.0 else.

    The block must end the completion, with one newline after its fence (strict_newline). None where the sandbox failed;
    parity: also where the reference raises, at code that exhausts the parser.
    Ref: Open-R1's code_format_reward as used by Coupled-GRPO, arXiv:2506.20639.
    """
    options = Options(**options)
    blocks = [block(completion, options.strict_newline) for completion in completions]
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
    blocks = [block(completion, options.strict_newline) for completion in completions]
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
    programs = [block(completions[i], settings.strict_newline) for i in good]
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
