"""Reference values of PythonCoder (tests/golden/pythoncoder/README.md), every case of every file.

The attention core is in test_diff_attention.py, packing in test_data_prep.py, grad_accum and wsd in
test_train_tpu.py, pass_at_k in test_benchmarks.py, truncate in test_generate.py.
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_model_pythoncoder import stack_layers

import checkpoints
import model_pythoncoder as pc
from diff_attention import lambda_value

pytestmark = [pytest.mark.golden, pytest.mark.usefixtures("exact_matmuls")]


def capped(x, cap):
    """c tanh(x / c), which some golden cases ask for and the model does not have."""
    return cap * jnp.tanh(x / cap) if cap else x


def clamped(golden, *vectors, clamp):
    """lambda_value, clamped if the golden case is: the model clamps where it has a floor."""
    return lambda_value(*vectors, clamp=golden)


def golden_cross_entropy(cross_entropy, cap, z_loss, chunk=None):
    """cross_entropy of capped logits, plus z_loss logsumexp^2: golden cases have both, the model
    neither. Capped logits are given to a head that returns its input.
    """

    def call(hidden_BLD, weight_VD, label_BL, mask_BL, chunk_tokens=chunk):
        logits_BLV = capped(hidden_BLD @ weight_VD.T, cap)
        inputs = (logits_BLV, jnp.eye(len(weight_VD))) if cap else (hidden_BLD, weight_VD)
        loss = cross_entropy(*inputs, label_BL, mask_BL, chunk_tokens)
        z_BL = z_loss * jax.nn.logsumexp(logits_BLV, -1) ** 2
        return loss + jnp.sum(z_BL * mask_BL)

    return call


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def relative(got, want):
    return np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max()


def read(folder, name):
    return json.loads((folder / f"{name}.json").read_text()), np.load(folder / f"{name}.npz")


def test_rope_and_yarn_tables_and_rotation(golden_dir):
    settings, arrays = read(golden_dir("pythoncoder"), "rope_yarn")
    for case in settings["cases"]:
        i = case["index"]
        names = "head_dim theta factor original_max_position beta_fast beta_slow truncate"
        inv_freq, factor = pc.rope_frequencies(*(case[name] for name in names.split()))
        assert relative(inv_freq, arrays[f"{i}/inv_freq"]) < 1e-6
        assert factor == pytest.approx(case["attention_factor"], rel=1e-12)
        cos, sin = pc.rope_table(jnp.asarray(arrays["positions"])[None], inv_freq, factor)
        x_LHK = jnp.asarray(arrays[f"{i}/x"])
        for by_matmul in (False, True):
            rotated = pc.rotate(x_LHK, cos[0, :, None], sin[0, :, None], by_matmul)
            np.testing.assert_allclose(rotated, arrays[f"{i}/rotated"], atol=2e-3)
        half = case["head_dim"] // 2
        np.testing.assert_allclose(cos[0, :, :half], arrays[f"{i}/cos"], atol=2e-3)
        np.testing.assert_allclose(sin[0, :, half:], arrays[f"{i}/sin"], atol=2e-3)


@pytest.mark.parametrize("chunk", [5, slow(1000), slow(1), slow(8)])
def test_cross_entropy_and_its_gradients_in_any_chunking(golden_dir, chunk):
    settings, arrays = read(golden_dir("pythoncoder"), "cross_entropy")
    for case in settings["cases"]:
        names = ("hidden", "weight", "labels", "mask")
        get = {name: jnp.asarray(arrays[f"{case['index']}/{name}"]) for name in names}

        def loss(hidden, weight, get=get, case=case):
            golden = golden_cross_entropy(pc.cross_entropy, case["softcap"], case["z_loss"], chunk)
            return golden(hidden[None], weight, get["labels"][None], get["mask"][None])

        both = jax.jit(
            lambda *inputs, loss=loss: (loss(*inputs), jax.value_and_grad(loss, (0, 1))(*inputs))
        )
        alone, (value, (dhidden, dweight)) = both(get["hidden"], get["weight"])
        assert float(alone) == pytest.approx(case["loss_sum"], rel=1e-5)
        assert float(value) == pytest.approx(case["loss_sum"], rel=1e-5)
        assert relative(dhidden, arrays[f"{case['index']}/dhidden"]) < 1e-5
        assert relative(dweight, arrays[f"{case['index']}/dweight"]) < 1e-5


def test_mtp_loss_masks_and_means(golden_dir):
    settings, arrays = read(golden_dir("pythoncoder"), "mtp_loss")
    for case in settings["cases"]:
        index = f"{case['index']}/"
        get = {k.removeprefix(index): arrays[k] for k in arrays.files if k.startswith(index)}
        masks = pc.target_masks(jnp.asarray(get["segments"]))
        losses = []
        for ahead, mask, name in zip((1, 2), masks, ("main", "mtp"), strict=True):
            np.testing.assert_array_equal(mask, get[f"{name}_mask"])
            assert int(mask.sum()) == case[f"{name}_tokens"]
            label = jnp.roll(jnp.asarray(get["tokens"]), -ahead, 1)
            # the golden gives logits: a head that returns its input
            logits_BLV = jnp.asarray(get[f"{name}_logits"])
            total = jax.jit(pc.cross_entropy)(logits_BLV, jnp.eye(case["vocab"]), label, mask)
            losses.append(float(total) / float(mask.sum()))
            assert losses[-1] == pytest.approx(case[f"{name}_loss"], rel=1e-5)
        assert losses[0] + case["mtp_weight"] * losses[1] == pytest.approx(case["total"], rel=1e-5)


def tiny_config(base, changes):
    """The golden's names -> our Config."""
    b = base | changes
    sizes = "vocab hidden layers heads kv_heads head_dim ffn theta yarn_original yarn_factor"
    diff = "seed" if b["floor"] else "paper"
    norms = {"eps": b["eps"], "subln_eps": b["subln_eps"]}
    return pc.Config(*(b[name] for name in sizes.split()), diff=diff, **norms)


