"""What 8 bits cost: held-out bits per byte of a trained MDLM as the device reads it, in FP16 and
after --int8.

    python bench/jetson_int8.py --ckpt=out/stories      # a run of train_gpu.py; a minute or two on two cores

Exports both bundles, reads each as inference_jetson.py does, and bounds the same held-out rows
under the same noise, in float32, so that only the weights differ. Writes an entry of
bench/results/cpu.json.
"""

import dataclasses
import math
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
from record import record

import export_jetson
import inference_jetson as jetson
import runs
import train_gpu
from rows import Rows, token_bytes


@dataclasses.dataclass(frozen=True)
class Config:
    ckpt: str = "out/train_gpu"  # run folder of train_gpu.py
    data: str = ""  # folder of data_prep.py; "" is the one that the run was trained on
    rows: int = 128  # held-out rows, the first ones
    draws: int = 4  # noise draws of every row


def main(cfg):
    rows = Rows(cfg.data or runs.read_json(Path(cfg.ckpt) / "config.json")["data"], "heldout")
    token_RL = rows.read(np.arange(min(cfg.rows, rows.total)))[0].astype(np.int64)
    bytes_V = token_bytes(runs.read_tokenizer(cfg.ckpt), rows.meta["vocab_size"])
    tokens = train_gpu.is_text(token_RL).sum()
    # per byte, of a nat per token
    bits = tokens / math.log(2) / bytes_V[token_RL].sum(dtype=np.float64)
    bounds, sizes = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("fp16", "int8"):
            out = Path(folder) / name
            settings = {
                "out": str(out),
                "int8": name == "int8",
                "torchscript": False,
                "onnx": False,
            }
            export_jetson.main(export_jetson.Config(ckpt=cfg.ckpt, **settings))
            model, rng = jetson.read_model(out, jetson.read_bundle(out)), np.random.default_rng(0)
            draws = [
                train_gpu.evaluate(model, token_RL, rng, 16, "float32") for _ in range(cfg.draws)
            ]
            bounds[name] = bits * np.array([sums_T4[:, 0].sum() for sums_T4 in draws])
            sizes[name] = (out / "model.safetensors").stat().st_size
    lost = bounds["int8"] - bounds["fp16"]  # of each draw of the noise
    record(
        "cpu", "jetson_int8_bits_per_byte_lost", float(lost.mean()), "bits per byte, int8 less FP16 weights",
        [float(lost.min()), float(lost.max())], bits_per_byte={name: float(b.mean()) for name, b in bounds.items()},
        file_bytes=sizes, heldout_rows=len(token_RL), draws=cfg.draws, model=dataclasses.asdict(model.cfg),
    )  # fmt: skip


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
