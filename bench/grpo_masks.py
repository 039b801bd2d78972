"""Variance of a completion's score under coupled masks and under independent ones, with the same
number of passes.

    python bench/grpo_masks.py    # after the demo, which writes the tasks

Scores the first --length tokens of solutions of the demo's training tasks many times, each time
under fresh masks: three forward passes either way. Both estimate the same mean; their variances
differ. These are of a token's score and of the sum over a completion, averaged over tokens and
completions. The gradient's variance is another one: most of it comes from the completions.
Writes an entry of cpu.json under bench/results/.
"""

import dataclasses
import functools
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import grpo_run
import jax
import numpy as np
import tokenizers
from record import record

import checkpoints
import grpo
import model_dream
import runs
import sample_dream


@dataclasses.dataclass(frozen=True)
class Config:
    ckpt: str = "weights/dream"  # run of train_dream.py, or a folder of convert_weights.py
    tasks: str = "out/grpo/world/constants.jsonl"  # TinyPython's tasks, with their solutions
    completions: int = 32  # right answers that are scored
    draws: int = 256  # masks drawn for each completion
    length: int = 16  # tokens of a completion
    file: str = "cpu"  # bench/results/<file>.json


def main(cfg):
    model, _ = checkpoints.load(model_dream, cfg.ckpt, dtype="float32")
    tokenizer = tokenizers.Tokenizer.from_file(f"{cfg.ckpt}/tokenizer.json")
    tasks = [json.loads(line) for line in Path(cfg.tasks).read_text().splitlines()][
        : cfg.completions
    ]
    prompts = [tokenizer.encode(task["prompt"]).ids for task in tasks]
    token_BL, see_BL = sample_dream.canvas(prompts, cfg.length, model.cfg)
    for row, task in zip(token_BL, tasks, strict=True):
        ids = tokenizer.encode(task["canonical_solution"]).ids
        row[-cfg.length :] = (ids + [model.cfg.eos_id] * cfg.length)[: cfg.length]
    counted_BC = grpo.completion_mask(token_BL[:, -cfg.length :], model.cfg.eos_id)

    fixed, results = {"token_BL": token_BL, "see_BL": see_BL, "counted_BC": counted_BC}, {}
    estimators = {
        "coupled": (grpo.draw_masks, grpo.coupled_scores),
        "independent": (
            grpo_run.draw_uniforms,
            functools.partial(grpo_run.scores_by, "independent"),
        ),
    }
    for name, (draw, scores_of) in estimators.items():

        @jax.jit
        def scores(masks, scores_of=scores_of):
            return scores_of(model, fixed | masks, model.cfg.mask_id)[0]

        masks = (draw(jax.random.key(0), i, len(tasks), cfg.length) for i in range(cfg.draws))
        draws = [np.asarray(scores(mask), np.float64) for mask in masks]
        score_NBC = np.stack(draws) * counted_BC
        per_token = score_NBC.var(0)[counted_BC].mean()
        results[name] = {
            "token": float(per_token),
            "completion": float(score_NBC.sum(-1).var(0).mean()),
        }
        results[name]["mean"] = float(score_NBC.sum(-1).mean())
        print(name, results[name], flush=True)
    record(
        cfg.file,
        "coupled-grpo: variance of a token's score, independent masks / coupled masks",
        results["independent"]["token"] / results["coupled"]["token"],
        "ratio",
        completion=results["independent"]["completion"] / results["coupled"]["completion"],
        variances=results,
        draws=cfg.draws,
    )


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    runs.command(main, Config, __doc__)
