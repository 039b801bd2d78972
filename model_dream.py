"""Dream: a masked-diffusion language model with Qwen2.5's layers (Dream-7B, DiffuCoder-7B), and its sampling loops.

    python model_dream.py                 # prints the presets and their parameter counts
    python model_dream.py --model=7b      # the breakdown of one preset

Flax NNX. Parameters keep the names and the [out, in] layout of the Hugging Face checkpoint, one array per tensor, so a
conversion moves bytes and changes none. convert_weights.py converts, train_tpu.py trains, generate.py samples.

Letters: B batch, L length, M length on the key side, W slots of a window, C positions of one chunk of logits, D width,
H query heads, J key/value heads, G = H / J, K head size, F feed-forward width, V vocabulary, S denoising steps.

What a layer computes, n = RMSNorm(x):  h = x + W_o attn(W_q n + b_q, W_k n + b_k, W_v n + b_v);  x' = h + W_down(
silu(W_gate m) * W_up m), m = RMSNorm(h). Attention looks both ways. The logits at position p - 1 are those of the token
at p, as in the autoregressive model that Dream was made from; position 0 uses its own.
Refs: Dream, arXiv:2508.15487; DiffuCoder, arXiv:2506.20639; Fast-dLLM, arXiv:2505.22618.
"""

import dataclasses
import functools
import itertools
import json
import math
import os
import shutil
import struct
import sys
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import tokenizers
import tyro
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as PS

import diffusion


@dataclasses.dataclass(frozen=True)
class DreamConfig:
    """The architecture; everything that a checkpoint needs to be read again. Defaults are DiffuCoder-7B's."""

    vocab: int = 152_064  # rows of the embedding; ids from 151,668 on have no token
    width: int = 3584
    layers: int = 28
    heads: int = 28
    kv_heads: int = 4
    head_size: int = 128
    ffn: int = 18_944
    theta: float = 1e6  # base of the rotary angles
    positions: int = 131_072  # longest canvas; the 7B models were trained on 2,048
    eps: float = 1e-6
    tie: bool = False  # the head is the embedding
    mask_id: int = 151_666
    pad_id: int = 151_643
    bos_id: int = 151_643
    eos_id: int = 151_643

    def __post_init__(self):
        for name in ("vocab", "width", "layers", "heads", "kv_heads", "head_size", "ffn", "positions"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}, not a positive whole number")
        for name in ("theta", "eps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{name} is {value!r}, not a positive number")
        if type(self.tie) is not bool:
            raise ValueError(f"tie is {self.tie!r}, neither true nor false")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads do not divide over {self.kv_heads} key/value heads")
        if self.head_size % 2:
            raise ValueError(f"head size {self.head_size} is odd: rotary embeddings turn pairs")
        for name in ("mask_id", "pad_id", "bos_id", "eos_id"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value < self.vocab:
                raise ValueError(f"{name} is {value!r}, not one of the vocabulary's {self.vocab} ids")
        if self.mask_id in (self.pad_id, self.bos_id, self.eos_id):
            raise ValueError(f"mask_id {self.mask_id} is also the padding, begin or end token")


# our field -> key of a Hugging Face config.json
HF_KEYS = {
    "vocab": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "ffn": "intermediate_size",
    "theta": "rope_theta",
    "positions": "max_position_embeddings",
    "eps": "rms_norm_eps",
    "tie": "tie_word_embeddings",
    "mask_id": "mask_token_id",
    "pad_id": "pad_token_id",
    "bos_id": "bos_token_id",
    "eos_id": "eos_token_id",
}
# Keys that would change the maths, with the only values this model knows; all others (auto_map, use_mrope, ...) are
# ignored, as the reference ignores them.
FIXED = {
    "model_type": ("Dream", "dream"),
    "hidden_act": ("silu",),
    "rope_scaling": (None,),
    "use_sliding_window": (False, None),
    "attention_dropout": (0, None),
    "attention_bias": (True, None),
}


def config_from_hf(path):
    """Read a Hugging Face config.json. Keys that do not concern us are ignored; missing and wrong ones are refused.

    Raises ValueError with one line; FileNotFoundError if there is none.
    """
    path, problem = Path(path), None
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; a model folder holds config.json and its weights")
    try:
        hf = json.loads(path.read_text())
    except ValueError as error:
        problem = f"is not JSON: {error}"
    if not problem and not isinstance(hf, dict):
        problem = "is not a JSON object"
    if not problem:
        wrong = [f"{k} is {hf[k]!r}, not {known[0]!r}" for k, known in FIXED.items() if k in hf and hf[k] not in known]
        optional = ("head_size", "tie", "bos_id")
        missing = [k for name, k in HF_KEYS.items() if name not in optional and hf.get(k) is None]
        if wrong or missing:
            problem = "does not describe a Dream model: " + "; ".join(wrong + [f"{k} is missing" for k in missing])
    if problem:
        raise ValueError(f"{path} {problem}")
    fields = {name: hf[key] for name, key in HF_KEYS.items() if hf.get(key) is not None}
    fields.setdefault("bos_id", fields.get("eos_id"))
    try:
        if "head_size" not in fields:
            if fields["width"] % fields["heads"]:
                raise ValueError(f"hidden_size {fields['width']} does not divide over {fields['heads']} heads")
            fields["head_size"] = fields["width"] // fields["heads"]
        return DreamConfig(**fields)
    except (ValueError, TypeError, KeyError, ZeroDivisionError) as error:
        raise ValueError(f"{path} does not describe a Dream model: {error}") from None


def read_config(folder):
    """The DreamConfig of a checkpoint folder: converted, saved, or a run of train_tpu.py. Errors as config_from_hf."""
    path = Path(folder) / "config.json"
    try:
        return DreamConfig(**json.loads(path.read_text())["model"])
    except (OSError, ValueError, KeyError, TypeError):
        return config_from_hf(folder)


def config_to_hf(cfg, dtype="bfloat16"):
    """The config.json of the Hub for this architecture, as a dictionary; config_from_hf reads it back."""
    fixed = {name: known[0] for name, known in FIXED.items()}
    auto_map = {"AutoConfig": "configuration_dream.DreamConfig", "AutoModel": "modeling_dream.DreamModel"}
    return {
        "architectures": ["DreamModel"],
        "auto_map": auto_map,
        **fixed,
        **{key: getattr(cfg, name) for name, key in HF_KEYS.items()},
        "torch_dtype": dtype,
    }


CONFIGS = {
    "tiny": DreamConfig(4096, 128, 4, 4, 2, 32, 384, mask_id=4, pad_id=0, bos_id=1, eos_id=2, positions=2048),
    "small": DreamConfig(8192, 512, 8, 8, 2, 64, 1408, mask_id=4, pad_id=0, bos_id=1, eos_id=2, positions=2048),
    "100m": DreamConfig(32_768, 640, 12, 10, 2, 64, 1792, mask_id=4, pad_id=0, bos_id=1, eos_id=2, positions=2048),
    "500m": DreamConfig(width=896, layers=24, heads=14, kv_heads=2, head_size=64, ffn=4864, tie=True),
    "7b": DreamConfig(),
}

# How each parameter lies on a mesh with the axes (data, fsdp, tensor): tensor splits heads, feed-forward, vocabulary;
# fsdp splits the other side, and is gathered where the weight is used. What is not named is small and whole everywhere.
SHARDING = {
    "embed_tokens": PS("tensor", "fsdp"),
    "q_proj": PS("tensor", "fsdp"),
    "k_proj": PS("tensor", "fsdp"),
    "v_proj": PS("tensor", "fsdp"),
    "q_bias": PS("tensor"),
    "k_bias": PS("tensor"),
    "v_bias": PS("tensor"),
    "o_proj": PS("fsdp", "tensor"),
    "gate_proj": PS("tensor", "fsdp"),
    "up_proj": PS("tensor", "fsdp"),
    "down_proj": PS("fsdp", "tensor"),
    "lm_head": PS("tensor", "fsdp"),
}
BATCH = ("data", "fsdp")  # both axes split the batch


def fit(spec, shape, mesh):
    """The spec without the axes that do not divide their dimension: such a dimension stays whole."""
    parts = []
    for size, axes in itertools.zip_longest(shape, spec):
        names = (axes,) if isinstance(axes, str) else axes or ()
        parts.append(axes if size % math.prod(mesh.shape[name] for name in names) == 0 else None)
    return PS(*parts)


def shard(x, *spec):
    """Pin x to a layout on the mesh in use (jax.set_mesh); without one, x as it is."""
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty else jax.lax.with_sharding_constraint(x, fit(spec, x.shape, mesh))


def rms_norm(x, weight, eps):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32, returned in x's dtype."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps) * weight).astype(x.dtype)


def rope_frequencies(head_size, theta):
    """Rotary frequencies theta^(-2i/K), float32 [K/2], rounded as PyTorch rounds them but for one unit in 1 of 64."""
    exponent = np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size)
    return np.float32(1) / (np.float64(theta) ** exponent).astype(np.float32)


