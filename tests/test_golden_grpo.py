"""Reference values of Coupled-GRPO: masks, scores, loss, advantages, optimizer, a whole small run,
data and rewards.
"""

import functools
import hashlib
import json
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import cases_of

import corpus
import coupled_grpo
import data_prep
import diffusion
import grpo
import model_dream
import sandbox

pytestmark = pytest.mark.golden


def close(got, want, what="", tolerance=1e-5):
    np.testing.assert_allclose(np.asarray(got), want, rtol=tolerance, atol=tolerance, err_msg=what)


def both_masks(completion, u, ratio):
    """The masks with both inequalities strict, as in the reference, and the exact complement of the
    first.
    """
    one, two = diffusion.coupled_masks(completion, u, ratio)
    return one, two & (u != ratio), two


def canvases(golden_dir):
    """(name, case, ids, completion, u, ratio) of the golden masks, a row of u for each of ids."""
    for name, case in cases_of(golden_dir("grpo") / "forward_process.npz").items():
        ids, u = case["batch"], case["random_matrix"]
        u = np.tile(u, (len(ids) // len(u), 1))
        completion = np.broadcast_to(~case["prompt_index"], ids.shape)
        yield name, case, ids, completion, u, np.float32(case["mask_ratio"])


def test_coupled_masks(golden_dir, library):
    for _, case, ids, completion, u, ratio in canvases(golden_dir):
        one, two, complement = library(both_masks, completion, u, ratio)
        np.testing.assert_array_equal(one, case["completion_mask"] & completion)
        masks = {"noisy1": one, "noisy2": two, "noisy2_exact_complement": complement}
        for key, mask in masks.items():
            np.testing.assert_array_equal(np.where(mask, case["mask_id"], ids), case[key])


def test_the_three_versions_of_a_canvas(golden_dir):
    for name, case, ids, completion, u, ratio in canvases(golden_dir):
        arrays = map(jnp.asarray, (ids, completion, u, np.reshape(ratio, (-1, 1))))
        views, mask = grpo.coupled_views(*arrays, int(case["mask_id"]))
        want = np.stack([case[key] for key in ("noisy0", "noisy1", "noisy2_exact_complement")], 1)
        np.testing.assert_array_equal(views, want, err_msg=name)
        np.testing.assert_array_equal(mask, case["completion_mask"] & completion, err_msg=name)


def identity(x):
    return x


def test_scores_of_logits(golden_dir):
    merge = jax.jit(grpo.merge_views, static_argnums=(0, 5))
    for name, case in cases_of(golden_dir("grpo") / "selective_log_softmax.npz").items():
        n, (C, V) = int(case["num_iterations"]), case["logits"].shape[1:]
        logits = case["logits"].reshape(n, 3, -1, C, V)
        index, mask, want, want64 = (
            case[key].reshape(n, -1, C) for key in ("index", "mask", "out", "out64")
        )
        weights = case["weights"].reshape(n, 3)
        for i in range(n):
            hidden = jnp.asarray(logits[i].swapaxes(0, 1))  # the head is the identity
            score, _ = merge(identity, hidden, index[i], mask[i], (0.5, *weights[i, 1:] / 2), 7)
            close(score, want[i], name)
            close(score, want64[i], name)


def loss_arguments(case):
    """([old, or None for the score itself, ref, advantages], (beta, low, high))."""
    old = None if case.get("num_iterations") == 1 else case["old_per_token_logps"]
    numbers = (float(case[name]) for name in ("beta", "epsilon_low", "epsilon_high"))
    return (old, case["ref_per_token_logps"], case["advantages"]), tuple(numbers)


@functools.partial(jax.jit, static_argnames=("beta", "single"))
def loss_in_three_forms(score, old, ref, advantage, counted, beta, low, high, single):
    """grpo_loss with its gradient, clipped at 20 and not at all, and each token's loss."""

    def loss(score, counted, limit):
        form = grpo.Loss(beta, low, high, limit)
        return grpo.grpo_loss(score, score if single else old, ref, advantage, counted, form)

    gradient = jax.value_and_grad(loss, has_aux=True)
    one_hot = jnp.eye(score.size, dtype=bool).reshape(-1, *score.shape)
    per_token = jax.lax.map(lambda counted: loss(score, counted, math.inf)[0], one_hot)
    clipped, whole = (gradient(score, counted, limit) for limit in (20.0, math.inf))
    return clipped, whole, per_token.reshape(score.shape)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # what is inf in float32
def test_loss_gradient_and_metrics(golden_dir):
    cases = cases_of(golden_dir("grpo") / "loss.npz")
    largest = np.max([case["per_token_logps"].shape for case in cases.values()], axis=0)

    def to_one_shape(x):
        """Rows and columns that do not count, so that one program serves all cases."""
        return np.pad(x, [(0, size - n) for n, size in zip(x.shape, largest, strict=False)])

    for name, case in cases.items():
        (old, *arrays), numbers = loss_arguments(case)
        here = tuple(slice(size) for size in case["per_token_logps"].shape)
        case = {
            key: np.float32(value) if value.dtype == np.float64 else value
            for key, value in case.items()
        }
        score, counted = case["per_token_logps"], case["completion_mask"]
        inputs = [np.float32(x) for x in (score, score if old is None else old, *arrays)]
        inputs = [to_one_shape(x) for x in (*inputs, counted)]
        *results, per_token = loss_in_three_forms(*inputs, *numbers, single=old is None)
        clipped, parity = (((value, metrics), grad[here]) for (value, metrics), grad in results)
        close(per_token[here], case["per_token_loss64"], name)
        results = [parity, clipped]
        logarithms = [x[here] - score for x in inputs[1:3]][: 2 if case["beta"] else 1]
        # what the clipped logarithm is for
        if any((np.abs(x)[counted == 1] > 20).any() for x in logarithms):
            results = [parity]
            assert np.isfinite(clipped[0][0]), name
            assert np.isfinite(clipped[1]).all(), name
        for (value, metrics), grad in results:
            close(value, case["loss64"], name)
            # nan: outside the mask
            close(value, case["loss64"] if np.isnan(case["loss"]) else case["loss"], name)
            close(grad, np.where(counted == 1, case["grad"], 0.0), name)
            for key in ("kl", "clip_low", "clip_high"):
                close(metrics[key], case[key], f"{name} {key}")
            close(metrics["clip_low"] + metrics["clip_high"], case["clip_region"], name)


def test_gradient_of_the_logits(golden_dir):
    for name, case in cases_of(golden_dir("grpo") / "loss_grad_logits.npz").items():
        C, V = case["logits"].shape[1:]
        (old, *arrays), numbers = loss_arguments(case)

        def loss(logits, case=case, old=old, arrays=arrays, numbers=numbers, C=C, V=V):
            hidden = logits.reshape(3, -1, C, V).swapaxes(0, 1)
            weights = (0.5, *case["weights"][1:] / 2)
            score, _ = grpo.merge_views(identity, hidden, case["index"], case["mask"], weights, 4)
            inputs = (score if old is None else old, *arrays, case["completion_mask"])
            return grpo.grpo_loss(score, *inputs, grpo.Loss(*numbers))[0], score

        gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))
        (value, score), grad = gradient(jnp.asarray(case["logits"]))
        close(score, case["per_token_logps"], name)
        close(value, case["loss"], name)
        close(grad, case["dlogits"], name)


