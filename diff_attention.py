"""Differential attention: softmax(Q1 K1^T) - lambda softmax(Q2 K2^T), optionally floored at 0,
times V.

`attention` is einsums, for every device and use: training, packed documents, KV caches, left pads,
and plain attention. `attention_tpu` is a fused Pallas kernel for training on a TPU: exact softmax
rows in VMEM, one product with V. `plain_tpu` is plain attention (I = 1) on a TPU by JAX's own
kernel, for fair comparisons. `attention_gpu` is five Pallas kernels for training on NVIDIA GPUs: a
score row does not fit and is computed twice. One attention mask everywhere: the query at key slot
`index` attends to the slots from `start` to `index`.

Letters: B batch, I softmax maps (2 differential, 1 plain), P heads (differential ones, or plain
query heads if I = 1), J key/value groups, G = P / J, L queries, M keys, N = G L, K head size, E
value size (2K differential, K plain).
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# score of a masked key; finite, so that a query whose keys are all masked gives no NaN
MASKED = -1e30


def lambda_init(layer):
    """0.8 - 0.6 exp(-0.3 layer), layer an int or array counted from 0. Ref: arXiv:2410.05258,
    section 2.1 (from 1).
    """
    return 0.8 - 0.6 * jnp.exp(-0.3 * jnp.asarray(layer, jnp.float32))


def lambda_value(lq1_K, lk1_K, lq2_K, lk2_K, init, clamp):
    """lambda = exp(lq1 . lk1) - exp(lq2 . lk2) + init, a float32 scalar. Ref: arXiv:2410.05258, eq.
    2.

    `clamp` clips both dot products to [-10, 10] and lambda to [0, 1]; where a clip is active the
    gradient is 0.
    """
    dot1, dot2 = (jnp.sum(q.astype(jnp.float32) * k) for q, k in ((lq1_K, lk1_K), (lq2_K, lk2_K)))
    if not clamp:
        return jnp.exp(dot1) - jnp.exp(dot2) + init
    return jnp.clip(
        jnp.exp(jnp.clip(dot1, -10, 10)) - jnp.exp(jnp.clip(dot2, -10, 10)) + init, 0.0, 1.0
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def attention(q_BIPLK, k_BIJMK, v_BJME, lam, index_BL, start_BL, floor=True, cap=0.0, block=128):
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
    assert index_BL is not None or L == M, (
        f"{L} queries, {M} keys: without index_BL every query has its own key"
    )
    outs_BPLE = []
    # a Python loop, not a scan: each block of queries has its own number of keys
    for rows, keys, seen_BLM in _blocks(q_BIPLK, k_BIJMK, index_BL, start_BL, block):
        a_BIJNM, _ = _maps(q_BIPLK[:, :, :, rows], k_BIJMK[:, :, :, keys], seen_BLM, cap)
        a_BJNM = _combine(a_BIJNM, lam, floor).astype(v_BJME.dtype)
        outs_BPLE.append(
            jnp.einsum("BJNM,BJME->BJNE", a_BJNM, v_BJME[:, :, keys]).reshape(B, P, -1, E)
        )
    return jnp.concatenate(outs_BPLE, 2)


def _attention_backward(floor, cap, block, inputs, do_BPLE):
    """With da = do V^T, 0 where floored: ds_i = w_i A_i (da - sum_M A_i da), w = (1, -lam); dlam =
    -sum_LM A_2 da.

    The maps are recomputed from the inputs, maxima and sums too, to be rounded as in the forward
    pass: where A_1 = A_2 the floor depends on the last bit.
    """
    q_BIPLK, k_BIJMK, v_BJME, lam, index_BL, start_BL = inputs
    (B, I, P, _, K), (J, _, E) = q_BIPLK.shape, v_BJME.shape[1:]
    einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    v_BJEM = v_BJME.swapaxes(2, 3)  # keys along rows, as in dk and dv: faster products on a CPU
    # gradients are summed in float32, whatever the inputs are
    dqs_BIPLK, dlam = [], jnp.float32(0)
    dk_BIJKM = jnp.zeros(k_BIJMK.swapaxes(3, 4).shape, jnp.float32)
    dv_BJEM = jnp.zeros(v_BJEM.shape, jnp.float32)
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
        ds_BIJNM = a_BIJNM * (da_BJNM[:, None] - mean_BIJN1) * slope_BIJNM
        if I == 2:
            ds_BIJNM *= jnp.stack([jnp.float32(1), -lam])[:, None, None, None]
            dlam -= jnp.sum(mean_BIJN1[:, 1])
        # to queries, keys and values; those of keys and values are summed over the blocks of
        # queries, and over the heads of a group, which N runs over
        ds_BIJNM = ds_BIJNM.astype(q_BIPLK.dtype)
        dq_BIJNK = einsum("BIJNM,BIJMK->BIJNK", ds_BIJNM, k_BIJMK[:, :, :, keys])
        dqs_BIPLK.append(dq_BIJNK.reshape(B, I, P, -1, K).astype(q_BIPLK.dtype))
        dk_BIJKM = dk_BIJKM.at[..., keys].add(einsum("BIJNK,BIJNM->BIJKM", q_BIJNK, ds_BIJNM))
        dv_BJEM = dv_BJEM.at[..., keys].add(
            einsum("BJNE,BJNM->BJEM", do_BJNE, a_BJNM.astype(do_BPLE.dtype))
        )
    dq_BIPLK = jnp.concatenate(dqs_BIPLK, 3)
    dk_BIJMK = dk_BIJKM.swapaxes(3, 4).astype(k_BIJMK.dtype)
    return dq_BIPLK, dk_BIJMK, dv_BJEM.swapaxes(2, 3).astype(v_BJME.dtype), dlam, None, None


attention.defvjp(lambda *args: (attention(*args), args[:6]), _attention_backward)


def _blocks(q_BIPLK, k_BIJMK, index_BL, start_BL, block):
    """For each block of queries: its slice of L, the slice of M that it reads, and the attention
    mask [B, L, M].
    """
    L, M = q_BIPLK.shape[3], k_BIJMK.shape[3]
    for first in range(0, L, block):
        rows = slice(first, min(first + block, L))
        # without index_BL keys after the block's last query are masked; with a cache any slot may
        # be needed
        keys = slice(0, rows.stop if index_BL is None else M)
        index_bL = jnp.arange(L)[None, rows] if index_BL is None else index_BL[:, rows]
        seen_BLM = jnp.arange(keys.stop) <= index_bL[:, :, None]
        if start_BL is not None:
            seen_BLM &= jnp.arange(keys.stop) >= start_BL[:, rows, None]
        yield rows, keys, seen_BLM


def _maps(q_BIPLK, k_BIJMK, seen_BLM, cap):
    """Softmax maps [B, I, J, N, M] in float32, and d(scaled, capped score) / d(q.k)."""
    (B, I, P, L, K), J = q_BIPLK.shape, k_BIJMK.shape[2]
    # the heads of a group are rows of one product: keys are not repeated
    q_BIJNK = q_BIPLK.reshape(B, I, J, -1, K)
    s_BIJNM = (
        jnp.einsum("BIJNK,BIJMK->BIJNM", q_BIJNK, k_BIJMK, preferred_element_type=jnp.float32)
        * K**-0.5
    )
    slope = K**-0.5
    if cap:  # d(c tanh(s / c)) / ds = 1 - tanh^2
        s_BIJNM = jnp.tanh(s_BIJNM / cap)
        s_BIJNM, slope = cap * s_BIJNM, slope * (1 - s_BIJNM**2)
    # softmax; uniform over the keys where all are masked
    s_BIJGLM = jnp.where(
        seen_BLM[:, None, None, None], s_BIJNM.reshape(B, I, J, P // J, L, -1), MASKED
    )
    e_BIJGLM = jnp.exp(s_BIJGLM - jnp.max(s_BIJGLM, -1, keepdims=True))
    # L reciprocals, not L M divisions: 1.3x on a CPU
    r_BIJGL1 = 1 / jnp.sum(e_BIJGLM, -1, keepdims=True)
    return (e_BIJGLM * r_BIJGL1).reshape(s_BIJNM.shape), slope


def _combine(a_BIJNM, lam, floor):
    """The map that multiplies the values: A1 - lam A2, at least 0 with floor; A1 if there is one
    map.
    """
    if a_BIJNM.shape[1] == 1:
        return a_BIJNM[:, 0]
    a_BJNM = a_BIJNM[:, 0] - lam * a_BIJNM[:, 1]
    return jnp.maximum(a_BJNM, 0) if floor else a_BJNM


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
    (_, I, P, L, _), J = q_BIPLK.shape, k_BIJLK.shape[2]
    assert I == 2, f"{I} maps: the kernel is for two; see plain_tpu"
    assert P % J == 0, f"{P} heads, {J} key/value groups"
    if L % 128 or block_q % 128 or block_k % 128:
        raise ValueError(
            f"rows of {L} tokens, blocks {block_q}, {block_k}: a TPU takes multiples of 128 (--seq_len)"
        )
    # float32 numerators of both maps and da, [3, L, block_q], take 24 MiB of VMEM at most, up to L
    # = 16384
    block_q = min(block_q, max(2**21 // L, 128))
    block_q, block_k = (
        max(n for n in range(128, block + 1, 128) if L % n == 0) for block in (block_q, block_k)
    )
    start_B1L, lam_11 = start_BL[:, None], jnp.reshape(lam, (1, 1)).astype(jnp.float32)
    return _fused(q_BIPLK, k_BIJLK, v_BJLE, lam_11, start_B1L, (floor, block_q, block_k, interpret))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _fused(q_BIPLK, k_BIJLK, v_BJLE, lam_11, start_B1L, static):
    return _call(None, q_BIPLK, k_BIJLK, v_BJLE, lam_11, start_B1L, static)[0]


def _fused_backward(static, inputs, do_BPLE):
    dq_BIPLK, dk_BIJLK, dv_BJLE, dlam_BP1L = _call(do_BPLE, *inputs, static)
    return dq_BIPLK, dk_BIJLK, dv_BJLE, jnp.sum(dlam_BP1L).reshape(1, 1), None


_fused.defvjp(lambda *args: (_fused(*args), args[:5]), _fused_backward)


def plain_tpu(q_BIPLK, k_BIJLK, v_BJLE, lam, start_BL, *, floor=True, interpret=False):
    """`attention` for training on a TPU with I = 1, index None and cap 0, by JAX's splash
    attention; lam is unused.

    The slots of a document have one start, which serves as segment id. Raises ValueError if L is no
    multiple of 128.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    (B, I, P, L, K), J = q_BIPLK.shape, k_BIJLK.shape[2]
    if I != 1 or L % 128:
        raise ValueError(
            f"{I} maps over {L} slots: plain_tpu is for one map, and rows of a multiple of 128"
        )
    block = max(n for n in range(128, 513, 128) if L % n == 0)
    names = "q kv kv_compute q_dkv kv_dkv kv_dkv_compute q_dq kv_dq".split()
    sizes = splash.BlockSizes(**{f"block_{name}": block for name in names})
    mask = masks.MultiHeadMask([masks.CausalMask((L, L))] * (P // J))
    # remat keeps the result and the sums
    settings = {"block_sizes": sizes, "residual_checkpoint_name": "lse"}
    kernel = splash.make_splash_mqa_single_device(mask, interpret=interpret, **settings)
    q_BJGLK = (q_BIPLK[:, 0] * jnp.asarray(K**-0.5, q_BIPLK.dtype)).reshape(B, J, P // J, L, K)
    of_a_row = jax.vmap(kernel, (0, 0, 0, None))  # the query heads of each group share its keys
    o_BJGLE = jax.vmap(of_a_row)(
        q_BJGLK, k_BIJLK[:, 0], v_BJLE, splash.SegmentIds(start_BL, start_BL)
    )
    return o_BJGLE.reshape(B, P, L, -1).astype(v_BJLE.dtype)


def _call(do_BPLE, q_BIPLK, k_BIJLK, v_BJLE, lam_11, start_B1L, static):
    """The forward kernel, or the backward one if there is a do. A group's K and V are read once for
    all its queries.
    """
    (B, I, P, L, K), (_, J, _, E) = q_BIPLK.shape, v_BJLE.shape
    G, (floor, block_q, block_k, interpret) = P // J, static
    # The blocks of a program of the grid (b, j, g, i): tile i of the rows of query head j G + g,
    # all keys of its group j. Those of K and V do not change with g and i, so they are fetched
    # once.
    lam = pl.BlockSpec(memory_space=pltpu.SMEM)
    start = pl.BlockSpec((None, 1, block_q), lambda b, j, g, i: (b, 0, i))
    q = pl.BlockSpec((None, I, None, block_q, K), lambda b, j, g, i: (b, 0, j * G + g, i, 0))
    o = pl.BlockSpec((None, None, block_q, E), lambda b, j, g, i: (b, j * G + g, i, 0))
    dlam = pl.BlockSpec((None, None, 1, block_q), lambda b, j, g, i: (b, j * G + g, 0, i))
    k, k_t = (
        pl.BlockSpec((None, I, None, *size), lambda b, j, g, i: (b, 0, j, 0, 0))
        for size in ((L, K), (K, L))
    )
    v, v_t = (
        pl.BlockSpec((None, None, *size), lambda b, j, g, i: (b, j, 0, 0))
        for size in ((L, E), (E, L))
    )
    # numerators, and the maximum of each block
    scratch = [(I, L, block_q), (I, L // block_k, 1, block_q)]
    if do_BPLE is None:
        kernel, depth = _forward_kernel, I * K + E
        inputs, in_specs = (
            (lam_11, start_B1L, q_BIPLK, k_BIJLK, v_BJLE.swapaxes(2, 3)),
            [lam, start, q, k, v_t],
        )
        outputs, out_specs = [jax.ShapeDtypeStruct((B, P, L, E), v_BJLE.dtype)], [o]
    else:
        kernel, depth = _backward_kernel, 3 * I * K + 2 * E
        inputs = lam_11, start_B1L, q_BIPLK, k_BIJLK, k_BIJLK.swapaxes(3, 4), v_BJLE, do_BPLE
        in_specs, out_specs = [lam, start, q, k, k_t, v, o], [q, k, v, dlam]
        outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q_BIPLK, k_BIJLK, v_BJLE)]
        outputs.append(jax.ShapeDtypeStruct((B, P, 1, L), jnp.float32))
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
    axes = ((axis_a,), (axis_b,)), ((), ())
    return jax.lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)


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
    begin, end = jnp.min(start_1L[...]) // block_k, pl.cdiv(first_query + L, block_k)
    clear, diagonal = pl.cdiv(jnp.max(start_1L[...]), block_k), (first_query + 1) // block_k
    key_ML = jax.lax.broadcasted_iota(jnp.int32, (block_k, L), 0)
    query_1L = first_query + jax.lax.broadcasted_iota(jnp.int32, (1, L), 1)

    def step(c, rows, masked):
        keys = pl.ds(c * block_k, block_k)
        new_rows = []
        for i, (max_1L, sum_1L) in enumerate(rows):
            # in base 2: exp would multiply each score by log2(e), here it joins the scale
            s_ML = _dot(k_IMK[i, keys], q_ILK[i], 1, 1) * (K**-0.5 * math.log2(math.e))
            if masked:
                seen_ML = (key_ML + c * block_k >= start_1L[...]) & (
                    key_ML + c * block_k <= query_1L
                )
                s_ML = jnp.where(seen_ML, s_ML, MASKED)
            top_1L = jnp.max(s_ML, 0, keepdims=True)
            e_ML = jnp.exp2(s_ML - top_1L)
            e_IML[i, keys], top_IC1L[i, c] = e_ML, top_1L
            # the running maximum, and the sum relative to it
            new_1L = jnp.maximum(max_1L, top_1L)
            sum_1L = sum_1L * jnp.exp2(max_1L - new_1L) + jnp.sum(
                e_ML, 0, keepdims=True
            ) * jnp.exp2(top_1L - new_1L)
            new_rows.append((new_1L, sum_1L))
        return new_rows

    def step_masked_if_needed(c, rows):
        steps = [functools.partial(step, masked=masked) for masked in (False, True)]
        return jax.lax.cond((c >= clear) & (c < diagonal), *steps, c, rows)

    # maximum and sum of each query's row
    rows = [(jnp.full((1, L), MASKED), jnp.zeros((1, L)))] * I
    rows = jax.lax.fori_loop(begin, end, step_masked_if_needed, rows)
    return begin, end, lambda i, c: jnp.exp2(top_IC1L[i, c] - rows[i][0]) / rows[i][1]


def _forward_kernel(*refs, floor, block_k):
    """o = max(A1 - lam A2, 0) V for one tile of queries, from numerators that are completed block
    by block.
    """
    lam, start_1L, q_ILK, k_IMK, v_EM, o_LE, e_IML, top_IC1L = refs
    begin, end, factor = _numerators(start_1L, q_ILK, k_IMK, e_IML, top_IC1L, block_k)

    def step(c, o_EL):
        keys = pl.ds(c * block_k, block_k)
        a_ML = e_IML[0, keys] * factor(0, c) - e_IML[1, keys] * (lam[0, 0] * factor(1, c))
        a_ML = jnp.maximum(a_ML, 0.0) if floor else a_ML
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
    head, tile = pl.program_id(2), pl.program_id(3)

    @pl.when((head == 0) & (tile == 0))  # the first program of the group
    def _():
        dk_sum_IMK[...], dv_sum_ME[...] = jnp.zeros_like(dk_sum_IMK), jnp.zeros_like(dv_sum_ME)

    begin, end, factor = _numerators(start_1L, q_ILK, k_IMK, e_IML, top_IC1L, block_k)

    # First over the keys: the combined map gives dv and da, and da's mean under each softmax, sum_M
    # A_i da.
    def step_v(c, mean_I1L):
        keys, f_I1L = pl.ds(c * block_k, block_k), [factor(i, c) for i in range(I)]
        a_ML = e_IML[0, keys] * f_I1L[0] - e_IML[1, keys] * (lam[0, 0] * f_I1L[1])
        da = _dot(v_ME[keys], do_LE[...], 1, 1)
        if floor:
            da, a_ML = jnp.where(a_ML > 0, da, 0.0), jnp.maximum(a_ML, 0.0)
        da_ML[keys] = da
        dv_sum_ME[keys] += _dot(a_ML.astype(do_LE.dtype), do_LE[...], 1, 0)
        return [
            mean_I1L[i] + f_I1L[i] * jnp.sum(e_IML[i, keys] * da, 0, keepdims=True)
            for i in range(I)
        ]

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
        dk_IMK[...], dv_ME[...] = (
            dk_sum_IMK[...].astype(dk_IMK.dtype),
            dv_sum_ME[...].astype(dv_ME.dtype),
        )


# ---- the kernels for NVIDIA GPUs -----------------------------------------------------------------------------------

# Tiles of each kernel: (queries, keys, warps), powers of 2. Chosen by ptxas for heads of 128 in
# bfloat16: no registers spilled in a loop, on Ampere at most 99 KiB of shared memory. Hopper's
# matrix instructions want 64 rows of what is summed, and it has the shared memory for them.
AMPERE = {
    "sums": (64, 64, 4),
    "values": (64, 32, 4),
    "means": (64, 32, 4),
    "dq": (32, 32, 4),
    "dkv": (32, 32, 8),
}
HOPPER = {
    "sums": (128, 64, 8),
    "values": (128, 64, 8),
    "means": (128, 32, 8),
    "dq": (128, 32, 8),
    "dkv": (32, 64, 8),
}
GPU_TILES = {"ampere": AMPERE, "hopper": HOPPER}


def training_kernel(chip, maps, head_size):
    """The fused attention for training on a chip, "tpu" or a key of GPU_TILES; None if none
    fits.
    """
    if chip == "tpu":
        return attention_tpu if maps == 2 else plain_tpu
    if chip in GPU_TILES and head_size in (16, 32, 64, 128):
        return functools.partial(attention_gpu, tiles=GPU_TILES[chip])
    return None


def attention_gpu(
    q_BIPLK, k_BIJLK, v_BJLE, lam, start_BL, *, floor=True, tiles=AMPERE, interpret=False
):
    """`attention` for training (index None, cap 0): Pallas kernels for Ampere and newer, through
    Triton.

    A score row does not fit the registers, so the forward pass reads the keys twice: for the sums
    of the softmax rows, then for max(A1 - lam A2, 0) V, which is exact. The backward pass takes
    three: for the means sum_M A_i da, for dq, and over the queries for dk and dv. o and the
    logarithms of the sums are named "attn" and "lse" for remat. Masked blocks are skipped as in
    attention_tpu. Rows are padded to whole tiles. K is a power of 2, at least 16.
    """
    (_, I, P, L, K), J = q_BIPLK.shape, k_BIJLK.shape[2]
    assert P % J == 0, f"{P} heads, {J} key/value groups"
    assert K in (16, 32, 64, 128), f"heads of {K}: a power of 2 from 16 to 128; use attention()"
    rest = -L % max(max(tile[:2]) for tile in tiles.values())
    # the padding comes after all queries, which mask it as keys; as queries it has no gradient
    start_BL = jnp.pad(start_BL, ((0, 0), (0, rest)), "edge")
    q, k, v = (
        jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, rest), (0, 0)])
        for x in (q_BIPLK, k_BIJLK, v_BJLE)
    )
    lam_1 = jnp.reshape(0 if I == 1 else lam, (1,)).astype(jnp.float32)
    return _gpu(q, k, v, lam_1, start_BL, (floor, tuple(tiles.items()), interpret))[:, :, :L]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _gpu(q_BIPLK, k_BIJLK, v_BJLE, lam_1, start_BL, static):
    return _gpu_forward(q_BIPLK, k_BIJLK, v_BJLE, lam_1, start_BL, static)[0]


