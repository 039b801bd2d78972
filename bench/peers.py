"""Peers of beside.py in PyTorch, run by the Python of their own environment. Prints.

    python bench/peers.py gpt    # seconds of a training step of a plain GPT, compiled

It imports nothing of ours. The last line is a number, the median of several calls after those that
compile: seconds of a training step, or milliseconds a token.

Letters: B batch, L length, D width, H heads, J key/value heads, K head size.
"""

import json
import math
import statistics
import sys
import time

import torch
import torch._inductor.config
from torch import nn
from torch.nn import functional as F


def median_s(call, repeats, warmup):
    """Median seconds of a call, after some that are not timed."""
    seconds = []
    for _ in range(warmup + repeats):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[warmup:])


def sinusoid(x, width, base=10_000.0):
    """cos and sin of x f_k, f_k = base^(-2k / width)."""
    angle = x[:, None] * base ** (-torch.arange(width // 2) / (width // 2))
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """Rotary positions: the pairs (x_k, x_{k + K/2}) of each head, turned by their angles."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


# ---- a training step, as nanoGPT has it ---------------------------------------------------------


class Block(nn.Module):
    def __init__(self, D, H, causal):
        super().__init__()
        self.norm1 = nn.LayerNorm(D)
        self.norm2 = nn.LayerNorm(D)
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))
        self.heads = H
        self.causal = causal

    def forward(self, x, rotary, mask):
        B, L, D = x.shape
        qkv = self.qkv(self.norm1(x)).view(B, L, 3, self.heads, D // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if rotary:
            q = rotate(q, *rotary)
            k = rotate(k, *rotary)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).reshape(B, L, D))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A GPT with learned positions, or an MDLM: bidirectional, rotary, with the noise as input."""

    def __init__(self, vocab, D, layers, H, length, causal):
        super().__init__()
        self.embed = nn.Embedding(vocab, D)
        self.position = nn.Embedding(length, D) if causal else None
        self.time = nn.Sequential(nn.Linear(D, D), nn.SiLU(), nn.Linear(D, D))
        self.blocks = nn.ModuleList(Block(D, H, causal) for _ in range(layers))
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, vocab, bias=False)

    def forward(self, token, target, weight, noise=None, mask=None):
        """The mean of weight * cross-entropy."""
        D = self.embed.weight.shape[1]
        x = self.embed(token)
        rotary = None
        if self.position:
            x = x + self.position.weight
        else:
            x = x + self.time(torch.cat(sinusoid(1000 * noise, D), -1))[:, None]
            rotary = sinusoid(torch.arange(token.shape[1]), D // self.blocks[0].heads)
        for block in self.blocks:
            x = block(x, rotary, mask)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return (weight * F.cross_entropy(logits, target.flatten(), reduction="none")).mean()


def step_s(model, batch, accumulate, steps):
    """Median seconds of a step of torch.compile, AdamW and clipped gradients."""
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)

    def step():
        for _ in range(accumulate):
            (compiled(*batch()) / accumulate).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return median_s(step, steps, warmup=3)


def gpt(steps=10, rows=8, L=512):
    """A GPT of 1.38 M parameters."""
    model = Transformer(2048, 128, 4, 4, L, causal=True)
    del model.time
    data = torch.randint(2048, (1_000_000,))

    def batch():
        starts = torch.randint(len(data) - L - 1, (rows,)).tolist()
        token = torch.stack([data[i : i + L + 1] for i in starts])
        return token[:, :-1].contiguous(), token[:, 1:].contiguous(), 1.0

    return step_s(model, batch, 1, steps)


def mdlm(vocab, D=256, layers=4, rows=64, micro=16, L=256, steps=5):
    """The NELBO of an MDLM, by default of its tiny preset; all rows are full."""
    model = Transformer(vocab, D, layers, D // 64, L, causal=False)
    data = torch.randint(5, vocab, (10_000, L))

    def batch():
        token = data[torch.randint(len(data), (micro,))]
        noise = 0.1 + 0.9 * torch.rand(micro)
        masked = torch.rand(token.shape) < noise[:, None]
        weight = (masked / noise[:, None]).flatten()
        return torch.where(masked, 3, token), token, weight, noise

    return step_s(model, batch, rows // micro, steps)


# ---- decoding in gpt-fast's way: a static KV cache, and a compiled pass for one token -----------


class LlamaBlock(nn.Module):
    def __init__(self, D, H, J, K, ffn, slots):
        super().__init__()
        self.heads = [H, J, J]
        self.norm1 = nn.RMSNorm(D)
        self.norm2 = nn.RMSNorm(D)
        self.qkv = nn.Linear(D, (H + 2 * J) * K, bias=False)
        self.out = nn.Linear(D, D, bias=False)
        self.gate = nn.Linear(D, ffn, bias=False)
        self.up = nn.Linear(D, ffn, bias=False)
        self.down = nn.Linear(ffn, D, bias=False)
        self.register_buffer("cache", torch.zeros(2, 1, J, slots, K))

    def forward(self, x, position, rotary, mask):
        B, L, D = x.shape
        qkv = self.qkv(self.norm1(x)).view(B, L, sum(self.heads), -1).transpose(1, 2)
        q, k, v = qkv.split(self.heads, 1)
        keys, values = self.cache
        keys[:, :, position] = rotate(k, *rotary)
        values[:, :, position] = v
        q = rotate(q, *rotary)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, L, D))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """27.8 M parameters, the shapes of PythonCoder's preset small without its second head."""

    def __init__(self, slots, vocab=8192, D=512):
        super().__init__()
        self.embed = nn.Embedding(vocab, D)
        self.blocks = nn.ModuleList(LlamaBlock(D, 8, 4, 64, 1408, slots) for _ in range(8))
        self.norm = nn.RMSNorm(D)
        cos, sin = sinusoid(torch.arange(slots), 64, 500_000.0)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)
        self.register_buffer("see", torch.ones(slots, slots, dtype=torch.bool).tril())

    def forward(self, token, position):
        """The next token, drawn from the likeliest 200 at temperature 0.8."""
        x = self.embed(token)
        rotary = self.cos[position], self.sin[position]
        for block in self.blocks:
            x = block(x, position, rotary, self.see[position])
        logits = F.linear(self.norm(x[:, -1]), self.embed.weight) / 0.8
        least = logits.topk(200).values[:, -1:]
        p = torch.where(logits < least, -math.inf, logits).softmax(-1)
        return (p / torch.empty_like(p).exponential_(1)).argmax(-1, keepdim=True)


