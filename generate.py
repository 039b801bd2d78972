"""Write code with a trained model: prompts in, text out.

    python generate.py --prompt="def fibonacci(n):"                  # the newest checkpoint of out/train_tpu, greedily
    python generate.py                                               # an interactive prompt
    python generate.py --prompt="import os" --temperature=0.8 --top_p=0.95 --n=4
    python generate.py --prompt="def area(r):\\n    " --suffix="\\n    return a"    # fill in the middle
    python generate.py --file=prompts.jsonl --json=True > completions.jsonl
    python generate.py --model=mdlm --prompt="Once upon a time" --show_steps=True
    python generate.py --model=mdlm --prompt="Once upon a [MASK:12] dragon." --html=steps.html

Reads a run folder of train_tpu.py or train_gpu.py. PythonCoder decodes with a static KV cache in one compiled loop, and
its own MTP head drafts every second token: the text is the same as without (temperature 0), or drawn from the same
distribution. MDLM fills a canvas of masks in --steps steps; [MASK:n] anywhere in a prompt is n tokens to fill.
"""

import contextlib
import dataclasses
import functools
import html
import io
import itertools
import json
import logging
import os
import re
import sys
import time
import typing
from pathlib import Path

import tokenizers
import tyro


@dataclasses.dataclass(frozen=True)
class Config:
    model: typing.Literal["pythoncoder", "mdlm"] = "pythoncoder"
    ckpt: str = ""  # run folder; "" is out/train_tpu, or out/train_gpu for MDLM
    step: int = 0  # which checkpoint; 0 takes the newest
    prompt: str = ""  # text to continue, \n for a new line; "" asks for one
    suffix: str = ""  # text that follows: the model fills the middle (it must be trained with --fim_rate)
    file: str = ""  # JSON lines with "prompt" and perhaps "suffix", generated as one batch
    n: int = 1  # completions of each prompt
    max_new: int = 128  # tokens at most
    temperature: float | None = None  # 0 takes the likeliest token; default 0, 1 for MDLM
    top_k: int = 0  # draw from the k likeliest tokens; 0: from all
    top_p: float | None = None  # draw from the smallest set of this probability; default 1, 0.95 for MDLM
    stop: tuple[str, ...] = ()  # strings that end a completion and are cut off, \n for a new line
    speculate: bool = True  # draft with the MTP head
    steps: int = 64  # MDLM: passes over the canvas
    sampler: typing.Literal["ancestral", "max_prob", "margin", "entropy"] = "ancestral"  # MDLM: random, or surest first
    schedule: typing.Literal["linear", "cosine", "cosine_sq", "even"] = "cosine_sq"  # MDLM: when how many are unmasked
    show_steps: bool = False  # MDLM: show the canvas after every step
    html: str = ""  # MDLM: write a page that shows in which step each token appeared
    dtype: typing.Literal["", "bfloat16", "float32"] = ""  # "" is float32 on a CPU, else bfloat16
    json: bool = False  # print one JSON line per completion instead of text
    seed: int = 0


def truncate(text, stops):
    """The text before the first of any of the stop strings."""
    return text[: min((i for i in map(text.find, stops) if i >= 0), default=len(text))]


def printable(text, stops, ended):
    """What may be shown of an unfinished completion: not half a character, nor what may become a stop string."""
    text = truncate(text, stops)
    if ended:
        return text
    text = text.rstrip("\ufffd")
    held = max((k for s in stops for k in range(1, len(s)) if text.endswith(s[:k])), default=0)
    return text[: len(text) - held]


def encode(tokenizer, prompt, suffix):
    """Token ids of a prompt; with a suffix in the order prefix, suffix, middle. Names of special tokens stay text."""
    tokenizer.encode_special_tokens = True
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    if not suffix:
        return prompt_ids
    fim = [tokenizer.token_to_id(f"<|fim_{part}|>") for part in ("prefix", "suffix", "middle")]
    if None in fim:
        sys.exit(
            "--suffix needs a tokenizer with <|fim_prefix|>, <|fim_suffix|> and <|fim_middle|>; this model has none"
        )
    return [fim[0], *prompt_ids, fim[1], *tokenizer.encode(suffix, add_special_tokens=False).ids, fim[2]]


