"""What sandbox.py runs in the child: confinement, the program, the judge, and the wire format of values.

sandbox.py starts an interpreter for each of its workers, the template, which executes the text of this file: the
standard library alone. For every test it forks run_judge() and run_program(). The template itself never reads a program
or a test, so that nothing of one is left in the memory of the next.
"""

import ast
import builtins
import contextlib
import ctypes
import gc
import importlib
import json
import operator
import os
import re
import reprlib
import select
import signal
import struct
import sys
import time
import types

with contextlib.suppress(ImportError):
    import resource  # Windows has none; sandbox.py --runner=e2b works there too

# What many programs import: done once, here. Their random numbers are seeded anew in every process.
USUAL = "bisect collections copy datetime decimal enum fractions functools heapq itertools math random string typing"


def check(returned, what):
    """Raise OSError if a C function returned -1."""
    if returned == -1:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return returned


# ---- namespaces ----------------------------------------------------------------------------------------------------
def enter_namespaces(libc, scratch, readable):
    """Continue as process 1 of new user, mount, process, network, IPC and host-name namespaces, in a root of their own.

    The new root holds `readable`, read-only, and the folder /.sandbox. The caller exits with the status of process 1.
    """
    uid, gid = os.getuid(), os.getgid()
    # CLONE_NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET: nothing is shared with the machine
    check(libc.unshare(0x20000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000), "unshare")
    # Inside, we are user 65534 with all capabilities over these namespaces, and none over anything else.
    for name, text in (("setgroups", "deny"), ("uid_map", f"65534 {uid} 1"), ("gid_map", f"65534 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    # The next child is process 1 of the new namespace: when it ends, the kernel kills all others in it.
    parent, first = os.pidfd_open(os.getpid()), os.fork()
    if first:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF)
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: end when the parent is killed
    if select.select([parent], [], [], 0)[0]:  # it was killed before that call
        os._exit(1)
    os.close(parent)
    # A small file system in memory becomes the root; the readable paths of the old root are mounted into it.
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
    # Swap the roots, unmount the old one, and make the new one and all below it read-only.
    os.chdir(root)
    check(libc.syscall({"x86_64": 155, "aarch64": 41}[os.uname().machine], b".", b"."), "pivot_root")
    check(libc.umount2(b".", 2), "umount")
    os.chdir("/")
    flags = struct.pack("4Q", 3, 0, 0, 0)  # MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID
    check(libc.syscall(442, -100, b"/", 0x8000, flags, 32), "mount_setattr")


# ---- Landlock ------------------------------------------------------------------------------------------------------
# What a program may read besides Python itself and its installed libraries. /proc is not among it.
READABLE = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/urandom")


def restrict_files(libc, job, writable):
    """Allow reading and executing below job["readable"], everything below `writable`; no TCP, no signals to others.

    Without namespaces no new folders, and no file is removed: what is written can be counted, see overfull().
    """
    abi = job["landlock"]
    rights = 0xFFFF if abi >= 5 else 0x7FFF  # all that this kernel knows: what no rule allows is refused
    size = 8 if abi < 4 else 16 if abi < 6 else 24  # files; since 4 also TCP, since 6 abstract sockets and signals
    ruleset = check(libc.syscall(444, struct.pack("3Q", rights, 3, 3)[:size], size, 0), "landlock")
    for path in [*job["readable"], writable]:
        allowed = 6 if path.startswith("/dev/") else 13  # write and read a file; execute, read a file, list a folder
        if path == writable:
            allowed = rights if job["namespaces"] else rights & ~(128 + 32)  # MAKE_DIR, REMOVE_FILE
        if not os.path.isdir(path):
            allowed &= 7  # the rights that a file can have
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        check(libc.syscall(445, ruleset, 1, struct.pack("=Qi", allowed, fd), 0), "landlock rule")
        os.close(fd)
    check(libc.syscall(446, ruleset, 0), "landlock restrict")
    os.close(ruleset)


# ---- seccomp -------------------------------------------------------------------------------------------------------
# The system calls that a program may make, with their numbers on x86-64 and aarch64: what Python, NumPy and pandas need.
CALLS = """
read 0 63, write 1 64, open 2 -, close 3 57, stat 4 -, fstat 5 80, lstat 6 -, poll 7 -, lseek 8 62, mmap 9 222,
mprotect 10 226, munmap 11 215, brk 12 214, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139,
ioctl 16 29, pread64 17 67, pwrite64 18 68, readv 19 65, writev 20 66, access 21 -, pipe 22 -, select 23 -,
sched_yield 24 124, mremap 25 216, madvise 28 233, dup 32 23, dup2 33 -, pause 34 -, nanosleep 35 101,
getitimer 36 102, alarm 37 -, setitimer 38 103, getpid 39 172, sendfile 40 71, sendto 44 206, recvfrom 45 207,
shutdown 48 210, exit 60 93, wait4 61 260, uname 63 160, fcntl 72 25, fsync 74 82, fdatasync 75 83, truncate 76 45,
ftruncate 77 46, getcwd 79 17, chdir 80 49, fchdir 81 50, rename 82 -, mkdir 83 -, rmdir 84 -, creat 85 -,
unlink 87 -, symlink 88 -, readlink 89 -, umask 95 166, gettimeofday 96 169, getrlimit 97 163, getrusage 98 165,
sysinfo 99 179, times 100 153, getuid 102 174, getgid 104 176, geteuid 107 175, getegid 108 177, getppid 110 173,
getpgrp 111 -, getgroups 115 158, getpgid 121 155, getsid 124 156, rt_sigpending 127 136, rt_sigtimedwait 128 137,
rt_sigsuspend 130 133, sigaltstack 131 132, statfs 137 43, fstatfs 138 44, prctl 157 167, arch_prctl 158 -,
gettid 186 178, getxattr 191 8, lgetxattr 192 9, fgetxattr 193 10, listxattr 194 11, llistxattr 195 12,
flistxattr 196 13, time 201 -, futex 202 98, sched_getaffinity 204 123, getdents64 217 61, set_tid_address 218 96,
clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, exit_group 231 94, epoll_wait 232 -,
epoll_ctl 233 21, waitid 247 95, openat 257 56, mkdirat 258 34, newfstatat 262 79, unlinkat 263 35, renameat 264 38,
symlinkat 266 36, readlinkat 267 78, faccessat 269 48, pselect6 270 72, ppoll 271 73, set_robust_list 273 99,
epoll_pwait 281 22, fallocate 285 47, eventfd2 290 19, epoll_create1 291 20, dup3 292 24, pipe2 293 59,
preadv 295 69, pwritev 296 70, getcpu 309 168, renameat2 316 276, getrandom 318 278, membarrier 324 283,
copy_file_range 326 285, statx 332 291, rseq 334 293
"""
ALLOWED = {name: (int(x), None if a == "-" else int(a)) for name, x, a in map(str.split, CALLS.split(","))}
# Of these only with one of these values as the argument of this number.
ARGUMENT = {
    "fcntl": (1, (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1031, 1032)),  # F_DUPFD .. F_SETLKW, F_OFD_*, a pipe's size
    "ioctl": (1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),  # terminal or not, its size, bytes to read, flags
    "prctl": (0, (15, 16)),  # PR_SET_NAME, PR_GET_NAME
    "socketpair": (0, (1,)),  # AF_UNIX, which asyncio needs; harmless where it reaches nothing
}
MORE = {"socketpair": (53, 199), "execve": (59, 221), "clone": (56, 220)}
MACHINES = {"x86_64": (0, 0xC000003E, 126), "aarch64": (1, 0xC00000B7, 91)}  # column, audit, capset
ENOSYS, ALLOW = 0x50026, 0x7FFF0000


def call_filter(machine, more, threads=False, tmpfile=True):
    """A seccomp filter, bytes: the calls of ALLOWED and `more`, with their arguments; ENOSYS for every other.

    The C library falls back from newer calls to older ones. threads: clone with CLONE_THREAD. tmpfile False: no files
    without a name.
    """
    column, audit, _ = MACHINES[machine]
    calls = ALLOWED | {name: MORE[name] for name in more} | ({"clone": MORE["clone"]} if threads else {})
    number = {name: row[column] for name, row in calls.items() if row[column] is not None}
    opening = {} if tmpfile else {"open": 1, "openat": 2}  # the argument with the flags
    # A row: operation, rows to skip if true, if false, operand. 0x20 loads, 0x15 is ==, 0x45 &, 6 returns.
    rows = [(0x20, 0, 0, 4), (0x15, 1, 0, audit), (6, 0, 0, 0x80000000)]  # calls of another machine: kill
    rows += [(0x20, 0, 0, 0)]  # the number of the call
    for name in [name for name in number if name in ARGUMENT or name in opening or name == "clone"]:
        if name in ARGUMENT:
            argument, values = ARGUMENT[name]
            # the upper half of an argument that the kernel reads as an int is of no account
            body = [(0x20, 0, 0, 16 + 8 * argument)]
            body += [(0x15, len(values) - i, 0, value) for i, value in enumerate(values)]
            body += [(6, 0, 0, ENOSYS), (6, 0, 0, ALLOW)]
        else:
            flag, argument = (0x10000, 0) if name == "clone" else (0x400000, opening[name])  # CLONE_THREAD, O_TMPFILE
            body = [(0x20, 0, 0, 16 + 8 * argument), (0x45, 0, 1, flag)]
            body += [(6, 0, 0, ALLOW), (6, 0, 0, ENOSYS)] if name == "clone" else [(6, 0, 0, ENOSYS), (6, 0, 0, ALLOW)]
        rows += [(0x15, 0, len(body), number.pop(name)), *body]
    plain = [*number.values()]
    rows += [(0x15, len(plain) - i, 0, value) for i, value in enumerate(plain)]
    rows += [(6, 0, 0, ENOSYS), (6, 0, 0, ALLOW)]
    return b"".join(struct.pack("HBBI", *row) for row in rows)


def confine(libc, job, folder, mode):
    """Give up all rights of this process for good: resource limits, Landlock, capabilities, seccomp."""
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    os.setsid()
    os.chdir(folder)
    os.environ.update(HOME=folder, TMPDIR=folder, PYTHONPATH=":".join(job["packages"]))
    sys.path += job["packages"]

    limits = {"CPU": int(job["timeout_s"]) + 2, "AS": job["memory_mb"] << 20, "FSIZE": job["disk_mb"] << 20}
    limits |= {"NOFILE": 64, "CORE": 0}
    if not job["threads"]:
        limits["NPROC"] = 0  # no new threads and processes for an ordinary user; seccomp refuses them to root too
    for name, limit in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        most = resource.getrlimit(kind)[1]
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(kind, (limit, limit))
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, without which an ordinary user may not install the two below
    if job["landlock"]:
        restrict_files(libc, job, folder)
    machine = os.uname().machine
    if machine in MACHINES:  # no capabilities, so that root is an ordinary user too
        check(libc.syscall(MACHINES[machine][2], struct.pack("Ii", 0x20080522, 0), bytes(24)), "capset")
    if job["seccomp"]:  # the filter judges every call from here on
        code = ctypes.create_string_buffer(job["filters"][mode == "status"], len(job["filters"][mode == "status"]))
        check(libc.prctl(22, 2, struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(code)), 0, 0), "seccomp")


