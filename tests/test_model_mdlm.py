"""MDLM: parameter counts, attention masks, sampling, files."""

import dataclasses
import json
import math

import pytest
import torch
from conftest import ROOT, run

import diffusion
import model_mdlm as mdlm

TINY = mdlm.Config(vocab=40, width=32, layers=2, heads=2, ffn=64, positions=16)


def build(**changes):
    torch.manual_seed(0)
    return mdlm.MDLM(dataclasses.replace(TINY, **changes)).eval()


def tokens(*shape):
    return torch.randint(5, TINY.vocab, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.slow
def test_the_files_that_are_no_commands_say_what_checks_them():
    for script, parts in {
        "model_mdlm.py": ("tiny: 7,550,976", "large: 60,706,560", "tests/test_model_mdlm.py"),
        "diffusion.py": ("tests/test_diffusion.py",),
    }.items():
        done = run(script)
        assert done.returncode == 0, done.stderr
        assert all(part in done.stdout for part in parts)
        assert (ROOT / parts[-1]).exists()


def test_presets_have_their_true_parameter_counts():
    want = {
        "tiny": (5_453_824, 7_550_976),
        "small": (14_187_264, 17_332_992),
        "medium": (30_070_784, 34_265_088),
    }
    want["large"] = (55_463_680, 60_706_560)
    assert set(want) == set(mdlm.CONFIGS)
    for name, counts in want.items():
        for tie, count in zip((True, False), counts, strict=True):
            cfg = dataclasses.replace(mdlm.CONFIGS[name], tie=tie)
            assert mdlm.count_params(cfg)["total"] == count
            with torch.device("meta"):
                assert sum(p.numel() for p in mdlm.MDLM(cfg).parameters()) == count


def test_rope_turns_pairs_so_that_products_depend_on_distance_alone():
    K, generator = 16, torch.Generator().manual_seed(3)
    q_K, k_K = torch.randn(2, K, generator=generator)
    cos_LK, sin_LK = mdlm.angles(9, K)
    q_LK, k_LK = (
        mdlm.rotate(q_K.expand(9, K), cos_LK, sin_LK),
        mdlm.rotate(k_K.expand(9, K), cos_LK, sin_LK),
    )
    # in complex numbers: the pair (k, k + K/2) is multiplied by exp(i p 10000^(-2k/K))
    frequency = 10_000.0 ** (-torch.arange(8) / 8)
    want = torch.complex(q_K[:8], q_K[8:]) * torch.exp(1j * 5 * frequency)
    torch.testing.assert_close(torch.complex(q_LK[5, :8], q_LK[5, 8:]), want)
    product_LL = q_LK @ k_LK.T
    for distance in range(-8, 9):
        diagonal = product_LL.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert mdlm.rotate(q_K.bfloat16().expand(9, K), cos_LK, sin_LK).dtype == torch.bfloat16


@pytest.mark.parametrize("rope", [False, True])
def test_every_position_sees_both_sides_and_nobody_sees_pad(rope):
    model, token_BL, noise_B = build(rope=rope), tokens(1, 10), torch.tensor([0.5])
    plain = model(token_BL, noise_B)
    changed = token_BL.clone()
    changed[0, 5] = (changed[0, 5] - 4) % 35 + 5
    assert ((model(changed, noise_B) - plain).abs().amax(-1) > 1e-6).all()
    padded = torch.cat([token_BL, torch.tensor([[7, 9, 11]])], 1)
    see = torch.arange(13)[None] < 10
    torch.testing.assert_close(model(padded, noise_B, see)[:, :10], plain)


def test_the_noise_level_is_an_input():
    token_BL, model = tokens(2, 8), build()
    low, high = torch.tensor([0.1, 0.1]), torch.tensor([0.9, 0.9])
    # the time embedding starts at zero
    assert torch.equal(model(token_BL, low), model(token_BL, high))
    torch.nn.init.normal_(model.time[2].weight)
    assert not torch.allclose(model(token_BL, low), model(token_BL, high))


def test_sinusoids_are_those_of_a_transformer_at_a_thousand_times_the_noise():
    got = mdlm.sinusoid(torch.tensor([0.0, 0.25]), 8)
    want = [[250 * 10_000 ** (-k / 4) for k in range(4)]]
    torch.testing.assert_close(got[0], torch.tensor([0.0] * 4 + [1.0] * 4))
    torch.testing.assert_close(
        got[1:], torch.cat([torch.tensor(want).sin(), torch.tensor(want).cos()], -1)
    )


def test_rows_longer_than_the_positions_are_refused():
    with pytest.raises(ValueError, match="17 tokens do not fit the model's 16 positions"):
        build()(tokens(1, 17), torch.tensor([0.5]))


@pytest.mark.parametrize("sampler", ["ancestral", *diffusion.CONFIDENCES])
@pytest.mark.parametrize("schedule", [*diffusion.SCHEDULES, "even"])
def test_samplers_fill_every_mask_keep_the_prompt_and_draw_no_special_token(sampler, schedule):
    model, canvas = build(), torch.full((3, 12), mdlm.MASK)
    canvas[:, 0], canvas[0, 4], canvas[1, 9:] = mdlm.BOS, 30, mdlm.PAD
    rule = mdlm.Sampling(sampler, steps=5, schedule=schedule, top_p=0.9, vocab=38)
    for temperature in (1.0, 0.0):
        rule, left = dataclasses.replace(rule, temperature=temperature), []
        on_step = lambda i, x, left=left: left.append(int((x == mdlm.MASK).sum()))  # noqa: E731
        out = mdlm.sample(model, canvas, rule, torch.Generator().manual_seed(0), on_step)
        again = mdlm.sample(model, canvas, rule, torch.Generator().manual_seed(0))
        assert torch.equal(out, again)
        assert (out[canvas != mdlm.MASK] == canvas[canvas != mdlm.MASK]).all()
        assert not torch.isin(out[canvas == mdlm.MASK], torch.tensor([*mdlm.BANNED, 38, 39])).any()
        assert 1 <= len(left) <= 5
        assert left == sorted(left, reverse=True)
        assert left[-1] == 0


@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 1e-6, 0.0])
def test_draws_have_the_distribution_of_the_sorted_filter(top_p):
    logits = torch.randn(2, 24, generator=torch.Generator().manual_seed(0)) * 2
    logits[:, 3] = -math.inf
    want = diffusion.softmax(diffusion.filter_logits(logits, top_p=top_p))
    n, generator = 20_000, torch.Generator().manual_seed(0)
    drawn = mdlm.draw(logits.repeat(n, 1), top_p, generator).view(n, 2)
    for row in range(2):
        rate = torch.bincount(drawn[:, row], minlength=24) / n
        assert (rate[want[row] == 0] == 0).all()
        torch.testing.assert_close(rate, want[row], atol=0.015, rtol=0)  # four standard errors


