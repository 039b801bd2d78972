"""Reference values on table models: the scores that coupled_grpo.py trains with, and
bench/grpo_ruler.py.
"""

import functools
import itertools
import json
import math
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, cases_of
from flax import nnx

import grpo

sys.path.insert(0, str(ROOT / "bench"))
import grpo_ruler as ruler
import grpo_run

pytestmark = pytest.mark.golden


def draws(n, elbo):
    """[(probability, ratio, the masked positions as bits)] of all masks, and for coupled scores of
    all ratios.
    """
    everything = (1 << n) - 1
    if elbo:
        sets = [(mask.bit_count(), mask) for mask in range(1, everything + (n == 1))]
        return [(1 / max(1, n - 1) / math.comb(n, m), m / n, mask) for m, mask in sets]
    node, weight = np.polynomial.legendre.leggauss(24)  # ratios are uniform in [0.2, 0.8]
    times = zip(0.5 + 0.3 * node, weight / 2, strict=True)
    return [
        (weight * t ** mask.bit_count() * (1 - t) ** (n - mask.bit_count()), t, mask)
        for (t, weight), mask in itertools.product(times, range(everything + 1))
    ]


@pytest.mark.parametrize("estimator", ["coupled", "coupled_elbo"])
def test_mean_and_covariance_of_the_scores(golden_dir, estimator):
    merge, elbo = jax.jit(grpo.merge_views, static_argnums=(0, 5)), estimator == "coupled_elbo"
    done = set()
    for name, case in ruler_cases(golden_dir, "estimators.npz"):
        if estimator not in case["names"]:
            continue
        done.add(name)
        N, n, _ = case["logits"].shape
        chance_B, ratio_B, set_B = (np.array(x) for x in zip(*draws(n, elbo), strict=True))
        hidden_BKCD = case["logits"][
            np.stack([np.full(len(set_B), N - 1), set_B, N - 1 - set_B], 1)
        ]
        mask_BC, token_BC = (
            (set_B[:, None] >> np.arange(n)) & 1 > 0,
            np.tile(case["answer"], (len(set_B), 1)),
        )
        full, half = (1 / n, (n - 1) / 2 / n) if elbo else (0.5, 0.5)
        weights = full, *(half / np.maximum(x, 1e-9)[:, None] for x in (ratio_B, 1 - ratio_B))
        arrays = (
            jnp.asarray(hidden_BKCD, jnp.float32),
            token_BC,
            mask_BC,
            [jnp.float32(x) for x in weights],
        )
        score_BC = np.asarray(merge(identity, *arrays, 1024)[0], np.float64)
        mean_C = chance_B @ score_BC
        cov_CC = (score_BC - mean_C).T * chance_B @ (score_BC - mean_C)
        np.testing.assert_allclose(
            mean_C, case[f"{estimator}.mean_token"], rtol=1e-4, atol=1e-4, err_msg=name
        )
        np.testing.assert_allclose(
            cov_CC, case[f"{estimator}.cov"], rtol=1e-4, atol=1e-4, err_msg=name
        )
    assert done


def identity(x):
    return x


@pytest.mark.parametrize("form", ["grpo", "dapo", "dr_grpo", "gspo"])
def test_losses(golden_dir, form):
    for name, case in ruler_cases(golden_dir, "losses.npz"):
        counted_BL, room = case["mask"] > 0, int(case["max_completion_length"])
        wide = [(0, 0), (0, room - counted_BL.shape[1])]  # as many columns as a completion may have
        arrays = [np.pad(case[key], wide) for key in ("new", "old")]
        limits = float(case["epsilon_low"]), float(case["epsilon_high"]), float(case["delta"])
        settings = grpo.Loss(form, 0.0, *limits), counted_BL.sum()
        fixed = arrays[1], None, case["advantages"], np.pad(counted_BL, wide)

        def loss(new_BC, fixed=fixed, settings=settings):
            return grpo.grpo_loss(new_BC, *fixed, *settings)[0]

        value, grad_BC = jax.value_and_grad(loss)(jnp.asarray(arrays[0]))
        np.testing.assert_allclose(value, case[f"loss_{form}"], rtol=1e-4, atol=1e-5, err_msg=name)
        if f"grad_{form}" in case:
            grad_BL = np.asarray(grad_BC)[:, : counted_BL.shape[1]]
            np.testing.assert_allclose(
                grad_BL, case[f"grad_{form}"], rtol=1e-4, atol=1e-5, err_msg=name
            )


