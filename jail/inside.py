"""What sandbox.py runs in the child: confinement, the program, the judge, the template that forks.

What it does not stop: a program sees the template's addresses, the seed of hash() and how many
tests have run, may take record locks on Python's own files, and without namespaces finds out
whether a path exists. A test that executes, unpickles, imports or formats what a program wrote can
be made to pass.

sandbox.py starts an interpreter for each of its workers, the template, which executes the texts of
boot.py, wire.py and this file: the standard library alone. For every test it forks run_judge() and
run_program(). The template itself never reads a program or a test, so that nothing of one is left
in the memory of the next.
"""

import ast
import builtins
import ctypes
import dis
import fcntl
import gc
import itertools
import json
import mmap
import os
import reprlib
import resource
import signal
import sys
import time
from contextlib import suppress
from importlib import import_module
from select import select
from signal import SIG_IGN, SIG_SETMASK, SIGCHLD, SIGKILL, SIGTERM, pthread_sigmask
from struct import pack
from types import CodeType, FunctionType, ModuleType

from jail.wire import OPERATIONS, Peer, Remote, as_line, opaque, unwire, wire

# What many programs import: done once, here.
USUAL = "bisect collections copy datetime decimal enum fractions heapq math string typing"
JUDGED = 4  # tests that one judge runs, with four descriptors for each


def check(returned, what):
    """Raise OSError if a C function returned -1."""
    if returned == -1:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return returned


# ---- namespaces ----------------------------------------------------------------------------------
def enter_namespaces(libc, readable):
    """Continue as process 1 of new user, mount, process, network, IPC and host-name namespaces, in
    a root of their own.

    The new root holds `readable`, read-only, and the folder /.sandbox. The caller exits with the
    status of process 1.
    """
    # Inside, we are user 65534 with all capabilities over these namespaces, and none over anything
    # else.
    texts = {
        "setgroups": "deny",
        "uid_map": f"65534 {os.getuid()} 1",
        "gid_map": f"65534 {os.getgid()} 1",
    }
    # CLONE_NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET: nothing is shared with the machine
    check(libc.unshare(0x7C020000), "unshare")
    libc.sethostname(b"sandbox", 7)
    for name, text in texts.items():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    # The next child is process 1 of the new namespace: when it ends, the kernel kills all others in
    # it.
    parent = os.pidfd_open(os.getpid())
    first = os.fork()
    if first:  # without this process, whoever started it would have to wait for the other
        signal.sigwait([SIGTERM, SIGCHLD])
        os._exit(kill(first) & 0xFF)
    libc.prctl(1, SIGKILL)  # PR_SET_PDEATHSIG: end when the parent is killed
    if select([parent], [], [], 0)[0]:  # it was killed before that call
        os._exit(1)
    os.close(parent)
    # A small file system in memory becomes the root; the readable paths of the old root are mounted
    # into it.
    root = b"/proc"  # where nothing readable lies
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
    os.makedirs(root + b"/.sandbox/test")
    # Swap the roots, unmount the old one, and make the new one and all below it read-only.
    os.chdir(root)
    check(libc.syscall(MACHINES[MACHINE][3], b".", b"."), "pivot_root")
    check(libc.umount2(b".", 2), "umount")
    os.chdir("/")
    flags = pack("4Q", 3, 0, 0, 0)  # MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID
    check(libc.syscall(442, -100, b"/", 0x8000, flags, 32), "mount_setattr")


# ---- Landlock ------------------------------------------------------------------------------------
# What a program may read besides Python itself and its installed libraries. /proc is not among it.
READABLE = "/usr /bin /lib /lib64 /etc/ld.so.cache /dev/null /dev/zero /dev/urandom".split()


def file_rules(libc, job, writable):
    """A Landlock ruleset: read and execute below job["readable"], all below `writable`; no TCP, no
    signals to others.

    Without namespaces no new folders, and no file is removed: what is written can be counted, see
    overfull().
    """
    abi = job["landlock"]
    # all that this kernel knows: what no rule allows is refused
    rights = 0xFFFF if abi >= 5 else 0x7FFF
    size = 8  # files
    if abi >= 4:
        size = 16  # TCP
    if abi >= 6:
        size = 24  # abstract sockets and signals
    ruleset = check(libc.syscall(444, pack("3Q", rights, 3, 3)[:size], size, 0), "landlock")
    for path in [*job["readable"], writable]:
        # write and read a file; execute, read a file, list a folder
        allowed = 6 if path.startswith("/dev/") else 13
        if path == writable:
            allowed = rights if job["namespaces"] else rights & ~0xA0  # MAKE_DIR, REMOVE_FILE
        if not os.path.isdir(path):
            allowed &= 7  # the rights that a file can have
        fd = os.open(path, os.O_PATH)
        check(libc.syscall(445, ruleset, 1, pack("=Qi", allowed, fd), 0), "landlock rule")
        os.close(fd)
    return ruleset


