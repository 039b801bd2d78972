"""What a reader would say of a small model's text, in numbers: does it read like the held-out text that it never saw?

    python bench/judge.py stories --ckpt=out/speedrun/stories/run --data=out/speedrun/stories/data --text=stories.txt
    python bench/judge.py code --ckpt=out/speedrun/code/run --data=out/speedrun/code/data

stories: continues the beginnings of held-out stories, and asks a twin how likely that is: a PythonCoder with plain
attention, trained from left to right on the same text with the same tokenizer (--twin, made if it is not there). Prints
its perplexity on what was written and on what the stories go on with, and the distinct three words in a row of both.
code: continues the heads of held-out functions, and prints how many parse up to their last whole statement, and the
share of lines that stood there before, beside that of the functions themselves.
"""

import codeop
import dataclasses
import json
import math
import re
import subprocess
import sys
import typing
import warnings
from pathlib import Path

import numpy as np
import tyro
from record import record

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import checkpoints
import runs
from rows import Rows


@dataclasses.dataclass(frozen=True)
class Config:
    track: tyro.conf.Positional[typing.Literal["stories", "code"]] = "stories"
    ckpt: str = "out/speedrun/stories/run"  # folder of the run
    data: str = "out/speedrun/stories/data"  # folder of its rows
    text: str = "tinystories_sample.txt"  # file of stories, to train the twin on
    twin: str = "out/twin"  # folder of the twin
    twin_steps: int = 800  # of the twin's training
    samples: int = 200  # texts
    max_new: int = 100  # tokens of each
    flags: str = ""  # more flags for generate.py, or inference_jetson.py


def heldout_texts(folder, tokenizer):
    """The documents of the held-out rows."""
    rows = Rows(folder, "heldout")
    token_RL = rows.read(np.arange(rows.total))[0]
    ends = {tokenizer.token_to_id(name) for name in ("<eos>", "<|endoftext|>")}
    skip = {tokenizer.token_to_id(name) for name in ("<pad>", "<bos>")}
    texts, ids = [], []
    for token in token_RL.ravel().tolist():
        if token in ends:
            texts.append(tokenizer.decode(ids))
            ids = []
        elif token not in skip:
            ids.append(token)
    return texts


