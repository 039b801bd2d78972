"""Generate text with MDLM, on a CPU, a CUDA GPU or a Jetson.

    python inference_jetson.py --prompt="Once upon a time" --show_steps         # weights/mdlm, if nothing was exported
    python inference_jetson.py                                                  # an interactive prompt
    python inference_jetson.py --prompt="One day, [MASK:30] They were happy."   # fill in the middle
    python inference_jetson.py --bundle=out/stories --prompt="Once"             # the newest checkpoint of a run
    python inference_jetson.py --prompt="Once" --max_new=1000                   # longer than a canvas: in blocks
    echo '{"prompt": "Once", "max_new": 32, "seed": 1}' | python inference_jetson.py --serve    # JSON lines in and out

Reads a bundle of export_jetson.py, a run folder of train_gpu.py, or one of its step_<n>/. Needs
Python 3.10, torch 2.4 or newer, tokenizers and numpy, and beside it model_mdlm.py, diffusion.py and
csrc/.

On a GPU all steps of a text (model, sampling, update) are captured as one CUDA graph, which later
texts replay by a single launch. More than 64 steps, or steps that are shown, are replayed one by
one. What differs between steps lies in tables on the device, and the host synchronises once per
text. `python setup_kernels.py build_ext --inplace` builds the
kernels: --backend=auto uses all of them, the other backends the sampler alone. Without them a step
is plain PyTorch, captured as well. On a CPU the loop is that of model_mdlm.py, in float32.

Timing: python bench/bench_jetson.py --bundle=out/jetson, after sudo nvpmodel -m 0 (15 W, as
predicted; of an Orin Nano 1 is 25 W, 2 MAXN_SUPER) and sudo jetson_clocks. Builds of torch for a
Jetson: requirements-jetson.txt.

Letters: B batch, L length, P positions, D width, H heads, K head size, R rows (B L), V vocabulary,
N steps.
"""

import argparse
import dataclasses
import hashlib
import io
import itertools
import json
import re
import signal
import sys
import time
import types
from pathlib import Path

import numpy as np
import tokenizers
import torch
from torch.nn import functional as F

import diffusion
import model_mdlm as mdlm
from csrc import ops

FORMAT = 1  # of the bundles that this script reads
# a checkpoint that comes with the scripts
SHIPPED = Path(__file__).resolve().parent / "weights/mdlm"
BACKENDS = ("auto", "kernels", "torch", "torchscript", "onnx", "tensorrt")
SAMPLERS = ("ancestral", *diffusion.CONFIDENCES)
SCHEDULES = (*diffusion.SCHEDULES, "even")
MOST_TOGETHER = 64  # steps in one CUDA graph


def setting(default, text, choices=(), limits=None):
    """A field of Config: its default, its help, and the values that `check` allows."""
    return dataclasses.field(
        default=default, metadata={"help": text, "choices": choices, "limits": limits}
    )


@dataclasses.dataclass(frozen=True)
class Config:
    bundle: str = setting(
        "", "bundle, run folder or checkpoint; if empty out/jetson, else weights/mdlm"
    )
    backend: str = setting(
        "auto", f"{', '.join(BACKENDS)}; auto: kernels if they run here, else torch", BACKENDS
    )
    device: str = setting("", "cpu or cuda; if empty cuda where there is one", ("", "cpu", "cuda"))
    prompt: str = setting(
        "", "text to continue, \\n for a new line, [MASK:n] to fill in n tokens; empty: interactive"
    )
    max_new: int = setting(
        64, "tokens to generate after a prompt without [MASK:n]", limits=(1, 2**62)
    )
    block: int = setting(
        0,
        "tokens filled at a time, from left to right; 0: all, or half a canvas",
        limits=(0, 2**62),
    )
    steps: int = setting(
        64,
        "denoising steps of a canvas; 25 take 0.4 of the time and read worse",
        limits=(1, 10_000),
    )
    sampler: str = setting(
        "ancestral", "ancestral, or by confidence: max_prob, margin, entropy", SAMPLERS
    )
    schedule: str = setting(
        "cosine_sq", f"how many tokens each step unmasks: {', '.join(SCHEDULES)}", SCHEDULES
    )
    temperature: float = setting(0.8, "0 takes the argmax", limits=(0, 100))
    top_k: int = setting(
        0, "sample from the k likeliest tokens; 0: from all", limits=(0, 2**31 - 1)
    )
    top_p: float = setting(
        0.9, "sample from the smallest set of tokens with this probability", limits=(1e-9, 1)
    )
    n: int = setting(1, "completions of a prompt, as a batch", limits=(1, 10_000))
    seed: int = setting(0, "random seed", limits=(0, 2**62))
    show_steps: bool = setting(
        False, "show the text after every step; in a terminal red to green by probability"
    )
    serve: bool = setting(
        False, 'read JSON lines {"prompt", settings}, write {"text", "ms", "tokens"} or {"error"}'
    )
    graph: bool = setting(
        True, "capture the steps as a CUDA graph; off launches every kernel by itself"
    )


