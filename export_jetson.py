"""Export a trained MDLM for a Jetson: a folder with FP16 weights and graphs. Reads the disk.

    python export_jetson.py --ckpt=out/stories           # the newest checkpoint; half a minute
    python export_jetson.py --ckpt=out/stories --int8    # matrices in 8 bits: half the file
    python export_jetson.py --tensorrt --bundle=out/jetson --length=64    # on the Jetson: an engine

Reads a run folder of train_gpu.py or one of its step_<n>/. Writes --out: bundle.json, config.json,
tokenizer.json, model.safetensors (FP16: what inference_jetson.py reads by default), model_jetson.pt
(TorchScript), model.onnx, and model.trt. Each is read back as inference_jetson.py does, run on
canvases of several lengths, and compared with the float32 model. A graph that cannot be written
costs one line, not the bundle. It trains nothing and measures no speed.

Runs on Python 3.10 and torch 2.4 or newer. ONNX comes from torch.export with torch 2.9 or newer,
from TorchScript with an older one, whose torch.export fixes batch and length or mixes types.

All graphs take token [B, L] int64, noise [B] float32 = P(masked), see [B, L] bool (False for PAD),
and give float16 logits [B, L, V]. Letters: B batch, L length, P positions, D width, K head size, V
vocabulary.
"""

import contextlib
import dataclasses
import hashlib
import importlib.util
import io
import logging
import math
import unittest.mock
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import inference_jetson
import model_mdlm as mdlm
import runs
from runs import Count, Natural


@dataclasses.dataclass(frozen=True)
class Config:
    ckpt: str = "out/train_gpu"  # run folder of train_gpu.py, or a checkpoint
    step: Natural = 0  # checkpoint of the run; 0: the newest
    out: str = "out/jetson"  # folder to write; replaces an earlier bundle
    # quantise matrices in model.safetensors: half the file; the device dequantises them on loading
    int8: bool = False
    torchscript: bool = True  # write model_jetson.pt
    # write model.onnx; needs the packages onnx and onnxscript, and onnxruntime to verify it
    onnx: bool = True
    tensorrt: bool = False  # build an engine from model.onnx for the GPU of this machine
    # with --tensorrt: an existing bundle to add the engine to; default: export a new one
    bundle: str = ""
    length: Count = 64  # canvas of the engine, which takes batch 1 and exactly this many tokens


