"""On a device that runs everything as late as it may, training has the bits of one that runs everything at once."""

from __future__ import annotations

import contextlib
import gc
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.config import ActivationCheckpointing, Communication, MixedPrecision, Offload
from lightning_zero.engine.buffers.home import Home
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.parallel.activation.checkpointing import checkpoint_activations
from lightning_zero.sharding import Sharding
from lightning_zero.storage.copies import Copies, Landing
from tests import worlds
from tests.references import TinyGPT
from tests.sampling import sample
from tests.simulated_device import SimulatedDevice
from tests.simulated_transport import BACKEND

BF16 = MixedPrecision(compute_dtype=torch.bfloat16)
DISK: dict[str, Any] = {"path": tempfile.gettempdir(), "direct": False, "step_device": "cpu"}
PLACEMENTS: dict[str, dict[str, Any]] = {
    **{f"stage{stage}": {"stage": stage} for stage in range(4)},
    **{f"stage{stage}-deferred": {"stage": stage, "step": "deferred"} for stage in range(4)},
    "stage2-early": {"stage": 2, "step": "backward"},
    "stage1-cpu": {"stage": 1, "offload": Offload(optimizer="cpu", step_device="cpu")},
    "stage1-streamed": {"stage": 1, "offload": Offload(optimizer="cpu", step_device="cuda")},
    "stage2-cpu": {"stage": 2, "offload": Offload(optimizer="cpu", step_device="cpu")},
    "stage3-cpu": {"stage": 3, "offload": Offload(optimizer="cpu", step_device="cpu")},
    "stage3-cpu-now": {"stage": 3, "offload": Offload(optimizer="cpu", step_device="cpu"), "step": "now"},
    "stage3-streamed": {"stage": 3, "offload": Offload(optimizer="cpu", step_device="cuda")},
    "stage3-params": {"stage": 3, "offload": Offload(optimizer=None, params="cpu")},
    "stage3-cpu-params": {"stage": 3, "offload": Offload(optimizer="cpu", params="cpu", step_device="cpu")},
    "stage2-nvme": {"stage": 2, "offload": Offload(optimizer="nvme", **DISK)},
    "stage3-nvme": {"stage": 3, "offload": Offload(optimizer="nvme", params="nvme", **DISK)},
    "stage1-recomputed": {"stage": 1, "activations": "offload"},
    "stage3-recomputed": {"stage": 3, "activations": "offload"},
}
NODES: dict[str, dict[str, Any]] = {  # four ranks as two nodes
    "hybrid": {"stage": Sharding(params=2, grads=2)},
    "hybrid-deferred": {"stage": Sharding(params=2, grads=2), "step": "deferred"},
    "hybrid-cpu": {"stage": Sharding(params=2, grads=2), "offload": Offload(optimizer="cpu", step_device="cpu")},
    "hybrid-params": {"stage": Sharding(params=2, grads=2), "offload": Offload(optimizer=None, params="cpu")},
    "secondary": {"stage": Sharding(params=2, grads="world")},
    "secondary-deferred": {"stage": Sharding(params=2, grads="world"), "step": "deferred"},
    "gradients": {"stage": Sharding(grads=2)},
    "gradients-cpu": {"stage": Sharding(grads=2), "offload": Offload(optimizer="cpu", step_device="cpu")},
}
PRECISIONS = {"fp32": None, "bf16": BF16}
SCHEDULES: dict[str, tuple[str, ...]] = {"late": (), "late-copies": ("compute",), "late-compute": ("others",)}
AT_ONCE = ("compute", "others")
ON_HOST = tuple(name for name, options in PLACEMENTS.items() if "offload" not in options)


