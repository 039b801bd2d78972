"""What train_tpu.py and train_dream.py do alike: updates, runs, resuming, --eval_only, hosts, what
they say of bad input. What is particular to each is in the tests of its name.
"""

import dataclasses
import fcntl
import json
import lzma
import os
import resource
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
import model_dream as md
import model_pythoncoder as pc
import runs
import train_dream
import train_tpu
from rows import Rows

CODER = pc.Config(640, 32, layers=2, heads=4, kv_heads=2, head_size=8, ffn=64, positions=64)
DREAM_IDS = {"mask_id": 3, "pad_id": 0, "bos_id": 0, "eos_id": 0}
DREAM = md.DreamConfig(640, 32, 1, 2, 1, 16, 64, positions=64, **DREAM_IDS)
FAMILY = {train_tpu: pc, train_dream: md}
MODEL = {train_tpu: CODER, train_dream: DREAM}
SHELL = "--seq_len=64", "--batch_size=8", "--log_every=1"  # a run of the tiny preset


@pytest.fixture(scope="module", params=[train_tpu, train_dream], ids=lambda t: t.__name__)
def trainer(request):
    return request.param


def flags(trainer, data, out, *more):
    """A run of the tiny preset from the shell."""
    folders = f"--data={data}", f"--out={out}", f"--compile_cache={Path(data).parent / 'cache'}"
    return f"{trainer.__name__}.py", *folders, *SHELL, *more


def config(trainer, data, out, **changes):
    """A run of MODEL in this process, or of --init; all that train compile the same step."""
    cache, model = Path(data).parent / "cache", "" if changes.get("init") else "test"
    folders = {"data": str(data), "out": str(out), "compile_cache": str(cache)}
    sizes = {"seq_len": 64, "batch_size": 8, "steps": 6, "eval_every": 2, "eval_rows": 8}
    rates = {"lr": 0.01, "warmup": 1, "optimizer": "adamw", "log_every": 1}
    return trainer.Config(**{"model": model} | folders | sizes | rates | changes)


def evaluation(trainer, folder, **changes):
    """--eval_only in this process."""
    settings = {"eval_only": str(folder), "compile_cache": "", "eval_rows": 8}
    return trainer.Config(**settings | changes)


def prepare(patch, trainer):
    """One device, and MODEL as the preset "test"."""
    use_one_device(patch, trainer, FAMILY[trainer].CONFIGS, "test", MODEL[trainer])
    patch.setitem(trainer.MICRO_BATCH, "init", 4)


@pytest.fixture
def one_device(trainer, monkeypatch):
    prepare(monkeypatch, trainer)


@pytest.fixture(scope="module")
def unbroken(trainer, code_rows, tmp_path_factory):
    """The folder of six steps without a stop."""
    out = tmp_path_factory.mktemp("unbroken") / "run"
    with pytest.MonkeyPatch.context() as patch:
        prepare(patch, trainer)
        trainer.main(config(trainer, code_rows, out))
    return out


@pytest.fixture(scope="module")
def from_the_shell(trainer, code_rows, tmp_path_factory):
    """The folder of twelve steps of the preset tiny without a stop."""
    out = tmp_path_factory.mktemp("from_the_shell") / "run"
    result = run(*flags(trainer, code_rows, out, "--steps=12", "--eval_every=4"))
    assert result.returncode == 0, result.stderr
    return out


def without_last_checkpoint(folder, copy):
    shutil.copytree(folder, copy)
    shutil.rmtree(copy / "checkpoints" / "6")
    return copy


# ---- updates -----------------------------------------------------------------------------------


@pytest.mark.golden
def test_the_schedule_at_the_golden_steps(trainer, golden_dir):
    for case in json.loads((golden_dir("pythoncoder") / "wsd.json").read_text())["cases"]:
        shape = [case[k] for k in ("warmup_steps", "stable_ratio", "start_ratio", "final_ratio")]
        steps = np.array(list(map(int, case["lr"])))
        got = trainer.wsd(steps, case["peak"], case["total_steps"], *shape)
        np.testing.assert_allclose(got, [*case["lr"].values()], rtol=2e-5, err_msg=str(case))