class Exported(nn.Module):
    """The model as a graph: MDLM.forward without its checks, its tables as buffers."""

    def __init__(self, model):
        super().__init__()
        cfg = model.cfg
        device = model.embed.weight.device
        self.model = model
        # Buffers, as a trace would fix the device of tables that it computed.
        half = cfg.width // 2
        k = torch.arange(half, device=device)
        self.register_buffer("frequency", torch.exp(-math.log(10_000) / half * k).float())
        cos_PK, sin_PK = mdlm.angles(cfg.positions, cfg.width // cfg.heads, device)
        self.register_buffer("cos_PK", cos_PK)
        self.register_buffer("sin_PK", sin_PK)

    def forward(self, token, noise, see):
        model = self.model
        L = token.shape[1]
        h_BLD = model.embed(token)
        cos_sin = None
        if model.cfg.rope:
            cos_sin = self.cos_PK[:L], self.sin_PK[:L]
        else:
            h_BLD = h_BLD + model.position.weight[:L]
        angle_BD = 1000 * noise[:, None] * self.frequency
        time_BD = torch.cat([angle_BD.sin(), angle_BD.cos()], -1).to(h_BLD.dtype)
        h_BLD = h_BLD + model.time(time_BD)[:, None]
        for block in model.blocks:
            h_BLD = block(h_BLD, see[:, None, None], cos_sin)
        return model.logits(model.norm(h_BLD))


# ---- comparison with the float32 model -----------------------------------------------------------


def canvases(cfg, lengths):
    """[(token, noise, see)]: random tokens, masked at rate `noise`; the last row ends in PAD."""
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for B, L in lengths:
        token_BL = torch.randint(5, cfg.vocab, (B, L), generator=generator)
        noise_B = torch.linspace(1.0, 0.3, B)
        token_BL[torch.rand(B, L, generator=generator) < noise_B[:, None]] = mdlm.MASK
        token_BL[:, 0] = mdlm.BOS
        if B > 1:
            token_BL[-1, L * 2 // 3 :] = mdlm.PAD
        inputs.append((token_BL, noise_B, token_BL != mdlm.PAD))
    return inputs


def compare(name, run, inputs, want, tolerance=0.02):
    """Print and return the largest error of run(token, noise, see) against float32 logits `want`.

    ValueError if it exceeds `tolerance` of the largest logit. FP16 errs by 0.001 to 0.005 of it,
    int8 by 0.008 to 0.02.
    """
    worst = 0.0
    largest = 0.0
    same = 0
    masks = 0
    for (token_BL, noise_B, see_BL), want_BLV in zip(inputs, want, strict=True):
        got_BLV = run(token_BL, noise_B, see_BL).float().cpu()
        if got_BLV.shape != want_BLV.shape:
            raise ValueError(f"{name}: its logits are {[*got_BLV.shape]}; not exported")
        see_BL = see_BL.cpu()
        # The largest error, PAD excluded; NaN counts as infinite.
        error_NV = (got_BLV - want_BLV)[see_BL].abs().nan_to_num(math.inf)
        worst = max(worst, error_NV.max().item())
        largest = max(largest, want_BLV[see_BL].abs().max().item())
        masked_BL = token_BL.cpu() == mdlm.MASK
        same += (got_BLV.argmax(-1) == want_BLV.argmax(-1))[masked_BL].sum().item()
        masks += masked_BL.sum().item()
    share = same / max(masks, 1)  # a canvas of one token has no mask
    print(f"{name:18} error {worst:.2g} of {largest:.3g}, {share:.1%} the same argmax", flush=True)
    if not worst <= tolerance * largest:
        raise ValueError(f"{name}: an error of {worst:.3g} is no rounding; not exported")
    return {"max_error": worst, "largest_logit": largest, "same_likeliest": share}


# ---- the files -----------------------------------------------------------------------------------


def quantise(tensors):
    """Every matrix as int8, with NAME.scale [rows, 1] in float32: a row's largest weight is +-127.

    Symmetric: 0 stays 0. model_mdlm.read_safetensors dequantises them.
    """
    result = {name: weight.half() for name, weight in tensors.items()}
    for name, weight in tensors.items():
        if weight.ndim == 2:
            weight = weight.float()
            scale_R1 = weight.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
            result[f"{name}.scale"] = scale_R1
            result[name] = (weight / scale_R1).round().to(torch.int8)
    return result


def write_torchscript(exported, example, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(exported, example, check_trace=False).save(str(path))
        return torch.jit.load(str(path))


def plain_attention(q_BHLK, k_BHLK, v_BHLK, attn_mask):
    """Unfused: in the fused one TorchScript's exporter mixes halves and floats."""
    score_BHLM = q_BHLK @ k_BHLK.transpose(-2, -1) * float(q_BHLK.shape[-1]) ** -0.5
    return score_BHLM.masked_fill(~attn_mask, -math.inf).softmax(-1) @ v_BHLK


def write_onnx(exported, example, path):
    """One graph for all batches and lengths."""
    options = {"input_names": ["token", "noise", "see"], "output_names": ["logits"]}
    if by_torch_export():
        attention = F.scaled_dot_product_attention
        batch = torch.export.Dim("batch")
        length = torch.export.Dim("length", max=exported.model.cfg.positions)
        options |= {"dynamo": True, "external_data": False, "verbose": False}
    else:
        attention = plain_attention
        batch = "batch"
        length = "length"
        options["opset_version"] = 17  # the first one with LayerNormalization
    shapes = {"token": {0: batch, 1: length}, "noise": {0: batch}, "see": {0: batch, 1: length}}
    options["dynamic_shapes" if by_torch_export() else "dynamic_axes"] = shapes
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it misses torchvision
        with unittest.mock.patch.object(F, "scaled_dot_product_attention", attention):
            torch.onnx.export(exported, example, str(path), **options)
    if lacks("onnxruntime"):
        print("model.onnx: written, not verified, for want of: pip install onnxruntime")
        return None
    return inference_jetson.run_onnx(path.read_bytes())


def attempt(name, write, half, folder, inputs, want, tolerance):
    """Write a graph of the model and compare it: {name: errors}. If it fails, print why."""
    try:
        run = write(half, inputs[0], folder / name)
        if run:
            return {name: compare(name, run, inputs, want, tolerance)}
    except Exception as error:  # the exporters raise all kinds
        (folder / name).unlink(missing_ok=True)
        print(f"{name}: not written by torch {torch.__version__}: {runs.first_line(error)}")
    return {}


def build_engine(onnx, length):
    """(bytes, {"version", "gpu", "length"}) of an engine for [1, length] here; TensorRT 10.3."""
    import tensorrt as trt

    logger = trt.Logger(trt.Logger.WARNING)
    builder = trt.Builder(logger)
    # Strongly typed: TensorRT keeps the types of the graph instead of choosing its own.
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(onnx):
        errors = "; ".join(str(parser.get_error(i)) for i in range(parser.num_errors))
        raise ValueError(f"TensorRT {trt.__version__} cannot read model.onnx: {errors}")
    # A single shape, so that kernels are chosen for it.
    config = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    for i in range(network.num_inputs):
        shape = (1,) if network.get_input(i).name == "noise" else (1, length)
        profile.set_shape(network.get_input(i).name, shape, shape, shape)
    config.add_optimization_profile(profile)
    print(f"model.trt: TensorRT {trt.__version__} tries kernels, minutes on a Jetson", flush=True)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise ValueError("TensorRT could not build the engine; its own messages are above")
    gpu = torch.cuda.get_device_name()
    return bytes(plan), {"version": trt.__version__, "gpu": gpu, "length": length}


def lacks(*packages):
    return [name for name in packages if not importlib.util.find_spec(name)]


def by_torch_export():
    """Whether this PyTorch writes ONNX from torch.export, not from TorchScript."""
    return tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)


def about_file(data, errors):
    """Entry of bundle.json: size and digest, which reveal a damaged copy, and measured errors."""
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), **errors}


