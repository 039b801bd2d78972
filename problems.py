"""HumanEval(+), its infilling and MBPP(+): their files, prompts, answers and tests. Reads the disk.

    problems = read_problems(cfg)                        # {number: Problem}, downloaded if need be
    code, _ = extract(answer, problem.entry, STOPS["humaneval"])
    expected = plus_expected(problems, ["0"], flags)     # HumanEval+ and MBPP+: known results
    tests = plus_tests(problem, expected["0"])           # of those two; for sandbox.run_tests
    row = hidden_verdict(problem, result)                # {"passed", "result", ..}

It asks no model and adds no scores up: benchmarks.py does.
Refs: HumanEval, arXiv:2107.03374; its infilling, 2207.14255; MBPP, 2108.07732; HumanEval+ and
MBPP+ by the rules of evalplus 0.3.1, 2305.01210.
"""

import ast
import builtins
import contextlib
import gzip
import http.client
import io
import json
import keyword
import random
import re
import symtable
import sys
import typing
import urllib.request
import warnings
import zlib
from pathlib import Path

import runs
import sandbox

# ---- official files ------------------------------------------------------------------------------

GITHUB = "https://raw.githubusercontent.com"
TASKS = {
    "humaneval": f"{GITHUB}/openai/human-eval/master/data/HumanEval.jsonl.gz",
    "mbpp": f"{GITHUB}/google-research/google-research/master/mbpp/sanitized-mbpp.json",
    "humaneval+": "https://github.com/evalplus/humanevalplus_release/releases/download/v0.1.10/HumanEvalPlus.jsonl.gz",
    "mbpp+": "https://github.com/evalplus/mbppplus_release/releases/download/v0.2.0/MbppPlus.jsonl.gz",
}
HOLES = f"{GITHUB}/openai/human-eval-infilling/master/data/HumanEval"
INFILLING = {  # of humaneval_infilling, by --split
    "single-line": f"{HOLES}-SingleLineInfilling.jsonl.gz",
    "multi-line": f"{HOLES}-MultiLineInfilling.jsonl.gz",
    "random-span": f"{HOLES}-RandomSpanInfilling.jsonl.gz",
    "random-span-light": f"{HOLES}-RandomSpanInfillingLight.jsonl.gz",
}
PUBLISHED = {  # beginning of the ids, version of published scores, number of its problems
    "humaneval+": ("HumanEval/", "v0.1.10", 164),
    "mbpp+": ("Mbpp/", "v0.2.0", 378),
}
SHOTS = (2, 3, 4)  # MBPP: ids of the solved problems that the paper's prompt shows


class Problem(typing.NamedTuple):
    id: str | int = ""
    entry: str = ""  # name of the function to write
    prompt: str = ""  # HumanEval's; of MBPP the docstring that EvalPlus and BigCode make
    suffix: str = ""  # the text after a hole
    text: str = ""  # MBPP's description
    tests: tuple = ()  # as the file has them: MBPP's asserts; HumanEval's check(), and its call
    shots: tuple = ()  # MBPP: solved problems of the file
    test: str = ""  # the hidden test
    public: tuple | list = ()  # asserts made of the prompt's examples
    probes: tuple | list = ()  # PROBE, if there are inputs for it
    reference: str = ""  # a program that passes
    cases: typing.Any = None  # Plus, which decides in place of `test`


def tasks_path(cfg):
    """The official file: --tasks_file, or the one in data/tasks that read_problems() downloads."""
    url = INFILLING.get(cfg.split) or TASKS.get(cfg.task, "")
    return runs.as_path(cfg.tasks_file or Path("data/tasks") / Path(url).name)


def read_problems(cfg):
    """{number: Problem} of cfg.tasks_file, or of the official file. cfg: benchmarks.py's."""
    path = tasks_path(cfg)
    if not cfg.tasks_file and not path.is_file():
        download(cfg.task, INFILLING.get(cfg.split) or TASKS[cfg.task], path)
    try:
        return parse_problems(cfg.task, path.read_bytes(), cfg.split, cfg.problems)
    except ValueError as error:
        wrong = f"{path} is not the official file of {cfg.task}: {error}; name another"
        raise ValueError(wrong) from None


