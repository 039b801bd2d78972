"""An exact ruler for reinforcement learning of diffusion models: what the estimators of a
completion's score are worth.

    python bench/grpo_ruler.py --batches=100    # after the demo, which writes the tasks; gradients need --batches
    python bench/grpo_ruler.py --drift      # how far a cached sampler is from the model that learns: printed, a minute

The score of an answer of n tokens is a sum over the canvases that mask a set M of it, of weights
times log p(x_i | M). With n at most 8 there are 256 canvases: all are run once, and what costs a
trainer noise is computed exactly: the ELBO, the likelihood under any order, and of every estimator
mean and variance over all that it may draw. Writes results/<file>.md, a row for each estimator,
averaged over right answers of a trained model's held-out tasks, and tables of what a sampler's own
path says of them and of how fairly published code draws numbers of masked tokens.

Policy does the same for a table of logits for every canvas: the exact likelihood of every answer
under a sampler's rule, the exact gradient of the expected reward, and the gradient that an
estimator expects instead.

Sets are bits: bit i of M set means that position i is MASK. Letters: N = 2^n sets, n positions, V
vocabulary, D draws of an estimator, K passes of a draw, X answers, C = (V + 1)^n canvases of all of
them together. Refs: coupled-GRPO, arXiv:2506.20639; d1, arXiv:2504.12216; LLaDA 1.5 (VRPO),
arXiv:2505.19223; SPG, arXiv:2510.09541; ESPO, arXiv:2512.03759; GDPO, arXiv:2510.08554; TraceRL,
arXiv:2509.06949.
"""

import collections
import dataclasses
import functools
import itertools
import json
import math
import shlex
import sys
import typing
from pathlib import Path

import numpy as np
from record import RESULTS

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import checkpoints
import diffusion
import grpo
import runs

# ---- one answer: exact -------------------------------------------------------------------------------------------


def sizes(n):
    """(whether set M holds i, bool [N, n]; how many positions it holds, [N])."""
    held_Nn = (np.arange(1 << n)[:, None] >> np.arange(n)) & 1 > 0
    return held_Nn, held_Nn.sum(1)


def answer_logp(logits_NnV, answer_n):
    """log p(x_i | canvas that masks M) [N, n], and 0 where M does not hold i."""
    logp_Nn = np.take_along_axis(
        diffusion.log_softmax(logits_NnV), answer_n[None, :, None].astype(np.int64), 2
    )[..., 0]
    return np.where(sizes(len(answer_n))[0], logp_Nn, 0)


def elbo_weights(n):
    """c [N, n], elbo = sum of c * logp: the chance that an order reveals i when M is masked, (m-1)!
    (n-m)! / n!.
    """
    held_Nn, m_N = sizes(n)
    c = [0] + [
        math.factorial(m - 1) * math.factorial(n - m) / math.factorial(n) for m in range(1, n + 1)
    ]
    return np.where(held_Nn, np.array(c)[m_N][:, None], 0.0)


def exact_elbo(logp_Nn):
    return (elbo_weights(logp_Nn.shape[1]) * logp_Nn).sum()


def any_order(logp_Nn):
    """(log of the mean over orders of the product of a token a pass, chance v [N, n] that an order
    of x passes there).

    F[M] = logsumexp over i in M of logp[M, i] + F[M without i], minus log m; the gradient is the
    sum of v * d logp.
    """
    N, n = logp_Nn.shape
    held_Nn, m_N = sizes(n)
    rest_Nn = np.arange(N)[:, None] & ~(1 << np.arange(n))
    by_size = sorted(range(1, N), key=lambda M: m_N[M])
    F_N, reach_N, visits_Nn = np.zeros(N), np.full(N, -np.inf), np.zeros((N, n))
    for M in by_size:
        terms = (logp_Nn[M] + F_N[rest_Nn[M]])[held_Nn[M]]
        F_N[M] = np.logaddexp.reduce(terms) - math.log(m_N[M])
    reach_N[N - 1] = 0
    for M in reversed(by_size):
        for i in np.flatnonzero(held_Nn[M]):
            step = reach_N[M] + logp_Nn[M, i] - math.log(m_N[M])
            reach_N[rest_Nn[M, i]] = np.logaddexp(reach_N[rest_Nn[M, i]], step)
            visits_Nn[M, i] = math.exp(step + F_N[rest_Nn[M, i]] - F_N[N - 1])
    return F_N[N - 1], visits_Nn


def best_order(logp_Nn, best=max):
    """The largest log product of all orders; with best=min the smallest."""
    N, n = logp_Nn.shape
    F_N = np.zeros(N)
    for M in range(1, N):  # the sets below M have smaller numbers
        F_N[M] = best(logp_Nn[M, i] + F_N[M & ~(1 << i)] for i in range(n) if M >> i & 1)
    return F_N[N - 1]


def upper_bound(logp_Nn, beta):
    """SPG's score with infinitely many masks: (1/beta) sum_i log E_order[p_i^beta], without the
    paper's constant.
    """
    weight_Nn = elbo_weights(logp_Nn.shape[1])
    return sum(
        np.log((weight_Nn * np.exp(beta * (logp_Nn - logp_Nn.max(0)))).sum(0)) / beta
        + logp_Nn.max(0)
    )


def ancestral(logp_Nn, schedule, steps):
    """(bound, log-likelihood) of `steps` ancestral steps on t = 1, 1 - 1/steps, ..., 0; the last
    one reveals all.

    A masked token stays MASK with k = rate(s) / rate(t). Bound: sum over steps, sets of P(M at t)
    (1 - k) sum_i logp. Likelihood: F_s[M] = sum over subsets S of (1 - k)^|S| k^(m - |S|) p(x_S |
    M) F[M without S].
    """
    N, n = logp_Nn.shape
    _, m_N = sizes(n)
    rates = [float(diffusion.mask_rate(np.float64(j / steps), schedule)) for j in range(steps + 1)]
    rates[0], rates[-1] = 0.0, 1.0
    bound, F_N = 0.0, np.where(m_N == 0, 0.0, -np.inf)
    with np.errstate(divide="ignore"):  # log 0 is a step that cannot be
        for rate, before in itertools.pairwise(rates):
            keep = rate / before
            bound += (before**m_N * (1 - before) ** (n - m_N) * (1 - keep) * logp_Nn.sum(1)).sum()
            log_go, log_stay = np.log(1 - keep), np.log(keep)
            new_N = np.full(N, -np.inf)
            for M in range(N):
                S = M
                while True:  # over all subsets S of M
                    size = m_N[S]
                    chance = (size * log_go if size else 0) + (
                        (m_N[M] - size) * log_stay if size < m_N[M] else 0
                    )
                    parts = sum(logp_Nn[M, i] for i in range(n) if S >> i & 1)
                    new_N[M] = np.logaddexp(new_N[M], chance + parts + F_N[M ^ S])
                    if not S:
                        break
                    S = (S - 1) & M
            F_N = new_N
    return bound, F_N[N - 1]


