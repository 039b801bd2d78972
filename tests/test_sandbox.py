"""The sandbox: every known attack, verdicts, failures of its own, Ctrl-C, E2B without a network,
and the rewards.
"""

import contextlib
import ctypes
import http.server
import itertools
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
import types
from pathlib import Path

import pytest
from conftest import run

import sandbox
from jail import inside, wire

FILES = {"sandbox.py", "jail"}
ROOT = Path(__file__).resolve().parent.parent
VALUE = ["assert f(1) == 2", "assert f(5) == 6"]
BY_LOOP = ["for y in [2]:\n    assert f(1) == y", "for y in [6]:\n    assert f(5) == y"]
FAIL, TIMEOUT, MEMORY, OUTPUT, PASS = (
    [outcome] * 2 for outcome in ("fail", "timeout", "memory", "output limit", "pass")
)
GOOD = "def f(x):\n    return x + 1\n"

# name: program, its verdicts for f(1) == 2 and f(5) == 6. VICTIM is a folder outside, PORT a
# listening port, SOCKET an abstract address, TRAINER the process id of whoever runs the tests.
# Names begin with the number of a kind of attack. An attack that is swallowed (try, except) before
# a right answer passes: there the damage is what is looked at.
ATTACKS = {
    "1 fork bomb": ("import os\nwhile True:\n    os.fork()", FAIL),
    "1 fork bomb that goes on": (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass", TIMEOUT),
    "1 subprocess": ("import subprocess\nsubprocess.run(['true'])\n" + GOOD, FAIL),
    "1 multiprocessing": ("import multiprocessing\nmultiprocessing.Process(target=print).start()\n" + GOOD, FAIL),
    "1 system": ("import os\nassert os.system('true') == 0\n" + GOOD, FAIL),
    "1 clone by number": (
        "import ctypes\nfor call in (56, 57, 58, 435, 220):\n    ctypes.CDLL(None).syscall(call, 17, 0, 0, 0, 0)\n"
        "import time\ntime.sleep(0.1)\n" + GOOD, PASS),
    "2 threads": ("import threading\nwhile True:\n    threading.Thread(target=input).start()\n" + GOOD, FAIL),
    "3 eight gigabytes": ("x = bytearray(8 << 30)\n" + GOOD, MEMORY),
    "3 anonymous map": ("import mmap\nx = mmap.mmap(-1, 8 << 30)\n" + GOOD, FAIL),
    "4 growing list": ("x = []\nwhile True:\n    x.append(bytes(10_000_000))", MEMORY),
    "5 endless output": ("while True:\n    print('x' * 1000)", TIMEOUT),
    "5 much output": ("print('x' * 10_000_000)\n" + GOOD, PASS),
    "6 endless loop at import": ("while True:\n    pass", TIMEOUT),
    "6 endless loop in one call": ("def f(x):\n    while x == 1:\n        pass\n    return x + 1", ["timeout", "pass"]),
    "6 endless regular expression": ("import re\nre.match('(a+)+b', 'a' * 40)\n" + GOOD, TIMEOUT),
    "7 signals ignored": (
        "import signal, time\nfor s in (signal.SIGTERM, signal.SIGXCPU, signal.SIGALRM):\n"
        "    signal.signal(s, signal.SIG_IGN)\ntime.sleep(1000)", TIMEOUT),
    "8 file in /tmp": ("open('/tmp/unmask-attack', 'w')\n" + GOOD, FAIL),
    "8 file at home": ("import os\nopen(os.path.expanduser('~root/unmask-attack'), 'w')\n" + GOOD, FAIL),
    "8 file in /etc": ("open('/etc/unmask-attack', 'w')\n" + GOOD, FAIL),
    "8 file in the interpreter": ("import os\nopen(os.__file__, 'a')\n" + GOOD, FAIL),
    "8 file in the victim": ("open('VICTIM/new', 'w')\n" + GOOD, FAIL),
    "8 folder in the victim": ("import os\nos.mkdir('VICTIM/new')\n" + GOOD, FAIL),
    "9 rmtree": ("import shutil\nshutil.rmtree('VICTIM', ignore_errors=True)\n" + GOOD, PASS),
    "9 unlink": ("import os\nos.unlink('VICTIM/secret.txt')\n" + GOOD, FAIL),
    "9 rename": ("import os\nos.rename('VICTIM/secret.txt', 'here')\n" + GOOD, FAIL),
    "9 hard link": ("import os\nos.link('VICTIM/secret.txt', 'here')\n" + GOOD, FAIL),
    "9 truncate": ("import os\nos.truncate('VICTIM/secret.txt', 0)\n" + GOOD, FAIL),
    "9 open to truncate": ("import os\nos.open('VICTIM/secret.txt', os.O_RDONLY | os.O_TRUNC)\n" + GOOD, FAIL),
    "9 mode": ("import os\nos.chmod('VICTIM/secret.txt', 0)\n" + GOOD, FAIL),
    "9 mode of a folder": ("import os\nos.chmod('VICTIM', 0o777)\n" + GOOD, FAIL),
    "9 owner": ("import os\nos.chown('VICTIM/secret.txt', 1000, 1000)\n" + GOOD, FAIL),
    "9 times": ("import os\nos.utime('VICTIM/secret.txt', (0, 0))\n" + GOOD, FAIL),
    "9 attribute": ("import os\nos.setxattr('VICTIM/secret.txt', 'user.x', b'1')\n" + GOOD, FAIL),
    "10 secret file": ("text = open('VICTIM/secret.txt').read()\n" + GOOD, FAIL),
    "10 list of files": ("import os\nos.listdir('VICTIM')\n" + GOOD, FAIL),
    "10 netrc": ("text = open('/root/.netrc').read()\n" + GOOD, FAIL),
    "10 password file": ("text = open('/etc/passwd').read()\n" + GOOD, FAIL),
    "11 environment": ("import os\nkey = os.environ['UNMASK_KEY']\n" + GOOD, FAIL),
    "11 environment of the trainer": ("key = open('/proc/TRAINER/environ', 'rb').read()\n" + GOOD, FAIL),
    "11 environment of the parent": ("import os\nopen(f'/proc/{os.getppid()}/environ', 'rb').read()\n" + GOOD, FAIL),
    "11 memory of the parent": ("import os\nopen(f'/proc/{os.getppid()}/mem', 'rb')\n" + GOOD, FAIL),
    "12 tcp": ("import socket\nsocket.create_connection(('127.0.0.1', PORT))\n" + GOOD, FAIL),
    "12 tcp outside": ("import socket\nsocket.create_connection(('1.1.1.1', 53), 1)\n" + GOOD, FAIL),
    "12 udp": (
        "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))\n" + GOOD,
        FAIL),
    "12 abstract socket": ("import socket\nsocket.socket(socket.AF_UNIX).connect('\\0SOCKET')\n" + GOOD, FAIL),
    "12 socket by path": ("import socket\nsocket.socket(socket.AF_UNIX).connect('VICTIM/socket')\n" + GOOD, FAIL),
    "12 datagram from a socketpair": (
        "import socket\na, b = socket.socketpair(type=socket.SOCK_DGRAM)\na.sendto(b'x', '\\0SOCKET')\n" + GOOD, FAIL),
    "12 listening": ("import socket\nsocket.create_server(('127.0.0.1', 0))\n" + GOOD, FAIL),
    "12 netlink": ("import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)\n" + GOOD, FAIL),
    "13 kill the parent": ("import os\nos.kill(os.getppid(), 9)\n" + GOOD, FAIL),
    "13 kill the trainer": ("import os\nos.kill(TRAINER, 9)\n" + GOOD, FAIL),
    "13 kill everything": ("import os\nos.kill(-1, 9)\n" + GOOD, FAIL),
    "13 kill the group": ("import os\nos.killpg(0, 9)\n" + GOOD, FAIL),
    "13 kill by thread": (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\nfor pid in (os.getppid(), TRAINER):\n"
        "    for call in (200, 130):\n        libc.syscall(call, pid, 9)\n"
        "    for call in (234, 131):\n        libc.syscall(call, pid, pid, 9)\n" + GOOD, PASS),
    "13 kill by file owner": (
        "import fcntl, os\nread, write = os.pipe()\n"
        "fcntl.fcntl(read, fcntl.F_SETOWN, TRAINER)\nfcntl.fcntl(read, 10, 9)\n" + GOOD, FAIL),
    "13 limits of the trainer": ("import resource\nresource.prlimit(TRAINER, resource.RLIMIT_AS, (1, 1))\n", FAIL),
    "13 priority of the trainer": ("import os\nos.setpriority(os.PRIO_PROCESS, TRAINER, 19)\n" + GOOD, FAIL),
    "13 processors of the trainer": ("import os\nos.sched_setaffinity(TRAINER, {0})\n" + GOOD, FAIL),
    "14 _exit at the end": ("import os\ndef f(x): pass\nos._exit(0)", FAIL),
    "14 _exit in the call": ("import os\ndef f(x): os._exit(0)", FAIL),
    "14 exit at the end": ("import sys\ndef f(x): pass\nsys.exit(0)", FAIL),
    "14 exit in the call": ("import sys\ndef f(x): sys.exit(0)", FAIL),
    "14 quit": ("def f(x): pass\nquit()", FAIL),
    "14 SystemExit": ("def f(x): raise SystemExit(0)", FAIL),
    "15 atexit": ("import atexit, os\natexit.register(os._exit, 0)\ndef f(x): pass", FAIL),
    "15 excepthook": ("import os, sys\nsys.excepthook = lambda *a: os._exit(0)\ndef f(x): pass", FAIL),
    "15 alarm": ("import os, signal\nsignal.signal(signal.SIGALRM, lambda *a: os._exit(0))\nsignal.setitimer("
                 "signal.ITIMER_REAL, 0.1)\ndef f(x):\n    while True: pass", FAIL),
    "15 thread": ("import os, threading\nthreading.Timer(0.1, os._exit, [0]).start()\ndef f(x):\n    while True: pass",
                  FAIL),
    "15 finalizer": ("import os\nclass A:\n    def __del__(self): os._exit(0)\ndef f(x): A()", FAIL),
    "16 execv": ("import os\nos.execv('/bin/true', ['true'])", FAIL),
    "16 execv in the call": ("import os\ndef f(x): os.execv('/bin/true', ['true'])", FAIL),
    "16 Python without assertions": (
        "import os, sys\ndef f(x): os.execv(sys.executable, [sys.executable, '-O', '-c', 'assert False'])", FAIL),
    "17 print a rate": ("print('__PASS_RATE__ 1.0')\ndef f(x): pass", FAIL),
    "17 write a rate to the parent": (
        "import os\nopen(f'/proc/{os.getppid()}/fd/1', 'w').write('__PASS_RATE__ 1.0')\ndef f(x): pass", FAIL),
    "17 write a report to every file": (
        "import os\ndef f(x):\n    for fd in range(3, 64):\n        try:\n"
        "            os.write(fd, b'{\"outcome\": \"done\", \"data\": \"\", \"status\": 0}\\n')\n"
        "        except OSError:\n            pass", FAIL),
    "17 write a guess to every file": (
        "import os\ndef f(x):\n    for fd in range(64):\n        try:\n"
        "            os.write(fd, b'=' + b'0' * 32 + b'{\"i\": \"2\"}')\n"
        "        except OSError:\n            pass\n    os._exit(0)", FAIL),
    "18 equal to anything": ("class A:\n    def __eq__(self, other): return True\ndef f(x): return A()", FAIL),
    "18 integer equal to anything": (
        "class A(int):\n    def __eq__(self, other): return True\n    __hash__ = None\ndef f(x): return A(0)", FAIL),
    "18 string that prints as a number": (
        "class A(str):\n    def __repr__(self): return '2'\n    def __eq__(self, other): return True\n"
        "def f(x): return A('z')", FAIL),
    "18 list of such": ("class A:\n    def __eq__(self, other): return True\ndef f(x): return [A()]", FAIL),
    "18 class that says it is int": (
        "class A:\n    __class__ = int\n    def __eq__(self, other): return True\n    def __repr__(self): return '2'\n"
        "def f(x): return A()", FAIL),
    "18 evil tolist": ("class A:\n    def tolist(self): return self\n    def __eq__(self, other): return True\n"
                       "def f(x): return A()", FAIL),
    "19 builtins": (
        "import builtins\nbuiltins.AssertionError = None\nbuiltins.repr = builtins.print = lambda *a: '2'\n"
        "builtins.isinstance = lambda *a: True\ndef f(x): pass", FAIL),
    "19 json": ("import json\njson.dumps = lambda *a, **k: '{\"i\": \"2\"}'\ndef f(x): return object()", FAIL),
    "19 modules": ("import sys\nsys.modules.clear()\ndef f(x): pass", FAIL),
    "19 os.write": ("import os\nos.write = lambda fd, data: None\n" + GOOD, PASS),
    "20 frames": (
        "import os, sys\nVERDICT = b'[\"pass\", null]'\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
        "        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:\n"
        "            if isinstance(value, dict) and 'token' in value:\n                for fd in range(3, 64):\n"
        "                    try:\n                        os.write(fd, value['token'].encode() + VERDICT)\n"
        "                    except OSError:\n                        pass\n        frame = frame.f_back", FAIL),
    "20 expected value in memory": (
        "import gc\ndicts = [held for held in gc.get_objects() if isinstance(held, dict)]\n"
        "texts = [text for d in dicts for text in d.values() if isinstance(text, str)]\n"
        "found = any('=' + '= 2' in text for text in texts)\ndef f(x): return x + 1 if found else None", FAIL),
    "21 recursion": ("def f(x): return f(x)", FAIL),
    "21 recursion in C": (
        "import sys\nsys.setrecursionlimit(10**9)\nx = ()\nfor _ in range(200_000): x = (x,)\nhash(x)\n", FAIL),
    "21 segmentation fault": ("import ctypes\nctypes.string_at(0)", FAIL),
    "21 abort": ("import os\nos.abort()", FAIL),
    "22 daemon": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(3)\n"
        "        open('VICTIM/late', 'w')\n    os._exit(0)\n" + GOOD, FAIL),
    "23 link out of the folder": (
        "import os\nos.symlink('VICTIM', 'l')\ntry:\n    open('l/x', 'w')\nexcept OSError:\n    pass\n" + GOOD, PASS),
    "24 many files": ("for i in range(100000):\n    open(str(i), 'w').write('x' * 1000000)", FAIL),
    "24 one large file": (
        "with open('x', 'wb') as file:\n    for _ in range(100000):\n        file.write(bytes(1000000))", FAIL),
    "24 deep folders": ("import os\nfor i in range(3000):\n    os.mkdir('d')\n    os.chdir('d')\n" + GOOD, None),
    "24 unreadable folder": ("import os\nos.makedirs('a/b')\nos.umask(0o777)\nos.mkdir('a/b/c')\n" + GOOD, PASS),
    "25 large value": ("def f(x): return ' ' * (256 << 20)", MEMORY),
    "25 rather large value": ("def f(x): return ' ' * (4 << 20)", FAIL),
    "25 large number": ("def f(x): return 1 << 10**7", FAIL),
    "25 many items": ("def f(x): return [0] * 30_000", FAIL),
    "25 deep list": ("x = []\nfor _ in range(10**5): x = [x]\ndef f(_): return x", FAIL),
    "25 list in itself": ("x = []\nx.append(x)\ndef f(_): return x", FAIL),
    "25 endless pipe": (
        "import os\nwhile True:\n    for fd in range(3, 64):\n        try:\n            os.write(fd, b'x' * 60000)\n"
        "        except OSError:\n            pass", FAIL),
    "26 namespaces": (
        "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0\n" + GOOD, FAIL),
    "26 mount": ("import ctypes\nassert ctypes.CDLL(None).mount(b'x', b'/', b'tmpfs', 0, None) == 0\n" + GOOD, FAIL),
    "26 unmount": ("import ctypes\nassert ctypes.CDLL(None).umount2(b'/usr', 2) == 0\n" + GOOD, FAIL),
    "26 chroot": ("import os\nos.chroot('.')\n" + GOOD, FAIL),
    "26 ptrace": ("import ctypes, os\nassert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0\n" + GOOD, FAIL),
    "26 memfd": ("import os\nos.memfd_create('x')\n" + GOOD, FAIL),
    "26 io_uring": ("import ctypes\nassert ctypes.CDLL(None).syscall(425, 8, bytes(120)) >= 0\n" + GOOD, FAIL),
    "26 x32": ("import ctypes\nassert ctypes.CDLL(None).syscall(0x40000000 + 39) > 0\n" + GOOD, FAIL),
    "26 device": ("import os\nos.mknod('disk', 0o60600, os.makedev(8, 0))\n" + GOOD, FAIL),
    "26 shared memory": ("import ctypes\nassert ctypes.CDLL(None).shmget(4711, 4096, 0o1600) >= 0\n" + GOOD, FAIL),
    "26 setuid": ("import os\nos.setuid(1234)\n" + GOOD, FAIL),
    "27 stops itself": ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n" + GOOD, FAIL),
    "27 stopped by a limit": ("import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\n"
                              "time.sleep(100)", TIMEOUT),
    "28 input": ("x = input()\n" + GOOD, FAIL),
    "29 no byte": ("x = 1\0\n" + GOOD, FAIL),
    "29 deep nesting": ("x = " + "-" * 20000 + "1\n" + GOOD, None),
    "29 surrogate": ("x = '\ud800'\n" + GOOD, FAIL),
    "29 no text": ("", FAIL),
}  # fmt: skip


