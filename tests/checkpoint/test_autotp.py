from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zero.checkpoint.autotp import CutRules, recorded_layouts, recorded_reasons
from lightning_zero.checkpoint.joined import Layout
from lightning_zero.parallel.tensor.plan import Cut, Packed, TensorPlan

SHAPES = [torch.Size((3, 4)), torch.Size((3, 4))]


def test_the_maps_of_deepspeed_are_read() -> None:
    """The dictionaries are those that DeepSpeed 0.19.8 returned for these layouts (``checkpoint/affine.py``)."""
    bigcode = {  # segmented_map((6, 2), [(4, False), (2, True)], 0, 2, split_widths=[[2, 2]])
        "logical_shape": [6, 2],
        "ranks": {
            rank: {
                "shard_shape": [4, 2],
                "pieces": [
                    {"shape": [2, 2], "source": [4 * rank, [2, 1]], "dest": [0, [2, 1]], "locations": [rank]},
                    {"shape": [2, 2], "source": [8, [2, 1]], "dest": [4, [2, 1]], "locations": [0, 1]},
                ],
            }
            for rank in range(2)
        },
    }
    row = {  # contiguous_split_map((3, 5), [3, 2], 1)
        "logical_shape": [3, 5],
        "ranks": {
            0: {
                "shard_shape": [3, 3],
                "pieces": [{"shape": [3, 3], "source": [0, [5, 1]], "dest": [0, [3, 1]], "locations": [0]}],
            },
            1: {
                "shard_shape": [3, 2],
                "pieces": [{"shape": [3, 2], "source": [3, [5, 1]], "dest": [0, [2, 1]], "locations": [1]}],
            },
        },
    }
    params = {rf"^{re.escape(name)}$": entry for name, entry in {"h.0.attn-1": bigcode, "row.weight": row}.items()}
    found = recorded_layouts({"affine_map": {"version": 1, "params": params}}, Path("theirs"), 2)
    assert found["row.weight"] == Layout.cut((3, 5), 1, [[3, 2]])
    assert [len(held) for held in found["h.0.attn-1"].holders().values()] == [1, 2, 1]


def test_without_maps_nothing_is_known() -> None:
    assert recorded_layouts({}, Path("theirs"), 2) == {}
    lists = {"tp_replicated_parameter_patterns": ["^bias$"], "parameter_with_row_parallelism_patterns": ["^weight$"]}
    assert recorded_layouts(lists, Path("theirs"), 2) == {}
    assert recorded_reasons({"autotp_unsupported_parameter_patterns": {r"^a\.b$": "why"}}) == {"a.b": "why"}


def _map(**changes: Any) -> dict[str, Any]:
    piece = {"shape": [2, 2], "source": [0, [2, 1]], "dest": [0, [2, 1]], "locations": [0, 1], **changes}
    ranks = {rank: {"shard_shape": [2, 2], "pieces": [piece]} for rank in range(2)}
    return {"logical_shape": [2, 2], "ranks": ranks}


@pytest.mark.parametrize(
    "entry",
    [
        _map(scale=0.5),
        _map(source=[0, [1, 2]]),
        _map(dest=[0, [1, 2]]),
        _map(locations=[0]),
        _map(source=[1, [2, 1]]),
        _map(source=[-1, [2, 1]]),
        _map(source=None),
        {**_map(), "logical_shape": [4, 2]},
        {"logical_shape": [2, 2], "ranks": {0: _map()["ranks"][0]}},
        {"logical_shape": [2, 2]},
        None,
        [],
    ],
)
def test_maps_that_are_no_boxes_are_scaled_or_damaged_are_refused(entry: Any) -> None:
    info = {"affine_map": {"version": 1, "params": {"^weight$": entry}}}
    with pytest.raises(ValueError, match="the affine map of `weight` does not describe parts of 2 tensor ranks"):
        recorded_layouts(info, Path("theirs"), 2)


def test_a_pattern_of_several_names_is_refused() -> None:
    info = {"affine_map": {"version": 1, "params": {"^weight.*$": _map()}}}
    with pytest.raises(ValueError, match=re.escape("`^weight.*$`")):
        recorded_layouts(info, Path("theirs"), 2)