def command_line(arguments=None):
    """Config from --name=value or --name value. By argparse, so that the device needs no other
    package.
    """
    how = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = argparse.ArgumentParser(description=__doc__, **how)
    for field in dataclasses.fields(Config):
        # both spellings
        flags = dict.fromkeys((f"--{field.name}", f"--{field.name.replace('_', '-')}"))
        options = {"dest": field.name, "default": field.default, "help": field.metadata["help"]}
        if field.type is bool:
            parser.add_argument(*flags, action=argparse.BooleanOptionalAction, **options)
        else:
            options["help"] += " (default: %(default)s)"
            parser.add_argument(*flags, metavar="X", type=field.type, **options)
    parser.add_argument(
        "--ckpt", dest="bundle", metavar="X", default=argparse.SUPPRESS, help="the same as --bundle"
    )
    return Config(**vars(parser.parse_args(arguments)))


def check(cfg):
    """The settings. Raises ValueError for the first value that is not allowed."""
    for field in dataclasses.fields(cfg):
        value, choices, limits = (
            getattr(cfg, field.name),
            field.metadata["choices"],
            field.metadata["limits"],
        )
        if choices and value not in choices:
            raise ValueError(
                f"--{field.name}={value}: not one of {', '.join(filter(None, choices))}"
            )
        if limits and not limits[0] <= value <= limits[1]:
            raise ValueError(f"--{field.name}={value}: not in {limits[0]:,} .. {limits[1]:,}")
    if cfg.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device=cuda: torch finds no GPU")
    return cfg


# ---- the bundle ----------------------------------------------------------------------------------------------------


def find_bundle(bundle):
    """The folder of --bundle, the newest step_<n>/ of a run; without --bundle out/jetson, or the
    shipped weights.
    """
    folder = Path(bundle or "out/jetson")
    if not bundle and not folder.exists() and SHIPPED.exists():
        print(
            "no out/jetson: using weights/mdlm, a small model that comes with Unmask",
            file=sys.stderr,
        )
        return SHIPPED
    steps = {int(path.name[5:]): path for path in folder.glob("step_*") if path.name[5:].isdigit()}
    return steps[max(steps)] if steps else folder


def read_bundle(folder):
    """bundle.json. Raises FileNotFoundError, or ValueError that says what is wrong with it.

    A checkpoint, as model_mdlm.save writes it, is a bundle without bundle.json, sizes and digests.
    """
    export = f"python export_jetson.py --out={folder}"
    if not (folder / "bundle.json").exists():
        names = "config.json", "model.safetensors", "tokenizer.json"
        if not (missing := [name for name in names if not (folder / name).exists()]):
            return {
                "format": FORMAT,
                "torch": None,
                "tensorrt": None,
                "files": dict.fromkeys(names),
            }
        raise FileNotFoundError(
            f"{folder} has no bundle.json, no {', no '.join(missing)}; write one with: {export}"
        )
    try:
        about = json.loads((folder / "bundle.json").read_text())
        if about["format"] != FORMAT:
            raise ValueError(f"it is of format {about['format']}, this script reads {FORMAT}")
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{folder}/bundle.json cannot be used ({error}); export again with: {export}"
        ) from None
    return about


def read_file(folder, about, name):
    """The bytes of a file of the bundle. Raises FileNotFoundError, or ValueError if its digest is
    wrong.
    """
    path = folder / name
    if name not in about["files"]:
        engine = (
            f"; add one: python export_jetson.py --tensorrt --bundle={folder}"
            if name == "model.trt"
            else ""
        )
        raise FileNotFoundError(
            f"the bundle holds no {name}{engine or '; export where export_jetson.py can write it'}"
        )
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; copy the folder again")
    data, want = path.read_bytes(), about["files"][name]
    if want and (len(data) != want["bytes"] or hashlib.sha256(data).hexdigest() != want["sha256"]):
        raise ValueError(
            f"{path} is damaged: not the {want['bytes']:,} bytes that were written; copy it again"
        )
    return data


def read_model(folder, about):
    """The MDLM of a bundle or checkpoint, in float32 on the CPU."""
    config, weights = (
        read_file(folder, about, name) for name in ("config.json", "model.safetensors")
    )
    try:
        return mdlm.build(config, weights).eval()
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{folder} holds no MDLM that this version reads: {error}; copy it again"
        ) from None


# ---- one denoising step, of one shape ------------------------------------------------------------------------------


