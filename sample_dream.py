"""Sampling from Dream: a canvas that holds MASKs is filled step by step, as a whole or block by block.

    model, _ = checkpoints.load(model_dream, "out/dream")
    rows, stats = sample_dream.generate(model, [[5, 6, 7]], 256, sample_dream.Sampling(steps=64))

A denoising step feeds the canvas to the model, proposes a token for each masked position, and writes the proposals that
the model is surest of; the rest stays MASK for the next step. With blocks only the masked positions of one block are
looked at until it is full; the whole canvas is one block as wide as itself. With a cache the first step of a block
keeps the keys and values of all slots, and the steps after it feed a window around the block alone.

Letters: B batch, L slots of the canvas, W slots of a window, C positions of one chunk of logits, D width, V vocabulary,
S denoising steps.
Refs: Dream, arXiv:2508.15487; DiffuCoder, arXiv:2506.20639; Fast-dLLM, arXiv:2505.22618.
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
from flax import nnx

import diffusion
from model_dream import PS, DreamConfig, shard

CONFIDENCE = {"maskgit_plus": "max_prob", "topk_margin": "margin", "entropy": "entropy"}


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How masked positions are filled. Another value of most fields is another compiled program."""

    alg: typing.Literal["entropy", "maskgit_plus", "topk_margin", "origin"] = "entropy"  # who is filled first
    steps: int = 0  # denoising steps, all blocks together; 0: by tokens_per_step, one with a threshold or bound
    tokens_per_step: float = 1.0  # used where steps is 0
    eps: float = 1e-3  # end of the time grid
    temperature: float = 0.0  # 0 takes the likeliest token
    top_p: float = 1.0  # a token goes if those before it have more than top_p; 1 keeps all
    top_k: int = 0  # keep the k likeliest tokens; 0 keeps all
    alg_temp: float = 0.0  # temperature of the choice of positions; 0 takes the surest
    threshold: float = 0.0  # fill all tokens to which the model gives this probability, at least one a step; 0: steps
    credit: float = 0.0  # with a threshold: how much more a token counts the longer it is the likeliest, e.g. 0.7
    entropy_bound: float = 0.0  # fill the surest, while the entropies of those before add up to at most this; 0: steps
    filtered: bool = False  # compare the threshold after temperature, top-k and top-p, as Fast-dLLM's code does
    score: typing.Literal["drawn", "distribution"] = "drawn"  # whose probability counts: the drawn token's, the largest
    block_length: int = 0  # fill blocks of this length from left to right; 0: the whole canvas at once
    block_add: float = 0.0  # open the next block once this share of the last one is filled; 0: once it is full
    # fill a block, or canvas, at once when its likeliest tokens stood still for so many steps: an approximation; 0: off
    stable_steps: int = 0
    cache: typing.Literal["", "prefix", "dual"] = ""  # keys and values kept within a block: of the prompt | all around
    refresh: int = 0  # with a threshold or bound: read the canvas into the cache again after so many passes; 0: never
    fast_dllm: bool = False  # Fast-dLLM's windows: a block's first token is filled whatever its probability
    eos_penalty: float = 0.0  # the logits of eos_ids fall by this times -log(filled share of the text + 0.001)
    ban_ids: tuple[int, ...] | None = None  # never drawn; None: MASK
    vocab: int = 0  # ids from here on have no token and are never drawn; 0 allows all rows
    eos_ids: tuple[int, ...] = ()  # each ends a text if nothing before it is MASK; eos_ids[0] fills up what follows
    history: bool = False  # keep the canvas after every step, and how likely each token was when it was written
    record: bool = False  # keep when each token was drawn and with what probability, for training: a Record

    def __post_init__(self):
        negative = [name for name, value in vars(self).items() if isinstance(value, int | float) and value < 0]
        known = self.alg in (*CONFIDENCE, "origin") and self.cache in ("", "prefix", "dual")
        in_range = 0 < self.eps < 1 and 0 < self.top_p <= 1 and self.threshold <= 1
        in_blocks = self.block_length and self.bound and not self.cache
        wrong = {
            f"{', '.join(negative)} is below 0": negative,
            f"alg {self.alg!r} or cache {self.cache!r} is not one of those that exist": not known,
            "eps, top_p and threshold lie in (0, 1), (0, 1] and [0, 1]": not in_range,
            "tokens_per_step is 0": self.tokens_per_step == 0,
            "a cache works block by block: set block_length": self.cache and not self.block_length,
            "Fast-dLLM's windows need blocks and a cache: prefix or dual": self.fast_dllm and not self.cache,
            "refresh needs a cache and a threshold or an entropy bound, and not Fast-dLLM's windows": (
                self.refresh and (not self.cache or not self.bound or self.fast_dllm)
            ),
            "threshold and entropy_bound do not go together": self.threshold and self.entropy_bound,
            "credit needs a threshold": self.credit and not self.threshold,
            "block_add is a share, 1 at most": self.block_add > 1,
            "block_add needs block_length and a threshold or an entropy bound, and no cache: that would hold keys of"
            " blocks that are not full": self.block_add and not in_blocks,
            "origin has no blocks, no threshold, no entropy bound and no stable_steps": (
                self.alg == "origin" and (self.block_length or self.bound or self.stable_steps)
            ),
        }
        if any(wrong.values()):
            raise ValueError("; ".join(message for message, is_wrong in wrong.items() if is_wrong))

    @property
    def bound(self):
        """What says how many are filled in a step, the threshold or the entropy bound; 0: the schedule does."""
        return self.threshold or self.entropy_bound


