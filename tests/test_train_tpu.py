"""train_tpu.py: what is particular to it; test_trainers.py has the rest."""

import dataclasses
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import refusal, use_one_device
from test_trainers import CODER, config, evaluation

import checkpoints
import convert_weights
import model_pythoncoder as pc
import runs
import train_tpu
from rows import Rows


@pytest.fixture
def one_device(monkeypatch):
    use_one_device(monkeypatch, train_tpu, pc.CONFIGS, "test", CODER)


def data_of(tokens=200_000, total=10**6, **meta):
    """Training rows, as far as settle() reads them."""
    meta = {"seq_len": 1024, "vocab_size": 4000, "vocab_padded": 4096} | meta
    columns = ["input_ids", "segments", "positions"]
    return SimpleNamespace(total=total, tokens=tokens, columns=columns, meta=meta, folder="rows")


# ---- updates -----------------------------------------------------------------------------------


def test_weight_decay_touches_matrices_and_embeddings_alone():
    mask = checkpoints.flatten(train_tpu.decays(pc.param_shapes(pc.CONFIGS["1b"])))
    assert {n for n, decay in mask.items() if not decay} == {
        "norm", "mtp.norm_hidden", "mtp.norm_embed", "mtp.norm_out", "layers.attn_norm", "layers.ffn_norm",
        "layers.lambda_q1", "layers.lambda_k1", "layers.lambda_q2", "layers.lambda_k2", "layers.subln",
    }  # fmt: skip


def test_muon_has_the_layers_matrices_and_orthogonalises_each_of_a_stack(monkeypatch):
    keys = jax.random.split(jax.random.key(0))
    matrix = jax.random.normal(keys[0], (3, 6, 4))
    grads = {
        "embed": jnp.ones((8, 4)),
        "layers": {"wq": matrix, "attn_norm": jnp.ones((3, 4))},
        "mtp": {"proj": jax.random.normal(keys[1], (8, 4)), "head": jnp.ones((8, 4))},
    }
    params = jax.tree.map(jnp.zeros_like, grads)
    monkeypatch.setattr(train_tpu, "CLIP", 1e9)
    optimizer = train_tpu.make_optimizer(None, muon=True)
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


def stepper(cfg, model, mesh, memory=None, **compute):
    """(compiled step, its state) with new weights on a mesh."""
    optimizer = train_tpu.make_optimizer(None)
    shapes = checkpoints.state_shapes(pc, model, optimizer, mesh)
    graph = pc.graph_of(model, pc.Compute(**compute))
    step = train_tpu.lower_step(cfg, graph, optimizer, shapes, mesh, memory).compile()
    return step, train_tpu.new_state(cfg, model, optimizer, shapes)


