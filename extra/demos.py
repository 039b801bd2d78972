"""Other families, sampled as their authors' own demos do: one short loop each. Asks a model.

    python extra/demos.py --like=llada --ckpt=out/llada --prompt="Sort a list in Python." --chat
    python extra/demos.py --like=llada --ckpt=out/llada --prompt="1 + 1 =" --late_eos=confidence
    python extra/demos.py --like=fast_dllm --ckpt=out/diffucoder --prompt="def area(r):"
    python extra/demos.py --like=open_dcoder --ckpt=out/open_dcoder --prompt="def area(r):"
    python extra/demos.py --like=dreamon --ckpt=out/dreamon --prompt="def f(r):
        return [MASK] * r"

LIKE has the settings of each demo; a flag beside --like wins. A demo fills one text, in NumPy
around the model's forward pass: to be read, and to compare with. It has no batches, and no compiled
loop: generate_dream.py has both. Where a published loop is wrong, ours differs:
bench/results/families.md. MASK is in the softmax, as with the authors, but it is never drawn.

Letters: C slots, V vocabulary.
Refs: LLaDA, arXiv:2502.09992; Fast-dLLM, 2505.22618; Fast-dLLM v2, 2509.26328; P2, 2502.03540;
DreamOn, 2602.01326; Dream-Coder, 2509.01142.
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
import checkpoints
import diffusion
import generate_dream
import model_dream
import prompts
import runs
import sample_dream
from runs import Count, Natural, NonNegative, Share, TopP

# What the demos set; the source of each is in bench/results/families.md.
LIKE = {
    "llada": {"max_new": 128, "steps": 128, "block_length": 32},
    "fast_dllm": {"max_new": 256, "block_length": 32, "cache": "dual", "threshold": 0.9},
    "fast_dllm_v2": {"max_new": 2048, "sub_block": 8, "threshold": 0.9},
    "open_dcoder": {"max_new": 128, "steps": 128, "temperature": 0.5, "top_k": 200},
    "dreamon": {"max_new": 64, "temperature": 0.2, "top_p": 0.9, "top_k": 50, "hole": 4,
                "budget": 128},
    "dream_coder": {"max_new": 768, "temperature": 0.1, "top_p": 0.95, "eos_penalty": 3.0},
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Config:
    """None stands for the demo's own setting."""

    like: typing.Literal[tuple(LIKE)] = "llada"  # whose demo
    ckpt: str = "out/llada"  # folder of convert_weights.py, or of a run
    prompt: str = "def area(r):"  # text to continue; dreamon: with [MASK] for the hole
    chat: bool = False  # ask by the folder's chat template
    max_new: Count | None = None  # tokens to fill; dreamon: the longest hole
    steps: Natural | None = None  # denoising steps, all blocks together; 0: one for each token
    block_length: Natural | None = None  # 0: the model's own blocks, or the whole canvas
    temperature: NonNegative | None = None  # 0 takes the argmax
    top_k: Natural | None = None  # draw from the k likeliest tokens; 0 draws from all
    top_p: TopP | None = None  # draw from the smallest set of this probability
    # order of positions of dreamon, dream_coder and fast_dllm without a threshold
    alg: typing.Literal["entropy", "maskgit_plus", "topk_margin"] = "entropy"
    # fill all positions of at least this probability, one a step at least; 0: by steps
    threshold: Share | None = None
    cache: typing.Literal["prefix", "dual"] | None = None  # fast_dllm: the slots of a window
    sub_block: Natural | None = None  # fast_dllm_v2: fill a block in parts of this length
    guidance: NonNegative = 0.0  # llada: cfg_scale w, logits u + (w + 1) (c - u); twice the passes
    # llada: EOS is filled last (confidence_eos_eot_inf) | never drawn (logits_eos_inf)
    late_eos: typing.Literal["", "confidence", "logits", "both"] = ""
    hole: Count | None = None  # dreamon: masks that the hole starts with
    budget: Natural | None = None  # dreamon: how often a mask may become two
    delete_to_right: bool = False  # dreamon: EOS deletes the masks after it, too, as its evaluation
    keep_eos: bool = False  # dreamon: EOS is a token of the hole, as in its evaluation
    at_once: Natural = 1  # dreamon: masks filled in a step
    eos_penalty: NonNegative | None = None  # dream_coder: makes an early end less likely
    int8: bool = False  # matrices in 8 bits, half the memory of bfloat16
    int4: bool = False  # matrices of the layers in 4 bits
    # folder of compiled programs, for later runs; "" keeps none
    compile_cache: str = "~/.cache/unmask"
    seed: Natural = 0  # of every random draw


