"""What every harness makes of the same texts, and which rule of which harness lost what.

    python bench/explain.py --task=humaneval --samples=out/humaneval/samples.jsonl

Cuts each text of --samples as every record of HARNESSES does, and runs the candidates on the same
tests. Reads JSON
lines: samples.jsonl of a run of benchmarks.py, or lines with "task_id" and "completion". Prints a
table and writes explain.json into --out. Prompts, tests and limits are the same in all rows; only
the cuts differ.

HARNESSES holds the records of protocols.py, older versions of the same harnesses, and harnesses
that no paper on diffusion language models quotes or only DARE does: bigcode-evaluation-harness
8fc5bae, simple-evals ee3b031, DARE's OpenCompass 83ae8a3. Its names are those of the golden files,
tests/golden/protocols; equal versions share a record.
"""

import ast
import collections
import dataclasses
import functools
import itertools
import json
import re
import sys
import typing
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import benchmarks
import problems as tasks
import protocols
import runs
import sandbox


@dataclasses.dataclass(frozen=True)
class Config:
    task: typing.Literal["humaneval", "mbpp", "humaneval+", "mbpp+"] = "humaneval"  # which problems
    # JSON lines with the texts that a model wrote, such as samples.jsonl of benchmarks.py
    samples: str = ""
    out: str = ""  # folder for explain.json; "" is out/<task>
    tasks_file: str = ""  # the official file, .gz or not; "" downloads it
    downloads: str = "data/tasks"  # folder for downloaded files
    split: typing.Literal["test", "all"] = "test"  # MBPP: ids 11-510 (257 problems), or all 427
    problems: int = 0  # only the first N problems; 0 takes all
    json: bool = False  # print the report as one JSON line instead of text
    sandbox: benchmarks.SandboxFlags = dataclasses.field(default_factory=benchmarks.SandboxFlags)


# ---- harnesses beyond protocols.py ---------------------------------------------------------------------------------


def prepend_bare_prompt(text, q):
    return q.prompt.strip() + text


def simple_evals_fence(text, q):
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return blocks[0] if blocks else text


def without_signature(text, q):
    return text[text.find(":\n    ") + 2 :]  # where there is none, all but the first character


def ask_docstring(q, solved):
    return f'"""\n{q.text}\n{q.tests[0]}\n"""\n'


def lm_eval_fence(text, q):
    """The first block of a text that began inside one. A leading word counts as the block's
    language.
    """
    blocks = re.findall(r"```(?:\w+)?\n?(.*?)\n?```", "```" + text, re.DOTALL)
    return blocks[0] if blocks else ""


def opencompass_fence(text, q):
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    return blocks[0] if blocks else text


def strip_left(text, q):
    return text.lstrip()


BEGINS = r"\[BEGIN\]\s*'", r"BEGIN\s*'", r"\[BEGIN\]\s*", r"BEGIN\s*"
ENDINGS = r"'\s*\[DONE\]", r"'\s*DONE", r"\s*\[DONE\]", r"\s*DONE"
# tried in this order: quoted answers, those without the second quote, without any, then fences
PATTERNS = [
    *(begin + "(.*)" + end for begin, end in (
        (BEGINS[0], ENDINGS[0]), (BEGINS[1], ENDINGS[0]), (BEGINS[0], ENDINGS[1]), (BEGINS[1], ENDINGS[1]),
        (BEGINS[0], ENDINGS[2]), (BEGINS[1], ENDINGS[2]), (BEGINS[0], ENDINGS[3]), (BEGINS[1], ENDINGS[3]),
        (BEGINS[2], ENDINGS[2]), (BEGINS[3], ENDINGS[2]), (BEGINS[2], ENDINGS[3]), (BEGINS[3], ENDINGS[3]),
    )),
    r"```python\s*(.*)\s*```", r"```\s*(.*)\s*```", r"```python\s*(.*)\s*$", r"```\s*(.*)\s*$", r"(.*)\s*```.*",
    r"\[BEGIN\]\s*'(.*)", r"\[BEGIN\](.*)", r"'(.*)'\s*\[DONE\]",
]  # fmt: skip


