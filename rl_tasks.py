"""Tasks for reinforcement learning: programming questions with tests, as JSON lines that coupled_grpo.py reads.

    python rl_tasks.py --tokenizer=out/diffucoder/tokenizer.json --out=data/acecode    # needs: pip install datasets
    python rl_tasks.py --roots rows.jsonl --difficulty=all --out=data/mine    # files in AceCode's form, no download

A task is a line {"question", "test_cases"}, asked by the model's chat template, or {"prompt", "test_cases"}, the
beginning of a program. They come from AceCode-87K (a download of 1 GB), whose models' pass rates say how hard a row is:
hard is a mean in the lowest fifth and a spread not in the lowest two fifths, easy a mean in the highest quarter, medium
in the middle half. A question comes again as a function to complete, where its best solution begins with one. Tests
that do not parse, rows without tests, repeated questions and, given --tokenizer, prompts of over --max_prompt tokens
are left out.

Writes --out: train.jsonl, heldout.jsonl, with --humaneval its problems as humaneval.jsonl, all asserts of one a single
test, and, last of all, meta.json with what was left out and why. The rest of this file is what coupled_grpo.py imports:
the tasks of its demo, and tasks as canvases.

Letters: B sequences, C tokens of a completion, L columns of a canvas, N rows.
"""

import dataclasses
import hashlib
import itertools
import json
import random
import typing
from pathlib import Path

import numpy as np
import tokenizers
from tqdm import tqdm

import corpus
import data_prep
import problems
import runs

ACECODE = "TIGER-Lab/AceCode-87K"  # the data set on Hugging Face, or a folder of the same
TASK = ("id", "source", "question", "test_cases", "context_messages")  # what a task keeps of AceCode's columns
COUNTED = ("qwen_coder_2.5", "llama3_instruct")  # the models whose pass rates say how hard a row is
CHAT = "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"  # Qwen2.5's


@dataclasses.dataclass(frozen=True)
class Config:
    roots: tuple[str, ...] = ()  # JSONL files in AceCode's form, or folders of them; none downloads AceCode-87K
    out: str = "data/acecode"  # folder to write
    difficulty: typing.Literal["easy", "medium", "hard", "all"] = "hard"  # by the pass rates of AceCode's models
    tokenizer: str = ""  # tokenizer.json of the model to be trained; "" leaves prompts of any length in
    max_prompt: int = 200  # tokens of the longest prompt, with Qwen's chat template; counted with --tokenizer
    heldout: float = 0.02  # fraction of the questions held out
    seed: int = 0  # which questions are held out
    humaneval: str = ""  # HumanEval.jsonl.gz, to be watched while training: written as tasks, humaneval.jsonl


# ---- AceCode -------------------------------------------------------------------------------------------------------


def main(cfg):
    out = Path(cfg.out)
    out.mkdir(parents=True, exist_ok=True)
    with runs.lock(out / ".lock"):
        prepare_acecode(cfg, out)


