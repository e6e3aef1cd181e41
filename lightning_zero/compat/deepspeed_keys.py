"""The keys of DeepSpeed's configuration: which are read, which are ignored, which are missing here, and why.

Paths are joined with dots. A key in no table is unknown.
"""

from __future__ import annotations

__all__ = [
    "ALIASES",
    "FEATURES",
    "IGNORED",
    "OBSERVERS",
    "READ",
    "SECTIONS",
    "UNUSED",
    "known_names",
]

_FLAT = "gradients and parameters are exchanged in the flat buffers of units; `units` says what a unit is"
_SCOPES = "it is not translated: give `stage={}` for N ranks (docs/sharding.md)"
_FREED = "at stage 3 a unit is freed after each use; `communication.prefetch` says how many are gathered before"
_ALWAYS_READ = "disks are read and written beside the computation"
_INFERENCE = "it configures `deepspeed.init_inference`, not training"
_ADD_MONITOR = "add the callback `ZeroMonitor`"

SECTIONS: tuple[str, ...] = (
    "optimizer",
    "optimizer.params",
    "scheduler",
    "scheduler.params",
    "zero_optimization",
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
    "zero_optimization.leaf_module",
    "fp16",
    "bf16",
    "torch_autocast",
    "data_types",
    "aio",
    "activation_checkpointing",
    "pipeline",
    "checkpoint",
    "tensor_parallel",
    "tensor_parallel.tp",
    "moe",
)
"""Keys whose values are read key by key; the values of others are one thing."""

ALIASES: dict[str, str] = {
    "bfloat16": "bf16",
    "gradient_accumulation_dtype": "data_types.grad_accum_dtype",
    "zero_optimization.cpu_offload_params": "zero_optimization.cpu_offload_param",
    "zero_optimization.prefetch_bucket_size": "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.max_live_parameters": "zero_optimization.stage3_max_live_parameters",
    "zero_optimization.max_reuse_distance": "zero_optimization.stage3_max_reuse_distance",
    "zero_optimization.param_persistence_threshold": "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.model_persistence_threshold": "zero_optimization.stage3_model_persistence_threshold",
    "zero_optimization.gather_16bit_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    "aio.thread_count": "aio.intra_op_parallelism",
    "pipeline.partition_method": "pipeline.partition",
    "tensor_parallel.size": "tensor_parallel.autotp_size",
    "tensor_parallel.tp.tp_size": "tensor_parallel.tp_size",
    "tensor_parallel.tp.tp_grain_size": "tensor_parallel.tp_grain_size",
    "tensor_parallel.tp.mpu": "tensor_parallel.mpu",
    "moe_expert_parallel_size": "moe.ep_size",
}
"""Other names of a key, old and documented by mistake."""

READ: tuple[str, ...] = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "gradient_checkpointing",
    "communication_data_type",
    "optimizer.type",
    "scheduler.type",
    "zero_optimization.stage",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.cpu_offload",
    "zero_optimization.cpu_offload_param",
    "zero_optimization.cpu_offload_use_pin_memory",
    *(f"zero_optimization.offload_optimizer.{key}" for key in ("device", "nvme_path", "pin_memory", "ratio")),
    *(f"zero_optimization.offload_param.{key}" for key in ("device", "nvme_path", "pin_memory")),
    *(
        f"fp16.{key}"
        for key in (
            "enabled",
            "loss_scale",
            "initial_scale_power",
            "loss_scale_window",
            "hysteresis",
            "consecutive_hysteresis",
            "min_loss_scale",
            "fp16_master_weights_and_grads",
        )
    ),
    *(
        f"bf16.{key}"
        for key in ("enabled", "check_grad_overflow", "bf16_master_weights_and_grads", "bf16_optimizer_states")
    ),
    *(f"torch_autocast.{key}" for key in ("enabled", "dtype", "lower_precision_safe_modules")),
    "data_types.grad_accum_dtype",
    *(f"aio.{key}" for key in ("block_size", "queue_depth", "intra_op_parallelism")),
    *(f"activation_checkpointing.{key}" for key in ("partition_activations", "cpu_checkpointing")),
    *(f"pipeline.{key}" for key in ("enabled", "stages", "partition", "activation_checkpoint_interval")),
    *(
        f"tensor_parallel.{key}"
        for key in ("enabled", "autotp_size", "preset_model", "tp_overlap_comm", "partition_config")
    ),
    *(f"tensor_parallel.{key}" for key in ("tp_size", "tp_grain_size", "mpu")),
    *(f"moe.{key}" for key in ("enabled", "ep_size", "moe_param_group", "num_experts", "capacity_factor", "top_k")),
)
"""Keys that say something about a run here."""

