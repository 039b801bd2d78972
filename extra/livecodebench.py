"""LiveCodeBench: problems of programming contests, by their day. Asks a model.

    python extra/livecodebench.py --tasks_file=test6.jsonl --since=2025-01-01
    python extra/livecodebench.py --tasks_file=test6.jsonl --samples=mine.jsonl
    python extra/livecodebench.py --tasks_file=test6.jsonl --protocol=livecodebench

The last takes the lines between the last two fences of an answer, as published scores do; ours
looks for the last block that is a program, after what the model thinks. All else is as in
benchmarks.py, which generates and scores. Verdicts by the rules of LiveCodeBench 28fef95
(lcb_runner/evaluation/testing_util.py, MIT). It does not run that harness: here a program runs as a
script. There it is the body of a function with a copy of sys.stdin, so that these fail: looping
over sys.stdin, more than one line of sys.stdin.buffer, EOFError at the end of input, `global`,
quit(), os._exit(), sys.stdout.buffer, imports from the future. Its limits are wall-clock seconds,
ours processor seconds. Ref: Jain et al., arXiv:2403.07974.
"""

import base64
import contextlib
import dataclasses
import gzip
import inspect
import json
import math
import pickletools
import re
import sys
import typing
import zlib
from decimal import Decimal, InvalidOperation
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import protocols

import benchmarks
import problems as tasks
import prompts
import runs
import sandbox


@dataclasses.dataclass(frozen=True)
class Config(benchmarks.Config):
    task: typing.Literal["livecodebench"] = "livecodebench"
    protocol: typing.Literal["ours", "livecodebench"] = "ours"  # whose rule finds the program
    chat: bool = False  # ask through the model's chat template
    since: str = ""  # only contests from this day on, such as 2024-10-01
    until: str = ""  # only contests up to the first minute of this day


KEYS = """question_content question_id contest_date starter_code public_test_cases
private_test_cases metadata""".split()
HEAD = """from string import *
from re import *
from datetime import *
from collections import *
from heapq import *
from bisect import *
from copy import *
from math import *
from random import *
from statistics import *
from itertools import *
from functools import *
from operator import *
from io import *
from sys import *
from json import *
from builtins import *
from typing import *
import string
import re
import datetime
import collections
import heapq
import bisect
import copy
import math
import random
import statistics
import itertools
import functools
import operator
import io
import sys
import json
sys.setrecursionlimit(50000)
sys.set_int_max_str_digits(50000)

"""
STARTER = """You will use the following starter code to write the solution to the problem and \
enclose your code within delimiters.
```python
{}
```"""
STDIN = """Read the inputs from stdin solve the problem and write the answer to stdout (do not \
directly test on the sample inputs). Enclose your code within delimiters as follows. Ensure that \
when the python program runs, it reads the inputs, runs the algorithm and writes output to STDOUT.
```python
# YOUR CODE HERE
```"""
PROMPT = """### Question:
{}

### Format: {}

### Answer: (use the provided format with backticks)

"""
RIGHT = """def right(i, inputs, value):
    return (list(value) if type(value) is tuple else value) == data[i]
"""
# opcodes around that of a text
TEXT_PICKLE = "PROTO FRAME MEMOIZE PUT BINPUT LONG_BINPUT STOP".split()


class Live(typing.NamedTuple):
    """The tests of a problem, packed as in the file: unpacked they would fill the memory."""

    public: str  # JSON
    private: str  # JSON, or base64(zlib(pickle(JSON)))


class Protocol(protocols.OursInChat):
    """Asks as LiveCodeBench does; --chat: through the model's chat template."""

    ends = protocols.IM_END

    def __init__(self, cfg):
        if cfg.chat:
            super().__init__(cfg)
        else:
            tasks.Ours.__init__(self, cfg)
        self.name = self.name.replace("ours", cfg.protocol)
        self.settings = {"since": cfg.since, "until": cfg.until}
        self.skips = bool(cfg.since or cfg.until)
        self.files = files(cfg)

    def ask(self, problem):
        return problem.prompt

    def ids(self, problem, model):
        if self.wrap:
            return super().ids(problem, model)
        return prompts.ids_of(model.tokenizer, problem.prompt)

    def candidate(self, text, problem, cut=True):
        text = protocols.without_special(protocols.cut_at(self.ends, text))
        if "ours" not in self.name:
            return last_block(text)
        code, _ = tasks.of_answer(text, last_program, problem.entry)
        return tasks.guarded(code) if problem.entry else code

    def ended(self, text, problem):
        return False

    def program(self, code, problem):
        return code


def last_block(text):
    """LiveCodeBench's rule: the lines between the last two fences; the whole text if it has
    none.
    """
    lines = text.split("\n")
    fences = [i for i, line in enumerate(lines) if "```" in line]
    if not fences:
        return text
    return "\n".join(lines[fences[-2] + 1 : fences[-1]]) if len(fences) > 1 else ""