@pytest.mark.parametrize(
    "form", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
)
def test_importance_weights_and_their_losses(golden_dir, form):
    """A weight, which is not negative, multiplies a token's advantage: the same as to multiply its
    loss.
    """
    for name, case in ruler_cases(golden_dir, "losses.npz"):
        counted_BL = case["mask"] > 0
        weight_BL = ruler.importance_weights(
            case["old"] - case["rollout"], counted_BL, form, case["clip_max"]
        )
        close(weight_BL[counted_BL], case[f"weight_{form}"][counted_BL], name)
        limits = float(case["epsilon_low"]), float(case["epsilon_high"]), float(case["delta"])
        settings = grpo.Loss("dapo", 0.0, *limits), counted_BL.sum()
        advantage_BL = weight_BL * case["advantages"][:, None]
        # a token a row
        new, old, counted = (x.reshape(-1, 1) for x in (case["new"], case["old"], counted_BL))
        value, _ = grpo.grpo_loss(new, old, None, advantage_BL.reshape(-1), counted, *settings)
        np.testing.assert_allclose(
            value, case[f"loss_dapo_{form}"], rtol=1e-4, atol=1e-5, err_msg=name
        )


class Table:
    """A model that is a table of logits, of the canvas of each set of masked positions, behind one
    column of prompt.
    """

    def __init__(self, logits_NnV):
        self.logits_NnV = logits_NnV

    def hidden(self, token_BL, see_BM=None):
        _, n, V = self.logits_NnV.shape  # MASK is V, which has no logits
        set_B = ((token_BL[:, 1:] == V) << jnp.arange(n)).sum(-1)
        return jnp.pad(self.logits_NnV[set_B], ((0, 0), (0, 1), (0, 0))), None

    def logits(self, hidden_BTD):
        return hidden_BTD


@functools.partial(jax.jit, static_argnums=3)
def replayed(logits_NnV, answer_n, step_Bn, steps):
    """log p of each token [B, n] of a record, by grpo_ruler.replayed."""
    token_BL = jnp.pad(jnp.tile(answer_n, (len(step_Bn), 1)), ((0, 0), (1, 0)))
    return ruler.replayed(Table(logits_NnV), token_BL, None, step_Bn, logits_NnV.shape[2], steps)


def test_replayed_trajectories_their_gradients_and_weights(golden_dir):
    @functools.partial(jax.jit, static_argnums=3)
    def gradient(*inputs):
        return jax.jacobian(lambda logits, *rest: replayed(logits, *rest).sum(-1))(*inputs)

    for name, case in ruler_cases(golden_dir, "trajectory.npz"):
        step_Bn, tables = (
            case["step"],
            {"learner": case["logits"], "behaviour": case["cached_logits"]},
        )
        inputs = case["answer"], step_Bn, int(step_Bn.max()) + 1
        for who, logits_NnV in tables.items():
            logp_Bn = replayed(jnp.asarray(logits_NnV, jnp.float32), *inputs)
            np.testing.assert_allclose(
                logp_Bn, case[f"{who}.logp_token"], rtol=1e-4, atol=1e-4, err_msg=name
            )
            np.testing.assert_allclose(
                logp_Bn.sum(-1), case[f"{who}.logp"], rtol=1e-4, atol=1e-4, err_msg=name
            )
        grad = gradient(jnp.asarray(case["logits"], jnp.float32), *inputs)
        np.testing.assert_allclose(grad, case["grad_logp"], rtol=1e-4, atol=1e-4, err_msg=name)

        log_Bn = case["learner.logp_token"] - case["behaviour.logp_token"]
        counted_Bn = np.ones(log_Bn.shape, bool)
        close(log_Bn, case["log_weight_token"], name)
        close(log_Bn.sum(-1), case["log_weight"], name)
        for key in case:
            if found := re.fullmatch(r"((token|sequence)_(truncate|mask))_([\d.]+)", key):
                weight_Bn = ruler.importance_weights(log_Bn, counted_Bn, found[1], float(found[4]))
                close(
                    weight_Bn if found[2] == "token" else weight_Bn[:, 0],
                    case[key],
                    f"{name} {key}",
                )
        rows = [ruler.drift(log_Bn[i : i + 1], counted_Bn[i : i + 1]) for i in range(len(log_Bn))]
        for key in ("k1", "k3"):
            close([row[f"drift_{key}"] for row in rows], case[key], f"{name} {key}")
        close([row["drift_ratio_max"] for row in rows], np.exp(log_Bn.max(-1)), name)