def write(cfg, model, prompts):
    """The completions of generate.py, or for MDLM of inference_jetson.py."""
    ckpt = Path(cfg.ckpt).absolute()
    settings = {"max_new": cfg.max_new} if model == "mdlm" else {}
    lines = "".join(json.dumps({"prompt": prompt, **settings}) + "\n" for prompt in prompts)
    command = ["generate.py", f"--model={model}", f"--ckpt={ckpt}", "--file=-", "--json", f"--max_new={cfg.max_new}"]
    if model == "mdlm":
        command = ["inference_jetson.py", f"--bundle={ckpt}", "--serve", "--steps=128"]
    command = [sys.executable, *command, *cfg.flags.split()]
    done = subprocess.run(command, cwd=ROOT, input=lines, stdout=subprocess.PIPE, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    if model == "mdlm":
        return [row["text"].removeprefix(prompt) for row, prompt in zip(rows, prompts, strict=True)]
    return [row["completion"] for row in rows]


# ---- stories -------------------------------------------------------------------------------------------------------


def train_twin(cfg):
    data = f"{cfg.twin}/data"
    source = ["text", str(Path(cfg.text).absolute()), "--rows=packed", "--seq_len=256", f"--out={data}"]
    # padded rows have their own special tokens, packed ones need an end of text: the same ids all the same
    source += [f"--tokenizer={Path(cfg.data).absolute()}/tokenizer.json", "--eos=<eos>"]
    subprocess.run([sys.executable, "data_prep.py", *source], cwd=ROOT, check=True)
    train = ["--model=tiny", "--diff=none", "--dropout=0", "--mtp_weight=0", "--batch_size=16"]
    train += [f"--data={data}", f"--out={cfg.twin}/run", f"--steps={cfg.twin_steps}"]
    subprocess.run([sys.executable, "train_tpu.py", *train], cwd=ROOT, check=True)


def nats_of(model, prompts, texts, tokenizer):
    """Nats and tokens of the texts, each behind its prompt, under the twin."""
    import jax

    rows, counts = [], []
    for prompt, text in zip(prompts, texts, strict=True):
        before = tokenizer.encode(prompt, add_special_tokens=False).ids
        after = tokenizer.encode(text, add_special_tokens=False).ids
        # what the whole costs less what the prompt costs: the twin reads from left to right
        rows += [before + after, before]
        counts.append(len(after))
    length = -(-max(map(len, rows)) // 64) * 64
    token_BL, segment_BL = np.zeros((2, len(rows), length), np.int32)
    for i, row in enumerate(rows):
        token_BL[i, : len(row)], segment_BL[i, : len(row)] = row, 1
    position_BL = np.broadcast_to(np.arange(length, dtype=np.int32), token_BL.shape)
    losses = jax.jit(lambda *batch: model.losses(*batch, mtp=False)[0])
    parts = (slice(i, i + 1) for i in range(len(rows)))
    nats = [float(losses(token_BL[at], segment_BL[at], position_BL[at])) for at in parts]
    return sum(nats[::2]) - sum(nats[1::2]), sum(counts)


def distinct(texts):
    """Share of three words in a row that are new, in all texts together."""
    words = [text.split() for text in texts]
    grams = [tuple(each[i : i + 3]) for each in words for i in range(len(each) - 2)]
    return len(set(grams)) / max(1, len(grams))


def judge_stories(cfg, tokenizer):
    import model_pythoncoder as pc

    if not runs.saved_steps(Path(cfg.twin, "run")):
        train_twin(cfg)
    model, _, _ = checkpoints.load_for_inference(pc, runs.as_path(f"{cfg.twin}/run"), 0, "")

    # the first ten words of each story, and the hundred tokens behind them
    stories = [story.strip() for story in heldout_texts(cfg.data, tokenizer)]
    begins = [re.match(r"(\S+\s+){9}\S+", story) for story in stories]
    prompts = [begin.group() for begin in begins if begin]
    ends = [story[begin.end() :] for story, begin in zip(stories, begins, strict=True) if begin]
    tails = [tokenizer.decode(tokenizer.encode(end, add_special_tokens=False).ids[: cfg.max_new]) for end in ends]
    asked = (prompts * -(-cfg.samples // len(prompts)))[: cfg.samples]
    written = write(cfg, "mdlm", asked)

    ours, real = (nats_of(model, *pair, tokenizer) for pair in ((asked, written), (prompts, tails)))
    perplexities = [math.exp(nats / tokens) for nats, tokens in (ours, real)]
    # as many texts of each, as repeats grow with their number
    grams = distinct(written[: len(tails)]), distinct(tails)
    return {
        "samples": len(written),
        "perplexity": perplexities[0],
        "perplexity_of_heldout": perplexities[1],
        "distinct_3grams": grams[0],
        "distinct_3grams_of_heldout": grams[1],
    }, list(zip(asked, written, strict=True))


# ---- code ----------------------------------------------------------------------------------------------------------

HEAD = re.compile(r"^( *)def \w+\([^\n]*\)(?: *->[^\n]*)?:\n", re.MULTILINE)


def parses(text):
    """Whether a text parses up to its last whole statement; its last line, which is cut short, aside."""
    lines = text.splitlines(keepends=True)[:-1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            codeop.compile_command("".join(lines), symbol="exec")  # None: no error so far, but more must follow
        except (SyntaxError, ValueError, OverflowError):
            return False
    return True


def repeated(texts):
    """Share of the lines of each text that stood in it before, blank ones aside."""
    lines = [[line.strip() for line in text.splitlines() if line.strip()] for text in texts]
    return sum(len(each) - len(set(each)) for each in lines) / max(1, sum(map(len, lines)))


def judge_code(cfg, tokenizer):
    # functions at the margin: head, and what follows
    heads, bodies = [], []
    for text in heldout_texts(cfg.data, tokenizer):
        for found in HEAD.finditer(text):
            if not found.group(1):
                heads.append(found.group())
                following = tokenizer.encode(text[found.end() :], add_special_tokens=False).ids[: cfg.max_new]
                bodies.append(tokenizer.decode(following))
    asked = (heads * -(-cfg.samples // len(heads)))[: cfg.samples]
    written = write(cfg, "pythoncoder", asked)
    whole = [parses(head + text) for head, text in zip(asked, written, strict=True)]
    return {
        "samples": len(written),
        "parse": sum(whole) / len(whole),
        "parse_of_heldout": sum(parses(h + b) for h, b in zip(heads, bodies, strict=True)) / len(heads),
        "repeated_lines": repeated(written),
        "repeated_lines_of_heldout": repeated(bodies),
    }, list(zip(asked, written, strict=True))


def main(cfg):
    tokenizer = runs.read_tokenizer(cfg.data)
    scores, samples = (judge_stories if cfg.track == "stories" else judge_code)(cfg, tokenizer)
    value = scores["perplexity" if cfg.track == "stories" else "parse"]
    unit = "perplexity of the twin" if cfg.track == "stories" else "share of the functions"
    record("cpu", f"judge of {cfg.track}", value, unit, **scores)
    for prompt, text in samples[:3]:
        print(f"----\n{prompt}{text}")


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
