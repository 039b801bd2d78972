"""Seconds of generate.py from the shell to its whole text: with an empty compilation cache (cold),
and with a full one.

    python bench/cold_start.py               # weights/pythoncoder, 128 tokens, five pairs; an idle machine
    python bench/cold_start.py --model=dream

Writes two entries into results/cpu.json: medians, with the processor seconds beside them.
"""

import dataclasses
import os
import resource
import subprocess
import sys
import tempfile
import time
import typing
from pathlib import Path

import numpy as np
from record import record

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import runs
from runs import Count


@dataclasses.dataclass(frozen=True)
class Config:
    model: typing.Literal["pythoncoder", "dream"] = "pythoncoder"  # of those in weights/
    prompt: str = "def fibonacci(n):\\n"
    pairs: Count = 5  # of a cold start and a warm one


def timed(cfg, cache):
    """(wall, processor) seconds of one command."""
    script = "generate_dream.py" if cfg.model == "dream" else "generate.py"
    what = (
        f"--ckpt=weights/{cfg.model}",
        f"--prompt={cfg.prompt}",
        f"--compile_cache={cache}",
    )
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    how = {
        "cwd": ROOT,
        "check": True,
        "stdout": subprocess.DEVNULL,
        "env": os.environ | {"JAX_PLATFORMS": "cpu"},
    }
    subprocess.run([sys.executable, script, *what], **how)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - started, processor


def main(cfg):
    found_RS2 = []  # of each pair: cold, warm
    for _ in range(cfg.pairs):
        with tempfile.TemporaryDirectory() as cache:
            found_RS2.append([timed(cfg, cache), timed(cfg, cache)])
    found_RS2 = np.array(found_RS2)
    for i, kind in enumerate(("cold", "warm")):
        wall_R, processor_R = found_RS2[:, i].T
        spread, more = (
            np.percentile(wall_R, (10, 90)).tolist(),
            {"processor_s": float(np.median(processor_R))},
        )
        record(
            "cpu",
            f"generate.py, weights/{cfg.model}, {kind} start",
            float(np.median(wall_R)),
            "s",
            spread,
            **more,
        )


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
