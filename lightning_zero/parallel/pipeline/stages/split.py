"""The cut of a module into chunks of a pipeline. Names and numbers only; nothing is moved.

A list of blocks (a ``ModuleList`` or ``Sequential``) is cut. Modules that the source of ``forward`` uses in front of it
belong to the first chunk, those that it uses behind it to the last; where it does not tell, the order of registration
does. Parameters that no module of these holds, but a module around the list, may be
used anywhere: every stage has them. A parameter under names in several chunks is on each of their stages.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_zero.config import Pipeline
from lightning_zero.errors import nearest

__all__ = ["PlacedModule", "Split", "balanced_bounds", "costed_layers", "modules_around", "split_module"]

_LISTS = (nn.ModuleList, nn.Sequential)


@dataclass(frozen=True)
class PlacedModule:
    """A module that runs on one chunk alone, and the chunk.

    Attributes:
        name: Fully qualified name.
        chunk: The chunk.
        block: Position in the list that is cut; None for a module in front of it or behind it.
    """

    name: str
    chunk: int
    block: int | None


@dataclass(frozen=True)
class Split:
    """The cut of a module: its blocks, and the chunk of every part.

    Attributes:
        blocks: Name of the list.
        bounds: First block of every chunk, and the number of blocks.
        places: The modules that run on one chunk alone.
        stages: Ranks; chunk c lies on rank ``c % stages``.
        costs: The cost that was evened out, per chunk.
        holders: Name of every parameter (the first one) -> the ranks that hold it.
    """

    blocks: str
    bounds: tuple[int, ...]
    places: tuple[PlacedModule, ...]
    stages: int
    costs: tuple[int, ...]
    holders: dict[str, tuple[int, ...]]

    @property
    def num_chunks(self) -> int:
        """Chunks of the whole model."""
        return len(self.bounds) - 1

    def chunk_of(self, name: str) -> int:
        """Return the chunk of a module that lies in one, by its fully qualified name."""
        return next(place.chunk for place in self.places if f"{name}.".startswith(f"{place.name}."))

    def summary(self) -> str:
        """Return one line with the blocks of every stage."""
        parts = [
            f"{chunk % self.stages}: {start}-{stop - 1}"
            for chunk, (start, stop) in enumerate(zip(self.bounds, self.bounds[1:], strict=False))
        ]
        return f"pipeline stages (blocks of `{self.blocks}`): {', '.join(parts)}"


def costed_layers(module: nn.Module, pipeline: Pipeline) -> list[str]:
    """Return the names of the blocks, and of the modules around them.

    Raises:
        ValueError: A name matches nothing, or there is nothing to cut.
    """
    name, blocks = _find_list(module, pipeline.module)
    first, last = _around(module, name, pipeline)
    return [*first, *blocks, *last]


def split_module(module: nn.Module, pipeline: Pipeline, costs: Mapping[str, int] | None = None) -> Split:
    """Assign blocks, and the modules around them, to chunks.

    Args:
        module: The root.
        pipeline: The options.
        costs: Of ``costed_layers``, where the partition is by measured ones.

    Raises:
        ValueError: A name matches nothing, there is nothing to cut, there are more chunks than blocks, or a module
            around the blocks is compiled.
    """
    name, blocks = _find_list(module, pipeline.module)
    _check_blocks(name, blocks, pipeline)
    _refuse_compiled(module, name)
    first, last = _around(module, name, pipeline)
    if costs is not None:
        sizes = [costs[block] for block in blocks]
        ends = (sum(costs[one] for one in first), sum(costs[one] for one in last))
    else:
        sizes = _costs(list(blocks.values()), pipeline.partition)
        counted = (first, last) if pipeline.partition == "parameters" else ([], [])
        ends = (_numel(module, counted[0]), _numel(module, counted[1]))
    chunks = pipeline.num_chunks
    if isinstance(pipeline.partition, str):
        bounds = balanced_bounds(sizes, chunks, *ends)
    else:
        bounds = _given_bounds(list(blocks), name, pipeline.partition)
    places = [PlacedModule(one, 0, None) for one in first]
    for chunk, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        places += [PlacedModule(one, chunk, start + index) for index, one in enumerate(list(blocks)[start:stop])]
    places += [PlacedModule(one, chunks - 1, None) for one in last]
    sums = [sum(sizes[start:stop]) for start, stop in zip(bounds, bounds[1:], strict=False)]
    sums[0], sums[-1] = sums[0] + ends[0], sums[-1] + ends[1]
    return Split(name, bounds, tuple(places), pipeline.stages, tuple(sums), _holders(module, places, pipeline))


def modules_around(module: nn.Module, split: Split) -> Iterator[nn.Module]:
    """Yield the root and the modules that lie in none of the split's, which every stage runs."""
    inside = {id(child) for place in split.places for child in module.get_submodule(place.name).modules()}
    return (child for child in module.modules() if id(child) not in inside)