def tiny_params(arrays, cfg):
    return stack_layers({k[6:]: arrays[k] for k in arrays.files if k.startswith("param/")}, cfg)


@pytest.mark.parametrize("remat", ["none", slow("qkvo"), slow("full")])
@pytest.mark.parametrize("name", ["seed", slow("nofloor"), "caps", slow("yarn")])
def test_whole_model_logits_losses_and_gradients(golden_dir, name, remat, monkeypatch):
    attention, cross_entropy = pc.attention, pc.cross_entropy
    methods = {name: getattr(pc.PythonCoder, name) for name in ("hidden", "mtp_hidden")}
    settings, arrays = read(golden_dir("pythoncoder"), "tiny_model")
    token_BL, segment_BL, position_BL = (
        jnp.asarray(arrays[k]) for k in ("tokens", "segments", "positions")
    )
    assert len(settings["variants"]) == 4
    variant = settings["variants"][name]
    b = settings["base"] | variant["config"]
    cfg = tiny_config(settings["base"], variant["config"])
    compute = pc.Compute(remat=remat, block=7, loss_tokens=8, yarn=b["yarn_factor"] > 1)
    graph, params = pc.graph_of(cfg, compute), tiny_params(arrays, cfg)
    z_losses = iter((b["z_loss"], 0.0))  # the term is of the main head alone, which comes first

    def golden_loss(*args):
        return golden_cross_entropy(cross_entropy, b["final_cap"], next(z_losses))(*args)

    monkeypatch.setattr(pc, "attention", functools.partial(attention, cap=b["attn_cap"]))
    monkeypatch.setattr(pc, "cross_entropy", golden_loss)
    monkeypatch.setattr(pc, "lambda_value", functools.partial(clamped, b["clamp"]))
    states = {}  # what hidden and mtp_hidden return inside losses
    for method, original in methods.items():

        def recorded(*args, method=method, original=original):
            states[method] = original(*args)
            return states[method]

        monkeypatch.setattr(pc.PythonCoder, method, recorded)

    def loss(params):
        model = nnx.merge(graph, params)
        main, mtp = model.losses(token_BL, segment_BL, position_BL)
        main_BL, mtp_BL = pc.target_masks(segment_BL)
        main, mtp = main / main_BL.sum(), mtp / mtp_BL.sum()
        tensors = {
            "hidden": states["hidden"],
            "logits": capped(model.logits(states["hidden"]), b["final_cap"]),
            "mtp_logits": capped(model.logits(states["mtp_hidden"], "mtp"), b["final_cap"]),
        }
        return main + b["mtp_weight"] * mtp, (main, mtp, tensors)

    results, grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    total, (main, mtp, tensors) = results
    for got, key in ((total, "total"), (main, "main"), (mtp, "mtp")):
        assert float(got) == pytest.approx(variant[key], rel=1e-5)
    for key, got in tensors.items():
        end = -1 if key == "mtp_logits" else None  # the last position has no next token
        want = arrays[f"{name}/{key}"][:, :end]
        np.testing.assert_allclose(got[:, :end], want, atol=1e-4, err_msg=key)
    flat = checkpoints.flatten(grads)
    for tensor, want in variant["directional_derivatives"].items():
        first, _, rest = tensor.partition(".")
        if first == "layers":
            layer, _, part = rest.partition(".")
            grad = flat[f"layers.{part}"][int(layer)]
        else:
            grad = flat[tensor]
        grad = np.asarray(grad, np.float64).ravel()
        along = grad @ np.cos(0.7 + 1.3 * np.arange(grad.size))
        assert along == pytest.approx(want, rel=1e-3), tensor