def read_requests(path):
    """[(prompt, suffix)] of a JSON-lines file; exits naming the line that is not one."""
    requests = []
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"--file={path} cannot be read: {error}")
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            requests.append((row["prompt"], row.get("suffix", "")))
        except (ValueError, KeyError, TypeError, AttributeError):
            sys.exit(f'{path}, line {number} is not a JSON object with "prompt"')
    if not requests:
        sys.exit(f"{path} holds no prompts")
    return requests


def unescape(text):
    return text.replace("\\n", "\n")


def main(cfg):
    ours = {"pythoncoder": ("out/train_tpu", 0.0, 1.0), "mdlm": ("out/train_gpu", 1.0, 0.95)}[cfg.model]
    chosen = zip((cfg.ckpt or None, cfg.temperature, cfg.top_p), ours, strict=True)
    ckpt, temperature, top_p = (default if value is None else value for value, default in chosen)
    cfg = dataclasses.replace(cfg, ckpt=ckpt, temperature=temperature, top_p=top_p)
    if cfg.temperature < 0 or not 0 < cfg.top_p <= 1 or cfg.top_k < 0 or min(cfg.max_new, cfg.n, cfg.steps) < 1:
        sys.exit("--temperature and --top_k are at least 0, --top_p in (0, 1], --max_new, --n and --steps at least 1")
    if cfg.prompt and cfg.file:
        sys.exit("give --prompt or --file, not both")
    if cfg.stop and cfg.model == "mdlm":
        sys.exit("--stop is for models that write from left to right; MDLM ends a text itself")
    if cfg.html and not os.path.isdir(Path(cfg.html).parent):
        sys.exit(f"--html={cfg.html}: there is no folder {Path(cfg.html).parent}")
    requests = read_requests(cfg.file) if cfg.file else [(unescape(cfg.prompt), unescape(cfg.suffix))]
    answer = load_mdlm(cfg) if cfg.model == "mdlm" else load_pythoncoder(cfg)
    if cfg.prompt or cfg.file:
        answer(requests)
    else:
        interact(answer, "" if cfg.model == "mdlm" else "\n")


# ---- PythonCoder ---------------------------------------------------------------------------------------------------


def load_pythoncoder(cfg):
    """A function that completes a list of (prompt, suffix) and prints the texts; exits if there is no such model."""
    import jax
    import jax.numpy as jnp

    import model_pythoncoder

    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs a traceback where we print one line
    on_cpu = jax.devices()[0].platform == "cpu"
    dtype = jnp.dtype(cfg.dtype or ("float32" if on_cpu else "bfloat16"))
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            model, folder, step = model_pythoncoder.load(cfg.ckpt, cfg.step or None, dtype)
            tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # Orbax and tokenizers raise nothing narrower for a broken file
            print(error, file=sys.__stderr__, flush=True)
            os._exit(1)  # threads of a failed Orbax read print tracebacks until the process ends
    rule = model_pythoncoder.Sampling(
        cfg.temperature,
        cfg.top_k,
        cfg.top_p,
        vocab=tokenizer.get_vocab_size(),
        eos=-1 if (eos := tokenizer.token_to_id("<|endoftext|>")) is None else eos,
        speculate=cfg.speculate and model.cfg.mtp,
    )
    if not cfg.json:
        print(f"{cfg.ckpt} step {step}, {dtype}", file=sys.stderr)
    stops, key = [unescape(s) for s in cfg.stop], jax.random.key(cfg.seed)

    def answer(requests):
        nonlocal key
        now = key
        if not cfg.prompt and not cfg.file:  # every turn of a conversation draws anew
            key, now = jax.random.split(key)
        complete(model, tokenizer, requests, rule, stops, cfg, functools.partial(model_pythoncoder.generate, key=now))

    return answer


