"""Tensors that blocks put outside of their modules, and gradients that a step computes by itself.

Other pipeline stages do not have them: a step that uses them is refused, and is never trained without them in silence.
"""

from __future__ import annotations

import re
import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.autograd import forward_ad

from tests.contracts.test_pipeline_late_values import Block, Program, _fit, batches
from tests.sampling import sample
from tests.worlds import run

LOSSES: list[Tensor] = []
BY_NAME: dict[str, Tensor] = {}


class Gathers(Program):
    """Gathers losses of blocks from somewhere."""

    def losses(self) -> list[Tensor]:
        raise NotImplementedError

    def clear(self) -> None:
        """Forget the losses of the step before."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.clear()
        return super().training_step(batch, batch_idx) + torch.stack(self.losses()).sum()


class ListBlock(Block):
    def forward(self, x: Tensor) -> Any:
        hidden = super().forward(x)
        LOSSES.append(hidden.pow(2).mean())
        return hidden


class GlobalList(Gathers):
    block = ListBlock

    def losses(self) -> list[Tensor]:
        return LOSSES

    def clear(self) -> None:
        LOSSES.clear()


class InputsBlock(Block):
    def forward(self, x: Tensor) -> Any:
        LOSSES.append(x)
        return super().forward(x)


class GlobalInputs(GlobalList):
    """Collects what blocks are given."""

    block = InputsBlock

    def losses(self) -> list[Tensor]:
        return [hidden.pow(2).mean() for hidden in LOSSES]


class ViewsBlock(Block):
    def forward(self, x: Tensor) -> Any:
        LOSSES.append(x.view(-1))
        return super().forward(x)


class GlobalViews(GlobalInputs):
    block = ViewsBlock


class DictBlock(Block):
    def forward(self, x: Tensor) -> Any:
        hidden = super().forward(x)
        BY_NAME["aux"] = BY_NAME["aux"] + hidden.pow(2).mean() if "aux" in BY_NAME else hidden.pow(2).mean()
        return hidden


class GlobalDict(Gathers):
    block = DictBlock

    def losses(self) -> list[Tensor]:
        return [BY_NAME["aux"]]

    def clear(self) -> None:
        BY_NAME.clear()


class ClassBlock(Block):
    losses: ClassVar[list[Tensor]] = []

    def forward(self, x: Tensor) -> Any:
        hidden = super().forward(x)
        type(self).losses = [*self.losses, hidden.pow(2).mean()]
        return hidden


class ClassAttribute(Gathers):
    block = ClassBlock

    def losses(self) -> list[Tensor]:
        return ClassBlock.losses

    def clear(self) -> None:
        ClassBlock.losses = []


class Notes:
    def __init__(self) -> None:
        self.losses: list[Tensor] = []


class NotesBlock(Block):
    notes: Any = None

    def forward(self, x: Tensor) -> Any:
        hidden = super().forward(x)
        self.notes.losses.append(hidden.pow(2).mean())
        return hidden


class SharedObject(Gathers):
    block = NotesBlock

    def __init__(self) -> None:
        super().__init__()
        self.notes = Notes()
        for block in self.blocks:
            block.notes = self.notes

    def losses(self) -> list[Tensor]:
        return self.notes.losses

    def clear(self) -> None:
        self.notes.losses.clear()


class ClosureBlock(Block):
    keep: Any = None

    def forward(self, x: Tensor) -> Any:
        hidden = super().forward(x)
        self.keep(hidden.pow(2).mean())
        return hidden


class Closure(Gathers):
    block = ClosureBlock

    def __init__(self) -> None:
        super().__init__()
        found: list[Tensor] = []
        self.losses, self.clear = lambda: found, found.clear  # type: ignore[method-assign]
        for block in self.blocks:
            block.keep = found.append


WEAKLY: list[weakref.ref[Tensor]] = []
NAMED: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


class WeakBlock(Block):
    def forward(self, x: Tensor) -> Any:
        hidden = super().forward(x)
        WEAKLY.append(weakref.ref(hidden))
        return hidden


class WeakOutputs(Gathers):
    """Looks at what its blocks return through weak references; the graph keeps it alive."""

    block = WeakBlock

    def losses(self) -> list[Tensor]:
        return [hidden.pow(2).mean() for one in WEAKLY if (hidden := one()) is not None]

    def clear(self) -> None:
        WEAKLY.clear()


class WeakInnerBlock(Block):
    def forward(self, x: Tensor) -> Any:
        inner = x.exp()
        NAMED[len(NAMED)] = inner
        return super().forward(inner.log())


class WeakInner(Gathers):
    """Looks at tensors inside of its blocks."""

    block = WeakInnerBlock

    def losses(self) -> list[Tensor]:
        return [torch.zeros(()), *(hidden.pow(2).mean() for hidden in NAMED.values())]

    def clear(self) -> None:
        NAMED.clear()


class WeakAttributeBlock(Block):
    def forward(self, x: Tensor) -> Any:
        hidden = super().forward(x)
        self.seen = weakref.ref(hidden)
        return hidden


class WeakAttributes(Gathers):
    block = WeakAttributeBlock

    def losses(self) -> list[Tensor]:
        found = [block.seen() for block in self.blocks if hasattr(block, "seen")]
        return [torch.zeros(()), *(hidden.pow(2).mean() for hidden in found if hidden is not None)]


class WeakHooks(WeakOutputs):
    """Takes the references in hooks."""

    block = Block

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_hook(lambda module, args, output: WEAKLY.append(weakref.ref(output)))


class Logs(GlobalList):
    """Logs what its blocks have noted."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.clear()
        loss = Program.training_step(self, batch, batch_idx)
        self.log("aux", torch.stack(LOSSES).detach().sum())
        return loss


