"""The options of the engine as frozen dataclasses, and the checks between them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from lightning_zero.errors import nearest
from lightning_zero.option_checks import checked_fields, from_fields
from lightning_zero.sharding import Sharding

__all__ = [
    "ActivationCheckpointing",
    "Communication",
    "DISKS_USE",
    "FORMER_STEP_OPTIONS",
    "MixedPrecision",
    "Moments",
    "OFFLOAD_USE",
    "Offload",
    "OffloadTarget",
    "Pipeline",
    "ReduceDtype",
    "ReduceTime",
    "STEP_USE",
    "Schedule",
    "StepTime",
    "last_target",
]

ReduceDtype = Literal["fp32", "bf16", "fp16"]
OffloadTarget = Literal["cpu", "nvme"]
"""Where tensors are stored between uses: in host memory, or in files on local disks."""
Moments = Literal["fp32", "bf16", "int8"]
"""How the moments of ``torch.optim.AdamW`` and ``Adam`` are kept.

``"int8"``: a byte each, with one scale for 256 elements. Arithmetic is fp32, and so are moments in checkpoints.
"""
CheckpointPolicy = Literal["full", "selective", "offload", "partition", "auto"]
Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zb_h1"]
ReduceTime = Literal["auto", "step", "microbatch"]
StepTime = Literal["auto", "now", "deferred", "backward"]
"""When each unit is stepped; the bits are the same.

``"now"``: in ``optimizer.step()``. ``"deferred"``: during the next forward, before the unit is used. ``"backward"``: in
the backward, as soon as the unit's gradients are reduced, which frees them; operations on all gradients at once are
refused: clipping, norms, loss scaling, accumulation, several optimizers, hooks that see gradients. ``"auto"``: deferred
where the unit is offloaded, now elsewhere.
"""

STEP_USE = "Step after the backward, or use `step='backward'`, which steps each unit when its gradients are averaged."
FORMER_STEP_OPTIONS = {
    "deferred_step": "Use `step='deferred'` for True, `step='now'` for False, `step='auto'` for None.",
    "step_in_backward": "Use `step='backward'` for True, `step='auto'` for False.",
}
DISKS_USE = "Use `Offload(optimizer='nvme', path='/a/directory')` and its other fields."
OFFLOAD_USE = (
    "Use 'cpu', `Offload(...)`, a dict of its fields, or None. Disks need `Offload(optimizer='nvme', path=...)`."
)
_PARTITIONS = ("parameters", "uniform", "flops", "measured")
_PARTITION_USE = (
    "Use 'parameters', 'uniform', 'type:Regex', 'flops', 'measured', or the list of the first blocks of the stages."
)
_POLICY_USE = "Use 'full', 'selective', 'offload', 'partition' or 'auto'."
_SCHEDULE_USE = "Use 'gpipe', '1f1b', 'interleaved_1f1b' or 'zb_h1'."
_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@checked_fields()
@dataclass(frozen=True, kw_only=True)
class Communication:
    """Dtypes, prefetching and timeouts of the collectives on parameters and gradients.

    Args:
        reduce_dtype: Dtype in which gradients are accumulated, reduced and kept until the step. The default is fp32,
            and fp64 for fp64 parameters. ``"bf16"`` halves the bytes and the memory of gradients and rounds them.
        prefetch: How many units are gathered before their use at stage 3. 0 gathers a unit when it is needed.
        timeout_s: Seconds after which a collective that its peers do not join fails with an error. For ``ZeroEngine``;
            the strategy has ``timeout``.
        backend: Backend of the engine's process groups; the default is the backend of the default group. For
            ``ZeroEngine``; the strategy has ``process_group_backend``.
    """

    reduce_dtype: ReduceDtype | None = None
    prefetch: int = 1
    timeout_s: float = 1800.0
    backend: str | None = None

    def __post_init__(self) -> None:
        if self.prefetch < 0:
            raise ValueError(f"`Communication(prefetch={self.prefetch!r})` must be a number of units, 0 or more.")
        if self.timeout_s <= 0:
            raise ValueError(f"`Communication(timeout_s={self.timeout_s!r})` must be a positive number of seconds.")

    def gradient_dtype(self, compute_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of parameters with ``compute_dtype`` are reduced.

        Complex gradients are reduced as they are; other dtypes have no gradient unless they are floating-point.
        """
        if not compute_dtype.is_floating_point:
            return compute_dtype
        if self.reduce_dtype is not None:
            return _DTYPES[self.reduce_dtype]
        return torch.float64 if compute_dtype == torch.float64 else torch.float32