def download(task, url, path):
    """Write an official file. OSError, and no file, for half a file or the page of a portal."""
    print(f"downloading {url}", file=sys.stderr)
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            data = response.read()
        parse_problems(task, data)
    except (OSError, http.client.HTTPException, ValueError) as error:
        advice = f"fetch it by hand into {path.parent}, or name it with --tasks_file"
        raise OSError(f"{url} cannot be downloaded ({error}); {advice}") from None
    path.parent.mkdir(parents=True, exist_ok=True)
    runs.write(path, data)


def parse_problems(task, data, split="test", count=0):
    """{number: Problem} of the first `count` problems, 0: all, in the bytes of an official file.

    ValueError names the line or the problem that is wrong.
    """
    try:
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"broken gzip: {error}") from None
    problems = {}
    try:
        rows = rows_of(task, data)
        shots = []
        if task == "mbpp":  # the solved problems of the prompt are not in the test split
            shots = [mbpp_problem(row) for row in rows if row["task_id"] in SHOTS]
            rows = [row for row in rows if split == "all" or 11 <= row["task_id"] <= 510]
        for row in rows[: count or None]:
            problem = MAKERS[task](row)
            key = key_of(problem.id)
            if key in problems:
                both = f"{problem.id} and {problems[key].id}"
                raise ValueError(f"{both} have one number: they would be one problem")
            others = tuple(shot for shot in shots if shot.id != problem.id)
            problems[key] = problem._replace(shots=others)
    except (LookupError, TypeError, AttributeError, SyntaxError, RecursionError) as error:
        raise ValueError(f"problem {len(problems) + 1} is of another form: {error!r}") from None
    if not problems:
        raise ValueError("it holds no problems")
    return problems


def rows_of(task, data):
    """The rows of an official file. ValueError for that of another benchmark."""
    rows = [*parse_rows(io.BytesIO(data), ["task_id"])]
    if task in PUBLISHED:
        name, version, count = PUBLISHED[task]
        for row in rows:
            if not str(row["task_id"]).startswith(name):
                raise ValueError(f"{row['task_id']} is none of its problems")
        if len(rows) != count:
            official = f"{version}, of which scores are published, has {count}"
            print(f"--task={task}: this file has {len(rows)} problems; {official}", file=sys.stderr)
    return rows


def key_of(task_id):
    """HumanEval/3, Mbpp/3 and 3 are problem "3". A hole's id has four parts, which all count."""
    parts = str(task_id).split("/")
    return parts[-1] if len(parts) < 3 else str(task_id)


def parse_rows(file, keys, either=()):
    """The objects of JSON lines, or of a list. ValueError names a line that lacks a key, or all of
    `either`.
    """
    for number, row in runs.json_rows(file):
        complete = isinstance(row, dict) and row.keys() >= {*keys}
        if either:
            texts = [row[key] for key in either if key in row] if complete else []
            complete = bool(texts) and all(isinstance(text, str) for text in texts)
        if not complete:
            needed = ", ".join(keys)
            if either:
                needed += f", and as a text {' or '.join(either)}"
            raise ValueError(f"line {number} is not a JSON object with {needed}")
        yield row


# ---- HumanEval and MBPP --------------------------------------------------------------------------


def humaneval_problem(row):
    prompt, entry = row["prompt"], row["entry_point"]
    public, arguments = docstring_examples(prompt, entry)
    # The test calls some helpers of the prompt, and a sample may redefine them.
    helpers = [node for node in ast.parse(prompt).body if getattr(node, "name", "") != entry]
    call = f"check({entry})"
    return Problem(
        row["task_id"],
        entry,
        prompt,
        tests=(row["test"], call),
        test="\n".join([*map(ast.unparse, helpers), row["test"], call]),
        public=public,
        probes=probes(row["task_id"], entry, arguments),
        reference=prompt + row.get("canonical_solution", ""),
    )


def infilling_problem(row):
    """A hole in a solution of HumanEval."""
    tests = row["test"], f"check({row['entry_point']})"
    asked = [row[key] for key in ("task_id", "entry_point", "prompt", "suffix")]
    solution = row["prompt"] + row["canonical_solution"] + row["suffix"]
    return Problem(*asked, tests=tests, test="\n".join(tests), reference=solution)


