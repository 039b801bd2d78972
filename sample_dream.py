"""Sampling from Dream: the MASKs of a canvas are filled step by step. Reads the disk.

    model, _ = checkpoints.load(model_dream, "out/dream")
    rows, stats = sample_dream.generate(model, [[5, 6, 7]], 256, sample_dream.Sampling(steps=64))

A denoising step is a forward pass, a token proposed for each masked position, and a choice: the
proposals of highest confidence are written. With blocks only one block is open until it is full;
without, the whole canvas is one block. With a cache the first step of a block keeps the keys and
values of all slots, and its further steps feed a window around the block alone.

From the top: generate, filling, prepare; for each block fill_block, a compiled loop of step:
forward, propose, settle. Not here: models trained in blocks (sample_block.py), text that stays
valid Python (infill.py), other models' demos (extra/demos.py).

Letters: B batch, L slots of the canvas, W slots of a window, C positions of one chunk of logits,
V vocabulary, S denoising steps.
Refs: Dream, arXiv:2508.15487; Fast-dLLM, 2505.22618; entropy bound: EB-Sampler, 2505.24857.
"""

import collections
import dataclasses
import functools
import itertools
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.flax
from flax import nnx

import diffusion
import runs
from model_dream import BATCH, MATRICES, PS, DreamConfig, fit, shard


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How masked positions are filled. Another value of most fields is another compiled program."""

    # the order of positions; a threshold or an entropy bound has its own
    alg: typing.Literal["entropy", "maskgit_plus", "topk_margin", "origin"] = "entropy"
    steps: int = 0  # in all blocks; 0: one for each token, or one with a threshold or bound
    eps: float = 1e-3  # end of the time grid
    temperature: float = 0.0  # 0 takes the argmax
    top_p: float = 1.0  # a token is dropped if those before it have more than top_p; 1 keeps all
    top_k: int = 0  # keep the k likeliest tokens; 0 keeps all
    alg_temp: float = 0.0  # of the choice of positions; 0 takes those of highest confidence
    threshold: float = 0.0  # fill all positions of this probability, one a step at least; 0: steps
    # fill positions of lowest entropy, while those before add up to at most this; 0: by steps
    entropy_bound: float = 0.0
    filtered: bool = False  # compare the threshold after temperature, top-k and top-p
    # the probability compared: the drawn token's | the max
    score: typing.Literal["drawn", "distribution"] = "drawn"
    block_length: int = 0  # fill blocks of this length from left to right; 0: the whole canvas
    # within a block keep keys and values: of the prompt | all around
    cache: typing.Literal["", "prefix", "dual"] = ""
    ban_ids: tuple[int, ...] | None = None  # never drawn; None: MASK and expand_id
    vocab: int = 0  # ids from here on have no token and are never drawn; 0 allows all rows
    eos_ids: tuple[int, ...] = ()  # each ends a text; eos_ids[0] fills the rest
    history: bool = False  # keep when each token was written, and its probability then
    likeliest: int = 0  # with history: keep this many of the likeliest tokens, too

    def __post_init__(self):
        if self.threshold and self.entropy_bound:
            raise ValueError("threshold and entropy_bound do not go together: leave one out")
        if self.bound and (self.alg_temp or self.alg in ("topk_margin", "origin")):
            raise ValueError(
                "a threshold or an entropy bound has its own order: leave alg and alg_temp out"
            )
        if self.cache and not self.block_length:
            raise ValueError("a cache works block by block: set block_length")
        if self.alg == "origin" and self.block_length:
            raise ValueError("origin has no blocks: leave block_length out")

    @property
    def bound(self):
        """The threshold or entropy bound, by which a step fills any number of positions, or 0."""
        return self.threshold or self.entropy_bound


class Record(typing.NamedTuple):
    """How the positions that were masked at the start were filled: enough to replay each step."""

    step_BL: jax.Array  # the step that filled it; -1 elsewhere
    token_BL: jax.Array  # what was drawn, even if an end replaced it; MASK where nothing was
    logp_BL: jax.Array  # its log p before top-p and top-k; 0 where nothing was drawn
    likely: tuple = ()  # with Sampling.likeliest: these ids and their log p, [B, L, N] each


class State(typing.NamedTuple):
    """What a denoising step changes: an array of rows each, but for the two counters."""

    token_BL: jax.Array
    step: jax.Array  # steps so far, in all blocks
    forwards: jax.Array  # forward passes of the model
    left_B: jax.Array  # with a bound: positions that the steps so far might fill and did not
    step_B: jax.Array  # steps after which the row was not full yet
    record: Record | None = None  # with Sampling.history

    def of_rows(self, index):
        return jax.tree.map(lambda x: x[index] if x.ndim else x, self)

    def with_rows(self, index, new):
        def put(old, new):
            if new.ndim == 0:
                return new
            old = old.copy()
            old[index] = new[: len(index)]
            return old

        return jax.tree.map(put, self, new)


class Step(typing.NamedTuple):
    """What a front end shows after a denoising step."""

    number: int  # denoising steps so far: when the newest tokens were written
    forwards: int  # forward passes so far
    rows: list  # the ids of each text, without padding
    probability: list  # of each id when it was written; 1 for those given and for MASK
    stats: dict | None = None  # after the last step: those of `generate`


class Given(typing.NamedTuple):
    """What stays as it is while a block is filled. Arrays: another value needs no other program."""

    see_BL: jax.Array  # False at padding
    made_BL: jax.Array  # masked at the start
    offset_BL: jax.Array  # slots counted from the row's first token
    key_B: jax.Array  # the data of a random key for each row
    budget_BS: jax.Array  # bound without blocks: positions that step i may fill beside those left
    share_S: jax.Array  # else: the share of the masked positions that step i fills; origin: chance
    banned_V: jax.Array  # ids that are never drawn
    bound: float  # the threshold, or the entropy bound
    steps: int  # a block ends after this many steps, whatever is still masked
    size: int  # slots of the block
    first: int = 0  # first slot of the block
    start: int = 0  # first slot of the window that a cached step feeds
    begun: int | jax.Array = 0  # State.step at which the block began
    filters: tuple = ()  # of each row (temperature or 1, top_p, False for the argmax), [B, 1, 1]

    def of_rows(self, index):
        names = "see_BL", "made_BL", "offset_BL", "key_B", "budget_BS"
        return self._replace(**{name: getattr(self, name)[index] for name in names})


# ---- one denoising step ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sampler:
    """What a compiled program is made for."""

    graph: typing.Any  # model_dream.graph_of: the model without its parameters
    cfg: DreamConfig
    rule: Sampling

    def open_positions(self, state, given):
        """The masked positions of the block [B, L]."""
        slot_L = jnp.arange(state.token_BL.shape[1])
        block_L = (slot_L >= given.first) & (slot_L < given.first + given.size)
        return (state.token_BL == self.cfg.mask_id) & given.see_BL & block_L

    def uniform(self, given, tag, state, offset_BC, shape=()):
        """Uniform numbers [B, C, *shape], a function of key, step and offset: not of the batch."""

        def draw(key, step, offset):
            key = jax.random.fold_in(jax.random.wrap_key_data(key), tag)
            key = jax.random.fold_in(jax.random.fold_in(key, step), offset)
            return jax.random.uniform(key, shape, minval=jnp.finfo(jnp.float32).tiny)

        return jax.vmap(jax.vmap(draw, (None, None, 0)))(given.key_B, state.step_B, offset_BC)

    def propose(self, model, hidden_BWD, start, state, given, slot_BC):
        """Of each of these slots (token_BC, confidence score_BC, for a Record logp_BC and the
        likeliest tokens). hidden_BWD are the hidden states of slots start .. start + W - 1.
        """
        rule = self.rule
        row_B1 = jnp.arange(len(slot_BC))[:, None]
        # With cfg.shift the state at p - 1 counts, or its own where that is padding or not fed.
        see_left_BC = given.see_BL[row_B1, jnp.maximum(slot_BC - 1, 0)]
        shifted_BC = self.cfg.shift & (slot_BC > 0) & see_left_BC
        source_BC = jnp.clip(slot_BC - shifted_BC - start, 0, hidden_BWD.shape[1] - 1)
        logits_BCV = model.logits(jnp.take_along_axis(hidden_BWD, source_BC[..., None], 1))
        logits_BCV = jnp.where(given.banned_V, -jnp.inf, logits_BCV)

        # Draw a token from what temperature, top-k and top-p leave.
        temperature, top_p, draws = given.filters or (rule.temperature, rule.top_p, True)
        filtered_BCV = diffusion.filter_logits(
            logits_BCV, temperature, rule.top_k, top_p, rule="dream", width=filter_width(model)
        )
        if given.filters or rule.temperature:
            offset_BC = given.offset_BL[row_B1, slot_BC]
            u_BCV = self.uniform(given, 0, state, offset_BC, logits_BCV.shape[-1:])
            u_BCV = jnp.where(draws, u_BCV, jnp.exp(-1.0))  # the same for all tokens: the argmax
            token_BC = diffusion.sample_tokens(filtered_BCV, u_BCV, 1.0)
        else:
            token_BC = diffusion.sample_tokens(filtered_BCV, None, 0)

        # A threshold or bound is compared with the model's own distribution, as filters raise every
        # probability: 0.61 of two becomes 0.90 at temperature 0.2. Dream's orders come after them.
        judged_BCV = filtered_BCV
        if rule.bound and not rule.filtered:
            judged_BCV = logits_BCV
        prob_BCV = diffusion.softmax(judged_BCV)
        if rule.alg == "maskgit_plus" and rule.score == "drawn":
            score_BC = jnp.take_along_axis(prob_BCV, token_BC[..., None], -1)[..., 0]
        elif rule.alg == "maskgit_plus":  # the choice of positions does not depend on the draw
            score_BC = prob_BCV.max(-1)
        elif rule.alg == "topk_margin":
            score_BC = diffusion.confidence(prob_BCV, "margin")
        elif rule.alg == "entropy":
            score_BC = diffusion.confidence(prob_BCV, "entropy")
        else:
            score_BC = jnp.zeros(token_BC.shape)

        if not state.record:
            return token_BC, score_BC, None, ()
        logp_BCV = diffusion.log_softmax(logits_BCV)
        logp_BC = jnp.take_along_axis(logp_BCV, token_BC[..., None], -1)[..., 0]
        likely = ()
        if rule.likeliest:
            likely = tuple(jax.lax.top_k(logp_BCV, rule.likeliest)[::-1])
        return token_BC, score_BC, logp_BC, likely

    def propose_all(self, model, hidden_BWD, start, state, given, wanted_BL):
        """`propose` for the wanted positions, as arrays over the canvas. The head is the widest
        matrix, so it runs for these alone, C of each row at a time.
        """
        B, L = wanted_BL.shape
        row_B1 = jnp.arange(B)[:, None]
        C = model.compute.head_positions
        if not C:
            C = 16 if model.compute.platform == "cpu" else 64
        C = min(C, self.rule.block_length or L, L)
        # slot_BL holds the wanted slots from the left, then L, which is dropped.
        order_BL = jnp.where(wanted_BL, jnp.cumsum(wanted_BL, -1) - 1, L + C)
        slot_BL = jnp.full((B, L + -L % C), L).at[row_B1, order_BL].set(jnp.arange(L), mode="drop")

        def propose_chunk(c, proposal):
            slot_BC = jax.lax.dynamic_slice(slot_BL, (0, c * C), (B, C))

            def put(x_BL, x_BC):
                return x_BL.at[row_B1, slot_BC].set(x_BC, mode="drop")

            new = self.propose(model, hidden_BWD, start, state, given, jnp.minimum(slot_BC, L - 1))
            return jax.tree.map(put, proposal, new)

        logp_BL, likely = state.record[2:] if state.record else (None, ())
        proposal = state.token_BL, jnp.full((B, L), -jnp.inf), logp_BL, likely
        chunks = (jnp.max(wanted_BL.sum(-1)) + C - 1) // C
        return jax.lax.fori_loop(0, chunks, propose_chunk, proposal)

    def forward(self, model, state, given, cache, wanted_BL, most_B, width):
        """(state, keys and values) after a forward pass: over the canvas, or with a cache over
        `width` slots from given.start on.
        """
        rule = self.rule
        if cache is None:
            start = 0
            hidden_BWD, cache = model.hidden(state.token_BL, see_BM=given.see_BL)
        else:
            start = given.start
            window_BW = jax.lax.dynamic_slice_in_dim(state.token_BL, start, width, 1)
            hidden_BWD, cache = model.hidden(window_BW, None, given.see_BL, cache, start)
        new_BL, score_BL, logp_BL, likely = self.propose_all(
            model, hidden_BWD, start, state, given, wanted_BL
        )

        # Choose: the positions that meet the threshold or bound; else those of highest confidence.
        count_B = most_B
        if rule.bound:
            if rule.entropy_bound:
                accepted_BL = diffusion.entropy_bound(-score_BL, wanted_BL, given.bound)
            else:
                accepted_BL = wanted_BL & (score_BL >= given.bound)
            count_B = jnp.minimum(most_B, jnp.maximum(1, accepted_BL.sum(-1)))
        elif rule.alg_temp:
            # Gumbel's k largest are k draws without replacement from softmax(score / alg_temp).
            u_BL = self.uniform(given, 1, state, given.offset_BL)
            score_BL = score_BL / (rule.alg_temp + diffusion.COLDEST) - jnp.log(-jnp.log(u_BL))
        chosen_BL = diffusion.surest(score_BL, wanted_BL, count_B)
        token_BL = jnp.where(chosen_BL, new_BL, state.token_BL)

        record = state.record
        if record:
            written_BL = token_BL != state.token_BL  # a MASK that is proposed writes nothing
            likely = jax.tree.map(
                lambda new, old: jnp.where(written_BL[..., None], new, old), likely, record.likely
            )
            record = record._replace(
                token_BL=jnp.where(written_BL, token_BL, record.token_BL),
                logp_BL=jnp.where(written_BL, logp_BL, record.logp_BL),
                likely=likely,
            )
        state = state._replace(
            token_BL=token_BL,
            forwards=state.forwards + 1,
            left_B=most_B - chosen_BL.sum(-1),
            record=record,
        )
        return state, cache if rule.cache else None

    def step(self, model, state, given, cache, width):
        """A step: (state, keys and values), which are None before a block and without a cache."""
        rule = self.rule
        i = state.step - given.begun  # step i of this block
        wanted_BL = self.open_positions(state, given)
        if rule.alg == "origin":  # fills each position by chance, whatever the model's confidence
            wanted_BL &= self.uniform(given, 2, state, given.offset_BL) < given.share_S[i]
        count_B = wanted_BL.sum(-1)
        most_B = count_B
        if rule.bound and not rule.block_length:
            new_B = given.budget_BS.at[:, i].get(mode="fill", fill_value=0)
            most_B = jnp.minimum(new_B + state.left_B, count_B)
        elif not rule.bound and rule.alg != "origin":
            most_B = jnp.floor(count_B * given.share_S[i]).astype(jnp.int32)

        def forward(state, cache):
            return self.forward(model, state, given, cache, wanted_BL, most_B, width)

        def stay(state, cache):
            return state, cache

        if rule.cache and cache is None:  # the first step of the block
            state, cache = forward(state, cache)
        else:  # without a pass where the schedule rounds to 0 positions in all rows
            state, cache = jax.lax.cond(jnp.any(most_B > 0), forward, stay, state, cache)
        state = settle(state, given, self.cfg.mask_id, rule.eos_ids)
        open_B = self.open_positions(state, given).any(-1)
        return state._replace(step=state.step + 1, step_B=state.step_B + open_B), cache


def filter_width(model):
    """Bits that diffusion.filter_logits bisects at a time: what is fastest on the platform."""
    return 1 if model.compute.platform == "cpu" else 3


def settle(state, given, mask_id, eos_ids):
    """The state after a step, with its number in the record, and ended texts filled with
    eos_ids[0]. An end token ends its row if nothing before it is MASK, and no given text follows.
    """
    token_BL = state.token_BL
    masked_BL = (token_BL == mask_id) & given.see_BL
    if eos_ids:
        tail_BL = jnp.flip(jnp.cumprod(jnp.flip(given.made_BL | ~given.see_BL, -1), -1), -1) > 0
        eos_BL = (token_BL[..., None] == jnp.array(eos_ids)).any(-1)
        settled_BL = jnp.cumsum(masked_BL, -1) == 0
        ended_BL = jnp.cumsum(eos_BL & tail_BL & given.made_BL & settled_BL, -1) > 0
        token_BL = jnp.where(ended_BL & ~eos_BL & given.see_BL, eos_ids[0], token_BL)
        masked_BL &= ~ended_BL
    record = state.record
    if record:
        filled_BL = given.made_BL & (record.step_BL < 0) & ~masked_BL
        record = record._replace(step_BL=jnp.where(filled_BL, state.step, record.step_BL))
    return state._replace(token_BL=token_BL, record=record)


@functools.partial(jax.jit, static_argnames=("sampler", "width"))
def fill_block(params, state, given, *, sampler, width=0):
    """Fill a block, in one loop on the device: a State.

    With a cache the first step keeps the keys and values of the canvas, [B, J, L, K] of each layer;
    the others feed `width` slots from given.start on and update those of these slots.
    """
    model = nnx.merge(sampler.graph, params)
    cache = None
    if sampler.rule.cache:
        state, cache = sampler.step(model, state, given, cache, width)

    def unfinished(carry):
        state, _ = carry
        open_BL = sampler.open_positions(state, given)
        return (state.step - given.begun < given.steps) & jnp.any(open_BL)

    def step(carry):
        state, cache = carry
        return sampler.step(model, state, given, cache, width)

    state, _ = jax.lax.while_loop(unfinished, step, (state, cache))
    return jax.tree.map(shard, state)  # whole on all hosts


@functools.partial(jax.jit, static_argnames=("sampler", "width"), donate_argnames=("cache",))
def one_step(params, state, given, cache, *, sampler, width):
    """A single step of `fill_block`: (State, keys and values)."""
    model = nnx.merge(sampler.graph, params)
    state, cache = sampler.step(model, state, given, cache, width)
    return jax.tree.map(shard, state), split(cache)


# ---- a canvas ----------------------------------------------------------------------------------


def layout(rule, masked_BL):
    """(blocks, slots of each, steps of each). Blocks cover the columns that hold a MASK.

    A block is (its first slot, first slot of the window that its cached steps feed, its width). The
    slot before a block gives the logits of its first token. With cache="prefix" all windows have
    one width, so that one program fills all blocks.
    """
    L = masked_BL.shape[1]
    size = rule.block_length
    if not size:  # the canvas is one block
        most = max(1, int(masked_BL.sum(-1).max()))
        return [(0, 0, L)], L, rule.steps or (1 if rule.bound else most)
    columns = np.flatnonzero(masked_BL.any(0)).tolist()
    if not columns:
        return [], size, 1
    begin = columns[0]
    count = math.ceil((columns[-1] + 1 - begin) / size)
    if rule.steps % count:
        nearest = math.ceil(rule.steps / count) * count
        raise ValueError(f"{rule.steps} steps do not divide over {count} blocks; try {nearest}")
    # Where blocks do not divide the canvas, the last one overlaps the one before, which is full.
    firsts = [max(0, min(begin + i * size, L - size)) for i in range(count)]
    width = L
    if rule.cache == "dual":
        width = min(size + 1, L)
    elif rule.cache == "prefix":
        width = min(math.ceil((L - firsts[0]) / 32) * 32 + 1, L)
    blocks = [(first, min(max(first - 1, 0), L - width), width) for first in firsts]
    return blocks, size, rule.steps // count or size


fold_in = jax.jit(jax.vmap(jax.random.fold_in, (None, 0)))


def keys_of_rows(key, rows):
    """The data of a random key for each row, [rows, 2], of one key or of one for each row."""
    if key is None:
        key = jax.random.key(0)
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    if key.ndim == 0:
        key = fold_in(key, np.arange(rows))
    return jax.random.key_data(key)


def new_record(token_BL, likeliest):
    """The Record of a canvas before anything is filled."""
    shape = token_BL.shape
    likely = ()
    if likeliest:
        none = np.zeros((*shape, likeliest))
        likely = none.astype(np.int32), none.astype(np.float32)
    step_BL = np.full(shape, -1, np.int32)
    return Record(step_BL, token_BL.copy(), np.zeros(shape, np.float32), likely)


def prepare(cfg, rule, token_BL, see_BL, key=None):
    """(State, Given, blocks of `layout`) before anything is filled."""
    B, L = token_BL.shape
    token_BL = token_BL.astype(np.int32)
    made_BL = (token_BL == cfg.mask_id) & see_BL
    blocks, size, steps = layout(rule, made_BL)

    # The schedule. It has an entry for each slot at least: one program for all numbers of steps.
    entries = 1 << (max(steps, L, 32) - 1).bit_length()
    budget_BS = np.zeros((B, 0), np.int32)
    share_S = np.zeros(entries, np.float32)
    if rule.bound and rule.block_length:
        steps = size + 1  # a step may fill all positions; it fills one at least, as does the first
    elif rule.bound:
        # The steps share the masks evenly; each one beyond them fills at least one that is left.
        count_B = made_BL.sum(-1)
        budget_BS = np.zeros((B, entries), np.int32)
        budget_BS[:, :steps] = diffusion.step_counts(count_B, steps, "even").T
        steps += int(count_B.max())
    else:  # Dream's schedule, origin's by chance: a step fills the share 1 - s / t, the last all
        share_S[:steps] = diffusion.dream_shares(steps, rule.eps)

    banned = rule.ban_ids
    if banned is None:
        banned = (cfg.mask_id, cfg.expand_id)
    id_V = np.arange(cfg.vocab)
    given = Given(
        see_BL=see_BL,
        made_BL=made_BL,
        offset_BL=np.maximum(np.arange(L) - see_BL.argmax(-1)[:, None], 0),
        key_B=np.asarray(keys_of_rows(key, B)),
        budget_BS=budget_BS,
        share_S=share_S,
        banned_V=np.isin(id_V, banned) | (id_V >= (rule.vocab or cfg.vocab)),
        bound=rule.bound,
        steps=steps,
        size=size,
    )
    zero = np.int32(0)
    zero_B = np.zeros(B, np.int32)
    record = new_record(token_BL, rule.likeliest) if rule.history else None
    return State(token_BL, zero, zero, zero_B, zero_B, record), given, blocks


def sampler_of(graph, cfg, rule):
    """The Sampler of a rule, without the values that `Given` holds: these need no new program."""
    order = rule.alg
    if rule.bound:
        order = "entropy" if rule.entropy_bound else "maskgit_plus"
    same = dataclasses.replace(
        rule,
        alg=order,
        steps=0,
        eps=0.5,
        ban_ids=(),
        vocab=0,
        # of these it only matters whether they are set
        threshold=float(rule.threshold > 0),
        entropy_bound=float(rule.entropy_bound > 0),
    )
    return Sampler(graph, cfg, same)


def fill(model, token_BL, see_BL=None, rule=None, key=None, rows=0):
    """Fill every MASK of a canvas: (token_BL, stats). All arrays are NumPy's.

    see_BL is False at padding, which stays as it is; so does every token that is not MASK. key is
    one for all rows, or [B] one for each. `rows` of them are filled at a time, 0: all; block by
    block a row whose text has ended makes room for another; a record then counts the steps of all
    in turn. Blocks follow from the columns that are masked in any row.

    stats: "forwards", "steps" (one that cannot change anything costs no forward pass), "windows"
    (slots fed in each pass), "passes" [B] (until a row was full); with rule.history "record", a
    Record, "when" [B, L], the step that wrote a token, from 1 on, 0 for those given, and
    "probability", its probability then.
    """
    *_, (state, stats) = filling(model, token_BL, see_BL, rule or Sampling(), key, rows)
    return state.token_BL, stats


def filling(model, token_BL, see_BL, rule, key=None, rows=0, by_step=False):
    """`fill` as a generator: with by_step (State, None) after each, at the end (State, stats)."""
    cfg = model.cfg
    token_BL = np.asarray(token_BL)
    B, L = token_BL.shape
    if cfg.block_length:
        raise ValueError(
            f"the model was trained in blocks of {cfg.block_length}: sample_block.py fills these"
        )
    if L > cfg.positions:
        raise ValueError(
            f"{L} tokens do not fit: the model reaches {cfg.positions} positions; lower max_new"
        )
    see_BL = np.broadcast_to(True if see_BL is None else np.asarray(see_BL) != 0, (B, L))
    state, given, blocks = prepare(cfg, rule, token_BL, see_BL, key)
    graph, params = nnx.split(model)
    sampler = sampler_of(graph, cfg, rule)

    together = not rows
    rows = rows or B
    windows = []
    passes_B = np.zeros(B, int)
    for first, start, width in blocks:
        open_B = open_rows(cfg, state, given._replace(first=first))
        waiting = np.arange(B) if together and open_B.any() else np.flatnonzero(open_B)
        for i in range(0, len(waiting), rows):
            chosen = waiting[i : i + rows]
            index = np.resize(chosen, rows)  # the last batch is filled up with rows that come again
            block = given._replace(first=first, start=start, begun=state.step).of_rows(index)
            old = state.of_rows(index)
            if by_step:
                for new in steps_of_block(params, old, block, sampler, width):
                    yield new, None
            else:
                new = fill_block(params, beside(params, old), block, sampler=sampler, width=width)
                new = jax.tree.map(np.asarray, new)
            passes = int(new.forwards - old.forwards)
            own_B = (new.step_B - old.step_B + 1) * open_B[index]
            passes_B[chosen] += np.minimum(passes, own_B)[: len(chosen)]
            windows += [L] + [width] * (passes - 1)  # the first pass of a block is over the canvas

            state = state.with_rows(chosen, new)

    stats = {
        "forwards": int(state.forwards),
        "steps": int(state.step),
        "windows": windows,
        "passes": passes_B,
    }
    if state.record:
        stats["record"] = state.record
        stats["when"] = state.record.step_BL + 1
        stats["probability"] = np.exp(state.record.logp_BL)
    yield state, stats


def steps_of_block(params, state, given, sampler, width):
    """The States after each step of a block."""
    cache = None
    while open_rows(sampler.cfg, state, given).any() and state.step - given.begun < given.steps:
        state = beside(params, state)
        state, cache = one_step(params, state, given, cache, sampler=sampler, width=width)
        state = jax.tree.map(np.asarray, state)
        yield state


def open_rows(cfg, state, given):
    """The rows [B] whose block holds a MASK. NumPy's."""
    masked_BL = (state.token_BL == cfg.mask_id) & given.see_BL
    return masked_BL[:, given.first : given.first + given.size].any(-1)


