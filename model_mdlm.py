"""MDLM: a bidirectional transformer that predicts masked tokens, and its sampling. Reads the disk.

PyTorch, 4 to 60 million parameters. train_gpu.py trains it, inference_jetson.py samples from it on
any device. Needs diffusion.py beside it and Python 3.10 or newer. It has no loss: train_gpu.py has.

Letters: B batch, L length, D width, H heads, K head size, V vocabulary, N steps, M positions to
draw.

h = embed[token] + MLP(sinusoid(noise)); each block: h += W_o attn(LN h), then
h += W_2 gelu(W_1 LN h); logits = W_head LN h. Attention is bidirectional; only PAD is masked out.
Positions are rotary (RoPE, arXiv:2104.09864), or learned embeddings (rope=False).
Ref: MDLM, arXiv:2406.07524.
"""

import dataclasses
import hashlib
import json
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import diffusion

PAD, BOS, EOS, MASK, UNK = range(5)  # in every tokenizer that data_prep.py makes for padded rows
BANNED = (PAD, BOS, MASK, UNK)  # never sampled


@dataclasses.dataclass(frozen=True)
class Config:
    """The architecture: all that is needed to load a checkpoint."""

    vocab: int = 8192  # token ids, special tokens included
    width: int = 384
    layers: int = 6
    # width / heads is the head size; 64 in all presets, as the kernels of csrc/ need it
    heads: int = 6
    ffn: int = 1536
    positions: int = 256  # longest sequence
    rope: bool = False  # rotary positions; off: learned embeddings
    tie: bool = False  # share the embedding with the head
    dropout: float = 0.0  # on the output of each residual branch


CONFIGS = {
    "tiny": Config(width=256, layers=4, heads=4, ffn=1024),
    "small": Config(width=384, layers=6, heads=6, ffn=1536),
    "medium": Config(width=512, layers=8, heads=8, ffn=2048),
    "large": Config(width=640, layers=10, heads=10, ffn=2560),
}


