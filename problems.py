"""The problems of HumanEval(+), its infilling, MBPP(+) and LiveCodeBench: official files, hidden
tests, verdicts.

    problems = read_problems(cfg)                                       # {id: Problem}, from a file or a download
    expected = expectations(task, problems, ids, {}, flags)             # {id: expected results}, where tests need them
    tests = hidden_tests(problem, expected.get(id), code, 4.0, record)  # tests of one sample, for sandbox.run_tests
    row = hidden_verdict(problem, result)                               # "passed", "result", fields of the benchmark

protocols.py asks and cuts the answers; benchmarks.py is the command.
Sources: HumanEval, arXiv:2107.03374; its infilling, arXiv:2207.14255; MBPP, arXiv:2108.07732;
HumanEval+ and MBPP+ by the rules of evalplus 0.3.1, arXiv:2305.01210; LiveCodeBench by those of its
testing_util.py, arXiv:2403.07974.
"""

import ast
import base64
import builtins
import contextlib
import gzip
import http.client
import inspect
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
INFILLING = {  # --split of humaneval_infilling -> its official file
    "single-line": "SingleLineInfilling", "multi-line": "MultiLineInfilling", "random-span": "RandomSpanInfilling",
    "random-span-light": "RandomSpanInfillingLight",
}  # fmt: skip
HOLES = "https://raw.githubusercontent.com/openai/human-eval-infilling/master/data/HumanEval-{}.jsonl.gz"
SHOTS = (2, 3, 4)  # MBPP: ids of the solved problems that the paper's prompt shows
ARROW = re.compile(r"\s*(?:==>|=>|==|=|->|➞|→|#?\s*(?:should )?returns?\b)[ \t]*")
BROKEN = EOFError, zlib.error, gzip.BadGzipFile  # what a damaged .gz raises
# Evaluates to a hash of what a program returns for some inputs, which tells programs apart; "" if
# it never returns.
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
    return f"{{zlib.crc32(chr(10).join(seen).encode()):08x}}" if returned else ""
