"""Honest programs get the verdicts of plain Python, and no message of a program does harm. Slow:
four minutes.

The programs are made from texts with random names, constants and values, in the forms of AceCode,
HumanEval, MBPP and LiveCodeBench (tests/programs/templates.txt); a third of them are then made
wrong. The verdicts of plain Python are those of a process that is forked for each test. The fuzzer
changes forms of the wire format (forms.txt), and gives them to the judge's end; and programs in the
sandbox write some of them into their pipe. HONEST_SEED makes other programs and forms.

What is left out, as sandbox.py says that it differs, or for it is random:
- an operator between an object of the program and data, but for + * divmod and in: V(1) == 1, V(1)
< 5, V(1) ** 2
- objects of other types, such as pathlib.Path, compared with the test's own; Ellipsis and
NotImplemented
- the order of sets, and so their repr() and list()
- what rare.txt holds: it is tried by itself
"""

import ast
import collections
import concurrent.futures
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

import livecodebench
import pytest
from test_sandbox import prelude, read_cases

import sandbox
from jail import inside, wire

pytestmark = pytest.mark.slow
HERE = Path(__file__).resolve().parent
SEED = int(os.environ.get("HONEST_SEED", "0"))
COUNT = int(os.environ.get("HONEST_COUNT", "2000"))
FORMS_COUNT = int(os.environ.get("FORMS", "100000"))
SENT = int(os.environ.get("SENT", "2000"))


def lines_of(name):
    return (HERE / "programs" / name).read_text("utf-8")


# A template: a program; behind "--" a test, behind "==" a test on every line, behind "<<" an input,
# behind ">> f" the arguments of a call on every line. $f and the like are names and constants, the
# same wherever they stand; $int and the like are new values everywhere. "== ?" is replaced by a
# comparison with the value that plain Python gives.
TEMPLATES = lines_of("templates.txt").split("====\n")
DRESSES = lines_of("dresses.txt").split("\n====\n")[1:]
DATA = json.loads(lines_of("words.json"))
WORDS, ODD_WORDS = DATA["words"], ["12", "a-b", "x,y.", ""]
DEFINED, TRACED = re.compile("^def ", re.M), "@trace\ndef "  # for dresses.txt
SPACES, TAB = "    ", "\t"


# ---- programs and tests --------------------------------------------------------------------------
def number(rng, low=-30, high=60):
    return rng.choice([rng.randint(low, high), rng.randint(0, 9)])


def some(rng, most, make):
    return [make() for _ in range(rng.randint(1, most))]


VALUES = {
    "int": number,
    "nat": lambda rng: rng.randint(1, 25),
    "big": lambda rng: rng.choice([rng.randint(100, 10**6), rng.randint(10**9, 10**20)]),
    "float": lambda rng: round(rng.uniform(-50, 50), rng.randint(1, 6)),
    "word": lambda rng: rng.choice(WORDS),
    "text": lambda rng: " ".join(some(rng, 6, lambda: rng.choice([*WORDS, *ODD_WORDS]))),
    "char": lambda rng: rng.choice("aeloxn"),
    "ints": lambda rng: some(rng, 8, lambda: number(rng)),
    "nats": lambda rng: [1, *some(rng, 8, lambda: rng.randint(1, 99))],
    "floats": lambda rng: some(rng, 6, lambda: round(rng.uniform(-9, 9), 2)),
    "words": lambda rng: some(rng, 7, lambda: rng.choice(WORDS)),
    "pairs": lambda rng: some(rng, 6, lambda: (rng.randint(1, 4), rng.choice(WORDS))),
    "matrix": lambda rng: some(rng, 4, lambda: [number(rng) for _ in range(3)]),
    "dict": lambda rng: {rng.choice(WORDS): rng.choice([number(rng), None, [1.5]]) for _ in 'abc'},
    "nested": lambda rng: [1, [number(rng), [rng.choice(WORDS), []]], [], [[None]], True],
    "line": lambda rng: " ".join(map(str, some(rng, 9, lambda: number(rng)))),
    "name": lambda rng: rng.choice(WORDS[:-2]),
}  # fmt: skip
PLACE = re.compile(rf"\$({'|'.join(sorted(VALUES, key=len, reverse=True))}|[A-Za-z])")