def opencompass_answer(text, q):
    """The match of the first pattern that fits, without fences, [DONE] and quotes."""
    match = next(
        (m for m in (re.search(pattern, text, re.DOTALL) for pattern in PATTERNS) if m), None
    )
    text = match[1] if match else text
    text = re.split(r"'?\s*\[?DONE\]?", text.split("```")[0])[0].replace("\\_", "_").strip()
    return text.removeprefix("'").removesuffix("'")


def ask_opencompass(q, solved):
    """Each solved problem is a turn of the chat; answers are quoted; asserts end in a space, but
    the very first.
    """
    chat = ""
    for shot in solved:
        asserts = "".join(f"{test.strip()} \n" for test in shot.tests)
        asserts = asserts if chat else asserts.replace(" \n", "\n", 1)
        chat += f"{protocols.EXPERT} {shot.text} Your code should pass these tests:\n\n {asserts}<|im_end|>\n"
        chat += f"<|im_start|>assistant\n[BEGIN]\n '{shot.code.strip()}' \n[DONE] \n\n <|im_end|>\n<|im_start|>user\n"
    asserts = "\n".join(q.tests)
    return f"{chat}{protocols.EXPERT} {q.text} Your code should pass these tests:\n\n {asserts}  \n"


EXPERT_BLOCK = protocols.EXPERT + "\n{text}\nYour code should pass these tests:\n{tests}"
READ = "Read the following function signature and docstring, and fully implement the function described."
BIGCODE_STOPS = (
    "\nclass",
    "\ndef",
    "\n#",
    "\n@",
    "\nprint",
    "\nif",
    "\n```",
    "<file_sep>",
    "<|endoftext|>",
)
BIGCODE_MBPP_STOPS = (
    "\nclass",
    "\nassert",
    '\n"""',
    "\nprint",
    "\nif",
    "\n<|/",
    "\n```",
    "<|endoftext|>",
)
KNOWN = protocols.PROTOCOLS


def evalplus_031(name):
    """Version 0.3.1: colours stay, and the least limit is 1 s. It never passes HumanEval/32,
    whatever is written.
    """
    record = KNOWN[name]
    rules = tuple(rule for rule in record.rules if rule is not protocols.without_colours)
    return record._replace(rules=rules, limit_s=1)


# Of prompt and answer together BigCode allows 512 tokens.
BIGCODE = protocols.Protocol(
    protocols.asks("{stripped}"), temperature=0.2, top_p=0.95, ends=(), stops=BIGCODE_STOPS,
    rules=(prepend_bare_prompt,), frame=("\n", ""),
)  # fmt: skip
LM_EVAL_BLOCK = protocols.Protocol(
    protocols.asks(EXPERT_BLOCK, answer="\n```python\n{code}\n```\n\n"), ("mbpp",), system=protocols.ASSISTANT,
    prefix="\n```python\n", trims=True, shots=3, max_new=256, drops=True, rules=(lm_eval_fence,),
)  # fmt: skip
OTHERS = {
    "bigcode/humaneval": BIGCODE,
    "bigcode/humaneval-unstripped": BIGCODE._replace(ask=protocols.ask_prompt, rules=(protocols.prepend_prompt,)),
    "bigcode/mbpp": protocols.Protocol(
        ask_docstring, ("mbpp",), temperature=0.2, top_p=0.95, ends=(), stops=BIGCODE_MBPP_STOPS,
        rules=(protocols.prepend_prompt,),
    ),
    "simple_evals/humaneval": protocols.Protocol(
        protocols.asks(READ + " Your response should only contain the code for this function.\n{prompt}"), ends=(),
        drops=True, rules=(simple_evals_fence, without_signature), prompt_first=True,
    ),
    # the score that lm_eval itself prints of Dream's base model, which Dream does not use
    "dream_base_lm_eval/humaneval": KNOWN["dream_base/humaneval"]._replace(
        stops=protocols.CHEN, stop_rule="none", rules=(protocols.prepend_prompt,)
    ),
    "lm_eval_head/mbpp_instruct": LM_EVAL_BLOCK,
    "lm_eval_0.4.9.2/mbpp_instruct": LM_EVAL_BLOCK._replace(
        ask=protocols.asks(EXPERT_BLOCK, answer="\n```python\n {code}\n```\n\n")
    ),
    # DARE's OpenCompass: it quotes 78.05 % on HumanEval and 56.40 % on MBPP for Dream-Instruct.
    "opencompass_dare/humaneval": protocols.Protocol(
        protocols.asks("Complete the following python code:\n{prompt}"), system=protocols.ASSISTANT, temperature=0.2,
        top_p=0.95, ends=(), drops=True, rules=(opencompass_fence, strip_left), prompt_first=True,
    ),
    "opencompass_dare/mbpp": protocols.Protocol(
        ask_opencompass, ("mbpp",), system=protocols.ASSISTANT, shots=3, temperature=0.2, top_p=0.95, ends=(),
        drops=True, rules=(opencompass_answer,), limit_s=9,
    ),
    "evalplus_0.3.1_base/humaneval": evalplus_031("evalplus_base/humaneval"),
    "evalplus_0.3.1_base/mbpp": evalplus_031("evalplus_base/mbpp"),
    "evalplus_0.3.1_instruct/humaneval": evalplus_031("evalplus_instruct/humaneval"),
    "evalplus_0.3.1_instruct/mbpp": evalplus_031("evalplus_instruct/mbpp"),
}  # fmt: skip
ALIASES = {  # name in the golden files -> record of protocols.py that equals it
    "dream_base_mbpp/mbpp": "dream_base/mbpp",
    "lm_eval_0.4.8/humaneval": "lm_eval/humaneval",
    "lm_eval_0.4.8/mbpp": "lm_eval/mbpp",
    "lm_eval_0.4.9.2/humaneval": "lm_eval/humaneval",
    "lm_eval_0.4.9.2/mbpp": "lm_eval/mbpp",
    "lm_eval_0.4.9.2/humaneval_instruct": "lm_eval/humaneval_instruct",
    "lm_eval_head/humaneval": "lm_eval/humaneval",
    "lm_eval_head/mbpp": "lm_eval/mbpp",
    "lm_eval_head/humaneval_instruct": "lm_eval/humaneval_instruct",
    "evalplus_head_base/humaneval": "evalplus_base/humaneval",
    "evalplus_head_base/mbpp": "evalplus_base/mbpp",
    "evalplus_head_instruct/humaneval": "evalplus_instruct/humaneval",
    "evalplus_head_instruct/mbpp": "evalplus_instruct/mbpp",
}
HARNESSES = KNOWN | OTHERS | {alias: KNOWN[name] for alias, name in ALIASES.items()}

