"""The trainer: schedule, gradient accumulation, data order, overfitting, resuming, and what it says of bad input."""

import contextlib
import dataclasses
import fcntl
import functools
import io
import json
import lzma
import os
import re
import resource
import shutil
import signal
import subprocess
import sysconfig
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tokenizers
from conftest import AS_A_USER, command, copy_in_bucket, kill_and_resume, losses, run, says
from flax import nnx

import checkpoints
import data_prep
import generate
import model_dream as md
import model_pythoncoder as pc
import runs
import train_tpu
from rows import Rows


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
    settings, arrays = json.loads((folder / "grad_accum.json").read_text()), np.load(folder / "grad_accum.npz")
    hyper = settings["hyper"]
    optimizer = train_tpu.make_optimizer(hyper["clip"], hyper["weight_decay"], mask=settings["decay"])
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
        grads, (loss, ()) = train_tpu.accumulate(loss_fn, {**state["params"], "layers": {}}, batches)
        del grads["layers"]
        state, norm, ok = train_tpu.apply_gradients(optimizer, state, grads, hyper["lr"])
        return state, loss, norm, ok

    for i, want in enumerate(settings["steps"]):
        state, loss, norm, ok = update(state, *(jnp.asarray(arrays[k][i]) for k in ("x", "y", "mask")))
        assert float(loss) == pytest.approx(want["loss"], rel=1e-5)
        assert float(norm) == pytest.approx(want["grad_norm"], rel=1e-5)
        assert ok
    moments = state["opt"][1][0]
    got = {**state["params"], "mu_W": moments.mu["W"], "nu_W": moments.nu["W"]}
    for name, value in got.items():
        np.testing.assert_allclose(value, arrays[name], rtol=1e-5, atol=1e-5 * np.abs(arrays[name]).max(), err_msg=name)


def test_a_step_without_finite_gradient_changes_nothing():
    optimizer = train_tpu.make_optimizer(1.0, 0.1)
    params = {"wq": jnp.ones((2, 2))}
    state = {"params": params, "opt": optimizer.init(params)}
    new, _, ok = train_tpu.apply_gradients(optimizer, state, {"wq": jnp.full((2, 2), jnp.nan)}, 0.1)
    assert not ok
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), state, new))
    new, _, ok = train_tpu.apply_gradients(optimizer, state, {"wq": jnp.ones((2, 2))}, 0.1)
    assert ok
    assert not (new["params"]["wq"] == 1).any()