IGNORED: dict[str, str] = {
    # - Communication
    "prescale_gradients": "gradients are averaged in fp32, which needs no scaling against overflow",
    "gradient_predivide_factor": "gradients are averaged in fp32, which needs no scaling against overflow",
    "sparse_gradients": "gradients of embeddings are reduced as dense tensors, with the same values",
    "disable_allgather": "shards are always gathered by all-gather",
    "zero_allow_untested_optimizer": "every optimizer is tried when it is attached",
    "zero_force_ds_cpu_optimizer": "PyTorch's own optimizers step offloaded states",
    "managed_gradient_accumulation": "the Trainer accumulates (`accumulate_grad_batches`)",
    "dataloader_drop_last": "the loader is that of the program: `DataLoader(drop_last=...)`",
    "use_data_before_expert_parallelism": "the ranks of an expert group are always neighbours",
    "seq_parallel_communication_data_type": "there is no sequence parallelism over attention heads (Ulysses) yet",
    # - ZeRO
    "zero_optimization.allgather_partitions": "shards are always gathered by all-gather",
    "zero_optimization.allgather_bucket_size": _FLAT,
    "zero_optimization.reduce_bucket_size": _FLAT,
    "zero_optimization.reduce_scatter": "gradients are always reduced by reduce-scatter",
    "zero_optimization.use_multi_rank_bucket_allreduce": _FLAT,
    "zero_optimization.overlap_comm": "units are always reduced beside the backward, without more memory",
    "zero_optimization.contiguous_gradients": "gradients always lie in flat buffers",
    "zero_optimization.round_robin_gradients": "each unit's gradients go to the host as soon as they are reduced",
    "zero_optimization.load_from_fp32_weights": "checkpoints hold the fp32 masters",
    "zero_optimization.elastic_checkpoint": "every checkpoint loads on any number of ranks",
    "zero_optimization.grad_hooks": "gradients are reduced in the backward",
    "zero_optimization.legacy_stage1": "there is one implementation of all stages",
    "zero_optimization.sub_group_size": "one unit is stepped at a time",
    "zero_optimization.stage3_max_live_parameters": _FREED,
    "zero_optimization.stage3_max_reuse_distance": _FREED,
    "zero_optimization.stage3_param_persistence_threshold": "small parameters lie in the flat buffer of their unit",
    "zero_optimization.stage3_model_persistence_threshold": "small parameters lie in the flat buffer of their unit",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": (
        "`export_safetensors(model, folder, dtype='bf16')`, or the callback `ExportSafetensors`, writes 16-bit weights"
        " without gathering them"
    ),
    "zero_optimization.stage3_module_granularity_threshold": "`units` says which modules are gathered as one",
    "zero_optimization.module_granularity_threshold": "`units` says which modules are gathered as one",
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": "parameters are always gathered by all-gather",
    "zero_optimization.use_all_reduce_for_fetch_params": "parameters are always gathered by all-gather",
    "zero_optimization.stage3_allgather_sequential": _FREED,
    "zero_optimization.allgather_sequential": _FREED,
    "zero_optimization.memory_efficient_linear": "no function of PyTorch is replaced",
    "zero_optimization.pipeline_loading_checkpoint": "a rank reads only its own part of a checkpoint",
    "zero_optimization.override_module_apply": "no method of modules is replaced",
    "zero_optimization.log_trace_cache_warnings": "a wrong guess in prefetching has no consequences",
    "zero_optimization.enable_sanity_checks": "the checks are always made",
    "zero_optimization.ignore_unused_parameters": "parameters may be unused on any rank, in any step",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "it belongs to Muon on disks, which does not exist here",
    "zero_optimization.mics_hierarchical_params_gather": "gathers of parameters of a node stay in the node",
    **dict.fromkeys(
        (f"zero_optimization.leaf_module.{key}" for key in ("classes", "names", "name_suffixes")),
        "modules may be skipped on any rank, in any step",
    ),
    # - Offload
    **dict.fromkeys(
        (
            *(
                f"zero_optimization.offload_optimizer.{key}"
                for key in ("buffer_count", "buffer_size", "pipeline", "pipeline_read", "pipeline_write", "fast_init")
            ),
            *(f"zero_optimization.offload_param.{key}" for key in ("buffer_count", "buffer_size")),
        ),
        _ALWAYS_READ,
    ),
    "zero_optimization.offload_param.max_in_cpu": "about three units at a time are in memory",
    "zero_optimization.offload_optimizer.super_offload": "offloaded units are stepped beside the next forward",
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": "the step uses PyTorch's threads (`OMP_NUM_THREADS`)",
    "aio.single_submit": _ALWAYS_READ,
    "aio.overlap_events": _ALWAYS_READ,
    "aio.use_gds": "disks are reached through host memory",
    # - Precision
    "fp16.auto_cast": "autocast casts where it is needed",
    "bf16.immediate_grad_update": "gradients are added as they come, in fp32",
    # - Activations
    "activation_checkpointing.contiguous_memory_optimization": "checkpoints of activations are not copied together",
    "activation_checkpointing.number_checkpoints": "checkpoints of activations are not copied together",
    "activation_checkpointing.synchronize_checkpoint_boundary": "it is for debugging DeepSpeed",
    "activation_checkpointing.profile": "`torch.profiler` shows the recomputation",
    # - Pipeline
    "pipeline.seed_layers": "`configure_model` makes the layers; seed them there",
    "pipeline.pipe_partitioned": "messages between stages are not cut over tensor ranks",
    "pipeline.grad_partitioned": "messages between stages are not cut over tensor ranks",
    # - Checkpoints
    "checkpoint.tag_validation": "all ranks compare the path before they save",
    "checkpoint.load_universal": "every checkpoint loads on any number of ranks, at any stage",
    "checkpoint.use_node_local_storage": "a checkpoint is one file or one directory, on storage that all nodes see",
    "checkpoint.parallel_write": "all ranks write at once",
    "checkpoint.writer": "`async_save=True` writes in the background",
    "nebula": "`async_save=True` writes in the background",
    "datastates_ckpt": "`async_save=True` writes in the background",
    # - What is printed
    "steps_per_print": "use `Trainer(log_every_n_steps=...)`",
    "dump_state": "the plan at the start says what was set up",
    "wall_clock_breakdown": _ADD_MONITOR,
    "memory_breakdown": _ADD_MONITOR,
    "comms_logger": _ADD_MONITOR,
    "vocabulary_size": "it checks the shapes of one model of DeepSpeed's",
    # - Of inference
    **dict.fromkeys(
        (
            "mp_size",
            "replace_method",
            "replace_with_kernel_inject",
            "max_tokens",
            "max_out_tokens",
            "injection_policy",
            "enable_cuda_graph",
        ),
        _INFERENCE,
    ),
}
"""Keys without a meaning here, by path: why."""

