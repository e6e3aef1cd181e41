"""``policy="auto"``: what is counted, what is chosen, and that nothing else changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.config import ActivationCheckpointing
from lightning_zero.lightning.strategy import ZeroStrategy
from lightning_zero.parallel.activation import forecast as activations
from lightning_zero.parallel.activation.checkpointing import checkpoint_activations, forecast_of
from lightning_zero.parallel.activation.forecast import Forecast, KeptBytes
from lightning_zero.storage.copies import DeviceMemory
from tests import worlds
from tests.lightning_programs import Net, assert_equal, loader, seeded, trainer, weights
from tests.parallel.activation.test_checkpointing import Model, _kept_per_block

CHOICES = ("none", "selective", "full", "offload")


def _auto(budget_bytes: int = 0) -> ActivationCheckpointing:
    return ActivationCheckpointing(policy="auto", budget_bytes=budget_bytes)


def _step(model: nn.Module, tokens: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(tokens).square().mean().backward()
    return [param.grad for param in model.parameters() if param.grad is not None]


def _forecast(model: nn.Module) -> Forecast:
    forecast = forecast_of(model)
    assert forecast is not None
    return forecast


def _itself(value: int) -> int:
    return value


# -- What is counted ---------------------------------------------------------------------------------------------------


def test_forecast_is_what_the_policies_keep() -> None:
    tokens = torch.randint(0, 13, (4, 32))
    model = Model(12)
    checkpoint_activations(model, _auto())
    for _ in range(2):
        _step(model, tokens)
    needed = _forecast(model).needed()
    for name, nbytes in zip(CHOICES[:3], needed[:3], strict=True):
        options = None if name == "none" else ActivationCheckpointing(policy=name)  # type: ignore[arg-type]
        assert nbytes == pytest.approx(12 * _kept_per_block(options, tokens), rel=0.05), name
    assert needed[3] == 0


def test_parameters_are_not_counted_and_every_class_is() -> None:
    model = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.GELU()), nn.Linear(64, 64), nn.Linear(64, 64)])
    checkpoint_activations(model, ActivationCheckpointing(modules=["Sequential", "Linear"], policy="auto"))
    x = torch.randn(2, 64)
    for module in model:
        x = module(x)
    one = 2 * 64 * 4
    # `Linear` keeps its result, `Sequential` that of its `Linear` as well. The third module is the first that waits.
    assert _forecast(model).needed() == (2 * one, 2 * one, one, 0)


# -- What is chosen ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "policy"),
    [(3000, "none"), (2999, "selective"), (600, "selective"), (599, "full"), (150, "full"), (149, "offload")],
)
def test_the_cheapest_policy_that_fits_is_taken(budget: int, policy: str) -> None:
    forecast = Forecast(budget, bool)
    forecast._kept = {nn.Linear: KeptBytes(none=1000, selective=200, full=50), nn.Tanh: KeptBytes(none=900)}
    forecast.note_waiting(3)
    assert forecast.settle(_itself) is None  # the states of the optimizer were not there yet
    assert forecast.policy is None
    line = forecast.settle(_itself)
    assert forecast.policy == policy
    assert line is not None
    assert line.startswith(f"activation checkpointing: 'auto' is '{policy}'. 3 calls would keep, in MiB: none 0.0,")
    assert forecast.settle(_itself) is None


def test_ranks_take_the_policy_of_the_one_with_the_least_room() -> None:
    forecast = Forecast(10**9, bool)
    forecast._kept = {nn.Linear: KeptBytes(none=1000)}
    for _ in range(2):
        forecast.settle(lambda mine: max(mine, CHOICES.index("full")))
    assert forecast.policy == "full"


def test_nothing_is_chosen_before_a_call_was_counted() -> None:
    model = Model(2)
    checkpoint_activations(model, _auto())
    forecast = _forecast(model)
    assert [forecast.settle(_itself) for _ in range(4)] == [None] * 4
    _step(model, torch.randint(0, 13, (1, 4)))
    assert forecast.settle(_itself) is not None


def test_free_memory_is_that_of_the_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was that at PyTorch's peak so far: of set-up and the sanity check too, unless `ZeroMonitor` had reset it."""
    peaks = {"so far": 90}
    monkeypatch.setattr(activations, "memory_of", lambda device: DeviceMemory(100, 60, 40, 10))
    monkeypatch.setattr(activations, "most_allocated", lambda device: peaks["so far"])
    monkeypatch.setattr(activations, "reset_most_allocated", lambda device: peaks.update({"so far": 10}))
    forecast = Forecast(None, bool)
    forecast._kept = {nn.Linear: KeptBytes(none=41, selective=36)}
    for most in (60, 50):
        forecast.begin_batch(torch.device("cuda"))
        peaks["so far"] = most
        forecast.note_peak()
        peaks["so far"] = 95  # of a validation
        forecast.begin_batch(torch.device("cuda"))  # of the last micro-batch
        forecast.settle(_itself)
    assert forecast.policy == "selective"  # nine tenths of 40
    peaks["so far"] = 70
    forecast.begin_batch(torch.device("cuda"))
    assert peaks["so far"] == 70  # is the program's again


