"""Programs per second and core that sandbox.py runs: a trivial program and three tests, every layer
on.

    python bench/sandbox_speed.py               # a minute; keep the machine idle
    pip install psutil && pip install --no-deps evalplus      # before it, to have EvalPlus' executor beside it

One round is --programs programs, as many at a time as there are cores, from the call of run_tests
to its return. The first round is left out. Beside it: the same by judge; by three calls in one
process, as HumanEval+ is scored; by EvalPlus' executor, which does that too. Then seconds of a
single program, of a Python interpreter that does nothing, and of benchmarks.py for HumanEval's own
164 solutions. Writes cpu.json.
"""

import concurrent.futures
import contextlib
import dataclasses
import gzip
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
from record import record

import benchmarks
import runs
import sandbox


@dataclasses.dataclass(frozen=True)
class Config:
    programs: int = 100  # programs in one round
    rounds: int = 5  # rounds that are timed
    # HumanEval.jsonl.gz, for its solutions; left out without
    tasks_file: str = "data/tasks/HumanEval.jsonl.gz"


PROGRAM = "def f(x):\n    return x + 1\n"
TESTS = ["assert f(1) == 2", "assert f(5) == 6", "assert f(-1) == 0"]


CALLS = sandbox.Calls("f", [[1], [5], [-1]], [4.0] * 3, 13.0)
BY_JUDGE = [
    f"for y in [{test.split()[-1]}]:\n    {' '.join(test.split()[:-1])} y" for test in TESTS
]


def run_programs(count, tests=TESTS):
    results = sandbox.run_tests([PROGRAM] * count, [tests] * count)
    assert all(result.rate == 1 for result in results), results[0]


def evalplus_verdict(_):
    from evalplus.eval import untrusted_check

    args = PROGRAM, [[1], [5], [-1]], "f", [2, 6, 0], 0, [0.0] * 3
    return untrusted_check("humaneval", *args, fast_check=True, min_time_limit=4.0)[0]


def run_evalplus(count):
    with concurrent.futures.ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        assert set(pool.map(evalplus_verdict, range(count))) == {"pass"}


def run_humaneval(tasks_file, folder):
    """benchmarks.py on HumanEval's own solutions, from the file to the report."""
    with gzip.open(tasks_file, "rt") as file, open(f"{folder}/samples.jsonl", "w") as samples:
        for row in map(json.loads, file):
            sample = {"task_id": row["task_id"], "completion": row["canonical_solution"]}
            samples.write(json.dumps(sample) + "\n")
    files = {"tasks_file": tasks_file, "samples": f"{folder}/samples.jsonl", "out": f"{folder}/out"}
    with contextlib.redirect_stdout(io.StringIO()):
        row = benchmarks.main(benchmarks.Config("humaneval", **files))
    assert row["results"] == {"passed": 164}, row


def timed(function, *args, **options):
    """Seconds that a call takes."""
    started = time.perf_counter()
    function(*args, **options)
    return time.perf_counter() - started


def measured(cfg, function, *args):
    """Programs a second and core in every round but the first, of function(count)."""
    cores = len(os.sched_getaffinity(0))
    return [
        cfg.programs / timed(function, cfg.programs, *args) / cores for _ in range(cfg.rounds + 1)
    ][1:]


def main(cfg):
    cores, layers = len(os.sched_getaffinity(0)), sandbox.layers()
    rates = measured(cfg, run_programs)
    kinds = {
        "judge": (run_programs, BY_JUDGE),
        "three_calls": (run_programs, [CALLS]),
        "evalplus": (run_evalplus,),
    }
    try:
        import evalplus.eval  # noqa: F401
    except ImportError as error:
        print(f"EvalPlus' executor is left out: {error}", file=sys.stderr)
        del kinds["evalplus"]
    more = {}
    for name, (function, *args) in kinds.items():
        more[f"by_{name}"] = float(np.median(measured(cfg, function, *args)))
    if Path(cfg.tasks_file).is_file():
        with tempfile.TemporaryDirectory() as folder:
            more["humaneval_s"] = timed(run_humaneval, cfg.tasks_file, folder)
    single_s = [timed(run_programs, 1) for _ in range(20)]
    python_s = [
        timed(subprocess.run, [sys.executable, "-c", "pass"], check=True) for _ in range(20)
    ]
    record(
        "cpu",
        "sandbox: trivial programs with three tests",
        float(np.median(rates)),
        "programs/s per core",
        spread=np.quantile(rates, [0.1, 0.9]).tolist(),
        cores=cores,
        layers=layers,
        single_program_s=float(np.median(single_s)),
        empty_interpreter_s=float(np.median(python_s)),
        load=os.getloadavg()[0],
        **more,
    )


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
