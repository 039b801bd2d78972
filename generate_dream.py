"""Generate code with Dream: a canvas of masks is filled, anywhere in the text. Asks a model.

    # go on with a text, and show how; without a prompt it asks for one
    python generate_dream.py --show_steps --prompt='def f(n):\\n    \"\"\"Double n.\"\"\"'
    # fill holes: [MASK:n] is n tokens, [MASK] ends by itself
    python generate_dream.py --prompt="def area(r):\\n    [MASK]\\n    return a" --valid=python
    # chat with a model from the Hub
    python generate_dream.py --ckpt=out/diffucoder --chat=on --prompt="Sort a list in Python."
    # the same, faster: 8 bits, cached blocks, all tokens of 0.9
    python generate_dream.py --ckpt=out/diffucoder --chat=on --prompt="Sort a list." --int8 \\
        --block_length=32 --cache=dual --threshold=0.9
    # as DiffuCoder's own demo: its TOKEN_PER_STEP = 1 is --steps = max_new / TOKEN_PER_STEP
    python generate_dream.py --ckpt=out/diffucoder --chat=on --prompt="Sort a list in Python." \\
        --max_new=256 --steps=256 --temperature=0.3
    # of 20 completions the first that passes the prompt's examples
    python generate_dream.py --file=prompts.jsonl --n=20 --check --json > done.jsonl
    # steps for extra/steps.py, which makes a page or a picture
    python generate_dream.py --json --show_steps --prompt="def f(n):" > steps.json

Reads the folder of a run of train_dream.py or coupled_grpo.py, or one of convert_weights.py; where
there is none, the small model in weights/. A prompt becomes a canvas of masks. sample_dream.py
fills it, or sample_block.py if the Dream was trained in blocks.

It does not sample as other families' own demos do: that is extra/demos.py. Nor does it draft
(extra/draft.py), repair what fails its examples (extra/repair.py), or answer over HTTP.
"""

import collections
import dataclasses
import itertools
import json
import re
import sys
import time
import typing

import runs
from runs import Count, Natural, NonNegative, Share, TopP

MOVED = dict.fromkeys(
    "like schedule sub_block fast_dllm guidance eos_penalty late_eos regrow top_k".split(),
    "python extra/demos.py samples as the models' own demos do",
)
MOVED["repair"] = "python extra/repair.py"


@dataclasses.dataclass(frozen=True)
class Config:
    # folder of a model; "" is out/train_dream, or weights/dream where that holds none
    ckpt: str = ""
    # text to continue, \n for a new line (not needed after def f(): or """); "" asks for one
    prompt: str = ""
    # JSON lines with "prompt" and perhaps "suffix"; - reads standard input
    file: str = ""
    n: Count = 1  # completions of each prompt
    # tokens at most; unset: 256, or fewer by the model's generation_config.json
    max_new: Count | None = None
    temperature: NonNegative = 0.2  # 0 takes the argmax
    # ---- the prompt
    suffix: str = ""  # text that follows: the middle is filled
    stop: tuple[str, ...] = ()  # strings that end a completion and are cut off, \n for a new line
    # take texts as they are: no \n escapes, no line break appended, [MASK] is text
    raw: bool = False
    # run the prompt's >>> examples in sandbox.py on its completions; print the first that passes
    check: bool = False
    # chat template; auto: by model name, off with --check, --valid
    chat: typing.Literal["auto", "on", "off"] = "auto"
    system: str = ""  # system turn of the chat template, \n for a new line
    bos: bool = False  # begin plain text with <|beginoftext|>, as Dream-Base's evaluation
    # ---- sampling
    top_p: TopP = 0.95  # draw from the smallest set of this probability
    # denoising steps, for a Dream of blocks those of a block; 0: one for each token
    steps: Natural = 0
    # fill blocks of this length from left to right; 0 takes the whole canvas
    block_length: Natural = 0
    # order of positions
    alg: typing.Literal["entropy", "maskgit_plus", "topk_margin", "origin"] = "entropy"
    # temperature of the choice of positions; 0 fills those of highest confidence
    alg_temp: NonNegative = 0.0
    # fill every token of at least this probability in a step; 0 goes by --steps
    threshold: Share = 0.0
    # fill by lowest entropy, while those before sum to at most this (nats); 0: off
    entropy_bound: NonNegative = 0.0
    # with blocks: keep keys and values while a block is filled
    cache: typing.Literal["", "prefix", "dual"] = ""
    # constrain the text to a valid prefix of a Python program
    valid: typing.Literal["", "python"] = ""
    batch_size: Count = 8  # texts that are filled together
    seed: Natural = 0  # of every random draw
    # ---- output and machine
    json: bool = False  # print one JSON line per completion instead of text
    # show each step, in a terminal red to green by probability; with --json: record the steps
    show_steps: bool = False
    int8: bool = False  # matrices in 8 bits, half the memory of bfloat16
    # matrices of the layers in 4 bits, a third, but slower than 8. Token by token a CPU is slower
    # with either than with none
    int4: bool = False
    # of weights; "" is 16 bits, on a CPU float32 where that fits and is faster
    dtype: typing.Literal["", "bfloat16", "float32"] = ""
    devices: Natural = 0  # number of the machine's devices to use; 0 takes all
    compile_cache: str = "~/.cache/unmask"  # folder of compiled programs, for later runs; "": none


