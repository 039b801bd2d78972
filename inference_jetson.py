"""Write text with an exported MDLM, on a Jetson, another CUDA GPU, or a CPU.

    python inference_jetson.py --prompt="Once upon a time"                      # out/jetson, else the shipped weights
    python inference_jetson.py                                                  # an interactive prompt
    python inference_jetson.py --prompt="One day, [MASK:30] They were happy."   # fill in the middle
    python inference_jetson.py --prompt="Once" --max_new=1000 --show_steps      # longer than a canvas: in blocks
    python inference_jetson.py --benchmark --lengths 64 128 --steps_list 10 25
    echo '{"prompt": "Once", "max_new": 32, "seed": 1}' | python inference_jetson.py --serve    # stays; JSON lines

Needs Python 3.10, torch 2.4 or newer, tokenizers and numpy, and beside it model_mdlm.py, diffusion.py and csrc/. On a
GPU all steps of a text (model, sampling, update) are captured as one CUDA graph, which a later text replays by a single
launch; more than 64 steps, or steps that are shown, are replayed one by one. What differs between steps lies in tables
on the device, and the host synchronises with it once per sample. The kernels are built by
`python setup_kernels.py build_ext --inplace`: --backend=auto then uses all of them, every other backend the sampler;
without them the step is plain PyTorch, captured as well. On a CPU the loop is that of model_mdlm.py, in float32. For
the clocks: sudo nvpmodel -m 2; sudo jetson_clocks.

torch for JetPack 6 (Python 3.10, CUDA 12.6): NVIDIA's wheels torch-*.nv24.*-cp310-cp310-linux_aarch64, those of Jetson
AI Lab's index jp6/cu126 (2.8 too), or the container nvidia/pytorch:*-py3-igpu. JetPack 7 (Python 3.12, CUDA 13):
torch for cu130 of PyTorch's own index or of Jetson AI Lab's sbsa/cu130, or nvidia/pytorch:25.08-py3 and newer. Wheels
of the Python Package Index for aarch64 are for servers: on JetPack 6 they find no GPU.

Letters: B batch, L length, P positions, D width, H heads, K head size, R rows (B L), V vocabulary, N steps.
"""

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import inspect
import io
import itertools
import json
import os
import platform
import re
import resource
import shutil
import signal
import statistics
import subprocess
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
SHIPPED = Path(__file__).resolve().parent / "weights/mdlm"  # a checkpoint that comes with the scripts
SAMPLERS = ("ancestral", *diffusion.CONFIDENCES)
MOST_TOGETHER = 64  # steps in one CUDA graph
BACKENDS = ("auto", "kernels", "torch", "torchscript", "onnx", "tensorrt")


@dataclasses.dataclass(frozen=True)
class Config:
    bundle: str = ""  # of export_jetson.py, or a checkpoint; "" is out/jetson, or weights/mdlm where that is missing
    backend: str = "auto"  # kernels, torch, torchscript, onnx, tensorrt; auto: kernels where they run, else torch
    device: str = ""  # cpu or cuda; "" is cuda where there is one
    prompt: str = ""  # text to continue, \n for a new line, [MASK:n] for n tokens to fill; "" asks for one
    max_new: int = 64  # tokens to fill after a prompt without [MASK:n]; a text may end before
    block: int = 0  # fill so many tokens at a time, from left to right; 0: all, or half a canvas where they do not fit
    steps: int = 64  # passes over a canvas; 25 take 0.4 of the time and read worse, more than 64 read no better
    sampler: str = "ancestral"  # or max_prob, margin, entropy: the surest tokens of each step stay, a fixed number
    schedule: str = "cosine_sq"  # when how many tokens are filled: linear, cosine, cosine_sq, even
    temperature: float = 0.8  # 0 takes the likeliest token
    top_k: int = 0  # draw from the k likeliest tokens; 0: from all
    top_p: float = 0.9  # draw from the smallest set of this probability
    n: int = 1  # completions of a prompt, as a batch
    seed: int = 0  # of the random numbers
    show_steps: bool = False  # show the canvas after every step
    serve: bool = False  # answer JSON lines, "prompt" and settings, with lines of {"text", "ms", "tokens"} or {"error"}
    graph: bool = True  # capture the steps as a CUDA graph; off launches its kernels one by one
    benchmark: bool = False  # time canvases of masks instead of writing
    lengths: tuple[int, ...] = (64, 128, 256)  # canvases of the benchmark, in tokens
    steps_list: tuple[int, ...] = (10, 25)  # numbers of steps of the benchmark
    batches: tuple[int, ...] = (1,)  # batch sizes of the benchmark
    repeats: int = 10  # timed samples of each, after three that are not
    out: str = ""  # JSON file of the benchmark; "" is benchmark.json in the bundle


