"""coupled_grpo.py and grpo.py: closed forms of scores, loss and advantages, tasks, runs."""

import dataclasses
import functools
import json
import math
import os
import re
import signal
import subprocess
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tokenizers
from conftest import AS_A_USER, ROOT, command, free_port, kill_and_resume, run, says
from flax import nnx

import checkpoints
import coupled_grpo
import diffusion
import grpo
import model_dream as dream
import prompts
import runs
import sample_block
import sample_dream
import sandbox

DATA = Path(os.environ.get("SHARED_DATA", ROOT.parent / "shared" / "data"))
QWEN = DATA / "qwen2.5_tokenizer"
TINY = dream.DreamConfig(
    61, 32, 1, 4, 2, 8, 48, mask_id=4, pad_id=0, bos_id=1, eos_id=2, positions=128
)


def tiny(cfg=TINY, matrix=0.1):
    """Parameters of a Dream whose predictions are far from uniform; norms are 1."""
    rng = np.random.default_rng(0)
    scale = {"embed_tokens": 0.4, "lm_head": 0.2}
    flat = {}
    for name, shape in checkpoints.flatten(dream.param_shapes(cfg)).items():
        flat[name] = jnp.ones(shape.shape)
        if not name.endswith("norm"):
            flat[name] = jnp.float32(rng.normal(0, scale.get(name, matrix), shape.shape))
    return checkpoints.unflatten(flat)


def model_of(params, cfg=TINY):
    return nnx.merge(dream.graph_of(cfg, dream.Compute(jnp.float32)), params)


@jax.jit
def forward(params, token_BL):
    return model_of(params)(token_BL)


@functools.partial(jax.jit, static_argnames="cfg")
def scores_of(params, token_BL, see_BL, u_BC, ratio_B, cfg=TINY):
    batch = {"token_BL": token_BL, "see_BL": see_BL, "u_BC": u_BC, "ratio_B": ratio_B}
    return grpo.coupled_scores(model_of(params, cfg), batch, TINY.mask_id, 8)


class Bag:
    """A small model: a token is predicted from the mean of all embeddings and its neighbour's."""

    cfg = dream.DreamConfig  # its defaults

    def __init__(self, params):
        self.params = params

    def hidden(self, token_BL, see_BM=None):
        x_BLD = self.params["emb"][token_BL]
        return jnp.tanh(x_BLD + x_BLD.mean(1, keepdims=True)), None

    def logits(self, hidden_BTD):
        return hidden_BTD @ self.params["out"].T


def bag():
    rng = np.random.default_rng(2)
    return {name: jnp.float32(rng.normal(size=(TINY.vocab, 8))) for name in ("emb", "out")}


def example(B=3, prompt=5, C=11, seed=0):
    """(token_BL, see_BL, u_BC, ratio_B) of made-up rows without padding."""
    rng = np.random.default_rng(seed)
    token_BL = jnp.asarray(rng.integers(5, TINY.vocab, (B, prompt + C)))
    u_BC, ratio_B = jnp.float32(rng.random((B, C))), jnp.float32(rng.uniform(0.2, 0.8, B))
    return token_BL, jnp.ones(token_BL.shape, bool), u_BC, ratio_B


def batch_of(token, see, u, ratio, **changes):
    """A micro-batch whose tokens all count, with the score itself for old."""
    shape = u.shape
    return {
        "token_BL": token, "see_BL": see, "u_BC": u, "ratio_B": ratio, "first": True,
        "advantage_B": jnp.linspace(-1, 1, len(token)), "counted_BC": jnp.ones(shape, bool),
        "old_BC": jnp.zeros(shape), "ref_BC": jnp.zeros(shape),
    } | changes  # fmt: skip


def close(got, want, tolerance=1e-5):
    np.testing.assert_allclose(np.asarray(got), want, rtol=tolerance, atol=tolerance)


# ---- scores


def arrays_of(jaxpr):
    """The shapes of all arrays that a program names, those inside its loops too."""
    for equation in jaxpr.eqns:
        yield from (variable.aval.shape for variable in equation.outvars)
        is_program = lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")  # noqa: E731
        for value in jax.tree.leaves(equation.params, is_leaf=is_program):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from arrays_of(inner)


def test_no_logits_but_those_of_a_chunk_exist_forward_or_backward():
    batch, params, chunk = batch_of(*example(4, 8, 32)), bag(), 16

    def loss(params):
        return grpo.micro_loss(Bag(params), batch, TINY.mask_id, chunk=chunk)[0]

    shapes = list(arrays_of(jax.make_jaxpr(jax.value_and_grad(loss))(params).jaxpr))
    logits = [math.prod(shape) for shape in shapes if shape and shape[-1] == TINY.vocab]
    assert max(logits) == chunk * TINY.vocab  # the rest are weights, which end in D


def test_chunks_of_the_head_are_those_of_a_device():
    """On four devices the head, which is gathered for each chunk, runs as often as on one with a
    fourth of the rows.
    """
    mesh = checkpoints.mesh_of(jax.devices()[:4], (2, 2, 1))
    hidden, token, head = jnp.zeros((8, 32, 8)), jnp.zeros((8, 32), int), jnp.zeros((8, TINY.vocab))

    def passes():
        score = lambda x, token: grpo.token_logps(lambda x: x @ head, x, token, 64)  # noqa: E731
        equations = jax.make_jaxpr(score)(hidden, token).eqns
        return [each.params["length"] for each in equations if each.primitive.name == "scan"]

    assert passes() == [4]  # 8 rows of 8 tokens
    with jax.set_mesh(mesh):
        assert passes() == [1]  # 2 rows of 32 on each


@pytest.mark.parametrize("shift", [True, False])
def test_scores_of_a_model_are_those_of_three_passes(shift):
    token, see, u, ratio = example()
    params, P = tiny(), token.shape[1] - u.shape[1]
    got, entropy = scores_of(params, token, see, u, ratio, dataclasses.replace(TINY, shift=shift))
    one, r = u < ratio[:, None], ratio[:, None]
    want, spread = 0, []
    for mask, weight in ((one | True, 1), (one, one / r), (~one, ~one / (1 - r))):
        shown = token.at[:, P:].set(jnp.where(mask, TINY.mask_id, token[:, P:]))
        logp = jax.nn.log_softmax(forward(params, shown))
        logp = logp[:, P - 1 : -1] if shift else logp[:, P:]
        want += weight * jnp.take_along_axis(logp, token[:, P:, None], -1)[..., 0] / 2
        spread.append(-(jnp.exp(logp) * logp).sum(-1))
    close(got, want)
    assert np.std(np.asarray(got)) > 1
    close(entropy, (spread[0] + jnp.where(one, *spread[1:])) / 2)


def test_left_padding_changes_no_score():
    token, see, u, ratio = example()
    params = tiny()
    want, _ = scores_of(params, token, see, u, ratio)
    padded = jnp.pad(token, ((0, 0), (7, 0)), constant_values=TINY.pad_id)
    got, _ = scores_of(params, padded, jnp.pad(see, ((0, 0), (7, 0))), u, ratio)
    close(got, want)
    seen, _ = scores_of(params, padded, jnp.ones(padded.shape, bool), u, ratio)
    assert np.abs(seen - want).max() > 1e-3  # the padding is there to be seen


@pytest.mark.slow
def test_a_block_as_long_as_the_row_is_scored_as_the_canvas_of_a_model_without_blocks():
    token, _, u, ratio = example()
    params, see = tiny(), jnp.arange(7 + token.shape[1]) >= jnp.array([[7], [5], [7]])
    token = jnp.pad(token, ((0, 0), (7, 0)), constant_values=TINY.pad_id)
    got, want = (
        scores_of(params, token, see, u, ratio, cfg=dataclasses.replace(TINY, block_length=block))
        for block in (18, 0)
    )
    jax.tree.map(close, got, want)


def test_blocks_of_a_token_are_scored_by_the_autoregressive_likelihood():
    token, see, u, ratio = example()
    cfg = dataclasses.replace(TINY, layers=2, block_length=1)
    params, P = tiny(cfg), token.shape[1] - u.shape[1]

    @jax.jit
    def causal(params):
        """log p of the completion's tokens in a causal pass over the text."""
        model = model_of(params, cfg)
        slot_BL = jnp.broadcast_to(jnp.arange(token.shape[1]), token.shape)
        place = diffusion.Place(jnp.ones_like(slot_BL), slot_BL)
        logp = jax.nn.log_softmax(model.logits(model.hidden(token, place=place)[0][:, P - 1 : -1]))
        return jnp.take_along_axis(logp, token[:, P:, None], -1)[..., 0]

    weight = jnp.where(u < ratio[:, None], 1 / ratio[:, None], 1 / (1 - ratio[:, None]))
    close(scores_of(params, token, see, u, ratio, cfg=cfg)[0], causal(params) * (1 + weight) / 2)


class Uniform:
    """All tokens are equally likely, whatever is shown."""

    cfg, V = dream.DreamConfig, 16

    def hidden(self, token_BL, see_BM=None):
        return jnp.zeros((*token_BL.shape, 1)), None

    def logits(self, hidden_BTD):
        return jnp.zeros((*hidden_BTD.shape[:2], self.V))