# -- The list ----------------------------------------------------------------------------------------------------------


def _find_list(module: nn.Module, wanted: str | None) -> tuple[str, dict[str, nn.Module]]:
    """Return the name of the list that is cut, and its children under their full names."""
    modules = dict(module.named_modules())
    if wanted is not None and wanted not in modules:
        raise ValueError(f"`Pipeline(module={wanted!r})` is no module of `{type(module).__name__}`."
                         f"{nearest(wanted, modules)}")  # fmt: skip
    inside = {key: child for key, child in modules.items() if wanted in (None, "", key) or key.startswith(f"{wanted}.")}
    lists = {key: child for key, child in inside.items() if isinstance(child, _LISTS) and len(child) > 1}
    if wanted in lists:
        lists = {wanted: lists[wanted]}
    if not lists:
        raise ValueError(
            f"`{wanted or type(module).__name__}` has no `ModuleList` or `Sequential` of two or more modules, so a"
            " pipeline cannot cut it. Put the blocks into one and walk it in order in `forward`."
        )
    name = max(_without_teachers(lists), key=lambda key: _spreadable(lists[key]))
    return name, {f"{name}.{key}" if name else key: child for key, child in _children(lists[name])}


def _children(blocks: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(key, child) for key, child in blocks._modules.items() if child is not None]


def _spreadable(blocks: nn.Module) -> int:
    """Return how many parameters can be taken away from the stage with the largest block."""
    sizes = [sum(param.numel() for param in child.parameters()) for child in blocks.children()]
    return sum(sizes) - max(sizes)


