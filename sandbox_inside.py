"""What sandbox.py runs in the child: the walls, the program, the judge, and the form in which values travel.

The text of this file is a program, which needs Python's standard library alone: sandbox.py starts it once for every
program in an interpreter of its own (here, or in E2B's cloud), with a job on standard input. So: launch() ->
run_confined() for every test -> run_program() in a fork, and beside it, for a test by judge, run_judge() in another.
sandbox.py itself imports wire() and unwire().
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


if __name__ == "__main__":
    launch()
