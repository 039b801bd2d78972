"""Let a model write programs for HumanEval or MBPP, run them in the sandbox, and report pass@k.

    python benchmarks.py --task=humaneval                       # pass@1: writes 164 programs and runs them
    python benchmarks.py --task=mbpp --n=10 --k 1 10            # pass@1, pass@10, and the best of 10
    python benchmarks.py --task=humaneval --model=dream --ckpt=out/diffucoder --chat --block_length=32 --cache=dual
    python benchmarks.py --task=humaneval --samples=mine.jsonl  # scores programs from elsewhere

Reads a run folder of train_tpu.py or train_gpu.py, or for Dream a folder of convert_weights.py; the tasks' official
files are downloaded once. Writes --out: samples.jsonl (what the model wrote), results.jsonl (the same with verdicts;
both in the official format), summary.json. A line is added as soon as it is known, and the same command goes on after a
stop.

A sample runs as in the official harnesses: all asserts of a problem in one process, a main block does not run. The
asserts themselves are evaluated beside it, so a sample cannot forge them (see sandbox.py). The limit is
processor time. Code is found in plain text, in a body that goes on with the prompt, and in fenced blocks.

A problem's way: read_problems -> prompt -> a family's writer -> extract (code) -> sandbox -> report.
"""

import ast
import builtins
import collections
import contextlib
import dataclasses
import gzip
import hashlib
import http.client
import itertools
import json
import keyword
import math
import operator
import os
import random
import re
import sys
import typing
import urllib.request
import warnings
import zlib
from pathlib import Path

import numpy as np
import tokenizers

import runs
import sandbox


@dataclasses.dataclass(frozen=True)
class DreamFlags:
    """Flags of Dream, --model=dream."""

    chat: bool = False  # ask by the chat template, as instruct models want it; for MBPP with --shots=0
    threshold: float = 0.0  # fill at once all positions that are so sure; 0 fills one a pass
    block_length: int = 0  # fill blocks of this length from left to right; 0 takes the whole canvas at once
    cache: typing.Literal["", "prefix", "dual"] = ""  # keep keys and values within a block


@dataclasses.dataclass(frozen=True)
class SandboxFlags:
    """Where programs run; see sandbox.py."""

    runner: typing.Literal["local", "e2b"] = "local"  # this machine, or the service E2B
    e2b_router_url: str = ""  # host:port of an Open-R1 router that holds the E2B key; with --runner=e2b
    workers: int = 0  # programs run at a time; 0: one per CPU
    timeout_s: float = 4.0  # processor seconds for the tests of a sample, or 4 times those of the reference if more
    threads: bool = False  # let samples start threads
    allow_unsafe: bool = False  # run programs where the machine offers no safe sandbox


@dataclasses.dataclass(frozen=True)
class Config:
    task: typing.Literal["humaneval", "mbpp"] = "humaneval"  # which problems
    model: typing.Literal["pythoncoder", "mdlm", "dream"] = "pythoncoder"  # family of the checkpoint
    ckpt: str = ""  # run folder, or one of convert_weights.py; "" is out/train_tpu, or out/train_gpu for MDLM
    step: int = 0  # which checkpoint; 0 takes the newest
    out: str = ""  # folder for samples and results, goes on there if it exists; "" is out/<task>
    tasks_file: str = ""  # the official HumanEval.jsonl(.gz) or sanitized-mbpp.json; "" downloads it
    downloads: str = "data/tasks"  # folder for downloaded files
    split: typing.Literal["test", "all"] = "test"  # MBPP: ids 11-510 (257 problems), or all 427
    shots: int = 3  # MBPP: solved problems in the prompt
    problems: int = 0  # only so many, the first ones; 0 takes all
    samples: str = ""  # score the completions in these JSON lines, taken out of ``` if need be; needs no model
    n: int = 1  # samples of each problem
    k: tuple[int, ...] = ()  # report pass@k for these; default 1 and n
    temperature: float | None = None  # 0 takes the likeliest token; default 0 for one sample, else 0.8
    top_p: float = 0.95  # draw from the smallest set of tokens of this probability
    max_new: int = 512  # tokens at most
    batch_size: int = 16  # programs that are written at a time
    seed: int = 0  # of the samples
    compile_cache: str = "~/.cache/unmask"  # compiled programs of earlier runs; "" compiles anew
    json: bool = False  # print the report as one JSON line instead of text
    dream: DreamFlags = DreamFlags()
    sandbox: SandboxFlags = SandboxFlags()


