from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from lightning_zero import load_pretrained
from lightning_zero.__main__ import main
from lightning_zero.checkpoint import directory, state
from lightning_zero.checkpoint.convert import convert, read_foreign
from lightning_zero.checkpoint.deepspeed_experts import (
    expert_name,
    merged_groups,
    our_name,
    regroup,
    regroup_schedule,
)
from lightning_zero.comm.expert_groups import ExpertGroups
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.lightning.strategy import ZeroStrategy
from lightning_zero.moe import MoE
from lightning_zero.moe.division import divide_experts, grid_of_experts
from lightning_zero.moe.exchange import ExpertRanks
from tests import worlds
from tests.checkpoint import deepspeed_expert_files as files
from tests.checkpoint.deepspeed_expert_files import INSIDE, Layout, Mixture
from tests.checkpoint.deepspeed_files import deepspeed_classes
from tests.lightning_programs import Net, loader, trainer

WIDTH, BOUND = 4, 1e-6
PLAIN = {"blocks.0": 2, "blocks.1": 2}  # ep_size of every layer


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3)
        self.down = nn.Linear(3, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(x)))
        return y


class Odd(nn.Module):
    """A parameter of its own, of no dimensions too; a tied, a frozen and an empty one; buffers."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.outer.weight = self.inner.weight
        self.scale = nn.Parameter(torch.rand(()))
        self.shift = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.nothing = nn.Parameter(torch.empty(0, 2))
        self.register_buffer("number", torch.tensor(number))
        self.register_buffer("table", torch.randn(WIDTH).bfloat16().float())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.outer(torch.tanh(self.inner(x))) * self.scale + self.shift + self.table + self.nothing.sum()
        return y


def their_layer(experts: list[nn.Module], k: int, residual: bool) -> nn.Module:
    return Mixture(WIDTH, experts, k, Linear() if residual else None)


def our_layer(experts: list[nn.Module], k: int, residual: bool) -> nn.Module:
    return MoE(WIDTH, experts, len(experts), k=k, use_residual=residual)


class Model(nn.Module):
    """Two mixtures between tied layers, the first one residual; experts of the second have every kind of tensor."""

    def __init__(self, layer: Callable[..., nn.Module], numbers: tuple[int, int] = (4, 2), odd: bool = True) -> None:
        super().__init__()
        first, second = numbers
        self.start = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            [
                layer([Linear() for _ in range(first)], 2, True),
                layer([Odd(number) if odd else Linear() for number in range(second)], 1, False),
            ]
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.end = nn.Linear(WIDTH, WIDTH)
        self.end.weight = self.start.weight
        self.kept = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, total = self.start(x), torch.zeros(())
        for block in self.blocks:
            out, aux = block(self.norm(x))[:2]
            x, total = x + out, total + aux
        return self.end(x) * self.kept, total


def groups_of(model: nn.Module, num_groups: int = 1) -> list[dict[str, Any]]:
    trained = [param for param in model.parameters() if param.requires_grad and param.numel()]
    named = {id(param): name for name, param in model.named_parameters()}
    if num_groups == 1:
        return [{"params": trained}]
    biases = [param for param in trained if "bias" in named[id(param)]]
    others = [param for param in trained if "bias" not in named[id(param)]]
    return [{"params": others, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0, "lr": 2e-3}]


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, 5, WIDTH, generator=generator), torch.randn(3, 5, WIDTH, generator=generator)


def loss_of(model: nn.Module, rank: int, step: int) -> tuple[Tensor, Tensor]:
    x, y = batch(rank, step)
    out, aux = model(x)
    return (out - y).square().mean() + 0.1 * aux, out.detach()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, world: int, steps: range) -> list[Tensor]:
    """Train on the batches of all ranks in one process; return the outputs."""
    outputs = []
    for step in steps:
        for rank in range(world):
            loss, out = loss_of(model, rank, step)
            (loss / world).backward()
            outputs.append(out)
        optimizer.step()
        optimizer.zero_grad()
    return outputs


def trained(num_groups: int = 1, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return DeepSpeed's model and its optimizer, after two steps."""
    worlds.seed()
    model = Model(their_layer, **options)
    optimizer = torch.optim.AdamW(groups_of(model, num_groups), lr=1e-2)
    train(model, optimizer, 2, range(2))
    return model, optimizer


