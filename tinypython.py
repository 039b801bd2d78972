"""Write TinyPython: small Python functions with docstrings, examples and hidden tests, drawn from tinypython.txt.

    python tinypython.py                                      # 100,000 functions and four splits: a minute
    python data_prep.py python --roots data/tinypython/train.jsonl --column=content --vocab_size=1024 --seq_len=512
    python data_prep.py pairs data/tinypython/holes.jsonl --vocab_size=1024 --seq_len=256    # or pairs.jsonl
    python benchmarks.py --task=humaneval --tasks_file=data/tinypython/composed.jsonl

What TinyStories is to English, this is to code: small enough to be learnt on a CPU, and right or wrong when run. Level
1 is one operation, 2 a composition of two or three, 3 control flow with state, 4 functions that call one another, and
classes. A docstring decides its function: no sentence describes two.

Splits hold what train lacks: constants (operations that occur together, but never with these constants), composed
(operations that never occur together), phrased (a phrasing that never occurs), level4 (constants or composed, of
level 4). A task is a problem in HumanEval's form, with "test_cases" for coupled_grpo.py: at least five tests, which no
constant answer passes, and none of the first ten mutants of the solution.

Writes --out: train.jsonl ("content"), pairs.jsonl, holes.jsonl, <split>.jsonl and, last of all, meta.json.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import random
import re
import textwrap
import typing
import warnings
import zlib
from pathlib import Path

import runs

Split = typing.Literal["constants", "composed", "phrased", "level4"]
Format = typing.Literal["rows", "pairs", "holes"]
SPLITS, FORMATS = typing.get_args(Split), typing.get_args(Format)


@dataclasses.dataclass(frozen=True)
class Config:
    out: str = "data/tinypython"  # folder to write
    n: runs.Count = 100_000  # functions to train on
    tasks: runs.Count = 1000  # tasks of each split
    levels: tuple[typing.Literal[1, 2, 3, 4], ...] = (1, 2, 3, 4)  # levels to train on
    splits: tuple[Split, ...] = SPLITS  # splits to write
    formats: tuple[Format, ...] = FORMATS  # train is written as rows for PythonCoder, pairs and holes for Dream
    seed: runs.Natural = 0  # random seed of all that is drawn


# ---- the tables of tinypython.txt ----------------------------------------------------------------------------------

UNSEEN = "\u00a4"  # ends a phrasing that train never has, until the sentence is complete
CONSTANT = re.compile(r"\b[CDHJKTZ]\b|ELSE")
OPERATION = re.compile(r"\b(?:[A-Z]+|[mfg])\d?\b")  # among the slots of a template; the others are arguments
SLOT, BRACES = re.compile(r"\b[A-Z]+\d?\b"), re.compile(r"\b([A-Z]+\d?)\{([^{}]*)\}")
GENERATOR = re.compile(r"\b(sum|join|sorted)\(\[(.*? for .*?)\]\)")  # where a list is not needed
Entry = collections.namedtuple("Entry", "names code constants phrasings")


def table(name, codes=1):
    """{first name: Entry} of a table with so many fields of code.

    An Entry has its names, fields of code, letters of the constants in them, and groups of phrasings; a phrasing is a
    list of texts that mean the same.
    """
    found = {}
    for text in re.split(r"\n(?=\w)", TABLES[name]):
        names, *fields = re.sub(r"\s*\n\s+", " ", text).split(" | ")
        code = [" OR ".join(map(layout, field.split(" OR "))) for field in fields[:codes]]
        phrasings = [[expand(phrasing) for phrasing in field.split(" / ")] for field in fields[codes:]]
        constants = sorted({*CONSTANT.findall(" ".join(code))})
        found[names.split(", ")[0]] = Entry(names.split(", "), code, constants, phrasings)
    return found


def layout(code):
    """Code of a table as people write it: `if a: b` in two lines, indented by four, methods apart."""
    code = re.sub(r"(?m)^( *)((?:if|elif|else|for|while)\b.*?): (?=\w)", r"\1\2:\n \1", code.replace(r"\n", "\n"))
    return re.sub(r"(?m)^def ", "\ndef ", re.sub(r"(?m)^ +", lambda spaces: spaces[0] * 4, code))


def expand(phrasing):
    """All texts of a phrasing with (a|b) in it."""
    parts = [part.split("|") for part in re.split(r"\(([^()]*\|[^()]*)\)", phrasing)]
    return ["".join(chosen) for chosen in itertools.product(*parts)]


TABLES = dict(re.findall(r"(?ms)^\[(.*?)\][^\n]*\n(.*?)\n(?=\n\[|\Z)", Path(__file__).with_suffix(".txt").read_text()))
LISTS = {name: re.findall(r"'.*?'|\S+", words) for name, words in re.findall("(.*) [|] (.*)", TABLES["lists"])}
KINDS = {kind: fields for kind, *fields in (line.split(" | ") for line in TABLES["kinds"].split("\n"))}
MAPS = {element: table(f"{element} maps") for element in ("int", "str")}
PREDICATES = {element: table(f"{element} predicates", 2) for element in ("int", "str", "char")}
FOLDS, PAIRS = table("folds", 2), table("pairs")
LEVELS = {level: table(f"level {level}", 2) for level in (1, 2, 3, 4)}
SHARES = {1: 2, 2: 4, 3: 3, 4: 1}  # of the levels in train
DRAWN = {  # the templates of a level; the more operations one has, the more often it is drawn
    level: [key for key in templates for _ in range(1 + 2 * len(OPERATION.findall(templates[key].code[0])))]
    for level, templates in LEVELS.items()
}
ALIKE = {key: keys for name, keys in LISTS.items() if name.startswith("alike") for key in keys}
SWAPS = dict(zip(LISTS["swaps"][::2], LISTS["swaps"][1::2], strict=True))


# ---- a function ----------------------------------------------------------------------------------------------------


def plural(verb):
    """The plural of a verb phrase: "starts with C" gives "start with C", "is a vowel" gives "are vowels"."""
    first, rest = verb.split(" ", 1)
    if first == "is":
        rest = re.sub(r"^an? ([\w-]+ (?:letter|number)|\w+)", r"\1s", rest)
    rest = re.sub(r"\bits\b", "their", re.sub(r"\bin it\b", "in them", rest))
    return {"is": "are", "has": "have", "does": "do"}.get(first, first.removesuffix("s")) + " " + rest


def applied(code, item):
    """Code with an expression in place of x, in brackets where it needs them."""
    inner = item if re.fullmatch(r"[\w.]+(\(.*\)|\[.*\])*", item) else f"({item})"
    return re.sub(r"\(x\)|\bx\b", lambda found: f"({item})" if found[0] == "(x)" else inner, code)


class Function:
    """A function of a level, drawn from the tables. With `new` it may have phrasings that train never has.

    KeyError or IndexError where an operation lacks what the template needs.
    """

    def __init__(self, rng, level, new=False, key="", element=""):
        self.rng, self.level, self.new, self.element = rng, level, new, element  # element: what operations work on
        self.operations, self.constants, self.arguments = [], [], []  # arguments are pairs of a name and a kind
        self.names = {}  # {slot: for each operation in it the names that it may have}
        self.values = {}  # {slot: its text, or a function from the text in its braces}
        self.helper, self.is_new = "", False  # source of the helper; is there a phrasing that train never has?
        key = key or rng.choice(DRAWN[level])
        template, (slots, bodies), say = self.draw({key: LEVELS[level][key]})
        slots, _, self.methods = slots.partition(":")
        for slot in slots.split():
            self.put(*re.fullmatch(r"(\D+)(\d?)", slot).groups())
        known = {*self.values, "A", "B", "SELF"}
        self.bodies = [body for body in bodies.split(" OR ") if known.issuperset(SLOT.findall(body))]
        said = self.fill(say(0))
        ambiguous = self.element == "char" and level == 1 and "F" not in self.names and " list" not in said
        if ambiguous or not self.bodies:
            raise KeyError("no body, or a sentence that may mean a list of characters or a string")
        self.is_new = self.is_new or UNSEEN in said
        nouns = "sum|total|mean|average|maximum|minimum|product|number|total length"
        said = re.sub(rf"the ({nouns}) of them\b", r"their \1", said.replace(UNSEEN, ""))
        self.template = re.sub("(number|count) of the ", r"\1 of ", said)
        self.what = (*self.operations, *self.constants, *(kind for _, kind in self.arguments))

        name = rng.choice(template.names)
        name = re.sub("[A-Z]+(?![a-z])", lambda slot: rng.choice(self.names[slot[0]].pop(0)), name)
        says_what = self.methods or element or rng.random() < 0.9
        self.name = name if says_what else rng.choice(LISTS["silent"])
        if self.name == self.values.get("HELPER"):
            self.name += "_all"
        self.given = {"SELF": self.name} | dict(zip("AB", (name for name, _ in self.arguments), strict=False))
        said = self.named(self.template)
        self.sentence = said[0].upper() + said[1:]

    @functools.cached_property
    def solution(self):
        """The body, in one of the styles that there are for its operations."""
        body = GENERATOR.sub(r"\1(\2)", self.fill(self.rng.choice(self.bodies)))
        variable = self.rng.choice([name for name in LISTS["variables"] if name not in self.given.values()])
        return textwrap.indent(self.named(re.sub(r"\bx\b", variable, body)), "    ") + "\n"

    def prompt(self, example=""):
        """The source up to the end of the docstring."""
        said = self.sentence if len(self.sentence) < 100 else textwrap.fill(self.sentence, 100, break_on_hyphens=False)
        arguments = ", ".join(name for name, _ in self.arguments)
        line = f"class {self.name}:\n" if self.methods else f"def {self.name}({arguments}):\n"
        return self.helper + line + textwrap.indent(f'"""{said}{example}"""\n', "    ")

    def named(self, text):
        """The text with the names of its arguments. KeyError if there are none."""
        return re.sub(r"\b(?:A|B|SELF)\b", lambda slot: self.given[slot[0]], text)

    def fill(self, text):
        """The text with its slots filled, from the inside out. KeyError where one has nothing."""
        while BRACES.search(text):
            text = BRACES.sub(lambda slot: self.values[slot[1]](slot[2]), text)
        return SLOT.sub(lambda slot: self.values.get(slot[0], slot[0]), text)

    def draw(self, entries):
        """(entry, its code with constants, say) for one of the entries; say(i, item) phrases its group i."""
        rng, taken = self.rng, {*self.operations, *(key for name in self.operations for key in ALIKE.get(name, ()))}
        key = rng.choice([key for key in entries if key not in taken])
        entry, drawn = entries[key], {}
        kinds = (*(kind for _, kind in self.arguments), self.element, "")
        for letter in entry.constants:  # those of a kind of argument or element, before those of any
            names = (f"constant {letter} {kind}".strip() for kind in kinds)
            drawn[letter] = rng.choice(next(LISTS[name] for name in names if name in LISTS))
        self.operations.append(key)
        self.constants += drawn.values()
        if "Z" in drawn:
            drawn["ELSE"] = rng.choice((f", or {drawn['Z']} if there are none", f" ({drawn['Z']} if there are none)"))

        def fill(text):
            return CONSTANT.sub(lambda found: drawn[found[0]], text) if drawn else text

        def say(i, item="~"):
            group = entry.phrasings[i]
            new = self.new and len(group) > 1 and rng.random() < 0.6
            text = rng.choice(rng.choice(group[-1:] if new else group[:-1] or group))
            return fill(text).replace("~", item) + (UNSEEN if new else "")

        return entry, [fill(code) for code in entry.code], say

    def put(self, kind, i):
        """Fill a slot of a template, the i-th of its kind: with an operation, a helper or an argument."""
        values, partial = self.values, functools.partial
        if kind == "P":
            entry, (code, opposite), say = self.draw(PREDICATES[self.element])
            verb = say(0)
            values |= {f"P{i}": partial(applied, code), f"U{i}": partial(applied, opposite)}
            values |= {f"Q{i}": verb, f"R{i}": plural(verb)}
            short = len(entry.phrasings) > 1 and self.rng.random() < 0.5
            values["MANY"] = say(1, values["N"]) if short else f"{values['N']} that {plural(verb)}"
        elif kind in "Mm":
            maps = MAPS[self.element]
            entry, (code,), say = self.draw({k: maps[k] for k in maps if kind == "M" or k not in LISTS["numeric"]})
            values |= {f"M{i}": partial(applied, code), f"V{i}": partial(say, 0), f"W{i}": partial(say, 1)}
            if noun := re.fullmatch(f"(the (?:(?! of ).)*) of ~({UNSEEN}?)", say(1)):
                values["X"] = lambda items: f"{noun[1]}s of {items}{noun[2]}"
            kind, self.element = "M", "int" if entry.names[0] in LISTS["numeric"] else self.element
        elif kind == "F":
            folds = [key for key in LISTS[f"{self.element} folds"] if key != "count" or not {"M", "HELPER"} & {*values}]
            entry, (code, loop), say = self.draw({key: FOLDS[key] for key in folds})
            whole = "LISTED" if "L[" in code else "I"  # what is sliced must be a list
            if "L" in code:
                values["F"] = lambda items: re.sub(r"\bL\b", whole if items == "I" else items, code)
            if code.count("L") == 1:
                values["E"] = values["F"]
            if loop != "-":
                start, update = loop.split("; ")
                values |= {"START": start, "VALUE": start.split(" ")[0]}
                values |= {"UPDATE": lambda item: update.replace("ITEM", item)}
            values |= {"G": partial(say, 0), "Y": partial(say, 1)}
        elif kind == "KEY":
            maps = MAPS[self.element]
            entry, (code,), _ = self.draw({key: maps[key] for key in LISTS[f"{self.element} keys"]})
            noun = entry.phrasings[1][0][0].removeprefix("the ").removesuffix(" of ~")
            values |= {"KEY": partial(applied, code), "BY": noun}
        elif kind == "BOTH":
            entry, (values["BOTH"],), _ = self.draw(PAIRS)
            values["NAME"], kind = entry.names[0], "NAME"
        elif kind in "fg":
            helper = Function(self.rng, 1, self.new, "is_P" if kind == "f" else "M", self.element)
            self.helper, self.is_new = f"{helper.prompt()}{helper.solution}\n\n", helper.is_new
            self.operations += helper.operations
            self.constants += helper.constants
            values["HELPER"], self.element = helper.name, helper.element
            kind, entry = "HELPER", Entry([helper.name], [], [], [])
        else:
            return self.argue(kind)
        self.names.setdefault(kind, []).append(entry.names)

    def argue(self, kind):
        """Add an argument of a kind, or of a choice of kinds, with the nouns for its elements."""
        kind = self.element if kind == "item" and self.element else self.rng.choice(LISTS.get(kind, [kind]))
        names, element, nouns, iterable, listed = KINDS[kind]
        name = self.rng.choice([name for name in names.split() if (name, kind) not in self.arguments])
        if not self.arguments:
            many, one = self.rng.choice(nouns.split(" OR ")).split(" / ")
            self.values |= {"N": many, "S": one.replace("S", name.removesuffix("s")), "I": iterable, "LISTED": listed}
            self.element = element
        self.arguments.append((name, kind))


# ---- examples, tests and mutants -----------------------------------------------------------------------------------


def value(kind, f, rng, edge):
    """A value for an argument; edge 0 is empty or zero, 1 has one element, 2 is negative."""
    numbers = [int(c) for c in f.constants if c.isdigit()] or [3]
    letters = [c[1] for c in f.constants if c[0] == "'" and c[1].isalpha()] or ["e"]

    def number():
        k = rng.choice(numbers)
        near = (k - 1, k, k + 1, -k, k * rng.randint(-2, 5), 10 * rng.randint(-2, 4) + k % 10)
        drawn = rng.choice(near) if rng.random() < 0.4 else rng.randint(-15, 40)
        return -abs(drawn) - 1 if edge == 2 else drawn

    def word():
        text, letter = rng.choice(LISTS["words"]), rng.choice(letters)
        text = rng.choice((text, text, text, letter + text, text + letter, text + text[::-1]))
        cased = {*LISTS["cased"]} & {*f.operations} and rng.random() < 0.5
        return rng.choice((text, text.upper(), text.capitalize())) if cased else text

    size = edge if edge < 2 else rng.randint(2, 6)
    if kind in ("int", "str"):
        return (number() if edge else 0) if kind == "int" else (word() if edge else "")
    if kind in ("nat", "count"):
        return edge if edge < 2 else rng.randint(2, 12)
    if kind in ("pos", "digits"):
        large = rng.choice((rng.randint(2, 300), rng.choice(numbers) ** 2 * rng.randint(1, 9)))
        return max(kind == "pos", edge if edge < 2 else large)
    if kind in ("values", "keys", "dict"):
        return {word(): number() for _ in range(size)}
    if kind == "rows":
        return [[number() for _ in range(rng.randint(1, 3))] for _ in range(size // 2 + size % 2)]
    items = [number() if kind in ("ints", "scores") else word() for _ in range(size)]
    items[-1:] = items[:1] if size > 2 and rng.random() < 0.4 else items[-1:]
    if kind == "chars":
        items = [rng.choice((item, item.capitalize(), item + item[-1:], str(rng.randint(0, 99)))) for item in items]
    return " ".join(items) if kind in ("text", "chars") else items


def call(f, rng, edge=3):
    """The source of a call with drawn values; for a class an object, and on the next line calls of its methods."""
    made = f"{f.name}({', '.join(repr(value(kind, f, rng, edge)) for _, kind in f.arguments)})"
    if not f.methods:
        return made
    steps = [rng.choice(f.methods.split(",")).split() for _ in range(rng.randint(2, 4))]
    steps = [f"c.{method}({', '.join(repr(value(kind, f, rng, 3)) for kind in kinds)})" for method, *kinds in steps]
    return f"c = {made}\n[{', '.join(steps)}]"


def load(source, **scope):
    """The names that a program defines."""
    with warnings.catch_warnings(action="ignore"):  # of mutants: "is" with a literal
        exec(compile(source, "<tinypython>", "exec"), scope)
    return scope


def result(scope, text):
    """The value of a call in a list of one; an empty list where it raises."""
    setup, _, expression = text.rpartition("\n")
    try:
        exec(setup, scope)
        return [eval(expression, scope)]
    except Exception:
        return []


def example(f, rng):
    """A docstring's example, "" where none is short."""
    scope, best = load(f.prompt() + f.solution), ""
    for _ in range(3):
        text = call(f, rng)
        out = repr(*result(scope, text) or [None])
        if out != "None" and len(text) + len(out) < 90:
            best = "\n\n>>> " + text.replace("\n", "\n>>> ") + f"\n{out}\n"
            if out not in ("[]", "''", "0", "False"):
                break
    return best


