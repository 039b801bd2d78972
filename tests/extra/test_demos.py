"""extra/demos.py: the golden texts of other families, by the loops of their authors' demos."""

import json

import demos
import numpy as np
import pytest
from conftest import from_hf, refused_by, run, says
from test_kin import hub_folder

import convert_weights
import model_dream

pytestmark = [pytest.mark.golden, pytest.mark.usefixtures("exact_matmuls", "no_compile_cache")]


@pytest.fixture(scope="module")
def read(golden_dir):
    """read(area): a demos.Reader of the model of a folder of golden values."""
    readers = {}

    def reader(area):
        if area not in readers:
            top, _, below = area.partition("/")
            model = from_hf(golden_dir(top) / below, "float32")
            readers[area] = demos.Reader(model, model.cfg.vocab)
        readers[area].passes = 0
        readers[area].ends = []
        return readers[area]

    return reader


def values(golden_dir, area, file):
    top, _, below = area.partition("/")
    return json.loads((golden_dir(top) / below / file).read_text())


def fill(read, like, prompt, new, **settings):
    """A prompt and `new` masks, filled at temperature 0."""
    settings = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "steps": 0} | settings
    cfg = demos.settle(demos.Config(like=like, max_new=new, **settings))
    row = np.array([*prompt, *[read.cfg.mask_id] * new])
    return demos.DEMOS[like](read, row, cfg, np.random.default_rng(0)).tolist()


def rows_of(case):
    """(prompt without padding, what the golden text has behind it) of each row."""
    for i, ids in enumerate(case["prompt_ids"]):
        see = (case.get("attention_mask") or {i: [1] * len(ids)})[i]
        prompt = [token for token, seen in zip(ids, see, strict=True) if seen]
        yield prompt, case["sequences"][i][len(ids) :]


def rank(step_L):
    """Steps numbered without those that write nothing: theirs go on when a block is full."""
    return np.unique(step_L, return_inverse=True)[1]


def test_llada_token_for_token_with_its_steps_guidance_and_late_ends(read, golden_dir, monkeypatch):
    golden, done = values(golden_dir, "llada", "generate.json"), set()
    shown, call = [], demos.Reader.__call__

    def watched(self, row, *rest):
        shown.append(row[-new:] == self.cfg.mask_id)
        return call(self, row, *rest)

    monkeypatch.setattr(demos.Reader, "__call__", watched)
    for case in golden["cases"]:
        given = case["settings"]
        if case["sampler"] != "llada" or case.get("edge"):
            continue
        reader = read("llada")
        reader.ends = [reader.cfg.eos_id, golden["eot_token_id"]]
        late = {(1, 0): "confidence", (0, 1): "logits", (1, 1): "both"}.get(
            (given["confidence_eos_eot_inf"], given["logits_eos_inf"]), ""
        )
        how = {"steps": given["steps"], "block_length": given["block_length"], "late_eos": late}
        scale, new = given["cfg_scale"], given["gen_length"]
        each = 2 if scale else 1  # passes of a step
        for (prompt, want), want_step_L in zip(rows_of(case), case["step"], strict=True):
            reader.passes = 0
            shown.clear()
            got = fill(reader, "llada", prompt, new, **how, guidance=scale)
            assert got == prompt + want, case["name"]
            passes = min(case["num_forwards"], new)  # further steps are idle
            assert reader.passes == each * passes, case["name"]
            step_L = np.sum(shown[::each], 0)  # in which a token is written
            np.testing.assert_array_equal(rank(step_L), rank(want_step_L[-new:]), case["name"])
        done |= {late, f"guided {scale > 0}", f"rows {len(case['prompt_ids']) > 1}"}
    assert len(done) == 8


