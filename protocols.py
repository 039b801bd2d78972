"""How the public harnesses ask for programs and what they make of the answers: one table, a record a harness and task.

    python benchmarks.py --task=humaneval --protocol=dream_instruct ...     # asks, cuts, runs as that harness does
    python benchmarks.py --task=humaneval --explain --samples=raw.jsonl     # what every protocol makes of one file

Scores that do not reproduce mostly differ in here, not in the model. A record of PROTOCOLS says what the model reads
(ask, system, prefix, bos), how it writes (max_new and on), where its text ends (ends, stops), what is done to it then
(rules), and what runs (prompt_first, limit_s). Prompts, candidates and tests are those of the harness byte for byte:
tests/test_golden_protocols.py. Ours, the record "ours", loses least of a right answer.

    prompt(protocol, question)           what the tokenizer gets
    candidate(protocol, text, question)  what is left of a model's text
    program(protocol, code, question)    what runs before target(protocol, question), the tests

Versions: lm_eval 0.4.8, 0.4.9.2, 4e7e0d4; Dream fac0a7f; Fast-dLLM 24cc59e; Dream-Coder 87409da with d3LLM e5bfcac;
evalplus 0.3.1, 26d6d00; Qwen2.5-Coder d5ead97 (DiffuCoder's paper evaluates with it); bigcode 8fc5bae; DARE 83ae8a3
(OpenCompass); human-eval 6d43fb9; simple-evals ee3b031.
"""

import ast
import contextlib
import functools
import keyword
import re
import typing
import warnings


class Question(typing.NamedTuple):
    """What a protocol knows of a problem."""

    entry: str  # the function that is asked for
    prompt: str  # HumanEval's, or the docstring that EvalPlus makes of MBPP's text and first assert
    test: str = ""  # HumanEval's check()
    text: str = ""  # MBPP's words
    tests: tuple = ()  # MBPP's asserts
    code: str = ""  # a solution, for problems that are shown with it
    shots: tuple = ()  # solved problems of the same file, which ours shows


class Protocol(typing.NamedTuple):
    data: tuple  # keys of DATA: which problems the harness has
    ask: typing.Callable  # (question, shots) -> what the user says; a list of (user, assistant) turns and the last one
    system: str | None = None  # asks by a chat template with this system text; None: no chat
    prefix: str = ""  # how the answer begins that the model goes on with; {prompt} is the question's
    trims: bool = False  # the prefix goes through transformers' continue_final_message, see prompt()
    shots: int = 0  # solved problems in the prompt
    bos: bool = False  # the beginning-of-text token stands before the prompt
    prompt_tokens: int = 0  # only so many of the prompt, the last ones; 0 all
    max_new: int = 512  # tokens at most
    max_length: int = 0  # tokens of prompt and answer together at most; 0 no limit
    temperature: float = 0.0
    top_p: float = 1.0
    ends: str = "cut"  # key of ENDS: what a special token in the text means
    stops: tuple = ()  # strings behind which there is no answer
    stop_rule: str = "each"  # cut at each "in turn", at the "first" in the text, or "none"
    rules: tuple = ()  # [(name, function of text and question)], in order
    prompt_first: bool = False  # the prompt stands before the candidate when it runs
    limit_s: float = 3.0  # for all tests of a candidate
    factor: float = 0.0  # at least this times what the reference solution takes; 0 none
    never: tuple = ()  # problems that the harness counts as failed, whatever is written


DATA = {  # which file, its problems
    "humaneval": ("HumanEval.jsonl.gz", (164,)),
    "mbpp": ("mbpp.jsonl, the full MBPP, ids 11-510", (500,)),
    "mbppplus": ("MbppPlus-v0.2.0.jsonl or v0.1.0", (378, 399)),
    "sanitized": ("sanitized-mbpp.json", (257, 427)),
    "livecodebench": ("test*.jsonl of LiveCodeBench", ()),
}

# ---- prompts -------------------------------------------------------------------------------------------------------

SHOTS = (  # the solved problems 2, 3, 4 of the full MBPP, as the harnesses hold them
    Question(
        "similar_elements",
        "",
        text="Write a function to find the similar elements from the given two tuple lists.",
        tests=(
            "assert similar_elements((3, 4, 5, 6),(5, 7, 4, 10)) == (4, 5)",
            "assert similar_elements((1, 2, 3, 4),(5, 4, 3, 7)) == (3, 4)",
            "assert similar_elements((11, 12, 14, 13),(17, 15, 14, 13)) == (13, 14)",
        ),
        code="def similar_elements(test_tup1, test_tup2):\r\n  res = tuple(set(test_tup1) & set(test_tup2))\r\n"
        "  return (res) ",
    ),
    Question(
        "is_not_prime",
        "",
        text="Write a python function to identify non-prime numbers.",
        tests=("assert is_not_prime(2) == False", "assert is_not_prime(10) == True", "assert is_not_prime(35) == True"),
        code="import math\r\ndef is_not_prime(n):\r\n    result = False\r\n"
        "    for i in range(2,int(math.sqrt(n)) + 1):\r\n        if n % i == 0:\r\n            result = True\r\n"
        "    return result",
    ),
    Question(
        "heap_queue_largest",
        "",
        text="Write a function to find the largest integers from a given list of numbers using heap queue algorithm.",
        tests=(
            "assert heap_queue_largest( [25, 35, 22, 85, 14, 65, 75, 22, 58],3)==[85, 75, 65] ",
            "assert heap_queue_largest( [25, 35, 22, 85, 14, 65, 75, 22, 58],2)==[85, 75] ",
            "assert heap_queue_largest( [25, 35, 22, 85, 14, 65, 75, 22, 58],5)==[85, 75, 65, 58, 35]",
        ),
        code="import heapq as hq\r\ndef heap_queue_largest(nums,n):\r\n  largest_nums = hq.nlargest(n, nums)\r\n"
        "  return largest_nums",
    ),
)
EXPERT = "You are an expert Python programmer, and here is your task:"


