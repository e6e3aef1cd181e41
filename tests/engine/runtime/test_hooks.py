"""Hooks turn what PyTorch does into gathers and reductions, and leave nothing behind."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from lightning_zero.config import Communication, MixedPrecision
from lightning_zero.engine.buffers.parameter import ReleasedParameter
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.runtime.hooks import _ModuleHook, _tensors
from lightning_zero.engine.units.unit import UnitState
from lightning_zero.errors import ReleasedParameterError
from tests import worlds
from tests.references import Block, TinyGPT, token_loss

# -- Giving back in backward -------------------------------------------------------------------------------------------


class _Checkpointed(TinyGPT):
    """Recomputes each block."""

    reentrant = False

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def _frozen_norms(rank: int, world: int, reentrant: bool, retains: bool) -> float:
    """Return the largest difference of weights after three steps of a model whose norms are frozen."""
    worlds.seed()
    module = _Checkpointed()
    module.reentrant = reentrant
    for name, param in module.named_parameters():
        param.requires_grad_("norm" not in name)
    plain = copy.deepcopy(module)
    engine = ZeroEngine(stage=3)
    engine.shard(module)
    optimizers = [torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.1) for one in (module, plain)]
    engine.attach(optimizers[0])
    for step in range(3):
        losses = [token_loss(module, rank, step), *(token_loss(plain, other, step) / world for other in range(world))]
        for loss in losses:
            if retains:
                (0.5 * loss).backward(retain_graph=True)
            (loss * (0.5 if retains else 1.0)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(module.parameters(), plain.parameters(), strict=True)
    largest = max(float((engine.full_param(own) - whole).detach().abs().nan_to_num(9.0).max()) for own, whole in pairs)
    engine.close()
    return largest


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("retains", [False, True])
def test_a_recomputed_unit_with_frozen_layers_stays_until_its_inputs_have_gradients(
    reentrant: bool, retains: bool
) -> None:
    assert max(worlds.run(_frozen_norms, 2, reentrant, retains)) < 1e-6


# -- Tensors of an output ----------------------------------------------------------------------------------------------

x, y = torch.ones(1), torch.zeros(2)


@dataclass
class _Output:
    logits: Tensor
    more: Any = None


class _Named(NamedTuple):
    first: Tensor
    second: Any


OUTPUTS: dict[str, tuple[Any, list[Tensor]]] = {
    "tensor": (x, [x]),
    "tuple": ((x, (y,)), [x, y]),
    "list": ([x, None, [y]], [x, y]),
    "dict": ({"a": x, "b": {"c": y}}, [x, y]),
    "named-tuple": (_Named(x, {"k": y}), [x, y]),
    "dataclass": (_Output(x, [y]), [x, y]),
    "object": (SimpleNamespace(a=x, b=SimpleNamespace(c=y)), [x, y]),
    "nothing": ((None, 1, 2.0, "text", True), []),
    "type": (_Output, []),
    "module": (nn.Linear(1, 1), []),
}


@pytest.mark.parametrize("name", list(OUTPUTS))
def test_tensors_are_found_in_whatever_a_forward_returns(name: str) -> None:
    value, expected = OUTPUTS[name]
    found = list(_tensors(value))
    assert [id(tensor) for tensor in found] == [id(tensor) for tensor in expected]


def test_an_object_that_holds_itself_ends() -> None:
    loop = SimpleNamespace(x=x)
    loop.itself = loop
    assert x is next(_tensors(loop))
    assert len(list(_tensors(loop))) < 10


def test_a_copy_of_a_hook_does_nothing() -> None:
    calls: list[int] = []
    hook = _ModuleHook(lambda: calls.append(1))
    hook()
    copy.deepcopy(hook)()
    pickle.loads(pickle.dumps(hook))()
    assert calls == [1]


# -- Gathers -----------------------------------------------------------------------------------------------------------


def _engine(module: nn.Module, stage: int = 3, **options: Any) -> ZeroEngine:
    engine = ZeroEngine(stage, units=options.pop("units", ["Block"]), **options)
    engine.shard(module)
    return engine


def _states(engine: ZeroEngine) -> set[UnitState]:
    return {unit.state for unit in engine.units}


def _given_back(rank: int, world: int, prefetch: int) -> None:
    module = TinyGPT()
    engine = _engine(module, communication=Communication(prefetch=prefetch))
    for step in range(3):
        assert _states(engine) == {UnitState.SHARDED}
        with engine.scope("training_step"):
            loss = token_loss(module, rank, step)
            assert engine.units[0].state is UnitState.UNSHARDED
            assert {unit.state for unit in engine.units[1:]} == {UnitState.SHARDED}
        assert _states(engine) == {UnitState.SHARDED}
        loss.backward()
        assert _states(engine) == {UnitState.SHARDED}
        assert engine.stats().memory["gathered"] == 0
        with torch.no_grad():
            module(torch.zeros(1, 2, dtype=torch.long))
        assert _states(engine) == {UnitState.SHARDED}
    engine.close()


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_every_unit_is_given_back_after_forward_and_backward(prefetch: int) -> None:
    worlds.run(_given_back, 2, prefetch)


def _touched(rank: int, world: int) -> None:
    module = TinyGPT()
    engine = _engine(module)
    with engine.scope("training_step"):
        norm = module.blocks[1].up.weight.norm()
        assert type(module.blocks[1].up.weight) is nn.Parameter
        assert type(module.blocks[0].up.weight) is ReleasedParameter
        (norm + module.blocks[1].up.bias.sum()).backward()
    assert _states(engine) == {UnitState.SHARDED}
    weight = engine.full_param(module.blocks[1].up.weight)
    assert torch.allclose(engine.full_grad(module.blocks[1].up.weight), weight / weight.norm())
    with pytest.raises(ReleasedParameterError, match="blocks.1.up.weight"):
        module.blocks[1].up.weight.norm()
    engine.close()


def test_a_parameter_used_outside_its_module_is_gathered_inside_a_scope_only() -> None:
    worlds.run(_touched, 2)


def _other_module(rank: int, world: int) -> None:
    """A child of the root is called without the root."""
    module = TinyGPT()
    engine = _engine(module)
    out = module.blocks[0](torch.ones(1, 6))
    assert _states(engine) == {UnitState.SHARDED}
    out.sum().backward()
    assert engine.full_grad(module.blocks[0].up.weight) is not None
    assert engine.full_grad(module.blocks[1].up.weight) is None
    engine.close()


def test_a_unit_may_be_called_by_itself() -> None:
    worlds.run(_other_module, 2)


class _Remembers(Block):
    """Its loss leaves by a side attribute."""

    def forward(self, x: Tensor) -> Tensor:
        self.penalty = self.up.weight.square().sum() + (self.inner(x) ** 2).sum()
        return x


def _side(rank: int, world: int) -> None:
    module = TinyGPT(blocks=[_Remembers(), _Remembers()])
    engine = _engine(module)
    with engine.scope("training_step"):
        module(torch.zeros(1, 2, dtype=torch.long))
        loss = module.blocks[0].penalty + module.blocks[1].penalty
    loss.backward()
    plain = TinyGPT(blocks=[_Remembers(), _Remembers()])
    with torch.no_grad():
        for mine, theirs in zip(plain.parameters(), module.parameters(), strict=True):
            mine.copy_(engine.full_param(theirs))
    plain(torch.zeros(1, 2, dtype=torch.long))
    (plain.blocks[0].penalty + plain.blocks[1].penalty).backward()
    for mine, theirs in zip(plain.parameters(), module.parameters(), strict=True):
        found = engine.full_grad(theirs)
        assert (found is None) == (mine.grad is None)
        assert found is None or torch.equal(found, mine.grad)
    engine.close()


def test_a_loss_that_leaves_by_a_side_attribute_gathers_again_in_backward() -> None:
    worlds.run(_side, 2)


class _Fails(Block):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise KeyError("out of luck")
        return super().forward(x)


def _failure(rank: int, world: int, stage: int, in_scope: bool) -> None:
    """An error on all ranks at the same place leaves an engine that trains on."""
    module = TinyGPT(blocks=[Block(), _Fails(), Block()])
    engine = _engine(module, stage)
    optimizer = engine.attach(torch.optim.SGD(module.parameters(), lr=0.1))

    def loss(step: int) -> Tensor:
        if not in_scope:
            return token_loss(module, rank, step)
        with engine.scope("training_step"):
            return token_loss(module, rank, step)

    for step in range(4):
        module.blocks[1].fails = step in (0, 2)
        if module.blocks[1].fails:
            with pytest.raises(KeyError, match="out of luck"):
                loss(step)
            continue
        loss(step).backward()
        assert engine.grad_norm() > 0
        optimizer.step()
        optimizer.zero_grad()
    assert all(unit.uses == 0 for unit in engine.units)
    engine.close()


@pytest.mark.parametrize("in_scope", [False, True], ids=["bare", "scope"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_training_goes_on_after_an_error_in_a_forward(stage: int, in_scope: bool) -> None:
    worlds.run(_failure, 2, stage, in_scope)


def _graph(rank: int, world: int, stage: int) -> None:
    """A gradient penalty: the first backward builds a graph and reduces nothing."""
    module = nn.Sequential(Block(), Block())
    engine = _engine(module, stage)
    inputs = torch.ones(2, 6, requires_grad=True)
    with engine.scope("training_step"):
        out = module(inputs)
        (grad,) = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        loss = grad.square().sum()
    loss.backward()
    assert engine.grad_norm() > 0
    calls = engine.stats().calls["reduce_scatter"]
    assert calls == sum(1 for unit in engine.units if unit.buffers)
    engine.close()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_backward_that_builds_a_graph_reduces_nothing(stage: int) -> None:
    worlds.run(_graph, 2, stage)


def _checkpointed(rank: int, world: int, reentrant: bool) -> None:
    def run(checkpoints: bool) -> list[Tensor | None]:
        worlds.seed()

        def body(self: TinyGPT, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)
            return x

        module = TinyGPT()
        if checkpoints:
            module.body = body.__get__(module)  # type: ignore[method-assign]
        engine = _engine(module)
        token_loss(module, rank, 0).backward()
        grads = [engine.full_grad(param) for param in module.parameters()]
        assert _states(engine) == {UnitState.SHARDED}
        engine.close()
        return grads

    plain, checkpointed = run(False), run(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, checkpointed, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_forward_gathers_again(reentrant: bool) -> None:
    worlds.run(_checkpointed, 2, reentrant)


class _Nested(torch.autograd.Function):
    """Runs a backward of its own inside the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        (x,) = ctx.saved_tensors
        inner = x.detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.module(inner), grad)
        return inner.grad, None


