"""Choose the units of a module, make meta parameters real unit by unit, and put every parameter into a flat buffer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from lightning_zero.blocks import hookable_modules, modules_of_classes, repeated_blocks
from lightning_zero.config import Communication, MixedPrecision
from lightning_zero.engine.buffers.aliases import Aliases
from lightning_zero.engine.buffers.buffer import FlatBuffer
from lightning_zero.engine.buffers.home import HomeMaker
from lightning_zero.engine.buffers.parameter import copy_attributes, user_class
from lightning_zero.engine.buffers.spec import BufferKind
from lightning_zero.engine.units.grid_groups import GridGroups
from lightning_zero.engine.units.lowering import Lowering
from lightning_zero.engine.units.unit import Unit
from lightning_zero.storage.store import DeviceStore

__all__ = ["ROOT", "Territory", "build_unit", "choose_territories", "kind_of", "make_buffers_real"]

ROOT = "(root)"


@dataclass
class Territory:
    """A unit to be: a module and the parameters below it that no inner unit holds.

    ``names`` holds every name of a parameter, the first one first; ``owners`` the module of the first name. ``modules``
    are those that are initialised when the territory is made real: the outermost that one of their parameters is in.
    Parameters whose ``id`` is in ``remote`` are those of other parts of the model.
    """

    name: str
    module: nn.Module
    params: list[nn.Parameter] = field(default_factory=list)
    names: list[list[str]] = field(default_factory=list)
    owners: list[nn.Module] = field(default_factory=list)
    modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    remote: Collection[int] = ()


def choose_territories(
    module: nn.Module, units: Sequence[str | type[nn.Module]] | None, remote: Collection[int] = ()
) -> list[Territory]:
    """Cut a module into units; the first one is the root, which takes the parameters that no other unit has.

    Without ``units``: the repeated blocks of every container (several children of one class), and large leaf modules
    outside of them, such as embeddings and output heads. A parameter that several units use belongs to the innermost
    unit around all of them. Parameters whose ``id`` is in ``remote`` are left out.

    Raises:
        ValueError: A name in ``units`` matches no module.
    """
    roots = {id(module): Territory(ROOT, module)}
    for name, unit in _named_units(module, units):
        roots.setdefault(id(unit), Territory(name, unit))
    chains: dict[int, list[list[Territory]]] = {}  # of every parameter: the units around each of its uses
    names: dict[int, list[str]] = {}
    params: dict[int, tuple[nn.Parameter, nn.Module]] = {}  # with the first module that has it
    visits: list[tuple[str, nn.Module, list[Territory]]] = []

    def walk(current: nn.Module, prefix: str, around: list[Territory]) -> None:
        around = [*around, roots[id(current)]] if id(current) in roots else around
        visits.append((prefix, current, around))
        for key, param in current._parameters.items():
            if param is not None and id(param) not in remote:
                params.setdefault(id(param), (param, current))
                names.setdefault(id(param), []).append(f"{prefix}{key}")
                chains.setdefault(id(param), []).append(around)
        for key, child in current._modules.items():
            if child is not None:
                walk(child, f"{prefix}{key}.", around)

    walk(module, "", [])
    holders = {key: _innermost_common(chain) for key, chain in chains.items()}
    for key, (param, module_of) in params.items():
        holders[key].params.append(param)
        holders[key].names.append(names[key])
        holders[key].owners.append(module_of)
    for prefix, current, around in visits:
        held = [param for param in current._parameters.values() if param is not None]
        needed = {id(holders[id(param)]) for param in held if id(param) in holders}
        if held and not needed:
            continue
        kept = [territory for territory in around[1:] if territory.params]
        place = next((territory for territory in around if id(territory) in needed), [around[0], *kept][-1])
        if not any(current is seen for _, seen in place.modules):
            place.modules.append((prefix, current))
    depths = {id(around[-1]): len(around) for _, _, around in visits}
    for territory in roots.values():
        territory.remote = remote
    outer_first = sorted(roots.values(), key=lambda territory: depths[id(territory)])
    return [outer_first[0], *(territory for territory in outer_first[1:] if territory.params)]


def _innermost_common(chains: list[list[Territory]]) -> Territory:
    common = chains[0]
    for chain in chains[1:]:
        shared = [one for one, other in zip(common, chain, strict=False) if one is other]
        common = common[: len(shared)]
    return common[-1]


def _named_units(module: nn.Module, units: Sequence[str | type[nn.Module]] | None) -> Iterator[tuple[str, nn.Module]]:
    if units is None:
        yield from _automatic_units(module)
    else:
        yield from modules_of_classes(module, units, option="units")


def _automatic_units(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    blocks = dict(repeated_blocks(module))
    inside = {id(child) for block in blocks.values() for child in block.modules()}
    sizes = [_numel(block.parameters()) for block in blocks.values()]
    threshold = max(sizes) / 4 if sizes else _numel(module.parameters()) / 16
    yield from blocks.items()
    for name, child in hookable_modules(module):
        is_leaf = not any(True for _ in child.children())
        if child is not module and is_leaf and id(child) not in inside:
            numel = _numel(child.parameters())
            if numel and numel >= threshold:
                yield name, child


def _numel(params: Iterable[nn.Parameter]) -> int:
    return sum(param.numel() for param in params)


def build_unit(
    territory: Territory,
    index: int,
    *,
    root: nn.Module,
    awaited: set[tuple[int, str]],
    groups: GridGroups,
    precision: MixedPrecision,
    lowering: Lowering,
    communication: Communication,
    store: DeviceStore,
    home: HomeMaker | None = None,
    params_home: HomeMaker | None = None,
    is_shared: Callable[[nn.Parameter], bool] = lambda param: False,
) -> Unit:
    """Make a territory's parameters real, put them into flat buffers and give up the copies.

    Collective: all ranks. A module is not initialised if all that it would give values to is ``awaited`` (see there).
    """
    _materialize(territory, root, store.device, awaited)
    kinds: dict[BufferKind, tuple[list[nn.Parameter], list[str]]] = {}
    for param, names, owner in zip(territory.params, territory.names, territory.owners, strict=True):
        compute = lowering.dtype(param, owner, names[0].rpartition(".")[2])
        kind = kind_of(
            param,
            compute,
            precision=precision,
            communication=communication,
            shared=names[0] if is_shared(param) else None,
            group=groups.name_of(names[0]),
        )
        params, param_names = kinds.setdefault(kind, ([], []))
        params.append(param)
        param_names.append(names[0])
    special = {
        id(param): owner
        for param, owner in zip(territory.params, territory.owners, strict=True)
        if user_class(param) is not nn.Parameter
    }
    aliases = {key: Aliases(param, special[key]) for param in territory.params if (key := id(param)) in special}
    buffers = [
        FlatBuffer(
            territory.name,
            params,
            names,
            kind=kind,
            sharding=groups.sharding(kind.group),
            group=groups.group(kind.group),
            store=store,
            axes=groups.axes(names),
            home=home,
            params_home=params_home,
        )
        for kind, (params, names) in kinds.items()
    ]
    for buffer in buffers:
        found = {index: aliases.get(id(param)) for index, param in enumerate(buffer.params) if not buffer.kind.trained}
        buffer.aliases = {index: one for index, one in found.items() if one}
        if buffer.aliases:
            buffer.bind()
    return Unit(territory.name, index, module=territory.module, buffers=buffers, watched=list(special.values()))


def kind_of(
    param: nn.Parameter,
    compute: torch.dtype,
    *,
    precision: MixedPrecision,
    communication: Communication,
    shared: str | None = None,
    group: str | None = None,
) -> BufferKind:
    """Return the kind of flat buffer for a parameter that computes in ``compute``."""
    return BufferKind(
        original=param.dtype,
        compute=compute,
        master=precision.master_dtype(param.dtype, compute),
        reduce=communication.gradient_dtype(compute),
        trained=param.requires_grad,
        shared=shared,
        group=group,
    )


def _materialize(territory: Territory, root: nn.Module, device: torch.device, awaited: set[tuple[int, str]]) -> None:
    """Give a territory's meta parameters and buffers memory and values; move modules that quantise themselves."""
    fresh: set[int] = set()
    for position, param in enumerate(territory.params):
        if param.is_meta:
            territory.params[position] = _with_memory(param, root, device)
            fresh.add(id(territory.params[position]))
    for prefix, module in territory.modules:
        for other in module._parameters.values():  # those of an inner unit too: modules are initialised in one go
            if other is not None and other.is_meta and id(other) not in territory.remote:
                fresh.add(id(_with_memory(other, root, device)))
        meta_buffers = _allocate_buffers(module, device)
        new = [*meta_buffers, *(key for key, param in module._parameters.items() if id(param) in fresh)]
        if any((id(module), key) not in awaited for key in new):
            _initialize(module, prefix.rstrip(".") or ROOT)
    for param in territory.params:
        _move(param, device)


