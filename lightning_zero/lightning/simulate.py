"""``simulate_step``: a training step of one rank of any world, by the strategy and the Trainer, in one process.

Note [What runs]
    The Trainer fits the module with the strategy, for three steps, on PyTorch's fake process group, and operations
    compute nothing (``DryRun``). The first step makes states and the second one learns the order of gathers at stages 1
    and 2, whose first forward needs none; the third is like every later one. From the begin of its first batch to the
    end of its last its calls go into a ledger and its operations to a clock.
"""

from __future__ import annotations

import copy
import gc
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn

from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.optim.methods import needs_closure
from lightning_zero.forecast.clock import Clock, MachineRates
from lightning_zero.forecast.dry_run import DryRun
from lightning_zero.forecast.live_bytes import Moment, replaced
from lightning_zero.forecast.rehearsal import LOSS_SCALE, count_states, host_apart, kinds_at, pretended_world
from lightning_zero.forecast.simulation import Sample, Simulation
from lightning_zero.forecast.stage_processes import run_stages
from lightning_zero.lightning.forecast_options import (
    BUILDING_HOOKS,
    Optimizers,
    accumulation_of,
    check_memory,
    new_module,
    new_precision,
    on_cpu,
    precision_of,
    refuse_unforecast,
    seeded,
    told_steps,
    without_meta,
)
from lightning_zero.lightning.precision import ZeroStep
from lightning_zero.lightning.simulated_gpu import assumptions, simulated_gpu
from lightning_zero.lightning.simulated_stages import ranks_of_copy, staged
from lightning_zero.lightning.strategy import ZeroStrategy
from lightning_zero.lightning.trials import trials_with_values
from lightning_zero.storage.copies import Copies, Landing
from lightning_zero.trees import tree_map_only

__all__ = ["simulate_copy", "simulate_step"]

_LARGEST_NODE = 8
_NUM_STEPS = 3
_LOGGERS = ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero")


def simulate_step(
    module: pl.LightningModule | Callable[[], pl.LightningModule],
    strategy: ZeroStrategy | None = None,
    *,
    world_size: int,
    rank: int = 0,
    batch: Any = None,
    optimizer: Optimizers | None = None,
    precision: str | None = None,
    accelerator: str = "gpu",
    ranks_per_node: int | None = None,
    accumulate_grad_batches: int = 1,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str | None = None,
    rates: MachineRates | None = None,
    device_memory: int | None = None,
) -> Simulation:
    """Simulate a training step of one rank: its calls in order, its memory over time, and a modelled time.

    The Trainer trains the module with the strategy for three steps, as one rank of a world whose other ranks are
    pretended. No memory is allocated for its tensors, nothing is computed, no GPU is needed. Neither the module nor the
    strategy is changed.

    Args:
        module: The module, or a function that makes it, which saves a copy. May be on the meta device.
        strategy: By default ``ZeroStrategy()``.
        world_size: Number of ranks.
        rank: The rank to be.
        batch: Of one rank: argument of ``training_step``. By default the module's ``example_input_array``.
        optimizer: Makes the optimizer from parameters; by default the module's ``configure_optimizers``.
        precision: As in ``estimate_memory``.
        accelerator: Likewise.
        ranks_per_node: By default 8 where they divide the world, or all.
        accumulate_grad_batches: As in the Trainer.
        gradient_clip_val: As in the Trainer.
        gradient_clip_algorithm: As in the Trainer.
        rates: By which the step is timed; by default those of a node of H100.
        device_memory: Bytes of a GPU, by which ``Pipeline(reduce="auto")``, ``ActivationCheckpointing(policy="auto")``
            and ``Offload(fraction="auto")`` decide; by default 80 GiB.

    Raises:
        ValueError: An option is one that is not simulated, or there is no batch or optimizer; the error names it.
        RuntimeError: There is a process group in this process.
    """
    check_memory("device_memory", device_memory)
    if device_memory is not None and accelerator == "cpu":
        raise ValueError(f"`device_memory={device_memory}` is that of a GPU. With `accelerator='cpu'` leave it out.")
    found = simulate_copy(
        module,
        strategy,
        world_size=world_size,
        rank=rank,
        precision=precision,
        accelerator=accelerator,
        ranks_per_node=ranks_per_node,
        rates=rates,
        batch=batch,
        optimizer=optimizer,
        accumulate_grad_batches=accumulate_grad_batches,
        gradient_clip_val=gradient_clip_val,
        gradient_clip_algorithm=gradient_clip_algorithm,
        device_memory=device_memory,
    )
    return found[rank]


