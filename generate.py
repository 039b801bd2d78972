"""Write code with a trained model: prompts in, text out.

    python generate.py --prompt="def fibonacci(n):"    # the newest checkpoint of out/train_tpu, or weights/pythoncoder
    python generate.py                                               # an interactive prompt
    python generate.py --prompt="import os" --temperature=0.8 --top_p=0.95 --n=4
    python generate.py --prompt="def area(r):\\n    " --suffix="\\n    return a"    # fill in the middle
    python generate.py --file=prompts.jsonl --json > completions.jsonl
    python generate.py --prompt="def area(r):\\n" --show_steps --html=steps.html    # which drafts were right, how sure
    python generate.py --model=mdlm --prompt="Once upon a time" --show_steps
    python generate.py --model=mdlm --prompt="Once upon a [MASK:12] dragon." --html=steps.html
    python generate.py --model=dream --ckpt=out/diffucoder --chat=on --prompt="Sort a list in Python." --show_steps
    python generate.py --model=dream --prompt="def area(r):\\n    [MASK]\\n    return a" --valid=python
    python generate.py --model=dream --ckpt=out/diffucoder --chat=on --system="Answer in code."    # a conversation
    python generate.py --model=dream --ckpt=out/diffucoder --int8 --block_length=32 --cache=dual --threshold=0.9

Reads a run folder of train_tpu.py or train_gpu.py, or a folder of convert_weights.py; where there is no run, a small
PythonCoder or MDLM that comes with this project, in weights/. PythonCoder decodes with a static KV cache in one
compiled loop, and its own MTP head drafts every second token: the text is the same as without (temperature 0), or
drawn from the same distribution. MDLM and Dream fill a canvas of masks in --steps steps; [MASK:n] anywhere in a prompt
is n tokens to fill, and nothing is appended to such a prompt. Dream finds out how many tokens a [MASK] has, and with
--valid=python what it writes stays Python; see infill.py.

A prompt's way: main -> complete of its family -> token ids, or a canvas of them -> the model's sampler -> text.
"""

import collections
import contextlib
import dataclasses
import functools
import html
import itertools
import json
import re
import sys
import time
import typing
from pathlib import Path

import checkpoints
import inference
import runs


@dataclasses.dataclass(frozen=True)
class PythonCoderFlags:
    """Flags of PythonCoder, --model=pythoncoder."""

    speculate: bool = True  # draft every second token with the MTP head
    no_repeat_ngram: int = 6  # never write so many tokens in a row twice, as small models do; 0 allows it


@dataclasses.dataclass(frozen=True)
class MdlmFlags:
    """Flags of MDLM, --model=mdlm."""

    schedule: typing.Literal["linear", "cosine", "cosine_sq", "even"] = "cosine_sq"  # when how many are unmasked


@dataclasses.dataclass(frozen=True)
class DreamFlags:
    """Flags of Dream, --model=dream."""

    alg_temp: float = 0.0  # temperature of the choice of positions; 0 fills the surest
    threshold: float = 0.0  # fill every token of at least this probability in a step; 0 goes by --steps
    entropy_bound: float = 0.0  # fill the surest tokens of a step, of entropies up to this sum in nats
    # with blocks, a threshold or bound, and no cache: open the next block once this share of the last one is filled
    block_add: float = 0.0
    credit: float = 0.0  # with a threshold: a token counts for more the longer it is the likeliest, e.g. by 0.7
    stable_steps: int = 0  # fill all at once when the likeliest tokens stood still for so many steps; 0 never does
    cache: typing.Literal["", "prefix", "dual"] = ""  # keep keys and values while a block is filled
    fast_dllm: bool = False  # blocks with a cache exactly as Fast-dLLM fills them
    eos_penalty: float = 0.0  # keep a text from ending while little of it is written; Dream-Coder's demos use 3
    batch_size: int = 8  # texts that are filled together
    chat: typing.Literal["auto", "on", "off"] = "auto"  # chat template; auto: if the model's name says instruct
    system: str = ""  # what the chat template tells the model before the first prompt, \n for a new line
    bos: bool = False  # begin a text without template with <|beginoftext|>, as evaluations of Dream-Base do
    valid: typing.Literal["", "python"] = ""  # write only what Python can read, or can read once it goes on
    int8: bool = False  # matrices in 8 bits, half the memory of bfloat16
    int4: bool = False  # matrices of the layers in 4 bits, a third of the memory of bfloat16


@dataclasses.dataclass(frozen=True)
class Config:
    model: typing.Literal["pythoncoder", "mdlm", "dream"] = "pythoncoder"  # family of the checkpoint
    # folder; "" is out/train_tpu, out/train_gpu for MDLM, out/diffucoder for Dream; where that holds no model, weights/
    ckpt: str = ""
    step: int = 0  # which checkpoint of a run; 0 takes the newest
    prompt: str = ""  # text to continue, \n for a new line; "" asks for one
    suffix: str = ""  # text that follows: the model fills the middle (PythonCoder must be trained with --fim_rate)
    file: str = ""  # JSON lines with "prompt" and perhaps "suffix", generated as a batch; - reads standard input
    n: int = 1  # completions of each prompt
    max_new: int | None = None  # tokens at most; default 128, 256 for Dream
    temperature: float | None = None  # 0 takes the likeliest token; default 0.6, 0.8 for MDLM, 0.2 for Dream
    top_k: int = 0  # draw from the k likeliest tokens; 0 draws from all
    top_p: float | None = None  # draw from the smallest set of this probability; default 0.95, 0.9 for MDLM
    stop: tuple[str, ...] = ()  # strings that end a completion and are cut off, \n for a new line
    raw: bool = False  # take --prompt, --suffix, --stop, --system as they are: \n stays a backslash and an n
    # MDLM, Dream: [MASK:n] in a prompt is n tokens to fill, [MASK] of Dream as many as fit; --no-infill: both are text
    infill: bool = True
    # passes over the canvas, or each block of a Dream of blocks; default 128 for MDLM, 0 for Dream: one for each token
    steps: int | None = None
    block_length: int = 0  # MDLM, Dream: fill blocks of this length from left to right; 0 takes the whole canvas
    sampler: str = ""  # MDLM: ancestral, max_prob, margin, entropy; Dream: entropy, maskgit_plus, topk_margin, origin
    # show the text after every step; in a terminal tokens are red to green by their probability, and of PythonCoder's
    # drafts the right ones green, those that took the place of a wrong one red
    show_steps: bool = False
    html: str = ""  # write a page with the step and the probability of each token; .svg: an animation of the steps
    dtype: typing.Literal["", "bfloat16", "float32"] = ""  # of weights; "" is float32 on a CPU if it fits, else 16 bits
    devices: int = 0  # PythonCoder, Dream: use so many of the machine's devices; 0 takes all
    compile_cache: str = "~/.cache/unmask"  # PythonCoder, Dream: compiled programs of earlier runs; "" compiles anew
    json: bool = False  # print one JSON line per completion instead of text
    seed: int = 0  # of every random draw
    pythoncoder: PythonCoderFlags = PythonCoderFlags()
    mdlm: MdlmFlags = MdlmFlags()
    dream: DreamFlags = DreamFlags()


