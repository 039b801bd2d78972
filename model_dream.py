"""Dream and its kin (LLaDA, SDAR, Nemotron, ..): the architecture and the losses. Reads the disk.

In Flax NNX. It reads config.json, and neither loads weights (checkpoints.py, convert_weights.py)
nor trains (train_dream.py) nor samples (sample_dream.py). Parameters keep the names and the
[out, in] layout of the Hugging Face checkpoint, so a conversion copies bytes.

Letters: B batch, L length, M length on the key side, T tokens, C positions of one chunk of logits,
D width, H query heads, J key/value heads, G = H / J, K head size, F feed-forward width, R rank of
LoRA, V vocabulary.

A layer, with n = RMSNorm(x):  h = x + W_o attn(W_q n + b_q, W_k n + b_k, W_v n + b_v);  x' = h +
W_down( silu(W_gate m) * W_up m), m = RMSNorm(h). Attention is bidirectional. The logits at position
p - 1 predict the token at p, as in the autoregressive model that Dream was made from; position 0
uses its own. Refs: Dream, arXiv:2508.15487; LLaDA, arXiv:2502.09992; SDAR, arXiv:2510.06303.
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


@dataclasses.dataclass(frozen=True)
class DreamConfig:
    """The architecture, as a checkpoint stores it. Defaults are DiffuCoder-7B's."""

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
    # Not of Dream:
    block_length: int = 0  # a token attends to its own and earlier blocks; 0: no blocks
    shift: bool = True  # the logits at position p - 1 predict the token at p
    expand_id: int = -1  # DreamOn: a mask that becomes this id splits in two; -1: off
    hole_masks: int = 0  # masks of a hole of unknown length, which EOS ends; 0: was not trained so
    causal: bool = False  # finished tokens attend causally, and the last predicts the next one
    rope: tuple = ()  # pairs of YaRN's settings and of the query scale, see rope_of
    family: str = "dream"  # key of FAMILIES
    bias: bool = True  # queries, keys and values have a bias
    qk_norm: bool = False  # RMSNorm of each head's queries and keys
    ends: tuple[int, ...] = ()  # further ids that end a text, as eos_id does

    def __post_init__(self):
        object.__setattr__(self, "rope", tuple(map(tuple, self.rope)))  # JSON has lists
        object.__setattr__(self, "ends", tuple(self.ends))
        ids = (self.mask_id, self.expand_id, self.pad_id, self.bos_id, self.eos_id)
        if self.mask_id in ids[1:] or self.expand_id == self.eos_id or max(ids) >= self.vocab:
            what = f"each below {self.vocab}, the first two unique"
            raise ValueError(f"ids {ids} of mask, expand, pad, bos, eos: {what}")

    @property
    def eos_ids(self):
        """All ids that end a text."""
        return self.eos_id, *self.ends


SMALL = {"mask_id": 4, "pad_id": 0, "bos_id": 1, "eos_id": 2, "positions": 2048}
CONFIGS = {
    "tiny": DreamConfig(4096, 128, 4, 4, 2, 32, 384, **SMALL),
    "small": DreamConfig(8192, 512, 8, 8, 2, 64, 1408, **SMALL),
    "100m": DreamConfig(32_768, 640, 12, 10, 2, 64, 1792, **SMALL),
    "500m": DreamConfig(151_936, 896, 24, 14, 2, 64, 4864, tie=True),
    "1500m": DreamConfig(151_936, 1536, heads=12, kv_heads=2, ffn=8960, tie=True),
    "7b": DreamConfig(),
}


@dataclasses.dataclass(frozen=True)
class Compute:
    """How to run the model, as opposed to what it is: nothing here changes a checkpoint."""

    dtype: typing.Any = jnp.float32  # of activations and of weights inside matmuls
    block: int = 256  # queries per block of the attention
    # masked positions of a row whose logits the sampler holds at a time; 0: 64, on a CPU 16
    head_positions: int = 0
    remat: typing.Literal["none", "qkvo", "full"] = "none"  # what is recomputed, see REMAT
    loss_tokens: int = 2048  # tokens whose logits the loss holds at a time, on a device
    platform: str = dataclasses.field(default_factory=lambda: platform_of(jax.devices()[0]))


def platform_of(device):
    """Compute.platform of a JAX device: cpu, tpu, or a GPU with its version, "gpu 8.9"."""
    return f"gpu {device.compute_capability}" if device.platform == "gpu" else device.platform


# ---- the parts of a layer ------------------------------------------------------------------------


def rms_norm(x, weight, eps):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32, returned in x's dtype."""
    # bfloat16 keeps 8 bits: a sum of D squares would lose most of its terms
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)
    return (normed * weight).astype(x.dtype)