@jax.jit
def uniform_scores(token, u, ratio):
    batch = {"token_BL": token, "see_BL": token == 0, "u_BC": u, "ratio_B": ratio}
    return grpo.coupled_scores(Uniform(), batch, 3, 4096)


@pytest.mark.parametrize("t", [0.2, 0.5, 0.7])
def test_the_mean_of_a_score_and_its_variance(t):
    """Under a uniform model a score is -log V (1 + w) / 2, w = m / t + (1 - m) / (1 - t), of mean 2
    and variance 1 / (t (1 - t)) - 4; of two independent masks it would be 1 / (t (1 - t)) - 2.
    """
    u = jnp.float32(np.random.default_rng(0).random((100, 500)))
    score, entropy = uniform_scores(jnp.zeros((100, 501), jnp.int32), u, jnp.float32(t))
    w = -2 * np.asarray(score, np.float64) / math.log(Uniform.V) - 1
    variance = 1 / (t * (1 - t)) - 4
    assert abs(w.mean() - 2) < 5 * math.sqrt(variance / w.size) + 1e-5
    assert abs(w.var() - variance) < 0.05 * (1 + variance)
    close(entropy, math.log(Uniform.V))


def test_banned_tokens_cost_nothing_but_their_probability():
    logits = jnp.zeros((1, 3, 2, 5)).at[..., 4].set(-jnp.inf)
    inputs = jnp.array([[0, 3]]), jnp.array([[True, False]]), (0.5, 1.0, 1.0)

    def total(logits):
        score, entropy = grpo.merge_views(lambda x: x, logits, *inputs)
        return score.sum(), (score, entropy)

    (_, (score, entropy)), grad = jax.jit(jax.value_and_grad(total, has_aux=True))(logits)
    close(score, -1.5 * math.log(4))
    close(entropy, math.log(4))
    assert np.isfinite(grad).all()


def test_a_path_in_as_many_groups_as_steps_has_the_sampler_s_own_log_probability(monkeypatch):
    """Step by step on the canvas that the sampler saw, tokens behind an end and all."""
    monkeypatch.setattr(grpo, "GROUPS", 12)
    params = tiny()
    canvas = sample_dream.canvas(GIVEN, 12, TINY, 20)
    settings = {"temperature": 1.0, "block_length": 6, "ban_ids": (), "eos_ids": (7, 9)}
    rule = sample_dream.Sampling(**settings, history=True)
    token_BL, stats = sample_dream.fill(model_of(params), *canvas, rule, jax.random.key(0), rows=4)
    record = stats["record"]
    path_BL, group_BL = grpo.path_of(record, token_BL, TINY.mask_id)
    group_BC = group_BL[:, -12:]
    assert (group_BL[:, :-12] == 12).all(), "what is given is of no group"
    assert (path_BL != token_BL).any(), "some text has ended before what is behind its end"
    assert (group_BC == 12).any()
    batch = {"token_BL": path_BL, "see_BL": canvas[1], "group_BC": group_BC}
    score_BC, entropy_BC = grpo.path_scores(model_of(params), batch, TINY.mask_id)
    drawn_BC = group_BC < 12
    close(score_BC[drawn_BC], record.logp_BL[:, -12:][drawn_BC])
    assert (entropy_BC > 0).all()


def test_steps_are_shared_evenly_over_the_groups_of_a_path():
    step_BL = np.array([[-1, 8, 0, 5, 5, 9, 2, 3, 7, 4, 6], [-1, 3, 1, 1, *[-1] * 7]])
    token_BL = np.full(step_BL.shape, 11)
    token_BL[1, 2] = 4  # filled behind an end, and never drawn
    record = sample_dream.Record(step_BL, token_BL, None)
    path_BL, group_BL = grpo.path_of(record, np.full(step_BL.shape, 5), mask_id=4)
    assert group_BL[0].tolist() == [8, 6, 0, 3, 3, 7, 0, 1, 5, 2, 4]
    assert group_BL[1, :4].tolist() == [8, 1, 8, 0]
    assert path_BL[:, :4].tolist() == [[5, 11, 11, 11], [5, 11, 5, 11]]


def test_the_id_that_grows_a_hole_has_no_probability_as_in_the_sampler():
    cfg, params = dataclasses.replace(TINY, expand_id=60), tiny()
    token, *rest = example()
    token = jnp.minimum(token, 59)
    # what it says of that id does not count
    louder = params | {"lm_head": params["lm_head"].at[60].mul(1e3)}

    def score_of(params, cfg):
        return scores_of(params, token, *rest, cfg=cfg)[0]

    close(score_of(louder, cfg), score_of(params, cfg), 1e-6)
    assert np.abs(score_of(louder, TINY) - score_of(params, TINY)).max() > 1
    grad = jax.grad(lambda params: score_of(params, cfg).sum())(params)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(grad))
    assert not np.asarray(grad["lm_head"][60]).any()


def test_a_canvas_without_a_prompt_is_refused():
    token, see, u, ratio = example(prompt=0)
    with pytest.raises(AssertionError, match="11 columns hold no prompt before 11"):
        scores_of(tiny(), token, see, u, ratio)


def test_masks_are_functions_of_key_iteration_and_row():
    compiled = jax.jit(grpo.draw_masks, static_argnums=(2, 3, 4))

    def draw(iteration, rows=6, seed=3, share=2):
        masks = jax.device_get(compiled(jax.random.key(seed), iteration, rows, 400, share))
        return masks["ratio_B"], masks["u_BC"]

    ratio, u = draw(1)
    jax.tree.map(np.testing.assert_array_equal, draw(1), (ratio, u))
    jax.tree.map(np.testing.assert_array_equal, draw(1, rows=3), (ratio[:3], u[:3]))
    np.testing.assert_array_equal(ratio, np.repeat(ratio[::2], 2))  # every two rows have one
    assert len(set(ratio.tolist())) == 3
    for another_ratio, another_u in (draw(0), draw(2), draw(1, seed=4)):
        assert (np.abs(another_u - u) > 0).mean() > 0.99
        assert another_ratio[0] != ratio[0]
    assert (np.abs(u[1:] - u[:-1]) > 0).mean() > 0.99  # rows differ
    assert 0.47 < u.mean() < 0.53
    many = np.array([draw(i)[0][0] for i in range(200)])
    assert ((many > 0.2) & (many < 0.8)).all()
    assert abs(many.mean() - 0.5) < 0.05


def settled(devices=1, **settings):
    """A Config whose open settings are settled."""
    return coupled_grpo.settle(coupled_grpo.Config(**settings), devices)


# ---- from tokens to rewards

# The reference's test of a completion's form, on what it decodes: all tokens but the special ones.
REFERENCE_FORM = re.compile(r"^(?:(?!```).)*```python\n(?:(?!```).)*```\n$", re.DOTALL)
PUBLISHED = "Here is the code to solve this problem: \n```python\n{}\n```<|im_end|>\n"
RIGHT = "def shared(a, b):\n  return [value for value in a if value in  b]"
ANSWERS = [  # what a model writes, and its rewards: (code, code_format)
    (PUBLISHED.format(RIGHT), (1.0, 1.0)),
    (PUBLISHED.format(RIGHT) + "<|endoftext|>", (1.0, 1.0)),
    (PUBLISHED.format(RIGHT.replace("in  b", "not in b")), (0.0, 1.0)),
    (PUBLISHED.format(RIGHT.replace("def", "fed")), (0.0, 0.5)),
    (PUBLISHED.format(RIGHT).replace("python", "py"), (0.0, 0.0)),
    (PUBLISHED.format(RIGHT).replace("<|im_end|>", " It compares.<|im_end|>"), (0.0, 0.0)),
    (PUBLISHED.format(RIGHT).replace("<|im_end|>\n", ""), (0.0, 0.0)),
    (RIGHT + "<|im_end|>\n", (0.0, 0.0)),
]


