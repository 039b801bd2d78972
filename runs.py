"""The folder of a run: settings, lock, log, signals, checkpoints; and the one place where an error becomes one line.

    if __name__ == "__main__":
        runs.command(main, Config, __doc__)                  # the command line; with --resume=DIR that run's settings

    with runs.Run(cfg) as run:                               # locks cfg.out, refuses a folder that holds another run
        run.begin(first, settings, {"tokenizer.json": data})    # cuts the logs to step `first`, writes config.json
        for step in range(first, cfg.steps):
            run.log({"step": step + 1, "loss": 3.41})
            if run.signal:                                   # Ctrl-C or SIGTERM: save, then
                run.leave(step + 1)

A run's folder holds config.json, tokenizer.json, log.jsonl and its checkpoints: checkpoints/<step>/ written by Orbax
(JAX), step_<n>/ in safetensors (PyTorch). This file imports neither JAX nor PyTorch before it needs them.
"""

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import io
import itertools
import json
import logging
import math
import os
import re
import secrets
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import numpy as np

# ---- the command line ----------------------------------------------------------------------------------------------


def command(main, config_class, doc, machine=()):
    """Run main(config) from the command line, by tyro; an error that a user can mend is one line and exit status 1.

    The flags are the fields of the dataclass, their comments the help; nested dataclasses are groups of flags. With
    --resume=DIR the defaults are the settings of that run, but for those named by `machine`: they belong to the machine
    that it ran on. What this project's own code raises says what is wrong, and so does the system (OSError). What a
    library raises is a bug of ours, and keeps its traceback; python -X dev shows all of them.
    """
    import tyro

    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")  # of a GPU's memory; JAX alone takes three quarters
    status = 0
    try:
        default = resumed(config_class, sys.argv[1:], machine)
        main(tyro.cli(config_class, default=default, description=doc, config=(tyro.conf.OmitArgPrefixes,)))
    except KeyboardInterrupt:
        status = 130
    except Exception as error:
        # Whose line raised it? Only what this project says on purpose is short.
        folder, here = Path(traceback.extract_tb(error.__traceback__)[-1].filename).parent, Path(__file__).parent
        ours = folder in (here, here / "bench")
        if sys.flags.dev_mode or not (ours or isinstance(error, OSError)):
            raise
        advice = "; pip install -r requirements-gpu.txt" if getattr(error, "name", "") == "torch" else ""
        print((str(error) or repr(error)) + advice, file=sys.__stderr__)
        status = 1
    # Leave at once after an error: threads of a broken Orbax save would print tracebacks until the interpreter ends.
    # And after torchrun: threads of gloo that outlive their process group abort a closing interpreter.
    if status or int(os.environ.get("WORLD_SIZE", 1)) > 1:
        for stream in (sys.stdout, sys.__stderr__):
            with contextlib.suppress(OSError):  # a reader such as head has gone
                stream.flush()
        os._exit(status)


def resumed(config_class, arguments, machine=()):
    """The defaults of a command line: those of the class, or the settings of the run that --resume names."""
    pairs = (a.split("=", 1) if "=" in a else (a, b) for a, b in itertools.zip_longest(arguments, arguments[1:]))
    folder = next((value for flag, value in pairs if flag == "--resume"), None)
    if not folder or "resume" not in {field.name for field in dataclasses.fields(config_class)}:
        return config_class()
    saved = read_json(as_path(folder) / "config.json", "train")["train"]
    return dataclasses.replace(settings_of(config_class, saved, machine), out=folder)


def settings_of(config_class, saved, machine=()):
    """A config of saved settings; a group of flags has its own dictionary, or its names among the others (old runs)."""
    values = {}
    for field in dataclasses.fields(config_class):
        if dataclasses.is_dataclass(field.default):
            group = saved.get(field.name)
            values[field.name] = settings_of(type(field.default), group if isinstance(group, dict) else saved, machine)
        elif field.name in saved and field.name not in machine:
            value = saved[field.name]
            values[field.name] = tuple(value) if isinstance(value, list) else value
        elif field.name not in saved and "before" in field.metadata:
            values[field.name] = field.metadata["before"]
    return config_class(**values)


def later(default, before):
    """A setting that came later, with its default: a run that does not say it had `before`."""
    return dataclasses.field(default=default, metadata={"before": before})


# ---- files and folders ---------------------------------------------------------------------------------------------


def as_path(name):
    """A path, also of a bucket: gs://..., s3://..., by etils' epath and the package gcsfs or s3fs."""
    if "://" not in str(name):
        return Path(name)
    from etils import epath

    return epath.Path(name)


def read_json(path, *needed):
    """The JSON object in a file. FileNotFoundError; ValueError if it is none, or lacks one of the keys `needed`."""
    path = as_path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; is {path.parent} the folder that you mean?")
    try:
        found = json.loads(path.read_text())
        missing = [key for key in needed if key not in found]
    except (ValueError, TypeError):
        raise ValueError(f"{path} is damaged: it is not a JSON object") from None
    if missing or not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: it has no {' and no '.join(missing) or 'keys'}")
    return found


