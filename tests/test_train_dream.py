"""train_dream.py: gradients, blocks, --init, LoRA, resuming, --eval_only, hosts, what it
says of bad input.
"""

import dataclasses
import functools
import json
import math
import os
import re
import shutil
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tokenizers
from conftest import (
    command,
    kill_and_resume,
    losses,
    refusal,
    resumed,
    run,
    scored_rows,
    two_hosts,
    use_one_device,
    wait_for_step,
    with_other_tokenizer,
)
from flax import nnx
from test_model_dream import dense, quantised

import checkpoints
import data_prep
import diffusion
import generate_dream
import model_dream as md
import runs
import train_dream
import train_tpu
from rows import Rows

DREAM = md.DreamConfig(
    640,
    32,
    layers=1,
    heads=2,
    kv_heads=1,
    head_size=16,
    ffn=64,
    positions=64,
    mask_id=3,
    pad_id=0,
    bos_id=0,
    eos_id=0,
)
TINY = md.DreamConfig(64, 16, 1, 2, 1, 8, 24, mask_id=3, pad_id=0, bos_id=0, eos_id=0, positions=64)


def flags(data, out, *more):
    """A run of the tiny preset from the shell."""
    folders = f"--data={data}", f"--out={out}", f"--compile_cache={Path(data).parent / 'cache'}"
    return "train_dream.py", *folders, "--seq_len=64", "--batch_size=8", "--log_every=1", *more


def config(data, out, **changes):
    """A run of DREAM in this process, or of --init; all that have the same columns compile the same
    step.
    """
    settings = {
        "data": str(data),
        "out": str(out),
        "compile_cache": str(Path(data).parent / "cache"),
    }
    settings |= {
        "model": "" if changes.get("init") else "dream_test",
        "seq_len": 64,
        "batch_size": 8,
        "steps": 4,
    }
    settings |= {
        "lr": 3e-3,
        "warmup": 1,
        "optimizer": "adamw",
        "log_every": 1,
        "eval_every": 2,
        "eval_rows": 8,
    }
    return train_dream.Config(**settings | changes)


@pytest.fixture
def one_device(monkeypatch):
    use_one_device(monkeypatch, train_dream, md.CONFIGS, "dream_test", DREAM)
    monkeypatch.setitem(train_dream.MICRO_BATCH, "init", 4)