# ---- which rule lost a text ----------------------------------------------------------------------------------------

LABELS = {  # step of a protocol -> its name in the table
    protocols.without_special: "special tokens are removed, what follows them stays",
    protocols.prepend_prompt: "the prompt goes in front",
    protocols.prepend_prompt_line: "the prompt and a newline go in front",
    protocols.prepend_stripped_prompt: "the stripped prompt goes in front",
    prepend_bare_prompt: "the stripped prompt goes in front, without a newline",
    protocols.tabs_to_spaces: "a tab is four spaces",
    protocols.first_10000: "only 10,000 characters",
    protocols.without_colours: "no colours",
    protocols.without_future: "no import from the future",
    protocols.dream_fence: "code follows ```python",
    protocols.dream_sanitize: "Dream's sanitiser",
    protocols.evalplus_sanitize: "EvalPlus' sanitiser",
    lm_eval_fence: "the first block counts, a leading word is its language",
    opencompass_fence: "the first block counts",
    opencompass_answer: "the first of twenty patterns counts",
    strip_left: "no spaces in front",
    simple_evals_fence: "the first ```python block counts",
    without_signature: "no signature",
}
NO_SINGLE_RULE = "no single rule"


def label(step, text, q):
    """The name of a step, which is about to change `text`, in the table."""
    if not isinstance(step, functools.partial):
        return LABELS[step]
    if step.func is protocols.extracted:
        return "code is looked for everywhere"
    hit = min(
        (stop for stop in step.args[0] if stop in text), key=text.find, default="no stop string"
    )
    return f"{hit!r} ends it"


def apply(steps, text, q):
    """The candidate that these steps make of a text; "" where the harness itself would raise."""
    try:
        for step in steps:
            text = step(text, q)
    except (SyntaxError, ValueError, RecursionError):
        return ""
    return text


def suspects(record, text, q):
    """[(name in the table, candidate without the rule)]: without each rule, without its stop
    strings together.
    """
    steps, found = protocols.steps(record), []
    for i, step in enumerate(steps):
        found.append(
            (label(step, apply(steps[:i], text, q), q), apply(steps[:i] + steps[i + 1 :], text, q))
        )
    kept = [step for step in steps if getattr(step, "func", None) is not protocols.cut_at]
    return [*found, ("its stop strings together", apply(kept, text, q))]