def command_line(arguments=None):
    """Config from --name=value; argparse, so that the Jetson needs no other package. Help is the fields' comments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    comments = dict(re.findall(r"^    (\w+):.*?  # (.*)$", inspect.getsource(Config), re.MULTILINE))
    for field in dataclasses.fields(Config):
        flags = dict.fromkeys((f"--{field.name}", f"--{field.name.replace('_', '-')}"))  # both spellings, once if equal
        settings = {"dest": field.name, "default": field.default, "help": comments[field.name]}
        if field.type is bool:
            parser.add_argument(*flags, action=argparse.BooleanOptionalAction, **settings)
        else:
            settings["help"] += " (default: %(default)s)"
            many = isinstance(field.default, tuple)
            settings |= {"type": int, "nargs": "+"} if many else {"type": field.type}
            parser.add_argument(*flags, metavar="X", **settings)
    given = vars(parser.parse_args(arguments))
    return Config(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


# ---- the bundle ----------------------------------------------------------------------------------------------------


def find_bundle(bundle):
    """The folder of --bundle; without one out/jetson, or the weights that come with the scripts."""
    folder = Path(bundle or "out/jetson")
    if not bundle and not folder.exists() and SHIPPED.exists():
        print("no out/jetson: using weights/mdlm, a small model that comes with Unmask", file=sys.stderr)
        return SHIPPED
    return folder


def read_bundle(folder):
    """bundle.json; FileNotFoundError or ValueError says what is wrong with the folder.

    A checkpoint, as model_mdlm.save writes it, is a bundle without bundle.json: nothing tells whether it is whole.
    """
    export = f"python export_jetson.py --out={folder}"
    if not (folder / "bundle.json").exists():
        names = "config.json", "model.safetensors", "tokenizer.json"
        if all((folder / name).exists() for name in names):
            return {"format": FORMAT, "torch": None, "tensorrt": None, "files": dict.fromkeys(names)}
        raise FileNotFoundError(f"{folder} is no bundle (no bundle.json); write one with: {export}")
    try:
        about = json.loads((folder / "bundle.json").read_text())
        if about["format"] != FORMAT:
            raise ValueError(f"it is of format {about['format']}, this script reads {FORMAT}")
        # all that is read later: a bundle of another version may lack it
        _ = about["torch"], [(file["bytes"], file["sha256"]) for file in about["files"].values()]
        _ = about["tensorrt"] and [about["tensorrt"][key] for key in ("version", "gpu", "length")]
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        why = f"it has no {error}, so it is of another version" if isinstance(error, KeyError) else error
        raise ValueError(f"{folder}/bundle.json cannot be used ({why}); export again with: {export}") from None
    return about


def part(folder, about, name):
    """The bytes of a file of the bundle, which must be those that were written."""
    path = folder / name
    if name not in about["files"]:
        engine = f"; add one: python export_jetson.py --tensorrt --bundle={folder}" if name == "model.trt" else ""
        raise FileNotFoundError(f"the bundle holds no {name}{engine or '; export where export_jetson.py can write it'}")
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; copy the folder again")
    data, want = path.read_bytes(), about["files"][name]
    if want and (len(data) != want["bytes"] or hashlib.sha256(data).hexdigest() != want["sha256"]):
        raise ValueError(f"{path} is damaged: not the {want['bytes']:,} bytes that were written; copy it again")
    return data


def read_model(folder, about):
    """The MDLM of a bundle or checkpoint, in float32 on the CPU."""
    config, weights = (part(folder, about, name) for name in ("config.json", "model.safetensors"))
    try:
        return mdlm.build(config, read_safetensors(weights)).eval()
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{folder} holds no MDLM that this version reads: {error}; copy it again") from None


DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I8": torch.int8}


def read_safetensors(data):
    """{name: tensor} of a safetensors file's bytes, without the package: an 8-byte length, JSON, then the numbers.

    Matrices in 8 bits are multiplied out: row i of NAME is its whole numbers times NAME.scale[i].
    """
    start = 8 + int.from_bytes(data[:8], "little")
    entries, numbers, tensors = json.loads(data[8:start]), bytearray(data[start:]), {}
    entries.pop("__metadata__", None)
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        flat = torch.frombuffer(numbers, dtype=torch.uint8, count=end - begin, offset=begin)
        flat = flat.clone()  # it begins at a multiple of 64 bytes, which the kernels need
        tensors[name] = flat.view(DTYPES[entry["dtype"]]).view(entry["shape"])
    for name in [name for name, tensor in tensors.items() if tensor.dtype == torch.int8]:
        tensors[name] = tensors[name] * tensors.pop(f"{name}.scale")
    return tensors


# ---- one denoising step, of one shape ------------------------------------------------------------------------------


def fused_forward(model, rate_N, kernels):
    """forward(token_BL, see_BL or None, step_1) -> logits [B, L, V], from fused operators.

    `kernels` has attention, add_norm and bias_gelu. The time embeddings of all steps are made here, once.
    """
    cfg = model.cfg
    time_ND = model.time_embedding(rate_N)[:, 0] if cfg.time else None
    # learned positions are added to the tokens; rotary ones turn queries and keys while attention loads them
    if cfg.rope:
        place_PD = model.embed.weight.new_zeros(cfg.positions, cfg.width)
        cos_sin_PK = torch.cat(mdlm.angles(cfg.positions, cfg.width // cfg.heads, place_PD.device), -1)
    else:
        place_PD, cos_sin_PK = model.position.weight, None
    # every residual sum is followed by a norm: the one inside the block, or the first of the next block
    norms = [norm for block in model.blocks for norm in (block.norm1, block.norm2)] + [model.norm]

    def add_norm(x_BLD, residual_BLD, norm):
        """(x + residual, LayerNorm of it) in one launch."""
        return kernels.add_norm(x_BLD, residual_BLD, norm.weight, norm.bias, norm.eps)

    def forward(token_BL, see_BL, step_1):
        B, L = token_BL.shape
        # positions and the step's time embedding are the first residual
        place_LD = place_PD[:L]
        cos_sin_LK = cos_sin_PK[:L] if cfg.rope else None
        if time_ND is not None:
            place_LD = place_LD + time_ND.index_select(0, step_1)
        h_BLD, n_BLD = add_norm(model.embed(token_BL), place_LD.expand(B, L, -1).contiguous(), norms[0])
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
    """The same of a TorchScript or TensorRT graph run(token, noise, see), which makes its own time embedding."""

    def forward(token_BL, see_BL, step_1):
        return run(token_BL, rate_N.index_select(0, step_1).expand(len(token_BL)).contiguous(), see_BL)

    return forward


def sample_sorted_(logits_RV, token_BL, state_2, keep_N, ban, mask, vocab, temperature, top_k, top_p):
    """The sampler in PyTorch operators of fixed shapes, which can be captured; torch's own random numbers."""
    race_RV = logits_RV[:, :vocab].float().index_fill(1, ban.long(), -torch.inf)
    best_R1 = race_RV.argmax(-1, keepdim=True)
    if temperature > 0:
        # likeliest first: the k-th logit stands at place k - 1, and a running sum holds all that are likelier
        race_RV, id_RV = (race_RV / temperature).sort(-1, descending=True)
        if 0 < top_k < vocab:
            race_RV = race_RV.masked_fill(race_RV < race_RV[:, top_k - 1 : top_k], -torch.inf)
        if top_p < 1:
            prob_RV = race_RV.softmax(-1)
            race_RV = race_RV.masked_fill(prob_RV.cumsum(-1) - prob_RV >= max(top_p, 1e-9), -torch.inf)
        # -log of an exponential is Gumbel noise: the arg-max of the race is a draw from the softmax
        race_RV = race_RV - torch.empty_like(race_RV).exponential_().log()
        best_R1 = id_RV.gather(1, race_RV.argmax(-1, keepdim=True))
    # every row is drawn, as shapes are fixed; those that stay masked in this step are put back
    token_R, u_R = token_BL.view(-1), torch.rand_like(race_RV[:, 0])
    next_R = diffusion.ancestral_step(token_R, best_R1[:, 0], u_R, keep_N.index_select(0, state_2[1:]), mask)
    # a row without any finite logit keeps its mask, which answer() reports
    token_R.copy_(torch.where(race_RV.amax(-1) > -torch.inf, next_R, token_R))


