"""Whether Triton's kernels can be relied on: compiled and compared with PyTorch's, once per process and device.

Triton compiles at run time, with a C compiler and for GPUs that it knows. Where that fails, or a result is another, all
ops are computed by their references, and the engine steps and measures norms with PyTorch's kernels.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from lightning_zero_ops import adamw, flat
from lightning_zero_ops.registry import HAS_TRITON, KERNEL_CHECKS

__all__ = ["kernels_agree"]

_ANSWERS: dict[int, bool] = {}  # by the index of a device
_NUMEL = 4097  # programs with and without elements beyond the end
_OPTIONS: dict[str, Any] = {
    **{"step": 3, "lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8},
    **{"weight_decay": 0.1, "l2": 0.0, "tails": ()},
}


def kernels_agree(device: torch.device) -> bool:
    """Say whether the kernels of AdamW and of norms run on a CUDA device and agree with PyTorch's; warn once if not.

    Waits for the device, and for the compiler, at the first call.
    """
    if not HAS_TRITON or device.type != "cuda":
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in _ANSWERS:
        _ANSWERS[index] = True  # to the ops of the check, which ask as well
        try:
            _ANSWERS[index] = _agree(torch.device("cuda", index))
        except BaseException:  # the program is interrupted
            del _ANSWERS[index]
            raise
    return _ANSWERS[index]


def _agree(device: torch.device) -> bool:
    with torch.inference_mode(False), torch.no_grad():
        try:
            difference = _difference_of_norms(device) or _difference_of_steps(device)
        except Exception as error:  # of Triton, of the compiler that it calls, of the driver
            difference = f"{type(error).__name__}: {str(error)[:200]}"
    if difference is None:
        return True
    warnings.warn(
        f"Triton's kernels are not used on {device}, so that `lightning_zero_ops`, mixtures of experts and AdamW for"
        f" units in 16 bits are computed by PyTorch's, with more passes over memory: {difference}. Triton needs a C"
        " compiler (`gcc`) at run time and a GPU of capability 8.0 or more.",
        stacklevel=2,
    )
    return False


def _values(device: torch.device) -> Tensor:
    """Return numbers of both signs around 1: (_NUMEL,) fp32."""
    return torch.linspace(-2.0, 2.0, _NUMEL, device=device, dtype=torch.float32)


def _difference_of_norms(device: torch.device) -> str | None:
    grad = _values(device).bfloat16()
    found, expected = flat.sq_norm(grad), grad.double().square().sum()
    return None if abs(float(found / expected) - 1.0) < 1e-12 else f"a squared norm is {found}, not {expected}"


def _difference_of_steps(device: torch.device) -> str | None:
    results = []
    for step in (adamw.kernel_step_, adamw.pytorch_step_):
        param = _values(device)
        exp_avg, exp_avg_sq = param.flip(0), param.square()
        out = torch.full_like(param, float("nan"), dtype=torch.bfloat16)
        grad, factor = param.bfloat16(), torch.full((), 0.5, device=device)
        step(param, exp_avg, exp_avg_sq, out=out, grad=grad, factor=factor, **_OPTIONS)
        results.append((param, exp_avg, exp_avg_sq, out.float()))
    for name, mine, theirs in zip(("param", "exp_avg", "exp_avg_sq", "out"), *results, strict=True):
        furthest = float((mine - theirs).abs().max())
        if not furthest <= (2.0**-7 if name == "out" else 1e-6):  # not a number is no agreement
            return f"`{name}` of an AdamW step is {furthest} away from PyTorch's"
    return None


KERNEL_CHECKS.append(kernels_agree)
