"""Dream: ours beside the public PyTorch mathematics, with the same weights: load, forward, a
generation of 256 tokens.

    python bench/bench_dream.py                     # 100m in float32 and bfloat16; 20 minutes on two idle cores
    python bench/bench_dream.py --model=7b --dtypes bfloat16    # random weights of that shape; a GPU with 40 GB

The other side is transformers' Qwen2 with a mask that lets every token see every other (needs
transformers), eager and under torch.compile, and Dream's own sampling loop (a pass over the whole
canvas in every step, lowest entropy first), greedy. Each side is a process of its own; ours runs
before and after the others, as a machine's speed drifts. Logits must agree. Texts agree in part:
random weights leave near-ties that the last digits decide. Writes bench/results/cpu.json, or
<GPU>.json.
"""

import dataclasses
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
from record import record

import checkpoints
import model_dream as dream
import runs
import sample_dream
from convert_weights import find, hf_name, open_safetensors


@dataclasses.dataclass(frozen=True)
class Config:
    model: str = "100m"  # key of CONFIGS in model_dream.py
    length: int = 512  # tokens of a forward pass
    repeats: int = 10  # timed forward passes, after one that compiles
    max_new: int = 256  # tokens of a generation
    steps: int = 16  # denoising steps of a generation
    prompts: tuple[int, ...] = (32, 256)  # tokens of the prompts
    batches: tuple[int, ...] = (1, 4)  # rows of a batch
    dtypes: tuple[str, ...] = ("float32", "bfloat16")  # of weights and activations
    side: str = ""  # internal: run one side, "ours", "eager" or "compiled" and a dtype, on --folder
    folder: str = ""  # internal: the checkpoint


