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
import ctypes
import dataclasses
import functools
import importlib
import inspect
import json
import marshal
import operator
import os
import random
import reprlib
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

with contextlib.suppress(ImportError):
    import resource  # Windows has none; --runner=e2b works there too


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


# ---- the launcher: this section runs from its text, in an interpreter of its own ------------------------------------
#
# run_launcher() starts it once for every program: launch() -> run_confined() for every test -> run_program() in a fork,
# and beside it, for a test by judge, run_judge() in another.

# what a program may read beside Python itself and the libraries installed for it; /proc is not among it
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
    "mknod": (133, None), "mknodat": (259, 33), "inotify_add_watch": (254, 27), "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263), "reboot": (169, 142), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "init_module": (175, 105), "finit_module": (313, 273),
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
    parent, first = os.pidfd_open(os.getpid()), os.fork()
    if first:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF)
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: the one that stayed behind was killed
    if select.select([parent], [], [], 0)[0]:  # it was killed before we could ask for that
        os._exit(1)
    os.close(parent)
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


def call_filter(machine, allowed, threads=False):
    """A seccomp filter, bytes: EPERM for the calls in DENIED but not in `allowed`, and for fcntl that sends signals.

    From 424 on, numbers are the same on all machines: io_uring, pidfds, clone3, the new mount calls and what is to
    come. ENOSYS makes the C library fall back to the old ones. The x32 calls of x86-64 lie there too.
    """
    column, audit, fcntl, _ = MACHINES[machine]
    allowed = {*allowed, "clone"} if threads else allowed
    denied = [row[column] for name, row in DENIED.items() if row[column] is not None and name not in allowed]
    # A row: operation, rows to skip if true, if false, operand. 0x20 loads, 0x15 is ==, 0x35 >=, 0x45 &, 6 returns.
    clone = [(0x15, 0, 2, DENIED["clone"][column]), (0x20, 0, 0, 16), (0x45, 5, 6, 0x10000)] * threads  # CLONE_THREAD
    n = len(denied) + len(clone)
    rows = [(0x20, 0, 0, 4), (0x15, 1, 0, audit), (6, 0, 0, 0x80000000)]  # calls of another machine: kill
    rows += [(0x20, 0, 0, 0), (0x35, n + 7, 0, 424)]  # the number of the call
    rows += [(0x15, n - i + 5, 0, number) for i, number in enumerate(denied)] + clone
    rows += [(0x15, 0, 4, fcntl), (0x20, 0, 0, 24)]  # its second argument
    rows += [(0x15, 3, 0, 8), (0x15, 2, 0, 10), (0x15, 1, 0, 15)]  # F_SETOWN, F_SETSIG, F_SETOWN_EX
    rows += [(6, 0, 0, 0x7FFF0000), (6, 0, 0, 0x50001), (6, 0, 0, 0x50026)]  # allow, EPERM, ENOSYS
    return b"".join(struct.pack("HBBI", *row) for row in rows)


# Types that are built anew from arguments: name -> the arguments that make a value. Views of a dict stand in VIEWS too.
ARGUMENTS = {
    "decimal.Decimal": lambda value: [str(value)],
    "fractions.Fraction": lambda value: [value.numerator, value.denominator],
    **dict.fromkeys(("builtins.range", "builtins.slice"), lambda value: [value.start, value.stop, value.step]),
    "collections.deque": lambda value: [list(value), value.maxlen],
    "collections.Counter": lambda value: [dict(value)],
    "collections.OrderedDict": lambda value: [list(value.items())],
    "collections.defaultdict": lambda value: [value.default_factory, dict(value)],
    "datetime.timedelta": lambda value: [value.days, value.seconds, value.microseconds],
    **dict.fromkeys(("datetime.date", "datetime.time", "datetime.datetime"), lambda value: value.__reduce__()[1]),
    **dict.fromkeys(("builtins.dict_keys", "builtins.dict_values", "builtins.dict_items"), lambda value: [list(value)]),
}
VIEWS = {
    "builtins.dict_keys": lambda items: dict.fromkeys(items).keys(),
    "builtins.dict_values": lambda items: dict(enumerate(items)).values(),
    "builtins.dict_items": lambda items: dict(items).items(),
}
BUILTIN = (bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict)