@pytest.mark.parametrize("area", ["llada", "dream"])
def test_fast_dllm_token_for_token_with_its_windows(read, golden_dir, area, monkeypatch):
    windows, done, call = [], 0, demos.Reader.__call__

    def watched(self, row, slots, window=None, size=0):
        start, end = window or (0, len(row))
        windows.append(end - start)
        return call(self, row, slots, window, size)

    monkeypatch.setattr(demos.Reader, "__call__", watched)
    for case in values(golden_dir, area, "generate.json")["cases"]:
        given = case["settings"]
        if case["sampler"] not in ("fast", "block") or given.get("factor"):
            continue
        cache = case.get("cache", "dual" if given.get("dual_cache") else "prefix")
        how = {name: given[name] for name in ("block_length", "steps")}
        how["threshold"] = given.get("threshold") or 0.0
        how["top_p"] = given.get("top_p") or 1.0
        like = "fast_dllm" if cache else "llada"
        ((prompt, want),) = rows_of(case)
        reader = read(area)
        windows.clear()
        got = fill(reader, like, prompt, len(want), cache=cache, **how)
        assert got == prompt + want, case["name"]
        assert reader.passes == case["num_forwards"], case["name"]
        if cache:
            assert windows == case["query_lengths"], case["name"]
        done += 1
    assert done >= 12


def test_fast_dllm_v2_alone_as_in_a_batch_with_its_passes(read, golden_dir):
    """Its cache of sub-blocks is approximate, and not ours."""
    golden, area = values(golden_dir, "kin/fast_dllm_v2", "kin.json"), "kin/fast_dllm_v2"
    for case in golden["fast_dllm_v2"]:
        given, N = case["settings"], case["settings"]["block"]
        if case["approximate"]:
            continue
        how = {"block_length": N, "sub_block": given["small_block"]}
        for i, (prompt, want) in enumerate(zip(case["prompts"], case["texts"], strict=True)):
            reader = read(area)
            # Whole blocks, and the first token of the next: one pass, for it alone.
            new = len(want) + (1 - len(prompt) - len(want)) % N
            row = fill(reader, "fast_dllm_v2", prompt, new, threshold=given["threshold"], **how)
            assert row[len(prompt) :][: len(want)] == want, (case["name"], i)
            if given["stop"] not in want:
                # A prompt that ends within a block is fed with the first step of this block.
                fused = len(prompt) > N and len(prompt) % N > 0
                assert reader.passes == case["forwards_alone"][i] - fused, (case["name"], i)


def test_p2_step_by_step(read, golden_dir):
    done = set()
    for case in values(golden_dir, "kin/open_dcoder", "kin.json")["open_dcoder"]:
        given = case["settings"]
        if given["alg"] != "p2":  # Dream's orders: test_golden_kin.py
            continue
        reader, shown = read("kin/open_dcoder"), []
        cfg = demos.settle(demos.Config(like="open_dcoder", max_new=given["max_new_tokens"]))
        cfg = demos.dataclasses.replace(cfg, temperature=0.0, top_k=0, steps=given["steps"])
        row = np.array(case["prompt"] + [reader.cfg.mask_id] * given["max_new_tokens"])
        got = demos.open_dcoder(reader, row, cfg, np.random.default_rng(0), shown)
        assert got.tolist() == case["sequence"], case["name"]
        assert shown == case["history"], case["name"]
        assert reader.passes == case["forwards"], case["name"]
        done.add(case["remasks"])
    assert True in done


def settings_of_dreamon(case, mask):
    """The Config of a golden case."""
    given, prompt, longest = case["settings"], case["prompt"], case["longest"]
    budget = given.get("expand_budget", given.get("max_gen_len"))
    if budget is None:
        budget = 2 * (longest - prompt.index(mask))
    return demos.Config(
        like="dreamon",
        max_new=longest - len(prompt) + prompt.count(mask),
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        steps=given.get("steps", 0),
        alg=given["alg"],
        budget=budget,
        delete_to_right=given["pad_delete_to_right"],
        keep_eos=not given.get("delete", True),
        at_once=given["number_transfer_tokens"],
    )