class Case:
    """A program with tests, before the truth of them is known."""

    def __init__(self, i):
        rng = self.rng = random.Random(f"{SEED}/{i}")
        fixed = {}
        for letters, names in DATA["names"].items():
            fixed |= zip(letters, rng.sample(names, len(letters)), strict=True)
        fixed |= {"K": rng.randint(2, 9), "M": rng.randint(2, 9), "R": round(rng.uniform(0, 2), 2)}
        fixed |= {"S": rng.choice(WORDS[:-2]), "q": rng.choice("hmpz")}

        def fill(match):
            if match[1] not in VALUES:
                return str(fixed[match[1]])
            value = VALUES[match[1]](rng)
            return value if match[1] in ("line", "name") else repr(value)

        self.template = i % len(TEMPLATES)
        text = PLACE.sub(fill, TEMPLATES[self.template])
        program, *sections = re.split(r"^(--|==|<<|>>.*)\n", text, flags=re.M)
        self.kind, self.function, self.tests = "test", "", []
        for mark, body in zip(sections[::2], sections[1::2], strict=True):
            if mark[0] in "<>":
                self.kind, self.function = ("stdin", "") if mark == "<<" else ("calls", mark[3:])
            self.tests += [body] if mark in ("--", "<<") else body.splitlines()
        if self.kind == "test":
            self.tests = rng.sample(self.tests, min(len(self.tests), rng.randint(1, 4)))
        if self.kind == "test" and rng.random() < 0.4:
            dress = f"f'''{rng.choice(DRESSES)}'''"
            program = eval(dress, globals() | {"program": program, "rng": rng})
        self.program = program
        self.main_block = rng.random() < (0.1 if "n = int(input())" in program else 0.7)
        self.wrong = rng.random() < 0.4  # some cannot be made wrong


# ---- what a test asks of a value: @ is the call --------------------------------------------------
IMPORTS = """import collections, datetime, decimal, fractions
from collections import Counter, OrderedDict, deque
from fractions import Fraction
from decimal import Decimal
"""
DERIVED = {name: eval(name, {"none": type(None)}) for name in DATA["derived"]}
LOOSE = ast.Compare | ast.BoolOp | ast.IfExp | ast.UnaryOp | ast.BinOp  # these need parentheses
UNORDERED = re.compile(r"repr|str|%s|!r|list\(|\[\*|\[x|zip|enumerate")
CLOSE = ["abs(@ - #) < 1e-6", "math.isclose(@, #, rel_tol=1e-9)", "# - 1 < @ <= #", "@ >= #"]


def chosen(rng, value, shown):
    """What a test looks at: the value, or something derived from it."""
    name = next((name for name, kind in DERIVED.items() if isinstance(value, kind)), None)
    if name and rng.random() < 0.5:
        derived = rng.choice(DATA["derived"][name])
    else:
        ours = type(value).__module__ in ("__main__", "program")
        derived = "@" if ours else rng.choice(DATA["any"])
    return "@" if shown and UNORDERED.search(derived) else derived


def same(text, value, scope):
    """Whether a text is the value of that type."""
    try:
        known = eval(text, dict(scope))
        return (known == value and type(known) is type(value)) is True
    except Exception:
        return False


def asked(rng, call, value, scope):
    """(condition of an assert that plain Python holds for a value, whether it needs IMPORTS)."""
    if hasattr(type(value), "__next__"):
        call, value = f"list({call})", list(value)
    # the order of sets is another in every process
    shown = "{" in repr(value) and not isinstance(value, dict)
    derived = chosen(rng, value, shown)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    close = rng.choice(CLOSE) if is_number and rng.random() < 0.15 else ""
    imported = {}
    exec(IMPORTS, imported)
    for what in (derived, "@", "type(@).__name__" if shown else "repr(@)"):
        try:
            result = eval(what.replace("@", "_value"), scope | {"_value": value})
            text = repr(result)
        except Exception:
            continue
        if " at 0x" in text:
            continue
        if what == "@" and close and (close[0] != "m" or "math" in scope):
            return close.replace("@", call).replace("#", text), False
        known = (False, scope), (True, imported | scope), (True, scope | imported)
        needs = [imports for imports, names in known if same(text, result, names)]
        if not needs:
            continue
        loose = isinstance(ast.parse(what.replace("@", "x")).body[0].value, LOOSE)
        form = rng.choice(DATA["forms"])
        if "{" in text and "map(str" in form:
            form = DATA["forms"][0]
        condition = form.replace("@", f"({what})" if loose else what)
        condition = condition.replace("@", call).replace("#", text)
        try:
            compile(condition, "", "eval")  # quotes in an f-string
        except SyntaxError:
            condition = f"{call} == {text}" if what == "@" else f"{call} is not None"
        return condition, needs[0]
    return f"{call} is not None", False