# ---- the wire format of values -------------------------------------------------------------------------------------
# Types that are built anew from arguments: name -> the arguments that make a value. VIEWS: how to make views of a dict.
REDUCED = "builtins.range builtins.slice collections.Counter decimal.Decimal datetime.date datetime.time"
REDUCED += " datetime.datetime datetime.timedelta"
ARGUMENTS = dict.fromkeys(REDUCED.split(), lambda value: value.__reduce__()[1]) | {
    "fractions.Fraction": lambda value: [value.numerator, value.denominator],
    "collections.deque": lambda value: [list(value), value.maxlen],
    "collections.OrderedDict": lambda value: [list(value.items())],
    "collections.defaultdict": lambda value: [value.default_factory, dict(value)],
    **dict.fromkeys(("builtins.dict_keys", "builtins.dict_values", "builtins.dict_items"), lambda value: [list(value)]),
}
VIEWS = {
    "builtins.dict_keys": lambda items: dict.fromkeys(items).keys(),
    "builtins.dict_values": lambda items: dict(enumerate(items)).values(),
    "builtins.dict_items": lambda items: dict(items).items(),
}
EXACT = {"fractions.Fraction": int, "builtins.range": int, "decimal.Decimal": str}  # the only type of their arguments
BUILTIN = (bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict)
MUTABLE = "builtins.list builtins.bytearray builtins.set builtins.dict collections.deque collections.OrderedDict"
MUTABLE = {*MUTABLE.split(), "collections.defaultdict", "collections.Counter", "numpy.ndarray"}


