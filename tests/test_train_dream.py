"""train_dream.py: what is particular to it; test_trainers.py has the rest: blocks, --init, LoRA,
what fits, bounds.
"""

import dataclasses
import functools
import json
import os
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from conftest import losses, refusal, resumed, run, use_one_device, with_other_tokenizer
from flax import nnx
from test_model_dream import dense, quantised
from test_trainers import DREAM, DREAM_IDS, config, evaluation, random_params

import checkpoints
import data_prep
import diffusion
import generate_dream
import model_dream as md
import runs
import train_dream
from rows import Rows

TINY = md.DreamConfig(64, 16, 1, 2, 1, 8, 24, positions=64, **DREAM_IDS)


@pytest.fixture
def one_device(monkeypatch):
    use_one_device(monkeypatch, train_dream, md.CONFIGS, "test", DREAM)
    monkeypatch.setitem(train_dream.MICRO_BATCH, "init", 4)


def train(data, out, **changes):
    """A run of four steps in this process."""
    train_dream.main(config(train_dream, data, out, **{"steps": 4} | changes))


def refused(data, out, **changes):
    return refusal(train_dream, config(train_dream, data, out, **changes))


def weights_of(cfg, scale=0.1):
    return random_params(md.param_shapes(cfg), scale)


def random_batch(rows, length, fixed=0):
    """A step of one micro-batch: rows of a document, whose first `fixed` tokens are given."""
    token_ABL = jnp.asarray(np.random.default_rng(0).integers(4, 64, (1, rows, length)))
    position_ABL = jnp.broadcast_to(jnp.arange(length), token_ABL.shape)
    batch = {
        "token_ABL": token_ABL,
        "segment_ABL": jnp.ones_like(token_ABL),
        "position_ABL": position_ABL,
    }
    return batch | ({"fixed_ABL": (position_ABL < fixed).astype(int)} if fixed else {})


def first_micro_batch(batch):
    """That of a step, as its loss reads it."""
    micro = {name: x[0] for name, x in batch.items()}
    return micro | {"row_AB": jnp.arange(len(micro["token_ABL"]))}


# ---- updates -----------------------------------------------------------------------------------


def test_weight_decay_leaves_out_biases_and_norms_and_muon_has_the_layers_matrices():
    shapes = md.param_shapes(md.CONFIGS["tiny"])
    mask = checkpoints.flatten(train_dream.decays(shapes))
    assert {name.split(".")[-1] for name, decay in mask.items() if not decay} == {
        "norm", "input_layernorm", "post_attention_layernorm", "q_bias", "k_bias", "v_bias",
    }  # fmt: skip
    state = jax.eval_shape(train_dream.make_optimizer(None, muon=True).init, shapes)
    moments = {}  # of a name: Adam has two, Muon one
    for path in checkpoints.flatten(state):
        if path.split(".")[-1] in {*md.SHARDING, "norm"}:
            moments[path.split(".")[-1]] = moments.get(path.split(".")[-1], 0) + 1
    layers = md.CONFIGS["tiny"].layers
    assert {name: count for name, count in moments.items() if name in md.MATRICES} == dict.fromkeys(
        md.MATRICES, layers
    )
    assert moments["embed_tokens"] == moments["lm_head"] == moments["norm"] == 2
    assert moments["q_bias"] == 2 * layers


def test_a_step_with_lora_changes_the_adapters_alone(monkeypatch):
    monkeypatch.setattr(train_dream, "WEIGHT_DECAY", 0.5)
    base = jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights_of(TINY))
    adapters = jax.jit(lambda: md.new_adapters(jax.random.key(1), base, 2))()
    optimizer = train_dream.make_optimizer(None)
    state = {"params": adapters, "opt": jax.jit(optimizer.init)(adapters), "base": base}
    settings = train_dream.Config(lr=1e-2, steps=10, warmup=1)
    step = jax.jit(train_dream.make_step(settings, md.graph_of(TINY, md.Compute()), optimizer))
    new, metrics = step(state, random_batch(4, 16), 1)
    assert metrics["ok"]
    assert jax.tree.map(np.array_equal, new["base"], base) == jax.tree.map(lambda _: True, base)
    for old, x in zip(
        *(jax.tree.leaves(s["params"]["layers"]["0"]) for s in (state, new)), strict=True
    ):
        assert x.dtype == jnp.float32
        # B is 0 at first, so A has no gradient, and does not decay
        assert np.array_equal(x, old) == bool(old.any())


