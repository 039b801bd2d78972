"""train_tpu.py: gradients, row order, learning by heart, resuming, --eval_only, hosts, what it says
of bad input.
"""

import contextlib
import dataclasses
import fcntl
import io
import json
import lzma
import math
import os
import re
import resource
import shutil
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tokenizers
from conftest import (
    AS_A_USER,
    command,
    copy_in_bucket,
    kill_and_resume,
    losses,
    refusal,
    resumed,
    run,
    says,
    scored_rows,
    two_hosts,
    use_one_device,
    wait_for_step,
    with_other_tokenizer,
)

import checkpoints
import convert_weights
import model_pythoncoder as pc
import runs
import train_tpu
from rows import Rows

CODER = pc.Config(640, 32, layers=2, heads=4, kv_heads=2, head_size=8, ffn=64, positions=64)


def flags(data, out, *more):
    """A run of the tiny preset from the shell."""
    folders = f"--data={data}", f"--out={out}", f"--compile_cache={Path(data).parent / 'cache'}"
    return "train_tpu.py", *folders, "--seq_len=64", "--batch_size=8", "--log_every=1", *more


def config(data, out, **changes):
    """A run of CODER in this process; all that train compile the same step."""
    settings = {
        "data": str(data),
        "out": str(out),
        "compile_cache": str(Path(data).parent / "cache"),
    }
    settings |= {"model": "coder_test", "seq_len": 64, "batch_size": 8, "steps": 12, "lr": 0.03}
    settings |= {"optimizer": "adamw", "log_every": 1, "eval_every": 4, "eval_rows": 20}
    return train_tpu.Config(**settings | changes)


@pytest.fixture
def one_device(monkeypatch):
    use_one_device(monkeypatch, train_tpu, pc.CONFIGS, "coder_test", CODER)


@pytest.mark.usefixtures("one_device")
def test_a_run_that_goes_on_in_another_folder_begins_it_with_a_checkpoint_and_needs_no_prompt(
    code_rows, tmp_path
):
    for out, changes in (
        ("a", {"steps": 4}),
        ("b", {"steps": 6, "resume": str(tmp_path / "a"), "prompt": ""}),
    ):
        train_tpu.main(config(code_rows, tmp_path / out, keep=5, **changes))
    assert [*runs.saved_steps(tmp_path / "b")] == [4, 6]


# ---- gradients and updates -------------------------------------------------------------------------------------------


@pytest.mark.golden
def test_schedule_at_the_golden_steps(golden_dir):
    for case in json.loads((golden_dir("pythoncoder") / "wsd.json").read_text())["cases"]:
        shape = [case[k] for k in ("warmup_steps", "stable_ratio", "start_ratio", "final_ratio")]
        for step, want in case["lr"].items():
            got = train_tpu.wsd(int(step), case["peak"], case["total_steps"], *shape)
            assert float(got) == pytest.approx(want, rel=2e-5), (case, step)


@pytest.mark.golden
def test_three_updates_from_uneven_micro_batches(golden_dir):
    folder = golden_dir("pythoncoder")
    settings, arrays = (
        json.loads((folder / "grad_accum.json").read_text()),
        np.load(folder / "grad_accum.npz"),
    )
    hyper = settings["hyper"]
    optimizer = train_tpu.make_optimizer(
        hyper["clip"], hyper["weight_decay"], mask=settings["decay"]
    )
    params = {"W": jnp.asarray(arrays["W0"]), "scale": jnp.asarray(arrays["scale0"])}
    state = {"params": params, "opt": optimizer.init(params)}

    @jax.jit
    def update(state, x, y, mask):
        total = mask.sum()

        def loss_fn(params, batch, sums):
            logits = (batch["x"] * params["scale"]) @ params["W"]
            nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
            return (nll * batch["mask"]).sum() / total, ()

        batches = {"x": x, "y": y, "mask": mask}
        grads, (loss, ()) = train_tpu.accumulate(
            loss_fn, {**state["params"], "layers": {}}, batches
        )
        del grads["layers"]
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
    cfg = pc.Config(
        vocab=40, width=16, layers=1, heads=4, kv_heads=2, head_size=4, ffn=16, positions=8
    )
    optimizer, row_11L = train_tpu.make_optimizer(1.0, 0.1), jnp.arange(8)[None, None]
    batch = {"token_ABL": row_11L, "segment_ABL": jnp.ones_like(row_11L), "position_ABL": row_11L}
    step = jax.jit(
        train_tpu.make_step(
            train_tpu.Config(lr=0.1, steps=9), pc.graph_of(cfg, pc.Compute()), optimizer
        )
    )
    for size, finite in ((1.0, True), (3e38, False)):
        params = pc.new_params(cfg, 0) | {"norm": jnp.full(16, size)}
        state = {"params": params, "opt": optimizer.init(params)}
        new, metrics = step(state, batch, 3)
        assert metrics["ok"] == finite
        same = jax.tree.map(lambda a, b: bool((a == b).all()), state, new)
        assert jax.tree.all(same) == (not finite)