def prepare_acecode(cfg, out):
    """Write the tasks, or find that they are there. A task and its twin are in the same split."""
    paths = [path for _, path in data_prep.files_below(cfg.roots, (".jsonl",), cfg.out)] if cfg.roots else []
    tokenizer = tokenizers.Tokenizer.from_str(Path(cfg.tokenizer).read_text()) if cfg.tokenizer else None
    if tokenizer:
        tokenizer.no_truncation()  # or a long prompt would look short
    settings = settings_of(cfg, paths)
    if complete(out, settings):
        print(f"{out} is complete, nothing to do")
        return
    hub = None if paths else corpus.download(ACECODE, "name JSONL files of its form with --roots")

    def read():
        return tqdm(read_acecode(paths) if paths else hub, "reading", unit=" rows", disable=None)

    # Percentiles are over all rows, so these are read twice: first for their rates, then for what is kept.
    rates_N2 = np.array([pass_rates(row) for row in read()], np.float64).reshape(-1, 2)
    kept_N = choose(rates_N2, cfg.difficulty)
    without_N = np.isnan(rates_N2[:, 0]) & ~kept_N
    dropped = {"without_rates": int(without_N.sum()), "difficulty": int((~kept_N & ~without_N).sum())}

    # Whether a question is held out depends on the seed and its id alone.
    tasks = itertools.chain.from_iterable(with_twin(row) for row in itertools.compress(read(), kept_N))
    counts = {"train": 0, "heldout": 0}
    with runs.writing(out / "train.jsonl") as train, runs.writing(out / "heldout.jsonl") as heldout:
        for task in clean(tasks, dropped, tokenizer, cfg.max_prompt):
            split = "heldout" if corpus.draw(cfg.seed, task["id"]) < cfg.heldout else "train"
            counts[split] += 1
            (heldout if split == "heldout" else train).write((json.dumps(task) + "\n").encode())
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in dropped.items())
        if not counts["train"]:
            raise ValueError(f"no task is left to train on (dropped: {reasons}); give more rows, or lower --heldout")
    if cfg.humaneval:
        runs.write(
            out / "humaneval.jsonl",
            "".join(json.dumps(task) + "\n" for task in humaneval_tasks(cfg.humaneval)).encode(),
        )
    meta = {"settings": settings, "rows": len(kept_N), "tasks": counts, "dropped": dropped}
    runs.write(out / "meta.json", json.dumps(meta, indent=2).encode())
    print(f"{len(kept_N):,} rows | dropped: {reasons}")
    if not tokenizer:
        print("prompts were not measured: --tokenizer, that of the model, leaves out those of over --max_prompt tokens")
    print(f"wrote {out}: " + ", ".join(f"{split} {count:,} tasks" for split, count in counts.items()))


def settings_of(cfg, paths):
    """What the tasks depend on, for meta.json: the same settings and files give the same bytes."""
    digest = lambda path: hashlib.sha256(Path(path).read_bytes()).hexdigest()  # noqa: E731
    return {
        "source": "acecode",
        "difficulty": cfg.difficulty,
        "max_prompt": cfg.max_prompt * bool(cfg.tokenizer),
        "heldout": cfg.heldout,
        "seed": cfg.seed,
        "tokenizer": digest(cfg.tokenizer) if cfg.tokenizer else "",
        "files": [digest(path) for path in paths],
    } | ({"humaneval": digest(cfg.humaneval)} if cfg.humaneval else {})


def complete(out, settings):
    """Whether the folder holds these tasks already. ValueError if it holds anything else."""
    if any((out / name).exists() for name in ("tokenizer.json", "progress.json", "train", "heldout")):
        raise ValueError(f"{out} holds other data; choose another --out")
    if not (out / "meta.json").exists():
        return False
    if runs.read_json(out / "meta.json").get("settings") != settings:
        raise ValueError(f"{out} holds tasks of other settings or files; choose another --out or delete it")
    return all((out / f"{split}.jsonl").exists() for split in ("train", "heldout"))


def read_acecode(paths):
    """The rows of JSONL files, dictionaries. ValueError names a line that is no row of AceCode."""
    for path in paths:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                    texts = [row["id"], row["source"], row["question"]] + row["test_cases"]
                    for inference in row["inferences"]:
                        texts += [inference["model_name"], inference["completion"]]
                        0.0 + inference["pass_rate"]  # a number
                    "".join(texts).encode()  # half a surrogate pair cannot be
                    row["context_messages"]
                except (ValueError, RecursionError, KeyError, TypeError):
                    columns = ", ".join((*TASK, "inferences"))
                    raise ValueError(f"{path}: line {number} is no row of AceCode, {columns} in JSON") from None
                yield row


def pass_rates(row):
    """(mean, standard deviation) of the counted models' pass rates; nan without any."""
    rates = [one["pass_rate"] for one in row["inferences"] if one["model_name"] in COUNTED]
    return (np.mean(rates), np.std(rates)) if rates else (np.nan, np.nan)