NO_NAMESPACES = {  # one socket, one folder and a watch over what is written
    "24 many files": OUTPUT,
    "12 datagram from a socketpair": FAIL,
    "24 deep folders": FAIL,
    "24 unreadable folder": FAIL,
}
# Kinds of attacks that the layers stop: processes, files, network, signals, the kernel. The others
# need none of them.
KINDS = "1 2 8 9 10 11 12 13 22 23 24 26 27".split()
WALLS = [name for name in ATTACKS if name.split()[0] in KINDS]


def children(pid="self"):
    """Process ids of the children of a process; this one adopts orphans (see `closed`)."""
    found = set()
    for task in Path(f"/proc/{pid}/task").glob("*"):
        # a thread that has just ended
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found |= {*map(int, (task / "children").read_text().split())}
    return found


def descendants(pid):
    """Process ids of the children of a process, of theirs, and so on."""
    found = children(pid)
    return found.union(*map(descendants, found))


def wait_for(condition, seconds=60):
    """Return as soon as a condition holds; fails if it does not in that time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def gone(pids):
    """Whether processes have ended, or do within a second. Reaps them."""
    for pid in pids:
        deadline = time.monotonic() + 1
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
    return True


@pytest.fixture(scope="session")
def layers():
    """Without these, the attacks below are not for this machine."""
    try:
        found = sandbox.layers()
    except sandbox.SandboxError as error:
        pytest.fail(f"no sandbox: {error}")
    if not (found["seccomp"] and (found["namespaces"] or found["landlock"])):
        pytest.skip(
            "this machine cannot confine a program: no seccomp, or neither namespaces nor Landlock"
        )
    program = "import os\ntry:\n    os.fork()\nexcept OSError:\n    refused = True"
    (result,) = sandbox.run_tests([program], [["assert refused"]])
    assert result.rate == 1, "seccomp refuses no fork: no fork bombs here"
    return found


@pytest.fixture
def closed(layers, tmp_path, monkeypatch):
    """A victim outside the sandbox; afterwards it is as it was, and no process, file or connection
    is left.

    fill(program) puts its addresses into an attack.
    """
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become our children
    victim, scratch = tmp_path / "victim", tmp_path / "scratch"
    victim.mkdir()
    scratch.mkdir()
    (victim / "secret.txt").write_text("the secret")
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    monkeypatch.setenv("UNMASK_KEY", "the key")
    tcp, udp = (
        socket.create_server(("127.0.0.1", 0)),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    )
    udp.bind(("127.0.0.1", tcp.getsockname()[1]))
    abstract, stream = (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM),
        socket.socket(socket.AF_UNIX),
    )
    name = f"unmask-{os.getpid()}-{tcp.getsockname()[1]}"
    abstract.bind("\0" + name)
    stream.bind(str(victim / "socket"))
    stream.listen()
    addresses = {
        "VICTIM": str(victim),
        "PORT": str(tcp.getsockname()[1]),
        "SOCKET": name,
        "TRAINER": str(os.getpid()),
    }

    def state():
        paths = [victim, *sorted(victim.rglob("*"))]
        return [
            (p, *p.lstat()[:7], p.lstat().st_mtime, p.read_text() if p.is_file() else "")
            for p in paths
        ]

    def fill(program):
        for placeholder, address in addresses.items():
            program = program.replace(placeholder, address)
        return program

    before, ours = state(), children()
    priority, processors = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0)
    yield fill
    assert state() == before
    assert gone(children() - ours)
    assert not list(scratch.iterdir())
    assert (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0)) == (priority, processors)
    for path in ("/tmp/unmask-attack", "/etc/unmask-attack", "/root/unmask-attack"):
        try:
            assert not os.path.exists(path)
        except PermissionError:
            continue
    for listening in (tcp, udp, abstract, stream):
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            listening.recv(1) if listening.type == socket.SOCK_DGRAM else listening.accept()
        listening.close()


@pytest.mark.parametrize("name", ATTACKS)
def test_attack(name, closed, layers):
    program, verdicts = ATTACKS[name]
    verdicts = verdicts if layers["namespaces"] else NO_NAMESPACES.get(name, verdicts)
    started = time.perf_counter()
    (result,) = sandbox.run_tests([closed(program)], [VALUE], timeout_s=0.5, memory_mb=256)
    assert time.perf_counter() - started < 6  # two tests of half a second, start-up, a busy machine
    # that is little on a busy machine: once more with ten seconds
    if verdicts and result.verdicts != verdicts:
        (result,) = sandbox.run_tests([closed(program)], [VALUE], timeout_s=10, memory_mb=256)
    assert verdicts is None or result.verdicts == verdicts, result
    assert result.rate is not None, result


@pytest.mark.parametrize(
    "mode",
    [
        "no namespaces",
        pytest.param("no namespaces, all attacks", marks=pytest.mark.slow),
        pytest.param("no Landlock", marks=pytest.mark.slow),
        "judge",
    ],
)
def test_attacks(mode, closed, layers, monkeypatch):
    names, tests, differ = [*ATTACKS], VALUE, {}
    if mode.startswith("no namespaces"):
        if not layers["landlock"]:
            pytest.skip("this machine has no Landlock")
        names = WALLS if mode == "no namespaces" else names
        monkeypatch.setattr(sandbox, "layers", lambda: layers | {"namespaces": False})
        differ = NO_NAMESPACES
    elif mode == "no Landlock":
        if not layers["namespaces"]:
            pytest.skip("this machine allows no namespaces")
        monkeypatch.setattr(sandbox, "JAIL", changed({"landlock >= 3": "landlock >= 99"}))
    else:
        names = [
            name for name in ATTACKS if name[:2] in ("14", "15", "16", "17", "18", "19", "20", "25")
        ]
        tests = BY_LOOP
    expected = {name: differ.get(name, ATTACKS[name][1]) for name in names}
    # half a second is little on a busy machine: what came out wrong runs once more
    for timeout_s in (0.5, 10):
        programs = [closed(ATTACKS[name][0]) for name in names]
        results = sandbox.run_tests(
            programs, [tests] * len(programs), timeout_s=timeout_s, memory_mb=256, workers=2
        )
        got = {
            name: result.verdicts or result.error
            for name, result in zip(names, results, strict=True)
        }
        names = [name for name, outcome in got.items() if outcome != (expected[name] or outcome)]
    assert not names, {name: got[name] for name in names}
    assert None not in [result.rate for result in results]


ORDINARY = """
import json, os, sys
import sandbox
attacks, modes = json.load(sys.stdin)
found = sandbox.layers()
if not (found["seccomp"] and found["landlock"]):
    sys.exit(77)