# ---- plain Python --------------------------------------------------------------------------------
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
    before = {**scope}
    needs_imports = rng.random() < 0.2
    open_lines = {}
    text = test.split("\n")
    for i, line in enumerate(text):
        if match := re.match(r"(\s*)assert (.*) == \?$", line):
            open_lines[i] = match
            text[i] = f"{match[1]}_record({i}, {match[2]})"

    def record(i, value):
        nonlocal needs_imports
        condition, needs = asked(rng, open_lines[i][2], value, before | scope)
        found[i] = f"{open_lines[i][1]}assert {condition}"
        needs_imports |= needs

    scope["_record"] = record
    exec(compile("\n".join(text), "<test>", "exec"), scope)
    for i, match in open_lines.items():
        text[i] = found.get(i, f"{match[1]}pass")
    head = IMPORTS if needs_imports else ""
    return head + as_check(rng, "\n".join(text))


def as_check(rng, text):
    """A test, sometimes in HumanEval's form."""
    call = re.match(r"assert (?:[a-z]+\()?([A-Za-z_]\w*)\(", text)
    builtin = call and call[1] in "list sorted isinstance len set type repr".split()
    if not call or rng.random() > 0.15 or builtin:
        return text
    body = re.sub(rf"\b{call[1]}\b", "candidate", text).replace("\n", "\n    ")
    head = "METADATA = {'author': 'x', 'dataset': 'test'}\n\n" if rng.random() < 0.5 else ""
    return f"{head}def check(candidate):\n    {body}\n\ncheck({call[1]})"


def passes(program, main_block, test):
    """Whether a test passes; alone() gives None for one that hangs."""
    try:
        exec(compile(test, "<test>", "exec"), load(program, main_block))
        return True
    except BaseException:
        return False


def printed(program, text):
    """[what a program prints, whether it ended well]; None if it hangs."""
    Path("program.py").write_text(program, "utf-8")
    Path("input").write_text(text, "utf-8")
    command = [sys.executable, "-X", "utf8", "-c", prelude("READER"), "program.py"]
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


# ---- wrong programs ------------------------------------------------------------------------------
SWAPS = "Add Sub, Sub Add, Mult Add, Mod FloorDiv, Lt LtE, Gt Lt, Eq NotEq, NotEq Eq, In NotIn"
SWAPS += ", GtE Gt, And Or, Or And"
SWAPS = {getattr(ast, a): getattr(ast, b) for a, b in map(str.split, SWAPS.split(","))}
FIRST = ast.FunctionDef | ast.Return | ast.BinOp | ast.If
SECOND = ast.Compare | ast.BoolOp | ast.Constant | ast.Return