def _checkpoint(module: nn.Module, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(module, x, use_reentrant=True)


def _checkpoint_twice(module: nn.Module, x: Tensor) -> Tensor:
    return _checkpoint(lambda y: _checkpoint(module, y), x)  # type: ignore[arg-type]


NESTED: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "checkpoint": _checkpoint,
    "checkpoint-in-checkpoint": _checkpoint_twice,
    "function": lambda module, x: _Nested.apply(x, module),
}


class _NestedGPT(TinyGPT):
    """Every gradient but the first unit's comes from a nested backward, and the loss is made outside of the root."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = self.call(block, hidden)
        return self.call(nn.Sequential(self.norm, self.head), hidden)


def _nested(rank: int, world: int, stage: int, name: str) -> None:
    def run(call: Callable[[nn.Module, Tensor], Tensor]) -> tuple[list[Tensor | None], dict[str, int]]:
        worlds.seed()
        module = _NestedGPT(call)
        engine = ZeroEngine(stage, units=("Block",))
        engine.shard(module)
        optimizer = engine.attach(torch.optim.AdamW(module.parameters(), lr=0.01))
        grads: list[Tensor | None] = []
        for step in range(3):  # the second follows a list, the third two backwards that are added
            for part in range(1 + step // 2):
                token_loss(module, rank, 10 * step + part).backward()
            grads += [engine.full_grad(param) for param in module.parameters()]
            engine.clip_grad_norm(optimizer, 0.1)
            optimizer.step()
            optimizer.zero_grad()
        calls = dict(engine.stats().calls)
        engine.close()
        return grads, calls

    plain, expected = run(lambda module, x: module(x))
    nested, calls = run(NESTED[name])
    assert all(torch.equal(a, b) for a, b in zip(plain, nested, strict=True) if a is not None and b is not None)
    assert [a is None for a in plain] == [b is None for b in nested]
    assert calls["reduce_scatter"] == expected["reduce_scatter"]


@pytest.mark.parametrize("name", list(NESTED))
@pytest.mark.parametrize("stage", range(4))
def test_backwards_inside_a_backward_reduce_nothing_of_their_own(stage: int, name: str) -> None:
    worlds.run(_nested, 2, stage, name)


def _frozen(rank: int, world: int) -> None:
    """A unit without any gradient of its own passes gradients on, and is given back."""
    module = TinyGPT()
    module.blocks[1].requires_grad_(False)
    module.blocks[2].up.requires_grad_(False)
    engine = _engine(module)
    for step in range(2):
        token_loss(module, rank, step).backward()
        assert _states(engine) == {UnitState.SHARDED}
    assert engine.full_grad(module.blocks[1].up.weight) is None
    assert engine.full_grad(module.blocks[2].down.weight) is not None
    assert engine.full_grad(module.embedding.weight) is not None
    engine.close()


def test_units_with_frozen_parameters_pass_gradients_on() -> None:
    worlds.run(_frozen, 2)


# -- Installation ------------------------------------------------------------------------------------------------------


def _hooks_of(module: nn.Module) -> int:
    count = sum(len(child._forward_hooks) + len(child._forward_pre_hooks) for child in module.modules())
    return count + sum(len(param._post_accumulate_grad_hooks or ()) for param in module.parameters())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_closed_engine_takes_its_hooks_along(stage: int) -> None:
    module = TinyGPT()
    engine = _engine(module, stage)
    assert _hooks_of(module) > 0
    engine.close()
    assert _hooks_of(module) == 0
    engine.close()
    token_loss(module, 0, 0).backward()
    assert all(param.grad is not None for param in module.parameters())


def test_a_paused_engine_leaves_the_module_alone() -> None:
    module = TinyGPT()
    engine = _engine(module, 1)
    engine.pause()
    token_loss(module, 0, 0).backward()
    assert module.head.weight.grad is not None
    module.zero_grad()
    engine.resume()
    engine.resume()
    token_loss(module, 0, 0).backward()
    assert engine.grad_norm() > 0
    engine.close()


def test_an_embedding_that_computes_lower_gives_fp32() -> None:
    seen: list[torch.dtype] = []
    module = TinyGPT()
    engine = _engine(module, 2, precision=MixedPrecision(compute_dtype=torch.bfloat16))
    module.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        module.embedding.register_forward_hook(lambda embedding, *_: seen.append(embedding.weight.dtype))
        module(torch.zeros(1, 2, dtype=torch.long))
    assert seen == [torch.bfloat16, torch.float32]
    engine.close()


def _outer_hooks(rank: int, world: int) -> int:
    """Saved-tensor hooks of somebody else go on working around a scope."""
    packed = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor.clone()

    module = TinyGPT()
    engine = _engine(module)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), engine.scope("training_step"):
        loss = token_loss(module, rank, 0)
    loss.backward()
    mine = [engine.full_grad(param) for param in module.parameters()]
    engine.detach()
    with engine.scope("training_step"):
        loss = token_loss(module, rank, 0)
    loss.backward()
    assert all(torch.equal(a, engine.full_grad(param)) for a, param in zip(mine, module.parameters(), strict=True))
    engine.close()
    return len(packed)


def test_saved_tensor_hooks_around_a_step_are_called() -> None:
    assert min(worlds.run(_outer_hooks, 2)) > 0


# -- What autograd saves -----------------------------------------------------------------------------------------------


class _Exponent(nn.Module):
    """Autograd saves the result of ``exp``, which knows the graph that saves it."""

    def __init__(self, between: Callable[[Tensor], Any] = lambda y: None) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.between = between
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).exp()
        z = y * 2
        self.between(y)
        return self.last(z)


class _Alive:
    """Lives as long as the graph that it was hung into."""

    def __call__(self, gradient: Tensor) -> None: ...


def _without_backward(rank: int, world: int, stage: int) -> tuple[bool, bool]:
    seen: list[weakref.ref[_Alive]] = []

    def watch(y: Tensor) -> None:
        alive = _Alive()
        y.register_hook(alive)
        seen.append(weakref.ref(alive))

    module = _Exponent(watch)
    engine = _engine(module, stage, units=["Linear"])
    gc.disable()
    with engine.scope("training_step"):
        loss = module(torch.ones(2, 4)).sum()
    was_alive = seen[0]() is not None
    del loss
    is_alive = seen[0]() is not None
    gc.enable()
    engine.close()
    return was_alive, is_alive


@pytest.mark.parametrize("stage", [2, 3])
def test_the_graph_of_a_loss_without_backward_goes_with_the_loss(stage: int) -> None:
    assert worlds.run(_without_backward, 2, stage) == [(True, False)] * 2


def _changed_in_place(rank: int, world: int, stage: int) -> None:
    module = _Exponent(lambda y: y.add_(1))
    engine = _engine(module, stage, units=["Linear"])
    with engine.scope("training_step"):
        loss = module(torch.ones(2, 4)).sum()
    loss.backward()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_saved_tensor_that_was_changed_is_refused_as_in_plain_pytorch(stage: int) -> None:
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: \[torch.FloatTensor \[2, 4\]\]"):
        worlds.run(_changed_in_place, 2, stage)


class _Pair(nn.Module):
    """Two layers that make a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, index: int) -> Tensor:
        return self.layers[index](x.exp()).exp().sum()  # type: ignore[no-any-return]