def mbpp_problem(row):
    """A problem whose asserts are all hidden: those in the prompt decide too.

    Best of n sees the inputs of the asserts, not the expected values.
    """
    text = row.get("text", row.get("prompt"))  # the sanitized MBPP has another description
    tests = tuple(row["test_list"])
    entry = called(tests)
    arguments = [literals(call, entry) for call in calls_of(tests)]
    arguments = [args for args in arguments if args is not None]
    # All asserts run in one process: a function that works once is no solution.
    imports = row.get("test_imports", row.get("test_setup_code", "").splitlines())
    return Problem(
        row["task_id"],
        entry,
        f'"""\n{text}\n{tests[0]}\n"""\n',
        text=text,
        tests=tests,
        test="\n".join([*imports, *tests]),
        probes=probes(row["task_id"], entry, arguments),
        reference=row["code"],
    )


def calls_of(tests):
    """The calls in the first three asserts."""
    nodes = [node for test in tests[:3] for node in ast.walk(ast.parse(test))]
    return [node for node in nodes if isinstance(node, ast.Call)]


def called(tests):
    """The function that MBPP's asserts call: there is no field for it. One redefines sum()."""
    names = [call.func.id for call in calls_of(tests) if isinstance(call.func, ast.Name)]
    return next((name for name in names if not hasattr(builtins, name)), names[0])


ARROW = re.compile(r"\s*(?:==>|=>|==|=|->|➞|→|#?\s*(?:should )?returns?\b)[ \t]*")


def docstring_examples(prompt, entry):
    """(asserts, arguments) of examples such as `f(1) == 2`, `f(1) -> 2`, `>>> f(1)` over `2`."""
    asserts, arguments = [], []
    for match in re.finditer(rf"\b{entry}\(", prompt):
        start = match.start()
        end, args = call_at(prompt, start, entry)
        if args is None:
            continue
        arguments.append(args)
        # The result follows an arrow, or is the next line of a session.
        arrow = ARROW.match(prompt, end)
        if not arrow and prompt[:start].endswith(">>> "):
            arrow = re.compile(r"[ \t]*\n[ \t]*").match(prompt, end)
        if not arrow:
            continue
        literal, rest = longest_literal(prompt[arrow.end() :].split("\n")[0])
        if literal and not re.match(r"\w|\s*[-+*/=]", rest):  # not 19 of 19 - 5 - 6 = 8
            asserts.append(f"assert {prompt[start:end]} == {ast.literal_eval(literal)!r}")
    return asserts, arguments


def call_at(prompt, start, entry):
    """(end of a call, its arguments): it ends at the first right parenthesis where it parses."""
    for match in re.finditer(r"\)", prompt[start : start + 500]):
        end = start + match.end()
        with contextlib.suppress(SyntaxError, ValueError):
            return end, literals(ast.parse(prompt[start:end], mode="eval").body, entry)
    return start, None


def longest_literal(line):
    """(the longest literal that begins a line, the rest of the line); ("", line) without one."""
    for length in range(len(line), 0, -1):
        literal = line[:length].strip()
        with contextlib.suppress(SyntaxError, ValueError):
            if not literal.endswith(","):  # it would be a tuple
                ast.literal_eval(literal)
                return literal, line[length:]
    return "", line


def literals(call, entry):
    """The arguments of a call of `entry`, or None if they are not plain literals."""
    with contextlib.suppress(ValueError):
        if isinstance(call.func, ast.Name) and call.func.id == entry and not call.keywords:
            return [ast.literal_eval(arg) for arg in call.args]
    return None


# ---- probes: which programs behave alike ---------------------------------------------------------

# Its value is a hash of what a function returns for some inputs; "" if it never returns.
PROBE = """import signal, zlib
def _late(*_): raise TimeoutError
def _show(value):
    if isinstance(value, (set, frozenset, dict)):
        return str(sorted(map(repr, value.items() if isinstance(value, dict) else value)))
    return repr(value)
def _behaviour():
    signal.signal(signal.SIGPROF, _late)
    seen, returned = [], False
    for args in {inputs!r}:
        signal.setitimer(signal.ITIMER_PROF, 0.3)
        try:
            seen.append(_show({entry}(*args)))
            returned = True
        except Exception as error:
            seen.append(type(error).__name__)
    signal.setitimer(signal.ITIMER_PROF, 0)
    return f"{{zlib.crc32(chr(10).join(seen).encode()):08x}}" if returned else ""
_behaviour()"""


