"""``estimate_memory``: the bytes of a training step with every setting, before there is a run."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.blocks import repeated_blocks
from lightning_zero.config import ActivationCheckpointing, Communication, Offload
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.optim.methods import needs_closure
from lightning_zero.forecast.dry_run import DryRun
from lightning_zero.forecast.rehearsal import Rehearsed, Trainee, pretended_world, rehearse
from lightning_zero.forecast.settings import PERSISTENT, MemoryForecast, Setting, SettingForecast, plain
from lightning_zero.lightning.compatibility import refuse_without_budget
from lightning_zero.lightning.first_batch import step_arguments
from lightning_zero.lightning.fitted_forecast import rehearse_fit
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
from lightning_zero.lightning.imported_config import ImportedConfig
from lightning_zero.lightning.precision import (
    LossScale,
    ZeroStep,
    engine_precision,
)
from lightning_zero.lightning.simulated_gpu import assumptions, simulated_gpu
from lightning_zero.lightning.stage_forecast import forecast_stages
from lightning_zero.lightning.strategy import ZeroStrategy
from lightning_zero.parallel.pipeline.stages.specs import SpecifiedLayers
from lightning_zero.parallel.tensor.examples import run_example
from lightning_zero.sharding import Sharding
from lightning_zero.trees import tree_map_only

__all__ = ["estimate_memory"]

_VARIED = ("stage", "offload", "activation_checkpointing")  # options in which settings differ
_OF_TRAINER = ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin")
_SHARED = tuple(name for name in signature(ZeroStrategy).parameters if name not in _VARIED + _OF_TRAINER)


def estimate_memory(
    module: nn.Module | Callable[[], nn.Module],
    strategy: ZeroStrategy | None = None,
    *,
    world_size: int,
    batch: Any = None,
    optimizer: Optimizers | None = None,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    precision: str | None = None,
    accelerator: str = "gpu",
    ranks_per_node: int | None = None,
    accumulate_grad_batches: int = 1,
    clips: bool = False,
    side_by_side: bool = True,
    memory: int | None = None,
) -> MemoryForecast:
    """Forecast the bytes of a rank in a training step, for the given setting and others side by side.

    Two steps of the engine run on rank 0 of a pretended world, with tensors that nobody writes: no memory is allocated
    for them, nothing is computed, no GPU is needed. The module is not changed, and may be on the meta device. It stays
    in training or eval mode, as in ``Trainer.fit``.

    Args:
        module: A ``LightningModule``, any other module, or a function that makes one, which saves the copies.
        strategy: The setting; by default ``ZeroStrategy()``.
        world_size: Number of ranks.
        batch: Of one rank: argument of ``training_step``, or of the module (a tuple: its arguments, a dict: its keyword
            arguments). By default the module's ``example_input_array``.
        optimizer: Makes the optimizer from parameters; by default the module's ``configure_optimizers``, or AdamW.
        loss: Computes the loss of a module and a batch; by default ``training_step``, or the module's output if it is a
            scalar or has a ``loss``.
        precision: ``"32-true"``, ``"64-true"``, ``"bf16-mixed"``, ``"bf16-true"``, ``"16-mixed"`` or ``"16-true"``, as
            in the Trainer; by default the strategy's.
        accelerator: ``"gpu"``, or ``"cpu"``, on which reductions take more memory.
        ranks_per_node: Ranks of a node, for ``Sharding(grads="node")``.
        accumulate_grad_batches: As in the Trainer.
        clips: Whether gradients are clipped by their norm.
        side_by_side: Forecast stages 0 to 3, with and without offloading and checkpointing, too; stage 0 is left out
            where ``step="backward"`` excludes it.
        memory: Bytes of a GPU, by which ``Pipeline(reduce="auto")``, ``ActivationCheckpointing(policy="auto")`` and
            ``Offload(fraction="auto")`` decide; by default 80 GiB.

    Raises:
        ValueError: An option, or the module, is one whose memory is not forecast; the error names it.
        RuntimeError: There is a process group in this process.
    """
    strategy = strategy or ZeroStrategy()
    refuse_unforecast(strategy, world_size=world_size, accelerator=accelerator)
    check_memory("memory", memory)
    if accelerator == "cpu":
        refuse_without_budget(strategy.activation_checkpointing, torch.device("cpu"))
    name = precision_of(precision, strategy, accelerator)
    plugin = new_precision(name)
    imported = strategy.imported
    accumulate_grad_batches = accumulation_of(accumulate_grad_batches, strategy, world_size)
    model = _Model(
        module=module,
        batch=batch,
        optimizer=optimizer,
        loss=loss,
        imported=imported,
        plugin=plugin,
        microbatches=min(accumulate_grad_batches, 2),  # the second one finds gradients of the one before, as all others
        clips=clips and (imported is None or not imported.plan.clipping or imported.plan.clipping_is_default),
    )
    engines = _Engines(strategy, plugin, accelerator, ranks_per_node)
    own = _own(strategy)
    with _quiet(), seeded():
        settings = _settings(strategy, model, world_size=world_size, side_by_side=side_by_side)
        is_fitted = strategy.pipeline is not None or _has_axes(strategy)
        made = model.take_notes() if is_fitted or imported is not None else None
        trainer = _trainer(imported, accumulate_grad_batches, module=made, clips=clips)
        left_out = _left_out(imported, made, optimizer=optimizer, clips=clips)
        del made
    forecast = partial(
        MemoryForecast,
        world_size=world_size,
        precision=name,
        base={**_base(strategy), **_loss_scale(imported, plugin)},
        trainer=trainer,
        left_out=left_out,
        notes=model.notes,
    )
    if strategy.pipeline is not None:
        if loss is not None:
            raise ValueError("`loss` is not forecast with `pipeline`, whose stages run `training_step`. Leave it out.")
        rows = forecast_stages(
            module,
            strategy,
            settings,
            world_size=world_size,
            ranks_per_node=ranks_per_node,
            accumulate_grad_batches=accumulate_grad_batches,
            precision=name,
            accelerator=accelerator,
            batch=batch,
            optimizer=optimizer,
            gradient_clip_val=1.0 if model.clips else None,
            device_memory=memory,
        )
        if memory is None and accelerator != "cpu":
            model.notes.extend(_assumed(strategy, rows))
        return forecast(settings=rows)
    rehearsed: Any = partial(
        _rehearsed, engines=engines, world_size=world_size, known={}, accelerator=accelerator, memory=memory
    )
    if _has_axes(strategy):
        rehearsed = partial(
            rehearse_fit,
            strategy=strategy,
            world_size=world_size,
            precision=name,
            accelerator=accelerator,
            ranks_per_node=ranks_per_node,
            memory=memory,
            plans=[],
        )
    with _quiet():
        rows = [
            _forecast(
                setting,
                model,
                rehearsed,
                is_own=setting == own,
                microbatches=accumulate_grad_batches,
                knows_nodes=_has_axes(strategy) and ranks_per_node is not None,
            )
            for setting in settings
        ]
    if memory is None and accelerator != "cpu":
        model.notes.extend(_assumed(strategy, rows))
    return forecast(settings=rows)


def _forecast(
    setting: Setting,
    model: _Model,
    rehearsed: Callable[[Setting, _Model], Rehearsed],
    *,
    is_own: bool,
    microbatches: int,
    knows_nodes: bool,
) -> SettingForecast:
    found = rehearsed(setting, model)
    sent, across = found.sent, found.sent_across
    if microbatches > model.microbatches:  # each further one sends as much as the second
        once = rehearsed(setting, replace(model, microbatches=1))
        sent += (microbatches - model.microbatches) * (found.sent - once.sent)
        across += (microbatches - model.microbatches) * (found.sent_across - once.sent_across)
    return SettingForecast(
        setting=setting,
        is_own=is_own,
        device={kind: found.device[kind] for kind in PERSISTENT} | {"buffers": found.at_peak["buffers"]},
        host={kind: found.host[kind] for kind in PERSISTENT}
        | {"windows": found.windows, "activations": found.host_activations},
        disk={kind: found.disk[kind] for kind in PERSISTENT},
        peak_bytes=found.peak.nbytes,
        at_peak=found.at_peak,
        phase=found.peak.phase,
        module=found.peak.module,
        sent_bytes=sent,
        sent_across_nodes=across if setting.sharding.has_nodes or knows_nodes else None,
    )


def _rehearsed(
    setting: Setting,
    model: _Model,
    *,
    engines: _Engines,
    world_size: int,
    known: dict[Hashable, Any],
    accelerator: str,
    memory: int | None,
) -> Rehearsed:
    """Return the bytes of steps of the engine."""
    counter = DryRun(known)
    with pretended_world(world_size), seeded(), simulated_gpu(counter, accelerator, memory):
        return rehearse(
            counter,
            model.make,
            engines.make(setting),
            checkpointing=setting.activation_checkpointing,
            page_locks=accelerator != "cpu",
        )


def _assumed(strategy: ZeroStrategy, rows: Sequence[SettingForecast]) -> Iterator[str]:
    has_stage_3 = any(one.setting.sharding.stage == 3 for one in rows)
    return assumptions(strategy, has_stage_3=has_stage_3, argument="memory")


def _has_axes(strategy: ZeroStrategy) -> bool:
    return strategy.tensor_parallel is not None or strategy.expert_parallel is not None


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide warnings of a run that does not take place, and let the collector pass over objects that are there."""
    gc.freeze()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        gc.unfreeze()


