"""What sandbox.py runs in the child: confinement, the program, the judge, and the wire format of values.

sandbox.py starts an interpreter per program, which executes the text of this file: the standard library alone. For
every test of a job launch() calls run_confined(), which forks run_program() and, for a test by judge, run_judge().
"""

import builtins
import contextlib
import ctypes
import importlib
import json
import operator
import os
import select
import signal
import struct
import sys
import time
import types

with contextlib.suppress(ImportError):
    import resource  # Windows has none; sandbox.py --runner=e2b works there too


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
    pivot_root = DENIED["pivot_root"][MACHINES[os.uname().machine][0]]
    check(libc.syscall(pivot_root, b".", b"."), "pivot_root")
    check(libc.umount2(b".", 2), "umount")
    os.chdir("/")
    flags = struct.pack("4Q", 3, 0, 0, 0)  # MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID
    check(libc.syscall(442, -100, b"/", 0x8000, flags, 32), "mount_setattr")


# ---- Landlock ------------------------------------------------------------------------------------------------------
# What a program may read besides Python itself and its installed libraries. /proc is not among it.
READABLE = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/urandom")


def restrict_files(libc, job, writable):
    """Allow reading and executing below job["readable"], everything below `writable`; no TCP, no signals to others."""
    abi = job["landlock"]
    rights = 0xFFFF if abi >= 5 else 0x7FFF  # all that this kernel knows: what no rule allows is refused
    size = 8 if abi < 4 else 16 if abi < 6 else 24  # files; since 4 also TCP, since 6 abstract sockets and signals
    ruleset = check(libc.syscall(444, struct.pack("3Q", rights, 3, 3)[:size], size, 0), "landlock")
    for path in [*job["readable"], writable]:
        allowed = 6 if path.startswith("/dev/") else 13  # write and read a file; execute, read a file, list a folder
        if path == writable:
            allowed = rights if job["namespaces"] else rights - 128  # no new folders: see overfull()
        if not os.path.isdir(path):
            allowed &= 7  # the rights that a file can have
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        check(libc.syscall(445, ruleset, 1, struct.pack("=Qi", allowed, fd), 0), "landlock rule")
        os.close(fd)
    check(libc.syscall(446, ruleset, 0), "landlock restrict")
    os.close(ruleset)


# ---- seccomp -------------------------------------------------------------------------------------------------------
# System calls that a program is refused, with their numbers on (x86-64, aarch64). Those from 424 on need no name.
# fmt: off
DENIED = {
    "fork": (57, None), "vfork": (58, None), "clone": (56, 220), "execve": (59, 221), "execveat": (322, 281),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "ptrace": (101, 117), "process_vm_readv": (310, 270), "kcmp": (312, 272),
    "process_vm_writev": (311, 271), "prlimit64": (302, 261), "prctl": (157, 167), "setpriority": (141, 140),
    "sched_setaffinity": (203, 122), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274), "ioprio_set": (251, 30), "migrate_pages": (256, 238), "move_pages": (279, 239),
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "memfd_create": (319, 279), "mount": (165, 40),
    "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97), "setns": (308, 268),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "mq_open": (240, 180), "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "chmod": (90, None),
    "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, None), "fchown": (93, 55), "lchown": (94, None),
    "fchownat": (260, 54), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "fremovexattr": (199, 16), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "link": (86, None), "linkat": (265, 37), "mknod": (133, None),
    "mknodat": (259, 33), "inotify_add_watch": (254, 27), "fanotify_init": (300, 262), "fanotify_mark": (301, 263),
    "reboot": (169, 142), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273),
}
# fmt: on
MACHINES = {"x86_64": (0, 0xC000003E, 72, 126), "aarch64": (1, 0xC00000B7, 25, 91)}  # column, audit, fcntl, capset


