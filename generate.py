"""Generate code with PythonCoder: prompts in, text out. Asks a model.

    # go on with a text; without a prompt it asks for one
    python generate.py --prompt='def f(n):\\n    \"\"\"Double n.\"\"\"'
    # fill in the middle
    python generate.py --prompt="def area(r):\\n    " --suffix="\\n    return a"
    # of 20 completions the first that passes the prompt's examples
    python generate.py --file=prompts.jsonl --n=20 --check --json > done.jsonl

Reads the folder of a run of train_tpu.py, or one of convert_weights.py; where there is none, the
small model in weights/. It decodes with a static KV cache in one compiled loop. The MTP head drafts
every second token: the text is the same as without.

It does not run a Dream: that is generate_dream.py. extra/serve.py answers over HTTP.
"""

import dataclasses
import itertools
import json
import sys
import time
import typing

import runs
from runs import Count, Natural, NonNegative, TopP

MOVED = {
    "model": "a Dream takes python generate_dream.py",
    "html": "python generate_dream.py --json --show_steps, and python extra/steps.py",
    "like": "python extra/demos.py",
    "repair": "python extra/repair.py",
    "draft": "python extra/draft.py",
}
MOVED |= dict.fromkeys(
    "threshold steps block_length cache chat valid int8 int4 schedule regrow".split(),
    "it is a Dream's, python generate_dream.py",
)


@dataclasses.dataclass(frozen=True)
class Config:
    # folder of a model; "" is out/train_tpu, or weights/pythoncoder where that holds none
    ckpt: str = ""
    # text to continue, \n for a new line (not needed after def f(): or """); "" asks for one
    prompt: str = ""
    # JSON lines with "prompt" and perhaps "suffix", generated as a batch; - reads standard input
    file: str = ""
    n: Count = 1  # completions of each prompt
    # tokens at most; unset: 128, or fewer by the model's generation_config.json
    max_new: Count | None = None
    temperature: NonNegative = 0.6  # 0 takes the argmax
    # ---- the prompt
    suffix: str = ""  # text that follows: fill in the middle, by a model trained with --fim_rate
    stop: tuple[str, ...] = ()  # strings that end a completion and are cut off, \n for a new line
    raw: bool = False  # take --prompt, --suffix, --stop as they are: no \n, no line break appended
    # run the prompt's >>> examples in sandbox.py on its completions; print the first that passes
    check: bool = False
    # ---- sampling
    top_k: Natural = 0  # draw from the k likeliest tokens; 0 draws from all
    top_p: TopP = 0.95  # draw from the smallest set of this probability
    no_repeat_ngram: Natural = 6  # no n-gram of this length occurs twice; 0: off
    speculate: bool = True  # draft every second token with the MTP head
    seed: Natural = 0  # of every random draw
    # ---- output and machine
    show_steps: bool = False  # in a terminal: drafts in green or red, then tokens by probability
    json: bool = False  # print one JSON line per completion instead of text
    step: Natural = 0  # which checkpoint of a run; 0 takes the newest
    # of weights; "" is float32 on a CPU if it fits, else 16 bits
    dtype: typing.Literal["", "bfloat16", "float32"] = ""
    devices: Natural = 0  # number of the machine's devices to use; 0 takes all
    compile_cache: str = "~/.cache/unmask"  # folder of compiled programs, for later runs; "": none


if __name__ == "__main__":  # --help and a wrong flag are answered before JAX is imported
    runs.command(lambda cfg: None, Config, __doc__, moved=MOVED)

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import checkpoints
import model_pythoncoder
import prompts


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

    with runs.enough_memory("a smaller --n or --max_new, or fewer lines in --file"):
        coder = PythonCoder(cfg, len(requests) * cfg.n)
        if cfg.prompt or cfg.file:
            completions = coder.complete(requests)
        else:
            prompts.interact(coder.complete, "\n", cfg.raw)

    if cfg.check:
        for row, text in prompts.checked(completions, cfg.n, tests):
            show(cfg, row, text)


def prepare(cfg):
    """The settings as they count. Reads what the model's folder says."""
    folder = cfg.ckpt or "out/train_tpu"
    if not cfg.ckpt and not cfg.step:
        folder = checkpoints.default_folder(folder, "pythoncoder")
    prompts.check_family(folder, "a PythonCoder")
    own = runs.read_about(folder, "generation_config.json")
    return settle(cfg, folder, own.get("max_new_tokens"))