def wire(value, other, share=None):
    """The JSON form of a value: exact for builtin types, those in ARGUMENTS and NumPy's.

    other(value, form) gives that of any other object; `form` is that of its builtin value, None if its class has none.
    It is read by the builtin type's own methods, so that a subclass cannot misreport it. share(container) gives its
    number and whether it is new; one that is known is its number alone.
    """
    kind = type(value)
    if share and f"{kind.__module__}.{kind.__qualname__}" in MUTABLE:
        number, new = share(value)
        return {"k": [number, contents(value, other, share)] if new else [number]}
    return contents(value, other, share)


def contents(value, other, share=None):
    """wire() of what a container holds, or of any other value."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if value is None or kind is bool:
        return value
    if kind.__module__ == "numpy" and hasattr(value, "dtype"):
        if value.dtype.kind not in "biufcSU":
            raise TypeError(f"values of NumPy's {value.dtype}")
        return {"a": [value.dtype.str, list(value.shape), value.tobytes().decode("latin-1")]}
    if name in ARGUMENTS:
        arguments = ARGUMENTS[name](value)
        return {"r": [name, *(contents(argument, other, share) for argument in arguments)]}
    base = next((base for base in BUILTIN if issubclass(kind, base)), None)
    if base is None:
        return other(value, None)
    if base is int:
        form = {"i": int.__format__(value, "x")}  # decimal digits are limited to 4,300
    elif base in (float, str):
        form = {float: float.__pos__, str: str.__str__}[base](value)
    elif base is complex:
        form = {"c": [complex.real.__get__(value), complex.imag.__get__(value)]}
    elif base is dict:
        form = {"d": [[wire(key, other, share), wire(item, other, share)] for key, item in dict.items(value)]}
    elif base in (bytes, bytearray):
        form = {"b" if base is bytes else "y": b"".join([value]).decode("latin-1")}
    else:
        items = [wire(item, other, share) for item in base.__iter__(value)]
        form = items if base is list else {{tuple: "t", set: "s", frozenset: "f"}[base]: items}
    return form if kind is base else other(value, form)


def unwire(form, other=None):
    """The value of a JSON form; other(tag, content) resolves those of objects. It raises anything for a wrong form."""
    if isinstance(form, list):
        return [unwire(item, other) for item in form]
    if not isinstance(form, dict):
        return form
    ((tag, content),) = form.items()
    if tag == "i":
        return int(content, 16)
    if tag == "c":
        return complex(*content)
    if tag in ("b", "y"):
        return {"b": bytes, "y": bytearray}[tag](content.encode("latin-1"))
    if tag == "d":
        return {unwire(key, other): unwire(value, other) for key, value in content}
    if tag in ("t", "s", "f"):
        return {"t": tuple, "s": set, "f": frozenset}[tag](unwire(item, other) for item in content)
    if tag == "a":
        if not re.fullmatch(r"[<>|]?[biufcSU]\d+", content[0]):
            raise TypeError(f"no type of NumPy's: {content[0]!r}")
        numpy = importlib.import_module("numpy")
        return numpy.frombuffer(content[2].encode("latin-1"), content[0]).reshape(content[1]).copy()[()]
    if tag == "r" and content[0] in ARGUMENTS:
        module, _, name = content[0].rpartition(".")
        make = VIEWS.get(content[0]) or getattr(importlib.import_module(module), name)
        arguments = [unwire(argument, other) for argument in content[1:]]
        # a short line that would make a large value: a range written out, a fraction such as 1e999999999
        exact = EXACT.get(content[0])
        if range in map(type, arguments) or (exact and {exact} != {*map(type, arguments)}):
            raise TypeError(f"no arguments of {content[0]}: {arguments}")
        return make(*arguments)
    return other(tag, content)


def plain(value, form):
    """For wire(): an object of a subclass counts as its builtin value, others are refused."""
    if form is None:
        raise TypeError(f"values of {type(value)}")
    return form


def opaque(value, form):
    """For wire(): an object of a subclass counts as its builtin value, of others it says that there is one."""
    if type(value) is Remote and value._has_base:
        return wire(value._base, opaque)
    return {"o": 0} if form is None else form


# ---- the judge: a test and a program in two processes, and what each may ask of the other's objects -----------------
UNARY = "len iter next reversed bool str repr int float complex index abs round neg pos invert hash format".split()
ARITHMETIC = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()
BINARY = ["eq", "ne", "lt", "le", "gt", "ge", "divmod", *ARITHMETIC]
ITEMS = ["getitem", "setitem", "delitem", "contains"]
READING = {*"len bool str repr int float complex index abs round hash base".split()}  # these change nothing
OPERATIONS = {
    name: getattr(operator, f"__{name}__") for name in [*BINARY, *ITEMS, "neg", "pos", "invert"] if name != "divmod"
}
OPERATIONS |= {f"i{name}": getattr(operator, f"__i{name}__") for name in ARITHMETIC}
OPERATIONS |= {name: getattr(builtins, name) for name in UNARY if hasattr(builtins, name)} | {
    "divmod": divmod,
    "index": operator.index,
    "get": getattr,
    "set": setattr,
    "isinstance": isinstance,
    "call": lambda function, /, *args, **options: function(*args, **options),
    "enter": lambda manager: type(manager).__enter__(manager),
    "exit": lambda manager: type(manager).__exit__(manager, None, None, None),
    "base": lambda value: unwire(wire(value, plain)),
    "run": lambda coroutine: importlib.import_module("asyncio").run(coroutine),
}
# What changes an object: methods of builtin types that are asked for at its own side.
CHANGING = {*"append extend insert pop remove clear sort reverse update setdefault popitem add discard".split()}
CHANGING |= {"difference_update", "intersection_update", "symmetric_difference_update"}


class Remote:
    """An object of the other side: calls, attributes, items and iteration are asked for there.

    Its builtin value, if it has one, is read once, and counts in its stead wherever a test looks at it. Operators are
    asked for there between two such objects only: an object that claims to equal all never sees what it is compared
    with. One that the test made itself, by a class that it names, has its own methods, and + * divmod and `in` with
    anything.
    """

    def __init__(self, peer, number, has_base):
        own = {"_peer": peer, "_number": number, "_has_base": has_base, "_nothing": object(), "_answers": {}}
        vars(self).update(own, _made=False, _is_class=False)

    def _read(self, operation):
        """The answer to an operation of READING, kept until the other side is asked to do something."""
        # So an object cannot be one number where it is first looked at and another where it is looked at again.
        if operation not in self._answers or self._answers[operation][0] != self._peer.changes:
            self._answers[operation] = self._peer.changes, self._peer.ask(operation, self)
        return self._answers[operation][1]

    @property
    def _base(self):
        """Its builtin value as it is now, or an object that equals nothing."""
        return self._read("base") if self._has_base else self._nothing

    __class__ = property(lambda self: type(self._base))  # so that isinstance(a named tuple, tuple)

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        if self._has_base and not self._made and name not in CHANGING and hasattr(type(self._base), name):
            return getattr(self._base, name)
        return self._peer.ask("get", self, name)

    def __setattr__(self, name, value):
        self._peer.ask("set", self, name, value)

    def __call__(self, /, *args, **options):
        return self._peer.ask("call", self, *args, **options)

    def __contains__(self, item):
        if self._made:
            return self._peer.ask("contains", self, item)
        return any(each is item or each == item for each in (self._base if self._has_base else self))

    def __instancecheck__(self, value):
        return self._peer.ask("isinstance", value, self)

    def __exit__(self, *raised):
        self._peer.ask("exit", self)  # its answer does not count: it could suppress a failed assertion


def forwarded(name):
    """A method of Remote that asks for an operation, or does it with the builtin value."""

    def apply(self, *args):
        local = (
            self._has_base
            and not self._made
            and name in OPERATIONS
            and name not in ("str", "repr", "setitem", "delitem", "next")
        )
        if local:
            return OPERATIONS[name](self._base, *args)
        return self._read(name) if name in READING and not args else self._peer.ask(name, self, *args)

    return apply


def between(name):
    """A binary operator of Remote, and the same with its operands exchanged."""

    def apply(left, right):
        remote = [side for side in (left, right) if isinstance(side, Remote)]
        with_anything = name in ("add", "iadd", "mul", "imul", "divmod") and any(side._made for side in remote)
        if len(remote) == 2 or with_anything:
            return remote[0]._peer.ask(name, left, right)
        return OPERATIONS[name](*(side._base if isinstance(side, Remote) else side for side in (left, right)))

    return apply, lambda right, left: apply(left, right)


for name in [*UNARY, "getitem", "setitem", "delitem", "enter"]:
    setattr(Remote, f"__{name}__", forwarded(name))
for name in BINARY:  # Python never calls those named __req__ and the like
    for prefix, function in zip(("", "r"), between(name), strict=True):
        setattr(Remote, f"__{prefix}{name}__", function)
for name in ARITHMETIC:
    setattr(Remote, f"__i{name}__", between(f"i{name}")[0])


class Peer:
    """One end of the pipes between a test and a program: asks the other end, and meanwhile answers its questions.

    A message is a line of JSON: [kind, content, containers that changed, containers to forget]. Its content is
    [operation, arguments, options] of an "ask", the value of a "got", or the exception of a "raised". Data is copied,
    and lists and the like are kept equal at both ends as long as both use them; any other object travels as the number
    that its own side gave it. permits(operation, target, ...) is set at the judge's end: the program may ask about
    objects that it was given, and no others, and name types but no functions, or it could name exec.
    """

    def __init__(self, read, write, permits=None):
        self.lines = open(read, "rb")
        self.pipe = open(write, "wb")
        self.permits = permits
        self.held, self.numbers = [], {}  # our objects that the other end knows, and their numbers by id
        self.remotes, self.errors = {}, {}  # its objects by number, its exception classes by name
        self.changes = 0  # how often the other end was asked for what may change its objects
        # containers at both ends, with what they held; their numbers by id, below 0 for its own; how many are ours
        self.shared, self.ids, self.count = {}, {}, 0
        self.stops = False  # whether the test names StopIteration

    # What travels.
    def share(self, value):
        """For wire(): the number of a container, and whether the other end does not have it yet."""
        if new := id(value) not in self.ids:
            self.count += 1
            self.ids[id(value)], self.shared[self.count] = self.count, [value, None]
        return self.ids[id(value)], new

    def form(self, value):
        return wire(value, self.refer, self.share)

    def refer(self, value, form):
        """The form of an object that stays here, or that the other end has too."""
        if isinstance(value, Remote):
            return {"mine": value._number}
        if isinstance(value, types.ModuleType):
            return {"module": value.__name__}
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"error": names_of_class(value)}
        if isinstance(value, BaseException):
            return {"raised": self.form_of_error(value)}
        name = getattr(value, "__name__", "") if callable(value) else ""
        by_name = isinstance(name, str) and getattr(builtins, name, None) is value
        if by_name and (self.permits or value in BUILTIN):
            return {"builtin": name}
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.held)
            self.held.append(value)
        tag = "coroutine" if isinstance(value, types.CoroutineType) else "yours"
        return {tag: [self.numbers[id(value)], form is not None]}

    def resolve(self, tag, content):
        """The object of a form that wire() made at the other end."""
        if tag == "k":
            number = -content[0]
            if len(content) > 1:
                value = unwire(content[1], self.resolve)
                self.shared[number], self.ids[id(value)] = [value, None], number
            return self.shared[number][0]
        if tag == "mine":
            return self.held[content]
        if tag == "error":
            return self.error(content)
        if tag == "raised":
            return self.error_of(*content)
        if tag == "builtin":
            return {each.__name__: each for each in BUILTIN}[content] if self.permits else getattr(builtins, content)
        if tag == "module":
            return types.ModuleType(content)
        number, has_base = content
        remote = self.remotes.setdefault(number, Remote(self, number, has_base))
        return self.awaitable(remote) if tag == "coroutine" else remote

    async def awaitable(self, remote):
        """A coroutine of the other end; it runs there, to its end, when it is awaited here."""
        return self.ask("run", remote)

    def form_of_error(self, error):
        """[names of its classes, arguments, attributes, text]."""
        parts = {"args": list(error.args), **{k: v for k, v in vars(error).items() if not k.startswith("_")}}
        forms = {}
        for name, value in parts.items():
            with contextlib.suppress(Exception):
                forms[name] = wire(value, self.refer)
        return [names_of_class(type(error)), forms.pop("args", []), forms, str(error)]

    def error(self, names):
        """An exception class like that of the other end: the library's own, or one derived from the first of these."""
        if names[0] not in self.errors:
            kind = next(filter(None, map(library_class, names)), None)
            if not kind:  # never a StopIteration, which would end a loop of the test
                raise TypeError(f"{names} are no exceptions")
            # never the class of a failed assertion: a test that expects the program's class would hide its own failure
            is_library = kind is library_class(names[0]) and not (self.permits and issubclass(AssertionError, kind))
            text = {"__str__": lambda self: vars(self).get("_text", "")}
            self.errors[names[0]] = kind if is_library else type(names[0].rpartition(".")[2], (kind,), text)
        return self.errors[names[0]]

    def error_of(self, names, args, attributes, text):
        """An exception like that of form_of_error()."""
        kind, args = self.error(names), unwire(args, self.resolve)
        try:
            error = kind(*args)
        except Exception:  # a class of the program that wants other arguments
            error = kind.__new__(kind, *args)
            error.args = tuple(args)
        with contextlib.suppress(AttributeError):
            vars(error).update({k: unwire(v, self.resolve) for k, v in attributes.items()}, _text=text)
        return error

    # Messages.
    def send(self, kind, content):
        """Send a message, and with it what has changed since the last one in containers that both ends have."""
        changed = []
        for number, entry in [*self.shared.items()]:
            known, now = self.count, contents(entry[0], self.refer, self.share)
            if entry[1] is not None and now != entry[1]:
                changed.append([number, now])
            # what is new in it by its number alone
            entry[1] = now if known == self.count else contents(entry[0], self.refer, self.share)
        forgotten = [number for number in [*self.shared] if sys.getrefcount(self.shared[number][0]) <= 2]
        for number in forgotten:
            del self.ids[id(self.shared.pop(number)[0])]
        self.pipe.write(json.dumps([kind, content, changed, forgotten]).encode() + b"\n")
        self.pipe.flush()

    def receive(self):
        """(kind, content) of the next message; its content is not resolved yet."""
        line = self.lines.readline()
        if not line.endswith(b"\n"):
            os._exit(1)  # the other end is gone
        return json.loads(line)

    def update(self, changed, forgotten):
        """Change our containers as those at the other end, and drop those that it dropped."""
        for number, form in changed:
            value, new = self.shared[-number][0], unwire(form, self.resolve)
            if type(value) in (list, bytearray):
                value[:] = new
            elif hasattr(value, "dtype"):
                value[...] = new
            else:
                value.clear()
                name = type(value).__name__
                fill = (
                    dict.update if name == "Counter" else type(value).extend if name == "deque" else type(value).update
                )
                fill(value, new)
            self.shared[-number][1] = None
        for entry in self.shared.values():
            entry[1] = contents(entry[0], self.refer, self.share) if entry[1] is None else entry[1]
        for number in forgotten:
            if entry := self.shared.pop(-number, None):
                del self.ids[id(entry[0])]

    def ask(self, operation, /, *args, **options):
        """The result of an operation at the other end, or the exception that it raises there."""
        if operation not in READING:
            self.changes += 1
        self.send("ask", [operation, [self.form(arg) for arg in args], {k: self.form(v) for k, v in options.items()}])
        while True:
            kind, content, *news = self.receive()
            if kind == "ask":
                self.answer(content, *news)
                continue
            value = unwire(content, self.resolve) if kind == "got" else self.error_of(*content)
            self.update(*news)
            if kind == "raised":
                # in a map or a generator of the test it would end the loop, and the test with it
                ends = isinstance(value, StopIteration | StopAsyncIteration) and operation != "next" and not self.stops
                raise RuntimeError("StopIteration") if ends else value
            if type(value) is Remote:
                makes = operation == "call" and type(args[0]) is Remote and args[0]._is_class
                made = operation in OPERATIONS and any(type(arg) is Remote and arg._made for arg in args)
                if makes or (made and operation not in ("call", "get", "getitem", "next")):
                    vars(value)["_made"] = True
            return value

    def answer(self, content, *news):
        """Do what the other end asks for, and send the result or the exception."""
        try:
            operation, forms, options = content
            args = [unwire(form, self.resolve) for form in forms]
            options = {key: unwire(form, self.resolve) for key, form in options.items()}
            self.update(*news)
            if self.permits and not (forms[0].keys() == {"mine"} and self.permits(operation, *args)):
                raise PermissionError(operation)
            value = OPERATIONS[operation](*args, **options)
            reply = "got", self.form(value)
        except BaseException as error:
            reply = "raised", self.form_of_error(error)
        args = options = value = None  # what only the other end still has is forgotten
        self.send(*reply)