def mutated(rng, program):
    """A program with a fault."""
    if rng.random() < 0.08:  # an answer cut off
        return program[: rng.randrange(len(program))]
    tree = ast.parse(program)
    nodes = [node for node in ast.walk(tree) if isinstance(node, FIRST)]
    nodes += [node for node in ast.walk(tree) if isinstance(node, SECOND)]
    if not nodes:
        return "raise ValueError\n" + program
    node = rng.choice(nodes)
    if isinstance(node, ast.FunctionDef):
        if len(node.body) > 1:
            del node.body[rng.randrange(len(node.body))]
        else:
            node.body = [ast.Pass()]
    elif isinstance(node, ast.Return) and node.value:
        text = rng.choice(DATA["returns"]).replace("{}", f"({ast.unparse(node.value)})")
        node.value = ast.parse(text, mode="eval").body
    elif isinstance(node, ast.If):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.BinOp | ast.BoolOp):
        node.op = SWAPS.get(type(node.op), ast.Sub if isinstance(node, ast.BinOp) else ast.Or)()
    elif isinstance(node, ast.Compare):
        node.ops[0] = SWAPS.get(type(node.ops[0]), ast.Eq)()
    elif isinstance(node, ast.Constant):
        other = {int: 1, str: "q", float: 0.5}.get(type(node.value), 0)
        node.value = other if rng.random() < 0.5 else None
    return ast.unparse(ast.fix_missing_locations(tree))


def truth(case, i):
    """The verdicts of plain Python: {"program", "tests", "values"}, and "wanted" of the right
    program; or None.
    """
    head = livecodebench.HEAD if case.kind == "calls" else ""

    def values(program):
        if case.kind == "stdin":
            return [printed(program, text) for text in case.tests]
        if case.kind == "calls":
            return alone(returned, head + program, case.function, case.tests)
        return [alone(passes, program, case.main_block, test) for test in case.tests]

    if case.kind == "test":
        tests = []
        for k, test in enumerate(case.tests):
            if "== ?" in test:
                test = alone(filled, f"{SEED}/{i}/{k}", case.program, case.main_block, test)
            tests.append(test)
        case.tests = [test for test in tests if test]
        if not case.tests:
            return None
    right = found = values(case.program)
    for _ in range(6 if case.wrong else 0):
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
    row = {"kind": case.kind, "main_block": case.main_block, "function": case.function}
    row |= {"program": head + case.program, "tests": case.tests, "values": found, "wanted": right}
    return row


def worker(first, step):
    """Print the truth of every step-th case, as JSON lines."""
    for i in range(first, COUNT, step):
        case = Case(i)
        print(json.dumps([i, case.template, truth(case, i)]), flush=True)


def two_workers(call):
    """What two processes print that call a function of this file, one with 0 and one with 1."""
    start = f"import sys; sys.path[:] = {sys.path}; "
    start += f"import numpy, {Path(__file__).stem} as t; t.{call}"
    env = os.environ | {"PYTHONHASHSEED": "0"}

    def output(first):
        command = [sys.executable, "-c", start.format(first)]
        with tempfile.TemporaryDirectory() as folder:
            pipes = {"cwd": folder, "env": env, "stdout": subprocess.PIPE}
            return subprocess.run(command, text=True, check=True, **pipes).stdout

    return "".join(concurrent.futures.ThreadPoolExecutor(2).map(output, (0, 1)))


@pytest.fixture(scope="module")
def layers():
    found = sandbox.layers()
    if not (found["seccomp"] and found["namespaces"]):
        pytest.skip("asyncio and folders need namespaces, and programs seccomp")
    pytest.importorskip("numpy")


# ---- the sandbox ---------------------------------------------------------------------------------
def value_of(text):
    """The value of its repr(), or an object that equals nothing."""
    try:
        return object() if "Ellipsis" in text else eval(text, {"inf": math.inf, "nan": math.nan})
    except (SyntaxError, NameError):
        return object()


def as_list(value):
    return list(value) if type(value) is tuple else value


def expected_of(row):
    """[(a test for the sandbox, whether it passes, its value or None)] of a case."""
    if row["kind"] == "test":
        return [(*pair, None) for pair in zip(row["tests"], row["values"], strict=True)]
    if row["kind"] == "stdin":
        tests = []
        cases = zip(row["tests"], row["values"], row["wanted"], strict=True)
        for text, (out, good), (wanted, _) in cases:
            check = f"def right(printed):\n    return printed == {wanted!r}"
            tests.append((sandbox.Stdin(text), good, None if " at 0x" in out else out))
            tests.append((sandbox.Stdin(text, check=check), good and out == wanted, None))
        return tests
    inputs = [eval(f"[{args}]") for args in row["tests"]]
    wanted, found = ([*map(value_of, row[name])] for name in ("wanted", "values"))
    test = sandbox.Calls(row["function"], inputs, [2.0] * len(inputs), 4.0)
    complete = len(found) == len(inputs)
    data = None if object in map(type, found) else [*map(repr, found)]
    tests = [(test, complete, data)]
    if len(wanted) == len(inputs):
        right = "def right(i, inputs, value):\n"
        right += "    return (list(value) if type(value) is tuple else value) == data[i]\n"
        good = complete and [*map(as_list, found)] == wanted
        tests.append((test._replace(check=right, data=wanted), good, None))
    return tests


