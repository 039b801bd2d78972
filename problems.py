"""The problems of five benchmarks of code, HumanEval(+), MBPP(+) and LiveCodeBench: files, tests, verdicts.

    problems = read_problems(cfg)                                      # {id: Problem}, of a file or of the download
    known = what_decides(task, problems, ids, {}, flags)               # {id: what the next two need beside a problem}
    tests = hidden_tests(problem, known.get(id), code, 4.0, protocol)  # of a sample, for sandbox.run_tests
    row = hidden_verdict(problem, known.get(id), result)               # "passed", "result", what a benchmark adds

Owns the official files and the rules by which results become verdicts; prompts and what is cut out of texts are those
of protocols.py, the command is benchmarks.py.
Sources: HumanEval, arXiv:2107.03374; MBPP, arXiv:2108.07732; HumanEval+ and MBPP+ by the rules of evalplus 0.3.1,
arXiv:2305.01210; LiveCodeBench by those of its testing_util.py, arXiv:2403.07974.
"""

import ast
import base64
import builtins
import contextlib
import functools
import gzip
import http.client
import itertools
import json
import math
import pickletools
import random
import re
import sys
import typing
import urllib.request
import zlib
from decimal import Decimal, InvalidOperation
from pathlib import Path

import numpy as np

import protocols
import runs
import sandbox

# ---- files, HumanEval and MBPP -------------------------------------------------------------------------------------

TASKS = {  # official files
    "humaneval": "https://raw.githubusercontent.com/openai/human-eval/master/data/HumanEval.jsonl.gz",
    "mbpp": "https://raw.githubusercontent.com/google-research/google-research/master/mbpp/sanitized-mbpp.json",
    "full": "https://raw.githubusercontent.com/google-research/google-research/master/mbpp/mbpp.jsonl",
    "humaneval+": "https://github.com/evalplus/humanevalplus_release/releases/download/v0.1.10/HumanEvalPlus.jsonl.gz",
    "mbpp+": "https://github.com/evalplus/mbppplus_release/releases/download/v0.2.0/MbppPlus.jsonl.gz",
}
SHOTS = (2, 3, 4)  # MBPP: the problems that the paper shows before the one that is asked
ARROW = re.compile(r"\s*(?:==>|=>|==|=|->|➞|→|#?\s*(?:should )?returns?\b)[ \t]*")
# Its value tells programs apart: a hash of what they return for some inputs, "" if they never do.
PROBE = """import signal, zlib
def _late(*_): raise TimeoutError
def _show(value):
    if isinstance(value, (set, frozenset, dict)):
        return str(sorted(map(repr, value.items() if isinstance(value, dict) else value)))
    return repr(value)
def _behaviour():
    signal.signal(signal.SIGPROF, _late)
    seen, returned = [], False
    for args in {inputs!r}:
        signal.setitimer(signal.ITIMER_PROF, 0.3)
        try:
            seen.append(_show({entry}(*args)))
            returned = True
        except Exception as error:
            seen.append(type(error).__name__)
    signal.setitimer(signal.ITIMER_PROF, 0)
    return returned * f"{{zlib.crc32(chr(10).join(seen).encode()):08x}}"
_behaviour()"""


class Problem(typing.NamedTuple):
    id: str | int
    entry: str  # the function that is asked for
    asked: protocols.Question  # what prompts are made of
    head: str  # what stands before a completion when it runs
    test: str  # hidden
    public: list  # asserts made of the examples that the prompt shows
    probes: list  # PROBE, if there are inputs for it
    reference: str  # a program that passes; its time is the measure of a sample's
    cases: typing.Any = None  # what decides in place of `test`: Plus or Live


def tasks_path(cfg):
    """The official file: --tasks_file, or where its download goes."""
    return Path(cfg.tasks_file or Path(cfg.downloads) / tasks_url(cfg).rsplit("/", 1)[1])


def tasks_url(cfg):
    """MBPP is for some protocols the full one."""
    full = cfg.task == "mbpp" and protocols.named(cfg.protocol, cfg.task)[1].data == ("mbpp",)
    return TASKS["full" if full else cfg.task]


