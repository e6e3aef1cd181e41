"""Random numbers in regions that are computed in parts: every rank draws its own there, and the same ones outside.

Note [Seeds from the agreed state]
    Between a column layer and its row layer a rank has its own features, and needs dropout masks of its own; outside of
    such regions the masks must be the same on all ranks, or their results drift apart. On entering a region the
    generator is seeded from its state, which all ranks share, and the rank. On leaving the state comes back, one draw
    further. So there is no second stream to keep: activation checkpointing restores the state in front of a block, and
    the recomputation finds the same seeds; a checkpoint of the generators resumes them. Whether a region is entered is
    read from the generator's seed, because a recomputation may stop in the middle of a region. A region without a row
    layer ends in the loss (``loss.py``), and one that an error leaves where the error passes, or at the next step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_zero.errors import PartialParameterError
from lightning_zero.moe.experts import Experts
from lightning_zero.moe.routing import Router
from lightning_zero.parallel.tensor.collectives import Ranks, copy_to_ranks

__all__ = ["Region", "draws_numbers", "dropout_rates", "refuse_draws_inside", "stop_drawing"]


class Region:
    """Switches the random generator of a device between the agreed stream and this rank's own.

    Args:
        module: The cut module; without dropout in it nothing is switched.
        ranks: The tensor group.
        in_sequence: Ranks have parts of a sequence: routers and experts too draw for the tokens of one rank.
    """

    def __init__(self, module: nn.Module, ranks: Ranks, *, in_sequence: bool = False) -> None:
        self._ranks = ranks
        own = set(module.modules())
        has_dropout = any(rate > 0 for child, _, rate in dropout_rates(module) if child in own)
        self._is_random = draws_numbers(module) if in_sequence else has_dropout
        self._entrance: _Entrance | None = None  # of the region that was entered last, until it is left
        self._seed: int | None = None  # of the region that was entered last
        self._agreed: Tensor | None = None  # state of the generator in front of it
        self._entered: Tensor | None = None  # its state behind the entrance
        self._place: int | None = None  # among the nodes of autograd's graph, of the entrance
        self._device: torch.device | None = None  # whose generator that is

    def copied(self, tensor: Tensor, ranks: Ranks) -> Tensor:
        """Return a tensor copied to the ranks; layers with the same input, such as query, key and value, share one.

        So their gradients are added before one sum over the ranks, not after three.
        """
        if torch.compiler.is_compiling() or isinstance(tensor, FakeTensor):
            return copy_to_ranks(tensor, ranks)
        known = None if self._entrance is None else self._entrance.of(tensor)
        if known is None:
            self._refuse_drawn(tensor)
            known = copy_to_ranks(tensor, ranks)
            self._entrance = _Entrance(tensor, known)
        return known

    def _refuse_drawn(self, tensor: Tensor) -> None:
        """Refuse a whole tensor that may have been computed with this rank's own random numbers.

        Raises:
            PartialParameterError: Numbers were drawn since the region was entered.
        """
        if self._agreed is None or self._entered is None or tensor.device != self._device:
            return
        place = _place_of(tensor)
        if place is None or (self._place is not None and place < self._place):
            return  # it was there before the region was entered
        generator = _generator_of(tensor.device)
        if generator.initial_seed() == self._seed and not torch.equal(generator.get_state(), self._entered):
            raise PartialParameterError(
                f"A layer that is cut over the tensor ranks is given a whole tensor of shape {tuple(tensor.shape)}, and"
                " random numbers were drawn inside of the cut region before: a dropout in front of the layer drops"
                " other elements on every tensor rank. Set that dropout to 0 (`lora_dropout=0.0`), or leave the layer"
                " out of the plan with a `TensorPlan`."
            )

    def refuse_inside(self, name: str, tensor: Tensor) -> None:
        """Refuse a module that draws the numbers of whole tokens with this rank's own generator.

        Raises:
            PartialParameterError: A cut region was entered and not left.
        """
        if self._seed is None or tensor.device != self._device:
            return
        if _generator_of(tensor.device).initial_seed() == self._seed:
            raise PartialParameterError(
                f"`{name}` draws random numbers for whole tokens between a layer that is cut over the tensor ranks and"
                " the one that sums its results: every tensor rank would draw others. Call it in front of the first or"
                " behind the second, let it draw none (`use_rts=False` and `noisy_gate_policy=None` of `MoE`, a rate of"
                " 0), or leave these layers out of the plan with a `TensorPlan`."
            )

    def refuse_older(self, name: str, tensor: Tensor) -> None:
        """Refuse a dropout of this rank's own elements on a whole tensor.

        Raises:
            PartialParameterError: The tensor was computed before the cut region was entered that is not left yet.
        """
        place = _place_of(tensor)
        if place is None or self._place is None or place >= self._place or self._agreed is None:
            return
        if tensor.device == self._device and _generator_of(tensor.device).initial_seed() == self._seed:
            raise PartialParameterError(
                f"The dropout `{name}` is given a tensor of shape {tuple(tensor.shape)} that was computed in front of a"
                " layer that is cut over the tensor ranks, before another layer sums its results: every tensor rank"
                " would drop other elements of it. Call it in front of the first layer or behind the second, set its"
                " rate to 0 (`lora_dropout=0.0`), or leave these layers out of the plan with a `TensorPlan`."
            )

    def forget_copy(self) -> None:
        """Release the copy of the last input: no layer with the same input follows."""
        self._entrance = None

    def enter(self, tensor: Tensor, training: bool) -> None:
        """Draw this rank's own numbers from here on. ``tensor`` is on the device in question."""
        if not (self._is_random and training):
            return
        generator = _generator_of(tensor.device)
        if generator.initial_seed() != self._seed:
            self._agreed = generator.get_state()
            self._seed = _seed(self._agreed, self._ranks.rank)
            generator.manual_seed(self._seed)
            self._entered = generator.get_state()
            self._place = _place_of(tensor)
            self._device = tensor.device
            self._ranks.end_region = self.end

    def leave(self, tensor: Tensor, training: bool) -> None:
        """Go on with the numbers that all ranks draw."""
        self.forget_copy()
        if self._is_random and training:
            self._go_on(tensor.device)

    def end(self) -> None:
        """Leave the region that was entered last, where no row layer does."""
        self.forget_copy()
        if self._device is not None:
            self._go_on(self._device)

    def _go_on(self, device: torch.device) -> None:
        self._ranks.end_region = None
        generator = _generator_of(device)
        if generator.initial_seed() == self._seed and self._agreed is not None:
            generator.set_state(self._agreed)
            torch.rand((), device=device)  # the next region gets another seed
            self._agreed = None


