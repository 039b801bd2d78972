"""PythonCoder: a code model with differential attention and a second head. Pure.

The architecture in Flax NNX, its losses, and sampling with its own drafts. The parameters of
all layers are stacked, and the forward pass scans over them: one layer is compiled, not 24.

Letters: B batch, L length, M cache slots, D width, I softmax maps of a head (2 differential, 1
plain), P heads after pairing, J key/value groups, G = P / J, K head size, E value size (2K
differential, K plain), F feed-forward, N layers, V vocabulary, T tokens.

A layer, with n = RMSNorm(x):  h = x + W_o diffattn(n W_q, n W_k, n W_v);  x' = h + W_down(silu(m
W_gate) * m W_up), m = RMSNorm(h). Main head: logits = h_t embed^T (tied). MTP head, for the token
after the next: logits2 = RMSNorm([RMSNorm(h_t); RMSNorm(embed(x_{t+1}))] W_proj) W_head^T.
Refs: Differential Transformer, arXiv:2410.05258; multi-token prediction, arXiv:2404.19737.
"""

import dataclasses
import functools
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as PS

import diffusion
from diff_attention import (
    attention,
    lambda_init,
    lambda_value,
    on_each_device,
    plain_tpu,
    rope_frequencies,
    rope_table,
    rotate,
    training_kernel,
    write,
)


@dataclasses.dataclass(frozen=True)
class Config:
    """The architecture, as a checkpoint stores it."""

    vocab: int = 151_808  # rows of the embedding; Qwen2.5's 151,665 tokens, padded
    width: int = 1536  # of the residual stream
    layers: int = 24
    heads: int = 12  # query heads; two make one differential head
    kv_heads: int = 4  # key/value heads
    head_size: int = 128
    ffn: int = 4096  # width of the feed-forward layer
    theta: float = 500_000.0  # base of the rotary angles
    positions: int = 2048  # longest sequence in training
    yarn_factor: float = 4.0  # inference reaches positions * yarn_factor
    diff: typing.Literal["seed", "paper", "v2", "none"] = "seed"  # floored | paper's | V2 | plain
    mtp: bool = True  # the head that predicts the token after the next
    init_std: typing.Literal["paper", "fan_in"] = "paper"  # of new matrices, see std
    eps: float = 1e-6  # of the norms
    subln_eps: float = 1e-5  # of the norm on each differential head

    @property
    def maps(self):
        return 2 if self.diff in ("seed", "paper") else 1

    def std(self, fan_in):  # standard deviation of a new matrix
        return fan_in**-0.5 if self.init_std == "fan_in" else 0.02


CONFIGS = {
    "tiny": Config(2048, 128, 4, 4, 2, head_size=32, ffn=384, positions=512, init_std="fan_in"),
    "small": Config(8192, 512, 8, 8, 4, head_size=64, ffn=1408, positions=1024, init_std="fan_in"),
    "300m": Config(32_768, 1024, 20, 8, 4, head_size=128, ffn=2816, init_std="fan_in"),
    "1b": Config(init_std="fan_in"),
}


@dataclasses.dataclass(frozen=True)
class Compute:
    """How to run the model, as opposed to what it is: nothing here changes a checkpoint."""

    dtype: typing.Any = jnp.float32  # of activations and of weights inside matmuls
    kernel: typing.Literal["", "tpu", "gpu"] = ""  # of attention in training; "": einsums
    tpu: bool = False  # layouts for a TPU
    remat: typing.Literal["none", "qkvo", "full"] = "none"  # what is recomputed backwards
    dropout: float = 0.0  # of attention and feed-forward, where a call gives a key
    block: int = 128  # queries per block of the einsum attention
    loss_tokens: int = 0  # tokens per chunk of the cross-entropy; 0: TPU 8,192, elsewhere 2,048
    yarn: bool = False  # YaRN's rotary table, for texts longer than cfg.positions


# "qkvo" keeps the inputs and the output of attention, "full" nothing
REMAT = {
    "full": None,
    "qkvo": jax.checkpoint_policies.save_only_these_names("q", "k", "v", "attn", "lse"),
}


# ---- the parts of a layer -----------------------------------------------------------------------


def rms_norm(x, weight, eps):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32, returned in x's dtype."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)
    return (normed * weight).astype(x.dtype)


def dropout(x_BLD, row_B, seed_2, rate):
    """Zero each element with probability `rate`, scale the rest by 1 / (1 - rate); seed_2 None: x.

    The mask is a hash (murmur3's finaliser) of two seeds, the row's number in the optimizer step
    and the index in the row, so that it does not depend on how rows are split over devices.
    """
    if seed_2 is None:
        return x_BLD
    _, L, D = x_BLD.shape
    index_LD = jnp.arange(L * D, dtype=jnp.uint32).reshape(L, D)
    row_B11 = row_B.astype(jnp.uint32)[:, None, None] * jnp.uint32(0x9E3779B9)
    # multiplications spread each bit upwards, shifts downwards
    bits = index_LD ^ (row_B11 + seed_2[0])
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = ((bits ^ (bits >> 13)) + seed_2[1]) * jnp.uint32(0xC2B2AE35)
    bits = bits ^ (bits >> 16)
    kept = bits >= jnp.uint32(round(rate * 2**32))
    return jnp.where(kept, x_BLD * (1 / (1 - rate)), 0)