for namespaces in sorted({found["namespaces"] and mode for mode in modes}):
    sandbox.layers = lambda: found | {"namespaces": namespaces}
    results = sandbox.run_tests([a[0] for a in attacks], [a[1] for a in attacks], timeout_s=1, memory_mb=256, workers=2)
    print(json.dumps([os.getuid(), results]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as an ordinary user already")
@pytest.mark.parametrize("everything", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_attacks_as_an_ordinary_user_where_the_tests_run_as_root(closed, everything):
    """As user 65534, by an interpreter that it can read; hangs and memory are left to the tests
    above.

    Not everything: the attacks that the layers stop, where there are no namespaces. Everything:
    all, and forgeries.
    """
    python = next(
        (
            p
            for p in (os.path.realpath(sys.executable), "/usr/bin/python3")
            if not p.startswith("/root")
        ),
        "",
    )
    if not os.path.exists(python) or not shutil.which("setpriv"):
        pytest.skip("no interpreter that another user can read, or no setpriv")
    names = [
        n
        for n, (_, verdicts) in ATTACKS.items()
        if verdicts in (FAIL, PASS) and n[:2] not in ("24", "25", "21")
    ]
    names = names if everything else [name for name in names if name in WALLS]
    forgeries, modes = (FORGERIES, [True, False]) if everything else ({}, [False])
    job = [(closed(ATTACKS[name][0]), VALUE) for name in names] + [
        (text, JUDGED[:5]) for text in forgeries.values()
    ]
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o777)
        for name in FILES:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, Path(folder) / name)
        command = [
            "setpriv",
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
            python,
            "-B",
            "-c",
            ORDINARY,
        ]
        env = {"PATH": os.environ["PATH"], "TMPDIR": folder}
        done = subprocess.run(
            command,
            input=json.dumps([job, modes]),
            capture_output=True,
            text=True,
            cwd=folder,
            env=env,
        )
        left = {path.name for path in Path(folder).iterdir()}
    if done.returncode in (77, 127):
        pytest.skip("no Landlock, or no right to become another user")
    assert done.returncode == 0, done.stderr
    assert left == FILES
    lines = done.stdout.splitlines()
    assert lines
    for line in lines:
        uid, results = json.loads(line)
        assert uid == 65534
        differ = NO_NAMESPACES if line != lines[-1] or len(lines) == 1 else {}
        wrong = {
            n: r
            for n, r in zip(names, results, strict=False)
            if r[1] != differ.get(n, ATTACKS[n][1])
        }
        assert not wrong, wrong
        forged = dict(zip(forgeries, (result[1] for result in results[len(names) :]), strict=True))
        assert forged == dict.fromkeys(forgeries, ["fail"] * 5)


# ---- forged passes: programs that do not compute f, and mean to pass all the same ----------------------------------

JUDGED = [  # tests that are no plain comparison with a literal; GOOD passes them all
    "for y in [2]:\n    assert f(1) == y",
    "x = f(1)\nassert x == 2",
    "assert (f(1) == 2) == True",
    "assert f(1).__eq__(2) == True",
    "assert abs(f(0.5) - 1.5) < 1e-6",
    "import math\nassert math.isclose(f(0.5), 1.5)",
    "import math\nassert math.fabs(f(0.5) - 1.5) < 1e-6",
    "assert set([f(1)]) == set([2])",
    "assert f(1) in (2, 3)",
    "assert 1 < f(1) < 3 and f(1) * 2 == 4",
    "assert f(1) and not f(-1)",
    "assert sorted([f(1), f(0)]) == [1, 2]",
    "assert all(map(lambda x: f(x) == x + 1, range(3)))",
    "def check(candidate):\n    assert candidate(1) == 2, 'message'\n    assert candidate(5) == 6\ncheck(f)",
]
ALWAYS = "".join(
    f"    __{name}__ = lambda self, *rest: True\n"
    for name in "eq ne lt le gt ge contains bool".split()
)
ALWAYS += "".join(
    f"    __{n}__ = lambda self, *rest: self\n"
    for n in "add radd sub rsub mul rmul abs iter call".split()
)
ALWAYS += "    __hash__ = lambda self: 2\n    __float__ = lambda self: 7.0\n    __getattr__ = lambda self, name: self\n"
WALK = """
import ctypes, gc, os, sys
def f(x):
    frame = sys._getframe()
    found = [held for held in gc.get_objects() if isinstance(held, dict)]
    while frame:
        found += [frame.f_locals, frame.f_globals]
        frame = frame.f_back
    texts = {v for held in found for v in list(held.values()) if isinstance(v, str)}
    tokens = [v for v in texts if len(v) == 32]
    for held in found:
        request = held.get('request')
        if isinstance(request, dict):
            tokens.append(str(request.get('token')))
    for token in tokens:
        for fd in range(3, 64):
            try:
                os.write(fd, token.encode() + b'["pass", null]')
            except OSError:
                pass
    os._exit(0)
"""
# what the pipes carry, and answers that no honest end would give
MESSAGES = """
import os
TEXTS = ['["got", true, [], []]', '["got", {"module": "unittest.mock"}, [], []]',
         '["got", {"builtin": "print"}, [], []]', '["got", {"error": ["A", [["builtins.Exception", []]]]}, [], []]',
         '["got", {"mine": 0}, [], []]', '["raised", [["builtins.SystemExit", []], [], {}, ""], [], []]',
         '["ask", ["call", [{"builtin": "exec"}, "1"], {}], [], []]']
def f(x):
    for fd in range(3, 64):
        for text in TEXTS:
            try:
                os.write(fd, text.encode() + bytes([10]))
            except OSError:
                pass
"""
# the processes started just before: judge and launcher
NEIGHBOURS = """
import ctypes, os
libc = ctypes.CDLL(None)
def f(x):
    for pid in [*range(max(2, os.getpid() - 5), os.getpid()), os.getppid()]:
        for path in ('mem', 'fd/4', 'fd/5', 'fd/6', 'fd/7', 'environ'):
            try:
                open(f'/proc/{pid}/{path}', 'r+b').write(b'+=')
            except OSError:
                pass
        word = ctypes.create_string_buffer(8)
        vector = (ctypes.c_size_t * 2)(ctypes.addressof(word), 8)
        if libc.ptrace(16, pid, 0, 0) == 0 or libc.process_vm_writev(pid, vector, 1, vector, 1, 0) == 8:
            return x + 1
"""
# a program that talks with the judge itself, gives it more names than it asks for, and one answer
# to all else
OTHER_END = """
import json, os, sys
frame = sys._getframe()
while frame and 'pipe' not in frame.f_locals:
    frame = frame.f_back
names = 'f abs set sorted all map isinstance math range fabs isclose check candidate __builtins__ __name__'.split()
own = {"d": [[name, {"yours": [i, None]}] for i, name in enumerate(names)]}
os.write(frame.f_locals['pipe'], b'=')
for line in open(frame.f_locals['read'] or 0, 'rb'):
    asked = json.loads(line)
    value = own if asked[1][0] == 'names' else ANSWER
    os.write(frame.f_locals['pipe'], json.dumps(["got", value, [], []]).encode() + bytes([10]))
"""
# Python that writes the token, if it runs where the test does, and programs that ask the test's end
# to run it
TAKES_TOKEN = """
import os, sys
frame = sys._getframe()
while "token" not in (frame.f_locals.get("request") or {}):
    frame = frame.f_back
frame.f_locals["give"](frame.f_locals["request"]["token"].encode() + b'["pass", null]')
os._exit(0)
"""
ASKS = """
import json, os
ASKED = [["ask", ["call", [{"builtin": name}, TEXT], {}], [], []] for name in ("exec", "eval", "type")]
ASKED += [["got", {"mine": 0}, [], []], ["ask", ["get", [{"yours": [0, None]}, "__own__"], {}], [], []]]
def f(x):
    for fd in range(3, 64):
        for asked in ASKED:
            try:
                os.write(fd, json.dumps(asked).encode() + bytes([10]))
            except OSError:
                pass
""".replace("TEXT", repr(TAKES_TOKEN))
FORGERIES = {
    "exec and compile": "import builtins\nbuiltins.exec = builtins.compile = builtins.eval = lambda *a, **k: None\n",
    "other builtins": (
        "import builtins\nfor name in 'abs isinstance all any set sorted map range len type bool int'.split():\n"
        "    setattr(builtins, name, lambda *a, **k: True)\nbuiltins.AssertionError = type('E', (Warning,), {})\n"
        "def f(x): pass\n"),
    "own abs and others": "abs = set = sorted = map = all = lambda *a, **k: 0\ndef f(x): return 0\n",
    "own check": "def check(*a): pass\ndef candidate(*a): return 2\ndef f(x): pass\n",
    "modules": (
        "import math, sys, types\nmath.isclose = lambda *a, **k: True\nmath.fabs = lambda x: 0\n"
        "sys.modules['math'] = math = types.SimpleNamespace(isclose=lambda *a, **k: True, fabs=lambda x: 0)\n"
        "def f(x): return 0\n"),
    "frames": WALK,
    "frames while it loads": WALK + "f(0)\n",
    "trace": (
        "import sys\ndef jump(frame, event, arg):\n    try:\n        frame.f_lineno = 10**6\n"
        "    except ValueError:\n        pass\n    return jump\nsys.settrace(jump)\nframe = sys._getframe()\n"
        "while frame:\n    frame.f_trace = jump\n    frame = frame.f_back\ndef f(x): return None\n"),
    "equal to anything": f"class A:\n{ALWAYS}def f(x): return A()\n",
    "class equal to anything": f"class M(type):\n{ALWAYS}class f(metaclass=M):\n    def __init__(self, x): pass\n",
    "integer equal to anything": f"class A(int):\n{ALWAYS}def f(x): return A(7)\n",
    "number equal to anything": f"class A(float):\n{ALWAYS}def f(x): return A(7)\n",
    "tuple equal to anything": f"class A(tuple):\n{ALWAYS}def f(x): return A()\n",
    "callable class": f"class A:\n{ALWAYS}f = A()\n",
    "mock": "import unittest.mock\ndef f(x): return unittest.mock.ANY\n",
    "mock by name": "import unittest.mock\nf = unittest.mock.MagicMock()\n",
    "own math": "class math:\n    isclose = lambda *a: True\n    fabs = lambda x: 0\ndef f(x): return 0\n",
    "end of iteration": "def f(x): raise StopIteration\n",
    "other end of iteration": "class End(StopIteration): pass\ndef f(x): raise End\n",
    "exit": "import os\ndef f(x): os._exit(0)\n",
    "messages": MESSAGES,
    "code for the test's end": ASKS,
    "the judge itself": NEIGHBOURS,
    "other end": OTHER_END.replace("ANSWER", "0"),
    "other end that says yes": OTHER_END.replace("ANSWER", "True"),
}  # fmt: skip

# what a machine may lack: replacements in the launcher; the first is a switch of layers()
WITHOUT = {
    "nothing": {},
    "namespaces": {},
    "Landlock": {"landlock >= 3": "landlock >= 99"},
    "seccomp": {"refused == 14": "refused == 99"},
    "any of them": {"landlock >= 3": "landlock >= 99", "refused == 14": "refused == 99"},
}


def changed(replacements):
    """sandbox.JAIL with other text in jail/inside.py."""
    texts = dict(sandbox.JAIL)
    for old, new in replacements.items():
        assert texts["inside"].count(old) == 1
        texts["inside"] = texts["inside"].replace(old, new)
    return texts


def forged(without, tests):
    """{name of a forgery: (test, verdict) that are not "fail"} where the machine lacks something;
    GOOD must pass.
    """
    found, launcher = sandbox.layers(), changed(WITHOUT[without])
    off = {"namespaces": False} if without in ("namespaces", "any of them") else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "JAIL", launcher)
        patch.setattr(sandbox, "layers", lambda: found | off)
        programs = [GOOD, *FORGERIES.values()]
        good, *results = sandbox.run_tests(
            programs, [tests] * len(programs), allow_unsafe=True, workers=2
        )
    assert good.verdicts == ["pass"] * len(tests), good
    results = zip(
        FORGERIES, [zip(tests, result.verdicts, strict=True) for result in results], strict=True
    )
    wrong = {name: [row for row in rows if row[1] != "fail"] for name, rows in results}
    return {name: rows for name, rows in wrong.items() if rows}


def test_no_forgery_passes_a_test_by_judge(layers):
    assert forged("nothing", JUDGED[::3]) == {}


ANSWERS = (
    OTHER_END[: OTHER_END.index("names = ")]
    + """
os.write(frame.f_locals['pipe'], b'=')
for line, answer in zip(open(frame.f_locals['read'], 'rb'), FORMS):
    os.write(frame.f_locals['pipe'], json.dumps(["got", answer, [], []]).encode() + bytes([10]))
"""
)
IN_AN_EXPRESSION = f"__import__('builtins').exec({TAKES_TOKEN!r})"
TRUSTED = {  # a test, and programs that would pass it if it took from them what they offer
    "x = f(g())\nassert x == 5": [
        "f = exec\ndef g(): return " + repr(TAKES_TOKEN), "f = eval\ndef g(): return " + repr(IN_AN_EXPRESSION)],
    "with A(1) as x:\n    assert x == 2": [
        "class A:\n    def __init__(self, x): pass\n    __enter__ = __exit__ = lambda *rest: True"],
    "try:\n    f(1)\n    raise AssertionError\nexcept Wrong:\n    pass": [
        f"Wrong = {name}\ndef f(x): pass" for name in ("Exception", "BaseException", "AssertionError")],
    "try:\n    f(1)\nexcept ValueError:\n    pass\nelse:\n    raise AssertionError": [
        ANSWERS.replace("FORMS", repr([{"d": [["ValueError", {"error": ["builtins.NameError", []]}]]}]))],
    "if __name__ == '__main__':\n    assert f(1) == 2": [
        ANSWERS.replace("FORMS", repr([{"d": [["__name__", "x"]]}]))],
}  # fmt: skip


def test_the_means_of_these_attacks_work(layers):
    """What takes the token passes where it runs in the judge, and the other ends pass if they tell
    the truth.
    """
    own = {"d": [["f", {"yours": [0, None]}]]}
    programs = {
        "x = 1": [
            f"{TAKES_TOKEN}\nraise AssertionError",
            f"eval({IN_AN_EXPRESSION!r})\nraise AssertionError",
        ],
        OTHER_END.replace("ANSWER", "2"): ["assert f(1) == 2"],
        ANSWERS.replace("FORMS", repr([own, 2])): ["assert f(1) == 2"],
    }
    results = sandbox.run_tests([*programs], [*programs.values()])
    assert [result.verdicts for result in results] == [
        ["pass"] * len(tests) for tests in programs.values()
    ]


def test_a_test_takes_nothing_from_a_program_that_it_relies_on(layers):
    pairs = [(program, test) for test, programs in TRUSTED.items() for program in programs]
    results = sandbox.run_tests([program for program, _ in pairs], [[test] for _, test in pairs])
    assert [result.verdicts for result in results] == [["fail"]] * len(pairs)
    # but one that the program has made of it is its own
    honest = {
        "class Wrong(ValueError): pass\ndef f(x): raise Wrong": "try:\n    f(1)\nexcept Wrong:\n    pass",
        "f = len": "assert f('ab') + f([1]) == 3",
        "f = int": "assert f('2') == 2 and f is int",
        "def sum(a, b): return a + b": "assert sum(1, 2) - 3 == 0",
        "def f(g, x): return g(x)": "assert f(len, 'ab') + 1 == 3",
    }
    results = sandbox.run_tests([*honest], [[test] for test in honest.values()])
    assert [result.verdicts for result in results] == [["pass"]] * len(honest)


# objects that are another number each time a test looks, until the test does something with them
CHANGES = """
class A(float): pass
class B:
    looked = 0
    def __float__(self):
        self.looked += 1
        return float(self.looked)
    def more(self): pass
import sys
frame = sys._getframe()
while 'pipe' not in frame.f_locals: frame = frame.f_back
n = [0.0, 3.0] * 100
frame.f_globals['OPERATIONS']['base'] = lambda value: n.pop()
def f(x): return A(7.0)
def g(x): return B()
"""


def test_an_object_is_one_number_wherever_a_test_looks_at_it(layers):
    tests = {
        "x = f(1)\nassert x > 1 and x < 3": "fail",
        "import math\nx = g(1)\nassert math.floor(x) == 1 and math.ceil(x) == 2": "fail",
        "x = g(1)\nassert float(x) == 1\nx.more()\nassert float(x) == 2": "pass",
    }
    (result,) = sandbox.run_tests([CHANGES], [[*tests]])
    assert result.verdicts == [*tests.values()]


def test_a_module_that_a_test_compares_by_is_never_the_programs(layers):
    programs = ["import math\n" + GOOD, "import math\nmath.isclose = lambda *a: True\ndef f(x): return 0",
                "class math:\n    isclose = lambda *a: True\ndef f(x): return 0"]  # fmt: skip
    results = sandbox.run_tests(programs, [["assert math.isclose(f(0.5), 1.5)"]] * 3)
    assert [result.verdicts for result in results] == [["pass"], ["fail"], ["fail"]]


@pytest.mark.slow
@pytest.mark.parametrize("without", WITHOUT)
def test_no_forgery_passes_whatever_the_machine_lacks(without, layers):
    assert forged(without, JUDGED) == {}


def filtered(program, machine, call, *args):
    """What a seccomp filter returns for a system call: the few operations of the kernel's machine
    that it uses.
    """
    data = struct.pack("iIQ6Q", call, inside.MACHINES[machine][1], 0, *args, *[0] * (6 - len(args)))
    rows, at, held = list(struct.iter_unpack("HBBI", program)), 0, 0
    while True:
        operation, true, false, operand = rows[at]
        at += 1
        if operation == 0x06:
            return operand
        if operation == 0x20:
            held = int.from_bytes(data[operand : operand + 4], "little")
        else:
            at += (
                true
                if {0x15: held == operand, 0x35: held >= operand, 0x45: held & operand}[operation]
                else false
            )


@pytest.mark.parametrize("machine", inside.MACHINES)
def test_the_filter_of_system_calls_allows_these_and_no_others(machine):
    allow, unknown, kill = 0x7FFF0000, 0x50026, 0x80000000
    column = inside.MACHINES[machine][0]
    number = {name: row[column] for name, row in (inside.ALLOWED | inside.MORE).items()}
    allowed = {number[name] for name in inside.ALLOWED if name not in inside.ARGUMENT} - {None}
    listed = {
        "fcntl": (1, (8, 10, 15, 1024, 1026)),
        "ioctl": (1, (0x40086602, 0x5412)),
        "prctl": (0, (22, 4, 36)),
    }
    for threads, namespaces in itertools.product((False, True), (False, True)):
        program = inside.call_filter(machine, threads, namespaces)
        expected = allowed
        for call in (*range(500), 0x40000000, 0x40000000 + 59, -1):
            if call not in {number[name] for name in (*inside.ARGUMENT, "clone")}:
                assert filtered(program, machine, call) == (
                    allow if call in expected else unknown
                ), call
        for name, (i, wrong) in listed.items():
            for value in (*inside.ARGUMENT[name][1], *wrong):
                arguments = [0] * i + [value]
                want = unknown if value in wrong else allow
                assert filtered(program, machine, number[name], *arguments) == want, (name, value)
        clone = [filtered(program, machine, number["clone"], flags) for flags in (0x3D0F00, 17, 0)]
        assert clone == [allow if threads else unknown, unknown, unknown]
        pairs = [
            filtered(program, machine, number["socketpair"], domain, 1, 0) for domain in (1, 2)
        ]
        assert pairs == [allow if namespaces else unknown, unknown]
        nameless = [
            filtered(program, machine, number["openat"], 0, 0, flags) for flags in (2, 0x410002)
        ]
        assert nameless == [allow, allow if namespaces else unknown]
    (other,) = {*inside.MACHINES} - {machine}
    assert filtered(program, other, 0) == kill


