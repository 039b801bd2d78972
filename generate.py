"""Generate code with a trained model: prompts in, text out.

    python generate.py --prompt='def f(n):\\n    \"\"\"Double n.\"\"\"'    # by out/train_tpu, or weights/pythoncoder
    python generate.py                                 # reads prompts from the terminal
    python generate.py --prompt="def area(r):\\n    " --suffix="\\n    return a"    # fill in the middle
    python generate.py --file=prompts.jsonl --n=20 --check --json > done.jsonl    # the first that passes its examples
    python generate.py --prompt="def area(r):\\n" --show_steps --html=steps.html    # accepted drafts, probabilities
    python generate.py --model=dream --ckpt=out/diffucoder --chat=on --prompt="Sort a list in Python." --show_steps
    python generate.py --model=dream --prompt="def area(r):\\n    [MASK]\\n    return a" --valid=python
    python generate.py --model=dream --repair=4 --file=prompts.jsonl    # masks what fails its examples, refills it
    python generate.py --like=llada --ckpt=out/llada --prompt="Sort a list in Python."    # as LLaDA's own demo does
    python generate.py --model=dream --ckpt=out/diffucoder --int8 --block_length=32 --cache=dual --threshold=0.9

Reads the folder of a run, or one of convert_weights.py; where there is none, the small model in
weights/. PythonCoder decodes with a static KV cache in one compiled loop, and its MTP head drafts
every second token: the text is the same as without. Dream fills a canvas of masks; [MASK:n] in a
prompt is n tokens to fill, and nothing is appended; [MASK] is a hole of unknown length, and
--valid=python keeps the text valid Python, see infill.py.
"""

import argparse
import collections
import dataclasses
import functools
import itertools
import json
import re
import sys
import time
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import prompts
import runs
from runs import Count, Natural, NonNegative, Share, TopP

# the flags of --like; bench/results/families.md has the source of each, and where ours differs
LIKE = {
    "dream": "--max_new=512 --temperature=0.2 --top_p=0.95 --top_k=50",
    "dreamon": "--max_new=64 --temperature=0.2 --top_p=0.9 --top_k=50 --bos --hole=4 --regrow=128",
    "llada": "--max_new=128 --temperature=0 --top_p=1 --alg=maskgit_plus --schedule=even --block_length=32",
    "sdar": "--max_new=2048 --temperature=1 --top_p=1 --schedule=even --threshold=0.85",
    "nemotron": "--max_new=512 --temperature=0 --top_p=1 --threshold=0.9",
    "stable_diffcoder": "--max_new=512 --temperature=0 --top_p=1 --schedule=even",
    "fast_dllm": "--max_new=256 --temperature=0 --top_p=1 --block_length=32 --cache=dual --threshold=0.9 --fast_dllm",
    "fast_dllm_v2": "--max_new=2048 --temperature=0 --top_p=1 --sub_block=8 --threshold=0.9",
    "open_dcoder": "--max_new=128 --temperature=0.5 --top_p=1 --top_k=200 --alg=p2",
}


@dataclasses.dataclass(frozen=True)
class PythonCoderFlags:
    """Flags of PythonCoder, --model=pythoncoder."""

    speculate: bool = True  # draft every second token with the MTP head
    # no n-gram of this length occurs twice, a fault of small models; 0: off
    no_repeat_ngram: Natural = 6