def settle(cfg, folder, own_max_new):
    """The settings with their defaults and line breaks. ValueError for some that contradict.

    own_max_new is what the model's generation_config.json says.
    """
    if cfg.prompt and cfg.file:
        raise ValueError("give --prompt or --file, not both")
    if cfg.check and not cfg.prompt and not cfg.file:
        raise ValueError("--check needs --prompt or --file")
    if cfg.suffix and not cfg.prompt:
        raise ValueError("--suffix follows --prompt; each line of a --file has its own")
    if cfg.json and cfg.show_steps:
        raise ValueError("--show_steps writes between the lines of --json; give one of them")
    if cfg.n > 1 and not cfg.temperature:
        raise ValueError(
            f"--temperature=0 generates the same text {cfg.n} times; raise it, or leave --n at 1"
        )

    max_new = cfg.max_new
    if max_new is None:
        max_new = 128
        if isinstance(own_max_new, int) and own_max_new > 0:
            max_new = min(own_max_new, max_new)
    cfg = dataclasses.replace(cfg, ckpt=folder, max_new=max_new, stop=tuple(filter(None, cfg.stop)))
    if cfg.raw:
        return cfg
    return dataclasses.replace(  # a shell passes \n as two characters
        cfg,
        prompt=cfg.prompt.replace("\\n", "\n"),
        suffix=cfg.suffix.replace("\\n", "\n"),
        stop=tuple(text.replace("\\n", "\n") for text in cfg.stop),
    )


def show(cfg, row, text, number=0):
    """Print a completion: its JSON line, or its text, under a number where there are several."""
    if cfg.json:
        text = json.dumps(row)
    elif number:
        text = f"---- {number}\n{text}"
    print(text, flush=True)


