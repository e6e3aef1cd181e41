from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_zero.__main__ import main
from lightning_zero.checkpoint import directory
from lightning_zero.checkpoint.autotp import CutRules
from lightning_zero.checkpoint.convert import convert, read_foreign
from lightning_zero.checkpoint.planner import Segment
from lightning_zero.checkpoint.stored import fill
from tests import worlds
from tests.checkpoint import deepspeed_files, programs
from tests.checkpoint.test_convert import load
from tests.checkpoint.test_deepspeed import same, trained
from tests.sampling import sample

# By number of tensor ranks: cuts as AutoTP makes them. `frozen` is packed of two sections; 13 words are cut unevenly,
# as are 6 features over 4 ranks, of which the last ones then have none.
CUTS: dict[int, deepspeed_files.Cuts] = {
    2: {
        "embedding.weight": (0, [[7, 6]]),
        "head.bias": (0, [[7, 6]]),
        "blocks.0.linear.weight": (0, [[3, 3]]),
        "blocks.0.linear.bias": (0, [[3, 3]]),
        "blocks.1.linear.weight": (1, [[3, 3]]),
        "frozen.weight": (0, [[1, 1], [2, 2]]),
        "frozen.bias": (0, [[1, 1], [2, 2]]),
        "conv.weight": (2, [[1, 1]]),
    },
    3: {
        "embedding.weight": (1, [[2, 2, 2]]),
        "blocks.0.linear.weight": (0, [[2, 2, 2]]),
        "blocks.0.linear.bias": (0, [[2, 2, 2]]),
        "blocks.1.linear.weight": (1, [[2, 2, 2]]),
        "frozen.weight": (0, [[1, 1, 1], [1, 1, 1]]),
        "frozen.bias": (0, [[1, 1, 1], [1, 1, 1]]),
        "conv.weight": (0, [[1, 1, 1]]),
        "unused": (0, [[3, 2, 2]]),
    },
    4: {
        "embedding.weight": (0, [[4, 3, 3, 3]]),
        "head.bias": (0, [[4, 3, 3, 3]]),
        "blocks.0.linear.weight": (0, [[3, 3, 0, 0]]),
        "blocks.0.linear.bias": (0, [[3, 3, 0, 0]]),
        "blocks.1.linear.weight": (1, [[3, 3, 0, 0]]),
        "frozen.weight": (0, [[2, 1, 0, 0], [1, 1, 1, 0]]),
        "frozen.bias": (0, [[2, 1, 0, 0], [1, 1, 1, 0]]),
    },
}

# What a user writes for the cuts of 2 ranks, if the checkpoint says nothing.
RULES: dict[str, Any] = {
    "embedding": "vocab",
    "head.bias": {"cut": 0},
    "blocks.0.linear": "column",
    "blocks.1.linear": "row",
    "frozen": {"packed": [2, 4]},
    "conv.weight": {"cut": -2},
    "conv.bias": "whole",
    "blocks.*.norm": "whole",
    "batch_norm": "whole",
    "scale": "whole",
    "nothing": "partial",
    "unused": "whole",
}


def write(folder: Path, stage: int, world: int, size: int, info: Any = True) -> tuple[Any, Any]:
    """Write a checkpoint of ``size`` tensor ranks times ``world`` data ranks; return the whole model and optimizer."""
    model, optimizer = trained()
    cuts = CUTS[size]
    info = deepspeed_files.affine_info(model, cuts) if info is True else info
    client = {} if info is None else {"universal_checkpoint_info": info}
    deepspeed_files.write_parts(folder, model, optimizer, stage, world=world, cuts=cuts, client={**client, "mine": 5})
    return model, optimizer


