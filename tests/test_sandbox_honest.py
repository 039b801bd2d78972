"""Honest programs get the verdicts of plain Python, and no message of a program does harm. Slow:
four minutes.

The programs are made from texts with random names, constants and values, in the forms of AceCode,
HumanEval, MBPP and LiveCodeBench; a third of them are then made wrong. The verdicts of plain Python
are those of a process that is forked for each test. The fuzzer makes forms of the wire format,
mutates them, and gives them to the judge's end; and programs in the sandbox write some of them into
their pipe. HONEST_SEED makes other programs and forms.

What is left out, as sandbox.py says that it differs, or for it is random:
- an operator between an object of the program and data, but for + * divmod and in: V(1) == 1, V(1)
< 5, V(1) ** 2
- objects of other types, such as pathlib.Path, compared with the test's own; Ellipsis and
NotImplemented
- the order of sets, and so their repr() and list()
- what RARE below holds: it is tried by itself
"""

import ast
import collections
import concurrent.futures
import contextlib
import datetime
import decimal
import fractions
import itertools
import json
import math
import mmap
import os
import random
import re
import reprlib
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
import warnings
from pathlib import Path

import pytest

import sandbox
from jail import inside, wire

pytestmark = pytest.mark.slow
HERE = Path(__file__).resolve().parent
SEED = int(os.environ.get("HONEST_SEED", "0"))
COUNT = int(os.environ.get("HONEST_COUNT", "2000"))

