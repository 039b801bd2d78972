"""Sampling from a Dream of blocks (--block_length of train_tpu.py): block after block, behind an exact cache.

    model, _ = checkpoints.load(model_dream, "out/blocks")
    rows, stats = sample_block.generate(model, [[5, 6, 7]], 256, sample_block.Sampling(threshold=0.9))

A token sees its own block and those before it, so the keys and values of a finished block never change. A block's first
pass feeds the finished block before it as well: that writes the final keys and values of this one into the cache, and
is the first denoising step of the new one. The further steps feed the new block alone, and the token before it, whose
hidden state predicts the first of the block. Rows begin at slot 0, each with blocks of its own, so that a row of a
batch is what it is alone. How positions are chosen is explained in sample_dream.py.

Letters: B rows, L slots, N tokens of a block, W slots of a window, D width, V vocabulary, S denoising steps.
Refs: BD3-LM, arXiv:2503.09573; Fast-dLLM v2, arXiv:2509.26328; entropy bound: EB-Sampler, arXiv:2505.24857.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import diffusion
import model_dream as md
import sample_dream


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a block is filled: by a schedule of `steps`, a threshold that may write more, or an entropy bound."""

    block_length: int = 0  # 0: the model's
    steps: int = 0  # denoising steps of a block; 0: one for each token
    schedule: typing.Literal["block", "even"] = "block"  # tokens of each step, see diffusion.step_counts
    threshold: float = 0.0  # write all tokens of more than this probability, as many as the schedule says at least
    score: typing.Literal["drawn", "distribution"] = "drawn"  # whose probability counts: the drawn token's, the largest
    entropy_bound: float = 0.0  # write the surest, while the entropies of those before add up to at most this; 0: steps
    sub_block: int = 0  # write so many places of a block before the next ones; 0: all are open
    first_argmax: bool = False  # a block's first token is its likeliest, before the first step: as Fast-dLLM v2
    border: typing.Literal["text", "prompt"] = "text"  # blocks are counted from the text's start | behind the prompt
    full: bool = False  # the last block is filled as a whole, although the text ends within
    temperature: float = 0.0  # 0 takes the likeliest token
    top_p: float = 1.0  # a token goes if those before it have more than top_p; 1 keeps all
    top_k: int = 0  # keep the k likeliest tokens; 0 keeps all
    vocab: int = 0  # ids from here on have no token and are never drawn; 0 allows all rows
    eos_ids: tuple[int, ...] = ()  # each ends a text if nothing before it is MASK; eos_ids[0] fills up what follows
    record: bool = False  # the record's log p is after the temperature, for training; else what the model says itself

    def __post_init__(self):
        wrong = {
            "threshold and entropy_bound do not go together": self.threshold and self.entropy_bound,
            "sub_block needs a threshold or an entropy bound": self.sub_block
            and not (self.threshold or self.entropy_bound),
            "threshold and top_p lie in [0, 1] and (0, 1]": not (0 <= self.threshold <= 1 and 0 < self.top_p <= 1),
            "a setting is below 0": min(v for v in vars(self).values() if isinstance(v, int | float)) < 0,
        }
        if any(wrong.values()):
            raise ValueError("; ".join(message for message, is_wrong in wrong.items() if is_wrong))


def settings_of(rule):
    """A sample_dream.Sampling as one of blocks. ValueError for what only the filling of a canvas has."""
    names = "alg_temp", "cache", "fast_dllm", "eos_penalty", "block_add", "credit", "stable_steps"
    foreign = [name for name in names if getattr(rule, name)]
    foreign += [f"order by {rule.alg}"] * (rule.alg not in ("entropy", "maskgit_plus"))
    if foreign:
        raise ValueError(f"a model of blocks is filled without {', '.join(foreign)}: leave it out")
    shared = "block_length", "steps", "threshold", "score", "entropy_bound", "temperature", "top_p", "top_k"
    shared += "vocab", "eos_ids", "record"
    return Sampling(**{name: getattr(rule, name) for name in shared})


class State(typing.NamedTuple):
    """What a denoising step changes."""

    token_BL: jax.Array
    record: sample_dream.Record  # when each token was drawn, and how likely it was
    step: jax.Array  # steps done
    forwards: jax.Array  # passes of the model
    cache: list  # (keys, values) [B, J, L, K] of each layer

    @property
    def prob_BL(self):
        """What the model gave to a token when it was written, 1 for those given."""
        return jnp.exp(self.record.logp_BL)


