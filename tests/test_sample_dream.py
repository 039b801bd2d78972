"""Sampling from Dream: schedules, cached blocks against single passes, ends of texts, draws,
tokenizers, adapters. Most tests fill canvases of 2 x 32, so that few programs are compiled.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from flax import nnx
from test_model_dream import MASK, SHALLOW, TINY, apply, build, hidden, masked, params_of, tokens

import diffusion
import model_dream as md
import runs
import sample_dream as sd

B, L = 2, 32


class Table(nnx.Module):
    """A model whose logits of the token at each slot are a row of a table [L, V], whatever the
    canvas holds.
    """

    def __init__(self, logits_LV):
        self.cfg, self.compute = dataclasses.replace(TINY, shift=False), md.Compute()
        self.table = nnx.Param(jnp.asarray(logits_LV, jnp.float32))

    def hidden(self, token_BL, position_BL=None, see_BM=None, cache=None, start=0):
        """One-hot slots, and nothing to keep."""
        slot_BL = jnp.broadcast_to(start + jnp.arange(token_BL.shape[1]), token_BL.shape)
        return jax.nn.one_hot(slot_BL, len(self.table)), jnp.zeros(())

    def logits(self, hidden_BLD):
        return hidden_BLD @ self.table.get_value()


# ---- tokenizers ----------------------------------------------------------------------------------------------------


def test_tokenizers_that_do_not_fit_are_refused(tmp_path):
    vocab = {name: i for i, name in enumerate(["a", "b", "c", "\u0120", "ab", "abc"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("a", "b"), ("ab", "c")]))
    tokenizer.add_special_tokens(["<|endoftext|>", "<|mask|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    cfg = dataclasses.replace(TINY, vocab=16, mask_id=7, eos_id=6, pad_id=6, bos_id=6)
    assert sd.load_tokenizer(tmp_path, cfg).encode("abc<|mask|>").ids == [5, 7]
    for change, part in (
        (
            {"vocab": 6, "mask_id": 5, "eos_id": 1, "pad_id": 1, "bos_id": 1},
            "its ids reach 7, the model has 6",
        ),
        ({"mask_id": 4}, "4, the model's mask_id, is 'ab' in it"),
        ({"eos_id": 9}, "9, the model's eos_id, is None in it"),
    ):
        with pytest.raises(ValueError, match=part):
            sd.load_tokenizer(tmp_path, dataclasses.replace(cfg, **change))
    # MASK needs no name
    assert sd.load_tokenizer(tmp_path, dataclasses.replace(cfg, mask_id=9)).get_vocab_size() == 8
    # MASK of added_tokens.json, which does not say that it is special
    (tmp_path / "added_tokens.json").write_text('{"<m>": 8}')
    tokenizer = sd.load_tokenizer(tmp_path, dataclasses.replace(cfg, mask_id=8))
    assert tokenizer.get_added_tokens_decoder()[8].special
    assert tokenizer.decode([8, 0]) == "a"
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        sd.load_tokenizer(tmp_path, cfg)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        sd.load_tokenizer(tmp_path, cfg)


# ---- sampling ------------------------------------------------------------------------------------------------------


def test_the_token_at_p_comes_from_the_logits_at_p_minus_1(shallow):
    token_BL = tokens(B, L)
    token_BL[0, [0, 1, 5, 9]] = token_BL[1, [0, 4]] = MASK
    logits_BLV = np.array(apply(shallow, token_BL))
    logits_BLV[..., MASK] = -np.inf
    best_BL = logits_BLV.argmax(-1)
    source_BL = np.concatenate([best_BL[:, :1], best_BL[:, :-1]], 1)
    want_BL = np.where(token_BL == MASK, source_BL, token_BL)
    got_BL, stats = sd.fill(shallow, token_BL, None, sd.Sampling(steps=1))
    np.testing.assert_array_equal(got_BL, want_BL)
    assert stats["forwards"] == 1


def test_the_schedule_takes_kilobytes_whatever_the_number_of_steps_and_masks():
    canvas_BL = np.full((1, 32_768), MASK)
    for rule in (
        sd.Sampling(steps=16_000),
        sd.Sampling(),
        sd.Sampling(block_length=32, cache="dual"),
    ):
        _, given, _ = sd.prepare(TINY, rule, canvas_BL, canvas_BL > 0)
        assert given.steps in (16_000, 32_768, 32)
        assert given.share_S.nbytes < 200_000


def simulate(model, row_L, rule):
    """One row without padding, block by block, in NumPy around single passes of the model.

    A prefix window is 33 slots wide.
    """
    row_L, L, size = row_L.copy(), len(row_L), rule.block_length
    S0, passes = int(np.argmax(row_L == MASK)), 0
    spb = rule.steps // -(-(L - S0) // size) if rule.steps else size
    t = np.linspace(1, rule.eps, spb + 1)
    for S in range(S0, L, size):
        E = min(S + size, L)
        end = E if rule.cache == "dual" else L
        start = {"": 0, "prefix": max(0, L - 33), "dual": end - size - 1}[rule.cache]
        h_LD, cache = hidden(model, row_L[None])
        at = 0
        for i in range(size):
            slots = np.flatnonzero(row_L[S:E] == MASK) + S
            if not len(slots):
                break
            if i:
                window = (
                    (row_L[None], None)
                    if not rule.cache
                    else (row_L[None, start:end], None, None, cache, start)
                )
                (h_LD, cache), at = hidden(model, *window), start
            logits_CV = np.array(model.logits(h_LD)[0], np.float64)[slots - 1 - at]
            logits_CV[:, MASK] = -np.inf
            p_CV = np.exp(logits_CV - logits_CV.max(-1, keepdims=True))
            p_CV /= p_CV.sum(-1, keepdims=True)
            sure_C = p_CV.max(-1) if rule.threshold else (p_CV * np.log(p_CV + 1e-300)).sum(-1)
            n = len(slots)
            k = (
                max(1, (sure_C >= rule.threshold).sum())
                if rule.threshold
                else int(n * (1 - t[i + 1] / t[i]))
            )
            k = n if not rule.threshold and i == spb - 1 else k
            passes += bool(k or (rule.cache and not i))
            for c in np.argsort(-sure_C, kind="stable")[:k]:
                row_L[slots[c]] = p_CV[c].argmax()
    return row_L, passes


@pytest.mark.parametrize(
    "cache", [pytest.param(x, marks=pytest.mark.slow) for x in ("", "prefix")] + ["dual"]
)
def test_cached_blocks_of_a_padded_batch_are_those_of_each_row_alone(shallow, cache):
    # two layers: with one a cache is exact, as its keys and values are those of the embeddings
    model = build(TINY) if cache else shallow
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (19, 1)]
    small = ({"threshold": 0.6}, 12), ({"steps": 8}, 12), ({"steps": 2}, 12)
    for settings, new in (*small, ({"steps": 8}, 10)):
        rule = sd.Sampling(block_length=6, cache=cache, **settings)
        rows, stats = sd.generate(model, prompts, new, rule)
        alone = [simulate(model, np.array(p + [MASK] * new, np.int32), rule) for p in prompts]
        for row, (want_L, _) in zip(rows, alone, strict=True):
            np.testing.assert_array_equal(row, want_L)
        # all rows fill the same number of tokens a step
        if "threshold" not in settings:
            assert stats["forwards"] == alone[0][1]
        assert set(stats["windows"]) <= {"": {32}, "prefix": {32, 33}, "dual": {7, 32}}[cache]
        assert MASK not in np.array(rows[0])


def test_a_threshold_or_bound_is_compared_with_what_the_model_says_whatever_the_filters_leave():
    # 0.3 for one token, the rest even over the others; MASK has none
    p_V = np.where(np.arange(TINY.vocab) == 9, 0.3, 0.7 / (TINY.vocab - 2))
    p_V[MASK] = 0
    model, passes = Table(np.tile(np.log(p_V + 1e-30), (11, 1))), {}
    for settings in ({}, {"score": "distribution"}, {"filtered": True}):
        for threshold in (0.29, 0.31, 0.9):
            rule = sd.Sampling(temperature=0.2, top_p=0.95, threshold=threshold, **settings)
            got_BL, stats = sd.fill(model, masked(1, 5, 6), None, rule, jax.random.key(0))
            # at temperature 0.2 the others have no probability that top-p leaves
            assert (got_BL[:, 5:] == 9).all()
            passes.setdefault("".join(settings), []).append(stats["forwards"])
    assert passes == {"": [1, 6, 6], "score": [1, 6, 6], "filtered": [1, 1, 1]}
    entropy = -(p_V * np.log(p_V + 1e-30)).sum()
    for bound, passes in ((0.99 * entropy, 6), (1.01 * entropy, 3), (5.01 * entropy, 1)):
        rule = sd.Sampling(temperature=0.2, top_p=0.95, entropy_bound=bound)
        _, stats = sd.fill(model, masked(1, 5, 6), None, rule, jax.random.key(0))
        assert stats["forwards"] == passes


def decode(model, row_L, rule):
    """(row, passes): a row without padding, by the words of the rules, in NumPy around passes over
    the whole row.
    """
    row_L, made_L, passes = row_L.copy(), row_L == MASK, 0
    block_L = np.maximum(np.arange(len(row_L)) - made_L.argmax(), 0) // (
        rule.block_length or len(row_L)
    )
    for _ in range(99):
        if not (row_L == MASK).any():
            return row_L, passes
        slots = np.flatnonzero((row_L == MASK) & (block_L == block_L[row_L == MASK].min()))
        passes += 1
        logits_CV = np.array(apply(model, row_L[None])[0], np.float64)[slots - 1]
        logits_CV[:, MASK] = -np.inf
        p_CV = np.exp(logits_CV - logits_CV.max(-1, keepdims=True))
        p_CV /= p_CV.sum(-1, keepdims=True)
        max_C, H_C = p_CV.max(-1), -(p_CV * np.log(p_CV + 1e-300)).sum(-1)
        order = np.argsort(-max_C if rule.threshold else H_C, kind="stable")
        if rule.entropy_bound:  # the longest prefix
            fits = [
                n
                for n in range(1, len(order) + 1)
                if H_C[order[:n]].sum() - H_C[order[:n]].max() <= rule.bound
            ]
            n = max(fits)
        else:
            n = max(1, (max_C >= rule.bound).sum())
        for c in order[:n]:
            row_L[slots[c]] = p_CV[c].argmax()
    raise AssertionError("99 steps did not fill the row")


@pytest.mark.parametrize(
    ("settings", "values"),
    [
        ({}, [{"entropy_bound": x} for x in (1e-6, 3.0, 12.0, np.inf)]),
        pytest.param(
            {"block_length": 5},
            [{"threshold": x} for x in (0.1, 0.14, 1.0)],
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_rows_of_a_batch_are_filled_by_the_words_of_the_rules_as_each_alone(
    shallow, settings, values
):
    canvas_BL, see_BL = masked(3, 6, 18), np.ones((3, 24), bool)
    canvas_BL[0, :3], see_BL[0, :3] = TINY.pad_id, False
    canvas_BL[1, 20:] = tokens(1, 4, seed=5)[0]
    passes = []
    for value in values:
        rule = sd.Sampling(**settings, **value)
        got_BL, stats = sd.fill(shallow, canvas_BL, see_BL, rule)
        alone = [
            decode(shallow, row_L[see_L], rule)
            for row_L, see_L in zip(canvas_BL, see_BL, strict=True)
        ]
        for got_L, see_L, (want_L, _) in zip(got_BL, see_BL, alone, strict=True):
            np.testing.assert_array_equal(got_L[see_L], want_L, err_msg=str(rule))
        passes.append(max(passes for _, passes in alone))
        assert stats["forwards"] >= passes[-1]
    assert len({*passes}) == len(values), "the settings differ in what they do"
    if settings == {}:
        assert (passes[0], passes[-1]) == (18, 1)  # one by one, and all at once


@pytest.mark.slow
def test_blocks_by_an_entropy_bound_with_an_exact_cache(shallow):
    # with one layer a cache is exact: its keys and values are those of the embeddings
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (9, 3)]
    rule = sd.Sampling(entropy_bound=5.0, block_length=6, cache="dual")
    rows, _ = sd.generate(shallow, prompts, 18, rule)
    for row, prompt in zip(rows, prompts, strict=True):
        want_L, passes = decode(
            shallow, np.array(prompt + [MASK] * 18), dataclasses.replace(rule, cache="")
        )
        np.testing.assert_array_equal(row, want_L)
        assert 3 < passes < 18


def test_a_lower_threshold_takes_fewer_passes_and_no_prompt_is_needed(shallow):
    prompts = [[], tokens(1, 6)[0].tolist()]
    passes = []
    for threshold in (0.99, 0.05):
        rule = sd.Sampling(threshold=threshold, block_length=12, cache="dual")
        rows, stats = sd.generate(shallow, prompts, 12, rule)
        assert [len(row) for row in rows] == [12, 18]
        assert MASK not in rows[0] + rows[1]
        passes.append(stats["forwards"])
    assert passes == sorted(passes, reverse=True)
    assert passes[0] > passes[-1]


def test_rows_with_unequal_masks_follow_their_own_schedule_and_keep_their_prompts(shallow):
    token_BL = tokens(B, L)
    for row, n in zip(token_BL, (9, 14), strict=True):
        row[np.random.default_rng(n).permutation(L)[:n]] = MASK
    kept = token_BL != MASK
    for alg in ("entropy", "topk_margin"):
        rule = sd.Sampling(alg=alg, steps=5, history=True)
        got_BL, stats = sd.fill(shallow, token_BL, None, rule)
        counts_SB = [(stats["when"] == step).sum(-1) for step in range(1, 6)]
        want_SB = diffusion.step_counts(np.array([9, 14]), 5, "dream")
        np.testing.assert_array_equal(counts_SB, want_SB)
        np.testing.assert_array_equal(got_BL[kept], token_BL[kept])
        assert (got_BL != MASK).all()
    rule = sd.Sampling(threshold=0.5, block_length=5, cache="dual")
    got_BL, _ = sd.fill(shallow, token_BL, None, rule)
    np.testing.assert_array_equal(got_BL[kept], token_BL[kept])
    assert (got_BL != MASK).all()


@pytest.mark.parametrize(
    "rule",
    [
        sd.Sampling(steps=4),
        sd.Sampling(alg="origin", steps=4),
        sd.Sampling(threshold=0.9, steps=3),
        sd.Sampling(threshold=0.9, block_length=6, cache="dual"),
        sd.Sampling(steps=4, block_length=6),
    ],
    ids=lambda rule: f"{rule.alg}-{rule.cache}-{rule.threshold}",
)
def test_a_model_that_predicts_mask_ends_and_touches_nothing_else(rule):
    canvas_BL, logits_LV = masked(2, 5, 12), np.random.default_rng(0).normal(size=(17, TINY.vocab))
    logits_LV[:, MASK] = np.where(np.arange(17) % 3 == 0, 1e4, -1e4)
    rule = dataclasses.replace(rule, ban_ids=())
    got_BL, stats = sd.fill(Table(logits_LV), canvas_BL, None, rule, jax.random.key(0))
    np.testing.assert_array_equal(got_BL[:, :5], canvas_BL[:, :5])
    want_BL = np.broadcast_to(np.arange(17) % 3 == 0, (2, 17)) & (canvas_BL == MASK)
    if rule.threshold == 0:
        np.testing.assert_array_equal(got_BL == MASK, want_BL)
    assert ((got_BL == MASK) >= want_BL).all()
    assert stats["steps"] <= 3 + 12 + 2 * 7


def test_an_end_token_ends_its_row_alone():
    canvas_BL, eos = masked(2, 5, 12), TINY.eos_id
    canvas_BL[1, 14:] = 9  # an infill: text follows
    logits_LV = np.random.default_rng(0).normal(0, 3, (17, TINY.vocab))
    # EOS at slot 8 has the highest confidence, nowhere else any
    logits_LV[:, eos], logits_LV[8, eos] = -1e9, 90.0
    model = Table(logits_LV)
    for settings in ({}, {"block_length": 4, "cache": "dual", "threshold": 0.5}):
        rule = sd.Sampling(ban_ids=(MASK,), eos_ids=(eos,), **settings)
        ended, stats = sd.fill(model, canvas_BL[:1], None, rule)
        assert ended[0, 8] == eos
        assert (ended[0, 9:] == eos).all()
        assert (ended[0, 5:8] != eos).all()
        if settings:
            endless = dataclasses.replace(rule, eos_ids=())
            full, full_stats = sd.fill(model, canvas_BL[:1], None, endless)
            np.testing.assert_array_equal(ended[0, :9], full[0, :9])
            assert (full[0, 9:] != eos).all()
            assert stats["forwards"] < full_stats["forwards"]  # later blocks are never begun
        infill, _ = sd.fill(model, canvas_BL[1:], None, rule)
        assert (infill[0, 14:] == 9).all()
        assert (infill != MASK).all()
        assert (infill[0, 9:14] != eos).all()


def test_a_record_replays_every_step_with_what_was_drawn_in_it(shallow):
    """Also behind an end of text, which replaces what was drawn before it; what is never drawn has
    no probability.
    """
    B, P, C = 8, 5, 16
    ends = tuple(range(3, 12))  # so many that most rows end early
    settings = {
        "temperature": 1.3,
        "threshold": 0.2,
        "score": "distribution",
        "block_length": 8,
        "eos_ids": ends,
    }
    rule, canvas_BL = sd.Sampling(**settings, history=True), masked(B, P, C)
    token_BL, stats = sd.fill(shallow, canvas_BL, None, rule, jax.random.key(1))
    record, written_BL = stats["record"], canvas_BL == MASK
    assert ((record.step_BL >= 0) == written_BL).all()
    drawn_BL = written_BL & (record.token_BL != MASK)
    assert 0 < (drawn_BL & (token_BL != record.token_BL)).sum()  # replaced by the end of their text
    assert 0 < (written_BL & ~drawn_BL).sum()  # never drawn
    for step in range(stats["steps"]):
        shown_BL = np.where(record.step_BL >= step, MASK, record.token_BL)
        logits_BLV = np.array(apply(shallow, shown_BL))
        logits_BLV[..., MASK] = -np.inf
        logp_BLV = diffusion.log_softmax(logits_BLV)[:, :-1]
        here_BL = drawn_BL & (record.step_BL == step)
        want_BL = np.take_along_axis(logp_BLV, record.token_BL[:, 1:, None], -1)[..., 0]
        np.testing.assert_allclose(
            record.logp_BL[here_BL], want_BL[here_BL[:, 1:]], rtol=1e-3, atol=1e-3
        )
    assert (record.logp_BL[~drawn_BL] == 0).all()


def test_tokens_are_drawn_from_the_filtered_distribution(shallow):
    B = 3000
    canvas_BL = np.repeat(masked(1, 6, 1), B, 0)
    logits_V = jnp.asarray(apply(shallow, canvas_BL[:1])[0, 5]).at[MASK].set(-jnp.inf)
    t, k, p = 2.0, 5, 0.8
    got_BL, _ = sd.fill(
        shallow, canvas_BL, None, sd.Sampling(temperature=t, top_k=k, top_p=p), jax.random.key(1)
    )
    want_V = np.asarray(diffusion.softmax(diffusion.filter_logits(logits_V, t, k, p, rule="dream")))
    got_V = np.bincount(got_BL[:, -1], minlength=TINY.vocab) / B
    assert (got_V[want_V == 0] == 0).all()
    np.testing.assert_allclose(got_V, want_V, atol=5 * np.sqrt(0.25 / B))
    assert np.count_nonzero(want_V > 0.02) > 2


def test_positions_are_drawn_from_the_confidences_at_alg_temp(shallow):
    B = 3000
    canvas_BL = np.repeat(masked(1, 6, 4), B, 0)
    logits_CV = np.array(apply(shallow, canvas_BL[:1])[0, 5:9])
    logits_CV[:, MASK] = -np.inf
    sure_C = np.asarray(jax.nn.softmax(logits_CV)).max(-1)
    rule = sd.Sampling(alg="maskgit_plus", steps=3, alg_temp=0.3, history=True)
    _, stats = sd.fill(shallow, canvas_BL, None, rule, jax.random.key(2))
    first_B4 = stats["when"][:, 6:] == 1
    assert (first_B4.sum(-1) == 1).all()
    want_C = np.exp(sure_C / 0.3) / np.exp(sure_C / 0.3).sum()
    np.testing.assert_allclose(first_B4.mean(0), want_C, atol=5 * np.sqrt(0.25 / B))


@pytest.mark.parametrize("tiny", [1e-39, 1e-60])
@pytest.mark.parametrize("alg", ["maskgit_plus", "entropy"])
def test_tiny_temperatures_fill_as_zero_does(shallow, alg, tiny):
    canvas_BL = masked(8, 6, 12)
    greedy, cold, all_cold = (
        sd.fill(shallow, canvas_BL, None, sd.Sampling(alg=alg, steps=5, **how), jax.random.key(2))[
            0
        ]
        for how in ({}, {"alg_temp": tiny}, {"alg_temp": tiny, "temperature": tiny})
    )
    np.testing.assert_array_equal(cold, greedy)
    # in the filtered distribution every token is sure: only the order of the positions differs
    assert (all_cold != MASK).all()


@pytest.mark.slow
def test_what_was_recorded_is_that_of_the_rows_in_their_order_and_each_may_have_a_key(shallow):
    prompts, keys = (
        [tokens(1, n, seed=n)[0].tolist() for n in (9, 3, 6, 1)],
        jax.random.split(jax.random.key(3), 4),
    )
    rule = sd.Sampling(temperature=1.0, history=True)
    texts, stats = sd.generate(shallow, prompts, 8, rule, keys)
    for rows, key in (
        (2, keys),
        (0, jax.random.key_data(keys)),
        (0, np.asarray(jax.random.key_data(keys))),
    ):
        again, of_rows = sd.generate(shallow, prompts, 8, rule, key, rows=rows)
        assert again == texts
        np.testing.assert_array_equal(of_rows["when"], stats["when"])
    assert texts != sd.generate(shallow, prompts, 8, rule, keys[::-1])[0]
    old = [
        sd.generate(shallow, prompts, 8, rule, key(3))[0]
        for key in (jax.random.key, jax.random.PRNGKey)
    ]
    assert old[0] == old[1]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"alg_temp": 0.2}, marks=pytest.mark.slow),
        pytest.param({"alg": "origin", "steps": 10}, marks=pytest.mark.slow),
        {"threshold": 0.5, "block_length": 5, "cache": "dual"},
    ],
    ids=str,
)
def test_draws_do_not_depend_on_padding_or_on_other_rows(shallow, settings):
    # the third makes the canvas twice as wide
    prompts, key = [tokens(1, n)[0].tolist() for n in (7, 3, 40)], jax.random.key(5)
    rule = sd.Sampling(temperature=0.8, top_p=0.95, **settings)
    rows, _ = sd.generate(shallow, prompts[:2], 10, rule, key)
    with_a_third, _ = sd.generate(shallow, prompts, 10, rule, key)
    assert rows == with_a_third[:2]
    key_B = sd.keys_of_rows(key, 2)
    alone, _ = sd.generate(shallow, prompts[1:2], 10, rule, key_B[1:], rows=2)
    assert alone == rows[1:]
    other, _ = sd.generate(shallow, prompts[:2], 10, rule, jax.random.key(6))
    assert other != rows


STEPPED = [
    {"temperature": 0.7, "top_p": 0.95, "block_length": 8, "cache": "dual", "threshold": 0.9},
    {"steps": 40, "eos_ids": (5, 6, 7)},
]


@pytest.mark.parametrize("settings", STEPPED, ids=str)
def test_the_steps_are_those_of_generate(shallow, settings):
    rule = sd.Sampling(**settings, history=True)
    prompts, key = [[5, 6, 7], [9]], jax.random.key(1)
    rows, stats = sd.generate(shallow, prompts, 24, rule, key)
    *shown, last = sd.steps(shallow, prompts, 24, rule, key)
    assert last.rows == shown[-1].rows == rows
    assert [step.stats for step in shown] == [None] * len(shown)
    for name in ("forwards", "steps", "windows"):
        assert last.stats[name] == stats[name], name
    for name in ("passes", "when", "probability"):
        np.testing.assert_array_equal(last.stats[name], stats[name])
    assert [step.forwards for step in shown] == list(range(1, stats["forwards"] + 1))
    # A row begins with its prompt and masks, which become tokens with their probability.
    first, step = np.array(shown[0].rows[0]), stats["when"][0, -27:]
    np.testing.assert_array_equal(first == MASK, step > shown[0].number)
    assert all(p == 1 for p in np.array(shown[0].probability[0])[first == MASK])
    assert any(p < 1 for p in last.probability[0])


def test_infilling_needs_no_new_token_and_undefined_ids_are_never_drawn(shallow):
    holes = tokens(1, L)[0]
    holes[[2, 3, 7]] = MASK
    for settings in ({}, {"block_length": 5, "cache": "dual", "threshold": 0.9}):
        rule = sd.Sampling(vocab=20, temperature=1.0, **settings)
        (row,), stats = sd.generate(shallow, [holes.tolist()], 0, rule, jax.random.key(0))
        row = np.array(row)
        assert (row[holes != MASK] == holes[holes != MASK]).all()
        assert (row[holes == MASK] < 20).all()
        assert stats["forwards"] > 0
    (row,), stats = sd.generate(shallow, [[5, 6, 7]], 0)
    assert (row, stats["forwards"]) == ([5, 6, 7], 0)


# ---- compiled programs ---------------------------------------------------------------------------------------------


@pytest.fixture
def programs(caplog):
    """A function: how many programs that fill a block have been compiled since it was last
    called.
    """
    caplog.set_level("DEBUG")

    def count():
        found = sum(
            "Finished XLA compilation of jit(fill_block)" in record.message
            for record in caplog.records
        )
        caplog.clear()
        return found

    with jax.log_compiles():
        yield count


def test_logits_exist_for_few_positions_and_other_steps_are_the_same_program(monkeypatch, programs):
    shallow, calls, real = build(SHALLOW, head_positions=4), [], sd.fill_block
    monkeypatch.setattr(
        sd,
        "fill_block",
        lambda *args, **kwargs: calls.append((args, kwargs)) or real(*args, **kwargs),
    )
    canvas_BL = masked(2, 5, 18)
    for settings in ({"steps": 18}, {"steps": 7, "eps": 0.01, "ban_ids": (3, MASK)}, {}):
        sd.fill(shallow, canvas_BL, None, sd.Sampling(**settings))
    assert programs() == 1
    text = real.lower(*calls[0][0], **calls[0][1]).as_text()
    assert f"2x4x{TINY.vocab}xf32" in text
    assert f"2x23x{TINY.vocab}xf32" not in text
    assert f"46x{TINY.vocab}xf32" not in text


@pytest.mark.parametrize(
    "settings",
    [
        {"cache": "dual"},
        *(pytest.param(x, marks=pytest.mark.slow) for x in ({}, {"cache": "prefix"})),
    ],
    ids=str,
)
def test_all_blocks_are_one_program_also_with_weights_that_were_read_from_a_file(
    programs, settings
):
    graph, params = nnx.split(build(SHALLOW))
    model = nnx.merge(
        graph, jax.device_put(params, jax.devices()[0])
    )  # committed to a device, as checkpoints.load does it
    rule = sd.Sampling(block_length=4, threshold=0.9, **settings)
    sd.generate(model, [[5, 6, 7]], 14, rule)
    assert programs() == 1
    sd.generate(model, [[5, 6]], 12, dataclasses.replace(rule, threshold=0.3), widths=(32,))
    assert programs() == 0


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"block_length": 8, "cache": "dual"}], ids=str)
def test_a_hundred_mixed_prompts_are_at_most_three_programs(programs, settings):
    model = build(dataclasses.replace(SHALLOW, positions=256))
    lengths = np.random.default_rng(0).integers(1, 200, 100)
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in lengths]
    widths = sd.widths(sorted((lengths + 16).tolist()), 8, 256)
    assert len(widths) <= 3
    rows, stats = sd.generate(
        model, prompts, 16, sd.Sampling(threshold=0.01, **settings), widths=widths, rows=8
    )
    assert [row[:-16] for row in rows] == prompts
    assert MASK not in np.concatenate(rows)
    assert {*stats["windows"]} <= {9, *widths}
    assert programs() <= 3


@pytest.mark.parametrize(
    "settings",
    [pytest.param({"steps": 24}, marks=pytest.mark.slow), {"threshold": 0.3, "cache": "dual"}],
    ids=str,
)
def test_texts_that_end_make_room_and_every_text_is_as_alone(programs, settings):
    model, key = build(dataclasses.replace(SHALLOW, positions=256)), jax.random.key(3)
    prompts = [tokens(1, 1 + n % 7, seed=n)[0].tolist() for n in range(30)]
    rule = sd.Sampling(temperature=1.0, block_length=4, eos_ids=(2, 5, 7, 9, 11, 13), **settings)
    rows, stats = sd.generate(model, prompts, 24, rule, key, widths=(32,), rows=4)
    assert programs() == 1
    # four at a time, and the next four when all of these have ended
    key_B, batches = sd.keys_of_rows(key, 30), []
    for i in range(0, 30, 4):
        some = sd.canvas(prompts[i : i + 4], 24, model.cfg)
        batches.append(sd.fill(model, *some, rule, key_B[i : i + 4], rows=4))
        for n, row_L, see_L in zip(range(i, 30), batches[-1][0], some[1], strict=False):
            assert rows[n] == row_L[see_L].tolist()
    assert programs() == 0
    # one by one
    alone = [
        sd.generate(model, [prompts[n]], 24, rule, key_B[n : n + 1], rows=4) for n in (0, 11, 29)
    ]
    assert [row for (row,), _ in alone] == [rows[n] for n in (0, 11, 29)]
    assert len({len(set(row[-24:])) for row in rows}) > 5, "texts end early and late"
    assert stats["forwards"] < 0.75 * sum(one["forwards"] for _, one in batches)
    assert stats["forwards"] <= stats["passes"].sum() <= 4 * stats["forwards"]


def test_widths_of_canvases_waste_little_and_are_few():
    for length in (1, 31, 32, 33, 256, 257, 500, 513, 1000, 1025, 2048, 3000):
        assert length <= sd.canvas_width(length, 4096) <= max(32, length + 31, 1.125 * length)
    assert sd.canvas_width(90, 96) == 96
    assert sd.canvas_width(2000, 2047) == 2047
    assert sd.widths([40, 50, 60], 1, 4096) == (64,)
    assert sd.widths([10, 290, 300, 310, 700, 710, 720], 1, 4096) == (32, 320, 768)
    assert sd.widths([10, 290, 300, 310, 700, 710, 720], 4, 4096) == (320, 768)
    assert sd.widths([30, 40, 700, 700], 1, 4096, most=1) == (704,)


def test_bad_input_is_one_clear_line(shallow):
    with pytest.raises(ValueError, match="do not divide over 2 blocks"):
        sd.fill(shallow, masked(1, 4, 8), None, sd.Sampling(block_length=4, steps=3))
    for settings, text in (
        ({"cache": "dual"}, "set block_length"),
        ({"threshold": 0.5, "entropy_bound": 0.5}, "do not go together"),
        ({"alg": "origin", "entropy_bound": 0.5}, "has its own order"),
        ({"alg": "origin", "block_length": 4}, "origin has no blocks"),
        ({"alg_temp": 0.5, "entropy_bound": 0.5}, "leave alg and alg_temp out"),
        ({"alg": "topk_margin", "threshold": 0.5}, "leave alg and alg_temp out"),
    ):
        with pytest.raises(ValueError, match=text):
            sd.Sampling(**settings)
    for prompts, new in (([[5] * 60], 8), ([[5] * 70], 0)):
        with pytest.raises(ValueError, match="do not fit: the model reaches 64"):
            sd.generate(shallow, prompts, new)
    with pytest.raises(ValueError, match="nothing to fill"):
        sd.generate(shallow, [[]], 0)


def test_steps_that_cannot_change_anything_cost_no_pass(shallow):
    got, stats = sd.fill(shallow, masked(1, 4, 6), None, sd.Sampling(steps=20))
    counts = diffusion.step_counts(6, 20, "dream")
    assert stats["forwards"] == np.count_nonzero(counts)
    assert stats["steps"] == 20 - counts[::-1].cumsum().tolist().count(0)
    assert (got != MASK).all()


@pytest.mark.slow
def test_eight_devices_give_the_tokens_of_one(shallow, programs):
    mesh = jax.make_mesh(
        (2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3
    )
    params = params_of(shallow.cfg)
    spread = nnx.merge(
        md.graph_of(shallow.cfg, md.Compute()), jax.device_put(params, md.shardings(mesh, params))
    )
    canvas_BL = masked(8, 6, 8)
    for rule in (sd.Sampling(steps=4), sd.Sampling(threshold=0.5, block_length=4, cache="dual")):
        want_BL, _ = sd.fill(shallow, canvas_BL, None, rule)
        with jax.set_mesh(mesh):
            got_BL, _ = sd.fill(spread, canvas_BL, None, rule)
        np.testing.assert_array_equal(got_BL, want_BL)
        assert programs() == 2  # one for each model


# ---- adapters in peft's form -----------------------------------------------------------------------------------------


def random_adapters(rank=3, seed=1):
    """Adapters whose B, too, is not zero."""
    new = md.new_adapters(jax.random.key(seed), params_of(TINY), rank)
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(seed), x.shape), new)


def saved_adapters(folder, like, family="dream"):
    """The adapters that a folder holds in peft's form, as a tree of the form of `like`."""
    found = safetensors.numpy.load_file(folder / "adapter_model.safetensors")
    names = sd.named(like, family)
    assert names.keys() == found.keys()
    return jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in names])