# A template: a program; behind "--" a test, behind "==" a test on every line, behind "<<" an input,
# behind ">> f" the arguments of a call on every line. $f and the like are names and constants, the
# same wherever they stand; $int and the like are new values everywhere. "== ?" is replaced by a
# comparison with the value that plain Python gives.
TEMPLATES = r'''
def $f($x):
    return [$v * $K for $v in $x if $v % $M != 0]
==
assert $f($ints) == ?
assert $f([]) == ?
assert $f($x=$ints) == ?
assert sorted($f($ints)) == ?
====
def $f($x, $y=$K):
    """Sum of the $y largest."""
    return sum(sorted($x, reverse=True)[:$y])
==
assert $f($ints) == ?
assert $f($ints, $nat) == ?
assert $f($floats, $y=2) == ?
assert isinstance($f($ints), int)
====
def $f($x: str) -> str:
    $y = {}
    for $v in $x:
        $y[$v] = $y.get($v, 0) + 1
    return ''.join($v for $v in $x if $y[$v] == 1)
==
assert $f($text) == ?
assert $f('') == ?
assert $f($word * 2) == ?
assert set($f($word)) == ?
====
def $f($x, $y):
    if $y == 0:
        raise ZeroDivisionError('$S')
    return $x / $y
==
assert $f($int, $K) == ?
assert abs($f($float, 3) - ($float)) < 1e3
assert $f($int, $M) == ?
--
try:
    $f($int, 0)
except ZeroDivisionError as e:
    assert str(e) == '$S'
else:
    assert False, 'must raise'
====
from functools import lru_cache

@lru_cache(maxsize=None)
def $f($n):
    if $n < 2:
        return $n
    return $f($n - 1) + $K * $f($n - 2)
==
assert $f($nat) == ?
assert $f(60) == ?
assert $f(0) == 0 and $f(1) == 1
--
assert $f(5) == ?
assert $f.cache_info().currsize >= 5
====
import math
def $f($x):
    return math.sqrt(sum(($v - $K) ** 2 for $v in $x)) / max(1, len($x))
==
assert $f($floats) == ?
assert abs($f($ints) - 0) < 100
assert $f([]) == ?
--
import math
assert math.isclose($f([1.5, $float]), $f([1.5, $float]), rel_tol=1e-2) in (True, False)
assert not math.isnan($f($ints))
====
def $f($x):
    if not $x:
        return None
    return max($x, key=lambda $v: ($v % $K, $v))
==
assert $f([]) is None
assert $f($ints) == ?
assert $f($ints) is not None
assert $f([]) == ?
====
def $f($n):
    if $n < 2:
        return False
    for $v in range(2, int($n ** 0.5) + 1):
        if $n % $v == 0:
            return False
    return True
==
assert $f($nat) == ?
assert $f(97) is True
assert $f($K * $M) is False
assert [$v for $v in range(30) if $f($v)] == ?
====
def $f($x, $y):
    return set($x) & set($y), set($x) ^ set($y)
==
assert $f($ints, $ints) == ?
assert $f($ints, [])[0] == set()
assert len($f($nats, $nats)[1]) == ?
--
a, b = $f([1, 2, $K], [2, $K])
assert a == {2, $K}
assert b == ?
====
def $f($x):
    $x.sort(key=abs)
    $x.append($K)
    del $x[0]
==
assert $f($ints) is None
--
xs = $ints
same = xs
$f(xs)
assert xs == ?
assert same is xs
--
xs = $ints
xs.insert(0, $int)
$f(xs)
$f(xs)
assert xs == ?
====
def $f($x):
    for $i in range(len($x)):
        for $v in range($i + 1, len($x)):
            $x[$i][$v], $x[$v][$i] = $x[$v][$i], $x[$i][$v]
    return $x
==
assert $f([[1, 2, $int], [4, $int, 6], [7, 8, 9]]) == ?
--
m = [[$int, 2], [3, $int]]
r = $f(m)
assert r == m
assert m == ?
assert r is m
====
def $f($x):
    $y = {}
    for $v in $x:
        $y.setdefault(len($v), []).append($v)
    return $y
==
assert $f($words) == ?
assert $f([]) == ?
assert sorted($f($words)) == ?
assert isinstance($f($words), dict)
====
from collections import Counter
def $f($x):
    return Counter($x.lower().replace(' ', ''))
==
assert $f($text) == ?
assert $f($word)[$char] == ?
assert $f($word).most_common(1)[0][1] == ?
--
from collections import Counter
assert $f($text) == Counter($text)
assert $f('aab') + Counter('b') == Counter({'a': 2, 'b': 2})
====
from collections import Counter
def $f($x, $n):
    return [$w for $w, $v in sorted(Counter($x).items(), key=lambda $i: (-$i[1], $i[0]))][:$n]
==
assert $f($words, $K) == ?
assert $f(['b', 'a', 'b', $word], 1) == ?
assert tuple($f($words, 2)) == ?
====
import collections
def $f($x):
    $y = collections.defaultdict(list)
    for $k, $v in $x:
        $y[$k].append($v)
    return $y
==
assert $f($pairs) == ?
assert dict($f($pairs)) == ?
assert $f([(1, 2), (1, $int)])[1] == ?
--
d = $f($pairs)
assert d[$big] == []
assert len(d) == ?
====
from collections import defaultdict, OrderedDict
def $f($x):
    $y = OrderedDict()
    for $v in $x:
        $y[$v] = $y.pop($v, 0) + $K
    return $y
==
assert list($f($ints).items()) == ?
assert $f($words) == ?
assert list($f([1, 2, 1, $int])) == ?
====
from collections import deque
def $f($x, $n=$K):
    $y = deque($x, maxlen=$n)
    $y.rotate(1)
    return $y
==
assert $f($ints) == ?
assert list($f($ints, 3)) == ?
assert $f($ints).maxlen == $K
assert $f($words)[0] == ?
====
from collections import namedtuple
$C = namedtuple('$C', ['$a', '$b'])
def $f($x, $y):
    return $C($x + $K, $y)
==
assert $f($int, $word) == ?
assert $f($int, $word).$b == ?
assert $f($int, 0)[0] == ?
assert $f($int, $ints)._replace($b=1).$b == 1
--
p = $C($int, $b=2)
q, r = p
assert q == p.$a and r == 2
assert isinstance(p, tuple)
assert p._asdict() == ?
====
from dataclasses import dataclass, field
@dataclass
class $C:
    $a: int
    $b: list = field(default_factory=list)
    def $m(self, $x):
        self.$b.append($x * $K)
        return self
    @property
    def total(self):
        return self.$a + sum(self.$b)
==
assert $C($int).$b == []
assert $C($int, $ints).total == ?
assert $C(1, [2]) == $C(1, [2])
assert $C(1) != $C(2)
--
$x = $C($int)
assert $x.$m($int) is $x
$x.$m(2).$m($int)
assert $x.$b == ?
assert $x.total == ?
assert repr($x) == ?
--
$x = $C($a=$int, $b=$ints)
$x.$a += 5
assert $x.$a == ?
assert $x == $C($x.$a, $x.$b)
====
from dataclasses import dataclass
@dataclass(frozen=True, order=True)
class $C:
    $a: int
    $b: str = '$S'
def $f($x):
    return sorted($C($v) for $v in $x)
==
assert [$v.$a for $v in $f($ints)] == ?
assert $C(1) < $C(2)
assert len({$C(1), $C(1), $C($K)}) == ?
assert $f($ints) == ?
--
try:
    $C(1).$a = 2
except AttributeError:
    pass
else:
    assert False
====
from enum import Enum
class $C(Enum):
    RED = $K
    GREEN = '$S'
    def $m(self):
        return self.name.lower()
def $f($x):
    return $C.RED if $x else $C.GREEN
==
assert $f(1) == $C.RED
assert $f(0).value == '$S'
assert $f($int).name == ?
assert $f(0) is $C.GREEN
assert $C('$S') == $C.GREEN
assert $C['RED'].$m() == 'red'
assert len($C) == 2
assert [$v.name for $v in $C] == ?
====
import enum
class $C(enum.IntEnum):
    LOW = 1
    HIGH = $big
def $f($x):
    return $C.HIGH if $x > $K else $C.LOW
==
assert $f($int) == ?
assert $f(100) == $C.HIGH
assert $f(100) > $C.LOW
assert $f(0) + 1 == 2
assert sorted([$C.HIGH, $C.LOW])[0] is $C.LOW
====
class $C:
    def __init__(self):
        self.items = []
    def push(self, $x):
        self.items.append($x)
    def pop(self):
        if not self.items:
            raise IndexError('empty')
        return self.items.pop()
    def is_empty(self):
        return not self.items
    def __len__(self):
        return len(self.items)
    def __iter__(self):
        return iter(self.items)
    def __contains__(self, $x):
        return $x in self.items
--
$s = $C()
assert $s.is_empty()
$s.push($int)
$s.push($word)
assert len($s) == 2
assert $s.pop() == ?
assert list($s) == ?
--
$s = $C()
for $v in $ints:
    $s.push($v)
assert $s.items == ?
assert $int in $s or $s.pop() == ?
assert bool($s) == ?
--
$s = $C()
try:
    $s.pop()
    assert False
except IndexError as error:
    assert str(error) == 'empty'
assert $s.is_empty() is True
====
class $C:
    def __init__(self, $x, $y=$K):
        self.x, self.y = $x, $y
    def __add__(self, other):
        return $C(self.x + other.x, self.y + other.y)
    def __sub__(self, other):
        return $C(self.x - other.x, self.y - other.y)
    def __mul__(self, $n):
        return $C(self.x * $n, self.y * $n)
    __rmul__ = __mul__
    def __eq__(self, other):
        return isinstance(other, $C) and (self.x, self.y) == (other.x, other.y)
    def __hash__(self):
        return hash((self.x, self.y))
    def __repr__(self):
        return f'$C({self.x}, {self.y})'
    def __abs__(self):
        return (self.x ** 2 + self.y ** 2) ** 0.5
    def __neg__(self):
        return $C(-self.x, -self.y)
    def __bool__(self):
        return bool(self.x or self.y)
==
assert $C(1, 2) + $C($int, $int) == ?
assert $C(1, 2) - $C($int, 4) == ?
assert $C($int, 2) * 3 == ?
assert 3 * $C($int, 2) == $C($int, 6)
assert abs($C(3, 4)) == 5.0
assert str($C($int)) == ?
assert -$C(1, $int) == ?
assert not $C(0, 0)
assert $C(1, 2) != $C(2, 1)
assert {$C(1, 2): 'a'}[$C(1, 2)] == 'a'
assert sum([$C(1, 1), $C(2, $int)], $C(0, 0)) == ?
====
class $C:
    count = 0
    def __init__(self, name, balance=0):
        $C.count += 1
        self.name = name
        self._balance = balance
    @property
    def balance(self):
        return self._balance
    @balance.setter
    def balance(self, $x):
        if $x < 0:
            raise ValueError('negative')
        self._balance = $x
    @classmethod
    def $m(cls, text):
        name, _, amount = text.partition(':')
        return cls(name, int(amount))
    @staticmethod
    def $n($x):
        return $x * $K
    def deposit(self, amount):
        self.balance += amount
        return self.balance
--
acc = $C('$S', $nat)
assert acc.deposit($nat) == ?
assert acc.balance == ?
acc.balance = $nat
assert acc.balance == ?
--
acc = $C.$m('bob:$K')
assert acc.name == 'bob' and acc.balance == $K
assert $C.$n($int) == ?
assert acc.$n(2) == ?
assert $C.count == 1
--
acc = $C($word)
try:
    acc.balance = -1
except ValueError as e:
    assert 'negative' in str(e)
else:
    raise AssertionError
assert acc.balance == 0
====
from abc import ABC, abstractmethod
import math
class $D(ABC):
    @abstractmethod
    def area(self): ...
    def $m(self):
        return f'{type(self).__name__}:{self.area():.2f}'
class $C($D):
    def __init__(self, r):
        self.r = r
    def area(self):
        return math.pi * self.r ** 2
class $E($D):
    def __init__(self, w, h=$K):
        self.w, self.h = w, h
    def area(self):
        return self.w * self.h
==
assert $E($nat).area() == ?
assert abs($C($nat).area()) > 0
assert $C($K).$m() == ?
assert isinstance($C(1), $D)
assert issubclass($E, $D)
assert not isinstance($E(1), $C)
assert sum($v.area() for $v in [$E(1), $E(2, $nat)]) == ?
--
try:
    $D()
except TypeError:
    pass
else:
    assert False
====
class $C(Exception):
    def __init__(self, message, code=$K):
        super().__init__(message)
        self.code = code
class $D($C, ValueError):
    pass
def $f($x):
    if $x < 0:
        raise $D('$S', $x)
    if $x == 0:
        raise $C('zero')
    return $x
==
assert $f($nat) == ?
--
try:
    $f(-$nat)
except $C as e:
    assert e.code < 0
    assert e.args == ?
    assert str(e) == ?
else:
    assert False
--
try:
    $f(-1)
except ValueError as e:
    assert isinstance(e, $D)
    assert type(e).__name__ == '$D'
else:
    assert False
--
caught = None
try:
    $f(0)
except $D:
    caught = 'D'
except $C as e:
    caught = e.code
assert caught == $K
====
def $f($n):
    $x, $y = 0, 1
    for $i in range($n):
        yield $x
        $x, $y = $y, $x + $y * $K
==
assert list($f($K)) == ?
assert sum($f(8)) == ?
assert next($f(3)) == 0
assert [*$f(4)] == ?
assert max($f(5)) == ?
--
g = $f(5)
assert next(g) == 0
assert next(g) == 1
assert list(g) == ?
assert next(g, 'end') == 'end'
--
import itertools
assert list(itertools.islice($f(100), 6)) == ?
assert dict(enumerate($f(3))) == ?
assert list(zip($f(3), 'abc')) == ?
====
import itertools
def $f():
    return itertools.count($K, $M)
def $g($x):
    return map(lambda $v: $v + $K, filter(None, $x))
def $h($x, $y):
    return zip($x, reversed($y))
==
assert list($g($ints)) == ?
assert list($h($ints, $words)) == ?
--
it = $f()
assert [next(it) for _ in range(4)] == ?
--
out = []
for $v in $f():
    if $v > 40:
        break
    out.append($v)
assert out == ?
--
a = $g($ints)
assert iter(a) is a
assert sorted(a) == ?
====
def $f($k):
    $v = [0]
    def $g($x):
        $v[0] += $x
        return $v[0] * $k
    return $g
==
assert $f($K)($int) == ?
assert callable($f(1))
assert [$g(1) for $g in map($f, [1, 2, $K])] == ?
--
step = $f($M)
step($int)
assert step($int) == ?
other = $f(1)
assert other(0) == 0
====
def $f(*$x):
    def $g($v):
        for $h in reversed($x):
            $v = $h($v)
        return $v
    return $g
==
assert $f(lambda a: a + $K, lambda a: a * $M)($int) == ?
assert $f()($word) == ?
assert $f(str, abs)(-$nat) == ?
assert $f(len, sorted, set)([1, 1, $int]) == ?
assert list(map($f(float), $ints)) == ?
====
def $f($g, $x, $y=None):
    $z = []
    for $v in $x:
        if $y is None or $y($v):
            $z.append($g($v))
    return $z
==
assert $f(lambda v: v ** 2, $ints) == ?
assert $f(str, $ints, lambda v: v > $K) == ?
assert $f(len, $words) == ?
assert $f($g=abs, $x=[-1, $int]) == ?
--
calls = []
def probe(v):
    calls.append(v)
    return v
$f(probe, $ints)
assert calls == ?
--
def bad(v):
    raise KeyError(v)
try:
    $f(bad, [$K])
except KeyError as e:
    assert e.args == ($K,)
else:
    assert 0
====
import functools, time
def $g($h):
    @functools.wraps($h)
    def wrapper(*args, **kwargs):
        wrapper.calls += 1
        return $h(*args, **kwargs)
    wrapper.calls = 0
    return wrapper
@$g
def $f($x, $y=$K):
    """Doc."""
    return $x ** $y
--
assert $f(2) == ?
assert $f($nat, $y=2) == ?
assert $f.calls == 2
assert $f.__name__ == '$f' and $f.__doc__ == 'Doc.'
==
assert $f($nat) == ?
assert $f.calls == 0
====
class $C:
    def __init__(self, path='$S'):
        self.path, self.log = path, []
    def __enter__(self):
        self.log.append('enter')
        return self
    def __exit__(self, kind, value, traceback):
        self.log.append('exit')
        return False
    def $m(self, $x):
        self.log.append($x)
--
with $C() as c:
    c.$m($int)
    assert c.log == ?
assert c.log[-1] == 'exit'
--
c = $C($word)
with c as d:
    assert d is c
assert c.log == ['enter', 'exit']
assert c.path == ?
====
import contextlib
@contextlib.contextmanager
def $f($x):
    $x.append('in')
    try:
        yield len($x) + $K
    finally:
        $x.append('out')
--
log = []
with $f(log) as n:
    assert n == ?
    log.append($int)
assert log == ?
====
import heapq
def $f($x, $n):
    $y = []
    for $v in $x:
        heapq.heappush($y, -$v)
        if len($y) > $n:
            heapq.heappop($y)
    return sorted(-$v for $v in $y)
==
assert $f($ints, $K) == ?
assert $f([], 1) == ?
assert $f($nats, 2) == heapq.nsmallest(2, $nats)
====
import heapq
from typing import Dict, List, Tuple
def $f(graph: Dict[str, List[Tuple[str, int]]], $s: str) -> Dict[str, int]:
    dist = {$s: 0}
    queue = [(0, $s)]
    while queue:
        d, node = heapq.heappop(queue)
        if d > dist.get(node, d):
            continue
        for $v, $w in graph.get(node, []):
            if d + $w < dist.get($v, float('inf')):
                dist[$v] = d + $w
                heapq.heappush(queue, (d + $w, $v))
    return dist
==
assert $f({'a': [('b', $nat), ('c', $nat)], 'b': [('c', $nat)]}, 'a') == ?
assert $f({}, $word) == ?
assert $f({'x': [('y', $nat)], 'y': [('x', 1)]}, 'y')['x'] == ?
====
import re
def $f($x):
    return re.findall(r'[a-$q]+|\d+', $x)
def $g($x):
    $y = re.search(r'(?P<word>[a-z]+)\s*(\d*)', $x)
    return $y
==
assert $f($text) == ?
assert $f('a1b22' + $word) == ?
assert $g($text).group() == ?
assert $g('$S $K').groups() == ?
assert $g('$S12').group('word', 2) == ?
assert $g('12') is None
assert $g('ab').span() == (0, 2)
====
import json
def $f($x):
    return json.dumps($x, sort_keys=True)
def $g($x):
    return json.loads($x)
==
assert $f($dict) == ?
assert $g($f($nested)) == ?
assert $g('{"a": [1, null, $K.5, true]}') == ?
--
import json
$x = $nested
assert json.loads($f($x)) == $g($f($x))
try:
    $g('{$S')
except json.JSONDecodeError:
    ok = True
assert ok
--
try:
    $g('[1,')
except ValueError as e:
    assert type(e).__name__ == 'JSONDecodeError'
====
from fractions import Fraction
def $f($x, $y):
    return Fraction($x, $y) + Fraction(1, $K)
==
assert $f($int, $M) == ?
assert $f(1, $M).denominator == ?
assert $f($int, 2) * 2 == ?
assert float($f($int, 4)) == ?
assert abs($f($nat, 3) - $f($nat, 3)) < $big
====
from decimal import Decimal, ROUND_HALF_UP
def $f($x):
    return Decimal($x).quantize(Decimal('0.01'), rounding=ROUND_HALF_UP)
==
assert $f('$K.455') == ?
assert str($f('$M')) == ?
assert $f('1.005') + 1 == ?
assert $f('-$K.5') < 0
assert $f('12.345') == ?
====
import datetime
def $f($x, $y=$K):
    return datetime.date(2024, 1, 30) + datetime.timedelta(days=$x * $y)
def $g($x):
    return datetime.datetime.strptime($x, '%Y-%m-%d')
==
assert $f($int) == ?
assert $f($nat).isoformat() == ?
assert $f(1).year == 2024
assert $g('2021-0$K-11') == ?
assert $g('2021-0$K-11').weekday() == ?
assert $f(3) > $f(1)
assert ($f(10) - $f(1)).days == ?
--
from datetime import date, timedelta
assert $f(0) == date(2024, 1, 30)
assert $f($nat) - date(2024, 1, 1) == ?
--
try:
    $g('$S')
except ValueError:
    pass
else:
    assert False
====
from datetime import datetime, timedelta, time
def $f($h, $m):
    return (datetime(2023, 5, $K, $h, $m) + timedelta(minutes=$big)).time()
def $g($x):
    return max($x) - min($x)
==
assert $f(10, $K) == ?
assert $f($M, 0).hour == ?
assert $f(1, 1).strftime('%H:%M') == ?
--
import datetime
a, b = datetime.datetime(2020, 1, 1), datetime.datetime(2020, 1, $K)
assert $g([a, b]) == ?
assert $g([a, b]).total_seconds() == ?
====
def $f($x, $y):
    return complex($x, $y) * 1j ** $K
==
assert $f($int, $int) == ?
assert abs($f(3, 4) ) == 5.0
assert $f($float, 0).imag == ?
assert $f(1, 2).conjugate() == ?
====
def $f($x):
    return bytes(reversed($x.encode())) + b'\x00$K'
def $g($x):
    return bytearray($x[::2])
==
assert $f($word) == ?
assert $f($text)[0] == ?
assert $g(b'abcdef$K') == ?
assert $f('é').hex() == ?
assert len($g(bytes(range($nat)))) == ?
====
def $f($x):
    if isinstance($x, list):
        return [$f($v) for $v in $x]
    if isinstance($x, dict):
        return {str($k): $f($v) for $k, $v in $x.items()}
    if isinstance($x, (set, frozenset, tuple)):
        return tuple(sorted($x))
    return $x
==
assert $f($nested) == ?
assert $f([1, (3, 2), {$K: {5, 4}}]) == ?
assert $f($dict) == ?
assert $f(None) is None
assert $f([True, None, 1.5, $word])[3] == ?
====
def $f($x):
    $y = []
    for $v in $x:
        if isinstance($v, (list, tuple)):
            $y.extend($f($v))
        else:
            $y.append($v)
    return $y
==
assert $f($nested) == ?
assert $f([[1, [2, [$int]]], (4,)]) == ?
assert $f([]) == []
assert len($f($matrix)) == ?
====
def $f($n):
    return 1 if $n <= 1 else $n * $f($n - 1)
def $g($n):
    return $g($n + 1)
==
assert $f($nat) == ?
assert $f(200) == ?
assert $f(30) % $big == ?
--
try:
    $g($K)
except RecursionError:
    pass
else:
    assert False
====
import sys
sys.setrecursionlimit(10000)
def $f($n):
    return 0 if $n == 0 else $K + $f($n - 1)
==
assert $f($nat) == ?
assert $f(3000) == ?
====
class $C:
    def __init__(self, val=0, left=None, right=None):
        self.val = val
        self.left = left
        self.right = right
def $f(root):
    if root is None:
        return 0
    return 1 + max($f(root.left), $f(root.right))
def $g(root):
    return [] if not root else $g(root.left) + [root.val + $K] + $g(root.right)
def $h(root):
    if root:
        root.left, root.right = $h(root.right), $h(root.left)
    return root
==
assert $f(None) == 0
assert $f($C(1, $C(2), $C($int, $C(4)))) == ?
assert $g($C($int, $C($int), $C(3))) == ?
assert $g($h($C(1, $C(2), $C($int)))) == ?
--
root = $C($int)
root.left = $C(5)
root.left.right = $C(val=$int)
assert $g(root) == ?
assert $f(root) == 3
assert $h(root).right.val == 5
assert root.left is None
====
class $C:
    def __init__(self, value, next=None):
        self.value = value
        self.next = next
class $D:
    def __init__(self):
        self.head = None
        self.size = 0
    def add(self, $x):
        node = $C($x)
        if not self.head:
            self.head = node
        else:
            last = self.head
            while last.next:
                last = last.next
            last.next = node
        self.size += $K - $K + 1
    def reverse(self):
        prev, node = None, self.head
        while node:
            node.next, prev, node = prev, node, node.next
        self.head = prev
    def to_list(self):
        out, node = [], self.head
        while node:
            out.append(node.value)
            node = node.next
        return out
    def __getitem__(self, i):
        return self.to_list()[i]
--
l = $D()
for $v in $ints:
    l.add($v)
l.reverse()
assert l.to_list() == ?
assert l.size == ?
assert l[-1] == ?
--
l = $D()
assert l.head is None
l.add($word)
l.add($int)
assert l.head.value == ?
assert l.head.next.value == ?
assert l.head.next.next is None
assert list(l) == ?
assert l[0:1] == ?
====
class $C:
    def __init__(self, capacity: int):
        self.capacity, self.cache = capacity, {}
    def get(self, key):
        if key not in self.cache:
            return -1
        self.cache[key] = self.cache.pop(key)
        return self.cache[key]
    def put(self, key, value):
        self.cache.pop(key, None)
        self.cache[key] = value
        if len(self.cache) > self.capacity:
            self.cache.pop(next(iter(self.cache)))
--
lru = $C(2)
lru.put(1, $int)
lru.put(2, $int)
assert lru.get(1) == ?
lru.put($K + 2, 3)
assert lru.get(2) == ?
assert list(lru.cache.items()) == ?
--
lru = $C(capacity=$K)
for $v in range($nat):
    lru.put($v, $v * $v)
assert [lru.get($v) for $v in range(6)] == ?
assert len(lru.cache) == ?
====
import numpy as np
def $f($x):
    return np.array($x) * $K + 1
def $g($x):
    return float(np.mean($x))
==
assert $f($ints).tolist() == ?
assert $g($ints) == ?
assert $f($matrix).shape == ?
assert $f($matrix).sum(axis=0).tolist() == ?
--
import numpy as np
assert np.array_equal($f([1, $int]), np.array([$K + 1, $int]))
--
import numpy as np
assert np.allclose($f($floats), np.array($f($floats)))
assert isinstance($f([1]), np.ndarray)
assert $f([$int])[0] == ?
====
import numpy as np
def $f($x):
    $x += $K
    return $x.max(), $x.dtype.kind, $x > $M
==
assert $f(__import__('numpy').array($ints))[0] == ?
--
import numpy as np
a = np.arange($nat) + 1
m, k, mask = $f(a)
assert m == ?
assert a.tolist() == ?
assert (k, mask.tolist()) == ?
====
import math
def $f($x):
    return $x / $K * math.pi
def $g($x):
    return round($x, 2), math.floor($x), float('inf') if $x > 10 else float('-inf')
==
assert $f($float) == ?
assert abs($f($int) - $f($int)) < 1e-9
assert round($f($float), 3) == ?
assert $g($float) == ?
assert $g($float)[2] in (math.inf, -math.inf)
--
import math
def check(candidate):
    assert math.isclose(candidate(2), candidate(2.0))
    assert math.isclose(candidate($K), math.pi)
    assert candidate($float) == ?
check($f)
====
def $f($x):
    return float('nan') if not $x else min($x)
==
assert $f([]) != 0
assert $f($ints) == ?
--
import math
assert math.isnan($f([]))
assert not math.isnan($f($floats))
====
def $f($x):
    $x['$S'] = $x.pop('a', None)
    $x.setdefault('n', []).append($K)
    return len($x)
==
assert $f({'a': $int}) == ?
--
d = {'a': $int, 'b': $ints}
assert $f(d) == ?
assert d == ?
$f(d)
assert d['n'] == ?
--
inner = {'n': [1]}
d = {'x': inner}
$f(inner)
assert d == ?
====
def $f($x, $y=[]):
    $y.append($x)
    return $y
--
assert $f($int) == ?
assert $f($int) == ?
assert $f($int, [0]) == ?
--
a = $f(1)
b = $f($K)
assert a is b
assert a == ?
====
_cache = {}
$x_total = 0
def $f($x):
    global $x_total
    $x_total += $x
    _cache[$x] = $x_total
    return $x_total
def $g():
    return _cache
--
$f($int)
assert $f($nat) == ?
assert $g() == ?
==
assert $g() == {}
assert $f($int) == ?
====
class $C:
    def __init__(self, $x):
        self.data = list($x)
    def __len__(self): return len(self.data)
    def __getitem__(self, i): return self.data[i]
    def __setitem__(self, i, v): self.data[i] = v
    def __delitem__(self, i): del self.data[i]
    def __call__(self, *$x): return [$v * $K for $v in $x]
    def __reversed__(self): return reversed(self.data)
    def __str__(self): return '<' + ','.join(map(str, self.data)) + '>'
    def __format__(self, spec): return f'{len(self.data):{spec or "d"}}'
    def __int__(self): return sum(self.data)
    def __lt__(self, other): return self.data < other.data
--
c = $C($ints)
assert len(c) == ?
c[0] = $int
assert c[0] == ?
del c[0]
assert list(c) == ?
assert str(c) == ?
assert c(1, $int) == ?
--
c = $C($ints)
assert list(reversed(c)) == ?
assert f'{c:03}' == ?
assert int(c) == ?
assert c[1:3] == ?
assert $C([1]) < $C([2])
assert sorted([$C([5]), $C([$K])])[0].data == ?
--
c = $C([])
try:
    c[$K]
except IndexError:
    pass
else:
    assert False
assert not c
====
class $C(dict):
    def __missing__(self, key):
        return key * $K
    def $m(self):
        return sorted(self)
class $D(list):
    def $n(self):
        return sum(self) + $K
==
assert $C(a=1)['b'] == ?
assert $C({1: $int}).$m() == [1]
assert $D($ints).$n() == ?
assert $D([1, $int]) == [1, $int]
assert len($D($ints)) == ?
--
d = $D()
d.append($int)
d.extend([1, $K])
assert d == ?
assert d.$n() == ?
assert isinstance(d, list) and sorted(d) == ?
--
c = $C()
c[$K] = $word
c.update(x=1)
assert c == ?
assert 'x' in c and c.get('zz') is None
====
import string, random
def $f($x, $n=$K):
    table = str.maketrans(string.ascii_lowercase, string.ascii_lowercase[$n:] + string.ascii_lowercase[:$n])
    return $x.translate(table)
def $g($x):
    random.seed($x)
    return random.randint(0, $big)
==
assert $f($text) == ?
assert $f($f($word, 3), 23) == ?
assert $g($int) == ?
assert $f('') == ''
assert 0 <= $g($nat) <= $big
====
from itertools import permutations, combinations, groupby, accumulate, product
def $f($x):
    return list(permutations($x))
def $g($x):
    return [($k, len(list($v))) for $k, $v in groupby($x)]
def $h($x):
    return list(accumulate($x, lambda a, b: a * $K + b))
==
assert $f([1, 2, $K]) == ?
assert $g($word + 'aab') == ?
assert $h($ints) == ?
assert len($f('abcd')) == ?
assert set($f([1, $int])) == ?
====
def $f($x, $y):
    $z = [[0] * (len($y) + 1) for _ in range(len($x) + 1)]
    for i, a in enumerate($x):
        for j, b in enumerate($y):
            $z[i + 1][j + 1] = $z[i][j] + 1 if a == b else max($z[i][j + 1], $z[i + 1][j])
    return $z[-1][-1]
==
assert $f($word, $word) == ?
assert $f($text, $text) == ?
assert $f('', $word) == 0
assert $f($ints, $ints) == ?
====
def $f($x):
    $s = []
    for $v in $x:
        if $v in '([{':
            $s.append($v)
        elif not $s or '([{'.index($s.pop()) != ')]}'.index($v):
            return False
    return not $s
==
assert $f('([]{})') is True
assert $f('([)]') == ?
assert $f('(' * $K + ')' * $M) == ?
assert not $f(']')
====
from typing import Iterator
class $C:
    def __init__(self, $n, step=$K):
        self.n, self.step, self.i = $n, step, 0
    def __iter__(self):
        self.i = 0
        return self
    def __next__(self):
        if self.i >= self.n:
            raise StopIteration
        self.i += self.step
        return self.i
==
assert list($C($nat)) == ?
assert sum($C(10)) == ?
assert [$v * 2 for $v in $C($nat, 3)] == ?
assert $K in $C(20)
assert max($C($nat + 1)) == ?
--
it = iter($C(6, 5))
assert next(it) == 5
assert next(it) == 10
try:
    next(it)
    assert False
except StopIteration:
    pass
====
import operator
from functools import reduce, partial, cmp_to_key
def $f($x):
    return reduce(operator.mul, $x, $K)
$g = partial(int, base=$M + 1)
def $h($x):
    return sorted($x, key=cmp_to_key(lambda a, b: (a % $K > b % $K) - (a % $K < b % $K)))
$k = lambda *a, **o: (a, o)
==
assert $f($ints) == ?
assert $g('10') == ?
assert $h($ints) == ?
assert $k(1, $int, z=$word) == ?
assert $k(*$ints, **{'q': 2}) == ?
====
class $C:
    def __init__(self):
        self._tasks = {}
        self._next = 1
    def add(self, title, *, priority=$K, tags=()):
        task_id = self._next
        self._tasks[task_id] = {'title': title, 'priority': priority, 'tags': list(tags), 'done': False}
        self._next += 1
        return task_id
    def done(self, task_id):
        if task_id not in self._tasks:
            return False
        self._tasks[task_id]['done'] = True
        return True
    def pending(self):
        return [t['title'] for t in sorted(self._tasks.values(), key=lambda t: -t['priority']) if not t['done']]
    def get(self, task_id):
        return self._tasks.get(task_id)
--
m = $C()
first = m.add($word, priority=$int)
m.add($word, tags=('x', $word))
assert m.pending() == ?
assert m.done(first) is True
assert m.done($big) is False
assert m.pending() == ?
assert m.get(2) == ?
assert m.get(99) is None
--
m = $C()
assert m.add('$S') == 1
t = m.get(1)
t['title'] = 'changed'
assert m.pending() == ?
====
import asyncio
async def $f($x):
    await asyncio.sleep(0)
    return $x * $K
async def $g($x):
    return await asyncio.gather(*map($f, $x))
def $h($x):
    return asyncio.run($g($x))
==
assert $h($ints) == ?
--
import asyncio
assert asyncio.run($f($int)) == ?
====
import copy
class $C:
    def __init__(self, $x):
        self.rows = $x
    def copy(self):
        return copy.deepcopy(self)
    def __eq__(self, other):
        if not isinstance(other, $C):
            return NotImplemented
        return self.rows == other.rows
    def transpose(self):
        return $C([list(r) for r in zip(*self.rows)])
==
assert $C($matrix).transpose().rows == ?
assert $C([[1]]) == $C([[1]])
assert $C([[1]]) != $C([[$big]])
--
a = $C([[1, 2], [3, $int]])
b = a.copy()
assert a == b and a is not b
b.rows[0][0] = $big
assert a.rows == ?
assert a != b
====
def $f($x):
    print('$S', $x)
    return print
def $g($x):
    return str, [int, float], type($x)
def $h($x):
    return $x.__class__.__name__, NotImplemented is not None, ...
==
assert $g($int)[0] is str
assert $g($word)[2] == str
assert $g($word)[1] == [int, float]
assert $h($floats)[0] == ?
assert $g(1)[0]($int) == ?
====
def $f($x):
    try:
        return int($x)
    except ValueError:
        return '$S'
    except TypeError as e:
        return str(e)[:3]
    finally:
        pass
==
assert $f('$K') == ?
assert $f($word) == ?
assert $f(None) == ?
assert $f($float) == ?
====
def $f($x, $y):
    if type($x) != type($y):
        raise TypeError(f"{type($x).__name__} and {type($y).__name__}")
    assert $x != $y, '$S'
    return {1: $x}[$y]
--
try:
    $f(1, 'a')
except TypeError as e:
    assert str(e) == 'int and str'
else:
    assert False
--
try:
    $f($K, $M + 20)
except KeyError as e:
    assert e.args[0] == $M + 20
else:
    assert False
--
try:
    $f(1, 1)
except AssertionError as e:
    assert str(e) == '$S'
else:
    raise Exception
--
ok = False
try:
    $f(1, 2, 3)
except TypeError:
    ok = True
assert ok
--
import unittest
class T(unittest.TestCase):
    def test_it(self):
        with self.assertRaises(KeyError):
            $f(1, 2)
        with self.assertRaises(TypeError) as caught:
            $f(1, $word)
        self.assertIn('int', str(caught.exception))
suite = unittest.defaultTestLoader.loadTestsFromTestCase(T)
result = unittest.TextTestRunner(stream=open('/dev/null', 'w')).run(suite)
assert result.wasSuccessful()
====
import bisect
class $C:
    def __init__(self):
        self._v = []
    def add(self, $x):
        bisect.insort(self._v, $x)
        return self
    def median(self):
        n = len(self._v)
        return None if not n else (self._v[n // 2] + self._v[~(n // 2)]) / 2
    def __le__(self, other): return self._v <= other._v
    def __iter__(self): yield from self._v
--
c = $C()
assert c.median() is None
for $v in $ints:
    c.add($v)
assert c.median() == ?
assert [*c] == ?
assert c.add($int).add(2).median() == ?
assert $C() <= c
====
class $C:
    def __init__(self, **kw):
        for k, v in kw.items():
            setattr(self, k, v)
    def __getattr__(self, name):
        if name.startswith('no'):
            raise AttributeError(name)
        return name * 2
    def __eq__(self, other):
        return self.__dict__ == other.__dict__
==
assert $C(a=$int).a == ?
assert $C().$a == '$a$a'
assert hasattr($C(), 'nothing') is False
assert getattr($C(), 'nope', $K) == ?
assert $C(x=1) == $C(x=1)
--
c = $C()
c.$b = $ints
assert c.$b == ?
c.$b.append(1)
assert c.$b == ?
====
from typing import NamedTuple, Optional
class $C(NamedTuple):
    name: str
    score: float = $R
    def $m(self) -> str:
        return f'{self.name}:{self.score:.1f}'
def $f($x) -> Optional[$C]:
    return max(($C(n, s) for n, s in $x), key=lambda c: c.score, default=None)
==
assert $f([]) is None
assert $f([($word, $float), ($word, $float)]) == ?
assert $f([('a', $nat)]).name == 'a'
assert $C('$S').$m() == ?
assert $C('x') == ('x', $R)
assert $f([('a', 1)]) == $C('a', 1)
assert sorted([$C('b'), $C('a')])[0].name == 'a'
====
def $f($n):
    return {$i: {$v for $v in range(1, $i) if $i % $v == 0} for $i in range(2, $n + 2)}
def $g($n):
    return frozenset(range(0, $n, $K)), range($n), {}.keys(), {1: $n}.items()
==
assert $f($K) == ?
assert $f(6)[6] == {1, 2, 3}
assert $g($nat)[0] == ?
assert $g($nat)[1] == ?
assert list($g($nat)[3]) == ?
assert len($g(3)[2]) == 0
====
def sum($x, $y):
    return $x + $y * $K
==
assert sum(1, 2) == ?
assert sum($int, $int) == ?
====
def $f($x):
    $y = 0
    while $x:
        $x, $v = divmod($x, 10)
        $y = $y * 10 + $v
    return $y
def $g($x):
    return 2 ** ($x * 10), bin($x), hex($K), oct(8), ~$x, $x << 3
==
assert $f($big) == ?
assert $f($nat) == ?
assert $g($nat) == ?
assert $g(100)[0] == ?
assert $g(1)[1] == ?
====
class $C:
    """Inventory."""
    TAX = $R
    def __init__(self, items=None):
        self.items = items or {}
    def add(self, name, price, quantity=1):
        if price < 0 or quantity <= 0:
            raise ValueError("Invalid price or quantity")
        old = self.items.get(name, (price, 0))
        self.items[name] = (price, old[1] + quantity)
    def total(self):
        return round(sum(p * q for p, q in self.items.values()) * (1 + self.TAX), 2)
    def __str__(self):
        return '\n'.join(f'{n}: {p:.2f} x {q}' for n, (p, q) in self.items.items())
--
inv = $C()
inv.add('$S', $nat.5, $K)
inv.add($word, 2)
assert inv.total() == ?
assert inv.items == ?
assert str(inv) == ?
assert abs(inv.total() - 1) >= 0
--
inv = $C({'a': (1, 2)})
assert inv.items['a'][1] == 2
try:
    inv.add('x', -1)
except ValueError as err:
    assert str(err) == "Invalid price or quantity"
else:
    assert False
assert $C.TAX == $R
assert inv.TAX == ?
====
def $f($x):
    return (yield_all($x))
def yield_all($x):
    for $v in $x:
        if isinstance($v, list):
            yield from yield_all($v)
        else:
            $y = yield $v
            if $y:
                yield $y * $K
==
assert list($f($matrix)) == ?
assert set($f([[1], [[2]]])) == {1, 2}
assert tuple($f($nested)) == ?
--
g = $f([1, 2])
next(g)
assert g.send($int) == ?
g.close()
assert list(g) == []
====
class $D:
    kind = 'base'
    def __init__(self, name): self.name = name
    def speak(self): return f'{self.name} {self.sound()}'
    def sound(self): raise NotImplementedError
    def __eq__(self, other): return type(self) is type(other) and self.name == other.name
    def __hash__(self): return hash(self.name)
class $C($D):
    kind = '$S'
    def sound(self): return 'woof' * $M
class $E($C):
    def __init__(self, name, age=$K):
        super().__init__(name)
        self.age = age
    def speak(self): return super().speak() + '!'
==
assert $C($word).speak() == ?
assert $E($word).speak() == ?
assert $E('a').age == $K and $E('a').kind == '$S'
assert $C('a') == $C('a') and $C('a') != $E('a')
assert isinstance($E('x'), $D) and issubclass($E, $C)
assert {$C('a'), $C('a')} == {$C('a')}
assert $C.kind == '$S'
--
try:
    $D('x').speak()
except NotImplementedError:
    pass
else:
    assert False
====
import sys, io
def $f($x):
    out = io.StringIO()
    for $v in $x:
        print($v, end='$K', file=out)
    return out.getvalue()
def $g($x):
    sys.stdout.write(str($x))
    print($x, file=sys.stderr)
==
assert $f($ints) == ?
assert $g($word) is None
====
def $f($x):
    with open('$S.txt', 'w') as file:
        for $v in $x:
            file.write(f'{$v}\n')
    with open('$S.txt') as file:
        return [line.strip() for line in file]
==
assert $f($words) == ?
assert $f($ints) == ?
====
import statistics, textwrap, uuid, hashlib, base64
def $f($x):
    return statistics.median($x), statistics.mean($x)
def $g($x):
    return hashlib.md5($x.encode()).hexdigest()[:$K + 3], base64.b64encode($x.encode()).decode()
==
assert $f($nats) == ?
assert $g($word) == ?
assert $f([1, $K])[0] == ?
====
class $C:
    _one = None
    def __new__(cls, *args):
        if cls._one is None:
            cls._one = super().__new__(cls)
        return cls._one
    def __init__(self, value=$K):
        self.value = value
--
a, b = $C(1), $C($int)
assert a is b
assert a.value == ?
assert $C().value == $K
====
class $C:
    def __init__(self):
        self.handlers = {}
    def on(self, name, fn):
        self.handlers.setdefault(name, []).append(fn)
        return fn
    def emit(self, name, *args, **kw):
        return [fn(*args, **kw) for fn in self.handlers.get(name, ())]
--
bus = $C()
seen = []
bus.on('a', seen.append)
bus.on('a', lambda v: v * $K)
assert bus.emit('a', $int) == ?
assert seen == ?
assert bus.emit('none') == []
--
bus = $C()
@lambda fn: bus.on('x', fn)
def handler(v, extra=0):
    return v + extra
assert bus.emit('x', $int, extra=$K) == ?
====
def $f($x):
    match $x:
        case []:
            return 'empty'
        case [int() as a, *rest] if a > $K:
            return a, rest
        case {'k': v}:
            return v
        case str() | bytes():
            return len($x)
        case _:
            return None
==
assert $f([]) == ?
assert $f([$big, 1, 2]) == ?
assert $f({'k': $ints}) == ?
assert $f($word) == ?
assert $f(1.5) is None
assert $f((1, $int)) == ?
====
import typing as t
T = t.TypeVar('T')
class $C(t.Generic[T]):
    __slots__ = ('value', 'rest')
    def __init__(self, value: T, rest: 't.Optional[$C]' = None):
        self.value, self.rest = value, rest
    def __iter__(self):
        node = self
        while node:
            yield node.value
            node = node.rest
    def __len__(self):
        return 1 + (len(self.rest) if self.rest else 0)
def $f($x):
    node = None
    for $v in $x:
        node = $C($v, node)
    return node
==
assert list($f($ints)) == ?
assert len($f($words)) == ?
assert $f([]) is None
assert $C(1, $C($int)).rest.value == ?
assert $f([$K]).value == $K
====
def $f(a, b, /, c=$K, *d, e, **g):
    return a, b, c, d, e, g
==
assert $f(1, 2, e=$int) == ?
assert $f(1, 2, 3, *$ints, e=0, z=$word) == ?
assert $f(*'ab', e=None) == ?
--
try:
    $f(a=1, b=2, e=3)
except TypeError:
    pass
else:
    assert False
====
def $f($x):
    $y = sorted($x, key=lambda $v: $v['$a'])
    $y[0]['$a'] = $K
    return $y[0], $y
--
rows = [{'$a': $int, 'n': 1}, {'$a': $int, 'n': 2}]
low, all_rows = $f(rows)
assert low in rows
assert low is all_rows[0]
assert rows == ?
assert any(row is low for row in rows)
====
import numpy as np
class $C:
    def __init__(self, $x): self.w = np.zeros(len($x)); self.w[:] = $x
    def $m(self, $x): return self.w @ np.asarray($x)
==
assert $C([1, 2]).$m([3, $int]) == ?
assert $C($floats).w.shape[0] == ?
assert abs(float($C([0.5]).$m([$float]))) >= 0
====
from string import Template
import operator as op
def $f($x, $y):
    ops = {'+': op.add, '-': op.sub, '*': op.mul, '/': op.truediv}
    stack = []
    for $v in $x.split():
        if $v in ops:
            b, a = stack.pop(), stack.pop()
            stack.append(ops[$v](a, b))
        else:
            stack.append(float($v))
    return stack.pop() + $y
==
assert $f('3 4 + $K *', 0) == ?
assert $f('1 2 -', $float) == ?
--
try:
    $f('1 0 /', 0)
except ZeroDivisionError:
    pass
else:
    assert False
--
try:
    $f('+', 0)
except IndexError as e:
    assert 'pop' in str(e)
else:
    assert False
====
class $C:
    def __init__(self, $x=0):
        self._value = $x
        self._history = [$x]
    def $m(self, $y):
        self._value += $y * $K
        self._history.append(self._value)
        return self._value
    def _hidden(self):
        return self._value * 2
--
c = $C($int)
c.$m($int)
assert c._value == ?
assert c._history == ?
assert c._hidden() == ?
==
assert $C($int)._value == ?
assert $C().$m($int) == ?
====
class $C(Exception):
    pass
class $D($C):
    def __init__(self, need, have=$K):
        self.need, self.have = need, have
        super().__init__(f'{need} > {have}')
class $E($C, KeyError):
    pass
def $f($x):
    if $x > 50:
        raise $D($x)
    if $x < 0:
        raise $E('$S')
    return $x * $M
==
assert $f($nat) == ?
--
try:
    $f(60)
except $C as e:
    assert e.need == ?
    assert str(e) == ?
else:
    assert False
--
try:
    $f(-$nat)
except KeyError as e:
    assert isinstance(e, $C)
else:
    assert False
--
errors = []
for $v in [1, 51, -1, $int]:
    try:
        $f($v)
    except $E as e:
        errors.append('E')
    except $C as e:
        errors.append(type(e).__name__)
assert errors == ?
--
try:
    $f(99)
except $D as e:
    assert issubclass(type(e), $C) and isinstance(e, Exception)
    assert (e.need, e.have) == ?
====
import functools
def $f($n):
    def $g($h):
        @functools.wraps($h)
        def wrapper(*args, **kwargs):
            for $i in range($n):
                try:
                    return $h(*args, **kwargs)
                except ValueError as e:
                    last = e
            raise last
        return wrapper
    return $g
def $k($h):
    seen = {}
    def wrapper(*args):
        if args not in seen:
            seen[args] = $h(*args)
        return seen[args]
    return wrapper
--
tries = []
@$f($K)
def flaky(x):
    tries.append(x)
    if len(tries) < 2:
        raise ValueError('again')
    return x * 2
assert flaky($int) == ?
assert len(tries) == 2
--
@$f(2)
def always():
    raise ValueError('$S')
try:
    always()
except ValueError as e:
    assert str(e) == '$S'
else:
    assert False
--
@$k
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)
assert fib($nat % 16) == ?
assert fib(12) == 144
--
count = 0
@$k
def slow(a, b):
    global count
    count += 1
    return a + b
assert slow(1, $int) == slow(1, $int) or count == 2
assert slow(1, $K) == ?
====
def $f($x, $y=0):
    return abs($x - $K) + $y
--
from functools import partial, reduce
assert list(map($f, $ints)) == ?
assert sorted($ints, key=$f) == ?
assert max($nats, key=$f) == ?
assert partial($f, $y=5)($int) == ?
assert reduce($f, $ints) == ?
assert list(filter($f, $ints)) == ?
==
assert [$f($v) for $v in $ints] == ?
assert {$v: $f($v) for $v in range($K)} == ?
assert any($f($v) > 20 for $v in $ints) == ?
assert min($f($v, 1) for $v in $ints) == ?
assert $f(*[1, $int]) == ?
assert $f(True) == ?
====
def $f(*$x, **$y):
    return [(type($v).__name__, repr($v)) for $v in $x], sorted($y.items())
==
assert $f($float, $int, $big, -1e300, 1e-7) == ?
assert $f(float('inf'), float('nan'), 1j * $K) == ?
assert $f(b'\x00$S', bytearray(b'$K'), {$K}, frozenset([1])) == ?
assert $f(None, True, $word) == ?
assert $f((1, $int), {'a': $ints}, [$nested], range($K)) == ?
assert $f(int, str, len, ValueError) == ?
assert $f('\ud800', '\x00\n"', 'é' * $K, x=1, b=None) == ?
assert $f(slice(1, $K), {}.items(), {1: 2}.keys()) == ?
--
from collections import Counter, deque, OrderedDict, defaultdict
assert $f(Counter('aab'), deque([1, $int], 3), OrderedDict(a=$K)) == ?
assert $f(defaultdict(int, {1: 2}), defaultdict(list)) == ?
--
import datetime, decimal, fractions
assert $f(datetime.date(2020, 1, $K), datetime.timedelta($int, 5)) == ?
assert $f(decimal.Decimal('$K.50'), fractions.Fraction($int, 7)) == ?
assert $f(datetime.datetime(2020, 1, $K, 3), datetime.time($M, 30)) == ?
====
class $C:
    instances = []
    limit = $K
    def __init__(self, name):
        self.name = name
        $C.instances.append(self)
    def $m(self, $x=1):
        return self.name * $x
    @classmethod
    def $n(cls):
        return len(cls.instances)
--
a, b = $C('a'), $C($word)
assert $C.$n() == 2
assert $C.instances[0] is a
assert $C.instances == [a, b]
assert $C.$m(b, 2) == ?
assert [each.name for each in $C.instances] == ?
--
$C.limit = $int
assert $C.limit == ?
assert $C('z').limit == ?
--
method = $C($word).$m
assert method($K) == ?
assert list(map(method, [1, 2])) == ?
assert callable(method)
--
objects = [$C(w) for w in ['b', 'a', $word]]
assert max(objects, key=lambda o: o.name).name == ?
objects.sort(key=lambda o: o.name)
assert objects[0].name == ?
assert objects.index(objects[1]) == 1
assert {o.name: o for o in objects}['a'] in objects
====
def $f($x, $y):
    if not isinstance($x, (int, float)) or isinstance($x, bool):
        raise TypeError('number needed, not ' + type($x).__name__)
    if $y <= 0:
        raise ValueError(f'bad: {$y}', $y)
    return $x % $y
==
assert $f($int, $K) == ?
assert $f($float, $M) == ?
--
import pytest
with pytest.raises(ValueError, match='bad'):
    $f(1, -$nat)
with pytest.raises(TypeError) as info:
    $f($word, 1)
assert 'str' in str(info.value)
--
for bad in (None, 'a', [], True):
    try:
        $f(bad, 1)
        assert False, 'should raise'
    except TypeError as e:
        assert str(e).startswith('number needed')
--
try:
    $f(1, 0)
except (TypeError, ValueError) as e:
    assert e.args == ?
    error = e
assert isinstance(error, ValueError)
assert repr(error) == "ValueError('bad: 0', 0)"
--
def check(candidate):
    try:
        candidate(1, -$K)
    except Exception as e:
        assert type(e) is ValueError
    else:
        raise AssertionError('no error')
    assert candidate($nat, $nat) == ?
check($f)
====
from typing import *
class $C:
    def __init__(self, rows: List[List[int]]):
        self.rows = [list(r) for r in rows]
        self.shape = (len(rows), len(rows[0]))
    def __getitem__(self, at: Tuple[int, int]) -> int:
        i, j = at
        return self.rows[i][j]
    def __setitem__(self, at, v):
        self.rows[at[0]][at[1]] = v
    def __matmul__(self, other):
        return $C([[sum(a * b for a, b in zip(r, c)) for c in zip(*other.rows)] for r in self.rows])
    def __pow__(self, n):
        out = self
        for _ in range(n - 1):
            out = out @ self
        return out
    def __eq__(self, other): return self.rows == other.rows
    def __iadd__(self, k):
        self.rows = [[v + k for v in r] for r in self.rows]
        return self
--
m = $C([[1, $int], [3, 4]])
assert m[0, 1] == ?
m[1, 1] = $int
assert m.rows == ?
assert (m @ m).rows == ?
assert m @ $C([[1, 0], [0, 1]]) == m
--
m = $C([[$K, 1], [0, 1]])
assert m.shape == (2, 2)
m += $int
assert m.rows == ?
assert m[0, 0] == ?
--
m = $C([[1, 1], [1, 0]])
assert (m @ m @ m).rows == ?
====
import time, os, sys, string
def $f($n):
    start = time.time()
    $x = [$i for $i in range($n * 1000) if $i % $K == 0]
    return len($x), time.time() - start < 60, os.path.join('a', '$S'), sys.maxsize > 0
def $g($x):
    return $x.strip(string.punctuation).encode('utf-8').decode('latin-1')
==
assert $f($nat) == ?
assert $g($text) == ?
assert $f(1)[1:3] == ?
====
def $f($x):
    $y = {'$a': $x, 'list': [$x, {'in': ($x,)}], 'set': {1, $K}, 'none': None, 'fn': None}
    $y['list'].append($y['list'][0])
    return $y
==
assert $f($int) == ?
assert $f($word)['list'][1]['in'][0] == ?
--
d = $f($int)
d['new'] = 1
d['list'].append(2)
assert d == ?
assert $f(1)['list'] == ?
assert 'new' not in $f(2)
--
d = $f($word)
e = $f($word)
assert d == d and d is not e
assert sorted(d) == ?
assert d.pop('none') is None
assert len(d) == ?
====
from collections import defaultdict, deque
class $C:
    def __init__(self):
        self.edges = defaultdict(set)
        self.queue = deque(maxlen=$K + 2)
        self.counts = defaultdict(lambda: $K)
        self.meta = {'n': [0]}
    def add(self, a, b):
        self.edges[a].add(b)
        self.edges[b].add(a)
        self.queue.append((a, b))
        self.counts[a] += 1
    def $m(self, $x):
        return sorted(self.edges.get($x, ()))
--
g = $C()
g.add(1, $int)
g.add(1, 2)
assert g.$m(1) == ?
assert g.edges[1] == ?
assert g.queue == ?
assert g.counts[1] == ?
assert len(g.edges) == ?
--
g = $C()
g.edges['a'].add($int)
g.edges['a'].update({1, 2})
assert g.$m('a') == ?
g.queue.appendleft($word)
g.queue.extend($ints)
assert list(g.queue) == ?
--
g = $C()
g.meta['n'].append($int)
g.meta['new'] = {$word: [1]}
g.meta['new']['k'] = $K
assert g.meta == ?
g.counts['q'] += $int
assert g.counts['q'] == ?
assert g.counts['z'] == $K
g.edges[1] |= {3}
assert g.$m(1) == [3]
====
from collections import defaultdict
def $f($x):
    $y = defaultdict(lambda: defaultdict(int))
    for $v in $x:
        $y[len($v)][$v] += $K
    return $y
def $g($x, $k):
    $x[$k] = $x.get($k, 0) + 1
    return $x
==
assert $f($words) == ?
assert $f($words)[4]['none'] == 0
assert {$k: dict($v) for $k, $v in $f($words).items()} == ?
assert $g({}, $word) == ?
--
d = {}
for $v in $words:
    assert $g(d, $v) is d
assert d == ?
====
import math
def $f($x, $y):
    return math.hypot($x, $y) / $K
def $g($x):
    return [$v / 3 for $v in $x]
--
from pytest import approx
assert $f(3, 4) == approx(5 / $K)
assert $g([1, $int])[0] == approx(0.3333, abs=1e-3)
--
import pytest
assert $f(5, 12) == pytest.approx(13 / $K, rel=1e-6)
assert $f($int, 0) != pytest.approx(1e9)
assert $g([3, 6]) == pytest.approx([1, 2])
--
import numpy as np
assert np.isclose($f(3, 4), 5 / $K)
np.testing.assert_allclose($g([3, $K * 3]), [1, $K])
==
assert abs($f(3, 4) - 5 / $K) < 1e-9
assert round($f($int, $int), 4) == ?
assert all(abs(a - b) < 1e-9 for a, b in zip($g([3, 6]), [1, 2]))
assert $g($ints) == ?
====
class $D:
    def __init__(self, sku, qty): self.sku, self.qty = sku, qty
    def __repr__(self): return f'$D({self.sku!r}, {self.qty})'
class $C:
    def __init__(self): self.lines = []
    def add(self, sku, qty=1):
        for line in self.lines:
            if line.sku == sku:
                line.qty += qty
                return line
        self.lines.append($D(sku, qty))
        return self.lines[-1]
    def find(self, $x):
        return next((line for line in self.lines if line.sku == $x), None)
    def biggest(self):
        return sorted(self.lines, key=lambda line: (-line.qty, line.sku))[:$K]
--
cart = $C()
a = cart.add($word, $nat)
a.qty += 5
assert cart.lines[0].qty == ?
assert cart.find(a.sku) is a
assert cart.find('$S$S$S') is None
assert repr(cart.lines) == ?
--
cart = $C()
for w in $words:
    cart.add(w)
assert [line.sku for line in cart.biggest()] == ?
assert {line.sku: line.qty for line in cart.lines} == ?
assert len(cart.lines) == ?
assert max(line.qty for line in cart.lines) == ?
--
cart = $C()
cart.lines.append($D('x', $int))
assert cart.find('x').qty == ?
assert cart.add('x', 1).qty == ?
del cart.lines[0]
assert cart.lines == []
assert isinstance(cart.add('y'), $D)
====
'''
READERS = r"""
n = int(input())
$x = list(map(int, input().split()))
print(sum($v for $v in $x if $v % $K))
<<
$nat
$line
<<
1
$line
====
import sys
def main():
    data = sys.stdin.read().split()
    $x = sorted(map(int, data), key=lambda $v: ($v % $K, $v))
    print(*$x)
    print(len($x), max($x, default=None), sep=',')
if __name__ == '__main__':
    main()
<<
$line
$line
<<
$line
====
import sys
input = sys.stdin.readline
for _ in range(int(input())):
    a, b = map(int, input().split())
    print(f'{a / max(1, abs(b)):.{$M % 5}f}', a ^ b, end='\n' if a > $K else ';\n')
<<
2
$nat $nat
$nat $nat
<<
1
$big $K
====
import sys
sys.setrecursionlimit(10**6)
def $f($n):
    return 0 if $n == 0 else 1 + $f($n - 1)
print($f(int(sys.stdin.readline()) * $K))
<<
$nat
<<
500
====
from collections import Counter, deque, defaultdict
import sys
n, m = map(int, input().split())
graph = defaultdict(list)
for line in sys.stdin:
    a, b = line.split()
    graph[a].append(b); graph[b].append(a)
seen, queue = {'1': 0}, deque(['1'])
while queue:
    $v = queue.popleft()
    for $w in graph[$v]:
        if $w not in seen:
            seen[$w] = seen[$v] + $K
            queue.append($w)
print(sorted(seen.items()))
sys.exit(0)
<<
4 3
1 2
2 $nat
3 1
<<
1 0
====
while True:
    try:
        $x = input()
    except EOFError:
        break
    print($x.swapcase()[::-1] + '$S')
<<
$name $name
$name
<<
====
import threading, sys
def main():
    $x = sys.stdin.buffer.readline().decode()
    sys.stdout.write(str(len($x)) + '\n')
    sys.stdout.flush()
    print($x.count('a'), file=sys.stderr)
threading.stack_size(1 << 25)
$t = threading.Thread(target=main)
$t.start()
$t.join()
<<
$name
<<
$name $name
====
import os, io
data = io.BytesIO(os.read(0, os.fstat(0).st_size)).read().split()
os.write(1, b' '.join(data[::-1]) + b'\n')
<<
$line
<<
$name
$K
====
n = int(input())
assert n > $K, 'small'
print(n)
<<
$K
<<
1$nat
====
import sys
try:
    n = int(input())
    if n < 50:
        sys.exit('$S')
    print(n * $K)
finally:
    print('end')
<<
$nat
<<
9$nat
====
print('é', repr(input()), 'ж' * $K)
print([*map(ord, input())])
<<
naïve $name
$name
<<
$K
ß
====
import numpy as np, sys
a = np.array(sys.stdin.readline().split(), dtype=np.int64)
print(a.sum() * $K, a.cumsum().tolist())
<<
$line
====
class Solution:
    def $f(self, $x: List[int], $n: int) -> int:
        $y = {}
        for $i, $v in enumerate($x):
            if $n - $v in $y:
                return [$y[$n - $v], $i]
            $y[$v] = $i
        return []
>> Solution().$f
$ints, $nat
[1, 2, 3], 5
$nats, $K
====
class Solution:
    def __init__(self):
        self.calls = 0
    def $f(self, $x: str) -> str:
        self.calls += 1
        return max(($x[$i:$v] for $i in range(len($x)) for $v in range($i, len($x) + 1)
                    if $x[$i:$v] == $x[$i:$v][::-1]), key=len) * self.calls
>> Solution().$f
$word
'babad'
$text
====
class Solution:
    def $f(self, grid: List[List[int]]) -> None:
        for row in grid:
            row.reverse()
        return grid, {tuple(r): $K for r in grid}, None, 1.5, True
>> Solution().$f
$matrix
[[1, $int]]
====
@cache
def $g($n):
    return 1 if $n < 2 else ($g($n - 1) + $g($n - 2) * $K) % (10**9 + 7)
class Solution:
    def $f(self, $n):
        h = []
        for $v in range($n % 30):
            heappush(h, -$g($v))
        return heappop(h) if h else inf
>> Solution().$f
$nat
0
$big
====
def $f(*$x, $k=$K):
    return sorted(str($v) for $v in $x)[:$k]
>> $f
$int, $word, None
$ints
1.5, {'a': [1]}, (1, $int)
====
def $f($x):
    return $K // $x
>> $f
$nat
0
====
def $f($x):
    return {frozenset({$x}): [b'$S', 1j * $x, {$x}, range($x), ($x,)]}
>> $f
$int
$float
====
def $f($x):
    $x.append(len($x))
    return $x
>> $f
$ints
[]
"""