@contextlib.contextmanager
def writing(path):
    """A file to write bytes to, which gets its name when all is written and on disk. An error leaves nothing."""
    path = as_path(path)
    if not isinstance(path, Path):  # a bucket shows an object when it is complete
        data = io.BytesIO()
        yield data
        path.write_bytes(data.getvalue())
        return
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write(path, data):
    """Write bytes, or anything else as JSON: the file is whole, or as it was."""
    with writing(path) as file:
        file.write(data if isinstance(data, bytes) else (json.dumps(data, indent=2) + "\n").encode())


@contextlib.contextmanager
def new_folder(path):
    """A folder to write in, which gets its name when all went well; an error leaves nothing under that name."""
    path = Path(path)
    partial = path.with_name(path.name + ".tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        for _ in range(50):  # threads of a failed Orbax save still write
            shutil.rmtree(partial, ignore_errors=True)
            if not partial.exists():
                break
            time.sleep(0.1)
        raise
    # Everything is on disk before the name says that it is complete.
    for part in [*partial.rglob("*"), partial]:
        descriptor = os.open(part, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    shutil.rmtree(path, ignore_errors=True)
    os.replace(partial, path)


@contextlib.contextmanager
def lock(path):
    """Hold a lock file, which the system lets go however the process ends. BlockingIOError if another has it.

    A bucket has no locks.
    """
    if not isinstance(path, str | Path):
        yield
        return
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            folder = Path(path).parent
            raise BlockingIOError(
                f"another process is writing to {folder}; wait for it or choose another --out"
            ) from None
        yield


def checkpoints(folder):
    """{step: path} of the finished checkpoints of a run, in order: checkpoints/<step>/ (JAX) or step_<n>/ (PyTorch)."""
    names = (
        (path.name.removeprefix("step_"), path) for glob in ("checkpoints/*", "step_*") for path in folder.glob(glob)
    )
    return dict(sorted((int(name), path) for name, path in names if name.isdigit()))


def newest(folder, step=0):
    """(step, path) of a run's newest checkpoint, or of the one asked for. FileNotFoundError says which there are."""
    found = checkpoints(as_path(folder))
    if not found or (step and step not in found):
        there = f"it has {list(found)}" if found else "train one, or name the folder of a run or of convert_weights.py"
        raise FileNotFoundError(f"{folder} holds no checkpoint{f' of step {step}' * bool(step)}; {there}")
    step = step or max(found)
    return step, found[step]


def read_tokenizer(folder):
    """The tokenizer in a folder. FileNotFoundError, or ValueError for one that is damaged."""
    import tokenizers

    path = as_path(folder) / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no tokenizer.json; copy the model's into it")
    try:
        return tokenizers.Tokenizer.from_buffer(path.read_bytes())
    except Exception as error:  # tokenizers raises nothing narrower for a broken file
        raise ValueError(f"{path} cannot be read: {error}") from None


# ---- a run while it is written -------------------------------------------------------------------------------------


class Run:
    """The folder cfg.out, locked. cfg has out, resume and wandb; unit is what the run counts: "step" or "round".

    If cfg has a field plot that is True, what `curves` names in the logged rows is drawn, see Plot. A trainer needs no
    more than `plot: bool = False  # draw loss and bits per byte in the terminal, and curve.png` in its Config.

    Of several processes each has its own Run with its rank; only that of rank 0 writes and prints. With hosts > 1,
    processes of JAX, SIGTERM belongs to jax.distributed, which tells all of them at which step to stop.
    """

    def __init__(self, cfg, unit="step", rank=0, hosts=1, curves=("loss", "bits_per_byte")):
        self.cfg, self.out, self.unit, self.rank, self.hosts = cfg, as_path(cfg.out), unit, rank, hosts
        self.curves, self.plot = curves, None
        self.signal = ""  # name of the signal that asks this process to stop
        self.asked_at = None  # when one came
        self.tracker = None
        self.exits = contextlib.ExitStack()

    def __enter__(self):
        if not self.cfg.resume and checkpoints(self.out):
            advice = f"--resume={self.out} goes on with it, another --out starts anew"
            raise FileExistsError(f"{self.out} already holds a run: {advice}")
        self.out.mkdir(parents=True, exist_ok=True)
        self.exits.enter_context(lock(self.out / f".lock{self.rank}"))
        return self

    def __exit__(self, kind, error, trace):
        self.exits.close()
        # A Ctrl-C in a terminal reaches child processes too, such as a compiler that PyTorch waits for.
        if self.asked_at and isinstance(error, Exception) and not isinstance(error, InterruptedError):
            why = f"{kind.__name__}: {error}".splitlines()[0]
            after = f"go on with --resume={self.out}" if checkpoints(self.out) else "nothing was saved yet"
            raise InterruptedError(f"stopped in the middle of a {self.unit} ({why}); {after}") from error

    def begin(self, first, settings, files=None, logs=("log.jsonl",)):
        """Write config.json and files, {name: bytes}. From here on a signal asks the run to stop, a second one ends it.

        What a killed run logged after step `first`, its last checkpoint, is cut off: it will be logged again.
        """
        for number in (signal.SIGINT,) if self.hosts > 1 else (signal.SIGTERM, signal.SIGINT):
            self.exits.callback(signal.signal, number, signal.signal(number, self.on_signal))
        if self.rank:
            return
        for path in (self.out / name for name in logs if (self.out / name).exists()):
            # A line that a kill cut short has no newline.
            lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("}\n")]
            write(path, "".join(line for line in lines if json.loads(line)[self.unit] <= first).encode())
        write(self.out / "config.json", settings)
        for name, data in (files or {}).items():
            write(self.out / name, data)
        if getattr(self.cfg, "plot", False):
            self.plot = Plot(self.out, self.curves, self.unit)
            self.exits.callback(self.plot.close)
        if self.cfg.wandb:
            try:
                import wandb
            except ImportError:
                raise ValueError("--wandb needs the package wandb: pip install wandb") from None
            name = self.out / "wandb_id"  # of its own: another run in a folder of this name is another curve
            if not (self.cfg.resume and name.exists()):
                write(name, secrets.token_hex(8).encode())
            where = {"project": self.cfg.wandb, "dir": str(self.out), "name": self.out.name, "id": name.read_text()}
            self.tracker = wandb.init(config=settings, resume="allow", **where)
            self.exits.callback(self.tracker.finish)

    def on_signal(self, number, frame):
        now, name = time.monotonic(), signal.Signals(number).name
        if self.asked_at is None:
            self.asked_at = now
            print(f"{name}: saving after this {self.unit}; once more to end at once", file=sys.stderr)
            if self.hosts > 1:
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                self.signal = name
        elif now - self.asked_at > 1:  # torchrun hands on a Ctrl-C that its processes have had already
            raise KeyboardInterrupt

    def log(self, row):
        """Print a row of metrics and append it to log.jsonl, the source of every plot and table."""
        if self.rank:
            return
        print(" | ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v:,}" for k, v in row.items()), flush=True)
        self.append("log.jsonl", [row])
        if self.tracker:
            self.tracker.log(row, step=row[self.unit])
        if self.plot:
            self.plot.add(row)

    def table(self, name, rows):
        """Show rows of one step or round as a table in wandb."""
        if self.tracker:
            import wandb

            cells = [[json.dumps(x) if isinstance(x, dict | list) else x for x in row.values()] for row in rows]
            self.tracker.log({name: wandb.Table(columns=list(rows[0]), data=cells)}, step=rows[0][self.unit])

    def append(self, name, rows):
        """Add rows as JSON lines to a file of the folder."""
        self.append_text(name, "".join(json.dumps(row) + "\n" for row in rows))

    def append_text(self, name, text):
        path = self.out / name
        if isinstance(path, Path):
            with open(path, "a") as file:
                file.write(text)
        else:  # objects in a bucket cannot grow
            path.write_text((path.read_text() if path.exists() else "") + text)

    def leave(self, done):
        """End the program after a signal, when `done` is saved."""
        why = self.signal or "another process was asked to stop"
        raise InterruptedError(f"{why}: saved {self.unit} {done}; go on with --resume={self.out}")


