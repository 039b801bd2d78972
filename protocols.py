"""How public harnesses ask a model for programs and cut its answers: one record per harness and
task.

    python benchmarks.py --task=humaneval --model=dream --protocol=dream_instruct    # asks, cuts and runs as Dream's
    python bench/explain.py --task=humaneval --samples=out/humaneval/samples.jsonl   # cuts the same texts as each one

Most scores that do not reproduce differ here, not in the model. Prompts, candidates and tests equal
those of the harness byte for byte: see tests/test_golden_protocols.py. "ours" is our own record; it
loses the fewest right answers.

    prompt(protocol, question)           text for the tokenizer
    candidate(protocol, text, question)  the code in a model's text
    program(protocol, code, question)    the code that runs before target(protocol, question), the
    tests

Sources: lm_eval 4e7e0d4; Dream fac0a7f; Fast-dLLM 24cc59e; Dream-Coder 87409da with d3LLM e5bfcac;
evalplus 26d6d00; Qwen2.5-Coder d5ead97; human-eval 6d43fb9. Other harnesses and older versions:
bench/explain.py.
"""

import ast
import contextlib
import functools
import keyword
import re
import typing
import warnings


class Question(typing.NamedTuple):
    """What a protocol knows about a problem."""

    entry: str = ""  # name of the function to write
    # HumanEval's, or the docstring that EvalPlus makes of MBPP's text and first assert
    prompt: str = ""
    test: str = ""  # HumanEval's check()
    text: str = ""  # MBPP's description
    tests: tuple = ()  # MBPP's asserts
    code: str = ""  # the solution of a problem that is shown in a prompt
    shots: tuple = ()  # solved problems of the same file
    suffix: str = ""  # the text after a hole; the prompt is that before it


class Protocol(typing.NamedTuple):
    ask: typing.Callable  # (question, solved problems) -> the user's text
    data: tuple = ("humaneval",)  # keys of DATA: the problems of the harness
    # system text of the chat; "" is the model's own template, None is no chat
    system: str | None = None
    # beginning of the answer, which the model continues; {prompt} is the question's
    prefix: str = ""
    trims: bool = False  # transformers' continue_final_message handles the prefix, see prompt()
    shots: int = 0  # solved problems in the prompt
    bos: bool = False  # the prompt begins with the beginning-of-text token
    prompt_tokens: int = 0  # keep only this many tokens at the end of the prompt; 0 keeps all
    max_new: int = 512  # new tokens at most
    temperature: float = 0.0
    top_p: float = 1.0
    # 50 where the harness names none: transformers' default (4.46 to 4.52) without a
    # generation_config
    top_k: int = 0
    ends: tuple = ("<|endoftext|>",)  # special tokens that end a text
    drops: bool = False  # other special tokens are removed; the text after them stays
    stops: tuple = ()  # stop strings
    # cut at the first stop string, extract(), or neither
    stop_rule: typing.Literal["cut", "extract", "none"] = "cut"
    rules: tuple = ()  # functions (text, question) -> text, applied in order
    prompt_first: bool = False  # the prompt runs in front of the candidate
    frame: tuple = ("", "")  # text in front of the tests, and after them
    ours: bool = False  # our own record, not a harness'
    limit_s: float = 3.0  # processor seconds for all tests of a candidate
    # the limit is at least this times the time of the reference solution; 0: no such rule
    factor: float = 0.0


DATA = {  # file of the problems, and how many it holds
    "humaneval": ("HumanEval.jsonl.gz", (164,)),
    "infilling": ("HumanEval-*Infilling.jsonl.gz", (1033, 5815, 1640, 164)),
    "mbpp": ("mbpp.jsonl, the full MBPP, ids 11-510", (500,)),
    "mbppplus": ("MbppPlus-v0.2.0.jsonl or v0.1.0", (378, 399)),
    "sanitized": ("sanitized-mbpp.json", (257, 427)),
    "livecodebench": ("test*.jsonl of LiveCodeBench", ()),
}

# ---- prompts -------------------------------------------------------------------------------------------------------

EXPERT = "You are an expert Python programmer, and here is your task:"


def filled(template, q):
    return template.format(
        prompt=q.prompt, stripped=q.prompt.strip(), text=q.text, tests="\n".join(q.tests[:3])
    )