def probes(seed, entry, arguments):
    """[PROBE] for the inputs of examples and variations of them; [] without examples."""
    if not arguments:
        return []
    rng = random.Random(str(seed))
    inputs = arguments[:4]
    inputs = inputs + [[vary(arg, rng) for arg in args] for args in inputs * 2]
    return [sandbox.Probe(PROBE.format(inputs=inputs, entry=entry))]


def vary(value, rng):
    """A similar value: a number near it, a sequence reversed, shortened, lengthened or changed."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return rng.choice([value + 1, value - 1, value + 2, -value])
    if not isinstance(value, str | list | tuple) or not value:
        return value
    i = rng.randrange(len(value))
    kinds = [value[::-1], value[:i] + value[i + 1 :], value + value[i : i + 1]]
    if not isinstance(value, str):
        kinds += [value[:i] + type(value)([vary(value[i], rng)]) + value[i + 1 :]] * 3
    return rng.choice(kinds)


# ---- what is asked -------------------------------------------------------------------------------

# No text continues its answer after one of these. [DONE] is Austin et al.'s.
NO_ANSWER = """<|endoftext|> <|file_sep|> <|im_end|> <|eot_id|> <|dlm_pad|> <|mask|>
[DONE]""".split()
STOPS = {  # strings that end a completion
    "humaneval": ("\nclass ", "\ndef ", "\n#", "\n@", "\nif ", "\nprint(", "\nassert "),
    "mbpp": ("\nclass ", "\nassert ", '\n"""', "\nprint(", "\nif "),
}
EXPERT = "You are an expert Python programmer, and here is your task:"


def ask(problem):
    """HumanEval's prompt without its last newline, which suits BPEs; MBPP as Austin et al."""
    if not problem.text:
        prompt = problem.prompt.rstrip()
        return prompt.lstrip() + "\n" if prompt.startswith('"""') else prompt  # MBPP+
    text = ""
    for shot in problem.shots:
        text += f"{ask_austin(shot)}{shot.reference.strip()}\n[DONE]\n\n"
    return text + ask_austin(problem)


def ask_austin(problem):
    """Ref: Austin et al., arXiv:2108.07732."""
    tests = "\n".join(problem.tests[:3])
    asked = f"{EXPERT} {problem.text.strip()} Your code should pass these tests:"
    return f"{asked}\n\n{tests}\n[BEGIN]\n"


# ---- from an answer to code ----------------------------------------------------------------------

# indentation, backticks or tildes, language between spaces
FENCE = re.compile(r"(?m)^([ \t]*)(```+|~~~+)([^`\n]*)$")
BODY = re.compile(r"(?:\s*\n)?(?:\t|  )[ \t]*[^\s`~]")  # " it is:" is chat
# a line that begins with two words, the first no keyword of Python, or as an item of a list
KEYWORDS = "|".join([*keyword.kwlist, *keyword.softkwlist])
PROSE = re.compile(rf"(?!({KEYWORDS})\b)[\w'’-]+[,:;]? [A-Za-z]|\d+[.)] |[-*] ")
TAG = re.compile(r"""(?<!['"`])</?(?:think|answer)>|</?(?:think|answer)>(?!['"`])""")  # not quoted
DEFINITION = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def first_of(text, stops, start=0):
    """Where the first of these strings begins at `start` or after it, else the text's length."""
    found = [text.find(stop, start) for stop in stops]
    return min((i for i in found if i >= 0), default=len(text))


def without_future(code):
    """An import from the future is an error after a prompt."""
    return code.replace("from __future__ import annotations\n", "")


