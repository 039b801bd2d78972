"""PythonCoder apart from its reference values: packing, caches, dropout, sharding, sampling."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import checkpoints
import diff_attention
import model_pythoncoder as pc
import runs

TINY = pc.Config(64, 32, 2, 4, 2, head_size=8, ffn=48, positions=64)
# what does not depend on depth compiles in half the time
SHALLOW = dataclasses.replace(TINY, layers=1)


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


# "paper" is "seed" without a floor, "none" is "v2" without its gate
forms = pytest.mark.parametrize("diff", ["seed", "v2", slow("paper"), slow("none")])


@functools.cache
def new_params(cfg):
    return jax.jit(lambda: pc.new_params(cfg, 0))()


def build(cfg, **run):
    """A model whose weights are large enough for every part to matter."""
    params = jax.tree.map(lambda x: x * 5 if x.ndim > 2 else x, new_params(cfg))
    return nnx.merge(pc.graph_of(cfg, pc.Compute(**run)), params)


@jax.jit
def logits(model, token_BL, segment_BL=None, position_BL=None):
    return model.logits(model.hidden(model.lookup(token_BL), segment_BL, position_BL))


@jax.jit
def step(model, cache, token_BL, index_BL):
    hidden_BLD, cache = model.step(cache, token_BL, index_BL)
    return model.logits(hidden_BLD), cache


def tokens(shape, vocab=64, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(1, vocab, shape), jnp.int32)


def test_the_1b_preset_has_the_parameters_of_the_spec():
    parts = pc.param_shapes(pc.CONFIGS["1b"]).items()
    counts = {name: sum(x.size for x in jax.tree.leaves(part)) for name, part in parts}
    assert pc.count_params(pc.CONFIGS["1b"]) == 1_075_150_848
    assert counts["embed"] == 233_177_088
    assert counts["layers"] == 24 * (4_718_592 + 1_572_864 + 18_874_368 + 3_072 + 512 + 256)
    assert counts["mtp"] == 233_177_088 + 4_718_592 + 4_608
    assert pc.flops_per_token(pc.CONFIGS["1b"], 2048) == pytest.approx(6.90e9, rel=1e-3)


@pytest.mark.parametrize("init_std", [slow("paper"), "fan_in"])
def test_new_matrices_have_the_size_that_their_form_says(init_std):
    cfg = dataclasses.replace(TINY, vocab=512, heads=8, init_std=init_std)
    params, N = checkpoints.flatten(new_params(cfg)), cfg.layers
    # and rows
    matrices = {"layers.wq": 32, "layers.w_up": 32, "layers.wo": 64, "layers.w_down": 48}
    matrices["mtp.proj"] = 64
    for name, fan_in in matrices.items():
        std = fan_in**-0.5 if init_std == "fan_in" else 0.02
        std /= np.sqrt(2 * N) if name in ("layers.wo", "layers.w_down") else 1
        assert np.std(params[name]) == pytest.approx(std, rel=0.08), name
    model = nnx.merge(pc.graph_of(cfg, pc.Compute()), new_params(cfg))
    size = np.std(model.lookup(tokens((8, 64), 512)))
    assert size == pytest.approx(1 if init_std == "fan_in" else 0.02, rel=0.08)


@forms
def test_tokens_reach_what_comes_later_in_their_document_also_through_a_cache(diff):
    """A changed token, packed documents and cached steps, all against one compiled pass over rows
    of 24 tokens.
    """
    model, token_BL = build(dataclasses.replace(TINY, diff=diff)), tokens((2, 24))
    whole = jnp.ones((2, 24), jnp.int32), jnp.broadcast_to(jnp.arange(24), (2, 24))
    before = logits(model, token_BL, *whole)
    moved_BL = np.abs(before - logits(model, token_BL.at[0, 11].add(1), *whole)).max(-1) > 1e-6
    assert not moved_BL[0, :11].any()
    assert moved_BL[0, 11:].all()
    assert not moved_BL[1].any()
    # the first 10 tokens of one row, then the first 14 of the other
    packed_BL = jnp.concatenate([token_BL[:1, :10], token_BL[1:, :14]], 1)
    segment_BL, position_BL = [[1] * 10 + [2] * 14], [[*range(10), *range(14)]]
    packed = [jnp.tile(jnp.array(x), (2, 1)) for x in (packed_BL, segment_BL, position_BL)]
    got = logits(model, *packed)[0]
    np.testing.assert_allclose(got[:10], before[0, :10], atol=1e-5)
    np.testing.assert_allclose(got[10:], before[1, :14], atol=1e-5)
    cache, at, got = model.new_cache(2, 32), 0, []
    for n in (8, 1, 1, 8, 1, 1):
        index_BL = jnp.broadcast_to(jnp.arange(at, at + n), (2, n))
        logits_BLV, cache = step(model, cache, token_BL[:, at : at + n], index_BL)
        got.append(logits_BLV)
        at += n
    np.testing.assert_allclose(np.concatenate(got, 1), before[:, :at], atol=2e-5)


@pytest.mark.parametrize("slots", [32, 64])
def test_a_pass_over_one_token_copies_no_cache(slots):
    """XLA on a CPU copied it four times a pass, where all heads were written as one slice."""
    model = build(dataclasses.replace(TINY, kv_heads=4))
    length_B = np.array([3], np.int32)
    rule = pc.Sampling(speculate=False)
    inputs = tokens((1, 8)), length_B, length_B + 9, jax.random.key(0), slots, rule
    state = pc.start(model, *inputs, layers := pc.apart(model))
    program = pc.advance.lower(model, state, 4, rule, layers).compile().as_text()
    assert f",{slots},8]" in program
    assert not re.search(rf"= \S*,{slots},(8|16)\]\S* copy\(", program)


@pytest.mark.slow
def test_rejected_slots_are_forgotten_when_written_again():
    model, token_BL = build(TINY), tokens((1, 12))
    cache = model.new_cache(1, 16)
    _, cache = step(model, cache, token_BL[:, :8], jnp.arange(8)[None])
    # drafts that are rejected
    _, cache = step(model, cache, jnp.array([[63, 62]]), jnp.array([[8, 9]]))
    got, _ = step(model, cache, token_BL[:, 8:], jnp.arange(8, 12)[None])
    np.testing.assert_allclose(got, logits(model, token_BL)[:, 8:], atol=2e-5)


def test_a_token_however_unlikely_has_a_finite_loss_and_gradient():
    """The sums of cross_entropy are relative to the label's logit, however low."""
    label, mask = jnp.full((1, 1), 3), jnp.ones((1, 1))

    def plain(logits):
        return jax.nn.logsumexp(logits) - logits[0, 0, 3]

    for gap in (0.0, 20.0, 70.0, 1000.0):  # of the others above the label
        logits = jnp.full((1, 1, 5), gap).at[0, 0, 3].set(0.0)
        ours = jax.value_and_grad(pc.cross_entropy)(logits, jnp.eye(5), label, mask)
        for got, want in zip(ours, jax.value_and_grad(plain)(jnp.minimum(logits, 75)), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)