@checked_fields(use={"fraction": "Use a number from 0 to 1, or 'auto'."})
@dataclass(frozen=True, kw_only=True)
class Offload:
    """Storage for optimizer states, masters and parameters between their uses.

    Args:
        optimizer: ``"cpu"``: masters, optimizer states and reduced gradients are in host memory; the CPU steps them.
            ``"nvme"``: they are in files below ``path``, and in memory for a few units at a time. None: they stay on
            the device.
        params: At stage 3, where parameters are stored between uses: ``"cpu"``, ``"nvme"``, or None (the device).
        path: A directory on a local disk, or several, over which blocks are striped. Needed for ``"nvme"``, and used
            for nothing else. Nothing is left in it when the process ends, however it ends.
        fraction: Part of the parameters, by number of elements, whose units are offloaded; the first units of the model
            stay on the device. ``"auto"``: the device is filled first, then host memory, then disks, unit by unit,
            from the bytes that are free at the start.
        pin_memory: Lock host memory in place, for faster copies. Without CUDA it means nothing.
        buffer_bytes: Bytes of one read or write of a disk; a multiple of 4096.
        io_threads: Reads and writes that run at once.
        direct: Read and write past the page cache of the system, which would take the memory that offloading saves.
        step_device: Where offloaded optimizer states are stepped: ``"cpu"``, or ``"cuda"``, to which they are streamed.
            None: with CUDA each unit where it is faster, by measured rates.
    """

    optimizer: OffloadTarget | None = "cpu"
    params: OffloadTarget | None = None
    path: str | Path | Sequence[str | Path] | None = None
    fraction: float | Literal["auto"] = 1.0
    pin_memory: bool = True
    buffer_bytes: int = 2**22
    io_threads: int = 16
    direct: bool = True
    step_device: Literal["cpu", "cuda"] | None = None

    def __post_init__(self) -> None:
        if self.fraction != "auto" and not 0 <= self.fraction <= 1:
            raise ValueError(f"`Offload(fraction={self.fraction!r})` must be a number from 0 to 1, or 'auto'.")
        if self.uses_disks != bool(self.path):
            raise ValueError(
                f"`Offload(optimizer={self.optimizer!r}, params={self.params!r}, path={self.path!r})`: `path` says in"
                " which directories 'nvme' keeps its files. Give both or neither."
            )
        _require_positive(self, "io_threads", "buffer_bytes")
        if self.buffer_bytes % 4096:
            raise ValueError(f"`Offload(buffer_bytes={self.buffer_bytes!r})` must be a multiple of 4096.")
        if self.step_device is not None and self.optimizer is None:
            raise ValueError(
                f"`Offload(step_device={self.step_device!r})` says where an offloaded optimizer is stepped, and"
                " `optimizer=None` offloads none. Leave one of the two out."
            )

    @property
    def uses_disks(self) -> bool:
        """Whether something is in files."""
        return "nvme" in (self.optimizer, self.params)

    @property
    def paths(self) -> list[Path]:
        """The directories of ``path``; ``~`` is the user's home."""
        paths = [self.path] if isinstance(self.path, (str, Path)) else self.path or []
        return [Path(path).expanduser() for path in paths]

    @classmethod
    def of(cls, value: Any) -> Offload | None:
        """Return the option as an ``Offload``; given are ``"cpu"``, a dict of fields, an ``Offload``, or nothing.

        Raises:
            ValueError: Another word.
        """
        if value == "nvme":
            raise ValueError("`offload='nvme'` needs a path: `Offload(optimizer='nvme', path='/a/directory')`.")
        if isinstance(value, str) and value != "cpu":
            raise ValueError(f"`offload={value!r}` is not known. {OFFLOAD_USE}")
        offload: Offload | None = cls(optimizer="cpu") if value == "cpu" else from_fields(cls, value)
        return offload

    def check(self, sharding: Sharding, *, in_pipeline: bool = False) -> None:
        """Refuse fields that a stage, or a pipeline, does not support.

        Raises:
            ValueError: Parameters are to be offloaded that are whole on every rank, or something to disks in a
                pipeline.
        """
        stage = sharding.stage
        if in_pipeline and self.uses_disks:
            raise ValueError(
                "`pipeline` with `Offload(optimizer='nvme')` or `params='nvme'` does not exist yet. Use 'cpu', or no"
                " pipeline."
            )
        if self.params is not None and stage < 3:
            raise ValueError(
                f"`Offload(params={self.params!r})` needs `stage=3`, because parameters are whole on every rank below"
                f" it (got `stage={stage}`). Use stage 3, or `offload='cpu'` for the optimizer alone."
            )