# -- Options -----------------------------------------------------------------------------------------------------------


def _own(strategy: ZeroStrategy) -> Setting:
    return Setting(
        sharding=strategy.sharding,
        offload=strategy.offload,
        activation_checkpointing=strategy.activation_checkpointing,
    )


def _settings(strategy: ZeroStrategy, model: _Model, *, world_size: int, side_by_side: bool) -> list[Setting]:
    """Return the strategy's own setting, and those beside it."""
    own, checkpointing = _own(strategy), strategy.activation_checkpointing
    if not side_by_side:
        return [own]
    checkpointed = checkpointing or (ActivationCheckpointing() if model.has_blocks() else None)
    stages = (1, 2, 3) if strategy.step == "backward" and world_size > 1 else (0, 1, 2, 3)
    beside = [
        Setting(sharding=Sharding.of(stage), offload=offload, activation_checkpointing=policy)
        for stage in stages
        for offload in (None, Offload(optimizer="cpu"))
        for policy in ([None] if checkpointed is None else [None, checkpointed])
    ]
    return beside if own in beside else [own, *beside]


def _base(strategy: ZeroStrategy) -> dict[str, Any]:
    """Return the options that all settings share, as in YAML, without the defaults.

    ``state_dict_type``, whose default depends on the stage, is always there.
    """
    given, default = _shared(strategy), _shared(ZeroStrategy(strategy.sharding))
    found = {name: value for name, value in given.items() if value != default[name] or name == "state_dict_type"}
    return {name: plain(value) for name, value in found.items()}