_behaviour()"""


class Problem(typing.NamedTuple):
    id: str | int
    entry: str  # name of the function to write
    asked: protocols.Question  # source of the prompts
    test: str  # hidden test
    public: list  # asserts made from the examples in the prompt
    probes: list  # PROBE, if there are inputs for it
    reference: str  # a program that passes; its time sets the limit of a sample
    cases: typing.Any = None  # Plus or Live, which decide instead of `test`


def tasks_url(cfg):
    """The address of the official file; of MBPP the full or the sanitized one, as the protocol has
    it.
    """
    if cfg.task == "humaneval_infilling":
        return HOLES.format(INFILLING[cfg.split])
    full = cfg.task == "mbpp" and protocols.named(cfg.protocol, cfg.task)[1].data == ("mbpp",)
    return TASKS["full" if full else cfg.task]


def tasks_path(cfg):
    """The official file: --tasks_file, or the file that the download writes."""
    return runs.as_path(
        cfg.tasks_file or Path(cfg.downloads or "data/tasks") / tasks_url(cfg).rsplit("/", 1)[1]
    )


def task_files(cfg):
    """The official file in a list; of LiveCodeBench all files of a folder."""
    path = tasks_path(cfg)
    return sorted([*path.glob("*.jsonl"), *path.glob("*.jsonl.gz")]) if path.is_dir() else [path]


def read_problems(cfg):
    """{id as a string: Problem} of the official file, which is downloaded if it is not named. cfg:
    benchmarks.py's.
    """
    if cfg.task == "livecodebench":
        return live_problems(cfg)
    path = tasks_path(cfg)
    if not cfg.tasks_file and not path.is_file():
        download(cfg.task, tasks_url(cfg), path)
    try:
        return parse_problems(cfg.task, path.read_bytes(), cfg.split, cfg.problems, cfg.protocol)
    except ValueError as error:
        raise ValueError(
            f"{path} is not the official file of {cfg.task}: {error}; name another"
        ) from None


def download(task, url, path):
    """Write an official file. OSError, and no file, for half a file or the page of a portal."""
    print(f"downloading {url}", file=sys.stderr)
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            data = response.read()
        parse_problems(task, data)
    except (OSError, http.client.HTTPException, ValueError) as error:
        advice = f"fetch it by hand into {path.parent}, or name it with --tasks_file"
        raise OSError(f"{url} cannot be downloaded ({error}); {advice}") from None
    path.parent.mkdir(parents=True, exist_ok=True)
    runs.write(path, data)


def parse_problems(task, data, split="test", count=0, protocol=""):
    """{id as a string: Problem} in the bytes of an official file. ValueError names the line or the
    problem.

    count: only the first N problems, 0 for all. protocol: ValueError if it is made for other
    problems.
    """
    try:
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    except BROKEN as error:
        raise ValueError(f"broken gzip: {error}") from None
    make, keys = MAKERS[task]
    one_list = task == "mbpp" and text.lstrip().startswith("[")  # the full MBPP is JSON lines
    problems, shots = {}, ()
    try:
        rows = json.loads(text) if one_list else [*parse_lines(text.split("\n"), keys)]
        if task == "mbpp":  # the solved problems of the prompt are not in the test split
            shots = tuple(mbpp_question(row) for row in rows if row["task_id"] in SHOTS)
            rows = [row for row in rows if split == "all" or 11 <= row["task_id"] <= 510]
        check_data(task, rows, protocol)
        for row in rows[: count or None]:
            problem = make(row)
            # not its own
            key, others = key_of(problem.id), tuple(shot for shot in shots if shot != problem.asked)
            if key in problems:
                raise ValueError(
                    f"{problem.id} and {problems[key].id} have one number: they would be one problem"
                )
            problems[key] = problem._replace(asked=problem.asked._replace(shots=others))
    except (LookupError, TypeError, AttributeError, SyntaxError, RecursionError) as error:
        raise ValueError(f"problem {len(problems) + 1} is of another form: {error!r}") from None
    if not problems:
        raise ValueError("it holds no problems")
    return problems


def check_data(task, rows, protocol):
    """ValueError for the file of another benchmark, or of other problems than those of a
    protocol.
    """
    if task in PUBLISHED:
        name, version, count = PUBLISHED[task]
        if others := [row["task_id"] for row in rows if not str(row["task_id"]).startswith(name)]:
            raise ValueError(f"{others[0]} is none of its problems")
        if len(rows) != count:
            found = f"this file has {len(rows)} problems; {version}, of which scores are published, has {count}"
            print(f"--task={task}: {found}", file=sys.stderr)
    if not protocol or not rows:
        return
    name, record = protocols.named(protocol, task)
    mbpp = "mbpp" if "text" in rows[0] else "sanitized"
    kind = {"humaneval_infilling": "infilling", "mbpp": mbpp, "mbpp+": "mbppplus"}.get(
        task, "humaneval"
    )
    (wanted, _), (given, counts) = protocols.DATA[record.data[0]], protocols.DATA[kind]
    if kind not in record.data:
        raise ValueError(f"--protocol={name} asks for {wanted}, and this is {given}")
    if record.ours:
        return
    if len(rows) not in counts:
        raise ValueError(
            f"it has {len(rows)} problems; --protocol={name} is of {' or '.join(map(str, counts))}"
        )
    if kind != record.data[0]:
        print(f"published scores of {name} are of {wanted}, and this is {given}", file=sys.stderr)


def key_of(task_id):
    """HumanEval/3, Mbpp/3 and 3 are the same problem: "3". The id of a hole has four parts,
    SingleLineInfilling/...
    """
    parts = str(task_id).split("/")
    return parts[-1] if len(parts) < 3 else str(task_id)


def parse_lines(lines, keys, either=()):
    """The objects of JSON lines. ValueError names the first line that lacks one of `keys`, or all
    of `either`.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        complete = (
            isinstance(row, dict)
            and row.keys() >= {*keys}
            and (not either or row.keys() & {*either})
        )
        if not complete or not all(isinstance(row.get(key, ""), str) for key in either):
            needed = [*keys, *filter(None, [" or ".join(either)])]
            raise ValueError(
                f"line {number} is not a JSON object with {', '.join(needed)}; samples are texts"
            )
        yield row


def humaneval_problem(row):
    task_id, prompt, entry = row["task_id"], row["prompt"], row["entry_point"]
    reference = prompt + row.get("canonical_solution", "")
    public, arguments = docstring_examples(prompt, entry)
    # The test defines the prompt's helpers again: it calls some of them, and a sample may redefine
    # them.
    helpers = [node for node in ast.parse(prompt).body if getattr(node, "name", "") != entry]
    test = "\n".join([*map(ast.unparse, helpers), row["test"], f"check({entry})"])
    asked = protocols.Question(entry, prompt, row["test"])
    return Problem(
        task_id, entry, asked, test, public, probes(task_id, entry, arguments), reference
    )