@pytest.mark.skipif(not QWEN.is_dir(), reason=f"no Qwen2.5 tokenizer in {QWEN}; set SHARED_DATA")
def test_answers_in_the_published_form_are_rewarded_from_tokens_to_reward(tmp_path):
    """With Qwen's tokenizer, its template and the 7b preset, as the reference would; and when the
    sampler has filled up the rest.
    """
    tokenizer = tokenizers.Tokenizer.from_file(str(QWEN / "tokenizer.json"))
    question = "Write a function to find the shared elements from the given two lists."
    tests = ["assert shared([1, 2], [2, 3]) == [2]", "assert shared([5], [5]) == [5]"]
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"question": question, "test_cases": tests}))
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n"
    )
    cfg = settled(preset="7b", ckpt=str(tmp_path), prompts=str(tmp_path))
    inputs = cfg, dream.CONFIGS["7b"], tokenizer, tmp_path / "tasks.jsonl"
    tasks, end = coupled_grpo.Tasks(*inputs), tokenizer.token_to_id("<|im_end|>")
    functions = {name: sandbox.find_reward(name) for name in cfg.rewards}
    tokenizer.encode_special_tokens = False  # an answer's <|im_end|> is a token
    numbers, C = [0] * len(ANSWERS), cfg.max_new
    canvas_BL, _ = tasks.canvas(numbers)
    for behind in ("<|endoftext|>", "<|im_end|>"):
        for row, (answer, _) in zip(canvas_BL, ANSWERS, strict=True):
            if behind == "<|im_end|>":
                answer = answer.removesuffix("<|endoftext|>").rstrip("\n")
            ids = tokenizer.encode(answer, add_special_tokens=False).ids
            row[-C:] = tokenizer.token_to_id(behind)
            row[len(row) - C :][: len(ids)] = ids
            if end not in ids:  # a text that was cut off where its tokens end
                row[-C:] = np.pad(ids, (C - len(ids), 0), constant_values=ids[0])
        mask = grpo.completion_mask(canvas_BL[:, -C:], end)
        rewards = np.array(sandbox.score(tasks.completions(numbers, canvas_BL, mask), functions))
        assert [tuple(reward) for reward in rewards.tolist()] == [want for _, want in ANSWERS]
        if behind == "<|endoftext|>":
            texts = tokenizer.decode_batch(canvas_BL[:, -C:].tolist(), skip_special_tokens=True)
            forms = [bool(REFERENCE_FORM.match(text)) for text in texts]
            assert forms == [form > 0 for form in rewards[:, 1]]


def test_rollouts_choose_positions_by_the_distribution_and_not_by_what_was_drawn():
    """Rows of one prompt see the same canvas in their first step, so they fill the same positions;
    not with "drawn".
    """
    model = model_of(tiny())
    for score in ("distribution", "drawn"):
        settings = {"temperature": 1.0, "threshold": 0.06, "block_length": 16}
        rule = sample_dream.Sampling(**settings, score=score, history=True)
        canvas = sample_dream.canvas([[5, 6, 7]] * 8, 16, TINY, 19)
        _, stats = sample_dream.fill(model, *canvas, rule, jax.random.key(0))
        filled_BL = stats["when"] == 1
        assert filled_BL.any()
        assert (filled_BL == filled_BL[0]).all() == (score == "distribution")
    assert coupled_grpo.rule_of(settled(), 50, (2,)).score == "distribution"


# ---- tasks as canvases


def test_the_first_test_is_shown_unless_the_question_holds_code():
    task = {"question": "Add one.", "test_cases": ["assert f(1) == 2", "assert f(2) == 3"]}
    assert coupled_grpo.question_of(task) == "Add one.\nTest cases: assert f(1) == 2"
    for change in ({"question": "Complete:\n```\ndef f(a):\n```\n"}, {"test_cases": []}):
        assert coupled_grpo.question_of(task | change) == (task | change)["question"]


class Letters:
    """The parts of a model's architecture that a canvas needs."""

    mask_id, pad_id = 28, 27


def letters(tmp_path, text, max_prompt=2, max_new=8):
    """The Tasks of a file with this text; a token is a letter."""
    ids = {chr(ord("a") + i): i for i in range(26)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ids, []))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    (tmp_path / "tasks.jsonl").write_text(text)
    cfg = coupled_grpo.Config(ckpt=str(tmp_path), max_prompt=max_prompt, max_new=max_new)
    return coupled_grpo.Tasks(cfg, Letters, tokenizer, tmp_path / "tasks.jsonl")


def test_long_prompts_are_left_out_and_counted(tmp_path):
    line = '{{"prompt": "{}", "test_cases": ["assert True"]}}\n'
    tasks = letters(tmp_path, "".join(map(line.format, ("ab", "c", "def", "xyz"))))
    assert [task["prompt"] for task in tasks.rows] == ["ab", "c"]
    assert tasks.dropped == 2
    token_BL, see_BL = tasks.canvas([1, 0])
    assert token_BL.tolist() == [[27, 2] + [28] * 8, [0, 1] + [28] * 8]
    assert see_BL[:, :2].tolist() == [[False, True], [True, True]]
    assert see_BL[:, 2:].all()


def test_a_completion_is_its_counted_tokens_and_its_program_stands_in_a_code_block(tmp_path):
    task = {"id": 7, "prompt": "ab", "test_cases": ["assert True"]}
    tasks = letters(tmp_path, json.dumps(task), max_new=4)
    token_BL = np.array([[0, 1, 2, 3, 9, 9]])
    (row,) = tasks.completions([0], token_BL, np.array([[True, True, False, False]]))
    text = "```python\nabcd\n```\n"
    assert row == task | {"text": text, "tokens": 2, "written": "cd"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no task of at most"),
        ('{"prompt": "x", "test_cases": []}\n', "line 1 has no tests"),
        ('{"prompt": "x", "test_cases": ["assert True"]}\n{"prompt": 3}\n', "line 2 is no task"),
        ('{"prompt": "x", "test_cases": "assert True"}\n', "line 1 is no task"),
        ("[1]\n", "line 1 is no task"),
        ('{"question": "x", "test_cases": ["assert True"]}\n', "has no chat template"),
        (
            '{"prompt": "abc", "test_cases": ["x"]}\n',
            "holds no task of at most --max_prompt=2 tokens; 1 are longer",
        ),
    ],
)
def test_bad_tasks_are_named(tmp_path, text, words):
    with pytest.raises(ValueError, match=words):
        letters(tmp_path, text)


def test_a_completion_that_the_sandbox_could_not_run_counts_in_no_held_out_figure():
    known = {"a": [1.0, math.nan], "b": [math.nan, math.nan], "c": [0.5, 1.0]}
    files = [types.SimpleNamespace(path=f"files/{name}.jsonl", rows=[name]) for name in known]
    trainer = types.SimpleNamespace(
        cfg=settled(),
        heldout=files,
        rollout=lambda tasks, *_: types.SimpleNamespace(rows=tasks.rows * 2),
        reward=lambda rows: [[x] for x in known[rows[0]]],
    )
    figures = coupled_grpo.Trainer.evaluate(trainer)
    assert figures == {"a_reward": 1.0, "a_pass": 1.0, "c_reward": 0.75, "c_pass": 0.5}


def test_a_run_says_what_it_gained_and_warns_where_its_rounds_fell():
    cfg = coupled_grpo.Config(heldout=("tasks/new.jsonl", "other.jsonl"))
    rows = [{"round": 0, "new_reward": 0.25}]
    rows += [{"round": i, "reward": 0.6 - 0.02 * i + 0.01 * (i % 2)} for i in range(1, 9)]
    rows[-1]["new_reward"] = 0.5
    fell = "\n".join(map(json.dumps, rows))
    gained, warning = coupled_grpo.gains(cfg, fell)
    assert gained == "held-out reward of new: 0.250 -> 0.500"
    assert "rewarded by 0.575 in the first quarter and 0.455 in the last" in warning
    rose = [row | {"reward": 1 - row["reward"]} if "reward" in row else row for row in rows]
    assert coupled_grpo.gains(cfg, "\n".join(map(json.dumps, rose))) == [gained]
    assert coupled_grpo.gains(cfg, json.dumps(rows[1])) == []


@pytest.mark.skipif(not QWEN.is_dir(), reason=f"no Qwen2.5 tokenizer in {QWEN}; set SHARED_DATA")
def test_the_names_of_special_tokens_in_a_question_are_text(tmp_path):
    """As everywhere else: only the template's own are tokens."""
    tokenizer = tokenizers.Tokenizer.from_file(str(QWEN / "tokenizer.json"))
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    task = {"question": "What is <|im_end|>?", "test_cases": ["assert True"]}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(task))
    cfg = settled(preset="7b", ckpt=str(tmp_path), prompts=str(tmp_path))
    inputs = cfg, dream.CONFIGS["7b"], tokenizer, tmp_path / "tasks.jsonl"
    (ids,) = coupled_grpo.Tasks(*inputs).ids
    # of the system's turn and the user's
    assert ids.count(tokenizer.token_to_id("<|im_end|>")) == 2


def test_the_demo_is_scored_on_tasks_that_it_does_not_learn():
    names = ("train", "composed", "phrased")
    read = {n: prompts.read_tasks(coupled_grpo.DEMO / f"tasks/{n}.jsonl") for n in names}
    train, *heldout = ({task["prompt"] for task in read[name]} for name in names)
    assert [len(tasks) for tasks in read.values()] == [400, 200, 200]
    assert not train & set.union(*heldout)


# ---- sampler and learner


