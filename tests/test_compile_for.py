"""Costs read from HLO: hand-written modules, and small programs compiled for TPUs and GPUs against
closed forms.
"""

import dataclasses
import importlib.util
import json
import math
import os
import subprocess
import sys

import pytest
import tokenizers
from conftest import ROOT, run
from flax import nnx

import checkpoints
import generate_dream
import model_dream as md
import prompts
import sample_dream
import train_tpu

sys.path.insert(0, str(ROOT / "bench"))
import compile_for

# PYTHONPATH of child processes
OUR_FOLDERS = os.pathsep.join(str(ROOT / name) for name in ("", "tests", "bench"))

# ---- text written by hand: 3 rounds of {matmul in a fusion, all-gather}, a conditional, collectives of every form

HLO = (ROOT / "tests/hlo/by_hand.txt").read_text()


def by_hand(start=0, limit=3, known=""):
    return HLO.replace("START", str(start)).replace("LIMIT", str(limit)).replace("KNOWN", known)


def test_hand_written_module_adds_up():
    cost = compile_for.cost_of(by_hand())
    assert cost.flops == 3 * 2 * 8 * 16 * 32
    # three rounds, the dear branch, the copy, nothing for the SparseCore
    assert cost.cycles == 3 * 100 + 7 + 20
    assert cost.ops == {"jit(f)/dot": 300, "jit(f)/exp": 7, "jit(f)/copy": 20}
    assert cost.collectives == {"all-gather": 4 * 256 * 4, "reduce-scatter": 64 * 4 * 2}
    assert cost.collective_counts == {"all-gather": 3 + 1, "reduce-scatter": 1}
    assert cost.custom_calls == {"kernel": 1, "offload": 1}
    assert cost.unknown_loops == 0
    assert cost.seconds("v6e:2x2") == pytest.approx(327 / 1.75e9, rel=1e-3)


def test_hbm_bytes_count_slices_and_leave_out_vmem():
    # x, a slice of w, i; i + 1; all-gather
    rounds = 3 * (8 * 16 * 2 + 16 * 32 * 2 + 4 + 3 * 4 + (64 + 256) * 4)
    branch, scattered, start = 2 * 64 * 4, 64 * 4 * 2 + 16 * 4 * 2, (64 + 64 + 256 + 2) * 4
    gather, kernel, copied = (2 * 32 * 2 + 32) * 4, 2 * 64 * 4, 2 * 64 * 4
    indices, table = 32 * 4, 1000 * 2 * 4 + 4
    total = rounds + branch + scattered + start + gather + kernel + copied + indices + table
    # whether the gather's indices count is moot
    assert abs(compile_for.cost_of(by_hand()).bytes - total) <= 32 * 4


KNOWN = ', backend_config={"known_trip_count":{"n":"11"}}'


@pytest.mark.parametrize(
    ("start", "limit", "known", "rounds"),
    [(0, 5, "", 5), (2, 5, "", 3), (5, 5, "", 0), (0, 5, KNOWN, 11)],
)
def test_loops_run_from_start_to_limit(start, limit, known, rounds):
    assert compile_for.cost_of(by_hand(start, limit, known)).flops == rounds * 2 * 8 * 16 * 32


def test_loop_of_unknown_length_counts_once_and_is_reported():
    text = by_hand().replace("s32[] constant(3)", "s32[] get-tuple-element(%arg.1), index=0")
    cost = compile_for.cost_of(text)
    assert (cost.flops, cost.unknown_loops) == (2 * 8 * 16 * 32, 1)


def test_other_text_and_other_topologies_are_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        compile_for.cost_of("module @jit_f { }")
    for name in ("v6e-8", "rtx4090:2x2", "v6e:8", "h100:0", "a100", "v6e:0x4"):
        with pytest.raises(ValueError, match=r"unknown device .*; one of v5e, v6e, t4, "):
            compile_for.topology_devices(name)
    with pytest.raises(ValueError, match="must be even"):
        compile_for.topology_devices("v6e:3x3")
    with pytest.raises(ValueError, match="--largest goes with train, dream, generate and grpo"):
        compile_for.main(compile_for.Config(compile_for.Dump("x"), largest=True))