def extract(text, entry, stops, before=""):
    """(code, ended) of an answer: the code without thinking, fences, chat and text after it.

    A text that begins indented continues the function of the prompt, up to the first stop string or
    prose. A text that defines `entry` before any fence is code up to the first stop string, fence
    or prose after the definition; the prompt may have opened a block. In other texts the code is a
    fenced block: the first that defines `entry`, else the first body, else the first; see joined().
    A definition without a body is a quotation. ended: no further text could change the code.
    """
    written = text.replace("\r\n", "\n")
    text = written[: first_of(written, NO_ANSWER[:-1])]  # thinking may quote [DONE]
    code, ended = of_answer(text, code_of, entry, stops, before)
    return code, ended or len(text) < len(written)


def of_answer(text, code_of, *rest):
    """code_of(answer, *rest), a pair of the code and another value, for the answer in a text.

    That is what follows the last </think>, without a <think> that does not end; in it, what stands
    in <answer>. Tags in the code are text, so the first reading counts that has none elsewhere.
    """
    starts = [tag.end() for tag in TAG.finditer(text) if tag[0] == "</think>"]
    for start in [0, *starts][-20:]:  # a text may repeat a tag for ever; no code holds so many
        behind = text[start:]
        done = re.sub(r"(?ms)^[ \t]*<think>(?!.*</think>).*", "", behind)
        widest = re.sub(r"(?s)\A.*?<answer>|</answer>(?!.*</answer>).*", "", done)
        last = re.sub(r"(?s)\A.*<answer>|</answer>.*", "", done)
        for answer in dict.fromkeys((behind, done, widest, last)):
            found = code_of(answer, *rest)
            tags = TAG.findall(found[0])
            ends = TAG.findall(behind).count("</think>")
            if sorted(TAG.findall(answer)) == sorted(tags) and ends == tags.count("</think>"):
                if not tags or parsed(found[0]) or parsed(f"def f():\n{found[0]}"):
                    return found
    return found


def code_of(text, entry, stops, before):
    """(code, ended) of an answer without thinking, see extract()."""
    whole = re.sub(r"\A\s*\[BEGIN\]", "", text)
    text = whole[: first_of(whole, NO_ANSWER)]
    ended = len(text) < len(whole)
    fences = list(FENCE.finditer(text))
    first = fences[0].start() if fences else len(text)
    defines = re.compile(rf"(?m)^(async )?def {re.escape(entry)}\b")
    # Helpers may come first, so stop strings count only after the definition of `entry`.
    starts = [match.end() for match in defines.finditer(text, 0, first)]
    head = ""
    if BODY.match(text):  # the prompt is indented by spaces
        head = "def f():\n"
        text = head + re.sub(r"(?m)^\t+", lambda tabs: "    " * len(tabs[0]), text)
        starts = [4]
    if not fences:
        starts = starts or [0]
    bare = []
    for start in starts[:5]:
        code = text[: first_of(text, (*stops, "\n```", "\n~~~"), start)]
        code = re.split(r"(?m)(?<=[^\s`])```[ \t]*$", code)[0]
        kept = without_prose(code, start)
        cut = len(code) < len(text) or not code.endswith(kept)
        if head or solves(kept, entry):
            return kept.removeprefix(head), ended or cut
        bare.append((kept, ended or (cut and not start)))
    blocks = fenced(text)
    solving = [block for block in blocks if solves(block[0], entry)]
    if solving or (blocks and not starts):
        naming = [block for block in blocks if defines.search(block[0])]
        bodies = [block for block in blocks if BODY.match(block[0])]
        chosen = [*solving, *naming, *bodies, *blocks][0]
        code, lacks = joined(chosen[0], [block[0] for block in blocks], before)
        return code, (chosen[1] or ended) and bool(solving) and not lacks
    return bare[0]


def fenced(text):
    """[(code, whether it is closed)] of the fenced blocks, without the indentation of their fences.

    A block ends at the first fence of at least its length, without a language, where the code
    parses.
    """
    fences = list(FENCE.finditer(text))
    blocks, behind = [], 0
    for i, fence in enumerate(fences):
        if fence.start() < behind:  # it is within a block
            continue
        indent = re.compile(f"(?m)^{fence[1]}")
        ends = [f for f in fences[i + 1 :] if f[2].startswith(fence[2]) and not f[3].strip()]
        codes = [indent.sub("", text[fence.end() + 1 : end.start()]) for end in ends[:100]]
        if codes:
            last = next((k for k, code in enumerate(codes) if parsed(code)), 0)
            behind = ends[last].end()
            blocks.append((codes[last], True))
        else:
            behind = len(text)
            blocks.append((indent.sub("", text[fence.end() + 1 :]), False))
    return blocks


