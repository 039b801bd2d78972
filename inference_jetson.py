"""Generate text with MDLM, on a CPU, a CUDA GPU or a Jetson. Asks a model.

    python inference_jetson.py --prompt="Once upon a time" --show_steps
    python inference_jetson.py                                      # an interactive prompt
    python inference_jetson.py --prompt="One day, [MASK:30] They were happy."    # a hole
    python inference_jetson.py --bundle=out/stories --prompt="Once"    # newest checkpoint of a run
    python inference_jetson.py --prompt="Once" --max_new=1000       # longer than a canvas

Reads a bundle of export_jetson.py, a run folder of train_gpu.py, or one of its step_<n>/; without
any of them weights/mdlm. Needs Python 3.10, torch 2.4 or newer, tokenizers and numpy, and beside it
model_mdlm.py, diffusion.py and csrc/. It serves no requests; extra/serve.py is for the JAX models.

On a GPU all steps of a text (model, sampling, update) are captured as one CUDA graph, which later
texts replay by a single launch. More than 64 steps, or steps that are shown, are replayed one by
one. What differs between steps lies in tables on the device, and the host synchronises once per
text. `python setup_kernels.py build_ext --inplace` builds the kernels: --backend=auto uses all of
them, the other backends the sampler alone. Without them a step is plain PyTorch, captured as well.
On a CPU the loop is that of model_mdlm.py, in float32.

Timing: python bench/bench_jetson.py --bundle=out/jetson, after sudo nvpmodel -m 0 (15 W) and sudo
jetson_clocks. Builds of torch for a Jetson: requirements-jetson.txt.

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


def setting(default, text, choices=None, limits=None):
    """A field of Config: default, help, the values argparse allows, the range `check` allows."""
    metadata = {"help": text, "choices": choices, "limits": limits}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Config:
    bundle: str = setting("", "bundle, run or checkpoint; if empty out/jetson, else weights/mdlm")
    prompt: str = setting("", "text to continue, \\n a new line, [MASK:n] n tokens; empty: asks")
    n: int = setting(1, "completions of a prompt, as a batch", limits=(1, 10_000))
    max_new: int = setting(64, "tokens to add to a prompt without [MASK:n]", limits=(1, 2**62))
    steps: int = setting(64, "denoising steps; 25 take 0.4 of the time", limits=(1, 10_000))
    temperature: float = setting(0.8, "0 takes the argmax", limits=(0, 100))

    sampler: str = setting("ancestral", "order: at random, or by highest confidence", SAMPLERS)
    schedule: str = setting("cosine_sq", "how many tokens each step unmasks", SCHEDULES)
    top_k: int = setting(0, "sample from the k likeliest tokens; 0: all", limits=(0, 2**31 - 1))
    top_p: float = setting(
        0.9, "sample from the smallest set of this probability", limits=(1e-9, 1)
    )
    seed: int = setting(0, "random seed", limits=(0, 2**62))
    show_steps: bool = setting(False, "show the text after every step")
    backend: str = setting("auto", "auto: kernels if they run here, else torch", BACKENDS)
    device: str = setting("", "if empty cuda where there is one", ("cpu", "cuda"))
    graph: bool = setting(True, "capture the steps as a CUDA graph")


def command_line(arguments=None):
    """Config from --name=value or --name value. By argparse: the device needs no other package."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    group = parser
    for field in dataclasses.fields(Config):
        if field.name == "sampler":
            group = parser.add_argument_group("sampling and device")
        flags = dict.fromkeys([f"--{field.name}", f"--{field.name.replace('_', '-')}"])
        options = {"dest": field.name, "default": field.default, "help": field.metadata["help"]}
        if field.type is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["help"] += " (default: %(default)s)"
            options["type"] = field.type
            options["choices"] = field.metadata["choices"]
        group.add_argument(*flags, **options)
    return Config(**vars(parser.parse_args(arguments)))