# ---- seccomp -------------------------------------------------------------------------------------
# The system calls that a program may make, what Python, NumPy and pandas need: their numbers on
# x86-64 and aarch64.
CALLS = """
read 0 63, write 1 64, open 2 -, close 3 57, stat 4 -, fstat 5 80, lstat 6 -, poll 7 -, lseek 8 62,
mmap 9 222, mprotect 10 226, munmap 11 215, brk 12 214, rt_sigaction 13 134, rt_sigprocmask 14 135,
rt_sigreturn 15 139, ioctl 16 29, pread64 17 67, pwrite64 18 68, readv 19 65, writev 20 66,
access 21 -, pipe 22 -, select 23 -, sched_yield 24 124, mremap 25 216, madvise 28 233, dup 32 23,
dup2 33 -, pause 34 -, nanosleep 35 101, getitimer 36 102, alarm 37 -, setitimer 38 103,
getpid 39 172, sendfile 40 71, sendto 44 206, recvfrom 45 207, shutdown 48 210,
socketpair 53 199, clone 56 220, exit 60 93,
wait4 61 260, uname 63 160, fcntl 72 25, fsync 74 82, fdatasync 75 83, truncate 76 45,
ftruncate 77 46, getcwd 79 17, chdir 80 49, fchdir 81 50, rename 82 -, mkdir 83 -, rmdir 84 -,
creat 85 -, unlink 87 -, symlink 88 -, readlink 89 -, umask 95 166, gettimeofday 96 169,
getrlimit 97 163, getrusage 98 165, sysinfo 99 179, times 100 153, getuid 102 174, getgid 104 176,
geteuid 107 175, getegid 108 177, getppid 110 173, getpgrp 111 -, getgroups 115 158,
getpgid 121 155, getsid 124 156, rt_sigpending 127 136, rt_sigtimedwait 128 137,
rt_sigsuspend 130 133, sigaltstack 131 132, statfs 137 43, fstatfs 138 44, prctl 157 167,
arch_prctl 158 -, gettid 186 178, time 201 -, futex 202 98, sched_getaffinity 204 123,
getdents64 217 61, set_tid_address 218 96, clock_gettime 228 113, clock_getres 229 114,
clock_nanosleep 230 115, exit_group 231 94, epoll_wait 232 -, epoll_ctl 233 21, waitid 247 95,
openat 257 56, mkdirat 258 34, newfstatat 262 79, unlinkat 263 35, renameat 264 38,
symlinkat 266 36, readlinkat 267 78, faccessat 269 48, pselect6 270 72, ppoll 271 73,
set_robust_list 273 99, epoll_pwait 281 22, eventfd2 290 19, epoll_create1 291 20, dup3 292 24,
pipe2 293 59, preadv 295 69, pwritev 296 70, getcpu 309 168, renameat2 316 276, getrandom 318 278,
membarrier 324 283, prlimit64 302 261, copy_file_range 326 285, statx 332 291, rseq 334 293
"""
ALLOWED = {
    name: (int(x), None if a == "-" else int(a)) for name, x, a in map(str.split, CALLS.split(","))
}
# Of these only with one of these values as the argument of a number: F_DUPFD .. F_SETLKW, F_OFD_*
# and a pipe's size; terminal or not, its size, bytes to read, flags; PR_SET_NAME, PR_GET_NAME; the
# limits of this process, which cannot be raised; no clock of another process; AF_UNIX, which
# asyncio needs and which is harmless where it reaches nothing.
ARGUMENTS = """
fcntl 1 0 1 2 3 4 5 6 7 36 37 38 1030 1031 1032, ioctl 1 0x5401 0x5413 0x541B 0x5421 0x5450 0x5451,
prctl 0 15 16, prlimit64 0 0, clock_gettime 0 0 1 2 3 4 5 6 7 8 9 10 11, socketpair 0 1
"""
ARGUMENT = {
    name: (int(at), tuple(int(number, 0) for number in numbers))
    for name, at, *numbers in map(str.split, ARGUMENTS.split(","))
}
MACHINE = os.uname().machine
# column, audit, capset, pivot_root
MACHINES = {"x86_64": (0, 0xC000003E, 126, 155), "aarch64": (1, 0xC00000B7, 91, 41)}


