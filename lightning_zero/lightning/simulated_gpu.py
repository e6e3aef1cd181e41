"""The memory of a GPU in forecasts and simulations, by which some options decide."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from lightning_zero.engine.units import capacity
from lightning_zero.forecast.live_bytes import LiveBytes, replaced
from lightning_zero.lightning import compatibility, pipelined_steps
from lightning_zero.parallel.activation import forecast as activations

__all__ = ["GPU_BYTES", "simulated_gpu"]

GPU_BYTES = 80 * 2**30  # unless the memory is named


@contextmanager
def simulated_gpu(counter: LiveBytes, accelerator: str, nbytes: int | None) -> Iterator[None]:
    """Let a run that is counted find the memory of a GPU, unless its accelerator is the CPU.

    Args:
        counter: Of the bytes that are taken.
        accelerator: As in ``simulate_step``.
        nbytes: Memory of the GPU; None: ``GPU_BYTES``.
    """
    total = GPU_BYTES if nbytes is None else nbytes
    with ExitStack() as stack:
        if accelerator != "cpu":
            stack.enter_context(replaced(pipelined_steps, "device_bytes", lambda *_: total))
            stack.enter_context(replaced(activations, "free_at_peak", lambda _: total - counter.peak.nbytes))
            stack.enter_context(replaced(capacity, "free_bytes", lambda *_: (total, 0)))
            stack.enter_context(replaced(compatibility, "refuse_without_budget", lambda *_: None))
        yield
