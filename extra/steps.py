"""The steps of a Dream as a page, or as an animation. Prints.

    python generate_dream.py --json --show_steps --prompt="def f(n):" > steps.json
    python extra/steps.py --file=steps.json --out=steps.html
    python extra/steps.py --file=steps.json --out=steps.svg

The page is serve.html with the steps inside: it replays them without a server. The animation is one
SVG file: blue tokens came first, red ones last. This program asks no model.
"""

import bisect
import contextlib
import dataclasses
import html
import io
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import runs

STEPS_S = 9.0  # seconds of all steps
REST_S = 3.0  # seconds of the finished text
LETTER = 8.43  # width of a letter, in pixels
LINE = 21  # height of a line, in pixels
STYLE = "<style>text{font:14px monospace;white-space:pre}</style>"
LEGEND = """<linearGradient id="g"><stop stop-color="hsl(220 80% 85%)"/>
<stop offset=".25" stop-color="hsl(165 80% 85%)"/><stop offset=".5" stop-color="hsl(110 80% 85%)"/>
<stop offset=".75" stop-color="hsl(55 80% 85%)"/><stop offset="1" stop-color="hsl(0 80% 85%)"/>
</linearGradient><rect x="62" y="8" width="120" height="12" fill="url(#g)"/>
<text x="12" y="19">first</text><text x="190" y="19">last</text>"""


@dataclasses.dataclass(frozen=True)
class Config:
    file: str = "steps.json"  # what generate_dream.py --json --show_steps wrote, a text a line
    out: str = "steps.html"  # file to write: .html is a page, .svg an animation


def main(cfg):
    out = Path(cfg.out)
    forms = {".html": page, ".svg": animation}
    if out.suffix not in forms:
        raise ValueError(f"--out={out} is neither .html nor .svg")
    texts = []
    for _, row in runs.json_rows(io.BytesIO(runs.as_path(cfg.file).read_bytes())):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            texts.append([(text, int(step), p) for text, step, p in row["steps"]])
    if not any(texts):
        raise ValueError(
            f"{cfg.file} holds no steps; generate_dream.py --json --show_steps writes them"
        )
    runs.write(out, forms[out.suffix](texts).encode())
    print(f"{out}: {len(texts)} texts")


def page(texts):
    """serve.html with texts inside, which are lists of (token, step that wrote it, probability)."""
    # what serve.html keeps of a token: these, a note, and the likeliest others
    record = json.dumps([[(*token, "", []) for token in tokens] for tokens in texts])
    empty = '<script id="record" type="application/json">'
    whole = Path(__file__).with_name("serve.html").read_text("utf-8")
    return whole.replace(empty + "null", empty + record.replace("<", "\\u003c"))


def animation(texts):
    """A self-contained SVG that shows the texts step by step, rests, and starts again."""
    # Steps that show nothing new, as those of EOS, take no time.
    visible = sorted(
        {step for tokens in texts for text, step, _ in tokens if step and text.strip()}
    )
    last = max(1, len(visible))
    shapes = []
    line = 1
    longest = 0
    for tokens in texts:
        column = 0
        for text, step, _ in tokens:
            if step:
                step = 1 + bisect.bisect_left(visible[:-1], step)
            # XML has no form feed
            for part in re.split("(\n)", re.sub("[^\n\t -\U0010ffff]", " ", text)):
                if part == "\n":
                    line += 1
                    column = 0
                elif part:
                    shapes.append(shape(part, column, line, step, last))
                    column += len(part)
                    longest = max(longest, column)
        line += 2
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xml:space="preserve" '
        f'width="{24 + longest * LETTER:.0f}" height="{line * LINE}">{STYLE}'
        "<rect width='100%' height='100%' fill='#fff'/>"
        f"{LEGEND}{''.join(shapes)}</svg>\n"
    )


def shape(text, column, line, step, last):
    """A box and the letters over it, which appear in their step; at once what was given."""
    fill = "#eee"
    turns = ""
    appears = ""
    if step:
        fill = f"hsl({220 - 220 * step / last:.0f} 80% 85%)"
        total_s = STEPS_S + REST_S
        timing = (
            f'keyTimes="0;{step / last * STEPS_S / total_s:.3f}" dur="{total_s}s" '
            'calcMode="discrete" repeatCount="indefinite"'
        )
        turns = f'<animate {timing} attributeName="fill" values="#aaa;{fill}"/>'
        appears = f'<animate {timing} attributeName="opacity" values="0;1"/>'
    x = f'x="{12 + column * LETTER:.1f}"'
    size = f"{len(text) * LETTER:.1f}"
    top = 8 + line * LINE
    return (
        f'<rect {x} y="{top}" width="{size}" height="18" fill="{fill}">{turns}</rect>'
        f'<text {x} y="{top + 14}" textLength="{size}">{html.escape(text)}{appears}</text>'
    )


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
