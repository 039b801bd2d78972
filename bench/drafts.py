"""Self-speculation checked: --draft=N gives the text of token-by-token decoding, several tokens a
step.

    W=out/readings/world; python bench/drafts.py --ckpt=out/readings/ar_weight_3.332 --each=1 \\
        --files $W/composed.jsonl $W/phrased.jsonl
    python bench/drafts.py --coder=weights/pythoncoder --files $W/composed.jsonl --prompts=100    # a minute

Each prompt goes through --each of the combinations of temperature, top-p, N, passes for the drafts
and batch, in turn. Its text is compared with that of one token at a time, which the same key gives
in a batch of 50. A margin is how far a token's logit with noise lies above the second: float32 may
turn one below --tie. Writes bench/results/<file>.md.

With --coder: what PythonCoder's rule, equal noise for a draft and its judge, costs in accepted
drafts beside Leviathan's, which accepts the most that any rule can (arXiv:2211.17192). Only prints.
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from record import RESULTS, cpu_name

import checkpoints
import diffusion
import model_dream
import model_pythoncoder as pc
import runs
import sample_draft
import sample_dream

WAYS = ((0.0, 1.0), (0.7, 1.0), (1.0, 1.0), (1.0, 0.9))  # temperature and top-p


@dataclasses.dataclass(frozen=True)
class Config:
    ckpt: str = "out/causal"  # folder of a model with causal context
    coder: str = ""  # folder of a PythonCoder, to compare two rules of acceptance instead
    files: tuple[str, ...] = ()  # JSON lines with "prompt"
    prompts: runs.Count = 2000  # the first of them
    each: runs.Count = 64  # combinations that a prompt goes through
    drafts: tuple[int, ...] = (2, 4, 8, 16)  # N
    draft_steps: tuple[int, ...] = (0, 1)  # passes for the drafts
    batches: tuple[int, ...] = (1, 7)  # rows of a batch
    max_new: runs.Count = 96  # tokens of a text
    tie: float = 1e-4  # margin of a near-tie
    file: str = "drafts"  # bench/results/<file>.md


@functools.partial(jax.jit, static_argnames="rule")
def margins(model, token_BL, banned_V, key_B, rule):
    """How far the best token after each one is ahead of the second [B, L - 1], both with their
    noise.
    """
    slot_BL = jnp.broadcast_to(jnp.arange(token_BL.shape[1]), token_BL.shape)
    hidden_BLD, _ = model.hidden(token_BL, place=diffusion.Place(jnp.ones_like(token_BL), slot_BL))
    score_BLV = jnp.where(banned_V, -jnp.inf, model.logits(hidden_BLD[:, :-1]))
    if rule.temperature:

        def noise(key, slot):
            key = jax.random.fold_in(jax.random.wrap_key_data(key), slot)
            return -jnp.log(
                -jnp.log(
                    jax.random.uniform(key, banned_V.shape, minval=jnp.finfo(jnp.float32).tiny)
                )
            )

        score_BLV = diffusion.filter_logits(
            score_BLV, rule.temperature, 0, rule.top_p, rule="dream"
        )
        score_BLV += jax.vmap(jax.vmap(noise, (None, 0)))(key_B, slot_BL[:, 1:])
    return -jnp.diff(jax.lax.top_k(score_BLV, 2)[0])[..., 0]


def write(cfg, model, prompts, numbers, rule, size):
    """{number of a prompt: (new tokens, their margins, steps)}, `size` rows at a time."""
    found, width, banned_V = (
        {},
        max(map(len, prompts)) + cfg.max_new,
        np.arange(model.cfg.vocab) >= rule.vocab,
    )
    banned_V[model.cfg.mask_id] = True
    for i in range(0, len(numbers), size):
        # the last batch is filled up with prompts that come again
        chosen = np.resize(numbers[i : i + size], size)
        key_B = sample_dream.folded_in(jax.random.key(0), chosen)
        rows, stats = sample_draft.generate(
            model, [prompts[n] for n in chosen], cfg.max_new, rule, key_B, (width,)
        )
        token_BL = np.array([np.pad(row, (0, width - len(row))) for row in rows])
        margin_BL = (
            token_BL[:, 1:]
            if rule.draft
            else np.asarray(margins(model, token_BL, banned_V, key_B, rule))
        )
        for n, row, when_L, margin_L in zip(chosen, rows, stats["when"], margin_BL, strict=True):
            begin, new = len(prompts[n]), int((when_L > 0).sum())
            found[int(n)] = row[begin:][:new], margin_L[begin - 1 :][:new], int(when_L.max())
    return found


def verify(p_BV, q_BV, draft_B, u_B, key, rule):
    """(token_B, accepted_B): the draft with probability min(1, p/q), else a draw from max(p - q, 0)
    normalised.

    If draft_B was drawn from q, the token is distributed as p. u_B is uniform in [0, 1). Ref:
    arXiv:2211.17192, alg. 1.
    """
    p_B, q_B = (jnp.take_along_axis(x, draft_B[:, None], 1)[:, 0] for x in (p_BV, q_BV))
    accepted_B = u_B * q_B < p_B
    residual_BV = jnp.maximum(p_BV - q_BV, 0)
    return jnp.where(
        accepted_B, draft_B, pc.draw(residual_BV, key, jnp.arange(len(p_BV)), rule)
    ), accepted_B


@functools.partial(jax.jit, static_argnames="rule")
def accepted(model, token_1L, key_K, rule):
    """[K, L - 2, 2]: whether a draft of each token from the third on is accepted, by min(1, p/q)
    and by equal noise.
    """
    L = token_1L.shape[1]
    hidden_1LD, _ = model.step(model.new_cache(1, L), token_1L, jnp.arange(L)[None])
    p_NV = pc.probabilities(model.logits(hidden_1LD)[0, 1:-1], rule)
    q_NV = pc.probabilities(model.draft(hidden_1LD[:, :-2], token_1L[:, 1:-1])[0], rule)

    def of(key):
        draft, accept, residual, noise = jax.random.split(key, 4)
        slot_N = jnp.arange(L - 2)
        draft_N, u_N = pc.draw(q_NV, draft, slot_N, rule), jax.random.uniform(accept, slot_N.shape)
        equal_N = pc.draw(p_NV, noise, slot_N, rule) == pc.draw(q_NV, noise, slot_N, rule)
        return jnp.stack((verify(p_NV, q_NV, draft_N, u_N, residual, rule)[1], equal_N), 1)

    return jax.lax.map(of, key_K)


def compare_rules(cfg, prompts):
    """Print the shares of drafts that both rules accept, over 64 draws at each position of
    generated texts.
    """
    model, _ = checkpoints.load(pc, cfg.coder, dtype="float32")
    tokenizer = runs.read_tokenizer(cfg.coder)
    ids = {"vocab": tokenizer.get_vocab_size(), "eos": tokenizer.token_to_id("<|endoftext|>")}
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in prompts]
    for temperature, top_p in (*WAYS[1:], (0.6, 0.95)):
        rule, shares = pc.Sampling(temperature, 0, top_p, **ids), []
        texts, stats = pc.generate(model, prompts, cfg.max_new, rule, jax.random.key(0))
        longest = max(len(prompt) + len(text) for prompt, text in zip(prompts, texts, strict=True))
        for n, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            row, key_K = np.zeros((1, longest), np.int32), jax.random.split(jax.random.key(n), 64)
            row[0, : len(prompt) + len(text)] = prompt + text
            of_text = np.asarray(accepted(model, row, key_K, rule))
            shares.append(of_text[:, len(prompt) - 1 : len(prompt) + len(text) - 2].reshape(-1, 2))
        by_ratio, by_noise = (float(share) for share in np.concatenate(shares).mean(0))
        made = stats["tokens"] / stats["forwards"]
        print(
            f"temperature {temperature}, top-p {top_p}: {by_ratio:.4f} by min(1, p/q), {by_noise:.4f} by equal noise, ",
            end="",
        )
        print(f"{by_noise / by_ratio:.4f} of it; {made:.2f} tokens a pass")


def main(cfg):
    jax.config.update("jax_default_matmul_precision", "highest")
    lines = [
        json.loads(line)
        for name in cfg.files
        for line in runs.as_path(name).read_text().splitlines()
    ]
    if not lines:
        raise ValueError(
            '--files: JSON lines with a "prompt", such as out/readings/world/composed.jsonl'
        )
    if cfg.coder:
        return compare_rules(cfg, [line["prompt"] for line in lines[: cfg.prompts]])
    model, _ = checkpoints.load(model_dream, cfg.ckpt, dtype="float32")
    tokenizer, began = runs.read_tokenizer(cfg.ckpt), time.process_time()
    prompts = [
        tokenizer.encode(line["prompt"], add_special_tokens=False).ids
        for line in lines[: cfg.prompts]
    ]
    ways = [*itertools.product(WAYS, cfg.drafts, cfg.draft_steps, cfg.batches)]
    each, given = min(cfg.each, len(ways)), {way: [] for way in ways}
    # (N, passes) -> prompt -> tokens a step
    rates = collections.defaultdict(lambda: collections.defaultdict(list))
    for n, k in itertools.product(range(len(prompts)), range(each)):
        given[ways[(n * each + k) % len(ways)]].append(n)
    out = ["# Drafts: one set of weights, the same text", ""]
    out += [
        f"{len(prompts):,} prompts, each through {each} of {len(ways)} combinations; near-tie: {cfg.tie:g}.",
        "",
    ]
    out += [
        "| temperature, top-p | texts | not equal | tokens | near-ties | smallest margin |",
        "|---" * 6 + "|",
    ]
    for way in WAYS:
        mine, unequal = {how: numbers for how, numbers in given.items() if how[0] == way}, []
        if not any(mine.values()):
            continue
        rule = sample_draft.Sampling(
            0, 1, *way, vocab=tokenizer.get_vocab_size(), eos_ids=(model.cfg.eos_id,)
        )
        want = write(
            cfg, model, prompts, sorted({n for some in mine.values() for n in some}), rule, 50
        )
        for (_, draft, steps, size), numbers in mine.items():
            how = dataclasses.replace(rule, draft=draft, draft_steps=steps)
            for n, (row, _, took) in write(cfg, model, prompts, numbers, how, size).items():
                # the first comes with the prompt
                rates[draft, steps][n].append((len(row) - 1) / max(took - 1, 1))
                first = next(
                    (m for a, b, m in zip(row, *want[n][:2], strict=False) if a != b), None
                )
                unequal += [first] if row != want[n][0] else []
        margin_N = np.concatenate([margin_N for _, margin_N, _ in want.values()])
        out += [
            f"| {way} | {sum(map(len, mine.values())):,} | {len(unequal)} {unequal or ''} | {margin_N.size:,} "
        ]
        out[-1] += f"| {(margin_N < cfg.tie).sum()} | {margin_N.min():.2g} |"
        print(out[-1], flush=True)
    out += [
        "",
        "| N | passes for the drafts | tokens a step | tokens a pass | prompts |",
        "|---" * 5 + "|",
    ]
    for (draft, steps), found in sorted(rates.items()):
        # batches of one prompt give one text
        found = [np.mean(of_prompt) for of_prompt in found.values()]
        mean, error = np.mean(found), 2 * np.std(found, ddof=1) / len(found) ** 0.5
        out.append(
            f"| {draft} | {steps} | {mean:.2f} ± {error:.2f} | {mean / (1 + steps):.2f} | {len(found)} |"
        )
    out += [
        "",
        "Means and two standard errors over prompts, all temperatures together, after the first token. A step",
    ]
    out += [
        "is the passes for the drafts and one that verifies them; with 0 that one also makes the next drafts."
    ]
    out += [
        "With shifted logits a draft pass begins with the model's own next token: at least two tokens a step, but"
    ]
    out += ["for the last step of a text.", ""]
    out += [f"`python bench/{shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}`", ""]
    out += [
        f"{cpu_name()}, one core, {time.process_time() - began:.0f} processor seconds, compiling included."
    ]
    path = RESULTS / f"{cfg.file}.md"
    # the compilers' table, by hand
    below = "".join(path.read_text().partition("\n## ")[1:]) if path.exists() else ""
    path.write_text("\n".join(out) + "\n" + below)


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
