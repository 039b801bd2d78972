"""Continuous batching: texts join and leave a batch between its steps. Asks a model.

    loop = batching.Loop(batching.Dream("out/diffucoder", rows=8, bits=8), queue=64)
    loop.start()
    ask = {"temperature": 0.2, "top_p": 0.95, "seed": 0, "stop": ["\\n\\n"]}
    row = batching.Row([*prompt_ids, *[None] * 64], ask, wake=on_step)
    loop.submit([row])  # then row.written grows, until row.ended is set

Each text becomes what it is alone. Temperature, top-p, schedule, bound and random numbers belong to
a row and are arrays of a compiled program: three for each canvas width of a Dream, four with
blocks, three of PythonCoder, one of them for short prompts; without blocks a row that is alone has
a program of its own. serve.py serves the loop by HTTP; this file knows no HTTP.

Letters: B rows, L slots of a canvas, M slots of a cache, D width, V vocabulary, N likeliest tokens.
"""

import dataclasses
import functools
import itertools
import logging
import sys
import threading
import time
import traceback
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import checkpoints
import diffusion
import generate_dream
import model_dream
import model_pythoncoder as pc
import prompts
import runs
import sample_block
import sample_dream

WIDTHS = 96, 192, 384, 768, 1536, 2048  # slots of a canvas or a cache, as far as the model reaches
LIKELIEST = 5  # tokens that are kept for each position
PASSES = 4  # forward passes of a PythonCoder between looks at who waits
LOG = logging.getLogger("unmask")


@dataclasses.dataclass(eq=False)
class Row:
    """A text that is generated: what was asked, and what there is of it so far."""

    ids: list  # tokens; None where the model generates
    # temperature, top_p, seed, stop; of a Dream also steps, threshold, entropy_bound, block_length
    ask: dict
    number: int = 0  # of this completion among those of one prompt and seed
    # slot: (id, log p, likeliest ids, their log p)
    written: dict = dataclasses.field(default_factory=dict)
    steps: list = dataclasses.field(default_factory=list)  # slots that each step wrote
    passes: int = 0  # forward passes that it took part in
    wake: typing.Callable = int  # called after each step
    ended: str = ""  # stop, length or error
    error: Exception | None = None
    gone: bool = False  # nobody waits for it any more
    compiling: bool = False  # its batch is the first of its kind

    @functools.cached_property
    def holes(self):
        """The number of its runs of masks."""
        return sum(masked for masked, _ in itertools.groupby(token is None for token in self.ids))

    def write(self, tokens, passes=1):
        """Add {slot: (id, log p, likeliest ids, their log p)}, which a step wrote."""
        self.written |= tokens
        if tokens:
            self.steps.append([*tokens])
        self.passes += passes

    def completion(self, ends):
        """(slots of the completion so far, up to its first mask; whether an end token stands
        there).
        """
        slots = []
        for slot in (slot for slot, token in enumerate(self.ids) if token is None):
            if slot not in self.written or self.written[slot][0] in ends:
                return slots, slot in self.written
            slots.append(slot)
        return slots, False


def filters_of(rows):
    """What diffusion.filter_logits takes for rows: temperature or 1, top_p, and whether it draws,
    [B, 1, 1] each.
    """
    temperature_B11, top_p_B11 = np.ones((2, len(rows), 1, 1), np.float32)
    draws_B11 = np.zeros((len(rows), 1, 1), bool)
    for i, row in enumerate(rows):
        if row:
            draws_B11[i] = row.ask["temperature"] > 0
            temperature_B11[i] = row.ask["temperature"] or 1
            top_p_B11[i] = max(row.ask["top_p"], 1e-9)
    top_p_B11[top_p_B11 >= 1] = 2  # keeps all
    return temperature_B11, top_p_B11, draws_B11


def key_of(row):
    """The data of a row's random key; for a Dream that of generate_dream.py --seed --n."""
    return key_data(row.ask["seed"] % (1 << 31), row.number)


@jax.jit
def key_data(seed, number):
    _, key = jax.random.split(jax.random.key(seed))
    return jax.random.key_data(jax.random.fold_in(key, number))


