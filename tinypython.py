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

import ast
import contextlib
import dataclasses
import hashlib
import itertools
import json
import random
import re
import string
import textwrap
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


# ---- a function, drawn from the tables -----------------------------------------------------------------------------


def table(text, codes=1):
    """{first name: (names, fields of code, groups of phrasings)} of a table."""
    found = {}
    for entry in re.split(r"\n(?=\w)", text.strip()):
        names, *fields = re.split(r"\s*(?<= )\|(?= |$)\s*", re.sub(r"\s*\n\s+", " ", entry))
        groups = [[expand(phrase) for phrase in field.split(" / ")] for field in fields[codes:]]
        found[names.split(", ")[0]] = names.split(", "), [code.replace(r"\n", "\n") for code in fields[:codes]], groups
    return found


def expand(phrase):
    """All texts of a phrase with (a|b) in it."""
    parts = [part.split("|") for part in re.split(r"\(([^()]*\|[^()]*)\)", phrase)]
    return ["".join(chosen) for chosen in itertools.product(*parts)]


def plural(verb):
    """The plural of a verb phrase: starts with C -> start with C, is a vowel -> are vowels."""
    first, _, rest = verb.partition(" ")
    if first == "is" and rest.startswith("a "):
        return "are " + re.sub(r"^a ([\w-]+ letter|\w+)", r"\1s", rest)
    return {"is": "are", "has": "have", "does": "do"}.get(first, first.removesuffix("s")) + " " + rest


TABLES = {name: text for name, text in re.findall(r"(?ms)^\[(.*?)\][^\n]*\n(.*?)(?=^\[|\Z)", Path(__file__).with_suffix(".txt").read_text())}
MAPS = {element: table(TABLES[f"{element} maps"]) for element in ("int", "str")}
PREDICATES = {element: table(TABLES[f"{element} predicates"], 2) for element in ("int", "str", "char")}
FOLDS = {name: (names, [*code, ""], said) for name, (names, code, said) in table(TABLES["orders"]).items()}
FOLDS |= table(TABLES["reductions"], 2)
LEVELS = {level: table(TABLES[f"level {level}"], 2) for level in (1, 2, 3, 4)}
KINDS = {kind: fields for kind, *fields in (line.split(" | ") for line in TABLES["kinds"].split("\n"))}
EITHER = "reversed unique first last after count count"  # orders and reductions of numbers and of words
OF = {"int": f"ascending descending {EITHER} sum sum sum product largest largest smallest smallest average spread",
      "str": f"alphabetical by_length {EITHER} join join longest shortest total_length", "char": "count"}  # fmt: skip
BOTH = {"sum": "p + q", "product": "p * q", "difference": "abs(p - q)", "maximum": "max(p, q)", "minimum": "min(p, q)"}
KEYS = {"int": "last_digit digit_sum absolute".split(), "str": "length first_letter last_letter".split()}
THEIR = r"the (sum|total|mean|average|maximum|minimum|product|number|total length) of them\b"
UNPARSED = {r"\b(sum|set|join|sorted|any|all)\(\[(.* for [^\]]*)\]\)": r"\1(\2)",
            r"\b(sum|set|join|sorted|any|all)\(\((.* for .*)\)\)": r"\1(\2)",
            r"(?m)^( *(?:return|[\w, ]+ =)) \(([^()]*, [^()]*|\w+\[.*\], \w+\[.*\])\)$": r"\1 \2"}  # fmt: skip
NUMERIC = ("length", "count_letter")  # maps from a word to a number
WEIGHTS = {1: 2, 2: 4, 3: 3, 4: 1}  # how often train has each level
CHOICES = {"item": "int str", "items": "ints ints strs strs scores", "list": "ints " * 5 + "strs " * 5 + "scores scores count digits text values keys chars"}
ALIKE = ("even odd divisible ending_in", "above below at_least at_most positive negative other_than between", "long short of_length",
         "containing without", "starting_with with_vowel_first", "length count_letter", "first_letter last_letter")  # fmt: skip


