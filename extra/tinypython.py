"""Write TinyPython: small Python functions with docstrings, examples and hidden tests, drawn from
tinypython.txt.

    # 100,000 functions and four splits: two minutes; then of the folder data/tinypython
    python extra/tinypython.py
    python data_prep.py python --roots TINY/train.jsonl --vocab_size=1024 --seq_len=512 --out=OUT
    # or pairs.jsonl
    python data_prep.py pairs TINY/holes.jsonl --vocab_size=1024 --seq_len=256
    python benchmarks.py --task=humaneval --tasks_file=TINY/composed.jsonl --max_new=128

What TinyStories is to English, this is to code: small enough for a CPU, and right or wrong when
run. Level 1 is one operation, 2 two or three, 3 control flow with state, 4 functions that call one
another, and classes. No docstring has two meanings. Splits hold what train lacks: constants (known
combinations of operations; their constants at most in another order), composed (new combinations),
phrased (new phrasings), level4 (either of the first two). A task, in HumanEval's form, has five
tests or more: no constant answer and none of three to ten mutants passes. Writes --out: train.jsonl
("content"), pairs.jsonl, holes.jsonl, <split>.jsonl and, last of all, meta.json.
"""

import collections
import contextlib
import dataclasses
import json
import random
import re
import sys
import textwrap
import typing
import warnings
import zlib
from functools import cached_property, partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import runs
from runs import Count, Natural

Split = typing.Literal["constants", "composed", "phrased", "level4"]
SPLITS = typing.get_args(Split)


@dataclasses.dataclass(frozen=True)
class Config:
    out: str = "data/tinypython"  # folder to write
    n: Count = 100_000  # functions to train on
    tasks: Count = 1000  # tasks of each split
    splits: tuple[Split, ...] = SPLITS  # splits to write
    seed: Natural = 0  # random seed of all that is drawn


UNSEEN = "\u00a4"  # ends a phrasing that train never has, until the sentence is complete
CONSTANT = re.compile(r"\b[CDHJKTZ]\b|ELSE")
SLOT = re.compile(r"\b[A-Zx]+\d?\b")
CALL = re.compile(r"\b([A-Z]+\d?)\{([^{}]*)\}")  # of a slot: M{x}
DRAWS = re.compile(r"\b(?:[A-Z]+|[mf]|h[PM])\d?\b")  # what a template draws, beside its arguments
# sum([x for x in a]) needs no list
GENERATOR = r"\b(sum|join|sorted)\(\[(.*? for .*?)\]\)"
THEIR = r"the (sum|total|mean|average|maximum|minimum|product|number|total length) of them\b"
# an operation, or a template for some
Entry = collections.namedtuple("Entry", "names code constants phrasings")


def table(name, codes=1):
    """{first name: Entry} of a table with `codes` fields of code. A field of phrasings is a list of
    lists of texts.
    """
    found = {}
    for text in re.split(r"\n(?=\w)", TABLES[name]):
        names, *fields = re.sub(r"\s*\n\s+", " ", text).split(" | ")
        code = [field.replace(r"\n", "\n").replace(r"\t", "    ") for field in fields[:codes]]
        phrasings = [
            [phrasing.split(" // ") for phrasing in field.split(" / ")] for field in fields[codes:]
        ]
        constants = sorted({*CONSTANT.findall(" ".join(code))})
        names = names.split(", ")
        found[names[0]] = Entry(names, code, constants, phrasings)
    return found