def main(cfg):
    """Generate, run and report: the report. RuntimeError if the sandbox left samples unscored."""
    cfg = resolve(cfg)
    run = Path(cfg.ckpt or ("out/train_gpu" if cfg.model == "mdlm" else "out/train_tpu"))
    problems, out = read_problems(cfg), Path(cfg.out or f"out/{cfg.task}")
    # What the results depend on: a folder goes on under the same settings alone.
    settings = {"task": cfg.task, "split": cfg.split, "problems": cfg.problems, "timeout_s": cfg.sandbox.timeout_s}
    if cfg.samples:
        samples = given_samples(cfg, problems)
        settings["samples_sha256"] = hashlib.sha256(Path(cfg.samples).read_bytes()).hexdigest()
    else:
        converted = (run / "meta.json").is_file()  # by convert_weights.py: it has no steps
        step = None if converted else runs.newest(run, cfg.step)[0]
        names = "model", "shots", "n", "temperature", "top_p", "max_new", "batch_size", "seed"
        settings |= {name: getattr(cfg, name) for name in names} | {"ckpt": str(run), "step": step}
        settings |= dataclasses.asdict(cfg.dream) if cfg.model == "dream" else {}
    # Write, run, score; every sample and result is on disk as soon as it is known.
    out.mkdir(parents=True, exist_ok=True)
    with runs.lock(out / "results.jsonl"):
        before = runs.read_json(out / "config.json") if (out / "config.json").exists() else settings
        changed = [f"{k}={before.get(k)!r}" for k in before | settings if before.get(k) != settings.get(k)]
        if changed:
            raise ValueError(f"{out} holds results with {', '.join(changed)}; choose another --out")
        runs.write(out / "config.json", settings)
        try:
            if not cfg.samples:
                samples = generated_samples(cfg, problems, run, step, out / "samples.jsonl")
            unscored = score_samples(cfg, problems, samples, out / "results.jsonl")
        except KeyboardInterrupt:
            print(f"stopped; what is done is in {out}, and the same command goes on", file=sys.stderr)
            raise
        row = report(cfg, problems, read_own(out / "results.jsonl", "passed"))
        runs.write(out / "summary.json", row)
    print(json.dumps(row) if cfg.json else describe(row), flush=True)
    if unscored:
        first = ", ".join(f"{problems[key].id} ({error})" for (key, _), error in unscored[:3])
        left = f"{len(unscored)} samples could not be run and are not counted: {first}"
        raise RuntimeError(f"{left}; run the same command again")
    return row


def resolve(cfg):
    """The config with defaults filled in, checked."""
    if cfg.temperature is None:
        cfg = dataclasses.replace(cfg, temperature=0.8 if cfg.n > 1 else 0.0)
    if min(cfg.n, cfg.max_new, cfg.batch_size, *cfg.k) < 1:
        raise ValueError("--n, --k, --max_new and --batch_size are at least 1")
    if min(cfg.problems, cfg.temperature, cfg.seed, cfg.sandbox.workers) < 0:
        raise ValueError("--problems, --temperature, --seed and --workers are at least 0")
    if not 0 < cfg.top_p <= 1 or not 0 <= cfg.shots <= len(SHOTS) or not 0 < cfg.sandbox.timeout_s < math.inf:
        raise ValueError(f"--top_p is in (0, 1], --shots from 0 to {len(SHOTS)}, --timeout_s above 0")
    if cfg.model != "dream" and cfg.dream != DreamFlags():
        raise ValueError("--chat, --threshold, --block_length and --cache are for --model=dream")
    if not cfg.samples and max(cfg.k, default=1) > cfg.n:
        raise ValueError(f"pass@{max(cfg.k)} needs --n={max(cfg.k)} samples of each problem or more, not {cfg.n}")
    if not cfg.samples and cfg.n > 1 and cfg.temperature == 0:
        raise ValueError(f"--temperature=0 writes the same text {cfg.n} times; raise it, or leave --n at 1")
    return cfg


# ---- problems ------------------------------------------------------------------------------------------------------

