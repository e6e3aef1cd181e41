from __future__ import annotations

import pytest

from lightning_zero.boxes import Box, Part
from lightning_zero.grid import Grid, GridPlaces, ParamAxes, check_places

SHAPES = {"weight": (4, 6), "bias": (4,)}
RANKS = (0, 1, 2, 3)


def _grid(**axes: ParamAxes) -> Grid:
    return Grid({"data": None}, 2, axes)


def test_a_part_in_its_whole_is_accepted() -> None:
    _grid(weight=ParamAxes("data", part=Part.along((8, 6), 0, (4, 4)))).check(SHAPES, RANKS)


@pytest.mark.parametrize(
    "part", [Part.along((8, 6), 0, (5, 4)), Part.along((8, 6), 0, (-1, 4)), Part((8, 6), (Box((4, 0), (4, 7)),))]
)
def test_a_part_outside_of_its_whole_is_refused(part: Part) -> None:
    with pytest.raises(ValueError, match="they do not lie in it, or do not fit together. Give the boxes that this"):
        _grid(weight=ParamAxes("data", part=part)).check(SHAPES, RANKS)


@pytest.mark.parametrize(
    "part", [Part.along((8,), 0, (4, 4)), Part.along((8, 5), 0, (4, 4)), Part.along((8, 6), 0, (0, 2), (4, 1))]
)
def test_a_part_of_another_shape_is_refused(part: Part) -> None:
    with pytest.raises(ValueError, match="which have the shape .* together. Give the boxes that this rank has, in the"):
        _grid(weight=ParamAxes("data", part=part)).check(SHAPES, RANKS)


def test_a_part_of_several_boxes_is_accepted() -> None:
    _grid(weight=ParamAxes("data", part=Part.along((8, 6), 0, (0, 2), (4, 2)))).check(SHAPES, RANKS)


def test_names_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="names the parameter `wait`, which the module does not have"):
        _grid(wait=ParamAxes("data")).check(SHAPES, RANKS)
    with pytest.raises(ValueError, match="over the group 'date', which it does not have. Use one of 'data'"):
        _grid(weight=ParamAxes("date")).check(SHAPES, RANKS)
    with pytest.raises(ValueError, match="`grid.data_ranks=0` must divide the 4 ranks"):
        Grid({}, 0).check(SHAPES, RANKS)


def test_facts_are_the_same_on_ranks_with_other_parts() -> None:
    one, other = (_grid(weight=ParamAxes("data", 0.5, Part.along((8, 6), 0, (row, 4)))) for row in (0, 4))
    assert one.facts() == other.facts()


def test_a_gradient_with_tokens_of_other_ranks_is_a_fact() -> None:
    assert ParamAxes("data", 0.5).fact == "cut over data, gradients times 0.5"
    assert ParamAxes("data", is_of_others=True).fact == "cut over data, gradients times 1.0, with tokens of other ranks"


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_factors_that_cannot_be_are_refused(factor: float) -> None:
    with pytest.raises(ValueError, match="Use 1, or 1 / T where T ranks have its whole gradient"):
        _grid(weight=ParamAxes("data", factor)).check(SHAPES, RANKS)


def test_a_list_of_ranks_is_no_group() -> None:
    grid = Grid({"data": [0, 1]}, 2)  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"`grid.groups\['data'\]` is a `list`, not a process group"):
        grid.check(SHAPES, RANKS)


def test_parameters_that_are_not_named_are_whole_on_ranks_with_the_same_data() -> None:
    assert _grid().axes("bias", 4).factor == 0.5


PAIRS = ((0, 2), (1, 3))  # the data ranks of two tensor ranks


Range = tuple[int, int]


def _places(*parts: tuple[Range, ...], groups: tuple[tuple[int, ...], ...] = PAIRS) -> dict[int, GridPlaces]:
    """Return the places of a parameter of 8 elements, given starts and lengths for each group."""
    found = {}
    for ranks, ranges in zip(groups, parts, strict=True):
        for rank in ranks:
            boxes = tuple(Box((start,), (length,)) for start, length in ranges)
            found[rank] = GridPlaces({"data": ranks}, {"weight": (ranks, (8,), boxes)})
    return dict(sorted(found.items()))


def test_parts_that_tile_a_parameter_are_accepted() -> None:
    check_places(_places(((0, 4),), ((4, 4),)))
    check_places(_places(((0, 8),), groups=((0, 1, 2, 3),)))
    check_places(_places(((0, 2), (4, 2)), ((2, 2), (6, 2))))


@pytest.mark.parametrize(
    "parts",
    [
        (((0, 8),), ((0, 8),)),
        (((0, 4),), ((0, 4),)),
        (((0, 4),), ((3, 4),)),
        (((0, 4),), ((4, 3),)),
        (((0, 2), (4, 2)), ((2, 2), (5, 2))),
        (((0, 2), (0, 2)), ((2, 2), (6, 2))),
        (((0, 2), (4, 2)), ((0, 2), (4, 2))),
    ],
)
def test_parts_that_do_not_tile_a_parameter_are_refused(parts: tuple[tuple[Range, ...], ...]) -> None:
    """A parameter that two groups had whole was counted twice, and drifted apart, in silence."""
    with pytest.raises(ValueError, match="are no division of a parameter of shape"):
        check_places(_places(*parts))


def test_groups_that_ranks_know_differently_are_refused() -> None:
    """They waited for one another until the timeout."""
    places = _places(((0, 4),), ((4, 4),))
    places[0] = GridPlaces({"data": (0, 1)}, places[0].params)
    with pytest.raises(ValueError, match="is not the same group on its ranks"):
        check_places(places)
    places[0] = GridPlaces({"data": (0,)}, places[0].params)
    with pytest.raises(ValueError, match="has other sizes on other ranks"):
        check_places(places)
