"""Text that stays Python: against Python itself, and a model whose next token is a table."""

import inspect
import math
import statistics
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx
from tokenizers import decoders, models, pre_tokenizers

import infill
import model_dream as md

CODE = textwrap.dedent('''
    @functools.cache
    def area(r, *, unit="mm", **kw) -> float:
        """A text
        of lines."""
        try:
            with open(f"{r:.3f} {unit!r}") as file, lock:
                rows = [(i, x["a"]) for i, x in enumerate(file) if not x.startswith('#') and i is not None]
        except (OSError, ValueError) as error:
            raise KeyError(r'\\d') from error
        else:
            print(0x1F, 1.5e-3, b"ab", *rows, sep="\\n") if kw else lambda a, b=1: a ** -b
        finally:
            del rows[1:], kw
        match unit:
            case "mm" | "cm": return r if r > 0 else \\
                -r
            case _: pass
        while True:
            async def inner(): yield (await r)
            global z; z: int = 3; nonlocal_ = z != 4
        from . import os as path, sys
        from os import (getcwd)
        import a.b as c
        assert z, "no"
''')


ESCAPES = r'''
x = "a\x41\x42" '\101' if "\u1234" else b"\x41\7\\x" b'\N{ \u1 \U2'
y = f"\x41{a}\U0001F600{b:\x3e4}\N{EN DASH}" + '\N{LATIN SMALL LETTER A}' + f"{c(1)!r:>{d}} {{"
z = rf'\d{x}\x' + r"\x\N{" + """\x41\N{SPACE}
\u1234"""
w = a if '\x41' else b'\x41'
lambda *a, **k: (lambda *, b: '\x41', lambda a, /, *b, c=1, **d: 1, lambda **k: 2)
def f(a, /, *b, c, **k): print(*b, **k, sep='\x41')
def g(*, a): return lambda *b: [*b, {**a}]
'''


def test_every_beginning_of_python_can_go_on():
    texts = [
        CODE,
        ESCAPES,
        inspect.getsource(statistics.fmean),
        inspect.getsource(textwrap.TextWrapper._split_chunks),
    ]
    for text in texts:
        assert infill.parses(text)
        wrong = [text[:end] for end in range(len(text)) if not infill.can_go_on(text[:end])]
        assert not wrong, wrong[0][-60:]


WRONG = [
    "retur x",
    "x = [1, 2\ny = 3",
    "f(a))",
    "def f(:",
    "if a\n",
    "x = 'a\n",
    "@a\nx = 1\n",
    "a b",
    "x = $",
    "1 = x\n",
    r'"\xg',
    r'"\u12"',
    r'b"\xz',
    r'f"\x4{',
    r'"\U0011',
    r'"\N{NO NAME}"',
    r"a\x",
    "lambda **,",
    "lambda *)",
    "def f(*)",
    'f"{a b',
]
WRONG += [
    "def f():\n    x\n      y",
    "def f():\nx",
    "def f():\n    if a:\n        b\n      c",
    "try:\n    a\nb",
    "f(x=1, 2",
]


@pytest.mark.parametrize("text", WRONG)
def test_what_no_text_makes_python_cannot_go_on(text):
    assert not infill.can_go_on(text)
    assert not infill.can_go_on(text + "\n")
    assert not infill.parses(text)


def test_a_beginning_is_not_the_whole():
    for text in ("def f(a", "x = (1,", "if a:\n", "x = '''a", "x ="):
        assert infill.can_go_on(text)
        assert not infill.parses(text)
    assert infill.parses("    def f(self):\n        return 1\n")  # a method without its class
    assert not infill.parses("x = '\0'")


def test_what_was_given_does_not_become_a_comment_or_a_string():
    assert infill.swallows("", "# a ", "return x\n")
    assert infill.swallows("x = ", "a  # ", "b\n")
    assert infill.swallows("x = 1\n", "y = '''", "z\n'''\n")
    for line_end in ("\n", "\r\n"):
        # the comment ends with its line
        assert not infill.swallows("x = ", "a  # b", f"{line_end}y = 2\n")
    assert not infill.swallows("x = '", "a b", "c'\n")  # it was a string before
    assert not infill.swallows("# a ", "b", " c\n")
    assert not infill.swallows("x = ", "(1, 2", ")\n")