class Given(typing.NamedTuple):
    """What stays as it is while a block is filled. Arrays, so that another value needs no other program."""

    see_BL: jax.Array  # False behind the end of a text
    made_BL: jax.Array  # masked at the start
    block_BL: jax.Array  # the block of each slot
    first_B: jax.Array  # the first slot of the block that is filled now
    start_B: jax.Array  # the first slot that its first pass feeds
    count_MS: jax.Array  # tokens that step s of a block with m masks at its start writes
    banned_V: jax.Array  # ids that are never drawn
    key_B: jax.Array  # a random key for each row
    bound: float  # the threshold, or the entropy bound


@dataclasses.dataclass(frozen=True)
class Sampler:
    """What the compiled programs know when they are compiled. watch(state) is traced and runs after every step."""

    graph: typing.Any  # model_dream.graph_of: the model without its parameters
    rule: Sampling
    watch: typing.Callable | None = None

    def masked(self, model, state, given):
        """The masked positions of the block [B, N], and all slots of the block."""
        slot_BN = given.first_B[:, None] + jnp.arange(self.rule.block_length)
        of_block = lambda x_BL: jnp.take_along_axis(x_BL, slot_BN, 1)  # noqa: E731
        return of_block((state.token_BL == model.cfg.mask_id) & given.see_BL), slot_BN

    def feed(self, model, state, given, start_B, width):
        """A pass over `width` slots of each row from start_B on: their hidden states, and the state with their keys."""
        slot_BW = start_B[:, None] + jnp.arange(width)
        of_window = lambda x_BL: jnp.take_along_axis(x_BL, slot_BW, 1)  # noqa: E731
        keys = diffusion.Place(given.see_BL.astype(jnp.int32), given.block_BL)
        queries = diffusion.Place(*map(of_window, keys[:2]))
        tokens_BW = of_window(state.token_BL)
        hidden_BWD, cache = model.hidden(tokens_BW, slot_BW, None, state.cache, start_B, queries, keys)
        return hidden_BWD, state._replace(cache=cache, forwards=state.forwards + 1)

    def propose(self, model, hidden_BWD, start_B, given, slot_BN, i):
        """What would be written in step i, how sure the model itself is of it, and its log p for the record: (token_BN,
        prob_BN, entropy_BN, logp_BN).
        """
        rule = self.rule
        # The logits of the token at p come from the hidden state at p - 1; a text without prompt begins with its own.
        source_BN = slot_BN - (slot_BN > 0) * model.cfg.shift - start_B[:, None]
        logits_BNV = model.logits(jnp.take_along_axis(hidden_BWD, source_BN[..., None], 1))
        logits_BNV = jnp.where(given.banned_V, -jnp.inf, logits_BNV)
        prob_BNV = diffusion.softmax(logits_BNV)  # unfiltered: top-k of 1 would make every token look sure
        model_BNV, u_BNV = logits_BNV, None
        if rule.temperature:

            def uniform(key, slot):  # of row, step and slot alone, whatever the batch
                key = jax.random.fold_in(jax.random.fold_in(key, i), slot)
                return jax.random.uniform(key, prob_BNV.shape[-1:], minval=jnp.finfo(jnp.float32).tiny)

            u_BNV = jax.vmap(jax.vmap(uniform, (None, 0)))(given.key_B, slot_BN)
            width = 1 if model.run.on_cpu else 3
            filters = rule.temperature, rule.top_k, rule.top_p
            logits_BNV = diffusion.filter_logits(logits_BNV, *filters, rule="dream", width=width)
        token_BN = diffusion.sample_tokens(logits_BNV, u_BNV, 1.0 if rule.temperature else 0).astype(jnp.int32)
        of_token = lambda x_BNV: jnp.take_along_axis(x_BNV, token_BN[..., None], -1)[..., 0]  # noqa: E731
        prob_BN = of_token(prob_BNV)
        logp_BN = jnp.log(prob_BN)
        if rule.record and rule.temperature:
            logp_BN = of_token(diffusion.log_softmax(model_BNV / rule.temperature))
        if rule.score == "distribution":  # where is written then does not depend on what is drawn
            prob_BN = prob_BNV.max(-1)
        return token_BN, prob_BN, -diffusion.confidence(prob_BNV, "entropy"), logp_BN

    def choose(self, masked_BN, prob_BN, entropy_BN, given, masks_B, i):
        """The positions [B, N] that step i of the block writes."""
        rule, N = self.rule, masked_BN.shape[1]
        if rule.sub_block:  # the first one that has a mask
            sub_N = jnp.arange(N) // rule.sub_block
            masked_BN &= sub_N == jnp.where(masked_BN, sub_N, N).min(-1, keepdims=True)
        if rule.entropy_bound:
            return diffusion.entropy_bound(entropy_BN, masked_BN, given.bound)
        count_B = given.count_MS[masks_B, jnp.minimum(i, given.count_MS.shape[1] - 1)]
        if rule.threshold:
            count_B = jnp.maximum(count_B, (masked_BN & (prob_BN > given.bound)).sum(-1))
        return diffusion.surest(prob_BN, masked_BN, count_B)

    def step(self, model, state, given, start_B, width, masks_B, i):
        """Step i of a block: a pass, and what it is surest of written. Of first_argmax the step -1 writes one token."""
        hidden_BWD, state = self.feed(model, state, given, start_B, width)
        masked_BN, slot_BN = self.masked(model, state, given)
        token_BN, prob_BN, entropy_BN, logp_BN = self.propose(model, hidden_BWD, start_B, given, slot_BN, i)
        written_BN = self.choose(masked_BN, prob_BN, entropy_BN, given, masks_B, i)
        if self.rule.first_argmax:
            first_BN = masked_BN & (jnp.arange(slot_BN.shape[1]) == 0)
            written_BN = jnp.where(i < 0, first_BN, written_BN)
        # Write into the rows, and into the record.
        row_B1, step = jnp.arange(len(slot_BN))[:, None], state.step + (i >= 0)
        at_BN = jnp.where(written_BN, slot_BN, state.token_BL.shape[1])  # out of the row: dropped
        put = lambda x_BL, new_BN: x_BL.at[row_B1, at_BN].set(new_BN, mode="drop")  # noqa: E731
        token_BL, record = put(state.token_BL, token_BN), map(put, state.record, (step - 1, token_BN, logp_BN))
        record = sample_dream.Record(*record)
        # An end token ends its row if nothing is masked before it; the masks behind it need no pass.
        if self.rule.eos_ids:
            mask_BL = (token_BL == model.cfg.mask_id) & given.see_BL
            eos_BL = given.made_BL & jnp.isin(token_BL, jnp.array(self.rule.eos_ids))
            ended_BL = jnp.cumsum(eos_BL & (jnp.cumsum(mask_BL, -1) == 0), -1) > 0
            behind_BL = ended_BL & ~eos_BL & given.made_BL
            token_BL = jnp.where(behind_BL, self.rule.eos_ids[0], token_BL)
            step_BL = jnp.where(behind_BL & (record.step_BL < 0), step - 1, record.step_BL)
            record = record._replace(step_BL=step_BL)
        state = state._replace(token_BL=token_BL, record=record)
        if self.watch:
            self.watch(state)
        return state._replace(step=step)


