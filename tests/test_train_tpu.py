"""The trainer: schedule, gradient accumulation, data order, overfitting, resuming, and what it says of bad input."""

import dataclasses
import fcntl
import json
import lzma
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tokenizers
from flax import nnx

import data_prep
import model_dream as md
import model_pythoncoder as pc
import train_tpu

ROOT = Path(__file__).resolve().parent.parent


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
    mask = pc.flatten(train_tpu.decays(pc.param_shapes(pc.CONFIGS["1b"])))
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
        data_prep.Config(roots=tuple(str(library / f"{name}.py") for name in names.split()), out=str(folder / "rows"),
                         vocab_size=600, seq_len=64, heldout=0.1, workers=1, shard_bytes=60_000)
    )  # fmt: skip
    return folder / "rows"


def command(data, out, *more):
    flags = "--seq_len=64", "--batch_size=8", "--log_every=1", f"--compile_cache={Path(data).parent / 'cache'}"
    return [sys.executable, str(ROOT / "train_tpu.py"), f"--data={data}", f"--out={out}", *flags, *more]


def run(*args, devices=1, **options):
    env = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"}
    return subprocess.run(args, capture_output=True, text=True, env=env, timeout=300, **options)


def losses(out):
    rows = [json.loads(line) for line in (Path(out) / "log.jsonl").read_text().splitlines()]
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in rows if "loss" in row}


def says(result, *parts):
    """One clear line on standard error and a failing exit status."""
    assert result.returncode not in (0, None), result.stdout
    assert "Traceback" not in result.stderr, result.stderr
    line = result.stderr.strip().splitlines()[-1]
    for part in parts:
        assert part in line, line


def test_every_row_is_read_once_an_epoch_in_an_order_of_seed_and_epoch(data):
    rows = train_tpu.Rows(data, "train")
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
    params = pc.new_params(cfg, 0)
    state = {"params": params, "opt": optimizer.init(params)}
    settings = train_tpu.Config(dropout=0.0)
    step = jax.jit(train_tpu.make_step(settings, pc.graph_of(cfg, pc.Run()), optimizer, 1e-2, 1000, 3))
    history = []
    for i in range(30):
        state, metrics = step(state, batch, i)
        history.append(float(metrics["main"]))
    assert history[0] == pytest.approx(np.log(640), rel=0.05)
    assert history[-1] < 1.6


def test_splitting_a_step_into_micro_batches_changes_nothing(data):
    cfg = pc.Config(vocab=640, width=64, layers=2, heads=4, kv_heads=2, head_size=16, ffn=128, positions=64)
    rows = train_tpu.Rows(data, "train").read(np.arange(8))
    optimizer, params = train_tpu.make_optimizer(1.0, 0.1), pc.new_params(cfg, 0)
    results = []
    for micro in (8, 2):
        parts = [jnp.asarray(x.reshape(-1, micro, 64)) for x in rows]
        batch = dict(zip(("token_ABL", "segment_ABL", "position_ABL"), parts, strict=True))
        step = train_tpu.make_step(
            train_tpu.Config(dropout=0.1), pc.graph_of(cfg, pc.Run(dropout=0.1)), optimizer, 1e-2, 10, 1
        )
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
    result = run(*command(data, out, "--steps=12", "--eval_every=4"))
    assert result.returncode == 0, result.stderr
    return out, result.stdout


def test_a_run_prints_its_choices_and_leaves_what_generate_needs(unbroken):
    out, text = unbroken
    for part in ("model tiny, float32", "parameters", "tokens per parameter", "peak learning rate", "compiled in"):
        assert part in text
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    scores = [row for row in rows if "bits_per_byte" in row]
    assert [row["step"] for row in scores] == [4, 8, 12]
    assert scores[-1]["heldout_nats"] < scores[0]["heldout_nats"]
    assert {"config.json", "tokenizer.json", "log.jsonl", "samples.txt", "checkpoints"} <= set(os.listdir(out))
    model, _, step = pc.load(out)
    assert step == 12
    assert model.cfg == pc.CONFIGS["tiny"]


