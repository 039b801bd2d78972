"""Command lines, and the folder of a run: lock, log, signals, resuming. Reads the disk.

    with runs.Folder(cfg) as folder:  # locks cfg.out; refuses a folder that holds another run
        folder.begin(first, settings, {"tokenizer.json": data})  # cuts the logs to step `first`
        folder.log({"step": step + 1, "loss": 3.41})  # in the loop over steps
        if folder.signal: folder.leave(step + 1)  # Ctrl-C or SIGTERM; save before it

The folder holds config.json, tokenizer.json, log.jsonl, and checkpoints/<step>/ (JAX, see
checkpoints.py) or step_<n>/ (PyTorch, in safetensors). This file writes no checkpoint, and imports
neither JAX nor PyTorch. It also reads the tokenizer in a model's folder.
"""

import contextlib
import dataclasses
import fcntl
import functools
import gzip
import inspect
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import traceback
import typing
import zlib
from pathlib import Path

# Numbers of a Config with their lowest and highest value, for `check`: neither NaN nor infinite.
Count = typing.Annotated[int, (1, 2**31 - 1)]
Natural = typing.Annotated[int, (0, 2**31 - 1)]
Positive = typing.Annotated[float, (1e-12, 1e12)]
NonNegative = typing.Annotated[float, (0, 1e12)]
Share = typing.Annotated[float, (0, 1)]
TopP = typing.Annotated[float, (1e-9, 1)]

# how a terminal shows a column of a log, others as "name 0.1234"
FORMS = {"lr": "lr {:.1e}", "tok_per_s": "{:,.0f} tok/s", "eta_min": "{:.0f} min left"}
SAVED = ".saved"  # a file in the folder of a run that has had a checkpoint
# of special tokens, in the order in which transformers adds them
ROLES = "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"


# ---- the command line --------------------------------------------------------------------------


def command(main, config_class, doc, machine=(), moved=()):
    """Run main(config) by tyro: flags are the fields of the dataclass, their comments the help.

    An error of ours or of the system becomes one line and status 1. What a library raises is a bug:
    its traceback stays, and -X dev shows every traceback. With --resume=DIR the defaults are the
    settings of that run, without the fields named in `machine`. moved says what does the work of a
    removed flag now: {"repair": "python extra/repair.py"}.
    """
    # of a GPU's memory; JAX alone takes three quarters
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    sys.stdout = sys.stdout or open(os.devnull, "w")  # None: it was closed
    status = 0
    try:
        main(parse(config_class, doc, machine, moved))
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:
        status = 141  # silently, as SIGPIPE ends other programs
    except Exception as error:
        here = Path(__file__).resolve().parent
        source = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        ours = source.resolve().parent in (here, here / "bench", here / "extra")
        # xla_bridge.py: JAX finds no device, or not that of JAX_PLATFORMS
        expected = ours or isinstance(error, OSError) or source.name == "xla_bridge.py"
        if sys.flags.dev_mode or not expected:
            raise
        message = str(error) or repr(error)
        if isinstance(error, OSError) and error.filename:
            message = f"{error.filename}: {error.strerror}"
        if getattr(error, "name", "") == "torch":
            message += "; pip install -r requirements-gpu.txt"
        print(message, file=sys.__stderr__)
        status = 1
    # At once: threads of a broken Orbax save would print tracebacks, those of gloo, under torchrun,
    # abort a closing interpreter.
    if status or ("torch" in sys.modules and "WORLD_SIZE" in os.environ):
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(status)


def lacks_memory(error):
    """Whether an error says that memory ran out, of JAX, PyTorch or the machine; Orbax wraps it."""
    return isinstance(error, MemoryError) or re.search(
        "RESOURCE_EXHAUSTED|out of memory|allocate memory|ALLOC_FAILED", str(error), re.I
    )


@contextlib.contextmanager
def enough_memory(advice):
    """An error for want of memory becomes one line with what to try; also as a decorator."""
    try:
        yield
    except Exception as error:
        if lacks_memory(error):
            raise ValueError(f"out of memory; try {advice}") from None
        raise