def read_problems(cfg):
    """{id as a string: Problem} of the official file: --tasks_file, or downloaded once into --downloads.

    cfg is the Config of benchmarks.py. With --explain no protocol is asked whether it has these problems.
    """
    if cfg.task == "livecodebench":
        return live_problems(cfg.tasks_file, cfg.since, cfg.until, cfg.problems)
    url, path = tasks_url(cfg), tasks_path(cfg)
    settings = {"split": cfg.split, "count": cfg.problems, "protocol": "" if cfg.explain else cfg.protocol}
    if cfg.tasks_file or path.is_file():
        try:
            return parse_problems(cfg.task, path.read_bytes(), **settings)
        except ValueError as error:
            raise ValueError(f"{path} is not the official file of {cfg.task}: {error}") from None
    print(f"downloading {url}", file=sys.stderr)
    return download(url, path, "--tasks_file", lambda data: parse_problems(cfg.task, data, **settings))


def download(url, path, flag, parse):
    """What parse(bytes) makes of an official file. It is kept if that raises no ValueError: half a file is none.

    OSError names `flag`, by which a user says where the file is.
    """
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            data = response.read()
        problems = parse(data)
    except (OSError, http.client.HTTPException, ValueError) as error:
        advice = f"fetch it by hand into {path.parent}, or name it with {flag}"
        raise OSError(f"{url} cannot be downloaded ({error}); {advice}") from None
    path.parent.mkdir(parents=True, exist_ok=True)
    runs.write(path, data)
    return problems


def parse_problems(task, data, split="test", count=0, protocol=""):
    """The problems in the bytes of an official file; ValueError on what is wrong, with the line or the number.

    count: only so many, 0 all. protocol: its name, if it is to have these problems.
    """
    try:
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    except (EOFError, zlib.error) as error:
        raise ValueError(f"broken gzip: {error}") from None
    problems, make, keys = {}, plus_problem, PLUS_KEYS
    if task == "humaneval":
        make, keys = humaneval_problem, ("task_id", "prompt", "entry_point", "test")
    if task == "mbpp":
        make, keys = mbpp_problem, ("task_id", "text", "code", "test_list")
    one_list = task == "mbpp" and text.lstrip().startswith("[")  # the full MBPP is JSON lines, too
    rows = json.loads(text) if one_list else [*parse_lines(text.split("\n"), keys)]
    try:
        if task == "mbpp":  # the solved problems of the prompt have ids outside the test split
            shots = [mbpp_question(row) for row in rows if row["task_id"] in SHOTS]
            make = functools.partial(mbpp_problem, shots=shots)
            rows = [row for row in rows if split == "all" or 11 <= row["task_id"] <= 510]
        if task in PUBLISHED:
            check_version(task, rows)
        if protocol and rows:
            check_data(task, rows, protocol)
        for row in rows[: count or None]:
            problems[key_of(row["task_id"])] = make(row)
    except (LookupError, TypeError, AttributeError, SyntaxError) as error:
        raise ValueError(f"problem {len(problems) + 1} is of another form: {error!r}") from None
    if not problems:
        raise ValueError("it holds no problems")
    return problems


def check_data(task, rows, protocol):
    """Raises ValueError if a protocol does not ask the problems of a file."""
    name, record = protocols.named(protocol, task)
    mbpp = "mbpp" if "text" in rows[0] else "sanitized"
    kind = {"humaneval": "humaneval", "humaneval+": "humaneval", "mbpp+": "mbppplus"}.get(task, mbpp)
    wanted, given = (protocols.DATA[key][0] for key in (record.data[0], kind))
    if kind not in record.data:
        raise ValueError(f"--protocol={name} asks for {wanted}, and this is {given}")
    counts = protocols.DATA[kind][1]
    if len(rows) not in counts and not name.startswith("ours"):
        raise ValueError(f"it has {len(rows)} problems; --protocol={name} is of {' or '.join(map(str, counts))}")
    if kind != record.data[0] and not name.startswith("ours"):
        print(f"scores that are published of {name} are of {wanted}, and this is {given}", file=sys.stderr)


def key_of(task_id):
    """HumanEval/3, Mbpp/3 and 3 are the same problem: "3"."""
    return str(task_id).split("/")[-1]