def test_completion_mask(golden_dir):
    for name, case in cases_of(golden_dir("grpo") / "completion_mask.npz").items():
        mask = grpo.completion_mask(case["completion_ids"], int(case["eos_id"]))
        np.testing.assert_array_equal(mask, case["completion_mask"] == 1, err_msg=name)
        np.testing.assert_array_equal(mask.sum(-1), case["lengths"], err_msg=name)


def missing_as_zero(rewards):
    """As in the reference, a reward that is not known is one of 0."""
    return np.nan_to_num(np.array(rewards, np.float64))


def test_advantages(golden_dir):
    for name, case in cases_of(golden_dir("grpo") / "advantages.npz").items():
        rewards, group = missing_as_zero(case["rewards_per_func"]), int(case["num_generations"])
        plain = grpo.group_advantages(rewards, case["reward_weights"], group)
        close(plain.reward_B, case["rewards"], name)
        close(plain.advantage_B, case["advantages"], name)
        assert plain.constant_B.mean() == case["zero_std_ratio"], name


@functools.cache
def round_plan(accumulate, iterations):
    """[(micro-batch, iteration, whether an update follows)] of the micro-steps of a round of
    Trainer.learn.
    """
    plan, B = [], 2 * accumulate

    def gradients(trained, base, total, inputs):
        plan.append((inputs["micro"], inputs["iteration"], False))
        return total, {"loss": 0.0}

    def update(trained, opt, total, count):
        assert count == accumulate
        plan[-1] = (*plan[-1][:2], True)
        return trained, opt, 1.0

    trainer = types.SimpleNamespace(
        cfg=coupled_grpo.Config(
            micro_batch=2, iterations=iterations, beta=0.0, group=B, reward_weights=(1.0,)
        ),
        gradients=gradients,
        update=update,
        to_devices=lambda batch, row_R, view: {"micro": row_R[0] // 2} | view,
        mesh=types.SimpleNamespace(size=1),
        trained={},
        base={},
        opt=None,
        updates=0,
    )
    views = [{"iteration": i} for i in range(iterations)]
    coupled_grpo.Trainer.learn(trainer, None, views, np.arange(float(B))[:, None])
    assert trainer.updates == iterations
    return plan


def reference_plan(accumulate, iterations):
    """round_plan with the reference's iteration: its counter is one ahead."""
    plan = round_plan(accumulate, iterations)
    return [(micro, (k + 1) % iterations, update) for k, (micro, _, update) in enumerate(plan)]


def test_iteration_index(golden_dir):
    for case in json.loads((golden_dir("grpo") / "schedule.json").read_text())["iteration_index"]:
        A, n = case["gradient_accumulation_steps"], case["num_iterations"]
        for step in case["steps"]:
            k = step["micro_step"] % (A * n)
            assert (k == 0) == step["generates"]
            for plan, key in ((round_plan, "correct_index"), (reference_plan, "reference_index")):
                micro, iteration, update = plan(A, n)[k]
                assert micro == step["micro_batch"]
                assert iteration == step[key]
                assert update == step["optimizer_step_after"]


def test_learning_rate(golden_dir):
    for case in json.loads((golden_dir("grpo") / "schedule.json").read_text())["lr"]:
        steps, want = case["total_steps"], np.array(case["lr_at_step"])
        assert math.ceil(steps * case["warmup_ratio"]) == case["warmup_steps"]
        settings = (case["warmup_steps"], case["min_lr_rate"])
        got = grpo.learning_rate(case["learning_rate"], steps, *settings)(np.arange(len(want)))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7 * case["learning_rate"])


