"""Sampling from Dream: the canvas, the denoising loop, block caches, hooks.

Refs: Dream, arXiv:2508.15487; DiffuCoder, arXiv:2506.20639; Fast-dLLM, arXiv:2505.22618.
"""

import dataclasses
import functools
import json
import math
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from flax import nnx

import diffusion
from model_dream import DreamConfig

CONFIDENCE = {"maskgit_plus": "max_prob", "topk_margin": "margin", "entropy": "entropy"}


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How masked positions are filled; one compiled program for each value of it."""

    alg: typing.Literal["entropy", "maskgit_plus", "topk_margin", "origin"] = "entropy"  # who is filled first
    steps: int = 0  # denoising steps, all blocks together; 0: by tokens_per_step, one with a threshold
    tokens_per_step: float = 1.0  # used where steps is 0
    eps: float = 1e-3  # end of the time grid
    temperature: float = 0.0  # 0 takes the likeliest token
    top_p: float = 1.0  # a token goes if those before it have more than top_p; 1 keeps all
    top_k: int = 0  # keep the k likeliest tokens; 0 keeps all
    alg_temp: float = 0.0  # temperature of the choice of positions; 0 takes the surest
    threshold: float = 0.0  # fill all positions whose probability reaches it, at least one a step; 0 goes by steps
    block_length: int = 0  # fill blocks of this length from left to right; 0: the whole canvas at once
    cache: typing.Literal["", "prefix", "dual"] = ""  # keys and values kept within a block: left of it | all around it
    fast_dllm: bool = False  # Fast-dLLM's windows [S, E): the first token of a block is filled whatever its confidence
    ban_ids: tuple[int, ...] | None = None  # never drawn; None: MASK
    vocab: int = 0  # ids from here on have no token and are never drawn; 0 allows all rows
    eos_ids: tuple[
        int, ...
    ] = ()  # one of these ends a text once nothing before it is masked; the rest is filled with it
    history: bool = False  # keep the canvas after every step

    def __post_init__(self):
        def check(ok, what):
            if not ok:
                raise ValueError(what)

        check(self.alg in (*CONFIDENCE, "origin"), f"alg {self.alg!r} is not one of {', '.join(CONFIDENCE)}, origin")
        check(self.cache in ("", "prefix", "dual"), f"cache {self.cache!r} is neither prefix nor dual")
        for name in ("steps", "top_k", "block_length", "vocab", "temperature", "alg_temp"):
            check(getattr(self, name) >= 0, f"{name} is {getattr(self, name)}, below 0")
        check(0 < self.eps < 1, f"eps is {self.eps}, not between 0 and 1")
        check(self.tokens_per_step > 0, f"tokens_per_step is {self.tokens_per_step}, not above 0")
        check(0 < self.top_p <= 1, f"top_p is {self.top_p}, not in (0, 1]")
        check(0 <= self.threshold <= 1, f"threshold is {self.threshold}, not in [0, 1]")
        check(self.block_length or not (self.cache or self.fast_dllm), "a cache works block by block: set block_length")
        check(self.cache or not self.fast_dllm, "Fast-dLLM's windows need a cache: prefix or dual")
        check(
            self.alg != "origin" or not (self.block_length or self.threshold), "origin has no blocks and no threshold"
        )


@dataclasses.dataclass(frozen=True)
class Sampler:
    """What the compiled loops know when they are compiled: model, settings and hooks.

    token_hook(step, token_BL) -> token_BL runs before the first step (step -1) and after every one. logit_hook(step,
    token_BL, slot_BC, logits_BCV) -> logits_BCV gets the logits of C masked positions of each row at a time, already
    shifted: those of the tokens at slot_BC; a slot of L is none. Hooks are traced: jax.numpy only.

    `given` holds the arrays that stay as they are: see_BL, made_BL (masked at the start), place_BL (slots counted from
    the row's first token), banned_V, key_B, and the schedule: table_SN, budget_SB, or commit_S and u_SBL.
    """

    graph: typing.Any
    cfg: DreamConfig
    rule: Sampling
    token_hook: typing.Callable | None = None
    logit_hook: typing.Callable | None = None

    def masked(self, token_BL, given):
        return (token_BL == self.cfg.mask_id) & given["see_BL"]

    def open(self, state, given, first):
        """The masked positions of the block at slot `first` [B, L]."""
        slot_L = jnp.arange(state["token_BL"].shape[1])
        inside_L = (slot_L >= first) & (slot_L < first + self.rule.block_length)
        return self.masked(state["token_BL"], given) & inside_L

    def draw(self, given, tag, step, place_BC, shape=()):
        """Uniform numbers in (0, 1) [B, C, *shape] of row, step and place alone, whatever the batch or its padding."""

        def one(key, place):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, tag), step), place)
            return jax.random.uniform(key, shape, minval=jnp.finfo(jnp.float32).tiny)

        return jax.vmap(lambda key, place_C: jax.vmap(functools.partial(one, key))(place_C))(given["key_B"], place_BC)

    def propose(self, model, hidden_BWD, start, state, given, wanted_BL):
        """(token_BL, score_BL): what would be written at the wanted positions and how sure that is, -inf elsewhere.

        hidden_BWD are those of slots start .. start + W - 1. The logits of a few wanted positions exist at a time, and
        of no others. A position whose left neighbour is padding, or not in the window, uses its own logits.
        """
        rule, token_BL, see_BL = self.rule, state["token_BL"], given["see_BL"]
        B, L = token_BL.shape
        C, row_B1 = min(model.run.head_positions, L), jnp.arange(B)[:, None]
        count_B1 = wanted_BL.sum(-1, keepdims=True)
        order_BL = jnp.where(wanted_BL, jnp.cumsum(wanted_BL, -1) - 1, L + C)
        slot_BL = jnp.full((B, L + -L % C), L).at[row_B1, order_BL].set(jnp.arange(L), mode="drop")  # wanted ones first

        def some(c, carry):
            token_BL, score_BL = carry
            slot_BC = jax.lax.dynamic_slice(slot_BL, (0, c * C), (B, C))
            at_BC = jnp.minimum(slot_BC, L - 1)
            shifted_BC = (at_BC > 0) & see_BL[row_B1, jnp.maximum(at_BC - 1, 0)]
            source_BC = jnp.clip(at_BC - shifted_BC - start, 0, hidden_BWD.shape[1] - 1)
            logits_BCV = model.logits(jnp.take_along_axis(hidden_BWD, source_BC[..., None], 1))
            logits_BCV = jnp.where(given["banned_V"], -jnp.inf, logits_BCV)
            if self.logit_hook:
                logits_BCV = self.logit_hook(state["step"], state["token_BL"], slot_BC, logits_BCV)
            settings, width = (rule.temperature, rule.top_k, rule.top_p), 1 if model.run.on_cpu else 3
            logits_BCV = diffusion.filter_logits(logits_BCV, *settings, rule="dream", width=width)
            u_BCV = None
            if rule.temperature:
                place_BC = given["place_BL"][row_B1, at_BC]
                u_BCV = self.draw(given, 0, state["step"], place_BC, logits_BCV.shape[-1:])
            new_BC = diffusion.sample_tokens(logits_BCV, u_BCV, 1.0 if rule.temperature else 0).astype(token_BL.dtype)
            sure_BC = jnp.zeros(slot_BC.shape)
            if rule.threshold or rule.alg == "maskgit_plus":
                prob_BCV = diffusion.softmax(logits_BCV)
                sure_BC = jnp.take_along_axis(prob_BCV, new_BC[..., None], -1)[..., 0]
            elif rule.alg != "origin":
                sure_BC = diffusion.confidence(diffusion.softmax(logits_BCV), CONFIDENCE[rule.alg])
            token_BL = token_BL.at[row_B1, slot_BC].set(new_BC, mode="drop")
            return token_BL, score_BL.at[row_B1, slot_BC].set(sure_BC, mode="drop")

        chunks = (jnp.max(count_B1) + C - 1) // C
        return jax.lax.fori_loop(0, chunks, some, (token_BL, jnp.full((B, L), -jnp.inf)))

    def commit(self, model, hidden_BWD, start, state, given, wanted_BL, most_B):
        """Write the surest proposals: (state, how many of each row). most_B of a row, fewer if a threshold says so."""
        rule = self.rule
        new_BL, score_BL = self.propose(model, hidden_BWD, start, state, given, wanted_BL)
        if rule.threshold:
            most_B = jnp.minimum(most_B, jnp.maximum(1, jnp.sum(wanted_BL & (score_BL >= rule.threshold), -1)))
        elif rule.alg_temp:  # Gumbel's k largest are k draws without replacement from softmax(score / alg_temp)
            u_BL = self.draw(given, 1, state["step"], given["place_BL"])
            score_BL = score_BL / rule.alg_temp - jnp.log(-jnp.log(u_BL))
        token_BL = diffusion.unmask_top(state["token_BL"], new_BL, score_BL, most_B, self.cfg.mask_id)
        return state | {"token_BL": token_BL, "forwards": state["forwards"] + 1}, most_B

    def end_step(self, state, given):
        """Token hook, end of texts, history."""
        token_BL = state["token_BL"]
        if self.token_hook:
            token_BL = self.token_hook(state["step"], token_BL)
        if self.rule.eos_ids:
            tail_BL = jnp.flip(jnp.cumprod(jnp.flip(given["made_BL"] | ~given["see_BL"], -1), -1), -1) > 0
            eos_BL = functools.reduce(jnp.logical_or, [token_BL == i for i in self.rule.eos_ids])
            whole_BL = jnp.cumsum(self.masked(token_BL, given), -1) == 0  # nothing is masked up to here
            ended_BL = jnp.cumsum(eos_BL & tail_BL & given["made_BL"] & whole_BL, -1) > 0
            token_BL = jnp.where(ended_BL & ~eos_BL & given["see_BL"], self.rule.eos_ids[0], token_BL)
        if self.rule.history:
            state = state | {"history_SBL": state["history_SBL"].at[state["step"]].set(token_BL)}
        return state | {"token_BL": token_BL, "step": state["step"] + 1}


@functools.partial(jax.jit, static_argnames=("sampler",))
def _fill(params, state, given, *, sampler):
    """Denoise the whole canvas in one loop."""
    model, rule = nnx.merge(sampler.graph, params), sampler.rule
    S, hooks = given["steps"], bool(sampler.token_hook or sampler.logit_hook)

    def more(state):
        left = (state["step"] < S) | (jnp.any(state["left_B"] > 0) if rule.threshold else False)
        return left & (hooks | jnp.any(sampler.masked(state["token_BL"], given)))

    def body(state):
        step, wanted_BL = state["step"], sampler.masked(state["token_BL"], given)
        if rule.alg == "origin":
            if "u_SBL" in given:
                u_BL = given["u_SBL"][step]
            else:
                u_BL = sampler.draw(given, 2, step, given["place_BL"])
            wanted_BL &= u_BL < given["commit_S"][step]
            most_B = wanted_BL.sum(-1)
        elif rule.threshold:
            now_B = given["budget_SB"].at[step].get(mode="fill", fill_value=0)
            most_B = jnp.minimum(now_B + state["left_B"], wanted_BL.sum(-1))
        else:
            most_B = given["table_SN"][step][wanted_BL.sum(-1)]

        def forward(state):
            hidden_BLD, _ = model.hidden(state["token_BL"], see_BM=given["see_BL"])
            state, done_B = sampler.commit(model, hidden_BLD, 0, state, given, wanted_BL, most_B)
            return state | {"left_B": most_B - done_B}

        idle = jnp.all(most_B == 0) & (sampler.logit_hook is None)
        skip = lambda state: state | {"idle": state["idle"] + 1, "left_B": most_B}  # noqa: E731
        state = jax.lax.cond(idle, skip, forward, state)
        return sampler.end_step(state, given)

    return jax.lax.while_loop(more, body, state)


def _most(state, given, wanted_BL, rule, i):
    """How many of the wanted positions step i of a block may fill, by the schedule [B]."""
    n_B = wanted_BL.sum(-1)
    return n_B if rule.threshold else given["table_SN"][jnp.minimum(i, given["steps"] - 1)][n_B]


@functools.partial(jax.jit, static_argnames=("sampler",))
def _open_block(params, state, given, first, *, sampler):
    """Step 0 of the block at `first`, a pass over the canvas: (state, cache, whether masks are left in the block)."""
    model, rule = nnx.merge(sampler.graph, params), sampler.rule
    wanted_BL = sampler.open(state, given, first)
    most_B = _most(state, given, wanted_BL, rule, 0)
    if rule.fast_dllm:
        wanted_BL &= jnp.arange(wanted_BL.shape[1]) == first
        most_B = wanted_BL.sum(-1)
    hidden_BLD, cache = model.hidden(state["token_BL"], see_BM=given["see_BL"])
    state, _ = sampler.commit(model, hidden_BLD, 0, state, given, wanted_BL, most_B)
    return sampler.end_step(state, given), cache if rule.cache else None


@functools.partial(jax.jit, static_argnames=("sampler", "width"), donate_argnames=("cache",))
def _fill_block(params, state, given, cache, first, start, limit, *, sampler, width):
    """Steps 1 .. limit - 1 of the block at `first`, in one loop of passes over the slots start .. start + width - 1.

    Each pass writes the window's keys and values into the cache. Where no position is to be filled the pass is left
    out; a model that predicts MASK again and again ends at the limit.
    """
    model, rule = nnx.merge(sampler.graph, params), sampler.rule
    begun = state["step"] - 1

    def more(carry):
        return (carry[0]["step"] - begun < limit) & jnp.any(sampler.open(carry[0], given, first))

    def body(carry):
        state, _ = carry
        wanted_BL = sampler.open(state, given, first)
        most_B = _most(state, given, wanted_BL, rule, state["step"] - begun)

        def forward(carry):
            state, cache = carry
            window_BW = jax.lax.dynamic_slice_in_dim(state["token_BL"], start, width, 1)
            hidden_BWD, new_cache = model.hidden(window_BW, None, given["see_BL"], cache, start)
            state, _ = sampler.commit(model, hidden_BWD, start, state, given, wanted_BL, most_B)
            return state, new_cache if rule.cache else None

        idle = jnp.all(most_B == 0) & (sampler.logit_hook is None)
        state, cache = jax.lax.cond(idle, lambda c: (c[0] | {"idle": c[0]["idle"] + 1}, c[1]), forward, carry)
        return sampler.end_step(state, given), cache

    return jax.lax.while_loop(more, body, (state, cache))  # the cache too, so that its memory is used again


def longer(x):
    """x with rows of zeros up to a power of two, at least 32: another number of steps is seldom another program."""
    return np.pad(x, [(0, (1 << max(5, (len(x) - 1).bit_length())) - len(x))] + [(0, 0)] * (x.ndim - 1))


def step_table(most, steps, eps):
    """How many of n masked tokens step i fills: int32 [steps, most + 1], floor(n (1 - s/t)), n in the last step.

    (t, s) are neighbours on linspace(1, eps, steps + 1). Following it gives diffusion.step_counts(rule="dream"); as a
    table of n it also serves rows that a hook changed, or where the model predicted MASK. Ref: Dream's generation code.
    """
    t = np.linspace(1, eps, steps + 1)
    table_SN = (np.arange(most + 1) * (1 - t[1:] / t[:-1])[:, None]).astype(np.int32)
    table_SN[-1] = np.arange(most + 1)
    return table_SN


def fill(model, token_BL, see_BL=None, rule=None, key=None, token_hook=None, logit_hook=None, u_SBL=None):
    """Fill every MASK of a canvas: (token_BL, {"forwards", "idle", "steps", "windows", "history"}), NumPy arrays.

    see_BL is False at padding, which stays as it is; so does every token that is not MASK. "idle" counts the steps that
    could not change anything and cost no pass, "windows" the slots fed in each pass, "history" is the canvas after
    every step [S, B, L]. Without blocks one compiled loop does it all. A block is a pass over the canvas and a compiled
    loop over windows, the same programs for all blocks, but for cache="prefix", whose windows shrink. A model that
    predicts MASK leaves it, where ban_ids allows that. u_SBL are the uniform numbers of alg="origin", for tests.

    Raises ValueError for a canvas that does not fit the model, a number of steps that does not divide over the blocks,
    or a block length that does not divide a completion.
    """
    cfg, rule = model.cfg, rule or Sampling()
    token_BL = np.asarray(token_BL)
    if token_BL.ndim != 2 or not token_BL.size or token_BL.dtype.kind not in "iu":
        raise ValueError(f"a canvas is a [B, L] array of token ids, not {token_BL.dtype} {token_BL.shape}")
    if token_BL.min() < 0 or token_BL.max() >= cfg.vocab:
        raise ValueError(f"token ids {token_BL.min()} to {token_BL.max()} do not fit a vocabulary of {cfg.vocab}")
    B, L = token_BL.shape
    if L > cfg.positions:
        raise ValueError(f"{L} tokens do not fit: the model reaches {cfg.positions} positions")
    see_BL = np.ones((B, L), bool) if see_BL is None else np.asarray(see_BL) != 0
    if see_BL.shape != (B, L):
        raise ValueError(f"a mask of shape {see_BL.shape} does not fit the canvas {(B, L)}")
    if rule.temperature or rule.alg_temp or (rule.alg == "origin" and u_SBL is None):
        if key is None:
            raise ValueError("sampling needs a key: pass key=jax.random.key(seed)")
    made_BL = (token_BL == cfg.mask_id) & see_BL
    banned_V = np.isin(np.arange(cfg.vocab), (cfg.mask_id,) if rule.ban_ids is None else rule.ban_ids)
    banned_V |= np.arange(cfg.vocab) >= (rule.vocab or cfg.vocab)
    if banned_V.all():
        raise ValueError("every token is banned")
    key = jax.random.key(0) if key is None else key
    given = {
        "see_BL": see_BL,
        "made_BL": made_BL,
        "place_BL": np.maximum(np.arange(L) - see_BL.argmax(-1)[:, None], 0),
        "banned_V": banned_V,
        "key_B": jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(B)),
    }
    graph, params = nnx.split(model)
    # what the arrays in `given` say already must not ask for another program
    fixed = dataclasses.replace(rule, steps=0, tokens_per_step=1.0, eps=0.5, ban_ids=(), vocab=0)
    sampler = Sampler(graph, cfg, fixed, token_hook, logit_hook)
    if token_hook:
        token_BL = np.asarray(token_hook(-1, jnp.asarray(token_BL, jnp.int32)))
    masked_BL = (token_BL == cfg.mask_id) & see_BL
    counter = jnp.int32(0)
    state = {"token_BL": jnp.asarray(token_BL, jnp.int32), "step": counter, "forwards": counter, "idle": counter}
    if not rule.block_length:
        n = int(masked_BL.sum(-1).max())
        steps = limit = rule.steps or (1 if rule.threshold else max(1, math.ceil(n / rule.tokens_per_step)))
        if rule.alg == "origin":
            t = np.linspace(1, rule.eps, steps + 1)
            given["commit_S"] = longer(np.append(1 - t[1:-1] / t[:-2], 1).astype(np.float32))
            given |= {} if u_SBL is None else {"u_SBL": longer(np.asarray(u_SBL))}
        elif rule.threshold:
            given["budget_SB"] = longer(diffusion.step_counts(masked_BL.sum(-1), steps, "even").astype(np.int32))
            limit = steps + n  # each step beyond fills at least one of what is left
        else:
            given["table_SN"] = longer(step_table(L, steps, rule.eps))
        given["steps"] = steps
        state["left_B"] = jnp.zeros(B, jnp.int32)
        if rule.history:
            state["history_SBL"] = longer(np.zeros((limit, B, L), np.int32))
        state = _fill(params, state, given, sampler=sampler)
        windows = [L] * int(state["forwards"])
    else:
        state, windows = _fill_blocks(params, state, given, sampler, rule, masked_BL)
        steps = 0
    token_BL, done = np.asarray(state["token_BL"]), int(state["step"])
    stats = {"forwards": int(state["forwards"]), "idle": int(state["idle"]), "steps": done, "windows": windows}
    if rule.history:
        history_SBL = np.array(state["history_SBL"])
        history_SBL[done:] = token_BL  # the loop ends with the last MASK
        stats["history"] = history_SBL[: max(done, steps)]
    return token_BL, stats


def _fill_blocks(params, state, given, sampler, rule, masked_BL):
    """Block by block over the columns that hold a MASK: (state, slots fed in each pass)."""
    L = masked_BL.shape[1]
    columns = np.flatnonzero(masked_BL.any(0))
    if not len(columns):
        return state | ({"history_SBL": jnp.zeros((0, *masked_BL.shape))} if rule.history else {}), []
    S, span, size = int(columns[0]), int(columns[-1] - columns[0]) + 1, rule.block_length
    completion = masked_BL[:, S:].all() and S + span == L
    if span % size and (completion or rule.fast_dllm):
        raise ValueError(f"block_length {size} does not divide the {span} tokens to fill; try {math.gcd(span, size)}")
    if size > L:
        raise ValueError(f"block_length {size} is longer than the canvas of {L}")
    blocks = -(-span // size)
    if rule.steps % blocks:
        raise ValueError(
            f"{rule.steps} steps do not divide over {blocks} blocks; try {-(-rule.steps // blocks) * blocks}"
        )
    steps = rule.steps // blocks or math.ceil(size / rule.tokens_per_step)
    # one step fills one token at least, and so does the pass that opens a block; Fast-dLLM's opening fills only one
    limit = size + 1 if rule.threshold else max(steps, 1 + rule.fast_dllm)
    if not rule.threshold:
        given |= {"table_SN": longer(step_table(size, steps, rule.eps)), "steps": steps}
    if rule.history:
        state["history_SBL"] = longer(np.zeros((blocks * limit, *masked_BL.shape), np.int32))
    windows = []
    for block in range(blocks):
        first = min(S + block * size, L - size)  # the last block of an infilled canvas may overlap the one before
        start = first if rule.fast_dllm else max(first - 1, 0)
        width = {"": L, "prefix": L - start, "dual": min(size + (not rule.fast_dllm), L)}[rule.cache]
        start = min(start, L - width)
        if not np.asarray(sampler.open(state, given, first)).any():
            continue
        state, cache = _open_block(params, state, given, first, sampler=sampler)
        before = int(state["forwards"])
        state, _ = _fill_block(params, state, given, cache, first, start, limit, sampler=sampler, width=width)
        windows += [L] + [width] * (int(state["forwards"]) - before)
    return state, windows


def canvas(prompts, max_new, cfg, multiple=32):
    """Prompts (lists of ids, any lengths, MASK allowed) and max_new MASKs behind each, left-padded: (token_BL, see_BL).

    The prompts' part is padded to a multiple of `multiple`, so that few shapes are ever compiled.
    """
    P = max(map(len, prompts), default=0)
    P = -(-P // multiple) * multiple
    if not prompts or P + max_new == 0:
        raise ValueError("nothing to fill: give a prompt or max_new")
    if max(map(len, prompts)) + max_new > cfg.positions:
        raise ValueError(f"{max(map(len, prompts)) + max_new} tokens do not fit: the model reaches {cfg.positions}")
    P = min(P, cfg.positions - max_new)
    token_BL = np.full((len(prompts), P + max_new), cfg.mask_id, np.int32)
    token_BL[:, :P] = cfg.pad_id
    see_BL = np.ones(token_BL.shape, bool)
    for row, see, prompt in zip(token_BL, see_BL, prompts, strict=True):
        row[P - len(prompt) : P] = prompt
        see[: P - len(prompt)] = False
    return token_BL, see_BL


def generate(model, prompts, max_new, rule=None, key=None, **hooks):
    """Continue prompts with max_new tokens each and fill their MASKs, max_new 0 does only that: (rows of ids, stats).

    A row is prompt and completion without padding. Raises ValueError for what does not fit; see `fill`.
    """
    token_BL, see_BL = canvas(prompts, max_new, model.cfg)
    token_BL, stats = fill(model, token_BL, see_BL, rule, key, **hooks)
    return [row[see].tolist() for row, see in zip(token_BL, see_BL, strict=True)], stats


def load_tokenizer(folder, cfg):
    """The tokenizer in a model's folder. Raises FileNotFoundError, or ValueError for one that is damaged or does not
    fit the model: more tokens than rows, or a MASK or end token of the model that is an ordinary word.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no tokenizer.json; copy the model's into it")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower for a broken file
        raise ValueError(f"{path} cannot be read: {error}") from None
    size, special = tokenizer.get_vocab_size(), tokenizer.get_added_tokens_decoder()
    if size > cfg.vocab:
        raise ValueError(f"the tokenizer of {folder} does not fit: it has {size:,} tokens, the model {cfg.vocab:,}")
    for name in ("mask_id", "eos_id"):
        i = getattr(cfg, name)
        word = tokenizer.id_to_token(i)
        if (i not in special or not special[i].special) and (word or name == "eos_id"):
            raise ValueError(f"the tokenizer of {folder} does not fit: {i}, the model's {name}, is {word!r} in it")
    return tokenizer


def chat_template(folder):
    """A function that writes a prompt as a user's turn, by the chat template in a model's folder; None if it has none.

    The function's second argument is a system turn that goes before. Raises ValueError for a template that is damaged;
    so does the function for one that fails.
    """
    config, path = {}, Path(folder) / "tokenizer_config.json"
    try:
        if path.exists():
            config = json.loads(path.read_text())
        template = config.get("chat_template")
        if path.with_name("chat_template.jinja").exists():
            template = path.with_name("chat_template.jinja").read_text()
        if isinstance(template, list):  # several of them, by name
            template = {one["name"]: one["template"] for one in template}["default"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds no chat template that can be read: {error!r}") from None
    if not template:
        return None
    import jinja2.sandbox

    def refuse(message):
        raise jinja2.TemplateError(message)

    named = {f"{name}_token": config.get(f"{name}_token") for name in ("bos", "eos", "pad")}
    named = {name: token["content"] if isinstance(token, dict) else token for name, token in named.items()}
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals |= {"raise_exception": refuse, **named}

    def wrap(prompt, system=""):
        try:
            turns = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": prompt}]
            return environment.from_string(template).render(messages=turns, add_generation_prompt=True)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template of {folder} fails: {error}") from None

    return wrap