def choose(rates_N2, difficulty):
    """bool_N: the rows of a difficulty, given pass_rates; one without rates has none and is in "all" alone.

    hard: mean <= its 20th percentile and deviation >= its 40th; medium: mean between the 25th and 75th; easy: mean >=
    the 75th. Percentiles are over all rows with rates, linear and inclusive. Ref: the data script of Coupled-GRPO.
    """
    mean_N, std_N = rates_N2.T
    known_N = ~np.isnan(mean_N)
    if difficulty == "all" or not known_N.any():
        return known_N | (difficulty == "all")
    low, quarter, three_quarters = np.percentile(mean_N[known_N], (20, 25, 75))
    if difficulty == "hard":
        return (mean_N <= low) & (std_N >= np.percentile(std_N[known_N], 40))
    return mean_N >= three_quarters if difficulty == "easy" else (mean_N >= quarter) & (mean_N <= three_quarters)


def with_twin(row):
    """The row as a task and, if its best solution begins with a function, the same question as one to complete.

    The head of that function is what comes before the first colon that ends a line. Not for questions with "you" in
    them. Ref: the data script of Coupled-GRPO.
    """
    task = {name: row[name] for name in TASK}
    if "you" in row["question"].lower() or not row["inferences"]:
        return [task]
    head = max(row["inferences"], key=lambda one: one["pass_rate"])["completion"].split(":\n")[0].strip()
    if not head.startswith("def "):
        return [task]
    question = f'```\n{head}:\n    """\n    {row["question"]}\n    """\n```\n'
    return [task, task | {"question": "Please complete the following problem:\n" + question}]


def clean(tasks, dropped, tokenizer, limit):
    """The tasks without tests that do not parse; those that are no use are left out and counted in `dropped`."""
    dropped |= dict.fromkeys(("unparsable_tests", "without_tests", "duplicates", "long_prompts"), 0)
    seen = set()
    for task in tasks:
        tests = [test for test in task["test_cases"] if corpus.parses(test)]
        dropped["unparsable_tests"] += len(task["test_cases"]) - len(tests)
        task = task | {"test_cases": tests}
        if not tests:
            dropped["without_tests"] += 1
            continue
        digest = hashlib.sha256(" ".join(task["question"].split()).encode()).digest()
        prompt = CHAT.format(*(turn["content"] for turn in messages(task)))
        if digest in seen:
            dropped["duplicates"] += 1
        elif tokenizer and len(tokenizer.encode(prompt, add_special_tokens=False)) > limit:
            dropped["long_prompts"] += 1
        else:
            seen.add(digest)
            yield task


def humaneval_tasks(path):
    """The problems of an official file as AceCode's twins ask: split "humaneval", one test, so a pass is pass@1."""
    try:
        found = problems.parse_problems("humaneval", Path(path).read_bytes())
    except ValueError as error:
        raise ValueError(f"--humaneval={path} is not the official file: {error}") from None
    ask = "Please complete the following problem:\n```\n{}```\n".format
    common = {"source": "humaneval", "split": "humaneval"}
    return [
        common | {"id": one.id, "question": ask(one.asked.prompt), "test_cases": [one.test]} for one in found.values()
    ]


def messages(task, system="You are a helpful assistant."):
    """The chat that asks a question: with its first test, but for questions that hold a code block."""
    question = task["question"]
    if "\n```\n" not in question:
        question += f"\nTest cases: {task['test_cases'][0]}"
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


# ---- the demo's tasks ----------------------------------------------------------------------------------------------