def unexplained(code, q):
    """Why a program fails although no single rule spoilt it."""
    if "```" in code:
        return "no rule: ``` stays"
    if protocols.SPECIAL.search(code) or protocols.first_of(code, protocols.NO_ANSWER) < len(code):
        return "no rule: special tokens stay"
    if not protocols.parses(code):
        return "no rule: text that is not Python stays"
    functions = [
        n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.FunctionDef) and n.name == q.entry
    ]
    return (
        NO_SINGLE_RULE
        if any(map(protocols.has_return, functions))
        else "no rule: the function is missing"
    )


def groups(task):
    """[[name, ...]] of the harnesses of a task; those of a group cut and run texts alike."""
    found = {}
    for name, record in HARNESSES.items():
        if name.split("/")[1].startswith(task.rstrip("+")):
            alike = (
                record.ends,
                record.drops,
                record.stop_rule,
                record.stops,
                record.rules,
                record.prompt_first,
            )
            found.setdefault(alike, []).append(name)
    return list(found.values())


# ---- the table -----------------------------------------------------------------------------------------------------


def main(cfg):
    """Score the texts of --samples as every harness cuts them, by the same tests: the report.

    A harness lost a text that fails under it and passes under another. The rule to blame is the
    first one without which the text passes.
    """
    if not cfg.samples:
        raise ValueError(
            "--samples=FILE is missing: texts that a model wrote, such as samples.jsonl of benchmarks.py"
        )
    shared = {
        f.name: getattr(cfg, f.name)
        for f in dataclasses.fields(cfg)
        if f.name not in ("out", "json")
    }
    bench = benchmarks.resolve(benchmarks.Config(**shared))
    problems, out = tasks.read_problems(bench), Path(cfg.out or f"out/{cfg.task}")
    texts, asked = read_texts(bench, problems)
    names = groups(cfg.task)

    def program(name, sample, code):
        """(key, program) of a candidate."""
        return sample[0], protocols.program(HARNESSES[name], code, problems[sample[0]].asked)

    programs = {}  # {(harness, sample): (key, program)}
    for (name, *_), (sample, text) in itertools.product(names, texts.items()):
        code = apply(protocols.steps(HARNESSES[name]), text, problems[sample[0]].asked)
        programs[name, sample] = program(name, sample, code)
    passed = run_distinct(bench, problems, programs.values(), {})
    solved = {sample for (_, sample), which in programs.items() if passed[which]}
    repaired = {}  # {(harness, lost sample): [(rule, program without it)]}
    for (name, sample), which in programs.items():
        if sample in solved and not passed[which]:
            found = suspects(HARNESSES[name], texts[sample], problems[sample[0]].asked)
            repaired[name, sample] = [(rule, program(name, sample, code)) for rule, code in found]
    passed = run_distinct(
        bench, problems, [which for each in repaired.values() for _, which in each], passed
    )
    table = [table_row(alike[0], problems, texts, programs, repaired, passed) for alike in names]
    for row, alike in zip(table, names, strict=True):
        row["protocols"] = [name.removesuffix(f"/{cfg.task.rstrip('+')}") for name in alike]
    table.sort(key=lambda row: -row["passed"])
    report = {
        "task": cfg.task,
        "problems": len({key for key, _ in texts}),
        "samples": len(texts),
        "solved": len(solved),
    }
    report |= {"asked_by": asked, "timeout_s": bench.sandbox.timeout_s, "table": table}
    report["tasks_sha256"] = benchmarks.sha256(*tasks.task_files(bench))
    report |= {"samples_sha256": benchmarks.sha256(cfg.samples), "version": benchmarks.VERSION}
    out.mkdir(parents=True, exist_ok=True)
    runs.write(out / "explain.json", report)
    print(json.dumps(report) if cfg.json else describe(report), flush=True)
    return report