@dataclasses.dataclass(frozen=True)
class DreamFlags:
    """Flags of Dream, --model=dream."""

    # the flags of this model's own demo; a flag given beside it wins
    like: typing.Literal[("", *LIKE)] = ""
    # denoising steps, for a Dream of blocks those of a block; 0: one for each token
    steps: Natural = 0
    # fill blocks of this length from left to right; 0 takes the whole canvas
    block_length: Natural = 0
    # fill a block in sub-blocks of this length, left to right: Fast-dLLM v2's small_block_size
    sub_block: Natural = 0
    # order of positions
    alg: typing.Literal["entropy", "maskgit_plus", "topk_margin", "origin", "p2"] = "entropy"
    # tokens of each step: Dream's | equally many, as LLaDA's
    schedule: typing.Literal["dream", "even"] = "dream"
    # temperature of the choice of positions; 0 fills those of highest confidence
    alg_temp: NonNegative = 0.0
    # fill every token of at least this probability in a step; 0 goes by --steps
    threshold: Share = 0.0
    # fill by lowest entropy, while those before sum to at most this (nats); 0: off
    entropy_bound: NonNegative = 0.0
    # causal context: tokens drafted at a time and verified in one pass; the text stays the same
    draft: Natural = 0
    # passes that make drafts; 0: the verifying pass does, faster for one text
    draft_steps: typing.Literal[1, 0] = 1
    # with blocks: keep keys and values while a block is filled
    cache: typing.Literal["", "prefix", "dual"] = ""
    fast_dllm: bool = False  # blocks with a cache exactly as Fast-dLLM fills them
    # classifier-free guidance by the prompt, LLaDA's cfg_scale; twice the time
    guidance: NonNegative = 0.0
    # makes an early end of the text less likely; Dream-Coder's demos use 3
    eos_penalty: NonNegative = 0.0
    # LLaDA: EOS is unmasked last | is never drawn
    late_eos: typing.Literal["", "confidence", "logits", "both"] = ""
    batch_size: Count = 8  # texts that are filled together
    # [MASK:n] in a prompt is n tokens to fill, [MASK] a hole; --no-infill: both are text
    infill: bool = True
    # masks that [MASK] starts with, up to EOS; 0: by the model's config, else the likeliest length
    hole: Natural = 0
    # rounds of repair of a text that fails its >>> examples, see repair.py; implies --check
    repair: Natural = 0
    # expansion budget of DreamOn's own loop; unset: our loop, no budget
    regrow: Natural | None = None
    # chat template; auto: by model name, off with --check, --valid
    chat: typing.Literal["auto", "on", "off"] = "auto"
    system: str = ""  # system turn of the chat template, \n for a new line
    # begin plain text with <|beginoftext|>, as Dream-Base's evaluation; DreamOn: end it with EOS
    bos: bool = False
    # constrain the text to a valid prefix of a Python program
    valid: typing.Literal["", "python"] = ""
    int8: bool = False  # matrices in 8 bits, half the memory of bfloat16
    int4: bool = False  # matrices of the layers in 4 bits, a third of the memory of bfloat16


@dataclasses.dataclass(frozen=True)
class Config:
    # family; MDLM: python inference_jetson.py
    model: typing.Literal["pythoncoder", "dream"] = "pythoncoder"
    # folder; "" is out/train_tpu, or out/train_dream for Dream; where that holds no model, weights/
    ckpt: str = ""
    step: Natural = 0  # which checkpoint of a run; 0 takes the newest
    # text to continue, \n for a new line (not needed after def f(): or """); "" asks for one
    prompt: str = ""
    # text that follows: the model fills the middle (PythonCoder must be trained with --fim_rate)
    suffix: str = ""
    # JSON lines with "prompt" and perhaps "suffix", generated as a batch; - reads standard input
    file: str = ""
    n: Count = 1  # completions of each prompt
    # run the prompt's >>> examples in sandbox.py on its completions; print the first that passes
    check: bool = False
    # tokens at most; default 128, 256 for Dream, or fewer by its generation_config.json
    max_new: Count | None = None
    temperature: NonNegative | None = None  # 0 takes the argmax; default 0.6, 0.2 for Dream
    top_k: Natural = 0  # draw from the k likeliest tokens; 0 draws from all
    top_p: TopP | None = None  # draw from the smallest set of this probability; default 0.95
    stop: tuple[str, ...] = ()  # strings that end a completion and are cut off, \n for a new line
    # take prompts, --suffix, --stop, --system as they are: no \n escapes, no line break appended
    raw: bool = False
    # show each step; in a terminal red to green by probability, or by PythonCoder's drafts
    show_steps: bool = False
    # write a page with the step and the probability of each token; .svg: an animation of the steps
    html: str = ""
    # of weights; "" is float32 on a CPU if it fits, else 16 bits
    dtype: typing.Literal["", "bfloat16", "float32"] = ""
    devices: Natural = 0  # number of the machine's devices to use; 0 takes all
    # folder of compiled programs, for later runs; "" keeps none
    compile_cache: str = "~/.cache/unmask"
    json: bool = False  # print one JSON line per completion instead of text
    seed: Natural = 0  # of every random draw
    pythoncoder: PythonCoderFlags = PythonCoderFlags()
    dream: DreamFlags = DreamFlags()


DEFAULTS = {  # what "" and None stand for
    "pythoncoder": {"ckpt": "out/train_tpu", "max_new": 128, "temperature": 0.6, "top_p": 0.95},
    "dream": {"ckpt": "out/train_dream", "max_new": 256, "temperature": 0.2, "top_p": 0.95},
}