# ---- programs and tests ---------------------------------------------------------------------------------------------

NAMES = {
    "fgh": "solve compute transform find_best get_result calc_total Diff Find_Max helper is_valid longestRun do_it r2 "
    "check_all count_pairs merge_two max_value minCost process_data test_func add_one my_sum smallest_Of getValue",
    "CDE": "Stack Vector Point Account Shape Node Matrix Inventory TaskManager LRUCache Tree Graph MyQueue Item Parser "
    "MyStack Shape2d HTTPClient Rect Base_Class Event A_b",
    "xyzvwijkst": "x y z n_items arr nums value item word s1 lst data2 left right cur tmp acc idx j_ kk pos elem row q",
    "mn": "update_all step apply_to describe do_add compute_it area2 to_text get_all fetch m_1 calculate",
    "ab": "name2 amount owner label width_px weight first_ second color2 size_",
}
WORDS = "apple banana kiwi level noon abc zebra Hello wOrld tree x aab racecar python code moon stats data été A1".split()


def number(rng, low=-30, high=60):
    return rng.choice([rng.randint(low, high), rng.randint(0, 9)])


VALUES = {
    "int": number,
    "nat": lambda rng: rng.randint(1, 25),
    "big": lambda rng: rng.choice([rng.randint(100, 10**6), rng.randint(10**9, 10**20)]),
    "float": lambda rng: round(rng.uniform(-50, 50), rng.randint(1, 6)),
    "word": lambda rng: rng.choice(WORDS),
    "text": lambda rng: " ".join(
        rng.choices([*WORDS, "12", "a-b", "x,y.", ""], k=rng.randint(1, 6))
    ),
    "char": lambda rng: rng.choice("aeloxn"),
    "ints": lambda rng: [number(rng) for _ in range(rng.randint(1, 8))],
    "nats": lambda rng: [rng.randint(1, 99) for _ in range(rng.randint(2, 9))],
    "floats": lambda rng: [round(rng.uniform(-9, 9), 2) for _ in range(rng.randint(1, 6))],
    "words": lambda rng: rng.choices(WORDS, k=rng.randint(1, 7)),
    "pairs": lambda rng: [(rng.randint(1, 4), rng.choice(WORDS)) for _ in range(rng.randint(1, 6))],
    "matrix": lambda rng: [[number(rng) for _ in range(3)] for _ in range(rng.randint(1, 4))],
    "dict": lambda rng: {
        rng.choice(WORDS): rng.choice([number(rng), None, True, [1.5, "a"]]) for _ in range(4)
    },
    "nested": lambda rng: [
        1,
        [number(rng), [rng.choice(WORDS), []]],
        [],
        [[None]],
        rng.random() < 0.5,
    ],
}
LINES = {
    "line": lambda rng: " ".join(str(number(rng)) for _ in range(rng.randint(1, 9))),
    "name": lambda rng: rng.choice(WORDS[:-2]),
}
PLACE = re.compile(rf"\$({'|'.join(sorted([*VALUES, *LINES], key=len, reverse=True))}|[A-Za-z])")
DRESSES = [
    lambda program, rng: (
        f"{program}\nif __name__ == '__main__':\n    import sys\n    sys.exit(0)\n"
    ),
    lambda program, rng: (
        f"import sys\n{program}\ndef main():\n    print('x')\n\nif __name__ == '__main__':\n    sys.exit(main())\n"
    ),
    lambda program, rng: (
        f"{program}\nif __name__ == '__main__':\n    print({rng.choice(WORDS)!r}, {rng.random()})\n"
    ),
    lambda program, rng: (
        f"import unittest\n{program}\nclass TestIt(unittest.TestCase):\n"
        f"    def test_1(self):\n        self.assertEqual({number(rng)}, {number(rng)})\n"
        f"if __name__ == '__main__':\n    unittest.main(exit={rng.random() < 0.5})\n"
    ),
    lambda program, rng: (
        f'"""{rng.choice(WORDS)}"""\nimport os, sys, math\n{program}\nprint("done", sys.argv)\n'
    ),
    lambda program, rng: f"from __future__ import annotations\nfrom typing import *\n{program}",
    lambda program, rng: (
        f"import logging\nlogging.basicConfig(level='DEBUG')\n{program}\nlogging.debug('%s', 1)\n"
    ),
    lambda program, rng: (
        f"import warnings\nwarnings.filterwarnings('ignore')\nMOD = 10**9 + 7\n{program}"
    ),
    lambda program, rng: (
        "def trace(fn):\n    def wrapper(*args, **kwargs):\n        return fn(*args, **kwargs)\n"
        "    return wrapper\n" + re.sub(r"^def ", "@trace\ndef ", program, count=1, flags=re.M)
    ),
    lambda program, rng: program.replace("    ", "\t") if "'''" not in program else program,
    lambda program, rng: (
        f"{program}\nif __name__ == '__main__':\n    try:\n        print(int(input()))\n"
        f"    except EOFError:\n        pass\n"
    ),
    lambda program, rng: (
        f"{program}\nif __name__ == '__main__':\n    n = int(input())\n    print(n)\n"
    ),
    lambda program, rng: f"# -*- coding: utf-8 -*-\n# naïve {rng.random()}\n{program}\n\n\n# end",
    lambda program, rng: (
        f"try:\n    import does_not_exist_{rng.randint(1, 99)}\nexcept ImportError:\n    pass\n{program}"
    ),
]