def infilling_problem(row):
    """A hole in a solution of HumanEval. A program is the prompt, what fills the hole, and the
    suffix, as they are.
    """
    prompt, suffix, entry = row["prompt"], row["suffix"], row["entry_point"]
    asked = protocols.Question(entry, prompt, row["test"], suffix=suffix)
    test, reference = f"{row['test']}\ncheck({entry})", prompt + row["canonical_solution"] + suffix
    return Problem(row["task_id"], entry, asked, test, [], [], reference)


def mbpp_question(row):
    """The description is "text" in the full MBPP; the sanitized one has another description, as
    "prompt".
    """
    text, tests = row.get("text", row.get("prompt")), tuple(row["test_list"])
    docstring = f'"""\n{text}\n{tests[0]}\n"""\n'  # the prompt of EvalPlus and BigCode
    return protocols.Question(called(tests), docstring, text=text, tests=tests, code=row["code"])


def mbpp_problem(row):
    """A problem whose asserts are all hidden: those in the prompt decide too, so that best-of-n
    must not see them.

    Probes use the inputs of the asserts, but not the expected values.
    """
    asked = mbpp_question(row)
    # All asserts run in one process, as in the harnesses: a function that works once is no
    # solution.
    test = "\n".join(
        [*row.get("test_imports", row.get("test_setup_code", "").splitlines()), *row["test_list"]]
    )
    arguments = [literals(call, asked.entry) for call in calls_of(row["test_list"])]
    found = probes(row["task_id"], asked.entry, [args for args in arguments if args is not None])
    return Problem(row["task_id"], asked.entry, asked, test, [], found, row["code"])


def calls_of(tests):
    """The calls in the first three asserts."""
    return [
        node
        for test in tests[:3]
        for node in ast.walk(ast.parse(test))
        if isinstance(node, ast.Call)
    ]


def called(tests):
    """The name of the function to write: MBPP has no field for it, but its asserts call it."""
    names = [call.func.id for call in calls_of(tests) if isinstance(call.func, ast.Name)]
    # one problem redefines sum()
    return next((name for name in names if not hasattr(builtins, name)), names[0])


def docstring_examples(prompt, entry):
    """(asserts, arguments) of the examples `f(1) == 2`, `f(1) -> 2`, `>>> f(1)` over `2`, and so
    on, in a docstring.
    """
    asserts, arguments = [], []
    for start in (match.start() for match in re.finditer(rf"\b{entry}\(", prompt)):
        # The call ends at the first right parenthesis where the text parses.
        for end in (
            start + match.end() for match in re.finditer(r"\)", prompt[start : start + 500])
        ):
            with contextlib.suppress(SyntaxError, ValueError):
                call = ast.parse(prompt[start:end], mode="eval").body
                break
        else:
            continue
        if (args := literals(call, entry)) is None:
            continue
        arguments.append(args)
        # The result follows an arrow, or is the next line of a session.
        arrow = ARROW.match(prompt, end)
        if not arrow and prompt[:start].endswith(">>> "):
            arrow = re.compile(r"[ \t]*\n[ \t]*").match(prompt, end)
        line = prompt[arrow.end() :].split("\n")[0] if arrow else ""
        for length in range(len(line), 0, -1):  # the longest literal at the beginning of the line
            with contextlib.suppress(SyntaxError, ValueError):
                value = ast.literal_eval(
                    "" if line[:length].rstrip().endswith(",") else line[:length].strip()
                )
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
    """[PROBE] for the inputs of examples and variations of them; [] without examples."""
    rng, examples = random.Random(str(seed)), arguments[:4]
    inputs = examples + [[vary(arg, rng) for arg in args] for args in examples * 2]
    return [sandbox.Probe(PROBE.format(inputs=inputs, entry=entry))] if inputs else []


def vary(value, rng):
    """A similar value of the same type: a number changed a little, a sequence reversed, shortened
    or lengthened.
    """
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return rng.choice([value + 1, value - 1, value + 2, -value])
    if isinstance(value, str | list | tuple) and value:
        # reversed, one item less, one item more; lists and tuples also with a changed item
        i = rng.randrange(len(value))
        kinds = [value[::-1], value[:i] + value[i + 1 :], value + value[i : i + 1]]
        if not isinstance(value, str):
            kinds += [value[:i] + type(value)([vary(value[i], rng)]) + value[i + 1 :]] * 3
        return rng.choice(kinds)
    return value


