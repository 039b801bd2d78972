"""Ask, cut and score as public harnesses do. Asks a model.

    python extra/protocols.py --protocol=dream_instruct --model=dream
    python extra/protocols.py --protocol=lm_eval --task=mbpp
    python extra/protocols.py --protocol=evalplus_base --samples=mine.jsonl
    python extra/protocols.py --protocol=ours_chat --model=dream

The last asks in our way, through the model's own chat template. All else is as in benchmarks.py,
which generates and scores. Most scores that do not reproduce differ in the protocol, not in the
model. Prompts, candidates and tests equal those of a harness byte for byte, see
tests/extra/test_protocols.py. It does not run the harnesses themselves.

    prompt(protocol, problem)           text for the tokenizer
    candidate(protocol, text, problem)  the code in a model's text
    program(protocol, code, problem)    what runs before target(protocol, problem), the tests

Sources: lm_eval 4e7e0d4; Dream fac0a7f; Fast-dLLM 24cc59e; Dream-Coder 87409da with d3LLM e5bfcac;
evalplus 26d6d00; Qwen2.5-Coder d5ead97; human-eval 6d43fb9; bigcode-evaluation-harness 8fc5bae;
simple-evals ee3b031; DARE's OpenCompass 83ae8a3.
"""

import ast
import contextlib
import dataclasses
import re
import sys
import tomllib
import typing
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import benchmarks
import problems as tasks
import prompts
import runs
from problems import EXPERT, first_of
from runs import Natural


@dataclasses.dataclass(frozen=True)
class Config(benchmarks.Config):
    protocol: str = "ours"  # harness, or its record: dream_instruct, lm_eval/humaneval_instruct
    shots: typing.Annotated[int, (0, 3)] | None = None  # MBPP: solved problems; default: protocol's
    max_new: Natural = 0  # new tokens at most; default: the protocol's
    # chat: strip the end of the prompt, as transformers 4.46; 4.49 does not
    trim_prefix: bool = True


class Protocol(typing.NamedTuple):
    # the user's text: a template, see filled(), or "opencompass"
    ask: str = "{prompt}"
    answer: str = ""  # template of what follows it in a solved problem, with {code}
    data: tuple = ("humaneval",)  # keys of DATA: the problems of the harness
    system: str | None = None  # system text of the chat; None is no chat
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
    cuts: bool = True  # the text is cut at the first stop string
    # names of functions (text, question) -> text, applied in order; or templates of what is put in
    # front of the text
    rules: tuple = ()
    prompt_first: bool = False  # the prompt runs in front of the candidate
    frame: tuple = ("", "")  # text in front of the tests, and after them
    limit_s: float = 3.0  # processor seconds for all tests of a candidate
    # the limit is at least this times the time of the reference solution; 0: no such rule
    factor: float = 0.0


DATA = {  # file of the problems, and how many it holds
    "humaneval": ("HumanEval.jsonl.gz", (164,)),
    "mbpp": ("mbpp.jsonl, the full MBPP, ids 11-510", (500,)),
    "mbppplus": ("MbppPlus-v0.2.0.jsonl or v0.1.0", (378, 399)),
    "sanitized": ("sanitized-mbpp.json", (257, 427)),
}

# ---- prompts -------------------------------------------------------------------------------------


def filled(template, q):
    """A template with what is the question's: {tests} are its first three asserts."""
    return template.format(
        prompt=q.prompt,
        stripped=q.prompt.strip(),
        text=q.text,
        test="".join(q.tests[:1]),
        tests="\n".join(q.tests[:3]),
    )


def prompt(protocol, q, trim_prefix=True):
    """The text for the tokenizer, before BOS. The chat template is ChatML, as in Dream, DiffuCoder
    and Qwen.

    trim_prefix: transformers 4.46, which Dream's harness pins, strips whitespace at the end of the
    answer's prefix; 4.49, which Fast-dLLM's pins, keeps it.
    """
    solved = q.shots[: protocol.shots]
    if protocol.ask == "opencompass":
        asked = ask_opencompass(q, solved)
    else:
        asked = ""
        for shot in solved:
            asked += filled(protocol.ask, shot) + protocol.answer.format(code=shot.reference)
        asked += filled(protocol.ask, q)
    prefix = protocol.prefix.replace("{prompt}", q.prompt)
    if protocol.system is None:
        return asked + prefix
    system = f"<|im_start|>system\n{protocol.system}<|im_end|>\n"
    text = f"{system}<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n{prefix}"
    return text.rstrip() if trim_prefix and protocol.trims else text