def parse(config_class, doc, machine, moved):
    """The Config of this program's command line. ValueError for a removed flag, or for `check`."""
    import tyro

    for i, argument in enumerate(sys.argv):
        flag, _, value = argument.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if name in moved:
            raise ValueError(f"--{name} is gone: {moved[name]}")
        if value.startswith("~/"):  # shells leave it there
            sys.argv[i] = f"{flag}={os.path.expanduser(value)}"
    read = functools.partial(
        tyro.cli, config_class, use_underscores=True, config=(tyro.conf.OmitArgPrefixes,)
    )
    if "--help" in sys.argv or "-h" in sys.argv:
        print_help(config_class, doc, read)
    cfg = read()
    if getattr(cfg, "resume", ""):
        cfg = read(default=resumed(config_class, cfg.resume, machine))
    return check(cfg)


def print_help(config_class, doc, read):
    """Print a script's docstring, wrapped at words, and tyro's flags, under the headings of its
    Config: comments such as "# ---- training". read() ends the program.
    """
    columns = min(max(shutil.get_terminal_size().columns, 40), 100)
    os.environ["COLUMNS"] = str(columns)  # tyro never ends where a terminal has one
    for paragraph in doc.strip().split("\n\n"):
        if not paragraph.startswith(" "):
            paragraph = textwrap.fill(paragraph, columns)
        print(f"{paragraph}\n")
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown):
            read()
    finally:
        flags = shown.getvalue()
        source = inspect.getsource(sys.modules[config_class.__module__])
        for title, name in re.findall(r"    # ---- (.+)\n    (\w+):", source):
            flags = re.sub(rf"^(?=  --{name}\b)", f"\n {title}\n", flags, flags=re.M)
        print(flags)


def check(cfg):
    """The Config. ValueError for a number outside the limits of its type, which is Count,
    Count | None or tuple[Count, ...].
    """
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        if dataclasses.is_dataclass(value):  # a group of flags
            check(value)
        if value is None:
            continue
        numbers = value if isinstance(value, tuple) else (value,)
        for hint in (field.type, *typing.get_args(field.type)):
            for limits in typing.get_args(hint):
                if not isinstance(limits, tuple):
                    continue
                low, high = limits
                for number in numbers:
                    if not low <= number <= high:
                        raise ValueError(f"--{field.name}={number} is not in {low} .. {high:.12g}")
    return cfg


def resumed(config_class, folder, machine=()):
    """The settings of the run in a folder, without those that `machine` names, as a Config."""
    saved = read_json(as_path(folder) / "config.json", "train")["train"] | {"out": str(folder)}
    values = {}
    for field in dataclasses.fields(config_class):
        if field.name in saved and field.name not in machine:
            value = saved[field.name]
            values[field.name] = tuple(value) if isinstance(value, list) else value
    try:
        return check(config_class(**values))
    except ValueError as error:
        raise ValueError(f"{folder} holds a run of another script or version ({error})") from None


def script(name, *flags):
    """Run another stage, which ends with us. RuntimeError if it fails."""
    with subprocess.Popen([sys.executable, Path(__file__).parent / name, *flags]) as process:
        before = signal.signal(signal.SIGTERM, lambda number, frame: process.terminate())
        try:
            status = process.wait()
        finally:
            process.terminate()  # after Ctrl-C; else it has ended
            signal.signal(signal.SIGTERM, before)
    if status:
        raise RuntimeError(f"python {name} {shlex.join(flags)} ended with exit status {status}")


# ---- files -------------------------------------------------------------------------------------


def as_path(name):
    """A path, also of a bucket, gs://... or s3://..., by etils and gcsfs or s3fs. ValueError for a
    pipe or a device.
    """
    if "://" in str(name):
        from etils import epath

        return epath.Path(name)
    path = Path(name)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(f"{name} is no regular file")
    return path


def read_json(path, *needed):
    """The JSON object in a file, with the keys `needed`. FileNotFoundError, or ValueError."""
    path = as_path(path)
    if not path.is_file():
        if path.name == "config.json":
            refuse_other_forms(path.parent)
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


def json_rows(file):
    """(line number, value) of a binary file of JSON lines, or of a list or objects on many lines.

    The file may be in gzip. The value is None where a line is no JSON in UTF-8. Lines end at line
    feeds alone: a text may hold U+2028. A byte order mark and empty lines are skipped.
    """
    packed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    if packed:
        file = gzip.open(file)
    number = 0
    lines = False  # whether the first line has shown that there is an object a line
    try:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(b"\xef\xbb\xbf")  # a byte order mark
            if not line.strip():
                continue
            value = None
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(line)
            if not lines and not isinstance(value, dict):
                yield from json_values(line + file.read(), number)
                return
            lines = True
            yield number, value
    except (EOFError, zlib.error, gzip.BadGzipFile):
        yield number + 1, None


