"""``ZeroEngine``: a module and its optimizers, sharded over the ranks; needs nothing but PyTorch."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, TypeVar, cast, overload
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_zero.comm.agreement import require_same
from lightning_zero.comm.communicator import Communicator
from lightning_zero.config import OFFLOAD_USE, Communication, MixedPrecision, Moments, Offload, StepTime
from lightning_zero.engine.access.gathered import Write
from lightning_zero.engine.access.param_index import ParamIndex
from lightning_zero.engine.access.records import ParameterRecord, records_of
from lightning_zero.engine.access.statistics import EngineStats
from lightning_zero.engine.buffers.buffer import FlatBuffer
from lightning_zero.engine.buffers.deferred import Deferral
from lightning_zero.engine.buffers.parameter import is_called_by, raw_grad, restore_class
from lightning_zero.engine.buffers.sharded_gradient import ShardedGradient, mark_of_stage
from lightning_zero.engine.buffers.window import compare_assigned
from lightning_zero.engine.optim.attached import Attached
from lightning_zero.engine.optim.optimizer import ShardedOptimizer, gradient_norm
from lightning_zero.engine.optim.step_device import StepDevice
from lightning_zero.engine.runtime.accumulation_hooks import has_hooks_of_program
from lightning_zero.engine.runtime.backward import Microbatch
from lightning_zero.engine.runtime.hooks import is_hooked
from lightning_zero.engine.sharded_module import EngineOptions, ShardedModule
from lightning_zero.engine.units.deferred_init import deferred_params, deferred_values, forget_deferred
from lightning_zero.engine.units.facts import optimizer_facts
from lightning_zero.engine.units.pipeline_peers import PipelinePeers
from lightning_zero.engine.units.shardable import check_shardable
from lightning_zero.engine.units.unit import Unit, UnitState
from lightning_zero.errors import PipelineError
from lightning_zero.foreign_options import FOREIGN_TO_ENGINE
from lightning_zero.option_checks import checked_arguments

__all__ = ["ZeroEngine", "engine_of", "gathered"]

M = TypeVar("M", bound=nn.Module)
Opt = TypeVar("Opt", bound=Optimizer)
Gatherable = nn.Module | torch.Tensor | Iterable[nn.Module | torch.Tensor]

_ENGINES: WeakSet[ZeroEngine] = WeakSet()

_NO_MODULE = "The engine holds no module yet. Call `engine.shard(module)` first."
_CLOSED = (
    "This engine is closed, by `close()` or `unshard()`. Make a new `ZeroEngine`, shard the module with it and attach"
    " the optimizers again. To keep values that are sharded call `unshard()` instead of `close()`."
)

_USE = {
    "communication": "Use `Communication(...)` or None, for example `Communication(reduce_dtype='bf16')`.",
    "precision": "Use `MixedPrecision(...)` or None, for example `MixedPrecision(compute_dtype=torch.bfloat16)`.",
    "units": "Use classes or names of classes, for example `units=['Block']`, or None.",
    "offload": OFFLOAD_USE,
}


class _UnitOwner:
    """Answers for the parameters of one unit."""

    def __init__(self, engine: ZeroEngine, unit: Unit) -> None:
        self._engine = engine
        self._unit = unit

    def param_name(self, param: nn.Parameter) -> str:
        return self._engine.param_name(param)

    def touch(self, param: nn.Parameter) -> bool:
        return self._engine._touch(self._unit)

    def own_dtype(self, param: nn.Parameter) -> torch.dtype:
        return self._engine._places.of(param)[0].kind.original

    def show_original(self, param: nn.Parameter) -> None:
        self._engine._show_original(self._unit, param)

    def show_gradient(self, param: nn.Parameter) -> torch.Tensor | None:
        return self._engine._show_gradient(param)

    def write_gradient(self, param: nn.Parameter, grad: torch.Tensor | None) -> None:
        self._engine._write_gradient(param, grad)

    def refuse_step(self, param: nn.Parameter, optimizer: Optimizer) -> None:
        if self._engine.module is not None:  # else the engine is closed
            self._engine._attached.refuse_step(param, self._engine._places.of(param), optimizer)


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
        offload: Where optimizer states, masters and parameters are stored: ``"cpu"``, or ``Offload``.
        step: When each unit is stepped; the bits are the same. ``"now"``: in ``optimizer.step()``. ``"deferred"``:
            during the next forward, before the unit is used. ``"backward"``: in the backward, as soon as the unit's
            gradients are reduced, which frees them; operations on all gradients (clipping, norms, accumulation)
            is refused. ``"auto"``: deferred where the unit is offloaded, now elsewhere.
        moments: How the moments of ``torch.optim.AdamW`` and ``Adam`` are kept: ``"fp32"``, ``"bf16"``, or ``"int8"``
            (a byte each, with one scale for 256 elements). Arithmetic is fp32, and so are moments in checkpoints.

    Raises:
        ValueError: ``stage`` is not 0, 1, 2 or 3, or ``moments`` or ``step`` is not known.
    """

    @checked_arguments(use=_USE, foreign=FOREIGN_TO_ENGINE, unchecked=["stage"])
    def __init__(
        self,
        stage: int = 3,
        *,
        units: Sequence[str | type[nn.Module]] | str | type[nn.Module] | None = None,
        communication: Communication | None = None,
        precision: MixedPrecision | None = None,
        device: torch.device | str | int | None = None,
        process_group: dist.ProcessGroup | None = None,
        parts_group: dist.ProcessGroup | None = None,
        offload: Offload | dict[str, Any] | str | None = None,
        step: StepTime = "auto",
        moments: Moments = "fp32",
    ) -> None:
        self.stage = stage
        self._options = EngineOptions(
            stage=stage,
            units=[units] if isinstance(units, (str, type)) else units,
            communication=communication or Communication(),
            precision=precision or MixedPrecision(),
            device=torch.device(device) if device is not None else None,
            process_group=process_group,
            parts_group=parts_group,
            offload=Offload.of(offload),
            step=step,
            moments=moments,
        )
        # - Set by `shard`
        self.module: nn.Module | None = None  # None again when the engine is closed
        self._made: ShardedModule | None = None
        self._places = ParamIndex()
        # - Set by `attach`
        self._attached = Attached(self._mark_stale)
        self._deferral = Deferral(step, lambda: self.communicator.device)

    # -- Set-up ----------------------------------------------------------------------------------------------------

    def shard(self, module: M, holders: Mapping[str, tuple[int, ...]] | None = None) -> M:
        """Partition ``module`` in place and return it; all ranks start from rank 0's values.

        Collective: all ranks. Meta parameters are made real unit by unit, by their module's ``reset_parameters``, so no
        rank ever holds the whole model at stage 3. Those that wait for pretrained values get them.

        Args:
            module: The module.
            holders: With ``parts_group``: the parts, as ranks of it, that hold a parameter, by its first name. The
                values of the others are given up.

        Raises:
            ValueError: A name in ``units`` matches nothing; parameters on several devices and no ``device``; one that
                cannot be sharded, or shares memory with another; the ranks have different models or options.
            RuntimeError: The engine holds another module, or another engine this one.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(f"`engine.shard` takes a module, not {_described(module)}. Pass the model itself.")
        if self.module is module:
            return module
        self._require_open()
        if self.module is not None:
            raise RuntimeError("This engine holds another module. Make a new `ZeroEngine` for each module.")
        if is_hooked(module):
            raise RuntimeError(
                "The module, or a part of it, is sharded by another engine, which would take its gradients. Call"
                " `unshard()` or `close()` of that engine before, on every rank, and keep it until then."
            )
        check_shardable(module)
        if _ENGINES:
            gc.collect()  # one that was dropped is in reference cycles, and holds memory, files and threads until then
        self._made = ShardedModule(
            module,
            self._options,
            holders,
            awaited=deferred_params(module),
            places=self._places,
            close_windows=self._attached.close,
            owner=lambda unit: _UnitOwner(self, unit),
        )
        self.module = module
        for buffer in self._buffers:
            buffer.on_rounded_write = self._made.rounded_writes
        self._made.module_buffers.broadcast()
        for values in deferred_values(module):
            values.load(self)
        forget_deferred(module)
        self.reset_stats()
        _ENGINES.add(self)
        return module

    @overload
    def attach(self, optimizer: Opt, /) -> Opt: ...

    @overload
    def attach(self, first: Opt, second: Opt, /, *others: Opt) -> list[Opt]: ...

    def attach(self, *optimizers: Optimizer) -> Any:
        """Make optimizers step this rank's segments; they replace those attached before.

        Collective: all ranks. The objects stay the same and keep the module's parameters in their groups.

        Returns:
            The optimizer, or a list of them if there are several.

        Raises:
            ValueError: The ranks have different optimizers; one is not element-wise at stage 1 or above, holds a
                parameter of another module, or has moments that cannot be kept as ``moments`` says.
        """
        for optimizer in optimizers:
            if not isinstance(optimizer, Optimizer):
                raise TypeError(
                    f"`engine.attach` takes optimizers one by one, as `engine.attach(*optimizers)`, not"
                    f" {_described(optimizer)}. Make each with its parameters: `torch.optim.AdamW(model.parameters())`."
                )
        self._require_module()
        if self.world_size > 1:
            require_same(
                self.communicator,
                optimizer_facts(optimizers, self._name_of),
                "optimizers",
                "Make the same optimizers, with the same parameters in the same order, on every rank.",
            )
        self._let_go()
        early, offload = self._sharded.early, self._options.offload
        if early is not None and len(optimizers) > 1:
            raise ValueError(
                f"`step='backward'` is for one optimizer, got {len(optimizers)}: a backward does not say which of"
                " them is going to step. Use `step='auto'`."
            )
        for optimizer in optimizers:
            sharded = ShardedOptimizer(
                optimizer,
                self._places.by_id,
                communicator=self.communicator,
                before_open=self._before_open,
                parts=self.parts,
                keeps_gradients=self._attached.keeps_gradients,
                deferral=self._deferral,
                after_defer=self._mark_stale,
                moments=self._options.moments,
                before_step=self._sharded.hooks.scopes.begin_step,
                after_step=self._end_step,
            )
            self._attached.add(sharded)
            if offload is not None and offload.step_device == "cuda":
                sharded.require_runs("Offload(step_device='cuda')")
            if early is not None:
                sharded.allow_early_steps()
                early.optimizer = sharded
        self._attached.replace_former()
        return optimizers[0] if len(optimizers) == 1 else list(optimizers)

    def _name_of(self, param: torch.Tensor) -> str:
        names = self._places.names.get(id(param))
        return names[0] if names else f"a tensor of shape {tuple(param.shape)} that the module does not have"

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
        self._require_module()
        self._let_go()
        self._drop_gradients()

    def _let_go(self) -> None:
        """Let go of the optimizers."""
        self._attached.close()
        if self.module is not None:
            self.reload_states()
        self._attached.detach()
        if self._made is not None and self._made.early is not None:
            self._made.early.optimizer = None

    def _drop_gradients(self) -> None:
        for buffer in self._buffers:
            buffer.window.drop(range(len(buffer.params)))

    def pause(self) -> None:
        """Let the module compute as if it were not sharded, until ``resume``. No collective.

        Parameters show themselves in their own dtype, with the values of the masters; at stages 1 and 2 on several
        ranks only after ``show_masters``. Gradients are dropped. Where parameters are released between uses (stage 3)
        the hooks stay: without them nothing could compute.
        """
        self._require_module()
        self._attached.close()
        self._flush_here()
        self._drop_gradients()
        self._sharded.whole.rest(together=False)
        if not any(unit.is_sharded_between_uses for unit in self.units):
            self._sharded.hooks.remove()

    def show_masters(self) -> None:
        """Let parameters show themselves in their own dtype, with the masters' values, until ``resume`` or a step.

        Collective: all ranks. Makes a difference where parameters compute in another dtype than their own; at stage 3
        to units as they are gathered.
        """
        self._require_module()
        self._attached.close()
        self.flush()
        self._sharded.whole.rest(together=True)

    def resume(self) -> None:
        """Go on after ``pause`` or ``show_masters``, with the values written since; else do nothing. No collective."""
        module = self._require_module()
        self._sharded.whole.end_rest()
        self._sharded.hooks.install(module)

    def unshard(self) -> nn.Module:
        """Return the module with whole parameters in their own dtype, and close the engine.

        Collective: all ranks.
        """
        module = self._require_module()
        self.detach()
        held = [param for param in module.parameters() if param in self._places]  # others were put there later
        values = {param: self.full_param(param).to(self._original_dtype(param)) for param in held}
        self._close()
        aliases = [one for buffer in self._buffers for one in buffer.aliases.values()]
        for one in aliases:
            one.hide()
        for param, value in values.items():
            restore_class(param)
            with torch._C.DisableTorchFunctionSubclass():
                param.data = value
        for one in aliases:
            one.show_own()
        return module

    @property
    def holds_all_parameters(self) -> bool:
        """Whether every parameter of the module is one that was sharded."""
        return self._made is None or self._made.membership.stranger is None

    def _original_dtype(self, param: nn.Parameter) -> torch.dtype:
        return param.dtype if self._places.is_elsewhere(param) else self._places.of(param)[0].kind.original

    def close(self) -> None:
        """Take the hooks out and let other engines use the process groups. No collective.

        Where steps are deferred, ``flush`` before. Parameters stay readable at stages 0 to 2, as after ``pause``; at
        stage 3 gather the parameters that it needs before.
        """
        if self.module is None:
            return
        try:
            self._attached.close()
            self._flush_here()
            self._sharded.whole.rest(together=False)
        finally:
            self._close()

    def _close(self) -> None:
        try:
            self._attached.close()
            self._flush_here()
        finally:
            self._deferral.close()
            self._sharded.close()
            self.module = None
            _ENGINES.discard(self)

    # -- Steps -----------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Make the steps that were deferred. Collective at stages 1 and 2: all ranks."""
        self._require_module()
        stale = [unit for unit in self.units if unit.state is UnitState.STALE]
        with self._sharded.hooks.scopes.boundary() if stale else nullcontext():
            for unit in stale:
                unit.unshard()
            for unit in stale:
                unit.wait()
        for buffer in self._buffers:
            buffer.values.flush()

    def _flush_here(self) -> None:
        """Make the steps that were deferred, as far as no other rank is needed."""
        if not any(unit.buffers and unit.buffers[0].own_range.is_shard for unit in self.units):
            self.flush()
        for buffer in self._buffers:
            buffer.values.flush()

    def _mark_stale(self, buffer: FlatBuffer) -> None:
        self._places.unit_of(buffer).mark_stale()

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Run a step (``training_step``, ``validation_step``, …) that may use any parameter of the module.

        Collective: all ranks. A forward of the module itself needs no scope.
        """
        with self._sharded.hooks.scopes.scope(name):
            yield

    def broadcast_module_buffers(self, when: Literal["scopes", "never"]) -> None:
        """Give all ranks rank 0's module buffers now, and say when to do so again. Collective: all ranks.

        Without this call scopes do, and forwards of the module outside of them.

        Args:
            when: ``"scopes"``: only scopes do; forwards in hooks leave module buffers alone. ``"never"``: every rank
                keeps its own from now on.
        """
        self._sharded.hooks.scopes.forwards_are_steps = False
        self._sharded.module_buffers.make_equal()
        self._sharded.module_buffers.is_on = when == "scopes"

    def around_collective(self) -> AbstractContextManager[None]:
        """Return a context in which every rank makes a collective of its own, also inside a scope at stage 3.

        Collective: all ranks. Does nothing in a backward.
        """
        return nullcontext() if self.module is None else self._sharded.hooks.scopes.around_collective()

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """Take no note of forwards: they compute nothing, with stand-ins for parameters. No collective."""
        self._sharded.hooks.forwards.is_on_disk = True
        try:
            yield
        finally:
            self._sharded.hooks.forwards.is_on_disk = False

    @contextmanager
    def backward_scope(self) -> Iterator[None]:
        """Run a backward in which every rank reduces, also one whose loss uses no parameter. Collective: all ranks."""
        with self._sharded.hooks.scopes.backward():
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
            ValueError: It is not the last, with ``step='backward'``.
        """
        if not last:
            self._refuse_with_early_steps("Accumulating gradients over micro-batches")
        backward = self._sharded.hooks.backward
        before, backward.microbatch = backward.microbatch, Microbatch(last, has_more_backwards, keeps_gradients)
        try:
            yield
        finally:
            backward.microbatch = before

    def has_hooks_of_program(self, param: nn.Parameter) -> bool:
        """Say whether the program has hooks on a parameter's gradient."""
        return has_hooks_of_program(param)

    def open_window(self, optimizer: Optimizer) -> None:
        """Open the step window: each parameter shows its master's segment and the reduced gradient's."""
        self._require_module()
        self._attached.of(optimizer).open()

    def close_window(self, optimizer: Optimizer) -> None:
        """Close the step window without a step; gradients stay until ``zero_grad``."""
        self._require_module()
        self._attached.of(optimizer).close()

    @property
    def is_last_microbatch(self) -> bool:
        """Whether the next backward is the last before the optimizer's step."""
        return self._sharded.hooks.backward.microbatch.is_last

    def begin_gradients(self) -> None:
        """Drop all gradients now, and let ``zero_grad`` leave those that follow alone, until ``end_gradients``.

        For steps whose backward comes before ``zero_grad`` is called.
        """
        self._require_module()
        self._drop_gradients()
        self._attached.begin_gradients()

    def end_gradients(self) -> None:
        """Let ``zero_grad`` drop gradients again.

        Raises:
            PipelineError: ``zero_grad`` was not called since ``begin_gradients``.
        """
        self._require_module()
        self._attached.end_gradients()

    def sum_shared_gradients(self) -> list[str]:
        """Sum the gradients of parameters that several parts of the model hold; once, after the last micro-batch.

        Collective: all ranks.

        Returns:
            The names of those of which several parts had a gradient.
        """
        self._require_module()
        return [] if self.parts is None else self.parts.sum_gradients(self._buffers)

    def grad_norm(self, optimizer: Optimizer | None = None, norm_type: float = 2.0) -> torch.Tensor:
        """Return the norm of the reduced gradients of one optimizer, or of all parameters: () fp32.

        Collective: all ranks, after backward.
        """
        self._require_module()
        self._refuse_with_early_steps("The norm of all gradients")
        self._recover()
        places = self._places.by_id.values() if optimizer is None else self._attached.of(optimizer).places
        return gradient_norm(places, norm_type, self.communicator, self.parts)

    def clip_grad_norm(self, optimizer: Optimizer, max_norm: float) -> torch.Tensor:
        """Scale an optimizer's gradients so that their norm is at most ``max_norm``; return the norm before.

        Collective: all ranks.
        """
        self._require_module()
        self._refuse_with_early_steps("Clipping by norm")
        return self._attached.of(optimizer).clip_grad_norm(max_norm)

    def clip_grad_value(self, optimizer: Optimizer, clip_value: float) -> None:
        """Clamp every element of an optimizer's gradients to ``[-clip_value, clip_value]``."""
        self._require_module()
        self._refuse_with_early_steps("Clipping by value")
        self._attached.of(optimizer).clip_grad_value(clip_value)

    def unscale(self, optimizer: Optimizer, inv_scale: float) -> bool:
        """Multiply an optimizer's gradients; return whether one was not finite on some rank. Collective: all ranks."""
        self._require_module()
        self._refuse_with_early_steps("Scaling of the loss")
        return self._attached.of(optimizer).unscale(inv_scale)

    def _refuse_with_early_steps(self, what: str) -> None:
        if self._options.steps_in_backward:
            raise ValueError(
                f"{what} does not work with `step='backward'`: a unit's gradients are stepped and given up before"
                " those of the next one are there. Use `step='auto'`."
            )

    # -- Memory for something else ---------------------------------------------------------------------------------

    def offload_states(self) -> None:
        """Move masters, optimizer states and gradients to host memory, so that the device is free for a while.

        Collective at stages 1 and 2 where a step is deferred: all ranks. Parameters stay. Reading and saving work as
        they are; the next step or backward brings everything back by itself, as ``reload_states`` does. The bits of
        training do not change. Does nothing to tensors that are always offloaded.
        """
        if not self._sharded.aside.is_empty:
            return
        self._attached.close()
        self.flush()
        self._sharded.aside.put(self._buffers, list(self._attached))

    def reload_states(self) -> None:
        """Bring back the states that ``offload_states`` has moved; does nothing if none were. No collective."""
        self._sharded.aside.take_back()

    def keep_params_on_device(self) -> None:
        """Keep the shards of parameters on the device from now on, before optimizers are attached (stage 3)."""
        self._require_module()
        for buffer in self._buffers:
            buffer.values.bring_shard()

    # -- Reading and writing ---------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self, params_or_module: Gatherable, write: Write | None = None) -> Iterator[None]:
        """Make parameters whole for a while. Collective on entry, and on exit with ``write="rank0"``: all ranks.

        Inside, forwards of gathered modules do not communicate, so one rank alone may run them. Parameters of other
        pipeline stages come along.

        Args:
            params_or_module: A module, a parameter, or several.
            write: The fate of changes: ``"rank0"`` takes rank 0's on all ranks, ``"all"`` takes every rank's own
                (they must agree), None means there are none.

        Raises:
            ValueError: ``write`` is not known, or ``"rank0"`` in pipeline stages.
            RuntimeError: A parameter was changed although ``write`` is None, or another rank left with an error under
                ``"rank0"``; all ranks have rank 0's values then.
        """
        self._require_module()
        params = _params_of(params_or_module)
        units = self._units_of(params_or_module if isinstance(params_or_module, nn.Module) else params)
        self._attached.close()
        with self._sharded.whole.gathered(units, params, write):
            yield

    def full_param(self, param: torch.Tensor | nn.Module) -> torch.Tensor:
        """Return a copy of a parameter's values as they are stepped (fp32 masters), whole. Collective: all ranks."""
        param = _parameter(param)
        self._require_module()
        self._attached.close()
        elsewhere = self._places.elsewhere
        here = None if self._places.is_elsewhere(param) else self._sharded.whole.values(*self._places.of(param))
        if elsewhere is not None:
            return self._sharded.whole.values_of_part(param, here, elsewhere)
        assert here is not None
        return here

    def full_grad(self, param: torch.Tensor | nn.Module) -> torch.Tensor | None:
        """Return a copy of a parameter's reduced gradient, whole; None if it has none. Collective: all ranks.

        Of a parameter that another part of the model holds it is None.
        """
        param = _parameter(param)
        self._require_module()
        self._refuse_with_early_steps("Reading gradients")
        if self._places.is_elsewhere(param):
            return None
        buffer, index = self._places.of(param)
        self._recover()
        buffer.window.take_gradient(index)
        compare_assigned([buffer.window], self.communicator)
        return self._sharded.whole.gradient(buffer, index)

    # -- Checkpoints -----------------------------------------------------------------------------------------------

    def records(self) -> list[ParameterRecord]:
        """Return one record per parameter, in the order of ``named_parameters``. No collective."""
        module = self._require_module()
        self._attached.close()
        self._sharded.membership.require()
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        trained = {id(param) for group in groups for param in group["params"]}
        for buffer in self._buffers:
            buffer.refresh_master()
        return records_of(
            module, self._places, trained, parts=self.parts, rank=self.rank, moments=self._options.moments
        )

    @property
    def progress(self) -> dict[str, str]:
        """Return each optimizer's number of steps, as text: equal on all ranks wherever they may save together."""
        steps = {f"steps of optimizer {index}": one.num_steps for index, one in enumerate(self._attached)}
        halfway = {f"optimizer {index}": "inside a step" for index, one in enumerate(self._attached) if one.is_halfway}
        return {**{name: str(number) for name, number in steps.items()}, **halfway}

    def state_place(self, optimizer: Optimizer, param: nn.Parameter, key: str) -> torch.Tensor | None:
        """Return where a state of a parameter is to be loaded to: 1-D over ``own_range``. No collective.

        None where the caller makes a tensor.
        """
        self._require_module()
        return self._attached.of(optimizer).state_place(param, key)

    def complete_masters(self) -> None:
        """Give every rank the masters that the others wrote in their ``save_range``. Collective: all ranks.

        Above stage 0 a rank has no more than its range, and nothing is sent.
        """
        self._require_module()
        for buffer in self._buffers:
            pending = buffer.gather_stepped()
            if pending is not None:
                pending.wait()
        if self.parts is not None:
            self.parts.start_equal(self._buffers)

    def prepare_load(self) -> None:
        """Let ``master()`` of frozen parameters hold any values of their own dtype until ``publish``. No collective."""
        self._require_module()
        self._attached.close()
        for buffer in self._buffers:
            buffer.refresh_master()
            buffer.values.widen()

    def publish(self) -> None:
        """Make the masters the parameters' values. Collective: all ranks. Call after writing into ``master()``."""
        self._require_module()
        for buffer in self._buffers:
            pending = buffer.publish()
            if pending is not None:
                pending.wait()
            buffer.published()
        widened = [buffer for buffer in self._buffers if buffer.is_widened]
        if widened:
            needed = [buffer.values.needs_master() for buffer in widened]
            flags = self.communicator.agree_on(needed, "agreement on masters of frozen parameters")
            for buffer, flag in zip(widened, flags, strict=True):
                buffer.values.narrow(needs_master=bool(flag))

    # -- Statistics and plan ---------------------------------------------------------------------------------------

    @property
    def parts(self) -> PipelinePeers | None:
        """The other parts of a model that is cut; None if it is whole."""
        return None if self._made is None else self._made.parts

    @property
    def units(self) -> list[Unit]:
        """The units, the root's first."""
        return self._places.units

    @property
    def optimizers(self) -> list[Optimizer]:
        """The attached optimizers."""
        return [sharded.optimizer for sharded in self._attached]

    @property
    def step_devices(self) -> dict[str, StepDevice]:
        """On which processor each offloaded unit is stepped, by name."""
        return self._sharded.step_devices.chosen

    def use_step_devices(self, chosen: Mapping[str, StepDevice]) -> None:
        """Step offloaded units where they were stepped before, as ``step_devices`` said; fixed ones stay.

        The two processors round differently in the last bit. Every rank chooses the same.
        """
        step_devices, offload = self._sharded.step_devices, self._options.offload
        if offload is None or offload.step_device is None:
            step_devices.use(chosen)

    @property
    def communicator(self) -> Communicator:
        """The communicator over the ranks that share the parameters.

        Raises:
            RuntimeError: There is no module yet.
        """
        return self._last_made.communicator

    @property
    def everyone(self) -> Communicator:
        """All ranks, those of other parts of the model too: who writes a checkpoint together.

        Raises:
            RuntimeError: There is no module yet.
        """
        return self._last_made.everyone

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
        """Return bytes held, bytes sent and seconds waited on this rank. No collective."""
        return self._sharded.statistics.take(self.optimizers)

    def reset_stats(self) -> None:
        """Start counting traffic and peaks anew."""
        self._sharded.statistics.reset()

    def plan(self) -> list[str]:
        """Return about six lines of text: units, memory, traffic and where steps are made."""
        return [*self._sharded.statistics.plan(), *self._sharded.step_devices.plan()]

    # -- Inside ----------------------------------------------------------------------------------------------------

    @property
    def _buffers(self) -> list[FlatBuffer]:
        return self._places.buffers

    @property
    def _sharded(self) -> ShardedModule:
        self._require_module()
        return self._last_made

    @property
    def _last_made(self) -> ShardedModule:
        """The sharded module, also of an engine that is closed."""
        if self._made is None:
            raise RuntimeError(_NO_MODULE)
        return self._made

    def _require_module(self) -> nn.Module:
        """Return the module; refuse an engine that has none."""
        self._require_open()
        if self.module is None:
            raise RuntimeError(_NO_MODULE)
        return self.module

    def _require_open(self) -> None:
        if self.module is None and self._made is not None:
            raise RuntimeError(_CLOSED)

    def _units_of(self, params_or_module: Gatherable) -> list[Unit]:
        if params_or_module is self.module:
            return self.units
        return self._places.units_of(_params_of(params_or_module))

    def _knows(self, params_or_module: Gatherable) -> bool:
        """Say whether parameters are of this engine's module; those of other parts of a pipeline are too."""
        known = any(param in self._places for param in _params_of(params_or_module))
        return known or params_or_module is self.module

    def _before_open(self, opening: ShardedOptimizer) -> None:
        self._sharded.hooks.scopes.recover()
        self._sharded.membership.require()
        self._sharded.aside.take_back()
        self._sharded.whole.end_rest()
        self._sharded.whole.hide_originals()
        self._attached.close_others(opening)

    def _recover(self) -> None:
        """End an interrupted backward, before gradients are read or assigned. No collective."""
        if self.module is not None:
            self._sharded.hooks.scopes.recover()

    def _end_step(self, buffers: Sequence[FlatBuffer]) -> None:
        units = {unit.index: unit for unit in map(self._places.unit_of, buffers)}
        self._sharded.hooks.scopes.end_step(list(units.values()))

    def _touch(self, unit: Unit) -> bool:
        if self._sharded.hooks.uses.touch(unit):
            return True
        if unit.is_sharded_between_uses:
            return False
        self.flush()
        return True

    def _show_original(self, unit: Unit, param: nn.Parameter) -> None:
        if self._sharded.hooks.uses.compute_in_backward(unit):
            return
        if any(sharded.is_running for sharded in self._attached):
            raise RuntimeError(
                f"`{self.param_name(param)}` computes in 16 bits and is used by the step of an optimizer that does not"
                " hold it. Read it before the step, with `full_param`."
            )
        self._attached.close()
        self._sharded.whole.show_original(unit)

    def _write_gradient(self, param: nn.Parameter, grad: torch.Tensor | None) -> None:
        buffer, index = self._places.of(param)
        self._recover()
        self._refuse_in_backward(buffer, index)
        if buffer.gradients.is_ahead:
            what = "Dropping" if grad is None else "Assigning"
            self._refuse_with_early_steps(
                f"{what} the gradient of `{self.param_name(param)}` between backward and `optimizer.step()`"
            )
        if isinstance(grad, ShardedGradient):  # a segment: it is written in the step window
            self._show_gradient(param)
            if index not in buffer.window.entered:
                self._attached.show_gradient(param, (buffer, index))
        buffer.window.write(index, grad)
        if grad is None and not buffer.gradients.has_grad:
            self._attached.close_idle(param)

    def _refuse_in_backward(self, buffer: FlatBuffer, index: int) -> None:
        if index in buffer.gradients.has_grad and torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"`grad` of `{buffer.layout.slots[index].name}` is used in a backward (by a hook of"
                " `register_post_accumulate_grad_hook`?) that adds to the average of an earlier one. The sum is not"
                " there before the backward ends. Use it behind the backward, or call `zero_grad` before."
            )

    def _show_gradient(self, param: nn.Parameter) -> torch.Tensor | None:
        """Bring a gradient into ``grad``, or return this rank's local sum that waits for the last micro-batch."""
        buffer, index = self._places.of(param)
        self._recover()
        has_any = index in buffer.gradients.waiting or index in buffer.gradients.has_grad
        if has_any and self._attached.is_in_step and is_called_by(nn.Module.zero_grad):
            raise PipelineError(
                f"`zero_grad()` of a module in a pipelined step would drop the gradient of `{self.param_name(param)}`"
                " that earlier micro-batches of the same batch have: their backwards run before the step of later ones."
                " Leave the call out: gradients are dropped before every batch."
            )
        if index in buffer.gradients.waiting and is_called_by(nn.Module.zero_grad):
            buffer.window.drop([index])
            return None
        if buffer.gradients.is_summing and index in buffer.gradients.waiting:
            return buffer.gradients.show_sum(index)
        if index not in buffer.gradients.has_grad:
            return None
        self._refuse_in_backward(buffer, index)
        if buffer.gradients.is_spent:
            if buffer.gradients.is_ahead or not is_called_by(nn.Module.zero_grad):
                self._refuse_with_early_steps(f"Reading the gradient of `{self.param_name(param)}`")
            buffer.window.drop([index])
            return None
        self._attached.show_gradient(param, (buffer, index))
        if self.parts is not None:
            mark_of_stage(raw_grad(param))
        return None