def call_filter(machine, allowed, threads=False):
    """A seccomp filter, bytes: EPERM for the calls in DENIED but not in `allowed`, and for fcntl that sends signals.

    ENOSYS from 424 on (io_uring, pidfds, clone3, x32 calls and what is to come): the C library falls back to old calls.
    """
    column, audit, fcntl, _ = MACHINES[machine]
    allowed = {*allowed, "clone"} if threads else allowed  # with CLONE_THREAD alone, see below
    denied = [row[column] for name, row in DENIED.items() if row[column] is not None and name not in allowed]
    # A row: operation, rows to skip if true, if false, operand. 0x20 loads, 0x15 is ==, 0x35 >=, 0x45 &, 6 returns.
    clone = [(0x15, 0, 2, DENIED["clone"][column]), (0x20, 0, 0, 16), (0x45, 5, 6, 0x10000)] if threads else []
    n = len(denied) + len(clone)
    rows = [(0x20, 0, 0, 4), (0x15, 1, 0, audit), (6, 0, 0, 0x80000000)]  # calls of another machine: kill
    rows += [(0x20, 0, 0, 0), (0x35, n + 7, 0, 424)]  # the number of the call
    rows += [(0x15, n - i + 5, 0, number) for i, number in enumerate(denied)] + clone
    rows += [(0x15, 0, 4, fcntl), (0x20, 0, 0, 24)]  # its second argument
    rows += [(0x15, 3, 0, 8), (0x15, 2, 0, 10), (0x15, 1, 0, 15)]  # F_SETOWN, F_SETSIG, F_SETOWN_EX
    rows += [(6, 0, 0, 0x7FFF0000), (6, 0, 0, 0x50001), (6, 0, 0, 0x50026)]  # allow, EPERM, ENOSYS
    return b"".join(struct.pack("HBBI", *row) for row in rows)


def confine(libc, job, folder, mode):
    """Give up all rights of this process for good: resource limits, Landlock, capabilities, seccomp."""
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    os.setsid()
    os.chdir(folder)
    os.environ.update(HOME=folder, TMPDIR=folder, PYTHONPATH=":".join(job["packages"]))
    sys.path += job["packages"]
    job["tests"].clear()  # a program does not see the other tests

    limits = {"CPU": int(job["timeout_s"]) + 2, "AS": job["memory_mb"] << 20, "FSIZE": job["disk_mb"] << 20}
    limits |= {"NOFILE": 64, "CORE": 0}
    if not job["threads"]:
        limits["NPROC"] = 0  # no new threads and processes for an ordinary user; seccomp refuses them to root too
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, without which an ordinary user may not install the two below
    if job["landlock"]:
        restrict_files(libc, job, folder)
    machine = os.uname().machine
    if machine in MACHINES:  # no capabilities, so that root is an ordinary user too
        check(libc.syscall(MACHINES[machine][3], struct.pack("Ii", 0x20080522, 0), bytes(24)), "capset")
    if job["seccomp"]:  # the filter judges every call from here on
        # asyncio needs a socketpair, which is harmless where it reaches nothing
        allowed = {"execve"} if mode == "status" else {"socketpair"} if job["namespaces"] else set()
        code = ctypes.create_string_buffer(call_filter(machine, allowed, job["threads"]))
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
BUILTIN = (bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict)


def wire(value, other):
    """The JSON form of a value: exact for builtin types, those in ARGUMENTS and NumPy's.

    other(value, form) gives that of any other object; `form` is that of its builtin value, None if its class has none.
    It is read by the builtin type's own methods, so that a subclass cannot misreport it.
    """
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if value is None or kind is bool:
        return value
    if kind.__module__ == "numpy" and hasattr(value, "dtype"):
        if value.dtype.kind not in "biufcSU":
            raise TypeError(f"values of NumPy's {value.dtype}")
        return {"a": [value.dtype.str, list(value.shape), value.tobytes().decode("latin-1")]}
    if name in ARGUMENTS:
        return {"r": [name, *(wire(argument, other) for argument in ARGUMENTS[name](value))]}
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
        form = {"d": [[wire(key, other), wire(item, other)] for key, item in dict.items(value)]}
    elif base in (bytes, bytearray):
        form = {"b" if base is bytes else "y": b"".join([value]).decode("latin-1")}
    else:
        items = [wire(item, other) for item in base.__iter__(value)]
        form = items if base is list else {{tuple: "t", set: "s", frozenset: "f"}[base]: items}
    return form if kind is base else other(value, form)


def unwire(form, other=None):
    """The value of a JSON form; other(tag, content) resolves those of objects. Raises sandbox.FORGED."""
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
        numpy = importlib.import_module("numpy")
        return numpy.frombuffer(content[2].encode("latin-1"), content[0]).reshape(content[1]).copy()[()]
    if tag == "r" and content[0] in ARGUMENTS:
        module, _, name = content[0].rpartition(".")
        make = VIEWS.get(content[0]) or getattr(importlib.import_module(module), name)
        arguments = [unwire(argument, other) for argument in content[1:]]
        # a short line that would make a large value: a range written out, a fraction such as 1e999999999
        if (name == "Fraction" and str in map(type, arguments)) or range in map(type, arguments):
            raise ValueError(f"no arguments of {content[0]}: {arguments}")
        return make(*arguments)
    return other(tag, content)


