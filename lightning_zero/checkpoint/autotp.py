"""Which part of each parameter a tensor rank of DeepSpeed's AutoTP has: as the checkpoint says, or as a plan says.

Note [Sources]
    DeepSpeed 0.19.8 writes an affine map of every parameter into ``universal_checkpoint_info``: shapes, offsets and
    strides of the pieces that each tensor rank has. It is read. Earlier releases write nothing, or lists of name
    patterns (0.18.9 and later), in which fused matrices, embeddings and parameters that are whole are indistinguishable
    from matrices that are cut by rows. They are not read: parts would be put together in a wrong order, or copies one
    behind the other. Nor do equal parts show that a parameter is whole, because parts of a bias are zeros at first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import yaml

from lightning_zero.boxes import Box
from lightning_zero.checkpoint.joined import Layout, Piece, row_major
from lightning_zero.errors import nearest
from lightning_zero.option_checks import from_fields
from lightning_zero.parallel.tensor.plan import Cut, Packed, TensorPlan, matches

__all__ = ["CutRules", "recorded_layouts", "recorded_reasons"]

VERSION = 1  # of affine maps
WHOLE = "whole"
USE = "Use 'column', 'row', 'vocab', 'whole', {'packed': [...]} or {'cut': dim}."
DAMAGED = "The files are damaged, or not of one save."


# -- Affine maps -------------------------------------------------------------------------------------------------------


def recorded_layouts(info: Mapping[str, Any], folder: Path, num_ranks: int) -> dict[str, Layout]:
    """Return the layouts that affine maps describe, by parameter name.

    Args:
        info: ``universal_checkpoint_info`` of a model file.
        folder: The checkpoint, for errors.
        num_ranks: Number of tensor ranks.

    Raises:
        ValueError: A map is of a later version, or is not one of parts that cover a parameter.
    """
    maps = info.get("affine_map") or {}
    if maps.get("version", VERSION) != VERSION:
        raise ValueError(
            f"`{folder}` has affine maps of version {maps['version']}, and version {VERSION} can be read. Save it with"
            " an earlier DeepSpeed, or convert it with a later release of this package."
        )
    found = {}
    for pattern, entry in (maps.get("params") or {}).items():
        name = _name_of(pattern)
        layout = None if name is None else _decoded(entry, num_ranks)
        if layout is None or name is None or not layout.is_sound:
            raise ValueError(
                f"`{folder}`: the affine map of `{name or pattern}` does not describe parts of {num_ranks} tensor ranks"
                f" that cover the parameter and are unscaled. {DAMAGED}"
            )
        found[name] = layout
    return found


def recorded_reasons(info: Mapping[str, Any]) -> dict[str, str]:
    """Return DeepSpeed's reasons why it cannot describe parameters, by name."""
    reasons = info.get("autotp_unsupported_parameter_patterns") or {}
    return {_name_of(pattern) or pattern: str(reason) for pattern, reason in reasons.items()}


def _name_of(pattern: Any) -> str | None:
    """Return the name that ``^`` + ``re.escape(name)`` + ``$`` stands for."""
    name = re.sub(r"\\(.)", r"\1", str(pattern)[1:-1])
    return name if pattern == rf"^{re.escape(name)}$" else None


def _decoded(entry: Any, num_ranks: int) -> Layout | None:
    """Return the layout of an affine map; None for pieces that are not boxes, or are scaled."""
    try:
        shape = tuple(entry["logical_shape"])
        ranks = {int(rank): held for rank, held in entry["ranks"].items()}
        if ranks.keys() != set(range(num_ranks)):
            return None
        parts = tuple(tuple(ranks[rank]["shard_shape"]) for rank in range(num_ranks))
        pieces = [list(_pieces(ranks[rank]["pieces"], shape, parts[rank])) for rank in range(num_ranks)]
        layout = Layout(shape, parts, tuple(tuple(piece for piece, _ in own) for own in pieces))
        holders = {box: [rank for rank, _ in held] for box, held in layout.holders().items()}
        is_consistent = all(holders[piece.whole] == locations for own in pieces for piece, locations in own)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        return None
    return layout if is_consistent else None


def _pieces(entries: Any, shape: Sequence[int], part: Sequence[int]) -> Iterator[tuple[Piece, list[int]]]:
    """Yield the pieces of a rank that have elements, each with the ranks that have it.

    Raises:
        ValueError: One is no box, or is scaled.
    """
    for entry in entries:
        if entry.get("scale", 1.0) != 1.0:
            raise ValueError("scaled")
        if prod(entry["shape"]):
            (outer, strides), (inner, its_strides) = entry["source"], entry["dest"]
            whole = _box(entry["shape"], outer, strides, shape)
            yield Piece(whole, _box(entry["shape"], inner, its_strides, part)), sorted(entry["locations"])


