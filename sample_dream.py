"""Sampling from Dream: the MASKs of a canvas are filled step by step, all at once or block by
block.

    model, _ = checkpoints.load(model_dream, "out/dream")
    rows, stats = sample_dream.generate(model, [[5, 6, 7]], 256, sample_dream.Sampling(steps=64))

A denoising step is a forward pass of the model, a token proposed for each masked position, and a
choice: the proposals of highest confidence are written, the other positions stay MASK until a later
step. With blocks, only the masked positions of one block are open until it is full; without, the
whole canvas is one block. P2 (Open-dCoder) chooses anew among all positions that were masked at
first: one of low confidence becomes MASK again. With a cache, the first step of a block keeps the
keys and values of all slots, and its further steps feed a window around the block alone.

From the top: generate, fill, prepare; for each block fill_block, a compiled loop of step: forward,
propose, settle.

Letters: B batch, L slots of the canvas, W slots of a window, C positions of one chunk of logits, D
width, V vocabulary, S denoising steps.
Refs: Dream, arXiv:2508.15487; DiffuCoder, 2506.20639; Fast-dLLM, 2505.22618; P2, 2502.03540; LLaDA,
2502.09992.
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

    # the order of positions
    alg: typing.Literal["entropy", "maskgit_plus", "topk_margin", "origin", "p2"] = "entropy"
    # denoising steps, all blocks together; 0: one for each token, one with a threshold or bound
    steps: int = 0
    eps: float = 1e-3  # end of the time grid
    # tokens of each step: Dream's | equally many, as LLaDA
    schedule: typing.Literal["dream", "even"] = "dream"
    temperature: float = 0.0  # 0 takes the argmax
    top_p: float = 1.0  # a token is dropped if those before it have more than top_p; 1 keeps all
    top_k: int = 0  # keep the k likeliest tokens; 0 keeps all
    # temperature of the choice of positions; 0 takes those of highest confidence
    alg_temp: float = 0.0
    # fill all positions of at least this probability, one a step at least; 0: by steps
    threshold: float = 0.0
    # fill positions of lowest entropy, while those before add up to at most this; 0: steps
    entropy_bound: float = 0.0
    # compare the threshold after temperature, top-k and top-p, as Fast-dLLM's code does
    filtered: bool = False
    # the probability compared: the drawn token's | the max
    score: typing.Literal["drawn", "distribution"] = "drawn"
    # fill blocks of this length from left to right; 0: the whole canvas at once
    block_length: int = 0
    sub_block: int = 0  # of a model of blocks, see sample_block.py
    # within a block keep keys and values: of the prompt | all around
    cache: typing.Literal["", "prefix", "dual"] = ""
    # Fast-dLLM's windows: a block's first token is filled whatever its probability
    fast_dllm: bool = False
    # lowers the logits of eos_ids by this times -log(filled share of the text + 0.001)
    eos_penalty: float = 0.0
    # LLaDA's cfg_scale w: logits u + (w + 1) (c - u), u those with MASK for all that was given
    guidance: float = 0.0
    ban_ids: tuple[int, ...] | None = None  # never drawn; None: MASK and expand_id
    vocab: int = 0  # ids from here on have no token and are never drawn; 0 allows all rows
    # each ends a text if nothing before it is MASK; eos_ids[0] fills the rest
    eos_ids: tuple[int, ...] = ()
    # eos_ids are unmasked last | EOS is never drawn
    late_eos: typing.Literal["", "confidence", "logits", "both"] = ""
    # keep when each token was written, and the model's probability of it then
    history: bool = False
    likeliest: int = 0  # with history: keep this many of the likeliest tokens, too

    def __post_init__(self):
        alone = ("threshold", "entropy_bound"), ("guidance", "cache"), ("alg_temp", "threshold")
        for one, other in (*alone, ("alg_temp", "entropy_bound")):
            if getattr(self, one) and getattr(self, other):
                raise ValueError(f"{one} and {other} do not go together: leave one out")
        if self.bound and self.alg == "topk_margin":
            raise ValueError(
                "a threshold or an entropy bound has an order of its own: leave topk_margin out"
            )
        if self.cache and not self.block_length:
            raise ValueError("a cache works block by block: set block_length")
        if self.fast_dllm and not self.cache:
            raise ValueError("Fast-dLLM's windows need blocks and a cache: prefix or dual")
        if self.alg in ("origin", "p2") and (
            self.block_length or self.bound or self.schedule == "even"
        ):
            raise ValueError(
                f"{self.alg} has no blocks, no threshold and no entropy bound, and a schedule of its own"
            )

    @property
    def bound(self):
        """The threshold or the entropy bound, by which a step fills any number of positions; 0: the
        schedule does.
        """
        return self.threshold or self.entropy_bound


# ---- what a block is filled with -----------------------------------------------------------------------------------


class Record(typing.NamedTuple):
    """How the positions that were masked at the start were filled: enough to replay it, step by
    step.
    """

    step_BL: jax.Array  # the step that filled it; -1 elsewhere
    # what was drawn, also where the end of a text has replaced it; MASK where nothing was drawn
    token_BL: jax.Array
    logp_BL: jax.Array  # its log p before top-p and top-k; 0 where nothing was drawn
    # with Sampling.likeliest: the likeliest ids then and their log p, [B, L, N] each
    likely: tuple = ()


class State(typing.NamedTuple):
    """What a denoising step changes: an array of rows each, but for the two counters."""

    token_BL: jax.Array
    # steps so far, in all blocks; those in which nothing can be filled cost no forward pass
    step: jax.Array
    forwards: jax.Array  # forward passes of the model
    # with a threshold or bound: positions that the steps so far were allowed to fill and did not
    left_B: jax.Array
    step_B: jax.Array  # steps after which the row was not full yet
    record: Record | None = None  # with Sampling.history

    def of_rows(self, index):
        return jax.tree.map(lambda x: x[index] if x.ndim else x, self)


class Step(typing.NamedTuple):
    """What a front end shows after a denoising step."""

    number: int  # denoising steps so far: when the newest tokens were written
    forwards: int  # forward passes so far
    rows: list  # the ids of each text, without padding
    # the model's probability of each id when it was written; 1 for those given and for MASK
    probability: list
    stats: dict | None = None  # after the last step: those of `generate`


class Given(typing.NamedTuple):
    """What stays as it is while a block is filled. Arrays, so that another value needs no other
    program.
    """

    see_BL: jax.Array  # False at padding
    made_BL: jax.Array  # masked at the start
    offset_BL: jax.Array  # slots counted from the row's first token
    key_B: jax.Array  # the data of a random key for each row
    # threshold or bound, no blocks: positions that step i adds to those that may be filled
    budget_BS: jax.Array
    # else: the share of the masked positions that step i fills; origin: its chance
    share_S: jax.Array
    banned_V: jax.Array  # ids that are never drawn
    bound: float  # the threshold, or the entropy bound
    eos_penalty: float
    steps: int  # a block ends after this many steps, whatever is still masked
    size: int  # slots of the block
    first: int = 0  # first slot of the block
    start: int = 0  # first slot of the window that a cached step feeds
    begun: int | jax.Array = 0  # State.step at which the block began
    # (temperature or 1, top_p, False for the argmax) of each row, [B, 1, 1] each; () is the rule's
    filters: tuple = ()

    def of_rows(self, index):
        names = "see_BL", "made_BL", "offset_BL", "key_B", "budget_BS"
        return self._replace(**{name: getattr(self, name)[index] for name in names})


# ---- one denoising step --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sampler:
    """What a compiled program is made for. watch(state) is traced and runs after every step; it
    changes nothing.
    """

    graph: typing.Any  # model_dream.graph_of: the model without its parameters
    cfg: DreamConfig
    rule: Sampling
    watch: typing.Callable | None = None

    def open_positions(self, state, given):
        """The masked positions of the block [B, L]."""
        slot_L = jnp.arange(state.token_BL.shape[1])
        block_L = (slot_L >= given.first) & (slot_L < given.first + given.size)
        return (state.token_BL == self.cfg.mask_id) & given.see_BL & block_L

    def uniform(self, given, tag, state, offset_BC, shape=()):
        """Uniform numbers in (0, 1) [B, C, *shape], a function of row, its step and offset alone:
        not of the batch.
        """

        def draw(key, step, offset):
            key = jax.random.fold_in(jax.random.wrap_key_data(key), tag)
            key = jax.random.fold_in(jax.random.fold_in(key, step), offset)
            return jax.random.uniform(key, shape, minval=jnp.finfo(jnp.float32).tiny)

        return jax.vmap(jax.vmap(draw, (None, None, 0)))(given.key_B, state.step_B, offset_BC)

    def propose(self, model, hidden_BWD, start, state, given, slot_BC):
        """A token for each of these slots and its confidence, and for a Record its log p and the
        likeliest tokens: (token_BC, score_BC, logp_BC, likely).

        hidden_BWD are the hidden states of slots start .. start + W - 1.
        """
        rule, row_B1 = self.rule, jnp.arange(len(slot_BC))[:, None]
        # With cfg.shift the token at p comes from the state at p - 1, or from its own where that is
        # padding or outside the window.
        shifted_BC = (
            self.cfg.shift & (slot_BC > 0) & given.see_BL[row_B1, jnp.maximum(slot_BC - 1, 0)]
        )
        source_BC = jnp.clip(slot_BC - shifted_BC - start, 0, hidden_BWD.shape[1] - 1)
        logits_BCV = model.logits(jnp.take_along_axis(hidden_BWD, source_BC[..., None], 1))
        logits_BCV = jnp.where(given.banned_V, -jnp.inf, logits_BCV)
        if rule.eos_penalty:  # large while little of the text is filled, 0 once all of it is
            masked_BL = (state.token_BL == self.cfg.mask_id) & given.see_BL
            left_B = masked_BL.sum(-1) / jnp.maximum(1, given.made_BL.sum(-1))
            penalty_B11 = given.eos_penalty * -jnp.log(1 - left_B + 1e-3)[:, None, None]
            logits_BCV -= penalty_B11 * jnp.isin(
                jnp.arange(self.cfg.vocab), jnp.array(rule.eos_ids, jnp.int32)
            )

        # Draw a token from what temperature, top-k and top-p leave.
        temperature, top_p, draws = given.filters or (
            rule.temperature,
            rule.top_p,
            bool(rule.temperature),
        )
        filters, width = (
            (temperature, rule.top_k, top_p),
            1 if model.compute.platform == "cpu" else 3,
        )
        filtered_BCV, u_BCV = (
            diffusion.filter_logits(logits_BCV, *filters, rule="dream", width=width),
            None,
        )
        if given.filters or draws:
            u_BCV = self.uniform(
                given, 0, state, given.offset_BL[row_B1, slot_BC], logits_BCV.shape[-1:]
            )
            u_BCV = jnp.where(draws, u_BCV, jnp.exp(-1.0))  # the same for all tokens: the argmax
        token_BC = diffusion.sample_tokens(filtered_BCV, u_BCV, 0 if u_BCV is None else 1.0).astype(
            jnp.int32
        )

        # Confidence. A threshold or bound is compared with the model's own distribution, as filters
        # raise every
        # probability: 0.61 of two tokens becomes 0.90 at temperature 0.2. Dream's orders are
        # defined after the filters.
        judged_BCV = logits_BCV if rule.bound and not rule.filtered else filtered_BCV
        if rule.late_eos in ("confidence", "both"):  # LLaDA's confidence_eos_eot_inf
            judged_BCV = diffusion.ban(judged_BCV, rule.eos_ids)
        prob_BCV = diffusion.softmax(judged_BCV)
        by_probability = rule.alg in ("maskgit_plus", "p2")
        if by_probability and rule.score == "drawn":
            score_BC = jnp.take_along_axis(prob_BCV, token_BC[..., None], -1)[..., 0]
        elif by_probability:  # the choice of positions does not depend on what is drawn
            score_BC = prob_BCV.max(-1)
        elif rule.alg == "origin":
            score_BC = jnp.zeros(token_BC.shape)
        else:
            score_BC = diffusion.confidence(
                prob_BCV, "margin" if rule.alg == "topk_margin" else "entropy"
            )
        # the lowest, also where the filters leave nothing but EOS
        if rule.late_eos in ("confidence", "both"):
            score_BC = jnp.where(
                jnp.isin(token_BC, jnp.array(rule.eos_ids, jnp.int32)), -1e9, score_BC
            )

        logp_BC = None
        if state.record:
            logp_BCV = diffusion.log_softmax(logits_BCV)
            logp_BC = jnp.take_along_axis(logp_BCV, token_BC[..., None], -1)[..., 0]
        likely = (
            jax.lax.top_k(logp_BCV, rule.likeliest)[::-1] if rule.likeliest and state.record else ()
        )
        return token_BC, score_BC, logp_BC, tuple(likely)

    def forward(self, model, state, given, cache, wanted_BL, most_B, width):
        """One forward pass and what it writes: (state, the keys and values that the pass leaves).

        Without a cache the pass is over the canvas; with one over `width` slots from given.start
        on.
        """
        rule, (B, L), row_B1 = self.rule, wanted_BL.shape, jnp.arange(len(wanted_BL))[:, None]
        if cache is None:
            start = 0
            hidden_BWD, cache = model.hidden(state.token_BL, see_BM=given.see_BL)
            if rule.guidance:  # of hidden states, as logits are linear in them
                masked_BL = jnp.where(given.made_BL, state.token_BL, self.cfg.mask_id)
                without_BWD, _ = model.hidden(masked_BL, see_BM=given.see_BL)
                hidden_BWD = without_BWD + (rule.guidance + 1) * (hidden_BWD - without_BWD)
        else:
            start = given.start
            window_BW = jax.lax.dynamic_slice_in_dim(state.token_BL, start, width, 1)
            hidden_BWD, cache = model.hidden(window_BW, None, given.see_BL, cache, start)

        # The head is the widest matrix, so it runs for the wanted positions alone, C of each row at
        # a time. slot_BL holds these from the left, then L, which is dropped.
        C = min(
            model.compute.head_positions or (16 if model.compute.platform == "cpu" else 64),
            rule.block_length or L,
            L,
        )
        order_BL = jnp.where(wanted_BL, jnp.cumsum(wanted_BL, -1) - 1, L + C)
        slot_BL = jnp.full((B, L + -L % C), L).at[row_B1, order_BL].set(jnp.arange(L), mode="drop")

        def propose_chunk(c, proposal):
            slot_BC = jax.lax.dynamic_slice(slot_BL, (0, c * C), (B, C))
            new = self.propose(model, hidden_BWD, start, state, given, jnp.minimum(slot_BC, L - 1))
            return jax.tree.map(
                lambda x_BL, x_BC: x_BL.at[row_B1, slot_BC].set(x_BC, mode="drop"), proposal, new
            )

        proposal = (
            state.token_BL,
            jnp.full((B, L), -jnp.inf),
            *(state.record[2:] if state.record else (None, ())),
        )
        chunks = (jnp.max(wanted_BL.sum(-1)) + C - 1) // C
        new_BL, score_BL, logp_BL, likely = jax.lax.fori_loop(0, chunks, propose_chunk, proposal)

        # Choose: with a threshold or bound the positions that meet it, one at least; else those of
        # highest confidence.
        count_B = most_B
        if rule.entropy_bound:
            accepted_BL = diffusion.entropy_bound(-score_BL, wanted_BL, given.bound)
        elif rule.threshold:
            accepted_BL = wanted_BL & (score_BL >= given.bound)
        if rule.bound:
            count_B = jnp.minimum(most_B, jnp.maximum(1, accepted_BL.sum(-1)))
        elif (
            rule.alg_temp
        ):  # Gumbel's k largest are k draws without replacement from softmax(score / alg_temp)
            u_BL = self.uniform(given, 1, state, given.offset_BL)
            score_BL = score_BL / rule.alg_temp - jnp.log(-jnp.log(u_BL))
        chosen_BL = diffusion.surest(score_BL, wanted_BL, count_B)

        old_BL = state.token_BL
        # a position that is chosen again keeps its token, the others become MASK again
        if rule.alg == "p2":
            new_BL = jnp.where(old_BL == self.cfg.mask_id, new_BL, old_BL)
            old_BL = jnp.where(wanted_BL, self.cfg.mask_id, old_BL)
        token_BL = jnp.where(chosen_BL, new_BL, old_BL)
        if state.record:
            # a MASK that is proposed writes nothing
            written_BL, record = token_BL != state.token_BL, state.record
            drawn_BL = jnp.where(written_BL, token_BL, record.token_BL)
            logp_BL = jnp.where(written_BL, logp_BL, record.logp_BL)
            likely = jax.tree.map(
                lambda new, old: jnp.where(written_BL[..., None], new, old), likely, record.likely
            )
            state = state._replace(record=Record(record.step_BL, drawn_BL, logp_BL, likely))
        state = state._replace(
            token_BL=token_BL, forwards=state.forwards + 1, left_B=most_B - chosen_BL.sum(-1)
        )
        return state, cache if rule.cache else None

    def step(self, model, state, given, cache, width, opening=False):
        """A denoising step: (state, keys and values). opening is the first step of a block with a
        cache.
        """
        rule, i = self.rule, state.step - given.begun  # step i of this block
        # The positions that this step may fill, and at most how many of each row.
        wanted_BL = self.open_positions(state, given)
        first_alone = opening and rule.fast_dllm and self.cfg.shift
        if first_alone:
            wanted_BL &= jnp.arange(wanted_BL.shape[1]) == given.first
        if rule.alg == "p2":
            # a row that is full stays as it is
            wanted_BL = given.made_BL & wanted_BL.any(-1, keepdims=True)
        elif rule.alg == "origin":  # fills each position by chance, whatever the model's confidence
            wanted_BL &= self.uniform(given, 2, state, given.offset_BL) < given.share_S[i]
        most_B = count_B = wanted_BL.sum(-1)
        if rule.bound and not rule.block_length:
            new_B = given.budget_BS.at[:, i].get(mode="fill", fill_value=0)
            most_B = jnp.minimum(new_B + state.left_B, count_B)
        elif rule.schedule == "even" and not rule.bound:
            most_B = -(-count_B // (given.steps - i))
        elif rule.alg == "p2":
            most_B = count_B - jnp.floor(count_B * given.share_S[i]).astype(jnp.int32)
        elif not (rule.bound or rule.alg == "origin" or first_alone):
            most_B = jnp.floor(count_B * given.share_S[i]).astype(jnp.int32)

        def forward(state, cache):
            return self.forward(model, state, given, cache, wanted_BL, most_B, width)

        if opening:
            state, cache = forward(state, cache)
        else:  # without a pass where the schedule rounds to 0 positions in all rows
            state, cache = jax.lax.cond(
                jnp.any(most_B > 0), forward, lambda *same: same, state, cache
            )
        state = settle(state, given, self.cfg.mask_id, self.rule.eos_ids)
        if self.watch:
            self.watch(state)
        open_B = self.open_positions(state, given).any(-1)
        return state._replace(step=state.step + 1, step_B=state.step_B + open_B), cache


def settle(state, given, mask_id, eos_ids):
    """The state after a step: texts that have ended are filled with eos_ids[0], and the record has
    its number.

    An end token ends its row if nothing is masked before it, and no text that was given comes after
    it.
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
        step_BL = jnp.where(masked_BL, -1, record.step_BL)  # p2 masks again
        record = record._replace(step_BL=jnp.where(filled_BL, state.step, step_BL))
    return state._replace(token_BL=token_BL, record=record)


