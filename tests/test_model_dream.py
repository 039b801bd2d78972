"""Dream apart from its reference values: counts, config, files, a forward pass by brute force,
loss, sharding.
"""

import dataclasses
import gc
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import checkpoints
import diffusion
import model_dream as md
import sample_dream as sd

IDS = {"mask_id": 47, "pad_id": 0, "bos_id": 1, "eos_id": 2, "positions": 64}
TINY = md.DreamConfig(48, 32, 2, 4, 2, 8, ffn=40, **IDS)
# what does not depend on depth compiles in half the time
SHALLOW = dataclasses.replace(TINY, layers=1)
MASK = TINY.mask_id


def params_of(cfg, seed=0):
    """Weights, biases and norms that are large and uneven enough for every part to matter."""
    rng = np.random.default_rng(seed)

    def random(path, leaf):
        name = path[-1].key
        size = 1.5 * leaf.shape[-1] ** -0.5
        if "bias" in name or "norm" in name:
            size = 0.5
        if "embed" in name:
            size = 2.0
        return jnp.asarray(rng.normal("norm" in name, size, leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(random, md.param_shapes(cfg))


def build(cfg=TINY, seed=0, **run):
    return nnx.merge(md.graph_of(cfg, md.Compute(**run)), params_of(cfg, seed))


@pytest.fixture(scope="module")
def model():
    return build()


apply = jax.jit(lambda model, *args: model(*args))
hidden = jax.jit(lambda model, *args: model.hidden(*args))


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def mesh_of(*shape):
    names = ("data", "fsdp", "tensor")
    return jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * 3)


def tokens(B, L, seed=0):
    return np.random.default_rng(seed).integers(3, MASK, (B, L)).astype(np.int32)


def masked(B, P, new, seed=0):
    return np.pad(tokens(B, P, seed), ((0, 0), (0, new)), constant_values=MASK)


# ---- the forward pass ----------------------------------------------------------------------------


def brute_force(params, cfg, token_L, position_L, see_L, wrong=""):
    """The specification in float64 NumPy, a loop over heads; `wrong` makes one of the mistakes that
    others made.
    """
    p = {k: np.asarray(v, np.float64) for k, v in checkpoints.flatten(params).items()}
    L, K, half = len(token_L), cfg.head_size, cfg.head_size // 2
    eps = 0.1 if wrong == "eps" else cfg.eps
    position_L = np.arange(L) if wrong == "positions" else position_L
    angle_LK = np.tile(position_L[:, None] * cfg.theta ** (-np.arange(0, K, 2) / K), 2)

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight

    def rotate(x):
        swapped = np.concatenate([-x[:, half:], x[:, :half]], -1)
        return x * np.cos(angle_LK) + swapped * np.sin(angle_LK)

    x = p["embed_tokens"][token_L]
    for i in range(cfg.layers):
        w = {k.split(".")[2]: v for k, v in p.items() if k.startswith(f"layers.{i}.")}
        n, heads = norm(x, w["input_layernorm"]), []
        biases = 0 if wrong == "biases" else 1
        q, k, v = (n @ w[f"{c}_proj"].T + biases * w[f"{c}_bias"] for c in "qkv")
        for h in range(cfg.heads):
            j = h % cfg.kv_heads if wrong == "tile" else h // (cfg.heads // cfg.kv_heads)
            q_LK, k_LK = rotate(q[:, h * K : (h + 1) * K]), rotate(k[:, j * K : (j + 1) * K])
            score = q_LK @ k_LK.T / np.sqrt(K)
            see_LL = np.broadcast_to(True if wrong == "mask" else see_L, (L, L))
            see_LL = np.tril(see_LL) if wrong == "causal" else see_LL
            e = np.where(see_LL, np.exp(score - score.max()), 0)
            heads.append(e / e.sum(-1, keepdims=True) @ v[:, j * K : (j + 1) * K])
        x = x + np.concatenate(heads, -1) @ w["o_proj"].T
        n = norm(x, w["post_attention_layernorm"])
        gate = n @ w["gate_proj"].T
        x = x + (gate / (1 + np.exp(-gate)) * (n @ w["up_proj"].T)) @ w["down_proj"].T
    return norm(x, p["norm"]) @ p["embed_tokens" if cfg.tie else "lm_head"].T


@pytest.mark.parametrize(("tie", "block"), [(False, 5), slow(False, 256), slow(True, 5)])
def test_logits_are_those_of_the_formulas_and_of_none_of_the_known_mistakes(tie, block):
    cfg = dataclasses.replace(TINY, tie=tie)
    model, token_BL = build(cfg, block=block), tokens(2, 14)
    position_BL = np.stack([np.arange(14), np.sort(np.random.default_rng(1).integers(0, 60, 14))])
    see_BL = np.arange(14) >= np.array([[0], [4]])
    got = np.asarray(apply(model, token_BL, position_BL, see_BL))
    assert np.isfinite(got).all()

    def error(wrong=""):
        parts = []
        for got_LV, *row in zip(got, token_BL, position_BL, see_BL, strict=True):
            want_LV = brute_force(params_of(cfg), cfg, *row, wrong)
            parts.append(np.abs(got_LV - want_LV)[row[2]].max() / np.abs(want_LV).max())
        return max(parts)

    assert error() < 2e-5
    for wrong in ("causal", "biases", "tile", "mask", "eps", "positions"):
        assert error(wrong) > 2e-3, wrong


def test_a_token_changes_all_logits_of_its_row_and_none_of_another(model):
    token_BL = tokens(2, 12)
    changed_BL = token_BL.copy()
    changed_BL[0, 6] += 1
    moved_BL = np.abs(apply(model, token_BL) - apply(model, changed_BL)).max(-1) > 1e-6
    assert moved_BL[0].all()
    assert not moved_BL[1].any()


def test_left_and_right_padding_and_offsets_change_nothing(model):
    token_BL = tokens(1, 9)
    want = apply(model, token_BL)[0]
    for left, right in ((5, 0), (0, 5), (3, 2)):
        padded_BL = np.pad(token_BL, ((0, 0), (left, right)), constant_values=7)
        see_BL = np.pad(np.ones((1, 9), bool), ((0, 0), (left, right)))
        got = apply(model, padded_BL, None, see_BL)[0, left : left + 9]
        np.testing.assert_allclose(got, want, atol=2e-4)


@pytest.mark.parametrize(
    "shape", [(2, 2, 2), *map(slow, ((1, 1, 8), (1, 2, 4), (4, 1, 2), (1, 8, 1)))]
)
def test_eight_devices_give_the_logits_of_one(model, shape):
    mesh, params = mesh_of(*shape), params_of(TINY)
    split = jax.device_put(params, md.shardings(mesh, params))
    gate = split["layers"]["0"]["gate_proj"]
    assert gate.sharding.spec == jax.P("tensor", "fsdp")
    assert len(gate.addressable_shards[0].data) == TINY.ffn // shape[2]
    spread = nnx.merge(md.graph_of(TINY, md.Compute()), split)
    token_BL = tokens(8, 10)
    want = apply(model, token_BL)
    with jax.set_mesh(mesh):
        got = apply(spread, token_BL)
    np.testing.assert_allclose(got, want, atol=1e-4)


# ---- configuration and files ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "count", "tensors"),
    [("7b", 7_615_616_512, 339), ("500m", 494_032_768, 290), slow("1500m", 1_543_714_304, 338)],
)
def test_presets_have_the_parameters_of_dream_7b_and_of_qwen2_5(preset, count, tensors):
    shapes = checkpoints.flatten(md.param_shapes(md.CONFIGS[preset]))
    assert (md.count_params(md.CONFIGS[preset]), len(shapes)) == (count, tensors)
    if preset == "7b":
        assert sum(x.size for name, x in shapes.items() if name.endswith("_bias")) == 28 * 4608
        assert shapes["layers.27.k_proj"].shape == (512, 3584)


