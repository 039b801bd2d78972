"""Dream and its kin (LLaDA, SDAR, Nemotron, ...): masked-diffusion language models, their
architecture and loss.

Flax NNX. Parameters keep the names and the [out, in] layout of the Hugging Face checkpoint, one
array per tensor, so a conversion copies bytes. convert_weights.py converts, train_dream.py trains,
sample_dream.py samples.

Letters: B batch, L length, M length on the key side, T tokens, C positions of one chunk of logits,
D width, H query heads, J key/value heads, G = H / J, K head size, F feed-forward width, R rank of
LoRA, V vocabulary.

A layer, with n = RMSNorm(x):  h = x + W_o attn(W_q n + b_q, W_k n + b_k, W_v n + b_v);  x' = h +
W_down( silu(W_gate m) * W_up m), m = RMSNorm(h). Attention is bidirectional. The logits at position
p - 1 predict the token at p, as in the autoregressive model that Dream was made from; position 0
uses its own. DreamConfig has what differs. Refs: Dream, arXiv:2508.15487; DiffuCoder,
arXiv:2506.20639; LLaDA, arXiv:2502.09992; SDAR, arXiv:2510.06303.
"""

import dataclasses
import functools
import json
import math
import re
import typing

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as PS

import diffusion
import runs


def hf(key, default):
    """A field of DreamConfig, with its key in a Hugging Face config.json."""
    return dataclasses.field(default=default, metadata={"hf": key})


@dataclasses.dataclass(frozen=True)
class DreamConfig:
    """The architecture, as a checkpoint stores it. Defaults are DiffuCoder-7B's."""

    # rows of the embedding; ids from 151,668 on have no token
    vocab: int = hf("vocab_size", 152_064)
    width: int = hf("hidden_size", 3584)
    layers: int = hf("num_hidden_layers", 28)
    heads: int = hf("num_attention_heads", 28)
    kv_heads: int = hf("num_key_value_heads", 4)
    head_size: int = hf("head_dim", 128)
    ffn: int = hf("intermediate_size", 18_944)
    theta: float = hf("rope_theta", 1e6)  # base of the rotary angles
    # longest canvas; the 7B models were trained on 2,048
    positions: int = hf("max_position_embeddings", 131_072)
    eps: float = hf("rms_norm_eps", 1e-6)
    tie: bool = hf("tie_word_embeddings", False)  # the head is the embedding
    mask_id: int = hf("mask_token_id", 151_666)
    pad_id: int = hf("pad_token_id", 151_643)
    bos_id: int = hf("bos_token_id", 151_643)
    eos_id: int = hf("eos_token_id", 151_643)
    # Not of Dream. bd_size and expand_token_id are the keys of Fast-dLLM v2 and DreamOn, the others
    # ours.
    # block size: a token attends to its own and earlier blocks; 0: no blocks
    block_length: int = hf("bd_size", 0)
    shift: bool = hf("shift", True)  # the logits at position p - 1 predict the token at p
    # a mask that becomes this id splits in two, EOS deletes it; -1: off
    expand_id: int = hf("expand_token_id", -1)
    # masks of a hole of unknown length, which EOS ends; 0: was not trained so
    hole_masks: int = hf("hole_masks", 0)
    # finished tokens attend causally, and the last predicts the next one
    causal: bool = hf("causal_context", False)
    # pairs of YaRN's settings and of the query scale, see rope_of
    rope: tuple = hf("rope_parameters", ())
    family: str = "dream"  # key of FAMILIES
    bias: bool = True  # queries, keys and values have a bias
    qk_norm: bool = False  # RMSNorm of each head's queries and keys

    def __post_init__(self):
        object.__setattr__(self, "rope", tuple(map(tuple, self.rope)))  # JSON has lists
        ids = self.mask_id, self.expand_id, self.pad_id, self.bos_id, self.eos_id
        if self.mask_id in ids[1:] or self.expand_id == self.eos_id or max(ids) >= self.vocab:
            raise ValueError(
                f"ids {ids} of mask, expand, pad, bos, eos: each below {self.vocab}, the first two unique"
            )

    @property
    def autoregressive(self):
        """Whether a causal pass over a text predicts its next token. Blocks of one token with the
        shift are causal.
        """
        return self.causal or (self.shift and self.block_length == 1)


HF_KEYS = {f.name: f.metadata["hf"] for f in dataclasses.fields(DreamConfig) if f.metadata}
# in a config.json if not the default
EXTRAS = {"block_length", "shift", "expand_id", "hole_masks", "causal", "rope"}
OPTIONAL = {"head_size", "tie", "bos_id", "pad_id"} | EXTRAS  # a config.json may leave these out


class Family(typing.NamedTuple):
    """The form of a kind of model on the Hub. Keys of a config.json that are not named here are
    ignored.
    """

    kind: str  # model_type
    code: str  # its class, in architectures or auto_map
    model: dict  # fields of DreamConfig that are its own
    # {key that would change the maths: the values that this file implements}; the first is written
    fixed: dict
    keys: dict  # {Dream's key: its own}
    mask: str = ""  # MASK in the tokenizer, where config.json leaves out its id


# fmt: off
QWEN2 = {"hidden_act": ("silu",), "rope_scaling": (None,), "use_sliding_window": (False, None),
         "attention_dropout": (0, None), "attention_bias": (True, None)}
LLAMA = {"hidden_act": ("silu",), "rope_scaling": (None,), "sliding_window": (None,), "mlp_bias": (False, None),
         "use_sliding_window": (False, None), "attention_bias": (False, None)}
LLADA = {  # none may be missing: the defaults of its code are GPT-2's
    "activation_type": ("silu",), "block_type": ("llama",), "layer_norm_type": ("rms",), "weight_tying": (False, True),
    "block_group_size": (1,), "multi_query_attention": (None, False), "bias_for_layer_norm": (False, None),
    **dict.fromkeys(("rope", "rope_full_precision", "layer_norm_with_affine"), (True,)),
    **dict.fromkeys(("alibi", "attention_layer_norm", "scale_logits", "input_emb_norm", "include_bias",
                     "include_qkv_bias", "attention_dropout", "embedding_dropout", "residual_dropout"), (False, None))}
LLADA_KEYS = {
    "hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads", "intermediate_size": "mlp_hidden_size", "vocab_size": "embedding_size",
    "max_position_embeddings": "max_sequence_length", "tie_word_embeddings": "weight_tying"}
PLAIN, BLOCKS = {"bias": False, "shift": False}, {"bd_size": "block_size"}
SDAR, DIFFCODER = PLAIN | {"qk_norm": True, "block_length": 4}, PLAIN | {"block_length": 4, "mask_id": 5}
NEMOTRON, FAST = PLAIN | {"causal": True, "block_length": 32}, {"block_length": 32}
FAMILIES = {
    "dream": Family("Dream", "DreamModel", {}, QWEN2, {}),
    "llada": Family("llada", "LLaDAModelLM", PLAIN, LLADA, LLADA_KEYS, "<|mdm_mask|>"),
    "sdar": Family("sdar", "SDARForCausalLM", SDAR, LLAMA, BLOCKS, "<|MASK|>"),
    "stable_diffcoder": Family("llama", "StableDiffcoderForCausalLM", DIFFCODER, LLAMA, BLOCKS, "<[MASK_TOKEN]>"),
    "nemotron": Family("nemotron_labs_diffusion", "NemotronLabsDiffusionModel", NEMOTRON, LLAMA, BLOCKS),
    "fast_dllm_v2": Family("Fast_dLLM_Qwen", "Fast_dLLM_QwenForCausalLM", FAST, QWEN2, {}, "|<MASK>|"),
    "open_dcoder": Family("qwen2", "Qwen2ForCausalLM", {}, QWEN2, {}, "[MASK]"),
}
YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
        "llama_4_scaling_beta")  # see rope_of