def wire(value, keep):
    """The JSON form of a value: exact for builtin types, those in ARGUMENTS and NumPy's.

    keep(value, form) gives that of any other object; form is that of its builtin value, None if it has none. Calls the
    builtin type's own methods: what a subclass says of itself does not count.
    """
    kind, name = type(value), f"{type(value).__module__}.{type(value).__qualname__}"
    if kind.__module__ == "numpy" and hasattr(value, "dtype"):
        if value.dtype.kind not in "biufcSU":
            raise TypeError(f"values of NumPy's {value.dtype}")
        return {"a": [value.dtype.str, list(value.shape), value.tobytes().decode("latin-1")]}
    if name in ARGUMENTS:
        return {"r": [name, *(wire(part, keep) for part in ARGUMENTS[name](value))]}
    base = next((base for base in BUILTIN if issubclass(kind, base)), None)
    if base is int:
        form = {"i": int.__format__(value, "x")}  # decimal digits are limited to 4,300
    elif base is complex:
        form = {"c": [complex.real.__get__(value), complex.imag.__get__(value)]}
    elif base is dict:
        form = {"d": [[wire(key, keep), wire(item, keep)] for key, item in dict.items(value)]}
    elif base in (bytes, bytearray):
        form = {"b" if base is bytes else "y": b"".join([value]).decode("latin-1")}
    elif base in (list, tuple, set, frozenset):
        items = [wire(item, keep) for item in base.__iter__(value)]
        form = items if base is list else {{tuple: "t", set: "s", frozenset: "f"}[base]: items}
    else:  # JSON has these
        form = {float: float.__pos__, str: str.__str__}.get(base, lambda value: value)(value)
        base = base or (kind if value is None else None)
    return form if kind is base else keep(value, form if base else None)


def unwire(form, find=None):
    """The value of a JSON form; find(kind, part) gives that of kinds that wire() did not write.

    ValueError, TypeError, AttributeError, LookupError, ArithmeticError or ImportError for what it cannot have written.
    """
    if isinstance(form, list):
        return [unwire(part, find) for part in form]
    if not isinstance(form, dict):
        return form
    ((kind, part),) = form.items()
    if kind == "i":
        return int(part, 16)
    if kind == "c":
        return complex(*part)
    if kind in ("b", "y"):
        return {"b": bytes, "y": bytearray}[kind](part.encode("latin-1"))
    if kind == "d":
        return {unwire(key, find): unwire(value, find) for key, value in part}
    if kind in ("t", "s", "f"):
        return {"t": tuple, "s": set, "f": frozenset}[kind](unwire(item, find) for item in part)
    if kind == "a":
        numpy = importlib.import_module("numpy")
        return numpy.frombuffer(part[2].encode("latin-1"), part[0]).reshape(part[1]).copy()[()]
    if kind == "r" and part[0] in ARGUMENTS:
        module, _, name = part[0].rpartition(".")
        make = VIEWS.get(part[0]) or getattr(importlib.import_module(module), name)
        arguments = [unwire(argument, find) for argument in part[1:]]
        # a short line that would make a large value: a range that is spelt out, a fraction written as 1e999999999
        if (name == "Fraction" and str in map(type, arguments)) or range in map(type, arguments):
            raise ValueError(f"no arguments of {part[0]}: {arguments}")
        return make(*arguments)
    return find(kind, part)


def plain(value, form):
    """For wire(): objects of subclasses count as their builtin value, others are refused."""
    if form is None:
        raise TypeError(f"values of {type(value)}")
    return form


def opaque(value, form):
    """For wire(): the same, but others are said to be there."""
    return {"o": 0} if form is None else form


# What one side may ask of objects of the other.
UNARY = "len iter next bool str repr int float abs round".split()
BINARY = "eq ne lt le gt ge add sub mul truediv floordiv mod pow matmul and or xor".split()
ITEMS = ["getitem", "setitem", "delitem"]
LOOKS = "len bool str repr int float abs round base".split()  # what changes nothing
OPERATIONS = {name: getattr(builtins, name) for name in UNARY}
OPERATIONS |= {name: getattr(operator, f"__{name}__") for name in [*BINARY, *ITEMS]}
OPERATIONS |= {
    "get": getattr,
    "set": setattr,
    "isinstance": isinstance,
    "call": lambda function, /, *args, **options: function(*args, **options),
    "enter": lambda manager: type(manager).__enter__(manager),
    "exit": lambda manager: type(manager).__exit__(manager, None, None, None),
    "base": lambda value: unwire(wire(value, plain)),
    "run": lambda coroutine: importlib.import_module("asyncio").run(coroutine),
}