@functools.partial(jax.jit, static_argnames=("sampler", "width"))
def fill_block(params, state, given, *, sampler, width=0):
    """Fill a block, in one loop on the device: a State. The block is the whole canvas if
    block_length is 0.

    params is the tree of parameters, state a State, given a Given. `lower` takes their
    ShapeDtypeStructs. With a cache the first step is a pass over the canvas and keeps its keys and
    values, [B, J, L, K] of each layer; the others feed `width` slots from given.start on and update
    those of these slots.
    """
    model, cache = nnx.merge(sampler.graph, params), None
    if sampler.rule.cache:
        state, cache = sampler.step(model, state, given, cache, width, opening=True)

    def unfinished(carry):
        state, _ = carry
        return (state.step - given.begun < given.steps) & jnp.any(
            sampler.open_positions(state, given)
        )

    def step(carry):
        state, cache = carry
        return sampler.step(model, state, given, cache, width)

    state, _ = jax.lax.while_loop(unfinished, step, (state, cache))
    # on all hosts, which could not read what lies on another one's devices
    return jax.tree.map(shard, state)


@functools.partial(
    jax.jit, static_argnames=("sampler", "width", "opening"), donate_argnames=("cache",)
)
def one_step(params, state, given, cache, *, sampler, width, opening):
    """A single step of `fill_block`: (State, keys and values)."""
    model = nnx.merge(sampler.graph, params)
    state, cache = sampler.step(model, state, given, cache, width, opening)
    return jax.tree.map(shard, state), split(cache)