class _Entrance:
    """The input of a region, which it does not keep alive, and its copy.

    The copy is kept: a linear layer saves a view of it for its backward, so nobody else may hold the copy itself.
    """

    def __init__(self, tensor: Tensor, copy: Tensor) -> None:
        self._tensor, self._copy = ref(tensor), copy
        self._version = tensor._version
        self._has_graph = torch.is_grad_enabled()

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return the copy of a tensor that is the input and was not written into since."""
        if self._tensor() is not tensor or self._has_graph != torch.is_grad_enabled():
            return None
        return self._copy if tensor._version == self._version else None


def dropout_rates(module: nn.Module) -> Iterator[tuple[nn.Module, str, float]]:
    """Yield the rates of dropout and jitter of a module: owner, name of the attribute, and rate."""
    for child in _modules(module):
        for name, value in vars(child).items():
            is_rate = "drop" in name.lower() or "jitter" in name.lower()
            is_rate |= name == "p" and isinstance(child, nn.modules.dropout._DropoutNd)
            if is_rate and isinstance(value, float):
                yield child, name, value


def draws_numbers(module: nn.Module) -> bool:
    """Say whether a module draws random numbers in training: by dropout, jitter, or routers."""
    routers = (child for child in module.modules() if isinstance(child, Router))
    return any(rate > 0 for _, _, rate in dropout_rates(module)) or any(one.is_random for one in routers)


def refuse_draws_inside(module: nn.Module, region: Region) -> None:
    """Let calls be refused that draw numbers for whole tensors, in modules inside of the region.

    Routers, experts and modules with jitter draw for whole tokens. Dropout does where its tensor is older than the
    region.
    """
    for name, child in module.named_modules():
        if isinstance(child, nn.modules.dropout._DropoutNd):
            refuse = region.refuse_older
            is_random = child.p > 0
        else:
            refuse = region.refuse_inside
            is_random = draws_numbers(child) if isinstance(child, (Router, Experts)) else _has_jitter(child)
        if is_random:
            child.register_forward_pre_hook(DrawsOutside(refuse, name), with_kwargs=True)


def _has_jitter(module: nn.Module) -> bool:
    return any("jitter" in key.lower() and isinstance(one, float) and one > 0 for key, one in vars(module).items())


class DrawsOutside:
    """A hook in front of a module that draws numbers, which all tensor ranks must draw alike for whole tensors.

    Args:
        refuse: Is given the name and the tensor; a method of the region.
        name: Of the module.
    """

    def __init__(self, refuse: Callable[[str, Tensor], None], name: str) -> None:
        self._refuse = refuse
        self._name = name

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a call inside of the region."""
        tensor = next((one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)), None)
        if module.training and tensor is not None and not isinstance(tensor, FakeTensor):
            self._refuse(self._name, tensor)


def stop_drawing(module: nn.Module) -> None:
    """Let a module compute without dropout, jitter and random routers, so that it computes the same each time."""
    for child, name, _ in list(dropout_rates(module)):
        setattr(child, name, 0.0)
    for child in module.modules():
        if isinstance(child, Router):
            child.stop_drawing()


def _modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module's modules, and those that it hides in tuples, as experts hide their template."""
    for child in module.modules():
        yield child
        for value in vars(child).values():
            for hidden in value if isinstance(value, tuple) else ():
                yield from hidden.modules() if isinstance(hidden, nn.Module) else ()


def _place_of(tensor: Tensor) -> int | None:
    """Return the number of a tensor's node in the graph, which grows; None without one."""
    return None if tensor.grad_fn is None else int(tensor.grad_fn._sequence_nr())


def _seed(state: Tensor, rank: int) -> int:
    digest = hashlib.blake2b(state.numpy().tobytes() + rank.to_bytes(4, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _generator_of(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = device.index if device.index is not None else module.current_device()
    generator: torch.Generator = module.default_generators[index]
    return generator
