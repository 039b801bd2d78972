"""Training speed of the tiny preset against the same model in PyTorch with torch.compile: one run,
one machine.

    python bench/pythoncoder_cpu.py               # five minutes; needs torch; keep the machine idle

Both take the same shapes, 4,096 tokens a step in the micro-batches that suit each (ours as
train_tpu.py picks them, the baseline at each of --accumulate, its fastest counts), dropout 0.1,
float32, and the machine's cores. There are two
baselines: torch.compile of the plain model, with whole attention maps and whole logits, and of one
tuned by hand, whose attention and loss go in blocks. Writes cpu.json.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax
import jax.numpy as jnp
import numpy as np
from record import record

import model_pythoncoder as pc
import runs
import train_tpu


@dataclasses.dataclass(frozen=True)
class Config:
    seq_len: int = 0  # tokens per row; 0: the preset's positions
    steps: int = 15  # timed steps of each, and of ours as many before the baseline as after it
    accumulate: tuple[int, ...] = (1, 4)  # micro-batches of the baseline to try


class Ours:
    """train_tpu.py's step on random tokens."""

    def __init__(self, settings):
        self.cfg, self.model, run, _ = train_tpu.resolve(settings, jax.devices()[:1])
        cfg = dataclasses.replace(self.cfg, lr=1e-3, steps=1000, warmup=10)
        optimizer = train_tpu.make_optimizer(cfg.clip, cfg.weight_decay, run.dtype)
        params = jax.jit(lambda: pc.new_params(self.model, 0))()
        self.state = {"params": params, "opt": jax.jit(optimizer.init)(params)}
        shape = (cfg.batch_size // cfg.micro_batch, cfg.micro_batch, cfg.seq_len)
        token = jnp.asarray(
            np.random.default_rng(0).integers(0, self.model.vocab, shape), jnp.int32
        )
        # three documents a row
        segment = jnp.broadcast_to(1 + jnp.arange(cfg.seq_len) * 3 // cfg.seq_len, shape)
        position = segment * 0 + jnp.arange(cfg.seq_len)
        self.batch = dict(zip(train_tpu.COLUMNS, (token, segment, position), strict=False))
        step = train_tpu.make_step(cfg, pc.graph_of(self.model, run), optimizer)
        started = time.perf_counter()
        self.step = (
            jax.jit(step, donate_argnums=0).lower(self.state, self.batch, jnp.int32(0)).compile()
        )
        self.compile_s = time.perf_counter() - started

    def seconds(self, count):
        """The times of `count` steps, after three that are not counted."""
        seconds = []
        for i in range(3 + count):
            started = time.perf_counter()
            self.state, metrics = self.step(self.state, self.batch, jnp.int32(i))
            float(metrics["loss"])  # waits for the step
            seconds.append(time.perf_counter() - started)
        return seconds[3:]


def main(cfg):
    same = {"optimizer": "adamw", "dropout": 0.1}  # as the baselines have them
    ours = Ours(train_tpu.Config(model="tiny", seq_len=cfg.seq_len, **same))
    settings, model, compile_s = ours.cfg, ours.model, ours.compile_s
    seconds = ours.seconds(cfg.steps)
    tokens = settings.batch_size * settings.seq_len
    # Each baseline in a process of its own, with our shapes and all cores; "plain" without what was
    # tuned by hand.
    names = "vocab", "width", "layers", "heads", "kv_heads", "head_size", "ffn"
    shape = {name: getattr(model, name) for name in names}
    batch = {
        "seq_len": settings.seq_len,
        "batch_size": settings.batch_size,
        "dropout": settings.dropout,
    }
    same = shape | batch | {"steps": cfg.steps, "threads": os.cpu_count(), "device": "cpu"}
    flags = [f"--{name}={value}" for name, value in same.items()]
    plain = [f"--block={settings.seq_len}", "--no-chunked_loss", "--no-aten_dropout"]
    baselines = {}
    for name, more in {"tuned": [], "plain": plain}.items():
        baselines[name] = []
        for accumulate in cfg.accumulate:
            command = [sys.executable, str(ROOT / "bench" / "pythoncoder_torch.py"), *flags, *more]
            command.append(f"--accumulate={accumulate}")
            result = subprocess.run(command, capture_output=True, text=True, check=True)
            baselines[name].append(json.loads(result.stdout))
    seconds += ours.seconds(cfg.steps)  # once more, for the machine's speed drifts
    median, low, high = np.quantile(seconds, [0.5, 0.1, 0.9]).tolist()
    # One row for each baseline at its fastest count of micro-batches; the spread is its p10 over
    # our p90 and so on.
    for name, results in baselines.items():
        best = min(results, key=lambda b: b["step_s"])
        keys = "step_s", "step_s_p10", "step_s_p90", "tok_per_s", "compile_s"
        record(
            "cpu",
            f"pythoncoder tiny training, rows of {settings.seq_len}: {name} PyTorch step / our step",
            best["step_s"] / median,
            "ratio",
            spread=[best["step_s_p10"] / high, best["step_s_p90"] / low],
            ours={
                "step_s": median,
                "p10": low,
                "p90": high,
                "tok_per_s": tokens / median,
                "compile_s": compile_s,
            },
            baseline=[{key: result[key] for key in keys} for result in results],
            accumulate=cfg.accumulate,
            shape=shape,
            load=os.getloadavg()[0],
        )


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    runs.command(main, Config, __doc__)
