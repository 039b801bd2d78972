"""Differential attention: softmax(Q1 K1^T) - lambda softmax(Q2 K2^T), optionally floored at 0, times V.

`attention` is einsums: every device, training, packed documents, KV caches, left-padded batches, and plain attention (one map).
`attention_tpu` is the fused Pallas kernel for training on TPU: exact softmax rows in VMEM, one product with V.
One rule is the mask everywhere: the query at key slot `index` sees the key slots from `start` to `index`.

Letters: B batch, I softmax maps (2 differential, 1 plain), P heads (differential heads; plain query heads if I = 1), J key/value groups,
G = P / J, L queries, M keys, K head size, E value size (2K differential, K plain).
"""

import jax
import jax.numpy as jnp

MASKED = -1e30  # score of an invisible key; finite, so that a row that sees nothing gives a mean and not NaN


def lambda_init(layer):
    """0.8 - 0.6 exp(-0.3 layer), layers counted from 0; arrays and tracers too. Ref: arXiv:2410.05258, eq. 3 (from 1 there)."""
    return 0.8 - 0.6 * jnp.exp(-0.3 * jnp.asarray(layer, jnp.float32))


def lambda_value(lq1_K, lk1_K, lq2_K, lk2_K, init, clamp):
    """lambda = exp(lq1 . lk1) - exp(lq2 . lk2) + init, a float32 scalar. Ref: arXiv:2410.05258, eq. 2.

    `clamp` clips both dot products to [-10, 10] and lambda to [0, 1]; beyond an active clip every gradient is zero.
    """
    dot1, dot2 = (jnp.sum(q.astype(jnp.float32) * k.astype(jnp.float32)) for q, k in ((lq1_K, lk1_K), (lq2_K, lk2_K)))
    if not clamp:
        return jnp.exp(dot1) - jnp.exp(dot2) + init
    return jnp.clip(jnp.exp(jnp.clip(dot1, -10, 10)) - jnp.exp(jnp.clip(dot2, -10, 10)) + init, 0.0, 1.0)


def attention(q_BIPLK, k_BIJMK, v_BJME, lam, index_BL, start_BL, *, floor=True, cap=0.0, block=128):
    """o = max(A1 - lam A2, 0) V with A_i = softmax(Q_i K_i^T / sqrt(K)); without `floor` the map may be negative; A1 V if I = 1.

    Query l sits at key slot index_BL[b, l] and sees slots start_BL[b, l] to index_BL[b, l]: start is the first slot of its document,
    the number of pads on the left, or None for 0. index None means that query l sits at slot l (training), where each block of
    `block` queries reads only the keys up to its last query, half the work. `cap` c > 0 makes a score s into c tanh(s / c). Scores and
    softmax are float32, the map is cast to v's dtype. Scores take B I P block M floats per block. Raises ValueError on sizes that do not fit.
    """
    B, I, P, L, K = q_BIPLK.shape
    J, M = k_BIJMK.shape[2:4]
    if I not in (1, 2) or P % J or k_BIJMK.shape != (B, I, J, M, K) or v_BJME.shape[:3] != (B, J, M):
        raise ValueError(
            f"q {q_BIPLK.shape}, k {k_BIJMK.shape}, v {v_BJME.shape} are not BIPLK, BIJMK, BJME with I in (1, 2), J | P"
        )
    if index_BL is None and L != M:
        raise ValueError(f"{L} queries, {M} keys: without index_BL every query has its own key")
    q_BIJGLK, o_BPLE = q_BIPLK.reshape(B, I, J, P // J, L, K), []
    for i in range(0, L, block):
        rows, end = slice(i, i + block), min(i + block, L) if index_BL is None else M
        slot_M, index_bL = jnp.arange(end), jnp.arange(i, end)[None] if index_BL is None else index_BL[:, rows]
        seen_BLM = slot_M <= index_bL[..., None]
        if start_BL is not None:
            seen_BLM &= slot_M >= start_BL[:, rows, None]
        q_rows, k_seen, v_seen = q_BIJGLK[:, :, :, :, rows], k_BIJMK[:, :, :, :end], v_BJME[:, :, :end]
        o_BPLE.append(_attend(q_rows, k_seen, v_seen, lam, seen_BLM, floor, cap))
    return jnp.concatenate(o_BPLE, 2)


def _attend(q_BIJGLK, k_BIJMK, v_BJME, lam, seen_BLM, floor, cap):
    """One block of queries. G and L are merged around the products, so each is one batched matmul with G L rows."""
    B, I, J, G, L, K = q_BIJGLK.shape
    q_BIJNK = q_BIJGLK.reshape(B, I, J, G * L, K)
    s_BIJNM = jnp.einsum("BIJNK,BIJMK->BIJNM", q_BIJNK, k_BIJMK, preferred_element_type=jnp.float32) * K**-0.5
    if cap:
        s_BIJNM = cap * jnp.tanh(s_BIJNM / cap)
    s_BIJGLM = jnp.where(seen_BLM[:, None, None, None], s_BIJNM.reshape(B, I, J, G, L, -1), MASKED)
    e_BIJGLM = jnp.exp(s_BIJGLM - jax.lax.stop_gradient(jnp.max(s_BIJGLM, -1, keepdims=True)))
    r_BIJGL1 = 1 / jnp.sum(e_BIJGLM, -1, keepdims=True)  # L reciprocals, not L M divisions
    a_BJGLM = e_BIJGLM[:, 0] * r_BIJGL1[:, 0]
    if I == 2:
        a_BJGLM -= e_BIJGLM[:, 1] * (lam * r_BIJGL1[:, 1])
        a_BJGLM = jax.nn.relu(a_BJGLM) if floor else a_BJGLM  # not maximum(a, 0), whose gradient at 0 is 1/2
    a_BJNM = a_BJGLM.reshape(B, J, G * L, -1).astype(v_BJME.dtype)
    return jnp.einsum("BJNM,BJME->BJNE", a_BJNM, v_BJME).reshape(B, J * G, L, -1)