def test_every_preset_counts_what_it_allocates_and_survives_its_config_json(tmp_path):
    for name, cfg in md.CONFIGS.items():
        # all layers are alike; those of 0.5 to 7 B are counted above
        few = dataclasses.replace(cfg, layers=2)
        sizes = [x.size for x in jax.tree.leaves(md.param_shapes(few))]
        assert md.count_params(few) == sum(sizes)
        (tmp_path / "config.json").write_text(json.dumps(md.config_to_hf(cfg)))
        assert md.config_from_hf(tmp_path) == cfg, name


def test_wrong_configs_are_refused_and_unknown_keys_ignored(tmp_path):
    good, path = md.config_to_hf(TINY), tmp_path / "config.json"

    def read(keys):
        path.write_text(json.dumps(keys))
        return md.config_from_hf(tmp_path)

    extra = {"use_mrope": True, "max_window_layers": 3, "sliding_window": 4096}
    assert read(good | extra | {"torch_dtype": "float16"}) == TINY
    few = {k: v for k, v in good.items() if k not in ("head_dim", "bos_token_id")}
    assert read(few) == dataclasses.replace(TINY, bos_id=TINY.eos_id)
    # a causal one, one without its family's blocks, one that grows
    own = {"bias": False, "qk_norm": True, "shift": False, "family": "sdar"}
    for changes in ({"block_length": 8, "causal": True}, own, {"expand_id": 46}):
        changed = dataclasses.replace(TINY, **changes)
        assert read(md.config_to_hf(changed)) == changed
    sampling = tmp_path / "generation_config.json"
    # beside DreamOn's config.json
    sampling.write_text('{"expand_token_id": 46, "delete_token_id": 2}')
    assert read(good) == dataclasses.replace(TINY, expand_id=46)
    # all of eos_token_id in both files end a text; the first of config.json is eos_id
    for own, other, ends in (
        (2, None, ()),
        ([2, 5], None, (5,)),
        (2, [3, 2, 4], (3, 4)),
        ([2, 5], 3, (5, 3)),
        (None, [2, 3], (3,)),
    ):
        sampling.write_text(json.dumps({"eos_token_id": other}))
        listed = read(good | {"eos_token_id": own})
        assert listed == dataclasses.replace(TINY, ends=ends)
        sampling.write_text("{}")
        assert read(md.config_to_hf(listed)) == listed
    for value in ([], ["</s>"], "</s>", [[2]]):
        with pytest.raises(ValueError, match="eos_token_id is"):
            read(good | {"eos_token_id": value})
    rope = {"rope_theta": good["rope_theta"], "rope_type": "default"}  # as transformers 5 saves it
    rest = {k: v for k, v in good.items() if k not in ("rope_theta", "rope_scaling")}
    assert read(rest | {"rope_parameters": rope}) == TINY
    changes = {
        "rope_parameters": rope | {"rope_type": "yarn", "factor": 4.0},
        "hidden_act": "gelu",
        "num_hidden_layers": 0,
        "model_type": "qwen2",
        "rope_scaling": {"type": "yarn"},
        "use_sliding_window": True,
        "attention_bias": False,
        "hidden_size": "32",
        "vocab_size": None,
        "mask_token_id": 48,
        "expand_token_id": MASK,
        "pad_token_id": MASK,
    }
    for key, value in changes.items():
        with pytest.raises(ValueError, match="does not describe a Dream model") as error:
            read(good | {key: value})
        assert "\n" not in str(error.value)
    assert read(good | {"attention_bias": None}) == TINY
    with pytest.raises(ValueError, match="hidden_act is None, not 'silu'"):
        read(good | {"hidden_act": None})
    for key in ("vocab_size", "hidden_size", "num_attention_heads", "head_dim"):
        with pytest.raises(ValueError, match=f"{key} is 0"):
            read(good | {key: 0})
    own = {"bias": False, "shift": False, "family": "llada"}
    good = md.config_to_hf(dataclasses.replace(TINY, **own))
    for key in ("weight_tying", "rope", "block_group_size"):
        with pytest.raises(ValueError, match=key):
            read(good | {key: None})
        with pytest.raises(ValueError, match=key):
            read({name: value for name, value in good.items() if name != key})
    for text in ("{", "[1]", ""):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"config\.json is damaged"):
            md.config_from_hf(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        md.config_from_hf(tmp_path / "nowhere")


def test_a_saved_model_loads_bit_for_bit_also_onto_a_mesh(tmp_path):
    mesh = mesh_of(2, 2, 2)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params_of(TINY))
    model = nnx.merge(md.graph_of(TINY, md.Compute()), params)
    (tmp_path / "tokenizer.json").write_text("{}")
    checkpoints.save(md, tmp_path / "ckpt", model, files=[tmp_path / "tokenizer.json"])
    names = {p.name for p in (tmp_path / "ckpt").iterdir()}
    assert names == {"config.json", "meta.json", "params", "tokenizer.json"}
    for where in (None, mesh):
        back = checkpoints.load(md, tmp_path / "ckpt", mesh=where)[0]
        assert back.cfg == TINY
        got = checkpoints.flatten(nnx.to_pure_dict(nnx.state(back)))
        for name, x in checkpoints.flatten(params).items():
            assert np.asarray(got[name]).tobytes() == np.asarray(x).tobytes(), name
        assert len(got["lm_head"].sharding.device_set) == (8 if where else 1)
    wide, _ = checkpoints.load(md, tmp_path / "ckpt", dtype=jnp.float32)
    assert wide.norm[...].dtype == jnp.float32