def parse_lines(lines, keys, either=()):
    """The objects of JSON lines, in turn; ValueError names the first that has not these keys, and one of `either`."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        complete = isinstance(row, dict) and row.keys() >= {*keys} and (not either or row.keys() & {*either})
        if not complete or not all(isinstance(row.get(key, ""), str) for key in either):
            needed = [*keys, *filter(None, [" or ".join(either)])]
            raise ValueError(f"line {number} is not a JSON object with {', '.join(needed)}; samples are texts")
        yield row


def humaneval_problem(row):
    task_id, prompt, entry = row["task_id"], row["prompt"], row["entry_point"]
    reference = prompt + row.get("canonical_solution", "")
    public, arguments = docstring_examples(prompt, entry)
    # helpers that the prompt defines stand in the test, too: the test calls some, and not as a sample may redefine them
    helpers = [node for node in ast.parse(prompt).body if getattr(node, "name", "") != entry]
    test = "\n".join([*map(ast.unparse, helpers), row["test"], f"check({entry})"])
    asked = protocols.Question(entry, prompt, row["test"])
    return Problem(task_id, entry, asked, prompt, test, public, probes(task_id, entry, arguments), reference)


def mbpp_question(row):
    """What is asked: the full MBPP has its words as "text", the sanitized one, in other words, as "prompt"."""
    words, tests = row.get("text", row.get("prompt")), tuple(row["test_list"])
    docstring = f'"""\n{words}\n{tests[0]}\n"""\n'  # as EvalPlus and BigCode ask it
    return protocols.Question(called(tests), docstring, text=words, tests=tests, code=row["code"])


def mbpp_problem(row, shots):
    """The task and three asserts, after problems with their answers.

    The asserts in the prompt are among those that decide, so none of them is `public`: best-of-n would be an oracle.
    The inputs in them are used, not the values expected.
    """
    asked = mbpp_question(row)
    asked = asked._replace(shots=tuple(shot for shot in shots if shot != asked))  # without its own solution
    # all in one process, as the harnesses have it: a function that works once is no solution
    test = "\n".join([*row.get("test_imports", row.get("test_setup_code", "").splitlines()), *row["test_list"]])
    arguments = [literals(call, asked.entry) for call in calls_of(row["test_list"])]
    found = probes(row["task_id"], asked.entry, [args for args in arguments if args is not None])
    return Problem(row["task_id"], asked.entry, asked, "", test, [], found, row["code"])


def calls_of(tests):
    """The calls in the first three asserts."""
    return [node for test in tests[:3] for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Call)]


def called(tests):
    """MBPP has no field for the function that is asked for: it is the one that the asserts call."""
    names = [call.func.id for call in calls_of(tests) if isinstance(call.func, ast.Name)]
    return next((name for name in names if not hasattr(builtins, name)), names[0])  # one problem redefines sum()


def docstring_examples(prompt, entry):
    """(asserts, arguments) of the examples `f(1) == 2`, `f(1) -> 2`, `>>> f(1)` over `2`, and so on, in a docstring."""
    asserts, arguments = [], []
    for start in (match.start() for match in re.finditer(rf"\b{entry}\(", prompt)):
        # The call ends at the first right parenthesis at which it is Python.
        for end in (start + match.end() for match in re.finditer(r"\)", prompt[start : start + 500])):
            with contextlib.suppress(SyntaxError, ValueError):
                call = ast.parse(prompt[start:end], mode="eval").body
                break
        else:
            continue
        if (args := literals(call, entry)) is None:
            continue
        arguments.append(args)
        # What it returns stands behind an arrow, or on the next line of a session.
        arrow = ARROW.match(prompt, end)
        if not arrow and prompt[:start].endswith(">>> "):
            arrow = re.compile(r"[ \t]*\n[ \t]*").match(prompt, end)
        line = prompt[arrow.end() :].split("\n")[0] if arrow else ""
        for length in range(len(line), 0, -1):  # the longest literal that the line begins with
            with contextlib.suppress(SyntaxError, ValueError):
                value = ast.literal_eval(line[:length].strip())
                if not re.match(r"\w|\s*[-+*/=]", line[length:]):  # not 19 of 19 - 5 - 6 = 8
                    asserts.append(f"assert {prompt[start:end]} == {value!r}")
                break
    return asserts, arguments


def literals(call, entry):
    """The arguments of a call of `entry`, or None if they are not plain literals."""
    with contextlib.suppress(ValueError):
        if isinstance(call.func, ast.Name) and call.func.id == entry and not call.keywords:
            return [ast.literal_eval(arg) for arg in call.args]
    return None


def probes(seed, entry, arguments):
    """[PROBE] with the inputs of examples and variations of them; [] without examples."""
    rng, examples = random.Random(str(seed)), arguments[:4]
    inputs = examples + [[vary(arg, rng) for arg in args] for args in examples * 2]
    return [sandbox.Probe(PROBE.format(inputs=inputs, entry=entry))] if inputs else []


def vary(value, rng):
    """A value of the same type near by: a number changed a little, a sequence reversed, shortened or lengthened."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return rng.choice([value + 1, value - 1, value + 2, -value])
    if isinstance(value, str | list | tuple) and value:
        # backwards, without an item, with one more; a list also with a changed item
        i = rng.randrange(len(value))
        kinds = [value[::-1], value[:i] + value[i + 1 :], value + value[i : i + 1]]
        if not isinstance(value, str):
            kinds += [value[:i] + type(value)([vary(value[i], rng)]) + value[i + 1 :]] * 3
        return rng.choice(kinds)
    return value