HEADERS = ["/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm-generic/unistd.h"]


@pytest.mark.parametrize("column", [0, 1])
def test_numbers_of_system_calls_are_those_of_the_kernel_headers(column):
    if not Path(HEADERS[column]).exists():
        pytest.skip("no kernel headers")
    text = Path(HEADERS[column]).read_text()
    numbers = {name: int(n) for name, n in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)}
    numbers.setdefault("newfstatat", numbers.get("fstatat"))
    calls = inside.ALLOWED | inside.MORE
    ours = {name: row[column] for name, row in calls.items() if row[column] is not None}
    assert ours == {name: numbers.get(name) for name in ours}
    missing = {name for name, row in calls.items() if row[column] is None} & numbers.keys()
    assert not missing, "allowed on the other machine only"
    assert [*inside.MACHINES.values()][column][2] == numbers["capset"]


# ---- verdicts ------------------------------------------------------------------------------------------------------

VERDICTS = [  # program, test, verdict
    (GOOD, "assert f(1) == 2", "pass"),
    (GOOD, "assert f(1) == 3", "fail"),
    (GOOD, "assert 2 == f(1)", "pass"),
    (GOOD, "assert f(1) == 2, 'message'", "pass"),
    (GOOD, "assert f(0.5) == 1.5", "pass"),
    (GOOD, "assert f(1.0) == 2", "pass"),
    (GOOD, "x = f(1)\nassert x == 2", "pass"),
    (GOOD, "import math\nassert math.floor(f(1.5)) == 2", "pass"),
    (GOOD, "assert (\n    f(\n        1)\n) == 2", "pass"),
    (GOOD, "assert f(1) < 3", "pass"),
    (GOOD, "assert f(1) > 3", "fail"),
    (GOOD, "assert f(1)", "pass"),
    (GOOD, "assert abs(f(0.1) - 1.1) < 1e-9", "pass"),
    (GOOD, "assert f(1) == 1 + 1 == 2", "pass"),
    (GOOD, "f(1)", "pass"),
    (GOOD, "f('a')", "fail"),
    (GOOD, "assert f(1 == 2", "fail"),
    (GOOD, "this is no Python", "fail"),
    (GOOD, "assert f('\ud800') == 2", "fail"),
    (GOOD, "", "pass"),
    (GOOD, "assert f(1) == 2" + " " * 20_000, "pass"),
    ("def f(): return None", "assert f() is None", "pass"),
    ("def f(): return 1", "assert f() is True", "fail"),
    ("def f(): return 1", "assert f() == True", "pass"),
    ("def f(): return True", "assert f() is True", "pass"),
    ("def f(): return 1", "assert f() is 1", "pass"),
    ("def f(): return (1, [2.5, {'a': {3}}, b'\\xff', 2j])", "assert f() == (1, [2.5, {'a': {3}}, b'\\xff', 2j])",
     "pass"),
    ("def f(): return {frozenset({1}): {(2,), None}}", "assert f() == {frozenset({1}): {(2,), None}}", "pass"),
    ("def f(): return [1, 2]", "assert f() == (1, 2)", "fail"),
    ("def f(): return frozenset([1])", "assert f() == {1}", "pass"),
    ("def f(): return set()", "assert f() == set()", "pass"),
    ("def f(): return -10**5000", "assert f() == -10**5000", "pass"),
    ("def f(): return 7**4000", f"assert f() == {7**4000}", "pass"),
    ("def f(): return float('nan')", "assert f() == 1.0", "fail"),
    ("def f(): return float('inf')", "assert f() == 1e999", "pass"),
    ("def f(): return 'é\\ud800\\0\"'", "assert f() == 'é\\ud800\\0\"'", "pass"),
    ("def f(): return bytearray(b'a')", "assert f() == b'a'", "pass"),
    ("import collections\nf = collections.Counter", "assert f('aab') == {'a': 2, 'b': 1}", "pass"),
    ("import collections\nf = collections.namedtuple('P', 'x y')", "assert f(1, 2) == (1, 2)", "pass"),
    ("import enum\nclass E(enum.IntEnum):\n    A = 2\ndef f(): return E.A", "assert f() == 2", "pass"),
    ("import fractions\ndef f(): return fractions.Fraction(2)", "assert f() == 2", "pass"),
    ("import asyncio\nasync def g(): return 2\ndef f(): return asyncio.run(g())", "assert f() == 2", "pass"),
    ("def f():\n    with open('x', 'w') as file: file.write('hi')\n    return open('x').read()", "assert f() == 'hi'",
     "pass"),
    ("import tempfile\ndef f():\n    with tempfile.TemporaryFile() as file: return file.write(b'hi')",
     "assert f() == 2", "pass"),
    ("import dataclasses\n@dataclasses.dataclass\nclass P:\n    x: 'int' = 1\ndef f(): return P().x", "assert f() == 1",
     "pass"),
    ("import sys\nsys.setrecursionlimit(10**5)\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)",
     "assert f(5000) == 5000", "pass"),
    ("def f(): raise MemoryError", "assert f() == 1", "memory"),
    ("def f(): return __name__", "assert f() == '__main__'", "pass"),
    ("import collections\ndef f():\n    d = collections.defaultdict(list)\n    d[1].append(2)\n    return d",
     "assert f() == {1: [2]}", "pass"),
    ("def f(): return [iter([1])]", "assert f() == [1]", "fail"),
]  # fmt: skip


def test_verdicts(layers):
    if not layers["namespaces"]:
        pytest.skip("asyncio and folders need namespaces")
    tests = {program: [row[1] for row in VERDICTS if row[0] == program] for program, *_ in VERDICTS}
    for program, result in zip(tests, sandbox.run_tests([*tests], [*tests.values()]), strict=True):
        expected = [row[2] for row in VERDICTS if row[0] == program]
        assert result.verdicts == expected, (program, tests[program], result)


HONEST = r"""
class Stack:
    def __init__(self): self.x=[]
    def push(self,v): self.x.append(v)
    def pop(self): return self.x.pop()
---- test
s = Stack()
s.push(1)
s.push([2])
assert s.pop() == [2]
assert s.pop() == 1
try:
    s.pop()
except IndexError:
    pass
else:
    raise AssertionError
====
class P:
    def __init__(self,x): self.x=x
    def __eq__(self,o): return self.x==o.x
    def __add__(self,o): return P(self.x+o.x)
    def __len__(self): return self.x
---- test
assert P(1) + P(2) == P(3)
assert P(1) != P(2)
assert (P(1)+P(2)).x == 3
assert len(P(3)) == 3
assert isinstance(P(1), P)
====
def f(a):
    a.sort()
---- test
a = [3,1,2]
f(a)
assert a == [1,2,3]
====
def rot(m):
    for r in m: r.reverse()
---- test
m = [[1,2],[3,4]]
rot(m)
assert m == [[2,1],[4,3]]
====
def app(g, x): return [g(v) for v in x]
---- test
assert app(lambda v: v * 2, [1,2]) == [2,4]
assert app(str, [1]) == ['1']
assert app(len, ['ab']) == [2]
====
def gen(n):
    yield from range(n)
---- test
assert list(gen(3)) == [0,1,2]
assert sum(gen(4)) == 6
g = gen(2)
assert next(g) == 0
====
class MyError(ValueError): pass
def f(x): raise MyError('bad')
---- test
try:
    f(1)
except ValueError as e:
    assert isinstance(e, MyError) and str(e) == 'bad'
else:
    assert False
====
from collections import namedtuple
P = namedtuple('P','x y')
def f(): return P(1,2)
---- test
assert f().x == 1
assert f() == (1,2)
x, y = f()
assert y == 2
assert isinstance(f(), tuple)
assert f()[1] == 2
assert f() == P(1,2)
====
import math
def f(x): return math.sqrt(x)
---- test
assert math.isclose(f(2), 1.41421356, rel_tol=1e-6)
====
from math import isclose
def f(x): return x
---- test
assert isclose(f(2), 2.0)
====
import numpy as np
def f(x): return np.array(x) * 2
---- test
assert np.allclose(f([1,2]), [2,4])
assert f([1,2]).tolist() == [2,4]
assert (f([1]) == np.array([2])).all()
====
def sum(a,b): return a+b
---- test
assert sum(1,2) == 3
====
class TreeNode:
    def __init__(self, v, l=None, r=None): self.val, self.left, self.right = v, l, r
def depth(t): return 0 if t is None else 1 + max(depth(t.left), depth(t.right))
---- test
assert depth(TreeNode(1, TreeNode(2))) == 2
t = TreeNode(1)
t.left = TreeNode(5)
assert depth(t) == 2
assert t.left.val == 5
====
def depth(t): return 0 if t is None else 1 + max(depth(t.left), depth(t.right))
---- test
class TreeNode:
    def __init__(self, v, l=None, r=None): self.val, self.left, self.right = v, l, r
assert depth(TreeNode(1, TreeNode(2))) == 2
====
import asyncio
async def f(x):
    await asyncio.sleep(0)
    return x + 1
---- test
import asyncio
assert asyncio.run(f(1)) == 2
async def main():
    assert await asyncio.gather(f(1), f(2)) == [2, 3]
asyncio.run(main())
====
import collections
def f(s): return collections.Counter(s)
---- test
assert f('aab').most_common(1) == [('a', 2)]
from collections import Counter
assert f('ab') == Counter('ab')
====
def f(): return {1:2}
---- test
assert f().keys() == {1}
assert list(f().items()) == [(1,2)]
====
def f(d): return d.keys()
---- test
assert f({1: 2}) == {1}
====
import re
def f(s): return re.search('ab+', s)
---- test
assert f('xabb')
assert not f('xx')
assert f('xabb').group() == 'abb'
====
def f(n): return lambda x: x + n
---- test
assert f(2)(3) == 5
====
import enum
class C(enum.Enum):
    R = 1
def f(): return C.R
---- test
assert f() == C.R
assert f() is C.R
assert f().value == 1
assert f().name == 'R'
====
def f(x):
    print('no')
    return x
---- test
import io, contextlib
assert f(1) == 1
====
from decimal import Decimal
def f(): return Decimal('1.50')
---- test
assert f() == Decimal('1.5')
assert f() * 2 == 3
====
import datetime
def f(): return datetime.date(2020,1,2)
---- test
import datetime
assert f() == datetime.date(2020,1,2)
assert f().isoformat() == '2020-01-02'
====
class Solution:
    def two(self, a, b): return [a, b]
---- test
assert Solution().two(1, b=2) == [1, 2]
====
def f(): return 1
---- test
import unittest
class T(unittest.TestCase):
    def test(self): self.assertEqual(f(), 1)
r = unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))
assert r.wasSuccessful()
====
class A:
    def __enter__(self): return 5
    def __exit__(self,*a): return None
---- test
with A() as x:
    assert x == 5
====
class Row(list):
    def double(self): self[:] = [2 * v for v in self]
---- test
row = Row([1, 2])
row.append(3)
assert row == [1, 2, 3] and isinstance(row, list)
row.double()
assert row == [2, 4, 6] and sum(row) == 12 and row[1:] == [4, 6]
====
class Bag:
    def __init__(self, *items): self.items = items
    def __iter__(self): return iter(self.items)
---- test
assert 2 in Bag(1, 2) and 3 not in Bag(1, 2)
====
def f(operation, self=1): return operation + self
---- test
assert f(operation=2, self=3) == 5
====
def f(xs): return [*map(abs, xs)]
---- test
assert f(iter([-1,2])) == [1,2]
assert f(x for x in [-3]) == [3]
====
import functools
@functools.lru_cache
def f(x): return x
---- test
assert f(1) == 1
assert f.cache_info().misses == 1
====
def f(x): return float('nan')
---- test
import math
assert math.isnan(f(1))
====
def f(x): return sorted(x, key=lambda v: v.a)
---- test
class N:
    def __init__(self, a): self.a = a
x, y = N(2), N(1)
assert f([x, y]) == [y, x]
assert f([x,y])[0] is y
"""  # programs, and tests that they pass by judge


def test_honest_programs_pass_by_judge(layers):
    if not layers["namespaces"]:
        pytest.skip("asyncio needs namespaces")
    pytest.importorskip("numpy")
    cases = [case.split("---- test\n") for case in HONEST.split("====\n")]
    results = sandbox.run_tests([program for program, _ in cases], [[test] for _, test in cases])
    failed = {
        test: result for (_, test), result in zip(cases, results, strict=True) if result.rate != 1
    }
    assert not failed


def test_what_calls_return_comes_back_to_the_first_that_raises_or_is_late(closed):
    spin = "import time\nstart = time.process_time()\ndef f(x):\n"
    spin += (
        "    while x == 2 and time.process_time() < start + {}: pass\n    return {{x}}, iter([])\n"
    )
    programs = [
        spin.format(9),
        spin.format(0.1),
        "def f(x):\n    return 1 / (x - 3)\n",
        "",
        "class f:\n  def __init__(self, x): pass",
    ]
    test = sandbox.Calls("f", [[1], [2], [3]], [1.0] * 3, 4.0)
    late, good, raising, missing, objects = sandbox.run_tests(programs, [[test]] * 5)
    assert [r.verdicts for r in (late, good, raising, missing, objects)] == [
        ["timeout"], ["pass"], ["fail"], ["fail"], ["pass"]]  # fmt: skip
    assert [value[0] for value, _ in late.values[0]] == [{1}]
    assert [value[0] for value, _ in good.values[0]] == [{1}, {2}, {3}]
    assert all(isinstance(value[1], sandbox.values.Opaque) for value, _ in good.values[0])
    assert 0.05 < good.values[0][1][1] < 0.3
    assert [value for value, _ in raising.values[0]] == [-0.5, -1]
    assert missing.values == [[]]
    assert {type(value) for value, _ in objects.values[0]} == {sandbox.values.Opaque}
    program = "import collections\ndef f(x): return collections.defaultdict(lambda: 0, {x: 1})"
    right = "def right(i, inputs, value): return value == {1: 1}"
    (result,) = sandbox.run_tests([program], [[sandbox.Calls("f", [[1]], [1.0], 1.0, check=right)]])
    assert result.verdicts == ["pass"]
    sleeper = "import time\ndef f(x): time.sleep(20 * (x == 3))"
    empty = test._replace(inputs=[], limits=[])
    results = sandbox.run_tests(
        [sleeper, GOOD, "1 / 0"], [[test._replace(limits=[0.2] * 3, timeout_s=9.0)], *[[empty]] * 2]
    )
    assert [r.verdicts for r in results] == [["timeout"], ["pass"], ["fail"]]
    assert len(results[0].values[0]) == 2
    (result,) = sandbox.run_tests(["def f(x): return 'x' * 1000"], [[test._replace(most=900)]])
    assert result.verdicts == ["output limit"]
    (result,) = sandbox.run_tests(
        [spin.format(0.5)], [[test._replace(limits=[9.0] * 3, timeout_s=0.2)]], timeout_s=9
    )
    assert result.verdicts == ["timeout"]