def batch_on(mesh, token_ABL):
    """Two documents and padding a row: micro-batches differ in how many tokens they count."""
    A, B, L = token_ABL.shape
    row_AB1 = np.arange(A * B).reshape(A, B, 1)
    start_AB1 = 8 + row_AB1 % 5  # of the second document
    index_L = np.arange(L)
    second_ABL = index_L >= start_AB1
    segment_ABL = np.where(index_L < L - L * row_AB1 // (2 * A * B), 1 + second_ABL, 0)
    columns = token_ABL, segment_ABL, index_L - start_AB1 * second_ABL
    batch = {name: x.astype(np.int32) for name, x in zip(train_tpu.COLUMNS, columns, strict=True)}
    return jax.device_put(batch, jax.NamedSharding(mesh, jax.P(None, pc.BATCH)))


def test_thirty_steps_on_one_batch_learn_it_by_heart():
    cfg = train_tpu.Config(
        model="tiny", seq_len=64, batch_size=8, micro_batch=4, lr=0.03, steps=100, warmup=1
    )
    mesh = checkpoints.mesh_of(jax.devices()[:1], (1, 1, 1))
    step, state = stepper(cfg, CODER, mesh)
    batch = batch_on(mesh, np.random.default_rng(0).integers(0, 640, (2, 4, 64)))
    history = []
    for _ in range(30):
        state, metrics = step(state, batch, jnp.int32(5))  # at the peak of the learning rate
        history.append(float(metrics["main"]))
    assert history[0] == pytest.approx(np.log(640), rel=0.05)
    assert history[-1] < 0.8


def same_steps(one, many):
    """The same metrics and moments, that is gradients, of two first steps."""
    (state, metrics), (want, want_metrics) = one, many
    assert float(metrics["loss"]) == pytest.approx(float(want_metrics["loss"]), rel=1e-5)
    assert float(metrics["grad_norm"]) == pytest.approx(float(want_metrics["grad_norm"]), rel=1e-4)
    for a, b in zip(jax.tree.leaves(state["opt"]), jax.tree.leaves(want["opt"]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * np.abs(b).max())


@pytest.mark.slow
def test_splitting_a_step_into_micro_batches_changes_nothing(code_rows):
    token_RL = Rows(code_rows, "train").read(np.arange(8))[0]
    mesh = checkpoints.mesh_of(jax.devices()[:1], (1, 1, 1))
    results = []
    for micro in (8, 2):
        cfg = train_tpu.Config(
            seq_len=64, batch_size=8, micro_batch=micro, lr=1e-2, steps=10, warmup=1
        )
        step, state = stepper(cfg, CODER, mesh, dropout=0.1)
        results.append(step(state, batch_on(mesh, token_RL.reshape(-1, micro, 64)), jnp.int32(1)))
    same_steps(*results)


@pytest.mark.slow
def test_gradients_of_many_micro_batches_meet_once_a_step_where_memory_allows_it():
    """Four devices, four micro-batches: no reduction and no gathering of weights inside a loop, and
    the same step.
    """
    model = pc.Config(256, 32, layers=2, heads=4, kv_heads=2, head_size=8, ffn=64, positions=32)
    mesh = checkpoints.mesh_of(jax.devices()[:4], (1, 4, 1))
    token_ABL = np.random.default_rng(0).integers(0, 256, (4, 4, 32))
    cfg = train_tpu.Config(
        seq_len=32, batch_size=16, micro_batch=1, lr=1e-2, steps=10, warmup=1, dropout=0.1
    )
    results = []
    for memory in (1.0, 1e-6):
        step, state = stepper(cfg, model, mesh, memory, dropout=0.1)
        text = step.as_text()
        bodies = set(re.findall(r"body=%?([\w.-]+)", text))
        inside = [part for part in text.split("\n\n") if part.lstrip("% ").split(" ")[0] in bodies]
        assert len(inside) >= 3  # micro-batches, layers forward, layers backward
        reduction = re.compile(r" (all-reduce|all-gather|reduce-scatter)\(")
        assert any(map(reduction.search, inside)) == (memory < 1)
        results.append(step(state, batch_on(mesh, token_ABL), jnp.int32(1)))
    same_steps(*results)


# ---- settings ----------------------------------------------------------------------------------


def settled(devices, memory, data=None, **settings):
    cfg, model, *_ = train_tpu.settle(train_tpu.Config(**settings), devices, data, memory)
    return cfg, model


@pytest.fixture
def no_mesh(monkeypatch):
    """Devices that are not here have no mesh."""
    monkeypatch.setattr(checkpoints, "training_mesh", lambda *_: None)


def test_without_model_and_batch_size_data_and_device_decide_together(no_mesh):
    """The largest preset that memory holds and the data feeds; short runs take small steps."""

    def picked(tokens, chips=1, memory=31.24, **settings):
        devices = [SimpleNamespace(platform="tpu")] * chips
        cfg, _ = settled(devices, memory, data_of(tokens), **settings)
        return cfg.model, cfg.batch_size * 1024

    assert picked(8_000_000) == ("tiny", 8192)
    assert picked(60_000_000) == ("small", 65_536)
    assert picked(500_000_000) == ("300m", 131_072)
    assert picked(2_000_000_000) == ("1b", 131_072)
    assert picked(2_000_000_000, memory=15.75) == ("300m", 131_072)
    # its weights and moments lie on all of them
    assert picked(2_000_000_000, memory=15.75, chips=8) == ("1b", 131_072)
    assert picked(8_000_000, model="1b")[0] == "1b"


def test_an_epoch_ends_with_an_evaluation_unless_these_are_asked_for_less_often(no_mesh):
    for asked, want in ((0, 12), (10, 10), (1000, 1000)):
        cfg, _ = settled(jax.devices(), None, data_of(total=100), batch_size=8, eval_every=asked)
        assert (cfg.eval_every, cfg.steps) == (want, 48)


def test_the_fused_attention_is_that_of_the_device():
    def of(platform, version="", dtype="bfloat16"):
        device = SimpleNamespace(platform=platform, compute_capability=version)
        return train_tpu.fused_kernel(device, dtype)

    versions = ("7.5", "8.0", "8.9", "9.0", "10.0", "12.0", "gfx942")
    assert [of("gpu", version) for version in versions] == ["", *5 * ["gpu"], ""]
    assert (of("tpu"), of("cpu"), of("gpu", "8.0", "float32")) == ("tpu", "", "")
    assert train_tpu.fused_kernel(SimpleNamespace(platform="gpu"), "bfloat16") == ""


def test_steps_on_gpus_are_picked_by_what_was_compiled(no_mesh):
    def picked(memory, **settings):
        device = SimpleNamespace(platform="gpu", device_kind="NVIDIA")
        cfg, _ = settled([device], memory, **settings)
        return cfg.model, cfg.micro_batch

    recorded = train_tpu.STEP_GIB["gpu"]
    for name, sizes in recorded.items():
        for rows, gib in sizes.items():
            assert picked(gib, model=name) == (name, rows)
    smallest = min(recorded["1b"].values())
    assert picked(smallest)[0] == "1b"
    assert picked(smallest - 0.01)[0] == "300m"
    assert picked(smallest - 0.01, model="1b") == ("1b", 1)  # whoever insists gets the least
    assert picked(0.5) == ("tiny", 2)
    # rows four times as long as the recorded ones
    assert picked(99, model="1b", seq_len=8192)[1] == max(1, max(recorded["1b"]) // 4)


def test_a_preset_takes_the_ids_and_rows_that_data_prep_writes_unasked():
    one = jax.devices()[:1]
    meta = {"seq_len": 2048, "vocab_size": 8192, "vocab_padded": 8192}
    cfg, model = settled(one, None, data_of(**meta))
    assert (cfg.model, model.vocab, model.positions, cfg.seq_len) == ("tiny", 8192, 2048, 2048)
    assert (cfg.optimizer, cfg.dropout) == ("muon", 0.0)  # of small models
    # and a table twice as long as the data needs is cut
    for ids, rows in ((300, 512), (1024, 1024), (1500, 2048), (2048, 2048), (3000, 3072)):
        meta = {"vocab_size": ids, "vocab_padded": -(-ids // 512) * 512}
        assert settled(one, None, data_of(**meta))[1].vocab == rows
    # what is longer than the rows of training is for YaRN, and a head that nothing trains is none
    _, model = settled(one, None, data_of(seq_len=128), mtp_weight=0.0)
    assert (model.positions, model.mtp) == (128, False)
    assert settled(one, None, data_of(seq_len=128))[1].mtp


def test_what_does_not_go_together_is_one_line(code_rows, one_device, tmp_path):
    pairs = data_of()
    pairs.columns = [*pairs.columns, "fixed"]
    with pytest.raises(ValueError, match=r"rows holds pairs, for train_dream.py"):
        settled(jax.devices()[:1], None, pairs)
    cfg = config(train_tpu, code_rows, tmp_path / "new", model="1b", diff="v2")
    assert "--diff=v2 needs an even number" in refusal(train_tpu, cfg)


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


# ---- scores ------------------------------------------------------------------------------------


def test_a_model_that_knows_nothing_pays_log_vocab_for_every_token(code_rows, one_device, tmp_path):
    runs.write(tmp_path / "tokenizer.json", (code_rows / "tokenizer.json").read_bytes())
    runs.write(tmp_path / "config.json", {"data": str(code_rows)})
    store = checkpoints.Checkpoints(tmp_path)
    params = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), pc.param_shapes(CODER))
    store.save(2, {"params": params}, {"model": dataclasses.asdict(CODER), "step": 2})
    store.close()
    scores = train_tpu.main(evaluation(train_tpu, tmp_path, eval_rows=20))
    assert scores["heldout_nats"] == pytest.approx(np.log(640), rel=1e-5)
    rows = Rows(code_rows, "heldout")
    token_RL, segment_RL, _ = rows.read(rows.spread(20))
    counted_RL = (segment_RL[:, 1:] == segment_RL[:, :-1]) & (segment_RL[:, 1:] > 0)
    tokenizer = runs.read_tokenizer(tmp_path)
    texts = [tokenizer.decode([i]).encode() for i in token_RL[:, 1:][counted_RL].tolist()]
    bits = counted_RL.sum() * np.log2(640) / sum(map(len, texts))
    assert scores["bits_per_byte"] == pytest.approx(bits, rel=1e-3)


@pytest.mark.slow
def test_a_converted_model_has_the_same_score(code_rows, one_device, tmp_path):
    out = tmp_path / "run"
    train_tpu.main(config(train_tpu, code_rows, out))
    convert_weights.main(convert_weights.Config(source=str(out), out=str(tmp_path / "hub")))
    assert "pass --data" in refusal(train_tpu, evaluation(train_tpu, tmp_path / "hub"))
    converted = evaluation(train_tpu, tmp_path / "hub", data=str(code_rows))
    assert train_tpu.main(converted) == train_tpu.main(evaluation(train_tpu, out))
