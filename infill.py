"""Text that stays valid Python, of Dreams that see the whole canvas. Asks a model.

    infill.can_go_on("def area(r):\\n    return (r *")      # True: more text makes a program of it
    read = infill.Reader(model, tokenizer)
    ids, is_python = infill.mend(read, canvas, filled, ends)    # the filled canvas, made valid

generate_dream.py does this with --valid=python. A canvas is filled without a parser. Where Python's
own parser finds that no text makes a program of the result, the first wrong token is replaced by
the likeliest that fits. If none fits, a beam search replaces tokens before it, too. A canvas that
was right costs no further pass. How long a hole is, is not decided here: it has a number of masks,
and may end with EOS.

Letters: B rows, C slots of a row, L slots of a canvas, V vocabulary, S slots of one canvas.
"""

import ast
import bisect
import codeop
import functools
import itertools
import keyword
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import sample_dream

BEAMS = 8  # width of the beam search
CHOICES = 64  # likeliest tokens that are tried at a position

# ---- what Python can still become --------------------------------------------------------------

# One of these completes a text that stops in the middle, unless the parser itself says that it is
# incomplete.
ENDINGS = (
    # an expression
    *("", "(", " (", "x", " x", "x(", " x(", "=(", "*x", ">x:", " in(", " else(", " x in("),
    # a statement
    *(":", ":(", ": x", " x:", "x: x", "*x: x", "\n"),
    *(" def x(", " import(", "x import(", " x import("),
    # a string or a number
    *("'", '"', "''", '""', "}'", '}"', "':", '":', "0]}'", '0]}"', "0", "."),
    *("r}'", 'r}"', "' else x", '" else x'),
)
WORDS = *keyword.kwlist, "match", "case"
DIGITS = {"x": 2, "u": 4, "U": 8}  # hexadecimal, of an escape in a string