def ask_unchanged(q, shots):
    return q.prompt


def ask_stripped(q, shots):
    return q.prompt.strip()


def ask_evalplus_base(q, shots):
    return q.prompt.strip() + "\n"


def ask_evalplus(q, shots):
    what = "Please provide a self-contained Python script that solves the following problem in a markdown code block:"
    return f"{what}\n```\n{q.prompt.strip()}\n```\n"


def ask_qwen(q, shots):
    return f"Can you complete the following Python function?\n```python\n{q.prompt.strip()}\n```\n"


def ask_solution(q, shots, fence="```{}"):
    what = "Write a solution to the following problem and make sure that it passes the tests:"
    return f"{what}\n{fence.format(q.prompt)}"


def ask_opencompass(q, shots):
    return f"Complete the following python code:\n{q.prompt}"


def ask_simple_evals(q, shots):
    what = "Read the following function signature and docstring, and fully implement the function described."
    return f"{what} Your response should only contain the code for this function.\n{q.prompt}"


def ask_austin(q, shots, begin="\n[BEGIN]\n"):
    """Ref: Austin et al., arXiv:2108.07732; three asserts, after problems with their answers."""

    def one(q):
        return f"{EXPERT} {q.text} Your code should pass these tests:\n\n" + "\n".join(q.tests[:3]) + begin

    return "".join(f"{one(shot)}{shot.code}\n[DONE]\n\n" for shot in shots) + one(q)


def ask_expert_block(q, shots, gap=""):
    """lm_eval's mbpp_instruct; 0.4.9.2 puts a blank before each answer that it shows."""

    def one(q):
        return f"{EXPERT}\n{q.text}\nYour code should pass these tests:\n" + "\n".join(q.tests[:3])

    return "".join(f"{one(shot)}\n```python\n{gap}{shot.code}\n```\n\n" for shot in shots) + one(q)


def ask_dreamcoder(q, shots):
    return f"{q.text}\nThe code should pass these tests:\n\n" + "\n".join(q.tests[:3]) + "\n\n"


def ask_docstring(q, shots):
    return f'"""\n{q.text}\n{q.tests[0]}\n"""\n'


def ask_opencompass_turns(q, shots):
    """[(user, assistant), ..., user]: answers are quoted, asserts end in blanks, but for the very first."""
    turns = []
    for shot in shots:
        asserts = "".join(f"{test.strip()} \n" for test in shot.tests)
        asserts = asserts if turns else asserts.replace(" \n", "\n", 1)
        asked = f"{EXPERT} {shot.text} Your code should pass these tests:\n\n {asserts}"
        turns.append((asked, f"[BEGIN]\n '{shot.code.strip()}' \n[DONE] \n\n "))
    asserts = "\n".join(q.tests)
    return [*turns, f"{EXPERT} {q.text} Your code should pass these tests:\n\n {asserts}  \n"]


def ask_ours(q, shots):
    """HumanEval's prompt without its last newline, as BPEs like it; MBPP as Austin et al., MBPP+ as EvalPlus."""
    if not q.text:
        return ask_evalplus_base(q, shots) if q.prompt.startswith('"""') else q.prompt.rstrip()
    stripped = [shot._replace(text=shot.text.strip(), code=shot.code.strip()) for shot in (*q.shots[: len(shots)], q)]
    return ask_austin(stripped[-1], stripped[:-1])


def ask_ours_chat(q, shots):
    if not q.text:
        what = "Complete this Python function. Answer with all of it in one block of code."
        return f"{what}\n\n```python\n{q.prompt.rstrip()}\n```"
    asserts = "\n".join(q.tests[:3])
    what = "Write a Python function. Answer with all of it in one block of code."
    return f"{what}\n\n{q.text.strip()}\nIt must pass these tests:\n\n```python\n{asserts}\n```"


def prompt(protocol, q, trim_prefix=True):
    """What the tokenizer gets, before BOS.

    trim_prefix: transformers 4.46, which Dream's harness pins, takes whitespace from the end of an answer's beginning;
    4.49, which Fast-dLLM's pins, keeps it. The chat is ChatML, as Dream's, DiffuCoder's and Qwen's templates write it.
    """
    asked = protocol.ask(q, SHOTS[: protocol.shots])
    prefix = protocol.prefix.replace("{prompt}", q.prompt)
    if protocol.system is None:
        return asked + prefix
    *turns, last = asked if isinstance(asked, list) else [asked]
    text = f"<|im_start|>system\n{protocol.system}<|im_end|>\n"
    for user, assistant in turns:
        text += f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n{assistant}<|im_end|>\n"
    text += f"<|im_start|>user\n{last}<|im_end|>\n<|im_start|>assistant\n{prefix}"
    return text.rstrip() if trim_prefix and protocol.trims else text


