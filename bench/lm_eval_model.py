"""A Dream, or one of its kin, as a model of lm-eval: generation, log-likelihoods, perplexity.

    pip install lm-eval==0.4.13                 # and requirements.txt, in one environment
    python bench/lm_eval_model.py --model=unmask --model_args=ckpt=out/sdar --tasks=gsm8k,arc_easy --batch_size=8
    python bench/lm_eval_model.py --model=unmask --model_args=ckpt=out/llada,likelihood=llada --tasks=hellaswag
    python bench/lm_eval_model.py --model=unmask --model_args=ckpt=out/nemotron,likelihood=ar --tasks=wikitext

The other flags are lm-eval's own. --model_args are those of Unmask below, and fields of
sample_dream.Sampling: steps, block_length, cache, threshold, alg, ...

What a log-likelihood is depends on the model, and stands in the results as "likelihood":
    exact   the sum over all masks of a block, in a model with blocks of up to four tokens
    ar      each token from those before it, in one pass, exact: of causal models, blocks of one
    bound   the ELBO, a lower bound, of any other: the mean of `draws` draws, stratified in time
    llada   LLaDA's own estimate, by number of masks, with cfg_scale; arXiv:2502.09992, eq. 14

Letters: B batch, L length, A tokens of an answer, N chunks of draws, V vocabulary.
"""

import collections
import dataclasses
import functools
import importlib.util
import json
import math
import sys
from pathlib import Path

if not importlib.util.find_spec("lm_eval"):
    sys.exit(__doc__)
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from lm_eval import utils
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

sys.path.insert(0, str(Path(__file__).parents[1]))
import checkpoints
import diffusion
import model_dream as md
import prompts
import runs
import sample_block
import sample_dream

# ---- log-likelihoods -----------------------------------------------------------------------------------------------


def row_of(token_BL):
    """(segments, positions) of rows of one document each; token -1 is padding."""
    return (token_BL >= 0).astype(jnp.int32), jnp.broadcast_to(
        jnp.arange(token_BL.shape[1]), token_BL.shape
    )


@functools.partial(jax.jit, static_argnames="graph")
def exact_nats(params, token_BL, fixed_BL, *, graph):
    """-log p [B] of the tokens that are not fixed, given those that are; see Dream.exact_nll."""
    segment_BL, position_BL = row_of(token_BL)
    nll_BL = nnx.merge(graph, params).exact_nll(
        jnp.maximum(token_BL, 0), segment_BL, position_BL, fixed_BL
    )
    return nll_BL.sum(1)


@functools.partial(jax.jit, static_argnames=("graph", "draws", "size"))
def bound_nats(params, key, token_L, fixed_L, *, graph, draws, size):
    """A bound on -log p of the tokens not fixed: Dream.nelbo's mean over draws, `size` a time."""
    model = nnx.merge(graph, params)
    token_BL, fixed_BL = (jnp.broadcast_to(x_L, (size, len(x_L))) for x_L in (token_L, fixed_L))
    segment_BL, position_BL = row_of(token_BL)
    part_BL = md.parts(segment_BL, position_BL, model.cfg.block_length or None)

    def nats(row_B):
        noise = md.noise(key, draws, row_B, part_BL)
        return model.nelbo(jnp.maximum(token_BL, 0), segment_BL, position_BL, *noise, fixed_BL)

    return jax.lax.map(nats, jnp.arange(draws).reshape(-1, size)).sum() / draws


@functools.partial(jax.jit, static_argnames=("graph", "cfg_scale"))
def llada_nats(params, noised_BL, token_L, prompt, answer, *, graph, cfg_scale=0.0):
    """LLaDA's estimate of -log p of the `answer` tokens after `prompt` ones: mean of sum(nll) A /
    masks over the rows.

    Token -1 is padding. With cfg_scale w the logits are u + (w + 1) (c - u), u those with the
    prompt masked.
    """
    model, see_BL = nnx.merge(graph, params), jnp.broadcast_to(token_L >= 0, noised_BL.shape)
    logits_BLV = model(noised_BL, None, see_BL)
    if cfg_scale:
        hidden_BL = jnp.where(jnp.arange(len(token_L)) < prompt, model.cfg.mask_id, noised_BL)
        unguided_BLV = model(hidden_BL, None, see_BL)
        logits_BLV = unguided_BLV + (cfg_scale + 1) * (logits_BLV - unguided_BLV)
    index_BL1 = jnp.broadcast_to(jnp.maximum(token_L, 0), noised_BL.shape)[..., None]
    nll_BL = -jnp.take_along_axis(diffusion.log_softmax(logits_BLV), index_BL1, -1)[..., 0]
    in_answer_L = (jnp.arange(len(token_L)) >= prompt) & (token_L >= 0)
    masked_BL = (noised_BL == model.cfg.mask_id) & in_answer_L
    return jnp.mean((masked_BL * nll_BL).sum(1) * answer / masked_BL.sum(1))


