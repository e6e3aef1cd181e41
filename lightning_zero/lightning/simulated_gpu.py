"""The memory of a GPU in forecasts and simulations, by which some options decide."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from lightning_zero.checkpoint.safetensors import parse_size
from lightning_zero.engine.units import capacity
from lightning_zero.forecast.live_bytes import LiveBytes, replaced
from lightning_zero.lightning import compatibility, pipelined_steps
from lightning_zero.lightning.strategy import ZeroStrategy
from lightning_zero.parallel.activation import forecast as activations

__all__ = ["assumptions", "gpu_bytes", "simulated_gpu"]

_GPU_BYTES = 80 * 2**30  # unless the memory is named


@contextmanager
def simulated_gpu(counter: LiveBytes, accelerator: str, nbytes: int | None) -> Iterator[None]:
    """Let a run that is counted find the memory of a GPU, unless its accelerator is the CPU.

    Args:
        counter: Of the bytes that are taken.
        accelerator: As in ``simulate_step``.
        nbytes: Memory of the GPU; None: 80 GiB.
    """
    total = _GPU_BYTES if nbytes is None else nbytes
    with ExitStack() as stack:
        if accelerator != "cpu":
            stack.enter_context(replaced(pipelined_steps, "device_bytes", lambda *_: total))
            stack.enter_context(replaced(activations, "free_at_peak", lambda *_: total - counter.peak.nbytes))
            stack.enter_context(replaced(capacity, "free_bytes", lambda *_: (total, 0)))
            stack.enter_context(replaced(compatibility, "refuse_without_budget", lambda *_: None))
        yield


def assumptions(strategy: ZeroStrategy, *, has_stage_3: bool, argument: str) -> Iterator[str]:
    """Yield a sentence for each option that decides by the memory of a GPU, which nobody has named.

    Args:
        strategy: The strategy.
        has_stage_3: Whether a setting of stage 3 is run.
        argument: Names the memory.
    """
    pipeline, checkpointing = strategy.pipeline, strategy.activation_checkpointing
    deciding = {
        '`Pipeline(reduce="auto")` of stage 3': pipeline is not None and pipeline.reduce == "auto" and has_stage_3,
        '`ActivationCheckpointing(policy="auto")`': checkpointing is not None
        and checkpointing.policy == "auto"
        and checkpointing.budget_bytes is None,
        '`Offload(fraction="auto")`': strategy.offload is not None and strategy.offload.fraction == "auto",
    }
    for option, decides in deciding.items():
        if decides:
            yield (
                f"{option} decides by the memory of a GPU, taken as {_GPU_BYTES // 2**30} GiB. Name it with"
                f" `{argument}`."
            )


def gpu_bytes(option: str, text: str | None) -> int | None:
    """Return the bytes that an option of a command says, or None.

    Raises:
        ValueError: It is no size.
    """
    if text is None:
        return None
    try:
        return parse_size(text)
    except ValueError as error:
        raise ValueError(
            f"`--{option}={text}` is not a size. Use a number of bytes, or text such as '80GiB'."
        ) from error