# ---- a canvas ------------------------------------------------------------------------------------------------------


def layout(rule, masked_BL):
    """(blocks, slots of each, steps of each). Blocks cover the columns that hold a MASK.

    A block is (its first slot, first slot of the window that its cached steps feed, width of this
    window). The slot before a block gives the logits of its first token. With cache="prefix" all
    windows have one width, from before the first block to the end, so that one program fills all
    blocks. Fast-dLLM's windows shrink from block to block; its keys are less fresh.
    """
    L, size = masked_BL.shape[1], rule.block_length
    if not size:  # the canvas is one block
        most = max(1, int(masked_BL.sum(-1).max()))
        return [(0, 0, L)], L, rule.steps or (1 if rule.bound else most)
    columns = np.flatnonzero(masked_BL.any(0)).tolist()
    if not columns:
        return [], size, 1
    begin, end = columns[0], columns[-1] + 1
    span = end - begin
    if span % size and rule.fast_dllm:
        raise ValueError(
            f"block_length {size} does not divide the {span} tokens to fill; try {math.gcd(span, size)}"
        )
    count = math.ceil(span / size)
    if rule.steps % count:
        nearest = math.ceil(rule.steps / count) * count
        raise ValueError(f"{rule.steps} steps do not divide over {count} blocks; try {nearest}")
    # Where blocks do not fill the canvas evenly, the last one overlaps the one before, which is
    # full by then.
    firsts = [max(0, min(begin + i * size, L - size)) for i in range(count)]
    slots = math.ceil((L - firsts[0]) / 32) * 32 if rule.cache == "prefix" else size
    width = min(slots + 1, L) if rule.cache else L
    blocks = [(first, min(max(first - 1, 0), L - width), width) for first in firsts]
    if rule.fast_dllm:
        blocks = [(first, first, L - first if rule.cache == "prefix" else size) for first in firsts]
    return blocks, size, rule.steps // count or size