class Case:
    """A program with tests, before the truth of them is known."""

    def __init__(self, i):
        rng = self.rng = random.Random(f"{SEED}/{i}")
        fixed = {}
        for letters, names in NAMES.items():
            fixed |= zip(letters, rng.sample(names.split(), len(letters)), strict=True)
        fixed |= {"K": rng.randint(2, 9), "M": rng.randint(2, 9), "R": round(rng.uniform(0, 2), 2)}
        fixed |= {"S": rng.choice(WORDS[:-2]), "q": rng.choice("hmpz")}

        def fill(match):
            if match[1] in VALUES:
                return repr(VALUES[match[1]](rng))
            return str(LINES[match[1]](rng) if match[1] in LINES else fixed[match[1]])

        template = (TEMPLATES + READERS).split("====\n")
        self.template = i % len(template)
        program, *sections = re.split(
            r"^(--|==|<<|>>.*)\n", PLACE.sub(fill, template[self.template]), flags=re.M
        )
        self.kind, self.function, self.tests = "test", "", []
        for mark, body in zip(sections[::2], sections[1::2], strict=True):
            if mark[0] in "<>":
                self.kind, self.function = ("stdin", "") if mark == "<<" else ("calls", mark[3:])
            if mark in ("--", "<<"):
                self.tests.append(body)
            else:
                self.tests += body.splitlines()
        if self.kind == "test":
            self.tests = rng.sample(self.tests, min(len(self.tests), rng.randint(1, 4)))
        if self.kind == "test" and rng.random() < 0.4:
            program = rng.choice(DRESSES)(program, rng)
        self.program, self.main_block = (
            program,
            rng.random() < (0.1 if "n = int(input())" in program else 0.7),
        )
        self.wrong = rng.random() < 0.4  # some cannot be made wrong


