"""Prompts: what a model is asked, and what is done with its answer. Reads the disk.

    texts = prompts.Texts(tokenizer, mask_id, ends, positions)
    blank = texts.canvas("def area(r):\\n    [MASK:8]\\n", "", max_new=128)
    completion, text = texts.text_of(blank, ids)    # ids: blank.ids, filled
    tests = prompts.examples("Write f.\\n>>> f(2)\\n4\\n")    # [(call, result, assert)]

A prompt becomes a canvas of masks, or ids in a chat template; a filled canvas becomes text. The >>>
examples of a prompt become tests, which sandbox.py runs as a program of its own. This file loads
no model, samples nothing, and needs no JAX.
"""

import ast
import dataclasses
import datetime
import doctest
import functools
import io
import json
import re
import subprocess
import sys
import tempfile
import threading
import typing
import warnings
from pathlib import Path

from tokenizers.decoders import DecodeStream

import runs

STEERS = r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f]"  # control characters
HOLE = re.compile(r" ?\[MASK(?::([1-9]\d*))?\]")  # a token brings its own space
ENCODES = threading.Lock()  # encode_special_tokens is set for all threads that share a tokenizer
MASKS = 64  # of a [MASK] without a number, where the model's config has no hole_masks


@dataclasses.dataclass
class Canvas:
    """A text with masks to fill."""

    prompt: str
    suffix: str
    ids: list[int]  # MASK where the model generates
    start: int  # index of the first token that is shown
    # text before and after a completion: none of an answer; None where [MASK:n] says where it is
    around: tuple[str, str] | None