def random_params(cfg, scale=0.1):
    """Weights of a Dream, drawn by NumPy: nothing to compile."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda s: jnp.asarray(scale * rng.normal(size=s.shape), s.dtype), md.param_shapes(cfg)
    )


def random_batch(rows, length, fixed=0):
    """A step of one micro-batch: rows of one document, of whose tokens the first `fixed` are
    given.
    """
    token_ABL = jnp.asarray(np.random.default_rng(0).integers(4, 64, (1, rows, length)))
    position_ABL = jnp.broadcast_to(jnp.arange(length), token_ABL.shape)
    batch = {
        "token_ABL": token_ABL,
        "segment_ABL": jnp.ones_like(token_ABL),
        "position_ABL": position_ABL,
    }
    return batch | ({"fixed_ABL": (position_ABL < fixed).astype(int)} if fixed else {})


# ---- gradients and updates -------------------------------------------------------------------------------------------


@pytest.mark.golden
def test_the_schedule_is_that_of_train_tpu_and_of_the_golden_steps(golden_dir):
    for case in json.loads((golden_dir("pythoncoder") / "wsd.json").read_text())["cases"]:
        shape = [case[k] for k in ("warmup_steps", "stable_ratio", "start_ratio", "final_ratio")]
        got = train_dream.wsd(
            np.array(list(map(int, case["lr"]))), case["peak"], case["total_steps"], *shape
        )
        np.testing.assert_allclose(got, list(case["lr"].values()), rtol=2e-5, err_msg=str(case))
    step = np.arange(-1, 12_000, 7)
    for settings in (
        (1e-3, 10_000),
        (3e-4, 10_000, 0),
        (1.0, 3, 1),
        (2e-3, 9_000, 500, 0.5, 0.2, 0.0),
    ):
        assert (train_dream.wsd(step, *settings) == train_tpu.wsd(step, *settings)).all()


@pytest.mark.golden
def test_three_updates_from_uneven_micro_batches(golden_dir):
    folder = golden_dir("pythoncoder")
    settings, arrays = (
        json.loads((folder / "grad_accum.json").read_text()),
        np.load(folder / "grad_accum.npz"),
    )
    hyper = settings["hyper"]
    optimizer = train_dream.make_optimizer(
        hyper["clip"], hyper["weight_decay"], mask=settings["decay"]
    )
    params = {"W": jnp.asarray(arrays["W0"]), "scale": jnp.asarray(arrays["scale0"])}
    state = {"params": params, "opt": optimizer.init(params)}

    @jax.jit
    def update(state, x, y, mask):
        def loss_fn(params, batch):
            logits = (batch["x"] * params["scale"]) @ params["W"]
            nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
            return (nll * batch["mask"]).sum() / mask.sum()

        grads, loss = train_dream.accumulate(
            loss_fn, state["params"], {"x": x, "y": y, "mask": mask}
        )
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = jax.tree.map(lambda p, u: p + hyper["lr"] * u, state["params"], updates)
        return {"params": params, "opt": opt}, loss, optax.tree.norm(grads)

    for i, want in enumerate(settings["steps"]):
        state, loss, norm = update(state, *(jnp.asarray(arrays[k][i]) for k in ("x", "y", "mask")))
        assert float(loss) == pytest.approx(want["loss"], rel=1e-5)
        assert float(norm) == pytest.approx(want["grad_norm"], rel=1e-5)
    moments = state["opt"][1][0]
    got = {**state["params"], "mu_W": moments.mu["W"], "nu_W": moments.nu["W"]}
    for name, value in got.items():
        np.testing.assert_allclose(
            value, arrays[name], rtol=1e-5, atol=1e-5 * np.abs(arrays[name]).max(), err_msg=name
        )


def test_a_step_without_finite_gradient_changes_nothing():
    optimizer, row_11L = train_dream.make_optimizer(1.0, 0.1), jnp.arange(8)[None, None]
    model = nnx.to_pure_dict(nnx.state(md.Dream(TINY, nnx.Rngs(0))))
    batch = {"token_ABL": row_11L, "segment_ABL": jnp.ones_like(row_11L), "position_ABL": row_11L}
    step = jax.jit(
        train_dream.make_step(
            train_dream.Config(lr=0.1, steps=9), md.graph_of(TINY, md.Compute()), optimizer
        )
    )
    for size, finite in ((1.0, True), (3e38, False)):
        params = model | {"norm": jnp.full(TINY.width, size)}
        state = {"params": params, "opt": optimizer.init(params), "base": {}}
        new, metrics = step(state, batch, 3)
        assert metrics["ok"] == finite
        same = jax.tree.map(lambda a, b: bool((a == b).all()), state, new)
        assert jax.tree.all(same) == (not finite)


def test_weight_decay_leaves_out_biases_and_norms_and_muon_has_the_layers_matrices():
    shapes = md.param_shapes(md.CONFIGS["tiny"])
    mask = checkpoints.flatten(train_dream.decays(shapes))
    assert {name.split(".")[-1] for name, decay in mask.items() if not decay} == {
        "norm", "input_layernorm", "post_attention_layernorm", "q_bias", "k_bias", "v_bias",
    }  # fmt: skip
    state = jax.eval_shape(train_dream.make_optimizer(1.0, 0.1, muon=True).init, shapes)
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


def test_a_step_with_lora_changes_the_adapters_alone():
    base = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_params(TINY))
    adapters = jax.jit(lambda: md.new_adapters(jax.random.key(1), base, 2))()
    optimizer = train_dream.make_optimizer(1.0, 0.5)
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
    base = quantised(random_params(TINY, 0.5), bits=bits)
    same = jax.tree.map(dense, base, is_leaf=lambda x: isinstance(x, md.Int8 | md.Int4))
    adapters = md.new_adapters(jax.random.key(1), md.param_shapes(TINY), 2)
    rng = np.random.default_rng(1)
    adapters = jax.tree.map(
        lambda x: x + 0.2 * rng.normal(size=x.shape).astype(np.float32), adapters
    )
    batch = random_batch(4, 16) | {"row_AB": jnp.arange(4)[None]}
    graph, key = md.graph_of(TINY, md.Compute(remat="qkvo")), jax.random.key(0)

    def gradients(base):
        loss_fn = train_dream.loss_of_step(train_dream.Config(), graph, batch, key, 0, base)
        micro = {name: x[0] for name, x in batch.items()}
        return jax.jit(jax.value_and_grad(loss_fn))(adapters, micro)

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
    optimizer, params = (
        train_dream.make_optimizer(1.0, 0.0),
        jax.jit(lambda: md.new_params(cfg, 0))(),
    )
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
    optimizer, params = train_dream.make_optimizer(1.0, 0.1), md.new_params(DREAM, 0)
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


# ---- blocks ----------------------------------------------------------------------------------------------------------


def loss_in_blocks(params, batch, objective="diffusion", **settings):
    """The loss of the first step of TINY with these settings of blocks."""
    cfg = train_dream.Config(objective=objective, **settings)
    graph, micro = (
        md.graph_of(train_dream.with_blocks(cfg, TINY), md.Compute()),
        {k: x[0] for k, x in batch.items()},
    )
    loss_fn = train_dream.loss_of_step(cfg, graph, batch, jax.random.key(0), step=0, base={})
    return float(jax.jit(loss_fn)(params, micro | {"row_AB": jnp.arange(len(micro["token_ABL"]))}))


def test_blocks_of_one_token_train_as_an_autoregressive_model_and_a_block_as_long_as_the_row_as_none():
    params, batch, position_L = (
        random_params(TINY),
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
        ({"block_length": 4, "schedule": "cosine"}, "blocks go with the linear --schedule"),
        ({"block_length": 4, "anneal_steps": 9}, "without --anneal_steps"),
    ):
        with pytest.raises(ValueError, match=part):
            train_dream.with_blocks(train_dream.Config(**changes), DREAM)
    cfg = train_dream.Config(anneal_steps=9)  # from an autoregressive model to two-way attention
    assert train_dream.with_blocks(cfg, dataclasses.replace(DREAM, block_length=1)) == DREAM


@pytest.mark.slow
def test_an_autoregressive_run_goes_on_in_blocks_without_a_jump_and_generate_writes_with_it(
    code_rows, one_device, tmp_path, capsys
):
    ar, blocks, common = tmp_path / "ar", tmp_path / "blocks", {"steps": 60, "eval_every": 30}
    train_dream.main(config(code_rows, ar, objective="ar", **common))
    assert checkpoints.load(md, ar)[0].cfg.block_length == 1
    recipe = {"block_length": 4, "block_warmup": 20}
    train_dream.main(config(code_rows, blocks, init=str(ar), **recipe, **common))
    assert checkpoints.load(md, blocks)[0].cfg.block_length == 4
    before = np.mean([loss for loss, _ in losses(ar).values()][-5:])
    assert losses(blocks)[1][0] == pytest.approx(before, abs=0.3)  # log(600) = 6.4 at first
    assert (blocks / "samples.txt").read_text().count("---- step") == 2
    # small blocks have an exact score, so --eval_only says what the trainer logged
    for folder in (ar, blocks):
        logged = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        scores = train_dream.main(evaluation(folder, eval_rows=8))
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

    @jax.jit
    def nats(key):
        noise = functools.partial(md.noise, key, B, jnp.arange(B))
        return train_dream.block_nats(train_dream.Config(), model, 0, *row, counted_BL, noise)

    draws = [float(nats(jax.random.key(i))) for i in range(40)]
    value, error = np.mean(draws), np.std(draws) / 40**0.5
    assert abs(value - exact) < 4 * error < 0.1 * exact


@pytest.mark.slow
def test_a_causal_context_has_the_loss_of_blocks_behind_clean_text_and_that_of_the_text():
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
    token_BL, u_BL, offset_B1 = (
        rng.integers(4, 64, (2, L)),
        rng.random((2, L)),
        np.array([[3], [1]]),
    )
    counted_BL = (segment_BL > 0) & (position_BL > 0)
    model = nnx.merge(md.graph_of(cfg, md.Compute()), random_params(cfg, 0.4))
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

    def noise(part_BL, eps):
        assert len(np.unique(np.asarray(part_BL)[0, :9])) == 3  # 1, 4 and 4 tokens
        return jnp.full((2, L), 0.5), jnp.asarray(u_BL)

    given = map(jnp.asarray, (token_BL, segment_BL, position_BL, counted_BL))
    cfg = train_dream.Config()
    got = float(train_dream.block_nats(cfg, model, 0, *given, noise, jnp.asarray(offset_B1)))
    assert got == pytest.approx(nats + train_dream.AR_WEIGHT * ar_nats, rel=1e-5)


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unbroken(code_rows, tmp_path_factory):
    """The folder of four steps without a stop."""
    out = tmp_path_factory.mktemp("unbroken") / "run"
    with pytest.MonkeyPatch.context() as patch:
        use_one_device(patch, train_dream, md.CONFIGS, "dream_test", DREAM)
        train_dream.main(config(code_rows, out))
    return out


def test_a_run_ends_with_what_generate_needs(code_rows, unbroken, tmp_path):
    tokenizer = tokenizers.Tokenizer.from_file(str(unbroken / "tokenizer.json"))
    size = Rows(code_rows, "train").meta["vocab_size"]
    assert tokenizer.token_to_id("<|mask|>") == size  # behind the last id of the data
    for step in (2, 4):
        assert checkpoints.load(md, unbroken, step=step)[0].cfg == dataclasses.replace(
            DREAM, mask_id=size
        )
    rows = [json.loads(line) for line in (unbroken / "log.jsonl").read_text().splitlines()]
    scores = {row["step"]: row for row in rows if "bits_per_byte" in row}
    assert scores.keys() == {2, 4}
    assert scores[4]["heldout_nats"] < scores[2]["heldout_nats"] < np.log(640) * 1.1
    assert (unbroken / "samples.txt").read_text().count("---- step") == 2
    for kwargs, part in (
        ({"step": 3}, "no checkpoint of step 3; it has [2, 4]"),
        ({}, "no checkpoint; train one"),
    ):
        with pytest.raises(FileNotFoundError, match=re.escape(part)):
            checkpoints.load(md, unbroken if kwargs else tmp_path, **kwargs)


def test_sigterm_saves_and_resuming_equals_not_stopping_bit_for_bit(
    code_rows, unbroken, one_device, monkeypatch, tmp_path
):
    out, log = tmp_path / "run", runs.Folder.log

    def log_then_stop(run, row):
        log(run, row)
        if row["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(runs.Folder, "log", log_then_stop)
    with pytest.raises(InterruptedError, match="SIGTERM: saved step 3"):
        train_dream.main(config(code_rows, out))
    assert max(runs.saved_steps(out)) == 3
    train_dream.main(resumed(train_dream, out))
    assert losses(out) == losses(unbroken)
    assert len(losses(out)) == 4
    both = (
        jax.tree.leaves(nnx.state(checkpoints.load(md, folder)[0])) for folder in (unbroken, out)
    )
    for a, b in zip(*both, strict=True):
        np.testing.assert_array_equal(a, b)
    largest = max((out / "checkpoints" / "4" / "params").rglob("*"), key=lambda p: p.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    with pytest.raises(ValueError, match=r"checkpoints/4 cannot be read: .+") as error:
        checkpoints.load(md, out)
    assert "\n" not in str(error.value)


def test_a_kill_right_after_a_checkpoint_loses_neither_score_nor_sample(
    unbroken, one_device, monkeypatch, tmp_path
):
    out, save = shutil.copytree(unbroken, tmp_path / "run"), checkpoints.Checkpoints.save
    shutil.rmtree(out / "checkpoints" / "4")

    def save_and_die(store, *rest):
        save(store, *rest)
        store.close()
        raise SystemExit

    monkeypatch.setattr(checkpoints.Checkpoints, "save", save_and_die)
    with pytest.raises(SystemExit):
        train_dream.main(resumed(train_dream, out))
    assert list(runs.saved_steps(out)) == [2, 4]
    train_dream.main(resumed(train_dream, out))  # has all of its steps
    assert scored_rows(out) == scored_rows(unbroken)
    assert "--optimizer adamw there, muon here" in refusal(
        train_dream, resumed(train_dream, out, optimizer="muon")
    )


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


def test_bad_input_is_one_line(code_rows, unbroken, one_device, tmp_path):
    new = tmp_path / "new"
    assert "already holds a run: --resume=" in refusal(train_dream, config(code_rows, unbroken))
    assert "one of tiny" in refusal(train_dream, config(code_rows, new, model="huge"))
    assert "train_tpu.py trains PythonCoder" in refusal(
        train_dream, config(code_rows, new, model="huge")
    )
    assert "rows of 64 tokens, the run wants 32" in refusal(
        train_dream, config(code_rows, new, seq_len=32)
    )
    assert "lower --batch_size" in refusal(train_dream, config(code_rows, new, batch_size=100_000))
    assert "--keep=0 is not in 1 .." in refusal(train_dream, config(code_rows, new, keep=0))
    assert "block_length 0 there, 4 here" in refusal(
        train_dream, resumed(train_dream, unbroken, block_length=4)
    )
    # of --init and LoRA
    assert "does not exist" in refusal(
        train_dream, config(code_rows, new, init=str(tmp_path / "none"))
    )
    assert "leave --model=tiny out" in refusal(
        train_dream, config(code_rows, new, init="x", model="tiny")
    )
    muon = {"init": str(unbroken), "lora_rank": 2, "optimizer": "muon"}
    for wrong in (
        {"lora_rank": 2},
        {"init_adapters": "x"},
        {"init": str(unbroken), "base_bits": 8},
        muon,
    ):
        assert "go with --lora_rank, which goes with --init" in refusal(
            train_dream, config(code_rows, new, **wrong)
        )
    other = with_other_tokenizer(code_rows, tmp_path / "other")
    said = refusal(train_dream, config(other, new, init=str(unbroken)))
    assert "have other ids than in" in said
    assert said.endswith(f"--tokenizer={unbroken}/tokenizer.json --eos='<|endoftext|>'")
    assert not new.exists()


@pytest.mark.slow
def test_kill_9_at_random_moments_always_resumes_to_the_unbroken_run(code_rows, tmp_path):
    more = "--steps=40", "--block_length=4", "--block_warmup=30"
    more = (*more, "--eval_every=3", "--eval_rows=8")
    unbroken, out = tmp_path / "unbroken", tmp_path / "killed"
    result = run(*flags(code_rows, unbroken, *more), timeout=900)
    assert result.returncode == 0, result.stderr
    resume = flags(code_rows, out, *more, f"--resume={out}")
    steps = kill_and_resume(
        command(*flags(code_rows, out, *more)), command(*resume), kills=5, lines=8
    )
    assert max(steps) > 3  # a checkpoint lay between two kills
    assert losses(out) == losses(unbroken)
    assert scored_rows(out) == scored_rows(unbroken)
    assert (
        checkpoints.Checkpoints(out).meta()["sums"]
        == checkpoints.Checkpoints(unbroken).meta()["sums"]
    )


@pytest.mark.slow
def test_sigterm_to_one_of_two_hosts_saves_on_both_and_they_train_as_one(code_rows, tmp_path):
    one, out, more = (
        tmp_path / "one",
        tmp_path / "run",
        ("--steps=12", "--eval_every=4", "--eval_rows=8"),
    )
    result = run(*flags(code_rows, one, *more))
    assert result.returncode == 0, result.stderr
    line = flags(code_rows, out, *more)
    both = two_hosts(line, line)
    wait_for_step(both[0], 5)
    both[1].send_signal(signal.SIGTERM)
    for process in both:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 1, error
        assert f"go on with --resume={out}" in error.splitlines()[-1]
    both = two_hosts(*2 * [(*line, f"--resume={out}")])
    assert [(p.communicate(timeout=300), p.returncode)[1] for p in both] == [0, 0]
    for step, want in losses(one).items():
        np.testing.assert_allclose(losses(out)[step], want, rtol=2e-3)


# ---- from a model: --init, pairs, LoRA ----------------------------------------------------------


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
    ids = {
        "mask_id": meta["vocab_size"],
        "pad_id": meta["eos_id"],
        "bos_id": meta["eos_id"],
        "eos_id": meta["eos_id"],
    }
    cfg = dataclasses.replace(DREAM, **ids)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_params(cfg, 0.5))
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
        train_dream.main(config(data, tmp_path / name, init=str(before)))
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
    train_dream.main(config(code_rows, tmp_path / "ar", objective="ar"))
    train_dream.main(config(code_rows, out, init=str(tmp_path / "ar"), anneal_steps=2))
    assert checkpoints.load(md, out)[0].cfg.block_length == 0
    shutil.copytree(out, copy)
    shutil.rmtree(copy / "checkpoints/4")
    train_dream.main(resumed(train_dream, copy))
    assert losses(copy) == losses(out)


@pytest.mark.slow
@pytest.mark.parametrize(("block", "bits"), [(0, 0), (4, 0), (0, 8), (4, 4)])
def test_lora_trains_adapters_beside_frozen_weights_and_merges_them(
    pairs, one_device, tmp_path, capsys, block, bits
):
    out, copy = (tmp_path / name for name in ("run", "copy"))
    start, cfg = save_start(tmp_path / "start", pairs)
    lora = {"lora_rank": 2, "base_bits": bits, "weight_decay": 0.5}
    train_dream.main(config(pairs, out, init=start, block_length=block, **lora))
    assert (
        f"frozen {f'int{bits}' if bits else 'float32'} weights and LoRA of rank 2"
        in capsys.readouterr().out
    )
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
    before, after = (
        checkpoints.flatten(nnx.to_pure_dict(nnx.state(model))) for model in (before, after)
    )
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {f"layers.{i}.{name}" for i in range(DREAM.layers) for name in md.MATRICES}
    assert all(np.linalg.matrix_rank(after[name] - before[name], tol=1e-5) <= 2 for name in changed)
    # what it was made of, and how it chats
    assert runs.read_json(out / "merged/config.json")["source"] == "a/b"
    assert {"tokenizer.json", "tokenizer_config.json", "vocab.json"} <= set(
        os.listdir(out / "merged")
    )

    # Another run goes on from the adapters, in peft's form, where this one ended.
    if not block and not bits:
        more = {"init": start, "lora_rank": 2, "init_adapters": str(out), "steps": 1}
        train_dream.main(config(pairs, tmp_path / "more", **more))
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
    assert "the whole model is in" in refusal(train_dream, evaluation(out))
    with pytest.raises(
        ValueError, match=r"holds what LoRA learnt; the whole model is in .*run/merged"
    ):
        checkpoints.load(md, out)
    for said, changes in {
        "--lora_rank 2 there, 3 here": {"lora_rank": 3},
        f"block_length {block} there, 8 here": {"block_length": 8},
        "merged holds other weights than": {"init": str(out / "merged")},
    }.items():
        assert said in refusal(train_dream, resumed(train_dream, copy, **changes))


def test_what_does_not_fit_is_refused_before_a_weight_is_read(
    code_rows, one_device, tmp_path, monkeypatch
):
    start, cfg = save_start(tmp_path / "start", code_rows)
    params = md.count_params(cfg)["total"]
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
    said = refusal(train_dream, config(code_rows, tmp_path / "a", init=start))
    assert said.startswith(
        f"weights, moments and gradients take {full / 1e9:.3g} GB on each device, where "
    )
    eight = f"--lora_rank=16 --base_bits=8 takes {int8 / 1e9:.3g}"
    assert (
        f"; --lora_rank=16 takes {lora / 1e9:.3g} or {eight} or --lora_rank=16 --base_bits=4 takes "
        in said
    )
    free[0] = lora - 1
    said = refusal(train_dream, config(code_rows, tmp_path / "a", init=start, lora_rank=16))
    assert f"are free; --base_bits=8 takes {int8 / 1e9:.3g} or --base_bits=4 takes " in said
    free[0] = int8 - 1
    said = refusal(
        train_dream, config(code_rows, tmp_path / "a", init=start, lora_rank=16, base_bits=8)
    )
    assert "are free; --base_bits=4 takes " in said
    free[0] = 1
    for lora in ({}, {"lora_rank": 16}, {"lora_rank": 16, "base_bits": 4}):
        said = refusal(train_dream, config(code_rows, tmp_path / "a", init=start, **lora))
        assert "a smaller model, more devices" in said
    free[0] = 1
    assert "a smaller model, more devices" in refusal(
        train_dream, config(code_rows, tmp_path / "a")
    )
    assert not (tmp_path / "a").exists()


# ---- --eval_only -----------------------------------------------------------------------------------------------------


def evaluation(folder, **changes):
    """--eval_only in this process."""
    return train_dream.Config(
        eval_only=str(folder), compile_cache="", **{"eval_rows": 20} | changes
    )


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
    params = random_params(cfg)
    model = nnx.merge(
        md.graph_of(cfg, md.Compute()), params | {"norm": jnp.full_like(params["norm"], size)}
    )
    checkpoints.save(md, folder / "model", model, [folder / "tokenizer.json"])
    return folder / "model", model


def test_eval_only_scores_a_checkpoint_as_the_trainer_did(unbroken, one_device, capsys):
    scores = train_dream.main(evaluation(unbroken, eval_rows=8))
    (line,) = capsys.readouterr().out.splitlines()
    assert f"bits_per_byte {scores['bits_per_byte']:.4g}" in line
    logged = json.loads((unbroken / "log.jsonl").read_text().splitlines()[-1])
    assert (scores["step"], scores["rows"]) == (logged["step"], 8)
    assert 0 < scores["standard_error"] < 0.2 * scores["bits_per_byte"]
    # of the difference from the mean of half as many other draws
    error = 3**0.5 * scores["standard_error"]
    assert abs(scores["bits_per_byte"] - logged["bits_per_byte"]) < 4 * error


def test_a_model_that_knows_nothing_pays_log_vocab_for_every_masked_token(
    code_rows, one_device, tmp_path
):
    folder, _ = new_model(tmp_path, code_rows, 0)
    scores = train_dream.main(evaluation(folder, data=str(code_rows)))
    # -log p is log(V - 1), MASK aside, at each masked token, whose weight is 1 / t
    token_RL, segment_RL, _ = spread_rows(code_rows, 20)
    # in each draw another row has the lowest time
    order = functools.partial(jax.random.permutation, x=20)
    noise = jax.jit(
        lambda draw: md.noise(jax.random.key(draw), 20, order(jax.random.key(8 + draw)), segment_RL)
    )
    noises = (map(np.asarray, noise(draw)) for draw in range(8))
    nats_N = [
        (((u_RL < t_RL) & (segment_RL > 0)) / t_RL).sum() * math.log(639) for t_RL, u_RL in noises
    ]
    tokens = (segment_RL > 0).sum()
    assert scores["heldout_nats"] == pytest.approx(np.mean(nats_N) / tokens, rel=1e-5)
    tokenizer = runs.read_tokenizer(folder)
    text_bytes = sum(len(tokenizer.decode([i]).encode()) for i in token_RL[segment_RL > 0].tolist())
    bits = np.array(nats_N) / math.log(2) / text_bytes
    assert scores["bits_per_byte"] == pytest.approx(np.mean(bits), rel=1e-2)
    assert scores["standard_error"] == pytest.approx(np.std(bits, ddof=1) / 8**0.5, rel=1e-2)
    assert scores["bits_per_byte"] == pytest.approx(
        math.log2(639) * tokens / text_bytes, abs=4 * scores["standard_error"]
    )
    other = with_other_tokenizer(code_rows, tmp_path / "other")
    for part, cfg in (
        ("does not say what the model was trained on; pass --data", evaluation(folder)),
        ("written with another tokenizer", evaluation(folder, data=str(other))),
        ("--eval_rows", evaluation(folder, data=str(code_rows), eval_rows=0)),
        ("config.json does not exist", evaluation(tmp_path / "none")),
    ):
        assert part in refusal(train_dream, cfg)


@pytest.mark.parametrize("block", [1, 2])
def test_small_blocks_are_scored_without_a_draw(code_rows, one_device, tmp_path, block):
    folder, model = new_model(tmp_path, code_rows, 3, block_length=block)
    scores = train_dream.main(evaluation(folder, data=str(code_rows), eval_rows=5))
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
    assert scores["heldout_nats"] > math.log(639) + 0.1
    assert scores["standard_error"] == 0


@pytest.mark.slow
def test_eight_devices_and_half_the_bits_have_the_same_score(
    code_rows, unbroken, monkeypatch, capsys
):
    many = train_dream.main(evaluation(unbroken))
    assert "8 x cpu, mesh {'data': 8, 'fsdp': 1, 'tensor': 1}" in capsys.readouterr().err
    use_one_device(monkeypatch, train_dream, md.CONFIGS, "dream_test", DREAM)
    one = train_dream.main(evaluation(unbroken))
    assert many == pytest.approx(one, rel=1e-5)
    half = train_dream.main(evaluation(unbroken, dtype="bfloat16"))
    assert half["bits_per_byte"] == pytest.approx(one["bits_per_byte"], rel=1e-2)