def drift_of(params, cfg, record, see_BL, C):
    """Mean of w - 1 - log w, which estimates a KL divergence, and the largest w = learner's p /
    sampler's p, of the tokens that a rollout of 50 ids drew: each on its canvas, without a cache.
    """
    step_BC, drawn_BC, logp_BC = (np.asarray(x_BL)[:, -C:] for x_BL in record[:3])
    steps = int(step_BC.max()) + 1

    @jax.jit
    def replayed(token_BL, step_BC):
        def of_step(step):
            canvas_BC = jnp.where(step_BC >= step, TINY.mask_id, token_BL[:, -C:])
            model = model_of(params, cfg)
            hidden = grpo.hidden_of_views(model, token_BL, see_BL, canvas_BC[:, None])[:, 0]
            id_V = jnp.arange(TINY.vocab)
            banned_V = (id_V == TINY.mask_id) | (id_V >= 50)
            logp_BCV = jax.nn.log_softmax(jnp.where(banned_V, -jnp.inf, model.logits(hidden)))
            logp_BC = jnp.take_along_axis(logp_BCV, token_BL[:, -C:, None], -1)[..., 0]
            return jnp.where(step_BC == step, logp_BC, 0.0)

        return jax.lax.map(of_step, jnp.arange(steps)).sum(0)

    replayed_BC = np.asarray(replayed(jnp.asarray(record.token_BL), step_BC), np.float64)
    log_T = (replayed_BC - logp_BC)[drawn_BC != TINY.mask_id]
    return (np.exp(log_T) - 1 - log_T).mean(), np.exp(log_T.max())


WARM = {
    "temperature": 1.4, "threshold": 0.15, "score": "distribution", "vocab": 50, "eos_ids": (7, 9),
}  # fmt: skip
GIVEN = [[5, 6, 7], [8, 9, 10, 11, 12]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["", "dual"])
def test_a_rollout_drifts_from_the_model_that_is_scored_by_its_cache_alone(cache):
    """Whatever the temperature, the padding, ids without a token and texts that end."""
    # keys of the first layer do not change with the text around
    cfg, C = dataclasses.replace(TINY, layers=2), 16
    params = tiny(cfg, 0.4)
    inputs = sample_dream.canvas(GIVEN, C, TINY)
    rule = sample_dream.Sampling(**WARM, block_length=8, history=True, cache=cache)
    _, stats = sample_dream.fill(model_of(params, cfg), *inputs, rule, jax.random.key(0))
    divergence, ratio_max = drift_of(params, cfg, stats["record"], inputs[1], C)
    assert (divergence > 1e-6) == (abs(ratio_max - 1) > 1e-3) == (cache == "dual")


@pytest.mark.slow
@pytest.mark.parametrize("form", [{}, {"causal": True}, {"causal": True, "shift": False}], ids=str)
def test_what_is_written_in_blocks_is_what_is_scored(form):
    """As above, behind an exact cache; and prompts that end within a block."""
    cfg, C = dataclasses.replace(TINY, layers=2, block_length=4, **form), 10
    params, rule = tiny(cfg, 0.4), sample_block.Sampling(**WARM)
    canvas_BL, see_BL = sample_dream.canvas(GIVEN, C, TINY)
    inputs = canvas_BL, see_BL, rule, jax.random.key(0)
    token_BL, stats = sample_block.fill(model_of(params, cfg), *inputs)
    record = stats["record"]
    divergence, ratio_max = drift_of(params, cfg, record, see_BL, C)
    assert divergence < 1e-6
    assert abs(ratio_max - 1) < 1e-3
    np.testing.assert_array_equal(token_BL[:, :-C], canvas_BL[:, :-C])
    assert (token_BL != TINY.mask_id).all()
    step_BC, drawn_BC = record.step_BL[:, -C:], record.token_BL[:, -C:]
    assert (step_BC >= 0).all()
    assert (drawn_BC == TINY.mask_id).any()  # behind the end of a text
    # Rows of one prompt: where is written does not depend on what is drawn. A causal model draws a
    # block's first token before.
    written_BC = (step_BC == 0)[::2]
    assert cfg.causal or (written_BC == written_BC[0]).all()
    assert len(set(drawn_BC[::2][:, written_BC[0]].ravel().tolist())) > 1


# ---- advantages


def test_a_missing_reward_is_in_nobodys_baseline():
    rewards = [[1.0, 0.5], [None, 1.0], [0.25, None], [0.0, 0.0], [0.75, 1.0]]
    got = grpo.group_advantages(rewards, [2.0, 0.5], 5)
    known = grpo.group_advantages([rewards[i] for i in (0, 3, 4)], [2.0, 0.5], 3)
    np.testing.assert_array_equal(got.counted_B, [True, False, False, True, True])
    close(got.advantage_B[got.counted_B], known.advantage_B, 1e-12)
    np.testing.assert_array_equal(got.advantage_B[~got.counted_B], 0)


def test_groups_that_teach_nothing_are_recognised():
    nan, large = None, 1e8 + 0.3
    for group in ([0.1] * 3, [0.0] * 3, [2.5, nan, 2.5], [nan, nan, 1.0], [nan] * 3, [large] * 3):
        got = grpo.group_advantages([[r] for r in [*group, 0.0, 1.0, 0.5]], [1.0], 3)
        np.testing.assert_array_equal(got.constant_B, [True] * 3 + [False] * 3)
        np.testing.assert_array_equal(got.advantage_B[:3], 0)
        close(got.advantage_B[3:], [-0.75, 0.75, 0], 1e-12)
    got = grpo.group_advantages([[1.0], [1.0], [1.0 + 1e-9]], [1.0], 3)  # however small
    assert not got.constant_B.any()
    assert got.advantage_B[2] > 0 > got.advantage_B[0]


# ---- loss


FORM = grpo.Loss()


@functools.partial(jax.jit, static_argnames="form")
def loss_of(score, old, ref, advantage, counted, form=FORM):
    """((loss, metrics), gradient of the score), compiled."""

    def loss(score):
        return grpo.grpo_loss(score, old, ref, advantage, counted, form)

    return jax.value_and_grad(loss, has_aux=True)(score)


def test_the_gradient_of_the_parameters_is_the_policy_gradient_at_first():
    inputs = example()
    counted = jnp.asarray(np.random.default_rng(1).random(inputs[2].shape) < 0.7)
    batch = batch_of(*inputs, counted_BC=counted, old_BC=jnp.full(counted.shape, jnp.nan))
    params = bag()

    def loss(params):
        return grpo.micro_loss(Bag(params), batch, TINY.mask_id, grpo.Loss(beta=0.0), 8)

    def surrogate(params):
        score, _ = grpo.coupled_scores(Bag(params), batch, TINY.mask_id)
        return -(batch["advantage_B"][:, None] * jnp.where(counted, score, 0)).sum() / counted.sum()

    (_, metrics), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    jax.tree.map(close, grads, jax.jit(jax.grad(surrogate))(params))
    assert metrics["ratio_max"] == 1
    assert metrics["tokens"] == counted.sum()
    assert metrics["clip_low"] == metrics["clip_high"] == metrics["kl"] == 0
    assert 0 < metrics["entropy"] < math.log(TINY.vocab)


@pytest.mark.parametrize("garbage", [jnp.nan, jnp.inf, -jnp.inf, 1e30])
def test_what_is_not_counted_may_be_anything(garbage):
    score = jnp.array([[-1.0, -2.0, -0.5], [-0.1, -3.0, -1.0]])
    counted = jnp.array([[1, 1, 0], [1, 0, 0]])
    inputs = [jnp.where(counted == 1, score + shift, garbage) for shift in (0.0, 0.1, -0.2)]
    advantage = jnp.array([1.0, -1.0])
    (value, metrics), grad = loss_of(*inputs, advantage, counted)
    (want, wanted), wanted_grad = loss_of(score, score + 0.1, score - 0.2, advantage, counted)
    close(value, want)
    close(grad, wanted_grad)
    jax.tree.map(close, metrics, wanted)


def test_a_logarithm_beyond_the_limit_is_clipped_and_stays_finite():
    ones = jnp.ones((1, 1))
    for s in (-500.0, 500.0):
        (value, _), grad = loss_of(s * ones, 0 * ones, 0 * ones, -ones[0], ones)
        assert np.isfinite(value)
        assert grad == 0
    close(value / (math.exp(20) + 0.01 * (math.exp(-20) + 20 - 1)), 1)


def test_without_a_token_loss_gradient_and_metrics_are_zero():
    zeros = jnp.zeros((2, 3))
    (loss, metrics), grad = loss_of(zeros, zeros, zeros + 1, jnp.array([1.0, 2.0]), zeros)
    assert loss == 0
    assert not grad.any()
    assert all(value == 0 for value in metrics.values())


def test_old_scores_stand_in_for_nothing_but_later_passes():
    batch = batch_of(*example())
    score, _ = jax.jit(lambda: grpo.coupled_scores(Bag(bag()), batch, TINY.mask_id))()
    loss = jax.jit(lambda params, batch: grpo.micro_loss(Bag(params), batch, TINY.mask_id))
    later = batch | {"old_BC": score - 0.1, "ref_BC": score}
    for first, ratio_max in ((True, 1.0), (False, math.exp(0.1))):
        _, metrics = loss(bag(), later | {"first": first})
        close(metrics["ratio_max"], ratio_max)