def test_adapters_are_written_bit_for_bit_in_pefts_form(tmp_path):
    trained = random_adapters()
    sd.save_adapters(tmp_path, trained, 3, "a/b")
    config = runs.read_json(tmp_path / "adapter_config.json")
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (3, 3, "a/b")
    jax.tree.map(np.testing.assert_array_equal, saved_adapters(tmp_path, trained), trained)


@pytest.mark.parametrize(
    ("family", "module", "targets"),
    [
        ("llada", "model.transformer.blocks.1.ff_out", "model.transformer.blocks.1.ff_out"),
        ("nemotron", "encoder.layers.1.mlp.down_proj", "down_proj"),
        ("sdar", "model.layers.1.mlp.down_proj", "down_proj"),
    ],
)
def test_adapters_have_the_names_of_the_familys_own_modules(family, module, targets, tmp_path):
    """What peft makes of them: tests/test_peers.py."""
    trained = random_adapters()
    sd.save_adapters(tmp_path, trained, 3, "a/b", family)
    arrays = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    want = trained["layers"]["1"]["down_proj"]["b"]
    np.testing.assert_array_equal(arrays[f"base_model.model.{module}.lora_B.weight"], want)
    assert targets in runs.read_json(tmp_path / "adapter_config.json")["target_modules"]
    written = saved_adapters(tmp_path, trained, family)
    jax.tree.map(np.testing.assert_array_equal, written, trained)