def test_optimizer(golden_dir):
    for name, case in cases_of(golden_dir("grpo") / "optimizer.npz").items():
        names = sorted(key.removesuffix("_init") for key in case if key.endswith("_init"))
        params = {key: jnp.asarray(case[f"{key}_init"]) for key in names}
        peak, steps, warmup = case["learning_rate"], case["total_steps"], case["warmup_steps"]
        rate = grpo.learning_rate(float(peak), int(steps), int(warmup))
        limits = float(case["weight_decay"]), float(case["max_grad_norm"])
        optimizer = grpo.make_optimizer(rate, *limits)
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        for step, lr in enumerate(case["lr"]):
            np.testing.assert_allclose(rate(step), lr, rtol=1e-5, atol=1e-12)
            grads = {key: jnp.asarray(case[f"g{step}_{key[1:]}"]) for key in names}
            close(optax.tree.norm(grads), case[f"norm{step}"], name)
            updates, state = update(grads, state, params)
            params = optax.apply_updates(params, updates)
            for key in names:
                close(params[key], case[f"{key}_step{step + 1}"], f"{name} {key} step {step + 1}")


class Mixer:
    """The golden run's model: logits(ids) = tanh(mix @ emb[ids]) @ out."""

    cfg = model_dream.DreamConfig  # its defaults

    def __init__(self, params):
        self.params = params

    def hidden(self, token_BL, see_BM=None):
        L = token_BL.shape[1]
        mixed = jnp.einsum("lm,bmd->bld", self.params["mix"][:L, :L], self.params["emb"][token_BL])
        return jnp.tanh(mixed), None

    def logits(self, hidden_BTD):
        return hidden_BTD @ self.params["out"]


