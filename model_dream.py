"""Dream: a masked-diffusion language model with Qwen2.5's layers (Dream-7B, DiffuCoder-7B), and its sampling loops.

    python model_dream.py                 # prints the presets and their parameter counts
    python model_dream.py --model=7b      # the breakdown of one preset

Flax NNX. Parameters keep the names and the [out, in] layout of the Hugging Face checkpoint, one array per tensor, so a
conversion moves bytes and changes none. convert_weights.py converts, generate.py and coupled_grpo.py sample.

Letters: B batch, L length, M length on the key side, W slots of a window, C positions of one chunk of logits, D width, H
query heads, J key/value heads, G = H / J, K head size, F feed-forward width, V vocabulary, S denoising steps.

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
import sys
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import safetensors
import tyro
from flax import nnx
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

# How each parameter lies on a mesh with the axes (data, fsdp, tensor): tensor splits heads, feed-forward and vocabulary;
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


def linear(x_BLD, weight_FD):
    """x W^T over one axis of tokens, as a matmul of two matrices."""
    y_TF = jax.lax.dot_general(x_BLD.reshape(-1, x_BLD.shape[-1]), weight_FD, (((1,), (1,)), ((), ())))
    return y_TF.reshape(*x_BLD.shape[:-1], -1)


def attention(q_BLHK, k_BMJK, v_BMJK, see_BM=None, block=256):
    """softmax(q k^T / sqrt(K)) v, both ways: every query sees the keys with see_BM, and all without it. [B, L, H, K].

    Query head h reads key/value head h // G. Scores and softmax are float32, for `block` queries at a time: at most
    [B, H, block, M] of them exist. A row that sees no key gets the mean of all values, not NaN.
    """
    B, L, H, K = q_BLHK.shape
    J = k_BMJK.shape[2]
    k_BJMK, v_BJMK = k_BMJK.swapaxes(1, 2), v_BMJK.swapaxes(1, 2)

    def some(q_BLHK):
        q_BJTK = q_BLHK.reshape(B, -1, J, H // J, K).transpose(0, 2, 3, 1, 4).reshape(B, J, -1, K)  # T = G L
        score_BJTM = jnp.einsum("BJTK,BJMK->BJTM", q_BJTK, k_BJMK, preferred_element_type=jnp.float32) * K**-0.5
        if see_BM is not None:
            score_BJTM = jnp.where(see_BM[:, None, None], score_BJTM, -1e30)
        prob_BJTM = jax.nn.softmax(score_BJTM, -1).astype(v_BJMK.dtype)
        o_BJTK = jnp.einsum("BJTM,BJMK->BJTK", prob_BJTM, v_BJMK)
        return o_BJTK.reshape(B, J, H // J, -1, K).transpose(0, 3, 1, 2, 4).reshape(B, -1, H, K)

    if L <= block:
        return some(q_BLHK)
    n = -(-L // block)
    q_nBLHK = jnp.pad(q_BLHK, ((0, 0), (0, n * block - L), (0, 0), (0, 0))).reshape(B, n, block, H, K).swapaxes(0, 1)
    o_nBLHK = jax.lax.map(jax.checkpoint(some), q_nBLHK)  # the backward pass makes the scores of a block again
    return o_nBLHK.swapaxes(0, 1).reshape(B, n * block, H, K)[:, :L]


@dataclasses.dataclass(frozen=True)
class Run:
    """How to run the model, as opposed to what it is: nothing here changes a checkpoint."""

    dtype: typing.Any = jnp.float32  # of activations and of weights inside matmuls
    block: int = 256  # queries per block of the attention
    head_positions: int = 64  # positions per row whose logits exist at a time while sampling


class Block(nnx.Module):
    """One layer; its parameters have the checkpoint's names and [out, in] layout."""

    def __init__(self, cfg, rngs):
        D, Q, C = cfg.width, cfg.heads * cfg.head_size, cfg.kv_heads * cfg.head_size

        def normal(*shape, std=0.02):
            return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32))

        self.input_layernorm, self.post_attention_layernorm = nnx.Param(jnp.ones(D)), nnx.Param(jnp.ones(D))
        self.q_proj, self.k_proj, self.v_proj = normal(Q, D), normal(C, D), normal(C, D)
        self.q_bias, self.k_bias, self.v_bias = (nnx.Param(jnp.zeros(n)) for n in (Q, C, C))
        self.o_proj = normal(D, Q, std=0.02 / math.sqrt(2 * cfg.layers))
        self.gate_proj, self.up_proj = normal(cfg.ffn, D), normal(cfg.ffn, D)
        self.down_proj = normal(D, cfg.ffn, std=0.02 / math.sqrt(2 * cfg.layers))
        self.cfg = cfg

    def __call__(self, x_BLD, rope, see_BM, run, cache=None, start=0):
        """One layer: (new x, (k, v) [B, M, J, K] with the keys already rotated).

        rope holds the queries' positions. With a cache, whose keys carry their own positions, the queries' keys and
        values are written at slots start .. start + L - 1 of it, and all its slots are the keys.
        """
        cfg = self.cfg
        B, L, _ = x_BLD.shape

        def project(x_BLD, name, *spec):
            y_BLF = linear(x_BLD, shard(getattr(self, f"{name}_proj")[...].astype(x_BLD.dtype), *spec))
            return y_BLF + getattr(self, f"{name}_bias")[...].astype(x_BLD.dtype) if name in "qkv" else y_BLF

        n_BLD = rms_norm(x_BLD, self.input_layernorm[...], cfg.eps)
        q, k, v = (project(n_BLD, name, "tensor", None).reshape(B, L, -1, cfg.head_size) for name in "qkv")
        q_BLHK, k_BMJK, v_BMJK = rotate(q, *rope), rotate(k, *rope), v
        if cache is not None:
            k_BMJK, v_BMJK = (
                jax.lax.dynamic_update_slice(old, new.astype(old.dtype), (0, start, 0, 0))
                for old, new in zip(cache, (k_BMJK, v_BMJK), strict=True)
            )
        o_BLHK = attention(q_BLHK, k_BMJK, v_BMJK, see_BM, run.block)
        x_BLD = x_BLD + project(o_BLHK.reshape(B, L, -1), "o", None, "tensor")
        n_BLD = rms_norm(x_BLD, self.post_attention_layernorm[...], cfg.eps)
        hidden_BLF = jax.nn.silu(project(n_BLD, "gate", "tensor", None)) * project(n_BLD, "up", "tensor", None)
        return shard(x_BLD + project(hidden_BLF, "down", None, "tensor"), BATCH), (k_BMJK, v_BMJK)


