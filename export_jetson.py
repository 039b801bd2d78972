"""Export a trained MDLM for a Jetson: one folder with the weights in FP16, TorchScript, ONNX, and a TensorRT engine.

    python export_jetson.py --ckpt=out/stories                          # the newest checkpoint of a run; half a minute
    python export_jetson.py --ckpt=out/stories --int8                   # matrices in 8 bits: half the file
    python export_jetson.py --tensorrt --bundle=out/jetson --length=64  # on the Jetson: adds an engine to this bundle
    python inference_jetson.py --prompt="Once upon a time"              # runs what this wrote

Reads a run folder of train_gpu.py or one of its step_<n>/. Writes --out: bundle.json, config.json, tokenizer.json,
model.safetensors (FP16: what inference_jetson.py reads by default), model_jetson.pt (TorchScript), model.onnx, and
model.trt. Each is read back as inference_jetson.py does, run on canvases of several lengths, and compared with the
float32 model; a graph that cannot be written costs one line, not the bundle.

--int8 halves model.safetensors, not the time of a step nor memory: the device multiplies the weights out when it reads
them, since cuBLAS takes 8 bits only where activations have 8 bits too. It is for the way to the device, and its disk.

Runs on Python 3.10 and torch 2.4 or newer. ONNX comes from torch.export with torch 2.9 or newer, from TorchScript with
an older one, whose torch.export does not keep batch and length free or mixes types.

All graphs take token [B, L] int64, noise [B] float32 = P(masked), see [B, L] bool (False for PAD), and give float16
logits [B, L, V]. Letters: B batch, L length, P positions, D width, K head size, V vocabulary.
"""

import contextlib
import dataclasses
import hashlib
import importlib.util
import io
import logging
import math
import platform
import unittest.mock
import warnings
from pathlib import Path

import safetensors.torch
import torch
from torch import nn
from torch.nn import functional as F

import inference_jetson
import model_mdlm as mdlm
import runs

# of the largest logit, without and with --int8; on these models FP16 errs by 0.001 to 0.005, 8 bits by 0.008 to 0.02
TOLERANCE = {False: 0.02, True: 0.05}


@dataclasses.dataclass(frozen=True)
class Config:
    ckpt: str = "out/train_gpu"  # run folder of train_gpu.py, or a folder with config.json and model.safetensors
    step: int = 0  # which checkpoint of a run; 0 takes the newest
    out: str = "out/jetson"  # folder to write; an earlier bundle there is replaced
    int8: bool = False  # matrices of model.safetensors in 8 bits, half its size; as fast and as large in memory as FP16
    torchscript: bool = True  # write model_jetson.pt
    onnx: bool = True  # write model.onnx; needs the packages onnx and onnxscript, and onnxruntime to verify it
    tensorrt: bool = False  # build an engine from model.onnx for the GPU of this machine
    bundle: str = ""  # with --tensorrt: the finished bundle to add the engine to, wherever it was made; "" exports anew
    length: int = 64  # canvas of the engine: it takes batch 1 and this many tokens, nothing else


