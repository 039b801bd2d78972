"""Draw the curves of a run in the terminal, and as curve.png in its folder.

    python bench/plot.py out/train_tpu                      # loss and bits per byte
    python bench/plot.py out/grpo --names reward kl         # any numbers of log.jsonl
Also while it trains: watch -n 10 python bench/plot.py out/train_tpu
"""

import dataclasses
import io
import json
import math
import shutil
import sys
from pathlib import Path

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
import runs


@dataclasses.dataclass(frozen=True)
class Config:
    run: tyro.conf.Positional[str] = "out/train_tpu"  # folder of a run
    names: tuple[str, ...] = ("loss", "bits_per_byte")  # metrics of log.jsonl, a curve each
    height: int = 20  # lines of the terminal


def braille(x_N, y_N, width, height):
    """`height` lines of `width` characters with a curve through the points (x, y), x rising: 2 by 4
    dots a character.

    The largest y is in the first line, the smallest in the last.
    """
    # the row of dots that the curve has reached in each column of dots
    y_C = np.interp(np.linspace(x_N[0], x_N[-1], 2 * width), x_N, y_N)
    row_C = np.rint((y_C.max() - y_C) / (np.ptp(y_C) or 1) * (4 * height - 1)).astype(int).tolist()
    cells = np.zeros((height, width), int)
    for column, (before, row) in enumerate(zip([row_C[0], *row_C], row_C, strict=False)):
        # down or up to it, so that the curve has no holes
        for dot in range(min(before, row), max(before, row) + 1):
            bit = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))[dot % 4][column % 2]
            cells[dot // 4, column // 2] |= bit
    return ["".join(chr(0x2800 + cell) for cell in line) for line in cells]


def text_plot(rows, names, unit="step", width=80, height=10):
    """Lines of text with a curve of each of the names over rows of a log; [] while there is none.

    Each has a heading with its newest value, and its largest and smallest beside it.
    """
    found, lines = series(rows, names, unit), []
    for name, (x, y) in found.items():
        curve = braille(x, y, width - 10, max(2, height // len(found) - 1))
        labels = [f"{max(y):9.4g}", *[9 * " "] * (len(curve) - 2), f"{min(y):9.4g}"]
        lines.append(f"{name} {y[-1]:.4g}, {unit} {x[-1]:,}")
        lines += [f"{label} {line}" for label, line in zip(labels, curve, strict=True)]
    return lines


def series(rows, names, unit):
    """{name: (units, values)} of names with a finite number in two or more rows of a log."""
    found = {}
    for name in names:
        points = [(row[unit], row[name]) for row in rows if math.isfinite(row.get(name, math.nan))]
        if len(points) > 1:
            found[name] = tuple(zip(*points, strict=True))
    return found


def save_curves(folder, rows, names, unit):
    """Write curve.png, with an axis for each of the names."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("curve.png needs matplotlib: pip install matplotlib", file=sys.stderr)
        return
    found = series(rows, names, unit)
    if not found:
        return
    figure, data = Figure((7, 2.5 * len(found)), layout="constrained"), io.BytesIO()
    for axis, (name, points) in zip(
        figure.subplots(len(found), squeeze=False)[:, 0], found.items(), strict=True
    ):
        axis.plot(*points)
        axis.set(ylabel=name.replace("_", " "), xlabel=unit)
        axis.grid(alpha=0.3)
    figure.savefig(data, format="png", dpi=120)
    runs.write(folder / "curve.png", data.getvalue())


def main(cfg):
    rows = [json.loads(line) for line in (Path(cfg.run) / "log.jsonl").read_text().splitlines()]
    unit = "round" if rows and "round" in rows[0] else "step"
    lines = text_plot(rows, cfg.names, unit, shutil.get_terminal_size().columns - 1, cfg.height)
    print("\n".join(lines) or f"{cfg.run} has not logged {' or '.join(cfg.names)} twice yet")
    save_curves(Path(cfg.run), rows, cfg.names, unit)


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
