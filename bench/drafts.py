"""Drafts and their proof: the text with --draft=N is the text token by token, and a step writes several tokens.

    python bench/drafts.py --ckpt=out/causal --files world/composed.jsonl    # --each=1: minutes

Each prompt goes through --each of the combinations of temperature and top-p, N, passes for the drafts, and batch, in
turn. Its text is compared with that of one token at a time, which the same key gives in a batch of --together. A token
is the argmax of logits with noise. How far it is ahead of the second is its margin: one below --tie is a near-tie, which
another order of float32 sums may turn. Computes in float32. Writes bench/results/drafts.md.
"""

import collections
import dataclasses
import functools
import itertools
import json
import shlex
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax
import jax.numpy as jnp
import numpy as np
from record import RESULTS, cpu_name

import checkpoints
import diffusion
import model_dream
import runs
import sample_draft

WAYS = ((0.0, 1.0), (0.7, 1.0), (1.0, 1.0), (1.0, 0.9))  # temperature and top-p


@dataclasses.dataclass(frozen=True)
class Config:
    ckpt: str = "out/causal"  # folder of a model with causal context
    files: tuple[str, ...] = ()  # JSON lines with "prompt"
    prompts: runs.Count = 2000  # the first of them
    each: runs.Count = 64  # combinations that a prompt goes through
    drafts: tuple[int, ...] = (2, 4, 8, 16)  # N
    draft_steps: tuple[int, ...] = (1, 2)  # passes for the drafts
    batches: tuple[int, ...] = (1, 7)  # rows of a batch
    together: runs.Count = 50  # rows of a batch token by token
    max_new: runs.Count = 96  # tokens of a text
    tie: float = 1e-4  # margin of a near-tie
    out: str = "drafts.md"  # in bench/results
    seed: int = 0


@functools.partial(jax.jit, static_argnames="rule")
def margins(model, token_BL, banned_V, key_B, rule):
    """How far the best token behind each one is ahead of the second [B, L - 1], both with their noise."""
    slot_BL = jnp.broadcast_to(jnp.arange(token_BL.shape[1]), token_BL.shape)
    hidden_BLD, _ = model.hidden(token_BL, place=diffusion.Place(jnp.ones_like(token_BL), slot_BL))
    score_BLV = jnp.where(banned_V, -jnp.inf, model.logits(hidden_BLD[:, :-1]))
    if rule.temperature:

        def noise(key, slot):
            key = jax.random.fold_in(jax.random.wrap_key_data(key), slot)
            return -jnp.log(-jnp.log(jax.random.uniform(key, banned_V.shape, minval=jnp.finfo(jnp.float32).tiny)))

        score_BLV = diffusion.filter_logits(score_BLV, rule.temperature, 0, rule.top_p, rule="dream")
        score_BLV += jax.vmap(jax.vmap(noise, (None, 0)))(key_B, slot_BL[:, 1:])
    first_BL, second_BL = jnp.moveaxis(jax.lax.top_k(score_BLV, 2)[0], -1, 0)
    return first_BL - second_BL


class Texts:
    """The texts that a model writes behind the prompts of a file."""

    def __init__(self, cfg):
        self.cfg, self.model = cfg, checkpoints.load(model_dream, cfg.ckpt, dtype="float32")[0]
        tokenizer = runs.read_tokenizer(cfg.ckpt)
        lines = [line for name in cfg.files for line in runs.as_path(name).read_text().splitlines()][: cfg.prompts]
        self.prompts = [tokenizer.encode(json.loads(line)["prompt"], add_special_tokens=False).ids for line in lines]
        self.width, self.vocab = max(map(len, self.prompts)) + cfg.max_new, tokenizer.get_vocab_size()
        self.banned_V = (id_V := np.arange(self.model.cfg.vocab)) >= self.vocab
        self.banned_V |= id_V == self.model.cfg.mask_id

    def write(self, numbers, rule, size, measure=False):
        """{number of a prompt: (row, margins of its new tokens, steps)}, `size` rows at a time."""
        rule = dataclasses.replace(rule, vocab=self.vocab, eos_ids=(self.model.cfg.eos_id,))
        found, key = {}, jax.random.key(self.cfg.seed)
        for i in range(0, len(numbers), size):
            chosen = np.resize(numbers[i : i + size], size)  # the last batch is filled up with prompts that come again
            key_B = jax.random.key_data(jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.array(chosen)))
            prompts = [self.prompts[n] for n in chosen]
            rows, stats = sample_draft.generate(self.model, prompts, self.cfg.max_new, rule, key_B, (self.width,))
            margin_BL = np.zeros((size, self.width - 1))
            if measure:
                token_BL = np.array([np.pad(row, (0, self.width - len(row))) for row in rows])
                margin_BL = np.asarray(margins(self.model, token_BL, self.banned_V, key_B, rule))
            for n, row, when_L, margin_L in zip(chosen, rows, stats["when"], margin_BL, strict=True):
                new = slice(len(self.prompts[n]) - 1, len(self.prompts[n]) - 1 + int((when_L > 0).sum()))
                found[int(n)] = row, margin_L[new], int(when_L.max())
        return found