@checked_fields(use={"policy": _POLICY_USE})
@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointing:
    """Recompute activations of chosen modules in the backward pass instead of keeping them.

    Args:
        modules: Classes, or names of classes, whose calls are checkpointed; by default the repeated blocks.
        every: Checkpoint every n-th of the modules; the others keep their activations.
        policy: Tensors of a call that are kept. ``"full"``: its inputs. ``"selective"``: the results of matrix products
            and attention too. ``"offload"``: its inputs, in host memory. ``"partition"``: with ``tensor_parallel``, a
            piece of each of its inputs; the tensor ranks have one each. ``"auto"``: after two steps the cheapest of
            everything, selective, full and offload that a forecast says will fit.
        budget_bytes: With ``"auto"``: bytes the chosen modules may keep on a rank; None: the free bytes of the GPU.
        preserve_rng_state: Compute again with the same random numbers (dropout). Costs a little time; off is right only
            where nothing is random.
    """

    modules: Sequence[str | type[nn.Module]] | None = None
    every: int = 1
    policy: CheckpointPolicy = "full"
    budget_bytes: int | None = None
    preserve_rng_state: bool = True

    def __post_init__(self) -> None:
        if self.budget_bytes is not None and (self.policy != "auto" or self.budget_bytes < 0):
            raise ValueError(
                f"`ActivationCheckpointing(budget_bytes={self.budget_bytes!r}, policy={self.policy!r})`: the budget is"
                " a number of bytes, 0 or more, and for `policy='auto'` alone."
            )
        if self.every < 1:
            raise ValueError(f"`ActivationCheckpointing(every={self.every!r})` must be a number of modules, 1 or more.")

    @classmethod
    def of(cls, value: Any) -> ActivationCheckpointing | None:
        """Return the strategy's option as a config; given are True, classes, a dict of fields, or nothing."""
        if value is None or value is False:
            return None
        if value is True:
            return cls()
        if isinstance(value, (cls, dict)):
            return from_fields(cls, value)  # type: ignore[no-any-return]
        return cls(modules=[value] if isinstance(value, type) else list(value))


