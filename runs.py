"""A run: command line, folder, lock, log, signals; the tokenizer in a model's folder.

    with runs.Folder(cfg) as run:                      # locks cfg.out; refuses a folder that holds another run
        run.begin(first, settings, {"tokenizer.json": data})    # writes config.json, cuts the logs to step `first`
        run.log({"step": step + 1, "loss": 3.41})   # in the loop over steps
        if run.signal: run.leave(step + 1)          # Ctrl-C or SIGTERM; save before it

The folder of a run holds config.json, tokenizer.json, log.jsonl, and checkpoints/<step>/ (JAX, see
checkpoints.py) or step_<n>/ (PyTorch, in safetensors). This file imports neither JAX nor PyTorch.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import io
import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
import traceback
import typing
from pathlib import Path

# Numbers of a Config with their lowest and highest value, for `check`: neither NaN nor infinite.
Count, Natural = typing.Annotated[int, (1, 2**31 - 1)], typing.Annotated[int, (0, 2**31 - 1)]
Positive, NonNegative = typing.Annotated[float, (1e-12, 1e12)], typing.Annotated[float, (0, 1e12)]
Share, TopP = typing.Annotated[float, (0, 1)], typing.Annotated[float, (1e-9, 1)]
SAVED = ".saved"  # a file in the folder of a run that has had a checkpoint


def check(cfg):
    """The Config. ValueError for a number outside the limits in its annotation, which may be Count
    or Count | None.
    """
    for name, hint in typing.get_type_hints(type(cfg), include_extras=True).items():
        value = getattr(cfg, name)
        if dataclasses.is_dataclass(value):
            check(value)
        known = [
            note
            for part in (hint, *typing.get_args(hint))
            for note in getattr(part, "__metadata__", ())
        ]
        for low, high in (note for note in known if isinstance(note, tuple)):
            for x in value if isinstance(value, tuple) else (value,):
                if x is not None and not low <= x <= high:
                    raise ValueError(
                        f"--{name}={x} is not in {low} .. {high:{',' if type(high) is int else 'g'}}"
                    )
    return cfg


def command(main, config_class, doc, machine=(), moved=None):
    """Run main(config) by tyro: flags are the fields of the dataclass, their comments the help.

    With --resume=DIR the defaults are the settings of that run, without the fields named in
    `machine`. An error of ours or of the system is one line and status 1. What a library raises is
    a bug: its traceback stays; -X dev shows all. moved says of flags that are gone what does their
    work now: {"repair": "python extra/repair.py"}.
    """
    import tyro

    # of a GPU's memory; JAX alone takes three quarters
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    status, poll = 0, select.poll()
    try:
        sys.argv = [
            re.sub(r"^(--[\w-]+=)~(?=/)", lambda m: m[1] + os.path.expanduser("~"), x)
            for x in sys.argv
        ]
        for argument in sys.argv[1:]:
            name = argument.lstrip("-").partition("=")[0].replace("-", "_")
            if argument.startswith("--") and name in (moved or {}):
                raise ValueError(f"--{name} is gone: {moved[name]}")
        default = resumed(config_class, sys.argv[1:], machine)
        main(
            check(
                tyro.cli(
                    config_class,
                    default=default,
                    description=doc,
                    config=(tyro.conf.OmitArgPrefixes,),
                )
            )
        )
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = 130
    except Exception as error:
        # nobody reads our output any more, as after `| head`
        if isinstance(error, BrokenPipeError):
            poll.register(sys.stdout.fileno(), 0)
            if any(event & select.POLLERR for _, event in poll.poll(0)):
                os._exit(141)  # silently, as SIGPIPE ends other programs
        # An error of ours is raised by a line of ours.
        raised, here = (
            Path(traceback.extract_tb(error.__traceback__)[-1].filename),
            Path(__file__).resolve().parent,
        )
        ours = isinstance(error, OSError) or (
            raised.is_file() and raised.resolve().parent in (here, here / "bench", here / "extra")
        )
        if sys.flags.dev_mode or not ours:
            raise
        advice = (
            "; pip install -r requirements-gpu.txt" if getattr(error, "name", "") == "torch" else ""
        )
        print((str(error) or repr(error)) + advice, file=sys.__stderr__)
        status = 1
    # At once: threads of a broken Orbax save would print tracebacks, those of gloo abort a closing
    # interpreter.
    if status or int(os.environ.get("WORLD_SIZE", 1)) > 1:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(status)


def resumed(config_class, arguments, machine=()):
    """The defaults of a command line: those of the class, or the settings of the run that --resume
    names.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume", nargs="?")
    folder = parser.parse_known_args(arguments)[0].resume
    if not folder or "resume" not in {field.name for field in dataclasses.fields(config_class)}:
        return config_class()
    saved = read_json(as_path(folder) / "config.json", "train")["train"] | {"out": folder}
    return settings_of(config_class, saved, machine)


