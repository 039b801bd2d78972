"""How benchmarks.py asks a model: a writer for each model family, which continues prompts.

    writer = WRITERS[cfg.model](cfg, record, questions, run, step)
    prompts = [prompt_ids(cfg, record, writer.tokenizer, writer.wrap, question) for question in questions]
    new_ids = writer.write(prompts, finished, 0)    # batch number 0

cfg is the Config of benchmarks.py, record its protocol's, and find_model returns (run, step, folder). For another model
family add a function to WRITERS.
"""

import dataclasses
import typing
from pathlib import Path

import numpy as np

import protocols
import runs


def find_model(cfg):
    """(folder of the run, step, folder of the weights) of --ckpt; step is None for a model without steps."""
    import inference

    trained = {"pythoncoder": "out/train_tpu", "mdlm": "out/train_gpu", "dream": "out/train_dream"}
    run = Path(cfg.ckpt or inference.default_folder(trained[cfg.model], cfg.model))
    if any((run / name).is_file() for name in ("meta.json", "model.safetensors")):
        return run, None, run
    return run, *runs.newest(run, cfg.step)


class Writer(typing.NamedTuple):
    """A loaded model.

    write() depends only on the model, the prompts, the settings and the number of the batch. A model that generates
    from left to right calls finished(token ids so far) and stops when that returns True.
    """

    tokenizer: typing.Any  # of the library tokenizers
    longest: int  # tokens of prompt and completion at most
    write: typing.Callable  # (prompts, finished, number of the batch) -> new token ids of each prompt
    wrap: typing.Callable | None = None  # the model's chat template


def load_jax(family, cfg, run, step, bits=0):
    """(model on all devices, its mesh, function from the number of a batch to its random key)."""
    import jax

    import checkpoints
    import inference

    checkpoints.keep_compiled(cfg.compile_cache)
    model, _, mesh = inference.load_for_inference(family, run, step or 0, rows=cfg.batch_size, bits=bits)
    return model, mesh, lambda batch: jax.random.fold_in(jax.random.key(cfg.seed), batch)


def cut(ids, ends):
    """The token ids up to the first one that ends a text."""
    return ids[: next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))]


def pythoncoder_writer(cfg, record, questions, run, step):
    """Generates from left to right; a model with heads for further tokens speculates with them."""
    import inference
    import model_pythoncoder as pc

    model, mesh, key_of_batch = load_jax(pc, cfg, run, step)
    tokenizer = runs.read_tokenizer(run)
    eos = tokenizer.token_to_id("<|endoftext|>")
    vocab = tokenizer.get_vocab_size()
    eos = -1 if eos is None else eos
    rule = pc.Sampling(cfg.temperature, top_p=cfg.top_p, vocab=vocab, eos=eos, speculate=model.cfg.mtp)

    def write(prompts, finished, batch):
        with inference.mesh_context(mesh):
            return pc.generate(model, prompts, cfg.max_new, rule, key_of_batch(batch), on_tokens=finished)[0]

    return Writer(tokenizer, int(model.cfg.positions * model.cfg.yarn_factor), write)