@functools.cache
def programs(mask_id, epsilon, beta):
    """(scores, gradients) of a Mixer: the mean gradient of some micro-batches, their losses, the
    first's gradient.
    """

    @jax.jit
    def scores(params, tokens, u, ratio):
        see = jnp.ones(tokens.shape, bool)
        batch = {"token_BL": tokens, "see_BL": see, "u_BC": u, "ratio_B": ratio}
        return grpo.coupled_scores(Mixer(params), batch, mask_id, 8)[0]

    @jax.jit
    def gradients(params, batches):
        def of_micro_batch(batch):
            def loss(params):
                form = grpo.Loss(beta=beta, low=epsilon, high=epsilon)
                return grpo.micro_loss(Mixer(params), batch, mask_id, form, 8)[0]

            return jax.value_and_grad(loss)(params)

        losses, grads = jax.lax.map(of_micro_batch, batches)
        return jax.tree.map(lambda g: g.mean(0), grads), losses, jax.tree.map(lambda g: g[0], grads)

    return scores, gradients


@pytest.mark.parametrize("variant", ["reference_index", "fixed_index"])
def test_a_whole_run(golden_dir, variant):
    everything = cases_of(golden_dir("grpo") / "end_to_end.npz")
    for name, run in everything.items():
        if "." not in name:
            check_run(everything, name, run, variant)


def check_run(everything, name, run, variant):
    names = ("emb", "mix", "out")
    want = everything[f"{name}.{variant}"]
    sizes = "gradient_accumulation_steps num_iterations micro_batch num_generations rounds"
    A, n, micro, group, rounds = (int(run[key]) for key in sizes.split())
    numbers = ("mask_id", "epsilon", "beta", "learning_rate")
    mask_id, epsilon, beta, rate = (run[key].item() for key in numbers)
    params = {key: jnp.asarray(run[key]) for key in names}
    ref = {key: jnp.asarray(run[f"ref_{key}"]) for key in names}
    plan = (reference_plan if variant == "reference_index" else round_plan)(A, n)
    scores, gradients = programs(mask_id, epsilon, beta)
    updates = taken = 0

    for r in range(rounds):
        data, cached = everything[f"{name}.round{r}"], everything[f"{name}.round{r}.{variant}"]
        tokens = jnp.asarray(np.concatenate([data["prompt_ids"], data["completion_ids"]], 1))
        C = data["completion_ids"].shape[1]
        counted = grpo.completion_mask(data["completion_ids"], int(run["eos_id"]))
        np.testing.assert_array_equal(counted, data["completion_mask"] == 1)
        advantages = grpo.group_advantages(
            missing_as_zero(data["rewards_per_func"]), run["reward_weights"], group
        )
        close(advantages.advantage_B, data["advantages"], name)
        u = jnp.asarray(np.tile(data["random_matrix"][:, :, -C:], (1, A, 1)))  # [n, A micro, C]
        ratio = data["mask_ratio"].astype(np.float32)
        old, known = (
            jnp.stack([scores(model, tokens, u[i], ratio[i]) for i in range(n)], 1)
            for model in (params, ref)
        )
        close(old, cached["old_per_token_logps"], f"{name} round {r}")
        close(known, cached["ref_per_token_logps"], f"{name} round {r}")
        rows = jnp.arange(A * micro).reshape(A, micro)
        for first in range(0, A * n, A):  # an update
            steps = plan[first : first + A]
            at = jnp.array([i for _, i, _ in steps])
            assert [k for k, _, _ in steps] == list(range(A))
            batches = {
                "token_BL": tokens[rows],
                "u_BC": u[at[:, None], rows],
                "ratio_B": jnp.asarray(ratio)[at[:, None]] * jnp.ones((A, micro)),
                "advantage_B": jnp.asarray(advantages.advantage_B, jnp.float32)[rows],
                "counted_BC": jnp.asarray(counted)[rows],
                "old_BC": old[rows, at[:, None]],
                "ref_BC": known[rows, at[:, None]],
                # in the first pass nothing was learnt since old, so the score itself must do as
                # well
                "first": jnp.full(A, first == 0),
                "see_BL": jnp.ones(tokens[rows].shape, bool),
            }
            grads, losses, grad0 = gradients(params, batches)
            for (_, i, _), loss in zip(steps, losses, strict=True):
                assert i == want["iteration_index"][taken]
                close(loss, want["losses"][taken], f"{name} micro-step {taken}")
                taken += 1
            for key in names if updates == 0 else ():
                close(grad0[key], want[f"grad0_{key}"], f"{name} first gradient of {key}")
            params = jax.tree.map(lambda p, g: p - rate * g, params, grads)
            updates += 1
            where = f"{name} after update {updates}"
            for key in names:
                close(params[key], want[f"step{updates}_{key}"], f"{where}: {key}")
            if updates % int(run["ref_model_sync_steps"]) == 0:
                ref = grpo.sync_reference(ref, params, float(run["ref_model_mixup_alpha"]))
                for key in names:
                    close(ref[key], want[f"ref_after{updates}_{key}"], f"{where}: reference {key}")
    assert taken == len(want["losses"])