def test_weight_decay_touches_matrices_and_embeddings_alone():
    mask = checkpoints.flatten(train_tpu.decays(pc.param_shapes(pc.CONFIGS["1b"])))
    assert {n for n, decay in mask.items() if not decay} == {
        "norm", "mtp.norm_hidden", "mtp.norm_embed", "mtp.norm_out", "layers.attn_norm", "layers.ffn_norm",
        "layers.lambda_q1", "layers.lambda_k1", "layers.lambda_q2", "layers.lambda_k2", "layers.subln",
    }  # fmt: skip


def test_muon_has_the_layers_matrices_and_orthogonalises_each_of_a_stack():
    grads = {
        "embed": jnp.ones((8, 4)),
        "layers": {
            "wq": jax.random.normal(jax.random.key(0), (3, 6, 4)),
            "attn_norm": jnp.ones((3, 4)),
        },
        "mtp": {"proj": jax.random.normal(jax.random.key(1), (8, 4)), "head": jnp.ones((8, 4))},
    }
    params = jax.tree.map(jnp.zeros_like, grads)
    optimizer = train_tpu.make_optimizer(1e9, 0.0, muon=True)
    updates, state = jax.jit(lambda: optimizer.update(grads, optimizer.init(params), params))()
    # all singular values of an update are about equal: five Newton-Schulz steps leave them within
    # 0.3 of their size
    for update_MN in (*updates["layers"]["wq"], updates["mtp"]["proj"]):
        values = np.linalg.svd(update_MN, compute_uv=False) / (0.2 * max(update_MN.shape) ** 0.5)
        assert (np.abs(values - 0.95) < 0.3).all()
    # the first step of Adam with Nesterov momentum
    for update in (updates["embed"], updates["layers"]["attn_norm"], updates["mtp"]["head"]):
        np.testing.assert_allclose(update, -(1 + 0.09 / 0.19), rtol=1e-4)
    sizes = [leaf.shape for leaf in jax.tree.leaves(state)]
    # a momentum of wq and proj, two of embed and head
    assert (sizes.count((3, 6, 4)), sizes.count((8, 4))) == (1, 5)


def test_thirty_steps_on_one_batch_learn_it_by_heart(code_rows, one_device, tmp_path):
    cfg = config(code_rows, tmp_path / "run")
    checkpoints.connect(cfg)
    trainer = train_tpu.Trainer(cfg)
    trainer.begin(checkpoints.Checkpoints(tmp_path / "run"))
    graph = train_tpu.pc.graph_of(trainer.model, trainer.compute)
    step = train_tpu.lower_step(
        trainer.cfg, graph, trainer.optimizer, trainer.shapes, trainer.mesh
    ).compile()
    history = []
    # Not the rows of code_rows: each Python has another library.
    token_ABL = np.random.default_rng(0).integers(0, 640, (2, 4, 64))
    columns = token_ABL, np.ones_like(token_ABL), np.broadcast_to(np.arange(64), token_ABL.shape)
    fixed = dict(zip(train_tpu.COLUMNS, columns, strict=True))
    batch = jax.tree.map(
        lambda x, new: jax.device_put(new.astype(x.dtype), x.sharding), trainer.batch(0), fixed
    )
    for _ in range(30):
        # at the peak of the learning rate
        trainer.state, metrics = step(trainer.state, batch, jnp.int32(5))
        history.append(float(metrics["main"]))
    assert history[0] == pytest.approx(np.log(640), rel=0.05)
    assert history[-1] < 0.8


