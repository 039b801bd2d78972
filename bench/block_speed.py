"""Tokens a second: a Dream of blocks with its exact cache beside the same layers as an
autoregressive model.

    python bench/block_speed.py                     # 100m in float32; ten minutes of two idle cores
    python bench/block_speed.py --model=7b --dtype=bfloat16     # a GPU with 40 GB

Random weights of one shape, greedy, texts of --max_new tokens after prompts of --prompt. The
autoregressive sides are transformers' Qwen2 with its cache (eager, and its forward pass under
torch.compile) and ours, blocks of one token. A pass unmasks --tokens tokens of a block, as a
trained model might by a threshold; random weights reach none, so a schedule sets the number. The
autoregressive texts of the sides must agree but for near-ties. Each side is a process of its own;
ours runs before and after the others. Writes bench/results/cpu.json, or <GPU>.json.
"""

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
from bench_dream import from_hf, write_weights
from record import record

import checkpoints
import model_dream as dream
import runs
import sample_block


@dataclasses.dataclass(frozen=True)
class Config:
    model: str = "100m"  # key of CONFIGS in model_dream.py
    dtype: str = "float32"  # of weights and activations
    prompt: int = 64  # tokens of a prompt
    max_new: int = 128  # tokens that are written
    block_length: int = 32
    tokens: tuple[float, ...] = (1, 1.5, 2, 3, 4)  # that a pass writes of a block
    batches: tuple[int, ...] = (1, 8)  # rows of a batch
    repeats: int = 5  # timed texts, after one that compiles
    side: str = ""  # internal: run one side, "ours", "eager" or "compiled", on --folder
    folder: str = ""  # internal: the checkpoint


def prompts_of(cfg, model_cfg, batch):
    return np.random.default_rng(1).integers(5, min(model_cfg.vocab, 150_000), (batch, cfg.prompt))


def clock(call, repeats):
    """(what it returns, seconds of each call after one that compiles)."""
    found, seconds = call(), []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return found, seconds


def run_ours(cfg):
    """Prints {batch: {kind: seconds}}, and the autoregressive texts; a kind is "ar" or tokens of a
    pass.
    """
    import jax

    if idle := checkpoints.idle_accelerator():  # PyTorch would take it
        raise ValueError(idle)
    jax.config.update("jax_default_matmul_precision", "highest" if cfg.dtype == "float32" else None)
    model, seconds, texts = from_hf(Path(cfg.folder), cfg.dtype), {}, {}
    for B in cfg.batches:
        prompts = prompts_of(cfg, model.cfg, B).tolist()
        rules = {"ar": sample_block.Sampling(block_length=1)}
        for n in cfg.tokens:
            steps = round(cfg.block_length / n)
            rules[str(n)] = sample_block.Sampling(
                block_length=cfg.block_length, steps=steps, schedule="even"
            )
        seconds[B] = {}
        for kind, rule in rules.items():
            call = lambda rule=rule, prompts=prompts: sample_block.generate(  # noqa: E731
                model, prompts, cfg.max_new, rule
            )
            (rows, stats), seconds[B][kind] = clock(call, cfg.repeats)
            print(kind, B, stats["forwards"], "passes", file=sys.stderr)
            if kind == "ar":
                texts[B] = [row[cfg.prompt :] for row in rows]
    print(json.dumps({"seconds": seconds, "texts": texts}))


def run_torch(cfg, compiled):
    """The same of transformers' Qwen2, autoregressive alone."""
    import safetensors.torch
    import torch
    from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

    folder, device = Path(cfg.folder), "cuda" if torch.cuda.is_available() else "cpu"
    ours = dream.config_from_hf(folder)
    theirs = {
        name: value
        for name, value in dream.config_to_hf(ours).items()
        if name in Qwen2Config().to_dict()
    }
    rope = {"rope_type": "default", "rope_theta": ours.theta}
    config = Qwen2Config(
        **theirs | {"model_type": "qwen2", "rope_parameters": rope}, attn_implementation="sdpa"
    )
    model = Qwen2ForCausalLM(config)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    model.load_state_dict(weights, strict=not ours.tie)
    model = model.to(device, getattr(torch, cfg.dtype)).eval()
    run = torch.compile(model, dynamic=True) if compiled else model

    @torch.inference_mode()
    def generate(token_BP):
        """Greedy, a token a pass with the cache; MASK is not written."""
        new, cache, found = torch.from_numpy(token_BP).to(device), DynamicCache(config=config), []
        for _ in range(cfg.max_new):
            logits = run(new, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            logits[:, ours.mask_id] = -torch.inf
            new = logits.argmax(-1, keepdim=True)
            found.append(new)
        return torch.cat(found, 1).tolist()

    seconds, texts = {}, {}
    for B in cfg.batches:
        texts[B], of_text = clock(lambda B=B: generate(prompts_of(cfg, ours, B)), cfg.repeats)
        seconds[B] = {"ar": of_text}
    print(json.dumps({"seconds": seconds, "texts": texts}))


def main(cfg):
    if cfg.side:
        return run_ours(cfg) if cfg.side == "ours" else run_torch(cfg, cfg.side == "compiled")
    if cfg.model not in dream.CONFIGS:
        raise ValueError(f"--model={cfg.model}: not one of {', '.join(dream.CONFIGS)}")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        write_weights(Path(folder), dream.CONFIGS[cfg.model])
        for name in ("ours", "eager", "compiled", "again"):
            side = name.replace("again", "ours")
            command = [sys.executable, *sys.argv, f"--side={side}", f"--folder={folder}"]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found[name] = json.loads(done.stdout.splitlines()[-1])
            print(name, found[name]["seconds"], flush=True)
    report(cfg, found)


def report(cfg, found):
    import torch

    file = torch.cuda.get_device_name().replace(" ", "_") if torch.cuda.is_available() else "cpu"
    again = found.pop("again")
    for B in map(str, cfg.batches):
        ours, rate = (
            found["ours"]["seconds"][B],
            lambda seconds, B=B: int(B) * cfg.max_new / np.median(seconds),
        )
        for kind, seconds in again["seconds"][B].items():
            ours[kind] += seconds
        rates = {
            f"{name}, autoregressive": rate(side["seconds"][B]["ar"])
            for name, side in found.items()
        }
        rates |= {f"{n} tokens a pass": rate(ours[str(n)]) for n in cfg.tokens}
        same = {
            name: float(np.mean(np.array(side["texts"][B]) == np.array(found["ours"]["texts"][B])))
            for name, side in found.items()
        }
        best = min((side["seconds"][B]["ar"] for side in found.values()), key=np.median)
        for n in cfg.tokens:
            theirs, mine = (np.quantile(x, [0.5, 0.1, 0.9]) for x in (best, ours[str(n)]))
            record(
                file,
                f"dream {cfg.model} {cfg.dtype}, batch {B}: blocks of {cfg.block_length} with {n:g} tokens a pass / the"
                " fastest autoregressive side",
                float(theirs[0] / mine[0]),
                "ratio",
                spread=[float(theirs[1] / mine[2]), float(theirs[2] / mine[1])],
                tokens_per_s=rates,
                same_tokens=same,
            )


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
