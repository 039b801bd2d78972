"""Write TinyPython: small Python functions with docstrings, examples and hidden tests, drawn from a grammar.

    python tinypython.py                                      # 100,000 functions and four splits, 40 s
    python tinypython.py --n=1000 --tasks=50 --out=/tmp/tiny --seed=1
    python data_prep.py python --roots data/tinypython/train.jsonl --column=content --vocab_size=1024 --seq_len=512
    python data_prep.py pairs data/tinypython/holes.jsonl --vocab_size=1024 --seq_len=256    # or pairs.jsonl
    python benchmarks.py --task=humaneval --tasks_file=data/tinypython/composed.jsonl

What TinyStories is to English, this is to code: small enough to be learnt on a CPU, and its answers are right or wrong
when run. Level 1 is one operation, level 2 a composition of two or three, level 3 control flow with state, level 4
functions that call one another, and classes. A docstring decides its function: no sentence describes two.

Splits hold what train lacks: constants (operations that occur together, but never with these constants), composed
(operations that never occur together), phrased (a phrasing that never occurs), level4 (constants or composed, of
level 4). A task is a problem in HumanEval's form, with "test_cases" for coupled_grpo.py: at least five tests, which no
constant answer and none of ten mutants of its solution passes.

Writes --out: train.jsonl ("content"), pairs.jsonl, holes.jsonl, <split>.jsonl and, last of all, meta.json.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import random
import re
import string
import textwrap
import warnings
from pathlib import Path

SPLITS = ("constants", "composed", "phrased", "level4")
FORMATS = {"rows": "train", "pairs": "pairs", "holes": "holes"}  # files


@dataclasses.dataclass(frozen=True)
class Config:
    out: str = "data/tinypython"  # folder to write
    n: int = 100_000  # functions to train on
    tasks: int = 1000  # tasks of each split
    levels: tuple[int, ...] = (1, 2, 3, 4)  # levels to train on
    splits: tuple[str, ...] = SPLITS  # splits to write: constants, composed, phrased, level4
    formats: tuple[str, ...] = tuple(FORMATS)  # train is written as rows for PythonCoder, pairs and holes for Dream
    seed: int = 0  # random seed of all that is drawn


# ---- the tables of tinypython.txt ----------------------------------------------------------------------------------

NEW = "\u00a4"  # marks a phrasing that train never has, until the sentence is complete
CONSTANT = re.compile(r"\b[CDHJKWZ]\b(?!\{)|ELSE")


def table(text, codes=1):
    """{first name: (names, fields of code, constants, groups of phrasings)} of a table."""
    found = {}
    for entry in re.split(r"\n(?=\w)", text):
        names, *fields = re.split(r"\s*(?<= )\|(?= |$)\s*", re.sub(r"\s*\n\s+", " ", entry))
        code = [" OR ".join(map(statements, field.replace(r"\n", "\n").split(" OR "))) for field in fields[:codes]]
        groups = [[expand(phrase) for phrase in field.split(" / ")] for field in fields[codes:]]
        constants = sorted({*CONSTANT.findall(" ".join(code))})
        found[names.split(", ")[0]] = names.split(", "), code, constants, groups
    return found


def statements(code):
    """Code of a table as people lay it out: `if a: b` in two lines, indented by four."""
    code = re.sub(r"(?m)^( *)((?:if|elif|else|for|while)\b.*?): (?=\w)", r"\1\2:\n \1", code)
    code = re.sub(r"(?m)^ +", lambda spaces: spaces[0] * 4, code)
    return re.sub(r"(?m)^def ", "\ndef ", code)


def expand(phrase):
    """All texts of a phrase with (a|b) in it."""
    parts = [part.split("|") for part in re.split(r"\(([^()]*\|[^()]*)\)", phrase)]
    return ["".join(chosen) for chosen in itertools.product(*parts)]


def plural(verb):
    """The plural of a verb phrase: starts with C -> start with C, is a vowel -> are vowels."""
    first, _, rest = verb.partition(" ")
    if first.endswith("is") and rest.startswith("a "):
        rest = re.sub(r"^a ([\w-]+ letter|\w+)", r"\1s", rest)
    first = re.sub("is$", "are", first) if first.endswith("is") else re.sub("(?<=ha)s$", "ve", first)
    return re.sub("(?<=do)es$|s$", "", first) + " " + rest


TABLES = dict(re.findall(r"(?ms)^\[(.*?)\][^\n]*\n(.*?)\n(?=\n\[|\Z)", Path(__file__).with_suffix(".txt").read_text()))
LISTS = {name: words.split() for name, words in (line.split(" | ") for line in TABLES["lists"].split("\n"))}
KINDS = {kind: fields for kind, *fields in (line.split(" | ") for line in TABLES["kinds"].split("\n"))}
MAPS = {element: table(TABLES[f"{element} maps"]) for element in ("int", "str")}
PREDICATES = {element: table(TABLES[f"{element} predicates"], 2) for element in ("int", "str", "char")}
FOLDS = table(TABLES["orders"], 2) | table(TABLES["reductions"], 2)
PAIRS = table(TABLES["pairs"])
LEVELS = {level: table(TABLES[f"level {level}"], 2) for level in (1, 2, 3, 4)}
SLOTS = re.compile(r"\b(?:[PMm]\d?|F|f|g|KEY|BOTH)\b")  # the more slots, the more often a template is drawn
TEMPLATES = {
    level: [key for key in found for _ in range(1 + 2 * len(SLOTS.findall(found[key][1][0])))]
    for level, found in LEVELS.items()
}
WEIGHTS = {1: 2, 2: 4, 3: 3, 4: 1}  # how often train has each level
CONSTANTS = {"K": [*range(2, 10)] * 3 + [10, 12, 15, 20, 25, 30], "J": range(31, 46), "H": range(2, 6), "C": "aeionrst",
             "D": "_-*ulmd", "W": ["-", ", ", "+", "/", " "]}  # fmt: skip
GENERATOR = re.compile(
    r"\b(sum|set|join|sorted)\(\[((?:[^][]|\[[^][]*\])* for (?:[^][]|\[[^][]*\])*)\]\)"
)  # from a list
ALIKE = {key: words for name, words in LISTS.items() if name.startswith("alike") for key in words}


# ---- a function ----------------------------------------------------------------------------------------------------


def applied(code):
    """A function that puts an expression for x into code, in brackets where it needs them."""

    def apply(item):
        inner = item if re.fullmatch(r"[\w.]+(\(.*\)|\[.*\])*", item) else f"({item})"
        return re.sub(r"\(x\)|\bx\b", lambda found: f"({item})" if found[0] == "(x)" else inner, code)

    return apply


class Function:
    """A function of a level, drawn from the tables. With `new` it may have phrasings that train never has."""

    def __init__(self, rng, level, new=False, only="", element=""):
        self.rng, self.level, self.new, self.head, self.now = rng, level, new, "", element
        self.operations, self.constants, self.names, self.arguments, self.values = [], [], {}, [], {}
        only = only or rng.choice(TEMPLATES[level])
        names, (slots, bodies), say = self.draw({only: LEVELS[level][only]})
        slots, _, self.calls = slots.partition(":")
        for slot in slots.split():
            self.fill_slot(slot)
        code = self.values.get("CODE", "L")
        lacking = (
            ["F{"] * (not code) + ["F{["] * (code.count("L") > 1) + ["START"] * (not self.values.get("START", True))
        )
        self.bodies = [body for body in bodies.split(" OR ") if not any(slot in body for slot in lacking)]
        if not self.bodies:
            raise KeyError(lacking[0])
        said = self.fill(say(0))
        if self.now == "char" and level == 1 and " list" not in said and "F" not in self.names:
            raise KeyError("a list or a string of characters?")
        self.is_new = NEW in said + self.head
        said = re.sub(
            r"the (sum|total|mean|average|maximum|minimum|product|number|total length) of them\b", r"their \1", said
        )
        self.template = said = re.sub("(number|count) of the ", r"\1 of ", said.replace(NEW, ""))
        self.head = self.head.replace(NEW, "")
        self.what = *self.operations, *self.constants, *(kind for _, kind in self.arguments)
        # Names: of the function, one in ten says nothing; of its arguments.
        name = re.sub("[A-Z]+(?![a-z])", lambda slot: rng.choice(self.names[slot[0]].pop(0)), rng.choice(names))
        if rng.random() < 0.1 and not (self.calls or element):
            name = rng.choice(LISTS["silent"])
        self.name = name + "_all" * (name == self.values.get("HELPER"))
        self.given = {"Y": self.name} | dict(zip("AB", (name for name, _ in self.arguments), strict=False))
        said = re.sub(r"\b[AB]\b", lambda slot: self.given[slot[0]], said)
        self.sentence = said[0].upper() + said[1:]

    @functools.cached_property
    def solution(self):
        """The body, in one of the styles that there are for its operations."""
        body = self.fill(self.rng.choice(self.bodies))
        names = self.given | {
            "x": self.rng.choice([name for name in LISTS["variables"] if name not in self.given.values()])
        }
        body = re.sub(r"\b[ABYx]\b", lambda slot: names[slot[0]], body)
        body = GENERATOR.sub(r"\1(\2)", body)
        return textwrap.indent(body, "    ") + "\n"

    def prompt(self, example=""):
        """The source up to the end of the docstring."""
        said = self.sentence if len(self.sentence) < 100 else textwrap.fill(self.sentence, 100, break_on_hyphens=False)
        names = ", ".join(name for name, _ in self.arguments)
        line = f"class {self.name}:\n" if self.calls else f"def {self.name}({names}):\n"
        return self.head + line + textwrap.indent(f'"""{said}{example}"""\n', "    ")

    def fill(self, text):
        """The text with its slots replaced, from the inside out. KeyError where one has nothing."""
        while "{" in text:
            filled = re.sub(r"\b([A-Z]+\d?)\{([^{}]*)\}", lambda slot: self.values[slot[1]](slot[2]), text)
            if filled == text:
                break
            text = filled
        return re.sub(r"\b[A-Z]+\d?\b", lambda slot: self.values.get(slot[0], slot[0]), text)

    def draw(self, operations):
        """(names, code, say) of an operation with its constants put in; say(i) is a phrasing of its group i."""
        rng, taken = self.rng, {*self.operations, *(key for name in self.operations for key in ALIKE.get(name, ()))}
        key = rng.choice([key for key in operations if key not in taken])
        names, code, letters, groups = operations[key]
        digits = self.arguments and self.arguments[0][1] == "digits"
        drawn = {
            letter: rng.choice(CONSTANTS["H" if digits and letter == "K" else letter])
            for letter in letters
            if letter != "Z"
        }
        drawn = {letter: str(value) if letter in "HJK" else repr(value) for letter, value in drawn.items()}
        if "Z" in letters:
            drawn["Z"] = rng.choice(("None", "0", "-1") if self.now == "int" else ("None", "''"))
            drawn["ELSE"] = rng.choice((f", or {drawn['Z']} if there are none", f" ({drawn['Z']} if there are none)"))
        self.operations.append(key)
        self.constants += [drawn[letter] for letter in letters]

        def put(text):
            return CONSTANT.sub(lambda found: drawn[found[0]], text) if drawn else text

        def say(i):
            new = self.new and len(groups[i]) > 1 and rng.random() < 0.6
            return NEW * new + put(rng.choice(rng.choice(groups[i][-1:] if new else groups[i][:-1] or groups[i])))

        return names, [put(text) for text in code], say

    def fill_slot(self, slot):
        """Fill a slot of a template: an argument, an operation, a helper."""
        values, kind, i = self.values, slot.rstrip("123"), slot.lstrip(string.ascii_letters)
        if kind == "P":
            names, (code, opposite), say = self.draw(PREDICATES[self.now])
            verb, (noun, _, where) = say(0), values.get("N", "").partition(" ")
            values |= {f"P{i}": applied(code), f"U{i}": applied(opposite), f"Q{i}": verb, f"R{i}": plural(verb)}
            values |= {"ONE": f"{values.get('S')} that {verb}", "MANY": f"{values.get('N')} that {plural(verb)}"}
            if len(PREDICATES[self.now][self.operations[-1]][3]) > 1 and self.rng.random() < 0.5:
                short = say(1)
                first = short.replace(NEW, "").startswith("~")
                values["MANY"] = (
                    short.replace("~", values["N"]) if first else f"{short.replace('~', noun)} {where}".strip()
                )
        elif kind in ("M", "m"):
            without = LISTS["numeric"] * (kind == "m")
            names, (code,), say = self.draw({key: op for key, op in MAPS[self.now].items() if key not in without})
            values |= {f"M{i}": applied(code), f"V{i}": lambda item: say(0).replace("~", item)}
            values[f"W{i}"] = lambda item: say(1).replace("~", item)
            if many := re.fullmatch("(.?the (?:(?! of ).)*) of ~", say(1)):
                values["X"] = lambda items: f"{many[1]}s of {items}"
            self.now = "int" if self.operations[-1] in LISTS["numeric"] else self.now
        elif kind == "F":
            folds = LISTS[f"{self.now} folds"]
            names, (code, loop), say = self.draw(
                {key: FOLDS[key] for key in folds if key != "count" or "M" not in self.names}
            )
            lists = ("[", "found", "row") + ("A",) * (self.arguments[0][1] in ("ints", "strs", "scores"))

            def fold(items):
                items = self.values["I"] if items == "I" else items
                items = (
                    f"list({items})" if "L[" in code and not items.startswith(lists) and "split" not in items else items
                )
                return re.sub(r"\bL\b", lambda _: items, code)

            values |= {"F": fold, "CODE": code}
            start, _, update = loop.partition("; ")
            values |= {
                "START": start,
                "VALUE": start.split(" ")[0],
                "UPDATE": lambda item: update.replace("ITEM", item),
            }
            values |= {"G": lambda items: say(0).replace("~", items), "Y": lambda items: say(1).replace("~", items)}
        elif kind == "KEY":
            names, (code,), _ = self.draw({key: MAPS[self.now][key] for key in LISTS[f"{self.now} keys"]})
            phrase = MAPS[self.now][self.operations[-1]][3][1][0][0]
            values |= {"KEY": applied(code), "BY": re.fullmatch("the (.*) of ~", phrase)[1]}
        elif kind == "BOTH":
            names, (code,), _ = self.draw(PAIRS)
            values |= {"BOTH": code, "NAME": self.operations[-1]}
            kind = "NAME"
        elif kind in ("f", "g"):
            helper = Function(self.rng, 1, self.new, "is_P" if kind == "f" else "M", self.now)
            self.head = NEW * helper.is_new + helper.prompt() + helper.solution + "\n\n"
            self.operations += helper.operations
            self.constants += helper.constants
            self.now = "int" if {*helper.operations} & {*LISTS["numeric"]} else self.now
            values["HELPER"], names, kind = helper.name, [helper.name], "HELPER"
        else:
            return self.add_argument(kind)
        self.names.setdefault(kind.upper(), []).append(names)

    def add_argument(self, kind):
        """Add an argument of a kind, or of a choice of kinds, and the nouns for its elements."""
        kind = self.now if kind == "item" and self.now else self.rng.choice(LISTS.get(kind, [kind]))
        names, element, nouns, iterable = (*KINDS[kind], "", "", "")[:4]
        taken = [name for name, _ in self.arguments]
        name = self.rng.choice([name for name in names.split() if name not in taken])
        if not taken:
            many, _, one = (nouns or "A / A").partition(" / ")
            self.now = element or kind
            self.values |= {"N": many, "S": name.removesuffix("s") if one == "S" else one, "I": iterable}
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
        return rng.choice((text, text.upper(), text.capitalize())) if cased and rng.random() < 0.5 else text

    cased = {*LISTS["cased"]} & {*f.operations}
    size = edge if edge < 2 else rng.randint(2, 6)
    if kind in ("int", "str"):
        return (number() if edge else 0) if kind == "int" else (word() if edge else "")
    if kind in ("nat", "pos", "count", "digits"):
        low = kind == "pos"
        return max(
            low,
            edge
            if edge < 2
            else rng.randint(2, 12)
            if kind in ("nat", "count")
            else rng.choice((rng.randint(2, 300), rng.choice(numbers) ** 2 * rng.randint(1, 9))),
        )
    if kind in ("values", "keys"):
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
    steps = [self for self in f.calls.split(",") if self]
    steps = [rng.choice(steps).split() for _ in range(rng.randint(2, 4) if steps else 0)]
    steps = [f"c.{method}({', '.join(repr(value(kind, f, rng, 3)) for kind in kinds)})" for method, *kinds in steps]
    return f"c = {made}\n[{', '.join(steps)}]" if steps else made


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


SWAPS = dict(zip(LISTS["swaps"][::2], LISTS["swaps"][1::2], strict=True))


def mutants(text, rng):
    """Programs that differ from a body in one sign, name or constant, in random order."""
    marks = [*re.finditer(r"[=!<>+*/%-]+|\b\w+\b|''", text)]
    for mark in rng.sample(marks, len(marks)):
        word = mark[0]
        others = [SWAPS[word]] if word in SWAPS else [str(int(word) + 1), str(int(word) - 1)] if word.isdigit() else []
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
            if differs and not {*differs} & {*chosen}:
                chosen.append(differs[0])
        if wrong == 10:
            break
    chosen += [text for text in right if text not in chosen][: max(0, 5 - len(chosen))]
    tests = [(text, right[text][0]) for text in chosen]
    constant = len({repr(out) for _, out in tests}) < 2
    return None if constant or wrong < 3 or not 5 <= len(tests) <= 12 else tests


# ---- splits and files ----------------------------------------------------------------------------------------------


def held(*key):
    """One key in ten is held out, by its hash."""
    return hashlib.sha256(repr(key).encode()).digest()[0] < 26


class World:
    """Functions of a seed. No sentence describes two of them, unless they do the same."""

    def __init__(self, seed):
        self.seed, self.rng, self.sentences, self.combinations = seed, random.Random(seed), {}, set()

    def draw(self, rng, levels, new=False):
        """(a function, what train lacks of it), of a sentence that describes nothing else."""
        while True:
            with contextlib.suppress(KeyError, IndexError):  # an operation lacks what the template needs
                f = Function(rng, rng.choices(levels, [WEIGHTS[level] for level in levels])[0], new)
                if self.sentences.get(f.template, f.what) == f.what:
                    f.combination = tuple(sorted(f.operations[f.level == 2 and len(f.operations) > 2 :]))
                    constants = any(held(f.combination, *pair) for pair in enumerate(f.constants))
                    return f, "composed" if f.level > 1 and len(f.combination) > 1 and held(
                        f.combination
                    ) else "constants" if constants else ""

    def train(self, n, levels):
        """n functions as (prompt, solution)."""
        while n:
            f, lacks = self.draw(self.rng, levels)
            if not lacks:
                self.sentences[f.template] = f.what
                self.combinations.add(f.combination)
                yield f.prompt(example(f, self.rng) if self.rng.random() < 0.5 else ""), f.solution
                n -= 1

    def tasks(self, split, count, levels):
        """Up to so many tasks of a split, when train has been drawn."""
        rng = random.Random(f"{self.seed} {split}")
        for _ in range(count * 1000):
            f, lacks = self.draw(rng, levels, split == "phrased")
            lacks = "phrased" if f.is_new and not lacks else lacks
            if f.template in self.sentences or lacks != split and not (split == "level4" and lacks):
                continue
            if lacks != "composed" and f.combination not in self.combinations:
                continue
            tests = tests_of(f, rng)
            if tests:
                self.sentences[f.template] = f.what
                yield f, tests, rng
                count -= 1
            if not count:
                return


def task(f, tests, rng, name):
    """A task as a line of a file: HumanEval's fields, those of coupled_grpo.py, and a hole in the solution."""
    cases = []
    for text, out in tests:
        setup, line, expression = text.rpartition("\n")
        cases.append(f"{setup}{line}assert {expression} == {out!r}")
    lines = re.sub(rf"\b{f.name}\(", "candidate(", "\n".join(cases))
    row = {"task_id": name, "prompt": f.prompt(example(f, rng) if rng.random() < 0.5 else ""), "entry_point": f.name}
    row |= {"canonical_solution": f.solution, "test": f"def check(candidate):\n{textwrap.indent(lines, '    ')}\n"}
    return row | {"test_cases": cases, "level": f.level, "operations": f.operations, "hole": hole(f.solution, rng)}


