"""The demo of coupled_grpo.py over several seeds: reward on the held-out splits by round, and the
time it takes.

    python bench/grpo_run.py                                   # three seeds, 15 minutes; keep the machine idle
    python bench/grpo_run.py --seeds 0 1 2 3 4 5 6 7 8 9 10 11 --out=out/grpo_seeds    # 12 seeds; an hour
    python bench/grpo_run.py --kinds coupled shuffled --seeds 0 1 2 3 4 5 --out=out/grpo_signal    # is there a signal?
    python bench/grpo_run.py --kinds naive sure --rounds=20 --out=out/grpo_rollouts    # fast rollouts
    python bench/grpo_run.py --kinds coupled independent coupled_elbo --seeds 0 1 2 3 4 5 6 7 8 9 10 11 \\
        --rounds=12 --eval_every=12 --eval_samples=8 --out=out/grpo_paired     # estimators; two hours of one core
    python bench/grpo_run.py --kinds coupled_alone d1 count espo spg gdpo left_to_right --out=out/grpo_published \\
        --seeds 0 1 2 3 4 5 6 7 8 9 10 11 --rounds=12 --eval_every=12 --eval_samples=8    # published ones; four hours

All runs begin at weights/dream and learn from TinyPython's split `constants`; a seed sets the order
of tasks and the completions. The reward is the mean over `composed` and `phrased`, of which no task
is rewarded. With several kinds of runs, differences from the first kind are paired by seed. All
estimators of a comparison take as many forward passes, but for espo: three updates a round and ten
passes where the others take two and nine. Writes the name of the folder --out with .png and, of
several kinds, .md, and an entry for each kind in cpu.json, under bench/results/.

"coupled" is what coupled_grpo.py does, "shuffled" the same with the advantages of each group in
random order: updates of the same size that have learnt nothing. Independent masks show a token in
none, one or both of the two masked versions of a canvas; "coupled_elbo" weighs coupled masks so
that the mean score is the ELBO. The other scores of `views_of` are those of published methods, with
the ratio that each has, or none, and without a KL divergence, as "coupled_alone": its weight means
another thing for each.

The last two kinds fill positions at a low threshold and a low temperature, and learn fast. "naive"
compares the threshold with the probability of the drawn token, "sure", as coupled_grpo.py, with the
maximum of the distribution.
"""

import dataclasses
import functools
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

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from record import RESULTS, claim, record

import coupled_grpo
import grpo
import runs

FAST = {"lr": 1e-4, "temperature": 0.5, "threshold": 0.5}
KINDS = {  # what differs from the demo's settings
    "coupled": {},
    "shuffled": {},
    "independent": {},
    "coupled_elbo": {},
    "coupled_alone": {"beta": 0.0},
    "d1": {"beta": 0.0},
    "count": {"beta": 0.0},
    "espo": {"beta": 0.0, "iterations": 3},  # of two canvases
    "spg": {"beta": 0.0},
    "gdpo": {"beta": 0.0},
    "left_to_right": {"beta": 0.0},
    "naive": FAST,
    "sure": FAST,
}
PUBLISHED = "d1", "count", "espo", "spg", "gdpo", "left_to_right"
SPLITS = "composed", "phrased"  # held-out tasks
SCORED = "composed_reward"  # in the rows of evaluations
SCORED_HERE = "independent", "coupled_elbo", *PUBLISHED  # by scores_by


@dataclasses.dataclass(frozen=True)
class Config:
    out: str = "out/grpo_run"  # folder of the runs; those that are finished there are not run again
    seeds: tuple[int, ...] = (0, 1, 2)  # of tasks and completions
    # how completions are scored, or for the last two how they are generated; a run of each kind and
    # seed
    kinds: tuple[typing.Literal[*KINDS], ...] = ("coupled",)
    rounds: int = 10  # of each run
    eval_every: int = 5  # rounds between evaluations
    eval_samples: int = 2  # completions of each held-out task
    file: str = "cpu"  # bench/results/<file>.json


# ---- estimators ------------------------------------------------------------------------------------------------------


def draw_uniforms(key, iteration, rows, columns, share=1):
    """{"u_BKC", "prompt_BKP", "t_BK"}: uniforms of three canvases of each completion, of the demo's
    prompt before them, and one for each canvas; {"ratio_B"}, that of coupled masks, one for every
    `share` rows.
    """
    own = jax.random.split(jax.random.fold_in(key, iteration), 3)
    shapes = {
        "u_BKC": (columns,),
        "prompt_BKP": (coupled_grpo.PRESETS["demo"]["max_prompt"],),
        "t_BK": (),
    }
    uniforms = {
        n: jax.random.uniform(k, (rows, 3, *shapes[n])) for n, k in zip(shapes, own, strict=True)
    }
    return uniforms | {"ratio_B": grpo.draw_masks(key, iteration, rows, columns, share)["ratio_B"]}


