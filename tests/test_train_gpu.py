"""train_gpu.py: noise, overfitting, resuming, several processes, --eval_only, bad input."""

import dataclasses
import fcntl
import functools
import itertools
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from conftest import command, kill_and_resume, losses, scored_rows, with_other_tokenizer
from torch.utils._python_dispatch import TorchDispatchMode

import data_prep
import diffusion
import model_mdlm as mdlm
import runs
import train_gpu
from rows import Rows, prefetch

ROOT = Path(__file__).resolve().parent.parent
SMALLER = mdlm.Config(width=64, layers=2, heads=1, ffn=128)
SMALL = {"batch_size": 8, "micro_batch": 4, "log_every": 1, "eval_rows": 16, "compile": False}
SMALL["dtype"] = "float32"
TWELVE = {"steps": 12, "eval_every": 4}
FLAGS = "--batch_size=8 --micro_batch=4 --log_every=1 --eval_rows=16 --no-compile --dtype=float32"
WORDS = "The A One|small red old|dog cat bird|sees finds|food. water.".split("|")


def prepare(source, out, **settings):
    paths = {"source": str(source), "out": str(out)}
    data_prep.main(data_prep.Text(**paths, vocab_size=300, workers=1, **settings))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Padded rows of 32 tokens from sentences of a small grammar."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    words = [some.split() for some in WORDS]
    stories = []
    for _ in range(300):
        stories.append(" ".join(rng.choice(w) for _ in range(rng.integers(1, 5)) for w in words))
    (folder / "stories.txt").write_text("\n<|endoftext|>\n".join(stories))
    prepare(folder / "stories.txt", folder / "rows", seq_len=32, heldout=0.1)
    return folder / "rows"


@pytest.fixture(scope="module", autouse=True)
def smaller():
    """The preset "tiny", smaller still."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(mdlm.CONFIGS, "tiny", SMALLER)
        yield


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """train_gpu.py with that preset, for other processes."""
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import model_mdlm as mdlm, runs, torch, train_gpu
torch.set_num_threads(1)
mdlm.CONFIGS["tiny"] = mdlm.{SMALLER}
runs.command(train_gpu.main, train_gpu.Config, "")
""")
    return path


ENV = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def train(data, out, **settings):
    train_gpu.main(train_gpu.Config(data=str(data), out=str(out), **SMALL | settings))


def resume(out, **settings):
    """As --resume does from the command line."""
    saved = runs.resumed(train_gpu.Config, out)
    train_gpu.main(dataclasses.replace(saved, resume=str(out), **settings))


def flags(data, out, *more):
    return f"--data={data}", f"--out={out}", *FLAGS.split(), *more


CPU = torch.device("cpu")


def batch_of(noised, row_ids=slice(None), *loss):
    return train_gpu.make_batch(noised, row_ids, CPU, *loss)


def log_of(out):
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def a_model(**changes):
    torch.manual_seed(0)
    settings = {"vocab": 40, "width": 32, "layers": 1, "heads": 1, "ffn": 64, "positions": 64}
    return mdlm.MDLM(mdlm.Config(**settings | changes))


def rows_of_tokens(*shape):
    return np.random.default_rng(0).integers(5, 40, shape)


def test_noise_masks_neither_pad_nor_bos():
    token_BL = rows_of_tokens(64, 32)
    token_BL[:, 0], token_BL[:, 20:] = mdlm.BOS, mdlm.PAD
    noised = train_gpu.noise(token_BL, np.random.default_rng(0))
    np.testing.assert_array_equal(noised.mask_BL, noised.xt_BL == mdlm.MASK)
    assert not noised.mask_BL[:, [0, *range(20, 32)]].any()
    assert batch_of(noised).counted == 64 * 19


def test_a_uniform_prediction_costs_log_v():
    token_BL = rows_of_tokens(4096, 8)
    noised = train_gpu.noise(token_BL, np.random.default_rng(0))
    assert 0.1 <= noised.time_B.min() < 0.101  # the first of 4096 strata
    model = a_model(width=8, ffn=8)
    torch.nn.init.zeros_(model.head.weight)
    nelbo, nats, _, masks = train_gpu.Loss(model).eval()(batch_of(noised)).tolist()
    assert nelbo == pytest.approx(math.log(39), rel=0.03)
    assert nats / masks == pytest.approx(math.log(39))
    assert masks == noised.mask_BL.sum()