@pytest.mark.golden
def test_three_updates_from_uneven_micro_batches(trainer, golden_dir, monkeypatch):
    folder = golden_dir("pythoncoder")
    settings = json.loads((folder / "grad_accum.json").read_text())
    arrays = np.load(folder / "grad_accum.npz")
    hyper = settings["hyper"]
    monkeypatch.setattr(trainer, "CLIP", hyper["clip"])
    monkeypatch.setattr(trainer, "WEIGHT_DECAY", hyper["weight_decay"])
    monkeypatch.setattr(trainer, "decays", settings["decay"])
    optimizer = trainer.make_optimizer(None)
    params = {"W": jnp.asarray(arrays["W0"]), "scale": jnp.asarray(arrays["scale0"])}
    state = {"params": params, "opt": optimizer.init(params)}

    @jax.jit
    def update(state, x, y, mask):
        def loss_fn(params, batch, sums=None):
            logits = (batch["x"] * params["scale"]) @ params["W"]
            nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
            loss = (nll * batch["mask"]).sum() / mask.sum()
            return loss if sums is None else (loss, ())

        batches, params = {"x": x, "y": y, "mask": mask}, state["params"]
        if trainer is train_tpu:
            grads, (loss, ()) = trainer.accumulate(loss_fn, params | {"layers": {}}, batches)
            del grads["layers"]
        else:
            grads, loss = trainer.accumulate(loss_fn, params, batches)
        updates, opt = optimizer.update(grads, state["opt"], params)
        params = jax.tree.map(lambda p, u: p + hyper["lr"] * u, params, updates)
        return {"params": params, "opt": opt}, loss, optax.tree.norm(grads)

    for i, want in enumerate(settings["steps"]):
        state, loss, norm = update(state, *(jnp.asarray(arrays[k][i]) for k in ("x", "y", "mask")))
        assert float(loss) == pytest.approx(want["loss"], rel=1e-5)
        assert float(norm) == pytest.approx(want["grad_norm"], rel=1e-5)
    moments = state["opt"][1][0]
    got = {**state["params"], "mu_W": moments.mu["W"], "nu_W": moments.nu["W"]}
    for name, value in got.items():
        atol = 1e-5 * np.abs(arrays[name]).max()
        np.testing.assert_allclose(value, arrays[name], rtol=1e-5, atol=atol, err_msg=name)


def test_a_step_without_finite_gradient_changes_nothing(trainer):
    family, cfg = FAMILY[trainer], dataclasses.replace(MODEL[trainer], layers=1)
    optimizer, row_11L = trainer.make_optimizer(None), jnp.arange(8)[None, None]
    batch = {"token_ABL": row_11L, "segment_ABL": jnp.ones_like(row_11L), "position_ABL": row_11L}
    settings = trainer.Config(lr=0.1, steps=9)
    step = jax.jit(trainer.make_step(settings, family.graph_of(cfg, family.Compute()), optimizer))
    params = random_params(family.param_shapes(cfg))
    for size, finite in ((1.0, True), (3e38, False)):
        params |= {"norm": jnp.full(cfg.width, size)}
        state = {"params": params, "opt": jax.jit(optimizer.init)(params)}
        new, metrics = step(state, batch, 3)
        assert metrics["ok"] == finite
        same = jax.tree.map(lambda a, b: bool((a == b).all()), state, new)
        assert jax.tree.all(same) == (not finite)


def random_params(shapes, scale=0.1):
    """Weights drawn by NumPy: nothing to compile."""
    rng = np.random.default_rng(0)

    def draw(s):
        return jnp.asarray(scale * rng.normal(size=s.shape), s.dtype)

    return jax.tree.map(draw, shapes)


def test_float32_on_an_accelerator_means_products_in_float32(trainer):
    """Without being asked a TPU multiplies float32 matrices in bfloat16, a GPU in TF32."""
    before = jax.config.jax_default_matmul_precision
    try:
        trainer.exact_products("float32")
        assert "HIGHEST" in jax.jit(lambda a: a @ a).lower(jnp.ones((2, 2))).as_text()
    finally:
        jax.config.update("jax_default_matmul_precision", before)


