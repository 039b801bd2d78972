"""Memory, FLOPs, collectives and the compiler's time estimates of our programs on TPUs, compiled
ahead of time.

    python bench/aot.py                              # fourteen programs, 40 minutes on two cores; needs libtpu alone
    python bench/aot.py --only="1b step, v6e:1x1"    # those whose name holds this text

Estimates of the compiler, not measurements: Pallas kernels, sorts and scatters carry none and come
on top. Runs compile_for.py, for each program in a process of its own. Writes tpu_aot.json.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from record import record

import runs

STEP = "train --model=1b"
POD = f"{STEP} --device=v6e:4x4 --batch_size=128 --micro_batch=8"
PROGRAMS = {
    "pythoncoder 1b step, v6e:1x1, 16 x 4 rows": STEP,
    "pythoncoder 1b step, v6e:1x1, 16 x 4 rows, no dropout": f"{STEP} --dropout=0",
    "pythoncoder 1b step, v6e:1x1, 8 x 8 rows, no dropout": f"{STEP} --dropout=0 --micro_batch=8",
    "pythoncoder 1b step, v6e:4x4, fsdp 16, the default batch": f"{STEP} --device=v6e:4x4",
    "pythoncoder 1b step, v6e:4x4, fsdp 16, 8 rows a chip": POD,
    "pythoncoder 1b step, v6e:4x4, fsdp 16, 8 rows a chip, no dropout": f"{POD} --dropout=0",
    "dream 7b bfloat16": "generate",
    "dream 7b bfloat16, blocks of 32": "generate --only=blocks",
    "dream 7b bfloat16, blocks of 1, an autoregressive model": "generate --only=blocks --block_length=1",
    "dream 7b coupled-grpo micro-step, LoRA of rank 16, 5 completions, v6e:1x1": "grpo --lora_rank=16",
    "dream 7b coupled-grpo micro-step, all weights, 40 completions, v6e:2x4": "grpo --device=v6e:2x4",
    "dream 7b coupled-grpo micro-step, all weights, 80 completions, v6e:4x4": "grpo --device=v6e:4x4",
    "coupled-grpo scoring head 7b, bfloat16 weights": "head",
    "coupled-grpo scoring head 7b, float32 weights": "head --weights=float32 --only=gradient",
}


@dataclasses.dataclass(frozen=True)
class Config:
    only: str = ""  # compile the programs whose name holds this text


def compile_rows(flags):
    """The rows of compile_for.py with these flags, and its seconds. RuntimeError: what it said."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        script = str(ROOT / "bench" / "compile_for.py")
        command = [sys.executable, script, f"--json={path}", *flags.split()]
        result = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}
        )
        if result.returncode:
            raise RuntimeError(f"compile_for.py {flags}: {result.stderr.strip().splitlines()[-1]}")
        return json.loads(path.read_text()), time.perf_counter() - started


def main(cfg):
    for name, flags in PROGRAMS.items():
        if cfg.only not in name:
            continue
        rows, compile_s = compile_rows(flags)
        if missing := [row for row in rows if "step_s" not in row]:
            because = missing[0].get("because", "no estimate")
            print(f"{name}: {because}; left as it was", file=sys.stderr)
            continue
        more = {"compiled_by": f"python bench/compile_for.py {flags}", "compile_s": compile_s}
        more["device"] = f"TPU {rows[0]['device']}, compiled for, not run on"
        # one entry for the three forms of a program: how much smaller ours is
        if flags.startswith("head"):
            for what in dict.fromkeys(row["what"] for row in rows):
                forms = {row["form"]: row for row in rows if row["what"] == what}
                gib = {form: row["temporaries_gib"] for form, row in forms.items()}
                shares = {
                    f"share_of_{form}": gib["ours"] / gib[form] for form in ("plain", "reference")
                }
                shares |= {f"{form}_gib": gib[form] for form in ("plain", "reference")}
                shares["estimated_ms"] = {form: 1e3 * row["step_s"] for form, row in forms.items()}
                unit = "GiB of temporaries"
                record("tpu_aot", f"{name}, {what}", gib["ours"], unit, **shares, **more)
        elif flags.startswith("generate"):  # an entry for each of the steps
            for row in rows:
                record("tpu_aot", row["program"], 1e3 * row["step_s"], "ms, estimate", **row | more)
        else:
            record("tpu_aot", name, rows[0]["step_s"], "s, estimate", **rows[0] | more)


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
