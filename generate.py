"""Write code with a trained model: prompts in, text out.

    python generate.py --prompt="def fibonacci(n):"                  # the newest checkpoint of out/train_tpu, greedily
    python generate.py                                               # an interactive prompt
    python generate.py --prompt="import os" --temperature=0.8 --top_p=0.95 --n=4
    python generate.py --prompt="def area(r):\\n    " --suffix="\\n    return a"    # fill in the middle
    python generate.py --file=prompts.jsonl --json=True > completions.jsonl
    python generate.py --model=mdlm --prompt="Once upon a time" --show_steps=True
    python generate.py --model=mdlm --prompt="Once upon a [MASK:12] dragon." --html=steps.html
    python generate.py --model=dream --ckpt=out/diffucoder --chat=on --prompt="Sort a list in Python." --show_steps=True
    python generate.py --model=dream --ckpt=out/diffucoder --int8=True --block_length=32 --cache=dual --threshold=0.9

Reads a run folder of train_tpu.py or train_gpu.py, or for Dream a folder of convert_weights.py. PythonCoder decodes
with a static KV cache in one compiled loop, and its own MTP head drafts every second token: the text is the same as
without (temperature 0), or drawn from the same distribution. MDLM and Dream fill a canvas of masks in --steps steps;
[MASK:n] anywhere in a prompt is n tokens to fill, and nothing is appended to such a prompt.
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
    model: typing.Literal["pythoncoder", "mdlm", "dream"] = "pythoncoder"
    ckpt: str = ""  # folder; "" is out/train_tpu, out/train_gpu for MDLM, out/diffucoder for Dream
    step: int = 0  # which checkpoint of a run; 0 takes the newest
    prompt: str = ""  # text to continue, \n for a new line; "" asks for one
    suffix: str = ""  # text that follows: the model fills the middle (PythonCoder must be trained with --fim_rate)
    file: str = ""  # JSON lines with "prompt" and perhaps "suffix", generated as a batch; - reads standard input
    n: int = 1  # completions of each prompt
    max_new: int | None = None  # tokens at most; default 128, 256 for Dream
    temperature: float | None = None  # 0 takes the likeliest token; default 0, 1 for MDLM, 0.2 for Dream
    top_k: int = 0  # draw from the k likeliest tokens; 0: from all
    top_p: float | None = None  # draw from the smallest set of this probability; default 1, 0.95 for MDLM and Dream
    stop: tuple[str, ...] = ()  # strings that end a completion and are cut off, \n for a new line
    infill: bool = True  # MDLM, Dream: [MASK:n] in a prompt is n tokens to fill; False: it is text
    speculate: bool = True  # PythonCoder: draft with the MTP head
    steps: int | None = None  # passes over the canvas: default 64 for MDLM, 0 for Dream: one for each token
    sampler: str = ""  # MDLM: ancestral, max_prob, margin, entropy; Dream: entropy, maskgit_plus, topk_margin, origin
    schedule: typing.Literal["linear", "cosine", "cosine_sq", "even"] = "cosine_sq"  # MDLM: when how many are unmasked
    alg_temp: float = 0.0  # Dream: temperature of the choice of positions; 0 fills the surest
    threshold: float = 0.0  # Dream: fill every token of at least this probability in a step; 0: by --steps
    block_length: int = 0  # Dream: fill blocks of this length from left to right; 0: the whole canvas at once
    cache: typing.Literal["", "prefix", "dual"] = ""  # Dream: keys and values kept while a block is filled
    batch_size: int = 8  # Dream: texts that are filled together
    chat: typing.Literal["auto", "on", "off"] = "auto"  # Dream: chat template; auto: if the folder's name says instruct
    int8: bool = False  # Dream: matrices in 8 bits, half the memory of bfloat16
    show_steps: bool = False  # MDLM, Dream: show the canvas after every step
    html: str = ""  # MDLM, Dream: write a page that shows in which step each token appeared
    dtype: typing.Literal["", "bfloat16", "float32"] = ""  # "" is float32 on a CPU, else bfloat16
    json: bool = False  # print one JSON line per completion instead of text
    seed: int = 0


# what "" and None stand for, and what may be asked of a family
DEFAULTS = {
    "pythoncoder": {"ckpt": "out/train_tpu", "max_new": 128, "temperature": 0.0, "top_p": 1.0, "steps": 1},
    "mdlm": {"ckpt": "out/train_gpu", "max_new": 128, "temperature": 1.0, "top_p": 0.95, "steps": 64},
    "dream": {"ckpt": "out/diffucoder", "max_new": 256, "temperature": 0.2, "top_p": 0.95, "steps": 0},
}
SAMPLERS = {
    "pythoncoder": ("",),
    "mdlm": ("ancestral", "max_prob", "margin", "entropy"),
    "dream": ("entropy", "maskgit_plus", "topk_margin", "origin"),
}


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
        lines = (sys.stdin.read() if path == "-" else Path(path).read_text()).splitlines()
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
    unset = {name: value for name, value in DEFAULTS[cfg.model].items() if getattr(cfg, name) in ("", None)}
    cfg = dataclasses.replace(cfg, **unset, sampler=cfg.sampler or SAMPLERS[cfg.model][0])
    if cfg.sampler not in SAMPLERS[cfg.model]:
        sys.exit(f"--sampler={cfg.sampler} is not one of {cfg.model}'s: {', '.join(SAMPLERS[cfg.model])}")
    least = {"temperature": 0, "top_k": 0, "max_new": 1, "n": 1, "batch_size": 1, "steps": int(cfg.model != "dream")}
    if not 0 < cfg.top_p <= 1 or any(getattr(cfg, name) < value for name, value in least.items()):
        limits = ", ".join(f"--{name} at least {value}" for name, value in least.items())
        sys.exit(f"{limits}, --top_p in (0, 1]")
    if cfg.model != "dream":
        for name in ("alg_temp", "threshold", "block_length", "cache", "int8"):
            if getattr(cfg, name):
                sys.exit(f"--{name} is for --model=dream")
    if cfg.prompt and cfg.file:
        sys.exit("give --prompt or --file, not both")
    if cfg.stop and cfg.model == "mdlm":
        sys.exit("--stop is for models that write from left to right; MDLM ends a text itself")
    if cfg.html and not os.path.isdir(Path(cfg.html).parent):
        sys.exit(f"--html={cfg.html}: there is no folder {Path(cfg.html).parent}")
    requests = read_requests(cfg.file) if cfg.file else [(unescape(cfg.prompt), unescape(cfg.suffix))]
    answer = {"pythoncoder": load_pythoncoder, "mdlm": load_mdlm, "dream": load_dream}[cfg.model](cfg)
    if cfg.prompt or cfg.file:
        answer(requests)
    else:
        interact(answer, "\n" if cfg.model == "pythoncoder" else "")


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


# ---- canvases of masks: MDLM and Dream -----------------------------------------------------------------------------


def pieces(prompt, suffix, cfg):
    """The texts of a canvas and the numbers of masks behind each: "a [MASK:2]b" -> ["a", "b"], [2].

    A suffix follows cfg.max_new masks. A prompt without masks goes on with as many: there are then as many numbers as
    texts. A space before [MASK:n] is left out: words bring their own.
    """
    texts, sizes = [], []
    for part in (prompt, suffix) if suffix else (prompt,):
        sizes += [cfg.max_new] if texts else []
        found = re.split(r" ?\[MASK:(\d+)\]", part) if cfg.infill else [part]
        texts, sizes = texts + found[::2], sizes + [int(count[:9]) for count in found[1::2]]
    if cfg.infill and any("[MASK" in text for text in texts):
        sys.exit("a mask is written with its number of tokens: [MASK:12]; --infill=False takes [MASK as text")
    return texts, sizes or [cfg.max_new]


def canvas_of(tokenizer, texts, sizes, positions, mask, begin=(), end=()):
    """Ids of a canvas: begin, texts with masks between them or behind the last, and end, unless the text goes on."""
    encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    end = end if len(texts) > len(sizes) else ()
    length = len(begin) + sum(map(len, encoded)) + sum(sizes) + len(end)
    if length > positions:
        sys.exit(f"{length} tokens do not fit the model's {positions} positions; lower --max_new or mask less")
    ids = [*begin]
    for some, size in itertools.zip_longest(encoded, sizes, fillvalue=0):
        ids += some + [mask] * size
    return [*ids, *end]


def words(tokenizer, ids, mask):
    """The text of a canvas, masks as blocks."""
    runs = itertools.groupby(ids, lambda i: i == mask)
    return "".join("\u2591" * len(list(run)) if masked else tokenizer.decode(list(run)) for masked, run in runs)


def show_step(i, text):
    clear = "\x1b[2J\x1b[H" if sys.stdout.isatty() else ""
    print(f"{clear}step {i + 1}: {text}", flush=True)


def page(histories, tokenizer, mask):
    """A self-contained HTML page: each text with its tokens coloured by the step in which they appeared."""
    rows = []
    for history in histories:
        steps, spans, run, before = len(history) - 1, [], [], ""
        for ids in zip(*history, strict=True):
            born = next(i for i, token in enumerate(ids) if token != mask)
            run.append(ids[-1])
            text = tokenizer.decode(run)
            shown = html.escape(text[len(before) :])
            title = f"step {born} of {steps}" if born else "given"
            colour = f"hsl({220 - 220 * born / max(steps, 1):.0f} 80% 85%)" if born else "#eee"
            spans.append(f'<span style="background:{colour}" title="{title}">{shown}</span>')
            before = text
        rows.append(f"<p>{''.join(spans)}</p>")
    style = "body{font:18px/1.8 serif;max-width:42em;margin:2em auto;white-space:pre-wrap}small{color:#666}"
    note = "Blue tokens appeared first, red ones last, grey ones were given; point at one to read its step."
    head = f"<!doctype html><meta charset=utf-8><title>Steps</title><style>{style}</style>"
    return f"{head}<body>{''.join(rows)}<small>{note}</small></body>\n"


# ---- MDLM ----------------------------------------------------------------------------------------------------------


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

    def end_of(ids):
        return ids.index(mdlm.EOS) if mdlm.EOS in ids else len(ids)

    def text_of(ids):
        return words(tokenizer, ids[1 : end_of(ids)], mdlm.MASK)

    def answer(requests):
        requests = [request for request in requests for _ in range(cfg.n)]
        known = model.cfg.positions, mdlm.MASK, [mdlm.BOS], [mdlm.EOS]
        canvases = [canvas_of(tokenizer, *pieces(*request, cfg), *known) for request in requests]
        token_BL = torch.full((len(canvases), max(map(len, canvases))), mdlm.PAD, device=device)
        for row, ids in zip(token_BL, canvases, strict=True):
            row[: len(ids)] = torch.tensor(ids)
        history = [token_BL.tolist()]

        def on_step(i, token_BL):
            history.append(token_BL.tolist())
            if cfg.show_steps:
                show_step(i, text_of(history[-1][0]))

        started = time.perf_counter()
        filled = mdlm.sample(model, token_BL, rule, generator, on_step).tolist()
        seconds = time.perf_counter() - started
        for i, ((prompt, suffix), ids) in enumerate(zip(requests, filled, strict=True)):
            if cfg.json:
                row = {"prompt": prompt, "suffix": suffix, "text": text_of(ids), "seed": cfg.seed}
                print(json.dumps(row), flush=True)
            else:
                print(text_of(ids) if len(filled) == 1 else f"---- {i + 1}\n{text_of(ids)}", flush=True)
        if cfg.html:
            rows = [[ids[1 : end_of(row[-1])] for ids in row] for row in zip(*history, strict=True)]
            Path(cfg.html).write_text(page(rows, tokenizer, mdlm.MASK))
        passes, new = len(history) - 1, sum(ids.count(mdlm.MASK) for ids in history[0])
        print(f"{new} tokens in {seconds:.2f} s, {passes} passes over the canvas", file=sys.stderr)

    return answer


# ---- Dream ---------------------------------------------------------------------------------------------------------


def load_dream(cfg):
    """A function that fills the canvases of a list of (prompt, suffix) and prints the texts; exits without a model."""
    import jax
    import jax.numpy as jnp

    import model_dream as dream

    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs a traceback where we print one line
    on_cpu, folder = jax.devices()[0].platform == "cpu", Path(cfg.ckpt)
    dtype = jnp.dtype(cfg.dtype or ("float32" if on_cpu else "bfloat16"))
    same = "temperature", "top_k", "top_p", "steps", "alg_temp", "threshold", "block_length", "cache"
    try:
        rule = dream.Sampling(cfg.sampler, **{name: getattr(cfg, name) for name in same}, history=bool(cfg.html))
    except ValueError as error:
        sys.exit(str(error))
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            which = {"step": cfg.step} if cfg.step else {}
            model = dream.load(folder, dtype, int8=cfg.int8, **which)
            tokenizer, wrap = dream.load_tokenizer(folder, model.cfg), dream.chat_template(folder)
        except Exception as error:  # Orbax and tokenizers raise nothing narrower for a broken file
            print(error, file=sys.__stderr__, flush=True)
            os._exit(1)  # threads of a failed Orbax read print tracebacks until the process ends
    mask = model.cfg.mask_id
    ends = map(tokenizer.token_to_id, ("<|endoftext|>", "<|im_end|>", "<|dlm_pad|>"))
    ends = dict.fromkeys((model.cfg.eos_id, model.cfg.pad_id, *(i for i in ends if i is not None)))
    rule = dataclasses.replace(rule, vocab=tokenizer.get_vocab_size(), eos_ids=tuple(ends))
    if cfg.chat == "on" and not wrap:
        sys.exit(f"--chat=on: {folder} holds no chat template (tokenizer_config.json)")
    chat = cfg.chat == "on" or (cfg.chat == "auto" and wrap and says_instruct(folder))
    if not cfg.json:
        weights = f"int8 and {dtype}" if cfg.int8 else str(dtype)
        hint = "" if chat or not wrap else "; --chat=on asks it as an assistant"
        print(f"{folder}, {weights}, {'chat template' if chat else 'plain completion'}{hint}", file=sys.stderr)
    stops, key, compile_s = [unescape(s) for s in cfg.stop], jax.random.key(cfg.seed), 0.0
    first, shown = 0, ""  # where the first row's text begins, and what was last shown of it

    def on_event(name, seconds, **_):
        nonlocal compile_s
        compile_s += seconds if name.startswith("/jax/core/compile/") else 0

    jax.monitoring.register_event_duration_secs_listener(on_event)

    def show(step, token_L):
        nonlocal shown
        text = words(tokenizer, token_L[first:].tolist(), mask)
        if step >= 0 and text != shown:  # -1 is the canvas as it was given, and a step may fill nothing
            show_step(int(step), text)
        shown = text

    def hook(step, token_BL):
        jax.debug.callback(show, step, token_BL[0], ordered=True)
        return token_BL

    hooks = {"token_hook": hook} if cfg.show_steps else {}

    def prepare(prompt, suffix):
        """Canvas of a request, whether it has no [MASK:n], and where what is shown of it begins."""
        texts, sizes = pieces(prompt, suffix, cfg)
        filling = len(texts) > len(sizes)
        if filling and cfg.chat == "on":
            sys.exit("--chat=on answers prompts; a suffix or [MASK:n] is filled in plain text")
        answers = chat and not filling
        try:
            texts = [wrap(prompt)] if answers else texts
        except ValueError as error:
            sys.exit(str(error))
        tokenizer.encode_special_tokens = not answers  # elsewhere the names of special tokens are text
        canvas = canvas_of(tokenizer, texts, sizes, model.cfg.positions, mask)
        return canvas, len(texts) == 1 + bool(suffix), canvas.index(mask) if answers else 0

    def kept(canvas, ids):
        """Positions of a filled canvas without what a run of masks holds from its first end token on."""
        keep, ended = [], False
        for p, (before, after) in enumerate(zip(canvas, ids, strict=True)):
            ended = before == mask and (ended or after in ends)
            keep += [] if ended else [p]
        return keep

    def answer(requests):
        nonlocal key, first, compile_s
        requests = [request for request in requests for _ in range(cfg.n)]
        prepared, histories = [prepare(*request) for request in requests], []
        tokens, forwards, seconds, all_compile_s = 0, 0, 0.0, 0.0
        for begin in range(0, len(requests), cfg.batch_size):
            some, compile_s, began = prepared[begin : begin + cfg.batch_size], 0.0, time.perf_counter()
            first = some[0][2] - len(some[0][0])
            key, now = jax.random.split(key)
            canvases = [canvas for canvas, _, _ in some]
            if max(map(len, canvases)) > 2048:
                print("more than 2,048 tokens: Dream was not trained on so long a text", file=sys.stderr)
            try:
                filled, stats = dream.generate(model, canvases, 0, rule, now, **hooks)
            except ValueError as error:
                sys.exit(str(error))
            batch_s = time.perf_counter() - began - compile_s
            seconds, all_compile_s, forwards = (
                seconds + batch_s,
                all_compile_s + compile_s,
                forwards + stats["forwards"],
            )
            for i, ((canvas, plain, start), ids) in enumerate(zip(some, filled, strict=True)):
                prompt, suffix = requests[begin + i]
                keep = kept(canvas, ids)
                made = [ids[p] for p in keep if canvas[p] == mask]
                row = {"prompt": prompt, "suffix": suffix, "text": tokenizer.decode([ids[p] for p in keep])}
                if plain:
                    completion = truncate(tokenizer.decode(made), stops)
                    row |= {"completion": completion, "text": completion if start else prompt + completion + suffix}
                tokens += len(made)
                if cfg.json:  # seconds and forwards are those of the row's batch
                    row |= {"tokens": len(made), "forwards": stats["forwards"], "seconds": batch_s, "seed": cfg.seed}
                    print(json.dumps(row), flush=True)
                else:
                    print(row["text"] if len(requests) == 1 else f"---- {begin + i + 1}\n{row['text']}", flush=True)
                if cfg.html:
                    steps = [canvas, *(row_L[-len(canvas) :].tolist() for row_L in stats["history"][:, i])]
                    histories.append([[ids[p] for p in keep if p >= start] for ids in steps])
        if cfg.html:
            Path(cfg.html).write_text(page(histories, tokenizer, mask))
        rate = f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s, {forwards} forward passes"
        print(f"{rate}; compiling took {all_compile_s:.1f} s more", file=sys.stderr)

    return answer


def says_instruct(folder):
    """Whether the name of a folder, or the one that its config.json remembers, is that of a model for conversations.

    A template is no sign of it: base models carry the one of the tokenizer that they began with.
    """
    name = str(json.loads((folder / "config.json").read_text()).get("_name_or_path", ""))
    return any(word in f"{folder.resolve().name} {name}".lower() for word in ("instruct", "chat", "cpgrpo"))


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
        sys.stdout.flush()
        os._exit(130)  # a computation under way may crash while the interpreter closes
    except OSError as error:
        sys.exit(str(error))
