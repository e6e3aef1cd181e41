"""Options of other strategies, and their names here."""

from __future__ import annotations

from lightning_zero.config import DISKS_USE, FORMER_STEP_OPTIONS

__all__ = ["FOREIGN_OPTIONS", "FOREIGN_TO_ENGINE"]

_OFFLOAD = "`offload='cpu'`, or `Offload(optimizer=..., params=...)`, which names the place of each."
_PREFETCH = "`communication=Communication(prefetch=...)`: how many units are gathered before they are used."
_CHECKPOINTING = "`activation_checkpointing`: True, classes, or `ActivationCheckpointing(policy=...)`."
_LOSS_SCALE = "`loss_scale=LossScale(...)`"
_PRECISION = "`Trainer(precision=...)`, and `communication=Communication(reduce_dtype=...)` for gradients."
_ALWAYS = "Leave it out:"
_DEVICES = "`Trainer(accelerator=..., devices=..., num_nodes=...)`."
_BUCKETS = "Leave it out: `units` says which modules are gathered and reduced together, and there are no other buckets."

FOREIGN_OPTIONS: dict[str, str] = {
    # - Earlier versions of this package
    **FORMER_STEP_OPTIONS,
    # - FSDPStrategy and FullyShardedDataParallel
    "sharding_strategy": (
        "Use `stage`: 3 is FULL_SHARD, 2 is SHARD_GRAD_OP, 0 is NO_SHARD, `Sharding(params='node', grads='node')` is"
        " HYBRID_SHARD."
    ),
    "cpu_offload": f"Use {_OFFLOAD}",
    "mixed_precision": f"Use {_PRECISION}",
    "auto_wrap_policy": "Use `units`, for example `units=['Block']`. By default they are found.",
    "activation_checkpointing_policy": f"Use {_CHECKPOINTING}",
    "device_mesh": f"{_ALWAYS} parameters are sharded over all ranks, or over the copies of a stage with `pipeline`.",
    "process_group": f"{_ALWAYS} parameters are sharded over all ranks. `ZeroEngine(process_group=...)` takes a group.",
    "backward_prefetch": f"Use {_PREFETCH}",
    "forward_prefetch": f"Use {_PREFETCH}",
    "limit_all_gathers": f"Use {_PREFETCH}",
    "ignored_modules": f"{_ALWAYS} every parameter is held by the engine.",
    "ignored_states": f"{_ALWAYS} every parameter is held by the engine.",
    "param_init_fn": f"{_ALWAYS} parameters on the meta device get values from `reset_parameters` of their modules.",
    "device_id": f"Use {_DEVICES}",
    "sync_module_states": f"{_ALWAYS} all ranks start from the values of rank 0.",
    "use_orig_params": f"{_ALWAYS} parameters stay the objects that they are.",
    # - fully_shard
    "reshard_after_forward": "Use `stage`: 3 is True, 2 is False, `Sharding(params=N, grads='world')` is a number.",
    "mp_policy": f"Use {_PRECISION}",
    "offload_policy": f"Use {_OFFLOAD}",
    "mesh": f"{_ALWAYS} parameters are sharded over all ranks, or over the copies of a stage with `pipeline`.",
    # - ModelParallelStrategy
    "data_parallel_size": f"{_ALWAYS} parameters are sharded over all ranks, or over the copies of a stage.",
    "tensor_parallel_size": "Use `tensor_parallel`, for example `tensor_parallel=2`.",
    "save_distributed_checkpoint": "Use `state_dict_type`: 'sharded' is True, 'full' is False.",
    # - DDPStrategy and DistributedDataParallel
    "find_unused_parameters": f"{_ALWAYS} parameters may be unused on any rank in any step.",
    "static_graph": f"{_ALWAYS} nothing depends on it.",
    "gradient_as_bucket_view": f"{_ALWAYS} gradients are views of flat buffers.",
    "bucket_cap_mb": _BUCKETS,
    "broadcast_buffers": f"{_ALWAYS} module buffers are those of rank 0.",
    "ddp_comm_hook": "Use `communication=Communication(reduce_dtype='bf16')` for gradients in 16 bits.",
    "ddp_comm_state": f"{_ALWAYS} there are no hooks of the reduction.",
    "ddp_comm_wrapper": f"{_ALWAYS} there are no hooks of the reduction.",
    "model_averaging_period": f"{_ALWAYS} gradients are averaged in every step.",
    # - DeepSpeedStrategy
    "zero_optimization": "Use `stage`: 0 is False.",
    "remote_device": f"Use {_OFFLOAD}",
    "offload_optimizer": f"Use {_OFFLOAD}",
    "offload_optimizer_device": f"Use {_OFFLOAD}",
    "offload_parameters": f"Use {_OFFLOAD}",
    "offload_params_device": f"Use {_OFFLOAD}",
    "offload_param": f"Use {_OFFLOAD}",
    "pin_memory": "Use `Offload(pin_memory=...)`.",
    "nvme_path": DISKS_USE,
    "params_buffer_count": DISKS_USE,
    "params_buffer_size": DISKS_USE,
    "max_in_cpu": "Use `Offload(fraction=...)`: part of the parameters, from 0 to 1, or 'auto'.",
    "optimizer_buffer_count": DISKS_USE,
    "block_size": "Use `Offload(buffer_bytes=...)`.",
    "queue_depth": "Use `Offload(io_threads=...)`.",
    "thread_count": "Use `Offload(io_threads=...)`.",
    "single_submit": f"{_ALWAYS} it is DeepSpeed's way to reach disks.",
    "overlap_events": f"{_ALWAYS} it is DeepSpeed's way to reach disks.",
    "sub_group_size": "Leave it out: one unit is stepped at a time; `units` says what a unit is.",
    "contiguous_gradients": f"{_ALWAYS} gradients are reduced in flat buffers.",
    "overlap_comm": f"Use {_PREFETCH} 0 overlaps nothing.",
    "allgather_partitions": f"{_ALWAYS} shards are gathered by all-gather.",
    "reduce_scatter": f"{_ALWAYS} gradients are reduced by reduce-scatter.",
    "allgather_bucket_size": _BUCKETS,
    "reduce_bucket_size": _BUCKETS,
    "zero_allow_untested_optimizer": f"{_ALWAYS} optimizers are tried when they are attached.",
    "logging_batch_size_per_gpu": f"{_ALWAYS} the batch size is that of the data loader.",
    "logging_level": f"{_ALWAYS} nothing is logged but the plan at the start.",
    "config": "Use `ZeroStrategy.from_deepspeed(config)`.",
    "initial_scale_power": f"Use {_LOSS_SCALE} with `init_scale=2.0**power`.",
    "loss_scale_window": f"Use {_LOSS_SCALE} with `window`.",
    "hysteresis": f"Use {_LOSS_SCALE} with `hysteresis`.",
    "min_loss_scale": f"Use {_LOSS_SCALE} with `min_scale`.",
    "partition_activations": (
        "Use `activation_checkpointing=ActivationCheckpointing(policy='partition')` with `tensor_parallel=...`."
    ),
    "cpu_checkpointing": "Use `activation_checkpointing=ActivationCheckpointing(policy='offload')`.",
    "contiguous_memory_optimization": f"Use {_CHECKPOINTING}",
    "synchronize_checkpoint_boundary": f"Use {_CHECKPOINTING}",
    "load_full_weights": f"{_ALWAYS} checkpoints of one file load at every stage.",
    "exclude_frozen_parameters": "Use `ExportSafetensors(include='trained')` for an export without frozen parameters.",
    # - Keys of DeepSpeed's configuration
    "stage3_prefetch_bucket_size": f"Use {_PREFETCH}",
    "stage3_max_live_parameters": f"Use {_PREFETCH}",
    "stage3_max_reuse_distance": f"Use {_PREFETCH}",
    "stage3_param_persistence_threshold": _BUCKETS,
    "stage3_gather_16bit_weights_on_model_save": "Use `state_dict_type='full'`, or the callback `ExportSafetensors`.",
    "gradient_clipping": "Use `Trainer(gradient_clip_val=...)`.",
    "gradient_accumulation_steps": "Use `Trainer(accumulate_grad_batches=...)`.",
    "bf16": "Use `Trainer(precision='bf16-mixed')`.",
    "fp16": "Use `Trainer(precision='16-mixed')`.",
    # - The Trainer
    "precision": "Use `Trainer(precision=...)`.",
    "devices": f"Use {_DEVICES}",
    "num_nodes": f"Use {_DEVICES}",
    "accumulate_grad_batches": "Use `Trainer(accumulate_grad_batches=...)`.",
    "gradient_clip_val": "Use `Trainer(gradient_clip_val=...)`.",
    # - Fields of the options
    "prefetch": "Use `communication=Communication(prefetch=...)`.",
    "reduce_dtype": "Use `communication=Communication(reduce_dtype=...)`.",
    "timeout_s": "Use `timeout`, in seconds.",
}
"""For ``ZeroStrategy``, by option: the sentence that names the option to use."""