@pytest.mark.parametrize("bits", [pytest.param(8, marks=pytest.mark.slow), 4])
def test_lora_beside_few_bits_has_the_gradients_of_lora_beside_the_matrices_that_they_stand_for(
    bits,
):
    base = quantised(weights_of(TINY, 0.5), bits=bits)
    same = jax.tree.map(dense, base, is_leaf=lambda x: isinstance(x, md.Int8 | md.Int4))
    adapters = md.new_adapters(jax.random.key(1), md.param_shapes(TINY), 2)
    rng = np.random.default_rng(1)
    adapters = jax.tree.map(
        lambda x: x + 0.2 * rng.normal(size=x.shape).astype(np.float32), adapters
    )
    micro = first_micro_batch(random_batch(4, 16))
    graph = md.graph_of(TINY, md.Compute(remat="qkvo"))

    @jax.jit
    def gradients(base):
        def loss_fn(adapters):
            model = nnx.merge(graph, md.assemble(base, adapters))
            key = jax.random.key(0)
            return train_dream.nats_of(train_dream.Config(), model, micro, key, 4, 0) / 64

        return jax.value_and_grad(loss_fn)(adapters)

    (loss, got), (same_loss, want) = gradients(base), gradients(same)
    assert float(loss) == pytest.approx(float(same_loss), rel=1e-6)
    for name, x in checkpoints.flatten(want).items():
        assert np.abs(x).max() > 1e-4, name
        np.testing.assert_allclose(
            checkpoints.flatten(got)[name], x, atol=1e-5 * np.abs(x).max(), err_msg=name
        )


@pytest.mark.slow
def test_a_dream_learns_the_answers_to_eight_prompts_by_heart():
    cfg = dataclasses.replace(
        TINY, width=64, layers=2, heads=4, kv_heads=2, head_size=16, ffn=128, theta=100.0
    )
    optimizer = train_dream.make_optimizer(None)
    params = jax.jit(lambda: md.new_params(cfg, 0))()
    state = {"params": params, "opt": jax.jit(optimizer.init)(params)}
    settings = train_dream.Config(lr=1e-2, steps=1000, warmup=3)
    step = jax.jit(train_dream.make_step(settings, md.graph_of(cfg, md.Compute()), optimizer))
    batch, history = random_batch(8, 16, fixed=4), []
    for i in range(200):
        state, metrics = step(state, batch, i)
        history.append(float(metrics["loss"]))
    assert np.mean(history[:10]) > 3  # log(63) = 4.1 at first
    # 1.2 seen; one step in a few draws a small t, whose few tokens weigh a lot
    assert np.mean(history[-50:]) < 2