def rope_table(position_BL, inv_freq):
    """cos and sin [B, L, K] in float32 of the angles position * inv_freq; both halves of K hold the same angles."""
    angle_BLK = position_BL[..., None].astype(jnp.float32) * jnp.asarray(inv_freq)  # K / 2 wide
    return tuple(jnp.concatenate([f(angle_BLK)] * 2, -1) for f in (jnp.cos, jnp.sin))


def rotate(x_BLHK, cos_BLK, sin_BLK):
    """Rotary embedding, half-split: x cos + [-x_2; x_1] sin, in float32, returned in x's dtype."""
    x32, half = x_BLHK.astype(jnp.float32), x_BLHK.shape[-1] // 2
    swapped = jnp.concatenate([-x32[..., half:], x32[..., :half]], -1)
    return (x32 * cos_BLK[:, :, None] + swapped * sin_BLK[:, :, None]).astype(x_BLHK.dtype)


class Int8(typing.NamedTuple):
    """A matrix in a quarter of float32's bytes, for inference: W = q * scale, whole numbers from -127 to 127."""

    q_FD: jax.Array
    scale_F1: jax.Array  # float32; one for each row, which is an output channel, or a token's embedding


class Lora(typing.NamedTuple):
    """A matrix that stays as it is and a trained difference of low rank: W + B A. Ref: LoRA, arXiv:2106.09685."""

    base: jax.Array  # [F, D]
    a_RD: jax.Array
    b_FR: jax.Array


def merged(weight):
    """The matrix W + B A of a Lora, in W's dtype; anything else as it is."""
    if not isinstance(weight, Lora):
        return weight
    return (weight.base.astype(jnp.float32) + weight.b_FR @ weight.a_RD).astype(weight.base.dtype)


@jax.jit
def quantise(weight_FD):
    """The nearest Int8: scale = max |row| / 127, q = round(row / scale); it is off by half a scale at most."""
    weight_FD = weight_FD.astype(jnp.float32)
    scale_F1 = jnp.max(jnp.abs(weight_FD), -1, keepdims=True) / 127
    return Int8(jnp.round(weight_FD / jnp.where(scale_F1 > 0, scale_F1, 1)).astype(jnp.int8), scale_F1)


def on_cpu():
    """Whether what is traced will run on a CPU. Who compiles for a TPU on a CPU replaces it."""
    return jax.default_backend() == "cpu"


def linear(x_BLD, weight, *spec, dtype=None):
    """x W^T over one axis of tokens, as a matmul of two matrices, in x's dtype or another. W lies as spec says.

    The scales of an Int8 multiply the product, in float32: every q is exact in bfloat16.
    """
    if isinstance(weight, Lora):
        low_BLR = linear(x_BLD, weight.a_RD)
        return linear(x_BLD, weight.base, *spec, dtype=dtype) + linear(low_BLR, weight.b_FR, dtype=dtype)
    x_TD, dtype = x_BLD.reshape(-1, x_BLD.shape[-1]), dtype or x_BLD.dtype
    scale_F, accumulate = 1, dtype
    if isinstance(weight, Int8):
        weight, scale_F, accumulate = weight.q_FD, weight.scale_F1[:, 0], jnp.float32
        if on_cpu():  # a 0 that the compiler cannot know: else it has all matrices in x's dtype at once
            weight = weight + jnp.isnan(x_TD[0, 0]).astype(jnp.int8)
    elif on_cpu():  # XLA has kernels for the CPU's bfloat16 units (AMX) only where the product is float32
        accumulate = jnp.float32
    weight_FD = shard(weight.astype(x_BLD.dtype), *spec)
    y_TF = jax.lax.dot_general(x_TD, weight_FD, (((1,), (1,)), ((), ())), preferred_element_type=accumulate)
    y_TF = (y_TF * scale_F).astype(dtype)
    return y_TF.reshape(*x_BLD.shape[:-1], -1)


