"""Tensor parallelism of a strategy: its module is cut, and the ranks of a tensor group train as one rank does.

Note [One rank to the outside]
    The ranks of a tensor group have the same batches, draw the same random numbers outside of the cut regions, and log
    the same values. So sums and means over ranks are those over the data ranks: one rank of every tensor group.
    Checkpoints keep the states of loaders, callbacks, metrics and random numbers once for each data rank.

Note [The same batch and the same numbers]
    A sampler that knows nothing of tensor groups gives their ranks different batches, and a callback that draws a
    random number on rank 0 alone gives them different dropout masks: then every rank computes parts of another model.
    So before each batch is used the ranks compare digests of it and of their generators. Batches that differ are an
    error; generators go on from the first rank's state. Inputs that a step draws from generators of its own are seen by
    its loss, which the ranks compare one or two steps later; in an evaluation, by a sample of its batch and result.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_zero.comm.peers import failure_named, is_pretended
from lightning_zero.comm.tensor_groups import TensorGroups
from lightning_zero.comm.traffic import Traffic
from lightning_zero.engine.buffers.part_parameter import show_as_whole, show_parts
from lightning_zero.engine.runtime.accumulation_hooks import has_hooks_of_program
from lightning_zero.grid import Grid
from lightning_zero.lightning.group_losses import GroupLosses, StepDigest, as_float, as_number
from lightning_zero.lightning.part_forwards import (
    LocalAttribute,
    LocalAttributes,
    TensorRun,
    compute_with_parts,
    showing,
)
from lightning_zero.lightning.plan_inputs import call_for_plan, without_collectives
from lightning_zero.parallel.pipeline.schedule.streams import RandomState
from lightning_zero.parallel.tensor.blocks import Call
from lightning_zero.parallel.tensor.collectives import ProcessGroupRanks
from lightning_zero.parallel.tensor.cuts import ParamRecord
from lightning_zero.parallel.tensor.generators import draws_numbers
from lightning_zero.parallel.tensor.grid import grid_of
from lightning_zero.parallel.tensor.plan import TensorParallel, TensorPlan
from lightning_zero.parallel.tensor.planning import ModelPlan, plan_model
from lightning_zero.parallel.tensor.resolution import resolve
from lightning_zero.parallel.tensor.transform import cut_module
from lightning_zero.trees import tree_leaves

__all__ = ["TensorTraining", "refuse_cut_module"]

_KEY = "_lightning_zero_tensor_parallel"  # attribute of a module that is cut
_SYNC = Metric.sync
_DEPTH = 6  # of containers in a batch
_SAMPLED = 1024  # elements of a tensor, from its beginning and over all of it, that a digest of a batch reads


@dataclass
class _CutModule:
    """How a module is cut: its parameters' records, its local attributes, its layers' ranks, and the plan in words."""

    records: dict[str, ParamRecord]
    attributes: list[LocalAttribute]
    ranks: ProcessGroupRanks
    lines: list[str]
    run: TensorRun


class TensorTraining:
    """One strategy's tensor parallelism.

    Args:
        options: The option of the strategy.
        groups: The process groups.
        device: Of this rank.
        transport: The backend that pretended groups stand for; None: they are what they are.
    """

    def __init__(
        self, options: TensorParallel, groups: TensorGroups, device: torch.device, transport: str | None = None
    ) -> None:
        self.options = options
        self.groups = groups
        self.device_mesh = groups.device_mesh(device.type)
        self._device = device
        self._transport = transport
        self._losses = GroupLosses(device)

    # -- Cutting -------------------------------------------------------------------------------------------------------

    def refuse_random_stages(self, module: nn.Module) -> None:
        """Refuse random numbers in pipeline stages that have parts of a divided sequence.

        A rank draws its own numbers from the first block of a list to the last one, which are on different stages.

        Raises:
            ValueError: The sequence is divided, and the module draws numbers in training.
        """
        if self.options.sequence and draws_numbers(module):
            raise ValueError(
                "`TensorParallel(sequence=True)` with `pipeline` does not work with dropout, jitter or random routers:"
                " the generators of tensor ranks would not be switched on every stage. Set the rates to 0, use"
                " `use_rts=False` and `noisy_gate_policy=None` in `MoE`, or leave `sequence` or `pipeline` out."
            )

    def cut(self, module: pl.LightningModule, whole: Collection[str] = ()) -> Grid:
        """Give a module this rank's part of its parameters; one that is cut already keeps it.

        Rank 0 plans. Collective: all ranks.

        Args:
            module: With its Trainer and whole parameters. Those of the first rank of a tensor group count.
            whole: Names of modules that stay whole: the experts that expert parallelism divides.

        Raises:
            ValueError: No plan was found, a plan does not fit or is wrong, or the module is cut otherwise.
        """
        done: _CutModule | None = vars(module).get(_KEY)
        if done is None:
            plan, lines, pieces = self._agreed_plan(module, whole)
            self._share_values(module, plan)
            ranks = ProcessGroupRanks(self.groups.tensor_group)
            attributes = LocalAttributes(module)
            records = cut_module(module, plan, ranks)
            done = _CutModule(records, attributes.changed(), ranks, lines, TensorRun(ranks.size, ranks=ranks))
            compute_with_parts(module, pieces, done.run, done.attributes)
            vars(module)[_KEY] = done
        if done.ranks.size != self.groups.size:
            raise ValueError(
                f"`{type(module).__name__}` is cut over {done.ranks.size} ranks by an earlier Trainer, and"
                f" `tensor_parallel={self.groups.size}` would cut it otherwise. Make the module anew, and load its"
                " checkpoint."
            )
        _refuse_cut_inside(done.records, whole)
        done.ranks.group, done.ranks.transport = self.groups.tensor_group, self._transport
        done.ranks.on_indices = self._losses.add_indices
        done.ranks.runs_all_blocks = self.groups.size * self.groups.num_data_ranks == dist.get_world_size()
        show_parts(module.parameters())  # to the engine, until `show_wholes`
        return grid_of(
            done.records,
            tensor_group=self.groups.tensor_group,
            data_group=self.groups.data_group,
            data_ranks=self.groups.num_data_ranks,
        )

    def count_calls(self, module: nn.Module, traffic: Traffic) -> None:
        """Let calls of the tensor group be counted as those of the engine that shards the module."""
        self.groups.traffic = self.ranks_of(module).traffic = traffic

    def show_wholes(self, module: nn.Module) -> None:
        """Let the parameters of a cut module be wholes to all code but its own forwards, once it is sharded.

        Modules that are compiled as a whole are left as they are: their graphs hold the code around the forwards.
        """
        done: _CutModule = vars(module)[_KEY]
        if vars(module).get("_compiler_ctx") is None:
            params = dict(module.named_parameters())
            parts = {name: record.part for name, record in done.records.items() if record.part is not None}
            show_as_whole(params, parts)
            for one in done.attributes:
                one.settle()

    def recomputing(self, module: nn.Module) -> AbstractContextManager[None]:
        """Let functions that a backward recomputes read the local values of integers that the plan divides."""
        done: _CutModule = vars(module)[_KEY]
        return showing(one for one in done.attributes if not one.is_size)

    def refuse_hooks(self, module: nn.Module) -> None:
        """Refuse hooks of the program on gradients of which this rank has a summand.

        Raises:
            ValueError: There is one.
        """
        done: _CutModule = vars(module)[_KEY]
        summands = {name for name, record in done.records.items() if record.kind == "partial"}
        params = module.named_parameters() if summands else ()
        name = next((name for name, param in params if name in summands and has_hooks_of_program(param)), None)
        if name is not None:
            raise ValueError(
                f"`{name}` has a hook on its gradient (`register_hook`, `register_post_accumulate_grad_hook`), and with"
                f" this plan of tensor parallelism the gradient is a sum over {self.groups.size} ranks: the hook gets"
                " the summand of one. Read and change gradients in `on_before_optimizer_step`, where they are summed,"
                " or leave `sequence` or the rule 'partial' out."
            )

    def _agreed_plan(
        self, module: pl.LightningModule, whole: Collection[str]
    ) -> tuple[TensorPlan, list[str], list[str]]:
        """Return the plan, its lines, and the names of the modules that it was verified for."""
        answer: Any = None  # the plan on rank 0; the words of an error
        cause: Exception | None = None
        before = RandomState(self._device)
        try:
            call = call_for_plan(module)  # all ranks read the batch, so data sets with states of their own stay equal
            if dist.get_rank() == 0 or is_pretended():
                answer = self._plan(module, call, whole)
        except Exception as error:  # told to all ranks, which would wait for ever
            words = (
                "" if isinstance(error, ValueError) else f"{type(error).__name__} while planning `tensor_parallel`: "
            )
            answer, cause = f"{words}{error}", error
        finally:
            before.restore()
        answers: list[Any] = [answer] * dist.get_world_size()  # those of pretended ranks too
        if not is_pretended():
            with failure_named("gathering of plans of tensor parallelism"):
                dist.all_gather_object(answers, answer)
        told = next((one for one in answers if isinstance(one, str)), None)
        if told is not None:
            raise ValueError(told) from cause
        plan, lines, pieces = answers[0]
        return plan, lines, pieces

    def _plan(
        self, module: pl.LightningModule, call: Call, whole: Collection[str]
    ) -> tuple[TensorPlan, list[str], list[str]]:
        with _without_mesh(module), without_collectives():
            planned: ModelPlan = plan_model(module, self.options, call, whole)
        if not planned.cut_numel:
            raise ValueError(
                f"`tensor_parallel={self.groups.size}` finds nothing in `{type(module).__name__}` that can be cut, so"
                " every rank would compute all of it. Leave the option out, use another size, or give a `TensorPlan`;"
                " `python -m lightning_zero tensor-plan` shows what is found."
            )
        pieces = [name for one in planned.blocks if one.cut_numel or one.plan.divided for name in one.names]
        return planned.plan, planned.lines(), pieces

    def _share_values(self, module: nn.Module, plan: TensorPlan) -> None:
        """Give all tensor ranks the first one's values of the parameters that are cut."""
        for name in resolve(module, plan, self.groups.size).sections:
            param = module.get_parameter(name)
            if param.is_meta:
                continue  # waits for pretrained values; the engine refuses others
            values = param.detach().to(self._device).contiguous()
            with failure_named(f"broadcast of `{name}` in a tensor group"):
                dist.broadcast(values, group=self.groups.tensor_group, group_src=0)
            param.data.copy_(values)

    def ranks_of(self, module: nn.Module) -> ProcessGroupRanks:
        """Return the ranks that the layers of a module that is cut call."""
        ranks: ProcessGroupRanks = vars(module)[_KEY].ranks
        return ranks

    def lines(self, module: nn.Module) -> list[str]:
        """Return the grid, the plan and the check of every block in words."""
        return [
            f"grid: {self.groups.num_data_ranks} data ranks x {self.groups.size} tensor ranks",
            *vars(module)[_KEY].lines,
        ]

    # -- Training as one rank ------------------------------------------------------------------------------------------

    def begin(self, module: nn.Module) -> None:
        """Let a module that is cut be trained until ``end``."""
        done: _CutModule | None = vars(module).get(_KEY)
        if done is not None:
            done.run.is_running = True

    def end(self, module: nn.Module | None) -> None:
        """Let no other strategy train the module: its gradients would be those of parts."""
        done: _CutModule | None = None if module is None else vars(module).get(_KEY)
        if done is not None:
            done.run.is_running = False

    def bind_metrics(self) -> None:
        """Let metrics gather over the data ranks, wherever a program keeps them, until ``unbind_metrics``."""
        group = self.groups.data_group

        @wraps(_SYNC)
        def sync(
            metric: Metric, dist_sync_fn: Any = None, process_group: Any = None, *args: Any, **kwargs: Any
        ) -> None:
            given = metric.process_group if process_group is None else process_group
            _SYNC(metric, dist_sync_fn, group if given is None else given, *args, **kwargs)

        setattr(Metric, "sync", sync)  # noqa: B010 (a method is not assigned to)

    def unbind_metrics(self) -> None:
        """Let metrics gather over all ranks."""
        setattr(Metric, "sync", _SYNC)  # noqa: B010

    def compare_batch(self, batch: Any) -> None:
        """Refuse a batch that other ranks of the tensor group do not have; see Note [The same batch …].

        Collective: the tensor group.

        Args:
            batch: In host memory; tensors on a device are not compared, which would make the host wait.

        Raises:
            ValueError: The batches differ.
        """
        everyone = self._compare(_digest_of_batch(batch))
        if len({digest for digest, _ in everyone}) > 1:
            first = self.groups.data_rank * self.groups.size
            raise ValueError(
                f"The ranks {first} to {first + self.groups.size - 1} are one tensor group, and got different batches."
                " With `tensor_parallel` such ranks need the same one: give a sampler"
                " `num_replicas=trainer.strategy.distributed_sampler_kwargs['num_replicas']` and its `rank`, or leave"
                " the sampler to the Trainer; let random transforms draw from the generators of PyTorch, NumPy or"
                " Python."
            )

    def agree_on_random_numbers(self) -> bool:
        """Let the generators of a tensor group go on from one state; say whether they were apart.

        Collective: the tensor group.
        """
        return len({digest for (digest,) in self._compare()}) > 1

    def begin_step(self, module: nn.Module) -> None:
        """Compare an earlier step; let generators go on from one state. Collective: the tensor group.

        Args:
            module: That is cut.

        Raises:
            ValueError: The losses differ.
        """
        ranks = self.ranks_of(module)
        if ranks.end_region is not None:  # of the step before
            ranks.end_region()
        self._losses.end_step()
        self._compare_steps(self._losses.next())

    def note_loss(self, loss: Tensor) -> None:
        """Take a loss of this step whose backward begins, for the comparison."""
        self._losses.add(loss)

    def note_batch(self, arguments: Any) -> None:
        """Take the arguments of a step of an evaluation, for the comparison."""
        self._losses.add_batch(arguments)

    def note_result(self, result: Any) -> None:
        """Take the result of a step of an evaluation, for the comparison."""
        self._losses.add_result(result)

    def end_steps(self) -> None:
        """Compare the last steps of a fit or an evaluation. Collective: the tensor group.

        Raises:
            ValueError: They differ.
        """
        for digest in self._losses.rest():
            self._compare_steps(digest)

    def _compare_steps(self, digest: StepDigest) -> None:
        everyone = self._compare(as_number(digest.loss), as_number(digest.magnitude), digest.indices)
        losses = [as_float(loss) for loss, *_ in everyone]
        if len({indices for _, _, indices, _ in everyone}) > 1:
            self._refuse_steps("gave an embedding different indices, or had different batches")
        elif not self._losses.are_alike(losses, as_float(everyone[0][1])):
            self._refuse_steps(f"had different losses or results ({', '.join(f'{loss:.7g}' for loss in losses)})")

    def _refuse_steps(self, difference: str) -> None:
        first = self.groups.data_rank * self.groups.size
        message = (
            f"The ranks {first} to {first + self.groups.size - 1} are one tensor group, and in an earlier step they"
            f" {difference}. With `tensor_parallel` such ranks compute one step together, so its batch and what it"
            " draws must be the same: give samplers `**trainer.strategy.distributed_sampler_kwargs`, and draw from the"
            " generators of PyTorch, NumPy or Python, or seed a generator of your own by"
            " `trainer.strategy.distributed_sampler_kwargs['rank']` and not by `global_rank`."
        )
        if self.options.check == "refuse":
            raise ValueError(message)
        warnings.warn(message, stacklevel=2)

    def agree_before_batches(self, loop: Any) -> None:
        """Let a loop of the Trainer ask its loaders for batches with one state of the generators from now on.

        A program that draws a number on one rank would else have other random transforms and orders there. Collective
        now, and in each request for a batch or an epoch: the tensor group.
        """
        fetcher = loop._data_fetcher
        is_apart = self.agree_on_random_numbers()
        if fetcher is None:
            return
        if not hasattr(fetcher, "agree"):
            fetcher.__class__ = _agreeing(type(fetcher))
        fetcher.agree = self.agree_on_random_numbers
        if is_apart:
            iter(fetcher)  # its iterators have drawn their seeds and orders already

    def _compare(self, *numbers: int) -> list[list[int]]:
        """Return numbers and a digest of the generators, as they were, by tensor rank."""
        state = RandomState(self._device).plain()
        everyone = self.groups.gather_numbers(*numbers, _digest_of_state(state))
        if len({digest for *_, digest in everyone}) > 1:
            RandomState.of(self.groups.broadcast_object(state), self._device).restore()
        return everyone