def parsed(code):
    """The tree of a text, None if it is not Python, or so long that it might crash the parser."""
    with contextlib.suppress(SyntaxError, ValueError, MemoryError, RecursionError):
        with warnings.catch_warnings(action="ignore"):
            if len(code) <= 20_000:
                return ast.parse(code)
    return None


def solves(code, entry):
    """Whether a program defines `entry`, and more than its head with a docstring or `pass`."""
    for node in getattr(parsed(code), "body", []):
        if isinstance(node, DEFINITION) and node.name == entry:
            last = ast.unparse(node.body[-1])
            return not re.match(r"pass\b|\.\.\.|raise NotImplementedError|['\"]", last)
        if ast.unparse(node).startswith(f"{entry} = "):
            return True
    return False


def without_prose(code, start):
    """The code without prose before and after the function whose name ends at `start`."""
    lines = code.split("\n")
    first = code[:start].count("\n")
    while first and not parsed("\n".join([*lines[:first], "def f(): pass"])):  # it may be decorated
        lines = lines[1:]
        first -= 1
    for i in range(first + 1, len(lines)):
        if PROSE.match(lines[i]) and not parsed(lines[i]) and parsed("\n".join(lines[:i])):
            return "\n".join(lines[:i])
    return "\n".join(lines)


def names_of(code):
    """(names that a program takes from its module or the builtins, those that it binds there)."""
    used = set()
    bound = set()
    tables = []
    with contextlib.suppress(SyntaxError):  # such as `return` outside of a function
        tables.append(symtable.symtable(code if parsed(code) else "", "", "exec"))
    for table in tables:
        tables += table.get_children()
        for symbol in filter(symtable.Symbol.is_global, table.get_symbols()):
            if symbol.is_referenced():
                used.add(symbol.get_name())
            if symbol.is_assigned() or symbol.is_imported():
                bound.add(symbol.get_name())
    return used, bound


def joined(code, blocks, before=""):
    """(code, names that it lacks): the code behind other blocks that define names which it lacks.

    The body of a function stands in front of them.
    """
    whole = code
    added = []
    others = [block for block in blocks if block != code and parsed(block)]
    while True:  # what is added may lack names, too
        used, bound = names_of(before + whole)
        lacks = used - bound - {*dir(builtins)}
        found = [other for other in others if names_of(other)[1] & lacks or "import *" in other]
        if {*found} <= {*added}:
            return whole, lacks
        added = [other for other in others if other in added + found]
        whole = "\n".join([*added, code])
        if BODY.match(code):
            whole = "\n".join([code, *added])


def guarded(code, before=""):
    """A program that goes on where calls, asserts or raise outside of definitions fail.

    So do an answer's own tests, and its function may be right.
    """
    tree = parsed(before + code)
    guard = "try:\n    pass\nexcept (Exception, SystemExit):\n    pass"
    guards = 0
    for i, node in enumerate(getattr(tree, "body", [])):
        fails = any(
            isinstance(child, ast.Call | ast.Assert | ast.Raise) for child in ast.walk(node)
        )
        if node.lineno > before.count("\n") and fails and not isinstance(node, DEFINITION):
            guards += 1
            tree.body[i] = ast.parse(guard).body[0]
            tree.body[i].body = [node]
    with contextlib.suppress(ValueError, RecursionError):  # numbers of 5,000 digits
        if guards:
            return ast.unparse(tree)
    return before + code