def attention(q_BLHK, k_BMJK, v_BMJK, see_BM=None, block=256, segment_BL=None):
    """softmax(q k^T / sqrt(K)) v, both ways: every query sees the keys with see_BM, and all without it. [B, L, H, K].

    With segment_BL, the documents of packed rows (M = L), a query sees the keys of its own document alone. Query head h
    reads key/value head h // G. Scores and softmax are float32, for `block` queries at a time: at most [B, H, block, M]
    of them exist. A row that sees no key gets the mean of all values, not NaN.
    """
    B, L, H, K = q_BLHK.shape
    J, M = k_BMJK.shape[2], k_BMJK.shape[1]
    k_BJMK, v_BJMK = k_BMJK.swapaxes(1, 2), v_BMJK.swapaxes(1, 2)

    def some(queries):
        q_BLHK, of_BL = queries
        q_BJTK = q_BLHK.reshape(B, -1, J, H // J, K).transpose(0, 2, 3, 1, 4).reshape(B, J, -1, K)  # T = G L
        score_BJTM = jnp.einsum("BJTK,BJMK->BJTM", q_BJTK, k_BJMK, preferred_element_type=jnp.float32) * K**-0.5
        if see_BM is not None:
            score_BJTM = jnp.where(see_BM[:, None, None], score_BJTM, -1e30)
        if of_BL is not None:
            same_B11LM = (of_BL[:, :, None] == segment_BL[:, None])[:, None, None]
            score_BJGLM = score_BJTM.reshape(B, J, H // J, -1, M)
            score_BJTM = jnp.where(same_B11LM, score_BJGLM, -1e30).reshape(score_BJTM.shape)
        prob_BJTM = jax.nn.softmax(score_BJTM, -1).astype(v_BJMK.dtype)
        o_BJTK = jnp.einsum("BJTM,BJMK->BJTK", prob_BJTM, v_BJMK, preferred_element_type=jnp.float32)
        o_BJTK = o_BJTK.astype(v_BJMK.dtype)
        return o_BJTK.reshape(B, J, H // J, -1, K).transpose(0, 3, 1, 2, 4).reshape(B, -1, H, K)

    if L <= block:
        return some((q_BLHK, segment_BL))
    n = -(-L // block)

    def blocks(x_BL):
        x_BL = jnp.pad(x_BL, ((0, 0), (0, n * block - L), *[(0, 0)] * (x_BL.ndim - 2)))
        return x_BL.reshape(B, n, block, *x_BL.shape[2:]).swapaxes(0, 1)

    # the backward pass makes the scores of a block again
    o_nBLHK = jax.lax.map(jax.checkpoint(some), jax.tree.map(blocks, (q_BLHK, segment_BL)))
    return o_nBLHK.swapaxes(0, 1).reshape(B, n * block, H, K)[:, :L]


@dataclasses.dataclass(frozen=True)
class Run:
    """How to run the model, as opposed to what it is: nothing here changes a checkpoint."""

    dtype: typing.Any = jnp.float32  # of activations and of weights inside matmuls
    block: int = 256  # queries per block of the attention
    head_positions: int = 64  # positions per row whose logits exist at a time while sampling
    remat: typing.Literal["none", "qkvo", "full"] = "none"  # what the backward pass of a layer recomputes
    loss_tokens: int = 2048  # tokens whose logits exist at a time in the loss


REMAT = {  # qkvo keeps the inputs and output of attention and recomputes the rest
    "full": None,
    "qkvo": jax.checkpoint_policies.save_only_these_names("q", "k", "v", "attn"),
}


class Block(nnx.Module):
    """One layer; its parameters have the checkpoint's names and [out, in] layout."""

    def __init__(self, cfg, rngs):
        D, Q, C = cfg.width, cfg.heads * cfg.head_size, cfg.kv_heads * cfg.head_size

        def normal(*shape, size=1.0):  # by fan-in, 0.017 at 7b
            return nnx.Param(size * shape[-1] ** -0.5 * jax.random.normal(rngs.params(), shape, jnp.float32))

        self.input_layernorm, self.post_attention_layernorm = nnx.Param(jnp.ones(D)), nnx.Param(jnp.ones(D))
        self.q_proj, self.k_proj, self.v_proj = normal(Q, D), normal(C, D), normal(C, D)
        self.q_bias, self.k_bias, self.v_bias = (nnx.Param(jnp.zeros(n)) for n in (Q, C, C))
        self.o_proj = normal(D, Q, size=1 / math.sqrt(2 * cfg.layers))
        self.gate_proj, self.up_proj = normal(cfg.ffn, D), normal(cfg.ffn, D)
        self.down_proj = normal(D, cfg.ffn, size=1 / math.sqrt(2 * cfg.layers))
        self.cfg = cfg

    def __call__(self, x_BLD, rope, see_BM, run, cache=None, start=0, segment_BL=None):
        """One layer: (new x, (k, v) [B, M, J, K] with the keys already rotated).

        rope holds the queries' positions, segment_BL their documents. With a cache, whose keys carry their own
        positions, the queries' keys and values are written at slots start .. start + L - 1 of it, and all its slots are
        the keys.
        """
        cfg = self.cfg
        B, L, _ = x_BLD.shape

        def project(x_BLD, name, *spec):
            y_BLF = linear(x_BLD, getattr(self, f"{name}_proj").get_value(), *spec)
            return y_BLF + getattr(self, f"{name}_bias")[...].astype(x_BLD.dtype) if name in "qkv" else y_BLF

        n_BLD = rms_norm(x_BLD, self.input_layernorm[...], cfg.eps)
        q, k, v = (
            checkpoint_name(project(n_BLD, name, "tensor", None).reshape(B, L, -1, cfg.head_size), name)
            for name in "qkv"
        )
        q_BLHK, k_BMJK, v_BMJK = rotate(q, *rope), rotate(k, *rope), v
        if cache is not None:
            k_BMJK, v_BMJK = (
                jax.lax.dynamic_update_slice(old, new.astype(old.dtype), (0, start, 0, 0))
                for old, new in zip(cache, (k_BMJK, v_BMJK), strict=True)
            )
        o_BLHK = checkpoint_name(attention(q_BLHK, k_BMJK, v_BMJK, see_BM, run.block, segment_BL), "attn")
        x_BLD = x_BLD + project(o_BLHK.reshape(B, L, -1), "o", None, "tensor")
        n_BLD = rms_norm(x_BLD, self.post_attention_layernorm[...], cfg.eps)
        gate_BLF, up_BLF = (project(n_BLD, name, "tensor", None) for name in ("gate", "up"))
        hidden_BLF = (jax.nn.silu(gate_BLF.astype(jnp.float32)) * up_BLF).astype(run.dtype)
        return shard(x_BLD + project(hidden_BLF, "down", None, "tensor"), BATCH), (k_BMJK, v_BMJK)


class Dream(nnx.Module):
    def __init__(self, cfg, rngs, run=None):
        def table(size):
            return nnx.Param(size * jax.random.normal(rngs.params(), (cfg.vocab, cfg.width), jnp.float32))

        # tokens of size 1 are heard beside the layers from the first step on; a small model learns at once, not late
        self.embed_tokens = table(cfg.width**-0.5 if cfg.tie else 1.0)
        self.layers = nnx.Dict({str(i): Block(cfg, rngs) for i in range(cfg.layers)})
        self.norm = nnx.Param(jnp.ones(cfg.width))
        if not cfg.tie:
            self.lm_head = table(cfg.width**-0.5)
        self.cfg, self.run = cfg, run or Run()

    def lookup(self, token_BL):
        """Embeddings [B, L, D] in the computation's dtype."""
        table = jax.tree.map(lambda x: shard(x, "tensor", None)[token_BL], self.embed_tokens.get_value())
        x_BLD = table.q_FD * table.scale_F1 if isinstance(table, Int8) else table
        return shard(x_BLD.astype(self.run.dtype), BATCH)

    def hidden(self, token_BL, position_BL=None, see_BM=None, cache=None, start=0, segment_BL=None):
        """Final-normed hidden states [B, L, D] of the tokens, and the cache [(k, v) of each layer].

        Without a cache the keys are the tokens' own, and see_BM says which of them are not padding. With one of M slots
        the tokens are those of slots start .. start + L - 1 (start may be traced), see_BM is over all slots, and the
        new cache holds the tokens' fresh keys and values. position_BL defaults to the slot numbers; a constant offset
        in a row changes nothing, so left padding needs no positions of its own. segment_BL numbers the documents packed
        into a row: no token sees another document.
        """
        B, L = token_BL.shape
        if position_BL is None:
            position_BL = jnp.broadcast_to(start + jnp.arange(L), (B, L))
        rope = rope_table(position_BL, rope_frequencies(self.cfg.head_size, self.cfg.theta))
        x_BLD, new_cache = self.lookup(token_BL), []
        for i in range(self.cfg.layers):
            layer, layer_cache = self.layers[str(i)], None if cache is None else cache[i]
            if self.run.remat == "none":
                x_BLD, layer_cache = layer(x_BLD, rope, see_BM, self.run, layer_cache, start, segment_BL)
                new_cache.append(layer_cache)
            else:  # training: nobody wants the keys and values
                one = lambda x, layer=layer: layer(x, rope, see_BM, self.run, segment_BL=segment_BL)[0]  # noqa: E731
                x_BLD = jax.checkpoint(one, policy=REMAT[self.run.remat])(x_BLD)
        return rms_norm(x_BLD, self.norm[...], self.cfg.eps), new_cache

    def logits(self, hidden_BLD):
        """Float32 logits [B, L, V] of hidden states, not shifted: those at p are of the token at p + 1."""
        head = self.embed_tokens if self.cfg.tie else self.lm_head
        return linear(hidden_BLD, head.get_value(), "tensor", None, dtype=jnp.float32)

    def __call__(self, token_BL, position_BL=None, see_BL=None, keep_BC=None):
        """Float32 logits [B, L, V], or [B, C, V] at the positions keep_BC alone."""
        hidden_BLD, _ = self.hidden(token_BL, position_BL, see_BL)
        if keep_BC is not None:
            hidden_BLD = jnp.take_along_axis(hidden_BLD, keep_BC[..., None], 1)
        return self.logits(hidden_BLD)

    def nelbo(self, token_BL, segment_BL, position_BL, t_BL, u_BL, fixed_BL=None):
        """A bound on -log p of packed rows, in nats, summed: -sum 1 / t log p(token | noised row) over masked tokens.

        t_BL is the noise level of each token's document, constant within it; a token becomes MASK where u_BL < t_BL, if
        it is `counted`. Divided by the number of those it is the bound per token. The token at p is read from the
        hidden state at p - 1, the first of a document from its own, as the sampler does. The head runs over chunks of
        the row, whose logits the backward pass makes again. Ref: MDLM, arXiv:2406.07524, eq. 10, with alpha = 1 - t.
        """
        B, L = token_BL.shape
        frozen_BL = ~counted(segment_BL, fixed_BL)
        noised_BL, mask_BL = diffusion.q_sample(token_BL, t_BL, u_BL, "linear", self.cfg.mask_id, -1, frozen_BL)
        hidden_BLD, _ = self.hidden(noised_BL, position_BL, segment_BL=segment_BL)
        first_BL1 = (jnp.roll(segment_BL, 1, 1) != segment_BL).at[:, 0].set(True)[..., None]
        hidden_BLD = jnp.where(first_BL1, hidden_BLD, jnp.roll(hidden_BLD, 1, 1))
        weight_BL = jnp.where(mask_BL, diffusion.nelbo_weight(t_BL, "linear"), 0.0)
        C = next(c for c in range(min(L, max(1, self.run.loss_tokens // B)), 0, -1) if L % c == 0)

        @jax.checkpoint
        def some(chunk):
            hidden_BCD, token_BC, mask_BC, weight_BC = chunk
            nll_BC = diffusion.masked_nll(self.logits(hidden_BCD), token_BC, mask_BC, self.cfg.mask_id)
            return (nll_BC * weight_BC).sum()

        def chunks(x_BL):  # along the row, so that rows stay split over devices
            return x_BL.reshape(B, L // C, C, *x_BL.shape[2:]).swapaxes(0, 1)

        return jax.lax.map(some, jax.tree.map(chunks, (hidden_BLD, token_BL, mask_BL, weight_BL))).sum()


def counted(segment_BL, fixed_BL=None):
    """The positions that can be masked and count in the loss: of a document (segment 0 is padding), and no prompt."""
    return (segment_BL > 0) if fixed_BL is None else (segment_BL > 0) & (fixed_BL == 0)


def noise(key, rows, row_B, segment_BL, eps=1e-3):
    """(t_BL, u_BL): the noise level of each token's document and a uniform number for each token, of the rows row_B.

    Functions of the key and of a row's number among `rows` alone, however these are split. The first document of row i
    has its t in the i-th of `rows` equal parts of [eps, 1], each further one is 0.618 of the range on: documents do not
    see each other, so each is an example of its own, and a step holds all levels evenly. t is uniform for every one.
    """
    key_R = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(rows))
    t_R = diffusion.antithetic_times(jax.vmap(jax.random.uniform)(key_R), eps)
    u_BL = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, 1), segment_BL.shape[1:]))(key_R[row_B])
    golden = (math.sqrt(5) - 1) / 2
    return eps + (t_R[row_B][:, None] - eps + golden * (segment_BL - 1)) % (1 - eps), u_BL


# ---- checkpoints ---------------------------------------------------------------------------------------------------

DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype("float16"), "F32": np.dtype("float32")}
# our name -> name in a Hugging Face checkpoint; shapes and layout are the same
HF_NAMES = {"embed_tokens": "model.embed_tokens.weight", "norm": "model.norm.weight", "lm_head": "lm_head.weight"}
HF_LAYER_NAMES = {
    f"{x}_{p}": f"self_attn.{x}_proj.{q}" for x in "qkv" for p, q in (("proj", "weight"), ("bias", "bias"))
}
HF_LAYER_NAMES |= {"o_proj": "self_attn.o_proj.weight"}
HF_LAYER_NAMES |= {f"{x}_proj": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
HF_LAYER_NAMES |= {f"{x}_layernorm": f"{x}_layernorm.weight" for x in ("input", "post_attention")}


def hf_name(name):
    """layers.3.q_bias -> model.layers.3.self_attn.q_proj.bias"""
    if not name.startswith("layers."):
        return HF_NAMES[name]
    _, i, part = name.split(".")
    return f"model.layers.{i}.{HF_LAYER_NAMES[part]}"


def new_params(cfg, seed):
    """Fresh float32 parameters as a nested dict: {"embed_tokens", "layers": {"0": {"q_proj", ...}}, "norm"}."""
    return nnx.to_pure_dict(nnx.state(Dream(cfg, nnx.Rngs(seed))))


@functools.lru_cache
def graph_of(cfg, run):
    """The model without its parameters: nnx.merge(graph_of(cfg, run), params) is a Dream."""
    return nnx.split(nnx.eval_shape(lambda: Dream(cfg, nnx.Rngs(0), run)))[0]


@functools.lru_cache
def param_shapes(cfg):
    return jax.eval_shape(functools.partial(new_params, cfg, 0))


def shardings(mesh, tree):
    """A NamedSharding for each leaf of a tree of parameters, or of optimizer moments, by its name."""

    def one(path, leaf):
        names = (getattr(key, "key", None) for key in path[::-1])
        spec = next((SHARDING[name] for name in names if name in SHARDING), PS())
        return jax.NamedSharding(mesh, fit(spec, leaf.shape, mesh) if leaf.shape else PS())

    return jax.tree_util.tree_map_with_path(one, tree)


def flatten(tree):
    """Any tree of arrays -> {"layers.0.q_proj": array}."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def unflatten(flat):
    """{"layers.0.q_proj": array} -> nested dictionaries."""
    tree = {}
    for name, value in flat.items():
        *parents, leaf = name.split(".")
        functools.reduce(lambda node, parent: node.setdefault(parent, {}), parents, tree)[leaf] = value
    return tree


def check_shapes(found, cfg, where):
    """Raise ValueError naming each missing, extra or misshapen tensor of found, {Hugging Face name: shape}."""
    want = {hf_name(name): tuple(leaf.shape) for name, leaf in flatten(param_shapes(cfg)).items()}
    wrong = [f"missing {name}" for name in want.keys() - found.keys()]
    wrong += [f"unexpected {name}" for name in found.keys() - want.keys()]
    for name in want.keys() & found.keys():
        if tuple(found[name]) != want[name]:
            wrong.append(f"{name} has shape {tuple(found[name])}, not {want[name]}")
    if wrong:
        more = f" and {len(wrong) - 20} more" if len(wrong) > 20 else ""
        raise ValueError(f"the tensors of {where} do not fit the model: " + "; ".join(sorted(wrong)[:20]) + more)


def read_header(path):
    """(first data byte, {name: (dtype, shape, start, end)}) of a safetensors file; ValueError if it is damaged.

    The file is 8 bytes of header length, the header as JSON, then the data; offsets count from there. They must cover
    the data without gap or overlap, and each tensor's must be as long as its shape says.
    """
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size - 8, 100_000_000):
                raise ValueError(f"its header claims {length:,} bytes of {size:,}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        tensors, end = {}, 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            start, stop = entry["data_offsets"]
            if entry["dtype"] not in DTYPES:
                raise ValueError(f"{name} is {entry['dtype']}, not one of {', '.join(DTYPES)}")
            dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
            if start != end or stop - start != dtype.itemsize * int(np.prod(shape, dtype=np.int64)):
                raise ValueError(f"the header lies about {name}: {shape} does not lie at bytes {start} to {stop}")
            tensors[name], end = (dtype, shape, start, stop), stop
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if 8 + length + end != size:
        raise ValueError(f"{path} cannot be read: it was cut short, {size:,} bytes of {8 + length + end:,} are left")
    return 8 + length, tensors


def open_hf(folder):
    """{Hugging Face name: mapped array, read-only} of a folder in the Hub's layout. FileNotFoundError, ValueError."""
    index, names = folder / "model.safetensors.index.json", ["model.safetensors"]
    weight_map = None
    if index.exists():
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            names = sorted(set(weight_map.values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ValueError(f"{index} is damaged: it has no weight_map") from None
    arrays = {}
    for path in (folder / name for name in names):
        if not path.is_file():
            named = f", but {index.name} names it" if weight_map else ""
            raise FileNotFoundError(f"{path} does not exist{named}")
        first, tensors = read_header(path)
        data = np.memmap(path, np.uint8, "r")
        for name, (dtype, shape, start, stop) in tensors.items():
            if weight_map and weight_map.get(name) != path.name:
                raise ValueError(f"{path} holds {name}, but {index.name} does not say so")
            arrays[name] = data[first + start : first + stop].view(dtype).reshape(shape)
    if weight_map and weight_map.keys() != arrays.keys():
        raise ValueError(f"{index} names {sorted(weight_map.keys() - arrays.keys())[:5]}, which are in no file")
    return arrays


def from_hf(folder, dtype=None, run=None):
    """Read a Hugging Face folder (config.json, *.safetensors with or without an index) as a Dream in `dtype`.

    dtype None keeps the file's. Raises ValueError or FileNotFoundError with one line on what is wrong.
    """
    folder = Path(folder)
    cfg, arrays = config_from_hf(folder), open_hf(folder)
    check_shapes({name: array.shape for name, array in arrays.items()}, cfg, folder)
    dtype = jnp.dtype(dtype or arrays[hf_name("embed_tokens")].dtype)
    flat = {ours: jnp.array(arrays[hf_name(ours)], dtype) for ours in flatten(param_shapes(cfg))}
    return nnx.merge(graph_of(cfg, run or Run(dtype=dtype)), unflatten(flat))


@jax.jit
def _bit_sum(x):
    words = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    return jnp.sum(jax.lax.bitcast_convert_type(x, words).astype(jnp.uint32), dtype=jnp.uint32)


def bit_sums(tree):
    """{name: checksum} of a tree: the sum of each array's words modulo 2^32, the same however the array is split.

    One array at a time, each waited for: a CPU makes a copy of the words, and reductions over devices that run side by
    side can wait for each other for ever.
    """
    return {name: int(_bit_sum(x)) for name, x in flatten(tree).items()}


def save(folder, model, extra=()):
    """Write a model as an Orbax checkpoint folder: config.json (the Hub's keys), params/, meta.json, and copies of the
    files `extra` (a tokenizer). The folder appears under its name when it is complete. Raises FileExistsError.
    """
    folder = Path(folder).absolute()
    if folder.exists():
        raise FileExistsError(f"{folder} exists; delete it or choose another name")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    params = nnx.to_pure_dict(nnx.state(model))
    flat = flatten(params)
    dtypes = sorted({x.dtype.name for x in flat.values()})
    if len(dtypes) > 1:
        raise ValueError(f"parameters of several dtypes: {', '.join(dtypes)}")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(partial / "params", params)
    meta = {"dtype": dtypes[0], "parameters": sum(x.size for x in flat.values()), "sums": bit_sums(params)}
    (partial / "config.json").write_text(json.dumps(config_to_hf(model.cfg, dtypes[0]), indent=2))
    (partial / "meta.json").write_text(json.dumps(meta, indent=1))
    for path in extra:
        shutil.copy(path, partial)
    os.rename(partial, folder)


def restore(folder, target, dtype, sums, int8):
    """The parameters of an Orbax folder in `dtype`, matrices as Int8 where int8 says so: a layer is read at a time.

    So the stored model is never whole in memory beside another form of it. target is {name: ShapeDtypeStruct} with
    shardings; sums as bit_sums gives them. Raises ValueError for other names or other bits.
    """
    params, wrong = {}, sums.keys() ^ target.keys()
    for _, names in itertools.groupby(target, lambda name: name.rpartition(".")[0]):
        item = unflatten({name: target[name] for name in names})
        how = ocp.checkpoint_utils.construct_restore_args(item)
        arguments = ocp.args.PyTreeRestore(item, restore_args=how, partial_restore=True)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            item = checkpointer.restore(folder, args=arguments)
        wrong |= {name for name, value in bit_sums(item).items() if value != sums.get(name)}
        for name, x in flatten(item).items():
            params[name] = quantise(x) if int8 and x.ndim == 2 else x.astype(dtype)
        del item, x  # before the next layer comes
    if wrong:
        raise ValueError(f"{', '.join(sorted(wrong))} differ from what was saved")
    return unflatten(params)


def load(folder, dtype=None, run=None, mesh=None, step=None, int8=False):
    """Read a checkpoint folder that `save` wrote, or a run folder of train_tpu.py, as a Dream in `dtype`.

    dtype None keeps the stored one. Of a run, step None takes the newest checkpoint. With a mesh each device reads its
    own part of every parameter. With int8 the matrices, embedding and head too, are quantised, a layer at a time, and
    dtype is that of the rest and of the computation: for inference, in half of bfloat16's bytes. Raises ValueError or
    FileNotFoundError with one line.
    """
    folder = path = Path(folder).absolute()
    converted, problem = (folder / "meta.json").is_file(), None
    if converted:
        cfg = config_from_hf(folder)
    else:
        steps = sorted(int(p.name) for p in (folder / "checkpoints").glob("*") if p.name.isdigit())
        if not steps:
            raise FileNotFoundError(f"{folder} holds no checkpoint; make one with convert_weights.py or train_tpu.py")
        if step is not None and step not in steps:
            raise FileNotFoundError(f"{folder} holds no checkpoint of step {step}; it has {steps}")
        path = folder / "checkpoints" / str(steps[-1] if step is None else step)
    try:
        if (path / "adapters").is_dir():
            raise ValueError(f"it holds the difference that LoRA learns; the whole model is {folder}/merged at the end")
        meta = json.loads((path / ("meta.json" if converted else "meta/metadata")).read_text())
        sums = meta["sums"]
        if not converted:
            if not meta["train"]["model"].startswith("dream"):
                raise ValueError(f"it is of {meta['train']['model']}, which is no Dream")
            cfg = DreamConfig(**meta["model"])
            sums = {name.removeprefix("params."): value for name, value in sums.items() if name.startswith("params.")}
        shapes = param_shapes(cfg)
        one_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        layout = shardings(mesh, shapes) if mesh else jax.tree.map(lambda _: one_device, shapes)
        stored = jnp.dtype(meta.get("dtype", "float32"))
        target = jax.tree.map(lambda s, at: jax.ShapeDtypeStruct(s.shape, stored, sharding=at), shapes, layout)
        dtype = jnp.dtype(dtype or stored)
        params = restore(path / "params", flatten(target), dtype, sums, int8)
    except Exception as error:  # Orbax raises nothing narrower for a file that was cut short
        problem = str(error).splitlines()[0] if str(error) else type(error).__name__
    if problem:
        raise ValueError(f"checkpoint {path} cannot be read: {problem}")
    return nnx.merge(graph_of(cfg, run or Run(dtype=dtype)), params)


def load_tokenizer(folder, cfg):
    """The tokenizer in a model's folder. Raises FileNotFoundError, or ValueError for one that is damaged or does not
    fit the model: more tokens than rows, or a MASK or end token of the model that is an ordinary word.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no tokenizer.json; copy the model's into it")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower for a broken file
        raise ValueError(f"{path} cannot be read: {error}") from None
    size, special = tokenizer.get_vocab_size(), tokenizer.get_added_tokens_decoder()
    if size > cfg.vocab:
        raise ValueError(f"the tokenizer of {folder} does not fit: it has {size:,} tokens, the model {cfg.vocab:,}")
    for name in ("mask_id", "eos_id"):
        i = getattr(cfg, name)
        word = tokenizer.id_to_token(i)
        if (i not in special or not special[i].special) and (word or name == "eos_id"):
            raise ValueError(f"the tokenizer of {folder} does not fit: {i}, the model's {name}, is {word!r} in it")
    return tokenizer


def chat_template(folder):
    """A function that writes a prompt as a user's turn, by the chat template in a model's folder; None if it has none.

    The function's second argument is a system turn that goes before. Raises ValueError for a template that is damaged;
    so does the function for one that fails.
    """
    config, path = {}, Path(folder) / "tokenizer_config.json"
    try:
        if path.exists():
            config = json.loads(path.read_text())
        template = config.get("chat_template")
        if path.with_name("chat_template.jinja").exists():
            template = path.with_name("chat_template.jinja").read_text()
        if isinstance(template, list):  # several of them, by name
            template = {one["name"]: one["template"] for one in template}["default"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds no chat template that can be read: {error!r}") from None
    if not template:
        return None
    import jinja2.sandbox

    def refuse(message):
        raise jinja2.TemplateError(message)

    named = {f"{name}_token": config.get(f"{name}_token") for name in ("bos", "eos", "pad")}
    named = {name: token["content"] if isinstance(token, dict) else token for name, token in named.items()}
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals |= {"raise_exception": refuse, **named}

    def wrap(prompt, system=""):
        try:
            turns = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": prompt}]
            return environment.from_string(template).render(messages=turns, add_generation_prompt=True)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template of {folder} fails: {error}") from None

    return wrap


# ---- sampling ------------------------------------------------------------------------------------------------------

CONFIDENCE = {"maskgit_plus": "max_prob", "topk_margin": "margin", "entropy": "entropy"}


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How masked positions are filled; one compiled program for each value of it."""

    alg: typing.Literal["entropy", "maskgit_plus", "topk_margin", "origin"] = "entropy"  # who is filled first
    steps: int = 0  # denoising steps, all blocks together; 0: by tokens_per_step, one with a threshold
    tokens_per_step: float = 1.0  # used where steps is 0
    eps: float = 1e-3  # end of the time grid
    temperature: float = 0.0  # 0 takes the likeliest token
    top_p: float = 1.0  # a token goes if those before it have more than top_p; 1 keeps all
    top_k: int = 0  # keep the k likeliest tokens; 0 keeps all
    alg_temp: float = 0.0  # temperature of the choice of positions; 0 takes the surest
    threshold: float = 0.0  # fill all positions whose probability reaches it, at least one a step; 0 goes by steps
    block_length: int = 0  # fill blocks of this length from left to right; 0: the whole canvas at once
    cache: typing.Literal["", "prefix", "dual"] = ""  # keys and values kept within a block: left of it | all around it
    fast_dllm: bool = False  # Fast-dLLM's windows [S, E): the first token of a block is filled whatever its confidence
    ban_ids: tuple[int, ...] | None = None  # never drawn; None: MASK
    vocab: int = 0  # ids from here on have no token and are never drawn; 0 allows all rows
    eos_ids: tuple[
        int, ...
    ] = ()  # one of these ends a text once nothing before it is masked; the rest is filled with it
    history: bool = False  # keep the canvas after every step

    def __post_init__(self):
        def check(ok, what):
            if not ok:
                raise ValueError(what)

        check(self.alg in (*CONFIDENCE, "origin"), f"alg {self.alg!r} is not one of {', '.join(CONFIDENCE)}, origin")
        check(self.cache in ("", "prefix", "dual"), f"cache {self.cache!r} is neither prefix nor dual")
        for name in ("steps", "top_k", "block_length", "vocab", "temperature", "alg_temp"):
            check(getattr(self, name) >= 0, f"{name} is {getattr(self, name)}, below 0")
        check(0 < self.eps < 1, f"eps is {self.eps}, not between 0 and 1")
        check(self.tokens_per_step > 0, f"tokens_per_step is {self.tokens_per_step}, not above 0")
        check(0 < self.top_p <= 1, f"top_p is {self.top_p}, not in (0, 1]")
        check(0 <= self.threshold <= 1, f"threshold is {self.threshold}, not in [0, 1]")
        check(self.block_length or not (self.cache or self.fast_dllm), "a cache works block by block: set block_length")
        check(self.cache or not self.fast_dllm, "Fast-dLLM's windows need a cache: prefix or dual")
        check(
            self.alg != "origin" or not (self.block_length or self.threshold), "origin has no blocks and no threshold"
        )


@dataclasses.dataclass(frozen=True)
class Sampler:
    """What the compiled loops know when they are compiled: model, settings and hooks.

    token_hook(step, token_BL) -> token_BL runs before the first step (step -1) and after every one. logit_hook(step,
    token_BL, slot_BC, logits_BCV) -> logits_BCV gets the logits of C masked positions of each row at a time, already
    shifted: those of the tokens at slot_BC; a slot of L is none. Hooks are traced: jax.numpy only.

    `given` holds the arrays that stay as they are: see_BL, made_BL (masked at the start), place_BL (slots counted from
    the row's first token), banned_V, key_B, and the schedule: table_SN, budget_SB, or commit_S and u_SBL.
    """

    graph: typing.Any
    cfg: DreamConfig
    rule: Sampling
    token_hook: typing.Callable | None = None
    logit_hook: typing.Callable | None = None

    def masked(self, token_BL, given):
        return (token_BL == self.cfg.mask_id) & given["see_BL"]

    def open(self, state, given, first):
        """The masked positions of the block at slot `first` [B, L]."""
        slot_L = jnp.arange(state["token_BL"].shape[1])
        inside_L = (slot_L >= first) & (slot_L < first + self.rule.block_length)
        return self.masked(state["token_BL"], given) & inside_L

    def draw(self, given, tag, step, place_BC, shape=()):
        """Uniform numbers in (0, 1) [B, C, *shape] of row, step and place alone, whatever the batch or its padding."""

        def one(key, place):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, tag), step), place)
            return jax.random.uniform(key, shape, minval=jnp.finfo(jnp.float32).tiny)

        return jax.vmap(lambda key, place_C: jax.vmap(functools.partial(one, key))(place_C))(given["key_B"], place_BC)

    def propose(self, model, hidden_BWD, start, state, given, wanted_BL):
        """(token_BL, score_BL): what would be written at the wanted positions and how sure that is, -inf elsewhere.

        hidden_BWD are those of slots start .. start + W - 1. The logits of a few wanted positions exist at a time, and
        of no others. A position whose left neighbour is padding, or not in the window, uses its own logits.
        """
        rule, token_BL, see_BL = self.rule, state["token_BL"], given["see_BL"]
        B, L = token_BL.shape
        C, row_B1 = min(model.run.head_positions, L), jnp.arange(B)[:, None]
        count_B1 = wanted_BL.sum(-1, keepdims=True)
        order_BL = jnp.where(wanted_BL, jnp.cumsum(wanted_BL, -1) - 1, L + C)
        slot_BL = jnp.full((B, L + -L % C), L).at[row_B1, order_BL].set(jnp.arange(L), mode="drop")  # wanted ones first

        def some(c, carry):
            token_BL, score_BL = carry
            slot_BC = jax.lax.dynamic_slice(slot_BL, (0, c * C), (B, C))
            at_BC = jnp.minimum(slot_BC, L - 1)
            shifted_BC = (at_BC > 0) & see_BL[row_B1, jnp.maximum(at_BC - 1, 0)]
            source_BC = jnp.clip(at_BC - shifted_BC - start, 0, hidden_BWD.shape[1] - 1)
            logits_BCV = model.logits(jnp.take_along_axis(hidden_BWD, source_BC[..., None], 1))
            logits_BCV = jnp.where(given["banned_V"], -jnp.inf, logits_BCV)
            if self.logit_hook:
                logits_BCV = self.logit_hook(state["step"], state["token_BL"], slot_BC, logits_BCV)
            settings, width = (rule.temperature, rule.top_k, rule.top_p), 1 if on_cpu() else 3
            logits_BCV = diffusion.filter_logits(logits_BCV, *settings, rule="dream", width=width)
            u_BCV = None
            if rule.temperature:
                place_BC = given["place_BL"][row_B1, at_BC]
                u_BCV = self.draw(given, 0, state["step"], place_BC, logits_BCV.shape[-1:])
            new_BC = diffusion.sample_tokens(logits_BCV, u_BCV, 1.0 if rule.temperature else 0).astype(token_BL.dtype)
            sure_BC = jnp.zeros(slot_BC.shape)
            if rule.threshold or rule.alg == "maskgit_plus":
                prob_BCV = diffusion.softmax(logits_BCV)
                sure_BC = jnp.take_along_axis(prob_BCV, new_BC[..., None], -1)[..., 0]
            elif rule.alg != "origin":
                sure_BC = diffusion.confidence(diffusion.softmax(logits_BCV), CONFIDENCE[rule.alg])
            token_BL = token_BL.at[row_B1, slot_BC].set(new_BC, mode="drop")
            return token_BL, score_BL.at[row_B1, slot_BC].set(sure_BC, mode="drop")

        chunks = (jnp.max(count_B1) + C - 1) // C
        return jax.lax.fori_loop(0, chunks, some, (token_BL, jnp.full((B, L), -jnp.inf)))

    def commit(self, model, hidden_BWD, start, state, given, wanted_BL, most_B):
        """Write the surest proposals: (state, how many of each row). most_B of a row, fewer if a threshold says so."""
        rule = self.rule
        new_BL, score_BL = self.propose(model, hidden_BWD, start, state, given, wanted_BL)
        if rule.threshold:
            most_B = jnp.minimum(most_B, jnp.maximum(1, jnp.sum(wanted_BL & (score_BL >= rule.threshold), -1)))
        elif rule.alg_temp:  # Gumbel's k largest are k draws without replacement from softmax(score / alg_temp)
            u_BL = self.draw(given, 1, state["step"], given["place_BL"])
            score_BL = score_BL / rule.alg_temp - jnp.log(-jnp.log(u_BL))
        token_BL = diffusion.unmask_top(state["token_BL"], new_BL, score_BL, most_B, self.cfg.mask_id)
        return state | {"token_BL": token_BL, "forwards": state["forwards"] + 1}, most_B

    def end_step(self, state, given):
        """Token hook, end of texts, history."""
        token_BL = state["token_BL"]
        if self.token_hook:
            token_BL = self.token_hook(state["step"], token_BL)
        if self.rule.eos_ids:
            tail_BL = jnp.flip(jnp.cumprod(jnp.flip(given["made_BL"] | ~given["see_BL"], -1), -1), -1) > 0
            eos_BL = functools.reduce(jnp.logical_or, [token_BL == i for i in self.rule.eos_ids])
            whole_BL = jnp.cumsum(self.masked(token_BL, given), -1) == 0  # nothing is masked up to here
            ended_BL = jnp.cumsum(eos_BL & tail_BL & given["made_BL"] & whole_BL, -1) > 0
            token_BL = jnp.where(ended_BL & ~eos_BL & given["see_BL"], self.rule.eos_ids[0], token_BL)
        if self.rule.history:
            state = state | {"history_SBL": state["history_SBL"].at[state["step"]].set(token_BL)}
        return state | {"token_BL": token_BL, "step": state["step"] + 1}


@functools.partial(jax.jit, static_argnames=("sampler",))
def _fill(params, state, given, *, sampler):
    """Denoise the whole canvas in one loop."""
    model, rule = nnx.merge(sampler.graph, params), sampler.rule
    S, hooks = given["steps"], bool(sampler.token_hook or sampler.logit_hook)

    def more(state):
        left = (state["step"] < S) | (jnp.any(state["left_B"] > 0) if rule.threshold else False)
        return left & (hooks | jnp.any(sampler.masked(state["token_BL"], given)))

    def body(state):
        step, wanted_BL = state["step"], sampler.masked(state["token_BL"], given)
        if rule.alg == "origin":
            if "u_SBL" in given:
                u_BL = given["u_SBL"][step]
            else:
                u_BL = sampler.draw(given, 2, step, given["place_BL"])
            wanted_BL &= u_BL < given["commit_S"][step]
            most_B = wanted_BL.sum(-1)
        elif rule.threshold:
            now_B = given["budget_SB"].at[step].get(mode="fill", fill_value=0)
            most_B = jnp.minimum(now_B + state["left_B"], wanted_BL.sum(-1))
        else:
            most_B = given["table_SN"][step][wanted_BL.sum(-1)]

        def forward(state):
            hidden_BLD, _ = model.hidden(state["token_BL"], see_BM=given["see_BL"])
            state, done_B = sampler.commit(model, hidden_BLD, 0, state, given, wanted_BL, most_B)
            return state | {"left_B": most_B - done_B}

        idle = jnp.all(most_B == 0) & (sampler.logit_hook is None)
        skip = lambda state: state | {"idle": state["idle"] + 1, "left_B": most_B}  # noqa: E731
        state = jax.lax.cond(idle, skip, forward, state)
        return sampler.end_step(state, given)

    return jax.lax.while_loop(more, body, state)


def _most(state, given, wanted_BL, rule, i):
    """How many of the wanted positions step i of a block may fill, by the schedule [B]."""
    n_B = wanted_BL.sum(-1)
    return n_B if rule.threshold else given["table_SN"][jnp.minimum(i, given["steps"] - 1)][n_B]


@functools.partial(jax.jit, static_argnames=("sampler",))
def _open_block(params, state, given, first, *, sampler):
    """Step 0 of the block at `first`, a pass over the canvas: (state, cache, whether masks are left in the block)."""
    model, rule = nnx.merge(sampler.graph, params), sampler.rule
    wanted_BL = sampler.open(state, given, first)
    most_B = _most(state, given, wanted_BL, rule, 0)
    if rule.fast_dllm:
        wanted_BL &= jnp.arange(wanted_BL.shape[1]) == first
        most_B = wanted_BL.sum(-1)
    hidden_BLD, cache = model.hidden(state["token_BL"], see_BM=given["see_BL"])
    state, _ = sampler.commit(model, hidden_BLD, 0, state, given, wanted_BL, most_B)
    return sampler.end_step(state, given), cache if rule.cache else None


@functools.partial(jax.jit, static_argnames=("sampler", "width"), donate_argnames=("cache",))
def _fill_block(params, state, given, cache, first, start, limit, *, sampler, width):
    """Steps 1 .. limit - 1 of the block at `first`, in one loop of passes over the slots start .. start + width - 1.

    Each pass writes the window's keys and values into the cache. Where no position is to be filled the pass is left
    out; a model that predicts MASK again and again ends at the limit.
    """
    model, rule = nnx.merge(sampler.graph, params), sampler.rule
    begun = state["step"] - 1

    def more(carry):
        return (carry[0]["step"] - begun < limit) & jnp.any(sampler.open(carry[0], given, first))

    def body(carry):
        state, _ = carry
        wanted_BL = sampler.open(state, given, first)
        most_B = _most(state, given, wanted_BL, rule, state["step"] - begun)

        def forward(carry):
            state, cache = carry
            window_BW = jax.lax.dynamic_slice_in_dim(state["token_BL"], start, width, 1)
            hidden_BWD, new_cache = model.hidden(window_BW, None, given["see_BL"], cache, start)
            state, _ = sampler.commit(model, hidden_BWD, start, state, given, wanted_BL, most_B)
            return state, new_cache if rule.cache else None

        idle = jnp.all(most_B == 0) & (sampler.logit_hook is None)
        state, cache = jax.lax.cond(idle, lambda c: (c[0] | {"idle": c[0]["idle"] + 1}, c[1]), forward, carry)
        return sampler.end_step(state, given), cache

    return jax.lax.while_loop(more, body, (state, cache))  # the cache too, so that its memory is used again


def longer(x):
    """x with rows of zeros up to a power of two, at least 32: another number of steps is seldom another program."""
    return np.pad(x, [(0, (1 << max(5, (len(x) - 1).bit_length())) - len(x))] + [(0, 0)] * (x.ndim - 1))


def step_table(most, steps, eps):
    """How many of n masked tokens step i fills: int32 [steps, most + 1], floor(n (1 - s/t)), n in the last step.

    (t, s) are neighbours on linspace(1, eps, steps + 1). Following it gives diffusion.step_counts(rule="dream"); as a
    table of n it also serves rows that a hook changed, or where the model predicted MASK. Ref: Dream's generation code.
    """
    t = np.linspace(1, eps, steps + 1)
    table_SN = (np.arange(most + 1) * (1 - t[1:] / t[:-1])[:, None]).astype(np.int32)
    table_SN[-1] = np.arange(most + 1)
    return table_SN


def fill(model, token_BL, see_BL=None, rule=None, key=None, token_hook=None, logit_hook=None, u_SBL=None):
    """Fill every MASK of a canvas: (token_BL, {"forwards", "idle", "steps", "windows", "history"}), NumPy arrays.

    see_BL is False at padding, which stays as it is; so does every token that is not MASK. "idle" counts the steps that
    could not change anything and cost no pass, "windows" the slots fed in each pass, "history" is the canvas after
    every step [S, B, L]. Without blocks one compiled loop does it all. A block is a pass over the canvas and a compiled
    loop over windows, the same programs for all blocks, but for cache="prefix", whose windows shrink. A model that
    predicts MASK leaves it, where ban_ids allows that. u_SBL are the uniform numbers of alg="origin", for tests.

    Raises ValueError for a canvas that does not fit the model, a number of steps that does not divide over the blocks,
    or a block length that does not divide a completion.
    """
    cfg, rule = model.cfg, rule or Sampling()
    token_BL = np.asarray(token_BL)
    if token_BL.ndim != 2 or not token_BL.size or token_BL.dtype.kind not in "iu":
        raise ValueError(f"a canvas is a [B, L] array of token ids, not {token_BL.dtype} {token_BL.shape}")
    if token_BL.min() < 0 or token_BL.max() >= cfg.vocab:
        raise ValueError(f"token ids {token_BL.min()} to {token_BL.max()} do not fit a vocabulary of {cfg.vocab}")
    B, L = token_BL.shape
    if L > cfg.positions:
        raise ValueError(f"{L} tokens do not fit: the model reaches {cfg.positions} positions")
    see_BL = np.ones((B, L), bool) if see_BL is None else np.asarray(see_BL) != 0
    if see_BL.shape != (B, L):
        raise ValueError(f"a mask of shape {see_BL.shape} does not fit the canvas {(B, L)}")
    if rule.temperature or rule.alg_temp or (rule.alg == "origin" and u_SBL is None):
        if key is None:
            raise ValueError("sampling needs a key: pass key=jax.random.key(seed)")
    made_BL = (token_BL == cfg.mask_id) & see_BL
    banned_V = np.isin(np.arange(cfg.vocab), (cfg.mask_id,) if rule.ban_ids is None else rule.ban_ids)
    banned_V |= np.arange(cfg.vocab) >= (rule.vocab or cfg.vocab)
    if banned_V.all():
        raise ValueError("every token is banned")
    key = jax.random.key(0) if key is None else key
    given = {
        "see_BL": see_BL,
        "made_BL": made_BL,
        "place_BL": np.maximum(np.arange(L) - see_BL.argmax(-1)[:, None], 0),
        "banned_V": banned_V,
        "key_B": jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(B)),
    }
    graph, params = nnx.split(model)
    # what the arrays in `given` say already must not ask for another program
    fixed = dataclasses.replace(rule, steps=0, tokens_per_step=1.0, eps=0.5, ban_ids=(), vocab=0)
    sampler = Sampler(graph, cfg, fixed, token_hook, logit_hook)
    if token_hook:
        token_BL = np.asarray(token_hook(-1, jnp.asarray(token_BL, jnp.int32)))
    masked_BL = (token_BL == cfg.mask_id) & see_BL
    counter = jnp.int32(0)
    state = {"token_BL": jnp.asarray(token_BL, jnp.int32), "step": counter, "forwards": counter, "idle": counter}
    if not rule.block_length:
        n = int(masked_BL.sum(-1).max())
        steps = limit = rule.steps or (1 if rule.threshold else max(1, math.ceil(n / rule.tokens_per_step)))
        if rule.alg == "origin":
            t = np.linspace(1, rule.eps, steps + 1)
            given["commit_S"] = longer(np.append(1 - t[1:-1] / t[:-2], 1).astype(np.float32))
            given |= {} if u_SBL is None else {"u_SBL": longer(np.asarray(u_SBL))}
        elif rule.threshold:
            given["budget_SB"] = longer(diffusion.step_counts(masked_BL.sum(-1), steps, "even").astype(np.int32))
            limit = steps + n  # each step beyond fills at least one of what is left
        else:
            given["table_SN"] = longer(step_table(L, steps, rule.eps))
        given["steps"] = steps
        state["left_B"] = jnp.zeros(B, jnp.int32)
        if rule.history:
            state["history_SBL"] = longer(np.zeros((limit, B, L), np.int32))
        state = _fill(params, state, given, sampler=sampler)
        windows = [L] * int(state["forwards"])
    else:
        state, windows = _fill_blocks(params, state, given, sampler, rule, masked_BL)
        steps = 0
    token_BL, done = np.asarray(state["token_BL"]), int(state["step"])
    stats = {"forwards": int(state["forwards"]), "idle": int(state["idle"]), "steps": done, "windows": windows}
    if rule.history:
        history_SBL = np.array(state["history_SBL"])
        history_SBL[done:] = token_BL  # the loop ends with the last MASK
        stats["history"] = history_SBL[: max(done, steps)]
    return token_BL, stats


def _fill_blocks(params, state, given, sampler, rule, masked_BL):
    """Block by block over the columns that hold a MASK: (state, slots fed in each pass)."""
    L = masked_BL.shape[1]
    columns = np.flatnonzero(masked_BL.any(0))
    if not len(columns):
        return state | ({"history_SBL": jnp.zeros((0, *masked_BL.shape))} if rule.history else {}), []
    S, span, size = int(columns[0]), int(columns[-1] - columns[0]) + 1, rule.block_length
    completion = masked_BL[:, S:].all() and S + span == L
    if span % size and (completion or rule.fast_dllm):
        raise ValueError(f"block_length {size} does not divide the {span} tokens to fill; try {math.gcd(span, size)}")
    if size > L:
        raise ValueError(f"block_length {size} is longer than the canvas of {L}")
    blocks = -(-span // size)
    if rule.steps % blocks:
        raise ValueError(
            f"{rule.steps} steps do not divide over {blocks} blocks; try {-(-rule.steps // blocks) * blocks}"
        )
    steps = rule.steps // blocks or math.ceil(size / rule.tokens_per_step)
    # one step fills one token at least, and so does the pass that opens a block; Fast-dLLM's opening fills only one
    limit = size + 1 if rule.threshold else max(steps, 1 + rule.fast_dllm)
    if not rule.threshold:
        given |= {"table_SN": longer(step_table(size, steps, rule.eps)), "steps": steps}
    if rule.history:
        state["history_SBL"] = longer(np.zeros((blocks * limit, *masked_BL.shape), np.int32))
    windows = []
    for block in range(blocks):
        first = min(S + block * size, L - size)  # the last block of an infilled canvas may overlap the one before
        start = first if rule.fast_dllm else max(first - 1, 0)
        width = {"": L, "prefix": L - start, "dual": min(size + (not rule.fast_dllm), L)}[rule.cache]
        start = min(start, L - width)
        if not np.asarray(sampler.open(state, given, first)).any():
            continue
        state, cache = _open_block(params, state, given, first, sampler=sampler)
        before = int(state["forwards"])
        state, _ = _fill_block(params, state, given, cache, first, start, limit, sampler=sampler, width=width)
        windows += [L] + [width] * (int(state["forwards"]) - before)
    return state, windows


def canvas(prompts, max_new, cfg, multiple=32):
    """Prompts (lists of ids, any lengths, MASK allowed) and max_new MASKs behind each, left-padded: (token_BL, see_BL).

    The prompts' part is padded to a multiple of `multiple`, so that few shapes are ever compiled.
    """
    P = max(map(len, prompts), default=0)
    P = -(-P // multiple) * multiple
    if not prompts or P + max_new == 0:
        raise ValueError("nothing to fill: give a prompt or max_new")
    if max(map(len, prompts)) + max_new > cfg.positions:
        raise ValueError(f"{max(map(len, prompts)) + max_new} tokens do not fit: the model reaches {cfg.positions}")
    P = min(P, cfg.positions - max_new)
    token_BL = np.full((len(prompts), P + max_new), cfg.mask_id, np.int32)
    token_BL[:, :P] = cfg.pad_id
    see_BL = np.ones(token_BL.shape, bool)
    for row, see, prompt in zip(token_BL, see_BL, prompts, strict=True):
        row[P - len(prompt) : P] = prompt
        see[: P - len(prompt)] = False
    return token_BL, see_BL


def generate(model, prompts, max_new, rule=None, key=None, **hooks):
    """Continue prompts with max_new tokens each and fill their MASKs, max_new 0 does only that: (rows of ids, stats).

    A row is prompt and completion without padding. Raises ValueError for what does not fit; see `fill`.
    """
    token_BL, see_BL = canvas(prompts, max_new, model.cfg)
    token_BL, stats = fill(model, token_BL, see_BL, rule, key, **hooks)
    return [row[see].tolist() for row, see in zip(token_BL, see_BL, strict=True)], stats


# ---- counts --------------------------------------------------------------------------------------------------------


def count_params(cfg):
    """Parameters by part: {"embed", "attention", "ffn", "norms", "head", "total"}."""
    parts = dict.fromkeys(("embed", "attention", "ffn", "norms", "head", "total"), 0)
    short = {"embed_tokens": "embed", "lm_head": "head", "gate_proj": "ffn", "up_proj": "ffn", "down_proj": "ffn"}
    for name, leaf in flatten(param_shapes(cfg)).items():
        name = name.split(".")[-1]
        part = "norms" if name.endswith("norm") else short.get(name, "attention")
        parts[part] += math.prod(leaf.shape)
        parts["total"] += math.prod(leaf.shape)
    return parts


def flops_per_token(cfg, length):
    """Training FLOPs of one token in a row of `length`: 6 per matmul parameter, and attention over the whole row.

    Per layer, query head and query-key pair 2K for the score and 2K for the value, forward; three times that with the
    backward pass. Looking a token up is no matmul.
    """
    parts = count_params(cfg)
    matmul = parts["total"] - parts["norms"] - (0 if cfg.tie else parts["embed"])
    return 6 * matmul + 3 * cfg.layers * cfg.heads * 4 * cfg.head_size * length


@dataclasses.dataclass(frozen=True)
class Args:
    model: str = ""  # key of CONFIGS; "" prints a line for each


def main(args):
    if args.model not in ("", *CONFIGS):
        sys.exit(f"--model={args.model}: not one of {', '.join(CONFIGS)}")
    for name in [args.model] if args.model else CONFIGS:
        parts = count_params(CONFIGS[name])
        print(
            f"{name:6} {parts['total']:>15,} parameters in {len(jax.tree.leaves(param_shapes(CONFIGS[name])))} tensors"
        )
        if args.model:
            print("\n".join(f"  {part:20} {n:>15,}" for part, n in parts.items() if part != "total"))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__, config=(tyro.conf.FlagConversionOff,)))