class Unused(GlobalList):
    """Notes what nobody reads."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.clear()
        return Program.training_step(self, batch, batch_idx)


def sum_of_squares(output: Tensor, one: Any, **options: Any) -> Tensor:
    (slope,) = torch.autograd.grad(output, one, create_graph=True, **options)
    return slope.pow(2).sum() if slope is not None else torch.zeros(())


class Penalty(Program):
    """Adds a penalty on a gradient to its loss; a case says by which value."""

    def by(self, start: Tensor, hidden: Tensor) -> Any:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        start = self.embedding(batch)
        hidden = self.body(start)
        loss = self.loss(hidden + 0.1 * start, batch)
        return loss + 0.1 * sum_of_squares(loss, self.by(start, hidden))


class ByEarly(Penalty):
    """Found the path of the skip alone, in silence."""

    def by(self, start: Tensor, hidden: Tensor) -> Any:
        return start


class ByEarlyWeight(Penalty):
    def by(self, start: Tensor, hidden: Tensor) -> Any:
        return self.embedding.weight


class ByTied(Penalty):
    """Found the gradient of the head alone, in silence."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight

    def by(self, start: Tensor, hidden: Tensor) -> Any:
        return self.head.weight


class ByInput(Penalty):
    """Takes the gradient by a value that goes in at the front, and is used at the end."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        noise = torch.zeros(*batch.shape, 6, dtype=torch.float64, requires_grad=True)
        hidden = self.body(self.embedding(batch) + noise)
        loss = self.loss(hidden + 0.1 * noise, batch)
        return loss + 0.1 * sum_of_squares(loss, noise, allow_unused=True)


class ByLate(Penalty):
    def by(self, start: Tensor, hidden: Tensor) -> Any:
        return hidden


class ByLateWeight(Penalty):
    def by(self, start: Tensor, hidden: Tensor) -> Any:
        return self.head.weight


class ByScale(Penalty):
    """Takes the gradient by a parameter around the blocks that is used behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def loss(self, hidden: Tensor, ids: Tensor) -> Tensor:
        return super().loss(hidden * self.scale, ids)

    def by(self, start: Tensor, hidden: Tensor) -> Any:
        return self.scale


class BeforeBlocks(Program):
    """Takes a gradient in front of the blocks, of a value that they are given too."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        start = self.embedding(batch)
        steep = sum_of_squares(start.tanh().sum(), start)
        return self.loss(self.body(start), batch) + 0.01 * steep


class Backward(Program):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        loss.backward(retain_graph=True)
        return loss


class BackwardInFront(Program):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.embedding(batch).pow(2).sum().backward()
        return super().training_step(batch, batch_idx)


class ClipsBetween(Program):
    """Clips all gradients by their norm in a hook."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.01)


class ClipsAfter(Program):
    def on_after_backward(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.01)


class LogsNorms(Program):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grad_norm(self, 2)