def fused_forward(model, rate_N, kernels):
    """forward(token_BL, see_BL or None, step_1) -> logits [B, L, V], from fused operators.

    `kernels` has attention, add_norm and bias_gelu. The time embeddings of all steps are computed
    here, once.
    """
    cfg, time_ND = model.cfg, model.time_embedding(rate_N)[:, 0]
    # learned positions are added to the tokens; rotary ones are applied as attention loads queries
    # and keys
    if cfg.rope:
        position_PD = model.embed.weight.new_zeros(cfg.positions, cfg.width)
        cos_sin_PK = torch.cat(
            mdlm.angles(cfg.positions, cfg.width // cfg.heads, position_PD.device), -1
        )
    else:
        position_PD, cos_sin_PK = model.position.weight, None
    # every residual sum is followed by a norm: the one inside the block, or the first of the next
    # block
    norms = [norm for block in model.blocks for norm in (block.norm1, block.norm2)] + [model.norm]

    def add_norm(x_BLD, residual_BLD, norm):
        """(x + residual, LayerNorm of it) in one launch."""
        return kernels.add_norm(x_BLD, residual_BLD, norm.weight, norm.bias, norm.eps)

    def forward(token_BL, see_BL, step_1):
        B, L = token_BL.shape
        # positions and the step's time embedding are the first residual
        position_LD = position_PD[:L] + time_ND.index_select(0, step_1)
        cos_sin_LK = cos_sin_PK[:L] if cfg.rope else None
        h_BLD, n_BLD = add_norm(
            model.embed(token_BL), position_LD.expand(B, L, -1).contiguous(), norms[0]
        )
        for i, block in enumerate(model.blocks):
            qkv_BL3HK = block.qkv(n_BLD).view(B, L, 3, block.heads, -1)
            o_BLD = kernels.attention(qkv_BL3HK, see_BL, cos_sin_LK)
            h_BLD, n_BLD = add_norm(block.out(o_BLD), h_BLD, norms[2 * i + 1])
            # the bias of the first layer goes into the fused GELU
            f_BLF = kernels.bias_gelu(F.linear(n_BLD, block.fc1.weight), block.fc1.bias)
            h_BLD, n_BLD = add_norm(block.fc2(f_BLF), h_BLD, norms[2 * i + 2])
        return model.logits(n_BLD)

    return forward


def graph_forward(run, rate_N):
    """forward(token_BL, see_BL, step_1) of a graph run(token, noise, see), which embeds the noise
    level itself.
    """

    def forward(token_BL, see_BL, step_1):
        return run(
            token_BL, rate_N.index_select(0, step_1).expand(len(token_BL)).contiguous(), see_BL
        )

    return forward


def sample_fused_(logits_RV, token_BL, state_2, keep_N, ban, rule):
    """One ancestral step in place by the kernel of csrc/sampler.cu; random numbers are Philox of
    state_2.
    """
    filters = rule.temperature, rule.top_k, rule.top_p
    torch.ops.unmask.sample_(
        logits_RV, token_BL, state_2, keep_N, ban, mdlm.MASK, rule.vocab, *filters
    )


def sample_sorted_(logits_RV, token_BL, state_2, keep_N, ban, rule):
    """The same in PyTorch operators of fixed shapes, which can be captured; random numbers are
    torch's own.
    """
    race_RV = logits_RV[:, : rule.vocab].float().index_fill(1, ban.long(), -torch.inf)
    best_R1 = race_RV.argmax(-1, keepdim=True)
    if rule.temperature > 0:
        # likeliest first: column k - 1 holds the k-th logit, and a running sum is that of all
        # likelier ids
        race_RV, id_RV = (race_RV / rule.temperature).sort(-1, descending=True)
        if 0 < rule.top_k < rule.vocab:
            race_RV = race_RV.masked_fill(
                race_RV < race_RV[:, rule.top_k - 1 : rule.top_k], -torch.inf
            )
        if rule.top_p < 1:
            prob_RV = race_RV.softmax(-1)
            race_RV = race_RV.masked_fill(
                prob_RV.cumsum(-1) - prob_RV >= max(rule.top_p, 1e-9), -torch.inf
            )
        # -log of an exponential is Gumbel noise: the argmax of the sum is a draw from the softmax
        race_RV = race_RV - torch.empty_like(race_RV).exponential_().log()
        best_R1 = id_RV.gather(1, race_RV.argmax(-1, keepdim=True))
    # every row is drawn, as shapes are fixed; ancestral_step uses the draws of those that are
    # unmasked now
    token_R, u_R = token_BL.view(-1), torch.rand_like(race_RV[:, 0])
    next_R = diffusion.ancestral_step(
        token_R, best_R1[:, 0], u_R, keep_N.index_select(0, state_2[1:]), mdlm.MASK
    )
    # a row without any finite logit keeps its mask, which `write` reports
    token_R.copy_(torch.where(race_RV.amax(-1) > -torch.inf, next_R, token_R))


class Denoiser:
    """Fills canvases of one shape [B, L] in N steps, over buffers at fixed addresses.

    forward(token_BL, see_BL, step_1) gives logits; sample_ fills in place. state_2 = (seed, step)
    and the tables of all steps lie on the device: the same launches serve every step, and one step
    or all can be captured as a CUDA graph. `rule` is the Sampling of model_mdlm.py and means the
    same.
    """

    def __init__(self, forward, sample_, B, L, keep_N, rule, device):
        self.forward, self.sample_, self.rule, self.steps = forward, sample_, rule, len(keep_N)
        self.ancestral = rule.sampler == "ancestral"
        # A graph replays on these addresses. State, canvas and the number of tokens that each step
        # unmasks in each row are one buffer: one copy to the device and one back, from and to
        # pinned memory.
        sizes = 2, B * L, 0 if self.ancestral else self.steps * B
        self.host = torch.full((sum(sizes),), mdlm.MASK, pin_memory=device.type == "cuda")
        self.on_device = torch.full((sum(sizes),), mdlm.MASK, device=device)
        self.state_2, token, counts = self.on_device.split(sizes)
        self.state_2.zero_()
        self.token_BL, self.count_NB = token.view(B, L), counts.view(-1, B)
        self.see_BL = torch.ones(B, L, dtype=torch.bool, device=device)
        # by confidence: every mask is drawn, and count_NB says how many of the draws a step keeps
        self.keep_N = (keep_N if self.ancestral else torch.zeros_like(keep_N)).to(device)
        self.ban = torch.tensor(mdlm.BANNED, dtype=torch.int32, device=device)
        self.graph, self.together = None, 1

    def step(self):
        rule, step_1 = self.rule, self.state_2[1:]
        logits_RV = self.forward(self.token_BL, self.see_BL, step_1).flatten(0, 1)
        token_BL = self.token_BL if self.ancestral else self.token_BL.clone()
        self.sample_(logits_RV, token_BL, self.state_2, self.keep_N, self.ban, rule)
        if not self.ancestral:
            # keep the drawn tokens at the positions of highest confidence, by the raw distribution
            allowed_RV = (
                logits_RV[:, : rule.vocab].float().index_fill(1, self.ban.long(), -torch.inf)
            )
            score_BL = diffusion.confidence(allowed_RV.softmax(-1), rule.sampler).view(
                token_BL.shape
            )
            count_B = self.count_NB.index_select(0, step_1)[0]
            self.token_BL.copy_(
                diffusion.unmask_top(self.token_BL, token_BL, score_BL, count_B, mdlm.MASK)
            )
        step_1.add_(1)

    def capture(self, together):
        """Record `together` steps as a CUDA graph, or one if they do not fit. ValueError if that
        fails, too.
        """
        # a few plain runs first, on a side stream: libraries allocate and choose kernels in them
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.state_2.zero_()  # the tables end at step N
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        for steps in dict.fromkeys((together, 1)):
            graph = torch.cuda.CUDAGraph()
            try:
                # since 2.12 a graph's reset frees its stream's workspace
                with torch.cuda.graph(graph, stream=stream):
                    for _ in range(steps):
                        self.step()
                self.graph, self.together = graph, steps
                return
            except (RuntimeError, ValueError) as error:
                why = str(error).partition("\n")[0]
        # the stream may be left broken
        raise ValueError(f"CUDA graph: {why}; run with --no-graph, which is slower")

    @torch.inference_mode()
    def __call__(self, token_BL, seed, on_step=None):
        """The filled canvases, on the CPU; tokens other than MASK stay. on_step as in
        mdlm.sample.
        """
        counts = np.zeros(0, np.int64)
        if not self.ancestral:
            counts = diffusion.step_counts(
                (token_BL == mdlm.MASK).sum(1).numpy(), self.steps, self.rule.schedule
            )
        self.host.copy_(
            torch.cat(
                [torch.tensor([seed, 0]), token_BL.flatten(), torch.from_numpy(counts).flatten()]
            )
        )
        self.on_device.copy_(self.host, non_blocking=True)
        torch.manual_seed(seed)  # what sample_sorted_ draws from
        torch.ne(self.token_BL, mdlm.PAD, out=self.see_BL)
        # the step number is on the device: no copy from the host
        for i in range(0, self.steps, self.together):
            self.graph.replay() if self.graph else self.step()
            if on_step:
                on_step(i, self.token_BL.to("cpu", copy=True))
        self.host.copy_(self.on_device)  # the only synchronisation
        return self.host[2 : 2 + token_BL.numel()].view(token_BL.shape).clone()


def as_model(run):
    """A graph run(token, noise, see) as the model of mdlm.sample, which asks for hidden states,
    then for logits.
    """
    return types.SimpleNamespace(
        hidden=lambda *inputs: run(*inputs).float(), logits=lambda hidden: hidden
    )


# ---- backends ------------------------------------------------------------------------------------------------------

PLAIN = types.SimpleNamespace(
    attention=ops.attention_torch, add_norm=ops.add_norm_torch, bias_gelu=ops.bias_gelu_torch
)


def why_no_sampler(vocab, device):
    """The reason why the fused sampler cannot run on this device, or an empty string. It serves
    every backend.
    """
    return (
        f"the sampler takes 16,384 ids, this model has {vocab:,}"
        if vocab > 16384
        else ops.why_not(device)
    )


def why_no_kernels(config, vocab, device):
    """The reason why the kernels cannot run this model on this device, or an empty string."""
    head = config.width // config.heads
    if (
        head != ops.HEAD
        or config.width > ops.MAX_WIDTH
        or config.positions > ops.MAX_LENGTH
        or config.ffn % 8
    ):
        kinds = f"heads of {ops.HEAD}, widths to {ops.MAX_WIDTH}, {ops.MAX_LENGTH} positions, a multiple of 8 as ffn"
        return f"the kernels are for {kinds}; this model has {head}, {config.width}, {config.positions}, {config.ffn}"
    return why_no_sampler(vocab, device)


def run_onnx(data):
    """run(token, noise, see) -> logits of an ONNX graph."""
    try:
        import onnxruntime
    except ImportError:
        raise ValueError("--backend=onnx needs onnxruntime: pip install onnxruntime") from None
    # a wheel with TensorRT would try that first, and build engines for minutes at each start
    wanted = "CUDAExecutionProvider", "CPUExecutionProvider"
    providers = [name for name in wanted if name in onnxruntime.get_available_providers()]
    session = onnxruntime.InferenceSession(data, providers=providers)

    def run(token, noise, see):
        given = {
            "token": token.cpu().numpy(),
            "noise": noise.cpu().numpy(),
            "see": see.cpu().numpy(),
        }
        return torch.from_numpy(session.run(None, given)[0]).to(token.device)

    return run


def run_tensorrt(data, built):
    """run(token, noise, see) -> logits of an engine on the current stream; built: what bundle.json
    says of it.
    """
    try:
        import tensorrt as trt
    except ImportError:
        raise ValueError(
            "--backend=tensorrt needs JetPack's module: apt install python3-libnvinfer"
        ) from None
    there = f"TensorRT {built['version']} on {built['gpu']}"
    here = f"TensorRT {trt.__version__} on {torch.cuda.get_device_name()}"
    engine = (
        trt.Runtime(trt.Logger(trt.Logger.ERROR)).deserialize_cuda_engine(data)
        if there == here
        else None
    )
    if engine is None:
        raise ValueError(
            f"model.trt is of {there}, this is {here}; build: export_jetson.py --tensorrt --bundle=..."
        )
    context, vocab = engine.create_execution_context(), engine.get_tensor_shape("logits")[-1]
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]

    def run(token, noise, see):
        given = {"token": token, "noise": noise, "see": see}
        logits_BLV = torch.empty(*token.shape, vocab, dtype=torch.float16, device=token.device)
        for name in names:
            if name in given:
                context.set_input_shape(name, tuple(given[name].shape))
            context.set_tensor_address(name, given.get(name, logits_BLV).data_ptr())
        # nothing was written
        if not context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
            raise ValueError(
                f"TensorRT did not run model.trt on {[*token.shape]} tokens; its own messages are above"
            )
        return logits_BLV

    run.engine = engine  # lives as long as the function
    return run


