"""Tasks for reinforcement learning: programming questions with tests, as JSON lines that
coupled_grpo.py reads.

    python rl_tasks.py --tokenizer=out/diffucoder/tokenizer.json --out=data/acecode    # needs: pip install datasets
    python rl_tasks.py --roots rows.jsonl --difficulty=all --out=data/mine    # files in AceCode's form, no download

A task is a line {"question", "test_cases"}, asked by the model's chat template, or {"prompt",
"test_cases"}, the beginning of a program. Questions come from AceCode-87K, a download of 1 GB; the
pass rates of its models say how hard one is, see choose(). It comes again as a function to complete
if its best solution begins with one. Left out are tests that do not parse, rows without tests,
repeated questions and, given --tokenizer, prompts over --max_prompt.

Writes --out: train.jsonl, heldout.jsonl, with --humaneval its problems as humaneval.jsonl and, last
of all, meta.json with what was left out and why.

Axes: N rows.
"""

import ast
import contextlib
import dataclasses
import gzip
import hashlib
import itertools
import json
import typing
import warnings
import zlib
from pathlib import Path

import numpy as np
import tokenizers
from tqdm import tqdm

import runs
from runs import Count, Natural, Share

ACECODE = "TIGER-Lab/AceCode-87K"  # the data set on Hugging Face, or a folder of the same
# what a task keeps of AceCode's columns
TASK = ("id", "source", "question", "test_cases", "context_messages")
COUNTED = ("qwen_coder_2.5", "llama3_instruct")  # the models whose pass rates say how hard a row is
BROKEN = EOFError, zlib.error, gzip.BadGzipFile  # what a damaged .gz raises
SYSTEM = "You are a helpful assistant."
# Qwen2.5's
CHAT = "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@dataclasses.dataclass(frozen=True)
class Config:
    # JSONL files in AceCode's form, or folders of them; none downloads AceCode-87K
    roots: tuple[str, ...] = ()
    out: str = "data/acecode"  # folder to write
    # by the pass rates of AceCode's models
    difficulty: typing.Literal["easy", "medium", "hard", "all"] = "hard"
    # tokenizer.json of the model to be trained; "" leaves prompts of any length in
    tokenizer: str = ""
    # tokens of the longest prompt, with Qwen's chat template; counted with --tokenizer
    max_prompt: Count = 200
    heldout: Share = 0.02  # fraction of the questions held out
    seed: Natural = 0  # of the held-out draw
    # HumanEval.jsonl.gz, to evaluate on while training: written as tasks, humaneval.jsonl
    humaneval: str = ""


