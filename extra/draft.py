"""Self-speculative decoding of a Dream: draft a block, verify it causally. Asks a model.

    python extra/draft.py --ckpt=out/nemotron --prompt="Sort a list of words." --draft=4
    rows, stats = draft.generate(model, [[5, 6, 7]], 256, draft.Sampling(draft=8))

The text is the one that the model writes token by token, in fewer passes. It needs a model whose
finished tokens attend causally, such as Nemotron-Labs-Diffusion or a converted Qwen2. It fills no
holes and shows no steps.

Such a model has two modes over the same keys: causal, and bidirectional among the MASKs after the
last token. A step fills MASKs in the second mode (the drafts) and verifies them in the first: that
pass predicts the token of each slot, and its keys are final. The longest prefix of drafts that
equal the predictions stays, and the model's own next token follows. With draft_steps=0 that pass
also makes the next drafts, for each number of drafts that may be accepted.

A token is the argmax of its logits plus Gumbel noise, a function of the row's key and the slot
alone: drafts and verification use the same noise. So the text of a key is the same for every
number of drafts, in every batch, at every temperature; in float32, but for near-ties.

Letters: B rows, L slots, N drafts, W slots of a pass, V vocabulary.
Refs: Nemotron-Labs-Diffusion's linear self-speculation; coupling, arXiv:2408.07978; one pass:
TiDAR, arXiv:2511.08923.
"""

import dataclasses
import functools
import sys
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import demos

import diffusion
import runs
import sample_dream
from runs import Count, Natural, NonNegative, TopP

STEPS = 16  # between two looks at the texts


@dataclasses.dataclass(frozen=True)
class Config:
    ckpt: str = "out/nemotron"  # folder of a model whose finished tokens attend causally
    prompt: str = "def area(r):"  # text to continue
    chat: bool = False  # ask by the folder's chat template
    draft: Natural = 4  # tokens drafted at a time; 0: token by token
    # passes that make drafts; 0: the verifying pass does, faster for one text
    draft_steps: typing.Literal[1, 0] = 1
    max_new: Count = 256  # tokens at most
    temperature: NonNegative = 0.0  # 0 takes the argmax
    top_k: Natural = 0  # draw from the k likeliest tokens; 0 draws from all
    top_p: TopP = 1.0  # draw from the smallest set of this probability
    int8: bool = False  # matrices in 8 bits, half the memory of bfloat16
    int4: bool = False  # matrices of the layers in 4 bits
    # folder of compiled programs, for later runs; "" keeps none
    compile_cache: str = "~/.cache/unmask"
    seed: Natural = 0  # of every random draw


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


def main(cfg):
    model, tokenizer, ends = demos.load(cfg)
    ids = demos.asked(cfg, tokenizer)
    rule = Sampling(
        cfg.draft,
        cfg.draft_steps,
        cfg.temperature,
        cfg.top_p,
        cfg.top_k,
        vocab=tokenizer.get_vocab_size(),
        eos_ids=ends,
    )
    rows, stats = generate(model, [ids], cfg.max_new, rule, jax.random.key(cfg.seed))
    new = [token for token in rows[0][len(ids) :] if token not in ends]
    print(tokenizer.decode(new))
    print(f"{len(new)} tokens in {stats['forwards']} forward passes", file=sys.stderr)