@pytest.mark.parametrize(
    ("device", "file"), [("v6e:1x1", "tpu"), ("rtx4090", "cuda"), ("h100:8", "cuda")]
)
def test_a_missing_compiler_says_how_to_install_it(device, file, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(ImportError, match=rf"pip install -r requirements-{file}\.txt"):
        compile_for.topology_devices(device)


# ---- devices, rooflines, links ---------------------------------------------------------------------------------------


def test_the_peaks_of_gpus_are_those_of_their_units():
    # multiply-adds of an SM in a cycle, by the architecture white papers: tensor cores, of a T4 its
    # float32 cores
    per_cycle = {"t4": 64, "rtx3060": 256, "rtx4090": 256, "l4": 512}
    per_cycle |= {"a100-40": 1024, "a100-80": 1024, "h100": 2048, "h200": 2048}
    for name, chip in compile_for.CHIPS.items():
        if chip.cuda:
            sms = chip.cuda[1]
            peak = 2 * sms * chip.clock_hz * per_cycle.pop(name)
            assert chip.flops_per_s == pytest.approx(peak, rel=0.09), name
            text = compile_for.description(chip)
            assert f"core_count: {sms} " in text
            assert text.count("{") == text.count("}")
    assert not per_cycle


def test_links_are_counted_at_the_worst_placed_chip():
    cost = compile_for.Cost()
    assert compile_for.collective_seconds(cost, "v6e") == 0
    cost.collectives.update({"all-gather": 16_000, "all-reduce": 1600, "collective-permute": 100})
    # a corner of 4 x 4 has two links of 1e11; fifteen parts of sixteen
    seconds = (15_000 + 2 * 1500 + 100) / 2e11
    assert compile_for.collective_seconds(cost, "v6e:4x4") == pytest.approx(seconds)
    want = {"v6e:16x16": 4e11, "v5e:1x8": 5e10, "v5e:2x4": 1e11, "v6e:4x16": 3e11, "h100:8": 4.5e11}
    for name, rate in want.items():
        assert compile_for.link_rate(name) == rate


GPU_HLO = (ROOT / "tests/hlo/gpu.txt").read_text()


def test_a_gpus_roofline_adds_up_its_kernels():
    # sixteen FLOPs are worth a byte
    chip = compile_for.CHIPS["t4"]._replace(flops_per_s=16.0, bytes_per_s=1.0)
    cost = compile_for.cost_of(GPU_HLO, chip)
    gemm, call = 2 * 8 * 32 * 16, 2 * 4 * 8 * 64 * 32  # FLOPs of the Triton kernel, of cuBLAS
    assert cost.flops == gemm + call
    small, added = 2 * (8 * 16 + 16 * 32) + 4 * 8 * 32, 5 * 2 * 4 * 8 * 32
    many = 4 * 8 * 32 + 4 * 4 * 8 * 32
    product = 4 * (4 * 8 * 32 + 4 * 32 * 64 + 4 * 8 * 64)  # without the workspace
    assert cost.bytes == small + added + many + product
    assert gemm / 16 < small
    assert call / 16 < product
    assert cost.roofline_s == cost.bytes
    slow = compile_for.cost_of(GPU_HLO, chip._replace(flops_per_s=0.25))
    assert slow.roofline_s == 4 * cost.flops + added + many
    assert (cost.cycles, cost.custom_calls) == (0, {"__cublas$lt$matmul": 1})


def test_a_tpus_roofline_leaves_out_collectives_and_what_runs_beside():
    chip = compile_for.CHIPS["v6e"]._replace(flops_per_s=1e-6, bytes_per_s=math.inf)
    cost = compile_for.cost_of(by_hand(), chip)
    assert cost.roofline_s == pytest.approx(1e6 * cost.flops)
    chip = chip._replace(flops_per_s=math.inf, bytes_per_s=1.0)
    # all-gathers, the gather beside
    apart = 3 * (64 + 256) * 4 + (64 + 64 + 256 + 2) * 4 + (2 * 32 * 2 + 32) * 4
    assert abs(cost.bytes - apart - compile_for.cost_of(by_hand(), chip).roofline_s) <= 32 * 4


# ---- the largest micro-batch, and the table --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("usable", "want", "compiled"), [(3, 0, [8, 2, 1]), (5, 1, [8, 2, 1]), (49, 8, [8, 32, 16])]
)
def test_bisection_finds_the_largest_micro_batch_that_fits(usable, want, compiled):
    class Program:  # 2 GiB, and 3 for each row
        n = 0

        def sized(self, rows):
            program = Program()
            program.n = rows
            return program

        def rows(self):
            gib = 2 + 3 * self.n
            return [{"micro_batch": self.n, "total_gib": gib, "fits": gib <= usable}]

    (row,) = compile_for.largest(Program())
    assert (row["largest"], list(row["tried"])) == (want, compiled)
    assert (row["micro_batch"], row["fits"]) == (want or 1, want > 0)
    assert row["tried"][8] == 26