def _agreeing(base: type[Any]) -> type[Any]:
    """Return a subclass of a data fetcher of Lightning that is asked with one state of the generators."""

    def begin(fetcher: Any) -> Any:
        fetcher.agree()
        return base.__iter__(fetcher)

    def following(fetcher: Any) -> Any:
        fetcher.agree()
        return base.__next__(fetcher)

    return type(base.__name__, (base,), {"__iter__": begin, "__next__": following, "__slots__": ()})


def refuse_cut_module(module: nn.Module) -> None:
    """Refuse a module that is cut, for a strategy without tensor parallelism.

    Raises:
        ValueError: It is.
    """
    done: _CutModule | None = vars(module).get(_KEY)
    if done is not None:
        raise ValueError(
            f"`{type(module).__name__}` is cut over {done.ranks.size} ranks by an earlier Trainer with"
            f" `tensor_parallel={done.ranks.size}`. Use the same option, or make the module anew and load its"
            " checkpoint."
        )


def _refuse_cut_inside(records: Mapping[str, ParamRecord], whole: Collection[str]) -> None:
    """Refuse a cut inside of modules that stay whole, which an earlier strategy has made.

    Raises:
        ValueError: There is one.
    """
    for name, record in records.items():
        if record.part is not None and any(name.startswith(f"{one}.") for one in whole):
            raise ValueError(
                f"`{name}` is cut over {record.size} tensor ranks by an earlier Trainer without `expert_parallel`,"
                " which would divide it. Use the same options, or make the module anew and load its checkpoint."
            )