# ---- rules: from a text to a candidate -----------------------------------------------------------

# tokens that Qwen2.5's and Dream's tokenizer remove with skip_special_tokens=True
SPECIAL = (
    r"<\|(endoftext|im_start|im_end|mask|beginoftext|object_ref_start|object_ref_end|box_start|"
    r"box_end|quad_start|quad_end|vision_start|vision_end|vision_pad|image_pad|video_pad)\|>"
)


def cut_at(stops, text):
    return text[: first_of(text, stops)]


def cut_at_fence(text, q):
    return cut_at(("```",), text)


def without_special(text):
    return re.sub(SPECIAL, "", text)


def tabs_to_spaces(text, q):
    return text.replace("\t", "    ")


def first_10000(text, q):
    return text[:10_000]


def without_colours(text, q):
    return re.sub(r"\x1B(?:[@-Z\\-_]|\[[0-?]*[ -/]*[@-~])", "", text)


def dream_fence(text, q):
    return text.split("```python\n", 1)[-1].split("```")[0]


# ---- the sanitisers of Dream and EvalPlus --------------------------------------------------------


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
    best = []
    most = 0
    tried = 0
    for first in range(len(lines)):
        run = lines[first:]
        while error := first_error(run):
            tried += len(run)
            run = run[: error - 1]
            if tried > 1_000_000:
                raise ValueError("a text in which it takes too long to find a program")
        # after a last \ they are needed
        while len(run) > least and not run[-1].strip() and not first_error(run[:-1]):
            run = run[:-1]
        length = sum(bool(line.strip()) for line in run)
        if len(run) >= least and length > most:
            best = run
            most = length
    return "\n".join(best)


def needed(code, entry, name_of, names_in, first=False):
    """The statements of a program that import, or define what the entry point needs, directly or
    not.

    name_of(node): the name that a statement defines, if any; names_in(node): those that it needs.
    The last definition of a name counts, or the first one.
    """
    imports = []
    definitions = {}
    for node in getattr(parsed(code), "body", []):
        name = name_of(node)
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.append(node)
        elif name and not (first and name in definitions):
            definitions[name] = node
    names = [entry]
    for name in names:  # which grows
        if name in definitions:
            names += names_in(definitions[name]) - {*names}
    return imports + [node for name, node in definitions.items() if name in names]


def counts(node):
    """Whether a definition is a class, or a function with a return."""
    returns = any(isinstance(child, ast.Return) for child in ast.walk(node))
    return returns or isinstance(node, ast.ClassDef)


def dream_sanitize(text, q):
    """The imports, and the functions with a return, classes and assignments that the entry point
    needs, unparsed.

    The last definition of a name counts, `a.b` uses only b, and only the first 100 lines are read.
    """
    text = text.replace("\t", "    ").replace("\r\n", "\n").replace("\r", "\n").strip() + "\n"
    code = longest_program(text.splitlines()[:100], 1)
    return "\n".join(map(ast.unparse, needed(code, q.entry, dream_name, dream_names)))