# Orbax drops its own futures
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_damaged_checkpoints_are_one_clear_line(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        checkpoints.load(md, tmp_path)
    checkpoints.save(md, tmp_path / "ckpt", build())
    meta = json.loads((tmp_path / "ckpt" / "meta.json").read_text())
    meta["sums"]["layers.1.o_proj"] += 1
    (tmp_path / "ckpt" / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match=r"layers\.1\.o_proj differs? from what was saved"):
        checkpoints.load(md, tmp_path / "ckpt")
    files = [p for p in (tmp_path / "ckpt" / "params").rglob("*") if p.is_file()]
    largest = max(files, key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:100])
    with pytest.raises(ValueError, match="cannot be read") as error:
        checkpoints.load(md, tmp_path / "ckpt")
    assert "\n" not in str(error.value)
    gc.collect()


def quantised(params, dtype=jnp.float32, bits=8):
    """As checkpoints.load gives them."""

    def kept(path, x):
        return md.quantise(x, bits, path[-1].key) if x.ndim == 2 else x.astype(dtype)

    return jax.tree_util.tree_map_with_path(kept, params)


def test_a_run_of_another_family_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds none of dream, llada, .*: it is a PythonCoder"):
        md.read_config(tmp_path, {"model": {"vocab": 48, "width": 32, "diff": "seed"}})
    with pytest.raises(ValueError, match=r"holds none of .*; is it of another version\?"):
        md.read_config(tmp_path, {"model": {"later": 3}})
    meta = {"model": dataclasses.asdict(TINY)}
    (tmp_path / "config.json").write_text(json.dumps(meta))
    assert md.read_config(tmp_path) == md.read_config(tmp_path, meta) == TINY