# fmt: on


def special_ids(folder):
    """{name: id} of the tokens that the tokenizer in a folder has beside its vocabulary."""
    files = (runs.as_path(folder) / name for name in ("tokenizer.json", "added_tokens.json"))
    full, added = (runs.read_json(path) if path.is_file() else {} for path in files)
    return {token["content"]: token["id"] for token in full.get("added_tokens", [])} | added


def family_of(folder, keys):
    """The key of FAMILIES for a folder with this config.json; "" for other models, such as a Qwen2
    without MASK.
    """
    # a former name
    code = json.dumps([keys.get("architectures"), keys.get("auto_map")]).replace("Seed", "Stable")
    for name, family in FAMILIES.items():
        if str(keys.get("model_type")).lower() == family.kind.lower() and (
            name == "dream" or family.code in code
        ):
            return name if name != "open_dcoder" or family.mask in special_ids(folder) else ""
    return ""


def config_from_hf(folder, changes=None):
    """The architecture in the config.json of a Hugging Face folder, with `changes` of its keys;
    others are ignored.

    Raises ValueError for keys that are missing or ask for another model, FileNotFoundError if there
    is no file.
    """
    path = runs.as_path(folder) / "config.json"
    keys, sampling = (
        runs.read_json(path) | (changes or {}),
        path.with_name("generation_config.json"),
    )
    try:
        if not (name := family_of(folder, keys)):
            kind = " ".join([str(keys.get("model_type")), *(keys.get("architectures") or [])])
            raise ValueError(f"it is a {kind}; dense text models of {', '.join(FAMILIES)} are read")
        # transformers 5 keeps RoPE's settings here
        family, rope = FAMILIES[name], keys.get("rope_parameters") or {}
        keys = {"rope_theta": rope.get("rope_theta")} | keys | {"rope_parameters": None}
        if name == "nemotron" and rope.get("rope_type") == "yarn" and {*YARN[:2]} <= rope.keys():
            keys["rope_parameters"] = [(key, rope[key]) for key in YARN if key in rope]
        elif rope.get("rope_type", "default") != "default":
            keys["rope_scaling"] = rope
        fixed = family.fixed.items()
        wrong = [
            f"{key} is {keys[key]!r}, not {ok[0]!r}"
            for key, ok in fixed
            if keys.get(key, ok[0]) not in ok
        ]
        wrong += [
            f"{key} is missing" for key in family.fixed if name == "llada" and key not in keys
        ]
        wrong += [
            f"{key} asks for another model"
            for key in keys
            if re.search("expert|vision", key) and keys[key]
        ]
        keys = {key: x for key, x in keys.items() if x is not None}
        if sampling.is_file():  # LLaDA has its BOS here, SDAR its PAD, DreamOn its expand id
            names = "bos_token_id", "pad_token_id", "expand_token_id"
            keys = {
                key: x
                for key, x in runs.read_json(sampling).items()
                if key in names and x is not None
            } | keys
        if "mask_token_id" not in keys:
            keys["mask_token_id"] = special_ids(folder).get(family.mask)
        if name == "llada":
            ffn = int(keys.get("mlp_ratio", 0) * keys.get("d_model", 0))
            keys = {"n_kv_heads": keys.get("n_heads"), "mlp_hidden_size": ffn} | keys
        keys |= {key: keys[its] for key, its in family.keys.items() if its in keys}
        fields = {field: keys[key] for field, key in HF_KEYS.items() if keys.get(key) is not None}
        fields = {"family": name} | family.model | fields
        wrong += [f"{key} is 0" for key in [*HF_KEYS.values()][:7] if keys.get(key) == 0]
        missing = [key for field, key in HF_KEYS.items() if field not in fields.keys() | OPTIONAL]
        wrong += [f"{family.keys.get(key, key)} is missing" for key in missing]
        if wrong:
            raise ValueError("; ".join(wrong))
        ids = dict.fromkeys(("bos_id", "pad_id"), fields["eos_id"])
        return DreamConfig(**{"head_size": fields["width"] // fields["heads"]} | ids | fields)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ValueError(f"{path} does not describe a Dream model: {error}") from None


def read_config(folder, meta=None):
    """The DreamConfig in a run's `meta`, or in the folder's config.json. ValueError for a model of
    no family here.
    """
    meta = runs.read_json(runs.as_path(folder) / "config.json") if meta is None else meta
    if "model" not in meta:
        return config_from_hf(folder)
    try:
        return DreamConfig(**meta["model"])
    except (TypeError, ValueError) as error:
        reason = (
            "it is a PythonCoder"
            if "diff" in meta["model"]
            else f"{error}; is it of another version?"
        )
        raise ValueError(f"{folder} holds none of {', '.join(FAMILIES)}: {reason}") from None


def config_to_hf(cfg, dtype="bfloat16"):
    """The config.json of the Hub for this architecture, as a dictionary; config_from_hf reads it
    back.
    """
    family = FAMILIES[cfg.family]
    keys = {"architectures": [family.code], "model_type": family.kind} | {
        key: x[0] for key, x in family.fixed.items()
    }
    for name, key in HF_KEYS.items():
        if (
            name not in EXTRAS
            or name in family.model
            or getattr(cfg, name) != getattr(DreamConfig, name)
        ):
            keys[family.keys.get(key, key)] = getattr(cfg, name)
    if cfg.rope:
        keys["rope_parameters"] = dict(cfg.rope) | {
            "rope_type": "yarn",
            "rope_theta": keys.pop("rope_theta"),
        }
    return keys | {"vocab_size": cfg.vocab, "torch_dtype": dtype}


CONFIGS = {
    "tiny": DreamConfig(
        4096, 128, 4, 4, 2, 32, 384, mask_id=4, pad_id=0, bos_id=1, eos_id=2, positions=2048
    ),
    "small": DreamConfig(
        8192, 512, 8, 8, 2, 64, 1408, mask_id=4, pad_id=0, bos_id=1, eos_id=2, positions=2048
    ),
    "100m": DreamConfig(
        32_768, 640, 12, 10, 2, 64, 1792, mask_id=4, pad_id=0, bos_id=1, eos_id=2, positions=2048
    ),
    "500m": DreamConfig(
        vocab=151_936, width=896, layers=24, heads=14, kv_heads=2, head_size=64, ffn=4864, tie=True
    ),
    "1500m": DreamConfig(vocab=151_936, width=1536, heads=12, kv_heads=2, ffn=8960, tie=True),
    "7b": DreamConfig(),
}

# Layout of each parameter on a mesh with the axes (data, fsdp, tensor): tensor splits heads,
# feed-forward, vocabulary; fsdp splits the other side, which is gathered where the weight is used.
# All others are small and replicated.
SHARDING = {
    **dict.fromkeys(("embed_tokens", "lm_head"), PS("tensor", "fsdp")),
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), PS("tensor", "fsdp")),
    **dict.fromkeys(("o_proj", "down_proj"), PS("fsdp", "tensor")),
    **dict.fromkeys(("q_bias", "k_bias", "v_bias"), PS("tensor")),
}
BATCH = ("data", "fsdp")  # both axes split the batch
# of a layer
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GROUP = 64  # rows of a column that share a scale in an Int4; gcd(F, GROUP) if F is no multiple
EXACT_BLOCK = 4  # largest block that is scored by exact_nll, in up to 15 passes