# ---- one denoising step --------------------------------------------------------------------------------------------


class Record(typing.NamedTuple):
    """How the positions that were masked at the start were filled: enough to replay it, step by step."""

    step_BL: jax.Array  # the step that filled it; -1 elsewhere
    token_BL: jax.Array  # what was drawn, also where the end of a text has replaced it; MASK where nothing was drawn
    logp_BL: jax.Array  # log p of that before top-p and top-k, and after the temperature; 0 where nothing was drawn


class State(typing.NamedTuple):
    """What a denoising step changes."""

    token_BL: jax.Array
    step: jax.Array  # steps done, in all blocks
    forwards: jax.Array  # passes of the model
    idle: jax.Array  # steps that could not change anything and cost no pass
    left_B: jax.Array  # with a threshold or bound: positions that the steps so far were allowed to fill and did not
    step_B: jax.Array  # steps after which the row was not full yet
    history_SBL: jax.Array | None = None
    record: Record | None = None  # with a history too; its log p is then what the model says, before the temperature
    # with stable_steps or credit: the likeliest tokens of the last pass, -1 where there was none, since how many all of
    # them stand, and what each has as credit
    best_BL: jax.Array | None = None
    still_B: jax.Array | None = None
    credit_BL: jax.Array | None = None

    @property
    def prob_BL(self):
        """With a history: what the model gave to each token that was written, else 1."""
        return jnp.exp(self.record.logp_BL)


class Given(typing.NamedTuple):
    """What stays as it is while a block is filled. Arrays, so that another value needs no other program."""

    see_BL: jax.Array  # False at padding
    made_BL: jax.Array  # masked at the start
    place_BL: jax.Array  # slots counted from the row's first token
    banned_V: jax.Array  # ids that are never drawn
    key_B: jax.Array  # a random key for each row
    steps: int  # how many steps the schedule of a block has
    limit: int  # a block is left after so many steps, whatever is masked in it
    budget_SB: jax.Array | None = None  # with a threshold or bound: how many more may be filled from step i on
    share_S: jax.Array | None = None  # without: the part of the masked positions that step i fills; origin: its chance
    u_SBL: jax.Array | None = None  # origin: uniform numbers, if they are not to be drawn
    bound: float = 0.0  # the threshold, or the entropy bound
    eos_penalty: float = 0.0
    first: int = 0  # first slot of the block
    size: int = 0  # slots of the block
    start: int = 0  # first slot of the window that is fed in a cached step
    begun: int | jax.Array = 0  # State.step at which the block began