def test_int8_rows_are_off_by_half_a_step_at_most():
    weight_FD = np.random.default_rng(0).normal(0, 3, (40, 30)).astype(np.float32)
    weight_FD[7] = 0
    weight_FD[8] *= 1e-6  # a row of its own size
    q_FD, scale_F1 = jax.tree.map(np.asarray, md.quantise(weight_FD))
    assert (q_FD.dtype, scale_F1.dtype, scale_F1.shape) == (np.int8, np.float32, (40, 1))
    assert (np.abs(q_FD).max(-1) == np.where(np.arange(40) == 7, 0, 127)).all()
    assert (np.abs(q_FD * scale_F1 - weight_FD) <= 0.5001 * scale_F1).all()


def dense(weight):
    """The matrix that an Int8 or Int4 stands for, by the formulas; anything else as it is."""
    if isinstance(weight, md.Int8):
        return weight.q_FD * weight.scale_F1
    if not isinstance(weight, md.Int4):
        return weight
    q_FE, scale_GD, zero_GD, unit_1D = (np.asarray(x).astype(np.float32) for x in weight)
    q_FD = np.concatenate([q_FE % 16, q_FE // 16], 1)
    group = len(q_FD) // len(scale_GD)
    return jnp.asarray((q_FD - zero_GD.repeat(group, 0)) * (scale_GD * unit_1D).repeat(group, 0))


def test_int4_is_within_its_bound_in_each_group_and_exact_where_it_can_be():
    rng = np.random.default_rng(0)
    weight_FD = rng.normal(0, 3, (256, 40)).astype(np.float32)
    weight_FD[:64, 6], weight_FD[:, 7] = 5, 0  # groups of equal numbers, a column of zeros
    weight_FD[:, 8] *= 1e-6  # a column of its own size
    weight_FD[130, 9] = 100  # spoils its group; a step of the others loses 3 % of this one's
    weight_FD[:, 10], weight_FD[:, 11] = 9 + weight_FD[:, 10] / 9, -9 + weight_FD[:, 11] / 9
    int4 = md.to_int4(weight_FD)
    assert [x.shape for x in int4] == [(256, 20), (8, 40), (8, 40), (1, 40)]
    assert [str(x.dtype) for x in int4] == ["uint8", "uint8", "uint8", "float32"]
    weight_GSD = weight_FD.reshape(8, 32, 40)
    step_G1D = (weight_GSD.max(1, initial=0) - weight_GSD.min(1, initial=0))[:, None] / 15
    error_GSD = np.abs(dense(int4).reshape(8, 32, 40) - weight_GSD)
    assert (error_GSD <= 1.001 * (step_G1D / 2 + 0.03 * step_G1D.max(0))).all()
    mean_D = error_GSD.mean((0, 1)) / step_G1D.mean((0, 1)).clip(1e-9)
    assert ((mean_D > 0.2) & (mean_D < 0.28))[10:].all()  # a quarter of a step, were all as likely
    assert error_GSD[4, :, 9].max() > 2 > 1 > error_GSD[[*range(4), *range(5, 8)], :, 9].max()
    assert (error_GSD[..., 7] == 0).all()

    # What 16 steps can say is exact: here every group has 0 and 15.
    q_FD = rng.integers(0, 16, (256, 6))
    q_FD[::32], q_FD[1::32] = 0, 15
    zero_GD, scale_GD = rng.integers(0, 16, (8, 6)), rng.integers(1, 256, (8, 6))
    scale_GD[3] = 255
    exact_FD = (q_FD - zero_GD.repeat(32, 0)) * scale_GD.repeat(32, 0) * np.float32(2**-12)
    np.testing.assert_allclose(dense(md.to_int4(exact_FD)), exact_FD, rtol=1e-6)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_backward_a_quantised_matrix_is_kept_in_its_bits_and_gives_the_gradient_of_its_dense_form(
    bits, dtype
):
    rng = np.random.default_rng(0)
    weight = md.quantise(jnp.asarray(rng.normal(size=(192, 128)), jnp.float32), bits)
    x_BLD, out_BLF = (jnp.asarray(rng.normal(size=(2, 5, n)), dtype) for n in (128, 192))
    got, pull = jax.vjp(lambda x_BLD: md.linear(x_BLD, weight), x_BLD)
    assert sum(x.nbytes for x in jax.tree.leaves(pull)) <= sum(x.nbytes for x in weight) + 16
    want, dense_pull = jax.vjp(
        lambda x_BLD: md.linear(x_BLD, jnp.asarray(dense(weight))), x_BLD.astype(jnp.float32)
    )
    near = {"rtol": 1e-5, "atol": 1e-4} if dtype == "float32" else {"rtol": 2e-2, "atol": 0.2}
    np.testing.assert_allclose(got.astype(jnp.float32), want, **near)
    (dx,), (want_dx,) = pull(out_BLF), dense_pull(out_BLF.astype(jnp.float32))
    assert dx.dtype == x_BLD.dtype
    np.testing.assert_allclose(dx.astype(jnp.float32), want_dx, **near)


def test_int4_is_for_matrices_of_layers_with_two_halves():
    weight_FD = np.ones((4, 6), np.float32)
    assert isinstance(md.quantise(weight_FD, 4, "q_proj"), md.Int4)
    for name, columns in (("lm_head", 6), ("embed_tokens", 6), ("q_proj", 5), ("k_proj", 6)):
        assert isinstance(md.quantise(weight_FD[:, :columns], 4, name), md.Int8)
    assert isinstance(md.quantise(weight_FD[:, :4], 4, "v_proj"), md.Int4)  # not shared by heads


@pytest.mark.parametrize(("bits", "tie"), [(4, False), slow(8, False), slow(8, True)])
def test_quantised_logits_are_those_of_the_matrices_that_the_numbers_stand_for(bits, tie):
    cfg = dataclasses.replace(SHALLOW, tie=tie)
    narrow = quantised(params_of(cfg), bits=bits)
    assert narrow["embed_tokens"].q_FD.dtype == jnp.int8
    assert narrow["layers"]["0"]["down_proj"][0].dtype == (jnp.int8 if bits == 8 else jnp.uint8)
    same = jax.tree.map(dense, narrow, is_leaf=lambda x: isinstance(x, md.Int8 | md.Int4))
    token_BL = tokens(2, 14)
    models = [nnx.merge(md.graph_of(cfg, md.Compute()), x) for x in (narrow, same, params_of(cfg))]
    got, want, full = (np.asarray(apply(model, token_BL)) for model in models)
    assert np.abs(got - want).max() < 2e-5 * np.abs(want).max()
    error = np.sqrt(np.mean((got - full) ** 2) / np.mean(full**2))
    low, high = (1e-3, 0.1) if bits == 8 else (1e-2, 0.5)
    assert low < error < high  # not exact, and near


@pytest.mark.parametrize("bits", [slow(0), 4, slow(8)])
def test_a_tpu_multiplies_in_another_order_and_has_the_same_logits(bits):
    params = quantised(params_of(SHALLOW), bits=bits) if bits else params_of(SHALLOW)
    graphs = [md.graph_of(SHALLOW, md.Compute(platform=name)) for name in ("cpu", "tpu")]
    cpu, tpu = (nnx.merge(graph, params) for graph in graphs)
    for shape in ((1, 1), (2, 7)):
        want = np.asarray(apply(cpu, tokens(*shape)))
        assert want.shape == (*shape, SHALLOW.vocab)
        np.testing.assert_allclose(apply(tpu, tokens(*shape)), want, atol=1e-5 * np.abs(want).max())
    assert "pad" in str(jax.make_jaxpr(tpu)(tokens(1, 1)))
    assert "pad" not in str(jax.make_jaxpr(tpu)(tokens(1, 2)))


def test_a_pass_over_one_token_copies_no_cache(model):
    """XLA on a CPU copied it where all heads were written as one slice."""
    shape = 1, model.cfg.kv_heads, 24, model.cfg.head_size
    cache = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(model.cfg.layers)]
    step = jax.jit(
        lambda model, cache, *inputs: model.hidden(tokens(1, 1), None, None, cache, *inputs),
        donate_argnums=1,
    )
    program = step.lower(model, cache, np.array([9])).compile().as_text()
    assert f"{shape[2]},{shape[3]}]" in program
    assert not re.search(rf"= \S*,24,{shape[3]}\]\S* copy\(", program)


@pytest.mark.parametrize("bits", [slow(0), slow(8), 4])
def test_joined_matrices_give_the_same_states(bits):
    cfg = dataclasses.replace(SHALLOW, ffn=128)
    params = quantised(params_of(cfg), bits=bits) if bits else params_of(cfg)
    copies = [jax.tree.map(jnp.asarray, params) for _ in range(2)]
    alone, joined = (nnx.merge(md.graph_of(cfg, md.Compute()), copy) for copy in copies)
    layer = md.join(joined).layers["0"]
    parts = [jax.tree.leaves(part.get_value())[0] for part in (layer.gate_proj, layer.up_proj)]
    assert [len(part) for part in parts] == [256, 0]
    token_BL = tokens(2, 14)

    @jax.jit
    def states(model):  # of the row, and of a window over its cache
        hidden_BLD, cache = model.hidden(token_BL)
        return hidden_BLD, model.hidden(token_BL[:, 4:6], cache=cache, start=4)[0]

    for got, want in zip(states(joined), states(alone), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_checkpoints_load_layer_by_layer_also_onto_a_mesh(tmp_path, bits):
    cfg = dataclasses.replace(TINY, ffn=128)  # four groups of 32
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params_of(cfg))
    checkpoints.save(md, tmp_path / "ckpt", nnx.merge(md.graph_of(cfg, md.Compute()), params))
    model = checkpoints.load(md, tmp_path / "ckpt", dtype=jnp.float32, bits=bits)[0]
    want = checkpoints.flatten(quantised(params, bits=bits))
    got = checkpoints.flatten(nnx.to_pure_dict(nnx.state(model)))
    assert want.keys() == got.keys()
    for name, x in want.items():
        assert got[name].dtype == x.dtype
        np.testing.assert_array_equal(got[name], x, err_msg=name)
    mesh = mesh_of(2, 2, 2)
    one = checkpoints.inference_mesh(cfg, jax.devices()[:1], 1)
    needed = checkpoints.bytes_needed(md, cfg, one, "bfloat16", dtype="float32", bits=bits)
    trees = (got, params["layers"]["1"])
    kept, layer = (sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in trees)
    assert kept < needed <= kept + layer  # one layer at a time lies there as it is stored
    alone = apply(model, tokens(8, 10))
    with jax.set_mesh(mesh):
        spread = checkpoints.load(md, tmp_path / "ckpt", dtype=jnp.float32, mesh=mesh, bits=bits)[0]
        gate = spread.layers["0"].gate_proj.get_value()
        assert gate[0].sharding.spec == jax.P("tensor", "fsdp")
        assert len(gate[0].addressable_shards[0].data) == cfg.ffn // 2
        np.testing.assert_allclose(apply(spread, tokens(8, 10)), alone, atol=1e-4)
    rule = sd.Sampling(block_length=6, cache="dual", threshold=0.5)
    row, _ = sd.fill(model, masked(1, 4, 6), None, rule)
    assert (row != MASK).all()


def test_7b_takes_half_of_16_gb_in_int8_and_of_8_gb_five_in_int4():
    cfg = md.CONFIGS["7b"]
    total, shapes = md.count_params(cfg), md.param_shapes(cfg)
    table = shapes["embed_tokens"].size

    def size(bits):
        kept = jax.eval_shape(lambda params: quantised(params, jnp.bfloat16, bits), shapes)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept))

    vectors = sum(x.size for x in jax.tree.leaves(shapes) if x.ndim == 1)
    tables, layers = 2 * table, total - 2 * table - vectors
    rows = 28 * (2 * 3584 + 2 * 512 + 2 * 18_944 + 3584)
    assert size(8) == tables + layers + 2 * vectors + 4 * (rows + 2 * 152_064) < 8e9
    shared = 28 * 2 * 512 * 3584  # keys and values stay in 8 bits
    fours, rows = layers - shared, 28 * (2 * 512 + 4 * 3584 + 18_944) + 2 * 152_064  # and columns
    assert size(4) == tables + shared + fours // 2 + fours // 16 + 2 * vectors + 4 * rows < 5e9
    # while it is read the largest array is there as stored; JAX takes three quarters of a GPU's
    # memory
    mesh = checkpoints.inference_mesh(cfg, jax.devices()[:1], 1)
    needed = checkpoints.bytes_needed(md, cfg, mesh, "bfloat16", "bfloat16", 4)
    assert needed == size(4) + 2 * table < 0.75 * 2**33


