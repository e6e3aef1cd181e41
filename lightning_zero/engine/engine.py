"""``ZeroEngine``: a module and its optimizers, sharded over the ranks; needs nothing but PyTorch."""

from __future__ import annotations

import atexit
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_zero.comm.communicator import Communicator
from lightning_zero.config import Communication, MixedPrecision, Moments, Offload, Sharding, check_moments
from lightning_zero.engine.aside import Aside
from lightning_zero.engine.attached import Attached
from lightning_zero.engine.awaited import awaited_places, awaited_values, forget_awaited
from lightning_zero.engine.buffer import FlatBuffer
from lightning_zero.engine.deferred import Deferral
from lightning_zero.engine.early import EarlySteps
from lightning_zero.engine.elsewhere import Elsewhere
from lightning_zero.engine.hooks import Hooks
from lightning_zero.engine.module_buffers import ModuleBuffers
from lightning_zero.engine.optimizer import ShardedOptimizer, gradient_norm
from lightning_zero.engine.order import PassOrder
from lightning_zero.engine.parameter import own
from lightning_zero.engine.partition import Territory, build_unit, choose_territories
from lightning_zero.engine.parts import Parts
from lightning_zero.engine.placement import Placement
from lightning_zero.engine.places import Places
from lightning_zero.engine.records import ParameterRecord, record_elsewhere, record_here
from lightning_zero.engine.reduction import Reducer
from lightning_zero.engine.statistics import EngineStats, Statistics
from lightning_zero.engine.step_device import StepDevice, StepDevices
from lightning_zero.engine.unit import Unit, UnitState
from lightning_zero.engine.whole import Whole, Write
from lightning_zero.storage.store import DeviceStore

__all__ = ["ZeroEngine", "engine_of", "gathered"]

_ENGINES: WeakSet[ZeroEngine] = WeakSet()


class _UnitOwner:
    """Answers for the parameters of one unit."""

    def __init__(self, engine: ZeroEngine, unit: Unit) -> None:
        self._engine = engine
        self._unit = unit

    def param_name(self, param: nn.Parameter) -> str:
        return self._engine.param_name(param)

    def touch(self, param: nn.Parameter) -> bool:
        return self._engine._touch(self._unit)

    def show_gradient(self, param: nn.Parameter) -> None:
        self._engine._show_gradient(param)

    def forget_gradient(self, param: nn.Parameter) -> None:
        buffer, index = self._engine._places.of(param)
        buffer.gradients.forget([index])


