"""The demo of coupled_grpo.py over several seeds: held-out reward by round, and the time it takes.

    python bench/grpo_run.py                                   # three seeds, 15 minutes; keep the machine idle
    python bench/grpo_run.py --kinds naive sure replayed --rounds=20 --out=out/grpo_rollouts    # fast rollouts
    python bench/grpo_run.py --kinds coupled independent coupled_elbo trajectory --seeds 0 1 2 3 4 5 6 7 8 9 10 11 \
        --rounds=12 --eval_every=12 --eval_samples=8 --out=out/grpo_paired     # estimators; two hours of one core

A seed is pre-training, tasks drawn and completions, all anew; the held-out tasks are the same. Their constants are in
pre-training and never rewarded; the figure for a constant that is in neither stands beside it. With several kinds of
runs each starts from the same pre-trained model, and differences from the first kind are paired by seed: runs differ by
more than kinds do. Independent masks show a token in none, one or both of the two masked versions of a canvas; the
others are --estimator of coupled_grpo.py. All of them pass over three canvases of a completion. Writes the name of the
folder --out with .png and an entry for each kind in cpu.json under bench/results/.

The last three kinds fill all that is sure enough at a low threshold and a low temperature, and learn fast. "naive" asks
how likely the drawn token is, "sure" how likely the likeliest is; "replayed" does that, and learns from the replayed
path.
"""

import dataclasses
import json
import multiprocessing
import shutil
import signal
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

import coupled_grpo
import grpo
import runs


@dataclasses.dataclass(frozen=True)
class Config:
    out: str = "out/grpo_run"  # folder of the runs; those that are finished there are not run again
    seeds: tuple[int, ...] = (0, 1, 2)  # of pre-training, tasks and completions
    # how completions are masked, or with the last three how they are written; a run of each kind and seed
    kinds: tuple[
        typing.Literal["coupled", "independent", "coupled_elbo", "trajectory", "naive", "sure", "replayed"], ...
    ] = ("coupled",)
    rounds: int = 40  # of each run
    eval_every: int = 5  # rounds between evaluations
    eval_samples: int = 2  # completions of each held-out task
    file: str = "cpu"  # bench/results/<file>.json


def fast(score, **settings):
    return {"lr": 1e-3, "sampling": coupled_grpo.Sampling(0.5, 1.0, 16, threshold=0.5, score=score)} | settings


KINDS = {  # what differs from the demo's settings
    "coupled": {},
    "independent": {},
    "coupled_elbo": {"estimator": "coupled_elbo"},
    "trajectory": {"estimator": "trajectory"},
    "naive": fast("drawn"),
    "sure": fast("distribution"),
    "replayed": fast("distribution", estimator="trajectory", replay=0),
}


def draw_independent(key, round, *rest):
    """The masks of coupled_grpo.draw_masks, and beside them uniforms of their own for the third version of a canvas."""
    return grpo.draw_masks(key, round, *rest) | {"other_BC": grpo.draw_masks(key, 2, *rest)["u_BC"]}


def run_demo(kind, settings):
    """One run of the demo, in a process of its own."""
    coupled_grpo.main(
        coupled_grpo.Config(**settings, **KINDS[kind]), draw_independent if kind == "independent" else grpo.draw_masks
    )


def finished(cfg, seed, kind):
    """The log of a run and its minutes; runs it if that is not done yet."""
    out, base = Path(cfg.out) / f"{kind}-{seed}", Path(cfg.out) / f"{cfg.kinds[0]}-{seed}" / "base"
    if not (out / "minutes.json").exists():
        shutil.rmtree(out, ignore_errors=True)
        if kind != cfg.kinds[0]:
            shutil.copytree(base, out / "base")
        started = time.perf_counter()
        settings = {name: getattr(cfg, name) for name in ("rounds", "eval_every", "eval_samples")}
        settings |= {"seed": seed, "out": str(out), "compile_cache": str(Path(cfg.out).absolute() / "compiled")}
        process = multiprocessing.get_context("spawn").Process(target=run_demo, args=(kind, settings))
        process.start()
        try:
            process.join()
        finally:  # ends with us, also when we are told to
            process.terminate()
        if process.exitcode:
            raise RuntimeError(f"the run {out} failed; what it printed says why")
        (out / "minutes.json").write_text(json.dumps((time.perf_counter() - started) / 60))
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return log, json.loads((out / "minutes.json").read_text())


def gains(cfg, curves, kind):
    """The last held-out reward of each seed, less that of the first kind."""
    return np.array([curves[kind, seed][-1][1] - curves[cfg.kinds[0], seed][-1][1] for seed in cfg.seeds])


