from __future__ import annotations

import pytest

from lightning_zero.engine.buffers.grid import Box, Grid, ParamAxes

SHAPES = {"weight": (4, 6), "bias": (4,)}


def _grid(**axes: ParamAxes) -> Grid:
    return Grid({"data": None}, 2, axes)


def test_a_part_in_its_whole_is_accepted() -> None:
    _grid(weight=ParamAxes("data", box=Box((8, 6), (4, 0)))).check(SHAPES)


@pytest.mark.parametrize("box", [Box((8, 6), (5, 0)), Box((8, 6), (-1, 0)), Box((8,), (4,)), Box((8, 5), (0, 0))])
def test_a_part_outside_of_its_whole_is_refused(box: Box) -> None:
    with pytest.raises(ValueError, match="it does not lie in it. Give the box that this rank has"):
        _grid(weight=ParamAxes("data", box=box)).check(SHAPES)


def test_names_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="names the parameter `wait`, which the module does not have"):
        _grid(wait=ParamAxes("data")).check(SHAPES)
    with pytest.raises(ValueError, match="over the group 'date', which it does not have. Use one of 'data'"):
        _grid(weight=ParamAxes("date")).check(SHAPES)
    with pytest.raises(ValueError, match="`grid.data_ranks=0` must be at least 1"):
        Grid({}, 0).check(SHAPES)


def test_facts_are_the_same_on_ranks_with_other_parts() -> None:
    one, other = (_grid(weight=ParamAxes("data", 0.5, Box((8, 6), (row, 0)))) for row in (0, 4))
    assert one.facts() == other.facts()