# ---- curves ---------------------------------------------------------------------------------------------------------


def braille(x_N, y_N, width, height):
    """`height` lines of `width` characters with a curve through the points (x, y), x rising: 2 by 4 dots a character.

    The largest y is in the first line, the smallest in the last.
    """
    # the row of dots that the curve has reached in each column of dots
    y_C = np.interp(np.linspace(x_N[0], x_N[-1], 2 * width), x_N, y_N)
    row_C = np.rint((y_C.max() - y_C) / (np.ptp(y_C) or 1) * (4 * height - 1)).astype(int).tolist()
    cells = np.zeros((height, width), int)
    for column, (before, row) in enumerate(zip([row_C[0], *row_C], row_C, strict=False)):
        for dot in range(min(before, row), max(before, row) + 1):  # down or up to it, so that the curve has no holes
            bit = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))[dot % 4][column % 2]
            cells[dot // 4, column // 2] |= bit
    return ["".join(chr(0x2800 + cell) for cell in line) for line in cells]


def series(rows, names, unit):
    """{name: (units, values)} of the names that two or more rows have a finite number for."""
    found = {}
    for name in names:
        points = [(row[unit], row[name]) for row in rows if math.isfinite(row.get(name, math.nan))]
        if len(points) > 1:
            found[name] = tuple(zip(*points, strict=True))
    return found


def text_plot(rows, names, unit="step", width=80, height=10):
    """Lines of text with a curve of each of the names over rows of a log; [] while there is none.

    Each has a heading with its newest value, and its largest and smallest beside it.
    """
    found, lines = series(rows, names, unit), []
    for name, (x, y) in found.items():
        curve = braille(x, y, width - 10, height // len(found) - 1)
        labels = [f"{max(y):9.4g}", *[9 * " "] * (len(curve) - 2), f"{min(y):9.4g}"]
        lines.append(f"{name} {y[-1]:.4g}, {unit} {x[-1]:,}")
        lines += [f"{label} {line}" for label, line in zip(labels, curve, strict=True)]
    return lines


class Plot:
    """Curves of the log of a run: live at the top of a terminal, and as curve.png in its folder when it ends.

    The terminal scrolls below the curves only, so whatever else is printed leaves them where they are. Without a
    terminal nothing is drawn before the end.
    """

    def __init__(self, out, names, unit, height=10):
        self.out, self.names, self.unit, self.height, self.size = out, names, unit, height, None
        log = out / "log.jsonl"  # of a run that goes on
        self.rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        self.terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"

    def add(self, row):
        self.rows.append(row)
        columns, lines = shutil.get_terminal_size()
        if not self.terminal or lines < 2 * self.height or columns < 40:
            return
        if self.size != (columns, lines):  # the first time, or another window: what is on the screen scrolls away
            self.size = columns, lines
            print("\n" * lines + f"\x1b[{self.height + 1};{lines}r\x1b[{lines};1H", end="")
        drawn = text_plot(self.rows, self.names, self.unit, columns - 1, self.height)
        drawn = "".join(f"\x1b[{i};1H\x1b[K{line}" for i, line in enumerate(drawn, 1))
        print(f"\x1b7{drawn}\x1b8", end="", flush=True)  # and back to where the cursor was

    def close(self):
        """Let the whole terminal scroll again, and write curve.png."""
        if self.size:
            print("\x1b7\x1b[r\x1b8", end="", flush=True)
        found = series(self.rows, self.names, self.unit)
        try:
            from matplotlib.figure import Figure
        except ImportError:
            print("--plot: curve.png needs matplotlib: pip install matplotlib", file=sys.stderr)
            return
        if not found:
            return
        figure, data = Figure((7, 2.5 * len(found)), layout="constrained"), io.BytesIO()
        for axis, (name, points) in zip(figure.subplots(len(found), squeeze=False)[:, 0], found.items(), strict=True):
            axis.plot(*points)
            axis.set(ylabel=name.replace("_", " "), xlabel=self.unit)
            axis.grid(alpha=0.3)
        figure.savefig(data, format="png", dpi=120)
        write(self.out / "curve.png", data.getvalue())


# ---- trees of arrays (JAX) -----------------------------------------------------------------------------------------


def flatten(tree):
    """Any tree of arrays -> {"layers.0.q_proj": array}."""
    import jax

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def unflatten(flat):
    """{"layers.0.q_proj": array} -> nested dictionaries."""
    tree = {}
    for name, value in flat.items():
        *parents, leaf = name.split(".")
        functools.reduce(lambda node, parent: node.setdefault(parent, {}), parents, tree)[leaf] = value
    return tree


@functools.cache
def _bit_sum():
    import jax
    import jax.numpy as jnp

    def bit_sum(x):
        unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
        return jnp.sum(jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32), dtype=jnp.uint32)

    return jax.jit(bit_sum)


def bit_sums(tree):
    """{name: checksum} of a tree: the sum of each array's words modulo 2^32, the same however the array is split.

    One array at a time, each waited for: a CPU makes a copy of the words, and reductions over devices that run side by
    side can wait for each other for ever.
    """
    return {name: int(_bit_sum()(x)) for name, x in flatten(tree).items()}


def check_tensors(found, want, where):
    """Raise ValueError that names each missing, unexpected or misshapen tensor. Both are {name: shape}."""
    wrong = [f"missing {name}" for name in want.keys() - found.keys()]
    wrong += [f"unexpected {name}" for name in found.keys() - want.keys()]
    for name in want.keys() & found.keys():
        if tuple(found[name]) != tuple(want[name]):
            wrong.append(f"{name} has shape {tuple(found[name])}, not {tuple(want[name])}")
    if wrong:
        more = f" and {len(wrong) - 20} more" if len(wrong) > 20 else ""
        raise ValueError(f"the tensors of {where} do not fit the model: " + "; ".join(sorted(wrong)[:20]) + more)


def check_same(theirs, ours, where):
    """Raise ValueError that lists the fields in which the model of a checkpoint differs from ours."""
    changed = [k for k in {**theirs, **ours} if theirs.get(k) != ours.get(k)]
    if changed:
        listed = "; ".join(f"{k} {theirs.get(k)} there, {ours.get(k)} here" for k in changed)
        raise ValueError(f"{where} is of another model: {listed}")


# ---- several hosts (JAX) -------------------------------------------------------------------------------------------


def join_hosts(hosts):
    """Make one machine of several: "auto" on TPU pods, SLURM and MPI, or ADDRESS:PORT,COUNT,INDEX; "" is one host."""
    import jax

    if hosts:
        address, *numbers = hosts.split(",")
        where = [] if hosts == "auto" else [address, *map(int, numbers)]
        jax.distributed.initialize(*where, heartbeat_timeout_seconds=30)  # all end when one is killed


def check_hosts(folder, settings):
    """The same ValueError on all hosts if one has other settings than host 0, or does not see its files."""
    import jax
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return
    marker, digest = folder / ".hosts", hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).digest()
    mine = np.frombuffer(digest[:8] + os.urandom(4), np.int32)
    first = multihost_utils.broadcast_one_to_all(mine)
    if jax.process_index() == 0:
        write(marker, {"run": int(mine[2])})
    multihost_utils.sync_global_devices("marker written")
    sees = False
    for _ in range(20):  # a network disk can take seconds to show a new file
        sees = sees or (marker.is_file() and read_json(marker).get("run") == int(first[2]))
        time.sleep(0 if sees else 0.5)
    equal_H, sees_H = multihost_utils.process_allgather(np.array([(mine[:2] == first[:2]).all(), sees])).T
    if not equal_H.all():
        raise ValueError(f"hosts {np.flatnonzero(~equal_H).tolist()} have other settings or data than host 0")
    if not sees_H.all():
        advice = "--out has to be on a disk that all hosts share, or in a bucket (gs://...)"
        raise ValueError(f"hosts {np.flatnonzero(~sees_H).tolist()} do not see what host 0 wrote to {folder}: {advice}")