def _gpu_forward(q_BIPLK, k_BIJLK, v_BJLE, lam_1, start_BL, static):
    arrays = {"q": q_BIPLK, "k": k_BIJLK, "v": v_BJLE, "lam": lam_1, "start": start_BL}
    B, _, P, L, _ = q_BIPLK.shape
    lse_BIPL = jax.ShapeDtypeStruct(q_BIPLK.shape[:-1], jnp.float32)
    o_BPLE = jax.ShapeDtypeStruct((B, P, L, v_BJLE.shape[-1]), v_BJLE.dtype)
    (lse_BIPL,) = _gpu_call(_sums_kernel, "start q k", arrays, {"lse": lse_BIPL}, static)
    arrays["lse"] = checkpoint_name(lse_BIPL, "lse")
    (o_BPLE,) = _gpu_call(_values_kernel, "lam start q k v lse", arrays, {"o": o_BPLE}, static)
    arrays["o"] = checkpoint_name(o_BPLE, "attn")
    return arrays["o"], arrays


def _gpu_backward(static, arrays, do_BPLE):
    """As _attention_backward: ds_i = w_i A_i (da - mean_i) with mean_i = sum_M A_i da, w = (1,
    -lam).
    """
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}
    arrays = arrays | {"do": do_BPLE}
    if shapes["q"].shape[1] == 2:
        inputs = "lam start q k v do lse"
        (arrays["mean"],) = _gpu_call(
            _means_kernel, inputs, arrays, {"mean": shapes["lse"]}, static
        )
        dlam = -jnp.sum(arrays["mean"][:, 1])
    else:  # sum_M A da = o do
        mean_BPL = jnp.einsum(
            "BPLE,BPLE->BPL", arrays["o"], do_BPLE, preferred_element_type=jnp.float32
        )
        arrays["mean"], dlam = mean_BPL[:, None], jnp.float32(0)
    inputs = "lam start q k v do lse mean"
    (dq_BIPLK,) = _gpu_call(_dq_kernel, inputs, arrays, {"dq": shapes["q"]}, static)
    arrays["reach"] = _reach(arrays["start"], *dict(static[1])["dkv"][:2])
    dkv = {"dk": shapes["k"], "dv": shapes["v"]}
    dk_BIJLK, dv_BJLE = _gpu_call(_dkv_kernel, "reach " + inputs, arrays, dkv, static)
    return dq_BIPLK, dk_BIJLK, dv_BJLE, dlam.reshape(1), None