def plain(value, form):
    """For wire(): an object of a subclass counts as its builtin value, others are refused."""
    if form is None:
        raise TypeError(f"values of {type(value)}")
    return form


def opaque(value, form):
    """For wire(): an object of a subclass counts as its builtin value, of others it says that there is one."""
    return {"o": 0} if form is None else form


# ---- the judge: a test and a program in two processes, and what each may ask of the other's objects -----------------
UNARY = "len iter next bool str repr int float abs round".split()
BINARY = "eq ne lt le gt ge add sub mul truediv floordiv mod pow matmul and or xor".split()
ITEMS = ["getitem", "setitem", "delitem"]
READING = "len bool str repr int float abs round base".split()  # these change nothing
OPERATIONS = {name: getattr(operator, f"__{name}__") for name in [*BINARY, *ITEMS]}
OPERATIONS |= {name: getattr(builtins, name) for name in UNARY} | {
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
    """An object of the other side: calls, attributes, items and iteration are asked for there.

    Operators are asked for there between two such objects only. With anything else its builtin value counts; without
    one it equals nothing, so an object that claims to equal all never sees what it is compared with.
    """

    def __init__(self, peer, number, has_base):
        vars(self).update(_peer=peer, _number=number, _has_base=has_base, _nothing=object(), _answers={})

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
        return self._peer.ask("get", self, name)

    def __setattr__(self, name, value):
        self._peer.ask("set", self, name, value)

    def __call__(self, /, *args, **options):
        return self._peer.ask("call", self, *args, **options)

    def __instancecheck__(self, value):
        return self._peer.ask("isinstance", value, self)

    def __exit__(self, *raised):
        self._peer.ask("exit", self)  # its answer does not count: it could suppress a failed assertion

    def __hash__(self):
        return hash(self._base)


def forwarded(name):
    """A method of Remote that asks for an operation."""
    return lambda self, *args: self._read(name) if name in READING and not args else self._peer.ask(name, self, *args)


def between(name):
    """A binary operator of Remote, and the same with its operands exchanged."""

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
    """One end of the pipes between a test and a program: asks the other end, and meanwhile answers its questions.

    A message is a line of JSON: ["ask", operation, arguments, options], ["got", value, changed arguments] or
    ["raised", class names, text]. Data is copied; any other object travels as the number that its own side gave it.
    permits(operation, target, ...) is set at the judge's end: the program may ask about objects that it was given, and
    no others, and name types but no functions, or it could name exec.
    """

    def __init__(self, read, write, permits=None):
        self.lines = open(read, "rb")
        self.pipe = open(write, "wb")
        self.permits = permits
        self.held, self.numbers = [], {}  # our objects that the other end knows, and their numbers by id
        self.remotes, self.errors = {}, {}  # its objects by number, its exception classes by name
        self.changes = 0  # how often the other end was asked for what may change its objects

    def refer(self, value, form):
        """The form of an object that stays here, or that the other end has too."""
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
        tag = "coroutine" if isinstance(value, types.CoroutineType) else "yours"
        return {tag: [self.numbers[id(value)], form is not None]}

    def resolve(self, tag, content):
        """The object of a form that refer() made at the other end."""
        if tag == "mine":
            return self.held[content]
        if tag == "error":
            return self.error(content)
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

    def error(self, names):
        """An exception class like that of the other end: the builtin one, or one derived from it."""
        if names[0] not in self.errors:
            base = next(getattr(builtins, name) for name in names if hasattr(builtins, name))
            if not issubclass(base, BaseException):
                raise TypeError(f"{names} are no exceptions")
            # never the class of a failed assertion: a test that expects the program's class would hide its own failure
            is_base = names[0] == base.__name__ and not (self.permits and issubclass(AssertionError, base))
            self.errors[names[0]] = base if is_base else type(names[0], (base,), {})
        return self.errors[names[0]]

    def send(self, text):
        self.pipe.write(text.encode() + b"\n")
        self.pipe.flush()

    def receive(self):
        line = self.lines.readline()
        if not line.endswith(b"\n"):
            os._exit(1)  # the other end is gone
        return json.loads(line)

    def ask(self, operation, /, *args, **options):
        """The result of an operation at the other end, or the exception that it raises there."""
        wired = {key: wire(value, self.refer) for key, value in options.items()}
        if operation not in READING:
            self.changes += 1
        self.send(json.dumps(["ask", operation, [wire(arg, self.refer) for arg in args], wired]))
        while True:
            kind, *content = self.receive()
            if kind == "got":
                break
            if kind == "raised":
                error = self.error(content[0])
                # in a map or a generator of the test it would end the loop, and the test with it
                raise (RuntimeError if issubclass(error, StopIteration) and operation != "next" else error)(content[1])
            self.answer(*content)
        for i, form in content[1]:  # lists and the like that the other end has changed
            new = unwire(form, self.resolve)
            if isinstance(args[i], list | bytearray):
                args[i][:] = new
            else:
                args[i].clear()
                args[i].update(new)
        return unwire(content[0], self.resolve)

    def answer(self, operation, forms, options):
        """Do what the other end asks for, and send the result or the exception."""
        try:
            args = [unwire(form, self.resolve) for form in forms]
            options = {key: unwire(form, self.resolve) for key, form in options.items()}
            if self.permits and not (forms[0].keys() == {"mine"} and self.permits(operation, *args)):
                raise PermissionError(operation)
            value = OPERATIONS[operation](*args, **options)
            mutable = [i for i, arg in enumerate(args) if type(arg) in (list, bytearray, set, dict)]
            now = {i: wire(args[i], self.refer) for i in mutable}
            reply = json.dumps(["got", wire(value, self.refer), [[i, now[i]] for i in mutable if now[i] != forms[i]]])
        except BaseException as error:
            reply = json.dumps(["raised", [each.__name__ for each in type(error).__mro__], str(error)])
        self.send(reply)


def run_program(libc, job, test, folder, read, pipe):
    """Confine this process, run the program, and do what the mode of the test says. Never returns.

    Writes "+" when it is confined, "=" when the program has run; then the token and the value, messages to a judge, a
    line per call, or what the program prints (mode stdin); or "memory".
    """
    # before the program can replace them
    write, leave, dumps, exact, clock = os.write, os._exit, json.dumps, wire, time.process_time
    confine(libc, job, folder, test["mode"])
    write(pipe, b"+")
    if test["mode"] == "status":  # the exit status of another Python is the verdict
        write(pipe, b"=")
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
            OPERATIONS["names"] = lambda *names: {n: main.__dict__[n] for n in names if n in main.__dict__}
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
    """Run a program as Python does, with a file as standard input and the pipe as standard output: the exit status."""
    os.write(pipe, b"=")
    with open("input", "w+b") as file:
        file.write(text.encode("utf-8", "replace"))
        file.seek(0)
        os.dup2(file.fileno(), 0)
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


# Modules by which tests compare, under their usual names: a program's own object of that name does not count.
COMPARING = {name: name for name in ("math", "cmath", "numpy", "pytest", "unittest")} | {"np": "numpy"}


def permits(operation, target, *rest):
    """What a program may do with a test's objects: call and iterate, and read or set attributes of its own classes."""
    if operation in ("get", "set", "getitem", "setitem", "len", "bool", "str", "repr"):
        private = rest and isinstance(rest[0], str) and rest[0].startswith("_")
        return type(target).__module__ == "__main__" and not private
    return operation in ("call", "iter", "next")


def names_of(code):
    """The names that compiled code uses, and code within it."""
    return {*code.co_names}.union(*(names_of(item) for item in code.co_consts if isinstance(item, types.CodeType)))


def run_judge(i, libc, job, test, folder, read, ask, pipe):
    """Confine this process, run the test, with the program's process for its calls. Writes the token if it passes."""
    # Only this process reads the text of the test. Before it in standard input are those of tests that had no time.
    number = None
    while number != i:
        number, text = receive(job["secrets"])
    os.write(pipe, b"r")
    confine(libc, job, folder, test["mode"])
    os.write(pipe, begun := os.read(read, 1))
    if begun != b"+":  # the program's process could not be confined, and has said why
        os.write(pipe, os.read(read, 4096))
        return
    os.write(pipe, loaded := os.read(read, 1))
    if loaded == b"m":
        os.write(pipe, b"emory")
    if loaded != b"=":
        return
    peer = Peer(read, ask, permits)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        code = compile(text, "<test>", "exec")
        used = sorted(names_of(code))
        own = [name for name in used if not hasattr(builtins, name)]
        # A builtin's name is the program's only if nothing else is: a problem may ask for sum(). Exceptions and
        # __name__, not in lower case or not letters alone, are never the program's.
        builtin = [name for name in used if hasattr(builtins, name) and name.isalpha() and name.islower()]
        for names in (own, builtin):
            offered = peer.ask("names", *names)
            for name in [name for name in names if name in offered]:  # whatever else it offers
                # a module that only the program imports is replaced by ours of that name
                module = COMPARING.get(name) or (isinstance(offered[name], types.ModuleType) and name)
                setattr(main, name, importlib.import_module(module) if module else offered[name])
            if offered:
                break
        exec(code, main.__dict__)
        os.write(pipe, test["token"].encode())
    except MemoryError:
        os.write(pipe, b"memory")
    except BaseException:
        return  # the test does not pass


# ---- the launcher: one confined process, or two, for each test ------------------------------------------------------
def receive(fd):
    """The next message from a pipe: 16 hexadecimal digits of its size, and JSON. Nothing after it is read."""

    def read(size):
        text = b""
        while len(text) < size:
            text += os.read(fd, size - len(text)) or sys.exit("no job")
        return text

    return json.loads(read(int(read(16), 16)))


def overfull(folder, megabytes):
    """Whether a folder, which holds no folders, holds more than `megabytes` or more than 2,000 files."""
    sizes = []
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            sizes.append(entry.stat(follow_symlinks=False).st_blocks * 512)
    return len(sizes) > 2000 or sum(sizes) > megabytes << 20


def follow_test(job, test, pids, pipe, folder, end):
    """Read what the first of the processes writes until it exits: ("done", "timeout" or "output limit", bytes)."""
    data, closed, next_look = bytearray(), False, 0.0
    deadline = min(time.monotonic() + 3 * job["timeout_s"], end)
    limits = [*test.get("limits", []), job["timeout_s"]]  # processor seconds of every call; other tests are one call
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
            time.sleep(0.0005)
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
            os.dup2(1, 2)
            function(*args)
        except BaseException as error:  # nothing may continue in this process
            os.write(files[-1], repr(error).encode())
        finally:
            os._exit(1)
    return pid


def run_confined(libc, job, i, end):
    """Run test i in a folder and a process of its own, of which nothing is left: the test's line of the report."""
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
        # The judge asks, the program answers. The program and the clock start when the judge has read its text.
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
    """Read a job from standard input, close what no test needs, run the tests one by one, report a line for each."""
    libc = ctypes.CDLL(None, use_errno=True)
    job = receive(0)
    job["secrets"] = os.dup(0)  # the texts of tests by judge follow; the program's process never has them
    # The report goes to a copy of standard output that no test inherits; what programs print goes nowhere.
    report, null = open(os.dup(1), "w"), os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    signal.signal(signal.SIGTERM, orphaned)
    libc.prctl(1, signal.SIGTERM if job["folder"] else signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG; SIGTERM: clean up
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when memory runs out, the kernel kills this process before the trainer

    # Ask the kernel what it offers. Namespaces were tried before, by layers(), in a launcher without tests.
    landlock = libc.syscall(444, None, 0, 1)
    job["landlock"] = landlock if landlock >= 3 else 0  # older versions let files be truncated
    refused = libc.prctl(22, 2, None, 0, 0) == -1 and ctypes.get_errno()
    job["seccomp"] = os.uname().machine in MACHINES and refused == 14  # EFAULT: known, only there was no filter
    job["readable"] = [path for path in (sys.base_prefix, *job["packages"], *READABLE) if os.path.exists(path)]
    if job["namespaces"]:
        enter_namespaces(libc, "/proc", job["readable"])  # mounts its root there, where nothing readable lies
    libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: no core; no other process may trace this one or its forks
    print(json.dumps({layer: job[layer] for layer in ("namespaces", "landlock", "seccomp")}), file=report, flush=True)
    if not job["allow_unsafe"] and not (job["seccomp"] and (job["namespaces"] or job["landlock"])):
        sys.exit("less than the safe minimum")

    # One test after another, until their time is over or the program does not finish loading.
    end, hangs = time.monotonic() + job["program_s"], False
    try:
        if job["folder"]:
            os.mkdir(job["folder"], 0o700)
        for i, test in enumerate(job["tests"]):
            row = {"outcome": "timeout", "cpu_s": 0.0}
            if time.monotonic() < end and not hangs:
                row = run_confined(libc, job, i, end)
                hangs = row["outcome"] == "timeout" and (test["mode"] == "stdin" or not row["loaded"])
            print(json.dumps(row), file=report, flush=True)
    finally:
        if job["folder"]:
            importlib.import_module("shutil").rmtree(job["folder"], ignore_errors=True)


if __name__ == "__main__":
    launch()