@pytest.mark.parametrize("kind", ["nelbo", "uniform"])
def test_the_loss_and_its_gradient_are_those_of_the_formula(kind):
    model = a_model(heads=2)
    token_BL = rows_of_tokens(4, 64)
    token_BL[:, 20:] = mdlm.PAD  # the trainer cuts this to 32
    noised = train_gpu.noise(token_BL, np.random.default_rng(0))
    micro_batches = [batch_of(noised, slice(i, i + 2), kind) for i in (0, 2)]
    assert micro_batches[0].xt_BL.shape == (2, 32)
    loss = sum(map(train_gpu.Loss(model), micro_batches))
    xt, x0, time = (torch.from_numpy(x) for x in (noised.xt_BL, token_BL, noised.time_B))
    logits = model(xt, time.float(), xt != mdlm.PAD)
    nll = diffusion.masked_nll(logits, x0, xt == mdlm.MASK, mdlm.MASK)
    want = (nll / time[:, None]).sum() / train_gpu.is_text(token_BL).sum()
    if kind == "uniform":
        want = nll.sum() / (xt == mdlm.MASK).sum()
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)
    got, want = (torch.autograd.grad(x, list(model.parameters())) for x in (loss, want))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def unequal_rows(L=64):
    """Four rows of 64, 20, 50 and 3 tokens behind BOS, noised."""
    token_BL = rows_of_tokens(4, L)
    token_BL[:, 0] = mdlm.BOS
    for row, length in enumerate((64, 20, 50, 3)):
        token_BL[row, length:] = mdlm.PAD
    return train_gpu.noise(token_BL, np.random.default_rng(0))


@pytest.mark.slow
def test_one_compiled_graph_serves_batches_of_all_lengths():
    loss_of, graphs = train_gpu.Loss(a_model(ffn=32, rope=True, positions=256)), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(loss_of, backend=backend)
    # padded to 32 and 64 tokens; torch.compile refuses to fix what is marked
    for rows in ([1, 3], [0, 2], [2, 3]):
        batch = batch_of(unequal_rows(), np.array(rows))
        torch.testing.assert_close(compiled(batch), loss_of(batch))
    assert len(graphs) == 1