def views_of(kind, u_BKC, t_BK, counted_BC):
    """(mask_BKC, weight_BKC) of an estimator: its score is the sum over k of weight * log p where
    masked.

    "independent" masks all of the completion, the share r = 0.2 + 0.6 t and, drawn anew, the share
    1 - r, of weights 1/2, 1 / 2r and 1 / (2 - 2r); "coupled_elbo" all of it, m tokens and the other
    C - m, of weights 1 / C, (C - 1) / 2m and (C - 1) / (2C - 2m). d1 masks all of the completion,
    and some of its prompt. "count" (VRPO, BGPO) and SPG mask m of its C tokens, of weight C / m,
    with m from each third of 1 .. C or three times at random; ESPO m in 0 .. C, and the others, of
    weight (C + 1) / m; GDPO xC at the nodes x of a quadrature, of weight 1 / x. left_to_right
    (JustGRPO) has a canvas for each token, with MASK from there on: one is drawn from each third of
    the completion. Refs: see grpo_ruler.py.
    """
    B, K, C = u_BKC.shape
    if kind == "independent":
        ratio_B1 = 0.2 + 0.6 * t_BK[:, :1]
        masks = jnp.ones((B, C), bool), u_BKC[:, 0] < ratio_B1, u_BKC[:, 1] >= ratio_B1
        weight_BK = jnp.concatenate([jnp.ones((B, 1)), 1 / ratio_B1, 1 / (1 - ratio_B1)], 1) / 2
        return jnp.stack(masks, 1), jnp.broadcast_to(weight_BK[..., None], u_BKC.shape)
    rank_BKC, third_BK = u_BKC.argsort(-1).argsort(-1), (t_BK[:, :1] + jnp.arange(K)) / K
    if kind == "coupled_elbo":
        m_B1 = 1 + jnp.floor(t_BK[:, :1] * (C - 1))
        masks = jnp.ones((B, C), bool), rank_BKC[:, 0] < m_B1, rank_BKC[:, 0] >= m_B1
        weight_BK = jnp.concatenate(
            [jnp.full((B, 1), 1 / C), (C - 1) / 2 / m_B1, (C - 1) / 2 / (C - m_B1)], 1
        )
        return jnp.stack(masks, 1), jnp.broadcast_to(weight_BK[..., None], u_BKC.shape)
    if kind == "d1":
        return jnp.ones((B, K, C), bool), jnp.full((B, K, C), 1 / K)
    if kind == "left_to_right":
        ends_B1, column_C = counted_BC.sum(1, keepdims=True), jnp.arange(C)
        at_BK1 = jnp.floor(third_BK * ends_B1)[..., None]
        return column_C >= at_BK1, (column_C == at_BK1) * ends_B1[..., None] / K
    if kind == "espo":
        m_B1 = jnp.floor(t_BK[:, :1] * (C + 1))
        two_BKC = jnp.stack([rank_BKC[:, 0] < m_B1, rank_BKC[:, 0] >= m_B1], 1)
        return two_BKC, jnp.broadcast_to(
            (C + 1) / 2 / two_BKC.sum(-1, keepdims=True).clip(1), two_BKC.shape
        )
    if kind == "gdpo":
        node_K, weight_K = np.polynomial.legendre.leggauss(K)
        x_K1 = (1 + node_K[:, None]) / 2
        weight_BKC = jnp.broadcast_to(weight_K[:, None] / 2 / x_K1, u_BKC.shape)
        return rank_BKC < np.floor(x_K1 * C), weight_BKC
    m_BK1 = 1 + jnp.floor((third_BK if kind == "count" else t_BK) * C)[..., None]
    return rank_BKC < m_BK1, jnp.broadcast_to(C / m_BK1 / K, u_BKC.shape)