def read_texts(cfg, problems):
    """({sample: the text as written}, protocols that the file names). ValueError for a text that is
    cut already.
    """
    texts, asked = {}, set()
    for sample, row in benchmarks.given_rows(cfg, problems).items():
        if "protocol" in row and "written" not in row:
            cut = f"{cfg.samples}: {row['task_id']} was cut by --protocol={row['protocol']} already"
            raise ValueError(f"{cut}; the text as written is needed, as in samples.jsonl")
        texts[sample] = next(row[key] for key in ("written", *benchmarks.SAMPLE) if key in row)
        asked |= {row["protocol"]} if "protocol" in row else set()
    in_order = sorted(texts, key=lambda sample: ([*problems].index(sample[0]), sample[1]))
    return {sample: texts[sample] for sample in in_order}, sorted(asked)


def table_row(name, problems, texts, programs, repaired, passed):
    """The row of a harness: texts that pass, pass@1, and the ids that each rule lost."""
    lost, rates, functions = collections.defaultdict(list), collections.defaultdict(list), 0
    for sample in texts:
        key, code = programs[name, sample]
        rates[key].append(passed[key, code])
        reason = unexplained(code, problems[key].asked)
        functions += reason == NO_SINGLE_RULE  # a function that returns something, right or wrong
        if (name, sample) in repaired:
            rules = repaired[name, sample]
            reason = unexplained(rules[-1][1][1], problems[key].asked)
            lost[next((rule for rule, which in rules if passed[which]), reason)].append(
                problems[key].id
            )
    means = [sum(each) / len(each) for each in rates.values()]
    row = {"passed": sum(map(sum, rates.values())), "samples": len(texts), "functions": functions}
    row["pass@1"] = [float(np.mean(means)), *benchmarks.interval(means)]
    return row | {"lost": dict(sorted(lost.items(), key=lambda item: -len(item[1])))}


def run_distinct(cfg, problems, pairs, known):
    """{(key, program): whether it passes}, with those in `known`; every program runs once."""
    new = [pair for pair in dict.fromkeys(pairs) if pair not in known]
    print(f"running {len(new):,} programs", file=sys.stderr, flush=True)
    flags, limit, found = dataclasses.asdict(cfg.sandbox), cfg.sandbox.timeout_s, dict(known)
    record = benchmarks.protocol_of(cfg)[1]
    expected = tasks.expectations(cfg.task, problems, {key for key, _ in new}, {}, flags)
    for key, complaint in expected.items():
        if isinstance(complaint, str):
            raise RuntimeError(
                f"the reference solution of {problems[key].id} does not run here: {complaint}"
            )
    # inputs and results of all problems would fill the memory
    for first in range(0, len(new), 200):
        batch = new[first : first + 200]
        tests = [
            tasks.hidden_tests(problems[key], expected.get(key), code, limit, record)
            for key, code in batch
        ]
        results = sandbox.run_tests(
            [code for _, code in batch], tests, **flags | tasks.options(cfg.task, tests, limit)
        )
        for (key, code), result in zip(batch, results, strict=True):
            if result.rate is None:
                raise RuntimeError(
                    f"a program for {problems[key].id} could not be run: {result.error}"
                )
            found[key, code] = tasks.hidden_verdict(problems[key], result)["passed"]
    return found


def describe(report):
    """The report as text: a line for each row, and below it what it lost by which rule."""
    lines = [
        "{task}: {samples:,} texts of {problems} problems; {solved:,} pass under at least one protocol".format(
            **report
        )
    ]
    asked = " and ".join(report["asked_by"]) or "a protocol that the file does not name"
    lines += [
        f"asked for by {asked}; prompts, tests and limits are the same in all rows, only the cuts differ"
    ]
    lines += ["functions: texts with a whole function that returns something, right or wrong"]
    for row in report["table"]:
        mean, low, high = (100 * x for x in row["pass@1"])
        score = f"{row['passed']:5,} of {row['samples']:,}, pass@1 {mean:5.1f} % ({low:.1f} to {high:.1f})"
        lines.append(f"{score}, {row['functions']:3,} functions  {', '.join(row['protocols'])}")
        for rule, ids in row["lost"].items():
            distinct = [str(i) for i in dict.fromkeys(ids)]
            more = f" and {len(distinct) - 6} more" if len(distinct) > 6 else ""
            lines.append(f"       -{len(ids):<4} {rule}: {', '.join(distinct[:6])}{more}")
    hashes = "tasks {tasks_sha256:.12}, samples {samples_sha256:.12}, scorer {version}; all ids: explain.json"
    return "\n".join([*lines, hashes.format(**report)])


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
