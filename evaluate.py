"""Score a trained model on text that it has not seen.

    python evaluate.py                                        # newest checkpoint of out/train_tpu on its held-out files
    python evaluate.py --model=mdlm --plot=noise.png          # newest checkpoint of out/train_gpu
    python evaluate.py --ckpt=out/mine --all_steps=True      # every checkpoint that was kept
    python evaluate.py --task=humaneval                       # pass@1: writes 164 programs and runs them in sandbox.py
    python evaluate.py --task=mbpp --n=10 --k 1 10            # pass@1, pass@10, and the best of 10
    python evaluate.py --task=humaneval --samples=mine.jsonl  # scores programs from elsewhere

Prints nats per token and bits per byte. PythonCoder: beside `xz -9` on the same bytes, and how often the MTP head's
greedy draft is accepted. MDLM: the bound with its standard error, accuracy by noise level, and generation times. Reads
a run folder of train_tpu.py or train_gpu.py and the data folder it was trained on.

With --task, writes --out: samples.jsonl (what the model wrote), results.jsonl (the same with verdicts; both in the
official format), summary.json. A line is added as soon as it is known, and the same command goes on after a stop.

Letters: R rows, B rows at a time, L row length, V vocabulary.
"""

import ast
import builtins
import collections
import contextlib
import dataclasses
import fcntl
import gzip
import hashlib
import http.client
import io
import itertools
import json
import logging
import lzma
import math
import os
import random
import re
import sys
import time
import typing
import urllib.request
import zlib
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import tokenizers
import tyro

import sandbox


@dataclasses.dataclass(frozen=True)
class Config:
    model: typing.Literal["pythoncoder", "mdlm", "dream"] = "pythoncoder"  # Dream: with --task alone
    ckpt: str = ""  # run folder, Dream also as converted; "" is out/train_tpu, or out/train_gpu for MDLM
    data: str = ""  # folder of data_prep.py; "" is the one that the run was trained on
    step: int = 0  # which checkpoint; 0 takes the newest
    all_steps: bool = False  # PythonCoder: score every checkpoint of the run
    rows: int = 0  # held-out rows to score; 0 takes all
    batch_size: int = 16
    drafts: int = 16  # PythonCoder: held-out prompts continued to count accepted drafts; 0 leaves it out
    draws: int = 8  # MDLM: noise draws of every row; two at least, for the standard error
    lengths: tuple[int, ...] = (64, 128, 256)  # MDLM: canvases whose generation is timed
    steps: tuple[int, ...] = (10, 25, 50)  # MDLM: in so many steps
    plot: str = ""  # MDLM: write a PNG of loss against noise level
    seed: int = 0
    json: bool = False  # print one JSON line per checkpoint instead of text
    task: typing.Literal["", "humaneval", "mbpp"] = ""  # write programs and run them, instead of the above
    out: str = ""  # folder for samples and results, goes on there if it exists; "" is out/<task>
    tasks_file: str = ""  # the official HumanEval.jsonl(.gz) or sanitized-mbpp.json; "" downloads it
    downloads: str = "data/tasks"  # folder for them
    split: typing.Literal["test", "all"] = "test"  # MBPP: ids 11-510 (257 problems), or all 427
    shots: int = 3  # MBPP: solved problems in the prompt
    problems: int = 0  # only so many, the first ones; 0 takes all
    samples: str = ""  # score the completions in these JSON lines, taken out of ``` if need be; needs no model
    n: int = 1  # samples of each problem
    k: tuple[int, ...] = ()  # report pass@k for these; default 1 and n
    temperature: float | None = None  # 0 takes the likeliest token; default 0 for one sample, else 0.8
    top_p: float = 0.95
    max_new: int = 512  # tokens at most
    chat: bool = False  # Dream: ask by the chat template, as instruct models want it; for MBPP with --shots=0
    threshold: float = 0.0  # Dream: fill at once all positions that are so sure; 0 fills one a pass
    block_length: int = 0  # Dream: fill blocks of this length from left to right
    cache: typing.Literal["", "prefix", "dual"] = ""  # Dream: keys and values kept within a block
    runner: typing.Literal["local", "e2b"] = "local"  # where programs run, see sandbox.py
    e2b_router_url: str = ""  # host:port of an Open-R1 router that holds the E2B key; with --runner=e2b
    workers: int = 0  # programs run at a time; 0: one per CPU
    timeout_s: float = 3.0  # of one test
    allow_unsafe: bool = False  # run programs where the machine offers no safe sandbox


TRAINERS = {"pythoncoder": "train_tpu.py", "mdlm": "train_gpu.py", "dream": "train_tpu.py --model=dream_tiny"}