@pytest.mark.parametrize("score", ["coupled", "path"])
def test_the_metrics_that_can_be_read_are_those_of_log_probabilities(score):
    """Of a reference whose every token has e^0.2 times the policy's probability, and of old scores
    of e^-0.1 times.
    """
    batch, params = batch_of(*example()), bag()
    weight_BC = 1.0
    if score == "path":
        batch["group_BC"] = jnp.zeros(batch["u_BC"].shape, int)
    else:
        rate_B1 = batch["ratio_B"][:, None]
        weight_BC = 0.5 + 0.5 / jnp.where(batch["u_BC"] < rate_B1, rate_B1, 1 - rate_B1)
    score_BC, _ = grpo.scores_of(Bag(params), batch, TINY.mask_id)
    batch |= {"old_BC": score_BC - 0.1 * weight_BC, "ref_BC": score_BC + 0.2 * weight_BC}
    batch["first"] = False
    _, metrics = grpo.micro_loss(Bag(params), batch, TINY.mask_id)
    close(metrics["log_ratio"], 0.1)
    close(metrics["token_kl"], math.exp(0.2) - 0.2 - 1)
    assert (metrics["kl"] > 1.5 * metrics["token_kl"]) == (score == "coupled")


# ---- updates


def test_gradients_of_micro_batches_are_added_and_an_update_takes_their_mean():
    """Of a Dream in the compiled programs; a gradient that is not finite changes nothing."""
    batch, optimizer, params = batch_of(*example(B=4)), optax.sgd(0.5), tiny()
    halves = [{k: x if k == "first" else x[i : i + 2] for k, x in batch.items()} for i in (0, 2)]
    graph = dream.graph_of(TINY, dream.Compute(jnp.float32))
    _, gradients, update = grpo.make_programs(graph, optimizer, TINY.mask_id)
    zero = functools.partial(jax.tree.map, jnp.zeros_like, params)  # given away, so one for each
    first, metrics = gradients(params, {}, zero(), halves[0])
    second, _ = gradients(params, {}, zero(), halves[1])
    expected = jax.tree.map(lambda a, b: np.asarray(a + b), first, second)
    total, _ = gradients(params, {}, first, halves[1])
    assert metrics["loss"] != 0
    jax.tree.map(close, total, expected)
    before = jax.tree.map(np.asarray, params)
    new, opt, norm = update(params, optimizer.init(params), total, 2)
    jax.tree.map(lambda new, old, g: close(new, old - 0.5 * g / 2), new, before, expected)
    close(norm, optax.tree.norm(expected) / 2)
    kept = jax.tree.map(np.asarray, new)
    same, _, norm = update(new, opt, jax.tree.map(lambda g: g * jnp.nan, expected), 2)
    assert np.isnan(norm)
    jax.tree.map(np.testing.assert_array_equal, same, kept)


def test_five_updates_without_a_finite_gradient_end_the_run():
    trainer = types.SimpleNamespace(
        cfg=settled(beta=0.0, group=2),
        gradients=lambda trained, base, total, inputs: (total, {"loss": 0.0}),
        update=lambda trained, opt, total, count: (trained, opt, math.nan),
        to_devices=lambda batch, row_R, view: {},
        mesh=types.SimpleNamespace(size=1),
        trained={}, base={}, opt=None, updates=0, failed=0,
    )  # fmt: skip
    rewards = np.array([[0.0], [1.0]])
    for failed in (2, 4):  # two updates a round
        _, metrics = coupled_grpo.Trainer.learn(trainer, None, [{}, {}], rewards)
        assert trainer.failed == failed
        assert math.isnan(metrics["grad_norm"])
    with pytest.raises(RuntimeError, match=r"five updates; lower --lr, then --resume=out/grpo"):
        coupled_grpo.Trainer.learn(trainer, None, [{}, {}], rewards)


def test_the_optimizer_is_adamw_with_its_gradient_clipped_and_only_matrices_decay():
    """Sixty steps by the formula: betas 0.9, 0.99, eps 1e-8 outside the root, decoupled decay."""
    rng, m, v = np.random.default_rng(0), 0, 0
    optimizer = grpo.make_optimizer(lambda step: 0.01 * (step + 1), weight_decay=0.2, clip=0.5)
    ours, want = {"w": jnp.ones((2, 3)), "norm": jnp.ones(3)}, np.ones((2, 3))
    state, update = optimizer.init(ours), jax.jit(optimizer.update)
    for step in range(60):
        grad = rng.normal(size=(2, 3)) * 10.0 ** rng.integers(-3, 2)
        grads = {"w": jnp.float32(grad), "norm": jnp.zeros(3)}
        updates, state = update(grads, state, ours)
        ours = optax.apply_updates(ours, updates)
        grad *= min(1, 0.5 / np.linalg.norm(grad))
        m, v = 0.9 * m + 0.1 * grad, 0.99 * v + 0.01 * grad**2
        direction = m / (1 - 0.9 ** (step + 1)) / (np.sqrt(v / (1 - 0.99 ** (step + 1))) + 1e-8)
        want = want - 0.01 * (step + 1) * (direction + 0.2 * want)
    close(ours["w"], want, 1e-4)
    np.testing.assert_array_equal(ours["norm"], 1)


def test_the_reference_model_follows_the_policy_in_its_own_precision():
    ref, params = {"a": jnp.float32([0.0, 10.0])}, {"a": jnp.float32([1.0, 0.0])}
    ref = grpo.sync_reference(ref, params)
    close(ref["a"], [0.6, 4.0])
    for _ in range(20):
        ref = grpo.sync_reference(ref, params)
    close(ref["a"], params["a"], 1e-4)
    low = {"a": params["a"].astype(jnp.bfloat16)}
    assert grpo.sync_reference(ref, low)["a"].dtype == jnp.float32
    assert grpo.sync_reference(low, params)["a"].dtype == jnp.bfloat16


@pytest.mark.slow
def test_on_a_mesh_the_loss_and_its_gradient_are_the_same():
    batch = batch_of(*example(B=4), advantage_B=jnp.array([1.0, -1.0, 0.5, 0.2]))
    params = tiny()

    def loss(params, batch):
        return grpo.micro_loss(model_of(params), batch, TINY.mask_id, grpo.Loss(), 16)

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    want = step(params, batch)
    mesh = checkpoints.mesh_of(jax.devices(), (2, 2, 2))
    placed = jax.device_put(params, dream.shardings(mesh, params))
    rows = lambda x: jax.NamedSharding(mesh, jax.P(dream.BATCH) if np.ndim(x) else jax.P())  # noqa: E731
    with jax.set_mesh(mesh):
        got = step(placed, jax.device_put(batch, jax.tree.map(rows, batch)))
    largest = max(np.abs(x).max() for x in jax.tree.leaves(want))
    jax.tree.map(lambda got, want: close(got / largest, want / largest), got, want)


# ---- settings


def test_the_7b_preset_holds_the_reference_s_settings():
    cfg = settled(preset="7b", ckpt="out/7b", prompts="out/tasks")
    reference = {
        "tasks": 8, "group": 10, "iterations": 2, "max_prompt": 200, "max_new": 256, "lr": 1e-6,
        "beta": 0.01, "temperature": 1.0, "rewards": ("code", "code_format"),
        "reward_weights": (2.0, 0.5), "rounds": 0,
    }  # fmt: skip
    assert {name: getattr(cfg, name) for name in reference} == reference
    assert coupled_grpo.OPTIMIZER["7b"] == (0.1, 0.2)
    assert coupled_grpo.TOP_P["7b"] == 0.95
    assert coupled_grpo.MIXUP == 0.6
    assert coupled_grpo.SYNC_EVERY == 64
    assert grpo.Loss() == grpo.Loss(0.01, 0.5, 0.5)
    assert sandbox.Options().timeout_s == 5.0


@pytest.mark.parametrize("devices", [1, 4, 64])
@pytest.mark.parametrize("preset", ["demo", "7b"])
def test_batches_of_a_preset_grow_with_the_devices_up_to_a_round(preset, devices):
    own = {"preset": preset, "ckpt": "out/own", "prompts": "out/tasks"}
    cfg = settled(devices, **own)
    rows = cfg.tasks * cfg.group
    for name, pair in coupled_grpo.ON_A_DEVICE.items():
        on_each = pair[preset == "7b"]
        assert getattr(cfg, name) == min(devices * on_each, rows)
        assert getattr(settled(devices, **own, **{name: 3}), name) == 3
    batches = grpo.micro_batches(np.arange(rows), cfg.micro_batch, devices)
    assert all(len(batch) % devices == 0 for batch in batches)
    assert sorted(row for batch in batches for row in batch if row >= 0) == [*range(rows)]


def test_a_folder_of_tasks_is_learnt_from_and_evaluated_on():
    files = ("data/heldout.jsonl", "data/humaneval.jsonl", "data/train.jsonl")
    for heldout, want in ((), files[:2]), (("own.jsonl",), ("own.jsonl",)):
        flags = coupled_grpo.Config(prompts="data", heldout=heldout)
        cfg = coupled_grpo.settle(flags, 1, files=files)
        assert (cfg.prompts, cfg.heldout) == (files[2], want)
    cfg = settled(prompts="own.jsonl")
    assert (cfg.prompts, cfg.heldout) == ("own.jsonl", ())