def test_a_row_takes_no_more_passes_than_it_has_masks():
    model, canvas, passes = build(), torch.full((1, 12), mdlm.MASK), []
    out = mdlm.sample(
        model, canvas, mdlm.Sampling(steps=1000), torch.Generator(), lambda i, x: passes.append(i)
    )
    assert len(passes) <= 12
    assert (out != mdlm.MASK).all()


@pytest.mark.parametrize("rope", [False, True])
def test_a_model_that_was_saved_is_the_same_and_a_wrong_one_is_named(rope, tmp_path):
    model, token_BL, noise_B = build(rope=rope), tokens(2, 8), torch.tensor([0.2, 0.8])
    mdlm.save(model, tmp_path, b"{}")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert torch.equal(mdlm.load(tmp_path)(token_BL, noise_B), model(token_BL, noise_B))
    assert mdlm.load(tmp_path, dtype=torch.bfloat16).norm.weight.dtype == torch.bfloat16
    config = json.loads((tmp_path / "config.json").read_text())
    for changes, parts in (
        ({"tie": True}, ["Unexpected key(s)", "head.weight"]),
        ({"layers": 3}, ["Missing key(s)", "blocks.2.qkv.weight", "blocks.2.norm1.bias"]),
        ({"ffn": 65}, ["size mismatch for blocks.0.fc1.weight", "[64, 32]", "[65, 32]"]),
        ({"model_type": "dream"}, ["'dream' is not mdlm"]),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ValueError) as error:  # noqa: PT011
            mdlm.load(tmp_path)
        for part in parts:
            assert part in str(error.value)
        assert "\n" not in str(error.value)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.seek(5000)
        byte = file.read(1)[0]
        file.seek(5000)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(ValueError, match=r"damaged: its SHA-256 is not that in config\.json"):
        mdlm.load(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({name: config[name] for name in config if name != "sha256"})
    )
    mdlm.load(tmp_path)  # weights from elsewhere
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.truncate(1000)
    with pytest.raises(ValueError, match="cannot be read"):
        mdlm.load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="it has no model"):
        mdlm.load(tmp_path)