def stacked(model: nn.Module, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by DeepSpeed's names under ours, those of experts as one."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        place = expert_name(name)
        if place is None:
            found[our_name(name)] = value
        else:
            found.setdefault(place.stacked, []).append(value)
    return {name: torch.stack(value) if isinstance(value, list) else value for name, value in found.items()}


def assert_same(found: Any, expected: Tensor, name: str) -> None:
    assert found.dtype == expected.dtype, name
    assert torch.equal(found.clone(), expected), name


def assert_converted(content: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Compare every value with those of the whole model, to the bit."""
    params = dict(model.named_parameters())
    expected = {name: value for name, value in model.state_dict().items() if not name.endswith("outer.weight")}
    whole = stacked(model, expected)
    assert content["state_dict"].keys() == whole.keys()
    for name, value in whole.items():
        is_rounded = name.endswith(("shift", "kept", "nothing"))  # not among the masters
        assert_same(content["state_dict"][name], value.bfloat16() if is_rounded else value, name)
    (saved,) = content["optimizer_states"]
    slots = {name: optimizer.state[param] for name, param in params.items() if param in optimizer.state}
    for slot in ("exp_avg", "exp_avg_sq"):
        for name, value in stacked(model, {name: own[slot] for name, own in slots.items()}).items():
            assert_same(saved["state"][name][slot], value, f"{name}.{slot}")
            assert_same(saved["state"][name]["step"], torch.tensor(2.0), name)
    names = {id(param): name for name, param in params.items()}
    assert [set(group["params"]) for group in saved["param_groups"]] == [
        set(stacked(model, {names[id(param)]: param for param in group["params"]})) for group in optimizer.param_groups
    ]
    assert [group["lr"] for group in saved["param_groups"]] == [group["lr"] for group in optimizer.param_groups]
    assert not any("moe" in group for group in saved["param_groups"])


LAYOUTS = {
    "stage1-2-ranks": Layout(1, 2, PLAIN),
    "stage2-2-ranks": Layout(2, 2, PLAIN),
    "stage2-1-rank": Layout(2, 1, {"blocks.0": 1, "blocks.1": 1}),
    "stage2-4-ranks-pyramid": Layout(2, 4, {"blocks.0": 4, "blocks.1": 2}),
    "stage1-4-ranks": Layout(1, 4, PLAIN),
    "stage1-4-ranks-data-first": Layout(1, 4, PLAIN, data_first=True),
    "stage2-6-ranks-no-division": Layout(2, 6, {"blocks.0": 1, "blocks.1": 2}),
    "stage2-4-ranks-data-first-config-by-path": Layout(2, 4, PLAIN, data_first=True, keeps_config=False),
    "stage2-4-ranks-config-by-path": Layout(2, 4, PLAIN, keeps_config=False),
    "stage2-many-groups": Layout(2, 4, {"blocks.0": 2, "blocks.1": 1}, max_group_size=20),
    "stage2-aligned": Layout(2, 4, PLAIN, alignment=8),
}


@pytest.mark.parametrize("num_groups", [1, 2], ids="groups{}".format)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_experts_are_read_with_masters_moments_and_groups(layout: Layout, num_groups: int, tmp_path: Path) -> None:
    model, optimizer = trained(num_groups)
    files.write(tmp_path, model, optimizer, layout)
    content = read_foreign(tmp_path)
    assert_converted(content, model, optimizer)
    assert content["state_dict"]["end.weight"] is content["state_dict"]["start.weight"]
    assert content.keys().isdisjoint({"num_experts", "ds_autoep_layers", "ds_config"})
    assert content["global_step"] == 3


def test_files_of_optimizer_states_without_any_are_no_other_save(tmp_path: Path) -> None:
    model, optimizer = trained()
    folder = files.write(tmp_path, model, optimizer, Layout(2, 4, PLAIN))
    for rank in range(2):  # DeepSpeed before 0.19.5 writes them beside those of ZeRO
        torch.save({"optimizer": None}, folder / f"expp_rank_{rank}_mp_rank_00_optim_states.pt")
    assert_converted(read_foreign(tmp_path), model, optimizer)


def test_files_of_the_user_beside_them_are_left_alone(tmp_path: Path) -> None:
    model, optimizer = trained()
    folder = files.write(tmp_path, model, optimizer, Layout(2, 2, PLAIN))
    for name in ("layer_norms.json", "experts.txt", "expert_counts.pt"):
        (folder / name).write_text("mine")
    assert_converted(read_foreign(tmp_path), model, optimizer)


def _under_two_names(layer: Callable[..., nn.Module]) -> nn.Module:
    model = nn.Module()
    model.one = Model(layer)
    model.two = model.one.blocks[1]
    return model


def test_a_layer_under_two_names_is_read_once(tmp_path: Path) -> None:
    worlds.seed()
    theirs = _under_two_names(their_layer)
    optimizer = torch.optim.AdamW(groups_of(theirs), lr=1e-2)
    train(theirs.one, optimizer, 2, range(2))
    sizes = {"one.blocks.0": 2, "one.blocks.1": 2, "two": 2}
    files.write(tmp_path / "theirs", theirs, optimizer, Layout(2, 2, sizes, dtype=torch.float32))
    content = read_foreign(tmp_path / "theirs")
    aliases = [name for name in content["state_dict"] if name.startswith("two.")]
    assert not any("deepspeed_moe" in name for name in content["state_dict"])
    assert not any(name in content["optimizer_states"][0]["state"] for name in aliases)
    convert(str(tmp_path / "theirs"), str(tmp_path / "ours"))
    ours = _under_two_names(our_layer)
    load_pretrained(ours, tmp_path / "ours")
    values = {name: value for name, value in theirs.state_dict().items() if not name.endswith("outer.weight")}
    for name, value in stacked(theirs, values).items():
        assert_same(content["state_dict"][name], value, name)
        assert torch.equal(ours.state_dict()[name], value), name


# -- Training goes on --------------------------------------------------------------------------------------------------


def _go_on(rank: int, world: int, path: str, stage: int, size: int, num_groups: int) -> Any:
    worlds.seed(7)
    model = Model(our_layer, odd=False)
    grid = ranks = None
    if size > 1:
        groups = ExpertGroups(size, 30.0)
        ranks = ExpertRanks(groups.expert_group)
        grid = grid_of_experts(divide_experts(model, ranks), groups.shard_group, world)
    engine = ZeroEngine(stage)
    engine.shard(model, grid=grid)
    if ranks is not None:
        ranks.meet = engine.meet
    optimizer = engine.attach(torch.optim.AdamW(groups_of(model, num_groups), lr=0.5))
    checkpoint = directory.load(engine, path)
    state.load_model_state(engine, model, checkpoint["state_dict"])
    state.load_optimizer_state(engine, [optimizer], states=checkpoint["optimizer_states"])
    outputs = []
    for step in range(2, 5):
        with engine.scope("training_step"):
            loss, out = loss_of(model, rank, step)
        with engine.backward_scope():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(out)
    whole = {name: engine.full_param(param).clone() for name, param in model.named_parameters()}
    engine.close()
    return outputs, whole


WAYS = [
    (written, stage, size, world)
    for written in (Layout(1, 2, PLAIN), Layout(2, 4, {"blocks.0": 4, "blocks.1": 2}))
    for stage in (0, 1, 2, 3)
    for size, world in ((1, 1), (1, 2), (2, 2), (2, 4))
]
QUICK = [WAYS[6], WAYS[14], WAYS[16], WAYS[29]]


@pytest.mark.parametrize(
    ("written", "stage", "size", "world"),
    [pytest.param(*way, marks=() if way in QUICK else pytest.mark.slow) for way in WAYS],
    ids=[f"{way[0].world}-ranks-to-stage{way[1]}-ep{way[2]}-w{way[3]}" for way in WAYS],
)
def test_training_goes_on_as_in_one_process(written: Layout, stage: int, size: int, world: int, tmp_path: Path) -> None:
    num_groups = 1 + stage % 2
    model, optimizer = trained(num_groups, odd=False)
    for param in (model.kept,):
        param.data = param.data.bfloat16().float()
    files.write(tmp_path / "theirs", model, optimizer, written)
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    expected = train(model, optimizer, world, range(2, 5))
    ranks = worlds.run(_go_on, world, str(tmp_path / "ours"), stage, size, num_groups)
    found = [ranks[rank][0][step] for step in range(3) for rank in range(world)]
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() < BOUND
    values = stacked(model, {name: param.detach() for name, param in model.named_parameters()})
    for _, whole in ranks:
        for name, value in values.items():
            assert (whole[name] - value).abs().max() < BOUND, name


def test_experts_of_any_kind_compute_as_there(tmp_path: Path) -> None:
    model, optimizer = trained()
    files.write(tmp_path / "theirs", model, optimizer, Layout(2, 4, PLAIN, dtype=torch.float32))
    convert(str(tmp_path / "theirs"), str(tmp_path / "ours"))
    ours = Model(our_layer)
    load_pretrained(ours, tmp_path / "ours")
    x, _ = batch(0, 9)
    for found, expected in zip(ours(x), model(x), strict=True):
        assert (found - expected).abs().max() < BOUND
    assert ours.blocks[1].experts.number.tolist() == [0, 1]


class Program(Net):
    """A fit of the model under Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        self.model = Model(our_layer, odd=False)

    def loss(self, batch: Any) -> Tensor:
        out, aux = self.model(batch[0])
        loss: Tensor = out.square().mean() + 0.1 * aux
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([param for param in self.parameters() if param.requires_grad], lr=0.1)


def _fit(rank: int, world: int, path: str) -> Any:
    worlds.seed(3)
    fitted = trainer(rank, world, ZeroStrategy(stage=2, expert_parallel=2), max_steps=5, max_epochs=9)
    module = Program()
    fitted.fit(module, loader(rank, world), ckpt_path=path)
    return fitted.global_step


def _program(tmp_path: Path, stage: int) -> str:
    """Write a checkpoint of ``Program`` under Lightning's strategy for DeepSpeed, and convert it."""
    worlds.seed()
    program = Program()
    program.model = Model(their_layer, odd=False)
    wrapped = nn.Module()
    wrapped._forward_module = program
    optimizer = program.configure_optimizers()
    program.loss((torch.randn(3, WIDTH),)).backward()
    optimizer.step()
    for param in optimizer.param_groups[0]["params"]:
        if param not in optimizer.state:  # without gradients
            zeros = torch.zeros_like(param)
            optimizer.state[param] = {"step": torch.tensor(1.0), "exp_avg": zeros, "exp_avg_sq": zeros}
    sizes = {f"_forward_module.model.{name}": size for name, size in PLAIN.items()}
    client = {"epoch": 0, "global_step": 3, "pytorch-lightning_version": "2.4.0"}
    files.write(tmp_path / "theirs", wrapped, optimizer, Layout(stage, 2, sizes), client, "checkpoint")
    convert(str(tmp_path / "theirs"), str(tmp_path / "ours"))
    return str(tmp_path / "ours")


def test_a_fit_goes_on_with_divided_experts(tmp_path: Path) -> None:
    assert worlds.run(_fit, 2, _program(tmp_path, 2)) == [5, 5]


# -- Without ZeRO ------------------------------------------------------------------------------------------------------


def test_without_zero_weights_alone_are_taken_and_a_warning_says_so(tmp_path: Path) -> None:
    model, optimizer = trained()
    files.write(tmp_path / "theirs", model, optimizer, Layout(0, 4, PLAIN, dtype=torch.float32))
    with pytest.warns(UserWarning, match=r"`.*global_step3` was written without ZeRO: .*weights alone are converted"):
        convert(str(tmp_path / "theirs"), str(tmp_path / "ours"))
    ours = Model(our_layer)
    # Without ZeRO the files do not say that a tensor of an expert is tied; its further name is there, too.
    load_pretrained(ours, tmp_path / "ours", strict=False)
    values = {name: value for name, value in model.state_dict().items() if not name.endswith("outer.weight")}
    for name, value in stacked(model, values).items():
        assert torch.equal(ours.state_dict()[name], value), name


@pytest.mark.filterwarnings("ignore:.*was written without ZeRO")
def test_a_fit_does_not_go_on_from_weights_alone(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="checkpoint contains only the model"):
        worlds.run(_fit, 2, _program(tmp_path, 0))


def _as_of_early_releases(folder: Path) -> None:
    """Change the model file into that of DeepSpeed 0.18.0, whose ``_save_moe_checkpoint`` lists its own entries."""
    kept = {
        "module", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps",
        "global_steps", "global_samples", "dp_world_size", "mp_world_size", "num_experts",
    }  # fmt: skip

    def change(content: Any) -> None:
        for key in content.keys() - kept:
            del content[key]

    _change(folder / "mp_rank_00_model_states.pt", change)


def _weights(path: Path) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in read_foreign(path)["state_dict"].items()}


@pytest.mark.parametrize("in_one_file", [False, True], ids=["file-per-layer", "file-of-all-layers"])
@pytest.mark.filterwarnings("ignore:.*was written without ZeRO")
def test_weights_of_early_releases_are_read_without_names_of_buffers(in_one_file: bool, tmp_path: Path) -> None:
    model, optimizer = trained(numbers=(2, 2))
    folder = files.write(tmp_path, model, optimizer, Layout(0, 4, PLAIN, dtype=torch.float32))
    expected = _weights(tmp_path)
    _as_of_early_releases(folder)
    if in_one_file:
        for expert in range(2):
            paths = [_expert(folder, layer, expert) for layer in range(2)]
            content = {name: value for path in paths for name, value in torch.load(path).items()}
            torch.save(content, folder / f"expert_{expert}_mp_rank_00_model_states.pt")
            for path in paths:
                path.unlink()
        _change(folder / "mp_rank_00_model_states.pt", lambda content: content.update(num_experts=2))
    found = _weights(tmp_path)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_same(found[name], value, name)


# -- What cannot be read -----------------------------------------------------------------------------------------------


def _change(path: Path, change: Callable[[Any], Any]) -> None:
    with deepspeed_classes():
        content = torch.load(path, weights_only=False)
        change(content)
        torch.save(content, path)


def _expert(folder: Path, layer: int, expert: int) -> Path:
    return folder / f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"


def _missing(folder: Path) -> None:
    _expert(folder, 0, 2).unlink()


def _renamed(content: Any, wanted: int) -> dict[str, Any]:
    return {re.sub(r"(deepspeed_experts)\.\d+", rf"\1.{wanted}", key): value for key, value in content.items()}


def _one_more(folder: Path) -> None:
    torch.save(_renamed(torch.load(_expert(folder, 0, 0)), 4), _expert(folder, 0, 4))


def _duplicate(folder: Path) -> None:
    torch.save(torch.load(_expert(folder, 1, 1)), folder / "expert_1_mp_rank_00_model_states.pt")


def _copied(folder: Path) -> None:
    shutil.copy(_expert(folder, 0, 1), _expert(folder, 0, 3))


def _numbered(folder: Path) -> None:
    torch.save(torch.load(_expert(folder, 0, 1)), _expert(folder, 0, 3))


def _exchanged(folder: Path) -> None:
    one, other = (torch.load(_expert(folder, 0, number)) for number in (1, 2))
    torch.save(_renamed(one, 2), _expert(folder, 0, 2))
    torch.save(_renamed(other, 1), _expert(folder, 0, 1))


def _without_layer(folder: Path) -> None:
    for path in folder.glob("layer_1_*"):
        path.unlink()


def _other_layer(folder: Path) -> None:
    content = {key.replace("blocks.1", "blocks.2"): value for key, value in torch.load(_expert(folder, 1, 0)).items()}
    torch.save(content, _expert(folder, 2, 0))


def _without_frozen_router(folder: Path) -> None:
    path = folder / "mp_rank_00_model_states.pt"
    _change(path, lambda content: content["module"].pop("blocks.1.deepspeed_moe.gate.wg.weight"))


def _tensor_ranks(folder: Path) -> None:
    content = torch.load(_expert(folder, 0, 0))
    torch.save(content, folder / "layer_0_expert_0_mp_rank_01_model_states.pt")


def _model_of_tensor_rank(folder: Path) -> None:
    with deepspeed_classes():
        for path in [*folder.glob("mp_rank_00*"), *folder.glob("*zero*")]:
            other = path.with_name(path.name.replace("mp_rank_00", "mp_rank_01"))
            torch.save(torch.load(path, weights_only=False), other)


def _other_number(folder: Path) -> None:
    _change(folder / "mp_rank_00_model_states.pt", lambda content: content.update(num_experts=[8, 2]))


def _autoep(folder: Path) -> None:
    torch.save({"blocks.0.experts.w1.3": torch.ones(3)}, _expert(folder, 0, 3))


def _autoep_metadata(folder: Path) -> None:
    _change(folder / "mp_rank_00_model_states.pt", lambda content: content.update(ds_autoep_layers=[{}]))


def _extra_state(folder: Path) -> None:
    _change(_expert(folder, 0, 3), lambda content: content.update({f"blocks.0{INSIDE}3._extra_state": 5}))


def _other_structure(folder: Path) -> None:
    _change(_expert(folder, 0, 3), lambda content: content.update({f"blocks.0{INSIDE}3.more": torch.ones(2)}))


def _rank_missing(folder: Path) -> None:
    (folder / "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt").unlink()


def _without_ranks(folder: Path) -> None:
    for path in folder.glob("*_optim_states.pt"):
        path.unlink()


def _without_model(folder: Path) -> None:
    (folder / "mp_rank_00_model_states.pt").unlink()


def _experts_alone(folder: Path) -> None:
    _without_model(folder)
    _without_ranks(folder)


def _two_saves(folder: Path) -> None:
    torch.save({"optimizer": {}}, folder / "expp_rank_0_mp_rank_00_optim_states.pt")


def _partly_trained(folder: Path) -> None:
    def change(content: Any) -> None:
        name = f"blocks.0{INSIDE}1.down.weight"
        shapes = next(shapes for shapes in content["param_shapes"] if name in shapes)
        items = [(name.replace("down", "other") if key == name else key, shape) for key, shape in shapes.items()]
        shapes.clear()
        shapes.update(items)

    _change(folder / "mp_rank_00_model_states.pt", change)


def _other_step(folder: Path) -> None:
    def change(content: Any) -> None:
        for slots in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            slots["step"] += 1

    _change(folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", change)


def _elastic(folder: Path) -> None:
    def change(content: Any) -> None:  # _get_base_optimizer_state of runtime/zero/stage_1_and_2.py
        optimizer = content["optimizer_state_dict"]
        optimizer["base_optimizer_state"] = list(optimizer["base_optimizer_state"]["state"].values())

    for path in folder.glob("*_optim_states.pt"):
        _change(path, change)


def _no_divisor(folder: Path) -> None:
    _change(folder / "mp_rank_00_model_states.pt", lambda content: content.update(dp_world_size=3))
    _rank_missing(folder)


def _pipeline(folder: Path) -> None:
    torch.save({}, folder / "layer_00-model_00-model_states.pt")


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (_missing, r"lacks `layer_0_expert_2_mp_rank_00_model_states.pt`, expert 2 of the 4 of `blocks.0`. Copy"),
        (_one_more, r"`.*layer_0_expert_4_mp_.*` has expert 4, and `blocks.0` has 4 experts. The file was left"),
        (_duplicate, r"`.*/expert_1_mp_.*` and `.*layer_1_expert_1_.*` both have expert 1 of `blocks.1`. One of them"),
        (_copied, r"`.*layer_0_expert_3_.*` was written as `layer_0_expert_1_mp_rank_00_model_states.pt`"),
        (_numbered, r"`.*layer_0_expert_3_.*` has the parameters of expert 1 .*Give every file its first name"),
        (_exchanged, r"`.*layer_0_expert_1_.*` has other values than the optimizer states of its data ranks"),
        (_without_layer, r"has a router of `blocks.1`, and no file of its experts"),
        (_other_layer, r"`.*layer_2_expert_0_.*` has an expert of `blocks.2`, which has no router.*remove it"),
        (
            _without_frozen_router,
            r"`.*layer_1_.*` .* `blocks.1`, whose router is not in .*`exclude_frozen_parameters=True`",
        ),
        (_tensor_ranks, r"`.*layer_0_expert_0_mp_rank_01_.*` is of another tensor rank.*load_pretrained"),
        (_model_of_tensor_rank, r"`.*mp_rank_01_model_states.pt` is of another tensor rank.*load_pretrained"),
        (_other_number, r"was written with \[8, 2\] experts per layer, and its routers choose among \[4, 2\]"),
        (_autoep, r"`.*layer_0_expert_3_.*` has `blocks.0.experts.w1.3`, which is no tensor of an expert"),
        (_autoep_metadata, r"is of a program with AutoEP"),
        (_extra_state, r"`.*layer_0_expert_3_.*` has `blocks.0.*_extra_state`, which is no tensor"),
        (_other_structure, r"`.*layer_0_expert_0_.*` and `.*layer_0_expert_3_.*` have different tensors: `more`"),
        (_rank_missing, "was written by 4 ranks, and has the optimizer states of 3"),
        (
            _without_ranks,
            r"was written with ZeRO, and lacks the optimizer states of its ranks \(`\*_optim_states.pt`\)",
        ),
        (_without_model, "lacks `mp_rank_00_model_states.pt`, and has files of experts .*Copy"),
        (_experts_alone, "lacks `mp_rank_00_model_states.pt`, and has files of experts .*Copy"),
        (_two_saves, r"`.*expp_rank_0_.*` was written without ZeRO, and `.*zero_pp_rank_0_.*` with it"),
        (_partly_trained, "the optimizer trains `down.weight` of some experts of `blocks.0`, and not of all"),
        (_other_step, r"`step` of `blocks.0.experts.up.weight` differs between experts"),
        (_elastic, "was written with `elastic_checkpoint`, so it has no options of parameter groups.*save it again"),
        (_no_divisor, "2 experts per rank, 4 experts of `blocks.0` and 3 ranks do not divide"),
        (_pipeline, "is of a program with pipeline parallelism"),
        (_as_of_early_releases, r"`.*mp_rank_00_model_states.pt` has no `param_shapes`.*0.19.3 or later, and save it"),
    ],
)
def test_what_is_wrong_is_named(harm: Any, message: str, tmp_path: Path) -> None:
    folder = files.write(tmp_path, *trained(), Layout(2, 4, PLAIN))
    harm(folder)
    with pytest.raises(ValueError, match=message):
        read_foreign(tmp_path)