class Operators(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


ALONE = train_gpu.Devices(CPU)


def new_state(optimizer="muon", dtype="float32"):
    cfg = train_gpu.Config(optimizer=optimizer, compile=False, dtype=dtype, batch_size=4)
    return cfg, train_gpu.make_state(cfg, dataclasses.replace(SMALLER, vocab=64), ALONE)


def test_a_step_does_not_ask_the_device_for_a_number(monkeypatch):
    cfg, state = new_state()
    micro_batches, asked = [batch_of(unequal_rows())], []
    for name in ("tolist", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_, name=name: asked.append(name))
    with Operators() as ran:
        loss = train_gpu.gradients(state, micro_batches, cfg, ALONE)
        train_gpu.update(state, 0, cfg)
    assert not asked
    assert "_local_scalar_dense.default" not in ran.names  # what item(), float() and bool() run
    monkeypatch.undo()
    assert math.isfinite(loss.item())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_update_that_is_not_finite_is_left_out_on_the_device(dtype):
    cfg, state = new_state(dtype=dtype)
    micro_batches = [batch_of(unequal_rows())]

    def step(i, broken):
        train_gpu.gradients(state, micro_batches, cfg, ALONE)
        if broken:
            state.model.embed.weight.grad[3, 5] = broken
        train_gpu.update(state, i, cfg)
        return {name: tensor.clone() for name, tensor in train_gpu.trainer_tensors(state).items()}

    first = step(0, 0)
    for i, broken in ((1, math.nan), (2, math.inf)):
        left_out = step(i, broken)
        for name, tensor in first.items():
            if not name.startswith("ema."):
                assert torch.equal(left_out[name], tensor), name
        assert state.skipped_2.tolist() == [i, i]
    assert not torch.equal(step(3, 0)["model.embed.weight"], first["model.embed.weight"])
    assert state.skipped_2.tolist() == [2, 0]


def test_a_thread_makes_the_batch_of_the_next_step(data, monkeypatch):
    cfg = train_gpu.Config(steps=3, batch_size=8, micro_batch=4)
    make, made, other, second = train_gpu.training_batch, [], [], threading.Event()

    def training_batch(rows, cfg, step):
        if step == 2:
            raise OSError("the disk is gone")
        noised = make(rows, cfg, step)
        made.append(noised.token_BL)
        other.append(threading.current_thread() is not threading.main_thread())
        if step:
            second.set()
        return noised

    monkeypatch.setattr(train_gpu, "training_batch", training_batch)
    batches = functools.partial(train_gpu.step_batches, Rows(data, "train"), cfg, ALONE)
    steps = prefetch(batches, 0, 3)
    step, (noised, micro_batches), _ = next(steps)
    assert second.wait(10)  # while we hold the first
    assert (step, len(micro_batches), micro_batches[0].xt_BL.shape) == (0, 2, (4, 32))
    assert np.array_equal(noised.token_BL, made[0])
    assert np.array_equal(next(steps)[1][0].token_BL, made[1])
    assert other == [True, True]
    with pytest.raises(OSError, match="the disk is gone"):
        next(steps)


def test_scores_of_micro_batches_add_up_to_those_of_all_rows():
    model = a_model(vocab=8, heads=2, positions=32)
    noised = train_gpu.noise(rows_of_tokens(6, 32) % 4 + 4, np.random.default_rng(0))
    loss_of = train_gpu.Loss(model).eval()
    batches = [batch_of(noised, slice(*ends)) for ends in ((0, 6), (0, 1), (1, 6))]
    with torch.no_grad():
        whole, *parts = map(loss_of, batches)
        logits = model(torch.from_numpy(noised.xt_BL), torch.from_numpy(noised.time_B).float())
    logits[..., mdlm.MASK] = -math.inf
    assert whole[2] == (logits.argmax(-1).numpy() == noised.token_BL)[noised.mask_BL].sum()
    torch.testing.assert_close(sum(parts), whole)
    torch.testing.assert_close(sum(map(loss_of.train(), batches[1:])), whole[0])


@pytest.mark.parametrize(("dtype", "atol"), [("bfloat16", 0.0), ("float32", 4e-3)])
def test_muon_is_pytorchs(dtype, atol):
    rng = torch.Generator().manual_seed(0)
    shapes = [(8, 32), (32, 8), (16, 16)]
    ours, theirs = ([torch.nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2))
    pair = train_gpu.Muon(ours, 0.02, 0.1, dtype), torch.optim.Muon(theirs, 0.02, 0.1)
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = b.grad = torch.randn(a.shape, generator=rng)
        for optimizer in pair:
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)
    before = [p.detach().clone() for p in ours]
    pair[0].found_inf = torch.ones(())
    pair[0].step()
    assert all(map(torch.equal, before, ours))


