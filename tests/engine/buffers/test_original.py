"""Parameters in their own dtype, with the values of the masters: inside ``gathered``, and when training has ended."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.config import MixedPrecision
from lightning_zero.engine.engine import ZeroEngine
from tests import worlds
from tests.references import TinyGPT, token_loss

STAGES = [0, 1, 2, 3]
BF16 = MixedPrecision(compute_dtype=torch.bfloat16)


class ConvNet(nn.Module):
    """Layers whose backward needs the parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv1d(3, 3, 3, padding=1) for _ in range(2))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        head: Tensor = self.head(x)
        return head


def _engine(stage: int, module: nn.Module, **options: Any) -> tuple[ZeroEngine, nn.Module, torch.optim.Optimizer]:
    engine = ZeroEngine(stage, precision=BF16, **options)
    engine.shard(module)
    trained = [param for param in module.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=1e-4)
    engine.attach(optimizer)
    return engine, module, optimizer


def _train(module: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int = 2, start: int = 0) -> Tensor:
    for step in range(start, start + steps):
        with torch.autocast("cpu", torch.bfloat16):
            loss = token_loss(module, rank, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def _whole(engine: ZeroEngine, module: nn.Module) -> dict[str, Tensor]:
    return {name: engine.full_param(param) for name, param in module.named_parameters()}


def _same(module: nn.Module, values: dict[str, Tensor]) -> bool:
    state = module.state_dict()
    return all(state[name].dtype == value.dtype and torch.equal(state[name], value) for name, value in values.items())


def _dtypes(module: nn.Module) -> set[torch.dtype]:
    return {param.dtype for param in module.parameters()}


def _shown(module: nn.Module) -> set[torch.dtype]:
    """Return the dtypes of what lies in memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return {param.dtype for param in module.parameters()}


# -- Inside `gathered` -------------------------------------------------------------------------------------------------


def _reads(rank: int, world: int, stage: int, options: dict[str, Any]) -> None:
    engine, module, optimizer = _engine(stage, TinyGPT(), **options)
    _train(module, optimizer, rank)
    masters = _whole(engine, module)
    assert masters["head.weight"].dtype == torch.float32
    assert not torch.equal(masters["head.weight"], masters["head.weight"].bfloat16().float())
    held = engine.stats().memory
    with engine.gathered(module):
        assert _same(module, masters)
        copied = copy.deepcopy(module)
        file = io.BytesIO()
        torch.save(module.state_dict(), file)
        logits = module(torch.tensor([[1, 2]]))  # without autocast
        with engine.gathered(module.head):
            assert _same(module, masters)
        assert _same(module, masters)
    file.seek(0)
    assert all(torch.equal(value, masters[name]) for name, value in torch.load(file).items())
    plain = TinyGPT()
    plain.load_state_dict(masters)
    assert torch.equal(plain(torch.tensor([[1, 2]])), logits)
    assert _same(copied, masters)
    assert _dtypes(module) == {torch.float32}
    assert engine.stats().memory == held
    assert all(
        b.original is None or b.original.flat is None for unit in engine.internals.fits.units for b in unit.buffers
    )
    assert _shown(module) == {torch.bfloat16, torch.float32}
    engine.close()


@pytest.mark.parametrize("stage", STAGES)
def test_inside_gathered_parameters_are_the_masters(stage: int) -> None:
    worlds.run(_reads, 2, stage, {})


@pytest.mark.parametrize("stage", [1, 3])
def test_inside_gathered_offloaded_parameters_are_the_masters(stage: int) -> None:
    worlds.run(_reads, 2, stage, {"offload": {"optimizer": "cpu", **({"params": "cpu"} if stage == 3 else {})}})


def test_inside_gathered_parameters_are_the_masters_on_a_disk(tmp_path: Any) -> None:
    worlds.run(_reads, 2, 3, {"offload": {"optimizer": "nvme", "path": str(tmp_path)}})


def _writes(rank: int, world: int, stage: int, write: str, options: dict[str, Any]) -> None:
    engine, module, optimizer = _engine(stage, TinyGPT(), **options)
    _train(module, optimizer, rank)
    expected = {name: value * (1 + 2**-14) for name, value in _whole(engine, module).items()}
    with engine.gathered(module, write=write), torch.no_grad():  # type: ignore[arg-type]
        for param in module.parameters():
            if write == "all" or rank == 0:
                param.mul_(1 + 2**-14)
    actual = _whole(engine, module)
    assert all(torch.equal(actual[name], value) for name, value in expected.items())
    with engine.scope("look"):
        weight = module.blocks[0].up.weight  # type: ignore[union-attr, index]
        assert torch.equal(weight + 0, expected["blocks.0.up.weight"].bfloat16())
    _train(module, optimizer, rank)
    engine.close()


@pytest.mark.parametrize("write", ["all", "rank0"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_write_inside_gathered_goes_into_the_masters_exactly(stage: int, write: str) -> None:
    worlds.run(_writes, 2, stage, write, {})


def test_a_write_inside_gathered_goes_into_offloaded_masters_exactly(tmp_path: Any) -> None:
    worlds.run(_writes, 2, 3, "all", {"offload": {"optimizer": "cpu", "params": "cpu"}})
    worlds.run(_writes, 2, 3, "all", {"offload": {"optimizer": "nvme", "path": str(tmp_path)}})


def _average(rank: int, world: int, stage: int, frozen_before: bool) -> None:
    """Follow a trained module with a frozen one, in steps that 16 bits do not see."""
    module: Any = nn.ModuleList([TinyGPT(), TinyGPT()])
    module[1].requires_grad_(not frozen_before)
    engine, module, optimizer = _engine(stage, module)
    module[1].requires_grad_(False)  # type: ignore[index]
    names = [name for name, _ in module[0].named_parameters()]  # type: ignore[index]
    expected = {name: value.float() for name, value in _whole(engine, module).items() if name.startswith("1.")}
    for step in range(20):
        _train(module[0], optimizer, rank, 1, step)  # type: ignore[index]
        values = _whole(engine, module)
        for name in names:
            expected[f"1.{name}"] = expected[f"1.{name}"].lerp(values[f"0.{name}"], 0.01)
        with engine.gathered(module, write="all"), torch.no_grad():
            for online, target in zip(module[0].parameters(), module[1].parameters(), strict=True):  # type: ignore[index]
                target.lerp_(online, 0.01)
    actual = _whole(engine, module)
    assert all(torch.equal(actual[name], value) for name, value in expected.items())
    engine.close()


@pytest.mark.parametrize("frozen_before", [True, False])
@pytest.mark.parametrize("stage", [1, 3])
def test_an_average_of_weights_in_small_steps_moves(stage: int, frozen_before: bool) -> None:
    worlds.run(_average, 2, stage, frozen_before)


def _refused(rank: int, world: int, stage: int) -> None:
    engine, module, optimizer = _engine(stage, TinyGPT())
    _train(module, optimizer, rank, 1)
    with pytest.raises(RuntimeError, match="was changed inside `gathered`"), engine.gathered(module), torch.no_grad():
        module.head.weight.mul_(1.001)  # type: ignore[union-attr, operator]
    with pytest.raises(KeyError), engine.gathered(module):
        raise KeyError
    assert _dtypes(module) == {torch.float32}
    _train(module, optimizer, rank, 1)
    engine.close()


@pytest.mark.parametrize("stage", [1, 3])
def test_errors_inside_gathered_leave_parameters_as_they_compute(stage: int) -> None:
    worlds.run(_refused, 2, stage)


def _takes_two_dtypes() -> bool:
    """Say whether the backward of a convolution in bf16 takes a weight in fp32; it depends on the processor."""
    weight, x = nn.Parameter(torch.ones(3, 3, 3, dtype=torch.bfloat16)), torch.ones(2, 3, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.conv1d(x, weight).float().sum()
    weight.data = weight.data.float()
    try:
        loss.backward()
    except RuntimeError:
        return False
    return True


def _gradients(rank: int, world: int, stage: int, build: type[nn.Module], where: str, autocast: bool) -> float:
    """Return the largest relative difference of gradients from those of a plain module. All ranks have one batch."""
    engine, module, _ = _engine(stage, build())
    x = torch.randint(0, 11, (2, 5)) if build is TinyGPT else torch.randn(2, 3, 8)

    def forward(module: nn.Module = module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return module(x).float().square().mean()

    def grads() -> dict[str, Tensor]:
        found = {name: engine.full_grad(param) for name, param in module.named_parameters()}
        for unit in engine.internals.fits.units:
            for buffer in unit.buffers:
                buffer.gradients.forget()
        return found  # type: ignore[return-value]

    plain = build()
    plain.load_state_dict(_whole(engine, module))
    forward(plain).backward()
    expected = {name: param.grad for name, param in plain.named_parameters() if param.grad is not None}
    if where == "backward-inside":
        loss = forward()
        with engine.gathered(module):
            loss.backward()
    elif where == "forward-inside":
        with engine.gathered(module):
            loss = forward()
        loss.backward()
    elif where == "inside":
        with engine.gathered(module):
            forward().backward()
    else:  # both: the gradient arrives twice
        loss = forward()
        with engine.gathered(module):
            loss = (loss + forward()) / 2
        loss.backward()
    actual = grads()
    engine.close()
    return max(
        float((actual[name] - value).abs().max() / value.abs().max().clamp(min=1e-6))
        for name, value in expected.items()
    )


@pytest.mark.parametrize(
    ("where", "autocast"),
    [
        ("inside", True), ("inside", False), ("forward-inside", True), ("forward-inside", False),
        ("backward-inside", True), ("both", True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("build", [TinyGPT, ConvNet])
@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_of_graphs_that_cross_gathered_are_right(
    stage: int, build: type[nn.Module], where: str, autocast: bool
) -> None:
    if (stage, build, where, autocast) == (1, ConvNet, "backward-inside", True) and not _takes_two_dtypes():
        with pytest.raises(RuntimeError, match="expected scalar type"):  # in docs/limits.md
            worlds.run(_gradients, 2, stage, build, where, autocast)
        return
    for difference in worlds.run(_gradients, 2, stage, build, where, autocast):
        assert difference < (2**-6 if build is TinyGPT and autocast else 1e-5)  # embeddings are rounded


# -- When training has ended -------------------------------------------------------------------------------------------


def _rests(rank: int, world: int, stage: int, options: dict[str, Any]) -> None:
    engine, module, optimizer = _engine(stage, TinyGPT(), **options)
    _train(module, optimizer, rank)
    masters = _whole(engine, module)
    before = engine.stats().memory
    engine.show_masters()
    engine.show_masters()
    engine.internals.fits.pause()
    assert _dtypes(module) == {torch.float32}
    plain = TinyGPT()
    plain.load_state_dict(masters)
    ids = torch.tensor([[1, 2]])
    assert torch.equal(plain(ids), module(ids))  # at stage 3 unit by unit
    assert _dtypes(module) == {torch.float32}
    with engine.gathered(module, write="all"), torch.no_grad():
        assert _same(module, masters)
        module.head.weight.mul_(1 + 2**-14)  # type: ignore[union-attr, operator]
    masters["head.weight"].mul_(1 + 2**-14)
    assert all(torch.equal(value, masters[name]) for name, value in _whole(engine, module).items())
    if stage < 3:
        assert _same(module, masters)
        module.head.weight.data.mul_(1 + 2**-14)  # type: ignore[union-attr, operator]
        masters["head.weight"].mul_(1 + 2**-14)
    engine.internals.fits.resume()
    assert _dtypes(module) == {torch.float32}
    assert all(torch.equal(value, masters[name]) for name, value in _whole(engine, module).items())
    assert {**engine.stats().memory, "gradients": 0} == {**before, "gradients": 0}
    loss = _train(module, optimizer, rank, 3, 2)
    assert bool(loss.isfinite())
    engine.close()


@pytest.mark.parametrize("stage", STAGES)
def test_a_paused_engine_shows_the_masters_and_goes_on_with_what_was_written(stage: int) -> None:
    worlds.run(_rests, 2, stage, {})


def test_a_paused_engine_with_offload_shows_the_masters(tmp_path: Any) -> None:
    worlds.run(_rests, 2, 1, {"offload": "cpu"})
    worlds.run(_rests, 2, 3, {"offload": {"optimizer": "cpu", "params": "cpu"}})
    worlds.run(_rests, 2, 2, {"offload": {"optimizer": "nvme", "path": str(tmp_path)}})


def _goes_on(rank: int, world: int, stage: int, rests: bool) -> list[float]:
    engine, module, optimizer = _engine(stage, TinyGPT())
    losses = [float(_train(module, optimizer, rank))]
    if rests:
        engine.show_masters()
        engine.internals.fits.pause()
        module(torch.tensor([[1, 2]]))
        engine.internals.fits.resume()
    losses.append(float(_train(module, optimizer, rank, 3, 2)))
    engine.close()
    return losses


@pytest.mark.parametrize("stage", STAGES)
def test_training_goes_on_with_its_bits_after_a_pause(stage: int) -> None:
    assert worlds.run(_goes_on, 2, stage, True) == worlds.run(_goes_on, 2, stage, False)


def _closes(rank: int, world: int, stage: int, how: str) -> set[torch.dtype]:
    engine, module, optimizer = _engine(stage, TinyGPT())
    _train(module, optimizer, rank)
    masters = _whole(engine, module)
    if how == "step":
        engine.show_masters()
        optimizer.step()
        engine.unshard()
    elif how == "unshard":
        engine.unshard()
    elif how == "show":
        engine.show_masters()
        engine.close()
    else:
        engine.close()
    if _dtypes(module) == {torch.float32}:
        assert _same(module, masters)
        module(torch.tensor([[1, 2]])).sum().backward()
    return _dtypes(module)


@pytest.mark.parametrize(
    ("stage", "how", "world"),
    [(0, "close", 2), (3, "close", 1), (2, "unshard", 2), (3, "unshard", 2), (1, "show", 2), (1, "step", 2)],
)
def test_a_closed_engine_leaves_parameters_in_their_own_dtype(stage: int, how: str, world: int) -> None:
    assert worlds.run(_closes, world, stage, how) == [{torch.float32}] * world


def test_what_computes_in_its_own_dtype_has_one_face() -> None:
    engine = ZeroEngine(0)
    engine.shard(nn.Linear(2, 2))
    assert all(buffer.original is None for unit in engine.internals.fits.units for buffer in unit.buffers)
    engine.close()
