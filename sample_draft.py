"""Self-speculative decoding of a Dream: draft a block, verify it causally; the same text, in fewer
passes.

    model, _ = checkpoints.load(model_dream, "out/nemotron")    # finished tokens attend causally
    rows, stats = sample_draft.generate(model, [[5, 6, 7]], 256, sample_draft.Sampling(draft=8))

Where finished tokens attend causally, the model has two modes over the same keys: causal, and
bidirectional among MASKs after the last token. A step fills MASKs in the second mode (the drafts),
then verifies them in the first: that pass predicts the token of each slot, and its keys are final.
The longest prefix of drafts that equal the predictions stays, and the model's own next token
follows. With draft_steps=0 that pass also makes the next drafts, for each number of drafts that may
stay: a single pass, of drafts that do not see the token which follows.

A token is the argmax of its logits plus Gumbel noise, a function of the row's key and the slot
alone: drafts and verification use the same noise. What is written is always the verified token. So
the text of a key is the same for every length of drafts, none among them, in every batch, at every
temperature; in float32, but for near-ties.

Letters: B rows, L slots, N drafts, W slots of a pass, V vocabulary.
Refs: Nemotron-Labs-Diffusion's linear self-speculation; coupling, arXiv:2408.07978; one pass:
TiDAR, arXiv:2511.08923.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import diffusion
import sample_dream

STEPS = 16  # between two looks at the texts


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drafted and drawn."""

    draft: int = 0  # tokens drafted at a time; 0: token by token
    draft_steps: typing.Literal[0, 1] = 1  # passes that fill the drafts; 0: the pass that verifies
    temperature: float = 0.0  # 0 takes the argmax
    top_p: float = 1.0  # a token is dropped if those before it have more than top_p; 1 keeps all
    top_k: int = 0  # keep the k likeliest tokens; 0 keeps all
    vocab: int = 0  # ids from here on have no token and are never drawn; 0 allows all rows
    eos_ids: tuple[int, ...] = ()  # each ends a text; eos_ids[0] fills the rest


def check(cfg):
    if not cfg.autoregressive:
        raise ValueError(
            "drafts need a model whose finished tokens attend causally: train_dream.py --context=causal"
        )


def settings_of(rule, flags, cfg):
    """A sample_dream.Sampling as one of drafts. ValueError for a model, or settings, of which there
    are none.
    """
    check(cfg)
    foreign = "steps alg_temp threshold entropy_bound cache fast_dllm eos_penalty late_eos guidance sub_block".split()
    foreign = [x for x in foreign if getattr(rule, x)] + (
        ["block_length"] if rule.block_length > 1 else []
    )
    if foreign or (rule.alg, rule.schedule) != ("entropy", "dream"):
        raise ValueError(
            f"drafts and single tokens go without {', '.join(foreign or ['alg or schedule'])}"
        )
    shared = "temperature", "top_p", "top_k", "vocab", "eos_ids"
    return Sampling(
        flags.draft, flags.draft_steps, **{name: getattr(rule, name) for name in shared}
    )


class State(typing.NamedTuple):
    """What a step changes."""

    token_BL: jax.Array
    last_B: jax.Array  # the slot of the last token, whose keys are not written yet
    when_BL: jax.Array  # the step that wrote a token, from 1 on; 0 in the prompt
    prob_BL: jax.Array  # its probability then, in the model's own distribution
    draft_BN: jax.Array  # what the next pass verifies, if no pass of its own makes it
    step: jax.Array  # steps so far; the first one reads the prompts
    cache: list  # (keys, values) [B, J, L, K] of each layer


class Given(typing.NamedTuple):
    """What stays as it is. Arrays, so that another value needs no other program."""

    begin_B: jax.Array  # the first slot to write
    end_B: jax.Array  # one past the last
    banned_V: jax.Array  # ids that are never drawn
    key_B: jax.Array  # the data of a random key for each row