@jax.jit
def folded_in(key, row_B):
    return jax.random.key_data(jax.vmap(jax.random.fold_in, (None, 0))(key, row_B))


def keys_of_rows(key, rows):
    """The data of a random key for each row, [rows, 2]: of one key, or of one for each row, as keys
    or their data.
    """
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if key.ndim == (0 if typed else 1):
        return folded_in(key, np.arange(rows))
    return jax.random.key_data(key) if typed else key


def prepare(cfg, rule, token_BL, see_BL, key=None):
    """(State, Given, blocks of `layout`) before anything is filled; NumPy arrays but for the
    keys.
    """
    B, L = token_BL.shape
    made_BL = (token_BL == cfg.mask_id) & see_BL
    blocks, size, steps = layout(rule, made_BL)

    # The schedule. Its arrays have an entry for each slot at least: a program for all numbers of
    # steps up to that.
    entries = 1 << max(5, (max(steps, L) - 1).bit_length())
    budget_BS, share_S = np.zeros((B, 0), np.int32), np.zeros(entries, np.float32)
    # a step may fill all positions; it fills one at least, as does the first
    if rule.bound and rule.block_length:
        steps = size + 1
    elif (
        rule.bound
    ):  # the steps share the masks evenly; each one beyond them fills at least one that is left
        count_B = made_BL.sum(-1)
        budget_BS = np.zeros((B, entries), np.int32)
        budget_BS[:, :steps] = diffusion.step_counts(count_B, steps, "even").T
        steps += int(count_B.max())
    elif rule.alg == "p2":  # a step leaves this share of all that was masked at the start
        share_S[:steps] = 1 - np.arange(1, steps + 1) / steps
    else:  # Dream's schedule, origin's by chance: a step fills the share 1 - s / t, the last all
        share_S[:steps] = diffusion.dream_shares(steps, rule.eps)
        # the first step of a block fills only one token
        if rule.fast_dllm and cfg.shift and steps == 1:
            share_S[1], steps = 1, 2

    banned = (cfg.mask_id, cfg.expand_id) if rule.ban_ids is None else rule.ban_ids
    banned += (cfg.eos_id,) if rule.late_eos in ("logits", "both") else ()  # LLaDA's logits_eos_inf
    id_V = np.arange(cfg.vocab)
    given = Given(
        see_BL=see_BL,
        made_BL=made_BL,
        offset_BL=np.maximum(np.arange(L) - see_BL.argmax(-1)[:, None], 0),
        key_B=keys_of_rows(jax.random.key(0) if key is None else key, B),
        budget_BS=budget_BS,
        share_S=share_S,
        banned_V=np.isin(id_V, banned) | (id_V >= (rule.vocab or cfg.vocab)),
        bound=rule.bound,
        eos_penalty=rule.eos_penalty,
        steps=steps,
        size=size,
    )
    record = None
    if rule.history:
        likely = tuple(
            np.zeros((B, L, rule.likeliest), dtype)
            for dtype in (np.int32, np.float32)
            if rule.likeliest
        )
        record = Record(
            np.full((B, L), -1, np.int32),
            token_BL.astype(np.int32),
            np.zeros((B, L), np.float32),
            likely,
        )
    zero, left_B, step_B = np.int32(0), np.zeros(B, np.int32), np.zeros(B, np.int32)
    return State(token_BL.astype(np.int32), zero, zero, left_B, step_B, record), given, blocks