# ---- one answer: estimators --------------------------------------------------------------------------------------


class Draws(typing.NamedTuple):
    """All draws of an estimator: score = sum over k of weight[d, k] * logp[set[d, k]], with chance
    chance[d].
    """

    chance_D: np.ndarray
    set_DK: np.ndarray
    weight_DK: np.ndarray


def of_sizes(n, sizes_and_chances):
    """(chance, size, set) of the sets of a size drawn with a chance, all sets of it alike."""
    _, m_N = sizes(n)
    for size, chance in sizes_and_chances:
        found = np.flatnonzero(m_N == size)
        yield from ((chance / len(found), size, int(M)) for M in found)


def uniform_sizes(n, first, last):
    return ((size, 1 / (last - first + 1)) for size in range(first, last + 1))


def together(parts):
    """Draws of several independent ones, each [(chance, weight, set)]: every combination, weights
    as they are.
    """
    rows = [
        (math.prod(c for c, _, _ in draw), [M for *_, M in draw], [w for _, w, _ in draw])
        for draw in parts
    ]
    chance, sets, weights = zip(*rows, strict=True)
    return Draws(np.array(chance), np.array(sets), np.array(weights, float))


def at_times(n, times, masks, weights):
    """Draws at times t with chances: sets of each time and their weights, by functions of t."""
    rows = [(chance * p, sets, weights(t)) for t, chance in times for p, sets in masks(t)]
    chance, sets, weights = zip(*rows, strict=True)
    return Draws(np.array(chance), np.array(sets), np.array(weights, float))


def gauss(low, high, count=24):
    """Nodes and chances of a uniform time in [low, high]."""
    node, weight = np.polynomial.legendre.leggauss(count)
    return list(zip((low + high) / 2 + (high - low) / 2 * node, weight / 2, strict=True))


def bernoulli(n, t):
    """[(chance, set)] of masks that hold each position with chance t."""
    _, m_N = sizes(n)
    return list(zip(t**m_N * (1 - t) ** (n - m_N), range(1 << n), strict=True))


def coupled(n, weigh, independent=False):
    """Full canvas, a mask of rate t in [0.2, 0.8], and its complement; or, independent, another
    mask of rate 1 - t.
    """
    full = (1 << n) - 1

    def masks(t):
        if not independent:
            return [(p, [full, M, full - M]) for p, M in bernoulli(n, t)]
        both = itertools.product(bernoulli(n, t), bernoulli(n, 1 - t))
        return [(p * q, [full, M, other]) for (p, M), (q, other) in both]

    return at_times(n, gauss(0.2, 0.8), masks, lambda t: np.array([1, *(weigh(t))]) / 2)


def one_pass(n):
    return Draws(np.ones(1), np.array([[(1 << n) - 1]]), np.ones((1, 1)))


def bernoulli_draws(n, eps=1e-3):
    """One mask of rate t, weight 1/t, t uniform in [eps, 1]: smooth in log t, where it is
    integrated.
    """
    nodes, range_u = gauss(math.log(eps), 0, 64), -math.log(eps) / (1 - eps)
    times = [(math.exp(u), chance * math.exp(u) * range_u) for u, chance in nodes]
    return at_times(n, times, lambda t: [(p, [M]) for p, M in bernoulli(n, t)], lambda t: [1 / t])


def count(n):
    return together([[(p, n / m, M)] for p, m, M in of_sizes(n, uniform_sizes(n, 1, n))])


def strata(n, K):
    """K draws of count, whose sizes lie n / K apart: m, m + n/K, ..."""
    step, draws = n // K, []
    for m in range(1, step + 1):
        layers = [
            [(p, n / size / K, M) for p, size, M in of_sizes(n, [(size, 1)])]
            for size in range(m, n + 1, step)
        ]
        layers[0] = [(p / step, w, M) for p, w, M in layers[0]]
        draws += itertools.product(*layers)
    return together(draws)


def espo(n):
    full, rows = (1 << n) - 1, []
    for p, m, M in of_sizes(n, uniform_sizes(n, 0, n)):
        rows.append(
            [
                (p, (n + 1) / m / 2 if m else 0.0, M),
                (1, (n + 1) / (n - m) / 2 if m < n else 0.0, full - M),
            ]
        )
    return together(rows)


def coupled_elbo(n):
    if n == 1:  # the pair has no weight
        return together([[(1, 1, 1), (1, 0, 1), (1, 0, 0)]])
    full = (1 << n) - 1
    rows = []
    for p, m, M in of_sizes(n, uniform_sizes(n, 1, n - 1)):
        rows.append(
            [(p, 1 / n, full), (1, (n - 1) / 2 / m, M), (1, (n - 1) / 2 / (n - m), full - M)]
        )
    return together(rows)


def gdpo(n, nodes):
    """Quadrature of the integral over the share of masks: floor(x n) tokens, weight 1/x, at every
    node x.
    """
    layers = [
        [(p, weight / x if x else 0.0, M) for p, _, M in of_sizes(n, [(int(x * n), 1.0)])]
        for x, weight in nodes
    ]
    return together(itertools.product(*layers))


def left_to_right(n):
    """Every token on the canvas that masks it and all after it: not of the form of Draws."""
    coef_Nn = np.zeros((1 << n, n))
    coef_Nn[[(1 << n) - (1 << i) for i in range(n)], range(n)] = 1
    return coef_Nn


