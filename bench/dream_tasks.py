"""Score against work of Dream's samplers, on small Python tasks that a tiny model learns in two minutes on a CPU.

    python bench/dream_tasks.py                  # four minutes; keep the machine idle
    python bench/dream_tasks.py --no-train       # again with the model of the last run

The tasks are those of coupled_grpo.py's demo: a function's head and docstring, three tests. Trains dream_tiny on right
answers and completes heads that are not among them with each sampler, at generate.py's temperature and top-p; the
sandbox runs the tests. Work counts the slots that go through the model, in passes over the canvas: a window of a
quarter of it is a quarter of a pass. One prompt at a time, since in a batch all wait for the slowest row. Writes
cpu.json under bench/results/.
"""

import dataclasses
import json
import shutil
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax
import numpy as np
import tokenizers
from record import record

import data_prep
import generate
import model_dream
import rl_tasks
import runs
import sample_dream
import sandbox
import train_tpu


@dataclasses.dataclass(frozen=True)
class Config:
    out: str = "out/dream_tasks"  # folder of pairs, rows and run
    train: bool = True  # --no-train takes the run that is there
    steps: int = 500  # optimiser steps of 16 rows of 128 tokens
    canvas: int = 32  # tokens to fill; an answer has 6 to 14 and EOS behind it
    prompts: int = 96  # held-out tasks, completed with each sampler
    threshold: float = 0.9  # of the samplers that fill all tokens of at least this probability at once
    file: str = "cpu"  # bench/results/<file>.json
    seed: int = 0  # of the training


def main(cfg):
    out, tasks = Path(cfg.out), rl_tasks.make_tasks(0)
    tests, train = tasks[: cfg.prompts], tasks[cfg.prompts :]
    started = time.perf_counter()
    if cfg.train:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        pairs = [{"prompt": task["prompt"], "response": task["right"] + "\n"} for _ in range(20) for task in train]
        (out / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        source, rows = str(out / "pairs.jsonl"), str(out / "rows")
        data_prep.main(data_prep.Pairs(source=source, out=rows, seq_len=128, eos_to=cfg.canvas, vocab_size=512))
        train_tpu.main(
            train_tpu.Config(
                model="dream_tiny", data=rows, out=str(out / "run"), seq_len=128, batch_size=16, micro_batch=16,
                remat="none", steps=cfg.steps, eval_every=cfg.steps, log_every=50, prompt=tests[0]["prompt"],
                seed=cfg.seed,
            )
        )  # fmt: skip
    train_s = time.perf_counter() - started
    model, _ = runs.load(model_dream, out / "run")
    tokenizer = tokenizers.Tokenizer.from_file(str(out / "run" / "tokenizer.json"))
    common = {"vocab": tokenizer.token_to_id("<|mask|>"), "eos_ids": (model.cfg.eos_id,)}
    common |= {name: generate.DEFAULTS["dream"][name] for name in ("temperature", "top_p")}
    samplers = {
        "one token a step": {},
        "four tokens a step": {"tokens_per_step": 4.0},
        "threshold": {"threshold": cfg.threshold},
        "prefix cache": {"block_length": 8, "cache": "prefix"},
        "prefix cache, threshold": {"block_length": 8, "cache": "prefix", "threshold": cfg.threshold},
        "dual cache, threshold": {"block_length": 8, "cache": "dual", "threshold": cfg.threshold},
        "dual cache, threshold, one block": {"block_length": cfg.canvas, "cache": "dual", "threshold": cfg.threshold},
    }
    results = {}
    for name, settings in samplers.items():
        rule, programs, work = sample_dream.Sampling(**common | settings), [], []
        for number, task in enumerate(tests):
            ids = tokenizer.encode(task["prompt"]).ids
            (row,), stats = sample_dream.generate(model, [ids], cfg.canvas, rule, jax.random.key(number))
            slots = sample_dream.canvas([ids], cfg.canvas, model.cfg)[0].shape[1]
            programs.append(task["prompt"] + tokenizer.decode(row[len(ids) :]))
            work.append(sum(stats["windows"]) / slots)
        passed = [result.rate == 1 for result in sandbox.run_tests(programs, [task["test_cases"] for task in tests])]
        results[name] = {"pass": float(np.mean(passed)), "passes": float(np.mean(work))}
        results[name]["p10_p90"] = np.quantile(work, [0.1, 0.9]).tolist()
        print(f"{name:34} pass@1 {np.mean(passed):.3f} | {np.mean(work):.2f} passes over the canvas", flush=True)
    plain, best = results["one token a step"], results["dual cache, threshold"]
    record(
        cfg.file,
        "dream tiny, small Python tasks: passes of one token a step / passes of dual cache and threshold",
        plain["passes"] / best["passes"],
        "ratio",
        spread=[plain["passes"] / p for p in best["p10_p90"][::-1]],
        prompts=cfg.prompts,
        canvas=cfg.canvas,
        samplers=results,
        train={"steps": cfg.steps, "seconds": train_s if cfg.train else None},
    )


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