# ---- Orbax checkpoints (JAX) ---------------------------------------------------------------------------------------


class Checkpoints:
    """Orbax checkpoints <folder>/checkpoints/<step>/: asynchronous, atomic, sharded, with a checksum of every array.

    Keeps the newest `keep`, and the one whose metric `best` is lowest.
    """

    def __init__(self, folder, keep=2, best=""):
        import orbax.checkpoint as ocp
        from orbax.checkpoint import checkpoint_managers as kept

        quiet()
        # What is kept of old checkpoints: a step stays if any of these rules wants it.
        policy = [kept.LatestN(keep)]
        if best:
            lowest = {"get_metric_fn": lambda metrics: metrics[best], "reverse": True, "n": 1}
            policy.append(kept.BestN(**lowest, keep_checkpoints_without_metrics=False))
        policy = kept.AnyPreservationPolicy(policy)
        options = ocp.CheckpointManagerOptions(preservation_policy=policy, cleanup_tmp_directories=True)
        self.folder, self.args = absolute(folder), ocp.args
        self.manager = ocp.CheckpointManager(self.folder / "checkpoints", options=options)

    def newest(self):
        """The newest step, None without any."""
        return self.manager.latest_step()

    def preempted(self, step):
        """Of several hosts one was asked to stop (SIGTERM), and this is the step at which all of them do."""
        return self.manager.reached_preemption(step)

    def save(self, step, state, meta, metrics=None):
        """Start to save a dictionary of trees, with what meta holds as JSON; waits for the save before it."""
        self.wait()
        # The checksums are of what is in memory now: restore() compares them with what the disk gives back.
        items = {name: self.args.StandardSave(tree) for name, tree in state.items() if tree}
        items["meta"] = self.args.JsonSave(meta | {"sums": bit_sums(state)})
        try:
            self.manager.save(step, args=self.args.Composite(**items), metrics=metrics, force=True)
        except (OSError, ValueError) as error:
            raise self.unwritten(error) from None

    def wait(self):
        """Wait for the save under way. OSError if it could not be written."""
        try:
            self.manager.wait_until_finished()
        except (OSError, ValueError) as error:
            raise self.unwritten(error) from None

    def unwritten(self, error):
        left = sorted(self.manager.all_steps(read=True)) or "no checkpoint"
        return OSError(
            f"a checkpoint was not written ({first_line(error)}); go on with --resume={self.folder} from {left}"
        )

    def meta(self):
        """The JSON of the newest checkpoint."""
        path = self.folder / "checkpoints" / str(self.newest())
        return read_json(path / "meta" / "metadata", "model", "sums")

    def restore(self, like):
        """The state in the newest checkpoint, laid out as the arrays or ShapeDtypeStructs of `like` are.

        ValueError for one that is damaged, also where only a bit differs from what was saved.
        """
        import jax

        step, sums = self.newest(), self.meta()["sums"]
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        items = {name: self.args.StandardRestore(tree) for name, tree in like.items() if tree}
        try:
            state = {**like, **self.manager.restore(step, args=self.args.Composite(**items))}
            wrong = [name for name, value in bit_sums(state).items() if value != sums.get(name)]
        except Exception as error:  # Orbax raises nothing narrower for a file that was cut short
            wrong = [first_line(error)]
        if wrong:
            advice = "delete its folder to use the one before"
            raise ValueError(f"{self.folder}/checkpoints/{step} cannot be read ({', '.join(wrong)}); {advice}")
        return state

    def close(self):
        self.wait()
        self.manager.close()