SAMPLERS = {  # of each family; the first is its default
    "pythoncoder": ("",),
    "mdlm": ("ancestral", "max_prob", "margin", "entropy"),
    "dream": ("entropy", "maskgit_plus", "topk_margin", "origin"),
}
DEFAULTS = {  # what "" and None stand for
    "pythoncoder": {"ckpt": "out/train_tpu", "max_new": 128, "temperature": 0.6, "top_p": 0.95, "steps": 1},
    "mdlm": {"ckpt": "out/train_gpu", "max_new": 128, "temperature": 0.8, "top_p": 0.9, "steps": 128},
    "dream": {"ckpt": "out/diffucoder", "max_new": 256, "temperature": 0.2, "top_p": 0.95, "steps": 0},
}


def main(cfg):
    cfg = resolve(cfg)
    requests = read_requests(cfg.file) if cfg.file else [(cfg.prompt, cfg.suffix)]
    advice = (
        "--int8, --int4, a smaller --batch_size or --max_new" if cfg.model == "dream" else "a smaller --n or --max_new"
    )
    if cfg.model != "mdlm":
        checkpoints.keep_compiled(cfg.compile_cache)
    with inference.out_of_memory(advice):
        model = {"pythoncoder": PythonCoder, "mdlm": Mdlm, "dream": Dream}[cfg.model](cfg, len(requests))
        if cfg.prompt or cfg.file:
            model.complete(requests)
        else:
            interact(model, end="\n" if cfg.model == "pythoncoder" else "")


def resolve(cfg):
    """The config with the defaults of its family and its line breaks, checked."""
    unset = {name: value for name, value in DEFAULTS[cfg.model].items() if getattr(cfg, name) in ("", None)}
    if "ckpt" in unset and not cfg.step:
        unset["ckpt"] = inference.default_folder(unset["ckpt"], cfg.model)
    cfg = dataclasses.replace(cfg, **unset, sampler=cfg.sampler or SAMPLERS[cfg.model][0])
    if cfg.sampler not in SAMPLERS[cfg.model]:
        raise ValueError(f"--sampler={cfg.sampler} is not one of {cfg.model}'s: {', '.join(SAMPLERS[cfg.model])}")
    least = {"temperature": 0, "top_k": 0, "max_new": 1, "n": 1, "devices": 0, "block_length": 0}
    least |= {"steps": int(cfg.model != "dream")}
    given = {name: getattr(cfg, name) for name in least}
    least |= {"batch_size": 1, "no_repeat_ngram": 0}
    given |= {"batch_size": cfg.dream.batch_size, "no_repeat_ngram": cfg.pythoncoder.no_repeat_ngram}
    if not 0 < cfg.top_p <= 1 or any(given[name] < least[name] for name in least):
        limits = ", ".join(f"--{name} at least {value}" for name, value in least.items())
        raise ValueError(f"{limits}, --top_p in (0, 1]")
    # flags of another family would be ignored
    for family in DEFAULTS.keys() - {cfg.model}:
        flags = getattr(cfg, family)
        foreign = [f.name for f in dataclasses.fields(flags) if getattr(flags, f.name) != f.default]
        if foreign:
            raise ValueError(f"--{', --'.join(foreign)} is for --model={family}")
    if cfg.block_length and cfg.model == "pythoncoder":
        raise ValueError("--block_length is for --model=mdlm or dream")
    if cfg.prompt and cfg.file:
        raise ValueError("give --prompt or --file, not both")
    if cfg.html and not Path(cfg.html).parent.is_dir():  # would fail when all is generated
        raise FileNotFoundError(f"--html={cfg.html}: there is no folder {Path(cfg.html).parent}")
    if cfg.raw:
        return cfg
    # a shell passes \n as two characters
    texts = cfg.dream.system, cfg.prompt, cfg.suffix, *cfg.stop
    system, prompt, suffix, *stop = (text.replace("\\n", "\n") for text in texts)
    dream = dataclasses.replace(cfg.dream, system=system)
    return dataclasses.replace(cfg, prompt=prompt, suffix=suffix, stop=tuple(stop), dream=dream)


def read_requests(path):
    """[(prompt, suffix)] of a JSON-lines file. ValueError names the line that is not one."""
    requests = []
    lines = (sys.stdin.read() if path == "-" else Path(path).read_text()).splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            prompt, suffix = row["prompt"], row.get("suffix", "")
            requests.append((prompt + "", suffix + ""))  # TypeError for what is no text
        except (ValueError, KeyError, TypeError, AttributeError):
            what = 'a JSON object with the text "prompt", and perhaps "suffix"'
            raise ValueError(f"{path}, line {number} is not {what}") from None
    if not requests:
        raise ValueError(f"{path} holds no prompts")
    return requests