def test_a_given_budget_leaves_the_peak_of_pytorch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "reset_most_allocated", lambda device: pytest.fail("measured anew"))
    Forecast(1, bool).begin_batch(torch.device("cuda"))


def test_the_trainer_measures_micro_batches_and_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    for name in ("begin_batch", "note_peak", "settle"):
        monkeypatch.setattr(Forecast, name, lambda *_, name=name, **__: told.append(name))
    monkeypatch.setattr(Net, "validation_step", lambda *_: told.append("validation"))
    strategy = ZeroStrategy(stage=2, activation_checkpointing=_auto(10**9))
    fitted = trainer(
        0, 1, strategy, max_steps=2, accumulate_grad_batches=2, num_sanity_val_steps=1, limit_val_batches=1
    )
    fitted.fit(seeded(Net), loader(0, 1), loader(0, 1))
    batch = ["begin_batch", "note_peak"]
    assert told[: told.index("validation") + 1] == ["validation"]
    assert told[1 : 1 + 10] == [*batch, *batch, "settle"] * 2


class ByHand(Net):
    """Steps its optimizers in a batch, the last one in every second batch only."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.policies: list[str | None] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        for optimizer in (first, second) if batch_idx % 2 else (first,):
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()
            self.policies.append(_forecast(self).policy)

    def configure_optimizers(self) -> Any:
        half = len(params := list(self.parameters())) // 2
        return [torch.optim.AdamW(part) for part in (params[:half], params[half:])]


def test_every_optimizer_makes_two_steps_before_the_choice() -> None:
    """Steps of all optimizers counted, so the policy was chosen in the first batch, without the last one's states."""
    module = ByHand()
    strategy = ZeroStrategy(stage=2, activation_checkpointing=_auto(10**9))
    trainer(0, 1, strategy, max_epochs=1, limit_train_batches=4).fit(module, loader(0, 1))
    assert module.policies == [None] * 5 + ["none"]


def test_an_optimizer_that_does_not_step_is_waited_for_20_steps() -> None:
    forecast = Forecast(10**9, bool)
    forecast.trace(nn.Linear(2, 2), nn.Linear(2, 2), torch.ones(2))
    lines = [forecast.settle(int, stepped=0, num_optimizers=2) for _ in range(20)]
    assert lines[:-1] == [None] * 19
    assert "Without the states of optimizer(s) [1], which have not stepped twice" in str(lines[-1])


class Overflows(Net):
    """Has infinite gradients in its first two batches."""

    def __init__(self) -> None:
        super().__init__()
        self.policies: list[str | None] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.policies.append(_forecast(self).policy)
        return super().training_step(batch, batch_idx) * (torch.inf if batch_idx < 2 else 1.0)


def test_a_step_that_a_loss_scale_skips_makes_no_states_and_does_not_count() -> None:
    """Two overflows at the start made the choice, with the memory of the optimizer's states counted as free."""
    module = Overflows()
    strategy = ZeroStrategy(stage=2, activation_checkpointing=_auto(10**9))
    options: dict[str, Any] = {"max_epochs": 1, "limit_train_batches": 5, "precision": "16-true"}
    trainer(0, 1, strategy, **options).fit(module, loader(0, 1))
    assert module.policies == [None] * 4 + ["none"]


# -- Nothing else changes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", CHOICES)
def test_gradients_have_the_same_bits_before_and_after_the_choice(policy: str) -> None:
    tokens = torch.randint(0, 13, (2, 8))
    plain, model = Model(3), Model(3)
    model.load_state_dict(plain.state_dict())
    checkpoint_activations(model, _auto())
    expected = _step(plain, tokens)
    for turn in range(4):
        if turn == 2:
            _forecast(model).policy = policy  # type: ignore[assignment]
        found = _step(model, tokens)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


def test_a_copy_of_a_model_chooses_for_itself() -> None:
    model = Model(2)
    checkpoint_activations(model, _auto())
    other = copy.deepcopy(model)
    _forecast(model).policy = "full"
    assert _forecast(other).policy is None
    stand_ins: list[Any] = [vars(block)["forward"] for block in other.blocks]
    assert len({id(one.forecast) for one in stand_ins}) == 1


def _fit(rank: int, world: int) -> None:
    plain = trainer(rank, world, 3, max_epochs=1)
    plain.fit(seeded(Net), loader(rank, world))
    for budget, policy in ((10**9, "none"), (0, "offload")):
        # The rank with less room decides.
        options = _auto(budget if rank else 10**9)
        fitted = trainer(rank, world, ZeroStrategy(stage=3, activation_checkpointing=options), max_epochs=1)
        fitted.fit(seeded(Net), loader(rank, world))
        assert_equal(weights(fitted), weights(plain))
        assert _forecast(fitted.lightning_module).policy == policy
    with pytest.raises(ValueError, match="`policy='auto'` of `activation_checkpointing` needs `budget_bytes` on `cpu`"):
        trainer(rank, world, ZeroStrategy(activation_checkpointing={"policy": "auto"})).fit(Net(), loader(rank, world))


def test_the_trainer_settles_after_two_steps_on_all_ranks_alike() -> None:
    worlds.run(_fit, 2)