ESTIMATORS = {
    "one_pass": one_pass,
    "bernoulli_eps1e-3": bernoulli_draws,
    "count": count,
    "strata2": functools.partial(strata, K=2),
    "strata3": functools.partial(strata, K=3),
    "espo": espo,
    "coupled": lambda n: coupled(n, lambda t: (1 / t, 1 / (1 - t))),
    "coupled_unit": lambda n: coupled(n, lambda t: (1, 1)),
    "independent": lambda n: coupled(n, lambda t: (1 / t, 1 / (1 - t)), independent=True),
    "coupled_elbo": coupled_elbo,
    "gdpo_gauss-2": lambda n: gdpo(n, gauss(0, 1, 2)),
    "gdpo_gauss-3": lambda n: gdpo(n, gauss(0, 1, 3)),
    "gdpo_simpson": lambda n: gdpo(n, [(0, 1 / 6), (0.5, 4 / 6), (1, 1 / 6)]),
}


def passes(name, n):
    """Forward passes of one draw."""
    return {"left_to_right": n, "spg": 2}.get(name) or ESTIMATORS[name](n).set_DK.shape[1]


@functools.lru_cache(None)
def coefficients(name, n):
    """(mean, mean square [N, n]) of the weight of logp[M, i] over all draws of an estimator."""
    held_Nn, _ = sizes(n)
    if name == "left_to_right":
        return (left_to_right(n),) * 2
    chance_D, set_DK, weight_DK = ESTIMATORS[name](n)
    mean_N, square_N = np.zeros(1 << n), np.zeros(1 << n)
    for k in range(set_DK.shape[1]):
        np.add.at(mean_N, set_DK[:, k], chance_D * weight_DK[:, k])
        for other in range(set_DK.shape[1]):  # a draw may hold a set twice
            same = set_DK[:, k] == set_DK[:, other]
            np.add.at(
                square_N, set_DK[:, k], chance_D * weight_DK[:, k] * weight_DK[:, other] * same
            )
    return mean_N[:, None] * held_Nn, square_N[:, None] * held_Nn


def moments(name, logp_Nn):
    """(mean [n], covariance [n, n]) of an estimator's scores of the tokens over all its draws."""
    n = logp_Nn.shape[1]
    if name == "left_to_right":
        return (left_to_right(n) * logp_Nn).sum(0), np.zeros((n, n))
    chance_D, set_DK, weight_DK = ESTIMATORS[name](n)
    score_Dn = (weight_DK[..., None] * logp_Nn[set_DK]).sum(1)
    mean_n = chance_D @ score_Dn
    return mean_n, (score_Dn - mean_n).T * chance_D @ (score_Dn - mean_n)


def spg_draws(logp_Nn, K, beta):
    """All draws of K masks of uniform size: chance [D], sets [D, K], scores [D, 2], their
    derivatives [D, 2, K, n].

    The derivatives are by logp of each set. Of the scores the lower is the mean over masks of the
    mean of logp, the upper the mean over the tokens that were masked of (1/beta) log of the mean
    over masks of [masked] p^beta n/m.
    """
    n = logp_Nn.shape[1]
    held_Nn, m_N = sizes(n)
    masks = list(of_sizes(n, uniform_sizes(n, 1, n)))
    set_DK = np.array(list(itertools.product([M for *_, M in masks], repeat=K)))
    chance_D = np.prod(list(itertools.product([p for p, *_ in masks], repeat=K)), axis=1)
    held_DKn, m_DK1 = held_Nn[set_DK], m_N[set_DK][..., None]
    lower_D = (logp_Nn[set_DK] / m_DK1).sum(2).mean(1)
    with np.errstate(divide="ignore"):
        log_DKn = np.where(held_DKn, beta * logp_Nn[set_DK] + np.log(n / m_DK1), -np.inf)
    total_D1n = np.logaddexp.reduce(log_DKn, 1, keepdims=True)
    seen_D1n = held_DKn.any(1, keepdims=True)
    share_D1n = seen_D1n / seen_D1n.sum(2, keepdims=True)
    upper_D = (np.where(seen_D1n, total_D1n - math.log(K), 0) * share_D1n).sum((1, 2)) / beta
    upper_DKn = np.exp(log_DKn - np.where(seen_D1n, total_D1n, 0)) * share_D1n
    slopes = np.stack([held_DKn / m_DK1 / K, upper_DKn], 1)
    return chance_D, set_DK, np.stack([lower_D, upper_D], 1), slopes


def spg(logp_Nn, K, beta, mix):
    """Mean and variance [3] of SPG's scores with K masks: lower, upper, and mix * upper + (1 - mix)
    * lower.
    """
    chance_D, _, score_D2, _ = spg_draws(logp_Nn, K, beta)
    score_D3 = np.concatenate([score_D2, score_D2 @ [[1 - mix], [mix]]], 1)
    mean_3 = chance_D @ score_D3
    return mean_3, chance_D @ (score_D3 - mean_3) ** 2


def count_chances(kind, length, batch):
    """P(row b has so many masked tokens) [batch, length + 1] where a batch draws one number and
    spreads it by strata.

    ESPO's and LLaDA's code round the strata, half to even: where the batch divides badly, a row
    never draws some numbers. "floor" is what rounds none: floor((u + b / batch) mod 1 * length) + 1
    with u uniform in [0, 1).
    """
    chance = np.zeros((batch, length + 1))
    row_B, first = np.arange(batch), int(kind != "espo")  # ESPO draws 0, too
    numbers = length + 1 - first
    starts = (np.arange(numbers * batch) + 0.5) / batch if kind == "floor" else np.arange(numbers)
    rounded = np.floor if kind == "floor" else np.round
    for start in first + starts:
        count_B = (rounded(start + row_B * (numbers / batch)).astype(int) - first) % numbers + first
        chance[row_B, count_B] += 1 / len(starts)
    return chance


# ---- one answer: a sampler's path --------------------------------------------------------------------------------


def path_of(step_n):
    """[(set that is masked before a step, positions that it writes)] of a record, empty steps left
    out.
    """
    steps = [np.flatnonzero(step_n == step) for step in np.unique(step_n)]
    return [
        (sum(1 << int(i) for later in steps[k:] for i in later), places)
        for k, places in enumerate(steps)
    ]


def path_logp(logp_Nn, step_n):
    """log p of each token when it was written [n]: their sum is exact if positions are chosen by
    the distribution.
    """
    found_n = np.zeros(len(step_n))
    for M, places in path_of(step_n):
        found_n[places] = logp_Nn[M, places]
    return found_n


