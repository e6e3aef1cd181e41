"""What a program may do: every action runs on either side and returns what a user would see of it.

An action is a name and a dict of arguments; arguments that are not given have the plainest value. Names of blocks and
parameters that the module does not have are passed over, so that modules can be made smaller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.engine.buffers.parameter import ReleasedParameter
from tests.fuzz.modules import VOCAB, WIDTH
from tests.fuzz.sides import Side

__all__ = ["ACTIONS", "make_optimizers"]

Seen = list[Any]  # tensors, None, bools, strings


class Caught(Exception):
    """What a program raises and catches itself."""


# -- Data --------------------------------------------------------------------------------------------------------------


def _generator(seed: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * seed + rank)


def _ids(side: Side, seed: int) -> Tensor:
    return torch.randint(0, VOCAB, (3, 2), generator=_generator(seed, side.rank))


def _floats(side: Side, seed: int, same: bool = False) -> Tensor:
    generator = _generator(seed, 0 if same else side.rank)
    return torch.randn(3, 2, WIDTH, generator=generator, dtype=torch.float64).to(_dtype(side))


def _dtype(side: Side) -> torch.dtype:
    return next(iter(side.params.values())).dtype


def _used(side: Side, use: Sequence[Sequence[str]] | Sequence[str] | None) -> list[str] | None:
    """Return the blocks that this rank uses: ``use`` is a list for all ranks, or a list per rank, or None (all)."""
    if use and not isinstance(use[0], str):
        return list(use[side.rank % len(use)])
    return None if use is None else [str(name) for name in use]


def _named(side: Side, names: Sequence[str] | None) -> list[nn.Parameter]:
    return list(side.params.values()) if names is None else [side.params[name] for name in names if name in side.params]


def _by_parts(module: Any, x: Tensor, use: list[str] | None) -> Tensor:
    """Compute what the root's forward does by calling its children."""
    x = x if x.is_floating_point() else module.embedding(x)
    for name, block in module.blocks.items():
        if use is None or name in use:
            x = block(x)
    return module.head(module.norm(x))  # type: ignore[no-any-return]


def _loss(out: Tensor) -> Tensor:
    return out.tanh().square().mean() + out.sin().mean()  # bounded, so that no program blows up


# -- Optimizers --------------------------------------------------------------------------------------------------------


def make_optimizers(side: Side, specs: Iterable[dict[str, Any]]) -> list[Optimizer]:
    """Build the optimizers; ``groups`` are lists of names, or None for everything."""
    made = []
    for spec in specs:
        groups = spec.get("groups")
        named = [_named(side, None)] if groups is None else [_named(side, names) for names in groups]
        lr = spec.get("lr", 0.01)
        params = [{"params": group, "lr": lr / (index + 1)} for index, group in enumerate(named) if group]
        if params:
            made.append(getattr(torch.optim, spec["class"])(params, **{"lr": lr, **spec.get("options", {})}))
    return made


def _optimizer(side: Side, opt: int) -> Optimizer:
    return side.optimizers[opt % len(side.optimizers)]


# -- Training ----------------------------------------------------------------------------------------------------------


def backward(
    side: Side,
    *,
    seed: int = 0,
    use: Any = None,
    last: bool = True,
    scope: bool = True,
    explicit: bool = True,
    floats: bool = False,
    parts: bool = False,
    penalty: str | None = None,
    times: int = 1,
    forwards: int = 1,
    idle: Sequence[int] = (),
) -> Seen:
    """Run forwards, then their backwards.

    Args:
        side: The side.
        seed: Of the batch.
        use: Blocks, the same on all ranks, or a list per rank.
        last: Whether gradients are averaged now.
        scope: Whether the forward runs in an explicit scope.
        explicit: Whether the backward runs in ``backward_scope``.
        floats: Whether vectors come in, so that the embedding is not used.
        parts: Whether the children are called instead of the module.
        penalty: Adds a penalty on the gradients of ``"input"`` or of ``"weights"``.
        times: Backwards through the same graph.
        forwards: Forwards that run before the first backward.
        idle: Ranks that have no loss.
    """
    is_idle = side.rank in idle
    losses: list[Tensor | None] = []
    with side.microbatch(last):
        for number in range(forwards):
            with side.scope("training_step") if scope else contextlib.nullcontext():
                losses.append(None if is_idle else _forward(side, seed + 100 * number, use, floats, parts, penalty))
        for loss in losses:
            for time in range(times):
                side.backward(loss, explicit=explicit, retain=time + 1 < times)
    return [None if loss is None else loss.detach() for loss in losses]


def _forward(side: Side, seed: int, use: Any, floats: bool, parts: bool, penalty: str | None) -> Tensor:
    x = _floats(side, seed) if floats or penalty == "input" else _ids(side, seed)
    if penalty == "input":
        x.requires_grad_()
    blocks = _used(side, use)
    loss = _loss(_by_parts(side.module, x, blocks) if parts else side.module(x, blocks))
    if penalty == "input":
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + 0.1 * slope.square().sum()
    if penalty == "weights":
        wanted = [param for param in side.params.values() if param.requires_grad]
        slopes = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
        return loss + 0.1 * sum(slope.square().sum() for slope in slopes if slope is not None)
    return loss