# ---- the exact ruler, float64 --------------------------------------------------------------------------------------


def ruler_cases(golden_dir, file):
    return cases_of(golden_dir("ruler") / file, str.partition).items()


def close(got, want, name):
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9, err_msg=name)


def test_one_answer_exactly(golden_dir):
    for name, case in ruler_cases(golden_dir, "answer.npz"):
        logp_Nn = ruler.answer_logp(case["logits"], case["answer"])
        n = logp_Nn.shape[1]
        close(logp_Nn, case["logp"], name)
        close(ruler.elbo_weights(n), case["elbo_coef"], name)
        close(ruler.exact_elbo(logp_Nn), case["elbo"], name)
        close((ruler.elbo_weights(n) * logp_Nn).sum(0), case["elbo_token"], name)
        value, visits_Nn = ruler.any_order(logp_Nn)
        close(value, case["any_order"], name)
        close(value - ruler.exact_elbo(logp_Nn), case["kl_orders"], name)
        if "any_order_visits" in case:
            close(visits_Nn, case["any_order_visits"], name)
        close(ruler.best_order(logp_Nn), case["best_order"], name)
        close(ruler.best_order(logp_Nn, min), case["worst_order"], name)
        for one_way in ("one_pass", "left_to_right"):
            close((ruler.coefficients(one_way, n)[0] * logp_Nn).sum(), case[one_way], name)
        close([ruler.upper_bound(logp_Nn, beta) for beta in case["betas"]], case["eubo"], name)
        # gradients by the logits: the weight of every logp times onehot - softmax
        d_NnV = np.eye(case["logits"].shape[2])[case["answer"]] - np.exp(
            ruler.diffusion.log_softmax(case["logits"])
        )
        for weight_Nn, kind in ((ruler.elbo_weights(n), "elbo"), (visits_Nn, "any_order")):
            if f"grad_{kind}" in case:
                close(weight_Nn[..., None] * d_NnV, case[f"grad_{kind}"], name)
        if "schedule" in case:
            settings = zip(case["schedule"], case["steps"], strict=True)
            found = np.array(
                [ruler.ancestral(logp_Nn, str(kind), int(steps)) for kind, steps in settings]
            )
            close(found[:, 0], case["elbo_steps"], name)
            close(found[:, 1], case["ancestral_steps"], name)


def test_paths_of_samplers_that_look_at_the_drawn_token_and_tracerl(golden_dir):
    for name, case in ruler_cases(golden_dir, "trajectory.npz"):
        tables = {"learner": case["logits"], "behaviour": case["cached_logits"]}
        for i, step_n in enumerate(case["step"]):
            for who, logits_NnV in tables.items():
                where, inputs = f"{name} {who} {i}", (logits_NnV, case["answer"], step_n)
                logp_n = ruler.path_logp(ruler.answer_logp(logits_NnV, case["answer"]), step_n)
                close(logp_n, case[f"{who}.logp_token"][i], where)
                close(
                    ruler.drawn_path_logp(*inputs, float(case["tau"])),
                    case[f"{who}.logp_threshold"][i],
                    where,
                )
                close(ruler.drawn_path_logp(*inputs), case[f"{who}.logp_topk"][i], where)
            for key in case:
                if found := re.fullmatch(r"tracerl_shrink(\d+)", key):
                    logp_Nn = ruler.answer_logp(case["logits"], case["answer"])
                    close(
                        ruler.tracerl(logp_Nn, step_n, int(found[1])),
                        case[key][i],
                        f"{name} {key} {i}",
                    )