# ---- what a test asks of a value: @ is the call ----------------------------------------------------------------------

IMPORTS = "import collections, datetime, decimal, fractions\nfrom collections import Counter, OrderedDict, deque\n"
IMPORTS += "from fractions import Fraction\nfrom decimal import Decimal\n"
FORMS = ["@ == #"] * 6 + [
    "# == @",
    "@ == #, 'wrong'",
    "not @ != #",
    "@ in [#]",
    "@ in (None, #)",
    "[@] == [#]",
]
FORMS += [
    "(@, 1) == (#, 1)",
    "{'k': @} == {'k': #}",
    "(@ == #) is True",
    "bool(@ == #)",
    "(lambda got: got == #)(@)",
]
FORMS += [
    "all(got == # for got in [@])",
    "[got for got in [@]] == [#]",
    "(got := @) == # and got == got",
    "@ == (#)",
]
FORMS += [
    "#.__eq__(@) is not False",
    "not (@ == # and 1 == 2)",
    "[*map(str, [@])] == [str(#)]",
    "{1: @}[1] == #",
]
ANY = ["@"] * 4 + [
    "repr(@)",
    "str(@)",
    "bool(@)",
    "type(@).__name__",
    "isinstance(@, (list, tuple, dict, set))",
]
ANY += ["isinstance(@, (int, float, str))", "f'{@!r}'", "'%s' % (@,)", "(@) is None", "[@, @][0]"]
NUMBERS = "@ + 1|-@|abs(@)|round(@, 2)|int(@)|float(@)|@ * 2|@ - 1|@ / 4|@ // 3|@ % 5|@ ** 2|divmod(@, 7)|max(@, 3)"
NUMBERS += "|sum([@, 1])|sorted([@, 2])|f'{@:.2f}'|@ > 3|2 < @ < 50|@ != 0|[1, 2, 3][int(@) % 3]|{@: 1}|{@, 1}|hash(@)"
NUMBERS += "|bin(int(@))|'ab' * min(3, int(abs(@)))|range(5)[int(@) % 5]|__import__('math').floor(@)|1 if @ else 2|3 - @"
LISTS = "len(@)|sorted(@, key=repr)|@[0]|@[-1]|list(@)|tuple(@)|@[::-1]|@ * 2|@ + @|@[1:]|[x for x in @]|[*@, 1]"
LISTS += "|list(enumerate(@))|list(zip(@, 'abc'))|list(map(str, @))|any(@)|1 in @|@.count(1)|sum(@)|max(@)|list(reversed(@))"
TEXTS = "len(@)|@.upper()|@[0]|@[::-1]|sorted(@)|list(@)|@ + 'x'|'a' in @|@.split()|@.encode()|@ * 2|set(@)|''.join(@)"
TEXTS += "|@.replace('a', 'b')|{@: 1}|@ < 'b'|@.isalpha()|f'{@:>12}'|@.count('a')|@.startswith('a')|@.strip().title()"
SETS = "sorted(@, key=repr)|len(@)|@ | {1}|@ & {1, 2}|@ - {1}|1 in @|{*@}|frozenset(@)|@ <= {1, 2, 3}|@.issuperset({1})"
DICTS = "sorted(@.items(), key=repr)|len(@)|list(@)|{**@}|dict(@)|@.get(1)|1 in @|set(@)|list(@.values())|sorted(@)"
DERIVED = {
    bool: ["@ is True", "@ is False", "@ == True", "not @", "1 if @ else 0", "@ and 1", "@ + 1"],
    type(None): ["@ is None", "not @", "@ or 3", "@ == None"],
    **dict.fromkeys((int, float), NUMBERS.split("|")),
    **dict.fromkeys((list, tuple), LISTS.split("|")),
    str: TEXTS.split("|"),
    **dict.fromkeys((set, frozenset), SETS.split("|")[:3] + SETS.split("|")[4:]),
    dict: DICTS.split("|"),
}


LOOSE = ast.Compare | ast.BoolOp | ast.IfExp | ast.UnaryOp | ast.BinOp  # these need parentheses


def asked(rng, call, value, scope):
    """(the condition of an assert that plain Python holds for a value, whether it needs
    IMPORTS).
    """
    if hasattr(type(value), "__next__"):
        call, value = f"list({call})", list(value)
    base = next((base for base in DERIVED if isinstance(value, base)), None)
    ours = type(value).__module__ in ("__main__", "program")
    derived = rng.choice(DERIVED[base] if base and rng.random() < 0.5 else ["@"] if ours else ANY)
    close = isinstance(value, int | float) and not isinstance(value, bool) and rng.random() < 0.15
    imported = {}
    exec(IMPORTS, imported)
    # the order of sets is another in every process
    shown = "{" in repr(value) and not isinstance(value, dict)
    derived = (
        "@"
        if shown and re.search(r"repr|str|%s|!r|list\(|\[\*|\[x|zip|enumerate", derived)
        else derived
    )
    for what in (derived, "@", "type(@).__name__" if shown else "repr(@)"):
        try:
            result = eval(what.replace("@", "_value"), scope | {"_value": value})
            text = repr(result)
        except Exception:
            continue
        if " at 0x" in text:
            continue
        if close and what == "@":
            form = rng.choice(
                [
                    "abs(@ - #) < 1e-6",
                    "math.isclose(@, #, rel_tol=1e-9)",
                    "# - 1 < @ <= #",
                    "@ >= #",
                ]
            )
            if form[0] != "m" or "math" in scope:
                return form.replace("@", call).replace("#", text), False
        for needs, names in ((False, scope), (True, imported | scope), (True, scope | imported)):
            try:
                known = eval(text, dict(names))
                same = known == result and type(known) is type(result)
                same = same is True
            except Exception:
                continue
            if same:
                whole = (
                    f"({what})"
                    if isinstance(ast.parse(what.replace("@", "x")).body[0].value, LOOSE)
                    else what
                )
                form = rng.choice(FORMS)
                form = FORMS[0] if "{" in text and "map(str" in form else form
                condition = form.replace("@", whole).replace("@", call).replace("#", text)
                try:
                    compile(condition, "", "eval")  # quotes in an f-string
                except SyntaxError:
                    condition = f"{call} == {text}" if what == "@" else f"{call} is not None"
                return condition, needs
    return f"{call} is not None", False


# ---- plain Python ----------------------------------------------------------------------------------------------------


def alone(function, *args, seconds=2):
    """What a function returns in a forked process, in a folder of its own; None if that ends in
    another way or late.
    """
    read, write = os.pipe()
    folder = tempfile.mkdtemp()
    pid = os.fork()
    if not pid:
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
            signal.alarm(5 * seconds)
            os.chdir(folder)
            null = os.open(os.devnull, os.O_RDWR)
            for file in (0, 1, 2):
                os.dup2(null, file)
            result = function(*args)
            with open(write, "w") as file:
                json.dump(result, file)
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as file:
        text = file.read()
    os.waitpid(pid, 0)
    shutil.rmtree(folder)
    return json.loads(text) if text else None