class Dream(nnx.Module):
    def __init__(self, cfg, rngs, run=None):
        def table():
            return nnx.Param(0.02 * jax.random.normal(rngs.params(), (cfg.vocab, cfg.width), jnp.float32))

        self.embed_tokens = table()
        self.layers = nnx.Dict({str(i): Block(cfg, rngs) for i in range(cfg.layers)})
        self.norm = nnx.Param(jnp.ones(cfg.width))
        if not cfg.tie:
            self.lm_head = table()
        self.cfg, self.run = cfg, run or Run()

    def lookup(self, token_BL):
        """Embeddings [B, L, D] in the computation's dtype."""
        table_VD = shard(self.embed_tokens[...], "tensor", None)
        return shard(table_VD[token_BL].astype(self.run.dtype), BATCH)

    def hidden(self, token_BL, position_BL=None, see_BM=None, cache=None, start=0):
        """Final-normed hidden states [B, L, D] of the tokens, and the cache [(k, v) of each layer].

        Without a cache the keys are the tokens' own, and see_BM says which of them are not padding. With one of M slots
        the tokens are those of slots start .. start + L - 1 (start may be traced), see_BM is over all slots, and the new
        cache holds the tokens' fresh keys and values. position_BL defaults to the slot numbers; a constant offset in a
        row changes nothing, so left padding needs no positions of its own.
        """
        B, L = token_BL.shape
        if position_BL is None:
            position_BL = jnp.broadcast_to(start + jnp.arange(L), (B, L))
        rope = rope_table(position_BL, rope_frequencies(self.cfg.head_size, self.cfg.theta))
        x_BLD, new_cache = self.lookup(token_BL), []
        for i in range(self.cfg.layers):
            layer_cache = None if cache is None else cache[i]
            x_BLD, layer_cache = self.layers[str(i)](x_BLD, rope, see_BM, self.run, layer_cache, start)
            new_cache.append(layer_cache)
        return rms_norm(x_BLD, self.norm[...], self.cfg.eps), new_cache

    def logits(self, hidden_BLD):
        """Float32 logits [B, L, V] of hidden states, not shifted: those at p are of the token at p + 1."""
        head = self.embed_tokens if self.cfg.tie else self.lm_head
        weight_VD = shard(head[...].astype(hidden_BLD.dtype), "tensor", None)
        return jnp.einsum("BLD,VD->BLV", hidden_BLD, weight_VD, preferred_element_type=jnp.float32)

    def __call__(self, token_BL, position_BL=None, see_BL=None, keep_BC=None):
        """Float32 logits [B, L, V], or [B, C, V] at the positions keep_BC alone."""
        hidden_BLD, _ = self.hidden(token_BL, position_BL, see_BL)
        if keep_BC is not None:
            hidden_BLD = jnp.take_along_axis(hidden_BLD, keep_BC[..., None], 1)
        return self.logits(hidden_BLD)