def test_published_strata_and_one_in_which_every_row_draws_every_number(golden_dir):
    for case in json.loads((golden_dir("ruler") / "strata.json").read_text()):
        kind, length, batch = case["kind"], case["length"], case["batch"]
        chance, least = ruler.count_chances(kind, length, batch), int(kind != "espo")
        close(chance, case["marginal"], str(case))
        uniform = np.zeros(length + 1)
        uniform[least:] = 1 / (length + 1 - least)
        assert np.allclose(chance, uniform) == case["uniform"]
        mended = np.append(0, np.full(length, 1 / length))
        close(ruler.count_chances("floor", length, batch), np.tile(mended, (batch, 1)), str(case))


def test_estimators_over_all_their_draws(golden_dir):
    for name, case in ruler_cases(golden_dir, "estimators.npz"):
        logp_Nn = ruler.answer_logp(case["logits"], case["answer"])
        for estimator, passes in zip(map(str, case["names"]), case["passes"], strict=True):
            found = (
                *ruler.moments(estimator, logp_Nn),
                *ruler.coefficients(estimator, logp_Nn.shape[1]),
            )
            for key, got in zip(("mean_token", "cov", "coef", "coef_sq"), found, strict=True):
                close(got, case[f"{estimator}.{key}"], f"{name} {estimator} {key}")
            assert ruler.passes(estimator, logp_Nn.shape[1]) == passes, (name, estimator)
        for key in case:
            if found := re.fullmatch(r"spg_K(\d+)_b([\d.]+)_w([\d.]+)\.mean", key):
                mean_3, var_3 = ruler.spg(logp_Nn, int(found[1]), float(found[2]), float(found[3]))
                close(mean_3, case[key], f"{name} {key}")
                close(var_3, case[key.removesuffix("mean") + "var"], f"{name} {key}")


def test_whole_policies(golden_dir):
    for name, case in ruler_cases(golden_dir, "policy.npz"):
        n = case["logits"].shape[1]
        for number, text in enumerate(map(str, case["rules"])):
            rule, tau, k = re.fullmatch(r"(.+)\|tau=(.+)\|k=(.+)", text).groups()
            policy = ruler.Policy(case["logits"], case["reward"], rule, float(tau), int(k))
            want = {
                key.partition(".")[2]: case[key] for key in case if key.startswith(f"rule{number}.")
            }
            close(policy.likelihood_X, want["likelihood"], f"{name} {text}")
            close(policy.likelihood_X.sum(), 1, f"{name} {text}")
            close(policy.value, want["value"], f"{name} {text}")
            grad_CnV = policy.gradient()
            close(grad_CnV, want["grad"], f"{name} {text}")
            tokens_only = ruler.cosine(policy.gradient("tokens_nV"), grad_CnV)
            close(tokens_only, want["cosine_tokens_only"], f"{name} {text}")
            for i, estimator in enumerate(map(str, case["estimators"])):
                elbo = estimator == "elbo"
                expected_CnV = policy.expected(
                    ruler.elbo_weights(n) if elbo else ruler.coefficients(estimator, n)[0]
                )
                close(
                    ruler.cosine(expected_CnV, grad_CnV),
                    want["cosine"][i],
                    f"{name} {text} {estimator}",
                )
                projection = (expected_CnV * grad_CnV).sum() / (grad_CnV**2).sum()
                close(projection, want["projection"][i], f"{name} {text} {estimator}")


@pytest.mark.parametrize("n", [1, 2, 5])
def test_the_relations_of_the_bounds(n):
    """elbo <= any order <= best order; all are one where the canvas does not matter; SPG's bound
    from beta = n on.
    """
    rng = np.random.default_rng(n)
    logits_NnV, answer_n = rng.normal(0, 2, (1 << n, n, 4)), rng.integers(0, 4, n)
    logp_Nn = ruler.answer_logp(logits_NnV, answer_n)
    elbo, value, best = (
        ruler.exact_elbo(logp_Nn),
        ruler.any_order(logp_Nn)[0],
        ruler.best_order(logp_Nn),
    )
    assert ruler.best_order(logp_Nn, min) - 1e-9 <= elbo <= value + 1e-9 <= best + 2e-9
    assert value >= best - math.log(math.factorial(n)) - 1e-9
    assert ruler.upper_bound(logp_Nn, n) >= value - 1e-9
    for steps in (1, 3, 40):
        bound, likelihood = ruler.ancestral(logp_Nn, "linear", steps)
        assert bound <= likelihood + 1e-9
    # many steps: one token each, in any order
    assert bound == pytest.approx(elbo, abs=0.05 * abs(elbo))
    same_Nn = ruler.answer_logp(np.broadcast_to(logits_NnV[:1], logits_NnV.shape), answer_n)
    want = same_Nn[-1].sum()
    found = (
        ruler.exact_elbo(same_Nn),
        ruler.any_order(same_Nn)[0],
        *ruler.ancestral(same_Nn, "cosine", 3),
    )
    np.testing.assert_allclose(found, want, rtol=1e-9)


