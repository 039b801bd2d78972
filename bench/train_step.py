"""Count what a training step of MDLM asks of a GPU: operators, copies, synchronisations, PAD.
Nothing is timed.

    python bench/train_step.py                          # on the standard library, on a CPU, a minute
    python bench/train_step.py --data=data/stories --batch_size=64

Counts every operator that would launch a kernel; a foreach or fused operator is one. The passes run
on meta tensors, op by op, with rows padded and with texts packed; torch.compile fuses what they
hold. The update runs on the CPU; nobody compiles it.
"""

import dataclasses
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import model_mdlm as mdlm
import runs
import train_gpu


@dataclasses.dataclass(frozen=True)
class Config:
    data: str = ""  # folder of padded rows; "" is train_gpu.py's embedded default
    model: str = "small"  # key of CONFIGS in model_mdlm.py
    batch_size: int = 16  # rows of the step


class Step(TorchDispatchMode):
    """Operators that launch kernels, and those for which the host waits."""

    def __init__(self):
        super().__init__()
        self.launches, self.waits = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__
        self.waits += name.startswith(("_local_scalar_dense", "nonzero"))
        self.launches += not (
            function.is_view or name.startswith(("empty", "new_empty", "detach", "_unsafe_view"))
        )
        return function(*args, **(kwargs or {}))


def main(cfg):
    devices = train_gpu.Devices(torch.device("cpu"))
    settings = train_gpu.Config(
        data=cfg.data, model=cfg.model, batch_size=cfg.batch_size, micro_batch=cfg.batch_size
    )
    rows, _, _ = train_gpu.find_data(settings)
    architecture = dataclasses.replace(
        mdlm.CONFIGS[cfg.model], vocab=rows.meta["vocab_padded"], rope=True
    )
    architecture = dataclasses.replace(
        architecture, positions=max(architecture.positions, rows.meta["seq_len"])
    )
    state = train_gpu.make_state(
        dataclasses.replace(settings, compile=False, dtype="float32"), architecture, devices
    )
    noised = train_gpu.training_batch(rows, settings, 0)
    on_meta = train_gpu.Loss(mdlm.MDLM(architecture).to("meta", torch.bfloat16))
    batch = train_gpu.make_batch(noised, slice(None), devices.device)
    with Step() as passes:
        on_meta(train_gpu.Batch(*(x.to("meta") for x in batch))).backward()
    pad = float((batch.xt_BL == mdlm.PAD).float().mean())
    print(f"{batch.xt_BL.numel():,} tokens, {pad:.1%} of them PAD, {len(batch)} copies")
    print(f"{passes.launches} operators forwards and backwards, {passes.waits} synchronisations")
    for _ in range(2):  # the first update makes the moments
        for p in state.model.parameters():
            p.grad = torch.randn_like(p)
        with Step() as update:
            train_gpu.update(state, 0, settings)
    print(f"update: {update.launches} operators, {update.waits} synchronisations")


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