def beside(params, state):
    """The state on the parameters' device or mesh: from the host it would be another program."""
    at = jax.tree.leaves(params)[0].sharding
    if isinstance(at, jax.NamedSharding):
        mesh = at.mesh
        at = jax.tree.map(
            lambda x: jax.NamedSharding(mesh, fit(cache_spec(x), np.shape(x), mesh)), state
        )
    return jax.device_put(state, at)


def cache_spec(x):
    """Keys and values are split by rows and heads (PythonCoder's have an axis between)."""
    return {4: PS(BATCH, "tensor"), 5: PS(BATCH, None, "tensor")}.get(np.ndim(x), PS())


def split(state):
    """Keys and values over the mesh, all else whole on every device."""
    return jax.tree.map(lambda x: shard(x, *cache_spec(x)), state)


def canvas_width(length, positions):
    """Slots for texts of this length: a multiple of 32, beyond 512 of an eighth of a power of 2."""
    step = max(32, 1 << (length - 1).bit_length() >> 4)
    return max(length, min(math.ceil(length / step) * step, positions))


def widths(lengths, size, positions, most=3):
    """At most `most` canvas widths for texts, `size` at a time: few programs, little padding."""
    batches = [lengths[i : i + size] for i in range(0, len(lengths), size)]
    needed = collections.Counter(canvas_width(max(batch), positions) for batch in batches)
    *narrower, widest = sorted(needed)

    def slots(choice):
        return sum(n * min(w for w in choice if w >= need) for need, n in needed.items())

    choices = itertools.combinations(narrower, min(most - 1, len(narrower)))
    return min(((*choice, widest) for choice in choices), key=slots)