@pytest.mark.parametrize("stage", [0, 2], ids="stage{}".format)
def test_buffers_that_deepspeed_took_for_those_of_experts_are_named(stage: int, tmp_path: Path) -> None:
    model, optimizer = trained()
    model.blocks[0].mlp.register_buffer("table", torch.ones(WIDTH))
    wrapped = nn.Module()
    wrapped.expert_stack = model
    files.write(tmp_path, wrapped, optimizer, Layout(stage, 2, {f"expert_stack.{name}": 2 for name in PLAIN}))
    with pytest.raises(ValueError, match=r"does not have the buffer `expert_stack.blocks.0.mlp.table`: .* rename"):
        read_foreign(tmp_path)


# -- Names and groups --------------------------------------------------------------------------------------------------


def test_the_model_itself_may_be_the_layer() -> None:
    found = expert_name(".deepspeed_moe.experts.deepspeed_experts.12.up.weight")
    assert found is not None
    assert (*found, found.stacked) == ("", 12, "up.weight", "experts.up.weight")
    assert our_name("deepspeed_moe.gate.wg.weight") == "router.weight"
    assert our_name("moe.coefficient.weight") == "moe.coefficient.weight"


def test_experts_go_back_to_the_one_group_with_their_options() -> None:
    dense = {"lr": 1.0, "name": "dense", "params": ["a"]}
    other = {"lr": 2.0, "name": "other", "params": ["b"]}
    moe = [{"lr": 1.0, "name": f"ep_size_{size}", "moe": True, "params": [f"e{size}"]} for size in (2, 4)]
    merged = merged_groups([dense, other, *moe], ["e2", "e4"])
    assert regroup([dense, other, *moe], merged) == [{**dense, "params": ["a", "e2", "e4"]}, other]
    assert dense["params"] == ["a"]


