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
import json
import math
import os
import random
import re
import sys
import typing
import urllib.request
import zlib
from pathlib import Path

import numpy as np
import tokenizers

import protocols
import runs
import sandbox


@dataclasses.dataclass(frozen=True)
class DreamFlags:
    """Flags of Dream, --model=dream."""

    chat: bool | None = None  # ask by the chat template, as instruct models want it; None: as the protocol has it
    threshold: float = 0.0  # fill at once all positions that are so sure; 0 fills one a pass
    block_length: int = 0  # fill blocks of this length from left to right; 0 takes the whole canvas at once
    cache: typing.Literal["", "prefix", "dual"] = ""  # keep keys and values within a block
    alg: typing.Literal["entropy", "maskgit_plus", "topk_margin", "origin"] = "entropy"  # who is filled first
    steps: int = 0  # denoising steps; 0: as many as tokens, or by --threshold
    eos_penalty: float = 0.0  # makes an early end less likely, see sample_dream.py


@dataclasses.dataclass(frozen=True)
class SandboxFlags:
    """Where programs run; see sandbox.py."""

    runner: typing.Literal["local", "e2b"] = "local"  # this machine, or the service E2B
    e2b_router_url: str = ""  # host:port of an Open-R1 router that holds the E2B key; with --runner=e2b
    workers: int = 0  # programs run at a time; 0: one per CPU
    timeout_s: float | None = None  # processor seconds for the tests of a sample; None: the protocol's, for ours 4
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
    protocol: str = "ours"  # a harness of protocols.py, as dream_instruct: its prompts, settings, cuts and tests
    trim_prefix: bool = True  # chat protocols: how transformers 4.46 ends a prompt; False: 4.49, with a newline more
    shots: int | None = None  # MBPP: solved problems in the prompt; None: the protocol's, for ours 3
    problems: int = 0  # only so many, the first ones; 0 takes all
    samples: str = ""  # score the completions in these JSON lines, taken out of ``` if need be; needs no model
    n: int = 1  # samples of each problem
    k: tuple[int, ...] = ()  # report pass@k for these; default 1 and n
    temperature: float | None = None  # 0 takes the likeliest token; None: the protocol's, for ours 0, of several 0.8
    top_p: float | None = None  # draw from the smallest set of tokens of this probability; None: the protocol's, 0.95
    max_new: int | None = None  # tokens at most; None: the protocol's, for ours 512
    batch_size: int = 16  # programs that are written at a time
    seed: int = 0  # of the samples
    explain: bool = False  # score the texts of --samples under every protocol: a table of what each rule changes
    json: bool = False  # print the report as one JSON line instead of text
    dream: DreamFlags = DreamFlags()
    sandbox: SandboxFlags = SandboxFlags()


def main(cfg):
    """Generate, run and report: the report. RuntimeError if the sandbox left samples unscored."""
    cfg = resolve(cfg)
    run = Path(cfg.ckpt or ("out/train_gpu" if cfg.model == "mdlm" else "out/train_tpu"))
    problems, out = read_problems(cfg), Path(cfg.out or f"out/{cfg.task}")
    if cfg.explain:
        return explain(cfg, problems, out)
    # What the results depend on: a folder goes on under the same settings alone.
    settings = {"task": cfg.task, "split": cfg.split, "problems": cfg.problems, "timeout_s": cfg.sandbox.timeout_s}
    settings |= {"protocol": protocol_of(cfg)[0], "tasks_sha256": sha256(tasks_path(cfg))}
    if cfg.samples:
        samples = given_samples(cfg, problems)
        settings["samples_sha256"] = sha256(cfg.samples)
    else:
        converted = (run / "meta.json").is_file()  # by convert_weights.py: it has no steps
        step = None if converted else runs.newest(run, cfg.step)[0]
        names = "model", "shots", "n", "temperature", "top_p", "max_new", "batch_size", "seed", "trim_prefix"
        settings |= {name: getattr(cfg, name) for name in names} | {"ckpt": str(run), "step": step}
        settings["model_sha256"] = sha256(run / ("meta.json" if converted else "config.json"), str(step))
        settings |= dataclasses.asdict(cfg.dream) if cfg.model == "dream" else {}
    # Write, run, score; every sample and result is on disk as soon as it is known.
    out.mkdir(parents=True, exist_ok=True)
    with runs.lock(out / "results.jsonl"):
        before = runs.read_json(out / "config.json") if (out / "config.json").exists() else settings
        changed = [f"{k}={before.get(k)!r}" for k in before | settings if before.get(k) != settings.get(k)]
        changed = [setting for setting in changed if not setting.startswith("version=")]
        if changed:
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
    """The fingerprint of a file, and of a text that belongs to it."""
    return hashlib.sha256(Path(path).read_bytes() + more.encode()).hexdigest()


