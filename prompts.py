"""A prompt as a canvas of masks, a filled canvas as text; steps, probabilities, drafts in a
terminal or as a page; the >>> examples of a prompt as tests.

    texts = canvas.Texts(tokenizer, mask_id, ends, positions)
    blank = texts.canvas("def area(r):\\n    [MASK:8]\\n", "", max_new=128)     # blank.ids: what a sampler fills
    completion, text = texts.text_of(blank, ids)
    canvas.write_page("steps.html", [texts.tokens(blank, ids, when, probability)])    # or steps.svg

For generate.py, serve.py, batching.py, writers.py, repair.py, coupled_grpo.py, and
data_prep.py's chat templates. Imports nothing of ours; a page is serve.html with the steps inside.
"""

import ast
import contextlib
import dataclasses
import functools
import html
import itertools
import json
import math
import re
import subprocess
import sys
import tempfile
import typing
import warnings
from pathlib import Path

from tokenizers.decoders import DecodeStream


@dataclasses.dataclass
class Canvas:
    """A text with masks to fill."""

    prompt: str
    suffix: str
    ids: list[int]  # MASK where the model generates
    start: int  # index of the first token that is shown
    # text before and after a completion; None where [MASK:n] says where it is
    around: tuple[str, str] | None
    counted: bool = False  # the number of tokens of its [MASK] was predicted