def check(cfg):
    """The settings. Raises ValueError for the first value that is out of its range."""
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        limits = field.metadata["limits"]
        if limits and not limits[0] <= value <= limits[1]:
            raise ValueError(f"--{field.name}={value}: not in {limits[0]:,} .. {limits[1]:,}")
    return cfg


def first_line(error):
    return str(error).splitlines()[0]


# ---- the bundle ----------------------------------------------------------------------------------


def find_bundle(bundle):
    """The folder of --bundle, the newest step_<n>/ of a run; by default out/jetson or SHIPPED."""
    folder = Path(bundle or "out/jetson")
    if not bundle and not folder.exists():
        print("no out/jetson: using weights/mdlm, a small model", file=sys.stderr)
        return SHIPPED
    steps = {int(path.name[5:]): path for path in folder.glob("step_*") if path.name[5:].isdigit()}
    if steps:
        return steps[max(steps)]
    return folder


def read_bundle(folder):
    """bundle.json. Raises FileNotFoundError, or ValueError that says what is wrong with it.

    A checkpoint, as model_mdlm.save writes it, is a bundle without bundle.json, sizes and digests.
    """
    export = f"python export_jetson.py --out={folder}"
    if not (folder / "bundle.json").exists():
        names = "config.json", "model.safetensors", "tokenizer.json"
        for name in names:
            if not (folder / name).exists():
                raise FileNotFoundError(
                    f"{folder} holds no MDLM: it has no {name}; export_jetson.py writes one"
                )
        return {"files": dict.fromkeys(names)}
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
    """The bytes of a file of the bundle. Raises FileNotFoundError, or ValueError by its digest."""
    path = folder / name
    if name not in about["files"]:
        raise FileNotFoundError(
            f"the bundle holds no {name}; "
            "export_jetson.py writes it, model.trt with --tensorrt --bundle=..."
        )
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; copy the folder again")
    data = path.read_bytes()
    want = about["files"][name]
    if want and hashlib.sha256(data).hexdigest() != want["sha256"]:
        raise ValueError(f"{path} is damaged: its SHA-256 is another; copy it again")
    return data


def read_model(folder, about):
    """The MDLM of a bundle or checkpoint, in float32 on the CPU."""
    config = read_file(folder, about, "config.json")
    weights = read_file(folder, about, "model.safetensors")
    try:
        return mdlm.build(config, weights).eval()
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{folder} holds no MDLM that this version reads: {error}; copy it again"
        ) from None


# ---- one denoising step, of one shape ------------------------------------------------------------


