"""``ZeroEngine``: a module and its optimizers, sharded over the ranks; needs nothing but PyTorch."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, overload
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_zero.config import OFFLOAD_USE, Communication, MixedPrecision, Moments, Offload, StepTime
from lightning_zero.engine.access.arguments import Gatherable, described, parameter, params_of
from lightning_zero.engine.access.gathered import Write
from lightning_zero.engine.access.records import ParameterRecord
from lightning_zero.engine.access.statistics import EngineStats
from lightning_zero.engine.buffers.buffer import with_digits
from lightning_zero.engine.buffers.parameter import restore_class
from lightning_zero.engine.buffers.window import compare_assigned
from lightning_zero.engine.engine_state import EngineState
from lightning_zero.engine.internals import Internals
from lightning_zero.engine.optim.whole_gradients import WholeGradients
from lightning_zero.engine.runtime.call_stack import apart_from_program
from lightning_zero.engine.sharded_module import EngineOptions
from lightning_zero.engine.unit_owner import UnitOwner, refuse_held
from lightning_zero.engine.units.deferred_init import deferred_values, forget_deferred
from lightning_zero.engine.units.unit import Unit
from lightning_zero.foreign_options import FOREIGN_TO_ENGINE
from lightning_zero.grid import Grid
from lightning_zero.microbatch import Microbatch
from lightning_zero.option_checks import checked_arguments
from lightning_zero.sharding import NodeRanks, Sharding
from lightning_zero.storage.host import unlock_freed

__all__ = ["ZeroEngine", "engine_of", "gathered"]

M = TypeVar("M", bound=nn.Module)
Opt = TypeVar("Opt", bound=Optimizer)

_ENGINES: WeakSet[ZeroEngine] = WeakSet()

_USE = {
    "communication": "Use `Communication(...)` or None, for example `Communication(reduce_dtype='bf16')`.",
    "precision": "Use `MixedPrecision(...)` or None, for example `MixedPrecision(compute_dtype=torch.bfloat16)`.",
    "units": "Use classes or names of classes, for example `units=['Block']`, or None.",
    "offload": OFFLOAD_USE,
}


class ZeroEngine:
    """Shards a module's parameters, gradients and optimizer states over the ranks (ZeRO, arXiv:1910.02054).

    Use::

        engine = ZeroEngine(stage=3)
        model = engine.shard(model)
        optimizer = engine.attach(torch.optim.AdamW(model.parameters()))

    and train as ever: ``loss.backward(); optimizer.step(); optimizer.zero_grad()``.

    Args:
        stage: 0 shards nothing, 1 optimizer states, 2 gradients too, 3 parameters too; or ``Sharding``, which says for
            each of the three over which ranks, or a dict of its fields.
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
        step: When each unit is stepped: ``"auto"``, or another of ``lightning_zero.config.StepTime``; the bits are the
            same.
        moments: How the moments of ``torch.optim.AdamW`` and ``Adam`` are kept: ``"fp32"``, or in fewer bytes, by one
            of ``lightning_zero.config.Moments``. Arithmetic is fp32, and so are moments in checkpoints.

    Raises:
        ValueError: ``stage`` is not 0, 1, 2, 3 or a ``Sharding``, or ``moments`` or ``step`` is not known.
    """

    @checked_arguments(use=_USE, foreign=FOREIGN_TO_ENGINE, unchecked=["stage"])
    def __init__(
        self,
        stage: int | Sharding | dict[str, Any] = 3,
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
        self.stage = Sharding.of(stage).stage
        self._state = EngineState(
            EngineOptions(
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
        )
        self._internals = Internals.of(self._state)

    @property
    def module(self) -> nn.Module | None:
        """The sharded module; None before ``shard`` and when the engine is closed."""
        return self._state.module

    @property
    def internals(self) -> Internals:
        """The parts that the strategy, pipelines and checkpoints use; they may change without notice."""
        return self._internals

    # -- Set-up ----------------------------------------------------------------------------------------------------

    def shard(
        self,
        module: M,
        holders: Mapping[str, tuple[int, ...]] | None = None,
        *,
        grid: Grid | None = None,
        node: NodeRanks | None = None,
    ) -> M:
        """Partition ``module`` in place and return it; all ranks start from rank 0's values.

        Collective: all ranks. Meta parameters are made real unit by unit, by their module's ``reset_parameters``, so no
        rank ever holds the whole model at stage 3. Those that wait for pretrained values get them.

        Args:
            module: The module.
            holders: With ``parts_group``: the parts, as ranks of it, that hold a parameter, by its first name. The
                values of the others are given up.
            grid: The ranks as a grid with several axes: over which of them each parameter is cut, and which part of it
                this rank has.
            node: The ranks of this node, for the scope ``"node"`` and ``Offload(fraction="auto")``; by default those
                that ``LOCAL_WORLD_SIZE`` and ``LOCAL_RANK`` say, which ``torchrun`` sets.

        Raises:
            ValueError: A name in ``units`` matches nothing; parameters on several devices and no ``device``; one that
                cannot be sharded, or shares memory with another; the ranks have different models or options.
            RuntimeError: The engine holds another module, or another engine this one, or values of its parameters.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(f"`engine.shard` takes a module, not {described(module)}. Pass the model itself.")
        if self.module is module:
            return module
        self._state.refuse_module(module)
        refuse_held(module, self._state)
        if _ENGINES:
            gc.collect()  # one that was dropped is in reference cycles, and holds memory, files and threads until then
        unlock_freed()
        self._state.shard(module, holders, grid=grid, node=node, owner=lambda unit: UnitOwner(self._state, unit))
        self._state.engine = self
        for values in deferred_values(module):
            values.load(self)
        forget_deferred(module)
        self._internals.fits.reset_stats()
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
                    f" {described(optimizer)}. Make each with its parameters: `torch.optim.AdamW(model.parameters())`."
                )
        self._state.require_module()
        self._state.attach(optimizers)
        return optimizers[0] if len(optimizers) == 1 else list(optimizers)

    def unshard(self) -> nn.Module:
        """Return the module with whole parameters in their own dtype, and close the engine.

        Parameters that the program has converted since the last run (``module.double()``) keep their dtype, with the
        digits of the masters where they are as they were. On a grid a rank's parameters are its parts again.
        Collective: all ranks.

        Raises:
            RuntimeError: Another engine holds parameters, which it shows rounded, older or not at all.
        """
        module = self._state.require_module()
        fits = self._internals.fits
        fits.refuse_held()
        converted = fits.converted()
        shown = {param: self._state.param_index.of(param)[0].shown.dtype for param in converted}
        dtypes = {self._state.param_index.name(param): values.dtype for param, values in converted.items()}
        if fits.parts is not None:
            dtypes = fits.converted_dtypes()  # other parts have them too
            fits.parts.end()
        self._state.let_go()
        self._state.drop_gradients()
        held = [param for param in module.parameters() if param in self._state.param_index]  # others came later
        names = {param: self._state.param_index.name(param) for param in held}
        own = {param: dtypes.get(name) or self._original_dtype(param) for param, name in names.items()}
        values = {param: self._part_here(param).to(dtype) for param, dtype in own.items()}
        for param, given in converted.items():
            values[param] = with_digits(given, values[param], shown[param])
        self._close()
        aliases = [one for buffer in self._state.buffers for one in buffer.aliases.values()]
        for one in aliases:
            one.hide()
        for param, value in values.items():
            restore_class(param)
            with torch._C.DisableTorchFunctionSubclass():
                param.data = value
        for one in aliases:
            one.show_own()
        return module

    def _part_here(self, param: nn.Parameter) -> torch.Tensor:
        """Return the whole parameter, or the part of it that this rank has on a grid. Collective: all ranks."""
        whole, part = self.full_param(param), self._state.param_index.part(param)
        return whole if part is None else part.read(whole).clone(memory_format=torch.contiguous_format)

    def _original_dtype(self, param: nn.Parameter) -> torch.dtype:
        return (
            param.dtype
            if self._state.param_index.is_remote(param)
            else self._state.param_index.of(param)[0].kind.original
        )

    def close(self) -> None:
        """Take the hooks out and let other engines use the process groups. No collective.

        Where steps are deferred, ``flush`` before. Parameters stay readable at stages 0 to 2, as after ``pause``; at
        stage 3 gather the parameters that it needs before.
        """
        if self.module is None:
            return
        try:
            self._state.rest()
        finally:
            self._close()

    def _close(self) -> None:
        try:
            self._state.close()
        finally:
            _ENGINES.discard(self)

    def show_masters(self) -> None:
        """Let parameters show themselves in their own dtype, with the masters' values, until a step.

        Collective: all ranks. Makes a difference where parameters compute in another dtype than their own; at stage 3
        to units as they are gathered.
        """
        self._state.require_module()
        self._state.attached.close()
        self.flush()
        self._state.sharded.whole.rest(together=True)

    # -- Steps -----------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Make the steps that were deferred. Collective at stages 1 and 2: all ranks."""
        self._state.flush()

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Run a step (``training_step``, ``validation_step``, …) that may use any parameter of the module.

        Collective: all ranks. A forward of the module itself needs no scope.
        """
        with self._internals.steps.scope(name):
            yield

    def meet(self) -> None:
        """Start the engine's collectives that come before one of the model's own.

        A module that communicates, such as experts that exchange tokens, calls it before each of its collectives, in
        its forward and in its backward: a rank whose experts have no tokens brings no gradients, and others would wait
        for these in the engine while it waits for them in the exchange. Such a module must run on every rank.
        Collective: all ranks.

        Raises:
            RuntimeError: This rank has passed a collective of the model by.
        """
        self._state.require_module()
        with apart_from_program():
            self._state.sharded.hooks.backward.meet()

    @contextmanager
    def backward_scope(self) -> Iterator[None]:
        """Run a backward in which every rank reduces, also one whose loss uses no parameter. Collective: all ranks."""
        with self._internals.steps.backward_scope():
            yield

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        """Run a micro-batch; before the last one stages 0 and 1 keep their gradients to themselves (ADR 0008).

        Args:
            last: The optimizer's step follows.

        Raises:
            ValueError: It is not the last, and the option ``step`` keeps no gradients.
        """
        with self._internals.steps.microbatch(Microbatch.LAST if last else Microbatch.EARLIER):
            yield

    def grad_norm(self, optimizer: Optimizer | None = None, norm_type: float = 2.0) -> torch.Tensor:
        """Return the norm of the reduced gradients of one optimizer, or of all parameters: () fp32, or fp64.

        Collective: all ranks, after backward.
        """
        self._state.require_module()
        self._state.timing.refuse("The norm of all gradients")
        self._state.recover()
        places = (
            self._state.param_index.by_id.values() if optimizer is None else self._state.attached.of(optimizer).places
        )
        return WholeGradients(self._state.communicator, self._state.parts).norm(places, norm_type)

    def unit_grad_norms(self, norm_type: float = 2.0) -> dict[str, torch.Tensor]:
        """Return the norm of the reduced gradients of each unit with trained parameters, by its name: () fp32.

        Collective: all ranks, after backward; one call per unit.

        Raises:
            ValueError: The ranks have different units, as pipeline stages do.
        """
        self._state.require_module()
        self._state.timing.refuse("The norms of units")
        self._state.recover()
        if self._state.parts is not None:
            raise ValueError(
                "`unit_grad_norms` does not work with `pipeline`: stages have other units. Use `grad_norm`."
            )
        gradients = WholeGradients(self._state.communicator, None)
        return {
            unit.name: gradients.norm(
                [(buffer, index) for buffer in unit.buffers for index in range(len(buffer.params))], norm_type
            )
            for unit in self._state.param_index.units
            if any(param.requires_grad for buffer in unit.buffers for param in buffer.params)
        }

    def clip_grad_norm(self, optimizer: Optimizer, max_norm: float) -> torch.Tensor:
        """Scale an optimizer's gradients so that their norm is at most ``max_norm``; return the norm before.

        Collective: all ranks.
        """
        self._state.require_module()
        self._state.timing.refuse("Clipping by norm")
        return self._state.attached.of(optimizer).clip_grad_norm(max_norm)

    def clip_grad_value(self, optimizer: Optimizer, clip_value: float) -> None:
        """Clamp every element of an optimizer's gradients to ``[-clip_value, clip_value]``."""
        self._state.require_module()
        self._state.timing.refuse("Clipping by value")
        self._state.attached.of(optimizer).clip_grad_value(clip_value)

    def unscale(self, optimizer: Optimizer, inv_scale: float) -> bool:
        """Multiply an optimizer's gradients; return whether one was not finite on some rank. Collective: all ranks."""
        self._state.require_module()
        self._state.timing.refuse("Scaling of the loss")
        return self._state.attached.of(optimizer).unscale(inv_scale)

    # -- Memory for something else ---------------------------------------------------------------------------------

    def offload_states(self) -> None:
        """Move masters, optimizer states and gradients to host memory, so that the device is free for a while.

        Collective at stages 1 and 2 where a step is deferred: all ranks. Parameters stay. Reading and saving work as
        they are; the next step or backward brings everything back by itself, as ``reload_states`` does. The bits of
        training do not change. Does nothing to tensors that are always offloaded.
        """
        if not self._state.sharded.offloaded_states.is_empty:
            return
        self._state.attached.close()
        self.flush()
        self._state.sharded.offloaded_states.offload(self._state.buffers, list(self._state.attached))

    def reload_states(self) -> None:
        """Bring back the states that ``offload_states`` has moved; does nothing if none were. No collective."""
        self._state.sharded.offloaded_states.reload()

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
            ValueError: ``write`` is not known, or ``"rank0"`` in pipeline stages or of a parameter of which ranks have
                parts.
            RuntimeError: A parameter was changed although ``write`` is None, or another rank left with an error under
                ``"rank0"``; all ranks have rank 0's values then.
        """
        self._state.require_module()
        params = params_of(params_or_module)
        units = self._units_of(params_or_module if isinstance(params_or_module, nn.Module) else params)
        self._state.attached.close()
        with self._state.sharded.whole.gathered(units, params, write):
            yield

    def full_param(self, param: torch.Tensor | nn.Module) -> torch.Tensor:
        """Return a copy of a parameter's values as they are stepped (fp32 masters), whole. Collective: all ranks."""
        param = parameter(param)
        self._state.require_module()
        self._state.attached.close()
        remote_params = self._state.param_index.remote_params
        is_here = not self._state.param_index.is_remote(param)
        here = self._state.sharded.whole.values(*self._state.param_index.of(param)) if is_here else None
        if remote_params is not None:
            return self._state.sharded.whole.values_of_part(param, here, remote_params)
        assert here is not None
        return here

    def full_grad(self, param: torch.Tensor | nn.Module) -> torch.Tensor | None:
        """Return a copy of a parameter's reduced gradient, whole; None if it has none. Collective: all ranks.

        Of a parameter that another part of the model holds it is None.
        """
        param = parameter(param)
        self._state.require_module()
        self._state.timing.refuse("Reading gradients")
        if self._state.param_index.is_remote(param):
            return None
        buffer, index = self._state.param_index.of(param)
        self._state.recover()
        buffer.window.take_gradient(index)
        compare_assigned([buffer.window], self._state.communicator)
        buffer.gradients.refuse_in_node(index)
        return self._state.sharded.whole.gradient(buffer, index)

    def records(self) -> list[ParameterRecord]:
        """Return one record per parameter, in the order of ``named_parameters``. No collective."""
        return self._internals.checkpoints.records()

    # -- Facts, statistics, plan -----------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Ranks that share the model."""
        return self._state.communicator.world_size

    @property
    def rank(self) -> int:
        """This rank among them."""
        return self._state.communicator.rank

    def param_name(self, param: nn.Parameter) -> str:
        """Return the first fully qualified name of a parameter."""
        return self._state.param_index.name(param)

    def stats(self) -> EngineStats:
        """Return bytes held, bytes sent and seconds waited on this rank. No collective."""
        return self._state.sharded.statistics.take(self._internals.fits.optimizers)

    def plan(self) -> list[str]:
        """Return about six lines of text: units, memory, traffic and where steps are made."""
        statistics, optimizers = self._state.sharded.statistics, self._internals.fits.optimizers
        return [*statistics.plan(optimizers), *self._state.sharded.step_devices.plan()]

    # -- Inside ----------------------------------------------------------------------------------------------------

    def _units_of(self, params_or_module: Gatherable) -> list[Unit]:
        if params_or_module is self.module:
            return self._state.units
        return self._state.param_index.units_of(params_of(params_or_module))

    def _knows(self, params_or_module: Gatherable) -> bool:
        """Say whether parameters are of this engine's module; those of other parts of a pipeline are too."""
        known = any(param in self._state.param_index for param in params_of(params_or_module))
        return known or params_or_module is self.module


@contextmanager
def gathered(params_or_module: Gatherable, write: Write | None = None) -> Iterator[None]:
    """Make parameters whole for a while, whichever engine holds them; see ``ZeroEngine.gathered``.

    Parameters that no engine holds are whole already.
    """
    if not isinstance(params_or_module, (nn.Module, torch.Tensor, str)):
        params_or_module = list(params_or_module)
    engine = engine_of(params_or_module)
    if engine is None or not (engine._state.parts is not None or engine._units_of(params_or_module)):
        yield
        return
    with engine.gathered(params_or_module, write):
        yield


def engine_of(params_or_module: Gatherable) -> ZeroEngine | None:
    """Return the engine that holds parameters, or None.

    Raises:
        ValueError: Several engines do.
        TypeError: They are neither parameters nor modules.
    """
    params_of(params_or_module)
    engines = [engine for engine in _ENGINES if engine._knows(params_or_module)]
    if len(engines) > 1:
        raise ValueError("The parameters belong to several engines. Take them engine by engine.")
    return engines[0] if engines else None