class Watched(demos.Reader):
    """Keeps what was read and drawn last."""

    def __call__(self, row, slots):
        self.row, self.slots = row, slots
        return super().__call__(row, slots)

    def draw(self, *args):
        self.drawn = super().draw(*args)
        return self.drawn


def history_of(written, shown, eos, expand):
    """Each step's rows: with its tokens, after deletions, and after expansions, if it has any."""
    history = []
    for (row, slots), after in zip(written, shown, strict=True):
        history.append(row)
        expansions = sum(row[p] == expand for p in slots)
        if len(after) < len(row) + expansions:
            kept = [token for p, token in enumerate(row) if p not in slots or token != eos]
            history.append(kept if expansions else after)
        if expansions:
            history.append(after)
    return history


def test_dreamon_pass_by_pass(read, golden_dir, monkeypatch):
    """Every case: both its samplers, two tokens a step, and EOS as a token of the hole."""
    whole, written, surest = read("kin/dreamon"), [], demos.surest
    reader = Watched(whole.model, whole.vocab)

    def watched(*args):
        best = surest(*args)
        row = reader.row.copy()
        row[reader.slots[best]] = reader.drawn[best]
        written.append((row.tolist(), reader.slots))
        return best

    monkeypatch.setattr(demos, "surest", watched)
    for case in values(golden_dir, "kin/dreamon", "kin.json")["dreamon"]:
        reader.passes, shown = 0, []
        written.clear()
        cfg = demos.settle(settings_of_dreamon(case, reader.cfg.mask_id))
        row = np.array(case["prompt"])
        got = demos.dreamon(reader, row, cfg, np.random.default_rng(0), shown)
        assert got.tolist() == case["window"], case["name"]
        assert reader.passes == case["forwards"], case["name"]
        history = history_of(written, shown, reader.cfg.eos_id, reader.cfg.expand_id)
        assert history == case["history"], case["name"]


def test_mask_in_the_softmax_decides_the_order_of_dreamon(read):
    """The sampler that this demo replaced left MASK out of the softmax. No tie and no order of
    expansions: in about one text of twenty that alone writes another mask first, often from the
    second token on.
    """

    class Without(demos.Reader):
        def __call__(self, *args):
            logits_CV = super().__call__(*args)
            logits_CV[:, self.cfg.mask_id] = -np.inf
            return logits_CV

    reader = read("kin/dreamon")
    without = Without(reader.model, reader.vocab)
    cfg, rng = reader.cfg, np.random.default_rng(1)
    special = cfg.mask_id, cfg.expand_id, cfg.eos_id, cfg.bos_id
    ids = [i for i in range(cfg.vocab) if i not in special]
    given = demos.Config(like="dreamon", max_new=16, budget=8, temperature=0.0, top_k=0, top_p=1.0)
    same, other = 0, 0
    for _ in range(60):
        before, behind = rng.choice(ids, rng.integers(1, 8)), rng.choice(ids, rng.integers(0, 5))
        masks = [cfg.mask_id] * rng.integers(1, 7)
        row = np.array([cfg.bos_id, *before, *masks, *behind, cfg.eos_id])
        shown, shown_without = [], []
        demos.dreamon(reader, row, demos.settle(given), rng, shown)
        demos.dreamon(without, row, demos.settle(given), rng, shown_without)
        same += shown == shown_without
        other += shown[:1] == shown_without[:1] and shown != shown_without
    assert same > 40
    assert other > 0


class Fixed(demos.Reader):
    """Logits [L, V] that do not depend on the row."""

    def __init__(self, logits_LV, **ids):
        self.logits_LV, self.passes = logits_LV, 0
        self.cfg = model_dream.DreamConfig(logits_LV.shape[1], 8, 1, 1, 1, 8, 8, **ids)
        self.ends = [self.cfg.eos_id]

    def __call__(self, row, slots, window=None, size=0):
        self.passes += 1
        return self.logits_LV[slots].astype(np.float32)