@pytest.mark.slow
def test_evaluate_scores_a_checkpoint_as_the_trainer_did(data, unbroken, tmp_path):
    out = unbroken[0]
    flags = "--all_steps=True", "--json=True", f"--rows={train_tpu.Config.eval_rows}"  # the trainer scores no more
    result = run(sys.executable, str(ROOT / "evaluate.py"), f"--ckpt={out}", *flags)
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    logged = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    logged = {row["step"]: row["bits_per_byte"] for row in logged if "bits_per_byte" in row}
    assert len(rows) >= 2
    for row in rows:
        assert row["bits_per_byte"] == pytest.approx(logged[row["step"]], rel=1e-4)
        assert 0 <= row["drafts_accepted"] <= 1
    rows = train_tpu.Rows(data, "heldout").read(np.arange(100))
    text = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json")).decode(rows[0][rows[1] > 0].tolist()).encode()
    result = run(sys.executable, str(ROOT / "evaluate.py"), f"--ckpt={out}", "--rows=100", "--drafts=0", "--json=True")
    xz = 8 * len(lzma.compress(text, preset=9)) / len(text)
    assert json.loads(result.stdout)["xz_bits_per_byte"] == pytest.approx(xz)
    copy = tmp_path / "cut"
    subprocess.run(["cp", "-r", out, copy], check=True)
    largest = max((copy / "checkpoints" / "12" / "params").rglob("*"), key=lambda path: path.stat().st_size)
    os.truncate(largest, 1000)
    says(run(sys.executable, str(ROOT / "evaluate.py"), f"--ckpt={copy}"), "checkpoints/12 cannot be read")
    says(run(sys.executable, str(ROOT / "evaluate.py"), f"--ckpt={out}", "--step=3"), "step 3; it has")
    says(run(sys.executable, str(ROOT / "evaluate.py"), f"--ckpt={tmp_path}"), "no config.json")


@pytest.mark.slow
def test_resuming_before_the_first_checkpoint_starts_at_step_0_with_the_runs_settings(data, unbroken, tmp_path):
    out = tmp_path / "run"
    (out / "checkpoints" / "4.orbax-checkpoint-tmp").mkdir(parents=True)  # what a kill during the first save leaves
    shutil.copy(unbroken[0] / "config.json", out)
    result = run(sys.executable, str(ROOT / "train_tpu.py"), f"--resume={out}")
    assert result.returncode == 0, result.stderr
    assert "starting at step 0" in result.stdout
    assert losses(out) == losses(unbroken[0])
    assert not list((out / "checkpoints").glob("*tmp*"))


def test_sigterm_saves_and_resuming_equals_not_stopping_bit_for_bit(data, unbroken, tmp_path):
    out = tmp_path / "run"
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1", "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(command(data, out, "--steps=12", "--eval_every=4"), stdout=subprocess.PIPE, env=env)
    for line in process.stdout:
        if line.startswith(b"step 6 "):
            process.send_signal(signal.SIGTERM)
            break
    process.stdout.read()
    assert process.wait() != 0
    assert max(int(p.name) for p in (out / "checkpoints").iterdir()) >= 6
    result = run(sys.executable, str(ROOT / "train_tpu.py"), f"--resume={out}")  # with the settings of the run
    assert result.returncode == 0, result.stderr
    assert losses(out) == losses(unbroken[0])
    assert len(losses(out)) == 12


@pytest.mark.slow
def test_resuming_on_eight_devices_goes_on_with_the_same_losses(data, unbroken, tmp_path):
    out = tmp_path / "run"
    run(*command(data, out, "--steps=12", "--eval_every=4", "--keep=5"))
    for step in (8, 12):
        subprocess.run(["rm", "-r", out / "checkpoints" / str(step)], check=True)
    result = run(sys.executable, str(ROOT / "train_tpu.py"), f"--resume={out}", "--tensor=1", devices=8)
    assert result.returncode == 0, result.stderr
    assert "8 x cpu" in result.stdout
    for step, want in losses(unbroken[0]).items():
        np.testing.assert_allclose(losses(out)[step], want, rtol=2e-3)


def test_bad_input_is_one_line_and_leaves_the_run_alone(data, unbroken, tmp_path):
    out = unbroken[0]
    before = (out / "log.jsonl").read_text()
    says(run(*command(data, out, "--steps=12")), "already holds a run", "--resume=")
    says(run(*command(tmp_path / "none", tmp_path / "a")), "data_prep.py")
    says(run(*command(data, tmp_path / "a", "--model=huge")), "tiny, small, 300m, 1b")
    says(run(*command(data, tmp_path / "a", "--seq_len=32")), "rows of 64 tokens", "--seq_len=32")
    says(run(*command(data, tmp_path / "a", "--seq_len=9999")), "1024 positions")
    says(run(*command(data, tmp_path / "a", "--batch_size=100000")), "--batch_size")
    says(run(*command(data, tmp_path / "a"), devices=3), "--batch_size=8 does not divide over 3")
    says(run(*command(data, out, f"--resume={out}", "--diff=paper")), "another model", "diff")
    says(run(*command(data, tmp_path / "a", f"--resume={tmp_path}")), "--resume")
    assert (out / "log.jsonl").read_text() == before
    assert not (tmp_path / "a").exists()