# ---- EvalPlus: HumanEval+ and MBPP+ --------------------------------------------------------------------------------
#
# Rules of evalplus 0.3.1 (its eval/__init__.py, eval/_special_oracle.py and data/mbpp.py,
# Apache-2.0), except that HumanEval/32 can pass, as in later versions. Ref: Liu et al.,
# arXiv:2305.01210.

PUBLISHED = {  # beginning of the ids, version of published scores, number of its problems
    "humaneval+": ("HumanEval/", "v0.1.10", 164),
    "mbpp+": ("Mbpp/", "v0.2.0", 378),
}
PLUS_KEYS = "task_id prompt entry_point canonical_solution base_input plus_input atol".split()
# MBPP+: results of SETS are compared as sets; of NOT_NONE only whether a result is None
SETS = """similar_elements find_char_long common_in_nested_lists extract_singly larg_nnum intersection_array
find_dissimilar Diff""".split()
NOT_NONE = ["check_str", "text_match_three", "text_starta_endb"]


def tuples(lists):
    return [tuple(items) for items in lists]


def nested_tuples(value):
    return tuple(map(nested_tuples, value)) if isinstance(value, list) else value


# JSON has no tuples, sets or complex numbers: numbers of MBPP+ -> function that restores them
MBPP_ARGUMENTS = {
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
MBPP_ARGUMENTS = {
    number: form for numbers, form in MBPP_ARGUMENTS.items() for number in numbers.split()
}


class Plus(typing.NamedTuple):
    """The inputs of a problem of EvalPlus, and the absolute tolerance of results."""

    base: list
    plus: list
    atol: float


class Expected(typing.NamedTuple):
    """For the base and the plus inputs: results of the reference solution, and limits for
    samples.
    """

    values: tuple
    limits: tuple  # processor seconds of every call
    most: tuple  # bytes that a sample may send back


def plus_problem(row):
    task_id, prompt, entry, solution = (row[key] for key in PLUS_KEYS[:4])
    convert = MBPP_ARGUMENTS.get(key_of(task_id), list) if task_id.startswith("Mbpp/") else list
    base, plus = ([convert(args) for args in row[key]] for key in ("base_input", "plus_input"))
    public, arguments = (
        docstring_examples(prompt, entry) if task_id.startswith("HumanEval/") else ([], base[:3])
    )
    found, cases = probes(task_id, entry, arguments), Plus(base, plus, float(row["atol"]))
    asked = protocols.Question(entry, prompt)
    return Problem(task_id, entry, asked, "", public, found, prompt + solution, cases)


MAKERS = {  # task: (function from a row to a Problem, keys that every line of the file has)
    "humaneval": (humaneval_problem, ("task_id", "prompt", "entry_point", "test")),
    "humaneval_infilling": (
        infilling_problem,
        "task_id prompt suffix canonical_solution entry_point test".split(),
    ),
    "mbpp": (mbpp_problem, ("task_id", "text", "code", "test_list")),
    "humaneval+": (plus_problem, PLUS_KEYS),
    "mbpp+": (plus_problem, PLUS_KEYS),
}


def plus_tests(problem, limits, most=(1 << 26, 1 << 26), wanted=(None, None)):
    """The two tests of a sample: the base and the plus inputs. All calls of one share a minute, as
    in EvalPlus.

    wanted are the values of the reference solution; without them what the calls return comes back.
    """
    entry, cases = problem.entry, problem.cases
    head = f"import itertools, math\nSETS, NOT_NONE = {SETS!r}, {NOT_NONE!r}\n"
    head += f"entry, mbpp, atol = {entry!r}, {problem.id.startswith('Mbpp/')}, {cases.atol!r}\n"
    check = (
        head
        + "".join(map(inspect.getsource, (value_is_right, special, holds_range, floats)))
        + PLUS_RIGHT
    )
    sets = zip((cases.base, cases.plus), limits, most, wanted, strict=True)
    return [
        sandbox.Calls(
            entry,
            args,
            each,
            min(60.0, sum(each)) + 1,
            size,
            "" if values is None else check,
            values,
        )
        for args, each, size, values in sets
    ]


PLUS_RIGHT = """def right(i, inputs, value):
    global atol
    same, atol = value_is_right(entry, mbpp, atol, inputs, value, data[i])
    return same
"""


def plus_expected(problems, keys, flags):
    """{key: Expected, or the reason why there is none}, by running the reference solutions."""
    print(f"running {len(keys)} reference solutions", file=sys.stderr)
    tests = []
    for problem in (problems[key] for key in keys):
        limits = [[60.0] * len(args) for args in (problem.cases.base, problem.cases.plus)]
        tests.append([test._replace(timeout_s=120.0) for test in plus_tests(problem, limits)])
    limits = {"program_s": 600.0, "memory_mb": 4096, "main_block": False}
    results = sandbox.run_tests([problems[key].reference for key in keys], tests, **flags | limits)
    return {
        key: expected_of(result, flags["timeout_s"])
        for key, result in zip(keys, results, strict=True)
    }


def expected_of(result, timeout_s):
    """The Expected that follows from the Result of a reference solution, or the reason why there is
    none.
    """
    if result.rate != 1:
        verdicts = " and ".join(result.verdicts)
        return (
            result.error
            or f"the file's own solution does not run here: {verdicts} on the base and the plus inputs"
        )
    values = tuple([value for value, _ in calls] for calls in result.values)
    limits = tuple([max(timeout_s, 4 * seconds) for _, seconds in calls] for calls in result.values)
    sizes = [len(json.dumps(sandbox.values.wire(each, sandbox.values.opaque))) for each in values]
    most = tuple(
        65_536 + 4 * size + 100 * len(each) for size, each in zip(sizes, values, strict=True)
    )
    return Expected(values, limits, most)


def plus_verdict(problem, result):
    """The fields of EvalPlus' results file, and the first input with a wrong result."""
    row = {}
    for name, outcome, number in zip(
        ("base", "plus"), result.verdicts, result.values, strict=False
    ):
        row[f"{name}_status"] = outcome if outcome in ("pass", "timeout") else "fail"
        if outcome != "pass":
            row.setdefault("wrong", [name, number])
    worst = next((s for s in (row["base_status"], row["plus_status"]) if s != "pass"), "passed")
    return {"passed": worst == "passed", "result": worst} | row


def value_is_right(entry, mbpp, atol, args, value, want):
    """(whether a value is right by EvalPlus' rules, the tolerance for the values that follow).

    The judge of the sandbox runs its text, see plus_tests(); an exception there is a wrong value.
    """
    if entry == "find_zero" and not mbpp:  # any root will do
        return abs(
            sum(factor * math.pow(value, power) for power, factor in enumerate(args[0]))
        ) <= atol, atol
    same = special(entry, args, value, want, atol) if mbpp else value == want
    # floats are compared with a tolerance, which then stays for the values that follow
    if atol == 0 and floats(want):
        atol = 1e-6
    if not same and atol:
        import numpy as np

        same = type(value) is type(want) and not holds_range(value)  # NumPy would expand a range
        same = same and np.allclose(value, want, rtol=1e-7, atol=atol)
        same = same and (not isinstance(want, list | tuple) or len(value) == len(want))
    return bool(same), atol


def special(entry, args, value, want, atol):
    """Whether a value is right by the rules that MBPP+ has for some functions."""
    if entry in SETS:
        # a huge range would fill the memory
        return len(value) <= 1_000_000 and set(value) == set(want)
    if entry in NOT_NONE:
        return (
            value == (want is not None)
            if isinstance(value, bool)
            else (value is None) == (want is None)
        )
    same = value == want
    if entry == "are_equivalent":
        return True
    if entry == "sum_div":
        return same or value == 0
    if entry == "surface_Area":  # the height may also be that of the pyramid
        edge, height = args
        return (
            same
            or abs(value - round(edge**2 + 2 * edge * math.sqrt((edge / 2) ** 2 + height**2)))
            <= atol
        )
    if entry == "digit_distance_nums":  # with zeros in front of the shorter number
        digits = itertools.zip_longest(
            *(map(int, reversed(str(number))) for number in args), fillvalue=0
        )
        return same or value == sum(abs(a - b) for a, b in digits)
    return same


def holds_range(value):
    return isinstance(value, range) or (
        isinstance(value, list | tuple) and any(map(holds_range, value))
    )


def floats(value):
    if type(value).__name__ == "ndarray":
        return str(value.dtype) in ("float64", "float32")
    items = value if isinstance(value, list | tuple) else [value]
    return bool(items) and all(isinstance(item, float) for item in items)


# ---- LiveCodeBench -------------------------------------------------------------------------------------------------
#
# Rules of LiveCodeBench 28fef95 (lcb_runner/evaluation/testing_util.py, MIT). Ref: Jain et al.,
# arXiv:2403.07974. Here a program runs as a script. There it is the body of a function with a copy
# of sys.stdin, so that these fail: looping over sys.stdin, more than one line of sys.stdin.buffer,
# EOFError at the end of input, `global`, quit(), os._exit(), sys.stdout.buffer, imports from the
# future. Its limits are wall-clock seconds, ours processor seconds.

LIVE_KEYS = """question_content question_id contest_date starter_code public_test_cases private_test_cases
metadata""".split()
LIVE_MODULES = """string re datetime collections heapq bisect copy math random statistics itertools functools operator
io sys json""".split()
LIVE_HEAD = "\n".join([f"from {name} import *" for name in [*LIVE_MODULES, "builtins", "typing"]])
LIVE_HEAD += "".join(f"\nimport {name}" for name in LIVE_MODULES)
LIVE_HEAD += "\nsys.setrecursionlimit(50000)\nsys.set_int_max_str_digits(50000)\n\n"
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
# opcodes around that of a text
TEXT_PICKLE = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}