def make_buffers_real(module: nn.Module, name: str, device: torch.device) -> None:
    """Give a module's own meta buffers memory and values.

    Raises:
        ValueError: It has some, and no ``reset_parameters``.
    """
    if _allocate_buffers(module, device):
        _initialize(module, name or ROOT)


def _allocate_buffers(module: nn.Module, device: torch.device) -> list[str]:
    """Give a module's own meta buffers memory, and return their names."""
    found = {key: buffer for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
    for key, buffer in found.items():
        module._buffers[key] = torch.empty_like(buffer, device=device)
    return list(found)


def _move(param: nn.Parameter, device: torch.device) -> None:
    """Let a class that has a ``to`` of its own take a parameter to the device: it may quantise it there."""
    if type(param).to is torch.Tensor.to:
        return
    moved: torch.Tensor = param.to(device)
    if moved is not param:
        torch.utils.swap_tensors(param, moved)  # type: ignore[no-untyped-call]


def _with_memory(param: nn.Parameter, root: nn.Module, device: torch.device) -> nn.Parameter:
    """Return the parameter with memory: the same object where PyTorch can swap its content, else put in its place."""
    with torch._C.DisableTorchFunctionSubclass():
        values = torch.empty_like(param, device=device).as_subclass(torch.Tensor)
        real: nn.Parameter = torch.Tensor._make_subclass(type(param), values, param.requires_grad)
    copy_attributes(param, real)
    try:
        torch.utils.swap_tensors(param, real)  # type: ignore[no-untyped-call]
    except RuntimeError:  # somebody holds a weak reference, as recurrent layers do
        for module in root.modules():
            for key, value in list(module._parameters.items()):
                if value is param:
                    setattr(module, key, real)
        return real
    return param


def _initialize(module: nn.Module, name: str) -> None:
    for method in ("reset_parameters", "_reset_parameters"):
        initialize = getattr(module, method, None)
        if callable(initialize):
            with torch.no_grad():
                initialize()
            return
    raise ValueError(
        f"`{name}` ({type(module).__name__}) was built on the meta device and has no `reset_parameters` method, so its"
        " own parameters and buffers cannot be given values. Add the method, or build this module on a real device."
    )