def absolute(folder):
    """What Orbax asks for."""
    path = as_path(folder)
    return path.absolute() if isinstance(path, Path) else path


def first_line(error):
    return str(error).splitlines()[0] if str(error) else repr(error)


def quiet():
    """Orbax raises an error here, and logs it as well, and so do its threads when they are ended."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    threading.excepthook = sys.unraisablehook = lambda _: None


WEIGHTS = Path(__file__).parent / "weights"  # small trained models, a folder for each family


def default_folder(run, family):
    """The folder of a model where none is named: `run` if it holds one, else that in WEIGHTS, if there is one."""
    converted = any((Path(run) / name).is_file() for name in ("meta.json", "model.safetensors"))
    if converted or checkpoints(Path(run)) or not (WEIGHTS / family).is_dir():
        return run
    print(f"no model in {run}: using weights/{family}, a small one that comes with Unmask", file=sys.stderr)
    return str(WEIGHTS / family)


# What a config.json beside the safetensors of a PythonCoder says besides its architecture, see convert_weights.py.
NOT_ARCHITECTURE = "model_type", "torch_dtype", "source", "step"


# What lies beside the weights of a model, besides config.json: its tokenizer, and the code that transformers runs.
COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


def companions(folder):
    """{name: bytes} of the files COMPANIONS and *.py that a model's folder holds."""
    folder = as_path(folder)
    paths = [*map(folder.joinpath, COMPANIONS), *sorted(folder.glob("*.py"))]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


