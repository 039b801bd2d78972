"""PythonCoder in PyTorch, as a good PyTorch user would write it today: the baseline of
train_tpu.py's speed.

    python bench/pythoncoder_torch.py --threads=2                        # preset tiny; a minute to compile, prints JSON
    python bench/pythoncoder_torch.py --dtype=bfloat16 --dropout=0
    python bench/pythoncoder_torch.py --check=tests/golden/pythoncoder   # is it the same model?

Model, loss and update are those of model_pythoncoder.py and train_tpu.py: floored differential
attention with clamped lambda, documents packed into rows, two heads, dropout at three places, mean
over the valid tokens of all micro-batches, clipping to norm 1, AdamW with decay on matrices. The
tokens are random, speed does not depend on them. Needs PyTorch 2.13 for --chunked_loss. What was
tried for speed, and what it gave, is in bench/LOG.md.

Letters: B batch, L length, M keys that a block of queries sees, D width, J pairs of key/value
heads, G query pairs per key/value pair, I the two softmax maps, K head size, E = 2K value size, F
feed-forward, V vocabulary.
"""

import dataclasses
import json
import math
import os
import platform
import sys
import time
import typing
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import runs


@dataclasses.dataclass(frozen=True)
class Config:
    vocab: int = 4096  # rows of the embedding
    width: int = 256  # of the residual stream
    layers: int = 4  # blocks of attention and feed-forward
    heads: int = 4  # query heads; two make one differential head
    kv_heads: int = 2  # key/value heads
    head_size: int = 64  # of queries and keys
    ffn: int = 704  # width of the feed-forward layer
    floor: bool = True  # max(A1 - lambda A2, 0); False is the attention as published
    theta: float = 500_000.0  # base of the rotary angles
    yarn_factor: float = 1.0  # above 1: YaRN's rotary table, for sequences longer than `positions`
    positions: int = 2048  # longest sequence in training; only YaRN asks
    dropout: float = 0.1  # of attention output, feed-forward hidden and output
    seq_len: int = 512  # tokens of a sequence
    batch_size: int = 16  # sequences per optimiser step
    accumulate: int = 1  # micro-batches that they are cut into
    block: int = 128  # queries per block of attention
    # float32: cross-entropy in chunks of tokens; False makes all logits at once
    chunked_loss: bool = True
    # bfloat16 is autocast, weights stay float32
    dtype: typing.Literal["float32", "bfloat16"] = "float32"
    # on a CPU ATen makes the dropout masks; else Inductor does, which costs 12 % of a step
    aten_dropout: bool = True
    compile: bool = True  # run through torch.compile
    steps: int = 10  # timed steps
    warmup: int = 3  # steps before them, not timed; the first one compiles
    threads: int = 0  # CPU threads; 0 is PyTorch's choice
    device: str = ""  # "" is cuda where there is one, else cpu
    seed: int = 0  # weights, tokens, dropout
    check: str = ""  # folder with tiny_model.json and .npz: compare with these instead of measuring