TASKS = {  # official files
    "humaneval": "https://raw.githubusercontent.com/openai/human-eval/master/data/HumanEval.jsonl.gz",
    "mbpp": "https://raw.githubusercontent.com/google-research/google-research/master/mbpp/sanitized-mbpp.json",
}
# after these there is no answer in any text; Austin et al. end theirs by [DONE]
ENDS = ("<|endoftext|>", "<|file_sep|>", "<|im_end|>", "<|dlm_pad|>", "<|mask|>", "[DONE]")
STOPS = {  # of BigCode's harness
    "humaneval": ("\nclass ", "\ndef ", "\n#", "\n@", "\nif ", "\nprint(", "\nassert "),
    "mbpp": ("\nclass ", "\nassert ", '\n"""', "\nprint(", "\nif "),
}
CHAT = {  # what a user asks an instruct model
    "humaneval": "Complete this Python function. Answer with all of it in one block of code.\n\n```python\n{}\n```",
    "mbpp": "Write a Python function. Answer with all of it in one block of code.\n\n{}",
}
FENCE = re.compile(r"(?m)^([ \t]*)(```+)[ \t]*([^`\n]*?)[ \t]*$")  # indentation, backticks, language
# a line that begins with two words, of which the first is none of Python's, or as an item of a list
PROSE = re.compile(rf"(?!({'|'.join([*keyword.kwlist, *keyword.softkwlist])})\b)[\w'’-]+[,:;]? [A-Za-z]|\d+[.)] |[-*] ")
SHOTS = (2, 3, 4)  # MBPP: the problems that the paper shows before the one that is asked
ARROW = re.compile(r"\s*(?:==>|=>|==|=|->|➞|→|#?\s*(?:should )?returns?\b)[ \t]*")
# Its value tells programs apart: a hash of what they return for some inputs, "" if they never do.
PROBE = """import signal, zlib
def _late(*_): raise TimeoutError
def _show(value):
    if isinstance(value, (set, frozenset, dict)):
        return str(sorted(map(repr, value.items() if isinstance(value, dict) else value)))
    return repr(value)
def _behaviour():
    signal.signal(signal.SIGPROF, _late)
    seen, returned = [], False
    for args in {inputs!r}:
        signal.setitimer(signal.ITIMER_PROF, 0.3)
        try:
            seen.append(_show({entry}(*args)))
            returned = True
        except Exception as error:
            seen.append(type(error).__name__)
    signal.setitimer(signal.ITIMER_PROF, 0)
    return returned * f"{{zlib.crc32(chr(10).join(seen).encode()):08x}}"
_behaviour()"""


class Problem(typing.NamedTuple):
    id: str | int
    entry: str  # the function that is asked for
    prompt: str  # what a model reads
    question: str  # what stands in CHAT instead
    head: str  # what stands before a completion when it runs
    test: str  # hidden
    public: list  # asserts made of the examples that the prompt shows
    probes: list  # PROBE, if there are inputs for it
    reference: str  # a program that passes; its time is the measure of a sample's


def read_problems(cfg):
    """{id as a string: Problem} of the official file: --tasks_file, or downloaded once into --downloads."""
    url = TASKS[cfg.task]
    path = Path(cfg.tasks_file or Path(cfg.downloads) / url.rsplit("/", 1)[1])
    if cfg.tasks_file or path.is_file():
        try:
            return parse_problems(cfg, path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path} is not the official file of {cfg.task}: {error}") from None
    print(f"downloading {url}", file=sys.stderr)
    try:  # parsed before it is kept: half a file or a login page is none
        with urllib.request.urlopen(url, timeout=60) as response:
            data = response.read()
        problems = parse_problems(cfg, data)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise OSError(f"{url} cannot be downloaded ({error}); fetch it by hand and pass --tasks_file") from None
    path.parent.mkdir(parents=True, exist_ok=True)
    runs.write(path, data)
    return problems


def parse_problems(cfg, data):
    """The problems in the bytes of an official file; ValueError on what is wrong, with the line or the number."""
    try:
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    except (EOFError, zlib.error) as error:
        raise ValueError(f"broken gzip: {error}") from None
    problems, humaneval = {}, cfg.task == "humaneval"
    rows = parse_lines(text, ("task_id", "prompt", "entry_point", "test")) if humaneval else json.loads(text)
    try:
        if not humaneval:  # the solved problems of the prompt have ids outside the test split
            shots = [row for row in rows if row["task_id"] in SHOTS][: cfg.shots]
            rows = [row for row in rows if cfg.split == "all" or 11 <= row["task_id"] <= 510]
        for row in rows[: cfg.problems or None]:
            problems[key_of(row["task_id"])] = humaneval_problem(row) if humaneval else mbpp_problem(row, shots)
    except (LookupError, TypeError, AttributeError, SyntaxError) as error:
        raise ValueError(f"problem {len(problems) + 1} is of another form: {error!r}") from None
    if not problems:
        raise ValueError("it holds no problems")
    return problems


def key_of(task_id):
    """HumanEval/3, Mbpp/3 and 3 are the same problem: "3"."""
    return str(task_id).split("/")[-1]