def test_dropout_drops_its_rate_scales_the_rest_and_depends_on_seed_and_place():
    x, rate = jnp.ones((64, 128, 32)), 0.1
    seeds = [jnp.array([s, 7], jnp.uint32) for s in (1, 2)]
    a, b = (np.asarray(pc.dropout(x, jnp.arange(64), seed, rate)) for seed in seeds)
    n = x.size
    for mask in (a == 0, b == 0):
        assert mask.mean() == pytest.approx(rate, abs=5 * np.sqrt(rate * (1 - rate) / n))
        for axis in range(3):  # neighbours along every axis are independent
            pairs = (mask & np.roll(mask, 1, axis)).mean()
            assert pairs == pytest.approx(rate**2, abs=5 * np.sqrt(rate**2 / n))
    assert ((a == 0) & (b == 0)).mean() == pytest.approx(rate**2, abs=5 * np.sqrt(rate**2 / n))
    np.testing.assert_allclose(np.unique(a), [0, 1 / (1 - rate)], rtol=1e-6)
    part = pc.dropout(x[:8], jnp.arange(16, 24), jnp.array([1, 7], jnp.uint32), rate)
    assert (np.asarray(part) == a[16:24]).all()  # rows keep their masks when split
    assert pc.dropout(x, None, None, 0.0) is x


