"""Likelihoods of fresh models whose value is known. Trained ones are scored in the tests of the trainers."""

import dataclasses
import json
import math
import os
import shutil
import sysconfig
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
import torch
from conftest import AS_A_USER, copy_in_bucket, run, says
from flax import nnx

import checkpoints
import data_prep
import evaluate
import inference
import model_dream as md
import model_mdlm
import model_pythoncoder as pc
import runs
from rows import Rows

pytestmark = pytest.mark.usefixtures("no_compile_cache")
LIBRARY = Path(sysconfig.get_paths()["stdlib"])
SOURCES = tuple(str(LIBRARY / f"{name}.py") for name in ("ast", "calendar", "csv", "fractions"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """{rows: folder} of packed and of padded rows."""
    top = tmp_path_factory.mktemp("data")
    for rows in ("packed", "padded"):
        settings = {"vocab_size": 400, "seq_len": 64, "heldout": 0.3, "workers": 1}
        data_prep.main(data_prep.Python(roots=SOURCES, rows=rows, out=str(top / rows), **settings))
    return {rows: top / rows for rows in ("packed", "padded")}


def new_run(folder, data, vocab):
    """What a trainer writes beside its checkpoints."""
    folder.mkdir()
    runs.write(folder / "tokenizer.json", (data / "tokenizer.json").read_bytes())
    runs.write(folder / "config.json", {"data": str(data), "model": {"vocab": vocab}})


@pytest.fixture(scope="module")
def pythoncoder(data, tmp_path_factory):
    """Two checkpoints of a PythonCoder: one knows nothing, its logits are 0; and a random one."""
    out = tmp_path_factory.mktemp("pythoncoder") / "run"
    cfg = pc.Config(512, 32, 2, 4, 4, head_size=8, ffn=48, positions=128)
    new_run(out, data["packed"], cfg.vocab)
    params = pc.new_params(cfg, 0)
    store = checkpoints.Checkpoints(out)
    for step, tree in ((2, jax.tree.map(lambda x: 0 * x, params)), (5, params)):
        store.save(step, {"params": tree}, {"model": dataclasses.asdict(cfg), "step": step})
    store.close()
    return out


def spread_rows(folder, count):
    rows = Rows(folder, "heldout")
    assert rows.total > count  # else all rows would be these
    return rows.read(np.arange(count) * rows.total // count)


def test_a_pythoncoder_that_knows_nothing_pays_log_vocab_for_every_token(data, pythoncoder, capsys):
    flags = evaluate.PythonCoderFlags(all_steps=True, drafts=2)
    silent, random = evaluate.main(
        evaluate.Config(ckpt=str(pythoncoder), rows=9, batch_size=4, json=True, devices=1, pythoncoder=flags)
    )
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [silent, random]
    assert [silent["step"], random["step"]] == [2, 5]
    assert silent["nats_per_token"] == pytest.approx(math.log(512), rel=1e-5)
    assert 0 <= random["drafts_accepted"] <= 1
    token_RL, segment_RL, _ = spread_rows(data["packed"], 9)
    counted_RL = (segment_RL[:, 1:] == segment_RL[:, :-1]) & (segment_RL[:, 1:] > 0)
    assert silent["heldout_tokens"] == counted_RL.sum()
    tokenizer = tokenizers.Tokenizer.from_file(str(pythoncoder / "tokenizer.json"))
    text_bytes = sum(len(tokenizer.decode([i]).encode()) for i in token_RL[:, 1:][counted_RL].tolist())
    assert silent["bits_per_byte"] == pytest.approx(counted_RL.sum() * 9 / text_bytes, rel=1e-3)


def test_an_mdlm_that_knows_nothing_pays_log_vocab_for_every_token(data, tmp_path, capsys):
    cfg = model_mdlm.Config(vocab=400, width=32, layers=1, heads=2, ffn=64, positions=64)
    new_run(tmp_path / "run", data["padded"], cfg.vocab)
    model = model_mdlm.MDLM(cfg)
    torch.nn.init.zeros_(model.head.weight)
    model_mdlm.save(model, tmp_path / "run" / "step_3")
    flags = evaluate.MdlmFlags(lengths=(16,), steps=(2,), plot=str(tmp_path / "noise.png"))
    (row,) = evaluate.main(evaluate.Config(model="mdlm", ckpt=str(tmp_path / "run"), rows=40, draws=3, mdlm=flags))
    # every masked token costs log(V - 1), MASK aside, and exactly m of n are masked: no noise is left
    assert row["nats_per_token"] == pytest.approx(math.log(399), rel=1e-5)
    assert row["standard_error"] == pytest.approx(0, abs=1e-6)
    assert row["perplexity"] == pytest.approx(399, rel=1e-4)
    token_RL = spread_rows(data["padded"], 40)[0]
    assert row["heldout_tokens"] == ((token_RL != model_mdlm.PAD) & (token_RL != model_mdlm.BOS)).sum()
    assert all(level["masked_ce"] == pytest.approx(math.log(399), rel=1e-5) for level in row["by_noise"])
    assert [level["mask_rate"] for level in row["by_noise"]] == sorted(level["mask_rate"] for level in row["by_noise"])
    assert [r["steps"] for r in row["latency"]] == [2]
    assert "nats per masked token" in capsys.readouterr().out
    model_mdlm.save(model, tmp_path / "model")  # without steps, as in weights/
    runs.write(tmp_path / "model" / "tokenizer.json", (data["padded"] / "tokenizer.json").read_bytes())
    settings = {"ckpt": str(tmp_path / "model"), "data": str(data["padded"]), "rows": 40, "draws": 3}
    (same,) = evaluate.main(evaluate.Config(model="mdlm", mdlm=evaluate.MdlmFlags(lengths=(), steps=()), **settings))
    assert (same["step"], same["nats_per_token"]) == (0, row["nats_per_token"])
    assert (tmp_path / "noise.png").stat().st_size > 5000


def new_dream(folder, data, size, **changes):
    """(tokenizer, model) of a Dream, saved in the folder model, with a last norm of this size: 0 knows nothing."""
    cfg = md.DreamConfig(512, 16, 1, 2, 1, 8, 16, positions=64, mask_id=400, pad_id=0, bos_id=0, eos_id=0, **changes)
    tokenizer = tokenizers.Tokenizer.from_file(str(data["packed"] / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|mask|>"])  # as train_tpu.py does
    tokenizer.save(str(folder / "tokenizer.json"))
    params = md.new_params(cfg, 0)
    model = nnx.merge(md.graph_of(cfg, md.Run()), params | {"norm": size * params["norm"]})
    checkpoints.save(md, folder / "model", model, [folder / "tokenizer.json"])
    return tokenizer, model


def test_a_dream_that_knows_nothing_pays_log_vocab_for_every_masked_token(data, tmp_path, capsys):
    tokenizer, _ = new_dream(tmp_path, data, 0)
    settings = {"model": "dream", "ckpt": str(tmp_path / "model"), "rows": 9, "batch_size": 4, "draws": 3, "json": True}
    (row,) = evaluate.main(evaluate.Config(data=str(data["packed"]), devices=1, **settings))
    assert json.loads(capsys.readouterr().out) == row
    for changed in ({"dtype": "bfloat16"}, {"dream": evaluate.DreamFlags(int4=True)}, {"devices": 0}):
        (same,) = evaluate.main(evaluate.Config(data=str(data["packed"]), **{"devices": 1} | settings | changed))
        assert same["nats_per_token"] == pytest.approx(row["nats_per_token"], rel=1e-2 if "dtype" in changed else 1e-5)
    assert "mesh data 4" in capsys.readouterr().err
    # -log p is log(V - 1), MASK aside, at each masked token, whose weight is 1 / t
    token_RL, segment_RL, _ = spread_rows(data["packed"], 9)
    noises = (md.noise(jax.random.key(n), 9, np.arange(9), segment_RL) for n in range(3))
    nats_N = [float((((u_RL < t_RL) & (segment_RL > 0)) / t_RL).sum()) * math.log(511) for t_RL, u_RL in noises]
    tokens = (segment_RL > 0).sum()
    assert row["score"] == "bound of 3 draws"
    assert row["heldout_tokens"] == tokens
    assert row["nats_per_token"] == pytest.approx(np.mean(nats_N) / tokens, rel=1e-5)
    assert row["standard_error"] == pytest.approx(np.std(nats_N, ddof=1) / 3**0.5 / tokens, rel=1e-3)
    assert row["nats_per_token"] == pytest.approx(math.log(511), abs=4 * row["standard_error"])
    text_bytes = sum(len(tokenizer.decode([i]).encode()) for i in token_RL[segment_RL > 0].tolist())
    assert row["bits_per_byte"] == pytest.approx(row["nats_per_token"] * tokens / math.log(2) / text_bytes, rel=1e-2)
    assert row["bits_per_byte"] == pytest.approx((row["low"] + row["high"]) / 2)
    with pytest.raises(ValueError, match="pass --data"):
        evaluate.main(evaluate.Config(**settings))
    with pytest.raises(ValueError, match="another tokenizer"):
        evaluate.main(evaluate.Config(data=str(data["padded"]), **settings))


@pytest.mark.parametrize(("block", "score"), [(1, "exact likelihood"), (2, "exact bound")])
def test_a_dream_of_small_blocks_is_scored_without_a_draw(data, tmp_path, capsys, block, score):
    _, model = new_dream(tmp_path, data, 3, block_length=block)
    settings = {"data": str(data["packed"]), "rows": 5, "batch_size": 4, "devices": 1}
    (row,) = evaluate.main(evaluate.Config(model="dream", ckpt=str(tmp_path / "model"), **settings))
    assert f" | score {score} | " in capsys.readouterr().out
    token_RL, segment_RL, position_RL = spread_rows(data["packed"], 5)
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
    assert row["nats_per_token"] == pytest.approx(float(want) / counted_RL.sum(), rel=1e-5)
    assert row["nats_per_token"] > math.log(511) + 0.1
    assert not {"standard_error", "low", "high"} & row.keys()


@pytest.mark.slow
def test_pythoncoder_scores_the_same_on_eight_devices(pythoncoder, capsys):
    flags = evaluate.PythonCoderFlags(drafts=4)
    settings = {"ckpt": str(pythoncoder), "rows": 6, "batch_size": 4, "pythoncoder": flags}
    (one,), (many,) = (evaluate.main(evaluate.Config(devices=n, **settings)) for n in (1, 0))
    assert many == pytest.approx(one, rel=1e-5)
    assert "8 x cpu; mesh data 4, fsdp 1, tensor 2" in capsys.readouterr().err


def test_only_the_rows_that_are_scored_are_read_and_compressed(data, pythoncoder, capsys, monkeypatch):
    read, compress, seen = Rows.read, evaluate.lzma.compress, {}

    def remember(rows, ids):
        seen["rows"] = read(rows, ids)
        return seen["rows"]

    monkeypatch.setattr(Rows, "read", remember)
    monkeypatch.setattr(evaluate.lzma, "compress", lambda text, **kw: compress(seen.setdefault("text", text), **kw))
    settings = {"ckpt": str(pythoncoder), "devices": 1, "pythoncoder": evaluate.PythonCoderFlags(drafts=0)}
    evaluate.main(evaluate.Config(rows=3, **settings))
    total = Rows(data["packed"], "heldout").total
    assert seen["rows"].shape == (3, 3, 64)
    assert len(seen["text"]) < 3 * 64 * 16
    assert f"3 of {total:,} held-out rows" in capsys.readouterr().err
    assert evaluate.Config().rows > 0  # of a large data set not all, unless asked


@pytest.mark.slow
def test_model_and_data_can_be_in_a_bucket(data, pythoncoder, bucket):
    copy_in_bucket(bucket, "put", f"{data['packed']}/", "bucket/rows/")
    copy_in_bucket(bucket, "put", f"{pythoncoder}/", "bucket/run/")
    both = "--rows=4", "--batch_size=4", "--drafts=2", "--json", "--compile_cache=", "--devices=1"
    remote = run(
        "evaluate.py", "--ckpt=gs://bucket/run", "--data=gs://bucket/rows", *both, env=os.environ | AS_A_USER | bucket
    )
    assert remote.returncode == 0, remote.stderr
    local = run("evaluate.py", f"--ckpt={pythoncoder}", *both)
    assert json.loads(remote.stdout) == pytest.approx(json.loads(local.stdout))


def test_bad_input_is_one_line(data, pythoncoder, tmp_path, monkeypatch):
    here = {"ckpt": str(pythoncoder)}
    shipped = tmp_path / "weights" / "pythoncoder"
    shutil.copytree(pythoncoder, shipped)
    runs.write(shipped / "config.json", {})
    monkeypatch.setattr(inference, "WEIGHTS", tmp_path / "weights")
    monkeypatch.chdir(tmp_path)
    for part, settings in (
        ("weights/pythoncoder does not say what it was trained on; pass --data", {}),
        ("no config.json", {"ckpt": str(tmp_path)}),
        ("train_gpu.py", {"ckpt": str(tmp_path), "model": "mdlm"}),
        ("another tokenizer", here | {"data": str(data["padded"])}),
        ("--batch_size", here | {"batch_size": 0}),
        ("--draws 2", here | {"draws": 1}),
        ("--int8 and --int4 are for --model=dream", here | {"dream": evaluate.DreamFlags(int8=True)}),
        ("there is no folder", here | {"mdlm": evaluate.MdlmFlags(plot=str(tmp_path / "none" / "a.png"))}),
        ("holds no checkpoint of step 3; it has [2, 5]", here | {"step": 3}),
    ):
        with pytest.raises((ValueError, OSError)) as error:
            evaluate.main(evaluate.Config(**settings))
        assert part in str(error.value)
    says(run("evaluate.py", f"--ckpt={tmp_path}"), "no config.json", "train_tpu.py")