def mutants(text, rng):
    """Programs that differ from a body in one sign, name or constant, in random order."""
    marks = [*re.finditer(r"[=!<>+*/%-]+|\b\w+\b", text)]
    for mark in rng.sample(marks, len(marks)):
        word = mark[0]
        others = [str(int(word) + 1), str(int(word) - 1)] if word.isdigit() else [SWAPS[word]] if word in SWAPS else []
        for other in others:
            yield text[: mark.start()] + other + text[mark.end() :]


def tests_of(f, rng):
    """[(call, value)] that tell the solution from constants and from ten mutants; None if there are none."""
    calls, scope = dict.fromkeys(call(f, rng, min(i, 3)) for i in range(50)), load(f.prompt() + f.solution)
    right = {text: out for text in calls if (out := result(scope, text))}
    chosen, wrong = [*right][:3], 0
    for body in mutants(f.solution, rng):
        body = re.sub(r"while (.*):", r"while next(ticks) and \1:", body)  # a mutant may not end
        with contextlib.suppress(SyntaxError):
            scope = load(f.prompt() + body, ticks=itertools.repeat(True, 30_000))
            differs = [text for text in right if result(scope, text) != right[text]]
            wrong += bool(differs)
            chosen += differs[:1] if not {*differs} & {*chosen} else []
        if wrong == 10:
            break
    chosen += [text for text in right if text not in chosen][: max(0, 5 - len(chosen))]
    tests = [(text, right[text][0]) for text in chosen]
    constant = len({repr(out) for _, out in tests}) < 2
    return None if constant or wrong < 3 or not 5 <= len(tests) <= 12 else tests