def interact(model, end):
    """Read prompts until the end of input: lines up to an empty one are a prompt."""
    terminal = sys.stdin.isatty()
    if terminal:
        print("Write, then an empty line to have it continued or answered; Ctrl-D ends.", file=sys.stderr)

    def typed_lines():
        line = ""
        with contextlib.suppress(EOFError, KeyboardInterrupt):
            while True:
                line = input(("... " if line else ">>> ") * terminal)
                yield line

    for filled, lines in itertools.groupby(typed_lines(), bool):
        if filled:
            model.complete([("\n".join(lines) + end, "")])


def truncate(text, stops):
    """The text before the first of any of the stop strings."""
    return text[: min((i for i in map(text.find, stops) if i >= 0), default=len(text))]


def show(cfg, row, text, number=0):
    """Print a completion: its JSON line, or its text, under a number where there are several."""
    print(json.dumps(row) if cfg.json else f"---- {number}\n{text}" if number else text, flush=True)


# ---- PythonCoder: from left to right -------------------------------------------------------------------------------


class PythonCoder:
    def __init__(self, cfg, requests):
        import jax

        import model_pythoncoder

        self.cfg, self.key = cfg, jax.random.key(cfg.seed)
        where = {"dtype": cfg.dtype, "devices": cfg.devices, "rows": requests * cfg.n}
        self.model, step, self.mesh = inference.load_for_inference(model_pythoncoder, cfg.ckpt, cfg.step, **where)
        self.tokenizer = runs.read_tokenizer(cfg.ckpt)
        # the head has more rows than the tokenizer has tokens: those are never drawn
        eos = self.tokenizer.token_to_id("<|endoftext|>")
        self.rule = model_pythoncoder.Sampling(
            *(cfg.temperature, cfg.top_k, cfg.top_p),
            vocab=self.tokenizer.get_vocab_size(),
            eos=-1 if eos is None else eos,
            no_repeat_ngram=cfg.pythoncoder.no_repeat_ngram,
            speculate=cfg.pythoncoder.speculate and self.model.cfg.mtp,
        )
        print(f"{cfg.ckpt} step {step}, {self.model.run.dtype}", file=sys.stderr)

    def complete(self, requests):
        """Continue all requests, cfg.n times each, as one batch; a single text streams to the terminal."""
        import jax

        import model_pythoncoder

        # Prompts as token ids; all are decoded together.
        cfg, tokenizer = self.cfg, self.tokenizer
        requests = [request for request in requests for _ in range(cfg.n)]
        prompts = [encode(tokenizer, *request) for request in requests]
        self.streams, self.printed = len(prompts) == 1 and not cfg.json, ""
        if self.streams:
            print(requests[0][0], end="", flush=True)

        self.key, key = jax.random.split(self.key)
        self.passes, started = [], time.perf_counter()
        settings = prompts, cfg.max_new, self.rule, key, self.on_tokens
        watching = cfg.show_steps or cfg.html
        with inference.mesh_context(self.mesh):
            texts, stats = model_pythoncoder.generate(self.model, *settings, chunk=1 if watching else 16)
        seconds = time.perf_counter() - started

        # Token ids as texts. Of the one that streamed only the end is missing.
        for number, ((prompt, suffix), ids) in enumerate(zip(requests, texts, strict=True), 1):
            text = truncate(tokenizer.decode(ids), cfg.stop)
            row = {"prompt": prompt, "suffix": suffix, "completion": text, "tokens": len(ids), "seed": cfg.seed}
            if self.streams:
                self.stream(text + "\n", ids)
            else:
                show(cfg, row, prompt + text, number)
        if watching:
            self.show_probabilities(prompts, texts)
        rate = f"{stats['tokens'] / stats['forwards']:.2f} tokens per forward pass"
        if self.rule.speculate:
            rate += f", {stats['accepted']} draft tokens accepted"
        print(f"{stats['tokens']} tokens in {seconds:.2f} s, compiling included; {rate}", file=sys.stderr)

    def on_tokens(self, texts):
        """Called with the token ids of all texts so far; True, which ends the call, if each holds a stop string."""
        self.passes.append([len(ids) for ids in texts])
        ids, stops = texts[0], self.cfg.stop
        texts = [self.tokenizer.decode(ids) for ids in texts]
        if self.streams:
            self.stream(printable(texts[0], stops), ids)
        return bool(stops) and all(truncate(text, stops) != text for text in texts)

    def stream(self, completion, ids):
        """Print what has been added to the completion, the text of `ids`; watched, in the colours of the drafts."""
        if self.cfg.show_steps and sys.stdout.isatty():
            end = 0
            for text, (_, draft) in zip(pieces(self.tokenizer, ids), self.drafts(0, ids), strict=True):
                begin, end = end, min(end + len(text), len(completion))
                print(coloured(completion[max(begin, len(self.printed)) : end], DRAFT_COLOURS[draft]), end="")
            self.printed = completion[:end]
        print(completion[len(self.printed) :], end="", flush=True)
        self.printed = completion

    def drafts(self, row, ids):
        """[(pass, "accepted" | "rejected" | "")] of the tokens of a text: accepted drafts, and what replaced others.

        A pass that commits two tokens had the first of them as a draft; one that commits a single token had another
        draft, unless it was the first pass or there was no room for two.
        """
        found, end = [], 0
        for number, lengths in enumerate(self.passes, 1):
            new, end = lengths[row] - end, lengths[row]
            single = number == 1 or not self.rule.speculate or end >= self.cfg.max_new or ids[end - 1] == self.rule.eos
            kinds = ["accepted", ""] if new == 2 else ["" if single else "rejected"]
            found += [(number, kind) for kind in kinds[:new]]
        return found

    def show_probabilities(self, prompts, texts):
        """The texts in the colours of their probabilities in a terminal, and the page of --html."""
        import jax
        import numpy as np
        from flax import nnx

        import model_pythoncoder as pc

        @jax.jit
        def of_next(model, token_BL):
            index_BL = jax.numpy.broadcast_to(jax.numpy.arange(token_BL.shape[1]), token_BL.shape)
            hidden_BLD, _ = model.step(model.new_cache(*token_BL.shape), token_BL, index_BL)
            prob_BLV = jax.nn.softmax(model.logits(hidden_BLD[:, :-1]))
            return jax.numpy.take_along_axis(prob_BLV, token_BL[:, 1:, None], -1)[..., 0]

        # One pass over what is finished gives the probabilities that its tokens had: those before any filter.
        rows = [prompt + new for prompt, new in zip(prompts, texts, strict=True)]
        token_BL = np.zeros((len(rows), 1 << max(5, (max(map(len, rows)) - 1).bit_length())), np.int32)
        for token_L, row in zip(token_BL, rows, strict=True):
            token_L[: len(row)] = row
        yarn = max(map(len, prompts)) + self.cfg.max_new > self.model.cfg.positions  # as generate() decides
        graph = pc.graph_of(self.model.cfg, dataclasses.replace(self.model.run, yarn=yarn))
        with inference.mesh_context(self.mesh):
            prob_BL = np.asarray(of_next(nnx.merge(graph, nnx.state(self.model)), token_BL))

        pages = []
        for i, (prompt, new) in enumerate(zip(prompts, texts, strict=True)):
            prob = prob_BL[i, len(prompt) - 1 : len(rows[i]) - 1].tolist()
            told = zip(pieces(self.tokenizer, new), self.drafts(i, new), prob, strict=True)
            tokens = [Token(text, number, p, f"draft {kind}" * bool(kind)) for text, (number, kind), p in told]
            left = len(truncate("".join(token.text for token in tokens), self.cfg.stop))
            for j, token in enumerate(tokens):  # without what follows a stop string
                tokens[j], left = token._replace(text=token.text[:left]), max(0, left - len(token.text))
            if self.cfg.show_steps and sys.stdout.isatty():
                print("---- by probability\n" + "".join(shaded(token.text, token.probability) for token in tokens))
            pages.append([Token(text, 0) for text in pieces(self.tokenizer, prompt)] + tokens)
        write_page(self.cfg.html, pages)


