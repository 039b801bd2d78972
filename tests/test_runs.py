"""The folder of a run: command line, lock, log, signals, and checkpoints that are damaged, cut
short or of others.
"""

import contextlib
import dataclasses
import gzip
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, says

import checkpoints
import runs

SCRIPT = """
    \"\"\"A script of ours. It reads nothing.

        python script.py  # a command

    It writes nothing.
    \"\"\"
    import dataclasses, os, sys, time
    sys.path.insert(0, {root!r})
    import runs

    @dataclasses.dataclass(frozen=True)
    class Group:
        rank: runs.Natural = 0  # rows of A

    @dataclasses.dataclass(frozen=True)
    class Config:
        out: str = "out"  # run folder
        resume: str = ""  # run folder to go on from
        steps: runs.Count = 5  # updates
        lr: runs.NonNegative | None = None  # learning rate
        rates: tuple[runs.Share, ...] = (0.5,)  # mask rates
        hosts: int = 1  # of this machine
        # ---- last of all
        sizes: tuple[int, ...] = ()  # some numbers
        fast: bool = False  # a flag
        group: Group = Group()

    def main(cfg):
        {body}

    if __name__ == "__main__":
        runs.command(main, Config, __doc__, ("hosts",), {{"mend": "python extra/mend.py"}})
"""


@pytest.fixture
def script(tmp_path):
    """script(body, *flags): runs a script whose main is `body`, in a folder with runs.py."""

    def execute(body, *flags, python=(), **options):
        shutil.copy(ROOT / "runs.py", tmp_path)
        body = textwrap.indent(body, 4 * " ").strip()
        source = textwrap.dedent(SCRIPT).format(root=str(tmp_path), body=body)
        (tmp_path / "script.py").write_text(source)
        pipes = {"capture_output": True, "text": True, "timeout": 60, "cwd": tmp_path}
        return subprocess.run([sys.executable, *python, "script.py", *flags], **pipes, **options)

    return execute


@dataclasses.dataclass(frozen=True)
class Group:
    rank: runs.Natural = 0


@dataclasses.dataclass(frozen=True)
class Config:
    out: str = "out"
    resume: str = ""
    wandb: str = ""
    steps: runs.Count = 9
    lr: runs.NonNegative | None = None
    rates: tuple[runs.Share, ...] = (0.5,)
    group: Group = Group()


# ---- the command line --------------------------------------------------------------------------


def test_an_error_of_ours_is_one_line_and_status_1(script, tmp_path):
    raising = "raise ValueError('no ' + os.environ['XLA_PYTHON_CLIENT_MEM_FRACTION'])"
    env = {k: v for k, v in os.environ.items() if k != "XLA_PYTHON_CLIENT_MEM_FRACTION"}
    result = script(raising, env=env)  # nine tenths of a GPU, unless told otherwise
    assert (result.returncode, result.stderr) == (1, "no 0.9\n")
    (tmp_path / "below").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    line = [sys.executable, "../link/script.py"]
    env |= {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}
    result = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path / "below", env=env)
    assert (result.returncode, result.stderr) == (1, "no 0.5\n")
    assert script("open('no/file')").stderr == "no/file: No such file or directory\n"
    says(script("import jax; jax.devices()", env=env | {"JAX_PLATFORMS": "nosuch"}), "'nosuch'")
    says(script("sys.modules['torch'] = None\nimport torch"), "pip install -r requirements-gpu.txt")
    says(script("pass", "--mend=2"), "--mend is gone: python extra/mend.py")
    says(script("print(1)", "--steps=0"), "--steps=0 is not in 1 .. 2147483647")


def test_a_bug_keeps_its_traceback(script):
    result = script("import json; json.loads('{')")  # raised within a library
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "Traceback" in script("[][0]", python=["-X", "dev"]).stderr


def test_ctrl_c_is_130_and_says_nothing(script):
    # background jobs ignore it
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    result = script(f"{heard}; print('so far', flush=True); os.kill(os.getpid(), 2); time.sleep(9)")
    assert (result.returncode, result.stdout, result.stderr) == (130, "so far\n", "")


def test_help_is_the_docstring_and_the_comments_of_the_fields(script):
    result = script("pass", "--help", env=os.environ | {"COLUMNS": "40"})
    assert result.returncode == 0
    for text in (
        "A script of ours. It reads nothing.",
        "\n    python script.py  # a command\n",
        "rows of A",
        "\n last of all\n  --sizes",
    ):
        assert text in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 40
    assert script("pass", "--help", env=os.environ | {"COLUMNS": "1"}).stdout == result.stdout
    assert script("pass", "--step=1").returncode == 2  # a misspelt flag