def assert_whole(content: dict[str, Any], model: Any, optimizer: Any) -> None:
    """Compare every value with the whole model and optimizer that were cut, to the bit."""
    expected = model.state_dict()
    assert list(content["state_dict"]) == list(expected)
    for name, value in expected.items():
        if name == "_extra_state":
            assert content["state_dict"][name] == value
        else:
            frozen = name.startswith("frozen.")
            assert same(content["state_dict"][name], value.bfloat16() if frozen else value), name
    (state,) = content["optimizer_states"]
    names = {id(param): name for name, param in model.named_parameters()}
    assert state["state"].keys() == {names[id(param)] for param in optimizer.state}
    for param, slots in optimizer.state.items():
        found = state["state"][names[id(param)]]
        assert same(found["step"], torch.tensor(7.0))
        assert same(found["exp_avg"], slots["exp_avg"]), names[id(param)]
        assert same(found["exp_avg_sq"], slots["exp_avg_sq"])
    assert [group["params"] for group in state["param_groups"]] == [
        [names[id(param)] for param in group["params"]] for group in optimizer.param_groups
    ]
    assert [group["lr"] for group in state["param_groups"]] == [1e-2, 2e-3]


@pytest.mark.parametrize("size", [2, 3, 4], ids="tensor{}".format)
@pytest.mark.parametrize("world", sample([1, 2, 3], 1, 3), ids="data{}".format)
@pytest.mark.parametrize("stage", [1, 2, 3], ids="stage{}".format)
def test_parts_are_joined_as_the_checkpoint_says(stage: int, world: int, size: int, tmp_path: Path) -> None:
    model, optimizer = write(tmp_path, stage, world, size)
    content = read_foreign(tmp_path)
    assert_whole(content, model, optimizer)
    assert content["state_dict"]["head.weight"] is content["state_dict"]["embedding.weight"]
    assert content["mine"] == 5
    assert content.keys().isdisjoint({"universal_checkpoint_info", "checkpoint_parallel_dimensions"})


@pytest.mark.parametrize("info", [None, "lists"])
@pytest.mark.parametrize("stage", [1, 2, 3], ids="stage{}".format)
def test_parts_are_joined_as_a_plan_says(stage: int, info: Any, tmp_path: Path) -> None:
    """Lists of name patterns, which earlier releases write, are not relied on."""
    if info == "lists":
        info = deepspeed_files.affine_info(trained()[0], CUTS[2])
        del info["affine_map"]
    model, optimizer = write(tmp_path, stage, 2, 2, info)
    assert_whole(read_foreign(tmp_path, CutRules(RULES)), model, optimizer)


def test_a_range_is_read_from_the_parts_that_hold_it(tmp_path: Path) -> None:
    model, _ = write(tmp_path, 3, 2, 2)
    content = read_foreign(tmp_path)
    for name in ("embedding.weight", "blocks.1.linear.weight", "conv.weight"):
        expected = model.get_parameter(name).detach().reshape(-1)
        for start, stop in ((0, 5), (7, expected.numel()), (3, 13)):
            local = torch.full((stop - start,), float("nan"))
            fill([(content["state_dict"][name], Segment(local, start, content["state_dict"][name].shape))])
            assert torch.equal(local, expected[start:stop]), (name, start, stop)


@pytest.mark.parametrize("given", ["recorded", "file", "dict"])
def test_the_command_writes_a_directory_of_whole_tensors(given: str, tmp_path: Path) -> None:
    model, optimizer = write(tmp_path / "theirs", 2, 2, 2, True if given == "recorded" else None)
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({"rules": RULES}))
    plan = {"recorded": [], "file": [str(tmp_path / "plan.yaml")], "dict": [str({"rules": RULES})]}[given]
    options = [f"--tensor_plan={one}" for one in plan]
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours"), *options]) == 0
    content = directory.load(None, tmp_path / "ours")
    assert_whole(content, model, optimizer)


# -- What is refused ---------------------------------------------------------------------------------------------------


def _edit(path: Path, change: Callable[[Any], None]) -> None:
    """Change the content of a file."""
    with deepspeed_files.deepspeed_classes():
        content = torch.load(path, weights_only=False)
        change(content)
        torch.save(content, path)


def _model(folder: Path, rank: int) -> Path:
    return folder / f"mp_rank_{rank:02d}_model_states.pt"


def _optimizer(folder: Path, data_rank: int, rank: int) -> Path:
    return folder / f"bf16_zero_pp_rank_{data_rank}_mp_rank_{rank:02d}_optim_states.pt"


def _without_a_rank(folder: Path) -> None:
    for path in folder.glob("*mp_rank_00*"):
        path.unlink()