def test_steps_are_settled_once_and_a_run_that_goes_on_settles_them_again():
    cfg = settled(steps=10)
    assert (cfg.steps, cfg.threshold) == (10, 0.0)
    assert coupled_grpo.settle(cfg, 1) == cfg
    rule = coupled_grpo.rule_of(cfg, 50, (2,))
    assert (rule.steps, rule.alg, rule.alg_temp, rule.bound) == (10, "entropy", 0.0, 0.0)
    cfg = settled(block_length=0, steps=48)
    assert (cfg.block_length, cfg.steps) == (0, 48)


def test_a_model_of_blocks_has_a_block_length_of_its_own():
    assert coupled_grpo.settle(coupled_grpo.Config(), 1, 4).block_length == 4
    with pytest.raises(ValueError, match="was trained in blocks of 4: leave --block_length out"):
        coupled_grpo.settle(coupled_grpo.Config(block_length=8), 1, 4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"group": 1}, "--group=1 is not in 2 .. "),
        ({"tasks": 0}, "--tasks=0 is not in 1 .. "),
        ({"reward_weights": (1.0, float("nan"))}, "--reward_weights=nan is not in "),
        ({"rounds": -1}, "--rounds=-1 is not in 0 .. "),
        ({"temperature": 0.0}, "--temperature=0.0 is not in "),
        ({"rewards": ("nothing",)}, "no reward 'nothing'"),
        ({"rewards": ("code", "syntax")}, "--rewards=code syntax: each once, with a weight of its"),
        ({"rewards": ("code",) * 2, "reward_weights": (1.0,) * 2}, "each once, with a weight of"),
        ({"prompts": "none.jsonl"}, "No such file or directory: 'none.jsonl'"),
        ({"ckpt": "none"}, "none/config.json does not exist"),
        ({"max_prompt": 510}, "the model reaches 512 positions"),
        ({"base_bits": 8}, "--base_bits goes with --lora_rank"),
        ({"steps": 4}, "--steps and --threshold are two ways to fill a canvas: leave one out"),
        ({"block_length": 0}, "the demo gets worse (bench/LOG.md): --block_length=8, or --steps"),
        ({"block_length": 3, "steps": 4, "threshold": None}, "4 steps do not divide over 3 blocks"),
        ({"hosts": "auto", "lora_rank": 2}, "--hosts goes without --lora_rank"),
        ({"resume": "other"}, "--resume=other goes on in its own folder; leave --out="),
        ({"lora_rank": 2, "out": "gs://a/b"}, "--lora_rank needs --out on this machine's disk"),
    ],
    ids=str,
)
def test_bad_settings_are_one_line_before_the_first_round(folder, tmp_path, settings, words):
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(words)) as error:
        coupled_grpo.main(runs.check(config(folder, tmp_path / "run", **settings)))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run" / "log.jsonl").exists()


# ---- runs