class _Training:
    """An engine, its optimizer, and what was seen of them."""

    def __init__(
        self, device: str, precision: MixedPrecision | None, activations: str | None = None, **options: Any
    ) -> None:
        torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)  # rank 0's values count
        self.device = device
        self.precision = precision
        module = TinyGPT(depth=2 if activations is None else 4).to(device)
        if activations is not None:
            checkpoint_activations(module, ActivationCheckpointing(policy=activations))  # type: ignore[arg-type]
        communication = Communication(backend=BACKEND if device == "cuda" else None)
        self.engine = ZeroEngine(
            units=["Block"],
            device=torch.device(device),
            precision=precision,
            communication=communication,
            **options,
        )
        self.module: nn.Module = self.engine.shard(module)
        self.optimizer: Optimizer = self.engine.attach(torch.optim.AdamW(module.parameters(), lr=0.01))
        self.seen: list[Tensor] = []

    def batch(self, number: int) -> Tensor:
        rank = dist.get_rank() if dist.is_initialized() else 0
        return torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(100 * rank + number)).to(
            self.device
        )

    def loss(self, number: int, name: str = "training_step") -> Tensor:
        batch = self.batch(number)
        with self.engine.scope(name), torch.autocast(self.device, torch.bfloat16, enabled=self.precision is not None):
            out: Tensor = self.module(batch)
        return out.float().square().mean()

    def backward(self, number: int) -> None:
        loss = self.loss(number)
        loss.backward()
        self.seen.append(loss.detach())

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def plain(one: _Training, step: int) -> None:
    one.backward(step)
    one.step()


def clipped(one: _Training, step: int) -> None:
    one.backward(step)
    one.seen.append(one.engine.clip_grad_norm(one.optimizer, 0.1))
    one.step()


def accumulated(one: _Training, step: int) -> None:
    for last in (False, True):
        with one.engine.microbatch(last):
            one.backward(2 * step + last)
    one.step()


def validated(one: _Training, step: int) -> None:
    """Forwards between the backward and the step, and behind the step."""
    one.backward(step)
    with torch.no_grad():
        one.seen.append(one.loss(step + 1, "validation_step"))
    one.step()
    with torch.no_grad():
        one.seen.append(one.loss(step, "validation_step"))


def gathered(one: _Training, step: int) -> None:
    one.backward(step)
    one.step()
    with one.engine.gathered(one.module, write="all"), torch.no_grad():
        for param in one.module.parameters():
            one.seen.append(param.detach().clone())
            param.mul_(0.99)


PROGRAMS: dict[str, Callable[[_Training, int], None]] = {
    program.__name__: program for program in (plain, clipped, accumulated, validated, gathered)
}


class _Run(NamedTuple):
    """What a run gave.

    Attributes:
        seen: What the program saw, with the weights at the end.
        waits: Of the host, in the last step, by kind and place.
        orders: By kind and place.
    """

    seen: list[Tensor]
    waits: dict[str, int]
    orders: set[str]


def _trained(case: str, eager: tuple[str, ...], deaf_to: str | None = None, *, flushes: bool = False) -> _Run:
    """Train for four steps; ``flushes``: have the third step's disk work done before waits of the last are counted."""
    program, placement, precision = split_case(case)
    with warnings.catch_warnings(), SimulatedDevice(eager, deaf_to) as device:
        warnings.filterwarnings("error", "Parameter .* computes in 16 bits")
        one = _Training("cuda", PRECISIONS[precision], **(PLACEMENTS | NODES)[placement])
        for step in range(4):
            if flushes and step == 3:
                one.engine.flush()
            device.waits.clear()
            PROGRAMS[program](one, step)
        waits = {place: number for place, number in device.waits.items() if not place.endswith("program")}
        one.engine.flush()
        one.seen += [one.engine.full_param(param) for param in one.module.parameters()]
        seen = [value.cpu() for value in one.seen]
        one.engine.close()
    return _Run(seen, waits, set(device.orders))


