"""Choice of the checkpointing policy that fits into memory: ``ActivationCheckpointing(policy="auto")``.

The first two steps run as with ``"offload"``, which keeps the least, but for one call of each class of modules: it
keeps everything, and its bytes are counted. Then all other tensors of a step have been alive, so the memory
that is left on the device is known. With the largest counted call, and the most calls that waited for their
backward at once, a policy needs::

    none       calls x bytes alive after the call
    selective  calls x (inputs + results of matrix products and attention)
    full       calls x inputs
    offload    0

The first that fits is taken; of the ranks' choices the one that keeps the least.

Call protocol: ``begin_batch`` before each micro-batch of the first steps, ``trace`` and ``note_waiting`` in it,
``note_peak`` after its backward, and ``settle`` after every step that an optimizer has made, on all ranks, until
``policy`` is not None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_zero.blocks import inner_module
from lightning_zero.storage.copies import memory_of, most_allocated, reset_most_allocated
from lightning_zero.trees import tree_leaves

__all__ = ["Forecast", "KeptBytes", "Settled", "free_at_peak"]

Settled = Literal["none", "selective", "full", "offload"]
_ORDER: tuple[Settled, ...] = get_args(Settled)  # from the cheapest in time to the cheapest in memory
_STEPS = 2  # of each optimizer: the first one makes its states, so the second one has all that a step needs
_LAST = 20  # steps of an optimizer, behind which no other one is waited for
_USABLE = 0.9  # of free memory; the rest is for holes between allocations
_UNKNOWN = -1  # no call was counted yet


@dataclass(frozen=True)
class KeptBytes:
    """Bytes that one call keeps until its backward, in the order of the policies."""

    none: int = 0
    selective: int = 0
    full: int = 0
    offload: int = 0


class Forecast:
    """Counts calls and bytes of the first steps and chooses by them.

    Args:
        budget_bytes: Bytes the checkpointed modules may keep on this rank; None: the free ones of the CUDA device.
        is_product: Whether an operation's results are kept by ``"selective"``.
    """

    def __init__(self, budget_bytes: int | None, is_product: Callable[[Any], bool]) -> None:
        self.policy: Settled | None = None  # None until it is settled
        self._budget_bytes = budget_bytes
        self._is_product = is_product
        # - Of the first steps
        self._kept: dict[type, KeptBytes] = {}  # by class of module
        self._most_waiting = 1  # calls
        self._num_steps: Counter[int] = Counter()  # by optimizer
        self._device: torch.device | None = None
        self._most_allocated = 0  # bytes in tensors of a CUDA device, in micro-batches and steps of optimizers

    def begin_batch(self, device: torch.device) -> None:
        """Measure the peak of ``device`` anew, which has been that of set-up, validation and saving too."""
        if self.policy is None and self._budget_bytes is None:
            self._device = device
            if device.type == "cuda":
                reset_most_allocated(device)

    def note_peak(self) -> None:
        """Take note of the peak since ``begin_batch``."""
        if self.policy is None and self._device is not None and self._device.type == "cuda":
            self._most_allocated = max(self._most_allocated, most_allocated(self._device))

    def wants(self, module: torch.nn.Module) -> bool:
        """Say whether the next call of ``module`` is to be traced."""
        return self.policy is None and type(inner_module(module)) not in self._kept

    def trace(self, module: torch.nn.Module, run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a call that keeps its activations, and count them."""
        inputs = _storages(tree_leaves((args, kwargs)))
        with _Made(self._is_product) as made:
            result = run(*args, **kwargs)
        full = sum(storage.nbytes() for storage in inputs.values())
        self._kept[type(inner_module(module))] = KeptBytes(
            none=made.alive(), selective=full + made.of_products, full=full
        )
        return result

    def note_waiting(self, calls: int) -> None:
        """Take note of how many calls wait for their backward."""
        self._most_waiting = max(self._most_waiting, calls)

    def settle(self, largest: Callable[[int], int], *, stepped: int = 0, num_optimizers: int = 1) -> str | None:
        """Choose a policy if every optimizer has made enough steps, or one many; return a line that names it, once.

        Collective: all ranks, after every step of an optimizer until the policy is settled.

        Args:
            largest: Returns the largest of the ranks' numbers.
            stepped: The number of the optimizer that has made a step.
            num_optimizers: Number of optimizers.
        """
        self.note_peak()
        self._num_steps[stepped] += 1
        late = [number for number in range(num_optimizers) if self._num_steps[number] < _STEPS]
        if self.policy is not None or (late and self._num_steps[stepped] < _LAST):
            return None
        budget = self._free_bytes() if self._budget_bytes is None else self._budget_bytes
        needed = self.needed()
        choice = next((place for place, nbytes in enumerate(needed) if nbytes <= budget), len(_ORDER) - 1)
        choice = largest(choice if self._kept else _UNKNOWN)
        if choice == _UNKNOWN:
            return None
        self.policy = _ORDER[choice]
        sizes = ", ".join(f"{name} {nbytes / 2**20:.1f}" for name, nbytes in zip(_ORDER[:-1], needed, strict=False))
        return (
            f"activation checkpointing: 'auto' is {self.policy!r}. {self._most_waiting} calls would keep, in MiB:"
            f" {sizes}; {budget / 2**20:.1f} may be kept on this rank."
            + (f" Without the states of optimizer(s) {late}, which have not stepped twice." if late else "")
        )

    def needed(self) -> tuple[int, ...]:
        """Return the bytes that each policy needs, in the order of the policies."""
        kept = [astuple(one) for one in self._kept.values()] or [astuple(KeptBytes())]
        return tuple(self._most_waiting * max(of_policy) for of_policy in zip(*kept, strict=True))

    def _free_bytes(self) -> int:
        return 0 if self._device is None else int(_USABLE * free_at_peak(self._device, self._most_allocated))


def free_at_peak(device: torch.device, most: int) -> int:
    """Return the bytes of a GPU that were still free when ``most`` were in tensors; of a CPU 0."""
    if device.type != "cuda":
        return 0
    memory = memory_of(device)
    return memory.free + memory.reserved - most


class _Made(TorchDispatchMode):
    """Follows the storages that operations make, other than those of their arguments."""

    supports_higher_order_operators = True

    def __init__(self, is_product: Callable[[Any], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.of_products = 0  # bytes
        self._is_product = is_product
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let functions that are compiled be compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = _storages(tree_leaves((args, kwargs)))
        for key, storage in _storages(tree_leaves(result)).items():
            if key not in given:
                self._made[key] = (StorageWeakRef(storage), storage.nbytes())  # type: ignore[no-untyped-call]
                self.of_products += storage.nbytes() if self._is_product(func) else 0
        return result

    def alive(self) -> int:
        """Return the bytes that are alive."""
        alive = [nbytes for made, nbytes in self._made.values() if not made.expired()]  # type: ignore[no-untyped-call]
        return sum(alive)


def _storages(leaves: Iterable[Any]) -> dict[int, torch.UntypedStorage]:
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