def hole(text, rng):
    """Offsets of a hole in a solution: one line or two, or the rest of a line from some word on."""
    lines = [found.span() for found in re.finditer(r".+\n", text)]
    i = rng.randrange(len(lines))
    if rng.random() < 0.5 and i + 1 < len(lines):
        return lines[i][0], lines[min(i + rng.randrange(2), len(lines) - 2)][1]
    start, end = lines[i]
    return rng.choice([start + found.end() for found in re.finditer(r"\w [^\w]?|[(\[]|^ +", text[start:end])]), end - 1


def check(cfg):
    """ValueError for settings that make no world, or a folder that holds another one; whether the folder is complete."""
    for flag, known in {"splits": SPLITS, "formats": FORMATS, "levels": tuple(WEIGHTS)}.items():
        given = getattr(cfg, flag)
        if {*given} - {*known} or flag == "levels" and not given:
            unknown = next((value for value in given if value not in known), "none")
            raise ValueError(f"--{flag}: {unknown} is unknown; choose from {', '.join(map(str, known))}")
    if cfg.n < 1 or cfg.tasks < 1:
        raise ValueError(f"--n={cfg.n} and --tasks={cfg.tasks} must be at least 1")
    path, settings = Path(cfg.out) / "meta.json", json.loads(json.dumps(dataclasses.asdict(cfg) | {"out": ""}))
    saved = json.loads(path.read_text())["settings"] if path.exists() else settings
    if saved != settings:
        other = ", ".join(f"{name}={saved.get(name)}" for name in settings if saved.get(name) != settings[name])
        raise ValueError(f"{cfg.out} holds another world ({other}); choose another --out or delete it")
    return settings, path