def step_tables(steps, schedule):
    """P(masked) before each step, which the model is told, and P(a mask stays) in it: both float32 [N].

    "even" is a rule of numbers, not of noise: as in mdlm.sample the model is told what linear has.
    """
    schedule = "linear" if schedule == "even" else schedule
    # times from 1 to 0 in equal steps; the last one keeps no mask
    time_N = 1 - torch.arange(steps + 1, dtype=torch.float64) / steps
    before_N, after_N = time_N[:-1], time_N[1:]
    return diffusion.mask_rate(before_N, schedule).float(), diffusion.keep_prob(before_N, after_N, schedule).float()


class Denoiser:
    """Fills canvases of one shape [B, L] in N steps over buffers that stay where they are.

    forward(token_BL, see_BL, step_1) gives logits; sample_ fills in place. state_2 = (seed, step) lies on the device,
    the tables of all steps too: the same launches serve every step, and one or all can be captured as a CUDA graph.
    `rule` is the Sampling of model_mdlm.py and means the same.
    """

    def __init__(self, forward, sample_, B, L, keep_N, rule, device):
        self.forward, self.sample_, self.rule, self.steps = forward, sample_, rule, len(keep_N)
        self.ancestral = rule.sampler == "ancestral"
        # what a step reads and writes: a graph replays on these very addresses. State, canvas and the number of tokens
        # that each step unmasks in each row are one buffer, which goes to the device in one copy and comes back in one,
        # from and to memory that the device reads by itself
        sizes = 2, B * L, 0 if self.ancestral else self.steps * B
        self.host = torch.full((sum(sizes),), mdlm.MASK, pin_memory=device.type == "cuda")
        self.on_device = torch.full((sum(sizes),), mdlm.MASK, device=device)
        self.state_2, token, counts = self.on_device.split(sizes)
        self.state_2.zero_()
        self.token_BL, self.count_NB = token.view(B, L), counts.view(-1, B)
        self.see_BL = torch.ones(B, L, dtype=torch.bool, device=device)
        # where counts decide, every mask is drawn
        self.keep_N = (keep_N if self.ancestral else torch.zeros_like(keep_N)).to(device)
        # rules of the sampler: they are the same in all steps, so a graph may hold them
        self.ban = torch.tensor(mdlm.BANNED, dtype=torch.int32, device=device)
        self.graph, self.together = None, 1

    def step(self):
        rule, step_1 = self.rule, self.state_2[1:]
        logits_RV = self.forward(self.token_BL, self.see_BL, step_1).flatten(0, 1)
        token_BL = self.token_BL if self.ancestral else self.token_BL.clone()
        settings = mdlm.MASK, rule.vocab, rule.temperature, rule.top_k, rule.top_p
        self.sample_(logits_RV, token_BL, self.state_2, self.keep_N, self.ban, *settings)
        if not self.ancestral:
            # keep what was drawn where p(x0), unfiltered, is surest
            race_RV = logits_RV[:, : rule.vocab].float().index_fill(1, self.ban.long(), -torch.inf)
            score_BL = diffusion.confidence(race_RV.softmax(-1), rule.sampler).view(token_BL.shape)
            count_B = self.count_NB.index_select(0, step_1)[0]
            self.token_BL.copy_(diffusion.unmask_top(self.token_BL, token_BL, score_BL, count_B, mdlm.MASK))
        step_1.add_(1)

    def capture(self, together):
        """Record so many steps, one or all, as a CUDA graph, or one where all cannot be.

        Where that fails, say so: each step then launches its kernels itself.
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
                with torch.cuda.graph(graph):
                    for _ in range(steps):
                        self.step()
                self.graph, self.together = graph, steps
                return
            except (RuntimeError, ValueError) as error:
                why = str(error).partition("\n")[0]
        print(f"CUDA graph: {why}; launching kernels one by one, which is slower", file=sys.stderr)

    @torch.inference_mode()
    def __call__(self, token_BL, seed, on_step=None):
        """The filled canvases, on the CPU; what is not MASK in token_BL stays. on_step as in mdlm.sample."""
        counts = np.zeros(0, np.int64)
        if not self.ancestral:
            counts = diffusion.step_counts((token_BL == mdlm.MASK).sum(1).numpy(), self.steps, self.rule.schedule)
        self.host.copy_(torch.cat([torch.tensor([seed, 0]), token_BL.flatten(), torch.from_numpy(counts).flatten()]))
        self.on_device.copy_(self.host, non_blocking=True)
        torch.manual_seed(seed)  # what sample_sorted_ draws from
        torch.ne(self.token_BL, mdlm.PAD, out=self.see_BL)
        for i in range(0, self.steps, self.together):  # the step's number is on the device: nothing comes from the host
            self.graph.replay() if self.graph else self.step()
            if on_step:
                on_step(i, self.token_BL.to("cpu", copy=True))
        self.host.copy_(self.on_device)  # the only synchronisation
        return self.host[2 : 2 + token_BL.numel()].view(token_BL.shape).clone()


class Full:
    """A graph run(token, noise, see) in the place of the model in mdlm.sample, which asks for states, then logits."""

    def __init__(self, run):
        self.run = run

    def hidden(self, token_BL, noise_B, see_BL):
        return self.run(token_BL, noise_B, see_BL).float()

    def logits(self, hidden):
        return hidden


# ---- backends ------------------------------------------------------------------------------------------------------

PLAIN = types.SimpleNamespace(
    attention=ops.attention_torch, add_norm=ops.add_norm_torch, bias_gelu=ops.bias_gelu_torch, sample_=sample_sorted_
)


def why_no_sampler(vocab, device):
    """The reason why the fused sampler cannot run on this device, or an empty string. It serves every backend."""
    return f"the sampler takes 16,384 ids, this model has {vocab:,}" if vocab > 16384 else ops.why_not(device)


def why_no_kernels(config, vocab, device):
    """The reason why the kernels cannot run this model on this device, or an empty string."""
    if config.width // config.heads != ops.HEAD:
        return f"the kernels are for heads of {ops.HEAD}, this model's have {config.width // config.heads}"
    if config.width > ops.MAX_WIDTH:
        return f"the kernels take widths to {ops.MAX_WIDTH}, this model has {config.width}"
    return why_no_sampler(vocab, device)


def load_torchscript(data, device, wrote):
    """run(token, noise, see) -> logits of a TorchScript graph; wrote: the version of torch that wrote it."""
    try:
        return torch.jit.load(io.BytesIO(data), map_location=device)
    except RuntimeError as error:
        why = f"written by torch {wrote}; export it on this machine ({str(error).splitlines()[0]})"
        raise ValueError(f"torch {torch.__version__} cannot load model_jetson.pt, {why}") from None


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
    # a model without time has no input "noise"
    taken = {node.name for node in session.get_inputs()}

    def run(token, noise, see):
        given = {"token": token, "noise": noise, "see": see}
        given = {name: tensor.cpu().numpy() for name, tensor in given.items() if name in taken}
        return torch.from_numpy(session.run(None, given)[0]).to(token.device)

    return run


def run_tensorrt(data, built):
    """run(token, noise, see) -> logits of an engine on the current stream; built: what bundle.json says of it."""
    try:
        import tensorrt as trt
    except ImportError:
        raise ValueError("--backend=tensorrt needs JetPack's module: apt install python3-libnvinfer") from None
    there = f"TensorRT {built['version']} on {built['gpu']}"
    here = f"TensorRT {trt.__version__} on {torch.cuda.get_device_name()}"
    engine = trt.Runtime(trt.Logger(trt.Logger.ERROR)).deserialize_cuda_engine(data) if there == here else None
    if engine is None:
        build = "python export_jetson.py --tensorrt --bundle=..."
        raise ValueError(f"model.trt is of {there}, this is {here}; build it here: {build}")
    context, vocab = engine.create_execution_context(), engine.get_tensor_shape("logits")[-1]
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]

    def run(token, noise, see):
        given = {"token": token, "noise": noise, "see": see}
        logits_BLV = torch.empty(*token.shape, vocab, dtype=torch.float16, device=token.device)
        for name in names:  # an engine reads and writes at addresses
            if name in given:
                context.set_input_shape(name, tuple(given[name].shape))
            context.set_tensor_address(name, given.get(name, logits_BLV).data_ptr())
        if not context.execute_async_v3(torch.cuda.current_stream().cuda_stream):  # nothing was written
            raise ValueError(f"TensorRT did not run model.trt on {[*token.shape]} tokens; its own messages are above")
        return logits_BLV

    run.engine = engine  # lives as long as the function
    return run


class Writer:
    """A bundle on a device behind one backend: fill(token_BL, rule) gives the filled canvases."""

    def __init__(self, cfg):
        self.cfg, self.folder = cfg, find_bundle(cfg.bundle)
        about = read_bundle(self.folder)
        self.device = torch.device(cfg.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.model = read_model(self.folder, about)
        self.tokenizer = tokenizers.Tokenizer.from_str(part(self.folder, about, "tokenizer.json").decode())
        self.tokenizer.encode_special_tokens = True  # names of special tokens in a prompt are text
        self.vocab = min(self.tokenizer.get_vocab_size(), self.model.cfg.vocab)
        self.backend = self.choose_backend()
        # a graph instead of the model; the longest canvas; the only length that an engine takes
        self.run, self.longest, self.length = None, self.model.cfg.positions, 0
        if self.backend == "torchscript":
            self.run = load_torchscript(part(self.folder, about, "model_jetson.pt"), self.device, about["torch"])
        elif self.backend == "onnx":
            self.run = run_onnx(part(self.folder, about, "model.onnx"))
        elif self.backend == "tensorrt":
            if self.device.type != "cuda":
                raise ValueError("--backend=tensorrt needs a CUDA device")
            self.run = run_tensorrt(part(self.folder, about, "model.trt"), about["tensorrt"])
            self.longest = self.length = about["tensorrt"]["length"]
        else:  # FP16 on a GPU, float32 on a CPU, where halves are slow; graphs bring weights of their own
            self.model.to(self.device, torch.float16 if self.device.type == "cuda" else torch.float32)
        self.captures = self.device.type == "cuda" and self.backend != "onnx"
        no_sampler = why_no_sampler(self.vocab, self.device)
        self.sample_ = sample_sorted_ if no_sampler else torch.ops.unmask.sample_
        if self.captures and no_sampler and cfg.backend != "auto":  # auto has said it
            print(f"sampler: {no_sampler}; using PyTorch's sort", file=sys.stderr)
        self.seed, self.denoisers = cfg.seed, {}

    def rule(self, cfg):
        """The sampling rule of the settings."""
        names = "sampler", "steps", "schedule", "temperature", "top_k", "top_p"
        return mdlm.Sampling(*(getattr(cfg, name) for name in names), vocab=self.vocab)

    def choose_backend(self):
        """The backend asked for; "auto" is kernels where they run, else torch, which is said on a GPU."""
        if self.cfg.backend not in ("auto", "kernels"):
            return self.cfg.backend
        reason = why_no_kernels(self.model.cfg, self.vocab, self.device)
        if reason and self.cfg.backend == "kernels":
            raise ValueError(f"--backend=kernels: {reason}")
        if reason and self.device.type == "cuda":
            print(f"kernels: {reason}; using PyTorch", file=sys.stderr)
        return "torch" if reason else "kernels"

    def denoiser(self, B, L, rule, watched=False):
        """The steps for this shape and rule, captured at first use; the last eight are kept, as they hold memory.

        A graph holds all steps of a text; one step where each is watched, or where there are more than MOST_TOGETHER.
        """
        together = 1 if watched or rule.steps > MOST_TOGETHER else rule.steps
        key = B, L, rule, together
        if key not in self.denoisers:
            while len(self.denoisers) >= 8:
                self.denoisers.pop(next(iter(self.denoisers)))
            # what differs between steps lies in tables on the device
            rate_N, keep_N = (table_N.to(self.device) for table_N in step_tables(rule.steps, rule.schedule))
            kernels = torch.ops.unmask if self.backend == "kernels" else PLAIN
            with torch.inference_mode():
                forward = graph_forward(self.run, rate_N) if self.run else fused_forward(self.model, rate_N, kernels)
                denoiser = Denoiser(forward, self.sample_, B, L, keep_N, rule, self.device)
                if self.cfg.graph:
                    denoiser.capture(together)
            self.denoisers[key] = denoiser
        return self.denoisers[key]

    def fits(self, L):
        """Raises ValueError for a canvas that is too long."""
        if L > self.model.cfg.positions:
            raise ValueError(f"{L:,} tokens do not fit the model's {self.model.cfg.positions} positions")
        if L > self.longest:
            another = f"python export_jetson.py --tensorrt --bundle={self.folder} --length={L}"
            raise ValueError(f"the engine takes up to {self.longest} tokens, not {L}; build another: {another}")

    def fill_captured(self, token_BL, rule, on_step=None):
        """Canvases grow by PAD, which nobody sees, to a multiple of 32 or the engine's length: few captures."""
        L = token_BL.shape[1]
        room = self.length or min(-(-L // 32) * 32, self.longest)
        token_BL, filled = F.pad(token_BL, (0, room - L), value=mdlm.PAD), []
        watch = on_step and (lambda i, token_BL: on_step(i, token_BL[:, :L]))
        # an engine takes one row at a time; the first of them is watched
        for part_BL in token_BL.split(1) if self.length else [token_BL]:
            denoiser = self.denoiser(*part_BL.shape, rule, bool(watch))
            filled.append(denoiser(part_BL, self.seed + len(filled), watch))
            watch = None
        return torch.cat(filled)[:, :L]

    def fill(self, token_BL, rule, on_step=None):
        """token_BL int64 [B, L] on the CPU with its masks filled by the rule; on_step(i, token_BL) follows each step.

        Every call draws other noise. Raises ValueError where memory runs out.
        """
        B, L = token_BL.shape
        self.fits(L)
        try:
            if self.captures:
                return self.fill_captured(token_BL, rule, on_step)
            # on a CPU, and for ONNX, the loop of model_mdlm.py: it computes logits only where it unmasks
            model = Full(self.run) if self.run else self.model
            generator = torch.Generator(self.device).manual_seed(self.seed)
            return mdlm.sample(model, token_BL.to(self.device), rule, generator, on_step).cpu()
        except (RuntimeError, MemoryError) as error:
            # torch raises RuntimeError for much else; NvMap is the Jetson's allocator
            if isinstance(error, RuntimeError) and not re.search("out of memory|allocate memory|NvMap", str(error)):
                raise
            lower = "--batches or --lengths" if self.cfg.benchmark else "--n or --max_new"
            raise ValueError(f"out of memory at batch {B}, length {L}: lower {lower}") from None
        finally:
            self.seed += B  # the next canvases meet other noise


# ---- text ----------------------------------------------------------------------------------------------------------


def canvas(writer, cfg):
    """Ids of a prompt's canvas, and the number of masks to append where the prompt has none of its own.

    BOS, text, masks for each [MASK:n], EOS behind a text that ends.
    """
    # texts and the sizes of the masks between them take turns
    parts = re.split(r" ?\[MASK:(\d+)\]", cfg.prompt)
    texts, sizes = parts[::2], [int(size[:9]) for size in parts[1::2]]
    if any("[MASK" in text for text in texts):
        raise ValueError("a mask is written with its number of tokens: [MASK:12]")
    encoded = [writer.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    end = [mdlm.EOS] if sizes else []
    if sizes:
        writer.fits(1 + sum(map(len, encoded)) + sum(sizes) + len(end))
    ids = [mdlm.BOS]
    for text_ids, size in itertools.zip_longest(encoded, sizes, fillvalue=0):
        ids += text_ids + [mdlm.MASK] * size
    return ids + end, 0 if sizes else cfg.max_new


def write(writer, cfg, on_step=None):
    """(cfg.n texts of a prompt, number of tokens filled in all of them); on_step(i, ids of the first text so far).

    What does not fit one canvas is written in blocks from left to right: the last tokens of the text so far are the
    prompt of the next canvas, without BOS, as in training's crops from within a text.
    """
    ids, left = canvas(writer, cfg)
    text_BL, new = torch.tensor([ids]).expand(cfg.n, -1), ids.count(mdlm.MASK)
    block = cfg.block or (left if len(ids) + left <= writer.longest else writer.longest // 2)
    while True:
        size = min(left, block, writer.longest - 1)
        start = max(0, text_BL.shape[1] + size - writer.longest)
        before = text_BL[0, :start].tolist()
        watch = on_step and (lambda i, token_BL, before=before: on_step(i, before + token_BL[0].tolist()))
        filled_BL = writer.fill(F.pad(text_BL[:, start:], (0, size), value=mdlm.MASK), writer.rule(cfg), watch)
        if (filled_BL == mdlm.MASK).any():
            raise ValueError("the model's logits are not finite; export it again, or lower the learning rate it had")
        text_BL, left, new = torch.cat([text_BL[:, :start], filled_BL], 1), left - size, new + size
        if left <= 0 or (text_BL == mdlm.EOS).any(1).all():
            return [writer.tokenizer.decode(written(row)) for row in text_BL.tolist()], cfg.n * new


def written(ids):
    """What stands between BOS and EOS."""
    return ids[1 : ids.index(mdlm.EOS)] if mdlm.EOS in ids else ids[1:]


def show_step(writer, i, ids):
    """Print a text that is not full, masks as blocks."""
    groups = ((masked, list(group)) for masked, group in itertools.groupby(written(ids), lambda t: t == mdlm.MASK))
    text = "".join("\u2591" * len(group) if masked else writer.tokenizer.decode(group) for masked, group in groups)
    clear = "\x1b[2J\x1b[H" if sys.stdout.isatty() else ""
    print(f"{clear}step {i + 1}: {text}", flush=True)


def answer(writer, cfg):
    """Write cfg.n texts for a prompt and print them."""
    started = time.perf_counter()
    texts, new = write(writer, cfg, functools.partial(show_step, writer) if cfg.show_steps else None)
    seconds = time.perf_counter() - started
    for i, text in enumerate(texts, 1):
        print(text if len(texts) == 1 else f"---- {i}\n{text}", flush=True)
    print(f"{new} tokens in {seconds:.3f} s, {cfg.steps} steps, {writer.backend}", file=sys.stderr)


def interact(writer, cfg):
    """Answer prompts, a line each, until the end of input."""
    terminal = sys.stdin.isatty()
    if terminal:
        print("Write a beginning and press Enter; Ctrl-D ends.", file=sys.stderr)
    while True:
        try:
            line = input(">>> " if terminal else "")
        except (EOFError, KeyboardInterrupt):
            return
        if line:
            answer(writer, dataclasses.replace(cfg, prompt=line.replace("\\n", "\n")))


REQUEST = ("prompt", "max_new", "seed", "block", "steps", "sampler", "schedule", "temperature", "top_k", "top_p")


def read_request(cfg, line):
    """The settings of a JSON line, over those of the command line. ValueError says what is wrong with it."""
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the line is not JSON: {error}") from None
    if not isinstance(request, dict) or "prompt" not in request:
        raise ValueError('a request is a JSON object with the text "prompt"')
    for name, value in request.items():
        if name not in REQUEST:
            raise ValueError(f"{name!r} is not one of {', '.join(REQUEST)}")
        kind = type(getattr(cfg, name))
        if type(value) is not kind and (kind, type(value)) != (float, int):
            raise ValueError(f"{name} is {type(value).__name__}, not {kind.__name__}")
    request["prompt"].encode()  # half a surrogate pair is no text
    return check(dataclasses.replace(cfg, n=1, **request))


def serve(writer, cfg):
    """Answer JSON lines until the end of input or SIGTERM; a request without a seed meets other noise each time."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    write(writer, dataclasses.replace(cfg, prompt=" ", n=1))  # what comes first waits for libraries, and a capture
    print(f"ready: {writer.backend} on {writer.device}", file=sys.stderr, flush=True)
    for line in sys.stdin.buffer:
        started = time.perf_counter()
        try:
            request = read_request(dataclasses.replace(cfg, seed=writer.seed), line)
            writer.seed = request.seed
            (text,), tokens = write(writer, request)
            reply = {"text": text, "ms": round(1e3 * (time.perf_counter() - started), 2), "tokens": tokens}
        except ValueError as error:
            reply = {"error": str(error)}
        print(json.dumps(reply), flush=True)


# ---- benchmark -----------------------------------------------------------------------------------------------------


def first_line_of(*command):
    """First line of a command's output, or "" where it is not there."""
    if not shutil.which(command[0]):
        return ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        line = process.stdout.readline().strip()
        process.kill()  # tegrastats goes on for ever
    return line


def rail_mw(line):
    """{rail: milliwatts now} of a line of tegrastats, as in "VDD_IN 4761mW/4778mW", now and the mean so far."""
    return {rail: int(mw) for rail, mw in re.findall(r"\b(VDD_IN|VDD_CPU_GPU_CV) (\d+)mW", line)}


@contextlib.contextmanager
def mean_power():
    """Gives a dict that is filled at the end: the mean milliwatts of each rail, by tegrastats where it exists."""
    mean_mw = {}
    if not shutil.which("tegrastats"):
        yield mean_mw
        return
    # where it writes more than a pipe holds, half a minute, the mean is of what came first
    command = "tegrastats", "--interval", "200"
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield mean_mw
        finally:
            process.terminate()
        lines = [rail_mw(line) for line in process.stdout]
    for rail in {rail for line in lines for rail in line}:
        mean_mw[rail] = statistics.mean(line[rail] for line in lines if rail in line)


def device_state(device):
    """Name, power mode and clocks, where this machine tells them."""
    cpu = first_line_of("grep", "-m1", "model name", "/proc/cpuinfo").split(": ")[-1] or platform.machine()
    state = {"name": cpu, "cores": os.cpu_count(), "torch": torch.__version__}
    state["board"] = first_line_of("cat", "/proc/device-tree/model").strip("\0")
    if device.type == "cuda":
        state["name"] = torch.cuda.get_device_name(device)
        query = "--query-gpu=clocks.sm,clocks.mem,power.limit"
        state["clocks"] = first_line_of("nvidia-smi", query, "--format=csv,noheader")
    state["power_mode"] = first_line_of("nvpmodel", "-q")
    state["tegrastats"] = first_line_of("tegrastats", "--interval", "500")
    return {name: value for name, value in state.items() if value}


# GB/s of the data sheets, by what /proc/device-tree/model says
BANDWIDTH = {"AGX Thor": 273.0, "AGX Orin": 204.8, "Orin NX": 102.4, "Orin Nano": 68.3}


def peak_gb_s(device, state):
    """Memory bandwidth of the data sheet or of the driver's clock and bus width; 0 where it is not known."""
    if device.type != "cuda":
        return 0.0
    for name, gb_s in BANDWIDTH.items():
        if name in state.get("board", ""):
            # the memory of an Orin Nano runs faster at 25 W and MAXN than at 15 W
            fast = name == "Orin Nano" and re.search("MAXN|25W", state.get("power_mode", ""))
            return 102.4 if fast else gb_s
    properties = torch.cuda.get_device_properties(device)
    return 2e-6 * getattr(properties, "memory_clock_rate", 0) * getattr(properties, "memory_bus_width", 0) / 8


def bytes_per_step(model, B, L, size):
    """Least bytes of a step: weights of blocks, norms and head once, logits written and read; `size` bytes a number."""
    weights = sum(p.numel() for name, p in model.named_parameters() if name.startswith(("blocks", "norm")))
    return size * (weights + model.cfg.vocab * model.cfg.width + 2 * B * L * model.cfg.vocab)


def benchmark(writer):
    """Time canvases of masks of all sizes asked for; tokens are those filled. Prints a table and writes it as JSON."""
    cfg, device, cuda = writer.cfg, writer.device, writer.device.type == "cuda"
    state = device_state(device)
    peak, rows = peak_gb_s(device, state), []
    print(json.dumps(state))
    print("length  steps  batch    tokens/s   ms/step   GB/s  of peak  memory MB")
    for L, steps, B in itertools.product(cfg.lengths, cfg.steps_list, cfg.batches):
        token_BL = torch.tensor([mdlm.BOS] + [mdlm.MASK] * (L - 1)).expand(B, -1)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        # three samples of warm-up: the first captures the step
        seconds, rule = [], dataclasses.replace(writer.rule(cfg), steps=steps)
        for _ in range(3):
            writer.fill(token_BL, rule)
        with mean_power() as mean_mw:
            for _ in range(cfg.repeats):
                started = time.perf_counter()
                writer.fill(token_BL, rule)
                seconds.append(time.perf_counter() - started)
        graph = any(denoiser.graph for denoiser in writer.denoisers.values())
        writer.denoisers.clear()  # their buffers are no part of the next row's memory
        # speed, and what share of the memory's bandwidth it needs at least
        median = statistics.median(seconds)
        rates = np.percentile([B * (L - 1) / s for s in seconds], [10, 90])
        moved = bytes_per_step(writer.model, B, L, 2 if cuda else 4) * steps / median / 1e9
        host_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        memory = torch.cuda.max_memory_allocated() if cuda else host_bytes
        row = {
            "length": L, "steps": steps, "batch": B, "tok_per_s": B * (L - 1) / median, "spread": rates.tolist(),
            "ms_per_step": 1e3 * median / steps, "gb_s": moved, "peak_gb_s": peak or None, "memory_mb": memory / 1e6,
            "graph": graph, "mj_per_token": {rail: mw * median / (B * (L - 1)) for rail, mw in mean_mw.items()},
        }  # fmt: skip
        rows.append(row)
        share = f"{moved / peak:8.0%}" if peak else "        "
        print(f"{L:6} {steps:6} {B:6} {row['tok_per_s']:11,.0f} {row['ms_per_step']:9.3f} {moved:6.1f} {share} "
              f"{row['memory_mb']:10,.0f}", flush=True)  # fmt: skip
        if row["mj_per_token"]:  # all that the board draws, idle power included
            print("  millijoules a token:", ", ".join(f"{r} {mj:.3g}" for r, mj in row["mj_per_token"].items()))
    out = Path(cfg.out or writer.folder / "benchmark.json")
    about = {"device": state, "device_after": device_state(device)}  # clocks fall when a board gets hot
    sampler = "sort" if writer.sample_ is sample_sorted_ else "fused"
    sampler = sampler if writer.captures else "loop of model_mdlm.py"
    about |= {"backend": writer.backend, "sampler": sampler, "rows": rows}
    out.write_text(json.dumps(about, indent=2) + "\n")
    print(f"wrote {out}: {writer.backend}; all steps included, three samples of warm-up excluded")


# ---- main ----------------------------------------------------------------------------------------------------------


# what settings may be, at least and at most; a larger one would hold up a server, or overflow
RANGES = {
    "max_new": (1, 2**62), "block": (0, 2**62), "steps": (1, 10_000), "temperature": (0, 100), "top_k": (0, 2**31 - 1),
    "top_p": (1e-9, 1), "n": (1, 10_000), "seed": (0, 2**62), "repeats": (1, 10_000),
}  # fmt: skip


def check(cfg):
    """The settings, none of which fails late or draws nonsense; ValueError names the first that would."""
    names = {"backend": BACKENDS, "sampler": SAMPLERS, "schedule": (*diffusion.SCHEDULES, "even")}
    for name, known in (names | {"device": ("", "cpu", "cuda")}).items():
        if getattr(cfg, name) not in known:
            raise ValueError(f"--{name}={getattr(cfg, name)}: not one of {', '.join(filter(None, known))}")
    for name, (least, most) in RANGES.items():
        if not least <= getattr(cfg, name) <= most:
            raise ValueError(f"--{name}={getattr(cfg, name)}: not in {least:,} .. {most:,}")
    if min((*cfg.steps_list, *cfg.batches)) < 1 or min(cfg.lengths) < 2:
        raise ValueError("--lengths at least 2, --steps_list and --batches at least 1")
    if cfg.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device=cuda: torch sees no GPU")
    return cfg


def main(cfg):
    writer = Writer(check(cfg))
    if cfg.benchmark:
        benchmark(writer)
    elif cfg.serve:
        serve(writer, cfg)
    elif cfg.prompt:
        answer(writer, dataclasses.replace(cfg, prompt=cfg.prompt.replace("\\n", "\n")))
    else:
        interact(writer, cfg)


if __name__ == "__main__":
    try:
        main(command_line())
    except KeyboardInterrupt:
        sys.exit(130)
    except (OSError, ValueError) as error:
        sys.exit(str(error))