class Remote:
    """An object of the other side: calls, attributes, items and iteration go there.

    Operators go there between two such objects alone. With anything else its builtin value counts, if it is of a
    subclass, and it equals nothing if it is not: an object that says yes to all never sees what it is compared with.
    """

    def __init__(self, peer, number, plain):
        vars(self).update(_peer=peer, _number=number, _plain=plain, _nothing=object(), _told={})

    def _tell(self, operation):
        """What the other side says of it, which holds until the other side is asked to do something.

        So an object cannot be one number where it is first looked at and another where it is looked at again.
        """
        done, value = self._told.get(operation, (None, None))
        if done != self._peer.done:
            done, value = self._told[operation] = self._peer.done, self._peer.ask(operation, self)
        return value

    @property
    def _base(self):
        """Its builtin value as it is now, or what equals nothing."""
        return self._tell("base") if self._plain else self._nothing

    __class__ = property(lambda self: type(self._base))  # so that isinstance(a named tuple, tuple)

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return self._peer.ask("get", self, name)

    def __setattr__(self, name, value):
        self._peer.ask("set", self, name, value)

    def __call__(self, /, *args, **options):
        return self._peer.ask("call", self, *args, **options)

    def __instancecheck__(self, value):
        return self._peer.ask("isinstance", value, self)

    def __exit__(self, *raised):
        self._peer.ask("exit", self)  # what it says does not count: it could end a failed assertion

    def __hash__(self):
        return hash(self._base)


def forwarded(name):
    """A method of Remote that asks for an operation."""
    return lambda self, *args: self._tell(name) if name in LOOKS and not args else self._peer.ask(name, self, *args)


def between(name):
    """A binary operator of Remote, and the same with its sides exchanged."""

    def apply(left, right):
        if isinstance(left, Remote) and isinstance(right, Remote):
            return left._peer.ask(name, left, right)
        return OPERATIONS[name](*(side._base if isinstance(side, Remote) else side for side in (left, right)))

    return apply, lambda right, left: apply(left, right)


for name in [*UNARY, *ITEMS, "enter"]:
    setattr(Remote, f"__{name}__", forwarded(name))
for name in BINARY:  # Python never calls those named __req__ and the like
    for prefix, function in zip(("", "r"), between(name), strict=True):
        setattr(Remote, f"__{prefix}{name}__", function)