@dataclasses.dataclass(frozen=True)
class Sampler:
    """What a compiled program is made for."""

    graph: typing.Any  # model_dream.graph_of: the model without its parameters
    rule: Sampling

    def read(self, model, token_BW, place_BW, reach_BW, cache, seen_BWL=None):
        """(hidden states, cache with the tokens' keys); a token attends to slots up to its reach,
        where seen_BWL is.
        """
        shape_BL = len(token_BW), cache[0][0].shape[2]
        keys = diffusion.Place(
            jnp.ones(shape_BL, jnp.int32), jnp.broadcast_to(jnp.arange(shape_BL[1]), shape_BL)
        )
        queries = diffusion.Place(jnp.ones_like(token_BW), reach_BW, seen=seen_BWL)
        return model.hidden(token_BW, place_BW, None, cache, place_BW[:, 0], queries, keys)

    def draw(self, model, hidden_BWD, slot_BW, given):
        """(token, probability) [B, W] for the slots, each from one hidden state."""
        rule = self.rule
        logits_BWV = jnp.where(given.banned_V, -jnp.inf, model.logits(hidden_BWD))
        filtered_BWV, u_BWV = logits_BWV, None
        if rule.temperature:

            def uniform(key, slot):  # of row and slot, of no step, batch or draft
                key = jax.random.fold_in(jax.random.wrap_key_data(key), slot)
                return jax.random.uniform(
                    key, given.banned_V.shape, minval=jnp.finfo(jnp.float32).tiny
                )

            u_BWV = jax.vmap(jax.vmap(uniform, (None, 0)))(given.key_B, slot_BW)
            filters, width = (
                (rule.temperature, rule.top_k, rule.top_p),
                1 if model.compute.platform == "cpu" else 3,
            )
            filtered_BWV = diffusion.filter_logits(logits_BWV, *filters, rule="dream", width=width)
        token_BW = diffusion.sample_tokens(
            filtered_BWV, u_BWV, 1.0 if rule.temperature else 0
        ).astype(jnp.int32)
        return token_BW, jnp.take_along_axis(
            diffusion.softmax(logits_BWV), token_BW[..., None], -1
        )[..., 0]

    def drafted(self, model, token_B1, slot_BW, given, cache):
        """(drafts [B, N] after the last tokens, cache), by one pass over MASKs that see each other.

        With the shift the last token stays causal, as in training, and predicts the first draft.
        """
        N, shift = self.rule.draft, model.cfg.shift
        token_BW = jnp.pad(token_B1, ((0, 0), (0, N)), constant_values=model.cfg.mask_id)
        reach_BW = jnp.where((jnp.arange(N + 1) == 0) & shift, slot_BW, slot_BW[:, -1:])
        hidden_BWD, cache = self.read(model, token_BW, slot_BW, reach_BW, cache)
        hidden_BND = hidden_BWD[:, :-1] if shift else hidden_BWD[:, 1:]
        return self.draw(model, hidden_BND, slot_BW[:, 1:], given)[0], cache

    def step(self, model, state, given):
        """Draft, read the drafts, and write those that the reading repeats, and its next token."""
        N, (B, L), shift = self.rule.draft, state.token_BL.shape, model.cfg.shift
        slot_BN = state.last_B[:, None] + jnp.arange(N + 1)
        read_BW, cache, draft_BN = (
            jnp.take_along_axis(state.token_BL, slot_BN[:, :1], 1),
            state.cache,
            state.draft_BN,
        )
        if N and self.rule.draft_steps:
            draft_BN, cache = self.drafted(model, read_BW, slot_BN, given, cache)

        # Set 0 is the last token and the drafts, attended causally. A single pass adds a set for
        # each outcome: set j holds the MASKs that follow if j - 1 drafts are accepted, and attends
        # to itself, the last token and those drafts. Without the shift it has one MASK more, for
        # the token after the drafts.
        counts = [N + 1] + (
            [N if shift else N + 1] * (N + 1) if N and not self.rule.draft_steps else []
        )
        set_W = np.repeat(np.arange(len(counts)), counts)
        at_W = np.concatenate([j + np.arange(n) for j, n in enumerate(counts)])
        reach_BW, seen_BWL, single = (
            slot_BN[:, :1] + np.where(set_W, len(set_W) - 1, at_W),
            None,
            len(counts) > 1,
        )
        if single:
            seen_WW = jnp.asarray(
                (set_W == set_W[:, None]) | (set_W == 0) & (at_W < set_W[:, None])
            )
            behind_BL = jnp.arange(L) - state.last_B[:, None]
            seen_WBL = (behind_BL < 0) | seen_WW[:, jnp.clip(behind_BL, 0, len(set_W) - 1)]
            seen_BWL = seen_WBL.swapaxes(0, 1)
        read_BW = jnp.concatenate(
            (read_BW, draft_BN, jnp.full((B, len(set_W) - N - 1), model.cfg.mask_id)), 1
        )
        hidden_BWD, cache = self.read(
            model, read_BW, slot_BN[:, :1] + at_W, reach_BW, cache, seen_BWL
        )
        token_BN, prob_BN = self.draw(model, hidden_BWD[:, : N + 1], slot_BN + 1, given)
        # drafts that agree, and one more
        count_B = 1 + jnp.cumprod(draft_BN == token_BN[:, :-1], 1).sum(1)
        if single:  # the set after them
            index_BN = N + 1 + ((count_B - 1) * counts[1] + (not shift))[:, None] + jnp.arange(N)
            hidden_BND = jnp.take_along_axis(hidden_BWD, index_BN[..., None], 1)
            draft_BN, _ = self.draw(model, hidden_BND, slot_BN[:, 1:] + count_B[:, None], given)
        return self.write(
            state._replace(cache=cache, draft_BN=draft_BN), given, token_BN, prob_BN, count_B
        )

    def write(self, state, given, token_BW, prob_BW, count_B):
        """The state with the first count_B of the tokens after the last one, up to an end token or
        a row's end.
        """
        (B, L), W = state.token_BL.shape, token_BW.shape[1]
        slot_BW = state.last_B[:, None] + 1 + jnp.arange(W)
        eos_BW = self.ends(token_BW)
        written_BW = (jnp.arange(W) < count_B[:, None]) & (jnp.cumsum(eos_BW, 1) - eos_BW == 0)
        written_BW &= (slot_BW < given.end_B[:, None]) & ~self.ended(state, given)[:, None]
        at = jnp.arange(B)[:, None], jnp.where(written_BW, slot_BW, L)  # out of the row: dropped
        new = {"token_BL": token_BW, "when_BL": state.step + 1, "prob_BL": prob_BW}
        new = {
            name: getattr(state, name).at[at].set(x_BW, mode="drop") for name, x_BW in new.items()
        }
        return state._replace(**new, last_B=state.last_B + written_BW.sum(1), step=state.step + 1)

    def ends(self, token_BW):
        return (token_BW[..., None] == jnp.array(self.rule.eos_ids or (-1,))).any(-1)

    def ended(self, state, given):
        """The rows [B] that are full, or whose last token is an end."""
        eos_B = self.ends(jnp.take_along_axis(state.token_BL, state.last_B[:, None], 1))[:, 0]
        return (eos_B & (state.last_B >= given.begin_B)) | (state.last_B + 1 >= given.end_B)