# ---- what is done to a text ----------------------------------------------------------------------------------------

SPECIAL = re.compile(  # tokens that a tokenizer leaves out with skip_special_tokens=True: Qwen2.5's and Dream's
    r"<\|(endoftext|im_start|im_end|mask|beginoftext|object_ref_start|object_ref_end|box_start|box_end|quad_start|"
    r"quad_end|vision_start|vision_end|vision_pad|image_pad|video_pad)\|>"
)


def before(*ends):
    """A rule: the text before each of these strings in turn."""
    return lambda text, q: functools.reduce(lambda text, end: text.split(end, 1)[0], ends, text)


ENDS = {
    "keep": (),
    "cut": (("<|endoftext|> ends it", before("<|endoftext|>")),),
    "drop": (("special tokens go, what follows them stays", lambda text, q: SPECIAL.sub("", text)),),
}
ENDS["ours"] = ()  # extract() looks for NO_ANSWER
ENDS["cut, drop"] = ENDS["cut"] + (("special tokens go", ENDS["drop"][0][1]),)
ENDS["cut at im_end, drop"] = (("<|im_end|> ends it", before("<|im_end|>")),) + ENDS["cut, drop"]


def first_of(text, stops, start=0):
    """Where the first of some strings begins at or behind `start`; the end of the text if there is none."""
    return min((i for i in (text.find(stop, start) for stop in stops) if i >= 0), default=len(text))


def prepend_prompt(text, q):
    return q.prompt + text


def prepend_prompt_line(text, q):
    return f"{q.prompt}\n{text}"


def prepend_stripped_prompt(text, q):
    return f"{q.prompt.strip()}\n{text}"


def tabs(text, q):
    return text.replace("\t", "    ")


def dream_fence(text, q):
    return text.split("```python\n", 1)[-1].split("```")[0]


def lm_eval_fence(text, q):
    """The first block of a text that began inside one. A word at its very beginning is taken for its language."""
    blocks = re.findall(r"```(?:\w+)?\n?(.*?)\n?```", "```" + text, re.DOTALL)
    return blocks[0] if blocks else ""


def opencompass_fence(text, q):
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    return blocks[0] if blocks else text


def simple_evals_fence(text, q):
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return blocks[0] if blocks else text


def without_signature(text, q):
    return text[text.find(":\n    ") + 2 :]  # where there is none, all but the first character


BEGINS = r"\[BEGIN\]\s*'", r"BEGIN\s*'", r"\[BEGIN\]\s*", r"BEGIN\s*"
ENDINGS = r"'\s*\[DONE\]", r"'\s*DONE", r"\s*\[DONE\]", r"\s*DONE"
PATTERNS = [  # tried in this order: quoted answers, those without the second quote, without any, then fences
    *(begin + "(.*)" + end for begin, end in (
        (BEGINS[0], ENDINGS[0]), (BEGINS[1], ENDINGS[0]), (BEGINS[0], ENDINGS[1]), (BEGINS[1], ENDINGS[1]),
        (BEGINS[0], ENDINGS[2]), (BEGINS[1], ENDINGS[2]), (BEGINS[0], ENDINGS[3]), (BEGINS[1], ENDINGS[3]),
        (BEGINS[2], ENDINGS[2]), (BEGINS[3], ENDINGS[2]), (BEGINS[2], ENDINGS[3]), (BEGINS[3], ENDINGS[3]),
    )),
    r"```python\s*(.*)\s*```", r"```\s*(.*)\s*```", r"```python\s*(.*)\s*$", r"```\s*(.*)\s*$", r"(.*)\s*```.*",
    r"\[BEGIN\]\s*'(.*)", r"\[BEGIN\](.*)", r"'(.*)'\s*\[DONE\]",
]  # fmt: skip


def opencompass_answer(text, q):
    match = next((m for m in (re.search(pattern, text, re.DOTALL) for pattern in PATTERNS) if m), None)
    text = match[1] if match else text
    text = re.split(r"'?\s*\[?DONE\]?", text.split("```")[0])[0].replace("\\_", "_").strip()
    return text.removeprefix("'").removesuffix("'")


def last_block(text, q):
    """LiveCodeBench's way: what lies between the last two fences of an answer, all of it if it has none."""
    lines = text.split("\n")
    fences = [i for i, line in enumerate(lines) if "```" in line]
    if not fences:
        return text
    return "\n".join(lines[fences[-2] + 1 : fences[-1]]) if len(fences) > 1 else ""


def strip_left(text, q):
    return text.lstrip()


# ---- the two sanitisers --------------------------------------------------------------------------------------------


@functools.lru_cache(1024)
def longest_program(lines, least):
    """The longest run of at least so many lines that is Python, as (first, last) line; None if there is none.

    The longest has most lines that are not blank; of equals, the first that begins and then the first that ends.
    """
    filled = [i for i, line in enumerate(lines) if line.strip()]
    begins = [k for k, i in enumerate(filled) if may_begin(lines[i])]
    for count in range(len(filled), 0, -1):
        for k in (k for k in begins if k + count <= len(filled)):
            first, last = filled[k], filled[k + count - 1]
            while first and not lines[first - 1].strip(" \t\r\f"):  # with all blank lines before it
                first -= 1
            while last < len(lines) - 1 and last - first + 1 < least and not lines[last + 1].strip():
                last += 1
            if last - first + 1 >= least and syntax_holds("\n".join(lines[first : last + 1])):
                return first, last
    return None


