"""The MDLM trainer: noise, crops, learning by heart, resuming, several processes, and what it says of bad input."""

import dataclasses
import fcntl
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import data_prep
import diffusion
import model_mdlm as mdlm
import train_gpu

ROOT = Path(__file__).resolve().parent.parent
SMALL = ("--batch_size=8", "--micro_batch=4", "--log_every=1", "--eval_rows=16", "--compile=False")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Padded rows of 32 tokens from sentences of a small grammar."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    words = "The A One", "small red old", "dog cat bird", "sees finds hears", "food. water. us."
    words = [choices.split() for choices in words]
    stories = [" ".join(rng.choice(w) for _ in range(rng.integers(1, 5)) for w in words) for _ in range(300)]
    (folder / "stories.txt").write_text("\n<|endoftext|>\n".join(stories))
    data_prep.main(
        data_prep.Config(source=str(folder / "stories.txt"), out=str(folder / "rows"), vocab_size=300, seq_len=32,
                         heldout=0.1, workers=1)
    )  # fmt: skip
    return folder / "rows"


def command(data, out, *more):
    return [sys.executable, str(ROOT / "train_gpu.py"), f"--data={data}", f"--out={out}", *SMALL, *more]


def run(*args, **options):
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
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


def test_noise_masks_neither_pad_nor_bos_and_weighs_like_the_bound():
    rng = np.random.default_rng(0)
    token_BL = rng.integers(5, 40, (64, 32))
    token_BL[:, 0], token_BL[:, 20:] = mdlm.BOS, mdlm.PAD
    cfg = train_gpu.Config()
    noised = train_gpu.noise(token_BL, cfg, rng)
    masked = noised["xt"] == mdlm.MASK
    assert not masked[:, 0].any()
    assert not masked[:, 20:].any()
    assert noised["counted"].sum() == 64 * 19
    row_N = np.nonzero(masked)[0]
    np.testing.assert_allclose(noised["weight"][masked], 1 / noised["rate"][row_N] / (64 * 19))
    assert (noised["weight"][~masked] == 0).all()
    plain = train_gpu.noise(token_BL, dataclasses.replace(cfg, loss="masked_ce"), rng)
    assert plain["weight"].sum() == pytest.approx(1)


def test_crops_are_windows_of_the_row_filled_up_with_pad():
    rng = np.random.default_rng(0)
    token_BL = np.arange(5, 5 + 64)[None].repeat(200, 0)
    token_BL[:, 60:] = mdlm.PAD
    out = train_gpu.crop(token_BL, 0.5, rng)
    changed = (out != token_BL).any(1)
    assert 60 < changed.sum() < 140
    for row in out[changed]:
        size = (row != mdlm.PAD).sum()
        assert size >= 1
        assert (np.diff(row[:size]) == 1).all()
        assert (row[size:] == mdlm.PAD).all()
    assert (out[:, 0] > 5).any()
    assert (train_gpu.crop(token_BL, 0.0, rng) == token_BL).all()