# ---- splits and files ----------------------------------------------------------------------------------------------


def held(*key):
    """One key in ten is held out, by its hash."""
    return zlib.crc32(repr(key).encode()) % 10 == 0


class World:
    """Functions of a seed. No sentence describes two of them, unless they do the same."""

    def __init__(self, seed):
        self.seed, self.rng, self.sentences, self.combinations = seed, random.Random(seed), {}, set()

    def draw(self, rng, levels, new=False):
        """(a function, the split it belongs to or ""), of a sentence that describes nothing else."""
        while True:
            with contextlib.suppress(KeyError, IndexError):  # an operation lacks what the template needs
                f = Function(rng, rng.choices(levels, [SHARES[level] for level in levels])[0], new)
                if self.sentences.get(f.template, f.what) == f.what:
                    break
        f.combination = tuple(sorted(f.operations[f.level == 2 and len(f.operations) > 2 :]))  # without the template
        if f.level > 1 and len(f.combination) > 1 and held(f.combination):
            return f, "composed"
        constants = any(held(f.combination, *pair) for pair in enumerate(f.constants))
        return f, "constants" if constants else "phrased" if f.is_new else ""

    def train(self, n, levels):
        """n functions as (prompt, solution)."""
        while n:
            f, split = self.draw(self.rng, levels)
            if not split:
                self.sentences[f.template] = f.what
                self.combinations.add(f.combination)
                yield f.prompt(example(f, self.rng) if self.rng.random() < 0.5 else ""), f.solution
                n -= 1

    def tasks(self, split, count, levels):
        """Up to so many tasks of a split, as lines of its file; train must have been drawn."""
        rng, found = random.Random(f"{self.seed} {split}"), 0
        for _ in range(count * 300):
            f, its = self.draw(rng, levels, split == "phrased")
            known = its == "composed" or f.combination in self.combinations
            if (
                f.template in self.sentences
                or not known
                or (its not in SPLITS[:2] if split == "level4" else its != split)
            ):
                continue
            if tests := tests_of(f, rng):
                self.sentences[f.template] = f.what
                yield task(f, tests, rng, f"{split}/{found}")
                found += 1
            if found == count:
                return