def tokens_at(state, i, slots, first=0):
    """What Row.write takes of slots of row i; its text begins at slot `first`."""
    record = state.record
    ids_BLN, likely_BLN = record.likely
    tokens = {}
    for slot in slots.tolist():
        tokens[slot - first] = (
            state.token_BL[i, slot].item(),
            record.logp_BL[i, slot].item(),
            ids_BLN[i, slot].tolist(),
            np.maximum(likely_BLN[i, slot], -9999).tolist(),  # JSON has no infinity
        )
    return tokens


def forget(record, i, end):
    """Clear row i of a record: what an end fills is not drawn, and would keep what an earlier text
    had there.
    """
    logp_BL, (ids_BLN, likely_BLN) = record[2:]
    logp_BL[i], ids_BLN[i], likely_BLN[i] = 0, end, -np.inf
    likely_BLN[i, :, 0] = 0


def taken(rows):
    """The rows that a step computes: the first where it is alone, else all; a program for each."""
    return rows if any(rows[1:]) else rows[:1]


class Family:
    """A model and its batches, one for each canvas width and order of positions."""

    def __init__(self, module, folder, rows, bits=0, **how):
        self.model, _, mesh = checkpoints.load_for_inference(
            module, folder, rows=rows, bits=bits, **how
        )
        self.context = functools.partial(checkpoints.mesh_context, mesh)
        self.tokenizer = runs.read_tokenizer(folder, self.model.cfg.vocab)
        self.rows, self.vocab, self.batches = rows, self.tokenizer.get_vocab_size(), {}
        self.compiled = set()  # widths and orders of batches that there were
        self.positions = min(self.model.cfg.positions, WIDTHS[-1])
        self.widths = [*(width for width in WIDTHS if width < self.positions), self.positions]

    def batch(self, width, order):
        key = width, order
        if key not in self.batches:
            self.batches = {key: batch for key, batch in self.batches.items() if any(batch.rows)}
            self.batches[key] = self.Batch(self, width, order)
            self.batches[key].compiles = key not in self.compiled
            self.compiled.add(key)
        return self.batches[key]

    def width_of(self, row):
        return next(width for width in self.widths if width >= len(row.ids) + self.extra)

    def batch_of(self, row):
        order = next((order for order in self.ORDERS if row.ask.get(order)), "steps")
        return self.batch(self.width_of(row), order)


def rule_of(batch, kind, **settings):
    """The Sampling of a batch of a Dream: one program for each order, whatever its bound is."""
    if batch.order != "steps":
        settings[batch.order] = 1.0
    family = batch.family
    return kind(vocab=family.vocab, eos_ids=family.ends, likeliest=LIKELIEST, **settings)


# ---- Dream: canvases of one width, a denoising step at a time ------------------------------------


class Batch:
    """Rows of a model that are generated together, on canvases or caches of one width."""

    def __init__(self, family, width, order):
        self.family = family
        self.width = width
        self.order = order
        self.rows = [None] * family.rows