def test_the_loss_and_its_gradient_are_those_of_the_formula():
    torch.manual_seed(0)
    model = mdlm.MDLM(mdlm.Config(vocab=40, width=32, layers=1, heads=2, ffn=64, positions=64))
    rng = np.random.default_rng(0)
    token_BL = rng.integers(5, 40, (4, 64))
    token_BL[:, 20:] = mdlm.PAD  # the trainer cuts this to 32
    noised = train_gpu.noise(token_BL, train_gpu.Config(), rng)
    inputs = train_gpu.to_device(token_BL, noised, torch.device("cpu"))
    assert inputs[0].shape == (4, 32)
    loss, counts = train_gpu.Loss(model)(*inputs)
    got = torch.autograd.grad(loss, list(model.parameters()))
    xt, x0, rate = (torch.from_numpy(x) for x in (noised["xt"], token_BL, noised["rate"]))
    logits = model(xt, rate.float(), xt != mdlm.PAD)
    nll = diffusion.masked_nll(logits, x0, xt == mdlm.MASK, mdlm.MASK)
    want = diffusion.nelbo_per_token(nll, rate.float(), torch.from_numpy(noised["counted"]), "linear")
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)
    assert counts[2] == (xt == mdlm.MASK).sum()
    for a, b in zip(got, torch.autograd.grad(want, list(model.parameters())), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_eight_sequences_are_learned_by_heart_in_seconds():
    torch.manual_seed(0)
    cfg, rng = train_gpu.Config(steps=400, lr=3e-3, warmup=20, weight_decay=0.0), np.random.default_rng(0)
    model = mdlm.MDLM(mdlm.Config(vocab=64, width=64, layers=2, heads=1, ffn=256, positions=32))
    token_BL = rng.integers(5, 64, (8, 32))
    optimizer, loss_of, device = train_gpu.make_optimizer(model, cfg, torch.device("cpu")), train_gpu.Loss(model), "cpu"
    bounds, hits = [], []
    for step in range(cfg.steps):
        for group in optimizer.param_groups:
            group["lr"] = train_gpu.learning_rate(step, cfg)
        loss, counts = loss_of(*train_gpu.to_device(token_BL, train_gpu.noise(token_BL, cfg, rng), device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        bounds.append(loss.item())
        hits.append(float(counts[1] / counts[2]))
    assert np.mean(bounds[:10]) > 3.5  # ln 63 = 4.1
    assert np.mean(bounds[-20:]) < 0.8
    assert np.mean(hits[-20:]) > 0.75


def test_the_average_follows_the_weights():
    model, ema = (mdlm.MDLM(mdlm.Config(vocab=16, width=8, layers=1, heads=1, ffn=8, positions=4)) for _ in range(2))
    before, weight = ema.head.weight.detach().clone(), model.head.weight.detach()
    train_gpu.average(ema, model, 0.999, 0)
    torch.testing.assert_close(ema.head.weight, 0.1 * before + 0.9 * weight)
    before = ema.head.weight.detach().clone()
    train_gpu.average(ema, model, 0.5, 10_000)
    torch.testing.assert_close(ema.head.weight, 0.5 * before + 0.5 * weight)
    train_gpu.average(ema, model, 0.0, 5)
    assert torch.equal(ema.head.weight, model.head.weight)


def test_learning_rate_warms_up_and_falls_to_a_tenth():
    cfg = train_gpu.Config(steps=1000, warmup=50, lr=1.0)
    rates = [train_gpu.learning_rate(step, cfg) for step in range(1000)]
    assert rates[0] == pytest.approx(0.02)
    assert rates[49] == rates[50] == 1.0
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert all(a >= b for a, b in itertools.pairwise(rates[50:]))


@pytest.fixture(scope="module")
def unbroken(data, tmp_path_factory):
    """Twelve steps without a stop."""
    out = tmp_path_factory.mktemp("unbroken") / "run"
    result = run(*command(data, out, "--steps=12", "--eval_every=4"))
    assert result.returncode == 0, result.stderr
    return out


def test_a_run_leaves_a_model_that_loads_and_its_scores_fall(data, unbroken):
    rows = [json.loads(line) for line in (unbroken / "log.jsonl").read_text().splitlines()]
    scores = [row for row in rows if "heldout_nats" in row]
    assert [row["step"] for row in scores] == [4, 8, 12]
    assert scores[-1]["heldout_nats"] < scores[0]["heldout_nats"]
    assert scores[-1]["perplexity"] == pytest.approx(np.exp(scores[-1]["heldout_nats"]))
    assert train_gpu.checkpoints(unbroken) == [8, 12]
    model = mdlm.load(unbroken / "step_12")
    assert model.cfg == dataclasses.replace(mdlm.CONFIGS["tiny"], vocab=512)  # 300 token ids, filled up
    assert "---- step 12" in (unbroken / "samples.txt").read_text()


def test_evaluate_estimates_the_bound_that_the_trainer_logged(data, unbroken, tmp_path):
    script = sys.executable, str(ROOT / "evaluate.py"), "--model=mdlm"
    args = *script, f"--ckpt={unbroken}", "--steps", "2", "--lengths", "16"
    result = run(*args, "--json=True", f"--plot={tmp_path / 'noise.png'}")
    assert result.returncode == 0, result.stderr
    row = json.loads(result.stdout)
    last = [json.loads(line) for line in (unbroken / "log.jsonl").read_text().splitlines()][-1]
    assert row["step"] == last["step"] == 12
    assert row["nats_per_token"] == pytest.approx(last["heldout_nats"], rel=0.05)
    assert 0 < row["standard_error"] < 0.1
    assert row["perplexity"] == pytest.approx(np.exp(row["nats_per_token"]))
    assert [r["steps"] for r in row["latency"]] == [2]
    assert (tmp_path / "noise.png").stat().st_size > 5000
    assert "nats per masked token" in run(*args, "--rows=8").stdout
    meta = json.loads((data / "meta.json").read_text())
    text_bytes = meta["splits"]["heldout"]["bytes"]
    bits = row["nats_per_token"] * row["heldout_tokens"] / np.log(2)
    assert row["bits_per_byte"] == pytest.approx(bits / text_bytes)
    other = tmp_path / "other"
    subprocess.run(["cp", "-r", data, other], check=True)
    (other / "meta.json").write_text(json.dumps(meta | {"tokenizer_sha256": "0" * 64}))
    says(run(*args, f"--data={other}"), "another tokenizer")
    says(run(*args, "--batch_size=0"), "--batch_size")
    says(run(*args, f"--plot={tmp_path / 'none' / 'a.png'}"), "there is no folder")
    says(run(*args, "--step=3"), "holds no config.json")
    says(run(*script, f"--ckpt={tmp_path}"), "train_gpu.py")


def test_sigterm_saves_and_resuming_equals_not_stopping_bit_for_bit(data, unbroken, tmp_path):
    out = tmp_path / "run"
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command(data, out, "--steps=12", "--eval_every=4"), stdout=subprocess.PIPE, env=env)
    for line in process.stdout:
        if line.startswith(b"step 6 "):
            process.send_signal(signal.SIGTERM)
            break
    process.stdout.read()
    assert process.wait() != 0
    assert train_gpu.checkpoints(out)[-1] in (6, 7)
    result = run(sys.executable, str(ROOT / "train_gpu.py"), f"--resume={out}")
    assert result.returncode == 0, result.stderr
    assert losses(out) == losses(unbroken)
    one, two = (mdlm.load(folder / "step_12").state_dict() for folder in (out, unbroken))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("fsdp", ["False", "True"])
@pytest.mark.parametrize("compiled", ["False", pytest.param("True", marks=pytest.mark.slow)])
def test_two_processes_train_as_one(data, unbroken, tmp_path, fsdp, compiled):
    out = tmp_path / "run"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    more = "--steps=12", "--eval_every=4", "--micro_batch=2", f"--fsdp={fsdp}", f"--compile={compiled}"
    result = run(*launch, *command(data, out, *more)[1:])
    assert result.returncode == 0, result.stdout[-1000:] + result.stderr[:3000]
    for step, want in losses(unbroken).items():
        np.testing.assert_allclose(losses(out)[step], want, rtol=1e-3)
    assert (out / "samples.txt").read_text().count("---- step") == 3


@pytest.mark.slow
def test_two_processes_leave_together_when_one_is_asked_to_stop(data, unbroken, tmp_path):
    out = tmp_path / "run"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    script = [*launch, *command(data, out, "--steps=12", "--eval_every=4", "--micro_batch=2")[1:]]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(script, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    for line in process.stdout:
        if line.startswith(b"step 5 "):
            workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(workers[-1]), signal.SIGTERM)
            break
    errors = process.communicate(timeout=60)[1].decode()
    assert process.returncode != 0
    saved = train_gpu.checkpoints(out)[-1]
    assert saved in (5, 6, 7)
    assert errors.count(f"saved step {saved}; go on with --resume=") == 2
    result = run(*launch, str(ROOT / "train_gpu.py"), "--resume", str(out))
    assert result.returncode == 0, result.stdout[-1000:] + result.stderr[:3000]
    for step, want in losses(unbroken).items():
        np.testing.assert_allclose(losses(out)[step], want, rtol=1e-3)


@pytest.mark.slow
def test_bad_input_is_one_line_and_leaves_the_run_alone(data, unbroken, tmp_path):
    before = (unbroken / "log.jsonl").read_text()
    says(run(*command(data, unbroken)), "already holds a run", "--resume=")
    says(run(*command(tmp_path / "none", tmp_path / "a")), "data_prep.py")
    says(run(*command(data, tmp_path / "a", "--model=huge")), "tiny, small, medium, large")
    says(run(*command(data, tmp_path / "a", "--seq_len=64")), "rows of 32 tokens, not 64")
    says(run(*command(data, tmp_path / "a", "--micro_batch=3")), "--micro_batch=3 does not divide")
    says(run(*command(data, unbroken, f"--resume={unbroken}", "--model=small", "--steps=20")), "another model", "width")
    says(run(*command(data, tmp_path / "a", f"--resume={tmp_path}")), "--resume")
    says(run(*command(data, tmp_path / "a", "--resume", str(tmp_path))), f"{tmp_path}/config.json cannot be read")
    for flag in ("--batch_size=0", "--steps=0", "--log_every=0", "--eval_rows=0", "--micro_batch=-2"):
        says(run(*command(data, tmp_path / "a", flag)), flag)
    long = data_prep.Config(source=str(ROOT / "diffusion.py"), out=str(tmp_path / "long"), vocab_size=300, seq_len=512)
    data_prep.main(dataclasses.replace(long, heldout=0.0, workers=1))
    says(run(*command(tmp_path / "long", tmp_path / "a")), "512 tokens", "256 positions")
    copy = tmp_path / "rows"
    subprocess.run(["cp", "-r", data, copy], check=True)
    shard = next((copy / "train").glob("*.parquet"))
    os.truncate(shard, 500)
    says(run(*command(copy, tmp_path / "a")), shard.name, "corrupted")
    (copy / "tokenizer.json").write_text("{}")
    says(run(*command(copy, tmp_path / "b")), "tokenizer.json is not the one")
    os.truncate(copy / "meta.json", 100)
    says(run(*command(copy, tmp_path / "b")), "meta.json is damaged")
    assert (unbroken / "log.jsonl").read_text() == before


@pytest.mark.parametrize("damage", ["cut", "gone", "other"])
def test_a_damaged_checkpoint_is_named(data, unbroken, tmp_path, damage):
    out = tmp_path / "run"
    subprocess.run(["cp", "-r", unbroken, out], check=True)
    file = out / "step_12" / "trainer.safetensors"
    if damage == "cut":
        os.truncate(file, 100_000)
    elif damage == "gone":
        file.unlink()
    else:
        file.write_bytes(safetensors.torch.save({"model.embed.weight": torch.zeros(2, 2)}))
    says(run(sys.executable, str(ROOT / "train_gpu.py"), f"--resume={out}", "--steps=14"), "step_12", "delete it")
    assert train_gpu.checkpoints(out) == [8, 12]


def test_a_full_disk_leaves_the_last_good_checkpoint(data, unbroken, tmp_path):
    out = tmp_path / "run"
    subprocess.run(["cp", "-r", unbroken, out], check=True)

    def small_files():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))  # a write beyond it fails, as on a full disk

    args = sys.executable, str(ROOT / "train_gpu.py"), f"--resume={out}", "--steps=14"
    says(run(*args, preexec_fn=small_files), "make room", "--resume")
    assert train_gpu.checkpoints(out) == [8, 12]
    assert mdlm.load(out / "step_12").cfg.vocab == 512
    result = run(*args)  # what the failed write left is no obstacle
    assert result.returncode == 0, result.stderr
    assert train_gpu.checkpoints(out) == [12, 14]
    assert not list(out.glob("*.tmp"))