_ENGINE_PRECISION = "Use `precision=MixedPrecision(compute_dtype=torch.bfloat16)` beside `torch.autocast`."
_ENGINE_CLIPPING = "Call `engine.clip_grad_norm(optimizer, max_norm)` before the step."
_ENGINE_MICROBATCHES = "Put micro-batches that are not the last before the step into `engine.microbatch(last=False)`."
_NOT_IN_ENGINE = "It is an option of `ZeroStrategy`; "

FOREIGN_TO_ENGINE: dict[str, str] = {
    **FOREIGN_OPTIONS,
    "mixed_precision": _ENGINE_PRECISION,
    "mp_policy": _ENGINE_PRECISION,
    "bf16": _ENGINE_PRECISION,
    "fp16": _ENGINE_PRECISION,
    "masters": "Use `precision=MixedPrecision(masters=...)`.",
    "device_id": "Use `device`.",
    "mesh": "Use `process_group`: the ranks that share the model.",
    "device_mesh": "Use `process_group`: the ranks that share the model.",
    "gradient_clipping": _ENGINE_CLIPPING,
    "gradient_clip_val": _ENGINE_CLIPPING,
    "gradient_accumulation_steps": _ENGINE_MICROBATCHES,
    "accumulate_grad_batches": _ENGINE_MICROBATCHES,
    "timeout": "Use `communication=Communication(timeout_s=...)`.",
    "config": f"{_NOT_IN_ENGINE}`ZeroStrategy.from_deepspeed(config)`.",
    "pipeline": f"{_NOT_IN_ENGINE}an engine holds one part of a model that is cut (`parts_group`).",
    "loss_scale": f"{_NOT_IN_ENGINE}in a loop multiply the loss, and call `engine.unscale(optimizer, 1 / scale)`.",
    "activation_checkpointing": f"{_NOT_IN_ENGINE}in a loop use `torch.utils.checkpoint`.",
    "activation_checkpointing_policy": f"{_NOT_IN_ENGINE}in a loop use `torch.utils.checkpoint`.",
    "state_dict_type": f"{_NOT_IN_ENGINE}in a loop `export_safetensors(model, folder)` writes the weights.",
    "optimizer": "Call `engine.attach(optimizer)` after `engine.shard(model)`.",
    "model": "Call `engine.shard(model)`.",
    "module": "Call `engine.shard(module)`.",
}
"""For ``ZeroEngine``."""