# ---- runs --------------------------------------------------------------------------------------


def test_a_run_ends_with_what_generate_needs(trainer, code_rows, unbroken, tmp_path):
    rows = [json.loads(line) for line in (unbroken / "log.jsonl").read_text().splitlines()]
    scores = [row for row in rows if "bits_per_byte" in row]
    assert [row["step"] for row in scores] == [2, 4, 6]
    assert scores[-1]["heldout_nats"] < scores[0]["heldout_nats"] < np.log(640) * 1.1
    files = {"config.json", "tokenizer.json", "samples.txt", "checkpoints"}
    assert files <= set(os.listdir(unbroken))
    assert (unbroken / "samples.txt").read_text().count("---- step") == 3
    model, step = checkpoints.load(FAMILY[trainer], unbroken)
    assert step == 6
    meta = Rows(code_rows, "train").meta
    if trainer is train_tpu:
        assert model.cfg == CODER
        ends = runs.read_json(unbroken / "generation_config.json")
        assert ends == {"eos_token_id": meta["eos_id"]}
    else:  # MASK is behind the last id of the data
        assert model.cfg == dataclasses.replace(DREAM, mask_id=meta["vocab_size"])
        tokenizer = tokenizers.Tokenizer.from_file(str(unbroken / "tokenizer.json"))
        assert tokenizer.token_to_id("<|mask|>") == meta["vocab_size"]
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 3; it has \["):
        checkpoints.load(FAMILY[trainer], unbroken, step=3)
    with pytest.raises(FileNotFoundError, match="no checkpoint; train one"):
        checkpoints.load(FAMILY[trainer], tmp_path)


def test_sigterm_saves_and_resuming_equals_not_stopping_bit_for_bit(
    trainer, code_rows, unbroken, one_device, monkeypatch, tmp_path
):
    out, log = tmp_path / "run", runs.Folder.log

    def log_then_stop(folder, row):
        log(folder, row)
        if row["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(runs.Folder, "log", log_then_stop)
    with pytest.raises(InterruptedError, match="SIGTERM: saved step 3"):
        trainer.main(config(trainer, code_rows, out))
    assert max(runs.saved_steps(out)) == 3
    trainer.main(resumed(trainer, out))  # with the settings of the run
    assert losses(out) == losses(unbroken)
    assert len(losses(out)) == 6
    sums = [checkpoints.Checkpoints(folder).meta()["sums"] for folder in (out, unbroken)]
    assert sums[0] == sums[1]


def test_a_kill_right_after_a_checkpoint_loses_neither_score_nor_sample(
    trainer, unbroken, one_device, monkeypatch, tmp_path, capsys
):
    out, save = without_last_checkpoint(unbroken, tmp_path / "run"), checkpoints.Checkpoints.save

    def save_and_die(store, *rest):
        save(store, *rest)
        store.close()
        raise SystemExit

    monkeypatch.setattr(checkpoints.Checkpoints, "save", save_and_die)
    with pytest.raises(SystemExit):
        trainer.main(resumed(trainer, out))
    assert list(runs.saved_steps(out)) == [4, 6]
    trainer.main(resumed(trainer, out))
    said = "has all of its 6 steps; raise --steps, or --epochs with --steps=0"
    assert said in capsys.readouterr().out
    assert scored_rows(out) == scored_rows(unbroken)


def test_a_run_that_goes_on_in_another_folder_begins_it_with_a_checkpoint(
    trainer, unbroken, one_device, tmp_path
):
    out = tmp_path / "next"
    cfg = dataclasses.replace(resumed(trainer, unbroken, steps=8), out=str(out))
    trainer.main(cfg)
    assert min(runs.saved_steps(out)) == 6
    assert [*losses(out)] == [7, 8]


def test_what_changed_since_the_checkpoint_is_said_or_refused(
    trainer, unbroken, one_device, capsys, tmp_path
):
    out = shutil.copytree(unbroken, tmp_path / "run")
    settings = json.loads((out / "config.json").read_text())
    settings["train"]["lr"] = 0.02  # edited
    runs.write(out / "config.json", settings)
    trainer.main(resumed(trainer, out, seed=1))
    said = capsys.readouterr().out
    for part in (f"changed since {out}/checkpoints/6: ", "lr 0.01 -> 0.02", "seed 0 -> 1"):
        assert part in said
    for name, there, here in ("optimizer", "adamw", "muon"), ("dtype", "float32", "bfloat16"):
        said = f"--{name} {there} there, {here} here"
        assert said in refusal(trainer, resumed(trainer, out, **{name: here}))
    (out / "checkpoints" / "6").rename(out / "checkpoints" / "14")
    assert "checkpoints/14 holds step 6" in refusal(trainer, resumed(trainer, out))
    before = (out / "log.jsonl").read_text()
    shutil.rmtree(out / "checkpoints")
    assert f"the checkpoints of {out} are gone" in refusal(trainer, resumed(trainer, out))
    assert (out / "log.jsonl").read_text() == before


def test_without_held_out_rows_there_is_no_score(
    trainer, code_rows, unbroken, one_device, tmp_path
):
    folder = shutil.copytree(code_rows, tmp_path / "rows")
    meta = json.loads((folder / "meta.json").read_text())
    meta["splits"]["heldout"] |= {"shards": [], "rows": 0, "tokens": 0}
    (folder / "meta.json").write_text(json.dumps(meta))
    out = without_last_checkpoint(unbroken, tmp_path / "run")
    trainer.main(resumed(trainer, out, data=str(folder)))
    assert losses(out) == losses(unbroken)
    assert "NaN" not in (out / "log.jsonl").read_text()
    assert 6 in runs.saved_steps(out)
    cfg = evaluation(trainer, unbroken, data=str(folder))
    assert "no held-out rows" in refusal(trainer, cfg)


def test_bad_input_is_one_line_and_leaves_the_run_alone(
    trainer, code_rows, unbroken, one_device, monkeypatch, tmp_path
):
    new = tmp_path / "new"
    before = (unbroken / "log.jsonl").read_text()

    def refused(data=code_rows, out=new, **changes):
        return refusal(trainer, config(trainer, data, out, **changes))

    assert "already holds a run: --resume=" in refused(out=unbroken)
    assert "data_prep.py" in refused(data=tmp_path / "none")
    assert "not one of tiny, " in refused(model="huge")
    other = "train_dream.py trains" if trainer is train_tpu else "train_tpu.py trains"
    assert other in refused(model="huge")
    assert "rows of 64 tokens, the run wants 32" in refused(seq_len=32)
    assert "lower --batch_size" in refused(batch_size=100_000)
    assert "--eval_rows=0 is not in 1 .." in refused(eval_rows=0)
    changes = {"diff": "paper"} if trainer is train_tpu else {"block_length": 4}
    assert "is of another model" in refusal(trainer, resumed(trainer, unbroken, **changes))
    with open(unbroken / ".lock0", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        said = refusal(trainer, resumed(trainer, unbroken, steps=20))
        assert "another process is writing" in said
    rows = shutil.copytree(code_rows, tmp_path / "rows")
    for shard in sorted((rows / "train").iterdir()):
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    cache = config(trainer, code_rows, "").compile_cache
    assert ".parquet is corrupted" in refused(rows, tmp_path / "damaged", compile_cache=cache)
    monkeypatch.undo()
    three = jax.devices()[:3]
    monkeypatch.setattr(jax, "devices", lambda *_: three)
    assert "--batch_size=8 does not divide over 3" in refused(model="tiny", fsdp=1)
    assert (unbroken / "log.jsonl").read_text() == before
    assert not new.exists()


def test_a_cpu_is_not_used_beside_an_idle_gpu_unless_asked_for(
    trainer, code_rows, monkeypatch, tmp_path
):
    monkeypatch.setattr(checkpoints, "ROOT", tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cfg = config(trainer, code_rows, tmp_path / "run", model="huge")
    assert "requirements-cuda.txt; or train on the CPU with --device=cpu" in refusal(trainer, cfg)
    assert "not one of" in refusal(trainer, dataclasses.replace(cfg, device="cpu"))


@pytest.mark.parametrize("damage", ["flipped bit", "cut short", "another version"])
def test_a_damaged_checkpoint_is_named(trainer, unbroken, one_device, tmp_path, damage):
    out = shutil.copytree(unbroken, tmp_path / "run")
    newest = out / "checkpoints" / "6"
    if damage == "another version":
        meta = newest / "meta" / "metadata"
        meta.write_text(meta.read_text().replace('"width"', '"breadth"'))
    else:
        largest = max((newest / "params").rglob("*"), key=lambda p: p.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 8
        largest.write_bytes(content if damage == "flipped bit" else content[: len(content) // 2])
    assert "checkpoints/6" in refusal(trainer, resumed(trainer, out, steps=8))
    with pytest.raises(ValueError, match=r"checkpoints/6 cannot be read|holds no.*breadth") as e:
        checkpoints.load(FAMILY[trainer], out)
    assert "\n" not in str(e.value)


@pytest.mark.slow
def test_resuming_before_the_first_checkpoint_starts_at_step_0_with_the_runs_settings(
    trainer, unbroken, one_device, capsys, tmp_path
):
    out = tmp_path / "run"
    # what a kill during the first save leaves
    (out / "checkpoints" / "2.orbax-checkpoint-tmp").mkdir(parents=True)
    shutil.copy(unbroken / "config.json", out)
    trainer.main(resumed(trainer, out))
    assert "starting at step 0" in capsys.readouterr().out
    assert losses(out) == losses(unbroken)
    assert not list((out / "checkpoints").glob("*tmp*"))


@pytest.mark.slow
def test_more_epochs_go_on_with_a_finished_run_and_old_epochs_are_not_kept(
    trainer, code_rows, one_device, capsys, tmp_path
):
    out = tmp_path / "run"
    sizes = {"epochs": 1.0, "steps": 0, "batch_size": 1024, "micro_batch": 256}
    trainer.main(config(trainer, code_rows, out, **sizes))
    done = max(losses(out))
    assert resumed(trainer, out).micro_batch == 256
    trainer.main(resumed(trainer, out))
    assert f"has all of its {done} steps" in capsys.readouterr().out
    trainer.main(resumed(trainer, out, epochs=3.0))
    assert max(losses(out)) == 3 * done
    assert len(runs.saved_steps(out)) <= 3  # two, and the best


@pytest.mark.slow
def test_a_checkpoint_is_written_after_some_minutes(
    trainer, code_rows, one_device, tmp_path, monkeypatch
):
    monkeypatch.setattr(trainer, "SAVE_SECONDS", 0)
    monkeypatch.setattr(trainer, "KEEP", 9)
    trainer.main(config(trainer, code_rows, tmp_path / "run", steps=3, eval_every=3))
    assert list(runs.saved_steps(tmp_path / "run")) == [1, 2, 3]


# ---- --eval_only -------------------------------------------------------------------------------


def test_eval_only_scores_a_checkpoint_as_the_trainer_did(trainer, unbroken, one_device, capsys):
    scores = trainer.main(evaluation(trainer, unbroken))
    (line,) = capsys.readouterr().out.splitlines()
    assert f"bits_per_byte {scores['bits_per_byte']:.4g}" in line
    logged = json.loads((unbroken / "log.jsonl").read_text().splitlines()[-1])
    assert (scores["step"], scores["rows"]) == (logged["step"], 8) == (6, 8)
    if trainer is train_tpu:
        for name in ("heldout_nats", "bits_per_byte"):
            assert scores[name] == pytest.approx(logged[name], rel=1e-5)
        rows = Rows(runs.read_json(unbroken / "config.json")["data"], "heldout")
        token_RL, segment_RL, _ = rows.read(rows.spread(8))  # xz reads the same rows
        tokenizer = tokenizers.Tokenizer.from_file(str(unbroken / "tokenizer.json"))
        text = tokenizer.decode(token_RL[segment_RL > 0].tolist()).encode()
        assert scores["xz_bits_per_byte"] == 8 * len(lzma.compress(text, preset=9)) / len(text)
    else:
        assert 0 < scores["standard_error"] < 0.2 * scores["bits_per_byte"]
        # of the difference from the mean of half as many other draws
        error = 3**0.5 * scores["standard_error"]
        assert abs(scores["bits_per_byte"] - logged["bits_per_byte"]) < 4 * error


def test_eval_only_refuses_in_one_line(trainer, code_rows, unbroken, one_device, tmp_path):
    other = with_other_tokenizer(code_rows, tmp_path / "other")
    runs.write(tmp_path / "config.json", {})
    for part, folder, changes in (
        ("config.json does not exist", tmp_path / "none", {}),
        ("does not say what the model was trained on; pass --data", tmp_path, {}),
        ("written with another tokenizer", unbroken, {"data": str(other)}),
        ("--eval_rows", unbroken, {"eval_rows": 0}),
        ("no finished data", unbroken, {"data": str(tmp_path)}),
    ):
        assert part in refusal(trainer, evaluation(trainer, folder, **changes))


@pytest.mark.slow
def test_eight_devices_and_half_the_bits_have_the_same_score(
    trainer, unbroken, monkeypatch, capsys
):
    many = trainer.main(evaluation(trainer, unbroken, eval_rows=20))
    assert "8 x cpu" in capsys.readouterr().err
    prepare(monkeypatch, trainer)
    one = trainer.main(evaluation(trainer, unbroken, eval_rows=20))
    assert many == pytest.approx(one, rel=1e-5)
    half = trainer.main(evaluation(trainer, unbroken, eval_rows=20, dtype="bfloat16"))
    assert half["bits_per_byte"] == pytest.approx(one["bits_per_byte"], rel=1e-2)


# ---- from the shell: kills, full disks, buckets, hosts -----------------------------------------


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_good_checkpoint(trainer, from_the_shell, tmp_path):
    out = shutil.copytree(from_the_shell, tmp_path / "run")

    def small_files():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        # a write beyond it fails, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))

    line = f"{trainer.__name__}.py", f"--resume={out}", "--steps=14", "--compile_cache="
    says(run(*line, preexec_fn=small_files), "was not written", "go on with --resume=")
    assert checkpoints.load(FAMILY[trainer], out)[1] == 12


def test_out_of_memory_is_one_line_that_says_what_to_lower(
    trainer, code_rows, one_device, monkeypatch, tmp_path
):
    def grow(*_, **__):
        jnp.zeros((2**45,)).block_until_ready()

    monkeypatch.setattr(trainer, "score", grow)
    with pytest.raises(ValueError, match=r"^out of memory; try .*a smaller --micro_batch"):
        trainer.main(config(trainer, code_rows, tmp_path / "run", steps=1))


@pytest.mark.slow
def test_diverging_stops_after_five_steps_without_a_finite_gradient(trainer, code_rows, tmp_path):
    more = "--steps=40", "--lr=1e12", "--warmup=1", "--eval_every=50"
    result = run(*flags(trainer, code_rows, tmp_path / "run", *more))
    says(result, "no finite gradient in five steps")


@pytest.mark.slow
def test_kill_9_at_random_moments_always_resumes_to_the_unbroken_run(trainer, code_rows, tmp_path):
    steps, kills = ("--steps=400",), 20
    if trainer is train_dream:
        steps, kills = ("--steps=40", "--block_length=4", "--block_warmup=30"), 5
    more = *steps, "--eval_every=3", "--eval_rows=8"
    unbroken, out = tmp_path / "unbroken", tmp_path / "killed"
    result = run(*flags(trainer, code_rows, unbroken, *more), timeout=900)
    assert result.returncode == 0, result.stderr
    first = flags(trainer, code_rows, out, *more)
    resume = *first, f"--resume={out}"
    logged = kill_and_resume(command(*first), command(*resume), kills=kills, lines=8)
    assert max(logged) > 3  # a checkpoint lay between two kills
    assert losses(out) == losses(unbroken)
    assert scored_rows(out) == scored_rows(unbroken)
    sums = [checkpoints.Checkpoints(folder).meta()["sums"] for folder in (out, unbroken)]
    assert sums[0] == sums[1]


@pytest.mark.slow
def test_data_and_run_can_be_in_a_bucket(code_rows, bucket, tmp_path):
    env = os.environ | AS_A_USER | bucket
    copy_in_bucket(bucket, "put", f"{code_rows}/", "bucket/rows/")
    both = ("--eval_every=4", "--compile_cache=")
    line = flags(train_tpu, "gs://bucket/rows", "gs://bucket/run", *both)
    first = run(*line, "--steps=8", env=env)
    assert first.returncode == 0, first.stderr
    finished = run(*line, "--steps=12", "--resume=gs://bucket/run", env=env)
    assert finished.returncode == 0, finished.stderr
    assert not Path("gs:").exists()
    copy_in_bucket(bucket, "get", "bucket/run/", f"{tmp_path}/run/")
    assert max(losses(tmp_path / "run")) == 12
    assert (tmp_path / "run" / "samples.txt").exists()
    (tmp_path / "20" / "params").mkdir(parents=True)
    (tmp_path / "20" / "params" / "half").write_text("a checkpoint that is being written")
    copy_in_bucket(bucket, "put", f"{tmp_path}/20/", "bucket/run/checkpoints/20/")
    rows = "--eval_rows=8", "--compile_cache="
    scored = run("train_tpu.py", "--eval_only=gs://bucket/run", *rows, env=env)
    local = f"--eval_only={tmp_path / 'run'}", f"--data={code_rows}", *rows
    assert scored.stdout == run("train_tpu.py", *local).stdout != ""


def close(out, want):
    for step, values in losses(want).items():
        np.testing.assert_allclose(losses(out)[step], values, rtol=2e-3)


@pytest.mark.slow
def test_resuming_on_eight_devices_goes_on_with_the_same_losses(
    trainer, code_rows, from_the_shell, tmp_path
):
    out = shutil.copytree(from_the_shell, tmp_path / "run")
    shutil.rmtree(out / "checkpoints" / "12")
    result = run(f"{trainer.__name__}.py", f"--resume={out}", "--tensor=1", devices=8)
    assert result.returncode == 0, result.stderr
    assert "8 x cpu" in result.stdout
    close(out, from_the_shell)


@pytest.mark.slow
@pytest.mark.parametrize("asked", [0, 1])
def test_sigterm_to_one_of_two_hosts_saves_on_both_and_they_train_as_one(
    trainer, code_rows, from_the_shell, tmp_path, asked
):
    out = tmp_path / "run"
    line = flags(trainer, code_rows, out, "--steps=12", "--eval_every=4")
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
    close(out, from_the_shell)


@pytest.mark.slow
def test_a_killed_host_ends_the_others_and_the_run_goes_on(code_rows, tmp_path):
    out, one = tmp_path / "run", tmp_path / "one"
    more = "--steps=12", "--eval_every=4"
    assert run(*flags(train_tpu, code_rows, one, *more)).returncode == 0
    line = flags(train_tpu, code_rows, out, *more)
    both = two_hosts(line, line)
    wait_for_step(both[0], 6)
    both[1].kill()
    assert [(p.communicate(timeout=120), p.returncode)[1] != 0 for p in both] == [True, True]
    both = two_hosts(*2 * [(*line, f"--resume={out}")])
    assert [(p.communicate(timeout=300), p.returncode)[1] for p in both] == [0, 0]
    close(out, one)


@pytest.mark.slow
@pytest.mark.parametrize("other", ["folder", "settings"])
def test_hosts_that_differ_all_say_so_before_the_first_step(trainer, code_rows, tmp_path, other):
    out, steps, said = tmp_path / "run", 5, "have other settings or data than host 0"
    if other == "folder":
        out, steps, said = tmp_path / "other", 4, "do not see what host 0 wrote"
    first = flags(trainer, code_rows, tmp_path / "run", "--steps=4")
    for process in two_hosts(first, flags(trainer, code_rows, out, f"--steps={steps}")):
        _, error = process.communicate(timeout=120)
        assert process.returncode == 1
        assert f"hosts [1] {said}" in error.splitlines()[-1]