class Live(typing.NamedTuple):
    """The tests of a problem of LiveCodeBench, packed as in the file: unpacked they would fill the
    memory.
    """

    public: str  # JSON
    private: str  # JSON, or base64(zlib(pickle(JSON)))


def live_problems(cfg):
    """{id: Problem} of contests from the first minute of --since to the first minute of --until,
    both included.
    """
    if not cfg.tasks_file:
        source = "https://huggingface.co/datasets/livecodebench/code_generation_lite"
        raise ValueError(
            f"LiveCodeBench is large: download test*.jsonl from {source}, and pass it as --tasks_file"
        )
    last = f"{cfg.until}T00:00:00" if cfg.until else "9999"
    problems = {}
    for file in task_files(cfg):
        with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8") as lines:
            try:
                for row in parse_lines(lines, LIVE_KEYS):
                    wanted = cfg.since <= row["contest_date"] <= last
                    if wanted and len(problems) < (cfg.problems or math.inf):
                        problems[key_of(row["question_id"])] = live_problem(row)
            except (ValueError, LookupError, TypeError, AttributeError, *BROKEN) as error:
                raise ValueError(f"{file} is not a file of LiveCodeBench: {error}") from None
    if not problems:
        days = f"from {cfg.since or 'the first day'} to {cfg.until or 'the last'}"
        raise ValueError(f"{cfg.tasks_file} holds no problem of LiveCodeBench {days}")
    return problems