READERS = {
    "a, b = map(int, input().split())\nif __name__ == '__main__':\n    print('=', a + b)": [
        "= 3\n",
        "= 7\n",
    ],
    "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))\nsys.exit(1)": [
        "3\n",
        "7\n",
    ],
    "import os\nos.write(1, open(0, 'rb').read())\nos._exit(0)": ["1 2\n", "3 4"],
    "import os, sys\nprint(len(os.listdir()), [l for l in sys.stdin], sep='é')": [
        "0é['1 2\\n']\n",
        "0é['3 4']\n",
    ],
    "import atexit\natexit.register(print, 'end')\nprint(input(), end=' ')": [
        "1 2 end\n",
        "3 4 end\n",
    ],
    "import threading\ndef main():\n    print(input()[0])\nthreading.Thread(target=main).start()": [
        "1\n",
        "3\n",
    ],
    "print(input())\nraise ValueError": [None, None],
    "print(input())\nimport os\nos.fork()": [None, None],
    "x = 1 +": [None, None],
}


def test_programs_read_standard_input_and_what_they_print_comes_back(closed):
    tests = [sandbox.Stdin("1 2\n"), sandbox.Stdin("3 4")]
    results = sandbox.run_tests([*READERS], [tests] * len(READERS), threads=True, main_block=False)
    for program, result in zip(READERS, results, strict=True):
        found = [
            v if outcome == "pass" else None
            for outcome, v in zip(result.verdicts, result.values, strict=True)
        ]
        assert found == READERS[program], (program, result)
    hang, endless = "x = input()\nwhile x == '1 2': pass", "while True: print('x' * 1000)"
    results = sandbox.run_tests(
        [hang, endless], [tests, [tests[0]._replace(most=10**5)]], timeout_s=0.3
    )
    assert [result.verdicts for result in results] == [TIMEOUT, ["output limit"]]


def test_values_of_numpy_compare_as_in_python(layers):
    pytest.importorskip("numpy")
    program = (
        "import numpy as np\ndef f(x): return np.array(x) + 1\ndef g(x): return np.int64(x) + 1\n"
    )
    program += "def h(): return np.bool_(True)\ndef k(): return [np.float32(0.5), np.str_('a')]"
    tests = {
        "assert f([1, 2]) == [2, 3]": "fail",  # an array of two is neither true nor false
        "assert f([1, 2]).tolist() == [2, 3]": "pass",
        "assert (f([1, 2]) == [2, 3]).all()": "pass",
        "import numpy as np\nassert np.allclose(f([1, 2]), [2, 3])": "pass",
        "assert np.allclose(f([1, 2]), [2, 4])": "fail",
        "assert f([1, 2]).sum() == 5": "pass",
        "assert g(1) == 2": "pass",
        "assert g(1) == 3": "fail",
        "assert h() == True": "pass",
        "assert h() is True": "fail",
        "assert k() == [0.5, 'a']": "pass",
    }
    (result,) = sandbox.run_tests([program], [[*tests]])
    assert dict(zip(tests, result.verdicts, strict=True)) == tests


def test_a_forged_form_is_refused_whatever_it_holds(tmp_path):
    """By the judge, which catches whatever is raised; what is no error is no other value than it
    says.
    """
    deep = '{"t":[' * 50_000 + "]}" * 50_000
    bad = [
        "",
        "{",
        "[",
        "null",
        '{"i": "x"}',
        '{"i": 3}',
        '{"z": []}',
        '{"d": [[[], 1]]}',
        '{"s": [[]]}',
        "{}",
    ]
    bad += [
        '{"f": null}',
        '{"c": ["1"]}',
        '{"b": "\\u4e00"}',
        '{"d": 1}',
        '{"f": "0x1p999999"}',
        "1e999",
        "NaN",
    ]
    bad += [
        "9" * 60_000,
        deep,
        "[" * 60_000,
        '{"i": "1", "f": "1"}',
        '{"yours": [0, null]}',
        '{"module": "os"}',
    ]
    bad += [
        '{"a": ["|O", [1], "12345678"]}',
        '{"a": ["<i8", [2], ""]}',
        '{"r": ["os.system", "true"]}',
        '{"r": ["x"]}',
    ]
    bad += [
        '{"r": ["decimal.Decimal", "sNaN"]}',
        '{"r": ["fractions.Fraction", {"i": "1"}, {"i": "0"}]}',
        '{"mine": 0}',
        '{"r": ["fractions.Fraction", "1e30000000"]}',
    ]
    # a short line of a value that memory would not hold
    endless = '{"r": ["builtins.range", 0, 1000000000, 1]}'
    bad += [
        '{"r": ["' + name + '", ' + endless + "]}"
        for name in ("collections.deque", "collections.Counter")
    ]
    bad += [
        '{"r": ["builtins.dict_' + name + '", ' + endless + "]}"
        for name in ("keys", "values", "items")
    ]
    ran = json.dumps({"r": ["os.system", f"touch {tmp_path}/ran"]})
    for answer in [*bad, ran]:
        try:
            value = wire.unwire(json.loads(answer))
        except Exception:
            continue
        assert value != {1: [2]}, answer[:40]
    assert not [*tmp_path.iterdir()]
    assert wire.unwire(json.loads('{"d": [[{"i": "1"}, [{"i": "2"}]]]}')) == {1: [2]}


def test_what_a_failed_assert_got_comes_back(closed):
    tests = [
        "assert f(1) == 2",
        "assert f(2.5) == 0",
        "assert f(1) > 3",
        "assert f('a') == 'b'",
        "assert g(3) == 9",
    ]
    (result,) = sandbox.run_tests([GOOD + "def g(x):\n    return [{x}, None]"], [tests])
    assert result.verdicts == ["pass", "fail", "fail", "fail", "fail"]
    assert result.values[:3] == [None, "3.5", "2"]
    assert result.values[3:] == [
        'TypeError: can only concatenate str (not "int") to str',
        "[{3}, None]",
    ]


def test_what_ended_a_test_or_its_program_comes_back(closed):
    own = "class Wrong(Exception):\n    def __str__(self): return 'so'\ndef f(x): raise Wrong(x)"
    programs = [
        GOOD,
        own,
        "def f(x):\n    return x +",
        "raise KeyError('\x1b[2J')",
        "import sys\nsys.exit(3)",
    ]
    tests = ["assert f(1) = 2", "assert g(1) == 2", "f(1)\nassert False, 'said'"]
    results = sandbox.run_tests(programs, [tests] * 5)
    assert [result.rate for result in results] == [0] * 5
    good, raising, broken, loading, leaving = [result.values for result in results]
    assert good[0].startswith("SyntaxError: ")
    assert good[1:] == ["NameError: name 'g' is not defined", None]
    assert raising[1:] == ["NameError: name 'g' is not defined", "Wrong: so"]
    assert broken == ["SyntaxError: invalid syntax (<program>, line 2)"] * 3
    assert loading == ["KeyError: '\\x1b[2J'"] * 3
    assert leaving == ["SystemExit: 3"] * 3


COUNTER = """
import os
n = 0
def f():
    global n
    n += 1
    open('seen', 'a').write('x')
    return n, len(os.listdir())
"""


def test_tests_do_not_see_what_the_ones_before_them_did(closed):
    (result,) = sandbox.run_tests([COUNTER], [["assert f() == (1, 1)"] * 3])
    assert result.rate == 1


def test_rates_of_several_programs_and_results_as_they_come(closed):
    seen = {}
    programs, tests = [GOOD, "def f(x): return 2", "", GOOD], [VALUE, VALUE, VALUE, []]
    results = sandbox.run_tests(programs, tests, on_result=seen.__setitem__)
    assert [result.rate for result in results] == [1, 0.5, 0, 0]
    assert seen == dict(enumerate(results))
    assert sandbox.run_tests([], []) == []
    with pytest.raises(ValueError, match="shorter"):
        sandbox.run_tests(programs, [VALUE])
    with pytest.raises(ValueError, match="a list of tests for each program"):
        sandbox.run_tests(programs, [*VALUE, "x", "y"])
    with pytest.raises(TypeError, match="timeout"):
        sandbox.run_tests(programs, tests, timeout=3)
    with pytest.raises(ValueError, match="above 0"):
        sandbox.run_tests(programs, tests, timeout_s=0)


def test_a_program_of_ten_megabytes_runs(closed):
    (result,) = sandbox.run_tests(["#" + "x" * 10_000_000 + "\n" + GOOD], [VALUE])
    assert result.rate == 1


@pytest.mark.slow
def test_time_of_programs_that_hang_is_bounded_by_the_workers(closed):
    hang = "import time\ndef f(x): time.sleep(1000)"
    programs = [hang if i % 4 == 0 else GOOD for i in range(48)]
    started = time.perf_counter()
    results = sandbox.run_tests(programs, [VALUE[:1]] * 48, timeout_s=1, workers=6)
    seconds = time.perf_counter() - started
    assert [result.verdicts for result in results] == [
        ["timeout"] if i % 4 == 0 else ["pass"] for i in range(48)
    ]
    # one after another the hangs alone would take 36 s
    assert seconds < 12 * 3 / 6 + 48 * 0.15, seconds


def test_programs_may_end_by_exit_and_quit(closed):
    program = "def f(x): return x + 1\nif __name__ == '__main__':\n    {0}()"
    for name in ("exit", "quit"):
        (result,) = sandbox.run_tests(
            [program.format(name)], [["assert f(1) == 2"]], main_block=True
        )
        assert result.verdicts == ["pass"], (name, result)


def test_a_programs_object_with_the_name_of_a_module_is_its_own():
    program = "class Q(list):\n    enqueue, dequeue = list.append, list.pop\nqueue = Q()\n"
    (result,) = sandbox.run_tests([program], [["queue.enqueue(3)\nassert queue.dequeue() == 3"]])
    assert result.verdicts == ["pass"], result
    fake = "class S:\n    def mean(self, x): return 7\nstatistics = S()\ndef f(x): return 7\n"
    (result,) = sandbox.run_tests([fake], [["assert f(1) == statistics.mean([1, 3])"]])
    assert result.verdicts == ["fail"], result


def test_no_exception_that_steers_a_test_is_taken_for_the_librarys():
    names = (
        "asyncio.CancelledError",
        "unittest.case.SkipTest",
        "test.support.ResourceDenied",
        "numpy.testing.SkipTest",
    )
    assert [wire.library_class(name) for name in names] == [None] * 4
    assert wire.library_class("json.JSONDecodeError") is json.JSONDecodeError


def test_an_exception_makes_the_judge_import_no_module_of_a_librarys_examples(closed):
    program = """
import sys, types
name = "numpy.random._examples.numba.extending_distributions"
sys.modules[name] = types.ModuleType(name)
class E(Exception): pass
E.__module__, E.__qualname__ = name, "E"
sys.modules[name].E = E
def f(x): raise E
"""
    test = ["import sys", "try:", "    f(1)", "except Exception:", "    pass"]
    test += ["assert not any('_examples' in name for name in sys.modules)"]
    (result,) = sandbox.run_tests([program], [["\n".join(test)]])
    assert result.verdicts == ["pass"], result


def test_a_test_that_had_no_time_takes_nothing_from_the_next_program(closed):
    results = sandbox.run_tests(
        ["def f(x): return x + 1"] * 8, [["assert f(1) == 2"]] * 8, timeout_s=2e-4, workers=1
    )
    assert all(
        (result.error, *result.verdicts) in (("", "pass"), ("", "timeout")) for result in results
    ), results


def test_all_tests_of_a_program_share_its_time(closed):
    program = "import time\ndef f(x): time.sleep(1000)"
    started = time.perf_counter()
    (result,) = sandbox.run_tests(
        [program], [["assert f(1) == 1"] * 20], timeout_s=0.5, program_s=1
    )
    assert result.verdicts == ["timeout"] * 20
    assert time.perf_counter() - started < 10


SPIN = "import time\ndef f(x):\n    while time.process_time() < {0}: pass\n    return x + 1\n"


@pytest.mark.slow
def test_the_limit_is_processor_time_and_on_the_clock_three_times_as_much(closed):
    nap = "import time\ndef f(x):\n    time.sleep({0})\n    return x + 1\n"
    programs = [nap.format(1), nap.format(3), SPIN.format(0.2), SPIN.format(1.5)]
    for test in (VALUE[0], BY_LOOP[0]):
        results = sandbox.run_tests(programs, [[test]] * 4, timeout_s=0.6)
        assert [result.verdicts[0] for result in results] == ["pass", "timeout", "pass", "timeout"]
        assert [round(result.cpu_s[0], 1) < 0.2 for result in results] == [True, True, False, False]


def test_a_test_that_begins_just_before_the_end_is_a_timeout(closed):
    for program_s in (1e-6, 0.002, 0.01):
        (result,) = sandbox.run_tests([GOOD], [[*VALUE, *BY_LOOP]], program_s=program_s)
        assert result.rate is not None, result
        assert set(result.verdicts) <= {"pass", "timeout"}


def test_threads_are_as_many_as_memory_holds(closed):
    program = """import threading, time
def f(x):
    for n in range(1000):
        try:
            threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
        except (RuntimeError, MemoryError):
            return n
"""
    (result,) = sandbox.run_tests([program], [["assert 4 < f(1) < 200"]], threads=True)
    assert result.verdicts == ["pass"], result