class Ours:
    """Our way to ask for programs, which loses the fewest right answers.

    extra/protocols.py has the ways of public harnesses, with the same names.
    """

    settings = {}  # more settings that results depend on  # noqa: RUF012
    ends = NO_ANSWER  # tokens of these names end a text
    top_k = 0  # likeliest tokens to sample from; 0: all
    opened = ""  # what the prompt holds of the answer
    factor = 4.0  # a sample may take at least this times the time of the reference solution
    whole = False  # what is kept of an answer is a whole program
    skips = False  # samples of other problems are skipped

    def __init__(self, cfg):
        self.task = cfg.task.removesuffix("+")
        self.name = f"ours/{self.task.removeprefix('humaneval_')}"
        self.files = [tasks_path(cfg)]

    def ids(self, problem, model):
        """The token ids of a prompt. Names of special tokens are plain text."""
        model.tokenizer.encode_special_tokens = True
        if self.task == "humaneval_infilling":
            before = model.tokenizer.encode(problem.prompt, add_special_tokens=False).ids
            behind = model.tokenizer.encode(problem.suffix, add_special_tokens=False).ids
            return model.hole(before, behind)
        text = ask(problem)
        ids = model.tokenizer.encode(text, add_special_tokens=False).ids
        line = model.tokenizer.encode(text + "\n", add_special_tokens=False).ids
        # A BPE that joins a line break to what is before it has never seen the end of a line
        # without it.
        return line if len(line) <= len(ids) and not text[-1].isspace() else ids

    def candidate(self, text, problem, cut=True):
        """The code in an answer. cut: the answer may go on after it, so that stop strings count."""
        if self.task == "humaneval_infilling":
            return text[: first_of(text, NO_ANSWER)]
        stops = STOPS[self.task] if cut else ()
        code, _ = extract(text, problem.entry, stops, self.before(problem))
        return without_future(code)

    def ended(self, text, problem):
        """Whether generation from left to right may stop: the candidate can no longer change."""
        if self.task == "humaneval_infilling":
            return first_of(text, NO_ANSWER) < len(text)
        return extract(text, problem.entry, STOPS[self.task], self.before(problem))[1]

    def before(self, problem):
        """The text in front of a candidate in its program."""
        return "" if self.task == "mbpp" else problem.prompt

    def program(self, code, problem):
        """The program that runs before the tests."""
        return guarded(code + problem.suffix, self.before(problem))


# ---- HumanEval+ and MBPP+, by the rules of EvalPlus ----------------------------------------------

# MBPP+: numbers of the problems whose arguments hold tuples, sets or complex numbers, unlike JSON
TUPLES = """2 116 132 143 222 261 273 394 399 421 424 429 470 560 579 596 616 630 726 740 744
809""".split()
LISTS_OF_TUPLES = "63 64 70 94 120 237 272 299 400 409 417 438 473 614 780".split()
FIRST_LIST_OF_TUPLES = "75 413 444 753".split()
FIRST_TUPLE = "250 307 405 446 617 720 763 808".split()
TUPLES_OF_TUPLES = "259 401 445".split()
NESTED_TUPLES = "580 615 791".split()


def mbpp_arguments(number, args):
    """The arguments of a call of MBPP+, which its file has without tuples, sets and complex."""
    if number in TUPLES:
        return [*map(tuple, args)]
    if number in LISTS_OF_TUPLES:
        return [[*map(tuple, items)] for items in args]
    if number in FIRST_LIST_OF_TUPLES:
        return [[*map(tuple, args[0])], args[1]]
    if number in FIRST_TUPLE:
        return [tuple(args[0]), *args[1:]]
    if number in TUPLES_OF_TUPLES:
        return [tuple(map(tuple, items)) for items in args]
    if number in NESTED_TUPLES:
        return [nested_tuples(items) for items in args]
    if number in ("106", "750"):
        return [args[0], tuple(args[1])]
    if number == "115":
        return [[set(item) if isinstance(item, list) and item else {} for item in args[0]]]
    if number == "124":
        return [float(args[0]), complex(args[1])]
    if number == "252":
        return [complex(args[0])]
    if number == "278":
        return [tuple(tuple(item) if isinstance(item, list) else item for item in args[0])]
    if number == "722":
        return [{key: tuple(value) for key, value in args[0].items()}, *args[1:]]
    return args


def nested_tuples(value):
    return tuple(map(nested_tuples, value)) if isinstance(value, list) else value


class Plus(typing.NamedTuple):
    """The inputs of a problem of EvalPlus, and the absolute tolerance of results."""

    base: list
    plus: list
    atol: float