# ---- EvalPlus: HumanEval+ and MBPP+ --------------------------------------------------------------------------------
#
# Rules of evalplus 0.3.1 (its eval/__init__.py, eval/_special_oracle.py and data/mbpp.py, Apache-2.0), but HumanEval/32
# can pass, as after that release. Ref: Liu et al., arXiv:2305.01210.

PUBLISHED = {"humaneval+": ("v0.1.10", 164), "mbpp+": ("v0.2.0", 378)}  # what scores are published of; MBPP+ had 399
PLUS_KEYS = "task_id prompt entry_point canonical_solution contract base_input plus_input atol".split()
# MBPP+: functions whose results are compared as sets, and those of which only counts whether they return something
SETS = """similar_elements find_char_long common_in_nested_lists extract_singly larg_nnum intersection_array
find_dissimilar Diff""".split()
NOT_NONE = ["check_str", "text_match_three", "text_starta_endb"]


def tuples(lists):
    return [tuple(items) for items in lists]


def nested_tuples(value):
    return tuple(map(nested_tuples, value)) if isinstance(value, list) else value


MBPP_ARGUMENTS = {  # JSON knows no tuples, sets and complex numbers: problems of MBPP+ -> their arguments from a row
    "2 116 132 143 222 261 273 394 399 421 424 429 470 560 579 596 616 630 726 740 744 809": tuples,
    "63 64 70 94 120 237 272 299 400 409 417 438 473 614 780": lambda row: [*map(tuples, row)],
    "75 413 444 753": lambda row: [tuples(row[0]), row[1]],
    "106 750": lambda row: [row[0], tuple(row[1])],
    "115": lambda row: [[set(item) if isinstance(item, list) and item else {} for item in row[0]]],
    "124": lambda row: [float(row[0]), complex(row[1])],
    "250 307 405 446 617 720 763 808": lambda row: [tuple(row[0]), *row[1:]],
    "252": lambda row: [complex(row[0])],
    "259 401 445": lambda row: [tuple(tuples(lists)) for lists in row],
    "278": lambda row: [tuple(tuple(item) if isinstance(item, list) else item for item in row[0])],
    "580 615 791": lambda row: [*map(nested_tuples, row)],
    "722": lambda row: [{key: tuple(value) for key, value in row[0].items()}, *row[1:]],
}
MBPP_ARGUMENTS = {number: form for numbers, form in MBPP_ARGUMENTS.items() for number in numbers.split()}