if __name__ == "__main__":  # --help and a wrong flag are answered before JAX is imported
    runs.command(lambda cfg: None, Config, __doc__, moved=MOVED)

import jax
from tokenizers.decoders import DecodeStream

import checkpoints
import infill
import model_dream
import prompts
import sample_block
import sample_dream


def main(cfg):
    cfg = prepare(cfg)
    requests = [(cfg.prompt, cfg.suffix)]
    if cfg.file:
        requests = prompts.read_requests(cfg.file)
    if not cfg.raw:
        requests = [(prompts.on_new_line(prompt), suffix) for prompt, suffix in requests]
    if cfg.check:  # before a model is read
        tests = [prompts.examples(prompt) for prompt, _ in requests]
        prompts.verdicts("", ["assert True"])  # a sandbox that does not work says so

    with runs.enough_memory("--int8, --int4, a smaller --batch_size or --max_new"):
        dream = Dream(cfg)
        if cfg.prompt or cfg.file:
            completions = dream.complete(requests)
        else:
            prompts.interact(dream.complete, "", cfg.raw)

    if cfg.check:
        for row, text in prompts.checked(completions, cfg.n, tests):
            show(cfg, row, text)


def prepare(cfg):
    """The settings as they count. Reads what the model's folder says."""
    folder = runs.as_path(cfg.ckpt or checkpoints.default_folder("out/train_dream", "dream"))
    _, config = prompts.check_family(folder, "a Dream")
    own = runs.read_about(folder, "generation_config.json")
    # what was converted, or the folder's own name, not that of a link
    name = config.get("source") or f"{folder.resolve().name} {config.get('_name_or_path', '')}"
    has_template = prompts.chat_template(folder) is not None
    return settle(cfg, folder, own.get("max_new_tokens"), name.lower(), has_template)


def settle(cfg, folder, own_max_new, name, has_template):
    """The settings with their defaults and line breaks. ValueError for some that contradict.

    own_max_new is what the model's generation_config.json says, name that of the model. A base
    model's tokenizer has a chat template, too: so the name decides for --chat=auto.
    """
    if cfg.prompt and cfg.file:
        raise ValueError("give --prompt or --file, not both")
    if cfg.check and not cfg.prompt and not cfg.file:
        raise ValueError("--check needs --prompt or --file")
    if cfg.suffix and not cfg.prompt:
        raise ValueError("--suffix follows --prompt; each line of a --file has its own")
    if cfg.n > 1 and not (cfg.temperature or cfg.alg_temp or cfg.alg == "origin"):
        raise ValueError(
            f"--temperature=0 generates the same text {cfg.n} times; raise it, or leave --n at 1"
        )
    if cfg.json and cfg.show_steps and cfg.valid:
        raise ValueError("--show_steps records the sampler's steps, not what --valid changes")
    if cfg.valid and cfg.chat == "on":
        raise ValueError("--valid=python is for a Dream that writes code, without a chat template")
    if cfg.chat == "on" and not has_template:
        raise ValueError(f"--chat=on: {folder} holds no chat template (tokenizer_config.json)")

    chat = cfg.chat
    chats = re.search(
        "instruct|chat|cpgrpo|thinking|llada-1.5|fast_dllm_v2|diffusion-(3|8|14)b(?!-base)", name
    )
    if chat == "auto" and not (chats and has_template and not cfg.valid and not cfg.check):
        chat = "off"
    if (cfg.system and chat == "off") or (cfg.bos and chat != "off"):
        raise ValueError(
            "--system goes before a conversation, say --chat=on; --bos before plain text, --chat=off"
        )

    max_new = cfg.max_new
    if max_new is None:
        max_new = 256
        if isinstance(own_max_new, int) and own_max_new > 0:
            max_new = min(own_max_new, max_new)
    cfg = dataclasses.replace(
        cfg, ckpt=str(folder), max_new=max_new, stop=tuple(filter(None, cfg.stop)), chat=chat
    )
    if cfg.raw:
        return cfg
    return dataclasses.replace(  # a shell passes \n as two characters
        cfg,
        prompt=cfg.prompt.replace("\\n", "\n"),
        suffix=cfg.suffix.replace("\\n", "\n"),
        stop=tuple(text.replace("\\n", "\n") for text in cfg.stop),
        system=cfg.system.replace("\\n", "\n"),
    )