def test_the_table_is_that_of_the_recorded_programs():
    entries = compile_for.recorded()
    text = compile_for.markdown(entries)
    assert text == compile_for.RESULTS.with_suffix(".md").read_text()
    lines, kin = (table.splitlines() for table in text.removeprefix(compile_for.HEAD).split("\n\n"))
    assert len(lines) == 2 + len(compile_for.CHIPS)
    assert all(line.count("|") == 2 + len(compile_for.CELLS) for line in lines)
    assert len(kin) == 2 + 3 * len(compile_for.KIN)
    assert len({line.count("|") for line in kin}) == 1
    known = {(entry["device"], entry["cell"]) for entry in entries if "not_compiled" not in entry}
    assert known <= (every := {(device, name) for name, device, _ in compile_for.programs()})
    assert text.count("not compiled") == len(every) - len(known)
    for entry in entries:
        if entry.get("total_gib"):
            assert entry["fits"] == (entry["total_gib"] <= entry["usable_gib"])
            assert f"{entry['total_gib']:.1f} GiB" in text


def test_cells_say_what_fits_what_does_not_and_what_was_not_compiled():
    entry = {"fits": True, "total_gib": 19.14, "usable_gib": 21.24, "micro_batch": 4}
    entry |= {"roofline_s": 2.0}
    for changed, want in (
        (entry, "19.1 GiB (4 rows), at least 2 s"),
        (entry | {"step_s": 2.64}, "19.1 GiB (4 rows), 2.64 s estimated, at least 2 s"),
        (entry | {"roofline_s": 0.0151}, "19.1 GiB (4 rows), at least 15.1 ms"),
        (entry | {"fits": False}, "**no**: 19.1 GiB (4 rows)"),
        ({"fits": False, "usable_gib": 15.75, "because": ""}, "**no**: more than 15.8 GiB"),
        ({"not_compiled": "stopped"}, "not compiled: stopped"),
        (None, "not compiled"),
    ):
        assert compile_for.cell(changed) == want


def test_trainers_pick_by_the_recorded_figures():
    most = {}  # of all devices of a platform
    for entry in compile_for.recorded():
        if entry["cell"].startswith("train") and "total_gib" in entry:
            platform = compile_for.platform(entry["device"]).split()[0]
            at = platform, entry["cell"].split()[1], entry["micro_batch"]
            most[at] = max(entry["total_gib"], most.get(at, 0))
    assert most
    for (platform, preset, rows), gib in most.items():
        assert 0 <= train_tpu.STEP_GIB[platform][preset][rows] - gib < 0.1


def test_command_line_prints_totals_and_operations(tmp_path, capsys):
    (tmp_path / "dump.txt").write_text(by_hand())
    compile_for.main(compile_for.Config(compile_for.Dump(file=str(tmp_path / "dump.txt"), top=1)))
    printed = capsys.readouterr().out
    for text in ("2.458e+04", "all-gather: 4 x", "kernel: 1 x, no estimate", "91.7%  jit(f)/dot"):
        assert text in printed
    assert "jit(f)/copy" not in printed


# ---- programs compiled for TPU topologies, all in one process of their own: this one has eight fake CPU devices