def read_lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def prepared(rows, difficulty):
    """The tasks of a difficulty before anything is cleaned, and the ids of the rows they come
    from.
    """
    kept = corpus.choose(np.array([corpus.pass_rates(row) for row in rows]), difficulty)
    chosen = [row for row, keep in zip(rows, kept, strict=True) if keep]
    tasks = [task for row in chosen for task in corpus.with_twin(row)]
    return tasks, [row["id"] for row in chosen]


def test_acecode(golden_dir):
    folder = golden_dir("grpo")
    rows = read_lines(folder / "acecode_sample.jsonl")
    want = json.loads((folder / "acecode_expected.json").read_text())
    assert list(corpus.COUNTED) == want["counted_models"]
    rates = np.stack([want["mean_acc"], want["std_acc"]], 1)
    close([corpus.pass_rates(row) for row in rows], rates, "", 1e-12)
    for difficulty in ("hard", "all"):
        tasks, kept = prepared(rows, difficulty)
        assert kept == want["kept_ids"][difficulty]
        assert len(tasks) == want[f"{difficulty}_rows_after_transform"]
        digest = hashlib.sha256("\0".join(task["question"] for task in tasks).encode()).hexdigest()
        assert digest == want[f"{difficulty}_sha256_of_questions"], difficulty
        assert all(list(task) == want["columns"] for task in tasks)
        assert tasks == read_lines(folder / f"acecode_expected_{difficulty}.jsonl"), difficulty
    for task, (system, user) in zip(prepared(rows, "hard")[0], want["hard_prompts"], strict=True):
        assert system == {"role": "system", "content": coupled_grpo.SYSTEM}
        assert user["content"] == coupled_grpo.question_of(task) == corpus.question_of(task)


@pytest.mark.parametrize("difficulty", ["hard", "all"])
def test_acecode_from_the_command(golden_dir, tmp_path, difficulty):
    sample = golden_dir("grpo") / "acecode_sample.jsonl"
    settings = {"roots": (str(sample),), "out": str(tmp_path / "out"), "heldout": 0.0}
    data_prep.main(data_prep.AceCode(**settings, difficulty=difficulty))
    want = read_lines(golden_dir("grpo") / f"acecode_expected_{difficulty}.jsonl")
    # nothing in the sample needs cleaning
    assert read_lines(tmp_path / "out" / "train.jsonl") == want


def test_rewards(golden_dir):
    cases = json.loads((golden_dir("grpo") / "rewards.json").read_text(encoding="utf-8"))
    assert cases
    for name in ("code_format", "code"):
        other = cases
        for timeout_s in (0.5, 10):  # the second for those that a busy machine held up
            completions = [case["completion"] for case in other]
            rewards = sandbox.REWARDS[name](completions, other, timeout_s=timeout_s)
            pairs = zip(other, rewards, strict=True)
            other = [case for case, reward in pairs if reward != case[f"{name}_hardened"]]
            if not other:
                break
        assert not other, [(case["name"], name) for case in other]