def simulate_copy(
    module: pl.LightningModule | Callable[[], pl.LightningModule],
    strategy: ZeroStrategy | None = None,
    *,
    world_size: int,
    rank: int = 0,
    precision: str | None = None,
    accelerator: str = "gpu",
    ranks_per_node: int | None = None,
    accumulate_grad_batches: int = 1,
    rates: MachineRates | None = None,
    plans: list[Any] | None = None,
    **options: Any,
) -> dict[int, Simulation]:
    """Simulate a step of a rank, and of the ranks of all pipeline stages of its copy of the model.

    ``plans`` has the plan of tensor parallelism, from an earlier simulation of the module; an empty list gets it. Other
    arguments and errors are those of ``simulate_step``.
    """
    plans = [] if plans is None else plans
    strategy = _own_strategy(strategy)
    refuse_unforecast(strategy, world_size=world_size, accelerator=accelerator, verb="simulated", noun="simulation")
    _check(rank, world_size, accumulate_grad_batches, rates)
    name = precision_of(precision, strategy, accelerator)
    accumulate_grad_batches = accumulation_of(accumulate_grad_batches, strategy, world_size)
    fit = partial(
        _simulated,
        module,
        strategy,
        world_size=world_size,
        name=name,
        accelerator=accelerator,
        node=_node(world_size, ranks_per_node),
        accumulate_grad_batches=accumulate_grad_batches,
        rates=rates,
        plans=plans,
        **options,
    )
    if strategy.pipeline is None:
        return {rank: fit(rank=rank)}
    ranks = ranks_of_copy(strategy.pipeline, world_size, rank)
    found = run_stages(len(ranks), lambda stage, store: (fit(rank=ranks[stage], store=store), plans))
    plans[:] = found[0][1]  # which the processes have filled
    return {rank: simulation for rank, (simulation, _) in zip(ranks, found, strict=True)}


