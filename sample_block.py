"""Sampling from a Dream that was trained in blocks: block by block, with an exact cache. Pure.

    model, _ = checkpoints.load(model_dream, "out/blocks")
    rule = sample_block.Sampling(threshold=0.9)
    rows, stats = sample_block.generate(model, [[5, 6, 7]], 256, rule)

A token attends to its own and earlier blocks, so the keys and values of a finished block never
change. The first pass of a block feeds the finished block before it as well: that commits the final
keys and values of this one to the cache, and is the first denoising step of the new one. The
further steps feed the new block alone, and the token before it, whose hidden state predicts the
first of the block. Rows begin at slot 0, each with blocks of its own, so that a row of a batch is
what it is alone. How positions are chosen is explained in sample_dream.py. Not here: text after a
hole, which such a model does not see, and Fast-dLLM v2's sub-blocks (extra/demos.py).

Letters: B rows, L slots, N tokens of a block, W slots of a window, M masks of a block, D width, V
vocabulary, S steps. Refs: BD3-LM, arXiv:2503.09573; Fast-dLLM v2, arXiv:2509.26328; entropy bound:
EB-Sampler, arXiv:2505.24857.
"""

import dataclasses
import functools
import itertools
import typing

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import diffusion
import sample_dream


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a block is filled: by a schedule of `steps`, a threshold that may fill more, or an
    entropy bound.
    """

    block_length: int = 0  # 0: the model's
    steps: int = 0  # denoising steps of a block; 0: one for each token
    # see diffusion.step_counts; sdar: even of whole blocks
    schedule: typing.Literal["block", "even", "sdar"] = "block"
    # fill all positions above this probability, but at least as many as the schedule says
    threshold: float = 0.0
    # the probability that counts: the drawn token's | the max
    score: typing.Literal["drawn", "distribution"] = "drawn"
    # fill positions of lowest entropy, while those before add up to at most this; 0: steps
    entropy_bound: float = 0.0
    temperature: float = 0.0  # 0 takes the argmax
    top_p: float = 1.0  # a token is dropped if those before it have more than top_p; 1 keeps all
    top_k: int = 0  # keep the k likeliest tokens; 0 keeps all
    vocab: int = 0  # ids from here on have no token and are never drawn; 0 allows all rows
    # each ends a text if nothing before it is MASK; eos_ids[0] fills the rest
    eos_ids: tuple[int, ...] = ()
    likeliest: int = 0  # keep this many of the likeliest tokens in the Record, too


def settings_of(rule):
    """A sample_dream.Sampling as one of blocks. ValueError for what only the filling of a canvas
    has.
    """
    if rule.alg_temp or rule.cache or rule.alg not in ("entropy", "maskgit_plus"):
        raise ValueError("a model of blocks has no alg, alg_temp or cache: leave them out")
    shared = {field.name for field in dataclasses.fields(Sampling)} - {"schedule"}
    return Sampling(**{name: getattr(rule, name) for name in shared})


class State(typing.NamedTuple):
    """What a denoising step changes."""

    token_BL: jax.Array
    record: sample_dream.Record  # when each token was drawn, and with what probability
    step: jax.Array  # steps so far, a forward pass each
    cache: list  # (keys, values) [B, J, L, K] of each layer


class Given(typing.NamedTuple):
    """What stays as it is while a block is filled. Arrays, so that another value needs no other
    program.
    """

    see_BL: jax.Array  # False after the end of a text
    made_BL: jax.Array  # masked at the start
    block_BL: jax.Array  # the block of each slot
    first_B: jax.Array  # the first slot of the block that is filled now
    start_B: jax.Array  # the first slot that its first pass feeds
    count_MS: jax.Array  # tokens that step s fills of a block with m masks at its start
    banned_V: jax.Array  # ids that are never drawn
    key_B: jax.Array  # the data of a random key for each row
    bound: float  # the threshold, or the entropy bound
    # (temperature or 1, top_p, False for the argmax) of each row, [B, 1, 1] each; () is the rule's
    filters: tuple = ()


@dataclasses.dataclass(frozen=True)
class Sampler:
    """What a compiled program is made for."""

    graph: typing.Any  # model_dream.graph_of: the model without its parameters
    rule: Sampling

    def masked(self, model, state, given):
        """The masked positions of the block [B, N]."""
        slot_BN = given.first_B[:, None] + jnp.arange(self.rule.block_length)
        masked_BL = (state.token_BL == model.cfg.mask_id) & given.see_BL
        return jnp.take_along_axis(masked_BL, slot_BN, 1)

    def propose(self, model, hidden_BWD, start_B, given, slot_BN, i, shift):
        """For each position a token, its probability and the entropy in the model's own
        distribution, and for the record its log p and the likeliest tokens: (token_BN, prob_BN,
        entropy_BN, logp_BN, likely).
        """
        rule = self.rule
        # With shift the token at p comes from the hidden state at p - 1, the first of a text from
        # its own.
        source_BN = slot_BN - (shift & (slot_BN > 0)) - start_B[:, None]
        logits_BNV = model.logits(jnp.take_along_axis(hidden_BWD, source_BN[..., None], 1))
        logits_BNV = jnp.where(given.banned_V, -jnp.inf, logits_BNV)
        prob_BNV = diffusion.softmax(logits_BNV)  # top-k of 1 would raise every token to 1

        temperature, top_p, draws = given.filters or (rule.temperature, rule.top_p, True)
        if given.filters or rule.temperature:

            def uniform(key, slot):  # a function of row, step and slot alone: not of the batch
                key = jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(key), i), slot)
                tiny = jnp.finfo(jnp.float32).tiny
                return jax.random.uniform(key, prob_BNV.shape[-1:], minval=tiny)

            u_BNV = jax.vmap(jax.vmap(uniform, (None, 0)))(given.key_B, slot_BN)
            u_BNV = jnp.where(draws, u_BNV, jnp.exp(-1.0))  # the same for all tokens: the argmax
            width = sample_dream.filter_width(model)
            filtered_BNV = diffusion.filter_logits(
                logits_BNV, temperature, rule.top_k, top_p, rule="dream", width=width
            )
            token_BN = diffusion.sample_tokens(filtered_BNV, u_BNV, 1.0)
        else:
            token_BN = diffusion.sample_tokens(logits_BNV, None, 0)
        token_BN = token_BN.astype(jnp.int32)

        prob_BN = jnp.take_along_axis(prob_BNV, token_BN[..., None], -1)[..., 0]
        logp_BN = jnp.log(prob_BN)
        if rule.score == "distribution":  # the choice of positions does not depend on the draw
            prob_BN = prob_BNV.max(-1)
        likely = ()
        if rule.likeliest:
            likely = tuple(jax.lax.top_k(jnp.log(prob_BNV), rule.likeliest)[::-1])
        return token_BN, prob_BN, -diffusion.confidence(prob_BNV, "entropy"), logp_BN, likely

    def choose(self, masked_BN, prob_BN, entropy_BN, given, masks_B, i):
        """The positions [B, N] that step i of the block writes."""
        rule = self.rule
        if rule.entropy_bound:
            return diffusion.entropy_bound(entropy_BN, masked_BN, given.bound)
        count_B = given.count_MS[masks_B, jnp.minimum(i, given.count_MS.shape[1] - 1)]
        if rule.threshold:
            count_B = jnp.maximum(count_B, (masked_BN & (prob_BN > given.bound)).sum(-1))
        return diffusion.surest(prob_BN, masked_BN, count_B)

    def step(self, model, state, given, start_B, width, masks_B, i, seeds=False):
        """Step i of a block: a pass over `width` slots of each row from start_B on, to fill
        positions of highest confidence. With `seeds` attention is causal, and only the first token
        of the block is filled: the next one of an autoregressive model.
        """
        slot_BW = start_B[:, None] + jnp.arange(width)
        row_B1 = jnp.arange(len(slot_BW))[:, None]
        first_B1 = given.first_B[:, None]
        keys = diffusion.Place(given.see_BL.astype(jnp.int32), given.block_BL)
        block_BW = given.block_BL[row_B1, slot_BW]
        if model.cfg.causal and not seeds:  # with the shift the window begins with a finished token
            last_B1 = first_B1 + self.rule.block_length - 1
            block_BW = jnp.where(slot_BW < first_B1, block_BW, last_B1)
        queries = diffusion.Place(keys.document[row_B1, slot_BW], block_BW)
        hidden_BWD, cache = model.hidden(
            state.token_BL[row_B1, slot_BW], slot_BW, None, state.cache, start_B, queries, keys
        )

        slot_N = jnp.arange(self.rule.block_length)
        slot_BN = first_B1 + slot_N
        shift = model.cfg.shift or seeds
        token_BN, prob_BN, entropy_BN, logp_BN, likely = self.propose(
            model, hidden_BWD, start_B, given, slot_BN, i, shift
        )
        masked_BN = self.masked(model, state, given)
        if seeds:
            masked_BN &= slot_N == 0
        written_BN = self.choose(masked_BN, prob_BN, entropy_BN, given, masks_B, i)
        # out of the row: dropped
        index_BN = jnp.where(written_BN, slot_BN, state.token_BL.shape[1])

        def write(x_BL, new_BN):
            return x_BL.at[row_B1, index_BN].set(new_BN, mode="drop")

        record = sample_dream.Record(
            state.record.step_BL,
            write(state.record.token_BL, token_BN),
            write(state.record.logp_BL, logp_BN),
            jax.tree.map(write, state.record.likely, likely),
        )
        state = State(write(state.token_BL, token_BN), record, state.step, cache)
        state = sample_dream.settle(state, given, model.cfg.mask_id, self.rule.eos_ids)
        return state._replace(step=state.step + 1)


def fill_block(params, state, given, *, sampler, width):
    """Fill a block of each row: its first pass feeds `width` slots from given.start_B on. A
    State.
    """
    state, masks_B = first_pass(params, state, given, sampler=sampler, width=width)
    N = sampler.rule.block_length
    if N == 1:  # the first pass has filled it
        return state
    return other_passes(params, state, given, masks_B, 0, N, sampler=sampler)


# Two programs, as the first pass over the first block feeds more slots than that over a later one: in
# a single program the layers of all other passes would be compiled for both.


@functools.partial(jax.jit, static_argnames=("sampler", "width"), donate_argnames=("state",))
def first_pass(params, state, given, *, sampler, width):
    """The first pass of a block: (State, masks of the block when its schedule begins [B])."""
    model = nnx.merge(sampler.graph, params)
    seeds = model.cfg.causal
    masks_B = sampler.masked(model, state, given).sum(-1)
    state = sampler.step(model, state, given, given.start_B, width, masks_B, jnp.int32(0), seeds)
    if seeds:
        masks_B = sampler.masked(model, state, given).sum(-1)
    # The texts of all rows go to every host, which could not read those of another one's devices.
    return sample_dream.split((state, masks_B))


@functools.partial(jax.jit, static_argnames="sampler", donate_argnames=("state",))
def other_passes(params, state, given, masks_B, begin, end, *, sampler):
    """Passes begin .. end - 1 of a block after its first, until it is full: a State."""
    model = nnx.merge(sampler.graph, params)
    width = sampler.rule.block_length + model.cfg.shift
    start_B = jnp.maximum(given.first_B - model.cfg.shift, 0)

    def step(carry):
        state, i = carry
        # the first pass of a causal model is none of the schedule's
        number = i + (not model.cfg.causal)
        state = sampler.step(model, state, given, start_B, width, masks_B, number)
        return state, i + 1

    def unfinished(carry):
        state, i = carry
        return (i < end) & sampler.masked(model, state, given).any()

    state, _ = jax.lax.while_loop(unfinished, step, (state, begin))
    return sample_dream.split(state)


def counts(rule):
    """Tokens that each step of a block fills, by how many of it are masked at first [N + 1, S]."""
    N = rule.block_length
    steps = min(rule.steps, N) or N
    count_MS = np.ones((N + 1, N), np.int32)  # after the schedule one a step
    for masks in range(1, N + 1):
        if rule.schedule == "sdar":
            count_S = diffusion.step_counts(N, steps, "even")
        else:
            count_S = diffusion.step_counts(masks, min(steps, masks), rule.schedule)
        count_S = count_S[count_S > 0]
        count_MS[masks, : len(count_S)] = count_S
    return count_MS


def prepare(cfg, rule, prompts, rows=0, width=0, key=None, dtype=jnp.float32):
    """(State, Given, slots that the first pass feeds) of prompts that end in MASKs, before anything
    is filled.

    The first pass is over the prompts and a block. With a width it is over all slots, and these are
    as many for all texts up to that width.
    """
    N = rule.block_length
    begins = [[*ids, cfg.mask_id].index(cfg.mask_id) for ids in prompts]
    for ids, begin in zip(prompts, begins, strict=True):
        if set(ids[begin:]) - {cfg.mask_id}:
            raise ValueError(
                "a model of blocks does not see the text after a hole; put the text before the "
                "hole, or use a Dream without blocks"
            )
    B = max(rows, len(prompts))
    without_text = 0, B - len(prompts)
    end_B = np.pad([len(ids) for ids in prompts], without_text)
    begin_B = np.pad(begins, without_text)
    if not cfg.causal:  # after a causal prompt blocks begin anywhere
        begin_B = begin_B // N * N
    if max(end_B) > cfg.positions:
        raise ValueError(
            f"{max(end_B)} tokens do not fit: the model reaches {cfg.positions} positions; "
            "lower max_new"
        )

    prefix = max(2 * N, int(begin_B.max()) + N)
    needed = max(prefix, int(end_B.max()) + N)
    if width:
        needed = max(needed, width + 2 * N)
    L = sample_dream.canvas_width(needed, 1 << 30)
    prefix = L if width else min(sample_dream.canvas_width(prefix, 1 << 30), L)
    token_BL = np.full((B, L), cfg.pad_id, np.int32)
    for row, ids in zip(token_BL, prompts, strict=False):
        row[: len(ids)] = ids
    see_BL = np.arange(L) < end_B[:, None]
    id_V = np.arange(cfg.vocab)
    given = Given(
        see_BL=see_BL,
        made_BL=(token_BL == cfg.mask_id) & see_BL,
        block_BL=np.broadcast_to(np.arange(L) // (1 if cfg.causal else N), (B, L)),
        first_B=begin_B,
        start_B=0 * begin_B,
        count_MS=counts(rule),
        banned_V=np.isin(id_V, (cfg.mask_id, cfg.expand_id)) | (id_V >= (rule.vocab or cfg.vocab)),
        key_B=sample_dream.keys_of_rows(key, B),
        bound=rule.threshold or rule.entropy_bound,
    )
    shape = B, cfg.kv_heads, L, cfg.head_size
    cache = [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(cfg.layers)]
    record = sample_dream.new_record(token_BL, rule.likeliest)
    return State(token_BL, record, np.int32(0), cache), given, prefix


def sampler_of(graph, rule):
    """The Sampler of a rule, without the values that `Given` holds: changing these compiles no new
    program.
    """
    same = dataclasses.replace(
        rule,
        steps=0,
        schedule="block",
        vocab=0,
        # of these it only matters whether they are set
        threshold=float(rule.threshold > 0),
        entropy_bound=float(rule.entropy_bound > 0),
    )
    return Sampler(graph, same)


def steps(model, prompts, max_new, rule=None, key=None, widths=(), rows=0, by_block=False):
    """Generate as `generate` does, and yield a sample_dream.Step after each forward pass, or with
    by_block after each block, which one compiled loop fills: what stands before the first MASK of a
    text stays as it is. The last state comes once more, with the stats of `generate`.
    """
    cfg = model.cfg
    rule = rule or Sampling()
    N = rule.block_length or cfg.block_length
    if not N:
        raise ValueError(
            "the model has no blocks: sample_dream.generate samples from it, or set block_length"
        )
    rule = dataclasses.replace(rule, block_length=N)
    prompts = [[*ids, *[cfg.mask_id] * max_new] for ids in prompts]
    width = next((width for width in widths if width >= max(map(len, prompts))), 0)
    state, given, prefix = prepare(cfg, rule, prompts, rows, width, key, model.compute.dtype)
    graph, params = nnx.split(model)
    sampler = sampler_of(graph, rule)

    # Block after block; a row that is done repeats its last.
    begun = []
    windows = []
    begin_B = given.first_B
    last_B = begin_B + np.maximum(given.see_BL.sum(1) - begin_B - 1, 0) // N * N
    for i in range(max((last_B - begin_B) // N) + 1):
        if not ((np.asarray(state.token_BL) == cfg.mask_id) & given.see_BL).any():
            break
        begun.append(int(state.step))
        first_B = np.minimum(begin_B + i * N, last_B)
        start_B = 0 * first_B
        width = prefix
        if i > 0:
            start_B = np.maximum(first_B - N, 0)
            # with the shift (N == 1 == True) the token before fills a block of one, whose mask
            # nothing reads
            width = N if cfg.causal or N == cfg.shift else 2 * N
        given = given._replace(first_B=first_B.astype(np.int32), start_B=start_B.astype(np.int32))
        state = sample_dream.beside(params, state)
        if by_block:
            state = fill_block(params, state, given, sampler=sampler, width=width)
            yield step_of(state, prompts)
        else:
            for now in steps_of_block(params, state, given, sampler, width, cfg):
                state = now
                yield step_of(state, prompts)
        windows += [width] + [N + cfg.shift] * (int(state.step) - len(windows) - 1)

    record = jax.tree.map(np.asarray, state.record)
    number = int(state.step)
    stats = {
        "forwards": number,
        "steps": number,
        "passes": [number] * len(prompts),
        "begun": begun,
        "windows": windows,
        "record": record,
        "when": record.step_BL + 1,
        "probability": np.exp(record.logp_BL),
    }
    yield step_of(state, prompts)._replace(stats=stats)


def steps_of_block(params, state, given, sampler, width, cfg):
    """The states after each step of a block: those of fill_block."""
    slot_BN = given.first_B[:, None] + np.arange(sampler.rule.block_length)
    state, masks_B = first_pass(params, state, given, sampler=sampler, width=width)
    for i in itertools.count():
        yield state
        masked_BL = (np.asarray(state.token_BL) == cfg.mask_id) & given.see_BL
        if not np.take_along_axis(masked_BL, slot_BN, 1).any():
            return
        state = other_passes(params, state, given, masks_B, i, i + 1, sampler=sampler)


def step_of(state, prompts):
    """The sample_dream.Step of a state."""
    token_BL = np.asarray(state.token_BL)
    prob_BL = np.exp(np.asarray(state.record.logp_BL))
    rows = [token_BL[i, : len(ids)].tolist() for i, ids in enumerate(prompts)]
    probability = [prob_BL[i, : len(ids)].tolist() for i, ids in enumerate(prompts)]
    number = int(state.step)
    return sample_dream.Step(number, number, rows, probability)


def generate(model, prompts, max_new, rule=None, key=None, widths=(), rows=0):
    """Continue prompts (lists of ids, any lengths) with max_new tokens each: (rows of ids, stats).

    A prompt may end in MASKs already. The batch has the first of the widths that holds its longest
    text: with the same widths and rows other prompts need no other program.
    stats: "forwards", "steps", "passes" (of each row), "begun" (steps before each block), "windows"
    (slots fed in each pass); and NumPy arrays [B, L]: "record", a Record, "when", the step that
    wrote a token, from 1 on, and "probability", its probability then. Raises ValueError for what
    does not fit.
    """
    *_, last = steps(model, prompts, max_new, rule, key, widths, rows, by_block=True)
    return last.rows, last.stats


def fill(model, token_BL, see_BL, rule, key):
    """Fill the MASKs after left-padded prompts: (token_BL, stats of `generate`, whose texts begin
    at slot 0, but for the record, which lies as token_BL).

    see_BL is False at padding. All canvases of one width take one program.
    """

    def beside_padding(rows, padding):
        texts = [row[:n] for row, n in zip(rows, see_BL.sum(-1), strict=True)]
        array_BL = np.full(token_BL.shape, padding)
        array_BL[see_BL] = np.concatenate(texts)
        return array_BL

    prompts = [row[see].tolist() for row, see in zip(token_BL, see_BL, strict=True)]
    rows, stats = generate(model, prompts, 0, rule, key, widths=(token_BL.shape[1],))
    step_BL, drawn_BL, logp_BL, _ = stats["record"]
    pad_id = model.cfg.pad_id
    record = sample_dream.Record(
        beside_padding(step_BL, -1),
        beside_padding(drawn_BL, pad_id),
        beside_padding(logp_BL, 0.0),
    )
    return beside_padding(rows, pad_id), stats | {"record": record}