def plain_value(value):
    return [repr(each) for each, _ in value] if isinstance(value, list) else value


def test_honest_programs_get_the_verdicts_of_plain_python(layers):
    rows = sorted(map(json.loads, two_workers("worker({}, 2)").splitlines()))
    cases = [(i, template, row) for i, template, row in rows if row]
    different = []
    tests = failing = 0
    for kind, main_block in itertools.product(("test", "stdin", "calls"), (True, False)):
        group = [case for case in cases if case[2]["kind"] == kind]
        group = [case for case in group if case[2]["main_block"] == main_block]
        wanted = [expected_of(row) for *_, row in group]
        results = sandbox.run_tests(
            [row["program"] for *_, row in group],
            [[test for test, *_ in of_case] for of_case in wanted],
            threads=kind != "test",
            main_block=main_block and kind == "test",
        )
        for (i, template, row), of_case, result in zip(group, wanted, results, strict=True):
            verdicts = result.verdicts or [result.error] * len(of_case)
            values = result.values or [None] * len(of_case)
            for (test, good, value), ours, got in zip(of_case, verdicts, values, strict=True):
                tests += 1
                failing += not good
                passed = ours == "pass"
                if passed != good or (passed and value is not None and plain_value(got) != value):
                    where = f"---- case {i}, template {template}\n{row['program']}\n-- test\n{test}"
                    different.append(f"{where}\n-- plain {good} {value}, ours {ours} {got}")
    print(f"{len(cases)} programs, {tests} tests, {failing} of which fail; {len(different)} differ")
    print(*different, sep="\n")
    assert len(cases) > 0.95 * COUNT
    assert not different


def honest(group):
    """One case of a test for each program of a file, in which plain Python passes."""
    rows = []
    for name, case in read_cases(group).items():
        hole = pytest.mark.xfail(strict=True, raises=AssertionError, reason=case.hole)
        rows.append(pytest.param(case, id=name, marks=[hole] if case.hole else []))
    return rows


@pytest.mark.parametrize("case", honest("rare") + honest("sizes"))
def test_what_honest_tests_do_rarely_and_in_large_sizes(case, layers):
    (test,) = case.tests
    assert alone(passes, case.program, True, test) is True, "a wrong case"
    (result,) = sandbox.run_tests([case.program], [[test]], workers=1)
    assert result.verdicts == ["pass"], (case, result)


# ---- the fuzzer: forms of the wire format --------------------------------------------------------
NEVER = ["no form holds this", 90210]
PRIME = (1 << 61) - 1  # hash() of an int is its remainder
FORMS = [json.loads(line) for line in lines_of("forms.txt").splitlines()]


def parts(form):
    """[(container, key)] of all places in a form."""
    found, waiting = [], [form]
    while waiting:
        each = waiting.pop()
        keys = range(len(each)) if isinstance(each, list) else [*each]
        found += [(each, key) for key in keys]
        waiting += [each[key] for key in keys if isinstance(each[key], list | dict)]
    return found


def part(rng):
    """Some part of some form."""
    container, key = rng.choice(parts([rng.choice(FORMS)]))
    return container[key]