def encode(tokenizer, prompt, suffix):
    """Token ids of a prompt; with a suffix in the order prefix, suffix, middle. Names of special tokens stay text."""
    tokenizer.encode_special_tokens = True
    prompt_ids, suffix_ids = (tokenizer.encode(text, add_special_tokens=False).ids for text in (prompt, suffix))
    if not suffix:
        return prompt_ids
    names = "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"
    begin, then, middle = map(tokenizer.token_to_id, names)
    if None in (begin, then, middle):
        raise ValueError(f"--suffix needs a tokenizer with {', '.join(names)}; this model's has not all of them")
    return [begin, *prompt_ids, then, *suffix_ids, middle]


def printable(text, stops):
    """What may be shown of a text that grows: not half a character, nor what may become a stop string."""
    text = truncate(text, stops).rstrip("\ufffd")
    held = max((k for s in stops for k in range(1, len(s)) if text.endswith(s[:k])), default=0)
    return text[: len(text) - held]


# ---- MDLM and Dream: a canvas of masks -----------------------------------------------------------------------------


@dataclasses.dataclass
class Canvas:
    """A text with masks, which the model fills in place."""

    prompt: str
    suffix: str
    ids: list[int]  # MASK where the model writes
    start: int  # where the ids begin that are shown
    around: tuple[str, str] | None  # what is shown around a completion; None where [MASK:n] says where to write
    counted: bool = False  # [MASK] has got its number of tokens