@torch.no_grad()
def export(cfg):
    """Write the bundle cfg.out of a checkpoint."""
    ckpt = Path(cfg.ckpt)
    out = Path(cfg.out)
    if out.exists() and any(out.iterdir()) and not (out / "bundle.json").exists():
        raise FileExistsError(f"{out} holds other things than a bundle; choose another --out")
    if cfg.step or runs.saved_steps(ckpt):  # a run, not a checkpoint
        _, ckpt = runs.newest(ckpt, cfg.step)
    model = mdlm.load(ckpt)  # in float32, for comparison

    # Every file must agree with the float32 model on canvases of several shapes, up to rounding.
    P = model.cfg.positions
    inputs = canvases(model.cfg, [(2, min(64, P)), (1, min(17, P)), (3, P), (1, 1)])
    want = [model(*given) for given in inputs]
    int8_tensors = quantise(model.state_dict()) if cfg.int8 else {}
    model = model.half()
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise ValueError(f"{name} is beyond FP16's 65,504; train with a lower --lr")

    # The folder replaces an earlier bundle once all is written and verified.
    with runs.new_folder(out) as folder:
        mdlm.save(model, folder, (ckpt / "tokenizer.json").read_bytes(), int8_tensors)
        # The weights as the device reads them, which graphs get too.
        read = inference_jetson.read_model(folder, inference_jetson.read_bundle(folder))
        half = Exported(read.half()).eval()
        compared = inputs, want, 0.05 if cfg.int8 else 0.02
        errors = {"model.safetensors": compare("model.safetensors", half, *compared)}
        if cfg.torchscript:
            errors |= attempt("model_jetson.pt", write_torchscript, half, folder, *compared)
        needed = lacks("onnx", "onnxscript") if by_torch_export() else lacks("onnx")
        if cfg.onnx and needed:
            print(f"model.onnx: not written, for want of: pip install {' '.join(needed)}")
        elif cfg.onnx:
            errors |= attempt("model.onnx", write_onnx, half, folder, *compared)
        files = {}
        for path in sorted(folder.iterdir()):
            files[path.name] = about_file(path.read_bytes(), errors.get(path.name, {}))
        about = {
            "format": inference_jetson.FORMAT,
            "checkpoint": ckpt.name,
            "torch": torch.__version__,
            "files": files,
        }
        runs.write(folder / "bundle.json", about)
    sizes = [f"{name} {file['bytes'] / 1e6:.1f} MB" for name, file in files.items()]
    print(f"wrote {out}: {', '.join(sizes)}; now: python inference_jetson.py --bundle={out}")


@torch.no_grad()
def add_engine(folder, length):
    """Build an engine from a bundle's model.onnx, compare it with the weights, and register it."""
    about = inference_jetson.read_bundle(folder)
    model = inference_jetson.read_model(folder, about)
    onnx = inference_jetson.read_file(folder, about, "model.onnx")
    inputs = canvases(model.cfg, [(1, length)])
    want = [model(*given) for given in inputs]
    missing = None if torch.cuda.is_available() else "GPU"
    if lacks("tensorrt"):
        missing = "Python module tensorrt (JetPack's: apt install python3-libnvinfer)"
    if missing:
        raise ValueError(
            f"there is no {missing} here, and an engine is built on the GPU that runs it: "
            f"copy {folder} to the device and run the same command there, or "
            "/usr/src/tensorrt/bin/trtexec --onnx=model.onnx --stronglyTyped "
            f"--shapes=token:1x{length},noise:1,see:1x{length} --saveEngine=model.trt"
        )
    plan, engine = build_engine(onnx, length)
    run = inference_jetson.run_tensorrt(plan, engine)
    on_gpu = [tuple(array.cuda() for array in given) for given in inputs]
    errors = compare("model.trt", run, on_gpu, want)
    runs.write(folder / "model.trt", plan)
    about["files"]["model.trt"] = about_file(plan, errors)
    runs.write(folder / "bundle.json", about | {"tensorrt": engine})
    print(f"added: python inference_jetson.py --backend=tensorrt --bundle={folder}")


def main(cfg):
    if cfg.bundle and not cfg.tensorrt:
        raise ValueError("--bundle is what --tensorrt adds an engine to; pass both, or --ckpt")
    if not cfg.bundle:
        export(cfg)
    if cfg.tensorrt:  # if this fails the bundle is whole all the same
        add_engine(Path(cfg.bundle or cfg.out), cfg.length)


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