def main(cfg):
    cfg = resolve(cfg)
    requests = [(cfg.prompt, cfg.suffix)]
    if cfg.file:
        data = sys.stdin.buffer.read() if cfg.file == "-" else runs.as_path(cfg.file).read_bytes()
        requests = prompts.read_requests(data, cfg.file)
    whole = str if cfg.raw else prompts.on_new_line
    requests = [(whole(prompt), suffix) for prompt, suffix in requests]
    if cfg.check:
        tests = [prompts.examples(prompt) for prompt, _ in requests]  # before a model is read
        prompts.verdicts("", [("", "", "assert True")])  # a sandbox that does not work says so
    family, advice = PythonCoder, "a smaller --n or --max_new, or fewer lines in --file"
    if cfg.model == "dream":
        family, advice = Dream, "--int8, --int4, a smaller --batch_size or --max_new"
    try:
        model = family(cfg, len(requests))
        if cfg.prompt or cfg.file:
            completions = model.complete(requests)
        else:
            prompts.interact(model.complete, "\n" if cfg.model == "pythoncoder" else "", whole)
    except Exception as error:  # JAX raises its own when memory runs out, and Orbax wraps them
        if not isinstance(error, MemoryError) and not re.search(
            "RESOURCE_EXHAUSTED|out of memory", str(error)
        ):
            raise
        raise ValueError(f"out of memory; try {advice}") from None
    if cfg.check:
        for row, text in prompts.checked(completions, cfg.n, tests):
            show(cfg, row, text)