# A token is a piece of Python; the model's next token depends on the token before alone.
PIECES = [
    "<pad>",
    "<bos>",
    "<eos>",
    "<mask>",
    *(chr(c) for c in range(97, 123)),
    "(",
    ")",
    "=",
    "\n",
    " ",
    "1",
    ",",
]


def of_pieces(text):
    return [PIECES.index(letter) for letter in text]


@pytest.fixture(scope="module")
def tokenizer():
    model = models.WordLevel({piece: i for i, piece in enumerate(PIECES)}, unk_token="<pad>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.Split("", "isolated"),
        decoders.Fuse(),
    )
    tokenizer.add_special_tokens(PIECES[:4])
    return tokenizer


def new_model(likely, strength=9.0):
    """A Dream in which `likely` says which token follows which; after MASK all are equally likely."""
    V = len(PIECES)
    ids = {"mask_id": 3, "pad_id": 0, "bos_id": 1, "eos_id": 2}
    cfg = md.DreamConfig(
        V, 48, layers=1, heads=4, kv_heads=2, head_size=8, ffn=40, positions=128, **ids
    )
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), md.param_shapes(cfg))
    embed, head = np.zeros((V, 48), np.float32), np.zeros((V, 48), np.float32)
    embed[np.arange(V), np.arange(V)] = 1
    embed[3] = 0
    for before, then in likely:
        head[PIECES.index(then), PIECES.index(before)] = strength / math.sqrt(48)
    params |= {
        "norm": jnp.ones(48),
        "embed_tokens": jnp.asarray(embed),
        "lm_head": jnp.asarray(head),
    }
    return nnx.merge(md.graph_of(cfg, md.Compute()), params)


def mended(read, canvas, filled, ends=()):
    ids, is_right = infill.mend(read, canvas, filled, ends)
    assert all(token == given for token, given in zip(ids, canvas, strict=True) if given != 3)
    assert 3 not in ids
    return read.tokenizer.decode(ids), is_right


def test_what_python_cannot_read_is_written_again_and_what_it_can_is_left(tokenizer):
    likely = ["=(", "((", "(a", "ab", "b)", ")\n", ")1"]
    read = infill.Reader(new_model(likely), tokenizer)
    canvas = [*of_pieces("x="), 3, 3, 3, 3, *of_pieces("\ny=1\n")]
    # Right already: no pass.
    text = "x=f(a)\ny=1\n"
    assert mended(read, canvas, of_pieces(text)) == (text, True)
    assert read.passes == 0
    # No token closes two brackets: the last four are written again, in one pass.
    text, is_right = mended(read, canvas, of_pieces("x=((ab\ny=1\n"))
    assert is_right
    assert infill.parses(text)
    assert read.passes == 2
    # One closes one of them, and is all that changes.
    assert mended(read, canvas, of_pieces("x=(ab,\ny=1\n")) == ("x=(ab)\ny=1\n", True)
    # What follows a hole decides whether the text before was right.
    canvas = [*of_pieces("x"), 3, 3, *of_pieces("1)\n")]
    assert mended(read, canvas, of_pieces("x=a1)\n")) == ("x=(1)\n", True)
    # Between these no text is Python, whatever stands there.
    canvas = [*of_pieces("x="), 3, 3, *of_pieces("\n==\n")]
    assert mended(read, canvas, of_pieces("x=ab\n==\n"))[1] is False


def test_a_text_that_goes_on_stops_anywhere_and_ends_whole(tokenizer):
    read = infill.Reader(new_model(["=(", "(a", "ab", "b)", ")\n", "\na"]), tokenizer)
    canvas = [*of_pieces("x="), *[3] * 6]
    # a bracket may be closed later
    assert mended(read, canvas, of_pieces("x=(ab,aa")) == ("x=(ab,aa", True)
    assert read.passes == 0
    assert mended(read, canvas, of_pieces("x=(a))bb")) == ("x=(a)\nbb", True)  # a bracket too many
    # An end token within a bracket: what was written before it must be whole.
    text, is_right = mended(read, canvas, [*of_pieces("x=(a"), 2, 2, 2, 2], ends={2})
    assert is_right
    assert text == "x=(ab)"