def _late_differences(rank: int, world: int, case: str, deaf_to: str | None = None) -> list[str]:
    """Return the schedules in which a rank sees something else than on a device that runs everything at once."""
    expected = _trained(case, AT_ONCE).seen
    found = []
    for name, eager in SCHEDULES.items():
        seen = _trained(case, eager, deaf_to).seen
        if not all(torch.equal(mine, theirs) for mine, theirs in zip(seen, expected, strict=True)):
            found.append(name)
    return found


def _runs(program: str, placement: str, precision: str) -> bool:
    """Say whether the combination is one that the engine takes."""
    return not (placement == "stage2-early" and program not in ("plain", "gathered"))


CASES = [
    f"{program}-{placement}-{precision}"
    for program in PROGRAMS
    for placement in PLACEMENTS
    for precision in PRECISIONS
    if _runs(program, placement, precision)
]
_FAST = (
    "clipped-stage3-bf16",
    "validated-stage3-cpu-params-bf16",
    "accumulated-stage2-cpu-fp32",
    "plain-stage3-params-fp32",
    "accumulated-stage2-nvme-fp32",
)


def split_case(case: str) -> tuple[str, str, str]:
    """Return program, placement and precision of a case."""
    program, _, rest = case.partition("-")
    placement, _, precision = rest.rpartition("-")
    return program, placement, precision


@pytest.mark.parametrize("case", sample(CASES, *_FAST))
@pytest.mark.parametrize("world", sample([1, 2], 2))
def test_a_device_that_runs_late_trains_with_the_same_bits(world: int, case: str) -> None:
    assert worlds.run(_late_differences, world, case) == [[]] * world


NODE_CASES = [f"{program}-{placement}-{one}" for program in PROGRAMS for placement in NODES for one in PRECISIONS]


@pytest.mark.parametrize("case", sample(NODE_CASES, "accumulated-hybrid-fp32", "clipped-secondary-deferred-bf16"))
def test_nodes_whose_devices_run_late_train_with_the_same_bits(case: str) -> None:
    assert worlds.run(_late_differences, 4, case) == [[]] * 4


def _distance_from_host(rank: int, world: int, case: str) -> float:
    program, placement, precision = split_case(case)
    one = _Training("cpu", PRECISIONS[precision], **PLACEMENTS[placement])
    for step in range(4):
        PROGRAMS[program](one, step)
    one.engine.flush()
    one.seen += [one.engine.full_param(param) for param in one.module.parameters()]
    seen = _trained(case, AT_ONCE).seen
    return max(float((mine - theirs).abs().max()) for mine, theirs in zip(seen, one.seen, strict=True))


@pytest.mark.parametrize(
    "case",
    sample([case for case in CASES if split_case(case)[1] in ON_HOST and "fp32" in case], "clipped-stage3-fp32"),
)
def test_the_simulated_device_trains_as_the_host(case: str) -> None:
    """Not to the bit: on the host a step goes in chunks, whose ends are not vectorised."""
    assert max(worlds.run(_distance_from_host, 2, case)) < 1e-6


def _normed_late(num_threads: int) -> Tensor:
    """Return the gradient of a bias that is computed when a thread waits in which PyTorch has ``num_threads``."""
    torch.manual_seed(0)
    norm, batch = nn.LayerNorm(6), torch.randn(10, 6)

    def wait() -> None:
        torch.set_num_threads(num_threads)
        torch.cuda.synchronize()

    with SimulatedDevice():
        norm.to("cuda")
        (norm(batch.to("cuda")) * torch.randn(10, 6).to("cuda")).sum().backward()
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
        assert norm.bias.grad is not None
        return norm.bias.grad.cpu()


def test_bits_do_not_depend_on_the_thread_that_waits() -> None:
    """PyTorch sums the gradients of a layer norm in as many parts as the thread has threads."""
    num_threads = torch.get_num_threads()
    try:
        few, many = _normed_late(num_threads), _normed_late(num_threads + 1)
    finally:
        torch.set_num_threads(num_threads)
    assert torch.equal(few, many)