def test_dropout_is_on_in_training_and_off_elsewhere():
    model, token_BL = build(TINY, dropout=0.3), tokens((1, 16))
    segment, position = jnp.ones((1, 16), jnp.int32), jnp.arange(16)[None]
    losses = jax.jit(lambda model, key: model.losses(token_BL, segment, position, key)[0])
    assert losses(model, None) == losses(model, None) != losses(model, jax.random.key(0))
    assert losses(model, jax.random.key(0)) != losses(model, jax.random.key(1))
    assert losses(model, jax.random.key(0)) == losses(model, jax.random.key(0))


@pytest.mark.parametrize(
    ("kernel", "cfg", "want"),
    [
        ("gpu", {}, None),
        ("gpu", {"diff": "paper"}, "attention_gpu"),
        ("gpu", {"diff": "none"}, "attention_gpu"),
        ("tpu", {}, "attention_tpu"),
        ("tpu", {"diff": "v2"}, "plain_tpu"),
        ("gpu", {"diff": "v2", "head_size": 20}, None),
        ("", {}, None),
    ],
)
def test_the_fused_kernel_is_taken_where_it_fits(kernel, cfg, want):
    cfg = dataclasses.replace(TINY, **{"head_size": 32} | cfg)
    found = diff_attention.training_kernel(kernel, cfg.maps, cfg.head_size, cfg.diff == "seed")
    assert getattr(found, "__name__", None) == want


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "qkvo"])
def test_the_gradient_of_sums_is_sums_plus_that_of_the_layers(remat):
    graph, params = nnx.split(build(dataclasses.replace(TINY, layers=3), remat=remat, dropout=0.1))
    params, token_BL = nnx.to_pure_dict(params), tokens((2, 16))
    segment, position = jnp.ones((2, 16), jnp.int32), jnp.arange(16)[None]
    sums = jax.tree.map(lambda x: jnp.sin(jnp.arange(x.size)).reshape(x.shape), params["layers"])

    def loss(params, sums):
        key = jax.random.key(0)
        return sum(nnx.merge(graph, params).losses(token_BL, segment, position, key, sums=sums))

    want, want_grads = jax.jit(jax.value_and_grad(loss))(params, None)
    got, (grads, new_sums) = jax.jit(jax.value_and_grad(loss, (0, 1)))(params, sums)
    assert got == want
    assert all((g == 0).all() for g in jax.tree.leaves(grads["layers"]))
    wanted = want_grads | {"layers": jax.tree.map(jnp.add, sums, want_grads["layers"])}
    for name, grad in checkpoints.flatten(grads | {"layers": new_sums}).items():
        want = checkpoints.flatten(wanted)[name]
        np.testing.assert_allclose(grad, want, atol=1e-5 * np.abs(want).max(), err_msg=name)


@pytest.mark.parametrize(("tensor", "remat"), [(2, "none"), slow(1, "qkvo"), slow(2, "qkvo")])
def test_eight_devices_give_the_losses_and_gradients_of_one(tensor, remat):
    cfg = dataclasses.replace(TINY, kv_heads=4)
    params, token_BL = new_params(cfg), tokens((8, 32))
    segment_BL = jnp.asarray(np.sort(np.random.default_rng(0).integers(1, 4, (8, 32)), 1))
    position_BL = jnp.broadcast_to(jnp.arange(32), (8, 32))
    graph = pc.graph_of(cfg, pc.Compute(dropout=0.1, remat=remat, loss_tokens=16))

    def loss(params, *batch):
        return sum(nnx.merge(graph, params).losses(*batch, jax.random.key(3)))

    batch = token_BL, segment_BL, position_BL
    want, want_grads = jax.jit(jax.value_and_grad(loss))(params, *batch)
    names, shape = ("data", "fsdp", "tensor"), (2, 4 // tensor, tensor)
    mesh = jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * 3)
    params = jax.device_put(params, pc.shardings(mesh, params))
    batch = jax.device_put(batch, jax.NamedSharding(mesh, jax.P(pc.BATCH)))
    with jax.set_mesh(mesh):
        got, grads = jax.jit(jax.value_and_grad(loss))(params, *batch)
    assert float(got) == pytest.approx(float(want), rel=1e-5)
    for name, grad in checkpoints.flatten(grads).items():
        want = checkpoints.flatten(want_grads)[name]
        np.testing.assert_allclose(grad, want, atol=1e-4 * np.abs(want).max() + 1e-7, err_msg=name)