def parse_lines(text, keys):
    """The objects of JSON lines; ValueError names the first line that is not an object with these keys."""
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or not row.keys() >= {*keys} or not isinstance(row.get("completion", ""), str):
            raise ValueError(f"line {number} is not a JSON object with {', '.join(keys)}; completions are texts")
        rows.append(row)
    return rows


def humaneval_problem(row):
    """Ref: Chen et al., arXiv:2107.03374. The model reads the prompt without the last newline, as BPEs like it."""
    task_id, prompt, entry = row["task_id"], row["prompt"], row["entry_point"]
    reference = prompt + row.get("canonical_solution", "")
    public, arguments = docstring_examples(prompt, entry)
    # helpers that the prompt defines stand in the test, too: the test calls some, and not as a sample may redefine them
    helpers = [node for node in ast.parse(prompt).body if getattr(node, "name", "") != entry]
    test = "\n".join([*map(ast.unparse, helpers), row["test"], f"check({entry})"])
    seen = prompt.rstrip()
    return Problem(task_id, entry, seen, seen, prompt, test, public, probes(task_id, entry, arguments), reference)


def mbpp_problem(row, shots):
    """Ref: Austin et al., arXiv:2108.07732: the task and three asserts, after problems with their answers.

    The asserts in the prompt are among those that decide, so none of them is `public`: best-of-n would be an oracle.
    The inputs in them are used, not the values expected.
    """

    def ask(row):
        asserts = "\n".join(row["test_list"][:3])
        task = f"You are an expert Python programmer, and here is your task: {row['prompt'].strip()}"
        return f"{task} Your code should pass these tests:\n\n{asserts}\n[BEGIN]\n"

    # solved problems, then this one without its solution
    prompt = "".join(f"{ask(shot)}{shot['code'].strip()}\n[DONE]\n\n" for shot in shots if shot is not row) + ask(row)
    imports = "".join(f"{line}\n" for line in row["test_imports"])
    calls = calls_of(row["test_list"])
    entry = called(row["test_list"])
    # all in one process, as the harnesses have it: a function that works once is no solution
    test = imports + "\n".join(row["test_list"])
    asserts = "\n".join(row["test_list"][:3])
    question = f"{row['prompt'].strip()}\nIt must pass these tests:\n\n```python\n{asserts}\n```"
    arguments = [args for args in (literals(call, entry) for call in calls) if args is not None]
    found = probes(row["task_id"], entry, arguments)
    return Problem(row["task_id"], entry, prompt, question, "", test, [], found, row["code"])


def calls_of(tests):
    """The calls in the first three asserts."""
    return [node for test in tests[:3] for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Call)]


def called(tests):
    """MBPP has no field for the function that is asked for: it is the one that the asserts call."""
    names = [call.func.id for call in calls_of(tests) if isinstance(call.func, ast.Name)]
    return next((name for name in names if not hasattr(builtins, name)), names[0])  # one problem redefines sum()


def docstring_examples(prompt, entry):
    """(asserts, arguments) of the examples `f(1) == 2`, `f(1) -> 2`, `>>> f(1)` over `2`, and so on, in a docstring."""
    asserts, arguments = [], []
    for start in (match.start() for match in re.finditer(rf"\b{entry}\(", prompt)):
        # The call ends at the first right parenthesis at which it is Python.
        for end in (start + match.end() for match in re.finditer(r"\)", prompt[start : start + 500])):
            with contextlib.suppress(SyntaxError, ValueError):
                call = ast.parse(prompt[start:end], mode="eval").body
                break
        else:
            continue
        if (args := literals(call, entry)) is None:
            continue
        arguments.append(args)
        # What it returns stands behind an arrow, or on the next line of a session.
        arrow = ARROW.match(prompt, end)
        if not arrow and prompt[:start].endswith(">>> "):
            arrow = re.compile(r"[ \t]*\n[ \t]*").match(prompt, end)
        line = prompt[arrow.end() :].split("\n")[0] if arrow else ""
        for length in range(len(line), 0, -1):  # the longest literal that the line begins with
            with contextlib.suppress(SyntaxError, ValueError):
                value = ast.literal_eval(line[:length].strip())
                if not re.match(r"\w|\s*[-+*/=]", line[length:]):  # not 19 of 19 - 5 - 6 = 8
                    asserts.append(f"assert {prompt[start:end]} == {value!r}")
                break
    return asserts, arguments