class Texts:
    """Prompts as canvases, and canvases as texts, for a model with the id `mask` and this many
    positions.

    ends are ids that end a text, begin ids before a plain one. ask(prompt) encodes a prompt by a
    chat template; None: prompts are plain text. A suffix or [MASK:n] makes plain text of any
    prompt; must_ask refuses these.
    """

    def __init__(self, tokenizer, mask, ends, positions, begin=(), ask=None, must_ask=False):
        self.tokenizer, self.mask, self.ends, self.positions = tokenizer, mask, ends, positions
        self.begin, self.ask, self.must_ask = [*begin], ask, must_ask

    def canvas(self, prompt, suffix, max_new, infill=True, measure=None):
        """The Canvas of a request: "a [MASK:2]b" has the texts a and b around two masks. ValueError
        if it is too long.

        A suffix follows max_new masks, and a prompt without masks goes on with as many. A space
        before [MASK:n] is left
        out: a token brings its own. measure(ids before, ids of the texts after, sizes) counts the
        tokens of [MASK].
        """
        # Cut the request at its masks: texts and numbers of masks take turns.
        cut = re.compile(r" ?\[MASK(?::(\d+))?\]").split if infill else lambda text: [text]
        parts = cut(prompt)
        if suffix or len(parts) == 1:
            parts.append(max_new)
        if suffix:
            parts += cut(suffix)
        texts, sizes = parts[::2], [count and int(count) for count in parts[1::2]]
        if infill and (0 in sizes or any("[MASK" in text for text in texts)):
            raise ValueError(
                "write a hole as [MASK] or [MASK:12]; generate.py --no-infill takes [MASK as text"
            )
        answers = self.ask is not None and len(texts) == len(sizes)  # nothing follows the last mask
        if self.must_ask and not answers:
            raise ValueError(
                "--chat=on and --system are for prompts; a suffix or [MASK:n] is filled in plain text"
            )

        self.tokenizer.encode_special_tokens = True  # names of special tokens in a text are text
        encoded = [self.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        encoded[0] = self.ask(prompt) if answers else [*self.begin, *encoded[0]]
        counted = None in sizes
        length = sum(map(len, encoded)) + sum(1 if size is None else size for size in sizes)
        if length > self.positions:
            advice = "lower --max_new or mask less"
            raise ValueError(
                f"{length} tokens do not fit the model's {self.positions} positions; {advice}"
            )
        if counted:
            sizes = measure(encoded[0], encoded[1:], sizes)
        ids = encoded[0]
        for size, following in zip(sizes, [*encoded[1:], []], strict=False):
            ids = ids + [self.mask] * size + following
        start = ids.index(self.mask) if answers else len(self.begin)
        around = ("", "") if answers else (prompt, suffix)
        if len(texts) > (2 if suffix else 1):  # [MASK:n] says where to write
            around = None
        return Canvas(prompt, suffix, ids, start, around, counted)

    def kept(self, canvas, ids):
        """Positions of a filled canvas without what a run of masks holds from its first end token
        on.
        """
        kept, ended = [], False
        for p, (given, token) in enumerate(zip(canvas.ids, ids, strict=True)):
            ended = given == self.mask and (ended or token in self.ends)
            if not ended:
                kept.append(p)
        return kept

    def text_of(self, canvas, ids, cut=lambda text: text):
        """(the completion, cut by cut(text); the whole text): one and the same where [MASK:n] said
        where it goes.
        """
        kept = self.kept(canvas, ids)
        if not canvas.around:
            text = self.tokenizer.decode([ids[p] for p in kept])
            return text, text
        completion = cut(
            self.tokenizer.decode([ids[p] for p in kept if canvas.ids[p] == self.mask])
        )
        return completion, completion.join(canvas.around)

    def tokens(self, canvas, ids, when, prob, likely=()):
        """The Tokens of a filled canvas; when and prob are the step and the probability of each id,
        likely the ids of the likeliest tokens and their log p.
        """
        shown = [p for p in self.kept(canvas, ids) if p >= canvas.start]
        texts = pieces(self.tokenizer, [ids[p] for p in shown])
        tokens = [
            Token(text, int(when[p]), float(prob[p])) for text, p in zip(texts, shown, strict=True)
        ]
        if likely:
            others = [
                others_of(self.tokenizer, *(x_LN[p].tolist() for x_LN in likely)) for p in shown
            ]
            tokens = [
                token._replace(likely=each) for token, each in zip(tokens, others, strict=True)
            ]
        return tokens

    def picture(self, canvas, ids, prob=None):
        """The text of a canvas that is not full, masks as blocks; with probabilities what was
        written is coloured.
        """
        shown, text = [p for p in self.kept(canvas, ids) if p >= canvas.start], ""
        for masked, group in itertools.groupby(shown, lambda p: ids[p] == self.mask):
            group = list(group)
            if masked:
                text += "\u2591" * len(group)
                continue
            for p, piece in zip(
                group, pieces(self.tokenizer, [ids[p] for p in group]), strict=True
            ):
                text += shaded(piece, prob[p]) if prob and canvas.ids[p] == self.mask else piece
        return text


# what `ast` raises of a text
UNREADABLE = SyntaxError, ValueError, TypeError, RecursionError, MemoryError
TURN_ENDS = "<|im_end|>", "<|eot_id|>"  # end a turn of a chat, in Qwen2.5's template and in LLaDA's
HIDDEN = "\ufdd0"  # a code point that Unicode keeps out of texts


def turn_end(tokenizer):
    """The id of the token that ends a turn of a chat; None if the tokenizer has none."""
    return next((i for i in map(tokenizer.token_to_id, TURN_ENDS) if i is not None), None)


def end_of_text(folder, tokenizer):
    """The id that ends a text of PythonCoder: by generation_config.json, else <|endoftext|>; -1 if
    there is none.
    """
    path, token = folder / "generation_config.json", tokenizer.token_to_id("<|endoftext|>")
    try:
        token = (
            json.loads(path.read_bytes()).get("eos_token_id", token) if path.is_file() else token
        )
    except (ValueError, AttributeError):
        raise ValueError(f"{path} is damaged: it is not a JSON object") from None
    token = next(iter(token), None) if isinstance(token, list) else token  # of several the first
    return -1 if token is None else token


def chat_template(folder):
    """wrap(prompt, system=None, before=()) -> text, by the chat template in a model's folder; None
    if it has none.

    The prompt is a user's turn, after system and the (prompt, answer) pairs of `before`. ValueError
    if it fails.
    """
    path, jinja = (folder / name for name in ("tokenizer_config.json", "chat_template.jinja"))
    try:
        config = json.loads(path.read_bytes()) if path.exists() else {}
        template = jinja.read_text() if jinja.exists() else config.get("chat_template")
    except (ValueError, AttributeError):
        raise ValueError(
            f"the chat template of {folder} is damaged: {path.name} or {jinja.name}"
        ) from None
    if isinstance(template, list):  # a template for each purpose, by name
        template = next(
            (entry["template"] for entry in template if entry["name"] == "default"), None
        )
    if not template:
        return None
    import jinja2.sandbox

    def refuse(message):  # templates call it raise_exception
        raise jinja2.TemplateError(message)

    # The template is code of whoever made the model, so it runs in jinja2's sandbox, as in
    # transformers.
    special = {f"{name}_token": config.get(f"{name}_token") or "" for name in ("bos", "eos", "pad")}
    special = {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in special.items()
    }
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals |= {"raise_exception": refuse, **special}
    compiled = functools.cache(environment.from_string)  # compiling takes 5 ms, rendering 0.07

    def wrap(prompt, system=None, before=()):
        turns = [] if system is None else [("system", system)]
        turns += [turn for pair in before for turn in zip(("user", "assistant"), pair, strict=True)]
        messages = [{"role": role, "content": text} for role, text in (*turns, ("user", prompt))]
        try:
            return compiled(template).render(messages=messages, add_generation_prompt=True)
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"the chat template of {folder} fails: {error}") from None

    return wrap


