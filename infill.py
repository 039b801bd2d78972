"""Holes of unknown length, and text that stays valid Python: for Dreams that see the whole canvas.

    infill.can_go_on("def area(r):\\n    return (r *")      # True: more text makes a program of it
    read = infill.Reader(model, tokenizer)
    size = infill.hole_length(read, before, after, rule, key)    # masks between two lists of ids
    hole = infill.grow(read, before, after, rule)    # ids between them, of a Dream that grows and shrinks holes
    ids, is_python = infill.mend(read, canvas, filled, ends)    # the filled canvas, made valid

generate.py does this for [MASK] without a number, and with --valid=python; benchmarks.py for
humaneval_infilling.

How long is a hole? It is filled at several lengths. Each is scored by the likelihood of the hole
and a few tokens after it, from left to right, so that texts of different lengths compare. A Dream
that was trained on holes of any length (data_prep.py pairs --edit_rate, or DreamOn) finds the
length itself: in each forward pass the mask of highest confidence becomes a token, or two masks, or
is deleted. `grow` has DreamOn's own loop beside a faster one.

A canvas is filled without a parser. Where Python's own parser finds that no text makes a program of
the result, the first wrong token is replaced by the likeliest that fits. If none fits, a beam
search replaces tokens before it, too. A canvas that was right costs no further pass.

Letters: B rows, C slots of a row, L slots of a canvas, V vocabulary, S slots of one canvas.
Ref: DreamOn, arXiv:2602.01326.
"""

import ast
import bisect
import codeop
import dataclasses
import functools
import itertools
import keyword
import math
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import sample_dream

LENGTHS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)  # lengths of a hole that are tried
START = 8  # masks of a hole before it grows or shrinks
SURE = 0.9  # masks of at least this probability of EOS are deleted together
BEHIND = 8  # tokens after a hole that are scored with it
BEAMS = 8  # width of the beam search
CHOICES = 64  # likeliest tokens that are tried at a position
# of a rule, for holes of any size
ANY_SIZE = {"steps": 0, "block_length": 0, "cache": "", "fast_dllm": False}

# ---- what Python can still become ----------------------------------------------------------------------------------

# One of these completes a text that stops in the middle, unless the parser itself says that it is
# incomplete.
ENDINGS = (
    # an expression
    *("", "(", " (", "x", " x", "x(", " x(", "=(", "*x", ">x:", " in(", " else(", " x in("),
    # a statement
    *(":", ":(", ": x", " x:", "\n", " def x(", " import(", "x import(", " x import("),
    # a string or a number
    *("'", '"', "''", '""', "}'", '}"', "':", '":', "0]}'", '0]}"', "0", "."),
)
WORDS = *keyword.kwlist, "match", "case"