NUMBERS = {  # what the docstring asks for: the right expression, and the mistake that most of the training data makes
    "{x} plus {k}": ("{x} + {k}", "{x} - {k}"),
    "{x} minus {k}": ("{x} - {k}", "{k} - {x}"),
    "{x} times {k}": ("{x} * {k}", "{x} + {k}"),
    "{x} to the power of {k}": ("{x} ** {k}", "{x} * {k}"),
    "{x} divided by {k}, rounded down": ("{x} // {k}", "{x} % {k}"),
    "the rest of {x} divided by {k}": ("{x} % {k}", "{x} // {k}"),
    "{x}, but at least {k}": ("max({x}, {k})", "min({x}, {k})"),
    "{x}, but at most {k}": ("min({x}, {k})", "max({x}, {k})"),
}
LISTS = {
    "the first {k} of {x}": ("{x}[:{k}]", "{x}[{k}:]"),
    "{x} without the first {k}": ("{x}[{k}:]", "{x}[:{k}]"),
    "the last {k} of {x}": ("{x}[-{k}:]", "{x}[:-{k}]"),
    "every item of {x} plus {k}": ("[i + {k} for i in {x}]", "[i - {k} for i in {x}]"),
    "the items of {x} above {k}": ("[i for i in {x} if i > {k}]", "[i for i in {x} if i < {k}]"),
    "how often {k} is in {x}": ("{x}.count({k})", "{x}.index({k})"),
    "the sum of {x} times {k}": ("sum({x}) * {k}", "sum({x}) + {k}"),
}


def make_tasks(seed):
    """[{"id", "constant", "prompt", "test_cases", "right", "wrong"}], shuffled: 480 functions of a line.

    15 things to ask for, with constants from 2 to 9, under four names of the argument; each with three tests.
    """
    rng, tasks = random.Random(seed), []
    kinds = [(NUMBERS, "xnab", lambda: rng.randint(11, 40)), (LISTS, ("xs", "row", "s", "items"), None)]
    for kind, names, value in kinds:
        for asked, (right, wrong) in kind.items():
            for k, x in itertools.product(range(2, 10), names):
                prompt = f'def f({x}):\n    """Return {asked.format(x=x, k=k)}."""\n    return '
                tests = []
                while len(tests) < 3:  # only arguments that tell the right expression from the mistake
                    given = value() if value else [rng.randint(0, 19) for _ in range(12)] + [k]
                    want, mistake = (eval(text.format(x=x, k=k), {x: given}) for text in (right, wrong))
                    if want != mistake:
                        tests.append(f"assert f({given}) == {want}")
                expressions = {"right": right.format(x=x, k=k), "wrong": wrong.format(x=x, k=k)}
                task = {"id": f"demo/{len(tasks)}", "constant": k, "prompt": prompt, "test_cases": tests}
                tasks.append(task | expressions)
    rng.shuffle(tasks)
    return tasks


UNREWARDED, UNSEEN = (4, 7), (6,)  # constants of held-out tasks: of pre-training alone; of no stage


def write_demo(folder, seed):
    """Write the demo's train.jsonl and heldout.jsonl, and pairs.jsonl, answers of which three in ten are right.

    They are split by constant: the same question under another name of the argument would be no other task. Held out
    are 72 tasks whose constants are in the pairs and never rewarded, and 24, of split "unseen", in neither.
    """
    rng, tasks = random.Random(seed), make_tasks(0)
    unseen = [task | {"split": "unseen"} for task in tasks if task["constant"] in UNSEEN]
    unrewarded = [task for task in tasks if task["constant"] in UNREWARDED]
    train = [task for task in tasks if task["constant"] not in UNREWARDED + UNSEEN]
    files = {"heldout": unrewarded[:72] + unseen[:24], "train": train, "pairs": []}
    for task in (train + unrewarded) * 20:
        answer = task["right" if rng.random() < 0.3 else "wrong"]
        files["pairs"].append({"prompt": task["prompt"], "response": answer + "\n"})
    folder.mkdir(parents=True)
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---- tasks as canvases ---------------------------------------------------------------------------------------------


