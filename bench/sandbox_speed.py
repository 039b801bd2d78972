"""Programs per second and core that sandbox.py runs: a trivial program and three tests, every layer on.

    python bench/sandbox_speed.py               # half a minute; keep the machine idle

One round is --programs programs, as many at a time as there are cores, from the call of run_tests to its return. The
first round is left out. Beside it: processor time of a program, seconds of a single one, and seconds of a Python
interpreter that does nothing. Writes cpu.json.
"""

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
from record import record

import runs
import sandbox


@dataclasses.dataclass(frozen=True)
class Config:
    programs: int = 100  # programs in one round
    rounds: int = 5  # rounds that are timed


PROGRAM = "def f(x):\n    return x + 1\n"
TESTS = ["assert f(1) == 2", "assert f(5) == 6", "assert f(-1) == 0"]


def run_programs(count):
    results = sandbox.run_tests([PROGRAM] * count, [TESTS] * count)
    assert all(result.rate == 1 for result in results), results[0]


def timed(function, *args, **options):
    """Seconds that a call takes."""
    started = time.perf_counter()
    function(*args, **options)
    return time.perf_counter() - started


def main(cfg):
    cores, layers = len(os.sched_getaffinity(0)), sandbox.layers()
    run_programs(cfg.programs)  # interpreter and libraries come from the disk once
    before = os.times()
    rates = [cfg.programs / timed(run_programs, cfg.programs) / cores for _ in range(cfg.rounds)]
    cpu_s = sum(os.times()[:4]) - sum(before[:4])  # user and system, of children too
    single_s = [timed(run_programs, 1) for _ in range(20)]
    python_s = [timed(subprocess.run, [sys.executable, "-c", "pass"], check=True) for _ in range(20)]
    record(
        "cpu",
        "sandbox: trivial programs with three tests",
        float(np.median(rates)),
        "programs/s per core",
        spread=np.quantile(rates, [0.1, 0.9]).tolist(),
        cores=cores,
        layers=layers,
        cpu_s_of_a_program=cpu_s / cfg.rounds / cfg.programs,
        single_program_s=float(np.median(single_s)),
        empty_interpreter_s=float(np.median(python_s)),
        load=os.getloadavg()[0],
    )


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