@contextmanager
def gathered(params_or_module: Gatherable, write: Write | None = None) -> Iterator[None]:
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


def _params_of(params_or_module: Gatherable) -> list[torch.Tensor]:
    if isinstance(params_or_module, nn.Module):
        return list(params_or_module.parameters())
    if isinstance(params_or_module, torch.Tensor):
        return [params_or_module]
    if isinstance(params_or_module, (str, bytes)) or not isinstance(params_or_module, Iterable):
        raise TypeError(
            f"Pass a module, a parameter, or several, not {_described(params_or_module)}: `gathered(layer.weight)`."
        )
    return [param for item in params_or_module for param in _params_of(item)]


def _described(value: Any) -> str:
    if isinstance(value, type):
        return f"the class `{value.__name__}`"
    return f"`{value!r}`" if isinstance(value, str) or value is None else f"a `{type(value).__name__}`"


def _parameter(param: torch.Tensor | nn.Module) -> nn.Parameter:
    if not isinstance(param, torch.Tensor):
        raise TypeError(f"`{type(param).__name__}` is no parameter. Pass one parameter; `gathered` takes modules too.")
    return cast(nn.Parameter, param)  # to a type checker `module.weight` is a tensor or a module


def engine_of(params_or_module: Gatherable) -> ZeroEngine | None:
    """Return the engine that holds parameters, or None.

    Raises:
        ValueError: Several engines do.
    """
    engines = [engine for engine in _ENGINES if engine._knows(params_or_module)]
    if len(engines) > 1:
        raise ValueError("The parameters belong to several engines. Take them engine by engine.")
    return engines[0] if engines else None