def settings_of(config_class, saved, machine=()):
    """A config of saved settings, without those that `machine` names; a group of flags is a
    dictionary in it.
    """
    values = {}
    for field in dataclasses.fields(config_class):
        if field.name in saved and field.name not in machine:
            value = saved[field.name]
            if dataclasses.is_dataclass(field.default):
                value = settings_of(type(field.default), value, machine)
            values[field.name] = tuple(value) if isinstance(value, list) else value
    return config_class(**values)


def script(name, *flags):
    """Run another stage as a program, which gets our Ctrl-C and SIGTERM. RuntimeError if it
    fails.
    """
    command = [sys.executable, str(Path(__file__).parent / name), *flags]
    with subprocess.Popen(command) as process, contextlib.ExitStack() as exits:
        for number in (signal.SIGINT, signal.SIGTERM):
            exits.callback(
                signal.signal,
                number,
                signal.signal(number, lambda number, _: process.send_signal(number)),
            )
        if status := process.wait():
            raise RuntimeError(
                f"{shlex.join(['python', name, *flags])} ended with exit status {status}"
            )


def as_path(name):
    """A path, also of a bucket, gs://... or s3://..., by etils and gcsfs or s3fs. ValueError for a
    pipe or a device.
    """
    if "://" in str(name):
        from etils import epath

        return epath.Path(name)
    if os.path.exists(name) and not (os.path.isfile(name) or os.path.isdir(name)):
        raise ValueError(f"{name} is no regular file")
    return Path(name)


def read_json(path, *needed):
    """The JSON object in a file. FileNotFoundError; ValueError if it is none, or lacks one of the
    keys `needed`.
    """
    path = as_path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist; is {path.parent} the folder that you mean?"
        )
    try:
        found = json.loads(path.read_bytes())
        missing = set(needed) - found.keys()
    except (ValueError, AttributeError, RecursionError):
        raise ValueError(f"{path} is damaged: it is not a JSON object") from None
    if missing:
        raise ValueError(
            f"{path} is damaged or another file: it has no {' and no '.join(sorted(missing))}"
        )
    return found


@contextlib.contextmanager
def writing(path):
    """A file to write bytes to, which gets its name when all is written and on disk. An error
    leaves nothing.
    """
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
    except OSError as error:
        if error.errno:
            error.filename = error.filename or str(path)  # a full disk names no file
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write(path, data):
    """Write bytes, or anything else as JSON. The file is whole, or as it was."""
    with writing(path) as file:
        file.write(
            data if isinstance(data, bytes) else (json.dumps(data, indent=2) + "\n").encode()
        )