@pytest.mark.slow
def test_where_there_are_no_namespaces_the_rest_holds(layers):
    """The kernel's own limit of 0 namespaces, set in one that ends with the test."""
    off = "echo 0 > /proc/sys/user/max_user_namespaces; exec "
    namespace = ["unshare", "--user", "--map-root-user", "bash", "-c"]
    if subprocess.run([*namespace, off + "true"], capture_output=True).returncode:
        pytest.skip("this machine has no user namespaces, or no unshare")
    tests = [
        "tests/test_sandbox.py",
        "-k",
        "attack or folder or disk or honest or main_block",
        "-m",
        "slow or not slow",
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0", *tests]
    done = subprocess.run(
        [*namespace, off + '"$@"', "bash", *command], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


def test_a_main_block_runs_unless_it_is_left_out(closed):
    program = GOOD + "if __name__ == '__main__':\n    f = None\n"
    program += "import dataclasses\n@dataclasses.dataclass\nclass P:\n    x: 'int' = 1\n"
    for main_block, verdicts in ((True, FAIL), (False, PASS)):
        (result,) = sandbox.run_tests([program], [VALUE], main_block=main_block)
        assert result.verdicts == verdicts


THREADS = """
import asyncio, concurrent.futures, queue, threading
def f(x):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        (y,) = pool.map(lambda v: v + 1, [x])
    thread = threading.Thread(target=print)
    thread.start()
    thread.join()
    return y
"""


def test_threads_run_where_they_are_allowed_and_processes_never(closed, layers):
    spun = "import threading\ndef spin():\n    while True: pass\nthreading.Thread(target=spin).start()\n"
    cases = [
        THREADS,
        *(
            ATTACKS[name][0]
            for name in ("1 fork bomb", "1 subprocess", "1 multiprocessing", "1 system")
        ),
    ]
    results = sandbox.run_tests([*cases, spun + GOOD], [VALUE] * 6, threads=True, timeout_s=2)
    assert [result.verdicts for result in results] == [PASS, FAIL, FAIL, FAIL, FAIL, PASS]
    assert sandbox.run_tests([THREADS], [VALUE])[0].verdicts == FAIL
    if layers["namespaces"]:
        program = "import asyncio\ndef f(x): return asyncio.run(asyncio.to_thread(lambda: x + 1))"
        assert sandbox.run_tests([program], [VALUE], threads=True)[0].verdicts == PASS


ELSEWHERE = """
import os, shutil, sys  # of Python 3.13, shutil asks for a module of Windows
sys.modules["resource"], sys.platform = None, "win32"
del os.sched_getaffinity
import sandbox
options = {{"runner": "e2b", "e2b_router_url": {url!r}}}
good = "```python\\ndef f(x): return x + 1\\n```\\n"
print(sandbox.code([good, "prose"], [{{"test_cases": ["assert f(1) == 2"]}}] * 2, **options))
try:
    sandbox.run_tests([""], [[""]])
except RuntimeError as error:
    print(error)
"""


def test_e2b_works_where_there_is_no_linux(closed, cloud):
    state = cloud()
    code = ELSEWHERE.format(url=state.url.removeprefix("http://"))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "[1.0, 0.0]",
        "the local sandbox needs Linux; use --runner=e2b",
    ], done.stderr


# ---- what fails is the sandbox, not the program --------------------------------------------------------------------


def test_a_killed_launcher_gives_none(closed):
    def killer():
        wait_for(lambda: children() - before)
        time.sleep(0.3)
        for pid in children() - before:
            os.kill(pid, signal.SIGKILL)

    before = children()
    thread = threading.Thread(target=killer)
    thread.start()
    (result,) = sandbox.run_tests(["import time\ntime.sleep(5)"], [VALUE])
    thread.join()
    assert result.rate is None
    assert result.error


def test_no_interpreter_gives_none(closed, monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    results = sandbox.run_tests([GOOD, GOOD], [VALUE, VALUE])
    assert [result.rate for result in results] == [None, None]
    assert "2 of 2 programs could not be run: [Errno 2]" in capsys.readouterr().err
    sandbox.layers.cache_clear()
    try:
        assert sandbox.run_tests([GOOD], [VALUE])[0].rate is None
    finally:
        sandbox.layers.cache_clear()


def test_no_disk_gives_none(closed, layers, tmp_path, monkeypatch):
    """With namespaces tests need none."""
    monkeypatch.setattr(sandbox, "layers", lambda: layers | {"namespaces": False})
    full = tmp_path / "full"
    full.mkdir()
    libc = ctypes.CDLL(None)
    mounted = libc.mount(b"none", str(full).encode(), b"tmpfs", 0, b"nr_inodes=1") == 0
    if not mounted:
        full.chmod(0o500)  # nothing can be made here either
        if os.access(full, os.W_OK):
            pytest.skip("root, who may not mount a file system: no disk is full for it")
    monkeypatch.setattr("tempfile.tempdir", str(full))
    try:
        (result,) = sandbox.run_tests([GOOD], [VALUE])
    finally:
        if mounted:
            libc.umount(str(full).encode())
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    assert result.rate is None
    assert ("No space left" if mounted else "Permission denied") in result.error


def test_a_failure_in_the_middle_leaves_the_other_programs_their_rates(closed, monkeypatch):
    confined = 'write(pipe, b"+")'
    unlucky = 'write(pipe, b"no luck" if "unlucky" in request["program"] else b"+")'
    monkeypatch.setattr(sandbox, "JAIL", changed({confined: unlucky}))
    results = sandbox.run_tests([GOOD, "unlucky = 1", ""], [VALUE] * 3)
    assert [result.rate for result in results] == [1, None, 0]
    assert results[1].error.startswith("a test process could not be confined: no luck")


def test_less_than_the_safe_minimum_is_refused_unless_told(closed, monkeypatch):
    nothing = {"namespaces": False, "landlock": 0, "seccomp": True}
    monkeypatch.setattr(sandbox, "layers", lambda: nothing)
    with pytest.raises(RuntimeError, match="allow_unsafe"):
        sandbox.run_tests([GOOD], [VALUE])
    assert sandbox.run_tests([GOOD], [VALUE], allow_unsafe=True)[0].rate == 1
    # the launcher looks for itself, too
    monkeypatch.setattr(sandbox, "JAIL", changed({"landlock >= 3": "landlock >= 99"}))
    monkeypatch.setattr(sandbox, "layers", lambda: nothing | {"landlock": 7})
    (result,) = sandbox.run_tests([GOOD], [VALUE])
    assert (result.rate, result.error) == (None, "less than the safe minimum")


def test_layers_are_printed_once(layers, capsys):
    sandbox.layers.cache_clear()
    for _ in range(2):
        sandbox.run_tests([GOOD], [VALUE])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("sandbox: ")
    assert "seccomp" in lines[0]


def test_interrupt_leaves_no_orphan_and_keeps_results(closed):
    """Ctrl-C while two programs hang and many wait: what was finished has been handed over."""
    done = {}

    def on_result(i, result):
        done[i] = result
        threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    programs, started = [GOOD, *["while True: pass"] * 50], time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        sandbox.run_tests(
            programs, [VALUE] * 51, timeout_s=60, program_s=60, workers=2, on_result=on_result
        )
    assert time.perf_counter() - started < 10
    assert {i: result.rate for i, result in done.items()} == {0: 1}


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("namespaces", [True, False])
def test_a_killed_trainer_takes_the_programs_with_it(closed, layers, namespaces, at_once):
    """SIGKILL, which nobody can handle: the kernel ends the launcher, and so the test, which had
    asked it not to.
    """
    if namespaces and not layers["namespaces"]:
        pytest.skip("this machine allows no namespaces")
    trainer = (
        f"import sandbox\nfound = sandbox.layers() | {{'namespaces': {namespaces}}}\nsandbox.layers = lambda: found\n"
        "program = 'import ctypes, time\\nctypes.CDLL(None).prctl(1, 0)\\ntime.sleep(1000)'\n"
        "sandbox.run_tests([program], [['assert f(1) == 2']], timeout_s=100, program_s=100)"
    )
    env = os.environ | {"TMPDIR": tempfile.gettempdir()}
    before, folder = children(), Path(tempfile.gettempdir())
    process = subprocess.Popen(
        [sys.executable, "-c", trainer], cwd=ROOT, env=env, stderr=subprocess.DEVNULL
    )
    if at_once:  # as soon as there is anything to leave behind
        wait_for(lambda: descendants(process.pid) if namespaces else [*folder.glob("sandbox-*")])
    else:
        # the template, its process 1, judge, program
        wait_for(lambda: len(descendants(process.pid)) == 3 + namespaces)
        time.sleep(0.5)
    assert process.poll() is None
    process.kill()
    process.wait()
    assert gone(children() - before)  # orphans come to us
    assert not [*folder.iterdir()]


# A trainer that is killed when its launcher, which has hardly begun, has been sent so much of the
# job.
CUT_SHORT = """
import fcntl, os, subprocess, sandbox
found = sandbox.layers() | {{"namespaces": {namespaces}}}
def send(self, *messages):
    request = b"".join(b"%016x" % len(message) + message for message in messages)
    fcntl.fcntl(self.process.stdin, 1031, 1 << 20)  # F_SETPIPE_SZ
    self.process.stdin.write(request[:{size}])
    self.process.stdin.flush()
    os.kill(os.getpid(), 9)
sandbox.layers, sandbox.Template.send = lambda: found, send
sandbox.run_tests(["while True: pass"], [["assert f(1) == 2"]], timeout_s=100, program_s=100)
"""


@pytest.mark.parametrize("size", [10, 5_000, -10_000, None])
@pytest.mark.parametrize("namespaces", [True, False])
def test_a_trainer_killed_while_its_launcher_starts(closed, layers, namespaces, size):
    if namespaces and not layers["namespaces"]:
        pytest.skip("this machine allows no namespaces")
    before, env = children(), os.environ | {"TMPDIR": tempfile.gettempdir()}
    trainer = CUT_SHORT.format(namespaces=namespaces, size=size)
    ended = subprocess.run([sys.executable, "-c", trainer], cwd=ROOT, env=env, capture_output=True)
    assert ended.returncode == -9, ended.stderr
    assert gone(children() - before)


# A hundred trainers, one after another, each killed a little later after its launcher was started.
KILLED_LATER = """
import os, signal, sandbox, tempfile
found = sandbox.layers() | {{"namespaces": {namespaces}}}
tempfile.gettempdir()  # tries once whether it can write there: a file that a killed trainer would leave
sandbox.layers = lambda: found
for i in range(100):
    pid = os.fork()
    if pid == 0:
        signal.setitimer(0, 0.001 + 0.002 * i)  # the kernel ends it: a handler of Python's can come late
        sandbox.run_tests(["while True: pass"], [["assert f(1) == 2"]], timeout_s=100, program_s=100)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    input()  # until the test has looked
"""


@pytest.mark.slow
@pytest.mark.parametrize("namespaces", [True, False])
def test_a_trainer_killed_at_any_moment(closed, layers, namespaces):
    if namespaces and not layers["namespaces"]:
        pytest.skip("this machine allows no namespaces")
    before, env = children(), os.environ | {"TMPDIR": tempfile.gettempdir()}
    command = [sys.executable, "-c", KILLED_LATER.format(namespaces=namespaces)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=env, **pipes) as trainers:
        for i in range(100):
            assert trainers.stdout.readline() == f"-{int(signal.SIGALRM)}\n"
            assert gone(children() - before - {trainers.pid}), i
            assert not [*Path(tempfile.gettempdir()).iterdir()], i
            print(file=trainers.stdin, flush=True)


# ---- what honest programs do, and what hostile values try: a program, a line of two dashes, a test ------------------

VECTOR = r"""
import functools
@functools.total_ordering
class V:
    def __init__(self, x, y=0): self.x, self.y = x, y
    def __add__(self, o): return V(self.x + (o.x if isinstance(o, V) else o), self.y)
    __radd__ = __add__
    def __mul__(self, k): return V(self.x * k, self.y * k)
    __rmul__ = __mul__
    def __iadd__(self, o): self.x += o.x if isinstance(o, V) else o; return self
    def __neg__(self): return V(-self.x, -self.y)
    def __invert__(self): return V(self.y, self.x)
    def __eq__(self, o): return isinstance(o, V) and (self.x, self.y) == (o.x, o.y)
    def __lt__(self, o): return self.x < o.x
    def __hash__(self): return hash((self.x, self.y))
    def __contains__(self, k): return k in (self.x, self.y)
    def __reversed__(self): return iter([self.y, self.x])
    def __divmod__(self, k): return divmod(self.x, k)
    def __index__(self): return self.x
    def __format__(self, spec): return f'<{self.x}{spec}>'
    def __iter__(self): return iter((self.x, self.y))
    def __len__(self): return 2
    def __getitem__(self, i): return (self.x, self.y)[i]
"""
AS_IN_PLAIN_PYTHON = r"""
import sys
def f(x): return x + 1
if __name__ == '__main__':
    print(f(1))
    sys.exit(0)
--
assert f(1) == 2
====
import sys
def f(x): return x + 1
def main(): return 0
if __name__ == '__main__':
    sys.exit(main())
--
assert f(1) == 2
====
import sys
def f(x): return x + 1
def main(): pass
if __name__ == '__main__':
    sys.exit(main())
--
assert f(1) == 2
====
import unittest
def f(x): return x + 1
class T(unittest.TestCase):
    def test(self): self.assertEqual(f(1), 2)
if __name__ == '__main__':
    unittest.main()
--
assert f(1) == 2
====
import json
def f(s): return json.loads(s)
--
import json
try:
    f('{')
except json.JSONDecodeError as e:
    assert e.pos == 1 and e.doc == '{'
else:
    assert False
====
import queue
def f(): queue.Queue().get_nowait()
--
import queue
try:
    f()
except queue.Empty: pass
else: assert False
====
import re
def f(s): return re.compile(s)
--
import re
try:
    f('(')
except re.error as e: assert 'missing )' in str(e)
else: assert False
====
import struct
def f(): struct.unpack('i', b'')
--
import struct
try:
    f()
except struct.error: pass
else: assert False
====
import dataclasses
@dataclasses.dataclass(frozen=True)
class P:
    x: int
--
import dataclasses
p = P(1)
try:
    p.x = 2
except dataclasses.FrozenInstanceError: pass
else: assert False
assert p == P(1) and len({P(1), P(1), P(2)}) == 2 and {P(1): 5}[P(1)] == 5
====
from decimal import Decimal
def f(): return Decimal('x')
--
import decimal
try:
    f()
except decimal.InvalidOperation: pass
else: assert False
====
import statistics
def f(): return statistics.mean([])
--
import statistics
try:
    f()
except statistics.StatisticsError: pass
else: assert False
====
import binascii
def f(): return binascii.unhexlify('x')
--
import binascii
try:
    f()
except binascii.Error: pass
else: assert False
====
import numpy as np
def f(): return np.linalg.inv(np.zeros((2, 2)))
--
import numpy as np
try:
    f()
except np.linalg.LinAlgError: pass
else: assert False
====
def f(): return b'\xff'.decode()
--
try:
    f()
except UnicodeDecodeError as e: assert e.start == 0 and e.encoding == 'utf-8'
else: assert False
====
def f(): raise ExceptionGroup('g', [ValueError(1), KeyError('k')])
--
try:
    f()
except* ValueError as g: assert g.exceptions[0].args == (1,)
except* KeyError: pass
else: assert False
====
def f(): raise ValueError('a', 3)
--
try:
    f()
except ValueError as e: assert e.args == ('a', 3)
else: assert False
====
def f(): return {}['k']
--
try:
    f()
except KeyError as e: assert str(e) == "'k'" and e.args == ('k',)
else: assert False
====
import errno, os
def f(): raise OSError(errno.ENOENT, 'no')
--
import errno
try:
    f()
except FileNotFoundError as e: assert e.errno == errno.ENOENT and e.strerror == 'no'
else: assert False
====
class E(Exception):
    def __init__(self, code, why):
        super().__init__(f'{code}: {why}')
        self.code = code
def f(): raise E(7, 'x')
--
try:
    f()
except E as e: assert e.code == 7 and str(e) == '7: x'
else: assert False
====
def f():
    yield 1
--
g = f()
assert next(g) == 1
try:
    next(g)
except StopIteration: pass
else: assert False
====
def f(): raise StopIteration(5)
--
try:
    f()
except StopIteration as e: assert e.value == 5
else: assert False
====
import sys
def f(): sys.exit(3)
--
try:
    f()
except SystemExit as e: assert e.code == 3
else: assert False
====
VECTOR
--
v = V(2, 3)
assert v * 3 == V(6, 9) and 3 * v == V(6, 9) and v + 1 == V(3, 3) and 1 + v == V(3, 3)
====
VECTOR
--
v = w = V(2, 3)
v += 1
assert v is w and w.x == 3
v += V(1)
assert w.x == 4
====
VECTOR
--
v = V(2, 3)
assert -v == V(-2, -3) and ~v == V(3, 2) and 3 in v and 4 not in v and list(reversed(v)) == [3, 2]
====
VECTOR
--
v = V(7, 3)
assert divmod(v, 2) == (3, 1) and [0] * 8 and 'abcdefgh'[v] == 'h' and f'{v:!}' == '<7!>'
====
VECTOR
--
assert {V(1, 2), V(1, 2), V(2)} == {V(2), V(1, 2)} and {V(1): 'a'}[V(1)] == 'a' and V(1) in [V(1)]
====
VECTOR
--
assert sorted([V(3), V(1)])[0] == V(1) and max(V(1), V(5)).x == 5 and sum([V(1), V(2)], V(0)) == V(3) and V(1) < V(2)
====
def f(xs=None): xs.append(1)
--
a = [0]
f(xs=a)
assert a == [0, 1]
====
def f(xs): xs.sort()
--
a = [3, 1, 2]
b = a
f(a)
assert b == [1, 2, 3] and b is a
====
def f(g): g[0].append(9)
--
row = [1]
g = [row, [2]]
f(g)
assert row == [1, 9] and g == [[1, 9], [2]]
====
def f(d): d.appendleft(0); d.pop()
--
from collections import deque
d = deque([1, 2], maxlen=5)
f(d)
assert list(d) == [0, 1] and d.maxlen == 5
====
def f(a): a *= 2
--
import numpy as np
a = np.arange(3)
b = a
f(a)
assert b.tolist() == [0, 2, 4]
====
class Box:
    def __init__(self, xs): self.xs = xs
    def sort(self): self.xs.sort()
--
xs = [3, 1]
b = Box(xs)
b.sort()
assert xs == [1, 3]
xs.append(0)
assert b.xs == [1, 3, 0]
b.xs.append(7)
assert xs == [1, 3, 0, 7] and b.xs == xs
====
def f(a, b):
    a.append(1)
    return a is b, b
--
x = []
assert f(x, x) == (True, [1]) and x == [1]
====
def f(d): d['k'] = d.pop('j'); d.setdefault('s', set()).add(1)
--
d = {'j': 2}
f(d)
assert d == {'k': 2, 's': {1}}
====
from collections import Counter, OrderedDict, defaultdict
def f(c, o, d):
    c['a'] += 1
    o.move_to_end('x')
    d['n'].append(1)
--
from collections import Counter, OrderedDict, defaultdict
c, o, d = Counter('ab'), OrderedDict(x=1, y=2), defaultdict(list)
f(c, o, d)
assert c == {'a': 2, 'b': 1} and list(o) == ['y', 'x'] and d == {'n': [1]}
====
class LRUCache(dict):
    def get(self, k): return super().get(k, -1)
    def put(self, k, v): self[k] = v
--
c = LRUCache()
c.put(1, 2)
assert c.get(1) == 2 and c.get(9) == -1 and len(c) == 1
====
def f(r): return math.pi * r
--
import math
assert math.isclose(f(2), 2 * math.pi)
====
def f(x): return x * 1.0000000001
from math import isclose
--
assert isclose(f(2.0), 2.0, rel_tol=1e-6)
"""
HOSTILE = r"""
def f(t):
    try: t.check = lambda *a: True
    except Exception: pass
    return 0
--
class T:
    def __init__(self): self.seen = []
    def check(self, x): return x == 42
t = T()
f(t)
assert t.check(f(1))
====
def f(t):
    try: type(t).check = lambda *a: True
    except Exception: pass
    return 0
--
class T:
    def __init__(self): self.seen = []
    def check(self, x): return x == 42
t = T()
f(t)
assert t.check(f(1))
====
def f(t):
    try: t.__class__ = object
    except Exception: pass
    return 0
--
class T:
    def __init__(self): self.seen = []
    def check(self, x): return x == 42
t = T()
f(t)
assert t.check(f(1))
====
isclose = lambda *a, **k: True
def f(x): return 0
--
assert isclose(f(2), 4.0)
====
allclose = lambda *a, **k: True
def f(x): return 0
--
assert allclose(f(2), 4.0)
====
def approx(x):
    class A:
        def __eq__(s, o): return True
    return A()
def f(x): return 0
--
assert f(2) == approx(4.0)
====
class S(str):
    def startswith(self, *a): return True
    def __len__(self): return 5
    def __contains__(self, x): return True
    def __getitem__(self, i): return 'a'
def f(x): return S('zz')
--
assert f(1).startswith('abc')
====
class S(str):
    def __len__(self): return 5
def f(x): return S('zz')
--
assert len(f(1)) == 5
====
class S(str):
    def __contains__(self, x): return True
def f(x): return S('zz')
--
assert 'q' in f(1)
====
class S(str):
    def __getitem__(self, i): return 'q'
def f(x): return S('zz')
--
assert f(1)[0] == 'q'
====
class S(str):
    def __iter__(self): return iter('abc')
def f(x): return S('zz')
--
assert list(f(1)) == ['a', 'b', 'c']
====
class L(list):
    def count(self, x): return 3
    def index(self, x): return 0
    def copy(self): return [1]
def f(x): return L([5])
--
assert f(1).count(4) == 3 or f(1).index(9) == 0
====
class A:
    def __sub__(s, o): return 0.0
    def __abs__(s): return 0.0
def f(x): return A()
--
assert abs(f(2) - 3.7) < 1e-6
====
class A:
    def __sub__(s, o): return 0.0
    __rsub__ = __truediv__ = __add__ = __mul__ = __mod__ = __sub__
    def __abs__(s): return 0.0
def f(x): return A()
--
assert abs(3.7 - f(2)) < 1e-6 or abs(f(2) + 3.0) < 1e-6 or abs(f(2) / 3 - 1) < 1e-6 or f(2) * 3 == 0
====
class f:
    def __init__(s, x): pass
    def __add__(s, o): return 0.0
    __radd__ = __mul__ = __add__
    def __contains__(s, x): return True
--
assert abs(f(2) + 3.0) < 1e-6 or 5 in f(2)
====
def f(x): raise StopIteration
--
for got, want in zip(map(f, [1, 2]), [2, 3]):
    assert got == want
====
def f(x): raise StopIteration
--
assert all(f(x) == x + 1 for x in [1, 2])
====
import unittest
def f(x): raise unittest.SkipTest('no')
--
import unittest
class T(unittest.TestCase):
    def test(self): self.assertEqual(f(1), 2)
r = unittest.TestResult()
unittest.defaultTestLoader.loadTestsFromTestCase(T).run(r)
assert r.wasSuccessful()
====
class SkipTest(Exception): pass
SkipTest.__module__ = 'unittest.case'
def f(x): raise SkipTest('no')
--
import unittest
class T(unittest.TestCase):
    def test(self): self.assertEqual(f(1), 2)
r = unittest.TestResult()
unittest.defaultTestLoader.loadTestsFromTestCase(T).run(r)
assert r.wasSuccessful()
====
import asyncio
async def f(x): raise asyncio.CancelledError
--
import asyncio
async def main():
    task = asyncio.ensure_future(f(1))
    try: await asyncio.wait_for(task, 1)
    except asyncio.CancelledError: return 'done'
assert asyncio.run(main()) == 'done'
====
class numpy: pass
class ndarray:
    class dtype:
        str = ','
        kind = 'f'
    shape = (1,)
    def tobytes(s): return b'1234'
ndarray.__module__ = 'numpy'
def f(x): return ndarray()
--
assert f(1) == 2
====
from decimal import Decimal
from fractions import Fraction
class F:
    numerator = Decimal('1e300000000')
    denominator = 1
F.__module__, F.__qualname__ = 'fractions', 'Fraction'
def f(x): return F()
--
assert f(1) == 2
====
M = (1 << 61) - 1
def f(x): return {i * M for i in range(1, 40001)}
--
assert f(1) == 2
====
def f(x): return [[[[0] * 1000] * 1000] * 1000]
--
assert f(1) == 2
====
xs = []
def f(a):
    xs.append(a)
    a.clear(); a.extend([1, 2, 3])
    return 0
--
want = [4, 5]
f([1])
assert f([2]) == want
====
def f(x):
    raise AssertionError
--
try:
    f(1)
except Exception as e:
    raise
assert f(1) == 2
====
class E(AssertionError): pass
def f(x): return 0
--
try:
    assert f(1) == 2
except E: pass
====
def f(x): return 0
E = Exception
--
try:
    assert f(1) == 2
except E: pass
"""


def cases_in(text):
    pairs = (case.strip("\n").split("\n--\n") for case in text.split("\n====\n"))
    return [(VECTOR if program == "VECTOR" else program, test) for program, test in pairs]


PLAIN = """
import json, sys, types
program, test = json.load(sys.stdin)
main = sys.modules["__main__"] = types.ModuleType("__main__")
try:
    exec(program, main.__dict__)
except SystemExit as end:
    assert not end.code
exec(test, main.__dict__)
"""


def test_honest_programs_pass_as_in_plain_python(layers):
    if not layers["namespaces"]:
        pytest.skip("asyncio and folders need namespaces")
    programs, tests = zip(*cases_in(AS_IN_PLAIN_PYTHON), strict=True)
    for program, test, result in zip(
        programs, tests, sandbox.run_tests(programs, [[t] for t in tests]), strict=True
    ):
        assert result.verdicts == ["pass"], (program, test, result)
        pair = json.dumps([program, test])
        plain = subprocess.run(
            [sys.executable, "-c", PLAIN], input=pair, text=True, capture_output=True
        )
        assert plain.returncode == 0, (program, test, plain.stderr)


def test_no_value_forges_a_verdict_or_holds_up_the_trainer(layers):
    for program, test in cases_in(HOSTILE):
        started = time.monotonic()
        (result,) = sandbox.run_tests([program], [[test]], timeout_s=2)
        assert result.rate == 0, (program, test, result)
        # the limit on the clock is three times as long
        assert time.monotonic() - started < 8, (program, test)


def test_much_output_costs_the_trainer_no_memory(layers):
    program = "import sys\nsys.stdout.write('\\0' * (64 << 20))"
    tracemalloc.start()
    (result,) = sandbox.run_tests(
        [program], [[sandbox.Stdin("", check="def right(printed): return False")]]
    )
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert result.verdicts == ["fail"]
    assert peak < 20_000_000


# ---- what the processes of one template share: its memory as it was before any program -------------------------------

SCAN = """
import ctypes, gc, os

def found(backwards):
    wanted, (read, write), hits = backwards.encode(), os.pipe(), 0
    near = {(id(each) >> 20) + i for each in gc.get_objects() for i in range(-16, 17)}
    for megabyte in sorted(near):  # a write from memory that is not there is an error, and no crash
        for address in range(megabyte << 20, megabyte + 1 << 20, 4096):
            try:
                os.write(write, (ctypes.c_char * 4096).from_address(address))
            except OSError:
                continue
            hits += os.read(read, 4096)[::-1].count(wanted)
    return hits
"""


def test_no_program_and_no_test_is_left_in_the_memory_of_the_next(closed):
    secret = "marked-" + "4711"
    earlier = f"text = {secret!r}\ndef f(x):\n    return x + 1\n"
    mine = "kept = 'mine-' + str(40 + 2)\n"
    tests = [["assert f(1) == 2", f"assert f(1) == 2 and {secret!r}"]]
    tests += [["assert found('24-enim') > 0", "assert found('1174-dekram') == 0"]]
    first, second = sandbox.run_tests(
        [earlier, SCAN + mine], tests, workers=1, timeout_s=20, program_s=60
    )
    assert (first.verdicts, second.verdicts) == (["pass"] * 2, ["pass"] * 2)


def test_random_numbers_differ_between_the_tests_of_a_program(closed):
    program = "import os, random, uuid\ndef f():\n    return random.random(), os.urandom(4), str(uuid.uuid4())\n"
    (result,) = sandbox.run_tests([program], [[sandbox.Probe("f()")] * 3], workers=1)
    for values in zip(*result.values, strict=True):
        assert len(set(values)) == 3


def test_no_state_of_a_test_is_left_for_the_next(closed):
    """Modules, builtins, caches, directories, signals: what a program changes is changed in its
    process alone.
    """
    program = """
import builtins, gc, linecache, math, os, re, signal, sys, warnings

def state():
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    more = [gc.isenabled(), sys.getrecursionlimit(), sys.getswitchinterval(), os.getcwd(), os.umask(0o22), str(mask)]
    more += [len(warnings.filters), len(linecache.cache), hasattr(math, "left"), hasattr(builtins, "left")]
    return more + [sorted(os.environ), signal.getsignal(signal.SIGUSR1) is print, len(sys.path), os.listdir(".")]

def change():
    gc.disable(); sys.setrecursionlimit(500); sys.setswitchinterval(1); os.umask(0)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1]); signal.signal(signal.SIGUSR1, print)
    warnings.simplefilter("error"); linecache.cache["x"] = (1, None, [], "x"); math.left = builtins.left = 1
    os.environ["LEFT"] = "1"; sys.path.append("left")
    open("left", "w").write("left"); os.mkdir("folder"); os.chdir("folder"); open("left", "w").write("left")
    return state()
"""
    tests = [sandbox.Probe("state()"), sandbox.Probe("change()"), sandbox.Probe("state()")]
    (result,), layers = sandbox.run_tests([program], [tests], workers=1), sandbox.layers()
    before, changed, after = result.values
    assert before == after
    if layers["namespaces"]:
        assert all(a != b for a, b in zip(before, changed, strict=True))


def test_the_files_of_a_test_are_those_of_its_program_and_gone_in_the_next(closed):
    program = "import os\ndef read(name):\n    return open(name).read()\ndef names():\n    return os.listdir('.')\n"
    test = "import os\nassert names() == os.listdir('.') == []\nopen('a', 'w').write('b')\nassert read('a') == 'b'"
    (result,) = sandbox.run_tests([program], [[test] * 6], workers=1)
    assert result.verdicts == ["pass"] * 6, result.values


def test_a_program_has_no_descriptors_but_its_own_pipes(closed):
    program = """
import os, stat

def kinds():
    found = []
    for fd in range(1024):
        try:
            found.append(stat.S_IFMT(os.fstat(fd).st_mode))
        except OSError:
            pass
    return [stat.S_ISCHR(kind) for kind in found] + [stat.S_ISFIFO(kind) for kind in found]
"""
    (result,) = sandbox.run_tests(
        [program], [["assert kinds() == [True] * 3 + [False] * 5 + [True] * 2"]]
    )
    assert result.verdicts == ["pass"], result.values


# ---- E2B, without a network ----------------------------------------------------------------------------------------


class Cloud(http.server.BaseHTTPRequestHandler):
    """What E2B's API, its sandboxes and an Open-R1 router answer; scripts are really run. State is
    in server.state.
    """

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, status, text=""):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def run(self, script):
        return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout

    def do_DELETE(self):
        self.server.state.killed.append(self.path.rpartition("/")[2])
        self.answer(204)

    def do_POST(self):
        body, state = (
            json.loads(self.rfile.read(int(self.headers["Content-Length"]))),
            self.server.state,
        )
        status = state.failures.pop(0) if state.failures else 0
        if status:
            self.answer(status, json.dumps({"code": status, "message": "later"}))
        elif self.path == "/v2/sandboxes":
            state.created.append(body)
            names = {
                "sandboxID": f"sandbox{len(state.created)}",
                "templateID": "t",
                "clientID": "c",
            }
            self.answer(201, json.dumps(names | {"envdVersion": "0.4.0"}))
        elif self.path == "/execute":
            state.scripts.append(body["code"])
            out = self.run(body["code"]) if state.works else "no report"
            parts = [out[:50], out[50:], ""]  # standard output comes in parts
            self.answer(
                200,
                "".join(
                    json.dumps({"type": "stdout", "text": p, "timestamp": 1}) + "\n" for p in parts
                ),
            )
        elif self.path == "/execute_batch":
            state.scripts += body["scripts"]
            execution = {
                "results": [],
                "logs": {"stdout": [], "stderr": []},
                "error": None,
                "execution_count": 1,
            }
            answers = []
            for script in body["scripts"]:
                execution["logs"]["stdout"] = [self.run(script)]
                failed = {"execution": None, "exception_str": "no sandbox"}
                answers.append(
                    {"execution": execution, "exception_str": None} if state.works else failed
                )
            self.answer(200, json.dumps(answers))
        else:
            self.answer(404)


@pytest.fixture
def cloud(layers, monkeypatch):
    """serve(port) starts a server and returns its state; there is a key, and waits between tries
    are short.
    """
    servers = []

    def serve(port=0):
        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Cloud)
        server.state = types.SimpleNamespace(
            failures=[], created=[], killed=[], scripts=[], works=True
        )
        server.state.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return server.state

    monkeypatch.setenv("E2B_API_KEY", "e2b_" + "0" * 40)
    monkeypatch.setattr(sandbox.random, "uniform", lambda low, high: 0.01)
    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