M, D, LAYERS, OUTER = 256, 512, 7, 5
BIG = 1024, 512


def compile_programs():
    """Prints {program: [Cost, memory]} as JSON; runs in the child process."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import pallas as pl
    from jax.sharding import AxisType, Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    results = {}

    def mesh_of(topology):
        devices = np.array(compile_for.topology_devices(topology))
        return Mesh(devices, ("x",), axis_types=(AxisType.Auto,))

    def record(name, f, *args, options=None, **jit_options):
        lowered = jax.jit(f, **jit_options).lower(*args)
        _, cost, memory = compile_for.compile_and_cost(lowered, compiler_options=options)
        results[name] = [vars(cost), memory]

    chip = NamedSharding(mesh_of("v6e:1x1"), P())

    def array(*shape, dtype=jnp.bfloat16, sharding=chip):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def layers(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    def total(x, w):
        return layers(x, w).astype(jnp.float32).sum()

    def repeated(f, x):
        return jax.lax.scan(lambda x, _: (f(x), None), x, None, length=OUTER)[0]

    x, w = array(M, D), array(LAYERS, D, D)
    record("scan", layers, x, w)
    record("nested", lambda x, w: repeated(lambda x: layers(x, w), x), x, w)
    record("gradient", jax.grad(total, argnums=(0, 1)), x, w)

    def steps_of_4(x, w):
        return jax.lax.while_loop(lambda c: c[0] < 22, lambda c: (c[0] + 4, c[1] @ w[0]), (1, x))

    def stops_early(x, w):
        def body(c):
            i, x, hits = c
            return i + 1, x @ w[0], hits + (x[0, 0] > 0)

        return jax.lax.while_loop(lambda c: (c[2] < 3) & (c[0] < 22), body, (0, x, 0))

    # without a softmax, for which libtpu has a kernel of its own that reports no FLOPs
    def attention(q, k, v):
        return jnp.tanh(q @ k.swapaxes(2, 3)) @ v

    def branches(x, w, i):
        return jax.lax.switch(i, [lambda: x @ w[0], lambda: x, lambda: layers(x, w)])

    record("steps of 4", steps_of_4, x, w)
    record("stops early", stops_early, x, w)
    keys = array(2, 3, 384, 128)
    record("attention", attention, array(2, 3, 256, 128), keys, keys)
    record("branches", branches, x, w, array(dtype=jnp.int32))
    record("add one", lambda a: a + 1, array(8192, 4096, dtype=jnp.float32), donate_argnums=0)

    def double(x_ref, out_ref):
        out_ref[...] = 2 * x_ref[...]

    kernel = pl.pallas_call(double, jax.ShapeDtypeStruct((M, D), jnp.bfloat16), name="double")
    with jax.set_mesh(chip.mesh):
        record("pallas", lambda x: repeated(kernel, x), x)

    pod = mesh_of("v6e:2x2")
    rows, columns, whole = (NamedSharding(pod, spec) for spec in (P("x"), P(None, "x"), P()))

    def fsdp(x, w):
        @jax.checkpoint  # gathers the weights once more in the backward pass
        def layer(x, w):
            w = jax.lax.with_sharding_constraint(w, whole)
            return jax.lax.with_sharding_constraint(jnp.tanh(x @ w), rows), None

        return jax.lax.scan(layer, x, w)[0].astype(jnp.float32).mean()

    sharded = array(BIG[0], BIG[1], sharding=rows), array(LAYERS, BIG[1], BIG[1], sharding=columns)
    gradient = jax.grad(fsdp, argnums=1)
    record("fsdp", fsdp, *sharded)
    record("fsdp gradient", gradient, *sharded, out_shardings=columns)
    offload = {
        f"xla_tpu_enable_sparse_core_collective_offload_{op}": True
        for op in ("all_gather", "reduce_scatter")
    }
    offload |= {
        "xla_tpu_enable_all_gather_offload_tracing": True,
        "xla_tpu_use_tc_device_shape_on_sc": True,
    }
    record("fsdp asynchronous", gradient, *sharded, out_shardings=columns, options=offload)

    for name in ("v5e", "v6e"):
        full = array(2**30, 40, sharding=NamedSharding(mesh_of(f"{name}:1x1"), P()))
        try:
            record(name, lambda a: a + 1, full)
        except jax.errors.JaxRuntimeError as error:
            results[name] = str(error)
    print(json.dumps(results))


@pytest.fixture(scope="module")
def compiled():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs the TPU compiler: pip install -r requirements-tpu.txt")
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": OUR_FOLDERS, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", "import test_compile_for as t; t.compile_programs()"]
    child = subprocess.run(command, env=env, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])


MATMUL = 2 * M * D * D


@pytest.mark.parametrize(
    ("program", "flops"),
    [
        ("scan", LAYERS * MATMUL),
        ("nested", OUTER * LAYERS * MATMUL),
        ("gradient", 3 * LAYERS * MATMUL),
        ("steps of 4", 6 * MATMUL),
        ("stops early", 22 * MATMUL),
        ("attention", 2 * 2 * 2 * 3 * 256 * 384 * 128),
        ("branches", LAYERS * MATMUL),
        ("fsdp", LAYERS * 2 * BIG[0] // 4 * BIG[1] ** 2),
        ("fsdp gradient", 4 * LAYERS * 2 * BIG[0] // 4 * BIG[1] ** 2),
    ],
)
def test_flops_of_a_compiled_program_equal_the_closed_form(compiled, program, flops):
    cost, _ = compiled[program]
    assert cost["flops"] == pytest.approx(flops, rel=0.005)
    assert cost["unknown_loops"] == 0
    assert cost["cycles"] == sum(cost["ops"].values()) > 0


def test_cycles_are_at_least_those_of_full_matrix_units(compiled):
    for program in ("scan", "nested", "gradient", "fsdp"):
        cost, _ = compiled[program]
        assert 1 < cost["cycles"] * 918e12 / 1.75e9 / cost["flops"] < 50, program


def test_collectives_move_the_weights_of_every_layer(compiled):
    weights = LAYERS * BIG[1] ** 2 * 2
    names = "fsdp", "fsdp gradient", "fsdp asynchronous"
    forward, backward, beside = (compiled[name][0] for name in names)
    assert forward["collectives"]["all-gather"] == weights
    assert forward["collective_counts"]["all-gather"] == LAYERS
    for cost in (backward, beside):
        assert cost["collectives"]["all-gather"] == 2 * weights
        assert cost["collectives"]["reduce-scatter"] == weights
        assert cost["collective_counts"]["reduce-scatter"] == LAYERS


def test_hbm_traffic_is_one_read_and_one_write_and_memory_is_that_of_the_arguments(compiled):
    cost, memory = compiled["add one"]
    array = 8192 * 4096 * 4
    assert cost["bytes"] == pytest.approx(2 * array, rel=1e-3)
    assert (memory["arguments"], memory["outputs"], memory["aliased"]) == (array, array, array)
    total = array + memory["temporaries"] + memory["code"]
    assert memory["total_gib"] * 2**30 == pytest.approx(total)


def test_a_scan_reads_each_layer_once(compiled):
    cost, _ = compiled["scan"]
    weights = LAYERS * D * D * 2
    assert weights <= cost["bytes"] < 1.5 * weights


def test_pallas_kernels_are_named_and_counted(compiled):
    assert compiled["pallas"][0]["custom_calls"] == {"double": OUTER}


def test_usable_memory_is_what_the_compiler_says(compiled):
    for name in ("v5e", "v6e"):
        assert compiled[name].startswith("RESOURCE_EXHAUSTED")
        assert f"({compile_for.CHIPS[name].usable_gib}G)" in compiled[name]


# ---- our programs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags", [{}, {"block_length": 32, "cache": "dual", "threshold": 0.9}], ids=str
)
def test_dreams_programs_are_those_of_the_command_line(flags, monkeypatch, tmp_path):
    import jax

    # what generate.py calls fill_block with, for a prompt of one token and 95 to come
    calls, cfg = [], md.CONFIGS["tiny"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model = nnx.merge(md.graph_of(cfg, md.Compute()), md.new_params(cfg, 0))
    checkpoints.save(md, tmp_path / "model", model, [tmp_path / "tokenizer.json"])
    settings = {"ckpt": str(tmp_path / "model"), "prompt": "a", "dtype": "bfloat16", "devices": 1}
    settings = generate_dream.Config(**flags, **settings)
    writer = generate_dream.Dream(generate_dream.prepare(settings))

    def stop(*args, **static):
        calls.append((args, static))
        raise InterruptedError

    monkeypatch.setattr(sample_dream, "fill_block", stop)
    writer.streams = False
    blank = prompts.Canvas("", "", [cfg.bos_id] + [cfg.mask_id] * 95, 0, None)
    with pytest.raises(InterruptedError):
        writer.fill([blank], {"rows": 1, "widths": (96,)})
    want, static = calls[0]

    # what is compiled for a chip
    mesh = checkpoints.inference_mesh(cfg, jax.devices()[:1], 1)
    got, compiled = compile_for.Generate(model="tiny", length=96).program(mesh, cached=bool(flags))
    describe = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), jax.eval_shape(lambda: tree))  # noqa: E731
    assert describe(tuple(want[1:])) == describe(tuple(got[1:]))
    sizes = lambda tree: {  # noqa: E731
        name: (x.shape, str(x.dtype)) for name, x in checkpoints.flatten(tree).items()
    }
    assert sizes(nnx.to_pure_dict(want[0])) == sizes(got[0])
    assert compiled["width"] == static["width"]
    rules = [how["sampler"].rule for how in (static, compiled)]
    assert dataclasses.replace(rules[0], eos_ids=()) == dataclasses.replace(rules[1], eos_ids=())
    graphs, shapes = [how["sampler"].graph for how in (static, compiled)], md.param_shapes(cfg)
    run, chip = (nnx.merge(graph, shapes).compute for graph in graphs)
    assert dataclasses.replace(chip, platform="cpu") == run


def test_a_step_of_each_trainer_is_lowered_with_its_flags(monkeypatch):
    import jax

    # needs no compiler
    monkeypatch.setattr(compile_for, "topology_devices", lambda name: jax.devices()[:1])
    reports = []
    report = lambda *args, **facts: reports.append((*args, facts)) or {"fits": True}  # noqa: E731
    monkeypatch.setattr(compile_for, "report", report)
    common = {"model": "tiny", "seq_len": 64, "batch_size": 4, "fsdp": 1}
    coder = compile_for.CoderSettings(diff="none", **common)
    dream = compile_for.DreamSettings(block_length=4, lora_rank=2, init="", **common)
    for program in (compile_for.Train(settings=coder), compile_for.TrainDream(settings=dream)):
        assert program.sized(2).rows() == [{"fits": True}]
        name, lowered, device, facts = reports.pop()
        assert (name, device) == ("tiny train step", "v6e")
        assert (facts["tokens"], facts["micro_batch"], facts["seq_len"]) == (256, 2, 64)
        assert facts["model_flops"] > 0
        assert "2x2x64xi32" in lowered.as_text()  # micro-batches, rows, tokens


@pytest.mark.slow
def test_the_kin_of_dream_have_the_parameters_of_their_files():
    # by the indices of the Hub, those of Nemotron and of SDAR-1.7B from the sizes of all tensors
    counts = {
        "llada_8b": 8_015_581_184, "sdar_8b": 8_190_735_360, "sdar_4b": 4_411_424_256, "sdar_1.7b": 1_720_574_976,
        "nemotron_14b": 13_506_073_600, "nemotron_8b": 8_489_553_920, "nemotron_3b": 3_831_659_520,
    }  # fmt: skip
    assert {name: md.count_params(cfg) for name, cfg in compile_for.KIN.items()} == counts
    for name, blocks in (("sdar_4b", (4, False, False)), ("nemotron_3b", (32, False, True))):
        cfg = compile_for.KIN[name]
        assert (cfg.block_length, cfg.shift, cfg.causal) == blocks


@pytest.mark.parametrize("name", ["sdar_4b", pytest.param("nemotron_3b", marks=pytest.mark.slow)])
def test_a_model_of_blocks_is_compiled_for_its_own_passes(monkeypatch, name):
    import jax

    monkeypatch.setattr(compile_for, "topology_devices", lambda name: jax.devices()[:1])
    names = []
    report = lambda name, *_: names.append(name) or {"fits": True}  # noqa: E731
    monkeypatch.setattr(compile_for, "report", report)
    small = {"width": 64, "layers": 1, "heads": 2, "kv_heads": 1, "head_size": 16, "ffn": 64}
    monkeypatch.setitem(md.CONFIGS, name, dataclasses.replace(compile_for.KIN[name], **small))
    size, causal = compile_for.KIN[name].block_length, compile_for.KIN[name].causal
    first = size if causal else 2 * size
    for only, slots in {"": (first, size), "opens": (first,), "cached": (size,)}.items():
        rows = compile_for.Generate(model=name, length=96, only=only).rows()
        assert len(rows) == len(slots)
        said = [text.split("pass over ")[1] for text in names[-len(slots) :]]
        assert said == [f"{n} slots" for n in slots]
        assert ("causal" in names[-len(slots)]) == (causal and only != "cached")


@pytest.fixture
def libtpu():
    pytest.importorskip("libtpu", reason="pip install -r requirements-tpu.txt compiles for TPUs")


def rows_of(tmp_path, *flags):
    """(the rows that the command line writes, what it prints)."""
    result = run("bench/compile_for.py", f"--json={tmp_path / 'rows.json'}", *flags, timeout=900)
    assert result.returncode == 0, result.stderr
    return json.loads((tmp_path / "rows.json").read_text()), result.stdout


SMALL_STEP = "train", "--model=tiny", "--seq_len=256", "--batch_size=4", "--micro_batch=4"


@pytest.mark.slow
def test_the_command_line_compiles_a_small_train_step(libtpu, tmp_path):
    (row,), printed = rows_of(tmp_path, *SMALL_STEP, "--topology=v6e:1x1")
    assert row["tokens"] == 4 * 256
    assert row["without_estimate"]["diff_attention_forward"] == 4  # the Pallas kernel, once a layer
    assert 0.02 < row["hbm_gib"] < 0.1
    assert "tokens per second" in printed


@pytest.mark.slow
def test_the_1b_step_fits_a_v6e_chip_with_six_gib_to_spare(libtpu, tmp_path):
    flags = "train", "--model=1b", "--topology=v6e:1x1", "--micro_batch=8"
    (row,), _ = rows_of(tmp_path, *flags)
    assert row["hbm_gib"] < 31.24 - 6
    assert row["tokens"] == 131_072


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "count"),
    [(("generate", "--model=tiny", "--length=96"), 3), (("generate", "--model=tiny", "--length=96", "--int8"), 3),
     (("generate", "--model=tiny", "--length=96", "--only=blocks"), 2),
     (("generate", "--model=tiny", "--length=96", "--only=blocks", "--block_length=1"), 2),
     (("dream", "--model=tiny", "--seq_len=64", "--batch_size=2", "--block_length=4", "--lora_rank=2"), 1),
     (("dream", "--model=tiny", "--seq_len=64", "--batch_size=2", "--lora_rank=2", "--base_bits=8"), 1),
     (("grpo", "--model=tiny"), 1), (("grpo", "--model=tiny", "--lora_rank=4"), 1),
     (("grpo", "--model=tiny", "--lora_rank=4", "--base_bits=4"), 1)],
)  # fmt: skip
def test_every_program_of_a_small_dream_compiles(libtpu, flags, count, tmp_path):
    rows, _ = rows_of(tmp_path, *flags)
    assert len(rows) == count
    assert all(row["step_s"] > 0 and 0 < row["hbm_gib"] < 4 for row in rows)


def test_a_round_whose_programs_do_not_fit_has_no_time(libtpu, monkeypatch):
    reports = []

    def report(name, lowered, device, beside_gib, **facts):
        reports.append(name)
        return {"fits": False, "because": "RESOURCE_EXHAUSTED"}

    monkeypatch.setattr(compile_for, "report", report)
    assert len(compile_for.Grpo(model="tiny", phase="round").rows()) == len(reports) == 4
    assert compile_for.Grpo(phase="round").sized(8).phase == "learn"  # --largest


@pytest.mark.slow
def test_of_a_round_each_chip_writes_its_share(libtpu, tmp_path):
    found = {}
    for device, sizes in {"v6e": [5, 5, 10, 10], "v6e:2x2": [20, 20, 40, 40]}.items():
        flags = "grpo", "--model=tiny", f"--device={device}", "--phase=round"
        found[device], printed = rows_of(tmp_path, *flags)
        *programs, whole = found[device]
        assert [row["micro_batch"] for row in programs] == sizes
        assert "  2 tokens a step: writing" in printed
        assert min(whole["score"], whole["learn"], whole["write_4"]) > 0
        assert whole["write_1"] > whole["write_2"] > whole["write_4"]
    for one, four in list(zip(*found.values(), strict=True))[:-1]:  # four times the rows
        assert four["flops_per_chip"] < 1.3 * one["flops_per_chip"]
    assert not any("all-gather" in row["collective_gb"] for row in found["v6e"][:-1])
    # no weights meet in a step
    assert found["v6e:2x2"][3]["collective_gb"].get("all-gather", 0) < 0.01


# ---- programs compiled for GPUs --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cuda():
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        pytest.skip("pip install -r requirements-cuda.txt, in its own environment, for GPUs")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "flags", "rows"),
    [("h100", SMALL_STEP, 1),
     ("t4", ("generate", "--model=tiny", "--length=96"), 3),
     ("rtx4090", ("generate", "--model=tiny", "--length=96", "--int8"), 3),
     ("h200", ("grpo", "--model=tiny", "--lora_rank=4"), 1), ("h100:2", ("grpo", "--model=tiny"), 1),
     ("rtx3060", ("grpo", "--model=tiny", "--lora_rank=4", "--base_bits=4"), 1)],
)  # fmt: skip
def test_every_program_of_a_small_model_compiles_for_gpus(cuda, device, flags, rows, tmp_path):
    found, _ = rows_of(tmp_path, *flags, f"--device={device}")
    assert len(found) == rows
    for row in found:
        assert row["fits"]
        assert "step_s" not in row, "no estimate of the compiler's"
        assert row["roofline_s"] > 0
        assert (row["collective_s"] > 0) == (":" in device)
        assert any("cublas" in name for name in row["without_estimate"]) or device != "t4"
        assert "__gpu$xla.gpu.triton" not in row["without_estimate"]  # attention is einsums


@pytest.mark.slow
@pytest.mark.parametrize("device", ["a100-80", "h100"])
def test_a_layer_with_lora_keeps_its_input_alone_for_the_backward_pass(cuda, device, tmp_path):
    def temporaries(layers):
        flags = "grpo", "--lora_rank=16", f"--layers={layers}", f"--device={device}"
        return rows_of(tmp_path, *flags)[0][0]["temporaries_gib"]

    # three versions of five rows, bfloat16
    input_gib = 2 * 15 * 456 * md.CONFIGS["7b"].width / 2**30
    assert (temporaries(6) - temporaries(2)) / 4 == pytest.approx(input_gib, rel=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["t4", "rtx4090", "h100"])
def test_flops_on_a_gpu_equal_the_closed_form(cuda, device):
    code = f"""if True:
        import json, jax, jax.numpy as jnp, compile_for as c
        array = c.on_chip("{device}")
        layers = lambda x, w: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]
        lowered = jax.jit(layers).lower(array(jnp.float16, {M}, {D}), array(jnp.float16, {LAYERS}, {D}, {D}))
        _, cost, memory = c.compile_and_cost(lowered, "{device}")
        print(json.dumps([vars(cost), memory]))"""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": OUR_FOLDERS}
    child = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    cost, memory = json.loads(child.stdout.splitlines()[-1])
    assert cost["flops"] == LAYERS * MATMUL
    assert memory["arguments"] == 2 * (M * D + LAYERS * D * D)
    assert memory["total_gib"] < memory["usable_gib"]