def sampler_of(graph, cfg, rule, watch=None):
    """The Sampler of a rule, without the values that `Given` holds: changing these compiles no new
    program.
    """
    # of these it only matters whether they are set
    is_set = {
        name: float(bool(getattr(rule, name)))
        for name in ("threshold", "entropy_bound", "eos_penalty")
    }
    order = "entropy" if rule.entropy_bound else "maskgit_plus" if rule.threshold else rule.alg
    rule = dataclasses.replace(rule, alg=order, steps=0, eps=0.5, ban_ids=(), vocab=0, **is_set)
    return Sampler(graph, cfg, rule, watch)


def check(cfg, rule, slots):
    if cfg.block_length:
        raise ValueError(
            f"the model was trained in blocks of {cfg.block_length}: sample_block.py fills these"
        )
    if rule.sub_block:
        raise ValueError("sub_block is for a model that was trained in blocks; leave it out")
    if slots > cfg.positions:
        raise ValueError(
            f"{slots} tokens do not fit: the model reaches {cfg.positions} positions; lower max_new"
        )


def fill(model, token_BL, see_BL=None, rule=None, key=None, watch=None, rows=0):
    """Fill every MASK of a canvas: (token_BL, {"forwards", "steps", "windows", "passes"}), with
    rule.history also "record", a Record, and its "when" and "probability". All arrays are NumPy's.

    see_BL is False at padding, which stays as it is; so does every token that is not MASK. A step
    that cannot change anything costs no forward pass. "windows" are the slots fed in each pass,
    "passes" [B] those until a row was full. "when" [B, L] is the step that wrote a token, from 1
    on, 0 for those given, "probability" its probability then. A model that predicts MASK leaves it,
    where ban_ids allows that.

    key is one for all rows, or [B] one for each; None is jax.random.key(0). `rows` of them are
    filled at a time, 0: all; block by block a row whose text has ended makes room for another. With
    a record or `watch` all go together, as steps are counted once. Blocks, and the default number
    of steps, follow from the columns that are masked in any row.

    Raises ValueError for a canvas that does not fit the model, or steps that do not divide over the
    blocks.
    """
    cfg, rule, token_BL = model.cfg, rule or Sampling(), np.asarray(token_BL)
    B, L = token_BL.shape
    check(cfg, rule, L)
    see_BL = np.broadcast_to(True if see_BL is None else np.asarray(see_BL) != 0, (B, L))
    state, given, blocks = prepare(cfg, rule, token_BL, see_BL, key)
    graph, params = nnx.split(model)
    sampler = sampler_of(graph, cfg, rule, watch)

    together = not rows or watch or state.record
    rows, windows, passes_B = B if together else rows, [], np.zeros(B, int)
    for first, start, width in blocks:
        masked_BL = (state.token_BL == cfg.mask_id) & see_BL
        open_B = masked_BL[:, first : first + given.size].any(-1)
        waiting = np.arange(B) if together and open_B.any() else np.flatnonzero(open_B)
        for i in range(0, len(waiting), rows):
            chosen = waiting[i : i + rows]
            index = np.resize(chosen, rows)  # the last batch is filled up with rows that come again
            block = given._replace(first=first, start=start, begun=state.step).of_rows(index)
            new = fill_block(
                params, beside(params, state.of_rows(index)), block, sampler=sampler, width=width
            )
            new = jax.tree.map(np.asarray, new)
            passes, own_B = (
                int(new.forwards - state.forwards),
                (new.step_B - state.step_B[index] + 1) * open_B[index],
            )
            for all_rows, new_rows in zip(
                jax.tree.leaves(state), jax.tree.leaves(new), strict=True
            ):
                if new_rows.ndim:
                    all_rows[chosen] = new_rows[: len(chosen)]
            state = state._replace(step=new.step, forwards=new.forwards)
            passes_B[chosen] += np.minimum(passes, own_B)[: len(chosen)]
            # the first pass of a block with a cache is over the canvas
            windows += [L] + [width] * (passes - 1)

    return state.token_BL, stats_of(state, windows, passes_B)