@dataclasses.dataclass(frozen=True)
class Sampler:
    """What the compiled programs know when they are compiled: model, settings and hooks.

    token_hook(step, token_BL) -> token_BL runs before the first step (step -1) and after every one. logit_hook(step,
    token_BL, slot_BC, logits_BCV) -> logits_BCV gets the logits of C masked positions of each row at a time, already
    shifted: those of the tokens at slot_BC; a slot of L is none. Hooks are traced: jax.numpy only. watch(state) is
    traced too and runs after every step; it changes nothing.
    """

    graph: typing.Any  # model_dream.graph_of: the model without its parameters
    cfg: DreamConfig
    rule: Sampling
    token_hook: typing.Callable | None = None
    logit_hook: typing.Callable | None = None
    watch: typing.Callable | None = None

    def masked(self, token_BL, given):
        return (token_BL == self.cfg.mask_id) & given.see_BL

    def open_positions(self, state, given):
        """The masked positions of the block [B, L]."""
        slot_L = jnp.arange(state.token_BL.shape[1])
        return self.masked(state.token_BL, given) & (slot_L >= given.first) & (slot_L < given.first + given.size)

    def blocks(self, state, given):
        """With block_add: (block of each slot [B, L], counted from the row's first mask, whether that is open).

        A block is open if the share block_add of each one left of it is filled: with 1 block after block, near 0 many
        at once. Ref: d3LLM's multi-block decoding, arXiv:2601.07568, without its cache, which would hold keys of blocks
        that are not full. It accepts tokens by a bound on the entropy of each, where we have threshold or
        entropy_bound, and an EOS ends its text while masks are left before it, where ours wait for these.
        """
        made_BL, L = given.made_BL, state.token_BL.shape[1]
        block_BL = jnp.maximum(jnp.arange(L) - jnp.argmax(made_BL, -1)[:, None], 0) // self.rule.block_length
        count = lambda x_BL: jnp.zeros(x_BL.shape, int).at[jnp.arange(len(x_BL))[:, None], block_BL].add(x_BL)  # noqa: E731
        filled_BL = count(made_BL & ~self.masked(state.token_BL, given))  # of each block
        enough_BL = filled_BL >= self.rule.block_add * count(made_BL)
        before_BL = jnp.cumsum(~enough_BL, -1) - ~enough_BL  # blocks left of it that have too little
        return block_BL, jnp.take_along_axis(before_BL, block_BL, -1) == 0

    def plan(self, state, given, opening=False):
        """(wanted_BL, most_B): the positions that this step may fill, and at most how many of each row."""
        rule, i = self.rule, state.step - given.begun  # step i of this block
        wanted_BL = self.open_positions(state, given)
        # Fast-dLLM's first pass fills the first token alone.
        if opening and rule.fast_dllm:
            wanted_BL &= jnp.arange(wanted_BL.shape[1]) == given.first
            return wanted_BL, wanted_BL.sum(-1)
        # origin: chance decides, for each position alone.
        if rule.alg == "origin":
            drawn = given.u_SBL is None
            u_BL = self.draw(given, 2, state, given.place_BL) if drawn else given.u_SBL[i]
            wanted_BL &= u_BL < given.share_S[i]
            return wanted_BL, wanted_BL.sum(-1)
        if rule.block_add:
            wanted_BL &= self.blocks(state, given)[1]
        # A threshold or a bound: what the schedule allows by now; `forward` says how many of them are sure enough.
        count_B = wanted_BL.sum(-1)
        if rule.bound:
            new_B = given.budget_SB.at[i].get(mode="fill", fill_value=0)
            return wanted_BL, jnp.minimum(new_B + state.left_B, count_B)
        return wanted_BL, jnp.floor(count_B * given.share_S[i]).astype(jnp.int32)

    def draw(self, given, tag, state, place_BC, shape=()):
        """Uniform numbers in (0, 1) [B, C, *shape] of row, its step and place alone, whatever the batch or padding."""

        def uniform(key, step, place):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, tag), step), place)
            return jax.random.uniform(key, shape, minval=jnp.finfo(jnp.float32).tiny)

        of_row = lambda key, step, place_C: jax.vmap(functools.partial(uniform, key, step))(place_C)  # noqa: E731
        return jax.vmap(of_row)(given.key_B, state.step_B, place_BC)

    def propose(self, model, hidden_BWD, start, state, given, wanted_BL):
        """(token_BL, score_BL, logp_BL, best_BL, credit_BL): what would be written at the wanted positions, how sure
        that is, -inf elsewhere, its log p for a Record; with stable_steps or credit the likeliest token and its credit.

        hidden_BWD are those of slots start .. start + W - 1. The head is the widest matrix, so it runs for the wanted
        positions alone, C of each row at a time: those of a block, at most run.head_positions. A position whose left
        neighbour is padding, or not in the window, uses its own logits.
        """
        rule, see_BL = self.rule, given.see_BL
        B, L = wanted_BL.shape
        C = min(model.run.head_positions, rule.block_length or L, L)
        row_B1 = jnp.arange(B)[:, None]
        if rule.eos_penalty:  # ends are unlikely in an empty text, and as the model has them in a full one
            left_B = self.masked(state.token_BL, given).sum(-1) / jnp.maximum(1, given.made_BL.sum(-1))
            penalty_B11 = given.eos_penalty * -jnp.log(1 - left_B + 1e-3)[:, None, None]
            end_V = jnp.isin(jnp.arange(self.cfg.vocab), jnp.array(rule.eos_ids, jnp.int32))
        # Slots of the wanted positions, from the left; L, which is dropped, where a row has no more of them.
        order_BL = jnp.where(wanted_BL, jnp.cumsum(wanted_BL, -1) - 1, L + C)
        slot_BL = jnp.full((B, L + -L % C), L).at[row_B1, order_BL].set(jnp.arange(L), mode="drop")

        def propose_chunk(c, carry):
            token_BL, score_BL, logp_BL, best_BL, credit_BL = carry
            slot_BC = jax.lax.dynamic_slice(slot_BL, (0, c * C), (B, C))
            # The logits of the token at p come from the hidden state at p - 1.
            at_BC = jnp.minimum(slot_BC, L - 1)
            shifted_BC = self.cfg.shift & (at_BC > 0) & see_BL[row_B1, jnp.maximum(at_BC - 1, 0)]
            source_BC = jnp.clip(at_BC - shifted_BC - start, 0, hidden_BWD.shape[1] - 1)
            logits_BCV = model.logits(jnp.take_along_axis(hidden_BWD, source_BC[..., None], 1))
            logits_BCV = jnp.where(given.banned_V, -jnp.inf, logits_BCV)
            if self.logit_hook:
                logits_BCV = self.logit_hook(state.step, state.token_BL, slot_BC, logits_BCV)
            if rule.eos_penalty:
                logits_BCV -= penalty_B11 * end_V
            # Draw a token from what temperature, top-k and top-p leave.
            model_BCV = logits_BCV
            filters, width = (rule.temperature, rule.top_k, rule.top_p), 1 if model.run.on_cpu else 3
            logits_BCV = diffusion.filter_logits(logits_BCV, *filters, rule="dream", width=width)
            u_BCV = None
            if rule.temperature:
                place_BC = given.place_BL[row_B1, at_BC]
                u_BCV = self.draw(given, 0, state, place_BC, logits_BCV.shape[-1:])
            new_BC = diffusion.sample_tokens(logits_BCV, u_BCV, 1.0 if rule.temperature else 0).astype(token_BL.dtype)
            # How sure is it? The token's probability, or a measure of the distribution; origin does not ask. The
            # filters make all tokens look sure, 0.61 of two becomes 0.90 at temperature 0.2: a threshold or a bound is
            # compared with what the model said, Dream's other orders are defined by what the filters left.
            score_BC = jnp.zeros(slot_BC.shape)
            if rule.entropy_bound:
                score_BC = diffusion.confidence(diffusion.softmax(model_BCV), "entropy")
            elif rule.threshold or rule.alg == "maskgit_plus":
                prob_BCV = diffusion.softmax(model_BCV if rule.threshold and not rule.filtered else logits_BCV)
                # by the largest probability, where is written does not depend on what is drawn
                score_BC = jnp.take_along_axis(prob_BCV, new_BC[..., None], -1)[..., 0]
                score_BC = score_BC if rule.score == "drawn" else prob_BCV.max(-1)
            elif rule.alg != "origin":
                score_BC = diffusion.confidence(diffusion.softmax(logits_BCV), CONFIDENCE[rule.alg])
            if best_BL is not None:
                best_BC = jnp.argmax(model_BCV, -1).astype(best_BL.dtype)
                best_BL = best_BL.at[row_B1, slot_BC].set(best_BC, mode="drop")
            if rule.credit:  # CreditDecoding, arXiv:2510.06133, by dInfer's numbers; it keeps all tokens' credits
                top_BC, stood_BC = prob_BCV.max(-1), best_BC == state.best_BL[row_B1, at_BC]
                credit_BC = 0.8 * jnp.where(stood_BC, state.credit_BL[row_B1, at_BC], 0) + top_BC**0.2
                credit_BL = credit_BL.at[row_B1, slot_BC].set(credit_BC, mode="drop")
                more_BC = (1 + credit_BC) ** rule.credit
                is_best_BC = (new_BC == best_BC) | (rule.score == "distribution")
                fused_BC = top_BC / (top_BC + (1 - top_BC) / more_BC)
                score_BC = jnp.where(is_best_BC, fused_BC, score_BC / (1 + top_BC * (more_BC - 1)))
            token_BL = token_BL.at[row_B1, slot_BC].set(new_BC, mode="drop")
            score_BL = score_BL.at[row_B1, slot_BC].set(score_BC, mode="drop")
            if state.record:
                logp_BCV = diffusion.log_softmax(model_BCV / (rule.temperature or 1.0) if rule.record else model_BCV)
                logp_BC = jnp.take_along_axis(logp_BCV, new_BC[..., None], -1)[..., 0]
                logp_BL = logp_BL.at[row_B1, slot_BC].set(logp_BC, mode="drop")
            return token_BL, score_BL, logp_BL, best_BL, credit_BL

        chunks = (jnp.max(wanted_BL.sum(-1)) + C - 1) // C
        logp_BL = state.record and state.record.logp_BL
        carry = state.token_BL, jnp.full((B, L), -jnp.inf), logp_BL, state.best_BL, state.credit_BL
        return jax.lax.fori_loop(0, chunks, propose_chunk, carry)

    def accept(self, score_BL, wanted_BL, state, given):
        """(score_BL, count_B): with a threshold or a bound, how many are sure enough, and the scores in their order."""
        if self.rule.entropy_bound:
            sure_BL = diffusion.entropy_bound(-score_BL, wanted_BL, given.bound)
        else:
            sure_BL = wanted_BL & (score_BL >= given.bound)
        if self.rule.block_add:  # of the leftmost block that has masks one at least, however sure later ones are
            block_BL = jnp.where(wanted_BL, self.blocks(state, given)[0], wanted_BL.shape[1])
            leftmost_BL = wanted_BL & (block_BL == block_BL.min(-1, keepdims=True))
            first_BL = diffusion.surest(score_BL, leftmost_BL, jnp.ones(len(score_BL), int))
            sure_BL, score_BL = sure_BL | first_BL, jnp.where(first_BL, jnp.inf, score_BL)
        return score_BL, jnp.sum(sure_BL, -1)

    def remember(self, state, best_BL, credit_BL, wanted_BL, most_B):
        """The state with the likeliest tokens of a pass, since how many they stand, and their credit.

        A pass in which a row may write nothing, as others wait for it, does not count.
        """
        may_B, moved_B = most_B > 0, jnp.any(wanted_BL & (best_BL != state.best_BL), -1)
        still_B = jnp.where(may_B, jnp.where(moved_B, 0, state.still_B + 1), state.still_B)
        new, old = (best_BL, credit_BL), (state.best_BL, state.credit_BL)
        best_BL, credit_BL = jax.tree.map(functools.partial(jnp.where, may_B[:, None]), new, old)
        return state._replace(best_BL=best_BL, still_B=still_B, credit_BL=credit_BL)

    def forward(self, model, state, given, cache, wanted_BL, most_B, width=0):
        """One pass and what it is surest of written: (state, the keys and values that the pass leaves).

        Without a cache the pass is over the canvas; with one over `width` slots from given.start on.
        """
        rule = self.rule
        if cache is None:
            start = 0
            hidden_BWD, cache = model.hidden(state.token_BL, see_BM=given.see_BL)
        else:
            start = given.start
            window_BW = jax.lax.dynamic_slice_in_dim(state.token_BL, start, width, 1)
            hidden_BWD, cache = model.hidden(window_BW, None, given.see_BL, cache, start)
        proposed = self.propose(model, hidden_BWD, start, state, given, wanted_BL)
        new_BL, score_BL, logp_BL, best_BL, credit_BL = proposed
        # Write the surest: as many as the schedule says, or all that are sure enough and at least one.
        done_B = most_B
        if rule.bound:
            score_BL, sure_B = self.accept(score_BL, wanted_BL, state, given)
            done_B = jnp.minimum(most_B, jnp.maximum(1, sure_B))
        elif rule.alg_temp:  # Gumbel's k largest are k draws without replacement from softmax(score / alg_temp)
            u_BL = self.draw(given, 1, state, given.place_BL)
            score_BL = score_BL / rule.alg_temp - jnp.log(-jnp.log(u_BL))
        if best_BL is not None:
            state = self.remember(state, best_BL, credit_BL, wanted_BL, most_B)
        if rule.stable_steps:  # then all the rest is written, as if none of it mattered to the others
            stable_B = state.still_B >= rule.stable_steps
            most_B, done_B = (jnp.where(stable_B, wanted_BL.sum(-1), n_B) for n_B in (most_B, done_B))
        token_BL = diffusion.unmask_top(state.token_BL, new_BL, score_BL, done_B, self.cfg.mask_id)
        if state.record:
            written_BL, (step_BL, *before) = token_BL != state.token_BL, state.record
            drawn = (jnp.where(written_BL, *pair) for pair in zip((token_BL, logp_BL), before, strict=True))
            state = state._replace(record=Record(step_BL, *drawn))
        return state._replace(token_BL=token_BL, forwards=state.forwards + 1, left_B=most_B - done_B), cache

    def end_step(self, state, given):
        """Token hook, end of texts, history and record."""
        token_BL = state.token_BL
        if self.token_hook:
            token_BL = self.token_hook(state.step, token_BL)
        if self.rule.eos_ids:
            # An end token ends its row if nothing is masked before it, and no text that was given comes behind it.
            tail_BL = jnp.flip(jnp.cumprod(jnp.flip(given.made_BL | ~given.see_BL, -1), -1), -1) > 0
            eos_BL = (token_BL[..., None] == jnp.array(self.rule.eos_ids)).any(-1)
            settled_BL = jnp.cumsum(self.masked(token_BL, given), -1) == 0
            ended_BL = jnp.cumsum(eos_BL & tail_BL & given.made_BL & settled_BL, -1) > 0
            token_BL = jnp.where(ended_BL & ~eos_BL & given.see_BL, self.rule.eos_ids[0], token_BL)
        if self.rule.history:
            state = state._replace(history_SBL=state.history_SBL.at[state.step].set(token_BL))
        if state.record:
            step_BL = state.record.step_BL
            filled_BL = given.made_BL & (step_BL < 0) & ~self.masked(token_BL, given)
            state = state._replace(record=state.record._replace(step_BL=jnp.where(filled_BL, state.step, step_BL)))
        state = state._replace(token_BL=token_BL)
        if self.watch:
            self.watch(state)
        left_B = self.open_positions(state, given).any(-1)
        return state._replace(step=state.step + 1, step_B=state.step_B + left_B)


