"""The figures and the page of a finished run of train_gpu.py: curve, held-out bits per byte, noise
levels, samples.

    python bench/mdlm_run.py --ckpt=out/stories         # two minutes; the run is the README's

Writes mdlm_run.png, mdlm_noise.png, mdlm_run.jsonl (the run's log), mdlm_run.md and an entry of
cpu.json, all under bench/results/. The unigram value is the held-out text's cross-entropy under the
token frequencies of the training text.
"""

import dataclasses
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from record import RESULTS, record

import model_mdlm as mdlm
import runs
import train_gpu
from rows import Rows

PROMPTS = [
    ["--prompt=Once upon a time, there was a little girl named Lily."],
    ["--prompt=One day, [MASK:40] They were very happy."],
    ["--prompt=Tom and his dog", "--sampler=max_prob", "--temperature=0.7"],
]


@dataclasses.dataclass(frozen=True)
class Config:
    ckpt: str = "out/stories"  # folder of the run
    # bench/results/<file>.json; mdlm_run.md and the rest belong to "cpu", else <file>.md
    file: str = "cpu"
    device: str = ""  # what the run ran on; "" is this CPU
    max_new: int = 100  # tokens to fill in each sample


def unigram(folder):
    """Nats per token of the held-out rows under the training rows' token frequencies, plus one for
    every id.
    """
    counts = []
    for split in ("train", "heldout"):
        rows = Rows(folder, split)
        token_RL = rows.read(np.arange(rows.total))[0]
        counts.append(np.bincount(token_RL.ravel(), minlength=rows.meta["vocab_size"]))
        counts[-1][[mdlm.PAD, mdlm.BOS]] = 0  # they are no text
    train_V, held_V = counts
    # cross-entropy of the held-out counts, and in bits per byte of their text
    nats = -(held_V * np.log((train_V + 1) / (train_V + 1).sum())).sum() / held_V.sum()
    return nats, nats * held_V.sum() / math.log(2) / rows.meta["splits"]["heldout"]["bytes"]


def plot_noise(levels, title, path):
    _, axis = plt.subplots(figsize=(7, 4))
    axis.plot(
        [level["mask_rate"] for level in levels], [level["masked_ce"] for level in levels], "o-"
    )
    axis.set(xlabel="share of tokens masked", ylabel="nats per masked token", title=title)
    axis.grid(alpha=0.3)
    plt.tight_layout()
    plt.savefig(path, dpi=120)


def main(cfg):
    # the run's own log, and its last checkpoint scored with many draws
    run = Path(cfg.ckpt)
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    settings = json.loads((run / "config.json").read_text())
    train, held = ([r for r in rows if key in r] for key in ("loss", "heldout_nats"))
    final = train_gpu.main(train_gpu.Config(eval_only=str(run), eval_rows=10**9, eval_draws=32))
    name, noise = (
        ("mdlm_run", "mdlm_noise") if cfg.file == "cpu" else (cfg.file, f"{cfg.file}_noise")
    )
    plot_noise(final["by_noise"], f"{run.name}, step {final['step']}", RESULTS / f"{noise}.png")
    unigram_nats, unigram_bits = unigram(settings["data"])

    # figure: loss of each step, bound of the held-out stories, unigram
    _, axis = plt.subplots(figsize=(8, 4.5))
    axis.plot(
        [r["step"] for r in train],
        [r["loss"] for r in train],
        lw=0.6,
        alpha=0.6,
        label="training, one step",
    )
    axis.plot(
        [r["step"] for r in held],
        [r["heldout_nats"] for r in held],
        "o-",
        ms=4,
        label="held-out stories",
    )
    axis.axhline(unigram_nats, ls="--", c="grey", label="unigram")
    title = f"{final['bits_per_byte']:.3f} bits per byte at the end, unigram {unigram_bits:.3f}"
    axis.set(xlabel="optimizer step", ylabel="bound, nats per token", title=title)
    axis.legend()
    axis.grid(alpha=0.3)
    plt.tight_layout()
    plt.savefig(RESULTS / f"{name}.png", dpi=120)
    shutil.copy(run / "log.jsonl", RESULTS / f"{name}.jsonl")

    # page: samples with the commands that wrote them
    text = ["# Samples, unedited\n"]
    for args in PROMPTS:
        args = [*args, f"--max_new={cfg.max_new}"]
        command = [sys.executable, str(ROOT / "inference_jetson.py"), f"--bundle={run}", *args]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        shown = " ".join(
            f'{a.split("=", 1)[0]}="{a.split("=", 1)[1]}"' if " " in a else a for a in args
        )
        text.append(
            f"```\n$ python inference_jetson.py --bundle={run} {shown}\n{done.stdout}{done.stderr}```\n"
        )
    (RESULTS / f"{name}.md").write_text("\n".join(text))

    speed = np.quantile([r["tok_per_s"] for r in train[2:]], [0.5, 0.1, 0.9]).tolist()
    record(
        cfg.file,
        f"mdlm {settings['train']['model']} run on TinyStories, held-out bits per byte",
        final["bits_per_byte"],
        "bits per byte",
        device=cfg.device,
        unigram=unigram_bits,
        nats_per_token=final["heldout_nats"],
        standard_error=final["standard_error"],
        steps=final["step"],
        tok_per_s=dict(zip(("median", "p10", "p90"), speed, strict=True)),
        settings=settings["train"],
    )


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
