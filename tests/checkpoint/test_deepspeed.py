from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero.checkpoint.convert import read_foreign
from lightning_zero.checkpoint.planner import Segment
from lightning_zero.checkpoint.stored import fill
from lightning_zero.lightning.precision import LossScale, ZeroMixedPrecision
from tests import worlds
from tests.checkpoint import deepspeed_files, programs
from tests.sampling import sample


def trained() -> tuple[programs.Model, torch.optim.AdamW]:
    """Return a model on one process and its optimizer, after a step, with masters that 16 bits do not hold."""
    worlds.seed()
    model = programs.Model()
    params = [param for param in model.parameters() if param.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [param for param in params if param.ndim >= 2], "weight_decay": 0.1},
        {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0, "lr": 2e-3},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    model.note = "of DeepSpeed"
    return model, optimizer


def same(actual: Any, expected: Tensor) -> bool:
    return torch.equal(actual.clone(), expected) and actual.dtype == expected.dtype


@pytest.mark.parametrize("world", sample([1, 2, 3, 4], 1, 2, 3))
@pytest.mark.parametrize("stage", [1, 2, 3], ids="stage{}".format)
def test_masters_buffers_frozen_and_tied_parameters_are_read(stage: int, world: int, tmp_path: Path) -> None:
    model, optimizer = trained()
    deepspeed_files.write(tmp_path, model, optimizer, stage, world)
    content = read_foreign(tmp_path)
    expected = model.state_dict()
    assert list(content["state_dict"]) == list(expected)
    for name, value in expected.items():
        if name == "_extra_state":
            assert content["state_dict"][name] == value
        else:
            frozen = name.startswith("frozen.")
            assert same(content["state_dict"][name], value.bfloat16() if frozen else value), name
    assert content["state_dict"]["head.weight"] is content["state_dict"]["embedding.weight"]
    assert content["deepspeed"] == {
        "global_steps": 3, "global_samples": 24, "skipped_steps": 0, "ds_version": "0.17.0",
    }  # fmt: skip
    assert (content["epoch"], content["global_step"]) == (0, 3)


@pytest.mark.parametrize("world", sample([1, 2, 3, 4], 1, 3))
@pytest.mark.parametrize("stage", [1, 2, 3], ids="stage{}".format)
def test_states_of_the_optimizer_are_by_name_with_steps_and_groups(stage: int, world: int, tmp_path: Path) -> None:
    model, optimizer = trained()
    deepspeed_files.write(tmp_path, model, optimizer, stage, world)
    (state,) = read_foreign(tmp_path)["optimizer_states"]
    names = {id(param): name for name, param in model.named_parameters()}
    assert [group["params"] for group in state["param_groups"]] == [
        [names[id(param)] for param in group["params"]] for group in optimizer.param_groups
    ]
    assert [group["lr"] for group in state["param_groups"]] == [1e-2, 2e-3]
    assert [group["weight_decay"] for group in state["param_groups"]] == [0.1, 0.0]
    for param, slots in optimizer.state.items():
        found = state["state"][names[id(param)]]
        assert found.keys() == slots.keys()
        assert same(found["step"], torch.tensor(7.0))
        assert same(found["exp_avg"], slots["exp_avg"])
        assert same(found["exp_avg_sq"], slots["exp_avg_sq"])


def test_a_range_is_read_from_the_parts_that_hold_it(tmp_path: Path) -> None:
    model, optimizer = trained()
    for stage in (2, 3):
        deepspeed_files.write(tmp_path / str(stage), model, optimizer, stage, 3)
        stored = read_foreign(tmp_path / str(stage))["state_dict"]["embedding.weight"]
        local = torch.full((41,), float("nan"))
        fill([(stored, Segment(local, 20, stored.shape))])
        assert torch.equal(local, model.embedding.weight.detach().reshape(-1)[20:61])