@pytest.mark.slow
def test_eight_sequences_are_learned_by_heart_in_seconds():
    cfg = train_gpu.Config(steps=400, lr=3e-3, warmup=20, weight_decay=0.0)
    model, rng = a_model(vocab=64, width=64, layers=2, ffn=256), np.random.default_rng(0)
    token_BL = rng.integers(5, 64, (8, 32))
    optimizers = train_gpu.make_optimizers(model, cfg)
    loss_of = train_gpu.Loss(model).eval()  # for the accuracy; there is no dropout
    bounds, hits = [], []
    for step in range(cfg.steps):
        for optimizer, peak in zip(optimizers, (cfg.lr, cfg.muon_lr), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * train_gpu.learning_rate(step, cfg)
        nelbo, _, correct, masks = loss_of(batch_of(train_gpu.noise(token_BL, rng)))
        nelbo.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        bounds.append(nelbo.item())
        hits.append((correct / masks).item())
    assert np.mean(bounds[:10]) > 3.5  # ln 63 = 4.1
    assert np.mean(bounds[-20:]) < 0.8
    assert np.mean(hits[-20:]) > 0.75


def test_the_average_follows_the_weights():
    model, ema = a_model(), a_model()
    torch.nn.init.zeros_(ema.head.weight)
    weight = model.head.weight.detach()
    for decay, updates, kept in (0.999, 0, 0.1), (0.5, 10_000, 0.5), (0.0, 5, 0.0):
        before = ema.head.weight.detach().clone()
        train_gpu.average(ema, model, decay, updates)
        torch.testing.assert_close(ema.head.weight, kept * before + (1 - kept) * weight)


def test_learning_rate_warms_up_and_falls_to_a_tenth():
    cfg = train_gpu.Config(steps=1000, warmup=50)
    rates = [train_gpu.learning_rate(step, cfg) for step in range(1000)]
    assert rates[0] == pytest.approx(0.02)
    assert rates[49] == rates[50] == 1.0
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert rates[240] == pytest.approx(0.1 + 0.45 * (1 + math.cos(0.2 * math.pi)))  # half a cosine
    assert all(a >= b for a, b in itertools.pairwise(rates[50:]))


@pytest.fixture(scope="module")
def unbroken(data, tmp_path_factory):
    """Twelve steps without a stop."""
    out = tmp_path_factory.mktemp("unbroken") / "run"
    train(data, out, **TWELVE)
    return out


def test_a_run_leaves_a_model_that_loads_and_its_scores_fall(data, unbroken):
    scores = [row for row in log_of(unbroken) if "heldout_nats" in row]
    assert [row["step"] for row in scores] == [4, 8, 12]
    assert scores[-1]["heldout_nats"] < scores[0]["heldout_nats"]
    assert scores[-1]["perplexity"] == pytest.approx(np.exp(scores[-1]["heldout_nats"]))
    assert 0 <= scores[-1]["masked_accuracy"] < 1
    assert list(runs.saved_steps(unbroken)) == [8, 12]
    model = mdlm.load(unbroken / "step_12")
    # 300 token ids, filled up
    assert model.cfg == dataclasses.replace(mdlm.CONFIGS["tiny"], vocab=512, rope=True)
    assert "---- step 12" in (unbroken / "samples.txt").read_text()


def test_the_log_says_which_share_of_a_step_was_masked(unbroken):
    cfg = runs.resumed(train_gpu.Config, unbroken)
    rows = train_gpu.find_data(cfg)[0]
    steps = [row for row in log_of(unbroken) if "loss" in row]
    for row in steps:
        noised = train_gpu.training_batch(rows, cfg, row["step"] - 1)
        masks = (noised.xt_BL == mdlm.MASK).sum()
        assert row["mask_rate"] == pytest.approx(masks / train_gpu.is_text(noised.token_BL).sum())
    assert 0.4 < np.mean([row["mask_rate"] for row in steps]) < 0.6


def test_out_of_memory_is_one_line_that_says_what_to_lower(data, tmp_path, monkeypatch):
    for grow in (lambda *_: torch.empty(1 << 60), lambda *_: np.empty(1 << 50)):
        monkeypatch.setattr(train_gpu, "gradients", grow)
        match = "^out of memory; try a smaller --micro_batch or --model"
        refuses(match, data, tmp_path / "run")


def scored(folder, **settings):
    settings |= {"compile": False, "dtype": "float32"}
    return train_gpu.main(train_gpu.Config(eval_only=str(folder), **settings))


def test_eval_only_estimates_the_bound_that_the_trainer_logged(data, unbroken, tmp_path, capsys):
    row = scored(unbroken)
    said = capsys.readouterr().out.splitlines()
    last = log_of(unbroken)[-1]
    assert row["step"] == last["step"] == 12
    assert row["heldout_nats"] == pytest.approx(last["heldout_nats"], rel=0.05)
    assert 0 < row["standard_error"] < 0.1
    assert row["perplexity"] == pytest.approx(np.exp(row["heldout_nats"]))
    token_RL = Rows(data, "heldout").read(np.arange(Rows(data, "heldout").total))[0]
    text_bytes = json.loads((data / "meta.json").read_text())["splits"]["heldout"]["bytes"]
    bits = row["heldout_nats"] * train_gpu.is_text(token_RL).sum() / np.log(2)
    assert row["bits_per_byte"] == pytest.approx(bits / text_bytes)
    rates = [level["mask_rate"] for level in row["by_noise"]]
    assert rates == sorted(rates)
    assert said[0].startswith("step 12, ")
    assert said[1] == f"at most {row['bits_per_byte']:.4f} bits per byte"
    assert said[4] == "masked | nats per masked token | accuracy"
    assert len(said) == 5 + len(rates)
    # a model's folder, as in weights/, does not name its data
    with pytest.raises(ValueError, match="pass --data"):
        scored(unbroken / "step_12")
    alone = scored(unbroken / "step_12", data=str(data))
    assert alone == row | {"step": 0}


def test_a_model_that_knows_nothing_pays_log_vocab_for_every_token(data, tmp_path):
    model = mdlm.MDLM(dataclasses.replace(SMALLER, vocab=512))
    torch.nn.init.zeros_(model.head.weight)
    mdlm.save(model, tmp_path, (data / "tokenizer.json").read_bytes())
    row = scored(tmp_path, data=str(data), eval_draws=3)
    # every masked token costs log(V - 1), as MASK is excluded, and exactly m of n are masked
    assert row["heldout_nats"] == pytest.approx(math.log(511), rel=1e-5)
    assert row["standard_error"] == pytest.approx(0, abs=1e-6)
    for level in row["by_noise"]:
        assert level["masked_ce"] == pytest.approx(math.log(511), rel=1e-5)


def test_the_bound_is_that_of_each_row_alone_but_takes_rows_of_similar_length_together(monkeypatch):
    model = a_model(rope=True).eval()
    length_R = np.repeat([64, 8, 40, 10, 64, 9, 8, 41, 64, 10, 40, 64], 4)
    token_RL = rows_of_tokens(len(length_R), 64)
    token_RL[np.arange(64) >= length_R[:, None]] = mdlm.PAD
    counted_RL = token_RL != mdlm.PAD
    # each row alone
    rng, want_T4 = np.random.default_rng(0), np.zeros((10, 4))
    u_R = rng.permutation(diffusion.antithetic_times(rng.random(len(token_RL)), eps=0))
    mask_RL, weight_R = diffusion.mask_exactly(counted_RL, u_R, rng.random(token_RL.shape))
    rows = (*map(torch.from_numpy, (token_RL, mask_RL, weight_R)), length_R)
    for token_L, mask_L, weight, length in zip(*rows, strict=True):
        xt_BL, n = torch.where(mask_L, mdlm.MASK, token_L)[None, :length], int(mask_L.sum())
        with torch.no_grad():
            logits_MV = model(xt_BL, (1 / weight)[None].float())[0, mask_L[:length]]
        logits_MV[:, mdlm.MASK] = -math.inf
        nll = -logits_MV.log_softmax(-1)[range(n), token_L[mask_L]].sum().item()
        right = (logits_MV.argmax(-1) == token_L[mask_L]).sum().item()
        want_T4[min(int(10 / weight), 9)] += [weight.item() * nll / length_R.sum(), nll, right, n]
    # together, and nothing is read before the end
    seen, hidden = [], model.hidden
    spy = lambda token, *rest: seen.append(tuple(token.shape)) or hidden(token, *rest)  # noqa: E731
    monkeypatch.setattr(model, "hidden", spy)
    with Operators() as ran:
        cfg = train_gpu.Config(micro_batch=2, dtype="float32")
        sums_T4 = train_gpu.evaluate(model, token_RL, np.random.default_rng(0), cfg)
    np.testing.assert_allclose(sums_T4, want_T4, rtol=1e-5)
    assert sum(B for B, _ in seen) == len(token_RL)
    assert seen.count((2, 32)) > 5
    assert "_local_scalar_dense.default" not in ran.names


def test_what_eval_only_says_of_bad_input(data, unbroken, tmp_path):
    other = with_other_tokenizer(data, tmp_path / "other")
    with pytest.raises(ValueError, match="another tokenizer"):
        scored(unbroken, data=str(other))
    with pytest.raises(FileNotFoundError, match=r"config.json does not exist"):
        scored(tmp_path / "none")


def test_sigterm_saves_and_resuming_equals_not_stopping_bit_for_bit(
    data, unbroken, tmp_path, monkeypatch
):
    out, log = tmp_path / "run", runs.Folder.log

    def log_and_stop(self, row):
        log(self, row)
        if row["step"] == 6:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(runs.Folder, "log", log_and_stop)
    with pytest.raises(InterruptedError, match="SIGTERM: saved step 7; go on with --resume="):
        train(data, out, **TWELVE)
    monkeypatch.undo()
    resume(out)
    assert losses(out) == losses(unbroken)
    one, two = (mdlm.load(folder / "step_12").state_dict() for folder in (out, unbroken))
    assert all(torch.equal(one[name], two[name]) for name in one)


def stopped(command, step, signal_to):
    """The return code and errors of a command that gets SIGTERM once it has logged a step."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=ENV, **pipes)
    for line in process.stdout:
        if line.startswith(f"step {step}/"):
            os.kill(signal_to(process), signal.SIGTERM)
            break
    errors = process.communicate(timeout=60)[1]
    return process.returncode, errors


@pytest.mark.slow
def test_the_shell_gets_one_line_and_a_resumed_run_its_own_settings(data, tmp_path, monkeypatch):
    out = tmp_path / "run"
    script = command("train_gpu.py", *flags(data, out, "--steps=2"))
    code, errors = stopped(script, 1, lambda process: process.pid)
    assert code == 1
    asked, saved = errors.splitlines()
    assert asked == "SIGTERM: saving after this step; once more to end at once"
    assert saved.startswith("SIGTERM: saved step ")
    saved_model = json.loads((out / "config.json").read_text())["model"]
    monkeypatch.setitem(mdlm.CONFIGS, "tiny", mdlm.Config(**saved_model))
    resume(out)
    assert list(losses(out)) == [1, 2]


LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def together(unbroken, out, *arguments):
    """Two processes run to their end, to the losses of the unbroken run."""
    run = [*LAUNCH, *arguments]
    result = subprocess.run(run, capture_output=True, text=True, env=ENV, timeout=300)
    assert result.returncode == 0, result.stdout[-1000:] + result.stderr[-3000:]
    for step, want in losses(unbroken).items():
        np.testing.assert_allclose(losses(out)[step], want, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["--no-compile", "--compile"])
def test_two_processes_train_as_one(script, data, unbroken, tmp_path, compiled):
    more = ("--steps=12", "--eval_every=12", "--micro_batch=2", compiled)
    together(unbroken, tmp_path, script, *flags(data, tmp_path, *more))
    assert (tmp_path / "samples.txt").read_text().count("---- step") == 1


@pytest.mark.slow
def test_two_processes_leave_together_when_one_is_asked_to_stop(script, data, unbroken, tmp_path):
    def last_worker(process):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        return int(children.read_text().split()[-1])

    out, more = tmp_path / "run", ("--steps=12", "--eval_every=4", "--micro_batch=2")
    code, errors = stopped([*LAUNCH, script, *flags(data, out, *more)], 5, last_worker)
    assert code != 0
    saved = list(runs.saved_steps(out))[-1]
    assert saved in (5, 6, 7)
    assert errors.count(f"saved step {saved}; go on with --resume=") == 2
    together(unbroken, out, script, "--resume", out)


def test_a_run_that_goes_on_in_another_folder_begins_it_with_a_checkpoint(data, unbroken, tmp_path):
    saved = runs.resumed(train_gpu.Config, unbroken)
    first = max(runs.saved_steps(unbroken))
    changes = {"resume": str(unbroken), "out": str(tmp_path), "steps": first + 1}
    train_gpu.main(dataclasses.replace(saved, **changes))
    assert [*runs.saved_steps(tmp_path)] == [first, first + 1]


def refuses(match, data, out, error=ValueError, **settings):
    with pytest.raises(error, match=match):
        train(data, out, **settings)


def test_bad_input_is_one_line_and_leaves_the_run_alone(data, unbroken, tmp_path):
    before = (unbroken / "log.jsonl").read_text()
    refuses("already holds a run: --resume=", data, unbroken, FileExistsError)
    refuses("data_prep.py", tmp_path / "none", tmp_path / "a", FileNotFoundError)
    refuses("rows of 32 tokens, the run wants 64", data, tmp_path / "a", seq_len=64)
    said = "--batch_size=8 is no multiple of 1 devices times --micro_batch=3"
    refuses(said, data, tmp_path / "a", micro_batch=3)
    with pytest.raises(ValueError, match=r"another model: .*width 64 there, 384 here"):
        resume(unbroken, model="small", steps=20)
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}/config.json does not exist"):
        resume(tmp_path)
    out = tmp_path / "long"
    prepare(ROOT / "diffusion.py", out, seq_len=512, heldout=0.0)
    refuses("holds no held-out rows", out, tmp_path / "a")
    copy = tmp_path / "rows"
    shutil.copytree(data, copy)
    shard = next((copy / "train").glob("*.parquet"))
    os.truncate(shard, 500)
    refuses(f"{shard.name} is corrupted", copy, tmp_path / "a")
    (copy / "tokenizer.json").write_text("{}")
    refuses("tokenizer.json is missing, or not the one", copy, tmp_path / "b")
    os.truncate(copy / "meta.json", 100)
    refuses("meta.json is damaged", copy, tmp_path / "b")
    assert (unbroken / "log.jsonl").read_text() == before


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 8
    path.write_bytes(content)


@pytest.mark.parametrize("damage", ["cut", "gone", "other", "flipped bit", "without its step"])
def test_a_damaged_checkpoint_is_named(copy_of_unbroken, damage):
    out = copy_of_unbroken
    file = out / "step_12" / "trainer.safetensors"
    if damage == "cut":
        os.truncate(file, 100_000)
    elif damage == "flipped bit":
        flip_a_bit(file)
    elif damage == "without its step":
        trainer = json.loads(file.with_suffix(".json").read_text())
        del trainer["step"]
        file.with_suffix(".json").write_text(json.dumps(trainer))
    elif damage == "gone":
        file.unlink()
    else:
        file.write_bytes(safetensors.torch.save({"model.embed.weight": torch.zeros(2, 2)}))
    with pytest.raises(ValueError, match=r"step_12 .*delete it"):
        resume(out, steps=14)
    assert list(runs.saved_steps(out)) == [8, 12]


def test_a_flipped_bit_in_the_model_is_named(copy_of_unbroken):
    flip_a_bit(copy_of_unbroken / "step_12" / "model.safetensors")
    with pytest.raises(ValueError, match=r"step_12 cannot be read: model.safetensors is damaged"):
        scored(copy_of_unbroken)


def test_a_kill_before_the_checkpoint_leaves_no_sample_twice(
    unbroken, copy_of_unbroken, monkeypatch
):
    out = copy_of_unbroken
    shutil.rmtree(out / "step_12")

    def die(*_):
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(train_gpu, "save", die)
        with pytest.raises(SystemExit):
            resume(out)
    resume(out)
    for name in ("samples.txt", "step_12/model.safetensors"):
        assert (out / name).read_bytes() == (unbroken / name).read_bytes()


def test_what_changed_since_the_checkpoint_is_said_or_refused(copy_of_unbroken, capsys):
    out = copy_of_unbroken
    resume(out, seed=1, batch_size=16)
    said = f"changed since {out}/step_12: batch_size 8 -> 16, seed 0 -> 1\n"
    assert said in capsys.readouterr().out
    with pytest.raises(ValueError, match="--optimizer muon there, adamw here"):
        resume(out, optimizer="adamw")


@pytest.fixture
def full_disk():
    """A write beyond a megabyte fails."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, most))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


@pytest.fixture
def copy_of_unbroken(unbroken, tmp_path):
    shutil.copytree(unbroken, tmp_path / "run")
    return tmp_path / "run"


def test_a_full_disk_leaves_the_last_good_checkpoint(copy_of_unbroken, full_disk):
    with pytest.raises(OSError, match=r"File too large: .*step_14.tmp/.*safetensors"):
        resume(copy_of_unbroken, steps=14)
    assert list(runs.saved_steps(copy_of_unbroken)) == [8, 12]
    assert mdlm.load(copy_of_unbroken / "step_12").cfg.vocab == 512


def test_what_a_killed_process_left_is_no_obstacle(copy_of_unbroken):
    (copy_of_unbroken / "step_14.tmp").mkdir()
    resume(copy_of_unbroken, steps=14)
    assert list(runs.saved_steps(copy_of_unbroken)) == [12, 14]
    assert not list(copy_of_unbroken.glob("*.tmp"))


def test_two_trainers_on_one_folder_are_refused(data, unbroken):
    with open(unbroken / ".lock0", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError, match="another process is writing"):
            resume(unbroken, steps=14)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_learns_like_float32_and_resumes(data, tmp_path, dtype, capsys):
    out, float32 = tmp_path / "run", tmp_path / "float32"
    # with AdamW: Muon makes the smallest directions of a gradient as large as the others, and so
    # its rounding
    settings = {"steps": 6, "eval_every": 3, "optimizer": "adamw", "lr": 3e-4}
    train(data, float32, **settings)
    train(data, out, **settings, dtype=dtype)
    assert f"{dtype} matmuls" in capsys.readouterr().out
    uninterrupted = losses(out)
    for step, (loss, _) in uninterrupted.items():
        assert loss == pytest.approx(losses(float32)[step][0], rel=0.02)
    scaler = json.loads((out / "step_6" / "trainer.json").read_text())["scaler"]
    # steps since the last overflow
    assert bool(scaler.get("_growth_tracker")) == (dtype == "float16")
    shutil.rmtree(out / "step_6")
    resume(out)
    assert losses(out) == uninterrupted
    assert json.loads((out / "step_6" / "trainer.json").read_text())["scaler"] == scaler


def test_float16_resumes_with_muon(data, tmp_path):
    out = tmp_path / "run"
    train(data, out, steps=4, eval_every=2, dtype="float16")
    uninterrupted = losses(out)
    shutil.rmtree(out / "step_4")
    resume(out)
    assert losses(out) == uninterrupted


def test_a_tied_head_trains_on_rows_longer_than_the_preset_and_is_read_again(
    data, tmp_path, monkeypatch
):
    monkeypatch.setitem(mdlm.CONFIGS, "tiny", dataclasses.replace(SMALLER, positions=16))
    out = tmp_path / "run"
    train(data, out, steps=2, eval_every=2, tie=True, micro_batch=0)
    model = mdlm.load(out / "step_2").cfg
    assert (model.tie, model.positions) == (True, 32)
    # other devices choose anew
    assert runs.resumed(train_gpu.Config, out).micro_batch == 0
    assert scored(out, eval_rows=4, eval_draws=2)["step"] == 2


@pytest.mark.slow
def test_kill_9_at_twenty_random_moments_always_resumes_to_the_unbroken_losses(
    script, data, tmp_path
):
    out, more = tmp_path / "killed", ("--steps=200", "--eval_every=2", "--eval_rows=8")
    never_killed = [sys.executable, script, *flags(data, tmp_path / "never_killed", *more)]
    subprocess.run(never_killed, check=True, env=ENV, capture_output=True)
    first = [sys.executable, script, *flags(data, out, *more)]
    kill_and_resume(first, [*first, f"--resume={out}"])
    assert losses(out) == losses(tmp_path / "never_killed")
    assert scored_rows(out) == scored_rows(tmp_path / "never_killed")


def test_a_loss_that_is_not_finite_stops_after_five_steps(data, tmp_path):
    settings = {"steps": 40, "lr": 1e30, "warmup": 1, "eval_every": 100}
    refuses("no finite gradient in 5 steps", data, tmp_path, **settings)
    assert log_of(tmp_path)[-1]["skipped"] == 4


def test_a_card_that_emulates_bfloat16_trains_in_float16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", print)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert train_gpu.settle(train_gpu.Config(), train_gpu.find_devices()).dtype == "float16"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert train_gpu.settle(train_gpu.Config(), train_gpu.find_devices()).dtype == "float32"
