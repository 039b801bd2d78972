"""Reference values of attention, the pointwise kernels and the sampler: the CUDA sources, emulated on the CPU."""

import itertools

import numpy as np
import pytest
import torch

import diffusion

pytestmark = pytest.mark.golden
MASK = 3


@pytest.fixture
def load(golden_dir):
    return lambda name: np.load(golden_dir("mdlm") / f"{name}.npz")


def cases(golden):
    return sorted({name.split(".")[0] for name in golden.files})


def given(golden, case, name):
    return torch.from_numpy(golden[f"{case}.{name}"]) if f"{case}.{name}" in golden.files else None


@pytest.mark.parametrize("warps", [1, 2, 4])
@pytest.mark.parametrize("eager", [False, True], ids=["late_copies", "early_copies"])
def test_attention(load, kernels, eager, warps):
    golden = load("attention")
    kernels.module.set_eager_copies(eager)
    for case in cases(golden):
        q, k, v = (given(golden, case, name).transpose(1, 2) for name in "qkv")  # [B, L, H, K], not contiguous
        out, lse = kernels.attention_strided(q, k, v, given(golden, case, "key_mask"), warps)
        limit = 4e-3 if case.endswith("_hot") else 2e-3
        assert np.abs(out.transpose(1, 2).float().numpy() - golden[f"{case}.out"]).max() < limit, case
        assert np.abs(lse.numpy() - golden[f"{case}.lse"]).max() < 1e-3, case


def test_attention_of_the_packed_projection(load, kernels):
    golden = load("attention")
    for case in cases(golden):
        qkv = torch.stack([given(golden, case, name).transpose(1, 2) for name in "qkv"], 2)
        out = kernels.attention(qkv, given(golden, case, "key_mask"))
        want = golden[f"{case}.out"].transpose(0, 2, 1, 3).reshape(out.shape)
        assert np.abs(out.float().numpy() - want).max() < (4e-3 if case.endswith("_hot") else 2e-3), case


def test_pointwise(load, kernels):
    golden = load("pointwise")
    x, residual, gamma, beta, y, bias = (
        torch.from_numpy(golden[name]) for name in ("x", "residual", "gamma", "beta", "y", "bias")
    )
    sum_, norm = kernels.add_norm(x, residual, gamma, beta, 1e-5)
    got = {"sum": sum_, "norm": norm}
    got |= {f"gelu_{form}": kernels.bias_gelu(y, bias, form == "tanh") for form in ("erf", "tanh")}
    for name, value in got.items():
        np.testing.assert_allclose(value.float(), golden[name], atol=5e-3, rtol=0, err_msg=name)


def draw(kernels, logits, token, u_token, u_keep, keep, ban, temperature):
    """The tokens after one step of the sampler kernel on given noise."""
    token = torch.from_numpy(token.astype(np.int64))
    V = logits.shape[-1]
    noise = [torch.from_numpy(a.astype(np.float32)).contiguous() for a in (u_token.reshape(-1, V), u_keep.ravel())]
    kernels.sample_(
        torch.from_numpy(logits.astype(np.float32)).reshape(-1, V), token, torch.tensor([0, 1]),
        torch.tensor([2.0, keep], dtype=torch.float32), torch.tensor(ban, dtype=torch.int32), MASK, V, temperature,
        0, 1.0, noise,
    )  # fmt: skip
    return token.numpy()


def test_sampling_with_given_noise(load, kernels):
    golden = load("sample")
    logits, u, u_keep, xt = (golden[name] for name in ("logits", "u_token", "u_keep", "xt"))
    for name in (name for name in golden.files if name.startswith("token.t")):
        all_masked, temperature = np.full(logits.shape[:2], MASK), float(name.removeprefix("token.t"))
        got = draw(kernels, logits, all_masked, u, u_keep, 0.0, [], temperature)
        np.testing.assert_array_equal(got, golden[name], err_msg=name)
    schedules = [name.split(".")[0] for name in golden.files if name.endswith(".x_next")]
    assert sorted(schedules) == sorted(diffusion.SCHEDULES)
    for s, row in itertools.product(schedules, range(len(xt))):
        t, before = (np.broadcast_to(golden[name], len(xt))[row] for name in ("t", "s"))
        keep = float(diffusion.keep_prob(t, before, s))
        part = slice(row, row + 1)
        got = draw(kernels, logits[part], xt[part], u[part], u_keep[part], keep, [MASK], 1.0)
        np.testing.assert_array_equal(got, golden[f"{s}.x_next"][part], err_msg=s)