def parses(text, whole=True):
    """Whether a text is Python, or with whole=False the beginning of it: then it may stop within a
    bracket, a string of three quotes or a block. A text that begins indented is the body of
    something.
    """
    flags = ast.PyCF_ONLY_AST | (0 if whole else codeop.PyCF_ALLOW_INCOMPLETE_INPUT)
    first = next(
        (line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")),
        "",
    )
    if first[:1].isspace():
        text = "if x:\n" + text
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in strings, which would be printed
        try:
            compile(text, "<text>", "exec", flags, dont_inherit=True)
        except SyntaxError as error:
            return not whole and error.msg == "incomplete input"
        except (ValueError, RecursionError, MemoryError):  # a null character, too many brackets
            return False
    return True


@functools.lru_cache(1 << 14)
def can_go_on(text):
    """Whether a text is a valid prefix of a program, by the parser of the running Python.

    Where the parser does not say so, some endings are tried, and all keywords that the last word
    begins.
    """
    text = text.rstrip("\ufffd")  # half a character
    word = re.search(r"[^\W\d]\w*\Z", text)
    stem, word = (text[: word.start()], word[0]) if word else (text, "")
    words = [word, *(each for each in WORDS if word and each.startswith(word) and each != word)]
    return any(parses(stem + word + ending, whole=False) for word in words for ending in ENDINGS)


def swallows(before, hole, behind):
    """Whether the text after a hole is now in a comment or string that begins in it: only there
    Python allows a $.
    """
    dollar = "\n$" if behind.startswith(("\n", "\r")) else "$"  # a comment ends with its line

    def allows(text):
        return any(parses(text + end, whole=False) for end in ("", "'", '"', "}'", '}"'))

    return bool(behind) and allows(before + hole + dollar) and not allows(before + "$")


# ---- what a model says of a canvas -----------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("graph", "vocab", "choices"))
def predict(params, token_BL, see_BL, slot_BC, target_BC, *, graph, vocab, choices):
    """log p [B, C] of the targets at slots of canvases; log p and ids of the likeliest `choices` at
    each slot.

    MASK and cfg.expand_id are never predicted.
    """
    model = nnx.merge(graph, params)
    hidden_BLD, _ = model.hidden(token_BL, see_BM=see_BL)
    # The logits of the token at p come from the hidden state at p - 1.
    source_BC = jnp.maximum(slot_BC - model.cfg.shift, 0)
    logits_BCV = model.logits(jnp.take_along_axis(hidden_BLD, source_BC[..., None], 1))
    id_V = jnp.arange(logits_BCV.shape[-1])
    allowed_V = (id_V < vocab) & (id_V != model.cfg.mask_id) & (id_V != model.cfg.expand_id)
    logits_BCV = jnp.where(allowed_V, logits_BCV, -jnp.inf)
    logp_BCV = jax.nn.log_softmax(logits_BCV)
    of_target_BC = jnp.take_along_axis(logp_BCV, target_BC[..., None], -1)[..., 0]
    return of_target_BC, *jax.lax.top_k(logp_BCV, choices)


class Reader:
    """A model and its tokenizer, to score canvases, which are lists of ids. `passes` counts
    canvases.
    """

    def __init__(self, model, tokenizer):
        self.model, self.tokenizer, self.passes = model, tokenizer, 0
        self.mask, self.vocab = model.cfg.mask_id, tokenizer.get_vocab_size()
        self.graph, self.params = nnx.split(model)

    def __call__(self, canvases, slots, targets=None):
        """`predict` for slots [B, C] of canvases of any lengths, one or BEAMS of them in a pass."""
        B, cfg, found = len(canvases), self.model.cfg, []
        at_once = 1 if B == 1 else BEAMS
        rows = -(-B // at_once) * at_once
        L = sample_dream.canvas_width(max(map(len, canvases)), cfg.positions)
        token_BL, see_BL = np.full((rows, L), cfg.pad_id, np.int32), np.zeros((rows, L), bool)
        for row, canvas in enumerate(canvases):
            token_BL[row, : len(canvas)], see_BL[row, : len(canvas)] = canvas, True
        slot_BC, target_BC = (
            np.resize(x, (rows, len(slots[0]))) for x in (slots, targets or slots)
        )
        fixed = {"graph": self.graph, "vocab": self.vocab, "choices": min(CHOICES, self.vocab - 1)}
        for i in range(0, rows, at_once):
            batch = (x[i : i + at_once] for x in (token_BL, see_BL, slot_BC, target_BC))
            found.append(predict(self.params, *batch, **fixed))
        self.passes += B
        return [np.concatenate(arrays)[:B] for arrays in zip(*found, strict=True)]


# ---- as Python -------------------------------------------------------------------------------------------------------


def text_of(tokenizer, canvas, ids, mask, ends):
    """(the text of a canvas, whether it ended by itself): a run of masks is left out from its first
    end token on.
    """
    kept, ended = [], False
    for given, token in zip(canvas, ids, strict=False):
        ended = given == mask and (ended or token in ends)
        kept += [] if ended else [token]
    return tokenizer.decode(kept), ended


def mend(read, canvas, filled, ends=()):
    """A filled canvas with generated tokens replaced until the text is Python: (ids, whether it
    is).

    The text may stop in the middle if the canvas ends with masks and none of the ids `ends` was
    generated there.
    """
    mask, ids, n = read.mask, list(filled), 0
    masks = [p for p, token in enumerate(canvas) if token == mask]  # their slots
    # slot of the next mask
    following = {p: next((q for q in masks if q > p), len(canvas)) for p in masks}

    def fits(ids, p):
        """Whether the text up to slot p, and what was given after it, can become Python; the whole:
        whether it is.
        """
        text, ended = text_of(read.tokenizer, canvas, ids[: following[p]], mask, ends)
        whole = ended or (following[p] == len(canvas) and canvas[-1] != mask)
        if not (parses(text) if whole else can_go_on(text)):
            return False
        # What a hole opened is closed in it, by a token each.
        begin = next(q for q in range(p, -1, -1) if q == 0 or canvas[q - 1] != mask)
        end = next((q for q in range(p + 1, len(canvas)) if canvas[q] != mask), None)
        before, upto = (
            text_of(read.tokenizer, canvas, ids[:q], mask, ends)[0] for q in (begin, p + 1)
        )
        hole = upto[len(before) :]
        if end is None or following[p] == p + 1:
            depth = sum(map(hole.count, "([{")) - sum(map(hole.count, ")]}"))
            return end is None or depth < end - p
        return not swallows(before, hole, text[len(upto) :])

    while masks and not fits(ids, masks[-1]):  # a hole may have shrunk to nothing
        n = bisect.bisect_left(masks, True, lo=n, key=lambda p: not fits(ids, p))
        # of this hole
        first = next(i for i in range(n, -1, -1) if i == 0 or masks[i - 1] < masks[i] - 1)
        # Replace that token alone; where none fits, more and more of the tokens before it, too.
        size = n + 1 - first
        for width, beams in ((1, 0), (4, 0), (16, 2), (size, BEAMS), (size, 4 * BEAMS)):
            new = write_again(read, ids, masks[n + 1 - min(width, size) : n + 1], fits, beams)
            if new:
                break
        else:
            return ids, False
        ids, n = new, n + 1
    return ids, True


def write_again(read, ids, span, fits, beams=0):
    """ids with the likeliest tokens that fit at the slots `span`, from left to right; None if there
    are none.

    One pass gives the likelihoods at all slots; with `beams` there is one for each slot and beam.
    """
    kept = [(0.0, [read.mask if p in span else token for p, token in enumerate(ids)])]
    if not beams:
        # two shapes are compiled
        padded = [*span, *[span[-1]] * (4 - len(span))] if span[1:] else span
        _, (logp_SC,), (token_SC,) = read([kept[0][1]], [padded])
    for i, p in enumerate(span):
        if beams:
            _, logp_B1C, token_B1C = read([beam for _, beam in kept], [[p]] * len(kept))
            choices = zip(logp_B1C[:, 0].tolist(), token_B1C[:, 0].tolist(), strict=True)
        else:
            choices = [(logp_SC[i].tolist(), token_SC[i].tolist())] * len(kept)
        found = [
            (total + logp, [*beam[:p], token, *beam[p + 1 :]])
            for (total, beam), likeliest in zip(kept, choices, strict=True)
            for logp, token in zip(*likeliest, strict=True)
        ]
        fitting = (each for each in sorted(found, reverse=True) if fits(each[1], p))
        kept = list(itertools.islice(fitting, 1 if p == span[-1] else beams or BEAMS))
        if not kept:
            return None
    return kept[0][1]


# ---- how long a hole is ----------------------------------------------------------------------------------------------


def fill_holes(read, holes, rule, key, ends=(), rows=1):
    """Fill holes (ids before, number of masks, ids after): [(ids, forward passes)], cut at the
    first id of `ends`.

    A hole of unknown length takes many masks if the Dream was trained so (data_prep.py pairs
    --eos_to).
    """
    cfg = read.model.cfg
    banned = {*(rule.ban_ids or ()), cfg.mask_id, cfg.expand_id} - {*ends}
    rule = dataclasses.replace(rule, ban_ids=tuple(sorted(banned)), history=False, likeliest=0)
    canvases = [[*before, *[read.mask] * size, *behind] for before, size, behind in holes]
    longest = max(map(len, canvases))
    width = max(longest, min(-(-longest // 64) * 64, cfg.positions))  # few widths, a program each
    filled, stats = sample_dream.generate(
        read.model, canvases, 0, rule, key, widths=(width,), rows=rows
    )
    read.passes, kept = read.passes + int(stats["passes"].sum()), []
    for ids, (before, size, _), passes in zip(filled, holes, stats["passes"].tolist(), strict=True):
        hole = ids[len(before) : len(before) + size]
        kept.append(([*itertools.takewhile(lambda i: i not in ends, hole)], passes))
    return kept


def hole_length(read, before, after, rule, key, rows=1, valid=False):
    """The number of masks, of LENGTHS, with the likeliest text between two lists of ids, filled by
    a sampling rule.

    With valid=True only texts that are Python count, if there are any.
    """
    most = read.model.cfg.positions - len(before) - len(after)
    lengths = [n for n in LENGTHS if n <= most]
    holes = [
        ids
        for ids, _ in fill_holes(read, [(before, n, after) for n in lengths], rule, key, rows=rows)
    ]
    if valid:
        first, behind = map(read.tokenizer.decode, (before, after))
        texts = [read.tokenizer.decode(hole) for hole in holes]
        is_python = [
            parses(first + text + behind) and not swallows(first, text, behind) for text in texts
        ]
        holes = list(itertools.compress(holes, is_python)) or holes
    return len(max(holes, key=lambda hole: score(read, before, hole, after, max(lengths))))


@functools.partial(jax.jit, static_argnames=("sampler",))
def propose(params, state, given, slot_1C, *, sampler):
    """Of sample_dream.py at these slots of one canvas: a token, its confidence, the likeliest id
    and its log p, [C].
    """
    model = nnx.merge(sampler.graph, params)
    hidden_1LD, _ = model.hidden(state.token_BL, see_BM=given.see_BL)
    token_1C, score_1C, _, (likely_1C1, logp_1C1) = sampler.propose(
        model, hidden_1LD, 0, state, given, slot_1C
    )
    return token_1C[0], score_1C[0], likely_1C1[0, :, 0], logp_1C1[0, :, 0]


def grow(
    read, before, after, rule, key=None, size=START, most=LENGTHS[-1], regrow=None, to_right=False
):
    """The ids that a Dream with cfg.expand_id generates between two lists of ids, starting from
    `size` masks.

    Each pass writes the mask of highest confidence, by the order, temperature and filters of the
    rule: a token; or cfg.expand_id, two masks, while there are fewer than `most` tokens; or EOS,
    which deletes the mask, and with it all that are SURE. The last mask is not deleted. A hole that
    has shrunk grows no more.

    With regrow, DreamOn's own loop, a hole may shrink and grow again until `regrow` masks were
    added. That takes four to eight times the passes, for texts no better (bench/LOG.md), and the
    hole may become empty. With to_right, as in DreamOn's evaluation, EOS deletes the masks after
    it, too.
    """
    foreign = "guidance eos_penalty late_eos alg_temp threshold entropy_bound block_length".split()
    if foreign := [name for name in foreign if getattr(rule, name)]:
        raise ValueError(
            f"a hole that grows is filled without {', '.join(foreign)}; leave it out or say [MASK:12]"
        )
    cfg, mask, own = read.model.cfg, read.mask, regrow is None
    most = min(most, cfg.positions - len(before) - len(after))
    width = sample_dream.canvas_width(len(before) + most + len(after), cfg.positions)
    never = {mask, *(rule.ban_ids or ()), *range(read.vocab, cfg.vocab)} - {
        cfg.eos_id,
        cfg.expand_id,
    }
    filters = {name: getattr(rule, name) for name in ("temperature", "top_p", "top_k")}
    rule = sample_dream.Sampling(rule.alg, **filters, history=True, likeliest=1)
    sampler = sample_dream.sampler_of(read.graph, cfg, rule)
    key_1 = sample_dream.keys_of_rows(jax.random.key(0) if key is None else key, 1)
    hole, passes, shrunk, budget = [mask] * min(size, most), 0, False, math.inf if own else regrow
    while mask in hole:
        masks = np.flatnonzero(np.array(hole) == mask)
        no_growth = len(hole) == most or budget <= 0 or (own and shrunk)
        banned = never | ({cfg.expand_id} if no_growth else set())
        banned |= {cfg.eos_id} if own and len(hole) == 1 else set()
        token_1L, see_1L = sample_dream.canvas([[*before, *hole, *after]], 0, cfg, width)
        step_rule = dataclasses.replace(rule, ban_ids=tuple(banned))
        state, given, _ = sample_dream.prepare(cfg, step_rule, token_1L, see_1L, key_1)
        state = state._replace(step_B=state.step_B + passes)  # fresh noise
        slot_C = np.pad(masks, (0, most - len(masks)), "edge") + width - len(hole) - len(after)
        found = propose(read.params, state, given, slot_C[None], sampler=sampler)
        token_C, score_C, likely_C, logp_C = (np.asarray(x)[: len(masks)] for x in found)
        passes, read.passes = passes + 1, read.passes + 1

        best = np.argmax(score_C)
        place, token = masks[best], int(token_C[best])
        if token == cfg.eos_id:
            sure_C = (likely_C == cfg.eos_id) & (logp_C > math.log(SURE))
            gone = {place, *masks[own & sure_C], *masks[to_right & (masks > place)]}
            hole, shrunk = [token for i, token in enumerate(hole) if i not in gone], True
            hole = [mask] if own and not hole else hole
        elif token == cfg.expand_id:
            hole[place : place + 1], budget = [mask, mask], budget - 1
        else:
            hole[place] = token
    return hole


def grow_all(read, canvases, end, rule, key, **how):
    """Fill canvases of one hole each by `grow`, with the ids `end` after them: (the canvases with
    as many masks as the holes have then, their ids, {"forwards", "passes"}).
    """
    grown, filled, passes = [], [], []
    for i, blank in enumerate(canvases):
        first, n, passed = blank.ids.index(read.mask), blank.ids.count(read.mask), read.passes
        before, behind = blank.ids[:first], blank.ids[first + n :]
        hole = grow(read, before, behind + end, rule, jax.random.fold_in(key, i), **how)
        grown.append(dataclasses.replace(blank, ids=[*before, *[read.mask] * len(hole), *behind]))
        filled.append([*before, *hole, *behind])
        passes.append(read.passes - passed)
    return grown, filled, {"forwards": sum(passes), "passes": passes}


def score(read, before, hole, after, longest):
    """log p of a hole and the BEHIND tokens after it, from left to right, given the text before
    them.

    What follows is hidden in each pass: canvases are of one length, whatever the hole's.
    """
    text, slots = [*hole, *after[:BEHIND]], longest + BEHIND
    canvases = [[*before, *text[:i], *[read.mask] * (slots - i)] for i in range(len(text))]
    return read(
        canvases, [[len(before) + i] for i in range(len(text))], [[token] for token in text]
    )[0].sum()