def find_weights(folder, step=0):
    """(path, meta, step) of the weights in a folder: a run's newest step, or what convert_weights.py made of one.

    That is in Orbax, or as safetensors if it is a PythonCoder; its step is that of the run, 0 for what is of the Hub.
    """
    if (folder / "meta.json").is_file():  # written by convert_weights.py
        meta = read_json(folder / "meta.json", "sums")
        return folder, meta, step or meta.get("step", 0)
    keys = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    if (folder / "model.safetensors").is_file() and keys.get("model_type") == "pythoncoder":
        model = {name: value for name, value in keys.items() if name not in NOT_ARCHITECTURE}
        meta = {"model": model, "dtype": keys.get("torch_dtype", "float32"), "step": keys.get("step", 0)}
        return folder, meta, step or meta["step"]
    if any(folder.glob("*.safetensors")):
        advice = f"convert it: python convert_weights.py --source={folder} --out=DIR"
        raise ValueError(f"{folder} is in the Hub's form; {advice}")
    step, path = newest(folder, step)
    if (path / "adapters").is_dir():
        advice = f"the whole model is in {folder}/merged when the run has ended"
        raise ValueError(f"{path} holds what LoRA learnt; {advice}")
    return path, read_json(path / "meta" / "metadata", "model", "sums"), step


def load(family, folder, step=0, dtype=None, run=None, mesh=None, bits=0):
    """(model, step) of a run of train_tpu.py, or of a folder of convert_weights.py.

    family is model_dream or model_pythoncoder. dtype None keeps the stored one; step 0 takes the newest. With a mesh
    each device reads its own part of every parameter. With bits (Dream), 8 or 4, matrices are quantised as they are
    read, and dtype is that of the rest. Raises ValueError or FileNotFoundError.
    """
    import jax
    from flax import nnx

    quiet()
    folder = absolute(folder)
    path, meta, step = find_weights(folder, step)
    cfg = family.read_config(folder, meta)
    stored = jax.numpy.dtype(meta.get("dtype", "float32"))
    dtype = jax.numpy.dtype(dtype or stored)

    # Shape, type and place of every parameter, before any is read.
    shapes = family.param_shapes(cfg)
    first_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    layout = family.shardings(mesh, shapes) if mesh else jax.tree.map(lambda _: first_device, shapes)
    like = flatten(jax.tree.map(lambda s, at: jax.ShapeDtypeStruct(s.shape, stored, sharding=at), shapes, layout))

    def convert(name, x):
        return family.quantise(x, bits, name.split(".")[-1]) if bits and x.ndim == 2 else x.astype(dtype)

    if "sums" not in meta:
        params = {name: convert(name, x) for name, x in read_safetensors(path, like).items()}
        return nnx.merge(family.graph_of(cfg, run or family.Run(dtype=dtype)), unflatten(params)), step

    # A layer at a time: the stored model is never whole in memory beside another form of it.
    sums = {name.removeprefix("params."): value for name, value in meta["sums"].items()}
    params, damaged = {}, []
    for _, names in itertools.groupby(like, lambda name: name.rpartition(".")[0]):
        layer = read_arrays(path, {name: like[name] for name in names})
        damaged += [name for name, value in bit_sums(unflatten(layer)).items() if value != sums.get(name)]
        params |= {name: convert(name, layer.pop(name)) for name in list(layer)}
    if damaged:
        raise ValueError(f"checkpoint {path} cannot be read: {', '.join(damaged)} differ from what was saved")
    return nnx.merge(family.graph_of(cfg, run or family.Run(dtype=dtype)), unflatten(params)), step


