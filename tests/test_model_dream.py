"""Dream apart from its reference values: counts, config, files, brute-force forward, sampling, blocks, sharding."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import diffusion
import model_dream as md

TINY = md.DreamConfig(
    48, 32, layers=2, heads=4, kv_heads=2, head_size=8, ffn=48, positions=64, mask_id=47, pad_id=0, bos_id=1, eos_id=2
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


apply = jax.jit(lambda model, *args: model(*args))


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


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 2, 4), (4, 1, 2), (1, 8, 1), (1, 1, 8)])
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
    with pytest.raises(FileNotFoundError, match="index.json names it"):
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