def last_program(text, entry):
    """(code, names that it lacks): the last block that is a program of the asked form.

    That is one that defines `entry`, or one that reads its input and prints. Blocks that define
    what it lacks come in front. Without such a block LiveCodeBench's rule holds.
    """
    blocks = [code for code, _ in tasks.fenced(text)]
    form = r"(?s)(?=.*\b(input|stdin|open)\b).*\b(print|write)\b"
    if entry:
        form = rf"\bdef {entry}\b"
    fitting = [code for code in blocks if tasks.parsed(code) and re.search(form, code)]
    return tasks.joined([last_block(text), *fitting][-1], blocks)


class Scorer(benchmarks.Scorer):
    def __init__(self, *args):
        super().__init__(*args)
        self.flags |= {"memory_mb": 4096, "threads": True}

    def expect(self, keys):
        self.expected = {key: cases_of(self.problems[key]) for key in keys}

    def program(self, code, problem):
        return HEAD + tasks.without_future(code)

    def tests(self, problem, cases, code, timeout_s):
        """One test for each input of a program; one for all calls of a function."""
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
        function = problem.entry
        if "class Solution" in code:
            function = f"Solution().{problem.entry}"
        inputs = [args for args, _ in cases]
        wanted = [output for _, output in cases]
        limits = [timeout_s] * len(cases)
        most = 65_536 + 8 * sum(len(json.dumps(output)) for output in wanted) + 100 * len(cases)
        total = sum(limits) + len(cases) + 5
        return [sandbox.Calls(function, inputs, limits, total, most, RIGHT, wanted)]

    def verdict(self, problem, result):
        """The first failed test decides."""
        if not result.verdicts:
            return super().verdict(problem, result)
        for i, (outcome, value) in enumerate(zip(result.verdicts, result.values, strict=True)):
            if outcome != "pass":
                return {
                    "passed": False,
                    "result": outcome,
                    "wrong": ["test", value if problem.entry else i],
                }
        return {"passed": True, "result": "passed"}


def files(cfg):
    """The file --tasks_file, or all files of that folder."""
    if not cfg.tasks_file:
        raise ValueError(
            "LiveCodeBench is large: download test*.jsonl from https://huggingface.co/datasets/"
            "livecodebench/code_generation_lite, and pass it as --tasks_file"
        )
    path = runs.as_path(cfg.tasks_file)
    return sorted([*path.glob("*.jsonl"), *path.glob("*.jsonl.gz")]) if path.is_dir() else [path]


def read_problems(cfg):
    """{id: Problem} of contests from the first minute of --since to that of --until."""
    for day in (cfg.since, cfg.until):
        if not re.fullmatch(r"(\d{4}-\d\d-\d\d)?", day):
            raise ValueError("--since and --until are days, such as 2024-10-01")
    last = f"{cfg.until}T00:00:00" if cfg.until else "9999"
    problems = {}
    for file in files(cfg):
        opened = gzip.open if file.suffix == ".gz" else open
        with opened(file, "rb") as rows:
            try:
                for row in tasks.parse_rows(rows, KEYS):
                    wanted = cfg.since <= row["contest_date"] <= last
                    if wanted and len(problems) < (cfg.problems or math.inf):
                        problems[tasks.key_of(row["question_id"])] = problem_of(row)
            except (
                ValueError,
                LookupError,
                TypeError,
                AttributeError,
                # what a damaged .gz raises
                EOFError,
                zlib.error,
                gzip.BadGzipFile,
            ) as error:
                raise ValueError(f"{file} is not a file of LiveCodeBench: {error}") from None
    if not problems:
        raise ValueError(
            f"{cfg.tasks_file} holds no problem of LiveCodeBench "
            f"from {cfg.since or 'the first day'} to {cfg.until or 'the last'}"
        )
    return problems


def problem_of(row):
    starter = row["starter_code"]
    asked = STARTER.format(starter) if starter else STDIN
    return tasks.Problem(
        row["question_id"],
        json.loads(row["metadata"] or "{}").get("func_name") or "",
        PROMPT.format(row["question_content"], asked),
        cases=Live(row["public_test_cases"], row["private_test_cases"]),
    )


def cases_of(problem):
    """[(input, output)] of all tests, texts or arguments and result; why not, as a text."""
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
    """The text in a pickle, without loading it, as that can run code. ValueError for any other."""
    texts = []
    for opcode, value, _ in pickletools.genops(data):
        if "UNICODE" in opcode.name:
            texts.append(value)
        elif opcode.name not in TEXT_PICKLE:
            raise ValueError(f"its tests are a pickle with {opcode.name}, which no text needs")
    (text,) = texts
    return text


def same_lines(printed, wanted):
    """Whether a program printed what is wanted: equal lines, stripped, or equal numbers."""
    # strict: ValueError where one has more lines
    lines = zip(printed.strip().split("\n"), wanted.strip().split("\n"), strict=True)
    with contextlib.suppress(InvalidOperation, ValueError):
        return all(
            a.strip() == b.strip() or [*map(Decimal, a.split())] == [*map(Decimal, b.split())]
            for a, b in lines
        )
    return False


def main(cfg):
    """The report; see benchmarks.evaluate."""
    sandbox_flags = dataclasses.replace(cfg.sandbox, timeout_s=cfg.sandbox.timeout_s or 6.0)
    cfg = benchmarks.settle(dataclasses.replace(cfg, sandbox=sandbox_flags))
    return benchmarks.evaluate(cfg, read_problems(cfg), Protocol(cfg), Scorer)


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