def with_preset(arguments):
    """A command line with the flags of its --like before those that are given: of two the last one
    counts.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--like", nargs="?")
    name = parser.parse_known_args(arguments)[0].like
    if name not in LIKE:
        return arguments
    print(f"--like={name}: {LIKE[name]}", file=sys.stderr)
    return ["--model=dream", *LIKE[name].split(), *arguments]


def resolve(cfg):
    """The config with the defaults of its family and with line breaks.

    ValueError for settings that would be ignored, or would fail when all is generated.
    """
    other, flags = (
        ("dream", cfg.dream) if cfg.model == "pythoncoder" else ("pythoncoder", cfg.pythoncoder)
    )
    if foreign := [
        name for name, value in vars(flags).items() if value != getattr(type(flags), name)
    ]:
        raise ValueError(f"--{', --'.join(foreign)} is for --model={other}")

    defaults = {
        name: value
        for name, value in DEFAULTS[cfg.model].items()
        if getattr(cfg, name) in ("", None)
    }
    if "ckpt" in defaults and not cfg.step:
        import checkpoints

        defaults["ckpt"] = checkpoints.default_folder(defaults["ckpt"], cfg.model)
    own = runs.as_path(defaults.get("ckpt", cfg.ckpt)) / "generation_config.json"
    count = runs.read_json(own).get("max_new_tokens") if own.is_file() else None
    if "max_new" in defaults and isinstance(count, int) and count > 0:
        defaults["max_new"] = min(defaults["max_new"], count)
    cfg = dataclasses.replace(cfg, check=cfg.check or cfg.dream.repair > 0, **defaults)
    if bool(cfg.prompt) == bool(cfg.file) and (cfg.prompt or cfg.check):
        raise ValueError("give --prompt or --file, not both; --check and --repair need one of them")
    if cfg.suffix and not cfg.prompt:
        raise ValueError("--suffix follows --prompt; each line of a --file has its own")
    if cfg.json and cfg.show_steps:
        raise ValueError("--show_steps writes between the lines of --json; give one of them")
    if cfg.html and (Path(cfg.html).is_dir() or not Path(cfg.html).parent.is_dir()):
        raise ValueError(f"--html={cfg.html} is no file in a folder that exists")
    if cfg.html and (cfg.dream.valid or cfg.dream.repair):
        raise ValueError(
            "--html shows the steps of the sampler, not what --valid or --repair changes after them"
        )
    if cfg.n > 1 and not (cfg.temperature or cfg.dream.alg_temp or cfg.dream.alg == "origin"):
        raise ValueError(
            f"--temperature=0 generates the same text {cfg.n} times; raise it, or leave --n at 1"
        )
    if cfg.raw:
        return dataclasses.replace(cfg, stop=tuple(filter(None, cfg.stop)))
    # a shell passes \n as two characters
    texts = cfg.dream.system, cfg.prompt, cfg.suffix, *cfg.stop
    system, prompt, suffix, *stop = (text.replace("\\n", "\n") for text in texts)
    dream = dataclasses.replace(cfg.dream, system=system)
    return dataclasses.replace(
        cfg, prompt=prompt, suffix=suffix, stop=tuple(filter(None, stop)), dream=dream
    )


def show(cfg, row, text, number=0):
    """Print a completion: its JSON line, or its text, under a number where there are several."""
    print(json.dumps(row) if cfg.json else f"---- {number}\n{text}" if number else text, flush=True)


# ---- PythonCoder: from left to right -------------------------------------------------------------------------------


class PythonCoder:
    def __init__(self, cfg, requests):
        import checkpoints
        import model_pythoncoder

        self.cfg, self.key = cfg, jax.random.key(cfg.seed)
        how = {
            "dtype": cfg.dtype,
            "devices": cfg.devices,
            "rows": requests * cfg.n,
            "compile_cache": cfg.compile_cache,
        }
        self.model, step, mesh = checkpoints.load_for_inference(
            model_pythoncoder, cfg.ckpt, cfg.step, **how
        )
        self.context = functools.partial(checkpoints.mesh_context, mesh)
        self.tokenizer = runs.read_tokenizer(cfg.ckpt, self.model.cfg.vocab)
        flags, eos = cfg.pythoncoder, prompts.end_of_text(runs.as_path(cfg.ckpt), self.tokenizer)
        # the head has more rows: they are never drawn
        ids = {"vocab": self.tokenizer.get_vocab_size(), "eos": eos}
        drafts = {
            "no_repeat_ngram": flags.no_repeat_ngram,
            "speculate": flags.speculate and self.model.cfg.mtp,
        }
        self.rule = model_pythoncoder.Sampling(
            cfg.temperature, cfg.top_k, cfg.top_p, **ids, **drafts
        )
        print(f"{cfg.ckpt} step {step}, {self.model.compute.dtype}", file=sys.stderr)

    def complete(self, requests):
        """Continue all requests, cfg.n times each, as one batch: [(row of --json, text)]. A single
        text streams.
        """
        import model_pythoncoder

        cfg, tokenizer = self.cfg, self.tokenizer
        requests = [request for request in requests for _ in range(cfg.n)]
        prompt_ids = [prompts.encode(tokenizer, *request) for request in requests]
        self.streams, self.printed, completions = (
            len(prompt_ids) == 1 and not (cfg.json or cfg.check),
            "",
            [],
        )
        if self.streams:
            print(requests[0][0], end="", flush=True)

        self.key, key = jax.random.split(self.key)
        # passes: tokens of each text after each forward pass
        self.passes, started = [], time.perf_counter()
        settings, watching = (
            (prompt_ids, cfg.max_new, self.rule, key, self.on_tokens),
            cfg.show_steps or cfg.html,
        )
        with self.context():
            texts, stats = model_pythoncoder.generate(
                self.model, *settings, chunk=1 if watching else 16
            )
        seconds = time.perf_counter() - started

        for number, ((prompt, suffix), ids) in enumerate(zip(requests, texts, strict=True), 1):
            text = prompts.truncate(tokenizer.decode(ids), cfg.stop)
            row = {
                "prompt": prompt,
                "suffix": suffix,
                "completion": text,
                "tokens": len(ids),
                "seed": cfg.seed,
            }
            completions.append((row, prompt + text + suffix))
            if self.streams:
                self.stream(text + suffix + "\n", ids)  # what is missing at its end
            elif not cfg.check:
                show(cfg, row, prompt + text + suffix, number)
        if watching:
            self.show_probabilities(requests, prompt_ids, texts)
        rate = f"{stats['tokens'] / stats['forwards']:.2f} tokens per forward pass, {stats['accepted']} drafts accepted"
        print(
            f"{stats['tokens']} tokens in {seconds:.2f} s, compiling included; {rate}",
            file=sys.stderr,
        )
        return completions

    def on_tokens(self, texts):
        """Called with the token ids of all texts so far; True, which ends the call, if each holds a
        stop string.
        """
        self.passes.append([len(ids) for ids in texts])
        ids, stops = texts[0], self.cfg.stop
        texts = [self.tokenizer.decode(ids) for ids in texts]
        if self.streams:
            self.stream(prompts.printable(texts[0], stops), ids)
        return bool(stops) and all(prompts.truncate(text, stops) != text for text in texts)

    def stream(self, completion, ids):
        """Print what has been added to the completion, the text of `ids`; watched, in the colours
        of the drafts.
        """
        if self.cfg.show_steps and sys.stdout.isatty():
            end, lengths = 0, [passed[0] for passed in self.passes]
            drafts = prompts.drafts_of(lengths, ids, self.rule, self.cfg.max_new)
            for text, (_, draft) in zip(prompts.pieces(self.tokenizer, ids), drafts, strict=True):
                begin, end = end, min(end + len(text), len(completion))
                new, colour = (
                    completion[max(begin, len(self.printed)) : end],
                    prompts.DRAFT_COLOURS[draft],
                )
                print(prompts.coloured(new, colour), end="")
            self.printed = completion[:end]
        print(completion[len(self.printed) :], end="", flush=True)
        self.printed = completion

    def show_probabilities(self, requests, prompt_ids, texts):
        """The texts in the colours of their probabilities in a terminal, and the page of --html."""
        import model_pythoncoder as pc

        @jax.jit
        def of_next(model, token_BL):
            logp_BLV = jax.nn.log_softmax(
                model.logits(model.hidden(model.lookup(token_BL))[:, :-1])
            )
            prob_BL = jnp.exp(jnp.take_along_axis(logp_BLV, token_BL[:, 1:, None], -1)[..., 0])
            return prob_BL, *jax.lax.top_k(logp_BLV, prompts.LIKELIEST)

        # One pass over what is finished gives the probabilities that its tokens had: those before
        # any filter.
        rows = [prompt + new for prompt, new in zip(prompt_ids, texts, strict=True)]
        token_BL = np.array([*itertools.zip_longest(*rows, fillvalue=0)], np.int32).T
        # as generate() decides
        yarn = max(map(len, prompt_ids)) + self.cfg.max_new > self.model.cfg.positions
        graph = pc.graph_of(self.model.cfg, dataclasses.replace(self.model.compute, yarn=yarn))
        with self.context():
            found = of_next(nnx.merge(graph, nnx.state(self.model)), token_BL)

        pages, tokenizer, cut = (
            [],
            self.tokenizer,
            functools.partial(prompts.truncate, stops=self.cfg.stop),
        )
        for i, (prompt, new) in enumerate(zip(prompt_ids, texts, strict=True)):
            prob, logp, ids = (
                np.asarray(x[i, len(prompt) - 1 : len(rows[i]) - 1]).tolist() for x in found
            )
            likely = [
                prompts.others_of(self.tokenizer, *pair) for pair in zip(ids, logp, strict=True)
            ]
            drafts = prompts.drafts_of(
                [passed[i] for passed in self.passes], new, self.rule, self.cfg.max_new
            )
            tokens = prompts.draft_tokens(self.tokenizer, new, drafts, prob, cut, likely)
            if self.cfg.show_steps and sys.stdout.isatty():
                shaded = (prompts.shaded(token.text, token.probability) for token in tokens)
                print("---- by probability\n" + "".join(shaded))
            head, tail = (
                prompts.pieces(tokenizer, prompts.encode(tokenizer, x, "")) for x in requests[i]
            )
            pages.append(
                [
                    *(prompts.Token(t, 0) for t in head),
                    *tokens,
                    *(prompts.Token(t, 0) for t in tail),
                ]
            )
        prompts.write_page(self.cfg.html, pages)


# ---- Dream: a canvas of masks --------------------------------------------------------------------------------------


class Dream:
    """Prompts become canvases of masks, which sample_dream.py or, for a Dream of blocks,
    sample_block.py fills.
    """

    def __init__(self, cfg, _):
        import checkpoints
        import infill
        import model_dream
        import sample_block
        import sample_dream

        # Flags that do not go together are refused before the weights are read.
        flags, folder = cfg.dream, runs.as_path(cfg.ckpt)
        self.cfg, self.watching = cfg, bool(cfg.show_steps or cfg.html)
        own = "steps schedule block_length sub_block alg_temp threshold entropy_bound cache fast_dllm guidance"
        settings = {
            name: getattr(flags, name) for name in [*own.split(), "eos_penalty", "late_eos"]
        }
        settings |= {name: getattr(cfg, name) for name in ("temperature", "top_p", "top_k")}
        settings |= {"history": self.watching, "likeliest": prompts.LIKELIEST if cfg.html else 0}
        rule = sample_dream.Sampling(flags.alg, filtered=flags.fast_dllm, **settings)
        if (flags.valid or flags.repair) and flags.chat == "on":
            raise ValueError(
                "--valid=python and --repair are for a Dream that writes code, without a chat template"
            )
        bits = checkpoints.bits_of(flags)
        how = {
            "dtype": cfg.dtype,
            "devices": cfg.devices,
            "rows": flags.batch_size,
            "compile_cache": cfg.compile_cache,
        }
        self.model, _, self.mesh = checkpoints.load_for_inference(
            model_dream, folder, cfg.step, bits=bits, **how
        )
        self.context = functools.partial(checkpoints.mesh_context, self.mesh)

        dream, tokenizer = self.model.cfg, sample_dream.load_tokenizer(folder, self.model.cfg)
        fitting = [dream.family, *(["dreamon"] if dream.expand_id >= 0 else [])]
        fitting += (
            ["fast_dllm"] if dream.family in ("dream", "llada") and not dream.block_length else []
        )
        if flags.like not in ("", *fitting):
            raise ValueError(
                f"--like={flags.like}: {folder} is a {dream.family}; say --like={' or '.join(fitting)}"
            )
        if flags.regrow is not None and dream.expand_id < 0:
            raise ValueError(
                "--regrow is for a model that expands and deletes masks, such as DreamOn; leave it out"
            )
        # What ends a text: the model's own ids, and tokens that end a turn of a conversation.
        ends = map(tokenizer.token_to_id, ("<|endoftext|>", *prompts.TURN_ENDS, "<|dlm_pad|>"))
        ends = dict.fromkeys(
            (dream.eos_id, dream.pad_id, *(i for i in ends if i not in (None, dream.expand_id)))
        )
        self.grows, self.never_in_a_hole = (
            dream.expand_id >= 0,
            (dream.mask_id, dream.expand_id, *ends),
        )
        # 0: the likeliest length
        self.hole = flags.hole or (infill.START if self.grows else dream.hole_masks)
        settings = {"vocab": tokenizer.get_vocab_size(), "eos_ids": tuple(ends)}
        self.sampler, self.rule = sample_dream, dataclasses.replace(rule, **settings)
        # texts of a batch
        self.together = flags.batch_size * (1 if self.watching or dream.block_length else 8)
        if dream.block_length and (flags.valid or flags.repair):
            raise ValueError("--valid=python and --repair are for a Dream without blocks")
        if flags.draft or (dream.autoregressive and flags.block_length == 1):
            import sample_draft

            if cfg.show_steps:
                raise ValueError("--show_steps shows no drafts; leave it out")
            self.sampler, self.rule = (
                sample_draft,
                sample_draft.settings_of(self.rule, flags, dream),
            )
        elif dream.block_length:
            self.sampler, length = sample_block, flags.block_length or dream.block_length
            self.rule = sample_block.settings_of(
                dataclasses.replace(self.rule, block_length=length)
            )
            if length != dream.block_length:
                print(
                    f"--block_length={length}: trained with {dream.block_length}", file=sys.stderr
                )

        self.read = infill.Reader(self.model, tokenizer)
        # turns: (prompt, answer) so far
        self.key, self.compile_s, self.turns = jax.random.key(cfg.seed), 0.0, []
        jax.monitoring.register_event_duration_secs_listener(self.on_event)
        begin, ask, how = self.conversation(folder, tokenizer, prompts.chat_template(folder))
        must_ask = flags.chat == "on" or bool(flags.system)
        self.texts = prompts.Texts(
            tokenizer, dream.mask_id, ends, dream.positions, begin, ask, must_ask
        )
        print(
            f"{folder}, {f'int{bits} and ' if bits else ''}{self.model.compute.dtype}, {how}",
            file=sys.stderr,
        )

    def conversation(self, folder, tokenizer, wrap):
        """(ids before a plain text, a function that encodes a prompt by the template wrap or None,
        this in words).

        The tokenizer of a base model has a template, too. So the name of the model decides, or that
        of its folder.
        """
        flags = self.cfg.dream
        if flags.chat == "on" and not wrap:
            raise ValueError(f"--chat=on: {folder} holds no chat template (tokenizer_config.json)")
        config = runs.read_json(folder / "config.json")
        name = (
            config.get("source") or f"{folder.resolve().name} {config.get('_name_or_path', '')}"
        ).lower()
        asks = re.search(
            "instruct|chat|cpgrpo|thinking|llada-1.5|fast_dllm_v2|diffusion-(3|8|14)b(?!-base)",
            name,
        )
        chats = wrap and (
            flags.chat == "on"
            or (flags.chat == "auto" and asks and not (flags.valid or self.cfg.check))
        )
        if (flags.system and not chats) or (flags.bos and chats):
            raise ValueError(
                "--system goes before a conversation, say --chat=on; --bos before plain text, --chat=off"
            )
        named, own = tokenizer.token_to_id("<|beginoftext|>"), self.model.cfg.bos_id
        begin = (
            [own if named is None and own != self.model.cfg.eos_id else named] if flags.bos else []
        )
        if None in begin:
            raise ValueError(f"--bos: {folder} has no token that begins texts")
        if not chats:
            return (
                begin,
                None,
                "plain completion" + ("; --chat=on asks it as an assistant" if wrap else ""),
            )

        def ask(prompt):  # without the oldest turns, where all do not fit
            turns, most = self.turns, self.model.cfg.positions - self.cfg.max_new
            while (
                len(
                    ids := prompts.encode_chat(tokenizer, wrap, prompt, flags.system or None, turns)
                )
                > most
                and turns
            ):
                turns = turns[1:]
            if len(turns) < len(self.turns) and len(ids) <= most:
                print("the oldest turns of the conversation do not fit any more", file=sys.stderr)
                self.turns = turns
            return ids

        return begin, ask, "chat template"

    def complete(self, requests):
        """Fill a canvas for each request, cfg.n times, and print the texts: [(row of --json,
        text)].

        The next call goes on with the conversation. Of a Dream of blocks a single text streams to
        the terminal.
        """
        import repair
        import sample_dream

        cfg, texts = self.cfg, self.texts
        how = cfg.max_new, cfg.dream.infill, self.measure
        if cfg.dream.repair and "[MASK" in str(requests):
            raise ValueError(
                "--repair opens what is generated after a prompt; leave [MASK] out of it"
            )
        # passes and seconds, those that measure [MASK] too
        self.total = total = collections.Counter()
        canvases = [
            blank for request in requests for blank in [texts.canvas(*request, *how)] * cfg.n
        ]
        # Each canvas width is a program to compile: all batches share at most three, and have as
        # many rows. The sampler puts texts of about one length together. Holes whose tokens were
        # counted have a rule of their own, see fill().
        of_a_rule = [
            [*group] for _, group in itertools.groupby(canvases, lambda blank: blank.counted)
        ]
        batches = [
            group[i : i + self.together]
            for group in of_a_rule
            for i in range(0, len(group), self.together)
        ]
        lengths = [
            length for batch in batches for length in sorted(len(blank.ids) for blank in batch)
        ]
        shape = {"rows": min(cfg.dream.batch_size, len(canvases))}
        shape["widths"] = sample_dream.widths(lengths, shape["rows"], self.model.cfg.positions)
        self.streams = len(canvases) == 1 and not (cfg.json or cfg.check or cfg.show_steps)
        self.printed, completions, pages = "", [], []
        for batch in batches:
            self.watched = batch[0]
            batch, filled, stats = self.fill(batch, shape)
            total.update({name: stats[name] for name in ("forwards", "seconds", "compile_s")})
            for i, (blank, ids) in enumerate(zip(batch, filled, strict=True)):
                completion, text = texts.text_of(
                    blank, ids, functools.partial(prompts.truncate, stops=cfg.stop)
                )
                passes = int(stats["passes"][i])
                seconds = stats["seconds"] * passes / max(1, stats["forwards"])
                tokens = sum(blank.ids[p] == texts.mask for p in texts.kept(blank, ids))
                total["tokens"] += tokens
                row = {"prompt": blank.prompt, "suffix": blank.suffix, "text": text}
                row |= {"completion": completion} if blank.around else {}
                row |= {"tokens": tokens, "forwards": passes, "seconds": seconds, "seed": cfg.seed}
                completions.append((row, text))
                if not cfg.check:
                    show(
                        cfg,
                        row,
                        text[len(self.printed) :],
                        len(completions) if len(canvases) > 1 else 0,
                    )
                if cfg.html:
                    at = i, self.columns(ids)
                    likely = [x_BLN[at] for x_BLN in stats["record"].likely]
                    pages.append(
                        texts.tokens(
                            blank, ids, stats["when"][at], stats["probability"][at], likely
                        )
                    )
        prompts.write_page(cfg.html, pages)
        rate = (
            f"{total['tokens'] / total['seconds']:.1f} tokens/s, {total['forwards']} forward passes"
        )
        compiling = (
            f"; compiling took {total['compile_s']:.1f} s more" if total["compile_s"] else ""
        )
        print(
            f"{total['tokens']} tokens in {total['seconds']:.2f} s, {rate}{compiling}",
            file=sys.stderr,
        )
        self.turns.append((requests[-1][0], completion))
        return repair.repaired(self, completions) if cfg.dream.repair else completions

    def measure(self, before, following, sizes):
        """[masks of the only hole]: --hole or the model's own, to grow or end with EOS; else the
        likeliest length.
        """
        import infill

        if self.model.cfg.block_length or sizes != [None] or following[-1:] in ([], [[]]):
            where = "a single hole, text after it, and a Dream without blocks"
            raise ValueError(f"[MASK] without a number needs {where}; else say [MASK:12]")
        if self.grows and (
            self.watching or self.cfg.dream.steps or self.cfg.dream.schedule == "even"
        ):
            raise ValueError(
                "[MASK] that grows has no --steps, --schedule, --show_steps or --html; say [MASK:12]"
            )
        if self.hole:
            return [min(self.hole, self.model.cfg.positions - sum(map(len, (before, *following))))]
        rule = dataclasses.replace(self.rule, ban_ids=self.never_in_a_hole)
        how = (
            rule,
            jax.random.fold_in(self.key, 2),
            self.cfg.dream.batch_size,
            bool(self.cfg.dream.valid),
        )
        spent, self.compile_s, started = self.read.passes, 0.0, time.perf_counter()
        with self.context():
            size = infill.hole_length(self.read, before, *following, *how)
        times = {
            "seconds": time.perf_counter() - started - self.compile_s,
            "compile_s": self.compile_s,
        }
        self.total.update(times | {"forwards": self.read.passes - spent})
        print(
            "[MASK] is 1 token here" if size == 1 else f"[MASK] is {size} tokens here",
            file=sys.stderr,
        )
        return [size]

    def fill(self, canvases, shape):
        """(canvases, token ids, statistics with "seconds" and "compile_s"); shape has the sampler's
        rows and widths.
        """
        import infill

        prompts, rule, flags, viewer = (
            [blank.ids for blank in canvases],
            self.rule,
            self.cfg.dream,
            {},
        )
        if self.cfg.show_steps:
            self.shown = self.texts.picture(self.watched, self.watched.ids)
            viewer["watch"] = self.watch
        if self.streams and self.model.cfg.block_length:
            viewer["on_block"] = self.on_block
        if canvases[0].counted and (self.grows or not self.hole):  # else EOS ends it
            rule = dataclasses.replace(rule, ban_ids=self.never_in_a_hole)
        self.key, key = jax.random.split(self.key)
        self.compile_s, started = 0.0, time.perf_counter()
        with self.context():
            if canvases[0].counted and self.grows:
                how = {"size": self.hole, "most": self.cfg.max_new, "regrow": flags.regrow}
                end = [self.model.cfg.eos_id] if flags.bos else []
                canvases, filled, stats = infill.grow_all(
                    self.read, canvases, end, rule, key, **how
                )
            else:
                filled, stats = self.sampler.generate(
                    self.model, prompts, 0, rule, key, **shape, **viewer
                )
            if flags.valid:
                for i, ids in enumerate(filled):
                    spent = self.read.passes
                    filled[i], is_python = infill.mend(
                        self.read, canvases[i].ids, ids, self.texts.ends
                    )
                    stats["passes"][i] += self.read.passes - spent
                    stats["forwards"] += self.read.passes - spent
                    if not is_python:
                        print(
                            "--valid=python: found no valid Python for what was given",
                            file=sys.stderr,
                        )
        times = {
            "seconds": time.perf_counter() - started - self.compile_s,
            "compile_s": self.compile_s,
        }
        return canvases, filled, stats | times

    def on_event(self, name, seconds, **_):
        """Called by JAX after each of its stages."""
        if name.startswith("/jax/core/compile/"):
            self.compile_s += seconds

    def on_block(self, rows):
        """Called with the token ids of the single text after each block; prints what has been added
        before a MASK.
        """
        ids = [*itertools.takewhile(lambda token: token != self.texts.mask, rows[0])]
        begun = dataclasses.replace(self.watched, ids=self.watched.ids[: len(ids)])
        _, text = self.texts.text_of(
            begun, ids, functools.partial(prompts.printable, stops=self.cfg.stop)
        )
        text = prompts.printable(text, ())  # a text with [MASK:n] has no stop strings
        print(text[len(self.printed) :], end="", flush=True)
        self.printed = text

    def columns(self, ids):
        """The columns of a text in the sampler's arrays: on their right, of a Dream of blocks on
        their left.
        """
        return slice(len(ids)) if self.model.cfg.block_length else slice(-len(ids), None)

    def watch(self, state):
        """Traced into the compiled loop of the sampler: shows the first canvas after each step that
        changed it.
        """

        def show(step, id_L, logp_L):  # on the host
            columns, clear, prob = self.columns(self.watched.ids), "", None
            ids = id_L[columns].tolist()
            text = self.texts.picture(self.watched, ids)
            if sys.stdout.isatty():  # over the step before, coloured by probability
                clear, prob = "\x1b[2J\x1b[H", np.exp(logp_L[columns]).tolist()
            if text != self.shown:
                print(
                    f"{clear}step {step + 1}: {self.texts.picture(self.watched, ids, prob)}",
                    flush=True,
                )
            self.shown = text

        ordered = not self.mesh  # JAX orders the callbacks of one device alone
        jax.debug.callback(
            show, state.step, state.token_BL[0], state.record.logp_BL[0], ordered=ordered
        )


if __name__ == "__main__":
    sys.argv[1:] = with_preset(sys.argv[1:])
    runs.command(main, Config, __doc__)
