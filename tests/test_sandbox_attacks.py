"""More attacks on the sandbox, one table per class; a name of a table is the id of its test.

A program here never computes what its test asks for. After every attack an honest program runs in
the same template.
"""

import os
import threading
import time
from pathlib import Path

import pytest

import problems
import sandbox
from jail import inside

pytestmark = pytest.mark.slow

GOOD = "def f(x):\n    return x + 1\n"
LIMITS = {"timeout_s": 3.0, "memory_mb": 512, "disk_mb": 8, "workers": 1}
X86 = pytest.mark.skipif(
    os.uname().machine != "x86_64", reason="the numbers of calls are those of x86-64"
)


@pytest.fixture(scope="module", autouse=True)
def layers():
    """Without these, the attacks below are not for this machine."""
    found = sandbox.layers()
    if not (found["seccomp"] and found["namespaces"] and found["landlock"]):
        pytest.skip("this machine lacks a layer")
    return found


# What still succeeds. "plain": a program does the same in plain Python, or in the executors of the
# benchmarks.
KNOWN = {
    "own array comparison of another name": "a test that calls a comparison that it does not import; plain",
    "own isclose beside a function named as a builtin": "a test that calls a comparison that it does not import; plain",
    "own abs beside a function named as a builtin": "a test that calls the program's abs; plain",
    "unbound method of a builtin": "a test that gives str.format away",
    "class of getters of attributes": "a test that gives operator.attrgetter away",
    "formatter of the test's own class": "a test that gives a string.Formatter away",
    "number that is made when the answer is known": "the value of an int subclass is read when it is looked at; plain",
    "function in upper case that holds all": "what a capitalised callable makes has its own operators; plain",
    "function in upper case that adds nothing": "what a capitalised callable makes has its own operators; plain",
    "function in upper case with methods of its own": "what a capitalised callable makes has its own methods; plain",
    "empty array and approx": "pytest.approx holds for an empty array; plain",
    "empty list and allclose": "numpy.allclose holds for an empty list; plain",
    "empty list and assert_allclose": "numpy.testing.assert_allclose holds for an empty list; plain",
    "array that broadcasts to nothing": "numpy.allclose broadcasts; plain",
    "list of an empty list": "EvalPlus' rule for lists of floats, which is kept",
    "locks of one another": "record locks on /dev/null are the machine's",
    "locks on Python's files": "record locks on files of the library are the machine's",
    "number of the process": "process ids count the tests of a template",
    "variable of the template": "a program may see how many tests it has run",
    "test_number_of_threads": "--threads has no limit of its own but memory",
    "test_seconds_that_are_too_few": "the seconds of a call are the program's; the limits are the template's",
}


@pytest.fixture(autouse=True)
def known(request):
    case = request.node.name.partition("[")[2].removesuffix("]") or request.node.name
    if case in KNOWN:
        request.applymarker(
            pytest.mark.xfail(strict=True, raises=AssertionError, reason=KNOWN[case])
        )


def attack(program, *tests, **options):
    """The Result of a program; an honest one passes after it."""
    programs, cases = [program, GOOD], [[*tests], ["assert f(1) == 2"]]
    result, good = sandbox.run_tests(programs, cases, **(LIMITS | options))
    assert result.rate is not None, result
    assert good.verdicts == ["pass"], good
    return result


# What a program does to get at the two pipes and the operations of its own end.
HOOK = """
import json, os, sys
frame = sys._getframe()
while 'pipe' not in frame.f_locals:
    frame = frame.f_back
WRITE, READ = frame.f_locals['pipe'], frame.f_locals['read']
class Kept(dict):  # what the program has put there stays when the launcher puts its own
    def __setitem__(self, name, value):
        if name not in self or name not in ('names', 'evaluate', 'timed'):
            dict.__setitem__(self, name, value)
    def update(self, **more):
        for name in more:
            self[name] = more[name]
OPS = frame.f_globals['OPERATIONS'] = sys.modules['jail.wire'].OPERATIONS = Kept(frame.f_globals['OPERATIONS'])
"""
# A program that is the other end itself. It offers OFFERS, and tell(operation, arguments) answers
# all else.
TALK = (
    HOOK
    + """
LINES, F, NOTHING = open(READ, 'rb'), {"yours": [0, False]}, {"d": []}
def say(*message):
    os.write(WRITE, json.dumps(message).encode() + bytes([10]))
def got(value, changed=(), forgotten=()):
    say('got', value, [*changed], [*forgotten])
def hear():
    line = LINES.readline()
    return json.loads(line) if line else os._exit(0)
def serve(tell, offers={"f": F}):
    os.write(WRITE, b'=')
    while True:
        kind, content, *news = hear()
        if kind == 'ask' and content[0] == 'evaluate':
            got(None)
        elif kind == 'ask' and content[0] == 'names':
            got({"d": [[name, form] for name, form in offers.items() if name in content[1]]})
        else:
            tell(kind, content)
def always(value, **news):
    serve(lambda kind, content: got(value, **news))
"""
)
# Python that writes the judge's token, if it runs where the test does.
TAKES_TOKEN = """
import os, sys
frame = sys._getframe()
while frame and "token" not in (frame.f_locals.get("request") or {}):
    frame = frame.f_back
frame.f_locals["give"](frame.f_locals["request"]["token"].encode() + b'["pass", null]')
os._exit(0)
"""
EQUAL = "assert f(1) == 2"