@contextlib.contextmanager
def new_folder(path):
    """A folder to write in, which gets its name when all went well; an error leaves nothing under
    that name.
    """
    path, partial = Path(path).resolve(), Path(f"{Path(path).resolve()}.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        # Everything is on disk before the name says that it is complete.
        for written in [*partial.rglob("*"), partial]:
            descriptor = os.open(written, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    except BaseException as error:
        for _ in range(50):  # threads of a failed Orbax save still write
            if partial.exists():
                shutil.rmtree(partial, ignore_errors=True)
                time.sleep(0.1)
        if isinstance(error, OSError) and error.errno:
            error.filename = error.filename or str(path)  # a full disk names no file
        raise
    shutil.rmtree(path, ignore_errors=True)
    os.replace(partial, path)


@contextlib.contextmanager
def lock(path):
    """Hold a lock file; the lock ends with the process. BlockingIOError if another process holds
    it.
    """
    if not isinstance(path, str | Path):  # a bucket has no locks
        yield
        return
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                f"another process is writing ({path}): wait, or choose another --out"
            ) from None
        yield


def saved_steps(folder):
    """{step: path} of the finished checkpoints of a run, in order: checkpoints/<step>/ (JAX) or
    step_<n>/ (PyTorch).
    """
    names = [
        (p.name.removeprefix("step_"), p)
        for p in (*folder.glob("checkpoints/*"), *folder.glob("step_*"))
    ]
    # there Orbax cannot rename what is complete
    mark = "commit_success.txt" if str(folder).startswith("gs://") else ""
    return dict(
        sorted(
            (int(name), path) for name, path in names if name.isdigit() and (path / mark).exists()
        )
    )


def newest(folder, step=0):
    """(step, path) of a run's newest checkpoint, or of the one asked for. FileNotFoundError says
    which there are.
    """
    found = saved_steps(as_path(folder))
    if not found:
        raise FileNotFoundError(
            f"{folder} holds no checkpoint; train one, or name a folder of convert_weights.py"
        )
    if (step := step or max(found)) not in found:
        raise FileNotFoundError(
            f"{folder} holds no checkpoint of step {step}; it has {list(found)}"
        )
    return step, found[step]


def read_tokenizer(folder, vocab=2**31):
    """The tokenizer in a folder. ValueError if there is none, or a damaged one, or one with ids
    from `vocab` on.
    """
    import tokenizers

    path = as_path(folder) / "tokenizer.json"
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(as_path(path).read_bytes())
        tokenizer.no_truncation()  # as a file may have been saved with
        tokenizer.no_padding()
    except Exception as error:  # tokenizers raises nothing narrower for a broken file
        raise ValueError(
            f"{path} cannot be read ({error}); put the tokenizer.json of the model there"
        ) from None
    if (largest := max(tokenizer.get_vocab().values(), default=0)) >= vocab:
        raise ValueError(
            f"{path} does not fit: its ids reach {largest:,}, the model has {vocab:,}; copy its own there"
        )
    return tokenizer


class Folder:
    """The folder cfg.out, locked. cfg has out, resume and wandb; unit is what the run counts:
    "step" or "round".

    Of several processes only rank 0 writes and prints. With hosts > 1 (JAX) SIGTERM belongs to
    jax.distributed, which tells all at which step to stop.
    """

    def __init__(self, cfg, unit="step", rank=0, hosts=1):
        self.cfg, self.out, self.unit, self.rank, self.hosts = (
            cfg,
            as_path(cfg.out),
            unit,
            rank,
            hosts,
        )
        self.exits, self.tracker, self.signal, self.asked_at = (
            contextlib.ExitStack(),
            None,
            "",
            None,
        )

    def __enter__(self):
        source = as_path(self.cfg.resume or self.out)
        if saved_steps(self.out) and not (
            self.cfg.resume and source.resolve() == self.out.resolve()
        ):
            raise FileExistsError(
                f"{self.out} already holds a run: --resume={self.out}, or choose another --out"
            )
        if gone := [
            folder
            for folder in (source, self.out)
            if (folder / SAVED).exists() and not saved_steps(folder)
        ]:
            raise FileNotFoundError(
                f"the checkpoints of {gone[0]} are gone; choose another --out, without --resume"
            )
        if found := [
            path
            for x in ("meta.json", "bundle.json", "model*.safetensors*")
            for path in self.out.glob(x)
        ]:
            raise FileExistsError(
                f"{self.out} is no folder of a run, it holds {found[0].name}; choose another --out"
            )
        self.out.mkdir(parents=True, exist_ok=True)
        self.exits.enter_context(lock(self.out / f".lock{self.rank}"))
        return self

    def __exit__(self, kind, error, trace):
        self.exits.close()
        # A Ctrl-C in a terminal also ends child processes, such as a compiler that PyTorch waits
        # for.
        if (
            self.asked_at
            and isinstance(error, Exception)
            and not isinstance(error, InterruptedError)
        ):
            after = (
                f"go on with --resume={self.out}"
                if saved_steps(self.out)
                else "nothing was saved yet"
            )
            raise InterruptedError(
                f"stopped in the middle of a {self.unit} ({error!r:.200}); {after}"
            ) from error

    def begin(self, first, settings, files=None):
        """Write config.json and files, {name: bytes or JSON}. From here on a signal asks the run to
        stop, two end it.

        Logs and samples after step `first`, the last checkpoint, are cut off: the run writes them
        again.
        """
        for number in {signal.SIGINT, signal.SIGHUP} | (
            set() if self.hosts > 1 else {signal.SIGTERM}
        ):
            # nohup ignores it
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self.exits.callback(signal.signal, number, signal.signal(number, self.on_signal))
        if self.rank:
            return
        last = first if saved_steps(self.out) else -1  # a folder without a checkpoint begins anew
        for path in (self.out / name for name in ("log.jsonl", "rounds.jsonl", "samples.txt")):
            if path.exists():
                write(path, rows_until(last, path, self.unit))
        for name, data in {"config.json": settings, **(files or {})}.items():
            write(self.out / name, data)
        if self.cfg.wandb:
            import wandb

            # of its own: another run in a folder of this name is another curve
            run_id = self.out / "wandb_id"
            if not (self.cfg.resume and run_id.exists()):
                write(run_id, os.urandom(8).hex().encode())
            where = {
                "project": self.cfg.wandb,
                "dir": str(self.out),
                "name": self.out.name,
                "id": run_id.read_text(),
            }
            self.tracker = wandb.init(config=settings, resume="allow", **where)
            self.exits.callback(self.tracker.finish)

    def on_signal(self, number, frame):
        now, name = time.monotonic(), signal.Signals(number).name
        if self.asked_at is None:
            self.asked_at = now
            with contextlib.suppress(OSError):
                print(
                    f"{name}: saving after this {self.unit}; once more to end at once",
                    file=sys.stderr,
                )
            if self.hosts > 1:
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                self.signal = name
        elif (
            now - self.asked_at > 1
        ):  # torchrun hands on a Ctrl-C that its processes have had already
            raise KeyboardInterrupt

    def log(self, row):
        """Print a row of metrics and append it to log.jsonl, the source of every plot and table."""
        if self.rank:
            return
        shown = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v:,}" for k, v in row.items())
        with contextlib.suppress(OSError):  # a terminal or pipe that is closed ends no run
            print(" | ".join(shown), flush=True)
        self.append("log.jsonl", json.dumps(row) + "\n")
        if self.tracker:
            self.tracker.log(row, step=row[self.unit])

    def append(self, name, text):
        """Add text to a file of the folder."""
        if self.rank:
            return
        path = self.out / name
        if isinstance(path, Path):
            try:
                with open(path, "a", encoding="utf-8", errors="surrogateescape") as file:
                    file.write(text)
            except OSError as error:
                # a full disk names no file
                raise OSError(error.errno, error.strerror, str(path)) from None
        else:  # objects in a bucket cannot grow
            path.write_text((path.read_text() if path.exists() else "") + text)

    def leave(self, done):
        """End the program after a signal, when `done` is saved."""
        raise InterruptedError(
            f"{self.signal or 'a signal'}: saved {self.unit} {done}; go on with --resume={self.out}"
        )