def read_safetensors(path, like):
    """The arrays {name: ShapeDtypeStruct} of model.safetensors in a folder, which may hold no others."""
    import jax
    import safetensors

    try:
        with safetensors.safe_open(path / "model.safetensors", "flax") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}/model.safetensors cannot be read: {error}") from None
    check_tensors(*({name: x.shape for name, x in tensors.items()} for tensors in (found, like)), path)
    return {name: jax.device_put(found[name], want.sharding) for name, want in like.items()}


def read_arrays(path, like):
    """The arrays {name: ShapeDtypeStruct} of an Orbax checkpoint, each on the devices that its sharding names."""
    import orbax.checkpoint as ocp

    item = unflatten(like)
    how = ocp.args.PyTreeRestore(
        item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
    )
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            return flatten(checkpointer.restore(path / "params", args=how))
    except Exception as error:  # Orbax raises nothing narrower for a file that was cut short
        raise ValueError(f"checkpoint {path} cannot be read: {first_line(error)}") from None


# ---- the machine: what is here, and what fits (JAX) ------------------------------------------------------------------


def keep_compiled(folder):
    """Keep compiled programs in a folder, where a later process finds them; "" compiles anew."""
    import jax

    if folder:
        jax.config.update("jax_compilation_cache_dir", str(Path(folder).expanduser()))


MACHINE = Path("/")  # its devices are files


def idle_accelerator():
    """Which accelerator is here while JAX computes on the CPU, and what to install; "" for none.

    Whoever sets JAX_PLATFORMS, or an empty CUDA_VISIBLE_DEVICES, wants the CPU.
    """
    import jax

    if jax.default_backend() != "cpu" or os.environ.get("JAX_PLATFORMS"):
        return ""

    def here(pattern):
        return any(MACHINE.glob(pattern))

    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if not hidden and (here("dev/nvidia[0-9]*") or here("usr/lib/wsl/lib/libcuda.so.1")):  # the latter in Windows
        return "an NVIDIA GPU is here, JAX has no CUDA: pip install -r requirements-cuda.txt"
    # Newer TPUs are behind vfio, as are graphics cards of virtual machines; 0x1ae0 is Google. A laptop's NPU is in
    # the folder /dev/accel.
    makers = (path.read_text().strip() for path in MACHINE.glob("sys/bus/pci/devices/*/vendor"))
    if here("dev/accel[0-9]*") or (here("dev/vfio/[0-9]*") and "0x1ae0" in makers):
        return "a TPU is here, JAX does not see it: pip install -r requirements-tpu.txt"
    return ""


def device_line():
    """What JAX computes on, and what it leaves idle."""
    import jax

    devices, idle = jax.devices(), idle_accelerator()
    return f"{len(devices)} x {devices[0].device_kind}" + f"; {idle}" * bool(idle)


def free_bytes(device):
    """Bytes that are free on a device, infinite where nothing says. On a CPU nine tenths of what the machine has left:
    the system ends a process that takes too much without a word.
    """
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        return stats.get("bytes_limit", math.inf) - stats.get("bytes_in_use", 0)
    if not Path("/proc/meminfo").exists():
        return math.inf
    free = 1024 * int(re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())[1])
    for path in map(Path, ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if path.exists() and path.read_text().strip().isdigit():  # a container may have less than the machine
            free = min(free, int(path.read_text()))
    return 0.9 * free


def bytes_on_a_device(tree):
    """Of a tree of arrays, or of ShapeDtypeStructs that say how they are laid out."""
    leaves = flatten(tree).values()
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def check_memory(mesh, needed, smaller):
    """Print what a device holds while it trains; ValueError if that is more than is free there.

    needed are bytes, and smaller {flag: bytes} what takes less.
    """
    import jax

    device = jax.local_devices()[0]
    free = free_bytes(device) / (mesh.size if device.platform == "cpu" else 1)  # a CPU's devices share its memory
    what = f"weights, moments and gradients take {needed / 1e9:.3g} GB on each device"
    print(f"{what}, {free / 1e9:.3g} are free; activations come on top", flush=True)
    if needed > free:
        advice = " or ".join(f"{flag} takes {size / 1e9:.3g}" for flag, size in smaller.items() if size <= free)
        advice = advice or "that takes a smaller model, or more devices"
        raise ValueError(f"{what}, where {free / 1e9:.3g} are free; {advice}")


def inference_mesh(model, devices, rows):
    """A mesh (data, fsdp, tensor) for inference: tensor up to the model's key/value heads, `rows` texts over data.

    Of the devices only those that this divides evenly; with rows 0 all of them.
    """
    import jax

    heads = model.kv_heads // getattr(model, "maps", 1)
    tensor = math.gcd(len(devices), heads, model.ffn, model.vocab)
    data = math.gcd(len(devices) // tensor, rows)
    axes, auto = ("data", "fsdp", "tensor"), (jax.sharding.AxisType.Auto,) * 3
    return jax.make_mesh((data, 1, tensor), axes, auto, devices=devices[: data * tensor])


def bytes_needed(family, model, mesh, stored, dtype, bits):
    """Bytes of a device while a checkpoint is read: its part of the weights, and of the largest array as stored."""
    import jax

    shapes = family.param_shapes(model)
    parts = jax.tree.map(
        lambda s, at: jax.ShapeDtypeStruct(at.shard_shape(s.shape), dtype), shapes, family.shardings(mesh, shapes)
    )

    def kept(path, part):
        narrow = bits and len(part.shape) == 2
        return jax.eval_shape(lambda x: family.quantise(x, bits, path[-1].key), part) if narrow else part

    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.tree_util.tree_map_with_path(kept, parts)))
    return size + jax.numpy.dtype(stored).itemsize * max(part.size for part in jax.tree.leaves(parts))