def rope_frequencies(cfg):
    """Rotary frequencies [K/2] and the factor on cos and sin; YaRN (arXiv:2309.00071) if
    yarn_factor > 1.
    """
    K, log_theta = cfg.head_size, math.log(cfg.theta)
    inv_freq = cfg.theta ** (-np.arange(0, K, 2) / K)
    if cfg.yarn_factor <= 1:
        return inv_freq, 1.0
    low, high = (
        K * math.log(cfg.positions / (2 * math.pi * turns)) / (2 * log_theta) for turns in (32, 1)
    )
    low, high = max(math.floor(low), 0), min(math.ceil(high), K - 1)
    ramp = np.clip((np.arange(K // 2) - low) / max(high - low, 1e-3), 0, 1)
    return inv_freq * (1 - ramp) + inv_freq / cfg.yarn_factor * ramp, 0.1 * math.log(
        cfg.yarn_factor
    ) + 1


def rotate(x, cos, sin):
    """Rotary embedding of the last axis, half-split."""
    x1, x2 = x.chunk(2, -1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).to(x.dtype)


def diff_attention(q_BJILGK, k_BJILK, v_BJLE, bias_BLM, lam, floor, block):
    """max(softmax(q_1 k_1) - lam softmax(q_2 k_2), 0) v; bias is 0 where a key may be seen, else
    -inf.

    The floor needs both maps, so scaled_dot_product_attention cannot do it (and is slower on a CPU
    where it could). Each block of queries meets the keys up to its own end: half the work, and its
    maps stay in the cache. The G heads of a group are rows of one product: keys and values are
    never repeated.
    """
    out = []
    for start in range(0, q_BJILGK.shape[3], block):
        queries, keys = slice(start, start + block), slice(0, start + block)
        # R runs over L and G
        score_BJIRM = q_BJILGK[:, :, :, queries].flatten(3, 4) @ k_BJILK[..., keys, :].mT
        score_BJILGM = (
            score_BJIRM.unflatten(3, (-1, q_BJILGK.shape[4]))
            + bias_BLM[:, None, None, queries, None, keys]
        )
        map_BJILGM = score_BJILGM.softmax(-1, torch.float32)
        weight_BJLGM = map_BJILGM[:, :, 0] - lam * map_BJILGM[:, :, 1]
        weight_BJLGM = (weight_BJLGM.relu() if floor else weight_BJLGM).to(v_BJLE.dtype)
        out.append(weight_BJLGM.flatten(2, 3) @ v_BJLE[..., keys, :])
    return torch.cat(out, 2).unflatten(2, (-1, q_BJILGK.shape[4]))


class Block(nn.Module):
    def __init__(self, cfg, layer):
        super().__init__()
        self.cfg = cfg
        Q, C = cfg.heads * cfg.head_size, cfg.kv_heads * cfg.head_size
        self.attn_norm, self.ffn_norm = (
            nn.RMSNorm(cfg.width, eps=1e-6),
            nn.RMSNorm(cfg.width, eps=1e-6),
        )
        self.subln = nn.RMSNorm(2 * cfg.head_size, eps=1e-5)
        self.wqkv = nn.Linear(cfg.width, Q + 2 * C, bias=False)
        self.wo = nn.Linear(Q, cfg.width, bias=False)
        self.w_gate_up = nn.Linear(cfg.width, 2 * cfg.ffn, bias=False)
        self.w_down = nn.Linear(cfg.ffn, cfg.width, bias=False)
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            setattr(self, name, nn.Parameter(0.01 * torch.randn(cfg.head_size)))
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer)
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, x_BLD, cos, sin, bias_BLM):
        cfg, (B, L, _) = self.cfg, x_BLD.shape
        J, G, K = cfg.kv_heads // 2, cfg.heads // cfg.kv_heads, cfg.head_size
        # queries, keys and values from one product, rotated, head-major; the scale goes to the
        # queries
        qkv = self.wqkv(self.attn_norm(x_BLD)).split(
            [cfg.heads * K, cfg.kv_heads * K, cfg.kv_heads * K], -1
        )
        q_BLJGIK = rotate(qkv[0].view(B, L, J, G, 2, K) * K**-0.5, cos, sin)
        k_BLJIK = rotate(qkv[1].view(B, L, J, 2, K), cos[:, :, 0], sin[:, :, 0])
        q_BJILGK = q_BLJGIK.permute(0, 2, 4, 1, 3, 5).contiguous()
        k_BJILK = k_BLJIK.permute(0, 2, 3, 1, 4).contiguous()
        v_BJLE = qkv[2].view(B, L, J, 2 * K).transpose(1, 2).contiguous()
        # one lambda for all heads of the layer, clamped twice
        dot1 = (self.lambda_q1 * self.lambda_k1).sum().clamp(-10, 10)
        dot2 = (self.lambda_q2 * self.lambda_k2).sum().clamp(-10, 10)
        lam = (dot1.exp() - dot2.exp() + self.lambda_init).clamp(0, 1)
        o_BJLGE = diff_attention(q_BJILGK, k_BJILK, v_BJLE, bias_BLM, lam, cfg.floor, cfg.block)
        o_BJLGE = self.subln(o_BJLGE) * (1 - self.lambda_init)
        x_BLD = x_BLD + self.dropout(self.wo(o_BJLGE.transpose(1, 2).reshape(B, L, -1)))
        # SwiGLU
        gate_BLF, up_BLF = self.w_gate_up(self.ffn_norm(x_BLD)).chunk(2, -1)
        return x_BLD + self.dropout(self.w_down(self.dropout(F.silu(gate_BLF) * up_BLF)))


class PythonCoder(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        D = cfg.width
        self.cfg = cfg
        self.embed = nn.Embedding(cfg.vocab, D)  # its weight is the main head's too
        self.layers = nn.ModuleList(Block(cfg, layer) for layer in range(cfg.layers))
        self.norm, self.norm_hidden, self.norm_embed, self.norm_out = (
            nn.RMSNorm(D, eps=1e-6) for _ in range(4)
        )
        self.proj, self.head = nn.Linear(2 * D, D, bias=False), nn.Linear(D, cfg.vocab, bias=False)
        inv_freq, self.rope_factor = rope_frequencies(cfg)
        self.register_buffer(
            "inv_freq", torch.tensor(inv_freq, dtype=torch.float32), persistent=False
        )
        # matrices that add to the residual stream are smaller
        for name, weight in self.named_parameters():
            if weight.ndim > 1:
                residual = name.endswith(("wo.weight", "w_down.weight"))
                nn.init.normal_(weight, 0, 0.02 / math.sqrt(2 * cfg.layers) if residual else 0.02)

    def hidden(self, token_BL, segment_BL, position_BL):
        """What the main and the MTP head multiply, [B, L, D] each; segments number the documents
        packed into a row.
        """
        angle = position_BL[:, :, None, None, None, None] * self.inv_freq
        cos, sin = angle.cos() * self.rope_factor, angle.sin() * self.rope_factor
        # a token sees its own document, up to itself
        slot_L = torch.arange(token_BL.shape[1], device=token_BL.device)
        seen_BLM = (segment_BL[:, :, None] == segment_BL[:, None]) & (slot_L[:, None] >= slot_L)
        bias_BLM = torch.zeros_like(seen_BLM, dtype=torch.float32).masked_fill(~seen_BLM, -math.inf)
        embed_BLD = x_BLD = self.embed(token_BL)
        for layer in self.layers:
            x_BLD = layer(x_BLD, cos, sin, bias_BLM)
        hidden_BLD = self.norm(x_BLD)
        both_BL2D = torch.cat(
            [self.norm_hidden(hidden_BLD), self.norm_embed(embed_BLD.roll(-1, 1))], -1
        )
        return hidden_BLD, self.norm_out(self.proj(both_BL2D))

    def forward(self, token_BL, segment_BL, position_BL):
        """Summed cross-entropy in nats of the main head (next token) and of the MTP head (the one
        after it).
        """
        main_BLD, mtp_BLD = self.hidden(token_BL, segment_BL, position_BL)
        sums = []
        for ahead, x_BLD, weight_VD in (
            (1, main_BLD, self.embed.weight),
            (2, mtp_BLD, self.head.weight),
        ):
            # T = B L
            x_TD, label_T = x_BLD.flatten(0, 1), targets(token_BL, segment_BL, ahead).flatten()
            # under autocast it is off by 0.009 nats
            if self.cfg.chunked_loss and self.cfg.dtype == "float32":
                chunks = nn.LinearCrossEntropyOptions()
                sums.append(
                    F.linear_cross_entropy(
                        x_TD, weight_VD, label_T, reduction="sum", options=chunks
                    )
                )
            else:
                sums.append(F.cross_entropy(F.linear(x_TD, weight_VD), label_T, reduction="sum"))
        return sums


def targets(token_BL, segment_BL, ahead):
    """Token `ahead` places on; -100, which the loss skips, where that is another document or
    padding (segment 0).
    """
    label_BL, segment_ahead_BL = (F.pad(x[:, ahead:], (0, ahead)) for x in (token_BL, segment_BL))
    return label_BL.masked_fill((segment_ahead_BL != segment_BL) | (segment_BL == 0), -100)


def random_batch(cfg, generator):
    """Tokens, segments and positions [B, L] of random documents, 200 tokens long on average."""
    shape = cfg.batch_size, cfg.seq_len
    token_BL = torch.randint(cfg.vocab, shape, generator=generator)
    border_BL = torch.rand(shape, generator=generator) < 1 / 200
    border_BL[:, 0] = True
    place_BL = torch.arange(cfg.seq_len).expand(shape)
    return (
        token_BL,
        border_BL.cumsum(1),
        place_BL - torch.where(border_BL, place_BL, 0).cummax(1).values,
    )


def train_step(cfg, model, optimizer, batch):
    """One update from all micro-batches: sums of token losses over the counts of all valid tokens.
    Returns the loss.
    """
    main_count, mtp_count = ((targets(*batch[:2], ahead) >= 0).sum() for ahead in (1, 2))
    loss = 0
    for micro in zip(*(x.chunk(cfg.accumulate) for x in batch), strict=True):
        with torch.autocast(batch[0].device.type, torch.bfloat16, enabled=cfg.dtype == "bfloat16"):
            main, mtp = model(*micro)
        part = main / main_count + 0.1 * mtp / mtp_count
        part.backward()
        loss = loss + part.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss)


def check(cfg):
    """Largest errors of logits, losses and gradients of the golden tiny model, for the variants
    that this model has.
    """
    settings, arrays = (Path(cfg.check) / f"tiny_model.{ending}" for ending in ("json", "npz"))
    settings, arrays = json.loads(settings.read_text()), np.load(arrays)
    batch = [torch.from_numpy(arrays[name]).long() for name in ("tokens", "segments", "positions")]
    largest = {}
    for name, variant in settings["variants"].items():
        ref = settings["base"] | variant["config"]
        if ref["attn_cap"] or ref["final_cap"] or ref["z_loss"] or not ref["clamp"]:
            print(f"{name}: left out, this model has neither caps nor z-loss")
            continue
        same = "vocab", "layers", "heads", "kv_heads", "ffn", "theta", "floor", "yarn_factor"
        renamed = {
            "width": ref["hidden"],
            "head_size": ref["head_dim"],
            "positions": ref["yarn_original"],
        }
        model = PythonCoder(
            dataclasses.replace(
                cfg,
                **{key: ref[key] for key in same},
                **renamed,
                dropout=0.0,
                block=min(cfg.block, 7),
            )
        )

        # the reference's arrays are leaves, so that gradients arrive at them and not at the fused
        # projections
        param = {
            key[6:]: torch.from_numpy(arrays[key]).requires_grad_()
            for key in arrays.files
            if key[:6] == "param/"
        }
        state = {}
        for key in model.state_dict():
            path, _, leaf = key.removesuffix(".weight").rpartition(".")
            fused = {"wqkv": ("wq", "wk", "wv"), "w_gate_up": ("w_gate", "w_up")}.get(leaf, (leaf,))
            names = [
                part if not path and part in param else f"{path or 'mtp'}.{part}" for part in fused
            ]
            weight = torch.cat([param[n] for n in names], -1)
            state[key] = weight.T if weight.ndim == 2 and leaf not in ("embed", "head") else weight
        # losses and gradients, then the logits of both heads
        main, mtp = torch.func.functional_call(model, state, tuple(batch))
        main, mtp = (
            x / (targets(*batch[:2], ahead) >= 0).sum() for ahead, x in ((1, main), (2, mtp))
        )
        total = main + ref["mtp_weight"] * mtp
        total.backward()
        model.load_state_dict(state)
        with torch.no_grad():
            hidden = model.hidden(*batch)
        errors = {"main": main.item() - variant["main"], "mtp": mtp.item() - variant["mtp"]}
        errors["total"] = total.item() - variant["total"]
        for key, x_BLD, head in (
            ("logits", hidden[0], model.embed),
            ("mtp_logits", hidden[1], model.head),
        ):
            got, want = F.linear(x_BLD, head.weight).detach().numpy(), arrays[f"{name}/{key}"]
            # the last has no next token
            errors[key] = (got - want)[:, : -1 if key == "mtp_logits" else None]
        slopes = variant["directional_derivatives"]
        for key, want in slopes.items():
            grad = param[key].grad.flatten()
            got = float(grad.double() @ torch.cos(0.7 + 1.3 * torch.arange(len(grad)).double()))
            errors["gradients"] = max(
                errors.get("gradients", 0), abs(got - want) / max(abs(want), 1e-2)
            )
        largest[name] = {key: float(np.abs(error).max()) for key, error in errors.items()}
        print(name, " ".join(f"{key} {error:.1e}" for key, error in largest[name].items()))
    return largest


def main(cfg):
    if cfg.check:
        limit = {"gradients": 1e-3}  # relative; everything else 1e-4 absolute
        found = [
            (name, key, error)
            for name, errors in check(cfg).items()
            for key, error in errors.items()
        ]
        far = [
            f"{name} {key} {error:.1e}"
            for name, key, error in found
            if not error <= limit.get(key, 1e-4)
        ]
        if far or not found:
            raise ValueError(f"not the reference's model: {', '.join(far)}")
        return
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    device = cfg.device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(cfg.seed)
    torch._inductor.config.fallback_random = device == "cpu" and cfg.aten_dropout
    model = PythonCoder(cfg).to(device)
    if cfg.compile:
        model.compile()
    # weight decay on matrices and embeddings alone
    decay, rest = (
        [p for p in model.parameters() if (p.ndim > 1) == matrix] for matrix in (True, False)
    )
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)
    generator = torch.Generator().manual_seed(cfg.seed)

    seconds, losses = [], []
    for step in range(cfg.warmup + cfg.steps):
        if step == 0 and cfg.compile:
            print("compiling, about a minute", file=sys.stderr, flush=True)
        batch = [x.to(device) for x in random_batch(cfg, generator)]
        start = time.perf_counter()
        losses.append(train_step(cfg, model, optimizer, batch))  # float(loss) waits for the device
        seconds.append(time.perf_counter() - start)
    low, median, high = np.quantile(seconds[cfg.warmup :], [0.1, 0.5, 0.9])
    result = {
        "step_s": median,
        "step_s_p10": low,
        "step_s_p90": high,
        "tok_per_s": cfg.batch_size * cfg.seq_len / median,
        "compile_s": seconds[0] - median,
        "loss": losses[-1],
        "device": torch.cuda.get_device_name()
        if device == "cuda"
        else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        # of the machine in the last minute; above `threads` the numbers are not worth much
        "load": os.getloadavg()[0],
        "params": sum(p.numel() for p in model.parameters()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "config": dataclasses.asdict(cfg),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
