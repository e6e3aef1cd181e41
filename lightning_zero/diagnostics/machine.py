"""Versions, devices, settings, and which features work, read from the system without measuring."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_zero_ops.registry import HAS_TRITON
from lightning_zero_ops.selfcheck import kernels_agree

__all__ = ["GIB", "devices", "features", "settings", "versions"]

GIB = 2**30

_PACKAGES = (
    "lightning-zero",
    "torch",
    "lightning",
    "torchmetrics",
    "jsonargparse",
    "triton",
    "tensorboard",
    "safetensors",
    "transformers",
    "numpy",
)
_SETTINGS = (
    "NCCL_",
    "GLOO_",
    "TORCH_NCCL_",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "LOCAL_WORLD_SIZE",
)


def versions() -> dict[str, str]:
    """Return the versions of Python, the system and the packages that matter."""
    found = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
    }
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    if torch.version.cuda is not None:
        found["CUDA of torch"] = torch.version.cuda
    if torch.version.hip is not None:
        found["ROCm of torch"] = torch.version.hip
    if torch.cuda.is_available() and dist.is_nccl_available():
        found["NCCL"] = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return found


def devices() -> dict[str, str]:
    """Return processor, memory and GPUs, and which GPUs reach each other directly."""
    found = {"processor": f"{_processor()}, {_cores()} core(s) for this process"}
    total, free = _host_memory()
    if total:
        found["host memory"] = f"{total / GIB:.1f} GiB, {free / GIB:.1f} GiB of it free"
    if Path("/dev/shm").is_dir():
        found["shared memory"] = f"{shutil.disk_usage('/dev/shm').free / GIB:.1f} GiB free"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found["GPUs"] = str(count)
    for index in range(count):
        of = torch.cuda.get_device_properties(index)
        found[f"GPU {index}"] = f"{of.name}, {of.total_memory / GIB:.1f} GiB, capability {of.major}.{of.minor}"
    if count > 1:
        direct = sum(
            torch.cuda.can_device_access_peer(one, other)
            for one in range(count)
            for other in range(count)
            if one != other
        )
        found["direct links"] = f"{direct} of {count * (count - 1)} pairs of GPUs"
    return found


def settings() -> dict[str, str]:
    """Return the environment variables that change how ranks compute and communicate."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)}


def features() -> dict[str, str]:
    """Return, for each feature that depends on the machine, "works" or the reason why it does not."""
    has_gpu = torch.cuda.is_available()
    return {
        "stages 0 to 3 on CPUs": "works" if dist.is_gloo_available() else "no: this torch has no gloo",
        "stages 0 to 3 on GPUs": _on_gpus(has_gpu),
        "bf16 on GPUs": "works" if has_gpu and torch.cuda.is_bf16_supported() else _without(has_gpu, "it has no bf16"),
        "Triton kernels": _kernels(has_gpu),
        "offloading to disks": "works" if sys.platform == "linux" else "no: it exists on Linux only",
    }


# -- The parts ---------------------------------------------------------------------------------------------------------


def _on_gpus(has_gpu: bool) -> str:
    if not has_gpu:
        return _without(has_gpu, "")
    return "works" if dist.is_nccl_available() else "no: this torch has no NCCL"


def _without(has_gpu: bool, reason: str) -> str:
    if has_gpu:
        return f"no: {reason}"
    return "no: no GPU is visible" if torch.version.cuda or torch.version.hip else "no: this torch is built for CPUs"


def _kernels(has_gpu: bool) -> str:
    if not has_gpu:
        return f"{_without(has_gpu, '')}; PyTorch's operations are used"
    if not HAS_TRITON:
        return "no: `triton` is not installed; PyTorch's operations are used"
    device = torch.device("cuda", 0)
    return (
        "works" if kernels_agree(device) else "no: they fail, or disagree with PyTorch; PyTorch's operations are used"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown processor"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _host_memory() -> tuple[int, int]:
    """Return the bytes of host memory and those that are free; zeros where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0, 0
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    return sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0)