class State(typing.NamedTuple):
    """What a step changes."""

    token_BL: jax.Array
    last_B: jax.Array  # the slot of the last token, whose keys are not written yet
    when_BL: jax.Array  # the step that wrote a token, from 1 on; 0 in the prompt
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
        slot_1L = jnp.arange(cache[0][0].shape[2])[None]
        keys = diffusion.Place(jnp.ones_like(slot_1L), slot_1L)
        queries = diffusion.Place(jnp.ones_like(token_BW), reach_BW, seen=seen_BWL)
        return model.hidden(token_BW, place_BW, None, cache, place_BW[:, 0], queries, keys)

    def draw(self, model, hidden_BWD, slot_BW, given):
        """A token [B, W] for each slot, from one hidden state."""
        rule = self.rule
        logits_BWV = jnp.where(given.banned_V, -jnp.inf, model.logits(hidden_BWD))
        if not rule.temperature:
            return diffusion.sample_tokens(logits_BWV, None, 0)

        def uniform(key, slot):  # of row and slot alone, not of step, batch or draft
            key = jax.random.fold_in(jax.random.wrap_key_data(key), slot)
            tiny = jnp.finfo(jnp.float32).tiny
            return jax.random.uniform(key, given.banned_V.shape, minval=tiny)

        u_BWV = jax.vmap(jax.vmap(uniform, (None, 0)))(given.key_B, slot_BW)
        filtered_BWV = diffusion.filter_logits(
            logits_BWV,
            rule.temperature,
            rule.top_k,
            rule.top_p,
            rule="dream",
            width=sample_dream.filter_width(model),
        )
        return diffusion.sample_tokens(filtered_BWV, u_BWV)

    def drafted(self, model, token_B1, slot_BW, given, cache):
        """(drafts [B, N] after the last tokens, cache), by one pass over MASKs that see each other.

        With the shift the last token stays causal, as in training, and predicts the first draft.
        """
        N = self.rule.draft
        shift = model.cfg.shift
        token_BW = jnp.pad(token_B1, ((0, 0), (0, N)), constant_values=model.cfg.mask_id)
        reach_BW = jnp.where((jnp.arange(N + 1) == 0) & shift, slot_BW, slot_BW[:, -1:])
        hidden_BWD, cache = self.read(model, token_BW, slot_BW, reach_BW, cache)
        hidden_BND = hidden_BWD[:, :-1] if shift else hidden_BWD[:, 1:]
        return self.draw(model, hidden_BND, slot_BW[:, 1:], given), cache

    def step(self, model, state, given):
        """Draft, verify, and write the accepted drafts and the model's next token."""
        N = self.rule.draft
        B, L = state.token_BL.shape
        shift = model.cfg.shift
        single = N > 0 and not self.rule.draft_steps  # verifies and drafts in one pass
        last_B1 = state.last_B[:, None]
        slot_BN = last_B1 + jnp.arange(N + 1)
        read_BW = jnp.take_along_axis(state.token_BL, last_B1, 1)
        cache = state.cache
        draft_BN = state.draft_BN
        if N and self.rule.draft_steps:
            draft_BN, cache = self.drafted(model, read_BW, slot_BN, given, cache)

        # Set 0 is the last token and the drafts, attended causally. A single pass adds a set for
        # each outcome: set j holds the MASKs that follow if j - 1 drafts are accepted, and attends
        # to itself, the last token and those drafts. Without the shift it has one MASK more, for
        # the token after the drafts.
        counts = [N + 1]
        size = N if shift else N + 1
        if single:
            counts += [size] * (N + 1)
        set_W = np.repeat(np.arange(len(counts)), counts)
        at_W = np.concatenate([j + np.arange(n) for j, n in enumerate(counts)])
        reach_BW = last_B1 + np.where(set_W, len(set_W) - 1, at_W)
        seen_BWL = None
        if single:
            seen_WW = jnp.asarray(
                (set_W == set_W[:, None]) | (set_W == 0) & (at_W < set_W[:, None])
            )
            behind_BL = jnp.arange(L) - last_B1
            seen_WBL = (behind_BL < 0) | seen_WW[:, jnp.clip(behind_BL, 0, len(set_W) - 1)]
            seen_BWL = seen_WBL.swapaxes(0, 1)
        masks_BW = jnp.full((B, len(set_W) - N - 1), model.cfg.mask_id)
        read_BW = jnp.concatenate((read_BW, draft_BN, masks_BW), 1)
        hidden_BWD, cache = self.read(model, read_BW, last_B1 + at_W, reach_BW, cache, seen_BWL)

        # The drafts that the verification repeats are accepted, and one token more.
        token_BN = self.draw(model, hidden_BWD[:, : N + 1], slot_BN + 1, given)
        count_B = 1 + jnp.cumprod(draft_BN == token_BN[:, :-1], 1).sum(1)
        if single:  # the next drafts: the set of this outcome
            index_BN = N + 1 + ((count_B - 1) * size + (not shift))[:, None] + jnp.arange(N)
            hidden_BND = jnp.take_along_axis(hidden_BWD, index_BN[..., None], 1)
            draft_BN = self.draw(model, hidden_BND, slot_BN[:, 1:] + count_B[:, None], given)
        return self.write(state._replace(cache=cache, draft_BN=draft_BN), given, token_BN, count_B)

    def write(self, state, given, token_BW, count_B):
        """The state with the first count_B of the tokens after the last one, up to an end token or
        a row's end.
        """
        B, L = state.token_BL.shape
        W = token_BW.shape[1]
        slot_BW = state.last_B[:, None] + 1 + jnp.arange(W)
        eos_BW = self.ends(token_BW)
        written_BW = (jnp.arange(W) < count_B[:, None]) & (jnp.cumsum(eos_BW, 1) - eos_BW == 0)
        written_BW &= (slot_BW < given.end_B[:, None]) & ~self.ended(state, given)[:, None]
        at = jnp.arange(B)[:, None], jnp.where(written_BW, slot_BW, L)  # out of the row: dropped
        return state._replace(
            token_BL=state.token_BL.at[at].set(token_BW, mode="drop"),
            when_BL=state.when_BL.at[at].set(state.step + 1, mode="drop"),
            last_B=state.last_B + written_BW.sum(1),
            step=state.step + 1,
        )

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
    model = nnx.merge(sampler.graph, params)
    B = len(state.token_BL)
    slot_BP = jnp.broadcast_to(jnp.arange(width), (B, width))
    prompt_BP = state.token_BL[:, :width]
    hidden_BPD, cache = sampler.read(model, prompt_BP, slot_BP, slot_BP, state.cache)
    hidden_B1D = jnp.take_along_axis(hidden_BPD, state.last_B[:, None, None], 1)
    token_B1 = sampler.draw(model, hidden_B1D, state.last_B[:, None] + 1, given)
    state = state._replace(cache=sample_dream.split(cache))
    return sampler.write(state, given, token_B1, jnp.ones(B))


