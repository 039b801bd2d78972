"""Reference values of Coupled-GRPO: the two masks of a completion, in three array libraries, and the rewards."""

import json

import numpy as np
import pytest

import diffusion
import sandbox

pytestmark = pytest.mark.golden


def test_coupled_masks(golden_dir, library):
    arrays = np.load(golden_dir("grpo") / "forward_process.npz")
    for case in sorted({name.rpartition(".")[0] for name in arrays.files}):
        batch, prompt, mask_id, u, ratio, tile = (
            arrays[f"{case}.{name}"]
            for name in ("batch", "prompt_index", "mask_id", "random_matrix", "mask_ratio", "accumulate")
        )
        completion = np.broadcast_to(~prompt, batch.shape)
        u = np.tile(u, (int(tile), 1)) if len(u) != len(batch) else u
        ratio = np.float32(ratio)
        one, two = library(lambda c, u, r: diffusion.coupled_masks(c, u, r, strict=True), completion, u, ratio)
        np.testing.assert_array_equal(one, arrays[f"{case}.completion_mask"] & completion)
        np.testing.assert_array_equal(np.where(one, mask_id, batch), arrays[f"{case}.noisy1"])
        np.testing.assert_array_equal(np.where(two, mask_id, batch), arrays[f"{case}.noisy2"])
        one, two = library(diffusion.coupled_masks, completion, u, ratio)
        np.testing.assert_array_equal(np.where(two, mask_id, batch), arrays[f"{case}.noisy2_exact_complement"])


@pytest.mark.parametrize("mode", ["parity", "hardened"])
def test_rewards(golden_dir, mode):
    cases = json.loads((golden_dir("grpo") / "rewards.json").read_text(encoding="utf-8"))
    completions, suffix = [case["completion"] for case in cases], "" if mode == "parity" else "_hardened"
    for name in ("code_format", "code"):
        rewards = sandbox.REWARDS[name](completions, cases, parity=mode == "parity", timeout_s=2)
        for case, reward in zip(cases, rewards, strict=True):
            assert reward == case[name + suffix], (case["name"], name, reward)