class PythonCoder:
    """A loaded model that completes requests, `rows` at a time, and prints what it generates."""

    def __init__(self, cfg, rows):
        self.cfg = cfg
        self.key = jax.random.key(cfg.seed)
        self.model, step, self.mesh = checkpoints.load_for_inference(
            model_pythoncoder,
            cfg.ckpt,
            cfg.step,
            dtype=cfg.dtype,
            devices=cfg.devices,
            rows=rows,
            compile_cache=cfg.compile_cache,
        )
        self.tokenizer = runs.read_tokenizer(cfg.ckpt, self.model.cfg.vocab)
        self.rule = model_pythoncoder.Sampling(
            cfg.temperature,
            cfg.top_k,
            cfg.top_p,
            vocab=self.tokenizer.get_vocab_size(),  # the head has more rows: never drawn
            eos_ids=runs.ends_of_text(cfg.ckpt, self.tokenizer),
            no_repeat_ngram=cfg.no_repeat_ngram,
            speculate=cfg.speculate and self.model.cfg.mtp,
        )
        print(f"{cfg.ckpt} step {step}, {self.model.compute.dtype}", file=sys.stderr)

    def complete(self, requests):
        """Continue requests, cfg.n times each, as one batch: [(row of --json, text)].

        A single text streams.
        """
        cfg = self.cfg
        requests = [request for request in requests for _ in range(cfg.n)]
        prompt_ids = [prompts.encode(self.tokenizer, *request) for request in requests]
        self.lengths = []  # tokens of the first text after each forward pass
        self.printed = ""  # of a completion that streams
        self.streams = len(requests) == 1 and not (cfg.json or cfg.check)
        if self.streams:
            print(requests[0][0], end="", flush=True)

        self.key, key = jax.random.split(self.key)
        started = time.perf_counter()
        with checkpoints.mesh_context(self.mesh):
            new_ids, stats = model_pythoncoder.generate(
                self.model,
                prompt_ids,
                cfg.max_new,
                self.rule,
                key,
                on_tokens=self.on_tokens,
                chunk=1 if cfg.show_steps else 16,
            )
        seconds = time.perf_counter() - started

        completions = []
        for (prompt, suffix), ids in zip(requests, new_ids, strict=True):
            completion = prompts.truncate(self.tokenizer.decode(ids), cfg.stop)
            text = prompt + completion + suffix
            row = {
                "prompt": prompt,
                "suffix": suffix,
                "completion": completion,
                "tokens": len(ids),
                "seed": cfg.seed,
            }
            completions.append((row, text))
            if self.streams:
                self.stream(completion + suffix + "\n", ids)  # what is missing at its end
            elif not cfg.check:
                show(cfg, row, text, len(completions))
        if cfg.show_steps and sys.stdout.isatty():
            self.show_probabilities(prompt_ids, new_ids)
        print(
            f"{stats['tokens']} tokens in {seconds:.2f} s, compiling included; "
            f"{stats['tokens'] / stats['forwards']:.2f} tokens per forward pass, "
            f"{stats['accepted']} drafts accepted",
            file=sys.stderr,
        )
        return completions

    def on_tokens(self, new_ids):
        """Called with the new ids of all texts so far; True if each holds a stop string."""
        self.lengths.append(len(new_ids[0]))
        stops = self.cfg.stop
        texts = [self.tokenizer.decode(ids) for ids in new_ids]
        if self.streams:
            self.stream(prompts.printable(texts[0], stops), new_ids[0])
        return bool(stops) and all(prompts.truncate(text, stops) != text for text in texts)

    def stream(self, completion, ids):
        """Print what was added to the completion, whose tokens are `ids`."""
        if self.cfg.show_steps and sys.stdout.isatty():
            colours = draft_colours(self.lengths, ids, self.rule, self.cfg.max_new)
            end = 0
            for piece, colour in zip(prompts.pieces(self.tokenizer, ids), colours, strict=True):
                begin = max(end, len(self.printed))
                end = min(end + len(piece), len(completion))
                print(coloured(completion[begin:end], colour), end="")
            self.printed = completion[:end]
        print(completion[len(self.printed) :], end="", flush=True)
        self.printed = completion

    def show_probabilities(self, prompt_ids, new_ids):
        """Print the new tokens in the colours of their probabilities, before any filter."""

        @jax.jit
        def of_next(model, token_BL):
            logits_BLV = model.logits(model.hidden(model.lookup(token_BL))[:, :-1])
            logp_BLV = jax.nn.log_softmax(logits_BLV)
            return jnp.exp(jnp.take_along_axis(logp_BLV, token_BL[:, 1:, None], -1)[..., 0])

        rows = [prompt + new for prompt, new in zip(prompt_ids, new_ids, strict=True)]
        token_BL = np.array([*itertools.zip_longest(*rows, fillvalue=0)], np.int32).T
        # with the rotary table that generate() chose
        longest = max(map(len, prompt_ids)) + self.cfg.max_new
        compute = dataclasses.replace(self.model.compute, yarn=longest > self.model.cfg.positions)
        graph = model_pythoncoder.graph_of(self.model.cfg, compute)
        with checkpoints.mesh_context(self.mesh):
            prob_BL = np.asarray(of_next(nnx.merge(graph, nnx.state(self.model)), token_BL))
        for i, new in enumerate(new_ids):
            first = len(prompt_ids[i]) - 1
            left = len(prompts.truncate(self.tokenizer.decode(new), self.cfg.stop))
            print("---- by probability")
            for j, piece in enumerate(prompts.pieces(self.tokenizer, new)):
                shade = SHADES[min(int(10 * prob_BL[i, first + j]), 9)]
                print(coloured(piece[:left], shade), end="")
                left = max(0, left - len(piece))
            print()


# of a terminal, red to green: one for each tenth of probability
SHADES = 196, 202, 208, 214, 220, 190, 154, 118, 82, 46
RED = SHADES[0]  # of a token whose draft was rejected
GREEN = SHADES[-1]  # of an accepted draft


def coloured(text, colour):
    if not text or not colour:
        return text
    return f"\x1b[38;5;{colour}m{text}\x1b[39m"


def draft_colours(lengths, ids, rule, max_new):
    """The colour of each token of a text that had these lengths after each forward pass.

    A pass that adds two tokens had the first of them as a draft. One that adds a single token
    rejected its draft, but for the first pass and where there was no room for two.
    """
    colours = []
    end = 0
    for number, length in enumerate(lengths):
        new = length - end
        end = length
        if new == 2:
            colours += [GREEN, None]
        elif new == 1:
            no_room = end >= max_new or ids[end - 1] in rule.eos_ids
            drafted = rule.speculate and number and not no_room
            colours.append(RED if drafted else None)
    return colours


if __name__ == "__main__":
    runs.command(main, Config, __doc__, moved=MOVED)