def beside(params, state):
    """The state on the parameters' device, or on their mesh. Else the first block, whose state
    comes from the host, and the others, whose states come from a device, would be two programs.
    """
    at = jax.tree.leaves(params)[0].sharding
    if isinstance(at, jax.NamedSharding):
        at = jax.tree.map(
            lambda x, m=at.mesh: jax.NamedSharding(m, fit(cache_spec(x), np.shape(x), m)), state
        )
    return jax.device_put(state, at)


def cache_spec(x):
    """Keys and values are split by rows and heads, PythonCoder's keys with an axis between; nothing
    else is split.
    """
    return {4: PS(BATCH, "tensor"), 5: PS(BATCH, None, "tensor")}.get(np.ndim(x), PS())


def split(state):  # keys and values over the mesh, all else whole to every device
    return jax.tree.map(lambda x: shard(x, *cache_spec(x)), state)


# ---- texts ---------------------------------------------------------------------------------------------------------


def canvas_width(length, positions):
    """Slots of a canvas for texts of this length: a multiple of 32, beyond 512 of an eighth of a
    power of two.
    """
    step = max(32, 1 << (length - 1).bit_length() >> 4)
    return max(length, min(math.ceil(length / step) * step, positions))


def widths(lengths, size, positions, most=3):
    """At most `most` canvas widths for texts of these lengths, `size` at a time, with the least
    padding.

    Each is a compiled program of its own, which at 7B takes longer to compile than padding costs.
    """
    batches = (lengths[i : i + size] for i in range(0, len(lengths), size))
    needed = collections.Counter(canvas_width(max(batch), positions) for batch in batches)
    *narrower, widest = sorted(needed)

    def slots(choice):
        return sum(
            n * min(width for width in choice if width >= need) for need, n in needed.items()
        )

    choices = itertools.combinations(narrower, min(most - 1, len(narrower)))
    return min(((*choice, widest) for choice in choices), key=slots)