_gpu.defvjp(_gpu_forward, _gpu_backward)


def _reach(start_BL, block_q, block_k):
    """For each block of keys, the first block of queries for which start_BL masks one of its keys,
    and the end of the blocks for which it does not mask all: [B, blocks, 2].
    """
    L = start_BL.shape[1]
    first_C1, slot_L = jnp.arange(0, L, block_k)[:, None], jnp.arange(L)
    hidden_BC = jnp.min(jnp.where(start_BL[:, None] > first_C1, slot_L, L), -1) // block_q
    end_BC = pl.cdiv(
        jnp.max(jnp.where(start_BL[:, None] < first_C1 + block_k, slot_L + 1, 0), -1), block_q
    )
    return jnp.stack([hidden_BC, end_BC], -1).astype(jnp.int32)


def _gpu_call(kernel, inputs, arrays, outputs, static):
    """The results of a kernel on the arrays that `inputs` names, in this order; outputs is {name:
    shape}.
    """
    (floor, tiles, interpret), name = static, kernel.__name__[1:].removesuffix("_kernel")
    block_q, block_k, warps = dict(tiles)[name]
    (B, I, P, L, K), (_, J, _, E) = arrays["q"].shape, arrays["v"].shape
    G = P // J
    # program (n, j, b) of the grid has block n of keys, and all queries of group j
    if kernel is _dkv_kernel:
        grid, block = (L // block_k, J, B), {"block_q": block_q}
        specs = {
            "start": pl.BlockSpec((None, L), lambda n, j, b: (b, 0)),
            "reach": pl.BlockSpec((None, None, 2), lambda n, j, b: (b, n, 0)),
            "q": pl.BlockSpec((None, I, G, L, K), lambda n, j, b: (b, 0, j, 0, 0)),
            "k": pl.BlockSpec((None, I, None, block_k, K), lambda n, j, b: (b, 0, j, n, 0)),
            "v": pl.BlockSpec((None, None, block_k, E), lambda n, j, b: (b, j, n, 0)),
            "o": pl.BlockSpec((None, G, L, E), lambda n, j, b: (b, j, 0, 0)),
            "lse": pl.BlockSpec((None, I, G, L), lambda n, j, b: (b, 0, j, 0)),
        }
    else:  # program (n, p, b) of the grid has a tile of the queries of head p, those with the longest rows first
        grid, block, last = (L // block_q, P, B), {"block_k": block_k}, L // block_q - 1
        specs = {
            "start": pl.BlockSpec((None, block_q), lambda n, p, b: (b, last - n)),
            "q": pl.BlockSpec((None, I, None, block_q, K), lambda n, p, b: (b, 0, p, last - n, 0)),
            "k": pl.BlockSpec(
                (None, I, None, L, K), lambda n, p, b: (b, 0, jax.lax.div(p, G), 0, 0)
            ),
            "v": pl.BlockSpec((None, None, L, E), lambda n, p, b: (b, jax.lax.div(p, G), 0, 0)),
            "o": pl.BlockSpec((None, None, block_q, E), lambda n, p, b: (b, p, last - n, 0)),
            "lse": pl.BlockSpec((None, I, None, block_q), lambda n, p, b: (b, 0, p, last - n)),
        }
    specs |= {"lam": pl.BlockSpec((1,), lambda n, p, b: (0,)), "mean": specs["lse"]}
    specs |= {f"d{x}": specs[x] for x in "qkvo"}
    params = None
    if not interpret:
        # here, since it needs a jaxlib with Triton
        from jax.experimental.pallas import triton as plgpu

        params = plgpu.CompilerParams(num_warps=warps, num_stages=2)  # two loads in flight
    return pl.pallas_call(
        functools.partial(kernel, **block, floor=floor),
        grid=grid,
        in_specs=[specs[x] for x in inputs.split()],
        out_specs=[specs[x] for x in outputs],
        out_shape=list(outputs.values()),
        compiler_params=params,
        interpret=interpret,
        name="diff_attention_" + name,
    )(*(arrays[x] for x in inputs.split()))


def _score_tile(x_XK, y_YK, seen_XY):
    """Scores times log2(e) of queries and keys, or keys and queries: exp2 is the GPU's
    instruction.
    """
    s_XY = _dot(x_XK, y_YK, 1, 1) * (x_XK.shape[-1] ** -0.5 * math.log2(math.e))
    return s_XY if seen_XY is None else jnp.where(seen_XY, s_XY, MASKED)


def _map_tiles(x_IXK, y_IYK, lse_I, seen_XY, lam_1):
    """The softmax maps of a tile, and A1 - lam A2, or A1 of one map. lse_I broadcasts along the
    keys.
    """
    tiles = zip(x_IXK, y_IYK, lse_I, strict=True)
    a_IXY = [jnp.exp2(_score_tile(x, y, seen_XY) - lse) for x, y, lse in tiles]
    return a_IXY, a_IXY[0] - lam_1[0] * a_IXY[1] if len(a_IXY) == 2 else a_IXY[0]


def _two_loops(begin, low, high, end, step, carry):
    """carry after step(n, masked, carry) for begin <= n < end; those with low <= n < high are not
    masked.
    """

    def at_the_edges(n, carry):
        return step(n + jnp.where(n < low, 0, high - low), True, carry)

    carry = jax.lax.fori_loop(begin, end - (high - low), at_the_edges, carry)
    return jax.lax.fori_loop(low, high, lambda n, carry: step(n, False, carry), carry)


def _over_keys(start_L, block_k, step, carry):
    """carry after step(keys, seen_LM, carry) for all blocks of keys that count; seen_LM None: no
    key is masked.
    """
    L, start_L = start_L.shape[0], start_L[...]
    first = (pl.num_programs(0) - 1 - pl.program_id(0)) * L
    query_L, key_M = first + jax.lax.iota(jnp.int32, L), jax.lax.iota(jnp.int32, block_k)
    begin, end = (
        jax.lax.div(jnp.min(start_L), block_k),
        jax.lax.div(first + (L + block_k - 1), block_k),
    )
    clear, diagonal = (
        jax.lax.div(jnp.max(start_L) + (block_k - 1), block_k),
        jax.lax.div(first + 1, block_k),
    )

    def masked_or_not(c, masked, carry):
        seen_LM, key_1M = None, c * block_k + key_M[None]
        if masked:
            seen_LM = (key_1M >= start_L[:, None]) & (key_1M <= query_L[:, None])
        return step(pl.ds(c * block_k, block_k), seen_LM, carry)

    return _two_loops(begin, jnp.minimum(clear, diagonal), diagonal, end, masked_or_not, carry)


def _sums_kernel(start_L, q_ILK, k_IMK, lse_IL, *, floor, block_k):
    """Base-2 logarithm of sum_M 2^s of each query and map, by an online softmax."""
    I, L, _ = q_ILK.shape

    def step(keys, seen_LM, rows):
        new_rows = []
        for i, (max_L, sum_L) in enumerate(rows):
            s_LM = _score_tile(q_ILK[i], k_IMK[i, keys], seen_LM)
            new_L = jnp.maximum(max_L, jnp.max(s_LM, 1))
            sum_L = sum_L * jnp.exp2(max_L - new_L) + jnp.sum(jnp.exp2(s_LM - new_L[:, None]), 1)
            new_rows.append((new_L, sum_L))
        return new_rows

    rows = [(jnp.full(L, MASKED, jnp.float32), jnp.zeros(L, jnp.float32))] * I
    for i, (max_L, sum_L) in enumerate(_over_keys(start_L, block_k, step, rows)):
        lse_IL[i] = max_L + jnp.log2(sum_L)


def _values_kernel(lam_1, start_L, q_ILK, k_IMK, v_ME, lse_IL, o_LE, *, floor, block_k):
    """o = max(A1 - lam A2, 0) V for one tile of queries."""
    I = len(q_ILK)
    lse_IL1 = [lse_IL[i][:, None] for i in range(I)]

    def step(keys, seen_LM, o_LE):
        k_IMK_block = [k_IMK[i, keys] for i in range(I)]
        _, a_LM = _map_tiles([q_ILK[i] for i in range(I)], k_IMK_block, lse_IL1, seen_LM, lam_1)
        a_LM = jnp.maximum(a_LM, 0.0) if floor else a_LM
        return o_LE + _dot(a_LM.astype(v_ME.dtype), v_ME[keys], 1, 0)

    o_LE[...] = _over_keys(start_L, block_k, step, jnp.zeros(o_LE.shape, jnp.float32)).astype(
        o_LE.dtype
    )


def _over_maps(q_ILK, k_IMK, v_ME, do_LE, lse_IL, lam_1, floor):
    """What means and dq share: a function of keys and mask that gives the maps of the tile, da, and
    the keys.
    """
    I = q_ILK.shape[0]
    lse_IL1 = [lse_IL[i][:, None] for i in range(I)]

    def at(keys, seen_LM):
        k_tile_IMK = [k_IMK[i, keys] for i in range(I)]
        a_ILM, a_LM = _map_tiles([q_ILK[i] for i in range(I)], k_tile_IMK, lse_IL1, seen_LM, lam_1)
        da_LM = _dot(do_LE[...], v_ME[keys], 1, 1)
        return a_ILM, jnp.where(a_LM > 0, da_LM, 0.0) if floor else da_LM, k_tile_IMK

    return at


def _means_kernel(*refs, floor, block_k):
    """mean_i = sum_M A_i da of each query."""
    lam_1, start_L, q_ILK, k_IMK, v_ME, do_LE, lse_IL, mean_IL = refs
    maps = _over_maps(q_ILK, k_IMK, v_ME, do_LE, lse_IL, lam_1, floor)

    def step(keys, seen_LM, mean_IL):
        a_ILM, da_LM, _ = maps(keys, seen_LM)
        return [
            mean_L + jnp.sum(a_LM * da_LM, 1) for mean_L, a_LM in zip(mean_IL, a_ILM, strict=True)
        ]

    zeros_IL = [jnp.zeros(start_L.shape, jnp.float32)] * q_ILK.shape[0]
    for i, mean_L in enumerate(_over_keys(start_L, block_k, step, zeros_IL)):
        mean_IL[i] = mean_L


def _dq_kernel(*refs, floor, block_k):
    """dq_i = sum_M ds_i k_i; the weights and the scale of ds wait until the sums are there."""
    lam_1, start_L, q_ILK, k_IMK, v_ME, do_LE, lse_IL, mean_IL, dq_ILK = refs
    (I, _, K), maps = q_ILK.shape, _over_maps(q_ILK, k_IMK, v_ME, do_LE, lse_IL, lam_1, floor)
    mean_IL1 = [mean_IL[i][:, None] for i in range(I)]

    def step(keys, seen_LM, sum_ILK):
        a_ILM, da_LM, k_tile_IMK = maps(keys, seen_LM)
        ds_ILM = [
            (a_LM * (da_LM - mean_L1)).astype(k_IMK.dtype)
            for a_LM, mean_L1 in zip(a_ILM, mean_IL1, strict=True)
        ]
        return [sum_ILK[i] + _dot(ds_ILM[i], k_tile_IMK[i], 1, 0) for i in range(I)]

    sum_ILK = _over_keys(start_L, block_k, step, [jnp.zeros(q_ILK.shape[1:], jnp.float32)] * I)
    for i, weight in zip(range(I), (1, -lam_1[0]), strict=False):
        dq_ILK[i] = (sum_ILK[i] * (weight * K**-0.5)).astype(dq_ILK.dtype)


def _dkv_kernel(*refs, floor, block_q):
    """dk_i = sum_L ds_i q_i and dv = sum_L max(A1 - lam A2, 0) do, over all queries of a group."""
    reach_2, lam_1, start_L, q_IGLK, k_IMK, v_ME, do_GLE, lse_IGL, mean_IGL, dk_IMK, dv_ME = refs
    (I, M, K), G = k_IMK.shape, q_IGLK.shape[1]
    first = pl.program_id(0) * M
    key_M1, query_L = (
        (first + jax.lax.iota(jnp.int32, M))[:, None],
        jax.lax.iota(jnp.int32, block_q),
    )
    # blocks of queries: across the diagonal; with no masked key; with keys that start_BL masks
    begin, end = jax.lax.div(first, block_q), reach_2[1]
    diagonal = jnp.minimum(jax.lax.div(first + (M + block_q - 2), block_q), end)
    hidden = jnp.clip(reach_2[0], diagonal, end)

    def of_head(g, sums):
        def step(n, masked, sums):
            rows, seen_ML = pl.ds(n * block_q, block_q), None
            if masked:
                seen_ML = (key_M1 <= n * block_q + query_L[None]) & (key_M1 >= start_L[rows][None])
            q_ILK, do_LE = [q_IGLK[i, g, rows] for i in range(I)], do_GLE[g, rows]
            lse_I1L = [lse_IGL[i, g, rows][None] for i in range(I)]
            a_IML, a_ML = _map_tiles([k_IMK[i] for i in range(I)], q_ILK, lse_I1L, seen_ML, lam_1)
            da_ML = _dot(v_ME[...], do_LE, 1, 1)
            if floor:
                da_ML, a_ML = jnp.where(a_ML > 0, da_ML, 0.0), jnp.maximum(a_ML, 0.0)
            new_sums = [sums[0] + _dot(a_ML.astype(do_LE.dtype), do_LE, 1, 0)]
            for i in range(I):
                ds_ML = (a_IML[i] * (da_ML - mean_IGL[i, g, rows][None])).astype(do_LE.dtype)
                new_sums.append(sums[1 + i] + _dot(ds_ML, q_ILK[i], 1, 0))
            return new_sums

        return _two_loops(begin, diagonal, hidden, end, step, sums)

    zeros = [jnp.zeros(v_ME.shape, jnp.float32)] + [jnp.zeros((M, K), jnp.float32)] * I
    sum_ME, *sum_IMK = jax.lax.fori_loop(0, G, of_head, zeros)
    dv_ME[...] = sum_ME.astype(dv_ME.dtype)
    for i, weight in zip(range(I), (1, -lam_1[0]), strict=False):
        dk_IMK[i] = (sum_IMK[i] * (weight * K**-0.5)).astype(dk_IMK.dtype)
