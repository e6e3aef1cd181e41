from __future__ import annotations

from typing import Any

import pytest
import yaml

from lightning_zero.parallel.tensor.plan import Cut, CutArgument, Packed, TensorParallel, TensorPlan, matches


def test_a_star_stands_for_one_part_of_a_name() -> None:
    assert matches("layers.*.mlp", "layers.11.mlp")
    assert not matches("layers.*.mlp", "layers.1.0.mlp")
    assert not matches("layers.*", "layersx1")


def test_a_plan_can_be_written_in_yaml() -> None:
    text = """
    size: 4
    plan:
      rules: {h.*.c_attn: {packed: [64, 32, 32]}, h.*.c_proj: row, h.*.bias: {cut: 1}}
      divided: {h.*: num_heads}
      arguments: {h.*: {alibi: {dim: 0, heads: 8}, "2": {dim: 1, heads: 8}}}
    """
    options = TensorParallel.of(yaml.safe_load(text))
    assert options is not None
    assert options.plan == TensorPlan(
        {"h.*.c_attn": Packed([64, 32, 32]), "h.*.c_proj": "row", "h.*.bias": Cut(1)},
        divided={"h.*": ["num_heads"]},
        arguments={"h.*": {"alibi": CutArgument(0, 8), 2: CutArgument(1, 8)}},
    )
    assert TensorParallel(plan={"fc": "column"}).plan == TensorPlan({"fc": "column"})


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, None), (2, TensorParallel(size=2)), ({"size": 4, "check": "warn"}, TensorParallel(size=4, check="warn"))],
)
def test_the_option_is_a_number_a_dict_or_nothing(value: Any, expected: TensorParallel | None) -> None:
    assert TensorParallel.of(value) == expected


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"size": 0}, ValueError, r"`TensorParallel\(size=0\)` must be a number of ranks, 1 or more"),
        ({"size": 2.5}, TypeError, r"`TensorParallel\(size=2.5\)` is a `float`"),
        ({"plan": "best"}, ValueError, r"`TensorParallel\(plan='best'\)` is not known. Use 'auto', 'model', or"),
        ({"check": "no"}, ValueError, r"`TensorParallel\(check='no'\)` is not known. Use 'refuse' or 'warn'"),
        ({"plan": {"fc": "columns"}}, ValueError, r"`TensorPlan` has `fc: 'columns'`. Did you mean `column`"),
        ({"degree": 2}, TypeError, "`TensorParallel` has no option `degree`"),
    ],
)
def test_wrong_options_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TensorParallel(**arguments)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: TensorPlan({"fc": 3}), TypeError, r"`TensorPlan` has `fc: 3`. Use 'column', 'row'"),  # type: ignore[dict-item]
        (lambda: TensorPlan([]), TypeError, r"`TensorPlan\(rules=\[\]\)` must be a dict"),  # type: ignore[arg-type]
        (lambda: Packed(0), ValueError, r"`Packed\(sections=0\)` must be a number of equal sections"),
        (lambda: Cut(0, [4, -1]), ValueError, r"`Cut\(sections=\[4, -1\]\)` must be"),
        (lambda: TensorPlan({}, divided={"a": [1]}), TypeError, r"must be a list of names of integers"),  # type: ignore[list-item]
        (lambda: TensorPlan({}, arguments={"a": {0: 3}}), TypeError, r"must be a `CutArgument`"),  # type: ignore[dict-item]
    ],
)
def test_wrong_plans_are_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_a_plan_as_in_yaml_is_the_same_plan() -> None:
    rules: Any = {"q": "column", "qkv": Packed([4, 2, 2]), "gate": Packed(2), "up": Cut(-2), "both": Cut(1, [2, 6])}
    assert TensorParallel(plan=yaml.safe_load(yaml.safe_dump(TensorPlan(rules).as_yaml))).plan == TensorPlan(rules)
    plan = TensorPlan(
        rules,
        divided={"attn": ["heads"]},
        arguments={"": {"alibi": CutArgument(1, 8), 0: CutArgument(0, 4)}},
        sequence={"layers.*": {0: "scatter"}},
    )
    assert TensorParallel(plan=yaml.safe_load(yaml.safe_dump(plan.as_yaml))).plan == plan


def test_a_plan_within_a_block_and_under_a_name_are_inverse() -> None:
    plan = TensorPlan({"attn.q": "column"}, divided={"attn": ["heads"]}, arguments={"": {0: CutArgument(1, 8)}})
    assert plan.under("model.layers.*").within("model.layers.3") == plan
    assert plan.under("model.layers.0").within("model.layers.1") == TensorPlan({})