def canvas(prompts, max_new, cfg, width=0):
    """Prompts (lists of ids, any lengths, MASK allowed) and max_new MASKs after each, left-padded:
    (token_BL, see_BL).

    It is `width` slots wide, or as canvas_width says: so that few shapes are ever compiled.
    """
    longest = max(map(len, prompts)) + max_new
    if longest == 0:
        raise ValueError("nothing to fill: give a prompt or max_new")
    L = max(longest, width) if width else canvas_width(longest, cfg.positions)
    token_BL = np.full((len(prompts), L), cfg.pad_id, np.int32)
    see_BL = np.zeros(token_BL.shape, bool)
    for row, see, prompt in zip(token_BL, see_BL, prompts, strict=True):
        row[L - max_new :] = cfg.mask_id
        row[L - max_new - len(prompt) : L - max_new] = prompt
        see[L - max_new - len(prompt) :] = True
    return token_BL, see_BL


def generate(model, prompts, max_new, rule=None, key=None, widths=(), rows=0, watch=None):
    """Continue prompts with max_new tokens each and fill their MASKs, max_new 0 does only that:
    (rows of ids, stats).

    A row is prompt and completion without padding. `rows` of them are filled at a time, those of
    about one length together, in canvases of these widths: with the same widths and rows other
    prompts need no other program. Stats are those of `fill`, added up. Raises ValueError for what
    does not fit; see `fill`.
    """
    whole = watch or (rule and rule.history)  # one batch, as in `fill`
    lengths, size = (
        [len(prompt) + max_new for prompt in prompts],
        (not whole and rows) or max(1, len(prompts)),
    )
    order = (
        sorted(range(len(prompts)), key=lengths.__getitem__)
        if len(prompts) > size
        else range(len(prompts))
    )
    of_width = collections.defaultdict(list)
    for i in range(0, len(order), size):
        longest = max(lengths[n] for n in order[i : i + size])
        of_width[next((width for width in widths if width >= longest), 0)] += order[i : i + size]

    key_B = np.asarray(keys_of_rows(jax.random.key(0) if key is None else key, len(prompts)))
    texts, stats, passes_B = [None] * len(prompts), {}, np.zeros(len(prompts), int)
    total = {"forwards": 0, "steps": 0, "windows": []}
    for width, numbers in of_width.items():
        token_BL, see_BL = canvas([prompts[n] for n in numbers], max_new, model.cfg, width)
        token_BL, stats = fill(model, token_BL, see_BL, rule, key_B[np.array(numbers)], watch, rows)
        total = {name: value + stats[name] for name, value in total.items()}
        passes_B[numbers] = stats["passes"]
        for n, row, see in zip(numbers, token_BL, see_BL, strict=True):
            texts[n] = row[see].tolist()
    return texts, stats | total | {"passes": passes_B}


def steps(model, prompts, max_new, rule=None, key=None, widths=()):
    """Generate as `generate` does, in one batch, and yield a Step after each forward pass.

    The last state comes once more, with the stats of `generate`.
    """
    cfg, rule = model.cfg, dataclasses.replace(rule or Sampling(), history=True)
    longest = max(map(len, prompts)) + max_new
    width = next((width for width in widths if width >= longest), 0)
    token_BL, see_BL = canvas(prompts, max_new, cfg, width)
    check(cfg, rule, token_BL.shape[1])
    state, given, blocks = prepare(cfg, rule, token_BL, see_BL, key)
    graph, params = nnx.split(model)
    sampler = sampler_of(graph, cfg, rule)
    state = jax.tree.map(np.asarray, state)
    windows, passes_B = [], np.zeros(len(prompts), int)
    for first, start, width in blocks:
        columns = slice(first, first + given.size)
        open_B = ((state.token_BL == cfg.mask_id) & see_BL)[:, columns].any(-1)
        waiting_B, before, cache = open_B, state, None
        block = given._replace(first=first, start=start, begun=state.step)
        while waiting_B.any() and state.step - before.step < given.steps:
            opening = bool(rule.cache) and cache is None
            forwards = int(state.forwards)
            state, cache = one_step(
                params,
                beside(params, state),
                block,
                cache,
                sampler=sampler,
                width=width,
                opening=opening,
            )
            state = jax.tree.map(np.asarray, state)
            waiting_B = ((state.token_BL == cfg.mask_id) & see_BL)[:, columns].any(-1)
            if state.forwards > forwards:
                windows.append(token_BL.shape[1] if opening else width)
                yield step_of(state, see_BL)
        passes_B += row_passes(before, state, open_B)
    yield step_of(state, see_BL)._replace(stats=stats_of(state, windows, passes_B))