def complete(model, tokenizer, requests, rule, stops, cfg, generate):
    """Generate cfg.n completions of every request as one batch; a single one streams to the terminal."""
    requests = [request for request in requests for _ in range(cfg.n)]
    prompts = [encode(tokenizer, *request) for request in requests]
    stream = len(prompts) == 1 and not cfg.json
    shown = requests[0][0]
    if stream:
        print(shown, end="", flush=True)
    done = ""

    def on_tokens(texts):
        """Print what is new and end the call once every row holds a stop string."""
        nonlocal done
        decoded = [tokenizer.decode(ids) for ids in texts]
        if stream:
            new = printable(decoded[0], stops, False)
            print(new[len(done) :], end="", flush=True)
            done = new
        return bool(stops) and all(truncate(text, stops) != text for text in decoded)

    started = time.perf_counter()
    try:
        texts, stats = generate(model, prompts, cfg.max_new, rule, on_tokens=on_tokens)
    except ValueError as error:
        sys.exit(str(error))
    seconds = time.perf_counter() - started
    for i, ((prompt, suffix), ids) in enumerate(zip(requests, texts, strict=True)):
        text = truncate(tokenizer.decode(ids), stops)
        if cfg.json:
            row = {"prompt": prompt, "suffix": suffix, "completion": text, "tokens": len(ids), "step_seed": cfg.seed}
            print(json.dumps(row), flush=True)
        elif stream:
            print(text[len(done) :], flush=True)
        else:
            print(f"---- {i + 1}\n{prompt}{text}", flush=True)
    rate = stats["tokens"] / stats["forwards"]
    print(
        f"{stats['tokens']} tokens in {seconds:.2f} s, compiling included; {rate:.2f} tokens per forward pass"
        + (f", {stats['accepted']} drafts accepted" if rule.speculate else ""),
        file=sys.stderr,
    )


# ---- MDLM ----------------------------------------------------------------------------------------------------------


def canvas_of(tokenizer, prompt, max_new, positions):
    """Ids of a canvas: BOS, the prompt, and max_new masks; or, if the prompt holds [MASK:n], just these, and EOS.

    Spaces before a mask are left out: words bring their own.
    """
    import model_mdlm as mdlm

    texts, counts = (re.split(r" *\[MASK:(\d+)\]", prompt)[i::2] for i in (0, 1))
    if any("[MASK" in text for text in texts):
        sys.exit("a mask is written with its number of tokens: [MASK:12]")
    encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    sizes = [int(count[:9]) for count in counts]
    length = 1 + sum(map(len, encoded)) + (sum(sizes) + 1 if sizes else max_new)
    if length > positions:
        sys.exit(f"{length} tokens do not fit the model's {positions} positions; lower --max_new or mask less")
    ids = [mdlm.BOS, *encoded[0]]
    for size, more in zip(sizes, encoded[1:], strict=True):
        ids += [mdlm.MASK] * size + more
    return ids + ([mdlm.EOS] if sizes else [mdlm.MASK] * max_new)