def test_weight_decay_touches_matrices_and_embeddings_alone():
    mask = checkpoints.flatten(train_tpu.decays(pc.param_shapes(pc.CONFIGS["1b"])))
    assert {n for n, decay in mask.items() if not decay} == {
        "norm", "mtp.norm_hidden", "mtp.norm_embed", "mtp.norm_out", "layers.attn_norm", "layers.ffn_norm",
        "layers.lambda_q1", "layers.lambda_k1", "layers.lambda_q2", "layers.lambda_k2", "layers.subln",
    }  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Rows of 64 tokens packed from a few modules of the standard library; fewer held-out rows than --eval_rows."""
    folder, library = tmp_path_factory.mktemp("data"), Path(sysconfig.get_paths()["stdlib"])
    names = "ast calendar configparser csv dataclasses difflib enum fractions functools shutil string tokenize"
    data_prep.main(
        data_prep.Python(roots=tuple(str(library / f"{name}.py") for name in names.split()), out=str(folder / "rows"),
                         vocab_size=600, seq_len=64, heldout=0.1, workers=1, shard_bytes=60_000)
    )  # fmt: skip
    return folder / "rows"


CODER = pc.Config(640, 32, layers=2, heads=4, kv_heads=2, head_size=8, ffn=64, positions=64)
DREAM = md.DreamConfig(
    640, 32, layers=1, heads=2, kv_heads=1, head_size=16, ffn=64, positions=64, mask_id=3, pad_id=0, bos_id=0, eos_id=0
)


def flags(data, out, *more):
    """A run of the tiny preset from the shell."""
    folders = f"--data={data}", f"--out={out}", f"--compile_cache={Path(data).parent / 'cache'}"
    return "train_tpu.py", *folders, "--seq_len=64", "--batch_size=8", "--log_every=1", *more


def config(data, out, **changes):
    """The same in this process."""
    folders = {"data": str(data), "out": str(out), "compile_cache": str(Path(data).parent / "cache")}
    return train_tpu.Config(**folders | {"seq_len": 64, "batch_size": 8, "log_every": 1} | changes)


def resumed(out, **changes):
    """The settings that --resume takes from a run."""
    saved = runs.resumed(train_tpu.Config, [f"--resume={out}"], train_tpu.MACHINE)
    return dataclasses.replace(saved, resume=str(out), **changes)


def refusal(cfg):
    """The one line with which main() refuses."""
    with pytest.raises((ValueError, OSError)) as error:
        train_tpu.main(cfg)
    assert "\n" not in str(error.value)
    return str(error.value)


def use_one_device(monkeypatch):
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: first)
    monkeypatch.setitem(train_tpu.PRESETS, "coder_test", CODER)
    monkeypatch.setitem(train_tpu.PRESETS, "dream_test", DREAM)


@pytest.fixture
def one_device(monkeypatch):
    """main() in this process, on one device, with presets that compile in seconds."""
    use_one_device(monkeypatch)


def test_muon_has_the_layers_matrices_and_orthogonalises_each_of_a_stack():
    grads = {
        "embed": jnp.ones((8, 4)),
        "layers": {"wq": jax.random.normal(jax.random.key(0), (3, 6, 4)), "attn_norm": jnp.ones((3, 4))},
        "mtp": {"proj": jax.random.normal(jax.random.key(1), (8, 4)), "head": jnp.ones((8, 4))},
    }
    params = jax.tree.map(jnp.zeros_like, grads)
    optimizer = train_tpu.make_optimizer(1e9, 0.0, muon=True)
    updates, state = optimizer.update(grads, optimizer.init(params), params)
    # all singular values of an update are about equal: five Newton-Schulz steps leave them within 0.3 of their size
    for update_MN in (*updates["layers"]["wq"], updates["mtp"]["proj"]):
        values = np.linalg.svd(update_MN, compute_uv=False) / (0.2 * max(update_MN.shape) ** 0.5)
        assert (np.abs(values - 0.95) < 0.3).all()
    # the first step of Adam with Nesterov momentum
    for update in (updates["embed"], updates["layers"]["attn_norm"], updates["mtp"]["head"]):
        np.testing.assert_allclose(update, -(1 + 0.09 / 0.19), rtol=1e-4)
    sizes = [leaf.shape for leaf in jax.tree.leaves(state)]
    assert (sizes.count((3, 6, 4)), sizes.count((8, 4))) == (1, 5)  # a momentum of wq and proj, two of embed and head


def test_every_row_is_read_once_an_epoch_in_an_order_of_seed_and_epoch(data):
    rows = Rows(data, "train")
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


def test_thirty_steps_on_one_batch_learn_it_by_heart():
    cfg = pc.Config(vocab=640, width=64, layers=2, heads=4, kv_heads=2, head_size=16, ffn=128, positions=64)
    token_ABL = jnp.asarray(np.random.default_rng(0).integers(0, 640, (1, 4, 64)))
    batch = {"token_ABL": token_ABL, "segment_ABL": jnp.ones_like(token_ABL)}
    batch["position_ABL"] = jnp.broadcast_to(jnp.arange(64), token_ABL.shape)
    optimizer = train_tpu.make_optimizer(1.0, 0.1)
    params = jax.jit(lambda: pc.new_params(cfg, 0))()
    state = {"params": params, "opt": jax.jit(optimizer.init)(params)}
    settings = train_tpu.Config(coder=train_tpu.Coder(dropout=0.0), lr=1e-2, steps=1000, warmup=3)
    step = jax.jit(train_tpu.make_step(settings, pc.graph_of(cfg, pc.Run()), optimizer))
    history = []
    for i in range(30):
        state, metrics = step(state, batch, i)
        history.append(float(metrics["main"]))
    assert history[0] == pytest.approx(np.log(640), rel=0.05)
    assert history[-1] < 1.6


@pytest.mark.slow
def test_splitting_a_step_into_micro_batches_changes_nothing(data):
    cfg = pc.Config(vocab=640, width=64, layers=2, heads=4, kv_heads=2, head_size=16, ffn=128, positions=64)
    rows = Rows(data, "train").read(np.arange(8))
    optimizer, params = train_tpu.make_optimizer(1.0, 0.1), pc.new_params(cfg, 0)
    results = []
    for micro in (8, 2):
        parts = [jnp.asarray(x.reshape(-1, micro, 64)) for x in rows]
        batch = dict(zip(("token_ABL", "segment_ABL", "position_ABL"), parts, strict=True))
        settings = train_tpu.Config(lr=1e-2, steps=10, warmup=1)
        step = train_tpu.make_step(settings, pc.graph_of(cfg, pc.Run(dropout=0.1)), optimizer)
        results.append(jax.jit(step)({"params": params, "opt": optimizer.init(params)}, batch, 1))
    (one, first), (many, second) = results
    assert float(first["loss"]) == pytest.approx(float(second["loss"]), rel=1e-5)
    assert float(first["grad_norm"]) == pytest.approx(float(second["grad_norm"]), rel=1e-4)
    for a, b in zip(jax.tree.leaves(one["opt"]), jax.tree.leaves(many["opt"]), strict=True):  # moments: the gradients
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * np.abs(a).max())


@pytest.fixture(scope="module")
def unbroken(data, tmp_path_factory):
    """Twelve steps without a stop: (folder, what the trainer printed)."""
    out = tmp_path_factory.mktemp("unbroken") / "run"
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as text:
        use_one_device(patch)
        train_tpu.main(config(data, out, model="coder_test", steps=12, eval_every=4))
    return out, text.getvalue()


@pytest.fixture(scope="module")
def from_the_shell(data, tmp_path_factory):
    """The folder of twelve steps of the preset tiny without a stop."""
    out = tmp_path_factory.mktemp("from_the_shell") / "run"
    result = run(*flags(data, out, "--steps=12", "--eval_every=4"))
    assert result.returncode == 0, result.stderr
    return out


def test_a_run_prints_its_choices_and_leaves_what_generate_needs(unbroken):
    out, text = unbroken
    for part in (
        "model coder_test, float32",
        "parameters",
        "tokens per parameter",
        "peak learning rate",
        "compiled in",
    ):
        assert part in text
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    scores = [row for row in rows if "bits_per_byte" in row]
    assert [row["step"] for row in scores] == [4, 8, 12]
    assert scores[-1]["heldout_nats"] < scores[0]["heldout_nats"]
    assert {"config.json", "tokenizer.json", "log.jsonl", "samples.txt", "checkpoints"} <= set(os.listdir(out))
    model, step = checkpoints.load(pc, out)
    assert step == 12
    assert model.cfg == CODER


@pytest.mark.slow
def test_evaluate_scores_a_checkpoint_as_the_trainer_did(data, unbroken, tmp_path):
    out = unbroken[0]
    rows = f"--rows={train_tpu.Config.eval_rows}"  # the trainer scores no more
    result = run("evaluate.py", f"--ckpt={out}", "--all_steps", "--json", rows)
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    logged = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    logged = {row["step"]: row["bits_per_byte"] for row in logged if "bits_per_byte" in row}
    assert len(rows) >= 2
    for row in rows:
        assert row["bits_per_byte"] == pytest.approx(logged[row["step"]], rel=1e-4)
        assert 0 <= row["drafts_accepted"] <= 1
    rows = Rows(data, "heldout")
    rows = rows.read(rows.spread(100))
    text = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json")).decode(rows[0][rows[1] > 0].tolist()).encode()
    result = run("evaluate.py", f"--ckpt={out}", "--rows=100", "--drafts=0", "--json")
    xz = 8 * len(lzma.compress(text, preset=9)) / len(text)
    assert json.loads(result.stdout)["xz_bits_per_byte"] == pytest.approx(xz)
    copy = tmp_path / "cut"
    subprocess.run(["cp", "-r", out, copy], check=True)
    largest = max((copy / "checkpoints" / "12" / "params").rglob("*"), key=lambda path: path.stat().st_size)
    os.truncate(largest, 1000)
    says(run("evaluate.py", f"--ckpt={copy}"), "checkpoints/12 cannot be read")
    says(run("evaluate.py", f"--ckpt={out}", "--step=3"), "step 3; it has")
    says(run("evaluate.py", f"--ckpt={tmp_path}"), "no config.json")


@pytest.mark.slow
def test_resuming_before_the_first_checkpoint_starts_at_step_0_with_the_runs_settings(
    unbroken, one_device, capsys, tmp_path
):
    out = tmp_path / "run"
    (out / "checkpoints" / "4.orbax-checkpoint-tmp").mkdir(parents=True)  # what a kill during the first save leaves
    shutil.copy(unbroken[0] / "config.json", out)
    train_tpu.main(resumed(out))
    assert "starting at step 0" in capsys.readouterr().out
    assert losses(out) == losses(unbroken[0])
    assert not list((out / "checkpoints").glob("*tmp*"))


def test_sigterm_saves_and_resuming_equals_not_stopping_bit_for_bit(data, unbroken, one_device, monkeypatch, tmp_path):
    out, log = tmp_path / "run", runs.Run.log

    def log_then_stop(run, row):
        log(run, row)
        if row["step"] == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(runs.Run, "log", log_then_stop)
    with pytest.raises(InterruptedError, match="SIGTERM: saved step 6"):
        train_tpu.main(config(data, out, model="coder_test", steps=12, eval_every=4))
    assert max(int(p.name) for p in (out / "checkpoints").iterdir()) == 6
    train_tpu.main(resumed(out))  # with the settings of the run
    assert losses(out) == losses(unbroken[0])
    assert len(losses(out)) == 12


@pytest.mark.slow
def test_resuming_on_eight_devices_goes_on_with_the_same_losses(data, from_the_shell, tmp_path):
    out = tmp_path / "run"
    run(*flags(data, out, "--steps=12", "--eval_every=4", "--keep=5"))
    for step in (8, 12):
        subprocess.run(["rm", "-r", out / "checkpoints" / str(step)], check=True)
    result = run("train_tpu.py", f"--resume={out}", "--tensor=1", devices=8)
    assert result.returncode == 0, result.stderr
    assert "8 x cpu" in result.stdout
    for step, want in losses(from_the_shell).items():
        np.testing.assert_allclose(losses(out)[step], want, rtol=2e-3)


def test_bad_input_is_one_line_and_leaves_the_run_alone(data, unbroken, one_device, monkeypatch, tmp_path):
    out, new = unbroken[0], tmp_path / "new"
    before = (out / "log.jsonl").read_text()
    says(run(*flags(data, out, "--steps=12")), "already holds a run", "--resume=")
    assert "data_prep.py" in refusal(config(tmp_path / "none", new))
    assert "tiny, small, 300m, 1b" in refusal(config(data, new, model="huge"))
    assert "rows of 64 tokens, the run wants 32" in refusal(config(data, new, seq_len=32))
    assert "512 positions" in refusal(config("", new, seq_len=9999))
    assert "lower --batch_size" in refusal(config(data, new, batch_size=100_000))
    for part in ("another model", "diff seed there, paper here"):
        assert part in refusal(resumed(out, coder=train_tpu.Coder(diff="paper")))
    with pytest.raises(FileNotFoundError, match=r"new/config.json does not exist"):
        resumed(new)
    monkeypatch.undo()
    three = jax.devices()[:3]
    monkeypatch.setattr(jax, "devices", lambda: three)
    assert "--batch_size=8 does not divide over 3" in refusal(config(data, new))
    assert (out / "log.jsonl").read_text() == before
    assert not new.exists()


def test_a_cpu_is_not_used_beside_an_idle_gpu_unless_asked_for(data, monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoints, "ROOT", tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "requirements-cuda.txt; or train on the CPU with --device=cpu" in refusal(config(data, tmp_path / "run"))
    assert "not one of" in refusal(config(data, tmp_path / "run", model="huge", device="cpu"))


def test_a_run_from_before_init_std_goes_on_in_the_papers_form(unbroken, one_device, monkeypatch, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(unbroken[0], out)
    for path in (out / "config.json", out / "checkpoints/12/meta/metadata"):
        saved = json.loads(path.read_text())
        del saved["model"]["init_std"]
        runs.write(path, saved)
    fan_in = dataclasses.replace(train_tpu.PRESETS["coder_test"], init_std="fan_in")
    monkeypatch.setitem(train_tpu.PRESETS, "coder_test", fan_in)
    train_tpu.main(resumed(out, steps=13))
    assert 13 in losses(out)
    assert runs.read_json(out / "config.json")["model"]["init_std"] == "paper"


def test_two_trainers_on_one_folder_are_refused(unbroken, one_device):
    out = unbroken[0]
    with open(out / ".lock0", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another process is writing" in refusal(resumed(out, steps=20))


def test_a_corrupted_shard_is_named(data, one_device, tmp_path):
    shutil.copytree(data, tmp_path / "rows")
    for shard in sorted((tmp_path / "rows" / "train").iterdir()):
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    assert ".parquet is corrupted" in refusal(dream_config(tmp_path / "rows", tmp_path / "out"))


@pytest.mark.parametrize("damage", ["flipped bit", "cut short", "another version"])
def test_a_damaged_checkpoint_is_named(data, unbroken, one_device, tmp_path, damage):
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
    assert "checkpoints/12" in refusal(resumed(out, steps=14))
    with pytest.raises(ValueError, match=r"checkpoints/12 cannot be read|step 12 of .* cannot be read") as error:
        checkpoints.load(pc, out)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_good_checkpoint(from_the_shell, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(from_the_shell, out)

    def small_files():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))  # a write beyond it fails, as on a full disk

    result = run("train_tpu.py", f"--resume={out}", "--steps=14", "--compile_cache=", preexec_fn=small_files)
    says(result, "was not written", "from [")
    assert checkpoints.load(pc, out)[1] == 12


@pytest.mark.slow
def test_diverging_stops_after_five_steps_without_a_finite_gradient(data, tmp_path):
    result = run(*flags(data, tmp_path / "run", "--steps=40", "--lr=1e38", "--warmup=1", "--eval_every=50"))
    says(result, "no finite gradient in five steps")


# ---- Dream ---------------------------------------------------------------------------------------------------------


def dream_config(data, out, init="", **changes):
    settings = {"model": "" if init else "dream_test", "micro_batch": 4, "steps": 4, "eval_every": 2, "eval_rows": 8}
    settings |= {"lr": 3e-3, "warmup": 1, "dream": train_tpu.Dream(init=str(init))}
    return config(data, out, **settings | changes)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Rows of 64 tokens of prompts and responses."""
    folder, rng = tmp_path_factory.mktemp("pairs"), np.random.default_rng(0)
    lines = [{"prompt": f"copy {n}: ", "response": str(n)} for n in rng.integers(0, 10**6, 300).tolist()]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = str(folder / "pairs.jsonl")
    data_prep.main(
        data_prep.Pairs(source=source, out=str(folder / "rows"), seq_len=64, vocab_size=300, heldout=0.1, workers=1)
    )
    return folder / "rows"