@checked_fields(
    use={
        "compute_dtype": "Use torch.bfloat16, torch.float16 or None.",
        "lowered": "Use a list of classes or names of classes, for example `lowered=['Experts']`.",
    }
)
@dataclass(frozen=True, kw_only=True)
class MixedPrecision:
    """In which dtype parameters compute and in which they are stepped.

    Args:
        compute_dtype: ``None``: parameters compute in the dtype they have. A 16-bit dtype: the fp32 weights of linear
            layers, convolutions, embeddings and attention compute in it; all others, such as the matrices of modules
            that are not PyTorch's, stay as they are (ADR 0014).
        masters: Keep fp32 masters of 16-bit parameters. Without them the optimizer steps the 16-bit values.
        lowered: Classes of modules, or their names, whose own fp32 matrices compute in ``compute_dtype`` as well, for
            example experts that give their weights to nothing but matrix products.
    """

    compute_dtype: torch.dtype | None = None
    masters: bool = True
    lowered: Sequence[str | type[nn.Module]] = ()

    def __post_init__(self) -> None:
        if self.compute_dtype not in (None, torch.bfloat16, torch.float16):
            raise ValueError(
                f"`MixedPrecision(compute_dtype={self.compute_dtype})` must be torch.bfloat16, torch.float16 or None."
            )
        object.__setattr__(self, "lowered", tuple(self.lowered))
        if self.lowered and self.compute_dtype is None:
            raise ValueError(
                f"`lowered={list(self.lowered)!r}` says which other matrices compute in 16 bits, and none does. Use it"
                " with precision='bf16-mixed' or '16-mixed' (`compute_dtype=torch.bfloat16` in `MixedPrecision`), or"
                " leave it out."
            )

    def master_dtype(self, original: torch.dtype, compute: torch.dtype) -> torch.dtype:
        """Return the dtype in which a parameter that arrived as ``original`` and computes in ``compute`` is stepped."""
        if not compute.is_floating_point:
            return compute
        if original.itemsize > compute.itemsize:
            return original
        return torch.float32 if self.masters and compute.itemsize < 4 else compute