def fit(spec, shape, mesh):
    """The spec without the axes that do not divide their dimension: such a dimension is not
    split.
    """
    names = ((axes,) if isinstance(axes, str) else axes or () for axes in spec)
    devices = (math.prod(mesh.shape[name] for name in of_dimension) for of_dimension in names)
    return PS(
        *(
            axes if size % n == 0 else None
            for axes, size, n in zip(spec, shape, devices, strict=False)
        )
    )


def shard(x, *spec):
    """x with a layout on the mesh in use (jax.set_mesh); without a mesh, x as it is."""
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty else jax.lax.with_sharding_constraint(x, fit(spec, x.shape, mesh))


def shardings(mesh, tree):
    """A NamedSharding for each leaf of a tree of parameters, or of optimizer moments, by its
    name.
    """

    def layout(path, leaf):
        # the innermost name that SHARDING knows: optimizers, Int8 and Int4 wrap parameters in
        # tuples of their own
        names = (getattr(key, "key", None) for key in path[::-1])
        spec = next((SHARDING[name] for name in names if name in SHARDING), PS())
        return jax.NamedSharding(mesh, fit(spec, leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(layout, tree)


# ---- the parts of a layer ------------------------------------------------------------------------------------------


def rms_norm(x, weight, eps):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32, returned in x's dtype."""
    # bfloat16 keeps 8 bits: a sum of D squares would lose most of its terms
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps) * weight).astype(
        x.dtype
    )