def call_filter(machine, threads, namespaces):
    """A seccomp filter, bytes: the calls of ALLOWED with their arguments; ENOSYS for every other.

    The C library falls back from newer calls to older ones. threads: clone with CLONE_THREAD.
    Without namespaces no pairs of sockets, and no files without a name. Numbers are found by
    bisection: the kernel tries a new filter on every call there is.
    """
    column, audit, *_ = MACHINES[machine]
    number = {name: row[column] for name, row in ALLOWED.items() if row[column] is not None}
    if not threads:
        del number["clone"]
    if not namespaces:
        del number["socketpair"]
    # argument, operation, operands, whether the call is allowed where one of these gives true
    rules = {name: (argument, 0x15, values, True) for name, (argument, values) in ARGUMENT.items()}
    rules["clone"] = (0, 0x45, [0x10000], True)  # CLONE_THREAD
    if not namespaces:
        rules["open"] = (1, 0x45, [0x400000], False)  # O_TMPFILE
        rules["openat"] = (2, 0x45, [0x400000], False)
    # A row: operation, rows to skip if true, if false, operand. 0x20 loads, 0x15 is ==, 0x35 >=,
    # 0x45 &, 6 returns.
    # calls of another machine: kill; then the number of the call
    rows = [(0x20, 0, 0, 4), (0x15, 1, 0, audit), (6, 0, 0, 0x80000000), (0x20, 0, 0, 0)]
    ends = [(6, 0, 0, 0x50026), (6, 0, 0, 0x7FFF0000)]  # ENOSYS; allowed
    for name in rules.keys() & number.keys():
        argument, operation, values, allowed = rules[name]
        # the upper half of an argument that the kernel reads as an int is of no account
        body = [(0x20, 0, 0, 16 + 8 * argument)]
        body += [(operation, len(values) - i, 0, value) for i, value in enumerate(values)]
        body += ends if allowed else ends[::-1]
        rows += [(0x15, 0, len(body), number.pop(name)), *body]

    def search(numbers):
        if len(numbers) <= 4:
            return [(0x15, len(numbers) - i, 0, value) for i, value in enumerate(numbers)] + ends
        middle = len(numbers) // 2
        lower = search(numbers[:middle])
        return [(0x35, len(lower), 0, numbers[middle]), *lower, *search(numbers[middle:])]

    return b"".join(pack("HBBI", *row) for row in rows + search(sorted(number.values())))


def confine(libc, job, tests=1):
    """Give up all rights of this process for good: resource limits, Landlock, capabilities,
    seccomp.
    """
    libc.prctl(1, SIGKILL)  # PR_SET_PDEATHSIG
    os.setsid()
    os.chdir(job["folder"])
    limits = {
        "CPU": tests * (int(job["timeout_s"]) + 2),
        "AS": job["memory_mb"] << 20,
        "FSIZE": job["disk_mb"] << 20,
        "NOFILE": 64,
        "CORE": 0,
    }
    if not job["threads"]:
        # no new threads and processes for an ordinary user; seccomp refuses them to root too
        limits["NPROC"] = 0
    for name, limit in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        most = resource.getrlimit(kind)[1]
        if most != resource.RLIM_INFINITY:
            limit = min(limit, most)
        resource.setrlimit(kind, (limit, limit))
    # PR_SET_NO_NEW_PRIVS, without which an ordinary user may not install the two below
    libc.prctl(38, 1, 0, 0, 0)
    if job["landlock"]:
        check(libc.syscall(446, job["ruleset"], 0), "landlock")
        os.close(job["ruleset"])
    if MACHINE in MACHINES:  # no capabilities, so that root is an ordinary user too
        check(
            libc.syscall(MACHINES[MACHINE][2], pack("Ii", 0x20080522, 0), bytes(24)),
            "capset",
        )
    if job["seccomp"]:  # the filter judges every call from here on
        code = job["filter"]
        check(
            libc.prctl(22, 2, pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(code))),
            "seccomp",
        )