# -- Streams of the program --------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Computes one half in a stream of its own, in PyTorch's order."""

    def __init__(self, side: Any, keep: Callable[[Tensor, Any], None]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self._side, self._keep = side, keep

    def forward(self, x: Tensor) -> Tensor:
        main = torch.cuda.current_stream()
        if x.requires_grad:
            self._keep(x, main)
        self._side.wait_stream(main)
        left: Tensor = self.a(x)
        with torch.cuda.stream(self._side):
            right: Tensor = self.b(x)
        self._keep(right, self._side)
        main.wait_stream(self._side)
        x.record_stream(self._side)
        right.record_stream(main)
        return left + right


def _trained_in_branches(rank: int, world: int, options: dict[str, Any], eager: tuple[str, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    with SimulatedDevice(eager) as device:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        module: Any = nn.Sequential(*(Branches(side, device.keep_streams) for _ in range(2))).to("cuda")
        communication = Communication(backend=BACKEND, prefetch=world - 1)  # 0: each average is copied at once
        engine = ZeroEngine(units=["Branches"], device=torch.device("cuda"), communication=communication, **options)
        module = engine.shard(module)
        optimizer = engine.attach(torch.optim.AdamW(module.parameters(), lr=0.01))
        for step in range(3):
            batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * rank + step)).to("cuda")
            with engine.scope("training_step"):
                loss = module(batch).square().mean()
            device.wait_at_end(loss, side)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.flush()
        weights = [engine.full_param(param).cpu() for param in module.parameters()]
        engine.close()
    return weights


@pytest.mark.parametrize("placement", sample(["stage1", "stage2", "stage2-cpu", "stage3"], "stage2-cpu", "stage3"))
@pytest.mark.parametrize("world", [1, 2])
def test_gradients_that_arrive_on_two_streams_are_summed_in_order(world: int, placement: str) -> None:
    expected = worlds.run(_trained_in_branches, world, PLACEMENTS[placement], AT_ONCE)
    for eager in SCHEDULES.values():
        found = worlds.run(_trained_in_branches, world, PLACEMENTS[placement], eager)
        assert all(torch.equal(a, b) for a, b in zip(found[0], expected[0], strict=True)), eager


class Tied(nn.Module):
    """Uses a weight outside of its module, in two streams."""

    def __init__(self, sides: Sequence[Any]) -> None:
        super().__init__()
        self.embedding, self._sides = nn.Embedding(8, 8), sides

    def forward(self, x: Tensor) -> Tensor:
        main, results = torch.cuda.current_stream(), []
        for side in self._sides:
            side.wait_stream(main)
        for side in self._sides:
            with torch.cuda.stream(side):
                results.append(nn.functional.linear(x, self.embedding.weight))
        for side, result in zip(reversed(self._sides), reversed(results), strict=True):  # the last runs first
            main.wait_stream(side)
            x.record_stream(side)
            result.record_stream(main)
        return results[0] + 2 * results[1]


def _tied(rank: int, world: int, eager: tuple[str, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    with SimulatedDevice(eager):
        sides = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
        engine = ZeroEngine(
            3, units=["Embedding"], device=torch.device("cuda"), communication=Communication(backend=BACKEND)
        )
        module = engine.shard(Tied(sides).to("cuda"))
        found = []
        for step in range(2):
            batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to("cuda")
            with engine.scope("validation_step"), torch.no_grad():
                found.append(module(batch).cpu())
        engine.close()
    return found


@pytest.mark.parametrize("eager", SCHEDULES.values(), ids=SCHEDULES)
def test_a_weight_that_one_stream_has_gathered_is_used_by_another_behind_the_gather(eager: tuple[str, ...]) -> None:
    """Not through its module: nobody sees the second use."""
    expected = worlds.run(_tied, 2, AT_ONCE)[0]
    for found in worlds.run(_tied, 2, eager):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# -- Waits of the host -------------------------------------------------------------------------------------------------


def _waits(rank: int, world: int, case: str) -> dict[str, int]:
    return _trained(case, SCHEDULES["late"], flushes="nvme" in case or "cpu" in case).waits


@pytest.mark.parametrize(
    "case",
    sample(
        [f"clipped-stage{stage}-{name}" for stage in range(4) for name in PRECISIONS],
        *["clipped-stage0-fp32", "clipped-stage1-bf16", "clipped-stage2-fp32", "clipped-stage3-bf16"],
    ),
)
@pytest.mark.parametrize("world", sample([1, 2], 2))
def test_the_host_never_waits_for_a_step_on_the_device(world: int, case: str) -> None:
    assert worlds.run(_waits, world, case) == [{}] * world


# By buffer, in a step with offload: what the host steps has to be there, and below stage 3 what it has rounded is sent.
WAITS = {
    "stage1-cpu": 3,
    "stage2-cpu": 3,
    "stage3-cpu": 1,
    "stage3-cpu-now": 1,
    "stage3-streamed": 2,
    "stage3-params": 2,
    "stage3-cpu-params": 1,
    "stage2-nvme": 4,
    "stage3-nvme": 5,
}
NUM_BUFFERS = {"fp32": 3, "bf16": 6}


@pytest.mark.parametrize(
    "case",
    sample(
        [f"{program}-{name}-{one}" for program in ("clipped", "accumulated") for name in WAITS for one in PRECISIONS],
        "accumulated-stage3-cpu-fp32",
        "clipped-stage2-cpu-bf16",
        "accumulated-stage2-nvme-fp32",
    ),
)
def test_the_host_waits_for_few_copies_of_offloaded_buffers(case: str) -> None:
    _, placement, precision = split_case(case)
    for waits in worlds.run(_waits, 2, case):
        assert sum(waits.values()) <= WAITS[placement] * NUM_BUFFERS[precision] + 2, waits


@pytest.mark.parametrize("placement", ["stage1-cpu", "stage1-streamed"])
def test_the_host_waits_for_no_average_on_its_way_to_a_step_below_stage_2(placement: str) -> None:
    """A thread does, or a step on the device, where the average is already."""
    for waits in worlds.run(_waits, 2, f"accumulated-{placement}-fp32"):
        assert not [place for place in waits if "bring_gradient" in place or place.startswith("pageable")]


def _gathers_of_masters(rank: int, world: int) -> list[bool]:
    """Return whether masters were gathered where they are, for a device that is named without its number."""
    found = []
    gather = Home.gather_whole

    def note(*args: Any) -> Any:
        found.append(gather(*args))
        return found[-1]

    with SimulatedDevice(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Home, "gather_whole", note)
        one = _Training("cuda", BF16, stage=0)
        plain(one, 0)
        one.engine.internals.checkpoints.complete_masters()
        one.engine.close()
    return [pending is not None for pending in found]


def test_a_device_without_a_number_is_that_of_its_tensors() -> None:
    """At stage 0 every gather of masters took a copy of them."""
    for found in worlds.run(_gathers_of_masters, 2):
        assert found
        assert all(found)


def _waits_in_backward(rank: int, world: int, placement: str) -> list[str]:
    """Return where the host waits in a backward of which the gradients go to disks."""
    with SimulatedDevice() as device:
        one = _Training("cuda", BF16, **PLACEMENTS[placement])
        for step in range(3):
            loss = one.loss(step)
            device.waits.clear()
            loss.backward()
            found = [place for place in device.waits if not place.endswith("program")]
            one.step()
        one.engine.close()
    return [place for place in found if "disk.py fetch" not in place and "disk.py finish" not in place]


@pytest.mark.parametrize("placement", sample(["stage2-nvme", "stage3-nvme"], "stage2-nvme"))
def test_the_host_waits_in_no_backward_for_gradients_on_their_way_to_disks(placement: str) -> None:
    """For parameters that are read from disks it does."""
    assert worlds.run(_waits_in_backward, 2, placement) == [[], []]


def _warned(rank: int, world: int, is_seen: bool, when: str) -> list[str]:
    with SimulatedDevice(["others"]) as device, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        one = _Training("cuda", BF16, stage=1, step=when)
        for step in range(3):
            device.waits.clear()
            if when == "auto":
                one.backward(step)
            with one.engine.scope("training_step"):
                for param in one.module.parameters():
                    values = param.data
                    if not is_seen:  # a tensor whose versions are its own
                        memory = values.untyped_storage(), values.storage_offset(), values.shape
                        values = torch.empty(0, dtype=values.dtype, device=values.device).set_(*memory)
                    values.mul_(0.5)
            if when == "backward":
                one.backward(step)
            one.step()
            assert all(place.endswith("program") for place in device.waits)
        one.engine.close()
    return [str(one.message) for one in caught if "computes in 16 bits" in str(one.message)]


@pytest.mark.parametrize(
    ("is_seen", "when", "warnings_by_rank"),
    [(True, "auto", [1, 0]), (False, "auto", [1, 1]), (False, "backward", [1, 1])],
)
def test_a_write_in_16_bits_on_a_device_is_told_of_without_a_wait(
    is_seen: bool, when: str, warnings_by_rank: list[int]
) -> None:
    """Writes that versions show are told by rank 0, and others by each rank whose values have changed."""
    assert [len(one) for one in worlds.run(_warned, 2, is_seen, when)] == warnings_by_rank


def _answers(rank: int, world: int) -> list[int]:
    """Return the size of each copy to the host that a step makes."""
    sizes: list[int] = []

    down = Copies.down

    def count(copies: Copies, host: Tensor, tensor: Tensor) -> Landing:
        sizes.append(host.numel())
        return down(copies, host, tensor)

    with SimulatedDevice(), pytest.MonkeyPatch.context() as patch:
        one = _Training("cuda", BF16, stage=1)
        one.backward(0)
        patch.setattr(Copies, "down", count)
        one.step()
        one.engine.close()
    return sizes


def test_a_step_asks_once_for_the_writes_into_all_buffers() -> None:
    assert worlds.run(_answers, 1) == [[NUM_BUFFERS["bf16"] // 2]]


# -- Deferred steps ----------------------------------------------------------------------------------------------------


def _num_deferred(rank: int, world: int, device: str, keeps: str) -> list[int]:
    """Return how many buffers' steps are deferred, before the program looks at the states, then, and behind it."""
    with SimulatedDevice(AT_ONCE) if device == "cuda" else contextlib.nullcontext():
        one = _Training(device, None, stage=2, offload=Offload(optimizer="cpu", step_device="cpu"))
        counts: list[int] = []
        kept: Any = None
        for step in range(5):
            one.backward(step)
            one.step()
            counts.append(len(one.engine._state.attached.of(one.optimizer)._deferred.buffers))
            if step == 1:
                kept = LOOKS[keeps](one.optimizer)
            elif step == 2:
                kept = None
        del kept
        one.engine.close()
    return counts


LOOKS: dict[str, Callable[[Optimizer], Any]] = {
    "nothing": lambda optimizer: None,
    "saved": lambda optimizer: len(optimizer.state_dict()),
    "seen": lambda optimizer: sum(len(state) for state in optimizer.state.values()),
    "a-moment": lambda optimizer: next(iter(optimizer.state.values()))["exp_avg"],
    "a-view": lambda optimizer: next(iter(optimizer.state.values()))["exp_avg"].view(-1),
    "a-state": lambda optimizer: next(iter(optimizer.state.values())),
    "all": lambda optimizer: optimizer.state,
    "a-dictionary": lambda optimizer: optimizer.state_dict(),
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("keeps", sample(LOOKS, "seen", "a-moment", "a-dictionary"))
def test_steps_are_deferred_unless_the_program_keeps_what_they_change(keeps: str, device: str) -> None:
    is_kept = keeps not in ("nothing", "saved", "seen")
    for counts in worlds.run(_num_deferred, 2, device, keeps):
        assert counts == [3, 3, 0 if is_kept else 3, 3, 3]


# -- Bytes on the device -----------------------------------------------------------------------------------------------


def _bytes_at_the_end_of_backward(rank: int, world: int, case: str) -> tuple[int, dict[str, int]]:
    """Return the bytes that are alive on the device, and those that the engine knows of."""
    _, placement, precision = split_case(case)
    with SimulatedDevice(AT_ONCE) as device:
        one = _Training("cuda", PRECISIONS[precision], **PLACEMENTS[placement])
        plain(one, 0)
        for last in (False, True):
            with one.engine.microbatch(last):
                one.backward(1 + last)
        one.seen.clear()
        gc.collect()
        device.sweep()
        counted = device.num_bytes
        memory = dict(one.engine.stats().memory)
        one.step()
        one.engine.close()
    return counted, memory


@pytest.mark.parametrize(
    "case",
    sample(
        [f"plain-{name}-{one}" for name in PLACEMENTS for one in PRECISIONS if "early" not in name],
        "plain-stage2-cpu-fp32",
        "plain-stage3-bf16",
    ),
)
def test_bytes_on_the_device_are_those_of_the_accounts(case: str) -> None:
    for counted, memory in worlds.run(_bytes_at_the_end_of_backward, 2, case):
        assert abs(counted - sum(memory.values())) <= 128  # scalars
        offload = PLACEMENTS[split_case(case)[1]].get("offload", Offload(optimizer=None))
        is_away = offload.optimizer is not None and PLACEMENTS[split_case(case)[1]]["stage"] >= 2
        assert (memory["gradients"] == 0) == is_away


# -- Mutants: each order, not heard ------------------------------------------------------------------------------------

ORDERS: dict[str, str] = {  # and a case that shows it
    "record_stream: engine/buffers/home.py _send": "accumulated-stage2-cpu-fp32",
    "record_stream: engine/buffers/original.py send": "plain-stage1-bf16",
    "record_stream: parallel/activation/checkpointing.py _to_device": "plain-stage1-recomputed-fp32",
    "synchronize: engine/buffers/home.py await_uploads": "validated-stage3-cpu-params-fp32",
    "synchronize: engine/buffers/home.py await_brought": "plain-stage1-cpu-fp32",
    "synchronize: engine/buffers/home.py await_gradient": "accumulated-stage2-cpu-fp32",
    "synchronize: engine/optim/streamed.py step_streamed": "accumulated-stage3-streamed-fp32",
    "synchronize: storage/host.py wait": "accumulated-stage3-cpu-fp32",
    "wait of a collective: engine/buffers/whole.py fill": "plain-stage0-fp32",
    "wait of a collective: engine/buffers/buffer.py show_original": "gathered-stage1-bf16",
    "wait of a collective: engine/optim/optimizer.py _publish": "accumulated-stage1-fp32",
    "wait of a collective: engine/runtime/reduction.py _drain_nodes": "accumulated-stage0-deferred-fp32",
    "wait of a collective: engine/runtime/reduction.py _settle": "accumulated-stage0-deferred-fp32",
    "wait of a collective: engine/buffers/sharded_gradient.py over_ranks": "clipped-stage1-deferred-fp32",
    "wait of a collective: engine/units/unit.py wait": "accumulated-stage1-deferred-fp32",
    "wait of a collective: engine/access/gathered.py _whole": "accumulated-stage1-deferred-fp32",
    "wait_event: engine/buffers/home.py gather_into": "accumulated-stage3-cpu-params-bf16",
    "wait_event: engine/buffers/home.py fetch_gradient": "accumulated-stage2-cpu-fp32",
    "wait_event: engine/units/unit.py wait": "plain-stage3-params-fp32",
    "wait_event: engine/buffers/original.py send": "plain-stage1-bf16",
    "wait_event: engine/buffers/rounding.py _send": "validated-stage3-cpu-now-fp32",
    "wait_event: engine/buffers/rounding.py land": "accumulated-stage3-cpu-fp32",
    "wait_event: engine/optim/streamed.py step_streamed": "validated-stage3-streamed-fp32",
    "wait_event: parallel/activation/checkpointing.py _to_host": "plain-stage1-recomputed-fp32",
    "wait_event: parallel/activation/checkpointing.py present": "plain-stage1-recomputed-fp32",
    "wait_event: engine/buffers/home.py _send": "accumulated-stage2-cpu-fp32",
    "wait_event: engine/buffers/home.py add_gradient": "accumulated-stage2-cpu-fp32",
    "wait_event: storage/downloads.py start": "plain-stage2-nvme-fp32",
    "record_stream: storage/downloads.py start": "plain-stage2-nvme-bf16",
    "synchronize: storage/downloads.py finish": "plain-stage3-nvme-fp32",
}
NODE_ORDERS = {  # that there are with nodes only
    "wait of a collective: engine/buffers/stepped.py keep": "accumulated-hybrid-fp32",
    "wait of a collective: engine/runtime/reduction.py _drain_over_nodes": "accumulated-hybrid-fp32",
    "wait of a collective: engine/runtime/reduction.py _start_second_half": "accumulated-hybrid-fp32",
}
ALONE = {"wait_event: engine/units/unit.py wait"}  # among several ranks the wait for the gather is one for the copy
# Where this is asked for, the device waits for the copy before the memory is given back, whatever the program does.
REDUNDANT = {
    "record_stream: engine/buffers/home.py bring_gradient",
    "record_stream: engine/buffers/home.py fetch_gradient",
    "record_stream: engine/buffers/rounding.py _send",
    "record_stream: parallel/activation/checkpointing.py _to_host",
}
OF_NCCL = {"wait_event: engine/buffers/home.py bring_gradient"}  # a result of a collective, there here once waited for
IN_PLACE = {  # shown by what changes inputs in place, in tests/parallel/activation/test_checkpointing.py
    "wait_event: parallel/activation/checkpointing.py _hold_back_writes",
    "wait_event: parallel/activation/checkpointing.py _to_device",
}


def _cases_by_order(rank: int, world: int, cases: list[str]) -> dict[str, list[str]]:
    """Return the cases in which something is asked to wait for something else, by kind and place."""
    found: dict[str, list[str]] = {}
    for case in cases:
        for order in _trained(case, AT_ONCE).orders:
            found.setdefault(order, []).append(case)
    return found


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_no_order_that_the_package_asks_for_is_without_a_mutant() -> None:
    known = set(ORDERS) | REDUNDANT | OF_NCCL | IN_PLACE
    found = worlds.run(_cases_by_order, 2, CASES, timeout_s=1100)
    assert [set(one) for one in found] == [known] * 2
    found = worlds.run(_cases_by_order, 4, NODE_CASES, timeout_s=1100)
    assert [set(one) - known for one in found] == [set(NODE_ORDERS)] * 4


@pytest.mark.parametrize(
    "order",
    sample(
        ORDERS | NODE_ORDERS,
        "record_stream: engine/buffers/home.py _send",
        "wait of a collective: engine/units/unit.py wait",
        "wait_event: engine/buffers/home.py add_gradient",
    ),
)
def test_an_order_that_is_not_heard_is_missed(order: str) -> None:
    try:
        world = 1 if order in ALONE else 4 if order in NODE_ORDERS else 2
        found = worlds.run(_late_differences, world, (ORDERS | NODE_ORDERS)[order], order)
    except Exception:  # what is not a number trips somebody on the way
        return
    assert any(found)