# ---- training ------------------------------------------------------------------------------------


SEGMENT_BL = jnp.array([[1] * 6 + [2] * 9 + [3] * 3 + [0] * 2, [1] * 20])
POSITION_BL = jnp.array([[*range(6), *range(9), *range(3), 0, 0], range(20)])
bound = jax.jit(lambda model, *args: model.nelbo(*args))
noise = jax.jit(md.noise, static_argnums=1)


def noised(seed=0):
    """Levels and uniform numbers of the two rows."""
    return noise(jax.random.key(seed), 2, jnp.arange(2), SEGMENT_BL)


def nelbo_by_hand(params, cfg, token_BL, t_BL, u_BL, fixed_BL, wrong=""):
    """The bound in float64: every document alone, each masked token read one place to its left,
    MASK impossible.
    """
    total = 0.0
    for b, s in ((0, 1), (0, 2), (0, 3), (1, 1)):
        here_L = np.asarray(SEGMENT_BL[b] == s)
        rows = (token_BL, t_BL, u_BL, fixed_BL)
        token_L, t_L, u_L, fixed_L = (np.asarray(x)[b][here_L] for x in rows)
        mask_L = (u_L < t_L) & ((fixed_L == 0) | (wrong == "prompt"))
        noised_L = np.where(mask_L, cfg.mask_id, token_L)
        position_L, see_L = np.asarray(POSITION_BL[b])[here_L], np.ones(len(token_L), bool)
        logits_LV = brute_force(params, cfg, noised_L, position_L, see_L)
        if wrong != "mask possible":
            logits_LV[:, cfg.mask_id] = -np.inf
        logp_LV = logits_LV - np.log(np.exp(logits_LV).sum(-1, keepdims=True))
        if wrong != "shift":
            logp_LV = np.concatenate([logp_LV[:1], logp_LV[:-1]])
        weight_L = 1 if wrong == "weight" else 1 / t_L
        total -= (logp_LV[np.arange(len(token_L)), token_L] * mask_L * weight_L).sum()
    return total