def load(program, main_block=True):
    """The names of a program after it has run."""
    main = types.ModuleType("__main__" if main_block else "program")
    sys.modules[main.__name__] = main
    try:
        exec(compile(program, "<program>", "exec"), main.__dict__)
    except SystemExit as end:
        if end.code:
            raise
    return main.__dict__


def filled(seed, program, main_block, test):
    """A test with every "== ?" replaced; None where it cannot be."""
    rng, scope, found = random.Random(seed), load(program, main_block), {}
    lines = [re.match(r"(\s*)assert (.*) == \?$", line) or line for line in test.split("\n")]
    before = {**scope}
    needs_imports = rng.random() < 0.2

    def record(i, value):
        nonlocal needs_imports
        condition, needs = asked(rng, lines[i][2], value, before | scope)
        found[i] = f"{lines[i][1]}assert {condition}"
        needs_imports |= needs

    scope["_record"] = record
    text = [
        line if isinstance(line, str) else f"{line[1]}_record({i}, {line[2]})"
        for i, line in enumerate(lines)
    ]
    exec(compile("\n".join(text), "<test>", "exec"), scope)
    text = [
        line if isinstance(line, str) else found.get(i, f"{line[1]}pass")
        for i, line in enumerate(lines)
    ]
    return IMPORTS * needs_imports + as_check(rng, text)


def as_check(rng, lines):
    """The lines of a test, sometimes in HumanEval's form."""
    text = "\n".join(lines)
    call = re.match(r"assert (?:[a-z]+\()?([A-Za-z_]\w*)\(", text)
    if (
        not call
        or rng.random() > 0.15
        or call[1] in ("list", "sorted", "isinstance", "len", "set", "type", "repr")
    ):
        return text
    body = re.sub(rf"\b{call[1]}\b", "candidate", text)
    head = "METADATA = {'author': 'x', 'dataset': 'test'}\n\n" * (rng.random() < 0.5)
    return (
        f"{head}def check(candidate):\n    "
        + body.replace("\n", "\n    ")
        + f"\n\ncheck({call[1]})"
    )


def passes(program, main_block, test):
    """Whether a test passes; alone() gives None for one that hangs."""
    try:
        exec(compile(test, "<test>", "exec"), load(program, main_block))
        return True
    except BaseException:
        return False


READER = """import sys, types
text = open(sys.argv[1], encoding="utf-8").read()
main = sys.modules["__main__"] = types.ModuleType("__main__")
try:
    exec(compile(text, "<program>", "exec"), main.__dict__)
except SystemExit:
    pass
"""


def printed(program, text):
    """[what a program prints, whether it ended well]; None if it hangs."""
    Path("program.py").write_text(program, "utf-8")
    Path("input").write_text(text, "utf-8")
    command = [sys.executable, "-X", "utf8", "-c", READER, "program.py"]
    try:
        with open("input") as file:
            found = subprocess.run(command, stdin=file, capture_output=True, timeout=5)
    except subprocess.TimeoutExpired:
        return None
    return [found.stdout.decode(), found.returncode == 0]


def returned(program, function, inputs):
    """repr() of what the calls return, to the first that raises."""
    values = []
    try:
        call = eval(function, load(program, False))
        for args in inputs:
            values.append(repr(call(*eval(f"[{args}]"))))
    except BaseException:
        pass
    return values


# ---- wrong programs --------------------------------------------------------------------------------------------------

SWAPS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE,
    ast.Gt: ast.Lt,
}
SWAPS |= {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.GtE: ast.Gt,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
RETURNS = [
    "None",
    "[{}]",
    "str({})",
    "({}, {})",
    "iter([{}])",
    "lambda: {}",
    "print({})",
    "[{}][0:0]",
    "{} == {}",
    "Ellipsis",
]
RETURNS += [
    "{} or 0",
    "(_ for _ in [{}])",
    "object()",
    "1 / 0",
    "type({})",
    "not {}",
    "float(str({}))",
    "[*{}]",
    "{{*{}}}",
]


def mutated(rng, program):
    """A program with a fault."""
    if rng.random() < 0.08:  # an answer cut off
        return program[: rng.randrange(len(program))]
    tree = ast.parse(program)
    nodes = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.Return | ast.BinOp | ast.If)
    ]
    nodes += [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare | ast.BoolOp | ast.Constant | ast.Return)
    ]
    if not nodes:
        return "raise ValueError\n" + program
    node = rng.choice(nodes)
    if isinstance(node, ast.FunctionDef):
        if len(node.body) > 1:
            del node.body[rng.randrange(len(node.body))]
        else:
            node.body = [ast.Pass()]
    elif isinstance(node, ast.Return) and node.value:
        node.value = ast.parse(
            rng.choice(RETURNS).replace("{}", f"({ast.unparse(node.value)})"), mode="eval"
        ).body
    elif isinstance(node, ast.If):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.BinOp | ast.BoolOp):
        node.op = SWAPS.get(type(node.op), ast.Sub if isinstance(node, ast.BinOp) else ast.Or)()
    elif isinstance(node, ast.Compare):
        node.ops[0] = SWAPS.get(type(node.ops[0]), ast.Eq)()
    elif isinstance(node, ast.Constant):
        node.value = (
            {int: 1, str: "q", float: 0.5}.get(type(node.value), 0) if rng.random() < 0.5 else None
        )
    return ast.unparse(ast.fix_missing_locations(tree))


def truth(case, i):
    """The verdicts of plain Python: {"program", "tests", "values"}, and "wanted" of the right
    program; or None.
    """
    import protocols

    row = {
        "kind": case.kind,
        "main_block": case.main_block,
        "function": case.function,
        "wanted": None,
    }
    head = protocols.LIVE_HEAD if case.kind == "calls" else ""

    def values(program):
        if case.kind == "stdin":
            return [printed(program, text) for text in case.tests]
        if case.kind == "calls":
            return alone(returned, head + program, case.function, case.tests)
        return [alone(passes, program, case.main_block, test) for test in case.tests]

    if case.kind == "test":
        rows = [
            (f"{SEED}/{i}/{k}", case.program, case.main_block, test)
            for k, test in enumerate(case.tests)
        ]
        case.tests = [
            test
            for test in (alone(filled, *each) if "== ?" in each[-1] else each[-1] for each in rows)
            if test
        ]
        if not case.tests:
            return None
    right = found = values(case.program)
    for _ in range(6 * case.wrong):
        try:
            program = mutated(case.rng, case.program)
            found = values(program)
        except ValueError:  # ast.unparse() of an f-string, text that is no UTF-8
            continue
        if found != right and found is not None and None not in found:
            case.program = program
            break
        found = right
    if found is None or None in found:
        return None
    return row | {
        "program": head + case.program,
        "tests": case.tests,
        "values": found,
        "wanted": right,
    }


def worker(first, step):
    """Print the truth of every step-th case, as JSON lines."""
    for i in range(first, COUNT, step):
        case = Case(i)
        print(json.dumps([i, case.template, truth(case, i)]), flush=True)


def truths():
    """[(number, number of its template, truth)] of all cases, by two processes of plain Python."""
    start = f"import sys; sys.path[:0] = {[str(HERE), str(HERE.parent)]}; import {Path(__file__).stem} as t; t.worker"
    with contextlib.ExitStack() as stack:
        workers = []
        for first in (0, 1):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            command, env = (
                [sys.executable, "-c", f"{start}({first}, 2)"],
                os.environ | {"PYTHONHASHSEED": "0"},
            )
            workers.append(
                subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True)
            )
        outputs = [
            *concurrent.futures.ThreadPoolExecutor(2).map(
                lambda worker: worker.communicate()[0], workers
            )
        ]
    assert [worker.returncode for worker in workers] == [0, 0]
    return sorted(map(json.loads, "".join(outputs).splitlines()))


@pytest.fixture(scope="module")
def layers():
    try:
        found = sandbox.layers()
    except sandbox.SandboxError as error:
        pytest.fail(f"no sandbox: {error}")
    if not (found["seccomp"] and found["namespaces"]):
        pytest.skip("asyncio and folders need namespaces, and programs seccomp")
    return found


# ---- the sandbox -----------------------------------------------------------------------------------------------------

KNOWN = {"inf": math.inf, "nan": math.nan}


def value_of(text):
    """The value of its repr(), or an object that equals nothing."""
    try:
        return object() if "Ellipsis" in text else eval(text, dict(KNOWN))
    except (SyntaxError, NameError):
        return object()


def expected_of(row):
    """Tests of a case for the sandbox, each with what has to come out: a verdict and, unless it is
    None, a value.
    """
    if row["kind"] == "test":
        return [
            (test, "pass" if good else "fail", None)
            for test, good in zip(row["tests"], row["values"], strict=True)
        ]
    if row["kind"] == "stdin":
        tests = []
        for text, (out, good), (wanted, _) in zip(
            row["tests"], row["values"], row["wanted"], strict=True
        ):
            check = f"def right(printed):\n    return printed == {wanted!r}"
            tests.append(
                (sandbox.Stdin(text), "pass" if good else "fail", None if " at 0x" in out else out)
            )
            tests.append(
                (
                    sandbox.Stdin(text, check=check),
                    "pass" if good and out == wanted else "fail",
                    None,
                )
            )
        return tests
    inputs = [eval(f"[{args}]") for args in row["tests"]]
    wanted, found = ([*map(value_of, row[name])] for name in ("wanted", "values"))
    test = sandbox.Calls(row["function"], inputs, [2.0] * len(inputs), 4.0)
    complete = len(found) == len(inputs)
    data = None if object in map(type, found) else [*map(repr, found)]
    tests = [(test, "pass" if complete else "fail", data)]
    if len(wanted) == len(inputs):
        right = "def right(i, inputs, value):\n    return (list(value) if type(value) is tuple else value) == data[i]\n"
        same = complete and [list(v) if type(v) is tuple else v for v in found] == wanted
        tests.append((test._replace(check=right, data=wanted), "pass" if same else "fail", None))
    return tests


def plain_value(value):
    return [repr(each) for each, _ in value] if isinstance(value, list) else value


def test_honest_programs_get_the_verdicts_of_plain_python(layers):
    pytest.importorskip("numpy")
    cases = [(i, template, row) for i, template, row in truths() if row]
    different = []
    for kind, main_block in itertools.product(("test", "stdin", "calls"), (True, False)):
        group = [
            (i, template, row)
            for i, template, row in cases
            if (row["kind"], row["main_block"]) == (kind, main_block)
        ]
        wanted = [expected_of(row) for *_, row in group]
        options = {"threads": kind != "test", "main_block": main_block and kind == "test"}
        results = sandbox.run_tests(
            [row["program"] for *_, row in group],
            [[test for test, *_ in tests] for tests in wanted],
            **options,
        )
        for (i, template, row), tests, result in zip(group, wanted, results, strict=True):
            found = (
                result.verdicts or [result.error] * len(tests),
                result.values or [None] * len(tests),
            )
            for (test, verdict, value), ours, got in zip(tests, *found, strict=True):
                if (ours == "pass") != (verdict == "pass") or (
                    value is not None and ours == "pass" and plain_value(got) != value
                ):
                    different.append((i, template, row["program"], test, verdict, ours, value, got))
    tests = [test for *_, row in cases for test in expected_of(row)]
    failing = sum(verdict != "pass" for _, verdict, _ in tests)
    print(
        f"{len(cases)} programs, {len(tests)} tests, {failing} of which fail; {len(different)} differ"
    )
    for i, template, program, test, verdict, ours, value, got in different:
        print(
            f"---- case {i}, template {template}\n{program}\n-- test\n{test}\n-- "
            f"plain {verdict} {value}, ours {ours} {got}"
        )
    assert len(cases) > 0.95 * COUNT
    assert not different