def _simulated(
    module: pl.LightningModule | Callable[[], pl.LightningModule],
    strategy: ZeroStrategy,
    *,
    world_size: int,
    rank: int,
    name: str,
    accelerator: str,
    node: int,
    accumulate_grad_batches: int,
    rates: MachineRates | None,
    plans: list[Any],
    batch: Any = None,
    optimizer: Optimizers | None = None,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str | None = None,
    store: Any = None,
    device_memory: int | None = None,
) -> Simulation:
    """Simulate a rank in this process; ``store`` is that of the processes of a pipeline's stages."""
    strategy.communication = replace(strategy.communication, backend="gloo" if accelerator == "cpu" else "nccl")
    counter = _Counter(rates or MachineRates(), node)
    told = _LastStep(counter, accumulate_grad_batches)
    pipelined = nullcontext() if store is None else staged(store, counter, accelerator)
    with (
        pretended_world(world_size, rank),
        _quiet(),
        pipelined,
        simulated_gpu(counter, accelerator, device_memory),
        trials_with_values(counter, plans),
        host_apart(counter, page_locks=accelerator != "cpu") as host,
        counter,
    ):
        model = _made(module, optimizer)
        batches = _Batches(_batch_of(model, batch), _NUM_STEPS * accumulate_grad_batches)
        try:
            pl.Trainer(
                accelerator="cpu",
                devices=node,
                num_nodes=world_size // node,
                strategy=strategy,
                plugins=[_Environment(rank, world_size, node), new_precision(name)],
                accumulate_grad_batches=accumulate_grad_batches,
                gradient_clip_val=gradient_clip_val,
                gradient_clip_algorithm=gradient_clip_algorithm,
                callbacks=[told],
                max_epochs=1,
                logger=DummyLogger(),
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                limit_val_batches=0,
                use_distributed_sampler=False,
            ).fit(model, batches)
        except MisconfigurationException as error:
            raise ValueError(
                f"`{type(model).__name__}` cannot be trained: {error} A simulation runs its fit."
            ) from error
        finally:
            counter.parts = tuple
            told.end()
    if told.peak is None:
        raise ValueError(
            f"`{type(model).__name__}` does not step in every {accumulate_grad_batches} batch(es), or ended its fit"
            f" before {len(batches)} batches. A simulation is for modules whose optimizers step in every"
            " `accumulate_grad_batches` batches."
        )
    notes: list[str] = []
    if device_memory is None and accelerator != "cpu":
        notes.extend(assumptions(strategy, has_stage_3=strategy.sharding.stage == 3, argument="device_memory"))
    clock, peak = counter.clock, told.peak
    return Simulation(
        rank=rank,
        world_size=world_size,
        ranks_per_node=node,
        precision=name,
        rates=rates or MachineRates(),
        calls=clock.calls,
        memory=counter.samples,
        peak_bytes=peak.nbytes,
        at_peak=told.kinds,
        device=told.device,
        host={**told.host, "activations": host.most},
        disk=told.disk,
        phase=peak.phase,
        module=peak.module,
        seconds=clock.now_s,
        phases=clock.phases_s,
        flops=clock.flops,
        notes=notes,
    )


def _own_strategy(strategy: ZeroStrategy | None) -> ZeroStrategy:
    """Return a copy that starts no process.

    Raises:
        ValueError: It is no ``ZeroStrategy``, or a Trainer's.
    """
    if strategy is None:
        strategy = ZeroStrategy()
    if not isinstance(strategy, ZeroStrategy):
        raise ValueError(f"`strategy={strategy!r}` is not simulated. Use `ZeroStrategy(...)`.")
    if strategy.accelerator is not None:
        raise ValueError("`strategy` is that of a Trainer. Make a new one for the simulation: `ZeroStrategy(...)`.")
    strategy = copy.deepcopy(strategy)
    vars(strategy)["_configure_launcher"] = lambda: None
    return strategy


def _check(rank: int, world_size: int, accumulate_grad_batches: int, rates: MachineRates | None) -> None:
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world_size:
        raise ValueError(
            f"`rank={rank!r}` must be one of the ranks 0 to {world_size - 1} of `world_size={world_size}`."
        )
    count = accumulate_grad_batches
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"`accumulate_grad_batches={count!r}` must be a number of 1 or more.")
    if rates is not None and not isinstance(rates, MachineRates):
        raise ValueError(f"`rates={rates!r}` must be `MachineRates(...)` or None.")


def _node(world_size: int, given: int | None) -> int:
    """Return the ranks of a node.

    Raises:
        ValueError: They do not divide the world.
    """
    node = given
    if node is None:
        node = _LARGEST_NODE if world_size % _LARGEST_NODE == 0 else world_size
    if isinstance(node, bool) or not isinstance(node, int) or node < 1 or world_size % node:
        raise ValueError(f"`ranks_per_node={given!r}` must be a number that divides `world_size={world_size}`.")
    return node


def _made(module: pl.LightningModule | Callable[[], pl.LightningModule], optimizer: Optimizers | None) -> Any:
    made: Any = new_module(module)
    if not isinstance(made, pl.LightningModule):
        raise ValueError(f"A simulation trains a `LightningModule`, and `{type(made).__name__}` is none.")
    without_meta(made)
    for name in (*BUILDING_HOOKS, "configure_optimizers"):
        vars(made)[name] = _told(made, name)
    vars(made)["configure_callbacks"] = list  # they could write files
    if optimizer is not None:
        vars(made)["configure_optimizers"] = lambda: optimizer(made.parameters())
    return made