def first_loss(model, folder, seed=0):
    """The loss of the first step of a run over a folder of rows, computed from the model alone."""
    rows = Rows(folder, "train")
    token_BL, segment_BL, position_BL, *fixed = rows.read(rows.order(seed, 0)[:8])
    t_BL, u_BL = md.noise(jax.random.fold_in(jax.random.key(seed), 0), 8, jnp.arange(8), jnp.asarray(segment_BL))
    nats = jax.jit(lambda model, *args: model.nelbo(*args))(
        model, *map(jnp.asarray, (token_BL, segment_BL, position_BL)), t_BL, u_BL, *map(jnp.asarray, fixed)
    )
    free_BL = (segment_BL > 0) & (fixed[0] == 0 if fixed else True)
    return float(nats) / free_BL.sum()


def loss_in_blocks(model, params, batch, **settings):
    """The loss of the first step of a Dream with these settings."""
    cfg = train_tpu.Config(model="dream_tiny", dream=train_tpu.Dream(**settings))
    graph, micro = md.graph_of(train_tpu.with_blocks(cfg, model), md.Run()), {k: x[0] for k, x in batch.items()}
    loss_fn = train_tpu.dream_loss(cfg, graph, batch, jax.random.key(0), step=0, base={})
    return float(jax.jit(loss_fn)(params, micro | {"row_AB": jnp.arange(len(micro["token_ABL"]))}, {})[0])


def test_blocks_of_one_token_train_as_an_autoregressive_model_and_a_block_as_long_as_the_row_as_none():
    cfg = md.DreamConfig(64, 16, 1, 2, 1, 8, 24, mask_id=3, pad_id=0, bos_id=0, eos_id=0, positions=64)
    params, rng = md.new_params(cfg, 0), np.random.default_rng(0)
    batch = {"token_ABL": jnp.asarray(rng.integers(4, 64, (1, 2, 16)))}
    position_L = jnp.array([*range(9), *range(5), 0, 0])
    packed = batch | {
        "segment_ABL": jnp.tile(jnp.array([1] * 9 + [2] * 5 + [0] * 2), (1, 2, 1)),
        "position_ABL": jnp.tile(position_L, (1, 2, 1)),
        "fixed_ABL": jnp.tile((position_L < 2).astype(int), (1, 2, 1)),
    }
    ar = loss_in_blocks(cfg, params, packed, objective="ar")
    # The first step of a warm-up has blocks of one, all masked, so that nothing is left to the other half of a pair.
    for more in ({}, {"complement": True}):
        grown = loss_in_blocks(cfg, params, packed, block_length=8, block_warmup=9, **more)
        assert grown == pytest.approx(ar, rel=1e-5)
    whole = batch | {"segment_ABL": jnp.ones((1, 2, 16), int), "position_ABL": jnp.tile(jnp.arange(16), (1, 2, 1))}
    none, all_of_it = (loss_in_blocks(cfg, params, whole, **s) for s in ({}, {"block_length": 16}))
    assert all_of_it == pytest.approx(none, rel=1e-5)
    assert abs(none - ar) > 1e-3