def dream_name(node):
    """The name that a statement defines according to Dream, or None."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef) and counts(node):
        return node.name
    if isinstance(node, ast.Assign):
        return getattr(node.targets[0], "id", None)  # a plain name has an id
    return None


def dream_names(node):
    """Names and attributes in a definition; of `a.b` only b."""
    names = set()
    nodes = [node]
    for parent in nodes:  # which grow
        for child in ast.iter_child_nodes(parent):
            if isinstance(child, ast.Name):
                names.add(child.id)
            elif isinstance(child, ast.Attribute):
                names.add(child.attr)
            else:
                nodes.append(child)
    return names


def evalplus_sanitize(text, q):
    """As Dream's, but the first definition of a name counts, and the source stays as it is.

    EvalPlus walks the tree of tree-sitter, to which indentation in front is no error; this finds
    the same nodes by `ast` and its offsets, which count bytes. If nothing is left, the longest
    program in the text is returned.
    """
    lines = text.split("\n")
    code = longest_program(lines, 2) or lines[0]
    data = code.lstrip().encode()
    kept = []
    for node in needed(code.lstrip(), q.entry, evalplus_name, evalplus_names, first=True):
        if getattr(node, "module", "") != "__future__":
            kept.append(evalplus_source(data, node))
    return b"\n".join(kept).decode().strip() or code


def evalplus_source(data, node):
    """The bytes of a statement in the bytes of a program. In tree-sitter comments after a block
    belong to it.
    """
    starts = [0, *(match.end() for match in re.finditer(rb"\r\n|\r|\n", data))]  # of the lines
    first = starts[node.lineno - 1] + node.col_offset
    end = starts[node.end_lineno - 1] + node.end_col_offset
    if hasattr(node, "body"):
        end = re.compile(rb"([ \t]*;)?([ \t]*#[^\n]*)?").match(data, end).end()
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
    if isinstance(node, tasks.DEFINITION):
        return node.name if counts(node) and not node.decorator_list else None
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
        if isinstance(child, ast.Constant):
            continue
        for value in vars(child).values():
            for name in value if isinstance(value, list) else [value]:
                if isinstance(name, str):
                    names.update(name.split("."))
    return names


def first_block(pattern, text, otherwise):
    found = re.search(pattern, text, re.DOTALL)
    return found[1] if found else otherwise


def simple_evals_fence(text, q):
    return first_block(r"```python\n(.*?)```", text, text)


def without_signature(text, q):
    return text[text.find(":\n    ") + 2 :]  # where there is none, all but the first character


def lm_eval_fence(text, q):
    """The first block of a text that began inside one. A leading word is the block's language."""
    return first_block(r"```(?:\w+)?\n?(.*?)\n?```", "```" + text, "")


def opencompass_fence(text, q):
    return first_block(r"```\w*\n(.*?)```", text, text)


def strip_left(text, q):
    return text.lstrip()


# tried in this order: quoted answers, those without the second quote, without any, then fences
PATTERNS = r"""
\[BEGIN\]\s*'(.*)'\s*\[DONE\]
BEGIN\s*'(.*)'\s*\[DONE\]
\[BEGIN\]\s*'(.*)'\s*DONE
BEGIN\s*'(.*)'\s*DONE
\[BEGIN\]\s*'(.*)\s*\[DONE\]
BEGIN\s*'(.*)\s*\[DONE\]
\[BEGIN\]\s*'(.*)\s*DONE
BEGIN\s*'(.*)\s*DONE
\[BEGIN\]\s*(.*)\s*\[DONE\]
BEGIN\s*(.*)\s*\[DONE\]
\[BEGIN\]\s*(.*)\s*DONE
BEGIN\s*(.*)\s*DONE
```python\s*(.*)\s*```
```\s*(.*)\s*```
```python\s*(.*)\s*$
```\s*(.*)\s*$
(.*)\s*```.*
\[BEGIN\]\s*'(.*)
\[BEGIN\](.*)
'(.*)'\s*\[DONE\]
""".split()


def opencompass_answer(text, q):
    """The match of the first pattern that fits, without fences, [DONE] and quotes."""
    for pattern in PATTERNS:
        if match := re.search(pattern, text, re.DOTALL):
            text = match[1]
            break
    text = re.split(r"'?\s*\[?DONE\]?", text.split("```")[0])[0].replace("\\_", "_").strip()
    return text.removeprefix("'").removesuffix("'")


def ask_opencompass(q, solved):
    """Each solved problem is a turn of the chat; asserts end in a space, but the very first."""
    chat = ""
    for shot in solved:
        asserts = "".join(f"{test.strip()} \n" for test in shot.tests)
        asserts = asserts if chat else asserts.replace(" \n", "\n", 1)
        chat += f"{EXPERT} {shot.text} Your code should pass these tests:\n\n {asserts}<|im_end|>\n"
        answer = f"[BEGIN]\n '{shot.reference.strip()}' \n[DONE] \n\n <|im_end|>\n"
        chat += f"<|im_start|>assistant\n{answer}<|im_start|>user\n"
    asserts = "\n".join(q.tests)
    return f"{chat}{EXPERT} {q.text} Your code should pass these tests:\n\n {asserts}  \n"