def settle(cfg):
    """The config with the demo's own settings, and 0 for what it has not."""
    defaults = {"top_p": 1.0, "cache": "dual"} | LIKE[cfg.like]
    settings = {}
    for name, value in vars(cfg).items():
        if value is None:
            settings[name] = defaults.get(name, 0)
    cfg = dataclasses.replace(cfg, **settings)
    if 0 < cfg.steps * cfg.block_length < cfg.max_new:
        raise ValueError(f"--steps={cfg.steps}: fewer than blocks; raise it, or --block_length")
    return cfg


def main(cfg):
    cfg = settle(cfg)
    model, tokenizer, ends = load(cfg)
    dream = model.cfg
    family = "dreamon" if dream.expand_id >= 0 else dream.family
    likes = {"dream": ["dream_coder", "fast_dllm"], "llada": ["fast_dllm", "llada"]}
    likes = likes.get(family, [family])
    if cfg.like not in likes:
        names = [f"--like={name}" for name in likes if name in LIKE] or ["generate_dream.py"]
        raise ValueError(f"{cfg.ckpt} is a {family}; take {' or '.join(names)}")

    row = row_of(cfg, dream, tokenizer)
    if len(row) > dream.positions:
        raise ValueError(
            f"{len(row)} tokens do not fit the model's {dream.positions} positions; lower --max_new"
        )
    read = Reader(model, tokenizer.get_vocab_size(), ends)
    filled = DEMOS[cfg.like](read, row, cfg, np.random.default_rng(cfg.seed))
    # The text ends at its first end token; a hole's behind it stays.
    first = len(row) - cfg.max_new
    if cfg.like != "dreamon":
        new = np.isin(filled[first:], ends)
        filled = filled[: first + np.argmax([*new, True])]
    kept = [i for i in filled.tolist() if i not in (dream.mask_id, *ends)]
    print(tokenizer.decode(kept))
    print(f"{read.passes} forward passes", file=sys.stderr)


def load(cfg):
    """(model, tokenizer, ids that end a text) of --ckpt, as draft.py loads them too."""
    folder = runs.as_path(cfg.ckpt)
    model, _, _ = checkpoints.load_for_inference(
        model_dream,
        folder,
        devices=1,
        bits=checkpoints.bits_of(cfg),
        compile_cache=cfg.compile_cache,
    )
    tokenizer = sample_dream.load_tokenizer(folder, model.cfg)
    return model, tokenizer, generate_dream.ends_of(model.cfg, tokenizer)


def asked(cfg, tokenizer):
    """The ids of the prompt."""
    if cfg.chat:
        template = prompts.chat_template(runs.as_path(cfg.ckpt))
        if not template:
            raise ValueError(f"--chat: {cfg.ckpt} holds no chat template (tokenizer_config.json)")
        return prompts.encode_chat(tokenizer, template, cfg.prompt)
    return prompts.ids_of(tokenizer, cfg.prompt)


def row_of(cfg, model, tokenizer):
    """The ids of the prompt and its masks: at its end, or dreamon's where [MASK] stands."""
    if cfg.like == "dreamon":
        before, _, behind = cfg.prompt.partition("[MASK]")
        return np.array(
            [
                model.bos_id,
                *prompts.ids_of(tokenizer, before),
                *[model.mask_id] * cfg.hole,
                *prompts.ids_of(tokenizer, behind),
                model.eos_id,
            ]
        )
    return np.array([*asked(cfg, tokenizer), *[model.mask_id] * cfg.max_new])


