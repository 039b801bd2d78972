"""MDLM: a bidirectional transformer that predicts masked tokens, 5 to 60 million parameters, and its sampling loop.

PyTorch. train_gpu.py trains it, generate.py samples from it. Written for Python 3.10 too; needs diffusion.py beside it.

Letters: B batch, L length, D width, H heads, K head size, V vocabulary, N steps, M positions to draw, T texts in a
packed row of S tokens.

h = embed[token] + MLP(sinusoid(noise)); each block: h += W_o attn(LN h), then h += W_2 gelu(W_1 LN h);
logits = W_head LN h. Attention sees both sides, PAD aside; where a token is turns its queries and keys (RoPE,
arXiv:2104.09864), or is a learned vector that is added to embed[token] (rope=False). Ref: MDLM, arXiv:2406.07524.
"""

import dataclasses
import json
import math
import os
import typing
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import diffusion

try:
    from torch.nn.attention.varlen import varlen_attn  # PyTorch 2.10
except ImportError:
    varlen_attn = None

PAD, BOS, EOS, MASK, UNK = range(5)  # in every tokenizer that data_prep.py makes for padded rows
BANNED = (PAD, BOS, MASK, UNK)  # never sampled


@dataclasses.dataclass(frozen=True)
class Config:
    """The architecture; everything that a checkpoint needs to be read again."""

    vocab: int = 8192  # token ids, MASK and PAD among them
    width: int = 384
    layers: int = 6
    heads: int = 6  # width / heads is the head size; 64 in all presets, which the kernels of csrc/ need
    ffn: int = 1536
    positions: int = 256  # longest sequence
    rope: bool = False  # positions turn queries and keys instead of being learned
    time: bool = True  # the noise level is an input
    tie: bool = False  # the head is the embedding
    dropout: float = 0.0  # of what each residual branch adds

    def __post_init__(self):
        if self.width % self.heads:
            raise ValueError(f"width {self.width} does not divide into {self.heads} heads")


CONFIGS = {
    "tiny": Config(width=256, layers=4, heads=4, ffn=1024),
    "small": Config(width=384, layers=6, heads=6, ffn=1536),
    "medium": Config(width=512, layers=8, heads=8, ffn=2048),
    "large": Config(width=640, layers=10, heads=10, ffn=2560),
}