def write_weights(folder, cfg):
    """A checkpoint in the Hub's layout with random bfloat16 weights, a tensor at a time."""
    import ml_dtypes

    (folder / "config.json").write_text(json.dumps(dream.config_to_hf(cfg)))
    header, start, rng = {}, 0, np.random.default_rng(0)
    leaves = checkpoints.flatten(dream.param_shapes(cfg))
    shapes = {hf_name(name): leaf.shape for name, leaf in leaves.items()}
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        ends = [start, start + size]
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": ends}
        start += size
    head = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for name, shape in shapes.items():
            for rows in np.array_split(np.arange(shape[0]), -(-int(np.prod(shape)) // (1 << 24))):
                part = rng.standard_normal((len(rows), *shape[1:]), np.float32) * (
                    0.1 if "bias" in name else 0.03
                )
                file.write(
                    (part + name.endswith("norm.weight")).astype(ml_dtypes.bfloat16).tobytes()
                )


def from_hf(folder, dtype):
    """A Dream in the Hub's form."""
    import jax

    checkpoint = find(folder)
    arrays, _ = open_safetensors(checkpoint, dtype)
    params = {name: jax.numpy.array(array, dtype) for name, array in arrays.items()}
    graph = dream.graph_of(checkpoint.cfg, dream.Compute(dtype=jax.numpy.dtype(dtype)))
    return dream.nnx.merge(graph, checkpoints.unflatten(params))


def inputs(cfg, model_cfg):
    """(token_BL for each batch size, {(prompt, batch): prompts}): the same ids on both sides."""
    rng = np.random.default_rng(1)
    low, high = 5, min(model_cfg.vocab, 150_000)
    forwards = {B: rng.integers(low, high, (B, cfg.length)) for B in cfg.batches}
    return forwards, {
        (P, B): rng.integers(low, high, (B, P)) for P in cfg.prompts for B in cfg.batches
    }


def clock(call, repeats):
    """Seconds of each call, after one that compiles."""
    call()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return seconds


def measure(cfg, model_cfg, forward, generate, load_s, memory):
    """What a side prints: seconds, a few logits, generated ids, peak memory."""
    forwards, prompts = inputs(cfg, model_cfg)
    row = {"load_s": load_s, "forward_s": {}, "generate_s": {}, "ids": {}}
    for B, token_BL in forwards.items():
        row["forward_s"][B] = clock(lambda token_BL=token_BL: forward(token_BL), cfg.repeats)
    row["logits"] = forward(forwards[cfg.batches[0]])[0, ::64, ::997].tolist()
    for (P, B), token_BP in prompts.items():
        ids = []
        row["generate_s"][f"{P},{B}"] = clock(
            lambda token_BP=token_BP, ids=ids: ids.append(generate(token_BP)), 1
        )
        row["ids"][f"{P},{B}"] = np.asarray(ids[-1]).tolist()
    print(json.dumps(row | {"peak_gib": memory()}))


def resident():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def run_ours(cfg, folder, dtype):
    import jax

    if idle := checkpoints.idle_accelerator():  # PyTorch would take it
        raise ValueError(idle)
    jax.config.update("jax_default_matmul_precision", "highest" if dtype == "float32" else None)
    started = time.perf_counter()
    model = from_hf(folder, dtype)
    jax.block_until_ready(dream.nnx.state(model))
    load_s, rule = time.perf_counter() - started, sample_dream.Sampling(steps=cfg.steps)
    graph, params = dream.nnx.split(model)
    call = jax.jit(lambda params, token_BL: dream.nnx.merge(graph, params)(token_BL))

    def generate(token_BP):
        return sample_dream.generate(model, token_BP.tolist(), cfg.max_new, rule)[0]

    device = jax.devices()[0]
    on_gpu = lambda: device.memory_stats()["peak_bytes_in_use"] / 2**30  # noqa: E731
    memory = resident if device.platform == "cpu" else on_gpu
    measure(cfg, model.cfg, lambda x: call(params, x).block_until_ready(), generate, load_s, memory)


def run_torch(cfg, folder, dtype, compiled):
    import safetensors.torch
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    ours = dream.config_from_hf(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    started = time.perf_counter()
    known = Qwen2Config().to_dict()
    theirs = {name: value for name, value in dream.config_to_hf(ours).items() if name in known}
    rope = {"rope_type": "default", "rope_theta": ours.theta}
    config = Qwen2Config(
        **theirs | {"model_type": "qwen2", "rope_parameters": rope}, attn_implementation="sdpa"
    )
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    weights = safetensors.torch.load_file(folder / "model.safetensors", device)
    weights = {name: value.to(getattr(torch, dtype)) for name, value in weights.items()}
    model.load_state_dict(weights, strict=not ours.tie, assign=True)
    if ours.tie:
        model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    model.eval()
    load_s = time.perf_counter() - started
    run = torch.compile(model) if compiled else model

    def call(token_BL):
        return run(
            token_BL, attention_mask={"full_attention": None}, is_causal=False, use_cache=False
        ).logits

    @torch.inference_mode()
    def forward(token_BL):
        logits = call(torch.from_numpy(token_BL).to(device))
        if device == "cuda":
            torch.cuda.synchronize()
        return logits

    @torch.inference_mode()
    def generate(token_BP):
        """Dream's diffusion_generate, alg="entropy", argmax: the token at p from logits at p - 1."""
        x = torch.full(
            (len(token_BP), token_BP.shape[1] + cfg.max_new), ours.mask_id, device=device
        )
        x[:, : token_BP.shape[1]] = torch.from_numpy(token_BP)
        times = torch.linspace(1, 1e-3, cfg.steps + 1)
        for i in range(cfg.steps):
            masked = x == ours.mask_id
            logits = call(x)
            logits = torch.cat([logits[:, :1], logits[:, :-1]], 1)[masked]
            logits[:, ours.mask_id] = torch.finfo(logits.dtype).min  # ours never writes MASK
            prob = torch.softmax(logits, -1)
            x0 = prob.argmax(-1)
            entropy = (prob * torch.log(prob + 1e-10)).sum(-1)
            n = masked.sum() / len(x)
            k = int(n * (1 - times[i + 1] / times[i])) if i < cfg.steps - 1 else int(n)
            score = torch.full(x.shape, -torch.inf, dtype=logits.dtype, device=device)
            score[masked] = entropy
            index = torch.topk(score, k).indices
            written = x.clone()
            written[masked] = x0
            x.scatter_(1, index, written.gather(1, index))
        return x.tolist()

    on_gpu = lambda: torch.cuda.max_memory_allocated() / 2**30  # noqa: E731
    measure(cfg, ours, forward, generate, load_s, on_gpu if device == "cuda" else resident)


def main(cfg):
    if cfg.side:
        side, dtype = cfg.side.split(",")
        folder = Path(cfg.folder)
        return (
            run_ours(cfg, folder, dtype)
            if side == "ours"
            else run_torch(cfg, folder, dtype, side == "compiled")
        )
    if cfg.model not in dream.CONFIGS:
        raise ValueError(f"--model={cfg.model}: not one of {', '.join(dream.CONFIGS)}")
    with tempfile.TemporaryDirectory() as folder:
        write_weights(Path(folder), dream.CONFIGS[cfg.model])
        for dtype in cfg.dtypes:
            rows = {}
            for name in ("ours", "eager", "compiled", "again"):
                flags = [f"--side={name.replace('again', 'ours')},{dtype}", f"--folder={folder}"]
                done = subprocess.run(
                    [sys.executable, *sys.argv, *flags],
                    check=True,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                rows[name] = json.loads(done.stdout.splitlines()[-1])
                shown = {k: v for k, v in rows[name].items() if k not in ("logits", "ids")}
                print(name, dtype, shown, flush=True)
            compare(cfg, dtype, rows)


def compare(cfg, dtype, rows):
    import torch

    file = torch.cuda.get_device_name().replace(" ", "_") if torch.cuda.is_available() else "cpu"
    again = rows.pop("again")
    for B in map(str, cfg.batches):
        rows["ours"]["forward_s"][B] += again["forward_s"][B]
    for key, seconds in again["generate_s"].items():
        rows["ours"]["generate_s"][key] += seconds
    ours, eager = (np.array(rows[name]["logits"]) for name in ("ours", "eager"))
    error = float(np.abs(ours - eager).max() / np.abs(eager).max())
    if error > (2e-5 if dtype == "float32" else 0.2):
        raise ValueError(
            f"logits differ by {error:.2g} of the largest: the two sides do not compute the same"
        )
    same = {
        key: float(np.mean(np.array(ids) == np.array(rows["eager"]["ids"][key])))
        for key, ids in rows["ours"]["ids"].items()
    }
    for name in ("eager", "compiled"):
        for what in ("forward_s", "generate_s"):
            for key, seconds in rows[name][what].items():
                theirs, mine = (
                    np.quantile(x, [0.5, 0.1, 0.9]) for x in (seconds, rows["ours"][what][key])
                )
                at = f"forward L {cfg.length}, batch {key}"
                if what == "generate_s":
                    P, B = key.split(",")
                    at = f"{cfg.max_new} tokens in {cfg.steps} steps after {P}, batch {B}"
                record(
                    file,
                    f"dream {cfg.model} {dtype} {at}: Qwen2 {name} / ours",
                    float(theirs[0] / mine[0]),
                    "ratio",
                    spread=[float(theirs[1] / mine[2]), float(theirs[2] / mine[1])],
                    ours_s=float(mine[0]),
                    theirs_s=float(theirs[0]),
                    load_s={"ours": rows["ours"]["load_s"], name: rows[name]["load_s"]},
                    peak_gib={"ours": rows["ours"]["peak_gib"], name: rows[name]["peak_gib"]},
                    logit_error=error,
                    **({"same_tokens": same[key]} if what == "generate_s" else {}),
                )


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
