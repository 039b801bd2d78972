"""generate.py --like=NAME: the texts and the forward passes of each model's own demo, by the
command line.

A golden case with other settings than the demo's has them as flags beside --like. What no flag sets
is left out: Fast-dLLM's factor, SDAR's order from the left, Nemotron's thinking budget, Fast-dLLM
v2's cache of sub-blocks; of DreamOn two tokens a step, and what its evaluation alone does.
"""

import itertools
import json

import pytest
from conftest import ROOT, as_on_the_hub, counting_mask, refused_by, run, says

import convert_weights
import generate
import model_dream as md
import runs
import sample_block

pytestmark = [pytest.mark.golden, pytest.mark.usefixtures("exact_matmuls", "no_compile_cache")]
CODER = ROOT / "weights" / "pythoncoder"
AREAS = {
    "dream": "dream",
    "dreamon": "kin/dreamon",
    "llada": "llada",
    "sdar": "sdar",
    "nemotron": "nemotron",
    "stable_diffcoder": "nemotron/stable_diffcoder",
    "fast_dllm_v2": "kin/fast_dllm_v2",
    "open_dcoder": "kin/open_dcoder",
}


def hub_folder(source, folder):
    """A copy of a folder of reference values with a tokenizer in which the word w7 is the id 7: its
    config.
    """
    as_on_the_hub(source, folder)
    keys = runs.read_json(folder / "config.json")
    if keys["model_type"] == "llada":  # whose PAD is EOS; ours takes any other one for an end, too
        runs.write(folder / "config.json", keys | {"pad_token_id": keys["eos_token_id"]})
    cfg, special = md.config_from_hf(folder), {}
    # SDAR has two ends, the second is that of a turn
    if (folder / "generation_config.json").exists():
        ends = runs.read_json(folder / "generation_config.json").get("eos_token_id")
        others = {*ends} - {cfg.eos_id} if isinstance(ends, list) else {}
        special = {"<|im_end|>": max(others)} if others else {}
    if cfg.family == "llada":  # the end of a turn is in the tokenizer alone
        special = {"<|eot_id|>": runs.read_json(folder / "generate.json")["eot_token_id"]}
    turn_ends = {*special.values()}
    special |= {
        md.FAMILIES[cfg.family].mask or "<|mask|>": cfg.mask_id,
        "<|endoftext|>": cfg.eos_id,
    }
    special |= {"<|beginoftext|>": cfg.bos_id} if cfg.expand_id >= 0 else {}
    names = {i: f"w{i}" for i in range(cfg.vocab)} | {i: word for word, i in special.items()}
    model = {
        "type": "WordLevel",
        "vocab": {word: i for i, word in names.items()},
        "unk_token": names[3],
    }
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {
        "special": True
    }
    added = [{"id": i, "content": word, **flags} for word, i in special.items()]
    splits = {"type": "WhitespaceSplit"}
    runs.write(
        folder / "tokenizer.json",
        {"version": "1.0", "added_tokens": added, "pre_tokenizer": splits, "model": model},
    )
    return cfg, {cfg.eos_id, cfg.pad_id, *turn_ends}


@pytest.fixture(scope="module")
def model_of(golden_dir, tmp_path_factory):
    """model_of(name): (folder in Orbax, config, ids that end a text) of a key of AREAS."""
    top, made = tmp_path_factory.mktemp("like"), {}

    def convert(name):
        if name not in made:
            area, _, below = AREAS[name].partition("/")
            cfg, ends = hub_folder(golden_dir(area) / below, top / f"{name}_hub")
            convert_weights.main(
                convert_weights.Config(source=str(top / f"{name}_hub"), out=str(top / name))
            )
            made[name] = top / name, cfg, ends
        return made[name]

    return convert


def words(ids, mask_id):
    """Ids as a prompt, with masks as [MASK:n]."""
    groups = (
        (masked, [*group]) for masked, group in itertools.groupby(ids, lambda i: i == mask_id)
    )
    return " ".join(
        f"[MASK:{len(group)}]" if masked else " ".join(f"w{i}" for i in group)
        for masked, group in groups
    )


