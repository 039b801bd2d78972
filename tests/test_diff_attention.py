"""Differential attention: einsums against golden values and NumPy, the kernels in interpret mode
against them.

Interpret mode fills scratch memory with NaN, so it also shows that nothing is read that was not
written.
"""

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diff_attention import (
    attention,
    attention_gpu,
    attention_tpu,
    lambda_init,
    lambda_value,
    plain_tpu,
)

pytestmark = pytest.mark.usefixtures("exact_matmuls")

LAMBDAS = ("lq1", "lk1", "lq2", "lk2")


def slow(case):
    return pytest.param(case, marks=pytest.mark.slow)


def close(got, want, rel):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= rel * np.abs(want).max()


def random(B, P, J, L, K, I=2):
    """q, k, v and a gradient of the result."""
    draw = np.random.default_rng(0).standard_normal
    q, k, v = draw((B, I, P, L, K)), draw((B, I, J, L, K)), draw((B, J, L, I * K))
    return [np.float32(x) for x in (q, k, v, draw((B, P, L, I * K)))]


def starts(lengths_by_row):
    """start_BL of packed documents."""
    return np.int32([np.repeat(np.cumsum([0, *n[:-1]]), n) for n in lengths_by_row])


def brute_force(q_BIPLK, k_BIJMK, v_BJME, lam, index_BL, start_BL, floor, cap):
    """The same in float64, one query at a time."""
    B, I, P, L, K = q_BIPLK.shape
    G, o_BPLE = P // k_BIJMK.shape[2], np.zeros((B, P, L, v_BJME.shape[-1]))
    for b, p, l in np.ndindex(B, P, L):
        seen, maps = slice(start_BL[b, l], index_BL[b, l] + 1), []
        for i in range(I):
            k_MK, q_K = np.float64(k_BIJMK[b, i, p // G, seen]), np.float64(q_BIPLK[b, i, p, l])
            s_M = k_MK @ q_K / np.sqrt(K)
            e_M = np.exp(cap * np.tanh(s_M / cap) if cap else s_M)
            maps.append(e_M / e_M.sum())
        a_M = maps[0] if I == 1 else maps[0] - lam * maps[1]
        if floor and I == 2:
            a_M = np.maximum(a_M, 0)
        o_BPLE[b, p, l] = a_M @ np.float64(v_BJME[b, p // G, seen])
    return o_BPLE


# op by op would compile every op
run = jax.jit(attention, static_argnames=("floor", "cap", "block"))


@pytest.mark.parametrize("I", [1, 2])
@pytest.mark.parametrize(("L", "block"), [(1, 8), (8, 8), (9, 8), (23, 8), (23, 256)])
def test_attention_equals_brute_force_at_every_block_border(L, block, I):
    q, k, v, _ = random(2, 4, 2, L, 4, I=I)
    start_BL = starts([[min(3, L), L - min(3, L)], [L]])
    index_BL = np.broadcast_to(np.arange(L), (2, L))
    for floor, cap, index, start in ((True, 0.0, None, start_BL), (False, 1.5, index_BL, None)):
        first_BL = 0 * index_BL if start is None else start
        want = brute_force(q, k, v, 0.6, index_BL, first_BL, floor, cap)
        close(run(q, k, v, 0.6, index, start, floor=floor, cap=cap, block=block), want, 1e-6)


def test_decoding_through_a_cache_and_left_pads_give_the_whole_rows_answers():
    B, L, pads = 2, 12, 4
    q, k, v, _ = random(B, 3, 1, L, 8)
    whole = run(q, k, v, 0.7, None, None)

    def padded(x, left, right):
        sides = [(0, 0)] * (x.ndim - 2) + [(left, right), (0, 0)]
        return np.pad(x, sides, constant_values=9.0)

    cache_k, cache_v = padded(k, 0, 5), padded(v, 0, 5)
    for low, high in ((0, 7), (7, 8), (8, 12)):
        index_BL = np.broadcast_to(np.arange(low, high), (B, high - low))
        part = run(q[:, :, :, low:high], cache_k, cache_v, 0.7, index_BL, None)
        np.testing.assert_allclose(part, whole[:, :, low:high], atol=1e-6)
    moved = [padded(x, pads, 0) for x in (q, k, v)]
    shifted = run(*moved, 0.7, None, np.full((B, L + pads), pads))
    assert np.isfinite(shifted).all()  # pads see no key at all
    np.testing.assert_allclose(shifted[:, :, pads:], whole, atol=1e-6)


def test_floor_has_no_gradient_where_the_maps_are_equal():
    q, k, v, do = random(1, 1, 1, 6, 4)
    q[:, 1], k[:, 1] = q[:, 0], k[:, 0]  # so A1 - 1 A2 is exactly 0

    def loss(*inputs):  # op by op, since a fused multiply-add leaves 1e-9 for 0
        return jnp.sum(attention(*inputs, None, None) * do)

    grads = jax.grad(loss, argnums=(0, 1, 2, 3))(q, k, v, 1.0)
    assert all((np.asarray(g) == 0).all() for g in grads)


def split(x_BLNK):
    """The golden order of heads, differential head p in heads 2p and 2p + 1, to [B, I, P, L, K]."""
    B, L, N, K = x_BLNK.shape
    return x_BLNK.reshape(B, L, N // 2, 2, K).transpose(0, 3, 2, 1, 4)


def paired(x_BMNK):
    B, M, N, K = x_BMNK.shape
    return x_BMNK.reshape(B, M, N // 2, 2 * K).transpose(0, 2, 1, 3)


def by_kernel(q, k, v, lam, index_BL, start_BL, floor, cap):
    """The kernel on rows filled up to 128; what is added lies behind every query."""
    L = q.shape[3]
    assert L == k.shape[3]
    assert not cap
    full = -(-L // 128) * 128
    q, k, v = (jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, full - L), (0, 0)]) for x in (q, k, v))
    start_BL = np.zeros((len(q), L), np.int32) if start_BL is None else start_BL
    start_BL = jnp.pad(start_BL, [(0, 0), (0, full - L)], "edge")
    return attention_tpu(q, k, v, lam, start_BL, floor=floor, interpret=True)[:, :, :L]


@functools.partial(jax.jit, static_argnames=("core", "block", "floor", "cap", "clamp"))
def golden_layer(t, index_BL, start_BL, init, eps, core, block, floor, cap, clamp):
    """(lambda, heads, normed heads), gradients of sum(normed heads * cot), and the map."""
    settings = {"index_BL": index_BL, "start_BL": start_BL, "floor": floor, "cap": cap}

    def loss(p):
        lam = lambda_value(*(p[name] for name in LAMBDAS), init, clamp) + p["lam"]
        o_BLPE = core(split(p["q"]), split(p["k"]), paired(p["v"]), lam, **settings).swapaxes(1, 2)
        rms = jnp.sqrt(jnp.mean(o_BLPE**2, -1, keepdims=True) + eps)
        out_BLPE = o_BLPE / rms * p["subln"] * (1 - init)
        return jnp.sum(out_BLPE * t["cot"]), (lam, o_BLPE, out_BLPE)

    # "lam" for its gradient
    inputs = {"lam": 0.0} | {name: t[name] for name in ("q", "k", "v", "subln", *LAMBDAS)}
    (_, results), grads = jax.value_and_grad(loss, has_aux=True)(inputs)
    if not block:
        return results, grads, None
    B, M, N, _ = t["k"].shape  # with the identity as V, the result is the map
    eye_BJMM = jnp.broadcast_to(jnp.eye(M), (B, N // 2, M, M))
    maps = core(split(t["q"]), split(t["k"]), eye_BJMM, results[0], block=block, **settings)
    return results, grads, maps


@pytest.mark.golden
@pytest.mark.parametrize("core", [attention, slow(by_kernel)])
def test_golden_differential_attention_and_all_its_gradients(golden_dir, core):
    cases = json.loads((golden_dir("pythoncoder") / "diff_attention.json").read_text())["cases"]
    arrays = np.load(golden_dir("pythoncoder") / "diff_attention.npz")
    for case in cases:
        name = case["name"] + "/"
        t = {key.removeprefix(name): x for key, x in arrays.items() if key.startswith(name)}
        B, L, M = *t["q"].shape[:2], t["k"].shape[1]
        if core is by_kernel and (L != M or case["cap"]):
            continue  # not the kernel's task
        index_BL, start_BL = np.broadcast_to(np.arange(M - L, M), (B, L)), None
        if "seg_q" in t:
            start_BL = np.argmax(t["seg_q"][:, :, None] == t["seg_k"][:, None, :], -1)
        inputs = {name: t[name] for name in ("q", "k", "v", "subln", "cot", *LAMBDAS)}
        static = {name: case[name] for name in ("floor", "cap", "clamp")} | {"core": core}
        static["block"] = 64 if core is attention and "map" in t else 0
        places = index_BL, start_BL, lambda_init(case["layer"]), case["eps"]
        (lam, o_BLPE, out_BLPE), grads, map_BPLM = golden_layer(inputs, *places, **static)
        assert float(lam) == pytest.approx(case["lam"], abs=2e-7)
        close(o_BLPE, t["o"], 2e-5)
        close(out_BLPE, t["out"], 2e-5)
        for name, grad in grads.items():
            close(grad, case["dlam"] if name == "lam" else t["d" + name], 1e-4)
        if map_BPLM is not None:
            close(map_BPLM, t["map"], 2e-5)


@pytest.mark.golden
def test_golden_v2_is_a_difference_of_plain_heads(golden_dir):
    cases = json.loads((golden_dir("pythoncoder") / "diff_v2.json").read_text())["cases"]
    arrays = np.load(golden_dir("pythoncoder") / "diff_v2.npz")
    for case in cases:
        names = ("q", "k", "v", "lambda_logit", "out")
        q, k, v, logit_BLP, want = (arrays[f"{case['index']}/{name}"] for name in names)
        q_BIPLK, k_BIJLK = (x.swapaxes(1, 2)[:, None] for x in (q, k))
        o_BPLE = run(q_BIPLK, k_BIJLK, v.swapaxes(1, 2), None, None, None)
        gate_BPL1 = jax.nn.sigmoid(logit_BLP).swapaxes(1, 2)[..., None]
        close((o_BPLE[:, 0::2] - gate_BPL1 * o_BPLE[:, 1::2]).swapaxes(1, 2), want, 2e-5)


@pytest.mark.golden
def test_golden_lambda_init_of_ints_arrays_and_tracers(golden_dir):
    values = json.loads((golden_dir("pythoncoder") / "lambda_init.json").read_text())["values"]
    layers = np.arange(len(values))
    one_by_one, traced = [lambda_init(int(n)) for n in layers], jax.jit(jax.vmap(lambda_init))
    for got in (one_by_one, lambda_init(layers), traced(layers)):
        np.testing.assert_allclose(np.asarray(got), values, rtol=0, atol=1e-7)


# fmt: off
KERNEL_CASES = {  # documents of each row, block_q, block_k, heads P, groups J, floor
    "one document": ([[384]], 128, 128, 3, 1, True),
    "borders before, at and after block borders":
        ([[127, 129, 128], [129, 127, 128]], 128, 128, 2, 2, True),
    "blocks of queries longer than of keys": ([[100, 156], [255, 1]], 256, 128, 1, 1, True),
    "blocks of keys longer than of queries, no floor":
        ([[60, 100, 96], [128, 128]], 128, 256, 3, 1, False),
    "single tokens": ([[1] * 256, [1, 126, 1, 1, 1, 126]], 128, 128, 2, 1, True),
    "blocks that do not divide the length, no floor": ([[200, 184]], 256, 512, 1, 1, False),
}
# fmt: on
SLOW = [name for name in KERNEL_CASES if "borders" not in name]


def with_gradients(core, q, k, v, lam, do):
    o, vjp = jax.vjp(core, q, k, v, lam)
    return {"o": o} | dict(zip(("dq", "dk", "dv", "dlam"), vjp(do), strict=True))


@pytest.mark.parametrize("name", ["borders before, at and after block borders", *map(slow, SLOW)])
def test_kernel_equals_einsums_forward_and_in_every_gradient(name):
    documents, block_q, block_k, P, J, floor = KERNEL_CASES[name]
    inputs, start_BL = random(len(documents), P, J, sum(documents[0]), 16), starts(documents)

    @jax.jit
    def both(q, k, v, do, start_BL):
        settings = {"start_BL": start_BL, "floor": floor}
        blocks = {"block_q": block_q, "block_k": block_k, "interpret": True}
        einsums = functools.partial(attention, index_BL=None, **settings)
        kernel = functools.partial(attention_tpu, **settings, **blocks)
        return [with_gradients(core, q, k, v, jnp.float32(0.6), do) for core in (einsums, kernel)]

    want, got = both(*inputs, start_BL)
    for key in want:
        # dlam is a sum with cancellation
        close(got[key], want[key], 1e-4 if key == "dlam" else 1e-5)


@pytest.mark.slow
def test_the_library_s_kernel_for_one_map_equals_einsums_forward_and_in_every_gradient():
    (q, k, v, do), start_BL = random(2, 4, 2, 256, 16), starts([[150, 106], [256]])
    q, k, v, do = q[:, :1], k[:, :1], v[..., :16], do[..., :16]

    @jax.jit
    def both(*inputs):
        einsums = functools.partial(attention, index_BL=None, start_BL=start_BL)
        kernel = functools.partial(plain_tpu, start_BL=start_BL, interpret=True)
        return [with_gradients(core, *inputs) for core in (einsums, kernel)]

    want, got = both(q, k, v, jnp.float32(0), do)
    for key in ("o", "dq", "dk", "dv"):
        close(got[key], want[key], 1e-5)
    with pytest.raises(ValueError, match="1 maps over 200 slots"):
        plain_tpu(q[..., :200, :], k[..., :200, :], v[..., :200, :], 0.0, None)


def test_kernel_in_bfloat16_errs_at_most_twice_as_much_as_einsums():
    q, k, v, do = (jnp.asarray(x, jnp.bfloat16) for x in random(1, 2, 1, 256, 64))
    start_BL = starts([[150, 106]])

    @functools.partial(jax.jit, static_argnames="dtype")
    def einsums(*inputs, dtype):
        core = functools.partial(attention, index_BL=None, start_BL=start_BL)
        return with_gradients(core, *(x if x.ndim == 0 else x.astype(dtype) for x in inputs))

    @jax.jit
    def kernel(*inputs):
        core = functools.partial(attention_tpu, block_q=128, block_k=128)
        return with_gradients(functools.partial(core, start_BL=start_BL, interpret=True), *inputs)

    inputs = q, k, v, jnp.float32(0.6), do
    plain, fused = einsums(*inputs, dtype="bfloat16"), kernel(*inputs)
    for key, want in einsums(*inputs, dtype="float32").items():
        errors = (np.linalg.norm(np.float32(x[key]) - want) for x in (plain, fused))
        error_plain, error_fused = errors
        assert error_fused <= 2 * error_plain + 1e-3 * np.linalg.norm(want), key


def test_kernel_skips_blocks_of_earlier_documents():
    q, k, v, _ = random(1, 1, 1, 256, 16)
    k[..., :128, :] = v[..., :128, :] = np.nan
    kernel = functools.partial(attention_tpu, block_q=128, block_k=128, interpret=True)
    o_BPLE = kernel(q, k, v, 0.6, starts([[128, 128]]))
    assert np.isnan(o_BPLE[:, :, :128]).all()
    assert np.isfinite(o_BPLE[:, :, 128:]).all()


@pytest.mark.parametrize("by", ["einsums", "tpu"])
def test_a_change_reaches_later_positions_of_its_document_and_nothing_else(by):
    L, changed, end = 256, 140, 200
    start_BL, moved = starts([[130, end - 130, L - end]]), random(1, 1, 1, L, 16)[:3]
    for x in moved:
        x[..., changed, :] += 1
    core = functools.partial(attention, index_BL=None)
    if by == "tpu":
        core = functools.partial(attention_tpu, block_q=128, block_k=128, interpret=True)
    core = jax.jit(functools.partial(core, start_BL=start_BL))
    differs_L = np.any(core(*moved, 0.6) != core(*random(1, 1, 1, L, 16)[:3], 0.6), (0, 1, 3))
    assert not differs_L[:changed].any()
    assert differs_L[changed:end].mean() > 0.9  # a weight that the floor held at 0 may stay there
    assert not differs_L[end:].any()


@pytest.mark.parametrize("I", [1, 2])
def test_the_calls_on_a_gpu_equal_einsums_forward_and_in_every_gradient(I):
    """cuDNN itself has never run here: XLA computes the same calls."""
    inputs, start_BL = random(2, 6, 2, 41, 16, I), starts([[40, 1], [1, 40]])

    @jax.jit
    def both(q, k, v, do, start_BL):
        einsums = functools.partial(attention, index_BL=None, start_BL=start_BL, floor=False)
        calls = functools.partial(attention_gpu, start_BL=start_BL, implementation="xla")
        return [with_gradients(core, q, k, v, jnp.float32(0.6), do) for core in (einsums, calls)]

    want, got = both(*inputs, start_BL)
    for key in want:
        close(got[key], want[key], 1e-4 if key == "dlam" else 1e-5)


def test_sizes_that_do_not_fit_are_refused():
    q, k, v, _ = random(1, 2, 1, 130, 8)
    with pytest.raises(ValueError, match=r"rows of 130 tokens, blocks 512, 512: .*\(--seq_len\)"):
        attention_tpu(q, k, v, 0.5, None)
    with pytest.raises(AssertionError, match="1 maps: the kernel is for two"):
        attention_tpu(q[:, :1], k[:, :1], v, 0.5, None)
    with pytest.raises(AssertionError, match="every query has its own key"):
        attention(q[..., :3, :], k, v, 0.5, None, None)
    with pytest.raises(AssertionError, match="1 heads, 2 key/value groups"):
        attention_tpu(q[:, :, :1], k[:, :, [0, 0]], v[:, [0, 0]], 0.5, None)
    with pytest.raises(AssertionError, match="1 heads, 2 key/value groups"):
        attention(q[:, :, :1], k[:, :, [0, 0]], v[:, [0, 0]], 0.5, None, None)


COMPILE = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from diff_attention import attention_tpu

chip = topologies.get_topology_desc(
    platform="tpu", topology_name="v6e:1x1", chips_per_host_bounds=(1, 1, 1), num_slices=1)
mesh = Mesh(np.array(chip.devices), ("data",))
B, P, J, L, K, dtype = 1, 6, 2, int(sys.argv[1]), 128, sys.argv[2]

def shape(*sizes, dtype=dtype):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

inputs = shape(B, 2, P, L, K), shape(B, 2, J, L, K), shape(B, J, L, 2 * K), shape(dtype="float32")
inputs += (shape(B, L, dtype="int32"),)
loss = lambda *a: jnp.sum(attention_tpu(*a).astype(jnp.float32))
with jax.set_mesh(mesh):
    jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3))).lower(*inputs).compile()
print("compiled")
"""


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="pip install -r requirements-tpu.txt"
)
@pytest.mark.parametrize(
    ("L", "dtype"), [(2048, "bfloat16"), (8192, "bfloat16"), (2048, "float32")]
)
def test_both_kernels_compile_for_a_v6e_chip(L, dtype):
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    env |= {"JAX_PLATFORMS": "cpu", "TPU_ACCELERATOR_TYPE": "v6e-1", "TPU_SKIP_MDS_QUERY": "1"}
    env |= {"TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    command, root = [sys.executable, "-c", COMPILE, str(L), dtype], Path(__file__).parent.parent
    pipes = {"capture_output": True, "text": True, "timeout": 600, "check": False}
    done = subprocess.run(command, env=env, cwd=root, **pipes)
    assert done.stdout.endswith("compiled\n"), done.stderr[-3000:]
