"""Expert parallelism of a strategy: the experts of its module are divided over neighbouring ranks.

Ranks have different batches, so nothing but the experts' own parameters differs from data parallelism. The ranks of a
tensor group have the same ones: each computes the tokens of its batch with whole experts, which it shares with the
others, and has their whole gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_zero.boxes import Part
from lightning_zero.comm.expert_groups import ExpertGroups
from lightning_zero.comm.traffic import Traffic
from lightning_zero.engine.buffers.part_parameter import show_as_whole, show_parts
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.runtime.accumulation_hooks import has_hooks_of_program
from lightning_zero.grid import Grid
from lightning_zero.lightning.part_forwards import TensorRun, compute_with_parts
from lightning_zero.moe.division import divide_experts, divisible_layers, expert_layers, grid_of_experts
from lightning_zero.moe.exchange import ExpertRanks

__all__ = ["ExpertTraining", "refuse_divided_module"]

_KEY = "_lightning_zero_expert_parallel"  # attribute of a module whose experts are divided
_OPTION = "expert_parallel"


@dataclass
class _DividedModule:
    """How the experts of a module are divided: this rank's parts, the ranks that its layers call, and tensor ranks."""

    parts: Mapping[str, Part]
    ranks: ExpertRanks
    run: TensorRun
    tensor: int


class ExpertTraining:
    """One strategy's expert parallelism.

    Args:
        groups: The process groups.
        device: Of this rank.
        transport: The backend that pretended groups stand for; None: they are what they are.
    """

    def __init__(self, groups: ExpertGroups, device: torch.device, transport: str | None = None) -> None:
        self.groups = groups
        self._device = device
        self._transport = transport

    def undivided(self, module: nn.Module) -> list[str]:
        """Return the names of the experts, which a plan of tensor parallelism leaves whole.

        Raises:
            ValueError: They cannot be divided, or are divided already beside another number of tensor ranks.
        """
        done: _DividedModule | None = vars(module).get(_KEY)
        if done is not None and done.tensor != self.groups.tensor:
            otherwise = f"beside `tensor_parallel={done.tensor}`, and not `tensor_parallel={self.groups.tensor}`."
            raise ValueError(_divided(module, done, otherwise))
        return list(expert_layers(module) if done is not None else divisible_layers(module, self.groups.size))

    def cut(self, module: pl.LightningModule, around: Grid | None = None) -> Grid:
        """Leave this rank its experts of a module; one that is divided already keeps them. Collective: all ranks.

        Args:
            module: With whole experts; those of rank 0 count.
            around: The grid of a module whose other parameters are cut over tensor ranks.

        Raises:
            ValueError: Its experts cannot be divided, or are divided otherwise.
        """
        done: _DividedModule | None = vars(module).get(_KEY)
        if done is None:
            if vars(module).get("_compiler_ctx") is not None:
                raise ValueError(
                    f"`expert_parallel` does not work with `torch.compile` of `{type(module).__name__}`, whose experts"
                    " exchange tokens in the forward. Compile modules without experts."
                )
            ranks = ExpertRanks(self.groups.expert_group)
            parts = divide_experts(module, ranks, self._device)
            done = _DividedModule(parts, ranks, TensorRun(ranks.size, option=_OPTION), self.groups.tensor)
            compute_with_parts(module, expert_layers(module), done.run)
            vars(module)[_KEY] = done
        if done.ranks.size != self.groups.size:
            raise ValueError(
                _divided(module, done, f"and `expert_parallel={self.groups.size}` would divide them otherwise.")
            )
        done.ranks.move(self.groups.expert_group)
        done.ranks.transport = self._transport
        show_parts(module.parameters())  # to the engine, until `show_wholes`
        data_ranks = self.groups.num_groups * self.groups.size
        return grid_of_experts(done.parts, self.groups.shard_group, data_ranks, around)

    def count_calls(self, module: nn.Module, traffic: Traffic) -> None:
        """Let exchanges be counted as calls of the engine that shards the module."""
        done: _DividedModule = vars(module)[_KEY]
        done.ranks.traffic = traffic

    def bind(self, module: nn.Module, engine: ZeroEngine) -> None:
        """Let the layers of a module meet before each exchange where its engine makes collectives."""
        done: _DividedModule = vars(module)[_KEY]
        done.ranks.meet = engine.meet

    def show_wholes(self, module: nn.Module) -> None:
        """Let the parameters of experts be wholes to all code but their own forwards, once they are sharded."""
        done: _DividedModule = vars(module)[_KEY]
        show_as_whole(dict(module.named_parameters()), done.parts, _OPTION)

    def refuse_hooks(self, module: nn.Module) -> None:
        """Refuse hooks of the program on gradients of experts: they would get the sum over the tokens of all ranks.

        Raises:
            ValueError: There is one.
        """
        done: _DividedModule = vars(module)[_KEY]
        params = module.named_parameters()
        name = next((name for name, param in params if name in done.parts and has_hooks_of_program(param)), None)
        if name is not None:
            raise ValueError(
                f"`{name}` has a hook on its gradient (`register_hook`, `register_post_accumulate_grad_hook`), and with"
                f" `expert_parallel={self.groups.size}` the gradient of an expert is the sum over the tokens of"
                f" {self.groups.size} ranks: the hook would not get that of one rank. Read and change gradients in"
                " `on_before_optimizer_step`, where they are averages over all ranks."
            )

    def lines(self, module: nn.Module) -> list[str]:
        """Return the groups in words."""
        layers = expert_layers(module)
        numbers = sorted({one.experts.num_experts // self.groups.size for one in layers.values()})
        each = " or ".join(str(number) for number in numbers)
        ranks = "ranks" if self.groups.tensor == 1 else "data ranks"
        return [
            f"experts of {len(layers)} layers: divided over {self.groups.size} neighbouring {ranks}, {each} of a layer"
            f" on each; sharded over {self.groups.num_groups * self.groups.tensor} ranks"
        ]

    def begin(self, module: nn.Module) -> None:
        """Let a module that is divided be trained until ``end``."""
        done: _DividedModule | None = vars(module).get(_KEY)
        if done is not None:
            done.run.is_running = True

    def end(self, module: nn.Module | None) -> None:
        """Let no other strategy train the module: its gradients would be those of parts.

        Raises:
            CollectiveError: An exchange that the run has left did not end.
        """
        done: _DividedModule | None = None if module is None else vars(module).get(_KEY)
        if done is not None:
            done.run.is_running = False
            if not self.groups.are_distrusted:
                done.ranks.settle()


def refuse_divided_module(module: nn.Module) -> None:
    """Refuse a module whose experts are divided, for a strategy without expert parallelism.

    Raises:
        ValueError: They are.
    """
    done: _DividedModule | None = vars(module).get(_KEY)
    if done is not None:
        raise ValueError(_divided(module, done, "and this strategy does not divide them."))


def _divided(module: nn.Module, done: _DividedModule, otherwise: str) -> str:
    size = done.ranks.size
    return (
        f"The experts of `{type(module).__name__}` are divided over {size} ranks by an earlier Trainer with"
        f" `expert_parallel={size}`, {otherwise} Use the same option, or make the module anew and load its checkpoint."
    )