def literals(call, entry):
    """The arguments of a call of `entry`, or None if they are not plain literals."""
    with contextlib.suppress(ValueError):
        if isinstance(call.func, ast.Name) and call.func.id == entry and not call.keywords:
            return [ast.literal_eval(arg) for arg in call.args]
    return None


def probes(seed, entry, arguments):
    """[PROBE] with the inputs of examples and variations of them; [] without examples."""
    rng, examples = random.Random(str(seed)), arguments[:4]
    inputs = examples + [[vary(arg, rng) for arg in args] for args in examples * 2]
    return [sandbox.Probe(PROBE.format(inputs=inputs, entry=entry))] if inputs else []


def vary(value, rng):
    """A value of the same type near by: a number changed a little, a sequence reversed, shortened or lengthened."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return rng.choice([value + 1, value - 1, value + 2, -value])
    if isinstance(value, str | list | tuple) and value:
        # backwards, without an item, with one more; a list also with a changed item
        i = rng.randrange(len(value))
        kinds = [value[::-1], value[:i] + value[i + 1 :], value + value[i : i + 1]]
        if not isinstance(value, str):
            kinds += [value[:i] + type(value)([vary(value[i], rng)]) + value[i + 1 :]] * 3
        return rng.choice(kinds)
    return value


# ---- models: a writer continues prompts ----------------------------------------------------------------------------


class Writer(typing.NamedTuple):
    """How a model writes. For another model make another.

    write() depends on nothing but the model, the prompts, the settings and the number of the batch. A model that writes
    from left to right calls finished(token ids so far), which says whether all texts hold what is needed.
    """

    tokenizer: tokenizers.Tokenizer
    longest: int  # tokens of prompt and completion at most
    write: typing.Callable  # (prompts, finished, number of the batch) -> new token ids of each prompt
    ask: typing.Callable = operator.attrgetter("prompt")  # a problem -> what the model reads


def load_jax(family, cfg, run, step):
    """(model on all devices, its mesh, function that gives the random key of a batch)."""
    import jax

    runs.keep_compiled(cfg.compile_cache)
    model, _, mesh = runs.load_for_inference(family, run, step or 0, rows=cfg.batch_size)
    return model, mesh, lambda batch: jax.random.fold_in(jax.random.key(cfg.seed), batch)


def cut(ids, ends):
    """The token ids before the first one that ends a text."""
    return list(itertools.takewhile(lambda i: i not in ends, ids))


def pythoncoder_writer(cfg, run, step):
    """Writes from left to right; with heads for further tokens it drafts by them."""
    import model_pythoncoder as pc

    model, mesh, key_of_batch = load_jax(pc, cfg, run, step)
    tokenizer = runs.read_tokenizer(run)
    eos = tokenizer.token_to_id("<|endoftext|>")
    vocab, eos = tokenizer.get_vocab_size(), -1 if eos is None else eos
    rule = pc.Sampling(cfg.temperature, 0, cfg.top_p, vocab, eos, speculate=model.cfg.mtp)

    def write(prompts, finished, batch):
        with runs.on(mesh):
            return pc.generate(model, prompts, cfg.max_new, rule, key_of_batch(batch), on_tokens=finished)[0]

    return Writer(tokenizer, int(model.cfg.positions * model.cfg.yarn_factor), write)


def dream_writer(cfg, run, step):
    """Fills --max_new masks after the prompt, the surest tokens first."""
    import model_dream
    import sample_dream

    model, mesh, key_of_batch = load_jax(model_dream, cfg, run, step)
    tokenizer, wrap = sample_dream.load_tokenizer(run, model.cfg), sample_dream.chat_template(run)
    if cfg.dream.chat and not wrap:
        raise ValueError(f"--chat: {run} holds no chat template (tokenizer_config.json)")
    # tokens after which nothing is read; MASK cannot be one, it is what is filled
    ends = {tokenizer.token_to_id(name) for name in ENDS} | {model.cfg.eos_id}
    ends = tuple(sorted(ends - {None, model.cfg.mask_id}))
    rule = {name: getattr(cfg.dream, name) for name in ("threshold", "block_length", "cache")}
    rule |= {"temperature": cfg.temperature, "top_p": cfg.top_p, "vocab": tokenizer.get_vocab_size()}
    rule = sample_dream.Sampling(**rule, eos_ids=ends)

    def ask(problem):
        return wrap(CHAT[cfg.task].format(problem.question)) if cfg.dream.chat else problem.prompt

    # Each width of a canvas is a program that must be compiled: all batches have three at most.
    asked = tokenizer.encode_batch([ask(p) for p in read_problems(cfg).values()], add_special_tokens=False)
    lengths = sorted(len(encoding) + cfg.max_new for encoding in asked)
    lengths = [n for n in lengths if n <= model.cfg.positions]
    widths = sample_dream.widths(lengths, cfg.batch_size, model.cfg.positions) if lengths else ()

    def write(prompts, finished, batch):
        width = next(width for width in widths if width >= max(map(len, prompts)) + cfg.max_new)
        shape = {"width": width, "rows": cfg.batch_size}
        with runs.on(mesh):
            rows, _ = sample_dream.generate(model, prompts, cfg.max_new, rule, key_of_batch(batch), **shape)
        return [cut(row[len(ids) :], ends) for row, ids in zip(rows, prompts, strict=True)]

    return Writer(tokenizer, model.cfg.positions, write, ask)


def mdlm_writer(cfg, run, step):
    """Fills --max_new masks after the prompt in as many steps, the surest tokens first."""
    import torch

    import model_mdlm as mdlm

    folder = runs.newest(run, step)[1]
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


def extract(text, entry, stops):
    """(code, ended) of what a model wrote: without fences, chat and what follows the answer.

    A text that starts indented goes on with the function of the prompt, until the first stop string. One that defines
    `entry` before any fence is code, too, until the first stop string, fence or prose behind it; it may have begun in a
    block that the prompt opened. Otherwise a fenced block counts whole: the first that defines `entry`, or the first.
    ended: nothing that could follow would change the code.
    """
    written = text.replace("\r\n", "\n").removeprefix("[BEGIN]")
    text = written[: first_of(written, ENDS)]
    ended = len(text) < len(written)
    defines = re.compile(rf"(?m)^(async )?def {re.escape(entry)}\b")
    goes_on = re.match(r"\s*\n[ \t]+[^\s`]|[ \t]+[^\s`]", text)
    if goes_on:  # the prompt is indented by spaces
        text = re.sub(r"(?m)^\t+", lambda tabs: "    " * len(tabs[0]), text)
    restated, fences = None if goes_on else defines.search(text), list(FENCE.finditer(text))
    if fences and not goes_on and not (restated and restated.start() < fences[0].start()):
        blocks = fenced(text, fences)
        code, closed = next((block for block in blocks if defines.search(block[0])), blocks[0])
        return code, (closed or ended) and bool(defines.search(code))
    # Helpers may come first, so stop strings count after the function that is asked for.
    start = restated.end() if restated else 0
    code = text[: first_of(text, (*stops, "\n```"), start)]
    code = re.split(r"(?m)(?<=[^\s`])```[ \t]*$", code)[0]
    kept = without_prose(code, start) if restated else code
    return kept, ended or len(code) < len(text) or not code.endswith(kept)


def first_of(text, stops, start=0):
    """Where the first of some strings begins at or behind `start`; the end of the text if there is none."""
    return min((i for i in (text.find(stop, start) for stop in stops) if i >= 0), default=len(text))


def fenced(text, fences):
    """[(code, whether its end is there)] of the blocks of a text, without the indentation of their fences.

    A block ends at a fence that is as long and says no language; where it would be no Python so, at a later one.
    """
    blocks, behind = [], 0
    for i, fence in enumerate(fences):
        if fence.start() < behind:
            continue
        ends = [f for f in fences[i + 1 :] if f[2].startswith(fence[2]) and not f[3]]
        codes = [re.sub(f"(?m)^{fence[1]}", "", text[fence.end() + 1 : end.start()]) for end in ends]
        last = next((k for k, code in enumerate(codes) if parses(code)), 0)
        behind = ends[last].end() if ends else len(text)
        blocks.append((codes[last], True) if ends else (text[fence.end() + 1 :], False))
    return blocks


def parses(code):
    """Whether a text of reasonable length is Python; a longer one may end the parser, and this process."""
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return len(code) <= 20_000 and bool(ast.parse(code) or True)
    return False


def without_prose(code, start):
    """Code without lines of prose before the function whose name ends at `start`, and behind it."""
    lines, first = code.split("\n"), code[:start].count("\n")
    while first and not parses("\n".join(lines[:first])):
        lines, first = lines[1:], first - 1
    for i in range(first + 1, len(lines)):
        if PROSE.match(lines[i]) and not parses(lines[i]) and parses("\n".join(lines[:i])):
            return "\n".join(lines[:i])
    return "\n".join(lines)


def read_own(path, key):
    """The rows of a file that we append to. A last line without its end, which a kill leaves, is cut off."""
    data = path.read_bytes() if path.exists() else b""
    complete = data[: data.rfind(b"\n") + 1]
    if complete != data:
        os.truncate(path, len(complete))
    try:
        return parse_lines(complete.decode(), ("task_id", "completion", "sample", key))
    except ValueError as error:
        raise ValueError(f"{path}: {error}; remove it, or choose another --out") from None


def append(path, rows):
    """Add rows as JSON lines, and see that they are on disk."""
    with open(path, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())


def given_samples(cfg, problems):
    """{(key of problems, number): code} of --samples: lines with "task_id" and "completion", several per problem."""
    samples, count = {}, collections.Counter()
    try:
        rows = parse_lines(Path(cfg.samples).read_text("utf-8"), ("task_id", "completion"))
    except ValueError as error:
        raise ValueError(f"--samples={cfg.samples}: {error}") from None
    for row in rows:
        key = key_of(row["task_id"])
        names = {str(problems[key].id).lower(), f"{cfg.task}/{key}"} if key in problems else ()
        if str(row["task_id"]).lower() not in names:
            among = f"the {len(problems)} problems (--split, --problems)"
            raise ValueError(f"{cfg.samples}: {row['task_id']!r} is not among {among}")
        samples[key, count[key]] = extract(row["completion"], problems[key].entry, ())[0]
        count[key] += 1
    if not samples:
        raise ValueError(f"{cfg.samples} holds no samples; a line is {{'task_id': ..., 'completion': ...}}")
    k, most = max(cfg.k, default=1), max(count.values())
    if k > most:
        raise ValueError(f"pass@{k} needs as many samples of a problem; {cfg.samples} holds {most}")
    return samples


def generated_samples(cfg, problems, run, step, path):
    """{(key of problems, number): code} of --n samples each, None where the prompt does not fit; those in `path` stay.

    Batches are the same whichever samples are there already, so resuming equals not stopping.
    """
    rows = {(key_of(row["task_id"]), row["sample"]): row for row in read_own(path, "fits")}
    writer = None
    # problems of like length share a batch, and the first sample of all comes before the second of any
    order = [(key, i) for i in range(cfg.n) for key in sorted(problems, key=lambda k: len(problems[k].prompt))]
    for number, first in enumerate(range(0, len(order), cfg.batch_size)):
        keys = order[first : first + cfg.batch_size]
        if all(key in rows for key in keys):
            continue
        if writer is None:  # not before it is needed: a finished run loads no model
            writer = WRITERS[cfg.model](cfg, run, step)
            writer.tokenizer.encode_special_tokens = not cfg.dream.chat  # their names in a prompt are text
        written = write_batch(cfg, writer, [problems[key] for key, _ in keys], number)
        # of a batch that was half on disk only the other half is new
        new = {}
        for (key, i), row in zip(keys, written, strict=True):
            if (key, i) not in rows:
                new[key, i] = {"task_id": problems[key].id, "completion": "", "sample": i} | row
        append(path, new.values())
        rows |= new
        print(f"{len(rows):,} of {len(order):,} samples", file=sys.stderr, flush=True)
    return {key: row["completion"] if row["fits"] else None for key, row in rows.items()}


def write_batch(cfg, writer, batch, number):
    """{"completion": code, "fits": True} of each problem, "written" too if the model wrote more; or {"fits": False}."""
    padded = batch + batch[-1:] * (cfg.batch_size - len(batch))  # one shape is compiled, not two
    prompts = [writer.tokenizer.encode(writer.ask(p), add_special_tokens=False).ids for p in padded]
    # A prompt that is too long is replaced by its first token, so that the others keep their places in the batch.
    fits = [len(ids) + cfg.max_new <= writer.longest for ids in prompts]
    if not any(fits):
        return [{"fits": False}] * len(batch)
    prompts = [ids if fit else ids[:1] for ids, fit in zip(prompts, fits, strict=True)]

    def decode(ids_of_texts):
        """(text, code, whether nothing could change it) of each problem."""
        texts = writer.tokenizer.decode_batch(ids_of_texts)
        return [(text, *extract(text, p.entry, STOPS[cfg.task])) for text, p in zip(texts, padded, strict=True)]

    written = writer.write(prompts, lambda ids_of_texts: all(ended for _, _, ended in decode(ids_of_texts)), number)
    rows = []
    for (text, code, _), fit in zip(decode(written), fits, strict=True):
        row = {"completion": code, "fits": True} | ({"written": text} if text != code else {})
        rows.append(row if fit else {"fits": False})
    return rows[: len(batch)]


# ---- running and scoring -------------------------------------------------------------------------------------------


def program(problem, code):
    """What is run of a sample; an import from the future would be an error behind the prompt."""
    return problem.head + code.replace("from __future__ import annotations\n", "")


def score_samples(cfg, problems, samples, path):
    """Run the samples that `path` has no result of, and add a line for each: [((key, number), error)] of the others.

    A line is the official {"task_id", "completion"}, and "sample", "passed", "result" (of the hidden test). With
    several samples of a problem also what best-of-n needs: "public", the share of the examples in the prompt that pass,
    and "behaviour". The limit is max(--timeout_s, 4 x what the reference solution takes here), as EvalPlus has it.
    """
    done = {(key_of(row["task_id"]), row["sample"]) for row in read_own(path, "passed")}
    several, flags = any(number for _, number in samples), dataclasses.asdict(cfg.sandbox)
    unscored, slow = [], collections.defaultdict(list)

    def add(key, number, result):
        """Add the line of a sample: behind the hidden test are the examples of the prompt, then the probe."""
        problem = problems[key]
        row = {"task_id": problem.id, "completion": samples[key, number] or "", "sample": number}
        row["passed"] = result.verdicts[:1] == ["pass"]
        row["result"] = "passed" if row["passed"] else result.verdicts[0] if result.verdicts else "does not fit"
        if several:
            public = len(problem.public)
            row["public"] = result.verdicts[1 : 1 + public].count("pass") / max(1, public)
            row["behaviour"] = next((v for v in result.values[1 + public :] if isinstance(v, str)), "")
        append(path, [row])
        done.add((key, number))
        if len(done) % 200 == 0 or len(done) == len(samples):
            print(f"{len(done):,} of {len(samples):,} samples scored", file=sys.stderr, flush=True)

    def run(todo, timeout_s):
        """Add the lines of samples as soon as they have run; those too slow for the first limit are put by."""
        # one that does not fit the model has no tests, and so does not pass
        programs, tests = [], []
        for key, number in todo:
            problem, code = problems[key], samples[key, number]
            programs.append(program(problem, code or ""))
            all_tests = [problem.test, *(problem.public + problem.probes) * several]
            tests.append(all_tests if code is not None else [])

        def on_result(i, result):
            if result.rate is None:
                unscored.append((todo[i], result.error))
            elif result.verdicts[:1] == ["timeout"] and timeout_s == cfg.sandbox.timeout_s:
                slow[todo[i][0]].append((todo[i], result))
            else:
                add(*todo[i], result)

        limits = {"timeout_s": timeout_s, "program_s": 5 + 3 * timeout_s}
        sandbox.run_tests(programs, tests, on_result, main_block=False, **flags | limits)

    run([key for key in samples if key not in done], cfg.sandbox.timeout_s)
    # Is it the samples that are slow, or is the task? Its reference solution says.
    references = [(problems[key].reference, [problems[key].test]) for key in slow]
    patience = {"timeout_s": 60.0, "program_s": 180.0}
    timed = sandbox.run_tests(*map(list, zip(*references, strict=True)), **flags | patience) if slow else []
    for late, reference in zip(slow.values(), timed, strict=True):
        limit = 4 * sum(reference.cpu_s)
        if limit > cfg.sandbox.timeout_s:
            run([key for key, _ in late], limit)
        else:
            for key, result in late:
                add(*key, result)
    return sorted(unscored)


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
        by_problem[key_of(row["task_id"])].append(row)
    n = max(map(len, by_problem.values()), default=0)
    row = {"task": cfg.task} | ({"split": cfg.split} if cfg.task == "mbpp" else {})
    row |= {"problems": len(by_problem), "of": len(problems), "samples": len(rows), "n": n}
    row["results"] = dict(collections.Counter(r["result"] for r in rows).most_common())
    # pass@k over the problems that have k samples
    for k in sorted({*(cfg.k or (1, n))}):
        # samples and right samples of each problem
        counts = [(len(group), sum(r["passed"] for r in group)) for group in by_problem.values() if len(group) >= k > 0]
        if counts:
            values = [pass_at_k(n, c, k) for n, c in counts]
            row[f"pass@{k}"] = [float(np.mean(values)), *interval(values)]
            row |= {f"pass@{k} problems": len(counts)} if len(counts) < len(by_problem) else {}
    if n > 1:
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
        what = {"humaneval": "examples in the docstring, then majority", "mbpp": "majority"}[row["task"]]
        lines[-1] += f", of {row['n']} samples one is chosen without the hidden tests, by {what} of behaviour"
    return "\n".join(lines)


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