def test_settings_of_blocks_that_do_not_go_together_are_one_line():
    for changes, part in (
        ({"objective": "ar", "block_length": 4}, "--objective=ar has no --block_length"),
        ({"block_warmup": 5}, "--block_warmup: set --block_length"),
        ({"block_length": 4, "schedule": "cosine"}, "blocks have the linear --schedule"),
        ({"block_length": 4, "rates": (0.9, 0.1)}, "the lower first"),
        ({"block_length": -1}, "is below 0"),
        ({"block_length": 4, "anneal_steps": 9}, "goes without blocks"),
    ):
        cfg = train_tpu.Config(model="dream_tiny", dream=train_tpu.Dream(**changes))
        with pytest.raises(ValueError, match=part):
            train_tpu.with_blocks(cfg, DREAM)
    cfg = train_tpu.Config(dream=train_tpu.Dream(anneal_steps=9))  # from an autoregressive model to both ways
    assert train_tpu.with_blocks(cfg, dataclasses.replace(DREAM, block_length=1)) == DREAM
    with pytest.raises(ValueError, match="are of Dream"):
        train_tpu.with_blocks(train_tpu.Config(dream=train_tpu.Dream(block_length=4)), CODER)


@pytest.mark.slow
def test_an_autoregressive_run_goes_on_in_blocks_without_a_jump_and_generate_writes_with_it(
    data, one_device, tmp_path, capsys
):
    ar, blocks, common = tmp_path / "ar", tmp_path / "blocks", {"steps": 60, "eval_every": 30}
    train_tpu.main(dream_config(data, ar, dream=train_tpu.Dream(objective="ar"), **common))
    assert checkpoints.load(md, ar)[0].cfg.block_length == 1
    recipe = train_tpu.Dream(init=str(ar), block_length=4, block_warmup=20, rates=(0.3, 0.8), rate_warmup=5)
    train_tpu.main(dream_config(data, blocks, str(ar), dream=recipe, **common))
    assert checkpoints.load(md, blocks)[0].cfg.block_length == 4
    before = np.mean([loss for loss, _ in losses(ar).values()][-5:])
    assert losses(blocks)[1][0] == pytest.approx(before, abs=0.3)  # log(600) = 6.4 at first
    assert (blocks / "samples.txt").read_text().count("---- step") == 2
    scores = [json.loads(line) for line in (blocks / "log.jsonl").read_text().splitlines()]
    assert all(np.isfinite(row["bits_per_byte"]) for row in scores if "bits_per_byte" in row)
    capsys.readouterr()
    flags = generate.DreamFlags(threshold=0.1)
    generate.main(generate.Config("dream", str(blocks), prompt="def area(", max_new=12, devices=1, dream=flags))
    out, err = capsys.readouterr()
    assert out.startswith("def area(")
    assert "forward passes" in err


@pytest.mark.slow
def test_the_loss_of_blocks_is_in_the_mean_their_exact_bound_whatever_the_estimate():
    cfg = md.DreamConfig(64, 32, 1, 4, 2, 8, 48, mask_id=3, pad_id=0, bos_id=0, eos_id=0, positions=64, block_length=4)
    B, position_L = 64, jnp.array([*range(7), *range(4), 0])
    token_BL = jnp.tile(jnp.asarray(np.random.default_rng(0).integers(4, 64, 12)), (B, 1))
    segment_BL, position_BL = (jnp.tile(x, (B, 1)) for x in (jnp.array([1] * 7 + [2] * 4 + [0]), position_L))
    model = nnx.merge(md.graph_of(cfg, md.Run()), jax.tree.map(lambda x: 3 * x, md.new_params(cfg, 0)))
    counted_BL = md.counted(segment_BL).at[:, :2].set(False)
    row = token_BL, segment_BL, position_BL
    exact = float(jax.jit(lambda model: model.exact_nll(*row, ~counted_BL).sum())(model))

    @functools.partial(jax.jit, static_argnums=0)
    def nats(dream, key):
        noise = functools.partial(md.noise, key, B, jnp.arange(B))
        return train_tpu.block_nats(dream, model, 0, *row, counted_BL, noise)

    def mean(**settings):
        dream = train_tpu.Dream(**settings)
        draws = [float(nats(dream, jax.random.key(i))) for i in range(40)]
        return np.mean(draws), np.std(draws) / 40**0.5

    for settings in ({}, {"complement": True}):
        value, error = mean(**settings)
        assert abs(value - exact) < 4 * error < 0.1 * exact, settings
    value, error = mean(least_one=True)  # no bound, and so it says
    assert abs(value - exact) > 4 * error
    # Unweighted in the warm-up, where hardly a token is masked.
    for more in ({}, {"complement": True}):
        assert mean(rate_warmup=10, **more)[0] < 0.1 * exact


@pytest.mark.slow
def test_a_dream_learns_the_answers_to_eight_prompts_by_heart():
    token_ABL = jnp.asarray(np.random.default_rng(0).integers(4, 64, (1, 8, 16)))
    batch = {"token_ABL": token_ABL, "segment_ABL": jnp.ones_like(token_ABL)}
    batch["position_ABL"] = jnp.broadcast_to(jnp.arange(16), token_ABL.shape)
    batch["fixed_ABL"] = jnp.broadcast_to((jnp.arange(16) < 4).astype(int), token_ABL.shape)  # prompts of four tokens
    cfg = md.DreamConfig(64, 64, 2, 4, 2, 16, 128, mask_id=3, pad_id=0, bos_id=0, eos_id=0, positions=64, theta=100.0)
    optimizer, params = train_tpu.make_optimizer(1.0, 0.0), jax.jit(lambda: md.new_params(cfg, 0))()
    state = {"params": params, "opt": jax.jit(optimizer.init)(params)}
    settings = train_tpu.Config(model="dream_tiny", lr=1e-2, steps=1000, warmup=3)
    step = jax.jit(train_tpu.make_step(settings, md.graph_of(cfg, md.Run()), optimizer))
    history = []
    for i in range(200):
        state, metrics = step(state, batch, i)
        history.append(float(metrics["loss"]))
    assert np.mean(history[:10]) > 3  # log(63) = 4.1 at first
    assert np.mean(history[-50:]) < 2  # 1.2 seen; one step in a few draws a small t, whose few tokens weigh a lot