def _loss_scale(imported: ImportedConfig | None, plugin: ZeroStep) -> dict[str, Any]:
    """Return the option ``loss_scale`` that a configuration of DeepSpeed sets, or nothing."""
    scale = None if imported is None else imported.loss_scale(plugin)
    return {"loss_scale": plain(scale)} if scale not in (None, LossScale()) else {}


def _trainer(
    imported: ImportedConfig | None, accumulate_grad_batches: int, *, module: nn.Module | None, clips: bool
) -> dict[str, Any]:
    """Return the arguments of the Trainer that a configuration of DeepSpeed sets, besides the precision."""
    if imported is None:
        return {}
    is_set = _is_clipped(imported, module) and not _leaves_clipping(imported, clips=clips)
    clipping = {"gradient_clip_val": imported.plan.clipping} if is_set else {}
    accumulation = {"accumulate_grad_batches": accumulate_grad_batches} if accumulate_grad_batches > 1 else {}
    return {**clipping, **accumulation}


def _is_clipped(imported: ImportedConfig | None, module: nn.Module | None) -> bool:
    """Say whether a configuration of DeepSpeed clips; with manual optimization the program does, or does not."""
    return imported is not None and bool(imported.plan.clipping) and _is_automatic(module)


def _is_automatic(module: nn.Module | None) -> bool:
    return not isinstance(module, pl.LightningModule) or module.automatic_optimization


def _leaves_clipping(imported: ImportedConfig, *, clips: bool) -> bool:
    """Say whether a Trainer that clips does so by its own number: the configuration says none, or a default."""
    return clips and (imported.plan.clipping is None or imported.plan.clipping_is_default)