class Writer:
    """The model of a bundle on a device, run by one backend: fill(token_BL, rule) gives the filled
    canvases.
    """

    def __init__(self, cfg):
        self.cfg, self.folder = cfg, find_bundle(cfg.bundle)
        about = read_bundle(self.folder)
        self.device = torch.device(cfg.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        try:
            torch.ones(1, device=self.device)
        except RuntimeError as error:  # such as: no kernel image is available
            raise ValueError(f"{str(error).splitlines()[0]}: see requirements-jetson.txt") from None
        self.model = read_model(self.folder, about)
        self.tokenizer = tokenizers.Tokenizer.from_str(
            read_file(self.folder, about, "tokenizer.json").decode()
        )
        self.tokenizer.encode_special_tokens = True  # names of special tokens in a prompt are text
        self.vocab = 1 + max(self.tokenizer.get_vocab().values(), default=0)
        if self.vocab > self.model.cfg.vocab:
            raise ValueError(
                f"tokenizer.json has ids up to {self.vocab - 1}, the model has {self.model.cfg.vocab}"
            )
        self.backend = self.choose_backend()
        # a graph that replaces the model; the longest canvas; the fixed length of an engine
        self.run, self.longest, self.length = None, self.model.cfg.positions, 0
        if self.backend == "torchscript":
            graph = io.BytesIO(read_file(self.folder, about, "model_jetson.pt"))
            try:
                self.run = torch.jit.load(graph, map_location=self.device)
            except RuntimeError as error:
                why = f"written by torch {about['torch']}; export it on this machine ({str(error).splitlines()[0]})"
                raise ValueError(
                    f"torch {torch.__version__} cannot load model_jetson.pt, {why}"
                ) from None
        elif self.backend == "onnx":
            self.run = run_onnx(read_file(self.folder, about, "model.onnx"))
        elif self.backend == "tensorrt":
            if self.device.type != "cuda":
                raise ValueError("--backend=tensorrt needs a CUDA device")
            self.run = run_tensorrt(read_file(self.folder, about, "model.trt"), about["tensorrt"])
            self.longest = self.length = about["tensorrt"]["length"]
        else:  # FP16 on a GPU, float32 on a CPU, where halves are slow; graphs hold weights of their own
            self.model.to(
                self.device, torch.float16 if self.device.type == "cuda" else torch.float32
            )
        self.captures = self.device.type == "cuda" and self.backend != "onnx"
        no_sampler = why_no_sampler(self.vocab, self.device)
        self.sample_ = sample_sorted_ if no_sampler else sample_fused_
        if self.captures and no_sampler and cfg.backend != "auto":  # choose_backend has printed it
            print(f"sampler: {no_sampler}; using PyTorch's sort", file=sys.stderr)
        self.seed, self.denoisers = cfg.seed, {}

    def rule(self, cfg):
        """The sampling rule of the settings."""
        names = "sampler", "steps", "schedule", "temperature", "top_k", "top_p"
        return mdlm.Sampling(*(getattr(cfg, name) for name in names), vocab=self.vocab)

    def choose_backend(self):
        """The backend asked for; "auto" is kernels where they run, else torch, with the reason on a
        GPU.
        """
        if self.cfg.backend not in ("auto", "kernels"):
            return self.cfg.backend
        reason = why_no_kernels(self.model.cfg, self.vocab, self.device)
        if reason and self.cfg.backend == "kernels":
            raise ValueError(f"--backend=kernels: {reason}")
        if reason and self.device.type == "cuda":
            print(f"kernels: {reason}; using PyTorch", file=sys.stderr)
        return "torch" if reason else "kernels"

    def denoiser(self, B, L, rule, watched=False):
        """The Denoiser of this shape and rule, captured at first use. The last eight are kept, as
        they hold memory.

        A graph holds all steps of a text, or one if `watched` (steps are shown) or more than
        MOST_TOGETHER.
        """
        together = 1 if watched or rule.steps > MOST_TOGETHER else rule.steps
        key = B, L, rule, together
        if key not in self.denoisers:
            while len(self.denoisers) >= 8:
                self.denoisers.pop(next(iter(self.denoisers)))
            # what differs between steps lies in tables on the device
            rate_N, keep_N = (
                table_N.to(self.device) for table_N in mdlm.step_tables(rule.steps, rule.schedule)
            )
            kernels = torch.ops.unmask if self.backend == "kernels" else PLAIN
            with torch.inference_mode():
                forward = (
                    graph_forward(self.run, rate_N)
                    if self.run
                    else fused_forward(self.model, rate_N, kernels)
                )
                denoiser = Denoiser(forward, self.sample_, B, L, keep_N, rule, self.device)
                if self.cfg.graph:
                    denoiser.capture(together)
            self.denoisers[key] = denoiser
        return self.denoisers[key]

    def fits(self, L):
        """Raises ValueError for a canvas that is too long."""
        if L > self.model.cfg.positions:
            raise ValueError(
                f"{L:,} tokens do not fit the model's {self.model.cfg.positions} positions"
            )
        if L > self.longest:
            another = f"python export_jetson.py --tensorrt --bundle={self.folder} --length={L}"
            raise ValueError(
                f"the engine takes up to {self.longest} tokens, not {L}; build another: {another}"
            )

    def fill_captured(self, token_BL, rule, on_step=None):
        """Pads canvases to a multiple of 32, or to the engine's length, so that there are few
        captures.
        """
        L = token_BL.shape[1]
        room = self.length or min(-(-L // 32) * 32, self.longest)
        token_BL, filled = F.pad(token_BL, (0, room - L), value=mdlm.PAD), []
        watch = on_step and (lambda i, token_BL: on_step(i, token_BL[:, :L]))
        # an engine takes one row at a time; the first of them is watched
        for rows_BL in token_BL.split(1) if self.length else [token_BL]:
            denoiser = self.denoiser(*rows_BL.shape, rule, bool(watch))
            filled.append(denoiser(rows_BL, self.seed + len(filled), watch))
            watch = None
        return torch.cat(filled)[:, :L]

    def fill(self, token_BL, rule, on_step=None):
        """token_BL int64 [B, L] on the CPU with its masks filled by the rule; on_step(i, token_BL)
        follows each step.

        Every call uses another seed. Raises ValueError if memory runs out.
        """
        B, L = token_BL.shape
        self.fits(L)
        try:
            if self.captures:
                return self.fill_captured(token_BL, rule, on_step)
            # on a CPU, and for ONNX, the loop of model_mdlm.py: it computes logits only where it
            # unmasks
            model = as_model(self.run) if self.run else self.model
            generator = torch.Generator(self.device).manual_seed(self.seed)
            return mdlm.sample(model, token_BL.to(self.device), rule, generator, on_step).cpu()
        except (RuntimeError, MemoryError) as error:
            # the last two are a Jetson's
            memory = re.search("out of memory|allocate memory|NvMap|NVML", str(error))
            if isinstance(error, RuntimeError) and not memory:
                raise
            raise ValueError(
                f"out of memory at batch {B}, length {L}: lower --n or --max_new"
            ) from None
        finally:
            self.seed = (self.seed + B) % 2**62  # the largest that --seed takes


# ---- text ----------------------------------------------------------------------------------------------------------


def canvas(writer, cfg):
    """Token ids of a prompt's canvas, and the number of masks to append if the prompt has none of
    its own.

    BOS, text, n masks for each [MASK:n]; EOS at the end of a prompt with masks.
    """
    pieces = re.split(r" ?\[MASK:(\d+)\]", cfg.prompt)
    texts, sizes = pieces[::2], [int(size[:9]) for size in pieces[1::2]]
    if any("[MASK" in text for text in texts):
        raise ValueError("a mask is written with its number of tokens: [MASK:12]")
    encoded = [writer.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    if not sizes:
        return [mdlm.BOS, *encoded[0]], cfg.max_new
    writer.fits(2 + sum(map(len, encoded)) + sum(sizes))  # with BOS and EOS
    ids = [mdlm.BOS]
    for text_ids, size in itertools.zip_longest(encoded, sizes, fillvalue=0):
        ids += text_ids + [mdlm.MASK] * size
    return [*ids, mdlm.EOS], 0


def write(writer, cfg, on_step=None):
    """(cfg.n texts for a prompt, number of tokens generated in total).

    What does not fit one canvas is generated in blocks from left to right: the last tokens of the
    text so far are the prefix of the next canvas, without BOS, as in training's crops from within a
    text. on_step(i, start, ids) follows each step: ids of the first text so far, of which
    ids[start:] is the canvas.
    """
    ids, left = canvas(writer, cfg)
    text_BL, new = torch.tensor([ids]).expand(cfg.n, -1), ids.count(mdlm.MASK)
    block = cfg.block or (left if len(ids) + left <= writer.longest else writer.longest // 2)
    while True:
        size = min(left, block, writer.longest - 1)
        start = max(0, text_BL.shape[1] + size - writer.longest)
        canvas_BL, prefix = (
            F.pad(text_BL[:, start:], (0, size), value=mdlm.MASK),
            text_BL[0, :start].tolist(),
        )

        def on_canvas(i, token_BL, prefix=prefix):
            on_step(i, len(prefix), prefix + token_BL[0].tolist())

        filled_BL = writer.fill(canvas_BL, writer.rule(cfg), on_step and on_canvas)
        if (filled_BL == mdlm.MASK).any():
            raise ValueError(
                "the model's logits are not finite; export it again, or train with a lower --lr"
            )
        text_BL = torch.cat([text_BL[:, :start], filled_BL], 1)
        left, new = left - size, new + size
        if left <= 0 or (text_BL == mdlm.EOS).any(1).all():
            return [
                writer.tokenizer.decode(text_ids(row, cfg.prompt)) for row in text_BL.tolist()
            ], cfg.n * new


def text_ids(ids, prompt=""):
    """The ids between BOS and EOS; an EOS in a hole of the prompt ends nothing."""
    return ids[1 : ids.index(mdlm.EOS)] if mdlm.EOS in ids and "[MASK:" not in prompt else ids[1:]


# terminal colours from red to green, one per tenth
SHADES = 196, 202, 208, 214, 220, 190, 154, 118, 82, 46


class StepViewer:
    """Prints the first text after each step, masks as blocks.

    In a terminal, generated tokens are coloured by their probability before temperature and
    filters, which costs another forward pass a step.
    """

    def __init__(self, writer, cfg):
        # colours of token positions
        self.writer, self.prompt, self.colours = writer, cfg.prompt, {}
        self.ids, _ = canvas(writer, cfg)
        self.rate_N, _ = mdlm.step_tables(cfg.steps, cfg.schedule)

    @torch.inference_mode()
    def probabilities(self, i, start, ids):
        """{position: probability} of the tokens that step i has filled, before temperature and
        filters.
        """
        before_L = (self.ids + [mdlm.MASK] * (len(ids) - len(self.ids)))[start:]  # with a new block
        self.ids = ids
        token_1L = torch.tensor([before_L], device=self.writer.model.embed.weight.device)
        logits_1LV = self.writer.model(
            token_1L, self.rate_N[i : i + 1].to(token_1L.device), token_1L != mdlm.PAD
        )
        prob_LV = diffusion.softmax(
            diffusion.ban(logits_1LV, mdlm.BANNED)[0, :, : self.writer.vocab]
        )
        pairs = enumerate(zip(before_L, ids[start:], strict=True))
        return {start + p: prob_LV[p, new].item() for p, (old, new) in pairs if old != new}

    def __call__(self, i, start, ids):
        clear, text, tokens = "", "", text_ids(ids, self.prompt)
        if sys.stdout.isatty():
            clear = "\x1b[2J\x1b[H"
            for p, prob in self.probabilities(i, start, ids).items():
                self.colours[p] = SHADES[min(int(10 * prob), 9)]

        def kind(p):
            return tokens[p] == mdlm.MASK, self.colours.get(p + 1)  # BOS is position 0

        # neighbours of one kind are decoded together
        for (masked, colour), group in itertools.groupby(range(len(tokens)), kind):
            group_ids = [tokens[p] for p in group]
            piece = "\u2591" * len(group_ids) if masked else self.writer.tokenizer.decode(group_ids)
            text += f"\x1b[38;5;{colour}m{piece}\x1b[39m" if colour else piece
        print(f"{clear}step {i + 1}: {text}", flush=True)


def answer(writer, cfg):
    """Generate cfg.n texts for a prompt and print them."""
    started = time.perf_counter()
    texts, new = write(writer, cfg, StepViewer(writer, cfg) if cfg.show_steps else None)
    seconds = time.perf_counter() - started
    for i, text in enumerate(texts, 1):
        print(text if len(texts) == 1 else f"---- {i}\n{text}", flush=True)
    print(f"{new} tokens in {seconds:.3f} s, {cfg.steps} steps, {writer.backend}", file=sys.stderr)


def interact(writer, cfg):
    """Answer prompts, one per line, until the end of input."""
    if terminal := sys.stdin.isatty():
        print("Write a beginning and press Enter; Ctrl-D ends.", file=sys.stderr)
    while True:
        try:
            # what is not UTF-8 ends the session, as it would fail again
            line = input(">>> " if terminal else "")
        except EOFError:
            return
        try:
            if line:
                answer(writer, dataclasses.replace(cfg, prompt=line.replace("\\n", "\n")))
        except ValueError as error:  # of this prompt
            print(error, file=sys.stderr)


REQUEST = (
    "prompt",
    "max_new",
    "seed",
    "block",
    "steps",
    "sampler",
    "schedule",
    "temperature",
    "top_k",
    "top_p",
)


def read_request(cfg, line):
    """The settings of the command line, overridden by those of a JSON line. Raises ValueError for a
    bad line.
    """
    try:
        request = dict(json.loads(line))
        request["prompt"].encode()  # half a surrogate pair is no text
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f'a request is a JSON object with the text "prompt" ({error!r})') from None
    for name, value in request.items():
        if name not in REQUEST:
            raise ValueError(f"{name!r} is not one of {', '.join(REQUEST)}")
        kind = type(getattr(cfg, name))
        if type(value) is not kind and (kind, type(value)) != (float, int):
            raise ValueError(f"{name} is {type(value).__name__}, not {kind.__name__}")
    return check(dataclasses.replace(cfg, n=1, **request))


def serve(writer, cfg):
    """Answer JSON lines until the end of input or SIGTERM. A request without a seed gets a new one
    each time.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    # the first text waits for libraries and a capture
    write(writer, dataclasses.replace(cfg, prompt=" ", n=1))
    print(f"ready: {writer.backend} on {writer.device}", file=sys.stderr, flush=True)
    for line in sys.stdin.buffer:
        started = time.perf_counter()
        try:
            request = read_request(dataclasses.replace(cfg, seed=writer.seed), line)
            writer.seed = request.seed
            (text,), tokens = write(writer, request)
            reply = {
                "text": text,
                "ms": round(1e3 * (time.perf_counter() - started), 2),
                "tokens": tokens,
            }
        except ValueError as error:
            reply = {"error": str(error)}
        print(json.dumps(reply), flush=True)


# ---- main ----------------------------------------------------------------------------------------------------------


def main(cfg):
    writer = Writer(check(cfg))
    if cfg.serve:
        serve(writer, cfg)
    elif cfg.prompt:
        answer(writer, dataclasses.replace(cfg, prompt=cfg.prompt.replace("\\n", "\n")))
    else:
        interact(writer, cfg)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it silently
    try:
        main(command_line())
    except KeyboardInterrupt:
        sys.exit(130)
    except (OSError, ValueError) as error:
        sys.exit(str(error))