def check_version(task, rows):
    """Refuse the other benchmark's file; say if the number of problems is another version's."""
    name, (version, count) = {"humaneval+": "HumanEval/", "mbpp+": "Mbpp/"}[task], PUBLISHED[task]
    if other := [row["task_id"] for row in rows if not str(row["task_id"]).startswith(name)]:
        raise ValueError(f"{other[0]} is none of its problems")
    if len(rows) != count:
        told = f"this file has {len(rows)} problems; {version}, of which scores are published, has {count}"
        print(f"--task={task}: {told}", file=sys.stderr)


class Plus(typing.NamedTuple):
    """The inputs of a problem of EvalPlus, and how far from the reference's a result may be."""

    base: list
    plus: list
    atol: float
    checked: str  # the reference solution, with the contract that inputs are to keep


class Truth(typing.NamedTuple):
    """What the reference solution returns for the base and the plus inputs, and the limits that follow."""

    values: tuple
    limits: tuple  # processor seconds of every call
    most: tuple  # bytes that may come back of a sample


def plus_problem(row):
    task_id, prompt, entry, solution = (row[key] for key in PLUS_KEYS[:4])
    convert = MBPP_ARGUMENTS.get(key_of(task_id), list) if task_id.startswith("Mbpp/") else list
    base, plus = ([convert(args) for args in row[key]] for key in ("base_input", "plus_input"))
    # the contract stands in the function, before all else; some are no Python there
    reference = prompt + solution
    checked = prompt + row["contract"] + solution
    if f"def {entry}(" in solution:
        checked = prompt + re.sub(rf"(?m)^def {entry}\(.*$", lambda line: line[0] + "\n" + row["contract"], solution)
    checked = checked if protocols.parses(checked) else reference
    public, arguments = docstring_examples(prompt, entry) if task_id.startswith("HumanEval/") else ([], base[:3])
    found, cases = probes(task_id, entry, arguments), Plus(base, plus, float(row["atol"]), checked)
    asked = protocols.Question(entry, prompt)
    return Problem(task_id, entry, asked, prompt, "", public, found, reference, cases)


def plus_tests(problem, limits, most=(1 << 26, 1 << 26)):
    """The two tests of a sample. All calls together have at most a minute, as EvalPlus has it."""
    sets = zip((problem.cases.base, problem.cases.plus), limits, most, strict=True)
    return [sandbox.Calls(problem.entry, args, each, min(60.0, sum(each)) + 1, size) for args, each, size in sets]


def truths(problems, keys, flags):
    """{key: Truth, or why there is none} of some problems, by running their reference solutions."""
    print(f"running {len(keys)} reference solutions", file=sys.stderr)
    tests = {}
    for key in keys:
        limits = [[60.0] * len(args) for args in (problems[key].cases.base, problems[key].cases.plus)]
        tests[key] = [test._replace(timeout_s=120.0) for test in plus_tests(problems[key], limits)]

    def run(programs):
        """{key: Result} of programs by the key of their problem."""
        patience = {"program_s": 600.0, "memory_mb": 4096, "main_block": False}
        found = sandbox.run_tests([*programs.values()], [tests[key] for key in programs], **flags | patience)
        return dict(zip(programs, found, strict=True))

    # Where an input breaks its contract EvalPlus scores by it all the same.
    found = run({key: problems[key].cases.checked for key in keys})
    broken = [key for key in keys if found[key].rate not in (1, None)]
    found |= run({key: problems[key].reference for key in broken})
    if refused := [str(problems[key].id) for key in broken if found[key].rate == 1]:
        print(f"inputs of {', '.join(refused)} break the contract in the file; they are used", file=sys.stderr)
    return {key: truth(result, flags["timeout_s"]) for key, result in found.items()}


def truth(result, timeout_s):
    """The Truth that a reference solution has told, or what went wrong with it."""
    if result.rate != 1:
        verdicts = " and ".join(result.verdicts)
        return result.error or f"the file's own solution does not run here: {verdicts} on the base and the plus inputs"
    values = tuple([value for value, _ in calls] for calls in result.values)
    limits = tuple([max(timeout_s, 4 * seconds) for _, seconds in calls] for calls in result.values)
    sizes = [len(json.dumps(sandbox.wire(each, sandbox.opaque))) for each in values]
    return Truth(values, limits, tuple(65_536 + 4 * size + 100 * len(v) for size, v in zip(sizes, values, strict=True)))