def _left_out(
    imported: ImportedConfig | None, module: nn.Module | None, *, optimizer: Optimizers | None, clips: bool
) -> list[str]:
    """Return the parts of a run with a configuration of DeepSpeed that YAML of the strategy does not have."""
    if imported is None:
        return []
    has_own = optimizer is not None or (
        isinstance(module, pl.LightningModule) and is_overridden("configure_optimizers", module)
    )
    found, remedy = [], ": `python -m lightning_zero convert-config` writes it"
    if imported.plan.optimizer is not None and not has_own:
        found.append(f"the section `optimizer` of DeepSpeed's configuration{remedy}")
    if imported.plan.schedule is not None:
        condition = ", used if `configure_optimizers` returns no schedule" if has_own else ""
        found.append(f"the section `scheduler` of DeepSpeed's configuration{condition}{remedy}")
    if _leaves_clipping(imported, clips=clips) and _is_automatic(module):
        found.append("the Trainer's `gradient_clip_val`: add it, as in the run")
    return found


def _shared(strategy: ZeroStrategy) -> dict[str, Any]:
    """Return the values of the options that all settings share."""
    found = {name: getattr(strategy, {"start_method": "_start_method"}.get(name, name)) for name in _SHARED}
    found["communication"] = replace(strategy.communication, timeout_s=Communication().timeout_s)
    found["timeout"] = strategy.communication.timeout_s
    if strategy.tensor_parallel is not None:
        found["tensor_parallel"] = {"size": strategy.tensor_parallel.size, **plain(strategy.tensor_parallel)}
    if strategy.pipeline is not None:
        found["pipeline"] = {"stages": strategy.pipeline.stages, **plain(strategy.pipeline)}
    return found


class _Engines:
    """Makes the engine of each setting.

    Args:
        strategy: The other options.
        plugin: The precision plugin.
        accelerator: See ``estimate_memory``.
        ranks_per_node: Likewise.
    """

    def __init__(self, strategy: ZeroStrategy, plugin: ZeroStep, accelerator: str, ranks_per_node: int | None) -> None:
        self._ranks_per_node = ranks_per_node
        self._options: dict[str, Any] = {
            "units": strategy.units,
            "communication": replace(strategy.communication, backend="gloo" if accelerator == "cpu" else "nccl"),
            "precision": engine_precision(plugin, masters=strategy.masters, lowered=strategy.lowered),
            "device": torch.device("cpu"),
            "step": strategy.step,
            "moments": strategy.moments,
        }

    def make(self, setting: Setting) -> ZeroEngine:
        """Return a new engine.

        Raises:
            ValueError: A scope is a node, and nobody has said how many ranks it has.
        """
        sharding = setting.sharding
        if sharding.uses_launcher:
            if self._ranks_per_node is None:
                raise ValueError(f"`{sharding}`: say how many ranks a node has, with `ranks_per_node=8`.")
            scopes = {name: getattr(sharding, name) for name in ("params", "grads", "optim")}
            sharding = replace(sharding, **{name: self._ranks_per_node for name in scopes if scopes[name] == "node"})
        return ZeroEngine(sharding, offload=setting.offload, **self._options)


# -- The model ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Model:
    """The model of the program, and how it is trained; see ``estimate_memory``."""

    module: nn.Module | Callable[[], nn.Module]
    batch: Any
    optimizer: Optimizers | None
    loss: Callable[[nn.Module, Any], Tensor] | None
    imported: ImportedConfig | None
    plugin: ZeroStep
    microbatches: int
    clips: bool
    notes: list[str] = field(default_factory=list)  # about modules that were made, each once

    def has_blocks(self) -> bool:
        """Say whether activation checkpointing finds repeated blocks."""
        with DryRun():
            return any(True for _ in repeated_blocks(self._new()))

    def take_notes(self) -> nn.Module | None:
        """Take notes on the module, which fits make elsewhere, and return it; None if it needs a Trainer to be made."""
        with DryRun(), suppress(ValueError):
            return self._new()
        return None

    def _new(self) -> nn.Module:
        module = new_module(self.module)
        if isinstance(module, pl.LightningModule):
            for name, given in BUILDING_HOOKS.items():
                if is_overridden(name, module):
                    _called(module, name, **given)
        SpecifiedLayers(module).build(None)
        without_meta(module)
        self.notes.extend(note for note in _notes_on(module) if note not in self.notes)
        return module

    def make(self) -> Trainee:
        """Return a model that may be changed, on the CPU and without memory for its values."""
        module = self._new()
        self.plugin.convert_module(module)
        batch = self.batch if self.batch is not None else getattr(module, "example_input_array", None)
        if batch is None and self.loss is None:
            raise ValueError(
                f"A forecast needs a batch of `{type(module).__name__}`. Set its `example_input_array`, add"
                " `data` to the configuration, or give `batch=...` in Python."
            )
        batch = self.plugin.convert_input(tree_map_only(Tensor, on_cpu, batch))
        return Trainee(
            module=module,
            optimizers=partial(_optimizers, module, self.optimizer, self.imported),
            loss=partial(self.loss or _loss, module, batch),
            context=self.plugin.train_step_context,
            is_scaled=self.plugin.scaler is not None,
            clips=self.clips or _is_clipped(self.imported, module),
            microbatches=self.microbatches,
        )


