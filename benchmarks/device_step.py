"""Steps of one rank on a GPU beside the plain PyTorch loop: ``python -m benchmarks.device_step stage3-cpu``.

Both train the same GPT in bf16 with fp32 masters, clipping by norm and fused AdamW, and take turns. First their losses
have to agree. Where nothing is offloaded the host must not wait for the GPU in a step: the steps run under
``torch.cuda.set_sync_debug_mode("error")``, and a wait, for an event or a stream too, is an error. A second row is what
the allocator has given out at the end of a backward beside the engine's accounts. ``--device cpu`` shows that it runs,
and measures no memory.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.models import GPT, SHAPES, UNITS, random_batch
from benchmarks.opponents import fused_adamw
from benchmarks.step import percentiles_ms, ratio_interval
from benchmarks.table import Row, append, heading
from benchmarks.turns import named_device
from lightning_zero.config import MixedPrecision, Offload
from lightning_zero.engine.engine import ZeroEngine

__all__ = ["PLACEMENTS", "Placement", "main", "measure"]

GATE_STEPS = 3
GATE_TOLERANCE = 0.02  # of the loss: both round to bf16, in other places
MEMORY_BOUND = 1.02
MEMORY_EXTRA = 2**24  # scalars, and the allocator's rounding
MAX_NORM = 1.0
_STEPS_PER_TURN = 3


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The placement of a model's states.

    Attributes:
        options: Of the engine.
        may_wait: Whether the host may wait for the GPU in a step.
    """

    options: dict[str, Any] = field(default_factory=dict)
    may_wait: bool = False


PLACEMENTS = {
    **{f"stage{stage}": Placement(options={"stage": stage}) for stage in range(4)},
    "stage3-deferred": Placement(options={"stage": 3, "step": "deferred"}),
    "stage2-cpu": Placement(options={"stage": 2, "offload": Offload(optimizer="cpu")}, may_wait=True),
    "stage3-cpu": Placement(options={"stage": 3, "offload": Offload(optimizer="cpu")}, may_wait=True),
    "stage3-streamed": Placement(
        options={"stage": 3, "offload": Offload(optimizer="cpu", step_device="cuda")}, may_wait=True
    ),
    "stage3-params": Placement(options={"stage": 3, "offload": Offload(optimizer=None, params="cpu")}, may_wait=True),
    "stage3-cpu-params": Placement(
        options={"stage": 3, "offload": Offload(optimizer="cpu", params="cpu")}, may_wait=True
    ),
}


class _Plain:
    """The loop without an engine."""

    def __init__(self, model: str, device: torch.device) -> None:
        self._device = device
        self.module: Any = GPT.seeded(model).to(device)
        self._optimizer = fused_adamw(self.module.parameters())

    def backward(self, batch: Tensor) -> Tensor:
        with torch.autocast(self._device.type, torch.bfloat16):
            loss: Tensor = self.module(batch)
        loss.backward()
        return loss.detach()

    def step(self, batch: Tensor) -> Tensor:
        loss = self.backward(batch)
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss


class _Engine(_Plain):
    """The same with one."""

    def __init__(self, model: str, device: torch.device, options: dict[str, Any]) -> None:
        self._device = device
        precision = MixedPrecision(compute_dtype=torch.bfloat16)
        self.engine = ZeroEngine(units=UNITS, device=device, precision=precision, **options)
        self.module = self.engine.shard(GPT.seeded(model).to(device))
        self._optimizer = self.engine.attach(fused_adamw(self.module.parameters()))

    def backward(self, batch: Tensor) -> Tensor:
        with self.engine.scope("training_step"), torch.autocast(self._device.type, torch.bfloat16):
            loss: Tensor = self.module(batch)
            with self.engine.backward_scope():
                loss.backward()
        return loss.detach()

    def step(self, batch: Tensor) -> Tensor:
        loss = self.backward(batch)
        self.engine.clip_grad_norm(self._optimizer, MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss


def measure(name: str, *, model: str, tokens: int, turns: int, device: torch.device) -> list[Row]:
    """Return the rows of a placement.

    Raises:
        RuntimeError: Losses differ from those of the plain loop, or the host has waited where it must not.
    """
    placement = PLACEMENTS[name]
    batches = [random_batch(model, tokens, step=step, rank=0).to(device) for step in range(_STEPS_PER_TURN)]
    memory = _memory(placement, model, batches, device) if device.type == "cuda" else None
    plain, engine = _Plain(model, device), _Engine(model, device, placement.options)
    for step in range(GATE_STEPS):
        batch = batches[step % len(batches)]
        ours, theirs = engine.step(batch).item(), plain.step(batch).item()
        if not abs(ours - theirs) <= GATE_TOLERANCE * abs(theirs):
            raise RuntimeError(f"The loss of step {step} is {ours}, and {theirs} in the plain loop.")
    seconds: dict[_Plain, list[float]] = {plain: [], engine: []}
    for turn in range(turns + 1):
        for side in (plain, engine) if turn % 2 else (engine, plain):
            duration = _seconds(side, batches, device, may_wait=placement.may_wait or side is plain)
            if turn:  # the first is a warm-up
                seconds[side].append(duration)
    engine.engine.close()
    ratio, lo, hi = ratio_interval(seconds[engine], seconds[plain])
    verdict = "" if placement.may_wait or device.type == "cpu" else "no host waits"
    times = _row(name, model, tokens, "time", "ms", verdict=verdict, **percentiles_ms(seconds[engine]))
    rows = [replace(times, ratio=f"{ratio:.3f}", lo=f"{lo:.3f}", hi=f"{hi:.3f}")]
    if memory is not None:
        rows.append(_memory_row(name, model, tokens, *memory))
    return rows


def _seconds(side: _Plain, batches: list[Tensor], device: torch.device, *, may_wait: bool) -> float:
    """Return how long a step takes, of some that the host asks for at once."""
    _finish(device)
    started = time.perf_counter()
    with nullcontext() if may_wait else _no_waits(device):
        for batch in batches:
            side.step(batch)
    _finish(device)
    return (time.perf_counter() - started) / len(batches)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _no_waits(device: torch.device) -> Iterator[None]:
    """Let a wait of the host for the GPU be an error."""
    if device.type != "cuda":
        yield
        return
    with ExitStack() as stack:
        for owner in (torch.cuda, torch.cuda.Event, torch.cuda.Stream):  # not seen by PyTorch's mode
            if hasattr(owner, "synchronize"):
                stack.enter_context(mock.patch.object(owner, "synchronize", _refuse_wait))
        stack.callback(torch.cuda.set_sync_debug_mode, "default")
        torch.cuda.set_sync_debug_mode("error")
        yield


def _refuse_wait(*args: Any) -> None:
    raise RuntimeError("The host waits for the GPU in a step that offloads nothing.")


# -- Memory ------------------------------------------------------------------------------------------------------------


def _memory(placement: Placement, model: str, batches: list[Tensor], device: torch.device) -> tuple[int, int]:
    """Return the bytes that are given out for training at the end of the second backward, and those of the accounts."""
    _Plain(model, device).step(batches[0])  # libraries allocate their own memory
    gc.collect()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    side = _Engine(model, device, placement.options)
    side.step(batches[0])
    side.backward(batches[1])
    gc.collect()
    torch.cuda.synchronize(device)
    found = torch.cuda.memory_allocated(device) - before
    counted = sum(side.engine.stats().memory.values())
    side.engine.close()
    return found, counted


def _memory_row(name: str, model: str, tokens: int, found: int, counted: int) -> Row:
    is_as_counted = counted / MEMORY_BOUND - MEMORY_EXTRA <= found <= MEMORY_BOUND * counted + MEMORY_EXTRA
    verdict = "ok" if is_as_counted else "FAIL"
    return _row(
        name, model, tokens, "allocated/accounts", "GiB", p50=f"{found / 2**30:.3f}",
        ratio=f"{found / max(counted, 1):.3f}", bound=f"{MEMORY_BOUND}", verdict=verdict,
    )  # fmt: skip


def _row(name: str, model: str, tokens: int, metric: str, unit: str, **measured: str) -> Row:
    return Row(
        what="device_step", variant=f"{name}/plain", shape=f"{model}-{tokens}tok", dtype="bf16", world=1,
        metric=metric, unit=unit, **measured, **named_device(),
    )  # fmt: skip


def main() -> None:
    """Measure one placement from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("placement", choices=PLACEMENTS)
    parser.add_argument("--model", choices=SHAPES, default="268m")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--no-csv", action="store_true", help="print only")
    options = parser.parse_args()
    rows = measure(
        options.placement,
        model=options.model,
        tokens=options.tokens,
        turns=options.turns,
        device=torch.device(options.device),
    )
    print(heading(), *rows, sep="\n", flush=True)
    if not options.no_csv:
        append(rows, "gpu")
    raise SystemExit(any(row.verdict == "FAIL" for row in rows))


if __name__ == "__main__":
    main()