class Peer:
    """One end of the pipes between a test and a program: asks the other end, and answers what it asks meanwhile.

    A message is a line of JSON: ["ask", operation, arguments, options], ["got", value, changed arguments] or ["raised",
    names of classes, text]. Values travel as copies; of other objects the number under which their side holds them.

    permits(operation, target, ...) is given at a test's end, as it cannot trust the other: that may ask about objects
    that it was given, and no more, and names types alone. By name exec would be the test's own.
    """

    def __init__(self, read, write, permits=None):
        self.lines, self.pipe, self.permits = open(read, "rb"), open(write, "wb", 0), permits
        self.held, self.numbers, self.remotes, self.errors = [], {}, {}, {}
        self.done = 0  # how often the other end was asked for what may change its objects

    def keep(self, value, form):
        """The form of an object that stays here, or of one that the other end has, too."""
        if isinstance(value, Remote):
            return {"mine": value._number}
        if isinstance(value, types.ModuleType):
            return {"module": value.__name__}
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"error": [each.__name__ for each in value.__mro__]}
        name = getattr(value, "__name__", "") if callable(value) else ""
        by_name = isinstance(name, str) and getattr(builtins, name, None) is value
        if by_name and (self.permits or value in BUILTIN):
            return {"builtin": name}
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.held)
            self.held.append(value)
        kind = "coroutine" if isinstance(value, types.CoroutineType) else "yours"
        return {kind: [self.numbers[id(value)], form is not None]}

    def find(self, kind, part):
        """The object of a form that keep() wrote at the other end."""
        if kind == "mine":
            return self.held[part]
        if kind == "error":
            return self.error(part)
        if kind == "builtin":
            return {each.__name__: each for each in BUILTIN}[part] if self.permits else getattr(builtins, part)
        if kind == "module":
            return types.ModuleType(part)
        number, has_base = part
        remote = self.remotes.setdefault(number, Remote(self, number, has_base))
        return self.later(remote) if kind == "coroutine" else remote

    async def later(self, remote):
        """A coroutine of the other end; it runs there, to its end, when it is awaited here."""
        return self.ask("run", remote)

    def error(self, names):
        """An exception class like that of the other end: the builtin one, or one that is derived from it."""
        if names[0] not in self.errors:
            base = next(getattr(builtins, name) for name in names if hasattr(builtins, name))
            if not issubclass(base, BaseException):
                raise TypeError(f"{names} are no exceptions")
            # not the class that a failed assertion has: a test that expects it would hide that
            same = names[0] == base.__name__ and not (self.permits and issubclass(AssertionError, base))
            self.errors[names[0]] = base if same else type(names[0], (base,), {})
        return self.errors[names[0]]

    def send(self, text):
        text = memoryview(text.encode() + b"\n")
        while text:
            text = text[self.pipe.write(text) :]

    def receive(self):
        line = self.lines.readline()
        if not line.endswith(b"\n"):
            os._exit(1)  # the other end is gone
        return json.loads(line)

    def wire(self, value):
        return wire(value, self.keep)

    def unwire(self, form):
        return unwire(form, self.find)

    def ask(self, operation, /, *args, **options):
        """What an operation gives at the other end, or the exception that it raises there."""
        wired = {key: self.wire(value) for key, value in options.items()}
        self.done += operation not in LOOKS
        self.send(json.dumps(["ask", operation, [self.wire(arg) for arg in args], wired]))
        while True:
            kind, *parts = self.receive()
            if kind == "got":
                break
            if kind == "raised":
                error = self.error(parts[0])
                # in a map or a generator of the test it would end the loop, and the test with it
                raise (RuntimeError if issubclass(error, StopIteration) and operation != "next" else error)(parts[1])
            self.answer(*parts)
        for i, form in parts[1]:  # lists and the like that the other end has changed
            new = self.unwire(form)
            if isinstance(args[i], list | bytearray):
                args[i][:] = new
            else:
                args[i].clear()
                args[i].update(new)
        return self.unwire(parts[0])

    def answer(self, operation, forms, options):
        """Do what the other end asks for, and say what came of it."""
        try:
            args = [self.unwire(form) for form in forms]
            options = {key: self.unwire(form) for key, form in options.items()}
            if self.permits and not (forms[0].keys() == {"mine"} and self.permits(operation, *args)):
                raise PermissionError(operation)
            value = OPERATIONS[operation](*args, **options)
            changed = [[i, self.wire(arg)] for i, arg in enumerate(args) if type(arg) in (list, bytearray, set, dict)]
            reply = json.dumps(["got", self.wire(value), [[i, form] for i, form in changed if form != forms[i]]])
        except BaseException as error:
            reply = json.dumps(["raised", [each.__name__ for each in type(error).__mro__], str(error)])
        self.send(reply)


def confine(libc, job, folder, mode):
    """Give up all rights for good: limits, Landlock, capabilities, and system calls."""
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    os.setsid()
    os.chdir(folder)
    os.environ.update(HOME=folder, TMPDIR=folder, PYTHONPATH=":".join(job["packages"]))
    sys.path += job["packages"]
    job["tests"].clear()  # the others are none of its business

    # Limits of the kernel. NPROC 0 refuses new threads and processes to an ordinary user, seccomp also to root.
    limits = {"CPU": int(job["timeout_s"]) + 2, "AS": job["memory_mb"] << 20, "FSIZE": job["disk_mb"] << 20}
    limits |= {"NOFILE": 64, "CORE": 0} | ({} if job["threads"] else {"NPROC": 0})
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, without which an ordinary user may not install the two below
    if job["landlock"]:
        restrict_files(libc, job, folder)
    machine = os.uname().machine
    if machine in MACHINES:  # no capabilities, so that root is an ordinary user too
        check(libc.syscall(MACHINES[machine][3], struct.pack("Ii", 0x20080522, 0), bytes(24)), "capset")
    if job["seccomp"]:  # the filter judges every call from here on
        # asyncio needs a socketpair; where nothing can be reached from it, let it have one
        allowed = {"execve"} if mode == "status" else {"socketpair"} if job["namespaces"] else set()
        code = ctypes.create_string_buffer(call_filter(machine, allowed, job["threads"]))
        check(libc.prctl(22, 2, struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(code)), 0, 0), "seccomp")