def test_flags_stand_in_groups_of_at_most_a_dozen():
    for script in ROOT.glob("*.py"):
        config, _, rest = script.read_text().rpartition("\nclass Config")[2].partition("\n\n\n")
        groups = [re.findall(r"^    \w+: ", group, re.M) for group in config.split("# ----")]
        assert "runs.command" not in rest or max(map(len, groups)) <= 12, script


def parse(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["script.py", *flags])
    return runs.parse(Config, "", ("steps",), {})


def test_a_number_outside_its_limits_is_one_line(monkeypatch, tmp_path):
    for flags, said in (
        ("--steps=0", "--steps=0 is not in 1 .. 2147483647"),
        ("--steps=3000000000", "--steps=3000000000 is not in 1 .. 2147483647"),
        ("--rank=-1", "--rank=-1 is not in 0 .. 2147483647"),  # of a group
        ("--lr=nan", "--lr=nan is not in 0 .. 1e+12"),
        ("--lr=inf", "--lr=inf is not in 0 .. 1e+12"),
        ("--rates 0.5 1.5", "--rates=1.5 is not in 0 .. 1"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
            parse(monkeypatch, *flags.split())
    cfg = parse(monkeypatch, "--lr=0", "--rates", "0", "1")
    assert (cfg.lr, cfg.rates) == (0.0, (0.0, 1.0))
    runs.write(tmp_path / "config.json", {"train": {"lr": -3}})  # edited by hand
    with pytest.raises(ValueError, match="--lr=-3 is not in 0"):
        parse(monkeypatch, f"--resume={tmp_path}")
    # a tilde that the shell left
    monkeypatch.setenv("HOME", "/home/somebody")
    assert parse(monkeypatch, "--out=~/a~/b").out == "/home/somebody/a~/b"


def test_resume_takes_the_settings_of_the_run_but_not_those_of_its_machine(script, tmp_path):
    saved = {"steps": 7, "hosts": 4, "sizes": [1, 2], "gone": 1, "out": "elsewhere"}
    (tmp_path / "run").mkdir()
    runs.write(tmp_path / "run" / "config.json", {"train": saved})
    body = "print(cfg.out, cfg.resume, cfg.steps, cfg.hosts, cfg.sizes, cfg.fast)"
    for flags in (("--resume=run", "--fast"), ("--resume", "run", "--fast")):
        assert script(body, *flags).stdout == "run run 7 1 (1, 2) True\n"
    says(script(body, "--resume=nowhere"), "nowhere/config.json does not exist")
    (tmp_path / "run" / "config.json").write_text("{")
    says(script(body, "--resume=run"), "damaged")


def test_output_that_nobody_reads_ends_the_program_silently(script, tmp_path):
    assert script("for _ in range(100_000): print('x')").returncode == 0
    shell = f"{sys.executable} script.py | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("x\n141\n", "")


def test_another_stage_that_fails_is_named_and_gets_our_sigterm(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "__file__", str(tmp_path / "runs.py"))
    waiting = "import os, signal, time\nos.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(60)\n"
    (tmp_path / "stage.py").write_text(waiting)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError, match=r"python stage.py --a=b ended with exit status -15"):
        runs.script("stage.py", "--a=b")
    assert signal.getsignal(signal.SIGTERM) == before


def test_it_needs_neither_jax_nor_torch():
    without = "import sys; sys.modules.update(jax=None, torch=None, orbax=None, tyro=None)"
    code = f"{without}; import runs"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# ---- files -------------------------------------------------------------------------------------


def test_a_file_is_whole_or_as_it_was(tmp_path):
    runs.write(tmp_path / "a.json", {"b": 1})
    with pytest.raises(TypeError), runs.writing(tmp_path / "a.json") as file:
        file.writelines([b"half", None])
    assert runs.read_json(tmp_path / "a.json", "b") == {"b": 1}
    assert os.listdir(tmp_path) == ["a.json"]
    with pytest.raises(ValueError, match="no c"):
        runs.read_json(tmp_path / "a.json", "b", "c")
    for text in ("[1]", "[" * 100_000):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(ValueError, match=r"a\.json is damaged"):
            runs.read_json(tmp_path / "a.json", "b")


def test_a_pipe_or_a_device_is_no_file_to_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(ValueError, match=f"{path} is no regular file"):
            runs.as_path(path)
    assert runs.as_path(tmp_path) == tmp_path


def test_a_folder_is_complete_or_not_there(tmp_path):
    with runs.new_folder(tmp_path / "new") as folder:
        (folder / "file").write_text("x")
        assert not (tmp_path / "new").exists()
    assert (tmp_path / "new" / "file").read_text() == "x"
    with pytest.raises(RuntimeError), runs.new_folder(tmp_path / "other"):
        raise RuntimeError
    assert os.listdir(tmp_path) == ["new"]
    # what a link names is replaced, on its own disk
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "far")
    for text in "ab":
        with runs.new_folder(tmp_path / "link") as folder:
            assert folder.parent == tmp_path / "disk"
            (folder / "file").write_text(text)
        assert (tmp_path / "link" / "file").read_text() == text