class Function:
    """A function of a level, drawn. With `new` its sentence may have phrasings that train never has."""

    def __init__(self, rng, level, new=False, only="", element=""):
        self.rng, self.level, self.new, self.is_new, self.head, self.now = rng, level, new, False, "", element
        self.operations, self.constants, self.names, self.arguments, self.values = [], [], {}, [], {}
        names, (slots, bodies), say = self.draw({only: LEVELS[level][only]} if only else LEVELS[level])
        slots, _, self.calls = slots.partition(":")
        for slot in slots.split():
            self.put(slot)
        name = re.sub("[A-Z]+(?![a-z])", lambda found: self.pick(self.names[found[0]].pop(0)), self.pick(names))
        if rng.random() < 0.1 and not self.calls and not only:
            name = self.pick("f g func solve process run compute".split())
        self.name = name + "_all" * (name == self.values.get("HELPER"))
        given = {"Y": self.name} | dict(zip("AB", (name for name, _ in self.arguments), strict=False))
        # The body, in one of the styles that there are for its operations.
        values = self.values
        bodies = [body for body in bodies.split(" OR ") if values.get("START", "START" not in body)]
        body = self.pick([body for body in bodies if "F{" not in body or values.get("FOLDED", True)])
        body = re.sub(r"\bx\b", self.pick(sorted({"x", "n", "item", "value"} - {*given.values()})), self.fill(body))
        body = re.sub(r"\b[ABY]\b", lambda found: given[found[0]], body)
        body = ast.unparse(ast.parse(f"def f():\n{textwrap.indent(body, ' ')}")).partition("\n")[2] + "\n"
        for pattern, plain in UNPARSED.items():  # ast.unparse puts more brackets than people do
            body = re.sub(pattern, plain, body)
        self.solution = body
        said = self.fill(say(0))
        said = re.sub("(number|count) of the ", r"\1 of ", re.sub(THEIR, r"their \1", said))
        self.key = said, (*self.operations, *self.constants, *(kind for _, kind in self.arguments))
        said = re.sub(r"\b[AB]\b", lambda found: given[found[0]], said)
        self.sentence = said[0].upper() + said[1:]

    def pick(self, options):
        return self.rng.choice(options)

    def fill(self, text):
        """The text with its slots replaced, from the inside out. KeyError where one has nothing."""
        put = lambda found: self.values[found[1]](found[2])
        while (filled := re.sub(r"\b([A-Z]+\d?)\{([^{}]*)\}", put, text)) != text:
            text = filled
        return re.sub(r"\b[A-Z]+\d?\b", lambda found: self.values.get(found[0], found[0]), text)

    def draw(self, operations):
        """(names, code, say) of an operation with its constants put in; say(i) is a phrasing of its group i."""
        alike = " ".join(family for family in ALIKE if {*self.operations} & {*family.split()}).split()
        key = self.pick([key for key in operations if key not in alike and key not in self.operations])
        (names, code, groups), rng = operations[key], self.rng
        drawn = {"K": rng.choice((rng.randint(2, 9), rng.randint(2, 9), rng.choice((10, 12, 15, 20, 25, 30)))),
                 "J": rng.randint(31, 45), "H": rng.randint(2, 5), "C": repr(rng.choice("aeionrst")),
                 "D": repr(rng.choice("_-*ulmd")), "W": repr(rng.choice(["-", ", ", "+", "/", " "])),
                 "Z": rng.choice(("None", "0", "-1") if self.now == "int" else ("None", "''"))}  # fmt: skip
        drawn["ELSE"] = rng.choice((", or Z if there are none", " (Z if there are none)")).replace("Z", drawn["Z"])
        self.operations.append(key)
        self.constants += [str(drawn[letter]) for letter in sorted({*re.findall(r"\b[CDHJKWZ]\b", " ".join(code))})]

        def put(text):
            return re.sub(r"\b[CDHJKWZ]\b(?!\{)|ELSE", lambda found: str(drawn[found[0]]), text)

        def say(i, wanted=""):
            held = self.new and len(groups[i]) > 1 and rng.random() < 0.6
            self.is_new |= held
            texts = groups[i][-1:] if held else groups[i][:-1] or groups[i]
            return put(rng.choice(rng.choice(texts)))

        return names, [*map(put, code)], say

    def put(self, slot):
        """Fill a slot of a template: an argument, an operation, a helper."""
        values, kind, i = self.values, slot.rstrip("123"), slot.lstrip(string.ascii_letters)
        code_of = lambda code: lambda item: f"({re.sub(chr(92) + 'bx' + chr(92) + 'b', lambda _: item, code)})"
        if kind == "P":
            names, (code, opposite), say = self.draw(PREDICATES[self.now])
            verb = say(0)
            values |= {f"P{i}": code_of(code), f"U{i}": code_of(opposite), f"Q{i}": verb, f"R{i}": plural(verb)}
            values |= {"ONE": f"{values.get('S')} that {verb}", "MANY": f"{values.get('N')} that {plural(verb)}"}
            if self.rng.random() < 0.5 and PREDICATES[self.now][self.operations[-1]][2][1:]:
                short, (noun, *where) = say(1), values.get("N", "").split(" ", 1)
                values["MANY"] = short.replace("~", values["N"]) if short[0] == "~" else " ".join([short.replace("~", noun), *where])
        elif kind in ("M", "m"):
            names, (code,), say = self.draw({key: op for key, op in MAPS[self.now].items() if kind == "M" or key not in NUMERIC})
            values |= {f"M{i}": code_of(code), f"V{i}": lambda item: say(0).replace("~", item), f"W{i}": lambda item: say(1).replace("~", item)}
            many = re.fullmatch("the ((?:(?! of ).)*) of ~", say(1))
            if many:
                values["X"] = lambda items: f"the {many[1]}s of {items}"
            self.now = "int" if self.operations[-1] in NUMERIC else self.now
        elif kind == "F":
            names, (code, loop), say = self.draw({key: FOLDS[key] for key in OF[self.now].split() if key != "count" or "M" not in self.names})
            values |= {"F": lambda items: re.sub(r"\bL\b", lambda _: items, code), "FOLDED": code, "START": loop.partition("; ")[0]}
            values |= {"UPDATE": lambda item: loop.partition("; ")[2].replace("ITEM", item), "VALUE": loop.partition(" ")[0]}
            values |= {"G": lambda items: say(0).replace("~", items), "Y": lambda items: say(1).replace("~", items)}
        elif kind == "KEY":
            names, (code,), say = self.draw({key: MAPS[self.now][key] for key in KEYS[self.now]})
            values |= {"KEY": code_of(code), "BY": re.fullmatch("the (.*) of ~", MAPS[self.now][self.operations[-1]][2][1][0][0])[1]}
        elif kind == "BOTH":
            name = self.pick([*BOTH])
            self.operations.append(name)
            values |= {"BOTH": f"({BOTH[name]})", "NAME": name}
            names, kind = [name], "NAME"
        elif kind in ("f", "g"):
            helper = Function(self.rng, 1, self.new, "is_P" if kind == "f" else "M", self.now)
            self.head, self.is_new = helper.prompt() + helper.solution + "\n\n", self.is_new or helper.is_new
            self.operations += helper.operations
            self.constants += helper.constants
            self.now = "int" if helper.operations[-1] in NUMERIC else self.now
            values["HELPER"], names, kind = helper.name, [helper.name], "HELPER"
        else:
            self.argument(kind)
            return
        self.names.setdefault(kind.upper(), []).append(names)

    def argument(self, kind):
        """An argument of a kind, or of a choice of kinds, with the nouns for its elements."""
        kind = self.now if kind == "item" and self.now else self.pick(CHOICES.get(kind, kind).split())
        names, element, nouns, iterable = (*KINDS[kind], "", "", "")[:4]
        name = self.pick([name for name in names.split() if name not in [name for name, _ in self.arguments]])
        if not self.arguments:
            many, _, one = (nouns or "A / A").partition(" / ")
            self.now = element or kind
            self.values |= {"N": many, "S": name.removesuffix("s") if one == "S" else one, "I": iterable}
        self.arguments.append((name, kind))

    def prompt(self, example=""):
        """The source up to the end of the docstring."""
        said = textwrap.fill(self.sentence, 100, break_on_hyphens=False) + example
        names = ", ".join(name for name, _ in self.arguments)
        line = f"class {self.name}:\n" if self.calls else f"def {self.name}({names}):\n"
        return self.head + line + textwrap.indent(f'"""{said}"""\n', "    ")