def names_of_class(kind):
    return [f"{each.__module__}.{each.__qualname__}" for each in kind.__mro__]


def library_class(name):
    """The exception class of this full name in the standard library or NumPy; None if there is none.

    None of unittest, where one of them skips a test, nor of asyncio, where one cancels it.
    """
    module, _, name = name.rpartition(".")
    if module.partition(".")[0] in {*sys.stdlib_module_names, "numpy"} - {"unittest", "asyncio", "doctest"}:
        with contextlib.suppress(ImportError, AttributeError):
            kind = getattr(importlib.import_module(module), name)
            return kind if issubclass(kind, BaseException) else None
    return None


# ---- the program's process -----------------------------------------------------------------------------------------
def run_program(libc, job, test, folder, read, pipe):
    """Read the program, confine this process, run it, and do what the judge asks for. Never returns.

    Writes "+" when it is confined and "=" when the program has run, then messages to the judge, or what the program
    prints (mode stdin); "m" where memory does not do.
    """
    # before the program can replace them
    write, leave, clock = os.write, os._exit, time.process_time
    request = receive(job["texts"])
    os.close(job["texts"])
    confine(libc, job, folder, test["mode"])
    write(pipe, b"+")
    if test["mode"] == "status":  # the exit status of another Python is the verdict
        write(pipe, b"=")
        python = os.path.realpath(sys._base_executable)  # sys.executable of a virtual environment is not readable here
        os.execv(python, [python, "-B", "-c", request["program"]])
    # From here on nothing in this process can be trusted: what comes through the pipe is data.
    name = "__main__" if job["main_block"] or test["mode"] == "stdin" else "program"
    main = sys.modules[name] = types.ModuleType(name)
    if test["mode"] == "stdin":
        leave(run_on_input(request["program"], request["input"], main, pipe))

    def evaluate(before, expression):
        exec(compile(before, "<test>", "exec"), main.__dict__)
        return eval(compile(expression, "<test>", "eval"), main.__dict__)

    def timed(function, *args):
        begun = clock()
        return function(*args), clock() - begun

    try:
        try:
            exec(compile(request["program"], "<program>", "exec"), main.__dict__)
        except SystemExit as end:
            if end.code:  # 0 and None: the end of a main block
                leave(1)
        write(pipe, b"=")
        OPERATIONS["names"] = lambda *names: {n: main.__dict__[n] for n in names if n in main.__dict__}
        OPERATIONS.update(evaluate=evaluate, timed=timed)
        peer = Peer(read, pipe)
        while True:
            peer.answer(*peer.receive()[1:])
    except MemoryError:
        write(pipe, b"m")
    finally:
        leave(0)


