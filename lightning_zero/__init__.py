"""ZeRO stages 0 to 3 for PyTorch Lightning, as one strategy, and for plain PyTorch loops, as one engine.

Importing the package registers the strategy names ``zero_0`` to ``zero_3`` with Lightning.
"""

from lightning_zero.boxes import Box, Part
from lightning_zero.checkpoint.export import export_safetensors
from lightning_zero.checkpoint.pretrained import load_pretrained
from lightning_zero.config import ActivationCheckpointing, Communication, MixedPrecision, Offload, Pipeline
from lightning_zero.engine.access.statistics import EngineStats
from lightning_zero.engine.engine import ZeroEngine, gathered
from lightning_zero.errors import (
    CollectiveError,
    PartialParameterError,
    PipelineError,
    ReleasedParameterError,
    ShardedGradientError,
)
from lightning_zero.forecast.clock import MachineRates
from lightning_zero.forecast.settings import MemoryForecast, Setting, SettingForecast
from lightning_zero.forecast.simulation import Simulation
from lightning_zero.grid import Grid, ParamAxes
from lightning_zero.layout import FlatLayout
from lightning_zero.lightning.callbacks import ExportSafetensors, ZeroMonitor
from lightning_zero.lightning.checkpoint_io import load_from_checkpoint, name_the_reader_of_directories
from lightning_zero.lightning.estimate import estimate_memory
from lightning_zero.lightning.flops import FlopsProfile
from lightning_zero.lightning.precision import LossScale
from lightning_zero.lightning.simulate import simulate_step
from lightning_zero.lightning.strategy import ZeroStrategy, register_strategies
from lightning_zero.parallel.pipeline.stages.specs import LayerSpec, TiedLayerSpec
from lightning_zero.parallel.tensor.plan import Cut, CutArgument, Packed, TensorParallel, TensorPlan
from lightning_zero.schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from lightning_zero.sharding import Sharding

__version__ = "0.1.0"

__all__ = [
    "ActivationCheckpointing",
    "Box",
    "CollectiveError",
    "Communication",
    "Cut",
    "CutArgument",
    "EngineStats",
    "ExportSafetensors",
    "FlatLayout",
    "FlopsProfile",
    "Grid",
    "LRRangeTest",
    "LayerSpec",
    "LossScale",
    "MachineRates",
    "MemoryForecast",
    "MixedPrecision",
    "Offload",
    "OneCycle",
    "Packed",
    "ParamAxes",
    "Part",
    "PartialParameterError",
    "Pipeline",
    "PipelineError",
    "ReleasedParameterError",
    "Setting",
    "SettingForecast",
    "Sharding",
    "ShardedGradientError",
    "Simulation",
    "TensorParallel",
    "TensorPlan",
    "TiedLayerSpec",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "ZeroEngine",
    "ZeroMonitor",
    "ZeroStrategy",
    "estimate_memory",
    "export_safetensors",
    "gathered",
    "load_from_checkpoint",
    "load_pretrained",
    "simulate_step",
]

register_strategies()
name_the_reader_of_directories()
