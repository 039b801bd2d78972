"""Dream's completions: canvases, holes, chat, streams, steps, valid Python; what fits; errors."""

import ast
import dataclasses
import io
import json
import os
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import refused_by
from flax import nnx
from test_generate import COLOUR, in_a_terminal, new_params, new_tokenizer, plain
from test_prompts import TEMPLATE
from tokenizers import Tokenizer, pre_tokenizers

import checkpoints
import data_prep
import generate_dream
import infill
import model_dream as md
import runs
import sample_block
import sample_dream

pytestmark = pytest.mark.usefixtures("no_compile_cache")
CODE = "def area(radius): return radius * 3"
IDS = {"mask_id": 3, "pad_id": 0, "bos_id": 1, "eos_id": 2}
CFG = md.DreamConfig(
    320, 32, layers=1, heads=4, kv_heads=2, head_size=8, ffn=40, positions=96, **IDS
)


def save(folder, cfg, params, files):
    checkpoints.save(md, folder, nnx.merge(md.graph_of(cfg, md.Compute()), params), files)
    return folder


@pytest.fixture(scope="module")
def coder(tmp_path_factory):
    """A folder of converted Dreams with a chat template: random weights; equal logits; blocks."""
    folder = tmp_path_factory.mktemp("dream")
    names = (*data_prep.SPECIAL.values(), "<|im_start|>", "<|im_end|>")
    new_tokenizer(names, CODE).save(str(folder / "tokenizer.json"))
    template = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(template))
    files = [folder / "tokenizer.json", folder / "tokenizer_config.json"]
    params = new_params(md, CFG, 0.5)
    save(folder / "model", CFG, params, files)
    # all logits are equal: the likeliest token is PAD, an end
    save(folder / "silent", CFG, params | {"norm": 0 * params["norm"]}, files)
    save(folder / "blocks", dataclasses.replace(CFG, block_length=4), params, files[:1])
    return folder


def config(folder, **settings):
    # with these most tests take the same program
    defaults = {"ckpt": str(folder), "max_new": 8, "devices": 1, "top_p": 1.0, "temperature": 0.0}
    return generate_dream.Config(**defaults | settings)


def dream_says(capsys, folder, **settings):
    generate_dream.main(config(folder, **settings))
    return capsys.readouterr()


def rows_of(capsys, folder, **settings):
    out = dream_says(capsys, folder, json=True, **settings).out
    return [json.loads(line) for line in out.splitlines()]


def refused(part, cfg):
    with pytest.raises((ValueError, OSError)) as error:
        generate_dream.main(runs.check(cfg))
    assert part in str(error.value)
    assert "\n" not in str(error.value)