class Canvases(Batch):
    """Rows that are filled together. Each has a schedule, block, bound and filters of its own, so a
    step may be the first of one row and the last of another: fill_block() runs for a single step,
    with arrays that are set up here.
    """

    def __init__(self, family, width, order):
        super().__init__(family, width, order)
        cfg = family.model.cfg
        rule = rule_of(self, sample_dream.Sampling, history=True)
        empty_BL = np.full((family.rows, width), cfg.pad_id, np.int32)
        self.state, given, _ = sample_dream.prepare(
            cfg, rule, empty_BL, np.ones(empty_BL.shape, bool)
        )
        # tokens that a step with a bound may fill
        most_B1 = np.full((family.rows, 1), width, np.int32)
        arrays = {
            name: np.array(getattr(given, name))
            for name in ("see_BL", "made_BL", "offset_BL", "key_B")
        }
        self.given = given._replace(steps=1, budget_BS=most_B1, **arrays)
        graph, self.params = nnx.split(family.model)
        self.sampler = sample_dream.sampler_of(graph, cfg, rule)

    def join(self, i, row):
        """Put a row on the right of canvas i."""
        given, state, cfg, ask = self.given, self.state, self.family.model.cfg, row.ask
        ids = [cfg.mask_id if token is None else token for token in row.ids]
        (state.token_BL[i],), (given.see_BL[i],) = sample_dream.canvas([ids], 0, cfg, self.width)
        given.made_BL[i] = given.see_BL[i] & (state.token_BL[i] == cfg.mask_id)
        given.offset_BL[i] = np.maximum(np.arange(self.width) - (self.width - len(ids)), 0)
        given.key_B[i] = key_of(row)
        state.step_B[i] = 0
        state.left_B[i] = 0
        forget(state.record, i, self.family.ends[0])
        # blocks from the first mask to the last, and the share of a block's masks that each of its
        # steps fills
        first, last = np.flatnonzero(given.made_BL[i])[[0, -1]]
        size = ask.get("block_length") or self.width
        row.blocks = [
            (max(0, min(begin, self.width - size)), size) for begin in range(first, last + 1, size)
        ]
        steps = (
            -(-ask["steps"] // len(row.blocks))
            if ask.get("steps")
            else min(size, row.ids.count(None))
        )
        row.shares, row.at = diffusion.dream_shares(steps), 0

    def step(self):
        """A denoising step: each row fills what its own schedule or bound says, of its own
        block.
        """
        rows = taken(self.rows)
        B, index_B = len(rows), np.arange(len(rows))
        old, cfg = self.state, self.family.model.cfg
        first_B1, size_B1 = np.zeros((2, B, 1), np.int32)
        bound_B1, share_1B = np.ones((B, 1), np.float32), np.zeros((1, B), np.float32)
        for i, row in enumerate(rows):
            if row is None:
                old.token_BL[i] = cfg.pad_id
                continue
            first, size = row.blocks[0]
            if not (old.token_BL[i, first : first + size] == cfg.mask_id).any():
                row.blocks, row.at = row.blocks[1:], 0
            first_B1[i], size_B1[i] = row.blocks[0]
            share_1B[0, i], row.at = row.shares[min(row.at, len(row.shares) - 1)], row.at + 1
            bound_B1[i] = row.ask.get(self.order) or 0
        arrays = {"first": first_B1, "size": size_B1, "bound": bound_B1, "share_S": share_1B}
        arrays |= {"begun": old.step, "filters": filters_of(rows)}
        given = self.given.of_rows(index_B)._replace(**arrays)
        on_device = sample_dream.beside(self.params, old.of_rows(index_B))
        new = sample_dream.fill_block(
            self.params, on_device, given, sampler=self.sampler, width=self.width
        )
        self.state = new = old.with_rows(index_B, jax.tree.map(np.array, new))
        written_BL = (old.token_BL == cfg.mask_id) & (new.token_BL != cfg.mask_id)
        for i, row in enumerate(rows):
            if row:
                tokens = tokens_at(new, i, np.flatnonzero(written_BL[i]), self.width - len(row.ids))
                row.write(tokens, int(new.forwards - old.forwards))


class Blocks(Batch):
    """Rows of a Dream of blocks: a step fills a block of each, with an exact cache. Rows join
    between two blocks.
    """

    state = None

    def begin(self):
        """Make room for the cache; not before a row joins, as the device may have none left."""
        model = self.family.model
        cfg = model.cfg
        rule = rule_of(self, sample_block.Sampling, block_length=cfg.block_length)
        nothing = [[cfg.pad_id]] * len(self.rows)
        state, given, _ = sample_block.prepare(
            cfg, rule, nothing, width=self.width, dtype=model.compute.dtype
        )
        self.state = self.on_host(state)
        self.given = given._replace(
            **{name: np.array(x) for name, x in given._asdict().items() if name != "filters"}
        )
        self.graph, self.params = nnx.split(model)
        self.sampler = sample_block.sampler_of(self.graph, rule)

    def on_host(self, state):
        """The state with arrays of NumPy, which a row can join, but for the cache."""
        return jax.tree.map(np.array, state._replace(cache=[]))._replace(cache=state.cache)

    def join(self, i, row):
        """Put a row into the batch, with the keys and values of all its blocks that are
        finished.
        """
        if self.state is None:
            self.begin()
        given, state, cfg, length = self.given, self.state, self.family.model.cfg, len(row.ids)
        state.token_BL[i] = cfg.pad_id
        state.token_BL[i, :length] = [cfg.mask_id if token is None else token for token in row.ids]
        given.see_BL[i] = np.arange(given.see_BL.shape[1]) < length
        given.made_BL[i] = given.see_BL[i] & (state.token_BL[i] == cfg.mask_id)
        state.record.step_BL[i] = -1
        given.key_B[i] = key_of(row)
        forget(state.record, i, self.family.ends[0])
        given.first_B[i] = (
            row.ids.index(None) // (size := 1 if cfg.causal else cfg.block_length) * size
        )
        inputs = state.token_BL[i], given.see_BL[i], given.block_BL[i]
        self.state = state._replace(
            cache=prefill_blocks(self.params, state.cache, i, *inputs, graph=self.graph)
        )

    def step(self):
        """Fill a block of each row."""
        old, cfg, N = self.state, self.family.model.cfg, self.family.model.cfg.block_length
        bound_B1 = np.ones((len(self.rows), 1), np.float32)
        masked_BL = (old.token_BL == cfg.mask_id) & self.given.see_BL
        for i, row in enumerate(self.rows):
            if row is None:
                self.given.see_BL[i] = False
                continue
            bound_B1[i] = row.ask.get(self.order) or 0
            # the block of a mask
            self.given.first_B[i] += (masked_BL[i].argmax() - self.given.first_B[i]) // N * N
        start_B = np.maximum(self.given.first_B - N, 0)
        given = self.given._replace(start_B=start_B, bound=bound_B1, filters=filters_of(self.rows))
        on_device = sample_dream.beside(self.params, old)
        width = N if cfg.causal or N == cfg.shift else 2 * N  # as in sample_block.steps
        new = sample_block.fill_block(
            self.params, on_device, given, sampler=self.sampler, width=width
        )
        self.state = new = self.on_host(new)
        written_BL = masked_BL & (new.token_BL != cfg.mask_id)
        for i, row in enumerate(self.rows):
            if row:
                step_L = np.where(written_BL[i], new.record.step_BL[i], -1)
                for step in range(int(old.step), 1 + step_L.max()):
                    row.write(tokens_at(new, i, np.flatnonzero(step_L == step)))


@functools.partial(jax.jit, static_argnames="graph", donate_argnames="cache")
def prefill_blocks(params, cache, i, token_L, see_L, block_L, *, graph):
    """The cache with the keys and values of a text in row i; those of blocks that hold masks are
    overwritten.
    """
    model, slot_1L = nnx.merge(graph, params), jnp.arange(len(token_L))[None]
    place, start_B = (
        diffusion.Place(see_L[None].astype(jnp.int32), block_L[None]),
        jnp.zeros(1, jnp.int32),
    )
    empty = jax.tree.map(lambda x_BJLK: jnp.zeros_like(x_BJLK[:1]), cache)
    _, new = model.hidden(token_L[None], slot_1L, None, empty, start_B, place, place)
    return sample_dream.split(
        jax.tree.map(lambda all_rows, row: all_rows.at[i].set(row[0]), cache, new)
    )


class Dream(Family):
    """A Dream: canvases without a cache, or, if it was trained in blocks, blocks with one."""

    extra, defaults = 0, {"temperature": 0.2, "top_p": 0.95}
    # what says how many tokens a step writes; a program each
    ORDERS = "steps", "threshold", "entropy_bound"

    def __init__(self, folder, rows, bits=0, **how):
        super().__init__(model_dream, folder, rows, bits, **how)
        cfg = self.model.cfg
        self.Batch = Blocks if cfg.block_length else Canvases
        self.settings = {"threshold", "entropy_bound"} | (
            set() if cfg.block_length else {"steps", "block_length"}
        )
        self.tokenizer = sample_dream.load_tokenizer(folder, cfg)
        # the first one fills a text that ended
        self.ends = generate_dream.ends_of(cfg, self.tokenizer)
        self.wrap = prompts.chat_template(runs.as_path(folder))

    def check(self, ids, ask):
        if len(given := [order for order in self.ORDERS if ask.get(order)]) > 1:
            raise ValueError(f"{' and '.join(given)} do not go together")
        if (
            self.model.cfg.block_length
            and None in ids
            and ids[ids.index(None) :] != [None] * ids.count(None)
        ):
            raise ValueError("a model of blocks does not see the text after a hole")


# ---- PythonCoder: a cache, and a token of each row at a time -------------------------------------


class Caches(Batch):
    """Rows that are continued together."""

    def __init__(self, family, width, order):
        super().__init__(family, width, order)
        self.cache = None
        self.token_BM = np.zeros((family.rows, width), np.int32)
        self.length_B = np.ones(family.rows, np.int32)
        self.draft_B = np.zeros(family.rows, np.int32)
        self.key_B = np.zeros((family.rows, 2), np.uint32)

    def join(self, i, row):
        """Prefill the prompt of a row, but for its last token, which a step reads."""
        prompt = self.family.in_order(row.ids)
        self.length_B[i] = len(prompt)
        self.key_B[i] = key_of(row)
        self.token_BM[i] = [*prompt, *[0] * (self.width - len(prompt))]
        model = self.family.model
        cache = self.cache or sample_dream.beside(
            model, model.new_cache(len(self.rows), self.width)
        )
        read = self.width // 4  # slots: a second program, for short prompts
        if len(prompt) > read:
            read = self.width
        self.cache = prefill(self.family.weights, cache, i, self.token_BM[i, :read])

    def step(self):
        """The next tokens of each row."""
        rows = taken(self.rows)
        B = len(rows)
        asked = any(row and row.ask.get("logprobs", 0) is not None for row in rows)
        state = self.token_BM[:B], self.length_B[:B], self.draft_B[:B], self.key_B[:B]
        how = filters_of(rows), asked
        self.cache, self.draft_B[:B], new = advance(
            self.family.weights, self.cache, *state, *how, vocab=self.family.vocab
        )
        new = [np.asarray(x).tolist() for x in new]  # [B, PASSES, L, ..]
        for i, row in enumerate(rows):
            for tokens in zip(*(x[i] for x in new), strict=True) if row else ():
                if self.ended(i, row, zip(*tokens, strict=True)):
                    break

    def ended(self, i, row, tokens):
        """Give row i the tokens of a pass; whether it ends with one of them."""
        passes = 1
        for kept, *token in tokens:
            if not kept:
                break
            self.token_BM[i, self.length_B[i]] = token[0]
            self.length_B[i] += 1
            row.write({row.ids.index(None) + len(row.written): token}, passes)
            passes = 0
            if token[0] in self.family.ends or len(row.written) == row.ids.count(None):
                return True
        return False


class PythonCoder(Family):
    # extra slots: prefix, suffix, middle
    Batch, extra, defaults = Caches, 4, {"temperature": 0.6, "top_p": 0.95}
    ORDERS, settings, wrap = ("steps",), frozenset(), None

    def __init__(self, folder, rows, bits=0, **how):
        if bits:
            raise ValueError("--int8 is for a Dream")
        super().__init__(pc, folder, rows, **how)
        self.ends = runs.ends_of_text(folder, self.tokenizer)
        self.weights = self.model, pc.apart(self.model)

    def check(self, ids, ask):
        if Row(ids, ask).holes > 1:
            raise ValueError("the model fills one hole at a time")
        self.in_order(ids)

    def in_order(self, ids):
        """The prompt of a text with one run of masks: what stands after them comes before them."""
        first = ids.index(None)
        behind = [token for token in ids[first:] if token is not None]
        return prompts.in_order(self.tokenizer, ids[:first], behind) or [*self.ends, 0][:1]


@functools.partial(jax.jit, donate_argnames="cache")
def prefill(weights, cache, i, token_M):
    """The cache with the keys and values of a text in row i; those after its end are overwritten in
    their turn.
    """
    (model, layers), n = weights, len(token_M)
    _, new = model.step(model.new_cache(1, n), token_M[None], jnp.arange(n)[None], *layers)
    return jax.tree.map(lambda all_rows, row: all_rows.at[i, ..., :n, :].set(row[0]), cache, new)


@functools.partial(jax.jit, static_argnames="vocab", donate_argnames="cache")
def advance(weights, cache, token_BM, length_B, draft_B, key_B, filters, asked, *, vocab):
    """(cache, new drafts, (kept, id, log p, likeliest ids, their log p) of PASSES passes).

    As in pc.advance a pass reads the last token of each row and the draft of the next, and the
    second of its two tokens is kept where the first is the draft. `asked`: whether somebody wants
    to know log p. The rows are the first of the cache.
    """
    (model, layers), B = weights, len(length_B)
    row_B1 = jnp.arange(B)[:, None]
    L = 1 + model.cfg.mtp
    key_B = jax.random.wrap_key_data(key_B)
    temperature_B1, top_p_B1, draws_B1 = (x_B11[:, 0] for x_B11 in filters)
    width = 1 if jax.default_backend() == "cpu" else 3

    def draw(logits_BV, position_B):
        """As pc.draw, with the temperature and top_p of each row."""

        def drawn():
            kept_BV = diffusion.filter_logits(logits_BV, temperature_B1, 0, top_p_B1, "mdlm", width)
            u_BV = pc.uniform(key_B, position_B, kept_BV.shape[-1])
            # the same for all tokens: the argmax
            return diffusion.sample_tokens(kept_BV, jnp.where(draws_B1, u_BV, jnp.exp(-1.0)))

        def greedy():
            return diffusion.sample_tokens(logits_BV, None, 0)

        return jax.lax.cond(draws_B1.any(), drawn, greedy)

    def of_tokens(logits_BLV):
        return jnp.where(jnp.arange(logits_BLV.shape[-1]) < vocab, logits_BLV, -jnp.inf)

    def forward(carry, _):
        cache, token_BM, length_B, draft_B = carry
        index_BL = length_B[:, None] + jnp.arange(L)
        token_BM = token_BM.at[row_B1[:, 0], length_B].set(draft_B)
        inputs = token_BM[row_B1, index_BL - 1], index_BL - 1
        hidden_BLD, cache = model.step(cache, *inputs, *layers)
        logits_BLV = of_tokens(model.logits(hidden_BLD))
        drawn = []
        for i in range(L):
            # as generate.py --no_repeat_ngram
            allowed_BV = pc.without_repeats(logits_BLV[:, i], token_BM, length_B + i, 6)
            drawn.append(draw(allowed_BV, length_B + i))
        new_BL = jnp.stack(drawn, 1)
        kept_BL = jnp.stack([jnp.ones(B, bool), drawn[0] == draft_B], 1)[:, :L]
        token_BM = token_BM.at[row_B1, index_BL].set(new_BL)
        last_B1 = kept_BL.sum(-1, keepdims=True) - 1
        length_B += 1 + last_B1[:, 0]
        if model.cfg.mtp:
            hidden_B1D = hidden_BLD[row_B1, last_B1]
            logits_BV = model.draft(hidden_B1D, new_BL[row_B1, last_B1])[:, 0]
            draft_B = draw(of_tokens(logits_BV), length_B)

        def likeliest():
            logp_BLV = diffusion.log_softmax(logits_BLV)
            # JSON has no infinity
            likely_BLN, ids_BLN = jax.lax.top_k(jnp.maximum(logp_BLV, -9999), LIKELIEST)
            logp_BL1 = jnp.take_along_axis(logp_BLV, new_BL[..., None], -1)
            return logp_BL1[..., 0], ids_BLN, likely_BLN

        nothing = jax.tree.map(jnp.zeros_like, jax.eval_shape(likeliest))
        found = jax.lax.cond(asked, likeliest, lambda: nothing)
        return (cache, token_BM, length_B, draft_B), (kept_BL, new_BL, *found)

    of_rows = jax.tree.map(lambda all_rows: all_rows[:B], cache)
    carry, tokens = jax.lax.scan(forward, (of_rows, token_BM, length_B, draft_B), length=PASSES)
    new, *_, draft_B = carry
    cache = jax.tree.map(lambda all_rows, rows: all_rows.at[:B].set(rows), cache, new)
    return cache, draft_B, [x.swapaxes(0, 1) for x in tokens]


# ---- the loop that owns the device ---------------------------------------------------------------


def reported(error):
    """What a client is told of an error on the device; the traceback of one that is not a lack of
    memory is printed.
    """
    if runs.lacks_memory(error):
        return MemoryError("out of memory: ask for less, or try again")
    traceback.print_exception(error)
    return error


class Loop(threading.Thread):
    """Runs the batches of a model. Rows wait in a queue of this length until their batch has a free
    place.
    """

    def __init__(self, model, queue, warm=False):
        super().__init__(daemon=True)
        self.model = model
        self.queue = queue
        self.waiting = []
        self.changed = threading.Condition()
        self.closing = False
        with model.context():
            for width, order in itertools.product(model.widths, model.ORDERS if warm else ()):
                LOG.info("compiling for texts of %d tokens", width)
                batch = model.batch(width, order)
                # the fewest and the most rows, the shortest prompt and a long one; nobody waits
                for i, ids in ((0, [None]), (len(batch.rows) - 1, [0] * (width // 2) + [None])):
                    batch.rows[0] = None
                    batch.rows[i] = Row(ids, model.defaults | {"seed": 0})
                    batch.join(i, batch.rows[i])
                    batch.step()
                model.batches.clear()

    def submit(self, rows):
        """Queue rows. OverflowError if the queue is too short for them now, ValueError if it always
        is.
        """
        if len(rows) > self.queue:
            raise ValueError(f"{len(rows)} texts are more than the {self.queue} that may wait")
        with self.changed:
            self.waiting = [row for row in self.waiting if not row.gone]
            if len(self.waiting) + len(rows) > self.queue:
                raise OverflowError(
                    f"{len(self.waiting)} texts are waiting, at most {self.queue} may; "
                    "try again later"
                )
            self.waiting += rows
            self.changed.notify()

    def close(self):
        with self.changed:
            self.closing = True
            self.changed.notify()
        self.join(5)
        return not self.is_alive()

    def run(self):
        with self.model.context():
            while not self.closing:
                with self.changed:
                    self.changed.wait_for(lambda: self.running() or self.waiting or self.closing)
                    waiting = [row for row in self.waiting if not row.gone]
                taken = {row for row in waiting if self.admitted(row)}
                with self.changed:  # a row that waits counts until it has a place
                    self.waiting = [
                        row for row in self.waiting if not row.gone and row not in taken
                    ]
                for batch in self.running():
                    began = time.perf_counter()
                    self.attempt(batch, batch.step)
                    if batch.compiles:
                        batch.compiles = False
                        LOG.info(
                            "compiled for texts of %d tokens: %.1f s",
                            batch.width,
                            time.perf_counter() - began,
                        )

    def running(self):
        """The batches that have rows, when those that have ended or whose reader has gone have
        left; the others go when memory for another is needed.
        """
        for batch in self.model.batches.values():
            batch.rows = [None if row and (row.gone or row.ended) else row for row in batch.rows]
        return [batch for batch in self.model.batches.values() if any(batch.rows)]

    def admitted(self, row):
        """Whether a waiting row found a place in its batch."""
        try:
            batch = self.model.batch_of(row)
        except Exception as error:  # no memory for a new batch
            row.error, row.ended = reported(error), "error"
            row.wake()
            return True
        if free := None in batch.rows:
            i = batch.rows.index(None)
            batch.rows[i] = row
            row.compiling = batch.compiles
            row.wake()
            self.attempt(batch, functools.partial(batch.join, i, row))
        return free

    def attempt(self, batch, work):
        """Do work on the device. What fails ends the rows of the batch, and the next rows get a new
        one.
        """
        rows = [row for row in batch.rows if row]
        try:
            work()
            for row in rows:
                self.end_if_complete(row)
        except Exception as error:
            del self.model.batches[batch.width, batch.order]
            error = reported(error)
            for row in rows:
                row.error, row.ended = error, "error"
        for wake in {row.wake for row in rows}:
            wake()

    def end_if_complete(self, row):
        slots, ended = row.completion(self.model.ends)
        if row.ask["stop"]:
            text = self.model.tokenizer.decode([row.written[slot][0] for slot in slots])
            ended = ended or prompts.truncate(text, row.ask["stop"]) != text
        if len(row.written) == row.ids.count(None) or (ended and row.holes == 1):
            row.ended = "stop" if ended else "length"