# ---- examples, tests and mutants -----------------------------------------------------------------------------------

WORDS = """apple river stone cloud tiger house green light paper music ocean bread chair dream eagle flame grape honey
level noon radar anna kayak cat dog sun moon tree a be to tea rain seed nest toast area trainer letter""".split()


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
        text, letter = rng.choice(WORDS), rng.choice(letters)
        text = rng.choice((text, text, text, letter + text, text + letter, text + text[::-1]))
        return rng.choice((text, text.upper(), text.capitalize())) if cased and rng.random() < 0.5 else text

    cased = {"upper_case", "upper", "capitals"} & {*f.operations}
    size = edge if edge < 2 else rng.randint(2, 6)
    if kind in ("int", "str"):
        return (number() if edge else 0) if kind == "int" else (word() if edge else "")
    if kind in ("nat", "pos", "count", "digits"):
        low = kind == "pos"
        return max(low, edge if edge < 2 else rng.randint(2, 12) if kind in ("nat", "count") else rng.choice((rng.randint(2, 300), rng.choice(numbers) ** 2 * rng.randint(1, 9))))
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


def results(source, calls, **scope):
    """The value of each call in a list of one, [] where it raises."""
    exec(compile(source, "<tinypython>", "exec"), scope)
    found = []
    for text in calls:
        setup, _, expression = text.rpartition("\n")
        with contextlib.suppress(Exception):
            exec(setup, scope)
            found.append([eval(expression, scope)])
            continue
        found.append([])
    return found