def main(cfg):
    out, paths = Path(cfg.out), files_below(cfg.roots)
    targets = {(out / f"{name}.jsonl").resolve() for name in ("train", "heldout", "humaneval")}
    made_here = any((out / name).exists() for name in (".lock", "meta.json"))
    kept = [*paths, *filter(None, [cfg.humaneval]), *([] if made_here else out.glob("*"))]
    if lost := targets & {Path(path).resolve() for path in kept}:
        raise ValueError(f"{lost.pop()} would be written over: choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    with runs.lock(out / ".lock"):
        # the same settings and files give the same bytes
        inputs = [cfg.tokenizer, cfg.humaneval, *paths]
        settings = {
            name: getattr(cfg, name) for name in ("difficulty", "max_prompt", "heldout", "seed")
        }
        settings["inputs"] = [
            path and hashlib.sha256(runs.as_path(path).read_bytes()).hexdigest() for path in inputs
        ]
        meta = runs.read_json(out / "meta.json") if (out / "meta.json").exists() else {}
        if meta and meta.get("settings") != settings:
            raise ValueError(
                f"{out} holds tasks of other settings or files; choose another --out or delete it"
            )
        names = ("train", "heldout", "humaneval") if cfg.humaneval else ("train", "heldout")
        if meta and all((out / f"{name}.jsonl").exists() for name in names):
            print(f"{out} is complete, nothing to do")
            return
        meta = write_acecode(cfg, out, paths)
        runs.write(out / "meta.json", {"settings": settings} | meta)
        print(
            f"wrote {out}: "
            + ", ".join(f"{split} {count:,} tasks" for split, count in meta["tasks"].items())
        )


def files_below(roots):
    """Paths of the JSONL files below these roots, sorted by their names there; or these files."""
    found = []
    for root in map(Path, roots):
        root.stat()  # raises if it does not exist
        folder, paths = (root.parent, [root]) if root.is_file() else (root, root.rglob("*.jsonl"))
        found += [(str(path.relative_to(folder)), str(path)) for path in paths]
    if roots and not found:
        raise ValueError(f"no .jsonl files below {', '.join(roots)}; name other folders")
    return [path for _, path in sorted(found)]


# ---- AceCode -------------------------------------------------------------------------------------------------------


def write_acecode(cfg, out, paths):
    """Write the tasks of AceCode; returns what meta.json says of them. A task and its twin are in
    the same split.
    """
    if cfg.humaneval:
        lines = (json.dumps(task) + "\n" for task in humaneval_tasks(cfg.humaneval))
        runs.write(out / "humaneval.jsonl", "".join(lines).encode())
    tokenizer = None
    if cfg.tokenizer:
        try:
            tokenizer = tokenizers.Tokenizer.from_file(cfg.tokenizer)
        except Exception as error:  # tokenizers raises no narrower class
            why = runs.first_line(error)
            raise ValueError(
                f"--tokenizer={cfg.tokenizer} cannot be read ({why}); name another"
            ) from None
        tokenizer.no_truncation()  # or a long prompt would look short
    hub = None if paths else download()

    def read():
        return tqdm(read_acecode(paths) if paths else hub, "reading", unit=" rows", disable=None)

    # Percentiles are over all rows, so these are read twice: first for their rates, then for what
    # is kept.
    rates_N2 = np.array([pass_rates(row) for row in read()], np.float64).reshape(-1, 2)
    kept_N = choose(rates_N2, cfg.difficulty)
    without_N = np.isnan(rates_N2[:, 0]) & ~kept_N
    dropped = {
        "without_rates": int(without_N.sum()),
        "difficulty": int((~kept_N & ~without_N).sum()),
    }

    # Whether a question is held out depends on the seed and its id alone.
    tasks = itertools.chain.from_iterable(
        with_twin(row) for row in itertools.compress(read(), kept_N)
    )
    counts = {"train": 0, "heldout": 0}
    with runs.writing(out / "train.jsonl") as train, runs.writing(out / "heldout.jsonl") as heldout:
        for task in clean(tasks, dropped, tokenizer, cfg.max_prompt):
            digest = hashlib.sha256(repr((cfg.seed, task["id"])).encode()).digest()
            split = "heldout" if int.from_bytes(digest[:8]) / 2**64 < cfg.heldout else "train"
            counts[split] += 1
            (heldout if split == "heldout" else train).write((json.dumps(task) + "\n").encode())
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in dropped.items())
        if not counts["train"]:
            raise ValueError(
                f"no task is left to train on (dropped: {reasons}); give more rows, or lower --heldout"
            )
    print(f"{len(kept_N):,} rows | dropped: {reasons}")
    if not tokenizer:
        print(
            "prompts were not measured: pass the model's --tokenizer to leave out those over --max_prompt tokens"
        )
    return {"rows": len(kept_N), "tasks": counts, "dropped": dropped}


def download():
    """The rows of AceCode-87K, by the library datasets."""
    try:
        import datasets

        return datasets.load_dataset(ACECODE, split="train")
    except Exception as error:  # of the import, datasets, the network: there is no narrower class
        advice = "pip install datasets, try again, or name JSONL files of its form with --roots"
        raise ValueError(
            f"{ACECODE} cannot be downloaded ({runs.first_line(error)}); {advice}"
        ) from None


def read_acecode(paths):
    """The rows of JSONL files, dictionaries. ValueError names a line that is no row of AceCode."""
    for path in paths:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        row = json.loads(line)
                        texts = [row["id"], row["source"], row["question"]] + row["test_cases"]
                        for answer in row["inferences"]:
                            texts += [
                                answer["model_name"],
                                answer["completion"],
                                str(0.0 + answer["pass_rate"]),
                            ]
                        "".join(texts).encode()  # half a surrogate pair cannot be
                        row["context_messages"]
                    except (ValueError, RecursionError, KeyError, TypeError):
                        columns = ", ".join((*TASK, "inferences"))
                        raise ValueError(
                            f"{path}: line {number} is no row of AceCode, {columns} in JSON"
                        ) from None
                    yield row


def pass_rates(row):
    """(mean, standard deviation) of the counted models' pass rates; nan without any."""
    rates = [answer["pass_rate"] for answer in row["inferences"] if answer["model_name"] in COUNTED]
    return (np.mean(rates), np.std(rates)) if rates else (np.nan, np.nan)