def step(side: Side, *, opt: int = 0) -> Seen:
    """Step an optimizer."""
    _optimizer(side, opt).step()
    return []


def closure(side: Side, *, opt: int = 0, seed: int = 0, use: Any = None) -> Seen:
    """Step an optimizer with a closure."""

    def evaluate() -> Tensor:
        _optimizer(side, opt).zero_grad()
        with side.scope("training_step"):
            loss = _forward(side, seed, use, False, False, None)
        side.backward(loss, explicit=True)
        return loss.detach()

    return [_optimizer(side, opt).step(evaluate)]


def zero_grad(side: Side, *, opt: int | None = 0, none: bool = True) -> Seen:
    """Drop gradients: an optimizer's, or with ``opt=None`` the module's."""
    (side.module if opt is None else _optimizer(side, opt)).zero_grad(set_to_none=none)
    return []


def clip_norm(side: Side, *, opt: int | None = 0, max_norm: float = 0.1, by_hand: bool = False) -> Seen:
    """Clip by norm; with ``opt=None`` all parameters, by PyTorch's function."""
    if by_hand or opt is None:
        params = _named(side, None) if opt is None else _held(_optimizer(side, opt))
        return [torch.as_tensor(nn.utils.clip_grad_norm_(params, max_norm))]
    return [side.clip_norm(_optimizer(side, opt), max_norm)]


def clip_value(side: Side, *, opt: int = 0, value: float = 0.01, by_hand: bool = False) -> Seen:
    """Clip by value."""
    if by_hand:
        nn.utils.clip_grad_value_(_held(_optimizer(side, opt)), value)
    else:
        side.clip_value(_optimizer(side, opt), value)
    return []


def lr(side: Side, *, opt: int = 0, factor: float = 0.5) -> Seen:
    """Change the learning rate, as schedulers do."""
    for group in _optimizer(side, opt).param_groups:
        group["lr"] *= factor
    return []


def attach(side: Side, *, optimizers: list[dict[str, Any]] | None = None) -> Seen:
    """Attach the same optimizers again, or others."""
    side.attach(side.optimizers if optimizers is None else make_optimizers(side, optimizers))
    return []


def add_group(side: Side, *, opt: int = 0, names: Sequence[str] = (), lr: float = 0.01) -> Seen:
    """Add a group of parameters that no optimizer has."""
    taken = {id(param) for optimizer in side.optimizers for param in _held(optimizer)}
    params = [param for param in _named(side, names) if id(param) not in taken]
    if params:
        _optimizer(side, opt).add_param_group({"params": params, "lr": lr})
    return []


def freeze(side: Side, *, names: Sequence[str] | None = None, value: bool = False) -> Seen:
    """Set ``requires_grad``."""
    for param in _named(side, names):
        param.requires_grad_(value)
    return []


# -- Gradients ---------------------------------------------------------------------------------------------------------