def canvas(prompts, max_new, cfg, width=0):
    """(token_BL, see_BL) of prompts (lists of ids, MASK allowed) and max_new MASKs after each, with
    padding on the left, `width` slots wide, or as canvas_width says.
    """
    longest = max(map(len, prompts)) + max_new
    if longest == 0:
        raise ValueError("nothing to fill: give a prompt or max_new")
    L = max(longest, width or canvas_width(longest, cfg.positions))
    token_BL = np.full((len(prompts), L), cfg.pad_id, np.int32)
    see_BL = np.zeros(token_BL.shape, bool)
    masks = [cfg.mask_id] * max_new
    for row, see, prompt in zip(token_BL, see_BL, prompts, strict=True):
        first = L - max_new - len(prompt)
        row[first:] = [*prompt, *masks]
        see[first:] = True
    return token_BL, see_BL


def generate(model, prompts, max_new, rule=None, key=None, widths=(), rows=0):
    """Continue prompts with max_new tokens each and fill their MASKs: (rows of ids, stats of
    `fill`, added up).

    A row is prompt and completion without padding. `rows` of them are filled at a time, those of
    about one length together, in canvases of these widths: with the same widths and rows other
    prompts need no other program.
    """
    rule = rule or Sampling()
    lengths = [len(prompt) + max_new for prompt in prompts]
    if rule.history:  # with a record all are one batch
        rows = 0
    size = rows or max(1, len(prompts))
    order = list(range(len(prompts)))
    if len(prompts) > size:
        order.sort(key=lengths.__getitem__)
    of_width = collections.defaultdict(list)
    for i in range(0, len(order), size):
        batch = order[i : i + size]
        longest = max(lengths[n] for n in batch)
        width = next((width for width in widths if width >= longest), 0)
        of_width[width] += batch

    key_B = np.asarray(keys_of_rows(key, len(prompts)))
    texts = [None] * len(prompts)
    stats = {}
    total = {"forwards": 0, "steps": 0, "windows": []}
    passes_B = np.zeros(len(prompts), int)
    for width, numbers in of_width.items():
        token_BL, see_BL = canvas([prompts[n] for n in numbers], max_new, model.cfg, width)
        token_BL, stats = fill(model, token_BL, see_BL, rule, key_B[numbers], rows)
        for name in total:
            total[name] += stats[name]
        passes_B[numbers] = stats["passes"]
        for n, row, see in zip(numbers, token_BL, see_BL, strict=True):
            texts[n] = row[see].tolist()
    return texts, stats | total | {"passes": passes_B}