# What honest tests do rarely: a program, a line of two dashes, a test that plain Python passes.
RARE = r"""
class Base:
    def area(self): return 0
    def double(self): return 2 * self.area()
--
class Square(Base):
    def area(self): return 9
assert Square().double() == 18
====
def f(name): print('Hello', name)
--
import contextlib, io
out = io.StringIO()
with contextlib.redirect_stdout(out):
    f('Bob')
assert out.getvalue() == 'Hello Bob\n'
====
import random
def f(): return random.randint(1, 10**9)
--
import random
random.seed(5)
a = f()
random.seed(5)
assert f() == a
====
class P:
    def __init__(self): self.x, self.y = 1, [2]
--
p = P()
assert p.__dict__ == {'x': 1, 'y': [2]}
====
class P:
    def __init__(self): self.x, self.y = 1, [2]
--
assert vars(P()) == {'x': 1, 'y': [2]}
====
class P: pass
def f(): return P()
--
assert type(f()).__name__ == 'P'
====
class P: pass
def f(): return P()
--
assert f().__class__.__name__ == 'P'
====
class P: pass
def f(): return P()
--
assert type(f()) == P
assert type(f()) is P
====
class P: pass
class Q(P): pass
--
assert issubclass(Q, P) and not issubclass(P, Q)
====
class P: pass
--
assert not callable(P()) and callable(P)
====
class P: pass
--
assert P.__name__ == 'P'
====
def f(x):
    "Doc."
    return x
--
assert f.__name__ == 'f' and f.__doc__ == 'Doc.'
====
import dataclasses
@dataclasses.dataclass
class P:
    x: int
--
from dataclasses import asdict, replace, is_dataclass
assert is_dataclass(P(1)) and asdict(P(1)) == {'x': 1} and replace(P(1), x=2) == P(2)
====
class P:
    def __init__(self, rows): self.rows = rows
    def __eq__(self, other): return self.rows == other.rows
--
import copy
p = P([[1]])
q = copy.deepcopy(p)
assert q == p and q is not p and q.rows is not p.rows
====
import datetime
def f(): return datetime.datetime(2020, 1, 2, tzinfo=datetime.timezone.utc)
--
import datetime
assert f() == datetime.datetime(2020, 1, 2, tzinfo=datetime.timezone.utc)
assert f().isoformat() == '2020-01-02T00:00:00+00:00'
====
def f(when): return when.utcoffset().total_seconds()
--
import datetime
assert f(datetime.datetime(2020, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=2)))) == 7200
====
from collections import namedtuple
P = namedtuple('P', 'x y')
def f(): return P(1, 2)
--
assert f()._asdict() == {'x': 1, 'y': 2} and f()._replace(x=3) == (3, 2) and P._fields == ('x', 'y')
====
from collections import namedtuple
P = namedtuple('P', 'x y')
def f(): return P(1, 2)
--
import json
assert json.dumps(f()) == '[1, 2]'
assert '%d %d' % f() == '1 2'
====
class D(dict): pass
def f(): return D(a=1)
--
import json
assert json.dumps(f()) == '{"a": 1}'
====
class P:
    def __init__(self): self.x = 1
--
p = P()
del p.x
assert not hasattr(p, 'x')
====
def sum(a, b): return a + b + 1
--
import math
assert sum(1, 2) == 4
====
def f(function, kind):
    try:
        return function()
    except kind as error:
        return str(error)
--
class Boom(Exception): pass
def bad(): raise Boom('b')
assert f(bad, Boom) == 'b'
====
def f(function): return function()
--
class Boom(Exception): pass
def bad(): raise Boom('b')
try:
    f(bad)
except Boom as error: assert str(error) == 'b'
else: assert False
====
limit = 5
def f(): return limit
--
limit = 7
assert f() == 7
====
def f(): return int(input()) + int(input())
--
from unittest.mock import patch
with patch('builtins.input', side_effect=['1', '2']):
    assert f() == 3
====
def f(x): return x
--
import inspect
assert list(inspect.signature(f).parameters) == ['x']
====
def f():
    yield 1
--
import inspect, types
assert inspect.isgeneratorfunction(f) or isinstance(f(), types.GeneratorType)
====
def f(): return (x for x in [1, 2])
--
from collections.abc import Iterable, Iterator
assert isinstance(f(), Iterable) and isinstance(f(), Iterator)
====
def f():
    try:
        yield 1
    except ValueError:
        yield 2
--
g = f()
next(g)
assert g.throw(ValueError('x')) == 2
====
class P:
    def __getattr__(self, name): return name
--
assert P().anything == 'anything' and P()._private == '_private'
====
def f(xs): return list(reversed(xs)), xs
--
xs = (1, [2])
got, same = f(xs)
assert same is xs
====
import abc
class P(abc.ABC):
    @abc.abstractmethod
    def f(self): ...
--
import pytest
with pytest.raises(TypeError):
    P()
====
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
--
import unittest
class TestStack(unittest.TestCase):
    def setUp(self): self.s = Stack()
    def test_push(self):
        self.s.push(1)
        self.assertEqual(self.s.items, [1])
        self.assertListEqual(self.s.items, [1])
        self.assertIsInstance(self.s, Stack)
        self.assertAlmostEqual(self.s.items[0], 1.0)
assert unittest.TextTestRunner(stream=open('/dev/null', 'w')).run(
    unittest.defaultTestLoader.loadTestsFromTestCase(TestStack)).wasSuccessful()
====
def f(xs):
    for x in xs: yield x * 2
--
def numbers():
    yield 1
    yield 2
assert list(f(numbers())) == [2, 4] and list(f(iter([1]))) == [2] and list(f(map(int, '12'))) == [2, 4]
====
def f(file): return file.read().split()
--
import io
assert f(io.StringIO('a b')) == ['a', 'b']
====
def f(node): return node.value + (f(node.next) if node.next else 0)
--
class Node:
    def __init__(self, value, next=None):
        self.value = value
        self.next = next
assert f(Node(1, Node(2))) == 3
====
def f(items): return sorted(items, key=lambda item: item.price)[0].name
--
from types import SimpleNamespace
assert f([SimpleNamespace(name='a', price=2), SimpleNamespace(name='b', price=1)]) == 'b'
====
def f(items): return max(items), min(items), sorted(items)[0]
--
import functools
@functools.total_ordering
class V:
    def __init__(self, v): self.v = v
    def __eq__(self, other): return self.v == other.v
    def __lt__(self, other): return self.v < other.v
a, b = V(1), V(2)
high, low, first = f([b, a])
assert high is b and low is a and first is a
====
class Counter2:
    def __init__(self): self.n = 0
    def __int__(self): return self.n
    def __bool__(self): return self.n > 0
    def __call__(self): self.n += 1; return self.n
    def __index__(self): return self.n
--
c = Counter2()
assert not c
assert c() == 1 and c() == 2
assert int(c) == 2 and bool(c) and [1, 2, 3][c] == 3 and list(range(c)) == [0, 1]
====
def f(): return {'b': 1, 'a': [1, {2: (3,)}]}
--
import json, pprint
assert json.dumps(f(), sort_keys=True) == '{"a": [1, {"2": [3]}], "b": 1}'
assert str(f()) == "{'b': 1, 'a': [1, {2: (3,)}]}"
====
import itertools
def f(): return itertools.cycle('ab')
--
c = f()
assert [next(c), next(c), next(c)] == ['a', 'b', 'a']
====
def f(a, b): return a is b, a == b
--
x = object()
assert f(x, x) == (True, True) and f(object(), object()) == (False, False)
====
class Meta(type):
    def __len__(cls): return 3
class P(metaclass=Meta): pass
--
assert len(P) == 3
====
class Temp:
    def __init__(self, c): self.c = c
    @property
    def f(self): return self.c * 9 / 5 + 32
    @f.setter
    def f(self, v): self.c = (v - 32) * 5 / 9
    def __set_name__(self, owner, name): pass
--
t = Temp(100)
t.f = 32
assert t.c == 0 and t.f == 32
try:
    t.q
except AttributeError: pass
else: assert False
====
import functools
class P:
    @functools.cached_property
    def x(self): return [1]
    @functools.singledispatchmethod
    def g(self, a): return 'other'
    @g.register
    def _(self, a: int): return 'int'
--
p = P()
assert p.x is p.x and p.g(1) == 'int' and p.g('a') == 'other'
====
def f(*args): return args
--
assert f(*range(3)) == (0, 1, 2) and f(*{'a': 1}) == ('a',) and f(*'ab', *[1]) == ('a', 'b', 1)
====
class vector:
    def __init__(self, x): self.x = x
    def __iadd__(self, k): self.x += k; return self
    def __mul__(self, k): return vector(self.x * k)
    def __contains__(self, k): return k == self.x
--
v = vector(2)
v += 3
assert v.x == 5 and (v * 2).x == 10 and 5 in v
====
def f(): return [float('nan')]
--
assert f() != f()
====
x = 5
def f(): return x
VALUES = {'a': [1]}
--
assert x == 5 and VALUES == {'a': [1]}
VALUES['a'].append(2)
assert VALUES == {'a': [1, 2]}
====
import datetime as dt
def f(): return dt.date(2020, 1, 2)
--
assert f() == dt.date(2020, 1, 2)
====
total = 0
def add(n):
    global total
    total += n
--
add(3)
assert total == 3
"""
RARE_CASES = [case.strip("\n").split("\n--\n") for case in RARE.split("\n====\n")]


# Of these the ones that fail, by the last line of the test: what sandbox.py says that a test cannot
# do. A case that begins to pass has to leave the list.
NOT_YET = {
    "    assert f() == 3",
    "assert '%d %d' % f() == '1 2'",
    "assert Square().double() == 18",
    "assert f() != f()",
    "assert f() == 7",
    "assert f() == a",
    "assert f().__class__.__name__ == 'P'",
    "assert f([SimpleNamespace(name='a', price=2), SimpleNamespac",
    "assert f(io.StringIO('a b')) == ['a', 'b']",
    "assert f(x, x) == (True, True) and f(object(), object()) == ",
    "assert high is b and low is a and first is a",
    "assert inspect.isgeneratorfunction(f) or isinstance(f(), typ",
    "assert is_dataclass(P(1)) and asdict(P(1)) == {'x': 1} and r",
    "assert json.dumps(f()) == '{\"a\": 1}'",
    "assert list(inspect.signature(f).parameters) == ['x']",
    "assert not callable(P()) and callable(P)",
    "assert out.getvalue() == 'Hello Bob\\\\n'",
    "assert p.__dict__ == {'x': 1, 'y': [2]}",
    "assert q == p and q is not p and q.rows is not p.rows",
    "assert same is xs",
    "assert total == 3",
    "assert type(f()) is P",
    "assert type(f()).__name__ == 'P'",
    "assert v.x == 5 and (v * 2).x == 10 and 5 in v",
    "assert vars(P()) == {'x': 1, 'y': [2]}",
    "else: assert False0",
}


@pytest.mark.parametrize(
    ("program", "test"), RARE_CASES, ids=[test.splitlines()[-1][:60] for _, test in RARE_CASES]
)
def test_what_honest_tests_do_rarely(program, test, layers, request):
    if request.node.callspec.id in NOT_YET:
        why = "sandbox.py says what a test cannot do"
        request.applymarker(pytest.mark.xfail(strict=True, raises=AssertionError, reason=why))
    assert alone(passes, program, True, test) is True, "a wrong case"
    (result,) = sandbox.run_tests([program], [[test]], workers=1)
    assert result.verdicts == ["pass"], (program, test, result)


# Tests of honest sizes, which plain Python runs in 0.3 s; the sandbox has five seconds.
SEARCH = """
def f(xs, v):
    low, high = 0, len(xs)
    while low < high:
        middle = (low + high) // 2
        if xs[middle] < v: low = middle + 1
        else: high = middle
    return low
class S:
    def __init__(self):
        self.items, self.grid = [], [[0] * 300 for _ in range(300)]
    def push(self, x): self.items.append(x)
    def mark(self, i, j): self.grid[i][j] = 1
def numbers(n): return list(range(n))
def each(n): yield from range(n)
def turned(m): return [list(row) for row in zip(*m)]
def total(g, n): return sum(map(g, range(n)))
"""
SIZES = {
    "a list of 100,000 numbers": "assert f(list(range(10**5)), 77) == 77",
    "a list of a million numbers": "assert f(list(range(10**6)), 77) == 77",
    "a result of a million numbers": "assert len(numbers(10**6)) == 10**6",
    "a list of 10,000 numbers given 100 times": "xs = [*range(10**4)]\nfor k in range(100): assert f(xs, k) == k",
    "a list of 100,000 numbers given 20 times": "xs = [*range(10**5)]\nfor k in range(20): assert f(xs, k) == k",
    "30,000 calls": "for k in range(30_000): assert f([1, 2], 2) == 1",
    "10,000 calls of the test": "assert total(lambda v: v, 10**4) == 49995000",
    "10,000 values of a generator": "assert sum(each(10**4)) == 49995000",
    "a list that grows": "s = S()\nxs = s.items\nfor i in range(1000): s.push(i)\nassert len(xs) == 1000",
    "a list that is looked at": "s = S()\nfor i in range(1000):\n    s.push(i)\n    assert s.items[-1] == i",
    "a grid that is looked at": "s = S()\nfor i in range(20):\n    s.mark(i, i)\n    assert s.grid[i][i] == 1",
    "a matrix": "m = [[i * j for j in range(300)] for i in range(300)]\nassert turned(turned(m)) == m",
    "an array": "import numpy as np\nassert f(np.arange(10**6), 77) == 77",
    "a text of two million letters": "assert f('a' * 2 * 10**6, 'b') == 2 * 10**6",
}


@pytest.mark.parametrize("name", SIZES)
def test_honest_sizes(name, layers):
    assert alone(passes, SEARCH, True, SIZES[name]) is True
    (result,) = sandbox.run_tests([SEARCH], [[SIZES[name]]], workers=1)
    assert result.verdicts == ["pass"], result


# ---- the fuzzer: forms of the wire format ----------------------------------------------------------------------------

FORMS_COUNT, SENT = (
    int(os.environ.get(name, default)) for name, default in (("FORMS", "100000"), ("SENT", "2000"))
)
NEVER = ["no form holds this", 90210]
PRIME = (1 << 61) - 1  # hash() of an int is its remainder
TAGS = [
    *"i c b y d t s f a r k mine yours coroutine error raised builtin module o z I __class__".split(),
    "",
]
TYPES = [
    *wire.ARGUMENTS,
    "builtins.eval",
    "os.system",
    "fractions",
    "",
    "datetime.timezone",
    "numpy.ndarray",
]
ERRORS = "json.decoder.JSONDecodeError builtins.ValueError builtins.StopIteration builtins.AssertionError os.system x.A"
ERRORS += " builtins.SystemExit decimal.InvalidOperation builtins.BaseException builtins.object builtins.type .. os.path"
ERRORS += " numpy.linalg.LinAlgError unittest.case.SkipTest asyncio.CancelledError socket.timeout builtins.MemoryError"
ERRORS += " builtins.UnicodeDecodeError builtins.KeyError builtins.ExceptionGroup program.E builtins.OSError"
DTYPES = "<i8 >i4 |b1 <f8 <c16 |S3 <U2 <U99999999 |S0 <f2 |O <M8[s] i9 <i99 V8 <i8,<i8 f٨ <U0 |u1".split()
STRINGS = [
    "",
    "\0",
    "\ud800",
    "\U0010ffff",
    "1e999999999",
    "-1e-999999999",
    "nan",
    "sNaN",
    "1" * 5000,
    "é",
    "__eq__",
    "inf",
]
STRINGS += [
    "1/3",
    "0x1f",
    "-ff",
    "1_0",
    "ÿ" * 8,
    "\x07\xe4\xff\xff\xff\xff\xff\xff\xff\xff",
    "\x07\xe4\x01\x01",
    "\ufeff",
    "\n",
]
NUMBERS_SENT = [
    0,
    1,
    -1,
    2,
    7,
    2**31,
    2**63,
    -(2**64),
    10**30,
    0.0,
    -0.0,
    1.5,
    1e308,
    math.nan,
    math.inf,
    True,
    False,
    None,
]
NUMBERS_SENT += [
    {"i": each}
    for each in ("0", "1", "-1", "f" * 40, "F" * 3000, "", "x", "-", "8" + "0" * 17, 5, None, [])
]


def atom(rng):
    return rng.choice(
        rng.choice(
            [NUMBERS_SENT, NUMBERS_SENT, STRINGS, [[], {}, [[]], {"t": []}, {"s": []}, {"d": []}]]
        )
    )


def form_of(rng, depth=0):
    """A form that is nearly right."""
    if depth > 4 or rng.random() < 0.15 * depth:
        return atom(rng)

    def some(most=4):
        return [form_of(rng, depth + 1) for _ in range(rng.randint(0, most))]

    tag = rng.choice([*TAGS[:14], *TAGS, "list", "list", "int"])
    if tag == "list":
        return some()
    if tag == "int":
        return {"i": f"{rng.choice([1, -1]) * rng.getrandbits(rng.choice([3, 64, 900])):x}"}
    if tag == "c":
        return {
            "c": [
                rng.choice([0.5, math.nan, 1, "1", None, 1e308]) for _ in range(rng.randint(0, 3))
            ]
        }
    if tag in ("b", "y", "module", "z", ""):
        return {tag: rng.choice(STRINGS)}
    if tag == "d":
        return {"d": [[atom(rng), form_of(rng, depth + 1)] for _ in range(rng.randint(0, 4))]}
    if tag == "a":
        shape = [
            rng.choice([0, 1, 2, 3, -1, 2**31, 2**62, 1.0, "1"])
            for _ in range(rng.choice([0, 1, 1, 2, 70]))
        ]
        size = rng.choice([0, 1, 2, 4, 6])
        return {
            "a": [
                rng.choice(DTYPES),
                rng.choice([shape, [size], size, None]),
                "\x01" * (rng.choice([1, 4, 8, 16]) * size),
            ]
        }
    if tag == "r":
        return {"r": [rng.choice(TYPES), *some(rng.choice([1, 2, 3, 10]))]}
    if tag == "k":
        number_ = rng.choice([1, 2, 3, 4, 0, -1, -2, True, 1.0, math.nan, "1", None, 2**70, [1]])
        return {"k": [number_, *some(2)]}
    if tag == "mine":
        return {"mine": rng.choice([0, 1, 2, -1, -9, 2**70, True, 0.0, "0", None, [0]])}
    if tag in ("yours", "coroutine"):
        return {
            tag: rng.choice(
                [
                    [0, True],
                    [1, False],
                    [2, None],
                    [True, 1],
                    ["x", "y"],
                    [[], 0],
                    [0],
                    5,
                    [2**70, {}],
                ]
            )
        }
    if tag in ("error", "builtin"):
        names = rng.choices(
            [*ERRORS.split(), "print", "int", "exec", "type", "", "list"], k=rng.randint(0, 3)
        )
        if tag == "error" and len(names) > 1 and rng.random() < 0.5:
            names = [names[0], [[name, []] for name in names[1:]]]
        return {tag: names if tag == "error" else (names or [None])[0]}
    if tag == "raised":
        attributes = {
            rng.choice(["args", "_text", "code", "__class__", "with_traceback"]): form_of(
                rng, depth + 1
            )
        }
        return {
            "raised": [
                rng.choices(ERRORS.split(), k=rng.randint(0, 3)),
                some(),
                attributes,
                rng.choice(STRINGS),
            ]
        }
    return {tag: some()}


def parts(form):
    """[(container, key)] of all places in a form."""
    found, waiting = [], [form]
    while waiting:
        each = waiting.pop()
        keys = range(len(each)) if isinstance(each, list) else [*each]
        found += [(each, key) for key in keys]
        waiting += [each[key] for key in keys if isinstance(each[key], list | dict)]
    return found