VERSION = sha256(__file__, "".join(sha256(module.__file__) for module in (protocols, sandbox)))[:12]  # of the ruler


def protocol_of(cfg):
    """(name, record) of --protocol, with what flags say in place of it."""
    ours_chat = cfg.protocol == "ours" and cfg.dream.chat
    name, record = protocols.named("ours_chat" if ours_chat else cfg.protocol, cfg.task)
    flags = {field: getattr(cfg, field) for field in ("shots", "temperature", "top_p", "max_new")}
    if cfg.dream.chat is not None and not name.startswith("ours"):
        flags["system"] = (record.system or protocols.ASSISTANT) if cfg.dream.chat else None
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
    if not 0 < cfg.top_p <= 1 or not 0 <= cfg.shots <= len(SHOTS) or not 0 < cfg.sandbox.timeout_s < math.inf:
        raise ValueError(f"--top_p is in (0, 1], --shots from 0 to {len(SHOTS)}, --timeout_s above 0")
    if cfg.model != "dream" and cfg.dream != DreamFlags():
        raise ValueError(f"{', '.join(f'--{f.name}' for f in dataclasses.fields(DreamFlags))} are for --model=dream")
    if cfg.explain and not cfg.samples:
        raise ValueError("--explain scores what a model wrote: --samples=FILE, such as samples.jsonl of an earlier run")
    if not cfg.samples and max(cfg.k, default=1) > cfg.n:
        raise ValueError(f"pass@{max(cfg.k)} needs --n={max(cfg.k)} samples of each problem or more, not {cfg.n}")
    if not cfg.samples and cfg.n > 1 and cfg.temperature == 0:
        raise ValueError(f"--temperature=0 writes the same text {cfg.n} times; raise it, or leave --n at 1")
    return cfg


# ---- problems ------------------------------------------------------------------------------------------------------

TASKS = {  # official files
    "humaneval": "https://raw.githubusercontent.com/openai/human-eval/master/data/HumanEval.jsonl.gz",
    "mbpp": "https://raw.githubusercontent.com/google-research/google-research/master/mbpp/sanitized-mbpp.json",
    "full": "https://raw.githubusercontent.com/google-research/google-research/master/mbpp/mbpp.jsonl",
}
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
    asked: protocols.Question  # what prompts are made of
    head: str  # what stands before a completion when it runs
    test: str  # hidden
    public: list  # asserts made of the examples that the prompt shows
    probes: list  # PROBE, if there are inputs for it
    reference: str  # a program that passes; its time is the measure of a sample's


def tasks_path(cfg):
    """The official file: --tasks_file, or where its download goes."""
    return Path(cfg.tasks_file or Path(cfg.downloads) / tasks_url(cfg).rsplit("/", 1)[1])


def tasks_url(cfg):
    """MBPP is for some protocols the full one."""
    return TASKS["full" if cfg.task == "mbpp" and protocol_of(cfg)[1].data == ("mbpp",) else cfg.task]