@dataclasses.dataclass
class Texts:
    """Prompts as canvases, and canvases as texts, for a model."""

    tokenizer: typing.Any
    mask: int  # the id of MASK
    ends: typing.Collection  # ids that end a text
    positions: int  # that the model has
    begin: typing.Sequence = ()  # ids before a plain text
    # encodes a prompt by a chat template; None: plain text, as is a prompt with a hole or a suffix
    ask: typing.Callable | None = None

    def canvas(self, prompt, suffix, max_new, infill=True, hole=MASKS):
        """The Canvas of a request: "a [MASK:2]b" has the texts a and b around two masks.

        A suffix follows max_new masks, and a prompt without masks goes on with as many. [MASK] is
        `hole` masks, or fewer where they do not fit. ValueError if the text is too long.
        """
        # Cut the request at its masks: texts and numbers of masks take turns.
        parts = [prompt]
        after = [suffix]
        if infill:
            parts = HOLE.split(prompt)
            after = HOLE.split(suffix)
        if suffix or len(parts) == 1:
            parts.append(max_new)
        if suffix:
            parts += after
        texts = parts[::2]
        sizes = [size and int(size) for size in parts[1::2]]
        if infill and any("[MASK" in text for text in texts):
            raise ValueError("write a hole as [MASK] or [MASK:12]; --raw takes it as text")

        answers = self.ask is not None and len(texts) == len(sizes)  # nothing follows the last mask
        encoded = [ids_of(self.tokenizer, text) for text in texts]
        encoded[0] = self.ask(prompt) if answers else [*self.begin, *encoded[0]]

        # A hole of unknown length takes the room that is left.
        unknown = sizes.count(None)
        length = sum(map(len, encoded)) + sum(filter(None, sizes))
        if length + unknown > self.positions:
            raise ValueError(
                f"{length + unknown} tokens do not fit the model's {self.positions} positions; "
                "lower --max_new or mask less"
            )
        if unknown:
            hole = min(hole, (self.positions - length) // unknown)
        ids = encoded[0]
        for size, following in zip(sizes, [*encoded[1:], []], strict=False):
            ids = ids + [self.mask] * (hole if size is None else size) + following

        start = ids.index(self.mask) if answers else len(self.begin)
        around = (prompt, suffix)
        if answers:
            around = ("", "")
        if len(texts) > (2 if suffix else 1):
            around = None
        return Canvas(prompt, suffix, ids, start, around)

    def kept(self, canvas, ids):
        """Positions of a filled canvas, without a run of masks from its first end token on."""
        kept = []
        ended = False
        for p, (given, token) in enumerate(zip(canvas.ids, ids, strict=True)):
            ended = given == self.mask and (ended or token in self.ends)
            if not ended:
                kept.append(p)
        return kept

    def text_of(self, canvas, ids, cut=str):
        """(completion, whole text), the same text where [MASK:n] says where it goes.

        cut(text) shortens a completion.
        """
        kept = self.kept(canvas, ids)
        if not canvas.around:
            text = self.tokenizer.decode([ids[p] for p in kept])
            return text, text
        generated = [ids[p] for p in kept if canvas.ids[p] == self.mask]
        completion = cut(self.tokenizer.decode(generated))
        return completion, completion.join(canvas.around)


# ---- what a model's folder says ------------------------------------------------------------------

COMMANDS = {
    "a PythonCoder": "python generate.py --ckpt=",
    "a Dream": "python generate_dream.py --ckpt=",
    "an MDLM": "python inference_jetson.py --bundle=",
}
TURN_ENDS = "<|im_end|>", "<|eot_id|>"  # end a turn of a chat, in Qwen2.5's template and in LLaDA's
HIDDEN = "\ufdd0"  # a code point that Unicode keeps out of texts


def check_family(folder, *expected):
    """(family, config.json) of a model's folder; the first of `expected` where it says none.
    ValueError with the right command for another family.
    """
    config = runs.read_about(folder, "config.json")
    kind = config.get("model_type")
    model = config.get("model") or {}  # of a run
    family = expected[0]
    if kind == "pythoncoder" or "diff" in model:
        family = "a PythonCoder"
    elif kind == "mdlm" or "dropout" in model:
        family = "an MDLM"
    elif kind or "mask_id" in model:
        family = "a Dream"
    if family not in expected:
        raise ValueError(f"{folder} holds {family}: {COMMANDS[family]}{folder}")
    return family, config


def turn_end(tokenizer):
    """The id of the token that ends a turn of a chat; None if the tokenizer has none."""
    return next((i for i in map(tokenizer.token_to_id, TURN_ENDS) if i is not None), None)


def chat_template(folder):
    """wrap(prompt, system=None, before=()) -> text, by a folder's chat template; None: it has none.

    The prompt is a user's turn, after system and the (prompt, answer) pairs of `before`; or a list
    of messages, {"role", "content"}, of which the template alone decides whether it takes them.
    ValueError if it fails.
    """
    config = runs.read_about(folder, "tokenizer_config.json")
    template = config.get("chat_template")
    jinja = folder / "chat_template.jinja"
    if jinja.exists():
        template = jinja.read_text("utf-8")
    if isinstance(template, list):  # one for each purpose, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if not template:
        return None
    import jinja2.sandbox

    def refuse(message):  # templates call it raise_exception
        raise jinja2.TemplateError(message)

    def strftime_now(form):
        return datetime.datetime.now().strftime(form)

    # The template is code of whoever made the model: it runs in jinja2's sandbox.
    extensions = ["jinja2.ext.loopcontrols", generation_blocks()]
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    # what transformers gives to templates
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = strftime_now
    for role, token in runs.named_tokens(folder)[0].items():
        environment.globals[role] = token.content
    compiled = functools.cache(environment.from_string)  # compiling takes 5 ms, rendering 0.07

    def wrap(prompt, system=None, before=()):
        given = {"messages": conversation(prompt, system, before), "tools": None, "documents": None}
        try:
            return compiled(template).render(given, add_generation_prompt=True)
        except Exception as error:  # a template is a program, which may raise anything
            reason = " ".join(str(error).split()) or repr(error)
            raise ValueError(f"the chat template of {folder} fails: {reason}") from None

    return wrap


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """The filter tojson of transformers; jinja2's own escapes what HTML has other uses for."""
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return text.replace(json.dumps(HIDDEN)[1:-1], HIDDEN)  # stays one code point, to be taken out


def generation_blocks():
    """An extension of jinja2: {% generation %} marks what an assistant wrote, and adds no text."""
    import jinja2.ext

    class Generation(jinja2.ext.Extension):
        tags = frozenset({"generation"})

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    return Generation


def conversation(prompt, system=None, before=()):
    """The messages of a user's prompt after a system turn and (prompt, answer) pairs; a prompt that
    is a list of messages stays as it is.
    """
    if isinstance(prompt, list):
        return prompt
    messages = []
    if system is not None:
        messages.append({"role": "system", "content": system})
    for question, answer in before:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return [*messages, {"role": "user", "content": prompt}]


def encode_chat(tokenizer, wrap, prompt, system=None, before=()):
    """Token ids of a conversation() in a chat template.

    Special tokens are the template's alone: their names in what was written stay text.
    """
    hide = hiding(tokenizer)
    messages = []
    for message in conversation(prompt, system, before):
        messages.append({key: hide(text) for key, text in message.items()})
    return ids_of_template(tokenizer, wrap(messages))


def encode_answer(tokenizer, prompt_ids, answer):
    """Token ids of an answer and of the token that ends its turn, behind those of encode_chat."""
    special = tokenizer.get_added_tokens_decoder()
    # A special token at either side may strip the answer.
    before = [special[i].content for i in prompt_ids[-1:] if i in special]
    end = tokenizer.id_to_token(turn_end(tokenizer))
    text = "".join([*before, hiding(tokenizer)(answer), end])
    return ids_of_template(tokenizer, text)[len(before) :]


def hiding(tokenizer):
    """hide(text) -> text in which HIDDEN breaks the names of special tokens."""
    added = tokenizer.get_added_tokens_decoder().values()
    names = sorted((token.content for token in added if token.special), key=len, reverse=True)
    special = re.compile("|".join(map(re.escape, names)) or "(?!)")  # of no names: matches nothing
    return lambda text: special.sub(lambda name: name[0][0] + HIDDEN + name[0][1:], text)


def ids_of_template(tokenizer, text):
    """Token ids of a text with special tokens, of which HIDDEN breaks those that were written."""
    encoding = encoding_of(tokenizer, text, names_are_text=False)
    if HIDDEN not in text:
        return encoding.ids
    # The texts between special tokens are encoded again, without HIDDEN.
    added = tokenizer.get_added_tokens_decoder()
    special = {i: token for i, token in added.items() if token.special}
    ids = []
    begin = 0
    for i, (first, end) in zip(encoding.ids, encoding.offsets, strict=True):
        if i in special and special[i].content in text[first:end]:  # not <unk>, of HIDDEN
            ids += ids_of(tokenizer, text[begin:first].replace(HIDDEN, ""))
            ids.append(i)
            begin = end
    return ids + ids_of(tokenizer, text[begin:].replace(HIDDEN, ""))


# ---- prompts in ----------------------------------------------------------------------------------


def read_requests(name):
    """[(prompt, suffix)] of a file of JSON lines, - is standard input. ValueError names a line."""
    if name == "-":
        data = sys.stdin.buffer.read()
    else:
        data = runs.as_path(name).read_bytes()
    requests = []
    for number, row in runs.json_rows(io.BytesIO(data)):
        try:
            request = (row["prompt"], row.get("suffix") or "")
            "".join(request).encode()  # TypeError for what is no text; half a surrogate is none
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(
                f'{name}, line {number} is not a JSON object with the text "prompt"'
            ) from None
        requests.append(request)
    if not requests:
        raise ValueError(f"{name} holds no prompts")
    return requests


def on_new_line(prompt):
    """A prompt that ends in closing quotes or in the colon of a def or class gets a line break.

    Tokenizers join it to those.
    """
    quotes = re.search(r"(\"{3}|'{3})\Z", prompt)
    closes = quotes and prompt.count(quotes[0]) % 2 == 0
    if closes or re.search(r"^[ \t]*(async def|def|class) .*:\Z", prompt, flags=re.M):
        return prompt + "\n"
    return prompt


def read_tasks(path, tested=True):
    """The tasks of a JSONL file. ValueError names a line that is no task, or lacks tests."""
    tasks = []
    for number, row in runs.json_rows(io.BytesIO(runs.as_path(path).read_bytes())):
        try:
            task = {"test_cases": []} | row
            text = task["question"] if "question" in task else task["prompt"]
            "".join([text] + task["test_cases"])
        except (KeyError, TypeError):
            form = '{"question" or "prompt": text, "test_cases": [texts]}'
            raise ValueError(f"{path}, line {number} is no task: {form}") from None
        if tested and not task["test_cases"]:
            raise ValueError(
                f"{path}, line {number} has no tests; "
                "only --rewards=file.py:function can do without"
            )
        tasks.append(task)
    return tasks


def interact(complete, end, raw=False):
    """Call complete([(prompt, "")]) for prompts from standard input, each ended by an empty line.

    end is appended to a prompt, and unless raw, what on_new_line appends. A ValueError is printed,
    and reading goes on.
    """
    marker = ""
    if sys.stdin.isatty():
        marker = ">>> "
        print("Write, then an empty line to have it continued; Ctrl-D ends.", file=sys.stderr)
    lines = []
    at_end = False
    while not at_end:
        line = ""
        try:
            line = input(marker)
        except EOFError:
            at_end = True
        if line:
            lines.append(line)
        elif lines:
            prompt = "\n".join(lines) + end
            lines = []
            try:
                complete([(prompt if raw else on_new_line(prompt), "")])
            except ValueError as error:
                print(error, file=sys.stderr)


def ids_of(tokenizer, text):
    """Token ids of a text. The names of special tokens in it stay text."""
    return encoding_of(tokenizer, text).ids


def encoding_of(tokenizer, text, names_are_text=True):
    """The Encoding of a text, with the names of special tokens in it as text or as tokens."""
    with ENCODES:
        tokenizer.encode_special_tokens = names_are_text
        encoding = tokenizer.encode(text, add_special_tokens=False)
        tokenizer.encode_special_tokens = True
    return encoding


def encode(tokenizer, prompt, suffix):
    """Token ids of a prompt; with a suffix in the order prefix, suffix, middle."""
    return in_order(tokenizer, ids_of(tokenizer, prompt), ids_of(tokenizer, suffix))


def in_order(tokenizer, prompt_ids, suffix_ids):
    """The ids that an autoregressive model continues, with its three tokens around a suffix."""
    if not suffix_ids:
        return prompt_ids
    names = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    ids = [tokenizer.token_to_id(name) for name in names]
    if None in ids:
        raise ValueError(
            f"text after a hole needs {', '.join(names)}, which this model's tokenizer lacks"
        )
    return [ids[0], *prompt_ids, ids[1], *suffix_ids, ids[2]]


# ---- texts out -----------------------------------------------------------------------------------


def pieces(tokenizer, ids):
    """The text that each token adds; a character of several tokens belongs to the last of them."""
    stream = DecodeStream(skip_special_tokens=True)
    texts = [stream.step(tokenizer, token) or "" for token in ids]
    if texts:
        # of a character that ends here unfinished
        texts[-1] += tokenizer.decode(ids)[len("".join(texts)) :]
    return texts


def truncate(text, stops):
    """The text before the first of any of the stop strings."""
    for stop in stops:
        text = text.partition(stop)[0]
    return text


def printable(text, stops):
    """What may be shown of a text that grows: no half character, no beginning of a stop string."""
    text = truncate(text, stops).rstrip("\ufffd")
    held = 0
    for stop in stops:
        for size in range(1, len(stop)):
            if text.endswith(stop[:size]):
                held = max(held, size)
    return text[: len(text) - held]


# ---- the examples of a prompt --------------------------------------------------------------------

# what `ast` raises of a text
UNREADABLE = SyntaxError, ValueError, TypeError, RecursionError, MemoryError
DEFINES = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom


def examples(prompt):
    """[(call, result, assert)] of the >>> examples in a prompt's docstrings, or in a plain prompt.

    A statement, such as c = Counter(3), is not tested; it and all lines after it are repeated
    before each later test. An example that raises is neither tested nor repeated. ValueError if
    none is left.
    """
    tests = []
    try:
        found = re.finditer(r"(?s)r?(\"{3}|'{3}).*?\1", prompt)
        docstrings = [ast.literal_eval(match[0]) for match in found]
        for docstring in docstrings or [prompt]:
            before = []
            for example in doctest.DocTestParser().get_examples(docstring):
                if example.exc_msg:
                    continue
                body = ast.parse(example.source).body
                call = "\n ".join(ast.unparse(node).replace("\n", "\n ") for node in body)
                want = example.want.strip()
                is_call = len(body) == 1 and isinstance(body[0], ast.Expr)
                test = assertion(body[0].value, call, want) if is_call and want else ""
                if test:
                    if before:
                        test = "\n ".join(["if 1:", *before, test])
                    tests.append((call, want, test))
                if before or not want or not is_call:
                    before.append(call)
    except UNREADABLE as error:
        raise ValueError(f"cannot read the >>> examples of the prompt: {error}") from None
    if not tests:
        raise ValueError(
            "the prompt has no >>> examples that can be run; write >>> f(1), and its result below"
        )
    return tests


def assertion(node, call, want):
    """`assert f(1) == 2` of a call and the result below it; "" for a print that is no plain one."""
    if call.startswith("print("):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) != "print" or node.keywords:
            return ""
        call = f"' '.join(map(str, [{call[6:-1]}]))"
    else:
        try:
            want = ast.literal_eval(want)
        except UNREADABLE:  # no literal
            call = f"repr({call})"
    return ast.unparse(ast.parse(f"assert ({call}) == {want!r}"))