def _told(module: pl.LightningModule, name: str) -> Callable[..., Any]:
    """Return a hook that may ask how many steps there are, and build modules on the meta device."""
    hook = getattr(module, name)

    @wraps(hook)
    def told(*args: Any, **kwargs: Any) -> Any:
        with told_steps(module):
            result = hook(*args, **kwargs)
        if name in BUILDING_HOOKS:
            without_meta(module)
        return result

    return told


def _batch_of(module: pl.LightningModule, batch: Any) -> Any:
    found = batch if batch is not None else module.example_input_array
    if found is None:
        raise ValueError(
            f"A simulation needs a batch of `{type(module).__name__}`. Set its `example_input_array`, add"
            " `data` to the configuration, or give `batch=...` in Python."
        )
    return found


class _Counter(DryRun):  # type: ignore[no-untyped-call]
    """Also gives operations to a clock, and takes samples of memory.

    Args:
        rates: Of the machine.
        ranks_per_node: Ranks of a node.
    """

    def __init__(self, rates: MachineRates, ranks_per_node: int) -> None:
        super().__init__()
        self.clock = Clock(rates, ranks_per_node, lambda: self._phase)
        self.samples: list[Sample] = []
        self.is_on = False  # in the step that is told

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return the results that an operation would have, count them, and let the clock go on."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.is_on:
            self.clock.compute(func, args, kwargs or {}, result, on_host=self._is_apart)
        return result

    def _step_window(self, kernel: Any, window: Any, grad: Tensor, states: Sequence[Tensor], *rest: Any) -> None:
        if self.is_on:  # gradients are read, masters and moments read and written
            itemsize = grad.itemsize + 2 * sum(state.itemsize for state in states)
            self.clock.move((window.stop - window.start) * itemsize, on_host=self._is_apart)

    def _transfer(self, nbytes: int) -> Callable[[], None]:
        return self.clock.transfer(nbytes) if self.is_on else super()._transfer(nbytes)

    def __enter__(self) -> _Counter:
        """Begin to run dry; offloaded activations come back at the rate of the host."""
        super().__enter__()
        bring = Copies.bring

        def timed(copies: Copies, host: Tensor, *behind: Landing) -> tuple[Tensor, Landing]:
            if self.is_on:
                self.clock.move(host.nbytes, on_host=True)
            return bring(copies, host, *behind)

        self._context.enter_context(replaced(Copies, "bring", timed))
        return self

    def enter_phase(self, name: str) -> None:
        """Name the calls that follow."""
        self._phase = name

    def _begin_module(self, module: nn.Module, args: Any) -> None:
        super()._begin_module(module, args)
        if self._phase in ("", "step") and torch.is_grad_enabled():
            self.enter_phase("forward")  # of a second optimizer

    def _sample(self, operation: Any) -> None:
        super()._sample(operation)
        if self.is_on:
            parts = self.parts()
            nbytes = self.live - sum(parts[len(parts) - self.num_away :])
            if not self.samples or self.samples[-1].nbytes != nbytes:
                self.samples.append(Sample(self.clock.now_s, nbytes, self._phase))