def run_on_input(program, text, main, pipe):
    """Run a program as Python does, with a file as standard input and the pipe as standard output: the exit status."""
    os.write(pipe, b"=")
    with open("input", "w+b") as file:
        file.write(text.encode("utf-8", "replace"))
        file.seek(0)
        os.dup2(file.fileno(), 0)
    with contextlib.suppress(PermissionError):  # without namespaces no file is removed
        os.unlink("input")
    os.dup2(pipe, 1)
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8")
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8")
    try:
        exec(compile(program, "<program>", "exec"), main.__dict__)
        status = 0
    except SystemExit:
        status = 0
    except BaseException:
        status = 1  # whatever it has printed
    with contextlib.suppress(BaseException):
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()  # waits for those that are no daemons
        importlib.import_module("atexit")._run_exitfuncs()
    for stream in (sys.stdout, sys.__stdout__):
        with contextlib.suppress(BaseException):
            stream.flush()
    return status


# ---- the judge's process -------------------------------------------------------------------------------------------
# Modules by which tests compare, under their usual names: a program's own object of that name does not count. Nor do
# its functions of these names, in a test that calls others too; they are taken from the first module that has them.
COMPARING = {name: name for name in ("math", "cmath", "numpy", "pytest", "unittest")} | {"np": "numpy"}
COMPARERS = dict.fromkeys(("allclose", "array_equal", "array_equiv"), "numpy") | {
    "approx": "pytest",
    "raises": "pytest",
}
COMPARERS |= {"isclose": "math"}
COMPARERS |= dict.fromkeys(
    "assert_allclose assert_almost_equal assert_array_equal assert_equal".split(), "numpy.testing"
)