# ---- the program's process -----------------------------------------------------------------------
def run_program(libc, job, test, read, pipe):
    """Read the program, confine this process, run it, and do what the judge asks for. Never
    returns.

    Writes "+" when it is confined and "=" when the program has run, then messages to the judge, or
    what the program prints (mode stdin); "!" and why, or "m" for memory, where it cannot be run.
    """
    # before the program can replace them
    write = os.write
    leave = os._exit
    clock = time.process_time
    request = receive(job["texts"])
    os.close(job["texts"])
    if test["mode"] == "stdin":
        with open(os.memfd_create("input", 2), "w+b") as file:  # MFD_ALLOW_SEALING
            file.write(request["input"].encode("utf-8", "replace"))
            file.seek(0)
            fcntl.fcntl(file, 1033, 15)  # F_ADD_SEALS: from here on it can only be read
            os.dup2(file.fileno(), 0)
    confine(libc, job)
    write(pipe, b"+")
    # From here on nothing in this process can be trusted: what comes through the pipe is data.
    name = "__main__" if job["main_block"] or test["mode"] == "stdin" else "program"
    main = sys.modules[name] = ModuleType(name)
    if test["mode"] == "stdin":
        leave(run_on_input(request["program"], main, pipe))

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
                raise
        write(pipe, b"=")
        OPERATIONS["names"] = lambda *names: {
            n: main.__dict__[n] for n in names if n in main.__dict__
        }
        OPERATIONS.update(evaluate=evaluate, timed=timed)
        peer = Peer(read, pipe)
        while True:
            peer.answer(*peer.receive()[1:])
    except MemoryError:
        write(pipe, b"m")
    except BaseException as error:
        write(pipe, f"!{type(error).__name__}: {error}"[:100].encode())
    finally:
        leave(0)


def run_on_input(program, main, pipe):
    """Run a program as Python does, with the pipe as standard output: the exit status."""
    os.write(pipe, b"=")
    os.dup2(pipe, 1)
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", newline="\n")
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8")
    status = 0
    try:
        with suppress(SystemExit):
            exec(compile(program, "<program>", "exec"), main.__dict__)
    except BaseException:
        status = 1  # whatever it has printed
    with suppress(BaseException):
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()  # waits for those that are no daemons
        import_module("atexit")._run_exitfuncs()
    for stream in (sys.stdout, sys.__stdout__):
        with suppress(BaseException):
            stream.flush()
    return status


# ---- the judge's process -------------------------------------------------------------------------
# Modules by which tests compare, under their usual names: a program's own object of that name does
# not count. Nor do its functions of these names, in a test that calls others too; they are taken
# from the first module that has them.
COMPARING = "math math, cmath cmath, numpy numpy, np numpy, pytest pytest, unittest unittest"
COMPARING = dict(map(str.split, COMPARING.split(",")))
COMPARERS = """
approx pytest, raises pytest, isclose math, Counter collections, allclose numpy, array_equal numpy,
array_equiv numpy, assert_allclose numpy.testing, assert_almost_equal numpy.testing,
assert_array_equal numpy.testing, assert_equal numpy.testing
"""
COMPARERS = dict(map(str.split, COMPARERS.split(",")))


# Modules that a program may name in another way, as their functions only compute.
ALIASED = """
bisect calendar cmath collections copy datetime decimal fractions functools heapq itertools json
math numpy numpy.linalg numpy.testing posixpath random re statistics string textwrap time
""".split()


def permits(operation, target, *rest):
    """What a program may do with a test's objects: call, iterate, and read what data they are; all
    operations of its own classes and their objects; read attributes of these, set those of objects.

    It sets no method or the like, and nothing of a class.
    """
    if operation in "call iter next contains bool base isinstance issubclass".split():
        return True
    is_class = isinstance(target, type)
    # for functools.wraps
    if operation == "get" and rest[0] in "__name__ __qualname__ __doc__".split():
        return is_class or isinstance(target, FunctionType)
    kind = target if is_class else type(target)
    if kind.__module__ != "__main__":
        return False
    if operation not in ("get", "set", "del"):
        return True
    name = rest[0]
    if type(name) is not str or name.startswith("_"):
        return False
    owner = next((base for base in kind.__mro__ if name in vars(base)), object)
    if is_class:
        return operation == "get" and owner.__module__ == "__main__"
    there = vars(owner).get(name)
    if operation == "get" or hasattr(there, "__set__"):
        return True
    return not (callable(there) or hasattr(there, "__get__"))


def names_of(code):
    """The names that compiled code uses, and code within it."""
    return {*code.co_names}.union(
        *(names_of(item) for item in code.co_consts if isinstance(item, CodeType))
    )