@contextmanager
def _without_mesh(module: pl.LightningModule) -> Iterator[None]:
    """Let a module be copied: process groups cannot be."""
    mesh, module._device_mesh = module._device_mesh, None
    try:
        yield
    finally:
        module._device_mesh = mesh


# -- Digests -----------------------------------------------------------------------------------------------------------


def _digest_of_batch(batch: Any) -> int:
    digest = 0
    for leaf in _leaves(batch, 0):
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
            leaf = torch.from_numpy(np.ascontiguousarray(leaf))
        if isinstance(leaf, Tensor):
            digest = zlib.crc32(repr((leaf.dtype, tuple(leaf.shape))).encode(), digest)
            if leaf.device.type == "cpu" and leaf.layout == torch.strided:
                digest = zlib.crc32(_sample(leaf), digest)
        elif isinstance(leaf, (bool, int, float, str, bytes, np.ndarray, np.generic)):
            digest = zlib.crc32(repr(leaf).encode(), digest)
    return digest


def _leaves(value: Any, depth: int) -> Iterator[Any]:
    """Yield the values in containers, mappings of any kind, dataclasses, and other objects' attributes."""
    if depth > _DEPTH:
        return
    if isinstance(value, Mapping):
        value = [one for item in value.items() for one in item]
    elif isinstance(value, (Tensor, np.ndarray, str, bytes)) or not (
        isinstance(value, (list, tuple)) or hasattr(value, "__dict__")
    ):
        yield value
        return
    elif not isinstance(value, (list, tuple)):
        value = [one for item in vars(value).items() for one in item]
    for one in value:
        yield from _leaves(one, depth + 1)


def _sample(tensor: Tensor) -> bytes:
    """Return the bytes of some elements of a tensor in host memory."""
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach().flatten()
    some = torch.cat([flat[:_SAMPLED], flat[:: max(len(flat) // _SAMPLED, 1)]])
    return some.view(torch.uint8).numpy().tobytes() if some.dtype != torch.bool else some.numpy().tobytes()


def _digest_of_state(state: dict[str, Any]) -> int:
    digest = 0
    for leaf in tree_leaves(state):
        content = leaf.numpy().tobytes() if isinstance(leaf, Tensor) else repr(leaf).encode()
        digest = zlib.crc32(content, digest)
    return digest