@pytest.mark.slow
def test_spg_expects_the_derivative_of_its_mean_score():
    rng, n, mix = np.random.default_rng(0), 3, 0.3
    logp_Nn = np.where(ruler.sizes(n)[0], -rng.exponential(size=(1 << n, n)), 0)
    better_Nn, worse_Nn = (
        ruler.spg_weights(logp_Nn, [a], rng, K=2, beta=1.5, mix=mix)[0] for a in (1, -1)
    )
    for M, i in zip(*np.nonzero(ruler.sizes(n)[0]), strict=True):
        step_Nn = np.zeros_like(logp_Nn)
        step_Nn[M, i] = 1e-5
        lower, _, mixed = (
            ruler.spg(logp_Nn + step_Nn, 2, 1.5, mix)[0]
            - ruler.spg(logp_Nn - step_Nn, 2, 1.5, mix)[0]
        ) / 2e-5
        np.testing.assert_allclose([better_Nn[M, i], -worse_Nn[M, i]], [lower, mixed], atol=1e-9)


@pytest.mark.slow
def test_of_one_token_all_estimators_expect_the_exact_gradient():
    import model_dream as md

    cfg = md.DreamConfig(
        8, 16, 1, 2, 1, 8, 16, mask_id=4, pad_id=0, bos_id=1, eos_id=2, positions=16
    )
    model = nnx.merge(md.graph_of(cfg, md.Run()), md.new_params(cfg, 0))
    token_BL = np.array([[1, 3, 5, 6], [1, 5, 5, 3]], np.int32)
    canvases = ruler.Canvases(model, token_BL, np.ones(token_BL.shape, bool), 2)
    settings = ruler.Config(free=1, length=2, batches=3, prompts=2, group=8)
    lines = [
        line.split("|")[1:-1]
        for line in ruler.gradient_rows(canvases, settings)
        if line.startswith("| ")
    ][1:]
    assert len(lines) == 2 + len(ruler.GRADIENTS) - 1  # two strata are for an even number of tokens
    for name, _, expects, *_ in lines:
        # it rounds the number of masks down, here to none: its gradient is 0
        if "gdpo" not in name:
            assert float(expects) == 1, name


# names of the ruler; spg's lower score
SAME = {"d1": "one_pass", "gdpo": "gdpo_gauss-3", "spg": "count"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(grpo_run.SCORED_HERE))
def test_what_the_bench_trains_with_is_what_the_ruler_measures(kind):
    B, n, rng = 20_000, 4, np.random.default_rng(0)
    u_BKC, t_BK = rng.random((B, 3, n)), rng.random((B, 3))
    mask_BKC, weight_BKC = (
        np.asarray(x) for x in grpo_run.views_of(kind, u_BKC, t_BK, np.ones((B, n), bool))
    )
    coef_BNn, set_BK = np.zeros((B, 1 << n, n)), (mask_BKC << np.arange(n)).sum(-1)
    for k in range(mask_BKC.shape[1]):
        coef_BNn[np.arange(B), set_BK[:, k]] += weight_BKC[:, k] * mask_BKC[:, k]
    error_Nn = 5 * coef_BNn.std(0) / B**0.5 + 1e-6
    assert (abs(coef_BNn.mean(0) - ruler.coefficients(SAME.get(kind, kind), n)[0]) < error_Nn).all()

    if kind == "spg":
        logp_Nn = np.where(ruler.sizes(n)[0], -3 * rng.random((1 << n, n)), 0)
        score_BC = np.asarray(
            grpo_run.spg_score(logp_Nn[set_BK], mask_BKC, weight_BKC, np.ones((B, 1), bool))
        )
        means, variances = ruler.spg(logp_Nn, 3, 1.5, 0.5)
        assert abs(score_BC.sum(1).mean() / n - means[2]) < 5 * (variances[2] / B) ** 0.5