def run_program(libc, job, test, folder, read, pipe):
    """In a process of its own: give up all rights, run the program, and do with it what the mode of the test says.

    Writes to the pipe "+" when the restrictions hold, "=" when the program has run, then in value mode the token and
    the value, with a judge its lines, for calls a line each; or "memory". With an input "=" comes first, then what the
    program prints. Never returns.
    """
    # before the program can put others there
    write, leave, dumps, exact, clock = os.write, os._exit, json.dumps, wire, time.process_time
    confine(libc, job, folder, test["mode"])
    write(pipe, b"+")

    if test["mode"] == "status":
        python = os.path.realpath(sys._base_executable)  # sys.executable of a virtual environment is not readable here
        os.execv(python, [python, "-B", "-c", job["program"] + "\n" + test["before"]])
    # From here on nothing in this process can be trusted: what comes through the pipe is data.
    name = "__main__" if job["main_block"] or test["mode"] == "stdin" else "program"
    main = sys.modules[name] = types.ModuleType(name)
    if test["mode"] == "stdin":
        leave(run_on_input(job["program"], test["text"], main, pipe))
    try:
        exec(compile(job["program"], "<program>", "exec"), main.__dict__)
        write(pipe, b"=")
        if test["mode"] == "judge":
            peer = Peer(read, pipe)
            known = main.__dict__
            OPERATIONS["names"] = lambda *names: {name: known[name] for name in names if name in known}
            while True:
                peer.answer(*peer.receive()[1:])
        if test["mode"] == "calls":
            function = eval(compile(test["call"], "<test>", "eval"), main.__dict__)
            for form in test["inputs"]:
                args, begun = unwire(form), clock()
                value, seconds = function(*args), clock() - begun
                write(pipe, dumps([exact(value, opaque), seconds]).encode() + b"\n")
            leave(0)
        exec(compile(test["before"], "<test>", "exec"), main.__dict__)
        answer = dumps(exact(eval(compile(test["call"], "<test>", "eval"), main.__dict__), opaque))
        write(pipe, (test["token"] + answer).encode())
    except MemoryError:
        write(pipe, b"memory")
    finally:
        leave(0)


def run_on_input(program, text, main, pipe):
    """Run a program as Python does: standard input is a file, standard output the pipe. The exit status."""
    os.write(pipe, b"=")
    with open("input", "w+b") as file:
        file.write(text.encode("utf-8", "replace"))
        file.seek(0)
        os.dup2(file.fileno(), 0)
    os.unlink("input")
    os.dup2(pipe, 1)
    sys.stdin, sys.stdout = open(0, encoding="utf-8"), open(1, "w", encoding="utf-8")
    sys.__stdin__, sys.__stdout__, status = sys.stdin, sys.stdout, 1
    try:
        exec(compile(program, "<program>", "exec"), main.__dict__)
        status = 0
    except SystemExit:
        status = 0
    except BaseException:
        pass  # what has been printed counts for nothing
    with contextlib.suppress(BaseException):
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()  # waits for those that are no daemons
        importlib.import_module("atexit")._run_exitfuncs()
    for stream in (sys.stdout, sys.__stdout__):
        with contextlib.suppress(BaseException):
            stream.flush()
    return status


# modules that tests compare by, under the names that they have there: a program's own of that name does not count
COMPARING = {name: name for name in ("math", "cmath", "numpy", "pytest", "unittest")} | {"np": "numpy"}


def permits(operation, target, *rest):
    """What a program may ask of a test's objects: to call and iterate, and attributes of instances of its classes."""
    if operation in ("get", "set", "getitem", "setitem", "len", "bool", "str", "repr"):
        private = rest and isinstance(rest[0], str) and rest[0].startswith("_")
        return type(target).__module__ == "__main__" and not private
    return operation in ("call", "iter", "next")


def names_of(code):
    """The names that compiled code uses, and code within it."""
    return {*code.co_names}.union(*(names_of(part) for part in code.co_consts if isinstance(part, types.CodeType)))