def fused_forward(model, rate_N, kernels):
    """forward(token_BL, see_BL or None, step_1) -> logits [B, L, V], from fused operators.

    `kernels` has attention, add_norm and bias_gelu. The time embeddings of all steps are computed
    here, once.
    """
    cfg = model.cfg
    time_ND = model.time_embedding(rate_N)[:, 0]
    # Learned positions are added to the tokens; attention applies rotary ones to queries and keys.
    if cfg.rope:
        position_PD = model.embed.weight.new_zeros(cfg.positions, cfg.width)
        cos_sin = mdlm.angles(cfg.positions, cfg.width // cfg.heads, position_PD.device)
        cos_sin_PK = torch.cat(cos_sin, -1)
    else:
        position_PD = model.position.weight
        cos_sin_PK = None
    # Every residual sum is followed by a norm: the one inside the block, or the next block's first.
    norms = []
    for block in model.blocks:
        norms += [block.norm1, block.norm2]
    norms.append(model.norm)

    def add_norm(x_BLD, residual_BLD, norm):
        """(x + residual, LayerNorm of it) in one launch."""
        return kernels.add_norm(x_BLD, residual_BLD, norm.weight, norm.bias, norm.eps)

    def forward(token_BL, see_BL, step_1):
        B, L = token_BL.shape
        # Positions and the step's time embedding are the first residual.
        position_LD = position_PD[:L] + time_ND.index_select(0, step_1)
        position_BLD = position_LD.expand(B, L, -1).contiguous()
        cos_sin_LK = cos_sin_PK[:L] if cfg.rope else None
        h_BLD, n_BLD = add_norm(model.embed(token_BL), position_BLD, norms[0])
        for i, block in enumerate(model.blocks):
            qkv_BL3HK = block.qkv(n_BLD).view(B, L, 3, block.heads, -1)
            o_BLD = kernels.attention(qkv_BL3HK, see_BL, cos_sin_LK)
            h_BLD, n_BLD = add_norm(block.out(o_BLD), h_BLD, norms[2 * i + 1])
            # The bias of the first layer goes into the fused GELU.
            f_BLF = kernels.bias_gelu(F.linear(n_BLD, block.fc1.weight), block.fc1.bias)
            h_BLD, n_BLD = add_norm(block.fc2(f_BLF), h_BLD, norms[2 * i + 2])
        return model.logits(n_BLD)

    return forward


def graph_forward(run, rate_N):
    """forward(token_BL, see_BL, step_1) of a graph run(token, noise, see), which embeds noise."""

    def forward(token_BL, see_BL, step_1):
        rate_B = rate_N.index_select(0, step_1).expand(len(token_BL)).contiguous()
        return run(token_BL, rate_B, see_BL)

    return forward


def sample_fused_(logits_RV, token_BL, state_2, keep_N, ban, rule):
    """One ancestral step in place by csrc/sampler.cu; random numbers are Philox of state_2."""
    torch.ops.unmask.sample_(
        logits_RV,
        token_BL,
        state_2,
        keep_N,
        ban,
        mdlm.MASK,
        rule.vocab,
        rule.temperature,
        rule.top_k,
        rule.top_p,
    )


def sample_sorted_(logits_RV, token_BL, state_2, keep_N, ban, rule):
    """The same in PyTorch operators of fixed shapes, for capture; torch's own random numbers."""
    race_RV = logits_RV[:, : rule.vocab].float().index_fill(1, ban.long(), -torch.inf)
    best_R1 = race_RV.argmax(-1, keepdim=True)
    if rule.temperature > 0:
        # Likeliest first: column k - 1 holds the k-th logit, and a running sum is that of all
        # likelier ids.
        race_RV = race_RV / (rule.temperature + diffusion.COLDEST)
        race_RV, id_RV = race_RV.sort(-1, descending=True)
        if 0 < rule.top_k < rule.vocab:
            least_R1 = race_RV[:, rule.top_k - 1 : rule.top_k]
            race_RV = race_RV.masked_fill(race_RV < least_R1, -torch.inf)
        if rule.top_p < 1:
            prob_RV = race_RV.softmax(-1)
            likelier_RV = prob_RV.cumsum(-1) - prob_RV
            race_RV = race_RV.masked_fill(likelier_RV >= rule.top_p, -torch.inf)
        # -log of an exponential is Gumbel noise: the argmax of the sum is a draw from the softmax.
        race_RV = race_RV - torch.empty_like(race_RV).exponential_().log()
        best_R1 = id_RV.gather(1, race_RV.argmax(-1, keepdim=True))
    # Every row is drawn, as shapes are fixed; ancestral_step uses those that are unmasked now.
    token_R = token_BL.view(-1)
    u_R = torch.rand_like(race_RV[:, 0])
    keep_1 = keep_N.index_select(0, state_2[1:])
    next_R = diffusion.ancestral_step(token_R, best_R1[:, 0], u_R, keep_1, mdlm.MASK)
    # A row without any finite logit keeps its mask, which `write` reports.
    token_R.copy_(torch.where(race_RV.amax(-1) > -torch.inf, next_R, token_R))


class Denoiser:
    """Fills canvases of one shape [B, L] in N steps, over buffers at fixed addresses.

    forward(token_BL, see_BL, step_1) gives logits; sample_ fills in place. state_2 = (seed, step)
    and the tables of all steps lie on the device: the same launches serve every step, and one step
    or all can be captured as a CUDA graph. `rule` is the Sampling of model_mdlm.py and means the
    same.
    """

    def __init__(self, forward, sample_, B, L, keep_N, rule, device):
        self.forward = forward
        self.sample_ = sample_
        self.rule = rule
        self.steps = len(keep_N)
        self.ancestral = rule.sampler == "ancestral"
        # A graph replays on these addresses. State, canvas and the number of tokens that each step
        # unmasks in each row are one buffer: one copy to the device and one back, from and to
        # pinned memory.
        sizes = 2, B * L, self.steps * B
        self.on_device = torch.full((sum(sizes),), mdlm.MASK, device=device)
        self.host = torch.full((sum(sizes),), mdlm.MASK)
        if device.type == "cuda":
            self.host = self.host.pin_memory()
        self.state_2, token, counts = self.on_device.split(sizes)
        self.state_2.zero_()
        self.token_BL = token.view(B, L)
        self.count_NB = counts.view(self.steps, B)
        self.see_BL = torch.ones(B, L, dtype=torch.bool, device=device)
        # by confidence: every mask is drawn, and count_NB says how many of the draws a step keeps
        self.keep_N = keep_N.to(device)
        if not self.ancestral:
            self.keep_N = torch.zeros_like(self.keep_N)
        self.ban = torch.tensor(mdlm.BANNED, dtype=torch.int32, device=device)
        self.graph = None
        self.together = 1  # steps of the graph

    def step(self):
        rule = self.rule
        step_1 = self.state_2[1:]
        logits_RV = self.forward(self.token_BL, self.see_BL, step_1).flatten(0, 1)
        token_BL = self.token_BL if self.ancestral else self.token_BL.clone()
        self.sample_(logits_RV, token_BL, self.state_2, self.keep_N, self.ban, rule)
        if not self.ancestral:
            # Keep the drawn tokens at the positions of highest confidence, by the raw distribution.
            allowed_RV = logits_RV[:, : rule.vocab].float()
            allowed_RV = allowed_RV.index_fill(1, self.ban.long(), -torch.inf)
            score_R = diffusion.confidence(allowed_RV.softmax(-1), rule.sampler)
            score_BL = score_R.view(token_BL.shape)
            count_B = self.count_NB.index_select(0, step_1)[0]
            token_BL = diffusion.unmask_top(self.token_BL, token_BL, score_BL, count_B, mdlm.MASK)
            self.token_BL.copy_(token_BL)
        step_1.add_(1)

    def capture(self, together):
        """Record `together` steps as a CUDA graph, or one if they do not fit, else ValueError."""
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
                self.graph = graph
                self.together = steps
                return
            except (RuntimeError, ValueError) as error:
                why = first_line(error)
        # the stream may be left broken
        raise ValueError(f"CUDA graph: {why}; run with --no-graph, which is slower")

    @torch.inference_mode()
    def __call__(self, token_BL, seed, on_step=None):
        """The canvases filled, on the CPU; tokens but MASK stay. on_step as in mdlm.sample."""
        count_NB = torch.zeros(self.count_NB.shape, dtype=torch.long)
        if not self.ancestral:
            masks_B = (token_BL == mdlm.MASK).sum(1).numpy()
            count_NB = diffusion.step_counts(masks_B, self.steps, self.rule.schedule)
            count_NB = torch.from_numpy(count_NB)
        given = [torch.tensor([seed, 0]), token_BL.flatten(), count_NB.flatten()]
        self.host.copy_(torch.cat(given))
        self.on_device.copy_(self.host, non_blocking=True)
        torch.manual_seed(seed)  # what sample_sorted_ draws from
        torch.ne(self.token_BL, mdlm.PAD, out=self.see_BL)
        # The step number is on the device: no copy from the host.
        for i in range(0, self.steps, self.together):
            if self.graph:
                self.graph.replay()
            else:
                self.step()
            if on_step:
                on_step(i, self.token_BL.to("cpu", copy=True))
        self.host.copy_(self.on_device)  # the only synchronisation
        return self.host[2 : 2 + token_BL.numel()].view(token_BL.shape).clone()


class GraphModel:
    """A graph run(token, noise, see) as the model of mdlm.sample, which asks both, one by one."""

    def __init__(self, run):
        self.run = run

    def hidden(self, *inputs):
        return self.run(*inputs).float()

    def logits(self, hidden):
        return hidden


# ---- backends ------------------------------------------------------------------------------------

PLAIN = types.SimpleNamespace(
    attention=ops.attention_torch,
    add_norm=ops.add_norm_torch,
    bias_gelu=ops.bias_gelu_torch,
)


def why_no_sampler(vocab, device):
    """The reason why the fused sampler, which serves every backend, cannot run here, or ""."""
    if vocab > 16384:
        return f"the sampler takes 16,384 ids, this model has {vocab:,}"
    return ops.why_not(device)


def why_no_kernels(config, vocab, device):
    """The reason why the kernels cannot run this model on this device, or ""."""
    head = config.width // config.heads
    too_large = config.width > ops.MAX_WIDTH or config.positions > ops.MAX_LENGTH
    if too_large or head != ops.HEAD or config.ffn % 8:
        return (
            f"the kernels are for heads of {ops.HEAD}, widths to {ops.MAX_WIDTH}, "
            f"{ops.MAX_LENGTH} positions, a multiple of 8 as ffn; "
            f"this model has {head}, {config.width}, {config.positions}, {config.ffn}"
        )
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
        given = {"token": token, "noise": noise, "see": see}
        given = {name: tensor.cpu().numpy() for name, tensor in given.items()}
        return torch.from_numpy(session.run(None, given)[0]).to(token.device)

    return run


def run_tensorrt(data, built):
    """run(token, noise, see) -> logits of an engine; built: what bundle.json says of it."""
    try:
        import tensorrt as trt
    except ImportError:
        advice = "apt install python3-libnvinfer"
        raise ValueError(f"--backend=tensorrt needs JetPack's module: {advice}") from None
    there = f"TensorRT {built['version']} on {built['gpu']}"
    here = f"TensorRT {trt.__version__} on {torch.cuda.get_device_name()}"
    runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))
    engine = runtime.deserialize_cuda_engine(data) if there == here else None
    if engine is None:
        raise ValueError(
            f"model.trt is of {there}, this is {here}; "
            "build: export_jetson.py --tensorrt --bundle=..."
        )
    context = engine.create_execution_context()
    vocab = engine.get_tensor_shape("logits")[-1]

    def run(token, noise, see):
        given = {"token": token, "noise": noise, "see": see}
        logits_BLV = torch.empty(*token.shape, vocab, dtype=torch.float16, device=token.device)
        for i in range(engine.num_io_tensors):
            name = engine.get_tensor_name(i)
            if name in given:
                context.set_input_shape(name, tuple(given[name].shape))
            context.set_tensor_address(name, given.get(name, logits_BLV).data_ptr())
        if not context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
            raise ValueError(
                f"TensorRT did not run model.trt on {[*token.shape]} tokens; "
                "its own messages are above"
            )
        return logits_BLV

    run.engine = engine  # lives as long as the function
    return run


