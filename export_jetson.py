"""Export a trained MDLM for a Jetson: one folder with the weights in FP16, TorchScript, ONNX, and a TensorRT engine.

    python export_jetson.py --ckpt=out/stories                          # the newest checkpoint of a run; half a minute
    python export_jetson.py --ckpt=out/stories --tensorrt --length=64        # on the Jetson, where TensorRT is
    python inference_jetson.py --prompt="Once upon a time"              # runs what this wrote

Reads a run folder of train_gpu.py or one of its step_<n>/. Writes --out: bundle.json, config.json, tokenizer.json,
model.safetensors (FP16: what inference_jetson.py reads by default), model_jetson.pt (TorchScript), model.onnx, and
model.trt. Each is read back as inference_jetson.py does, run on canvases of several lengths, and compared with the
float32 model.

All graphs take token [B, L] int64, noise [B] float32 = P(masked), see [B, L] bool (False for PAD), and give float16
logits [B, L, V]. Letters: B batch, L length, D width, V vocabulary.
"""

import contextlib
import dataclasses
import hashlib
import importlib.util
import logging
import math
import platform
import warnings
from pathlib import Path

import torch
from torch import nn

import inference_jetson
import model_mdlm as mdlm
import runs

TOLERANCE = 0.02  # of the largest logit; FP16 on these models errs by 0.001 to 0.005


@dataclasses.dataclass(frozen=True)
class Config:
    ckpt: str = "out/train_gpu"  # run folder of train_gpu.py, or a folder with config.json and model.safetensors
    step: int = 0  # which checkpoint of a run; 0 takes the newest
    out: str = "out/jetson"  # folder to write; an earlier bundle there is replaced
    torchscript: bool = True  # write model_jetson.pt
    onnx: bool = True  # write model.onnx; needs the packages onnx and onnxscript, and onnxruntime to verify it
    tensorrt: bool = False  # build an engine for the GPU of this machine
    length: int = 64  # canvas of the engine: it takes batch 1 and this many tokens, nothing else


class Exported(nn.Module):
    """The model as graphs see it: the same sum as in MDLM.hidden, without its checks."""

    def __init__(self, model):
        super().__init__()
        half = model.cfg.width // 2
        self.model = model
        # a buffer, as a trace that made the frequencies itself would remember the device that it was made on
        self.register_buffer("frequency", torch.exp(-math.log(10_000) / half * torch.arange(half)).float())

    def forward(self, token, noise, see):
        model = self.model
        # tokens, positions and the noise level; PAD is hidden from all
        h_BLD = model.embed(token) + model.position.weight[: token.shape[1]]
        if model.cfg.time:
            angle_BD = 1000 * noise[:, None] * self.frequency
            h_BLD = h_BLD + model.time(torch.cat([angle_BD.sin(), angle_BD.cos()], -1).to(h_BLD.dtype))[:, None]
        for block in model.blocks:
            h_BLD = block(h_BLD, see[:, None, None])
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


def compare(name, run, inputs, want):
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
    if not worst <= TOLERANCE * largest:
        raise ValueError(f"{name}: an error of {worst:.3g} is no rounding of FP16; not exported")
    return {"max_error": worst, "largest_logit": largest, "same_likeliest": same / masks}


# ---- the artefacts -------------------------------------------------------------------------------------------------


def write_torchscript(exported, example, path):
    print("model_jetson.pt: PyTorch calls TorchScript deprecated; inference_jetson.py needs only model.safetensors")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.jit.trace(exported, example, check_trace=False).save(str(path))
        return torch.jit.load(str(path))


def write_onnx(exported, example, path):
    # one graph for all batches and lengths
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", max=exported.model.cfg.positions)
    shapes = {"token": {0: batch, 1: length}, "noise": {0: batch}, "see": {0: batch, 1: length}}
    with warnings.catch_warnings(), torch.no_grad(), contextlib.redirect_stdout(None):
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it misses torchvision
        torch.onnx.export(
            exported, example, str(path), dynamo=True, input_names=["token", "noise", "see"],
            output_names=["logits"], dynamic_shapes=shapes, external_data=False, verbose=False,
        )  # fmt: skip


def write_engine(onnx_path, path, length):
    """Build a strongly typed engine for [1, length] on this GPU (TensorRT 10.3 and newer); what it was built by."""
    import tensorrt as trt

    logger = trt.Logger(trt.Logger.WARNING)
    # strongly typed: TensorRT keeps the types of the graph instead of choosing its own
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(onnx_path.read_bytes()):
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
        raise RuntimeError("TensorRT could not build the engine; its own messages are above")
    path.write_bytes(bytes(plan))
    return {"version": trt.__version__, "gpu": torch.cuda.get_device_name(), "length": length}


# ---- main ----------------------------------------------------------------------------------------------------------


def lacks(*packages):
    return [name for name in packages if not importlib.util.find_spec(name)]