@pytest.fixture
def says_like(model_of, capsys, monkeypatch, tmp_path):
    """says_like(name, prompts, *flags): (ids, forward passes) for each list of ids, by
    generate.py's command line.

    counting: MASK has its share of the softmax of a Dream of blocks. Where it has none, as users
    have it, a token may pass a threshold earlier. Only for texts that reference values cover to
    their end: MASK must never be the argmax.
    """
    prepare = sample_block.prepare

    def call(name, prompts, *flags, model="", counting=False):
        monkeypatch.setattr(
            sample_block, "prepare", counting_mask(prepare) if counting else prepare
        )
        folder, cfg, _ = model_of(model or name)
        texts = [
            prompt if isinstance(prompt, str) else words(prompt, cfg.mask_id) for prompt in prompts
        ]
        lines = [json.dumps({"prompt": text}) for text in texts]
        (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
        given = (
            f"--like={name}",
            f"--ckpt={folder}",
            f"--file={tmp_path / 'prompts.jsonl'}",
            "--json",
            "--devices=1",
        )
        monkeypatch.setattr("sys.argv", ["generate.py", *generate.with_preset([*given, *flags])])
        capsys.readouterr()
        runs.command(generate.main, generate.Config, generate.__doc__)
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        texts = [row.get("completion", row["text"]).split() for row in rows]
        return [
            ([int(word[1:]) for word in text], row["forwards"])
            for text, row in zip(texts, rows, strict=True)
        ]

    return call


def until(ids, ends):
    """Ids up to the first that ends a text."""
    return ids[: min((i for i, token in enumerate(ids) if token in ends), default=len(ids))]


def unpadded(case, i):
    """Row i of a case's prompts without its padding."""
    ids = case["prompt_ids"][i]
    see_L = (case.get("attention_mask") or {i: [1] * len(ids)})[i]
    return [token for token, seen in zip(ids, see_L, strict=True) if seen]


def flags_of(**settings):
    return [f"--{name}={value}" for name, value in settings.items() if value is not None]


@pytest.mark.slow
def test_llada_and_fast_dllm_of_it(says_like, model_of, golden_dir):
    golden, done = json.loads((golden_dir("llada") / "generate.json").read_text()), set()
    _, cfg, ends = model_of("llada")
    for case in golden["cases"]:
        given, fast = case["settings"], case["sampler"] == "fast"
        if given.get("factor") or case.get("edge") or (fast and not case["cache"]):
            continue
        new, threshold = given["gen_length"], given.get("threshold")
        flags = flags_of(
            max_new=new,
            block_length=given["block_length"],
            threshold=threshold or 0,
            cache=case.get("cache"),
        )
        flags += (
            [] if threshold else flags_of(steps=given["steps"], alg="maskgit_plus", schedule="even")
        )
        flags += flags_of(guidance=given.get("cfg_scale"))
        late = [name for name in ("confidence_eos_eot", "logits_eos") if given.get(f"{name}_inf")]
        flags += flags_of(late_eos="both" if len(late) == 2 else "".join(late).partition("_")[0])
        width = len(case["prompt_ids"][0])
        for i, row in enumerate(case["sequences"]):
            prompt = unpadded(case, i)
            if {*prompt} & {*ends, cfg.mask_id}:
                continue
            ((got, forwards),) = says_like(
                "fast_dllm" if fast else "llada", [prompt], *flags, model="llada"
            )
            want = until(row[width:], ends)
            assert got == want, case["name"]
            passes = min(case["num_forwards"], new)  # further steps are idle
            assert forwards == passes if len(want) == new else forwards <= passes, case["name"]
            done |= {case["sampler"], *late}
    assert done == {"llada", "fast", "confidence_eos_eot", "logits_eos"}


@pytest.mark.slow
def test_dream_and_fast_dllm_of_it(says_like, model_of, golden_dir):
    golden, done = json.loads((golden_dir("dream") / "generate.json").read_text()), set()
    _, cfg, ends = model_of("dream")
    for case in golden["cases"]:
        given, kind = case["settings"], case["sampler"]
        if (
            {"pin", "draws"} & case.keys()
            or case.get("ban_ids")
            or sum(case.get("masks_at_end", []))
            or given["eps"] != 1e-3
        ):
            continue
        new, by_threshold = given["max_new_tokens"], given["alg"] == "confidence_threshold"
        flags = flags_of(
            max_new=new, temperature=0, top_k=given["top_k"] or 0, top_p=given["top_p"] or 1
        )
        if kind == "block":
            flags += flags_of(
                block_length=given["block_length"],
                cache="dual" if given["dual_cache"] else "prefix",
            )
        flags += flags_of(threshold=given["threshold"] if by_threshold else 0)
        flags += [] if by_threshold else flags_of(alg=given["alg"])
        flags += [] if kind == "block" and by_threshold else flags_of(steps=given["steps"])
        width = len(case["prompt_ids"][0])
        for i, row in enumerate(case["sequences"]):
            prompt = unpadded(case, i)
            if {*prompt} & {*ends, cfg.mask_id}:
                continue
            ((got, forwards),) = says_like(
                "fast_dllm" if kind == "block" else "dream", [prompt], *flags, model="dream"
            )
            want = until(row[width:], ends)
            assert got == want, case["name"]
            # without those that write nothing
            assert forwards <= case["num_forwards"], case["name"]
            if by_threshold and len(want) == new:
                assert forwards == case["num_forwards"], case["name"]
            done.add(kind)
    assert done == {"diffusion", "threshold", "block"}


@pytest.mark.slow
def test_sdar(says_like, model_of, golden_dir):
    golden, done = json.loads((golden_dir("sdar") / "sdar.json").read_text()), set()
    _, cfg, ends = model_of("sdar")
    for case in golden["generate"]:
        given, prompt, N = case["settings"], case["prompt"], case["settings"]["block_length"]
        steps = given["denoising_steps"]
        if {*prompt} & {*ends, cfg.mask_id}:
            continue
        # else the first block's share of the steps is another
        whole = len(prompt) % N == 0 or steps == N
        if given["remasking_strategy"] == "sequential" or not whole:
            continue
        threshold = (
            given["confidence_threshold"] if given["remasking_strategy"].endswith("dynamic") else 0
        )
        new = -(-(len(prompt) + given["gen_length"]) // N) * N - len(prompt)
        flags = flags_of(
            max_new=new, temperature=0, block_length=N, steps=steps, threshold=threshold
        )
        counting = not {*case["text"]} & {*ends, *(given.get("stop") or ())}
        ((got, forwards),) = says_like("sdar", [prompt], *flags, counting=counting)
        want = until(case["text"], ends)
        assert got[: len(want)] == want, case["name"]
        if len(got) == new and counting:
            assert forwards == sum(case["steps"]), case["name"]
        done.add(given["remasking_strategy"])
    assert len(done) == 2


@pytest.mark.slow
def test_nemotron(says_like, model_of, golden_dir):
    golden, done = json.loads((golden_dir("nemotron") / "nemotron.json").read_text()), set()
    _, cfg, ends = model_of("nemotron")
    for case in golden["cases"]:
        given, mode = case["settings"], case["mode"]
        if "max_thinking" in given or not given.get("causal_context", True):
            continue
        new, block, threshold = (
            given["max_new"],
            given.get("block_length", 1),
            given.get("threshold") or 0,
        )
        if mode == "self_speculation" and threshold:  # its drafts take more passes
            continue
        flags = flags_of(max_new=new, block_length=block, threshold=threshold)
        if mode == "self_speculation" and block > 1:
            flags = flags_of(max_new=new, draft=block - 1, threshold=0)
        for prompt, text in zip(case["prompts"], case["text"], strict=True):
            if {*prompt} & {*ends, cfg.mask_id}:
                continue
            ((got, forwards),) = says_like(
                "nemotron", [prompt], *flags, counting=not ends & {*text}
            )
            want = until(text[:new], ends)  # that of a draft may be longer
            assert got == want, case["name"]
            if len(want) == new and len(case["prompts"]) == 1:
                assert forwards == case["nfe"], case["name"]
        done.add(mode)
    assert done == {"ar", "diffusion", "self_speculation"}


@pytest.mark.slow
def test_stable_diffcoder(says_like, model_of, golden_dir):
    folder, (_, cfg, ends) = (
        golden_dir("nemotron") / "stable_diffcoder",
        model_of("stable_diffcoder"),
    )
    cases, done = json.loads((folder / "stable_diffcoder.json").read_text())["samples"], set()
    for case in cases:
        given, prompt, N = case["settings"], case["prompt"], case["settings"]["block_length"]
        if {*prompt} & {*ends, cfg.mask_id}:
            continue
        new, threshold = given["gen_length"], given["threshold"] or 0
        done.add(bool(threshold))
        steps = 0 if threshold else given["steps"] // (new // N)
        flags = flags_of(max_new=new, block_length=N, steps=steps, threshold=threshold)
        ((got, forwards),) = says_like(
            "stable_diffcoder", [prompt], *flags, counting=not ends & {*case["text"]}
        )
        assert got == until(case["text"], ends), case["name"]
        blocks = -(-(len(prompt) + new) // N) - len(prompt) // N
        if len(got) == new:
            # ours commits in the first pass of the next block
            assert forwards + blocks == case["nfe"], case["name"]
    assert done


@pytest.mark.slow
def test_open_dcoder(says_like, model_of, golden_dir):
    cases = json.loads((golden_dir("kin") / "open_dcoder" / "kin.json").read_text())["open_dcoder"]
    (_, cfg, ends), done = model_of("open_dcoder"), set()
    for case in cases:
        given, prompt = case["settings"], case["prompt"]
        # which end a hole
        if {*prompt} & ends or (cfg.mask_id in prompt and {*case["sequence"]} & ends):
            continue
        done.add(given["alg"])
        flags = flags_of(temperature=0, top_k=0, alg=given["alg"], steps=given["steps"])
        flags += flags_of(max_new=given["max_new_tokens"] or None)
        ((got, forwards),) = says_like("open_dcoder", [prompt], *flags)
        want = (
            case["sequence"]
            if cfg.mask_id in prompt
            else until(case["sequence"][len(prompt) :], ends)
        )
        assert got == want, case["name"]
        assert forwards <= case["forwards"], case["name"]
    assert done


@pytest.mark.slow
def test_fast_dllm_v2(says_like, model_of, golden_dir):
    """Rows of a batch alone, and in their batch."""
    cases = json.loads((golden_dir("kin") / "fast_dllm_v2" / "kin.json").read_text())[
        "fast_dllm_v2"
    ]
    _, cfg, ends = model_of("fast_dllm_v2")
    cases, done = [case for case in cases if not case["approximate"]], set()
    for case in cases:
        given, N, stop = (
            case["settings"],
            case["settings"]["block"],
            {*ends, case["settings"]["stop"]},
        )
        flags = flags_of(
            block_length=N, sub_block=given["small_block"], threshold=given["threshold"]
        )
        for i, (prompt, text) in enumerate(zip(case["prompts"], case["texts"], strict=True)):
            if {*prompt} & {*ends, cfg.mask_id}:
                continue
            # whole blocks, and the first token behind them
            new = len(text) + (1 - len(prompt) - len(text)) % N
            counting = not stop & {*text}
            ((got, forwards),) = says_like(
                "fast_dllm_v2", [prompt], *flags, f"--max_new={new}", counting=counting
            )
            assert until(got[: len(text)], stop) == until(text, stop), case["name"]
            if counting:  # a prompt that ends in a block is fed in the first step of this block
                fused = len(prompt) > N and len(prompt) % N > 0
                assert forwards == case["forwards_alone"][i] - fused, case["name"]
            done |= {case["name"]}
    assert done


@pytest.mark.slow
def test_dreamon(says_like, model_of, golden_dir):
    """Its own loop, from the masks of the prompt on, which --hole counts."""
    cases, done = (
        json.loads((golden_dir("kin") / "dreamon" / "kin.json").read_text())["dreamon"],
        set(),
    )
    _, cfg, ends = model_of("dreamon")
    for case in cases:
        given, prompt, longest = case["settings"], case["prompt"], case["longest"]
        others = given["pad_delete_to_right"] or given["number_transfer_tokens"] > 1
        if others or {*prompt[1:-1], *case["window"][1:-1]} & {*ends, cfg.bos_id}:
            continue
        first, size = prompt.index(cfg.mask_id), prompt.count(cfg.mask_id)
        budget = given.get("expand_budget", given.get("max_gen_len"))
        most = longest - len(prompt) + size
        flags = flags_of(temperature=0, top_k=0, top_p=1, alg=given["alg"], max_new=most, hole=size)
        flags += flags_of(regrow=2 * (longest - first) if budget is None else budget)
        # BOS and EOS are --bos
        text = words(prompt[1:-1], cfg.mask_id).replace(f"[MASK:{size}]", "[MASK]")
        ((got, forwards),) = says_like("dreamon", [text], *flags)
        assert got == case["window"][1:-1], case["name"]
        assert forwards == case["forwards"], case["name"]
        done.add(given["sampler"])
    assert "hub" in done


@pytest.mark.slow
@pytest.mark.parametrize("name", AREAS)
def test_a_text_is_the_same_alone_and_in_a_batch(name, says_like, model_of):
    """Prompts of several lengths, in float32, the default on a CPU, without noise."""
    _, cfg, ends = model_of(name)
    ids = [i for i in range(3, 40) if i not in {*ends, cfg.mask_id, cfg.bos_id, cfg.expand_id}]
    prompts = [ids[:2], ids[5:18], ids[3:10], ids[1:2]]
    for like in (name, "fast_dllm") if name in ("dream", "llada") else (name,):
        flags = flags_of(
            max_new=16, temperature=0, block_length=8 if like in ("llada", "fast_dllm") else None
        )
        together = says_like(like, prompts, *flags, model=name)
        for prompt, (text, _) in zip(prompts, together, strict=True):
            ((alone, _),) = says_like(like, [prompt], *flags, model=name)
            assert text == alone, (like, prompt)
        assert any(text for text, _ in together)


@pytest.mark.slow
def test_a_preset_is_printed_and_a_flag_beside_it_wins(model_of):
    folder, _, _ = model_of("sdar")
    given = f"--ckpt={folder}", "--prompt=w5 w6", "--max_new=4", "--json", "--compile_cache="
    done = run("generate.py", "--like", "sdar", *given, "--temperature=0")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"--like=sdar: {generate.LIKE['sdar']}\n")
    assert json.loads(done.stdout)["tokens"] <= 4
    settings = generate.with_preset(["--like=dream", "--top_k=0"])
    assert settings[0] == "--model=dream"
    assert settings.index("--top_k=50") < settings.index("--top_k=0")


def test_a_preset_for_a_model_of_another_kind_is_one_line(model_of):
    for name, like, part in (
        ("llada", "sdar", "is a llada; say --like=llada or fast_dllm"),
        ("sdar", "fast_dllm", "is a sdar; say --like=sdar"),
        ("dream", "dreamon", "is a dream; say --like=dream or fast_dllm"),
    ):
        flags = generate.with_preset(
            [f"--like={like}", f"--ckpt={model_of(name)[0]}", "--prompt=w5"]
        )
        said = refused_by(generate, *flags)
        assert f"--like={like}" in said
        assert part in said
    says(
        run("generate.py", "--like=sdar", "--model=pythoncoder", "--prompt=x"),
        "is for --model=dream",
    )
    said = refused_by(
        generate, *generate.with_preset(["--like=llada", f"--ckpt={CODER}", "--prompt=x"])
    )
    assert "weights/pythoncoder holds none of dream, llada, " in said
    assert ": it is a PythonCoder" in said


@pytest.mark.slow
def test_flags_of_a_model_of_another_kind_are_refused_in_one_line(model_of):
    for name, prompt, flag, part in (
        ("llada", "w5", "--sub_block=4", "sub_block is for a model that was trained in blocks"),
        ("sdar", "w5", "--late_eos=logits", "a model of blocks is filled without late_eos"),
        ("dream", "w5", "--regrow=9", "--regrow is for a model that expands and deletes masks"),
        (
            "dreamon",
            "w5 [MASK] w6",
            "--show_steps",
            "[MASK] that grows has no --steps, --schedule, --show_steps",
        ),
    ):
        flags = (
            f"--ckpt={model_of(name)[0]}",
            f"--prompt={prompt}",
            "--model=dream",
            "--compile_cache=",
            "--max_new=8",
        )
        says(run("generate.py", flag, *flags), part)