E2B_CASES = {  # program: its rate for the three tests f(1) == 2, f(5) == 6 and a loop over both
    GOOD: 1,
    "def f(x): return 2": 2 / 3,
    "import os\nos._exit(0)": 0,
    "class A:\n    def __eq__(self, other): return True\ndef f(x): return A()": 0,
    "print('__PASS_RATE__ 1.0')": 0,
    "import os\nos.kill(os.getppid(), 9)": 0,
}
E2B_TESTS = [*VALUE, "for x in (1,):\n    assert f(x) == 2"]


@pytest.fixture
def e2b():
    pytest.importorskip("e2b_code_interpreter", reason="needs pip install e2b-code-interpreter")
    return pytest.importorskip("e2b")


def test_e2b_in_debug_mode_runs_the_same_harness(closed, cloud, e2b, monkeypatch):
    monkeypatch.setenv("E2B_DEBUG", "true")
    state = cloud(49999)
    state.failures = [0, 429, 0, 429]
    results = sandbox.run_tests([*E2B_CASES], [E2B_TESTS] * len(E2B_CASES), runner="e2b")
    assert [result.rate for result in results] == pytest.approx([*E2B_CASES.values()])
    assert len(state.scripts) == len(E2B_CASES)
    state.works = False
    (result,) = sandbox.run_tests([GOOD], [VALUE], runner="e2b")
    assert result.rate is None
    assert "no report" in result.error


