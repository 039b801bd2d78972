"""Dream apart from its reference values: counts, config, files, brute-force forward, sampling, blocks, sharding."""

import dataclasses
import gc
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx
from safetensors.numpy import save_file

import diffusion
import model_dream as md

TINY = md.DreamConfig(
    48, 32, layers=2, heads=4, kv_heads=2, head_size=8, ffn=40, positions=64, mask_id=47, pad_id=0, bos_id=1, eos_id=2
)
MASK = TINY.mask_id


def params_of(cfg, seed=0):
    """Weights, biases and norms that are large and uneven enough for every part to matter."""
    rng = np.random.default_rng(seed)

    def one(path, leaf):
        name = path[-1].key
        size = 0.5 if "bias" in name or "norm" in name else 2.0 if "embed" in name else 1.5 * leaf.shape[-1] ** -0.5
        return jnp.asarray(rng.normal("norm" in name, size, leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(one, md.param_shapes(cfg))


def build(cfg=TINY, seed=0, **run):
    return nnx.merge(md.graph_of(cfg, md.Run(**run)), params_of(cfg, seed))


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture(scope="module")
def shallow():
    """One layer: what does not depend on depth compiles in half the time."""
    return build(dataclasses.replace(TINY, layers=1))


apply = jax.jit(lambda model, *args: model(*args))
hidden = jax.jit(lambda model, *args: model.hidden(*args))


def tokens(B, L, seed=0):
    return np.random.default_rng(seed).integers(3, MASK, (B, L)).astype(np.int32)


def masked(B, P, new, seed=0):
    return np.pad(tokens(B, P, seed), ((0, 0), (0, new)), constant_values=MASK)


# ---- the forward pass ----------------------------------------------------------------------------------------------


def brute_force(params, cfg, token_L, position_L, see_L, wrong=""):
    """The specification in float64 NumPy, a loop over heads; `wrong` makes one of the mistakes that others made."""
    p = {k: np.asarray(v, np.float64) for k, v in md.flatten(params).items()}
    L, K, half = len(token_L), cfg.head_size, cfg.head_size // 2
    eps = 0.1 if wrong == "eps" else cfg.eps
    position_L = np.arange(L) if wrong == "positions" else position_L
    angle_LK = np.tile(position_L[:, None] * cfg.theta ** (-np.arange(0, K, 2) / K), 2)

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight

    def rotate(x):
        return x * np.cos(angle_LK) + np.concatenate([-x[:, half:], x[:, :half]], -1) * np.sin(angle_LK)

    x = p["embed_tokens"][token_L]
    for i in range(cfg.layers):
        w = {k.split(".")[2]: v for k, v in p.items() if k.startswith(f"layers.{i}.")}
        n, heads = norm(x, w["input_layernorm"]), []
        q, k, v = (n @ w[f"{c}_proj"].T + (0 if wrong == "biases" else w[f"{c}_bias"]) for c in "qkv")
        for h in range(cfg.heads):
            j = h % cfg.kv_heads if wrong == "tile" else h // (cfg.heads // cfg.kv_heads)
            score = rotate(q[:, h * K : (h + 1) * K]) @ rotate(k[:, j * K : (j + 1) * K]).T / np.sqrt(K)
            see_LL = np.broadcast_to(True if wrong == "mask" else see_L, (L, L))
            see_LL = np.tril(see_LL) if wrong == "causal" else see_LL
            e = np.where(see_LL, np.exp(score - score.max()), 0)
            heads.append(e / e.sum(-1, keepdims=True) @ v[:, j * K : (j + 1) * K])
        x = x + np.concatenate(heads, -1) @ w["o_proj"].T
        n = norm(x, w["post_attention_layernorm"])
        gate = n @ w["gate_proj"].T
        x = x + (gate / (1 + np.exp(-gate)) * (n @ w["up_proj"].T)) @ w["down_proj"].T
    return norm(x, p["norm"]) @ p["embed_tokens" if cfg.tie else "lm_head"].T


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("block", [256, 5])
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
    for left, right in ((5, 0), (0, 4), (3, 2)):
        padded_BL = np.pad(token_BL, ((0, 0), (left, right)), constant_values=7)
        see_BL = np.pad(np.ones((1, 9), bool), ((0, 0), (left, right)))
        got = apply(model, padded_BL, None, see_BL)[0, left : left + 9]
        np.testing.assert_allclose(got, want, atol=2e-4)


@pytest.mark.parametrize(
    "shape",
    [(2, 2, 2), *(pytest.param(x, marks=pytest.mark.slow) for x in ((1, 1, 8), (1, 2, 4), (4, 1, 2), (1, 8, 1)))],
)
def test_eight_devices_give_the_logits_and_tokens_of_one(model, shape):
    mesh = jax.make_mesh(shape, ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    params = params_of(TINY)
    split = jax.device_put(params, md.shardings(mesh, params))
    assert split["layers"]["0"]["gate_proj"].sharding.spec == jax.P("tensor", "fsdp")
    assert len(split["layers"]["0"]["gate_proj"].addressable_shards[0].data) == TINY.ffn // shape[2]
    spread = nnx.merge(md.graph_of(TINY, md.Run()), split)
    token_BL = tokens(8, 10)
    want = apply(model, token_BL)
    with jax.set_mesh(mesh):
        got = apply(spread, token_BL)
    np.testing.assert_allclose(got, want, atol=1e-4)
    if shape in ((2, 2, 2), (1, 1, 8)):
        canvas_BL = masked(8, 6, 8)
        for rule in (md.Sampling(tokens_per_step=2), md.Sampling(threshold=0.5, block_length=4, cache="dual")):
            one, _ = md.fill(model, canvas_BL, None, rule)
            with jax.set_mesh(mesh):
                many, _ = md.fill(spread, canvas_BL, None, rule)
            np.testing.assert_array_equal(many, one)


# ---- configuration and files ---------------------------------------------------------------------------------------


def test_the_7b_preset_has_the_parameters_of_the_spec():
    shapes = md.flatten(md.param_shapes(md.CONFIGS["7b"]))
    assert (md.count_params(md.CONFIGS["7b"])["total"], len(shapes)) == (7_615_616_512, 339)
    biases = sum(leaf.size for name, leaf in shapes.items() if name.endswith("_bias"))
    assert biases == 28 * 4608
    assert shapes["layers.27.k_proj"].shape == (512, 3584)
    assert len({md.hf_name(name) for name in shapes}) == 339
    assert "model.layers.27.self_attn.v_proj.bias" in map(md.hf_name, shapes)
    assert "model.layers.0.mlp.down_proj.weight" in map(md.hf_name, shapes)


def test_every_preset_counts_what_it_allocates_and_survives_its_config_json(tmp_path):
    for name, cfg in md.CONFIGS.items():
        parts = md.count_params(cfg)
        total = parts.pop("total")
        assert total == sum(parts.values()) == sum(x.size for x in jax.tree.leaves(md.param_shapes(cfg)))
        (tmp_path / "config.json").write_text(json.dumps(md.config_to_hf(cfg)))
        assert md.config_from_hf(tmp_path) == cfg, name
    assert sum(x.size for x in jax.tree.leaves(md.new_params(TINY, 0))) == md.count_params(TINY)["total"]


def test_wrong_configs_are_refused_and_unknown_keys_ignored(tmp_path):
    good, path = md.config_to_hf(TINY), tmp_path / "config.json"
    extra = {"use_mrope": True, "max_window_layers": 3, "sliding_window": 4096, "torch_dtype": "float16"}
    path.write_text(json.dumps(good | extra))
    assert md.config_from_hf(path) == TINY
    path.write_text(json.dumps({k: v for k, v in good.items() if k not in ("head_dim", "bos_token_id")}))
    assert md.config_from_hf(path) == dataclasses.replace(TINY, bos_id=TINY.eos_id)
    changes = {
        "hidden_act": "gelu",
        "model_type": "qwen2",
        "rope_scaling": {"type": "yarn"},
        "use_sliding_window": True,
        "attention_bias": False,
        "num_key_value_heads": 3,
        "num_hidden_layers": 0,
        "hidden_size": "32",
        "rms_norm_eps": -1e-6,
        "tie_word_embeddings": "no",
        "vocab_size": None,
        "mask_token_id": 48,
        "pad_token_id": MASK,
        "rope_theta": float("nan"),
    }
    for key, value in changes.items():
        path.write_text(json.dumps(good | {key: value}))
        with pytest.raises(ValueError, match="does not describe a Dream model") as error:
            md.config_from_hf(path)
        assert "\n" not in str(error.value)
    for text in ("{", "[1]", ""):
        path.write_text(text)
        with pytest.raises(ValueError, match="JSON"):
            md.config_from_hf(path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        md.config_from_hf(tmp_path / "nowhere")


def write_hf(folder, params, cfg=TINY, index=True, change=None):
    """A Hugging Face folder of two shards and an index, or of one file."""
    folder.mkdir(exist_ok=True)
    flat = {md.hf_name(name): np.asarray(x) for name, x in md.flatten(params).items()}
    flat = change(flat) if change else flat
    (folder / "config.json").write_text(json.dumps(md.config_to_hf(cfg)))
    names = sorted(flat)
    if not index:
        save_file(flat, folder / "model.safetensors")
        return folder
    where = {n: f"model-0000{1 + (i >= len(names) // 2)}-of-00002.safetensors" for i, n in enumerate(names)}
    for file in set(where.values()):
        save_file({n: flat[n] for n in names if where[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("index", [False, True])
def test_hugging_face_files_load_bit_for_bit_with_and_without_an_index(tmp_path, dtype, index):
    params = jax.tree.map(lambda x: x.astype(dtype), params_of(TINY))
    model = md.from_hf(write_hf(tmp_path, params, index=index))
    assert model.run.dtype == dtype
    got = md.flatten(nnx.to_pure_dict(nnx.state(model)))
    for name, x in md.flatten(params).items():
        assert got[name].dtype == dtype
        assert np.asarray(got[name]).tobytes() == np.asarray(x).tobytes(), name
    assert md.from_hf(tmp_path, jnp.float32).norm[...].dtype == jnp.float32


def test_broken_hugging_face_folders_are_one_clear_line(tmp_path):
    params = params_of(TINY)

    def without(flat):
        flat["model.layers.1.self_attn.q_proj.weight"] = np.ones((3, 3), np.float32)
        flat["surplus"] = np.ones(1, np.float32)
        return {k: v for k, v in flat.items() if k != "model.layers.0.self_attn.k_proj.bias"}

    with pytest.raises(ValueError, match="do not fit") as error:
        md.from_hf(write_hf(tmp_path / "a", params, change=without))
    for part in (
        "missing model.layers.0.self_attn.k_proj.bias",
        "unexpected surplus",
        "q_proj.weight has shape (3, 3)",
    ):
        assert part in str(error.value)
    with pytest.raises(ValueError, match=r"F64|I32"):
        md.from_hf(write_hf(tmp_path / "b", params, change=lambda flat: {k: np.int32(v) for k, v in flat.items()}))

    folder = write_hf(tmp_path / "c", params)
    shard = folder / "model-00002-of-00002.safetensors"
    whole = shard.read_bytes()
    for damage in (whole[: len(whole) // 2], whole[:3], b"", (2**40).to_bytes(8, "little") + whole[8:]):
        shard.write_bytes(damage)
        with pytest.raises(ValueError, match="cannot be read") as error:
            md.from_hf(folder)
        assert str(shard) in str(error.value)
        assert "\n" not in str(error.value)
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=r"index\.json names it"):
        md.from_hf(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="weight_map"):
        md.from_hf(folder)
    tied = dataclasses.replace(TINY, tie=True)
    with pytest.raises(ValueError, match=r"unexpected lm_head\.weight"):
        md.from_hf(write_hf(tmp_path / "d", params, tied))


def test_a_saved_model_loads_bit_for_bit_also_onto_a_mesh(tmp_path):
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params_of(TINY))
    model = nnx.merge(md.graph_of(TINY, md.Run()), params)
    (tmp_path / "tokenizer.json").write_text("{}")
    md.save(tmp_path / "ckpt", model, extra=[tmp_path / "tokenizer.json"])
    assert {p.name for p in (tmp_path / "ckpt").iterdir()} == {"config.json", "meta.json", "params", "tokenizer.json"}
    with pytest.raises(FileExistsError):
        md.save(tmp_path / "ckpt", model)
    for where in (None, mesh):
        back = md.load(tmp_path / "ckpt", mesh=where)
        assert back.cfg == TINY
        got = md.flatten(nnx.to_pure_dict(nnx.state(back)))
        for name, x in md.flatten(params).items():
            assert np.asarray(got[name]).tobytes() == np.asarray(x).tobytes(), name
        assert len(got["lm_head"].sharding.device_set) == (8 if where else 1)
    assert md.load(tmp_path / "ckpt", jnp.float32).norm[...].dtype == jnp.float32


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax drops its own futures
def test_damaged_checkpoints_are_one_clear_line(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"convert_weights\.py"):
        md.load(tmp_path)
    md.save(tmp_path / "ckpt", build())
    meta = json.loads((tmp_path / "ckpt" / "meta.json").read_text())
    meta["sums"]["layers.1.o_proj"] += 1
    (tmp_path / "ckpt" / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match=r"layers\.1\.o_proj differ from what was saved"):
        md.load(tmp_path / "ckpt")
    largest = max((p for p in (tmp_path / "ckpt" / "params").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:100])
    with pytest.raises(ValueError, match="cannot be read") as error:
        md.load(tmp_path / "ckpt")
    assert "\n" not in str(error.value)
    gc.collect()


def quantised(params, dtype=jnp.float32):
    return jax.tree.map(lambda x: md.quantise(x) if x.ndim == 2 else x.astype(dtype), params)


def test_int8_rows_are_off_by_half_a_step_at_most():
    weight_FD = np.random.default_rng(0).normal(0, 3, (40, 30)).astype(np.float32)
    weight_FD[7] = 0
    weight_FD[8] *= 1e-6  # a row of its own size
    q_FD, scale_F1 = jax.tree.map(np.asarray, md.quantise(weight_FD))
    assert (q_FD.dtype, scale_F1.dtype, scale_F1.shape) == (np.int8, np.float32, (40, 1))
    assert (np.abs(q_FD).max(-1) == np.where(np.arange(40) == 7, 0, 127)).all()
    assert (np.abs(q_FD * scale_F1 - weight_FD) <= 0.5001 * scale_F1).all()


@pytest.mark.parametrize("tie", [False, True])
def test_int8_logits_are_those_of_the_matrices_that_the_numbers_stand_for(tie):
    cfg = dataclasses.replace(TINY, tie=tie)
    int8 = quantised(params_of(cfg))
    assert int8["layers"]["1"]["down_proj"].q_FD.dtype == int8["embed_tokens"].q_FD.dtype == jnp.int8
    is_int8 = lambda x: isinstance(x, md.Int8)  # noqa: E731
    same = jax.tree.map(lambda x: x.q_FD * x.scale_F1 if is_int8(x) else x, int8, is_leaf=is_int8)
    token_BL = tokens(2, 14)
    got, want, full = (
        np.asarray(apply(nnx.merge(md.graph_of(cfg, md.Run()), params), token_BL))
        for params in (int8, same, params_of(cfg))
    )
    assert np.abs(got - want).max() < 2e-5 * np.abs(want).max()
    error = np.sqrt(np.mean((got - full) ** 2) / np.mean(full**2))
    assert 1e-3 < error < 0.1  # not exact, and near


@pytest.mark.slow
def test_int8_checkpoints_load_in_a_quarter_of_the_bytes_also_onto_a_mesh(tmp_path):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params_of(TINY))
    md.save(tmp_path / "ckpt", nnx.merge(md.graph_of(TINY, md.Run()), params))
    model = md.load(tmp_path / "ckpt", jnp.float32, int8=True)
    want, got = (md.flatten(x) for x in (quantised(params), nnx.to_pure_dict(nnx.state(model))))
    assert want.keys() == got.keys()
    for name, x in want.items():
        assert got[name].dtype == x.dtype
        np.testing.assert_array_equal(got[name], x, err_msg=name)
    matrices = [x for x in jax.tree.leaves(params) if x.ndim == 2]
    assert sum(x.nbytes for x in got.values() if x.ndim == 2) == sum(x.size + 4 * len(x) for x in matrices)
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    one = apply(model, tokens(8, 10))
    with jax.set_mesh(mesh):
        spread = md.load(tmp_path / "ckpt", jnp.float32, mesh=mesh, int8=True)
        gate = spread.layers["0"].gate_proj.get_value()
        assert gate.q_FD.sharding.spec == jax.P("tensor", "fsdp")
        assert len(gate.scale_F1.addressable_shards[0].data) == TINY.ffn // 2
        np.testing.assert_allclose(apply(spread, tokens(8, 10)), one, atol=1e-4)
    row, _ = md.fill(model, masked(1, 4, 6), None, md.Sampling(block_length=6, cache="dual", threshold=0.5))
    assert (row != MASK).all()


def test_int8_7b_leaves_half_of_16_gb():
    shapes = jax.eval_shape(lambda params: quantised(params, jnp.bfloat16), md.param_shapes(md.CONFIGS["7b"]))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    parts = md.count_params(md.CONFIGS["7b"])
    vectors = parts["norms"] + 28 * 4608
    rows = 2 * 152_064 + 28 * (2 * 3584 + 2 * 512 + 2 * 18_944 + 3584)
    assert size == parts["total"] - vectors + 2 * vectors + 4 * rows
    assert size < 8e9


def test_tokenizers_that_do_not_fit_are_refused(tmp_path):
    vocab = {name: i for i, name in enumerate(["a", "b", "c", "\u0120", "ab", "abc"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("a", "b"), ("ab", "c")]))
    tokenizer.add_special_tokens(["<|endoftext|>", "<|mask|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    cfg = dataclasses.replace(TINY, vocab=16, mask_id=7, eos_id=6, pad_id=6, bos_id=6)
    assert md.load_tokenizer(tmp_path, cfg).encode("abc<|mask|>").ids == [5, 7]
    for change, part in (
        ({"vocab": 6, "mask_id": 5, "eos_id": 1, "pad_id": 1, "bos_id": 1}, "it has 8 tokens, the model 6"),
        ({"mask_id": 4}, "4, the model's mask_id, is 'ab' in it"),
        ({"eos_id": 9}, "9, the model's eos_id, is None in it"),
    ):
        with pytest.raises(ValueError, match=part):
            md.load_tokenizer(tmp_path, dataclasses.replace(cfg, **change))
    assert md.load_tokenizer(tmp_path, dataclasses.replace(cfg, mask_id=9)).get_vocab_size() == 8  # MASK needs no name
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        md.load_tokenizer(tmp_path, cfg)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        md.load_tokenizer(tmp_path, cfg)


# ---- sampling ------------------------------------------------------------------------------------------------------


def test_the_token_at_p_comes_from_the_logits_at_p_minus_1(shallow):
    token_BL = tokens(2, 10)
    token_BL[0, [0, 1, 5, 9]] = token_BL[1, [0, 4]] = MASK
    logits_BLV = np.array(apply(shallow, token_BL))
    logits_BLV[..., MASK] = -np.inf
    best_BL = logits_BLV.argmax(-1)
    want_BL = np.where(token_BL == MASK, np.concatenate([best_BL[:, :1], best_BL[:, :-1]], 1), token_BL)
    got_BL, stats = md.fill(shallow, token_BL, None, md.Sampling(steps=1))
    np.testing.assert_array_equal(got_BL, want_BL)
    assert stats["forwards"] == 1


def test_the_step_table_follows_the_schedule_of_diffusion():
    for masks, steps, eps in ((16, 4, 1e-3), (256, 256, 1e-3), (255, 64, 1e-3), (6, 20, 0.1), (40, 7, 1e-5)):
        table_SN, left, counts = md.step_table(300, steps, eps), masks, []
        for row_N in table_SN:
            counts.append(row_N[left])
            left -= counts[-1]
        np.testing.assert_array_equal(counts, diffusion.step_counts(masks, steps, "dream", eps))
        assert (table_SN[-1] == np.arange(301)).all()


def simulate(model, row_L, rule):
    """One row without padding, block by block, in NumPy around single passes of the model."""
    row_L, L, size = row_L.copy(), len(row_L), rule.block_length
    S0, passes = int(np.argmax(row_L == MASK)), 0
    spb = rule.steps // ((L - S0) // size) if rule.steps else size
    t = np.linspace(1, rule.eps, spb + 1)
    for S in range(S0, L, size):
        E = S + size
        start, end = {"": (0, L), "prefix": (S - 1, L), "dual": (S - 1, E)}[rule.cache]
        h_LD, cache = hidden(model, row_L[None])
        at = 0
        for i in range(size):
            slots = np.flatnonzero(row_L[S:E] == MASK) + S
            if not len(slots):
                break
            if i:
                window = (row_L[None], None) if not rule.cache else (row_L[None, start:end], None, None, cache, start)
                (h_LD, cache), at = hidden(model, *window), start
            logits_CV = np.array(model.logits(h_LD)[0], np.float64)[slots - 1 - at]
            logits_CV[:, MASK] = -np.inf
            p_CV = np.exp(logits_CV - logits_CV.max(-1, keepdims=True))
            p_CV /= p_CV.sum(-1, keepdims=True)
            sure_C = p_CV.max(-1) if rule.threshold else (p_CV * np.log(p_CV + 1e-300)).sum(-1)
            n = len(slots)
            k = max(1, (sure_C >= rule.threshold).sum()) if rule.threshold else int(n * (1 - t[i + 1] / t[i]))
            k = n if not rule.threshold and i == spb - 1 else k
            passes += bool(k) or not i
            for c in np.argsort(-sure_C, kind="stable")[:k]:
                row_L[slots[c]] = p_CV[c].argmax()
    return row_L, passes


@pytest.mark.parametrize("cache", ["", pytest.param("prefix", marks=pytest.mark.slow), "dual"])
def test_cached_blocks_of_a_padded_batch_are_those_of_each_row_alone(model, cache):
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (9, 4, 1)]
    for settings in ({"threshold": 0.6}, {"steps": 8}, {"steps": 2}):
        rule = md.Sampling(block_length=6, cache=cache, **settings)
        rows, stats = md.generate(model, prompts, 12, rule)
        alone = [simulate(model, np.array(p + [MASK] * 12, np.int32), rule) for p in prompts]
        for row, (want_L, _) in zip(rows, alone, strict=True):
            np.testing.assert_array_equal(row, want_L)
        if len(settings) == 1 and "threshold" not in settings:  # all rows fill the same number of tokens a step
            assert stats["forwards"] == alone[0][1]
        widths = {"": {44}, "prefix": {13, 7, 44}, "dual": {7, 44}}[cache]
        assert set(stats["windows"]) <= widths
        assert MASK not in np.array(rows[0])


def test_a_lower_threshold_takes_fewer_passes(shallow):
    canvas_BL = masked(2, 6, 12)
    passes = []
    for threshold in (0.99, 0.05):
        got, stats = md.fill(shallow, canvas_BL, None, md.Sampling(threshold=threshold, block_length=12, cache="dual"))
        assert (got != MASK).all()
        passes.append(stats["forwards"])
    assert passes == sorted(passes, reverse=True)
    assert passes[0] > passes[-1]


def test_rows_with_unequal_masks_follow_their_own_schedule_and_keep_their_prompts(shallow):
    token_BL = tokens(3, 20)
    for row, n in zip(token_BL, (9, 3, 14), strict=True):
        row[np.random.default_rng(n).permutation(20)[:n]] = MASK
    for alg in ("entropy", "maskgit_plus", "topk_margin"):
        got_BL, stats = md.fill(shallow, token_BL, None, md.Sampling(alg=alg, steps=5, history=True))
        canvases = np.concatenate([token_BL[None], stats["history"]])
        counts_SB = -np.diff((canvases == MASK).sum(-1), axis=0)
        np.testing.assert_array_equal(counts_SB, diffusion.step_counts(np.array([9, 3, 14]), 5, "dream"))
        kept = token_BL != MASK
        np.testing.assert_array_equal(got_BL[kept], token_BL[kept])
        assert (got_BL != MASK).all()
    got_BL, _ = md.fill(shallow, token_BL, None, md.Sampling(threshold=0.5, block_length=5, cache="dual"))
    np.testing.assert_array_equal(got_BL[kept], token_BL[kept])
    assert (got_BL != MASK).all()


@pytest.mark.parametrize(
    "rule",
    [
        md.Sampling(steps=4),
        md.Sampling(alg="origin", steps=4),
        md.Sampling(threshold=0.9, steps=3),
        md.Sampling(threshold=0.9, block_length=6, cache="dual"),
        md.Sampling(threshold=0.9, block_length=6, cache="prefix", fast_dllm=True),
        md.Sampling(steps=4, block_length=6, cache="dual", fast_dllm=True),
        md.Sampling(steps=4, block_length=6),
    ],
    ids=lambda rule: f"{rule.alg}-{rule.cache}-{rule.threshold}-{rule.fast_dllm}",
)
def test_a_model_that_predicts_mask_ends_and_touches_nothing_else(shallow, rule):
    canvas_BL = masked(2, 5, 12)

    def hook(step, token_BL, slot_BC, logits_BCV):
        return logits_BCV.at[..., MASK].set(jnp.where(slot_BC % 3 == 0, 1e4, -1e4))

    rule = dataclasses.replace(rule, ban_ids=())
    got_BL, stats = md.fill(shallow, canvas_BL, None, rule, jax.random.key(0), logit_hook=hook)
    np.testing.assert_array_equal(got_BL[:, :5], canvas_BL[:, :5])
    want_BL = np.broadcast_to(np.arange(17) % 3 == 0, (2, 17)) & (canvas_BL == MASK)
    if rule.threshold == 0:
        np.testing.assert_array_equal(got_BL == MASK, want_BL)
    assert ((got_BL == MASK) >= want_BL).all()
    assert stats["steps"] <= 3 + 12 + 2 * 7
    banned_BL, _ = md.fill(shallow, canvas_BL, None, dataclasses.replace(rule, ban_ids=None), jax.random.key(0))
    assert (banned_BL != MASK).all()


def test_hooks_see_shifted_logits_at_their_slots_and_every_step(shallow):
    canvas_BL = masked(2, 5, 9)

    def logit_hook(step, token_BL, slot_BC, logits_BCV):
        return jnp.where(jnp.arange(TINY.vocab) == (slot_BC + 3)[..., None], 50.0, logits_BCV)

    def token_hook(step, token_BL):
        return token_BL.at[:, 6].set(20 + step)

    for rule in (md.Sampling(steps=4, history=True), md.Sampling(steps=4, block_length=9, cache="dual", history=True)):
        got_BL, stats = md.fill(shallow, canvas_BL, None, rule, token_hook=token_hook, logit_hook=logit_hook)
        want_L = np.arange(14) + 3
        want_L[6] = 20 + stats["steps"] - 1
        np.testing.assert_array_equal(got_BL[:, 5:], np.broadcast_to(want_L[5:], (2, 9)))
        np.testing.assert_array_equal(stats["history"][:, 0, 6], 20 + np.arange(stats["steps"]))


def test_an_end_token_ends_its_row_alone(shallow):
    canvas_BL, eos = masked(2, 5, 12), TINY.eos_id
    canvas_BL[1, 14:] = 9  # an infill: text follows

    def hook(step, token_BL, slot_BC, logits_BCV):  # EOS at slot 8, surest; the rest is never sure of it
        at_BC1 = (slot_BC == 8)[..., None]
        eos_V = jnp.arange(TINY.vocab) == eos
        return jnp.where(at_BC1 & eos_V, 90.0, jnp.where(eos_V, -1e9, logits_BCV))

    for settings in ({}, {"block_length": 4, "cache": "dual"}, {"block_length": 4, "threshold": 0.5}):
        rule = md.Sampling(ban_ids=(MASK,), **settings)
        full, more = md.fill(shallow, canvas_BL[:1], None, rule, logit_hook=hook)
        rule = dataclasses.replace(rule, eos_ids=(eos,))
        row, less = md.fill(shallow, canvas_BL[:1], None, rule, logit_hook=hook)
        np.testing.assert_array_equal(row[0, :9], full[0, :9])
        assert row[0, 8] == eos
        assert (row[0, 9:] == eos).all()
        assert (full[0, 9:] != eos).all()
        if settings:
            assert less["forwards"] < more["forwards"]  # later blocks are never begun
        infill, _ = md.fill(shallow, canvas_BL[1:], None, rule, logit_hook=hook)
        assert (infill[0, 14:] == 9).all()
        assert (infill != MASK).all()
        assert (infill[0, 9:14] != eos).all()


def frequencies(ids, n):
    return np.bincount(ids, minlength=n) / len(ids)


def test_tokens_are_drawn_from_the_filtered_distribution(shallow):
    B = 3000
    canvas_BL = np.repeat(masked(1, 6, 1), B, 0)
    logits_V = jnp.asarray(apply(shallow, canvas_BL[:1])[0, 5]).at[MASK].set(-jnp.inf)
    for t, k, p in ((1.5, 0, 1.0), (2.0, 5, 1.0), (2.0, 0, 0.8)):
        rule = md.Sampling(temperature=t, top_k=k, top_p=p)
        got_BL, _ = md.fill(shallow, canvas_BL, None, rule, jax.random.key(1))
        want_V = np.asarray(diffusion.softmax(diffusion.filter_logits(logits_V, t, k, p, rule="dream")))
        got_V = frequencies(got_BL[:, -1], TINY.vocab)
        assert (got_V[want_V == 0] == 0).all()
        np.testing.assert_allclose(got_V, want_V, atol=5 * np.sqrt(0.25 / B))
        assert np.count_nonzero(want_V > 0.02) > 2


def test_positions_are_drawn_from_the_confidences_at_alg_temp(shallow):
    B = 3000
    canvas_BL = np.repeat(masked(1, 6, 4), B, 0)
    logits_CV = np.array(apply(shallow, canvas_BL[:1])[0, 5:9])
    logits_CV[:, MASK] = -np.inf
    sure_C = np.asarray(jax.nn.softmax(logits_CV)).max(-1)
    rule = md.Sampling(alg="maskgit_plus", steps=3, alg_temp=0.3, history=True)
    _, stats = md.fill(shallow, canvas_BL, None, rule, jax.random.key(2))
    first_B4 = stats["history"][0][:, 6:] != MASK
    assert (first_B4.sum(-1) == 1).all()
    want_C = np.exp(sure_C / 0.3) / np.exp(sure_C / 0.3).sum()
    np.testing.assert_allclose(first_B4.mean(0), want_C, atol=5 * np.sqrt(0.25 / B))


@pytest.mark.slow
def test_draws_do_not_depend_on_padding_or_on_the_rows_behind(shallow):
    prompts = [tokens(1, 7)[0].tolist(), tokens(1, 3)[0].tolist(), tokens(1, 40)[0].tolist()]
    for settings in (
        {"alg_temp": 0.2},
        {"alg": "origin", "steps": 10},
        {"threshold": 0.5, "block_length": 5, "cache": "dual"},
    ):
        rule = md.Sampling(temperature=0.8, top_p=0.95, **settings)
        two, _ = md.generate(shallow, prompts[:2], 10, rule, jax.random.key(5))
        three, _ = md.generate(shallow, prompts, 10, rule, jax.random.key(5))
        assert two == three[:2]
        other, _ = md.generate(shallow, prompts[:2], 10, rule, jax.random.key(6))
        assert other != two


def test_infilling_needs_no_new_token_and_undefined_ids_are_never_drawn(shallow):
    holes = tokens(1, 12)[0]
    holes[[2, 3, 7]] = MASK
    for settings in ({}, {"block_length": 4, "cache": "dual"}, {"block_length": 5, "threshold": 0.9}):
        rule = md.Sampling(vocab=20, temperature=1.0, **settings)
        (row,), stats = md.generate(shallow, [holes.tolist()], 0, rule, jax.random.key(0))
        row = np.array(row)
        assert len(row) == 12
        assert (row[holes != MASK] == holes[holes != MASK]).all()
        assert (row[holes == MASK] < 20).all()
        assert stats["forwards"] > 0
    (row,), stats = md.generate(shallow, [[5, 6, 7]], 0)
    assert (row, stats["forwards"]) == ([5, 6, 7], 0)
    (row,), _ = md.generate(shallow, [[]], 6)
    assert len(row) == 6
    assert MASK not in row


def test_logits_exist_for_few_positions_and_other_steps_are_the_same_program(monkeypatch):
    shallow, calls, real = build(dataclasses.replace(TINY, layers=1), head_positions=4), [], md._fill
    monkeypatch.setattr(md, "_fill", lambda *args, **kwargs: calls.append((args, kwargs)) or real(*args, **kwargs))
    canvas_BL = masked(2, 5, 18)
    md.fill(shallow, canvas_BL, None, md.Sampling(steps=18))
    compiled = real._cache_size()
    md.fill(shallow, canvas_BL, None, md.Sampling(steps=7, eps=0.01, ban_ids=(3, MASK)))
    assert real._cache_size() == compiled
    text = real.lower(*calls[0][0], **calls[0][1]).as_text()
    assert f"2x4x{TINY.vocab}xf32" in text
    assert f"2x23x{TINY.vocab}xf32" not in text
    assert f"46x{TINY.vocab}xf32" not in text


def test_bad_input_is_one_clear_line(shallow):
    canvas_BL = masked(1, 4, 8)
    rules = {
        "does not divide the 8 tokens": {"block_length": 3},
        "do not divide over 2 blocks": {"block_length": 4, "steps": 3},
        "sampling needs a key": {"temperature": 1.0},
        "every token is banned": {"ban_ids": tuple(range(48))},
    }
    for text, settings in rules.items():
        with pytest.raises(ValueError, match=text):
            md.fill(shallow, canvas_BL, None, md.Sampling(**settings))
    for settings in (
        {"alg": "margin"}, {"cache": "dual"}, {"cache": "both", "block_length": 4}, {"top_p": 0.0}, {"threshold": 1.5},
        {"eps": 0.0}, {"steps": -1}, {"alg": "origin", "threshold": 0.5}, {"fast_dllm": True, "block_length": 4},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"is|block|window"):
            md.Sampling(**settings)
    with pytest.raises(ValueError, match="do not fit a vocabulary"):
        md.fill(shallow, canvas_BL + 1)
    with pytest.raises(ValueError, match="canvas is a"):
        md.fill(shallow, canvas_BL[0])
    with pytest.raises(ValueError, match="mask of shape"):
        md.fill(shallow, canvas_BL, np.ones((1, 3)))
    for prompts, new in (([[5] * 60], 8), ([[5] * 70], 0)):
        with pytest.raises(ValueError, match="do not fit: the model reaches 64"):
            md.generate(shallow, prompts, new)
    with pytest.raises(ValueError, match="nothing to fill"):
        md.generate(shallow, [], 8)
    with pytest.raises(SystemExit, match="not one of"):
        md.main(md.Args(model="8b"))


def test_steps_that_cannot_change_anything_cost_no_pass(shallow):
    got, stats = md.fill(shallow, masked(1, 4, 6), None, md.Sampling(steps=20))
    counts = diffusion.step_counts(6, 20, "dream")
    assert stats["forwards"] == np.count_nonzero(counts)
    assert stats["idle"] == 20 - np.count_nonzero(counts)
    assert (got != MASK).all()


# ---- training ------------------------------------------------------------------------------------------------------


SEGMENT_BL = jnp.array([[1] * 6 + [2] * 9 + [3] * 3 + [0] * 2, [1] * 20])
POSITION_BL = jnp.array([[*range(6), *range(9), *range(3), 0, 0], range(20)])
bound = jax.jit(lambda model, *args: model.nelbo(*args))
noise = jax.jit(md.noise, static_argnums=1)


def noised(seed=0):
    """Levels and uniform numbers of the two rows."""
    return noise(jax.random.key(seed), 2, jnp.arange(2), SEGMENT_BL)


def nelbo_by_hand(params, cfg, token_BL, t_BL, u_BL, fixed_BL, wrong=""):
    """The bound in float64: every document alone, each masked token read one place to its left, MASK impossible."""
    total = 0.0
    for b, s in ((0, 1), (0, 2), (0, 3), (1, 1)):
        here_L = np.asarray(SEGMENT_BL[b] == s)
        token_L, t_L, u_L, fixed_L = (np.asarray(x)[b][here_L] for x in (token_BL, t_BL, u_BL, fixed_BL))
        mask_L = (u_L < t_L) & ((fixed_L == 0) | (wrong == "prompt"))
        noised_L = np.where(mask_L, cfg.mask_id, token_L)
        logits_LV = brute_force(params, cfg, noised_L, np.asarray(POSITION_BL[b])[here_L], np.ones(len(token_L), bool))
        if wrong != "mask possible":
            logits_LV[:, cfg.mask_id] = -np.inf
        logp_LV = logits_LV - np.log(np.exp(logits_LV).sum(-1, keepdims=True))
        if wrong != "shift":
            logp_LV = np.concatenate([logp_LV[:1], logp_LV[:-1]])
        weight_L = 1 if wrong == "weight" else 1 / t_L
        total -= (logp_LV[np.arange(len(token_L)), token_L] * mask_L * weight_L).sum()
    return total


@pytest.mark.parametrize("remat", ["none", "qkvo"])
def test_the_bound_is_that_of_the_formulas_and_of_none_of_the_likely_mistakes(remat):
    model, token_BL = build(remat=remat, block=7 if remat == "qkvo" else 256, loss_tokens=8), jnp.asarray(tokens(2, 20))
    (t_BL, u_BL), fixed_BL = noised(1), jnp.array([[0] * 6 + [1] * 4 + [0] * 10, [1] * 12 + [0] * 8])
    got = float(bound(model, token_BL, SEGMENT_BL, POSITION_BL, t_BL, u_BL, fixed_BL))
    args = params_of(TINY), TINY, token_BL, t_BL, u_BL, fixed_BL
    assert got == pytest.approx(nelbo_by_hand(*args), rel=2e-5)
    for wrong in ("prompt", "mask possible", "shift", "weight"):
        assert got != pytest.approx(nelbo_by_hand(*args, wrong), rel=1e-3), wrong
    if remat == "none":
        return
    plain = build(loss_tokens=8)  # what is computed twice gives the same gradients
    gradients = [
        jax.jit(jax.grad(lambda m: m.nelbo(token_BL, SEGMENT_BL, POSITION_BL, t_BL, u_BL, fixed_BL)))(m)
        for m in (model, plain)
    ]
    for a, b in zip(*map(jax.tree.leaves, gradients), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


def test_the_bound_of_uniform_logits_is_the_logarithm_of_the_vocabulary_without_mask():
    params = params_of(TINY) | {"lm_head": jnp.zeros((TINY.vocab, TINY.width))}
    model, token_BL = nnx.merge(md.graph_of(TINY, md.Run()), params), tokens(2, 20)
    (t_BL, u_BL), in_BL = noised(), SEGMENT_BL > 0
    want = float(np.log(TINY.vocab - 1) * (in_BL * (u_BL < t_BL) / t_BL).sum())
    assert float(bound(model, token_BL, SEGMENT_BL, POSITION_BL, t_BL, u_BL)) == pytest.approx(want, rel=1e-5)
    t_BL, u_BL = noise(jax.random.key(0), 4096, jnp.arange(4096), jnp.ones((4096, 20), jnp.int32))
    assert float((u_BL < t_BL).sum(-1) @ (1 / t_BL[:, 0]) / u_BL.size) == pytest.approx(1, abs=0.05)  # 0.01 a deviation


def test_documents_of_a_row_do_not_see_each_other():
    for block in (256, 7):
        model, token_BL = build(block=block), tokens(1, 20)
        see = jax.jit(lambda model, token_BL: model.hidden(token_BL, segment_BL=SEGMENT_BL[:1])[0])
        before = np.asarray(see(model, token_BL))
        for i in (0, 7, 16, 19):
            changed_BL = token_BL.copy()
            changed_BL[0, i] = token_BL[0, i] % 40 + 3
            moved_L = (np.asarray(see(model, changed_BL)) != before).any(-1)[0]
            np.testing.assert_array_equal(moved_L, SEGMENT_BL[0] == SEGMENT_BL[0, i])


def test_prompts_are_never_masked():
    model, token_BL = build(dataclasses.replace(TINY, layers=1)), jnp.asarray(tokens(2, 20))
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
    segment_BL = jnp.asarray(np.random.default_rng(0).integers(1, 30, (64, 1)) + np.arange(40) // 4)
    t_BL, u_BL = noise(jax.random.key(3), 64, jnp.arange(64), segment_BL)
    pick = jnp.array([41, 5])
    for got, want in zip(noise(jax.random.key(3), 64, pick, segment_BL[pick]), (t_BL, u_BL), strict=True):
        np.testing.assert_array_equal(got, want[pick])
    assert (np.asarray(t_BL).reshape(64, 10, 4).std(-1) == 0).all()  # one level a document
    assert 1e-3 <= t_BL.min() < t_BL.max() <= 1
    first_B = noise(jax.random.key(3), 64, jnp.arange(64), jnp.ones((64, 1), jnp.int32))[0][:, 0]
    np.testing.assert_array_equal(np.floor((first_B - 1e-3) / (1 - 1e-3) * 64), np.arange(64))
    few = np.sort(np.asarray(t_BL)[0, ::4])  # ten documents of one row: no gap is much wider than a tenth
    assert np.diff(few).max() < 0.2
    assert not np.array_equal(noise(jax.random.key(4), 64, pick, segment_BL[pick])[1], u_BL[pick])


def test_the_gradient_on_a_mesh_of_eight_devices_is_that_of_one():
    cfg = dataclasses.replace(TINY, layers=1)
    token_BL, segment_BL, position_BL = (jnp.tile(x, (2, 1)) for x in (tokens(2, 20), SEGMENT_BL, POSITION_BL))
    t_BL, u_BL = noise(jax.random.key(0), 4, jnp.arange(4), segment_BL)
    graph, params = md.graph_of(cfg, md.Run(remat="full")), params_of(cfg)
    step = jax.jit(
        jax.value_and_grad(lambda p: nnx.merge(graph, p).nelbo(token_BL, segment_BL, position_BL, t_BL, u_BL))
    )
    loss, grads = step(params)
    axes = {"axis_names": ("data", "fsdp", "tensor"), "axis_types": (jax.sharding.AxisType.Auto,) * 3}
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), **axes)
    with jax.set_mesh(mesh):
        split_loss, split_grads = step(jax.device_put(params, md.shardings(mesh, params)))
    assert float(split_loss) == pytest.approx(float(loss), rel=1e-5)
    for a, b in zip(jax.tree.leaves(split_grads), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * np.abs(b).max())