def show(cfg, row, text, number=0):
    """Print a completion: its JSON line, or its text, under a number where there are several."""
    if cfg.json:
        text = json.dumps(row)
    elif number:
        text = f"---- {number}\n{text}"
    print(text, flush=True)


def ends_of(dream, tokenizer):
    """The ids that end a text: the model's own, and tokens that end a turn of a conversation."""
    ids = [*dream.eos_ids, dream.pad_id]
    ids += map(tokenizer.token_to_id, ("<|endoftext|>", *prompts.TURN_ENDS, "<|dlm_pad|>"))
    return tuple(i for i in dict.fromkeys(ids) if i not in (None, dream.expand_id))


def begin_of(dream, tokenizer):
    """The id that begins a text of --bos, in a list."""
    begin = tokenizer.token_to_id("<|beginoftext|>")
    if begin is None:
        begin = dream.bos_id
        if begin == dream.eos_id:
            raise ValueError("--bos: the model has no token that begins texts")
    return [begin]


class Dream:
    """A loaded model. Requests become canvases of masks, which a sampler fills."""

    def __init__(self, cfg):
        folder = runs.as_path(cfg.ckpt)
        self.cfg = cfg
        # Flags that do not go together are refused before the weights are read.
        rule = sample_dream.Sampling(
            cfg.alg,
            steps=cfg.steps,
            block_length=cfg.block_length,
            alg_temp=cfg.alg_temp,
            threshold=cfg.threshold,
            entropy_bound=cfg.entropy_bound,
            cache=cfg.cache,
            temperature=cfg.temperature,
            top_p=cfg.top_p,
            history=cfg.show_steps,
        )
        bits = checkpoints.bits_of(cfg)
        self.model, _, self.mesh = checkpoints.load_for_inference(
            model_dream,
            folder,
            dtype=cfg.dtype,
            bits=bits,
            devices=cfg.devices,
            rows=cfg.batch_size,
            compile_cache=cfg.compile_cache,
        )
        dream = self.model.cfg
        self.tokenizer = sample_dream.load_tokenizer(folder, dream)
        self.read = infill.Reader(self.model, self.tokenizer)
        self.hole = dream.hole_masks or prompts.MASKS

        ends = ends_of(dream, self.tokenizer)
        vocab = self.tokenizer.get_vocab_size()
        self.rule = dataclasses.replace(rule, vocab=vocab, eos_ids=ends)
        self.sampler = sample_dream
        # texts of a batch: where no step is shown, the sampler puts those of one length together
        self.together = cfg.batch_size
        if not cfg.show_steps and not dream.block_length:
            self.together *= 8
        if dream.block_length:
            if cfg.valid:
                raise ValueError("--valid=python is for a Dream without blocks")
            length = cfg.block_length or dream.block_length
            if length != dream.block_length:
                print(
                    f"--block_length={length}: trained with {dream.block_length}", file=sys.stderr
                )
            self.sampler = sample_block
            self.rule = sample_block.settings_of(
                dataclasses.replace(self.rule, block_length=length)
            )

        self.key = jax.random.key(cfg.seed)
        self.compile_s = 0.0
        jax.monitoring.register_event_duration_secs_listener(self.on_event)
        self.wrap = prompts.chat_template(folder)
        self.turns = []  # (prompt, answer) of the conversation so far
        self.texts = prompts.Texts(
            self.tokenizer,
            dream.mask_id,
            ends,
            dream.positions,
            begin_of(dream, self.tokenizer) if cfg.bos else [],
            ask=self.ask if cfg.chat != "off" else None,
        )

        how = "chat template"
        if cfg.chat == "off":
            how = "plain completion"
            if self.wrap:
                how += "; --chat=on asks it as an assistant"
        stored = str(self.model.compute.dtype)
        if bits:
            stored = f"int{bits} and {stored}"
        print(f"{folder}, {stored}, {how}", file=sys.stderr)

    def ask(self, prompt):
        """Token ids of a prompt in the conversation, without the oldest turns if it is too long."""
        most = self.model.cfg.positions - self.cfg.max_new
        for first in range(len(self.turns) + 1):
            turns = self.turns[first:]
            ids = prompts.encode_chat(
                self.tokenizer, self.wrap, prompt, self.cfg.system or None, turns
            )
            if len(ids) <= most:
                break
        if first and len(ids) <= most:  # nothing is forgotten for what is too long by itself
            print("the oldest turns of the conversation do not fit any more", file=sys.stderr)
            self.turns = turns
        return ids

    def complete(self, requests):
        """Fill a canvas for each request, cfg.n times, and print: [(row of --json, text)].

        The next call goes on with the conversation. Of a Dream of blocks a single text streams.
        """
        cfg = self.cfg
        canvases = []
        for prompt, suffix in requests:
            blank = self.texts.canvas(prompt, suffix, cfg.max_new, not cfg.raw, self.hole)
            if (cfg.chat == "on" or cfg.system) and blank.around != ("", ""):
                raise ValueError(
                    "--chat=on and --system are for prompts: a suffix or a hole is plain text"
                )
            canvases += [blank] * cfg.n
        batches = [canvases[i : i + self.together] for i in range(0, len(canvases), self.together)]
        # Each canvas width is a program to compile: all batches share at most three. The sampler
        # puts texts of about one length together.
        lengths = []
        for batch in batches:
            lengths += sorted(len(blank.ids) for blank in batch)
        rows = min(cfg.batch_size, len(canvases))
        widths = sample_dream.widths(lengths, rows, self.model.cfg.positions)

        self.streams = len(canvases) == 1 and not (cfg.json or cfg.check or cfg.show_steps)
        self.printed = ""
        total = collections.Counter()
        completions = []
        for batch in batches:
            filled, stats = self.fill(batch, {"rows": rows, "widths": widths})
            for name in ("forwards", "seconds", "compile_s"):
                total[name] += stats[name]
            # each batch is printed as soon as it is filled; --check waits for all of a prompt
            for i, (blank, ids) in enumerate(zip(batch, filled, strict=True)):
                row, text = self.row_of(i, blank, ids, stats)
                total["tokens"] += row["tokens"]
                completions.append((row, text))
                number = len(completions) if len(canvases) > 1 else 0
                if not cfg.check:
                    show(cfg, row, text[len(self.printed) :], number)

        compiling = ""
        if total["compile_s"]:
            compiling = f"; compiling took {total['compile_s']:.1f} s more"
        print(
            f"{total['tokens']} tokens in {total['seconds']:.2f} s, "
            f"{total['tokens'] / total['seconds']:.1f} tokens/s, "
            f"{total['forwards']} forward passes{compiling}",
            file=sys.stderr,
        )
        self.turns.append((requests[-1][0], row.get("completion", text)))
        return completions

    def row_of(self, i, blank, ids, stats):
        """(row of --json, text) of text i of a batch."""
        completion, text = self.texts.text_of(blank, ids, self.cut)
        kept = [p for p in self.texts.kept(blank, ids) if p >= blank.start]
        passes = int(stats["passes"][i])
        row = {"prompt": blank.prompt, "suffix": blank.suffix, "text": text}
        if blank.around:
            row["completion"] = completion
        row["tokens"] = sum(blank.ids[p] == self.texts.mask for p in kept)
        row["forwards"] = passes
        row["seconds"] = stats["seconds"] * passes / max(1, stats["forwards"])
        row["seed"] = self.cfg.seed
        if self.cfg.show_steps:
            # a text lies on the right of the sampler's arrays, with blocks on the left
            first = 0 if self.model.cfg.block_length else -len(ids)
            pieces = prompts.pieces(self.tokenizer, [ids[p] for p in kept])
            row["steps"] = []
            for p, piece in zip(kept, pieces, strict=True):
                step = int(stats["when"][i, first + p])
                probability = float(stats["probability"][i, first + p])
                row["steps"].append((piece, step, probability))
        return row, text

    def cut(self, completion):
        return prompts.truncate(completion, self.cfg.stop)

    def fill(self, canvases, shape):
        """(rows of ids, statistics with "seconds" and "compile_s").

        shape holds the sampler's rows and widths.
        """
        ids = [blank.ids for blank in canvases]
        if self.cfg.show_steps:  # fewer rows would be another program
            ids += [[]] * (shape["rows"] - len(ids))
        self.key, key = jax.random.split(self.key)
        self.compile_s = 0.0
        started = time.perf_counter()
        with checkpoints.mesh_context(self.mesh):
            # step by step or block by block where somebody watches, else in one compiled loop
            if self.cfg.show_steps and not self.cfg.json:
                self.shown = ""
                for step in self.sampler.steps(self.model, ids, 0, self.rule, key, shape["widths"]):
                    self.show_step(canvases[0], step)
                filled = step.rows
                stats = step.stats
            elif self.streams and self.model.cfg.block_length:
                for step in sample_block.steps(
                    self.model, ids, 0, self.rule, key, by_block=True, **shape
                ):
                    self.stream(canvases[0], step.rows[0])
                filled = step.rows
                stats = step.stats
            else:
                filled, stats = self.sampler.generate(self.model, ids, 0, self.rule, key, **shape)
            filled = filled[: len(canvases)]
            if self.cfg.valid:
                filled = self.mended(canvases, filled, stats)
        stats["compile_s"] = self.compile_s
        stats["seconds"] = time.perf_counter() - started - self.compile_s
        return filled, stats

    def mended(self, canvases, filled, stats):
        """The filled canvases as valid Python; the passes that it takes are added to stats."""
        mended = []
        for i, (blank, ids) in enumerate(zip(canvases, filled, strict=True)):
            before = self.read.passes
            ids, is_python = infill.mend(self.read, blank.ids, ids, self.texts.ends, show_mended)
            show_mended(0, 0)
            stats["passes"][i] += self.read.passes - before
            stats["forwards"] += self.read.passes - before
            if not is_python:
                print("--valid=python: found no valid Python for what was given", file=sys.stderr)
            mended.append(ids)
        return mended

    def on_event(self, name, seconds, **_):
        """Called by JAX after each of its stages."""
        if name.startswith("/jax/core/compile/"):
            self.compile_s += seconds

    def stream(self, blank, ids):
        """Print what a block has added to a text, up to its first MASK."""
        ids = [*itertools.takewhile(lambda token: token != self.texts.mask, ids)]
        begun = dataclasses.replace(blank, ids=blank.ids[: len(ids)])
        _, text = self.texts.text_of(
            begun, ids, lambda text: prompts.printable(text, self.cfg.stop)
        )
        text = prompts.printable(text, ())  # a text with [MASK:n] has no stop strings
        print(text[len(self.printed) :], end="", flush=True)
        self.printed = text

    def show_step(self, blank, step):
        """Print the first canvas of a batch if a step has changed it: in a terminal in place, for
        50 ms at least, else as a line.
        """
        mask = self.texts.mask
        ids = step.rows[0]
        in_place = sys.stdout.isatty()
        text = ""
        stream = DecodeStream(skip_special_tokens=True)
        for p in self.texts.kept(blank, ids):
            if p < blank.start:
                continue
            if ids[p] == mask:
                stream = DecodeStream(skip_special_tokens=True)
                text += "\u2591"
                continue
            piece = stream.step(self.tokenizer, ids[p]) or ""
            if piece and in_place and blank.ids[p] == mask:
                shade = SHADES[min(int(10 * step.probability[0][p]), 9)]
                piece = f"\x1b[38;5;{shade}m{piece}\x1b[39m"
            text += piece
        if text == self.shown:
            return
        self.shown = text
        left = ids.count(mask)
        head = f"step {step.number} of at most {step.number + left}, {left} left"
        frame = f"{head}: {text}".replace("\n", "\u21b5")
        if in_place:
            frame = f"\x1b[H\x1b[J\x1b[2m{head}\x1b[22m\n{text}"
            time.sleep(0.05)
        print(frame, flush=True)


def show_mended(done, total):
    """Print in a terminal how many generated tokens are valid so far; 0 of 0 clears the line."""
    if sys.stderr.isatty():
        line = f"--valid=python: {done} of {total} tokens" if done < total else ""
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


# of a terminal, red to green: one for each tenth of probability
SHADES = 196, 202, 208, 214, 220, 190, 154, 118, 82, 46

if __name__ == "__main__":
    runs.command(main, Config, __doc__, moved=MOVED)