OBSERVERS: dict[str, str] = {
    "tensorboard": "use `Trainer(logger=TensorBoardLogger(...))`",
    "wandb": "use `Trainer(logger=WandbLogger(...))`",
    "comet": "use `Trainer(logger=CometLogger(...))`",
    "csv_monitor": "use `Trainer(logger=CSVLogger(...))`",
    "monitor": "use `Trainer(logger=...)`",
    "monitor_config": "use `Trainer(logger=...)`",
    "flops_profiler": "use `FlopsProfile` among the callbacks; `ZeroMonitor(flops=True)` logs the rate",
    "autotuning": "there is no tuner yet",
    "compile": "there are no passes over compiled graphs yet; compile the blocks of the model with `torch.compile`",
    "graph_harvesting": "steps are not captured in CUDA graphs",
}
"""Sections that do not change the training, by path: what takes their place."""

FEATURES: dict[str, str] = {
    "amp": "NVIDIA Apex does not exist here; use `bf16`, `fp16` or `torch_autocast`",
    "compression": "DeepSpeed has no such key, and gradients are not compressed here yet",
    "compression_training": "compression in training does not exist",
    "curriculum_learning": "curriculum learning does not exist; write it as a sampler",
    "data_efficiency": "curriculum learning and token dropping do not exist",
    "progressive_layer_drop": "progressive layer dropping does not exist",
    "eigenvalue": "eigenvalues do not exist",
    "quantize_training": "quantization in training does not exist",
    "weight_quantization_config": "quantized weights of inference do not exist",
    "sparse_attention": "sparse attention does not exist",
    "elasticity": "elastic batch sizes do not exist",
    "hybrid_engine": "the engine for generation in training does not exist yet",
    "sequence_parallel_size": "sequence parallelism over attention heads (Ulysses) does not exist yet",
    "gradient_allreduce_op": "gradients are averaged, not summed",
    "data_types.param_dtype": "parameters have the dtypes that the precision says",
    "data_types.buffer_dtype": "module buffers have the dtypes that the module gives them",
    "zero_optimization.zero_hpz_partition_size": _SCOPES.format("Sharding(params=N, grads='world')"),
    "zero_optimization.zero_quantized_weights": "quantized gathers do not exist yet",
    "zero_optimization.zero_quantized_nontrainable_weights": "quantized gathers do not exist yet",
    "zero_optimization.zero_quantized_gradients": "quantized reductions do not exist yet",
    "zero_optimization.zeropp_loco_param": "quantized reductions do not exist yet",
    "zero_optimization.mics_shard_size": _SCOPES.format("Sharding(params=N, grads=N)"),
    "zero_optimization.zenflow": "asynchronous, approximate steps of offloaded states do not exist",
}
"""Keys that would change the training, and do not exist here, by path: why. Their value says whether they are on."""


UNUSED: dict[str, str] = {
    "aio": "nothing is on disks",
    "zero_optimization.offload_optimizer": "nothing is offloaded",
    "zero_optimization.offload_param": "nothing is offloaded",
    "zero_optimization": "nothing is offloaded",
    "fp16": "fp16 is off",
    "bf16": "bf16 is off",
    "torch_autocast": "it is off",
    **dict.fromkeys(("optimizer", "optimizer.params", "scheduler", "scheduler.params"), "no class is named"),
}
"""By section: why a key that is read has no effect."""


def known_names(section: str) -> list[str]:
    """Return the names of the keys in a section (``""``: of the configuration itself)."""
    paths = [*SECTIONS, *ALIASES, *READ, *IGNORED, *OBSERVERS, *FEATURES]
    prefix = f"{section}." if section else ""
    names = [path.removeprefix(prefix) for path in paths if path.startswith(prefix)]
    return [name for name in dict.fromkeys(names) if "." not in name]
