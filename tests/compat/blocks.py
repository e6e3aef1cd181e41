"""Configurations that DeepSpeed's guides and its configuration reference show, as data."""

from __future__ import annotations

from typing import Any

__all__ = ["LOADED", "REFUSED"]

_ZERO3 = {
    "stage": 3,
    "contiguous_gradients": True,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_prefetch_bucket_size": 1e7,
    "stage3_param_persistence_threshold": 1e5,
    "reduce_bucket_size": 1e7,
    "sub_group_size": 1e9,
}

LOADED: dict[str, dict[str, Any]] = {
    # - Batch sizes, optimizers, schedules
    "batch": {"train_batch_size": 32, "gradient_accumulation_steps": 1, "steps_per_print": 10},
    "adam": {
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        }
    },
    "adam-of-torch": {
        "optimizer": {"type": "Adam", "params": {"lr": 0.1, "torch_adam": True, "adam_w_mode": False}},
    },
    "muon": {
        "optimizer": {
            "type": "Muon",
            "params": {"lr": 0.001, "momentum": 0.9, "weight_decay": 0.0, "muon_lr": 0.001},
        },
        "zero_optimization": {"stage": 3, "save_muon_momentum_buffer_in_memory": True},
    },
    "one-bit-adam": {
        "optimizer": {
            "type": "OneBitAdam",
            "params": {
                "lr": 0.001,
                "betas": [0.8, 0.999],
                "eps": 1e-8,
                "weight_decay": 3e-7,
                "freeze_step": 400,
                "cuda_aware": False,
                "comm_backend_name": "nccl",
            },
        }
    },
    "zero-one-adam": {
        "optimizer": {
            "type": "ZeroOneAdam",
            "params": {"lr": 1e-3, "weight_decay": 0.01, "bias_correction": False, "var_freeze_step": 1000},
        }
    },
    "one-bit-lamb": {
        "optimizer": {
            "type": "OneBitLamb",
            "params": {"lr": 11e-3, "weight_decay": 0.01, "bias_correction": False, "max_coeff": 0.3},
        }
    },
    "warmup": {
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
        }
    },
    "one-cycle": {
        "scheduler": {
            "type": "OneCycle",
            "params": {
                "cycle_first_step_size": 1000,
                "cycle_first_stair_count": 500,
                "cycle_second_step_size": 1000,
                "cycle_second_stair_count": 500,
                "decay_step_size": 1000,
                "cycle_min_lr": 0.0001,
                "cycle_max_lr": 0.0010,
                "decay_lr_rate": 0.001,
                "cycle_min_mom": 0.85,
                "cycle_max_mom": 0.99,
                "decay_mom_rate": 0.0,
            },
        }
    },
    "range-test": {
        "scheduler": {
            "type": "LRRangeTest",
            "params": {
                "lr_range_test_min_lr": 0.0001,
                "lr_range_test_step_size": 200,
                "lr_range_test_step_rate": 5,
                "lr_range_test_staircase": False,
            },
        }
    },
    # - Communication and precision
    "communication": {
        "communication_data_type": "fp32",
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "sparse_gradients": False,
    },
    "fp16": {
        "fp16": {
            "enabled": True,
            "auto_cast": False,
            "loss_scale": 0,
            "initial_scale_power": 16,
            "loss_scale_window": 1000,
            "hysteresis": 2,
            "consecutive_hysteresis": False,
            "min_loss_scale": 1,
            "fp16_master_weights_and_grads": False,
        }
    },
    "bf16": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
    "amp-off": {"amp": {"enabled": False, "opt_level": "O1"}},
    "autocast": {
        "torch_autocast": {
            "enabled": True,
            "dtype": "bfloat16",
            "lower_precision_safe_modules": ["torch.nn.Linear", "torch.nn.Conv2d"],
        }
    },
    "data-types": {"data_types": {"grad_accum_dtype": "fp32"}},
    # - ZeRO
    "zero": {
        "zero_optimization": {
            "stage": 2,
            "allgather_partitions": True,
            "allgather_bucket_size": 5e8,
            "overlap_comm": False,
            "reduce_scatter": True,
            "reduce_bucket_size": 5e8,
            "contiguous_gradients": True,
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_prefetch_bucket_size": 5e8,
            "stage3_param_persistence_threshold": 1e6,
            "sub_group_size": 1e12,
            "elastic_checkpoint": True,
            "stage3_gather_16bit_weights_on_model_save": True,
            "ignore_unused_parameters": True,
            "round_robin_gradients": True,
            "zero_hpz_partition_size": 1,
            "zero_quantized_weights": False,
            "zero_quantized_gradients": False,
            "log_trace_cache_warnings": True,
        }
    },
    "zero-true": {"zero_optimization": True},
    "zero-3": {"zero_optimization": _ZERO3, "train_batch_size": 8},
    "offload-nvme": {
        "zero_optimization": {
            "stage": 3,
            "offload_param": {
                "device": "nvme",
                "nvme_path": "/local_nvme",
                "pin_memory": True,
                "buffer_count": 5,
                "buffer_size": 1e8,
                "max_in_cpu": 1e9,
            },
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": "/local_nvme",
                "pin_memory": True,
                "ratio": 0.3,
                "buffer_count": 4,
                "fast_init": False,
            },
        },
        "aio": {
            "block_size": 1048576,
            "queue_depth": 8,
            "thread_count": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    },
    "cpu-offload": {"zero_optimization": {"stage": 2, "cpu_offload": True}},
    "leaf-modules": {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": 3,
            "leaf_module": {
                "classes": ["my_package.layers.CustomMoEBlock"],
                "names": ["transformer.layers.0.experts"],
                "name_suffixes": ["experts"],
            },
        },
    },
    # - Observation
    "logging": {"steps_per_print": 10, "wall_clock_breakdown": False, "dump_state": False, "memory_breakdown": True},
    "autotuning": {"autotuning": {"enabled": False, "results_dir": "autotuning_results", "mp_size": 1, "fast": True}},
    "flops-profiler": {
        "flops_profiler": {"enabled": True, "profile_step": 1, "module_depth": -1, "top_modules": 1, "detailed": True}
    },
    "tensorboard": {"tensorboard": {"enabled": True, "output_path": "output/ds_logs/", "job_name": "train_bert"}},
    "wandb": {"wandb": {"enabled": True, "group": "my_group", "team": "my_team", "project": "my_project"}},
    "comet": {"comet": {"enabled": True, "workspace": "my_workspace", "project": "my_project", "mode": "get"}},
    "csv": {"csv_monitor": {"enabled": True, "output_path": "output/ds_logs/", "job_name": "train_bert"}},
    "comms-logger": {"comms_logger": {"enabled": True, "verbose": False, "prof_all": True, "debug": False}},
    # - Activations, pipeline, checkpoints
    "activations": {
        "activation_checkpointing": {
            "partition_activations": False,
            "cpu_checkpointing": False,
            "contiguous_memory_optimization": False,
            "number_checkpoints": None,
            "synchronize_checkpoint_boundary": False,
            "profile": False,
        }
    },
    "activations-on-the-host": {
        "activation_checkpointing": {
            "partition_activations": True,
            "cpu_checkpointing": True,
            "contiguous_memory_optimization": True,
            "number_checkpoints": 4,
        }
    },
    "pipeline": {"pipeline": {"enabled": True, "partition": "uniform", "stages": 4}, "zero_optimization": _ZERO3},
    "pipeline-defaults": {
        "pipeline": {
            "stages": "auto",
            "partition": "best",
            "seed_layers": False,
            "activation_checkpoint_interval": 0,
            "pipe_partitioned": True,
            "grad_partitioned": True,
        }
    },
    "checkpoint": {
        "checkpoint": {
            "tag_validation": "Warn",
            "load_universal": False,
            "use_node_local_storage": False,
            "parallel_write": {"pipeline_stage": False},
        }
    },
    # - Features that are off
    "off": {
        "curriculum_learning": {"enabled": False, "curriculum_type": "seqlen"},
        "data_efficiency": {"enabled": False, "data_sampling": {"enabled": False}},
        "progressive_layer_drop": {"enabled": False, "theta": 0.5, "gamma": 0.001},
        "elasticity": {"enabled": False},
        "tensor_parallel": {"autotp_size": 0, "tp_overlap_comm": False, "tp": {"tp_size": 1, "tp_grain_size": 1}},
        "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}},
        "eigenvalue": {"enabled": False},
        "hybrid_engine": {"enabled": False, "max_out_tokens": 512},
        "sequence_parallel_size": 1,
        "moe": {"enabled": False, "ep_size": 4},
    },
    # - Other tools' files
    "hugging-face": {
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "total_num_steps": "auto",
            },
        },
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
    },
    # - Statements of the guides that are stale, or not real
    "thread-count": {"aio": {"thread_count": 4}},
    "small-loss-scale": {"fp16": {"enabled": True, "min_loss_scale": 1e-8, "initial_scale_power": 8}},
    "gradient-checkpointing": {"gradient_checkpointing": True},
    "inference-names": {"mp_size": 2, "replace_method": "auto", "max_tokens": 1024},
    "infinite-print": {"steps_per_print": float("inf"), "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}},
}
"""By name: configurations that load as they are."""

