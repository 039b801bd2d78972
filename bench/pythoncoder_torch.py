"""PythonCoder in PyTorch, written as a good PyTorch user would today: the baseline that train_tpu.py's speed is held against.

    python bench/pythoncoder_torch.py                                 # shape "tiny", prints JSON; a minute on a CPU
    python bench/pythoncoder_torch.py --dtype=bfloat16 --threads=2
    python bench/pythoncoder_torch.py --check=tests/golden/pythoncoder  # is it the same model? compares with reference values

The model, the loss and the update are those of model_pythoncoder.py and train_tpu.py: floored differential attention with
clamped lambda, documents packed into rows, two heads, dropout at three places, mean over the valid tokens of all
micro-batches, clipping to norm 1, AdamW with decay on matrices. Data are random tokens: speed does not depend on them.

Letters: B batch, L length, M keys of a query block, D width, H query heads, J pairs of key/value heads, G = H / 2J,
K head size, E = 2K, F feed-forward, V vocabulary, I = 2 softmax maps.
"""

import contextlib
import dataclasses
import json
import math
import os
import platform
import statistics
import sys
import time
import typing
from pathlib import Path

import numpy as np
import torch
import tyro
from torch import nn
from torch.nn import functional as F


@dataclasses.dataclass(frozen=True)
class Config:
    vocab: int = 4096
    width: int = 256
    layers: int = 4
    heads: int = 4  # query heads; two make one differential head
    kv_heads: int = 2
    head_size: int = 64
    ffn: int = 704
    floor: bool = True  # max(A1 - lambda A2, 0); False is the published attention
    theta: float = 500_000.0  # base of the rotary angles
    yarn_factor: float = 1.0  # above 1 the rotary table of YaRN, for sequences beyond `positions`
    positions: int = 2048  # longest sequence in training, for YaRN
    dropout: float = 0.1
    seq_len: int = 512
    batch_size: int = 16  # sequences per optimiser step
    accumulate: int = 1  # micro-batches that a step is cut into
    block: int = 128  # queries per block of attention; keys after the block are not touched
    dtype: typing.Literal["float32", "bfloat16"] = "float32"  # bfloat16 is autocast; weights and moments stay float32
    compile: bool = True  # torch.compile of the model
    steps: int = 10  # timed, after warmup
    warmup: int = 3  # not timed; the first of them compiles
    threads: int = 0  # of the CPU; 0 leaves PyTorch's choice
    seed: int = 0  # weights, tokens and dropout
    check: str = ""  # folder with tiny_model.json and .npz: compare instead of measure


