"""The demo of coupled_grpo.py over several seeds: reward on the held-out splits by round, and the
time it takes.

    python bench/grpo_run.py                           # three seeds; keep the machine idle
    python bench/grpo_run.py --kinds demo shuffled coupled four --seeds {0..11} --out=out/grpo_seeds

All runs begin at weights/dream and learn from the demo's tasks; a seed sets the order of tasks and
the completions. The reward is the mean over `composed` and `phrased`, of which no task is rewarded.
"demo" is what coupled_grpo.py does, "shuffled" the same with the advantages of each group in random
order: updates of the same size that have learnt nothing. "coupled" is the demo with --score=coupled;
"four" has path scores in four groups of steps: four versions of a canvas, where coupled have three.
Differences between kinds are paired by seed. Writes the name of the folder --out with .png and, of
several kinds, .md, and an entry for each kind in cpu.json, under bench/results/.
"""

import dataclasses
import json
import multiprocessing
import os
import shlex
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
from record import RESULTS, claim, record

import coupled_grpo
import grpo
import runs

SPLITS = "composed", "phrased"  # held-out tasks
SETTINGS = "rounds", "eval_every", "eval_samples", "eval_tasks"
SCORED = "composed_reward"  # in the rows of evaluations


@dataclasses.dataclass(frozen=True)
class Config:
    out: str = "out/grpo_run"  # folder of the runs; those that are finished there are not run again
    seeds: tuple[int, ...] = (0, 1, 2)  # of tasks and completions
    # of each seed
    kinds: tuple[typing.Literal["demo", "shuffled", "coupled", "four"], ...] = ("demo",)
    rounds: int = 20  # of each run
    eval_every: int = 10  # rounds between evaluations
    eval_tasks: int = 200  # held-out tasks of each file
    eval_samples: int = 2  # completions of each held-out task
    file: str = "cpu"  # bench/results/<file>.json


def run_demo(kind, settings):
    """One run of the demo, in a process of its own."""
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(
        Path(settings["out"]).parent.absolute() / "compiled"
    )
    coupled_grpo.EVAL_SAMPLES = settings.pop("eval_samples")
    if kind == "coupled":
        settings["score"] = "coupled"
    if kind == "four":
        grpo.GROUPS = 4
    if kind == "shuffled":
        of_rewards = grpo.group_advantages
        rng = np.random.default_rng(settings["seed"])

        def shuffled(rewards, weights, group):
            found = of_rewards(rewards, weights, group)
            advantage_GN = rng.permuted(found.advantage_B.reshape(-1, group), axis=1)
            return found._replace(advantage_B=advantage_GN.reshape(-1))

        grpo.group_advantages = shuffled
    coupled_grpo.main(coupled_grpo.Config(**settings))


def finished(cfg, seed, kind):
    """The log of a run and its minutes; runs it if that is not done yet."""
    out = Path(cfg.out) / f"{kind}-{seed}"
    claim(cfg.out, {name: getattr(cfg, name) for name in SETTINGS})
    if not (out / "minutes.json").exists():
        shutil.rmtree(out, ignore_errors=True)
        started = time.perf_counter()
        settings = {name: getattr(cfg, name) for name in SETTINGS}
        settings |= {"seed": seed, "out": str(out)}
        process = multiprocessing.get_context("spawn").Process(
            target=run_demo, args=(kind, settings)
        )
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


def table(cfg, curves):
    """Of each kind the held-out reward at the start and at the end, what was gained, and how much
    more or less that is than of the first kind, each ± two standard errors of the seeds' mean.
    """
    yield f"| | before | after {cfg.rounds} rounds | gain | seeds that gain | less {cfg.kinds[0]}'s |"
    yield "|---" * 6 + "|"
    for kind in cfg.kinds:
        before_S, after_S = ends(cfg, curves, kind)
        gain_S = after_S - before_S
        above = f"{(gain_S > 0).sum()} of {len(gain_S)}"
        first_before_S, first_after_S = ends(cfg, curves, cfg.kinds[0])
        gain, less = map(with_error, (gain_S, gain_S - (first_after_S - first_before_S)))
        yield f"| {kind} | {before_S.mean():.3f} | {after_S.mean():.3f} | {gain} | {above} | {less} |"


def with_error(x_S):
    error = 2 * x_S.std(ddof=1) / len(x_S) ** 0.5 if len(x_S) > 1 else np.nan
    return f"{x_S.mean():+.3f} ± {error:.3f}"


def ends(cfg, curves, kind):
    """Held-out reward of each seed before the first round and after the last."""
    curve_SE = np.array([[reward for _, reward in curves[kind, seed]] for seed in cfg.seeds])
    return curve_SE[:, 0], curve_SE[:, -1]


def plot(cfg, curves, name):
    """Held-out reward by round, thin for each seed; the title says what was found."""
    figure, axis = plt.subplots(figsize=(7, 4.5))
    found = []
    for i, kind in enumerate(cfg.kinds):
        curve_SE2 = np.array([curves[kind, seed] for seed in cfg.seeds])
        round_E, reward_SE = curve_SE2[0, :, 0], curve_SE2[..., 1]
        axis.plot(round_E, reward_SE.T, color=f"C{i}", lw=0.7, alpha=0.6)
        axis.plot(round_E, reward_SE.mean(0), color=f"C{i}", lw=2.5, marker="o", ms=4, label=kind)
        before_S, after_S = ends(cfg, curves, kind)
        above = f"higher in {(after_S > before_S).sum()} of {len(cfg.seeds)} seeds"
        found.append(f"{kind}: {before_S.mean():.2f} → {after_S.mean():.2f}, {above}")
    axis.set_title("\n".join(found), fontsize=10, loc="left")
    axis.set(xlabel="round", ylabel="tests passed of held-out tasks")
    axis.legend(loc="upper left")
    axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(RESULTS / f"{name}.png", dpi=120)


def main(cfg):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("SIGTERM"))
    found = {(kind, seed): finished(cfg, seed, kind) for seed in cfg.seeds for kind in cfg.kinds}
    curves = {
        key: [
            (row["round"], np.mean([row[f"{name}_reward"] for name in SPLITS]))
            for row in log
            if SCORED in row
        ]
        for key, (log, _) in found.items()
    }
    name = Path(cfg.out).name
    plot(cfg, curves, name)
    text = "\n".join(table(cfg, curves))
    if len(cfg.kinds) > 1:
        command = f"`python bench/{shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}`"
        (RESULTS / f"{name}.md").write_text(
            f"{text}\n\n{len(cfg.seeds)} seeds; ± two standard errors.\n\n{command}\n"
        )
    print(text)
    for kind in cfg.kinds:
        logs = [found[kind, seed][0] for seed in cfg.seeds]
        _, after_S = ends(cfg, curves, kind)
        timed = cfg.kinds == Config.kinds  # the others may have shared the machine
        phases = ("generate_s", "score_s", "reward_s", "update_s")
        rounds = [row for log in logs for row in log if "update_s" in row]
        record(
            cfg.file,
            f"coupled-grpo demo of weights/dream, {kind}, {len(cfg.seeds)} seeds: "
            f"held-out reward after {cfg.rounds} rounds, {cfg.eval_samples} samples a task",
            float(np.median(after_S)),
            "share of tests passed",
            spread=[float(after_S.min()), float(after_S.max())],
            curves=[curves[kind, seed] for seed in cfg.seeds],
            minutes=[found[kind, seed][1] for seed in cfg.seeds] if timed else None,
            seconds_of_a_round={
                name: float(np.median([row[name] for row in rounds])) for name in phases
            }
            if timed
            else None,
        )


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
