"""A page that shows in which step MDLM wrote each token, and with which probability.

    python bench/mdlm_page.py --prompt="Once upon a [MASK:12] dragon." --html=steps.html    # .svg: an animation
    python bench/mdlm_page.py --bundle=out/stories --prompt="Once upon a time" --steps=32

The page is that of generate.py --html, the text that of inference_jetson.py with the same settings.
"""

import dataclasses
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import canvas
import inference_jetson as jetson
import model_mdlm as mdlm
import runs


@dataclasses.dataclass(frozen=True)
class Config:
    bundle: str = ""  # bundle, run folder or checkpoint; default: as inference_jetson.py
    prompt: str = "Once upon a time"  # text to continue, [MASK:n] for n tokens to fill
    html: str = "steps.html"  # file to write; .svg: an animation
    max_new: int = 64  # tokens to generate after a prompt without [MASK:n]
    steps: int = 64  # denoising steps
    sampler: str = "ancestral"  # or max_prob, margin, entropy
    temperature: float = 0.8  # 0 takes the argmax
    seed: int = 0  # random seed


class Recorder(jetson.StepViewer):
    """Keeps the ids after every step, and the probability of every token when it was written."""

    def __init__(self, writer, cfg):
        super().__init__(writer, cfg)
        self.history, self.found = [self.ids], {}

    def __call__(self, i, start, ids):
        self.found |= self.probabilities(i, start, ids)
        self.history.append(ids)


def main(cfg):
    names = [field.name for field in dataclasses.fields(cfg) if field.name != "html"]
    cfg = dataclasses.replace(cfg, prompt=cfg.prompt.replace("\\n", "\n"))
    settings = jetson.check(jetson.Config(**{name: getattr(cfg, name) for name in names}))
    writer = jetson.Writer(settings)
    recorder = Recorder(writer, settings)
    jetson.write(writer, settings, recorder)
    # in which step each token was written, 0: given; without BOS and what follows EOS
    text = jetson.text_ids(recorder.history[-1], settings.prompt)
    steps = [
        [ids[p] if p < len(ids) else mdlm.MASK for p in range(1, 1 + len(text))]
        for ids in recorder.history
    ]
    when = [
        next(i for i, token in enumerate(tokens) if token != mdlm.MASK)
        for tokens in zip(*steps, strict=True)
    ]
    prob = [recorder.found.get(p, 1.0) for p in range(1, 1 + len(text))]
    tokens = map(canvas.Token, canvas.pieces(writer.tokenizer, text), when, prob)
    canvas.write_page(cfg.html, [list(tokens)])
    print(f"wrote {cfg.html}")


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