class Exported(nn.Module):
    """The model as graphs see it: the same sum as in MDLM.hidden, without its checks."""

    def __init__(self, model):
        super().__init__()
        half, device = model.cfg.width // 2, model.embed.weight.device
        self.model = model
        # buffers, as a trace that made the frequencies itself would remember the device that it was made on
        k = torch.arange(half, device=device)
        self.register_buffer("frequency", torch.exp(-math.log(10_000) / half * k).float())
        cos_PK, sin_PK = mdlm.angles(model.cfg.positions, model.cfg.width // model.cfg.heads, device)
        self.register_buffer("cos_PK", cos_PK)
        self.register_buffer("sin_PK", sin_PK)

    def forward(self, token, noise, see):
        model, L = self.model, token.shape[1]
        # tokens, positions and the noise level; PAD is hidden from all
        h_BLD, cos_sin = model.embed(token), None
        if model.cfg.rope:
            cos_sin = self.cos_PK[:L], self.sin_PK[:L]
        else:
            h_BLD = h_BLD + model.position.weight[:L]
        if model.cfg.time:
            angle_BD = 1000 * noise[:, None] * self.frequency
            h_BLD = h_BLD + model.time(torch.cat([angle_BD.sin(), angle_BD.cos()], -1).to(h_BLD.dtype))[:, None]
        for block in model.blocks:
            h_BLD = block(h_BLD, see[:, None, None], cos_sin)
        return model.logits(model.norm(h_BLD))


# ---- what is compared ----------------------------------------------------------------------------------------------


def canvases(cfg, lengths):
    """[(token, noise, see)]: random tokens of which a share `noise` is masked, a row with PAD at its end among them."""
    generator, inputs = torch.Generator().manual_seed(0), []
    for B, L in lengths:
        # a random text behind BOS, masked at the rate that the model is told
        token_BL = torch.randint(5, cfg.vocab, (B, L), generator=generator)
        noise_B = torch.linspace(1.0, 0.3, B)
        token_BL[torch.rand(B, L, generator=generator) < noise_B[:, None]] = mdlm.MASK
        token_BL[:, 0] = mdlm.BOS
        if B > 1:
            token_BL[-1, L * 2 // 3 :] = mdlm.PAD
        inputs.append((token_BL, noise_B, token_BL != mdlm.PAD))
    return inputs


def compare(name, run, inputs, want, int8=False):
    """Print and return how far run(token, noise, see) is from the float32 logits; ValueError if that is no rounding."""
    worst, largest, same, masks = 0.0, 0.0, 0, 0
    for (token_BL, noise_B, see_BL), want_BLV in zip(inputs, want, strict=True):
        got_BLV = run(token_BL, noise_B, see_BL).float().cpu()
        if got_BLV.shape != want_BLV.shape:
            raise ValueError(f"{name}: logits {[*got_BLV.shape]}, the model has {[*want_BLV.shape]}; not exported")
        token_BL, see_BL = token_BL.cpu(), see_BL.cpu()
        # the largest error where somebody looks; NaN counts as infinite
        worst = max(worst, (got_BLV - want_BLV)[see_BL].abs().nan_to_num(math.inf).max().item())
        largest = max(largest, want_BLV[see_BL].abs().max().item())
        # and whether the likeliest token of each mask is the same
        masked_BL = token_BL == mdlm.MASK
        same += (got_BLV.argmax(-1) == want_BLV.argmax(-1))[masked_BL].sum().item()
        masks += masked_BL.sum().item()
    error = f"{worst:.2g} of float32 (the largest is {largest:.3g})"
    print(f"{name:18} logits within {error}, the same likeliest token at {same / masks:.1%} of the masks", flush=True)
    if not worst <= TOLERANCE[int8] * largest:
        raise ValueError(f"{name}: an error of {worst:.3g} is no rounding; not exported")
    return {"max_error": worst, "largest_logit": largest, "same_likeliest": same / masks}


# ---- weights in 8 bits ----------------------------------------------------------------------------------------------


def quantise(tensors):
    """Every matrix as int8, with NAME.scale [rows, 1] in float32: the largest weight of a row, an output, becomes 127.

    Symmetric: 0 stays 0. inference_jetson.read_safetensors multiplies them out again.
    """
    result = {name: weight.half() for name, weight in tensors.items()}
    for name, weight in tensors.items():
        if weight.ndim == 2:
            result[f"{name}.scale"] = scale_R1 = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
            result[name] = (weight.float() / scale_R1).round().to(torch.int8)
    return result


# ---- the artefacts -------------------------------------------------------------------------------------------------


def write_torchscript(exported, example, path):
    print("model_jetson.pt: PyTorch calls TorchScript deprecated; inference_jetson.py needs only model.safetensors")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.jit.trace(exported, example, check_trace=False).save(str(path))
        return torch.jit.load(str(path))


def plain_attention(q_BHLK, k_BHLK, v_BHLK, attn_mask):
    """Attention in the open: TorchScript's exporter mixes halves and floats in the fused one, which nobody reads."""
    score_BHLM = q_BHLK @ k_BHLK.transpose(-2, -1) * float(q_BHLK.shape[-1]) ** -0.5
    return score_BHLM.masked_fill(~attn_mask, -math.inf).softmax(-1) @ v_BHLK


def write_onnx(exported, example, path):
    """One graph for all batches and lengths."""
    names, attention = {"input_names": ["token", "noise", "see"], "output_names": ["logits"]}, plain_attention
    if by_torch_export():
        attention = F.scaled_dot_product_attention
        batch, length = torch.export.Dim("batch"), torch.export.Dim("length", max=exported.model.cfg.positions)
        shapes = {"token": {0: batch, 1: length}, "noise": {0: batch}, "see": {0: batch, 1: length}}
        names |= {"dynamo": True, "dynamic_shapes": shapes, "external_data": False, "verbose": False}
    else:
        axes = {"token": {0: "batch", 1: "length"}, "noise": {0: "batch"}, "see": {0: "batch", 1: "length"}}
        names |= {"dynamic_axes": axes, "opset_version": 17}  # the first one with LayerNormalization
    with warnings.catch_warnings(), torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it misses torchvision
        with unittest.mock.patch.object(F, "scaled_dot_product_attention", attention):
            torch.onnx.export(exported, example, str(path), **names)
    if lacks("onnxruntime"):
        print("model.onnx: written, not verified, for want of: pip install onnxruntime", flush=True)
        return None
    return inference_jetson.run_onnx(path.read_bytes())


def attempt(name, write, half, folder, inputs, want, int8):
    """Write a graph of the model and compare it: {name: errors}. What goes wrong costs this file alone, and is said."""
    try:
        run = write(half, inputs[0], folder / name)
        return {name: compare(name, torch.no_grad()(run), inputs, want, int8)} if run else {}
    except Exception as error:  # the exporters raise all kinds
        (folder / name).unlink(missing_ok=True)
        print(f"{name}: not written by torch {torch.__version__}: {runs.first_line(error)}", flush=True)
        return {}


def build_engine(onnx, length):
    """The bytes of a strongly typed engine for [1, length] on this GPU (TensorRT 10.3 and newer)."""
    import tensorrt as trt

    logger = trt.Logger(trt.Logger.WARNING)
    # strongly typed: TensorRT keeps the types of the graph instead of choosing its own
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(onnx):
        errors = "; ".join(str(parser.get_error(i)) for i in range(parser.num_errors))
        raise ValueError(f"TensorRT {trt.__version__} cannot read model.onnx: {errors}")
    # one shape alone, so that kernels are chosen for it
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    for i in range(network.num_inputs):
        shape = (1,) if network.get_input(i).name == "noise" else (1, length)
        profile.set_shape(network.get_input(i).name, shape, shape, shape)
    config.add_optimization_profile(profile)
    print(f"model.trt: TensorRT {trt.__version__} tries kernels, minutes on a Jetson", flush=True)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise ValueError("TensorRT could not build the engine; its own messages are above")
    return bytes(plan), {"version": trt.__version__, "gpu": torch.cuda.get_device_name(), "length": length}


# ---- main ----------------------------------------------------------------------------------------------------------


def lacks(*packages):
    return [name for name in packages if not importlib.util.find_spec(name)]


def by_torch_export():
    """Whether this PyTorch writes ONNX from torch.export; TorchScript's exporter does it elsewhere."""
    return tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)


def about_file(data, errors):
    """Entry of bundle.json: size and digest, by which a damaged copy is found, and the errors measured."""
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), **errors}