def main(cfg):
    settings, path = check(cfg)
    if path.exists():
        print(f"{cfg.out} is complete, nothing to do")
        return
    out, world, rng, counts = Path(cfg.out), World(cfg.seed), random.Random(f"{cfg.seed} holes"), {}
    out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(open(out / f"{FORMATS[name]}.jsonl", "w")) for name in cfg.formats}
        put = lambda name, **row: name in files and files[name].write(json.dumps(row) + "\n")
        functions = iter(world.train(cfg.n, cfg.levels))
        while batch := [*itertools.islice(functions, 5)]:
            put("rows", content="\n\n".join(prompt + solution for prompt, solution in batch))
            for prompt, solution in batch:
                start, end = hole(solution, rng)
                put("pairs", prompt=prompt, response=solution)
                put("holes", prompt=prompt + solution[:start], response=solution[start:end], suffix=solution[end:])
    for split in cfg.splits:
        levels = (4,) if split == "level4" else tuple(level for level in cfg.levels if level < 4) or (1, 2, 3)
        rows = [task(*made, f"{split}/{i}") for i, made in enumerate(world.tasks(split, cfg.tasks, levels))]
        (out / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        counts[split] = len(rows)
    path.write_text(json.dumps({"settings": settings, "tasks": counts}, indent=2) + "\n")
    print(
        f"wrote {out}: {cfg.n:,} functions, tasks: "
        + ", ".join(f"{split} {count:,}" for split, count in counts.items())
    )


if __name__ == "__main__":
    import runs

    runs.command(main, Config, __doc__)