def plus_verdict(problem, known, result):
    """The fields of a result: those of EvalPlus' results file, and the first input that went wrong."""
    row = {}
    for i, name in enumerate(("base", "plus")):
        inputs, wanted, outcome = problem.cases[i], known.values[i], result.verdicts[i]
        values = [value for value, _ in result.values[i] or ()][: len(inputs)]
        wrong = first_wrong(problem, inputs, values, wanted)
        late = "timeout" if outcome == "timeout" else "fail"
        row[f"{name}_status"] = "fail" if wrong is not None else "pass" if outcome == "pass" else late
        if row[f"{name}_status"] != "pass":
            row.setdefault("wrong", [name, len(values) if wrong is None else wrong])
    worst = next((s for s in (row["base_status"], row["plus_status"]) if s != "pass"), "passed")
    return {"passed": worst == "passed", "result": worst} | row


def first_wrong(problem, inputs, values, wanted):
    """The number of the first value that EvalPlus would not take for the wanted one; None if it takes all."""
    entry, mbpp, atol = problem.entry, problem.id.startswith("Mbpp/"), problem.cases.atol
    for i, (args, value, want) in enumerate(zip(inputs, values, wanted, strict=False)):
        try:
            if entry == "find_zero" and not mbpp:  # any root will do
                if not abs(sum(factor * math.pow(value, power) for power, factor in enumerate(args[0]))) <= atol:
                    return i
                continue
            same = special(entry, args, value, want, atol) if mbpp else value == want
            # numbers with a fraction are never compared exactly, from the first one on
            if atol == 0 and floats(want):
                atol = 1e-6
            if not same and atol:
                same = type(value) is type(want) and not holds_range(value)  # which NumPy would spell out
                same = same and np.allclose(value, want, rtol=1e-7, atol=atol)
                same = same and (not isinstance(want, list | tuple) or len(value) == len(want))
            if not same:
                return i
        except Exception:  # of whatever kind: a value that cannot be compared is wrong
            return i
    return None


def special(entry, args, value, want, atol):
    """Whether a value is the wanted one, by the rules that MBPP+ has for some functions."""
    if entry in SETS:
        return len(value) <= 1_000_000 and set(value) == set(want)  # a range has no end that memory would hold
    if entry in NOT_NONE:
        return value == (want is not None) if isinstance(value, bool) else (value is None) == (want is None)
    same = value == want
    if entry == "are_equivalent":
        return True
    if entry == "sum_div":
        return same or value == 0
    if entry == "surface_Area":  # the height may be that of the pyramid, too
        edge, height = args
        return same or abs(value - round(edge**2 + 2 * edge * math.sqrt((edge / 2) ** 2 + height**2))) <= atol
    if entry == "digit_distance_nums":  # with zeros in front of the shorter number
        digits = itertools.zip_longest(*(map(int, reversed(str(number))) for number in args), fillvalue=0)
        return same or value == sum(abs(a - b) for a, b in digits)
    return same


def holds_range(value):
    return isinstance(value, range) or (isinstance(value, list | tuple) and any(map(holds_range, value)))


def floats(value):
    if isinstance(value, np.ndarray):
        return value.dtype in (np.float64, np.float32)
    items = value if isinstance(value, list | tuple) else [value]
    return bool(items) and all(isinstance(item, float) for item in items)


# ---- LiveCodeBench -------------------------------------------------------------------------------------------------
#
# Rules of LiveCodeBench 28fef95 (lcb_runner/evaluation/testing_util.py, MIT). Ref: Jain et al., arXiv:2403.07974.
# Programs run as Python runs them. There a program is the body of a function whose sys.stdin is a copy, so that these
# fail: lines of sys.stdin in a loop, more than a line of sys.stdin.buffer, the end of input as EOFError, a `global`,
# quit() and os._exit(), sys.stdout.buffer, an import from the future. And its limits are those of the clock.