def names_set(code):
    """The names that a test gives a value before it reads them, by import, =, for, with: they are
    not the program's.
    """
    found = set()
    loaded = set()
    for step in dis.get_instructions(code):
        if isinstance(step.argval, CodeType):
            loaded |= names_of(step.argval)
        elif step.opname == "LOAD_NAME":
            loaded.add(step.argval)
        elif step.opname == "STORE_NAME" and step.argval not in loaded:
            found.add(step.argval)
    return found


def run_test(text, peer, main):
    """Run a test, with the program's objects for the names that it uses and does not define."""
    tree = ast.parse(text)
    match tree.body[-1:]:
        case [ast.Assert(test=ast.Compare(left=ast.Call()) as compared)]:  # for the report
            compared.left = ast.NamedExpr(ast.Name("_got", ast.Store()), compared.left)
    code = compile(ast.fix_missing_locations(tree), "<test>", "exec")
    used = names_of(code)
    its = names_set(code)
    peer.stops = "StopIteration" in used
    # In plain Python what a test imports is there for the program, too.
    imports = [
        ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    if imports:
        with suppress(Exception):
            peer.ask("evaluate", "\n".join(imports), "None")
    # A builtin's name is the program's only if nothing else is, but for modules: a problem may ask
    # for sum(). Exceptions and __name__, not in lower case or not letters alone, are never the
    # program's.
    own = {name for name in used - its if not hasattr(builtins, name)}
    builtin = {
        name for name in used if hasattr(builtins, name) and name.isalpha() and name.islower()
    }
    offered = peer.ask("names", *own, *builtin)
    if type(offered) is not dict:  # of a class of its own it could answer each time otherwise
        raise TypeError("names are offered in a dict")
    others = offered.keys() - COMPARERS.keys()
    taken = own & offered.keys()
    if taken <= COMPARERS.keys():
        taken |= builtin & offered.keys()
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    for name in taken:  # whatever else it offers
        value = offered[name]
        # a module that only the program imports is replaced by ours of that name, and so is what
        # poses as one
        asked = {node.attr for node in attributes if getattr(node.value, "id", "") == name}
        is_module = isinstance(value, ModuleType)
        known = (
            name in sys.stdlib_module_names
            and (asked or is_module)
            and asked <= {*dir(import_module(name))}
        )
        other = is_module and (value.__name__ if value.__name__ in ALIASED else name)
        if module := COMPARING.get(name) or (known and name) or other:
            value = import_module(module)
        elif name in COMPARERS and others:
            value = getattr(import_module(COMPARERS[name]), name)
        elif isinstance(value, Remote) and name[:1].isupper():
            value.__own__.is_class = True
        setattr(main, name, value)
    exec(code, main.__dict__)


def run_calls(request, peer, main, write):
    """Call a function with one input after another: a line for every value; with a check, up to the
    first wrong one.
    """
    function = peer.ask("evaluate", "", request["call"])
    main.data = unwire(request["data"])
    for i, form in enumerate(request["inputs"]):
        value, seconds = peer.ask("timed", function, *unwire(form))
        given = wire(value, opaque)
        seconds = max(0.0, float.__float__(seconds))
        if request["check"] and not main.right(i, unwire(form), unwire(given)):
            raise AssertionError
        write(b"\n" if request["check"] else as_line([given, seconds]))


def run_judge(libc, job, test, orders, ends, out, pipes):
    """Run the tests of a program, each with its pipes to a process of the program's, as they are
    ordered.

    Reads a test, writes "r" to `ends`; then to `out` what the test gives back, its token and
    [verdict, what a failed assert got]; and "e" to `ends`.
    """
    for number, (read, ask) in enumerate(pipes):
        if not os.read(orders, 1):
            break
        request = receive(job["texts"])  # only this process reads it
        if not number:
            confine(libc, job, len(pipes))
        os.chdir(job["folder"])  # which may be another one by now
        os.write(ends, b"r")
        judge(request, test, read, ask, lambda data: write(out, data))
        # 128 MB, which the next test may need
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 1 << 17:
            break
        os.write(ends, b"e")


def write(pipe, data):
    while data:
        data = data[os.write(pipe, data) :]


def judge(request, test, read, ask, give):
    """Run a test with the program's process for its calls, and give() what comes of it."""
    give(begun := os.read(read, 1))
    if begun != b"+":  # the program's process could not be confined, and has said why
        give(os.read(read, 4096))
        return
    loaded = os.read(read, 1)
    verdict = "memory" if loaded == b"m" else "fail"
    got = None
    if loaded == b"!":
        got = os.read(read, 400).decode("utf-8", "replace")
    main = sys.modules["__main__"] = ModuleType("__main__")
    try:
        if loaded == b"=":
            give(b"=")
            exec(compile(request.get("check", ""), "<check>", "exec"), main.__dict__)
            if "most" in test:  # it reads and prints
                with open(read, "rb") as file:
                    printed = file.read(test["most"] + 1)
                if len(printed) > test["most"]:
                    verdict = "output limit"
                elif not request["check"] or main.right(printed.decode("utf-8", "replace")):
                    verdict = "pass"
                give(b"" if request["check"] else printed)
            else:
                peer = Peer(read, ask, permits)
                verdict = "pass"
                if test["mode"] == "calls":
                    run_calls(request, peer, main, give)
                elif test["mode"] == "value":
                    form = wire(peer.ask("evaluate", request["before"], request["call"]), opaque)
                    give(as_line(form))
                else:
                    run_test(request["text"], peer, main)
    except MemoryError:
        verdict = "memory"
    except BaseException as error:  # the test does not pass
        verdict = "fail"
        with suppress(BaseException):
            if not isinstance(error, AssertionError):
                got = f"{type(error).__name__}: {error}"[:200]
            elif hasattr(main, "_got"):
                got = reprlib.repr(main._got)[:200]
    give(request["token"].encode() + as_line([verdict, got]))


# ---- the template: two confined processes for each test ------------------------------------------
def receive(fd):
    """The next message from a pipe: 16 hexadecimal digits of its size, and JSON. At its end this
    process exits.
    """

    def read(size):
        text = b""
        while len(text) < size:
            text += os.read(fd, size - len(text)) or sys.exit(
                0 if size == 16 and not text else "whoever started this was killed"
            )
        return text

    return json.loads(read(int(read(16), 16)))


def empty(libc, job):
    """Make the folder of tests empty. A file system that no file was made in or removed from serves
    the next test.
    """
    folder = job["folder"]
    if not job["namespaces"]:  # it holds no folders
        for name in os.listdir(folder):
            os.unlink(f"{folder}/{name}")
    elif os.listdir(folder) or os.stat(folder).st_mtime_ns != job["made"]:
        path = folder.encode()
        if job["made"]:
            check(libc.umount2(path, 2), "umount")
        options = f"size={job['disk_mb']}m,nr_inodes=2k,mode=700"
        check(libc.mount(b"tmpfs", path, b"tmpfs", 6, options.encode()), "tmpfs")
        job["made"] = os.stat(folder).st_mtime_ns


def overfull(folder, megabytes):
    """Whether a folder, which holds no folders, holds more than `megabytes` or more than 2,000
    files.
    """
    sizes = []
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):  # removed meanwhile
            sizes.append(entry.stat(follow_symlinks=False).st_blocks * 512)
    return len(sizes) > 2000 or sum(sizes) > megabytes << 20