def task(f, tests, rng, name):
    """A task: HumanEval's fields, "test_cases" for coupled_grpo.py, and a hole in the solution."""
    cases = [re.sub(r"(?m)^(?=.*\Z)", "assert ", text) + f" == {out!r}" for text, out in tests]
    candidate = re.sub(rf"\b{f.name}\(", "candidate(", "\n".join(cases))
    row = {"task_id": name, "prompt": f.prompt(example(f, rng) if rng.random() < 0.5 else ""), "entry_point": f.name}
    row |= {"canonical_solution": f.solution, "test": f"def check(candidate):\n{textwrap.indent(candidate, '    ')}\n"}
    return row | {"test_cases": cases, "level": f.level, "operations": f.operations, "hole": hole(f.solution, rng)}


def hole(text, rng):
    """Offsets of a hole in a solution: one line or two, or the rest of a line from some word on."""
    lines = [found.span() for found in re.finditer(r".+\n", text)]
    i = rng.randrange(len(lines))
    if rng.random() < 0.5 and i + 1 < len(lines):
        return lines[i][0], lines[min(i + rng.randrange(2), len(lines) - 2)][1]
    start, end = lines[i]
    return rng.choice([start + found.end() for found in re.finditer(r"\w [^\w]?|[(\[]|^ +", text[start:end])]), end - 1


