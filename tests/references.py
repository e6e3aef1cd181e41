"""The plain trainer that everything is compared with, and the engine behind the same small interface.

A *program* is written once against ``Trainer`` and run twice: on a ``Replica``, which averages gradients over the ranks
as DistributedDataParallel does, and on ``Sharded``, the engine. ``difference`` compares what came out.

Note [When gradients are averaged]
    At stages 2 and 3 every backward is averaged and added to the shard (``average="each"``). At stages 0 and 1
    micro-batches that are not the last wait in the full buffer and are averaged together (``average="once"``), as under
    DistributedDataParallel's ``no_sync``. The two differ in the last bits: each stage is compared with its own order.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from tests import worlds

__all__ = [
    "Block",
    "Case",
    "Outcome",
    "Replica",
    "Sharded",
    "TinyGPT",
    "Trainer",
    "difference",
    "token_loss",
    "tokens",
    "train",
    "train_reference",
    "train_zero",
]

VOCAB = 11  # no multiple of a world size
WIDTH = 6


class Trainer(Protocol):
    """What a program may use."""

    rank: int
    world: int
    module: nn.Module
    losses: list[Tensor]

    def attach(self, *optimizers: Optimizer) -> None: ...
    def scope(self, name: str = "training_step") -> contextlib.AbstractContextManager[None]: ...
    def microbatch(self, last: bool) -> contextlib.AbstractContextManager[None]: ...
    def backward(self, loss: Tensor, *, bare: bool = False, **kwargs: Any) -> None: ...
    def gathered(self, what: Any, write: str | None = None) -> contextlib.AbstractContextManager[None]: ...
    def clip_grad_norm(self, optimizer: Optimizer, max_norm: float) -> Tensor: ...
    def clip_grad_value(self, optimizer: Optimizer, clip_value: float) -> None: ...
    def publish(self) -> None: ...
    def full_param(self, parameter: nn.Parameter) -> Tensor: ...
    def full_grad(self, parameter: nn.Parameter) -> Tensor | None: ...


class Replica:
    """A whole copy of the module on every rank; gradients are averaged in rank order."""

    def __init__(self, module: nn.Module, rank: int, world: int, *, average: Literal["each", "once"] = "each") -> None:
        self.module = module
        self.rank = rank
        self.world = world
        self.losses: list[Tensor] = []
        self._average = average
        self._waits = False  # the current micro-batch is not the last
        self._is_last = True
        self._syncs_buffers = True  # when the next forward begins
        self._reduced: dict[nn.Parameter, Tensor | None] | None = None  # gradients from before the waiting backwards
        with torch.no_grad():
            for tensor in [*module.parameters(), *module.buffers()]:
                if tensor.numel():
                    sent = tensor.reshape(-1).contiguous().view(torch.uint8)  # gloo does not know every dtype
                    dist.broadcast(sent, 0)
                    tensor.copy_(sent.view(tensor.dtype).view(tensor.shape))
        module.register_forward_pre_hook(lambda *_: self._broadcast_buffers())

    def attach(self, *optimizers: Optimizer) -> None:
        """Nothing to do: the optimizers step the parameters themselves."""

    @contextlib.contextmanager
    def scope(self, name: str = "training_step") -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        self._waits = not last and self._average == "once"
        self._is_last = last
        yield
        self._waits, self._is_last = False, True

    def backward(self, loss: Tensor, *, bare: bool = False, **kwargs: Any) -> None:
        self.losses.append(loss.detach().clone())
        parameters = list(dict.fromkeys(self.module.parameters()))
        if self._reduced is None:
            self._reduced = {parameter: parameter.grad for parameter in parameters}
            for parameter in parameters:
                parameter.grad = None
        loss.backward(**kwargs)
        if self._waits:
            return
        for parameter in parameters:
            self._finish(parameter, self._reduced[parameter])
        self._reduced = None

    def _finish(self, parameter: nn.Parameter, before: Tensor | None) -> None:
        average = self._mean_over_ranks(parameter) if parameter.requires_grad else None
        if before is not None and average is not None:
            before.add_(average)
        parameter.grad = average if before is None else before

    def _mean_over_ranks(self, parameter: nn.Parameter) -> Tensor | None:
        used = torch.tensor(float(parameter.grad is not None))
        dist.all_reduce(used, dist.ReduceOp.MAX)
        if not used:
            return None
        local = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gathered = [torch.empty_like(local) for _ in range(self.world)]
        if local.numel():
            dist.all_gather(gathered, local.detach().contiguous())
        total = gathered[0]
        for other in gathered[1:]:
            total += other
        return total.div_(self.world)

    def _broadcast_buffers(self) -> None:
        if self._syncs_buffers:
            for buffer in self.module.buffers():
                dist.broadcast(buffer.detach(), 0)
        self._syncs_buffers = torch.is_grad_enabled() and self._is_last

    @contextlib.contextmanager
    def gathered(self, what: Any, write: str | None = None) -> Iterator[None]:
        yield
        if write == "rank0":
            parameters = what.parameters() if isinstance(what, nn.Module) else what
            for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
                dist.broadcast(parameter.detach(), 0)

    def clip_grad_norm(self, optimizer: Optimizer, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(_parameters(optimizer), max_norm)

    def clip_grad_value(self, optimizer: Optimizer, clip_value: float) -> None:
        nn.utils.clip_grad_value_(_parameters(optimizer), clip_value)

    def publish(self) -> None:
        """Nothing to do: parameters are the values that are stepped."""

    def full_param(self, parameter: nn.Parameter) -> Tensor:
        return parameter.detach().clone()

    def full_grad(self, parameter: nn.Parameter) -> Tensor | None:
        return None if parameter.grad is None else parameter.grad.clone()


class Sharded:
    """The engine."""

    def __init__(self, module: nn.Module, rank: int, world: int, *, stage: int, **options: Any) -> None:
        from lightning_zero.engine.engine import ZeroEngine

        self.rank = rank
        self.world = world
        self.losses: list[Tensor] = []
        self.engine = ZeroEngine(stage, **options)
        self.module = self.engine.shard(module)

    def attach(self, *optimizers: Optimizer) -> None:
        self.engine.attach(*optimizers)

    def scope(self, name: str = "training_step") -> contextlib.AbstractContextManager[None]:
        return self.engine.scope(name)

    def microbatch(self, last: bool) -> contextlib.AbstractContextManager[None]:
        return self.engine.microbatch(last)

    def backward(self, loss: Tensor, *, bare: bool = False, **kwargs: Any) -> None:
        self.losses.append(loss.detach().clone())
        with contextlib.nullcontext() if bare else self.engine.backward_scope():
            loss.backward(**kwargs)

    def gathered(self, what: Any, write: str | None = None) -> contextlib.AbstractContextManager[None]:
        return self.engine.gathered(what, write)  # type: ignore[arg-type]

    def clip_grad_norm(self, optimizer: Optimizer, max_norm: float) -> Tensor:
        return self.engine.clip_grad_norm(optimizer, max_norm)

    def clip_grad_value(self, optimizer: Optimizer, clip_value: float) -> None:
        self.engine.clip_grad_value(optimizer, clip_value)

    def publish(self) -> None:
        self.engine.internals.checkpoints.publish()

    def full_param(self, parameter: nn.Parameter) -> Tensor:
        return self.engine.full_param(parameter)

    def full_grad(self, parameter: nn.Parameter) -> Tensor | None:
        return self.engine.full_grad(parameter)


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# -- Programs and what came out of them --------------------------------------------------------------------------------


@dataclass
class Outcome:
    """Losses of this rank, whole weights and this rank's buffers after training."""

    losses: list[Tensor]
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]