def read_problems(cfg):
    """{id as a string: Problem} of the official file: --tasks_file, or downloaded once into --downloads."""
    url, path = tasks_url(cfg), tasks_path(cfg)
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
    if humaneval:
        rows = parse_lines(text, ("task_id", "prompt", "entry_point", "test"))
    else:  # the full MBPP is JSON lines
        rows = json.loads(text) if text.lstrip().startswith("[") else parse_lines(text, ("task_id", "text", "code"))
    try:
        if not humaneval:  # the solved problems of the prompt have ids outside the test split
            check_data(cfg, "mbpp" if "text" in rows[0] else "sanitized")
            shots = [mbpp_question(row) for row in rows if row["task_id"] in SHOTS]
            rows = [row for row in rows if cfg.split == "all" or 11 <= row["task_id"] <= 510]
        for row in rows[: cfg.problems or None]:
            problems[key_of(row["task_id"])] = humaneval_problem(row) if humaneval else mbpp_problem(row, shots)
    except (LookupError, TypeError, AttributeError, SyntaxError) as error:
        raise ValueError(f"problem {len(problems) + 1} is of another form: {error!r}") from None
    if not problems:
        raise ValueError("it holds no problems")
    return problems


def check_data(cfg, kind):
    """Raises ValueError if a protocol does not ask the problems of this data set."""
    name, record = protocol_of(cfg)
    wanted, given = (protocols.DATA[key][0] for key in (record.data[0], kind))
    if kind not in record.data and not cfg.explain:
        raise ValueError(f"--protocol={name} asks for {wanted}, and this is {given}")
    if kind != record.data[0] and not cfg.explain and not name.startswith("ours"):
        print(f"scores that are published of {name} are of {wanted}, and this is {given}", file=sys.stderr)


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
    """Ref: Chen et al., arXiv:2107.03374."""
    task_id, prompt, entry = row["task_id"], row["prompt"], row["entry_point"]
    reference = prompt + row.get("canonical_solution", "")
    public, arguments = docstring_examples(prompt, entry)
    # helpers that the prompt defines stand in the test, too: the test calls some, and not as a sample may redefine them
    helpers = [node for node in ast.parse(prompt).body if getattr(node, "name", "") != entry]
    test = "\n".join([*map(ast.unparse, helpers), row["test"], f"check({entry})"])
    asked = protocols.Question(entry, prompt, row["test"])
    return Problem(task_id, entry, asked, prompt, test, public, probes(task_id, entry, arguments), reference)


def mbpp_question(row):
    """What is asked: the full MBPP has its words as "text", the sanitized one, in other words, as "prompt"."""
    words, tests = row.get("text", row.get("prompt")), tuple(row["test_list"])
    docstring = f'"""\n{words}\n{tests[0]}\n"""\n'  # as EvalPlus and BigCode ask it
    return protocols.Question(called(tests), docstring, text=words, tests=tests, code=row["code"])


def mbpp_problem(row, shots):
    """Ref: Austin et al., arXiv:2108.07732: the task and three asserts, after problems with their answers.

    The asserts in the prompt are among those that decide, so none of them is `public`: best-of-n would be an oracle.
    The inputs in them are used, not the values expected.
    """
    asked = mbpp_question(row)
    asked = asked._replace(shots=tuple(shot for shot in shots if shot != asked))  # without its own solution
    # all in one process, as the harnesses have it: a function that works once is no solution
    test = "\n".join([*row.get("test_imports", row.get("test_setup_code", "").splitlines()), *row["test_list"]])
    arguments = [literals(call, asked.entry) for call in calls_of(row["test_list"])]
    found = probes(row["task_id"], asked.entry, [args for args in arguments if args is not None])
    return Problem(row["task_id"], asked.entry, asked, "", test, [], found, row["code"])


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
    wrap: typing.Callable | None = None  # the model's chat template


def load_jax(family, cfg, run, step):
    """(model, function that gives the random key of a batch)."""
    import jax

    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    model, _ = runs.load(family, run, step or 0, dtype)
    return model, lambda batch: jax.random.fold_in(jax.random.key(cfg.seed), batch)


def cut(ids, ends):
    """The token ids up to the first one that ends a text."""
    return ids[: next((place + 1 for place, i in enumerate(ids) if i in ends), len(ids))]


def pythoncoder_writer(cfg, run, step):
    """Writes from left to right; with heads for further tokens it drafts by them."""
    import model_pythoncoder as pc

    model, key_of_batch = load_jax(pc, cfg, run, step)
    tokenizer = runs.read_tokenizer(run)
    eos = tokenizer.token_to_id("<|endoftext|>")
    vocab, eos = tokenizer.get_vocab_size(), -1 if eos is None else eos
    rule = pc.Sampling(cfg.temperature, 0, cfg.top_p, vocab, eos, speculate=model.cfg.mtp)

    def write(prompts, finished, batch):
        return pc.generate(model, prompts, cfg.max_new, rule, key_of_batch(batch), on_tokens=finished)[0]

    return Writer(tokenizer, int(model.cfg.positions * model.cfg.yarn_factor), write)