def asks(question, answer=""):
    """A function (question, solved problems) -> prompt of two templates: one for a question, one
    for its solution.

    {prompt}, {stripped}, {text} and {tests}, the first three asserts, are the question's; {code} is
    the solution.
    """

    def ask(q, solved=()):
        shown = "".join(filled(question, shot) + answer.format(code=shot.code) for shot in solved)
        return shown + filled(question, q)

    return ask


# Ref: Austin et al., arXiv:2108.07732
ask_austin = asks(
    EXPERT + " {text} Your code should pass these tests:\n\n{tests}\n[BEGIN]\n",
    "{code}\n[DONE]\n\n",
)


def ask_ours(q, solved):
    """HumanEval's prompt without its last newline, which suits BPEs; MBPP as Austin et al., MBPP+
    as EvalPlus.
    """
    if not q.text:
        return q.prompt.strip() + "\n" if q.prompt.startswith('"""') else q.prompt.rstrip()
    *shots, last = (
        each._replace(text=each.text.strip(), code=each.code.strip()) for each in (*solved, q)
    )
    return ask_austin(last, shots)


def ask_ours_chat(q, solved):
    if not q.text:
        what = "Complete this Python function. Answer with all of it in one block of code."
        return f"{what}\n\n```python\n{q.prompt.rstrip()}\n```"
    asserts = "\n".join(q.tests[:3])
    what = "Write a Python function. Answer with all of it in one block of code."
    return f"{what}\n\n{q.text.strip()}\nIt must pass these tests:\n\n```python\n{asserts}\n```"


def prompt(protocol, q, trim_prefix=True):
    """The text for the tokenizer, before BOS. The chat template is ChatML, as in Dream, DiffuCoder
    and Qwen.

    trim_prefix: transformers 4.46, which Dream's harness pins, strips whitespace at the end of the
    answer's prefix; 4.49, which Fast-dLLM's pins, keeps it.
    """
    asked = protocol.ask(q, q.shots[: protocol.shots])
    prefix = protocol.prefix.replace("{prompt}", q.prompt)
    if protocol.system is None:
        return asked + prefix
    system = f"<|im_start|>system\n{protocol.system}<|im_end|>\n"
    text = f"{system}<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n{prefix}"
    return text.rstrip() if trim_prefix and protocol.trims else text


# ---- rules: from a text to a candidate -----------------------------------------------------------------------------

# tokens that Qwen2.5's and Dream's tokenizer remove with skip_special_tokens=True
SPECIAL = re.compile(
    r"<\|(endoftext|im_start|im_end|mask|beginoftext|object_ref_start|object_ref_end|box_start|box_end|quad_start|"
    r"quad_end|vision_start|vision_end|vision_pad|image_pad|video_pad)\|>"
)


def first_of(text, stops, start=0):
    """Where the first of these strings begins, at `start` or after it; the length of the text if
    there is none.
    """
    return min((i for i in (text.find(stop, start) for stop in stops) if i >= 0), default=len(text))


def cut_at(stops, text, q):
    return text[: first_of(text, stops)]


cut_at_fence = functools.partial(cut_at, ("```",))


def without_special(text, q):
    return SPECIAL.sub("", text)


def prepend(template):
    """A rule that puts the prompt in front of a text."""
    return lambda text, q: filled(template, q) + text


prepend_prompt = prepend("{prompt}")
prepend_prompt_line = prepend("{prompt}\n")
prepend_stripped_prompt = prepend("{stripped}\n")


def tabs_to_spaces(text, q):
    return text.replace("\t", "    ")


def first_10000(text, q):
    return text[:10_000]


def without_colours(text, q):
    return re.sub(r"\x1B(?:[@-Z\\-_]|\[[0-?]*[ -/]*[@-~])", "", text)


def without_future(text, q):
    """An import from the future is an error after a prompt."""
    return text.replace("from __future__ import annotations\n", "")


def dream_fence(text, q):
    return text.split("```python\n", 1)[-1].split("```")[0]


def last_block(text, q):
    """LiveCodeBench's rule: the lines between the last two fences; the whole text if it has
    none.
    """
    lines = text.split("\n")
    fences = [i for i, line in enumerate(lines) if "```" in line]
    if not fences:
        return text
    return "\n".join(lines[fences[-2] + 1 : fences[-1]]) if len(fences) > 1 else ""


# ---- the sanitisers of Dream and EvalPlus --------------------------------------------------------------------------