def encode_chat(tokenizer, wrap, prompt, system=None, before=()):
    """Token ids of a prompt in a chat template, after a system turn and the (prompt, answer)s
    before it.

    Special tokens are the template's alone. Their names in what was written stay text: HIDDEN
    breaks them until the template's have become tokens.
    """
    names = [
        token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special
    ]
    special = re.compile(f"({'|'.join(map(re.escape, sorted(names, key=len, reverse=True)))})")
    hide = functools.partial(special.sub, lambda name: name[0][0] + HIDDEN + name[0][1:])
    text, ids = (
        wrap(hide(prompt), system and hide(system), [tuple(map(hide, turns)) for turns in before]),
        [],
    )
    tokenizer.encode_special_tokens = True
    for part in special.split(text):
        if part in names:
            ids.append(tokenizer.token_to_id(part))
        else:
            ids += tokenizer.encode(part.replace(HIDDEN, ""), add_special_tokens=False).ids
    return ids


def encode_messages(tokenizer, wrap, messages):
    """Token ids of OpenAI's messages in a chat template. ValueError for those that are no
    conversation.
    """
    if wrap is None:
        raise ValueError("the model has no chat template: use /v1/completions")
    try:
        roles, texts = zip(*((turn["role"], turn["content"]) for turn in messages), strict=True)
        texts = [
            text if isinstance(text, str) else "".join(part["text"] for part in text)
            for text in texts
        ]
        system = texts.pop(0) if roles[0] in ("system", "developer") else None
        if roles[-len(texts) :] != (("user", "assistant") * len(texts))[: len(texts) | 1]:
            raise ValueError
    except (TypeError, KeyError, ValueError):
        raise ValueError(
            "messages have to be texts of user and assistant in turn, the last of user"
        ) from None
    return encode_chat(
        tokenizer, wrap, texts[-1], system, list(zip(texts[:-1:2], texts[1::2], strict=True))
    )


# ---- prompts ---------------------------------------------------------------------------------------------------------