def _without_the_last_rank(folder: Path) -> None:
    for path in folder.glob("*mp_rank_02*"):
        path.unlink()


def _without_a_model_file(folder: Path) -> None:
    _model(folder, 2).unlink()


def _without_a_data_rank(folder: Path) -> None:
    _optimizer(folder, 0, 1).unlink()


def _without_the_last_data_rank(folder: Path) -> None:
    _optimizer(folder, 1, 2).unlink()


def _exchanged(one: Path, other: Path) -> None:
    shutil.move(one, one.with_suffix(".tmp"))
    shutil.move(other, one)
    shutil.move(one.with_suffix(".tmp"), other)


def _exchanged_tensor_ranks(folder: Path) -> None:
    _exchanged(_model(folder, 1), _model(folder, 2))
    for data_rank in range(2):
        _exchanged(_optimizer(folder, data_rank, 1), _optimizer(folder, data_rank, 2))


def _exchanged_data_ranks(folder: Path) -> None:
    _exchanged(_optimizer(folder, 0, 1), _optimizer(folder, 1, 1))


def _other_size(folder: Path) -> None:
    _edit(_model(folder, 1), lambda content: content.update(mp_world_size=4))


def _other_maps(folder: Path) -> None:
    maps = deepspeed_files.affine_info(trained()[0], CUTS[2])
    for rank in range(3):
        _edit(_model(folder, rank), lambda content: content.update(universal_checkpoint_info=maps))


def _maps_of_another_save(folder: Path) -> None:
    maps = deepspeed_files.affine_info(trained()[0], CUTS[3])
    del maps["affine_map"]["params"]["^scale$"]
    _edit(_model(folder, 1), lambda content: content.update(universal_checkpoint_info=maps))


def _edit_maps(folder: Path, change: Callable[[Any], None]) -> None:
    def edit(content: Any) -> None:
        content["universal_checkpoint_info"] = copy.deepcopy(content["universal_checkpoint_info"])
        change(content["universal_checkpoint_info"]["affine_map"])

    for rank in range(3):
        _edit(_model(folder, rank), edit)


def _later_maps(folder: Path) -> None:
    _edit_maps(folder, lambda maps: maps.update(version=2))


def _scaled(folder: Path) -> None:
    _edit_maps(folder, lambda maps: maps["params"]["^scale$"]["ranks"][0]["pieces"][0].update(scale=0.5))


def _with_a_gap(folder: Path) -> None:
    _edit_maps(folder, lambda maps: maps["params"][r"^unused$"]["ranks"][1]["pieces"][0].update(source=[4, [1]]))


def _without_a_map(folder: Path) -> None:
    def change(maps: Any) -> None:
        del maps["params"][r"^blocks\.0\.linear\.bias$"], maps["params"][r"^unused$"]

    _edit_maps(folder, change)


def _unsupported(folder: Path) -> None:
    def edit(content: Any) -> None:
        info = content["universal_checkpoint_info"] = copy.deepcopy(content["universal_checkpoint_info"])
        del info["affine_map"]["params"][r"^frozen\.weight$"]
        info["autotp_unsupported_parameter_patterns"] = {r"^frozen\.weight$": "its layout interleaves blocks"}

    for rank in range(3):
        _edit(_model(folder, rank), edit)


def _wrong_shape(folder: Path) -> None:
    """Rank 1 has a row less of one parameter, and one more of another: its group has as many elements."""

    def edit(content: Any) -> None:
        shapes = content["param_shapes"][0]
        assert tuple(shapes["embedding.weight"]) == (13, 2)
        shapes["embedding.weight"], shapes["blocks.0.linear.weight"] = torch.Size([10, 2]), torch.Size([3, 6])

    _edit(_model(folder, 1), edit)


def _drifted(folder: Path, entry: str, slot: str | None = None) -> None:
    def edit(content: Any) -> None:
        state = content["optimizer_state_dict"]
        groups = state[entry] if slot is None else [state[entry]["state"][number][slot] for number in range(2)]
        groups[1][0] += 1e-7  # of `scale`, the first one without two dimensions

    _edit(_optimizer(folder, 0, 2), edit)