def _without_teachers(lists: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Leave out frozen lists where a list that is trained has at least half as many parameters to spread.

    Such a list is the copy of a model, whose blocks the step calls beside it. A frozen model with a small trained head
    is left in.
    """
    trained = {key for key, one in lists.items() if any(param.requires_grad for param in one.parameters())}
    most = max((_spreadable(lists[key]) for key in trained), default=0)
    return {key: one for key, one in lists.items() if key in trained or _spreadable(one) > 2 * most} or dict(lists)


def _check_blocks(name: str, blocks: dict[str, nn.Module], pipeline: Pipeline) -> None:
    if len(blocks) != len({id(block) for block in blocks.values()}):
        raise ValueError(f"`{name}` holds a module twice; a pipeline cannot cut a list whose blocks are shared.")
    if pipeline.num_chunks > len(blocks):
        raise ValueError(
            f"`pipeline={pipeline.stages}` with {pipeline.num_chunks // pipeline.stages} chunk(s) a stage needs"
            f" {pipeline.num_chunks} blocks, and `{name}` has {len(blocks)}. Use fewer stages or chunks."
        )


def _refuse_compiled(module: nn.Module, name: str) -> None:
    """Raise where the code that calls the blocks is compiled: their calls are no longer calls of modules there."""
    for around in ("", *_prefixes(f"{name}.")) if name else ("",):
        owner = module.get_submodule(around)
        methods = [getattr(owner, key, None) for key in ("forward", "training_step", "validation_step", "predict_step")]
        if _is_compiled(owner) or any(hasattr(one, "_torchdynamo_orig_callable") for one in methods):
            what = f"`{around.replace('._orig_mod', '')}`" if around else f"`{type(module).__name__}`"
            raise ValueError(
                f"{what} is compiled (`torch.compile`) together with the blocks that a pipeline cuts, and its stages"
                " have to see the calls of the blocks. Compile these instead, before the fit:"
                f" `for block in model.{name.replace('_orig_mod.', '')}: block.compile()`."
            )


def _is_compiled(module: nn.Module) -> bool:
    """Say whether ``torch.compile(module)`` or ``module.compile()`` was called."""
    is_wrapper = "_orig_mod" in module._modules and hasattr(module, "dynamo_ctx")
    return is_wrapper or module._compiled_call_impl is not None or vars(module).get("_compiler_ctx") is not None


def _around(module: nn.Module, name: str, pipeline: Pipeline) -> tuple[list[str], list[str]]:
    """Return the modules with parameters that are used in front of the list, and behind it."""
    order: dict[str, list[str]] = {"first": [], "last": []}
    current, prefix = module, ""
    for step in name.split(".") if name else []:
        side, told = "first", _sides_in_forward(type(current), step)
        for key, child in current.named_children():
            if key == step:
                side = "last"
            elif next(child.parameters(), None) is not None:
                order[told.get(key, side)] += _called(f"{prefix}{key}", child)
        current, prefix = current.get_submodule(step), f"{prefix}{step}."
    names = _drop_other_names(module, name, order)
    moved = {"first": pipeline.first or [], "last": pipeline.last or []}
    for side, wanted in moved.items():
        for one in (names.get(one, one) for one in wanted):
            found = [each for each in order["first"] + order["last"] if each == one or each.startswith(f"{one}.")]
            if not found:
                raise ValueError(
                    f"`Pipeline({side}=[{one!r}])` is no module around `{name}` with parameters."
                    f"{nearest(one, order['first'] + order['last'])}"
                )
            for listed in order.values():
                listed[:] = [each for each in listed if each not in found]
            order[side] += found
    return order["first"], order["last"]


def _drop_other_names(module: nn.Module, blocks: str, order: Mapping[str, list[str]]) -> dict[str, str]:
    """Drop second names of the list, of its blocks and of modules around it: the innermost name stays.

    Returns:
        The names that stay, by those that are dropped.

    Raises:
        ValueError: A module around the list contains it.
    """
    found = module.get_submodule(blocks)
    own = {id(one) for one in (found, *found.children())}
    users = Counter(id(child) for block in set(found.children()) for child in block.modules())
    inside = own | {child for child, number in users.items() if number == 1}  # others are shared by blocks
    kept: dict[int, str] = {}
    for one in (*order["first"], *order["last"]):
        child = module.get_submodule(one)
        if id(child) not in inside and any(id(each) in own for each in child.modules()):
            raise ValueError(
                f"`{one}` contains the blocks of `{blocks}` under a second name. Keep one of the two out of the module"
                f" (`self.__dict__[...] = ...`, a property). If `{one}` is the model around them, assign it first."
            )
        if one.count(".") > kept.get(id(child), "").count(".") or id(child) not in kept:
            kept[id(child)] = one
    everyone = {one: kept[id(module.get_submodule(one))] for names in order.values() for one in names}
    for names in order.values():
        names[:] = [one for one in names if one in kept.values() and id(module.get_submodule(one)) not in inside]
    return {one: other for one, other in everyone.items() if one != other}


def _called(name: str, module: nn.Module) -> list[str]:
    """Return the names of the modules that forwards call: of a ``ModuleList`` or ``ModuleDict`` its children."""
    if type(module).forward is not nn.Module.forward or next(module.parameters(recurse=False), None) is not None:
        return [name]
    children = [(key, child) for key, child in module.named_children() if next(child.parameters(), None) is not None]
    return [one for key, child in children for one in _called(f"{name}.{key}", child)]


def _sides_in_forward(cls: type[nn.Module], step: str) -> dict[str, str]:
    """Return on which side of ``self.<step>`` the source of ``forward`` uses attributes, where it tells."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls.forward)))
    except (OSError, TypeError, SyntaxError):  # there is no source, or not of a function alone
        return {}
    lines: dict[str, list[int]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            lines.setdefault(node.attr, []).append(node.lineno)
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For)]
    ends = [loop.end_lineno or 0 for loop in loops for line in lines.get(step, ()) if line == loop.iter.lineno]
    here = lines.pop(step, [])
    if not here:
        return {}
    sides = {key: "first" for key, found in lines.items() if max(found) < min(here)}
    return sides | {key: "last" for key, found in lines.items() if min(found) > max(here + ends)}