# ---- the table: protocols.toml -------------------------------------------------------------------


def read_records():
    """{"harness/task": Protocol} of the file beside this one."""
    found = {}
    for name, row in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items():
        fields = {key: tuple(x) if isinstance(x, list) else x for key, x in row.items()}
        base = found.get(fields.pop("like", ""), Protocol())
        found[name] = base._replace(**fields)
    return found


PROTOCOLS = read_records()
IM_END = ("<|im_end|>", "<|endoftext|>")

# ---- from a text to a program --------------------------------------------------------------------


def named(name, task):
    """("harness/task", record) for the name of a record or of a harness."""
    task = task.rstrip("+")
    known = [key for key in PROTOCOLS if key.split("/")[1].startswith(task)]
    for key in (name, f"{name}/{task}", f"{name}/{task}_instruct"):
        if key in known:
            return key, PROTOCOLS[key]
    names = ", ".join(["ours", "ours_chat", *known])
    raise ValueError(f"{name!r} is no protocol of {task}; there are {names}")


def candidate(protocol, text, q):
    """The code in a model's text. SyntaxError, ValueError where the harness raises."""
    text = cut_at(protocol.ends, text)
    if protocol.drops:
        text = without_special(text)
    if protocol.cuts:
        text = cut_at(protocol.stops, text)
    for rule in protocol.rules:
        text = filled(rule, q) + text if "{" in rule else globals()[rule](text, q)
    return text


def program(protocol, code, q):
    """The code that runs before the tests."""
    return q.prompt + code + q.suffix if protocol.prompt_first else code


def target(protocol, q):
    """The tests, as the harness appends them to a program and a newline."""
    before, after = protocol.frame
    return before + "\n".join(q.tests[:3]) + after


class Harness(tasks.Ours):
    """A record of PROTOCOLS, used as our own way is."""

    def __init__(self, cfg, name, record):
        super().__init__(cfg)
        self.cfg = cfg
        self.name = name
        self.record = record
        self.settings = {"shots": record.shots, "trim_prefix": cfg.trim_prefix}
        self.ends = record.ends
        self.top_k = record.top_k
        self.factor = record.factor
        self.whole = not record.prompt_first

    def ids(self, problem, model):
        chat = self.record.system is not None
        if chat and model.tokenizer.token_to_id("<|im_start|>") is None:
            raise ValueError(
                f"--protocol={self.cfg.protocol} needs a chat template, "
                "and the tokenizer has no <|im_start|>"
            )
        text = prompt(self.record, problem, self.cfg.trim_prefix)
        ids = prompts.encoding_of(model.tokenizer, text, names_are_text=not chat).ids
        ids = ids[-self.record.prompt_tokens :]
        bos = self.bos(model)
        return ids if bos is None else [bos, *ids]

    def bos(self, model):
        """The token that begins a prompt of a Dream, None if there is none."""
        if not self.record.bos or self.cfg.model != "dream":
            return None
        token = model.tokenizer.token_to_id("<|beginoftext|>")
        own = model.model.cfg.bos_id
        return own if token is None and own != model.model.cfg.eos_id else token

    def candidate(self, text, problem, cut=True):
        """The code in an answer; "" where the harness itself would raise."""
        with contextlib.suppress(SyntaxError, ValueError, RecursionError):
            return candidate(self.record, text, problem)
        return ""

    def ended(self, text, problem):
        return self.record.cuts and first_of(text, self.record.stops) < len(text)

    def program(self, code, problem):
        return program(self.record, code, problem)


class HarnessScorer(benchmarks.Scorer):
    """Runs what a harness appends: three asserts of MBPP, HumanEval's test without helpers."""

    def tests(self, problem, expected, code, timeout_s):
        # EvalPlus, which has a factor, calls the function itself.
        if problem.cases or (self.protocol.factor and not problem.text):
            return super().tests(problem, expected, code, timeout_s)
        return [target(self.protocol.record, problem)]