def greedy(folder, ids, new=8):
    """Text that Dream writes behind some ids, without generate_dream.py, up to its end."""
    model, _ = checkpoints.load(md, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ends = (2, 0, tokenizer.token_to_id("<|im_end|>"))
    rule = sample_dream.Sampling(vocab=tokenizer.get_vocab_size(), eos_ids=ends)
    (row,), _ = sample_dream.generate(model, [ids + [3] * new], 0, rule)
    row = row[len(ids) :]
    return tokenizer.decode(row[: min((i for i, x in enumerate(row) if x in ends), default=new)])


@pytest.mark.parametrize(
    "settings",
    [
        {"block_length": 4, "cache": "dual", "threshold": 0.5, "int8": True},
        pytest.param({"top_p": 0.95, "temperature": 0.2}, marks=pytest.mark.slow),
        pytest.param({"alg": "origin", "steps": 5, "temperature": 0.9}, marks=pytest.mark.slow),
        pytest.param({"block_length": 4, "cache": "prefix", "int4": True}, marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def test_dream_continues_and_fills_in(coder, capsys, tmp_path, settings):
    asked = {"prompt": "def area"}, {"prompt": "def [MASK:4]: return[MASK:4] 3"}
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    settings = settings | {"file": str(tmp_path / "in.jsonl"), "json": True}
    out, err = dream_says(capsys, coder / "model", **settings)
    rows = [json.loads(line) for line in out.splitlines()]
    assert rows[0]["text"] == "def area" + rows[0]["completion"]
    assert re.fullmatch(r"(?s)def.*: return.* 3", rows[1]["text"])
    for row in rows:
        assert 0 <= row["tokens"] <= 8
        assert not any(name in row["text"] for name in (*data_prep.SPECIAL.values(), "[MASK"))
    pattern = r"(\d+) tokens in [\d.]+ s, [\d.]+ tokens/s, (\d+) forward passes; compiling took"
    tokens, forwards = map(int, re.search(pattern, err.splitlines()[-1]).groups())
    assert tokens == sum(row["tokens"] for row in rows)
    assert 1 <= forwards <= 32


def test_a_file_of_prompts_is_answered_in_batches_as_each_is(coder, capsys, monkeypatch, tmp_path):
    asked = [
        {"prompt": CODE},
        {"prompt": "def"},
        {"prompt": "return ", "suffix": " * 3"},
        {"prompt": "x [MASK:3]"},
    ]
    lines = "".join(json.dumps(row) + "\n" for row in asked)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    together = rows_of(capsys, coder / "model", file="-", batch_size=3)
    (tmp_path / "in.jsonl").write_text(lines)
    alone = rows_of(capsys, coder / "model", file=str(tmp_path / "in.jsonl"), batch_size=1)
    assert [row["text"] for row in together] == [row["text"] for row in alone]
    assert [row["prompt"] for row in together] == [row["prompt"] for row in asked]
    assert together[2]["text"] == f"return {together[2]['completion']} * 3"
    assert "completion" not in together[3]


@pytest.mark.slow
def test_rows_of_a_batch_draw_differently_and_so_do_batches(coder, capsys):
    drawn = rows_of(capsys, coder / "model", prompt="def", n=4, batch_size=2, temperature=0.2)
    assert len({row["completion"] for row in drawn}) > 2


def test_what_follows_an_end_token_is_cut_and_what_was_given_stays(coder, capsys):
    for settings, text in (
        ({"prompt": "def area"}, "def area"),
        ({"prompt": "def[MASK:4](x): return[MASK:3] 3"}, "def(x): return 3"),
        ({"prompt": "def[MASK](x): return[MASK] 3"}, "def(x): return 3"),
        ({"prompt": "def", "suffix": " 3"}, "def 3"),
        ({"prompt": "a <mask>[MASK:3] b"}, "a <mask> b"),  # a special token's name is text
        ({"prompt": "a <mask> b", "chat": "on"}, ""),
    ):
        (row,) = rows_of(capsys, coder / "silent", **settings)
        assert (row["text"], row["tokens"]) == (text, 0)
    out = dream_says(capsys, coder / "model", prompt="def").out.rstrip("\n")
    cut = dream_says(capsys, coder / "model", prompt="def", stop=(out[6:8],)).out.rstrip("\n")
    assert cut == "def" + out[3 : out.index(out[6:8], 3)]


def test_a_checked_completion_is_printed_with_its_verdicts(coder, capsys):
    # what random weights add is no Python, and is cut off
    whole = 'def f(x):\n """>>> f(1)\n 2\n """\n return x + 1\n'
    said = dream_says(capsys, coder / "silent", prompt=whole, check=True, max_new=2)
    assert said.out == whole + "# pass: f(1) gives 2\n"
    assert "completion 1 of 1 passes" in said.err


class Pieces(io.StringIO):
    """A terminal or a pipe that remembers each text that it was given."""

    def __init__(self):
        super().__init__()
        self.pieces = []

    def write(self, text):
        self.pieces.append(text)
        return super().write(text)


def test_blocks_stream_whole_characters(coder, monkeypatch, tmp_path):
    """A model that writes the bytes of é and € in turn, of which a block of two tokens holds
    parts.
    """
    cfg = dataclasses.replace(CFG, block_length=2)
    tokenizer = Tokenizer.from_file(str(coder / "tokenizer.json"))
    ((letters, _),) = pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str("é€")
    ids = [tokenizer.token_to_id(letter) for letter in letters]
    params = jax.tree.map(lambda x: 0 * x, new_params(md, cfg, 0.5))
    table = np.random.default_rng(0).normal(size=(cfg.vocab, cfg.width)).astype(np.float32)
    head = np.zeros_like(table)
    head[np.roll(ids, -1)] = table[ids]  # each byte is followed by the next one
    params["norm"] = jnp.ones(cfg.width)
    params |= {"embed_tokens": jnp.asarray(table), "lm_head": jnp.asarray(head)}
    folder = save(tmp_path / "bytes", cfg, params, [coder / "tokenizer.json"])
    for settings, text, least in (
        ({"prompt": "x€"}, "x€é€é\ufffd", 3),
        ({"prompt": "x€", "stop": ("€é",)}, "x€é", 1),
        ({"prompt": "a € [MASK:5]"}, "a €é€", 2),
    ):
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdout", out := Pieces())
            generate_dream.main(config(folder, **settings))
        assert out.getvalue() == text + "\n"
        shown = [piece for piece in out.pieces if piece.strip()]
        assert len(shown) >= least
        assert not any("\ufffd" in piece for piece in shown[:-1])


@pytest.mark.slow
def test_blocks_are_filled_behind_their_exact_cache(coder, capsys, tmp_path):
    asked = {"prompt": "def area"}, {"prompt": "class A: pass # [MASK:5]"}
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    settings = {"file": str(tmp_path / "in.jsonl"), "entropy_bound": 0.5, "show_steps": True}
    rows = rows_of(capsys, coder / "blocks", **settings)
    assert rows[0]["text"] == "def area" + rows[0]["completion"]
    assert rows[1]["text"].startswith("class A: pass #")
    assert 1 <= rows[0]["forwards"] <= 16
    assert 1 in {step for _, step, _ in rows[0]["steps"]}
    for settings, part in (
        ({"prompt": "a[MASK:2]b"}, "does not see the text after a hole"),
        (
            {"prompt": "a", "cache": "dual", "block_length": 4},
            "no alg, alg_temp or cache: leave them out",
        ),
        ({"prompt": "a", "threshold": 0.5, "entropy_bound": 0.5}, "do not go together"),
        ({"prompt": "a", "valid": "python"}, "for a Dream without blocks"),
    ):
        refused(part, config(coder / "blocks", **settings))


@pytest.mark.slow
def test_a_hole_stays_python(coder, capsys):
    settings = {"prompt": "def area(r):\n    x = [MASK:6]\n    return x\n", "temperature": 0.9}
    out = dream_says(capsys, coder / "model", valid="python", **settings).out
    assert ast.parse(out)
    assert out.startswith("def area(r):\n    x =")
    assert out.endswith("\n    return x\n\n")
    # random weights: without the parser it is not Python
    out = dream_says(capsys, coder / "model", **settings).out
    with pytest.raises((SyntaxError, ValueError)):
        ast.parse(out)
    settings["prompt"] = "def area(r):\n    x"
    out = dream_says(capsys, coder / "model", valid="python", **settings).out
    assert infill.can_go_on(out.rstrip("\n"))


# ---- chat


def test_a_chat_template_is_for_those_who_ask_and_for_names_that_say_instruct(coder, capsys):
    tokenizer = Tokenizer.from_file(str(coder / "model" / "tokenizer.json"))
    ids = tokenizer.encode("<|im_start|>user\nreturn 3<|im_end|>\n<|im_start|>assistant\n").ids
    answer = greedy(coder / "model", ids)
    plain_text = greedy(coder / "model", tokenizer.encode("return 3").ids)
    assert answer != plain_text
    for chat, text, how in (
        ("on", answer, "chat template"),
        ("auto", f"return 3{plain_text}", "plain completion; --chat=on"),
    ):
        out, err = dream_says(capsys, coder / "model", prompt="return 3", chat=chat)
        assert out == text + "\n"
        assert how in err


@pytest.mark.parametrize(
    ("name", "settings", "chat"),
    [
        ("owner/coder-instruct", {}, "auto"),
        ("owner/coder-base", {}, "off"),
        ("owner/diffusion-8b", {}, "auto"),
        ("owner/diffusion-8b-base", {}, "off"),
        ("owner/coder-instruct", {"chat": "off"}, "off"),
        ("owner/coder-instruct", {"check": True}, "off"),
        ("owner/coder-instruct", {"valid": "python"}, "off"),
        ("owner/coder-base", {"chat": "on"}, "on"),
    ],
)
def test_the_name_of_a_model_decides_whether_it_chats(name, settings, chat):
    cfg = generate_dream.Config(prompt="a\\n", **settings)
    settled = generate_dream.settle(cfg, "x", None, name, has_template=True)
    assert (settled.chat, settled.prompt, settled.max_new) == (chat, "a\n", 256)


def test_a_models_name_is_its_source_or_its_folders_own(coder, tmp_path):
    folder = tmp_path / "Coder-Instruct"
    folder.symlink_to(coder / "model")
    assert generate_dream.prepare(config(folder)).chat == "off"  # not that of a link
    folder.unlink()
    shutil.copytree(coder / "model", folder)
    assert generate_dream.prepare(config(folder)).chat == "auto"
    keys = runs.read_json(folder / "config.json")
    runs.write(folder / "config.json", keys | {"source": "owner/Coder-Base"})
    assert generate_dream.prepare(config(folder)).chat == "off"  # what was converted decides
    runs.write(folder / "generation_config.json", {"max_new_tokens": 64})
    assert generate_dream.prepare(config(folder, max_new=None)).max_new == 64


def test_an_interactive_chat_keeps_what_was_said(coder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n\nb\n\n"))
    settings = {"chat": "on", "max_new": 4, "system": "s\\nt"}
    answers = [row["completion"] for row in rows_of(capsys, coder / "model", **settings)]
    said = [("system", "s\nt"), ("user", "a"), ("assistant", answers[0]), ("user", "b")]
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in said)
    tokenizer = Tokenizer.from_file(str(coder / "model" / "tokenizer.json"))
    ids = tokenizer.encode(text + "<|im_start|>assistant\n", add_special_tokens=False).ids
    assert answers[1] == greedy(coder / "model", ids, 4)
    # what does not fit 96 positions any more is forgotten, the oldest turn first
    three = "return radius * 3\n\n" * 3
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{three}{99 * 'x'}\n\n{three}"))
    out, err = dream_says(capsys, coder / "model", **settings, json=True)
    assert len(out.splitlines()) == 6
    assert "the oldest turns of the conversation do not fit any more" in err
    # too long by itself: nothing is forgotten for it
    assert err.count("do not fit the model's 96 positions") == 1


@pytest.mark.parametrize("kind", ["model", pytest.param("blocks", marks=pytest.mark.slow)])
def test_all_ends_that_the_files_of_a_model_list_end_its_texts(coder, tmp_path, capsys, kind):
    folder = shutil.copytree(coder / kind, tmp_path / kind)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = tokenizer.encode("def", add_special_tokens=False).ids
    rule = sample_dream.Sampling(vocab=tokenizer.get_vocab_size())
    sampler = sample_dream
    if kind == "blocks":
        sampler = sample_block
        rule = sample_block.settings_of(rule)
    (row,), _ = sampler.generate(checkpoints.load(md, folder)[0], [prompt], 16, rule)
    new = row[len(prompt) :]
    later, first = sorted(set(new), key=new.index)[:0:-1][:2]  # two tokens, none at the beginning
    keys = runs.read_json(folder / "config.json")
    for own, other, end in (
        ([2, later], None, later),
        (2, [2, later], later),
        ([2, later], [first], first),
        ([2, first], later, first),
    ):
        runs.write(folder / "config.json", keys | {"eos_token_id": own})
        runs.write(folder / "generation_config.json", {"eos_token_id": other})
        (row,) = rows_of(capsys, folder, prompt="def", max_new=16, chat="off")
        assert row["completion"] == tokenizer.decode(new[: new.index(end)])


def test_a_plain_text_can_begin_with_dreams_first_token(coder):
    tokenizer = Tokenizer.from_file(str(coder / "tokenizer.json"))
    # there is none of that name: the one of config.json, unless it ends texts
    assert generate_dream.begin_of(CFG, tokenizer) == [1]
    with pytest.raises(ValueError, match="no token that begins texts"):
        generate_dream.begin_of(dataclasses.replace(CFG, bos_id=CFG.eos_id), tokenizer)
    tokenizer.add_special_tokens(["<|beginoftext|>"])
    begin = tokenizer.token_to_id("<|beginoftext|>")
    assert generate_dream.begin_of(CFG, tokenizer) == [begin]


# ---- steps


def test_steps_are_shown_and_recorded(coder, capsys):
    out, _ = dream_says(capsys, coder / "model", prompt="x <b>", show_steps=True)
    masks = [line.count("\u2591") for line in out.split("step ")[1:]]
    assert masks[0] == 7
    assert masks == sorted(masks, reverse=True)
    assert "\x1b" not in out
    (row,) = rows_of(capsys, coder / "model", prompt="x <b>", show_steps=True)
    assert out.endswith(row["text"] + "\n")
    assert "".join(text for text, *_ in row["steps"]) == row["text"]
    assert all(step > 0 or probability == 1 for _, step, probability in row["steps"])
    silent = dream_says(capsys, coder / "model", prompt="x <b>").out
    assert silent == row["text"] + "\n"  # watching changes nothing


@pytest.mark.parametrize(
    ("model", "program"),
    [("model", sample_dream.one_step), ("blocks", sample_block.other_passes)],
)
def test_a_shown_batch_of_fewer_texts_takes_the_same_program(
    coder, capsys, tmp_path, model, program
):
    path = tmp_path / "in.jsonl"
    programs = set()
    for texts in (2, 3):
        path.write_text(texts * '{"prompt": "def"}\n')
        settings = {"file": str(path), "batch_size": 2, "show_steps": True}
        out, _ = dream_says(capsys, coder / model, **settings)
        assert out.count("----") == texts
        programs.add(program._cache_size())
    assert len(programs) == 1


@pytest.mark.slow
def test_tokens_are_coloured_by_the_probability_they_had(coder, capsys, monkeypatch):
    settings = {"prompt": "def [MASK:4](x)"}
    cfg = config(coder / "model", **settings, show_steps=True)
    shown = in_a_terminal(monkeypatch, generate_dream, cfg)
    out, _ = dream_says(capsys, coder / "model", **settings)
    assert plain(shown.split("\x1b[H\x1b[J")[-1]).endswith(out)
    assert COLOUR.search(shown)
    # the first token that was written: what the model says of the canvas as it was given
    model, _ = checkpoints.load(md, coder / "model")
    tokenizer = Tokenizer.from_file(str(coder / "model" / "tokenizer.json"))
    parts = [tokenizer.encode(text, add_special_tokens=False).ids for text in ("def", "(x)")]
    ids = parts[0] + [3] * 4 + parts[1]
    logits_LV = np.array(model.logits(model.hidden(jnp.asarray([ids]))[0])[0], np.float64)
    logits_LV = logits_LV[:, : tokenizer.get_vocab_size()]
    logits_LV[:, 3] = -np.inf
    (row,) = rows_of(capsys, coder / "model", **settings, show_steps=True)
    first = min(step for _, step, _ in row["steps"] if step)
    for i, (_, step, probability) in enumerate(row["steps"]):
        if step == first:
            # greedily the likeliest is written; its logits are those of the position before
            chance_V = np.exp(logits_LV[i - 1] - np.logaddexp.reduce(logits_LV[i - 1]))
            assert probability == pytest.approx(chance_V.max(), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("int8", [False, True])
def test_eight_devices_write_what_one_writes(coder, capsys, tmp_path, int8):
    lines = [json.dumps({"prompt": x}) for x in ("def f(x):", "import os", "x", "def area")]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    settings = {"file": str(tmp_path / "in.jsonl"), "batch_size": 4, "max_new": 4, "int8": int8}
    if int8:
        settings |= {"block_length": 4, "cache": "dual"}
    one = dream_says(capsys, coder / "model", **settings)
    many = dream_says(capsys, coder / "model", **settings, devices=0)
    assert one.out == many.out
    assert "8 x cpu; mesh data 4, fsdp 1, tensor 2" in many.err
    settings = {"prompt": "x", "show_steps": True, "batch_size": 4, "devices": 0}
    out, _ = dream_says(capsys, coder / "model", **settings)
    assert out.split("step ")[1].count("\u2591") == 7


# ---- what fits


def test_a_checkpoint_is_stored_so_that_it_fits_or_refused_before_it_is_read(
    coder, capsys, monkeypatch
):
    mesh = checkpoints.inference_mesh(CFG, jax.devices()[:1], 1)
    forms = ("float32", 0), ("bfloat16", 0), ("bfloat16", 8), ("bfloat16", 4)
    needed = [checkpoints.bytes_needed(md, CFG, mesh, "float32", *form) for form in forms]
    full, half, eight, four = needed
    count = md.count_params(CFG)
    # the most is held when the head is converted: its stored form, and that of the norm behind it
    assert (full - half, full) == (2 * (count - CFG.width), 4 * (count + CFG.vocab * CFG.width))

    def free(size):
        monkeypatch.setattr(checkpoints, "free_bytes", lambda _: size)

    free(half)
    _, err = dream_says(capsys, coder / "model", prompt="x", max_new=2)
    assert "bfloat16, plain" in err
    _, err = dream_says(capsys, coder / "model", prompt="x", max_new=2, dtype="bfloat16")
    assert "; float32 is faster here" in err
    refused("--dtype=bfloat16 takes", config(coder / "model", prompt="x", dtype="float32"))
    monkeypatch.setattr(checkpoints, "load", None)
    for size, settings, part in (
        (eight, {}, "are free; --int8 takes 7.21e-05 or --int4 takes"),
        (eight - 1, {}, f"are free; --int4 takes {four / 1e9:.3g}"),
        (eight - 1, {"int8": True}, "--int4 takes"),
        (four - 1, {}, "more memory"),
        (four - 1, {"int8": True, "int4": True}, "--int8 or --int4, not both"),
    ):
        free(size)
        refused(part, config(coder / "model", prompt="x", **settings))


@pytest.mark.parametrize(("dtype", "bits"), [("float32", 0), ("bfloat16", 0), ("bfloat16", 8)])
def test_no_more_bytes_are_held_while_a_model_is_read_and_joined_than_were_asked_for(
    dtype, bits, tmp_path, monkeypatch
):
    cfg = dataclasses.replace(CFG, vocab=16, ffn=400)  # gate and up are most of it
    save(tmp_path, cfg, new_params(md, cfg, 0.5), [])
    # held here, or a new array could have the id of one that is gone
    held, before = [], jax.live_arrays()
    known = {*map(id, before)}

    def watched(function):
        def call(*inputs, **settings):
            result = function(*inputs, **settings)
            held.append(sum(x.nbytes for x in jax.live_arrays() if id(x) not in known))
            return result

        return call

    monkeypatch.setattr(checkpoints, "bit_sums", watched(checkpoints.bit_sums))  # a layer as stored
    monkeypatch.setattr(md, "quantise", watched(md.quantise))
    monkeypatch.setattr(jax, "block_until_ready", watched(jax.block_until_ready))  # in join()
    mesh = checkpoints.inference_mesh(cfg, jax.devices()[:1], 1)
    checkpoints.load_for_inference(md, tmp_path, dtype=dtype, bits=bits, devices=1)
    needed = checkpoints.bytes_needed(md, cfg, mesh, "float32", dtype, bits)
    assert max(held) <= needed <= 1.5 * max(held)


def test_out_of_memory_is_one_line_that_says_what_to_lower(coder, monkeypatch):
    advice = "out of memory; try --int8, --int4, a smaller --batch_size or --max_new"

    def grow(*_, **__):
        jnp.zeros((2**45,)).block_until_ready()

    monkeypatch.setattr(sample_dream, "generate", grow)
    refused(advice, config(coder / "model", prompt="x"))
    monkeypatch.setattr(checkpoints, "bit_sums", grow)
    refused(advice, config(coder / "model", prompt="x"))


# ---- bad input


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"max_new": 96}, "do not fit the model's 96 positions"),
        ({"prompt": "x [MASK", "suffix": "y"}, "[MASK:12]"),
        ({"valid": "python", "chat": "on"}, "without a chat template"),
        ({"valid": "python", "json": True, "show_steps": True}, "not what --valid changes"),
        ({"block_length": 4, "steps": 3}, "do not divide over 2 blocks"),
        ({"cache": "dual"}, "set block_length"),
        ({"chat": "on", "suffix": "y"}, "a suffix or a hole is plain text"),
        ({"system": "s"}, "say --chat=on; --bos before plain text, --chat=off"),
        ({"n": 3}, "--temperature=0 generates the same text 3 times"),
        ({"file": "x.jsonl"}, "give --prompt or --file, not both"),
        ({"prompt": "", "check": True}, "--check needs --prompt or --file"),
        ({"prompt": "", "suffix": "y"}, "--suffix follows --prompt"),
    ],
)
def test_bad_settings_are_refused_in_one_line(coder, settings, part):
    """Beside the numbers of test_bad_input.py."""
    refused(part, config(coder / "model", **{"prompt": "x"} | settings))


def test_a_damaged_folder_is_refused_in_one_line(coder, tmp_path):
    bare = shutil.copytree(coder / "silent", tmp_path / "bare")
    (bare / "tokenizer_config.json").unlink()
    refused("holds no chat template", config(bare, prompt="x", chat="on"))
    os.unlink(bare / "tokenizer.json")
    refused("bare/tokenizer.json", config(bare, prompt="x"))
    refused("holds no checkpoint", config(tmp_path, prompt="x"))
    coder_folder = checkpoints.WEIGHTS / "pythoncoder"
    assert "holds a PythonCoder" in refused_by(generate_dream, f"--ckpt={coder_folder}")