def parsed(code):
    """The syntax tree of a program; None if it is not Python."""
    with contextlib.suppress(SyntaxError, MemoryError), warnings.catch_warnings(action="ignore"):
        return ast.parse(code)
    return None


def first_error(lines):
    """The number of the line at which a program is no longer Python; 0 if all of it is."""
    try:
        with warnings.catch_warnings(action="ignore"):
            ast.parse("\n".join(lines))
    except (SyntaxError, MemoryError) as error:
        return min(getattr(error, "lineno", None) or len(lines), len(lines))
    return 0


def longest_program(lines, least):
    """The longest run of at least `least` lines that is a program; "" if there is none.

    Blank lines do not count, and only those in front stay. Of equal runs the first and shortest is
    taken.
    """
    best, most, tried = [], 0, 0
    for first in range(len(lines)):
        run = lines[first:]
        while error := first_error(run):
            run, tried = run[: error - 1], tried + len(run)
            if tried > 1_000_000:
                raise ValueError("a text in which it takes too long to find a program")
        # after a last \ they are needed
        while len(run) > least and not run[-1].strip() and not first_error(run[:-1]):
            run = run[:-1]
        length = sum(bool(line.strip()) for line in run)
        if len(run) >= least and length > most:
            best, most = run, length
    return "\n".join(best)


def needed(entry, definitions, names_in):
    """The definitions that the entry point needs, directly or not. definitions: {name: node}."""
    found, waiting = {entry}, [entry]
    while waiting:
        name = waiting.pop()
        new = names_in(definitions[name]) - found if name in definitions else set()
        found |= new
        waiting += new
    return [node for name, node in definitions.items() if name in found]


def has_return(node):
    return any(isinstance(child, ast.Return) for child in ast.walk(node))


