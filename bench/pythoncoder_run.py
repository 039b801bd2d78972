"""The figures and the page of a finished run of train_tpu.py: curve, held-out bits per byte,
drafts, completions.

    python train_tpu.py && python bench/pythoncoder_run.py        # the run half an hour, this a minute

Writes pythoncoder_run.png, pythoncoder_run.jsonl (the run's log), pythoncoder_run.md and cpu.json
under bench/results/.
"""

import dataclasses
import json
import lzma
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from record import RESULTS, record

import runs
import train_tpu
from rows import Rows

PROMPTS = [
    "def read_lines(path):\\n",
    "class Stack:\\n    def __init__(self):\\n",
    "import os\\nimport sys\\n\\ndef main():\\n",
]


@dataclasses.dataclass(frozen=True)
class Config:
    ckpt: str = "out/train_tpu"  # run folder
    # bench/results/<file>.json; pythoncoder_run.md and the rest belong to "cpu", else <file>.md
    file: str = "cpu"
    max_new: int = 120  # tokens of each completion


def script(name, *args):
    result = subprocess.run(
        [sys.executable, str(ROOT / name), *args], capture_output=True, text=True, check=True
    )
    return result.stdout, result.stderr


def xz_after_training_text(run):
    """Bits per byte of the held-out text by xz -9e, when it has read the training text first.

    What the model learnt from, xz may repeat: its window is 64 MiB.
    """
    data, tokenizer = runs.read_json(run / "config.json", "data")["data"], runs.read_tokenizer(run)
    texts = []
    for split in ("train", "heldout"):
        rows = Rows(data, split)
        token_RL, segment_RL = rows.read(np.arange(rows.total))[:2]
        texts.append(tokenizer.decode(token_RL[segment_RL > 0].tolist()).encode())
    extreme = 9 | lzma.PRESET_EXTREME
    train, both = (
        len(lzma.compress(text, preset=extreme)) for text in (texts[0], texts[0] + texts[1])
    )
    return 8 * (both - train) / len(texts[1])


def main(cfg):
    run = Path(cfg.ckpt)
    # the log: rows of training steps, and rows of evaluations
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    train, held = ([r for r in rows if key in r] for key in ("main", "heldout_nats"))
    # the last checkpoint scored anew, over all held-out rows
    final = train_tpu.main(train_tpu.Config(eval_only=str(run), eval_rows=10**9))

    # the curve
    name = "pythoncoder_run" if cfg.file == "cpu" else cfg.file
    _, axis = plt.subplots(figsize=(8, 4.5))
    axis.plot([r["step"] for r in train], [r["main"] for r in train], lw=0.8, label="training")
    axis.plot(
        [r["step"] for r in held],
        [r["heldout_nats"] for r in held],
        "o-",
        ms=4,
        label="held-out files",
    )
    title = f"{final['bits_per_byte']:.3f} bits per byte at the end"
    axis.set(xlabel="optimizer step", ylabel="nats per token", title=title)
    axis.legend()
    axis.grid(alpha=0.3)
    plt.tight_layout()
    plt.savefig(RESULTS / f"{name}.png", dpi=120)
    shutil.copy(run / "log.jsonl", RESULTS / f"{name}.jsonl")

    # the page: each prompt as a user would type it, and what came
    text = ["# Completions, unedited\n"]
    for prompt in PROMPTS:
        out, err = script(
            "generate.py", f"--ckpt={run}", f"--prompt={prompt}", f"--max_new={cfg.max_new}"
        )
        shown = f'$ python generate.py --ckpt={run} --prompt="{prompt}" --max_new={cfg.max_new}\n{out}{err}'
        text.append(f"```\n{shown}```\n")
    (RESULTS / f"{name}.md").write_text("\n".join(text))

    # the figures; the first two rows of the log still warm up
    settings = json.loads((run / "config.json").read_text())
    speed = sorted(r["tok_per_s"] for r in train[2:])
    record(
        cfg.file,
        f"pythoncoder {settings['train']['model']} run, held-out bits per byte",
        final["bits_per_byte"],
        "bits per byte",
        xz_9=final["xz_bits_per_byte"],
        xz_9e_after_training_text=xz_after_training_text(run),
        nats_per_token=final["heldout_nats"],
        drafts_accepted=final.get("drafts_accepted"),
        steps=final["step"],
        evaluations={r["step"]: r["bits_per_byte"] for r in held},
        tok_per_s={
            name: speed[len(speed) * share // 10]
            for name, share in (("median", 5), ("p10", 1), ("p90", 9))
        },
        input_wait=max(r["wait"] for r in train),
        settings=settings["train"],
    )


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