class OursInChat(tasks.Ours):
    """Our own way, through the model's chat template."""

    wrap = None  # the chat template

    def __init__(self, cfg):
        super().__init__(cfg)
        self.name = f"ours_chat/{self.task}"
        if not cfg.samples:
            run, _, _ = benchmarks.find_model(cfg)
            self.wrap = prompts.chat_template(run)
            if not self.wrap:
                raise ValueError(
                    "the model's folder holds no chat template (tokenizer_config.json)"
                )

    def ids(self, problem, model):
        asked = self.ask(problem)
        self.opened = re.search(r"(<think>\s*)?\Z", self.wrap(asked))[0]
        return prompts.encode_chat(model.tokenizer, self.wrap, asked)

    def ask(self, problem):
        answer = "Answer with all of it in one block of code."
        if not problem.text:
            code = problem.prompt.rstrip()
            return f"Complete this Python function. {answer}\n\n```python\n{code}\n```"
        asked = f"Write a Python function. {answer}\n\n{problem.text.strip()}"
        asserts = "\n".join(problem.tests[:3])
        return f"{asked}\nIt must pass these tests:\n\n```python\n{asserts}\n```"


# ---- the command ---------------------------------------------------------------------------------


def main(cfg):
    """The report of a protocol; see benchmarks.evaluate."""
    if cfg.protocol in ("ours", "ours_chat"):
        cfg = benchmarks.settle(cfg)
        protocol = tasks.Ours(cfg) if cfg.protocol == "ours" else OursInChat(cfg)
        return benchmarks.evaluate(cfg, tasks.read_problems(cfg), protocol)
    name, record = named(cfg.protocol, cfg.task)
    if cfg.shots is not None:
        record = record._replace(shots=cfg.shots)
    cfg = filled_in(cfg, record)
    cfg = benchmarks.settle(with_full_mbpp(cfg, record))
    problems = tasks.read_problems(cfg)
    check_data(cfg, name, record, problems)
    return benchmarks.evaluate(cfg, problems, Harness(cfg, name, record), HarnessScorer)


def filled_in(cfg, record):
    """The config with the settings of a protocol where no flag is given."""
    return dataclasses.replace(
        cfg,
        temperature=record.temperature if cfg.temperature is None else cfg.temperature,
        top_p=cfg.top_p or record.top_p,
        max_new=cfg.max_new or record.max_new,
        sandbox=dataclasses.replace(cfg.sandbox, timeout_s=cfg.sandbox.timeout_s or record.limit_s),
    )


def with_full_mbpp(cfg, record):
    """The config with the file of the full MBPP, which is downloaded, if a harness asks for it."""
    if cfg.task != "mbpp" or record.data != ("mbpp",) or cfg.tasks_file:
        return cfg
    path = Path("data/tasks/mbpp.jsonl")
    if not path.is_file():
        tasks.download(
            "mbpp", f"{tasks.GITHUB}/google-research/google-research/master/mbpp/mbpp.jsonl", path
        )
    return dataclasses.replace(cfg, tasks_file=str(path))


def check_data(cfg, name, record, problems):
    """ValueError for other problems than those of a harness."""
    kind = {"mbpp": "mbpp", "mbpp+": "mbppplus"}.get(cfg.task, "humaneval")
    if cfg.task == "mbpp" and tasks.tasks_path(cfg).read_bytes().lstrip().startswith(b"["):
        kind = "sanitized"
    wanted, _ = DATA[record.data[0]]
    given, counts = DATA[kind]
    if kind not in record.data:
        raise ValueError(f"--protocol={name} asks for {wanted}, and this is {given}")
    if len(problems) not in counts and not cfg.problems:
        raise ValueError(
            f"{tasks.tasks_path(cfg)} has {len(problems)} problems; "
            f"--protocol={name} is of {' or '.join(map(str, counts))}"
        )
    if kind != record.data[0]:
        print(f"published scores of {name} are of {wanted}, and this is {given}", file=sys.stderr)


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