def llada_counts(first, answer, rows):
    """LLaDA's numbers of masked tokens [B]: evenly spread over 1 .. answer from `first` on."""
    return (np.round(first + np.arange(rows) * answer / rows).astype(int) - 1) % answer + 1


def llada_masks(rng, answer, rows):
    """Random masks [B, A] with llada_counts from a random first one."""
    count_B = llada_counts(rng.integers(1, answer + 1), answer, rows)
    return np.argsort(np.argsort(rng.random((rows, answer)), 1), 1) < count_B[:, None]


# ---- the model class -----------------------------------------------------------------------------------------------


@register_model("unmask")
class Unmask(TemplateLM):
    """max_length: tokens of context and answer, 0: the model's positions, at most 4096; max_new: of
    a generation whose task does not say; greedy: whether is_greedy is computed (a generation per
    answer), else it is False.
    """

    def __init__(
        self, ckpt, batch_size=8, max_batch_size=None, device=None, dtype="", bits=0, likelihood="", draws=128,
        cfg_scale=0.0, max_length=0, max_new=256, greedy=False, seed=0, **sampling,
    ):  # fmt: skip
        super().__init__()
        self.batch_size = int(batch_size)
        self.draws = draws
        self.cfg_scale = cfg_scale
        self.greedy = greedy
        settings = {"dtype": dtype, "bits": bits, "rows": self.batch_size}
        self.model, _, self.mesh = checkpoints.load_for_inference(md, ckpt, **settings)
        self.ckpt, cfg = ckpt, self.model.cfg
        self.tokenizer, self.wrap = (
            sample_dream.load_tokenizer(ckpt, cfg),
            prompts.chat_template(runs.as_path(ckpt)),
        )
        self.max_length, self.max_new = max_length or min(cfg.positions, 4096), max_new
        ends = {cfg.eos_id, prompts.turn_end(self.tokenizer)}
        ends.add(self.tokenizer.token_to_id("<|endoftext|>"))
        ends -= {None, cfg.expand_id}
        settings = {"vocab": self.tokenizer.get_vocab_size(), "eos_ids": tuple(sorted(ends))}
        self.rule, self.sampler = sample_dream.Sampling(**sampling, **settings), sample_dream
        if cfg.block_length:
            self.rule, self.sampler = sample_block.settings_of(self.rule), sample_block

        # How likelihoods are computed, and the model for it: that of `ar` has blocks of one token.
        small = 0 < cfg.block_length <= md.EXACT_BLOCK
        self.likelihood = likelihood or ("exact" if small else "bound")
        if self.likelihood not in ("exact", "ar", "bound", "llada") or (
            self.likelihood == "exact" and not small
        ):
            raise ValueError(
                f"likelihood={likelihood}: ar, bound, llada, or exact of blocks up to {md.EXACT_BLOCK}"
            )
        if self.likelihood == "ar" and not (cfg.causal or cfg.block_length == 1):
            raise ValueError(
                "likelihood=ar is for causal models (Nemotron) and for blocks of one token"
            )
        self.graph, self.params = nnx.split(self.model)
        if self.likelihood == "ar":
            self.graph = md.graph_of(dataclasses.replace(cfg, block_length=1), self.model.compute)
        self.key, self.rng = jax.random.key(seed), np.random.default_rng(seed)
        drawn = self.likelihood in ("bound", "llada")
        each = f", {draws} draws each" if drawn else ""
        print(f"log-likelihoods: {self.likelihood}{each}", file=sys.stderr)

    def get_model_info(self):
        """What the results say of the model."""
        drawn = {"draws": self.draws} if self.likelihood in ("bound", "llada") else {}
        return {"likelihood": self.likelihood, "block_length": self.model.cfg.block_length} | drawn

    # ---- text and token ids

    @property
    def eot_token_id(self):
        return self.model.cfg.eos_id

    @property
    def prefix_token_id(self):
        return self.model.cfg.bos_id  # EOS where the tokenizer has no BOS

    @property
    def tokenizer_name(self):
        return str(self.ckpt)

    def tok_encode(self, string, add_special_tokens=None, **_):
        return self.tokenizer.encode(string, add_special_tokens=False).ids

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        """The model's own template, of turns before an answer that it begins."""
        if not self.wrap or not add_generation_prompt:
            raise ValueError(
                f"{self.ckpt} has no chat template, or the task begins the answer itself"
            )
        return self.wrap(chat_history)

    # ---- likelihoods

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **_):
        """[(log p of the answer, whether it is greedy)] of (texts, context ids, answer ids)."""
        pairs = [(context, answer[-(self.max_length - 1) :]) for _, context, answer in requests]
        pairs = [
            (context[max(0, len(context) + len(answer) - self.max_length) :], answer)
            for context, answer in pairs
        ]
        found = []
        with checkpoints.mesh_context(self.mesh):
            for i in range(0, len(pairs), self.batch_size):
                batch = pairs[i : i + self.batch_size]
                drawn = self.likelihood in ("bound", "llada")
                nats = (
                    [self.nats_by_draws(i + j, *pair) for j, pair in enumerate(batch)]
                    if drawn
                    else self.exact(batch)
                )
                greedy = self.is_greedy(batch) if self.greedy else [False] * len(batch)
                found += zip((-float(x) for x in nats), greedy, strict=False)
        for (texts, *_), answer in zip(requests, found, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return found

    def exact(self, batch):
        """-log p of each answer; the batch is filled up, so that few shapes are compiled."""
        width = sample_dream.canvas_width(
            max(len(context + answer) for context, answer in batch), self.max_length
        )
        token_BL = np.full((self.batch_size, width), -1)
        fixed_BL = np.ones((self.batch_size, width), int)
        for token_L, fixed_L, (context, answer) in zip(token_BL, fixed_BL, batch, strict=False):
            token_L[: len(context + answer)] = context + answer
            fixed_L[len(context) : len(context + answer)] = 0
        return np.asarray(exact_nats(self.params, token_BL, fixed_BL, graph=self.graph))[
            : len(batch)
        ]

    def nats_by_draws(self, number, context, answer):
        """A bound on -log p of an answer, estimated; noise by the seed and the answer's number."""
        prompt, A = len(context), len(answer)
        width = sample_dream.canvas_width(prompt + A, self.max_length)
        token_L, fixed_L = np.full(width, -1), np.ones(width, int)
        token_L[: prompt + A], fixed_L[prompt : prompt + A] = context + answer, 0
        size = math.gcd(self.draws, self.batch_size)
        if self.likelihood == "bound":
            key = jax.random.fold_in(self.key, number)
            settings = {"graph": self.graph, "draws": self.draws, "size": size}
            return bound_nats(self.params, key, token_L, fixed_L, **settings)
        nats = []
        for _ in range(self.draws // size):
            noised_BL = np.tile(np.maximum(token_L, 0), (size, 1))
            noised_BL[:, prompt : prompt + A][llada_masks(self.rng, A, size)] = (
                self.model.cfg.mask_id
            )
            settings = {"graph": self.graph, "cfg_scale": self.cfg_scale}
            nats.append(llada_nats(self.params, noised_BL, token_L, prompt, A, **settings))
        return np.mean(nats)

    def is_greedy(self, batch):
        """Whether the model generates each of the answers at temperature 0."""
        texts = self.generated(
            [context for context, _ in batch], max(len(answer) for _, answer in batch), self.rule
        )
        return [ids[: len(answer)] == answer for ids, (_, answer) in zip(texts, batch, strict=True)]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """log p of texts after BOS, in windows of max_length that see a token of the one before."""
        totals = []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            windows = utils.get_rolling_token_windows(
                ids, self.prefix_token_id, self.max_length - 1, 1
            )
            windows = [(None, *utils.make_disjoint_window(window)) for window in windows]
            totals.append(sum(logp for logp, _ in self._loglikelihood_tokens(windows)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals

    # ---- generation

    def generated(self, prompts, new, rule):
        """The new ids of each prompt, a batch at a time, in at most three canvas widths."""
        longest = self.max_length - new
        if longest < 1:
            raise ValueError(
                f"max_gen_toks={new} leaves no room for a prompt: raise max_length={self.max_length}"
            )
        prompts = [ids[-longest:] or [self.prefix_token_id] for ids in prompts]
        lengths = sorted(len(ids) + new for ids in prompts)
        widths = sample_dream.widths(lengths, self.batch_size, self.max_length)
        shape = {"widths": widths, "rows": self.batch_size}
        rows = []
        for i in range(0, len(prompts), self.batch_size):
            batch, key = prompts[i : i + self.batch_size], jax.random.fold_in(self.key, i)
            with checkpoints.mesh_context(self.mesh):
                rows += self.sampler.generate(self.model, batch, new, rule, key, **shape)[0]
        return [row[len(ids) :] for row, ids in zip(rows, prompts, strict=True)]

    def generate_until(self, requests, disable_tqdm=False):
        """Texts up to the first of the task's stops, or an end token."""
        groups, texts = collections.defaultdict(list), [""] * len(requests)
        for number, request in enumerate(requests):
            groups[json.dumps(request.args[1], sort_keys=True)].append(number)
        for settings, numbers in groups.items():
            settings = json.loads(settings)
            stops, new = settings.get("until") or [], settings.get("max_gen_toks", self.max_new)
            heat = settings.get("temperature", 1.0) if settings.get("do_sample") else 0.0
            rule = dataclasses.replace(
                self.rule, temperature=heat, top_p=settings.get("top_p", 1.0)
            )
            found = self.generated(
                [self.tok_encode(requests[n].args[0]) for n in numbers], new, rule
            )
            for number, ids in zip(numbers, found, strict=True):
                end = next((i for i, token in enumerate(ids) if token in rule.eos_ids), len(ids))
                text = self.tokenizer.decode(ids[:end], skip_special_tokens=False)
                for stop in [stops] if isinstance(stops, str) else stops:
                    text = text.split(stop)[0] if stop else text
                texts[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return texts


if __name__ == "__main__":
    cli_evaluate()