# ---- checkpoints ---------------------------------------------------------------------------------------------------

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
    """Fresh float32 parameters as a nested dict of arrays: {"embed_tokens", "layers": {"0": {"q_proj", ...}}, "norm"}."""
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
    """Raise ValueError naming every tensor of found, {Hugging Face name: shape}, that is missing, extra or misshapen."""
    want = {hf_name(name): tuple(leaf.shape) for name, leaf in flatten(param_shapes(cfg)).items()}
    wrong = [f"missing {name}" for name in want.keys() - found.keys()]
    wrong += [f"unexpected {name}" for name in found.keys() - want.keys()]
    for name in want.keys() & found.keys():
        if tuple(found[name]) != want[name]:
            wrong.append(f"{name} has shape {tuple(found[name])}, not {want[name]}")
    if wrong:
        more = f" and {len(wrong) - 20} more" if len(wrong) > 20 else ""
        raise ValueError(f"the tensors of {where} do not fit the model: " + "; ".join(sorted(wrong)[:20]) + more)


def from_hf(folder, dtype=None, run=None):
    """Read a Hugging Face folder (config.json, *.safetensors with or without an index) as a Dream in `dtype`.

    dtype None keeps the file's. Raises ValueError or FileNotFoundError with one line on what is wrong.
    """
    folder = Path(folder)
    cfg, index = config_from_hf(folder), folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            names = sorted(set(weight_map.values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ValueError(f"{index} is damaged: it has no weight_map") from None
    files, shapes = [], {}
    for path in (folder / name for name in names):
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} does not exist" + (f", but {index.name} names it" if index.exists() else "")
            )
        try:
            file = safetensors.safe_open(path, "numpy")
        except (safetensors.SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        files.append(file)
        for name in file.keys():  # noqa: SIM118 (not a dictionary)
            part = file.get_slice(name)
            if part.get_dtype() not in ("F32", "BF16", "F16"):
                raise ValueError(f"{path} holds {name} as {part.get_dtype()}, not BF16, F16 or F32")
            if name in shapes:
                raise ValueError(f"{path} holds {name} a second time")
            shapes[name] = part.get_shape()
    check_shapes(shapes, cfg, folder)
    if index.exists() and weight_map.keys() != shapes.keys():
        raise ValueError(f"{index} names other tensors than its files hold")
    tensors = {name: file for file in files for name in file.keys()}  # noqa: SIM118
    flat = {}
    for ours in flatten(param_shapes(cfg)):
        tensor = tensors[hf_name(ours)].get_tensor(hf_name(ours))
        flat[ours] = jnp.asarray(tensor, dtype or tensor.dtype)
    dtype = dtype or flat["embed_tokens"].dtype
    return nnx.merge(graph_of(cfg, run or Run(dtype=jnp.dtype(dtype))), unflatten(flat))