def test_two_trainers_on_one_folder_are_refused(data, unbroken):
    with open(unbroken / ".lock0", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        says(run(*command(data, unbroken, f"--resume={unbroken}", "--steps=14")), "another trainer")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_learns_like_float32_and_resumes(data, unbroken, tmp_path, dtype):
    out = tmp_path / "run"
    result = run(*command(data, out, "--steps=12", "--eval_every=6", f"--dtype={dtype}"))
    assert result.returncode == 0, result.stderr
    assert f"{dtype} matmuls" in result.stdout
    whole = losses(out)
    for step, (loss, _) in whole.items():
        assert loss == pytest.approx(losses(unbroken)[step][0], rel=0.02)
    scaler = json.loads((out / "step_12" / "trainer.json").read_text())["scaler"]
    assert scaler.get("_growth_tracker") == (12 if dtype == "float16" else None)
    shutil.rmtree(out / "step_12")
    result = run(sys.executable, str(ROOT / "train_gpu.py"), f"--resume={out}")
    assert result.returncode == 0, result.stderr
    assert losses(out) == whole
    assert json.loads((out / "step_12" / "trainer.json").read_text())["scaler"] == scaler


def test_a_time_free_model_with_a_tied_head_trains_and_is_read_again(data, tmp_path):
    out = tmp_path / "run"
    result = run(*command(data, out, "--steps=4", "--eval_every=4", "--time=False", "--tie=True"))
    assert result.returncode == 0, result.stderr
    assert "time 0," in result.stdout
    model = mdlm.load(out / "step_4")
    assert (model.cfg.time, model.cfg.tie) == (False, True)
    result = run(sys.executable, str(ROOT / "evaluate.py"), "--model=mdlm", f"--ckpt={out}", "--lengths", "16")
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_kill_9_at_twenty_random_moments_always_resumes_to_the_unbroken_losses(data, tmp_path):
    rng, kills, out = np.random.default_rng(0), 0, tmp_path / "killed"
    more = "--steps=200", "--eval_every=10", "--eval_rows=8"
    whole = run(*command(data, tmp_path / "whole", *more))
    assert whole.returncode == 0, whole.stderr
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
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
    assert kills == 20
    assert losses(out) == losses(tmp_path / "whole")


def test_a_loss_that_is_not_finite_stops_after_five_steps(data, tmp_path):
    result = run(*command(data, tmp_path / "run", "--steps=40", "--lr=1e30", "--warmup=1", "--eval_every=100"))
    assert "the update is left out" in result.stdout
    says(result, "no finite loss in 5 steps")