@pytest.mark.parametrize("opened", [runs.new_folder, runs.writing])
@pytest.mark.parametrize(("number", "says"), [(28, r"new'$"), (None, "^a message of ours$")])
def test_a_full_disk_names_the_file_and_a_message_stays(tmp_path, opened, number, says):
    error = OSError(number, "No space left on device") if number else OSError("a message of ours")
    with pytest.raises(OSError, match=says), opened(tmp_path / "new"):
        raise error


def test_checkpoints_are_found_in_order_and_unfinished_ones_are_not(tmp_path):
    for name in ("checkpoints/2", "checkpoints/10", "checkpoints/12.orbax-checkpoint-tmp"):
        (tmp_path / "jax" / name).mkdir(parents=True)
    for name in ("step_3", "step_20", "step_30.tmp"):
        (tmp_path / "torch" / name).mkdir(parents=True)
    assert list(runs.saved_steps(tmp_path / "jax")) == [2, 10]
    assert runs.newest(tmp_path / "torch") == (20, tmp_path / "torch" / "step_20")
    assert runs.newest(tmp_path / "jax", 2)[0] == 2
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 4; it has \[2, 10\]"):
        runs.newest(tmp_path / "jax", 4)
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        runs.newest(tmp_path / "nowhere")


# ---- a run -------------------------------------------------------------------------------------


def enter(*args):
    with runs.Folder(Config(*map(str, args))):
        pass


def test_two_runs_do_not_write_to_one_folder(tmp_path):
    cfg = Config(str(tmp_path / "run"))
    with runs.Folder(cfg):
        with pytest.raises(BlockingIOError, match="another process is writing"):
            enter(cfg.out)
        with runs.Folder(cfg, rank=1):  # another process of the same run
            pass
    enter(cfg.out)
    (tmp_path / "run" / "checkpoints" / "1").mkdir(parents=True)
    # the second is a run that goes on in a folder of its own, started twice
    for resume in "", tmp_path / "other":
        with pytest.raises(FileExistsError, match="--resume"):
            enter(cfg.out, resume)
    enter(cfg.out, tmp_path / "other" / ".." / "run")
    for name in ("meta.json", "bundle.json", "model.safetensors", "model.safetensors.index.json"):
        folder = tmp_path / f"of {name}"
        folder.mkdir()
        (folder / name).touch()
        with pytest.raises(FileExistsError, match=f"is no folder of a run, it holds {name}"):
            enter(folder)


def test_a_resumed_run_goes_on_after_its_checkpoint(tmp_path, capsys):
    rows = "".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3))
    # what a kill in the middle of a line leaves
    (tmp_path / "log.jsonl").write_text(rows + '{"step": 4, "lo')
    samples = [f"---- step {step}\ndef f(x):\r\n---- step by step \udcff\n" for step in (1, 2, 4)]
    samples = [text.encode(errors="surrogateescape") for text in samples]
    (tmp_path / "samples.txt").write_bytes(b"".join(samples))
    (tmp_path / "checkpoints" / "2").mkdir(parents=True)
    with runs.Folder(Config(str(tmp_path), resume=str(tmp_path))) as run:
        run.begin(2, {"train": {}}, {"tokenizer.json": b"{}"})
        row = {"step": 3, "loss": 1.23456, "tok_per_s": 4100.4, "eta_min": 1.3}
        run.log(row | {"wider_than_what_is_left" * 3: 0})
    assert capsys.readouterr().out == "step 3/9  loss 1.235  4,100 tok/s  1 min left\n"
    steps = [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]
    assert (tmp_path / "tokenizer.json").read_bytes() == b"{}"
    assert (tmp_path / "samples.txt").read_bytes() == b"".join(samples[:2])