class ClipsByStrategy(Program):
    """Reads the norm from the strategy, scales by hand, and clips as Lightning does."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = self.trainer.strategy.grad_norm()
        for param in self.parameters():
            if param.grad is not None:
                param.grad.div_(norm.clamp(min=0.01) * 2.0)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")


def _pipeline(schedule: str = "1f1b") -> dict[str, Any]:
    return {"stages": 2, "schedule": schedule}


OUTSIDE = [GlobalList, GlobalViews, GlobalDict, ClassAttribute, SharedObject, Closure]


@pytest.mark.parametrize("make", sample(OUTSIDE, GlobalList, SharedObject), ids=lambda one: one.__name__)
@pytest.mark.parametrize("schedule", sample(("1f1b", "interleaved_1f1b"), "1f1b"))
def test_losses_that_blocks_put_outside_of_their_modules_are_refused(make: Any, schedule: str) -> None:
    """They were those of the last stage alone, in silence."""
    message = "leaves tensors outside of its modules"
    with pytest.raises(BaseException, match=re.escape(message)):
        run(_fit, 2, make, _pipeline(schedule), batches())


class WeakInputsBlock(Block):
    def forward(self, x: Tensor) -> Any:
        WEAKLY.append(weakref.ref(x))
        return super().forward(x)


class WeakInputs(WeakOutputs):
    """Looks at what its blocks are given, which nothing but the graph keeps."""

    block = WeakInputsBlock

    def body(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden * 0.9)
        return hidden


class WeakBetween(WeakOutputs):
    """Takes the references between its blocks."""

    block = Block

    def body(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            scaled = hidden * 0.9
            WEAKLY.append(weakref.ref(scaled))
            hidden = block(scaled)
        return hidden


class TaggedBlock(Block):
    def forward(self, x: Tensor) -> Any:
        hidden = super().forward(x)
        hidden.aux = hidden.pow(2).mean()
        return hidden


class Tagged(Program):
    """Reads losses from attributes of tensors."""

    block = TaggedBlock

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden, aux = self.embedding(batch), torch.zeros(())
        for block in self.blocks:
            hidden = block(hidden)
            aux = aux + getattr(hidden, "aux", 0.0)
        return self.loss(hidden, batch) + aux


class Dual(Program):
    """Computes a derivative in forward mode around the blocks, without ``torch.func``."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with forward_ad.dual_level():
            start = self.embedding(batch)
            hidden, tangent = forward_ad.unpack_dual(self.body(forward_ad.make_dual(start, torch.ones_like(start))))
            return self.loss(hidden, batch) + (tangent.pow(2).mean() if tangent is not None else 0.0)


WEAK = [WeakInputs, WeakOutputs, WeakInner, WeakAttributes, WeakHooks]


@pytest.mark.parametrize("make", sample(WEAK, WeakInputs, WeakHooks), ids=lambda one: one.__name__)
@pytest.mark.parametrize("schedule", sample(("1f1b", "interleaved_1f1b"), "1f1b"))
def test_weak_references_to_what_blocks_compute_are_refused(make: Any, schedule: str) -> None:
    """The losses were those of the last stage's blocks, in silence."""
    with pytest.raises(BaseException, match="keeps a weak reference"):
        run(_fit, 2, make, _pipeline(schedule), batches())


def test_values_that_blocks_put_outside_of_their_modules_are_not_logged_in_part() -> None:
    """The value was that of the last stage's blocks, in silence."""
    with pytest.raises(BaseException, match=re.escape("`self.log('aux', ...)` logs a value of an earlier pipeline")):
        run(_fit, 2, Logs, _pipeline(), batches())


@pytest.mark.parametrize("make", sample((Unused, GlobalInputs), Unused, GlobalInputs), ids=lambda one: one.__name__)
def test_blocks_may_leave_outside_what_nobody_reads_or_what_they_were_given(make: Any) -> None:
    """Inputs that blocks append to a global list were lost in silence, those of the last stage's blocks excepted."""
    expected = run(_fit, 1, make, {}, batches())[0]
    for found in run(_fit, 2, make, {"stages": 2, "microbatches": 1, "schedule": "gpipe"}, batches()):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)


BY = [ByEarly, ByEarlyWeight, ByTied, ByInput]


@pytest.mark.parametrize("make", sample(BY, ByEarly, ByTied), ids=lambda one: one.__name__)
@pytest.mark.parametrize("schedule", sample(("1f1b", "interleaved_1f1b"), "1f1b"))
def test_gradients_in_a_step_by_what_earlier_stages_use_are_refused(make: Any, schedule: str) -> None:
    """Some were a part of the gradient, in silence."""
    with pytest.raises(BaseException, match="which modules of earlier pipeline stages use"):
        run(_fit, 2, make, _pipeline(schedule), batches())