def main(cfg):
    jax.config.update("jax_default_matmul_precision", "highest")
    checkpoints.keep_compiled("~/.cache/unmask")
    texts, began, rates, table, unequal = Texts(cfg), time.process_time(), collections.defaultdict(list), [], []
    combinations = [*itertools.product(WAYS, cfg.drafts, cfg.draft_steps, cfg.batches)]
    each = min(cfg.each, len(combinations))
    given = collections.defaultdict(list)
    for n, k in itertools.product(range(len(texts.prompts)), range(each)):
        given[combinations[(n * each + k) % len(combinations)]].append(n)
    for way in WAYS:
        mine = {how: numbers for how, numbers in given.items() if how[0] == way}
        rule, asked = (
            sample_draft.Sampling(temperature=way[0], top_p=way[1]),
            sorted({n for numbers in mine.values() for n in numbers}),
        )
        want, compared = texts.write(asked, rule, cfg.together, measure=True), 0
        for (_, draft, steps, size), numbers in mine.items():
            got = texts.write(numbers, dataclasses.replace(rule, draft=draft, draft_steps=steps), size)
            for n, (row, margin_N, took) in got.items():
                compared += 1
                rates[draft, steps].append((len(margin_N) - 1) / max(took - 1, 1))  # the first comes with the prompt
                if row != want[n][0]:
                    at = next(i for i, pair in enumerate(zip(row, want[n][0], strict=True)) if len({*pair}) > 1)
                    unequal.append((way, draft, steps, size, want[n][1][at - len(texts.prompts[n])]))
        margin_N = np.concatenate([margin_N for _, margin_N, _ in want.values()])
        ties, least = int((margin_N < cfg.tie).sum()), margin_N.min()
        other = sum(one[0] == way for one in unequal)
        table.append(f"| {way[0]:g} | {way[1]:g} | {compared:,} | {other} | {margin_N.size:,} | {ties} | {least:.2g} |")
        print(table[-1], flush=True)
    lines = [f"{len(texts.prompts):,} prompts, {each} of {len(combinations)} combinations each: N of {cfg.drafts}, in"]
    lines += [f"{cfg.draft_steps} passes, batches of {cfg.batches}. A near-tie has a margin below {cfg.tie:g}.", ""]
    lines += [
        "| temperature | top-p | texts compared | not equal | tokens | near-ties | smallest margin |",
        "|---" * 7 + "|",
    ]
    lines += [
        *table,
        *(f"\nNot equal: {way}, N {n}, {s} passes, batch {b}, margin {m:.2g}" for way, n, s, b, m in unequal),
    ]
    lines += ["", "| N | passes for the drafts | tokens a step | tokens a pass | texts |", "|---" * 5 + "|"]
    for (draft, steps), found in sorted(rates.items()):
        mean, error = np.mean(found), 2 * np.std(found, ddof=1) / len(found) ** 0.5
        lines.append(f"| {draft} | {steps} | {mean:.2f} ± {error:.2f} | {mean / (1 + steps):.2f} | {len(found)} |")
    lines += ["", "Mean and two standard errors over texts, behind the first token, all temperatures together."]
    lines += [f"`python bench/{shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}`"]
    lines += [f"{cpu_name()}, one core, {time.process_time() - began:.0f} processor seconds."]
    (RESULTS / cfg.out).write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