@functools.partial(jax.jit, static_argnames=("sampler", "width"), donate_argnames=("state",))
def begin(params, state, given, *, sampler, width):
    """The state with the keys of the prompts, from a pass over `width` slots, and the first new
    token of each row.
    """
    model, (B, _) = nnx.merge(sampler.graph, params), state.token_BL.shape
    slot_BP = jnp.broadcast_to(jnp.arange(width), (B, width))
    hidden_BPD, cache = sampler.read(
        model, state.token_BL[:, :width], slot_BP, slot_BP, state.cache
    )
    hidden_B1D = jnp.take_along_axis(hidden_BPD, state.last_B[:, None, None], 1)
    token_B1, prob_B1 = sampler.draw(model, hidden_B1D, state.last_B[:, None] + 1, given)
    state = state._replace(cache=sample_dream.split(cache))
    return sampler.write(state, given, token_B1, prob_B1, jnp.ones(B, jnp.int32))


@functools.partial(jax.jit, static_argnames=("sampler",), donate_argnames=("state",))
def advance(params, state, given, *, sampler):
    """(State after STEPS more steps, or fewer where all rows end; whether they have ended)."""
    model, end = nnx.merge(sampler.graph, params), state.step + STEPS
    step = functools.partial(sampler.step, model, given=given)
    state = jax.lax.while_loop(
        lambda s: (s.step < end) & ~sampler.ended(s, given).all(), step, state
    )
    # every host gets all but the cache
    return sample_dream.split((state, sampler.ended(state, given)))