@pytest.mark.slow
def test_bfloat16_computation_is_near_float32():
    batch = tokens((2, 32)), jnp.ones((2, 32), jnp.int32), jnp.arange(32)[None]
    wide, narrow = (build(TINY, dtype=d).losses(*batch)[0] for d in (jnp.float32, jnp.bfloat16))
    assert float(wide) == pytest.approx(float(narrow), rel=5e-3)


@pytest.mark.parametrize(
    "how", [(1.0, 6, 0.95), *map(slow, ((0.0, 0, 1.0), (0.7, 0, 0.9), (1.3, 0, 1.0)))], ids=str
)
def test_a_text_is_the_same_with_and_without_drafts_and_alone(how):
    model = build(dataclasses.replace(TINY, vocab=16))
    prompts, key = [[1, 5, 2], [7], [3, 3, 9, 4, 1]] * 7, jax.random.key(7)
    rule = pc.Sampling(*how, eos_ids=(0,))
    texts, plain = pc.generate(model, prompts, 20, dataclasses.replace(rule, speculate=False), key)
    drafted, stats = pc.generate(model, prompts, 20, rule, key)
    assert drafted == texts
    assert stats["tokens"] == plain["tokens"] == plain["forwards"]
    assert plain["forwards"] <= stats["forwards"] + stats["accepted"]
    # beside other texts; without any in a slow case, as another number of rows is compiled anew
    beside = [] if how[0] == 0.7 else [[9]] * 19
    assert pc.generate(model, prompts[:2] + beside, 20, rule, key, chunk=3)[0][:2] == texts[:2]
    if how[0]:
        assert stats["forwards"] < plain["forwards"]
        assert pc.generate(model, prompts, 20, rule, jax.random.key(8))[0] != texts


@pytest.mark.slow
def test_texts_are_distributed_as_the_model_says():
    model, n, rule = build(dataclasses.replace(TINY, vocab=8)), 3000, pc.Sampling(0.9, 6, 0.95)
    texts, stats = pc.generate(model, [[1, 5, 2]] * n, 3, rule, jax.random.key(7))
    assert stats["accepted"] > n / 4  # else nothing was tested
    index = np.stack(np.meshgrid(*[np.arange(8)] * 2, indexing="ij"), -1).reshape(-1, 2)
    prompts = np.array([[1, 5, 2, *two] for two in index])
    slots = jnp.broadcast_to(jnp.arange(5), (64, 5))
    hidden, _ = model.step(model.new_cache(64, 5), prompts, slots)
    p = np.asarray(pc.probabilities(model.logits(hidden)[:, 2:], rule))  # of the three new tokens
    row = np.arange(64)
    first_two = p[row, 0, index[:, 0]] * p[row, 1, index[:, 1]]
    want = n * (first_two[:, None] * p[:, 2]).reshape(-1)
    found = np.bincount([a * 64 + b * 8 + c for a, b, c in texts], minlength=512)
    assert found[want == 0].sum() == 0
    common = want >= 10
    pooled = [np.append(x[common], x[~common].sum()) for x in (found, want)]
    chi2, dof = ((pooled[0] - pooled[1]) ** 2 / pooled[1]).sum(), common.sum()
    assert dof > 10
    assert chi2 < dof + 5 * np.sqrt(2 * dof), (chi2, dof)


def test_top_k_top_p_and_banned_ids_shape_the_distribution():
    logits_V = jnp.log(jnp.array([0.5, 0.3, 0.15, 0.05]))
    two = [0.625, 0.375, 0, 0]
    for rule, want in (
        ({"top_k": 2}, two),
        ({"top_p": 0.6}, two),
        ({"vocab": 2}, two),
        ({"top_p": 1e-9}, [1, 0, 0, 0]),
        ({"temperature": 0.5}, np.array([0.25, 0.09, 0.0225, 0.0025]) / 0.365),
    ):
        got = pc.probabilities(logits_V, pc.Sampling(**{"temperature": 1.0} | rule))
        assert np.allclose(got, want, atol=1e-6), rule
    # first of equals
    assert np.array_equal(pc.probabilities(jnp.array([1.0, 3.0, 3.0]), pc.Sampling()), [0, 1, 0])