def test_e2b_makes_one_sandbox_per_worker_without_internet_and_ends_it(
    closed, cloud, e2b, monkeypatch
):
    state = cloud()
    monkeypatch.setenv("E2B_API_URL", state.url)
    monkeypatch.setenv("E2B_SANDBOX_URL", state.url)
    monkeypatch.setenv("E2B_HTTP_VERSION", "1.1")
    monkeypatch.delenv("E2B_DEBUG", raising=False)
    state.failures = [429] * 5 + [0, 0, 502]
    results = sandbox.run_tests([*E2B_CASES], [E2B_TESTS] * len(E2B_CASES), runner="e2b", workers=1)
    assert [result.rate for result in results] == pytest.approx([*E2B_CASES.values()])
    assert len(state.created) == 2  # the first was lost at the 502
    assert len(state.killed) == 2
    for body in state.created:
        assert body["allow_internet_access"] is False or body["allowInternetAccess"] is False
    state.failures = [500] * 100
    (result,) = sandbox.run_tests([GOOD], [VALUE], runner="e2b")
    assert result.rate is None
    assert "500" in result.error


def test_e2b_without_a_key_is_one_line(closed, e2b, monkeypatch):
    for name in ("E2B_API_KEY", "E2B_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match=r"E2B: .*key"):
        sandbox.run_tests([GOOD], [VALUE], runner="e2b")


def test_a_router_of_open_r1_runs_the_same_harness(closed, cloud):
    state = cloud()
    url = state.url.removeprefix("http://")
    results = sandbox.run_tests(
        [*E2B_CASES], [E2B_TESTS] * len(E2B_CASES), runner="e2b", e2b_router_url=url
    )
    assert [result.rate for result in results] == pytest.approx([*E2B_CASES.values()])
    state.works = False
    assert sandbox.run_tests([GOOD], [VALUE], runner="e2b", e2b_router_url=url)[0].error.endswith(
        "no sandbox"
    )
    (result,) = sandbox.run_tests([GOOD], [VALUE], runner="e2b", e2b_router_url="127.0.0.1:1")
    assert (result.rate, result.verdicts) == (None, [])


# ---- rewards -------------------------------------------------------------------------------------------------------


def fenced(program):
    return f"Here it is:\n```python\n{program}```\n"


def test_all_rewards_share_one_signature(closed, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "def brevity(completions, rows, **options):\n    return [-len(text) for text in completions]\n"
    )
    completions = [fenced(GOOD), "", "no code"]
    rows = [{"test_cases": VALUE, "tokens": 10}] * 3
    got = {
        n: sandbox.find_reward(n)(completions, rows) for n in [*sandbox.REWARDS, f"{own}:brevity"]
    }
    assert got.pop(f"{own}:brevity") == [-len(text) for text in completions]
    assert got == {
        "code": [1, 0, 0], "binary_code": [1, 0, 0], "code_format": [1, 0, 0], "syntax": [1, 1, 0],
    }  # fmt: skip
    for wrong in ("speed", f"{own}:speed", "missing.py:f"):
        with pytest.raises(ValueError, match=r"speed|no reward"):
            sandbox.find_reward(wrong)
    with pytest.raises(TypeError, match="strict"):
        sandbox.code_format(completions, rows, strict=False)


def test_one_failure_of_101_is_a_failure(monkeypatch):
    monkeypatch.setattr(
        sandbox, "code", lambda completions, rows, **options: [100 / 101, 1.0, None]
    )
    assert sandbox.binary_code([], []) == [0, 1, None]


def test_rewards_are_none_where_the_sandbox_failed(closed, monkeypatch):
    run, unlucky = sandbox.Template.run, "unlucky"

    def fails(template, tests, program_s):
        if unlucky in tests[0][2]["program"]:
            raise sandbox.SandboxError("no luck")
        return run(template, tests, program_s)

    monkeypatch.setattr(sandbox.Template, "run", fails)
    completions = [fenced(GOOD), fenced("unlucky = 1\n"), "prose", fenced("def")]
    rows = [{"test_cases": VALUE}] * 4
    assert sandbox.code(completions, rows) == [1, None, 0, 0]
    assert sandbox.binary_code(completions, rows) == [1, None, 0, 0]
    unlucky = ""
    assert sandbox.code_format(completions, rows) == [None, None, 0, None]
    assert sandbox.code(completions, rows) == [None, None, 0, None]
    assert sandbox.syntax(completions, rows) == [None] * 4


BREAKS_THE_PARSER = {
    "no byte": "x = '\0'",
    "no byte at the end": "x = 1\0",
    "surrogate": "x = '\ud800'",
    "unary": "x = " + "-" * 100_000 + "1",
    "unary words": "x = " + "not " * 100_000 + "1",
    "parentheses": "(" * 100_000 + ")" * 100_000,
    "attributes": "x" + ".a" * 400_000,  # ends Python 3.10 by a segmentation fault
    "sums": "1" + "+1" * 400_000,
    "lambdas": "lambda:" * 100_000 + "1",
    "encoding": "# -*- coding: nonsense -*-\nx = 1 é",
    "blocks": "".join(" " * i + "if x:\n" for i in range(150)),
    "ten megabytes": "x = [" + "[]," * 3_400_000 + "]",
    "large number": "x = " + "9" * 5000,
}


@pytest.mark.parametrize("longest", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_failure_of_the_parser_escapes(closed, longest):
    sources = [
        *(
            source
            for name, source in BREAKS_THE_PARSER.items()
            if longest or name != "ten megabytes"
        ),
        "x = 1",
    ]
    rewards = sandbox.code_format(
        [fenced(source + "\n") for source in sources], [{}] * len(sources)
    )
    assert rewards[-1] == 1
    assert set(rewards[:-1]) <= {0.5, 1.0}
    assert rewards.count(0.5) >= len(sources) - 4


# ---- command line --------------------------------------------------------------------------------------------------


def files(tmp_path, program, tests):
    """A program and its tests as files: what main() and the command take."""
    (tmp_path / "program.py").write_text(program)
    (tmp_path / "tests.txt").write_text(tests)
    return tmp_path / "program.py", tmp_path / "tests.txt"


def test_the_command_prints_a_verdict_for_every_test(layers, tmp_path):
    program, tests = files(
        tmp_path, GOOD, "assert f(1) == 2\n\nfor x in (1, 2):\n    assert f(x) == 2\n"
    )
    done = run("sandbox.py", program, f"--tests={tests}", "--timeout_s=2")
    expected = ["pass         assert f(1) == 2", "fail         for x in (1, 2):", "1 of 2 passed"]
    assert done.stdout.splitlines() == expected
    assert done.returncode == 1
    assert done.stderr.startswith("sandbox: ")
    misspelt = run("sandbox.py", program, f"--tests={tests}", "--timeout=2")
    missing = run("sandbox.py", program, "--tests=missing.txt")
    assert misspelt.returncode == 2
    said = "[Errno 2] No such file or directory: 'missing.txt'\n"
    assert (missing.returncode, missing.stderr) == (1, said)
    assert "Traceback" not in misspelt.stderr + missing.stderr


def test_values_are_shown_and_the_exit_status_says_whether_all_passed(layers, tmp_path, capsys):
    power = "def f(x):\n    return x ** 9999"
    assert (
        sandbox.main(
            *files(tmp_path, power, "assert f(1) == 1\nassert f(-1) == 1\nassert f(9) == 1")
        )
        == 1
    )
    expected = ["fail         assert f(-1) == 1    # got -1", "fail         assert f(9) == 1"]
    assert capsys.readouterr().out.splitlines()[1:3] == expected
    same = files(
        tmp_path, "def f(x):\n    return x", "assert f('a\u2028b\x0c') == 'a\\u2028b\\x0c'\n"
    )
    assert sandbox.main(*same) == 0
    marked = files(tmp_path, "\ufeff" + GOOD, "\ufeffassert f(1) == 2\n")  # byte order marks
    assert sandbox.main(*marked, sandbox.Options(timeout_s=2)) == 0
    good = files(tmp_path, GOOD, "assert f(1) == 2\n")
    assert sandbox.main(*good, sandbox.Options(timeout_s=2)) == 0
    assert sandbox.main(*good, sandbox.Options(runner="e2b", e2b_router_url="127.0.0.1:1")) == 2
    for nothing in ("\n", "# only a comment\n"):
        with pytest.raises(ValueError, match="holds no tests"):
            sandbox.main(*files(tmp_path, GOOD, nothing))


def test_with_json_the_command_prints_an_object_for_every_test(layers, tmp_path):
    tests = (
        "assert f(1) == 2\nfor x in (1, 2):\n    assert f(x) == 2\nassert f(1) == 'a\x1b'\nf()\n"
    )
    paths = files(tmp_path, GOOD, tests)
    done = run("sandbox.py", paths[0], f"--tests={paths[1]}", "--json")
    *rows, last = map(json.loads, done.stdout.splitlines())
    missing = "TypeError: f() missing 1 required positional argument: 'x'"
    assert rows == [
        {"verdict": "pass", "test": "assert f(1) == 2", "got": None},
        {"verdict": "fail", "test": "for x in (1, 2):\n    assert f(x) == 2", "got": None},
        {"verdict": "fail", "test": "assert f(1) == 'a\x1b'", "got": "2"},
        {"verdict": "fail", "test": "f()", "got": missing},
    ]
    assert last == {"passed": 1, "tests": 4, "rate": 0.25, "error": ""}
    assert done.returncode == 1
    flags = ["--json", "--runner=e2b", "--e2b_router_url=127.0.0.1:1"]
    failed = run("sandbox.py", paths[0], f"--tests={paths[1]}", *flags)
    (row,) = map(json.loads, failed.stdout.splitlines())
    assert (row["rate"], failed.returncode) == (None, 2)
    assert "Connection refused" in row["error"]