@functools.partial(jax.jit, static_argnames=("sampler", "width"), donate_argnames=("state",))
def fill_block(params, state, given, *, sampler, width):
    """Fill a block of each row: its first pass feeds `width` slots from given.start_B on. A State."""
    model, N = nnx.merge(sampler.graph, params), sampler.rule.block_length
    masks_B, first = sampler.masked(model, state, given)[0].sum(-1), -1 if sampler.rule.first_argmax else 0
    state = sampler.step(model, state, given, given.start_B, width, masks_B, jnp.int32(first))
    start_B = jnp.maximum(given.first_B - 1, 0)

    def step(carry):
        state, i = carry
        return sampler.step(model, state, given, start_B, N + 1, masks_B, i), i + 1

    def unfinished(carry):
        return sampler.masked(model, carry[0], given)[0].any()

    state = jax.lax.while_loop(unfinished, step, (state, jnp.int32(first + 1)))[0]
    # The texts of all rows go to every host, which could not read those of another one's devices.
    return state._replace(token_BL=md.shard(state.token_BL), record=jax.tree.map(md.shard, state.record))


def layout(cfg, rule, prompts, rows, width):
    """(token_BL, end_B, begin_B, block_BL, slots that the first pass feeds) of prompts that end in MASKs.

    begin_B is the first slot of each row's first block with a MASK, end_B the end of its text. The first pass is over
    the prompts and a block. With a width it is over all slots, and these are as many for all texts up to that width.
    """
    N, mask = rule.block_length, cfg.mask_id
    given_B = np.array([len(ids) if mask not in ids else ids.index(mask) for ids in prompts])
    if any(set(ids[n:]) - {mask} for ids, n in zip(prompts, given_B, strict=True)):
        advice = "put the text before the hole, or use a Dream without blocks"
        raise ValueError(f"a model of blocks does not see the text behind a hole; {advice}")
    end_B = np.array([len(ids) for ids in prompts])
    if max(end_B) > cfg.positions:
        raise ValueError(f"{max(end_B)} tokens do not fit: the model reaches {cfg.positions} positions")
    border_B = given_B if rule.border == "prompt" else 0 * given_B  # what blocks are counted from
    begin_B = border_B + (given_B - border_B) // N * N
    if rule.full:
        end_B = np.where(end_B > given_B, begin_B + -(-(end_B - begin_B) // N) * N, end_B)
    prefix = max(2 * N, int(begin_B.max()) + N)
    needed = max(prefix, int(end_B.max()) + N)
    L = sample_dream.canvas_width(max(needed, width + 2 * N if width else 0), 1 << 30)
    prefix = L if width else min(sample_dream.canvas_width(prefix, 1 << 30), L)
    token_BL = np.full((max(rows, len(prompts)), L), cfg.pad_id, np.int32)
    pad = (0, len(token_BL) - len(prompts))  # rows of padding
    end_B, begin_B, border_B = (np.pad(x, pad) for x in (end_B, begin_B, border_B))
    for row, ids, end in zip(token_BL, prompts, end_B, strict=False):
        row[:end] = mask
        row[: len(ids)] = ids
    # The prompt is a block, or a part of the first ones.
    block_BL = (np.arange(L) - border_B[:, None] + N) // N
    return token_BL, end_B, begin_B, np.maximum(block_BL, 0), prefix


def counts(rule):
    """Tokens that each step of a block writes, by how many of it are masked at first [N + 1, S]."""
    steps, masks_M = min(rule.steps, rule.block_length) or rule.block_length, np.arange(rule.block_length + 1)
    rows = [diffusion.step_counts(m, min(steps, m), rule.schedule) if m else [] for m in masks_M.tolist()]
    rows = [[n for n in row if n] for row in rows]
    return np.array([[*row, *[1] * (rule.block_length - len(row))] for row in rows], np.int32)


def prepare(cfg, rule, prompts, rows=0, width=0, key=None, dtype=jnp.float32):
    """(State, Given, slots that the first pass feeds) of prompts that end in MASKs, before anything is filled."""
    token_BL, end_B, begin_B, block_BL, prefix = layout(cfg, rule, prompts, rows, width)
    B, L = token_BL.shape
    see_BL = np.arange(L) < end_B[:, None]
    made_BL = (token_BL == cfg.mask_id) & see_BL
    id_V = np.arange(cfg.vocab)
    banned_V = np.isin(id_V, (cfg.mask_id, cfg.expand_id)) | (id_V >= (rule.vocab or cfg.vocab))
    key_B = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(0) if key is None else key))(jnp.arange(B))
    bound = rule.threshold or rule.entropy_bound
    given = Given(see_BL, made_BL, block_BL, begin_B, 0 * begin_B, counts(rule), banned_V, key_B, bound)
    # keys and values that are still empty
    kv = lambda: jnp.zeros((B, cfg.kv_heads, L, cfg.head_size), dtype)  # noqa: E731
    cache = [(kv(), kv()) for _ in range(cfg.layers)]
    record = sample_dream.Record(np.full((B, L), -1, np.int32), token_BL.copy(), np.zeros((B, L), np.float32))
    return State(token_BL, record, np.int32(0), np.int32(0), cache), given, prefix


