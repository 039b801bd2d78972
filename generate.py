"""Write code with a trained model: prompts in, text out.

    python generate.py --prompt="def fibonacci(n):"                  # the newest checkpoint of out/train_tpu, greedily
    python generate.py                                               # an interactive prompt
    python generate.py --prompt="import os" --temperature=0.8 --top_p=0.95 --n=4
    python generate.py --prompt="def area(r):\\n    " --suffix="\\n    return a"    # fill in the middle
    python generate.py --file=prompts.jsonl --json=True > completions.jsonl

Reads a run folder of train_tpu.py. PythonCoder decodes with a static KV cache in one compiled loop, and its own MTP
head drafts every second token: the text is the same as without (temperature 0), or drawn from the same distribution.
"""

import contextlib
import dataclasses
import io
import json
import logging
import os
import sys
import time
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import tokenizers
import tyro

import model_pythoncoder


@dataclasses.dataclass(frozen=True)
class Config:
    model: typing.Literal["pythoncoder"] = "pythoncoder"
    ckpt: str = "out/train_tpu"  # run folder with checkpoints/ and tokenizer.json
    step: int = 0  # which checkpoint; 0 takes the newest
    prompt: str = ""  # text to continue, \n for a new line; "" asks for one
    suffix: str = ""  # text that follows: the model fills the middle (it must be trained with --fim_rate)
    file: str = ""  # JSON lines with "prompt" and perhaps "suffix", generated as one batch
    n: int = 1  # completions of each prompt
    max_new: int = 128  # tokens at most
    temperature: float = 0.0  # 0 takes the likeliest token
    top_k: int = 0  # draw from the k likeliest tokens; 0: from all
    top_p: float = 1.0  # draw from the smallest set of this probability
    stop: tuple[str, ...] = ()  # strings that end a completion and are cut off, \n for a new line
    speculate: bool = True  # draft with the MTP head
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


def main(cfg):
    def unescape(text):
        return text.replace("\\n", "\n")

    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs a traceback where we print one line
    if cfg.temperature < 0 or not 0 < cfg.top_p <= 1 or cfg.top_k < 0 or cfg.max_new < 1 or cfg.n < 1:
        sys.exit("--temperature and --top_k are at least 0, --top_p in (0, 1], --max_new and --n at least 1")
    if cfg.prompt and cfg.file:
        sys.exit("give --prompt or --file, not both")
    requests = read_requests(cfg.file) if cfg.file else [(unescape(cfg.prompt), unescape(cfg.suffix))]
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
        eos=tokenizer.token_to_id("<|endoftext|>"),
        speculate=cfg.speculate and model.cfg.mtp,
    )
    if not cfg.json:
        print(f"{cfg.ckpt} step {step}, {dtype}", file=sys.stderr)
    stops = [unescape(s) for s in cfg.stop]
    key = jax.random.key(cfg.seed)
    if not cfg.prompt and not cfg.file:
        return interact(model, tokenizer, rule, stops, cfg, key)
    complete(model, tokenizer, requests, rule, stops, cfg, key)


def complete(model, tokenizer, requests, rule, stops, cfg, key):
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
        texts, stats = model_pythoncoder.generate(model, prompts, cfg.max_new, rule, key, on_tokens)
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


def interact(model, tokenizer, rule, stops, cfg, key):
    """Read prompts until the end of input: lines up to an empty one are a prompt."""
    if sys.stdin.isatty():
        print("Write code, then an empty line to have it continued; Ctrl-D ends.", file=sys.stderr)
    lines = []
    while True:
        try:
            line = input("... " if lines else ">>> ") if sys.stdin.isatty() else input()
        except (EOFError, KeyboardInterrupt):
            line = None
        if line:
            lines.append(line)
        elif lines:
            key, now = jax.random.split(key)
            complete(model, tokenizer, [("\n".join(lines) + "\n", "")], rule, stops, cfg, now)
            lines = []
        if line is None:
            return


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__, config=(tyro.conf.FlagConversionOff,)))
    except KeyboardInterrupt:
        sys.exit(130)