def changed(rng, form):
    """A form with up to three faults."""
    form = [json.loads(json.dumps(form))]  # without parts that are the same object
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        places = parts(form)
        at, key = rng.choice(places)
        kind = rng.randrange(8)
        if kind == 0:
            at[key] = atom(rng)
        elif kind == 1:
            other, key_2 = rng.choice(places)
            at[key] = json.loads(json.dumps(other[key_2]))
        elif kind == 2 and isinstance(at, dict):
            at[rng.choice(TAGS)] = at.pop(key)
        elif kind == 3:
            at[key] = {rng.choice(TAGS): at[key]}
        elif kind == 4 and isinstance(at, list) and at is not form:
            at.insert(key, at[key])
        elif kind == 5 and at is not form:
            del at[key]
        elif kind == 6:
            at[key] = [at[key]] * rng.choice([2, 50])
        elif kind == 7:
            at[key] = {"r": [rng.choice(TYPES), at[key]]}
        form = json.loads(json.dumps(form))
    return form[0]


def large(rng):
    """The text of a form of some size."""
    n = rng.choice([500, 3000])
    colliding = [{"i": f"{i * PRIME:x}"} for i in range(1, n)]
    opening, closing = rng.choice([("[", "]"), ('{"t":[', "]}"),
                                   ('{"s":[', "]}"), ('{"d":[[1,', "]]}"), ('{"k":[1,', "]}"),
                                   ('{"r":["collections.deque",', "]}"), ('{"a":', "}"), ('{"i":', "}"), ("[1,[", "]]"),
                                   ('{"raised":[["x"],', ',{},""]}'), ('{"f":[', "]}")])  # fmt: skip
    depth = rng.choice([100, 300, 330, 490, 900, 2000, 30_000])
    fraction = {"r": ["fractions.Fraction", {"i": "f" * n}, {"i": "7" * n}]}
    return rng.choice([
        opening * depth + "1" + closing * depth, opening * depth, json.dumps({"s": colliding}),
        json.dumps({"d": [[each, 1] for each in colliding]}), json.dumps({"f": colliding[:500] * 4}),
        json.dumps({"r": ["collections.Counter", {"d": [[each, each] for each in colliding]}]}),
        json.dumps(["x" * 50 * n] * 2), json.dumps({"i": "e" * 50 * n}), "9" * n, "9" * 10 * n, json.dumps(fraction),
        json.dumps({"r": ["decimal.Decimal", "9" * 20 * n]}), json.dumps([[]] * n), json.dumps({"t": "ab" * n}),
        json.dumps({"a": ["<i8", [n], "\x07" * 8 * n]}), json.dumps({"a": ["|S" + "1" * n, [], ""]}),
        json.dumps({"a": ["<f8", [1] * n, "\0" * 8]}), json.dumps({"r": ["builtins.range", *colliding[:3]]}),
        json.dumps([{"yours": [i, True]} for i in range(n)]), json.dumps({"k": [1, [{"k": [1]}] * n]}),
        json.dumps({"r": ["collections.deque", colliding, {"i": "f" * 15}]}), json.dumps({"b": "ÿ" * 30 * n}),
        json.dumps({"s": [{"r": ["fractions.Fraction", each, {"i": "3"}]} for each in colliding[:1000]]}),
    ])  # fmt: skip


def value_of_program(rng, depth=0):
    """A value that a program may return."""
    kind = rng.randrange(14 if depth < 4 else 6)
    if kind < 6:
        text = rng.choice(STRINGS[:7] + WORDS)
        number_ = rng.choice([0, 1, -7, 2**70, 10**5000, 0.5, -0.0, math.nan, True, None, 3j])
        return rng.choice(
            [
                number_,
                number_,
                text,
                text.encode("utf-8", "replace"),
                bytearray(b"y"),
                range(1, 9, 2),
                len,
                int,
            ]
        )
    items = [value_of_program(rng, depth + 1) for _ in range(rng.randint(0, 4))]
    plain_items = [value_of_program(rng, 9) for _ in range(3)]
    keys = [each for each in plain_items if not isinstance(each, bytearray | complex)]
    if kind < 9:
        return rng.choice(
            [items, tuple(items), [items, items], dict(zip(keys, items, strict=False)), {*keys}]
        )
    if kind < 12:
        when, pairs = (
            datetime.datetime(2020, 1, 2, 3, 4, 5, 6),
            dict(zip(keys, items, strict=False)),
        )
        made = [
            collections.deque(items, 9),
            collections.OrderedDict(pairs),
            collections.defaultdict(list, pairs),
        ]
        made += [
            collections.Counter("aab"),
            collections.Counter(pairs),
            frozenset(keys),
            pairs.keys(),
            pairs.items(),
        ]
        made += [
            when,
            when.date(),
            when.time(),
            datetime.timedelta(3, 4, 5),
            decimal.Decimal("-1.50"),
            pairs.values(),
        ]
        return rng.choice(
            [*made, fractions.Fraction(-3, 7), slice(1, None), collections.defaultdict(lambda: 1)]
        )
    return rng.choice(
        [
            ValueError("x", 1),
            KeyError,
            lambda: 1,
            iter([]),
            object(),
            types,
            Row(items),
            Name("n"),
            Number(3),
        ]
    )


class Row(list): ...


class Name(str): ...


class Number(int):
    def __call__(self): ...


class OtherEnd(wire.Peer):
    """A program's end, for the forms of its values."""

    def __init__(self):
        self.permits, self.held, self.numbers, self.shared, self.ids, self.count = (
            None,
            [],
            {},
            {},
            {},
            0,
        )


def text_of(i):
    """The form of this number, as JSON."""
    rng = random.Random(f"{SEED}/form/{i}")
    if rng.random() < 0.02:
        return large(rng)
    form = OtherEnd().form(value_of_program(rng)) if rng.random() < 0.4 else form_of(rng)
    return json.dumps(changed(rng, form))


class Alone(wire.Peer):
    """The judge's end without a program: objects have the hash of a number, and other questions
    raise.
    """

    def __init__(self):
        self.permits, self.stops = inside.permits, False
        self.fresh()

    def fresh(self):
        own = [1, 2]
        self.held, self.numbers, self.remotes, self.errors, self.changes = (
            [own, print],
            {id(own): 0, id(print): 1},
            {},
            {},
            0,
        )
        self.shared, self.ids, self.count = {1: [own, None]}, {id(own): 1}, 1

    def ask(self, operation, /, *args, **options):
        if operation in ("hash", "len", "bool"):
            return 1
        if operation == "base":
            return [1] if args[0].__own__.number % 2 else 7
        raise RuntimeError("StopIteration")


def resolve_all(numbers, at, late):
    """Give forms to the judge's end, and use the values as a judge does; `at` says where it is,
    `late` what is slow.
    """
    peer = Alone()
    for i in numbers:
        at[:8] = i.to_bytes(8, "little")
        text = text_of(i)
        began = time.process_time()
        try:
            peer.fresh()
            value = wire.unwire(json.loads(text), peer.resolve)
            assert value != NEVER
            assert value is not AssertionError
            reprlib.repr(value)
            wire.wire(value, wire.opaque)
        except AssertionError:
            late.append([i, "equal", text[:300]])
        except Exception:
            pass
        if time.process_time() - began > 1:
            late.append([i, time.process_time() - began, text[:300]])
    return late


def batch(first):
    """What is wrong with a thousand forms: a list of texts. In a forked child, with a judge's
    limits.
    """
    at = mmap.mmap(-1, 8)
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(read)
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + (1024 << 20), size + (1024 << 20)))
            used = math.ceil(time.process_time())
            resource.setrlimit(resource.RLIMIT_CPU, (used + 5, used + 6))
            os.write(
                write, json.dumps(resolve_all(range(first, first + 1000), at, [])).encode()[:60_000]
            )
            os._exit(0)
        except BaseException as error:
            os.write(write, json.dumps([repr(error)]).encode())
        finally:
            os._exit(1)
    os.close(write)
    with open(read) as file:
        found = file.read()
    _, status = os.waitpid(pid, 0)
    wrong = [f"form {each}" for each in json.loads(found or "[]")]
    if status:
        number_ = int.from_bytes(at[:8], "little")
        wrong.append(
            f"form {number_} ended the child with {os.waitstatus_to_exitcode(status)}: {text_of(number_)[:300]}"
        )
    return wrong


def test_every_form_gives_a_value_or_raises_an_exception_in_time():
    command = f"import sys; sys.path[:0] = {[str(HERE), str(HERE.parent)]}; import {Path(__file__).stem} as t, numpy; t.fuzz"
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", f"{command}({i}, 2)"], stdout=subprocess.PIPE, text=True
        )
        for i in (0, 1)
    ]
    outputs = [
        *concurrent.futures.ThreadPoolExecutor(2).map(
            lambda worker: worker.communicate()[0], workers
        )
    ]
    assert [worker.returncode for worker in workers] == [0, 0]
    wrong = "".join(outputs)
    print(wrong)
    assert not wrong


def fuzz(first, step):
    """Print what is wrong with every step-th batch."""
    warnings.simplefilter("ignore")  # coroutines that nobody awaits
    for number_ in range(first, FORMS_COUNT // 1000, step):
        for line in batch(1000 * number_):
            print(line, flush=True)


# ---- and sent by programs in the sandbox -----------------------------------------------------------------------------

SENDER = """import os
TEXT = {text!r}
def f(*args):
    for number in range(3, 64):
        text = TEXT
        try:
            while text:
                text = text[os.write(number, text):]
        except OSError:
            pass
    {then}
"""
LATE_ERRORS = "antigravity.X this.X idlelib.idle.X turtledemo.__main__.X __phello__.X tkinter.TclError lib2to3.pgen2.X".split()


def message(i):
    """Bytes of a message."""
    rng = random.Random(f"{SEED}/message/{i}")
    text, kind = text_of(7 * i + 3), rng.random()
    news = [[], []]
    if rng.random() < 0.4:
        news[0] = [[rng.choice([1, -1, 0, "1", None]), form_of(rng)]] * rng.choice([0, 1, 2])
        news[1] = rng.choice([[], [1], [-1], None, ["x"]])
    tail = ", ".join(
        map(json.dumps, news if rng.random() < 0.9 else rng.choice([[], news[:1], news * 2]))
    )
    if rng.random() < 0.03:
        text = json.dumps({"error": [rng.choice(LATE_ERRORS), []]})
    if kind < 0.75:
        line = f'["got", {text}, {tail}]'
    elif kind < 0.82:
        line = f'["raised", {text}, {tail}]'
    elif kind < 0.87:
        line = f'["raised", [{json.dumps(rng.choices(ERRORS.split(), k=2))}, [{text}], {{"x": {text}}}, ""], {tail}]'
    elif kind < 0.94:
        target = rng.choice(['{"mine": 0}', '{"mine": 1}', text, '{"builtin": "exec"}'])
        operation = rng.choice(
            [
                "call",
                "get",
                "set",
                "iter",
                "next",
                "base",
                "isinstance",
                "run",
                "names",
                "",
                text[:9],
                "exit",
            ]
        )
        line = f'["ask", [{json.dumps(operation)}, [{target}, {text}], {{"x": {text}}}], {tail}]'
    else:
        line = rng.choice(
            [
                text,
                text[: len(text) // 2],
                "",
                "null",
                "[]",
                '["got"]',
                "\0",
                "[" * 10**5,
                '{"got": 1}',
            ]
        )
    data = line.encode("utf-8", "surrogatepass") + b"\n"
    return rng.choice([data] * 8 + [data * 3, data[:-1], b"\xff" + data])


VALUES_BACK = r"""
import collections
class F(int):
    def __call__(self): return 0
def f(): return collections.defaultdict(F(1), {1: 2})
====
import datetime
def f(): return datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)
====
class L(list):
    __hash__ = lambda self: 1
def f(): return {L(): {L()}}
====
class L(tuple): pass
def f(): return {L([[]]): 1}
====
def f():
    x = []
    x.append(x)
    return x
====
def f():
    x = []
    for i in range(320): x = [x]
    return x
====
class K:
    def __hash__(self): return 7
    def __eq__(self, other): return True
def f(): return {K(): 1, 2: K()}, {K()}, slice(K()), collections.OrderedDict({K(): 1}), collections.Counter({1: K()})
import collections
====
import decimal
def f(): return [decimal.Decimal('sNaN')], {decimal.Decimal('NaN')}, float('nan'), {float('inf'): -0.0}
====
import numpy as np
def f(): return np.array(5), np.float32(1), np.zeros((0, 3)), {np.int64(3)}, np.str_('a'), np.array(['', '\0'])
====
import re
async def g(): pass
def f(): return re, print, int, Exception, ValueError(1), g(), iter([]), NotImplemented, ..., {1: 2}.keys(), type, f
"""


@pytest.mark.parametrize("number_", range(10))
def test_no_value_stops_the_trainer(number_, layers):
    """Values that come back to it: run_tests() raises nothing."""
    calls = sandbox.Calls("f", [[], []], [1.0, 1.0], 2.0)
    program = VALUES_BACK.split("====\n")[number_]
    (result,) = sandbox.run_tests(
        [program], [[sandbox.Probe("f()"), calls, f"assert f() == {NEVER}"]], workers=1
    )
    assert result.rate is not None
    assert len(result.verdicts) == 3
    assert result.verdicts[2] != "pass"


def test_no_message_of_a_program_does_harm(layers):
    pytest.importorskip("numpy")
    good, programs, tests = "def f(*args): return [2]\n", [], []
    for i in range(SENT):
        rng = random.Random(f"{SEED}/test/{i}")
        then = rng.choice(
            ["return None", "return None", "os._exit(0)", "return [args, f]", "raise SystemExit"]
        )
        programs.append(SENDER.format(text=message(i), then=then))
        calls = sandbox.Calls("f", [[], [[1, 2]]], [1.0, 1.0], 2.0)
        tests.append(rng.choice([
            f"assert f() == {NEVER}", f"assert f([1, 2]) == {NEVER}", f"assert f(lambda *a: a, [1]) == {NEVER}",
            f"class A:\n    x = 1\n    def m(self): return 2\na, b = A(), [[1]]\nassert f(a, b) == {NEVER}",
            f"assert f() == {NEVER} and f() == {NEVER}", f"x = f()\nassert x == {NEVER}",
            *[sandbox.Probe("f()"), calls] * 3,
            calls._replace(check="def right(i, inputs, value):\n    return value == data", data=NEVER),
            f"assert sorted(f()) == {NEVER}", f"assert f()[0] == {NEVER[0]!r}", f"assert {NEVER[1]} in f()",
            f"assert abs(f() - {NEVER[1]}) < 1e-6", f"assert list(f()) == {NEVER}", f"assert str(f()) == {NEVER[0]!r}",
        ]))  # fmt: skip
        if i % 50 == 49:
            programs.append(SENDER.format(text=b'["got", [{"i": "2"}], [], []]\n', then="return"))
            programs.append(good)
            tests.append("assert f() == [2]")  # what is sent arrives
            tests.append("assert f() == [2]")
    began, options = time.monotonic(), {"timeout_s": 2.0, "program_s": 20.0}
    results = sandbox.run_tests(programs, [[test] for test in tests], **options)
    wall_s = time.monotonic() - began
    wrong, counts = [], collections.Counter()
    for program, test, result in zip(programs, tests, results, strict=True):
        counts[result.verdicts[0] if result.verdicts else result.error] += 1
        free = isinstance(test, sandbox.Probe) or (
            isinstance(test, sandbox.Calls) and not test.check
        )
        allowed = {"fail", "timeout", "memory", "output limit"} | ({"pass"} if free else set())
        if test == "assert f() == [2]":
            allowed = {"pass"}
        if not set(result.verdicts) <= allowed or not result.verdicts or result.cpu_s[0] > 3:
            wrong.append(f"{program[:600]}\n-- {test}\n-- {result}"[:1500])
    print(f"{len(programs)} programs in {wall_s:.0f} s: {dict(counts)}", *wrong, sep="\n====\n")
    assert not wrong