def load_mdlm(cfg):
    """A function that fills the canvases of a list of (prompt, suffix) and prints the texts; exits without a model."""
    import torch

    import model_mdlm as mdlm

    folder = Path(cfg.ckpt)
    steps = sorted(int(p.name[5:]) for p in folder.glob("step_*") if p.name[5:].isdigit())
    if steps or cfg.step:
        folder = folder / f"step_{cfg.step or steps[-1]}"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, cfg.dtype or ("bfloat16" if device == "cuda" else "float32"))
    try:
        model = mdlm.load(folder, device, dtype)
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers raises nothing narrower for a broken file
        sys.exit(f"{folder}/tokenizer.json cannot be read: {error}")
    tokenizer.encode_special_tokens = True
    settings = cfg.sampler, cfg.steps, cfg.schedule, cfg.temperature, cfg.top_k, cfg.top_p
    rule = mdlm.Sampling(*settings, vocab=tokenizer.get_vocab_size())
    generator = torch.Generator(device).manual_seed(cfg.seed)
    if not cfg.json:
        print(f"{folder}, {dtype}", file=sys.stderr)

    def words(ids):
        """The text up to EOS, masks as dots."""
        ids = ids[1 : ids.index(mdlm.EOS)] if mdlm.EOS in ids else ids[1:]
        runs = itertools.groupby(ids, lambda i: i == mdlm.MASK)
        return "".join("\u2591" * len(list(run)) if masked else tokenizer.decode(list(run)) for masked, run in runs)

    def answer(requests):
        requests = [prompt + (f"[MASK:{cfg.max_new}]{suffix}" if suffix else "") for prompt, suffix in requests]
        prompts = [prompt for prompt in requests for _ in range(cfg.n)]
        canvases = [canvas_of(tokenizer, prompt, cfg.max_new, model.cfg.positions) for prompt in prompts]
        token_BL = torch.full((len(canvases), max(map(len, canvases))), mdlm.PAD, device=device)
        for row, ids in zip(token_BL, canvases, strict=True):
            row[: len(ids)] = torch.tensor(ids)
        history = [token_BL.tolist()]

        def on_step(i, token_BL):
            history.append(token_BL.tolist())
            if cfg.show_steps:
                clear = "\x1b[2J\x1b[H" if sys.stdout.isatty() else ""
                print(f"{clear}step {i + 1}: {words(history[-1][0])}", flush=True)

        started = time.perf_counter()
        filled = mdlm.sample(model, token_BL, rule, generator, on_step).tolist()
        seconds = time.perf_counter() - started
        for i, (prompt, ids) in enumerate(zip(prompts, filled, strict=True)):
            if cfg.json:
                print(json.dumps({"prompt": prompt, "text": words(ids), "seed": cfg.seed}), flush=True)
            else:
                print(words(ids) if len(filled) == 1 else f"---- {i + 1}\n{words(ids)}", flush=True)
        if cfg.html:
            Path(cfg.html).write_text(page(list(zip(*history, strict=True)), tokenizer, mdlm))
        passes, new = len(history) - 1, sum(ids.count(mdlm.MASK) for ids in history[0])
        print(f"{new} tokens in {seconds:.2f} s, {passes} passes over the canvas", file=sys.stderr)

    return answer


def page(histories, tokenizer, mdlm):
    """A self-contained HTML page: each text with its tokens coloured by the step in which they appeared."""
    rows = []
    for history in histories:
        steps, spans, run = len(history) - 1, [], []
        born = [next(i for i, ids in enumerate(history) if ids[p] != mdlm.MASK) for p in range(len(history[0]))]
        end = history[-1].index(mdlm.EOS) if mdlm.EOS in history[-1] else len(history[-1])
        for p in range(1, end):
            run.append(history[-1][p])
            text, before = tokenizer.decode(run), tokenizer.decode(run[:-1])
            shown = html.escape(text[len(before) :])
            title = f"step {born[p]} of {steps}" if born[p] else "given"
            colour = f"hsl({220 - 220 * born[p] / max(steps, 1):.0f} 80% 85%)" if born[p] else "#eee"
            spans.append(f'<span style="background:{colour}" title="{title}">{shown}</span>')
        rows.append(f"<p>{''.join(spans)}</p>")
    style = "body{font:18px/1.8 serif;max-width:42em;margin:2em auto;white-space:pre-wrap}small{color:#666}"
    note = "Blue tokens appeared first, red ones last, grey ones were given; point at one to read its step."
    head = f"<!doctype html><meta charset=utf-8><title>MDLM</title><style>{style}</style>"
    return f"{head}<body>{''.join(rows)}<small>{note}</small></body>\n"


# ---- the terminal --------------------------------------------------------------------------------------------------


def interact(answer, end):
    """Read prompts until the end of input: lines up to an empty one are a prompt."""
    if sys.stdin.isatty():
        print("Write a beginning, then an empty line to have it continued; Ctrl-D ends.", file=sys.stderr)
    lines = []
    while True:
        try:
            line = input("... " if lines else ">>> ") if sys.stdin.isatty() else input()
        except (EOFError, KeyboardInterrupt):
            line = None
        if line:
            lines.append(line)
        elif lines:
            answer([("\n".join(lines) + end, "")])
            lines = []
        if line is None:
            return


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__, config=(tyro.conf.FlagConversionOff,)))
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        sys.exit(str(error))
