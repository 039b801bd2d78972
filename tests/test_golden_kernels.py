"""Reference values of attention, the pointwise kernels and the sampler: the CUDA sources, emulated,
or on a GPU.
"""

import itertools

import numpy as np
import pytest
import torch
from conftest import special_ids

import diffusion
import model_mdlm as mdlm

pytestmark = pytest.mark.golden


@pytest.fixture
def load(golden_dir):
    return lambda name: np.load(golden_dir("mdlm") / f"{name}.npz")


def cases(golden):
    return sorted({name.split(".")[0] for name in golden.files})


def limit(golden, case):
    """How far an output in halves may be off: more where scores are so large that their maximum
    must be subtracted.
    """
    return 4e-3 if np.abs(golden[f"{case}.lse"]).max() > 20 else 2e-3


def given(runs, golden, case, name):
    """An array of a case where the kernels run, or None."""
    return (
        torch.from_numpy(golden[f"{case}.{name}"]).to(runs.device)
        if f"{case}.{name}" in golden.files
        else None
    )


@pytest.mark.parametrize("warps", [1, 2, 4])
@pytest.mark.parametrize("eager", [False, True], ids=["late_copies", "early_copies"])
def test_attention(load, runs, eager, warps):
    golden = load("attention")
    if runs.device == "cpu":
        runs.module.set_eager_copies(eager)
    elif eager:
        pytest.skip("on a GPU copies land when they land")
    for case in cases(golden):
        # [B, L, H, K], not contiguous
        q, k, v = (given(runs, golden, case, name).transpose(1, 2) for name in "qkv")
        out, lse = runs.attention_strided(q, k, v, given(runs, golden, case, "key_mask"), warps)
        error = np.abs(out.transpose(1, 2).float().cpu().numpy() - golden[f"{case}.out"]).max()
        assert error < limit(golden, case), case
        assert np.abs(lse.cpu().numpy() - golden[f"{case}.lse"]).max() < 1e-3, case


def test_attention_of_the_packed_projection(load, runs):
    golden = load("attention")
    for case in cases(golden):
        qkv = torch.stack([given(runs, golden, case, name).transpose(1, 2) for name in "qkv"], 2)
        out = runs.attention(qkv, given(runs, golden, case, "key_mask"))
        want = golden[f"{case}.out"].transpose(0, 2, 1, 3).reshape(out.shape)
        assert np.abs(out.float().cpu().numpy() - want).max() < limit(golden, case), case


def turned(x_BHLK, cos_LK, sin_LK):
    """RoPE in float64, rounded to halves: what the kernel and model_mdlm.py multiply."""
    a, b = np.split(x_BHLK.astype(np.float64), 2, -1)
    return np.concatenate([a * cos_LK - b * sin_LK, b * cos_LK + a * sin_LK], -1).astype(np.float16)


def attention(q, k, v, see):
    """In float64; every row of these cases sees a key."""
    score = (
        np.einsum("bhld,bhmd->bhlm", *(x.astype(np.float64) for x in (q, k))) * q.shape[-1] ** -0.5
    )
    if see is not None:
        score = np.where(see[:, None, None], score, -np.inf)
    return np.einsum("bhlm,bhmd->bhld", diffusion.softmax(score), v.astype(np.float64))


def test_attention_with_rope(load, runs):
    golden = load("attention")
    for case, warps in zip(cases(golden), itertools.cycle((1, 2, 4, 0))):
        q, k, v = (golden[f"{case}.{name}"] for name in "qkv")
        see = golden[f"{case}.key_mask"] if f"{case}.key_mask" in golden.files else None
        # without rotation this reference is the golden one
        assert np.abs(attention(q, k, v, see) - golden[f"{case}.out"]).max() < 1e-4, case
        tables = [np.asarray(table) for table in mdlm.angles(q.shape[2], q.shape[3])]
        want = attention(turned(q, *tables), turned(k, *tables), v, see)
        inputs = (torch.from_numpy(x).to(runs.device).transpose(1, 2) for x in (q, k, v))
        cos_sin = torch.from_numpy(np.concatenate(tables, -1)).to(runs.device)
        see = given(runs, golden, case, "key_mask")
        out, _ = runs.attention_strided(*inputs, see, warps, cos_sin_LK=cos_sin)
        error = np.abs(out.transpose(1, 2).float().cpu().numpy() - want).max()
        assert error < limit(golden, case), case


def test_pointwise(load, runs):
    golden = load("pointwise")
    x, residual, gamma, beta, y, bias = (
        torch.from_numpy(golden[name]).to(runs.device)
        for name in ("x", "residual", "gamma", "beta", "y", "bias")
    )
    sum_, norm = runs.add_norm(x, residual, gamma, beta, 1e-5)
    got = {"sum": sum_, "norm": norm}
    got |= {f"gelu_{form}": runs.bias_gelu(y, bias, form == "tanh") for form in ("erf", "tanh")}
    for name, value in got.items():
        np.testing.assert_allclose(
            value.float().cpu(), golden[name], atol=5e-3, rtol=0, err_msg=name
        )


def draw(runs, logits, token, u_token, u_keep, keep, ban, temperature, mask_id):
    """The tokens after one step of the sampler kernel on given noise."""
    V, device = logits.shape[-1], runs.device
    token = torch.from_numpy(token.astype(np.int64)).to(device)
    floats = (logits.reshape(-1, V), np.array([2.0, keep]), u_token.reshape(-1, V), u_keep.ravel())
    logits, table, *noise = (torch.from_numpy(a.astype(np.float32)).to(device) for a in floats)
    state, ban = (
        torch.tensor([0, 1], device=device),
        torch.tensor(ban, dtype=torch.int32, device=device),
    )
    runs.sample_(logits, token, state, table, ban, mask_id, V, temperature, 0, 1.0, noise)
    return token.cpu().numpy()


def test_sampling_with_given_noise(load, runs, golden_dir):
    golden, (mask_id, _) = load("sample"), special_ids(golden_dir("mdlm"))
    logits, u, u_keep, xt = (golden[name] for name in ("logits", "u_token", "u_keep", "xt"))
    for name in (name for name in golden.files if name.startswith("token.t")):
        all_masked, temperature = (
            np.full(logits.shape[:2], mask_id),
            float(name.removeprefix("token.t")),
        )
        got = draw(runs, logits, all_masked, u, u_keep, 0.0, [], temperature, mask_id)
        np.testing.assert_array_equal(got, golden[name], err_msg=name)
    schedules = [name.split(".")[0] for name in golden.files if name.endswith(".x_next")]
    assert sorted(schedules) == sorted(diffusion.SCHEDULES)
    for s, row in itertools.product(schedules, range(len(xt))):
        t, before = (np.broadcast_to(golden[name], len(xt))[row] for name in ("t", "s"))
        keep = float(diffusion.keep_prob(t, before, s))
        part = slice(row, row + 1)
        got = draw(
            runs, logits[part], xt[part], u[part], u_keep[part], keep, [mask_id], 1.0, mask_id
        )
        np.testing.assert_array_equal(got, golden[f"{s}.x_next"][part], err_msg=s)