def changed(rng, form):
    """A form with up to three faults."""
    form = [json.loads(json.dumps(form))]  # without parts that are the same object
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        at, key = rng.choice(parts(form))
        kind = rng.randrange(8)
        if kind == 0:
            at[key] = part(rng)
        elif kind == 1:
            other, key_2 = rng.choice(parts(form))
            at[key] = json.loads(json.dumps(other[key_2]))
        elif kind == 2 and isinstance(at, dict):
            at[rng.choice(DATA["tags"])] = at.pop(key)
        elif kind == 3:
            at[key] = {rng.choice(DATA["tags"]): at[key]}
        elif kind == 4 and isinstance(at, list) and at is not form:
            at.insert(key, at[key])
        elif kind == 5 and at is not form:
            del at[key]
        elif kind == 6:
            at[key] = [at[key]] * rng.choice([2, 50])
        elif kind == 7:
            at[key] = {"r": [rng.choice(DATA["types"]), at[key]]}
        form = json.loads(json.dumps(form))
    return form[0]


def large(rng):
    """The text of a form of some size."""
    n = rng.choice([500, 3000])
    colliding = [{"i": f"{i * PRIME:x}"} for i in range(1, n)]
    deep = rng.choice(DATA["deep"])
    depth = rng.choice([100, 300, 330, 490, 900, 2000, 30_000])
    fraction = {"r": ["fractions.Fraction", {"i": "f" * n}, {"i": "7" * n}]}
    thirds = [{"r": ["fractions.Fraction", each, {"i": "3"}]} for each in colliding[:1000]]
    form = rng.choice([
        {"s": colliding}, {"d": [[each, 1] for each in colliding]}, {"f": colliding[:500] * 4},
        {"r": ["collections.Counter", {"d": [[each, each] for each in colliding]}]},
        ["x" * 50 * n] * 2, {"i": "e" * 50 * n}, fraction, {"r": ["decimal.Decimal", "9" * 20 * n]},
        [[]] * n, {"t": "ab" * n}, {"a": ["<i8", [n], "\x07" * 8 * n]}, {"b": "ÿ" * 30 * n},
        {"a": ["|S" + "1" * n, [], ""]}, {"r": ["collections.deque", colliding, {"i": "f" * 15}]},
        {"a": ["<f8", [1] * n, "\0" * 8]}, {"r": ["builtins.range", *colliding[:3]]}, {"s": thirds},
        [{"yours": [i, True]} for i in range(n)], {"k": [1, [{"k": [1]}] * n]}])  # fmt: skip
    return rng.choice([
        deep[0] * depth + "1" + deep[1] * depth, deep[0] * depth, "9" * n, "9" * 10 * n,
        *[json.dumps(form)] * 18])  # fmt: skip


def text_of(i):
    """The form of this number, as JSON."""
    rng = random.Random(f"{SEED}/form/{i}")
    if rng.random() < 0.02:
        return large(rng)
    return json.dumps(changed(rng, rng.choice(FORMS)))


class Alone(wire.Peer):
    """The judge's end without a program: objects have the hash of a number, and other questions
    raise.
    """

    def __init__(self):
        self.permits, self.stops = inside.permits, False
        self.fresh()

    def fresh(self):
        own = [1, 2]
        self.held, self.numbers = [own, print], {id(own): 0, id(print): 1}
        self.remotes, self.errors, self.changes = {}, {}, 0
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
            late = resolve_all(range(first, first + 1000), at, [])
            os.write(write, json.dumps(late).encode()[:60_000])
            os._exit(0)
        except BaseException as error:
            os.write(write, json.dumps([repr(error)]).encode())
        finally:
            os._exit(1)
    os.close(write)
    with open(read) as file:
        found = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    wrong = [f"form {each}" for each in json.loads(found or "[]")]
    if status:
        i = int.from_bytes(at[:8], "little")
        wrong.append(f"form {i} ended the child with {status}: {text_of(i)[:300]}")
    return wrong