def bits_of(flags):
    """How many bits --int8 and --int4 leave of a matrix's elements; 0: all."""
    if flags.int8 and flags.int4:
        raise ValueError("--int8 or --int4, not both")
    return 8 if flags.int8 else 4 if flags.int4 else 0


def load_for_inference(family, folder, step=0, dtype="", bits=0, devices=0, rows=1):
    """(model, step, mesh) of load() on the machine's devices, or so many of them, for `rows` texts at a time.

    The mesh is None for one device. dtype "" is bfloat16; on a CPU float32, which is faster there, if memory holds it.
    Raises ValueError for a checkpoint that is too large, before it is read, and what load() raises.
    """
    import jax

    # What the checkpoint holds, and how it would lie on the devices.
    path, meta, _ = find_weights(absolute(folder), step)
    if step and path == absolute(folder):
        raise ValueError(f"{folder} was converted and has no steps; leave --step={step} out")
    model, stored = family.read_config(path, meta), meta.get("dtype", "float32")
    if devices > jax.device_count():
        raise ValueError(f"--devices={devices}: there are {device_line()}")
    mesh = inference_mesh(model, jax.devices()[: devices or None], rows)
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    print(device_line() + f"; mesh {axes}" * (mesh.size > 1), file=sys.stderr)
    on_cpu = jax.default_backend() == "cpu"
    free = free_bytes(mesh.devices.flat[0]) / (mesh.size if on_cpu else 1)  # a CPU's devices share its memory

    # The first type that fits; else what to do.
    def needed(dtype, bits=bits):
        return bytes_needed(family, model, mesh, stored, dtype, bits)

    choices = [dtype] if dtype else ["float32", "bfloat16"] if on_cpu else ["bfloat16"]
    fitting = [name for name in choices if needed(name) <= free]
    if not fitting:
        smaller = {"--dtype=bfloat16": needed("bfloat16")}
        if hasattr(family, "quantise"):
            smaller |= {f"--int{bits}": needed("bfloat16", bits) for bits in (8, 4)}
        advice = " or ".join(f"{flag} takes {size / 1e9:.3g}" for flag, size in smaller.items() if size <= free)
        takes = f"{needed(choices[-1]) / 1e9:.3g} GB in {f'int{bits} and ' * bool(bits)}{choices[-1]}"
        advice = advice or "that takes a machine with more memory, or more devices"
        raise ValueError(f"{folder} takes {takes} on each device, where {free / 1e9:.3g} are free; {advice}")
    if fitting != choices:
        print(f"bfloat16: float32 takes {needed('float32') / 1e9:.3g} GB, {free / 1e9:.3g} are free", file=sys.stderr)
    mesh = mesh if mesh.size > 1 else None
    model, step = load(family, folder, step, fitting[0], mesh=mesh, bits=bits)
    if not mesh and hasattr(family, "join"):
        family.join(model)
    return model, step, mesh


def on(mesh):
    """A context in which programs are compiled for a mesh; None is a single device."""
    import jax

    return jax.set_mesh(mesh) if mesh else contextlib.nullcontext()


@contextlib.contextmanager
def out_of_memory(advice):
    """Where memory runs out, one line that says what to do."""
    try:
        yield
    except Exception as error:  # JAX and PyTorch raise their own, and Orbax wraps them
        if not isinstance(error, MemoryError) and not re.search("RESOURCE_EXHAUSTED|out of memory", str(error)):
            raise
        raise ValueError(f"out of memory; try {advice}") from None