def rope_frequencies(head_size, theta, rope=()):
    """Rotary frequencies theta^(-2i/K), float32 [K/2]; PyTorch's own bits but for one unit in 1 of
    64.

    With YaRN's settings `rope` the low ones are divided by `factor`. Ref: YaRN, arXiv:2309.00071,
    section 3.2.
    """
    # NumPy on the host: at position 2,000 the angle's error is 2,000 times the error here
    exponent = np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size)
    inv_freq = np.float32(1) / (np.float64(theta) ** exponent).astype(np.float32)
    if not rope:
        return inv_freq
    yarn = {"beta_fast": 32, "beta_slow": 1} | dict(rope)
    turns = (
        yarn["original_max_position_embeddings"] / (2 * math.pi * yarn[x])
        for x in ("beta_fast", "beta_slow")
    )
    low, high = (head_size * math.log(x) / (2 * math.log(theta)) for x in turns)
    low, high = max(math.floor(low), 0), min(math.ceil(high), head_size - 1)
    ramp = np.clip((np.arange(head_size // 2) - low) / ((high - low) or 1e-3), 0, 1)
    return (inv_freq * (ramp / yarn["factor"] + 1 - ramp)).astype(np.float32)


def rope_of(cfg, position_BL):
    """cos and sin [B, L, K] in float32 of position * rope_frequencies, repeated in both halves of
    K.

    With YaRN times m(mscale) / m(mscale_all_dim), m(s) = 0.1 s ln(factor) + 1, and besides the
    scale of queries [B, L, 1, 1]: 1 + beta ln(1 + floor(position / original positions)), as in
    Llama 4.
    """
    # float32, since bfloat16 cannot tell position 257 from 256
    angle_BLK = position_BL[..., None].astype(jnp.float32) * rope_frequencies(
        cfg.head_size, cfg.theta, cfg.rope
    )
    table, yarn = (
        (jnp.concatenate([f(angle_BLK)] * 2, -1) for f in (jnp.cos, jnp.sin)),
        dict(cfg.rope),
    )
    if not yarn:
        return tuple(table)
    scales = yarn.get("mscale"), yarn.get("mscale_all_dim")
    over, under = (
        0.1 * s * math.log(max(yarn["factor"], 1)) + 1 for s in (scales if all(scales) else (1, 0))
    )
    turns_BL = position_BL // yarn["original_max_position_embeddings"]
    scale_BL = 1 + yarn.get("llama_4_scaling_beta", 0) * jnp.log1p(turns_BL.astype(jnp.float32))
    return *(over / under * x for x in table), scale_BL[..., None, None]


def rotate(x_BLHK, cos_BLK, sin_BLK, scale_BL11=1):
    """Rotary embedding, half-split: (x cos + [-x_2; x_1] sin) scale, in float32, returned in x's
    dtype.
    """
    x32, half = x_BLHK.astype(jnp.float32), x_BLHK.shape[-1] // 2
    swapped = jnp.concatenate([-x32[..., half:], x32[..., :half]], -1)  # [-x_2; x_1]
    return ((x32 * cos_BLK[:, :, None] + swapped * sin_BLK[:, :, None]) * scale_BL11).astype(
        x_BLHK.dtype
    )


class Int8(typing.NamedTuple):
    """A frozen matrix in a quarter of float32's bytes: W = q * scale, q from -127 to 127."""

    q_FD: jax.Array
    scale_F1: jax.Array  # float32, one per row: an output channel, or a token's embedding


class Int4(typing.NamedTuple):
    """A frozen matrix in a seventh of float32's bytes: W = q * scale + low, q from 0 to 15.

    A byte holds a column of the left half of the matrix and one of the right, so unpacking
    interleaves nothing. A group lies in one column, so that its scale may multiply x instead of W,
    see frozen_product.
    """

    q_FE: jax.Array  # E = D / 2; the left half in the low bits
    scale_GD: jax.Array  # bfloat16, one per group of rows in a column
    low_GD: jax.Array  # bfloat16


class Lora(typing.NamedTuple):
    """A frozen matrix and a trained difference of low rank: W + B A. Ref: LoRA,
    arXiv:2106.09685.
    """

    base: jax.Array  # [F, D], or an Int8 or Int4
    a_RD: jax.Array
    b_FR: jax.Array


def quantise(weight_FD, bits=8, name=""):
    """The parameter `name` as Int8, or with 4 bits as Int4, unless its width is odd."""
    # 4 bits for the embedding and the head would double the change of the predictions
    # (bench/dream_bits.py)
    narrow = bits == 4 and name not in ("embed_tokens", "lm_head") and weight_FD.shape[1] % 2 == 0
    return to_int4(weight_FD) if narrow else to_int8(weight_FD)


@jax.jit
def to_int8(weight_FD):
    """The nearest Int8: scale = max |row| / 127, q = round(row / scale). Error: half a scale at
    most.
    """
    weight_FD = weight_FD.astype(jnp.float32)
    scale_F1 = jnp.max(jnp.abs(weight_FD), -1, keepdims=True) / 127
    divisor_F1 = jnp.where(scale_F1 > 0, scale_F1, 1)  # a row of zeros stays one
    return Int8(jnp.round(weight_FD / divisor_F1).astype(jnp.int8), scale_F1)


@jax.jit
def to_int4(weight_FD):
    """The nearest Int4: low = min of a group, scale = (max - low) / 15, both rounded to bfloat16.

    Error: scale / 2 + max |group| / 256 at most, half a step and the rounding of low and scale.
    """
    F, D = weight_FD.shape
    weight_GSD = weight_FD.astype(jnp.float32).reshape(-1, math.gcd(F, GROUP), D)
    low_G1D = weight_GSD.min(1, keepdims=True).astype(jnp.bfloat16)
    scale_G1D = ((weight_GSD.max(1, keepdims=True) - low_G1D) / 15).astype(jnp.bfloat16)
    # all of a group may be equal
    divisor_G1D = jnp.where(scale_G1D > 0, scale_G1D, 1).astype(jnp.float32)
    q_FD = (
        jnp.clip(jnp.round((weight_GSD - low_G1D) / divisor_G1D), 0, 15)
        .astype(jnp.uint8)
        .reshape(F, D)
    )
    left_FE, right_FE = jnp.split(q_FD, 2, 1)
    return Int4(left_FE | right_FE << 4, scale_G1D[:, 0], low_G1D[:, 0])


def halves(weight):
    """(q [G, S, E], scale [G, E], low [G, E]) of the left and the right columns of an Int4, for G
    groups of S rows.
    """
    q_GSE = weight.q_FE.reshape(len(weight.scale_GD), -1, weight.q_FE.shape[1])
    return zip(
        (q_GSE & 15, q_GSE >> 4), *(jnp.split(x_GD, 2, 1) for x_GD in weight[1:]), strict=True
    )


def unpacked(weight, dtype):
    """Both halves [F, E] of the matrix that an Int4 stands for."""
    for q_GSE, scale_GE, low_GE in halves(weight):
        half_GSE = q_GSE.astype(jnp.float32) * scale_GE[:, None] + low_GE[:, None]
        yield half_GSE.reshape(weight.q_FE.shape).astype(dtype)


def linear(x_BLD, weight, *spec, dtype=None, platform=""):
    """x W^T [B, L, F] in `dtype`, by default x's. W is a matrix, Int8, Int4 or Lora; spec is its
    layout on the mesh.
    """
    dtype = dtype or x_BLD.dtype
    if isinstance(weight, Lora):
        # W x + B (A x): the product B A, as large as W, is never made. The barriers keep a GPU's
        # compiler from merging the two products with x into one, for which it would copy W beside
        # A.
        barrier = jax.lax.optimization_barrier
        low_BLR = linear(barrier(x_BLD), weight.a_RD, platform=platform)
        change_BLF = linear(low_BLR, weight.b_FR, dtype=dtype, platform=platform)
        return linear(x_BLD, weight.base, *spec, dtype=dtype, platform=platform) + barrier(
            change_BLF
        )
    x_TD, T = x_BLD.reshape(-1, x_BLD.shape[-1]), math.prod(x_BLD.shape[:-1])
    # by XLA's own estimate a single row takes 3.4 times as long as eight
    if platform == "tpu" and T == 1:
        x_TD = jnp.pad(x_TD, ((0, 7), (0, 0)))
    if isinstance(weight, Int8 | Int4):
        # add a zero that XLA cannot fold, or it casts the matrices of all layers first
        if platform == "cpu":
            zero = jnp.isnan(x_TD[0, 0]).astype(weight[0].dtype)
            weight = type(weight)(weight[0] + zero, *weight[1:])
        y_TF = frozen_product(x_TD, weight, spec, x_TD.dtype, platform)
    else:  # XLA has kernels for the CPU's bfloat16 units (AMX) only where the product is float32
        y_TF = product(x_TD, weight, spec, jnp.float32 if platform == "cpu" else dtype)
    return y_TF[:T].astype(dtype).reshape(*x_BLD.shape[:-1], -1)


def product(x_TD, weight_FD, spec, dtype, axis=1):
    """x W^T [T, F] summed in `dtype`, with axis 0 x W; W, whatever its dtype, is cast to x's and
    gathered over fsdp.
    """
    weight_FD = shard(weight_FD.astype(x_TD.dtype), *spec)
    return jax.lax.dot_general(
        x_TD, weight_FD, (((1,), (axis,)), ((), ())), preferred_element_type=dtype
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def frozen_product(x_TD, weight, spec, dtype, platform=""):
    """x W^T [T, F] in float32 of an Int8 or Int4, x of `dtype`. Its gradient is x's alone, and
    keeps no wider W.
    """
    if isinstance(weight, Int8):  # each q is exact in bfloat16, so the scales multiply the product
        return product(x_TD, weight.q_FD, spec, jnp.float32) * weight.scale_F1[:, 0]
    x_TEs = jnp.split(x_TD, 2, 1)
    if len(x_TD) > (2048 if platform == "tpu" else 1):  # the unpacked matrix is written to memory
        pairs = zip(x_TEs, unpacked(weight, dtype), strict=True)
        return sum(product(x_TE, weight_FE, spec, jnp.float32) for x_TE, weight_FE in pairs)
    # y = q (scale x) + low x for each group of rows: the scales multiply x, so W is never written
    # to memory
    y_TGS = product(x_TD, weight.low_GD, spec, jnp.float32)[..., None]
    for x_TE, (q_GSE, scale_GE, _) in zip(
        x_TEs, halves(weight._replace(q_FE=shard(weight.q_FE, *spec))), strict=True
    ):
        parts = (x_TE * scale_GE[:, None]).astype(dtype), q_GSE.astype(dtype)
        y_TGS += jnp.einsum("GTE,GSE->TGS", *parts, preferred_element_type=jnp.float32)
    return y_TGS.reshape(len(x_TD), -1)


def gradient_of_input(spec, dtype, platform, weight, dy_TF):
    """dy W in `dtype`, and no gradient of W."""
    int8 = isinstance(weight, Int8)
    dy_TF = (dy_TF * weight.scale_F1[:, 0] if int8 else dy_TF).astype(dtype)
    parts = [weight.q_FD] if int8 else unpacked(weight, dtype)
    dx = [product(dy_TF, part_FD, spec, jnp.float32, axis=0) for part_FD in parts]
    return jnp.concatenate(dx, 1).astype(dtype), None


frozen_product.defvjp(
    lambda x_TD, weight, *how: (frozen_product(x_TD, weight, *how), weight), gradient_of_input
)


def attention(q_BLHK, k_BMJK, v_BMJK, see_BM=None, block=256, place=None, key_place=None):
    """softmax(q k^T / sqrt(K)) v [B, L, H, K], bidirectional. see_BM is False at keys that are
    padding.

    place and key_place, diffusion.Places of the queries and keys, add the attention mask
    diffusion.sees. Query head h reads key/value head h // G. Scores and softmax are float32, for
    `block` queries at a time: at most [B, H, block, M] exist. A row whose keys are all masked gets
    the mean of all values, not NaN.
    """
    (B, L, H, K), (_, M, J, _) = q_BLHK.shape, k_BMJK.shape
    k_BJMK, v_BJMK = k_BMJK.swapaxes(1, 2), v_BMJK.swapaxes(1, 2)

    def attend(queries):
        q_BLHK, place = queries
        # The G query heads of a group are T = G L queries: one matmul per key/value head, no copies
        # of the keys.
        q_BJTK = q_BLHK.reshape(B, -1, J, H // J, K).transpose(0, 2, 3, 1, 4).reshape(B, J, -1, K)
        score_BJTM = (
            jnp.einsum("BJTK,BJMK->BJTM", q_BJTK, k_BJMK, preferred_element_type=jnp.float32)
            * K**-0.5
        )
        if see_BM is not None:
            # -inf: NaN in a row without keys
            score_BJTM = jnp.where(see_BM[:, None, None], score_BJTM, -1e30)
        if place is not None:
            sees_B11LM = diffusion.sees(place, key_place)[:, None, None]
            score_BJGLM = score_BJTM.reshape(B, J, H // J, -1, M)
            score_BJTM = jnp.where(sees_B11LM, score_BJGLM, -1e30).reshape(score_BJTM.shape)
        prob_BJTM = jax.nn.softmax(score_BJTM, -1).astype(v_BJMK.dtype)
        o_BJTK = jnp.einsum(
            "BJTM,BJMK->BJTK", prob_BJTM, v_BJMK, preferred_element_type=jnp.float32
        )
        o_BJGLK = o_BJTK.astype(v_BJMK.dtype).reshape(B, J, H // J, -1, K)
        return o_BJGLK.transpose(0, 3, 1, 2, 4).reshape(B, -1, H, K)

    if L <= block:
        return attend((q_BLHK, place))
    n = math.ceil(L / block)

    def split(x_BL):  # [B, L, ...] -> [n, B, block, ...]
        x_BL = jnp.pad(x_BL, ((0, 0), (0, n * block - L), *[(0, 0)] * (x_BL.ndim - 2)))
        return x_BL.reshape(len(x_BL), n, block, *x_BL.shape[2:]).swapaxes(0, 1)

    # One block after the other; the backward pass recomputes the scores of a block.
    o_nBLHK = jax.lax.map(jax.checkpoint(attend), jax.tree.map(split, (q_BLHK, place)))
    return o_nBLHK.swapaxes(0, 1).reshape(B, n * block, H, K)[:, :L]


def attention_gpu(q_BLHK, k_BLJK, v_BLJK, see_BL=None, segment_BL=None, interpret=False):
    """`attention` of a row to itself (M = L) by JAX's Triton kernels, forward and backward: scores
    stay on the chip.

    segment_BL numbers the documents of packed rows. Padding is a document of its own, whose results
    are not used.
    """
    # here, as it needs a JAX that knows GPUs
    from jax.experimental.pallas.ops.gpu import attention as triton

    (B, L, H, K), J = q_BLHK.shape, k_BLJK.shape[2]
    segment_BL = jnp.zeros((B, L), jnp.int32) if segment_BL is None else segment_BL
    segment_BL = segment_BL if see_BL is None else jnp.where(see_BL, segment_BL, -1)

    def kernel(q_BLHK, k_BLJK, v_BLJK, segment_BL):
        k_BLHK, v_BLHK = (jnp.repeat(x_BLJK, H // J, 2) for x_BLJK in (k_BLJK, v_BLJK))
        rows = [(0, 0), (0, -L % 128)]
        q_BLHK, k_BLHK, v_BLHK = (
            jnp.pad(x, [*rows, (0, 0), (0, 0)]) for x in (q_BLHK, k_BLHK, v_BLHK)
        )
        segment_BL = jnp.pad(segment_BL, rows, constant_values=-1)
        # queries and keys of a tile, forward and backward: with larger ones registers spill (ptxas,
        # heads of 128)
        settings = {
            "block_sizes": triton.BlockSizes(128, 64, 32, 32, 32, 32),
            "interpret": interpret,
        }
        return triton.mha(q_BLHK, k_BLHK, v_BLHK, segment_BL, sm_scale=K**-0.5, **settings)[:, :L]

    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:  # a Pallas call is one device's program
        heads, rows = (
            fit(PS(BATCH, None, "tensor"), k_BLJK.shape, mesh),
            fit(PS(BATCH), segment_BL.shape, mesh),
        )
        kernel = jax.shard_map(
            kernel, in_specs=(heads, heads, heads, rows), out_specs=heads, check_vma=False
        )
    return kernel(q_BLHK, k_BLJK, v_BLJK, segment_BL)


def updated(old_BJMK, new_BJLK, start):
    """The cache with new keys or values in its slots start .. start + L - 1; start is a number or
    an array [B].
    """
    if jnp.ndim(start) == 0:
        return jax.lax.dynamic_update_slice(old_BJMK, new_BJLK, (0, 0, start, 0))
    return jax.vmap(lambda old, new, at: jax.lax.dynamic_update_slice(old, new, (0, at, 0)))(
        old_BJMK, new_BJLK, start
    )


# ---- the model -----------------------------------------------------------------------------------------------------


def platform_of(device):
    """Compute.platform of a JAX device: cpu, tpu, or a GPU with its compute capability, "gpu 8.9"."""
    return f"gpu {device.compute_capability}" if device.platform == "gpu" else device.platform


@dataclasses.dataclass(frozen=True)
class Compute:
    """How to run the model, as opposed to what it is: nothing here changes a checkpoint."""

    dtype: typing.Any = jnp.float32  # of activations and of weights inside matmuls
    block: int = 256  # queries per block of the attention
    # masked positions per row whose logits the sampler holds at a time; 0: 64, on a CPU 16
    head_positions: int = 0
    # what the backward pass recomputes, see REMAT
    remat: typing.Literal["none", "qkvo", "full"] = "none"
    loss_tokens: int = 2048  # tokens whose logits the loss holds at a time, on a device
    # the compiler's target
    platform: str = dataclasses.field(default_factory=lambda: platform_of(jax.devices()[0]))

    @property
    def fused(self):
        """Whether attention_gpu is used: on Ampere, Ada and Hopper, in 16 bits."""
        return (
            self.platform.startswith(("gpu 8.", "gpu 9.")) and jnp.dtype(self.dtype).itemsize == 2
        )


class Block(nnx.Module):
    """One layer; its parameters have the checkpoint's names and [out, in] layout."""

    def __init__(self, cfg, rngs):
        D, Q, KV = cfg.width, cfg.heads * cfg.head_size, cfg.kv_heads * cfg.head_size
        # A standard deviation of 1 / sqrt(fan-in), 0.017 at 7b. The 2 x layers matrices that add to
        # the residual stream are smaller, so that its variance does not depend on the depth. Ref:
        # GPT-2.
        residual = 1 / math.sqrt(2 * cfg.layers)

        def normal(*shape, size=1.0):
            return nnx.Param(
                size * shape[-1] ** -0.5 * jax.random.normal(rngs.params(), shape, jnp.float32)
            )

        self.input_layernorm, self.post_attention_layernorm = (
            nnx.Param(jnp.ones(D)),
            nnx.Param(jnp.ones(D)),
        )
        self.q_proj, self.k_proj, self.v_proj = normal(Q, D), normal(KV, D), normal(KV, D)
        if cfg.bias:
            self.q_bias, self.k_bias, self.v_bias = (nnx.Param(jnp.zeros(n)) for n in (Q, KV, KV))
        if cfg.qk_norm:
            self.q_norm, self.k_norm = (nnx.Param(jnp.ones(cfg.head_size)) for _ in "qk")
        self.o_proj = normal(D, Q, size=residual)
        self.gate_proj, self.up_proj = normal(cfg.ffn, D), normal(cfg.ffn, D)
        self.down_proj = normal(D, cfg.ffn, size=residual)
        self.cfg = cfg

    def __call__(
        self, x_BLD, rope, see_BM, compute, cache=None, start=0, place=None, key_place=None
    ):
        """One layer: (new x, (k, v) [B, J, M, K], the keys rotated).

        rope is rope_of the queries' positions; see_BM, place and key_place are those of
        attention(). A cache, (k, v) of M slots, gets those of the queries in its slots start ..
        start + L - 1, and is then all keys.
        """
        cfg, (B, L, _) = self.cfg, x_BLD.shape
        weights = {name: getattr(self, name).get_value() for name in MATRICES}
        if isinstance(weights["q_proj"], Lora):
            # Backward this orders the gradients of a layer's adapters before the layer below.
            # Without it XLA computes them last on a Hopper, and holds the activations of all layers
            # until then.
            adapters = {name: weight[1:] for name, weight in weights.items()}
            x_BLD, adapters = jax.lax.optimization_barrier((x_BLD, adapters))
            weights = {name: Lora(weight.base, *adapters[name]) for name, weight in weights.items()}

        def project(x_BLD, name, *spec):  # only q, k and v may have a bias
            y_BLF = linear(x_BLD, weights[f"{name}_proj"], *spec, platform=compute.platform)
            biased = cfg.bias and name in "qkv"
            return (
                y_BLF + getattr(self, f"{name}_bias")[...].astype(x_BLD.dtype) if biased else y_BLF
            )

        # the names below are those of REMAT
        n_BLD = rms_norm(x_BLD, self.input_layernorm[...], cfg.eps)
        heads = (
            project(n_BLD, name, "tensor", None).reshape(B, L, -1, cfg.head_size) for name in "qkv"
        )
        q_BLHK, k_BMJK, v_BMJK = map(checkpoint_name, heads, "qkv")
        if cfg.qk_norm:
            q_BLHK, k_BMJK = (
                rms_norm(x, w[...], cfg.eps)
                for x, w in ((q_BLHK, self.q_norm), (k_BMJK, self.k_norm))
            )
        q_BLHK, k_BMJK = rotate(q_BLHK, *rope), rotate(k_BMJK, *rope[:2])
        # Slots are the last axis but one: a TPU then updates the cache in place, without a copy in
        # each step.
        new_cache = k_BMJK.swapaxes(1, 2), v_BMJK.swapaxes(1, 2)
        if cache is not None:
            pairs = zip(cache, new_cache, strict=True)
            new_cache = tuple(updated(old, new.astype(old.dtype), start) for old, new in pairs)
            k_BMJK, v_BMJK = (x_BJMK.swapaxes(1, 2) for x_BJMK in new_cache)
        # the kernel masks by document alone; a step with a cache has few scores
        if compute.fused and cache is None and (place is None or all(x is None for x in place[1:])):
            o_BLHK = attention_gpu(q_BLHK, k_BMJK, v_BMJK, see_BM, place and place.document)
        else:
            o_BLHK = attention(q_BLHK, k_BMJK, v_BMJK, see_BM, compute.block, place, key_place)
        x_BLD = x_BLD + project(
            checkpoint_name(o_BLHK, "attn").reshape(B, L, -1), "o", None, "tensor"
        )

        # Feed-forward: silu in float32, as its exp loses digits in bfloat16.
        n_BLD = rms_norm(x_BLD, self.post_attention_layernorm[...], cfg.eps)
        gate_BLF = project(n_BLD, "gate", "tensor", None)
        joined = gate_BLF.shape[-1] > cfg.ffn  # see join()
        gate_BLF, up_BLF = (
            jnp.split(gate_BLF, 2, -1)
            if joined
            else (gate_BLF, project(n_BLD, "up", "tensor", None))
        )
        hidden_BLF = (jax.nn.silu(gate_BLF.astype(jnp.float32)) * up_BLF).astype(compute.dtype)
        return shard(x_BLD + project(hidden_BLF, "down", None, "tensor"), BATCH), new_cache


# Calls of a layer by Compute.remat, traced once for all layers. For the backward pass "full" keeps
# nothing, "qkvo" the inputs and the output of attention.
KEPT = jax.checkpoint_policies.save_only_these_names("q", "k", "v", "attn")
REMAT = {
    "none": jax.jit(Block.__call__, static_argnums=4),
    "full": jax.checkpoint(Block.__call__, static_argnums=4),
}
REMAT["qkvo"] = jax.checkpoint(Block.__call__, static_argnums=4, policy=KEPT)


class Dream(nnx.Module):
    def __init__(self, cfg, rngs, compute=None):
        def table(size):
            return nnx.Param(
                size * jax.random.normal(rngs.params(), (cfg.vocab, cfg.width), jnp.float32)
            )

        # Embeddings of unit scale match the layers' outputs, so that a small model learns from the
        # first steps on. A tied table is also the head, which needs rows of about unit length.
        self.embed_tokens = table(cfg.width**-0.5 if cfg.tie else 1.0)
        self.layers = nnx.Dict({str(i): Block(cfg, rngs) for i in range(cfg.layers)})
        self.norm = nnx.Param(jnp.ones(cfg.width))
        if not cfg.tie:
            self.lm_head = table(cfg.width**-0.5)
        self.cfg, self.compute = cfg, compute or Compute()

    def lookup(self, token_BL):
        """Embeddings [B, L, D] in compute.dtype, from rows of an array, or of both arrays of an
        Int8.
        """
        row = jax.tree.map(
            lambda x: shard(x, "tensor", None)[token_BL], self.embed_tokens.get_value()
        )
        x_BLD = row.q_FD * row.scale_F1 if isinstance(row, Int8) else row
        return shard(x_BLD.astype(self.compute.dtype), BATCH)

    def hidden(
        self,
        token_BL,
        position_BL=None,
        see_BM=None,
        cache=None,
        start=0,
        place=None,
        key_place=None,
    ):
        """Final-normed hidden states [B, L, D] of the tokens, and the cache: (k, v) [B, J, M, K] of
        each layer.

        A cache of M slots gets the tokens' keys and values in slots start .. start + L - 1, start a
        number or an array [B]. see_BM is False at padding. place, a diffusion.Place of the tokens,
        adds an attention mask, such as that between packed documents; with a cache key_place is
        that of all slots. position_BL defaults to the slot numbers; a constant offset in a row
        changes nothing, so left padding needs no positions of its own.
        """
        B, L = token_BL.shape
        if position_BL is None:
            position_BL = jnp.broadcast_to(jnp.reshape(start, (-1, 1)) + jnp.arange(L), (B, L))
        apply, rope = (
            REMAT[self.compute.remat],
            rope_of(self.cfg, position_BL),
        )  # once for all layers
        x_BLD, cache = self.lookup(token_BL), list(cache or [None] * self.cfg.layers)
        for i in range(self.cfg.layers):
            inputs = x_BLD, rope, see_BM, self.compute, cache[i], start, place, key_place or place
            x_BLD, cache[i] = apply(self.layers[str(i)], *inputs)
        return rms_norm(x_BLD, self.norm[...], self.cfg.eps), cache

    def logits(self, hidden_BLD):
        """Float32 logits [B, L, V] of hidden states, not shifted: those at p predict the token at p
        + 1.
        """
        head = self.embed_tokens if self.cfg.tie else self.lm_head
        return linear(
            hidden_BLD,
            head.get_value(),
            "tensor",
            None,
            dtype=jnp.float32,
            platform=self.compute.platform,
        )

    def __call__(self, token_BL, position_BL=None, see_BL=None):
        """Float32 logits [B, L, V] of a canvas."""
        return self.logits(self.hidden(token_BL, position_BL, see_BL)[0])

    def nll(self, token_BL, mask_BL, segment_BL, position_BL, block=None, seen_1LL=None):
        """NLL in nats [B, L] of the tokens of mask_BL, which are MASK in the input, 0 elsewhere;
        see `predicting`.
        """
        noised_BL = jnp.where(mask_BL, self.cfg.mask_id, token_BL)
        hidden_BLD = self.predicting(noised_BL, token_BL, segment_BL, position_BL, block, seen_1LL)
        return self.token_nll(hidden_BLD, token_BL, mask_BL)

    def predicting(self, noised_BL, token_BL, segment_BL, position_BL, block=None, seen_1LL=None):
        """The hidden states [B, L, D] that predict the token at each position p, for the input
        noised_BL.

        With cfg.shift that is the state at p - 1, or at p for the first token of a document.
        seen_1LL may mask keys.
        """
        if block is not None:
            return self.readings(noised_BL, token_BL, segment_BL, position_BL, block)[0]
        hidden_BLD, _ = self.hidden(
            noised_BL, position_BL, place=diffusion.Place(segment_BL, seen=seen_1LL)
        )
        own_BL1 = first_of_document(segment_BL)[..., None] | (not self.cfg.shift)
        return jnp.where(own_BL1, hidden_BLD, jnp.roll(hidden_BLD, 1, 1))

    def readings(self, noised_BL, token_BL, segment_BL, position_BL, block):
        """`predicting` with blocks, and the clean states before each position: in a causal model
        they predict it, too.

        The noised and the clean row run side by side: a noised token attends to its own block
        noised and to earlier blocks clean. With cfg.shift the first token of a block is predicted
        from the clean row, as in the sampler. The length of a block may be traced. Ref: BD3-LM,
        arXiv:2503.09573, sec. 3.
        """
        row_BM = jnp.concatenate((noised_BL, token_BL), 1)
        position_BM, segment_BM = (
            jnp.concatenate((x_BL, x_BL), 1) for x_BL in (position_BL, segment_BL)
        )
        noisy_BM = jnp.broadcast_to(jnp.arange(row_BM.shape[1]) < token_BL.shape[1], row_BM.shape)
        # A block has the number of its first position. A clean token of a causal model is a block
        # of its own.
        block_BM = jnp.where(
            noisy_BM | (not self.cfg.causal), position_BM // block * block, position_BM
        )
        place = diffusion.Place(segment_BM, block_BM, noisy_BM)
        hidden_BLD, clean_BLD = jnp.split(self.hidden(row_BM, position_BM, place=place)[0], 2, 1)
        before_BLD = jnp.roll(clean_BLD, 1, 1)
        if self.cfg.shift:
            starts_BL1, first_BL1 = (
                (position_BL % block == 0)[..., None],
                first_of_document(segment_BL)[..., None],
            )
            hidden_BLD = jnp.where(
                first_BL1, hidden_BLD, jnp.where(starts_BL1, before_BLD, jnp.roll(hidden_BLD, 1, 1))
            )
        return hidden_BLD, before_BLD

    def ar_nll(self, token_BL, mask_BL, segment_BL, position_BL):
        """nll with blocks of one token, all masked: the NLL of an autoregressive model, in one
        pass.

        The first token of a document is predicted from a MASK alone, as it is with blocks.
        """
        hidden_BLD, _ = self.hidden(
            token_BL, position_BL, place=diffusion.Place(segment_BL, position_BL)
        )
        empty_BLD, _ = self.hidden(jnp.full((1, 1), self.cfg.mask_id))
        hidden_BLD = jnp.where(
            first_of_document(segment_BL)[..., None], empty_BLD, jnp.roll(hidden_BLD, 1, 1)
        )
        return self.token_nll(hidden_BLD, token_BL, mask_BL)

    def token_nll(self, hidden_BLD, token_BL, mask_BL):
        """diffusion.masked_nll of the tokens with mask_BL, from the hidden states that predict
        them.
        """
        # Logits [B, L, V] would be the largest array by far: the head runs over chunks of C
        # positions, and again in the backward pass. C is the largest divisor of L with which a
        # device's rows have at most compute.loss_tokens tokens.
        (B, L), mesh = token_BL.shape, jax.sharding.get_abstract_mesh()
        rows = B // n if B % (n := math.prod(mesh.shape.get(axis, 1) for axis in BATCH)) == 0 else B
        C = next(
            c for c in range(min(L, max(1, self.compute.loss_tokens // rows)), 0, -1) if L % c == 0
        )

        @jax.checkpoint
        def nll_of(chunk):
            hidden_BCD, token_BC, mask_BC = chunk
            return diffusion.masked_nll(
                self.logits(hidden_BCD), token_BC, mask_BC, self.cfg.mask_id
            )

        # [B, L, ...] -> [L / C, B, C, ...]: along the row, so that rows stay split over devices
        def chunks(x_BL):
            return x_BL.reshape(B, L // C, C, *x_BL.shape[2:]).swapaxes(0, 1)

        return (
            jax.lax.map(nll_of, jax.tree.map(chunks, (hidden_BLD, token_BL, mask_BL)))
            .swapaxes(0, 1)
            .reshape(B, L)
        )

    def nelbo(
        self,
        token_BL,
        segment_BL,
        position_BL,
        t_BL,
        u_BL,
        fixed_BL=None,
        schedule="linear",
        seen_1LL=None,
    ):
        """A bound on -log p of packed rows, in nats, summed: sum of -w(t) log p(token | noised row)
        over masked tokens.

        t_BL is the time of each token's document, or of its block with cfg.block_length. A token
        becomes MASK where u_BL < rate(t), if it is `counted`; the sum over the number of counted
        tokens is the bound per token. rate and w = rate' / rate are those of the schedule in
        diffusion.py. Ref: MDLM, arXiv:2406.07524, eq. 10.

        Where fixed_BL is 2 (data_prep.edit) the input is always MASK, and the target is EOS if the
        token is EOS, else cfg.expand_id, with weight 1, the mean weight of any other token.
        """
        mask_BL = counted(segment_BL, fixed_BL) & (u_BL < diffusion.mask_rate(t_BL, schedule))
        weight_BL = diffusion.nelbo_weight(t_BL, schedule)
        if fixed_BL is not None and self.cfg.expand_id >= 0:
            edit_BL = fixed_BL == 2
            token_BL = jnp.where(
                edit_BL & (token_BL != self.cfg.eos_id), self.cfg.expand_id, token_BL
            )
            mask_BL = mask_BL | edit_BL
            weight_BL = jnp.where(edit_BL, 1.0, weight_BL)
        nll_BL = self.nll(
            token_BL, mask_BL, segment_BL, position_BL, self.cfg.block_length or None, seen_1LL
        )
        return jnp.where(mask_BL, weight_BL * nll_BL, 0.0).sum()

    def exact_nll(self, token_BL, segment_BL, position_BL, fixed_BL=None):
        """The bound of small blocks without sampling, in nats per token [B, L]: a sum over all
        masks of a block.

        2^block_length - 1 passes, 15 for blocks of 4. With blocks of 1 it is the autoregressive
        NLL, in one pass.
        """
        counted_BL, block = counted(segment_BL, fixed_BL), self.cfg.block_length
        if block == 1 and self.cfg.autoregressive:
            return self.ar_nll(token_BL, counted_BL, segment_BL, position_BL)

        def weighted_nll(subset):
            mask_BL, weight_BL = diffusion.subset_mask(subset, counted_BL, position_BL, block)
            return weight_BL * self.nll(token_BL, mask_BL, segment_BL, position_BL, block)

        return jax.lax.map(weighted_nll, jnp.arange(1, 1 << block)).sum(0)


def first_of_document(segment_BL):
    return (jnp.roll(segment_BL, 1, 1) != segment_BL).at[:, 0].set(True)


def counted(segment_BL, fixed_BL=None):
    """The positions that can be masked and count in the loss: not padding (segment 0), not a prompt
    (fixed 1).
    """
    return (segment_BL > 0) if fixed_BL is None else (segment_BL > 0) & (fixed_BL != 1)


def parts(segment_BL, position_BL, block=None):
    """Numbers from 1 of the documents of each row, or of their blocks: each has a time t of its
    own.
    """
    return segment_BL if block is None else jnp.cumsum(position_BL % block == 0, 1)


def noise(key, rows, row_B, part_BL, eps=1e-3):
    """(t_BL, u_BL) of the rows row_B of `rows`: the time of each token's document, or block, and a
    uniform number.

    They depend on the key and the row's number alone, not on how rows are split over devices. t is
    uniform in [eps, 1] for each of `parts`, and stratified: that of row i's first part lies in the
    i-th of `rows` equal intervals, each further part adds 0.618 of the range, modulo the range.
    """
    key_R = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(rows))
    t_R = diffusion.antithetic_times(jax.vmap(jax.random.uniform)(key_R), eps)
    u_BL = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, 1), part_BL.shape[1:]))(
        key_R[row_B]
    )
    golden = (math.sqrt(5) - 1) / 2  # its multiples modulo 1 spread evenly, however many there are
    return eps + (t_R[row_B][:, None] - eps + golden * (part_BL - 1)) % (1 - eps), u_BL


# ---- parameters ----------------------------------------------------------------------------------------------------


def new_params(cfg, seed):
    """Fresh float32 parameters as a nested dict: {"embed_tokens", "layers": {"0": {"q_proj", ...}},
    "norm"}.
    """
    return nnx.to_pure_dict(nnx.state(Dream(cfg, nnx.Rngs(seed))))


@functools.lru_cache
def graph_of(cfg, compute):
    """The model without its parameters: nnx.merge(graph_of(cfg, compute), params) is a Dream."""
    return nnx.split(nnx.eval_shape(lambda: Dream(cfg, nnx.Rngs(0), compute)))[0]


@functools.lru_cache
def param_shapes(cfg):
    return jax.eval_shape(functools.partial(new_params, cfg, 0))


def count_params(cfg):
    """{name: parameters} of the parts of the model, and their "total"."""
    counts = {
        name: sum(x.size for x in jax.tree.leaves(part)) for name, part in param_shapes(cfg).items()
    }
    return counts | {"total": sum(counts.values())}


def flops_per_token(cfg, length):
    """Training FLOPs of one token in a row of `length`: 6 per matmul parameter, and attention over
    the whole row.

    Per layer, query head and query-key pair 2K for the score and 2K for the value, forward; three
    times that with the backward pass. Looking up an embedding is no matmul.
    """
    layers = sum(x.size for x in jax.tree.leaves(param_shapes(cfg)["layers"]) if x.ndim > 1)
    return (
        6 * (layers + cfg.vocab * cfg.width)
        + 3 * cfg.layers * cfg.heads * 4 * cfg.head_size * length
    )


def join(model):
    """The same model for inference, not to be saved: the rows of up_proj move into gate_proj, layer
    by layer.

    With few tokens a product is bound by reading its weights, and one large product is closer to
    that bound.
    """
    for layer in model.layers.values():
        gate, up = layer.gate_proj.get_value(), layer.up_proj.get_value()
        layer.gate_proj.set_value(jax.tree.map(lambda *x: jnp.concatenate(x), gate, up))
        layer.up_proj.set_value(jax.tree.map(lambda x: x[:0], up))
        # the old ones are free then
        jax.block_until_ready((layer.gate_proj.get_value(), layer.up_proj.get_value()))
    return model


def assemble(base, trained):
    """The model's parameters: the trained ones, or with LoRA those of `base` with the trained {"a",
    "b"} as Loras.
    """
    if not isinstance(base, dict):
        return Lora(base, trained["a"], trained["b"]) if trained else base
    return (
        {name: assemble(child, trained.get(name, {})) for name, child in base.items()}
        if base
        else trained
    )


def new_adapters(key, shapes, rank):
    """New float32 adapters {"layers": {"0": {"q_proj": {"a" [R, D], "b" [F, R]}}}} of the layers'
    matrices.

    shapes are the model's. A has standard deviation 1 / sqrt(D), B is zero. B A is not scaled:
    alpha = rank.
    """
    layers = {}
    for i, layer in shapes["layers"].items():
        for j, name in enumerate(MATRICES):
            F, D = layer[name].shape
            key_a = jax.random.fold_in(jax.random.fold_in(key, int(i)), j)
            a_RD = D**-0.5 * jax.random.normal(key_a, (rank, D), jnp.float32)
            layers.setdefault(i, {})[name] = {"a": a_RD, "b": jnp.zeros((F, rank), jnp.float32)}
    return {"layers": layers}


def merge_adapters(base, adapters):
    """The parameters W + B A in the base's dtype. Overwrites `base`, layer by layer: two models
    would not fit.
    """
    for i, trained in adapters["layers"].items():
        for name, adapter in trained.items():
            weight_FD = base["layers"][i][name]
            base["layers"][i][name] = (weight_FD + adapter["b"] @ adapter["a"]).astype(
                weight_FD.dtype
            )
    return base