def sinusoid(noise_B, width):
    """[sin(1000 n f), cos(1000 n f)] in float32 [B, width] of a noise level n in [0, 1]; f_k =
    10000^(-2k / width).
    """
    # float32 whatever the model's dtype: bfloat16 cannot tell noise 0.500 from 0.501
    k = torch.arange(width // 2, device=noise_B.device, dtype=torch.float32)
    angle_BD = 1000 * noise_B.float()[:, None] * torch.exp(-math.log(10_000) / (width // 2) * k)
    return torch.cat([angle_BD.sin(), angle_BD.cos()], -1)


def angles(length, head_size, device=None):
    """cos and sin [L, K/2] in float32 of p f_k: position p = 0 .. L-1, f_k = 10000^(-2k / K)."""
    k = torch.arange(head_size // 2, device=device, dtype=torch.float32)
    angle_LK = torch.arange(length, device=device)[:, None] * torch.exp(
        -math.log(10_000) / (head_size // 2) * k
    )
    return angle_LK.cos(), angle_LK.sin()


def rotate(x_BHLK, cos_LK, sin_LK):
    """RoPE: rotates the pairs (x_k, x_{k + K/2}) of each head by the angle of their position; in
    float32.
    """
    a, b = x_BHLK.float().chunk(2, -1)
    return torch.cat([a * cos_LK - b * sin_LK, b * cos_LK + a * sin_LK], -1).to(x_BHLK.dtype)


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        D = cfg.width
        self.norm1 = nn.LayerNorm(D)
        self.norm2 = nn.LayerNorm(D)
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)
        self.fc1 = nn.Linear(D, cfg.ffn)
        self.fc2 = nn.Linear(cfg.ffn, D)
        self.heads = cfg.heads
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, h_BLD, see_B11L, cos_sin=None):
        B, L, D = h_BLD.shape
        # Bidirectional attention: only PAD is masked out. -1, as D // heads would be traced.
        qkv = self.qkv(self.norm1(h_BLD)).view(B, L, 3, self.heads, -1)
        q_BHLK, k_BHLK, v_BHLK = qkv.permute(2, 0, 3, 1, 4)
        if cos_sin:
            q_BHLK = rotate(q_BHLK, *cos_sin)
            k_BHLK = rotate(k_BHLK, *cos_sin)
        o_BHLK = F.scaled_dot_product_attention(q_BHLK, k_BHLK, v_BHLK, attn_mask=see_B11L)
        h_BLD = h_BLD + self.dropout(self.out(o_BHLK.transpose(1, 2).reshape(B, L, D)))
        return h_BLD + self.dropout(self.fc2(F.gelu(self.fc1(self.norm2(h_BLD)))))


class MDLM(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        D = cfg.width
        self.cfg = cfg
        self.embed = nn.Embedding(cfg.vocab, D)
        if not cfg.rope:
            self.position = nn.Embedding(cfg.positions, D)
        self.time = nn.Sequential(nn.Linear(D, D), nn.SiLU(), nn.Linear(D, D))  # of the noise level
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.layers))
        self.norm = nn.LayerNorm(D)
        if not cfg.tie:
            self.head = nn.Linear(D, cfg.vocab, bias=False)
        self.init()

    @torch.no_grad()
    def init(self):
        """Embeddings of standard deviation 1, matrices scaled by fan-in, and a time embedding of
        zero.

        Learned positions start as sinusoids. With GPT-2's 0.02 for all weights, the time embedding
        and the first MLP drown tokens and positions, and the loss stays at the unigram entropy for
        much longer (bench/LOG.md).
        """
        size = self.cfg.width**-0.5 if self.cfg.tie else 1.0  # a tied embedding is also the head
        for name, weight in self.named_parameters():
            if name == "embed.weight":
                nn.init.normal_(weight, 0, size)
            elif name == "position.weight":
                # the sinusoid of position p is that of noise level p / 1000; sqrt(2) gives it a
                # mean square of 1
                weight.copy_(
                    size
                    * math.sqrt(2)
                    * sinusoid(torch.arange(len(weight)) / 1000, weight.shape[1])
                )
            elif name.endswith("bias") or name == "time.2.weight":
                nn.init.zeros_(weight)
            elif weight.ndim > 1:
                # the 2 x layers outputs that are added to the residual stream are scaled down, as
                # in GPT-2
                residual = name.endswith(("out.weight", "fc2.weight"))
                std = weight.shape[1] ** -0.5 / (math.sqrt(2 * self.cfg.layers) if residual else 1)
                nn.init.normal_(weight, 0, std)

    def time_embedding(self, noise_B):
        """[B, 1, D] for noise levels in [0, 1]; added at every position."""
        weight = self.time[0].weight
        return self.time(sinusoid(noise_B, self.cfg.width).to(weight.dtype))[:, None]

    def hidden(self, token_BL, noise_B, see_BL=None):
        """Hidden states [B, L, D] after the last norm.

        noise_B is P(masked), whatever the schedule. see_BL is the attention mask: False at keys
        that nobody attends to; None attends to all. Raises ValueError for a row longer than the
        positions.
        """
        L = token_BL.shape[1]
        if L > self.cfg.positions:
            raise ValueError(f"{L} tokens do not fit the model's {self.cfg.positions} positions")
        h_BLD = self.embed(token_BL)
        cos_sin = None
        if self.cfg.rope:
            cos_sin = angles(L, self.cfg.width // self.cfg.heads, token_BL.device)
        else:
            h_BLD = h_BLD + self.position.weight[:L]
        h_BLD = h_BLD + self.time_embedding(noise_B)
        see_B11L = None
        if see_BL is not None:
            see_B11L = see_BL[:, None, None]  # the same for all heads and queries
        for block in self.blocks:
            h_BLD = block(h_BLD, see_B11L, cos_sin)
        return self.norm(h_BLD)

    def logits(self, hidden):
        """Logits [..., V] of hidden states [..., D], in their dtype."""
        return F.linear(hidden, self.embed.weight if self.cfg.tie else self.head.weight)

    def forward(self, token_BL, noise_B, see_BL=None):
        return self.logits(self.hidden(token_BL, noise_B, see_BL))


# ---- sampling ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sampling:
    # unmask at random; max_prob, margin, entropy: by highest confidence (diffusion.py)
    sampler: str = "ancestral"
    steps: int = 64  # forward passes at most
    # of the steps, see diffusion.py, or "even"; need not be that of training
    schedule: str = "cosine_sq"
    temperature: float = 1.0  # 0 takes the argmax
    top_k: int = 0  # sample from the k likeliest tokens; 0: from all
    top_p: float = 0.95  # sample from the smallest set of tokens with this probability
    vocab: int = 0  # never draw ids from here on, as they have no token; 0: all have one


def step_tables(steps, schedule):
    """P(masked) before each step, an input of the model, and P(a mask stays) in it: both float32
    [N].

    "even" fixes the number of tokens, not the noise: the model gets the rates of the linear
    schedule.
    """
    schedule = "linear" if schedule == "even" else schedule
    # times from 1 to 0 in equal steps, in float64; the last step keeps no mask
    time_N = 1 - torch.arange(steps + 1, dtype=torch.float64) / steps
    before_N, after_N = time_N[:-1], time_N[1:]
    return diffusion.mask_rate(before_N, schedule).float(), diffusion.keep_prob(
        before_N, after_N, schedule
    ).float()


def draw(logits_MV, top_p, generator):
    """Tokens [M] drawn from the top-p set: the likeliest ids whose probabilities first sum to
    top_p.

    By rejection, as sorting the vocabulary takes a CPU ten times as long. Draw from all ids. Where
    the likelier ids already sum to top_p, the drawn one lies outside the set: keep only the
    likelier ids and draw again. Gives the distribution of diffusion.filter_logits, but ids of equal
    probability are in the set together.
    """
    prob_RV = diffusion.softmax(logits_MV)
    M, V = prob_RV.shape
    token_M = torch.zeros(M, dtype=torch.long, device=prob_RV.device)
    row_R = torch.arange(M, device=prob_RV.device)  # rows that still need a token: R of the M
    while len(row_R):
        # draw by inverse transform: the first id whose cumulative probability exceeds a uniform
        # number
        total_RV = prob_RV.cumsum(-1)
        u_R1 = torch.rand(len(row_R), 1, generator=generator, device=prob_RV.device)
        drawn_R1 = torch.searchsorted(total_RV, u_R1 * total_RV[:, -1:], right=True).clamp(
            max=V - 1
        )
        token_M[row_R] = drawn_R1[:, 0]
        # reject what lies outside the top-p set; the argmax never does, even at top_p 0
        drawn_prob_R1 = prob_RV.gather(1, drawn_R1)
        likelier_RV = prob_RV.masked_fill(prob_RV <= drawn_prob_R1, 0)
        rejected_R = likelier_RV.sum(1) >= max(top_p, 1e-9)
        # by rounding, a draw can end on an id of probability 0
        rejected_R |= drawn_prob_R1[:, 0] == 0
        row_R, prob_RV = row_R[rejected_R], likelier_RV[rejected_R]
    return token_M


@torch.inference_mode()
def sample(model, token_BL, rule, generator, on_step=None):
    """Fill every MASK of token_BL [B, L] in rule.steps steps; all other tokens stay. Returns the
    filled [B, L].

    A step first chooses the positions to unmask: at random (ancestral), or those of highest
    confidence by the raw distribution, a number per row. Then it samples their tokens from the
    filtered distribution. A step that unmasks nothing costs no forward pass, so a row takes at most
    as many passes as it has masks. PAD is masked out of attention. MASK, PAD, BOS and UNK are never
    drawn. on_step(i, token_BL) follows each step that unmasked a token.
    """
    device, see_BL, ancestral = token_BL.device, token_BL != PAD, rule.sampler == "ancestral"
    rate_N, keep_N = (table_N.to(device) for table_N in step_tables(rule.steps, rule.schedule))
    # By confidence, the number of tokens to unmask in each step is fixed for each row.
    if not ancestral:
        counts_NB = diffusion.step_counts(
            (token_BL == MASK).sum(1).cpu().numpy(), rule.steps, rule.schedule
        )
    for i in range(rule.steps):
        masked_BL = token_BL == MASK
        # Choose positions first; PAD stands for the tokens that are drawn later.
        if ancestral:
            u_BL = torch.rand(token_BL.shape, generator=generator, device=device)
            chosen_BL = masked_BL & (
                diffusion.ancestral_step(token_BL, PAD, u_BL, keep_N[i], MASK) != MASK
            )
            if not chosen_BL.any():
                continue
        elif not counts_NB[i].any():
            continue
        hidden_BLD = model.hidden(token_BL, rate_N[i].expand(len(token_BL)), see_BL)
        # Logits of the chosen positions, or for confidences of all masks; never [B, L, V].
        logits_MV = model.logits(hidden_BLD[chosen_BL if ancestral else masked_BL])[
            :, : rule.vocab or None
        ]
        logits_MV[:, list(BANNED)] = -math.inf
        if not ancestral:
            # Choose each row's positions of highest confidence, and keep their logits.
            score_BL = torch.full(token_BL.shape, -math.inf, device=device)
            score_BL[masked_BL] = diffusion.confidence(diffusion.softmax(logits_MV), rule.sampler)
            count_B = torch.from_numpy(counts_NB[i]).to(device)
            chosen_BL = diffusion.surest(score_BL, masked_BL, count_B)
            logits_MV = logits_MV[chosen_BL[masked_BL]]
        # Temperature and top-k here, top-p while drawing.
        logits_MV = diffusion.filter_logits(logits_MV, rule.temperature, rule.top_k)
        drawn_M = (
            draw(logits_MV, rule.top_p, generator) if rule.temperature > 0 else logits_MV.argmax(-1)
        )
        token_BL = token_BL.masked_scatter(chosen_BL, drawn_M)
        if on_step:
            on_step(i, token_BL)
    return token_BL


# ---- files ---------------------------------------------------------------------------------------


def save(model, folder, tokenizer_json, tensors=None):
    """Write model.safetensors (the model's, or `tensors`), config.json with its SHA-256, and
    tokenizer.json.
    """
    import safetensors.torch  # not on a Jetson

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = tensors or {
        name: weight.detach().cpu().contiguous() for name, weight in model.state_dict().items()
    }
    weights = safetensors.torch.save(tensors)
    config = {
        "model_type": "mdlm",
        **dataclasses.asdict(model.cfg),
        "sha256": hashlib.sha256(weights).hexdigest(),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "tokenizer.json").write_bytes(tokenizer_json)


DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I8": torch.int8}


def read_safetensors(data):
    """{name: tensor} of a safetensors file's bytes, without the package: an 8-byte length, JSON,
    then the numbers.

    int8 matrices are dequantised: row i of NAME times NAME.scale[i].
    """
    start = 8 + int.from_bytes(data[:8], "little")
    entries, tensors = json.loads(data[8:start]), {}
    entries.pop("__metadata__", None)
    numbers = bytearray(data[start:])
    for name, entry in entries.items():
        # frombuffer raises ValueError where the file is too short
        begin, end = entry["data_offsets"]
        # aligns it
        flat = torch.frombuffer(numbers, dtype=torch.uint8, count=end - begin, offset=begin).clone()
        tensors[name] = flat.view(DTYPES[entry["dtype"]]).view(entry["shape"])
    for name in [name for name, tensor in tensors.items() if tensor.dtype == torch.int8]:
        tensors[name] = tensors[name] * tensors.pop(f"{name}.scale")
    return tensors


def load(folder, device="cpu", dtype=torch.float32):
    """The MDLM of a folder that `save` wrote. Raises FileNotFoundError, or ValueError if the files
    do not fit.
    """
    folder = Path(folder)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        if not (folder / name).exists():
            raise FileNotFoundError(
                f"{folder} holds no MDLM: it has no {name}; train_gpu.py trains one"
            )
    try:
        model = build(
            (folder / "config.json").read_text(), (folder / "model.safetensors").read_bytes()
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{folder} cannot be read: {error}") from None
    return model.to(device, dtype).eval()


def build(config_json, weights):
    """The MDLM of the bytes of config.json and model.safetensors. Raises ValueError that names what
    does not fit.
    """
    config, digest = json.loads(config_json), hashlib.sha256(weights).hexdigest()
    if config.get("model_type") != "mdlm":
        raise ValueError(f"model_type {config.get('model_type')!r} is not mdlm")
    if config.get("sha256", digest) != digest:  # weights from elsewhere have none
        raise ValueError("model.safetensors is damaged: its SHA-256 is not that in config.json")
    cfg = Config(**{k: v for k, v in config.items() if k in Config.__dataclass_fields__})
    tensors = read_safetensors(weights)
    if cfg.heads < 1 or cfg.width % cfg.heads:
        raise ValueError(f"{cfg.heads} heads do not divide its width, {cfg.width}")
    if bad := [name for name, x in tensors.items() if not x.isfinite().all()]:
        raise ValueError(f"{len(bad)} tensors hold NaN or infinity: {', '.join(bad[:3])}")
    try:
        model = MDLM(cfg)
        model.load_state_dict(tensors)
    except RuntimeError as error:  # it lists all tensors that are missing, unexpected or misshapen
        wrong = [f"{line.strip():.200}" for line in str(error).splitlines()]
        raise ValueError(f"{len(wrong) - 1} problems: {' '.join(wrong[1:4])}") from None
    return model


def count_params(cfg):
    """Number of parameters: {"embed", "position", "time", "blocks", "norm", "head", "total"}."""
    with torch.device("meta"):  # shapes without memory
        model = MDLM(cfg)
    counts = dict.fromkeys(("embed", "position", "time", "blocks", "norm", "head"), 0)
    for name, weight in model.named_parameters():
        counts[name.split(".")[0]] += weight.numel()
    return counts | {"total": sum(counts.values())}


if __name__ == "__main__":
    for name, cfg in CONFIGS.items():
        print(f"{name}: {count_params(cfg)['total']:,} parameters")
    model = MDLM(CONFIGS["tiny"]).eval()
    canvas_BL = torch.full((1, 16), MASK)
    filled_BL = sample(model, canvas_BL, Sampling(steps=8), torch.Generator())
    assert not torch.isin(filled_BL, torch.tensor(BANNED)).any()
    print(
        "tiny fills 16 masks with tokens; more checks: python -m pytest -q tests/test_model_mdlm.py"
    )