def rows_until(last, path, unit):
    """The bytes of a log, or of samples.txt, up to step `last`. ValueError names a damaged line."""
    data, rows = path.read_bytes(), []
    if path.name == "samples.txt":
        later = (
            m.start() for m in re.finditer(rb"^---- step (\d+)$", data, re.M) if int(m[1]) > last
        )
        return data[: next(later, len(data))]
    for number, line in enumerate(data.split(b"\n")[:-1], 1):  # a kill cuts the last one short
        try:
            rows += [line + b"\n"] if json.loads(line)[unit] <= last else []
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{path}, line {number} is damaged: it is no row of a {unit}; delete the line"
            ) from None
    return b"".join(rows)


def check_tensors(found, want, where):
    """Raise ValueError that names missing, unexpected and misshapen tensors. Both are {name:
    shape}.
    """
    wrong = [f"missing {name}" for name in want.keys() - found.keys()]
    wrong += [f"unexpected {name}" for name in found.keys() - want.keys()]
    shapes = {name: (tuple(found[name]), tuple(want[name])) for name in want.keys() & found.keys()}
    wrong += [
        f"{name} has shape {theirs}, not {ours}"
        for name, (theirs, ours) in shapes.items()
        if theirs != ours
    ]
    if wrong:
        raise ValueError(
            f"{len(wrong)} of the tensors of {where} do not fit the model: {'; '.join(sorted(wrong)[:3])}"
        )


def check_resumed(saved, ours, where, fixed=(), unit="step"):
    """Print which settings changed since the checkpoint `where`. ValueError if model, data or one
    of `fixed` did.
    """
    ours = json.loads(json.dumps(ours))  # tuples become lists, as they did in what was saved
    then, now, there, here = saved["train"], ours["train"], saved["model"], ours["model"]
    changed = [
        name
        for name in now
        if then.get(name, "") not in ("", now[name]) and name not in ("out", "resume")
    ]
    other = [
        f"{k} {there.get(k)} there, {here.get(k)} here"
        for k in there | here
        if there.get(k) != here.get(k)
    ]
    other += [f"--{name} {then[name]} there, {now[name]} here" for name in changed if name in fixed]
    if other:
        raise ValueError(
            f"{where} is of another model: {'; '.join(other)}; leave that as it was, or start anew"
        )
    if saved.get("data") != ours.get("data"):
        raise ValueError(
            f"{where} was trained on other data; pass its --data, or start anew with another --out"
        )
    if Path(where).name.removeprefix("step_") != str(saved[unit]):
        raise ValueError(
            f"{where} holds {unit} {saved[unit]}; rename it, or delete it to use the one before"
        )
    if changed:
        print(
            f"changed since {where}:",
            ", ".join(f"{name} {then[name]} -> {now[name]}" for name in changed),
        )


def first_line(error):
    return str(error).splitlines()[0] if str(error) else repr(error)