def spg_score(logp_BKC, mask_BKC, weight_BKC, worse_B1):
    """What was worse than its group is pushed down by half an upper score, the mean over its tokens
    of the logarithm of the mean of weight * p^1.5, over 1.5; and by half its lower score, by which
    what was better is pushed up.
    """
    lower_BC, seen_BC = (weight_BKC * mask_BKC * logp_BKC).sum(1), mask_BKC.any(1)
    log_BKC = jnp.where(mask_BKC, 1.5 * logp_BKC + jnp.log(weight_BKC), -jnp.inf)
    log_BC = jax.nn.logsumexp(jnp.where(seen_BC[:, None], log_BKC, 0.0), 1) / 1.5
    upper_BC = jnp.where(seen_BC, log_BC, 0.0) * seen_BC.shape[1] / seen_BC.sum(1, keepdims=True)
    return jnp.where(worse_B1, (lower_BC + upper_BC) / 2, lower_BC)


def scores_by(kind, model, batch, mask_id, chunk=1024):
    """As grpo.coupled_scores, of an estimator in views_of. Those without a ratio are 0, with their
    score's gradient.
    """
    token_BL, counted_BC, t_BK = batch["token_BL"], batch["counted_BC"].astype(bool), batch["t_BK"]
    (B, C), L = counted_BC.shape, token_BL.shape[1]
    if kind not in PUBLISHED:  # a mask rate for all completions of a task, as coupled masks have it
        t_BK = jnp.repeat((batch["ratio_B"][:, None] - 0.2) / 0.6, 3, 1)
    mask_BKC, weight_BKC = views_of(kind, batch["u_BKC"], t_BK, counted_BC)
    K, shift = mask_BKC.shape[1], model.cfg.shift
    prompt_BKP = batch["prompt_BKP"] < 0.15 if kind == "d1" else jnp.zeros((B, K, L - C), bool)
    views_BKL = jnp.where(jnp.concatenate([prompt_BKP, mask_BKC], -1), mask_id, token_BL[:, None])
    hidden, _ = model.hidden(views_BKL.reshape(B * K, -1), see_BM=jnp.repeat(batch["see_BL"], K, 0))
    hidden = hidden[:, hidden.shape[1] - C - shift : hidden.shape[1] - shift]
    outs = grpo.token_logps(model.logits, hidden, jnp.repeat(token_BL[:, -C:], K, 0), chunk)
    logp_BKC, entropy_BKC = (x.reshape(B, K, C) for x in outs)
    score_BC = (weight_BKC * mask_BKC * logp_BKC).sum(1)
    if kind == "spg":
        # unknown where the value does not matter
        worse_B1 = batch.get("advantage_B", jnp.zeros(B))[:, None] < 0
        score_BC = spg_score(logp_BKC, mask_BKC, weight_BKC, worse_B1)
    if kind in ("count", "spg", "left_to_right"):
        score_BC -= jax.lax.stop_gradient(score_BC)
    return score_BC, entropy_BKC.mean(1)


# ---- the runs --------------------------------------------------------------------------------------------------------


def run_demo(kind, settings):
    """One run of the demo, in a process of its own."""
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(
        Path(settings["out"]).parent.absolute() / "compiled"
    )
    coupled_grpo.EVAL_SAMPLES = settings.pop("eval_samples")
    functions = (draw_uniforms, functools.partial(scores_by, kind)) if kind in SCORED_HERE else ()
    if kind == "shuffled":
        of_rewards, rng = grpo.group_advantages, np.random.default_rng(settings["seed"])

        def shuffled(rewards, weights, group):
            found = of_rewards(rewards, weights, group)
            return found._replace(
                advantage_B=rng.permuted(found.advantage_B.reshape(-1, group), axis=1).reshape(-1)
            )

        grpo.group_advantages = shuffled
    if kind == "naive":
        of_maximum = coupled_grpo.rule_of
        coupled_grpo.rule_of = lambda *inputs: dataclasses.replace(
            of_maximum(*inputs), score="drawn"
        )
    coupled_grpo.main(coupled_grpo.Config(**settings, **KINDS[kind]), *functions)


def finished(cfg, seed, kind):
    """The log of a run and its minutes; runs it if that is not done yet."""
    out = Path(cfg.out) / f"{kind}-{seed}"
    claim(cfg.out, {name: getattr(cfg, name) for name in ("rounds", "eval_every", "eval_samples")})
    if not (out / "minutes.json").exists():
        shutil.rmtree(out, ignore_errors=True)
        started = time.perf_counter()
        settings = {name: getattr(cfg, name) for name in ("rounds", "eval_every", "eval_samples")}
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


def gains(cfg, curves, kind):
    """(last reward of each seed, difference to the first kind; two standard errors of their
    mean).
    """
    gain_S = np.array(
        [curves[kind, seed][-1][1] - curves[cfg.kinds[0], seed][-1][1] for seed in cfg.seeds]
    )
    return gain_S, 2 * gain_S.std(ddof=1) / len(gain_S) ** 0.5 if len(gain_S) > 1 else np.nan