# ---- what the loops share ----------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("graph", "size"))
def predict(params, token_1W, see_1L, cache, start, slot_C, *, graph, size):
    """(logits [C, V] at the slots, keys and values) of a pass over a window from slot `start` on.

    With a size tokens attend to their own and earlier blocks of this size.
    """
    model = nnx.merge(graph, params)
    place = None
    if size:
        block_1L = jnp.arange(token_1W.shape[1])[None] // size
        place = diffusion.Place(see_1L.astype(jnp.int32), block_1L)
        see_1L = None
    hidden_1WD, cache = model.hidden(token_1W, None, see_1L, cache, start, place)
    # With cfg.shift the state at p - 1 predicts the token at p.
    source_C = jnp.maximum(slot_C - model.cfg.shift - start, 0)
    return model.logits(hidden_1WD[:, source_C])[0], cache


class Reader:
    """A model that reads one row, and what the loops need to know of it. `passes` are counted."""

    def __init__(self, model, vocab, ends=()):
        self.graph, self.params = nnx.split(model)
        self.model = model
        self.cfg = model.cfg
        self.vocab = vocab  # ids from here on have no token
        self.ends = ends
        self.passes = 0
        self.cache = None

    def __call__(self, row, slots, window=None, size=0):
        """Float32 logits [C, V] at these slots of a row; few shapes are ever compiled.

        With a window (start, end) only these slots are fed, and attend to the keys and values that
        the last pass over the whole row left.
        """
        token_L = np.pad(row, (0, -len(row) % 32), constant_values=self.cfg.pad_id)
        see_1L = np.arange(len(token_L))[None] < len(row)
        if window is None:
            window = (0, len(token_L))
            self.cache = None
        start, end = window
        slot_C = np.pad(slots, (0, -len(slots) % 16), "edge")
        logits_CV, self.cache = predict(
            self.params,
            token_L[None, start:end],
            see_1L,
            self.cache,
            start,
            slot_C,
            graph=self.graph,
            size=size,
        )
        self.passes += 1
        logits_CV = np.array(logits_CV)[: len(slots)]
        logits_CV[:, self.vocab :] = -np.inf
        return logits_CV

    def masks(self, row, begin=0, end=None):
        """The slots of a row, or of a part of it, that hold MASK."""
        return begin + np.flatnonzero(row[begin:end] == self.cfg.mask_id)

    def draw(self, logits_CV, temperature, rng):
        """A token for each slot, never MASK: the argmax at temperature 0."""
        logits_CV = logits_CV.copy()
        logits_CV[:, self.cfg.mask_id] = -np.inf
        u_CV = rng.uniform(1e-12, 1, logits_CV.shape)
        return diffusion.sample_tokens(logits_CV, u_CV, temperature)


def draw_filtered(read, logits_CV, cfg, rng):
    """(the logits that temperature, top-k and top-p keep, as in Dream's code; a token for each)."""
    logits_CV = diffusion.filter_logits(
        logits_CV, cfg.temperature, cfg.top_k, cfg.top_p, rule="dream"
    )
    return logits_CV, read.draw(logits_CV, float(cfg.temperature > 0), rng)


def confidence(logits_CV, alg):
    """Dream's confidence of the distribution at each slot; its orders have names of their own."""
    kind = {"maskgit_plus": "max_prob", "topk_margin": "margin"}.get(alg, alg)
    return diffusion.confidence(diffusion.softmax(logits_CV), kind)


def probability(logits_CV, token_C):
    """The probability of a token at each slot."""
    return diffusion.softmax(logits_CV)[np.arange(len(token_C)), token_C]


def surest(score_C, count):
    """Where the `count` highest scores are; of equal ones the first."""
    return np.argsort(-score_C, kind="stable")[:count]


def fill(row, slots, token_C, score_C, count):
    """Write the tokens of the `count` highest scores to their slots of the row."""
    best = surest(score_C, count)
    row[slots[best]] = token_C[best]


# ---- the demos ---------------------------------------------------------------------------------
# Each fills its row in place and returns it; dreamon returns another, as its row grows.