def dream_writer(cfg, run, step):
    """Fills --max_new masks after the prompt, the surest tokens first."""
    import model_dream
    import sample_dream

    model, key_of_batch = load_jax(model_dream, cfg, run, step)
    tokenizer, wrap = sample_dream.load_tokenizer(run, model.cfg), sample_dream.chat_template(run)
    record = protocol_of(cfg)[1]
    if record.system == "" and not wrap:
        raise ValueError(f"--chat: {run} holds no chat template (tokenizer_config.json)")
    # tokens after which nothing is read, if there are any; MASK cannot be one, it is what is filled
    names = protocols.END_TOKENS.get(record.ends, ())
    ends = {tokenizer.token_to_id(name) for name in names} | ({model.cfg.eos_id} if names else set())
    ends = tuple(sorted(ends - {None, model.cfg.mask_id}))
    settings = dataclasses.asdict(cfg.dream)
    rule = {name: value for name, value in settings.items() if name != "chat"}
    rule |= {"temperature": cfg.temperature, "top_p": cfg.top_p, "vocab": tokenizer.get_vocab_size()}
    rule = sample_dream.Sampling(**rule, eos_ids=ends)

    def write(prompts, finished, batch):
        rows, _ = sample_dream.generate(model, prompts, cfg.max_new, rule, key_of_batch(batch))
        return [cut(row[len(ids) :], ends) for row, ids in zip(rows, prompts, strict=True)]

    return Writer(tokenizer, model.cfg.positions, write, wrap)


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


def read_own(path, key, protocol):
    """The rows of a file that we append to. A last line without its end, which a kill leaves, is cut off."""
    data = path.read_bytes() if path.exists() else b""
    complete = data[: data.rfind(b"\n") + 1]
    if complete != data:
        os.truncate(path, len(complete))
    try:
        rows = parse_lines(complete.decode(), ("task_id", "completion", "sample", key))
        one_protocol(rows, protocol)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; remove it, or choose another --out") from None
    return rows


def one_protocol(rows, protocol):
    """Raises ValueError for rows that were made by another protocol than this one."""
    others = {row.get("protocol", protocol) for row in rows} - {protocol}
    if others:
        raise ValueError(f"it holds samples of --protocol={', '.join(sorted(others))}, and this is {protocol}")


def append(path, rows):
    """Add rows as JSON lines, and see that they are on disk."""
    with open(path, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())


def given_rows(cfg, problems):
    """{(key of problems, number): row} of --samples, of which a problem may have several."""
    samples, count, unknown = {}, collections.Counter(), []
    try:
        rows = parse_lines(Path(cfg.samples).read_text("utf-8"), ("task_id", "completion"))
    except ValueError as error:
        raise ValueError(f"--samples={cfg.samples}: {error}") from None
    for row in rows:
        key = key_of(row["task_id"])
        names = {str(problems[key].id).lower(), f"{cfg.task}/{key}"} if key in problems else ()
        if str(row["task_id"]).lower() not in names:
            unknown.append(repr(row["task_id"]))
            continue
        samples[key, count[key]] = row
        count[key] += 1
    if unknown:
        among = f"not among the {len(problems)} problems (--split, --problems)"
        raise ValueError(f"{cfg.samples}: {', '.join(unknown[:3])}, {len(unknown)} in all, {among}")
    if not samples:
        raise ValueError(f"{cfg.samples} holds no samples; a line is {{'task_id': ..., 'completion': ...}}")
    k, most = max(cfg.k, default=1), max(count.values())
    if k > most:
        raise ValueError(f"pass@{k} needs as many samples of a problem; {cfg.samples} holds {most}")
    return samples