@functools.partial(jax.jit, static_argnames=("sampler",))
def open_block(params, state, given, *, sampler):
    """The first step of a block with a cache, a pass over the canvas: (state, keys and values of all slots).

    params is the tree of parameters, state a State, given a Given. `lower` takes their ShapeDtypeStructs.
    """
    model = nnx.merge(sampler.graph, params)
    wanted_BL, most_B = sampler.plan(state, given, opening=True)
    state, cache = sampler.forward(model, state, given, None, wanted_BL, most_B)
    return sampler.end_step(state, given), cache


@functools.partial(jax.jit, static_argnames=("sampler", "width"), donate_argnames=("cache",))
def denoise(params, state, given, cache=None, *, sampler, width=0):
    """Fill a block, in one loop on the device: (state, cache). The block is the whole canvas if block_length is 0.

    Arguments as those of open_block. Without a cache each step is a pass over the canvas. With that of open_block, [(k,
    v)] of each layer as [B, J, L, K], a step feeds `width` slots from given.start on and writes their keys and values
    into the cache. A model that predicts MASK again and again ends at given.limit.
    """
    model, rule = nnx.merge(sampler.graph, params), sampler.rule
    # a hook may mask again what is filled, so a canvas without blocks goes through all its steps
    has_hooks = not rule.block_length and bool(sampler.token_hook or sampler.logit_hook)

    def unfinished(carry):
        state, _ = carry
        i = state.step - given.begun
        scheduled = (i < given.steps) | jnp.any(state.left_B > 0)
        return scheduled & (i < given.limit) & (has_hooks | jnp.any(sampler.open_positions(state, given)))

    def step(carry):
        state, cache = carry
        # Which positions are masked, and how many of them may be filled now?
        wanted_BL, most_B = sampler.plan(state, given)

        def forward(state, cache):  # feed the tokens, propose one for each masked position, write the surest
            state, new_cache = sampler.forward(model, state, given, cache, wanted_BL, most_B, width)
            return state, None if cache is None else new_cache

        def skip(state, cache):  # the schedule rounds to 0 positions in all rows: no pass is needed
            return state._replace(idle=state.idle + 1, left_B=most_B), cache

        idle = jnp.all(most_B == 0) & (sampler.logit_hook is None)
        state, cache = jax.lax.cond(idle, skip, forward, state, cache)
        # Then the caller's hook, texts that have ended, and the history.
        return sampler.end_step(state, given), cache

    return jax.lax.while_loop(unfinished, step, (state, cache))  # the cache too, so that its memory is used again