class Expected(typing.NamedTuple):
    """What the reference solution gives for the base or the plus inputs."""

    values: list  # results
    limits: list  # processor seconds of a sample for every call
    most: int  # bytes that a sample may send back


def plus_problem(row):
    task_id, prompt, entry = row["task_id"], row["prompt"], row["entry_point"]
    base, plus = row["base_input"], row["plus_input"]
    if task_id.startswith("Mbpp/"):
        base = [mbpp_arguments(key_of(task_id), args) for args in base]
        plus = [mbpp_arguments(key_of(task_id), args) for args in plus]
        public, arguments = [], base[:3]
    else:
        public, arguments = docstring_examples(prompt, entry)
    return Problem(
        task_id,
        entry,
        prompt,
        public=public,
        probes=probes(task_id, entry, arguments),
        reference=prompt + row["canonical_solution"],
        cases=Plus([*base], [*plus], float(row["atol"])),
    )


MAKERS = {
    "humaneval": humaneval_problem,
    "humaneval_infilling": infilling_problem,
    "mbpp": mbpp_problem,
    "humaneval+": plus_problem,
    "mbpp+": plus_problem,
}
EVALPLUS = (Path(__file__).parent / "jail/evalplus.py").read_text()


def plus_tests(problem, expected):
    """The two tests of a sample: results for the base and the plus inputs are the reference's.

    All calls of one share a minute, as in EvalPlus.
    """
    mbpp = problem.id.startswith("Mbpp/")
    check = f"{EVALPLUS}\nentry, mbpp, atol = {problem.entry!r}, {mbpp}, {problem.cases.atol!r}\n"
    tests = []
    for inputs, known in zip(problem.cases[:2], expected, strict=True):
        total = min(60.0, sum(known.limits)) + 1
        rest = known.limits, total, known.most, check, known.values
        tests.append(sandbox.Calls(problem.entry, inputs, *rest))
    return tests


def plus_expected(problems, keys, flags):
    """{key: two Expected, or why there are none}, by running the reference solutions.

    flags: options of the sandbox, with "timeout_s" of a sample.
    """
    print(f"running {len(keys)} reference solutions", file=sys.stderr)
    programs, tests = [], []
    for key in keys:
        problem = problems[key]
        programs.append(problem.reference)
        inputs = problem.cases[:2]
        tests.append([sandbox.Calls(problem.entry, x, [60.0] * len(x), 120.0) for x in inputs])
    limits = {"program_s": 600.0, "memory_mb": 4096, "main_block": False}
    results = sandbox.run_tests(programs, tests, **flags | limits)
    found = {}
    for key, result in zip(keys, results, strict=True):
        wrong = f"{' and '.join(result.verdicts)} on the base and the plus inputs"
        found[key] = result.error or f"the file's own solution does not run here: {wrong}"
        if result.rate == 1:
            found[key] = [expected_of(calls, flags["timeout_s"]) for calls in result.values]
    return found


def expected_of(calls, timeout_s):
    """The Expected of what the reference solution gave for a set of inputs."""
    values = [value for value, _ in calls]
    limits = [max(timeout_s, 4 * seconds) for _, seconds in calls]
    size = len(json.dumps(sandbox.values.wire(values, sandbox.values.opaque)))
    return Expected(values, limits, 65_536 + 4 * size + 100 * len(calls))


# ---- what decides --------------------------------------------------------------------------------


def hidden_verdict(problem, result):
    """{"passed", "result"} by the results of the hidden tests, which come first.

    Of HumanEval+ and MBPP+ also the fields of EvalPlus' file, and the first input that is wrong.
    """
    if not result.verdicts:
        return {"passed": False, "result": "does not fit"}
    row = {}
    verdicts = result.verdicts[:1]
    if problem.cases:
        verdicts = result.verdicts[:2]
        for name, verdict, number in zip(("base", "plus"), verdicts, result.values, strict=False):
            row[f"{name}_status"] = verdict if verdict in ("pass", "timeout") else "fail"
            if verdict != "pass":
                row.setdefault("wrong", [name, number])
        verdicts = [row["base_status"], row["plus_status"]]
    failed = [verdict for verdict in verdicts if verdict != "pass"]
    return {"passed": not failed, "result": failed[0] if failed else "passed"} | row