def rope_frequencies(cfg):
    """Rotary frequencies [K/2] and the factor on cos and sin; YaRN (arXiv:2309.00071) if yarn_factor > 1."""
    inv_freq = cfg.theta ** (-np.arange(0, cfg.head_size, 2) / cfg.head_size)
    if cfg.yarn_factor <= 1:
        return inv_freq, 1.0
    low, high = (
        cfg.head_size * math.log(cfg.positions / (2 * math.pi * beta)) / (2 * math.log(cfg.theta)) for beta in (32, 1)
    )
    low, high = max(math.floor(low), 0), min(math.ceil(high), cfg.head_size - 1)
    ramp = np.clip((np.arange(cfg.head_size // 2) - low) / max(high - low, 1e-3), 0, 1)
    return inv_freq * (1 - ramp) + inv_freq / cfg.yarn_factor * ramp, 0.1 * math.log(cfg.yarn_factor) + 1


def rotate(x, cos, sin):
    """Rotary embedding of the last axis, half-split."""
    x1, x2 = x.chunk(2, -1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).to(x.dtype)


def diff_attention(q_BJILGK, k_BJILK, v_BJLE, bias_BLM, lam, floor, block):
    """max(softmax(q1 k1) - lam softmax(q2 k2), 0) v over query blocks, each against the keys up to its end.

    Because of the floor the two maps are needed explicitly, so no scaled_dot_product_attention. The G query heads of a
    group are rows of one matrix product: keys and values are never repeated. bias is 0 where a key may be seen, else -inf.
    """
    B, J, I, L, G, K = q_BJILGK.shape
    out = []
    for start in range(0, L, block):
        end = min(start + block, L)
        q_BJIRK = q_BJILGK[:, :, :, start:end].flatten(3, 4)  # R = rows of the block, query and head
        score_BJILGM = (q_BJIRK @ k_BJILK[..., :end, :].mT).unflatten(3, (-1, G))
        map_BJILGM = (score_BJILGM + bias_BLM[:, None, None, start:end, None, :end]).softmax(-1, torch.float32)
        weight_BJLGM = map_BJILGM[:, :, 0] - lam * map_BJILGM[:, :, 1]
        weight_BJLGM = (weight_BJLGM.relu() if floor else weight_BJLGM).to(v_BJLE.dtype)
        out.append((weight_BJLGM.flatten(2, 3) @ v_BJLE[..., :end, :]).unflatten(2, (-1, G)))
    return torch.cat(out, 2)


class Block(nn.Module):
    def __init__(self, cfg, layer):
        super().__init__()
        self.cfg = cfg
        Q, C, E = cfg.heads * cfg.head_size, cfg.kv_heads * cfg.head_size, 2 * cfg.head_size
        self.attn_norm, self.ffn_norm = nn.RMSNorm(cfg.width, eps=1e-6), nn.RMSNorm(cfg.width, eps=1e-6)
        self.subln = nn.RMSNorm(E, eps=1e-5)
        self.wqkv = nn.Linear(cfg.width, Q + 2 * C, bias=False)
        self.wo = nn.Linear(Q, cfg.width, bias=False)
        self.w_gate_up = nn.Linear(cfg.width, 2 * cfg.ffn, bias=False)
        self.w_down = nn.Linear(cfg.ffn, cfg.width, bias=False)
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            setattr(self, name, nn.Parameter(0.01 * torch.randn(cfg.head_size)))
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer)
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, x_BLD, cos, sin, bias_BLM):
        cfg, K = self.cfg, self.cfg.head_size
        J, G, (B, L, _) = cfg.kv_heads // 2, cfg.heads // cfg.kv_heads, x_BLD.shape
        qkv = self.wqkv(self.attn_norm(x_BLD)).split([cfg.heads * K, cfg.kv_heads * K, cfg.kv_heads * K], -1)
        q_BLJGIK, k_BLJIK, v_BLJE = qkv[0].view(B, L, J, G, 2, K), qkv[1].view(B, L, J, 2, K), qkv[2].view(B, L, J, 2 * K)
        q_BJILGK = rotate(q_BLJGIK * K**-0.5, cos, sin).permute(0, 2, 4, 1, 3, 5).contiguous()
        k_BJILK = rotate(k_BLJIK, cos[:, :, 0], sin[:, :, 0]).permute(0, 2, 3, 1, 4).contiguous()
        v_BJLE = v_BLJE.transpose(1, 2).contiguous()
        exponents = (self.lambda_q1 @ self.lambda_k1).clamp(-10, 10), (self.lambda_q2 @ self.lambda_k2).clamp(-10, 10)
        lam = (exponents[0].exp() - exponents[1].exp() + self.lambda_init).clamp(0, 1)
        o_BJLGE = diff_attention(q_BJILGK, k_BJILK, v_BJLE, bias_BLM, lam, cfg.floor, cfg.block)
        o_BJLGE = self.subln(o_BJLGE) * (1 - self.lambda_init)
        x_BLD = x_BLD + self.dropout(self.wo(o_BJLGE.transpose(1, 2).reshape(B, L, -1)))
        gate_BLF, up_BLF = self.w_gate_up(self.ffn_norm(x_BLD)).chunk(2, -1)
        return x_BLD + self.dropout(self.w_down(self.dropout(F.silu(gate_BLF) * up_BLF)))


class PythonCoder(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.embed = nn.Embedding(cfg.vocab, cfg.width)  # its weight is the main head too
        self.layers = nn.ModuleList(Block(cfg, layer) for layer in range(cfg.layers))
        self.norm, self.norm_hidden, self.norm_embed, self.norm_out = (nn.RMSNorm(cfg.width, eps=1e-6) for _ in range(4))
        self.proj = nn.Linear(2 * cfg.width, cfg.width, bias=False)
        self.head = nn.Linear(cfg.width, cfg.vocab, bias=False)
        inv_freq, self.rope_factor = rope_frequencies(cfg)
        self.register_buffer("inv_freq", torch.tensor(inv_freq, dtype=torch.float32), persistent=False)
        for name, weight in self.named_parameters():
            if weight.ndim > 1:
                out = name.endswith(("wo.weight", "w_down.weight"))
                nn.init.normal_(weight, 0, 0.02 / math.sqrt(2 * cfg.layers) if out else 0.02)

    def hidden(self, token_BL, segment_BL, position_BL):
        """What both heads multiply [B, L, D]; segments number the documents of a row, none sees another."""
        angle = position_BL[..., None] * self.inv_freq
        cos, sin = (f(angle)[:, :, None, None, None] * self.rope_factor for f in (torch.cos, torch.sin))
        L = token_BL.shape[1]
        seen_BLM = segment_BL[:, :, None] == segment_BL[:, None, :]
        seen_BLM = seen_BLM & torch.ones(L, L, dtype=torch.bool, device=token_BL.device).tril()
        bias_BLM = torch.zeros(seen_BLM.shape, device=token_BL.device).masked_fill(~seen_BLM, -math.inf)
        embed_BLD = x_BLD = self.embed(token_BL)
        for layer in self.layers:
            x_BLD = layer(x_BLD, cos, sin, bias_BLM)
        hidden_BLD = self.norm(x_BLD)
        next_BLD = self.norm_embed(embed_BLD.roll(-1, 1))
        return hidden_BLD, self.norm_out(self.proj(torch.cat([self.norm_hidden(hidden_BLD), next_BLD], -1)))

    def forward(self, token_BL, segment_BL, position_BL):
        """Summed cross-entropy in nats of the main head (next token) and of the MTP head (the one after it)."""
        main_BLD, mtp_BLD = self.hidden(token_BL, segment_BL, position_BL)
        sums = []
        for ahead, x_BLD, weight_VD in ((1, main_BLD, self.embed.weight), (2, mtp_BLD, self.head.weight)):
            logits_BLV, label_BL = F.linear(x_BLD, weight_VD), targets(token_BL, segment_BL, ahead)
            sums.append(F.cross_entropy(logits_BLV.flatten(0, 1).float(), label_BL.flatten(), reduction="sum"))
        return sums


def targets(token_BL, segment_BL, ahead):
    """Token `ahead` places on; -100, which cross_entropy skips, where that is another document or padding (segment 0)."""
    label_BL, segment_ahead_BL = (F.pad(x[:, ahead:], (0, ahead)) for x in (token_BL, segment_BL))
    return label_BL.masked_fill((segment_ahead_BL != segment_BL) | (segment_BL == 0), -100)


def random_batch(cfg, generator, device):
    """Random tokens, documents of 200 tokens on average, positions that restart in each."""
    shape = cfg.batch_size, cfg.seq_len
    token_BL = torch.randint(cfg.vocab, shape, generator=generator)
    border_BL = torch.rand(shape, generator=generator) < 1 / 200
    border_BL[:, 0] = True
    place_BL = torch.arange(cfg.seq_len).expand(shape)
    start_BL = torch.where(border_BL, place_BL, 0).cummax(1).values
    return [x.to(device) for x in (token_BL, border_BL.cumsum(1), place_BL - start_BL)]


def check(cfg):
    """Compare logits and losses with the reference values, every variant that this model has."""
    settings = json.loads((Path(cfg.check) / "tiny_model.json").read_text())
    arrays = np.load(Path(cfg.check) / "tiny_model.npz")
    token_BL, segment_BL, position_BL = (torch.tensor(arrays[k]).long() for k in ("tokens", "segments", "positions"))
    param = {k.removeprefix("param/"): torch.tensor(arrays[k]) for k in arrays.files if k.startswith("param/")}
    worst = 0.0
    for name, variant in settings["variants"].items():
        ref = settings["base"] | variant["config"]
        if ref["attn_cap"] or ref["final_cap"] or ref["z_loss"]:
            print(f"{name}: skipped, this model has no caps and no z-loss")
            continue
        shape = dict(zip(("vocab", "width", "layers", "heads", "kv_heads", "head_size", "ffn"), map(ref.get, ("vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn"))))
        model = PythonCoder(dataclasses.replace(cfg, **shape, floor=ref["floor"], theta=ref["theta"], yarn_factor=ref["yarn_factor"], positions=ref["yarn_original"], block=7)).eval()
        state = {"embed.weight": param["embed"], "norm.weight": param["norm"], "proj.weight": param["mtp.proj"].T, "head.weight": param["mtp.head"]}
        state |= {f"{k}.weight": param[f"mtp.{k}"] for k in ("norm_hidden", "norm_embed", "norm_out")}
        for i in range(ref["layers"]):
            get = {k.removeprefix(f"layers.{i}."): v for k, v in param.items() if k.startswith(f"layers.{i}.")}
            joined = {"wqkv": torch.cat([get.pop(k) for k in ("wq", "wk", "wv")], 1), "w_gate_up": torch.cat([get.pop(k) for k in ("w_gate", "w_up")], 1)}
            for k, v in (get | joined).items():
                state[f"layers.{i}.{k}" + ("" if k.startswith("lambda") else ".weight")] = v.T if v.ndim == 2 else v
        model.load_state_dict(state)
        with torch.no_grad():
            hidden = model.hidden(token_BL, segment_BL, position_BL)
            logits = F.linear(hidden[0], model.embed.weight), F.linear(hidden[1], model.head.weight)
            sums = model(token_BL, segment_BL, position_BL)
        main, mtp = (float(x / (targets(token_BL, segment_BL, i) >= 0).sum()) for i, x in enumerate(sums, 1))
        errors = {
            "logits": np.abs(logits[0] - arrays[f"{name}/logits"]).max(),
            "mtp_logits": np.abs(logits[1] - arrays[f"{name}/mtp_logits"])[:, :-1].max(),
            "main": abs(main - variant["main"]), "mtp": abs(mtp - variant["mtp"]), "total": abs(main + ref["mtp_weight"] * mtp - variant["total"])}
        print(name, {k: f"{v:.1e}" for k, v in errors.items()})
        worst = max(worst, *errors.values())
    return worst