# -- Where it is cut ---------------------------------------------------------------------------------------------------


def _costs(blocks: Sequence[nn.Module], partition: str | Sequence[str | int]) -> list[int]:
    if partition == "uniform":
        return [1] * len(blocks)
    if isinstance(partition, str) and partition.startswith("type:"):
        pattern = re.compile(partition.removeprefix("type:"), re.IGNORECASE)
        costs = [int(pattern.search(type(block).__name__) is not None) for block in blocks]
        if not any(costs):
            classes = ", ".join(sorted({type(block).__name__ for block in blocks}))
            raise ValueError(f"`partition={partition!r}` matches no class of the blocks. They are: {classes}.")
        return costs
    return [sum(param.numel() for param in block.parameters()) for block in blocks]


def _numel(module: nn.Module, names: Iterable[str]) -> int:
    return sum(param.numel() for name in names for param in module.get_submodule(name).parameters())


def balanced_bounds(costs: Sequence[int], chunks: int, first: int = 0, last: int = 0) -> tuple[int, ...]:
    """Cut a list so that the largest chunk is as small as can be; every chunk has a block.

    Args:
        costs: Cost of every block.
        chunks: Number of chunks.
        first: Additional cost of the first chunk.
        last: Additional cost of the last chunk.
    """
    number = len(costs)
    total = [0]
    for cost in costs:
        total.append(total[-1] + cost)
    best: list[dict[int, tuple[float, float, int]]] = [{0: (0.0, 0.0, 0)}]  # stop -> (largest, sum of squares, start)
    for chunk in range(chunks):
        extra = (first if chunk == 0 else 0) + (last if chunk == chunks - 1 else 0)
        stops = [number] if chunk == chunks - 1 else range(chunk + 1, number - (chunks - chunk - 1) + 1)
        best.append({
            stop: min(
                (max(largest, size := total[stop] - total[start] + extra), squares + float(size) ** 2, start)
                for start, (largest, squares, _) in best[chunk].items()
                if start < stop
            )
            for stop in stops
        })  # fmt: skip
    bounds = [number]
    for chunk in range(chunks, 0, -1):
        bounds.append(best[chunk][bounds[-1]][2])
    return tuple(reversed(bounds))


def _given_bounds(blocks: Sequence[str], name: str, points: Sequence[str | int]) -> tuple[int, ...]:
    positions = []
    for point in points:
        full = point if isinstance(point, str) and point in blocks else f"{name}.{point}"
        if full not in blocks:
            raise ValueError(f"`partition` names {point!r}, which is no block of `{name}`.{nearest(full, blocks)}")
        positions.append(blocks.index(full))
    if positions != sorted(set(positions)) or positions[0] == 0:
        raise ValueError(
            f"`partition={list(points)!r}` must name the first blocks of the second and further chunks in rising order."
        )
    return (0, *positions, len(blocks))


# -- Parameters --------------------------------------------------------------------------------------------------------


def _holders(module: nn.Module, places: Sequence[PlacedModule], pipeline: Pipeline) -> dict[str, tuple[int, ...]]:
    chunk_of = {place.name: place.chunk for place in places}
    of_module = {id(child): place.chunk for place in places for child in module.get_submodule(place.name).modules()}
    everyone = set(range(pipeline.stages))
    names: dict[int, str] = {}
    ranks: dict[str, set[int]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(param), name)
        chunk = next((chunk_of[prefix] for prefix in _prefixes(name) if prefix in chunk_of), None)
        if chunk is None:  # by another name of a module
            owners = (id(module.get_submodule(prefix)) for prefix in _prefixes(name))
            chunk = next((of_module[owner] for owner in owners if owner in of_module), None)
        ranks.setdefault(first, set()).update(everyone if chunk is None else {chunk % pipeline.stages})
    for name in pipeline.shared or []:
        known = {name: first for name, param in module.named_parameters(remove_duplicate=False)
                 for first in [names[id(param)]]}  # fmt: skip
        if name not in known:
            raise ValueError(f"`Pipeline(shared=[{name!r}])` is no parameter.{nearest(name, known)}")
        ranks[known[name]] |= everyone
    return {name: tuple(sorted(held)) for name, held in ranks.items()}


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    for length in range(1, len(parts)):
        yield ".".join(parts[:length])