@pytest.mark.parametrize("make", sample((Backward, BackwardInFront), Backward), ids=lambda one: one.__name__)
def test_a_backward_in_a_step_is_refused(make: Any) -> None:
    with pytest.raises(BaseException, match="The step calls `backward` by itself"):
        run(_fit, 2, make, _pipeline(), batches())


WHOLE = [ByLate, ByLateWeight, ByScale, BeforeBlocks]


@pytest.mark.parametrize("make", sample(WHOLE, ByLate, ByLateWeight), ids=lambda one: one.__name__)
def test_gradients_in_a_step_of_one_stage_train_as_without_a_pipeline(make: Any) -> None:
    """The values that such a step needs behind the gradient were not found."""
    expected = run(_fit, 1, make, {}, batches())[0]
    for found in run(_fit, 2, make, {"stages": 2, "microbatches": 1, "schedule": "gpipe"}, batches()):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize(
    "make", sample((ClipsBetween, ClipsAfter, LogsNorms), ClipsBetween), ids=lambda one: one.__name__
)
@pytest.mark.parametrize("world", sample((2, 4), 2))
def test_norms_of_gradients_of_one_stage_are_refused(make: Any, world: int) -> None:
    """Every stage clipped by a factor of its own, in silence."""
    with pytest.raises(BaseException, match=r"a norm over the module's gradients \(`clip_grad_norm_`"):
        run(_fit, world, make, _pipeline(), batches())


def test_norms_of_the_strategy_are_those_of_all_stages() -> None:
    expected = run(_fit, 1, ClipsByStrategy, {}, batches())[0]
    for found in run(_fit, 2, ClipsByStrategy, {"stages": 2, "microbatches": 1, "schedule": "gpipe"}, batches()):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)  # norms are float32


class DropsGradients(Program):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.zero_grad()
        return super().training_step(batch, batch_idx)


class DropsByOptimizer(Program):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.optimizers().zero_grad()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("schedule", sample(("1f1b", "zb_h1", "interleaved_1f1b"), "1f1b"))
def test_a_step_that_drops_gradients_of_its_batch_is_refused(schedule: str) -> None:
    """Those of earlier micro-batches were lost in silence."""
    with pytest.raises(BaseException, match=r"`zero_grad\(\)` of a module in a pipelined step would drop"):
        run(_fit, 2, DropsGradients, _pipeline(schedule), batches())


def test_a_step_may_drop_gradients_by_its_optimizer() -> None:
    expected = run(_fit, 2, Program, _pipeline(), batches())[0]
    for found in run(_fit, 2, DropsByOptimizer, _pipeline(), batches()):
        for name, value in expected.items():
            assert torch.equal(found[name], value)


class KeptListBlock(Block):
    """Appends to a list that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        self.seen.append(x.detach().mean())
        return super().forward(x)


class KeptList(Program):
    block = KeptListBlock


class PointerBlock(Block):
    """Reads a number from a module buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Any:
        self.pointer.fill_((int(self.pointer) + 1) % 4)
        return super().forward(x)


class Pointer(Program):
    block = PointerBlock