@functools.partial(jax.jit, static_argnames=("sampler",), donate_argnames=("state",))
def advance(params, state, given, *, sampler):
    """(State after STEPS more steps, or fewer where all rows end; whether they have ended)."""
    model = nnx.merge(sampler.graph, params)
    end = state.step + STEPS

    def unfinished(state):
        return (state.step < end) & ~sampler.ended(state, given).all()

    def step(state):
        return sampler.step(model, state, given)

    state = jax.lax.while_loop(unfinished, step, state)
    # every host gets all but the cache
    return sample_dream.split((state, sampler.ended(state, given)))


def prepare(cfg, rule, prompts, key, dtype):
    """(State, Given, slots that the first pass feeds) of prompts that end in MASKs."""
    if not cfg.causal and not (cfg.shift and cfg.block_length == 1):
        raise ValueError("drafts need a model whose finished tokens attend causally")
    mask = cfg.mask_id
    begin_B = np.array([[*ids, mask].index(mask) for ids in prompts])
    end_B = np.array([len(ids) for ids in prompts])
    after = [set(ids[n:]) - {mask} for ids, n in zip(prompts, begin_B, strict=True)]
    if any(after) or not all(begin_B):
        raise ValueError("text is drafted from the left: it needs a prompt, and no text behind it")
    if max(end_B) > cfg.positions:
        raise ValueError(
            f"{max(end_B)} tokens do not fit: the model reaches {cfg.positions} positions; "
            "lower max_new"
        )
    B = len(begin_B)
    slots = rule.draft + 1  # of a pass
    if not rule.draft_steps:
        slots *= rule.draft + 2
    L = sample_dream.canvas_width(int(max(end_B)) + slots, 1 << 30)
    token_BL = np.full((B, L), cfg.pad_id, np.int32)
    for row, ids in zip(token_BL, prompts, strict=True):
        row[: len(ids)] = ids
    id_V = np.arange(cfg.vocab)
    banned_V = np.isin(id_V, (mask, cfg.expand_id)) | (id_V >= (rule.vocab or cfg.vocab))
    shape = B, cfg.kv_heads, L, cfg.head_size
    state = State(
        token_BL=token_BL,
        last_B=begin_B - 1,
        when_BL=np.zeros((B, L), np.int32),
        draft_BN=np.full((B, rule.draft), mask, np.int32),
        step=np.int32(0),
        cache=[(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(cfg.layers)],
    )
    prefix = min(sample_dream.canvas_width(int(max(begin_B)), 1 << 30), L)
    return state, Given(begin_B, end_B, banned_V, sample_dream.keys_of_rows(key, B)), prefix


def generate(model, prompts, max_new, rule=None, key=None):
    """Continue prompts (lists of ids, any lengths above 0) with max_new tokens each: (rows of ids,
    stats).

    A prompt may end in MASKs already. stats: "forwards", "steps", and "when", an array [B, L] of
    the step that wrote a token, from 1 on. Raises ValueError for what does not fit.
    """
    rule = rule or Sampling()
    prompts = [[*ids, *[model.cfg.mask_id] * max_new] for ids in prompts]
    state, given, width = prepare(model.cfg, rule, prompts, key, model.compute.dtype)
    graph, params = nnx.split(model)
    sampler = Sampler(graph, dataclasses.replace(rule, vocab=0))
    state = sample_dream.beside(params, jax.tree.map(jnp.asarray, state))
    state = begin(params, state, given, sampler=sampler, width=width)
    done_B = [False]
    while not np.asarray(done_B).all():
        state, done_B = advance(params, state, given, sampler=sampler)

    texts = []
    rows = zip(np.asarray(state.token_BL), np.asarray(state.last_B), prompts, strict=True)
    for row, last, ids in rows:
        fill = list(rule.eos_ids[:1]) * int(len(ids) - last - 1)
        texts.append(row[: last + 1].tolist() + fill)
    steps = int(state.step)
    passes = 1 + (rule.draft_steps if rule.draft else 0)
    return texts, {
        "forwards": 1 + (steps - 1) * passes,
        "steps": steps,
        "when": np.asarray(state.when_BL),
    }


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