class _AroundPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.pair = _Pair()

    def forward(self, x: Tensor, index: int) -> Tensor:
        return self.pair(self.first(x), index)  # type: ignore[no-any-return]


def _stepped_between(rank: int, world: int, stage: int, deferred: bool, stepped: str) -> list[Tensor]:
    """Step all parameters, or those of the other layer, between the forward and the backward of layer 1."""
    module = _AroundPair()
    engine = _engine(module, stage, units=["_Pair"], step="deferred" if deferred else "now")
    optimizer = engine.attach(torch.optim.SGD(module.get_submodule(stepped).parameters(), lr=0.1))
    with engine.scope("training_step"):
        first, second = (module(torch.ones(2, 4), index) for index in (0 if stepped else 1, 1))
    first.backward()
    optimizer.step()
    optimizer.zero_grad()
    second.backward()
    found = [engine.full_grad(param).clone() for param in module.pair.layers[1].parameters()]
    engine.close()
    return found


@pytest.mark.parametrize("deferred", [False, True], ids=["at-once", "deferred"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_between_a_forward_and_its_backward_is_refused_as_in_plain_pytorch(stage: int, deferred: bool) -> None:
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: \[torch.FloatTensor \[4, 4\]\]"):
        worlds.run(_stepped_between, 2, stage, deferred, "")


@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_of_other_parameters_of_the_unit_is_none_of_its_backward(stage: int) -> None:
    worlds.seed()
    module = _AroundPair()
    module(torch.ones(2, 4), 1).backward()
    for found in worlds.run(_stepped_between, 2, stage, False, "pair.layers.0"):
        assert all(torch.equal(a, b.grad) for a, b in zip(found, module.pair.layers[1].parameters(), strict=True))