LIVE_KEYS = """question_content question_id contest_date starter_code public_test_cases private_test_cases
metadata""".split()
LIVE_MODULES = """string re datetime collections heapq bisect copy math random statistics itertools functools operator
io sys json""".split()
LIVE_HEAD = "\n".join([f"from {name} import *" for name in [*LIVE_MODULES, "builtins", "typing"]])
LIVE_HEAD += "".join(f"\nimport {name}" for name in LIVE_MODULES) + "\nsys.setrecursionlimit(50000)\n"
LIVE_HEAD += 'getattr(sys, "set_int_max_str_digits", int)(50000)\n\n'  # since Python 3.10.7
LIVE_STARTER = """You will use the following starter code to write the solution to the problem and enclose your code \
within delimiters.
```python
{}
```"""
LIVE_STDIN = """Read the inputs from stdin solve the problem and write the answer to stdout (do not directly test on \
the sample inputs). Enclose your code within delimiters as follows. Ensure that when the python program runs, it reads \
the inputs, runs the algorithm and writes output to STDOUT.
```python
# YOUR CODE HERE
```"""
LIVE_PROMPT = "### Question:\n{}\n\n### Format: {}\n\n### Answer: (use the provided format with backticks)\n\n"
TEXT_PICKLE = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}  # beside one opcode with a text


class Live(typing.NamedTuple):
    """The tests of a problem of LiveCodeBench, as they stand in the file: unpacked they would fill the memory."""

    public: str  # JSON
    private: str  # JSON, or base64 of zlib of a pickle of it


def live_problems(tasks_file, since, until, count):
    """{id: Problem} from the first minute of --since to the first minute of --until, as the official loader has it."""
    if not tasks_file:
        source = "https://huggingface.co/datasets/livecodebench/code_generation_lite"
        raise ValueError(f"LiveCodeBench is too large to be fetched unasked: get test*.jsonl of {source}, --tasks_file")
    path, problems = Path(tasks_file), {}
    for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8") as lines:
            try:
                for row in parse_lines(lines, LIVE_KEYS):
                    begins = row["contest_date"]
                    in_time = since <= begins <= (f"{until}T00:00:00" if until else begins)
                    if in_time and len(problems) < (count or math.inf):
                        problems[key_of(row["question_id"])] = live_problem(row)
            except (ValueError, LookupError, TypeError, AttributeError, EOFError, zlib.error) as error:
                raise ValueError(f"{file} is no file of LiveCodeBench: {error}") from None
    if not problems:
        raise ValueError(f"{path} holds no problem of LiveCodeBench from {since or 'the first day'} to {until}")
    return problems


def live_problem(row):
    starter, content = row["starter_code"], row["question_content"]
    prompt = LIVE_PROMPT.format(content, LIVE_STARTER.format(starter) if starter else LIVE_STDIN)
    entry = json.loads(row["metadata"] or "{}").get("func_name") or ""
    cases = Live(row["public_test_cases"], row["private_test_cases"])
    return Problem(row["question_id"], entry, protocols.Question(entry, prompt), LIVE_HEAD, "", [], [], "", cases)


def live_cases(problem):
    """[(input, output)] of all tests: texts, or arguments and result."""
    private = problem.cases.private
    try:
        tests = json.loads(private)
    except ValueError:
        tests = json.loads(text_of_pickle(zlib.decompress(base64.b64decode(private))))
    tests = [*json.loads(problem.cases.public), *tests]
    if any(test["testtype"] == "functional" for test in tests):
        return [([*map(json.loads, t["input"].split("\n"))], json.loads(t["output"])) for t in tests]
    return [(test["input"], test["output"]) for test in tests]


def text_of_pickle(data):
    """The text that a pickle holds. No pickle is ever loaded, as that can run code; one that holds more is refused."""
    texts = []
    for opcode, value, _ in pickletools.genops(data):
        if "UNICODE" in opcode.name:
            texts.append(value)
        elif opcode.name not in TEXT_PICKLE:
            raise ValueError(f"its tests are a pickle with {opcode.name}, which no text needs")
    (text,) = texts
    return text