@pytest.mark.parametrize("speculate", [True, slow(False)])
def test_no_run_of_tokens_stands_in_a_text_twice(speculate):
    """Every token of a greedy text is the likeliest that repeats nothing, in rows whose prompts
    differ in length.
    """
    model, n, barred = build(dataclasses.replace(SHALLOW, vocab=12)), 3, 0
    prompts = [[3, 4, 3, 4, 3], [1], [2, 2]]
    rule = pc.Sampling(no_repeat_ngram=n, speculate=speculate)
    texts, _ = pc.generate(model, prompts, 24, rule, jax.random.key(0))
    for prompt, text in zip(prompts, texts, strict=True):
        whole = prompt + text
        logits_LV = logits(model, jnp.array([(whole + [0] * 32)[:32]]))[0]
        for at in range(len(prompt), len(whole)):
            seen = {tuple(whole[i - n + 1 : i + 1]) for i in range(n - 1, at)}
            allowed = [v for v in range(12) if (*whole[at - n + 1 : at], v) not in seen]
            assert whole[at] == max(allowed, key=lambda v: logits_LV[at - 1, v]), (prompt, at)
            barred += 12 - len(allowed)
    assert barred > 10  # else nothing was tested


# longer texts take the YaRN table; one length of them, one program
SHORT = dataclasses.replace(SHALLOW, positions=8)


def test_generation_ends_at_each_eos_and_at_its_limit():
    model = build(SHORT)
    (long,), _ = pc.generate(model, [[3, 4]], 12, pc.Sampling(speculate=False), jax.random.key(0))
    assert len(long) == 12
    later = max(long, key=long.index)  # the token that comes up last, and one that comes before it
    for ends in ((later,), (long[5], later)):
        for drafts in (True, False):
            rule = pc.Sampling(eos_ids=ends, speculate=drafts)
            (short,), _ = pc.generate(model, [[3, 4]], 12, rule, jax.random.key(0))
            assert short == long[: min(map(long.index, ends)) + 1]
    with pytest.raises(ValueError, match=r"do not fit: .*; lower max_new"):
        pc.generate(model, [[1]], 8 * 4, pc.Sampling(), jax.random.key(0))
    with pytest.raises(ValueError, match="empty prompt"):
        pc.generate(model, [[]], 4, pc.Sampling(), jax.random.key(0))


def test_a_tpu_runs_one_prompt_beside_a_row_that_ends_at_once(monkeypatch):
    ask = build(SHORT), [[3, 4]], 12, pc.Sampling(temperature=0.9), jax.random.key(0)
    want = pc.generate(*ask)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert pc.generate(*ask) == want


def test_long_texts_switch_to_the_yarn_table():
    rule = pc.Sampling(speculate=False)
    (text,), _ = pc.generate(build(SHORT), [[1, 2, 3]], 27, rule, jax.random.key(0))
    token_BL = jnp.array([[1, 2, 3, *text]])
    assert np.array_equal(np.argmax(logits(build(SHORT, yarn=True), token_BL)[0, 2:-1], -1), text)


def stack_layers(flat, cfg):
    """Parameters named "layers.3.wq", "mtp.proj", ... (a .npz of another framework) as our tree,
    layers stacked.
    """
    flat = {**flat}
    for name in [name for name in flat if name.startswith("layers.0.")]:
        layers = [flat.pop(f"layers.{i}.{name[9:]}", None) for i in range(cfg.layers)]
        if all(layer is not None for layer in layers):
            flat["layers." + name[9:]] = np.stack(layers)
    want = checkpoints.flatten(pc.param_shapes(cfg))
    runs.check_tensors(
        {n: x.shape for n, x in flat.items()}, {n: x.shape for n, x in want.items()}, "the file"
    )
    return checkpoints.unflatten({name: jnp.asarray(value) for name, value in flat.items()})


def test_a_checkpoint_of_another_family_is_refused():
    saved = {"model": dataclasses.asdict(TINY), "train": {"model": "tiny"}, "step": 7}
    assert pc.read_config("out/run", saved) == TINY
    # a run of Dream, a converted one
    none = {"model": dataclasses.asdict(TINY) | {"layers": 0}}  # or one that has nothing
    for meta in ({"model": {"mask_id": 3}}, {"dtype": "bfloat16"}, none):
        with pytest.raises(ValueError, match="out/run holds no PythonCoder"):
            pc.read_config("out/run", meta)