def test_what_lightning_kept_beside_it_is_read(tmp_path: Path) -> None:
    model, optimizer = trained()
    client = {"epoch": 4, "global_step": 9, "pytorch-lightning_version": "2.4.0", "callbacks": {"best": 0.5}}
    deepspeed_files.write(tmp_path, model, optimizer, 2, 2, client)
    content = read_foreign(tmp_path)
    assert {key: content[key] for key in client} == client
    assert read_foreign(tmp_path / "checkpoint")["epoch"] == 4
    (tmp_path / "latest").unlink()
    assert read_foreign(tmp_path)["epoch"] == 4


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("client", [None, {"epoch": 4, "global_step": 9}], ids=["plain", "lightning"])
def test_the_loss_scale_goes_on(stage: int, client: Any, tmp_path: Path) -> None:
    """It began at its first value again."""
    model, optimizer = trained()
    deepspeed_files.write(tmp_path, model, optimizer, stage, 2, client)
    content = read_foreign(tmp_path)
    plugin = ZeroMixedPrecision("16-mixed", "cpu", LossScale(init_scale=4.0))
    plugin.on_load_checkpoint(content)
    scaler = plugin.scaler
    assert scaler is not None
    assert (scaler.scale, scaler.steps, scaler.last_overflow, scaler.hysteresis) == (2.0**16, 7, 2, 1)
    stock = torch.amp.GradScaler("cpu", init_scale=4.0)
    stock.load_state_dict(content["MixedPrecision"])
    assert (stock.get_scale(), stock._get_growth_tracker()) == (2.0**16, 3)


def test_options_that_pytorch_does_not_have_are_named(tmp_path: Path) -> None:
    model, optimizer = trained()
    optimizer.param_groups[1]["bias_correction"] = False
    deepspeed_files.write(tmp_path, model, optimizer, 2, 2)
    with pytest.warns(UserWarning, match=r"was trained with `bias_correction=False`, which `torch.optim.Adam`"):
        read_foreign(tmp_path)


# -- What cannot be read -----------------------------------------------------------------------------------------------


class Payload:
    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


def _with_code(folder: Path) -> None:
    file = folder / "mp_rank_00_model_states.pt"
    torch.save({"module": {}, "mine": Payload()}, file)


def _with_getattr(folder: Path) -> None:
    class Getter:
        def __reduce__(self) -> Any:
            return getattr, (torch.Size, "numel")

    torch.save({"module": {}, "mine": Getter()}, folder / "mp_rank_00_model_states.pt")


def _one_missing(folder: Path) -> None:
    (folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()


def _last_missing(folder: Path) -> None:
    (folder / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()


def _of_other_groups(folder: Path) -> None:
    path = folder / "mp_rank_00_model_states.pt"
    content = torch.load(path, weights_only=True)
    content["param_shapes"][1]["scale"] = torch.Size([64])
    torch.save(content, path)


def _parallel(folder: Path) -> None:
    shutil.copy(folder / "mp_rank_00_model_states.pt", folder / "mp_rank_01_model_states.pt")


def _exchanged(folder: Path) -> None:
    first, second = (folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def _with_layers(folder: Path) -> None:
    shutil.copy(folder / "mp_rank_00_model_states.pt", folder / "layer_00-model_states.pt")


def _with_experts(folder: Path) -> None:
    path = folder / "mp_rank_00_model_states.pt"
    content = torch.load(path, weights_only=True)
    torch.save({**content, "ds_autoep_layers": [{"num_experts": 4}]}, path)


def _cut(folder: Path) -> None:
    os.truncate(folder / "mp_rank_00_model_states.pt", 1000)


def _without_zero(folder: Path) -> None:
    for path in folder.glob("*optim_states.pt"):
        path.unlink()


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (_with_code, r"mp_rank_00_model_states.pt` names `\w+.mkdir`, which could run code"),
        (_with_getattr, "could run code when it is read"),
        (_one_missing, "lacks the file of rank 1"),
        (_last_missing, "was written by 3 ranks, and has the optimizer states of 2"),
        (_of_other_groups, "group 1 has .* elements, and its parameters need"),
        (_parallel, "mp_rank_01_model_states.pt` was written as `mp_rank_00_model_states.pt`"),
        (_exchanged, "zero_pp_rank_0_mp_rank_00_optim_states.pt` was written as `bf16_zero_pp_rank_1_mp_rank_00_"),
        (_with_layers, "of a program with pipeline parallelism"),
        (_with_experts, "of a program with AutoEP"),
        (_cut, "mp_rank_00_model_states.pt` is damaged"),
        (_without_zero, "was not written by ZeRO stage 1, 2 or 3"),
    ],
)
def test_what_is_wrong_is_named(harm: Any, message: str, tmp_path: Path) -> None:
    deepspeed_files.write(tmp_path, *trained(), 2, 3)
    harm(tmp_path / "global_step3")
    with pytest.raises(Exception, match=message):
        read_foreign(tmp_path)
    assert not Path("executed").exists()
