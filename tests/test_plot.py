"""bench/plot.py: the curves of a run in the terminal."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import plot


def dots(lines):
    """{(row of dots, column of dots)} of lines of braille."""
    # of bits 0 to 7 of a character
    places = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (3, 1)]
    return {
        (4 * i + row, 2 * j + column)
        for i, line in enumerate(lines)
        for j, letter in enumerate(line)
        for bit, (row, column) in enumerate(places)
        if ord(letter) - 0x2800 >> bit & 1
    }


def test_a_curve_of_braille_has_its_dots_where_the_points_are():
    falling = {(row, column) for column in range(8) for row in (max(0, column - 1), column)}
    assert dots(plot.braille([0, 1], [7.0, 0.0], 4, 2)) == falling
    assert dots(plot.braille([3, 9], [5.0, 5.0], 2, 1)) == {(0, column) for column in range(4)}
    peak = dots(plot.braille([0, 50, 100], [1.0, 3.0, 1.0], 20, 5))
    assert {column for row, column in peak if row == 0} <= {18, 19, 20, 21}
    assert {(19, 0), (19, 39)} <= peak
    assert {row for row, _ in peak} == set(range(20))  # without holes


def test_a_text_plot_names_the_newest_largest_and_smallest_and_leaves_out_what_is_not_finite():
    rows = [
        {"step": 10, "loss": 4.0},
        {"step": 20, "loss": float("nan")},
        {"step": 1200, "loss": 3.25},
    ]
    lines = plot.text_plot(rows, ("loss", "bits_per_byte"))
    assert lines[0] == "loss 3.25, step 1,200"
    assert (len(lines), lines[1][:10], lines[-1][:10]) == (10, "        4 ", "     3.25 ")
    rows += [{"step": 20, "bits_per_byte": 2.0}, {"step": 40, "bits_per_byte": 1.5}]
    lines = plot.text_plot(rows, ("loss", "bits_per_byte"), width=60)
    assert [line for line in lines if "step" in line] == [
        "loss 3.25, step 1,200",
        "bits_per_byte 1.5, step 40",
    ]
    assert len(lines) == 10
    assert max(map(len, lines)) == 60
    assert plot.text_plot(rows[:1], ("loss",)) == []


def test_the_command_draws_a_log_and_writes_curve_png(tmp_path, capsys):
    rows = [{"round": r, "reward": r / 4} for r in range(1, 5)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plot.main(plot.Config(str(tmp_path), ("reward",)))
    assert capsys.readouterr().out.startswith("reward 1, round 4\n")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    plot.main(plot.Config(str(tmp_path)))
    assert "has not logged loss or bits_per_byte twice yet" in capsys.readouterr().out
