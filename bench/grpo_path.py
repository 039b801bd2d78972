"""Do Coupled-GRPO's scores point where the sampler's own path points? Prints.

    python bench/grpo_path.py     # weights/dream; 20 minutes of two cores

For rollouts over the whole canvas and in blocks, a token a pass: the cosine of the gradient of the
first update, by coupled scores and by path scores in four and eight groups of steps, with that by
path scores of every step, which is exact but for the cache of blocks. All take the same
completions, rewards and micro-batches; mean ± two standard errors over sets of completions. Writes
an entry for each block length into cpu.json.
"""

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from record import record

import coupled_grpo
import grpo
import model_dream as md
import sample_dream
import sandbox

BLOCKS = 0, 16, 8, 4  # block lengths of rollouts; 0: the whole canvas
SETS = 6  # rounds of completions
EXACT = "path of every step"  # in more groups than there are steps
GROUPS = {"coupled": 0, "path in 4 groups": 4, "path in 8 groups": 8, EXACT: 1000}


def gradients(trainer, number):
    """The gradient of each score, flat and of length 1, of the completions of round `number`."""
    cfg = trainer.cfg
    task_B = np.repeat(np.arange(number * cfg.tasks, (number + 1) * cfg.tasks), cfg.group)
    key = jax.random.key(number)
    batch = trainer.rollout(trainer.tasks, task_B, key)
    reward_BF = sandbox.score(batch.rows, {"code": sandbox.find_reward("code")})
    advantages = grpo.group_advantages(reward_BF, (1.0,), cfg.group)
    row_R = np.flatnonzero(~advantages.constant_B)
    B, C = batch.arrays["counted_BC"].shape
    more = {"advantage_B": advantages.advantage_B.astype(np.float32)}
    more["old_BC"] = np.zeros((B, C), np.float32)  # "first": not read
    found = {}
    for name, groups in GROUPS.items():
        view = jax.device_get(grpo.draw_masks(key, 0, B, C, cfg.group))
        grpo.GROUPS = min(groups, C)
        if groups:
            token_BL = batch.arrays["token_BL"]
            token_BL, group_BL = grpo.path_of(trainer.record, token_BL, trainer.mask_id)
            view = {"token_BL": token_BL, "group_BC": group_BL[:, -C:]}
        total = jax.tree.map(jnp.zeros_like, trainer.trained)
        for row_N in grpo.micro_batches(row_R, cfg.group, 1):
            inputs = trainer.to_devices(batch, row_N, more | view) | {"first": True}
            total, _ = trainer.programs[name](trainer.trained, {}, total, inputs)
        flat = np.concatenate([np.ravel(x) for x in jax.tree.leaves(total)], dtype=float)
        found[name] = flat / np.linalg.norm(flat)
    return found


def trainer_of(block_length):
    """The demo's trainer with rollouts in such blocks, that keeps the sampler's last record."""
    tasks = coupled_grpo.DEMO / "tasks" / "train.jsonl"
    steps = 0 if block_length else coupled_grpo.PRESETS["max_new"][0]
    flags = coupled_grpo.Config(
        prompts=str(tasks), block_length=block_length, steps=steps, score="coupled"
    )
    cfg = coupled_grpo.settle(flags, 1)
    model_cfg = md.read_config(cfg.ckpt)
    tokenizer = sample_dream.load_tokenizer(cfg.ckpt, model_cfg)
    files = [coupled_grpo.Tasks(cfg, model_cfg, tokenizer, cfg.prompts)]
    trainer = coupled_grpo.Trainer(cfg, model_cfg, tokenizer, files, None)
    trainer.rule = dataclasses.replace(trainer.rule, history=True)
    trainer.mask_id = model_cfg.mask_id
    fill = trainer.fill

    def fill_and_keep(*canvas):
        token_BL, stats = fill(*canvas)
        trainer.record = stats["record"]
        return token_BL, stats

    trainer.fill = fill_and_keep
    graph, _ = grpo.graphs_of(model_cfg, trainer.dtype, True)
    how = graph, grpo.make_optimizer(cfg.lr), model_cfg.mask_id, grpo.Loss(0.0)
    trainer.programs = {name: grpo.make_programs(*how)[1] for name in GROUPS}
    return trainer


def main():
    for block_length in BLOCKS:
        trainer = trainer_of(block_length)
        sets = [gradients(trainer, number) for number in range(SETS)]
        where = f"blocks of {block_length}" if block_length else "the whole canvas"
        what = f"coupled-grpo, weights/dream, rollouts in {where}: cosine with the exact path"
        cosines = {}  # of each score: mean and two standard errors
        for name in GROUPS:
            cosine_S = np.array([found[name] @ found[EXACT] for found in sets])
            cosines[name] = [cosine_S.mean(), 2 * cosine_S.std(ddof=1) / SETS**0.5]
        record("cpu", what, cosines["path in 8 groups"][0], "cosine", cosines=cosines, sets=SETS)


if __name__ == "__main__":
    main()