def llada(read, row, cfg, rng):
    """LLaDA's generate.py: blocks from left to right, equally many tokens in each step.

    The confidence is the probability of the drawn token, without the temperature.
    """
    given = row != read.cfg.mask_id
    size = cfg.block_length or cfg.max_new
    steps = (cfg.steps or cfg.max_new) * size // cfg.max_new
    for begin in range(len(row) - cfg.max_new, len(row), size):
        for i in range(size if cfg.threshold else steps):
            slots = read.masks(row, begin, begin + size)
            if len(slots) == 0:
                break
            logits_CV = read(row, slots)
            if cfg.guidance:  # away from what the model says without the prompt
                without_CV = read(np.where(given, read.cfg.mask_id, row), slots)
                logits_CV = without_CV + (cfg.guidance + 1) * (logits_CV - without_CV)
            if cfg.late_eos in ("logits", "both"):
                logits_CV[:, read.cfg.eos_id] = -np.inf
            token_C = read.draw(logits_CV, cfg.temperature, rng)

            # EOS last: it is left out of the softmax, and has no confidence of its own.
            late = cfg.late_eos in ("confidence", "both")
            if late:
                logits_CV[:, read.ends] = -np.inf
            score_C = probability(logits_CV, token_C)
            if late:
                score_C[np.isin(token_C, read.ends)] = -1

            if cfg.threshold:  # Fast-dLLM's parallel decoding without a cache
                count = max(1, (score_C >= cfg.threshold).sum())
            else:
                count = -(-len(slots) // (steps - i))
            fill(row, slots, token_C, score_C, count)
    return row


def fast_dllm(read, row, cfg, rng):
    """Fast-dLLM of a Dream or a LLaDA: its windows attend to keys of the block's first pass.

    The first pass of a block is over the whole row; the next feed the block alone (dual), or all
    from the block on (prefix). Of a Dream that first pass fills the block's first token, which the
    window cannot predict: the state that does stands before it.
    """
    size = cfg.block_length
    if not size or cfg.max_new % size:
        raise ValueError(f"--block_length={size} does not divide --max_new={cfg.max_new}")
    steps = (cfg.steps or cfg.max_new) * size // cfg.max_new
    shift = read.cfg.shift
    share_S = diffusion.dream_shares(steps)
    if shift and steps == 1:  # one step more, as the first one fills a single token
        share_S = [0.0, 1.0]
    for begin in range(len(row) - cfg.max_new, len(row), size):
        end = begin + size
        for i in range(size if cfg.threshold else len(share_S)):
            slots = read.masks(row, begin, end)
            if len(slots) == 0:
                break
            window = None
            if i > 0:
                window = (begin, len(row) if cfg.cache == "prefix" else end)
            logits_CV, token_C = draw_filtered(read, read(row, slots, window), cfg, rng)
            if cfg.threshold or not shift:
                score_C = probability(logits_CV, token_C)
            else:
                score_C = confidence(logits_CV, cfg.alg)

            if shift and i == 0:
                score_C[0] = np.inf
                count = 1
            elif cfg.threshold:
                count = max(1, (score_C >= cfg.threshold).sum())
            elif shift:  # Dream's schedule
                count = int(np.float32(len(slots)) * share_S[i])
            else:  # LLaDA's: equally many in each step
                count = -(-len(slots) // (steps - i))
            fill(row, slots, token_C, score_C, count)
    return row


def fast_dllm_v2(read, row, cfg, rng):
    """Fast-dLLM v2: blocks of a model that was trained in blocks, each in sub-blocks.

    The first token of a block is the next token of the text before it. A sub-block is filled from
    the threshold on. Its authors' cache changes nothing but the time: a finished block attends to
    itself and what is before it.
    """
    size = cfg.block_length or read.cfg.block_length
    sub = cfg.sub_block or size
    begin = np.argmax(row == read.cfg.mask_id) // size * size
    while begin < len(row) and not np.isin(row[len(row) - cfg.max_new : begin], read.ends).any():
        block = row[: begin + size]  # a view: what is behind the block is not fed
        if block[begin] == read.cfg.mask_id:
            logits_1V = read(block, np.array([begin]), size=size)
            block[begin] = read.draw(logits_1V, 0, rng)[0]
        for left in range(begin, len(block), sub):
            while len(slots := read.masks(block, left, left + sub)) > 0:
                logits_CV = read(block, slots, size=size)
                _, token_C = draw_filtered(read, logits_CV, cfg, rng)
                score_C = probability(logits_CV, token_C)
                fill(block, slots, token_C, score_C, max(1, (score_C > cfg.threshold).sum()))
        begin += size
    return row


def open_dcoder(read, row, cfg, rng, shown=None):
    """P2 of Open-dCoder: each step chooses anew among all slots that were masked at first.

    One of low confidence becomes MASK again, whatever it held.
    """
    mask = read.cfg.mask_id
    slots = read.masks(row)
    steps = cfg.steps or len(slots)
    for i in range(steps):
        if mask not in row:
            break
        logits_CV, token_C = draw_filtered(read, read(row, slots), cfg, rng)
        score_C = probability(logits_CV, token_C)
        # how many are MASK after this step
        masked = int(np.float32(len(slots)) * np.float32(1 - (i + 1) / steps))
        # A slot that is chosen again keeps its token.
        token_C = np.where(row[slots] == mask, token_C, row[slots])
        row[slots] = mask
        fill(row, slots, token_C, score_C, len(slots) - masked)
        if shown is not None:
            shown.append(row.tolist())
    return row


def dream_coder(read, row, cfg, rng):
    """Dream-Coder: Dream's sampler with a penalty of EOS while little of the text is filled."""
    masks = len(read.masks(row))
    for share in diffusion.dream_shares(cfg.steps or masks):
        slots = read.masks(row)
        count = int(np.float32(len(slots)) * share)
        if count == 0:  # the schedule fills nothing in this step
            continue
        logits_CV = read(row, slots)
        share_filled = 1 - len(slots) / masks
        logits_CV[:, read.ends] += cfg.eos_penalty * np.log(share_filled + 1e-3)
        logits_CV, token_C = draw_filtered(read, logits_CV, cfg, rng)
        fill(row, slots, token_C, confidence(logits_CV, cfg.alg), count)
    return row


def dreamon(read, row, cfg, rng, shown=None):
    """DreamOn: a mask becomes a token, or two masks (the expand id), or is deleted (EOS).

    A step fills the masks of highest confidence. The expand id is out of the softmax while the row
    has its full length, or no budget is left. Then EOS and the expand id are carried out, from left
    to right. What was given stays, also an EOS or an expand id of its own.
    """
    row = row.copy()
    mask = read.cfg.mask_id
    expand = read.cfg.expand_id
    eos = read.cfg.eos_id
    slots = read.masks(row)
    longest = min(len(row) - len(slots) + cfg.max_new, read.cfg.positions)
    budget = cfg.budget
    for _ in range(cfg.steps or 2 * (longest - slots[0] + budget)):
        slots = read.masks(row)
        if len(slots) == 0:
            break
        logits_CV = read(row, slots)
        if len(row) >= longest or budget <= 0:
            logits_CV[:, expand] = -np.inf
        logits_CV, token_C = draw_filtered(read, logits_CV, cfg, rng)
        fill(row, slots, token_C, confidence(logits_CV, cfg.alg), cfg.at_once)
        end = min((p for p in slots if row[p] == eos), default=len(row))

        new = []
        for p, token in enumerate(row.tolist()):
            generated = p in slots
            if generated and (token == eos or (cfg.delete_to_right and p > end)):
                if cfg.keep_eos:
                    new.append(eos)
            elif generated and token == expand:
                new += [mask, mask]
                budget -= 1
            else:
                new.append(token)
        row = np.array(new)
        if shown is not None:
            shown.append(new)
    return row


DEMOS = {
    "llada": llada,
    "fast_dllm": fast_dllm,
    "fast_dllm_v2": fast_dllm_v2,
    "open_dcoder": open_dcoder,
    "dreamon": dreamon,
    "dream_coder": dream_coder,
}

if __name__ == "__main__":
    runs.command(main, Config, __doc__)