def run_judge(i, libc, job, test, folder, read, ask, pipe):
    """In a process of its own, confined too: run the test itself, and ask the program's process for what it calls.

    Writes to the pipe what run_program() writes, and the token behind it when the test has ended well. Never returns.
    """
    # Its text is in nobody's memory but ours: all before it in standard input is of tests that had no time.
    number = None
    while number != i:
        number, text = receive(job["secrets"])
    os.write(pipe, b"r")
    confine(libc, job, folder, test["mode"])
    os.write(pipe, begun := os.read(read, 1))
    if begun != b"+":  # the program could not be confined, and has said why
        os.write(pipe, os.read(read, 4096))
        return
    os.write(pipe, loaded := os.read(read, 1))
    if loaded == b"m":
        os.write(pipe, b"emory")
    if loaded != b"=":
        return
    peer, main = Peer(read, ask, permits), types.ModuleType("__main__")
    sys.modules["__main__"] = main
    try:
        code = compile(text, "<test>", "exec")
        used = sorted(names_of(code))
        own = [name for name in used if not hasattr(builtins, name)]
        # A builtin's name is the program's only if nothing else is: one problem asks for sum(). But an exception that a
        # test expects, and __name__, are never the program's: all are written otherwise.
        builtin = [name for name in used if hasattr(builtins, name) and name.isalpha() and name.islower()]
        for asked in (own, builtin):
            found = peer.ask("names", *asked)
            for name in [name for name in asked if name in found]:  # whatever else it offers
                # a module that the program alone imports is ours of that name
                module = COMPARING.get(name) or (isinstance(found[name], types.ModuleType) and name)
                setattr(main, name, importlib.import_module(module) if module else found[name])
            if found:
                break
        exec(code, main.__dict__)
        os.write(pipe, test["token"].encode())
    except MemoryError:
        os.write(pipe, b"memory")
    except BaseException:
        return  # the test does not pass


def receive(fd):
    """The next message from a pipe, of which nothing behind it is read."""
    size = 16
    for of_message in (False, True):
        text = b""
        while len(text) < size:
            part = os.read(fd, size - len(text))
            if not part:
                sys.exit("no job")
            text += part
        size = size if of_message else int(text, 16)
    return json.loads(text)


def overfull(folder, megabytes):
    """Whether a folder, which holds no folders, holds more than `megabytes` or more than 2,000 files."""
    sizes = []
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            sizes.append(entry.stat(follow_symlinks=False).st_blocks * 512)
    return len(sizes) > 2000 or sum(sizes) > megabytes << 20