def may_begin(line):
    """Whether Python could begin in a line: not in an indented one, nor in one that is a sentence. Comments may."""
    if "#" in line:
        return True
    statement = not re.search(r"[()\[\]{}'\"\\@]|:\s*$", line)  # nothing in it goes on in the next line
    return not line[0].isspace() and (not statement or syntax_holds(line))


def syntax_holds(code):
    with contextlib.suppress(SyntaxError, MemoryError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return bool(ast.parse(code) or True)
    return False


def reached(entry, names):
    """The definitions that `entry` needs: names is {definition: the names in it}."""
    found, todo = {entry}, [entry]
    while todo:
        new = names.get(todo.pop(), set()) - found
        found |= new
        todo += new
    return found


def dream_sanitize(text, q):
    """Imports, and of functions that return, classes and assignments those that the entry point needs, unparsed.

    Of a name defined twice the last definition counts, of `a.b` only b, and of a text only 100 lines.
    """
    text = text.replace("\t", "    ").replace("\r\n", "\n").replace("\r", "\n").strip() + "\n"
    lines = text.splitlines()[:100]
    run = longest_program(tuple(lines), 1)
    body = ast.parse("\n".join(lines[run[0] : run[1] + 1])).body if run else []
    imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    definitions = {}
    for node in body:
        if isinstance(node, ast.ClassDef) or (isinstance(node, ast.FunctionDef) and has_return(node)):
            definitions[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            definitions[node.targets[0].id] = node
    needed = reached(q.entry, {name: dream_names(node) for name, node in definitions.items()})
    return "\n".join(map(ast.unparse, [*imports, *(node for name, node in definitions.items() if name in needed)]))


def has_return(node):
    return any(isinstance(child, ast.Return) for child in ast.walk(node))


def dream_names(node):
    """Names and attributes in a definition, but not what stands before the dot of an attribute."""
    names, todo = set(), [node]
    while todo:
        for child in ast.iter_child_nodes(todo.pop()):
            if isinstance(child, ast.Name | ast.Attribute):
                names.add(child.id if isinstance(child, ast.Name) else child.attr)
            else:
                todo.append(child)
    return names


def evalplus_sanitize(text, q):
    """Like Dream's, with other rules: the first definition of a name counts, and its bytes stay as they are.

    EvalPlus walks a tree-sitter parse; this finds the same nodes by `ast` and its offsets, which count bytes. Where
    nothing is left, the longest Python in the text comes back.
    """
    lines = text.split("\n")
    first, last = longest_program(tuple(lines), 2) or (0, 0)
    code = "\n".join(lines[first : last + 1])
    kept = ""
    if syntax_holds(code):
        kept = evalplus_definitions(code, q.entry)
    return kept.strip() or code


def evalplus_definitions(code, entry):
    """The source of the imports, and of the first definition of each name that the entry point needs."""
    data = code.encode()
    starts = [0, *(match.end() for match in re.finditer(rb"\r\n|\r|\n", data))]  # of the lines

    def source(node):
        first, last = (starts[line - 1] for line in (node.lineno, node.end_lineno))
        end = last + node.end_col_offset
        return data[first + node.col_offset : end_of_block(data, end, node) if hasattr(node, "body") else end]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        body = ast.parse(code).body
    imports, definitions = [], {}
    for node in body:
        name = evalplus_name(node)
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and node.module != "__future__"):
            imports.append(node)
        elif name and name not in definitions:
            definitions[name] = node
    needed = reached(entry, {name: evalplus_names(node) for name, node in definitions.items()})
    nodes = [*imports, *(node for name, node in definitions.items() if name in needed)]
    return b"\n".join(map(source, nodes)).decode()


def end_of_block(data, end, node):
    """Where tree-sitter lets a definition end whose last statement ends at `end`: behind comments of its block."""
    end += len(re.compile(rb"([ \t]*;)?([ \t]*#[^\n]*)?").match(data, end)[0])
    comment = re.compile(rb"(?:[ \t\r\f]*\n)+([ \t]*)#[^\n]*")
    while (match := comment.match(data, end)) and len(match[1].expandtabs(8)) >= node.body[0].col_offset:
        end = match.end()
    return end


def evalplus_name(node):
    """The name that a statement defines in EvalPlus' eyes, or None; decorated definitions define none."""
    if isinstance(node, ast.ClassDef):
        return None if node.decorator_list else node.name
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name if has_return(node) and not node.decorator_list else None
    if isinstance(node, ast.Assign | ast.AnnAssign):
        # the first plain name of both sides, so that `a.b = c` defines c; a name in parentheses is none
        left, *more = node.targets if isinstance(node, ast.Assign) else [node.target]
        if isinstance(left, ast.Name):
            return left.id if left.col_offset == node.col_offset else None
        if isinstance(node.value, ast.Name) and not more:
            bare = (node.value.end_lineno, node.value.end_col_offset) == (node.end_lineno, node.end_col_offset)
            return node.value.id if bare else None
    return None


def evalplus_names(node):
    """All identifiers in a definition: names, both parts of a.b, arguments, keywords, imports."""
    names = set()
    for child in ast.walk(node):
        for field in ("id", "attr", "arg", "name", "asname", "rest"):
            value = getattr(child, field, None)
            names.update(value.split(".") if isinstance(value, str) else ())
        if isinstance(child, ast.Global | ast.Nonlocal):
            names.update(child.names)
        if isinstance(child, ast.ImportFrom):
            names.update((child.module or "").split("."))
        names.update(getattr(child, "kwd_attrs", ()))
    return names


# ---- ours: loses least of a right answer ---------------------------------------------------------------------------

# after these there is no answer in any text; Austin et al. end theirs by [DONE]
NO_ANSWER = ("<|endoftext|>", "<|file_sep|>", "<|im_end|>", "<|dlm_pad|>", "<|mask|>", "[DONE]")
FENCE = re.compile(r"(?m)^([ \t]*)(```+)[ \t]*([^`\n]*?)[ \t]*$")  # indentation, backticks, language
# a line that begins with two words, of which the first is none of Python's, or as an item of a list
PROSE = re.compile(rf"(?!({'|'.join([*keyword.kwlist, *keyword.softkwlist])})\b)[\w'’-]+[,:;]? [A-Za-z]|\d+[.)] |[-*] ")


def extract(text, entry, stops):
    """(code, ended) of what a model wrote: without fences, chat and what follows the answer.

    A text that starts indented goes on with the function of the prompt, until the first stop string. One that defines
    `entry` before any fence is code, too, until the first stop string, fence or prose behind it; it may have begun in a
    block that the prompt opened. Otherwise a fenced block counts whole: the first that defines `entry`, or the first.
    ended: nothing that could follow would change the code.
    """
    written = text.replace("\r\n", "\n").removeprefix("[BEGIN]")
    text = written[: first_of(written, NO_ANSWER)]
    ended = len(text) < len(written)
    defines = re.compile(rf"(?m)^(async )?def {re.escape(entry)}\b")
    goes_on = re.match(r"\s*\n[ \t]+[^\s`]|[ \t]+[^\s`]", text)
    if goes_on:  # the prompt is indented by spaces
        text = re.sub(r"(?m)^\t+", lambda tabs: "    " * len(tabs[0]), text)
    restated, fences = None if goes_on else defines.search(text), list(FENCE.finditer(text))
    if fences and not goes_on and not (restated and restated.start() < fences[0].start()):
        blocks = fenced(text, fences)
        code, closed = next((block for block in blocks if defines.search(block[0])), blocks[0])
        return code, (closed or ended) and bool(defines.search(code))
    # Helpers may come first, so stop strings count after the function that is asked for.
    start = restated.end() if restated else 0
    code = text[: first_of(text, (*stops, "\n```"), start)]
    code = re.split(r"(?m)(?<=[^\s`])```[ \t]*$", code)[0]
    kept = without_prose(code, start) if restated else code
    return kept, ended or len(code) < len(text) or not code.endswith(kept)


def fenced(text, fences):
    """[(code, whether its end is there)] of the blocks of a text, without the indentation of their fences.

    A block ends at a fence that is as long and says no language; where it would be no Python so, at a later one.
    """
    blocks, behind = [], 0
    for i, fence in enumerate(fences):
        if fence.start() < behind:
            continue
        ends = [f for f in fences[i + 1 :] if f[2].startswith(fence[2]) and not f[3]]
        codes = [re.sub(f"(?m)^{fence[1]}", "", text[fence.end() + 1 : end.start()]) for end in ends]
        last = next((k for k, code in enumerate(codes) if parses(code)), 0)
        behind = ends[last].end() if ends else len(text)
        blocks.append((codes[last], True) if ends else (text[fence.end() + 1 :], False))
    return blocks


def parses(code):
    """Whether a text of reasonable length is Python; a longer one may end the parser, and this process."""
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return len(code) <= 20_000 and bool(ast.parse(code) or True)
    return False


def without_prose(code, start):
    """Code without lines of prose before the function whose name ends at `start`, and behind it."""
    lines, first = code.split("\n"), code[:start].count("\n")
    while first and not parses("\n".join(lines[:first])):
        lines, first = lines[1:], first - 1
    for i in range(first + 1, len(lines)):
        if PROSE.match(lines[i]) and not parses(lines[i]) and parses("\n".join(lines[:i])):
            return "\n".join(lines[:i])
    return "\n".join(lines)


# ---- the table -----------------------------------------------------------------------------------------------------

CHEN = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # of Chen et al., arXiv:2107.03374, as lm_eval has them
EVALPLUS = ("<|endoftext|>", "<|endofmask|>", "</s>", "\nif __name__", "\ndef main(", "\nprint(")
EVALPLUS_BASE = {
    "humaneval": (*EVALPLUS, "\ndef ", "\nclass ", "\nimport ", "\nfrom ", "\nassert "),
    "mbpp": (*EVALPLUS, '\n"""', "\nassert"),
}
BIGCODE_STOPS = ("\nclass", "\ndef", "\n#", "\n@", "\nprint", "\nif", "\n```", "<file_sep>", "<|endoftext|>")
BIGCODE_MBPP_STOPS = ("\nclass", "\nassert", '\n"""', "\nprint", "\nif", "\n<|/", "\n```", "<|endoftext|>")
OURS_STOPS = {
    "humaneval": ("\nclass ", "\ndef ", "\n#", "\n@", "\nif ", "\nprint(", "\nassert "),
    "mbpp": ("\nclass ", "\nassert ", '\n"""', "\nprint(", "\nif "),
}
ASSISTANT = "You are a helpful assistant."
QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
QWEN_CODER = "You are an intelligent programming assistant to produce Python algorithmic solutions"
COMPLETED = "Here is the completed function:\n```python\n"
BELOW = "Below is a Python script with a self-contained function that solves the problem and passes corresponding tests"

# rules: (what a table of --explain calls it, function of text and question)
PROMPT = ("the prompt goes in front", prepend_prompt)
PROMPT_LINE = ("the prompt and a newline go in front", prepend_prompt_line)
STRIPPED_PROMPT = ("the stripped prompt goes in front", prepend_stripped_prompt)
FIRST_STOP = "the first stop string ends it"
TABS = ("a tab is four blanks", tabs)
FIRST_10000 = ("only 10,000 characters", lambda text, q: text[:10_000])
ANSI = ("no colours", lambda text, q: re.sub(r"\x1B(?:[@-Z\\-_]|\[[0-?]*[ -/]*[@-~])", "", text))
TO_FENCE = ("``` ends it", before("```"))
DREAM_RULES = (("code is what follows ```python", dream_fence), PROMPT_LINE, ("Dream's sanitiser", dream_sanitize))
SANITIZED = ("EvalPlus' sanitiser", evalplus_sanitize)


FUTURE = "from __future__ import annotations\n"  # an error behind a prompt
OURS_RULES = {
    task: (
        ("code is looked for everywhere", lambda text, q, stops=stops: extract(text, q.entry, stops)[0]),
        ("no import from the future", lambda text, q: text.replace(FUTURE, "")),
    )
    for task, stops in OURS_STOPS.items()
}


# bases that several records share
LM_EVAL = Protocol(("humaneval",), ask_unchanged, stops=CHEN, rules=(PROMPT,), max_new=1024, ends="cut, drop")
AUSTIN = Protocol(("mbpp",), ask_austin, shots=3, stops=("[DONE]",), max_new=256, ends="cut, drop")
LM_EVAL_CHAT = LM_EVAL._replace(
    ask=functools.partial(ask_solution, fence="```python\n{}\n```\n"),
    system=ASSISTANT, prefix=COMPLETED + "{prompt}\n", trims=True, rules=(TO_FENCE, PROMPT),
)  # fmt: skip
AUSTIN_CHAT = AUSTIN._replace(
    ask=ask_expert_block, system=ASSISTANT, prefix="\n```python\n", trims=True, stops=(),
    rules=(("the first block counts, a leading word is its language", lm_eval_fence),),
)  # fmt: skip
EVALPLUS_CHAT = Protocol(
    ("humaneval",), ask_evalplus, QWEN, f"{BELOW}:\n```python\n", max_new=768, ends="drop",
    stops=(*EVALPLUS, "\n```\n"), stop_rule="first", rules=(FIRST_10000, TABS, ANSI, SANITIZED), limit_s=4, factor=4,
)  # fmt: skip
EVALPLUS_PLAIN = EVALPLUS_CHAT._replace(
    ask=ask_evalplus_base, system=None, prefix="", stops=EVALPLUS_BASE["humaneval"],
    rules=(FIRST_10000, TABS, STRIPPED_PROMPT, ANSI, SANITIZED),
)  # fmt: skip
PLUS = {"data": ("mbppplus", "sanitized")}
PLUS_PLAIN = PLUS | {"stops": EVALPLUS_BASE["mbpp"]}
OLD = {"rules": (FIRST_10000, TABS, SANITIZED), "limit_s": 1.0}  # evalplus 0.3.1: colours stay, a shorter least time
OLD_PLAIN = OLD | {"rules": (FIRST_10000, TABS, STRIPPED_PROMPT, SANITIZED)}
NO_32 = {"never": ("HumanEval/32",)}  # it passes over find_zero without a verdict
DREAM = {"temperature": 0.2, "top_p": 0.95, "bos": True, "ends": "cut"}
DREAM_BASE = LM_EVAL._replace(stop_rule="none", rules=DREAM_RULES, max_new=512, **DREAM)
DREAM_CHAT = {"system": ASSISTANT, "trims": True, "prompt_tokens": 1024, "temperature": 0.1, "top_p": 0.9}
DREAM_CHAT |= {"ends": "cut"}
DREAMCODER = EVALPLUS_CHAT._replace(system=ASSISTANT, temperature=0.1, top_p=0.9, **OLD)
QWEN_BASE = Protocol(
    ("humaneval",), ask_evalplus_base, max_new=768, ends="cut at im_end, drop", stop_rule="first",
    stops=(*EVALPLUS_BASE["humaneval"], "\n```\n", "```"), rules=(TABS, STRIPPED_PROMPT), prompt_first=True,
    limit_s=1, factor=4,
)  # fmt: skip
QWEN_CHAT = QWEN_BASE._replace(
    ask=ask_qwen, system=QWEN_CODER, prefix="```python\n", max_new=2048, stops=(*EVALPLUS, "\n#", "\n```"),
    rules=(TABS, TO_FENCE), prompt_first=False,
)  # fmt: skip
QWEN_SANITIZED = {"rules": (TABS, TO_FENCE, SANITIZED)}
BIGCODE = Protocol(
    ("humaneval",), ask_stripped, max_length=512, temperature=0.2, top_p=0.95, ends="keep", stop_rule="first",
    stops=BIGCODE_STOPS, rules=(("the stripped prompt goes in front", lambda text, q: q.prompt.strip() + text),),
)  # fmt: skip
BIGCODE_MBPP = {"data": ("mbpp",), "ask": ask_docstring, "stops": BIGCODE_MBPP_STOPS, "rules": (PROMPT,)}
OPENCOMPASS = Protocol(
    ("humaneval",), ask_opencompass, ASSISTANT, ends="drop", temperature=0.2, top_p=0.95,
    rules=(("the first block counts", opencompass_fence), ("no blanks in front", strip_left)), prompt_first=True,
)  # fmt: skip
OPENCOMPASS_MBPP = {
    "data": ("mbpp",), "ask": ask_opencompass_turns, "shots": 3, "limit_s": 9, "prompt_first": False,
    "rules": (("the first of twenty patterns counts", opencompass_answer),),
}  # fmt: skip
OURS = Protocol(
    ("humaneval",), ask_ours, top_p=0.95, ends="ours", stop_rule="none", limit_s=4, factor=4, prompt_first=True
)

OURS_MBPP = OURS._replace(
    data=("sanitized", "mbpp", "mbppplus"), stops=OURS_STOPS["mbpp"], rules=OURS_RULES["mbpp"], prompt_first=False
)
LIVE = Protocol(
    ("livecodebench",), ask_unchanged, top_p=0.95, ends="cut at im_end, drop", limit_s=6, factor=4,
    rules=(("the last block counts", last_block),),
)  # fmt: skip

PROTOCOLS = {  # "harness/task": the names are those of the golden files
    "ours/humaneval": OURS._replace(stops=OURS_STOPS["humaneval"], rules=OURS_RULES["humaneval"]),
    "ours/mbpp": OURS_MBPP._replace(shots=3),
    "ours_chat/humaneval": OURS._replace(
        ask=ask_ours_chat, system="", stops=OURS_STOPS["humaneval"], rules=OURS_RULES["humaneval"]
    ),
    "ours_chat/mbpp": OURS_MBPP._replace(ask=ask_ours_chat, system=""),
    "ours/livecodebench": LIVE,
    "ours_chat/livecodebench": LIVE._replace(system=""),
    "openai/humaneval": Protocol(("humaneval",), ask_unchanged, temperature=0.2, top_p=0.95, prompt_first=True),
    "lm_eval_0.4.8/humaneval": LM_EVAL,
    "lm_eval_0.4.8/mbpp": AUSTIN,
    "lm_eval_0.4.9.2/humaneval": LM_EVAL,
    "lm_eval_0.4.9.2/mbpp": AUSTIN,
    "lm_eval_0.4.9.2/humaneval_instruct": LM_EVAL_CHAT,
    "lm_eval_0.4.9.2/mbpp_instruct": AUSTIN_CHAT._replace(ask=functools.partial(ask_expert_block, gap=" ")),
    "lm_eval_head/humaneval": LM_EVAL,
    "lm_eval_head/mbpp": AUSTIN,
    "lm_eval_head/humaneval_instruct": LM_EVAL_CHAT,
    "lm_eval_head/mbpp_instruct": AUSTIN_CHAT,
    "dream_base_lm_eval/humaneval": DREAM_BASE._replace(rules=(PROMPT,)),  # the score that lm_eval prints
    "dream_base/humaneval": DREAM_BASE,  # the one that postprocess_code.py prints
    "dream_base_mbpp/mbpp": AUSTIN._replace(max_new=512, **DREAM),
    "fast_dllm/humaneval": DREAM_BASE._replace(max_new=256, temperature=0.0, top_p=1.0),
    "dream_instruct/humaneval_instruct": LM_EVAL_CHAT._replace(
        ask=ask_solution, rules=DREAM_RULES, max_new=768, **DREAM_CHAT
    ),
    "dream_instruct/mbpp_instruct": AUSTIN._replace(
        ask=functools.partial(ask_austin, begin=""), prefix=COMPLETED, shots=0, stops=("```",), max_new=1024,
        **DREAM_CHAT,
    ),
    "dreamcoder_base/humaneval": DREAM_BASE._replace(
        top_p=0.9, stops=("```python\n", "```"), stop_rule="each", rules=(PROMPT_LINE, DREAM_RULES[-1])
    ),
    "dreamcoder_base/mbpp": DREAM_BASE._replace(  # the Hub's mbppplus: 378 of these problems
        data=("sanitized",), ask=ask_dreamcoder, prefix=COMPLETED,
        temperature=0.1, top_p=0.9, stops=("```",), stop_rule="each",
        rules=(),
    ),
    "dreamcoder_instruct/humaneval": DREAMCODER,
    "dreamcoder_instruct/mbpp": DREAMCODER._replace(**PLUS),
    "evalplus_0.3.1_base/humaneval": EVALPLUS_PLAIN._replace(**OLD_PLAIN, **NO_32),
    "evalplus_0.3.1_base/mbpp": EVALPLUS_PLAIN._replace(**PLUS_PLAIN, **OLD_PLAIN),
    "evalplus_0.3.1_instruct/humaneval": EVALPLUS_CHAT._replace(**OLD, **NO_32),
    "evalplus_0.3.1_instruct/mbpp": EVALPLUS_CHAT._replace(**PLUS, **OLD),
    "evalplus_head_base/humaneval": EVALPLUS_PLAIN,
    "evalplus_head_base/mbpp": EVALPLUS_PLAIN._replace(**PLUS_PLAIN),
    "evalplus_head_instruct/humaneval": EVALPLUS_CHAT,
    "evalplus_head_instruct/mbpp": EVALPLUS_CHAT._replace(**PLUS),
    "bigcode/humaneval": BIGCODE,
    "bigcode/humaneval-unstripped": BIGCODE._replace(ask=ask_unchanged, rules=(PROMPT,)),
    "bigcode/mbpp": BIGCODE._replace(**BIGCODE_MBPP),
    "qwen_base/humaneval": QWEN_BASE,
    "qwen_base/mbpp": QWEN_BASE._replace(**PLUS, stops=(*EVALPLUS_BASE["mbpp"], "\n```\n", "```")),
    "qwen_instruct/humaneval": QWEN_CHAT,
    "qwen_instruct/humaneval_sanitized": QWEN_CHAT._replace(**QWEN_SANITIZED),
    "qwen_instruct/mbpp": QWEN_CHAT._replace(**PLUS),
    "qwen_instruct/mbpp_sanitized": QWEN_CHAT._replace(**PLUS, **QWEN_SANITIZED),
    "opencompass_dare/humaneval": OPENCOMPASS,
    "opencompass_dare/mbpp": OPENCOMPASS._replace(**OPENCOMPASS_MBPP),
    "simple_evals/humaneval": Protocol(
        ("humaneval",), ask_simple_evals, ends="drop", prompt_first=True,
        rules=(("the first ```python block counts", simple_evals_fence), ("no signature", without_signature)),
    ),
}  # fmt: skip


END_TOKENS = {  # at which writing stops, as what follows is not read; the other rules of ENDS read the whole canvas
    "ours": NO_ANSWER, "cut": ("<|endoftext|>",), "cut, drop": ("<|endoftext|>",), "keep": ("<|endoftext|>",),
    "cut at im_end, drop": ("<|endoftext|>", "<|im_end|>"),
}  # fmt: skip


def named(name, task):
    """ "harness/task" and its record, for the name of either and one of our tasks. Raises ValueError."""
    task = task.rstrip("+")
    for key in (name, f"{name}/{task}", f"{name}/{task}_instruct", f"{name}_{task}/{task}"):
        if key in PROTOCOLS and key.split("/")[1].startswith(task):
            return key, PROTOCOLS[key]
    known = [key for key in PROTOCOLS if key.split("/")[1].startswith(task)]
    raise ValueError(f"{name!r} is no protocol of {task}; those are {', '.join(known)}")


# ---- from a text to a program --------------------------------------------------------------------------------------


def steps(protocol):
    """[(name, function of text and question)]: all that is done to a text, in order; names say what a user sees."""
    stops = protocol.stops
    if protocol.stop_rule == "each":
        cuts = [(f"{stop!r} ends it", before(stop)) for stop in stops]
    elif protocol.stop_rule == "first":
        cuts = [(FIRST_STOP, lambda text, q: text[: first_of(text, stops)])]
    else:
        cuts = []
    return [*ENDS[protocol.ends], *cuts, *protocol.rules]


def candidate(protocol, text, q, without=()):
    """What the harness makes of a model's text: the candidate that goes to the tests. `without` leaves rules out."""
    for name, apply in steps(protocol):
        text = text if name in without else apply(text, q)
    return text


def suspects(protocol, text, q):
    """[(what a table calls it, names of rules)] of what could have spoilt a text: each rule, then all stop strings."""
    names = [name for name, _ in steps(protocol)]
    stops = [name for name in names if name.endswith("ends it")]
    found = [(name, [name]) for name in names] + [("its stop strings together", stops)]
    if FIRST_STOP in names:  # say which
        for _, apply in ENDS[protocol.ends]:
            text = apply(text, q)
        hit = min((stop for stop in protocol.stops if stop in text), key=text.find, default=None)
        found[names.index(FIRST_STOP)] = (f"{hit!r} ends it", [FIRST_STOP])
    return found


def ended(protocol, text, q):
    """Whether nothing that could follow would change the candidate, so that writing from left to right may stop."""
    if protocol.ends == "ours":
        return extract(text, q.entry, protocol.stops)[1]
    return protocol.stop_rule != "none" and first_of(text, protocol.stops) < len(text)


def post_processing(protocol):
    """What decides what becomes of a text; protocols in which it is the same score alike."""
    return protocol.ends, protocol.stop_rule, protocol.stops, protocol.rules, protocol.prompt_first


NO_SINGLE_RULE = "no single rule"


def left_over(code, q):
    """Why a program fails that no rule has spoilt, as a table of --explain says it."""
    if "```" in code:
        return "no rule: ``` stays"
    if SPECIAL.search(code) or first_of(code, NO_ANSWER) < len(code):
        return "no rule: special tokens stay"
    if not parses(code):
        return "no rule: what is no Python stays"
    functions = [n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.FunctionDef) and n.name == q.entry]
    return "no rule: the code is not there" if not any(map(has_return, functions)) else NO_SINGLE_RULE


def program(protocol, code, q):
    """What runs before the tests."""
    return q.prompt + code if protocol.prompt_first else code


def target(protocol, q):
    """The tests, as the harness puts them behind a program and a newline."""
    if q.tests:
        tests = "\n".join(q.tests[:3])
        return tests + "\n\n" if protocol.ask is ask_dreamcoder else tests
    first = "\n" if protocol.stops == BIGCODE_STOPS else ""
    return f"{first}{q.test}\ncheck({q.entry})"