class Writer:
    """The model of a bundle on a device, run by one backend; see `fill`."""

    def __init__(self, cfg):
        self.cfg = cfg
        self.folder = find_bundle(cfg.bundle)
        about = read_bundle(self.folder)
        self.device = torch.device(cfg.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        try:
            torch.ones(1, device=self.device)
        except RuntimeError as error:  # such as: no kernel image is available
            raise ValueError(f"{first_line(error)}: see requirements-jetson.txt") from None
        self.model = read_model(self.folder, about)
        tokenizer = read_file(self.folder, about, "tokenizer.json").decode()
        self.tokenizer = tokenizers.Tokenizer.from_str(tokenizer)
        self.tokenizer.encode_special_tokens = True  # names of special tokens in a prompt are text
        self.vocab = 1 + max(self.tokenizer.get_vocab().values(), default=0)
        if self.vocab > self.model.cfg.vocab:
            raise ValueError(
                f"tokenizer.json has ids up to {self.vocab - 1}, "
                f"the model has {self.model.cfg.vocab}"
            )
        self.backend = self.choose_backend()
        self.longest = self.model.cfg.positions  # of a canvas
        self.length = 0  # of every canvas of an engine
        self.run = self.read_graph(about)
        if not self.run:  # FP16 on a GPU, float32 on a CPU, where halves are slow
            dtype = torch.float16 if self.device.type == "cuda" else torch.float32
            self.model.to(self.device, dtype)
        self.captures = self.device.type == "cuda" and self.backend != "onnx"
        no_sampler = why_no_sampler(self.vocab, self.device)
        self.sample_ = sample_sorted_ if no_sampler else sample_fused_
        if self.captures and no_sampler and cfg.backend != "auto":  # choose_backend has printed it
            print(f"sampler: {no_sampler}; using PyTorch's sort", file=sys.stderr)
        self.seed = cfg.seed
        self.denoisers = {}

    def read_graph(self, about):
        """The graph that replaces the model, with weights of its own; None where there is none."""
        if self.backend == "torchscript":
            data = io.BytesIO(read_file(self.folder, about, "model_jetson.pt"))
            try:
                return torch.jit.load(data, map_location=self.device)
            except RuntimeError as error:
                raise ValueError(
                    f"torch {torch.__version__} cannot load model_jetson.pt, "
                    f"written by torch {about['torch']}; export it on this machine "
                    f"({first_line(error)})"
                ) from None
        if self.backend == "onnx":
            return run_onnx(read_file(self.folder, about, "model.onnx"))
        if self.backend == "tensorrt":
            if self.device.type != "cuda":
                raise ValueError("--backend=tensorrt needs a CUDA device")
            plan = read_file(self.folder, about, "model.trt")
            self.length = about["tensorrt"]["length"]
            self.longest = self.length
            return run_tensorrt(plan, about["tensorrt"])
        return None

    def rule(self, cfg):
        """The sampling rule of the settings."""
        return mdlm.Sampling(
            sampler=cfg.sampler,
            steps=cfg.steps,
            schedule=cfg.schedule,
            temperature=cfg.temperature,
            top_k=cfg.top_k,
            top_p=cfg.top_p,
            vocab=self.vocab,
        )

    def choose_backend(self):
        """The backend asked for; "auto": kernels where they run, else torch; a GPU says why."""
        if self.cfg.backend not in ("auto", "kernels"):
            return self.cfg.backend
        reason = why_no_kernels(self.model.cfg, self.vocab, self.device)
        if reason and self.cfg.backend == "kernels":
            raise ValueError(f"--backend=kernels: {reason}")
        if reason and self.device.type == "cuda":
            print(f"kernels: {reason}; using PyTorch", file=sys.stderr)
        return "torch" if reason else "kernels"

    def denoiser(self, B, L, rule, watched=False):
        """The Denoiser of this shape and rule, captured at first use; eight are kept.

        A graph holds all steps of a text, or one if `watched` (steps are shown) or more than
        MOST_TOGETHER.
        """
        together = 1 if watched or rule.steps > MOST_TOGETHER else rule.steps
        key = B, L, rule, together
        if key in self.denoisers:
            return self.denoisers[key]
        rate_N, keep_N = mdlm.step_tables(rule.steps, rule.schedule)
        rate_N = rate_N.to(self.device)
        with torch.inference_mode():
            if self.run:
                forward = graph_forward(self.run, rate_N)
            elif self.backend == "kernels":
                forward = fused_forward(self.model, rate_N, torch.ops.unmask)
            else:
                forward = fused_forward(self.model, rate_N, PLAIN)
            denoiser = Denoiser(forward, self.sample_, B, L, keep_N, rule, self.device)
            if self.cfg.graph:
                denoiser.capture(together)
        if len(self.denoisers) == 8:  # they hold memory
            del self.denoisers[next(iter(self.denoisers))]
        self.denoisers[key] = denoiser
        return denoiser

    def fits(self, L):
        """Raises ValueError for a canvas that is too long."""
        if L > self.model.cfg.positions:
            raise ValueError(
                f"{L:,} tokens do not fit the model's {self.model.cfg.positions} positions"
            )
        if L > self.longest:
            raise ValueError(
                f"the engine takes up to {self.longest} tokens, not {L}; build another: "
                f"python export_jetson.py --tensorrt --bundle={self.folder} --length={L}"
            )

    def fill_captured(self, token_BL, rule, on_step=None):
        """Pads canvases to a multiple of 32, or to the engine's length, for few captures."""
        L = token_BL.shape[1]
        room = self.length or min(-(-L // 32) * 32, self.longest)
        token_BL = F.pad(token_BL, (0, room - L), value=mdlm.PAD)
        filled = []
        # An engine takes one row at a time; the first of them is watched.
        for rows_BL in token_BL.split(1 if self.length else len(token_BL)):
            denoiser = self.denoiser(*rows_BL.shape, rule, bool(on_step))
            filled.append(denoiser(rows_BL, self.seed + len(filled), on_step))
            on_step = None
        return torch.cat(filled)[:, :L]

    def fill(self, token_BL, rule, on_step=None):
        """token_BL int64 [B, L] on the CPU, filled; on_step(i, token_BL) follows each step.

        Every call uses another seed. Raises ValueError if memory runs out.
        """
        B, L = token_BL.shape
        self.fits(L)
        try:
            if self.captures:
                return self.fill_captured(token_BL, rule, on_step)
            # On a CPU, and for ONNX, the loop of model_mdlm.py: it computes logits only where it
            # unmasks.
            model = GraphModel(self.run) if self.run else self.model
            generator = torch.Generator(self.device).manual_seed(self.seed)
            return mdlm.sample(model, token_BL.to(self.device), rule, generator, on_step).cpu()
        except RuntimeError as error:
            # The last two are a Jetson's.
            if not re.search("out of memory|allocate memory|NvMap|NVML", str(error)):
                raise
            raise ValueError(
                f"out of memory at batch {B}, length {L}: lower --n or --max_new"
            ) from None
        finally:
            self.seed += B


# ---- text ----------------------------------------------------------------------------------------


def canvas(writer, cfg):
    """(token ids of a prompt's canvas, number of masks to append if it has none of its own).

    BOS, text, n masks for each [MASK:n]; EOS at the end of a prompt with masks.
    """
    pieces = re.split(r" ?\[MASK:(\d+)\]", cfg.prompt)
    texts = pieces[::2]
    sizes = list(map(int, pieces[1::2]))
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
    text so far are the prefix of the next canvas, without BOS. on_step(i, ids) follows each step:
    the ids of the first text so far.
    """
    ids, left = canvas(writer, cfg)
    text_BL = torch.tensor([ids]).expand(cfg.n, -1)
    new = ids.count(mdlm.MASK)
    block = left if len(ids) + left <= writer.longest else writer.longest // 2
    while True:
        size = min(left, block, writer.longest - 1)
        start = max(0, text_BL.shape[1] + size - writer.longest)
        canvas_BL = F.pad(text_BL[:, start:], (0, size), value=mdlm.MASK)
        prefix = text_BL[0, :start].tolist()

        def on_canvas(i, token_BL, prefix=prefix, length=canvas_BL.shape[1]):
            on_step(i, prefix + token_BL[0, :length].tolist())

        filled_BL = writer.fill(canvas_BL, writer.rule(cfg), on_canvas if on_step else None)
        if (filled_BL == mdlm.MASK).any():
            raise ValueError(
                "the model's logits are not finite; export it again, or train with a lower --lr"
            )
        text_BL = torch.cat([text_BL[:, :start], filled_BL], 1)
        left -= size
        new += size
        if left <= 0 or (text_BL == mdlm.EOS).any(1).all():
            rows = [text_ids(row, cfg.prompt) for row in text_BL.tolist()]
            texts = [writer.tokenizer.decode(row) for row in rows]
            return texts, cfg.n * new


def text_ids(ids, prompt=""):
    """The ids between BOS and EOS; an EOS in a hole of the prompt ends nothing."""
    if mdlm.EOS in ids and "[MASK:" not in prompt:
        return ids[1 : ids.index(mdlm.EOS)]
    return ids[1:]


class StepViewer:
    """Prints the first text after each step, masks as blocks; new ones are green."""

    def __init__(self, writer, cfg):
        self.writer = writer
        self.prompt = cfg.prompt
        self.before, _ = canvas(writer, cfg)

    def __call__(self, i, ids):
        before = self.before + [mdlm.MASK] * (len(ids) - len(self.before))  # with a new block
        self.before = ids
        tokens = text_ids(ids, self.prompt)
        in_terminal = sys.stdout.isatty()

        def kind(p):
            return tokens[p] == mdlm.MASK, before[p + 1] == mdlm.MASK  # BOS is position 0

        # Neighbours of one kind are decoded together.
        text = ""
        for (is_masked, was_masked), group in itertools.groupby(range(len(tokens)), kind):
            group_ids = [tokens[p] for p in group]
            if is_masked:
                text += "\u2591" * len(group_ids)
            elif was_masked and in_terminal:
                text += f"\x1b[32m{self.writer.tokenizer.decode(group_ids)}\x1b[39m"
            else:
                text += self.writer.tokenizer.decode(group_ids)
        if in_terminal:
            text = f"\x1b[2J\x1b[H{text}"
        print(f"step {i + 1}: {text}", flush=True)


def answer(writer, cfg):
    """Generate cfg.n texts for a prompt and print them."""
    started = time.perf_counter()
    cfg = dataclasses.replace(cfg, prompt=cfg.prompt.replace("\\n", "\n"))
    viewer = StepViewer(writer, cfg) if cfg.show_steps else None
    texts, new = write(writer, cfg, viewer)
    seconds = time.perf_counter() - started
    for i, text in enumerate(texts, 1):
        print(text if len(texts) == 1 else f"---- {i}\n{text}", flush=True)
    print(f"{new} tokens in {seconds:.3f} s, {cfg.steps} steps, {writer.backend}", file=sys.stderr)


def interact(writer, cfg):
    """Answer prompts, one per line, until the end of input."""
    terminal = sys.stdin.isatty()
    if terminal:
        print("Write a beginning and press Enter; Ctrl-D ends.", file=sys.stderr)
    while True:
        try:
            # what is not UTF-8 ends the session, as it would fail again
            line = input(">>> " if terminal else "")
        except EOFError:
            return
        try:
            if line:
                answer(writer, dataclasses.replace(cfg, prompt=line))
        except ValueError as error:  # of this prompt
            print(error, file=sys.stderr)


# ---- main ----------------------------------------------------------------------------------------


def main(cfg):
    writer = Writer(check(cfg))
    if cfg.prompt:
        answer(writer, cfg)
    else:
        interact(writer, cfg)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it silently
    try:
        main(command_line())
    except KeyboardInterrupt:
        sys.exit(130)
    except (OSError, ValueError, ImportError) as error:
        sys.exit(str(error))