def _drifted_value(folder: Path) -> None:
    _drifted(folder, "single_partition_of_fp32_groups")


def _drifted_state(folder: Path) -> None:
    _drifted(folder, "base_optimizer_state", "exp_avg")


def _drifted_buffer(folder: Path) -> None:
    _edit(_model(folder, 1), lambda content: content["module"]["batch_norm.running_mean"].add_(1.0))


def _other_options(folder: Path) -> None:
    def edit(content: Any) -> None:
        content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][0]["lr"] = 3.0

    for data_rank in range(2):
        _edit(_optimizer(folder, data_rank, 1), edit)


def _without_a_state(folder: Path) -> None:
    def edit(content: Any) -> None:
        content["optimizer_state_dict"]["base_optimizer_state"]["state"].pop(1)

    for data_rank in range(2):
        _edit(_optimizer(folder, data_rank, 1), edit)


def _other_extra_state(folder: Path) -> None:
    _edit(_model(folder, 1), lambda content: content["module"].update(_extra_state={"note": "another"}))


def _other_names(folder: Path) -> None:
    _edit(_model(folder, 1), lambda content: content["module"].update(extra=torch.ones(2)))


def _pipeline(folder: Path) -> None:
    axes = {"pp_degree": 3, "tp_degree": 3}
    _edit(_model(folder, 0), lambda content: content.update(checkpoint_parallel_dimensions=axes))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (_without_a_rank, r"lacks files of tensor rank 0 \(`\*mp_rank_00\*`\)"),
        (_without_the_last_rank, "was written by 3 tensor ranks, and has the files of 2"),
        (_without_a_model_file, "lacks files of tensor rank 2"),
        (_without_a_data_rank, "lacks the file of rank 0 beside `bf16_zero_pp_rank_1_mp_rank_01"),
        (_without_the_last_data_rank, "was written by 2 ranks, and has the optimizer states of 1"),
        (_exchanged_tensor_ranks, r"mp_rank_01_model_states.pt` was written as `mp_rank_02_model_states.pt`"),
        (_exchanged_data_ranks, r"zero_pp_rank_0_mp_rank_01_optim_states.pt` was written as `bf16_zero_pp_rank_1_mp_"),
        (_other_size, "was written by 4 tensor ranks, and has the files of 3"),
        (_other_maps, "the affine map of `scale` does not describe parts of 3 tensor ranks"),
        (_maps_of_another_save, "the tensor ranks have different `universal_checkpoint_info`"),
        (_later_maps, "has affine maps of version 2, and version 1 can be read"),
        (_scaled, "the affine map of `scale` does not describe parts of 3 tensor ranks that cover .* unscaled"),
        (_with_a_gap, "the affine map of `unused` does not describe parts of 3 tensor ranks that cover"),
        (_without_a_map, r"does not say how `unused`, `blocks.0.linear.bias` are cut. Say it by `tensor_plan`"),
        (_unsupported, r"DeepSpeed says of `frozen.weight`: its layout interleaves blocks"),
        (_wrong_shape, r"parts of `embedding.weight` of \(13, 2\) torch.float32, \(10, 2\) torch.float32"),
        (_drifted_value, "`scale` has other values on tensor rank 2 than on tensor rank 0"),
        (_drifted_state, r"`scale.exp_avg` has other values on tensor rank 2 than on tensor rank 0"),
        (_drifted_buffer, r"`batch_norm.running_mean` has other values on tensor rank 1"),
        (_other_options, "`param_groups` differs between tensor ranks 0 and 1"),
        (_without_a_state, r"has no optimizer states of `[a-z0-9.]+` on tensor rank 1"),
        (_other_extra_state, "`_extra_state` differs between tensor ranks 0 and 1"),
        (_other_names, "the files of tensor ranks 0 and 1 do not both have `extra`"),
        (_pipeline, "is of a program with pipeline parallelism"),
    ],
)
def test_a_checkpoint_that_cannot_be_joined_is_refused_by_name(harm: Any, message: str, tmp_path: Path) -> None:
    write(tmp_path / "theirs", 2, 2, 3)
    harm(tmp_path / "theirs" / "checkpoint")
    with pytest.raises(Exception, match=message):
        _convert(tmp_path)
    assert not (tmp_path / "ours").exists()