def given_samples(cfg, problems):
    """{(key of problems, number): code} of --samples. Texts that a model wrote are cut by the protocol.

    A completion of which the text is not there is the text; ours cuts it at no stop string, as that is done already.
    """
    name, record = protocol_of(cfg)
    samples, rows = {}, given_rows(cfg, problems)
    try:
        one_protocol([row for row in rows.values() if "written" not in row], name)
    except ValueError as error:
        raise ValueError(f"{cfg.samples}: {error}; the texts that were written are needed") from None
    for (key, number), row in rows.items():
        question = problems[key].asked
        if "written" in row or not name.startswith("ours"):
            samples[key, number] = candidate(record, row.get("written", row["completion"]), question)
        else:
            samples[key, number] = protocols.taken_out(row["completion"], question.entry, ())
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
    name, record = protocol_of(cfg)
    rows = {(key_of(row["task_id"]), row["sample"]): row for row in read_own(path, "fits", name)}
    writer = None
    # problems of like length share a batch, and the first sample of all comes before the second of any
    order = [(key, i) for i in range(cfg.n) for key in sorted(problems, key=lambda k: len(problems[k].asked.prompt))]
    for number, first in enumerate(range(0, len(order), cfg.batch_size)):
        keys = order[first : first + cfg.batch_size]
        if all(key in rows for key in keys):
            continue
        if writer is None:  # not before it is needed: a finished run loads no model
            writer = WRITERS[cfg.model](cfg, run, step)
            if record.system and writer.tokenizer.token_to_id("<|im_start|>") is None:
                raise ValueError(f"--protocol={name} asks by a chat template, and {run} has no token <|im_start|>")
            writer.tokenizer.encode_special_tokens = record.system is None  # their names in a prompt are text
        written = write_batch(cfg, writer, [problems[key] for key, _ in keys], number)
        # of a batch that was half on disk only the other half is new
        new = {}
        for (key, i), row in zip(keys, written, strict=True):
            if (key, i) not in rows:
                about = {"task_id": problems[key].id, "completion": "", "sample": i, "protocol": name}
                new[key, i] = about | row
        append(path, new.values())
        rows |= new
        print(f"{len(rows):,} of {len(order):,} samples", file=sys.stderr, flush=True)
    return {key: row["completion"] if row["fits"] else None for key, row in rows.items()}


def write_batch(cfg, writer, batch, number):
    """{"completion": code, "written": all of the text, "fits": True} of each problem; or {"fits": False}."""
    record = protocol_of(cfg)[1]
    padded = batch + batch[-1:] * (cfg.batch_size - len(batch))  # one shape is compiled, not two
    prompts = [prompt_ids(cfg, writer, record, problem.asked) for problem in padded]
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


def prompt_ids(cfg, writer, record, question):
    """The tokens that a model reads; ours asks chat models by their own template."""
    own = record.system == ""
    text = writer.wrap(record.ask(question, ())) if own else protocols.prompt(record, question, cfg.trim_prefix)
    ids = writer.tokenizer.encode(text, add_special_tokens=False).ids[-record.prompt_tokens :]
    bos = writer.tokenizer.token_to_id("<|beginoftext|>") if record.bos else None
    return ids if bos is None else [bos, *ids]


# ---- running and scoring -------------------------------------------------------------------------------------------


def program(cfg, problem, code):
    """What is run of a sample before its tests."""
    name, record = protocol_of(cfg)
    return problem.head + code if name.startswith("ours") else protocols.program(record, code, problem.asked)


def hidden_test(cfg, problem):
    """What decides: the file's tests; for MBPP and other protocols than ours the first three, as the harness has it."""
    name, record = protocol_of(cfg)
    if name.startswith("ours") or not problem.asked.tests:
        return problem.test
    return protocols.target(record, problem.asked)