def steps(model, prompts, max_new, rule=None, key=None, widths=()):
    """Generate as `generate` does, in one batch: a Step after each forward pass; then the last one
    once more, with the stats of `generate`.
    """
    rule = dataclasses.replace(rule or Sampling(), history=True)
    longest = max(map(len, prompts)) + max_new
    width = next((width for width in widths if width >= longest), 0)
    token_BL, see_BL = canvas(prompts, max_new, model.cfg, width)
    forwards = 0
    for state, stats in filling(model, token_BL, see_BL, rule, key, by_step=True):
        if state.forwards == forwards and not stats:  # the schedule has filled nothing
            continue
        forwards = state.forwards
        rows = []
        probability = []
        for row, logp_L, see_L in zip(state.token_BL, state.record.logp_BL, see_BL, strict=True):
            rows.append(row[see_L].tolist())
            probability.append(np.exp(logp_L[see_L]).tolist())
        yield Step(int(state.step), int(state.forwards), rows, probability, stats)


# ---- files of a Dream's folder -----------------------------------------------------------------


def load_tokenizer(folder, cfg):
    """The tokenizer in a folder. ValueError if it has too many tokens, or MASK or EOS is a word."""
    tokenizer = runs.read_tokenizer(folder, cfg.vocab)
    added = tokenizer.get_added_tokens_decoder()
    for name in ("mask_id", "eos_id"):
        i = getattr(cfg, name)
        token = tokenizer.id_to_token(i)
        # MASK may have no name; the end token needs one
        if i not in added and (token or name == "eos_id"):
            raise ValueError(
                f"the tokenizer of {folder} does not fit: {i}, the model's {name}, "
                f"is {token!r} in it"
            )
        if i in added and not added[i].special:  # as added_tokens.json leaves it
            added[i].special = True
            tokenizer.add_tokens([added[i]])
    return tokenizer