def test_two_trainers_on_one_folder_are_refused(data, unbroken):
    out = unbroken[0]
    with open(out / ".lock0", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        says(run(sys.executable, str(ROOT / "train_tpu.py"), f"--resume={out}", "--steps=20"), "another trainer")


def test_a_corrupted_shard_is_named(data, tmp_path):
    subprocess.run(["cp", "-r", data, tmp_path / "rows"], check=True)
    for shard in sorted((tmp_path / "rows" / "train").iterdir()):
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    says(run(*command(tmp_path / "rows", tmp_path / "out", "--steps=2")), ".parquet is corrupted")


@pytest.mark.parametrize("damage", ["flipped bit", "cut short", "another version"])
def test_a_damaged_checkpoint_is_named(data, unbroken, tmp_path, damage):
    out = tmp_path / "run"
    subprocess.run(["cp", "-r", unbroken[0], out], check=True)
    newest = max((out / "checkpoints").iterdir(), key=lambda p: int(p.name))
    if damage == "another version":
        meta = newest / "meta" / "metadata"
        meta.write_text(meta.read_text().replace('"width"', '"breadth"'))
    else:
        largest = max((newest / "params").rglob("*"), key=lambda p: p.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 8
        largest.write_bytes(content if damage == "flipped bit" else content[: len(content) // 2])
    says(run(sys.executable, str(ROOT / "train_tpu.py"), f"--resume={out}", "--steps=14"), "checkpoints/12")
    says(run(sys.executable, str(ROOT / "generate.py"), f"--ckpt={out}", "--prompt=x"), "checkpoints/12")


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_good_checkpoint(data, unbroken, tmp_path):
    out = tmp_path / "run"
    subprocess.run(["cp", "-r", unbroken[0], out], check=True)

    def small_files():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))  # a write beyond it fails, as on a full disk

    result = run(
        sys.executable, str(ROOT / "train_tpu.py"), f"--resume={out}", "--steps=14", "--compile_cache=",
        preexec_fn=small_files,
    )  # fmt: skip
    says(result, "was not written", "steps [")
    assert pc.load(out)[2] == 12


@pytest.mark.slow
def test_diverging_stops_after_five_steps_without_a_finite_gradient(data, tmp_path):
    result = run(*command(data, tmp_path / "run", "--steps=40", "--lr=1e38", "--warmup=1", "--eval_every=50"))
    says(result, "no finite gradient in five steps")


# ---- Dream ---------------------------------------------------------------------------------------------------------

DREAM = md.DreamConfig(
    640, 32, layers=1, heads=2, kv_heads=1, head_size=16, ffn=64, positions=64, mask_id=3, pad_id=0, bos_id=0, eos_id=0
)


@pytest.fixture
def one_device(monkeypatch):
    """main() in this process, on one device, with a preset that compiles in seconds."""
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: first)
    monkeypatch.setitem(train_tpu.PRESETS, "dream_test", DREAM)


def dream_config(data, out, **changes):
    settings = {"model": "dream_test", "seq_len": 64, "batch_size": 8, "micro_batch": 4, "log_every": 1, "steps": 4}
    settings |= {"eval_every": 2, "eval_rows": 8, "lr": 3e-3, "warmup": 1}
    settings |= {"compile_cache": str(Path(data).parent / "cache")}
    return train_tpu.Config(**settings | {"data": str(data), "out": str(out)} | changes)


def refusal(cfg):
    """The one line that main() exits with."""
    with pytest.raises(SystemExit) as exit:
        train_tpu.main(cfg)
    assert isinstance(exit.value.code, str)
    assert "\n" not in exit.value.code
    return exit.value.code


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Rows of 64 tokens of prompts and responses."""
    folder, rng = tmp_path_factory.mktemp("pairs"), np.random.default_rng(0)
    lines = [{"prompt": f"copy {n}: ", "response": str(n)} for n in rng.integers(0, 10**6, 300).tolist()]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = str(folder / "pairs.jsonl")
    data_prep.main(
        data_prep.Config(source=source, out=str(folder / "rows"), seq_len=64, vocab_size=300, heldout=0.1, workers=1)
    )
    return folder / "rows"


def first_loss(model, folder, seed=0):
    """The loss of the first step of a run over a folder of rows, computed from the model alone."""
    rows = train_tpu.Rows(folder, "train")
    token_BL, segment_BL, position_BL, *fixed = rows.read(rows.order(seed, 0)[:8])
    t_BL, u_BL = md.noise(jax.random.fold_in(jax.random.key(seed), 0), 8, jnp.arange(8), jnp.asarray(segment_BL))
    nats = jax.jit(lambda model, *args: model.nelbo(*args))(
        model, *map(jnp.asarray, (token_BL, segment_BL, position_BL)), t_BL, u_BL, *map(jnp.asarray, fixed)
    )
    free_BL = (segment_BL > 0) & (fixed[0] == 0 if fixed else True)
    return float(nats) / free_BL.sum()


def test_a_dream_learns_the_answers_to_eight_prompts_by_heart():
    token_ABL = jnp.asarray(np.random.default_rng(0).integers(4, 64, (1, 8, 16)))
    batch = {"token_ABL": token_ABL, "segment_ABL": jnp.ones_like(token_ABL)}
    batch["position_ABL"] = jnp.broadcast_to(jnp.arange(16), token_ABL.shape)
    batch["fixed_ABL"] = jnp.broadcast_to((jnp.arange(16) < 4).astype(int), token_ABL.shape)  # prompts of four tokens
    cfg = md.DreamConfig(64, 64, 2, 4, 2, 16, 128, mask_id=3, pad_id=0, bos_id=0, eos_id=0, positions=64, theta=100.0)
    optimizer, params = train_tpu.make_optimizer(1.0, 0.0), jax.jit(lambda: md.new_params(cfg, 0))()
    state = {"params": params, "opt": jax.jit(optimizer.init)(params)}
    settings = train_tpu.Config(model="dream_tiny")
    step = jax.jit(train_tpu.make_step(settings, md.graph_of(cfg, md.Run()), optimizer, 1e-2, 1000, 3))
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
    size = train_tpu.Rows(data, "train").meta["vocab_size"]
    assert tokenizer.token_to_id("<|mask|>") == size  # behind the last id of the data
    model = md.load(out)
    assert model.cfg == dataclasses.replace(DREAM, mask_id=size)
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    scores = {row["step"]: row for row in rows if "bits_per_byte" in row}
    assert scores.keys() == {2, 4}
    assert scores[4]["heldout_nats"] < scores[2]["heldout_nats"] < np.log(640) * 1.1
    assert (out / "samples.txt").read_text().count("---- step") == 2

    shutil.copytree(out, copy)
    shutil.rmtree(copy / "checkpoints" / "4")
    saved = json.loads((copy / "config.json").read_text())["train"]
    train_tpu.main(train_tpu.Config(**saved | {"resume": str(copy), "out": str(copy)}))
    assert losses(copy) == losses(out)
    assert len(losses(copy)) == 4
    for a, b in zip(*(jax.tree.leaves(nnx.state(md.load(folder))) for folder in (out, copy)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert md.load(out, step=2).cfg == model.cfg
    for kwargs, part in (({"step": 3}, "no checkpoint of step 3; it has [2, 4]"), ({}, "no checkpoint; make one")):
        with pytest.raises(FileNotFoundError, match=re.escape(part)):
            md.load(out if kwargs else tmp_path, **kwargs)
    largest = max((copy / "checkpoints" / "4" / "params").rglob("*"), key=lambda p: p.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    with pytest.raises(ValueError, match=r"checkpoints/4 cannot be read: .+") as error:
        md.load(copy)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", [pytest.param("documents", marks=pytest.mark.slow), "pairs"])
def test_init_starts_at_the_loss_of_the_checkpoint(kind, data, pairs, one_device, tmp_path):
    folder = data if kind == "documents" else pairs
    meta = train_tpu.Rows(folder, "train").meta
    ids = {"mask_id": meta["vocab_size"], "pad_id": meta["eos_id"], "bos_id": meta["eos_id"], "eos_id": meta["eos_id"]}
    cfg = dataclasses.replace(DREAM, **ids)
    params = jax.tree.map(lambda x: 3 * x, md.new_params(cfg, 5))  # far from a fresh model
    model = nnx.merge(md.graph_of(cfg, md.Run()), jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    md.save(tmp_path / "start", model, [folder / "tokenizer.json"])
    train_tpu.main(dream_config(folder, tmp_path / "run", model="", init=str(tmp_path / "start"), steps=1))
    want = first_loss(md.load(tmp_path / "start", jnp.float32), folder)
    assert losses(tmp_path / "run")[1][0] == pytest.approx(want, rel=1e-4)
    assert md.load(tmp_path / "run").cfg == cfg
    if kind == "documents":
        train_tpu.main(dream_config(folder, tmp_path / "next", model="", init=str(tmp_path / "run"), steps=1))
        want = first_loss(md.load(tmp_path / "run"), folder)
        assert losses(tmp_path / "next")[1][0] == pytest.approx(want, rel=1e-4)
        return
    assert "other ids" in refusal(dream_config(data, tmp_path / "a", model="", init=str(tmp_path / "start")))
    assert "leave --model=tiny out" in refusal(dream_config(folder, tmp_path / "a", model="tiny", init="x"))
    assert "does not exist" in refusal(dream_config(folder, tmp_path / "a", model="", init=str(tmp_path / "none")))
    assert "PythonCoder would learn too" in refusal(dream_config(folder, tmp_path / "a", model="tiny"))
    assert "dream_tiny" in refusal(dream_config(folder, tmp_path / "a", model="dream_huge"))
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
def test_a_dream_step_on_eight_devices_has_the_loss_of_one(data):
    rows, cfg = train_tpu.Rows(data, "train").read(np.arange(8)), DREAM
    names = "token_ABL", "segment_ABL", "position_ABL"
    optimizer, params = train_tpu.make_optimizer(1.0, 0.1), md.new_params(cfg, 0)
    state, settings = {"params": params, "opt": optimizer.init(params)}, train_tpu.Config(model="dream_tiny")
    results = []
    for micro, shape in ((8, (1, 1, 1)), (4, (2, 2, 2))):  # two micro-batches of four rows a data x fsdp group
        batch = {name: jnp.asarray(x.reshape(-1, micro, 64)) for name, x in zip(names, rows, strict=True)}
        step = jax.jit(train_tpu.make_step(settings, md.graph_of(cfg, md.Run(remat="qkvo")), optimizer, 1e-2, 10, 1))
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
    mask = md.flatten(train_tpu.decays(md.param_shapes(md.CONFIGS["tiny"])))
    assert {name.split(".")[-1] for name, decay in mask.items() if not decay} == {
        "norm", "input_layernorm", "post_attention_layernorm", "q_bias", "k_bias", "v_bias",
    }  # fmt: skip


@pytest.mark.slow
def test_two_processes_train_as_one(data, unbroken, tmp_path):
    out, port = tmp_path / "run", 20_000 + os.getpid() % 20_000
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    more = ["--steps=12", "--eval_every=4"]
    both = [
        subprocess.Popen(command(data, out, f"--hosts=localhost:{port},2,{i}", *more), env=env, stdout=subprocess.PIPE)
        for i in (0, 1)
    ]
    texts = [process.communicate(timeout=300)[0].decode() for process in both]
    assert [process.returncode for process in both] == [0, 0], texts
    for step, want in losses(unbroken[0]).items():
        np.testing.assert_allclose(losses(out)[step], want, rtol=2e-3)


@pytest.mark.slow
def test_kill_9_at_twenty_random_moments_always_resumes_to_the_unbroken_losses(data, tmp_path):
    rng, kills = np.random.default_rng(0), 0
    more = ("--steps=400", "--eval_every=10", "--eval_rows=8")
    whole = run(*command(data, tmp_path / "whole", *more))
    assert whole.returncode == 0, whole.stderr
    want = losses(tmp_path / "whole")
    out = tmp_path / "killed"
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1", "JAX_PLATFORMS": "cpu"}
    while True:
        resume = [f"--resume={out}"] if (out / "config.json").exists() else []
        process = subprocess.Popen(
            command(data, out, *more, *resume), env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        text = ""
        for line in process.stdout:
            text += line.decode()
            if kills < 20 and line.startswith(b"step "):
                time.sleep(rng.uniform(0, 2.5))
                kills += process.poll() is None
                process.kill()
        if process.wait() == 0:
            break
        assert process.returncode == -signal.SIGKILL, text
    assert losses(out) == want
    print(f"{kills} kills")


@pytest.mark.slow
def test_the_1b_step_fits_a_v6e_chip_with_six_gib_to_spare():
    pytest.importorskip("libtpu", reason="pip install libtpu compiles for TPUs")
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    args = [sys.executable, str(ROOT / "train_tpu.py"), "--compile_only=True", "--topology=v6e:1x1", "--micro_batch=8"]
    text = subprocess.run(args, capture_output=True, text=True, env=env, timeout=900).stdout
    assert float(re.search(r"hbm_gib +([\d.]+)", text)[1]) < 31.24 - 6, text
    assert int(re.search(r"tokens +(\d+)", text)[1]) == 131_072
