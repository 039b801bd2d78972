"""The demo of coupled_grpo.py over several seeds: held-out reward by round, and the time it takes.

    python bench/grpo_run.py                                   # three seeds, 15 minutes; keep the machine idle
    python bench/grpo_run.py --masks coupled independent       # the same from masks that are not coupled, too

A seed is pre-training, tasks drawn and completions, all anew; the held-out tasks are the same. Their constants are in
pre-training and never rewarded; the figure for a constant that is in neither stands beside it. With several kinds of
masks each starts from the same pre-trained model. Independent masks show a token in none, one or both of the two masked
versions of a canvas, which gives the same expectation; what the two kinds differ by is less than runs differ by, so
compare them over a dozen seeds. Writes grpo_run.png and an entry of cpu.json under bench/results/.
"""

import dataclasses
import json
import multiprocessing
import shutil
import sys
import time
import typing
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from record import RESULTS, record

import coupled_grpo as grpo
import runs


@dataclasses.dataclass(frozen=True)
class Config:
    out: str = "out/grpo_run"  # folder of the runs; those that are finished there are not run again
    seeds: tuple[int, ...] = (0, 1, 2)  # one run each
    masks: tuple[typing.Literal["coupled", "independent"], ...] = ("coupled",)  # how completions are masked
    rounds: int = 40  # of each run
    file: str = "cpu"  # bench/results/<file>.json


def draw_independent(key, round, *rest):
    """The masks of coupled_grpo.draw_masks, and beside them uniforms of their own for the third version of a canvas."""
    return grpo.draw_masks(key, round, *rest) | {"other_BC": grpo.draw_masks(key, 2, *rest)["u_BC"]}


def run_demo(masks, settings):
    """One run of the demo, in a process of its own."""
    grpo.main(grpo.Config(**settings), grpo.draw_masks if masks == "coupled" else draw_independent)


def finished(cfg, seed, masks):
    """The log of a run and its minutes; runs it if that is not done yet."""
    out, base = Path(cfg.out) / f"{masks}-{seed}", Path(cfg.out) / f"{cfg.masks[0]}-{seed}" / "base"
    if not (out / "minutes.json").exists():
        shutil.rmtree(out, ignore_errors=True)
        if masks != cfg.masks[0]:
            shutil.copytree(base, out / "base")
        started = time.perf_counter()
        settings = {"seed": seed, "out": str(out), "rounds": cfg.rounds, "compile_cache": ""}
        process = multiprocessing.get_context("spawn").Process(target=run_demo, args=(masks, settings))
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"the run {out} failed; what it printed says why")
        (out / "minutes.json").write_text(json.dumps((time.perf_counter() - started) / 60))
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return log, json.loads((out / "minutes.json").read_text())


def main(cfg):
    found = {(masks, seed): finished(cfg, seed, masks) for seed in cfg.seeds for masks in cfg.masks}
    curves = {
        key: [(row["round"], row["heldout_reward"]) for row in log if "heldout_reward" in row]
        for key, (log, _) in found.items()
    }
    figure, axis = plt.subplots(figsize=(7, 4))
    for (masks, seed), curve in curves.items():
        style = {"color": f"C{cfg.seeds.index(seed)}", "ls": "-" if masks == cfg.masks[0] else "--"}
        axis.plot(*zip(*curve, strict=True), marker="o", ms=3, label=f"{masks} masks, seed {seed}", **style)
    axis.set(xlabel="round", ylabel="tests passed, 72 tasks with constants never rewarded", ylim=(0, 1))
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(RESULTS / "grpo_run.png", dpi=120)
    for masks in cfg.masks:
        reward_SR = np.array([[reward for _, reward in curves[masks, seed]] for seed in cfg.seeds])
        rows = [row for seed in cfg.seeds for row in found[masks, seed][0] if "update_s" in row]
        phases = ("generate_s", "score_s", "reward_s", "update_s")
        unseen = [
            [row["unseen_reward"] for row in found[masks, seed][0] if "unseen_reward" in row] for seed in cfg.seeds
        ]
        record(
            cfg.file,
            f"coupled-grpo demo, {masks} masks: held-out reward after {cfg.rounds} rounds",
            float(np.median(reward_SR[:, -1])),
            "share of tests passed",
            spread=[float(reward_SR[:, -1].min()), float(reward_SR[:, -1].max())],
            before=reward_SR[:, 0].tolist(),
            after=reward_SR[:, -1].tolist(),
            unseen_before=[curve[0] for curve in unseen],  # with a constant that was in neither stage
            unseen_after=[curve[-1] for curve in unseen],
            rounds=[done for done, _ in curves[masks, cfg.seeds[0]]],
            curves=reward_SR.tolist(),
            minutes=[found[masks, seed][1] for seed in cfg.seeds] if masks == cfg.masks[0] else None,
            seconds_of_a_round={name: float(np.median([row[name] for row in rows])) for name in phases},
        )


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