class Vector(nn.Linear):
    """For a single token a product of matrix and vector, which a CPU computes faster."""

    def forward(self, x):
        if x.numel() > self.in_features:
            return super().forward(x)
        return (self.weight @ x.flatten()).view(*x.shape[:-1], -1)


def decode(products="", new=128, prompt=16, slots=256):
    """Milliseconds a token, batch 1, float32; products may be "vector"."""
    torch._inductor.config.freezing = True  # packs the weights: a fifth faster here
    model = Llama(slots).eval()
    for module in model.modules():
        if products and isinstance(module, nn.Linear):
            module.__class__ = Vector
    prefill = torch.compile(model, fullgraph=True)
    next_token = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    ids = torch.randint(8192, (1, prompt))

    @torch.inference_mode()
    def generate():
        token = prefill(ids, torch.arange(prompt))
        for position in range(prompt, prompt + new - 1):
            token = next_token(token, torch.tensor([position]))

    return 1000 * median_s(generate, 3, warmup=2) / new


# ---- a small model from a package ---------------------------------------------------------------


def smol(folder, prompt, new=64):
    """Milliseconds a token of transformers' generate, argmax, float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt")
    how = {"min_new_tokens": new, "max_new_tokens": new, "do_sample": False}
    return 1000 * median_s(lambda: model.generate(**ids, **how), 3, warmup=1) / new


def to_qwen2(folder, gguf, out):
    """Save a Llama in GGUF as a Qwen2 whose biases are zero."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    llama = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=torch.float32)
    names = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
    names += " num_key_value_heads max_position_embeddings rms_norm_eps rope_parameters"
    same = {name: getattr(llama.config, name) for name in names.split()}
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    qwen2 = Qwen2ForCausalLM(Qwen2Config(**same, **ids, tie_word_embeddings=True)).float()
    weights = llama.state_dict()
    for name, value in qwen2.state_dict().items():
        if name.endswith("bias"):
            weights[name] = torch.zeros_like(value)
    qwen2.load_state_dict(weights)
    qwen2.generation_config.update(**ids, pad_token_id=2)
    qwen2.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder, gguf_file=gguf).save_pretrained(out)


CALLS = {"gpt": gpt, "mdlm": mdlm, "decode": decode, "smol": smol, "to_qwen2": to_qwen2}

if __name__ == "__main__":
    values = [int(value) if value.isdigit() else value for value in sys.argv[2:]]
    print(json.dumps(CALLS[sys.argv[1]](*values)))
