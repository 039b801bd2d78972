"""The kernels of this folder as PyTorch operators; `python setup_kernels.py build_ext --inplace`
builds them.

torch.ops.unmask.attention, add_norm, bias_gelu and sample_ run the kernels on CUDA tensors and
plain PyTorch on CPU tensors, and have fake implementations, so CUDA graphs, torch.compile and
torch.export see ordinary operators. No gradients. `Kernels(module)` is the same four functions over
a built module, checked arguments in, pointers out; tests give it the host emulation. Needs PyTorch
2.4 or newer, nothing else.

Letters: B batch, L length, H heads, K = 64 head size, R rows (B L), D width, F feed-forward width,
V vocabulary.
"""

import hashlib
import importlib
import math
import struct
from pathlib import Path

import torch
from torch.nn import functional as F

if not hasattr(torch.library, "custom_op"):
    raise ImportError(
        f"PyTorch 2.4 or newer is needed for csrc/ops.py, this is {torch.__version__}"
    )

HEAD = 64
MAX_LENGTH, MAX_WIDTH = 1024, 1024
COLDEST = 1e-30  # as in diffusion.py: added to a temperature, so that logits / it do not overflow
BUILD = "python setup_kernels.py build_ext --inplace"


def source_digest():
    """As in setup_kernels.py: what a build must be of."""
    digest = hashlib.sha256()
    for path in sorted(
        p for p in Path(__file__).parent.iterdir() if p.suffix in (".cu", ".cuh", ".cpp", ".h")
    ):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def load(name="_kernels"):
    """The built module csrc.<name>. Raises RuntimeError: it is not built, half built, or of other
    sources.
    """
    built = list(Path(__file__).parent.glob(f"{name}.*so"))
    if not built:
        nvcc = "" if name == "_kernels_emu" else " where nvcc is found"
        raise RuntimeError(f"csrc/{name} is not built; build it{nvcc} with: {BUILD}")
    # an ELF file ends with its section table: offset at byte 40, entry size and count at 58
    header = built[0].read_bytes()[:64].ljust(64, b"\0")
    tables = struct.unpack_from("<Q", header, 40)[0] + math.prod(
        struct.unpack_from("<2H", header, 58)
    )
    # importing half a file ends in SIGBUS
    if header[:4] != b"\x7fELF" or built[0].stat().st_size < tables:
        raise RuntimeError(f"csrc/{built[0].name} is half built; build it again: {BUILD}")
    try:
        module = importlib.import_module(f"{__package__}.{name}")
        source = module.source
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"csrc/{built[0].name} cannot be loaded ({error}); build it again: {BUILD}"
        ) from None
    if source != source_digest():
        raise RuntimeError(
            f"csrc/{name} was built from other sources than those beside it; build again: {BUILD}"
        )
    return module


def why_not(device):
    """The reason why the kernels cannot run on this device, with the command that helps, or an
    empty string.
    """
    if device.type != "cuda":
        return "the kernels need a CUDA device"
    try:
        module = load()
    except RuntimeError as error:
        return str(error)
    arch = "".join(map(str, torch.cuda.get_device_capability(device)))
    if arch in module.arch.split(";"):
        return ""
    built, here = (
        module.arch.replace(";", ", sm_"),
        f"sm_{arch} ({torch.cuda.get_device_name(device)})",
    )
    return f'csrc/_kernels was built for sm_{built}, this GPU is {here}; build again: KERNEL_ARCH="{arch}" {BUILD}'


def need(condition, message):
    if not condition:
        raise ValueError(message)