def test_a_dream_run_ends_with_what_generate_needs_and_resuming_equals_not_stopping(data, one_device, tmp_path):
    out, copy = tmp_path / "run", tmp_path / "copy"
    train_tpu.main(dream_config(data, out))
    tokenizer = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    size = Rows(data, "train").meta["vocab_size"]
    assert tokenizer.token_to_id("<|mask|>") == size  # behind the last id of the data
    model, _ = checkpoints.load(md, out)
    assert model.cfg == dataclasses.replace(DREAM, mask_id=size)
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    scores = {row["step"]: row for row in rows if "bits_per_byte" in row}
    assert scores.keys() == {2, 4}
    assert scores[4]["heldout_nats"] < scores[2]["heldout_nats"] < np.log(640) * 1.1
    assert (out / "samples.txt").read_text().count("---- step") == 2

    shutil.copytree(out, copy)
    shutil.rmtree(copy / "checkpoints" / "4")
    train_tpu.main(resumed(copy, micro_batch=4))
    assert losses(copy) == losses(out)
    assert len(losses(copy)) == 4
    for a, b in zip(
        *(jax.tree.leaves(nnx.state(checkpoints.load(md, folder)[0])) for folder in (out, copy)), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    assert checkpoints.load(md, out, step=2)[0].cfg == model.cfg
    for kwargs, part in (({"step": 3}, "no checkpoint of step 3; it has [2, 4]"), ({}, "no checkpoint; train one")):
        with pytest.raises(FileNotFoundError, match=re.escape(part)):
            checkpoints.load(md, out if kwargs else tmp_path, **kwargs)
    largest = max((copy / "checkpoints" / "4" / "params").rglob("*"), key=lambda p: p.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    with pytest.raises(ValueError, match=r"checkpoints/4 cannot be read: .+") as error:
        checkpoints.load(md, copy)
    assert "\n" not in str(error.value)


def save_start(folder, data):
    """A Dream far from a fresh one, in bfloat16, with the tokenizer of the data; its config."""
    meta = Rows(data, "train").meta
    ids = {"mask_id": meta["vocab_size"], "pad_id": meta["eos_id"], "bos_id": meta["eos_id"], "eos_id": meta["eos_id"]}
    cfg = dataclasses.replace(DREAM, **ids)
    params = jax.tree.map(lambda x: (3 * x).astype(jnp.bfloat16), md.new_params(cfg, 5))
    (folder.parent / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    (folder.parent / "vocab.json").write_text("{}")
    files = [data / "tokenizer.json", *(folder.parent / name for name in ("tokenizer_config.json", "vocab.json"))]
    checkpoints.save(md, folder, nnx.merge(md.graph_of(cfg, md.Run()), params), files, source="a/b")
    return cfg


def test_a_dream_learns_holes_of_any_length_and_says_with_which_id_they_grow(one_device, tmp_path):
    texts = [(f"f({n}) = ", f"{n} + {n} * {n}", f" of {n}") for n in range(300)]
    lines = [json.dumps(dict(zip(("prompt", "response", "suffix"), text, strict=True))) for text in texts]
    (tmp_path / "holes.jsonl").write_text("\n".join(lines))
    cfg = {"source": str(tmp_path / "holes.jsonl"), "seq_len": 64, "vocab_size": 300, "heldout": 0.1, "workers": 1}
    data = tmp_path / "rows"
    data_prep.main(data_prep.Pairs(out=str(data), edit_rate=0.5, **cfg))
    train_tpu.main(dream_config(data, tmp_path / "run"))
    model = checkpoints.load(md, tmp_path / "run")[0].cfg
    assert model.expand_id == model.mask_id + 1
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy/checkpoints/4")
    train_tpu.main(resumed(tmp_path / "copy", micro_batch=4))
    assert losses(tmp_path / "copy") == losses(tmp_path / "run")
    # A Dream that knew no such id gets the first that is free.
    start = save_start(tmp_path / "start", data)
    train_tpu.main(dream_config(data, tmp_path / "next", init=tmp_path / "start", steps=1))
    known = tokenizers.Tokenizer.from_file(str(data / "tokenizer.json")).get_vocab_size()
    learnt = dataclasses.replace(start, expand_id=max(known, start.mask_id + 1))
    assert checkpoints.load(md, tmp_path / "next")[0].cfg == learnt
    for wrong in ({"block_length": 4}, {"objective": "ar"}, {"init": str(tmp_path / "start"), "lora_rank": 2}):
        settings = dream_config(data, tmp_path / "no", init=wrong.get("init", ""), dream=train_tpu.Dream(**wrong))
        assert "for a Dream that sees the whole canvas, without --lora_rank" in refusal(settings)
    # An autoregressive one becomes such a Dream.
    plain = tmp_path / "plain"
    data_prep.main(data_prep.Pairs(out=str(plain), tokenizer=str(data / "tokenizer.json"), **cfg))
    train_tpu.main(dream_config(plain, tmp_path / "ar", dream=train_tpu.Dream(objective="ar"), steps=1))
    whole = train_tpu.Dream(init=str(tmp_path / "ar"), anneal_steps=1)
    train_tpu.main(dream_config(data, tmp_path / "whole", tmp_path / "ar", dream=whole, steps=1))
    assert checkpoints.load(md, tmp_path / "whole")[0].cfg.expand_id > 0


def test_a_step_with_lora_changes_the_adapters_alone():
    cfg = md.DreamConfig(64, 16, 1, 2, 1, 8, 24, mask_id=3, pad_id=0, bos_id=0, eos_id=0, positions=64)
    token_ABL = jnp.asarray(np.random.default_rng(0).integers(4, 64, (1, 4, 16)))
    batch = {"token_ABL": token_ABL, "segment_ABL": jnp.ones_like(token_ABL)}
    batch["position_ABL"] = jnp.broadcast_to(jnp.arange(16), token_ABL.shape)
    base = jax.tree.map(lambda x: x.astype(jnp.bfloat16), md.new_params(cfg, 0))
    adapters, optimizer = md.new_adapters(jax.random.key(1), base, 2), train_tpu.make_optimizer(1.0, 0.5)
    state = {"params": adapters, "opt": optimizer.init(adapters), "base": base}
    settings = train_tpu.Config(model="dream_tiny", lr=1e-2, steps=10, warmup=1)
    step = jax.jit(train_tpu.make_step(settings, md.graph_of(cfg, md.Run()), optimizer))
    new, metrics = step(state, batch, 1)
    assert metrics["ok"]
    assert jax.tree.map(np.array_equal, new["base"], base) == jax.tree.map(lambda _: True, base)
    for old, x in zip(*(jax.tree.leaves(s["params"]["layers"]["0"]) for s in (state, new)), strict=True):
        assert x.dtype == jnp.float32
        assert np.array_equal(x, old) == bool(old.any())  # B is 0 at first, so A has no gradient, and does not decay


@pytest.mark.slow
@pytest.mark.parametrize("block", [0, 4])
def test_lora_trains_adapters_beside_frozen_weights_and_merges_them(pairs, one_device, tmp_path, block):
    start, out, copy = (tmp_path / name for name in ("start", "run", "copy"))
    save_start(start, pairs)
    dream = train_tpu.Dream(init=str(start), lora_rank=2, block_length=block)
    train_tpu.main(dream_config(pairs, out, start, dream=dream, weight_decay=0.5))
    if not block:  # nothing has changed yet
        want = first_loss(checkpoints.load(md, start, dtype=jnp.float32)[0], pairs)
        assert losses(out)[1][0] == pytest.approx(want, rel=1e-4)
    assert checkpoints.load(md, out / "merged")[0].cfg.block_length == block
    saved = checkpoints.Checkpoints(out).meta()["sums"]
    assert sum(name.startswith("adapters.") for name in saved) == 2 * 7 * DREAM.layers
    assert not any(name.startswith(("params.", "base.")) for name in saved)

    # What is not in its targets stays, bit for bit; what is has a difference of rank 2.
    before, after = (checkpoints.load(md, folder, dtype=jnp.float32)[0] for folder in (start, out / "merged"))
    before, after = (checkpoints.flatten(nnx.to_pure_dict(nnx.state(model))) for model in (before, after))
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {f"layers.{i}.{name}" for i in range(DREAM.layers) for name in md.MATRICES}
    assert all(np.linalg.matrix_rank(after[name] - before[name], tol=1e-5) <= 2 for name in changed)
    assert runs.read_json(out / "merged/config.json")["source"] == "a/b"  # what it was made of, and how it chats
    assert {"tokenizer.json", "tokenizer_config.json", "vocab.json"} <= {
        path.name for path in (out / "merged").iterdir()
    }

    # A run that was stopped goes on as if it had not been, beside the same weights alone.
    shutil.copytree(out, copy)
    shutil.rmtree(copy / "checkpoints/4")
    train_tpu.main(resumed(copy, micro_batch=4))
    assert losses(copy) == losses(out)
    again = checkpoints.flatten(nnx.to_pure_dict(nnx.state(checkpoints.load(md, copy / "merged")[0])))
    assert all(np.array_equal(again[name], after[name]) for name in after)
    with pytest.raises(ValueError, match=r"holds what LoRA learnt; the whole model is in .*run/merged"):
        checkpoints.load(md, out)
    changes = {
        "--lora_rank 2 there, 3 here": {"lora_rank": 3},
        f"block_length {block} there, 8 here": {"block_length": 8},
        "merged holds other weights than those that": {"init": str(out / "merged")},
    }
    for said, changed in changes.items():
        assert said in refusal(resumed(copy, dream=dataclasses.replace(dream, **changed)))
    for wrong in (train_tpu.Dream(str(start), -1), train_tpu.Dream("", 2)):
        assert "--lora_rank is above 0, goes with --init" in refusal(config(pairs, tmp_path / "a", dream=wrong))


def test_what_does_not_fit_is_refused_before_a_weight_is_read(pairs, one_device, tmp_path, monkeypatch, capsys):
    cfg = save_start(tmp_path / "start", pairs)
    params = md.count_params(cfg)["total"]
    adapters = 16 * sum(sum(x.shape) for x in jax.tree.leaves(md.param_shapes(cfg)["layers"]) if x.ndim == 2)
    full, lora = 16 * params + 4, 4 * params + 16 * adapters + 4  # weights, two moments, gradients; a counter
    free = lambda size: monkeypatch.setattr(checkpoints, "free_bytes", lambda _: size)  # noqa: E731
    monkeypatch.setattr(checkpoints, "load", None)
    free(full - 1)
    said = refusal(dream_config(pairs, tmp_path / "a", tmp_path / "start"))
    assert said.startswith(f"weights, moments and gradients take {full / 1e9:.3g} GB on each device, where ")
    assert said.endswith(f"--lora_rank=16 takes {lora / 1e9:.3g}")
    free(lora - 1)
    for rank in (0, 16):
        start = train_tpu.Dream(str(tmp_path / "start"), rank)
        assert "a smaller model, or more devices" in refusal(dream_config(pairs, tmp_path / "a", "x", dream=start))
    free(1)
    assert "a smaller model, or more devices" in refusal(config(pairs, tmp_path / "a", model="dream_test"))
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("kind", [pytest.param("documents", marks=pytest.mark.slow), "pairs"])
def test_init_starts_at_the_loss_of_the_checkpoint(kind, data, pairs, one_device, tmp_path):
    folder = data if kind == "documents" else pairs
    cfg = save_start(tmp_path / "start", folder)
    train_tpu.main(dream_config(folder, tmp_path / "run", init=tmp_path / "start", steps=1))
    want = first_loss(checkpoints.load(md, tmp_path / "start", dtype=jnp.float32)[0], folder)
    assert losses(tmp_path / "run")[1][0] == pytest.approx(want, rel=1e-4)
    assert checkpoints.load(md, tmp_path / "run")[0].cfg == cfg
    assert "messages" in (tmp_path / "run" / "tokenizer_config.json").read_text()  # it still knows how to chat
    assert runs.read_json(tmp_path / "run" / "config.json")["source"] == "a/b"
    if kind == "documents":
        train_tpu.main(dream_config(folder, tmp_path / "next", init=tmp_path / "run", steps=1))
        want = first_loss(checkpoints.load(md, tmp_path / "run")[0], folder)
        assert losses(tmp_path / "next")[1][0] == pytest.approx(want, rel=1e-4)
        return
    assert "other ids" in refusal(dream_config(data, tmp_path / "a", init=tmp_path / "start"))
    assert "leave --model=tiny out" in refusal(dream_config(folder, tmp_path / "a", "x", model="tiny"))
    assert "does not exist" in refusal(dream_config(folder, tmp_path / "a", init=tmp_path / "none"))
    assert "PythonCoder would learn too" in refusal(dream_config(folder, tmp_path / "a", model="tiny"))
    assert "dream_tiny" in refusal(dream_config(folder, tmp_path / "a", model="dream_huge"))
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
def test_a_dream_step_on_eight_devices_has_the_loss_of_one(data):
    rows, cfg = Rows(data, "train").read(np.arange(8)), DREAM
    names = "token_ABL", "segment_ABL", "position_ABL"
    optimizer, params = train_tpu.make_optimizer(1.0, 0.1), md.new_params(cfg, 0)
    state = {"params": params, "opt": optimizer.init(params)}
    settings = train_tpu.Config(model="dream_tiny", lr=1e-2, steps=10, warmup=1)
    results = []
    for micro, shape in ((8, (1, 1, 1)), (4, (2, 2, 2))):  # two micro-batches of four rows a data x fsdp group
        batch = {name: jnp.asarray(x.reshape(-1, micro, 64)) for name, x in zip(names, rows, strict=True)}
        step = jax.jit(train_tpu.make_step(settings, md.graph_of(cfg, md.Run(remat="qkvo")), optimizer))
        mesh = jax.sharding.Mesh(
            np.array(jax.devices()[: np.prod(shape)]).reshape(shape), ("data", "fsdp", "tensor"),
            axis_types=(jax.sharding.AxisType.Auto,) * 3,
        )  # fmt: skip
        with jax.set_mesh(mesh):
            placed = jax.device_put(state, md.shardings(mesh, state))
            rows_at = jax.NamedSharding(mesh, jax.sharding.PartitionSpec(None, md.BATCH))
            results.append(step(placed, jax.device_put(batch, rows_at), 1))
    (one, first), (many, second) = results
    assert float(first["loss"]) == pytest.approx(float(second["loss"]), rel=1e-5)
    assert float(first["grad_norm"]) == pytest.approx(float(second["grad_norm"]), rel=1e-4)
    for a, b in zip(jax.tree.leaves(one["opt"]), jax.tree.leaves(many["opt"]), strict=True):  # moments: the gradients
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * np.abs(a).max())


def test_weight_decay_leaves_out_the_biases_and_norms_of_dream():
    mask = checkpoints.flatten(train_tpu.decays(md.param_shapes(md.CONFIGS["tiny"])))
    assert {name.split(".")[-1] for name, decay in mask.items() if not decay} == {
        "norm", "input_layernorm", "post_attention_layernorm", "q_bias", "k_bias", "v_bias",
    }  # fmt: skip


@pytest.mark.slow
def test_a_model_that_is_there_reads_the_standard_library_with_its_own_tokenizer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    common = ("--seq_len=64", "--batch_size=8", "--steps=2", "--eval_rows=8")
    for more in (
        ("--model=dream_tiny", "--objective=ar", "--out=ar"),
        ("--init=ar", "--block_length=4", "--block_warmup=1", "--out=blocks"),
    ):
        result = run("train_tpu.py", *common, *more, timeout=600)
        assert result.returncode == 0, result.stderr
    assert (tmp_path / "ar/tokenizer.json").read_bytes() == (tmp_path / "blocks/tokenizer.json").read_bytes()


@pytest.mark.slow
def test_two_processes_train_as_one(data, from_the_shell, tmp_path):
    out, port = tmp_path / "run", 20_000 + os.getpid() % 20_000
    env = os.environ | AS_A_USER | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    more = ["--steps=12", "--eval_every=4"]
    both = [
        subprocess.Popen(command(*flags(data, out, f"--hosts=localhost:{port},2,{i}", *more)), env=env, stdout=-1)
        for i in (0, 1)
    ]
    texts = [process.communicate(timeout=300)[0].decode() for process in both]
    assert [process.returncode for process in both] == [0, 0], texts
    for step, want in losses(from_the_shell).items():
        np.testing.assert_allclose(losses(out)[step], want, rtol=2e-3)


IN_BLOCKS = ("--model=dream_tiny", "--block_length=4", "--block_warmup=30", "--rate_warmup=15", "--complement")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "more"), [(20, ["--steps=400"]), (5, ["--steps=40", *IN_BLOCKS])], ids=["pythoncoder", "blocks"]
)
def test_kill_9_at_random_moments_always_resumes_to_the_unbroken_run(data, tmp_path, kills, more):
    more = (*more, "--eval_every=3", "--eval_rows=8")
    unbroken, out = tmp_path / "unbroken", tmp_path / "killed"
    result = run(*flags(data, unbroken, *more), timeout=900)
    assert result.returncode == 0, result.stderr
    resume = flags(data, out, *more, f"--resume={out}")
    steps = kill_and_resume(command(*flags(data, out, *more)), command(*resume), kills)
    assert max(steps) > 3  # a checkpoint lay between two kills
    assert losses(out) == losses(unbroken)
    assert checkpoints.Checkpoints(out).meta()["sums"] == checkpoints.Checkpoints(unbroken).meta()["sums"]