class CanvasModel:
    """What MDLM and Dream share. The family adds `fill`: the token ids of canvases, their history, and statistics."""

    together = sys.maxsize  # texts that `fill` is given at a time
    begin, end = (), ()  # ids around a text; none at the end of masks, where the model writes its own
    ask = None  # function that writes a prompt as a question in the chat template, as token ids

    def __init__(self, cfg, tokenizer, mask, ends, positions):
        self.cfg, self.tokenizer, self.mask, self.ends, self.positions = cfg, tokenizer, mask, ends, positions
        self.watching = bool(cfg.show_steps or cfg.html)

    def complete(self, requests):
        """Fill a canvas for each request, cfg.n times, print the texts and return what the model wrote.

        Of a Dream of blocks a single text streams to the terminal.
        """
        cfg, pages, texts, total = self.cfg, [], [], collections.Counter()
        canvases = [canvas for request in requests for canvas in [self.prepare(*request)] * cfg.n]
        self.lengths, self.printed = [len(canvas.ids) for canvas in canvases], ""
        for first in range(0, len(canvases), self.together):
            batch = canvases[first : first + self.together]
            self.watched, self.shown = batch[0], self.picture(batch[0], batch[0].ids)
            filled, history, prob, stats = self.fill(batch)  # the family's sampler
            total.update({name: stats[name] for name in ("forwards", "seconds", "compile_s") if name in stats})
            for i, (canvas, ids) in enumerate(zip(batch, filled, strict=True)):
                # of what the model wrote, tokens behind an end token are left out
                kept = self.kept(canvas, ids)
                written = [ids[p] for p in kept if canvas.ids[p] == self.mask]
                total["tokens"] += len(written)
                completion, text = self.text_of(canvas, ids)
                row = {"prompt": canvas.prompt, "suffix": canvas.suffix, "text": text}
                row |= {"completion": completion} if canvas.around else {}
                # the passes that it took part in, and their seconds
                passes = int(stats["passes"][i]) if "passes" in stats else stats["forwards"]
                seconds = stats["seconds"] * passes / max(1, stats["forwards"])
                row |= {"tokens": len(written), "forwards": passes, "seconds": seconds, "seed": cfg.seed}
                texts.append(completion)
                show(cfg, row, text[len(self.printed) :], first + i + 1 if len(canvases) > 1 else 0)
                if cfg.html:  # the kept tokens of the canvas as it was given and after each step
                    shown = [p for p in kept if p >= canvas.start]
                    steps = [[step[p] for p in shown] for step in (canvas.ids, *history[i])]
                    pages.append(tokens_in_order(steps, self.tokenizer, self.mask, [prob[i][p] for p in shown]))
        write_page(cfg.html, pages)
        rate = f"{total['tokens'] / total['seconds']:.1f} tokens/s, {total['forwards']} forward passes"
        compiling = f"; compiling took {total['compile_s']:.1f} s more" if total["compile_s"] else ""
        print(f"{total['tokens']} tokens in {total['seconds']:.2f} s, {rate}{compiling}", file=sys.stderr)
        return texts

    def prepare(self, prompt, suffix):
        """The Canvas of a request: "a [MASK:2]b" has the texts a and b around two masks.

        A suffix follows cfg.max_new masks, and a prompt without masks goes on with as many. A space before [MASK:n] is
        left out: words bring their own.
        """
        # Cut the request at its masks: texts and numbers of masks take turns.
        cfg = self.cfg
        cut = re.compile(r" ?\[MASK(?::(\d+))?\]").split if cfg.infill else lambda text: [text]
        parts = cut(prompt)
        if suffix or len(parts) == 1:
            parts.append(cfg.max_new)
        if suffix:
            parts += cut(suffix)
        texts, sizes = parts[::2], [count and int(count) for count in parts[1::2]]
        if cfg.infill and any("[MASK" in text for text in texts):
            raise ValueError("a mask is written with its number of tokens: [MASK:12]; --no-infill takes [MASK as text")

        # The chat template is for a prompt that the model goes on with; a text that ends behind its masks has none.
        ended = len(texts) > len(sizes)
        if ended and cfg.dream.chat == "on":
            raise ValueError("--chat=on answers prompts; a suffix or [MASK:n] is filled in plain text")
        answer, gaps = self.ask is not None and not ended, len(texts) > 1 + bool(suffix)

        # Token ids. Names of special tokens in a text are text.
        self.tokenizer.encode_special_tokens = True
        encoded = [self.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        if answer:
            encoded = [self.ask(prompt)]
        begin, end = () if answer else self.begin, self.end if ended else ()
        counted = None in sizes
        if counted:
            sizes = self.measure([*begin, *encoded[0]], encoded[1:], sizes)
        length, most = len(begin) + sum(map(len, encoded)) + sum(sizes) + len(end), self.positions
        if length > most:
            raise ValueError(f"{length} tokens do not fit the model's {most} positions; lower --max_new or mask less")
        ids = [*begin]
        for text_ids, size in itertools.zip_longest(encoded, sizes, fillvalue=0):
            ids += text_ids + [self.mask] * size
        start = ids.index(self.mask) if answer else len(begin)
        around = None if gaps else ("", "") if answer else (prompt, suffix)
        return Canvas(prompt, suffix, [*ids, *end], start, around, counted)

    def measure(self, before, following, sizes):
        """The sizes of holes, of which one is not known: with `following` texts behind the ids `before`."""
        raise ValueError("a mask is written with its number of tokens: [MASK:12]; --no-infill takes [MASK as text")

    def kept(self, canvas, ids):
        """Positions of a filled canvas without what a run of masks holds from its first end token on."""
        kept, ended = [], False
        for p, (given, token) in enumerate(zip(canvas.ids, ids, strict=True)):
            ended = given == self.mask and (ended or token in self.ends)
            if not ended:
                kept.append(p)
        return kept

    def text_of(self, canvas, ids, cut=truncate):
        """(what the model wrote, the whole text), one and the same where [MASK:n] said where to write.

        cut is truncate, or printable for a text that grows.
        """
        kept = self.kept(canvas, ids)
        if not canvas.around:
            text = cut(self.tokenizer.decode([ids[p] for p in kept]), ())
            return text, text
        written = self.tokenizer.decode([ids[p] for p in kept if canvas.ids[p] == self.mask])
        completion = cut(written, self.cfg.stop)
        return completion, completion.join(canvas.around)

    def picture(self, canvas, ids, prob=None):
        """The text of a canvas that is not full, masks as blocks; with probabilities what was written is coloured."""
        shown, text = [p for p in self.kept(canvas, ids) if p >= canvas.start], ""
        for masked, group in itertools.groupby(shown, lambda p: ids[p] == self.mask):
            group = list(group)
            if masked:
                text += "\u2591" * len(group)
                continue
            for p, part in zip(group, pieces(self.tokenizer, [ids[p] for p in group]), strict=True):
                text += shaded(part, prob[p]) if prob and canvas.ids[p] == self.mask else part
        return text

    def show_step(self, step, ids, prob):
        """Show the first canvas of the batch after a step that changed it."""
        text = self.picture(self.watched, ids)
        if text != self.shown:
            terminal = sys.stdout.isatty()
            seen = "\x1b[2J\x1b[H" * terminal + f"step {step + 1}: "
            print(seen + (self.picture(self.watched, ids, prob) if terminal else text), flush=True)
        self.shown = text


HIDDEN = "\ufdd0"  # a code point that Unicode keeps out of texts


def encode_chat(tokenizer, wrap, prompt, system="", before=()):
    """Token ids of a prompt in a chat template, behind a system turn and the (prompt, answer)s before it.

    Special tokens are the template's alone. Their names in what was written stay text: HIDDEN breaks them until the
    template's have become tokens.
    """
    names = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    special = re.compile(f"({'|'.join(map(re.escape, sorted(names, key=len, reverse=True)))})")
    hide = functools.partial(special.sub, lambda name: name[0][0] + HIDDEN + name[0][1:])
    text, ids = wrap(hide(prompt), hide(system), [tuple(map(hide, turns)) for turns in before]), []
    tokenizer.encode_special_tokens = True
    for part in special.split(text):
        token_id = [tokenizer.token_to_id(part)] if part in names else None
        ids += token_id or tokenizer.encode(part.replace(HIDDEN, ""), add_special_tokens=False).ids
    return ids


class Mdlm(CanvasModel):
    def __init__(self, cfg, _):
        import torch

        import model_mdlm as mdlm

        folder = Path(cfg.ckpt)  # of a run, or a checkpoint itself
        if cfg.step or runs.saved_steps(folder):
            folder = runs.newest(folder, cfg.step)[1]
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = mdlm.torch_dtype(cfg.dtype)
        self.model, tokenizer = mdlm.load(folder, self.device, dtype), runs.read_tokenizer(folder)
        super().__init__(cfg, tokenizer, mdlm.MASK, {mdlm.EOS}, self.model.cfg.positions)
        self.begin, self.end = [mdlm.BOS], [mdlm.EOS]
        settings = cfg.sampler, cfg.steps, cfg.mdlm.schedule, cfg.temperature, cfg.top_k, cfg.top_p
        self.rule = mdlm.Sampling(*settings, tokenizer.get_vocab_size(), cfg.block_length)
        self.generator = torch.Generator(self.device).manual_seed(cfg.seed)
        name = torch.cuda.get_device_name() if self.device == "cuda" else "cpu"
        print(f"{folder}, {dtype} on {name}", file=sys.stderr)

    def fill(self, canvases):
        import torch

        import model_mdlm as mdlm

        # one batch, padded on the right
        lengths, steps, model = [len(canvas.ids) for canvas in canvases], [], self.model
        token_BL = torch.full((len(canvases), max(lengths)), mdlm.PAD)
        for row, canvas in zip(token_BL, canvases, strict=True):
            row[: len(canvas.ids)] = torch.tensor(canvas.ids)

        token_BL = token_BL.to(self.device)
        prob_BL, before_BL = torch.ones(token_BL.shape, device=self.device), token_BL.clone()
        if self.watching:
            model = Watched(model)

        def on_step(i, token_BL):
            steps.append(token_BL.tolist())
            if self.watching:
                drawn_BL = token_BL != before_BL
                logits_MV = model.logits(model.last_BLD[drawn_BL])[:, : self.rule.vocab].float()
                logits_MV[:, list(mdlm.BANNED)] = -torch.inf
                prob_BL[drawn_BL] = logits_MV.softmax(-1).gather(1, token_BL[drawn_BL][:, None])[:, 0]
                before_BL.copy_(token_BL)
            if self.cfg.show_steps:
                self.show_step(i, steps[-1][0][: lengths[0]], prob_BL[0].tolist())

        started = time.perf_counter()
        filled = mdlm.sample(model, token_BL, self.rule, self.generator, on_step).tolist()
        stats = {"forwards": len(steps), "seconds": time.perf_counter() - started}
        history = [[step[i][:length] for step in steps] for i, length in enumerate(lengths)]
        filled = [ids[:length] for ids, length in zip(filled, lengths, strict=True)]
        return filled, history, prob_BL.tolist(), stats


class Watched:
    """An MDLM that remembers the hidden states of its last pass."""

    def __init__(self, model):
        self.model, self.logits, self.last_BLD = model, model.logits, None

    def hidden(self, *inputs):
        self.last_BLD = self.model.hidden(*inputs)
        return self.last_BLD


class Dream(CanvasModel):
    def __init__(self, cfg, _):
        import jax

        import infill
        import model_dream
        import sample_block
        import sample_dream

        # The rule refuses flags that do not go together, before the weights are read.
        flags, folder = cfg.dream, runs.as_path(cfg.ckpt)
        shared = {name: getattr(cfg, name) for name in ("steps", "temperature", "top_p", "top_k")}
        names = "alg_temp", "threshold", "entropy_bound", "block_add", "credit", "stable_steps", "cache", "fast_dllm"
        names += ("eos_penalty",)
        path, meta, _ = checkpoints.find_weights(folder, cfg.step)
        own = model_dream.read_config(path, meta).block_length
        blocks = {name: getattr(flags, name) for name in names} | {"block_length": cfg.block_length or own}
        rule = sample_dream.Sampling(cfg.sampler, **shared, **blocks, history=bool(cfg.html or cfg.show_steps))
        rule = sample_block.settings_of(rule) if own else rule
        if flags.valid and (own or flags.chat == "on"):
            raise ValueError("--valid=python is for a Dream without blocks that writes code, without a chat template")
        bits = inference.bits_of(flags)
        where = {"dtype": cfg.dtype, "bits": bits, "devices": cfg.devices, "rows": flags.batch_size}
        self.model, _, self.mesh = inference.load_for_inference(model_dream, folder, cfg.step, **where)

        # What ends a text: the model's own ids, and tokens by which a turn of a conversation ends.
        dream, tokenizer = self.model.cfg, runs.load_tokenizer(folder, self.model.cfg)
        ends = map(tokenizer.token_to_id, ("<|endoftext|>", "<|im_end|>", "<|dlm_pad|>"))
        ends = dict.fromkeys((dream.eos_id, dream.pad_id, *(i for i in ends if i not in (None, dream.expand_id))))
        super().__init__(cfg, tokenizer, dream.mask_id, ends, dream.positions)
        self.rule = dataclasses.replace(rule, vocab=tokenizer.get_vocab_size(), eos_ids=tuple(ends))
        self.banned = {"ban_ids": (dream.mask_id, dream.expand_id, *ends)}  # no text ends in a hole that was counted
        if own and self.rule.block_length != own:
            print(f"--block_length={cfg.block_length}: trained with {own}", file=sys.stderr)
        self.read = infill.Reader(self.model, tokenizer)
        # Of many texts those that end make room for others. What is watched is one batch, and so are blocks.
        self.together = flags.batch_size * (1 if self.watching or dream.block_length else 8)
        self.key, self.compile_s = jax.random.key(cfg.seed), 0.0
        self.turns = []  # (prompt, answer) so far
        jax.monitoring.register_event_duration_secs_listener(self.on_event)

        # A template is no sign of a model for conversations: base models carry that of the tokenizer they began with.
        # Its name is: that of what was converted, else that of the folder.
        wrap = runs.chat_template(folder)
        if flags.chat == "on" and not wrap:
            raise ValueError(f"--chat=on: {folder} holds no chat template (tokenizer_config.json)")
        config = runs.read_json(folder / "config.json")
        name = config.get("source") or f"{folder.resolve().name} {config.get('_name_or_path', '')}"
        instruct = any(word in name.lower() for word in ("instruct", "chat", "cpgrpo"))
        if wrap and (flags.chat == "on" or (flags.chat == "auto" and instruct and not flags.valid)):
            self.ask = functools.partial(encode_chat, tokenizer, wrap, system=flags.system, before=self.turns)
        if flags.system and not self.ask:
            raise ValueError("--system goes before a conversation; say --chat=on")
        if flags.bos:
            self.begin = [tokenizer.token_to_id("<|beginoftext|>")]
            if None in self.begin:
                raise ValueError(f"--bos: the tokenizer of {folder} has no <|beginoftext|>")
        hint = "; --chat=on asks it as an assistant" if wrap and not self.ask else ""
        how = "chat template" if self.ask else "plain completion"
        print(f"{folder}, {f'int{bits} and ' * bool(bits)}{self.model.run.dtype}, {how}{hint}", file=sys.stderr)

    def complete(self, requests):
        """As CanvasModel.complete; the next call goes on with the conversation."""
        answers = super().complete(requests)
        self.turns.append((requests[-1][0], answers[-1]))
        return answers

    def measure(self, before, following, sizes):
        """As CanvasModel.measure: the size of the only hole, as a Dream that counts says it, or the likeliest."""
        import jax

        import infill
        import sample_dream

        if self.model.cfg.block_length:
            raise ValueError("[MASK] without a number is for a Dream without blocks; say [MASK:12] at the end")
        if sizes != [None] or following[-1:] in ([], [[]]):
            what = "[MASK] without its number of tokens is the only hole of a text and has text behind it"
            raise ValueError(f"{what}; say [MASK:12]")
        rule, key = dataclasses.replace(self.rule, history=False, **self.banned), jax.random.fold_in(self.key, 1)

        def fill(canvases):
            return sample_dream.generate(self.model, canvases, 0, rule, key, rows=self.cfg.dream.batch_size)[0]

        with inference.mesh_context(self.mesh):
            if self.model.cfg.expand_id >= 0:
                size = len(infill.grow(self.read, before, *following))
            else:
                size = infill.hole_length(self.read, before, *following, fill, bool(self.cfg.dream.valid))
        print(f"[MASK] is {size} token{'s' * (size > 1)} here", file=sys.stderr)
        return [size]

    def on_event(self, name, seconds, **_):
        self.compile_s += seconds if name.startswith("/jax/core/compile/") else 0

    def fill(self, canvases):
        import jax

        import sample_block
        import sample_dream

        prompts = [canvas.ids for canvas in canvases]
        if max(map(len, prompts)) > 2048:
            print("more than 2,048 tokens: Dream was not trained on so long a text", file=sys.stderr)
        self.key, key = jax.random.split(self.key)
        self.compile_s, started = 0.0, time.perf_counter()
        watch = self.watch if self.cfg.show_steps else None
        in_blocks, rows = bool(self.model.cfg.block_length), min(self.cfg.dream.batch_size, len(self.lengths))
        streams = len(self.lengths) == 1 and not (self.cfg.json or self.cfg.show_steps)
        # All batches have a width of three at most, and as many rows: each shape is a program that must be compiled.
        # Texts of about one length go together.
        parts = [self.lengths[i : i + self.together] for i in range(0, len(self.lengths), self.together)]
        widths = sample_dream.widths([*itertools.chain(*map(sorted, parts))], rows, self.positions)
        sampler, settings = sample_dream, {"widths": widths, "rows": rows, "watch": watch}
        if in_blocks:
            sampler, settings = sample_block, settings | {"on_block": self.on_block if streams else None}
        with inference.mesh_context(self.mesh):
            changes = self.banned if all(canvas.counted for canvas in canvases) else {}
            rule = dataclasses.replace(self.rule, **changes)
            filled, stats = sampler.generate(self.model, prompts, 0, rule, key, **settings)
            if self.cfg.dream.valid:
                filled = [self.mend(*canvas) for canvas in zip(prompts, filled, strict=True)]
        seconds = time.perf_counter() - started - self.compile_s
        history, prob = [], []
        for i, ids in enumerate(prompts if self.cfg.html else ()):
            kept = self.slots(ids)
            prob.append(stats["probability"][i, kept].tolist())
            if not in_blocks:
                history.append([*stats["history"][:, i, kept].tolist(), filled[i]])
                continue
            when = stats["when"][i, kept].tolist()
            steps = range(1, stats["steps"] + 1)
            history.append([[x if w <= s else self.mask for x, w in zip(filled[i], when, strict=True)] for s in steps])
        return filled, history, prob, stats | {"seconds": seconds, "compile_s": self.compile_s}

    def mend(self, canvas, filled):
        """The ids of a filled canvas, what was written changed where Python cannot read it."""
        import infill

        ids, is_right = infill.mend(self.read, canvas, filled, self.ends)
        if not is_right:
            print("--valid=python: found nothing that Python can read between what was given", file=sys.stderr)
        return ids

    def on_block(self, rows):
        """Called with the token ids of the single text after each block; prints what has been added before a MASK."""
        ids = [*itertools.takewhile(lambda token: token != self.mask, rows[0])]
        canvas = dataclasses.replace(self.watched, ids=self.watched.ids[: len(ids)])
        _, text = self.text_of(canvas, ids, printable)
        print(text[len(self.printed) :], end="", flush=True)
        self.printed = text

    def slots(self, ids):
        """Where a text stands in a row: on its right, or on its left with blocks."""
        return slice(len(ids)) if self.model.cfg.block_length else slice(-len(ids), None)

    def watch(self, state):
        """Runs in the compiled loop of the sampler after each step."""
        import jax

        def show(step, *rows):  # on the host
            self.show_step(int(step), *(row[self.slots(self.watched.ids)].tolist() for row in rows))

        ordered = not self.mesh  # JAX orders those of one device alone
        jax.debug.callback(show, state.step, state.token_BL[0], state.prob_BL[0], ordered=ordered)


# ---- in which step each token appeared, and how sure the model was -------------------------------------------------


class Token(typing.NamedTuple):
    text: str
    step: int  # in which it appeared; 0: it was given
    probability: float = 1.0  # that the model gave it then
    note: str = ""


def pieces(tokenizer, ids):
    """The text that each token adds; a character of several tokens belongs to the last of them."""
    texts, before = [], ""
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:end])
        text = text.rstrip("\ufffd") if end < len(ids) else text
        texts.append(text[len(before) :])
        before = text
    return texts


