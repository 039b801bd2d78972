"""Does a small model's text read like held-out text? Numbers for both.

    python bench/judge.py stories --ckpt=out/speedrun/stories/run --data=out/speedrun/stories/data
    python bench/judge.py stories --ckpt=weights/mdlm --data=out/speedrun/stories/data
    python bench/judge.py code --ckpt=out/speedrun/code/run --data=out/speedrun/code/data

stories: MDLM continues the beginnings of held-out stories, and a twin scores the texts: a
PythonCoder with plain attention, trained on the same text with the same tokenizer (--twin, trained
if it does not exist). Prints the twin's perplexity on the generated and on the held-out
continuations, and the share of distinct 3-grams of words of both.
code: PythonCoder continues the first lines of held-out functions. Prints how many texts parse up to
their last whole statement and their share of repeated lines, beside those of the held-out
functions.
"""

import codeop
import dataclasses
import json
import math
import re
import shutil
import subprocess
import sys
import typing
import warnings
from pathlib import Path

import numpy as np
import tyro
from record import claim, record

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import inference
import runs
from rows import Rows


@dataclasses.dataclass(frozen=True)
class Config:
    track: tyro.conf.Positional[typing.Literal["stories", "code"]] = "stories"
    ckpt: str = "out/speedrun/stories/run"  # folder of the run, or of weights
    data: str = "out/speedrun/stories/data"  # folder of its rows
    text: str = "tinystories_sample.txt"  # file of stories, to train the twin on
    twin: str = "out/twin"  # folder of the twin
    twin_steps: int = 800  # training steps of the twin
    samples: int = 200  # texts to generate
    max_new: int = 100  # new tokens per text
    flags: str = ""  # more flags for inference_jetson.py (stories) or generate.py (code)


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