TABLES = dict(
    re.findall(
        r"(?ms)^\[(.*?)\][^\n]*\n(.*?)\n(?=\n\[|\Z)", Path(__file__).with_suffix(".txt").read_text()
    )
)
LISTS = {
    name: re.findall(r"'.*?'|\S+", words)
    for name, words in re.findall("(.*) [|] (.*)", TABLES["lists"])
}
KINDS = {
    kind: fields for kind, *fields in (line.split(" | ") for line in TABLES["kinds"].split("\n"))
}
MAPS = {element: table(f"{element} maps") for element in ("int", "str")}
PREDICATES = {element: table(f"{element} predicates", 2) for element in ("int", "str", "char")}
FOLDS = table("folds", 2)
SHARES = {1: 2, 2: 4, 3: 3, 4: 1}  # of the levels in train
LEVELS = {level: table(f"level {level}", 2) for level in SHARES}
# In a level, templates with more slots are drawn more often.
DRAWN = {
    n: [key for key, e in LEVELS[n].items() for _ in range(1 + 2 * len(DRAWS.findall(e.code[0])))]
    for n in LEVELS
}
ALIKE = {key: keys for name, keys in LISTS.items() if name.startswith("alike") for key in keys}
# For a slot and an element, the table whose entries fit.
FITTING = {
    "P": PREDICATES,
    "M": MAPS,
    "KEY": MAPS,
    "F": dict.fromkeys(PREDICATES, FOLDS),
    "BOTH": {"int": table("pairs")},
}
SWAPS = {
    sign: [other] for sign, other in zip(LISTS["swaps"][::2], LISTS["swaps"][1::2], strict=True)
}


def applied(code, item):
    """Code with an expression in place of x, in brackets where it needs them."""
    inner = item if re.fullmatch(r"[\w.]+(\(.*\)|\[.*\])*", item) else f"({item})"
    return re.sub(r"\(x\)|\bx\b", lambda found: f"({item})" if found[0] == "(x)" else inner, code)