class ZeroEngine:
    """Shards a module's parameters, gradients and optimizer states over the ranks (ZeRO, arXiv:1910.02054).

    Use::

        engine = ZeroEngine(stage=3)
        model = engine.shard(model)
        optimizer = engine.attach(torch.optim.AdamW(model.parameters()))

    and train as ever: ``loss.backward(); optimizer.step(); optimizer.zero_grad()``.

    Args:
        stage: 0 shards nothing, 1 optimizer states, 2 gradients too, 3 parameters too.
        units: Classes, or names of classes, whose modules are gathered and reduced as one. By default repeated blocks,
            embeddings and output heads.
        communication: Dtype of reductions, prefetch, timeout.
        precision: Compute and master dtypes.
        device: Where the model goes; by default where its parameters are.
        process_group: The ranks that share the model; all by default. Without an initialised process group the world is
            one rank, and nothing is sharded or sent.
        parts_group: One rank of every part of a model that is cut into pipeline stages, each with an engine over its
            own ``process_group``; norms, overflows and checkpoints are those of all parts.
        offload: Where optimizer states, masters and parameters sleep: ``"cpu"``, or ``Offload``.
        deferred_step: Make steps beside the next forward; the bits are the same. By default those that are offloaded.
        step_in_backward: Make each unit's step in the backward, when its gradients are reduced, and give these up. The
            bits are the same; what needs all gradients at once (clipping, norms, accumulation) is refused.
        moments: How the moments of ``torch.optim.AdamW`` and ``Adam`` are kept: ``"fp32"``, ``"bf16"``, or ``"int8"``
            (a byte each, with one scale for 256 elements). Arithmetic is fp32, and so are moments in checkpoints.

    Raises:
        ValueError: ``stage`` is not 0, 1, 2 or 3, or ``moments`` is not known.
    """

    def __init__(
        self,
        stage: int = 3,
        *,
        units: Sequence[str | type[nn.Module]] | None = None,
        communication: Communication | None = None,
        precision: MixedPrecision | None = None,
        device: torch.device | str | None = None,
        process_group: dist.ProcessGroup | None = None,
        parts_group: dist.ProcessGroup | None = None,
        offload: Offload | dict[str, Any] | str | None = None,
        deferred_step: bool | None = None,
        step_in_backward: bool = False,
        moments: Moments = "fp32",
    ) -> None:
        self.stage = stage
        self._sharding = Sharding.from_stage(stage)
        self._unit_classes = units
        self._communication = communication or Communication()
        self._precision = precision or MixedPrecision()
        self._device = torch.device(device) if device is not None else None
        self._process_group = process_group
        self._parts_group = parts_group
        self._offload = Offload.of(offload)
        if self._offload is not None:
            self._offload.check(stage, in_pipeline=parts_group is not None)
        self._moments = check_moments(moments)
        self._steps_in_backward = step_in_backward
        # - Set by `shard`
        self.module: nn.Module | None = None
        self.parts: Parts | None = None  # of a model that is cut; None if it is whole
        self._communicator: Communicator | None = None
        self._everyone: Communicator | None = None
        self._store: DeviceStore
        self._deferral = Deferral(deferred_step)
        self._placement: Placement
        self._aside: Aside
        self._step_devices: StepDevices
        self._early: EarlySteps | None = None  # with `step_in_backward`
        self._hooks: Hooks
        self._order: PassOrder
        self._whole: Whole
        self._statistics: Statistics
        self._places = Places()
        self._owners: list[_UnitOwner] = []
        # - Set by `attach`
        self._attached = Attached()

    # -- Set-up ----------------------------------------------------------------------------------------------------

    def shard(self, module: nn.Module, holders: Mapping[str, tuple[int, ...]] | None = None) -> nn.Module:
        """Partition ``module`` in place and return it; all ranks start from rank 0's values.

        Collective: all ranks. Meta parameters are made real unit by unit, by their module's ``reset_parameters``, so no
        rank ever holds the whole model at stage 3. Those that wait for pretrained values get them.

        Args:
            module: The module.
            holders: With ``parts_group``: the parts, as ranks of it, that hold a parameter, by its first name. The
                values of the others are given up.

        Raises:
            ValueError: A name in ``units`` matches nothing; parameters on several devices and no ``device``.
            RuntimeError: The engine holds another module.
        """
        if self.module is module:
            return module
        if self.module is not None:
            raise RuntimeError("This engine holds another module. Make a new `ZeroEngine` for each module.")
        awaited = awaited_places(module)
        device = self._device or _device_of(module)
        self._communicator = Communicator(self._communication, device, self._process_group)
        self._everyone = self._communicator
        if holders is not None:
            self._take_part(module, holders, device)
        absent = [] if self._places.elsewhere is None else self._places.elsewhere.params
        territories = choose_territories(module, self._unit_classes, {id(param) for param in absent})
        # Blocks of freed memory are not used again for what is a little larger, and pile up.
        self._store = DeviceStore(device, keeps_freed=self._offload is None or not self._offload.uses_disks)
        sharding = self._sharding_of(self.communicator.world_size)
        itemsize = (self._precision.compute_dtype or torch.get_default_dtype()).itemsize
        self._placement = Placement(self._offload, territories, self._communicator, sharding, itemsize)
        self._aside = Aside(self._store, self._placement.host)
        for index, territory in enumerate(territories):
            unit = build_unit(
                territory,
                index,
                root=module,
                awaited=awaited,
                sharding=sharding,
                precision=self._precision,
                communication=self._communication,
                communicator=self.communicator,
                store=self._store,
                home=self._placement.home(index),
                params_home=self._placement.params_home(index),
                is_shared=self.parts.is_shared if self.parts is not None else lambda param: False,
            )
            self._register(unit, territory)
            unit.reshard()
        if self.parts is not None:
            self.parts.start_equal(self._buffers)
        module_buffers = ModuleBuffers(module, device, self.communicator)
        ahead = self._communication.prefetch
        if self._steps_in_backward:
            self._early = self._early_steps()
        in_flight = 0 if self._early is not None and self.world_size == 1 else min(ahead, 1)
        reducer = Reducer(self.units, self.communicator, in_flight, self._early)
        self._order = PassOrder(self.units, self.communicator, reducer, ahead)
        self._hooks = Hooks(
            module,
            self.units,
            self._order,
            reducer,
            close_windows=self._attached.close,
            broadcast_buffers=module_buffers.broadcast,
            reduces_each_backward=sharding.grads,
        )
        self._step_devices = StepDevices(self.units, device, self._moments)
        self._step_devices.choose(self._offload.step_device if self._offload else None, self.communicator)
        self._whole = Whole(self.units, self.communicator, self._hooks, self._order, self._places.elsewhere)
        self._statistics = Statistics(
            self.stage,
            self.units,
            self._places.by_id,
            communicator=self.communicator,
            store=self._store,
            host=self._placement.host,
            disk=self._placement.disk,
            prefetch=ahead,
            moments=self._moments,
        )
        self.module = module
        module_buffers.broadcast()
        for values in awaited_values(module):
            values.load(self)
        forget_awaited(module)
        self.reset_stats()
        _ENGINES.add(self)
        return module

    def _early_steps(self) -> EarlySteps:
        if self.parts is not None or (self.stage == 0 and self.world_size > 1):
            what = "a pipeline" if self.parts is not None else "`stage=0`"
            raise ValueError(
                f"`step_in_backward=True` does not work with {what}: gradients are complete after the backward. Use"
                " stage 1, 2 or 3 without a pipeline, or `step_in_backward=False`."
            )
        if self._placement.disk is not None:
            raise ValueError(
                "`step_in_backward=True` does not work with 'nvme': gradients go to the disk, and a step would wait for"
                " it. Steps are made beside the next forward anyhow; or use `Offload(optimizer='cpu')`."
            )
        return EarlySteps(self.communicator)

    def _sharding_of(self, world_size: int) -> Sharding:
        """Return what is kept sharded; alone a rank gives up only what is to sleep elsewhere (ADR 0016)."""
        if world_size > 1 or (self._offload is not None and self._offload.params is not None):
            return self._sharding
        is_offloaded = self._offload is not None and self._offload.optimizer is not None
        leaves = self._sharding.grads and (is_offloaded or self._steps_in_backward)
        return Sharding(params=False, grads=leaves, optim=False)

    def _take_part(self, module: nn.Module, holders: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        """Give up the values of the parameters that other parts hold."""
        self.parts = Parts(
            Communicator(self._communication, device, self._parts_group), dict(module.named_parameters()), holders
        )
        self._everyone = Communicator(self._communication, device)
        self._places.elsewhere = Elsewhere(
            module, self.parts, self._places.names, self._precision, self._communication, device
        )

    def _register(self, unit: Unit, territory: Territory) -> None:
        owner = _UnitOwner(self, unit)
        self._owners.append(owner)
        self._places.add(unit, territory)
        for buffer in unit.buffers:
            for param in buffer.params:
                own(param, owner)

    def attach(self, *optimizers: Optimizer) -> Any:
        """Make optimizers step this rank's segments; they replace those attached before.

        The objects stay the same and keep the module's parameters in their groups.

        Returns:
            The optimizer, or a list of them if there are several.

        Raises:
            ValueError: An optimizer is not element-wise at stage 1 or above, holds a parameter of another module, or
                has moments that cannot be kept as ``moments`` says.
        """
        self.detach()
        if self._early is not None and len(optimizers) > 1:
            raise ValueError(
                f"`step_in_backward=True` is for one optimizer, got {len(optimizers)}: a backward does not say which of"
                " them is going to step. Use `step_in_backward=False`."
            )
        for optimizer in optimizers:
            sharded = ShardedOptimizer(
                optimizer,
                self._places.by_id,
                self.communicator,
                self._before_open,
                self.parts,
                self._attached.keeps_gradients,
                self._deferral,
                self._mark_stale,
                moments=self._moments,
            )
            self._attached.add(sharded)
            if self._early is not None:
                sharded.allow_early_steps()
                self._early.optimizer = sharded
        if self._offload is not None and self._offload.step_device == "cuda":
            for sharded in self._attached:
                sharded.require_runs("Offload(step_device='cuda')")
        return optimizers[0] if len(optimizers) == 1 else list(optimizers)

    def drop_elsewhere(self, optimizer: Optimizer) -> None:
        """Take the parameters that other parts of the model hold out of an optimizer's groups; ``attach`` it then."""
        if self._places.elsewhere is not None:
            self._places.elsewhere.drop(optimizer)

    def whole_groups(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Put the parameters of other parts back into an optimizer's groups for a while: checkpoints name them all."""
        elsewhere = self._places.elsewhere
        return nullcontext() if elsewhere is None else elsewhere.whole_groups(optimizer)

    def detach(self) -> None:
        """Let go of the optimizers and of all gradients."""
        self._attached.close()
        if self.module is not None:
            self.reload_states()
        self._attached.detach()
        if self._early is not None:
            self._early.optimizer = None
        for buffer in self._buffers:
            buffer.gradients.forget()

    def pause(self) -> None:
        """Let the module compute as if it were not sharded, until ``resume``. No collective.

        Gradients are dropped. Where parameters are released between uses (stage 3) the hooks stay: without them nothing
        could compute.
        """
        self._attached.close()
        self._flush_here()
        for buffer in self._buffers:
            buffer.gradients.forget()
        if not any(unit.is_sharded_between_uses for unit in self.units):
            self._hooks.remove()

    def resume(self) -> None:
        """Go on after ``pause``; does nothing if the engine was not paused."""
        assert self.module is not None
        self._hooks.install(self.module)

    def unshard(self) -> nn.Module:
        """Return the module with whole parameters in their own dtype, and close the engine.

        Collective: all ranks.
        """
        assert self.module is not None
        module = self.module
        self.detach()
        values = {param: self.full_param(param).to(self._original_dtype(param)) for param in module.parameters()}
        self.close()
        for param, value in values.items():
            param.__class__ = nn.Parameter
            param.data = value
        return module

    def _original_dtype(self, param: nn.Parameter) -> torch.dtype:
        return param.dtype if self._places.is_elsewhere(param) else self._places.of(param)[0].kind.original

    def close(self) -> None:
        """Take the hooks out and give the process groups back. No collective.

        Where steps are deferred, ``flush`` before. Parameters stay readable at stages 0 to 2; at stage 3 gather what is
        needed before.
        """
        if self.module is None:
            return
        try:
            self._attached.close()
            self._flush_here()
        finally:
            self._close_parts()

    def _close_parts(self) -> None:
        self._deferral.close()
        self._hooks.remove()
        self._close_groups()
        self._store.close()
        self._placement.close()
        self.module = None
        _ENGINES.discard(self)

    def _close_groups(self) -> None:
        self.communicator.close()
        if self.parts is not None:
            self.parts.communicator.close()
            self.everyone.close()

    # -- Steps -----------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Make the steps that were deferred. Collective at stages 1 and 2: all ranks."""
        stale = [unit for unit in self.units if unit.state is UnitState.SHARDED and not unit.is_sharded_between_uses]
        with self._hooks.boundary() if stale else nullcontext():
            for unit in stale:
                unit.unshard()
            for unit in stale:
                unit.wait()
        for buffer in self._buffers:
            buffer.flush()

    def _flush_here(self) -> None:
        """Make the steps that were deferred, as far as no other rank is needed."""
        if not any(unit.buffers and unit.buffers[0].sharding.optim for unit in self.units):
            self.flush()
        for buffer in self._buffers:
            buffer.flush()

    def _mark_stale(self, buffer: FlatBuffer) -> None:
        unit = self._places.unit_of(buffer)
        if not unit.is_sharded_between_uses:
            unit.state = UnitState.SHARDED

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Run a step (``training_step``, ``validation_step``, …) that may use any parameter of the module.

        Collective: all ranks. A forward of the module itself needs no scope.
        """
        with self._hooks.scope(name):
            yield

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """Take no note of forwards: they compute nothing, with stand-ins for parameters. No collective."""
        self._hooks.is_asleep = True
        try:
            yield
        finally:
            self._hooks.is_asleep = False

    @contextmanager
    def backward_scope(self) -> Iterator[None]:
        """Run a backward in which every rank reduces, also one whose loss uses no parameter. Collective: all ranks."""
        with self._hooks.backward_scope():
            yield

    @contextmanager
    def microbatch(self, last: bool, has_more_backwards: bool = False, keeps_gradients: bool = False) -> Iterator[None]:
        """Run a micro-batch; before the last one stages 0 and 1 keep their gradients to themselves (ADR 0008).

        Args:
            last: The optimizer's step follows.
            has_more_backwards: Further backwards of forwards that have run follow (a pipeline). Stage 2 then keeps its
                gradients too, until the last of them.
            keeps_gradients: So does stage 3.

        Raises:
            ValueError: It is not the last, with ``step_in_backward=True``.
        """
        if not last:
            self._refuse_with_early_steps("Accumulating gradients over micro-batches")
        hooks = self._hooks
        before = hooks.is_last_microbatch, hooks.has_more_backwards, hooks.keeps_gradients
        hooks.is_last_microbatch, hooks.has_more_backwards = last, has_more_backwards
        hooks.keeps_gradients = keeps_gradients
        try:
            yield
        finally:
            hooks.is_last_microbatch, hooks.has_more_backwards, hooks.keeps_gradients = before

    def open_window(self, optimizer: Optimizer) -> None:
        """Open the step window: each parameter shows its master's segment and the reduced gradient's."""
        self._attached.of(optimizer).open()

    def close_window(self, optimizer: Optimizer) -> None:
        """Close the step window without a step; gradients stay until ``zero_grad``."""
        self._attached.of(optimizer).close()

    @property
    def is_last_microbatch(self) -> bool:
        """Whether the next backward is the last before the optimizer's step."""
        return self._hooks.is_last_microbatch

    def begin_gradients(self) -> None:
        """Drop all gradients now, and let ``zero_grad`` leave those that follow alone, until ``end_gradients``.

        For steps whose backward comes before ``zero_grad`` is called.
        """
        for buffer in self._buffers:
            buffer.gradients.forget()
        self._attached.begin_gradients()

    def end_gradients(self) -> None:
        """Let ``zero_grad`` drop gradients again.

        Raises:
            PipelineError: ``zero_grad`` was not called since ``begin_gradients``.
        """
        self._attached.end_gradients()

    def sum_shared_gradients(self) -> None:
        """Sum the gradients of parameters that several parts of the model hold; once, after the last micro-batch.

        Collective: all ranks.
        """
        if self.parts is not None:
            self.parts.sum_gradients(self._buffers)

    def grad_norm(self, optimizer: Optimizer | None = None, norm_type: float = 2.0) -> torch.Tensor:
        """Return the norm of the reduced gradients of one optimizer, or of all parameters: () fp32.

        Collective: all ranks, after backward.
        """
        self._refuse_with_early_steps("The norm of all gradients")
        places = self._places.by_id.values() if optimizer is None else self._attached.of(optimizer).places
        return gradient_norm(places, norm_type, self.communicator, self.parts)

    def clip_grad_norm(self, optimizer: Optimizer, max_norm: float) -> torch.Tensor:
        """Scale an optimizer's gradients so that their norm is at most ``max_norm``; return the norm before.

        Collective: all ranks.
        """
        self._refuse_with_early_steps("Clipping by norm")
        return self._attached.of(optimizer).clip_grad_norm(max_norm)

    def clip_grad_value(self, optimizer: Optimizer, clip_value: float) -> None:
        """Clamp every element of an optimizer's gradients to ``[-clip_value, clip_value]``."""
        self._refuse_with_early_steps("Clipping by value")
        self._attached.of(optimizer).clip_grad_value(clip_value)

    def unscale(self, optimizer: Optimizer, inv_scale: float) -> bool:
        """Multiply an optimizer's gradients; return whether one was not finite on some rank. Collective: all ranks."""
        self._refuse_with_early_steps("Scaling of the loss")
        return self._attached.of(optimizer).unscale(inv_scale)

    def _refuse_with_early_steps(self, what: str) -> None:
        if self._early is not None:
            raise ValueError(
                f"{what} does not work with `step_in_backward=True`: a unit's gradients are stepped and given up before"
                " those of the next one are there. Use `step_in_backward=False`."
            )

    # -- Memory for something else ---------------------------------------------------------------------------------

    def offload_states(self) -> None:
        """Move masters, optimizer states and gradients to host memory, so that the device is free for a while.

        Collective at stages 1 and 2 where a step is deferred: all ranks. Parameters stay. Reading and saving work as
        they are; the next step or backward brings everything back by itself, as ``reload_states`` does. The bits of
        training do not change. Does nothing to what is offloaded always.
        """
        self._require_module()
        if not self._aside.is_empty:
            return
        self._attached.close()
        self.flush()
        self._aside.put(self._buffers, list(self._attached))

    def reload_states(self) -> None:
        """Bring back what ``offload_states`` has moved; does nothing if nothing was. No collective."""
        self._require_module()
        self._aside.take_back()

    def keep_params_on_device(self) -> None:
        """Let the shards of parameters sleep on the device from now on, before optimizers are attached (stage 3)."""
        for buffer in self._buffers:
            buffer.move_shard(self._store)

    # -- Reading and writing ---------------------------------------------------------------------------------------

    @contextmanager
    def gathered(
        self, params_or_module: nn.Module | nn.Parameter | Iterable[nn.Parameter], write: Write | None = None
    ) -> Iterator[None]:
        """Make parameters whole for a while. Collective on entry, and on exit with ``write="rank0"``: all ranks.

        Inside, forwards of what is gathered do not communicate, so one rank alone may run them. Parameters of other
        pipeline stages come along.

        Args:
            params_or_module: A module, a parameter, or several.
            write: What happens to changes: ``"rank0"`` takes rank 0's on all ranks, ``"all"`` takes every rank's own
                (they must agree), None means there are none.

        Raises:
            ValueError: ``write`` is not known, or ``"rank0"`` in pipeline stages.
            RuntimeError: A parameter was changed although ``write`` is None.
        """
        params = _params_of(params_or_module)
        units = self._units_of(params_or_module if isinstance(params_or_module, nn.Module) else params)
        self._attached.close()
        with self._whole.gathered(units, params, write):
            yield

    def full_param(self, param: nn.Parameter) -> torch.Tensor:
        """Return a copy of a parameter's values as they are stepped (fp32 masters), whole. Collective: all ranks."""
        self._require_module()
        self._attached.close()
        elsewhere = self._places.elsewhere
        here = None if self._places.is_elsewhere(param) else self._whole.values(*self._places.of(param))
        if elsewhere is not None:
            return self._whole.values_of_part(param, here, elsewhere)
        assert here is not None
        return here

    def full_grad(self, param: nn.Parameter) -> torch.Tensor | None:
        """Return a copy of a parameter's reduced gradient, whole; None if it has none. Collective: all ranks.

        Of a parameter that another part of the model holds it is None.
        """
        self._refuse_with_early_steps("Reading gradients")
        return None if self._places.is_elsewhere(param) else self._whole.gradient(*self._places.of(param))

    # -- Checkpoints -----------------------------------------------------------------------------------------------

    def records(self) -> list[ParameterRecord]:
        """Return one record per parameter, in the order of ``named_parameters``. No collective."""
        self._attached.close()
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        trained = {id(param) for group in groups for param in group["params"]}
        for buffer in self._buffers:
            buffer.refresh_master()
        assert self.module is not None
        return [self._record(param, trained=id(param) in trained) for param in self.module.parameters()]

    def _record(self, param: nn.Parameter, *, trained: bool) -> ParameterRecord:
        names, elsewhere = self._places.names[id(param)], self._places.elsewhere
        if elsewhere is not None and param in elsewhere:
            return record_elsewhere(param, names, elsewhere.master(param))
        is_saved = self.parts is None or self.parts.is_counted_here(param)
        return record_here(
            *self._places.of(param),
            names,
            trained=trained,
            saved_by=self.rank if is_saved else None,
            moments=self._moments,
        )

    def state_place(self, optimizer: Optimizer, param: nn.Parameter, key: str) -> torch.Tensor | None:
        """Return where a state of a parameter is to be loaded to: 1-D over ``own_range``. No collective.

        None where the caller makes a tensor.
        """
        return self._attached.of(optimizer).state_place(param, key)

    def complete_masters(self) -> None:
        """Give every rank what the others wrote into their ``save_range`` of masters. Collective: all ranks.

        Above stage 0 a rank has no more than its range, and nothing is sent.
        """
        for buffer in self._buffers:
            pending = buffer.gather_stepped()
            if pending is not None:
                pending.wait()
        if self.parts is not None:
            self.parts.start_equal(self._buffers)

    def publish(self) -> None:
        """Make the masters the parameters' values. Collective: all ranks. Call after writing into ``master()``."""
        for buffer in self._buffers:
            pending = buffer.publish()
            if pending is not None:
                pending.wait()
            buffer.published()

    # -- What is going on ------------------------------------------------------------------------------------------

    @property
    def units(self) -> list[Unit]:
        """What is gathered and reduced as one, the root's first."""
        return self._places.units

    @property
    def optimizers(self) -> list[Optimizer]:
        """The attached optimizers."""
        return [sharded.optimizer for sharded in self._attached]

    @property
    def step_devices(self) -> dict[str, StepDevice]:
        """On which processor each offloaded unit is stepped, by name."""
        self._require_module()
        return self._step_devices.chosen

    def use_step_devices(self, chosen: Mapping[str, StepDevice]) -> None:
        """Step offloaded units where they were stepped before, as ``step_devices`` said; fixed ones stay.

        The two processors round differently in the last bit. Every rank chooses the same.
        """
        self._require_module()
        if self._offload is None or self._offload.step_device is None:
            self._step_devices.use(chosen)

    @property
    def communicator(self) -> Communicator:
        """What moves the shards.

        Raises:
            RuntimeError: There is no module yet.
        """
        self._require_module()
        assert self._communicator is not None
        return self._communicator

    @property
    def everyone(self) -> Communicator:
        """All ranks, those of other parts of the model too: who writes a checkpoint together.

        Raises:
            RuntimeError: There is no module yet.
        """
        self._require_module()
        assert self._everyone is not None
        return self._everyone

    @property
    def world_size(self) -> int:
        """Ranks that share the model."""
        return self.communicator.world_size

    @property
    def rank(self) -> int:
        """This rank among them."""
        return self.communicator.rank

    def param_name(self, param: nn.Parameter) -> str:
        """Return the first fully qualified name of a parameter."""
        return self._places.name(param)

    def stats(self) -> EngineStats:
        """Return what the engine holds and has sent on this rank. No collective."""
        self._require_module()
        return self._statistics.take(self.optimizers)

    def reset_stats(self) -> None:
        """Start counting traffic and peaks anew."""
        self._require_module()
        self._statistics.reset()

    def plan(self) -> list[str]:
        """Return about six lines that say what the engine is going to do."""
        self._require_module()
        return [*self._statistics.plan(), *self._step_devices.plan()]

    # -- Inside ----------------------------------------------------------------------------------------------------

    @property
    def _buffers(self) -> list[FlatBuffer]:
        return self._places.buffers

    def _require_module(self) -> None:
        if self._communicator is None:
            raise RuntimeError("The engine holds no module yet. Call `engine.shard(module)` first.")

    def _units_of(self, params_or_module: nn.Module | torch.Tensor | Iterable[torch.Tensor]) -> list[Unit]:
        if params_or_module is self.module:
            return self.units
        return self._places.units_of(_params_of(params_or_module))

    def _knows(self, params_or_module: nn.Module | torch.Tensor | Iterable[torch.Tensor]) -> bool:
        """Say whether parameters are of this engine's module; those of other parts of a pipeline are too."""
        known = any(param in self._places for param in _params_of(params_or_module))
        return known or params_or_module is self.module

    def _before_open(self, opening: ShardedOptimizer) -> None:
        self._aside.take_back()
        self._attached.close_others(opening)

    def _touch(self, unit: Unit) -> bool:
        if self._hooks.touch(unit):
            return True
        if unit.is_sharded_between_uses:
            return False
        self.flush()
        return True

    def _show_gradient(self, param: nn.Parameter) -> None:
        buffer, index = self._places.of(param)
        if index not in buffer.gradients.has_grad:
            return
        if buffer.gradients.is_spent:
            self._refuse_with_early_steps(f"Reading the gradient of `{self.param_name(param)}`")
        self._attached.show_gradient(param, (buffer, index))


@atexit.register
def _close_groups_at_exit() -> None:
    """Give the groups of open engines back: their threads must not outlive the interpreter they call into."""
    for engine in list(_ENGINES):
        engine._close_groups()


@contextmanager
def gathered(
    params_or_module: nn.Module | nn.Parameter | Iterable[nn.Parameter], write: Write | None = None
) -> Iterator[None]:
    """Make parameters whole for a while, whichever engine holds them; see ``ZeroEngine.gathered``.

    Parameters that no engine holds are whole already.
    """
    if not isinstance(params_or_module, (nn.Module, torch.Tensor)):
        params_or_module = list(params_or_module)
    engine = engine_of(params_or_module)
    if engine is None or not (engine.parts is not None or engine._units_of(params_or_module)):
        yield
        return
    with engine.gathered(params_or_module, write):
        yield


def _params_of(params_or_module: nn.Module | torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(params_or_module, nn.Module):
        return list(params_or_module.parameters())
    return [params_or_module] if isinstance(params_or_module, torch.Tensor) else list(params_or_module)


def engine_of(params_or_module: nn.Module | torch.Tensor | Sequence[torch.Tensor]) -> ZeroEngine | None:
    """Return the engine that holds parameters, or None.

    Raises:
        ValueError: Several engines do.
    """
    engines = [engine for engine in _ENGINES if engine._knows(params_or_module)]
    if len(engines) > 1:
        raise ValueError("The parameters belong to several engines. Take them engine by engine.")
    return engines[0] if engines else None


def _device_of(module: nn.Module) -> torch.device:
    devices = {param.device for param in module.parameters() if not param.is_meta}
    if len(devices) > 1:
        found = ", ".join(sorted(str(device) for device in devices))
        raise ValueError(f"The parameters are on several devices ({found}). Pass `device=`, or move the module to one.")
    return devices.pop() if devices else torch.device("cpu")
