"""Rewards of completions: f(completions, rows, **options) -> a reward per completion, None where there is none.

rows[i] holds "test_cases" and "tokens" of completion i; options are the fields of sandbox.Options.
"""

import math
import runpy
from pathlib import Path

from sandbox import CORES, Options, Probe, run_tests


def block(completion):
    """The code of a completion that holds one block, fenced by ```python and ```, and ends with it and one newline."""
    _, *rest = completion.split("```")
    if len(rest) != 2 or rest[1] != "\n" or not rest[0].startswith("python\n"):
        return None
    return rest[0].removeprefix("python\n")


PARSE = "try:\n    good = bool(ast.parse({!r}))\nexcept (SyntaxError, ValueError):\n    good = False\ngood"


def parses(sources, options, exhausted=False):
    """Whether each text is Python, by a parser in the sandbox: None where that failed, `exhausted` where it crashed."""
    workers = options.workers or CORES
    program = "import ast, warnings\nwarnings.simplefilter('ignore')"
    tests = [Probe(PARSE.format(source)) for source in sources]
    shares = [tests[i::workers] for i in range(workers)]
    limits = {"timeout_s": options.timeout_s, "program_s": options.timeout_s * len(sources) + 30}
    limits |= {"runner": options.runner, "e2b_router_url": options.e2b_router_url}
    good = [None] * len(sources)
    for i, result in enumerate(run_tests([program] * workers, shares, workers=workers, allow_unsafe=True, **limits)):
        if result.rate is not None:
            good[i::workers] = [exhausted if value is None else value for value in result.values]
    return good


def code_format(completions, rows, **options):
    """1.0 if a completion ends in its only fenced Python block and a newline, and that parses; 0.5 if not; 0.0 else.

    None where the sandbox failed; parity: also where the reference raises, at code that exhausts the parser.
    Ref: Open-R1's code_format_reward as used by Coupled-GRPO, arXiv:2506.20639.
    """
    options = Options(**options)
    exhausted = None if options.parity else False
    sources = {i: source.strip() for i, source in enumerate(map(block, completions)) if source is not None}
    rewards = [0.0] * len(completions)
    for i, good in zip(sources, parses([*sources.values()], options, exhausted), strict=True):
        rewards[i] = {True: 1.0, False: 0.5, None: None}[good]
    return rewards


def syntax(completions, rows, **options):
    """1.0 if the code parses, else 0.0: the fenced block of a completion in code_format's form, or all of it."""
    blocks = map(block, completions)
    sources = [completion if code is None else code for completion, code in zip(completions, blocks, strict=True)]
    return [good if good is None else float(good) for good in parses(sources, Options(**options))]


def code(completions, rows, **options):
    """Share of rows[i]["test_cases"] that completion i passes, verdicts in rows[i]; 0.0 unless its code_format is 1.0.

    0.0 without tests, None where the sandbox failed. parity: the exit status is the verdict, so sys.exit(0) passes; one
    timeout makes the whole completion 0.0.
    Ref: Open-R1's code_reward as used by Coupled-GRPO, arXiv:2506.20639.
    """
    forms = code_format(completions, rows, **options)
    rewards = [None if form is None else 0.0 for form in forms]
    good = [i for i, form in enumerate(forms) if form == 1.0]
    results = run_tests([block(completions[i]) for i in good], [rows[i]["test_cases"] for i in good], **options)
    for i, result in zip(good, results, strict=True):
        late = options.get("parity") and "timeout" in result.verdicts
        rewards[i] = 0.0 if late else result.rate
        rows[i]["verdicts"] = result.verdicts
    return rewards


def binary_code(completions, rows, **options):
    """1.0 if all tests pass, else 0.0; None as `code`."""
    return [rate if rate is None else float(rate > 0.99) for rate in code(completions, rows, **options)]


def soft_overlong(completions, rows, **options):
    """0 up to max_tokens - overlong_tokens tokens (rows[i]["tokens"]), then falling linearly to -1 at max_tokens.

    Ref: DAPO, arXiv:2503.14476, eq. 13.
    """
    options = Options(**options)
    first = options.max_tokens - options.overlong_tokens
    return [-min(1.0, max(0.0, (row["tokens"] - first) / max(1, options.overlong_tokens))) for row in rows]


def repetition(completions, rows, **options):
    """max_penalty * (1 - distinct n-grams / all n-grams) of lower-case words; 0.0 with fewer than `ngram` words.

    Ref: Demystifying Long Chain-of-Thought, arXiv:2502.03373, appendix.
    """
    options = Options(**options)
    rewards = []
    for words in (completion.lower().split() for completion in completions):
        grams = list(zip(*(words[i:] for i in range(options.ngram)), strict=False))
        rewards.append(options.max_penalty * (1 - len(set(grams)) / len(grams)) if grams else 0.0)
    return rewards


TESTED = {code, binary_code}  # these run tests; the others need neither tests nor a safe sandbox
REWARDS = {reward.__name__: reward for reward in (code, binary_code, code_format, syntax, soft_overlong, repetition)}


def find_reward(name):
    """A function of REWARDS by its name, or your own by `file.py:function`; ValueError if there is none."""
    if name in REWARDS:
        return REWARDS[name]
    path, _, function = name.rpartition(":")
    reward = runpy.run_path(path).get(function) if Path(path).is_file() else None
    if not callable(reward):
        raise ValueError(f"no reward {name!r}; there are {', '.join(REWARDS)}, and your own as file.py:function")
    return reward


def score(rows, rewards, **options):
    """Rewards of completions, a list for each row, nan for None; rewards are {name: function}. Equal ones run once.

    Rows hold "text", the completion, "test_cases", "tokens"; the verdicts of the tests are left in them. RuntimeError
    names a function that fails.
    """
    keys = [(row["text"], id(row["test_cases"]), row["tokens"]) for row in rows]
    different = {}
    for key, row in zip(keys, rows, strict=True):
        different.setdefault(key, row)
    texts, columns = [row["text"] for row in different.values()], []
    for name, function in rewards.items():
        try:
            values = zip(different, function(texts, [*different.values()], **options), strict=True)
            columns.append({key: math.nan if value is None else float(value) for key, value in values})
        except Exception as error:  # whatever a user's function raises
            what = f"raised {type(error).__name__}: {error}; mend it, then go on with --resume"
            raise RuntimeError(f"the reward {name} {what}") from error
    for key, row in zip(keys, rows, strict=True):
        row["verdicts"] = different[key].get("verdicts", [])
    return [[values[key] for values in columns] for key in keys]
