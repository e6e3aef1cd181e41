"""The strategy: in which order Lightning's hooks reach the engine. Tensors are touched elsewhere."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, Optional, TypeVar, Union

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.plugins import LayerSync
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_zero.checkpoint.asynchronous import AsyncSaver
from lightning_zero.checkpoint.state import whole_model_state
from lightning_zero.comm.mesh import Mesh
from lightning_zero.comm.peers import Peers
from lightning_zero.compat.deepspeed_config import plan_of
from lightning_zero.config import (
    OFFLOAD_USE,
    ActivationCheckpointing,
    Communication,
    Moments,
    Offload,
    Pipeline,
    StepTime,
)
from lightning_zero.dtensors import refuse_dtensors
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.foreign_options import FOREIGN_OPTIONS
from lightning_zero.grid import Grid
from lightning_zero.lightning.averaging import begin_averages, bind_averages, forget_averages
from lightning_zero.lightning.checkpoint_hooks import CheckpointFollower, CheckpointHooks, raw
from lightning_zero.lightning.compatibility import refuse_options
from lightning_zero.lightning.decisions import decide_alone, decide_together, require_all_without_batch
from lightning_zero.lightning.expert_training import ExpertTraining, refuse_divided_module
from lightning_zero.lightning.imported_config import ImportedConfig
from lightning_zero.lightning.layer_costs import layer_costs
from lightning_zero.lightning.loader_states import note_loader_states, remake_loaders
from lightning_zero.lightning.pipelined_steps import PipelinedSteps
from lightning_zero.lightning.places import (
    Places,
    buffer_places_of,
    convert_buffers,
    keep_engine,
    let_engines_go,
    places_of,
    refuse_orphans,
)
from lightning_zero.lightning.precision import LossScale, ZeroPrecision, ZeroStep, adopt, engine_precision
from lightning_zero.lightning.process_hooks import ProcessHooks, tell_before_callbacks
from lightning_zero.lightning.sample_counts import count_samples_once
from lightning_zero.lightning.schedules import fill_schedules, prepare_schedules
from lightning_zero.lightning.signals import Signals
from lightning_zero.lightning.tensor_training import TensorTraining, refuse_cut_module
from lightning_zero.lightning.uneven import (
    EvenEvaluation,
    ExpertEvaluation,
    UnevenEvaluation,
    agree_on_last_step,
    skip_together,
)
from lightning_zero.option_checks import checked_arguments, from_fields
from lightning_zero.parallel.activation.checkpointing import checkpoint_activations, forecast_of
from lightning_zero.parallel.activation.forecast import Forecast
from lightning_zero.parallel.pipeline.stages.specs import SpecifiedLayers
from lightning_zero.parallel.pipeline.stages.split import Split, split_module
from lightning_zero.parallel.tensor.plan import TensorParallel
from lightning_zero.sharding import NodeRanks, Sharding

__all__ = ["ZeroStrategy", "register_strategies"]

T = TypeVar("T")

_USE = {
    "units": "Use classes or names of classes, for example `units=['Block']`, or None.",
    "lowered": "Use a list of classes or names of classes, for example `lowered=['Experts']`, or None.",
    "pipeline": "Use a number of stages, for example `pipeline=4`, `Pipeline(...)`, a dict of its fields, or None.",
    "tensor_parallel": (
        "Use a number of ranks, for example `tensor_parallel=2`, `TensorParallel(...)`, a dict of its fields, or None."
    ),
    "expert_parallel": "Use a number of ranks, for example `expert_parallel=2`, or None.",
    "communication": (
        "Use `Communication(...)`, for example `Communication(reduce_dtype='bf16')`, a dict of its fields, or None."
    ),
    "loss_scale": (
        "Use `LossScale(...)`, a dict of its fields, or None. `LossScale(static=1024)` is a fixed factor, and"
        " `LossScale(init_scale=1024)` the first of a dynamic one."
    ),
    "offload": OFFLOAD_USE,
    "activation_checkpointing": (
        "Use True, a list of classes or names of classes, `ActivationCheckpointing(...)`, a dict of its fields, or"
        " None. The policy is one of the fields: `ActivationCheckpointing(policy='selective')`."
    ),
    "timeout": "Use seconds, for example `timeout=1800`, a `timedelta`, or None.",
    "accelerator": "Leave it out, and use `Trainer(accelerator=...)`.",
    "parallel_devices": "Leave it out, and use `Trainer(devices=...)`.",
    "precision_plugin": "Leave it out, and use `Trainer(precision=...)`.",
}


class ZeroStrategy(CheckpointHooks, ProcessHooks):
    """Train with the redundancy of data parallelism removed (ZeRO, arXiv:1910.02054).

    Args:
        stage: Tensors that are kept sharded over the ranks. 0: none; 1: optimizer states; 2: gradients as well;
            3: parameters as well. Or ``Sharding``, which says for each over which ranks, for example those of a node;
            a dict of its fields is taken too (docs/sharding.md).
        units: Modules whose parameters are gathered and reduced together, by class or class name, usually the
            repeated block: ``["Block"]``. By default they are found in the module.
        pipeline: Cut the model into this many pipeline stages, or ``Pipeline``, or a dict of its fields.
        tensor_parallel: Cut the matrices of the model over this many neighbouring ranks, which get the same batches,
            or ``TensorParallel``, or a dict of its fields (docs/tensor.md).
        expert_parallel: Divide the experts of each layer, ``lightning_zero.moe.MoE`` or of a Hugging Face model, over
            this many neighbouring data ranks, which have different batches and exchange tokens (docs/experts.md).
        communication: How ranks exchange parameters and gradients; a dict of the fields of ``Communication`` is taken
            too.
        masters: Keep fp32 masters of parameters that compute in 16 bits.
        lowered: Classes of modules, or their names, whose own matrices compute in 16 bits as well under ``bf16-mixed``
            and ``16-mixed``, for example experts. Linear layers, convolutions, embeddings and attention always do.
        moments: How the moments of AdamW and Adam are kept: ``"fp32"``, or in fewer bytes, by one of
            ``lightning_zero.config.Moments``. Checkpoints hold them in fp32.
        loss_scale: How the loss is scaled with fp16; a dict of the fields of ``LossScale`` is taken too.
        state_dict_type: ``"full"``: a checkpoint is one file, as with other strategies. ``"sharded"``: a directory
            that all ranks write. The default is ``"full"`` below stage 3 and ``"sharded"`` at stage 3.
        offload: Keep masters and optimizer states in host memory and step them there: ``"cpu"``, or ``Offload``, which
            says it in full and offloads parameters too; a dict of its fields is taken.
        step: When each unit is stepped: ``"auto"``, or another of ``lightning_zero.config.StepTime``; the bits are the
            same.
        activation_checkpointing: Compute activations again in the backward pass: ``True`` those of the repeated blocks,
            or of modules by class or class name, or ``ActivationCheckpointing``; a dict of its fields is taken too.
        async_save: Write checkpoints in the background: saving returns when this rank's part of the state is copied
            into host memory. ``wait_for_save`` returns when it is on the disk.
        weights_only: Passed to ``torch.load`` when the Trainer does not say.
        start_method: How processes are started: ``"popen"`` runs the script again, the others start functions.
        process_group_backend: Backend of the default process group; by default that of the device.
        timeout: Seconds (or a ``timedelta``) after which a collective that its peers do not join fails; half an hour
            by default.
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Set by the Trainer.
        checkpoint_io: Reads and writes single files.
        precision_plugin: Set by the Trainer; stock plugins are translated.
    """

    strategy_name = "zero"

    @checked_arguments(use=_USE, foreign=FOREIGN_OPTIONS, unchecked=["stage"])
    def __init__(
        self,
        stage: Union[Literal[0, 1, 2, 3], Sharding, dict[str, Any]] = 3,
        units: Union[Sequence[Union[str, type[nn.Module]]], str, type[nn.Module], None] = None,
        pipeline: Union[int, Pipeline, dict[str, Any], None] = None,
        tensor_parallel: Union[int, TensorParallel, dict[str, Any], None] = None,
        expert_parallel: Optional[int] = None,
        communication: Union[Communication, dict[str, Any], None] = None,
        masters: bool = True,
        lowered: Optional[Sequence[Union[str, type[nn.Module]]]] = None,
        moments: Moments = "fp32",
        loss_scale: Union[LossScale, dict[str, Any], None] = None,
        state_dict_type: Optional[Literal["sharded", "full"]] = None,
        offload: Union[str, Offload, dict[str, Any], None] = None,
        step: StepTime = "auto",
        activation_checkpointing: Union[
            bool, type[nn.Module], Sequence[Union[str, type[nn.Module]]], ActivationCheckpointing, dict[str, Any], None
        ] = None,
        async_save: bool = False,
        weights_only: Optional[bool] = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        process_group_backend: Optional[str] = None,
        timeout: Union[timedelta, float, None] = None,
        accelerator: Optional[Accelerator] = None,
        parallel_devices: Optional[list[torch.device]] = None,
        cluster_environment: Optional[ClusterEnvironment] = None,
        checkpoint_io: Optional[CheckpointIO] = None,
        precision_plugin: Optional[Precision] = None,
    ) -> None:
        # - Options of the user
        self.sharding = Sharding.of(stage)
        self.stage = self.sharding.stage
        self.state_dict_type = state_dict_type or ("sharded" if self.stage == 3 else "full")
        self.units = units
        self.pipeline = _pipeline(pipeline)
        if self.pipeline is not None:
            self.pipeline.check(self.stage)
        self.tensor_parallel = _tensor_parallel(tensor_parallel)
        self.expert_parallel = _expert_parallel(expert_parallel)
        self.masters = masters
        self.lowered = lowered
        self.moments = moments
        self.loss_scale = from_fields(LossScale, loss_scale)
        self.communication = _communication(communication, timeout)
        self.timeout = timedelta(seconds=self.communication.timeout_s)
        self.offload = Offload.of(offload)
        if self.offload is not None:
            self.offload.check(self.sharding, in_pipeline=self.pipeline is not None)
        self.step = step
        self.activation_checkpointing = ActivationCheckpointing.of(activation_checkpointing)
        _check_partition(self.activation_checkpointing, TensorParallel.of(tensor_parallel))
        self.async_save = async_save
        self.weights_only = weights_only
        self._start_method = start_method
        self._process_group_backend = process_group_backend
        self.imported: ImportedConfig | None = None  # set by `from_deepspeed`
        # - Set by Lightning
        self.num_nodes = 1
        # - Made by `setup`
        self._engine: ZeroEngine | None = None
        self.followers: list[CheckpointFollower] = []  # told of checkpoints, in this order
        self._saver: AsyncSaver | None = None  # from the first asynchronous save to teardown
        self._is_running = False  # from setup to teardown
        self._has_begun = False  # from the first training batch of a fit
        self._mesh: Mesh | None = None  # with a pipeline
        self._tensor: TensorTraining | None = None  # with tensor parallelism
        self._experts: ExpertTraining | None = None  # with expert parallelism
        self._steps: PipelinedSteps | None = None  # with a pipeline
        self._announced: ZeroEngine | None = None  # whose plan was printed last
        self._forecast: Forecast | None = None  # chooses the policy of `activation_checkpointing`
        self._evaluation: EvenEvaluation | UnevenEvaluation | None = None  # the last that has begun
        self._warned_of_none = False
        self._finetuning: list[tuple[BaseFinetuning, Any]] = []  # callbacks of this fit, and their own functions
        # - Left by a checkpoint for the start of training
        self._random_states: tuple[list[dict[str, Any]], int] | None = None
        self._stored: dict[int, dict[str, Hashable]] = {}
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)

    @classmethod
    def from_deepspeed(
        cls,
        config: Union[str, Path, Mapping[str, Any]],
        *,
        deepspeed_version: Optional[str] = None,
        strict: bool = True,
        **explicit: Any,
    ) -> ZeroStrategy:
        """Return the strategy that a configuration of DeepSpeed stands for (docs/deepspeed.md).

        Precision, clipping and accumulation are set in the Trainer where it leaves them open. Optimizer and schedule
        are made for modules that make none. Rank 0 prints how every key is handled.

        Args:
            config: The configuration, or the path of its JSON file.
            deepspeed_version: Version of DeepSpeed whose defaults hold for keys that are not there; None: the newest,
                and clipping and timeout as in Lightning's ``DeepSpeedStrategy``, which says them itself.
            strict: Refuse keys that are not known, or that would change the training and do not exist here.
            **explicit: Options of the strategy, which win.

        Raises:
            ValueError: A key or its value is refused; the error names its path.
        """
        plan = plan_of(config, deepspeed_version=deepspeed_version, strict=strict, explicit=explicit)
        strategy = cls(**{**plan.options, **explicit})
        strategy.imported = ImportedConfig(plan, strategy.loss_scale)
        return strategy

    # -- The engine ------------------------------------------------------------------------------------------------

    def gathered(
        self,
        params_or_module: nn.Module | Tensor | Iterable[nn.Module | Tensor],
        write: Literal["rank0", "all"] | None = None,
    ) -> AbstractContextManager[None]:
        """See ``ZeroEngine.gathered``. Collective: all ranks."""
        return self.engine.gathered(params_or_module, write=write)

    def full_param(self, parameter: Tensor | nn.Module) -> Tensor:
        """See ``ZeroEngine.full_param``. Collective: all ranks."""
        return self.engine.full_param(parameter)

    def full_grad(self, parameter: Tensor | nn.Module) -> Tensor | None:
        """See ``ZeroEngine.full_grad``. Collective: all ranks."""
        return self.engine.full_grad(parameter)

    def grad_norm(self, optimizer: Optimizer | None = None, norm_type: float = 2.0) -> Tensor:
        """See ``ZeroEngine.grad_norm``. Collective: all ranks."""
        return self.engine.grad_norm(None if optimizer is None else raw(optimizer), norm_type=norm_type)

    def offload_states(self) -> None:
        """See ``ZeroEngine.offload_states``. Collective: all ranks."""
        self.engine.offload_states()

    def reload_states(self) -> None:
        """See ``ZeroEngine.reload_states``."""
        self.engine.reload_states()

    # -- Set-up ----------------------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Precision:
        """The precision plugin, always one of this package."""
        return self._precision_plugin if self._precision_plugin is not None else ZeroPrecision()

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if precision_plugin is not None and self.imported is not None:
            precision_plugin = self.imported.precision(
                precision_plugin, on_cpu=isinstance(self.accelerator, CPUAccelerator)
            )
            self.loss_scale = self.imported.loss_scale(precision_plugin)
        plugin = None if precision_plugin is None else adopt(precision_plugin)
        if plugin is not None and self.loss_scale is not None and plugin.precision in ("16-mixed", "16-true"):
            if plugin.scaler is not None and plugin.scaler.config not in (LossScale(), self.loss_scale):
                raise ValueError(
                    f"`{type(plugin).__name__}` has the rule {plugin.scaler.config} for the loss scale, and"
                    f" `ZeroStrategy(loss_scale=...)` another one, {self.loss_scale}. Leave one of the two out."
                )
            plugin.scale_loss(self.loss_scale)
        self._precision_plugin = plugin

    def connect(self, model: pl.LightningModule) -> None:
        """Take the module of the next run; an engine that shards another one is left to it."""
        super().connect(model)
        if self.imported is not None:
            self.imported.offer_optimizer(model)
        if self._engine is not None and self._engine.module is not model:
            self._engine = None

    def setup_environment(self) -> None:
        """Start the default process group, before the callbacks' ``setup``. Collective: all ranks."""
        super().setup_environment()
        if self._tensor is not None:
            self._sharded_module._device_mesh = self._tensor.device_mesh
        tell_before_callbacks(self._sharded_module.trainer)
        bind_averages(self._sharded_module.trainer)
        self.restore_when_sharded(self._sharded_module.trainer)
        self.meet_before_dumps(self._sharded_module.trainer)

    def setup(self, trainer: pl.Trainer) -> None:
        """Shard the module, read the checkpoint, then make the optimizers and let them step shards.

        Collective: all ranks.
        """
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self._meet_peers("Setting up the model")  # after the program's own code, before there are groups
        self.accelerator.setup(trainer)
        if self.imported is not None and trainer.state.fn == TrainerFn.FITTING:
            self.imported.settle(trainer, ranks=self.distributed_sampler_kwargs["num_replicas"])
        refuse_options(self, trainer)
        count_samples_once(trainer)
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        self._shard(self.lightning_module, is_fitting=is_fitting)
        if is_fitting:
            begin_averages(trainer)
        else:
            forget_averages(trainer)
        self._restore_checkpoint()
        if is_fitting:
            note_loader_states(trainer.fit_loop)
            if self.world_size > 1:
                decide_together(trainer, self._tensor)
            self.setup_optimizers(trainer)
            self._restore_thawed_groups(is_resumed=bool(trainer._checkpoint_connector._loaded_checkpoint))
            self._show_values_to_finetuning(trainer)
        self.setup_precision_plugin()
        self.model_to_device()
        self._bind_signals(trainer)
        if self._steps is not None or self.world_size > 1:
            skip_together(self.engine, trainer)
        self._begin_saving(trainer)
        self._announce()
        if self._tensor is not None:
            self._tensor.agree_on_random_numbers()  # data loaders draw from them

    def _bind_signals(self, trainer: pl.Trainer) -> None:
        internals = self.engine.internals
        has_same_params = internals.world_communicator is internals.communicator  # else there are pipeline stages
        facts = internals.steps.rank_facts if has_same_params else None
        Signals(trainer, internals.world_communicator.agree_on, self._saves_wait, facts).bind()

    @contextmanager
    def _saves_wait(self) -> Generator[None, None, None]:
        """Let saves return when they are on the disk, also with `async_save`."""
        was, self.async_save = self.async_save, False
        try:
            yield
        finally:
            self.async_save = was

    def _shard(self, module: pl.LightningModule, *, is_fitting: bool) -> None:
        for parallelism in self._cutting:
            parallelism.begin(module)
        recipe = self._recipe()
        engine = next((engine for engine in _made_for if engine.module is module), None)
        kept_for, kept_sync, kept_places = (None, None, None) if engine is None else _made_for[engine]
        layer_sync = self._layer_sync if is_fitting else kept_sync  # as under DDPStrategy, for fits only
        are_torn = are_rounded = False
        if engine is not None:
            engine.internals.fits.refuse_held()
        # The mesh is part of it, so that its groups are lent for as long as the engine uses them.
        made_for = (
            self.precision_plugin.precision, recipe, self.activation_checkpointing, self._mesh, self._cutting,
            type(layer_sync),
        )  # fmt: skip
        if engine is not None and (
            kept_for != made_for
            or kept_places != self._places(module, layer_sync)
            or engine.internals.fits.any_is_converted()
        ):
            if engine.internals.fits.unshard_rounds:
                rank_zero_warn(_ROUNDED)
            engine.unshard()
            self._engine = None
            are_torn = engine.internals.fits.are_torn
            are_rounded = engine.internals.checkpoints.are_rounded
            engine = None
            if kept_sync is not None:
                kept_sync.revert(module)
        if engine is None:
            refuse_dtensors(module)
            refuse_orphans(module)
        split = self._split(module) if engine is None else None
        if is_fitting and self._tensor is not None and self.pipeline is not None:
            self._tensor.refuse_random_stages(module)  # behind the split, which outlines specified layers
        if engine is None:
            grid = self._grid(module)
            if layer_sync is not None:
                layer_sync.apply(module)
            self.precision_plugin.convert_module(module)
            ranks = None if self._tensor is None else self._tensor.ranks_of(module)
            checkpoint_activations(module, self.activation_checkpointing, ranks)
            engine = ZeroEngine(**recipe if is_fitting else {**recipe, "offload": self._offload_without_optimizer()})
            self._steps = None
            if split is None:
                engine.shard(module, grid=grid, node=self._node)
            else:
                self._cut(module, engine, split, grid)
            _made_for[engine] = made_for, layer_sync, self._places(module, layer_sync)
            if are_torn:
                engine.internals.fits.mark_torn()
            engine.internals.checkpoints.are_rounded = are_rounded
            for parallelism in self._cutting:
                parallelism.show_wholes(module)
        else:  # DDPStrategy starts every run from rank 0's values
            convert_buffers(module, self.precision_plugin.convert_module)  # some may be new
            engine.internals.fits.make_equal()
            steps = engine.internals.fits.parts
            self._steps = steps.for_next_run() if isinstance(steps, PipelinedSteps) else None
        if self._experts is not None:
            self._experts.bind(module, engine)
        for parallelism in self._cutting:
            parallelism.count_calls(module, engine.internals.communicator.traffic)
        if is_fitting and self.offload is not None and self.offload.params is None:
            engine.internals.fits.keep_params_on_device()
        engine.internals.checkpoints.optimizers_follow = is_fitting
        engine.internals.fits.resume()
        # As under DDPStrategy, which makes them equal in every setup and wraps the module for fits only.
        engine.internals.steps.broadcast_module_buffers("scopes" if is_fitting else "never")
        let_engines_go(module)  # this run is not refused any more, and its engine is the strategy's
        self._engine = self._step_plugin.engine = engine
        self._step_plugin.clipped_norms = {}
        self._step_plugin.around_hooks = nullcontext if self._steps is None else self._steps.around_hooks
        self._forecast = forecast_of(module)

    def _places(self, module: nn.Module, layer_sync: LayerSync | None) -> Places:
        """Return the places for which an engine is kept; stages and synchronised batch norms know buffers by theirs."""
        knows_buffers = self.pipeline is not None or layer_sync is not None
        return places_of(module) + (buffer_places_of(module) if knows_buffers else [])

    def _offload_without_optimizer(self) -> Offload | None:
        """Return the offload options of a model that is only evaluated: parameters of all ranks go unit by unit."""
        if self.offload is None or self.sharding.params != "world":
            return self.offload
        return replace(self.offload, params=self.offload.params or self.offload.optimizer)

    def _grid(self, module: pl.LightningModule) -> Grid | None:
        """Cut the module for tensor or expert parallelism, and return the grid; None without them."""
        if self._tensor is None:
            refuse_cut_module(module)
        if self._experts is None:
            refuse_divided_module(module)
        whole = [] if self._experts is None else self._experts.undivided(module)
        grid = None if self._tensor is None else self._tensor.cut(module, whole)
        return grid if self._experts is None else self._experts.cut(module, grid)

    def _split(self, module: pl.LightningModule) -> Split | None:
        """Build this stage's specified layers, and return the split of the module; None without a pipeline."""
        layers = SpecifiedLayers(module)
        if self.pipeline is None or self._mesh is None:
            layers.build(None)
            return None
        layers.outline()
        costs = layer_costs(module, self.pipeline, self.root_device, self.precision_plugin.train_step_context)
        split = split_module(module, self.pipeline, costs)
        layers.build(split, self._mesh.stage)
        return split

    def _cut(self, module: pl.LightningModule, engine: ZeroEngine, split: Split, grid: Grid | None) -> None:
        assert self.pipeline is not None
        assert self._mesh is not None
        engine.shard(module, split.holders, grid=grid, node=self._node)
        self._steps = PipelinedSteps(
            module, engine, split=split, pipeline=self.pipeline, mesh=self._mesh, device=self.root_device
        )
        rank_zero_info(self._steps.summary())

    def _recipe(self) -> dict[str, Any]:
        """Arguments of the engine."""
        return {
            "stage": self.sharding,
            "units": self.units,
            "communication": self.communication,
            "precision": engine_precision(self.precision_plugin, masters=self.masters, lowered=self.lowered),
            "device": self.root_device,
            "offload": self.offload,
            "step": self.step,
            "moments": self.moments,
            **self._groups(),
        }

    @property
    def _node(self) -> NodeRanks:
        """The ranks of this node."""
        return NodeRanks(self.num_processes, self.local_rank)

    def _groups(self) -> dict[str, Any]:
        if self._mesh is None:
            return {}
        return {"process_group": self._mesh.copy_group, "parts_group": self._mesh.stage_group}

    @property
    def _step_plugin(self) -> ZeroStep:
        plugin = self.precision_plugin
        if self._precision_plugin is None:
            self._precision_plugin = plugin
        assert isinstance(plugin, ZeroStep)
        return plugin

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Let the module make its optimizers and bind them to this rank's segments."""
        self._reset_optimizers_and_schedulers()
        self.engine.internals.fits.detach()
        super().setup_optimizers(trainer)
        if self.imported is not None:
            made = self.imported.schedule_for(self._sharded_module, self.optimizers, self.lr_scheduler_configs)
            self.lr_scheduler_configs = made
        prepare_schedules(self.lr_scheduler_configs, trainer)
        for optimizer in self.optimizers:
            self.engine.internals.fits.drop_remote(optimizer)
        self.engine.attach(*self.optimizers)
        self.optimizers = self.optimizers  # Lightning's wrappers take over the classes that `attach` has set

    def _show_values_to_finetuning(self, trainer: pl.Trainer) -> None:
        """Gather the parameters while a finetuning callback chooses among them: it compares their values."""
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, BaseFinetuning):
                self._finetuning.append((callback, vars(callback).get("finetune_function")))
                vars(callback)["finetune_function"] = partial(self._finetune, callback.finetune_function)

    def _take_back_finetuning(self) -> None:
        for callback, own in self._finetuning:
            vars(callback).pop("finetune_function")
            if own is not None:
                vars(callback)["finetune_function"] = own
        self._finetuning.clear()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of all optimizers, with the groups of finetuning callbacks. Collective: all ranks."""
        if not self._is_nested:
            remake_loaders(self._sharded_module.trainer.fit_loop)
        self._restore_thawed_groups(is_resumed=True)  # a learning rate finder restores what it has saved
        super().load_optimizer_state_dict(checkpoint)

    def _restore_thawed_groups(self, *, is_resumed: bool) -> None:
        """Make the groups that finetuning callbacks had added when the checkpoint was saved, and train them again.

        Lightning makes them in ``on_fit_start``, behind the engine's back, and leaves them frozen.

        Args:
            is_resumed: This fit has read the checkpoint; else an evaluation has, before it.
        """
        trainer: Any = self._sharded_module.trainer
        callbacks = [one for one in trainer.callbacks if isinstance(one, BaseFinetuning) and one._restarting]
        counts = [len(optimizer.param_groups) for optimizer in self.optimizers]
        for callback in callbacks:
            BaseFinetuning.on_fit_start(callback, trainer, self._sharded_module)
        for optimizer, count in zip(self.optimizers, counts, strict=True):
            for group in optimizer.param_groups[count:]:
                for param in group["params"] if is_resumed else ():
                    param.requires_grad_(True)
        if callbacks:
            self.engine.attach(*self.optimizers)
            self.optimizers = self.optimizers  # as in `setup_optimizers`

    def _finetune(self, function: Callable[..., None], *args: Any) -> None:
        with self.gathered(self._sharded_module, write="all"):
            function(*args)

    def model_to_device(self) -> None:
        """Move metrics, which the engine does not hold, and set the module's device."""
        assert self.lightning_module is not None
        _update_properties(self.lightning_module, device=self.root_device)
        metrics = [module for module in self.lightning_module.modules() if isinstance(module, Metric)]
        params = [param for metric in metrics for param in metric.parameters()]
        with self.gathered(params, write="all") if params else nullcontext():
            for metric in metrics:
                metric.to(self.root_device)
        if self._tensor is not None:
            self._tensor.bind_metrics()

    def _around_collective(self, group: Any | None = None) -> AbstractContextManager[None]:
        is_of_all = group in (None, torch.distributed.group.WORLD) and self._mesh is None
        return (
            self._engine.internals.steps.around_collective()
            if is_of_all and self._engine is not None
            else nullcontext()
        )

    def _announce(self) -> None:
        if self.imported is not None:
            self.imported.announce()
        if self._announced is not self._engine:
            self._announced = self._engine
            cut = [line for parallelism in self._cutting for line in parallelism.lines(self._sharded_module)]
            rank_zero_info("\n".join([*self.engine.plan(), *self._not_counted(), *cut]))

    def _not_counted(self) -> list[str]:
        """Say which calls are in no number of traffic."""
        calls = {
            "sums of tensor groups": self._tensor,
            "exchanges of experts": self._experts,
            "messages between pipeline stages": self._mesh,
        }
        found = [name for name, used in calls.items() if used is not None]
        return [f"not counted as sent: {', '.join(found)}"] if found else []

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Create tensors on the meta device (``empty_init``), on the CPU (stage 3) or on the root device."""
        if empty_init:
            device: AbstractContextManager[Any] = torch.device("meta")
        else:
            device = nullcontext() if self.stage == 3 else self.root_device
        with device, self.precision_plugin.tensor_init_context():
            yield

    def _whole_state_dict(self) -> dict[str, Any]:
        """See ``ProcessHooks``."""
        return whole_model_state(self.engine, self._sharded_module)

    # -- Steps -----------------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Set random number generators of a resumed run; compare the loader with a configuration."""
        super().on_train_start()
        self._has_begun = False
        if self.imported is not None:
            self.imported.compare_loader(
                self._sharded_module.trainer, ranks=self.distributed_sampler_kwargs["num_replicas"]
            )

    def on_train_end(self) -> None:
        """Compare the last losses of tensor groups; make the steps that are still due. Collective: all ranks."""
        if self._tensor is not None:
            self._tensor.end_steps()
        super().on_train_end()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Fill schedules; agree on a step of fewer micro-batches. Collective at the end of an epoch: all ranks."""
        if not self._has_begun:
            self._has_begun = True
            fill_schedules(self.lr_scheduler_configs, self._sharded_module.trainer)
        if (self.stage < 2 or self.sharding.waits_in_node) and self.world_size > 1:
            agree_on_last_step(self.engine, self._sharded_module.trainer)

    def batch_to_device(self, batch: Any, device: Optional[torch.device] = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to a device. Collective with tensor parallelism: the ranks that have the same batch.

        Raises:
            ValueError: Hooks have left None of it, in training, and other ranks have one.
        """
        if self._tensor is not None:
            self._tensor.compare_batch(batch)
        batch = super().batch_to_device(batch, device, dataloader_idx)
        trainer = self._sharded_module.trainer
        if batch is None and self.world_size > 1 and trainer.training:
            reduces = self.stage >= 2 or self.sharding.waits_in_node
            waits = reduces or self.pipeline is not None or bool(self._cutting)
            waits |= any(unit.needs_gather for unit in self.engine.internals.fits.units)  # of a deferred step
            require_all_without_batch(trainer, waits_within_step=waits)
        return batch

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run ``LightningModule.training_step`` with the parameters it needs."""
        if self._forecast is not None:
            self._forecast.begin_batch(self.root_device)
        if self._tensor is not None:
            self._tensor.begin_step(self._sharded_module)
        self._refuse_hooks()
        if self._steps is not None:
            return self._pipelined_training_step(self._steps, args)
        with self.engine.scope("training_step"):
            output = super().training_step(*args, **kwargs)
        if self.world_size > 1 and self._sharded_module.automatic_optimization:
            loop = self._sharded_module.trainer.fit_loop.epoch_loop.automatic_optimization
            loop.output_result_cls = ClosureResult if output is not None else _Nothing
            return self._loss_of_nothing() if output is None else output
        return output

    def _refuse_hooks(self) -> None:
        """Refuse hooks on gradients that are not those of this rank's data."""
        for parallelism in self._cutting:
            parallelism.refuse_hooks(self._sharded_module)

    def _pipelined_training_step(self, steps: PipelinedSteps, args: tuple[Any, ...]) -> STEP_OUTPUT:
        trainer = self._sharded_module.trainer
        every = trainer.accumulate_grad_batches
        with self._step_plugin.scaled_backward():
            output: STEP_OUTPUT = steps.training_step(
                args,
                context=self.precision_plugin.train_step_context,
                scale=self._step_plugin.get_scale() / every,
                is_first=trainer.fit_loop.epoch_loop.batch_idx % every == 0,
            )
        return output

    def backward(self, closure_loss: Tensor, optimizer: Optional[Optimizer], *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward of a loss; in a pipeline the training step has done so, and only hooks are called."""
        self._refuse_hooks()  # of this step
        if self._tensor is not None:
            self._tensor.note_loss(closure_loss)
        if self._steps is None:
            recomputing = nullcontext() if self._tensor is None else self._tensor.recomputing(self._sharded_module)
            with recomputing:
                return super().backward(closure_loss, optimizer, *args, **kwargs)
        assert self.lightning_module is not None
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self.engine.internals.steps.end_gradients()
        with self._steps.around_hooks():
            closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    def post_backward(self, closure_loss: Tensor) -> None:
        """Take note of the memory of a micro-batch, while the policy of activation checkpointing is not chosen."""
        if self._forecast is not None:
            self._forecast.note_peak()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run the step; choose the policy of activation checkpointing when the first ones have been made."""
        if self.stage >= 2 and not self.sharding.waits_in_node and self.world_size > 1:
            closure = partial(self._backward_of_step, closure)
        scaler = self._step_plugin.scaler
        skipped = None if scaler is None else scaler.skipped
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        was_made = scaler is None or scaler.skipped == skipped
        if was_made and self._forecast is not None and self._forecast.policy is None:
            number = self.optimizers.index(optimizer)
            line = self._forecast.settle(self._largest, stepped=number, num_optimizers=len(self.optimizers))
            if line is not None:
                rank_zero_info(line)
        return output

    def _backward_of_step(self, closure: Callable[[], T]) -> T:
        output = closure()
        agree_on_last_step(self.engine, self._sharded_module.trainer)
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run ``LightningModule.validation_step`` with the parameters it needs."""
        if self._steps is not None:
            return self._evaluate(self._steps, "validation_step", args, self.precision_plugin.val_step_context)
        return self._evaluate_batch("validation_step", super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run ``LightningModule.test_step`` with the parameters it needs."""
        if self._steps is not None:
            return self._evaluate(self._steps, "test_step", args, self.precision_plugin.test_step_context)
        return self._evaluate_batch("test_step", super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``LightningModule.predict_step`` with the parameters it needs."""
        if self._steps is not None:
            self._begin_evaluated_step(args)
            return self._noted(self._steps.predict_step(args, context=self.precision_plugin.predict_step_context))
        return self._evaluate_batch("predict_step", super().predict_step, *args, **kwargs)

    def pipeline_timings(self, steps: int) -> dict[str, float]:
        """Return seconds of work per step and stage, and the bubble's share, since the last call.

        Empty without stages, and over NCCL, where the host's clock does not tell them. Collective: all ranks.
        """
        return {} if self._steps is None else self._steps.timings(steps)

    def _evaluate(self, steps: PipelinedSteps, name: str, args: tuple[Any, ...], context: Any) -> STEP_OUTPUT:
        self._begin_evaluated_step(args)
        output: STEP_OUTPUT = steps.evaluation_step(name, args, context=context)
        return self._noted(output)

    def _loss_of_nothing(self) -> Tensor:
        """Return a loss without parameters, so that this rank still joins the reductions of the others."""
        if not self._warned_of_none:
            self._warned_of_none = True
            rank_zero_warn(
                "`training_step` returned None: this rank adds nothing to the average of the gradients. Where all"
                " ranks return None the step changes nothing."
            )
        return torch.zeros((), device=self.root_device, requires_grad=True)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Run a micro-batch that is not the last before the step."""
        with self.engine.microbatch(last=False):
            yield

    def on_validation_start(self) -> None:
        """Let ranks have different numbers of batches (see ``UnevenEvaluation``). Collective: all ranks."""
        self._begin_evaluation("validation_step")

    def on_test_start(self) -> None:
        """Let ranks have different numbers of batches (see ``UnevenEvaluation``). Collective: all ranks."""
        self._begin_evaluation("test_step")

    def on_predict_start(self) -> None:
        """Let ranks have different numbers of batches (see ``UnevenEvaluation``). Collective: all ranks."""
        self._begin_evaluation("predict_step")

    def _begin_evaluation(self, step: str) -> None:
        self._evaluation = None
        if self._steps is not None or self.world_size > 1:
            alone = UnevenEvaluation if self._experts is None else ExpertEvaluation
            kind = alone if self._steps is None else EvenEvaluation
            self._evaluation = kind(self.engine, self._sharded_module.trainer, step)
            self._evaluation.begin()

    def _begin_evaluated_step(self, arguments: Any) -> None:
        if self._evaluation is not None:
            self._evaluation.announce()
        if self._tensor is not None:
            self._tensor.begin_step(self._sharded_module)
            self._tensor.note_batch(arguments)

    def _noted(self, output: T) -> T:
        if self._tensor is not None:
            self._tensor.note_result(output)
        return output

    def _evaluate_batch(self, name: str, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        self._begin_evaluated_step((args, kwargs))
        with self.engine.scope(name):
            try:
                return self._noted(step(*args, **kwargs))
            except StopIteration as error:  # of `dataloader_iter`: the others may have a batch, and need this step
                end = error
        raise end

    def on_validation_end(self) -> None:
        """Show parameters in their own dtype when ``Trainer.validate`` ends. Collective: all ranks."""
        self._end_evaluation()

    def on_test_end(self) -> None:
        """Show parameters in their own dtype when ``Trainer.test`` ends. Collective: all ranks."""
        self._end_evaluation()

    def on_predict_end(self) -> None:
        """Show parameters in their own dtype when ``Trainer.predict`` ends. Collective: all ranks."""
        self._end_evaluation()

    def _end_evaluation(self) -> None:
        if self._tensor is not None:
            self._tensor.end_steps()
        if self._sharded_module.trainer.state.fn != TrainerFn.FITTING:
            self.engine.show_masters()

    # -- The end ---------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Release the run's resources. No collectives; the module stays sharded, so it can still be saved.

        Raises:
            CheckpointError, OSError: The last asynchronous save failed, and nothing else has.
        """
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self._stored.clear()
        if self._engine is not None and self._engine.module is self._sharded_module:  # a run may end before `connect`
            keep_engine(self._sharded_module, self._engine)
        try:
            self._finish_saving()
        finally:
            self._take_back_finetuning()
            trainer = self._sharded_module._trainer
            if trainer is not None:  # else an error came before, or this process has started others
                decide_alone(trainer)
            Peers.of_world().end_run(self)
            if self._tensor is not None:
                self._tensor.unbind_metrics()
            for parallelism in self._cutting:
                parallelism.end(self.lightning_module)
        if self._engine is not None and self._engine.module is not None:
            self._engine.internals.fits.pause()
        if self.imported is not None:
            self.imported.withdraw_optimizer(self.lightning_module)
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def __getstate__(self) -> dict[str, Any]:
        made = ("_engine", "_saver", "_mesh", "_tensor", "_experts", "_steps", "_announced", "_forecast", "_evaluation")
        return {**super().__getstate__(), **dict.fromkeys(made), "_has_groups": False}


_ROUNDED = (
    "The module is sharded anew for this run, because its parameters, their names or their dtypes (`module.double()`),"
    " the options of the strategy or the groups of ranks (anew after an error) are not those of the last run. Its"
    " parameters are in 16 bits, so the fp32 masters of the last run are rounded. To keep them make modules with"
    " parameters once, and not in every `setup` (`torch.compile` too), convert the module before its first run, or save"
    " a checkpoint behind the fit and pass it as `ckpt_path`."
)

# Precision and options that the strategies' engines were made for, what synchronises batch norms, and the places of
# modules and parameters: a module may go from one Trainer to the next.
_made_for: weakref.WeakKeyDictionary[ZeroEngine, tuple[tuple[Any, ...], LayerSync | None, Places]] = (
    weakref.WeakKeyDictionary()
)


class _Nothing(ClosureResult):
    """The result of a step that has returned None: a loss for the backward, and nothing for callbacks."""

    def _clone_loss(self) -> None:
        pass


# -- Helpers -----------------------------------------------------------------------------------------------------------


def _pipeline(pipeline: Pipeline | dict[str, Any] | int | None) -> Pipeline | None:
    """Return the options of a pipeline of two or more stages, or None."""
    options: Pipeline | None = (
        Pipeline(stages=pipeline) if isinstance(pipeline, int) else from_fields(Pipeline, pipeline)
    )
    return None if options is None or options.stages == 1 else options


def _tensor_parallel(tensor_parallel: TensorParallel | dict[str, Any] | int | None) -> TensorParallel | None:
    """Return the options of tensor parallelism over two or more ranks, or None."""
    options = TensorParallel.of(tensor_parallel)
    return None if options is None or options.size == 1 else options


def _expert_parallel(expert_parallel: int | None) -> int | None:
    """Return a number of two or more ranks, or None.

    Raises:
        ValueError: It is below 1.
    """
    if expert_parallel is not None and expert_parallel < 1:
        raise ValueError(f"`expert_parallel={expert_parallel!r}` must be a number of ranks, 1 or more.")
    return None if expert_parallel == 1 else expert_parallel


def _check_partition(options: ActivationCheckpointing | None, tensor_parallel: TensorParallel | None) -> None:
    """Refuse to divide activations over tensor ranks that do not exist, or have parts of them.

    Raises:
        ValueError: The policy is ``"partition"``, without tensor parallelism or with sequence parallelism.
    """
    if options is None or options.policy != "partition":
        return
    if tensor_parallel is None:
        raise ValueError(
            "`ActivationCheckpointing(policy='partition')` divides the inputs of blocks over tensor ranks, and there"
            " are none. Use it with `tensor_parallel=...`, or policy='full' or 'offload'."
        )
    if tensor_parallel.sequence:
        raise ValueError(
            "`ActivationCheckpointing(policy='partition')` divides inputs of blocks that all tensor ranks have, and"
            " with `TensorParallel(sequence=True)` each has its own part of the sequence already. Use policy='full'."
        )


def _communication(
    communication: Communication | dict[str, Any] | None, timeout: timedelta | float | None
) -> Communication:
    """Return the engine's communication options with the strategy's timeout.

    Raises:
        ValueError: They say something that an option of the strategy says.
    """
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    if timeout is not None and timeout <= 0:
        raise ValueError(f"`timeout={timeout!r}` must be a positive number of seconds.")
    options: Communication = from_fields(Communication, communication) or Communication()
    for field, option in (("timeout_s", "timeout"), ("backend", "process_group_backend")):
        value = getattr(options, field)
        if value != getattr(Communication(), field):
            raise ValueError(
                f"`communication.{field}={value!r}` is for `ZeroEngine`. Use `ZeroStrategy({option}={value!r})`, which"
                " holds for all process groups of a run."
            )
    return options if timeout is None else replace(options, timeout_s=timeout)


def register_strategies() -> None:
    """Make ``Trainer(strategy="zero_0")`` … ``"zero_3"`` known to Lightning."""
    for stage in (0, 1, 2, 3):
        StrategyRegistry.register(
            f"zero_{stage}", ZeroStrategy, description=f"ZeRO stage {stage}", override=True, stage=stage
        )
    DDPStrategy.register(ZeroStrategy)  # Lightning takes compiled modules for subclasses of three strategies only
