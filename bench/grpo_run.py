"""The demo of coupled_grpo.py over several seeds: held-out reward by round, and the time it takes.

    python bench/grpo_run.py                                   # three seeds, 15 minutes; keep the machine idle
    python bench/grpo_run.py --masks coupled independent       # the same from masks that are not coupled, too

A seed is pre-training, tasks drawn and completions, all anew; the held-out tasks are the same. With several kinds of
masks each starts from the same pre-trained model. Writes grpo_run.png and an entry of cpu.json under bench/results/.
"""

import dataclasses
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import tyro
from record import RESULTS, record


@dataclasses.dataclass(frozen=True)
class Config:
    out: str = "out/grpo_run"
    seeds: tuple[int, ...] = (0, 1, 2)
    masks: tuple[str, ...] = ("coupled",)
    rounds: int = 40
    file: str = "cpu"  # bench/results/<file>.json


def main(cfg):
    runs, minutes = {}, []
    for seed in cfg.seeds:
        for masks in cfg.masks:
            out, base = Path(cfg.out) / f"{masks}-{seed}", Path(cfg.out) / f"{cfg.masks[0]}-{seed}" / "base"
            if not (out / "minutes.json").exists():  # what is finished stays
                shutil.rmtree(out, ignore_errors=True)
                if masks != cfg.masks[0]:
                    shutil.copytree(base, out / "base")
                started = time.perf_counter()
                flags = f"--seed={seed}", f"--masks={masks}", f"--out={out}", f"--rounds={cfg.rounds}"
                command = [sys.executable, str(ROOT / "coupled_grpo.py"), *flags, "--compile_cache="]
                subprocess.run(command, check=True)
                (out / "minutes.json").write_text(json.dumps((time.perf_counter() - started) / 60))
            minutes += [json.loads((out / "minutes.json").read_text())] if masks == cfg.masks[0] else []
            log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
            runs[masks, seed] = [(row["round"], row["heldout_reward"]) for row in log if "heldout_reward" in row], log
    figure, axis = plt.subplots(figsize=(7, 4))
    for (masks, seed), (curve, _) in runs.items():
        style = {"color": f"C{cfg.seeds.index(seed)}", "ls": "-" if masks == cfg.masks[0] else "--"}
        axis.plot(*zip(*curve, strict=True), marker="o", ms=3, label=f"{masks} masks, seed {seed}", **style)
    axis.set(xlabel="round", ylabel="tests passed, 96 held-out tasks", ylim=(0, 1))
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(RESULTS / "grpo_run.png", dpi=120)
    for masks in cfg.masks:
        curves = np.array([[y for _, y in runs[masks, seed][0]] for seed in cfg.seeds])
        rows = [row for seed in cfg.seeds for row in runs[masks, seed][1] if "update_s" in row]
        phases = ("generate_s", "score_s", "reward_s", "update_s")
        record(
            cfg.file,
            f"coupled-grpo demo, {masks} masks: held-out reward after {cfg.rounds} rounds",
            float(np.median(curves[:, -1])),
            "share of tests passed",
            spread=[float(curves[:, -1].min()), float(curves[:, -1].max())],
            before=curves[:, 0].tolist(),
            after=curves[:, -1].tolist(),
            rounds=[x for x, _ in runs[masks, cfg.seeds[0]][0]],
            curves=curves.tolist(),
            minutes=minutes if masks == cfg.masks[0] else None,
            seconds_of_a_round={name: float(np.median([row[name] for row in rows])) for name in phases},
        )


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__, config=(tyro.conf.FlagConversionOff,)))
