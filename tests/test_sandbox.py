"""The sandbox: every known attack, verdicts, infrastructure failures, Ctrl-C, E2B without a network, and the rewards."""

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import sandbox

ROOT = Path(__file__).resolve().parent.parent
VALUE = ["assert f(1) == 2", "assert f(5) == 6"]
TOKEN = ["for y in [2]:\n    assert f(1) == y", "for y in [6]:\n    assert f(5) == y"]
FAIL, TIMEOUT, MEMORY, OUTPUT, PASS = (
    [outcome] * 2 for outcome in ("fail", "timeout", "memory", "output limit", "pass")
)
GOOD = "def f(x):\n    return x + 1\n"

# name, beginning with the row of the table of attacks: program, its verdicts for f(1) == 2 and f(5) == 6. VICTIM is a folder
# outside, PORT a listening port, SOCKET an abstract address, TRAINER the process id of whoever runs the tests.
# An attack that is swallowed (try, except) before a right answer passes: there the damage is what is looked at.
ATTACKS = {
    "1 fork bomb": ("import os\nwhile True:\n    os.fork()", FAIL),
    "1 fork bomb that goes on": (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass", TIMEOUT),
    "1 subprocess": ("import subprocess\nsubprocess.run(['true'])\n" + GOOD, FAIL),
    "1 multiprocessing": ("import multiprocessing\nmultiprocessing.Process(target=print).start()\n" + GOOD, FAIL),
    "1 system": ("import os\nassert os.system('true') == 0\n" + GOOD, FAIL),
    "1 clone by number": (
        "import ctypes, os\nfor call in (56, 57, 58, 435, 220):\n    ctypes.CDLL(None).syscall(call, 17, 0, 0, 0, 0)\n"
        "import time\ntime.sleep(0.1)\n" + GOOD, PASS),
    "2 threads": ("import threading\nfor _ in range(100000):\n    threading.Thread(target=input).start()\n" + GOOD, FAIL),
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
    "13 limits of the trainer": ("import resource\nresource.prlimit(TRAINER, resource.RLIMIT_AS, (1, 1))\n" + GOOD, FAIL),
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
        "import os\ndef f(x):\n    for fd in range(64):\n        try:\n            os.write(fd, b'=' + b'0' * 32 + b'{}')\n"
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
        "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
        "        for name, value in frame.f_locals.items():\n            if name == 'test':\n"
        "                frame.f_locals['write'](frame.f_locals['pipe'], value['token'].encode() + b'{\"i\": \"0\"}')\n"
        "                frame.f_locals['leave'](0)\n        frame = frame.f_back", FAIL),
    "20 expected value in memory": (
        "import gc\nfound = any('=' + '= 2' in text for thing in gc.get_objects() for text in (thing.values() if isinstance("
        "thing, dict) else []) if isinstance(text, str))\ndef f(x): return x + 1 if found else None", FAIL),
    "21 recursion": ("def f(x): return f(x)", FAIL),
    "21 recursion in C": (
        "import sys\nsys.setrecursionlimit(10**9)\nx = []\nfor _ in range(200000): x = [x]\nrepr(x)\ndef f(x): pass", FAIL),
    "21 segmentation fault": ("import ctypes\nctypes.string_at(0)", FAIL),
    "21 abort": ("import os\nos.abort()", FAIL),
    "22 daemon": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(3)\n"
        "        open('VICTIM/late', 'w')\n    os._exit(0)\n" + GOOD, FAIL),
    "23 link out of the folder": (
        "import os\nos.symlink('VICTIM', 'l')\ntry:\n    open('l/x', 'w')\nexcept OSError:\n    pass\n" + GOOD, PASS),
    "24 many files": (
        "for i in range(100000):\n    open(str(i), 'w').write('x' * 1000000)", None),
    "24 one large file": (
        "import os\nwith open('x', 'wb') as file:\n    for _ in range(100000):\n        file.write(bytes(1000000))", FAIL),
    "24 deep folders": ("import os\nfor i in range(3000):\n    os.mkdir('d')\n    os.chdir('d')\n" + GOOD, None),
    "24 unreadable folder": ("import os\nos.makedirs('a/b')\nos.umask(0o777)\nos.mkdir('a/b/c')\n" + GOOD, PASS),
    "25 large value": ("def f(x): return ' ' * (256 << 20)", OUTPUT),
    "25 large number": ("def f(x): return 1 << 10**8", OUTPUT),
    "25 many items": ("def f(x): return [0] * 10**7", OUTPUT),
    "25 deep list": ("x = []\nfor _ in range(10**6): x = [x]\ndef f(_): return x", FAIL),
    "25 list in itself": ("x = []\nx.append(x)\ndef f(_): return x", FAIL),
    "25 endless pipe": (
        "import os\nwhile True:\n    for fd in range(3, 64):\n        try:\n            os.write(fd, b'x' * 60000)\n"
        "        except OSError:\n            pass", OUTPUT),
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