def linear(x_BLD, weight_DF, tpu=False):
    """x W over one axis of tokens: with two, XLA on a CPU copies arrays for W's gradient."""
    if tpu:
        return x_BLD @ weight_DF
    y_TF = x_BLD.reshape(-1, x_BLD.shape[-1]) @ weight_DF
    return y_TF.reshape(*x_BLD.shape[:-1], -1)


# ---- the model ----------------------------------------------------------------------------------


def normal(rngs, std, *shape):
    """A new parameter, normally distributed with standard deviation `std`."""
    return nnx.Param(std * jax.random.normal(rngs.params(), shape))


def ones(*shape):
    """A new parameter of ones."""
    return nnx.Param(jnp.ones(shape))


class Block(nnx.Module):
    """All layers, each parameter [layers, ...]; it is called with the parameters of one.

    Query heads 2p and 2p + 1 make differential head p, which reads key heads 2j and 2j + 1 and the
    value [v_2j; v_2j+1] of its group j = p // G. Ref: microsoft/unilm, multihead_flashdiff_1.
    """

    def __init__(self, cfg, rngs, compute):
        self.cfg = cfg
        self.compute = compute
        N = cfg.layers
        D = cfg.width
        Q = cfg.heads * cfg.head_size
        C = cfg.kv_heads * cfg.head_size
        out = Q // 2 if cfg.diff == "v2" else Q

        def stacked(*shape, std=None):
            return normal(rngs, std or cfg.std(shape[0]), N, *shape)

        self.attn_norm = ones(N, D)
        self.ffn_norm = ones(N, D)
        self.wq = stacked(D, Q)
        self.wk = stacked(D, C)
        self.wv = stacked(D, C)
        # wo and w_down are smaller, as the residual stream is the sum of their 2N products
        self.wo = stacked(out, D, std=cfg.std(out) / math.sqrt(2 * N))
        self.w_gate = stacked(D, cfg.ffn)
        self.w_up = stacked(D, cfg.ffn)
        self.w_down = stacked(cfg.ffn, D, std=cfg.std(cfg.ffn) / math.sqrt(2 * N))
        if cfg.maps == 2:
            std = 0.1 if cfg.diff == "paper" else 0.01
            self.lambda_q1 = stacked(cfg.head_size, std=std)
            self.lambda_k1 = stacked(cfg.head_size, std=std)
            self.lambda_q2 = stacked(cfg.head_size, std=std)
            self.lambda_k2 = stacked(cfg.head_size, std=std)
            self.subln = ones(N, 2 * cfg.head_size)
        if cfg.diff == "v2":
            self.w_lambda = stacked(D, cfg.heads // 2)

    def __call__(
        self, x_BLD, layer, rope, index_BL, start_BL, row_B=None, seed_32=None, cache=None
    ):
        """One layer: (new x, new cache). Queries attend to slots start_BL to index_BL, None: own.

        seed_32 None: no dropout. New keys and values go to slots index_BL of the cache.
        """
        rate = self.compute.dropout
        seeds = (None, None, None) if seed_32 is None else seed_32

        n_BLD = self.barrier(rms_norm(x_BLD, self.attn_norm[...], self.cfg.eps))
        attended_BLD, cache = self.attend(n_BLD, layer, rope, index_BL, start_BL, cache)
        x_BLD = x_BLD + dropout(attended_BLD, row_B, seeds[0], rate)

        # Feed-forward
        tpu = self.compute.tpu
        n_BLD = self.barrier(rms_norm(x_BLD, self.ffn_norm[...], self.cfg.eps))
        gate_BLF = linear(n_BLD, self.weight("w_gate"), tpu)
        up_BLF = linear(n_BLD, self.weight("w_up"), tpu)
        hidden_BLF = self.barrier(dropout(jax.nn.silu(gate_BLF) * up_BLF, row_B, seeds[1], rate))
        down_BLD = linear(hidden_BLF, self.weight("w_down"), tpu)
        return shard(x_BLD + dropout(down_BLD, row_B, seeds[2], rate), batch_axes()), cache

    def attend(self, n_BLD, layer, rope, index_BL, start_BL, cache):
        """(W_o diffattn(n W_q, n W_k, n W_v) [B, L, D], new cache)."""
        cfg = self.cfg
        tpu = self.compute.tpu
        B, L, D = n_BLD.shape
        I = cfg.maps
        K = cfg.head_size

        def heads(w_DPIK):
            if tpu:  # straight to head-major: no transpose of activations
                return jnp.einsum("BLD,DIPK->BIPLK", n_BLD, w_DPIK.swapaxes(1, 2))
            y_BLPIK = linear(n_BLD, w_DPIK.reshape(D, -1)).reshape(B, L, *w_DPIK.shape[1:])
            return y_BLPIK.transpose(0, 3, 2, 1, 4)

        # From heads 2p, 2p + 1 side by side to map 1 of all pairs, then map 2. The two values of a
        # pair stay one of size 2K.
        q_BIPLK = heads(self.weight("wq").reshape(D, -1, I, K))
        k_BIJLK = heads(self.weight("wk").reshape(D, -1, I, K))
        v_B1JLE = heads(self.weight("wv").reshape(D, -1, 1, I * K))
        q_BIPLK = checkpoint_name(q_BIPLK, "q")
        k_BIJLK = checkpoint_name(k_BIJLK, "k")
        v_BJLE = checkpoint_name(v_B1JLE[:, 0], "v")
        cos, sin = (table_BLK[:, None, None] for table_BLK in rope)
        q_BIPLK = rotate(q_BIPLK, cos, sin, tpu)
        k_BIJLK = rotate(k_BIJLK, cos, sin, tpu)
        if cache is not None:
            cache = write(cache, k_BIJLK, v_BJLE, index_BL)
            k_BIJLK, v_BJLE = cache

        # The output of each head, in training by a fused kernel where one fits.
        floor = cfg.diff == "seed"
        lam = jnp.float32(0)
        init = lambda_init(layer)
        if I == 2:
            vectors = (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2)
            lam = lambda_value(*(vector_K[...] for vector_K in vectors), init, clamp=floor)
        kernel = None
        if index_BL is None:  # in training
            kernel = training_kernel(self.compute.kernel, I, K, floor)
        inputs = (q_BIPLK, k_BIJLK, v_BJLE, lam)
        if kernel:
            kernel_here = on_each_device(functools.partial(kernel, floor=floor), batch_axes())
            o_BPLE = kernel_here(*inputs, start_BL)
        else:
            o_BPLE = attention(*inputs, index_BL, start_BL, floor, block=self.compute.block)
        if kernel is not plain_tpu:  # it names its results; with two names remat keeps them twice
            o_BPLE = checkpoint_name(o_BPLE, "attn")

        # Differential heads are normed; 1 - lambda_init keeps gradients near a plain transformer's.
        # V2 subtracts a pair of heads, with a lambda per token and pair from the layer's input.
        if I == 2:
            o_BPLE = rms_norm(o_BPLE, self.subln[...], cfg.subln_eps)
            o_BPLE = o_BPLE * (1 - init).astype(o_BPLE.dtype)
        elif cfg.diff == "v2":
            gate_BLP = jax.nn.sigmoid(linear(n_BLD, self.weight("w_lambda")).astype(jnp.float32))
            gate_BPL1 = gate_BLP.swapaxes(1, 2)[..., None].astype(o_BPLE.dtype)
            o_BPLE = o_BPLE[:, 0::2] - gate_BPL1 * o_BPLE[:, 1::2]

        wo_QD = self.weight("wo")
        if tpu:  # from head-major, without a transpose
            wo_PED = wo_QD.reshape(o_BPLE.shape[1], -1, D)
            return jnp.einsum("BPLE,PED->BLD", self.barrier(o_BPLE), wo_PED), cache
        return linear(o_BPLE.swapaxes(1, 2).reshape(B, L, -1), wo_QD), cache

    def weight(self, name):
        """A matrix in the activations' dtype, gathered over fsdp."""
        spec = [axis if axis == "tensor" else None for axis in SHARDING.get(name, ())[1:]]
        return shard(getattr(self, name)[...].astype(self.compute.dtype), *spec)

    def barrier(self, x):
        """x; on a TPU no fusion crosses it, which keeps norms out of matmuls (4 % of a step)."""
        return jax.lax.optimization_barrier(x) if self.compute.tpu else x


class MTP(nnx.Module):
    """The second head: predicts x_{t+2} from the state at x_t and the embedding of x_{t+1}."""

    def __init__(self, cfg, rngs):
        D = cfg.width
        self.norm_hidden = ones(D)
        self.norm_embed = ones(D)
        self.norm_out = ones(D)
        self.proj = normal(rngs, cfg.std(2 * D), 2 * D, D)
        self.head = normal(rngs, 0.02, cfg.vocab, D)


# The backward scan adds the gradients of micro-batches to their sums in place: the sums pass
# forward unchanged, their cotangent starts as their value, and each layer adds its gradient. A
# plain scan would stack the gradients of all layers first: 4 % of a step.


@jax.custom_gradient
def start_gradient(sums, x):
    """x; backwards, the cotangent of sums starts as sums."""

    def backward(dx):
        return sums, dx

    return x, backward


@jax.custom_gradient
def add_gradient(sums, params, layer):
    """(params, sums); backwards, row `layer` of sums' cotangent gets the gradient of params."""

    def backward(cotangents):
        dparams, dsums = cotangents
        return jax.tree.map(lambda s, d: s.at[layer].add(d), dsums, dparams), None, None

    return (params, sums), backward


call_layer = jax.jit(Block.__call__)  # without dropout; traced once for all layers


class PythonCoder(nnx.Module):
    def __init__(self, cfg, rngs, compute=None):
        self.cfg = cfg
        self.compute = compute or Compute()
        self.embed = normal(rngs, 0.02, cfg.vocab, cfg.width)
        self.layers = Block(cfg, rngs, self.compute)
        self.norm = ones(cfg.width)
        if cfg.mtp:
            self.mtp = MTP(cfg, rngs)

    def rope(self, position_BL):
        cfg = self.cfg
        factor = cfg.yarn_factor if self.compute.yarn else 1.0
        frequencies = rope_frequencies(cfg.head_size, cfg.theta, factor, cfg.positions)
        return rope_table(position_BL, *frequencies)

    def lookup(self, token_BL):
        """Embeddings [B, L, D] in the activations' dtype."""
        table_VD = self.embed[...]
        # A split table is cast before it is gathered, which halves the traffic. A whole one is cast
        # after the look-up, so that its gradient is scattered in float32.
        if batch_axes():
            table_VD = shard(table_VD.astype(self.compute.dtype), None)
        # a size of 0.02 suits the tied head, 1 suits the layers
        scale = 50.0 if self.cfg.init_std == "fan_in" else 1.0
        return shard(table_VD[token_BL].astype(self.compute.dtype) * scale, batch_axes())

    def hidden(self, embed_BLD, segment_BL=None, position_BL=None, key=None, row_B=None, sums=None):
        """Final-normed hidden states [B, L, D] of whole rows, from their embeddings.

        segment_BL numbers the documents packed into a row, position_BL restarts in each. `key`
        turns dropout on; row_B numbers the rows within the optimizer step. With `sums`, a tree like
        the layers', the gradient of sums is sums + that of the layers, whose own is 0.
        """
        B, L, _ = embed_BLD.shape
        slot_L = jnp.arange(L)
        start_BL = jnp.zeros((B, L), jnp.int32)
        if segment_BL is not None:
            border_BL = jnp.diff(segment_BL, prepend=segment_BL[:, :1]) != 0
            start_BL = jax.lax.cummax(jnp.where(border_BL, slot_L, 0), axis=1)  # of documents
        if position_BL is None:
            position_BL = slot_L[None]
        rope = self.rope(position_BL)
        if row_B is None:
            row_B = jnp.arange(B)
        seed_N32 = None  # two seeds for each of the three dropouts of each layer
        if key is not None and self.compute.dropout:
            seed_N32 = jax.random.bits(key, (self.cfg.layers, 3, 2), jnp.uint32)
        graph, params = nnx.split(self.layers)

        def apply_layer(x_BLD, params, layer, seed_32):
            return nnx.merge(graph, params)(x_BLD, layer, rope, None, start_BL, row_B, seed_32)[0]

        remat = self.compute.remat
        if remat != "none":
            apply_layer = jax.checkpoint(apply_layer, policy=REMAT[remat], prevent_cse=False)

        def body(carry, inputs):
            x_BLD, sums = carry
            params, layer, seed_32 = inputs
            if sums is not None:
                params, sums = add_gradient(sums, params, layer)
            return (apply_layer(x_BLD, params, layer, seed_32), sums), None

        params = nnx.to_pure_dict(params)
        if sums is not None:
            params = jax.lax.stop_gradient(params)
        inputs = (params, jnp.arange(self.cfg.layers), seed_N32)
        (x_BLD, sums), _ = jax.lax.scan(body, (embed_BLD, sums), inputs)
        if sums is not None:
            x_BLD = start_gradient(sums, x_BLD)
        return rms_norm(x_BLD, self.norm[...], self.cfg.eps)

    def mtp_hidden(self, hidden_BLD, next_embed_BLD):
        """Input [B, L, D] of the MTP head at t: from the state at t and the embedding of t + 1."""
        mtp = self.mtp
        eps = self.cfg.eps
        h_BLD = rms_norm(hidden_BLD, mtp.norm_hidden[...], eps)
        e_BLD = rms_norm(next_embed_BLD, mtp.norm_embed[...], eps)
        proj = shard(mtp.proj[...].astype(h_BLD.dtype), None)
        return rms_norm(linear(jnp.concatenate([h_BLD, e_BLD], -1), proj), mtp.norm_out[...], eps)

    def logits(self, hidden_BLD, head="embed"):
        """Float32 logits [B, L, V] of the main head, or of head="mtp"; for few positions."""
        weight_VD = self.embed if head == "embed" else self.mtp.head
        weight_VD = weight_VD[...].astype(hidden_BLD.dtype)
        return jnp.einsum("BLD,VD->BLV", hidden_BLD, weight_VD, preferred_element_type=jnp.float32)

    def losses(self, token_BL, segment_BL, position_BL, key=None, row_B=None, mtp=True, sums=None):
        """Summed losses (main, mtp) in nats, over `target_masks`. For the others see `hidden`."""
        embed_BLD = self.lookup(token_BL)
        chunk = self.compute.loss_tokens or (8192 if self.compute.tpu else 2048)
        hidden_BLD = self.hidden(embed_BLD, segment_BL, position_BL, key, row_B, sums)
        # labels are the tokens one and two positions on; the masks exclude those that wrap around
        main_BL, mtp_BL = target_masks(segment_BL)
        next_BL = jnp.roll(token_BL, -1, 1)
        main = cross_entropy(hidden_BLD, self.embed[...], next_BL, main_BL, chunk)
        if not (mtp and self.cfg.mtp):
            return main, jnp.float32(0)
        draft_BLD = self.mtp_hidden(hidden_BLD, jnp.roll(embed_BLD, -1, 1))
        after_BL = jnp.roll(token_BL, -2, 1)
        return main, cross_entropy(draft_BLD, self.mtp.head[...], after_BL, mtp_BL, chunk)

    def apart(self):
        """The layers one by one, sliced out of the stacked arrays, which XLA copies."""
        return [jax.tree.map(lambda a, i=i: a[i], self.layers) for i in range(self.cfg.layers)]

    def step(self, cache, token_BL, index_BL, *layers):
        """(hidden states [B, L, D], new cache) of tokens at slots and positions index_BL."""
        x_BLD = self.lookup(token_BL)
        rope = self.rope(index_BL)
        start_BL = jnp.zeros_like(index_BL)
        cache = list(cache)
        # a cache per layer: slicing a stacked one would copy it for every token
        for i, layer in enumerate(layers or self.apart()):
            x_BLD, cache[i] = call_layer(layer, x_BLD, i, rope, index_BL, start_BL, cache=cache[i])
        return rms_norm(x_BLD, self.norm[...], self.cfg.eps), cache

    def draft(self, hidden_B1D, token_B1):
        """Logits [B, 1, V] of the token after token_B1, from the state that predicted token_B1."""
        return self.logits(self.mtp_hidden(hidden_B1D, self.lookup(token_B1)), "mtp")

    def new_cache(self, batch, slots):
        """Empty keys and values, a pair for each layer."""
        I = self.cfg.maps
        J = self.cfg.kv_heads // I
        K = self.cfg.head_size
        dtype = self.compute.dtype
        shapes = ((batch, I, J, slots, K), (batch, J, slots, I * K))
        return [tuple(jnp.zeros(x, dtype) for x in shapes) for _ in range(self.cfg.layers)]


# ---- losses -------------------------------------------------------------------------------------


def target_masks(segment_BL):
    """Float32 masks [B, L] of the positions whose target, 1 or 2 on, is of their document."""

    def mask(ahead):
        later_BL = jnp.zeros_like(segment_BL).at[..., :-ahead].set(segment_BL[..., ahead:])
        return ((segment_BL == later_BL) & (segment_BL > 0)).astype(jnp.float32)

    return mask(1), mask(2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def cross_entropy(hidden_BLD, weight_VD, label_BL, mask_BL, chunk_tokens=2048):
    """sum over mask of [logsumexp(z) - z_label], z = hidden weight^T: float32, in nats.

    Never holds [B, L, V]: a scan over chunks makes their logits, and at once their gradients, dz =
    mask (softmax(z) - onehot): three vocabulary matmuls, where recomputing would take four.
    """
    # where nobody wants the gradients the compiler drops them
    return _loss_and_gradients(hidden_BLD, weight_VD, label_BL, mask_BL, chunk_tokens)[0]


def _loss_and_gradients(hidden_BLD, weight_VD, label_BL, mask_BL, chunk_tokens):
    """(loss, (dhidden, dweight)). On a mesh each device sums over its own rows."""
    inputs = (hidden_BLD, shard(weight_VD.astype(hidden_BLD.dtype), "tensor"), label_BL, mask_BL)
    axes = batch_axes()
    if not axes:
        return _of_rows(*inputs, chunk_tokens)

    def of_device(*inputs):
        loss, (dhidden_BLD, dweight_VD) = _of_rows(*inputs, chunk_tokens)
        loss, dweight_VD = jax.lax.psum((loss, dweight_VD), axes)
        return loss, (dhidden_BLD, dweight_VD)

    rows = PS(axes)
    on_all = jax.shard_map(
        of_device,
        in_specs=(rows, PS(), rows, rows),
        out_specs=(PS(), (rows, PS())),
        axis_names=set(axes),
        check_vma=False,
    )
    return on_all(*inputs)


def _of_rows(hidden_BLD, weight_VD, label_BL, mask_BL, chunk_tokens):
    """(loss, (dhidden, dweight)) of the rows of a device, in chunks of C positions of each."""
    B, L, D = hidden_BLD.shape
    C = min(L, max(1, chunk_tokens // B))
    while L % C:
        C -= 1
    n = L // C

    # [n, T, ...], T = B C: with one axis of tokens each product is one plain matmul
    def chunks(x_BL):
        x_nBC = x_BL.reshape(B, n, C, *x_BL.shape[2:]).swapaxes(0, 1)
        return x_nBC.reshape(n, B * C, *x_BL.shape[2:])

    carry = (jnp.float32(0), jnp.zeros(weight_VD.shape, jnp.float32))
    step = functools.partial(_of_chunk, weight_VD)
    inputs = jax.tree.map(chunks, (hidden_BLD, label_BL, mask_BL))
    (loss, dweight_VD), dhidden_nTD = jax.lax.scan(step, carry, inputs)
    dhidden_BLD = dhidden_nTD.reshape(n, B, C, D).swapaxes(0, 1).reshape(B, L, D)
    # the one-hot part of dweight is a scatter
    dweight_VD = dweight_VD.at[label_BL].add(-hidden_BLD.astype(jnp.float32) * mask_BL[..., None])
    return loss, (dhidden_BLD, dweight_VD)


def _of_chunk(weight_VD, carry, chunk):
    """A step of the scan: ((loss, dweight without its one-hot part) so far, dhidden)."""
    loss, dweight_VD = carry
    h_TD, label_T, mask_T = chunk
    # e^(logit - label's logit), whose sum is 1 / p(label). As no maximum comes first, a TPU sums
    # while it multiplies. The bound of 75 keeps the sum over 10^5 ids finite.
    row_TD = weight_VD[label_T]
    target_T = jnp.sum(h_TD.astype(jnp.float32) * row_TD.astype(jnp.float32), -1)
    logits_TV = jnp.einsum("TD,VD->TV", h_TD, weight_VD).astype(jnp.float32)
    e_TV = jnp.exp(jnp.minimum(logits_TV - target_T[:, None], 75)).astype(h_TD.dtype)
    sum_T = jnp.sum(e_TV, -1, dtype=jnp.float32)
    loss += jnp.sum(jnp.log(sum_T) * mask_T)
    # dhidden = dz W: softmax = e / sum, less the label's row
    scale_T1 = (mask_T / sum_T)[:, None]
    dh_TD = jnp.einsum("TV,VD->TD", e_TV, weight_VD, preferred_element_type=jnp.float32) * scale_T1
    dh_TD -= row_TD * mask_T[:, None]
    # dweight = dz^T hidden, the dense part
    scaled_TD = (h_TD * scale_T1).astype(h_TD.dtype)
    dweight_VD += jnp.einsum("TV,TD->VD", e_TV, scaled_TD, preferred_element_type=jnp.float32)
    return (loss, dweight_VD), dh_TD.astype(h_TD.dtype)


def _cross_entropy_backward(chunk_tokens, gradients, dloss):
    dhidden_BLD, dweight_VD = gradients
    return dhidden_BLD * dloss.astype(dhidden_BLD.dtype), dweight_VD * dloss, None, None


cross_entropy.defvjp(_loss_and_gradients, _cross_entropy_backward)


# ---- parameters, and their layouts on a mesh of devices -----------------------------------------


def new_params(cfg, seed):
    """Fresh float32 parameters: {"embed", "layers": {"wq", ...}, "norm", "mtp"}."""
    return nnx.to_pure_dict(nnx.state(PythonCoder(cfg, nnx.Rngs(seed), Compute())))


@functools.lru_cache
def graph_of(cfg, compute):
    """The model without parameters: nnx.merge(graph_of(cfg, compute), params) is a PythonCoder."""
    return nnx.split(nnx.eval_shape(lambda: PythonCoder(cfg, nnx.Rngs(0), compute)))[0]


@functools.lru_cache
def param_shapes(cfg):
    return jax.eval_shape(functools.partial(new_params, cfg, 0))


def count_params(cfg):
    return sum(x.size for x in jax.tree.leaves(param_shapes(cfg)))


def flops_per_token(cfg, length):
    """Training FLOPs of a token in a row of `length`: 6 per matmul parameter, and attention."""
    leaves = jax.tree_util.tree_leaves_with_path(param_shapes(cfg))
    matmul = sum(leaf.size for path, leaf in leaves if path[-1].key in {*SHARDING, "w_lambda"})
    # 4K per head and query-key pair, three times that with the backward pass, over length / 2 keys
    return 6 * matmul + 3 * cfg.layers * cfg.heads * 4 * cfg.head_size * length / 2


def read_config(folder, meta):
    """The Config of a checkpoint in `folder`, from its metadata. ValueError for another family."""
    try:
        for name in "vocab width layers heads kv_heads head_size ffn".split():
            if meta["model"].get(name, 1) < 1:
                raise ValueError(f"{name} is below 1")
        return Config(**meta["model"])
    except (KeyError, TypeError, ValueError) as error:
        advice = "is it a Dream (benchmarks.py --model=dream), or of another version?"
        raise ValueError(f"{folder} holds no PythonCoder ({error}); {advice}") from None


# On a mesh (data, fsdp, tensor) tensor splits heads, feed-forward, vocabulary; fsdp the other side,
# which is gathered where the weight is used. All other parameters are small and replicated.
SHARDING = {
    **dict.fromkeys(("embed", "head"), PS(("tensor", "fsdp"), None)),
    **dict.fromkeys(("wq", "wk", "wv", "w_gate", "w_up"), PS(None, "fsdp", "tensor")),
    **dict.fromkeys(("wo", "w_down"), PS(None, "tensor", "fsdp")),
    "proj": PS("fsdp", None),
}
BATCH = ("data", "fsdp")  # both axes split the batch


def shard(x, *spec):
    """x with a layout on the mesh in use (jax.set_mesh); without a mesh, x as it is."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, PS(*spec))


def batch_axes():
    """The axes of the mesh that split the batch; None on one device, or in shard_map over them."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.size < 2 or set(BATCH) & set(mesh.manual_axes) else BATCH


def shardings(mesh, tree):
    """A NamedSharding for each leaf of a tree of parameters, or of optimizer moments."""

    def layout(path, _):  # by the innermost name that SHARDING knows
        spec = PS()
        for key in path:
            spec = SHARDING.get(getattr(key, "key", None), spec)
        return jax.NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(layout, tree)


# ---- sampling -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sampling:
    temperature: float = 0.0  # 0 takes the likeliest token
    top_k: int = 0  # keep the k likeliest tokens; 0 keeps all
    top_p: float = 1.0  # keep the smallest set of tokens whose probability reaches top_p
    vocab: int = 0  # ids from here on are no tokens and never drawn; 0: all are tokens
    eos_ids: tuple[int, ...] = ()  # each ends a text
    no_repeat_ngram: int = 0  # no n-gram of this length occurs twice in a text; 0: off
    speculate: bool = True  # let the MTP head draft every second token


def probabilities(logits_V, rule):
    """Float32 probabilities [..., V] after temperature (0: one-hot), top-k, top-p."""
    V = logits_V.shape[-1]
    if rule.vocab:
        logits_V = jnp.where(jnp.arange(V) < rule.vocab, logits_V, -jnp.inf)
    if rule.temperature == 0:
        return jax.nn.one_hot(diffusion.sample_tokens(logits_V, None, 0), V)
    width = 1 if jax.default_backend() == "cpu" else 3  # for speed alone
    kept = diffusion.filter_logits(logits_V, rule.temperature, rule.top_k, rule.top_p, width=width)
    return diffusion.softmax(kept)


def without_repeats(logits_BV, token_BM, length_B, n):
    """Logits of the token after token_BM[:, :length_B], -inf where it would repeat an n-gram."""
    if n == 0:
        return logits_BV
    row_B1 = jnp.arange(len(length_B))[:, None]
    index_M = jnp.arange(token_BM.shape[1])
    back_N = jnp.arange(1, n)
    # True at tokens that follow an earlier copy of the last n - 1 tokens
    last_BN = token_BM[row_B1, length_B[:, None] - back_N]
    followed_BM = (token_BM[:, index_M[:, None] - back_N] == last_BN[:, None]).all(-1)
    followed_BM &= (index_M >= n - 1) & (index_M < length_B[:, None])
    seen_BV = jnp.zeros(logits_BV.shape, bool).at[row_B1, token_BM].max(followed_BM)
    return jnp.where(seen_BV, -jnp.inf, logits_BV)


def draw(p_BV, key, position_B, rule):
    """The token of each row at its position from unnormalised probabilities.

    Its noise depends on key, row and position alone. A draft is accepted where it is what is drawn,
    at most 0.2 % rarer than by min(1, p/q), and changes no text. Ref: arXiv:2408.07978.
    """
    key_B = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(p_BV)))
    u_BV = uniform(key_B, position_B, p_BV.shape[-1])
    return diffusion.sample_tokens(jnp.log(p_BV), u_BV, rule.temperature > 0)


def uniform(key_B, position_B, V):
    """Numbers in (0, 1) for each token at a position of each row, [B, V]."""
    key_B = jax.vmap(jax.random.fold_in)(key_B, position_B)
    return jax.vmap(lambda key: jax.random.uniform(key, (V,), minval=2**-126))(key_B)


def next_token(logits_BV, token_BM, length_B, key, rule):
    """The token of each row after token_BM[:, :length_B]."""
    logits_BV = without_repeats(logits_BV, token_BM, length_B, rule.no_repeat_ngram)
    return draw(probabilities(logits_BV, rule), key, length_B, rule)


def ends(token_B, rule):
    """Whether each token ends a text."""
    return jnp.isin(token_B, jnp.array(rule.eos_ids, jnp.int32))


@functools.partial(jax.jit, static_argnames=("slots", "rule"))
def start(model, prompt_BL, length_B, limit_B, key, slots, rule, layers=()):
    """The state that `advance` takes: one pass over prompts of length_B tokens, and one token each.

    A row ends at limit_B < slots tokens, or after one of rule.eos_ids.
    """
    B, L = prompt_BL.shape
    row_B = jnp.arange(B)
    slot_BL = jnp.broadcast_to(jnp.arange(L), (B, L))
    hidden_BLD, cache = model.step(model.new_cache(B, slots), prompt_BL, slot_BL, *layers)
    hidden_B1D = hidden_BLD[row_B, length_B - 1][:, None]  # of each prompt's last token
    first_B = next_token(model.logits(hidden_B1D)[:, 0], prompt_BL, length_B, key, rule)
    token_BM = jnp.pad(prompt_BL, ((0, 0), (0, slots - L))).at[row_B, length_B].set(first_B)
    state = {
        "token_BM": token_BM,
        "length_B": length_B + 1,
        "limit_B": limit_B,
        "done_B": ends(first_B, rule) | (length_B + 1 >= limit_B),
        "cache": cache,
        "key": key,
        "passes": 0,  # left to `advance`
        "forwards_B": (limit_B > length_B).astype(jnp.int32),
        "accepted_B": jnp.zeros(B, jnp.int32),  # drafts
    }
    if rule.speculate:
        logits_BV = model.draft(hidden_B1D, first_B[:, None])[:, 0]
        state["draft_B"] = next_token(logits_BV, token_BM, length_B + 1, key, rule)
    return state


@jax.jit
def apart(model):
    """The layers for step(), copied once. A CPU may not hold a large model twice: then none."""
    if jax.default_backend() == "cpu" and count_params(model.cfg) > 2e8:
        return ()
    return model.apart()


@functools.partial(jax.jit, static_argnames="rule", donate_argnames="state")
def advance(model, state, passes, rule, layers=()):
    """Up to `passes` further forward passes over all rows, of one or two new tokens per row.

    With speculation a pass reads the last token and the draft of the next: where the draft is
    accepted, its position gives one more. The next pass overwrites a rejected draft's cache slot.
    """
    row_B = jnp.arange(len(state["length_B"]))

    def body(state):
        token_BM, length_B, done_B = state["token_BM"], state["length_B"], state["done_B"]
        key = state["key"]

        # The input is the last token, and the draft of the next one (L = 2), taken for now.
        L = 1 + rule.speculate
        if rule.speculate:
            token_BM = token_BM.at[row_B, length_B].set(state["draft_B"])
        index_BL = length_B[:, None] + jnp.arange(L)
        input_BL = token_BM[row_B[:, None], index_BL - 1]
        hidden_BLD, cache = model.step(state["cache"], input_BL, index_BL - 1, *layers)
        logits_BLV = model.logits(hidden_BLD)
        texts = [(logits_BLV[:, i], token_BM, length_B + i) for i in range(L)]
        new_BL = jnp.stack([next_token(*text, key, rule) for text in texts], 1)
        token_BM = token_BM.at[row_B[:, None], index_BL].set(new_BL)
        newest_B = new_BL[:, 0]
        extra_B = 0
        if rule.speculate:
            # The token after the draft counts where the draft is what was drawn.
            accepted_B = newest_B == state["draft_B"]
            goes_on_B = ~ends(newest_B, rule) & (length_B + 1 < state["limit_B"])
            extra_B = (accepted_B & goes_on_B).astype(jnp.int32)
            # Draft the token after the newest, from the hidden state that predicted the newest.
            newest_B = new_BL[row_B, extra_B]
            hidden_B1D = hidden_BLD[row_B, extra_B][:, None]
            logits_BV = model.draft(hidden_B1D, newest_B[:, None])[:, 0]
            position_B = length_B + 1 + extra_B
            state["draft_B"] = next_token(logits_BV, token_BM, position_B, key, rule)
            state["accepted_B"] += accepted_B & ~done_B
        length_B = jnp.where(done_B, length_B, length_B + 1 + extra_B)
        return state | {
            "cache": cache,
            "passes": state["passes"] - 1,
            "token_BM": token_BM,
            "length_B": length_B,
            "done_B": done_B | ends(newest_B, rule) | (length_B >= state["limit_B"]),
            "forwards_B": state["forwards_B"] + ~done_B,
        }

    def goes_on(state):
        return (state["passes"] > 0) & ~jnp.all(state["done_B"])

    return jax.lax.while_loop(goes_on, body, state | {"passes": passes})


def generate(model, prompts, max_new, rule, key, on_tokens=None, chunk=16):
    """Continue prompts, lists of ids: ([new ids of each], {"forwards", "accepted", "tokens"}).

    Lengths are padded to powers of two, so that few shapes are compiled. After every `chunk`
    forward passes on_tokens(texts so far) may print, or return True to end the call. Above
    cfg.positions the rotary table is YaRN's; ValueError where that ends, too.
    """
    cfg = model.cfg
    length_B = np.array([*map(len, prompts)], np.int32)
    longest = int(length_B.max()) + max_new
    reach = int(cfg.positions * cfg.yarn_factor)
    if longest > reach:
        raise ValueError(f"{longest} tokens do not fit: the model reaches {reach}; lower max_new")
    if length_B.min() == 0:
        raise ValueError("an empty prompt: give at least one token")

    # powers of two, 32 at least
    slots, L = (1 << max(5, (n - 1).bit_length()) for n in (longest + 2, int(length_B.max())))
    limit_B = length_B + max_new
    if jax.default_backend() == "tpu" and len(prompts) == 1:  # two rows are faster there
        length_B, limit_B = np.append(length_B, 1), np.append(limit_B, 1)
    prompt_BL = np.zeros((len(length_B), L), np.int32)
    for i, prompt in enumerate(prompts):
        prompt_BL[i, : len(prompt)] = prompt
    # The rotary table is chosen once, for the longest text: a cache holds rotated keys.
    compute = dataclasses.replace(model.compute, yarn=longest > cfg.positions)
    model = nnx.merge(graph_of(cfg, compute), nnx.state(model))
    layers = apart(model)
    state = start(model, prompt_BL, length_B, limit_B, key, slots, rule, layers)
    while True:  # waits for the device once per chunk
        token_BM, end_B = np.asarray(state["token_BM"]), np.asarray(state["length_B"])
        texts = [token_BM[i, len(x) : end_B[i]].tolist() for i, x in enumerate(prompts)]
        if (on_tokens and on_tokens(texts)) or np.all(state["done_B"]):
            break
        state = advance(model, state, chunk, rule=rule, layers=layers)
    return texts, {
        "forwards": int(state["forwards_B"].sum()),
        "accepted": int(state["accepted_B"].sum()),
        "tokens": sum(map(len, texts)),
    }