def tracerl(logp_Nn, step_n, shrink=1):
    """TraceRL's score: `shrink` steps at a time on the canvas of the first; the mean of the means
    over their tokens.
    """
    path = path_of(step_n)
    joined = [
        (path[k][0], np.concatenate([places for _, places in path[k : k + shrink]]))
        for k in range(0, len(path), shrink)
    ]
    return np.mean([logp_Nn[M, places].mean() for M, places in joined])


def drawn_path_logp(logits_NnV, answer_n, step_n, tau=None):
    """log p of a path whose positions are chosen by the probability of the drawn token; -inf where
    that cannot be.

    All masked positions draw. Written are those with at least tau, else the best; or without tau as
    many of the best as the record has. What is not written must have drawn a token of less: a
    factor that a replay of the tokens omits.
    """
    total, prob_NnV = 0.0, np.exp(diffusion.log_softmax(logits_NnV))
    for M, places in path_of(step_n):
        p_nV, masked = prob_NnV[M], [i for i in range(len(answer_n)) if M >> i & 1]
        own = {i: p_nV[i, answer_n[i]] for i in places}
        all_sure = tau is not None and min(own.values()) >= tau
        if tau is not None and not all_sure and len(places) > 1:
            return -np.inf
        worst, _, place = min((p, -i, i) for i, p in own.items())
        for j in masked:
            less_V = p_nV[j] < (tau if all_sure else worst)
            if not all_sure and j > place:  # of equal ones the lower position is written
                less_V |= p_nV[j] == worst
            with np.errstate(divide="ignore"):
                total += np.log(own[j] if j in own else p_nV[j][less_V].sum())
    return total


def steps_of(logits_NnV, answer_n, tau, drawn):
    """The steps [n] in which a sampler writes an answer if every masked position draws its token of
    it.
    """
    n = len(answer_n)
    prob_NnV, step_n, M = np.exp(diffusion.log_softmax(logits_NnV)), np.zeros(n, int), (1 << n) - 1
    for step in range(n):
        masked = [i for i in range(n) if M >> i & 1]
        score = {i: prob_NnV[M, i, answer_n[i]] if drawn else prob_NnV[M, i].max() for i in masked}
        places = (
            [i for i in masked if score[i] >= tau] or [max(masked, key=score.get)] if masked else []
        )
        step_n[places] = step
        M -= sum(1 << i for i in places)
    return step_n


# ---- sampler and learner -------------------------------------------------------------------------------------------


def replayed(model, token_BL, see_BL, step_BC, mask_id, steps, temperature=1.0, vocab=0):
    """log p of each drawn token on the canvas on which it was drawn, by a model without a cache:
    [B, C], JAX.

    token_BL and step_BC are a sample_dream.Record's, step_BC of the completion, the last C columns;
    before step s a canvas shows what has a smaller step. Tokens of other steps than 0 .. steps - 1
    have 0. p is after the temperature, and without MASK and ids from `vocab` on, which are never
    drawn. If positions are chosen by the distribution, the sum over a completion is the
    log-probability of its path.
    """
    import jax
    import jax.numpy as jnp

    token_BC = token_BL[:, -step_BC.shape[1] :]

    def of_step(step):
        canvas_BC = jnp.where(step_BC >= step, mask_id, token_BC)
        hidden_BCD = grpo.hidden_of_views(model, token_BL, see_BL, canvas_BC[:, None])[:, 0]
        logits_BCV = model.logits(hidden_BCD).astype(jnp.float32) / temperature
        id_V = jnp.arange(logits_BCV.shape[-1])
        logits_BCV = jnp.where(
            (id_V == mask_id) | (id_V >= (vocab or len(id_V))), -jnp.inf, logits_BCV
        )
        logp_BC = jnp.take_along_axis(jax.nn.log_softmax(logits_BCV), token_BC[..., None], -1)[
            ..., 0
        ]
        return jnp.where((step_BC == step) & (token_BC != mask_id), logp_BC, 0.0)

    return sum(of_step(step) for step in range(steps))


def drift(log_BC, counted_BC):
    """How far apart sampler and learner are, of log(learner's p / sampler's p) of the counted
    tokens.

    "drift_k1" and "drift_k3" are means of -log w and w - 1 - log w, which estimate KL(sampler ||
    learner), the second with less noise; "drift_ratio_max" is the largest w.
    """
    log_T = np.clip(np.asarray(log_BC, np.float64)[counted_BC], -20, 20)
    k1, k3, most = -log_T.mean(), (np.exp(log_T) - 1 - log_T).mean(), np.exp(log_T.max())
    return {"drift_k1": float(k1), "drift_k3": float(k3), "drift_ratio_max": float(most)}


def importance_weights(log_BC, counted_BC, form, most=3.0):
    """Weights of the tokens' losses, from log(learner's p / sampler's p): of a token, or the sum
    over its completion.

    A weight is exp of that, and beyond `most` it is `most` ("truncate") or 0 ("mask"). Ref: TRL's
    GRPOTrainer.
    """
    level, kind = form.split("_")
    log_BC = np.where(counted_BC, log_BC, 0.0)
    if level == "sequence":
        log_BC = np.broadcast_to(log_BC.sum(1, keepdims=True), log_BC.shape)
    weight_BC = np.exp(np.clip(log_BC, -20, 20))
    return (
        np.minimum(weight_BC, most)
        if kind == "truncate"
        else np.where(weight_BC > most, 0.0, weight_BC)
    )


# ---- a whole policy: all answers, all canvases ---------------------------------------------------------------------


def canvas_of(answer_n, M, V):
    """Number of the canvas that shows an answer but for set M: base V + 1, position 0 runs fastest,
    digit V is MASK.
    """
    return sum((V if M >> i & 1 else int(v)) * (V + 1) ** i for i, v in enumerate(answer_n))