def processor_s(pids):
    """Processor seconds of processes, of all their threads."""
    total = 0.0
    for pid in pids:
        with suppress(OSError):
            total += time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(pid)
    return total


def follow_test(job, test, pids, out, ends):
    """Read what a test gives back until there is something at `ends`: ("done", "timeout" or "output
    limit", its size).

    It is in job["buffer"], which no process of a later test has.
    """
    if len(job["buffer"]) < test["cap"] + 65536:
        job["buffer"] = memory_of_ours(test["cap"] + 65536)
    buffer = job["buffer"]
    size = 0
    counted = 0
    lines = 0
    watched = [out, ends]
    ended = False
    next_look = 0.0
    call_begun = time.monotonic()
    deadline = call_begun + min(3 * job["timeout_s"], test["left_s"])
    earlier_s = processor_s(pids)
    # processor seconds of every call; other tests are one call
    limits = [*test["limits"], job["timeout_s"]]
    # the call that runs now, and both clocks when it began
    call = 0
    call_cpu_s = 0.0
    # what is not read before "+" the next process would read
    while (now := time.monotonic()) < deadline or not size:
        if now > next_look:
            next_look = now + 0.1
            cpu_s = processor_s(pids) - earlier_s
            lines += buffer[counted:size].count(b"\n")
            counted = size
            if (number := min(lines, len(limits) - 1)) != call:
                call = number
                call_cpu_s = cpu_s
                call_begun = now
            if size and (
                cpu_s > limits[-1] or max(cpu_s - call_cpu_s, (now - call_begun) / 3) > limits[call]
            ):
                return "timeout", size
            # a file system of its own would be full
            if not job["namespaces"] and overfull(job["folder"], job["disk_mb"]):
                return "output limit", 0
        ready = select(watched, [], [], 0 if ended else max(0.01, min(0.1, deadline - now)))[0]
        chunk = os.readv(out, [memoryview(buffer)[size : size + 65536]]) if out in ready else 0
        size += chunk
        if size > test["cap"]:
            return "output limit", 0
        if out in ready and not chunk:  # at its end it would always be ready
            watched.remove(out)
        if ended and not chunk:
            return "done", size
        # once more: both may have been written between two looks
        ended |= ends in ready and not chunk
    return "timeout", size