def rope_frequencies(head_size, theta, rope=()):
    """Rotary frequencies theta^(-2i/K) [K/2] with PyTorch's rounding. YaRN (arXiv:2309.00071, 3.2)
    divides the low ones by `factor`.
    """
    # NumPy on the host: at position 2,000 the angle's error is 2,000 times the error here
    exponent = np.arange(0, head_size, 2, dtype=np.float32) / head_size
    inv_freq = 1 / (np.float64(theta) ** exponent).astype(np.float32)
    if not rope:
        return inv_freq

    yarn = {"beta_fast": 32, "beta_slow": 1} | dict(rope)

    def index(beta):  # of the frequency with `beta` turns in the original length
        turns = yarn["original_max_position_embeddings"] / (2 * math.pi * yarn[beta])
        return head_size * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(index("beta_fast")), 0)
    high = min(math.ceil(index("beta_slow")), head_size - 1)
    ramp = np.clip((np.arange(head_size // 2) - low) / ((high - low) or 1e-3), 0, 1)
    return (inv_freq * (ramp / yarn["factor"] + 1 - ramp)).astype(np.float32)


def rope_of(cfg, position_BL):
    """cos and sin [B, L, K] in float32 of position * rope_frequencies, repeated in both halves.

    With YaRN times m(mscale) / m(mscale_all_dim), m(s) = 0.1 s ln(factor) + 1, and Llama 4's scale
    of queries [B, L, 1, 1], 1 + beta ln(1 + floor(position / original positions)).
    """
    # float32, since bfloat16 cannot tell position 257 from 256
    position_BL1 = position_BL[..., None].astype(jnp.float32)
    angle_BLK = position_BL1 * np.tile(rope_frequencies(cfg.head_size, cfg.theta, cfg.rope), 2)
    cos_BLK, sin_BLK = jnp.cos(angle_BLK), jnp.sin(angle_BLK)
    if not cfg.rope:
        return cos_BLK, sin_BLK

    yarn = dict(cfg.rope)
    scales = [yarn.get("mscale"), yarn.get("mscale_all_dim")]
    if not all(scales):
        scales = [1, 0]
    over, under = (0.1 * scale * math.log(max(yarn["factor"], 1)) + 1 for scale in scales)
    turns_BL = position_BL // yarn["original_max_position_embeddings"]
    scale_BL = 1 + yarn.get("llama_4_scaling_beta", 0) * jnp.log1p(turns_BL)
    return over / under * cos_BLK, over / under * sin_BLK, scale_BL[..., None, None]


def rotate(x_BLHK, cos_BLK, sin_BLK, scale_BL11=1):
    """Rotary embedding of both halves: (x cos + [-x_2; x_1] sin) scale, in x's dtype."""
    x32 = x_BLHK.astype(jnp.float32)
    half = x32.shape[-1] // 2
    swapped = jnp.concatenate([-x32[..., half:], x32[..., :half]], -1)
    rotated = x32 * cos_BLK[:, :, None] + swapped * sin_BLK[:, :, None]
    return (rotated * scale_BL11).astype(x_BLHK.dtype)


def attention(q_BLHK, k_BMJK, v_BMJK, see_BM=None, block=256, place=None, key_place=None):
    """softmax(q k^T / sqrt(K)) v [B, L, H, K], bidirectional. see_BM is False at padding.

    place and key_place, diffusion.Places of queries and keys, add the mask diffusion.sees. Scores
    are float32, for `block` queries at a time. A row without keys gets the mean of all values.
    """
    B, L, H, K = q_BLHK.shape
    M, J = k_BMJK.shape[1:3]
    G = H // J
    k_BJMK = k_BMJK.swapaxes(1, 2)
    v_BJMK = v_BMJK.swapaxes(1, 2)

    def attend(queries):
        q_BLHK, place = queries
        # The query heads of a group are T = G L queries of one product: no copies of the keys.
        q_BJGLK = q_BLHK.reshape(B, -1, J, G, K).transpose(0, 2, 3, 1, 4)
        q_BJTK = q_BJGLK.reshape(B, J, -1, K)
        score_BJTM = einsum("BJTK,BJMK->BJTM", q_BJTK, k_BJMK) * K**-0.5
        if see_BM is not None:
            # -inf: NaN in a row without keys
            score_BJTM = jnp.where(see_BM[:, None, None], score_BJTM, -1e30)
        if place is not None:
            sees_B11LM = diffusion.sees(place, key_place)[:, None, None]
            score_BJGLM = score_BJTM.reshape(B, J, G, -1, M)
            score_BJTM = jnp.where(sees_B11LM, score_BJGLM, -1e30).reshape(score_BJTM.shape)
        prob_BJTM = jax.nn.softmax(score_BJTM, -1).astype(v_BJMK.dtype)
        o_BJTK = einsum("BJTM,BJMK->BJTK", prob_BJTM, v_BJMK).astype(v_BJMK.dtype)
        o_BJGLK = o_BJTK.reshape(B, J, G, -1, K)
        return o_BJGLK.transpose(0, 3, 1, 2, 4).reshape(B, -1, H, K)

    if L <= block:
        return attend((q_BLHK, place))
    n = math.ceil(L / block)

    def split(x_BL):  # [B, L, ...] -> [n, B, block, ...]
        x_BL = jnp.pad(x_BL, ((0, 0), (0, n * block - L), *[(0, 0)] * (x_BL.ndim - 2)))
        return x_BL.reshape(len(x_BL), n, block, *x_BL.shape[2:]).swapaxes(0, 1)

    # the backward pass recomputes the scores of a block
    o_nBLHK = jax.lax.map(jax.checkpoint(attend), jax.tree.map(split, (q_BLHK, place)))
    return o_nBLHK.swapaxes(0, 1).reshape(B, n * block, H, K)[:, :L]


einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def updated(old_BJMK, new_BJLK, start):
    """The cache with new keys or values from slot `start` on: a number, [B] or [B, J]."""
    update = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=-2)
    for _ in jnp.shape(start):
        update = jax.vmap(update)
    return update(old_BJMK, new_BJLK.astype(old_BJMK.dtype), start)


# ---- the model -----------------------------------------------------------------------------------


class Block(nnx.Module):
    """One layer; its parameters have the checkpoint's names and [out, in] layout."""

    def __init__(self, cfg, rngs):
        self.cfg = cfg
        D = cfg.width
        Q = cfg.heads * cfg.head_size
        KV = cfg.kv_heads * cfg.head_size

        def normal(*shape, size=1.0):  # a standard deviation of 1 / sqrt(fan-in), 0.017 at 7b
            noise = jax.random.normal(rngs(), shape)
            return nnx.Param(size * shape[-1] ** -0.5 * noise)

        # smaller, as the residual stream is the sum of 2 x layers such products
        residual = 1 / math.sqrt(2 * cfg.layers)
        self.input_layernorm = nnx.Param(jnp.ones(D))
        self.post_attention_layernorm = nnx.Param(jnp.ones(D))
        self.q_proj = normal(Q, D)
        self.k_proj = normal(KV, D)
        self.v_proj = normal(KV, D)
        self.o_proj = normal(D, Q, size=residual)
        self.gate_proj = normal(cfg.ffn, D)
        self.up_proj = normal(cfg.ffn, D)
        self.down_proj = normal(D, cfg.ffn, size=residual)
        if cfg.bias:
            self.q_bias = nnx.Param(jnp.zeros(Q))
            self.k_bias = nnx.Param(jnp.zeros(KV))
            self.v_bias = nnx.Param(jnp.zeros(KV))
        if cfg.qk_norm:
            self.q_norm = nnx.Param(jnp.ones(cfg.head_size))
            self.k_norm = nnx.Param(jnp.ones(cfg.head_size))

    def __call__(self, x_BLD, rope, see_BM, compute, cache=None, start=0, places=()):
        """(new x, (k, v) [B, J, M, K] with rotated keys); see `attention` and Dream.hidden."""
        cfg = self.cfg
        B, L, _ = x_BLD.shape
        weights = {name: getattr(self, name).get_value() for name in MATRICES}
        if isinstance(weights["q_proj"], Lora):
            # Backward, a layer's adapters come before the layer below: else XLA computes them last
            # on a Hopper, and holds all layers' activations until then.
            adapters = {name: weight[1:] for name, weight in weights.items()}
            x_BLD, adapters = jax.lax.optimization_barrier((x_BLD, adapters))
            weights = {name: Lora(weight.base, *adapters[name]) for name, weight in weights.items()}

        def project(x_BLD, name, *spec):
            return linear(x_BLD, weights[name], *spec, platform=compute.platform)

        def heads(name):
            y_BLF = project(n_BLD, f"{name}_proj", "tensor", None)
            if cfg.bias:
                y_BLF = y_BLF + getattr(self, f"{name}_bias")[...].astype(n_BLD.dtype)
            return checkpoint_name(y_BLF.reshape(B, L, -1, cfg.head_size), name)  # for REMAT

        # Attention
        n_BLD = rms_norm(x_BLD, self.input_layernorm[...], cfg.eps)
        q_BLHK = heads("q")
        k_BMJK = heads("k")
        v_BMJK = heads("v")
        if cfg.qk_norm:
            q_BLHK = rms_norm(q_BLHK, self.q_norm[...], cfg.eps)
            k_BMJK = rms_norm(k_BMJK, self.k_norm[...], cfg.eps)
        q_BLHK = rotate(q_BLHK, *rope)
        k_BMJK = rotate(k_BMJK, *rope[:2])
        # Slots are the last axis but one: a TPU then updates the cache in place.
        new_cache = k_BMJK.swapaxes(1, 2), v_BMJK.swapaxes(1, 2)
        if cache is not None:
            new_cache = tuple(map(updated, cache, new_cache, (start, start)))
            k_BMJK, v_BMJK = (x_BJMK.swapaxes(1, 2) for x_BJMK in new_cache)
        o_BLHK = attention(q_BLHK, k_BMJK, v_BMJK, see_BM, compute.block, *places)
        o_BLQ = checkpoint_name(o_BLHK, "attn").reshape(B, L, -1)
        x_BLD = x_BLD + project(o_BLQ, "o_proj", None, "tensor")

        # Feed-forward: silu in float32, as its exp loses digits in bfloat16.
        n_BLD = rms_norm(x_BLD, self.post_attention_layernorm[...], cfg.eps)
        gate_BLF = project(n_BLD, "gate_proj", "tensor", None)
        if gate_BLF.shape[-1] > cfg.ffn:  # see join()
            gate_BLF, up_BLF = jnp.split(gate_BLF, 2, -1)
        else:
            up_BLF = project(n_BLD, "up_proj", "tensor", None)
        hidden_BLF = (jax.nn.silu(gate_BLF.astype(jnp.float32)) * up_BLF).astype(compute.dtype)
        return shard(x_BLD + project(hidden_BLF, "down_proj", None, "tensor"), BATCH), new_cache


# Calls of a layer by Compute.remat. "full" keeps nothing for the backward pass, "qkvo" the inputs
# and the output of attention.
KEPT = jax.checkpoint_policies.save_only_these_names("q", "k", "v", "attn")
REMAT = {
    "none": jax.jit(Block.__call__, static_argnums=4),
    "full": jax.checkpoint(Block.__call__, static_argnums=4),
    "qkvo": jax.checkpoint(Block.__call__, static_argnums=4, policy=KEPT),
}


class Dream(nnx.Module):
    def __init__(self, cfg, rngs, compute=None):
        self.cfg = cfg
        self.compute = compute or Compute()

        def table(size):
            noise = jax.random.normal(rngs(), (cfg.vocab, cfg.width))
            return nnx.Param(size * noise)

        # Embeddings of unit scale match the layers' outputs. A tied table is also the head, which
        # needs rows of about unit length.
        self.embed_tokens = table(cfg.width**-0.5 if cfg.tie else 1.0)
        self.layers = nnx.Dict({str(i): Block(cfg, rngs) for i in range(cfg.layers)})
        self.norm = nnx.Param(jnp.ones(cfg.width))
        if not cfg.tie:
            self.lm_head = table(cfg.width**-0.5)

    def lookup(self, token_BL):
        """Embeddings [B, L, D] in compute.dtype."""
        table = self.embed_tokens.get_value()
        x_BLD = jax.tree.map(lambda x: shard(x, "tensor", None)[token_BL], table)
        if isinstance(x_BLD, Int8):
            x_BLD = x_BLD.q_FD * x_BLD.scale_F1
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
        """Final-normed hidden states [B, L, D], and the cache: (k, v) [B, J, M, K] of each layer.

        A cache of M slots gets the tokens' keys and values from slot `start` on, a number or an
        array [B]. see_BM is False at padding; place and key_place, the Places of the tokens and of
        all slots, mask more. Left padding needs no positions of its own: offsets change nothing.
        """
        B, L = token_BL.shape
        if position_BL is None:
            position_BL = jnp.broadcast_to(jnp.reshape(start, (-1, 1)) + jnp.arange(L), (B, L))
        rope = rope_of(self.cfg, position_BL)  # once for all layers
        places = place, key_place or place
        call_layer = REMAT[self.compute.remat]
        if token_BL.size == 1 and self.compute.platform == "cpu":
            # each head by itself, or XLA copies the cache
            start = jnp.broadcast_to(start, (1, self.cfg.kv_heads))
        cache = list(cache or [None] * self.cfg.layers)
        x_BLD = self.lookup(token_BL)
        for i in range(self.cfg.layers):
            x_BLD, cache[i] = call_layer(
                self.layers[str(i)], x_BLD, rope, see_BM, self.compute, cache[i], start, places
            )
        return rms_norm(x_BLD, self.norm[...], self.cfg.eps), cache

    def logits(self, hidden_BLD):
        """Float32 logits [B, L, V], not shifted: those at p predict the token at p + 1."""
        head = (self.embed_tokens if self.cfg.tie else self.lm_head).get_value()
        platform = self.compute.platform
        return linear(hidden_BLD, head, "tensor", None, dtype=jnp.float32, platform=platform)

    def __call__(self, token_BL, position_BL=None, see_BL=None):
        """Float32 logits [B, L, V] of a canvas."""
        return self.logits(self.hidden(token_BL, position_BL, see_BL)[0])

    def nll(self, token_BL, mask_BL, segment_BL, position_BL, block=None, seen_1LL=None):
        """NLL in nats [B, L] of the tokens with mask_BL, which are MASK in the input; else 0."""
        noised_BL = jnp.where(mask_BL, self.cfg.mask_id, token_BL)
        if block is not None:
            hidden_BLD, _ = self.readings(noised_BL, token_BL, segment_BL, position_BL, block)
        else:
            place = diffusion.Place(segment_BL, seen=seen_1LL)
            hidden_BLD, _ = self.hidden(noised_BL, position_BL, place=place)
            if self.cfg.shift:  # the first token of a document has only its own state
                first_BL1 = first_of_document(segment_BL)[..., None]
                hidden_BLD = jnp.where(first_BL1, hidden_BLD, jnp.roll(hidden_BLD, 1, 1))
        return self.token_nll(hidden_BLD, token_BL, mask_BL)

    def readings(self, noised_BL, token_BL, segment_BL, position_BL, block):
        """The states [B, L, D] that predict each position in blocks, and the clean ones before it:
        in a causal model they predict it, too.

        The noised and the clean row run side by side, see diffusion.sees. With cfg.shift the clean
        row predicts the first token of a block. The block's length may be traced.
        """
        row_BM = jnp.concatenate((noised_BL, token_BL), 1)
        position_BM = jnp.concatenate((position_BL, position_BL), 1)
        segment_BM = jnp.concatenate((segment_BL, segment_BL), 1)
        B, M = row_BM.shape
        noisy_BM = jnp.broadcast_to(jnp.arange(M) < M // 2, (B, M))
        # A block has the number of its first position; a causal clean token is a block of its own.
        in_blocks_BM = noisy_BM | (not self.cfg.causal)
        block_BM = jnp.where(in_blocks_BM, position_BM // block * block, position_BM)
        place = diffusion.Place(segment_BM, block_BM, noisy_BM)
        hidden_BMD, _ = self.hidden(row_BM, position_BM, place=place)
        hidden_BLD, clean_BLD = jnp.split(hidden_BMD, 2, 1)
        before_BLD = jnp.roll(clean_BLD, 1, 1)
        if self.cfg.shift:
            starts_BL1 = (position_BL % block == 0)[..., None]
            first_BL1 = first_of_document(segment_BL)[..., None]
            shifted_BLD = jnp.where(starts_BL1, before_BLD, jnp.roll(hidden_BLD, 1, 1))
            hidden_BLD = jnp.where(first_BL1, hidden_BLD, shifted_BLD)
        return hidden_BLD, before_BLD

    def ar_nll(self, token_BL, mask_BL, segment_BL, position_BL):
        """nll with blocks of one token, all masked: an autoregressive model's, in one pass. A MASK
        alone predicts the first token of a document, as it does with blocks.
        """
        place = diffusion.Place(segment_BL, position_BL)
        hidden_BLD, _ = self.hidden(token_BL, position_BL, place=place)
        empty_BLD, _ = self.hidden(jnp.full((1, 1), self.cfg.mask_id))
        first_BL1 = first_of_document(segment_BL)[..., None]
        hidden_BLD = jnp.where(first_BL1, empty_BLD, jnp.roll(hidden_BLD, 1, 1))
        return self.token_nll(hidden_BLD, token_BL, mask_BL)

    def token_nll(self, hidden_BLD, token_BL, mask_BL):
        """diffusion.masked_nll of the tokens with mask_BL, from the states that predict them."""
        # Logits [B, L, V] would be the largest array by far: the head runs over C positions at a
        # time, and again backwards.
        B, L = token_BL.shape
        mesh = jax.sharding.get_abstract_mesh()
        devices = math.prod(mesh.shape.get(axis, 1) for axis in BATCH)
        rows = B // devices if B % devices == 0 else B
        C = min(L, max(1, self.compute.loss_tokens // rows))
        while L % C:
            C -= 1

        @jax.checkpoint
        def nll_of(chunk):
            hidden_BCD, token_BC, mask_BC = chunk
            logits_BCV = self.logits(hidden_BCD)
            return diffusion.masked_nll(logits_BCV, token_BC, mask_BC, self.cfg.mask_id)

        def chunks(x_BL):
            # along the row, so that rows stay split over devices
            return x_BL.reshape(B, L // C, C, *x_BL.shape[2:]).swapaxes(0, 1)

        nll_nBC = jax.lax.map(nll_of, jax.tree.map(chunks, (hidden_BLD, token_BL, mask_BL)))
        return nll_nBC.swapaxes(0, 1).reshape(B, L)

    def nelbo(self, token_BL, segment_BL, position_BL, t_BL, u_BL, fixed_BL=None, seen_1LL=None):
        """A bound on -log p of packed rows in nats: the sum of -log p(token | noised row) / t.

        t_BL is the time of each token's document, or of its block with cfg.block_length: a token
        becomes MASK where u_BL < t, if it is `counted`. Ref: MDLM, arXiv:2406.07524, eq. 10.
        """
        mask_BL = counted(segment_BL, fixed_BL) & (u_BL < t_BL)
        block = self.cfg.block_length or None
        nll_BL = self.nll(token_BL, mask_BL, segment_BL, position_BL, block, seen_1LL)
        return jnp.where(mask_BL, 1 / t_BL * nll_BL, 0.0).sum()

    def exact_nll(self, token_BL, segment_BL, position_BL, fixed_BL=None):
        """The bound [B, L] in nats, without sampling: a sum over all 2^block_length masks."""
        counted_BL = counted(segment_BL, fixed_BL)
        block = self.cfg.block_length
        if block == 1 and (self.cfg.causal or self.cfg.shift):
            return self.ar_nll(token_BL, counted_BL, segment_BL, position_BL)

        def weighted_nll(subset):
            mask_BL, weight_BL = diffusion.subset_mask(subset, counted_BL, position_BL, block)
            return weight_BL * self.nll(token_BL, mask_BL, segment_BL, position_BL, block)

        return jax.lax.map(weighted_nll, jnp.arange(1, 1 << block)).sum(0)


EXACT_BLOCK = 4  # largest block that is scored by exact_nll, in up to 15 passes


def first_of_document(segment_BL):
    return (jnp.roll(segment_BL, 1, 1) != segment_BL).at[:, 0].set(True)


def counted(segment_BL, fixed_BL=None):
    """The positions that can be masked: not padding (segment 0), not a prompt (fixed 1)."""
    return (segment_BL > 0) & (fixed_BL != 1)  # None, without prompts, is not 1


def parts(segment_BL, position_BL, block=None):
    """Numbers from 1 of the documents of each row, or of their blocks: each has its own time t."""
    return segment_BL if block is None else jnp.cumsum(position_BL % block == 0, 1)


def noise(key, rows, row_B, part_BL, eps=1e-3):
    """(t_BL, u_BL) of the rows row_B of `rows`: each token's time and a uniform number.

    By key and row number alone. t is uniform in [eps, 1] for each of `parts`: that of row i's
    first part lies in the i-th of `rows` equal intervals, each further part adds 0.618 of the range
    modulo the range.
    """
    key_R = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows))
    t_R = diffusion.antithetic_times(jax.vmap(jax.random.uniform)(key_R), eps)

    def uniform(key):
        return jax.random.uniform(jax.random.fold_in(key, 1), part_BL.shape[1:])

    u_BL = jax.vmap(uniform)(key_R[row_B])
    golden = 0.6180339887498949  # its multiples modulo 1 spread evenly, however many there are
    t_BL = eps + (t_R[row_B][:, None] - eps + golden * (part_BL - 1)) % (1 - eps)
    return t_BL, u_BL


# ---- parameters ----------------------------------------------------------------------------------

# for shapes alone: nnx.Rngs takes a second to trace in thirty layers
NO_RNGS = functools.partial(jax.random.key, 0)


def new_params(cfg, seed):
    """Fresh float32 parameters: {"embed_tokens", "layers": {"0": {"q_proj", ...}}, "norm"}."""
    return nnx.to_pure_dict(nnx.state(Dream(cfg, nnx.Rngs(seed))))


@functools.lru_cache
def graph_of(cfg, compute):
    """The model without its parameters: nnx.merge(graph_of(cfg, compute), params) is a Dream."""
    return nnx.graphdef(nnx.eval_shape(lambda: Dream(cfg, NO_RNGS, compute)))


@functools.lru_cache
def param_shapes(cfg):
    return jax.eval_shape(lambda: nnx.to_pure_dict(nnx.state(Dream(cfg, NO_RNGS))))


def count_params(cfg):
    """The number of parameters."""
    return sum(x.size for x in jax.tree.leaves(param_shapes(cfg)))


def flops_per_token(cfg, length):
    """Training FLOPs of a token in a row of `length`: 6 per matmul parameter, and 12 K of attention
    per layer, head and token that it sees: 4 K forward, twice that backward.
    """
    layers = sum(x.size for x in jax.tree.leaves(param_shapes(cfg)["layers"]) if x.ndim > 1)
    attention = 12 * cfg.layers * cfg.heads * cfg.head_size * length
    return 6 * (layers + cfg.vocab * cfg.width) + attention


def join(model):
    """The same model for inference, not to be saved: up_proj moves into gate_proj. With few tokens
    a product is bound by reading its weights: a large one is faster.
    """
    for layer in model.layers.values():
        up = layer.up_proj.get_value()
        both = jax.tree.map(lambda *rows: jnp.concatenate(rows), layer.gate_proj.get_value(), up)
        layer.gate_proj.set_value(both)
        layer.up_proj.set_value(jax.tree.map(lambda x: x[:0], up))
        jax.block_until_ready(both)  # the old ones are free then
    return model


# ---- matrices: LoRA, 8 and 4 bits, and products with them ----------------------------------------

MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Lora(typing.NamedTuple):
    """A frozen matrix and a trained difference of low rank: W + B A. Ref: arXiv:2106.09685."""

    base: jax.Array  # [F, D], or an Int8 or Int4
    a_RD: jax.Array
    b_FR: jax.Array


def new_adapters(key, shapes, rank):
    """New float32 adapters {"layers": {"0": {"q_proj": {"a" [R, D], "b" [F, R]}}}}.

    A has standard deviation 1 / sqrt(D), B is zero. B A is not scaled: alpha = rank.
    """
    layers = {}
    for i, layer in shapes["layers"].items():
        layers[i] = {}
        for j, name in enumerate(MATRICES):
            F, D = layer[name].shape
            key_a = jax.random.fold_in(jax.random.fold_in(key, int(i)), j)
            a_RD = D**-0.5 * jax.random.normal(key_a, (rank, D))
            layers[i][name] = {"a": a_RD, "b": jnp.zeros((F, rank))}
    return {"layers": layers}


def assemble(base, trained):
    """The model's parameters: those of `base`, with trained {"a", "b"} as Loras."""
    if not isinstance(base, dict):
        return Lora(base, trained["a"], trained["b"]) if trained else base
    if not base:
        return trained
    return {name: assemble(child, trained.get(name, {})) for name, child in base.items()}


def merge_adapters(base, adapters):
    """The parameters W + B A in the base's dtype. Overwrites `base`: two would not fit."""
    for i, trained in adapters["layers"].items():
        layer = base["layers"][i]
        for name, adapter in trained.items():
            merged_FD = layer[name] + adapter["b"] @ adapter["a"]
            layer[name] = merged_FD.astype(layer[name].dtype)
    return base


GROUP = 32  # rows of a column that share a scale in an Int4, or gcd(F, GROUP)


class Int8(typing.NamedTuple):
    """A frozen matrix in a quarter of float32's bytes: W = q * scale, q from -127 to 127."""

    q_FD: jax.Array
    scale_F1: jax.Array  # float32, one per row: an output channel, or a token's embedding


class Int4(typing.NamedTuple):
    """A frozen matrix in a seventh of float32's bytes: W = (q - zero) * scale * unit, q from 0
    to 15, scale from 1 to 255.

    A group lies in one column, so that its scale may multiply x instead of W, see int4_product.
    """

    q_FE: jax.Array  # E = D / 2; the left half in the low bits
    scale_GD: jax.Array  # one per group of rows in a column
    zero_GD: jax.Array  # the q of a 0
    unit_1D: jax.Array  # float32; join() makes it two rows, each for half of the groups


def quantise(weight_FD, bits=8, name=""):
    """The parameter `name` as Int8, or with 4 bits as Int4, unless its width is odd."""
    F, D = weight_FD.shape
    # 4 bits cost most in the embedding, the head, and keys and values that several heads share
    careful = ["embed_tokens", "lm_head"] + ["k_proj", "v_proj"] * (F < D)
    if bits == 4 and name not in careful and not D % 2:
        return to_int4(weight_FD)
    return to_int8(weight_FD)


@jax.jit
def to_int8(weight_FD):
    """The nearest Int8: scale = max |row| / 127. Error: half a scale at most."""
    weight_FD = weight_FD.astype(jnp.float32)
    scale_F1 = jnp.max(jnp.abs(weight_FD), -1, keepdims=True) / 127
    # a row of zeros stays one
    return Int8(jnp.round(weight_FD / (scale_F1 + 1e-30)).astype(jnp.int8), scale_F1)


@jax.jit
def to_int4(weight_FD):
    """A near Int4: 16 steps that reach over a group and 0. Error: at most half a step of the group
    and 3 % of the largest step in its column.
    """
    F, D = weight_FD.shape
    weight_GSD = weight_FD.astype(jnp.float32).reshape(-1, math.gcd(F, GROUP), D)
    low_GD = weight_GSD.min(1, initial=0)
    step_GD = (weight_GSD.max(1, initial=0) - low_GD) / 15
    unit_1D = step_GD.max(0, keepdims=True) / 255 + 1e-30
    scale_GD = jnp.round(step_GD / unit_1D).clip(1)
    step_GD = scale_GD * unit_1D
    zero_GD = jnp.round(-low_GD / step_GD)
    q_GSD = jnp.round(weight_GSD / step_GD[:, None] + zero_GD[:, None]).clip(0, 15)
    left_FE, right_FE = jnp.split(q_GSD.reshape(F, D).astype(jnp.uint8), 2, 1)
    q_FE = left_FE | right_FE << 4
    return Int4(q_FE, scale_GD.astype(jnp.uint8), zero_GD.astype(jnp.uint8), unit_1D)


def halves(weight):
    """(q - zero [G, S, E], scale * unit [G, 1, E]) of an Int4's left and right columns."""
    G, D = weight.scale_GD.shape
    q_GSE = weight.q_FE.reshape(G, -1, D // 2)
    q_GSE = jax.lax.optimization_barrier(q_GSE)  # or a TPU unpacks in three passes over memory
    zeros = jnp.split(weight.zero_GD[:, None], 2, 2)
    unit_GD = jnp.repeat(weight.unit_1D, G // len(weight.unit_1D), 0)
    scales = jnp.split((weight.scale_GD * unit_GD)[:, None], 2, 2)
    for half_GSE, zero_G1E, scale_G1E in zip((q_GSE & 15, q_GSE >> 4), zeros, scales, strict=True):
        yield (half_GSE - zero_G1E).astype(jnp.int8), scale_G1E


def unpacked(weight, dtype):
    """The matrix [F, D] that an Int4 stands for."""
    halves_FE = []
    for q_GSE, scale_G1E in halves(weight):
        halves_FE.append((q_GSE * scale_G1E).reshape(weight.q_FE.shape).astype(dtype))
    return jnp.concatenate(halves_FE, 1)


def linear(x_BLD, weight, *spec, dtype=None, platform=""):
    """x W^T [B, L, F] in `dtype`, or x's, of a matrix, Int8, Int4 or Lora with layout spec."""
    dtype = dtype or x_BLD.dtype
    if isinstance(weight, Lora):
        # B A, as large as W, is never made. The barriers keep a GPU's compiler from merging the two
        # products with x, for which it would copy W beside A.
        barrier = jax.lax.optimization_barrier
        low_BLR = linear(barrier(x_BLD), weight.a_RD, platform=platform)
        change_BLF = linear(low_BLR, weight.b_FR, dtype=dtype, platform=platform)
        y_BLF = linear(x_BLD, weight.base, *spec, dtype=dtype, platform=platform)
        return y_BLF + barrier(change_BLF)

    x_TD = x_BLD.reshape(-1, x_BLD.shape[-1])
    T = len(x_TD)
    if platform == "tpu" and T == 1:  # by XLA's estimate a row takes 3.4 times as long as eight
        x_TD = jnp.pad(x_TD, ((0, 7), (0, 0)))
    if isinstance(weight, Int8 | Int4):
        if platform == "cpu":
            # add a zero that XLA cannot fold, or it casts the matrices of all layers first
            zero = jnp.isnan(x_TD[0, 0]).astype(weight[0].dtype)
            weight = type(weight)(weight[0] + zero, *weight[1:])
        y_TF = frozen_product(x_TD, weight, spec, x_TD.dtype, platform)
    else:
        # XLA uses a CPU's bfloat16 units only where the product is float32
        y_TF = product(x_TD, weight, spec, jnp.float32 if platform == "cpu" else dtype)
    return y_TF[:T].astype(dtype).reshape(*x_BLD.shape[:-1], -1)


def product(x_TD, weight_FD, spec, dtype=jnp.float32, axis=1):
    """x W^T [T, F] summed in `dtype`, with axis 0 x W; W is cast to x's and gathered over fsdp."""
    weight_FD = shard(weight_FD.astype(x_TD.dtype), *spec)
    axes = (((1,), (axis,)), ((), ()))
    return jax.lax.dot_general(x_TD, weight_FD, axes, preferred_element_type=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def frozen_product(x_TD, weight, spec, dtype, platform):
    """x W^T [T, F] in float32 of an Int8 or Int4. Its gradient is x's alone and keeps no wide W."""
    if isinstance(weight, Int8):  # each q is exact in bfloat16, so the scales multiply the product
        return product(x_TD, weight.q_FD, spec) * weight.scale_F1[:, 0]
    if len(x_TD) <= (256 if platform == "tpu" else 1):
        return int4_product(x_TD, weight, spec)
    return product(x_TD, unpacked(weight, dtype), spec)  # which is written to memory


def int4_product(x_TD, weight, spec):
    """x W^T [T, F] as (q - zero) (scale x) for each group of rows: W is never written to memory."""
    weight = weight._replace(q_FE=shard(weight.q_FE, *spec))
    y_TGS = 0
    for x_TE, (q_GSE, scale_G1E) in zip(jnp.split(x_TD, 2, 1), halves(weight), strict=True):
        scaled_GTE = (x_TE * scale_G1E).astype(x_TD.dtype)
        y_TGS += einsum("GTE,GSE->TGS", scaled_GTE, q_GSE.astype(x_TD.dtype))
    return y_TGS.reshape(len(x_TD), -1)


def _frozen_forward(x_TD, weight, *how):
    return frozen_product(x_TD, weight, *how), weight


def _frozen_backward(spec, dtype, platform, weight, dy_TF):
    """dy W in `dtype`, and no gradient of W."""
    if isinstance(weight, Int8):
        dy_TF = dy_TF * weight.scale_F1[:, 0]
        weight_FD = weight.q_FD
    else:
        weight_FD = unpacked(weight, dtype)
    return product(dy_TF.astype(dtype), weight_FD, spec, axis=0).astype(dtype), None


frozen_product.defvjp(_frozen_forward, _frozen_backward)


# On a mesh (data, fsdp, tensor) tensor splits heads, feed-forward, vocabulary; fsdp the other side,
# which is gathered where the weight is used. All other parameters are small and replicated.
INWARD = ("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
SHARDING = {
    **dict.fromkeys(INWARD, PS("tensor", "fsdp")),
    **dict.fromkeys(("o_proj", "down_proj"), PS("fsdp", "tensor")),
    **dict.fromkeys(("q_bias", "k_bias", "v_bias"), PS("tensor")),
}
BATCH = ("data", "fsdp")  # both axes split the batch


def fit(spec, shape, mesh):
    """The spec without axes that do not divide their dimension: it is not split."""
    fitting = []
    for axes, size in zip(spec, shape, strict=False):
        names = axes if isinstance(axes, tuple) else (axes,)
        devices = math.prod(mesh.shape.get(name, 1) for name in names)
        fitting.append(axes if size % devices == 0 else None)
    return PS(*fitting)


def shard(x, *spec):
    """x with a layout on the mesh in use (jax.set_mesh); without a mesh, x as it is."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, fit(spec, x.shape, mesh))


def shardings(mesh, tree):
    """A NamedSharding for each leaf of a tree of parameters, or of optimizer moments."""

    def layout(path, leaf):  # by the innermost name that SHARDING knows
        spec = PS()
        for key in path:
            spec = SHARDING.get(getattr(key, "key", None), spec)
        return jax.NamedSharding(mesh, fit(spec, leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(layout, tree)


# ---- configurations on the Hub -------------------------------------------------------------------

# fmt: off
HF_KEYS = {  # {field of DreamConfig: key in a config.json}
    "vocab": "vocab_size", "width": "hidden_size", "layers": "num_hidden_layers",
    "heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head_size": "head_dim",
    "ffn": "intermediate_size", "theta": "rope_theta", "positions": "max_position_embeddings",
    "eps": "rms_norm_eps", "tie": "tie_word_embeddings", "mask_id": "mask_token_id",
    "pad_id": "pad_token_id", "bos_id": "bos_token_id", "eos_id": "eos_token_id",
    # of Fast-dLLM v2, our own, of DreamOn, our own, our own, of Nemotron
    "block_length": "bd_size", "shift": "shift", "expand_id": "expand_token_id",
    "hole_masks": "hole_masks", "causal": "causal_context", "rope": "rope_parameters"}
# fmt: on
SIZES = "vocab width layers heads kv_heads head_size ffn".split()
# written if not the default
EXTRAS = {"block_length", "shift", "expand_id", "hole_masks", "causal", "rope"}
OPTIONAL = {"head_size", "tie", "bos_id", "pad_id"} | EXTRAS  # a config.json may leave these out


class Family(typing.NamedTuple):
    """The form of a kind of model on the Hub. Other keys of its config.json are ignored."""

    kind: str  # model_type
    code: str  # its class, in architectures or auto_map
    model: dict  # fields of DreamConfig that are its own
    fixed: dict  # keys that would change the maths, with the value that this file implements
    keys: dict  # {Dream's key: its own}
    mask: str = ""  # MASK in the tokenizer, where config.json leaves out its id


# fmt: off
QWEN2 = {"hidden_act": "silu", "rope_scaling": None, "use_sliding_window": False,
         "attention_dropout": 0, "attention_bias": True}
LLAMA = {"hidden_act": "silu", "rope_scaling": None, "sliding_window": None, "mlp_bias": False,
         "use_sliding_window": False, "attention_bias": False}
LLADA = {  # none may be missing: the defaults of its code are GPT-2's
    "activation_type": "silu", "block_type": "llama", "layer_norm_type": "rms", "rope": True,
    "rope_full_precision": True, "layer_norm_with_affine": True, "block_group_size": 1,
    "multi_query_attention": None,
    **dict.fromkeys(("alibi", "attention_layer_norm", "scale_logits", "input_emb_norm",
                     "include_bias", "include_qkv_bias", "attention_dropout", "embedding_dropout",
                     "residual_dropout", "bias_for_layer_norm"), False)}
LLADA_KEYS = {
    "hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads", "intermediate_size": "mlp_hidden_size",
    "vocab_size": "embedding_size", "max_position_embeddings": "max_sequence_length",
    "tie_word_embeddings": "weight_tying"}
BLOCKS = {"bd_size": "block_size"}
PLAIN = {"bias": False, "shift": False}
SDAR = PLAIN | {"qk_norm": True, "block_length": 4}
DIFFCODER = PLAIN | {"block_length": 4, "mask_id": 5}
NEMOTRON = PLAIN | {"causal": True, "block_length": 32}
FAMILIES = {
    "dream": Family("Dream", "DreamModel", {}, QWEN2, {}),
    "llada": Family("llada", "LLaDAModelLM", PLAIN, LLADA, LLADA_KEYS, "<|mdm_mask|>"),
    "sdar": Family("sdar", "SDARForCausalLM", SDAR, LLAMA, BLOCKS, "<|MASK|>"),
    "stable_diffcoder": Family(
        "llama", "StableDiffcoderForCausalLM", DIFFCODER, LLAMA, BLOCKS, "<[MASK_TOKEN]>"),
    "nemotron": Family(
        "nemotron_labs_diffusion", "NemotronLabsDiffusionModel", NEMOTRON, LLAMA, BLOCKS),
    "fast_dllm_v2": Family(
        "Fast_dLLM_Qwen", "Fast_dLLM_QwenForCausalLM", {"block_length": 32}, QWEN2, {}, "|<MASK>|"),
    "open_dcoder": Family("qwen2", "Qwen2ForCausalLM", {}, QWEN2, {}, "[MASK]"),
}
KNOWN = ", ".join(FAMILIES)
YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "llama_4_scaling_beta")  # see rope_of
# fmt: on


def read_config(folder, meta=None):
    """The DreamConfig in a run's `meta`, or in the folder's config.json; ValueError for others."""
    if meta is None:
        meta = runs.read_json(f"{folder}/config.json")
    if "model" not in meta:
        return config_from_hf(folder)
    try:
        return DreamConfig(**meta["model"])
    except (TypeError, ValueError) as error:
        reason = f"{error}; is it of another version?"
        if "diff" in meta["model"]:
            reason = "it is a PythonCoder (benchmarks.py --model=pythoncoder)"
        raise ValueError(f"{folder} holds none of {KNOWN}: {reason}") from None


def config_from_hf(folder, changes=None):
    """The architecture in the config.json of a Hugging Face folder, with `changes` of its keys."""
    path = f"{folder}/config.json"
    keys = runs.read_json(path) | (changes or {})
    try:
        return config_of(folder, keys)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ValueError(f"{path} does not describe a Dream model: {error}") from None


def config_of(folder, keys):
    """The architecture that the keys of a config.json in `folder` describe."""
    name = family_of(folder, keys)
    if not name:
        raise ValueError(f"it is a {keys.get('model_type')}; dense text models of {KNOWN} are read")
    family = FAMILIES[name]

    # transformers 5 keeps RoPE's settings in a dictionary of their own
    rope = keys.pop("rope_parameters", None) or {}
    keys = {"rope_theta": rope.get("rope_theta")} | keys
    if name == "nemotron" and rope.get("rope_type") == "yarn" and {*YARN[:2]} <= rope.keys():
        keys["rope_parameters"] = [(key, rope[key]) for key in YARN if key in rope]
    elif rope.get("rope_type", "default") != "default":
        keys["rope_scaling"] = rope

    for key, value in family.fixed.items():
        if name == "llada" and key not in keys:
            raise ValueError(f"{key} is missing")
        given = keys.get(key, value)
        if given is None and key == "attention_bias":  # Qwen2's code has one in any case
            continue
        if (given or None) != (value or None):
            raise ValueError(f"{key} is {given!r}, not {value!r}")
    for key, value in keys.items():
        if value and re.search("expert|vision", key):
            raise ValueError(f"{key} asks for another model")

    # LLaDA has its BOS in generation_config.json, SDAR its PAD, DreamOn its expand id
    keys = {key: value for key, value in keys.items() if value is not None}
    sampling = runs.read_about(folder, "generation_config.json")
    for key in ("bos_token_id", "pad_token_id", "expand_token_id"):
        keys.setdefault(key, sampling.get(key))
    # either file may list several ends
    keys["eos_token_id"], *ends = runs.end_ids(keys, sampling) or [None]
    if "mask_token_id" not in keys:
        keys["mask_token_id"] = special_ids(folder).get(family.mask)
    if name == "llada":
        keys.setdefault("n_kv_heads", keys.get("n_heads"))
        keys.setdefault("mlp_hidden_size", int(keys.get("mlp_ratio", 0) * keys.get("d_model", 0)))
        if not isinstance(keys.get("weight_tying"), bool):
            raise ValueError("weight_tying is neither true nor false")

    fields = {"family": name, "ends": ends} | family.model
    for field, key in HF_KEYS.items():
        own = family.keys.get(key, key)
        value = keys.get(own, keys.get(key))
        if value is not None:
            fields[field] = value
        if value == 0 and field in SIZES:
            raise ValueError(f"{own} is 0")
        if field not in fields.keys() | OPTIONAL:
            raise ValueError(f"{own} is missing")
    fields.setdefault("head_size", fields["width"] // fields["heads"])
    fields.setdefault("bos_id", fields["eos_id"])
    fields.setdefault("pad_id", fields["eos_id"])
    return DreamConfig(**fields)


def family_of(folder, keys):
    """The key of FAMILIES for a config.json; "" for others, such as a Qwen2 without MASK."""
    # "Seed" is a former name
    code = json.dumps([keys.get("architectures"), keys.get("auto_map")]).replace("Seed", "Stable")
    for name, family in FAMILIES.items():
        if str(keys.get("model_type")).lower() != family.kind.lower():
            continue
        if name == "open_dcoder" and family.mask not in special_ids(folder):
            continue
        if name == "dream" or family.code in code:
            return name
    return ""


def special_ids(folder):
    """{name: id} of the tokens that the tokenizer in a folder has beside its vocabulary."""
    *_, listed = runs.named_tokens(folder)
    ids = {token.content: i for i, token in listed.items()}
    for token in runs.read_about(folder, "tokenizer.json").get("added_tokens", []):
        ids[token["content"]] = token["id"]
    return ids


def config_to_hf(cfg, dtype="bfloat16"):
    """The config.json of the Hub for this architecture; config_from_hf reads it back."""
    family = FAMILIES[cfg.family]
    keys = {"architectures": [family.code], "model_type": family.kind} | family.fixed
    for name, key in HF_KEYS.items():
        value = getattr(cfg, name)
        if name not in EXTRAS or name in family.model or value != getattr(DreamConfig, name):
            keys[family.keys.get(key, key)] = value
    if cfg.rope:
        yarn = {"rope_type": "yarn", "rope_theta": keys.pop("rope_theta")}
        keys["rope_parameters"] = dict(cfg.rope) | yarn
    if cfg.ends:
        keys["eos_token_id"] = list(cfg.eos_ids)
    return keys | {"vocab_size": cfg.vocab, "torch_dtype": dtype}