def json_values(data, number):
    """(line number, value) of JSON values, or of the items of a list, that begin in this line."""
    try:
        text = data.decode().strip()
        closing = "]" if text.startswith("[") else ""
        end = len(closing)
        while True:
            start = re.compile(r"[\s,]*").match(text, end).end()
            number += text.count("\n", end, start)
            if text[start : start + 2] == closing:  # and nothing follows
                return
            value, end = json.JSONDecoder().raw_decode(text, start)
            yield number, value
            number += text.count("\n", start, end)
    except (ValueError, RecursionError):
        yield number, None


def read_about(folder, name):
    """The JSON object in a file of a model's folder; empty where there is no file."""
    path = as_path(folder) / name
    return read_json(path) if path.is_file() else {}


@contextlib.contextmanager
def naming(path):
    """The error of a full disk, which names no file, names this path."""
    try:
        yield
    except OSError as error:
        if error.errno and not error.filename:
            error.filename = str(path)
        raise


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
        with naming(path), open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write(path, data):
    """Write bytes, or anything else as JSON. The file is whole, or as it was."""
    if not isinstance(data, bytes):
        data = (json.dumps(data, indent=2) + "\n").encode()
    with writing(path) as file:
        file.write(data)


@contextlib.contextmanager
def new_folder(path):
    """A folder to write in, which gets its name when all went well. An error leaves nothing under
    that name.
    """
    path = Path(path).resolve()
    partial = Path(f"{path}.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with naming(path):
            yield partial
        # Everything is on disk before the name says that it is complete.
        for written in [*partial.rglob("*"), partial]:
            descriptor = os.open(written, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    except BaseException:
        for _ in range(50):  # threads of a failed Orbax save still write
            if partial.exists():
                shutil.rmtree(partial, ignore_errors=True)
                time.sleep(0.1)
        raise
    shutil.rmtree(path, ignore_errors=True)
    os.replace(partial, path)


@contextlib.contextmanager
def lock(path):
    """Hold a lock file while the process lives. BlockingIOError if another process holds it."""
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
    # In a bucket Orbax cannot rename what is complete.
    mark = "commit_success.txt" if str(folder).startswith("gs://") else ""
    found = {}
    for path in (*folder.glob("checkpoints/*"), *folder.glob("step_*")):
        step = path.name.removeprefix("step_")
        if step.isdigit() and (path / mark).exists():
            found[int(step)] = path
    return dict(sorted(found.items()))


CONVERT = "convert the Hub's files again: python convert_weights.py --source=OWNER/NAME --out=DIR"
OTHER_FORMS = {  # forms of weights that are not read, by their files, and what to do
    "meta/metadata": "a checkpoint of a run: name the folder of the run, and this --step",
    "adapter_config.json adapter_model.*": "of an adapter: merge it with peft (merge_and_unload, "
    "save_pretrained), and convert the merged model",
    "*_METADATA */*_METADATA [0-9]*/*/*_METADATA": "of Orbax, without the meta.json of "
    f"convert_weights.py: copy that, too; if another program wrote it, {CONVERT}",
    "*.pkl *.pickle *.msgpack *.npz": f"of another program: {CONVERT}",
    "*.bin *.pt *.pth *.ckpt *.h5 *.gguf": "no safetensors: save the model in that form, with "
    "save_pretrained of transformers; convert_weights.py --source=FILE.gguf --to=dream takes a GGUF",
}


def refuse_other_forms(path):
    """ValueError, with what to do, for a file or folder of weights in one of OTHER_FORMS."""
    for names, advice in OTHER_FORMS.items():
        for name in names.split():
            found = sorted(path.glob(name)) if path.is_dir() else [path]
            if found and found[0].match(name):
                raise ValueError(f"{found[0]} is {advice}")


def newest(folder, step=0):
    """(step, path) of a run's newest checkpoint, or of the one asked for. FileNotFoundError says
    which there are.
    """
    found = saved_steps(as_path(folder))
    if not found:
        refuse_other_forms(as_path(folder))
        raise FileNotFoundError(
            f"{folder} holds no checkpoint; train one, or name a folder of convert_weights.py"
        )
    step = step or max(found)
    if step not in found:
        raise FileNotFoundError(
            f"{folder} holds no checkpoint of step {step}; it has {list(found)}"
        )
    return step, found[step]


def delete_damaged(folder):
    """Delete the compiled programs that were cut short since the last call, by a kill or a full
    disk: JAX replaces no file, and would compile them in every run.
    """
    checked = folder / ".checked"
    with contextlib.suppress(OSError):  # no such folder, or none of ours
        since = checked.stat().st_mtime if checked.exists() else 0
        for path in folder.glob("*-cache"):
            if path.stat().st_mtime < since:
                continue
            data = path.read_bytes()
            try:
                if not data.startswith(b"\x28\xb5\x2f\xfd"):  # zstandard's mark, else it is zlib's
                    zlib.decompress(data)
            except zlib.error:
                path.unlink()
        checked.touch()


def read_tokenizer(path, vocab=2**31):
    """The tokenizer in a file, or in a folder, with what add_named_tokens adds. ValueError if there
    is none, or a damaged one, or one with ids from `vocab` on.
    """
    import tokenizers

    path = as_path(path)
    if path.is_dir():
        path /= "tokenizer.json"
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(path.read_bytes())
        tokenizer.no_truncation()  # as a file may have been saved with
        tokenizer.no_padding()
    except Exception as error:  # tokenizers raises nothing narrower for a broken file
        raise ValueError(
            f"{path} cannot be read ({error}); put the tokenizer.json of the model there"
        ) from None
    add_named_tokens(tokenizer, path.parent)
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= vocab:
        raise ValueError(
            f"{path} with the tokens that the files beside it name does not fit: its ids reach "
            f"{largest:,}, the model has {vocab:,}; copy its own there"
        )
    return tokenizer


def added_token(value, **flags):
    """The AddedToken of a text, or of an object of JSON as transformers writes it."""
    import tokenizers

    if isinstance(value, str):
        value = {"content": value}
    names = "single_word", "lstrip", "rstrip", "normalized", "special"
    flags = {name: value[name] for name in names if name in value} | flags
    return tokenizers.AddedToken(value["content"], **flags)


def named_tokens(folder, known=()):
    """({"bos_token": AddedToken}, [AddedToken without a role], {id: AddedToken}) of the files
    beside a tokenizer.json. ValueError for damaged ones.

    As in transformers, special_tokens_map.json and added_tokens.json count where
    tokenizer_config.json has no added_tokens_decoder, as older versions wrote it; of the second not
    the ids `known` from tokenizer.json.
    """
    keys = read_about(folder, "tokenizer_config.json")
    decoder = keys.get("added_tokens_decoder")
    if decoder is None:
        keys = keys | read_about(folder, "special_tokens_map.json")
    extra = keys.get("extra_special_tokens") or keys.get("additional_special_tokens") or []
    if isinstance(extra, dict):  # of roles
        keys = keys | extra
        extra = []
    roles = {}
    try:
        for role in (*ROLES, *keys):  # the first name of a token decides its flags
            value = keys.get(role)
            if role.endswith("_token") and isinstance(value, str | dict):  # not add_bos_token
                roles[role] = added_token(value, special=True)
        extra = [added_token(value, special=True) for value in extra]
        if decoder is not None:
            listed = {int(i): added_token(value) for i, value in decoder.items()}
        else:
            listed = {}
            special = {token.content for token in (*roles.values(), *extra)}
            for content, i in read_about(folder, "added_tokens.json").items():
                if i not in known:
                    listed[int(i)] = added_token(content, special=content in special)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"the added tokens of {folder} cannot be read: {error!r}") from None
    return roles, extra, listed


def add_named_tokens(tokenizer, folder):
    """Add the tokens that the files beside a tokenizer.json name, in the order of transformers:
    [AddedToken], those that were new or changed.

    ValueError for a token that would get another id than they say.
    """
    known = tokenizer.get_added_tokens_decoder()
    roles, extra, listed = named_tokens(folder, known)
    contents = {token.content for token in known.values()}
    unchanged = [*map(repr, known.values())]
    new = [token for _, token in sorted(listed.items()) if repr(token) not in unchanged]
    present = contents | {token.content for token in new}
    new += [token for token in (*roles.values(), *extra) if token.content not in present]
    special = {token.content for token in roles.values()}
    for token in new:
        token.special |= token.content in special
    tokenizer.add_tokens(new)
    for i, token in listed.items():
        found = tokenizer.token_to_id(token.content)
        if token.content not in contents and found != i:
            raise ValueError(
                f"{folder}: {token.content} is to have the id {i}, but it follows the tokens of "
                f"tokenizer.json as {found}; put the tokenizer.json of the model there"
            )
    return new


def end_ids(*files):
    """The ids of `eos_token_id`, a number or a list, in files of a model as {key: value}; each
    once, in order.
    """
    ids = []
    for keys in files:
        value = keys.get("eos_token_id")
        ids += value if isinstance(value, list) else [value]
    ids = [i for i in ids if i is not None]
    if any(type(i) is not int for i in ids):
        raise ValueError(f"eos_token_id is {ids}, neither an id nor a list of ids")
    return tuple(dict.fromkeys(ids))


def ends_of_text(folder, tokenizer):
    """The ids that end a text of a PythonCoder: by generation_config.json, else <|endoftext|>; ()
    for none.
    """
    keys = read_about(folder, "generation_config.json")
    keys.setdefault("eos_token_id", tokenizer.token_to_id("<|endoftext|>"))
    return end_ids(keys)


# ---- the folder of a run -----------------------------------------------------------------------


def check_out(cfg):
    """An OSError if cfg.out cannot take this run; trainers ask before they prepare data."""
    out = as_path(cfg.out)
    goes_on = cfg.resume and as_path(cfg.resume).resolve() == out.resolve()
    if saved_steps(out):
        if not goes_on:
            raise FileExistsError(
                f"{out} already holds a run: --resume={out}, or choose another --out"
            )
    elif (out / SAVED).exists():
        raise FileNotFoundError(
            f"the checkpoints of {out} are gone; choose another --out, without --resume"
        )
    for name in ("meta.json", "bundle.json", "model*.safetensors*"):
        for path in out.glob(name):
            raise FileExistsError(
                f"{out} is no folder of a run, it holds {path.name}; choose another --out"
            )


class Folder:
    """The folder cfg.out, locked. cfg has out, resume and wandb; unit is what the run counts:
    "step" or "round".

    Of several processes only rank 0 writes and prints. With hosts > 1 (JAX) SIGTERM belongs to
    jax.distributed, which tells all at which step to stop.
    """

    def __init__(self, cfg, unit="step", rank=0, hosts=1):
        self.cfg = cfg
        self.out = as_path(cfg.out)
        self.unit = unit
        self.rank = rank
        self.hosts = hosts
        self.exits = contextlib.ExitStack()  # what __exit__ undoes
        self.tracker = None  # a run of wandb
        self.signal = ""  # name of the signal that asked to stop
        self.asked_at = None  # when it came

    def __enter__(self):
        check_out(self.cfg)
        self.out.mkdir(parents=True, exist_ok=True)
        if isinstance(self.out, Path):  # a bucket has no locks
            self.exits.enter_context(lock(self.out / f".lock{self.rank}"))
        return self

    def __exit__(self, kind, error, trace):
        self.exits.close()
        # Ctrl-C also ends child processes, such as a compiler that PyTorch waits for.
        if self.asked_at and kind and not issubclass(kind, InterruptedError | KeyboardInterrupt):
            raise InterruptedError(
                f"stopped in the middle of a {self.unit} ({error!r:.200}); "
                f"go on with --resume={self.out}"
            ) from error

    def begin(self, first, settings, files=None):
        """Write config.json and files, {name: bytes or JSON}. From here on a signal asks the run to
        stop, two end it.

        Logs and samples after step `first`, the last checkpoint, are cut off: the run writes them
        again.
        """
        numbers = [signal.SIGINT]
        if self.hosts == 1:
            numbers.append(signal.SIGTERM)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
            numbers.append(signal.SIGHUP)
        for number in numbers:
            before = signal.signal(number, self.on_signal)
            self.exits.callback(signal.signal, number, before)
        if self.rank:
            return
        last = first if saved_steps(self.out) else -1  # a folder without a checkpoint begins anew
        for name in ("log.jsonl", "rounds.jsonl", "samples.txt"):
            path = self.out / name
            if path.exists():
                write(path, until(last, path.read_bytes(), self.unit))
        write(self.out / "config.json", settings)
        for name, data in (files or {}).items():
            write(self.out / name, data)
        if self.cfg.wandb:
            self.track(settings)

    def track(self, settings):
        """Log to wandb as well; a resumed run goes on in its own curve."""
        import wandb

        run_id = self.out / "wandb_id"
        if not (self.cfg.resume and run_id.exists()):
            write(run_id, os.urandom(8).hex().encode())
        self.tracker = wandb.init(
            project=self.cfg.wandb, dir=str(self.out), id=run_id.read_text(), config=settings,
            name=self.out.name, resume="allow",
        )  # fmt: skip
        self.exits.callback(self.tracker.finish)

    def on_signal(self, number, frame):
        """Note that the run is asked to stop; the second time, end it."""
        if self.asked_at:
            # torchrun hands on a Ctrl-C that its processes had already
            if time.monotonic() - self.asked_at > 1:
                raise KeyboardInterrupt
            return
        self.asked_at = time.monotonic()
        name = signal.Signals(number).name
        with contextlib.suppress(OSError):
            print(
                f"{name}: saving after this {self.unit}; once more to end at once", file=sys.stderr
            )
        if self.hosts > 1:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self.signal = name

    def log(self, row):
        """Append a row of metrics to log.jsonl, the source of every plot and table, and print as
        many of its columns as fit.
        """
        if self.rank:
            return
        done = row[self.unit]
        total = getattr(self.cfg, f"{self.unit}s") or done
        line = f"{self.unit} {done:,}/{total:,}"
        if sys.stdout.isatty():
            line = f"[{'#' * (10 * done // total):.<10}] {line}"
        for name, value in row.items():
            shown = "  " + FORMS.get(name, f"{name} {{:.4g}}").format(value)
            if name != self.unit and len(line + shown) <= 100:
                line += shown
        with contextlib.suppress(OSError):  # a terminal or pipe that is closed ends no run
            print(line, flush=True)
        self.append("log.jsonl", json.dumps(row) + "\n")
        if self.tracker:
            self.tracker.log(row, step=done)

    def append(self, name, text):
        """Add text to a file of the folder."""
        if self.rank:
            return
        path = self.out / name
        if not isinstance(path, Path):  # objects in a bucket cannot grow
            path.write_text((path.read_text() if path.exists() else "") + text)
            return
        with naming(path), open(path, "a", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)

    def leave(self, done):
        """End the program after a signal, when `done` is saved."""
        raise InterruptedError(
            f"{self.signal or 'a signal'}: saved {self.unit} {done}; go on with --resume={self.out}"
        )


def until(last, data, unit):
    """The bytes of a log up to step `last`: of rows that begin as {"step": 7, or of samples, each
    after a line ---- step 7. A kill cuts the last line short.
    """
    for match in re.finditer(rf'^({{"{unit}": |---- step )(\d+)[,}}\n]'.encode(), data, re.M):
        if int(match[2]) > last:
            return data[: match.start()]
    return data[: data.rfind(b"\n") + 1]


# ---- what has to agree -------------------------------------------------------------------------


def check_tensors(found, want, where):
    """Raise ValueError that names missing, unexpected and misshapen tensors. Both are {name:
    shape}.
    """
    wrong = []
    for name in found.keys() | want.keys():
        if name not in found:
            wrong.append(f"missing {name}")
        elif name not in want:
            wrong.append(f"unexpected {name}")
        elif tuple(found[name]) != tuple(want[name]):
            wrong.append(f"{name} has shape {tuple(found[name])}, not {tuple(want[name])}")
    if wrong:
        raise ValueError(
            f"{len(wrong)} of the tensors of {where} do not fit the model: "
            f"{'; '.join(sorted(wrong)[:3])}"
        )


def check_resumed(saved, ours, where, fixed, unit="step"):
    """Print which settings changed since the checkpoint `where`. ValueError if model, data or one
    of `fixed` did.
    """
    ours = json.loads(json.dumps(ours))  # tuples become lists, as they did in what was saved
    there = saved["model"]
    here = ours["model"]
    other = []
    for name in there | here:
        if there.get(name, []) != here.get(name, []):  # earlier versions lack some that are empty
            other.append(f"{name} {there.get(name)} there, {here.get(name)} here")
    changed = []
    for name, value in ours["train"].items():
        before = saved["train"].get(name, "")
        if before in ("", value) or name in ("out", "resume"):
            continue
        changed.append(f"{name} {before} -> {value}")
        if name in fixed:
            other.append(f"--{name} {before} there, {value} here")
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
        print(f"changed since {where}:", ", ".join(changed))


def first_line(error):
    """The first line of an error's message."""
    return str(error).partition("\n")[0] or repr(error)