def fuzz(first, step):
    """Print what is wrong with every step-th batch."""
    warnings.simplefilter("ignore")  # coroutines that nobody awaits
    for i in range(first, FORMS_COUNT // 1000, step):
        for line in batch(1000 * i):
            print(line, flush=True)


def test_every_form_gives_a_value_or_raises_an_exception_in_time():
    wrong = two_workers("fuzz({}, 2)")
    print(wrong)
    assert not wrong


# ---- and sent by programs in the sandbox ---------------------------------------------------------
OPERATIONS = "call get set iter next base isinstance run names exit".split()
ODD_LINES = ["", "null", "[]", '["got"]', "\0", "[" * 10**5, '{"got": 1}']


def message(i):
    """Bytes of a message."""
    rng = random.Random(f"{SEED}/message/{i}")
    text, kind = text_of(7 * i + 3), rng.random()
    news = [[], []]
    if rng.random() < 0.4:
        news[0] = [[rng.choice([1, -1, 0, "1", None]), part(rng)]] * rng.choice([0, 1, 2])
        news[1] = rng.choice([[], [1], [-1], None, ["x"]])
    sent = news if rng.random() < 0.9 else rng.choice([[], news[:1], news * 2])
    tail = ", ".join(map(json.dumps, sent))
    if rng.random() < 0.03:
        text = json.dumps({"error": [rng.choice(DATA["late errors"]), []]})
    if kind < 0.75:
        line = f'["got", {text}, {tail}]'
    elif kind < 0.82:
        line = f'["raised", {text}, {tail}]'
    elif kind < 0.87:
        family = json.dumps(rng.choices(DATA["errors"], k=2))
        line = f'["raised", [{family}, [{text}], {{"x": {text}}}, ""], {tail}]'
    elif kind < 0.94:
        target = rng.choice(['{"mine": 0}', '{"mine": 1}', text, '{"builtin": "exec"}'])
        operation = json.dumps(rng.choice([*OPERATIONS, "", text[:9]]))
        line = f'["ask", [{operation}, [{target}, {text}], {{"x": {text}}}], {tail}]'
    else:
        line = rng.choice([text, text[: len(text) // 2], *ODD_LINES])
    data = line.encode("utf-8", "surrogatepass") + b"\n"
    return rng.choice([data] * 8 + [data * 3, data[:-1], b"\xff" + data])


CALLS = sandbox.Calls("f", [[], []], [1.0, 1.0], 2.0)


@pytest.mark.parametrize("case", read_cases("values_back").values())
def test_no_value_stops_the_trainer(case, layers):
    """Values that come back to it: run_tests() raises nothing."""
    tests = [sandbox.Probe("f()"), CALLS, f"assert f() == {NEVER}"]
    (result,) = sandbox.run_tests([case.program], [tests], workers=1)
    assert result.rate is not None
    assert len(result.verdicts) == 3
    assert result.verdicts[2] != "pass"


def test_no_message_of_a_program_does_harm(layers):
    calls = CALLS._replace(inputs=[[], [[1, 2]]])
    check = "def right(i, inputs, value):\n    return value == data"
    free = [sandbox.Probe("f()"), calls] * 3
    strict = [calls._replace(check=check, data=NEVER)]
    for line in lines_of("never.txt").split("====\n"):
        strict.append(line.replace("NEVER", repr(NEVER)))
    ends = ["return None"] * 2 + ["os._exit(0)", "return [args, f]", "raise SystemExit"]
    arrives = "assert f() == [2]"
    programs, tests = [], []
    for i in range(SENT):
        rng = random.Random(f"{SEED}/test/{i}")
        programs.append(prelude("SENDER").format(text=message(i), then=rng.choice(ends)))
        tests.append(rng.choice(strict + free))
        if i % 50 == 49:
            two = b'["got", [{"i": "2"}], [], []]\n'
            programs.append(prelude("SENDER").format(text=two, then="return"))
            programs.append("def f(*args): return [2]\n")
            tests += [arrives, arrives]
    cases = [[test] for test in tests]
    results = sandbox.run_tests(programs, cases, timeout_s=2.0, program_s=20.0)
    wrong, counts = [], collections.Counter()
    for program, test, result in zip(programs, tests, results, strict=True):
        outcome = result.verdicts[0] if result.verdicts else result.error
        counts[outcome] += 1
        allowed = {"fail", "timeout", "memory", "output limit"}
        if test in free:
            allowed.add("pass")
        if test == arrives:
            allowed = {"pass"}
        if outcome not in allowed or result.cpu_s[0] > 3:
            wrong.append(f"{program[:600]}\n-- {test}\n-- {result}"[:1500])
    print(f"{len(programs)} programs: {dict(counts)}", *wrong, sep="\n====\n")
    assert not wrong