def generate(model, prompts, max_new, rule=None, key=None, widths=(), rows=0, on_block=None):
    """Continue prompts (lists of ids, any lengths above 0) with max_new tokens each: (rows of ids,
    stats).

    A prompt may end in MASKs already. The batch has the first of the widths that holds its longest
    text: with the same widths and rows other prompts need no other program. on_block(rows of ids so
    far) is called after every STEPS steps.
    stats: "forwards", "steps", "passes" of each row; and NumPy arrays [B, L]: "record", a Record,
    "when", the step that wrote a token, from 1 on, and "probability", its probability then. Raises
    ValueError for what does not fit.
    """
    cfg, rule = model.cfg, rule or Sampling()
    check(cfg)
    prompts = [[*ids, *[cfg.mask_id] * max_new] for ids in prompts]
    begin_B, end_B = np.array(
        [((*ids, cfg.mask_id).index(cfg.mask_id), len(ids)) for ids in prompts]
    ).T
    if any(
        set(ids[n:]) - {cfg.mask_id} for ids, n in zip(prompts, begin_B, strict=True)
    ) or not all(begin_B):
        raise ValueError(
            "a text that is written from left to right needs a prompt, and has none after its masks"
        )
    if max(end_B) > cfg.positions:
        raise ValueError(
            f"{max(end_B)} tokens do not fit: the model reaches {cfg.positions} positions; lower max_new"
        )
    pad = (0, max(rows - len(prompts), 0))  # rows without a text have one token, and are full
    begin_B, end_B = (np.pad(x_B, pad, constant_values=1) for x_B in (begin_B, end_B))
    B, longest = len(begin_B), next((width for width in widths if width >= max(end_B)), max(end_B))
    slots = (rule.draft + 1) * (1 if rule.draft_steps else rule.draft + 2)  # of a pass, at most
    L = sample_dream.canvas_width(int(longest) + slots, 1 << 30)
    token_BL = np.full((B, L), cfg.pad_id, np.int32)
    for row, ids in zip(token_BL, prompts, strict=False):
        row[: len(ids)] = ids
    id_V = np.arange(cfg.vocab)
    banned_V = np.isin(id_V, (cfg.mask_id, cfg.expand_id)) | (id_V >= (rule.vocab or cfg.vocab))
    given = Given(
        begin_B,
        end_B,
        banned_V,
        sample_dream.keys_of_rows(jax.random.key(0) if key is None else key, B),
    )

    graph, params = nnx.split(model)
    sampler = Sampler(graph, dataclasses.replace(rule, vocab=0))
    shape = B, cfg.kv_heads, L, cfg.head_size
    cache = [
        (jnp.zeros(shape, model.compute.dtype), jnp.zeros(shape, model.compute.dtype))
        for _ in range(cfg.layers)
    ]
    empty = (
        np.zeros((B, L), np.int32),
        np.zeros((B, L), np.float32),
        np.full((B, rule.draft), cfg.mask_id, np.int32),
    )
    state = State(token_BL, begin_B - 1, *empty, np.int32(0), cache)
    state = sample_dream.beside(params, jax.tree.map(jnp.asarray, state))
    width = L if widths else min(sample_dream.canvas_width(int(max(begin_B)), 1 << 30), L)
    state, done_B = begin(params, state, given, sampler=sampler, width=width), np.zeros(B, bool)
    while not done_B.all():
        state, done_B = advance(params, state, given, sampler=sampler)
        token_BL, last_B, done_B = map(np.asarray, (state.token_BL, state.last_B, done_B))
        if on_block:
            on_block(
                [
                    row[: last + 1].tolist()
                    for row, last in zip(token_BL, last_B[: len(prompts)], strict=False)
                ]
            )

    ended = zip(token_BL[: len(prompts)], last_B, end_B, strict=False)
    texts = [
        row[: last + 1].tolist() + [*rule.eos_ids[:1]] * int(end - last - 1)
        for row, last, end in ended
    ]
    forwards = 1 + (int(state.step) - 1) * (1 + (rule.draft_steps if rule.draft else 0))
    when_BL, prob_BL = map(np.asarray, (state.when_BL, state.prob_BL))
    record = sample_dream.Record(when_BL - 1, token_BL, np.log(np.where(when_BL, prob_BL, 1)))
    stats = {
        "forwards": forwards,
        "steps": int(state.step),
        "passes": [forwards] * len(prompts),
        "record": record,
    }
    return texts, stats | {"when": when_BL, "probability": prob_BL}