@pytest.mark.slow
def test_splitting_a_step_into_micro_batches_changes_nothing(code_rows):
    cfg = pc.Config(
        vocab=640, width=64, layers=2, heads=4, kv_heads=2, head_size=16, ffn=128, positions=64
    )
    rows = Rows(code_rows, "train").read(np.arange(8))
    optimizer, params = train_tpu.make_optimizer(1.0, 0.1), pc.new_params(cfg, 0)
    results = []
    for micro in (8, 2):
        parts = [jnp.asarray(x.reshape(-1, micro, 64)) for x in rows]
        batch = dict(zip(("token_ABL", "segment_ABL", "position_ABL"), parts, strict=True))
        settings = train_tpu.Config(lr=1e-2, steps=10, warmup=1)
        step = train_tpu.make_step(settings, pc.graph_of(cfg, pc.Compute(dropout=0.1)), optimizer)
        results.append(jax.jit(step)({"params": params, "opt": optimizer.init(params)}, batch, 1))
    (one, first), (many, second) = results
    assert float(first["loss"]) == pytest.approx(float(second["loss"]), rel=1e-5)
    assert float(first["grad_norm"]) == pytest.approx(float(second["grad_norm"]), rel=1e-4)
    # moments: the gradients
    for a, b in zip(jax.tree.leaves(one["opt"]), jax.tree.leaves(many["opt"]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * np.abs(a).max())


@pytest.mark.slow
def test_gradients_of_many_micro_batches_meet_once_a_step():
    """Four devices, four micro-batches: no reduction and no gathering of weights inside a loop, and
    the same step.
    """
    model = pc.Config(256, 32, layers=2, heads=4, kv_heads=2, head_size=8, ffn=64, positions=32)
    mesh = jax.sharding.Mesh(
        np.array(jax.devices()[:4]).reshape(1, 4, 1), ("data", "fsdp", "tensor")
    )
    token_ABL = jax.random.randint(jax.random.key(0), (4, 4, 32), 0, 256)
    batch = {"token_ABL": token_ABL, "segment_ABL": jnp.ones_like(token_ABL)}
    batch["position_ABL"] = jnp.broadcast_to(jnp.arange(32), token_ABL.shape)
    results = {}
    for reduce in ("micro", "step"):
        cfg = train_tpu.Config(
            model="tiny",
            seq_len=32,
            batch_size=16,
            micro_batch=1,
            lr=1e-2,
            steps=10,
            warmup=1,
        )
        optimizer = train_tpu.make_optimizer(1.0, 0.1)
        shapes = checkpoints.state_shapes(pc, model, optimizer, mesh)
        graph = pc.graph_of(model, pc.Compute(dropout=0.1))
        memory = 1.0 if reduce == "step" else 1e-6
        step = train_tpu.lower_step(cfg, graph, optimizer, shapes, mesh, memory).compile()
        text = step.as_text()
        bodies = set(re.findall(r"body=%?([\w.-]+)", text))
        inside = [part for part in text.split("\n\n") if part.lstrip("% ").split(" ")[0] in bodies]
        assert len(inside) >= 3  # micro-batches, layers forward, layers backward
        communicating = [
            part for part in inside if re.search(r" (all-reduce|all-gather|reduce-scatter)\(", part)
        ]
        assert bool(communicating) == (reduce == "micro")
        params = pc.new_params(model, 0)
        state = jax.device_put(
            {"params": params, "opt": optimizer.init(params)},
            jax.tree.map(lambda s: s.sharding, shapes),
        )
        rows = jax.device_put(batch, jax.NamedSharding(mesh, jax.P(None, pc.BATCH)))
        results[reduce] = step(state, rows, jnp.int32(1))
    (state, metrics), (want, want_metrics) = results["step"], results["micro"]
    for name in ("loss", "grad_norm"):
        assert float(metrics[name]) == pytest.approx(float(want_metrics[name]), rel=1e-5)
    for a, b in zip(jax.tree.leaves(state["opt"]), jax.tree.leaves(want["opt"]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * np.abs(b).max())


# ---- choices for the device and the data -----------------------------------------------------------------------------


def test_without_model_and_batch_size_data_and_device_decide_together(capsys):
    """The largest preset that memory holds and the data feeds; short runs take small steps."""

    def picked(tokens, chips=1, kind="v6", **settings):
        devices, memory = (
            [SimpleNamespace(platform="tpu")] * chips,
            {"v6": 31.24, "v5": 15.75}[kind],
        )
        data = {
            "seq_len": 1024,
            "vocab_size": 4000,
            "vocab_padded": 4096,
            "splits": {"train": {"tokens": tokens}},
        }
        cfg = train_tpu.Config(**settings)
        name, _ = train_tpu.pick_model(cfg, devices, data, memory)
        batch, _ = train_tpu.pick_batch(dataclasses.replace(cfg, model=name), 1024, 1, False, data)
        return name, batch * 1024

    assert picked(8_000_000) == ("tiny", 8192)
    assert picked(60_000_000) == ("small", 65_536)
    assert picked(500_000_000) == ("300m", 131_072)
    assert picked(2_000_000_000) == ("1b", 131_072)
    assert picked(2_000_000_000, kind="v5") == ("300m", 131_072)
    # its weights and moments lie on all of them
    assert picked(2_000_000_000, kind="v5", chips=8) == ("1b", 131_072)
    assert picked(8_000_000, model="1b")[0] == "1b"


def test_an_epoch_ends_with_an_evaluation_unless_these_are_asked_for_less_often():
    rows = SimpleNamespace(total=100, meta={"splits": {"train": {"tokens": 100}}})
    for asked, want in ((0, (25, 25)), (10, (10, 25)), (1000, (1000, 1000))):
        cfg = train_tpu.Config(batch_size=4, seq_len=64, eval_every=asked)
        cfg, epoch = train_tpu.plan(cfg, CODER, rows)
        assert (cfg.eval_every, epoch) == want


def test_the_fused_attention_is_that_of_the_device():
    def of(platform, version="", dtype="bfloat16"):
        device = SimpleNamespace(platform=platform, compute_capability=version)
        return train_tpu.fused_kernel(device, dtype)

    found = [
        of("gpu", version) for version in ("7.5", "8.0", "8.9", "9.0", "10.0", "12.0", "gfx942")
    ]
    assert found == ["", "gpu", "gpu", "gpu", "gpu", "gpu", ""]
    assert (of("tpu"), of("cpu"), of("gpu", "8.0", "float32")) == ("tpu", "", "")
    assert train_tpu.fused_kernel(SimpleNamespace(platform="gpu"), "bfloat16") == ""


def test_steps_on_gpus_are_picked_by_what_was_compiled():
    def picked(memory, **settings):
        device = SimpleNamespace(platform="gpu", device_kind="NVIDIA")
        cfg = train_tpu.Config(**settings)
        name, model = train_tpu.pick_model(cfg, [device], memory=memory)
        fitting = train_tpu.most_rows(name, [device], memory)
        cfg, seq_len = dataclasses.replace(cfg, model=name), train_tpu.row_length(cfg, model)
        return name, train_tpu.pick_batch(cfg, seq_len, 1, False, None, fitting)[1]

    for name, recorded in train_tpu.STEP_GIB["gpu"].items():
        for rows, gib in recorded.items():
            assert picked(gib, model=name) == (name, rows)
    smallest = min(train_tpu.STEP_GIB["gpu"]["1b"].values())
    assert picked(smallest)[0] == "1b"
    assert picked(smallest - 0.01)[0] == "300m"
    assert picked(smallest - 0.01, model="1b") == ("1b", 1)  # whoever insists gets the least
    assert picked(0.5) == ("tiny", 2)
    most = max(train_tpu.STEP_GIB["gpu"]["1b"])
    # rows four times as long as the recorded ones
    assert picked(99, model="1b", seq_len=8192)[1] == max(1, most // 4)


def test_a_preset_takes_the_ids_and_rows_that_data_prep_writes_unasked():
    data = {
        "seq_len": 2048,
        "vocab_size": 8192,
        "vocab_padded": 8192,
        "splits": {"train": {"tokens": 200_000}},
    }
    cfg, model, _, _ = train_tpu.resolve(train_tpu.Config(fsdp=1), jax.devices()[:1], data)
    assert (cfg.model, model.vocab, model.positions, cfg.seq_len) == ("tiny", 8192, 2048, 2048)
    assert (cfg.optimizer, cfg.dropout) == ("muon", 0.0)  # of small models
    # and a table twice as long as the data needs is cut
    for ids, rows in ((300, 512), (1024, 1024), (1500, 2048), (2048, 2048), (3000, 3072)):
        data |= {"vocab_size": ids, "vocab_padded": -(-ids // 512) * 512}
        assert train_tpu.resolve(train_tpu.Config(fsdp=1), jax.devices()[:1], data)[1].vocab == rows
    # what is longer than the rows of training is for YaRN, and a head that nothing trains is none
    data |= {"seq_len": 128}
    _, model, _, _ = train_tpu.resolve(
        train_tpu.Config(fsdp=1, mtp_weight=0.0), jax.devices()[:1], data
    )
    assert (model.positions, model.mtp) == (128, False)
    assert train_tpu.resolve(train_tpu.Config(fsdp=1), jax.devices()[:1], data)[1].mtp


def test_float32_on_an_accelerator_means_products_in_float32(one_device):
    """Without being asked a TPU multiplies float32 matrices in bfloat16, a GPU in TF32."""
    before = jax.config.jax_default_matmul_precision
    try:
        train_tpu.resolve(train_tpu.Config(model="tiny", dtype="float32"), jax.devices())
        assert "HIGHEST" in jax.jit(lambda a: a @ a).lower(jnp.ones((2, 2))).as_text()
    finally:
        jax.config.update("jax_default_matmul_precision", before)


def test_every_row_is_read_once_an_epoch_in_an_order_of_seed_and_epoch(code_rows):
    rows = Rows(code_rows, "train")
    assert len(rows.shards) > 1
    orders = [rows.order(seed, epoch) for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0))]
    assert all(sorted(order) == list(range(rows.total)) for order in orders)
    assert (orders[0] == orders[1]).all()
    assert (orders[0] != orders[2]).any()
    assert (orders[0] != orders[3]).any()
    ids = orders[0][:12].reshape(3, 4)
    batch = rows.read(ids)
    assert batch.shape == (3, 3, 4, 64)
    assert (batch[:, 1, 2] == rows.read(ids[1, 2:3])[:, 0]).all()
    assert not rows.read(np.array([-1]))[:].any()  # an empty row fills up a batch


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unbroken(code_rows, tmp_path_factory):
    """Twelve steps without a stop: (folder, what the trainer printed)."""
    out = tmp_path_factory.mktemp("unbroken") / "run"
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as text:
        use_one_device(patch, train_tpu, pc.CONFIGS, "coder_test", CODER)
        train_tpu.main(config(code_rows, out))
    return out, text.getvalue()


@pytest.fixture(scope="module")
def from_the_shell(code_rows, tmp_path_factory):
    """The folder of twelve steps of the preset tiny without a stop."""
    out = tmp_path_factory.mktemp("from_the_shell") / "run"
    result = run(*flags(code_rows, out, "--steps=12", "--eval_every=4"))
    assert result.returncode == 0, result.stderr
    return out


def test_a_run_prints_its_choices_and_leaves_what_generate_needs(unbroken):
    out, text = unbroken
    for part in (
        "model coder_test, float32",
        "parameters",
        "tokens per parameter",
        "learning rate",
        "compiled in",
    ):
        assert part in text
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    scores = [row for row in rows if "bits_per_byte" in row]
    assert [row["step"] for row in scores] == [4, 8, 12]
    assert scores[-1]["heldout_nats"] < scores[0]["heldout_nats"]
    assert {"config.json", "tokenizer.json", "log.jsonl", "samples.txt", "checkpoints"} <= set(
        os.listdir(out)
    )
    model, step = checkpoints.load(pc, out)
    assert step == 12
    assert model.cfg == CODER
    eos_id = runs.read_json(Path(runs.read_json(out / "config.json")["data"]) / "meta.json")[
        "eos_id"
    ]
    assert runs.read_json(out / "generation_config.json") == {"eos_token_id": eos_id}


def test_sigterm_saves_and_resuming_equals_not_stopping_bit_for_bit(
    code_rows, unbroken, one_device, monkeypatch, tmp_path
):
    out, log = tmp_path / "run", runs.Folder.log

    def log_then_stop(run, row):
        log(run, row)
        if row["step"] == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(runs.Folder, "log", log_then_stop)
    with pytest.raises(InterruptedError, match="SIGTERM: saved step 6"):
        train_tpu.main(config(code_rows, out))
    assert max(int(p.name) for p in (out / "checkpoints").iterdir()) == 6
    train_tpu.main(resumed(train_tpu, out))  # with the settings of the run
    assert losses(out) == losses(unbroken[0])
    assert len(losses(out)) == 12


def test_a_kill_right_after_a_checkpoint_loses_neither_score_nor_sample(
    unbroken, one_device, monkeypatch, tmp_path
):
    out = shutil.copytree(unbroken[0], tmp_path / "run")
    shutil.rmtree(out / "checkpoints" / "12")
    save = checkpoints.Checkpoints.save

    def save_and_die(store, step, *rest):
        save(store, step, *rest)
        store.close()
        raise SystemExit

    monkeypatch.setattr(checkpoints.Checkpoints, "save", save_and_die)
    with pytest.raises(SystemExit):
        train_tpu.main(resumed(train_tpu, out))
    monkeypatch.undo()
    assert list(runs.saved_steps(out)) == [8, 12]
    use_one_device(monkeypatch, train_tpu, pc.CONFIGS, "coder_test", CODER)
    train_tpu.main(resumed(train_tpu, out))  # has all of its steps
    assert scored_rows(out) == scored_rows(unbroken[0])


def test_what_changed_since_the_checkpoint_is_said_or_refused(
    unbroken, one_device, capsys, tmp_path
):
    out = shutil.copytree(unbroken[0], tmp_path / "run")
    config = json.loads((out / "config.json").read_text())
    config["train"]["mtp_weight"] = 0.2  # edited
    runs.write(out / "config.json", config)
    train_tpu.main(resumed(train_tpu, out, seed=1))
    said = capsys.readouterr().out
    for part in (f"changed since {out}/checkpoints/12: ", "mtp_weight 0.1 -> 0.2", "seed 0 -> 1"):
        assert part in said
    assert "--optimizer adamw there, muon here" in refusal(
        train_tpu, resumed(train_tpu, out, optimizer="muon")
    )
    assert "--dtype float32 there, bfloat16 here" in refusal(
        train_tpu, resumed(train_tpu, out, dtype="bfloat16")
    )
    (out / "checkpoints" / "12").rename(out / "checkpoints" / "14")
    assert "checkpoints/14 holds step 12" in refusal(train_tpu, resumed(train_tpu, out))
    before = (out / "log.jsonl").read_text()
    shutil.rmtree(out / "checkpoints")
    assert f"the checkpoints of {out} are gone" in refusal(train_tpu, resumed(train_tpu, out))
    assert (out / "log.jsonl").read_text() == before


@pytest.mark.slow
def test_resuming_before_the_first_checkpoint_starts_at_step_0_with_the_runs_settings(
    unbroken, one_device, capsys, tmp_path
):
    out = tmp_path / "run"
    # what a kill during the first save leaves
    (out / "checkpoints" / "4.orbax-checkpoint-tmp").mkdir(parents=True)
    shutil.copy(unbroken[0] / "config.json", out)
    train_tpu.main(resumed(train_tpu, out))
    assert "starting at step 0" in capsys.readouterr().out
    assert losses(out) == losses(unbroken[0])
    assert not list((out / "checkpoints").glob("*tmp*"))


@pytest.mark.slow
def test_more_epochs_go_on_with_a_finished_run_and_old_epochs_are_not_kept(
    code_rows, one_device, capsys, tmp_path
):
    out = tmp_path / "run"
    train_tpu.main(config(code_rows, out, epochs=1.0, steps=0, batch_size=1024, micro_batch=256))
    done = max(losses(out))
    assert resumed(train_tpu, out).micro_batch == 256
    train_tpu.main(resumed(train_tpu, out))
    assert (
        f"has all of its {done} steps; raise --steps, or --epochs with --steps=0"
        in capsys.readouterr().out
    )
    train_tpu.main(resumed(train_tpu, out, epochs=3.0))
    assert max(losses(out)) == 3 * done
    assert len(runs.saved_steps(out)) <= 3  # two, and the best


@pytest.mark.slow
def test_a_checkpoint_is_written_after_save_minutes(code_rows, one_device, tmp_path):
    train_tpu.main(
        config(code_rows, tmp_path / "run", steps=3, eval_every=3, save_minutes=1e-9, keep=9)
    )
    assert list(runs.saved_steps(tmp_path / "run")) == [1, 2, 3]


def test_without_held_out_rows_there_is_no_score(code_rows, unbroken, one_device, tmp_path):
    folder = tmp_path / "rows"
    shutil.copytree(code_rows, folder)
    meta = json.loads((folder / "meta.json").read_text())
    meta["splits"]["heldout"] |= {"shards": [], "rows": 0, "tokens": 0}
    (folder / "meta.json").write_text(json.dumps(meta))
    out = shutil.copytree(unbroken[0], tmp_path / "run")
    shutil.rmtree(out / "checkpoints" / "12")
    train_tpu.main(resumed(train_tpu, out, data=str(folder)))
    assert losses(out) == losses(unbroken[0])
    assert "NaN" not in (tmp_path / "run" / "log.jsonl").read_text()
    assert 12 in runs.saved_steps(out)
    assert "no held-out rows" in refusal(train_tpu, evaluation(unbroken[0], data=str(folder)))


def test_bad_input_is_one_line_and_leaves_the_run_alone(
    code_rows, unbroken, one_device, monkeypatch, tmp_path
):
    out, new = unbroken[0], tmp_path / "new"
    before = (out / "log.jsonl").read_text()
    assert "already holds a run: --resume=" in refusal(train_tpu, config(code_rows, out))
    assert "data_prep.py" in refusal(train_tpu, config(tmp_path / "none", new))
    assert "tiny, small, 300m, 1b" in refusal(train_tpu, config(code_rows, new, model="huge"))
    assert "--diff=v2 needs an even number" in refusal(
        train_tpu, config(code_rows, new, model="1b", diff="v2")
    )
    assert "rows of 64 tokens, the run wants 32" in refusal(
        train_tpu, config(code_rows, new, seq_len=32)
    )
    assert "lower --batch_size" in refusal(train_tpu, config(code_rows, new, batch_size=100_000))
    for part in ("another model", "diff seed there, paper here"):
        assert part in refusal(train_tpu, resumed(train_tpu, out, diff="paper"))
    shutil.copytree(code_rows, tmp_path / "pairs")
    meta = json.loads((tmp_path / "pairs" / "meta.json").read_text())
    runs.write(tmp_path / "pairs" / "meta.json", meta | {"source": "pairs"})
    assert "holds pairs, for train_dream.py" in refusal(train_tpu, config(tmp_path / "pairs", new))
    with pytest.raises(FileNotFoundError, match=r"new/config.json does not exist"):
        resumed(train_tpu, new)
    monkeypatch.undo()
    three = jax.devices()[:3]
    monkeypatch.setattr(jax, "devices", lambda: three)
    assert "--batch_size=8 does not divide over 3" in refusal(
        train_tpu, config(code_rows, new, model="tiny")
    )
    assert (out / "log.jsonl").read_text() == before
    assert not new.exists()


def test_a_cpu_is_not_used_beside_an_idle_gpu_unless_asked_for(code_rows, monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoints, "ROOT", tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cfg = config(code_rows, tmp_path / "run", model="huge")
    assert "requirements-cuda.txt; or train on the CPU with --device=cpu" in refusal(train_tpu, cfg)
    assert "not one of" in refusal(train_tpu, dataclasses.replace(cfg, device="cpu"))


def test_two_trainers_on_one_folder_are_refused(unbroken, one_device):
    out = unbroken[0]
    with open(out / ".lock0", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another process is writing" in refusal(train_tpu, resumed(train_tpu, out, steps=20))


def test_a_corrupted_shard_is_named(code_rows, one_device, tmp_path):
    shutil.copytree(code_rows, tmp_path / "rows")
    for shard in sorted((tmp_path / "rows" / "train").iterdir()):
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    cfg = config(
        tmp_path / "rows", tmp_path / "out", compile_cache=config(code_rows, "").compile_cache
    )
    assert ".parquet is corrupted" in refusal(train_tpu, cfg)


@pytest.mark.parametrize("damage", ["flipped bit", "cut short", "another version"])
def test_a_damaged_checkpoint_is_named(code_rows, unbroken, one_device, tmp_path, damage):
    out = tmp_path / "run"
    shutil.copytree(unbroken[0], out)
    newest = max((out / "checkpoints").iterdir(), key=lambda p: int(p.name))
    if damage == "another version":
        meta = newest / "meta" / "metadata"
        meta.write_text(meta.read_text().replace('"width"', '"breadth"'))
    else:
        largest = max((newest / "params").rglob("*"), key=lambda p: p.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 8
        largest.write_bytes(content if damage == "flipped bit" else content[: len(content) // 2])
    assert "checkpoints/12" in refusal(train_tpu, resumed(train_tpu, out, steps=14))
    with pytest.raises(
        ValueError, match=r"checkpoints/12 cannot be read|holds no PythonCoder .*breadth"
    ) as error:
        checkpoints.load(pc, out)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_good_checkpoint(from_the_shell, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(from_the_shell, out)

    def small_files():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        # a write beyond it fails, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))

    result = run(
        "train_tpu.py", f"--resume={out}", "--steps=14", "--compile_cache=", preexec_fn=small_files
    )
    says(result, "was not written", "from [")
    assert checkpoints.load(pc, out)[1] == 12


@pytest.mark.slow
def test_diverging_stops_after_five_steps_without_a_finite_gradient(code_rows, tmp_path):
    result = run(
        *flags(
            code_rows, tmp_path / "run", "--steps=40", "--lr=1e12", "--warmup=1", "--eval_every=50"
        )
    )
    says(result, "no finite gradient in five steps")


@pytest.mark.slow
def test_kill_9_at_random_moments_always_resumes_to_the_unbroken_run(code_rows, tmp_path):
    more = "--steps=400", "--eval_every=3", "--eval_rows=8"
    unbroken, out = tmp_path / "unbroken", tmp_path / "killed"
    result = run(*flags(code_rows, unbroken, *more), timeout=900)
    assert result.returncode == 0, result.stderr
    resume = flags(code_rows, out, *more, f"--resume={out}")
    steps = kill_and_resume(command(*flags(code_rows, out, *more)), command(*resume), lines=8)
    assert max(steps) > 3  # a checkpoint lay between two kills
    assert losses(out) == losses(unbroken)
    assert scored_rows(out) == scored_rows(unbroken)
    assert (
        checkpoints.Checkpoints(out).meta()["sums"]
        == checkpoints.Checkpoints(unbroken).meta()["sums"]
    )


@pytest.mark.slow
def test_data_and_run_can_be_in_a_bucket(code_rows, bucket, tmp_path):
    env = os.environ | AS_A_USER | bucket
    copy_in_bucket(bucket, "put", f"{code_rows}/", "bucket/rows/")
    both = ("--eval_every=4", "--compile_cache=")
    first = run(*flags("gs://bucket/rows", "gs://bucket/run", "--steps=8", *both), env=env)
    assert first.returncode == 0, first.stderr
    again = (*both, "--steps=12", "--resume=gs://bucket/run")
    finished = run(*flags("gs://bucket/rows", "gs://bucket/run", *again), env=env)
    assert finished.returncode == 0, finished.stderr
    assert not Path("gs:").exists()
    copy_in_bucket(bucket, "get", "bucket/run/", f"{tmp_path}/run/")
    assert max(losses(tmp_path / "run")) == 12
    assert (tmp_path / "run" / "samples.txt").exists()
    (tmp_path / "20" / "params").mkdir(parents=True)
    (tmp_path / "20" / "params" / "half").write_text("a checkpoint that is being written")
    copy_in_bucket(bucket, "put", f"{tmp_path}/20/", "bucket/run/checkpoints/20/")
    scored = run(
        "train_tpu.py", "--eval_only=gs://bucket/run", "--eval_rows=8", "--compile_cache=", env=env
    )
    local = (
        "--eval_only=" + str(tmp_path / "run"),
        f"--data={code_rows}",
        "--eval_rows=8",
        "--compile_cache=",
    )
    assert scored.stdout == run("train_tpu.py", *local).stdout != ""


# ---- --eval_only -----------------------------------------------------------------------------------------------------


def evaluation(folder, **changes):
    """--eval_only in this process."""
    return train_tpu.Config(eval_only=str(folder), compile_cache="", **{"eval_rows": 20} | changes)


def spread_rows(folder, count):
    rows = Rows(folder, "heldout")
    assert rows.total > count  # else all rows would be these
    return rows.read(rows.spread(count))


def test_eval_only_scores_a_checkpoint_as_the_trainer_did(code_rows, unbroken, one_device, capsys):
    scores = train_tpu.main(evaluation(unbroken[0]))
    (line,) = capsys.readouterr().out.splitlines()
    assert f"bits_per_byte {scores['bits_per_byte']:.4g}" in line
    logged = [json.loads(line) for line in (unbroken[0] / "log.jsonl").read_text().splitlines()]
    logged = {row["step"]: row for row in logged if "bits_per_byte" in row}
    assert (scores["step"], scores["rows"]) == (12, 20)
    for name in ("heldout_nats", "bits_per_byte"):
        assert scores[name] == pytest.approx(logged[12][name], rel=1e-5)
    assert 0 <= scores["drafts_accepted"] <= 1
    # xz reads the same rows.
    token_RL, segment_RL, _ = spread_rows(code_rows, 20)
    tokenizer = tokenizers.Tokenizer.from_file(str(unbroken[0] / "tokenizer.json"))
    text = tokenizer.decode(token_RL[segment_RL > 0].tolist()).encode()
    assert scores["xz_bits_per_byte"] == 8 * len(lzma.compress(text, preset=9)) / len(text)


def test_a_model_that_knows_nothing_pays_log_vocab_for_every_token(code_rows, one_device, tmp_path):
    runs.write(tmp_path / "tokenizer.json", (code_rows / "tokenizer.json").read_bytes())
    runs.write(tmp_path / "config.json", {"data": str(code_rows)})
    store = checkpoints.Checkpoints(tmp_path)
    params = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), pc.param_shapes(CODER))
    store.save(2, {"params": params}, {"model": dataclasses.asdict(CODER), "step": 2})
    store.close()
    scores = train_tpu.main(evaluation(tmp_path))
    assert scores["heldout_nats"] == pytest.approx(math.log(640), rel=1e-5)
    token_RL, segment_RL, _ = spread_rows(code_rows, 20)
    counted_RL = (segment_RL[:, 1:] == segment_RL[:, :-1]) & (segment_RL[:, 1:] > 0)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text_bytes = sum(
        len(tokenizer.decode([i]).encode()) for i in token_RL[:, 1:][counted_RL].tolist()
    )
    assert scores["bits_per_byte"] == pytest.approx(
        counted_RL.sum() * math.log2(640) / text_bytes, rel=1e-3
    )


def test_eval_only_refuses_in_one_line(code_rows, unbroken, one_device, tmp_path):
    out = unbroken[0]
    other = with_other_tokenizer(code_rows, tmp_path / "other")
    runs.write(tmp_path / "config.json", {})
    for part, cfg in (
        ("config.json does not exist", evaluation(tmp_path / "none")),
        ("does not say what the model was trained on; pass --data", evaluation(tmp_path)),
        ("written with another tokenizer", evaluation(out, data=str(other))),
        ("--eval_rows", evaluation(out, eval_rows=0)),
        ("no finished data", evaluation(out, data=str(tmp_path))),
    ):
        assert part in refusal(train_tpu, cfg)


@pytest.mark.slow
def test_a_converted_model_and_eight_devices_have_the_same_score(
    code_rows, unbroken, monkeypatch, tmp_path, capsys
):
    many = train_tpu.main(evaluation(unbroken[0]))
    assert "8 x cpu, mesh {'data': 8, 'fsdp': 1, 'tensor': 1}" in capsys.readouterr().err
    use_one_device(monkeypatch, train_tpu, pc.CONFIGS, "coder_test", CODER)
    one = train_tpu.main(evaluation(unbroken[0]))
    assert many == pytest.approx(one, rel=1e-5)
    convert_weights.main(convert_weights.Config(source=str(unbroken[0]), out=str(tmp_path / "hub")))
    assert "pass --data" in refusal(train_tpu, evaluation(tmp_path / "hub"))
    assert train_tpu.main(evaluation(tmp_path / "hub", data=str(code_rows))) == one


# ---- several devices and hosts ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_resuming_on_eight_devices_goes_on_with_the_same_losses(
    code_rows, from_the_shell, tmp_path
):
    out = tmp_path / "run"
    run(*flags(code_rows, out, "--steps=12", "--eval_every=4", "--keep=5"))
    for step in (8, 12):
        subprocess.run(["rm", "-r", out / "checkpoints" / str(step)], check=True)
    result = run("train_tpu.py", f"--resume={out}", "--tensor=1", devices=8)
    assert result.returncode == 0, result.stderr
    assert "8 x cpu" in result.stdout
    for step, want in losses(from_the_shell).items():
        np.testing.assert_allclose(losses(out)[step], want, rtol=2e-3)


@pytest.mark.slow
def test_two_processes_train_as_one(code_rows, from_the_shell, tmp_path):
    line = flags(code_rows, tmp_path / "run", "--steps=12", "--eval_every=4")
    both = two_hosts(line, line)
    errors = [process.communicate(timeout=300)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    for step, want in losses(from_the_shell).items():
        np.testing.assert_allclose(losses(tmp_path / "run")[step], want, rtol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("asked", [0, 1])
def test_sigterm_to_one_of_two_hosts_saves_on_both_and_the_run_goes_on(
    code_rows, from_the_shell, tmp_path, asked
):
    out = tmp_path / "run"
    line = flags(code_rows, out, "--steps=12", "--eval_every=4")
    both = two_hosts(line, line)
    wait_for_step(both[0], 5)
    both[asked].send_signal(signal.SIGTERM)
    for process in both:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 1, error
        assert "Traceback" not in error
        assert f"go on with --resume={out}" in error.splitlines()[-1]
    both = two_hosts(*2 * [(*line, f"--resume={out}")])
    assert [(p.communicate(timeout=300), p.returncode)[1] for p in both] == [0, 0]
    for step, want in losses(from_the_shell).items():
        np.testing.assert_allclose(losses(out)[step], want, rtol=2e-3)


@pytest.mark.slow
def test_hosts_that_share_no_disk_all_say_so_before_the_first_step(code_rows, tmp_path):
    both = two_hosts(*(flags(code_rows, tmp_path / name, "--steps=4") for name in "ab"))
    for process in both:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 1
        assert "hosts [1] do not see what host 0 wrote" in error.splitlines()[-1]


@pytest.mark.slow
def test_a_killed_host_ends_the_others_and_the_run_goes_on(code_rows, from_the_shell, tmp_path):
    out = tmp_path / "run"
    line = flags(code_rows, out, "--steps=12", "--eval_every=4")
    both = two_hosts(line, line)
    wait_for_step(both[0], 6)
    both[1].kill()
    assert [(p.communicate(timeout=120), p.returncode)[1] != 0 for p in both] == [True, True]
    both = two_hosts(*2 * [(*line, f"--resume={out}")])
    assert [(p.communicate(timeout=300), p.returncode)[1] for p in both] == [0, 0]
    for step, want in losses(from_the_shell).items():
        np.testing.assert_allclose(losses(out)[step], want, rtol=2e-3)


@pytest.mark.slow
def test_hosts_with_other_settings_all_say_so(code_rows, tmp_path):
    lines = (flags(code_rows, tmp_path / "run", f"--steps={steps}") for steps in (4, 5))
    for process in two_hosts(*lines):
        _, error = process.communicate(timeout=120)
        assert process.returncode == 1
        assert "hosts [1] have other settings or data than host 0" in error.splitlines()[-1]