def pass_at_k(n, c, k):
    """Probability that at least one of k samples, drawn without replacement from n of which c are right, is right.

    1 - C(n - c, k) / C(n, k), the unbiased estimator of pass@k. Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    Ref: Chen et al., arXiv:2107.03374, eq. 1.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {c} right samples among {n}: need 0 <= c <= n and 1 <= k <= n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def read_rows(folder, limit):
    """Held-out rows of a data_prep.py folder: int32 tokens, segments, positions, each [R, L]."""
    try:
        shards = json.loads((folder / "meta.json").read_text())["splits"]["heldout"]["shards"]
        tables = [pq.read_table(folder / shard["file"]) for shard in shards]
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"no held-out rows in {folder} ({str(error).splitlines()[0]}); write them with data_prep.py")

    if not tables:
        sys.exit(f"{folder} holds no held-out rows; write it again with data_prep.py and a larger --heldout")

    def column(name):
        parts = [table[name].combine_chunks() for table in tables]
        return np.concatenate([part.values.to_numpy().reshape(len(part), -1) for part in parts]).astype(np.int32)

    return tuple(column(name)[: limit or None] for name in ("input_ids", "segments", "positions"))


def token_bytes(tokenizer, vocab):
    """Bytes that each id stands for, int64 [V]: 0 for special tokens. Byte-level tokens are written a letter a byte."""
    special = tokenizer.get_added_tokens_decoder()
    names = {i: name for name, i in tokenizer.get_vocab().items() if i not in special}
    return np.array([len(names.get(i, "")) for i in range(vocab)])


# ---- PythonCoder ---------------------------------------------------------------------------------------------------


def draft_rate(model, tokenizer, token_RL, cfg):
    """Share of the MTP head's greedy drafts that are accepted, on continuations of the first half of held-out rows."""
    import jax

    import model_pythoncoder as pc

    half = min(64, token_RL.shape[1] // 2)
    prompts = [row[:half].tolist() for row in token_RL[:: max(1, len(token_RL) // cfg.drafts)][: cfg.drafts]]
    rule = pc.Sampling(vocab=tokenizer.get_vocab_size())
    _, stats = pc.generate(model, prompts, half, rule, jax.random.key(0), chunk=half)
    return stats["accepted"] / (stats["forwards"] - len(prompts))  # the pass over the prompt has no draft to check


def score_pythoncoder(cfg, run, held_out, tokenizer, vocab):
    """One row of scores for each checkpoint."""
    import jax
    import jax.numpy as jnp

    import model_pythoncoder as pc

    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs a traceback where we print one line
    token_RL, segment_RL, _ = held_out
    text = tokenizer.decode(token_RL[segment_RL > 0].tolist()).encode()
    xz_bits_per_byte = 8 * len(lzma.compress(text, preset=9)) / len(text)
    bytes_V = jnp.array(token_bytes(tokenizer, vocab), jnp.float32)

    @jax.jit
    def score(model, token_BL, segment_BL, position_BL):
        nats, _ = model.losses(token_BL, segment_BL, position_BL, mtp=False)
        mask_BL, _ = pc.target_masks(segment_BL)
        return jnp.stack([nats, mask_BL.sum(), (mask_BL * bytes_V[jnp.roll(token_BL, -1, 1)]).sum()])

    dtype = jnp.float32 if jax.devices()[0].platform == "cpu" else jnp.bfloat16
    steps = sorted(int(p.name) for p in (run / "checkpoints").glob("*") if p.name.isdigit())
    rows_out = []
    for step in steps if cfg.all_steps else [cfg.step or None]:
        with contextlib.redirect_stderr(io.StringIO()):
            try:
                model, _, step = pc.load(run, step, dtype)
            except (FileNotFoundError, ValueError) as error:
                print(error, file=sys.__stderr__, flush=True)
                os._exit(1)  # threads of a failed Orbax read print tracebacks until the process ends
        sums, B = np.zeros(3), cfg.batch_size
        for i in range(0, len(token_RL), B):  # the last batch is filled with empty rows
            batch = [np.pad(x[i : i + B], ((0, max(0, i + B - len(x))), (0, 0))) for x in held_out]
            sums += np.asarray(score(model, *batch), np.float64)
        row = {
            "step": step,
            "heldout_tokens": int(sums[1]),
            "nats_per_token": sums[0] / sums[1],
            "bits_per_byte": sums[0] / math.log(2) / sums[2],
            "xz_bits_per_byte": xz_bits_per_byte,
        }
        if cfg.drafts and model.cfg.mtp:
            row["drafts_accepted"] = draft_rate(model, tokenizer, token_RL, cfg)
        rows_out.append(row)
        print(json.dumps(row) if cfg.json else " | ".join(f"{k} {v:,.4g}" for k, v in row.items()), flush=True)
    return rows_out


# ---- MDLM ----------------------------------------------------------------------------------------------------------


def score_mdlm(cfg, run, held_out, tokenizer, vocab):
    """The bound, its parts by noise level, and generation times, of one checkpoint."""
    import torch

    import diffusion
    import model_mdlm as mdlm

    steps = sorted(int(p.name[5:]) for p in run.glob("step_*") if p.name[5:].isdigit())
    step = cfg.step or (steps[-1] if steps else 0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model = mdlm.load(run / f"step_{step}", device)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(str(error))
    token_RL, rng = held_out[0].astype(np.int64), np.random.default_rng(cfg.seed)
    if token_RL.shape[1] > model.cfg.positions:
        sys.exit(f"rows of {token_RL.shape[1]} tokens do not fit the model's {model.cfg.positions} positions")
    counted_RL = (token_RL != mdlm.PAD) & (token_RL != mdlm.BOS)
    totals, level = [], np.zeros((10, 3))  # by tenths of the mask rate: nats, right tokens, masked tokens
    for _ in range(cfg.draws):
        u_R = rng.permutation(diffusion.antithetic_times(rng.random(len(token_RL)), eps=0))
        mask_RL, weight_R = diffusion.mask_exactly(counted_RL, u_R, rng.random(token_RL.shape))
        nll_R = []
        for i in range(0, len(token_RL), cfg.batch_size):
            x0, mask = (torch.from_numpy(x[i : i + cfg.batch_size]).to(device) for x in (token_RL, mask_RL))
            rate = torch.from_numpy(1 / weight_R[i : i + cfg.batch_size]).float().to(device)
            with torch.inference_mode():
                xt = torch.where(mask, mdlm.MASK, x0)
                hidden_ND = model.hidden(xt, rate, xt != mdlm.PAD)[mask]
                sums = torch.zeros(len(x0), 2, dtype=torch.float64, device=device)
                parts = (x.split(1024) for x in (hidden_ND, x0[mask], mask.nonzero()[:, 0]))
                for hidden, token, owner in zip(*parts, strict=True):  # never the logits of all positions
                    logits = diffusion.ban(model.logits(hidden), [mdlm.MASK])
                    nll = diffusion.masked_nll(logits, token, torch.ones_like(token, dtype=torch.bool), mdlm.MASK)
                    right = logits.argmax(-1) == token
                    sums.index_add_(0, owner, torch.stack([nll, right], 1).double())
                nll, right = sums.T
            nll_R += nll.tolist()
            tenth = np.minimum((rate.cpu().numpy() * 10).astype(int), 9)
            np.add.at(level, tenth, torch.stack([nll, right, mask.sum(1)], 1).cpu().numpy())
        totals.append((np.array(nll_R) * weight_R).sum() / counted_RL.sum())
    nats, error = float(np.mean(totals)), float(np.std(totals, ddof=1) / math.sqrt(len(totals)))
    row = {"step": step, "heldout_tokens": int(counted_RL.sum()), "nats_per_token": nats, "standard_error": error}
    bits = nats * int(counted_RL.sum()) / math.log(2)
    row |= {"perplexity": math.exp(nats), "bits_per_byte": bits / int(token_bytes(tokenizer, vocab)[token_RL].sum())}
    row["by_noise"] = [
        {"mask_rate": (i + 0.5) / 10, "masked_ce": loss / n, "accuracy": hits / n}
        for i, (loss, hits, n) in enumerate(level.tolist())
        if n
    ]
    row["latency"] = []
    for length in (n for n in cfg.lengths if n <= model.cfg.positions):
        for n in cfg.steps:
            canvas = torch.full((1, length), mdlm.MASK, device=device)
            canvas[0, 0] = mdlm.BOS
            seconds = []
            for _ in range(4):
                started = time.perf_counter()
                generator = torch.Generator(device).manual_seed(cfg.seed)
                mdlm.sample(model, canvas, mdlm.Sampling(steps=n), generator).tolist()
                seconds.append(time.perf_counter() - started)
            row["latency"].append({"length": length, "steps": n, "ms": 1e3 * float(np.median(seconds[1:]))})
    if cfg.plot:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        _, axis = plt.subplots(figsize=(7, 4))
        axis.plot([r["mask_rate"] for r in row["by_noise"]], [r["masked_ce"] for r in row["by_noise"]], "o-")
        axis.set(xlabel="share of tokens masked", ylabel="nats per masked token", title=f"{run.name}, step {step}")
        axis.grid(alpha=0.3)
        plt.tight_layout()
        plt.savefig(cfg.plot, dpi=120)
    return row


def show_mdlm(row):
    """The scores as tables."""
    bound = f"{row['nats_per_token']:.4f} +- {row['standard_error']:.4f} nats per token at most"
    print(f"step {row['step']}: {bound} over {row['heldout_tokens']:,} tokens, ", end="")
    print(f"perplexity {row['perplexity']:.3f}, {row['bits_per_byte']:.4f} bits per byte")
    print("masked | nats per masked token | accuracy")
    for r in row["by_noise"]:
        print(f"{r['mask_rate']:6.0%} | {r['masked_ce']:21.3f} | {r['accuracy']:8.1%}")
    print("length | steps | ms")
    for r in row["latency"]:
        print(f"{r['length']:6} | {r['steps']:5} | {r['ms']:.1f}")


# ---- HumanEval and MBPP --------------------------------------------------------------------------------------------

TASKS = {  # official files
    "humaneval": "https://raw.githubusercontent.com/openai/human-eval/master/data/HumanEval.jsonl.gz",
    "mbpp": "https://raw.githubusercontent.com/google-research/google-research/master/mbpp/sanitized-mbpp.json",
}
ENDS = ("<|endoftext|>", "<|file_sep|>", "<|im_end|>", "\n```")
STOPS = {  # of BigCode's harness, and Austin et al.'s [DONE]
    "humaneval": ("\nclass ", "\ndef ", "\n#", "\n@", "\nif ", "\nprint(", "\nassert ", *ENDS),
    "mbpp": ("[DONE]", "\nclass ", "\nassert ", '\n"""', "\nprint(", "\nif ", *ENDS),
}
CHAT = {  # what a user asks an instruct model
    "humaneval": "Complete this Python function. Answer with all of it in one block of code.\n\n```python\n{}\n```",
    "mbpp": "{}",
}
SHOTS = (2, 3, 4)  # MBPP: the problems that the paper shows before the one that is asked
ARROW = re.compile(r"\s*(?:==>|=>|==|=|->|➞|→|#?\s*(?:should )?returns?\b)[ \t]*")
# A test whose value tells programs apart: a hash of what they return for some inputs, "" if they never do.
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
assert _behaviour() == ''"""


class Problem(typing.NamedTuple):
    id: str | int
    entry: str  # the function that is asked for
    prompt: str  # what a model reads
    head: str  # what stands before a completion when it runs
    tests: list  # hidden; all must pass
    public: list  # asserts made of the examples that the prompt shows
    probes: list  # PROBE, if there are inputs for it


def read_problems(cfg):
    """{id as a string: Problem} of the official file: --tasks_file, or downloaded once into --downloads."""
    path = Path(cfg.tasks_file or Path(cfg.downloads) / TASKS[cfg.task].rsplit("/", 1)[1])
    if not path.is_file() and not cfg.tasks_file:
        print(f"downloading {TASKS[cfg.task]}", file=sys.stderr)
        try:
            with urllib.request.urlopen(TASKS[cfg.task], timeout=60) as response:
                data = response.read()
            problems = parse_problems(cfg, data)
        except (OSError, http.client.HTTPException, ValueError) as error:
            sys.exit(f"{TASKS[cfg.task]} cannot be downloaded ({error}); fetch it by hand and pass --tasks_file")
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, data)
        return problems
    try:
        return parse_problems(cfg, path.read_bytes())
    except (OSError, ValueError) as error:
        sys.exit(f"{path} is not the official file of {cfg.task}: {error}")


def parse_problems(cfg, data):
    """The problems in the bytes of an official file; ValueError on what is wrong, with the line or the number."""
    try:
        data = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    except (EOFError, zlib.error) as error:
        raise ValueError(f"broken gzip: {error}") from None
    if cfg.task == "humaneval":
        rows, make = parse_lines(data, ("task_id", "prompt", "entry_point", "test")), humaneval_problem
    else:
        rows = json.loads(data)
    problems = {}
    try:
        if cfg.task == "mbpp":
            shown = [row for row in rows if row["task_id"] in SHOTS][: cfg.shots]
            rows = [row for row in rows if cfg.split == "all" or 11 <= row["task_id"] <= 510]
            make = lambda row: mbpp_problem(row, [shot for shot in shown if shot is not row])  # noqa: E731
        for row in rows[: cfg.problems or None]:
            problems[key_of(row["task_id"])] = make(row)
    except (LookupError, TypeError, AttributeError, SyntaxError) as error:
        raise ValueError(f"problem {len(problems) + 1} is of another form: {error!r}") from None
    if not problems:
        raise ValueError("it holds no problems")
    return problems


def humaneval_problem(row):
    """Ref: Chen et al., arXiv:2107.03374. The model reads the prompt without the last newline, as BPEs like it."""
    task_id, prompt, entry = row["task_id"], row["prompt"], row["entry_point"]
    public, arguments = docstring_examples(prompt, entry)
    tests = [f"{row['test']}\ncheck({entry})"]
    return Problem(task_id, entry, prompt.rstrip(), prompt, tests, public, probes(task_id, entry, arguments))


def mbpp_problem(row, shown):
    """Ref: Austin et al., arXiv:2108.07732: the task and three asserts, after problems with their answers.

    The asserts in the prompt are among those that decide, so none of them is `public`: best-of-n would be an oracle.
    The inputs in them are used, not the values expected.
    """

    def ask(row):
        asserts = "\n".join(row["test_list"][:3])
        task = f"You are an expert Python programmer, and here is your task: {row['prompt'].strip()}"
        return f"{task} Your code should pass these tests:\n\n{asserts}\n[BEGIN]\n"

    prompt = "".join(f"{ask(shot)}{shot['code'].strip()}\n[DONE]\n\n" for shot in shown) + ask(row)
    imports = "".join(f"{line}\n" for line in row["test_imports"])
    calls = [node for test in row["test_list"][:3] for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Call)]
    names = [call.func.id for call in calls if isinstance(call.func, ast.Name)]
    entry = next((name for name in names if not hasattr(builtins, name)), names[0])  # one problem redefines sum()
    tests = [imports + test for test in row["test_list"]]
    arguments = [args for args in (literals(call, entry) for call in calls) if args is not None]
    return Problem(row["task_id"], entry, prompt, "", tests, [], probes(row["task_id"], entry, arguments))


def docstring_examples(prompt, entry):
    """(asserts, arguments) of the examples `f(1) == 2`, `f(1) -> 2`, `>>> f(1)` over `2`, and so on, in a docstring."""
    asserts, arguments = [], []
    for start in (match.start() for match in re.finditer(rf"\b{entry}\(", prompt)):
        for end in (start + match.end() for match in re.finditer(r"\)", prompt[start : start + 500])):
            with contextlib.suppress(SyntaxError, ValueError):  # not the right parenthesis
                call = ast.parse(prompt[start:end], mode="eval").body
                break
        else:
            continue
        if (args := literals(call, entry)) is None:
            continue
        arguments.append(args)
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
    rng, inputs = random.Random(str(seed)), arguments[:4]
    inputs = inputs + [[vary(arg, rng) for arg in args] for args in inputs * 2]
    return [PROBE.format(inputs=inputs, entry=entry)] if inputs else []


def vary(value, rng):
    """A value of the same type near by: a number changed a little, a sequence reversed, shortened or lengthened."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return rng.choice([value + 1, value - 1, value + 2, -value])
    if isinstance(value, str | list | tuple) and value:
        i = rng.randrange(len(value))
        kinds = [value[::-1], value[:i] + value[i + 1 :], value + value[i : i + 1]]
        if not isinstance(value, str):
            kinds += [value[:i] + type(value)([vary(value[i], rng)]) + value[i + 1 :]] * 3
        return rng.choice(kinds)
    return value


def extract(text, entry, stops):
    """(code, ended) of what a model wrote: without fences, chat and what follows the answer.

    A text that starts indented goes on with the function of the prompt, until the first stop string. Otherwise a fenced
    block counts whole, the one that defines `entry` if there are several; without fences, the text up to the first stop
    string after `def entry`. ended: nothing that could follow would change the code.
    """
    goes_on = re.match(r"\s*\n[ \t]+\S|[ \t]+\S", text)
    fence = None if goes_on else re.search(r"^[ \t]*```[ \t]*[\w+-]*[ \t]*$", text, re.MULTILINE)
    if fence and not re.search(r"^(def|class|import|from) ", text[: fence.start()], re.MULTILINE):
        blocks = re.findall(r"^[ \t]*```[ \t]*[\w+-]*[ \t]*$\n?(.*?)(^[ \t]*```|\Z)", text, re.MULTILINE | re.DOTALL)
        names = re.compile(rf"^(async )?def {re.escape(entry)}\b", re.MULTILINE)
        code, end = next((block for block in blocks if names.search(block[0])), blocks[0])
        return code, bool(end) and bool(names.search(code))
    restated = None if goes_on else re.search(rf"^(async )?def {re.escape(entry)}\b", text, re.MULTILINE)
    start = restated.end() if restated else 0
    end = min((i for i in (text.find(stop, start) for stop in stops) if i >= 0), default=len(text))
    return text[:end], end < len(text)


def pythoncoder_writer(cfg, run, step):
    """(tokenizer, longest text in tokens, function (prompts, finished, number of the batch) -> texts, as token ids).

    finished(texts) tells while they grow whether all hold what is needed. The texts depend on nothing but the model,
    the prompts, the settings and the number of the batch. For another model write another such function.
    """
    import jax
    import jax.numpy as jnp

    import model_pythoncoder as pc

    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs a traceback where we print one line
    dtype = jnp.float32 if jax.devices()[0].platform == "cpu" else jnp.bfloat16
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            model, folder, _ = pc.load(run, step, dtype)
            tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises nothing narrower for a broken file
            print(error, file=sys.__stderr__, flush=True)
            os._exit(1)  # threads of a failed Orbax read print tracebacks until the process ends
    eos = tokenizer.token_to_id("<|endoftext|>")
    rule = pc.Sampling(cfg.temperature, 0, cfg.top_p, tokenizer.get_vocab_size(), -1 if eos is None else eos)
    rule = dataclasses.replace(rule, speculate=model.cfg.mtp)

    def write(prompts, finished, batch):
        key = jax.random.fold_in(jax.random.key(cfg.seed), batch)
        return pc.generate(model, prompts, cfg.max_new, rule, key, on_tokens=finished)[0]

    return tokenizer, int(model.cfg.positions * model.cfg.yarn_factor), write


def mdlm_writer(cfg, run, step):
    """The same for MDLM, which fills --max_new masks after the prompt in as many steps, the surest tokens first."""
    import torch

    import model_mdlm as mdlm

    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model = mdlm.load(run / f"step_{step}", device, torch.bfloat16 if device == "cuda" else torch.float32)
        tokenizer = tokenizers.Tokenizer.from_file(str(run / f"step_{step}" / "tokenizer.json"))
    except Exception as error:  # tokenizers raises nothing narrower for a broken file
        sys.exit(str(error).splitlines()[0])
    rule = mdlm.Sampling("max_prob", cfg.max_new, "even", cfg.temperature, 0, cfg.top_p, tokenizer.get_vocab_size())

    def write(prompts, finished, batch):
        canvases = [[mdlm.BOS, *ids, *[mdlm.MASK] * cfg.max_new] for ids in prompts]
        token_BL = torch.full((len(prompts), max(map(len, canvases))), mdlm.PAD, device=device)
        for row, ids in zip(token_BL, canvases, strict=True):
            row[: len(ids)] = torch.tensor(ids)
        seed = int(np.random.SeedSequence([cfg.seed, batch]).generate_state(1)[0])
        filled = mdlm.sample(model, token_BL, rule, torch.Generator(device).manual_seed(seed)).tolist()
        new = [row[len(ids) - cfg.max_new : len(ids)] for row, ids in zip(filled, canvases, strict=True)]
        return [ids[: ids.index(mdlm.EOS)] if mdlm.EOS in ids else ids for ids in new]

    return tokenizer, model.cfg.positions - 1, write


def dream_writer(cfg, run, step):
    """The same for Dream, which fills --max_new masks after the prompt, the surest tokens first."""
    import jax
    import jax.numpy as jnp

    import model_dream as dream

    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs a traceback where we print one line
    dtype = jnp.float32 if jax.devices()[0].platform == "cpu" else jnp.bfloat16
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            model = dream.load(run, dtype, step=step)
            tokenizer = dream.load_tokenizer(run, model.cfg)
            ends = {tokenizer.token_to_id(name) for name in ENDS} | {model.cfg.eos_id}
            ends = tuple(sorted(ends - {None, model.cfg.mask_id}))
            settings = {
                name: getattr(cfg, name) for name in ("temperature", "top_p", "threshold", "block_length", "cache")
            }
            rule = dream.Sampling(**settings, vocab=tokenizer.get_vocab_size(), eos_ids=ends)
        except Exception as error:  # tokenizers and Orbax raise nothing narrower for a broken file
            print(str(error).splitlines()[0], file=sys.__stderr__, flush=True)
            os._exit(1)  # threads of a failed Orbax read print tracebacks until the process ends

    def write(prompts, finished, batch):
        key = jax.random.fold_in(jax.random.key(cfg.seed), batch)
        try:
            rows, _ = dream.generate(model, prompts, cfg.max_new, rule, key)
        except ValueError as error:  # a block length that does not divide
            sys.exit(str(error))
        new = [row[len(ids) :] for row, ids in zip(rows, prompts, strict=True)]
        return [list(itertools.takewhile(lambda i: i not in ends, ids)) for ids in new]

    return tokenizer, model.cfg.positions, write


def ask_by_chat(cfg, run):
    """A function that makes a user's turn of a problem's prompt; exits where the model has no chat template."""
    import model_dream as dream

    try:
        wrap = dream.chat_template(run)
    except ValueError as error:
        sys.exit(str(error))
    if not wrap:
        sys.exit(f"--chat=True: {run} holds no chat template (tokenizer_config.json)")
    return lambda prompt: wrap(CHAT[cfg.task].format(prompt))


def key_of(task_id):
    """HumanEval/3, Mbpp/3 and 3 are the same problem: "3"."""
    return str(task_id).split("/")[-1]


def replace(path, data):
    """Write bytes under another name, then rename: the file is whole or as before."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def parse_lines(text, keys):
    """The objects of JSON lines; ValueError names the first line that is not an object with these keys."""
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict) or not row.keys() >= {*keys}:
                raise ValueError(f"line {number} is not a JSON object with {', '.join(keys)}")
            if not isinstance(row.get("completion", ""), str):
                raise ValueError(f"line {number}: the completion is not a text")
            rows.append(row)
    return rows


def read_own(path, key):
    """The rows of a file that we append to. A last line without its end, which a kill leaves, is cut off."""
    data = path.read_bytes() if path.exists() else b""
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        os.truncate(path, len(whole))
    try:
        return parse_lines(whole.decode(), ("task_id", "completion", "sample", key))
    except ValueError as error:
        sys.exit(f"{path}: {error}; remove it, or choose another --out")


def append(path, rows):
    """Add rows as JSON lines, and see that they are on disk."""
    with open(path, "a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
        file.flush()
        os.fsync(file.fileno())


def given_samples(cfg, problems):
    """{(key of problems, number): code} of --samples: lines with "task_id" and "completion", several per problem."""
    samples, count = {}, collections.Counter()
    try:
        rows = parse_lines(Path(cfg.samples).read_text("utf-8"), ("task_id", "completion"))
    except (OSError, ValueError) as error:
        sys.exit(f"--samples={cfg.samples}: {error}")
    for row in rows:
        key = key_of(row["task_id"])
        names = {str(problems[key].id).lower(), f"{cfg.task}/{key}"} if key in problems else ()
        if str(row["task_id"]).lower() not in names:
            size = f"{len(problems)} problems (--split, --problems)"
            sys.exit(f"{cfg.samples}: {row['task_id']!r} is not among the {size}")
        samples[key, count[key]] = extract(row["completion"], problems[key].entry, ())[0]
        count[key] += 1
    if samples and max(cfg.k, default=1) > max(count.values()):
        sys.exit(f"pass@{max(cfg.k)} needs as many samples of a problem; {cfg.samples} holds {max(count.values())}")
    if not samples:
        sys.exit(f"{cfg.samples} holds no samples; a line is {{'task_id': ..., 'completion': ...}}")
    return samples


def generated_samples(cfg, problems, run, step, path):
    """{(key of problems, number): code} of --n samples each, None where the prompt does not fit; those in `path` stay.

    Batches are the same whichever samples are there already, so resuming equals not stopping.
    """
    samples, ask = {}, str
    for row in read_own(path, "fits"):
        samples[key_of(row["task_id"]), row["sample"]] = row["completion"] if row["fits"] else None
    order = [(key, i) for i in range(cfg.n) for key in sorted(problems, key=lambda k: len(problems[k].prompt))]
    write = None
    for batch, first in enumerate(range(0, len(order), cfg.batch_size)):
        keys = order[first : first + cfg.batch_size]
        if all(key in samples for key in keys):
            continue
        if write is None:
            load = {"pythoncoder": pythoncoder_writer, "mdlm": mdlm_writer, "dream": dream_writer}[cfg.model]
            tokenizer, reach, write = load(cfg, run, step)
            tokenizer.encode_special_tokens = not cfg.chat  # their names in a prompt are text
            ask = ask_by_chat(cfg, run) if cfg.chat else str
        chosen = [problems[key] for key, _ in keys]
        chosen += chosen[-1:] * (cfg.batch_size - len(chosen))  # one shape is compiled, not two
        prompts = [tokenizer.encode(ask(problem.prompt), add_special_tokens=False).ids for problem in chosen]
        fits = [len(ids) + cfg.max_new <= reach for ids in prompts]
        prompts = [ids if fit else ids[:1] for ids, fit in zip(prompts, fits, strict=True)]

        def code(texts, chosen=chosen, tokenizer=tokenizer):
            texts = zip(tokenizer.decode_batch(texts), chosen, strict=True)
            return [(text, *extract(text, problem.entry, STOPS[cfg.task])) for text, problem in texts]

        def finished(texts, code=code):
            return all(ended for _, _, ended in code(texts))

        texts = code(write(prompts, finished, batch) if any(fits) else [[]] * len(prompts))
        rows = []
        for (key, i), problem, fit, (text, completion, _) in zip(keys, chosen, fits, texts, strict=False):
            if (key, i) not in samples:
                samples[key, i] = completion if fit else None
                row = {"task_id": problem.id, "completion": samples[key, i] or "", "sample": i, "fits": fit}
                rows.append(row | ({"written": text} if fit and text != completion else {}))
        append(path, rows)
        print(f"{len(samples):,} of {len(order):,} samples", file=sys.stderr, flush=True)
    return samples


def check_task(cfg):
    """The config with defaults filled in; exits with what is wrong."""
    if cfg.temperature is None:
        cfg = dataclasses.replace(cfg, temperature=0.8 if cfg.n > 1 else 0.0)
    if min(cfg.n, cfg.max_new, *cfg.k, 1) < 1 or min(cfg.problems, cfg.workers, cfg.temperature, cfg.seed) < 0:
        sys.exit("--n, --k and --max_new are at least 1, --problems, --workers, --temperature and --seed 0")
    if not 0 < cfg.top_p <= 1 or not 0 <= cfg.shots <= len(SHOTS) or not 0 < cfg.timeout_s < math.inf:
        sys.exit(f"--top_p is in (0, 1], --shots from 0 to {len(SHOTS)}, --timeout_s above 0")
    if not cfg.samples and max(cfg.k, default=1) > cfg.n:
        sys.exit(f"pass@{max(cfg.k)} needs --n={max(cfg.k)} samples of each problem or more, not {cfg.n}")
    if cfg.chat and cfg.model != "dream":
        sys.exit("--chat=True is for --model=dream")
    if not cfg.samples and cfg.n > 1 and cfg.temperature == 0:
        sys.exit(f"--temperature=0 writes the same text {cfg.n} times; raise it, or leave --n at 1")
    return cfg


def score_task(cfg, run):
    """Generate, run and report; the report, or exit with a message if the sandbox left samples unscored."""
    problems, out = read_problems(cfg), Path(cfg.out or f"out/{cfg.task}")
    settings = {name: getattr(cfg, name) for name in ("task", "split", "problems", "timeout_s")}
    if cfg.samples:
        samples = given_samples(cfg, problems)
        settings["samples_sha256"] = hashlib.sha256(Path(cfg.samples).read_bytes()).hexdigest()
    else:
        folders = run.glob("step_*" if cfg.model == "mdlm" else "checkpoints/*")
        steps = [int(name) for name in (folder.name.removeprefix("step_") for folder in folders) if name.isdigit()]
        converted = (
            cfg.model == "dream" and (run / "params").is_dir()
        )  # by convert_weights.py: one checkpoint, no steps
        if not converted and (not steps or (cfg.step or steps[0]) not in steps):
            there = f"it has {sorted(steps)}" if steps else f"train one with: python {TRAINERS[cfg.model]}"
            sys.exit(f"{run} holds no checkpoint{f' of step {cfg.step}' * bool(cfg.step)}; {there}")
        step = None if converted else cfg.step or max(steps)
        more = ["model", "shots", "n", "temperature", "top_p", "max_new", "batch_size", "seed"]
        more += ["chat", "threshold", "block_length", "cache"] if cfg.model == "dream" else []
        settings |= {name: getattr(cfg, name) for name in more} | {"ckpt": str(run), "step": step}
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "results.jsonl", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"another run writes to {out}; choose another --out")
        try:
            before = json.loads((out / "config.json").read_text()) if (out / "config.json").exists() else settings
        except ValueError:
            sys.exit(f"{out / 'config.json'} is broken; choose another --out")
        changed = [f"{k}={before.get(k)!r}" for k in before | settings if before.get(k) != settings.get(k)]
        if changed:
            sys.exit(f"{out} holds results with {', '.join(changed)}; choose another --out")
        replace(out / "config.json", json.dumps(settings, indent=2).encode())
        try:
            if not cfg.samples:
                samples = generated_samples(cfg, problems, run, step, out / "samples.jsonl")
            unscored = score_samples(cfg, problems, samples, out / "results.jsonl")
        except KeyboardInterrupt:
            print(f"stopped; what is done is in {out}, and the same command goes on", file=sys.stderr)
            raise
        row = report(cfg, problems, read_own(out / "results.jsonl", "passed"))
        replace(out / "summary.json", json.dumps(row, indent=2).encode())
    print(json.dumps(row) if cfg.json else describe(row), flush=True)
    if unscored:
        names = ", ".join(f"{problems[key].id} ({error})" for (key, _), error in unscored[:3])
        sys.exit(f"{len(unscored)} samples could not be run and are not counted: {names}; run the same command again")
    return row


def score_samples(cfg, problems, samples, path):
    """Run the samples that `path` has no result of, and add a line for each: [((key, number), error)] of the others.

    A line is the official {"task_id", "completion"}, and "sample", "passed", "result" (of the first hidden test that
    does not pass). With several samples of a problem also what best-of-n needs: "public", the share of the examples in
    the prompt that pass, and "behaviour".
    """
    done = {(key_of(row["task_id"]), row["sample"]) for row in read_own(path, "passed")}
    todo = [key for key in samples if key not in done]
    several = any(number for _, number in samples)
    tests = [p.tests + (p.public + p.probes if several else []) for p in (problems[key] for key, _ in todo)]
    programs = [problems[key[0]].head + (samples[key] or "") for key in todo]
    tests = [each if samples[key] is not None else [] for key, each in zip(todo, tests, strict=True)]
    left = dict.fromkeys(todo, "the sandbox did not start")

    def on_result(i, result):
        key, problem = todo[i], problems[todo[i][0]]
        if result.rate is None:
            left[key] = result.error
            return
        del left[key]
        hidden, public = len(problem.tests), len(problem.public)
        failed = [verdict for verdict in result.verdicts[:hidden] if verdict != "pass"]
        row = {"task_id": problem.id, "completion": samples[key] or "", "sample": key[1]}
        row["passed"] = bool(result.verdicts) and not failed
        row["result"] = "passed" if row["passed"] else failed[0] if failed else "does not fit"
        if several:
            row["public"] = result.verdicts[hidden : hidden + public].count("pass") / max(1, public)
            row["behaviour"] = next((v for v in result.values[hidden + public :] if isinstance(v, str)), "")
        append(path, [row])
        if len(left) % 200 == 0:
            print(f"{len(todo) - len(left):,} of {len(todo):,} samples scored", file=sys.stderr, flush=True)

    program_s = 5 + cfg.timeout_s * max(len(problem.tests) for problem in problems.values())
    names = ("runner", "e2b_router_url", "workers", "timeout_s", "allow_unsafe")
    try:
        sandbox.run_tests(programs, tests, on_result, program_s=program_s, **{n: getattr(cfg, n) for n in names})
    except RuntimeError as error:
        sys.exit(str(error))
    return list(left.items())


def choose(rows):
    """Best of n without the hidden tests: the row with most public examples passed; among equals, of the largest group
    that behaves alike; among equals, the first.

    Programs that return nothing for any input, or hang, count as no group. Ref: Shi et al., arXiv:2204.11454 (majority
    of execution results); filtering by public examples as in AlphaCode, arXiv:2203.07814.
    """
    best = [row for row in rows if row["public"] == max(r["public"] for r in rows)]
    votes = collections.Counter(row["behaviour"] for row in best if row["behaviour"])
    return max(best, key=lambda row: votes[row["behaviour"]])  # max takes the first of equals


def interval(values, seed):
    """95 % confidence interval of a mean: percentiles 2.5 and 97.5 of the means of 10,000 bootstrap resamples."""
    values, rng = np.asarray(values, np.float64), np.random.default_rng(seed)
    means = [values[rng.integers(0, len(values), len(values))].mean() for _ in range(10_000)]
    return [float(x) for x in np.percentile(means, [2.5, 97.5])]


def report(cfg, problems, rows):
    """Scores of all result rows: {"pass@k": [mean over problems, low, high], "best of n": the same, counts}."""
    by_problem = collections.defaultdict(list)
    for row in sorted(rows, key=lambda row: row["sample"]):
        by_problem[key_of(row["task_id"])].append(row)
    n = max(map(len, by_problem.values()), default=0)
    row = {"task": cfg.task} | ({"split": cfg.split} if cfg.task == "mbpp" else {})
    row |= {"problems": len(by_problem), "of": len(problems), "samples": len(rows), "n": n}
    row["results"] = dict(collections.Counter(r["result"] for r in rows).most_common())
    for k in sorted({*(cfg.k or (1, n))}):
        counts = [(len(group), sum(r["passed"] for r in group)) for group in by_problem.values() if len(group) >= k > 0]
        if counts:
            values = [pass_at_k(n, c, k) for n, c in counts]
            row[f"pass@{k}"] = [float(np.mean(values)), *interval(values, cfg.seed)]
            row |= {f"pass@{k} problems": len(counts)} if len(counts) < len(by_problem) else {}
    if n > 1:
        values = [choose(group)["passed"] for group in by_problem.values()]
        row["best of n"] = [float(np.mean(values)), *interval(values, cfg.seed)]
    return row


def describe(row):
    """The report as text."""
    ids = {"test": ", test split (ids 11-510)", "all": ", all ids"}.get(row.get("split"), "")
    kinds = ", ".join(f"{name} {count:,}" for name, count in row["results"].items())
    lines = [f"{row['task']}{ids}: {row['samples']:,} samples of {row['problems']} of {row['of']} problems; {kinds}"]
    for name in (name for name in row if isinstance(row[name], list)):
        mean, low, high = (100 * x for x in row[name])
        over = row.get(f"{name} problems", row["problems"])
        lines.append(f"{name}: {mean:.1f} % ({low:.1f} to {high:.1f}: 95 %, bootstrap over {over} problems)")
    if "best of n" in row:
        what = {"humaneval": "examples in the docstring, then majority", "mbpp": "majority"}[row["task"]]
        lines[-1] += f", of {row['n']} samples one is chosen without the hidden tests, by {what} of behaviour"
    return "\n".join(lines)


def main(cfg):
    if cfg.model == "dream" and not cfg.task:
        sys.exit("--model=dream is scored on a task: --task=humaneval or --task=mbpp")
    trainer = TRAINERS[cfg.model]
    if cfg.batch_size < 1 or cfg.rows < 0 or cfg.draws < 2 or cfg.drafts < 0 or min(cfg.lengths + cfg.steps) < 1:
        sys.exit("--rows and --drafts are at least 0, --batch_size, --lengths and --steps 1, --draws 2")
    if cfg.plot and not Path(cfg.plot).parent.is_dir():
        sys.exit(f"--plot={cfg.plot}: there is no folder {Path(cfg.plot).parent}")
    run = Path(cfg.ckpt or ("out/train_gpu" if cfg.model == "mdlm" else "out/train_tpu"))
    if cfg.task:
        return score_task(check_task(cfg), run)
    try:
        config = json.loads((run / "config.json").read_text())
        folder, vocab = Path(cfg.data or config["data"]), config["model"]["vocab"]
        tokenizer_json = (run / "tokenizer.json").read_bytes()
    except (OSError, ValueError, KeyError):
        sys.exit(f"{run} is not a run folder of {trainer} (no config.json); train one with: python {trainer}")
    held_out = read_rows(folder, cfg.rows)
    if json.loads((folder / "meta.json").read_text())["tokenizer_sha256"] != hashlib.sha256(tokenizer_json).hexdigest():
        sys.exit(f"{folder} was written with another tokenizer than that of {run}; pass data of its tokenizer")
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json.decode())
    if cfg.model == "pythoncoder":
        return score_pythoncoder(cfg, run, held_out, tokenizer, vocab)
    row = score_mdlm(cfg, run, held_out, tokenizer, vocab)
    if cfg.json:
        print(json.dumps(row))
    else:
        show_mdlm(row)
    return [row]


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__, config=(tyro.conf.FlagConversionOff,)))
    except KeyboardInterrupt:
        sys.stdout.flush()
        os._exit(130)  # a computation under way may crash while the interpreter closes
    except OSError as error:
        sys.exit(str(error))