def definitions(prompt, text):
    """The longest beginning of a text that parses, up to where it no longer defines anything.

    What the prompt holds stays. Of an answer, which does not begin with its prompt, it is the first
    block of code.
    """
    if not text.startswith(prompt):
        fence = re.search(r"(?s)```\w*\n(.*?)(\n```|\Z)", text)
        if fence:
            text = fence[1]
            prompt = re.split(r"(?m)^(?=async def |def |class )", text)[0]
    lines = text.split("\n")
    given = len(prompt.splitlines())
    for end in range(len(lines), 0, -1):
        try:
            with warnings.catch_warnings(action="ignore"):
                body = ast.parse("\n".join(lines[:end])).body
        except UNREADABLE:
            continue
        for node in body:
            if node.lineno > given and not isinstance(node, DEFINES):
                end = node.lineno - 1
                break
        return "\n".join(lines[:end]).rstrip()
    return text


def verdicts(program, tests):
    """{"verdict", "test", "got"} of each assert of a program, by sandbox.py in its own process.

    RuntimeError if that cannot run.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        path.write_text(program, "utf-8")
        tests_path = Path(folder) / "tests.txt"
        tests_path.write_text("\n".join(tests), "utf-8")
        sandbox = Path(__file__).with_name("sandbox.py")
        command = [sys.executable, sandbox, path, f"--tests={tests_path}", "--json"]
        done = subprocess.run(command, capture_output=True, text=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]  # the last is of all tests
    if len(rows) <= len(tests):
        # the last line, without its advice: flags of sandbox.py
        why = rows[-1]["error"] if rows else done.stderr.strip().rpartition("\n")[2]
        why = why.partition("; ")[0]
        raise RuntimeError(f"sandbox.py failed: {why}")
    return rows[:-1]


def judged(program, tests):
    """["pass: f(1) gives 2"] of the examples() of a prompt, run on a program."""
    said = []
    rows = verdicts(program, [test for *_, test in tests])
    for (call, want, _), row in zip(tests, rows, strict=True):
        # nothing of what a program returned may steer the terminal
        got = re.sub(STEERS, "?", row["got"] or "")
        result = f"is not {want}"
        if row["verdict"] == "pass":
            result = f"gives {want}"
        elif got:
            result = f"gives {got}, not {want}"
        said.append(f"{row['verdict']}: {call} {result}")
    return said


def checked(completions, n, tests):
    """Of n completions (row, text) of each prompt the first that passes its tests, else the first.

    The row gets "passed" and "examples"; the text is the program that was tested, with the verdicts
    as comments. ValueError after the last one if no completion of a prompt passes.
    """
    failed = 0
    for i, of_prompt in enumerate(tests):
        tried = []
        for row, text in completions[i * n : (i + 1) * n]:
            given = row.get("suffix") or "[MASK" in row["prompt"]  # text after what was generated
            program = text if given else definitions(row["prompt"], text)
            try:
                said = judged(program, of_prompt)
            except RuntimeError as error:
                said = [f"not run: {error}"]
            passed = all(line.startswith("pass") for line in said)
            comments = "\n".join(said).replace("\n", "\n# ")
            row = row | {"passed": passed, "examples": said}
            tried.append((row, f"{program}\n# {comments}"))
            if passed:
                print(f"completion {len(tried)} of {n} passes", file=sys.stderr)
                break
        if passed:
            yield tried[-1]
        else:
            failed += 1
            yield tried[0]
    if failed:
        raise ValueError(f"no completion passes all examples of {failed} of {len(tests)} prompts")