def export(cfg):
    """Write the bundle cfg.out of a checkpoint."""
    ckpt, out = Path(cfg.ckpt), Path(cfg.out)
    if out.exists() and any(out.iterdir()) and not (out / "bundle.json").exists():
        raise FileExistsError(f"{out} holds other things than a bundle; choose another --out")
    if cfg.step or runs.saved_steps(ckpt):  # a run; else a folder with a model in it
        _, ckpt = runs.newest(ckpt, cfg.step)
    model = mdlm.load(ckpt)  # in float32, for comparison
    positions = model.cfg.positions
    print(f"{ckpt}: {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)

    # What each artefact must give, up to rounding: the float32 model on canvases of several shapes.
    inputs = canvases(model.cfg, [(2, min(64, positions)), (1, min(17, positions)), (3, positions), (1, 1)])
    with torch.no_grad():
        want = [model(*given) for given in inputs]
    # FP16 ends at 65,504: a larger weight would be infinite
    small = quantise(model.state_dict()) if cfg.int8 else {}
    model = model.half()
    too_large = [name for name, weight in model.named_parameters() if not weight.isfinite().all()]
    if too_large:
        raise ValueError(f"weights beyond FP16's 65,504 or not finite: {', '.join(too_large)}")

    with runs.new_folder(out) as folder:  # it replaces an earlier bundle when all is written and verified
        # write each artefact, read it back, compare
        mdlm.save(model, folder, (ckpt / "tokenizer.json").read_bytes())
        if cfg.int8:
            runs.write(folder / "model.safetensors", safetensors.torch.save(small))
        # as the device reads them; graphs are of these very weights
        half = Exported(inference_jetson.read_model(folder, inference_jetson.read_bundle(folder)).half()).eval()
        compared = inputs, want, cfg.int8
        errors = {"model.safetensors": compare("model.safetensors", torch.no_grad()(half), *compared)}
        if cfg.torchscript:
            errors |= attempt("model_jetson.pt", write_torchscript, half, folder, *compared)
        needed = lacks("onnx", "onnxscript") if by_torch_export() else lacks("onnx")
        if cfg.onnx and needed:
            print(f"model.onnx: not written, for want of: pip install {' '.join(needed)}", flush=True)
        elif cfg.onnx:
            errors |= attempt("model.onnx", write_onnx, half, folder, *compared)
        paths = sorted(folder.iterdir())
        files = {path.name: about_file(path.read_bytes(), errors.get(path.name, {})) for path in paths}
        about = {"format": inference_jetson.FORMAT, "checkpoint": ckpt.name, "python": platform.python_version()}
        runs.write(folder / "bundle.json", about | {"torch": torch.__version__, "tensorrt": None, "files": files})
    sizes = ", ".join(f"{name} {file['bytes'] / 1e6:.1f} MB" for name, file in files.items())
    print(f"wrote {out}: {sizes}")


def add_engine(folder, length):
    """Build an engine from the model.onnx of a finished bundle, compare it with the weights there, and register it."""
    about = inference_jetson.read_bundle(folder)
    model, graph = inference_jetson.read_model(folder, about), inference_jetson.part(folder, about, "model.onnx")
    if not 1 <= length <= model.cfg.positions:
        raise ValueError(f"--length={length}: the model has {model.cfg.positions} positions")
    if lacks("tensorrt") or not torch.cuda.is_available():
        missing = "Python module tensorrt (JetPack's: apt install python3-libnvinfer)" if lacks("tensorrt") else "GPU"
        shapes = f"token:1x{length},{'noise:1,' * model.cfg.time}see:1x{length}"
        by_hand = f"trtexec --onnx=model.onnx --stronglyTyped --shapes={shapes} --saveEngine=model.trt"
        there = f"python export_jetson.py --tensorrt --bundle={folder} --length={length}"
        raise ValueError(
            f"{folder} has no engine: it is built on the GPU that runs it, and there is no {missing} here. Copy the "
            f"folder to the device, there: {there}. For a runtime of your own: {by_hand}"
        )
    inputs = canvases(model.cfg, [(1, length)])
    with torch.no_grad():
        want = [model(*given) for given in inputs]
    plan, engine = build_engine(graph, length)
    run = inference_jetson.run_tensorrt(plan, engine)
    errors = compare("model.trt", run, [tuple(array.cuda() for array in given) for given in inputs], want)
    runs.write(folder / "model.trt", plan)
    about["files"]["model.trt"] = about_file(plan, errors)
    runs.write(folder / "bundle.json", about | {"tensorrt": engine})
    print(f"added model.trt to {folder}; write with: python inference_jetson.py --bundle={folder} --backend=tensorrt")


def main(cfg):
    if cfg.bundle and not cfg.tensorrt:
        raise ValueError("--bundle is the bundle that --tensorrt adds an engine to; pass both, or --ckpt to export")
    if not cfg.bundle:
        export(cfg)
        print(f"write with: python inference_jetson.py --bundle={cfg.out}")
    if cfg.tensorrt:  # the bundle is whole by now, whatever happens to the engine
        add_engine(Path(cfg.bundle or cfg.out), cfg.length)


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