@pytest.mark.parametrize("lr", [1.0, 2.0], ids=["two-have-them", "none-has-them"])
def test_experts_are_a_group_of_their_own_otherwise(lr: float) -> None:
    dense = [{"lr": 1.0, "name": name, "params": [name]} for name in ("a", "b")]
    moe = [{"lr": lr, "name": f"ep_size_{size}", "moe": True, "params": [f"e{size}"]} for size in (2, 4)]
    merged = merged_groups([*dense, *moe], ["e2", "e4"])
    assert regroup([*dense, *moe], merged) == [*dense, {"lr": lr, "params": ["e2", "e4"]}]


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9, three_phase=True),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.StepLR(optimizer, number + 1) for number in range(5)], milestones=[1, 2, 4, 5]
    ),
}


def _scheduled(num_groups: int, make: Callable[[torch.optim.Optimizer], Any]) -> Any:
    lrs = [1e-2, 2e-3, 1e-2, 2e-3]  # DeepSpeed's last two have the experts of the first two
    groups = [{"params": [nn.Parameter(torch.zeros(()))], "lr": lr} for lr in lrs[:num_groups]]
    return make(torch.optim.Adam(groups))


def _step(scheduler: Any) -> list[float]:
    scheduler.optimizer.step()
    scheduler.step(*[1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else [])
    return [group["lr"] for group in scheduler.optimizer.param_groups]


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
@pytest.mark.parametrize("owner", ["lightning", "deepspeed"])
@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_schedules_go_on_with_the_groups_before_the_split(make: Any, owner: str, tmp_path: Path) -> None:
    theirs = _scheduled(4, make)
    for _ in range(3):
        _step(theirs)
    state = theirs.state_dict()
    client = {"lr_schedulers": [state]} if owner == "lightning" else {"lr_scheduler": state}
    files.write(tmp_path, *trained(2), Layout(2, 2, PLAIN), client)
    content = read_foreign(tmp_path)
    ours = _scheduled(2, make)
    ours.load_state_dict(content["lr_schedulers"][0])
    for group, other in zip(ours.optimizer.param_groups, theirs.optimizer.param_groups, strict=False):
        group["lr"] = other["lr"]
    for _ in range(3):
        assert _step(ours) == _step(theirs)[:2]


def test_schedules_that_tell_merged_groups_apart_are_refused() -> None:
    state = {"base_lrs": [1.0, 2.0, 1.0], "_last_lr": [0.5, 0.5, 0.25]}
    with pytest.raises(ValueError, match=r"`_last_lr` of a schedule has other values .* groups \[0, 2\], .*alike"):
        regroup_schedule(state, [[0, 2], [1]], 3)