def example(f, rng):
    """A docstring's example, "" where none is short."""
    calls = [call(f, rng) for _ in range(3)]
    found = zip(calls, results(f.prompt() + f.solution, calls), strict=True)
    found = [(text, repr(*out)) for text, out in found if out and out != [None] and len(text) + len(repr(*out)) < 90]
    text, out = max(found, key=lambda pair: pair[1] not in ("[]", "''", "0", "False"), default=("", ""))
    return "\n\n>>> " + text.replace("\n", "\n>>> ") + f"\n{out}\n" if found else ""


SWAPS = dict(pair.split(":") for pair in r"""==:!= !=:== <=:< >=:> <:<= >:>= +:- -:+ *:+ **:* //:% %:// +=:-= -=:+= *=:+= min:max max:min any:all all:any
and:or or:and upper:lower startswith:endswith endswith:startswith isupper:islower sum:max sorted:list len:sum True:False False:True isdigit:isalpha in:is""".split())


def mutants(text, rng):
    """Programs that differ from a body in one sign, name or constant, in random order."""
    marks = [*re.finditer(r"[=!<>+*/%-]+|\b\w+\b|''", text)]
    for mark in rng.sample(marks, len(marks)):
        word = mark[0]
        others = [SWAPS[word]] if word in SWAPS else [str(int(word) + 1), str(int(word) - 1)] if word.isdigit() else []
        for other in others:
            yield text[: mark.start()] + other + text[mark.end() :]


def tests_of(f, rng):
    """[(call, value)] that tell the solution from constants and from mutants; None if there are none."""
    calls = list(dict.fromkeys(call(f, rng, min(i, 3)) for i in range(50)))
    right = results(f.prompt() + f.solution, calls)
    calls, right = zip(*((text, out) for text, out in zip(calls, right, strict=True) if out), strict=True)
    chosen, wrong = {*range(min(3, len(calls)))}, 0
    for body in mutants(f.solution, rng):
        body = re.sub(r"while (.*):", r"while next(ticks) and \1:", body)  # a mutant may not end
        try:
            found = results(f.prompt() + body, calls, ticks=itertools.repeat(True, 30_000))
        except SyntaxError:
            continue
        differs = [i for i, pair in enumerate(zip(found, right, strict=True)) if pair[0] != pair[1]]
        if differs and not chosen & {*differs}:
            chosen.add(differs[0])
        wrong += bool(differs)
        if wrong == 10:
            break
    rest = (i for i in range(len(calls)) if i not in chosen)
    chosen |= {*itertools.islice(rest, max(0, 5 - len(chosen)))}
    tests = [(calls[i], right[i][0]) for i in sorted(chosen)]
    return tests if 5 <= len(tests) <= 12 and wrong > 2 and len({repr(out) for _, out in tests}) > 1 else None


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
                sentence, what = f.key
                if self.sentences.get(sentence, what) == what:
                    f.combination = tuple(sorted(f.operations))
                    constants = any(held(f.combination, *pair) for pair in enumerate(f.constants))
                    return f, "composed" if len(f.combination) > 2 and held(f.combination) else "constants" if constants else ""

    def train(self, n, levels):
        """n functions as (prompt, solution)."""
        while n:
            f, lacks = self.draw(self.rng, levels)
            if not lacks:
                self.sentences[f.key[0]] = f.key[1]
                self.combinations.add(f.combination)
                yield f.prompt(example(f, self.rng) if self.rng.random() < 0.5 else ""), f.solution
                n -= 1

    def tasks(self, split, count, levels):
        """Up to so many tasks of a split, when train has been drawn."""
        rng = random.Random(f"{self.seed} {split}")
        for _ in range(count * 1000):
            f, lacks = self.draw(rng, levels, split == "phrased")
            lacks = "phrased" if f.is_new and not lacks else lacks
            if f.key[0] in self.sentences or lacks != split and not (split == "level4" and lacks):
                continue
            if lacks != "composed" and f.combination not in self.combinations:
                continue
            tests = tests_of(f, rng)
            if tests:
                self.sentences[f.key[0]] = f.key[1]
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
    lines = [found.span() for found in re.finditer(r".*\n", text)]
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
    print(f"wrote {out}: {cfg.n:,} functions, tasks: " + ", ".join(f"{split} {count:,}" for split, count in counts.items()))


if __name__ == "__main__":
    import runs

    runs.command(main, Config, __doc__)