FIXED_BL = jnp.array([[0] * 6 + [1] * 4 + [0] * 10, [1] * 12 + [0] * 8])


def batch_of_four():
    """The arguments of nelbo for the two rows twice, each with a noise of its own."""
    rows = (tokens(2, 20), SEGMENT_BL, POSITION_BL, FIXED_BL)
    token_BL, segment_BL, position_BL, fixed_BL = (jnp.tile(jnp.asarray(x), (2, 1)) for x in rows)
    t_BL, u_BL = noise(jax.random.key(0), 4, jnp.arange(4), segment_BL)
    return token_BL, segment_BL, position_BL, t_BL, u_BL, fixed_BL


def bound_and_gradient(**run):
    """A compiled function of parameters: the bound of batch_of_four and its gradient."""
    graph, batch = md.graph_of(SHALLOW, md.Compute(**run)), batch_of_four()
    return jax.jit(jax.value_and_grad(lambda params: nnx.merge(graph, params).nelbo(*batch)))


@pytest.fixture(scope="module")
def plain():
    """Bound and gradient without anything that saves memory."""
    return bound_and_gradient()(params_of(SHALLOW))


def same_gradients(got, want, rtol):
    assert float(got[0]) == pytest.approx(float(want[0]), rel=1e-5)
    for a, b in zip(*(jax.tree.leaves(gradient) for _, gradient in (got, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-5 * np.abs(b).max())


def test_the_bound_is_that_of_the_formulas_and_of_none_of_the_likely_mistakes():
    token_BL, (t_BL, u_BL) = jnp.asarray(tokens(2, 20)), noised(1)
    batch = token_BL, SEGMENT_BL, POSITION_BL, t_BL, u_BL, FIXED_BL
    got = float(bound(build(loss_tokens=8), *batch))
    args = params_of(TINY), TINY, token_BL, t_BL, u_BL, FIXED_BL
    assert got == pytest.approx(nelbo_by_hand(*args), rel=2e-5)
    for wrong in ("prompt", "mask possible", "shift", "weight"):
        assert got != pytest.approx(nelbo_by_hand(*args, wrong), rel=1e-3), wrong


def test_what_is_computed_twice_or_in_blocks_gives_the_same_bound_and_gradient(plain):
    saving = bound_and_gradient(remat="qkvo", block=7, loss_tokens=8)(params_of(SHALLOW))
    same_gradients(saving, plain, rtol=1e-4)
    token_BL, _, _, t_BL, u_BL, fixed_BL = batch_of_four()
    rows, want = (token_BL, t_BL, u_BL, fixed_BL), 0
    for i in (slice(0, 2), slice(2, 4)):
        want += nelbo_by_hand(params_of(SHALLOW), SHALLOW, *(x[i] for x in rows))
    assert float(saving[0]) == pytest.approx(want, rel=2e-5)


@pytest.mark.slow
def test_the_gradient_on_a_mesh_of_eight_devices_is_that_of_one(plain):
    params = params_of(SHALLOW)
    mesh = mesh_of(2, 2, 2)
    with jax.set_mesh(mesh):
        split = bound_and_gradient(remat="full")(jax.device_put(params, md.shardings(mesh, params)))
    same_gradients(split, plain, rtol=1e-3)


def test_the_bound_of_uniform_logits_is_the_logarithm_of_the_vocabulary_without_mask():
    params = params_of(SHALLOW) | {"lm_head": jnp.zeros((TINY.vocab, TINY.width))}
    model, token_BL = nnx.merge(md.graph_of(SHALLOW, md.Compute()), params), tokens(2, 20)
    (t_BL, u_BL), in_BL = noised(), SEGMENT_BL > 0
    want = float(np.log(TINY.vocab - 1) * (in_BL * (u_BL < t_BL) / t_BL).sum())
    got = float(bound(model, token_BL, SEGMENT_BL, POSITION_BL, t_BL, u_BL))
    assert got == pytest.approx(want, rel=1e-5)


@pytest.mark.slow
def test_a_model_without_the_shift_is_read_at_the_masks_themselves():
    model = build(dataclasses.replace(SHALLOW, shift=False))
    token_BL = tokens(1, 12).copy()
    token_BL[0, 7] = MASK
    got_BL, _ = sd.fill(model, token_BL)
    logits_BLV = model(jnp.asarray(token_BL)).at[..., MASK].set(-jnp.inf)
    assert got_BL[0, 7] == logits_BLV[0, 7].argmax() != logits_BLV[0, 6].argmax()
    with pytest.raises(ValueError, match="trained in blocks of 4"):
        sd.fill(build(dataclasses.replace(SHALLOW, block_length=4)), token_BL)


def test_documents_of_a_row_do_not_see_each_other():
    for block in (256, 7):
        model, token_BL = build(SHALLOW, block=block), tokens(1, 20)
        place = diffusion.Place(SEGMENT_BL[:1])
        see = jax.jit(lambda model, token_BL, place=place: model.hidden(token_BL, place=place)[0])
        before = np.asarray(see(model, token_BL))
        for i in (0, 7, 16, 19):
            changed_BL = token_BL.copy()
            changed_BL[0, i] = token_BL[0, i] % 40 + 3
            moved_L = (np.asarray(see(model, changed_BL)) != before).any(-1)[0]
            np.testing.assert_array_equal(moved_L, SEGMENT_BL[0] == SEGMENT_BL[0, i])


def test_prompts_are_never_masked():
    model, token_BL = build(SHALLOW), jnp.asarray(tokens(2, 20))
    t_BL, u_BL = jnp.ones((2, 20)), jnp.zeros((2, 20))  # whatever can be masked is
    fixed_BL = jnp.array([[1] * 4 + [0] * 2 + [1] * 5 + [0] * 9, [1] * 20])
    seen = []
    lookup = lambda self, token_BL: seen.append(token_BL) or md.Dream.lookup(self, token_BL)  # noqa: E731
    model.__class__ = type("Spy", (md.Dream,), {"lookup": lookup})

    @jax.jit
    def look(model, fixed_BL):
        return model.nelbo(token_BL, SEGMENT_BL, POSITION_BL, t_BL, u_BL, fixed_BL), seen[-1]

    loss, seen_BL = look(model, fixed_BL)
    free_BL = (fixed_BL == 0) & (SEGMENT_BL > 0)
    np.testing.assert_array_equal(seen_BL, np.where(free_BL, MASK, token_BL))
    assert loss > 0
    assert look(model, jnp.ones_like(fixed_BL))[0] == 0


def test_noise_is_a_function_of_the_row_and_even_over_rows_and_documents():
    R, L = 1024, 40
    segment_BL = jnp.tile(1 + jnp.arange(L) // 4, (R, 1))  # ten documents in each row
    t_BL, u_BL = map(np.asarray, noise(jax.random.key(3), R, jnp.arange(R), segment_BL))
    pick = jnp.array([41, 5])
    picked = noise(jax.random.key(3), R, pick, segment_BL[pick])
    for got, want in zip(picked, (t_BL, u_BL), strict=True):
        np.testing.assert_array_equal(got, want[pick])
    assert not np.array_equal(noise(jax.random.key(4), R, pick, segment_BL[pick])[1], u_BL[pick])
    assert (t_BL.reshape(R, 10, 4).std(-1) == 0).all()  # one level a document
    assert 1e-3 <= t_BL.min() < t_BL.max() <= 1
    np.testing.assert_array_equal(np.floor((t_BL[:, 0] - 1e-3) / (1 - 1e-3) * R), np.arange(R))
    # ten documents of a row: no gap is much wider than a tenth
    assert np.diff(np.sort(t_BL[0, ::4])).max() < 0.2
    # so the bound of uniform logits is log V
    assert ((u_BL < t_BL) / t_BL).mean() == pytest.approx(1, abs=0.05)