def permits(operation, target, *rest):
    """What a program may do with a test's objects: call and iterate, and read or set attributes of its own classes.

    It sets no attribute that the class defines, such as a method.
    """
    if operation in ("get", "set", "getitem", "setitem", "len", "bool", "str", "repr"):
        name = rest[0] if rest and isinstance(rest[0], str) else ""
        private = name.startswith("_") or (operation == "set" and hasattr(type(target), name))
        return type(target).__module__ == "__main__" and not private
    return operation in ("call", "iter", "next")


def names_of(code):
    """The names that compiled code uses, and code within it."""
    return {*code.co_names}.union(*(names_of(item) for item in code.co_consts if isinstance(item, types.CodeType)))


def run_test(text, peer, main):
    """Run a test, with the program's objects for the names that it uses and does not define."""
    tree = ast.parse(text)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Assert) and isinstance(last.test, ast.Compare) and isinstance(last.test.left, ast.Call):
        last.test.left = ast.NamedExpr(ast.Name("_got", ast.Store()), last.test.left)  # for the report
    code = compile(ast.fix_missing_locations(tree), "<test>", "exec")
    used = sorted(names_of(code))
    peer.stops = "StopIteration" in used
    # In plain Python what a test imports is there for the program, too.
    imports = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    if imports:
        with contextlib.suppress(Exception):
            peer.ask("evaluate", "\n".join(imports), "None")
    own = [name for name in used if not hasattr(builtins, name)]
    # A builtin's name is the program's only if nothing else is: a problem may ask for sum(). Exceptions and
    # __name__, not in lower case or not letters alone, are never the program's.
    builtin = [name for name in used if hasattr(builtins, name) and name.isalpha() and name.islower()]
    for names in (own, builtin):
        offered = peer.ask("names", *names)
        others = [name for name in names if name in offered and name not in COMPARERS]
        for name in [name for name in names if name in offered]:  # whatever else it offers
            value = offered[name]
            # a module that only the program imports is replaced by ours of that name
            module = COMPARING.get(name) or (isinstance(value, types.ModuleType) and name)
            if module:
                value = importlib.import_module(module)
            elif name in COMPARERS and others:
                value = getattr(importlib.import_module(COMPARERS[name]), name)
            elif type(value) is Remote and name[:1].isupper():
                vars(value)["_is_class"] = True
            setattr(main, name, value)
        if offered:
            break
    exec(code, main.__dict__)