# ---- forging by what Python lets an object or a program do ----------------------------------------------------------
FORGING = {  # name: program, test
    # the process and its frames
    "judge found by gc": (
        "import gc\ndef f(x):\n    for held in gc.get_objects():\n        if type(held).__name__ == 'Peer':\n"
        "            held.permits = None\n            held.send('got', True)\n    return None", EQUAL),
    "return value changed by a trace of the caller": (
        "import sys\ndef tracer(frame, event, arg):\n    for name in ('value', 'reply', 'verdict'):\n"
        "        if name in frame.f_locals:\n            frame.f_locals[name] = 'pass'\n    return tracer\n"
        "sys.settrace(tracer)\nf0 = sys._getframe()\nwhile f0:\n    f0.f_trace = tracer\n    f0 = f0.f_back\n"
        "def f(x): return None", EQUAL),
    "profile function that leaves": (
        "import os, sys\ndef f(x): return None\nsys.setprofile(lambda *a: os._exit(0))", EQUAL),
    "audit hook that leaves": (
        "import os, sys\ndef f(x): return open('x', 'w')\nsys.addaudithook(lambda *a: os._exit(0))", EQUAL),
    "code object of the loop replaced": (
        "import gc, types\nfor held in gc.get_objects():\n    if isinstance(held, types.FunctionType):\n"
        "        if held.__name__ in ('answer', 'wire', 'contents'):\n"
        "            held.__code__ = (lambda *a, **k: True).__code__\ndef f(x): return None", EQUAL),
    "operations replaced": (
        HOOK + "for name in list(OPS):\n    if name not in ('names', 'evaluate'):\n"
        "        OPS[name] = lambda *a, **k: True\ndef f(x): return None", EQUAL),
    "verdict as a value": ("def f(x): return ['pass', None]", EQUAL),
    "verdict printed to every file with a guess of the token": (
        "import os\ndef f(x):\n    for fd in range(64):\n        try:\n"
        "            os.write(fd, b'0' * 32 + b'[\"pass\", null]')\n        except OSError:\n            pass", EQUAL),
    "status zero by a signal handler": (
        "import os, signal\nsignal.signal(signal.SIGPIPE, lambda *a: os._exit(0))\nos.closerange(3, 64)\n"
        "def f(x): return 0", EQUAL),
    "interval timer that writes while the judge waits": (
        HOOK + "import signal, time\ndef late(*a):\n    os.write(WRITE, b'[\"got\", 2, [], []]' + bytes([10]))\n"
        "    os._exit(0)\nsignal.signal(signal.SIGALRM, late)\n"
        "def f(x):\n    signal.setitimer(signal.ITIMER_REAL, 0.05)\n    time.sleep(0.5)\n", "assert f(1) == 3"),
    "exit by the interpreter's end": ("import ctypes\ndef f(x): ctypes.pythonapi.Py_Exit(0)", EQUAL),
    "finalize the interpreter": ("import ctypes\ndef f(x): ctypes.pythonapi.Py_FinalizeEx()", EQUAL),
    "long jump out by an asynchronous exception": (
        "import ctypes, threading\ndef f(x):\n    ctypes.pythonapi.PyThreadState_SetAsyncExc(\n"
        "        ctypes.c_ulong(threading.get_ident()), ctypes.py_object(SystemExit))\n    return None", EQUAL),
    "immortal small integers changed": (
        "import ctypes\ndef f(x):\n    ctypes.memset(id(2) + 24, 1, 1)\n    return 1", EQUAL),
    "None made equal by its type": (
        "import ctypes\ndef f(x):\n    ctypes.c_ssize_t.from_address(id(None) + 8).value = id(int)\n    return None",
        EQUAL),
    "method of int replaced": (
        "import ctypes, gc\nfor held in gc.get_referents(int.__dict__):\n    if isinstance(held, dict):\n"
        "        held['__eq__'] = lambda *a: True\ndef f(x): return 0", EQUAL),
    "memory of neighbours by address": (
        "import ctypes\ndef f(x):\n    for at in range(0x7f0000000000, 0x7f0000100000, 4096):\n"
        "        ctypes.memset(at, 65, 8)", EQUAL),
    # values
    "metaclass that answers every comparison": (
        "class M(type):\n    __eq__ = __ne__ = __lt__ = __le__ = __instancecheck__ = lambda *a: True\n"
        "    __hash__ = lambda s: 2\nclass C(metaclass=M): pass\ndef f(x): return C", EQUAL),
    "class that inherits from int and hides it": (
        "class A(int):\n    __class__ = property(lambda s: type(None))\n    __index__ = __int__ = lambda s: 2\n"
        "    __eq__ = lambda s, o: True\n    __hash__ = int.__hash__\ndef f(x): return A(9)", EQUAL),
    "index says two": (
        "class A:\n    __index__ = __int__ = __trunc__ = lambda s: 2\ndef f(x): return A()", EQUAL),
    "float subclass that formats as two": (
        "class A(float):\n    __format__ = __str__ = __repr__ = lambda *a: '2'\ndef f(x): return A(3)",
        "assert f'{f(1)}' == '2'"),
    "string subclass whose join is right": (
        "class S(str):\n    def join(s, x): return 'ok'\n    def split(s, *a): return ['ok']\ndef f(x): return S('no')",
        "assert f(1).join(['a']) == 'ok' or f(1).split() == ['ok']"),
    "tuple subclass with own items": (
        "class T(tuple):\n    __getitem__ = lambda s, i: 2\n    __len__ = lambda s: 1\n    __iter__ = lambda s: "
        "iter([2])\n"
        "def f(x): return T([5])", "assert f(1)[0] == 2 or list(f(1)) == [2] or f(1) == (2,)"),
    "dict subclass with own get": (
        "class D(dict):\n    def get(s, *a): return 2\n    __getitem__ = __missing__ = lambda s, k: 2\n"
        "    def items(s): return [('a', 2)]\ndef f(x): return D()",
        "d = f(1)\nassert d.get('a') == 2 or d['a'] == 2 or list(d.items()) == [('a', 2)]"),
    "set subclass that holds everything": (
        "class S(set):\n    __contains__ = issuperset = __ge__ = lambda *a: True\ndef f(x): return S()",
        "assert 2 in f(1) or f(1) >= {2} or f(1).issuperset({2})"),
    "bytes subclass that starts with all": (
        "class B(bytes):\n    startswith = endswith = __contains__ = lambda *a: True\ndef f(x): return B(b'no')",
        "assert f(1).startswith(b'x') or b'x' in f(1)"),
    "named tuple with a field that is a property": (
        "import collections\nclass P(collections.namedtuple('P', 'x')):\n    __slots__ = ()\n"
        "    __eq__ = lambda s, o: True\n    __hash__ = tuple.__hash__\ndef f(x): return P(0)", "assert f(1) == (2,)"),
    "enum member equal to all": (
        "import enum\nclass E(enum.IntEnum):\n    A = 0\n    def __eq__(s, o): return True\n    __hash__ = "
        "int.__hash__\n"
        "def f(x): return E.A", EQUAL),
    "fraction subclass": (
        "import fractions\nclass Q(fractions.Fraction):\n    __eq__ = lambda s, o: True\n"
        "    __hash__ = fractions.Fraction.__hash__\ndef f(x): return Q(1, 3)", EQUAL),
    "decimal subclass": (
        "import decimal\nclass Q(decimal.Decimal):\n    __eq__ = __sub__ = lambda s, o: True\n"
        "    __hash__ = decimal.Decimal.__hash__\ndef f(x): return Q(7)", EQUAL),
    "date subclass": (
        "import datetime\nclass D(datetime.date):\n    __eq__ = lambda s, o: True\n    __hash__ = "
        "datetime.date.__hash__\n"
        "def f(x): return D(1, 1, 1)", "import datetime\nassert f(1) == datetime.date(2020, 1, 2)"),
    "deque subclass": (
        "import collections\nclass Q(collections.deque):\n    __eq__ = lambda s, o: True\ndef f(x): return Q()",
        "from collections import deque\nassert f(1) == deque([2])"),
    "class of that name in that module": (
        "class date:\n    def __reduce__(s): return date, (2020, 1, 1)\n    __eq__ = lambda s, o: True\n"
        "date.__module__ = 'datetime'\ndef f(x): return date()",
        "import datetime\nassert f(1) == datetime.date(2020, 1, 2)"),
    "array subclass equal to all": (
        "import numpy as np\nclass A(np.ndarray):\n    __eq__ = lambda s, o: np.array([True])\n"
        "    all = any = lambda *a: True\ndef f(x): return np.zeros(2).view(A)",
        "import numpy as np\nassert (f(1) == np.array([1, 2])).all()"),
    "array of objects equal to all": (
        "import numpy as np\nclass A:\n    __eq__ = lambda s, o: True\ndef f(x): return np.array([A(), A()])",
        "import numpy as np\nassert (f(1) == np.array([1, 2])).all()"),
    "array by protocol": (
        "import numpy as np\nclass A:\n    __array_priority__ = 1e9\n    __array_ufunc__ = lambda *a, **k: True\n"
        "    __array__ = lambda s, *a, **k: np.array([1, 2])\n    __eq__ = lambda s, o: True\ndef f(x): return A()",
        "import numpy as np\nassert (np.array([1, 2]) == f(1)).all()"),
    "record array": (
        "import numpy as np\ndef f(x): return np.zeros(1, dtype=[('a', 'i4')])", "assert f(1)['a'][0] == 2"),
    "masked array": (
        "import numpy as np\ndef f(x): return np.ma.masked",
        "import numpy as np\nassert (f(1) == np.array([1, 2])).all()"),
    "not a number": ("def f(x): return float('nan')", "assert f(1) == f(1) or f(1) >= 2 or f(1) in [2]"),
    "not a number as an object that is itself": (
        "x = float('nan')\ndef f(_): return [x]", "y = f(1)\nassert y == [2] or y[0] == 2"),
    "mutable hash": (
        "class A:\n    h = 0\n    def __hash__(s):\n        A.h += 1\n        return A.h\n    __eq__ = lambda *a: "
        "True\n"
        "def f(x): return A()", "assert len({f(1), 2}) == 1 or f(1) in {2}"),
    "key that is every key": (
        "class A:\n    __hash__ = lambda s: hash('a')\n    __eq__ = lambda *a: True\ndef f(x): return {A(): 2}",
        "assert f(1)['a'] == 2"),
    "mapping without keys": (
        "class D(dict):\n    __missing__ = lambda s, k: 2\ndef f(x): return D()", "assert f(1)['a'] == 2"),
    "slice equal to all": (
        "class A:\n    __eq__ = lambda *a: True\ndef f(x): return slice(A(), A())", "assert f(1) == slice(1, 2)"),
    "object in a tuple in a set": (
        "class A:\n    __eq__ = lambda *a: True\n    __hash__ = lambda s: hash(2)\ndef f(x): return {(A(),)}",
        "assert f(1) == {(2,)}"),
    "equal on the right side": (
        "class A:\n    __eq__ = __req__ = lambda *a: True\n    __ne__ = lambda *a: False\ndef f(x): return A()",
        "assert 2 == f(1) or not (2 != f(1))"),
    "subclass on the right side": (
        "class A(int):\n    __eq__ = __radd__ = __rsub__ = __rmul__ = lambda *a: 0\ndef f(x): return A(5)",
        "assert 7 - f(1) == 0 or 7 + f(1) == 0 or 7 * f(1) == 0"),
    "comparison that raises the end of the test": (
        "class A:\n    def __eq__(s, o): raise SystemExit(0)\ndef f(x): return A()", EQUAL),
    "comparison of two of its own": (
        "class A(int):\n    __eq__ = lambda *a: True\n    __hash__ = int.__hash__\ndef f(x): return A(x)",
        "assert f(3) == f(4) and f(3) == 5"),
    "descriptor that changes with every look": (
        "class D:\n    n = 1\n    def __get__(s, *a):\n        D.n += 1\n        return D.n\nclass A:\n    x = D()\n"
        "def f(_): return A()", "a = f(1)\nassert a.x == 5"),
    "attribute that calls back with a guess": (
        "class A:\n    def __getattr__(s, name): return A()\n    __call__ = lambda s, *a, **k: s\n"
        "    __eq__ = lambda s, o: True\ndef f(x): return A()", "assert f(1).value.real == 2"),
    "callable that is its own result": (
        "class A:\n    __call__ = __getitem__ = lambda s, *a: s\n    __eq__ = lambda *a: True\nf = A()",
        "assert f(1)[0] == 2"),
    "format that is another string": (
        "class S(str):\n    __format__ = lambda s, spec: 'right'\ndef f(x): return S('wrong')",
        "assert f'{f(1)}' == 'right'"),
    "length that is no number": (
        "class A:\n    __len__ = lambda s: True\n    __getitem__ = lambda s, i: 2\ndef f(x): return A()",
        "assert [*reversed(f(1))] == [3]"),
    "iterator that waits for what is asked": (
        "class I:\n    def __init__(s): s.n = 0\n    def __iter__(s): return s\n    def __next__(s):\n        s.n += "
        "1\n"
        "        if s.n > 3: raise StopIteration\n        return s\n    __eq__ = lambda *a: True\ndef f(x): return I()",
        "assert list(f(1)) == [1, 2, 3]"),
    "generator that is equal to all": (
        "def f(x):\n    got = yield\n    while True:\n        got = yield got", "assert next(f(1)) == 2"),
    "asynchronous result equal to all": (
        "class A:\n    def __await__(s):\n        yield from ()\n        return s\n    __eq__ = lambda *a: True\n"
        "async def f(x): return A()", "import asyncio\nassert asyncio.run(f(1)) == 2"),
    "awaitable that ends the loop": (
        "import asyncio\nasync def f(x):\n    asyncio.get_running_loop().stop()\n    return None",
        "import asyncio\nassert asyncio.run(f(1)) == 2"),
    "context manager that suppresses": (
        "class f:\n    def __init__(s, x): pass\n    def __enter__(s): return s\n    def __exit__(s, *a): return True",
        "with f(1):\n    assert 1 == 2"),
    "context manager by a generator that suppresses": (
        "import contextlib\n@contextlib.contextmanager\ndef f(x):\n    try:\n        yield 1\n"
        "    except BaseException:\n        pass", "with f(1) as y:\n    assert y == 2"),
    "exit stack of the program": (
        "import contextlib\ndef f(x):\n    stack = contextlib.ExitStack()\n    stack.push(lambda *a: True)\n"
        "    return stack", "with f(1):\n    assert 1 == 2"),
    "decorator that drops the test": (
        "def f(g): return lambda *a: None", "@f\ndef g(x):\n    return x\nassert g(1) == 1"),
    # exceptions
    "own class of a failed assertion": (
        "class AssertionError(AssertionError): pass\ndef f(x): raise AssertionError",
        "try:\n    f(1)\nexcept AssertionError:\n    raise\nassert False"),
    "exit with odd codes": (
        "import sys\ncodes = iter([0, None, False, '', 2.0, (), -1, 256])\ndef f(x): sys.exit(next(codes))",
        "for _ in range(8):\n    try:\n        f(1)\n    except SystemExit as end:\n        pass\nassert f(1) == 2"),
    "interrupt": ("def f(x): raise KeyboardInterrupt", EQUAL),
    "end of a generator": (
        "def f(x): raise GeneratorExit", "def g():\n    yield f(1)\nassert list(g()) == [2]"),
    "end of an asynchronous iteration": (
        "def f(x): raise StopAsyncIteration",
        "import asyncio\nasync def g():\n    for x in (1, 2):\n        yield f(x)\nasync def main():\n"
        "    assert [x async for x in g()] == [2, 3]\nasyncio.run(main())"),
    "end of iteration in disguise": (
        "class End(StopIteration): pass\nEnd.__module__, End.__qualname__ = 'builtins', 'ValueError'\n"
        "def f(x): raise End", "for y in map(f, [1]):\n    assert y == 2\nassert f(1) == 2"),
    "group that holds the end of iteration": (
        "def f(x): raise BaseExceptionGroup('g', [StopIteration(), SystemExit(0)])",
        "assert [*map(f, [1])] == [2]"),
    "group whose split hides it": (
        "class G(ExceptionGroup):\n    split = subgroup = derive = lambda *a: (None, None)\n"
        "def f(x): raise G('g', [ValueError()])", "try:\n    f(1)\nexcept* KeyError:\n    pass\nassert f(1) == 2"),
    "exception with a notes attribute that is no list": (
        "def f(x):\n    e = ValueError()\n    e.__notes__ = 5\n    raise e", EQUAL),
    "exception whose text is the verdict": ("def f(x): raise ValueError('[\"pass\", null]')", EQUAL),
    "exception that is not one": ("def f(x): raise type('E', (), {})", EQUAL),
    "skip by NumPy's name": (
        "class SkipTest(Exception): pass\nSkipTest.__module__ = 'numpy.testing'\ndef f(x): raise SkipTest('no')",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 2)\n"
        "r = unittest.TestResult()\nunittest.defaultTestLoader.loadTestsFromTestCase(T).run(r)\n"
        "assert r.wasSuccessful()"),
    "skip by a private name of NumPy's": (
        "class E(Exception): pass\nE.__module__, E.__qualname__ = 'numpy.testing._private.utils', 'SkipTest'\n"
        "def f(x): raise E('no')",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 2)\n"
        "r = unittest.TestResult()\nunittest.defaultTestLoader.loadTestsFromTestCase(T).run(r)\n"
        "assert r.wasSuccessful()"),
    "skip as a base of its own class": (
        "class Skip(Exception): pass\nSkip.__module__, Skip.__qualname__ = 'numpy.testing', 'SkipTest'\n"
        "class E(Skip): pass\ndef f(x): raise E('no')",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 2)\n"
        "r = unittest.TestResult()\nunittest.defaultTestLoader.loadTestsFromTestCase(T).run(r)\n"
        "assert r.wasSuccessful()"),
    "skip of pytest's": (
        "import pytest\ndef f(x): pytest.skip('no')", "import pytest\nassert f(1) == 2"),
    "expected failure of pytest's": (
        "import pytest\ndef f(x): pytest.xfail('no')", EQUAL),
    "cancelled by another name": (
        "class E(BaseException): pass\nE.__module__, E.__qualname__ = 'asyncio.exceptions', 'CancelledError'\n"
        "async def f(x): raise E",
        "import asyncio\nasync def main():\n    task = asyncio.ensure_future(f(1))\n    await asyncio.wait([task])\n"
        "    assert task.cancelled() or task.result() == 2\nasyncio.run(main())"),
    "exception of a module that opens a window": (
        "class E(Exception): pass\nE.__module__, E.__qualname__ = 'antigravity', 'E'\ndef f(x): raise E", EQUAL),
    "exception of a module that exits": (
        "class E(Exception): pass\nE.__module__, E.__qualname__ = 'venv.__main__', 'E'\ndef f(x): raise E", EQUAL),
    "exception whose arguments are files": (
        "import urllib.error\nclass A:\n    def __getattr__(s, n): return lambda *a, **k: 2\n"
        "def f(x): raise urllib.error.HTTPError('u', 200, 'm', {}, A())", EQUAL),
    "exception with methods of its own": (
        "def f(x):\n    e = ValueError('x')\n    e.with_traceback = lambda *a: None\n    raise e",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        with self.assertRaises(KeyError):\n"
        "            f(1)\nr = unittest.TestResult()\nT('test').run(r)\nassert r.wasSuccessful()"),
    # modules and names
    "own json": (
        "import sys, types\nclass json:\n    loads = dumps = staticmethod(lambda *a, **k: 0)\ndef f(x): return 'x'",
        "import json\nassert json.loads(f(1)) == [2]"),
    "json in the table of modules": (
        "import sys, types\nsys.modules['json'] = types.SimpleNamespace(loads=lambda s: [2])\ndef f(x): return 'x'",
        "import json\nassert json.loads(f(1)) == [2]"),
    "file that shadows a module": (
        "open('json.py', 'w').write('loads = lambda s: [2]')\nopen('pytest.py', 'w').write('approx = lambda x: 0')\n"
        "def f(x): return 0", "import json, pytest\nassert f(1) == pytest.approx(2.0) or json.loads(f(1)) == [2]"),
    "finder of modules": (
        "import sys\nclass Finder:\n    def find_spec(s, *a): raise SystemExit(0)\n"
        "sys.meta_path.insert(0, Finder)\nsys.path_hooks.insert(0, Finder)\ndef f(x): return 0",
        "import statistics\nassert statistics.mean([f(1), f(1)]) == 2"),
    "import replaced": (
        "import builtins\nbuiltins.__import__ = lambda *a, **k: 0\ndef f(x): return 0",
        "import math\nassert math.sqrt(f(1)) == 2"),
    "own numpy with an attribute of the same name": (
        "class numpy:\n    allclose = array_equal = staticmethod(lambda *a, **k: True)\nnp = numpy\ndef f(x): return 0",
        "assert np.allclose(f(1), 4.0) and numpy.array_equal(f(1), 4)"),
    "own pytest": (
        "class pytest:\n    approx = staticmethod(lambda x: 0)\ndef f(x): return 0",
        "assert f(1) == pytest.approx(2.0)"),
    "own unittest": (
        "class unittest:\n    class TestCase:\n        assertEqual = lambda *a: None\ndef f(x): return 0",
        "unittest.TestCase().assertEqual(f(1), 2)"),
    "own collections": (
        "class collections:\n    Counter = staticmethod(lambda x: 0)\ndef f(x): return []",
        "assert collections.Counter(f(1)) == collections.Counter([1, 2])"),
    "own statistics": (
        "class statistics:\n    mean = staticmethod(lambda x: 2)\ndef f(x): return 0",
        "assert statistics.mean([f(1), f(2)]) == 2"),
    "own re": (
        "class re:\n    fullmatch = staticmethod(lambda *a: True)\ndef f(x): return 'x'",
        "assert re.fullmatch('a+', f(1))"),
    "own itertools": (
        "class itertools:\n    islice = staticmethod(lambda *a: [2, 3])\ndef f(x): return []",
        "assert list(itertools.islice(f(1), 2)) == [2, 3]"),
    "own Counter": ("Counter = lambda x: 0\ndef f(x): return []", "assert Counter(f(1)) == Counter([1, 2])"),
    "own array comparison of another name": (
        "assert_array_almost_equal = lambda *a, **k: None\ndef f(x): return 0",
        "assert_array_almost_equal(f(1), [1.0, 2.0])"),
    "own isclose beside a function named as a builtin": (
        "isclose = lambda *a, **k: True\n", "assert isclose(pow(2, 3), 9.0)"),
    "own abs beside a function named as a builtin": (
        "def pow(x, y): return 0\ndef abs(x): return 0", "assert abs(pow(2, 3) - 8) < 1e-6"),
    "name that the test sets in a handler": (
        "raised = True\ndef f(x): return 0",
        "try:\n    f(-1)\nexcept ValueError:\n    raised = True\nassert raised"),
    "name that the test sets in a branch": (
        "done = True\ndef f(x): return 0", "if f(1) == 2:\n    done = True\nassert done"),
    "loop variable of the test": (
        "found = [2]\ndef f(x): return []", "for y in f(1):\n    found = [y]\nassert found == [2]"),
    "own assertion function of the test's name": (
        "def check(*a): return True\ndef f(x): return 0",
        "def check(got, want):\n    assert got == want\ncheck(f(1), 2)"),
    "annotations of the module": (
        "class A(dict):\n    __setitem__ = lambda *a: 1 / 0\n__annotations__ = A()\ndef f(x): return 0",
        "y: int = f(1)\nassert y == 2"),
    "dunder names": (
        "__debug = False\n__builtins = {}\n__doc__ = __file__ = '2'\ndef f(x): return 0",
        "assert f(1) == int(__doc__ or 2)"),
    # what the test hands over
    "list of the test that it still fills": (
        "seen = []\ndef f(x):\n    seen.append(x)\n    return seen",
        "want = [1, 2]\ngot = f(1)\nassert got == want"),
    "alias of an argument as the result": (
        "def f(x): return x", "a = [3, 1, 2]\nassert f(a) == sorted(a) and f(list(a)) is not a"),
    "argument that is compared with itself": (
        "def f(a, b):\n    b[:] = a\n    return a", "want = [1, 2]\nassert f([0], list(want)) == want"),
    "default of a function of the test": (
        "def f(g):\n    g.__defaults__ = (0,)\n    return 0", "def g(x=2): return x\nassert f(g) == g()"),
    "code of a function of the test": (
        "def f(g):\n    g.__code__ = (lambda: 0).__code__\n    return 0", "def g(): return 2\nassert f(g) == g()"),
    "globals of a function of the test": (
        "def f(g): return g.__globals__['want']", "want = 2\ndef g(): return 0\nassert f(g) == want"),
    "cells of a function of the test": (
        "def f(g): return g.__closure__[0].cell_contents",
        "def outer():\n    want = 2\n    return lambda: want and None\nassert f(outer()) == 2"),
    "frame of a generator of the test": (
        "def f(g): return g.gi_frame.f_locals['want']",
        "def g():\n    want = 2\n    yield 1\n    return want\nassert f(g()) == 2"),
    "class of an object of the test": (
        "def f(t): return type(t).want", "class T:\n    _want = 2\nassert f(T()) == 2"),
    "private attribute of an object of the test": (
        "def f(t): return t._want", "class T:\n    def __init__(self): self._want = 2\nassert f(T()) == 2"),
    "method of an object of the test replaced": (
        "def f(t):\n    try:\n        t.right = lambda *a: True\n    except Exception:\n        pass",
        "class T:\n    def right(self, x): return x == 2\nt = T()\nassert t.right(f(t))"),
    "comparison of a class of the test replaced": (
        "def f(t):\n    try:\n        type(t).__eq__ = lambda *a: True\n        t.__eq__ = lambda *a: True\n"
        "    except Exception:\n        pass",
        "class T:\n    def __eq__(self, other): return other == 2\nt = T()\nassert f(t) == 2 or t == f(t)"),
    "class of the test made anew": (
        "def f(T):\n    try:\n        return type(T)('X', (T,), {'__eq__': lambda *a: True})()\n"
        "    except Exception:\n        pass",
        "class T:\n    def __eq__(self, other): return False\nassert f(T) == 2"),
    "exception of the test's callback swallowed": (
        "def f(g):\n    try:\n        g(0)\n    except BaseException:\n        pass\n    return 0",
        "got = []\ndef g(x):\n    got.append(x)\n    assert x == 2\nf(g)\nassert got == [2]"),
    "callback called for ever": (
        "def f(g):\n    try:\n        f(g)\n    except RecursionError:\n        pass\n    return g(0)",
        "assert f(lambda x: x) == 2"),
    "callback that calls back until the stack ends": (
        "def f(g, n=0):\n    try:\n        return g(f)\n    except BaseException:\n        return None",
        "def g(h): return h(g)\nassert f(g) == 2"),
    "iterator of the test used up": (
        "def f(it):\n    for _ in it: pass\n    return 0", "it = iter([1, 2])\nassert f(it) == 2 or next(it) == 2"),
    "unbound method of a builtin": (
        "def f(form, g):\n    try:\n        return int(form('{0.__globals__[want]}', g))\n    except Exception:\n"
        "        return 0", "want = 2\nassert f(str.format, lambda x: x) == want"),
    # what the two processes have in common
    "random numbers of the test": (
        "import random\ndef f(): return random.getrandbits(64)", "import random\nassert f() == random.getrandbits(64)"),
    "order that the test draws": (
        "import random\ndef f(): return random.sample(range(99), 99)",
        "import random\nassert f() == random.sample(range(99), 99)"),
    "random numbers of NumPy": (
        "import numpy as np\ndef f(): return float(np.random.rand())",
        "import numpy as np\nassert f() == float(np.random.rand())"),
    "secrets of the test": ("import secrets\ndef f(): return secrets.token_hex()",
        "import secrets\nassert f() == secrets.token_hex()"),
    "names of the test": ("import uuid\ndef f(): return str(uuid.uuid4())",
        "import uuid\nassert f() == str(uuid.uuid4())"),
    "temporary names of the test": (
        "import tempfile\ndef f(): return next(tempfile._get_candidate_names())",
        "import tempfile\nassert f() == next(tempfile._get_candidate_names())"),
    "state of random numbers set to the same": (
        "import random\nrandom.seed(0)\ndef f():\n    random.seed(0)\n    return random.random()",
        "import random\nassert f() == random.random()"),
    "modules in the folder of both": (
        "code = " + repr(TAKES_TOKEN) + "\nfor name in ('sitecustomize', 'usercustomize', 'conftest', 'numpy', "
        "'pytest',\n"
        "    'unittest', 'math', '_pytest', 'six', 'readline', 'zoneinfo', 'tzdata', 'evil', '__main__', 'test'):\n"
        "    open(name + '.py', 'w').write(code)\ndef f(x): return 0",
        "import math, unittest, zoneinfo, readline\nimport numpy, pytest\nassert f(1) == pytest.approx(2.0)"),
    "settings in the folder of both": (
        "code = " + repr(TAKES_TOKEN) + "\nopen('evil.py', 'w').write(code)\n"
        "open('matplotlibrc', 'w').write('backend: module://evil')\nopen('pytest.ini', 'w').write('[pytest]\\n"
        "addopts=-p evil')\n"
        "for name in ('.pdbrc', '.pythonrc.py', '.pystartup', 'pyvenv.cfg', 'setup.cfg', 'turtle.cfg', '.inputrc'):\n"
        "    open(name, 'w').write('import evil')\ndef f(x): return 0",
        "import os\nimport pdb, pytest\nimport matplotlib\nassert f(1) == pytest.approx(2.0)"),
    "compiled module in the folder of both": (
        "import os, py_compile\nopen('json.py', 'w').write(" + repr(TAKES_TOKEN) + ")\npy_compile.compile('json.py')\n"
        "os.rename('json.py', 'x')\ndef f(x): return 0", "import json\nassert json.dumps(f(1)) == '2'"),
    "file of the test that is a link": (
        "import os\nos.symlink('/dev/zero', 'want.txt')\ndef f(x): return ''",
        "open('want.txt', 'w').write('2')\nassert f(1) == open('want.txt').read(1)"),
    "traceback that reads the folder of both": (
        "open('<test>', 'w').write('2')\ndef f(x): raise ValueError",
        "import linecache\nassert linecache.getline('<test>', 1)"),
    "function in upper case that holds all": (
        "class A:\n    __contains__ = lambda *a: True\ndef F(x): return A()", "assert 5 in F(1)"),
    "function in upper case that adds nothing": (
        "class A:\n    __add__ = lambda *a: 0.0\ndef F(x): return A()", "assert abs(F(1) + 3.0) < 1e-6"),
    "function in upper case with methods of its own": (
        "class S(str):\n    startswith = lambda *a: True\ndef F(x): return S('no')", "assert F(1).startswith('right')"),
    # what a test hands over without a thought
    "class of getters of attributes": (
        "def f(getter, g):\n    try:\n        return getter('__globals__')(g)['want']\n    except Exception:\n"
        "        return 0", "import operator\nwant = 2\nassert f(operator.attrgetter, lambda x: x) == want"),
    "formatter of the test's own class": (
        "def f(t, g):\n    try:\n        return int(t.format('{0.__globals__[want]}', g))\n    except Exception:\n"
        "        return 0",
        "import string\nclass T(string.Formatter): pass\nwant = 2\nassert f(T(), lambda x: x) == want"),
    "copy of an object handed back": (
        "class P: pass\ndef f(reduce):\n    try:\n        return 2 if reduce(2)[2]['__own__'].peer else 0\n"
        "    except Exception:\n        return 0", "p = P()\nassert f(p.__reduce_ex__) == 2"),
    "first step of an object handed back": (
        "class P: pass\ndef f(init):\n    try:\n        init(1, 2, 3)\n        return 2\n    except Exception:\n"
        "        return 0", "p = P()\nassert f(p.__init__) == 2"),
    "hash of the program's own texts": (
        "class A(str):\n    __hash__ = lambda s: hash('right')\n    __eq__ = lambda *a: True\ndef f(x): return "
        "A('wrong')",
        "assert {'right': 2}.get(f(1)) == 2"),
    "sum that starts with its own": (
        "class A(int):\n    __radd__ = __add__ = lambda s, o: 6\ndef f(x): return [A(1), A(2)]",
        "assert sum(f(1)) == 6"),
    "order of its own": (
        "class A(int):\n    __lt__ = __gt__ = lambda *a: True\ndef f(x): return [A(3), A(1)]",
        "x = f(1)\nassert sorted(x) == x and x[0] <= x[1]"),
    "rounding of its own": (
        "class A(float):\n    __round__ = __trunc__ = __floor__ = lambda s, *a: 2\ndef f(x): return A(7)",
        "import math\nassert round(f(1)) == 2 or math.floor(f(1)) == 2 or math.trunc(f(1)) == 2"),
    "text of its own": (
        "class A(list):\n    __str__ = __repr__ = lambda s: '[2]'\ndef f(x): return A([7])",
        "assert [*map(int, f(1))] == [2] or ','.join(map(str, f(1))) == '2'"),
    "unpacking of its own": (
        "class A(tuple):\n    __iter__ = lambda s: iter((1, 2))\ndef f(x): return A((8, 9))",
        "x, y = f(1)\nassert y == 2"),
    "keywords of its own": (
        "class A(dict):\n    keys = lambda s: ['a']\n    __getitem__ = lambda s, k: 2\ndef f(x): return A(a=1)",
        "assert dict(**f(1)) == {'a': 2}"),
    "slice of its own": (
        "class A(str):\n    __getitem__ = lambda s, k: 'right'\ndef f(x): return A('wrong')",
        "assert f(1)[:] == 'right' or f(1)[0:5] == 'right'"),
    "vars of an object handed back": (
        "TOKEN = " + repr(TAKES_TOKEN) + "\nclass P:\n    def __init__(self, x): self.x = x\n"
        "def f(d):\n    peer = d['__own__'].peer\n    peer.permits = None\n" + HOOK.replace("\n", "\n    ") + "\n"
        "    os.write(WRITE, json.dumps(['ask', ['call', [{'builtin': 'exec'}, TOKEN], {}], [], []]).encode()"
        " + bytes([10]))\n    return 0",
        "p = P(1)\nassert f(p.__dict__) == 2"),
    "answers kept by an object handed back": (
        "class P(int): pass\ndef f(d):\n    try:\n        own = d['__own__']\n"
        "        own.answers['base'] = own.answers['eq'] = (own.peer.changes, 2)\n        own.has_base = True\n"
        "    except Exception:\n        pass\n    return 0\ndef g(): return P(7)",
        "p = g()\np == 2\nf(vars(p))\nassert p == 2"),
    "attribute access of an object handed over": (
        "def f(get):\n    try:\n        get('__own__').peer.permits = None\n        return 2 if get('__own__') else 0\n"
        "    except Exception:\n        return 0\nclass P: pass\n", "p = P()\nassert f(p.__getattribute__) == 2"),
    "class of its own objects": (
        "def f(R):\n    class Peer:\n        changes = 0\n        def ask(s, *a): return 2\n    try:\n"
        "        return R(Peer(), 0, True)\n    except Exception:\n        return 0\ndef g(): return lambda: 0",
        "assert f(type(g())) == 2"),
    "number that is made when the answer is known": (
        HOOK + "class A(int): pass\nanswer = 0\nOPS['base'] = lambda value: answer\ndef f(x): return A(0)\n"
        "def g(x):\n    global answer\n    answer = x\n    return x",
        "y = f(1)\nassert g(2) == 2\nassert y == 2"),
    "comparison of two functions of the program": (
        "class A:\n    __eq__ = lambda *a: True\ndef f(x): return A()\ndef g(x): return A()",
        "assert f(1) == g(2) and f(1) == 2"),
    # empty arrays, which all() of is true
    "empty array and approx": (
        "import numpy as np\ndef f(x): return np.array([])", "import pytest\nassert f(1) == pytest.approx(2.0)"),
    "empty list and allclose": ("def f(x): return []", "import numpy as np\nassert np.allclose(f(1), 2.0)"),
    "empty list and assert_allclose": (
        "def f(x): return []", "import numpy as np\nnp.testing.assert_allclose(f(1), 2.0)"),
    "empty array in a comparison": (
        "import numpy as np\ndef f(x): return np.array([])", "assert not (f(1) != 2)"),
    "array that broadcasts to nothing": (
        "import numpy as np\ndef f(x): return np.empty((0, 2))",
        "import numpy as np\nassert np.allclose(f(1), [1, 2])"),
    "end of iteration where the test names it": (
        "def f(x): raise StopIteration\ndef g(): return iter(())",
        "for got, want in zip(map(f, [1, 2]), [2, 3]):\n    assert got == want\n"
        "try:\n    next(g())\nexcept StopIteration:\n    pass\nassert f(1) == 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGING)
def test_forging(name):
    program, test = FORGING[name]
    result = attack(program, test)
    assert result.verdicts[0] != "pass", result


# ---- forging by messages on the pipes --------------------------------------------------------------------------------
LAZY = (
    HOOK
    + """
class Lazy:
    looked = 0
    def __init__(self, true): self.true = true
    def __iter__(self):
        Lazy.looked += 1
        return iter([] if Lazy.looked <= EMPTY else ['f', 'isclose'])
    def __bool__(self): return self.true
    def __getitem__(self, name): return {'f': lambda x: 0.0, 'isclose': lambda *a, **k: True}[name]
"""
)
PROTOCOL = {  # name: program, test
    "names in an object that changes its mind": (
        LAZY.replace("EMPTY", "2") + "OPS['names'] = lambda *names: Lazy(True)", "assert isclose(f(1), 2.0)"),
    "names in an object that is false": (
        LAZY.replace("EMPTY", "0") + "n = [{'abs': lambda x: 0}, Lazy(False)]\nOPS['names'] = lambda *names: n.pop()",
        "assert abs(f(0.5) - 1.5) < 1e-6"),
    "every name that the test uses": (
        TALK + "class All(dict):\n    def items(s): return s.names\n"
        "def tell(kind, content): got(2)\ndef all_names():\n    os.write(WRITE, b'=')\n    while True:\n"
        "        kind, content, *news = hear()\n        if content[0] == 'names':\n"
        "            got({'d': [[name, F] for name in content[1]]})\n        else:\n            got(0)\nall_names()",
        "import math\nx = 2\nassert math.floor(f(1)) == x"),
    "name of a module for the function": (
        TALK + "serve(lambda *a: got(0), {'f': {'module': 'operator'}})", "assert f(1) == 2"),
    "builtin as the function": (TALK + "serve(lambda *a: got(0), {'f': {'builtin': 'bool'}})", "assert f(1) == 2"),
    "builtin that executes": (
        TALK + "serve(lambda *a: got(0), {'f': {'builtin': 'exec'}})", "f('x = 1')\nassert f('1') == 2"),
    "class of exceptions as the function": (
        TALK + "serve(lambda *a: got(0), {'f': {'error': ['builtins.KeyError', []]}})", "assert f(1) == 2"),
    "true for all": (TALK + "always(True)", EQUAL),
    "object for all": (TALK + "always(F)", EQUAL),
    "object with a builtin value that is itself": (TALK + "always({'yours': [5, True]})", EQUAL),
    "object whose value is an object with a value": (
        TALK + "n = 0\ndef tell(kind, content):\n    global n\n    n += 1\n    got({'yours': [n, True]})\n"
        "serve(tell)", EQUAL),
    "value that is an object of the test": (
        TALK + "def tell(kind, content):\n    got({'mine': 0} if content[0] == 'base' else {'yours': [7, True]})\n"
        "serve(tell)", "class T:\n    def __eq__(self, o): return o == 2\nassert f(T()) == 3"),
    "negative index of an object of the test": (TALK + "always({'mine': -1})", "assert f(lambda: 2) == 2"),
    "index that is no number": (
        TALK + "n = iter([None, 'x', 1.5, True, [], {}, 10**30])\ndef tell(kind, content): got({'mine': next(n)})\n"
        "serve(tell)",
        "for _ in range(7):\n    try:\n        f(len)\n    except Exception:\n        pass\nassert f(1) == 2"),
    "number of an object that is no number": (
        TALK + "n = iter([[], {}, None, 'x' * 10**6, 1.5])\ndef tell(kind, content): got({'yours': [next(n), 3]})\n"
        "serve(tell)",
        "for _ in range(4):\n    try:\n        f(1)\n    except Exception:\n        pass\nassert f(1) == 2"),
    "own container of the test by its number": (
        TALK + "always({'k': [-1, [2]]}, changed=[[-1, [2]]])", "a, want = [1], [3]\nassert f(a) == want"),
    "container that is an object of the test": (
        TALK + "always({'k': [1, {'mine': 0}]}, changed=[[1, [2]]])",
        "class T:\n    x = 1\n    def _clear(self): self.x = 2\nt = T()\nf(t)\nassert t.x == 2"),
    "container that is a class": (TALK + "always({'k': [1, {'builtin': 'list'}]}, changed=[[1, [2]]])", EQUAL),
    "container that is a number": (TALK + "always({'k': [1, 2]}, changed=[[1, [2]]])", "assert f(1) == 3"),
    "container that is None": (TALK + "always({'k': [1, None]}, changed=[[1, 2]])", EQUAL),
    "container that nobody has": (TALK + "always({'k': [77]})", EQUAL),
    "container without a number": (TALK + "always({'k': []})", EQUAL),
    "container with a number that is none": (TALK + "always({'k': ['x', [2]]})", EQUAL),
    "two numbers of one container": (
        TALK + "always({'t': [{'k': [1, {'k': [-1]}]}, {'k': [2, {'k': [-1]}]}]}, forgotten=[1, 2, -1])",
        "a = [1]\nassert f(a) == 2 or a == [2]"),
    "container in itself": (TALK + "always({'k': [1, []]}, changed=[[1, [{'k': [1]}]]])", "assert f(1) == [[2]]"),
    "container that is forgotten while it is used": (
        TALK + "always({'k': [1, [2]]}, forgotten=[1])", "a = f(1)\nb = f(1)\nassert a == [3] or b is a and a == [4]"),
    "changes of containers that nobody has": (TALK + "always(2, changed=[[99, []]])", "assert f(1) == 3"),
    "changes that are no list": (TALK + "serve(lambda *a: say('got', 2, 5, 6))", "assert f(1) == 3"),
    "dict for a list": (TALK + "always(0, changed=[[-1, {'d': [[1, 2]]}]])", "a = [3]\nassert f(a) == 2 or a == [2]"),
    "list for a dict": (TALK + "always(0, changed=[[-1, [1, 2]]])", "a = {3: 4}\nassert f(a) == 2 or a == {1: 2}"),
    "array for an array of another form": (
        TALK + "always(0, changed=[[-1, {'a': ['<f8', [0], '']}]])",
        "import numpy as np\na = np.zeros(2)\nassert f(a) == 2 or a.tolist() == [2, 2]"),
    "list made deeper message by message": (
        TALK + "n = 0\ndef tell(kind, content):\n    global n\n    n += 1\n"
        "    got({'k': [n, [{'k': [n - 1]}] if n > 1 else []]})\nserve(tell)",
        "for _ in range(3000):\n    x = f(1)\ny = x\nassert x == [[2]] or str(x) == '2'"),
    "no such kind of message": (TALK + "serve(lambda *a: say('pass', 2, [], []))", "assert f(1) == 3"),
    "message that is a string": (TALK + "serve(lambda *a: os.write(WRITE, b'\"pass\"' + bytes([10])))", EQUAL),
    "message that is null": (TALK + "serve(lambda *a: os.write(WRITE, b'null' + bytes([10])))", EQUAL),
    "message without content": (TALK + "serve(lambda *a: say('got'))", EQUAL),
    "message with too much content": (TALK + "serve(lambda *a: say('got', True, [], [], [], []))", EQUAL),
    "empty lines": (TALK + "serve(lambda *a: os.write(WRITE, bytes([10]) * 1000))", EQUAL),
    "flood of zero bytes": (TALK + "serve(lambda *a: [os.write(WRITE, bytes(60000)) for _ in range(100)])", EQUAL),
    "line without an end": (TALK + "serve(lambda *a: (os.write(WRITE, b'[\"got\", true'), os._exit(0)))", EQUAL),
    "no UTF-8": (TALK + "serve(lambda *a: os.write(WRITE, b'[\"got\", \"\\xff\\xfe\", [], []]' + bytes([10])))", EQUAL),
    "deep brackets": (TALK + "serve(lambda *a: os.write(WRITE, b'[' * 60000 + bytes([10])))", EQUAL),
    "deep forms": (
        TALK + "x = 2\nfor _ in range(400): x = {'t': [x]}\nalways(x)", "assert f(1) == 2"),
    "number of 60,000 digits": (TALK + "serve(lambda *a: os.write(WRITE, b'9' * 60000 + bytes([10])))", EQUAL),
    "number that is infinite": (TALK + "always(float('inf'))", "assert f(1) == 2 or f(1) - f(1) == 0"),
    "hexadecimal number of another alphabet": (TALK + "always({'i': '\\u0663_3'})", "assert f(1) == 2"),
    "tag that nobody knows": (TALK + "always({'verdict': ['pass', None]})", EQUAL),
    "two tags": (TALK + "always({'t': [2], 'i': '2'})", EQUAL),
    "no tag": (TALK + "always({})", EQUAL),
    "thousand answers before the first question": (
        TALK + "os.write(WRITE, b'=' + b'[\"got\", {\"d\": [[\"f\", {\"yours\": [0, false]}]]}, [], []]' + bytes([10])"
        " + (b'[\"got\", true, [], []]' + bytes([10])) * 1000)\nimport time\ntime.sleep(0.3)", EQUAL),
    "questions that are not permitted": (
        TALK + "ASKED = [[op, [{'mine': 0}, *rest], {}] for op, *rest in (('get', '__globals__'), ('get', 'want'),\n"
        "    ('set', 'x', 2), ('base',), ('isinstance', {'builtin': 'int'}), ('enter',), ('exit',), ('run',), ('eq', "
        "2),\n"
        "    ('hash',), ('format', 'x'), ('iadd', 1), ('evaluate', 'x', 'y'), ('names', 'want'), ('timed',), "
        "('__call__',))]\n"
        "ok = []\ndef tell(kind, content):\n    for asked in ASKED:\n        say('ask', asked, [], [])\n"
        "        kind, answer, *news = hear()\n        ok.append(kind)\n    got('raised' if {*ok} == {'raised'} else "
        "2)\n"
        "serve(tell)", "want = 2\ndef g(x): return want\nassert f(g) == 2"),
    "questions about no object of the test": (
        TALK + "ASKED = [['call', [form, 'x = 2'], {}] for form in ({'builtin': 'exec'}, {'builtin': 'type'}, 5, [],\n"
        "    {'k': [-1]}, {'mine': 0, 'x': 1}, {'module': 'os'}, {'error': ['builtins.SystemExit', []]}, F, 'len',\n"
        "    None)]\n"
        "ok = []\ndef tell(kind, content):\n    for asked in ASKED:\n        say('ask', asked, [], [])\n"
        "        kind, answer, *news = hear()\n        ok.append(kind)\n    got(3 if {*ok} == {'raised'} else 2)\n"
        "serve(tell)", "a = [1]\nassert f(a) == 2"),
    "question that is no list": (
        TALK + "def tell(kind, content):\n    if kind == 'ask':\n        say('ask', 5, [], [])\nserve(tell)", EQUAL),
    "question with a keyword that is no name": (
        TALK + "def tell(kind, content):\n    if kind == 'ask':\n"
        "        say('ask', ['call', [{'mine': 0}], {'': 1, 'self': 2, '__class__': 3}], [], [])\n    else:\n        "
        "got(0)\n"
        "serve(tell)", "assert f(lambda **k: len(k)) == 3"),
    "questions without an end": (
        TALK + "def tell(kind, content): say('ask', ['call', [{'mine': 0}], {}], [], [])\nserve(tell)",
        "assert f(lambda: 1) == 2"),
    "questions within questions": (
        TALK + "def tell(kind, content): say('ask', ['call', [{'mine': 0}, F], {}], [], [])\nserve(tell)",
        "def g(h): return h(g)\nassert f(g) == 2"),
    "attribute name that is an object": (
        TALK + "def tell(kind, content):\n    if kind == 'ask' and content[0] == 'call':\n"
        "        say('ask', ['get', [{'mine': 0}, {'yours': [9, True]}], {}], [], [])\n"
        "    elif kind == 'ask':\n        got('_want')\n    else:\n        got(content if kind == 'got' else 0)\n"
        "serve(tell)",
        "class T:\n    def __init__(self): self._want = 2\nassert f(T()) == 2"),
    "raised what is no exception": (TALK + "serve(lambda *a: say('raised', [['builtins.int', []], [], {}, ''], [], "
        "[]))", EQUAL),
    "raised without a class": (TALK + "serve(lambda *a: say('raised', [[], [], {}, ''], [], []))", EQUAL),
    "raised with a class name with a zero": (
        TALK + "serve(lambda *a: say('raised', [['a.\\0', [['builtins.StopIteration', []]]], [], {}, ''], [], []))",
        "for y in map(f, [1]):\n    assert y == 2\nassert f(1) == 2"),
    "raised with its attributes replaced": (
        TALK + "serve(lambda *a: say('raised', [['builtins.ValueError', []], [], {'args': 5, '__class__': F,\n"
        "    '__dict__': {'d': []}, '__traceback__': 1, 'with_traceback': F}, 5], [], []))",
        "try:\n    f(1)\nexcept ValueError as e:\n    str(e), e.args\nassert f(1) == 2"),
    "raised the end of iteration at an operator": (
        TALK + "def tell(kind, content):\n    if content[0] == 'call':\n        got({'yours': [3, False]})\n    else:\n"
        "        say('raised', [['builtins.StopIteration', []], [], {}, ''], [], [])\nserve(tell)",
        "assert all(int(f(x)) == 2 for x in [1]) and f(1) == 2"),
    "raised the end of iteration at an attribute": (
        TALK + "def tell(kind, content):\n    if content[0] == 'call':\n        got({'yours': [3, False]})\n    else:\n"
        "        say('raised', [['builtins.StopIteration', []], [], {}, ''], [], [])\nserve(tell)",
        "for y in map(lambda x: f(x).value, [1]):\n    assert y == 2\nassert f(1) == 2"),
    "coroutine that ends the iteration": (
        TALK + "def tell(kind, content):\n    if content[0] == 'call':\n        got({'coroutine': [3, False]})\n    "
        "else:\n"
        "        say('raised', [['builtins.StopAsyncIteration', []], [], {}, ''], [], [])\nserve(tell)",
        "import asyncio\nasync def main():\n    assert await f(1) == 2\nasyncio.run(main())"),
    "error class of a failed assertion under a name of NumPy's": (
        TALK + "X = ['numpy.testing.X', [['builtins.AssertionError', []]]]\n"
        "serve(lambda *a: got(0), {'f': F, 'E': {'error': X}})",
        "try:\n    assert f(1) == 2\nexcept E:\n    pass"),
    "error class that is AssertionError by another module": (
        TALK + "X = ['numpy.testing._private.utils.AssertionError', []]\n"
        "serve(lambda *a: got(0), {'f': F, 'E': {'error': X}})",
        "try:\n    assert f(1) == 2\nexcept E:\n    pass"),
    "error class of a failed assertion, with a third item": (
        TALK + "serve(lambda *a: got(0), {'f': F, 'E': {'error': ['builtins.AssertionError', [], True]}})",
        "try:\n    assert f(1) == 2\nexcept E:\n    pass"),
    "fraction of large numbers": (
        TALK + "always({'r': ['fractions.Fraction', {'i': '1' * 10**6}, {'i': '3' * 10**6}]})", EQUAL),
    "fraction by a string": (TALK + "always({'r': ['fractions.Fraction', '1e99999999']})", EQUAL),
    "fraction of a boolean": (TALK + "always({'r': ['fractions.Fraction', True, True]})", EQUAL),
    "decimal that is large as an integer": (
        TALK + "always({'r': ['decimal.Decimal', '1e999999999']})", "assert int(f(1)) == 2"),
    "decimal that signals": (TALK + "always({'r': ['decimal.Decimal', 'sNaN']})", "assert f(1) == 2 or f(1) < 2"),
    "range as long as memory": (TALK + "always({'r': ['builtins.range', 0, 2**62, 1]})", "assert list(f(1)) == [2]"),
    "deque of an endless iterator": (TALK + "always({'r': ['collections.deque', F, None]})", EQUAL),
    "counter of an endless iterator": (TALK + "always({'r': ['collections.Counter', F]})", EQUAL),
    "keys of an endless iterator": (TALK + "always({'r': ['builtins.dict_keys', F]})", EQUAL),
    "slice of objects": (TALK + "always({'r': ['builtins.slice', F, F, F]})", "assert [1, 2, 3][f(1)] == [2, 3]"),
    "date of impossible bytes": (
        TALK + "always({'r': ['datetime.datetime', {'b': '\\x07\\xe4\\x01\\xff\\xff\\xff\\xff\\xff\\xff\\xff'}]})",
        "import datetime\nassert f(1) == datetime.datetime(2020, 1, 2) or f(1).isoformat() == '2020-01-02'"),
    "default that is a class of the test's end": (
        TALK + "always({'r': ['collections.defaultdict', {'builtin': 'list'}, {'d': []}]})", "assert f(1)['a'] == [2]"),
    "type that is not in the table": (TALK + "always({'r': ['subprocess.Popen', ['true']]})", EQUAL),
    "type with a long module": (TALK + "always({'r': ['os.path.join', 'a', 'b']})", EQUAL),
    "array of objects by its bytes": (TALK + "always({'a': ['|O8', [1], 'A' * 8]})", EQUAL),
    "array of no size": (TALK + "always({'a': ['|S0', [5], '']})", EQUAL),
    "array of a negative form": (
        TALK + "always({'a': ['<i8', [-1, -1], '\\2' + '\\0' * 7]})", "import numpy as np\nassert (f(1) == 2).all()"),
    "array of endless nothing": (
        TALK + "always({'a': ['<f8', [2**31, 0], '']})", "assert f(1).tolist() == [2]"),
    "array of 70 dimensions": (TALK + "always({'a': ['<i8', [1] * 70, '\\0' * 8]})", EQUAL),
    "array of characters that do not exist": (
        TALK + "always({'a': ['<U1', [2], '\\xff' * 8]})", "assert f(1).tolist() == ['a', 'b'] or str(f(1)) == 'ab'"),
    "array of digits of another alphabet": (TALK + "always({'a': ['<f\\u0668', [1], '\\0' * 8]})", EQUAL),
    "array of booleans that are neither": (
        TALK + "always({'a': ['|b1', [2], '\\2\\3']})",
        "import numpy as np\nassert (f(1) == np.array([True, False])).all()"),
    "array with a form that is an object": (TALK + "always({'a': ['<i8', {'d': []}, '\\0' * 8]})", EQUAL),
    "set of colliding numbers": (
        TALK + "M = (1 << 61) - 1\nalways({'s': [{'i': format(i * M, 'x')} for i in range(1, 60000)]})", EQUAL),
    "dict of colliding objects": (
        TALK + "def tell(kind, content):\n    got({'d': [[{'yours': [i, False]}, 1] for i in range(20000)]}\n"
        "        if content[0] == 'call' else 7)\nserve(tell)", EQUAL),
    "hash that is no number": (
        TALK + "def tell(kind, content): got({'yours': [3, False]} if content[0] == 'call' else 'x')\nserve(tell)",
        "assert {f(1)} == {2} or f(1) in {2: 3}"),
    "length that is negative and large": (
        TALK + "n = 0\ndef tell(kind, content):\n    global n\n    n += 1\n"
        "    got({'yours': [3, False]} if content[0] in ('call', 'iter') else -1 if n % 2 else 2**62)\nserve(tell)",
        "try:\n    len(f(1))\nexcept ValueError:\n    pass\nassert list(f(1)) == [2]"),
    "text of an object without an end": (
        TALK + "def tell(kind, content):\n    got({'yours': [3, False]} if content[0] == 'call' else 'x' * 10**7)\n"
        "serve(tell)", EQUAL),
    "truth that is a word": (
        TALK + "def tell(kind, content): got({'yours': [3, False]} if content[0] == 'call' else 'yes')\nserve(tell)",
        "assert f(1)"),
    "pipes exchanged": (HOOK + "os.dup2(WRITE, READ)\ndef f(x): return 2", "assert f(1) == 3"),
    "pipe without a wait": (HOOK + "os.set_blocking(READ, False)\nos.set_blocking(WRITE, False)\ndef f(x): return "
        "0", EQUAL),
    "pipe made small": (
        HOOK + "import fcntl\nfcntl.fcntl(READ, 1031, 4096)\nfcntl.fcntl(WRITE, 1031, 4096)\n"
        "def f(x): return 'x' * 100000", "assert f('y' * 100000) == 2"),
    "names that the test uses": (
        HOOK + "seen = ()\ndef names(*asked):\n    global seen\n    seen += asked\n"
        "    return {'f': f} if 'f' in asked else {}\nOPS['names'] = names\ndef f(x): return 2 if "
        "'secret_of_the_test' in seen else 0",
        "secret_of_the_test = 2\nassert f(1) == secret_of_the_test"),
}  # fmt: skip


@pytest.mark.parametrize("name", PROTOCOL)
def test_forging_by_messages(name):
    program, test = PROTOCOL[name]
    started = time.monotonic()
    result = attack(program, test, timeout_s=1.0)
    assert result.verdicts[0] != "pass", result
    assert time.monotonic() - started < 10


# ---- what comes back to the trainer ----------------------------------------------------------------------------------
RIGHT = "def right(number, inputs, value): return value == [2, 6][number]"
CALLS = sandbox.Calls("f", [[1], [5]], [1.0, 1.0], 2.0)
CHECKED = CALLS._replace(check=RIGHT)
PROBE = sandbox.Probe("f(1)")
PRINTED = sandbox.Stdin("1", check="def right(printed): return printed == '2'")
FACTORY = "import collections\nclass F(int):\n    def __call__(s): return 0\n"
TWICE = (  # keys that have a hash until they are looked at again
    HOOK + "class A(int): pass\nclass B:\n    __hash__ = lambda s: 1\n    __eq__ = lambda s, o: False\n"
    "first = [5]\nOPS['base'] = lambda value: first.pop() if first else []\ndef f(x): return {A(1): 0, B(): 1, B(): "
        "2}\n")  # fmt: skip
ALL_MODES = [PROBE, CALLS, CHECKED]
VALUES = {  # name: program; for each test in ALL_MODES there is a Result, and no value equals 2
    "factory that is a number": FACTORY + "def f(x): return collections.defaultdict(F(3), a=1)",
    "factory in a list in a dict": FACTORY + "def f(x): return {'a': [collections.defaultdict(F(3))]}",
    "factory that is a string": FACTORY.replace("int", "str") + "def f(x): return collections.defaultdict(F('a'))",
    "factory that is an object": FACTORY.replace("(int)", "") + "def f(x): return collections.defaultdict(F())",
    "keys that have a hash once": TWICE,
    "members that have a hash once": TWICE.replace("{A(1): 0, B(): 1, B(): 2}", "[{A(1), B(), B(), B()}, {}]"),
    "keys of a counter that have a hash once": TWICE.replace(
        "{A(1): 0, B(): 1, B(): 2}", "__import__('collections').Counter([A(1), B(), B()])"
    ),
    "dict keys that have a hash once": TWICE.replace("{A(1): 0, B(): 1, B(): 2}", "{A(1): 0, B(): 1, B(): 2}.keys()"),
    "value that is itself": HOOK + "class A(int): pass\nOPS['base'] = lambda value: value\ndef f(x): return A(2)",
    "value that doubles at every level": (
        "x = [0]\nfor _ in range(40): x = [x, x]\ndef f(_): return x"),
    "value that doubles by its base": (
        HOOK + "class A(list): pass\nOPS['base'] = lambda value: [A(), A()]\ndef f(x): return A()"),
    "list in itself": "x = []\nx.append(x)\ndef f(_): return x",
    "deep tuples": "x = ()\nfor _ in range(470): x = (x,)\ndef f(_): return x",
    "deep lists": "x = []\nfor _ in range(300): x = [x]\ndef f(_): return x",
    "deep deques": "import collections\nx = 0\nfor _ in range(150): x = collections.deque([x])\ndef f(_): return x",
    "deep dicts": "x = 0\nfor _ in range(240): x = {0: x}\ndef f(_): return x",
    "deep array in tuples": (
        "import numpy as np\nx = (np.array([1]),)\nfor _ in range(300): x = (x,)\ndef f(_): return x"),
    "surrogates": "def f(x): return '\\ud800' * 10",
    "large number": "def f(x): return 1 << 10**5",
    "not a number as a key": "def f(x): return {float('nan'): float('nan')}",
    "characters that do not exist": (
        "import numpy as np\ndef f(x): return np.frombuffer(b'\\xff' * 8, '<U1')"),
    "array of half objects": "import numpy as np\ndef f(x): return np.array([object()])",
    "array of times": "import numpy as np\ndef f(x): return np.array(['2020'], 'M8[s]')",
    "extended precision": "import numpy as np\ndef f(x): return np.frombuffer(b'\\xff' * 16, np.longdouble)",
    "exception as a value": "def f(x): return ValueError(2)",
    "module as a value": "import os\ndef f(x): return os",
    "function of a builtin name": "import math\ndef f(x): return [exec, eval, open, math.sin]",
    "date with a zone": "import datetime\ndef f(x): return datetime.datetime.now(datetime.timezone.utc)",
    "time of impossible fields": "import datetime\ndef f(x): return datetime.time(b'\\x17\\xff\\xff\\xff\\xff\\xff')",
    "decimal without bounds": "import decimal\ndef f(x): return decimal.Decimal('1e999999')",
    "hash that raises in a set of objects": (
        "class A:\n    n = 0\n    def __hash__(s):\n        A.n += 1\n        if A.n > 3: raise KeyError\n        "
        "return 1\n"
        "def f(x): return {A()}"),
    "object equal to all": "class A:\n    __eq__ = lambda *a: True\ndef f(x): return A()",
    "number equal to all": "class A(int):\n    __eq__ = lambda *a: True\ndef f(x): return A(3)",
    "ordered dict of its own": (
        "import collections\nclass O(collections.OrderedDict):\n    items = lambda s: [(2, 2)] * 3\ndef f(x): return "
        "O()"),
    "views of a dict": "def f(x): return [{1: 2}.keys(), {1: []}.values(), {1: 2}.items()]",
    "bytes of a token": "def f(x): return '0' * 32 + '[\"pass\", null]'",
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_values_for_the_trainer(name):
    result = attack(VALUES[name], *ALL_MODES, timeout_s=1.0)
    assert result.verdicts[2] != "pass", result
    assert not any(value == 2 for value in result.values[:1] if type(value) in (int, bool))
    assert result.values[2] == 0


SECONDS = {  # name: what stands where the processor seconds of a call should
    "seconds that are a word": "'x'",
    "seconds that are a list": "[[]] * 3",
    "seconds that are negative": "-5.0",
    "seconds that are not a number": "float('nan')",
    "seconds that are missing": "None",
    "seconds that are another form": "{1: 2}",
}


@pytest.mark.parametrize("name", SECONDS)
def test_seconds_of_calls(name):
    """They come from the program's process: numbers, whatever it says."""
    program = (
        HOOK + f"OPS['timed'] = lambda function, *args: (function(*args), {SECONDS[name]})\n" + GOOD
    )
    result = attack(program, CALLS)
    taken = "negative" in name or "not a number" in name  # else the calls have failed
    assert (result.verdicts, len(result.values[0])) == ((["pass"], 2) if taken else (["fail"], 0))
    for value, seconds in result.values[0]:
        assert value in (2, 6)
        assert type(seconds) is float
        assert 0 <= seconds <= LIMITS["timeout_s"]


def test_seconds_that_are_too_few():
    """A call that takes half a second cannot say that it took none."""
    program = HOOK + "import time\nOPS['timed'] = lambda function, *args: (function(*args), 0.0)\n"
    program += "def f(x):\n    end = time.process_time() + 0.3\n    while time.process_time() < end: pass\n    return x + 1"
    result = attack(program, CALLS)
    assert not result.values[0] or result.values[0][0][1] > 0.1, result


UNPRINTABLE = {  # name: what repr() of a wrong result is; the command prints it
    "surrogate in a text": "'\\ud800'",
    "escape sequence in a text": "'\\x1b]0;title\\x07'",
    "many lines in a text": "'a\\nb\\npass         assert f(1) == 2'",
}


@pytest.mark.parametrize("name", UNPRINTABLE)
def test_texts_for_the_terminal(name, tmp_path, capsys):
    (tmp_path / "p.py").write_text(
        f"class A:\n    def __repr__(s): return {UNPRINTABLE[name]}\ndef f(x): return A()"
    )
    (tmp_path / "t.txt").write_text("assert f(1) == 2\n")
    assert sandbox.main(tmp_path / "p.py", tmp_path / "t.txt") == 1
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 2
    assert out.isascii()
    assert all(c.isprintable() for line in out.splitlines() for c in line)


READS_INPUT = {  # name: program; it does not print 2, or does not end as it should
    "prints nothing": "pass",
    "prints the input": "print(input(), end='')",
    "prints and then raises": "print(2, end='', flush=True)\nraise ValueError",
    "prints and is killed": "import ctypes, os\nos.write(1, b'2')\nctypes.string_at(0)",
    "prints and exits with another status": "import os\nos.write(1, b'2')\nos._exit(3)",
    "closes what it prints to and goes on": (
        "import os, time\nos.write(1, b'2')\nos.closerange(1, 64)\ntime.sleep(100)"),
    "prints a guess of the token": "print('0' * 32 + '[\"pass\", null]')",
    "prints bytes that are no text": "import os\nos.write(1, bytes(range(256)))",
    "prints without an end": "while True: print('2' * 10000)",
    "prints more in an exit function": "import atexit\natexit.register(print, 3)\nprint(2, end='')",
    "prints from two threads": (
        "import threading\nthreading.Thread(target=print, args=(2,)).start()\nthreading.Thread(target=print).start()"),
    "writes into its input": (
        "import os\nos.lseek(0, 0, 0)\nos.write(0, b'2')\nos.lseek(0, 0, 0)\nprint(open(0).read(), end='')"),
    "replaces print": "import builtins\nbuiltins.print = lambda *a: None\nprint(2)",
    "raises in an exit function": "import atexit, os\natexit.register(os._exit, 4)\nprint(2, end='')",
    "duplicates the pipe and stays": "import os, time\nos.write(1, b'2')\nos.dup2(1, 9)\nos.close(1)\ntime.sleep(100)",
}  # fmt: skip


@pytest.mark.parametrize("name", READS_INPUT)
def test_reading_input(name):
    result = attack(
        READS_INPUT[name], PRINTED, PRINTED._replace(check=""), timeout_s=0.7, threads=True
    )
    assert result.verdicts[0] != "pass", result
    assert result.values[0] is None


# ---- the kernel ------------------------------------------------------------------------------------------------------
SYSTEM = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
def attempt():
    done = []
    for number, *args in CALLED:
        got = libc.syscall(number, *args)
        if got != -1 or ctypes.get_errno() != errno.ENOSYS:
            done.append((number, got, ctypes.get_errno()))
    return done
"""
SYSTEM_CALLS = {  # name: system calls of x86-64 that are not there
    "keyrings": [(248, 0, 0, 0, 0, -3), (249, 0, 0, 0, 0), (250, 0, -3, 1)],
    "asynchronous input and output": [(206, 8, bytes(8)), (207, 0), (208, 0), (209, 0), (210, 0)],
    "io_uring": [(425, 8, bytes(120)), (426, 0), (427, 0)],
    "message queues": [
        (240, b"q", 0o102, 0o600, None),
        (241, b"q"),
        (242, 0),
        (243, 0),
        (244, 0),
        (245, 0),
    ],
    "shared memory of System V": [(29, 0, 4096, 0o1600), (30, 0), (31, 0), (67, 0)],
    "semaphores of System V": [(64, 0, 1, 0o1600), (65, 0), (66, 0), (220, 0)],
    "message queues of System V": [(68, 0, 0o1600), (69, 0), (70, 0), (71, 0)],
    "watches of files": [(253,), (294, 0), (254, 0, b"/", 0xFFF), (255, 0), (300, 0, 0), (301, 0)],
    "personality": [(135, 0xFFFFFFFF), (135, 0x0040000)],
    "programs in the kernel": [(321, 0, bytes(48), 48), (298, bytes(120), 0, -1, -1, 0)],
    "faults handled by the program": [(323, 0), (323, 1)],
    "another kernel": [(246, 0), (320, 0), (175, 0), (313, 0), (176, 0), (174, 0)],
    "swap and accounting": [(167, b"x", 0), (168, b"x"), (163, None), (179, 0)],
    "log of the kernel": [(103, 10, None, 0), (103, 3, bytes(16), 16)],
    "clocks of the machine": [
        (164, None, None),
        (227, 0, bytes(16)),
        (159, bytes(208)),
        (305, 0, bytes(208)),
    ],
    "names of the machine": [(170, b"x", 1), (171, b"x", 1)],
    "tracing": [
        (101, 0, 0, 0, 0),
        (101, 16, 1, 0, 0),
        (310, 1, 0, 0, 0, 0, 0),
        (311, 1, 0, 0, 0, 0, 0),
        (312, 1, 1, 0),
    ],
    "advice about the memory of others": [(440, 0), (448, 0), (256, 0), (279, 0)],
    "handles of processes": [(434, 1, 0), (424, 3, 9, None, 0), (438, 3, 0, 0)],
    "signals to others": [
        (62, 1, 0),
        (200, 1, 0),
        (234, 1, 1, 0),
        (129, 1, 9, 0),
        (297, 1, 1, 9, 0),
    ],
    "namespaces": [(308, 0, 0), (272, 0x10000000), (272, 0x20000), (155, b".", b"."), (161, b".")],
    "mounts": [(165, b"x", b"x", b"tmpfs", 0, None), (166, b"/", 2)],
    "mounts by descriptors": [
        (428, -100, b"/", 1),
        (429, 0),
        (430, b"tmpfs", 0),
        (431, 0),
        (432, 0),
        (433, 0),
        (442, 0),
    ],
    "lists of mounts": [(457, 0), (458, 0), (467, 0), (470, 0)],
    "sockets": [(41, 1, 1, 0), (41, 2, 1, 0), (41, 16, 3, 0), (41, 38, 5, 0), (41, 40, 1, 0)],
    "names of sockets": [(42, 0), (49, 0), (50, 0, 1), (43, 0), (288, 0)],
    "descriptors sent by messages": [(46, 0), (47, 0), (307, 0), (299, 0), (54, 0), (55, 0)],
    "memory without a name": [(319, b"x", 0), (447, 0)],
    "memory that stays": [
        (149, 0, 4096),
        (151, 1),
        (325, 0, 4096, 0),
        (216, 0, 0, 0, 0, 0),
        (330, 0, 0),
    ],
    "memory of nodes": [(237, 0), (238, 0), (239, 0), (450, 0)],
    "order of processes": [
        (144, 0, 1, bytes(4)),
        (142, 0, bytes(4)),
        (314, 0, bytes(48), 0),
        (141, 0, 0, -20),
    ],
    "processors and their disks": [(203, 0, 8, bytes(8)), (251, 1, 0, 0), (252, 1, 0)],
    "other users": [
        (105, 0),
        (106, 0),
        (113, 0, 0),
        (114, 0, 0),
        (117, 0, 0, 0),
        (119, 0, 0, 0),
        (122, 0),
        (123, 0),
    ],
    "groups and capabilities": [
        (116, 0, None),
        (126, bytes(8), bytes(24)),
        (125, bytes(8), bytes(24)),
    ],
    "limits": [(302, 0, 7, bytes(16), None), (160, 7, bytes(16))],
    "timers": [
        (222, 0, None, bytes(8)),
        (283, 0, 0),
        (286, 0),
        (289, -1, bytes(8), 8, 0),
        (282, -1, bytes(8), 8),
    ],
    "files by handles": [
        (303, -100, b".", bytes(136), bytes(8), 0),
        (304, -100, bytes(136), 0),
        (437, -100, b".", 0, 0),
    ],
    "attributes of files": [
        (188, b"."),
        (189, b"."),
        (190, 0),
        (197, b"."),
        (198, b"."),
        (199, 0),
        (463, 0),
    ],
    "owners and modes of files": [
        *[(number, b".", 0o777, 0) for number in (90, 92, 94)],
        *[(number, 0, 0o777, 0) for number in (91, 93)],
        *[(number, -100, b".", 0o777, 0, 0) for number in (260, 268, 452)],
    ],
    "times of files": [
        (132, b".", None),
        (235, b".", None),
        (261, -100, b".", None),
        (280, -100, b".", None, 0),
    ],
    "links and devices": [
        (86, b"a", b"b"),
        (265, -100, b"a", -100, b"b", 0),
        (133, b"d", 0o60600, 0x800),
        (259, 0),
    ],
    "pages moved between pipes": [(275, 0), (276, 0), (278, 0)],
    "disks of the machine": [(162,), (306, 0), (277, 0, 0, 0, 0), (443, 0)],
    "own filters": [
        (317, 0, 0, None),
        (317, 1, 0, bytes(16)),
        (444, None, 0, 1),
        (445, 0),
        (446, 0),
    ],
    "modules of security": [(459, 0), (460, 0), (461, 0)],
    "processes": [
        (57,),
        (58,),
        (435, bytes(88), 88),
        (59, b"/bin/true", None, None),
        (322, -100, b"/bin/true", 0, 0, 0),
    ],
    "processes by flags": [
        (56, flags, 0, 0, 0, 0)
        for flags in (17, 0x4000 | 17, 0x100 | 17, 0x10000000 | 17, 0x7E000000)
    ],
    "sessions and groups": [(112,), (109, 0, 0)],
    "ports of the machine": [(172, 3), (173, 0, 1, 1), (154, 1, bytes(16), 16), (153,)],
    "old calls": [
        (134, b"x"),
        (139, 1, b"x"),
        (136, 0, bytes(32)),
        (212, 0),
        (156, 0),
        (180, 0),
        (181, 0),
        (236, 0),
    ],
    "new calls": [(number, 0, 0, 0, 0) for number in (451, 453, 454, 455, 456, 462, 464, 466)],
    "locks of whole files": [(73, 0, 2)],
    "lists of locks of others": [(274, 1, bytes(8), bytes(8)), (449, 0)],
    "restart": [(169, 0, 0, 0, 0), (169, 0xFEE1DEAD, 0x28121969, 0x89ABCDEF, 0)],
    "commands of descriptors": [
        (72, 0, command, 0) for command in (8, 9, 10, 11, 15, 16, 17, 1024, 1025, 1026, 1033, 1036)
    ],
    "commands of devices": [
        (16, 0, command, bytes(64))
        for command in (
            0x5412,
            0x541C,
            0x5452,
            0x40086602,
            0x40049409,
            0x4020940D,
            0x5411,
            0x540E,
            0x8901,
            0x40045201,
        )
    ],
    "commands of a device above 32 bits": [(16, 0, (1 << 32) - 0xABEE, bytes(8))],
    "options of the process": [
        (157, option, 0, 0, 0, 0)
        for option in (1, 2, 4, 8, 22, 23, 24, 29, 35, 36, 38, 47, 53, 59, 62, 65, 0x59616D61)
    ],
    "pairs of other sockets": [(53, domain, 1, 0, bytes(8)) for domain in (2, 10, 16, 30, 40)],
    "numbers of another machine": [
        (0x40000000 + number, 0, 0, 0) for number in (0, 39, 57, 59, 101, 520, 521, 545)
    ],
    "numbers beyond the table": [(number, 0, 0, 0) for number in (471, 500, 999, 4096, 0x7FFFFFFF)],
}


@X86
@pytest.mark.parametrize("name", SYSTEM_CALLS)
def test_system_calls(name):
    """All of them are unknown to this kernel, as a program sees it."""
    result = attack(f"CALLED = {SYSTEM_CALLS[name]!r}\n" + SYSTEM, sandbox.Probe("attempt()"))
    assert result.verdicts == ["pass"]
    assert result.values == [[]]


MACHINE_CODE = """
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=7)
page.write(bytes.fromhex(CODE))
call = ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
def f(x):
    call()
    return 3
"""
CODES = {  # name: machine code; each ends the program, or it does nothing
    "fork of a 32-bit machine": "b802000000cd80c3",
    "exit of a 32-bit machine that would succeed": "31dbb801000000cd80c3",
    "fork by its own instruction": "b8390000000f05c3",
    "entry of a 32-bit machine": "b8140000000f34c3",
    "far jump to 32 bits": "6a23680000000048cbc3",
    "stack that is gone": "4831e450c3",
    "instruction that is none": "0f0bc3",
    "halt": "f4c3",
    "write to a port": "e680c3",
}


@X86
@pytest.mark.parametrize("name", CODES)
def test_machine_code(name):
    assert attack(MACHINE_CODE.replace("CODE", repr(CODES[name])), EQUAL).verdicts == ["fail"]


# ---- what a program can reach: attempt() returns what it should not have --------------------------------------------
COMMON = """
import os, sys
def tried(function, *args):
    try:
        return [function(*args)]
    except Exception:
        return []
"""
REACHING = {  # name: program
    "process files": "def attempt(): return [p for p in ('self', '1', '2', 'sys', 'kcore', 'keys', 'mounts', 'version')"
    " if os.path.exists('/proc/' + p)]",
    "system files": "def attempt(): return [p for p in ('/sys', '/run', '/var', '/boot', '/mnt', '/srv') if "
    "tried(os.listdir, p) not in ([], [[]])]",
    "homes": "def attempt(): return [p for p in ('/home', '/root/.ssh', '/root/.bashrc', '/root/.cache', "
        "'/root/.netrc') "
    "if tried(os.listdir, p) not in ([], [[]]) or tried(open, p)]",
    "configuration": "def attempt(): return [p for p in ('passwd', 'shadow', 'hosts', 'resolv.conf', 'hostname', "
    "'machine-id', 'os-release', 'ssl') if os.path.exists('/etc/' + p)]",
    "devices": "def attempt(): return [p for p in tried(os.listdir, '/dev') and os.listdir('/dev') "
    "if p not in ('null', 'zero', 'urandom')]",
    "devices by their usual names": "def attempt(): return [p for p in 'shm mqueue pts ptmx tty console mem kmsg fuse "
        "kvm "
    "net/tun random full fd stdin loop0 vda sda rtc'.split() if os.path.exists('/dev/' + p)]",
    "writing to the root": "def attempt(): return tried(os.mkdir, '/x') + tried(open, '/x', 'w')",
    "writing to the interpreter": "def attempt(): return tried(open, os.__file__, 'a') + tried(os.rename, "
        "os.__file__, '/x') "
    "+ tried(os.unlink, os.__file__) + tried(os.truncate, os.__file__, 0)",
    "writing to compiled modules": "def attempt(): return tried(open, os.path.dirname(os.__file__) + "
        "'/__pycache__/x', 'w')",
    "writing to packages": "def attempt(): return [p for p in sys.path if os.path.isdir(p) and tried(open, p + '/x', "
        "'w')]",
    "mapping the interpreter to write": "import mmap\ndef attempt():\n    file = open(os.__file__, 'rb')\n"
    "    return tried(mmap.mmap, file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_WRITE)",
    "parent of its folder": "def attempt(): return tried(open, '../x', 'w') + tried(os.rename, '.', '../y') "
    "+ tried(os.rmdir, '/.sandbox')",
    "link to a process": "def attempt():\n    os.symlink('/proc/1/root', 'l')\n    return tried(os.listdir, 'l/etc')",
    "path above the root": "def attempt(): return tried(open, '/' + '../' * 50 + 'etc/passwd')",
    "descriptor of a folder above": "def attempt():\n    fd = os.open('.', os.O_RDONLY)\n"
    "    return tried(lambda: os.open('../etc/passwd', 0, dir_fd=fd)) + tried(lambda: os.open('proc/1/environ', 0, "
        "dir_fd=fd))",
    "descriptors that were left open": "import stat\ndef attempt():\n    found = []\n    for fd in range(3, 4096):\n"
    "        try:\n            mode = os.fstat(fd).st_mode\n        except OSError:\n            continue\n"
    "        found.append(stat.S_IFMT(mode))\n    return [m for m in found if m != stat.S_IFIFO] + found[2:]",
    "standard files": "def attempt():\n    null = os.stat('/dev/null')\n"
    "    return [fd for fd in (0, 1, 2) if os.fstat(fd).st_rdev != null.st_rdev]",
    "environment of the trainer": "def attempt(): return [k for k in os.environ if k not in ('PATH', 'LANG', 'HOME', "
        "'TMPDIR',"
    " 'PYTHONPATH', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'LC_CTYPE', 'PWD')]",
    "arguments of the template": "def attempt(): return [a for a in sys.orig_argv + sys.argv if 'sandbox' in a.lower()"
    " or 'assert' in a]",
    "texts of the test in memory": "import gc\ndef attempt():\n    words = 'zebra' + 'fish'\n    return [1 for o in "
        "gc.get_objects()"
    " if isinstance(o, dict) for v in list(o.values()) if isinstance(v, str) and words in v]",
    "texts of the test in its frames": (
        "def attempt():\n    frame, word = sys._getframe(), 'zebra' + 'fish'\n    found = []\n    while frame:\n"
        "        found += [k for k, v in frame.f_locals.items() if k != 'word' and word in str(v)]\n"
        "        frame = frame.f_back\n    return found"),
    "processes of others": "def attempt():\n    mine = {os.getpid(), os.getppid()}\n"
    "    return [p for p in range(20, 3000) if p not in mine and tried(os.getpgid, p)]",
    "groups of the user": "def attempt(): return [g for g in os.getgroups() if g != 65534]",
    "user": "def attempt(): return [u for u in (os.getuid(), os.geteuid(), os.getgid()) if u != 65534]",
    "processor time of others": "import time\ndef attempt(): return [p for p in range(1, 30) if p != os.getpid()"
    " and tried(time.clock_gettime, ~p << 3 | 2) not in ([], [0.0])]",
    "priority of others": "def attempt(): return tried(os.getpriority, 0, 1) + tried(os.sched_getscheduler, 1)",
    "limits of others": "import resource\ndef attempt(): return tried(resource.prlimit, 1, 7)",
    "name of the machine": "def attempt(): return [os.uname().nodename] if os.uname().nodename == HOST else []",
    "terminal": "def attempt(): return tried(os.ttyname, 0) + tried(os.ctermid, 0) + tried(open, '/dev/tty')",
    "locks of one another": "import fcntl\ndef attempt():\n    file = open('/dev/null', 'r+b')\n"
    "    return tried(fcntl.lockf, file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
    "locks on Python's files": "import fcntl\ndef attempt():\n    file = open(os.__file__, 'rb')\n"
    "    return tried(fcntl.lockf, file, fcntl.LOCK_SH | fcntl.LOCK_NB)",
    "leases on Python's files": "import fcntl\ndef attempt():\n    file = open(os.__file__, 'rb')\n"
    "    return tried(fcntl.fcntl, file, fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    "notices of folders": "import fcntl\ndef attempt():\n    fd = os.open('.', 0)\n"
    "    return tried(fcntl.fcntl, fd, fcntl.F_NOTIFY, fcntl.DN_MULTISHOT | fcntl.DN_CREATE)",
    "owner of a pipe": "import fcntl\ndef attempt():\n    read, write = os.pipe()\n"
    "    return tried(fcntl.fcntl, read, fcntl.F_SETOWN, os.getppid()) + tried(fcntl.fcntl, read, 10, 9)",
    "queue of a thread pool's processes": "def attempt():\n    import multiprocessing as m\n"
    "    return tried(m.Queue) + tried(m.Lock) + tried(m.Pool, 1) + tried(m.shared_memory.SharedMemory, None, True, 9)"
    " if hasattr(m, 'shared_memory') else tried(m.Queue) + tried(m.Lock)",
    "web": "import urllib.request\ndef attempt(): return tried(urllib.request.urlopen, 'http://1.1.1.1', None, 1)",
    "names of hosts": "import socket\ndef attempt(): return tried(socket.getaddrinfo, 'example.com', 80)",
    "interfaces": "import socket\ndef attempt(): return tried(socket.if_nameindex)",
    "programs by every way": "import pty, subprocess\ndef attempt(): return tried(os.posix_spawn, '/bin/true', "
        "['true'], {}) + "
    "tried(pty.fork) + tried(subprocess.getoutput, 'id') + tried(os.popen, 'id') + tried(os.forkpty)",
    "stack of the template": "import sys\ndef attempt():\n    frame = sys._getframe()\n    while frame:\n"
    "        if 'report' in frame.f_locals:\n            return tried(os.write, frame.f_locals['report'], b'x')\n"
    "        frame = frame.f_back\n    return []",
}  # fmt: skip


@pytest.mark.parametrize("name", REACHING)
def test_reaching(name):
    program = COMMON + f"HOST = {os.uname().nodename!r}\n" + REACHING[name]
    test = "zebrafish = 'zebrafish'\ngot = attempt()\nassert got == []"
    result = attack(program, test)
    assert result.verdicts == ["pass"], result


# ---- what one test leaves for the next ------------------------------------------------------------------------------
# name: what the first program does, what the second one finds, as an expression that must be false
LEAVING = {
    "environment": ("os.environ['LEFT'] = '1'; os.putenv('LEFT', '1')", "os.environ.get('LEFT') or os.getenv('LEFT')"),
    "folder": ("os.mkdir('d'); os.chdir('d')", "os.getcwd().endswith('d') or os.listdir()"),
    "mask of new files": ("os.umask(0o777)", "os.umask(0) == 0o777"),
    "file": ("open('left', 'w').write('x')", "os.path.exists('left')"),
    "file without a mode": ("os.umask(0o777); open('left', 'w')", "os.listdir()"),
    "file that fills the folder": ("open('x', 'wb').write(bytes(7 << 20))",
        "not open('y', 'wb').write(bytes(7 << 20))"),
    "inodes": ("[open(str(i), 'w') and None for i in range(1500)]",
        "any(open(str(i), 'w') is None for i in range(1500))"),
    "random numbers": ("random.seed(1)", "random.random() == random.Random(1).random()"),
    "state of random numbers": ("random.seed(1); random.getrandbits(9)",
        "random.getstate() == random.Random(1).getstate()"),
    "decimal context": ("decimal.getcontext().prec = 3; decimal.DefaultContext.prec = 3",
        "decimal.getcontext().prec == 3"),
    "warnings": ("warnings.simplefilter('error')", "warnings.filters and warnings.filters[0][0] == 'error'"),
    "paths of modules": ("sys.path.insert(0, '/left')", "'/left' in sys.path"),
    "table of modules": ("sys.modules['left'] = sys", "'left' in sys.modules"),
    "builtins": ("builtins.left = 1", "hasattr(builtins, 'left')"),
    "attribute of a module": ("math.left = 1; collections.left = 1",
        "hasattr(math, 'left') or hasattr(collections, 'left')"),
    "recursion limit": ("sys.setrecursionlimit(5000)", "sys.getrecursionlimit() == 5000"),
    "digits of numbers": ("sys.set_int_max_str_digits(0)", "sys.get_int_max_str_digits() == 0"),
    "interval of threads": ("sys.setswitchinterval(1)", "sys.getswitchinterval() == 1"),
    "collector": ("gc.disable(); gc.set_threshold(1)", "not gc.isenabled() or gc.get_threshold()[0] == 1"),
    "trace": ("sys.settrace(print); sys.setprofile(print)", "sys.gettrace() or sys.getprofile()"),
    "signal handlers": ("signal.signal(signal.SIGUSR1, print)", "signal.getsignal(signal.SIGUSR1) is print"),
    "signals ignored": ("signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        "signal.getsignal(signal.SIGTERM) == signal.SIG_IGN"),
    "mask of signals": ("signal.pthread_sigmask(0, range(1, 65))", "signal.pthread_sigmask(0, []) != set()"),
    "alarm": ("signal.setitimer(0, 9); signal.alarm(9)", "signal.getitimer(0) != (0, 0)"),
    "exit functions": ("atexit.register(print)", "atexit._ncallbacks()"),
    "audit hooks": ("sys.addaudithook(lambda *a: builtins.__dict__.update(left=1))", "hasattr(builtins, 'left')"),
    "standard output": ("os.dup2(os.open('o', 65), 1)", "os.fstat(1).st_size"),
    "descriptors": ("[os.pipe() for _ in range(20)]", "len([1 for i in range(3, 64) if not ends(os.fstat, i)]) > 4"),
    "name of the process": ("libc.prctl(15, b'left')", "name() == b'left'"),
    "registered classes": ("collections.abc.Sized.register(int)", "isinstance(1, collections.abc.Sized)"),
    "registered reductions": ("copyreg.pickle(int, str)", "int in copyreg.dispatch_table"),
    "registered encodings": ("codecs.register(lambda n: codecs.lookup('utf-8'))", "not ends(codecs.lookup, 'left')"),
    "cache of expressions": ("re.compile('left')", "any('left' in str(k) for k in re._cache)"),
    "cache of a function": ("functools.lru_cache(len)('left')", "any(o == 'left' for o in gc.get_objects())"),
    "temporary folder": ("tempfile.tempdir = '/left'", "tempfile.tempdir == '/left'"),
    "small number changed": ("ctypes.memset(id(7) + 24, 1, 1)", "3 + 4 != int('7')"),
    "functions of the template": ("hook('setattr')", "hook('hasattr')"),
    "variables of the template": ("hook('set')", "hook('get')"),
    "file kept open by a map": (
        "import mmap; open('m', 'wb').write(bytes(4096)); builtins.m = mmap.mmap(os.open('m', 2), 4096)",
        "os.listdir()"),
    "large file kept open": (
        "open('m', 'wb').write(bytes(7 << 20)); builtins.m = open('m'); os.unlink('m')",
        "not open('y', 'wb').write(bytes(7 << 20))"),
    "folder that is moved": ("os.mkdir('a'); os.chdir('a'); os.rename('../a', '../b')", "os.listdir()"),
    "lock on a device": ("fcntl.lockf(open('/dev/null', 'r+b'), 2 | 4)",
        "ends(fcntl.lockf, open('/dev/null', 'r+b'), 2 | 4)"),
    "entropy of the machine": ("open('/dev/urandom', 'wb').write(bytes(99))", "os.urandom(9) == bytes(9)"),
    "time of the zone": ("os.environ.update(TZ='Asia/Tokyo'); time.tzset()", "time.timezone"),
    "number of arguments": ("sys.argv.append('left'); sys.orig_argv.append('left')",
        "'left' in sys.argv + sys.orig_argv"),
    "hash of a class": ("collections.Counter.__hash__ = lambda s: 1", "collections.Counter.__hash__"),
    "importers": ("sys.meta_path.clear(); sys.path_importer_cache.clear()", "not sys.meta_path"),
    "display and hooks": ("sys.excepthook = sys.unraisablehook = print",
        "print in (sys.excepthook, sys.unraisablehook)"),
    "stack of signals": ("signal.set_wakeup_fd(os.open('x', 2050 | 64))", "signal.set_wakeup_fd(-1) != -1"),
    "printed by the one before": ("print('left-by-one')", "found('left-by-one')"),
}  # fmt: skip
AROUND = (
    COMMON
    + """
import atexit, builtins, codecs, collections.abc, copyreg, ctypes, decimal, fcntl, functools, gc, json, locale
import math, random, re, signal, tempfile, time, warnings
libc = ctypes.CDLL(None)
def ends(function, *args):
    try:
        function(*args)
        return False
    except Exception:
        return True
def name():
    text = ctypes.create_string_buffer(16)
    libc.prctl(16, text)
    return text.value
def frames():
    frame = sys._getframe()
    while frame:
        yield frame
        frame = frame.f_back
def hook(what):
    for frame in frames():
        if 'job' in frame.f_locals and 'libc' in frame.f_locals:
            launcher = frame.f_globals
            if what == 'setattr':
                launcher['Peer'].left = launcher['left'] = 1
            elif what == 'hasattr':
                return 'left' in launcher or hasattr(launcher['Peer'], 'left')
            elif what == 'set':
                frame.f_locals['job']['left'] = 1
            else:
                return 'left' in frame.f_locals['job']
def found(text):
    held = [frame.f_locals.get(name) for frame in frames() for name in ('given', 'row', 'buffer')]
    return any(text in (bytes(v).decode('latin-1') if isinstance(v, memoryview) else str(v)) for v in held)
"""
)


@pytest.mark.parametrize("name", LEAVING)
def test_leaving(name):
    first, second = LEAVING[name]
    programs = [
        AROUND + first + "\ndef f(x): return x + 1\n",
        AROUND + f"def f(x): return bool({second})",
    ]
    tests = [["assert f(1) == 2"] * 2, ["assert f(1) is False"] * 2]
    for result in sandbox.run_tests(programs, tests, **LIMITS):
        assert result.verdicts == ["pass", "pass"], result


# name: a test of the first program, whose outcome the next program should not find in its own
# memory
MEMORY = {
    "value of a probe": sandbox.Probe("'left-by' + '-one'"),
    "values of calls": sandbox.Calls("f", [["left-by-"]], [1.0], 2.0),
    "what a program printed": sandbox.Stdin(""),
    "what a failed assertion got": "assert f('left-by-') == 2",
}


@pytest.mark.parametrize("name", MEMORY)
def test_outcomes_of_the_test_before(name):
    """They passed through the template; the processes of the next test are its copies."""
    first = "def f(x): return x + 'one'\nprint('left-by-' + 'one')\n"
    second = AROUND + "text = '-'.join(['left', 'by', 'one'])\ndef f(x): return found(text)"
    results = sandbox.run_tests(
        [first, second], [[MEMORY[name]], ["assert f(1) is False"]], **LIMITS
    )
    assert results[1].verdicts == ["pass"], results


SCAN = r"""
import ctypes, gc, os, re, sys
libc = ctypes.CDLL(None)
libc.sbrk.restype = ctypes.c_void_p
def scanned():
    file, word = os.open('scan', os.O_RDWR | os.O_CREAT), re.compile(rb'left-by-on[e]')
    kept = [*gc.get_objects(), *sys.modules.values(), *map(vars, sys.modules.values()), *sys.__dict__.values()]
    areas, top = {id(each) >> 20 << 20 for each in kept}, libc.sbrk(0)
    for at in [*(base + i for base in areas for i in range(0, 1 << 20, 4096)), *range(top - (8 << 20), top, 4096)]:
        if libc.pwrite(file, ctypes.c_void_p(at), ctypes.c_size_t(4096), ctypes.c_long(0)) == 4096:
            if word.search(os.pread(file, 4096, 0)):
                return True
    return False
"""


@pytest.mark.parametrize("name", MEMORY)
def test_freed_memory_of_the_template(name):
    """The same, where no variable holds it any more: pages of the heap, read by a system call that
    forgives.
    """
    first = "def f(x): return x + 'one'\nprint('left-by-' + 'one')\n"
    second = SCAN + "def f(x): return scanned()"
    tests = [[MEMORY[name], "assert f('a') == 'aone'"], ["assert f(1) is False"]]
    results = sandbox.run_tests([first, second], tests, **LIMITS)
    assert results[1].verdicts == ["pass"], results


def test_verdict_of_the_test_before():
    """A program cannot learn from its memory how the test before ended."""
    program = AROUND + "def f(x): return found('\"pass\"') or found('\"fail\"')"
    result = attack(program, "assert f(1) is False", "assert f(1) is False")
    assert result.verdicts == ["pass", "pass"], result


NUMBERS = {  # name: an expression that tells the first test of a template from the second
    "variable of the template": "[f.f_locals['test']['first'] for f in frames() if 'test' in f.f_locals]",
    "folder": "os.getcwd()",
    "number of the process": "os.getpid()",
    "number of the device": "os.stat('.').st_dev",
    "address of an object": "id(os)",
    "descriptors": "[i for i in range(64) if not ends(os.fstat, i)]",
}


@pytest.mark.parametrize("name", NUMBERS)
def test_number_of_the_test(name):
    """A program cannot tell the first of its tests from the second, but where KNOWN says so."""
    result = attack(AROUND + f"def f(x): return {NUMBERS[name]}", *[sandbox.Probe("f(1)")] * 2)
    assert result.verdicts == ["pass", "pass"]
    assert result.values[0] == result.values[1], result


# ---- what costs much ------------------------------------------------------------------------------------------------
# name: program; it does not pass, in little time, and the next program is as fast as ever
BOMBS = {
    "threads with small stacks": (
        "import _thread, threading, time\nthreading.stack_size(32768)\nlock = threading.Lock()\nlock.acquire()\n"
        "def f(x):\n    for n in range(4000):\n        _thread.start_new_thread(lock.acquire, ())\n    return 2"),
    "pipes": "import os\nkept = []\ndef f(x):\n    for _ in range(2000): kept.append(os.pipe())\n    return 2",
    "event descriptors": "import os\ndef f(x):\n    for _ in range(2000): os.eventfd(0)\n    return 2",
    "large pipes": (
        "import fcntl, os\ndef f(x):\n    for _ in range(200): fcntl.fcntl(os.pipe()[1], 1031, 1 << 20)\n    return 2"),
    "socket buffers": (
        "import socket\nkept = []\ndef f(x):\n    for _ in range(200):\n        kept.append(socket.socketpair())\n"
        "        kept[-1][0].setblocking(False)\n        try:\n            while True: kept[-1][0].send(bytes(65536))\n"
        "        except BlockingIOError: pass\n    return 2"),
    "files kept open": "kept = []\ndef f(x):\n    for i in range(500): kept.append(open(str(i), 'w'))\n    return 2",
    "inodes": "def f(x):\n    for i in range(5000): open(str(i), 'w').close()\n    return 2",
    "folders": "import os\ndef f(x):\n    for i in range(5000): os.mkdir(str(i))\n    return 2",
    "links": "import os\ndef f(x):\n    for i in range(5000): os.symlink('x' * 4000, str(i))\n    return 2",
    "disk by allocation": (
        "import os\ndef f(x):\n    for i in range(9): os.posix_fallocate(os.open(str(i), 66), 0, 1 << 20)\n    return "
        "2"),
    "disk by writing": "def f(x):\n    for i in range(9): open(str(i), 'wb').write(bytes(1 << 20))\n    return 2",
    "disk by an unlinked file": (
        "import os\ndef f(x):\n    file = open('x', 'wb')\n    os.unlink('x')\n    for _ in range(99): "
        "file.write(bytes(1 << 20))\n"
        "    file.flush()\n    return 2"),
    "file with holes": "import os\ndef f(x):\n    os.truncate(os.open('x', 66), 1 << 40)\n    return 2",
    "memory by shared maps": (
        "import mmap\nkept = []\ndef f(x):\n    for _ in range(900): kept.append(mmap.mmap(-1, 1 << 20))\n    return "
        "2"),
    "memory by a map of a device": (
        "import mmap\ndef f(x):\n    with open('/dev/zero', 'r+b') as file: m = mmap.mmap(file.fileno(), 900 << 20)\n"
        "    return 2"),
    "memory by a map of a file": (
        "import mmap, os\nkept = []\ndef f(x):\n    fd = os.open('x', 66)\n    os.truncate(fd, 1 << 22)\n"
        "    for _ in range(900): kept.append(mmap.mmap(fd, 1 << 22))\n    return 2"),
    "memory by the break": (
        "import ctypes\ndef f(x):\n    libc = ctypes.CDLL(None)\n    libc.sbrk.restype = ctypes.c_void_p\n"
        "    assert libc.sbrk(ctypes.c_long(900 << 20)) != ctypes.c_void_p(-1).value\n    return 2"),
    "memory by a string": "def f(x): return len('x' * (900 << 20)) and 2",
    "memory by numbers": "def f(x): return (1 << (1 << 33)) and 2",
    "memory by a regular expression": "import re\ndef f(x): return re.match('(x*)*' * 9999 + 'y', 'x' * 99) and 2",
    "memory by the compiler": "def f(x): return eval('+'.join(['1'] * 3_000_000)) and 2",
    "memory in the judge": (
        "def f(x):\n    y = [0]\n    for _ in range(22): y = [y, list(y)]\n    return y"),
    "memory in the judge by text": "def f(x): return ['x' * 50_000_000 for _ in range(9)]",
    "memory in the judge by objects": (
        "class A: pass\ndef f(x):\n    while True: yield A()"),
    "deep stack": "import sys\nsys.setrecursionlimit(10**8)\ndef f(x): return f(x)",
    "deep stack in C": (
        "import sys\nsys.setrecursionlimit(10**8)\nclass A:\n    def __repr__(s): return repr(s)\ndef f(x): return "
        "repr(A())"),
    "deep parser": "def f(x): return eval('(' * 10**6)",
    "deep destruction": (
        "class A: pass\ndef f(x):\n    a = None\n    for _ in range(10**6):\n        b = A()\n        b.a, a = a, b\n"
        "    del a, b\n    return 3"),
    "processor in the kernel": (
        "import os\ndef f(x):\n    while True: os.getrandom(1 << 20)"),
    "processor by signals": (
        "import signal\nsignal.signal(signal.SIGALRM, lambda *a: None)\nsignal.setitimer(0, 1e-6, 1e-6)\n"
        "def f(x):\n    while True: pass"),
    "sleep that cannot be broken": (
        "import select, signal\nsignal.pthread_sigmask(0, range(1, 65))\ndef f(x):\n    while True: select.select([], "
        "[], [])"),
    "wait for itself": "import threading\ndef f(x):\n    lock = threading.Lock()\n    lock.acquire()\n    "
        "lock.acquire()",
    "wait for the judge": HOOK + "def f(x): return os.read(READ, 1 << 20) and os.read(READ, 1 << 20)",
    "processor while it loads": "while True: pass",
    "sleep while it loads": "import time\ntime.sleep(100)",
    "sleep in the end": "import atexit, time\natexit.register(time.sleep, 100)\ndef f(x): raise SystemExit",
    "stop by a limit of files": "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_DFL)\ndef f(x):\n"
    "    open('x', 'wb').write(bytes(9 << 20))\n    return 2",
    "output to its own pipes": HOOK + "def f(x):\n    while True: os.write(WRITE, b'[' * 60000)",
    "callbacks without an end": "def f(g):\n    while True: g()",
    "large messages": "def f(x): return {i: 'x' * 1000 for i in range(10**5)} and [list(range(10**6))] * 3",
    "many objects": "class A: pass\ndef f(x): return [A() for _ in range(200_000)]",
    "collision of texts": (
        "import ctypes\ndef f(x):\n    class A(str):\n        __hash__ = lambda s: 1\n"
        "    return {A(i) for i in range(20000)}"),
    "pool of threads that do not end": (
        "import concurrent.futures, time\npool = concurrent.futures.ThreadPoolExecutor(60)\n"
        "for _ in range(60): pool.submit(time.sleep, 100)\ndef f(x): raise SystemExit(0)"),
    "threads that spin": (
        "import threading\ndef spin():\n    while True: pass\nfor _ in range(20): "
        "threading.Thread(target=spin).start()\n"
        "def f(x):\n    while True: pass"),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(name):
    test = "assert f(lambda: 1) == 2" if name == "callbacks without an end" else EQUAL
    if name == "memory in the judge by objects":
        test = "assert list(f(1)) == [2]"
    started, threads = time.monotonic(), threading.active_count()
    result = attack(BOMBS[name], test, timeout_s=0.6, memory_mb=256, threads=True)
    assert result.verdicts[0] != "pass", result
    assert time.monotonic() - started < 8
    assert threading.active_count() == threads


def test_disk_without_namespaces(layers, tmp_path, monkeypatch):
    """Fifty times the limit, allocated between two looks at the folder."""
    monkeypatch.setattr(sandbox, "layers", lambda: layers | {"namespaces": False})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = "import os\ndef f(x):\n    for i in range(50):\n        fd = os.open(str(i), 66)\n"
    program += "        os.posix_fallocate(fd, 0, 1 << 20)\n        os.close(fd)\n    return 2"
    (result,) = sandbox.run_tests([program], [[EQUAL]], **(LIMITS | {"disk_mb": 1}))
    assert result.verdicts != ["pass"], result
    assert not [*tmp_path.iterdir()]


def test_number_of_threads():
    """What a program may start is far below what a machine has process ids for (32,768), whatever
    its memory.
    """
    program = "import _thread, threading\nthreading.stack_size(32768)\nlock = threading.Lock()\nlock.acquire()\ndef f(x):\n"
    program += "    n = 0\n    try:\n        for n in range(3000): _thread.start_new_thread(lock.acquire, ())\n"
    program += "    except Exception: pass\n    return n"
    result = attack(program, sandbox.Probe("f(1)"), threads=True, memory_mb=2048)
    assert result.values[0] is None or result.values[0] <= 512, result


# ---- the checks of problems.py: EvalPlus' rules for values -----------------------------------------------------------
def plus(want):
    """Calls of f that are right if they return what is wanted, as EvalPlus compares."""
    inputs = [[len(want)]]
    problem = problems.Problem("HumanEval/0", "f", cases=problems.Plus(inputs, inputs, 0.0))
    known = problems.Expected(([want], [want]), ([2.0], [2.0]), (1 << 26, 1 << 26))
    return problems.plus_tests(problem, known)[0]


CHECKS = {  # name: program, what is wanted
    "empty arrays in a list of the right length": (
        "import numpy as np\ndef f(n): return [np.empty((0, n))] * n", [1.5, 2.5]),
    "empty arrays in a tuple of the right length": (
        "import numpy as np\ndef f(n): return (np.empty((0, n)),) * n", (1.5, 2.5)),
    "list of an empty list": ("def f(n): return [[]]", [1.5]),
    "array that broadcasts": ("import numpy as np\ndef f(n): return np.empty((0, 2))", [1.5, 2.5]),
    "not a number in a list": ("def f(n): return [float('nan')] * n", [1.5, 2.5]),
    "infinite numbers in a list": ("def f(n): return [float('inf')] * n", [1.5, 2.5]),
    "number equal to all in a list": (
        "class A(float):\n    __eq__ = __sub__ = __rsub__ = lambda *a: 0.0\ndef f(n): return [A(9)] * n", [1.5, 2.5]),
    "text that is a number": ("def f(n): return ['1.5', '2.5']", [1.5, 2.5]),
    "list of a class of its own": ("class A(list):\n    __len__ = lambda s: 2\ndef f(n): return A()", [1.5, 2.5]),
    "range as long as memory": ("def f(n): return [range(1 << 60)] * n", [1.5, 2.5]),
    "deque of nothing": ("import collections\ndef f(n): return collections.deque()", [1.5, 2.5]),
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKS)
def test_checks_of_values(name):
    program, want = CHECKS[name]
    result = attack(program, plus(want), timeout_s=2.0)
    assert result.verdicts == ["fail"], result
    assert attack(f"def f(n): return {want!r}", plus(want)).verdicts == ["pass"]


def test_the_ends_of_these_attacks_work():
    """An honest program behind each of them passes, so that what fails above is the attack."""
    for program in (TALK + "always(2)", HOOK + GOOD, COMMON + GOOD, AROUND + GOOD):
        assert attack(program, EQUAL).verdicts == ["pass"]
    # and where it runs in the judge this takes the token
    assert attack("x = 1", TAKES_TOKEN + "\nraise AssertionError").verdicts == ["pass"]


# ---- modes and options ----------------------------------------------------------------------------------------------
OPTIONS = {  # name: program, test, options; none of them passes
    "main block that is left out": (
        "def f(x): return 0\nif __name__ == '__main__':\n    def f(x): return x + 1\n", EQUAL, {"main_block": False}),
    "other name of the main module": (
        "import sys\nsys.modules['__main__'] = type(sys)('x')\ndef f(x): return 0", EQUAL, {"main_block": False}),
    "thread that answers for the program": (
        HOOK + "import threading, time\ndef late():\n    while True:\n        time.sleep(0.01)\n"
        "        os.write(WRITE, b'[\"got\", 2, [], []]' + bytes([10]))\nthreading.Thread(target=late, "
        "daemon=True).start()\n"
        "def f(x): return 3", "assert f(1) == 4", {"threads": True}),
    "thread that changes what was returned": (
        "import threading, time\ny = [1]\ndef late():\n    while True: y[0] += 1\n"
        "threading.Thread(target=late, daemon=True).start()\ndef f(x): return y",
        "y = f(1)\nassert y == [-2] or y[0] == -2", {"threads": True}),
    "thread that outlives the program": (
        "import os, threading, time\nthreading.Thread(target=time.sleep, args=(100,)).start()\nos._exit(0)", EQUAL,
        {"threads": True}),
    "probe that evaluates something else": (
        "import builtins\nbuiltins.eval = lambda *a: 1 / 0\ndef f(x): return 2", PROBE, {}),
    "check by an object equal to all": (
        "class A(list):\n    __eq__ = lambda *a: True\ndef f(x): return A([0])", CHECKED, {}),
    "check that is called with its own data": ("def f(x): return [2, 6]", CHECKED._replace(
        check="def right(number, inputs, value): return value is data or value == data[number]", data=[2, 6]), {}),
    "check by changed inputs": (
        "def f(x):\n    x.append(2)\n    return x", CALLS._replace(
            inputs=[[[1]], [[5]]], check="def right(number, inputs, value): return value == inputs[0]"), {}),
    "check by an empty array": (
        "import numpy as np\ndef f(x): return np.array([])",
        CALLS._replace(check="def right(number, inputs, value): return not (value != [2, 6][number])"), {}),
    "check by two looks": (
        HOOK + "class A(int): pass\nn = [0, 2] * 9\nOPS['base'] = lambda value: n.pop()\ndef f(x): return "
        "A(1)", CHECKED, {}),
    "calls of a function that replaces itself": (
        "def f(x):\n    global f\n    f = 2\n    return f", CHECKED, {}),
    "calls that raise the end of iteration": ("def f(x): raise StopIteration", CHECKED, {}),
    "calls that exit": ("import os\ndef f(x): os._exit(0)", CHECKED, {}),
    "calls that write lines": (
        "import os\ndef f(x):\n    for fd in range(64):\n        try:\n            os.write(fd, bytes([10]) * 9)\n"
        "        except OSError:\n            pass\n    return 0", CHECKED, {}),
    "calls of which one is late": (
        "import time\ndef f(x):\n    if x == 5: time.sleep(9)\n    return x + 1",
        CHECKED._replace(limits=[0.2, 0.2]), {}),
    "calls that do their work before": (
        "import time\nend = time.process_time() + 9\ndef f(x): return x + 1\nwhile time.process_time() < end: pass",
        CHECKED._replace(timeout_s=0.5), {}),
    "calls of a class": ("class f:\n    def __init__(s, x): pass\n    __eq__ = lambda *a: True", CHECKED, {}),
    "calls by the other end": (TALK + "always({'t': [True, 0.0]})", CHECKED, {}),
    "calls by the other end with no pair": (TALK + "always(2)", CHECKED, {}),
    "calls by the other end with objects": (TALK + "always({'t': [F, F]})", CHECKED, {}),
    "input that is not read": ("print(3)", PRINTED, {}),
    "input in a program without a main block": (
        "if __name__ != '__main__': print(2, end='')", PRINTED, {"main_block": False}),
    "program of no text and a test that wants a name": ("", "assert f is None or f", {}),
    "program that is a test": ("assert True", "assert f(1) == 2", {}),
    "program with a coding line": ("# -*- coding: utf-7 -*-\ndef f(x): return 0", EQUAL, {}),
    "program with a form feed and returns": ("def f(x):\r\f return 0\r", EQUAL, {}),
    "program that ends the text of the test": ('"""\ndef f(x): return 0\n#', EQUAL, {}),
    "program as long as the pipe": ("x = '" + "x" * 200_000 + "'\ndef f(x): return 0", EQUAL, {}),
    "little memory": ("def f(x): return 0", EQUAL, {"memory_mb": 64}),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_modes_and_options(name):
    program, test, options = OPTIONS[name]
    assert attack(program, test, **options).verdicts[0] != "pass"


def test_processes_and_files_are_gone_after_all_of_this():
    tasks = Path("/proc/self/task")
    children = [pid for task in tasks.iterdir() for pid in (task / "children").read_text().split()]
    names = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children]
    assert not [name for name in names if b"marshal" in name]
    assert not [*Path("/dev/shm").glob("left*")]
    assert inside.OPERATIONS["len"] is len


def test_an_object_that_a_probe_brings_back_equals_nothing():
    result = attack("class A:\n    __eq__ = lambda *a: True\ndef f(x): return A()", PROBE)
    assert result.verdicts == ["pass"]
    assert all(result.values[0] != other for other in (1, 2, True, "", [], {}, ()))