def adamw(module: nn.Module) -> Optimizer:
    """AdamW over everything; ``eps`` is large, so that a gradient of rounding errors does not become a step."""
    return torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-4, fused=True)


def train(
    trainer: Trainer,
    *,
    loss: Callable[[nn.Module, int, int], Tensor],
    optimizer: Callable[[nn.Module], Optimizer] = adamw,
    steps: int = 3,
    micro_batches: int = 1,
    max_norm: float | None = None,
) -> None:
    """Run the usual loop; ``loss(module, rank, step)`` makes its own batch."""
    stepper = optimizer(trainer.module)
    trainer.attach(stepper)
    for step in range(steps):
        stepper.zero_grad()
        for index in range(micro_batches):
            with trainer.microbatch(last=index == micro_batches - 1):
                with trainer.scope():
                    value = loss(trainer.module, trainer.rank, step * micro_batches + index) / micro_batches
                trainer.backward(value)
        if max_norm is not None:
            trainer.clip_grad_norm(stepper, max_norm)
        stepper.step()


def outcome(trainer: Trainer) -> Outcome:
    """Collect the results. Collective."""
    module = trainer.module
    weights = {name: trainer.full_param(parameter) for name, parameter in module.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    return Outcome(trainer.losses, weights, buffers)


def train_reference(
    build: Callable[[], nn.Module],
    program: Callable[[Any], None],
    rank: int,
    world: int,
    *,
    average: Literal["each", "once"] = "each",
) -> Outcome:
    """Run ``program`` on a whole copy per rank. Collective."""
    worlds.seed()
    trainer = Replica(build(), rank, world, average=average)
    program(trainer)
    return outcome(trainer)


def train_zero(
    build: Callable[[], nn.Module], program: Callable[[Any], None], rank: int, world: int, *, stage: int, **options: Any
) -> Outcome:
    """Run ``program`` on the engine. Collective."""
    worlds.seed()
    trainer = Sharded(build(), rank, world, stage=stage, **options)
    try:
        program(trainer)
        return outcome(trainer)
    finally:
        trainer.engine.close()


def difference(actual: Outcome, expected: Outcome, tolerance: float = 0.0) -> str:
    """Return what differs, or an empty string. ``tolerance=0`` means the same bits."""
    found = []
    if len(actual.losses) != len(expected.losses):
        found.append(f"{len(actual.losses)} losses instead of {len(expected.losses)}")
    pairs = [(f"loss {index}", *pair) for index, pair in enumerate(zip(actual.losses, expected.losses, strict=False))]
    for kind in ("weights", "buffers"):
        mine, theirs = getattr(actual, kind), getattr(expected, kind)
        if mine.keys() != theirs.keys():
            found.append(f"{kind}: {sorted(mine.keys() ^ theirs.keys())} on one side only")
        pairs += [(name, mine[name], theirs[name]) for name in mine.keys() & theirs.keys()]
    for name, a, b in pairs:
        if a.shape != b.shape or a.dtype != b.dtype:
            found.append(f"{name}: {tuple(a.shape)} {a.dtype} instead of {tuple(b.shape)} {b.dtype}")
        elif not torch.equal(a, b) and not (tolerance and torch.allclose(a, b, rtol=tolerance, atol=tolerance)):
            found.append(f"{name}: differs by {(_wide(a) - _wide(b)).abs().max().item():.3g}")
    return "; ".join(found[:8])


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.complex128 if values.is_complex() else torch.float64)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a program that must train as under DistributedDataParallel.

    Args:
        build: Makes the module; called on every rank after the same seed.
        program: Runs on either trainer.
        units: Given to the engine.
        tolerance: 0 for the same bits; else the reason is written beside it.
        options: More of the engine's options.
    """

    build: Callable[[], nn.Module]
    program: Callable[[Any], None]
    units: Sequence[str | type[nn.Module]] | None = ("Block",)
    stages: Sequence[int] = (0, 1, 2, 3)
    tolerance: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)

    def check(self, rank: int, world: int) -> dict[str, str]:
        """Return the differences by stage. Collective."""
        expected: dict[str, Outcome] = {}
        found = {}
        for stage in self.stages:
            average: Literal["each", "once"] = "once" if stage < 2 else "each"
            if average not in expected:
                expected[average] = train_reference(self.build, self.program, rank, world, average=average)
            try:
                actual = train_zero(
                    self.build, self.program, rank, world, stage=stage, units=self.units, **self.options
                )
            except BaseException as error:
                error.add_note(f"at stage {stage}")
                raise
            found[f"stage {stage}"] = difference(actual, expected[average], self.tolerance)
        return {stage: text for stage, text in found.items() if text}


# -- Small models ------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual feed-forward block."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def inner(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return hidden

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class TinyGPT(nn.Module):
    """Embedding, blocks and head over a few tokens."""

    def __init__(self, *, blocks: Iterable[nn.Module] | None = None, depth: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(blocks if blocks is not None else [Block() for _ in range(depth)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.body(self.embedding(ids))))
        return logits


def tokens(rank: int, step: int) -> Tensor:
    """Return this rank's batch of a step."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randint(0, VOCAB, (2, 5), generator=generator)


def token_loss(module: nn.Module, rank: int, step: int) -> Tensor:
    """Return the cross entropy of the module's guess of its input."""
    ids = tokens(rank, step)
    return F.cross_entropy(module(ids).flatten(0, 1), ids.flatten())


def clone_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return a deep copy of the state dict."""
    return copy.deepcopy(module.state_dict())
