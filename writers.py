"""How benchmarks.py asks a model: one function per family loads a checkpoint and returns its
Writer.

    run, step, folder = find_model(cfg)
    writer = WRITERS[cfg.model](cfg, record, run, step)
    new_ids = writer.write(prompts, 0, lengths, finished)    # batch number 0

cfg is the Config of benchmarks.py, record its protocol's. For another model family add a function
to WRITERS.
"""

import dataclasses
import itertools
import typing

import jax

import checkpoints
import infill
import model_dream
import model_pythoncoder
import prompts
import repair
import runs
import sample_block
import sample_dream
import sandbox


def find_model(cfg):
    """(folder of the run, step, folder of the weights) of --ckpt; step is None for a converted
    model.
    """
    trained = {"pythoncoder": "out/train_tpu", "dream": "out/train_dream"}
    run = runs.as_path(cfg.ckpt or checkpoints.default_folder(trained[cfg.model], cfg.model))
    if any((run / name).is_file() for name in ("meta.json", "model.safetensors")):
        return run, None, run
    return run, *runs.newest(run, cfg.step)


class Writer(typing.NamedTuple):
    """A loaded model.

    write(prompts, number, lengths, finished) -> new token ids of each prompt. It depends only on
    the model, the settings, the prompts, the number of the batch, and `lengths`, the tokens of
    prompt and completion of all batches. A model that generates from left to right calls
    finished(new ids so far), and stops when that returns True. hole(ids before, ids after) -> the
    prompt of a hole of unknown length.
    """

    tokenizer: typing.Any  # of the library tokenizers
    longest: int  # tokens of prompt and completion at most
    write: typing.Callable
    hole: typing.Callable
    wrap: typing.Callable | None = None  # the model's chat template
    bos: int | None = None  # what a protocol with BOS begins with
    # (rows of samples.jsonl, their problems, batch number): see repair.py
    repair: typing.Callable | None = None


def key_of(cfg, number):
    return jax.random.fold_in(jax.random.key(cfg.seed), number)


def pythoncoder_writer(cfg, record, run, step):
    """Generates from left to right; a model with heads for further tokens speculates with them."""
    settings = {"rows": cfg.batch_size, "compile_cache": cfg.compile_cache}
    model, _, mesh = checkpoints.load_for_inference(model_pythoncoder, run, step or 0, **settings)
    tokenizer = runs.read_tokenizer(run, model.cfg.vocab)
    ids = {"vocab": tokenizer.get_vocab_size(), "eos": prompts.end_of_text(run, tokenizer)}
    rule = model_pythoncoder.Sampling(
        cfg.temperature, top_p=cfg.top_p, **ids, speculate=model.cfg.mtp
    )

    def write(prompts, number, lengths, finished):
        settings = prompts, cfg.max_new, rule, key_of(cfg, number), finished
        with checkpoints.mesh_context(mesh):
            texts = model_pythoncoder.generate(model, *settings)[0]
        return [[*itertools.takewhile(lambda token: token != rule.eos, ids)] for ids in texts]

    longest = int(model.cfg.positions * model.cfg.yarn_factor)
    return Writer(tokenizer, longest, write, lambda *around: prompts.in_order(tokenizer, *around))