def _box(sizes: Sequence[int], start: int, strides: Sequence[int], shape: Sequence[int]) -> Box:
    """Return the box that ``torch.as_strided`` would view in a contiguous tensor."""
    own = row_major(shape)
    if any(size > 1 and stride != mine for size, stride, mine in zip(sizes, strides, own, strict=True)):
        raise ValueError("not a box")
    offsets = []
    for stride in own:
        offsets.append(start // stride)
        start %= stride
    if start:
        raise ValueError("not a box")
    return Box(tuple(offsets), tuple(sizes))


# -- Plans of users ----------------------------------------------------------------------------------------------------


class CutRules:
    """A plan of a user: name patterns of modules and parameters, and how DeepSpeed has cut each.

    Args:
        plan: A ``TensorPlan``, a dict of its rules, or a YAML file with them. Its words are those of ``TensorPlan``,
            and ``"whole"`` for modules and parameters that every rank has all of.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError, TypeError: A rule is not known, or describes a computation in place of a cut.
    """

    def __init__(self, plan: TensorPlan | Mapping[str, Any] | str | Path) -> None:
        if isinstance(plan, str | Path):
            if not Path(plan).is_file():
                raise FileNotFoundError(f"There is no file of a plan at `{plan}`. Give a YAML file with `rules`.")
            plan = yaml.safe_load(Path(plan).read_text())
        if isinstance(plan, TensorPlan):
            plan = {"rules": plan.rules}
        if not isinstance(plan, Mapping):
            raise TypeError(f"The plan is a `{type(plan).__name__}`. Give name patterns and rules. {USE}")
        fields = dict(plan) if "rules" in plan else {"rules": plan}
        given = fields["rules"] if isinstance(fields["rules"], Mapping) else {}
        others = {pattern: rule for pattern, rule in given.items() if rule != WHOLE}
        checked: TensorPlan = from_fields(TensorPlan, {**fields, "rules": others if given else fields["rules"]})
        self.rules: dict[str, Any] = {**{pattern: WHOLE for pattern in given if pattern not in others}, **checked.rules}
        for pattern, rule in self.rules.items():
            if rule in ("attention", "experts"):
                raise ValueError(f"The plan has `{pattern}: {rule!r}`. Name the parameters of the module. {USE}")

    def require_names(self, names: Sequence[str]) -> None:
        """Refuse patterns that match no parameter, nor a module of one.

        Raises:
            ValueError: One does.
        """
        known = {owner for name in names for owner in _owners(name)}
        for pattern in self.rules:
            if not any(matches(pattern, name) for name in known):
                raise ValueError(
                    f"The plan names `{pattern}`, but no parameter of the checkpoint has a name like it, and no module."
                    f"{nearest(pattern, known)} `*` stands for one part of a name, as in 'layers.*.mlp.fc1'."
                )

    def layout(self, name: str, shapes: Sequence[torch.Size]) -> Layout | None:
        """Return the layout of a parameter, given the shapes of the ranks' parts; None if no rule is about it.

        Raises:
            ValueError: Two rules are, or the parts do not fit to the rule.
        """
        rule = self._rule(name)
        if rule is None:
            return None
        try:
            return _layout(rule, shapes)
        except ValueError as error:
            found = ", ".join(str(tuple(shape)) for shape in shapes)
            raise ValueError(f"The plan has {rule!r} for `{name}`, of which the ranks have {found}: {error}") from None

    def _rule(self, name: str) -> Any:
        """Return the rule of a parameter or of its module, or that it or a module around it is whole."""
        for depth, owner in enumerate(_owners(name)):
            found = {
                pattern: rule
                for pattern, rule in self.rules.items()
                if matches(pattern, owner) and (depth < 2 or rule == WHOLE)
            }
            if len({repr(rule) for rule in found.values()}) > 1:
                raise ValueError(f"The plan has two rules for `{name}`: {found}. Leave one of them.")
            if found:
                return next(iter(found.values()))
        return None


def _owners(name: str) -> Iterator[str]:
    """Yield a parameter's name, and those of the modules around it, innermost first."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _layout(rule: Any, shapes: Sequence[torch.Size]) -> Layout:
    if rule in (WHOLE, "partial") or (rule in ("row", "row_split") and len(shapes[0]) == 1):
        if len(set(shapes)) > 1:
            raise ValueError("they have different shapes, so no rank has all of it.")
        return Layout.copies(shapes[0], len(shapes))
    if isinstance(rule, Cut):
        return _cut(shapes, rule.dim, rule.sections)
    if isinstance(rule, Packed):
        return _cut(shapes, 0, rule.sections)
    return _cut(shapes, 1 if rule in ("row", "row_split") else 0, 1)


def _cut(shapes: Sequence[torch.Size], dim: int, sections: int | Sequence[int]) -> Layout:
    ndim = len(shapes[0])
    if not -ndim <= dim < ndim:
        raise ValueError(f"there is no dimension {dim}.")
    dim %= ndim
    if len({shape[:dim] + shape[dim + 1 :] for shape in shapes}) > 1:
        raise ValueError(f"they differ in another dimension than {dim}.")
    extents = [shape[dim] for shape in shapes]
    total = sum(extents)
    if sections == 1:
        widths = [extents]
    else:
        sizes = [total // sections] * sections if isinstance(sections, int) else list(sections)
        if sum(sizes) != total:
            raise ValueError(f"the sections {sizes} do not add up to {total}.")
        if len(set(extents)) > 1 or any(size % len(shapes) for size in sizes):
            raise ValueError(
                f"sections of {sizes} are not cut into equal parts over {len(shapes)} ranks, and only DeepSpeed knows"
                " their parts. Save the checkpoint with DeepSpeed 0.19.8 or later, which writes them down."
            )
        widths = [[size // len(shapes)] * len(shapes) for size in sizes]
    return Layout.cut([*shapes[0][:dim], total, *shapes[0][dim + 1 :]], dim, widths)