def _convert(folder: Path, **options: Any) -> dict[str, Any]:
    convert(str(folder / "theirs"), str(folder / "ours"), **options)
    return directory.load(None, folder / "ours")


@pytest.mark.parametrize("harm", [_drifted_value, _drifted_state, _drifted_buffer])
def test_copies_that_have_drifted_apart_are_those_of_the_first_rank_on_demand(harm: Any, tmp_path: Path) -> None:
    model, optimizer = write(tmp_path / "theirs", 2, 2, 3)
    harm(tmp_path / "theirs" / "checkpoint")
    assert_whole(_convert(tmp_path, copies="first"), model, optimizer)


def test_parts_that_are_equal_are_not_taken_for_copies(tmp_path: Path) -> None:
    """As those of a bias of zeros."""
    model, optimizer = trained()
    with torch.no_grad():
        model.blocks[0].linear.bias.zero_()
    client: dict[str, Any] = {}
    deepspeed_files.write_parts(tmp_path, model, optimizer, 2, world=1, cuts=CUTS[2], client=client)
    rules = {name: rule for name, rule in RULES.items() if name != "blocks.0.linear"}
    with pytest.raises(ValueError, match=r"does not say how `blocks.0.linear.weight`, `blocks.0.linear.bias` are cut"):
        read_foreign(tmp_path, CutRules(rules))
    assert_whole(read_foreign(tmp_path, CutRules(RULES)), model, optimizer)


@pytest.mark.parametrize("rule", [{"cut": 0}, "column"], ids=str)
def test_copies_are_not_taken_for_parts(rule: Any, tmp_path: Path) -> None:
    """DeepSpeed 0.18.2 writes files of tensor ranks of a model that it has not cut, without ``tp_model_init``."""
    write(tmp_path, 2, 2, 2, None)
    rules = {**RULES, "blocks.*.norm": rule} if rule == "column" else {**RULES, "conv.bias": rule}
    with pytest.raises(
        ValueError, match="is cut, and every tensor rank has the same values of it. Its rule is 'whole'"
    ):
        read_foreign(tmp_path, CutRules(rules))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"head.bias": "whole"}, r"'whole' for `head.bias`.*\(7,\), \(6,\): they have different shapes"),
        ({"blocks.0.linear": "row"}, "the checkpoint for `blocks.0.linear.weight` and the plan for .* different parts"),
        (
            {"frozen": "column"},
            "the checkpoint for `frozen.weight` and the plan for `frozen.weight` describe different",
        ),
        ({"blocks.7.linear": "column"}, r"names `blocks.7.linear`.* Did you mean `blocks.\d.linear`"),
    ],
)
def test_a_plan_that_the_checkpoint_contradicts_is_refused(rules: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, 2, 1, 2)
    with pytest.raises(ValueError, match=message):
        read_foreign(tmp_path, CutRules(rules))


def test_a_plan_for_whole_parameters_is_refused(tmp_path: Path) -> None:
    deepspeed_files.write(tmp_path, *trained(), 2, 2)
    with pytest.raises(ValueError, match="was written without tensor ranks. Give no plan"):
        read_foreign(tmp_path, CutRules(RULES))


@pytest.mark.parametrize("stage", sample([0, 1, 2, 3], 3), ids="stage{}".format)
def test_a_converted_checkpoint_loads_on_ranks_that_have_whole_parameters(stage: int, tmp_path: Path) -> None:
    model, optimizer = write(tmp_path / "theirs", 2, 2, 2)
    _convert(tmp_path)
    ranks = worlds.run(load, 2, str(tmp_path / "ours"), stage)
    loaded = programs.whole([held for held, _, _ in ranks])
    for name, param in model.named_parameters():
        expected = param if param.requires_grad else param.bfloat16().float()
        assert torch.equal(loaded[name]["value"], expected), name
        for slot, value in optimizer.state.get(param, {}).items():
            assert torch.equal(loaded[name][slot], torch.tensor(7.0) if slot == "step" else value), (name, slot)
    assert ranks[0][1:] == ([1e-2, 2e-3], "of DeepSpeed")