def dream_writer(cfg, record, run, step):
    """Unmasks --max_new masks after the prompt."""
    settings = {
        "bits": checkpoints.bits_of(cfg.dream),
        "rows": cfg.batch_size,
        "compile_cache": cfg.compile_cache,
    }
    model, _, mesh = checkpoints.load_for_inference(model_dream, run, step or 0, **settings)
    tokenizer, positions = sample_dream.load_tokenizer(run, model.cfg), model.cfg.positions
    named, own = tokenizer.token_to_id("<|beginoftext|>"), model.cfg.bos_id
    bos = own if named is None and own != model.cfg.eos_id else named
    # "ours" ends texts at MASK, too (protocols.NO_ANSWER), of which a canvas is full: here it ends
    # none.
    ends = {tokenizer.token_to_id(name) for name in record.ends} | (
        {model.cfg.eos_id} if record.ends else set()
    )
    ends = tuple(sorted(ends - {None, model.cfg.mask_id}))
    if (cfg.dream.eos_penalty or cfg.dream.late_eos) and not ends:
        flag = "--eos_penalty" if cfg.dream.eos_penalty else "--late_eos"
        raise ValueError(
            f"{flag} is for protocols in which <|endoftext|> ends a text; in this one it does not"
        )
    others = "chat", "bos", "int8", "int4", "hole", "repair"
    flags = {
        name: value for name, value in dataclasses.asdict(cfg.dream).items() if name not in others
    }
    flags |= {"temperature": cfg.temperature, "top_p": cfg.top_p, "top_k": record.top_k}
    flags |= {"vocab": tokenizer.get_vocab_size(), "filtered": cfg.dream.fast_dllm}
    rule, sampler = sample_dream.Sampling(**flags, eos_ids=ends), sample_dream
    if model.cfg.block_length:
        rule, sampler = sample_block.settings_of(rule), sample_block

    def hole(before, behind):
        first, last = (bos, model.cfg.eos_id) if record.bos else (None, None)
        return [i for i in (first, *before, model.cfg.mask_id, *behind, last) if i is not None]

    reader = infill.Reader(model, tokenizer)
    growth = {"size": cfg.dream.hole or infill.START, "most": cfg.max_new}
    # as DreamOn's evaluation
    growth |= {"regrow": cfg.max_new, "to_right": True} if record.bos else {}
    size, hole_ends = cfg.dream.hole or model.cfg.hole_masks, (*ends, model.cfg.eos_id)
    if model.cfg.block_length and (cfg.dream.repair or record.data == ("infilling",)):
        raise ValueError(
            "humaneval_infilling and --repair need a Dream without blocks; choose another --ckpt"
        )

    def fill_hole(ids, key):
        """The ids for the one MASK of a text: as many as a Dream that grows holes decides; else of
        --hole masks, or its config's, up to an end token; else as many as the likeliest text has.
        """
        at = ids.index(model.cfg.mask_id)
        before, behind = ids[:at], ids[at + 1 :]
        if model.cfg.expand_id >= 0:
            return infill.grow(reader, before, behind, rule, key, **growth)
        if size:
            return infill.fill_holes(reader, [(before, size, behind)], rule, key, hole_ends)[0][0]
        in_a_hole = dataclasses.replace(rule, ban_ids=ends, eos_ids=())
        length_key, key = jax.random.split(key)
        length = infill.hole_length(reader, before, behind, in_a_hole, length_key, cfg.batch_size)
        return infill.fill_holes(
            reader, [(before, length, behind)], in_a_hole, key, rows=cfg.batch_size
        )[0][0]

    def judge(programs, tests):
        results = sandbox.run_tests(programs, tests, **dataclasses.asdict(cfg.sandbox))
        if failed := [result.error for result in results if result.rate is None]:
            raise RuntimeError(f"the sandbox failed: {failed[0]}")
        return [
            [*zip((x == "pass" for x in result.verdicts), result.values, strict=True)]
            for result in results
        ]

    def repair_rows(rows, problems, number):
        """Repair completions in place that fail the examples of their prompts."""
        pairs = [(row, problem) for row, problem in zip(rows, problems, strict=True) if row["fits"]]
        drafts = [
            repair.Draft(problem.asked.prompt, row["completion"], problem.public)
            for row, problem in pairs
        ]
        key = jax.random.fold_in(key_of(cfg, number), 1 << 31)  # a number that no row has
        fill = repair.filler(reader, rule, key, size, hole_ends, cfg.batch_size)
        with checkpoints.mesh_context(mesh):
            repair.repair(drafts, cfg.dream.repair, reader, fill, judge)
        for (row, _), draft in zip(pairs, drafts, strict=True):
            if draft.rounds:
                row |= {
                    "completion": draft.body,
                    "written": draft.body,
                    "rounds": len(draft.rounds),
                }

    def write(prompts, number, lengths, finished):
        if record.data == ("infilling",):
            # of a prompt that is too long there is only one token
            with checkpoints.mesh_context(mesh):
                keys = jax.random.split(key_of(cfg, number), len(prompts))
                return [
                    fill_hole(*pair) if len(pair[0]) > 1 else []
                    for pair in zip(prompts, keys, strict=True)
                ]
        # Each canvas width is a program to compile: all batches share at most three.
        shape = {
            "widths": sample_dream.widths(lengths, cfg.batch_size, positions),
            "rows": cfg.batch_size,
        }
        with checkpoints.mesh_context(mesh):
            rows, _ = sampler.generate(
                model, prompts, cfg.max_new, rule, key_of(cfg, number), **shape
            )
        new = [row[len(ids) :] for row, ids in zip(rows, prompts, strict=True)]
        return [[*itertools.takewhile(lambda token: token not in ends, ids)] for ids in new]

    return Writer(tokenizer, positions, write, hole, prompts.chat_template(run), bos, repair_rows)


WRITERS = {"pythoncoder": pythoncoder_writer, "dream": dream_writer}
