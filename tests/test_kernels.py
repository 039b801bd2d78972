"""The CUDA kernels without a GPU: their own source, emulated; what nvcc says of it for sm_87;
planted bugs are found.

With a GPU, the same checks on the device: pytest -m gpu tests/test_kernels.py, after
setup_kernels.py.
"""

import contextlib
import ctypes
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import csrc
import diffusion
import model_mdlm
import setup_kernels
from csrc import ops

ROOT = Path(__file__).resolve().parent.parent
MASK = 3


def sizes(*quick, slow):
    """Parameters of a test: those of the quick run have both sides of every border of a tile."""
    return [*quick, *(pytest.param(size, marks=pytest.mark.slow) for size in slow)]


# A tile is 16, 32 or 64 queries and 64 keys.
BORDERS = sizes(
    1, 17, 64, 65, slow=(7, 8, 15, 16, 31, 32, 33, 63, 80, 127, 128, 129, 191, 192, 193)
)


def normal(kernels, *shape, seed=0, scale=1.0):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
    return x.half().to(kernels.device)


def attention_in(dtype, qkv_BL3HK, see_BL, cos_sin=None):
    q, k, v = qkv_BL3HK.to(dtype).unbind(2)
    if cos_sin:
        q, k = (turned(x, *cos_sin) for x in (q, k))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = None if see_BL is None else see_BL[:, None, None]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.transpose(1, 2).flatten(2).double()


def turned(x_BLHK, cos_LK, sin_LK):
    """x times e^(i angle) in complex numbers: RoPE, rounded to the type of x."""
    a, b = x_BLHK.double().chunk(2, -1)
    z = torch.complex(a, b) * torch.complex(cos_LK.double(), sin_LK.double())[:, None]
    return torch.cat([z.real, z.imag], -1).to(x_BLHK.dtype)


def no_worse(got, plain, exact, least=1e-4):
    """At most twice the error of the plain operator in the same dtype."""
    error, limit = ((x.double() - exact).abs().max().item() for x in (got, plain))
    assert error <= max(2 * limit, least), (error, limit)


def attends(got, qkv, see=None, cos_sin=None, rows=slice(None)):
    """The attention of these rows is no worse than PyTorch's in halves."""
    plain, exact = (attention_in(t, qkv, see, cos_sin) for t in (torch.float16, torch.float64))
    no_worse(got[rows], plain[rows], exact[rows])


def uniform(kernels, *shape, seed):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)).to(kernels.device)


# ---- attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", BORDERS)
def test_attention_at_the_borders_of_tiles(runs, length):
    qkv = normal(runs, 2, length, 3, 1, 64, seed=length)
    see = uniform(runs, 2, length, seed=length) < 0.7
    see[:, 0] = True
    for mask, choices in (None, (1, 2, 4)), (see, (0,)):
        for warps in choices:
            attends(runs.attention(qkv, mask, None, warps), qkv, mask)