def children():
    """Process ids of the children of this process, zombies too; it adopts orphans (see `closed`)."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has just ended
            found |= {*(task / "children").read_text().split()}
    return found


@pytest.fixture(scope="session")
def layers():
    """Without these, the attacks below are not for this machine."""
    try:
        found = sandbox.layers()
    except sandbox.SandboxError as error:
        pytest.fail(f"no sandbox: {error}")
    if not (found["seccomp"] and (found["namespaces"] or found["landlock"])):
        pytest.skip("this machine cannot close in a program: no seccomp, or neither namespaces nor Landlock")
    program = "import os\ntry:\n    os.fork()\nexcept PermissionError:\n    refused = True"
    (result,) = sandbox.run_tests([program], [["assert refused"]])
    assert result.rate == 1, "seccomp refuses no fork: no fork bombs here"
    return found


@pytest.fixture
def closed(layers, tmp_path, monkeypatch):
    """A victim outside the sandbox; afterwards it is as it was, and no process, file or connection is left.

    fill(program) puts its addresses into an attack.
    """
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become our children
    victim, scratch = tmp_path / "victim", tmp_path / "scratch"
    victim.mkdir()
    scratch.mkdir()
    (victim / "secret.txt").write_text("the secret")
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    monkeypatch.setenv("UNMASK_KEY", "the key")
    name = f"unmask-{os.getpid()}"
    tcp, udp = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", tcp.getsockname()[1]))
    abstract, stream = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM), socket.socket(socket.AF_UNIX)
    abstract.bind("\0" + name)
    stream.bind(str(victim / "socket"))
    stream.listen()
    words = {"VICTIM": str(victim), "PORT": str(tcp.getsockname()[1]), "SOCKET": name, "TRAINER": str(os.getpid())}

    def state():
        paths = [victim, *sorted(victim.rglob("*"))]
        return [(p, *p.lstat()[:7], p.lstat().st_mtime, p.read_text() if p.is_file() else "") for p in paths]

    def fill(program):
        for word, text in words.items():
            program = program.replace(word, text)
        return program

    before, ours = state(), children()
    priority, processors = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0)
    yield fill
    assert state() == before
    assert children() <= ours
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
def test_attack(name, closed):
    program, verdicts = ATTACKS[name]
    started = time.perf_counter()
    (result,) = sandbox.run_tests([closed(program)], [VALUE], timeout_s=1, memory_mb=512)
    assert verdicts is None or result.verdicts == verdicts, result
    assert result.rate is not None, result
    assert time.perf_counter() - started < 4


NO_NAMESPACES = {
    "12 datagram from a socketpair": FAIL,
    "24 many files": OUTPUT,
    "24 deep folders": FAIL,
    "24 unreadable folder": FAIL,
}
HOLES = {  # of verdicts by token
    "18 equal to anything": PASS,
    "18 integer equal to anything": PASS,
    "18 string that prints as a number": PASS,
    "18 class that says it is int": PASS,
    "18 evil tolist": PASS,
}


@pytest.mark.parametrize("mode", ["no namespaces", "no Landlock", "token"])
def test_attacks(mode, closed, layers, monkeypatch):
    tests, differ = VALUE, {}
    if mode == "no namespaces":
        if not layers["landlock"]:
            pytest.skip("this machine has no Landlock")
        monkeypatch.setattr(sandbox, "layers", lambda: layers | {"namespaces": False})
        differ = NO_NAMESPACES
    elif mode == "no Landlock":
        if not layers["namespaces"]:
            pytest.skip("this machine allows no namespaces")
        assert sandbox.LAUNCHER.count("landlock >= 3") == 1
        monkeypatch.setattr(sandbox, "LAUNCHER", sandbox.LAUNCHER.replace("landlock >= 3", "landlock >= 99"))
    else:
        tests, differ = TOKEN, HOLES
    programs = [closed(program) for program, _ in ATTACKS.values()]
    results = sandbox.run_tests(programs, [tests] * len(programs), timeout_s=2, memory_mb=512, workers=3)
    expected = {name: differ.get(name, verdicts) for name, (_, verdicts) in ATTACKS.items()}
    got = {name: result.verdicts or result.error for name, result in zip(ATTACKS, results, strict=True)}
    wrong = {name: outcome for name, outcome in got.items() if outcome != (expected[name] or outcome)}
    assert not wrong, wrong
    assert None not in [result.rate for result in results]
