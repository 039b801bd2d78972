"""Score against work of Dream's samplers, on a task that a tiny model learns in minutes on a CPU.

    python bench/dream_tasks.py                  # five minutes; keep the machine idle
    python bench/dream_tasks.py --train=False    # again with the model of the last run

The task, as pairs of prompt and response: `7+31415...=` asks for 7 + each digit, modulo 10, and EOS behind the last.
Makes the pairs, trains dream_tiny on them through data_prep.py and train_tpu.py, and answers prompts that are not among
them with each sampler. Work counts the slots that go through the model, in passes over the canvas: a window of a
quarter of it is a quarter of a pass. One prompt at a time, since in a batch all wait for the slowest row. Writes
cpu.json under bench/results/.
"""

import dataclasses
import json
import random
import shutil
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
import tokenizers
import tyro
from record import record

import data_prep
import model_dream as md
import train_tpu


@dataclasses.dataclass(frozen=True)
class Config:
    out: str = "out/dream_tasks"  # pairs, rows and run
    train: bool = True  # False takes the run that is there
    pairs: int = 40_000
    digits: int = 20  # of a prompt's number; the canvas holds the next multiple of 8, at least one EOS
    steps: int = 1500  # optimizer steps of 32 pairs
    prompts: int = 100  # answered with each sampler
    threshold: float = 0.9
    file: str = "cpu"  # bench/results/<file>.json
    seed: int = 0


def make_pair(rng, digits):
    k, numbers = rng.randint(0, 9), [rng.randint(0, 9) for _ in range(digits)]
    prompt = f"{k}+{''.join(map(str, numbers))}="
    return prompt, "".join(str((n + k) % 10) for n in numbers)


def main(cfg):
    out, rng = Path(cfg.out), random.Random(cfg.seed)
    canvas = cfg.digits // 8 * 8 + 8
    train = dict(make_pair(rng, cfg.digits) for _ in range(cfg.pairs))
    tests = dict(make_pair(rng, cfg.digits) for _ in range(cfg.prompts))
    assert not train.keys() & tests.keys(), "a prompt of the test is in the training pairs"
    started = time.perf_counter()
    if cfg.train:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        lines = (json.dumps({"prompt": prompt, "response": response}) + "\n" for prompt, response in train.items())
        (out / "pairs.jsonl").write_text("".join(lines))
        seq_len = 2 * (cfg.digits + 3 + canvas)  # two pairs a row
        source = str(out / "pairs.jsonl")
        data_prep.main(
            data_prep.Config(source=source, out=str(out / "rows"), seq_len=seq_len, eos_to=canvas, vocab_size=261)
        )
        train_tpu.main(
            train_tpu.Config(
                model="dream_tiny", data=str(out / "rows"), out=str(out / "run"), seq_len=seq_len, batch_size=16,
                micro_batch=16, remat="none", steps=cfg.steps, eval_every=cfg.steps // 4, eval_rows=32, log_every=50,
                prompt=next(iter(tests)), seed=cfg.seed,
            )
        )  # fmt: skip
    train_s = time.perf_counter() - started
    model = md.load(out / "run")
    tokenizer = tokenizers.Tokenizer.from_file(str(out / "run" / "tokenizer.json"))
    size = tokenizer.token_to_id("<|mask|>")
    common = {"vocab": size, "alg": "maskgit_plus"}
    samplers = {
        "one token a step": {},
        "four tokens a step": {"tokens_per_step": 4.0},
        "threshold": {"threshold": cfg.threshold},
        "prefix cache": {"block_length": 8, "cache": "prefix"},
        "prefix cache, threshold": {"block_length": 8, "cache": "prefix", "threshold": cfg.threshold},
        "dual cache, threshold": {"block_length": 8, "cache": "dual", "threshold": cfg.threshold},
        "dual cache, threshold, one block": {"block_length": canvas, "cache": "dual", "threshold": cfg.threshold},
    }
    results = {}
    for name, settings in samplers.items():
        rule, right, work = md.Sampling(**common | settings), [], []
        for prompt, response in tests.items():
            ids = tokenizer.encode(prompt).ids
            (row,), stats = md.generate(model, [ids], canvas, rule)
            slots = md.canvas([ids], canvas, model.cfg)[0].shape[1]
            text = tokenizer.decode(row[len(ids) :], skip_special_tokens=False).partition("<|endoftext|>")[0]
            right.append(text == response)
            work.append(sum(stats["windows"]) / slots)
        results[name] = {"exact_match": float(np.mean(right)), "passes": float(np.mean(work))}
        results[name]["p10_p90"] = np.quantile(work, [0.1, 0.9]).tolist()
        print(f"{name:34} exact match {np.mean(right):.3f} | {np.mean(work):.2f} passes over the canvas", flush=True)
    plain, best = results["one token a step"], results["dual cache, threshold"]
    record(
        cfg.file,
        "dream tiny digit task: passes of one token a step / passes of dual cache and threshold",
        plain["passes"] / best["passes"],
        "ratio",
        spread=[plain["passes"] / p for p in best["p10_p90"][::-1]],
        prompts=cfg.prompts,
        canvas=canvas,
        samplers=results,
        train={"pairs": cfg.pairs, "steps": cfg.steps, "seconds": train_s if cfg.train else None},
    )


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__, config=(tyro.conf.FlagConversionOff,)))