def why_no_onnx():
    """What the export to ONNX lacks here, or an empty string."""
    if lacks("onnx", "onnxscript"):
        return f"for want of: pip install {' '.join(lacks('onnx', 'onnxscript'))}"
    old = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 5)
    return f"PyTorch 2.5 or newer exports it, this is {torch.__version__}" if old else ""


def check_engine(cfg):
    """Say what an engine needs before minutes of work."""
    if lacks("tensorrt") or not torch.cuda.is_available():
        missing = "Python module tensorrt (JetPack's: apt install python3-libnvinfer)" if lacks("tensorrt") else "GPU"
        by_hand = "trtexec --onnx=model.onnx --stronglyTyped --saveEngine=model.trt"
        raise ValueError(f"--tensorrt runs on the GPU that the engine is for: no {missing} here. By hand: {by_hand}")
    if not cfg.onnx or why_no_onnx():
        raise ValueError(f"--tensorrt reads the ONNX graph, so it needs --onnx. {why_no_onnx()}")


def write_graphs(half, cfg, folder, inputs, want):
    """TorchScript and ONNX, each compared with the float32 logits; {file: errors}."""
    errors = {}
    if cfg.torchscript:
        traced = write_torchscript(half, inputs[0], folder / "model_jetson.pt")
        errors["model_jetson.pt"] = compare("model_jetson.pt", torch.no_grad()(traced), inputs, want)
    if cfg.onnx and why_no_onnx():
        print(f"model.onnx: not written, {why_no_onnx()}", flush=True)
    elif cfg.onnx:
        write_onnx(half, inputs[0], folder / "model.onnx")
        if lacks("onnxruntime"):
            print("model.onnx: written, not verified, for want of: pip install onnxruntime", flush=True)
        else:
            run = inference_jetson.run_onnx((folder / "model.onnx").read_bytes())
            errors["model.onnx"] = compare("model.onnx", run, inputs, want)
    return errors


def main(cfg):
    ckpt, out, engine = Path(cfg.ckpt), Path(cfg.out), None
    if cfg.tensorrt:
        check_engine(cfg)
    if out.exists() and any(out.iterdir()) and not (out / "bundle.json").exists():
        raise FileExistsError(f"{out} holds other things than a bundle; choose another --out")
    if cfg.step or runs.checkpoints(ckpt):  # a run; else a folder with a model in it
        _, ckpt = runs.newest(ckpt, cfg.step)
    model = mdlm.load(ckpt)  # in float32, for comparison
    positions = model.cfg.positions
    if cfg.tensorrt and not 1 <= cfg.length <= positions:
        raise ValueError(f"--length={cfg.length}: the model has {positions} positions")
    print(f"{ckpt}: {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)

    # What each artefact must give, up to rounding: the float32 model on canvases of several shapes.
    inputs = canvases(model.cfg, [(2, min(64, positions)), (1, min(17, positions)), (3, positions), (1, 1)])
    single = canvases(model.cfg, [(1, cfg.length)]) if cfg.tensorrt else []
    with torch.no_grad():
        want, want_single = ([model(*given) for given in each] for each in (inputs, single))
    # FP16 ends at 65,504: a larger weight would be infinite
    half = Exported(model.half()).eval()
    too_large = [name for name, weight in half.model.named_parameters() if not weight.isfinite().all()]
    if too_large:
        raise ValueError(f"weights beyond FP16's 65,504 or not finite: {', '.join(too_large)}")

    with runs.new_folder(out) as folder:  # it replaces an earlier bundle when all is written and verified
        # write each artefact, read it back, compare
        mdlm.save(half.model, folder, (ckpt / "tokenizer.json").read_bytes())
        read_back = Exported(mdlm.load(folder, dtype=torch.float16)).eval()
        errors = {"model.safetensors": compare("model.safetensors", torch.no_grad()(read_back), inputs, want)}
        errors |= write_graphs(half, cfg, folder, inputs, want)
        if cfg.tensorrt:
            engine = write_engine(folder / "model.onnx", folder / "model.trt", cfg.length)
            run = inference_jetson.run_tensorrt((folder / "model.trt").read_bytes(), engine)
            on_gpu = [tuple(array.cuda() for array in given) for given in single]
            errors["model.trt"] = compare("model.trt", run, on_gpu, want_single)
        # bundle.json: sizes and digests, by which a damaged copy is found, and the errors measured above
        files = {}
        for path in sorted(folder.iterdir()):
            data = path.read_bytes()
            about = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            files[path.name] = about | errors.get(path.name, {})
        about = {"format": inference_jetson.FORMAT, "checkpoint": ckpt.name, "python": platform.python_version()}
        about |= {"torch": torch.__version__, "tensorrt": engine, "files": files}
        runs.write(folder / "bundle.json", about)
    sizes = ", ".join(f"{name} {file['bytes'] / 1e6:.1f} MB" for name, file in files.items())
    print(f"wrote {out}: {sizes}")
    print(f"write with: python inference_jetson.py --bundle={out}")


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