class Function:
    """A function of a level. With `new` it may have phrasings that train never has. KeyError if
    nothing fits.
    """

    helper = ""  # source of the helper
    is_new = False  # whether there is a phrasing that train never has

    # a helper has the template `key` for an element
    def __init__(self, rng, level, new=False, key="", element=""):
        self.rng = rng
        self.level = level
        self.new = new
        self.element = element  # what operations work on
        self.operations = []
        self.constants = []
        self.arguments = {}  # {name: kind}
        # {slot: for each operation in it the names that it may have}
        self.names = collections.defaultdict(list)
        self.values = {}  # {slot: its text, or a function from the text in its braces}
        names, (slots, bodies), (say,) = self.draw(LEVELS[level], [key or rng.choice(DRAWN[level])])
        slots, _, self.methods = slots.partition(":")  # a class has methods: add int, reset
        for slot in slots.split():
            self.put(*re.fullmatch(r"(\D+)(\d?)", slot).groups())
        known = {*self.values, "A", "B", "SELF", "x"}
        self.bodies = [
            body for body in bodies.split(" OR ") if known.issuperset(SLOT.findall(body))
        ]
        said = self.fill(say())
        ambiguous = (
            self.element == "char" and level == 1 and "F" not in self.names and " list" not in said
        )
        if ambiguous or not self.bodies:
            raise KeyError("no body, or a sentence that may mean a list of characters or a string")
        self.is_new = self.is_new or UNSEEN in said
        said = re.sub(THEIR, r"their \1", said.replace(UNSEEN, ""))
        # the sentence, with A and B in it
        self.template = re.sub("(number|count) of the ", r"\1 of ", said)
        self.what = (*self.operations, *self.constants, *self.arguments.values())
        name = re.sub(
            "[A-Z]+(?![a-z])",
            lambda slot: rng.choice(self.names[slot[0]].pop(0)),
            rng.choice(names),
        )
        self.name = (
            name if self.methods or element or rng.random() < 0.9 else rng.choice(LISTS["silent"])
        )
        self.values["SELF"] = self.name
        self.values |= zip("AB", self.arguments, strict=False)
        said = re.sub(r"\b[AB]\b", lambda slot: self.values[slot[0]], self.template)
        self.sentence = said[0].upper() + said[1:]

    @cached_property
    def solution(self):
        """The body, in one of the styles that there are for its operations."""
        body = self.rng.choice(self.bodies)
        self.values["x"] = self.rng.choice(
            [name for name in LISTS["variables"] if name not in self.arguments]
        )
        return textwrap.indent(re.sub(GENERATOR, r"\1(\2)", self.fill(body)), "    ") + "\n"

    def prompt(self, example=""):
        """The source up to the end of the docstring."""
        said = textwrap.fill(self.sentence, 100, break_on_hyphens=False)
        line = (
            f"class {self.name}:\n"
            if self.methods
            else f"def {self.name}({', '.join(self.arguments)}):\n"
        )
        return self.helper + line + textwrap.indent(f'"""{said}{example}"""\n', "    ")

    def fill(self, text):
        """The text with its slots filled, from the inside out. KeyError where one has nothing."""
        while CALL.search(text):
            text = CALL.sub(lambda slot: self.values[slot[1]](slot[2]), text)
        return SLOT.sub(lambda slot: self.values.get(slot[0], slot[0]), text)

    def draw(self, table, keys):
        """(names, code, says) of one of the keys; code has its constants, a function of says
        phrases an item.
        """
        rng = self.rng
        taken = {key for name in self.operations for key in ALIKE.get(name, [name])}
        entry = table[rng.choice([key for key in keys if key not in taken])]
        kinds = [*self.arguments.values(), self.element, "any"]
        constants = {}
        # a list for a kind of argument or an element comes before that for any
        for letter in entry.constants:
            name = next(name for kind in kinds if (name := f"constant {letter} {kind}") in LISTS)
            constants[letter] = rng.choice(LISTS[name])
        self.operations.append(entry.names[0])
        self.constants += constants.values()
        if none := constants.get("Z"):
            constants["ELSE"] = rng.choice(
                (f", or {none} if there are none", f" ({none} if there are none)")
            )

        def fill(text):
            return CONSTANT.sub(lambda letter: constants[letter[0]], text)

        def say(phrasings, item="~"):
            new = self.new and len(phrasings) > 1 and rng.random() < 0.6
            text = rng.choice(rng.choice(phrasings[-1:] if new else phrasings[:-1] or phrasings))
            return fill(text).replace("~", item) + (UNSEEN if new else "")

        return (
            entry.names,
            [fill(code) for code in entry.code],
            [partial(say, g) for g in entry.phrasings],
        )

    def put(self, kind, i):
        """Fill a slot of a template, the i-th of its kind: with an argument, a helper or an
        operation.
        """
        values = self.values
        if not DRAWS.fullmatch(kind):
            return self.argue(kind)
        if kind in ("hP", "hM"):
            helper = Function(self.rng, 1, self.new, "is_P" if kind == "hP" else "M", self.element)
            self.helper = f"{helper.prompt()}{helper.solution}\n\n"
            self.is_new = helper.is_new
            self.operations += helper.operations
            self.constants += helper.constants
            self.element = helper.element
            values["HELPER"] = helper.name
            self.names["HELPER"] = [[helper.name]]
            return
        entries = FITTING[kind.upper()][self.element]
        names, codes, says = self.draw(entries, LISTS.get(f"{kind} {self.element}", entries))
        kind = kind.upper()
        if kind == "P":
            code, other = codes
            say, *short = says
            verb = say()
            many = re.sub(r"\(.*?\|(.*?)\)", r"\1", verb)
            values |= {
                f"P{i}": partial(applied, code),
                f"U{i}": partial(applied, other),
                f"Q{i}": re.sub(r"\((.*?)\|.*?\)", r"\1", verb),
                f"R{i}": many,
            }
            values["MANY"] = f"{values['N']} that {many}"
            if short and self.rng.random() < 0.5:
                values["MANY"] = short[0](values["N"])
        elif kind == "M":
            (code,) = codes
            verb, noun = says
            values |= {f"M{i}": partial(applied, code), f"V{i}": verb, f"W{i}": noun}
            if singular := re.fullmatch(f"(the (?:(?! of ).)*) of ~({UNSEEN}?)", noun()):
                values["X"] = lambda items: f"{singular[1]}s of {items}{singular[2]}"
            if names[0] in LISTS["numeric"]:
                self.element = "int"
        elif kind == "F":
            code, loop = codes
            values["G"], values["Y"] = says
            whole = "LISTED" if "L[" in code else "I"  # what is sliced must be a list
            if code != "-":
                values["F"] = lambda items: re.sub(r"\bL\b", whole if items == "I" else items, code)
            if code.count("L") == 1:
                values["E"] = values["F"]
            if loop != "-":
                values["START"], update, values["VALUE"] = loop.split("; ")
                values["UPDATE"] = lambda item: update.replace("ITEM", item)
        elif kind == "KEY":
            noun = entries[names[0]].phrasings[1][0][0]
            values |= {
                "KEY": partial(applied, *codes),
                "BY": noun.removeprefix("the ").removesuffix(" of ~"),
            }
        else:
            kind = "NAME"
            values["NAME"] = names[0]
            (values["BOTH"],) = codes
        self.names[kind].append(names)

    def argue(self, kind):
        """Add an argument of a kind, or of a choice of kinds, with the nouns for its elements."""
        kind = (
            self.element
            if kind == "item" and self.element
            else self.rng.choice(LISTS.get(kind, [kind]))
        )
        names, self.element, nouns, *iterable = KINDS[kind]
        name = self.rng.choice([name for name in names.split() if name not in self.arguments])
        if not self.arguments:
            many, one = self.rng.choice(nouns.split(" OR ")).split(" / ")
            self.values |= {"N": many, "S": one.replace("S", name.removesuffix("s"))}
            self.values["I"], self.values["LISTED"] = (text.replace("A", name) for text in iterable)
        self.arguments[name] = kind