def run_calls(request, peer, main, write):
    """Call a function with one input after another: a line for every value; with a check, up to the first wrong one."""
    function = peer.ask("evaluate", "", request["call"])
    main.data = unwire(request["data"], lambda *_: object())
    exec(compile(request["check"], "<check>", "exec"), main.__dict__)
    for i, form in enumerate(request["inputs"]):
        value, seconds = peer.ask("timed", function, *unwire(form))
        line = wire(value, opaque)
        if request["check"] and not main.right(i, unwire(form), unwire(line, lambda *_: object())):
            return False
        write(b"\n" if request["check"] else json.dumps([line, seconds]).encode() + b"\n")
    return True


def run_judge(libc, job, test, folder, read, ask, pipe):
    """Read the test, confine this process, run it with the program's process for its calls, and write what came out.

    That is what the test gives back, then the test's token and [verdict, what a failed assert got].
    """

    def write(data):
        while data:
            data = data[os.write(pipe, data) :]

    request = receive(job["texts"])  # only this process reads it
    os.close(job["texts"])
    write(b"r")
    confine(libc, job, folder, test["mode"])
    write(begun := os.read(read, 1))
    if begun != b"+":  # the program's process could not be confined, and has said why
        write(os.read(read, 4096))
        return
    loaded = os.read(read, 1)
    verdict, got = "memory" if loaded == b"m" else "fail", None
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        if loaded == b"=":
            write(b"=")
            if test["mode"] == "stdin":
                with open(read, "rb") as file:
                    printed = file.read(test["most"] + 1)
                exec(compile(request["check"], "<check>", "exec"), main.__dict__)
                fits = len(printed) <= test["most"]
                right = not request["check"] or (fits and main.right(printed.decode("utf-8", "replace")))
                verdict = "output limit" if not fits else "pass" if right else "fail"
                write(b"" if request["check"] or not fits else printed)
            else:
                peer = Peer(read, ask, permits)
                if test["mode"] == "calls":
                    verdict = "pass" if run_calls(request, peer, main, write) else "fail"
                elif test["mode"] == "value":
                    write(json.dumps(wire(peer.ask("evaluate", request["before"], request["call"]), opaque)).encode())
                    verdict = "pass"
                else:
                    run_test(request["text"], peer, main)
                    verdict = "pass"
    except MemoryError:
        verdict = "memory"
    except AssertionError:  # the test does not pass
        if hasattr(main, "_got"):
            with contextlib.suppress(BaseException):
                got = reprlib.repr(main._got)[:200]
    except BaseException:
        pass
    write(request["token"].encode() + json.dumps([verdict, got]).encode())


# ---- the template: two confined processes for each test -------------------------------------------------------------
def receive(fd):
    """The next message from a pipe: 16 hexadecimal digits of its size, and JSON; None at its end."""

    def read(size):
        text = b""
        while len(text) < size:
            new = os.read(fd, size - len(text))
            if not new:
                sys.exit(0 if size == 16 and not text else "whoever started this was killed")
            text += new
        return text

    return json.loads(read(int(read(16), 16)))


def overfull(folder, megabytes):
    """Whether a folder, which holds no folders, holds more than `megabytes` or more than 2,000 files."""
    sizes = []
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            sizes.append(entry.stat(follow_symlinks=False).st_blocks * 512)
    return len(sizes) > 2000 or sum(sizes) > megabytes << 20