def memory_of_ours(size):
    """Zeros, in memory that a fork does not have."""
    buffer = mmap.mmap(-1, size)
    buffer.madvise(mmap.MADV_DONTFORK)
    return buffer


def kill(pid):
    """End a child, and wait for it: its exit status."""
    os.kill(pid, SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def silence(*files):
    """Let these files be /dev/null."""
    null = os.open(os.devnull, os.O_RDWR)
    for file in files:
        os.dup2(null, file)
    os.close(null)


def spawn(files, function, *args):
    """The id of a process that calls a function and ends; it has only these files, and an error
    goes to the last.
    """
    pid = os.fork()
    if not pid:
        try:
            for below, above in itertools.pairwise([2, *sorted(files), 256]):
                os.closerange(below + 1, above)
            silence(0, 1, 2)  # anew, for flags stay with an open file
            function(*args)
        except BaseException as error:  # nothing may continue in this process
            os.write(files[-1], repr(error).encode())
        finally:
            os._exit(1)
    return pid


class Judge:
    """Our ends of the pipes of a judge and of the programs' processes that it asks, one for each of
    `count` tests.
    """

    def __init__(self, libc, job, test, count):
        self.out, out = os.pipe()  # the only way out of a test
        self.ends, ends = os.pipe()
        orders, self.orders = os.pipe()
        # The judge asks, the program answers.
        pipes = [(*os.pipe(), *os.pipe()) for _ in range(count)]
        self.programs = [(asked, answer) for asked, _, _, answer in pipes]
        its = [(answers, ask) for _, ask, answers, _ in pipes]
        files = [*job["kept"], orders, ends, *sum(its, ()), out]
        self.pid = spawn(files, run_judge, libc, job, test, orders, ends, out, its)
        for file in files[len(job["kept"]) :]:
            os.close(file)

    def begin(self):
        """Let it read its next test: the pipes for the program."""
        os.write(self.orders, b"t")
        if os.read(self.ends, 1) != b"r":
            sys.exit(f"a judge did not start: {os.read(self.out, 4096).decode(errors='replace')}")
        return self.programs.pop(0)

    def close(self):
        kill(self.pid)
        for file in (self.out, self.ends, self.orders, *sum(self.programs, ())):
            os.close(file)


def clear(job, judge):
    """End the judge, and whatever else of a program still runs."""
    judge.close()
    if job["namespaces"]:
        with suppress(OSError):
            os.kill(-1, SIGKILL)  # all of this process namespace but ourselves
            while os.waitpid(-1, 0):
                pass


def run_confined(libc, job, test, judge):
    """Run a test, and leave nothing of it but the judge for the next one: (its row, what it gave
    back, judge or None).

    A judge never runs a line of the program, so one serves up to JUDGED tests of it; the program
    has a process for each.
    """
    empty(libc, job)
    job["timeout_s"] = test["timeout_s"]
    judge = judge or Judge(
        libc, job, test, min(test["tests"], JUDGED) if test["mode"] == "test" else 1
    )
    pipes = judge.begin()
    pids = [judge.pid, spawn([*job["kept"], *pipes], run_program, libc, job, test, *pipes)]
    for file in pipes:
        os.close(file)
    goes_on = False
    earlier_s = processor_s(pids)
    try:
        outcome, size = follow_test(job, test, pids, judge.out, judge.ends)
        cpu_s = processor_s(pids) - earlier_s
        goes_on = outcome == "done" and os.read(judge.ends, 1) == b"e" and judge.programs
    finally:  # end what still runs, also where the trainer was killed
        status = kill(pids[-1])
        if not goes_on:
            clear(job, judge)
            judge = None
    buffer = job["buffer"]
    # it failed before the program ran: no verdict
    if outcome == "done" and buffer[:1] != b"+":
        sys.exit(f"a test process could not be confined: {buffer[:size].decode(errors='replace')}")
    loaded = buffer[1:2] == b"="  # what is not read is zeros
    given = memoryview(buffer)[1 + loaded : size]
    row = {
        "outcome": outcome,
        "status": status,
        "loaded": loaded,
        "cpu_s": cpu_s,
        "size": len(given),
    }
    return row, given, judge


def remove(base):
    """End the processes that still run, and remove the folder; with namespaces there are neither."""
    with suppress(OSError), open("/proc/thread-self/children") as file:
        for pid in file.read().split():
            kill(int(pid))
    if base:
        import_module("shutil").rmtree(base, ignore_errors=True)


def orphaned(*_):
    # the kernel may send one for every thread of the trainer that ends
    signal.signal(SIGTERM, SIG_IGN)
    sys.exit("whoever started this was killed")


def launch():
    """Read the settings from standard input, confine this process, then run tests as they come and
    report each.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    job = receive(0)
    # a test's text follows its settings, where only the judge reads it; then the program's
    job["texts"] = os.dup(0)
    # The report goes to a copy of standard output that no test inherits; what programs print goes
    # nowhere.
    report = os.dup(1)
    silence(0, 1)
    # A trainer may ignore or block signals, and what it starts inherits that. SIGTERM waits until
    # it can end everything.
    signal.signal(SIGCHLD, signal.SIG_DFL)
    pthread_sigmask(SIG_SETMASK, [SIGTERM, SIGCHLD])
    signal.signal(SIGTERM, orphaned)
    base = job["folder"]  # for what tests write; "" with namespaces
    libc.prctl(1, SIGTERM)  # PR_SET_PDEATHSIG, which cleans up
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when memory runs out, the kernel kills this process before the trainer

    # Ask the kernel what it offers. Namespaces were tried before, by layers(), in a launcher
    # without tests.
    landlock = libc.syscall(444, None, 0, 1)
    job["landlock"] = landlock if landlock >= 3 else 0  # older versions let files be truncated
    refused = libc.prctl(22, 2, None) == -1 and ctypes.get_errno()
    # EFAULT: known, only there was no filter
    job["seccomp"] = MACHINE in MACHINES and refused == 14
    if job["seccomp"]:
        code = call_filter(MACHINE, job["threads"], job["namespaces"])
        job["filter"] = ctypes.create_string_buffer(code, len(code))
    # programs may read all of it
    exposed = sys.base_prefix in map(os.path.expanduser, ("~", "~/.local"))
    job["readable"] = [*filter(os.path.exists, (sys.base_prefix, *job["packages"], *READABLE))]
    if job["namespaces"]:
        enter_namespaces(libc, job["readable"])
    pthread_sigmask(SIG_SETMASK, ())
    # PR_SET_DUMPABLE: no core; no other process may trace this one or its forks
    libc.prctl(4, 0)
    found = {name: job[name] for name in "namespaces landlock seccomp".split()}
    write(report, as_line(found | {"size": 0}))
    if not job["allow_unsafe"]:
        if exposed:
            sys.exit("this Python lies in a home folder: use another")
        if not (job["seccomp"] and (job["namespaces"] or job["landlock"])):
            sys.exit("less than the safe minimum")

    folder = f"{base or '/.sandbox'}/test"
    job |= {"folder": folder, "made": 0, "buffer": memory_of_ours(1 << 20)}
    os.environ.update(HOME=folder, TMPDIR=folder, PYTHONPATH=":".join(job["packages"]))
    sys.path += job["packages"]
    for name in USUAL.split():
        import_module(name)
    import_module("site").setquit()  # exit and quit, as without -S
    gc.collect()
    gc.freeze()  # a fork shares what no collection writes to
    try:
        if base:
            os.mkdir(base, 0o700)
            os.mkdir(folder, 0o700)
        job["kept"] = [job["texts"]]  # files that a test process begins with
        judge = None
        # a rule for what is above the folder's file system, where nothing can be written
        if job["landlock"]:
            job["ruleset"] = file_rules(libc, job, folder if base else "/.sandbox")
            job["kept"].append(job["ruleset"])
        while True:
            test = receive(job["texts"])
            if judge and (test["first"] or test["mode"] != "test"):
                clear(job, judge)
                judge = None
            row, given, judge = run_confined(libc, job, test, judge)
            write(report, as_line(row))
            write(report, given)
            row = given = given.release()
            job["buffer"].madvise(mmap.MADV_DONTNEED)  # zeros again
    finally:  # SIGTERM may come in the midst of it, once: the pipe ends a moment before
        try:
            remove(base)
        finally:
            remove(base)