def digits(number, base, n):
    return [number // base**i % base for i in range(n)]


class Step(typing.NamedTuple):
    """One way on from a canvas: what is written, {position: token}, with what chance, and the
    gradient of its log.
    """

    written: dict
    chance: float
    grad_nV: np.ndarray  # by the logits of the canvas
    tokens_nV: np.ndarray  # of the written tokens' part alone, as if the positions had been given


def surest(p_nV, masked, kind, k):
    """The k masked positions that are surest, by their distributions alone; of equal ones the lower
    position.
    """
    score = {
        "max_prob": lambda p: p.max(),
        "entropy": lambda p: (p * np.log(np.maximum(p, 1e-300))).sum(),
        "margin": lambda p: -np.subtract(*np.sort(p)[-2:]),
    }[kind]
    return sorted(masked, key=lambda i: -score(p_nV[i]))[:k]


def written_by(rule, p_nV, masked, drawn, tau, k):
    """The positions that a rule writes of tokens drawn at all masked ones, by the probability of
    each drawn token.
    """
    p = {i: p_nV[i, drawn[i]] for i in masked}
    if rule == "threshold" and max(p.values()) >= tau:
        return [i for i in masked if p[i] >= tau]
    return sorted(masked, key=lambda i: -p[i])[: 1 if rule == "threshold" else k]


def steps_from(rule, p_nV, masked, tau, k):
    """All Steps of a rule from a canvas whose masked positions have probabilities p [n, V]."""
    n, V = p_nV.shape
    name, _, least = rule.partition(":")
    sets = None  # [(chance, positions)] where these do not depend on what is drawn
    if name == "any_order":
        sets = [(1 / len(masked), [i]) for i in masked]
    elif name == "left":
        sets = [(1.0, masked[:k])]
    elif least:
        sure = [i for i in masked if p_nV[i].max() >= float(least)]
        sets = [(1.0, sure or surest(p_nV, masked, "max_prob", 1))]
    elif name in ("max_prob", "entropy", "margin"):
        sets = [(1.0, surest(p_nV, masked, name, k))]
    if sets:
        for chance, places in sets:
            for tokens in itertools.product(range(V), repeat=len(places)):
                grad_nV = np.zeros((n, V))
                for i, v in zip(places, tokens, strict=True):
                    grad_nV[i] = -p_nV[i]
                    grad_nV[i, v] += 1
                p = math.prod(p_nV[i, v] for i, v in zip(places, tokens, strict=True))
                yield Step(dict(zip(places, tokens, strict=True)), chance * p, grad_nV, grad_nV)
        return
    # Every masked position draws; draws that write the same are one step, with the chance of what
    # was not written.
    found = {}
    for tokens in itertools.product(range(V), repeat=len(masked)):
        drawn = dict(zip(masked, tokens, strict=True))
        places = written_by(name, p_nV, masked, drawn, tau, k)
        found.setdefault(tuple((i, drawn[i]) for i in sorted(places)), []).append(drawn)
    for written, draws in found.items():
        chances = [math.prod(p_nV[i, v] for i, v in drawn.items()) for drawn in draws]
        total, grad_nV, tokens_nV = sum(chances), np.zeros((n, V)), np.zeros((n, V))
        if not total:
            continue
        for drawn, chance in zip(draws, chances, strict=True):
            for i, v in drawn.items():
                grad_nV[i, v] += chance / total
        for i in masked:
            grad_nV[i] -= p_nV[i]
        for i, v in written:
            tokens_nV[i] = -p_nV[i]
            tokens_nV[i, v] += 1
        yield Step(dict(written), total, grad_nV, tokens_nV)


class Policy:
    """A sampler's rule on a table of logits [C, n, V]: exact likelihood of every answer, reward,
    and its gradient.
    """

    def __init__(self, logits_CnV, reward_X, rule, tau=0.0, k=1):
        C, n, V = logits_CnV.shape
        self.logits, self.reward, self.shape = logits_CnV, reward_X, (C, n, V)
        probs_CnV = np.exp(diffusion.log_softmax(logits_CnV))
        self.answers = [digits(x, V, n) for x in range(V**n)]
        # canvases by how much they mask: each leads to such that mask less
        masked = {c: [i for i, v in enumerate(digits(c, V + 1, n)) if v == V] for c in range(C)}
        order = sorted(range(C), key=lambda c: -len(masked[c]))
        self.steps = {
            c: list(steps_from(rule, probs_CnV[c], masked[c], tau, k)) for c in order if masked[c]
        }
        self.to = {
            c: [self.after(c, step.written) for step in steps] for c, steps in self.steps.items()
        }

        # forward: the chance to come by a canvas; backward: the reward that it leads to
        self.reach_C, self.value_C = np.zeros(C), np.zeros(C)
        self.reach_C[C - 1] = 1
        for c in order[: len(self.steps)]:
            for step, c2 in zip(self.steps[c], self.to[c], strict=True):
                self.reach_C[c2] += self.reach_C[c] * step.chance
        ends = [canvas_of(answer, 0, V) for answer in self.answers]
        self.likelihood_X, self.value_C[ends] = self.reach_C[ends], reward_X
        for c in reversed(order[: len(self.steps)]):
            self.value_C[c] = sum(
                s.chance * self.value_C[c2] for s, c2 in zip(self.steps[c], self.to[c], strict=True)
            )
        self.value = self.value_C[C - 1]

    def after(self, c, written):
        V = self.shape[2]
        return c + sum((v - V) * (V + 1) ** i for i, v in written.items())

    def gradient(self, part="grad_nV"):
        """d E reward / d logits [C, n, V]; part="tokens_nV" leaves out the chance of what was not
        written.
        """
        grad_CnV = np.zeros(self.shape)
        for c, steps in self.steps.items():
            for step, c2 in zip(steps, self.to[c], strict=True):
                advantage = self.value_C[c2] - self.value
                grad_CnV[c] += self.reach_C[c] * step.chance * advantage * getattr(step, part)
        return grad_CnV

    def expected(self, coef_Nn):
        """The policy gradient that a score sum of coef * logp expects: the covariance of reward and
        its gradient.

        That is what a leave-one-out baseline leaves of E[(reward - baseline) d score].
        """
        _, n, V = self.shape
        probs_CnV, grad_CnV = np.exp(diffusion.log_softmax(self.logits)), np.zeros(self.shape)
        for x, answer in enumerate(self.answers):
            weight = self.likelihood_X[x] * (self.reward[x] - self.value)
            for M in range(1, 1 << n):
                c = canvas_of(answer, M, V)
                for i in range(n):
                    if coef_Nn[M, i]:
                        grad_CnV[c, i] -= weight * coef_Nn[M, i] * probs_CnV[c, i]
                        grad_CnV[c, i, answer[i]] += weight * coef_Nn[M, i]
        return grad_CnV


def cosine(a, b):
    return float((a * b).sum() / math.sqrt((a * a).sum() * (b * b).sum()))


# ---- a real model --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config:
    ckpt: str = "weights/dream"  # run of train_dream.py, or a folder of convert_weights.py
    tasks: str = "out/grpo/world/constants.jsonl"  # TinyPython's tasks, with their solutions
    answers: int = 48  # tasks whose right answers are scored
    tau: float = 0.9  # threshold of the samplers whose paths are replayed
    # first tokens of an answer that are masked in all ways; the rest of the canvas is kept
    free: int = 6
    length: int = 16  # tokens of a completion
    batches: int = 0  # of completions whose policy gradients are compared, 25 s for each; 0: none
    prompts: int = 4  # of a batch
    group: int = 8  # completions of a prompt
    file: str = "grpo_ruler"  # bench/results/<file>.md
    drift: bool = False  # only print how far rollouts with a cache drift from the model that learns


class Canvases(typing.NamedTuple):
    """A model, and tasks with their right answers on its canvases."""

    model: typing.Any
    token_BL: np.ndarray
    see_BL: np.ndarray
    begin: int  # slot of an answer's first token

    def masked(self, row, n):
        """The canvases [N, L] of a row of tokens that mask all sets of its answer's first n
        tokens.
        """
        token_NL = np.repeat(row[None], 1 << n, 0)
        token_NL[:, self.begin : self.begin + n][sizes(n)[0]] = self.model.cfg.mask_id
        return token_NL

    def logits(self, model, token_NL, see_L, n):
        """Logits [N, n, V] of an answer's first n tokens."""
        return model.logits(
            model.hidden(token_NL, see_BM=see_L[None])[0][:, self.begin - 1 : self.begin - 1 + n]
        )


def load(cfg):
    """The Canvases of --tasks."""
    import tokenizers

    import model_dream
    import sample_dream

    model, _ = checkpoints.load(model_dream, cfg.ckpt, dtype="float32")
    tokenizer = tokenizers.Tokenizer.from_file(f"{cfg.ckpt}/tokenizer.json")
    tasks = [json.loads(line) for line in Path(cfg.tasks).read_text().splitlines()][: cfg.answers]
    prompts = [tokenizer.encode(task["prompt"]).ids for task in tasks]
    token_BL, see_BL = sample_dream.canvas(prompts, cfg.length, model.cfg)
    answer_BC = np.full((len(tasks), cfg.length), model.cfg.eos_id, np.int32)
    for row, task in zip(answer_BC, tasks, strict=True):
        ids = tokenizer.encode(task["canonical_solution"]).ids[: cfg.length]
        row[: len(ids)] = ids
    token_BL[:, -cfg.length :] = answer_BC
    return Canvases(model, token_BL, see_BL, token_BL.shape[1] - cfg.length)


def tables(canvases, n):
    """(logits [N, n, V], tokens [n]) of the first tokens of right answers, each on the canvases of
    all sets of them.
    """
    import jax

    @jax.jit
    def logits(token_NL, see_L):
        return canvases.logits(canvases.model, token_NL, see_L, n)

    for row, see_L in zip(canvases.token_BL, canvases.see_BL, strict=True):
        found = np.asarray(logits(canvases.masked(row, n), see_L), np.float64)
        yield found, row[canvases.begin : canvases.begin + n]


# ---- the gradient of a real model ----------------------------------------------------------------------------------


@functools.lru_cache(None)
def draws_of(name, n):
    return ESTIMATORS[name](n)


def one_draw(name, n, rng):
    """Weights [N, n] of logp in one draw of an estimator."""
    if name == "left_to_right":
        return left_to_right(n)
    chance_D, set_DK, weight_DK = draws_of(name, n)
    d, weight_N = rng.choice(len(chance_D), p=chance_D / chance_D.sum()), np.zeros(1 << n)
    np.add.at(weight_N, set_DK[d], weight_DK[d])
    return weight_N[:, None] * sizes(n)[0]


def spg_weights(logp_Nn, advantages, rng, K=2, beta=1.5, mix=0.5):
    """Weights [2, N, n] of d logp in SPG's gradient, sums over completions: what it expects, and
    one draw of it.

    An answer that was worse than its group is pushed down by the mixed score, one that was better
    up by the lower.
    """
    chance_D, set_DK, _, slope_D2Kn = spg_draws(logp_Nn, K, beta)
    weight_2Nn = np.zeros((2, *logp_Nn.shape))
    for advantage in advantages:
        up = 0 if advantage > 0 else mix
        slope_DKn = advantage * ((1 - up) * slope_D2Kn[:, 0] + up * slope_D2Kn[:, 1])
        d = rng.choice(len(chance_D), p=chance_D / chance_D.sum())
        np.add.at(weight_2Nn[0], set_DK, chance_D[:, None, None] * slope_DKn)
        np.add.at(weight_2Nn[1], set_DK[d], slope_DKn[d])
    return weight_2Nn


def path_weights(step_n, by_step=False):
    """Weights [N, n] of logp in the log-likelihood of a path; by_step those of TraceRL, a mean over
    steps of means.
    """
    path, weight_Nn = path_of(step_n), np.zeros((1 << len(step_n), len(step_n)))
    for M, places in path:
        weight_Nn[M, places] = 1 / len(path) / len(places) if by_step else 1
    return weight_Nn


def batch(canvases, cfg, rng):
    """{(row of tokens, its steps): (see_L, [advantage of each completion that wrote it])} of a few
    groups.

    The positions are chosen by the largest probability, so the record's path is all that the
    sampler did. The reward is 1 for the right answer, the advantage that less the mean of the
    others in the group.
    """
    import jax

    import sample_dream

    at = slice(canvases.begin, canvases.begin + cfg.free)
    task_R = np.repeat(rng.choice(len(canvases.token_BL), cfg.prompts, replace=False), cfg.group)
    token_RL, right_Rn = canvases.token_BL[task_R].copy(), canvases.token_BL[task_R, at]
    token_RL[:, at] = canvases.model.cfg.mask_id
    rule = sample_dream.Sampling(
        temperature=1.0, threshold=cfg.tau, score="distribution", history=True
    )
    key = jax.random.key(int(rng.integers(1 << 30)))
    token_RL, stats = sample_dream.fill(
        canvases.model, token_RL, canvases.see_BL[task_R], rule, key
    )
    reward_PG = (token_RL[:, at] == right_Rn).all(1).reshape(-1, cfg.group).astype(float)
    advantage_R = (
        (reward_PG - reward_PG.mean(1, keepdims=True)) * cfg.group / (cfg.group - 1)
    ).ravel()
    found = {}
    for r in np.flatnonzero(advantage_R):
        what = tuple(token_RL[r]), tuple(np.asarray(stats["record"].step_BL)[r, at])
        found.setdefault(what, (canvases.see_BL[task_R[r]], []))[1].append(advantage_R[r])
    return found, reward_PG.mean()


GRADIENTS = (  # without those of much more noise, and of other nodes or weights
    *(
        "one_pass",
        "count",
        "strata2",
        "espo",
        "coupled",
        "independent",
        "coupled_elbo",
        "gdpo_gauss-2",
    ),
    *("left_to_right", "spg"),
)


def gradient_rows(canvases, cfg):
    """The table of policy gradients: what estimators expect, and one draw of them, beside the exact
    one of the path.
    """
    import jax
    from flax import nnx
    from jax.flatten_util import ravel_pytree

    n, rng = cfg.free, np.random.default_rng(0)
    kinds = [name for name in GRADIENTS if not name.startswith("strata") or n % int(name[-1]) == 0]
    graph, params = nnx.split(canvases.model)

    def logp(params, token_SL, see_L, answer_n):
        logp_SnV = jax.nn.log_softmax(canvases.logits(nnx.merge(graph, params), token_SL, see_L, n))
        return logp_SnV[:, np.arange(n), answer_n]

    @jax.jit
    def slope(params, weight_Sn, *inputs):
        return ravel_pytree(
            jax.grad(lambda params: (weight_Sn * logp(params, *inputs)).sum())(params)
        )[0]

    def slope_of(weight_Nn, token_NL, *inputs):
        """The gradient [P] of the sum of weight * logp: a draw weighs few of the canvases, and no
        others are run.
        """
        M_S = np.flatnonzero(weight_Nn.any(1))
        S = 8 if len(M_S) <= 8 else len(weight_Nn)
        weight_Sn = np.zeros((S, n), np.float32)
        weight_Sn[: len(M_S)] = weight_Nn[M_S]
        return np.asarray(
            slope(params, weight_Sn, token_NL[np.resize(M_S, S)], *inputs), np.float64
        )

    def weights_of(name, advantages, logp_Nn):
        """Weights [2, N, n] of logp: what an estimator expects, and one draw of it."""
        if name == "spg":
            return spg_weights(logp_Nn, advantages, rng)
        draws = sum(a * one_draw(name, n, rng) for a in advantages)
        return np.stack([sum(advantages) * coefficients(name, n)[0], draws])

    def gradient(kinds):
        """([K, parameters] of a batch, mean reward): the exact gradient, and for `kinds` expected
        ones and draws.
        """
        answers, reward = batch(canvases, cfg, rng)
        total = 0.0
        for (row, step_n), (see_L, advantages) in answers.items():
            row, step_n = np.array(row, np.int32), np.array(step_n)
            inputs = canvases.masked(row, n), see_L, row[canvases.begin : canvases.begin + n]
            weights = [path_weights(step_n), path_weights(step_n, by_step=True)][: 1 + bool(kinds)]
            weights = [sum(advantages) * weight for weight in weights]
            if kinds:
                logp_Nn = np.where(sizes(n)[0], np.asarray(logps(params, *inputs), np.float64), 0)
                weights += [
                    *np.concatenate(
                        np.stack([weights_of(name, advantages, logp_Nn) for name in kinds], 1)
                    )
                ]
            keys = [(weight_Nn.round(9) + 0.0).tobytes() for weight_Nn in weights]
            different = dict(zip(keys, weights, strict=True))  # many expect the same: the ELBO's
            slopes = {key: slope_of(weight_Nn, *inputs) for key, weight_Nn in different.items()}
            total += np.stack([slopes[key] for key in keys])
        return total, reward

    logps = jax.jit(logp)
    # the direction to measure single batches by comes from batches of its own
    found = [gradient(()) for _ in range(cfg.batches)]
    exact_P = np.sum([gradient_KP[0] for gradient_KP, _ in found if np.ndim(gradient_KP)], 0)
    sums_KP, alone, noise, rewards = 0.0, [], [], [reward for _, reward in found]
    for _ in range(cfg.batches):
        gradient_KP, _ = gradient(kinds)
        if np.ndim(gradient_KP) == 0:  # every group was constant
            continue
        sums_KP = sums_KP + gradient_KP
        expected_KP, drawn_KP = np.split(gradient_KP[2:], 2)
        alone.append([cosine(g_P, exact_P) for g_P in (*gradient_KP[:2], *drawn_KP)])
        noise.append(((drawn_KP - expected_KP) ** 2).sum(1))
    if len(alone) < 2 or not np.ndim(exact_P):
        raise ValueError(
            "all completions of nearly every task got the same reward: no gradient; take more --batches"
        )
    mean_KP, alone_K, noise_K = sums_KP / len(alone), np.mean(alone, 0), np.mean(noise, 0)
    error_K = np.std(alone, 0, ddof=1) / math.sqrt(len(alone))
    yield f"\n\nPolicy gradients of {len(alone)} batches of {cfg.prompts} x {cfg.group} answers of {n} tokens."
    yield f"The sampler fills all whose largest probability is at least {cfg.tau}. Mean reward {np.mean(rewards):.2f}\n"
    yield "| estimator | passes | cosine, expectation | cosine, one batch | mask variance / squared norm |"
    yield "|" + "---|" * 5
    rows = {"the path, exactly": "steps", "TraceRL, shrink 1": "steps"} | {
        name: passes(name, n) for name in kinds
    }
    noise_K = [0.0, 0.0, *(noise_K / (mean_KP[2 : 2 + len(kinds)] ** 2).sum(1))]
    for k, (name, cost) in enumerate(rows.items()):
        expects = f"{cosine(mean_KP[k], mean_KP[0]):.3f}"
        yield f"| {name} | {cost} | {expects} | {alone_K[k]:.3f} ± {2 * error_K[k]:.3f} | {noise_K[k]:.2f} |"


def path_rows(found, tau, elbo):
    """The table of what replays of samplers' paths say of the answers, per token."""
    yield f"\n\nThe same answers scored along the path of a sampler with threshold {tau}, nats a token.\n"
    yield "| threshold looks at | scored | steps | score | score - ELBO |\n|" + "---|" * 5
    for drawn, name in ((False, "largest probability"), (True, "drawn token's")):
        steps, scores = [], collections.defaultdict(list)
        for logits_NnV, answer_n in found:
            logp_Nn, n = answer_logp(logits_NnV, answer_n), len(answer_n)
            step_n = steps_of(logits_NnV, answer_n, tau, drawn)
            steps.append(len(set(step_n)))
            scores["tokens"].append(path_logp(logp_Nn, step_n).sum() / n)
            if drawn:
                exact = drawn_path_logp(logits_NnV, answer_n, step_n, tau) / n
                scores["tokens, and what was not written"].append(exact)
            for shrink in (1, 2):
                scores[f"TraceRL, shrink {shrink}"].append(tracerl(logp_Nn, step_n, shrink))
        for kind, values in scores.items():
            score = np.mean(values)
            yield f"| {name} | {kind} | {np.mean(steps):.2f} | {score:+.4f} | {score - elbo:+.4f} |"


def drift_rows(canvases, cfg):
    """The table of drift by threshold, of the tasks' completions with and without the cache of
    coupled_grpo.py.
    """
    import jax

    import sample_dream

    model, C, rows = canvases.model, cfg.length, []
    token_BL = canvases.token_BL.copy()
    token_BL[:, -C:] = model.cfg.mask_id
    for threshold in (0.9, 0.5, 0.2):
        for cache in ("dual", ""):
            own = {
                "temperature": 1.0,
                "threshold": threshold,
                "score": "distribution",
                "history": True,
            }
            rule = sample_dream.Sampling(block_length=C, cache=cache, **own)
            _, stats = sample_dream.fill(model, token_BL, canvases.see_BL, rule, jax.random.key(0))
            record = stats["record"]
            step_BC, drawn_BC, logp_BC = (np.asarray(x_BL)[:, -C:] for x_BL in record[:3])
            views = np.asarray(record.token_BL), canvases.see_BL, step_BC, model.cfg.mask_id
            log_BC = np.asarray(replayed(model, *views, int(step_BC.max()) + 1)) - logp_BC
            found = drift(log_BC, drawn_BC != model.cfg.mask_id)
            rows.append(
                f"| {threshold} | {cache or 'none'} | "
                + " | ".join(f"{x:.2g}" for x in found.values())
                + " |"
            )
    yield f"{len(token_BL)} completions of {C} tokens, temperature 1, one block.\n"
    yield "| threshold | cache | drift k1 | drift k3 | largest ratio |\n|" + "---|" * 5
    yield from rows


def strata_rows(length):
    """The table of numbers of masked tokens that a row of a batch never draws."""
    yield f"\n\nShare of the mask counts of a {length}-token answer that some row of the batch can never draw.\n"
    yield "| batch | ESPO | LLaDA | floor |\n|" + "---|" * 4
    for batch in (2, 3, 4, 6, 8):
        shares = []
        for kind in ("espo", "llada", "floor"):
            chance = count_chances(kind, length, batch)[:, int(kind != "espo") :]
            shares.append(f"{(chance == 0).mean(1).max():.2f}")
        yield f"| {batch} | {' | '.join(shares)} |"


def main(cfg):
    n = cfg.free
    if not 1 <= n <= min(8, cfg.length) or cfg.answers < 1:
        raise ValueError(
            f"--free={n} is 1 to 8, as an answer has 2^n canvases, --length no less, --answers at least 1"
        )
    if cfg.batches and not (cfg.batches > 1 and cfg.group > 1 and 1 <= cfg.prompts <= cfg.answers):
        raise ValueError(
            "--batches and --group are at least 2, --prompts at least 1 and at most --answers"
        )
    canvases = load(cfg)
    if cfg.drift:
        print("\n".join(drift_rows(canvases, cfg)))
        return
    of_answers = list(tables(canvases, n))
    found = [answer_logp(*table) for table in of_answers]
    elbos = np.array([exact_elbo(logp_Nn) for logp_Nn in found]) / n
    orders = np.array([any_order(logp_Nn)[0] for logp_Nn in found]) / n
    lines = [
        f"{len(found)} right answers, their first {n} tokens: ELBO {elbos.mean():.4f} nats a token, any-order "
        f"likelihood {orders.mean():.4f}.\n",
        "| estimator | passes | token weight | bias, ELBO | bias, any-order | variance x passes | per token |",
        "|" + "---|" * 7,
    ]
    for name in ["left_to_right", *ESTIMATORS]:
        if name.startswith("strata") and n % int(name[-1]):
            continue
        # divided by what the weights of a token sum to: coupled's 1.5 is a matter of the learning
        # rate
        weight = coefficients(name, n)[0].sum() / n
        means, covs = zip(*(moments(name, logp_Nn) for logp_Nn in found), strict=True)
        mean_B, cov_Bnn = np.array(means).sum(1) / n / weight, np.array(covs) / weight**2
        scores = (mean_B - elbos).mean(), (mean_B - orders).mean()
        spread = cov_Bnn.sum((1, 2)).mean(), np.trace(cov_Bnn, axis1=1, axis2=2).mean()
        cells = (
            f"{weight:.3g}",
            *(f"{x:+.4f}" for x in scores),
            *(f"{x * passes(name, n):.3f}" for x in spread),
        )
        lines.append(f"| {name} | {passes(name, n)} | {' | '.join(cells)} |")
    lines += [*path_rows(of_answers, cfg.tau, elbos.mean()), *strata_rows(cfg.length)]
    lines += gradient_rows(canvases, cfg) if cfg.batches else []
    text = (
        "\n".join(lines)
        + f"\n\n`python bench/{shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}`\n"
    )
    (RESULTS / f"{cfg.file}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