def two_hosts(data, outs, *more):
    """Two processes that train together, host i in the folder outs[i]."""
    port = 20_000 + (os.getpid() * 7 + int(time.time() * 10)) % 20_000
    env = os.environ | AS_A_USER | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    pipes = {"env": env, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    hosts = [f"--hosts=localhost:{port},2,{i}" for i in (0, 1)]
    both = zip(outs, hosts, strict=True)
    return [subprocess.Popen(command(*flags(data, out, host, *more)), **pipes) for out, host in both]


def wait_for_step(process, step):
    for line in process.stdout:
        if line.startswith(f"step {step} "):
            return
    raise AssertionError(process.stderr.read())


@pytest.mark.slow
@pytest.mark.parametrize("asked", [0, 1])
def test_sigterm_to_one_of_two_hosts_saves_on_both_and_the_run_goes_on(data, from_the_shell, tmp_path, asked):
    out, more = tmp_path / "run", ("--steps=12", "--eval_every=4")
    both = two_hosts(data, [out, out], *more)
    wait_for_step(both[0], 5)
    both[asked].send_signal(signal.SIGTERM)
    for process in both:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 1, error
        assert "Traceback" not in error
        assert f"go on with --resume={out}" in error.splitlines()[-1]
    both = two_hosts(data, [out, out], *more, f"--resume={out}")
    assert [(p.communicate(timeout=300), p.returncode)[1] for p in both] == [0, 0]
    for step, want in losses(from_the_shell).items():
        np.testing.assert_allclose(losses(out)[step], want, rtol=2e-3)


@pytest.mark.slow
def test_hosts_that_share_no_disk_all_say_so_before_the_first_step(data, tmp_path):
    both = two_hosts(data, [tmp_path / "a", tmp_path / "b"], "--steps=4")
    for process in both:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 1
        assert "hosts [1] do not see what host 0 wrote" in error.splitlines()[-1]


@pytest.mark.slow
def test_a_killed_host_ends_the_others_and_the_run_goes_on(data, from_the_shell, tmp_path):
    out, more = tmp_path / "run", ("--steps=12", "--eval_every=4")
    both = two_hosts(data, [out, out], *more)
    wait_for_step(both[0], 6)
    both[1].kill()
    assert [(p.communicate(timeout=120), p.returncode)[1] != 0 for p in both] == [True, True]
    both = two_hosts(data, [out, out], *more, f"--resume={out}")
    assert [(p.communicate(timeout=300), p.returncode)[1] for p in both] == [0, 0]
    for step, want in losses(from_the_shell).items():
        np.testing.assert_allclose(losses(out)[step], want, rtol=2e-3)


@pytest.mark.slow
def test_hosts_with_other_settings_all_say_so(data, tmp_path):
    out, port = tmp_path / "run", 20_000 + os.getpid() % 20_000
    env = os.environ | AS_A_USER | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    pipes = {"env": env, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    lines = [flags(data, out, f"--hosts=localhost:{port},2,{i}", f"--steps={4 + i}") for i in (0, 1)]
    for process in [subprocess.Popen(command(*line), **pipes) for line in lines]:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 1
        assert "hosts [1] have other settings or data than host 0" in error.splitlines()[-1]


def test_without_model_and_batch_size_data_and_device_decide_together(capsys):
    """The largest preset that memory holds and the data feeds; short runs take small steps."""

    def picked(tokens, chips=1, kind="v6", **settings):
        devices = [SimpleNamespace(platform="tpu", device_kind=f"TPU {kind} lite", memory_stats=dict)] * chips
        data = {"seq_len": 1024, "vocab_size": 4000, "vocab_padded": 4096, "splits": {"train": {"tokens": tokens}}}
        cfg = train_tpu.Config(**settings)
        name, model = train_tpu.pick_model(cfg, devices, data)
        _, batch, _ = train_tpu.pick_batch(dataclasses.replace(cfg, model=name), model, 1, False, data)
        return name, batch * 1024

    assert picked(8_000_000) == ("tiny", 8192)
    assert picked(60_000_000) == ("small", 65_536)
    assert picked(500_000_000) == ("300m", 131_072)
    assert picked(2_000_000_000) == ("1b", 131_072)
    assert picked(2_000_000_000, kind="v5") == ("300m", 131_072)
    assert picked(2_000_000_000, kind="v5", chips=8) == ("1b", 131_072)  # its weights and moments lie on all of them
    assert picked(8_000_000, model="1b")[0] == "1b"


def test_the_fused_attention_is_that_of_the_device():
    def of(platform, version="", dtype="bfloat16"):
        device = SimpleNamespace(platform=platform, compute_capability=version)
        return train_tpu.fused_kernel(device, dtype)

    found = [of("gpu", version) for version in ("7.5", "8.0", "8.9", "9.0", "10.0", "12.0", "gfx942")]
    assert found == ["", "ampere", "ampere", "hopper", "ampere", "ampere", ""]
    assert (of("tpu"), of("cpu"), of("gpu", "8.0", "float32")) == ("tpu", "", "")
    assert train_tpu.fused_kernel(SimpleNamespace(platform="gpu"), "bfloat16") == ""


def test_steps_on_gpus_are_picked_by_what_was_compiled():
    def picked(memory, **settings):
        device = SimpleNamespace(platform="gpu", device_kind="NVIDIA")
        cfg = train_tpu.Config(**settings)
        name, model = train_tpu.pick_model(cfg, [device], memory=memory)
        fitting = train_tpu.most_rows(name, [device], memory)
        return name, train_tpu.pick_batch(dataclasses.replace(cfg, model=name), model, 1, False, None, fitting)[2]

    for name, recorded in train_tpu.STEP_GIB["gpu"].items():
        for rows, gib in recorded.items():
            assert picked(gib, model=name) == (name, rows)
    smallest = min(train_tpu.STEP_GIB["gpu"]["1b"].values())
    assert picked(smallest)[0] == "1b"
    assert picked(smallest - 0.01)[0] == "300m"
    assert picked(smallest - 0.01, model="1b") == ("1b", 1)  # whoever insists gets the least
    assert picked(0.5) == ("tiny", 2)


def test_a_preset_takes_the_ids_and_rows_that_data_prep_writes_unasked():
    data = {"seq_len": 2048, "vocab_size": 8192, "vocab_padded": 8192, "splits": {"train": {"tokens": 200_000}}}
    cfg, model, _, _ = train_tpu.resolve(train_tpu.Config(fsdp=1), jax.devices()[:1], data)
    assert (cfg.model, model.vocab, model.positions, cfg.seq_len) == ("tiny", 8192, 2048, 2048)
    # and a table twice as long as the data needs is cut
    for ids, rows in ((300, 512), (1024, 1024), (1500, 2048), (2048, 2048), (3000, 3072)):
        data |= {"vocab_size": ids, "vocab_padded": -(-ids // 512) * 512}
        assert train_tpu.resolve(train_tpu.Config(fsdp=1), jax.devices()[:1], data)[1].vocab == rows


def test_a_run_from_before_muon_goes_on_with_adamw(unbroken, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(unbroken[0], out)
    saved = json.loads((out / "config.json").read_text())
    assert saved["train"].pop("optimizer") == "muon"
    runs.write(out / "config.json", saved)
    assert resumed(out).optimizer == "adamw"


@pytest.mark.slow
def test_more_epochs_go_on_with_a_finished_run_and_old_epochs_are_not_kept(data, one_device, capsys, tmp_path):
    out = tmp_path / "run"
    train_tpu.main(config(data, out, model="dream_test", epochs=1.0, batch_size=1024, micro_batch=256, eval_rows=8))
    done = max(losses(out))
    train_tpu.main(resumed(out))
    assert f"has all of its {done} steps; more with --epochs or --steps" in capsys.readouterr().out
    train_tpu.main(resumed(out, epochs=3.0))
    assert max(losses(out)) == 3 * done
    assert len(runs.saved_steps(out)) <= 3  # two, and the best


def test_without_held_out_rows_there_is_no_score(data, one_device, tmp_path):
    folder = tmp_path / "rows"
    shutil.copytree(data, folder)
    meta = json.loads((folder / "meta.json").read_text())
    meta["splits"]["heldout"] |= {"shards": [], "rows": 0, "tokens": 0}
    (folder / "meta.json").write_text(json.dumps(meta))
    train_tpu.main(config(folder, tmp_path / "run", model="dream_test", steps=2))
    assert "NaN" not in (tmp_path / "run" / "log.jsonl").read_text()
    assert list(runs.saved_steps(tmp_path / "run")) == [2]


@pytest.mark.slow
def test_a_checkpoint_is_written_after_save_minutes(data, one_device, tmp_path):
    train_tpu.main(config(data, tmp_path / "run", model="dream_test", steps=3, eval_every=3, save_minutes=1e-9, keep=9))
    assert list(runs.saved_steps(tmp_path / "run")) == [1, 2, 3]


@pytest.mark.slow
def test_data_and_run_can_be_in_a_bucket(data, bucket, tmp_path):
    env = os.environ | AS_A_USER | bucket
    copy_in_bucket(bucket, "put", f"{data}/", "bucket/rows/")
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


def test_float32_on_an_accelerator_means_products_in_float32(one_device):
    """Without being asked a TPU multiplies float32 matrices in bfloat16, a GPU in TF32."""
    before = jax.config.jax_default_matmul_precision
    try:
        train_tpu.resolve(train_tpu.Config(model="tiny", dtype="float32"), jax.devices())
        assert "HIGHEST" in jax.jit(lambda a: a @ a).lower(jnp.ones((2, 2))).as_text()
    finally:
        jax.config.update("jax_default_matmul_precision", before)


@pytest.mark.slow
def test_gradients_of_many_micro_batches_meet_once_a_step():
    """Four devices, four micro-batches: no reduction and no gathering of weights inside a loop, and the same step."""
    model = pc.Config(256, 32, layers=2, heads=4, kv_heads=2, head_size=8, ffn=64, positions=32)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(1, 4, 1), ("data", "fsdp", "tensor"))
    token_ABL = jax.random.randint(jax.random.key(0), (4, 4, 32), 0, 256)
    batch = {"token_ABL": token_ABL, "segment_ABL": jnp.ones_like(token_ABL)}
    batch["position_ABL"] = jnp.broadcast_to(jnp.arange(32), token_ABL.shape)
    results = {}
    for reduce in ("micro", "step"):
        cfg = train_tpu.Config(
            model="tiny", seq_len=32, batch_size=16, micro_batch=1, lr=1e-2, steps=10, warmup=1, reduce=reduce
        )
        optimizer = train_tpu.make_optimizer(1.0, 0.1)
        shapes = checkpoints.state_shapes(pc, model, optimizer, mesh)
        graph = pc.graph_of(model, pc.Run(dropout=0.1))
        step = train_tpu.lower_step(cfg, graph, optimizer, shapes, mesh).compile()
        text = step.as_text()
        bodies = set(re.findall(r"body=%?([\w.-]+)", text))
        inside = [part for part in text.split("\n\n") if part.lstrip("% ").split(" ")[0] in bodies]
        assert len(inside) >= 3  # micro-batches, layers forward, layers backward
        communicating = [part for part in inside if re.search(r" (all-reduce|all-gather|reduce-scatter)\(", part)]
        assert bool(communicating) == (reduce == "micro")
        params = pc.new_params(model, 0)
        state = jax.device_put(
            {"params": params, "opt": optimizer.init(params)}, jax.tree.map(lambda s: s.sharding, shapes)
        )
        rows = jax.device_put(batch, jax.NamedSharding(mesh, jax.P(None, pc.BATCH)))
        results[reduce] = step(state, rows, jnp.int32(1))
    (state, metrics), (want, want_metrics) = results["step"], results["micro"]
    for name in ("loss", "grad_norm"):
        assert float(metrics[name]) == pytest.approx(float(want_metrics[name]), rel=1e-5)
    for a, b in zip(jax.tree.leaves(state["opt"]), jax.tree.leaves(want["opt"]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * np.abs(b).max())
