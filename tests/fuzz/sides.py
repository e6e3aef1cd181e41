"""The two sides of a program: the engine, and a whole replica whose gradients are averaged over the ranks."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.optim import Optimizer

from lightning_zero import MixedPrecision
from lightning_zero.checkpoint import directory, state
from lightning_zero.config import Communication, Offload
from lightning_zero.engine.engine import ZeroEngine
from tests.fuzz.modules import build
from tests.fuzz.programs import scopes_of

__all__ = ["Plain", "Sharded", "Side"]

TIMEOUT_S = 10.0  # of the engine's collectives: a hang is a difference


class Side(Protocol):
    """What an action may use."""

    rank: int
    world: int
    group: dist.ProcessGroup  # for what the program itself sends
    module: nn.Module
    params: dict[str, nn.Parameter]
    shapes: dict[str, torch.Size]
    optimizers: list[Optimizer]
    memory: dict[str, Any]

    def attach(self, optimizers: list[Optimizer]) -> None: ...
    def scope(self, name: str) -> contextlib.AbstractContextManager[None]: ...
    def microbatch(self, last: bool) -> contextlib.AbstractContextManager[None]: ...
    def backward(self, loss: Tensor | None, *, explicit: bool, retain: bool = False) -> None: ...
    def drop_gradients(self) -> None: ...
    def gathered(self, what: Any, write: str | None) -> contextlib.AbstractContextManager[None]: ...
    def clip_norm(self, optimizer: Optimizer, max_norm: float) -> Tensor: ...
    def clip_value(self, optimizer: Optimizer, value: float) -> None: ...
    def grad_norm(self, optimizer: Optimizer | None, order: float) -> Tensor: ...
    def full_param(self, param: nn.Parameter) -> Tensor: ...
    def full_grad(self, param: nn.Parameter) -> Tensor | None: ...
    def tell_engine(self, verb: str) -> None: ...
    def save(self, *, full: bool) -> None: ...
    def resume(self, stage: int | None) -> None: ...


class Plain:
    """A whole replica on every rank; gradients are averaged in rank order, module buffers are rank 0's.

    It adds in the engine's order, so that what differs is no rounding: in the dtype of the parameters, and at stages 2
    and 3 every micro-batch is averaged.

    Args:
        spec: Of the module.
        options: ``stage`` and ``scopes`` count.
        group: For everything that is sent.
    """

    module: nn.Module
    params: dict[str, nn.Parameter]
    shapes: dict[str, torch.Size]

    def __init__(self, spec: dict[str, Any], options: dict[str, Any], group: dist.ProcessGroup) -> None:
        self.rank, self.world, self.group = group.rank(), group.size(), group
        self._spec = spec
        self.optimizers: list[Optimizer] = []
        self.memory: dict[str, Any] = {}
        self._options = options
        self._averages_all = options.get("stage", 0) >= 2  # micro-batches before the last too
        self._node = 2 if scopes_of(options).has_nodes else 1  # ranks that are averaged first
        self._local: dict[str, Tensor] = {}  # sums that are not averaged yet
        self._depth = 0
        self._is_last = True
        self._sends_buffers = True  # as DistributedDataParallel: not behind an evaluation or a waiting micro-batch
        self._build()

    def _build(self) -> None:
        torch.default_generator.manual_seed(self.rank)  # rank 0's values count
        self.module = build(self._spec)
        self.params = dict(self.module.named_parameters())
        self.shapes = {name: param.shape for name, param in self.params.items()}
        with torch.no_grad():
            self._broadcast([*self.module.parameters(), *self.module.buffers()])
        self.module.register_forward_pre_hook(lambda *_: self._broadcast_buffers())

    def attach(self, optimizers: list[Optimizer]) -> None:
        self.optimizers = optimizers

    @contextlib.contextmanager
    def scope(self, name: str) -> Iterator[None]:
        self._broadcast_buffers()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    @contextlib.contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        self._is_last = last
        try:
            yield
        finally:
            self._is_last = True

    def _broadcast_buffers(self) -> None:
        if self._depth > 0:
            return
        if self._sends_buffers:
            self._broadcast(list(self.module.buffers()))
        self._sends_buffers = torch.is_grad_enabled() and self._is_last

    def _broadcast(self, tensors: Iterable[Tensor]) -> None:
        values = [tensor.detach() for tensor in tensors if tensor.numel()]
        for dtype in dict.fromkeys(value.dtype for value in values):
            alike = [value for value in values if value.dtype == dtype]
            message = torch.cat([value.reshape(-1) for value in alike])
            dist.broadcast(message, 0, group=self.group)
            with _unsafe_preserve_version_counter(tuple(alike)):  # as DistributedDataParallel does
                for value, piece in zip(alike, message.split([value.numel() for value in alike]), strict=True):
                    value.copy_(piece.view(value.shape))

    def backward(self, loss: Tensor | None, *, explicit: bool, retain: bool = False) -> None:
        before = {name: param.grad for name, param in self.params.items()}
        for param in self.params.values():
            param.grad = None
        if loss is not None:
            loss.backward(retain_graph=retain)
        for name, param in self.params.items():
            if param.grad is not None:
                self._local[name] = self._local[name] + param.grad if name in self._local else param.grad
            param.grad = before[name]
        if self._is_last or self._averages_all:
            self._average()

    def _average(self) -> None:
        params = self.params
        used = torch.tensor([float(name in self._local) for name in params])
        sums = [self._local.get(name, torch.zeros_like(param)) for name, param in params.items()]
        message = torch.cat([total.detach().reshape(-1) for total in sums] + [used.to(sums[0].dtype)])
        messages = [torch.empty_like(message) for _ in range(self.world)]
        dist.all_gather(messages, message, group=self.group)
        nodes = [
            sum(messages[first + 1 : first + self._node], messages[first]) / self._node
            for first in range(0, self.world, self._node)
        ]
        total = sum(nodes[1:], nodes[0])
        *averages, flags = total.split([param.numel() for param in params.values()] + [len(params)])
        for param, average, flag in zip(params.values(), averages, flags.tolist(), strict=True):
            if not flag:
                continue
            grad = (average / len(nodes)).view(param.shape)
            param.grad = grad if param.grad is None else param.grad + grad
        self._local.clear()

    def drop_gradients(self) -> None:
        self._local.clear()
        self.module.zero_grad()

    @contextlib.contextmanager
    def gathered(self, what: Any, write: str | None) -> Iterator[None]:
        yield
        if write == "rank0":
            self._broadcast(what.parameters() if isinstance(what, nn.Module) else what)

    def clip_norm(self, optimizer: Optimizer, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(_held(optimizer), max_norm)

    def clip_value(self, optimizer: Optimizer, value: float) -> None:
        if any(param.grad is not None for param in _held(optimizer)):  # PyTorch's function raises where there is none
            nn.utils.clip_grad_value_(_held(optimizer), value)

    def grad_norm(self, optimizer: Optimizer | None, order: float) -> Tensor:
        params = list(self.params.values()) if optimizer is None else _held(optimizer)
        return nn.utils.get_total_norm([p.grad for p in params if p.grad is not None and p.numel()], order)

    def full_param(self, param: nn.Parameter) -> Tensor:
        return param.detach().clone()

    def full_grad(self, param: nn.Parameter) -> Tensor | None:
        return None if param.grad is None else param.grad.clone()

    def save(self, *, full: bool) -> None:
        weights = {key: value.clone() for key, value in self.module.state_dict().items()}
        self._broadcast(weights.values())
        states = [copy.deepcopy(optimizer.state_dict()) for optimizer in self.optimizers]
        self.memory["saved"] = _groups_of(self), (weights, states)

    def resume(self, stage: int | None) -> None:
        groups, (weights, states) = self.memory["saved"]
        if groups != _groups_of(self):
            return
        self.drop_gradients()
        if stage is not None:
            self._averages_all, self._sends_buffers = stage >= 2, True
            self._node = 2 if scopes_of({**self._options, "stage": stage}).has_nodes else 1
            before = self.params
            self._build()
            self.optimizers = _remade(self, before)
        self.module.load_state_dict(weights)
        for optimizer, saved in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(copy.deepcopy(saved))

    def tell_engine(self, verb: str) -> None:
        """Nothing to tell."""

    def close(self) -> None:
        """Nothing to close."""


class Sharded:
    """The engine.

    Args:
        spec: Of the module.
        options: ``stage``, ``scopes``, ``prefetch``, ``offload``, ``reduce_dtype``, ``step``, ``units``.
        group: For what the program itself sends.
        folder: Where files on disks go.
        timeout_s: Of a collective.
    """

    engine: ZeroEngine
    module: nn.Module
    params: dict[str, nn.Parameter]
    shapes: dict[str, torch.Size]

    def __init__(
        self, spec: dict[str, Any], options: dict[str, Any], group: dist.ProcessGroup, folder: str, timeout_s: float
    ) -> None:
        self.rank, self.world, self.group = group.rank(), group.size(), group
        self._spec, self._options, self._folder, self._timeout_s = spec, options, folder, timeout_s
        self.optimizers: list[Optimizer] = []
        self.memory: dict[str, Any] = {}
        self._build(options)

    def _build(self, options: dict[str, Any]) -> None:
        torch.default_generator.manual_seed(self.rank)
        offload = copy.deepcopy(options.get("offload"))
        if offload is not None and "nvme" in offload.values():
            offload["path"] = self._folder
        self.engine = ZeroEngine(
            scopes_of(options).option,
            units=options.get("units"),
            communication=Communication(
                prefetch=options.get("prefetch", 1),
                reduce_dtype=options.get("reduce_dtype"),
                timeout_s=self._timeout_s,
            ),
            precision=MixedPrecision(),
            offload=None if offload is None else Offload(**offload),
            step=options.get("step", "auto"),
        )
        self.module = self.engine.shard(build(self._spec))
        self.params = dict(self.module.named_parameters())
        self.shapes = {name: param.shape for name, param in self.params.items()}

    def attach(self, optimizers: list[Optimizer]) -> None:
        self.optimizers = optimizers
        self.engine.attach(*optimizers)

    def scope(self, name: str) -> contextlib.AbstractContextManager[None]:
        return self.engine.scope(name)

    def microbatch(self, last: bool) -> contextlib.AbstractContextManager[None]:
        return self.engine.microbatch(last)

    def backward(self, loss: Tensor | None, *, explicit: bool, retain: bool = False) -> None:
        scope = self.engine.backward_scope() if explicit else contextlib.nullcontext()
        with scope:
            if loss is not None:
                loss.backward(retain_graph=retain)

    def drop_gradients(self) -> None:
        self.module.zero_grad()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def gathered(self, what: Any, write: str | None) -> contextlib.AbstractContextManager[None]:
        return self.engine.gathered(what, write)  # type: ignore[arg-type]

    def clip_norm(self, optimizer: Optimizer, max_norm: float) -> Tensor:
        return self.engine.clip_grad_norm(optimizer, max_norm)

    def clip_value(self, optimizer: Optimizer, value: float) -> None:
        self.engine.clip_grad_value(optimizer, value)

    def grad_norm(self, optimizer: Optimizer | None, order: float) -> Tensor:
        return self.engine.grad_norm(optimizer, order)

    def full_param(self, param: nn.Parameter) -> Tensor:
        return self.engine.full_param(param)

    def full_grad(self, param: nn.Parameter) -> Tensor | None:
        return self.engine.full_grad(param)

    def save(self, *, full: bool) -> None:
        path = f"{self._folder}/saved-{full}"
        states = [state.optimizer_state(self.engine, optimizer) for optimizer in self.optimizers]
        content = {"state_dict": state.model_state(self.engine, self.module), "optimizer_states": states}
        directory.save(self.engine, content, path, full)
        self.memory["saved"] = _groups_of(self), path

    def resume(self, stage: int | None) -> None:
        groups, path = self.memory["saved"]
        if groups != _groups_of(self):
            return
        self.drop_gradients()
        if stage is not None:
            before = self.params
            self.engine.flush()
            self.engine.close()
            self._build({**self._options, "stage": stage})
            self.attach(_remade(self, before))
        content = directory.load(self.engine, path)
        state.load_model_state(self.engine, self.module, content["state_dict"])
        state.load_optimizer_state(self.engine, self.optimizers, states=content["optimizer_states"])

    def tell_engine(self, verb: str) -> None:
        getattr(self.engine, verb)()

    def close(self) -> None:
        self.engine.close()


def _groups_of(side: Side) -> list[Any]:
    """Return the classes of the optimizers, and the names in their groups."""
    names = {id(param): name for name, param in side.params.items()}
    return [
        (
            type(optimizer).__name__,
            [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups],
        )
        for optimizer in side.optimizers
    ]


def _remade(side: Side, before: dict[str, nn.Parameter]) -> list[Optimizer]:
    """Return optimizers as they were made, for a module that takes the place of another one; freeze what was frozen."""
    names = {id(param): name for name, param in before.items()}
    for name, param in before.items():
        side.params[name].requires_grad_(param.requires_grad)
    made = []
    for optimizer in side.optimizers:
        groups = [
            {**group, "params": [side.params[names[id(param)]] for param in group["params"]]}
            for group in optimizer.param_groups
        ]
        made.append(getattr(torch.optim, type(optimizer).__name__)(groups, **optimizer.defaults))
    return made


def _held(optimizer: Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]