def dream_writer(cfg, record, questions, run, step):
    """Unmasks --max_new masks behind the prompt."""
    import inference
    import model_dream
    import sample_block
    import sample_dream

    model, mesh, key_of_batch = load_jax(model_dream, cfg, run, step, inference.bits_of(cfg.dream))
    tokenizer, wrap = sample_dream.load_tokenizer(run, model.cfg), runs.chat_template(run)
    if record.system == "" and not wrap:
        raise ValueError(f"--chat: {run} holds no chat template (tokenizer_config.json)")
    # MASK is among the ends of "ours"; the sampler fills it.
    ends = {tokenizer.token_to_id(name) for name in record.ends} | ({model.cfg.eos_id} if record.ends else set())
    ends = tuple(sorted(ends - {None, model.cfg.mask_id}))
    if cfg.dream.eos_penalty and not ends:
        raise ValueError("--eos_penalty is for protocols in which <|endoftext|> ends a text; this one reads on behind")
    others = "chat", "bos", "int8", "int4"
    flags = {name: value for name, value in dataclasses.asdict(cfg.dream).items() if name not in others}
    flags |= {"temperature": cfg.temperature, "top_p": cfg.top_p, "vocab": tokenizer.get_vocab_size()}
    rule, sampler = sample_dream.Sampling(**flags, eos_ids=ends), sample_dream
    if model.cfg.block_length:
        rule, sampler = sample_block.settings_of(rule), sample_block

    # Each canvas width is a program to compile: all batches share at most three.
    prompts = [prompt_ids(cfg, record, tokenizer, wrap, question) for question in questions]
    lengths = sorted(len(ids) + cfg.max_new for ids in prompts if len(ids) + cfg.max_new <= model.cfg.positions)
    widths = sample_dream.widths(lengths, cfg.batch_size, model.cfg.positions) if lengths else ()

    def write(prompts, finished, batch):
        shape = {"widths": widths, "rows": cfg.batch_size}
        with inference.mesh_context(mesh):
            rows, _ = sampler.generate(model, prompts, cfg.max_new, rule, key_of_batch(batch), **shape)
        return [cut(row[len(ids) :], ends) for row, ids in zip(rows, prompts, strict=True)]

    return Writer(tokenizer, model.cfg.positions, write, wrap)


def mdlm_writer(cfg, record, questions, run, step):
    """Unmasks --max_new masks behind the prompt in as many steps, by confidence."""
    import torch

    import model_mdlm as mdlm

    folder = run if step is None else runs.newest(run, step)[1]
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    model, tokenizer = mdlm.load(folder, device, dtype), runs.read_tokenizer(folder)
    vocab = tokenizer.get_vocab_size()
    rule = mdlm.Sampling("max_prob", cfg.max_new, "even", cfg.temperature, top_p=cfg.top_p, vocab=vocab)

    def write(prompts, finished, batch):
        # A canvas is BOS, the prompt and masks; shorter ones are padded behind.
        canvases = [torch.tensor([mdlm.BOS, *ids, *[mdlm.MASK] * cfg.max_new]) for ids in prompts]
        token_BL = torch.nn.utils.rnn.pad_sequence(canvases, batch_first=True, padding_value=mdlm.PAD).to(device)
        seed = int(np.random.SeedSequence([cfg.seed, batch]).generate_state(1)[0])
        filled = mdlm.sample(model, token_BL, rule, torch.Generator(device).manual_seed(seed)).tolist()
        new = [row[len(ids) - cfg.max_new : len(ids)] for row, ids in zip(filled, canvases, strict=True)]
        return [cut(ids, {mdlm.EOS}) for ids in new]

    return Writer(tokenizer, model.cfg.positions - 1, write)  # BOS takes one position


def prompt_ids(cfg, record, tokenizer, wrap, question):
    """The token ids of a prompt. "ours" uses the chat template of the model, `wrap`."""
    if record.system and tokenizer.token_to_id("<|im_start|>") is None:
        raise ValueError(
            f"--protocol={cfg.protocol} needs a chat template, and the tokenizer has no token <|im_start|>"
        )
    if record.system == "":
        text = wrap(record.ask(question, ()))
    else:
        text = protocols.prompt(record, question, cfg.trim_prefix)
    tokenizer.encode_special_tokens = record.system is None  # without chat, names of special tokens are plain text
    ids = tokenizer.encode(text, add_special_tokens=False).ids[-record.prompt_tokens :]
    bos = tokenizer.token_to_id("<|beginoftext|>") if record.bos else None
    return ids if bos is None else [bos, *ids]


WRITERS = {"pythoncoder": pythoncoder_writer, "mdlm": mdlm_writer, "dream": dream_writer}