def parses(text, whole=True):
    """Whether a text is Python, or with whole=False the beginning of it: then it may stop within a
    bracket, a string of three quotes or a block. A text that begins indented is the body of
    something.
    """
    flags = ast.PyCF_ONLY_AST
    if not whole:
        flags |= codeop.PyCF_ALLOW_INCOMPLETE_INPUT
    for line in text.splitlines():
        code = line.strip()
        if code and not code.startswith("#"):
            if line[0].isspace():
                text = "if x:\n" + text
            break
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
    begins. An escape in a string is completed first; \\N{ may go on with any name.
    """
    text = text.rstrip("\ufffd")  # half a character
    escape = re.search(r"\\(?:([xuU])([\da-fA-F]*)|N(?:\{[a-zA-Z\d -]*)?)\Z", text)
    if escape:
        completed = text[: escape.start()] + r"\N{SPACE}"
        if escape[1]:
            completed = text + "0" * (DIGITS[escape[1]] - len(escape[2]))
        if any(parses(completed + end, whole=False) for end in ENDINGS):
            return True
    # In an f-string Python 3.12 reads what is before an open expression when that is closed, and
    # 3.11 reads all of it when the string ends.
    field = re.search(r"\{([^{}'\"\\]*)\Z", text)
    if field:
        before = text[: field.start()]
        if not can_go_on(before + "{r}") and not can_go_on(before + "{'r': r}"):
            return False
    begun = text
    words = [""]
    if found := re.search(r"[^\W\d]\w*\Z", text):
        begun = text[: found.start()]
        words = [found[0]]
        words += [word for word in WORDS if word.startswith(found[0]) and word != found[0]]
    if any(parses(begun + word + end, whole=False) for word in words for end in ENDINGS):
        return True
    return bool(field) and "\n" not in field[1] and can_go_on("(" + field[1])


def swallows(before, hole, behind):
    """Whether the text after a hole is now in a comment or string that begins in it: only there
    Python allows a $.
    """
    dollar = "$"
    if behind.startswith(("\n", "\r")):  # a comment ends with its line
        dollar = "\n$"

    def allows(text):
        return any(parses(text + end, whole=False) for end in ("", "'", '"', "}'", '}"'))

    return bool(behind) and allows(before + hole + dollar) and not allows(before + "$")


# ---- what a model says of a canvas -------------------------------------------------------------


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
    logp_BCV = jax.nn.log_softmax(jnp.where(allowed_V, logits_BCV, -jnp.inf))
    of_target_BC = jnp.take_along_axis(logp_BCV, target_BC[..., None], -1)[..., 0]
    return of_target_BC, *jax.lax.top_k(logp_BCV, choices)


class Reader:
    """A model and its tokenizer, to score canvases, which are lists of ids. `passes` counts
    canvases.
    """

    def __init__(self, model, tokenizer):
        self.model = model
        self.tokenizer = tokenizer
        self.passes = 0
        self.mask = model.cfg.mask_id
        self.vocab = tokenizer.get_vocab_size()
        self.graph, self.params = nnx.split(model)

    def __call__(self, canvases, slots, targets=None):
        """`predict` for slots [B, C] of canvases of any lengths, one or BEAMS of them in a pass."""
        cfg = self.model.cfg
        B = len(canvases)
        at_once = 1
        if B > 1:
            at_once = BEAMS
        rows = -(-B // at_once) * at_once
        L = sample_dream.canvas_width(max(map(len, canvases)), cfg.positions)
        token_BL = np.full((rows, L), cfg.pad_id, np.int32)
        see_BL = np.zeros((rows, L), bool)
        for row, canvas in enumerate(canvases):
            token_BL[row, : len(canvas)] = canvas
            see_BL[row, : len(canvas)] = True
        slot_BC = np.resize(slots, (rows, len(slots[0])))
        target_BC = np.resize(targets or slots, slot_BC.shape)
        found = []
        for i in range(0, rows, at_once):
            part = slice(i, i + at_once)
            batch = token_BL[part], see_BL[part], slot_BC[part], target_BC[part]
            how = {"vocab": self.vocab, "choices": min(CHOICES, self.vocab - 1)}
            found.append(predict(self.params, *batch, graph=self.graph, **how))
        self.passes += B
        return [np.concatenate(arrays)[:B] for arrays in zip(*found, strict=True)]


# ---- as Python ---------------------------------------------------------------------------------


class Filled:
    """A canvas with masks, and the ids `ends` that end what is generated: what a text of it is."""

    def __init__(self, tokenizer, canvas, mask, ends):
        self.tokenizer = tokenizer
        self.canvas = canvas
        self.mask = mask
        self.ends = ends

    def text_of(self, ids):
        """(text, whether it ended by itself): a run of masks is left out from its first end token
        on.
        """
        kept = []
        ended = False
        for given, token in zip(self.canvas, ids, strict=False):
            ended = given == self.mask and (ended or token in self.ends)
            if not ended:
                kept.append(token)
        return self.tokenizer.decode(kept), ended

    def fits(self, ids, p):
        """Whether the text up to slot p, and what was given after it, can become Python; the whole:
        whether it is.
        """
        L = len(self.canvas)
        given = [q for q in range(p + 1, L) if self.canvas[q] != self.mask]
        following = p + 1  # slot of the next mask
        while following < L and self.canvas[following] != self.mask:
            following += 1
        text, ended = self.text_of(ids[:following])
        whole = ended or (following == L and self.canvas[-1] != self.mask)
        is_right = parses(text) if whole else can_go_on(text)
        if not is_right:
            return False
        # What a hole opened is closed in it, by a token each.
        begin = p
        while begin > 0 and self.canvas[begin - 1] == self.mask:
            begin -= 1
        before, _ = self.text_of(ids[:begin])
        upto, _ = self.text_of(ids[: p + 1])
        hole = upto[len(before) :]
        if not given or following == p + 1:
            depth = sum(map(hole.count, "([{")) - sum(map(hole.count, ")]}"))
            return not given or depth < given[0] - p
        return not swallows(before, hole, text[len(upto) :])


def mend(read, canvas, filled, ends=(), on_progress=None):
    """A filled canvas with generated tokens replaced until the text is Python: (ids, whether it
    is).

    The text may stop in the middle if the canvas ends with masks and none of the ids `ends` was
    generated there. on_progress(tokens that are valid, all) is called before each replacement.
    """
    ids = list(filled)
    fits = Filled(read.tokenizer, canvas, read.mask, ends).fits
    masks = [p for p, token in enumerate(canvas) if token == read.mask]  # their slots
    n = 0
    while masks and not fits(ids, masks[-1]):
        n = bisect.bisect_left(masks, True, lo=n, key=lambda p: not fits(ids, p))
        if on_progress:
            on_progress(n, len(masks))
        first = n  # of this hole
        while first > 0 and masks[first - 1] == masks[first] - 1:
            first -= 1
        # Replace that token alone; where none fits, more and more of the tokens before it, too.
        size = n + 1 - first
        for width, beams in ((1, 0), (4, 0), (16, 2), (size, BEAMS), (size, 4 * BEAMS)):
            new = write_again(read, ids, masks[n + 1 - min(width, size) : n + 1], fits, beams)
            if new:
                break
        else:
            return ids, False
        ids = new
        n += 1
    return ids, True


def write_again(read, ids, span, fits, beams=0):
    """ids with the likeliest tokens that fit at the slots `span`, from left to right; None if there
    are none.

    One pass gives the likelihoods at all slots; with `beams` there is one for each slot and beam.
    """
    kept = [(0.0, [read.mask if p in span else token for p, token in enumerate(ids)])]
    if not beams:
        padded = span
        if len(span) > 1:  # two shapes are compiled
            padded = [*span, *[span[-1]] * (4 - len(span))]
        _, (logp_SC,), (token_SC,) = read([kept[0][1]], [padded])
    for i, p in enumerate(span):
        if beams:
            _, logp_B1C, token_B1C = read([beam for _, beam in kept], [[p]] * len(kept))
            choices = zip(logp_B1C[:, 0].tolist(), token_B1C[:, 0].tolist(), strict=True)
        else:
            choices = [(logp_SC[i].tolist(), token_SC[i].tolist())] * len(kept)
        found = []
        for (total, beam), likeliest in zip(kept, choices, strict=True):
            for logp, token in zip(*likeliest, strict=True):
                found.append((total + logp, [*beam[:p], token, *beam[p + 1 :]]))
        fitting = (each for each in sorted(found, reverse=True) if fits(each[1], p))
        most = beams or BEAMS
        if p == span[-1]:
            most = 1
        kept = list(itertools.islice(fitting, most))
        if not kept:
            return None
    return kept[0][1]


if __name__ == "__main__":
    raise SystemExit(__doc__)