class Kernels:
    """The four functions over a module that setup_kernels.py built. A call returns before the GPU
    is done.

    Tensors are float16 and contiguous unless said otherwise, on one device; a ValueError says what
    is not.
    """

    def __init__(self, module, device="cuda"):
        self.module, self.device = module, device

    def check(self, **tensors):
        for name, (tensor, dtype, shape) in tensors.items():
            need(
                tensor.device.type == self.device,
                f"{name} is on {tensor.device}, the kernels run on {self.device}",
            )
            need(tensor.dtype == dtype, f"{name} is {tensor.dtype}, the kernel takes {dtype}")
            need(
                shape is None or tuple(tensor.shape) == tuple(shape),
                f"{name} is {tuple(tensor.shape)}, not {shape}",
            )
            need(tensor.is_contiguous(), f"{name} is not contiguous")
            need(tensor.data_ptr() % 16 == 0, f"{name} does not begin at a multiple of 16 bytes")

    def stream(self):
        return torch.cuda.current_stream().cuda_stream if self.device == "cuda" else 0

    def attention(self, qkv_BL3HK, see_BL=None, cos_sin_LK=None, warps=0, lse=False):
        """softmax(q k^T / 8) v as [B, L, H K] from the packed projection; see_BL bool is False
        where nobody looks.

        cos_sin_LK float32, the two tables of model_mdlm.angles side by side, turns q and k by their
        positions (RoPE). lse=True returns (out, log-sum-exp float32 [B, H, L]).
        """
        fits = qkv_BL3HK.ndim == 5 and qkv_BL3HK.shape[2] == 3 and qkv_BL3HK.shape[4] == HEAD
        need(fits, f"qkv is {tuple(qkv_BL3HK.shape)}, the kernel takes [B, L, 3, H, {HEAD}]")
        self.check(qkv=(qkv_BL3HK, torch.float16, None))
        out_BLHK, lse_BHL = self.attention_strided(
            *qkv_BL3HK.unbind(2), see_BL, warps, lse, cos_sin_LK
        )
        return (out_BLHK.flatten(2), lse_BHL) if lse else out_BLHK.flatten(2)

    def attention_strided(
        self, q_BLHK, k_BLHK, v_BLHK, see_BL=None, warps=0, lse=True, cos_sin_LK=None
    ):
        """(out [B, L, H, K], lse [B, H, L] or None) of three tensors of equal strides, the last one
        1.

        A block is 1, 2 or 4 warps of 16 query rows, which share the copying and turning of keys; 0:
        as many as L fills.
        """
        B, L, H, K = q_BLHK.shape
        need(1 <= L <= MAX_LENGTH, f"length {L} is not in 1 .. {MAX_LENGTH}")
        # loads are of 16 bytes, and one set of strides serves all three
        for name, x in (("q", q_BLHK), ("k", k_BLHK), ("v", v_BLHK)):
            same = x.shape == q_BLHK.shape and x.stride() == q_BLHK.stride()
            need(same, f"{name} has not the shape and strides of q")
            need(
                x.dtype == torch.float16 and x.device.type == self.device,
                f"{name} is {x.dtype} on {x.device}",
            )
            fit = (
                x.stride(3) == 1
                and all(stride % 8 == 0 for stride in x.stride()[:3])
                and x.data_ptr() % 16 == 0
            )
            need(
                K == HEAD and fit,
                f"{name} must have rows of {HEAD} halves that begin at multiples of 16 bytes",
            )
        if see_BL is not None:
            self.check(see=(see_BL, torch.bool, (B, L)))
        if cos_sin_LK is not None:
            self.check(cos_sin=(cos_sin_LK, torch.float32, (L, K)))
        out_BLHK = q_BLHK.new_empty(B, L, H, K)
        lse_BHL = q_BLHK.new_empty(B, H, L, dtype=torch.float32) if lse else None
        strides = (*q_BLHK.stride()[:3], *out_BLHK.stride()[:3])
        pointers = (
            pointer(x) for x in (q_BLHK, k_BLHK, v_BLHK, see_BL, cos_sin_LK, out_BLHK, lse_BHL)
        )
        warps = warps or (1 if L <= 16 else 2 if L <= 32 else 4)
        self.module.attention(*pointers, B, L, H, *strides, K**-0.5, warps, self.stream())
        return out_BLHK, lse_BHL

    def add_norm(self, x, residual, gamma_D, beta_D, eps):
        """(x + residual, LayerNorm of it) of [..., D], D a multiple of 8."""
        D = x.shape[-1]
        need(D % 8 == 0 and D <= MAX_WIDTH, f"width {D} is not a multiple of 8 up to {MAX_WIDTH}")
        self.check(
            x=(x, torch.float16, None),
            gamma=(gamma_D, torch.float16, (D,)),
            beta=(beta_D, torch.float16, (D,)),
        )
        self.check(residual=(residual, torch.float16, x.shape))
        sum_, norm = torch.empty_like(x), torch.empty_like(x)
        given = (pointer(t) for t in (x, residual, gamma_D, beta_D, sum_, norm))
        self.module.add_norm(*given, x.numel() // D, D, eps, self.stream())
        return sum_, norm

    def bias_gelu(self, y, bias_F, tanh=False):
        """gelu(y + bias) of [..., F], with erf, or in the form with tanh. F a multiple of 8."""
        width = y.shape[-1]
        need(width % 8 == 0, f"width {width} is not a multiple of 8")
        self.check(y=(y, torch.float16, None), bias=(bias_F, torch.float16, (width,)))
        out = torch.empty_like(y)
        given = (pointer(t) for t in (y, bias_F, out))
        self.module.bias_gelu(*given, y.numel() // width, width, tanh, self.stream())
        return out

    def sample_(
        self,
        logits_RV,
        token_BL,
        state_2,
        keep_N,
        ban,
        mask,
        vocab,
        temperature,
        top_k,
        top_p,
        noise=(),
    ):
        """Fill masked tokens in place: one ancestral step at state = (seed, step); see sampler.cu
        for the formula.

        logits float16 or float32; token and state int64, keep float32, ban int32. ids from `vocab`
        on are never drawn.
        noise: (u_RV, u_R), float32 uniforms in (0, 1) to use instead of Philox.
        """
        R, V = logits_RV.shape
        half = logits_RV.dtype == torch.float16
        most = 16384 if half else 8192
        need(
            1 <= vocab <= min(V, most),
            f"{vocab} ids are not in 1 .. {min(V, most)}: a row is held in shared memory",
        )
        need(token_BL.numel() == R, f"{R} rows of logits for {token_BL.numel()} tokens")
        need(
            temperature >= 0 and top_k >= 0,
            f"temperature {temperature} and top_k {top_k} must not be negative",
        )
        if temperature > 0:
            temperature += COLDEST
        self.check(
            logits=(logits_RV, torch.float16 if half else torch.float32, None), token=(token_BL, torch.int64, None),
            state=(state_2, torch.int64, (2,)), keep=(keep_N, torch.float32, None), ban=(ban, torch.int32, None),
        )  # fmt: skip
        if noise:
            self.check(u=(noise[0], torch.float32, (R, V)), u_keep=(noise[1], torch.float32, (R,)))
        given = (pointer(t) for t in (token_BL, state_2, keep_N, ban, *(noise or (None, None))))
        self.module.sample(
            logits_RV.data_ptr(),
            half,
            *given,
            R,
            vocab,
            V,
            len(ban),
            top_k,
            mask,
            temperature,
            top_p,
            self.stream(),
        )


def pointer(tensor):
    return 0 if tensor is None else tensor.data_ptr()


# ---- the same in plain PyTorch, for CPU tensors --------------------------------------------------------------------


def rotate_torch(x_BHLK, cos_sin_LK):
    """RoPE, as in model_mdlm.py: turns the pairs (x_k, x_{k + K/2}) of position l by the angle of
    cos_sin_LK[l].
    """
    (a, b), (cos_LK, sin_LK) = (x.chunk(2, -1) for x in (x_BHLK.to(cos_sin_LK.dtype), cos_sin_LK))
    return torch.cat([a * cos_LK - b * sin_LK, b * cos_LK + a * sin_LK], -1).to(x_BHLK.dtype)


def attention_torch(qkv_BL3HK, see_BL=None, cos_sin_LK=None):
    q_BHLK, k_BHLK, v_BHLK = qkv_BL3HK.permute(2, 0, 3, 1, 4)
    if cos_sin_LK is not None:
        q_BHLK, k_BHLK = rotate_torch(q_BHLK, cos_sin_LK), rotate_torch(k_BHLK, cos_sin_LK)
    see_B11L = None if see_BL is None else see_BL[:, None, None]
    return (
        F.scaled_dot_product_attention(q_BHLK, k_BHLK, v_BHLK, attn_mask=see_B11L)
        .transpose(1, 2)
        .flatten(2)
    )


def add_norm_torch(x, residual, gamma_D, beta_D, eps):
    sum_ = x + residual
    return sum_, F.layer_norm(sum_, gamma_D.shape, gamma_D, beta_D, eps)


def bias_gelu_torch(y, bias_F, tanh=False):
    return F.gelu(y + bias_F, approximate="tanh" if tanh else "none")


def philox_torch(counter, seed):
    """Philox4x32-10: four uint32 words as int64 [..., 4], of four counter words that broadcast, and
    a 64-bit seed.
    """
    low = 0xFFFFFFFF  # keeps 32 bits: torch computes in int64, whose shift copies the sign
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = seed & low, (seed >> 32) & low
    for _ in range(10):
        # the low 64 bits of the products, which is all of them
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = ((b >> 32) & low) ^ c1 ^ k0, b & low, ((a >> 32) & low) ^ c3 ^ k1, a & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return torch.stack([c0, c1, c2, c3], -1)


def uniform_torch(word):
    """The middle of the word's interval, in (0, 1)."""
    return ((word.float() + 0.5) * 2**-32).clamp(max=1 - 2**-24)


def sample_torch_(
    logits_RV, token_BL, state_2, keep_N, ban, mask, vocab, temperature, top_k, top_p
):
    """The sampler, with the kernel's random numbers; near-ties may fall otherwise: logarithms
    differ in a last bit.
    """
    token_R, (seed, step) = token_BL.view(-1), state_2.unbind()
    row_R, zero = torch.arange(len(token_R), device=token_R.device), torch.zeros_like(seed)
    # the rows that this step fills; M of the R
    u_R = uniform_torch(philox_torch((zero, row_R, step, zero + 1), seed)[:, 0])
    chosen_M = row_R[(token_R == mask) & (u_R >= keep_N[step])]
    # logits without banned ids and what top-k leaves out
    logits_MV = logits_RV[chosen_M, :vocab].float()
    logits_MV[:, ban[ban < vocab].long()] = -math.inf
    if 0 < top_k < vocab:
        logits_MV[logits_MV < logits_MV.topk(top_k).values[:, -1:]] = -math.inf
    race_MV = logits_MV
    if temperature > 0:
        # Gumbel noise, the negative logarithm of an exponential: the arg-max is a draw from the
        # softmax
        logits_MV = logits_MV / (temperature + COLDEST)
        # a call of Philox serves four ids
        four_N = torch.arange(-(-vocab // 4), device=token_R.device)
        word_MV = philox_torch((four_N, chosen_M[:, None], step, zero), seed).flatten(1)[:, :vocab]
        race_MV = logits_MV - (-torch.log1p(-uniform_torch(word_MV))).log()
        if top_p < 1:
            prob_MV, order_MV = logits_MV.softmax(-1).sort(-1, descending=True)
            outside_MV = prob_MV.cumsum(-1) - prob_MV >= max(top_p, 1e-9)
            # equals are in together
            last_M1 = prob_MV.masked_fill(outside_MV, math.inf).amin(-1, keepdim=True)
            outside_MV = torch.zeros_like(outside_MV).scatter_(-1, order_MV, prob_MV < last_M1)
            race_MV = race_MV.masked_fill(outside_MV, -math.inf)
    # a row without any finite logit keeps its mask
    best_M, id_M = race_MV.nan_to_num(-math.inf, posinf=math.inf, neginf=-math.inf).max(-1)
    token_R[chosen_M] = torch.where(best_M > -math.inf, id_M, mask)


# ---- operators -----------------------------------------------------------------------------------------------------

ON_GPU = {}  # device -> its Kernels, made at the first call there


def on_gpu(name):
    """The operator's CUDA implementation; the module is loaded and checked at the first call on a
    device.
    """

    def call(*arguments):
        device = arguments[0].device
        if device not in ON_GPU:
            if reason := why_not(device):
                raise RuntimeError(reason)
            ON_GPU[device] = Kernels(load())
        # a kernel starts on the current device, which need not be the tensors'
        with torch.cuda.device(device):
            return getattr(ON_GPU[device], name)(*arguments)

    return call


def register(name, schema, on_cpu, fake, mutates=()):
    operator = torch.library.custom_op(
        f"unmask::{name}", on_gpu(name), mutates_args=mutates, device_types="cuda", schema=schema
    )
    operator.register_kernel("cpu", on_cpu)
    operator.register_fake(fake)


register(
    "attention", "(Tensor qkv, Tensor? see=None, Tensor? cos_sin=None) -> Tensor", attention_torch,
    lambda qkv, see=None, cos_sin=None: qkv.new_empty(*qkv.shape[:2], qkv.shape[3] * qkv.shape[4]),
)  # fmt: skip
register(
    "bias_gelu", "(Tensor y, Tensor bias, bool tanh=False) -> Tensor", bias_gelu_torch,
    lambda y, bias, tanh=False: torch.empty_like(y),
)  # fmt: skip
register(
    "add_norm", "(Tensor x, Tensor residual, Tensor gamma, Tensor beta, float eps) -> (Tensor, Tensor)",
    add_norm_torch, lambda x, residual, gamma, beta, eps: (torch.empty_like(x), torch.empty_like(x)),
)  # fmt: skip
register(
    "sample_",
    "(Tensor logits, Tensor(a!) token, Tensor state, Tensor keep, Tensor ban, int mask, int vocab, float temperature, "
    "int top_k, float top_p) -> ()",
    sample_torch_, lambda *arguments: None, mutates=("token",),
)  # fmt: skip