def live_problem(row):
    starter, content = row["starter_code"], row["question_content"]
    prompt = LIVE_PROMPT.format(content, LIVE_STARTER.format(starter) if starter else LIVE_STDIN)
    entry = json.loads(row["metadata"] or "{}").get("func_name") or ""
    cases = Live(row["public_test_cases"], row["private_test_cases"])
    return Problem(
        row["question_id"], entry, protocols.Question(entry, prompt), "", [], [], "", cases
    )


def live_cases(problem):
    """[(input, output)] of all tests: two texts, or arguments and result. If they are damaged, the
    reason, as text.
    """
    private = problem.cases.private
    try:
        try:
            tests = json.loads(private)
        except ValueError:
            tests = json.loads(text_of_pickle(zlib.decompress(base64.b64decode(private))))
        tests = [*json.loads(problem.cases.public), *tests]
        if any(test["testtype"] == "functional" for test in tests):
            return [
                ([*map(json.loads, t["input"].split("\n"))], json.loads(t["output"])) for t in tests
            ]
        return [(test["input"], test["output"]) for test in tests]
    except (ValueError, LookupError, TypeError, zlib.error) as error:
        return f"its tests cannot be read: {error}"


def text_of_pickle(data):
    """The text in a pickle, without loading it, as that can run code. ValueError if it holds
    anything else.
    """
    texts = []
    for opcode, value, _ in pickletools.genops(data):
        if "UNICODE" in opcode.name:
            texts.append(value)
        elif opcode.name not in TEXT_PICKLE:
            raise ValueError(f"its tests are a pickle with {opcode.name}, which no text needs")
    (text,) = texts
    return text