def sampler_of(graph, rule, watch=None):
    """The Sampler of a rule, without what `Given` says already: that must not ask for another program."""
    fixed = {"steps": 0, "schedule": "block", "border": "text", "full": False, "vocab": 0}
    # of a bound it matters whether it is set
    fixed |= {"threshold": float(rule.threshold > 0), "entropy_bound": float(rule.entropy_bound > 0)}
    return Sampler(graph, dataclasses.replace(rule, **fixed), watch)


def generate(model, prompts, max_new, rule=None, key=None, widths=(), rows=0, watch=None, on_block=None):
    """Continue prompts (lists of ids, any lengths) with max_new tokens each: (rows of ids, stats).

    on_block is called after each block with the rows so far: what stands before their first MASK stays as it is.
    A prompt may end in MASKs already. The batch has the first of the widths that holds its longest text: with the same
    widths and rows other prompts need no other program.
    stats: "forwards", "steps", "begun" (steps before each block), "windows" (slots fed in each pass); and NumPy arrays
    [B, L]: "record", a Record, "when" and "probability", the step that wrote a token, from 1 on, and what it gave it.
    Raises ValueError for what does not fit.
    """
    cfg, rule = model.cfg, rule or Sampling()
    rule = dataclasses.replace(rule, block_length=rule.block_length or cfg.block_length)
    if not rule.block_length:
        raise ValueError("the model has no blocks: sample_dream.generate samples from it, or set block_length")
    if rule.temperature and key is None:
        raise ValueError("sampling needs a key: pass key=jax.random.key(seed)")
    N, prompts = rule.block_length, [[*ids, *[cfg.mask_id] * max_new] for ids in prompts]
    width = next((width for width in widths if width >= max(map(len, prompts))), 0)
    state, given, prefix = prepare(cfg, rule, prompts, rows, width, key, model.run.dtype)
    graph, params = nnx.split(model)
    sampler = sampler_of(graph, rule, watch)

    def texts_of(state):
        return [row[: len(ids)].tolist() for row, ids in zip(np.asarray(state.token_BL), prompts, strict=False)]

    # Block after block, of which a row that is done repeats its last.
    begun, windows, begin_B = [], [], given.first_B
    last_B = begin_B + np.maximum(given.see_BL.sum(1) - begin_B - 1, 0) // N * N
    for i in range(max((last_B - begin_B) // N) + 1):
        first_B = np.minimum(begin_B + i * N, last_B)
        if not ((np.asarray(state.token_BL) == cfg.mask_id) & given.see_BL).any():
            break
        begun.append(int(state.step))
        start_B, width = (np.maximum(first_B - N, 0), 2 * N) if i else (0 * first_B, prefix)
        given = given._replace(first_B=first_B.astype(np.int32), start_B=start_B.astype(np.int32))
        state = fill_block(params, sample_dream.place(state, params), given, sampler=sampler, width=width)
        windows += [width] + [N + 1] * (int(state.forwards) - len(windows) - 1)
        if on_block:
            on_block(texts_of(state))
    record = sample_dream.Record(*map(np.asarray, state.record))
    stats = {"forwards": int(state.forwards), "steps": int(state.step), "begun": begun}
    stats |= {"windows": windows, "record": record}
    stats |= {"when": record.step_BL + 1, "probability": np.exp(record.logp_BL)}
    return texts_of(state), stats


def fill(model, token_BL, see_BL, rule, key):
    """Fill the MASKs behind left-padded prompts, as sample_dream.fill: (token_BL, stats), "record" in the same columns.

    see_BL is False at padding. All canvases of one width take one program.
    """
    prompts = [row[see].tolist() for row, see in zip(token_BL, see_BL, strict=True)]
    rows, stats = generate(model, prompts, 0, rule, key, widths=(token_BL.shape[1],))
    there_BM = np.arange(stats["when"].shape[1]) < see_BL.sum(1)[:, None]  # on the left

    def on_the_right(x_BM, empty):
        x_BL = np.full(see_BL.shape, empty, x_BM.dtype)
        x_BL[see_BL] = x_BM[there_BM]
        return x_BL

    filled_BL = token_BL.copy()
    filled_BL[see_BL] = np.concatenate(rows)
    record = map(on_the_right, stats["record"], (-1, model.cfg.pad_id, 0))
    return filled_BL, stats | {"record": sample_dream.Record(*record)}
