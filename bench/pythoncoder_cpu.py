"""Training speed of the tiny preset against the same model in PyTorch with torch.compile: one run, one machine.

    python bench/pythoncoder_cpu.py               # five minutes; needs torch; keep the machine idle

Both take the same shapes, 8,192 tokens a step in the micro-batches that suit each (ours as train_tpu.py picks them, the
baseline at each of --accumulate, its fastest counts), dropout 0.1, float32, and the machine's cores. There are two
baselines: torch.compile of the plain model, with whole attention maps and whole logits, and of one tuned by hand, whose
attention and loss go in blocks. Writes cpu.json.
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
import tyro
from record import record

import model_pythoncoder as pc
import train_tpu


@dataclasses.dataclass(frozen=True)
class Config:
    seq_len: int = 0  # tokens per row; 0: the preset's positions
    steps: int = 15  # timed steps of each, and of ours as many before the baseline as after it
    accumulate: tuple[int, ...] = (1, 4)  # micro-batches of the baseline to try


def ours(settings):
    """A function that times one of train_tpu.py's steps on random tokens, in seconds; its compile time; settings."""
    cfg, model, run, _, micro, mu_dtype = train_tpu.resolve(settings, jax.devices()[:1])
    optimizer = train_tpu.make_optimizer(cfg.clip, cfg.weight_decay, mu_dtype)
    params = jax.jit(lambda: pc.new_params(model, 0))()
    state = {"params": params, "opt": jax.jit(optimizer.init)(params)}
    shape = (cfg.batch_size // micro, micro, cfg.seq_len)
    token = jnp.asarray(np.random.default_rng(0).integers(0, model.vocab, shape), jnp.int32)
    segment = jnp.broadcast_to(1 + jnp.arange(cfg.seq_len) * 3 // cfg.seq_len, shape)  # three documents a row
    batch = {"token_ABL": token, "segment_ABL": segment, "position_ABL": segment * 0 + jnp.arange(cfg.seq_len)}
    step = jax.jit(train_tpu.make_step(cfg, pc.graph_of(model, run), optimizer, 1e-3, 1000, 10), donate_argnums=0)
    started = time.perf_counter()
    step = step.lower(state, batch, jnp.int32(0)).compile()
    compile_s = time.perf_counter() - started

    def timed(i):
        nonlocal state
        started = time.perf_counter()
        state, metrics = step(state, batch, jnp.int32(i))
        float(metrics["loss"])
        return time.perf_counter() - started

    return timed, compile_s, cfg, model


def main(cfg):
    timed, compile_s, settings, model = ours(train_tpu.Config(model="tiny", seq_len=cfg.seq_len))
    seconds = [timed(i) for i in range(3 + cfg.steps)][3:]
    tokens = settings.batch_size * settings.seq_len
    shape = {
        name: getattr(model, name) for name in ("vocab", "width", "layers", "heads", "kv_heads", "head_size", "ffn")
    }
    flags = [f"--{name}={value}" for name, value in shape.items()]
    flags += [f"--seq_len={settings.seq_len}", f"--batch_size={settings.batch_size}", f"--dropout={settings.dropout}"]
    flags += [f"--steps={cfg.steps}", f"--threads={os.cpu_count()}"]
    plain = [f"--block={settings.seq_len}", "--chunked_loss=False", "--aten_dropout=False"]
    baselines = {}
    for name, more in {"tuned": [], "plain": plain}.items():
        baselines[name] = []
        for accumulate in cfg.accumulate:
            command = [sys.executable, str(ROOT / "bench" / "pythoncoder_torch.py"), *flags, *more]
            command.append(f"--accumulate={accumulate}")
            result = subprocess.run(command, capture_output=True, text=True, check=True)
            baselines[name].append(json.loads(result.stdout))
    seconds += [timed(i) for i in range(cfg.steps + 3)][3:]  # the machine's speed drifts
    median, low, high = np.quantile(seconds, [0.5, 0.1, 0.9]).tolist()
    for name, results in baselines.items():
        best = min(results, key=lambda b: b["step_s"])
        keys = "step_s", "step_s_p10", "step_s_p90", "tok_per_s", "compile_s"
        record(
            "cpu",
            f"pythoncoder tiny training, rows of {settings.seq_len}: {name} PyTorch step / our step",
            best["step_s"] / median,
            "ratio",
            spread=[best["step_s_p10"] / high, best["step_s_p90"] / low],
            ours={"step_s": median, "p10": low, "p90": high, "tok_per_s": tokens / median, "compile_s": compile_s},
            baseline=[{key: result[key] for key in keys} for result in results],
            accumulate=cfg.accumulate,
            shape=shape,
            load=os.getloadavg()[0],
        )


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main(tyro.cli(Config, description=__doc__, config=(tyro.conf.FlagConversionOff,)))