def test_a_penalty_keeps_end_tokens_from_an_empty_text_and_not_from_a_full_one():
    logits_LV = np.zeros((13, 48))
    logits_LV[:, 2], logits_LV[:, 9] = 14.9, 10.0  # the model prefers EOS everywhere, by 4.9
    reader = Fixed(logits_LV, mask_id=47, pad_id=0, bos_id=1, eos_id=2)
    ends = {}
    for penalty in (0.0, 3.0):
        row = fill(reader, "dream_coder", [5] * 5, 8, eos_penalty=penalty, steps=1000)
        ends[penalty] = row.count(2)
    # -3 log(filled + 0.001) is 20.7, 6.2 and 4.1 when 0, 1 and 2 of the 8 are filled
    assert ends == {0.0: 8, 3.0: 6}


def test_a_hole_grows_up_to_the_positions_of_the_model():
    logits_LV = np.zeros((12, 48))
    logits_LV[:, 46] = 20.0  # every mask would become two
    reader = Fixed(logits_LV, mask_id=47, expand_id=46, pad_id=0, bos_id=1, eos_id=2, positions=12)
    cfg = demos.settle(demos.Config(like="dreamon", max_new=64, temperature=0.0))
    row = np.array([1, 5, 47, 47, 2])
    assert len(demos.dreamon(reader, row, cfg, np.random.default_rng(0))) == 12


FOLDERS = {
    "llada": "llada",
    "fast_dllm": "llada",
    "fast_dllm_v2": "kin/fast_dllm_v2",
    "open_dcoder": "kin/open_dcoder",
    "dreamon": "kin/dreamon",
    "dream_coder": "dream",
}


@pytest.fixture
def folder_of(golden_dir, tmp_path):
    """folder_of(like): a model of golden values with a tokenizer of words, w0 to w23."""

    def convert(like):
        top, _, below = FOLDERS.get(like, like).partition("/")
        hub_folder(golden_dir(top) / below, tmp_path / "hub")
        out = tmp_path / like
        convert_weights.main(convert_weights.Config(source=str(tmp_path / "hub"), out=str(out)))
        return out

    return convert


@pytest.mark.parametrize(
    "like", [name if name == "dreamon" else pytest.param(name, marks=pytest.mark.slow)
             for name in demos.LIKE]
)  # fmt: skip
def test_each_demo_prints_a_text(folder_of, capsys, like):
    prompt = "w1 w2 [MASK] w3" if like == "dreamon" else "w1 w2"
    how = {"max_new": 32, "seed": 3, "compile_cache": ""}
    folder = folder_of(like)
    capsys.readouterr()
    demos.main(demos.Config(like=like, ckpt=str(folder), prompt=prompt, **how))
    said = capsys.readouterr()
    assert said.out.startswith("w1 w2")
    assert int(said.err.splitlines()[-1].split()[0]) > 0
    if like == "dreamon":
        assert said.out.rstrip().endswith("w3")


def test_a_demo_for_a_model_of_another_kind_is_one_line(folder_of):
    said = refused_by(demos, f"--ckpt={folder_of('sdar')}", "--like=llada", "--compile_cache=")
    assert said.endswith("is a sdar; take generate_dream.py")
    says(run("extra/demos.py", "--like=llada", "--ckpt=nowhere"), "nowhere")


def test_settings_that_do_not_fit_are_one_line(folder_of):
    folder = folder_of("llada")
    for flags, part in (
        ("--like=llada --steps=3 --block_length=8 --max_new=32", "--steps=3: fewer than blocks"),
        ("--like=llada --steps=0 --max_new=32000", "tokens do not fit the model's"),
        ("--like=llada --max_new=0", "--max_new=0 is not in 1"),
        ("--like=dreamon --hole=0", "--hole=0 is not in 1"),
        ("--like=llada --chat", f"--chat: {folder} holds no chat template"),
        ("--like=fast_dllm --block_length=0 --max_new=32", "--block_length=0 does not divide"),
    ):
        said = refused_by(demos, f"--ckpt={folder}", "--compile_cache=", *flags.split())
        assert part in said, flags