@checked_fields(use={"partition": _PARTITION_USE, "schedule": _SCHEDULE_USE})
@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The cut of a model into pipeline stages, and the order in which micro-batches go through them.

    Args:
        stages: Number of stages; the ranks are stages times copies of the model. 1 is no pipeline.
        module: Name of the list of blocks that is cut (``"net.blocks"``), or of a module around it. The default is the
            list in which the most parameters can be spread over stages.
        partition: Where the list is cut. ``"parameters"`` evens out the parameters of the stages, ``"uniform"`` the
            blocks, ``"type:Regex"`` the blocks whose class name matches, ``"flops"`` the counted operations of a
            forward, ``"measured"`` the time it takes: rank 0 runs a step on the first batch. A list names the first
            block of every stage but the first, by name or position.
        microbatches: Pieces into which a training batch is cut, along the first dimension of its tensors. The default
            is as many as stages. Where they do not divide a batch, sizes differ by one.
        schedule: ``"gpipe"``: all forwards, then all backwards. ``"1f1b"``: one forward, one backward; keeps fewer
            activations (PipeDream, arXiv:1806.03377). ``"interleaved_1f1b"``: several chunks of the model a stage, for
            a smaller bubble (arXiv:2104.04473). ``"zb_h1"``: as ``"1f1b"``, and gradients of weight matrices are
            computed where a stage would wait (arXiv:2401.10241); every stage keeps as much as the first, and
            the inputs of products until then, those of recomputed blocks, too.
        chunks: Chunks of the model on every stage: 1, and 2 or more for ``"interleaved_1f1b"``, whose default is 2.
        first: Modules in front of the blocks that seem to lie behind them.
        last: Modules behind the blocks that seem to lie in front of them.
        shared: Parameters that code of several stages uses by name, for example an embedding's weight as the head's;
            a parameter under two names is found.
        reduce: When the copies of a stage reduce gradients at ZeRO stage 3. ``"microbatch"``: after every backward.
            ``"step"``: once per batch, and hold the stage's whole gradients until then, as the other ZeRO stages,
            several chunks a stage and ``"zb_h1"`` do anyway. ``"auto"``: once if they take at most a tenth of the
            device's memory.
    """

    stages: int = 2
    module: str | None = None
    partition: str | Sequence[str] | Sequence[int] = "parameters"
    microbatches: int | None = None
    schedule: Schedule = "1f1b"
    chunks: int | None = None
    first: Sequence[str] | None = None
    last: Sequence[str] | None = None
    shared: Sequence[str] | None = None
    reduce: ReduceTime = "auto"

    def __post_init__(self) -> None:
        _require_positive(self, "stages", "microbatches", "chunks")
        is_interleaved = self.schedule == "interleaved_1f1b"
        if is_interleaved != (self.num_chunks > self.stages) and self.stages > 1:
            raise ValueError(
                f"`chunks={self.chunks}` does not fit `schedule={self.schedule!r}`: 'interleaved_1f1b' needs 2 or more"
                " chunks a stage, the others have 1."
            )
        if self.reduce == "microbatch" and (is_interleaved or self.splits_backward):
            why = (
                "a backward brings a part of the gradients"
                if self.splits_backward
                else ("a reduction takes all chunks of a stage")
            )
            raise ValueError(
                f"`reduce='microbatch'` does not work with `schedule={self.schedule!r}`: {why}. Use 'auto' or 'step'."
            )
        self._check_microbatches()
        self._check_partition()

    def check(self, stage: int) -> None:
        """Refuse fields that a ZeRO stage does not support.

        Raises:
            ValueError: Gradients are to be reduced after every micro-batch below stage 3.
        """
        if self.reduce == "microbatch" and stage < 3:
            raise ValueError(
                f"`Pipeline(reduce='microbatch')` needs `stage=3` (got `stage={stage}`): below it gradients are reduced"
                " once per batch. Use 'auto' or 'step'."
            )

    def _check_microbatches(self) -> None:
        number = self.num_microbatches
        if self.schedule in ("1f1b", "zb_h1") and number < self.stages:
            raise ValueError(
                f"`microbatches={number}` leaves stages of `schedule={self.schedule!r}` without work. Use at least"
                f" `stages={self.stages}` micro-batches, or 'gpipe'."
            )
        if self.schedule == "interleaved_1f1b" and number % self.stages:
            raise ValueError(
                f"`microbatches={number}` must be a multiple of `stages={self.stages}` for"
                " `schedule='interleaved_1f1b'`."
            )

    def _check_partition(self) -> None:
        if not isinstance(self.partition, str):
            if len(self.partition) != self.num_chunks - 1:
                raise ValueError(
                    f"`partition={self.partition!r}` names {len(self.partition)} first blocks, and"
                    f" {self.num_chunks} chunks need {self.num_chunks - 1}: one for every chunk but the first."
                )
        elif self.partition.startswith("type:"):
            try:
                re.compile(self.partition.removeprefix("type:"))
            except re.error as error:
                raise ValueError(f"`partition={self.partition!r}` is no regular expression: {error}.") from error
        elif self.partition not in _PARTITIONS:
            raise ValueError(
                f"`Pipeline(partition={self.partition!r})` is not known.{nearest(self.partition, _PARTITIONS)}"
                f" {_PARTITION_USE}"
            )

    @property
    def num_chunks(self) -> int:
        """Chunks of the whole model."""
        return self.stages * (self.chunks or (2 if self.schedule == "interleaved_1f1b" else 1))

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed apart from those of activations."""
        return self.schedule == "zb_h1"

    @property
    def reduces_once(self) -> bool:
        """Whether the schedule has gradients reduced once per batch at every ZeRO stage."""
        return self.num_chunks > self.stages or self.splits_backward

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of a training batch."""
        return self.microbatches or self.stages


def last_target(offload: Offload) -> OffloadTarget:
    """Return where units are stored that find room nowhere else."""
    return "nvme" if offload.uses_disks else "cpu"


def _require_positive(options: Any, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"`{type(options).__name__}({name}={value!r})` must be a whole number, 1 or more.")