def table(cfg, curves):
    """Held-out reward of each kind, and paired by seed with the first."""
    first, *others = cfg.kinds
    yield f"| estimator | held-out reward after {cfg.rounds} rounds | difference to {first} | seeds above it |"
    yield "|---" * 4 + "|"
    after = {kind: np.mean([curves[kind, seed][-1][1] for seed in cfg.seeds]) for kind in cfg.kinds}
    yield f"| {first} | {after[first]:.3f} | | |"
    for kind in others:
        gain_S, error = gains(cfg, curves, kind)
        better = f"{(gain_S > 0).sum()} of {len(gain_S)}"
        yield f"| {kind} | {after[kind]:.3f} | {gain_S.mean():+.3f} ± {error:.3f} | {better} |"


def plot(cfg, curves, name):
    """Held-out reward by round, thin for a seed; and with several kinds what each seed gains over
    the first of them.
    """
    figure, axes = plt.subplots(1, 2 if len(cfg.kinds) > 1 else 1, figsize=(9, 4), squeeze=False)
    left, *right = axes[0]
    for i, kind in enumerate(cfg.kinds):
        curve_SE2 = np.array([curves[kind, seed] for seed in cfg.seeds])
        round_E, reward_SE = curve_SE2[0, :, 0], curve_SE2[..., 1]
        left.plot(round_E, reward_SE.T, color=f"C{i}", lw=0.7, alpha=0.6)
        left.plot(round_E, reward_SE.mean(0), color=f"C{i}", lw=2.5, marker="o", ms=3, label=kind)
        for axis in right if i else ():
            gain_S, error = gains(cfg, curves, kind)
            axis.plot([i] * len(gain_S), gain_S, ".", color=f"C{i}", alpha=0.5)
            axis.errorbar(i + 0.15, gain_S.mean(), error, fmt="o", color=f"C{i}", capsize=4)
    left.set(xlabel="round", ylabel="tests passed, composed and phrased", ylim=(0, 1))
    left.legend(loc="upper left")
    for axis in right:
        axis.axhline(0, color="C0", lw=1)
        axis.set_xticks(range(1, len(cfg.kinds)), cfg.kinds[1:], rotation=20)
        axis.set(
            ylabel=f"after the last round, less {cfg.kinds[0]}", xlim=(0.5, len(cfg.kinds) - 0.4)
        )
    for axis in axes[0]:
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
        what = f"{kind}, {len(cfg.seeds)} seeds"
        reward_SR = np.array([[reward for _, reward in curves[kind, seed]] for seed in cfg.seeds])
        rows = [row for seed in cfg.seeds for row in found[kind, seed][0] if "update_s" in row]
        phases = ("generate_s", "score_s", "reward_s", "update_s")
        signs = {  # of a policy that collapses, in the last five rounds of each seed
            name: [
                float(np.mean([row[name] for row in found[kind, seed][0] if name in row][-5:]))
                for seed in cfg.seeds
            ]
            for name in ("duplicates", "constant_groups")
        }
        scored = {
            seed: [row for row in found[kind, seed][0] if SCORED in row] for seed in cfg.seeds
        }
        names = [f"{split}_{what}" for split in SPLITS for what in ("reward", "pass")]
        gain_S, error = gains(cfg, curves, kind)
        timed = cfg.kinds == Config.kinds  # the others may have shared the machine
        record(
            cfg.file,
            f"coupled-grpo demo of weights/dream, {what}: held-out reward after {cfg.rounds} rounds, "
            f"{cfg.eval_samples} samples a task",
            float(np.median(reward_SR[:, -1])),
            "share of tests passed",
            spread=[float(reward_SR[:, -1].min()), float(reward_SR[:, -1].max())],
            before=reward_SR[:, 0].tolist(),
            after=reward_SR[:, -1].tolist(),
            splits={
                name: [[row[name] for row in scored[seed]] for seed in cfg.seeds] for name in names
            },
            signs=signs,
            rounds=[done for done, _ in curves[kind, cfg.seeds[0]]],
            curves=reward_SR.tolist(),
            # two standard errors
            less_the_first_kind=None if kind == cfg.kinds[0] else [gain_S.mean(), error],
            minutes=[found[kind, seed][1] for seed in cfg.seeds] if timed else None,
            seconds_of_a_round={
                name: float(np.median([row[name] for row in rows])) for name in phases
            }
            if timed
            else None,
        )


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