def answers(cfg, command, prompts):
    """The JSON lines with which a program of this project answers prompts."""
    lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    command = [sys.executable, *command, f"--max_new={cfg.max_new}", *cfg.flags.split()]
    done = subprocess.run(
        command, cwd=ROOT, input=lines, stdout=subprocess.PIPE, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def continued_stories(cfg, prompts):
    command = [
        "inference_jetson.py",
        f"--bundle={Path(cfg.ckpt).absolute()}",
        "--serve",
        "--steps=128",
    ]
    texts = [answer["text"] for answer in answers(cfg, command, prompts)]
    return [text.removeprefix(prompt) for prompt, text in zip(prompts, texts, strict=True)]


def continued_code(cfg, prompts):
    command = [
        "generate.py",
        "--model=pythoncoder",
        f"--ckpt={Path(cfg.ckpt).absolute()}",
        "--file=-",
        "--json",
    ]
    return [answer["completion"] for answer in answers(cfg, command, prompts)]


# ---- stories -------------------------------------------------------------------------------------------------------


def train_twin(cfg):
    shutil.rmtree(Path(cfg.twin, "run"), ignore_errors=True)  # one that was stopped
    data = f"{cfg.twin}/data"
    source = [
        "text",
        str(Path(cfg.text).absolute()),
        "--rows=packed",
        "--seq_len=256",
        f"--out={data}",
    ]
    # Packed rows need an end of text; the ids are those of the padded rows.
    source += [f"--tokenizer={Path(cfg.data).absolute()}/tokenizer.json", "--eos=<eos>"]
    subprocess.run([sys.executable, "data_prep.py", *source], cwd=ROOT, check=True)
    train = ["--model=tiny", "--diff=none", "--dropout=0", "--mtp_weight=0", "--batch_size=16"]
    train += [f"--data={data}", f"--out={cfg.twin}/run", f"--steps={cfg.twin_steps}"]
    subprocess.run([sys.executable, "train_tpu.py", *train], cwd=ROOT, check=True)


def nats_of(model, prompts, texts, tokenizer):
    """Nats and tokens of each text, after its prompt, under the twin: [N] and [N]."""
    import jax

    rows, counts = [], []
    for prompt, text in zip(prompts, texts, strict=True):
        before = tokenizer.encode(prompt, add_special_tokens=False).ids
        after = tokenizer.encode(text, add_special_tokens=False).ids
        # -log p(text | prompt) = -log p(prompt + text) + log p(prompt)
        rows += [before + after, before]
        counts.append(len(after))
    length = -(-max(map(len, rows)) // 64) * 64
    token_BL, segment_BL = np.zeros((2, len(rows), length), np.int32)
    for i, row in enumerate(rows):
        token_BL[i, : len(row)], segment_BL[i, : len(row)] = row, 1
    position_BL = np.broadcast_to(np.arange(length, dtype=np.int32), token_BL.shape)
    losses = jax.jit(lambda *batch: model.losses(*batch, mtp=False)[0])
    each = (slice(i, i + 1) for i in range(len(rows)))
    nats = np.array([float(losses(token_BL[i], segment_BL[i], position_BL[i])) for i in each])
    return nats[::2] - nats[1::2], np.array(counts)


def perplexity(nats_N, count_N, beginnings):
    """Of all texts together, and its 10th and 90th percentile over 1,000 draws of beginnings with
    replacement.

    Text i continues beginning i % beginnings.
    """
    beginnings = min(beginnings, len(nats_N))
    chosen = np.arange(len(nats_N)) % beginnings
    draws = np.random.default_rng(0).integers(beginnings, size=(1000, beginnings))
    weights = np.array([np.bincount(draw, minlength=beginnings)[chosen] for draw in draws])
    spread = np.percentile(weights @ nats_N / (weights @ count_N), [10, 90])
    return math.exp(nats_N.sum() / count_N.sum()), np.exp(spread).tolist()


def distinct(texts):
    """The share of distinct 3-grams of words in all texts together."""
    split = [text.split() for text in texts]
    grams = [tuple(words[i : i + 3]) for words in split for i in range(len(words) - 2)]
    return len(set(grams)) / max(1, len(grams))


def judge_stories(cfg, tokenizer):
    import model_pythoncoder as pc

    if not Path(cfg.twin, "settings.json").exists():  # which claim() writes when it is trained
        train_twin(cfg)
    paths = {name: str(Path(getattr(cfg, name)).resolve()) for name in ("data", "text")}
    claim(cfg.twin, paths | {"twin_steps": cfg.twin_steps})
    model, _, _ = inference.load_for_inference(pc, runs.as_path(f"{cfg.twin}/run"), 0, "")

    # the first ten words of each story, and the hundred tokens after them
    stories = [story.strip() for story in heldout_texts(cfg.data, tokenizer)]
    begins = [re.match(r"(\S+\s+){9}\S+", story) for story in stories]
    prompts = [begin.group() for begin in begins if begin]
    ends = [story[begin.end() :] for story, begin in zip(stories, begins, strict=True) if begin]
    tails = [
        tokenizer.decode(tokenizer.encode(end, add_special_tokens=False).ids[: cfg.max_new])
        for end in ends
    ]
    asked = (prompts * -(-cfg.samples // len(prompts)))[: cfg.samples]
    written = continued_stories(cfg, asked)

    ours, real = (nats_of(model, *pair, tokenizer) for pair in ((asked, written), (prompts, tails)))
    (of_ours, spread), (of_real, spread_of_real) = (
        perplexity(*each, len(prompts)) for each in (ours, real)
    )
    # the same number of texts of both, as repeats grow with it
    grams = distinct(written[: len(tails)]), distinct(tails[: len(written)])
    return {
        "samples": len(written),
        "perplexity": of_ours,
        "perplexity_of_heldout": of_real,
        "spread": spread,
        "spread_of_heldout": spread_of_real,
        "distinct_3grams": grams[0],
        "distinct_3grams_of_heldout": grams[1],
    }, list(zip(asked, written, strict=True))


# ---- code ----------------------------------------------------------------------------------------------------------

HEAD = re.compile(r"^( *)def \w+\([^\n]*\)(?: *->[^\n]*)?:\n", re.MULTILINE)


def parses(text):
    """Whether a text parses up to its last whole statement, without its last line, which is
    incomplete.
    """
    lines = text.splitlines(keepends=True)[:-1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            # None: incomplete, but no error so far
            codeop.compile_command("".join(lines), symbol="exec")
        except (SyntaxError, ValueError, OverflowError):
            return False
    return True


def repeated(texts):
    """The share of lines that repeat an earlier line of the same text; blank lines do not count."""
    lines = [[line.strip() for line in text.splitlines() if line.strip()] for text in texts]
    return sum(len(each) - len(set(each)) for each in lines) / max(1, sum(map(len, lines)))


def judge_code(cfg, tokenizer):
    # functions without indentation: the first line, and the text after it
    heads, bodies = [], []
    for text in heldout_texts(cfg.data, tokenizer):
        for found in HEAD.finditer(text):
            if not found.group(1):
                heads.append(found.group())
                following = tokenizer.encode(text[found.end() :], add_special_tokens=False).ids[
                    : cfg.max_new
                ]
                bodies.append(tokenizer.decode(following))
    asked = (heads * -(-cfg.samples // len(heads)))[: cfg.samples]
    written = continued_code(cfg, asked)
    whole = [parses(head + text) for head, text in zip(asked, written, strict=True)]
    return {
        "samples": len(written),
        "parse": sum(whole) / len(whole),
        "parse_of_heldout": sum(parses(h + b) for h, b in zip(heads, bodies, strict=True))
        / len(heads),
        "repeated_lines": repeated(written),
        "repeated_lines_of_heldout": repeated(bodies),
    }, list(zip(asked, written, strict=True))


def main(cfg):
    tokenizer = runs.read_tokenizer(cfg.data)
    scores, samples = (judge_stories if cfg.track == "stories" else judge_code)(cfg, tokenizer)
    value = scores["perplexity" if cfg.track == "stories" else "parse"]
    unit = "perplexity of the twin" if cfg.track == "stories" else "share of the functions"
    record("cpu", f"judge of {cfg.track}, {cfg.ckpt}", value, unit, **scores)
    for prompt, text in samples[:3]:
        print(f"----\n{prompt}{text}")


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
