"""Differential attention: (softmax(Q1 K1^T) - lambda softmax(Q2 K2^T)) V, floored or not. Pure.

`rotate` gives queries and keys their positions. `attention` is einsums, for every device and use:
training, packed documents, KV caches, left pads, and plain attention. In training `training_kernel`
takes another where one fits: `attention_tpu`, a fused Pallas kernel with exact softmax rows in
VMEM; `plain_tpu`, plain attention (I = 1) by JAX's own kernel, for fair comparisons;
`attention_gpu`, calls of cuDNN. It has no kernel for caches. One attention mask everywhere: the
query at key slot `index` attends to the slots from `start` to `index`.

Letters: B batch, I softmax maps (2 differential, 1 plain), P heads (differential ones, or plain
query heads if I = 1), J key/value groups, G = P / J, L queries, M keys, N = G L, K head size, E
value size (2K differential, K plain).
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as PS

# score of a masked key; finite, so that a query whose keys are all masked gives no NaN
MASKED = -1e30


def rope_frequencies(
    head_size, theta, factor=1.0, original=2048, beta_fast=32, beta_slow=1, truncate=True
):
    """Rotary frequencies theta^(-2i/K) [K/2] in float64, and the factor of cos and sin.

    With factor > 1 YaRN's: those with more than beta_fast turns within `original` positions stay,
    those with less than beta_slow are divided by `factor`, with a ramp between. Ref:
    arXiv:2309.00071, eq. 17-22.
    """
    inv_freq = theta ** (-np.arange(0, head_size, 2) / head_size)
    if factor <= 1:
        return inv_freq, 1.0

    def index(turns):
        return head_size * math.log(original / (2 * math.pi * turns)) / (2 * math.log(theta))

    low = index(beta_fast)
    high = index(beta_slow)
    if truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, head_size - 1)
    ramp = np.clip((np.arange(head_size // 2) - low) / max(high - low, 1e-3), 0, 1)
    inv_freq = inv_freq * (1 - ramp) + inv_freq / factor * ramp
    return inv_freq, 0.1 * math.log(factor) + 1


def rope_table(position_BL, inv_freq, attention_factor=1.0):
    """cos and sin [B, L, K] in float32 of position * inv_freq, repeated in both halves of K."""
    angle_BLK = position_BL[..., None] * jnp.asarray(inv_freq, jnp.float32)
    tables = [f(angle_BLK) * attention_factor for f in (jnp.cos, jnp.sin)]
    return [jnp.concatenate([table_BLK] * 2, -1) for table_BLK in tables]


def rotate(x_BLK, cos_BLK, sin_BLK, by_matmul=False):
    """Rotary embedding of both halves: x cos + [-x_2; x_1] sin; cos and sin broadcast."""
    half = x_BLK.shape[-1] // 2
    if by_matmul:  # with a signed permutation, faster on a TPU than slicing 128 lanes
        swap_KK = np.kron([[0, 1], [-1, 0]], np.eye(half))
        swapped_BLK = x_BLK @ jnp.asarray(swap_KK, x_BLK.dtype)
    else:
        swapped_BLK = jnp.concatenate([-x_BLK[..., half:], x_BLK[..., :half]], -1)
    x32 = x_BLK.astype(jnp.float32) * cos_BLK
    swapped32 = swapped_BLK.astype(jnp.float32) * sin_BLK
    return (x32 + swapped32).astype(x_BLK.dtype)


def lambda_init(layer):
    """0.8 - 0.6 exp(-0.3 layer), layer counted from 0. Ref: arXiv:2410.05258, section 2.1."""
    return 0.8 - 0.6 * jnp.exp(-0.3 * layer)


def lambda_value(lq1_K, lk1_K, lq2_K, lk2_K, init, clamp):
    """lambda = exp(lq1 . lk1) - exp(lq2 . lk2) + init, in float32. Ref: arXiv:2410.05258, eq. 2.

    `clamp` clips both dot products to [-10, 10] and lambda to [0, 1]; where a clip is active the
    gradient is 0.
    """
    dot1 = jnp.sum(lq1_K.astype(jnp.float32) * lk1_K)
    dot2 = jnp.sum(lq2_K.astype(jnp.float32) * lk2_K)
    if clamp:
        dot1 = jnp.clip(dot1, -10, 10)
        dot2 = jnp.clip(dot2, -10, 10)
    lam = jnp.exp(dot1) - jnp.exp(dot2) + init
    return jnp.clip(lam, 0.0, 1.0) if clamp else lam


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def attention(
    q_BIPLK,
    k_BIJMK,
    v_BJME,
    lam,
    index_BL,
    start_BL,
    floor=True,
    cap=0.0,
    block=128,
):
    """o = max(A1 - lam A2, 0) V with A_i = softmax(Q_i K_i^T / sqrt(K)), unfloored without `floor`;
    o = A1 V if I = 1.

    Query l has key slot index_BL[b, l] and attends to slots start_BL[b, l] to index_BL[b, l]: start
    is the first slot of its document, or the number of pads on its left; None is 0. index None:
    query l has slot l (training); then each block of `block` queries reads only the keys up to its
    last query, which halves the work. `cap` c > 0 turns a score s into c tanh(s / c). Scores and
    softmax are float32, the map is cast to v's dtype, which the result has. The forward pass needs
    B I P block M floats for scores.
    """
    B, _, P, L, _ = q_BIPLK.shape
    J, M, E = v_BJME.shape[1:]
    assert P % J == 0, f"{P} heads, {J} key/value groups"
    assert index_BL is not None or L == M, f"{L} queries, {M} keys: every query has its own key"
    outs_BPLE = []
    # a Python loop, not a scan: each block of queries has its own number of keys
    for rows, keys, seen_BLM in _blocks(q_BIPLK, k_BIJMK, index_BL, start_BL, block):
        a_BIJNM, _ = _maps(q_BIPLK[:, :, :, rows], k_BIJMK[:, :, :, keys], seen_BLM, cap)
        a_BJNM = _combine(a_BIJNM, lam, floor).astype(v_BJME.dtype)
        o_BJNE = jnp.einsum("BJNM,BJME->BJNE", a_BJNM, v_BJME[:, :, keys])
        outs_BPLE.append(o_BJNE.reshape(B, P, -1, E))
    return jnp.concatenate(outs_BPLE, 2)


def _attention_backward(floor, cap, block, inputs, do_BPLE):
    """With da = do V^T, 0 where floored: ds_i = w_i A_i (da - sum_M A_i da), w = (1, -lam); dlam =
    -sum_LM A_2 da.

    The maps are recomputed from the inputs, maxima and sums too, to be rounded as in the forward
    pass: where A_1 = A_2 the floor depends on the last bit.
    """
    q_BIPLK, k_BIJMK, v_BJME, lam, index_BL, start_BL = inputs
    B, I, P, _, K = q_BIPLK.shape
    J, _, E = v_BJME.shape[1:]
    einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    v_BJEM = v_BJME.swapaxes(2, 3)  # keys along rows, as in dk and dv: faster products on a CPU
    # gradients are summed in float32, whatever the inputs are
    dqs_BIPLK = []
    dlam = jnp.float32(0)
    dk_BIJKM = jnp.zeros_like(k_BIJMK.swapaxes(3, 4), jnp.float32)
    dv_BJEM = jnp.zeros_like(v_BJEM, jnp.float32)
    for rows, keys, seen_BLM in _blocks(q_BIPLK, k_BIJMK, index_BL, start_BL, block):
        q_BIJNK = q_BIPLK[:, :, :, rows].reshape(B, I, J, -1, K)
        do_BJNE = do_BPLE[:, :, rows].reshape(B, J, -1, E)
        # the maps, then the gradient of the combined map, 0 where the floor is active
        a_BIJNM, slope_BIJNM = _maps(q_BIPLK[:, :, :, rows], k_BIJMK[:, :, :, keys], seen_BLM, cap)
        a_BJNM = _combine(a_BIJNM, lam, floor)
        da_BJNM = einsum("BJNE,BJEM->BJNM", do_BJNE, v_BJEM[..., keys])
        if I == 2 and floor:
            da_BJNM = jnp.where(a_BJNM > 0, da_BJNM, 0)
        # through both softmaxes: ds_i = w_i A_i (da - sum_M A_i da); the sum as a product with ones
        mean_BIJN1 = (a_BIJNM * da_BJNM[:, None]) @ jnp.ones((keys.stop, 1), jnp.float32)
        da_BIJNM = da_BJNM[:, None] - mean_BIJN1
        ds_BIJNM = a_BIJNM * da_BIJNM * slope_BIJNM
        if I == 2:
            ds_BIJNM *= jnp.stack([jnp.float32(1), -lam])[:, None, None, None]
            dlam -= jnp.sum(mean_BIJN1[:, 1])
        # to queries, keys and values; those of keys and values are summed over the blocks of
        # queries, and over the heads of a group, which N runs over
        ds_BIJNM = ds_BIJNM.astype(q_BIPLK.dtype)
        dq_BIJNK = einsum("BIJNM,BIJMK->BIJNK", ds_BIJNM, k_BIJMK[:, :, :, keys])
        dq_BIPLK = dq_BIJNK.reshape(B, I, P, -1, K)
        dqs_BIPLK.append(dq_BIPLK.astype(q_BIPLK.dtype))
        dk_BIJKM = dk_BIJKM.at[..., keys].add(einsum("BIJNK,BIJNM->BIJKM", q_BIJNK, ds_BIJNM))
        dv_BJEM = dv_BJEM.at[..., keys].add(
            einsum("BJNE,BJNM->BJEM", do_BJNE, a_BJNM.astype(do_BPLE.dtype))
        )
    dq_BIPLK = jnp.concatenate(dqs_BIPLK, 3)
    dk_BIJMK = dk_BIJKM.swapaxes(3, 4).astype(k_BIJMK.dtype)
    return dq_BIPLK, dk_BIJMK, dv_BJEM.swapaxes(2, 3).astype(v_BJME.dtype), dlam, None, None


def _attention_forward(*args):
    return attention(*args), args[:6]


attention.defvjp(_attention_forward, _attention_backward)


def write(cache, k_BIJLK, v_BJLE, index_BL):
    """The cache with new keys and values at slots index_BL."""
    k_BIJMK, v_BJME = cache
    # each head by itself: XLA on a CPU copies a cache into which one slice is written
    index_BIJL = jnp.broadcast_to(index_BL[:, None, None], k_BIJLK.shape[:4])
    put = jnp.vectorize(
        lambda old_MK, new_LK, slot_L: old_MK.at[slot_L].set(new_LK),
        signature="(m,k),(l,k),(l)->(m,k)",
    )
    return put(k_BIJMK, k_BIJLK, index_BIJL), put(v_BJME, v_BJLE, index_BIJL[:, 0])


def _blocks(q_BIPLK, k_BIJMK, index_BL, start_BL, block):
    """For each block of queries: its slice of L, the slice of M that it reads, and the attention
    mask [B, L, M].
    """
    L = q_BIPLK.shape[3]
    for first in range(0, L, block):
        rows = slice(first, min(first + block, L))
        if index_BL is None:  # keys after the block's last query are masked
            keys = slice(0, rows.stop)
            index_bL = jnp.arange(L)[None, rows]
        else:  # any slot of a cache may be needed
            keys = slice(0, k_BIJMK.shape[3])
            index_bL = index_BL[:, rows]
        slot_M = jnp.arange(keys.stop)
        seen_BLM = slot_M <= index_bL[:, :, None]
        if start_BL is not None:
            seen_BLM &= slot_M >= start_BL[:, rows, None]
        yield rows, keys, seen_BLM


def _maps(q_BIPLK, k_BIJMK, seen_BLM, cap):
    """Softmax maps [B, I, J, N, M] in float32, and d(scaled, capped score) / d(q.k)."""
    B, I, P, L, K = q_BIPLK.shape
    J = k_BIJMK.shape[2]
    slope = K**-0.5
    # the heads of a group are rows of one product: keys are not repeated
    q_BIJNK = q_BIPLK.reshape(B, I, J, -1, K)
    s_BIJNM = slope * jnp.einsum(
        "BIJNK,BIJMK->BIJNM", q_BIJNK, k_BIJMK, preferred_element_type=jnp.float32
    )
    if cap:  # d(c tanh(s / c)) / ds = 1 - tanh^2
        s_BIJNM = jnp.tanh(s_BIJNM / cap)
        slope = slope * (1 - s_BIJNM**2)
        s_BIJNM = cap * s_BIJNM
    # softmax; uniform over the keys where all are masked
    s_BIJGLM = s_BIJNM.reshape(B, I, J, P // J, L, -1)
    s_BIJGLM = jnp.where(seen_BLM[:, None, None, None], s_BIJGLM, MASKED)
    e_BIJGLM = jnp.exp(s_BIJGLM - jnp.max(s_BIJGLM, -1, keepdims=True))
    # L reciprocals, not L M divisions: 1.3x on a CPU
    r_BIJGL1 = 1 / jnp.sum(e_BIJGLM, -1, keepdims=True)
    a_BIJGLM = e_BIJGLM * r_BIJGL1
    return a_BIJGLM.reshape(s_BIJNM.shape), slope


def _combine(a_BIJNM, lam, floor):
    """The map that multiplies the values: A1 - lam A2, at least 0 with floor; A1 of one map."""
    if a_BIJNM.shape[1] == 1:
        return a_BIJNM[:, 0]
    a_BJNM = a_BIJNM[:, 0] - lam * a_BIJNM[:, 1]
    if not floor:
        return a_BJNM
    return jnp.maximum(a_BJNM, 0)


# ---- the fused kernel of a TPU -------------------------------------------------------------------


def attention_tpu(
    q_BIPLK,
    k_BIJLK,
    v_BJLE,
    lam,
    start_BL,
    *,
    floor=True,
    block_q=512,
    block_k=512,
    interpret=False,
):
    """`attention` for training (I = 2, index None, cap 0): one Pallas kernel each way, gradients
    for q, k, v and lam.

    Scores are transposed, keys on sublanes and queries on lanes: maxima, sums and start_BL are rows
    with one lane per query, and dk, dv need no transposed operand. The numerators of both softmax
    rows stay in VMEM in float32, relative to the maximum of their block of keys; after all blocks
    one factor per query and block completes them. So max(A1 - lam A2, 0) is exact, with one product
    with V. The backward pass starts from the inputs alone: under remat the forward kernel does not
    run twice. Blocks of keys before the first start of the queries or after the diagonal are
    skipped; blocks without a masked key take no mask. Products are bfloat16 or float32 like the
    inputs.

    L and both blocks are multiples of 128. Blocks shrink to the largest such number that divides L,
    and query blocks so that the rows fit: 512 to L = 4096, 256 to 8192.
    """
    _, I, P, L, _ = q_BIPLK.shape
    _, J, _, _ = v_BJLE.shape
    assert I == 2, f"{I} maps: the kernel is for two; see plain_tpu"
    assert P % J == 0, f"{P} heads, {J} key/value groups"
    if L % 128 or block_q % 128 or block_k % 128:
        raise ValueError(
            f"rows of {L} tokens, blocks {block_q}, {block_k}: a TPU takes multiples of 128 "
            "(--seq_len)"
        )
    # float32 numerators of both maps and da, [3, L, block_q], take 24 MiB of VMEM at most, up to L
    # = 16384
    block_q = min(block_q, max(2**21 // L, 128))
    block_q = _divisor(L, block_q)
    block_k = _divisor(L, block_k)
    start_B1L = start_BL[:, None]
    lam_11 = jnp.reshape(lam, (1, 1)).astype(jnp.float32)
    return _fused(q_BIPLK, k_BIJLK, v_BJLE, lam_11, start_B1L, (floor, block_q, block_k, interpret))


def _divisor(L, most):
    """The largest multiple of 128 up to `most` that divides L."""
    return max(n for n in range(128, most + 1, 128) if L % n == 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _fused(q_BIPLK, k_BIJLK, v_BJLE, lam_11, start_B1L, static):
    return _call(None, q_BIPLK, k_BIJLK, v_BJLE, lam_11, start_B1L, static)[0]


def _fused_backward(static, inputs, do_BPLE):
    dq_BIPLK, dk_BIJLK, dv_BJLE, dlam_BP1L = _call(do_BPLE, *inputs, static)
    return dq_BIPLK, dk_BIJLK, dv_BJLE, jnp.sum(dlam_BP1L).reshape(1, 1), None


def _fused_forward(*args):
    return _fused(*args), args[:5]


_fused.defvjp(_fused_forward, _fused_backward)


def _call(do_BPLE, q_BIPLK, k_BIJLK, v_BJLE, lam_11, start_B1L, static):
    """The forward kernel, or the backward one if there is a do. A group's K and V are read once for
    all its queries.
    """
    floor, block_q, block_k, interpret = static
    B, I, P, L, K = q_BIPLK.shape
    _, J, _, E = v_BJLE.shape
    G = P // J
    # The blocks of a program of the grid (b, j, g, i): tile i of the rows of query head j G + g,
    # all keys of its group j. Those of K and V do not change with g and i, so they are fetched
    # once.
    lam = pl.BlockSpec(memory_space=pltpu.SMEM)
    start = pl.BlockSpec((None, 1, block_q), lambda b, j, g, i: (b, 0, i))
    q = pl.BlockSpec((None, I, None, block_q, K), lambda b, j, g, i: (b, 0, j * G + g, i, 0))
    o = pl.BlockSpec((None, None, block_q, E), lambda b, j, g, i: (b, j * G + g, i, 0))
    dlam = pl.BlockSpec((None, None, 1, block_q), lambda b, j, g, i: (b, j * G + g, 0, i))

    def keys(*size):
        return pl.BlockSpec((None, I, None, *size), lambda b, j, g, i: (b, 0, j, 0, 0))

    def values(*size):
        return pl.BlockSpec((None, None, *size), lambda b, j, g, i: (b, j, 0, 0))

    k = keys(L, K)
    v = values(L, E)
    # numerators, and the maximum of each block
    scratch = [(I, L, block_q), (I, L // block_k, 1, block_q)]
    if do_BPLE is None:
        kernel = _forward_kernel
        depth = I * K + E
        inputs = (lam_11, start_B1L, q_BIPLK, k_BIJLK, v_BJLE.swapaxes(2, 3))
        in_specs = [lam, start, q, k, values(E, L)]
        outputs = [jax.ShapeDtypeStruct((B, P, L, E), v_BJLE.dtype)]
        out_specs = [o]
    else:
        kernel = _backward_kernel
        depth = 3 * I * K + 2 * E
        inputs = (lam_11, start_B1L, q_BIPLK, k_BIJLK, k_BIJLK.swapaxes(3, 4), v_BJLE, do_BPLE)
        in_specs = [lam, start, q, k, keys(K, L), v, o]
        outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q_BIPLK, k_BIJLK, v_BJLE)]
        outputs.append(jax.ShapeDtypeStruct((B, P, 1, L), jnp.float32))
        out_specs = [q, k, v, dlam]
        # da, and dk and dv summed over the queries of a group
        scratch += [(L, block_q), (I, L, K), (L, E)]
    # for XLA's scheduler: pairs of a query and a key in the blocks up to the diagonal
    pairs = B * P * L * (L + block_q) // 2
    # for the compiler's limit: blocks of inputs and outputs are double-buffered
    blocks = zip(in_specs[1:] + out_specs, [*inputs[1:], *outputs], strict=True)
    sizes = (x.dtype.itemsize * math.prod(n or 1 for n in spec.block_shape) for spec, x in blocks)
    spills = 8 * block_q * block_k  # of registers
    vmem = 2 * sum(sizes) + 4 * (sum(map(math.prod, scratch)) + spills)
    return pl.pallas_call(
        functools.partial(kernel, floor=floor, block_k=block_k),
        grid=(B, J, G, L // block_q),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=outputs,
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * depth,
            transcendentals=I * pairs,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*inputs, *outputs)),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=vmem,
        ),
        interpret=interpret,
        name="diff_attention" + kernel.__name__.removesuffix("_kernel"),
    )(*inputs)


def _dot(a, b, axis_a, axis_b):
    """Sum over one axis of each, in float32; float32 factors are not rounded to bfloat16, the MXU's
    default.
    """
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a,
        b,
        (((axis_a,), (axis_b,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _numerators(start_1L, q_ILK, k_IMK, e_IML, top_IC1L, block_k):
    """Over the blocks C of keys: e = 2^(s - top), with s = log2(e) scores and top their maximum in
    the block.

    Returns the range of blocks, and a function of map and block: the missing factor 2^(top - max_M
    s) / sum_M. With its own maximum, not the running one, no block waits for the one before. Where
    all keys of a block are masked for a query, e is 1 and the factor 0.
    """
    I, L, K = q_ILK.shape
    first_query = pl.program_id(3) * L
    # blocks begin..end have unmasked keys; those from clear to diagonal have no masked ones
    begin = jnp.min(start_1L[...]) // block_k
    end = pl.cdiv(first_query + L, block_k)
    clear = pl.cdiv(jnp.max(start_1L[...]), block_k)
    diagonal = (first_query + 1) // block_k
    key_ML = jax.lax.broadcasted_iota(jnp.int32, (block_k, L), 0)
    query_1L = first_query + jax.lax.broadcasted_iota(jnp.int32, (1, L), 1)

    def step(c, rows, masked):
        keys = pl.ds(c * block_k, block_k)
        new_rows = []
        for i, (max_1L, sum_1L) in enumerate(rows):
            # in base 2: exp would multiply each score by log2(e), here it joins the scale
            s_ML = _dot(k_IMK[i, keys], q_ILK[i], 1, 1) * (K**-0.5 * math.log2(math.e))
            if masked:
                slot_ML = key_ML + c * block_k
                seen_ML = (slot_ML >= start_1L[...]) & (slot_ML <= query_1L)
                s_ML = jnp.where(seen_ML, s_ML, MASKED)
            top_1L = jnp.max(s_ML, 0, keepdims=True)
            e_ML = jnp.exp2(s_ML - top_1L)
            e_IML[i, keys] = e_ML
            top_IC1L[i, c] = top_1L
            # the running maximum, and the sum relative to it
            new_1L = jnp.maximum(max_1L, top_1L)
            old_sum_1L = sum_1L * jnp.exp2(max_1L - new_1L)
            block_sum_1L = jnp.sum(e_ML, 0, keepdims=True) * jnp.exp2(top_1L - new_1L)
            new_rows.append((new_1L, old_sum_1L + block_sum_1L))
        return new_rows

    def step_masked_if_needed(c, rows):
        steps = [functools.partial(step, masked=masked) for masked in (False, True)]
        return jax.lax.cond((c >= clear) & (c < diagonal), *steps, c, rows)

    # maximum and sum of each query's row
    rows = [(jnp.full((1, L), MASKED), jnp.zeros((1, L)))] * I
    rows = jax.lax.fori_loop(begin, end, step_masked_if_needed, rows)

    def factor(i, c):
        max_1L, sum_1L = rows[i]
        return jnp.exp2(top_IC1L[i, c] - max_1L) / sum_1L

    return begin, end, factor


def _forward_kernel(*refs, floor, block_k):
    """o = max(A1 - lam A2, 0) V for one tile of queries, from numerators that are completed block
    by block.
    """
    lam, start_1L, q_ILK, k_IMK, v_EM, o_LE, e_IML, top_IC1L = refs
    begin, end, factor = _numerators(start_1L, q_ILK, k_IMK, e_IML, top_IC1L, block_k)

    def step(c, o_EL):
        keys = pl.ds(c * block_k, block_k)
        a_ML = e_IML[0, keys] * factor(0, c) - e_IML[1, keys] * (lam[0, 0] * factor(1, c))
        if floor:
            a_ML = jnp.maximum(a_ML, 0.0)
        return o_EL + _dot(v_EM[:, keys], a_ML.astype(v_EM.dtype), 1, 0)

    o_EL = jax.lax.fori_loop(begin, end, step, jnp.zeros(o_LE.shape[::-1]))
    o_LE[...] = o_EL.T.astype(o_LE.dtype)


def _backward_kernel(*refs, floor, block_k):
    """ds_i = w_i A_i (da - sum_M A_i da), w = (1, -lam), da = do V^T and 0 where floored; dlam =
    -sum_LM A_2 da.
    """
    lam, start_1L, q_ILK, k_IMK, k_IKM, v_ME, do_LE, dq_ILK, dk_IMK, dv_ME, dlam_1L, *scratch = refs
    e_IML, top_IC1L, da_ML, dk_sum_IMK, dv_sum_ME = scratch
    I, L, K = q_ILK.shape
    head = pl.program_id(2)
    tile = pl.program_id(3)

    @pl.when((head == 0) & (tile == 0))  # the first program of the group
    def _():
        dk_sum_IMK[...] = jnp.zeros_like(dk_sum_IMK)
        dv_sum_ME[...] = jnp.zeros_like(dv_sum_ME)

    begin, end, factor = _numerators(start_1L, q_ILK, k_IMK, e_IML, top_IC1L, block_k)

    # First over the keys: the combined map gives dv and da, and da's mean under each softmax, sum_M
    # A_i da.
    def step_v(c, mean_I1L):
        keys = pl.ds(c * block_k, block_k)
        f_I1L = [factor(i, c) for i in range(I)]
        a_ML = e_IML[0, keys] * f_I1L[0] - e_IML[1, keys] * (lam[0, 0] * f_I1L[1])
        da = _dot(v_ME[keys], do_LE[...], 1, 1)
        if floor:
            da = jnp.where(a_ML > 0, da, 0.0)
            a_ML = jnp.maximum(a_ML, 0.0)
        da_ML[keys] = da
        dv_sum_ME[keys] += _dot(a_ML.astype(do_LE.dtype), do_LE[...], 1, 0)
        new_I1L = []
        for i in range(I):
            sum_1L = jnp.sum(e_IML[i, keys] * da, 0, keepdims=True)
            new_I1L.append(mean_I1L[i] + f_I1L[i] * sum_1L)
        return new_I1L

    mean_I1L = jax.lax.fori_loop(begin, end, step_v, [jnp.zeros((1, L))] * I)
    dlam_1L[...] = -mean_I1L[1]

    # Then once more: with the means, the gradients of both scores give dq and dk.
    def step_qk(c, dq_IKL):
        keys = pl.ds(c * block_k, block_k)
        new_IKL = []
        for i, weight in enumerate((K**-0.5, -lam[0, 0] * K**-0.5)):
            ds_ML = e_IML[i, keys] * (weight * factor(i, c)) * (da_ML[keys] - mean_I1L[i])
            ds_ML = ds_ML.astype(q_ILK.dtype)
            dk_sum_IMK[i, keys] += _dot(ds_ML, q_ILK[i], 1, 0)
            new_IKL.append(dq_IKL[i] + _dot(k_IKM[i, :, keys], ds_ML, 1, 0))
        return new_IKL

    dq_IKL = jax.lax.fori_loop(begin, end, step_qk, [jnp.zeros((K, L))] * I)
    for i in range(I):
        dq_ILK[i] = dq_IKL[i].T.astype(dq_ILK.dtype)

    @pl.when((head == pl.num_programs(2) - 1) & (tile == pl.num_programs(3) - 1))  # the last one
    def _():
        dk_IMK[...] = dk_sum_IMK[...].astype(dk_IMK.dtype)
        dv_ME[...] = dv_sum_ME[...].astype(dv_ME.dtype)


# ---- which of them a device takes in training ----------------------------------------------------


def training_kernel(device, maps, head_size, floor):
    """The attention for training on a device, "tpu" or "gpu"; None: `attention`."""
    if device == "tpu" and maps == 2:
        return attention_tpu
    if device == "tpu":
        return plain_tpu
    if device == "gpu" and not floor and head_size <= 128 and head_size % 8 == 0:
        return attention_gpu
    return None


def on_each_device(kernel, rows):
    """A kernel, which is one device's program, over its own rows and heads on a mesh.

    `rows` are the axes of the mesh that split the batch, or None.
    """
    if jax.sharding.get_abstract_mesh().size < 2:
        return kernel
    specs = (PS(rows, None, "tensor"), PS(rows, None, "tensor"), PS(rows, "tensor"), PS(), PS(rows))
    axes = {"tensor", *(rows or ())}
    return jax.shard_map(
        kernel, in_specs=specs, out_specs=PS(rows, "tensor"), axis_names=axes, check_vma=False
    )


def plain_tpu(q_BIPLK, k_BIJLK, v_BJLE, lam, start_BL, *, floor=True, interpret=False):
    """`attention` for training on a TPU with I = 1, index None and cap 0, by JAX's splash
    attention; lam is unused.

    The slots of a document have one start, which serves as segment id. Raises ValueError if L is no
    multiple of 128.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    B, I, P, L, K = q_BIPLK.shape
    J = k_BIJLK.shape[2]
    if I != 1 or L % 128:
        raise ValueError(
            f"{I} maps over {L} slots: plain_tpu is for one map, and rows of a multiple of 128"
        )
    block = _divisor(L, 512)
    names = "q kv kv_compute q_dkv kv_dkv kv_dkv_compute q_dq kv_dq".split()
    sizes = splash.BlockSizes(**{f"block_{name}": block for name in names})
    mask = masks.MultiHeadMask([masks.CausalMask((L, L))] * (P // J))
    kernel = splash.make_splash_mqa_single_device(
        mask,
        interpret=interpret,
        block_sizes=sizes,
        residual_checkpoint_name="lse",  # remat keeps the result and the sums
    )
    q_BJGLK = (q_BIPLK[:, 0] * K**-0.5).reshape(B, J, P // J, L, K)
    of_a_row = jax.vmap(kernel, (0, 0, 0, None))  # the query heads of each group share its keys
    segments = splash.SegmentIds(start_BL, start_BL)
    o_BJGLE = jax.vmap(of_a_row)(q_BJGLK, k_BIJLK[:, 0], v_BJLE, segments)
    return o_BJGLE.reshape(B, P, L, -1)


def attention_gpu(q_BIPLK, k_BIJLK, v_BJLE, lam, start_BL, *, floor=False, implementation="cudnn"):
    """`attention` for training (index None, cap 0) without a floor, by cuDNN; inputs of 16 bits.

    cuDNN wants values of the size of the keys, so a value of 2K is two. The mask becomes a bias
    [B, L, L]. With a floor A1 - lam A2 is no sum of attentions: that form takes the einsums.
    Ref: microsoft/unilm, multihead_flashdiff_2.
    """
    slot_L = jnp.arange(q_BIPLK.shape[3])
    seen_BLM = (slot_L >= start_BL[:, :, None]) & (slot_L <= slot_L[:, None])
    maps = q_BIPLK.shape[1]
    v_BLJKs = jnp.split(v_BJLE.swapaxes(1, 2), maps, -1)
    outs_BPLE = []
    for i in range(maps):
        call = functools.partial(
            jax.nn.dot_product_attention,
            q_BIPLK[:, i].swapaxes(1, 2),
            k_BIJLK[:, i].swapaxes(1, 2),
            mask=seen_BLM[:, None],
            implementation=implementation,
        )
        o_BLPKs = [call(v_BLJK) for v_BLJK in v_BLJKs]
        outs_BPLE.append(jnp.concatenate(o_BLPKs, -1).swapaxes(1, 2))
    if maps == 1:
        return outs_BPLE[0]
    return (outs_BPLE[0] - lam * outs_BPLE[1]).astype(v_BJLE.dtype)