def live_tests(problem, cases, code, timeout_s):
    """The tests of a sample: one for each input of a program, one for all calls of a function."""
    if not problem.entry:
        return [sandbox.Stdin(text, 65_536 + 2 * len(output.encode())) for text, output in cases]
    function = f"Solution().{problem.entry}" if "class Solution" in (code or "") else problem.entry
    most = 65_536 + 8 * sum(len(json.dumps(output)) for _, output in cases) + 100 * len(cases)
    limits, inputs = [timeout_s] * len(cases), [args for args, _ in cases]
    return [sandbox.Calls(function, inputs, limits, (timeout_s + 1) * len(cases) + 5, most)]


def live_verdict(problem, cases, result):
    """The fields of a result: the first test that went wrong decides."""
    outcomes, values = result.verdicts, result.values
    if problem.entry:  # calls that did not return have the outcome of the one that ended all
        returned = [list(value) if isinstance(value, tuple) else value for value, _ in values[0] or ()][: len(cases)]
        missing = len(cases) - len(returned)
        outcomes = ["pass"] * len(returned) + ["fail" if outcomes[0] == "pass" else outcomes[0]] * missing
        values = returned + [None] * missing
    for i, (outcome, value, (_, wanted)) in enumerate(zip(outcomes, values, cases, strict=True)):
        try:
            right = outcome == "pass" and bool(value == wanted if problem.entry else same_lines(value, wanted))
        except Exception:  # of whatever kind: a value that cannot be compared is wrong
            right = False
        if not right:
            return {"passed": False, "result": "fail" if outcome == "pass" else outcome, "wrong": ["test", i]}
    return {"passed": True, "result": "passed"}


def same_lines(printed, wanted):
    """Whether a program printed what was wanted: the same lines but for space around them, or the same numbers."""
    ours, theirs = ([line.strip() for line in text.strip().split("\n")] for text in (printed, wanted))
    if len(ours) != len(theirs):
        return False
    pairs = zip(ours, theirs, strict=True)
    with contextlib.suppress(InvalidOperation):
        return all(a == b or [*map(Decimal, a.split())] == [*map(Decimal, b.split())] for a, b in pairs)
    return False


# ---- what decides --------------------------------------------------------------------------------------------------


def what_decides(task, problems, keys, known, flags):
    """{key: what hidden_tests and hidden_verdict need of a problem beside it, or why that cannot be had}.

    known: what earlier calls have told. flags: options of the sandbox, with the "timeout_s" of a sample.
    """
    if task in PUBLISHED:
        new = keys - known.keys()
        return known | (truths(problems, sorted(new, key=list(problems).index), flags) if new else {})
    return {key: live_cases(problems[key]) for key in keys} if task == "livecodebench" else {}


def hidden_tests(problem, known, code, timeout_s, protocol):
    """The tests of a sample that decide whether it passes.

    They are the file's; for MBPP and other protocols than ours the first three, as the harness has it.
    """
    if isinstance(problem.cases, Plus):
        return plus_tests(problem, known.limits, known.most)
    if isinstance(problem.cases, Live):
        return live_tests(problem, known, code, timeout_s)
    name, record = protocol
    ours = name.startswith("ours") or not problem.asked.tests
    return [problem.test if ours else protocols.target(record, problem.asked)]


def hidden_verdict(problem, known, result):
    """{"passed", "result", and what else a benchmark reports} by the results of these tests."""
    if not result.verdicts:
        return {"passed": False, "result": "does not fit"}
    if problem.cases:
        return (plus_verdict if isinstance(problem.cases, Plus) else live_verdict)(problem, known, result)
    passed = result.verdicts[0] == "pass"
    return {"passed": passed, "result": "passed" if passed else result.verdicts[0]}


def options(task, tests, timeout_s):
    """How the sandbox runs a benchmark's tests: on the clock a program has three times its processor seconds."""
    given = [[t.timeout_s if isinstance(t, sandbox.Calls) else timeout_s for t in each if not isinstance(t, str)]
             for each in tests]  # fmt: skip
    seconds = max((sum(each) for each in given), default=0.0) or timeout_s
    more = {} if task in ("humaneval", "mbpp") else {"memory_mb": 4096}
    more |= {"threads": True} if task == "livecodebench" else {}
    return {"timeout_s": timeout_s, "program_s": 5 + 3 * seconds, "main_block": False} | more