def test_a_terminal_shows_a_bar(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with runs.Folder(Config(str(tmp_path))) as run:
        run.log({"step": 3, "lr": 0.0013})
    assert capsys.readouterr().out == "[###.......] step 3/9  lr 1.3e-03\n"


def test_a_folder_without_a_checkpoint_begins_its_log_anew(tmp_path):
    (tmp_path / "b" / "checkpoints" / "1000").mkdir(parents=True)
    with runs.Folder(Config(str(tmp_path / "a"))) as run:  # killed before its first checkpoint
        run.begin(0, {})
        run.log({"step": 10})
    with runs.Folder(Config(str(tmp_path / "a"), resume=str(tmp_path / "b"))) as run:
        run.begin(1000, {})
        run.log({"step": 1010})
    assert (tmp_path / "a" / "log.jsonl").read_text() == '{"step": 1010}\n'


def test_a_signal_asks_the_run_to_stop_and_a_second_one_ends_it(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with runs.Folder(Config(str(tmp_path))) as run:
        run.begin(0, {})
        assert not run.signal
        signal.raise_signal(signal.SIGTERM)
        assert run.signal == "SIGTERM"
        with pytest.raises(InterruptedError, match="SIGTERM: saved step 5; go on with --resume="):
            run.leave(5)
        signal.raise_signal(signal.SIGINT)  # the same Ctrl-C, handed on by torchrun
        run.asked_at -= 2
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_closed_terminal_asks_a_run_to_stop_but_not_under_nohup(tmp_path):
    before = signal.getsignal(signal.SIGHUP)
    try:
        for handler, name in ((signal.SIG_DFL, "SIGHUP"), (signal.SIG_IGN, "")):
            signal.signal(signal.SIGHUP, handler)
            with runs.Folder(Config(str(tmp_path))) as run:
                run.begin(0, {})
                signal.raise_signal(signal.SIGHUP)
                assert run.signal == name
            assert signal.getsignal(signal.SIGHUP) == handler
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_closed_output_ends_no_run_and_a_full_disk_is_named(tmp_path):
    # it raises again when it is left
    with contextlib.suppress(OSError), open("/dev/full", "w") as closed:
        with runs.Folder(Config(str(tmp_path))) as run, contextlib.redirect_stdout(closed):
            run.begin(0, {})
            run.log({"step": 1})
    assert json.loads((tmp_path / "log.jsonl").read_text()) == {"step": 1}
    with runs.Folder(Config(str(tmp_path))) as run:
        run.begin(0, {})
        (tmp_path / "log.jsonl").unlink()
        (tmp_path / "log.jsonl").symlink_to("/dev/full")
        with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/log\.jsonl'"):
            run.log({"step": 1})


def test_a_signal_that_ends_a_compiler_too_is_one_line(tmp_path):
    def train():
        with runs.Folder(Config(str(tmp_path))) as run:
            run.begin(0, {})
            signal.raise_signal(signal.SIGINT)  # a Ctrl-C goes to both
            subprocess.run(["sh", "-c", "kill -INT $$"], check=True)

    with pytest.raises(InterruptedError, match=r"stopped in the middle of a step .*; go on with"):
        train()


def test_a_resumed_run_goes_on_in_its_curve_of_wandb_and_a_new_one_begins_another(
    tmp_path, monkeypatch
):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids = []
    for name, resume in (("a", ""), ("a", str(tmp_path / "a")), ("b", "")):
        with runs.Folder(Config(str(tmp_path / name), resume, wandb="project")) as run:
            run.begin(0, {"train": {}})
            ids.append(run.tracker.id)
            assert (tmp_path / name / "wandb_id").read_text() == ids[-1]
            run.log({"step": 1, "loss": 2.5})
        assert wandb.run is None  # finished
        files = [*(tmp_path / name / "wandb").glob(f"offline-run-*-{ids[-1]}/run-{ids[-1]}.wandb")]
        assert files
        assert all(b"loss" in path.read_bytes() for path in files)
    assert ids[0] == ids[1] != ids[2]


# ---- what has to agree -------------------------------------------------------------------------


def test_names_and_shapes_that_do_not_fit_are_listed():
    said = r"x do not fit the model: b has shape \(2,\), not \(3,\); missing a; unexpected c"
    with pytest.raises(ValueError, match=said):
        runs.check_tensors({"b": (2,), "c": (1,)}, {"a": (1,), "b": (3,)}, "x")


def test_what_changed_since_a_checkpoint_is_said_or_refused(capsys):
    train = {"seed": 0, "batch_size": 8, "rates": (0.1, 1.0), "optimizer": "muon", "out": "a"}
    train |= {"gone": 1, "unset": ""}
    saved = {"model": {"width": 2}, "data": "d", "step": 12, "train": train}

    def compare(where="out/checkpoints/12", model=None, **changes):
        now = saved | {"train": {k: v for k, v in (train | changes).items() if k != "gone"}}
        now["model"] = model or saved["model"]
        runs.check_resumed(json.loads(json.dumps(saved)), now, where, ("optimizer",))
        return capsys.readouterr().out

    assert compare() == compare(out="b", resume="a", lr=0.1, unset="x") == ""
    said = "changed since out/checkpoints/12: seed 0 -> 1, batch_size 8 -> 16, rates [0.1, 1.0] -> "
    assert compare(seed=1, batch_size=16, rates=(0.2, 1.0)).startswith(said)
    with pytest.raises(ValueError, match="width 2 there, 3 here; depth None there, 1 here"):
        compare(model={"width": 3, "depth": 1})
    assert compare(model={"width": 2, "ends": ()}) == ""  # an earlier version had no such field
    with pytest.raises(ValueError, match=r"ends None there, \[5\] here"):
        compare(model={"width": 2, "ends": (5,)})
    with pytest.raises(ValueError, match="--optimizer muon there, adamw here"):
        compare(optimizer="adamw")
    assert compare(Path("run/step_12")) == compare(Path("step_12")) == ""  # --resume=.
    with pytest.raises(ValueError, match="step_14 holds step 12"):
        compare(Path("run/step_14"))


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (MemoryError(), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8"), True),
        (RuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm."), True),
        (OSError(12, "Cannot allocate memory"), True),
        (OSError(28, "No space left on device"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    ],
)
def test_out_of_memory_is_known_by_what_libraries_say(error, lacks):
    expected = pytest.raises(ValueError, match=r"^out of memory; try less$")
    with expected if lacks else pytest.raises(type(error)), runs.enough_memory("less"):
        raise error


@pytest.mark.parametrize("keep", [0.0, pytest.param(0.99, marks=pytest.mark.slow)])
def test_a_damaged_program_of_the_compile_cache_is_made_anew(keep, tmp_path):
    pytest.importorskip("jax")
    cache = tmp_path / "cache"
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import checkpoints, jax\n"
        f"checkpoints.keep_compiled({str(cache)!r})\n"
        "print(jax.jit(lambda x: x * 2 + 1)(jax.numpy.ones(3)).sum())\n"
    )

    def compiled():
        command = [sys.executable, script]
        env = os.environ | {"JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
        assert done.stdout == "9.0\n"
        assert "Error reading" not in done.stderr
        return {path.name: path.read_bytes() for path in cache.glob("*-cache")}

    before = compiled()
    name = min(name for name in before if "lambda" in name)
    (cache / name).write_bytes(before[name][: int(keep * len(before[name]))])
    after = compiled()
    assert after.keys() == before.keys()
    assert len(after[name]) > 0.9 * len(before[name])
    (cache / "readable-cache").write_bytes(b"\x28\xb5\x2f\xfd")  # that of a machine with zstandard
    runs.delete_damaged(cache)
    assert (cache / "readable-cache").exists()


# ---- Orbax, devices, memory --------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    jax = pytest.importorskip("jax")
    params = {"a": jax.numpy.arange(60_000.0), "b": {"c": jax.numpy.ones((3, 4))}}
    state = {"params": params, "opt": {}}
    store = checkpoints.Checkpoints(tmp_path, keep=2, best="loss")
    for step, loss in enumerate((3.0, 1.0, 2.0, 4.0, 5.0), 1):
        store.save(step, state, {"model": {"width": 2}, "step": step}, {"loss": loss})
    store.manager.wait_until_finished()
    yield store, state
    store.manager.close()


def test_what_is_saved_comes_back_and_the_newest_and_the_best_are_kept(saved, tmp_path):
    store, state = saved
    assert list(runs.saved_steps(tmp_path)) == [2, 4, 5]
    assert store.meta()["step"] == store.newest() == 5
    back = store.restore(state)
    np.testing.assert_array_equal(back["params"]["a"], state["params"]["a"])
    assert back["opt"] == {}
    store.manager.close()
    resumed = checkpoints.Checkpoints(tmp_path, keep=2, best="loss")
    resumed.save(6, state, {"model": {}, "step": 6}, {"loss": 6.0})
    resumed.save(7, state, {"model": {}, "step": 7})  # one that is due to its time, not evaluated
    resumed.manager.close()
    assert list(runs.saved_steps(tmp_path)) == [2, 6, 7]
    # a run that lost its checkpoints does not begin anew
    shutil.rmtree(tmp_path / "checkpoints")
    for resume in "", tmp_path:
        with pytest.raises(FileNotFoundError, match=r"checkpoints of .* are gone; choose another"):
            enter(tmp_path, resume)
    enter(tmp_path / "other", tmp_path / "other")  # stopped before its first one


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_is_never_the_best(bad, tmp_path):
    jax = pytest.importorskip("jax")
    state = {"params": {"a": jax.numpy.ones(3)}}

    def kept(folder, losses, save):
        store = checkpoints.Checkpoints(folder, keep=2, best="loss")
        for step, loss in enumerate(losses, 1):
            save(store, step, loss)
        store.manager.close()
        return list(runs.saved_steps(folder))

    def save(store, step, loss):
        store.save(step, state, {"model": {}, "step": step}, {"loss": loss})

    def stored(store, step, loss):  # with its score, as earlier versions did
        items = store.args.Composite(params=store.args.StandardSave(state["params"]))
        store.manager.save(step, args=items, metrics={"loss": loss}, force=True)

    cases = [3, 1, bad, 4, 5], [bad, 1, bad, bad, 5, bad], [1, bad, 2, bad, 4]
    for i, losses in enumerate(cases):
        best = losses.index(1) + 1
        newest = [len(losses) - 1, len(losses)]
        assert kept(tmp_path / f"new{i}", losses, save) == [best, *newest]
        assert kept(tmp_path / f"old{i}", losses, stored) == [best, *newest]
    assert kept(tmp_path / "none", [bad] * 4, save) == [3, 4]


def test_a_damaged_checkpoint_is_one_line_that_names_it(saved, tmp_path):
    store, state = saved
    meta = tmp_path / "checkpoints" / "5" / "meta" / "metadata"
    record = json.loads(meta.read_text())
    meta.write_text(json.dumps(record | {"sums": record["sums"] | {"params.b.c": 7}}))
    said = r"checkpoints/5 cannot be read \(params.b.c\); if it is damaged, delete"
    with pytest.raises(ValueError, match=said):
        store.restore(state)
    meta.write_text(json.dumps(record))
    files = [path for path in (meta.parents[1] / "params").rglob("*") if path.is_file()]
    os.truncate(max(files, key=lambda path: path.stat().st_size), 100)
    with pytest.raises(ValueError, match="checkpoints/5 cannot be read"):
        store.restore(state)
    meta.write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        store.restore(state)


def test_a_folder_of_another_form_says_what_to_do(tmp_path):
    pytest.importorskip("jax")
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "model.safetensors").touch()
    with pytest.raises(ValueError, match="is in the Hub's form: python convert_weights"):
        checkpoints.load(None, tmp_path / "hub")
    (tmp_path / "torch" / "step_5").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"holds a run of train_gpu.py; choose another folder"):
        checkpoints.Checkpoints(tmp_path / "torch")
    runs.write(tmp_path / "meta.json", {"sums": {}, "step": 20})
    assert checkpoints.find_weights(tmp_path)[2] == 20  # an export has the step of its run
    runs.write(tmp_path / "meta.json", {"sums": {}})
    assert checkpoints.find_weights(tmp_path)[2] == 0


def test_a_tree_is_flattened_and_back():
    pytest.importorskip("jax")
    tree = {"a": np.ones(2, np.float32), "layers": {"0": {"w": np.arange(4, dtype=np.float16)}}}
    flat = checkpoints.flatten(tree)
    assert list(flat) == ["a", "layers.0.w"]
    assert checkpoints.unflatten(flat)["layers"]["0"]["w"] is tree["layers"]["0"]["w"]
    sums = {"a": 2 * 0x3F800000, "layers.0.w": 0x3C00 + 0x4000 + 0x4200}
    assert checkpoints.bit_sums(tree) == sums


def test_a_container_leaves_what_its_limit_says_less_what_is_in_use(tmp_path, monkeypatch):
    jax = pytest.importorskip("jax")
    (tmp_path / "meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n")
    monkeypatch.setattr(checkpoints, "Path", lambda name: tmp_path / Path(name).name)
    two = types.SimpleNamespace(local_devices=jax.local_devices(backend="cpu")[:1] * 2)
    (tmp_path / "memory.limit_in_bytes").write_text("1000000000\n")
    assert checkpoints.free_bytes(two) == 0.9 * 1e9 / 2  # gVisor has no memory.stat
    (tmp_path / "memory.stat").write_text("cache 9\ntotal_rss 300000000\ntotal_rss_huge 7\n")
    assert checkpoints.free_bytes(two) == 0.9 * 7e8 / 2
    (tmp_path / "memory.limit_in_bytes").rename(tmp_path / "memory.max")
    (tmp_path / "memory.stat").write_text("anon 400000000\nfile 99\nanon_thp 5\n")
    assert checkpoints.free_bytes(two) == 0.9 * 6e8 / 2


@pytest.mark.parametrize(
    ("path", "environment", "found"),
    [
        ("dev/nvidia0", {}, True),
        ("usr/lib/wsl/lib/libcuda.so.1", {}, True),
        ("dev/nvidia0", {"CUDA_VISIBLE_DEVICES": ""}, False),
        ("dev/nvidia0", {"JAX_PLATFORMS": "cpu"}, False),
        ("dev/nvidiactl", {}, False),  # a container that no card was given to
    ],
)
def test_a_gpu_that_jax_leaves_idle_is_found(tmp_path, monkeypatch, path, environment, found):
    pytest.importorskip("jax")
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).touch()
    monkeypatch.setattr(checkpoints, "ROOT", tmp_path)
    for name in ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert ("requirements-cuda.txt" in checkpoints.idle_accelerator()) == found


ROWS = [{"a": "x\u2028\x85\x0b\x1cy", "b": [1, {"c": "]"}]}, {"a": 2}, {}]
LINES = [json.dumps(row, ensure_ascii=False).encode() for row in ROWS]
BOM = b"\xef\xbb\xbf"
CUT_SHORT = gzip.compress(b'{"a": 1}\n' * 3, mtime=0)[:-4]


@pytest.mark.parametrize(
    ("data", "numbers"),
    [
        (b"\n".join(LINES), [1, 2, 3]),
        (b"\n".join(LINES) + b"\n \n", [1, 2, 3]),
        (BOM + b"\n" + b"\r\n\r\n".join(LINES), [2, 4, 6]),
        (json.dumps(ROWS).encode(), [1, 1, 1]),
        (BOM + b"\n" + json.dumps(ROWS, indent=1).encode() + b"\n", [3, 12, 15]),
        (b"[\n" + b"\n,\n".join(LINES) + b"\n]", [2, 4, 6]),
        (b"\n".join(json.dumps(row, indent="\t").encode() for row in ROWS), [1, 10, 13]),
    ],
)
def test_rows_of_json_are_read_in_any_form(data, numbers):
    for form in (data, gzip.compress(data)):
        found = [*runs.json_rows(io.BytesIO(form))]
        assert found == [*zip(numbers, ROWS, strict=True)]


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", []),
        (b" \n\n", []),
        (BOM, []),
        (b"[]", []),
        (b'{"a": 1}\n[1]\n"b"\n{', [(1, {"a": 1}), (2, [1]), (3, "b"), (4, None)]),
        (b'["a", 1]', [(1, "a"), (1, 1)]),
        (b'[{"a": 1},\n{"a": 2}', [(1, {"a": 1}), (2, {"a": 2}), (2, None)]),
        (b'[{"a": 1},\n{"a": [2]', [(1, {"a": 1}), (2, None)]),
        (b'{\n"a": 1}\nx = 1', [(1, {"a": 1}), (3, None)]),
        (b"\n\xff", [(2, None)]),
        (b"[" * 99_999, [(1, None)]),
        (CUT_SHORT, [(1, {"a": 1}), (2, {"a": 1}), (3, {"a": 1}), (4, None)]),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_json_is_none_with_its_line(data, found):
    assert [*runs.json_rows(io.BytesIO(data))] == found