def live_tests(problem, cases, code, timeout_s):
    """The tests of a sample: one for each input of a program; a single one for all calls of a
    function.
    """
    if not problem.entry:
        check = (
            "import contextlib\nfrom decimal import Decimal, InvalidOperation\n"
            + inspect.getsource(same_lines)
        )
        right = "def right(printed):\n    return same_lines(printed, {!r})\n"
        return [
            sandbox.Stdin(text, 65_536 + 2 * len(out.encode()), check + right.format(out))
            for text, out in cases
        ]
    function = f"Solution().{problem.entry}" if "class Solution" in (code or "") else problem.entry
    most = 65_536 + 8 * sum(len(json.dumps(output)) for _, output in cases) + 100 * len(cases)
    limits, inputs = [timeout_s] * len(cases), [args for args, _ in cases]
    right = "def right(i, inputs, value):\n    return (list(value) if type(value) is tuple else value) == data[i]\n"
    wanted = [output for _, output in cases]
    return [
        sandbox.Calls(
            function, inputs, limits, (timeout_s + 1) * len(cases) + 5, most, right, wanted
        )
    ]


def live_verdict(problem, result):
    """The first failed test decides."""
    for i, (outcome, value) in enumerate(zip(result.verdicts, result.values, strict=True)):
        if outcome != "pass":
            return {
                "passed": False,
                "result": outcome,
                "wrong": ["test", value if problem.entry else i],
            }
    return {"passed": True, "result": "passed"}


def same_lines(printed, wanted):
    """Whether a program printed the right output: equal lines without surrounding spaces, or equal
    numbers.
    """
    ours, theirs = (
        [line.strip() for line in text.strip().split("\n")] for text in (printed, wanted)
    )
    if len(ours) != len(theirs):
        return False
    pairs = zip(ours, theirs, strict=True)
    with contextlib.suppress(InvalidOperation):
        return all(
            a == b or [*map(Decimal, a.split())] == [*map(Decimal, b.split())] for a, b in pairs
        )
    return False


# ---- all benchmarks ------------------------------------------------------------------------------------------------


def expectations(task, problems, keys, known, flags):
    """{key: expected results that hidden_tests needs, or the reason why there are none}.

    known: results of earlier calls. flags: options of the sandbox, with "timeout_s" of a sample.
    """
    if task in PUBLISHED:
        new = [key for key in problems if key in keys and key not in known]
        return known | (plus_expected(problems, new, flags) if new else {})
    return {key: live_cases(problems[key]) for key in keys} if task == "livecodebench" else {}


def hidden_tests(problem, expected, code, timeout_s, record):
    """The tests that decide whether a sample passes: those of the file.

    Other protocols than ours run what their harnesses append: three asserts of MBPP, HumanEval's
    test without helpers.
    """
    if isinstance(problem.cases, Plus):
        return plus_tests(problem, expected.limits, expected.most, expected.values)
    if isinstance(problem.cases, Live):
        return live_tests(problem, expected, code, timeout_s)
    # EvalPlus calls the function itself
    own = record.ours or (record.factor and not problem.asked.tests)
    return [problem.test if own else protocols.target(record, problem.asked)]


def hidden_verdict(problem, result):
    """{"passed", "result"} and the fields of the benchmark, from the results of the hidden
    tests.
    """
    if not result.verdicts:
        return {"passed": False, "result": "does not fit"}
    if isinstance(problem.cases, Plus):
        return plus_verdict(problem, result)
    if isinstance(problem.cases, Live):
        return live_verdict(problem, result)
    passed = result.verdicts[0] == "pass"
    return {"passed": passed, "result": "passed" if passed else result.verdicts[0]}


def options(task, tests, timeout_s):
    """Options of the sandbox: a program may take 5 s and three times its processor seconds by the
    wall clock.
    """
    of_calls = [
        [getattr(x, "timeout_s", timeout_s) for x in each if not isinstance(x, str)]
        for each in tests
    ]
    seconds = max([timeout_s, *map(sum, of_calls)])
    more = {} if task in ("humaneval", "humaneval_infilling", "mbpp") else {"memory_mb": 4096}
    more |= {"threads": True} if task == "livecodebench" else {}
    return {"timeout_s": timeout_s, "program_s": 5 + 3 * seconds, "main_block": False} | more