class _LastStep(Callback):
    """Tells the counter when the last step begins and ends, and which part of it runs.

    Args:
        counter: The counter.
        num_batches: Micro-batches of a step.
    """

    def __init__(self, counter: _Counter, num_batches: int) -> None:
        self._counter = counter
        self._num_batches = num_batches
        self._was_enabled = gc.isenabled()
        self._steps_before = 0  # steps of optimizers before the step that is told
        self.peak: Moment | None = None
        self.kinds: dict[str, int] = {}
        self.device: dict[str, int] = {}
        self.host: dict[str, int] = {}
        self.disk: dict[str, int] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for optimizer in trainer.optimizers:
            if needs_closure(optimizer):
                raise ValueError(f"`{type(optimizer).__name__}`, whose step needs a closure, is not simulated yet.")
        trainer.strategy.lr_scheduler_configs = []  # they may wait for values that are not logged
        plugin = trainer.precision_plugin
        if isinstance(plugin, ZeroStep) and plugin.scaler is not None:
            plugin.scaler.scale = LOSS_SCALE
        self._counter.name_modules(pl_module)
        _engine(trainer).internals.steps.make_in_this_thread(self._counter.apart)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        step, batch = divmod(batch_idx, self._num_batches)
        if step and not batch:
            self._measure(_engine(trainer))
        if step == _NUM_STEPS - 1 and not batch:
            self._steps_before = trainer.global_step
            self._begin(_engine(trainer))
        self._counter.enter_phase("forward")

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._counter.enter_phase("backward")

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._counter.enter_phase("")
        if self._counter.is_on:
            stats = _engine(trainer).stats()
            self.device, self.host, self.disk = stats.memory, stats.host, stats.disk

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self._counter.enter_phase("step")

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self._counter.enter_phase("")
        if args[-1] == _NUM_STEPS * self._num_batches - 1:
            self._counter.is_on = False
            _engine(trainer).internals.communicator.traffic.ledger = None
            made = trainer.global_step - self._steps_before
            if made and self._steps_before == (_NUM_STEPS - 1) * made:
                self.peak = self._counter.peak
                self.kinds = kinds_at(self.peak, pl_module)
                self.host = {**self.host, "windows": _engine(trainer).internals.steps.window_bytes()}

    def _measure(self, engine: ZeroEngine) -> None:
        gc.collect()
        gc.disable()
        engine.internals.fits.reset_stats()
        count_states(self._counter, engine)
        self._counter.reset_peak()

    def _begin(self, engine: ZeroEngine) -> None:
        self._counter.clock.restart()
        engine.internals.communicator.traffic.ledger = self._counter.clock
        self._counter.is_on = True

    def end(self) -> None:
        """Let the collector run again."""
        if self._was_enabled:
            gc.enable()


def _engine(trainer: pl.Trainer) -> ZeroEngine:
    strategy = trainer.strategy
    assert isinstance(strategy, ZeroStrategy)
    return strategy.engine


class _Batches:
    """Copies of a batch.

    Args:
        batch: The batch.
        count: How often.
    """

    def __init__(self, batch: Any, count: int) -> None:
        self._batch = batch
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._count):
            yield tree_map_only(Tensor, on_cpu, self._batch)  # as a loader makes it anew


class _Environment(ClusterEnvironment):
    """A process that is one of the ranks of a cluster.

    Args:
        rank: Its rank.
        world_size: Number of ranks.
        ranks_per_node: Ranks of a node.
    """

    def __init__(self, rank: int, world_size: int, ranks_per_node: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._ranks_per_node = ranks_per_node

    @property
    def creates_processes_externally(self) -> bool:
        """No process is started."""
        return True

    @property
    def main_address(self) -> str:
        """Nobody connects."""
        return "localhost"

    @property
    def main_port(self) -> int:
        """Nobody connects."""
        return 0

    @staticmethod
    def detect() -> bool:
        """Is never found by itself."""
        return False

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._world_size

    def set_world_size(self, size: int) -> None:
        """Is known."""

    def global_rank(self) -> int:
        """Return the rank."""
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        """Is known."""

    def local_rank(self) -> int:
        """Return the rank in its node."""
        return self._rank % self._ranks_per_node

    def node_rank(self) -> int:
        """Return the node."""
        return self._rank // self._ranks_per_node


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide messages of a run that does not take place, and let the process be rank 0 again afterwards."""
    rank, num_threads = getattr(rank_zero_only, "rank", None), torch.get_num_threads()
    with ExitStack() as stack:
        for name in _LOGGERS:
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if not gc.get_freeze_count():
            gc.freeze()
            stack.callback(gc.unfreeze)
        stack.enter_context(seeded())
        stack.callback(torch.set_num_threads, num_threads)
        stack.callback(partial(setattr, rank_zero_only, "rank", rank))
        yield