def main(cfg):
    path, settings = Path(cfg.out) / "meta.json", json.loads(json.dumps(dataclasses.asdict(cfg) | {"out": ""}))
    saved = json.loads(path.read_text())["settings"] if path.exists() else None
    if saved == settings:
        print(f"{cfg.out} is complete, nothing to do")
        return
    if saved:
        other = ", ".join(f"{name}={saved.get(name)}" for name in settings if saved.get(name) != settings[name])
        raise ValueError(f"{cfg.out} holds another world ({other}); choose another --out or delete it")
    out, world, rng, counts = Path(cfg.out), World(cfg.seed), random.Random(f"{cfg.seed} holes"), {}
    out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        names = {"rows": "train"}
        files = {key: stack.enter_context(open(out / f"{names.get(key, key)}.jsonl", "w")) for key in cfg.formats}
        for prompt, solution in world.train(cfg.n, cfg.levels):
            i, j = hole(solution, rng)
            middle = {"prompt": prompt + solution[:i], "response": solution[i:j], "suffix": solution[j:]}
            pair = {"prompt": prompt, "response": solution}
            rows = {"rows": {"content": prompt + solution}, "pairs": pair, "holes": middle}
            for name, file in files.items():
                file.write(json.dumps(rows[name]) + "\n")
    for split in cfg.splits:
        levels = (4,) if split == "level4" else [level for level in cfg.levels if level < 4] or (1, 2, 3)
        rows = [json.dumps(row) + "\n" for row in world.tasks(split, cfg.tasks, levels)]
        (out / f"{split}.jsonl").write_text("".join(rows))
        counts[split] = len(rows)
    path.write_text(json.dumps({"settings": settings, "tasks": counts}, indent=2) + "\n")
    print(f"wrote {out}: {cfg.n:,} functions, tasks: " + ", ".join(f"{split} {n:,}" for split, n in counts.items()))


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
