"""The speedrun: 2,400 processor seconds of training (twenty minutes on two cores), then bits per byte of held-out text.

    python bench/speedrun.py stories --text=tinystories_sample.txt      # MDLM
    python bench/speedrun.py code                                       # PythonCoder on this Python's standard library
    python bench/speedrun.py code --change="AdamW" --flags="--optimizer=adamw --lr=1e-3"

Beat the last row: change the code, or the trainer's flags, and run the same command. Processor seconds of the trainer
and of what it compiles with count, so that a busy machine changes little; preparing the data and scoring do not. A run
that took more is refused. Appends a row to results/speedrun.jsonl and writes results/speedrun.md from it.

Stories are the 2.3 MB of TinyStories that two public repositories ship (the first 10,000 lines of the GPT-4 version's
training split and the head of the first version's, interleaved), 56 of 2,653 held out; their figure is a bound, with
two standard errors of its noise. Code is the standard library without its tests, 14 files held out; its figure is
exact. What was tried and did not help stands in LOG.md.
"""

import dataclasses
import datetime
import json
import resource
import shlex
import subprocess
import sys
import typing
from pathlib import Path

import tyro
from record import RESULTS, cpu_name

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import runs

BUDGET_S = 2400
# The best recipe so far: flags of data_prep.py and of the trainer.
DATA = {"stories": "--vocab_size=2048", "code": "--vocab_size=2048 --seq_len=512"}
TRAIN = {"stories": "--model=tiny --tie --batch_size=16 --steps=4500", "code": "--model=tiny --steps=3100"}


@dataclasses.dataclass(frozen=True)
class Config:
    track: tyro.conf.Positional[typing.Literal["stories", "code"]] = "stories"
    text: str = "tinystories_sample.txt"  # file of stories, for the track "stories"
    change: str = ""  # what is new about this run, for the table; "" leaves the run out of it
    data: str = ""  # flags for data_prep.py, instead of those of the best recipe
    flags: str = ""  # flags for the trainer, behind those of the best recipe
    out: str = "out/speedrun"  # folder of data and run, one of each for a track; a new run needs a new one


def script(name, *flags):
    subprocess.run([sys.executable, str(ROOT / name), *flags], cwd=ROOT, check=True)


def processor_seconds():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def scored(track, folder, data):
    """The scores that --eval_only of the trainer prints, over all held-out rows."""
    settings = {"eval_only": folder, "data": data, "eval_rows": 10**9}
    if track == "stories":
        import train_gpu

        return train_gpu.main(train_gpu.Config(eval_draws=32, **settings))
    import train_tpu

    return train_tpu.main(train_tpu.Config(**settings))


def table(rows):
    lines = ["| track | date | commit | change | bits per byte | tokens seen | processor s | CPU | command |"]
    lines.append("|" + "---|" * 9)
    for row in rows:
        spread = f" ± {row['spread']:.3f}" if row["spread"] else ""
        size = f"{row['tokens_seen'] / 1e6:.1f} M | {row['processor_s']:,.0f}"
        cells = row["track"], row["date"], row["commit"], row["change"], f"{row['bits_per_byte']:.3f}{spread}", size
        lines.append(f"| {' | '.join(cells)} | {row.get('cpu', 'not recorded')} | `{row['command']}` |")
    return "\n".join(lines) + "\n"


def main(cfg):
    data, out = f"{cfg.out}/{cfg.track}/data", f"{cfg.out}/{cfg.track}/run"
    if cfg.track == "stories" and not Path(cfg.text).is_file():
        raise FileNotFoundError(f"--text={cfg.text} is no file; it holds stories with <|endoftext|> between them")
    if (ROOT / out).exists():  # its budget is that of one run from the start
        raise FileExistsError(f"{out} already holds a run; take another --out")
    source = ["text", str(Path(cfg.text).absolute())] if cfg.track == "stories" else ["python"]
    script("data_prep.py", *source, f"--out={data}", *shlex.split(cfg.data or DATA[cfg.track]))

    # train, within the budget
    trainer = "train_gpu.py" if cfg.track == "stories" else "train_tpu.py"
    before = processor_seconds()
    script(trainer, f"--data={data}", f"--out={out}", *shlex.split(f"{TRAIN[cfg.track]} {cfg.flags}"))
    seconds = processor_seconds() - before

    # score the last checkpoint on all held-out rows
    score = scored(cfg.track, str(ROOT / out), str(ROOT / data))
    split = json.loads((ROOT / data / "meta.json").read_text())["splits"]["train"]
    trained = json.loads((ROOT / out / "config.json").read_text())["train"]
    seen = trained["steps"] * trained["batch_size"] * split["tokens"] / split["rows"]
    error = score.get("standard_error", 0)  # in nats per token
    spread = 2 * error / score["heldout_nats"] * score["bits_per_byte"]
    print(f"{score['bits_per_byte']:.4f} bits per byte in {seconds:,.0f} of {BUDGET_S:,} processor seconds")
    if seconds > BUDGET_S:
        raise ValueError(f"{seconds:,.0f} processor seconds are more than {BUDGET_S:,}; lower --steps with --flags")

    # the table
    if cfg.change:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        row = {"track": cfg.track, "date": datetime.date.today().isoformat(), "commit": commit.stdout.strip()}
        row |= {"change": cfg.change, "bits_per_byte": score["bits_per_byte"], "spread": spread, "tokens_seen": seen}
        flags = [flag for flag in sys.argv[1:] if not flag.startswith(("--change", "--out"))]
        row |= {"processor_s": seconds, "cpu": cpu_name(), "command": "python bench/speedrun.py " + shlex.join(flags)}
        with open(RESULTS / "speedrun.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        rows = [json.loads(line) for line in (RESULTS / "speedrun.jsonl").read_text().splitlines()]
        rows.sort(key=lambda row: (row["track"], -row["bits_per_byte"]))
        (RESULTS / "speedrun.md").write_text(table(rows))


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