def plot(cfg, curves):
    """Held-out reward by round, thin for a seed; and with several kinds what each seed gains over the first of them."""
    figure, axes = plt.subplots(1, 2 if len(cfg.kinds) > 1 else 1, figsize=(9, 4), squeeze=False)
    left, *right = axes[0]
    for i, kind in enumerate(cfg.kinds):
        curve_SE2 = np.array([curves[kind, seed] for seed in cfg.seeds])
        round_E, reward_SE = curve_SE2[0, :, 0], curve_SE2[..., 1]
        left.plot(round_E, reward_SE.T, color=f"C{i}", lw=0.7, alpha=0.6)
        left.plot(round_E, reward_SE.mean(0), color=f"C{i}", lw=2.5, marker="o", ms=3, label=kind)
        for axis in right if i else ():
            gain_S = gains(cfg, curves, kind)
            error = 2 * gain_S.std(ddof=1) / len(gain_S) ** 0.5 if len(gain_S) > 1 else 0
            axis.plot([i] * len(gain_S), gain_S, ".", color=f"C{i}", alpha=0.5)
            axis.errorbar(i + 0.15, gain_S.mean(), error, fmt="o", color=f"C{i}", capsize=4)
    left.set(xlabel="round", ylabel="tests passed, 72 held-out tasks", ylim=(0, 1))
    left.legend(loc="upper left")
    for axis in right:
        axis.axhline(0, color="C0", lw=1)
        axis.set_xticks(range(1, len(cfg.kinds)), cfg.kinds[1:])
        axis.set(ylabel=f"after the last round, less {cfg.kinds[0]}", xlim=(0.5, len(cfg.kinds) - 0.4))
    for axis in axes[0]:
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(RESULTS / f"{Path(cfg.out).name}.png", dpi=120)


def main(cfg):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("SIGTERM"))
    found = {(kind, seed): finished(cfg, seed, kind) for seed in cfg.seeds for kind in cfg.kinds}
    curves = {
        key: [(row["round"], row["heldout_reward"]) for row in log if "heldout_reward" in row]
        for key, (log, _) in found.items()
    }
    plot(cfg, curves)
    for kind in cfg.kinds:
        what = f"{kind}, {len(cfg.seeds)} seeds"
        reward_SR = np.array([[reward for _, reward in curves[kind, seed]] for seed in cfg.seeds])
        rows = [row for seed in cfg.seeds for row in found[kind, seed][0] if "update_s" in row]
        phases = ("generate_s", "score_s", "reward_s", "update_s")
        signs = {  # of a policy that collapses, in the last five rounds of each seed
            name: [
                float(np.mean([row[name] for row in found[kind, seed][0] if name in row][-5:])) for seed in cfg.seeds
            ]
            for name in ("duplicates", "answer_entropy", "tokens_per_step", "drift_k3", "constant_groups")
        }
        unseen = [
            [row["unseen_reward"] for row in found[kind, seed][0] if "unseen_reward" in row] for seed in cfg.seeds
        ]
        gain_S = gains(cfg, curves, kind)
        error = 2 * gain_S.std(ddof=1) / len(gain_S) ** 0.5 if len(gain_S) > 1 else np.nan
        print(f"{what}: {reward_SR[:, -1].mean():.3f} after; less {cfg.kinds[0]}: {gain_S.mean():+.3f} ± {error:.3f}")
        timed = cfg.kinds == Config.kinds  # the others may have shared the machine
        record(
            cfg.file,
            f"coupled-grpo demo, {what}: held-out reward after {cfg.rounds} rounds",
            float(np.median(reward_SR[:, -1])),
            "share of tests passed",
            spread=[float(reward_SR[:, -1].min()), float(reward_SR[:, -1].max())],
            before=reward_SR[:, 0].tolist(),
            after=reward_SR[:, -1].tolist(),
            unseen_before=[curve[0] for curve in unseen],  # with a constant that was in neither stage
            unseen_after=[curve[-1] for curve in unseen],
            signs=signs,
            rounds=[done for done, _ in curves[kind, cfg.seeds[0]]],
            curves=reward_SR.tolist(),
            less_the_first_kind=None if kind == cfg.kinds[0] else [gain_S.mean(), error],  # two standard errors
            minutes=[found[kind, seed][1] for seed in cfg.seeds] if timed else None,
            seconds_of_a_round={name: float(np.median([row[name] for row in rows])) for name in phases}
            if timed
            else None,
        )


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
