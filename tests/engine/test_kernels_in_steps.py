"""Which kernels step on a GPU: seen on the simulated device, where an op runs its reference."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.config import Communication, MixedPrecision, Offload
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.optim import optimizer as engine_optimizer
from lightning_zero_ops import adamw, registry, selfcheck
from tests import worlds
from tests.references import TinyGPT
from tests.sampling import sample
from tests.simulated_device import SimulatedDevice
from tests.simulated_transport import BACKEND

BF16 = MixedPrecision(compute_dtype=torch.bfloat16)
PRECISIONS = {"fp32": None, "bf16": BF16}
stages = pytest.mark.parametrize("stage", sample((0, 1, 2, 3), 2))


class _Trained:
    """Weights after some steps on the simulated device, and what was called in them."""

    def __init__(
        self,
        precision: str = "fp32",
        stage: int = 2,
        change: Callable[[torch.optim.Optimizer, int], None] = lambda optimizer, step: None,
        steps: int = 4,
        options: dict[str, Any] | None = None,
        **engine_options: Any,
    ) -> None:
        with (
            SimulatedDevice() as device,
            patch.object(adamw, "pytorch_step_", wraps=adamw.pytorch_step_) as plain,
            patch.object(adamw, "kernel_step_", wraps=adamw.kernel_step_) as kernel,
        ):
            worlds.seed()
            engine = ZeroEngine(
                stage, units=["Block"], device=torch.device("cuda"), precision=PRECISIONS[precision],
                communication=Communication(backend=BACKEND), **engine_options,
            )  # fmt: skip
            module = engine.shard(TinyGPT().to("cuda"))
            self.made = torch.optim.AdamW(module.parameters(), lr=0.01, **options or {"fused": True})
            optimizer = engine.attach(self.made)
            selfcheck.kernels_agree(torch.device("cuda"))  # norms ask it, and the first answer steps once
            plain.reset_mock()
            kernel.reset_mock()
            for step in range(steps):
                device.waits.clear()
                self._backward(engine, module, step)
                engine.clip_grad_norm(optimizer, 0.1)
                optimizer.step()
                self.waits = {place: n for place, n in device.waits.items() if not place.endswith("program")}
                change(optimizer, step)
                optimizer.zero_grad()
            engine.flush()
            self.counters = [state["step"].device.type for state in optimizer.state.values()]
            self.numbers = [int(state["step"].cpu().item()) for state in optimizer.state.values()]
            self.num_plain, self.num_kernel = plain.call_count, kernel.call_count
            outs = [call.kwargs["out"] for call in plain.call_args_list + kernel.call_args_list]
            self.rounded_on = {out.device.type for out in outs if out is not None}
            self.weights: list[Tensor] = [engine.full_param(param).cpu() for param in module.parameters()]
            engine.close()

    def _backward(self, engine: ZeroEngine, module: torch.nn.Module, step: int) -> None:
        ids = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(100 * dist.get_rank() + step))
        with engine.scope("training_step"), torch.autocast("cuda", torch.bfloat16):
            loss = module(ids.to("cuda")).float().square().mean()
        loss.backward()


def _equal(one: _Trained, other: _Trained) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.weights, other.weights, strict=True))


# -- Fused optimizers --------------------------------------------------------------------------------------------------


def _fused(rank: int, world: int, stage: int, precision: str) -> None:
    one, other = (_Trained(precision, stage, options={"fused": fused}) for fused in (True, None))
    assert one.num_plain + one.num_kernel == other.num_plain + other.num_kernel > 0
    assert set(one.counters) == {"cuda"}  # as with PyTorch's own step
    assert set(other.counters) == {"cpu"}
    assert one.numbers == other.numbers
    assert set(one.numbers) == {4}
    assert one.waits == {}
    assert _equal(one, other)


@stages
@pytest.mark.parametrize("precision", PRECISIONS)
def test_fused_adamw_on_a_gpu_steps_buffers_and_the_host_never_waits(stage: int, precision: str) -> None:
    worlds.run(_fused, 2, stage, precision)


def _count_on(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Count, assign and load numbers of steps behind the engine's back."""
    if step == 0:
        for state in optimizer.state.values():
            state["step"].fill_(6.0)
    elif step == 1:
        for state in optimizer.state.values():
            state["step"] = state["step"] + 3.0
    elif step == 2:
        optimizer.load_state_dict(optimizer.state_dict())


def _counted(rank: int, world: int) -> None:
    one, other = (_Trained(change=_count_on, options={"fused": fused}) for fused in (True, None))
    assert one.numbers == other.numbers
    assert set(one.numbers) == {12}
    assert _equal(one, other)
    assert not _equal(one, _Trained())


def test_a_number_of_steps_that_is_written_on_a_gpu_counts() -> None:
    worlds.run(_counted, 2)


# -- Which kernel ------------------------------------------------------------------------------------------------------