OWN_REWARDS = """
import os, signal

def share(completions, rows, **options):
    return [row["written"].count("a") / 8 for row in rows]

def stopping(completions, rows, **options):
    if not os.path.exists({stopped!r}):
        open({stopped!r}, "w")
        os.kill(os.getpid(), signal.SIGTERM)
    return [None if i % 8 == 3 else x for i, x in enumerate(share(completions, rows))]

def same(completions, rows, **options):
    return [0.5] * len(rows)

def raising(completions, rows, **options):
    raise KeyError("no such thing")

def few(completions, rows, **options):
    return [1.0]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Dream that writes random letters, tasks, and a reward: the share of the letter a."""
    folder = tmp_path_factory.mktemp("grpo")
    # what one test compiled serves the others
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "cache")
    letters = {chr(ord("a") + i): i for i in range(26)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|pad|>", "<|mask|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    cfg = dream.DreamConfig(
        32, 32, 1, 4, 2, 8, 48, mask_id=28, pad_id=27, bos_id=26, eos_id=26, positions=512
    )
    models = {"base": {}, "blocks": {"block_length": 4}, "plain": {"shift": False}}
    for name, changes in models.items():
        model = dream.Dream(dataclasses.replace(cfg, **changes), nnx.Rngs(0))
        checkpoints.save(dream, folder / name, model, [folder / "tokenizer.json"], "me/A-Instruct")
    line = '{{"id": {}, "prompt": "{}", "test_cases": ["assert True"]}}\n'
    lines = [line.format(*task) for task in enumerate(("ab", "c", "def", "xyz"))]
    for name in ("tasks", "heldout"):
        (folder / f"{name}.jsonl").write_text("".join(lines))
    (folder / "own.py").write_text(OWN_REWARDS.format(stopped=str(folder / "stopped")))
    yield folder
    del os.environ["JAX_COMPILATION_CACHE_DIR"]


def config(folder, path, **settings):
    """Settings of a run on the folder's model; each round is saved."""
    settings = {
        "ckpt": str(folder / "base"), "prompts": str(folder / "tasks.jsonl"), "rounds": 4,
        "tasks": 4, "group": 8, "micro_batch": 16, "generation_batch": 16, "max_prompt": 4,
        "max_new": 8, "block_length": 8, "threshold": 0.5, "lr": 0.02, "beta": 0.01, "eval_every": 1,
        "rewards": (f"{folder / 'own.py'}:share",), "out": str(path),
    } | settings  # fmt: skip
    return coupled_grpo.Config(**settings)


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def sums(out, round):
    return json.loads((out / f"checkpoints/{round}/meta/metadata").read_text())["sums"]


def weights_of(folder):
    """{name: array} of a model in a folder."""
    return checkpoints.flatten(nnx.to_pure_dict(nnx.state(checkpoints.load(dream, folder)[0])))


@pytest.mark.slow
def test_a_run_on_eight_devices_raises_the_reward_and_leaves_a_model(folder, tmp_path):
    out = tmp_path / "run"
    settings = {"rounds": 10, "eval_every": 10, "heldout": (str(folder / "heldout.jsonl"),)}
    coupled_grpo.main(config(folder, out, **settings))
    log, lines = read_lines(out / "log.jsonl"), read_lines(out / "rounds.jsonl")
    rewards = [row["reward"] for row in log[1:]]
    assert [row["round"] for row in log] == list(range(11))
    assert np.mean(rewards[-3:]) > 0.1 + 2 * np.mean(rewards[:2])
    assert log[-1]["heldout_reward"] > 2 * log[0]["heldout_reward"]
    assert len(lines) == 10 * 32
    for row in log[1:]:
        mine = [line for line in lines if line["round"] == row["round"]]
        assert row["reward"] == pytest.approx(np.mean([line["reward"] for line in mine]))
        names = "kl clip_low clip_high ratio_max entropy generate_s update_s timeouts passes"
        assert set(names.split()) <= row.keys()
        assert 0 <= row["duplicates"] < 1
    for line in lines:
        assert line["reward"] == line["completion"].count("a") / 8
        assert not any(word in line["completion"] for word in ("<|mask|>", "<|pad|>"))
    model, _ = checkpoints.load(dream, out)
    row, _ = sample_dream.generate(model, [[0]], 8, sample_dream.Sampling(eos_ids=(26,)))
    assert row[0].count(0) > 3, "the trained model writes the letter that was rewarded"


@pytest.mark.slow
@pytest.mark.parametrize("score", ["coupled", "path"])
@pytest.mark.parametrize("model", ["blocks", "plain"])
def test_a_model_of_blocks_and_one_without_the_shift_learn(folder, tmp_path, model, score, capsys):
    out, heldout = tmp_path / "run", (str(folder / "heldout.jsonl"),)
    own = {"block_length": None} if model == "blocks" else {}
    own |= {"rounds": 6, "ckpt": str(folder / model), "heldout": heldout, "score": score}
    coupled_grpo.main(config(folder, out, **own))
    log = read_lines(out / "log.jsonl")
    first, last = log[0]["heldout_reward"], log[-1]["heldout_reward"]
    assert last > 2 * first
    assert f"held-out reward of heldout: {first:.3f} -> {last:.3f}" in capsys.readouterr().out
    if model == "blocks":
        assert all(row["passes"] > 0 for row in log[1:])
        assert runs.read_json(out / "config.json")["train"]["block_length"] == 4
    assert not any("<|mask|>" in line["completion"] for line in read_lines(out / "rounds.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["base", "blocks"])
def test_on_eight_devices_each_writes_its_share_of_the_rows(folder, tmp_path, monkeypatch, model):
    """Two devices share the heads. Eighteen rows do not divide by four: they are filled up to 20,
    five on each pair, and so are their keys. No device waits for weights of others: its halves of
    all matrices lie there.
    """
    shares, readable, layouts = [], [], []
    hidden, fill_block = dream.Dream.hidden, sample_block.fill_block
    policy_of = coupled_grpo.Trainer.policy

    def policy(self):
        written = policy_of(self)
        for x in jax.tree.leaves(nnx.state(written)):
            halves = x.size // math.prod(x.sharding.shard_shape(x.shape))
            layouts.append((halves, x.sharding.mesh.shape["fsdp"]))
        return written

    def filled(*inputs, **options):
        state = fill_block(*inputs, **options)
        readable.append(state.token_BL.is_fully_replicated)
        return state

    def watched(self, token_BL, *rest, **options):
        hidden_BLD, cache = hidden(self, token_BL, *rest, **options)
        for x in (hidden_BLD, *jax.tree.leaves(cache)):
            note = lambda at, shape=x.shape: shares.append((shape[0], at.shard_shape(shape)[0]))  # noqa: E731
            jax.debug.inspect_array_sharding(x, callback=note)
        return hidden_BLD, cache

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(dream.Dream, "hidden", watched)
        patch.setattr(coupled_grpo.Trainer, "policy", policy)
        patch.setattr(sample_block, "fill_block", filled)
        patch.setattr(coupled_grpo.Trainer, "score", lambda self, *inputs: [])
        # so that all programs are traced
        patch.setattr(checkpoints, "keep_compiled", lambda folder: None)
        own = {"ckpt": str(folder / model), "block_length": None if model == "blocks" else 8}
        own |= {"rewards": (f"{folder / 'own.py'}:same",)}
        coupled_grpo.main(config(folder, out, rounds=0, tasks=2, generation_batch=18, **own))
    assert set(shares) == {(20, 5)}
    assert set(layouts) == {(2, 1), (1, 1)}  # matrices and biases, norms
    assert all(readable), "each of several hosts reads the texts of all"
    assert len(readable) > 0 or model == "base"
    assert [row["round"] for row in read_lines(out / "log.jsonl")] == [1, 2]  # every task once
    assert len(read_lines(out / "rounds.jsonl")) == 4 * 8


@pytest.mark.slow
def test_the_demo_evaluates_on_operations_and_phrasings_that_training_lacks(tmp_path):
    """One seed says nothing of the gain: bench/grpo_run.py has twelve."""
    out = tmp_path / "run"
    done = run("coupled_grpo.py", f"--out={out}", timeout=1200)
    assert done.returncode == 0, done.stderr
    scored = [row for row in read_lines(out / "log.jsonl") if "composed_reward" in row]
    assert [row["round"] for row in scored] == [0, 10, 20]
    first, *_, last = (row["composed_reward"] + row["phrased_reward"] for row in scored)
    assert last > first
    assert re.search(r"held-out reward of composed: 0\.\d+ -> 0\.\d+\n", done.stdout)
    assert min(row[f"{split}_reward"] for row in scored for split in ("composed", "phrased")) > 0.1
    tasks = prompts.read_tasks(coupled_grpo.DEMO / "tasks/train.jsonl")
    learnt = {row["prompt"] for row in read_lines(out / "rounds.jsonl")}
    assert learnt <= {task["prompt"] for task in tasks}


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("preset", ["demo", "7b"])
def test_every_preset_starts_on_any_number_of_devices(folder, tmp_path, preset, devices):
    out, flags = tmp_path / "run", ("--eval_every=9", "--eval_tasks=4")
    if preset == "7b":
        flags = ("--ckpt", folder / "base", "--prompts", folder / "tasks.jsonl")
    flags = (f"--preset={preset}", *flags, "--rounds=1", f"--out={out}")
    done = run("coupled_grpo.py", *flags, devices=devices)
    assert done.returncode == 0, done.stderr
    assert f"{devices} x cpu" in done.stdout
    assert read_lines(out / "log.jsonl")[-1]["round"] == 1


def stopping(folder):
    """Settings of a run that a signal stops in its first round, unless the folder has a file
    `stopped`.
    """
    return {"rewards": (f"{folder / 'own.py'}:stopping",), "rounds": 3}


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(
    folder, tmp_path, capsys, monkeypatch
):
    """Of eight completions one has no reward: it is in no update, and the log counts it."""
    monkeypatch.setattr(coupled_grpo, "SYNC_EVERY", 3)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    (folder / "stopped").touch()
    coupled_grpo.main(config(folder, whole, **stopping(folder)))
    lines = read_lines(whole / "rounds.jsonl")
    for row in read_lines(whole / "log.jsonl"):
        without = [x for x in lines if x["round"] == row["round"] and x["reward"] is None]
        assert row["no_reward"] == len(without) > 0
        assert all(line["advantage"] is None for line in without)

    (folder / "stopped").unlink()
    with pytest.raises(InterruptedError, match=r"SIGTERM: saved round 1; go on with --resume="):
        coupled_grpo.main(config(folder, parts, **stopping(folder)))
    with open(parts / "rounds.jsonl", "a") as file:
        file.write('{"round": 2, "written": "by a run that was killed"}\n{"cut sho')
    resume = {"resume": str(parts)}
    resumed = runs.resumed(coupled_grpo.Config, str(parts))
    coupled_grpo.main(dataclasses.replace(resumed, **resume))
    assert sums(whole, 3) == sums(parts, 3)
    assert lines == read_lines(parts / "rounds.jsonl")
    with pytest.raises(FileExistsError, match="already holds a run"):
        coupled_grpo.main(config(folder, parts))
    capsys.readouterr()
    coupled_grpo.main(config(folder, parts, **resume, seed=5, **stopping(folder)))
    said = capsys.readouterr().out
    assert f"changed since {parts}/checkpoints/3: " in said
    assert "seed 0 -> 5" in said
    for name, there, here in ("lora_rank", 0, 2), ("beta", 0.01, 0.0):
        with pytest.raises(ValueError, match=f"--{name} {there} there, {here} here"):
            coupled_grpo.main(config(folder, parts, **resume, **{name: here}))


def changed_matrices(before, after):
    """Names of the arrays that differ, by matrices of rank 2."""
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    for name in changed:
        assert np.linalg.matrix_rank(np.asarray(after[name] - before[name]), tol=1e-5) <= 2
    return changed


@pytest.mark.slow
@pytest.mark.parametrize("bits", [0, 8, 4])
def test_lora_goes_on_where_it_stopped_and_merges_into_a_model(folder, tmp_path, bits):
    """With bits the base is quantised in training; what is merged are the weights in full."""
    lora = stopping(folder) | {"lora_rank": 2, "base_bits": bits, "rounds": 2}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    (folder / "stopped").touch()
    coupled_grpo.main(config(folder, whole, **lora))
    (folder / "stopped").unlink()
    with pytest.raises(InterruptedError, match="saved round 1"):
        coupled_grpo.main(config(folder, parts, **lora))
    resume = lora | {"resume": str(parts)}
    with pytest.raises(ValueError, match="parts began with other weights; pass its own"):
        coupled_grpo.main(config(folder, parts, ckpt=str(whole / "merged"), **resume))
    coupled_grpo.main(config(folder, parts, **resume))
    assert read_lines(whole / "rounds.jsonl") == read_lines(parts / "rounds.jsonl")
    base, merged = weights_of(folder / "base"), weights_of(whole / "merged")
    for name, x in weights_of(parts / "merged").items():
        np.testing.assert_array_equal(x, merged[name], err_msg=name)
    assert changed_matrices(base, merged) == {f"layers.0.{name}" for name in dream.MATRICES}
    for path in (whole, whole / "merged"):  # the name by which a chat model is known
        assert runs.read_json(path / "config.json")["source"] == "me/A-Instruct"


def test_a_model_that_does_not_fit_is_refused_before_it_is_read(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "load", None)
    cfg = dream.config_from_hf(folder / "base")
    params = dream.count_params(cfg)
    leaves = jax.tree.leaves(dream.param_shapes(cfg)["layers"])
    adapters = 16 * sum(sum(x.shape) for x in leaves if x.ndim == 2)
    # weights, two moments, gradients, the reference model; a counter of updates
    full, lora = 20 * params + 4, 4 * params + 20 * adapters + 4
    matrices = [x.shape for x in jax.tree.leaves(dream.param_shapes(cfg)) if x.ndim == 2]
    # a byte each, a scale per row
    int8 = lora + sum(4 * rows - 3 * rows * columns for rows, columns in matrices)
    mesh = checkpoints.mesh_of(jax.devices()[:1], (1, 1, 1))
    takes_int8 = f"--base_bits=8 takes {int8 / 1e9:.3g}"
    takes_lora = f"--lora_rank=16 takes {lora / 1e9:.3g}"
    for flags, size, words in (
        ({}, full, f"; {takes_lora} or --lora_rank=16 {takes_int8}"),
        ({"lora_rank": 16}, lora, f"; {takes_int8} or --base_bits=4 takes"),
        ({"lora_rank": 16, "base_bits": 8}, int8, "; --base_bits=4 takes"),
    ):
        settled = coupled_grpo.settle(config(folder, tmp_path, **flags), 1)
        monkeypatch.setattr(checkpoints, "free_bytes", lambda _, size=size: size - 1)
        told = f"take {size / 1e9:.3g} GB on each device, where .* are free{words}"
        with pytest.raises(ValueError, match=told):
            coupled_grpo.check_memory(settled, cfg, mesh, mesh, jnp.dtype("float32"))
    monkeypatch.setattr(checkpoints, "free_bytes", lambda _: 1)
    with pytest.raises(ValueError, match=r"GB on each device, where .* are free"):
        coupled_grpo.Trainer(settled, cfg, None, [types.SimpleNamespace(rows=[])], None)


def test_a_lora_is_the_matrix_that_it_merges_into():
    base = tiny()
    trained = dream.new_adapters(jax.random.key(0), base, 3)
    token_BL = jnp.arange(14).reshape(2, 7) + 5
    plain = forward(base, token_BL)
    close(forward(dream.assemble(base, trained), token_BL), plain)
    rng = np.random.default_rng(1)
    noise = lambda x: 0.05 * rng.normal(size=x.shape).astype(np.float32)  # noqa: E731
    trained = jax.tree.map(lambda x: x + noise(x), trained)
    # it changes the dictionaries of base
    whole = dream.merge_adapters(jax.tree.map(jnp.copy, base), trained)
    close(forward(dream.assemble(base, trained), token_BL), forward(whole, token_BL), 1e-4)
    assert not np.allclose(forward(whole, token_BL), plain, atol=1e-2)

    # W + B A: dA = B^T dW, dB = dW A^T
    def loss(params):
        return (forward(params, token_BL) ** 2).mean()

    grads = jax.grad(lambda trained: loss(dream.assemble(base, trained)))(trained)
    for i, layer in jax.grad(loss)(whole)["layers"].items():
        for name, adapter in trained["layers"][i].items():
            grad = grads["layers"][i][name]
            close(grad["a"], adapter["b"].T @ layer[name], 1e-4)
            close(grad["b"], layer[name] @ adapter["a"].T, 1e-4)


def test_equal_rewards_update_nothing(folder, tmp_path, capsys):
    out = tmp_path / "run"
    coupled_grpo.main(config(folder, out, rounds=1, rewards=(f"{folder / 'own.py'}:same",)))
    (row,) = read_lines(out / "log.jsonl")
    assert row["constant_groups"] == 1
    assert "loss" not in row
    assert "round 1: no group has completions of different rewards" in capsys.readouterr().out
    before = checkpoints.bit_sums({"params": checkpoints.unflatten(weights_of(folder / "base"))})
    assert before.items() <= sums(out, 1).items()


@pytest.mark.parametrize(
    ("reward", "words"),
    [("raising", "KeyError: 'no such thing'; mend it"), ("few", "ValueError: zip")],
)
def test_a_reward_that_fails_ends_the_run_in_one_line(folder, tmp_path, reward, words):
    rewards = (f"{folder / 'own.py'}:{reward}",)
    with pytest.raises(RuntimeError, match=f"{reward} raised {words}"):
        coupled_grpo.main(config(folder, tmp_path / "run", rewards=rewards))


def test_a_sandbox_that_cannot_be_used_ends_the_run_before_it_begins(folder, tmp_path, monkeypatch):
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    with pytest.raises((RuntimeError, ValueError), match="E2B_API_KEY"):
        coupled_grpo.main(config(folder, tmp_path / "run", runner="e2b", rewards=("code",)))


def flags(cfg):
    """The command line of a config."""
    found = []
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        if value != field.default:
            found += [f"--{field.name}", *map(str, value if isinstance(value, tuple) else [value])]
    return found


@pytest.mark.slow
def test_the_command_goes_on_with_the_settings_of_a_run_and_says_in_a_line_what_is_wrong(
    folder, tmp_path
):
    cfg = config(folder, tmp_path / "run", rounds=1, threshold=0.6)
    coupled_grpo.main(cfg)
    wrong = run("coupled_grpo.py", "--resume", cfg.out, "--rewards", "nothing")
    says(wrong, "no reward 'nothing'; there are code")
    says(run("coupled_grpo.py", "--delta=1"), "--delta is gone: nothing on file measured it")
    done = run("coupled_grpo.py", "--resume", cfg.out, "--rounds=2")
    assert done.returncode == 0, done.stderr
    assert "generate_dream.py --ckpt=" in done.stdout
    assert [row["round"] for row in read_lines(tmp_path / "run/log.jsonl")] == [1, 2]
    kept = runs.read_json(tmp_path / "run/config.json")["train"]
    assert (kept["rounds"], kept["threshold"]) == (2, 0.6)


def two_hosts(cfg, *more, second=()):
    """Two processes with two devices each; the second could run no program."""
    env = os.environ | AS_A_USER | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    env.pop("E2B_API_KEY", None)
    pipes = {"env": env, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    port, processes = free_port(), []
    for i in (0, 1):
        host = [f"--hosts=localhost:{port},2,{i}", *["--runner=e2b", *second] * i]
        line = command("coupled_grpo.py", *flags(cfg), *host, *more)
        processes.append(subprocess.Popen(line, **pipes))
    return processes


def finish(processes, status=0):
    """The last line that each process wrote to standard error."""
    errors = [process.communicate(timeout=240)[1] for process in processes]
    for process, error in zip(processes, errors, strict=True):
        assert process.returncode == status, error
        assert "Traceback" not in error
    return [(error.splitlines() or [""])[-1] for error in errors]


@pytest.mark.slow
def test_two_hosts_write_in_blocks_as_one(folder, tmp_path):
    own = {"ckpt": str(folder / "blocks"), "block_length": None, "rounds": 2}
    own["heldout"] = (str(folder / "heldout.jsonl"),)
    one, two = (config(folder, tmp_path / name, **own) for name in ("one", "two"))
    finish(two_hosts(two))
    whole = run("coupled_grpo.py", *flags(one), devices=4)
    assert whole.returncode == 0, whole.stderr
    rows = [read_lines(tmp_path / name / "rounds.jsonl") for name in ("one", "two")]
    texts = [[row["completion"] for row in of_run] for of_run in rows]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_two_hosts_learn_as_one_and_stop_together(folder, tmp_path):
    settings = {"rounds": 40, "eval_every": 20, "iterations": 1}
    settings["heldout"] = (str(folder / "heldout.jsonl"),)
    one, two = (config(folder, tmp_path / name, **settings) for name in ("one", "two"))
    both = two_hosts(two)
    for line in both[0].stdout:
        if line.startswith("round 4/"):
            break
    both[1].send_signal(signal.SIGTERM)  # to either
    for error in finish(both, 1):
        assert f"go on with --resume={two.out}" in error
    done = runs.newest(tmp_path / "two")[0]
    assert 4 <= done < 20
    finish(two_hosts(dataclasses.replace(two, resume=two.out, rounds=done + 2)))
    whole = run("coupled_grpo.py", *flags(dataclasses.replace(one, rounds=done + 2)), devices=4)
    assert whole.returncode == 0, whole.stderr
    names = "round", "reward", "ended", "length", "duplicates"
    logs = [read_lines(tmp_path / name / "log.jsonl") for name in ("one", "two")]
    logs = [[[row.get(name) for name in names] for row in log] for log in logs]
    assert logs[0][:3] == logs[1][:3]  # before what is summed in another order makes another token
    assert [row[0] for row in logs[1]] == [*range(done + 3)]

    # What goes wrong on host 0 ends both, and so does another setting.
    raising = f"{folder / 'own.py'}:raising"
    errors = finish(two_hosts(config(folder, tmp_path / "wrong", rewards=(raising,))), 1)
    assert "raised KeyError" in errors[0]
    assert "host 0 failed, and says why" in errors[1]
    other = config(folder, tmp_path / "other")
    for error in finish(two_hosts(other, second=(f"--rewards={raising}",)), 1):
        assert error.endswith("hosts [1] have other settings or data than host 0")


@pytest.mark.slow
def test_a_reward_of_one_s_own_needs_no_tests_and_no_sandbox(folder, tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "ab"}\n{"prompt": "c"}\n')
    # there is no key for it
    own = {"prompts": str(tmp_path / "tasks.jsonl"), "runner": "e2b", "rounds": 1, "tasks": 2}
    done = run("coupled_grpo.py", *flags(config(folder, tmp_path / "run", **own)))
    assert done.returncode == 0, done.stderr
    (row,) = read_lines(tmp_path / "run/log.jsonl")
    assert row["no_reward"] == 0
    own["rewards"] = ("code",)
    refused = run("coupled_grpo.py", *flags(config(folder, tmp_path / "tested", **own)))
    says(refused, "line 1 has no tests; only --rewards=file.py:function can do without")


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_as_the_unbroken_one(folder, tmp_path):
    """Killed at a random line of its log, twenty times; most kills hit while a checkpoint is being
    written.
    """
    whole, parts = (config(folder, tmp_path / name, rounds=60) for name in ("whole", "parts"))
    done = run("coupled_grpo.py", *flags(whole))
    assert done.returncode == 0, done.stderr
    first = command("coupled_grpo.py", *flags(parts))
    kill_and_resume(first, command("coupled_grpo.py", "--resume", parts.out))
    assert sums(tmp_path / "whole", 60) == sums(tmp_path / "parts", 60)
    rounds = [read_lines(tmp_path / name / "rounds.jsonl") for name in ("whole", "parts")]
    assert rounds[0] == rounds[1]