def _decayed(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad.add_(param.detach(), alpha=0.1)


def _halved(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad = param.grad * 0.5


def _dropped(param: nn.Parameter) -> None:
    param.grad = None


_EDITS: dict[str, Callable[[Any], Any]] = {
    "mul_": lambda param: param.grad.mul_(0.5),
    "data": lambda param: param.grad.data.mul_(0.5),
    "clamp_": lambda param: param.grad.clamp_(-0.05, 0.05),
    "zero_": lambda param: param.grad.zero_(),
    "decay": _decayed,
    "assign": _halved,
    "none": _dropped,
}


def edit(side: Side, *, names: Sequence[str] | None = None, how: str = "mul_") -> Seen:
    """Edit gradients where there are any, where values are needed as docs/limits.md asks for (``p.grad = g``)."""
    with torch.no_grad():
        for param in _named(side, names):
            if param.grad is None:
                continue
            is_released = isinstance(param, ReleasedParameter)  # although it has a gradient: an assigned one
            with side.gathered([param], None) if how == "decay" and is_released else contextlib.nullcontext():
                _EDITS[how](param)
    return []


def assign(
    side: Side, *, names: Sequence[str] | None = None, seed: int = 0, by_grad: bool = False, scope: bool = True
) -> Seen:
    """Assign gradients by hand, the same on all ranks: random ones, or averages of ``autograd.grad``."""
    named = {name: side.params[name] for name in names or side.params if name in side.params}
    params = {name: param for name, param in named.items() if param.requires_grad}
    if not params:
        return []
    if by_grad:
        with side.scope("training_step") if scope else contextlib.nullcontext():
            loss = _forward(side, seed, None, False, False, None)
            grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    else:
        generator = _generator(seed, 0)
        shapes = [side.shapes[name] for name in params]
        grads = tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(_dtype(side)) for shape in shapes)
    means = [None if grad is None else grad.detach().clone() for grad in grads]
    for mean in means:
        if mean is not None:
            dist.all_reduce(mean.div_(side.world), group=side.group)
    for param, mean in zip(params.values(), means, strict=True):
        if mean is not None:
            param.grad = mean
    return []


def read(side: Side, *, what: str = "norm", opt: int | None = None, order: float = 2.0) -> Seen:
    """Read norms, who has a gradient, or whole parameters."""
    params = list(side.params.values())
    if what == "norm":
        return [side.grad_norm(None if opt is None else _optimizer(side, opt), order)]
    if what == "norms":
        with_elements = [param for name, param in side.params.items() if not name.endswith("empty")]
        return [None if param.grad is None else param.grad.norm(order).clone() for param in with_elements]
    if what == "has_grad":
        return [param.grad is None for param in params]
    with side.gathered(side.module, None):
        if what == "state_dict":
            return [value.clone() for value in side.module.state_dict().values()]
        return [param.detach().clone() for param in params]


# -- Parameters --------------------------------------------------------------------------------------------------------


def write(
    side: Side, *, names: Sequence[str] | None = None, how: str = "all", data: bool = False, point: bool = False
) -> Seen:
    """Halve parameters: in ``gathered`` by all ranks, by rank 0, or in the open; or point ``data`` to halves."""
    params = _named(side, names)
    if not params:
        return []
    with contextlib.nullcontext() if how == "open" else side.gathered(params, how), torch.no_grad():
        if how != "rank0" or side.rank == 0:
            for param in params:
                if point:
                    param.data = param.data * 0.5
                else:
                    (param.data if data else param).mul_(0.5)
    return []


def load(side: Side, *, how: str = "all") -> Seen:
    """Load the state dict that was loaded last, and keep the one of now (the first time: keep it only)."""
    with side.gathered(side.module, how):
        kept = {key: value.clone() for key, value in side.module.state_dict().items()}
        if "weights" in side.memory:
            side.module.load_state_dict(side.memory["weights"])
    side.memory["weights"] = kept
    return []


def save(side: Side, *, full: bool = False) -> Seen:
    """Save a checkpoint: a directory, or one file."""
    side.save(full=full)
    return []


def resume(side: Side, *, stage: int | None = None) -> Seen:
    """Load the last checkpoint, if the optimizers have the same groups; with ``stage`` into a new engine."""
    if "saved" in side.memory:
        side.resume(stage)
    return []


# -- Forwards that train nothing ---------------------------------------------------------------------------------------


def evaluate(
    side: Side,
    *,
    what: str | None = None,
    mode: str = "no_grad",
    eval: bool = True,
    scope: bool = False,
    seed: int = 0,
    use: Any = None,
) -> Seen:
    """Run a forward of the module, or of the submodule ``what``, on every rank."""
    target = side.module if what is None else dict(side.module.named_modules()).get(what)
    if target is None:
        return []
    x = _ids(side, seed) if what in (None, "embedding") else _floats(side, seed)
    modes: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
        "grad": contextlib.nullcontext,
    }
    side.module.train(not eval)
    try:
        with modes[mode](), side.scope("validation_step") if scope else contextlib.nullcontext():
            out = target(x, _used(side, use)) if what is None else target(x)
    finally:
        side.module.train()
    return [out.detach().clone()]


def fail(side: Side, *, at: str = "pre", module: str = "head", seed: int = 0, scope: bool = True) -> Seen:
    """Raise in a step on every rank, catch it, drop all gradients.

    Args:
        side: The side.
        at: ``"scope"``: in the scope, behind the forward; ``"pre"``, ``"post"``: in a hook of ``module``'s forward;
            ``"grad"``: in a hook on the gradient of its output; ``"param"``: of its first parameter.
        module: Name of a submodule.
        seed: Of the batch.
        scope: Whether the forward runs in an explicit scope.
    """
    target = dict(side.module.named_modules()).get(module)
    if target is None:
        return []

    def raises(*_: Any) -> None:
        raise Caught

    def watches(_: Any, __: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(raises)

    handles: list[Any] = []
    if at == "pre":
        handles.append(target.register_forward_pre_hook(raises))
    elif at == "post":
        handles.append(target.register_forward_hook(raises))
    elif at == "grad":
        handles.append(target.register_forward_hook(watches))
    elif at == "param":
        trained = [param for param in target.parameters() if param.requires_grad]
        handles += [param.register_hook(raises) for param in trained[:1]]
    caught = False
    try:
        with side.scope("training_step") if scope else contextlib.nullcontext():
            loss = _forward(side, seed, None, False, False, None)
            if at == "scope":
                raise Caught
        side.backward(loss, explicit=scope)
    except Caught:
        caught = True
    finally:
        for handle in handles:
            handle.remove()
    side.drop_gradients()
    return [caught]


def tell(side: Side, *, verb: str = "flush") -> Seen:
    """Call a method of the engine that a plain program has no need of."""
    side.tell_engine(verb)
    return []


def _held(optimizer: Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


ACTIONS: dict[str, Callable[..., Seen]] = {
    action.__name__: action
    for action in (
        backward, step, closure, zero_grad, clip_norm, clip_value, lr, attach, add_group, freeze, edit, assign, read,
        write, load, save, resume, evaluate, fail, tell,
    )
}  # fmt: skip