def tokens_in_order(history, tokenizer, mask, prob):
    """The Tokens of a canvas, of its token ids before the first step and after each, and of their probabilities."""
    steps = [next(step for step, token in enumerate(ids) if token != mask) for ids in zip(*history, strict=True)]
    return list(map(Token, pieces(tokenizer, history[-1]), steps, prob))


SHADES = 196, 202, 208, 214, 220, 190, 154, 118, 82, 46  # of a terminal, red to green: of a tenth of probability each
DRAFT_COLOURS = {"accepted": 46, "rejected": 196, "": 0}


def coloured(text, colour):
    return f"\x1b[38;5;{colour}m{text}\x1b[39m" if text and colour else text


def shaded(text, probability):
    return coloured(text, SHADES[min(int(10 * probability), 9)])


def write_page(path, texts):
    """Write the page or animation of --html, if there is one: texts as lists of Tokens."""
    if path:
        Path(path).write_text((animation if path.endswith(".svg") else page)(texts))


def colour(step, steps):
    return f"hsl({220 - 220 * step / max(steps, 1):.0f} 80% 85%)" if step else "#eee"


def page(texts):
    """A self-contained HTML page: each text with its tokens coloured by step, or by probability at a click."""
    rows = ""
    for tokens in texts:
        rows, steps = rows + "<p>", max((token.step for token in tokens), default=0)
        for text, step, p, note in tokens:
            title, sure = "given", "#eee"
            if step:
                title = f"step {step} of {steps}, probability {p:.3f}" + f", {note}" * bool(note)
                sure = f"hsl({120 * p:.0f} 80% 80%)"
            style = f"--step:{colour(step, steps)};--sure:{sure}"
            rows += f'<span style="{style}" title="{title}">{html.escape(text)}</span>'
        rows += "</p>"
    by = "span{background:var(--step)}body:has(:checked) span{background:var(--sure)}"
    style = by + "body{font:18px/1.8 serif;max-width:42em;margin:2em auto;white-space:pre-wrap}small{color:#666}"
    note = "<label><input type=checkbox> by probability: red ones were unsure, green ones sure</label>. "
    note += "Blue tokens appeared first, red ones last, grey ones were given; point at one to read more."
    head = f"<!doctype html><meta charset=utf-8><title>Steps</title><style>{style}</style>"
    return f"{head}<body>{rows}<small>{note}</small></body>\n"