REFUSED: dict[str, dict[str, Any]] = {
    "power-sgd": {"compression": {"type": "powerSGD"}},
    "tensor-parallel": {
        "tensor_parallel": {
            "autotp_size": 4,
            "preset_model": "llama",
            "tp_overlap_comm": False,
            "partition_config": {
                "use_default_specs": False,
                "layer_specs": [{"patterns": [".*o_proj.weight$"], "partition_type": "row"}],
            },
        }
    },
    "tensor-parallel-of-guides": {"tensor_parallel": {"enabled": True, "size": 2}},
    "tensor-parallel-nested": {"tensor_parallel": {"tp": {"tp_size": 2, "tp_grain_size": 1}}},
    "expert-parallel": {"moe_expert_parallel_size": 4},
    "experts": {"moe": {"enabled": True, "ep_size": 2, "moe_param_group": True}},
    "amp": {"amp": {"enabled": True, "opt_level": "O1"}},
    "curriculum": {"curriculum_learning": {"enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8}},
    "data-efficiency": {
        "data_efficiency": {"enabled": True, "seed": 1234, "data_routing": {"random_ltd": {"enabled": True}}}
    },
    "sparse-attention": {"sparse_attention": {"mode": "fixed", "block": 16, "num_local_blocks": 4}},
    "elasticity": {"elasticity": {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6]}},
    "compression": {"compression_training": {"layer_reduction": {"enabled": True, "keep_number_layer": 5}}},
    "pruning": {"compression_training": {"sparse_pruning": {"shared_parameters": {"enabled": True}}}},
    "zero++": {
        "zero_optimization": {
            "stage": 3,
            "zero_hpz_partition_size": 8,
            "zero_quantized_weights": True,
            "zero_quantized_gradients": True,
        }
    },
    "mics": {"zero_optimization": {"stage": 3, "mics_shard_size": 8, "mics_hierarchical_params_gather": True}},
    "zenflow": {"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.05, "update_interval": 4}}},
    "hybrid-engine": {"hybrid_engine": {"enabled": True, "max_out_tokens": 512, "inference_tp_size": 1}},
    "sequence-parallel": {"sequence_parallel_size": 4},
    "layer-drop": {"progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.001}},
    "sums": {"gradient_allreduce_op": "sum"},
}
"""By name: configurations that would train otherwise here, and load with ``strict=False``."""