class Mapped(Program):
    """Maps blocks over the batch."""

    def body(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = torch.func.vmap(block)(hidden)
        return hidden


class Tangents(Program):
    """Computes a derivative in forward mode around the blocks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        start = self.embedding(batch)
        hidden, tangent = torch.func.jvp(self.body, (start,), (torch.ones_like(start),))
        return self.loss(hidden, batch) + tangent.pow(2).mean()


class _Again(torch.autograd.Function):
    """Computes a block again in the backward, as libraries did before ``torch.utils.checkpoint``."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, block: nn.Module) -> Tensor:
        ctx.block, ctx.hidden = block, hidden.detach()
        return block(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.enable_grad():
            hidden = ctx.hidden.requires_grad_()
            torch.autograd.backward(ctx.block(hidden), grads)
        return hidden.grad, None


class OwnFunction(Program):
    def body(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = _Again.apply(hidden, block)
        return hidden


class Twice(Program):
    """Runs the model twice in a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + super().training_step(batch.flip(0), batch_idx)


class NamedByValueBlock(Block):
    """Makes a name of the value of a tensor."""

    def forward(self, x: Tensor) -> Any:
        return getattr(self, {"0": "first"}[f"{x.argmax() * 0}"])(x)


class NamedByValue(Program):
    block = NamedByValueBlock


REMEDIES = [
    (WeakBetween, "The step keeps a weak reference"),
    (Tagged, "it sets the attribute `aux` on a tensor"),
    (Dual, "is called inside of a transform"),
    (Twice, "and again after them. If the step runs the model twice"),
    (NamedByValue, "it reads the value of a tensor"),
    (OwnFunction, "is called inside of the forward of `_Again`, a `torch.autograd.Function`"),
    (KeptList, "Let it assign a new list to the attribute"),
    (Pointer, "Keep numbers that a forward reads in plain attributes"),
    (Mapped, "is called inside of a transform"),
    (Tangents, "is called inside of a transform"),
]


@pytest.mark.parametrize("case", sample(REMEDIES, *REMEDIES[:9]), ids=lambda case: case[0].__name__)
def test_programs_that_stages_cannot_pass_over_are_told_the_cause_and_a_remedy(case: Any) -> None:
    make, message = case
    with pytest.raises(BaseException, match=message):
        run(_fit, 2, make, _pipeline(), batches())


class Recurrent(Program):
    """Has recurrent layers, which have weak references to their own weights, as blocks."""

    layer: type[nn.RNNBase] = nn.LSTM
    passes_state = False

    def __init__(self) -> None:
        super().__init__()
        width = self.embedding.embedding_dim
        self.blocks = nn.ModuleList(self.layer(width, width, batch_first=True) for _ in range(4))

    def body(self, hidden: Tensor) -> Tensor:
        state = None
        for block in self.blocks:
            found, state = block(hidden, state if self.passes_state else None)
            hidden = hidden + found
        return hidden


class Gated(Recurrent):
    layer = nn.GRU


class Plain(Recurrent):
    layer = nn.RNN


class PassesState(Recurrent):
    passes_state = True


@pytest.mark.parametrize("make", sample((Recurrent, Gated, Plain, PassesState), Gated), ids=lambda one: one.__name__)
@pytest.mark.parametrize("world", sample((2, 4), 2))
def test_recurrent_layers_train_as_without_a_pipeline(make: Any, world: int) -> None:
    """They were refused, because they keep weak references."""
    expected = run(_fit, 1, make, {}, batches())[0]
    for found in run(_fit, world, make, {"stages": world, "microbatches": 1, "schedule": "gpipe"}, batches()):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)


class FillsHead(nn.Module):
    """Fills the containers that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 11)
        self.seen: list[Tensor] = []

    def forward(self, hidden: Tensor, store: dict[str, Any], batch: dict[str, Any]) -> Tensor:
        store["losses"].append(hidden.pow(2).mean())
        store["aux"] = hidden.abs().mean()
        batch.pop("unused")
        return self.linear(hidden)


class Fills(Program):
    """Adds losses that its head puts into containers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = FillsHead()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        store: dict[str, Any] = {"losses": []}
        found = {"ids": batch, "unused": batch}
        losses = store["losses"]
        logits = self.head(self.body(self.embedding(batch)), store, found)
        assert "unused" not in found
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())
        return loss + torch.stack(losses).sum() + store["aux"]


class LastFillsBlock(Block):
    tells = False

    def forward(self, hidden: list[Tensor], losses: Any) -> Any:
        result = super().forward(hidden[-1])
        if self.tells:
            losses.append(result.pow(2).mean())
            hidden.append(result)
        return [*hidden, result]


class LastFills(Program):
    """Gives its blocks lists, one of them with tensors that the stage before has sent; the last block fills both."""

    block = LastFillsBlock

    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].tells = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses: list[Tensor] = []
        hidden, sizes = [self.embedding(batch)], []
        for block in self.blocks:
            given = hidden
            hidden = block(given, losses)
            sizes.append(len(given))
        assert sizes == [1, 2, 3, 5], sizes
        return self.loss(hidden[-1], batch) + torch.stack(losses).sum()


class SameBlock(Block):
    """Keeps the tensor that it returns, twice."""

    def forward(self, x: Tensor) -> Any:
        self.aux = super().forward(x)
        self.kept = [self.aux]
        return self.aux


class Same(Program):
    """Adds a penalty for every tensor, which it tells apart by identity."""

    block = SameBlock

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden, found = self.embedding(batch), {}
        for block in self.blocks:
            hidden = block(hidden)
            found.update({id(one): one for one in (hidden, block.aux, *block.kept)})
        assert len(found) == 4
        return self.loss(hidden, batch) + torch.stack([one.pow(2).mean() for one in found.values()]).sum()


@dataclass
class Out:
    aux: Tensor


class DataclassBlock(Block):
    def forward(self, x: Tensor) -> Any:
        hidden = super().forward(x)
        self.out = Out(hidden.pow(2).mean())
        return hidden


class Dataclasses(Gathers):
    """Keeps its losses in registered dataclasses."""

    block = DataclassBlock

    def __init__(self) -> None:
        super().__init__()
        if Out not in torch.utils._pytree.SUPPORTED_NODES:
            torch.export.register_dataclass(Out)

    def losses(self) -> list[Tensor]:
        return [block.out.aux for block in self.blocks]


class ScaledBlock(Block):
    def forward(self, x: Tensor, scale: float | None = None) -> Any:
        if scale is None:
            raise ValueError("a scale is needed")
        return super().forward(x * scale)


class TriesAgain(Program):
    """Catches an error of its own that its blocks raise, and calls them with another argument."""

    block = ScaledBlock

    def body(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            try:
                hidden = block(hidden)
            except ValueError:
                hidden = block(hidden, 0.5)
        return hidden


ALIKE = (Fills, LastFills, Same, Dataclasses, TriesAgain)


@pytest.mark.parametrize("make", sample(ALIKE, Fills, LastFills, Same, TriesAgain), ids=lambda one: one.__name__)
@pytest.mark.parametrize("schedule", sample(("1f1b", "interleaved_1f1b"), "1f1b"))
def test_programs_that_fill_containers_compare_tensors_and_catch_own_errors_train_as_without_a_pipeline(
    make: Any, schedule: str
) -> None:
    """Containers stayed empty, and one tensor was two, in silence; an error of the program was a refusal."""
    expected = run(_fit, 1, make, {}, batches())[0]
    for found in run(_fit, 2, make, _pipeline(schedule), batches()):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)


class NewObjectBlock(Block):
    """Leaves its loss in a new object; the step finds the one before, or none, where it is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.out: Any = None
        self.kept: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Any:
        hidden = super().forward(x)
        self.keep(hidden.pow(2).mean())
        return hidden

    def keep(self, loss: Tensor) -> None:
        self.out = SimpleNamespace(loss=loss)

    def loss(self) -> Any:
        return 0.0 if self.out is None else self.out.loss


class NewObject(Gathers):
    block = NewObjectBlock

    def losses(self) -> list[Tensor]:
        return [torch.as_tensor(block.loss()) for block in self.blocks]


class FunctionBlock(NewObjectBlock):
    def keep(self, loss: Tensor) -> None:
        self.kept["loss"] = lambda: loss

    def loss(self) -> Any:
        return self.kept["loss"]() if self.kept else 0.0


class NewFunction(NewObject):
    block = FunctionBlock


class InnerListBlock(NewObjectBlock):
    def __init__(self) -> None:
        super().__init__()
        self.out = SimpleNamespace(items=[])

    def keep(self, loss: Tensor) -> None:
        self.out.items.append(SimpleNamespace(loss=loss))

    def loss(self) -> Any:
        found = sum(one.loss for one in self.out.items)
        self.out.items.clear()
        return found


class InnerList(NewObject):
    block = InnerListBlock


class Holder(nn.Module):
    def __init__(self, loss: Tensor) -> None:
        super().__init__()
        self.loss = loss


class ModuleBlock(NewObjectBlock):
    def keep(self, loss: Tensor) -> None:
        self.out = Holder(loss)


class NewModule(NewObject):
    block = ModuleBlock


OBJECTS = (NewObject, NewFunction, InnerList, NewModule)


@pytest.mark.parametrize("make", sample(OBJECTS, NewObject, InnerList, NewModule), ids=lambda one: one.__name__)
@pytest.mark.parametrize("schedule", sample(("1f1b", "interleaved_1f1b"), "1f1b"))
def test_losses_that_blocks_put_into_new_objects_are_refused(make: Any, schedule: str) -> None:
    """They were those of the last stage alone, in silence."""
    with pytest.raises(BaseException, match=re.escape("leaves tensors outside of its modules")):
        run(_fit, 2, make, _pipeline(schedule), batches())