def dream_sanitize(text, q):
    """The imports, and the functions with a return, classes and assignments that the entry point
    needs, unparsed.

    The last definition of a name counts, `a.b` uses only b, and only the first 100 lines are read.
    """
    text = text.replace("\t", "    ").replace("\r\n", "\n").replace("\r", "\n").strip() + "\n"
    tree = parsed(longest_program(text.splitlines()[:100], 1))
    imports, definitions = [], {}
    for node in tree.body if tree else []:
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.append(node)
        elif isinstance(node, ast.ClassDef) or (
            isinstance(node, ast.FunctionDef) and has_return(node)
        ):
            definitions[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            definitions[node.targets[0].id] = node
    return "\n".join(map(ast.unparse, [*imports, *needed(q.entry, definitions, dream_names)]))


def dream_names(node):
    """Names and attributes in a definition; of `a.b` only b."""
    names, waiting = set(), [node]
    while waiting:
        for child in ast.iter_child_nodes(waiting.pop()):
            if isinstance(child, ast.Name | ast.Attribute):
                names.add(child.id if isinstance(child, ast.Name) else child.attr)
            else:
                waiting.append(child)
    return names


def evalplus_sanitize(text, q):
    """As Dream's, but the first definition of a name counts, and the source stays as it is.

    EvalPlus walks the tree of tree-sitter, to which indentation in front is no error; this finds
    the same nodes by `ast` and its offsets, which count bytes. If nothing is left, the longest
    program in the text is returned.
    """
    lines = text.split("\n")
    code = longest_program(lines, 2) or lines[0]
    tree = parsed(code.lstrip())
    imports, definitions = [], {}
    for node in tree.body if tree else []:
        name = evalplus_name(node)
        if isinstance(node, ast.Import) or (
            isinstance(node, ast.ImportFrom) and node.module != "__future__"
        ):
            imports.append(node)
        elif name and name not in definitions:
            definitions[name] = node
    nodes = [*imports, *needed(q.entry, definitions, evalplus_names)]
    kept = b"\n".join(evalplus_source(code.lstrip().encode(), node) for node in nodes).decode()
    return kept.strip() or code


def evalplus_source(data, node):
    """The bytes of a statement in the bytes of a program. In tree-sitter comments after a block
    belong to it.
    """
    starts = [0, *(match.end() for match in re.finditer(rb"\r\n|\r|\n", data))]  # of the lines
    first, end = (
        starts[node.lineno - 1] + node.col_offset,
        starts[node.end_lineno - 1] + node.end_col_offset,
    )
    if hasattr(node, "body"):
        end += len(re.compile(rb"([ \t]*;)?([ \t]*#[^\n]*)?").match(data, end)[0])
        comment = re.compile(rb"(?:[ \t\r\f]*\n)+([ \t]*)#[^\n]*")
        while (match := comment.match(data, end)) and len(match[1].expandtabs(8)) >= node.body[
            0
        ].col_offset:
            end = match.end()
    return data[first:end]


def evalplus_name(node):
    """The name that a statement defines according to EvalPlus, or None, as for decorated
    definitions.
    """
    if isinstance(node, ast.ClassDef):
        return None if node.decorator_list else node.name
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name if has_return(node) and not node.decorator_list else None
    # the first plain name of both sides: `a.b = c` defines c
    if isinstance(node, ast.Assign | ast.AnnAssign):
        left, *more = node.targets if isinstance(node, ast.Assign) else [node.target]
        sides = [left] if more else [left, node.value]
        return next((side.id for side in sides if isinstance(side, ast.Name)), None)
    return None


def evalplus_names(node):
    """All identifiers in a definition: names, both parts of a.b, arguments, keywords, imports."""
    names = set()
    for child in ast.walk(node):
        for field in ("id", "attr", "arg", "name", "asname", "rest", "module"):
            value = getattr(child, field, None)
            names.update(value.split(".") if isinstance(value, str) else ())
        for field in ("names", "kwd_attrs"):  # of global and nonlocal, of patterns
            names.update(name for name in getattr(child, field, ()) if isinstance(name, str))
    return names


# ---- ours: loses the fewest right answers --------------------------------------------------------------------------

# No text continues its answer after one of these. [DONE] is Austin et al.'s.
NO_ANSWER = (
    "<|endoftext|>",
    "<|file_sep|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|dlm_pad|>",
    "<|mask|>",
    "[DONE]",
)
# indentation, backticks, language between spaces
FENCE = re.compile(r"(?m)^([ \t]*)(```+)([^`\n]*)$")
# a line that begins with two words, the first not a keyword of Python, or with the mark of a list
# item
PROSE = re.compile(
    rf"(?!({'|'.join([*keyword.kwlist, *keyword.softkwlist])})\b)[\w'’-]+[,:;]? [A-Za-z]|\d+[.)] |[-*] "
)


def extracted(stops, text, q):
    return extract(text, q.entry, stops)[0]


def extract(text, entry, stops):
    """(code, ended) of a model's text: the code without fences, chat and text after the answer.

    A text that begins indented continues the function of the prompt, up to the first stop string or
    prose. A text that defines `entry` before any fence is code up to the first stop string, fence
    or prose after the definition; the prompt may have opened a block. In other texts the code is a
    fenced block: the first that defines `entry`, else the first. ended: no further text could
    change the code.
    """
    written = text.replace("\r\n", "\n").removeprefix("[BEGIN]")
    text = written[: first_of(written, NO_ANSWER)]
    ended = len(text) < len(written)
    defines = re.compile(rf"(?m)^(async )?def {re.escape(entry)}\b")
    # " Here is it:" is chat
    continues = re.match(r"\s*\n[ \t]+[^\s`]|(?! [A-Z])[ \t]+[^\s`]", text)
    if continues:  # the prompt is indented by spaces
        text = re.sub(r"(?m)^\t+", lambda tabs: "    " * len(tabs[0]), text)
    restated, fences = None if continues else defines.search(text), list(FENCE.finditer(text))
    if fences and not continues and not (restated and restated.start() < fences[0].start()):
        blocks = fenced(text, fences)
        code, closed = next((block for block in blocks if defines.search(block[0])), blocks[0])
        return code, (closed or ended) and bool(defines.search(code))
    # Helpers may come first, so stop strings count only after the definition of `entry`.
    start = restated.end() if restated else 0
    code = text[: first_of(text, (*stops, "\n```"), start)]
    code = re.split(r"(?m)(?<=[^\s`])```[ \t]*$", code)[0]
    kept = without_prose(code, start) if restated else code
    if continues:  # the rest of a function
        kept = without_prose(f"def f():\n{code}", 4).removeprefix("def f():\n")
    return kept, ended or len(code) < len(text) or not code.endswith(kept)


def fenced(text, fences):
    """[(code, whether it is closed)] of the fenced blocks of a text, without the indentation of
    their fences.

    A block ends at the first fence of at least its length, without a language, where the code
    parses.
    """
    blocks, behind = [], 0
    for i, fence in enumerate(fences):
        if fence.start() < behind:
            continue
        ends = [f for f in fences[i + 1 :] if f[2].startswith(fence[2]) and not f[3].strip()][:100]
        codes = [
            re.sub(f"(?m)^{fence[1]}", "", text[fence.end() + 1 : end.start()]) for end in ends
        ]
        last = next((k for k, code in enumerate(codes) if parses(code)), 0)
        behind = ends[last].end() if ends else len(text)
        blocks.append(
            (codes[last], True)
            if ends
            else (re.sub(f"(?m)^{fence[1]}", "", text[fence.end() + 1 :]), False)
        )
    return blocks


def parses(code):
    """Whether a text is Python, which has at most 20,000 characters: a longer one may crash the
    parser.
    """
    with contextlib.suppress(ValueError, RecursionError):
        return len(code) <= 20_000 and parsed(code) is not None
    return False


def without_prose(code, start):
    """The code without prose before and after the function whose name ends at `start`."""
    lines, first = code.split("\n"), code[:start].count("\n")
    # which may have decorators
    while first and not parses("\n".join([*lines[:first], "def f(): pass"])):
        lines, first = lines[1:], first - 1
    for i in range(first + 1, len(lines)):
        if PROSE.match(lines[i]) and not parses(lines[i]) and parses("\n".join(lines[:i])):
            return "\n".join(lines[:i])
    return "\n".join(lines)


# ---- the table -----------------------------------------------------------------------------------------------------

IM_END = ("<|im_end|>", "<|endoftext|>")
# Chen et al., arXiv:2107.03374, as in lm_eval
CHEN = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
EVALPLUS = ("<|endoftext|>", "<|endofmask|>", "</s>", "\nif __name__", "\ndef main(", "\nprint(")
EVALPLUS_HUMANEVAL = (*EVALPLUS, "\ndef ", "\nclass ", "\nimport ", "\nfrom ", "\nassert ")
EVALPLUS_MBPP = (*EVALPLUS, '\n"""', "\nassert")
ASSISTANT = "You are a helpful assistant."
QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
QWEN_CODER = "You are an intelligent programming assistant to produce Python algorithmic solutions"
WRITE = "Write a solution to the following problem and make sure that it passes the tests:\n"
COMPLETED = "Here is the completed function:\n```python\n"
BELOW = (
    "Below is a Python script with a self-contained function that solves the problem and passes corresponding tests:\n"
    "```python\n"
)
ask_prompt = asks("{prompt}")
ask_evalplus = asks(
    "Please provide a self-contained Python script that solves the following problem in a markdown code block:\n"
    "```\n{stripped}\n```\n"
)
ask_evalplus_base = asks("{stripped}\n")
ask_qwen = asks("Can you complete the following Python function?\n```python\n{stripped}\n```\n")
DREAM_RULES = (dream_fence, prepend_prompt_line, dream_sanitize)
EVALPLUS_BASE_RULES = (
    first_10000,
    tabs_to_spaces,
    prepend_stripped_prompt,
    without_colours,
    evalplus_sanitize,
)
PLUS = ("mbppplus", "sanitized")


PROTOCOLS = {  # "harness/task"; the comments say who quotes its scores
    "ours/humaneval": Protocol(
        ask_ours, top_p=0.95, ends=NO_ANSWER, stop_rule="extract", rules=(without_future,), prompt_first=True,
        stops=("\nclass ", "\ndef ", "\n#", "\n@", "\nif ", "\nprint(", "\nassert "), ours=True, limit_s=4, factor=4,
    ),
    "ours/mbpp": Protocol(
        ask_ours, ("sanitized", "mbpp", "mbppplus"), shots=3, top_p=0.95, ends=NO_ANSWER, stop_rule="extract",
        stops=("\nclass ", "\nassert ", '\n"""', "\nprint(", "\nif "), rules=(without_future,), ours=True, limit_s=4,
        factor=4,
    ),
    "ours/infilling": Protocol(ask_prompt, ("infilling",), max_new=64, ends=NO_ANSWER, prompt_first=True, ours=True),
    # DreamOn's eval_humaneval_infilling.sh: BOS before the text, EOS after it; holes grow as there,
    # see writers.py
    "dreamon/infilling": Protocol(
        ask_prompt, ("infilling",), bos=True, max_new=64, temperature=0.2, top_p=0.9, prompt_first=True
    ),
    "ours/livecodebench": Protocol(
        ask_prompt, ("livecodebench",), top_p=0.95, ends=IM_END, drops=True, rules=(last_block,), ours=True, limit_s=6,
        factor=4,
    ),
    # the paper of HumanEval
    "openai/humaneval": Protocol(ask_prompt, temperature=0.2, top_p=0.95, prompt_first=True),
    # LLaDA, and most papers on base models; equal in 0.4.8, which has no instruct tasks, and
    # 0.4.9.2
    "lm_eval/humaneval": Protocol(ask_prompt, max_new=1024, drops=True, stops=CHEN, rules=(prepend_prompt,)),
    "lm_eval/mbpp": Protocol(ask_austin, ("mbpp",), shots=3, max_new=256, drops=True, stops=("[DONE]",)),
    "lm_eval/humaneval_instruct": Protocol(
        asks(WRITE + "```python\n{prompt}\n```\n"), system=ASSISTANT, prefix=COMPLETED + "{prompt}\n", trims=True,
        max_new=1024, drops=True, stops=CHEN, rules=(cut_at_fence, prepend_prompt),
    ),
    # Dream; its postprocess_code.py scores HumanEval from the log of lm_eval
    "dream_base/humaneval": Protocol(ask_prompt, bos=True, temperature=0.2, top_p=0.95, rules=DREAM_RULES),
    "dream_base/mbpp": Protocol(
        ask_austin, ("mbpp",), shots=3, bos=True, temperature=0.2, top_p=0.95, stops=("[DONE]",)
    ),
    "dream_instruct/humaneval_instruct": Protocol(
        asks(WRITE + "```{prompt}"), system=ASSISTANT, prefix=COMPLETED + "{prompt}\n", trims=True, prompt_tokens=1024,
        max_new=768, temperature=0.1, top_p=0.9, stops=CHEN, rules=DREAM_RULES,
    ),
    "dream_instruct/mbpp_instruct": Protocol(
        asks(EXPERT + " {text} Your code should pass these tests:\n\n{tests}"), ("mbpp",), system=ASSISTANT,
        prefix=COMPLETED, trims=True, prompt_tokens=1024, max_new=1024, temperature=0.1, top_p=0.9, stops=("```",),
    ),
    # Fast-dLLM
    "fast_dllm/humaneval": Protocol(ask_prompt, bos=True, max_new=256, rules=DREAM_RULES),
    # Dream-Coder; its MBPP is mbppplus of the Hub, 378 of the sanitized problems. d3LLM scores
    # instruct models alike
    "dreamcoder_base/humaneval": Protocol(
        ask_prompt, bos=True, temperature=0.2, top_p=0.9, stops=("```python\n", "```"),
        rules=(prepend_prompt_line, dream_sanitize),
    ),
    "dreamcoder_base/mbpp": Protocol(
        asks("{text}\nThe code should pass these tests:\n\n{tests}\n\n"), ("sanitized",), prefix=COMPLETED, bos=True,
        temperature=0.1, top_p=0.9, stops=("```",), frame=("", "\n\n"),
    ),
    "dreamcoder_instruct/humaneval": Protocol(
        ask_evalplus, system=ASSISTANT, prefix=BELOW, max_new=768, temperature=0.1, top_p=0.9, top_k=50, ends=(),
        drops=True, stops=(*EVALPLUS, "\n```\n"), rules=(first_10000, tabs_to_spaces, evalplus_sanitize), limit_s=1,
        factor=4,
    ),
    # EvalPlus, and d3LLM's table of Qwen2.5-Coder-Instruct
    "evalplus_base/humaneval": Protocol(
        ask_evalplus_base, max_new=768, ends=(), drops=True, stops=EVALPLUS_HUMANEVAL, rules=EVALPLUS_BASE_RULES,
        limit_s=4, factor=4,
    ),
    "evalplus_base/mbpp": Protocol(
        ask_evalplus_base, PLUS, max_new=768, ends=(), drops=True, stops=EVALPLUS_MBPP, rules=EVALPLUS_BASE_RULES,
        limit_s=4, factor=4,
    ),
    "evalplus_instruct/humaneval": Protocol(
        ask_evalplus, system=QWEN, prefix=BELOW, max_new=768, ends=(), drops=True, stops=(*EVALPLUS, "\n```\n"),
        rules=(first_10000, tabs_to_spaces, without_colours, evalplus_sanitize), limit_s=4, factor=4,
    ),
    # Qwen2.5-Coder; DiffuCoder has its harness. It runs the prompt twice; here once, so that a
    # future import can follow
    "qwen_base/humaneval": Protocol(
        ask_evalplus_base, max_new=768, ends=IM_END, drops=True, stops=(*EVALPLUS_HUMANEVAL, "\n```\n", "```"),
        rules=(tabs_to_spaces, prepend_stripped_prompt), limit_s=1, factor=4,
    ),
    "qwen_instruct/humaneval": Protocol(
        ask_qwen, system=QWEN_CODER, prefix="```python\n", max_new=2048, ends=IM_END, drops=True,
        stops=(*EVALPLUS, "\n#", "\n```"), rules=(tabs_to_spaces, cut_at_fence), limit_s=1, factor=4,
    ),
}  # fmt: skip
base, qwen = PROTOCOLS["qwen_base/humaneval"], PROTOCOLS["qwen_instruct/humaneval"]
PROTOCOLS["qwen_base/mbpp"] = base._replace(data=PLUS, stops=(*EVALPLUS_MBPP, "\n```\n", "```"))
# Qwen2.5-Coder scores the answers of instruct models as they are, and sanitised.
PROTOCOLS["qwen_instruct/humaneval_sanitized"] = qwen._replace(
    rules=(*qwen.rules, evalplus_sanitize)
)
# EvalPlus asks for MBPP as for HumanEval, and so do those that use it.
for name in (
    "dreamcoder_instruct/{}",
    "evalplus_instruct/{}",
    "qwen_instruct/{}",
    "qwen_instruct/{}_sanitized",
):
    PROTOCOLS[name.format("mbpp")] = PROTOCOLS[name.format("humaneval")]._replace(data=PLUS)
for task, ask in (
    ("humaneval", ask_ours_chat),
    ("mbpp", ask_ours_chat),
    ("livecodebench", ask_prompt),
):
    PROTOCOLS[f"ours_chat/{task}"] = PROTOCOLS[f"ours/{task}"]._replace(ask=ask, system="", shots=0)


def named(name, task):
    """("harness/task", record) for the name of a record or of a harness. ValueError lists the names
    of a task.
    """
    task = task.rstrip("+").replace("humaneval_infilling", "infilling")
    for key in (name, f"{name}/{task}", f"{name}/{task}_instruct"):
        if key in PROTOCOLS and key.split("/")[1].startswith(task):
            return key, PROTOCOLS[key]
    known = ", ".join(key for key in PROTOCOLS if key.split("/")[1].startswith(task))
    raise ValueError(
        f"{name!r} is no protocol of {task}; there are {known}; others are in bench/explain.py"
    )


# ---- from a text to a program --------------------------------------------------------------------------------------


def steps(protocol):
    """The functions (text, question) -> text that make a candidate of a text, in order."""
    special = [without_special] if protocol.drops else []
    stops = {"cut": [cut_at], "extract": [extracted], "none": []}[protocol.stop_rule]
    cuts = [functools.partial(cut, protocol.stops) for cut in stops]
    return [functools.partial(cut_at, protocol.ends), *special, *cuts, *protocol.rules]


def candidate(protocol, text, q):
    """The code that the harness finds in a model's text. SyntaxError, ValueError where the harness
    raises.
    """
    for step in steps(protocol):
        text = step(text, q)
    return text


def ended(protocol, text, q):
    """Whether the candidate can no longer change, so that generation from left to right may
    stop.
    """
    if protocol.stop_rule == "extract":
        return extract(text, q.entry, protocol.stops)[1]
    return protocol.stop_rule == "cut" and first_of(text, protocol.stops) < len(text)


def program(protocol, code, q):
    """The code that runs before the tests."""
    return q.prompt + code + q.suffix if protocol.prompt_first else code


def target(protocol, q):
    """The tests, as the harness appends them to a program and a newline."""
    tests = "\n".join(q.tests[:3]) or f"{q.test}\ncheck({q.entry})"
    before, after = protocol.frame
    return before + tests + after