@pytest.mark.parametrize(
    ("rule", "layout"),
    [
        ("column", Layout.cut((6, 4), 0, [[3, 3]])),
        ("column_gather", Layout.cut((6, 4), 0, [[3, 3]])),
        ("vocab", Layout.cut((6, 4), 0, [[3, 3]])),
        ("row", Layout.cut((3, 8), 1, [[4, 4]])),
        ("row_split", Layout.cut((3, 8), 1, [[4, 4]])),
        ("whole", Layout.copies((3, 4), 2)),
        ("partial", Layout.copies((3, 4), 2)),
        ({"packed": 3}, Layout.cut((6, 4), 0, [[1, 1], [1, 1], [1, 1]])),
        (Packed([4, 2]), Layout.cut((6, 4), 0, [[2, 2], [1, 1]])),
        ({"cut": -1}, Layout.cut((3, 8), 1, [[4, 4]])),
        (Cut(1, [2, 6]), Layout.cut((3, 8), 1, [[1, 1], [3, 3]])),
    ],
    ids=repr,
)
def test_words_of_plans_say_how_a_weight_is_cut(rule: Any, layout: Layout) -> None:
    assert CutRules({"layers.*.linear": rule}).layout("layers.3.linear.weight", SHAPES) == layout


def test_the_bias_of_a_row_layer_is_whole_and_that_of_a_column_layer_is_cut() -> None:
    rules = CutRules(TensorPlan({"up": "column", "down": "row"}, divided={"attention": ["num_heads"]}))
    shapes = [torch.Size((3,)), torch.Size((2,))]
    assert rules.layout("up.bias", shapes) == Layout.cut((5,), 0, [[3, 2]])
    assert rules.layout("down.bias", [torch.Size((3,))] * 2) == Layout.copies((3,), 2)
    with pytest.raises(
        ValueError, match=r"'row' for `down.bias`, of which the ranks have \(3,\), \(2,\): they have diff"
    ):
        rules.layout("down.bias", shapes)


def test_a_rule_of_a_parameter_goes_before_that_of_its_module_and_only_whole_is_for_all_inside() -> None:
    rules = CutRules({"tower": "whole", "tower.proj": "column", "tower.proj.bias": "whole", "block": "column"})
    assert rules.layout("tower.deep.norm.weight", SHAPES) == Layout.copies((3, 4), 2)
    assert rules.layout("tower.proj.weight", SHAPES) == Layout.cut((6, 4), 0, [[3, 3]])
    assert rules.layout("tower.proj.bias", SHAPES) == Layout.copies((3, 4), 2)
    assert rules.layout("block.linear.weight", SHAPES) is None
    assert rules.layout("other.weight", SHAPES) is None


@pytest.mark.parametrize(
    ("plan", "error", "message"),
    [
        ({"x": "columns"}, ValueError, "Did you mean `column`"),
        ({"x": "attention"}, ValueError, "Name the parameters of the module. Use 'column'"),
        ({"x": 3}, TypeError, "`TensorPlan` has `x: 3`"),
        ({"rules": {"x": "row"}, "ruels": {}}, TypeError, "ruels"),
        ({"rules": 3}, TypeError, "must be a dict of name patterns"),
        (3, TypeError, "The plan is a `int`. Give name patterns and rules"),
        ("nowhere.yaml", FileNotFoundError, "There is no file of a plan at `nowhere.yaml`"),
    ],
)
def test_what_is_no_plan_is_refused(plan: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        CutRules(plan)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"x": {"packed": [4, 3]}}, r"the sections \[4, 3\] do not add up to 6"),
        ({"x": {"packed": [5, 1]}}, r"sections of \[5, 1\] are not cut into equal parts over 2 ranks"),
        ({"x": {"cut": 2}}, "there is no dimension 2"),
        ({"*": "row", "x": "column"}, "two rules for `x.weight`"),
    ],
)
def test_rules_that_do_not_fit_the_parts_are_refused(rules: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CutRules(rules).layout("x.weight", SHAPES)


def test_parts_that_differ_in_another_dimension_are_refused() -> None:
    with pytest.raises(ValueError, match="they differ in another dimension than 0"):
        CutRules({"x": "column"}).layout("x.weight", [torch.Size((3, 4)), torch.Size((3, 5))])