def read_tasks(path, tests=True):
    """The tasks of a JSONL file, which need no tests if nothing runs them. ValueError names the line that is none."""
    tasks = []
    for number, line in enumerate(Path(path).read_text().split("\n"), 1):
        if not line.strip():
            continue
        try:
            task = json.loads(line)
            task.setdefault("test_cases", [])
            "".join([task["question"] if "question" in task else task["prompt"]] + task["test_cases"])
        except (ValueError, KeyError, TypeError, AttributeError):
            form = '{"question" or "prompt": text, "test_cases": [texts]}'
            raise ValueError(f"{path}, line {number} is no task: {form}") from None
        if tests and not task["test_cases"]:
            advice = "a reward of your own needs none: --rewards=file.py:function"
            raise ValueError(f"{path}, line {number} has no tests, so nothing could be rewarded; {advice}")
        tasks.append(task)
    if not tasks:
        raise ValueError(f"{path} holds no tasks; write some with: python rl_tasks.py --out=data/acecode")
    return tasks


class Prompts:
    """Tasks as canvases: left-padded token ids of the prompts, max_new columns of MASK behind them.

    wrap(user turn, system turn) writes a chat, as runs.chat_template gives it; tasks with a question need it.
    """

    def __init__(self, path, tokenizer, wrap, model_cfg, max_prompt, max_new, tests=True):
        self.path, self.tokenizer, self.model_cfg = path, tokenizer, model_cfg
        self.max_prompt, self.max_new = max_prompt, max_new
        self.tasks, self.ids, self.dropped = [], [], 0  # dropped: tasks whose prompt is too long
        for task in read_tasks(path, tests):
            chat = "question" in task
            if chat and not wrap:
                raise ValueError(f"{path} asks questions, and the model has no chat template (tokenizer_config.json)")
            text = wrap(*(turn["content"] for turn in messages(task)[::-1])) if chat else task["prompt"]
            tokenizer.encode_special_tokens = not chat  # the names of special tokens in a program's text are text
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) > max_prompt:
                self.dropped += 1
                continue
            self.tasks.append(task)
            self.ids.append(ids)
        if not self.tasks:
            raise ValueError(f"all {self.dropped} prompts of {path} have more than --max_prompt={max_prompt} tokens")

    def canvas(self, task_B):
        """(token_BL, see_BL) of the tasks with these numbers; see_BL is False at padding."""
        P, L = self.max_prompt, self.max_prompt + self.max_new
        token_BL = np.full((len(task_B), L), self.model_cfg.mask_id, np.int32)
        token_BL[:, :P] = self.model_cfg.pad_id
        for row, i in zip(token_BL, task_B, strict=True):
            row[P - len(self.ids[i]) : P] = self.ids[i]
        length_B = np.array([len(self.ids[i]) for i in task_B])
        return token_BL, np.arange(L) >= P - length_B[:, None]

    def completions(self, task_B, token_BL, counted_BC):
        """Rows for the reward functions, of filled canvases whose completions are the counted tokens.

        A row is the task with "written", the completion alone, "tokens", its length, and "text", which is rewarded: for
        a "prompt" the whole program in a code block, the form in which a chat model answers. An answer that ends its
        turn has a newline behind it, as in the chat template: the reference's code_format asks for one, and sees it.
        """
        rows, turn_end = [], self.tokenizer.token_to_id("<|im_end|>")
        for i, ids, counted_C in zip(task_B, token_BL[:, self.max_prompt :], counted_BC, strict=True):
            task = self.tasks[i]
            written = self.tokenizer.decode(ids[counted_C].tolist(), skip_special_tokens=True)
            if "question" not in task:
                text = f"```python\n{task['prompt']}{written.rstrip()}\n```\n"
            elif ids[counted_C][-1] == turn_end:  # what stands behind <|im_end|> is cut off, with that newline
                text = written.removesuffix("\n") + "\n"
            else:
                text = written
            rows.append(task | {"tokens": int(counted_C.sum()), "written": written, "text": text})
        return rows


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