def step_of(state, see_BL):
    """The Step of a state whose arrays are NumPy's."""
    rows, probability = [], []
    for token_L, logp_L, see_L in zip(state.token_BL, state.record.logp_BL, see_BL, strict=True):
        rows.append(token_L[see_L].tolist())
        probability.append(np.exp(logp_L[see_L]).tolist())
    return Step(int(state.step), int(state.forwards), rows, probability)


def row_passes(old, new, open_B):
    """Forward passes [B] until each row of a block was full, of the states around it."""
    return np.minimum(new.forwards - old.forwards, (new.step_B - old.step_B + 1) * open_B)


def stats_of(state, windows, passes_B):
    """The stats of `generate`."""
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
    return stats


# ---- files of a Dream's folder -------------------------------------------------------------------------------------


def load_tokenizer(folder, cfg):
    """The tokenizer in a folder. ValueError if it does not fit the model: too many tokens, MASK or
    EOS a plain word.
    """
    tokenizer = runs.read_tokenizer(folder, cfg.vocab)
    added = tokenizer.get_added_tokens_decoder()
    for name in ("mask_id", "eos_id"):
        i = getattr(cfg, name)
        token, is_special = tokenizer.id_to_token(i), i in added and added[i].special
        # MASK may have no name; the end token needs one
        if not is_special and (token or name == "eos_id"):
            raise ValueError(
                f"the tokenizer of {folder} does not fit: {i}, the model's {name}, is {token!r} in it"
            )
    return tokenizer


def named(adapters, family="dream"):
    """{name in peft's adapter_model.safetensors: array} of LoRA adapters of a family, in the order
    of their leaves.
    """
    arrays, top = {}, "encoder" if family == "nemotron" else "model"
    own = {"o_proj": "attn_out", "gate_proj": "ff_proj", "down_proj": "ff_out"}  # LLaDA's
    for path, x in jax.tree_util.tree_leaves_with_path(adapters):
        _, layer, matrix, part = (key.key for key in path)
        module = f"{top}.layers.{layer}.{'self_attn' if matrix in MATRICES[:4] else 'mlp'}.{matrix}"
        if family == "llada":
            module = f"model.transformer.blocks.{layer}.{own.get(matrix, matrix)}"
        arrays[f"base_model.model.{module}.lora_{part.upper()}.weight"] = x
    return arrays


def save_adapters(folder, adapters, rank, source, family="dream"):
    """Write adapters as peft does for the model `source` of the Hub, by the names of its family."""
    keys, arrays = {"peft_type": "LORA", "base_model_name_or_path": source}, named(adapters, family)
    modules = (
        sorted({name[17:].partition(".lora_")[0] for name in arrays})
        if family == "llada"
        else MATRICES
    )
    # LLaDA's head, too, ends in ff_out
    keys |= {"r": rank, "lora_alpha": rank, "target_modules": modules}
    runs.write(folder / "adapter_config.json", keys)
    runs.write(
        folder / "adapter_model.safetensors", safetensors.flax.save(arrays, {"format": "pt"})
    )


def load_adapters(folder, new):
    """New adapters with the values of those that peft or save_adapters() wrote, which may be of
    fewer matrices.
    """
    folder = runs.as_path(folder)
    keys = runs.read_json(folder / "adapter_config.json", "r", "lora_alpha")
    other = [
        name for name in "use_dora use_rslora alpha_pattern rank_pattern".split() if keys.get(name)
    ]
    # the base, too
    changes = str(keys.get("init_lora_weights")).startswith(("pissa", "olora", "corda", "loftq"))
    if other := other + (["init_lora_weights"] if changes else []):
        raise ValueError(
            f"{folder}: adapters with {' and '.join(other)} are no plain LoRA; merge them with peft"
        )
    try:
        found = safetensors.flax.load_file(folder / "adapter_model.safetensors")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{folder}/adapter_model.safetensors cannot be read: {error}") from None
    arrays = max(
        (named(new, kind) for kind in ("dream", "llada", "nemotron")),
        key=lambda x: len({*x} & {*found}),
    )
    want = {name: x.shape for name, x in arrays.items() if name in found}
    runs.check_tensors({name: x.shape for name, x in found.items()}, want, folder)
    # in both matrices: peft multiplies B A by alpha / r, we do not
    size = math.sqrt(keys["lora_alpha"] / keys["r"])
    arrays |= {name: size * x.astype(jnp.float32) for name, x in found.items()}
    return jax.tree.unflatten(jax.tree.structure(new), arrays.values())