def cpu_seconds(pids):
    """Processor seconds that processes have taken so far, all threads together."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):  # it has just ended
            total += time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(pid)
    return total


def follow_test(job, test, pids, pipe, folder, end):
    """Read what the first of some processes writes until it exits: ("done", "timeout" or "output limit", bytes)."""
    data, closed, look, deadline = bytearray(), False, 0.0, min(time.monotonic() + 3 * job["timeout_s"], end)
    # of the call that runs now: its number, its limit, and when it began on both clocks
    call, limits = (-1, 0.0, 0.0, 0.0), [*test.get("limits", []), job["timeout_s"]]
    while (now := time.monotonic()) < deadline:
        if now > look:
            look, taken = now + 0.1, cpu_seconds(pids)
            if (number := min(data.count(b"\n"), len(limits) - 1)) != call[0]:
                call = number, limits[number], taken if number else 0.0, now
            if taken > job["timeout_s"] or taken - call[2] > call[1] or now - call[3] > 3 * call[1]:
                return "timeout", data
            # where it has no file system of its own that could be full
            if not job["namespaces"] and overfull(folder, job["disk_mb"]):
                return "output limit", b""
        if closed:  # the process should be gone in a moment
            if os.waitid(os.P_PID, pids[0], os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return "done", data
            time.sleep(0.0005)
        elif select.select([pipe], [], [], min(0.1, deadline - now))[0]:
            chunk = os.read(pipe, 65536)
            data += chunk
            closed = not chunk
        if len(data) > test["cap"]:
            return "output limit", b""
    return "timeout", data


def spawn(files, function, *args):
    """The id of a process that calls a function, which ends it, and has only these files; an error goes to the last."""
    pid = os.fork()
    if not pid:
        try:
            for below, above in zip([2, *sorted(files)], [*sorted(files), 256], strict=True):
                os.closerange(below + 1, above)
            os.dup2(1, 2)
            function(*args)
        except BaseException as error:  # nobody may go on in this process
            os.write(files[-1], repr(error).encode())
        finally:
            os._exit(1)
    return pid


def run_confined(libc, job, i, end):
    """Run test i in a folder and a process of its own, of which nothing is left: the line of the report on it."""
    test, folder = job["tests"][i], f"{job['folder']}/{i}"
    job = job | {"timeout_s": test.get("timeout_s", job["timeout_s"])}
    if job["namespaces"]:
        folder = "/.sandbox"
        size = f"size={job['disk_mb']}m,nr_inodes=2k,mode=700".encode()
        check(libc.mount(b"tmpfs", b"/.sandbox", b"tmpfs", 6, size), "tmpfs")
    else:
        os.mkdir(folder, 0o700)

    ours, theirs = os.pipe()  # the only way out of the test
    files, args = [ours, theirs], (libc, job, test, folder)
    if test["mode"] == "judge":
        # the judge asks, the program answers; the judge's text is read before the program begins, and the clock
        asked, ask, answers, answer = os.pipe() + os.pipe()
        files += [asked, ask, answers, answer]
        judge = [job["secrets"], answers, ask, theirs]
        pids = [spawn(judge, run_judge, i, *args, *judge[1:])]
        if os.read(ours, 1) != b"r":
            sys.exit("a judge did not start")
        pids.append(spawn([asked, answer], run_program, *args, asked, answer))
    else:
        pids = [spawn([theirs], run_program, *args, None, theirs)]
    for file in files[1:]:
        os.close(file)
    try:
        outcome, data = follow_test(job, test, pids, ours, folder, end)
    finally:  # end what still runs, also where the trainer was killed
        os.close(ours)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        ended = [os.wait4(pid, 0) for pid in pids]

    # the exit status of the first and the processor time of all
    status = os.waitstatus_to_exitcode(ended[0][1])
    cpu_s = sum(usage.ru_utime + usage.ru_stime for _, _, usage in ended)
    if job["namespaces"]:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(-1, signal.SIGKILL)  # all of this process namespace but ourselves
            while os.waitpid(-1, 0):
                pass
        check(libc.umount2(b"/.sandbox", 2), "umount")
    if data[:1] != b"+" and outcome == "done":  # it failed before the program ran: no verdict
        sys.exit(f"a test process could not be confined: {data.decode(errors='replace')}")
    data, loaded = data[1:].removeprefix(b"="), data[1:2] == b"="
    return {"outcome": outcome, "data": data.decode("latin-1"), "status": status, "loaded": loaded, "cpu_s": cpu_s}


def orphaned(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the kernel may send one for every thread of the trainer that ends
    sys.exit("whoever started this was killed")


def launch():
    """Read a job from standard input, close what can be closed for all its tests, run them, report a line for each."""
    libc = ctypes.CDLL(None, use_errno=True)
    job = receive(0)
    job["secrets"] = os.dup(0)  # the texts of tests by judge come behind it; whoever runs the program never has them
    # The report goes to a copy of standard output that no test inherits; what programs print goes nowhere.
    report, null = open(os.dup(1), "w"), os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    # PR_SET_PDEATHSIG: end with whoever started this; but a folder is removed first, as nobody else does it then
    signal.signal(signal.SIGTERM, orphaned)
    libc.prctl(1, signal.SIGTERM if job["folder"] else signal.SIGKILL, 0, 0, 0)
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
    libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: no core; no other process may trace this one or those that it forks
    found = {layer: job[layer] for layer in ("namespaces", "landlock", "seccomp")}
    print(json.dumps(found), file=report, flush=True)
    if not job["allow_unsafe"] and not (job["seccomp"] and (job["namespaces"] or job["landlock"])):
        sys.exit("less than the safe minimum")

    # One test after another, until their time is over or the program itself does not end.
    end, hangs = time.monotonic() + job["program_s"], False
    try:
        if job["folder"]:
            os.mkdir(job["folder"], 0o700)
        for i, test in enumerate(job["tests"]):
            row = {"outcome": "timeout", "cpu_s": 0.0}
            if time.monotonic() < end and not hangs:
                row = run_confined(libc, job, i, end)
                late = row["outcome"] == "timeout" and test["mode"] != "status"
                hangs = late and (test["mode"] == "stdin" or not row["loaded"])
            print(json.dumps(row), file=report, flush=True)
    finally:
        if job["folder"]:
            importlib.import_module("shutil").rmtree(job["folder"], ignore_errors=True)


# ---- verdicts ------------------------------------------------------------------------------------------------------

LAUNCHER = (
    "import builtins, contextlib, ctypes, importlib, json, operator, os, resource, select, signal, struct, sys\n"
    "import time, types\n# " + Path(__file__).read_text("utf-8").split("# ---- ")[1] + "\nlaunch()"
)


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