def value(kind, f, rng, edge):
    """A value for an argument; edge 0 is empty or zero, 1 has one element, 2 is negative, 3 is
    any.
    """
    numbers = [int(c) for c in f.constants if c.isdigit()] or [3]
    letters = [c[1] for c in f.constants if c[0] == "'" and c[1].isalpha()] or ["e"]

    def number():
        k = rng.choice(numbers)
        near = (k - 1, k, k + 1, -k, k * rng.randint(-2, 5), 10 * rng.randint(-2, 4) + k % 10)
        drawn = rng.choice(near) if rng.random() < 0.4 else rng.randint(-15, 40)
        return -abs(drawn) - 1 if edge == 2 else drawn

    def word():
        text = rng.choice(LISTS["words"])
        letter = rng.choice(letters)
        text = rng.choice((text, text, text, letter + text, text + letter, text + text[::-1]))
        if {*LISTS["cased"]} & {*f.operations} and rng.random() < 0.5:
            return rng.choice((text, text.upper(), text.capitalize()))
        return text

    size = edge if edge < 2 else rng.randint(2, 6)
    if kind == "int":
        return number() if edge else 0
    if kind == "str":
        return word() if edge else ""
    if kind in ("nat", "count"):
        return edge if edge < 2 else rng.randint(2, 12)
    if kind in ("pos", "digits"):
        large = rng.choice((rng.randint(2, 300), rng.choice(numbers) ** 2 * rng.randint(1, 9)))
        return max(int(kind == "pos"), edge if edge < 2 else large)
    if kind in ("values", "keys", "dict"):
        return {word(): number() for _ in range(size)}
    if kind == "rows":
        return [[number() for _ in range(rng.randint(1, 3))] for _ in range(size // 2 + size % 2)]
    items = [number() if kind in ("ints", "scores") else word() for _ in range(size)]
    if size > 2 and rng.random() < 0.4:
        items[-1] = items[0]
    if kind == "chars":
        items = [
            rng.choice((item, item.capitalize(), item + item[-1:], str(rng.randint(0, 99))))
            for item in items
        ]
    return " ".join(items) if kind in ("text", "chars") else items


def call(f, rng, edge=3):
    """The source of a call with drawn values; for a class an object, and on the next line calls of
    its methods.
    """

    def drawn(kinds, edge):
        return ", ".join(repr(value(kind, f, rng, edge)) for kind in kinds)

    made = f"{f.name}({drawn(f.arguments.values(), edge)})"
    if not f.methods:
        return made
    steps = [rng.choice(f.methods.split(",")).split() for _ in range(rng.randint(2, 4))]
    steps = [f"c.{method}({drawn(kinds, 3)})" for method, *kinds in steps]
    return f"c = {made}\n[{', '.join(steps)}]"


def load(source, **scope):
    """The names that a program defines."""
    exec(source, scope)
    return scope


def result(scope, text):
    """The value of a call in a list of one; an empty list where it raises."""
    setup, _, expression = text.rpartition("\n")
    with contextlib.suppress(Exception):
        exec(setup, scope)
        return [eval(expression, scope)]
    return []


def example(f, rng):
    """A docstring's example; "" for half of the functions, and where none is short."""
    if rng.random() >= 0.5:
        return ""
    scope = load(f.prompt() + f.solution)
    best = ""
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
        for other in (int(word) + 1, int(word) - 1) if word.isdigit() else SWAPS.get(word, ()):
            yield f"{text[: mark.start()]}{other}{text[mark.end() :]}"


def tests_of(f, rng):
    """[(call, value)] that tell the solution from constants and from three to ten mutants; None if
    there are none.
    """
    calls = dict.fromkeys(call(f, rng, min(i, 3)) for i in range(50))
    scope = load(f.prompt() + f.solution)
    right = {text: out for text in calls if (out := result(scope, text))}
    chosen = [*right][:3]
    wrong = 0
    for body in mutants(f.solution, rng):
        body = re.sub(r"while (.*):", r"while next(ticks) and \1:", body)  # a mutant may not end
        # "is" with a literal
        with contextlib.suppress(SyntaxError), warnings.catch_warnings(action="ignore"):
            scope = load(f.prompt() + body, ticks=iter([True] * 30_000))
            differs = [text for text in right if result(scope, text) != right[text]]
            if differs:
                wrong += 1
            if {*differs}.isdisjoint(chosen):
                chosen += differs[:1]
        if wrong == 10:
            break
    chosen += [text for text in right if text not in chosen][: max(0, 5 - len(chosen))]
    if wrong > 2 and 5 <= len(chosen) <= 12 and len({repr(right[text]) for text in chosen}) > 1:
        return [(text, *right[text]) for text in chosen]


def held(*key):
    """One key in ten is held out, by its hash."""
    return zlib.crc32(repr(key).encode()) % 10 == 0


class World:
    """Functions of a seed. No sentence describes two of them, unless they do the same."""

    def __init__(self, seed):
        self.seed = seed
        self.rng = random.Random(seed)
        self.sentences = {}
        self.combinations = set()

    def draw(self, rng, levels, new=False):
        """(a function, the split it belongs to or ""), of a sentence that describes nothing
        else.
        """
        while True:
            # an operation lacks what the template needs
            with contextlib.suppress(KeyError, IndexError):
                f = Function(rng, rng.choices(levels, [SHARES[level] for level in levels])[0], new)
                if self.sentences.get(f.template, f.what) == f.what:
                    break
        # without the template
        f.combination = tuple(sorted(f.operations[f.level == 2 and len(f.operations) > 2 :]))
        if f.level > 1 and len(f.combination) > 1 and held(f.combination):
            return f, "composed"
        if any(held(f.combination, *pair) for pair in enumerate(f.constants)):
            return f, "constants"
        return f, "phrased" if f.is_new else ""

    def train(self, n):
        """n functions as (prompt, solution)."""
        while n:
            f, split = self.draw(self.rng, [*LEVELS])
            if not split:
                self.sentences[f.template] = f.what
                self.combinations.add(f.combination)
                yield f.prompt(example(f, self.rng)), f.solution
                n -= 1

    def tasks(self, split, count):
        """Up to `count` tasks of a split, as rows of its file; call train() first."""
        rng = random.Random(f"{self.seed} {split}")
        found = 0
        levels = (1, 2, 3)
        wanted = (split,)
        if split == "level4":
            levels = (4,)
            wanted = ("constants", "composed")
        for _ in range(count * 300):
            f, its = self.draw(rng, levels, split == "phrased")
            known = its == "composed" or f.combination in self.combinations
            if (
                known
                and its in wanted
                and f.template not in self.sentences
                and (tests := tests_of(f, rng))
            ):
                self.sentences[f.template] = f.what
                cases = [
                    re.sub(r"(?m)^(?=.*\Z)", "assert ", text) + f" == {out!r}"
                    for text, out in tests
                ]
                calls = re.sub(
                    rf"\b{f.name}\(", "candidate(", textwrap.indent("\n".join(cases), "    ")
                )
                yield {
                    "task_id": f"{split}/{found}",
                    "split": split,
                    "entry_point": f.name,
                    "level": f.level,
                    "prompt": f.prompt(example(f, rng)),
                    "operations": f.operations,
                    "canonical_solution": f.solution,
                    "test_cases": cases,
                    "hole": hole(f.solution, rng),
                    "test": f"def check(candidate):\n{calls}\n",
                }
                found += 1
            if found == count:
                break


def hole(text, rng):
    """Offsets of a hole in a solution: one line or two, or the rest of a line from some word on."""
    lines = [found.span() for found in re.finditer(r".+\n", text)]
    i = rng.randrange(len(lines))
    start, end = lines[i]
    if rng.random() < 0.5 and i + 1 < len(lines):
        return start, lines[min(i + rng.randrange(2), len(lines) - 2)][1]
    return rng.choice(
        [start + found.end() for found in re.finditer(r"\w [^\w]?|[(\[]|^ +", text[start:end])]
    ), end - 1


def main(cfg):
    out = Path(cfg.out)
    meta = out / "meta.json"
    if any(out.glob("*.jsonl")) and not meta.exists():
        raise ValueError(
            f"{out} holds other files than a TinyPython, or a part of one; "
            "choose another --out or delete it"
        )
    files = {"train": [], "pairs": [], "holes": []}
    settings = {"n": cfg.n, "tasks": cfg.tasks, "splits": [*cfg.splits], "seed": cfg.seed}
    out.mkdir(parents=True, exist_ok=True)
    with runs.lock(out / ".lock"):
        if meta.exists():
            if runs.read_json(meta, "settings")["settings"] != settings:
                raise ValueError(f"{out} holds another world; choose another --out or delete it")
            if all((out / f"{name}.jsonl").exists() for name in [*files, *cfg.splits]):
                print(f"{out} is complete, nothing to do")
                return
        world = World(cfg.seed)
        rng = random.Random(f"{cfg.seed} holes")
        for prompt, body in world.train(cfg.n):
            start, end = hole(body, rng)
            files["train"].append({"content": prompt + body})
            files["pairs"].append({"prompt": prompt, "response": body})
            files["holes"].append(
                {
                    "prompt": prompt + body[:start],
                    "response": body[start:end],
                    "suffix": body[end:],
                }
            )
        for split in cfg.splits:
            files[split] = list(world.tasks(split, cfg.tasks))
        for name, rows in files.items():
            data = "".join(json.dumps(row) + "\n" for row in rows).encode()
            runs.write(out / f"{name}.jsonl", data)
        counts = {split: len(files[split]) for split in cfg.splits}
        runs.write(meta, {"settings": settings, "tasks": counts})
    print(f"wrote {out}: {cfg.n:,} functions, tasks: {counts}")


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