def read_requests(data, name):
    """[(prompt, suffix)] of the JSON lines in what the file `name` holds. ValueError names the line
    that is not one.
    """
    requests = []
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            # half a surrogate pair is no text
            f"{(row := json.loads(line)).get('prompt')}{row.get('suffix')}".encode()
            # TypeError
            requests.append(
                (row["prompt"] + "", "" if row.get("suffix") is None else row["suffix"] + "")
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError(
                f'{name}, line {number} is not a JSON object with the text "prompt"'
            ) from None
    if not requests:
        raise ValueError(f"{name} holds no prompts")
    return requests


def on_new_line(prompt):
    """The prompt, with a line break after closing quotes or a def's or class's colon: tokenizers
    join it to those.
    """
    quotes = re.search(r"(\"{3}|'{3})\Z", prompt)
    closing = quotes and prompt.count(quotes[0]) % 2 == 0
    return (
        prompt + "\n"
        if closing or re.search(r"^[ \t]*(async def|def|class) .*:\Z", prompt, flags=re.M)
        else prompt
    )


def interact(complete, end, whole):
    """Read prompts from standard input, each ended by an empty line or EOF; call complete([(prompt,
    "")]) for each.

    end is appended to a prompt, then whole() is applied. A ValueError is printed, and reading goes
    on.
    """
    terminal = sys.stdin.isatty()
    if terminal:
        print(
            "Write, then an empty line to have it continued or answered; Ctrl-D ends.",
            file=sys.stderr,
        )
    lines, at_end = [], False
    while not at_end:
        try:
            line = input(("... " if lines else ">>> ") if terminal else "")
        except EOFError:
            line, at_end = "", True
        if line:
            lines.append(line)
        elif lines:
            try:
                complete([(whole("\n".join(lines) + end), "")])
            except ValueError as error:
                print(error, file=sys.stderr)
            lines = []


# ---- a completion ---------------------------------------------------------------------------------------------------


def encode(tokenizer, prompt, suffix):
    """Token ids of a prompt; with a suffix in the order prefix, suffix, middle. Names of special
    tokens stay text.
    """
    tokenizer.encode_special_tokens = True
    return in_order(
        tokenizer,
        *(tokenizer.encode(text, add_special_tokens=False).ids for text in (prompt, suffix)),
    )


def in_order(tokenizer, prompt_ids, suffix_ids):
    """The ids that an autoregressive model continues. ValueError if its tokenizer has no tokens for
    a suffix.
    """
    if not suffix_ids:
        return prompt_ids
    names = "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"
    begin, then, middle = map(tokenizer.token_to_id, names)
    if None in (begin, then, middle):
        raise ValueError(
            f"text after a hole needs {', '.join(names)}, which this model's tokenizer lacks"
        )
    return [begin, *prompt_ids, then, *suffix_ids, middle]


def printable(text, stops):
    """What may be shown of a text that grows: not half a character, nor what may become a stop
    string.
    """
    text = truncate(text, stops).rstrip("\ufffd")
    held = max((k for s in stops for k in range(1, len(s)) if text.endswith(s[:k])), default=0)
    return text[: len(text) - held]


def truncate(text, stops):
    """The text before the first of any of the stop strings."""
    return text[: min((i for i in map(text.find, stops) if i >= 0), default=len(text))]


# ---- the examples of a prompt --------------------------------------------------------------------------------------


def examples(prompt):
    """[(call, result, test of sandbox.py)] of the >>> examples in a prompt's docstrings, or in a
    prompt without one.

    A statement, such as c = Counter(3), is not tested; it and all lines after it are repeated
    before each later test. An example that raises is neither tested nor repeated. ValueError if
    none is left.
    """
    import doctest

    found = []
    try:
        docstrings = [
            ast.literal_eval(match[0]) for match in re.finditer(r"(?s)r?(\"{3}|'{3}).*?\1", prompt)
        ]
        for docstring in docstrings or [prompt]:
            before = []
            for example in doctest.DocTestParser().get_examples(docstring):
                tree, want = ast.parse(example.source), example.want.strip()
                call = ast.unparse(tree).replace("\n", "\n ")
                value, result, lone = f"repr({call})", want, [*map(type, tree.body)] == [ast.Expr]
                if not lone:
                    value = ""
                elif call.startswith("print("):
                    value = printed(call)
                else:
                    with contextlib.suppress(*UNREADABLE):  # no literal
                        value, result = f"({call})", ast.literal_eval(want)
                if want and value and not example.exc_msg:
                    test = ast.unparse(ast.parse(f"assert {value} == {result!r}"))
                    found.append(
                        (call, want, "\n ".join(["if 1:", *before, test]) if before else test)
                    )
                if (before or not want or not lone) and not example.exc_msg:
                    before.append(call)
    except UNREADABLE as error:
        raise ValueError(f"cannot read the >>> examples of the prompt: {error}") from None
    if not found:
        raise ValueError(
            "the prompt has no >>> examples that can be run; write >>> f(1), and its result below"
        )
    return found


def printed(call):
    """What print(...) writes, as an expression; "" (not tested) if it has keywords or is part of an
    expression.
    """
    node, values = ast.parse(call).body[0].value, call[6:-1]
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.keywords:
        return ""
    single = len(node.args) == 1 and not isinstance(node.args[0], ast.Starred)
    return f"str({values})" if single else f"' '.join(map(str, [{values}]))"


def definitions(prompt, text):
    """The longest beginning of a text that parses, up to the first statement after the prompt that
    defines nothing.

    Of an answer, which does not begin with its prompt, its first block of code; what stands before
    the definitions stays.
    """
    kinds = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom
    if not text.startswith(prompt) and (fence := re.search(r"(?s)```\w*\n(.*?)(\n```|\Z)", text)):
        prompt, text = re.split(r"(?m)^(?=async def |def |class )", fence[1])[0], fence[1]
    lines = text.split("\n")
    for end in range(len(lines), 0, -1):
        with contextlib.suppress(*UNREADABLE), warnings.catch_warnings(action="ignore"):
            body = [
                node
                for node in ast.parse("\n".join(lines[:end])).body
                if not isinstance(node, kinds)
            ]
            others = (node.lineno - 1 for node in body if node.lineno > len(prompt.splitlines()))
            return "\n".join(lines[: next(others, end)]).rstrip()
    return text


def verdicts(program, tests):
    """["pass: f(1) gives 2"] of the examples(), by sandbox.py. RuntimeError if that cannot run."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("program.py", "tests.txt")]
        paths[0].write_text(program, "utf-8")
        paths[1].write_text("\n".join(test for *_, test in tests), "utf-8")
        command = [
            sys.executable,
            Path(__file__).with_name("sandbox.py"),
            paths[0],
            f"--tests={paths[1]}",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
    said = done.stdout.splitlines()[:-1]
    if len(said) != len(tests):
        # what follows are flags of sandbox.py
        why = done.stderr.strip().rpartition("\n")[2].partition("; ")[0]
        raise RuntimeError(f"sandbox.py failed: {why}")
    for i, (call, want, _) in enumerate(tests):
        verdict, got = said[i][:12].strip(), said[i].partition("    # got ")[2]
        result = (
            f"gives {want}"
            if verdict == "pass"
            else f"gives {got}, not {want}"
            if got
            else f"is not {want}"
        )
        said[i] = f"{verdict}: {call} {result}"
    return said


def judged(prompt, text):
    """The verdicts on a text that goes on from a prompt, by the examples in the prompt."""
    return verdicts(text if "[MASK" in prompt else definitions(prompt, text), examples(prompt))


def checked(completions, n, tests):
    """Of n completions (row, text) of each prompt the first that passes its tests, else the first
    of them.

    The row gets "passed" and "examples", the verdicts; the text is the program that was tested and
    the same as comments. ValueError after the last one if no completion of a prompt passes.
    """
    failed = 0
    for i, of_prompt in enumerate(tests):
        shown = []
        for row, text in completions[i * n : (i + 1) * n]:
            given = row.get("suffix") or "[MASK" in row["prompt"]  # text after what was generated
            program = text if given else definitions(row["prompt"], text)
            try:
                said = verdicts(program, of_prompt)
            except RuntimeError as error:
                said = [f"not run: {error}"]
            passed = all(line.startswith("pass") for line in said)
            lines = "\n".join(said).replace("\n", "\n# ")
            shown.append((row | {"passed": passed, "examples": said}, f"{program}\n# {lines}"))
            if passed:
                print(f"completion {len(shown)} of {n} passes", file=sys.stderr)
                break
        failed += 0 if passed else 1
        yield shown[-1 if passed else 0]
    if failed:
        raise ValueError(f"no completion passes all examples of {failed} of {len(tests)} prompts")


# ---- the step and the probability of each token --------------------------------------------------------------------

LIKELIEST = 5  # tokens that are kept for each position of a page


class Token(typing.NamedTuple):
    text: str
    step: int  # that wrote it; 0: it was given
    probability: float = 1.0  # the model's, in that step
    note: str = ""
    likely: tuple = ()  # (text, probability) of the likeliest tokens then


def pieces(tokenizer, ids):
    """The text that each token adds; a character of several tokens belongs to the last of them."""
    stream = DecodeStream(skip_special_tokens=True)
    texts = [stream.step(tokenizer, token) or "" for token in ids]
    if ids:
        # of a character that ends here unfinished
        texts[-1] += tokenizer.decode(ids)[len("".join(texts)) :]
    return texts


def others_of(tokenizer, ids, logp):
    """((text, probability)) of the likeliest tokens at a position."""
    return tuple((tokenizer.decode([i]), math.exp(p)) for i, p in zip(ids, logp, strict=True))


def drafts_of(lengths, ids, rule, max_new):
    """[(pass, "accepted" | "rejected" | "")] of the tokens of a text, which was `lengths` long
    after each pass.

    A pass that commits two tokens had the first of them as a draft; one that commits a single token
    had another draft, unless it was the first pass or there was no room for two.
    """
    drafts, end = [], 0
    for number, length in enumerate(lengths, 1):
        new, end = length - end, length
        single = number == 1 or not rule.speculate or end >= max_new or ids[end - 1] == rule.eos
        kinds = ["accepted", ""] if new == 2 else ["" if single else "rejected"]
        drafts += [(number, kind) for kind in kinds[:new]]
    return drafts


def draft_tokens(tokenizer, ids, drafts, prob, cut, likely):
    """The Tokens of a text of PythonCoder, as far as cut(text) keeps it; drafts are those of
    drafts_of().
    """
    written = zip(pieces(tokenizer, ids), drafts, prob, likely, strict=True)
    tokens = [
        Token(text, step, p, f"draft {kind}" if kind else "", top)
        for text, (step, kind), p, top in written
    ]
    left = len(cut("".join(token.text for token in tokens)))
    for i, token in enumerate(tokens):
        tokens[i], left = token._replace(text=token.text[:left]), max(0, left - len(token.text))
    return tokens


# a terminal's, red to green: one for each tenth of probability
SHADES = 196, 202, 208, 214, 220, 190, 154, 118, 82, 46
DRAFT_COLOURS = {"accepted": 46, "rejected": 196, "": 0}


def coloured(text, colour):
    return f"\x1b[38;5;{colour}m{text}\x1b[39m" if text and colour else text


def shaded(text, probability):
    return coloured(text, SHADES[min(int(10 * probability), 9)])


def write_page(path, texts):
    """Write the page or animation of --html, if there is one: texts as lists of Tokens."""
    if path:
        Path(path).write_text((animation if path.endswith(".svg") else page)(texts), "utf-8")


def page(texts):
    """serve.html with the texts inside: a page that replays their steps without a server."""
    record = json.dumps([[list(token) for token in tokens] for tokens in texts]).replace(
        "<", "\\u003c"
    )
    empty = 'type="application/json">null<'
    return (
        Path(__file__)
        .with_name("serve.html")
        .read_text("utf-8")
        .replace(empty, f"{empty[:-5]}{record}<")
    )


def animation(texts, step_s=0.4, rest_s=3.0):
    """A self-contained SVG that shows the texts step by step, rests, and starts again."""
    steps = max((token.step for tokens in texts for token in tokens), default=0)
    total_s = steps * step_s + rest_s
    width, height = 8.43, 21  # of a letter, of a line
    shapes, line, column, longest = [], 0, 0, 0
    for tokens in texts:
        for token in tokens:
            fill = (
                f"hsl({220 - 220 * token.step / max(steps, 1):.0f} 80% 85%)"
                if token.step
                else "#eee"
            )
            starts = token.step * step_s / total_s
            timing = f'keyTimes="0;{starts:.3f}" dur="{total_s:.1f}s" calcMode="discrete" repeatCount="indefinite"'
            # A box and the letters over it, grey in their step. What was given is there from the
            # beginning.
            turns = (
                f'<animate {timing} attributeName="fill" values="#aaa;{fill}"/>'
                if token.step
                else ""
            )
            appears = (
                f'<animate {timing} attributeName="opacity" values="0;1"/>' if token.step else ""
            )
            # XML has no form feed
            for part in re.split("(\n)", re.sub("[^\n\t -\U0010ffff]", " ", token.text)):
                if part == "\n":
                    line, column = line + 1, 0
                elif part:
                    x, size = f'x="{12 + column * width:.1f}"', f"{len(part) * width:.1f}"
                    box = f'<rect {x} y="{8 + line * height}" width="{size}" height="18" fill="{fill}">{turns}</rect>'
                    letters = f'<text {x} y="{22 + line * height}" textLength="{size}">'
                    shapes.append(f"{box}{letters}{html.escape(part)}{appears}</text>")
                    column += len(part)
                    longest = max(longest, column)
        line, column = line + 2, 0
    style = "<style>text{font:14px monospace;white-space:pre}</style><rect width='100%' height='100%' fill='#fff'/>"
    size = f'width="{24 + longest * width:.0f}" height="{line * height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" xml:space="preserve" {size}>{style}{"".join(shapes)}</svg>\n'