def choose(rates_N2, difficulty):
    """bool_N: the rows of a difficulty, given pass_rates; one without rates has none and is in
    "all" alone.

    hard: mean <= its 20th percentile and deviation >= its 40th; medium: mean between the 25th and
    75th; easy: mean >= the 75th. Percentiles are over all rows with rates, linear and inclusive.
    Ref: the data script of Coupled-GRPO.
    """
    mean_N, std_N = rates_N2.T
    known_N = ~np.isnan(mean_N)
    if difficulty == "all" or not known_N.any():
        return known_N | (difficulty == "all")
    low, quarter, three_quarters = np.percentile(mean_N[known_N], (20, 25, 75))
    if difficulty == "hard":
        return (mean_N <= low) & (std_N >= np.percentile(std_N[known_N], 40))
    return (
        mean_N >= three_quarters
        if difficulty == "easy"
        else (mean_N >= quarter) & (mean_N <= three_quarters)
    )


def with_twin(row):
    """The row as a task and, if its best solution begins with a function, the same question as one
    to complete.

    The head of that function is what comes before the first colon that ends a line. Not for
    questions with "you" in them. Ref: the data script of Coupled-GRPO.
    """
    task = {name: row[name] for name in TASK}
    if "you" in row["question"].lower() or not row["inferences"]:
        return [task]
    head = (
        max(row["inferences"], key=lambda answer: answer["pass_rate"])["completion"]
        .split(":\n")[0]
        .strip()
    )
    if not head.startswith("def "):
        return [task]
    question = f'```\n{head}:\n    """\n    {row["question"]}\n    """\n```\n'
    return [task, task | {"question": "Please complete the following problem:\n" + question}]


def clean(tasks, dropped, tokenizer, limit):
    """The tasks without tests that do not parse; those that are no use are left out and counted in
    `dropped`.
    """
    dropped |= dict.fromkeys(("unparsable_tests", "without_tests", "duplicates", "long_prompts"), 0)
    seen = set()
    for task in tasks:
        tests = [test for test in task["test_cases"] if parses(test)]
        dropped["unparsable_tests"] += len(task["test_cases"]) - len(tests)
        task = task | {"test_cases": tests}
        if not tests:
            dropped["without_tests"] += 1
            continue
        digest = hashlib.sha256(" ".join(task["question"].split()).encode()).digest()
        prompt = CHAT.format(SYSTEM, question_of(task))
        if digest in seen:
            dropped["duplicates"] += 1
        elif tokenizer and len(tokenizer.encode(prompt, add_special_tokens=False)) > limit:
            dropped["long_prompts"] += 1
        else:
            seen.add(digest)
            yield task


def parses(source):
    """Whether it is Python. ValueError: it has NUL bytes; RecursionError and MemoryError: it nests
    too deep.
    """
    bad = contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError)
    with bad, warnings.catch_warnings(action="ignore"):  # of invalid escapes and the like
        return bool(ast.parse(source))
    return False


def humaneval_tasks(path):
    """The problems of an official file as AceCode's twins ask: split "humaneval", one test, so a
    pass is pass@1.
    """
    tasks = []
    try:
        data = runs.as_path(path).read_bytes()
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
        for row in map(json.loads, text.strip().split("\n")):
            # The test repeats the prompt's helpers, so that an answer cannot replace those that it
            # calls.
            nodes = ast.parse(row["prompt"]).body
            helpers = [
                ast.unparse(node)
                for node in nodes
                if getattr(node, "name", "") != row["entry_point"]
            ]
            test = "\n".join([*helpers, row["test"], f"check({row['entry_point']})"])
            question = f"Please complete the following problem:\n```\n{row['prompt']}```\n"
            task = {
                "source": "humaneval",
                "split": "humaneval",
                "id": row["task_id"],
                "question": question,
            }
            tasks.append(task | {"test_cases": [test]})
    except (ValueError, KeyError, TypeError, SyntaxError, RecursionError, *BROKEN) as error:
        raise ValueError(f"--humaneval={path} is not the official file: {error!r}") from None
    return tasks


def question_of(task):
    """The user's turn of a chat: the question, with its first test, if it has one, unless it holds
    a code block.
    """
    if "\n```\n" in task["question"] or not task["test_cases"]:
        return task["question"]
    return f"{task['question']}\nTest cases: {task['test_cases'][0]}"


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