@pytest.mark.parametrize("speculate", [False, True])
def test_greedy_text_with_and_without_the_draft_head(golden_dir, speculate, monkeypatch):
    settings, arrays = read(golden_dir("pythoncoder"), "tiny_model")
    monkeypatch.setattr(pc, "lambda_value", functools.partial(clamped, settings["base"]["clamp"]))
    attention = functools.partial(pc.attention, cap=settings["base"]["attn_cap"])
    monkeypatch.setattr(pc, "attention", attention)
    assert settings["base"]["yarn_factor"] == 1
    # the golden runs past yarn_original
    cfg = dataclasses.replace(tiny_config(settings["base"], {}), positions=4096)
    model = nnx.merge(pc.graph_of(cfg, pc.Compute()), tiny_params(arrays, cfg))
    # always n rows: one compiled program
    rule, n = pc.Sampling(speculate=speculate), len(settings["greedy"])
    for case in settings["greedy"]:
        prompts, new = [case["prompt"]] * n, len(case["greedy"])
        texts, stats = pc.generate(model, prompts, new, rule, jax.random.key(0))
        assert texts == [case["greedy"]] * n
        if speculate:
            assert stats["forwards"] == n * case["calls"]
            assert stats["accepted"] == n * case["accepted"]
        else:
            assert stats["forwards"] == sum(map(len, texts))
    prompts = [case["prompt"] for case in settings["greedy"]]
    # lengths differ: padding is no matter
    prompts = [prompt[min(i, len(prompt) - 2) :] for i, prompt in enumerate(prompts)]
    texts, _ = pc.generate(model, prompts, 9, rule, jax.random.key(0), chunk=2)
    for prompt, text in zip(prompts, texts, strict=True):
        assert pc.generate(model, [prompt] * n, 9, rule, jax.random.key(1))[0] == [text] * n


def verify(p_BV, q_BV, draft_B, u_B, key, rule):
    """The draft with probability min(1, p/q), else a draw from max(p - q, 0), and whether it was
    taken. The model itself compares draws with equal noise. Ref: arXiv:2211.17192, alg. 1.
    """
    p_B, q_B = (jnp.take_along_axis(x, draft_B[:, None], 1)[:, 0] for x in (p_BV, q_BV))
    accepted_B = u_B * q_B < p_B
    other_B = pc.draw(jnp.maximum(p_BV - q_BV, 0), key, jnp.arange(len(p_BV)), rule)
    return jnp.where(accepted_B, draft_B, other_B), accepted_B


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Table:
    """main[x_{t-1}][x_t] gives the next token's logits, draft[x_t][x_{t+1}] the draft's; the cache
    is the text.
    """

    main_VVV: jax.Array
    draft_VVV: jax.Array

    def new_cache(self, batch, slots):
        return jnp.zeros((batch, slots), jnp.int32)

    def step(self, cache, token_BL, index_BL):
        cache = cache.at[jnp.arange(len(cache))[:, None], index_BL].set(token_BL)
        return jnp.stack([jnp.take_along_axis(cache, index_BL - 1, 1), token_BL], -1), cache

    def logits(self, hidden):
        return self.main_VVV[hidden[..., 0], hidden[..., 1]]

    def draft(self, hidden, token_BL):
        return self.draft_VVV[hidden[..., 1], token_BL]


def test_the_models_own_rule_accepts_a_greedy_draft_with_its_probability(golden_dir):
    """advance() on a table whose every draft is the greedy one."""
    rules = json.loads((golden_dir("pythoncoder") / "spec_decode.json").read_text())["rules"]
    n, key = 4000, jax.random.key(0)
    prompt_B1, length_B = np.zeros((n, 1), np.int32), np.ones(n, np.int32)
    V = max(len(case["p"]) for case in rules)  # compiled once for each rule
    for case in rules:
        rule = pc.Sampling(temperature=case["temperature"], top_p=case["top_p"])
        greedy, pad = case["greedy_draft"], (0, V - len(case["p"]))
        target_V = jnp.pad(jnp.asarray(case["target_logits"]), pad, constant_values=-jnp.inf)
        one_hot_V = 1e4 * jax.nn.one_hot(greedy["token"], V)
        model = Table(*(jnp.tile(logits_V, (V, V, 1)) for logits_V in (target_V, one_hot_V)))
        state = pc.start(model, prompt_B1, length_B, length_B + 3, key, slots=8, rule=rule)
        state = pc.advance(model, state, 1, rule=rule)
        accepted_B, token_B = np.array(state["accepted_B"]) > 0, np.array(state["token_BM"])[:, 2]
        p = greedy["accept_probability"]
        assert accepted_B.mean() == pytest.approx(p, abs=4 * np.sqrt(p * (1 - p) / n))
        np.testing.assert_array_equal(accepted_B, token_B == greedy["token"])
        np.testing.assert_array_equal(state["length_B"], 3 + accepted_B)
        rejected = token_B[~accepted_B]
        frequency_V = np.bincount(rejected, minlength=V) / len(rejected)
        error = 4 * np.sqrt(0.25 / len(rejected))
        np.testing.assert_allclose(frequency_V, np.pad(greedy["residual"], pad), atol=error)