def score_samples(cfg, problems, samples, path):
    """Run the samples that `path` has no result of, and add a line for each: [((key, number), error)] of the others.

    A line is the official {"task_id", "completion"}, and "sample", "passed", "result" (of the hidden test). With
    several samples of a problem also what best-of-n needs: "public", the share of the examples in the prompt that pass,
    and "behaviour". The limit is max(--timeout_s, 4 x what the reference solution takes here), as EvalPlus has it; for
    harnesses with one limit that alone.
    """
    name, record = protocol_of(cfg)
    done = {(key_of(row["task_id"]), row["sample"]) for row in read_own(path, "passed", name)}
    several, flags = any(number for _, number in samples), dataclasses.asdict(cfg.sandbox)
    unscored, slow = [], collections.defaultdict(list)

    def add(key, number, result):
        """Add the line of a sample: behind the hidden test are the examples of the prompt, then the probe."""
        problem = problems[key]
        row = {"task_id": problem.id, "completion": samples[key, number] or "", "sample": number}
        row["protocol"] = name
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
            programs.append(program(cfg, problem, code or ""))
            all_tests = [hidden_test(cfg, problem), *(problem.public + problem.probes) * several]
            tests.append(all_tests if code is not None else [])

        def on_result(i, result):
            if result.rate is None:
                unscored.append((todo[i], result.error))
            elif result.verdicts[:1] == ["timeout"] and timeout_s == cfg.sandbox.timeout_s and record.factor:
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
        limit = record.factor * sum(reference.cpu_s)
        if limit > cfg.sandbox.timeout_s:
            run([key for key, _ in late], limit)
        else:
            for key, result in late:
                add(*key, result)
    return sorted(unscored)


# ---- explaining: the same texts under every protocol ---------------------------------------------------------------


def explain(cfg, problems, out):
    """Score the texts of --samples under the post-processing of every protocol, by the same tests: rows of a table.

    A protocol has lost a text that fails under it and passes under another. The rule to blame is the first one without
    which it would pass. Protocols that treat texts alike share a row.
    """
    rows, names = given_rows(cfg, problems), {}
    texts = {where: row.get("written", row["completion"]) for where, row in rows.items()}
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
        row["pass@1"] = [float(np.mean(rates)), *interval(rates)]
        row["lost"] = dict(sorted(blamed.items(), key=lambda item: -len(item[1])))
        table.append(row)
    table.sort(key=lambda row: -row["passed"])
    hashes = {"tasks_sha256": sha256(tasks_path(cfg)), "samples_sha256": sha256(cfg.samples), "version": VERSION}
    report = {"task": cfg.task, "problems": len({key for key, _ in texts}), "samples": len(texts), "some": len(some)}
    report |= {"timeout_s": cfg.sandbox.timeout_s, "table": table} | hashes
    out.mkdir(parents=True, exist_ok=True)
    runs.write(out / "explain.json", report)
    print(json.dumps(report) if cfg.json else describe_table(report), flush=True)
    return report


def run_distinct(cfg, problems, pairs, known):
    """{(key, program): whether it passes} of pairs, with those known already; each runs once."""
    new = [pair for pair in dict.fromkeys(pairs) if pair not in known]
    tests = [[problems[key].test] for key, _ in new]
    print(f"running {len(new):,} programs", file=sys.stderr, flush=True)
    limits = {"timeout_s": cfg.sandbox.timeout_s, "program_s": 5 + 3 * cfg.sandbox.timeout_s, "main_block": False}
    results = sandbox.run_tests([code for _, code in new], tests, **dataclasses.asdict(cfg.sandbox) | limits)
    unscored = [problems[pair[0]].id for pair, result in zip(new, results, strict=True) if result.rate is None]
    if unscored:
        error = next(result.error for result in results if result.rate is None)
        raise RuntimeError(f"{len(unscored)} programs, as of {unscored[0]}, could not be run: {error}")
    return known | {pair: result.rate == 1 for pair, result in zip(new, results, strict=True)}


def describe_table(report):
    """The table of explain() as text: a line a protocol, and below it what it has lost by which rule."""
    lines = ["{task}: {samples:,} texts of {problems} problems; {some:,} pass under some protocol".format(**report)]
    for row in report["table"]:
        mean, low, high = (100 * x for x in row["pass@1"])
        score = f"{row['passed']:5,} of {row['samples']:,}, pass@1 {mean:5.1f} % ({low:.1f} to {high:.1f})"
        lines.append(f"{score}  {', '.join(row['protocols'])}")
        for rule, ids in row["lost"].items():
            which = [str(i) for i in dict.fromkeys(ids)]
            more = f" and {len(which) - 6} more" if len(which) > 6 else ""
            lines.append(f"       -{len(ids):<4} {rule}: {', '.join(which[:6])}{more}")
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