def named(adapters, family="dream"):
    """{name in peft's file: array} of LoRA adapters of a family, in the order of their leaves."""
    arrays = {}
    top = "encoder" if family == "nemotron" else "model"
    llada = {"o_proj": "attn_out", "gate_proj": "ff_proj", "down_proj": "ff_out"}
    for path, x in jax.tree_util.tree_leaves_with_path(adapters):
        _, layer, matrix, part = (key.key for key in path)
        block = "self_attn" if matrix in MATRICES[:4] else "mlp"
        module = f"{top}.layers.{layer}.{block}.{matrix}"
        if family == "llada":
            module = f"model.transformer.blocks.{layer}.{llada.get(matrix, matrix)}"
        arrays[f"base_model.model.{module}.lora_{part.upper()}.weight"] = x
    return arrays


def save_adapters(folder, adapters, rank, source, family="dream"):
    """Write adapters as peft does for the model `source` of the Hub, by the names of its family."""
    arrays = named(adapters, family)
    modules = MATRICES
    if family == "llada":  # whose head, too, ends in ff_out: whole names
        modules = sorted({name[17:].partition(".lora_")[0] for name in arrays})
    config = {"peft_type": "LORA", "base_model_name_or_path": source, "target_modules": modules}
    runs.write(folder / "adapter_config.json", config | {"r": rank, "lora_alpha": rank})
    tensors = safetensors.flax.save(arrays, {"format": "pt"})
    runs.write(folder / "adapter_model.safetensors", tensors)
