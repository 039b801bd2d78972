"""Sampling in blocks: what the reference values of test_golden_block.py do not say."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

import diffusion
import model_dream as md
import sample_block

CFG = md.DreamConfig(
    64,
    32,
    1,
    4,
    2,
    8,
    48,
    mask_id=3,
    pad_id=0,
    bos_id=0,
    eos_id=0,
    positions=64,
    theta=100.0,
    block_length=4,
)


def model_of(shift):
    shape = {"layers": 2, "heads": 4, "kv_heads": 2, "head_size": 8, "ffn": 48, "positions": 128}
    cfg = md.DreamConfig(64, 32, **shape, mask_id=4, pad_id=0, bos_id=1, eos_id=2)
    cfg = dataclasses.replace(cfg, shift=shift, causal=True, block_length=8)
    # sharper than at the start of training
    params = jax.tree.map(lambda x: 3 * x, md.new_params(cfg, 0))
    return nnx.merge(md.graph_of(cfg, md.Compute()), params)


@pytest.fixture(scope="module")
def model():
    params = jax.tree.map(lambda x: 2 * x, md.new_params(CFG, 0))
    return nnx.merge(md.graph_of(CFG, md.Compute()), params)


@pytest.mark.slow
def test_drawn_texts_are_of_a_row_alone_and_what_is_given_stays(model):
    rule, key = sample_block.Sampling(temperature=1.0, threshold=0.3), jax.random.key(1)
    prompts = [[5, 6, 7, 8, 9], [], [11] * 9, [12, 3, 3]]  # without a prompt; with masks of its own
    rows, stats = sample_block.generate(model, prompts, 6, rule, key, rows=5)
    assert [len(row) for row in rows] == [11, 6, 15, 9]
    for row, prompt in zip(rows, prompts, strict=True):
        assert 3 not in row
        assert row[: len(prompt)] == prompt or prompt == [12, 3, 3]
    assert rows[3][0] == 12
    alone, _ = sample_block.generate(model, prompts[:1], 6, rule, key, rows=5)
    assert alone[0] == rows[0]
    wide, _ = sample_block.generate(model, prompts, 6, rule, key, widths=(15,), rows=5)
    assert wide == rows
    other, _ = sample_block.generate(model, prompts[:1], 6, rule, jax.random.key(2), rows=5)
    assert other[0] != rows[0]
    assert len(stats["begun"]) == 3
    assert stats["forwards"] == stats["steps"]
    # Nothing to fill costs no pass.
    rows, stats = sample_block.generate(model, [[5, 6]], 0, rule, key)
    assert (rows, stats["forwards"]) == ([[5, 6]], 0)


def test_the_id_of_a_mask_that_grows_is_never_written(model):
    ids, _ = sample_block.generate(model, [[5, 6, 7]], 12)
    written = ids[0][3:]
    often = max(set(written) - {CFG.eos_id}, key=written.count)
    grows = nnx.merge(
        md.graph_of(dataclasses.replace(CFG, expand_id=often), md.Compute()), nnx.state(model)
    )
    assert often not in sample_block.generate(grows, [[5, 6, 7]], 12)[0][0][3:]


@pytest.mark.slow
def test_a_schedule_below_a_threshold_bounds_the_passes(model):
    # At 1.0 no token is sure enough; two steps of a block of four then write two tokens each.
    for steps, passes in ((0, 8), (2, 4)):
        _, stats = sample_block.generate(
            model, [[5] * 4], 8, sample_block.Sampling(threshold=1.0, steps=steps)
        )
        assert stats["forwards"] == passes


@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_steps_are_those_of_generate(model, causal):
    rule, key = sample_block.Sampling(temperature=1.0, threshold=0.3), jax.random.key(1)
    model = model_of(True) if causal else model
    prompts = [[5, 6, 7, 8, 9], [11] * 9]
    rows, stats = sample_block.generate(model, prompts, 10, rule, key)
    *shown, last = sample_block.steps(model, prompts, 10, rule, key)
    assert last.rows == rows
    for name in ("forwards", "begun", "windows"):
        assert last.stats[name] == stats[name]
    np.testing.assert_array_equal(last.stats["when"], stats["when"])
    assert [step.number for step in shown] == list(range(1, stats["steps"] + 1))
    # By block what stands before the first MASK of a text stays.
    *blocks, last = sample_block.steps(model, prompts, 10, rule, key, by_block=True)
    assert len(blocks) == len(stats["begun"])
    for step in blocks:
        for row, text in zip(step.rows, rows, strict=True):
            begun = row[: [*row, model.cfg.mask_id].index(model.cfg.mask_id)]
            assert text[: len(begun)] == begun


def test_what_does_not_fit_is_one_line(model):
    for prompts, part in (
        ([[5, 3, 6]], "does not see the text after a hole"),
        ([[5] * 62], "66 tokens do not fit"),
    ):
        with pytest.raises(ValueError, match=part):
            sample_block.generate(model, prompts, 4)
    whole = nnx.merge(
        md.graph_of(dataclasses.replace(CFG, block_length=0), md.Compute()), nnx.state(model)
    )
    with pytest.raises(ValueError, match="the model has no blocks"):
        sample_block.generate(whole, [[5]], 4)


@pytest.mark.slow
@pytest.mark.usefixtures("exact_matmuls")
def test_the_keys_of_finished_tokens_stay_causal_with_the_shift():
    """The first token of a block is what a causal pass says, with its probability."""
    causal, prompt = model_of(True), [5, 6, 7]
    (row,), stats = sample_block.generate(causal, [prompt], 24, sample_block.Sampling(4, steps=2))
    token_BL = np.array([row])
    place = diffusion.Place(np.ones_like(token_BL), np.arange(len(row))[None])
    logits_LV = np.array(causal.logits(causal.hidden(token_BL, place=place)[0])[0])
    logits_LV[:, causal.cfg.mask_id] = -np.inf
    first = np.arange(len(prompt), len(row), 4)
    assert logits_LV[first - 1].argmax(-1).tolist() == token_BL[0, first].tolist()
    prob_N = np.asarray(jax.nn.softmax(logits_LV[first - 1]))[
        np.arange(len(first)), token_BL[0, first]
    ]
    np.testing.assert_allclose(stats["probability"][0, first], prob_N, rtol=1e-4)


def test_a_mesh_splits_the_cache_and_writes_what_one_device_writes(model, monkeypatch):
    shape, axes = (2, 1, 2), ("data", "fsdp", "tensor")
    mesh = jax.make_mesh(
        shape, axes, axis_types=(jax.sharding.AxisType.Auto,) * 3, devices=jax.devices()[:4]
    )
    params = nnx.to_pure_dict(nnx.state(model))
    spread = nnx.merge(
        md.graph_of(CFG, md.Compute()), jax.device_put(params, md.shardings(mesh, params))
    )
    caches, fill_block, prompts = [], sample_block.fill_block, [[5, 6, 7], [8]]
    want, _ = sample_block.generate(model, prompts, 12)

    def watched(*args, **how):
        state = fill_block(*args, **how)
        caches.extend(x for keys_and_values in state.cache for x in keys_and_values)
        return state

    monkeypatch.setattr(sample_block, "fill_block", watched)
    with jax.set_mesh(mesh):
        got, _ = sample_block.generate(spread, prompts, 12)
    assert got == want
    # a row and a head on each device
    assert {x.sharding.shard_shape(x.shape)[:2] for x in caches} == {(1, 1)}
