"""Memory, FLOPs, collectives and the compiler's time estimate of the 1.08 B train step on TPUs, compiled ahead of time.

    python bench/pythoncoder_aot.py               # five compilations, about six minutes; needs libtpu, no TPU

These are predictions of the compiler, not measurements: the Pallas kernels carry no estimate and come on top. Each
program is compiled in a process of its own. Writes tpu_aot.json.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import tyro
from record import record

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = {
    "v6e:1x1, 16 x 4 rows, no dropout": ["--topology=v6e:1x1", "--dropout=0"],
    "v6e:1x1, 8 x 8 rows, no dropout": ["--topology=v6e:1x1", "--dropout=0", "--micro_batch=8"],
    "v6e:1x1, 16 x 4 rows": ["--topology=v6e:1x1"],
    "v6e:4x4, fsdp 16, 8 rows a chip, no dropout": [
        "--topology=v6e:4x4",
        "--dropout=0",
        "--batch_size=128",
        "--micro_batch=8",
    ],
    "v6e:4x4, fsdp 16, 8 rows a chip": ["--topology=v6e:4x4", "--batch_size=128", "--micro_batch=8"],
}
CODE = """
import json, train_tpu, tyro
cfg = tyro.cli(train_tpu.Config, config=(tyro.conf.FlagConversionOff,))
print(json.dumps(train_tpu.main(cfg)))
"""


@dataclasses.dataclass(frozen=True)
class Config:
    only: str = ""  # compile the programs whose name holds this text


def main(cfg):
    for name, flags in PROGRAMS.items():
        if cfg.only not in name:
            continue
        command = [sys.executable, "-c", CODE, "--compile_only=True", "--model=1b", *flags]
        env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        result = subprocess.run(command, capture_output=True, text=True, env=env)
        if result.returncode:
            sys.exit(f"{name}: {result.stderr.strip().splitlines()[-1]}")
        row = json.loads(result.stdout.splitlines()[-1])
        shell = "python train_tpu.py --compile_only=True --model=1b " + " ".join(flags)
        device = f"TPU {row['topology']}, compiled for, not run on"
        record(
            "tpu_aot", f"pythoncoder 1b step, {name}", row["step_s"], "s, estimate", device=device, flags=shell, **row
        )


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__, config=(tyro.conf.FlagConversionOff,)))