@pytest.mark.slow
def test_a_step_on_eight_devices_has_the_loss_of_one(code_rows):
    rows = Rows(code_rows, "train").read(np.arange(8))
    optimizer, params = train_dream.make_optimizer(None), md.new_params(DREAM, 0)
    state = {"params": params, "opt": optimizer.init(params)}
    settings = train_dream.Config(lr=1e-2, steps=10, warmup=1)
    results = []
    # two micro-batches of four rows a data x fsdp group
    for micro, shape in ((8, (1, 1, 1)), (4, (2, 2, 2))):
        columns = [jnp.asarray(x.reshape(-1, micro, 64)) for x in rows]
        batch = dict(zip(train_dream.COLUMNS, columns, strict=False))
        step = jax.jit(
            train_dream.make_step(settings, md.graph_of(DREAM, md.Compute(remat="qkvo")), optimizer)
        )
        devices, auto = (
            np.array(jax.devices()[: np.prod(shape)]).reshape(shape),
            jax.sharding.AxisType.Auto,
        )
        mesh = jax.sharding.Mesh(devices, ("data", "fsdp", "tensor"), axis_types=(auto,) * 3)
        with jax.set_mesh(mesh):
            placed = jax.device_put(state, md.shardings(mesh, state))
            rows_at = jax.NamedSharding(mesh, jax.sharding.PartitionSpec(None, md.BATCH))
            results.append(step(placed, jax.device_put(batch, rows_at), 1))
    (one, first), (many, second) = results
    assert float(first["loss"]) == pytest.approx(float(second["loss"]), rel=1e-5)
    assert float(first["grad_norm"]) == pytest.approx(float(second["grad_norm"]), rel=1e-4)
    # moments: the gradients
    for a, b in zip(jax.tree.leaves(one["opt"]), jax.tree.leaves(many["opt"]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * np.abs(a).max())


# ---- blocks ------------------------------------------------------------------------------------


def architecture(model, **settings):
    """The architecture of these flags, of a preset."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(md.CONFIGS, "test", model)
        return train_dream.architecture(train_dream.Config(model="test", **settings))


def loss_in_blocks(params, batch, **settings):
    """The loss of the first step of TINY with these settings, in nats."""
    cfg = train_dream.Config(**settings)
    graph = md.graph_of(architecture(TINY, **settings), md.Compute())
    micro = first_micro_batch(batch)

    @jax.jit
    def nats(params):
        model, rows = nnx.merge(graph, params), len(micro["token_ABL"])
        return train_dream.nats_of(cfg, model, micro, jax.random.key(0), rows, 0)

    return float(nats(params))


def test_blocks_of_one_token_train_as_an_autoregressive_model_and_a_block_as_long_as_the_row_as_none():
    params, batch, position_L = (
        weights_of(TINY),
        random_batch(2, 16),
        jnp.array([*range(9), *range(5), 0, 0]),
    )
    packed = batch | {
        "segment_ABL": jnp.tile(jnp.array([1] * 9 + [2] * 5 + [0] * 2), (1, 2, 1)),
        "position_ABL": jnp.tile(position_L, (1, 2, 1)),
        "fixed_ABL": jnp.tile((position_L < 2).astype(int), (1, 2, 1)),
    }
    ar = loss_in_blocks(params, packed, objective="ar")
    # The first step of a warm-up has blocks of one, all masked.
    grown = loss_in_blocks(params, packed, block_length=8, block_warmup=9)
    assert grown == pytest.approx(ar, rel=1e-5)
    none, all_of_it = (loss_in_blocks(params, batch, **s) for s in ({}, {"block_length": 16}))
    assert all_of_it == pytest.approx(none, rel=1e-5)
    assert abs(none - ar) > 1e-3


def test_settings_of_blocks_that_do_not_go_together_are_one_line():
    for changes, part in (
        ({"block_length": 4, "objective": "ar"}, "has no settings of blocks"),
        ({"block_warmup": 5}, "needs --block_length"),
        ({"block_length": 4, "anneal_steps": 9}, "without --anneal_steps"),
    ):
        with pytest.raises(ValueError, match=part):
            architecture(DREAM, **changes)
    # from an autoregressive model to two-way attention
    assert architecture(dataclasses.replace(DREAM, block_length=1), anneal_steps=9) == DREAM


@pytest.mark.slow
def test_an_autoregressive_run_goes_on_in_blocks_without_a_jump_and_generate_writes_with_it(
    code_rows, one_device, tmp_path, capsys
):
    ar, blocks, common = tmp_path / "ar", tmp_path / "blocks", {"steps": 60, "eval_every": 30}
    train(code_rows, ar, objective="ar", **common)
    assert checkpoints.load(md, ar)[0].cfg.block_length == 1
    recipe = {"block_length": 4, "block_warmup": 20}
    train(code_rows, blocks, init=str(ar), **recipe, **common)
    assert checkpoints.load(md, blocks)[0].cfg.block_length == 4
    before = np.mean([loss for loss, _ in losses(ar).values()][-5:])
    assert losses(blocks)[1][0] == pytest.approx(before, abs=0.3)  # log(600) = 6.4 at first
    assert (blocks / "samples.txt").read_text().count("---- step") == 2
    # small blocks have an exact score, so --eval_only says what the trainer logged
    for folder in (ar, blocks):
        logged = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        scores = train_dream.main(evaluation(train_dream, folder, eval_rows=8))
        assert scores["bits_per_byte"] == pytest.approx(logged[-1]["bits_per_byte"], rel=1e-5)
        assert scores["standard_error"] == 0
    capsys.readouterr()
    generate_dream.main(
        generate_dream.Config(str(blocks), prompt="def area(", max_new=12, devices=1, threshold=0.1)
    )
    out, err = capsys.readouterr()
    assert out.startswith("def area(")
    assert len(out.strip()) > len("def area(")
    assert "forward passes" in err


@pytest.mark.slow
def test_the_loss_of_blocks_is_in_the_mean_their_exact_bound():
    cfg = dataclasses.replace(TINY, width=32, heads=4, kv_heads=2, ffn=48, block_length=4)
    B, position_L = 64, jnp.array([*range(7), *range(4), 0])
    token_BL = jnp.tile(jnp.asarray(np.random.default_rng(0).integers(4, 64, 12)), (B, 1))
    segment_BL, position_BL = (
        jnp.tile(x, (B, 1)) for x in (jnp.array([1] * 7 + [2] * 4 + [0]), position_L)
    )
    model = nnx.merge(
        md.graph_of(cfg, md.Compute()), jax.tree.map(lambda x: 3 * x, md.new_params(cfg, 0))
    )
    counted_BL = md.counted(segment_BL).at[:, :2].set(False)
    row = token_BL, segment_BL, position_BL
    exact = float(jax.jit(lambda model: model.exact_nll(*row, ~counted_BL).sum())(model))

    columns = {"token_ABL": row[0], "segment_ABL": row[1], "position_ABL": row[2]}
    micro = columns | {"fixed_ABL": (~counted_BL).astype(int), "row_AB": jnp.arange(B)}

    @jax.jit
    def nats(key):
        return train_dream.nats_of(train_dream.Config(), model, micro, key, B, 0)

    draws = [float(nats(jax.random.key(i))) for i in range(40)]
    value, error = np.mean(draws), np.std(draws) / 40**0.5
    assert abs(value - exact) < 4 * error < 0.1 * exact


@pytest.mark.slow
def test_a_causal_context_has_the_loss_of_blocks_behind_clean_text_and_that_of_the_text(
    monkeypatch,
):
    """Against a pass for each block: the clean tokens before it, causal, and the block noised, both
    ways.
    """
    cfg, rng, L = (
        dataclasses.replace(TINY, block_length=4, causal=True),
        np.random.default_rng(0),
        16,
    )
    segment_BL = np.array([[1] * 9 + [2] * 5 + [0] * 2, [1] * 16])
    position_BL = np.array([[*range(9), *range(5), 0, 0], [*range(16)]])
    token_BL, u_BL = rng.integers(4, 64, (2, L)), rng.random((2, L))
    key = jax.random.key(0)
    offset_B1 = np.asarray(jax.random.randint(jax.random.fold_in(key, 2), (2, 1), 0, 4))
    counted_BL = (segment_BL > 0) & (position_BL > 0)
    model = nnx.merge(md.graph_of(cfg, md.Compute()), weights_of(cfg, 0.4))
    t = 1e-3 + (1 - 1e-3) * 0.5
    mask_BL = counted_BL & (u_BL < t)

    @jax.jit
    def log_p(model, token_L, block_L, document_L):
        place = diffusion.Place(document_L[None], block_L[None])
        logits_LV = model.logits(model.hidden(token_L[None], jnp.arange(L)[None], place=place)[0])[
            0
        ]
        return jax.nn.log_softmax(logits_LV.at[:, cfg.mask_id].set(-jnp.inf))

    def of_text(token_N, block_N):
        """log p [N, V] of a text of N tokens, padded to the length of all."""
        pad = (0, L - len(token_N))
        return np.asarray(
            log_p(
                model,
                np.pad(token_N, pad),
                np.pad(block_N, pad),
                np.pad(np.ones_like(token_N), pad),
            )
        )

    nats = ar_nats = 0.0
    for row, segment in ((0, 1), (0, 2), (1, 1)):
        here = np.flatnonzero(segment_BL[row] == segment)
        token_N, masked_N = token_BL[row, here], mask_BL[row, here]
        causal = of_text(token_N, np.arange(len(here)))
        ar_nats -= sum(causal[p - 1, token_N[p]] for p in range(1, len(here)))
        block_N = (np.arange(len(here)) + offset_B1[row]) // 4
        for block in np.unique(block_N):
            begin, end = np.flatnonzero(block_N == block)[[0, -1]] + [0, 1]
            noised_N = np.where(masked_N & (block_N == block), cfg.mask_id, token_N)[:end]
            found = of_text(noised_N, np.minimum(np.arange(end), begin))
            for p in np.flatnonzero(masked_N[:end] & (block_N[:end] == block)):
                nats -= (causal if p == begin else found)[p - 1, token_N[p]] / t

    def noise(key, rows, row_B, part_BL, eps):
        assert len(np.unique(np.asarray(part_BL)[0, :9])) == 3  # two blocks hold at most 8 tokens
        return jnp.full((2, L), 0.5), jnp.asarray(u_BL)

    monkeypatch.setattr(md, "noise", noise)
    names = "token_ABL", "segment_ABL", "position_ABL", "fixed_ABL"
    columns = token_BL, segment_BL, position_BL, (~counted_BL).astype(int)
    micro = dict(zip(names, map(jnp.asarray, columns), strict=True))
    micro["row_AB"] = jnp.arange(2)

    def loss():
        return float(train_dream.nats_of(train_dream.Config(), model, micro, key, 2, 0))

    both, weight = loss(), train_dream.AR_WEIGHT
    monkeypatch.setattr(train_dream, "AR_WEIGHT", 0.0)
    assert loss() == pytest.approx(nats, rel=1e-5)
    assert both - loss() == pytest.approx(weight * ar_nats, rel=1e-4)


# ---- from a model: --init, pairs, LoRA ---------------------------------------------------------


@pytest.mark.slow
def test_a_model_that_is_there_reads_the_standard_library_with_its_own_tokenizer(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    common = ("--seq_len=64", "--batch_size=8", "--steps=2", "--eval_rows=8")
    for more in (
        ("--objective=ar", "--out=ar"),
        ("--init=ar", "--block_length=4", "--block_warmup=1", "--out=blocks"),
    ):
        result = run("train_dream.py", *common, *more, timeout=600)
        assert result.returncode == 0, result.stderr
    assert (tmp_path / "ar/tokenizer.json").read_bytes() == (
        tmp_path / "blocks/tokenizer.json"
    ).read_bytes()


def pair_rows(folder, tokenizer, lines):
    """A folder of rows of 64 tokens of these pairs."""
    folder.mkdir(exist_ok=True)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = {
        "source": str(folder / "pairs.jsonl"),
        "tokenizer": str(tokenizer),
        "seq_len": 64,
        "workers": 1,
    }
    data_prep.main(data_prep.Pairs(out=str(folder / "rows"), heldout=0.1, **common))
    return folder / "rows"


@pytest.fixture(scope="module")
def pairs(code_rows, tmp_path_factory):
    """Rows of prompts and responses."""
    lines = [
        {"prompt": f"copy {n}: ", "response": str(n)}
        for n in np.random.default_rng(0).integers(0, 10**6, 300)
    ]
    return pair_rows(tmp_path_factory.mktemp("pairs"), code_rows / "tokenizer.json", lines)


def save_start(folder, data):
    """A Dream far from a fresh one, in bfloat16, with the tokenizer of the data: (folder,
    config).
    """
    meta = Rows(data, "train").meta
    ids = dict.fromkeys(("pad_id", "bos_id", "eos_id"), meta["eos_id"])
    ids["mask_id"] = meta["vocab_size"]
    cfg = dataclasses.replace(DREAM, **ids)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights_of(cfg, 0.5))
    (folder.parent / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    (folder.parent / "vocab.json").write_text("{}")
    files = [
        data / "tokenizer.json",
        *(folder.parent / name for name in ("tokenizer_config.json", "vocab.json")),
    ]
    checkpoints.save(
        md, folder, nnx.merge(md.graph_of(cfg, md.Compute()), params), files, source="a/b"
    )
    return str(folder), cfg


def first_loss(cfg, folder, data):
    """The loss of the first step of a run over a folder of rows, computed from the model alone."""
    params = nnx.to_pure_dict(nnx.state(checkpoints.load(md, folder, dtype=jnp.float32)[0]))
    rows = Rows(data, "train")
    token_BL, segment_BL, position_BL, *fixed = map(jnp.asarray, rows.read(rows.order(0, 0)[:8]))

    @jax.jit
    def nats(params):
        t_BL, u_BL = md.noise(
            jax.random.fold_in(jax.random.key(0), 0), 8, jnp.arange(8), segment_BL
        )
        model = nnx.merge(md.graph_of(cfg, md.Compute()), params)
        return model.nelbo(token_BL, segment_BL, position_BL, t_BL, u_BL, *fixed)

    return float(nats(params) / md.counted(segment_BL, *fixed).sum())


def test_bad_input_is_one_line(code_rows, one_device, tmp_path):
    new = tmp_path / "new"
    start, _ = save_start(tmp_path / "start", code_rows)
    assert "does not exist" in refused(code_rows, new, init=str(tmp_path / "none"))
    assert "leave --model=tiny out" in refused(code_rows, new, init="x", model="tiny")
    for wrong in (
        {"lora_rank": 2},
        {"init": start, "base_bits": 8},
        {"init": start, "lora_rank": 2, "optimizer": "muon"},
    ):
        assert "goes with --lora_rank, which goes with --init" in refused(code_rows, new, **wrong)
    said = refused(with_other_tokenizer(code_rows, tmp_path / "other"), new, init=start)
    assert "have other ids than in" in said
    assert said.endswith(f"--tokenizer={start}/tokenizer.json --eos='<|endoftext|>'")
    assert not new.exists()


def test_without_data_rows_get_the_tokenizer_and_the_end_token_of_init(
    code_rows, tmp_path, monkeypatch
):
    start, _ = save_start(tmp_path / "start", code_rows)
    keys = runs.read_json(tmp_path / "start/config.json")
    other = runs.read_tokenizer(start).token_to_id("<|fim_prefix|>")
    runs.write(tmp_path / "start/config.json", keys | {"eos_token_id": other})
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(runs, "script", lambda *command: asked.append(command))
    said = refusal(train_dream, train_dream.Config(init=start, out="run"))
    assert "data/python-64-" in said
    (command,) = asked
    assert command[:2] == ("data_prep.py", "python")
    assert {f"--tokenizer={start}/tokenizer.json", "--eos=<|fim_prefix|>", "--seq_len=64"} <= {
        *command
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["documents", "pairs"])
def test_init_starts_at_the_loss_of_the_checkpoint(kind, code_rows, pairs, one_device, tmp_path):
    data, before = code_rows if kind == "documents" else pairs, tmp_path / "start"
    _, cfg = save_start(before, data)
    for name in ("run", "next"):  # from a converted model, and from a run
        train(data, tmp_path / name, init=str(before))
        assert losses(tmp_path / name)[1][0] == pytest.approx(
            first_loss(cfg, before, data), rel=1e-4
        )
        assert checkpoints.load(md, tmp_path / name)[0].cfg == cfg
        before = tmp_path / name


@pytest.mark.slow
def test_an_autoregressive_run_is_annealed_to_one_that_fills_masks_and_can_be_resumed(
    code_rows, one_device, tmp_path
):
    out, copy = tmp_path / "whole", tmp_path / "copy"
    train(code_rows, tmp_path / "ar", objective="ar")
    train(code_rows, out, init=str(tmp_path / "ar"), anneal_steps=2)
    assert checkpoints.load(md, out)[0].cfg.block_length == 0
    shutil.copytree(out, copy)
    shutil.rmtree(copy / "checkpoints/4")
    train_dream.main(resumed(train_dream, copy))
    assert losses(copy) == losses(out)


@pytest.mark.slow
@pytest.mark.parametrize(("block", "bits"), [(0, 0), (4, 0), (0, 8), (4, 4)])
def test_lora_trains_adapters_beside_frozen_weights_and_merges_them(
    pairs, one_device, monkeypatch, tmp_path, capsys, block, bits
):
    monkeypatch.setattr(train_dream, "WEIGHT_DECAY", 0.5)
    out, copy = (tmp_path / name for name in ("run", "copy"))
    start, cfg = save_start(tmp_path / "start", pairs)
    lora = {"lora_rank": 2, "base_bits": bits}
    train(pairs, out, init=start, block_length=block, **lora)
    assert re.search("LoRA rank 2.*copy ", capsys.readouterr().out, re.DOTALL)  # the data's prompt
    if not block and not bits:  # nothing has changed yet
        assert losses(out)[1][0] == pytest.approx(first_loss(cfg, start, pairs), rel=1e-4)
    assert checkpoints.load(md, out / "merged")[0].cfg.block_length == block
    saved = checkpoints.Checkpoints(out).meta()["sums"]
    assert sum(name.startswith("adapters.") for name in saved) == 2 * 7 * DREAM.layers
    assert not any(name.startswith(("params.", "base.")) for name in saved)

    # What is not in its targets stays, bit for bit; what is has a difference of rank 2, from the
    # weights in full.
    before, after = (
        checkpoints.load(md, folder, dtype=jnp.float32)[0] for folder in (start, out / "merged")
    )
    flat = [checkpoints.flatten(nnx.to_pure_dict(nnx.state(model))) for model in (before, after)]
    before, after = flat
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {f"layers.{i}.{name}" for i in range(DREAM.layers) for name in md.MATRICES}
    assert all(np.linalg.matrix_rank(after[name] - before[name], tol=1e-5) <= 2 for name in changed)
    # what it was made of, and how it chats
    assert runs.read_json(out / "merged/config.json")["source"] == "a/b"
    assert {"tokenizer.json", "tokenizer_config.json", "vocab.json"} <= set(
        os.listdir(out / "merged")
    )

    # Another run goes on where this one ended.
    if not block and not bits:
        train(pairs, tmp_path / "more", init=str(out / "merged"), lora_rank=2, steps=1)
        assert losses(tmp_path / "more")[1][0] == pytest.approx(
            first_loss(cfg, out / "merged", pairs), rel=1e-4
        )

    # A run that was stopped goes on as if it had not been, beside the same weights alone.
    shutil.copytree(out, copy)
    shutil.rmtree(copy / "checkpoints/4")
    train_dream.main(resumed(train_dream, copy))
    assert losses(copy) == losses(out)
    again = checkpoints.flatten(
        nnx.to_pure_dict(nnx.state(checkpoints.load(md, copy / "merged")[0]))
    )
    assert all(np.array_equal(again[name], after[name]) for name in after)
    assert "the whole model is in" in refusal(train_dream, evaluation(train_dream, out))
    with pytest.raises(
        ValueError, match=r"holds what LoRA learnt; the whole model is in .*run/merged"
    ):
        checkpoints.load(md, out)
    for said, changes in {
        "--lora_rank 2 there, 3 here": {"lora_rank": 3},
        f"block_length {block} there, 8 here": {"block_length": 8},
        "began with other weights": {"init": str(out / "merged")},
    }.items():
        assert said in refusal(train_dream, resumed(train_dream, copy, **changes))


@pytest.mark.parametrize("bits", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_the_merged_model_is_scored_beside_the_run(
    pairs, one_device, tmp_path, capsys, bits, monkeypatch
):
    out, lora = tmp_path / "run", {"lora_rank": 2, "base_bits": bits}
    start, _ = save_start(tmp_path / "start", pairs)
    train(pairs, out, init=start, steps=1, **lora)
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    trained, merged = rows[-1]["heldout_nats"], rows[-1]["merged_nats"]
    assert trained == [row for row in rows if "heldout_nats" in row][-2]["heldout_nats"]
    cfg = evaluation(train_dream, out / "merged", data=str(pairs))
    kept = train_dream.evaluate(cfg, draws=4)["heldout_nats"]
    assert merged == pytest.approx(kept, rel=1e-6)
    # the same model and the same noise, but for the rounding of the base in few bits
    assert abs(merged - trained) < 1e-5 if not bits else abs(merged - trained) > 1e-4
    capsys.readouterr()

    # A finished run is merged again. Where merged/ does not fit, the run has ended well all the same.
    monkeypatch.setattr(checkpoints, "bytes_needed", lambda *_: 1e18)
    train_dream.main(resumed(train_dream, out))
    assert "merged is not scored: " in capsys.readouterr().out


def test_what_does_not_fit_is_refused_before_a_weight_is_read(
    code_rows, one_device, tmp_path, monkeypatch
):
    start, cfg = save_start(tmp_path / "start", code_rows)
    params = md.count_params(cfg)
    adapters = 16 * sum(
        sum(x.shape) for x in jax.tree.leaves(md.param_shapes(cfg)["layers"]) if x.ndim == 2
    )
    # weights, two moments, gradients; a counter
    full, lora = 16 * params + 4, 4 * params + 16 * adapters + 4
    matrices = [x.shape for x in jax.tree.leaves(md.param_shapes(cfg)) if x.ndim == 2]
    # a byte each, a scale per row
    int8 = lora + sum(4 * rows - 3 * rows * columns for rows, columns in matrices)
    free = [full - 1]
    monkeypatch.setattr(checkpoints, "free_bytes", lambda _: free[0])
    monkeypatch.setattr(checkpoints, "load", None)
    said = refused(code_rows, tmp_path / "a", init=start)
    assert said.startswith(
        f"weights, moments and gradients take {full / 1e9:.3g} GB on each device, where "
    )
    eight = f"--lora_rank=16 --base_bits=8 takes {int8 / 1e9:.3g}"
    assert (
        f"; --lora_rank=16 takes {lora / 1e9:.3g} or {eight} or --lora_rank=16 --base_bits=4 takes "
        in said
    )
    free[0] = lora - 1
    said = refused(code_rows, tmp_path / "a", init=start, lora_rank=16)
    assert f"are free; --base_bits=8 takes {int8 / 1e9:.3g} or --base_bits=4 takes " in said
    free[0] = int8 - 1
    said = refused(code_rows, tmp_path / "a", init=start, lora_rank=16, base_bits=8)
    assert "are free; --base_bits=4 takes " in said
    free[0] = 1
    for lora in ({}, {"lora_rank": 16}, {"lora_rank": 16, "base_bits": 4}):
        said = refused(code_rows, tmp_path / "a", init=start, **lora)
        assert "a smaller model, more devices" in said
    assert "a smaller model, more devices" in refused(code_rows, tmp_path / "a")
    assert not (tmp_path / "a").exists()


# ---- bounds ------------------------------------------------------------------------------------


def spread_rows(folder, count):
    rows = Rows(folder, "heldout")
    assert rows.total > count  # else all rows would be these
    return rows.read(rows.spread(count))


def new_model(folder, data, size, **changes):
    """A Dream saved as convert_weights.py saves one: (folder, model). Its last norm has this size:
    0 knows nothing.
    """
    tokenizer = tokenizers.Tokenizer.from_file(str(data / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|mask|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    mask_id, eos_id = tokenizer.token_to_id("<|mask|>"), Rows(data, "heldout").meta["eos_id"]
    cfg = dataclasses.replace(DREAM, width=16, ffn=16, mask_id=mask_id, eos_id=eos_id, **changes)
    params = weights_of(cfg)
    model = nnx.merge(
        md.graph_of(cfg, md.Compute()), params | {"norm": jnp.full_like(params["norm"], size)}
    )
    checkpoints.save(md, folder / "model", model, [folder / "tokenizer.json"])
    return folder / "model", model


def test_a_model_that_knows_nothing_pays_log_vocab_for_every_masked_token(
    code_rows, one_device, tmp_path
):
    folder, _ = new_model(tmp_path, code_rows, 0)
    scores = train_dream.main(evaluation(train_dream, folder, data=str(code_rows), eval_rows=20))
    # -log p is log(V - 1), MASK aside, at each masked token, whose weight is 1 / t
    token_RL, segment_RL, _ = spread_rows(code_rows, 20)
    # in each draw another row has the lowest time
    order = functools.partial(jax.random.permutation, x=20)
    noise = jax.jit(
        lambda draw: md.noise(jax.random.key(draw), 20, order(jax.random.key(8 + draw)), segment_RL)
    )
    noises = (map(np.asarray, noise(draw)) for draw in range(8))
    nats_N = [
        (((u_RL < t_RL) & (segment_RL > 0)) / t_RL).sum() * np.log(639) for t_RL, u_RL in noises
    ]
    tokens = (segment_RL > 0).sum()
    assert scores["heldout_nats"] == pytest.approx(np.mean(nats_N) / tokens, rel=1e-5)
    tokenizer = runs.read_tokenizer(folder)
    text_bytes = sum(len(tokenizer.decode([i]).encode()) for i in token_RL[segment_RL > 0].tolist())
    bits = np.array(nats_N) / np.log(2) / text_bytes
    assert scores["bits_per_byte"] == pytest.approx(np.mean(bits), rel=1e-2)
    assert scores["standard_error"] == pytest.approx(np.std(bits, ddof=1) / 8**0.5, rel=1e-2)
    assert scores["bits_per_byte"] == pytest.approx(
        np.log2(639) * tokens / text_bytes, abs=4 * scores["standard_error"]
    )


@pytest.mark.parametrize("block", [1, 2])
def test_small_blocks_are_scored_without_a_draw(code_rows, one_device, tmp_path, block):
    folder, model = new_model(tmp_path, code_rows, 3, block_length=block)
    scores = train_dream.main(evaluation(train_dream, folder, data=str(code_rows), eval_rows=5))
    token_RL, segment_RL, position_RL = spread_rows(code_rows, 5)
    counted_RL = segment_RL > 0

    @jax.jit
    def nats(mask_RL):
        return model.nll(token_RL, mask_RL, segment_RL, position_RL, block).sum()

    if block == 1:  # all masked: each token behind those before it
        want = nats(counted_RL)
    else:  # a token masked alone counts half, and so does each of two; the last one of a document may have no other
        odd_RL = counted_RL & (position_RL % 2 == 1)
        single_RL = counted_RL & ~odd_RL & ~np.roll(odd_RL, -1, 1)
        even_RL = counted_RL & ~odd_RL & ~single_RL
        want = (nats(odd_RL) + nats(even_RL) + nats(odd_RL | even_RL)) / 2 + nats(single_RL)
    assert scores["heldout_nats"] == pytest.approx(float(want) / counted_RL.sum(), rel=1e-5)
    assert scores["heldout_nats"] > np.log(639) + 0.1
    assert scores["standard_error"] == 0