@functools.partial(jax.jit, static_argnames=("sampler", "width"))
def fill_block(params, state, given, *, sampler, width=0):
    """Fill a block, with a cache its opening pass too, as one program: a State. Arguments as those of denoise."""
    cache = None
    if sampler.rule.cache:
        state, cache = open_block(params, state, given, sampler=sampler)
    state, _ = denoise(params, state, given, cache, sampler=sampler, width=width)
    return jax.tree.map(shard, state)  # on all hosts, which could not read what lies on another one's devices


# ---- a canvas ------------------------------------------------------------------------------------------------------


def padded(x, least=0):
    """x with rows of zeros up to a power of two, at least 32: another number of steps is seldom another program."""
    return np.pad(x, [(0, (1 << max(5, (max(len(x), least) - 1).bit_length())) - len(x))] + [(0, 0)] * (x.ndim - 1))


def layout(rule, masked_BL):
    """(first slot of each block, slots of a block, steps of a block). Blocks cover the columns that hold a MASK."""
    L, size = masked_BL.shape[1], rule.block_length
    columns = np.flatnonzero(masked_BL.any(0)).tolist()
    # With blocks that open one after another, the loop is over the canvas; Sampler.blocks says what is open.
    if rule.block_add:
        return [0], L, L
    # Without blocks: the canvas is one.
    if not size:
        most = masked_BL.sum(-1).max()
        return [0], L, rule.steps or (1 if rule.bound else max(1, math.ceil(most / rule.tokens_per_step)))
    if not columns:
        return [], size, 1
    begin, end = columns[0], columns[-1] + 1
    span = end - begin
    if span % size and rule.fast_dllm:
        raise ValueError(f"block_length {size} does not divide the {span} tokens to fill; try {math.gcd(span, size)}")
    blocks = -(-span // size)
    if rule.steps % blocks:
        nearest = -(-rule.steps // blocks) * blocks
        raise ValueError(f"{rule.steps} steps do not divide over {blocks} blocks; try {nearest}")
    # Where blocks do not fill the canvas evenly, the last one overlaps the one before, which is full by then.
    firsts = [max(0, min(begin + i * size, L - size)) for i in range(blocks)]
    return firsts, size, rule.steps // blocks or math.ceil(size / rule.tokens_per_step)


def schedule(rule, size, steps, masked_BL, u_SBL=None):
    """The fields of Given that say how many positions each step of a block of `size` slots fills.

    They have a row for each slot of the canvas at least: a program for all numbers of steps up to that.
    """
    pad = functools.partial(padded, least=masked_BL.shape[1])
    # A threshold or a bound, with blocks: every step may fill all. It fills one at least, as does the opening pass.
    if rule.bound and rule.block_length:
        limit = size + 1
        budget_SB = np.full((limit, len(masked_BL)), size, np.int32)
        return {"steps": limit, "limit": limit, "budget_SB": pad(budget_SB)}
    # Without blocks: the steps share the masks evenly; each one beyond them fills at least one that is left.
    if rule.bound:
        count_B = masked_BL.sum(-1)
        budget_SB = diffusion.step_counts(count_B, steps, "even").astype(np.int32)
        return {"steps": steps, "limit": steps + int(count_B.max()), "budget_SB": pad(budget_SB)}
    # Else Dream's schedule, origin's by chance: a step fills the share 1 - s / t, the last all. The opening pass of
    # Fast-dLLM fills only one token, so its blocks have two steps at least.
    limit = max(steps, 1 + rule.fast_dllm)
    share_S = diffusion.dream_shares(steps, rule.eps)[np.minimum(np.arange(limit), steps - 1)]
    u_SBL = None if u_SBL is None else padded(np.asarray(u_SBL))
    return {"steps": limit, "limit": limit, "share_S": pad(share_S), "u_SBL": u_SBL}


def window(rule, length, begin, first, size):
    """(first slot, slots) that a cached step feeds for the block at `first`, of a text whose masks begin at `begin`.

    The slot before a block gives the logits of its first token. With cache="prefix" every window reaches from the
    prompt to the end, and not from its block, so that all have one width: then one program fills all blocks. Its keys
    are fresher than those of Fast-dLLM's windows, which shrink from block to block.
    """
    if rule.fast_dllm:
        return first, length - first if rule.cache == "prefix" else size
    slots = -(-(length - begin) // 32) * 32 if rule.cache == "prefix" else size
    width = min(slots + 1, length)
    return min(max(first - 1, 0), length - width), width


def keys_of_rows(key, rows):
    """A random key for each row; as they are, if there is one for each already."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):  # of jax.random.PRNGKey
        key = jax.random.wrap_key_data(key)
    return key if key.ndim else jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(rows))


def prepare(cfg, rule, token_BL, see_BL, made_BL, key=None, u_SBL=None):
    """(State, Given, first slots of the blocks) before anything is filled; NumPy arrays but for the keys."""
    B, L = token_BL.shape
    masked_BL = (token_BL == cfg.mask_id) & see_BL
    firsts, size, steps = layout(rule, masked_BL)
    banned = (cfg.mask_id, cfg.expand_id) if rule.ban_ids is None else rule.ban_ids
    banned_V = np.isin(np.arange(cfg.vocab), banned)
    banned_V |= np.arange(cfg.vocab) >= (rule.vocab or cfg.vocab)
    if banned_V.all():
        raise ValueError("every token is banned")
    key = jax.random.key(0) if key is None else key
    given = Given(
        see_BL=see_BL,
        made_BL=made_BL,
        place_BL=np.maximum(np.arange(L) - see_BL.argmax(-1)[:, None], 0),
        banned_V=banned_V,
        key_B=keys_of_rows(key, B),
        bound=rule.bound,
        eos_penalty=rule.eos_penalty,
        size=size,
        **schedule(rule, size, steps, masked_BL, u_SBL),
    )
    zero = np.int32(0)
    state = State(token_BL.astype(np.int32), zero, zero, zero, np.zeros(B, np.int32), np.zeros(B, np.int32))
    if rule.history:
        history_SBL = padded(np.zeros((max(1, len(firsts)) * given.limit, B, L), np.int32))
        state = state._replace(history_SBL=history_SBL)
    if rule.history or rule.record:
        drawn_BL = np.where(made_BL, cfg.mask_id, token_BL).astype(np.int32)
        state = state._replace(record=Record(np.full((B, L), -1, np.int32), drawn_BL, np.zeros((B, L), np.float32)))
    if rule.stable_steps or rule.credit:
        state = state._replace(best_BL=np.full((B, L), -1, np.int32), still_B=np.zeros(B, np.int32))
    if rule.credit:
        state = state._replace(credit_BL=np.zeros((B, L), np.float32))
    return state, given, firsts


def sampler_of(graph, cfg, rule, token_hook=None, logit_hook=None, watch=None):
    """The Sampler of a rule, without what `Given` says already: that must not ask for another program."""
    # of these it only matters whether they are set
    is_set = {name: float(bool(getattr(rule, name))) for name in ("threshold", "entropy_bound", "eos_penalty")}
    fixed = {"steps": 0, "tokens_per_step": 1.0, "eps": 0.5, "ban_ids": (), "vocab": 0, "refresh": 0, **is_set}
    return Sampler(graph, cfg, dataclasses.replace(rule, **fixed), token_hook, logit_hook, watch)


def fill(
    model, token_BL, see_BL=None, rule=None, key=None, token_hook=None, logit_hook=None, u_SBL=None, watch=None, rows=0
):
    """Fill every MASK of a canvas: (token_BL, {"forwards", "idle", "steps", "windows", "passes"}), with `rule.history`
    also "history" and "probability", with `rule.record` a Record, "record".

    All are NumPy arrays. see_BL is False at padding, which stays as it is; so does every token that is not MASK. "idle"
    counts the steps that could not change anything and cost no pass, "windows" the slots fed in each pass, "passes" [B]
    those that each row took part in. "history" is the canvas after every step [S, B, L], "probability" [B, L] what the
    model gave to each token when it wrote it. A model that predicts MASK leaves it, where ban_ids allows that. Hooks
    are explained at Sampler. u_SBL are the uniform numbers of alg="origin", for tests.

    key is one for all rows, or [B] one for each. `rows` of them are filled at a time, 0: all; block by block a row
    whose text has ended makes room for another. What a row becomes does not depend on the others.

    Raises ValueError for a canvas that does not fit the model, or a number of steps that does not divide over the
    blocks.
    """
    cfg, rule, token_BL = model.cfg, rule or Sampling(), np.asarray(token_BL)
    # JAX would clamp ids that do not exist, and go on.
    if token_BL.ndim != 2 or token_BL.min(initial=0) < 0 or token_BL.max(initial=0) >= cfg.vocab:
        found = f"{token_BL.shape} up to {token_BL.max()}"
        raise ValueError(f"a canvas is a [B, L] array of ids below {cfg.vocab}, not {found}")
    if cfg.block_length:
        raise ValueError(
            f"the model was trained in blocks of {cfg.block_length}; generate.py and sample_block.py do these"
        )
    B, L = token_BL.shape
    if L > cfg.positions:
        raise ValueError(f"{L} tokens do not fit: the model reaches {cfg.positions} positions")
    if key is None and (rule.temperature or rule.alg_temp or (rule.alg == "origin" and u_SBL is None)):
        raise ValueError("sampling needs a key: pass key=jax.random.key(seed)")

    # What is masked; then in which blocks and steps it is filled, and what is never drawn.
    see_BL = np.broadcast_to(True if see_BL is None else np.asarray(see_BL) != 0, (B, L))
    made_BL = (token_BL == cfg.mask_id) & see_BL
    if token_hook:
        token_BL = np.asarray(token_hook(-1, jnp.asarray(token_BL, jnp.int32)))
    state, given, firsts = prepare(cfg, rule, token_BL, see_BL, made_BL, key, u_SBL)
    state, windows, passes_B = fill_blocks(model, rule, state, given, firsts, token_hook, logit_hook, watch, rows)

    token_BL, done = state.token_BL, int(state.step)
    stats = {"forwards": int(state.forwards), "idle": int(state.idle), "steps": done, "windows": windows}
    stats["passes"] = passes_B
    if rule.history:
        history_SBL = np.array(state.history_SBL)
        history_SBL[done:] = token_BL  # the loop ends with the last MASK
        stats["probability"] = np.exp(state.record.logp_BL)
        stats["history"] = history_SBL[: done if rule.block_length else max(done, given.steps)]
    if rule.record:
        stats["record"] = state.record
    return token_BL, stats


def fill_blocks(model, rule, state, given, firsts, token_hook=None, logit_hook=None, watch=None, rows=0):
    """Block after block, or the canvas as one block: (state, slots fed in each pass, passes of each row).

    All blocks run one compiled program; those with Fast-dLLM's prefix cache each their own, as their windows shrink. It
    takes `rows` rows at a time, 0: all. Rows without a MASK in a block, as their text has ended, are left out of it,
    and the others fill their places.
    """
    graph, params = nnx.split(model)
    sampler = sampler_of(graph, model.cfg, rule, token_hook, logit_hook, watch)
    (B, L), size, windows, passes_B = state.token_BL.shape, given.size, [], np.zeros(len(state.token_BL), int)
    has_hooks = token_hook or logit_hook
    # a history has one number of steps for all rows
    whole = not rows or has_hooks or watch or rule.history or rule.record
    rows = max(rows, B) if whole else rows
    for first in firsts:
        open_B = ((state.token_BL == model.cfg.mask_id) & given.see_BL)[:, first : first + size].any(-1)
        if not open_B.any() and (rule.block_length or not has_hooks):
            continue
        start, width = window(rule, L, firsts[0], first, size) if rule.cache else (0, L)
        waiting = np.arange(B) if whole else np.flatnonzero(open_B)
        for i in range(0, len(waiting), rows):
            chosen = waiting[i : i + rows]
            index = np.resize(chosen, rows)  # of too few some come again
            new, left = rows_of(state, index), given.limit  # left: steps that the block may take
            while left > 0:
                at = {"first": first, "start": start, "begun": np.asarray(new.step)}
                part = rows_of(given._replace(**at, limit=min(left, rule.refresh or left)), index)
                before = int(new.forwards)
                new = fill_block(params, place(new, params), part, sampler=sampler, width=width)
                passes = int(new.forwards) - before
                passes_B[chosen] += passes
                windows += [L] * bool(rule.cache) + [width] * (passes - bool(rule.cache))
                masked_BL = (np.asarray(new.token_BL) == model.cfg.mask_id) & part.see_BL
                left = left - part.limit if rule.refresh and masked_BL[:, first : first + size].any() else 0
            state = put_rows(state, chosen, new)
    return state, windows, passes_B


def rows_of(tree, index):
    """A State or Given of the rows with these numbers alone."""
    take = lambda path, x: x[at_rows(path, index)] if at_rows(path, index) else x  # noqa: E731
    return jax.tree_util.tree_map_with_path(take, tree)


def put_rows(old, index, new):
    """The State `old`, in NumPy arrays, with the rows of these numbers as they are in `new`."""

    def put(path, old, new):
        new = np.asarray(new)
        if not at_rows(path, index):
            return new
        old = np.array(old)
        old[at_rows(path, index)] = new[at_rows(path, slice(len(index)))]
        return old

    return jax.tree_util.tree_map_with_path(put, old, new)


def at_rows(path, index):
    """(:, ..., index) up to the axis B of an array with this path in a State or Given; () if it has none."""
    axis = path[-1].name.partition("_")[2].find("B")
    return (slice(None),) * axis + (index,) * (axis >= 0)


def place(state, params):
    """The state on the parameters' device, or on all of their mesh. Else the first block, whose state comes from the
    host, and the others, whose states come from a device, would be two programs.
    """
    at = jax.tree.leaves(params)[0].sharding
    return jax.device_put(state, jax.NamedSharding(at.mesh, PS()) if isinstance(at, jax.NamedSharding) else at)


# ---- texts ---------------------------------------------------------------------------------------------------------


def canvas_width(length, positions):
    """Slots of a canvas for texts of this length: a multiple of 32, beyond 512 of an eighth of a power of two."""
    step = max(32, 1 << (length - 1).bit_length() >> 4)
    return max(length, min(-(-length // step) * step, positions))


def widths(lengths, size, positions, most=3):
    """At most so many canvas widths for texts of these lengths, `size` at a time, with the least padding.

    Each is a compiled program of its own, which at 7B takes longer to compile than padding costs.
    """
    batches = (lengths[i : i + size] for i in range(0, len(lengths), size))
    needed = collections.Counter(canvas_width(max(batch), positions) for batch in batches)
    *narrower, widest = sorted(needed)
    slots = lambda choice: sum(n * min(w for w in choice if w >= need) for need, n in needed.items())  # noqa: E731
    choices = itertools.combinations(narrower, min(most - 1, len(narrower)))
    return min(((*choice, widest) for choice in choices), key=slots)


def canvas(prompts, max_new, cfg, width=0):
    """Prompts (lists of ids, any lengths, MASK allowed) and max_new MASKs behind each, left-padded: (token_BL, see_BL).

    It is as wide as canvas_width says, or `width`: so that few shapes are ever compiled.
    """
    longest = max(map(len, prompts), default=0) + max_new
    if not prompts or longest == 0:
        raise ValueError("nothing to fill: give a prompt or max_new")
    L = max(longest, width) if width else canvas_width(longest, cfg.positions)
    token_BL = np.full((len(prompts), L), cfg.pad_id, np.int32)
    see_BL = np.zeros(token_BL.shape, bool)
    for row, see, prompt in zip(token_BL, see_BL, prompts, strict=True):
        row[L - max_new :] = cfg.mask_id
        row[L - max_new - len(prompt) : L - max_new] = prompt
        see[L - max_new - len(prompt) :] = True
    return token_BL, see_BL


def generate(model, prompts, max_new, rule=None, key=None, widths=(), rows=0, **hooks):
    """Continue prompts with max_new tokens each and fill their MASKs, max_new 0 does only that: (rows of ids, stats).

    A row is prompt and completion without padding. `rows` of them are filled at a time, those of about one length
    together, in canvases of these widths: with the same widths and rows other prompts need no other program. Stats are
    those of `fill`, added up. Raises ValueError for what does not fit; see `fill`.
    """
    lengths, size = [len(prompt) + max_new for prompt in prompts], rows or max(1, len(prompts))
    order = sorted(range(len(prompts)), key=lengths.__getitem__) if len(prompts) > size else range(len(prompts))
    of_width = collections.defaultdict(list)
    for i in range(0, len(order), size):
        longest = max(lengths[n] for n in order[i : i + size])
        of_width[next((width for width in widths if width >= longest), 0)] += order[i : i + size]

    key_B = None if key is None else keys_of_rows(key, len(prompts))
    texts, passes_B = [None] * len(prompts), np.zeros(len(prompts), int)
    total = {"forwards": 0, "idle": 0, "steps": 0, "windows": []}
    for width, numbers in of_width.items() or [(0, [])]:
        token_BL, see_BL = canvas([prompts[n] for n in numbers], max_new, model.cfg, width)
        key_of_row = None if key is None else key_B[np.array(numbers)]
        token_BL, stats = fill(model, token_BL, see_BL, rule, key_of_row, rows=rows, **hooks)
        total = {name: value + stats[name] for name, value in total.items()}
        passes_B[numbers] = stats["passes"]
        for n, row, see in zip(numbers, token_BL, see_BL, strict=True):
            texts[n] = row[see].tolist()
    return texts, stats | total | {"passes": passes_B}