def sinusoid(noise_B, width):
    """[sin(1000 n f), cos(1000 n f)] in float32 [B, width] of a noise level n in [0, 1]; f_k = 10000^(-2k / width)."""
    # float32 whatever the model's dtype: bfloat16 cannot tell noise 0.500 from 0.501
    k = torch.arange(width // 2, device=noise_B.device, dtype=torch.float32)
    angle_BD = 1000 * noise_B.float()[:, None] * torch.exp(-math.log(10_000) / (width // 2) * k)
    return torch.cat([angle_BD.sin(), angle_BD.cos()], -1)


def angles(length, head_size, device=None):
    """cos and sin [L, K/2] in float32 of p f_k: position p = 0 .. L-1, f_k = 10000^(-2k / K)."""
    k = torch.arange(head_size // 2, device=device, dtype=torch.float32)
    angle_LK = torch.arange(length, device=device)[:, None] * torch.exp(-math.log(10_000) / (head_size // 2) * k)
    return angle_LK.cos(), angle_LK.sin()


def rotate(x_BHLK, cos_LK, sin_LK):
    """RoPE: turns the pairs (x_k, x_{k + K/2}) of each head by the angle of their position; in float32."""
    a, b = x_BHLK.float().chunk(2, -1)
    return torch.cat([a * cos_LK - b * sin_LK, b * cos_LK + a * sin_LK], -1).to(x_BHLK.dtype)


class Packed(typing.NamedTuple):
    """Where the T texts of a row [1, S] are that holds one behind the other, without PAD; each sees itself alone."""

    text_S: torch.Tensor  # the text that a token belongs to
    place_S: torch.Tensor  # the token's place in its text
    start_U: torch.Tensor  # where each text begins, and the last one ends: U = T + 1 numbers, int32
    longest: int  # no text has more tokens


def packed_attention(q_1HSK, k_1HSK, v_1HSK, packed):
    """Flash attention within each text. On a CPU the same by a mask [S, S], for tests: padded rows are faster there."""
    if q_1HSK.device.type == "cpu":
        same_SS = packed.text_S[:, None] == packed.text_S
        return F.scaled_dot_product_attention(q_1HSK, k_1HSK, v_1HSK, attn_mask=same_SS)
    q_SHK, k_SHK, v_SHK = (x_1HSK[0].transpose(0, 1) for x_1HSK in (q_1HSK, k_1HSK, v_1HSK))
    ends = packed.start_U, packed.start_U, packed.longest, packed.longest
    return varlen_attn(q_SHK, k_SHK, v_SHK, *ends).transpose(0, 1)[None]


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        D = cfg.width
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.fc1, self.fc2 = nn.Linear(D, cfg.ffn), nn.Linear(cfg.ffn, D)
        self.heads, self.dropout = cfg.heads, nn.Dropout(cfg.dropout)

    def forward(self, h_BLD, see_B11L, cos_sin=None, packed=None):
        B, L, D = h_BLD.shape
        # attention over both sides: no causal mask, only PAD and other texts are hidden
        qkv = self.qkv(self.norm1(h_BLD)).view(B, L, 3, self.heads, D // self.heads)
        q_BHLK, k_BHLK, v_BHLK = qkv.permute(2, 0, 3, 1, 4)
        if cos_sin:
            q_BHLK, k_BHLK = rotate(q_BHLK, *cos_sin), rotate(k_BHLK, *cos_sin)
        if packed:
            o_BHLK = packed_attention(q_BHLK, k_BHLK, v_BHLK, packed)
        else:
            o_BHLK = F.scaled_dot_product_attention(q_BHLK, k_BHLK, v_BHLK, attn_mask=see_B11L)
        h_BLD = h_BLD + self.dropout(self.out(o_BHLK.transpose(1, 2).reshape(B, L, D)))
        # feed-forward
        return h_BLD + self.dropout(self.fc2(F.gelu(self.fc1(self.norm2(h_BLD)))))


class MDLM(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        D = cfg.width
        self.cfg = cfg
        self.embed = nn.Embedding(cfg.vocab, D)
        if not cfg.rope:
            self.position = nn.Embedding(cfg.positions, D)
        if cfg.time:  # one vector for the whole canvas, added at every position
            self.time = nn.Sequential(nn.Linear(D, D), nn.SiLU(), nn.Linear(D, D))
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.layers))
        self.norm = nn.LayerNorm(D)
        if not cfg.tie:
            self.head = nn.Linear(D, cfg.vocab, bias=False)
        self.init()

    @torch.no_grad()
    def init(self):
        """Tokens and positions of size 1, matrices that keep the size of their input, no time embedding yet.

        Positions are learned, but begin as sinusoids. With GPT-2's 0.02 for all weights time embedding and the first
        MLP drown tokens and positions, and the model stays at the entropy of single tokens for much longer.
        """
        size = self.cfg.width**-0.5 if self.cfg.tie else 1.0  # a tied embedding is also the head
        for name, weight in self.named_parameters():
            if name == "embed.weight":
                nn.init.normal_(weight, 0, size)
            elif name == "position.weight":
                # position p looks like noise level p / 1000; sqrt(2) makes the mean square of sines 1
                weight.copy_(size * math.sqrt(2) * sinusoid(torch.arange(len(weight)) / 1000, weight.shape[1]))
            elif name.endswith("bias") or name == "time.2.weight":
                nn.init.zeros_(weight)
            elif weight.ndim > 1:
                # what is added to the residual stream is smaller, as 2 x layers of them add up
                residual = name.endswith(("out.weight", "fc2.weight"))
                std = weight.shape[1] ** -0.5 / (math.sqrt(2 * self.cfg.layers) if residual else 1)
                nn.init.normal_(weight, 0, std)

    def time_embedding(self, noise_B):
        """[B, 1, D] for noise levels in [0, 1]."""
        weight = self.time[0].weight
        return self.time(sinusoid(noise_B, self.cfg.width).to(weight.dtype))[:, None]

    def hidden(self, token_BL, noise_B=None, see_BL=None, packed=None):
        """Normed states [B, L, D]. noise_B is P(masked), whatever the schedule; see_BL is False where nobody looks.

        see_BL None lets all be seen. With `packed` the rows' texts stand in one row [1, S], and noise_B is the texts'.
        Raises ValueError for a row longer than the positions, or a noise level missing.
        """
        L = packed.longest if packed else token_BL.shape[1]
        if L > self.cfg.positions:
            raise ValueError(f"{L} tokens do not fit the model's {self.cfg.positions} positions")
        # what each position holds, where it is, and how much of the canvas is masked
        h_BLD, cos_sin = self.embed(token_BL), None
        place_L = packed.place_S if packed else slice(L)
        if self.cfg.rope:
            cos_LK, sin_LK = angles(L, self.cfg.width // self.cfg.heads, token_BL.device)
            cos_sin = cos_LK[place_L], sin_LK[place_L]
        else:
            h_BLD = h_BLD + self.position.weight[place_L]
        if self.cfg.time:
            if noise_B is None:
                raise ValueError("this model is told the noise level: pass noise_B")
            time_B1D = self.time_embedding(noise_B)
            h_BLD = h_BLD + (time_B1D[packed.text_S, 0] if packed else time_B1D)
        # one mask of keys for all heads and queries
        see_B11L = None if see_BL is None else see_BL[:, None, None]
        for block in self.blocks:
            h_BLD = block(h_BLD, see_B11L, cos_sin, packed)
        return self.norm(h_BLD)

    def logits(self, hidden):
        """Logits [..., V] of hidden states [..., D], in their dtype."""
        return F.linear(hidden, self.embed.weight if self.cfg.tie else self.head.weight)

    def forward(self, token_BL, noise_B=None, see_BL=None):
        return self.logits(self.hidden(token_BL, noise_B, see_BL))


# ---- sampling ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sampling:
    sampler: str = "ancestral"  # or a confidence of diffusion.py: the surest tokens of each step stay
    steps: int = 64  # at most so many passes through the model
    schedule: str = "cosine_sq"  # when how many tokens are unmasked, or "even"; need not be that of training
    temperature: float = 1.0  # 0 takes the likeliest token
    top_k: int = 0  # draw from the k likeliest; 0: from all
    top_p: float = 0.95  # draw from the smallest set of this probability
    vocab: int = 0  # ids from here on have no token and are never drawn; 0: all have one
    block_length: int = 0  # fill blocks of so many positions from left to right; 0: the whole canvas at once


def draw(logits_MV, top_p, generator):
    """Tokens [M] from the smallest set of likeliest ones whose probability reaches top_p.

    Draws from the whole distribution. Where the tokens likelier than the one drawn have top_p or more, it and all that
    are no likelier lie outside the set: they go, and another is drawn. What diffusion.filter_logits gives, without a
    sort and mostly in one draw; equals are in together.
    """
    prob_RV = diffusion.softmax(logits_MV)
    token_M = torch.zeros_like(prob_RV[:, 0], dtype=torch.long)
    # the R of the M rows that still have to draw; at first all
    row_R = torch.arange(len(token_M), device=token_M.device)
    while len(row_R):
        # inverse transform: the first token whose cumulated probability exceeds a uniform number
        sum_RV, u_R1 = prob_RV.cumsum(-1), torch.rand(len(row_R), 1, generator=generator, device=token_M.device)
        drawn_R1 = torch.searchsorted(sum_RV, u_R1 * sum_RV[:, -1:], right=True).clamp(max=prob_RV.shape[1] - 1)
        token_M[row_R] = drawn_R1[:, 0]
        # a token outside the set: draw again from the likelier ones, which hold the whole set
        drawn_prob_R1 = prob_RV.gather(1, drawn_R1)
        likelier_RV = prob_RV * (prob_RV > drawn_prob_R1)
        outside_R = likelier_RV.sum(1) >= max(top_p, 1e-9)  # never the likeliest, even for top_p 0
        again_R = outside_R | (drawn_prob_R1[:, 0] == 0)  # rounding can end on a token without probability
        row_R, prob_RV = row_R[again_R], likelier_RV[again_R]
    return token_M


@torch.inference_mode()
def sample(model, token_BL, rule, generator, on_step=None):
    """Fill every MASK of token_BL [B, L] in rule.steps steps; what is not MASK stays. Returns the filled [B, L].

    Each step first chooses the positions to unmask, at random (ancestral) or where p(x0), unfiltered, is surest, each
    row its own number; logits are filtered and drawn from there and nowhere else. A step that unmasks nothing is
    skipped, so a row takes at most as many passes as it has masks. PAD at a row's end is not seen; MASK, PAD, BOS and
    UNK are never drawn. on_step(i, token_BL) is called after each step that unmasked something.

    In blocks the masks of one are filled, with a schedule and its share of the steps of its own, before those of the
    next: text has then all of its left side, as LLaDA's sampler has it (arXiv:2502.09992).
    """
    L = token_BL.shape[1]
    size = rule.block_length or L
    position_L, steps = torch.arange(L, device=token_BL.device), max(1, -(-rule.steps * size // L))
    for first in range(0, L, size):
        open_L = (first <= position_L) & (position_L < first + size)

        def shifted(i, token_BL, first=first):
            on_step(first // size * steps + i, token_BL)

        token_BL = fill(model, token_BL, open_L, rule, min(steps, rule.steps), generator, on_step and shifted)
    return token_BL


def fill(model, token_BL, open_L, rule, steps, generator, on_step):
    """`sample` of the positions where open_L."""
    device, see_BL = token_BL.device, token_BL != PAD
    ancestral, whole = rule.sampler == "ancestral", bool(open_L.all())
    # Tables of all steps, in float64: P(masked) before a step, which the model is told, and P(a mask stays) in it.
    schedule = "linear" if rule.schedule == "even" else rule.schedule
    time_N = 1 - torch.arange(steps + 1, dtype=torch.float64) / steps
    rate_N = diffusion.mask_rate(time_N, schedule).float().to(device)
    keep_N = diffusion.keep_prob(time_N[:-1], time_N[1:], schedule).float().to(device)
    # A confidence unmasks exactly so many tokens of each row in each step.
    if not ancestral:
        masks_B = ((token_BL == MASK) & open_L).sum(1).cpu().numpy()
        counts_NB = diffusion.step_counts(masks_B, steps, rule.schedule)
    for i in range(steps):
        masked_BL = (token_BL == MASK) & open_L
        # Choose positions first, with PAD in the place of tokens that are not drawn yet. Each mask goes on its own.
        if ancestral:
            u_BL = torch.rand(token_BL.shape, generator=generator, device=device)
            chosen_BL = masked_BL & (diffusion.ancestral_step(token_BL, PAD, u_BL, keep_N[i], MASK) != MASK)
            if not chosen_BL.any():
                continue
        elif not counts_NB[i].any():
            continue
        # the share of masks that the schedule gives, or with blocks to come what it is
        rate_B = rate_N[i].expand(len(token_BL)) if whole else (token_BL == MASK).sum(1) / see_BL.sum(1)
        hidden_BLD = model.hidden(token_BL, rate_B, see_BL)
        # Logits where ancestral sampling unmasks, or at all masks, to find the surest; never [B, L, V].
        logits_MV = model.logits(hidden_BLD[chosen_BL if ancestral else masked_BL])[:, : rule.vocab or None]
        logits_MV[:, list(BANNED)] = -math.inf
        # Keep the surest positions of each row, and their logits.
        if not ancestral:
            score_BL = torch.full(token_BL.shape, -math.inf, device=device)
            score_BL[masked_BL] = diffusion.confidence(diffusion.softmax(logits_MV), rule.sampler)
            count_B = torch.from_numpy(counts_NB[i]).to(device)
            chosen_BL = masked_BL & (diffusion.unmask_top(token_BL, PAD, score_BL, count_B, MASK) != MASK)
            logits_MV = logits_MV[chosen_BL[masked_BL]]
        # Temperature and top-k here, top-p while drawing.
        logits_MV = diffusion.filter_logits(logits_MV, rule.temperature, rule.top_k)
        drawn_M = draw(logits_MV, rule.top_p, generator) if rule.temperature > 0 else logits_MV.argmax(-1)
        token_BL = token_BL.masked_scatter(chosen_BL, drawn_M)
        if on_step:
            on_step(i, token_BL)
    return token_BL


# ---- files ---------------------------------------------------------------------------------------------------------


def save(model, folder, tokenizer_json=None):
    """Write config.json, model.safetensors (and tokenizer.json) into a folder; each file is whole or not there."""
    from safetensors.torch import save as to_bytes

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = json.dumps({"model_type": "mdlm", **dataclasses.asdict(model.cfg)}, indent=2) + "\n"
    tensors = {name: weight.detach().cpu().contiguous() for name, weight in model.state_dict().items()}
    files = {"config.json": config.encode(), "model.safetensors": to_bytes(tensors)}
    if tokenizer_json is not None:
        files["tokenizer.json"] = tokenizer_json
    # write under another name, to disk, then rename
    for name, data in files.items():
        temporary = folder / f"{name}.tmp"
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / name)


def torch_dtype(dtype):
    """The type of this name; "" is float32, on a GPU bfloat16, or float16 where bfloat16 would be emulated."""
    if not dtype and torch.cuda.is_available():
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return getattr(torch, dtype or "float32")


def load(folder, device="cpu", dtype=torch.float32):
    """MDLM of a folder that `save` wrote. Raises FileNotFoundError, or ValueError with one line on what is wrong."""
    from safetensors import SafetensorError, safe_open

    folder = Path(folder)
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).exists():
            raise FileNotFoundError(f"{folder} holds no {name}; train a model with: python train_gpu.py")
    try:
        config = (folder / "config.json").read_text()
        with safe_open(folder / "model.safetensors", "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        model = build(config, tensors)
    except (ValueError, TypeError, SafetensorError) as error:
        raise ValueError(f"{folder} cannot be read: {error}") from None
    return model.to(device, dtype).eval()


def build(config_json, tensors):
    """MDLM of the text of a config.json and of {name: tensor}. Raises ValueError that names what does not fit."""
    config = json.loads(config_json)
    if config.get("model_type") != "mdlm":
        raise ValueError(f"model_type {config.get('model_type')!r} is not mdlm")
    known = {f.name for f in dataclasses.fields(Config)}
    model = MDLM(Config(**{k: v for k, v in config.items() if k in known}))
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:  # it lists missing, unexpected and misshapen tensors over many lines
        raise ValueError(" ".join(str(error).split())) from None
    return model


def count_params(cfg):
    """Parameters by part: {"embed", "position", "time", "blocks", "norm", "head", "total"}."""
    with torch.device("meta"):  # shapes without memory
        model = MDLM(cfg)
    parts = dict.fromkeys(("embed", "position", "time", "blocks", "norm", "head"), 0)
    for name, weight in model.named_parameters():
        parts[name.split(".")[0]] += weight.numel()
    return parts | {"total": sum(parts.values())}