def test_acceptance_rule_and_residual(golden_dir):
    rules = json.loads((golden_dir("pythoncoder") / "spec_decode.json").read_text())["rules"]
    probabilities, check = (jax.jit(f, static_argnames="rule") for f in (pc.probabilities, verify))
    for case in rules:
        rule = pc.Sampling(temperature=case["temperature"], top_p=case["top_p"])
        logits = [jnp.asarray(case[f"{name}_logits"]) for name in ("target", "draft")]
        p_V, q_V = (probabilities(logits_V, rule=rule) for logits_V in logits)
        np.testing.assert_allclose(p_V, case["p"], atol=1e-6)
        np.testing.assert_allclose(q_V, case["q"], atol=1e-6)
        V, n = len(case["p"]), 4000
        drafts = [(d, q_V, p, case["residual"]) for d, p in enumerate(case["accept_probability"])]
        greedy = case["greedy_draft"]
        one_hot_V = jax.nn.one_hot(greedy["token"], V)
        expected = greedy["accept_probability"], greedy["residual"]
        drafts.append((greedy["token"], one_hot_V, *expected))
        for d, q, accept, residual in drafts:
            if accept is None:  # the draft head never proposes this token
                continue
            u_B = (jnp.arange(n) + 0.5) / n  # a grid: the fraction accepted is the probability
            p_BV, q_BV = (np.broadcast_to(x, (n, V)) for x in (p_V, q))
            draft_B, key = np.full(n, d), jax.random.key(d)
            results = check(p_BV, q_BV, draft_B, u_B, key, rule=pc.Sampling(1.0))
            token_B, accepted_B = map(np.asarray, results)
            assert float(accepted_B.mean()) == pytest.approx(accept, abs=1 / n)
            assert np.all(token_B[accepted_B] == d)
            rejected = token_B[~accepted_B]
            if len(rejected) > 100:
                frequency_V = np.bincount(rejected, minlength=V) / len(rejected)
                error = 4 * np.sqrt(0.25 / len(rejected))
                np.testing.assert_allclose(frequency_V, residual, atol=error)


def test_self_speculation_on_a_table_language_model(golden_dir):
    table = json.loads((golden_dir("pythoncoder") / "spec_decode.json").read_text())["table_model"]
    # compiled once for all runs: one length of the texts, and one of the prompts
    model, key = Table(jnp.asarray(table["main"]), jnp.asarray(table["draft"])), jax.random.key(0)
    slots = max(len(run["prompt"]) + run["new_tokens"] + 2 for run in table["runs"])
    longest = max(len(run["prompt"]) for run in table["runs"])
    for run in table["runs"]:
        prompt, new = run["prompt"], run["new_tokens"]
        prompt_BL, length_B = np.zeros((1, longest), np.int32), np.array([len(prompt)])
        prompt_BL[0, : len(prompt)] = prompt
        for speculate in (False, True):
            rule = pc.Sampling(speculate=speculate)
            begin = functools.partial(pc.start, model, prompt_BL, length_B, length_B + new, key)
            state = begin(slots=slots, rule=rule)
            committed, length = [], len(prompt)
            while True:
                end = int(state["length_B"][0])
                committed.append(np.asarray(state["token_BM"])[0, length:end].tolist())
                length = end
                if state["done_B"].all():
                    break
                state = pc.advance(model, state, 1, rule=rule)
            assert [token for call in committed for token in call][:new] == run["greedy"]
            if speculate:
                assert committed[:-1] == run["committed_per_call"][:-1]
                # we stop at the limit
                assert committed[-1] == run["committed_per_call"][-1][: len(committed[-1])]
                assert int(state["forwards_B"][0]) == run["calls"]
                assert int(state["accepted_B"][0]) == run["accepted_drafts"]
            else:
                assert committed == [[token] for token in run["greedy"]]