def follow_test(job, test, pids, pipe, folder):
    """Read what the first of the processes writes until it exits: ("done", "timeout" or "output limit", bytes)."""
    data, closed, next_look = bytearray(), False, 0.0
    deadline = time.monotonic() + min(3 * job["timeout_s"], test["left_s"])
    limits = [*test["limits"], job["timeout_s"]]  # processor seconds of every call; other tests are one call
    call, call_cpu_s, call_begun = -1, 0.0, 0.0  # the call that runs now, and both clocks when it began
    while (now := time.monotonic()) < deadline:
        if now > next_look:
            next_look, cpu_s = now + 0.1, 0.0
            for pid in pids:
                with contextlib.suppress(OSError):  # it has just ended
                    cpu_s += time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(pid): of all its threads
            if (number := min(data.count(b"\n"), len(limits) - 1)) != call:
                call, call_cpu_s, call_begun = number, cpu_s if number else 0.0, now
            if cpu_s > job["timeout_s"] or cpu_s - call_cpu_s > limits[call] or now - call_begun > 3 * limits[call]:
                return "timeout", data
            if not job["namespaces"] and overfull(folder, job["disk_mb"]):  # a file system of its own would be full
                return "output limit", b""
        if closed:  # the process should be gone in a moment
            if os.waitid(os.P_PID, pids[0], os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return "done", data
            time.sleep(0.0002)
        elif select.select([pipe], [], [], min(0.1, deadline - now))[0]:
            chunk = os.read(pipe, 65536)
            data += chunk
            closed = not chunk
        if len(data) > test["cap"]:
            return "output limit", b""
    return "timeout", data


def spawn(files, function, *args):
    """The id of a process that calls a function and ends; it has only these files, and an error goes to the last."""
    pid = os.fork()
    if not pid:
        try:
            for below, above in zip([2, *sorted(files)], [*sorted(files), 256], strict=True):
                os.closerange(below + 1, above)
            null = os.open(os.devnull, os.O_RDWR)  # anew, for flags stay with an open file
            for file in (0, 1, 2):
                os.dup2(null, file)
            os.close(null)
            function(*args)
        except BaseException as error:  # nothing may continue in this process
            os.write(files[-1], repr(error).encode())
        finally:
            os._exit(1)
    return pid


def run_confined(libc, job, test, number):
    """Run a test in a folder and processes of its own, of which nothing is left: (its row, what it gave back)."""
    job = job | {"timeout_s": test["timeout_s"]}
    folder = "/.sandbox" if job["namespaces"] else f"{job['folder']}/{number}"
    if job["namespaces"]:
        size = f"size={job['disk_mb']}m,nr_inodes=2k,mode=700".encode()
        check(libc.mount(b"tmpfs", b"/.sandbox", b"tmpfs", 6, size), "tmpfs")
    else:
        os.mkdir(folder, 0o700)

    ours, theirs = os.pipe()  # the only way out of the test
    files, args = [ours, theirs], (libc, job, test, folder)
    if test["mode"] == "status":
        pids = [spawn([job["texts"], theirs], run_program, *args, None, theirs)]
    else:
        # The judge asks, the program answers. The program and the clock start when the judge has read its text.
        asked, ask, answers, answer = os.pipe() + os.pipe()
        files += [asked, ask, answers, answer]
        pids = [spawn([job["texts"], answers, ask, theirs], run_judge, *args, answers, ask, theirs)]
        if os.read(ours, 1) != b"r":
            sys.exit("a judge did not start")
        pids.append(spawn([job["texts"], asked, answer], run_program, *args, asked, answer))
    for file in files[1:]:
        os.close(file)
    try:
        outcome, data = follow_test(job, test, pids, ours, folder)
    finally:  # end what still runs, also where the trainer was killed
        os.close(ours)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        ended = [os.wait4(pid, 0) for pid in pids]

    status = os.waitstatus_to_exitcode(ended[-1][1])
    cpu_s = sum(usage.ru_utime + usage.ru_stime for _, _, usage in ended)
    if job["namespaces"]:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(-1, signal.SIGKILL)  # all of this process namespace but ourselves
            while os.waitpid(-1, 0):
                pass
        check(libc.umount2(b"/.sandbox", 2), "umount")
    else:
        importlib.import_module("shutil").rmtree(folder, ignore_errors=True)
    if data[:1] != b"+" and outcome == "done":  # it failed before the program ran: no verdict
        sys.exit(f"a test process could not be confined: {data.decode(errors='replace')}")
    given, loaded = data[1:].removeprefix(b"="), data[1:2] == b"="
    return {"outcome": outcome, "status": status, "loaded": loaded, "cpu_s": cpu_s, "size": len(given)}, given


def orphaned(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the kernel may send one for every thread of the trainer that ends
    sys.exit("whoever started this was killed")


def launch():
    """Read the settings from standard input, confine this process, then run tests as they come and report each."""
    libc = ctypes.CDLL(None, use_errno=True)
    job = receive(0)
    job["texts"] = os.dup(0)  # a test's text follows its settings, where only the judge reads it; then the program's
    # The report goes to a copy of standard output that no test inherits; what programs print goes nowhere.
    report, null = os.dup(1), os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    signal.signal(signal.SIGTERM, orphaned)
    libc.prctl(1, signal.SIGTERM if job["folder"] else signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG; SIGTERM: clean up
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when memory runs out, the kernel kills this process before the trainer

    # Ask the kernel what it offers. Namespaces were tried before, by layers(), in a launcher without tests.
    landlock, machine = libc.syscall(444, None, 0, 1), os.uname().machine
    job["landlock"] = landlock if landlock >= 3 else 0  # older versions let files be truncated
    refused = libc.prctl(22, 2, None, 0, 0) == -1 and ctypes.get_errno()
    job["seccomp"] = machine in MACHINES and refused == 14  # EFAULT: known, only there was no filter
    if job["seccomp"]:
        kinds = ["socketpair"] * job["namespaces"], ["socketpair"] * job["namespaces"] + ["execve"]
        job["filters"] = [call_filter(machine, more, job["threads"], job["namespaces"]) for more in kinds]
    job["readable"] = [path for path in (sys.base_prefix, *job["packages"], *READABLE) if os.path.exists(path)]
    if job["namespaces"]:
        enter_namespaces(libc, "/proc", job["readable"])  # mounts its root there, where nothing readable lies
    libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: no core; no other process may trace this one or its forks
    os.write(report, json.dumps({name: job[name] for name in ("namespaces", "landlock", "seccomp")}).encode() + b"\n")
    if not job["allow_unsafe"] and not (job["seccomp"] and (job["namespaces"] or job["landlock"])):
        sys.exit("less than the safe minimum")

    for name in USUAL.split():
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a fork shares what no collection writes to
    try:
        if job["folder"]:
            os.mkdir(job["folder"], 0o700)
        number = 0
        while True:
            row, given = run_confined(libc, job, receive(job["texts"]), number := number + 1)
            line = json.dumps(row).encode() + b"\n" + given
            while line:
                line = line[os.write(report, line) :]
    finally:
        if job["folder"]:
            importlib.import_module("shutil").rmtree(job["folder"], ignore_errors=True)


if __name__ == "__main__":
    launch()