def _notes_on(module: nn.Module) -> list[str]:
    """Return a sentence if a module is in eval mode, as in the run, and so recomputes no activations."""
    for name, child in module.named_modules():
        is_on = getattr(child, "gradient_checkpointing", False) is True and not child.training
        if is_on and any(param.requires_grad for param in child.parameters()):
            return [
                f"`{name or type(module).__name__}` has `gradient_checkpointing` and is in eval mode, in which it"
                " recomputes nothing. Call `train()` of it; `from_pretrained` ends with `eval()`."
            ]
    return []


def _optimizers(module: nn.Module, make: Optimizers | None, imported: ImportedConfig | None) -> list[Optimizer]:
    """Return the optimizers of a module.

    Raises:
        ValueError: ``configure_optimizers`` needs a Trainer, or makes none.
    """
    found = _made_optimizers(module, make, imported)
    if not found:
        raise ValueError(
            "`configure_optimizers` makes no optimizer. Add a section `optimizer` to the configuration, or give"
            " `optimizer=torch.optim.AdamW` in Python."
        )
    for optimizer in found:
        if needs_closure(optimizer):
            raise ValueError(f"`{type(optimizer).__name__}`, whose step needs a closure, is not forecast yet.")
    return found


def _made_optimizers(module: nn.Module, make: Optimizers | None, imported: ImportedConfig | None) -> list[Optimizer]:
    if make is not None:
        return [make(module.parameters())]
    if not isinstance(module, pl.LightningModule):
        return [torch.optim.AdamW(module.parameters(), lr=1e-3)]
    if imported is not None and imported.makes_optimizer_of(module):
        return [imported.optimizer_for(module)]
    return _found_optimizers(_called(module, "configure_optimizers"))


def _found_optimizers(given: Any) -> list[Optimizer]:
    """Return the optimizers in a result of ``configure_optimizers``."""
    if isinstance(given, Optimizer):
        return [given]
    if isinstance(given, Mapping):
        return _found_optimizers(given.get("optimizer"))
    return [one for each in given for one in _found_optimizers(each)] if isinstance(given, (list, tuple)) else []


def _loss(module: nn.Module, batch: Any) -> Tensor:
    """Return the loss of a batch.

    Raises:
        ValueError: The step fails without a Trainer, or its result has no loss.
    """
    if isinstance(module, pl.LightningModule) and is_overridden("training_step", module):
        vars(module).update(dict.fromkeys(("log", "log_dict"), lambda *args, **kwargs: None))
        try:
            output = module.training_step(*step_arguments(module.training_step, batch))
        except Exception as error:
            raise _needs_trainer("training_step", error) from error
    else:
        output = run_example(module, batch)
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise ValueError(
            f"The output of `{type(module).__name__}` is a `{type(output).__name__}` without a loss. Return"
            " one, or give `loss=lambda module, batch: ...` to `estimate_memory` in Python."
        )
    return found


def _called(module: pl.LightningModule, name: str, **given: Any) -> Any:
    """Return the result of a hook that may ask how many steps there are.

    Raises:
        ValueError: It needs more of a Trainer, or fails.
    """
    with told_steps(module):
        try:
            return getattr(module, name)(**given)
        except Exception as error:
            raise _needs_trainer(name, error) from error


def _needs_trainer(name: str, error: Exception) -> ValueError:
    remedies = {
        "setup": "",
        "configure_model": "",
        "configure_optimizers": ", add a section `optimizer` to the configuration, or give `optimizer=...` in Python",
        "training_step": ", or give `loss=lambda module, batch: ...` to `estimate_memory` in Python",
    }
    return ValueError(
        f"A forecast runs `{name}` without a Trainer, and it failed ({type(error).__name__}: {error}). Use `simulate`,"
        f" which runs one{remedies[name]}."
    )