def animation(texts, step_s=0.4, rest_s=3.0):
    """A self-contained SVG of the same that writes the texts step by step, and again after a rest."""
    # Place each token; one may end a line and begin the next.
    placed, line, column = [], 0, 0
    for tokens in texts:
        for text, step, *_ in tokens:
            for part in re.split("(\n)", text):
                if part == "\n":
                    line, column = line + 1, 0
                elif part:
                    placed.append((line, column, part, step))
                    column += len(part)
        line, column = line + 2, 0

    # Draw it: a coloured box and the letters over it, grey in the step in which they appear. What was given is there
    # from the beginning.
    steps = max((token.step for tokens in texts for token in tokens), default=0)
    width, height = 8.43, 21  # of a letter, of a line
    total_s, shapes = steps * step_s + rest_s, []
    for row, column, part, step in placed:
        timing = f'keyTimes="0;{step * step_s / total_s:.3f}" dur="{total_s:.1f}s" calcMode="discrete"'
        animate = f'<animate {timing} repeatCount="indefinite" attributeName="{{}}" values="{{}}"/>' * bool(step)
        fill, size = colour(step, steps), f"{len(part) * width:.1f}"
        turns, appears = animate.format("fill", f"#aaa;{fill}"), animate.format("opacity", "0;1")
        place = f'x="{12 + column * width:.1f}"'
        box = f'<rect {place} y="{8 + row * height}" width="{size}" height="18" fill="{fill}">{turns}</rect>'
        letters = f'<text {place} y="{22 + row * height}" textLength="{size}">{html.escape(part)}{appears}</text>'
        shapes.append(box + letters)
    longest = max((column + len(part) for _, column, part, _ in placed), default=0)
    style = "<style>text{font:14px monospace}</style><rect width='100%' height='100%' fill='#fff'/>"
    size = f'width="{24 + longest * width:.0f}" height="{line * height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" xml:space="preserve" {size}>{style}{"".join(shapes)}</svg>\n'


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