PLACEMENTS: dict[str, dict[str, Any]] = {
    "device": {},
    "deferred": {"step": "deferred"},
    "streamed": {"offload": Offload(optimizer="cpu", step_device="cuda")},
    "host": {"offload": Offload(optimizer="cpu", step_device="cpu")},
}


def _which(rank: int, world: int, precision: str, placement: str) -> None:
    one = _Trained(precision, 2, **PLACEMENTS[placement])
    assert (one.num_kernel > 0) == (precision == "bf16" and placement != "host")
    assert one.num_plain > 0  # norms compute in fp32 under autocast


@pytest.mark.parametrize("placement", sample(PLACEMENTS, "device", "streamed"))
@pytest.mark.parametrize("precision", PRECISIONS)
def test_units_in_16_bits_are_stepped_on_a_gpu_by_the_kernel_and_fp32_by_pytorch(
    precision: str, placement: str
) -> None:
    worlds.run(_which, 2, precision, placement)


def _rounded(rank: int, world: int, pin_memory: bool) -> None:
    offload = Offload(optimizer="cpu", params="cpu", step_device="cuda", pin_memory=pin_memory)
    one, other = _Trained("bf16", 3, offload=offload), _Trained("bf16", 3)
    assert one.num_kernel > 0
    assert one.rounded_on == {"cuda"}  # a kernel cannot write host memory that is not locked
    assert _equal(one, other)


@pytest.mark.parametrize("pin_memory", sample([True, False], False), ids=["locked", "pageable"])
def test_steps_on_a_gpu_round_there_where_parameters_are_offloaded_too(pin_memory: bool) -> None:
    worlds.run(_rounded, 2, pin_memory)


def _on_one_rank(rank: int, world: int) -> None:
    with patch.object(engine_optimizer, "kernels_agree", lambda device: dist.get_rank() == 0):
        dist.barrier()
        assert _Trained("bf16", 0, steps=2).num_kernel == 0
        dist.barrier()


def test_a_kernel_that_runs_on_some_ranks_only_is_used_by_none() -> None:
    worlds.run(_on_one_rank, 2)


# -- The check ---------------------------------------------------------------------------------------------------------


def _broken(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")


def _wrong(param: Tensor, *args: Any, **kwargs: Any) -> None:
    param.add_(1.0)


@contextlib.contextmanager
def _anew() -> Iterator[None]:
    """Forget what was checked, before and behind."""
    selfcheck._ANSWERS.clear()
    try:
        yield
    finally:
        selfcheck._ANSWERS.clear()


def _checked(rank: int, world: int, kernel: Callable[..., None], message: str) -> None:
    with (
        _anew(),
        SimulatedDevice(),
        patch.object(adamw, "kernel_step_", kernel),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        assert not selfcheck.kernels_agree(torch.device("cuda"))
        assert not selfcheck.kernels_agree(torch.device("cuda", 0))
    (found,) = [str(one.message) for one in caught if "Triton" in str(one.message)]
    assert "not used on cuda:0" in found
    assert message in found


@pytest.mark.parametrize(
    ("kernel", "message"), [(_broken, "RuntimeError: Failed to find C compiler"), (_wrong, "`param` of an AdamW step")]
)
def test_a_kernel_that_fails_or_differs_is_not_used_and_a_warning_says_why(
    kernel: Callable[..., None], message: str
) -> None:
    worlds.run(_checked, 1, kernel, message)


def _good(rank: int, world: int) -> None:
    with _anew(), SimulatedDevice():
        assert selfcheck.kernels_agree(torch.device("cuda"))
    assert not selfcheck.kernels_agree(torch.device("cpu"))


def test_kernels_that_agree_are_used() -> None:
    worlds.run(_good, 1)


def _launches(name: str) -> str:
    launch_or_compute = registry._checked(lambda *args: "kernel", lambda *args: "reference")
    answer: str = launch_or_compute(torch.empty(0, device=name), 1)
    return answer


def _asked_again(rank: int, world: int) -> None:
    """The check calls ops, which ask it whether to launch."""

    def launch(*args: Any, **kwargs: Any) -> None:
        assert selfcheck.kernels_agree(torch.device("cuda", 0))
        adamw.pytorch_step_(*args, **kwargs)

    with _anew(), SimulatedDevice(), patch.object(adamw, "kernel_step_", launch):
        assert selfcheck.kernels_agree(torch.device("cuda"))


def test_the_check_launches_kernels() -> None:
    worlds.run(_asked_again, 1)


@pytest.mark.parametrize(("agree", "expected"), [(True, "kernel"), (False, "reference")])
def test_an_op_runs_its_reference_where_kernels_fail(agree: bool, expected: str) -> None:
    """Without a C compiler a patched model raised, and a report said that PyTorch's operations were used."""
    assert [selfcheck.kernels_agree] == registry.KERNEL_CHECKS
    with patch.object(registry, "KERNEL_CHECKS", [lambda device: agree]):
        assert _launches("cpu") == expected
    assert _launches("cpu") == "reference"


@pytest.mark.gpu
def test_kernels_agree_on_this_gpu() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert selfcheck.kernels_agree(torch.device("cuda"))