@pytest.mark.parametrize("length", sizes(1, 16, 65, slow=(9, 31, 64, 130, 200)))
def test_attention_turns_queries_and_keys_by_their_positions(runs, length):
    qkv = normal(runs, 2, length, 3, 1, 64, seed=length)
    # angles that grow at random, so that none stands for another
    angle = uniform(runs, length, 32, seed=length).cumsum(0)
    cos_sin = angle.cos(), angle.sin()
    table, see = torch.cat(cos_sin, -1), uniform(runs, 2, length, seed=0) < 2
    see[1, (length + 1) // 2 :] = False  # padding
    for mask, warps in ((None, 1), (see, 2), (None, 4), (see, 0)):
        attends(runs.attention(qkv, mask, table, warps), qkv, mask, cos_sin)
        on_cpu = [None if tensor is None else tensor.cpu() for tensor in (qkv, mask, table)]
        attends(ops.attention_torch(*on_cpu).to(runs.device), qkv, mask, cos_sin)


def test_attention_leaves_tiles_of_padding_out(runs):
    length, seen = 300, 70
    qkv, see = normal(runs, 1, length, 3, 1, 64), uniform(runs, 1, length, seed=0) < 0
    see[:, :seen] = True
    want = runs.attention(qkv, see)
    attends(want, qkv, see)
    qkv[:, 128:, 1:] = torch.nan  # 0 times NaN is NaN: what is read shows
    assert torch.equal(runs.attention(qkv, see), want)


@pytest.mark.slow
def test_attention_over_the_longest_canvas(runs):
    qkv = normal(runs, 1, ops.MAX_LENGTH, 3, 1, 64)
    attends(runs.attention(qkv), qkv)


def test_attention_where_nothing_is_seen_is_zero(runs):
    see = torch.ones(3, 70, dtype=torch.bool, device=runs.device)
    see[1] = False
    see[2, :65] = False  # the first tile of keys is hidden, the second is not
    qkv = normal(runs, 3, 70, 3, 2, 64)
    out, lse = runs.attention(qkv, see, lse=True)
    assert (out[1] == 0).all()
    assert (lse[1] == -torch.inf).all()
    attends(out, qkv, see, rows=slice(2, 3))


def test_attention_reads_nothing_beyond_its_rows(runs):
    room = normal(runs, 1, 48, 3, 2, 64)
    want = runs.attention(room[:, :33].contiguous())
    room[:, 33:] = torch.nan
    view = room[:, :33]
    assert torch.equal(runs.attention_strided(*view.unbind(2))[0].flatten(2), want)


# ---- pointwise -----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", sizes(8, 248, 256, 264, 384, 1024, slow=(64, 512, 640, 768, 776)))
def test_add_norm_and_gelu(runs, width):
    rows = width % 7 + 1
    x, residual = (normal(runs, rows, width, seed=seed, scale=3) for seed in (1, 2))
    gamma, beta = 1 + normal(runs, width, seed=3, scale=0.1), normal(runs, width, seed=4)

    def results(add_norm, bias_gelu, x, residual, gamma, beta):
        norms = add_norm(x, residual, gamma, beta, 1e-5)
        return *norms, bias_gelu(x, beta), bias_gelu(x, beta, True)

    given = x, residual, gamma, beta
    got = results(runs.add_norm, runs.bias_gelu, *given)
    plain = results(ops.add_norm_torch, ops.bias_gelu_torch, *given)
    exact = results(ops.add_norm_torch, ops.bias_gelu_torch, *(t.double() for t in given))
    for one, two, three in zip(got, plain, exact, strict=True):
        no_worse(one, two, three)


def test_gelu_of_more_rows_than_blocks(runs):
    y, bias = normal(runs, 4099, 8, scale=3), normal(runs, 8, seed=1)
    exact = ops.bias_gelu_torch(y.double(), bias.double())
    no_worse(runs.bias_gelu(y, bias), ops.bias_gelu_torch(y, bias), exact)


def test_norm_of_a_far_off_mean(runs):
    x = normal(runs, 5, 384, scale=0.5) + 300
    gamma, beta = torch.ones_like(x[0]), torch.zeros_like(x[0])
    _, norm = runs.add_norm(x, torch.zeros_like(x), gamma, beta, 1e-5)
    want = F.layer_norm(x.double(), (384,))
    np.testing.assert_allclose(norm.cpu().float(), want.cpu(), atol=3e-3)


def test_the_bench_times_every_kernel_whatever_it_draws(kernels, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    import bench_kernels

    preset = bench_kernels.mdlm.Config(vocab=16, width=128, heads=2, ffn=256)
    for seed in range(6):
        torch.manual_seed(seed)
        for name, ours, theirs, exact in bench_kernels.pairs(64, preset, kernels, "cpu"):
            if exact is not None:
                errors, as_exact = bench_kernels.compare(ours, theirs, exact)
                assert as_exact, (name, seed, errors)


@pytest.mark.slow
@pytest.mark.parametrize("rope", [False, True])
def test_predictions_count_the_launches_of_a_step(rope, monkeypatch):
    pytest.importorskip("tokenizers")
    monkeypatch.syspath_prepend(ROOT / "bench")
    import bench_jetson
    import bench_kernels

    preset = model_mdlm.Config(vocab=300, width=128, layers=2, heads=2, ffn=256, rope=rope)
    launches, _ = bench_jetson.count_steps(model_mdlm.MDLM(preset), 32, preset.vocab)["ours"]
    parts, nodes = bench_kernels.predict_step(32, "Orin Nano, 15 W", preset, 25)
    assert nodes == launches
    assert parts["gaps"] == nodes * bench_kernels.GAP_US


# ---- sampler -------------------------------------------------------------------------------------


def philox(counter, seed):
    """Philox4x32-10 as the paper has it, on Python's integers or arrays of uint64."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


@pytest.mark.parametrize(
    ("counter", "seed", "want"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0x299F31D0A4093822,
         (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)  # fmt: skip
def test_philox_gives_the_known_answers(counter, seed, want):
    assert philox(counter, seed) == want
    signed = seed - 2**64 if seed >= 2**63 else seed
    got = ops.philox_torch([torch.tensor(c) for c in counter], torch.tensor(signed))
    assert tuple(got.tolist()) == want


def uniforms(words):
    u = (np.asarray(words, np.uint32).astype(np.float32) + np.float32(0.5)) * 2.0**-32
    return np.minimum(u, 1 - 2.0**-24)


def test_logarithms_of_the_noise_are_exact_to_a_hundred_thousandth(kernels):
    """The noise of ids that can win: E up to 16. Emulated logarithms are as far off as a GPU's may
    be.
    """
    # all sizes of word, and both sides of u = 1/16, where series and logarithm meet
    near = 2**28 + np.arange(-(2**16), 2**16, 7)
    words = [np.geomspace(1, 2**32 - 1, 200_000), near, np.arange(256)]
    word = np.unique(np.concatenate(words).astype(np.uint32))
    got = np.empty(len(word), np.float32)
    kernels.module.log2_exponentials(word.ctypes.data, got.ctypes.data, len(word))
    exact = np.log2(-np.log2(1 - uniforms(word).astype(np.float64)))
    assert np.abs(got - exact).max() < 1e-5
    assert np.abs(got - exact).max() > 1e-6  # else nothing is approximate here


def expected(logits, token, seed, step, keep, ban, vocab, temperature, top_k, top_p):
    """The sampler's answer by diffusion.py in float64, on its own Philox."""
    token = token.copy()
    for row in np.flatnonzero(token.ravel() == MASK).tolist():
        if uniforms(philox((0, row, step, 1), seed)[0]) < keep:
            continue
        x = diffusion.ban(logits[row : row + 1, :vocab].astype(np.float64), ban)
        x = diffusion.filter_logits(x, temperature, top_k, top_p if temperature else 1)
        counter = np.arange(-(-vocab // 4), dtype=np.uint64), row, step, 0
        words = np.stack(philox(counter, seed), -1)
        race = x - np.log(-np.log1p(-uniforms(words).ravel()[:vocab])) if temperature else x
        token.ravel()[row] = race.argmax()
    return token


def step(function, device, logits, token, seed, at, keep, ban, vocab, temperature, top_k, top_p):
    """One call on a copy of the tokens."""
    token = torch.from_numpy(token.copy()).to(device)
    table = torch.full((at + 1,), 2.0)
    table[at] = keep
    seed = seed - 2**64 if seed >= 2**63 else seed
    state, ban = torch.tensor([seed, at]), torch.tensor(ban, dtype=torch.int32)
    given = torch.from_numpy(logits), state, table, ban
    logits, state, table, ban = (x.to(device) for x in given)
    function(logits, token, state, table, ban, MASK, vocab, temperature, top_k, top_p)
    return token.cpu().numpy()


RULES = [
    (1.0, 0, 1.0), (1.0, 0, 0.9), (0.7, 0, 0.5), (1.3, 5, 1.0), (1.0, 1, 1.0), (0.8, 20, 0.8),
    (1.0, 0, 1e-9), (0.0, 0, 1.0), (0.0, 3, 0.5), (1.0, 10_000, 0.95), (1.0, 13, 1.0),
    (1.0, 14, 1.0), (1.0, 16, 0.9), (1e-37, 0, 0.9), (1e-39, 5, 1.0), (1e-60, 0, 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "eager"), [(np.float16, False), (np.float32, True)])
def test_sampler_agrees_with_diffusion(runs, dtype, eager):
    rng = np.random.default_rng(0)
    if runs.device == "cpu":
        # shared memory then begins with large numbers, which would win
        runs.module.set_eager_copies(eager)
    for number, (rule, (V, vocab)) in enumerate(itertools.product(RULES, [(18, 17), (333, 300)])):
        token = rng.choice([MASK, 7], (2, 4)).astype(np.int64)
        logits = (3 * rng.standard_normal((8, V))).astype(dtype)
        logits[:, 11] = logits[:, 12]  # equals are in or out together
        rest = (2**63 + number, number, 0.4, [0, 1, MASK, 4], vocab, *rule)
        want = expected(logits, token, *rest)
        assert (want != token).any()
        for function, device in ((runs.sample_, runs.device), (ops.sample_torch_, "cpu")):
            got = step(function, device, logits, token, *rest)
            np.testing.assert_array_equal(got, want, err_msg=str(rest))


def test_sampler_at_the_size_of_a_vocabulary(runs):
    rng, token = np.random.default_rng(1), np.full((1, 3), MASK)
    # the last one not aligned
    for dtype, V in ((np.float16, 16384), (np.float32, 8192), (np.float16, 8190)):
        logits = (2 * rng.standard_normal((3, V))).astype(dtype)
        for rule in ((1.0, 0, 0.95), (1.0, 50, 0.9)):
            rest = (5, 2, 0.0, [0, 1, MASK, 4], V, *rule)
            got = step(runs.sample_, runs.device, logits, token, *rest)
            np.testing.assert_array_equal(got, expected(logits, token, *rest))


def test_sampler_finds_the_very_first_ones(runs):
    """With one id allowed it is the arg-max, wherever in the row it lies; a slip in a count or a
    sum shows here.
    """
    rng, rows, V = np.random.default_rng(2), 24, 1024
    logits, token = rng.standard_normal((rows, V)).astype(np.float16), np.full((1, rows), MASK)
    # nearly all of the others are in reach of Gumbel noise
    logits[np.arange(rows), rng.permutation(V)[:rows]] = 5
    logits[:, MASK] = -9
    for rule in ((1.0, 1, 1.0), (3.0, 0, 1e-9), (0.0, 0, 1.0)):
        got = step(runs.sample_, runs.device, logits, token, 8, 0, 0.0, [MASK], V, *rule)
        np.testing.assert_array_equal(got[0], logits.argmax(-1), err_msg=str(rule))
    logits[:] = np.repeat(logits[:, :1], V, 1)
    got = step(runs.sample_, runs.device, logits, token, 8, 0, 0.0, [0, 1, MASK, 4], V, 0.0, 0, 1.0)
    assert (got == 2).all()  # of equals the first


def test_sampler_draws_from_the_softmax(kernels):
    V, rows = 8, 200
    share_V = np.array([0.4, 0.2, 0.1, 0.0001, 0.1, 0.1, 0.05, 0.0499], np.float32)
    logits, token = np.log(share_V)[None].repeat(rows, 0), np.full((1, rows), MASK)
    got = step(kernels.sample_, "cpu", logits, token, 11, 0, 0.0, [MASK], V, 1.0, 0, 1.0)
    share = np.bincount(got.ravel(), minlength=V) / rows
    want = share_V * (np.arange(V) != MASK) / (1 - 0.0001)
    # four standard errors of the largest
    assert np.abs(share - want).max() < 4 * np.sqrt(0.24 / rows)
    assert share[MASK] == 0


def test_sampler_keeps_the_share_it_is_told(kernels):
    rows, rest = 120, (1, 0.3, [MASK], 8, 1.0, 0, 1.0)
    logits, token = np.zeros((rows, 8), np.float32), np.full((1, rows), MASK)
    drawn = [step(kernels.sample_, "cpu", logits, token, s, *rest) for s in (3, 3, 4)]
    assert np.mean(drawn[0] == MASK) == pytest.approx(0.3, abs=4 * np.sqrt(0.21 / rows))
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert (drawn[0] != drawn[2]).mean() > 0.3


def test_both_zeros_are_one_logit(runs):
    logits, token = np.full((1, 8), -3, np.float16), np.full((1, 1), MASK)
    logits[0, 5], logits[0, 6] = 0.0, -0.0  # bit patterns differ
    for rule in ((1.0, 1, 1.0), (1.0, 0, 1e-9)):
        rest = (0, 0.0, [MASK], 8, *rule)
        drawn = [step(runs.sample_, runs.device, logits, token, s, *rest) for s in range(12)]
        assert {*np.stack(drawn).ravel()} == {5, 6}


def test_sampler_leaves_a_row_without_finite_logits_masked(runs):
    logits = np.zeros((4, 16), np.float16)
    logits[0], logits[1], logits[2, 5] = np.nan, -np.inf, np.nan
    token = np.full((1, 4), MASK)
    rest = (1, 0, 0.0, [MASK], 16, 1.0, 0, 0.9)
    for function, device in ((runs.sample_, runs.device), (ops.sample_torch_, "cpu")):
        got = step(function, device, logits, token, *rest)
        assert (got[0, :2] == MASK).all()
        assert got[0, 3] != MASK


# ---- operators -----------------------------------------------------------------------------------


def operator_arguments():
    qkv, see = torch.randn(2, 9, 3, 2, 64), torch.rand(2, 9) < 0.8
    see[:, 0] = True
    x, gamma = torch.randn(2, 9, 32), torch.randn(32)
    token, state = torch.full((2, 9), MASK), torch.tensor([7, 0])
    ban = torch.tensor([MASK], dtype=torch.int32)
    yield "attention", (qkv, see)
    yield "attention", (qkv, None)
    yield "attention", (qkv, see, torch.randn(9, 64))
    yield "add_norm", (x, x + 1, gamma, gamma, 1e-5)
    yield "bias_gelu", (x, gamma, True)
    logits, keep = torch.randn(18, 40), torch.tensor([0.5])
    yield "sample_", (logits, token, state, keep, ban, MASK, 40, 1.0, 0, 0.9)


@pytest.mark.slow
def test_operators_are_well_registered():
    for name, arguments in operator_arguments():
        checked = torch.library.opcheck(getattr(torch.ops.unmask, name).default, arguments)
        assert {*checked.values()} == {"SUCCESS"}, (name, checked)


@torch.no_grad()
def test_operators_compile_and_export_whole():
    qkv, see = next(operator_arguments())[1]

    class Module(torch.nn.Module):
        def forward(self, qkv, see):
            y = torch.ops.unmask.attention(qkv, see)
            return torch.ops.unmask.bias_gelu(y, qkv[0, 0, 0].flatten())

    module = Module()
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    for made in (compiled, torch.export.export(module, (qkv, see)).module()):
        torch.testing.assert_close(made(qkv, see), module(qkv, see))


def test_wrong_arguments_are_named(kernels):
    def half(*shape):
        return torch.zeros(*shape).half()

    qkv, attention, gelu = half(1, 4, 3, 2, 64), kernels.attention, kernels.bias_gelu
    for function, arguments, message in (
        (attention, [qkv.float()], "float32"),
        (attention, [qkv[..., :32]], "64"),
        (attention, [half(1, 1025, 3, 1, 64)], "1025"),
        (attention, [qkv, torch.ones(1, 5, dtype=torch.bool)], r"\(1, 5\)"),
        (attention, [qkv, None, torch.zeros(5, 64)], r"\(5, 64\), not \(4, 64\)"),
        (attention, [qkv, None, torch.zeros(4, 64).double()], "float64"),
        (attention, [half(2, 3, 3, 2, 64).transpose(0, 1)], "contiguous"),
        (gelu, [half(2, 12), half(12)], "multiple of 8"),
        (kernels.add_norm, [*[half(2048)] * 4, 1e-5], "1024"),
        (gelu, [half(24)[1:9], half(8)], "16 bytes"),
        (kernels.sample_, [half(1, 16392), *[None] * 5, 16392, 1.0, 0, 1.0], "shared memory"),
    ):
        with pytest.raises(ValueError, match=message):
            function(*arguments)


def test_a_kernel_starts_on_the_device_of_its_tensors(monkeypatch):
    current, calls = [], []

    class Device(contextlib.nullcontext):
        def __enter__(self):
            current.append(self.enter_result)

        def __exit__(self, *_):
            current.pop()

    class Fake:
        def __init__(self, module):
            self.bias_gelu = lambda y, bias: calls.append([*current])

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(ops, "ON_GPU", type(ops.ON_GPU)())
    monkeypatch.setattr(ops, "Kernels", Fake)
    monkeypatch.setattr(ops, "load", lambda: None)
    asked = []
    monkeypatch.setattr(ops, "why_not", lambda device: asked.append(device) or "")
    devices = [torch.device("cuda", i) for i in (1, 0, 1)]
    for device in devices:
        ops.on_gpu("bias_gelu")(types.SimpleNamespace(device=device), None)
    assert calls == [[device] for device in devices]
    assert asked == devices[:2]  # a second card may be of another kind


# ---- building ------------------------------------------------------------------------------------


def test_without_nvcc_the_emulation_is_built_and_one_line_says_so(host_build):
    folder, said = host_build
    assert len([line for line in said.splitlines() if "nvcc" in line]) == 1
    assert not list((folder / "csrc").glob("_kernels.*so"))


def test_a_missing_half_built_or_stale_extension_is_named(host_build, tmp_path, monkeypatch):
    shutil.copytree(host_build[0] / "csrc", tmp_path / "csrc")
    built = next((tmp_path / "csrc").glob("_kernels_emu.*so"))
    monkeypatch.setattr(csrc, "__path__", [str(tmp_path / "csrc")])
    monkeypatch.setattr(ops, "__file__", str(tmp_path / "csrc/ops.py"))

    def stops(match, name="_kernels_emu"):
        with pytest.raises(RuntimeError, match=match):
            ops.load(name)

    assert ops.load("_kernels_emu").source == ops.source_digest()
    with open(tmp_path / "csrc/sampler.cu", "a") as file:
        file.write("// changed")
    stops("built from other sources")
    built.with_name(built.name.replace("_emu", "")).write_bytes(b"\x7fELF" + bytes(100))
    stops("cannot be loaded", "_kernels")
    half = built.read_bytes()[:5000]
    built.unlink()  # it is loaded: a new file in its place
    built.write_bytes(half)  # to import it would end the process with SIGBUS
    stops("is half built; build it again")
    built.unlink()
    stops(f"_kernels_emu is not built; build it with: {ops.BUILD}")


def test_a_build_for_another_gpu_names_both(monkeypatch):
    built = type("Module", (), {"arch": "80;90"})
    monkeypatch.setattr(ops, "load", lambda name="": built)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 7))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Orin")
    said = ops.why_not(torch.device("cuda"))
    assert all(part in said for part in ("sm_80, sm_90", "sm_87 (Orin)", 'KERNEL_ARCH="87"'))
    built.arch = "87"
    assert ops.why_not(torch.device("cuda")) == ""


def test_the_driver_is_asked_what_gpus_there_are(monkeypatch):
    """nvidia-smi says N/A on a Thor."""
    monkeypatch.delenv("KERNEL_ARCH", raising=False)
    gpus = [(11, 0), (8, 7)]

    def attribute(value, number, device):
        value._obj.value = gpus[device.value][number - 75]

    def put(value, number):
        value._obj.value = number

    driver = types.SimpleNamespace(cuInit=lambda flags: 0, cuDeviceGetAttribute=attribute)
    driver.cuDeviceGetCount = lambda count: put(count, len(gpus))
    driver.cuDeviceGet = put
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert setup_kernels.architectures() == ["110", "87"]
    driver.cuInit = lambda flags: 100  # no device
    assert setup_kernels.architectures() == ["87"]
    monkeypatch.setenv("KERNEL_ARCH", "9.0")
    assert setup_kernels.architectures() == ["90"]


def nvcc():
    folder = os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin"
    found = shutil.which("nvcc", path=folder) or shutil.which("nvcc")
    return found or pytest.skip("no nvcc: what ptxas says of sm_87 is not known")


def finished(command, seconds=300, **options):
    pipes = {"capture_output": True, "text": True, "timeout": seconds}
    return subprocess.run(command, **pipes, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "pointwise", "sampler"])
def test_nvcc_compiles_for_the_jetson_without_spills(name, tmp_path):
    flags = "-arch=sm_87 -std=c++17 -O3 -Xptxas=-v -cubin -o"
    built = finished([nvcc(), *flags.split(), tmp_path / "o", ROOT / f"csrc/{name}.cu"])
    assert built.returncode == 0, built.stderr
    report = built.stderr
    kernels = len(re.findall(r"Compiling entry function", report))
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", report)]
    assert len(spills) == 2 * kernels > 0
    assert not any(spills), report
    assert len(re.findall(r"Used \d+ registers", report)) == kernels
    assert all(int(n) <= 48 * 1024 for n in re.findall(r"(\d+) bytes smem", report)), report


@pytest.mark.slow
def test_the_extension_for_the_gpu_is_built_and_imports_without_one(tmp_path):
    nvcc()
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc", ignore=ignored)
    shutil.copy(ROOT / "setup_kernels.py", tmp_path)
    command = [sys.executable, "setup_kernels.py", "-q", "build_ext", "--inplace"]
    env = os.environ | {"KERNEL_ARCH": "87;90"}
    built = finished(command, 500, cwd=tmp_path, env=env)
    assert built.returncode == 0, built.stderr
    ask = [sys.executable, "-c", "from csrc import ops; print(ops.load().arch)"]
    assert finished(ask, cwd=tmp_path).stdout == "87;90\n"
    old = finished(command, cwd=tmp_path, env=env | {"KERNEL_ARCH": "7.5"})
    assert old.returncode != 0
    assert "8.0 or newer" in old.stderr


# ---- planted bugs --------------------------------------------------------------------------------


def run_attention(library, golden, case, warps, eager, rope):
    """Largest error of a case over a bare host build of attention.cu; NaN counts as infinite.

    rope: the case's queries and keys are turned back first, and the kernel turns them again.
    """
    q, k, v = (np.ascontiguousarray(golden[f"{case}.{name}"]) for name in "qkv")
    B, H, L, K = q.shape
    out, table, see = np.zeros_like(q), None, None
    if rope:
        cos, sin = (x.numpy() for x in model_mdlm.angles(L, K))
        table = np.concatenate([cos, sin], -1)
        halves = [np.split(x.astype(np.float64), 2, -1) for x in (q, k)]
        back = [np.concatenate([a * cos + b * sin, b * cos - a * sin], -1) for a, b in halves]
        q, k = (x.astype(np.float16) for x in back)
    if f"{case}.key_mask" in golden.files:
        see = golden[f"{case}.key_mask"].astype(np.uint8)
    arrays = q, k, v, see, table, out, None
    pointers = [ctypes.c_void_p(None if a is None else a.ctypes.data) for a in arrays]
    strides = [ctypes.c_int64(s) for s in (H * L * K, K, L * K) * 2]
    library.attention.restype = ctypes.c_char_p
    library.set_eager_copies(ctypes.c_bool(eager))
    wrong = library.attention(*pointers, B, L, H, *strides, ctypes.c_float(K**-0.5), warps, None)
    error = np.abs(out.astype(np.float32) - golden[f"{case}.out"]).max()
    return np.inf if wrong or np.isnan(error) else error


def found(source, folder, golden):
    """Whether any golden case fails on a host build of this attention.cu."""
    folder.mkdir()
    for path in (*(ROOT / "csrc").glob("*.h"), *(ROOT / "csrc").glob("*.cuh")):
        shutil.copy(path, folder)
    (folder / "attention.cu").write_text(source)
    switch = 'extern "C" void set_eager_copies(bool on) { emulation::eager_copies = on; }\n'
    (folder / "host.cpp").write_text(f'#include "attention.cu"\n{switch}')
    command = "g++ -std=c++17 -O1 -w -fPIC -shared -DEMULATE -U_FORTIFY_SOURCE host.cpp -o host.so"
    subprocess.run(command.split(), cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "host.so"))
    cases = sorted({name.split(".")[0] for name in golden.files})
    both = (False, True)
    for case, warps, eager, rope in itertools.product(cases, (1, 2, 4), both, both):
        hot = np.abs(golden[f"{case}.lse"]).max() > 20
        if hot and rope:
            # its scores reach 130: queries and keys that were rounded twice are too far off
            continue
        if not run_attention(library, golden, case, warps, eager, rope) < (4e-3 if hot else 2e-3):
            return True
    return False


@pytest.mark.slow
@pytest.mark.golden
def test_every_planted_bug_is_found(golden_dir, tmp_path):
    if not shutil.which("g++"):
        pytest.skip("no g++")
    golden = np.load(golden_dir("mdlm") / "attention.npz")
    source = (ROOT / "csrc/attention.cu").read_text()
    assert not found(source, tmp_path / "right", golden)
    # [name, what stands in attention.cu, what a tired author writes]
    bugs, missed = json.loads((ROOT / "tests/planted_bugs.json").read_text()), []
    for name, right, wrong in bugs:
        assert source.count(right) == 1, f"{name}: {right!r} is not in attention.cu once"
        if not found(source.replace(right, wrong), tmp_path / name, golden):
            missed.append(name)
    assert not missed
