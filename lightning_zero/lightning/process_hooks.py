"""The strategy's hooks for processes: ranks, devices, how the others are started, errors told to one another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.utilities.exceptions import _TunerExitException
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import DeviceMesh

from lightning_zero.comm.direct import backend_for
from lightning_zero.comm.expert_groups import ExpertGroups
from lightning_zero.comm.mesh import Mesh
from lightning_zero.comm.peers import Facts, Peers, PeersError, failure_named, is_pretended
from lightning_zero.comm.tensor_groups import TensorGroups
from lightning_zero.config import Communication, Pipeline
from lightning_zero.errors import CollectiveError
from lightning_zero.lightning.expert_training import ExpertTraining
from lightning_zero.lightning.tensor_training import TensorTraining
from lightning_zero.parallel.tensor.plan import TensorParallel

__all__ = ["ProcessHooks", "tell_before_callbacks"]

T = TypeVar("T")


class ProcessHooks(ParallelStrategy):
    """The part of a strategy that deals with processes.

    Attributes:
        num_nodes: Set by the Trainer.
        pipeline: The options of a pipeline of two or more stages, or None.
        tensor_parallel: The options of tensor parallelism over two or more ranks, or None.
        expert_parallel: Data ranks over which the experts of a layer are divided, two or more, or None.
        communication: How ranks exchange parameters and gradients.
        timeout: After which a collective of the default process group fails.
    """

    num_nodes: int
    pipeline: Pipeline | None
    tensor_parallel: TensorParallel | None
    expert_parallel: int | None
    communication: Communication
    timeout: timedelta
    _start_method: Literal["popen", "spawn", "fork", "forkserver"]
    _process_group_backend: str | None
    _mesh: Mesh | None  # with a pipeline
    _tensor: TensorTraining | None  # with tensor parallelism
    _experts: ExpertTraining | None  # with expert parallelism
    _has_groups: bool = False  # of parallelism, and no error since they were made
    _is_alone: bool = False  # while callbacks act on an error: not all ranks have come to save after it

    # -- This rank -------------------------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Lightning gives every rank its own slice of the data and reduces logged values."""
        return True

    @property
    def root_device(self) -> torch.device:
        """Device of this rank."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def process_group_backend(self) -> str | None:
        """Backend of the default process group."""
        return self._process_group_backend

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The slice of the data that this rank sees; pipeline stages and ranks of a tensor group see the same."""
        copies = self.num_nodes * self.num_processes // (1 if self.pipeline is None else self.pipeline.stages)
        size = 1 if self.tensor_parallel is None else self.tensor_parallel.size
        return {"num_replicas": copies // size, "rank": self.global_rank % max(copies, 1) // size}

    def process_dataloader(self, dataloader: object) -> object:
        """Seed workers by the data rank, where Lightning would seed them by the global rank (``PL_SEED_WORKERS``).

        So ranks with the same data have the same random transforms.
        """
        _auto_add_worker_init_fn(dataloader, self.distributed_sampler_kwargs["rank"])
        return dataloader

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """With tensor parallelism, the ranks as a mesh with the axes ``data_parallel`` and ``tensor_parallel``."""
        return None if self._tensor is None else self._tensor.device_mesh

    @property
    def _cutting(self) -> list[TensorTraining | ExpertTraining]:
        """The parallelisms that leave this rank parts of the module's parameters."""
        return [one for one in (self._tensor, self._experts) if one is not None]

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and the rank-zero decorators who this process is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        setattr(rank_zero_only, "rank", self.global_rank)  # noqa: B010 (its type knows no attribute)

    # -- Starting --------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self._start_method == "popen":
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            self._launcher = _Launcher(self, start_method=self._start_method)

    def setup_environment(self) -> None:
        """Start the default process group. Collective: all ranks."""
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        self._process_group_backend = self._process_group_backend or _get_default_process_group_backend_for_device(
            self.root_device
        )
        assert self.cluster_environment is not None
        _init_dist_connection(
            self.cluster_environment,
            self._process_group_backend,
            timeout=self.timeout,
            device_id=self.root_device if self.root_device.type != "cpu" else None,
        )
        Peers.of_world().begin_run(self, may_stay=self._is_saving)
        self._make_groups()

    def _make_groups(self) -> None:
        """Make the groups of parallelism that there are none of, or all anew after an error. Collective: all ranks."""
        if self.pipeline is None and self.tensor_parallel is None and self.expert_parallel is None:
            return
        makes = {"makes": "" if self._has_groups else "yes"}
        is_one = self._meet_peers("Making the groups of parallelism", makes, lambda facts: _any(facts, "makes"))
        if not is_one:
            return
        self._mesh = self._tensor = self._experts = None
        timeout_s = self.communication.timeout_s
        if self.pipeline is not None:
            self._mesh = Mesh(self.pipeline.stages, timeout_s)
        if self.tensor_parallel is not None:
            stages = 1 if self.pipeline is None else self.pipeline.stages
            groups = TensorGroups(self.tensor_parallel.size, timeout_s, stages)
            self._tensor = TensorTraining(self.tensor_parallel, groups, self.root_device, self.communication.backend)
            if self._mesh is not None:
                self._mesh.data_group = groups.data_group
        if self.expert_parallel is not None:
            stages = 1 if self.pipeline is None else self.pipeline.stages
            tensor = 1 if self.tensor_parallel is None else self.tensor_parallel.size
            expert_groups = ExpertGroups(self.expert_parallel, timeout_s, stages, tensor)
            self._experts = ExpertTraining(expert_groups, self.root_device, self.communication.backend)
        self._has_groups = True

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks of the error, or add the first of their errors to it. No collective."""
        super().on_exception(exception)
        self._is_alone = False
        peers = Peers.of_world()
        peers.tell(exception)
        told = peers.error_elsewhere()
        if told is not None and told.text not in str(exception):
            exception.add_note(f"On the other ranks {told}")
        if self._mesh is not None:
            self._mesh.distrust()  # another rank may be in a call that this one has left
        for parallelism in self._cutting:
            parallelism.groups.distrust()
        self._has_groups = False
        peers.wait_until_heard()

    def _meet_peers(
        self, what: str, facts: Facts | None = None, judge: Callable[[Mapping[int, Facts]], str] = lambda _: ""
    ) -> str:
        """Return rank 0's verdict on the facts of all ranks when all are here. Collective: all ranks.

        Raises:
            CollectiveError: One has failed, or did not come.
        """
        try:
            return Peers.of_world().meet(what, facts or {}, judge, timeout_s=self.timeout.total_seconds())
        except PeersError as error:
            raise CollectiveError(str(error)) from error

    def _is_saving(self) -> bool:
        """Whether a checkpoint is being written in the background."""
        raise NotImplementedError

    # -- Collectives for users -------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if not _is_initialized() or self._is_alone:
            return
        with self._around_collective(), failure_named("barrier" if name is None else f"barrier `{name}`"):
            if backend_for(None, self.root_device) == "nccl":
                dist.barrier(device_ids=[self.root_device.index])
            else:
                dist.barrier()

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return the object of rank ``src``."""
        if not _is_initialized() or self._is_alone or is_pretended():
            return obj
        objects = [obj]
        with self._around_collective(), failure_named("broadcast of an object"):
            dist.broadcast_object_list(objects, src)
        return objects[0]

    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Tensor | Any:
        """Reduce a tensor over the ranks with different data; anything else is returned as it is."""
        if isinstance(tensor, FakeTensor):  # a run of a pipelined step that computes nothing
            return tensor.clone()
        if isinstance(tensor, Tensor) and not self._is_alone:
            with self._around_collective(group), failure_named("reduction of a value"):
                return _sync_ddp_if_available(tensor, self._data_group(group), reduce_op=reduce_op)
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks say yes, or any. Collective: all ranks."""
        votes = self.reduce(torch.tensor(int(decision), device=self.root_device), self._everyone, "sum")
        return bool(votes == self.world_size) if all else bool(votes)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of all ranks with different data, stacked."""
        if isinstance(tensor, FakeTensor):
            group = self._data_group(None if group is self._everyone else group)
            return torch.stack([tensor if sync_grads else tensor.detach()] * dist.get_world_size(group))
        with self._around_collective(group), failure_named("gathering of a value"):
            is_of_all = group is not None and group is self._everyone  # `LightningModule.all_gather` names the world
            group = self._data_group(None if is_of_all else group)
            if sync_grads and group is not None:
                stacked: Tensor = _Stacked.apply(tensor.contiguous(), group)  # type: ignore[no-untyped-call]
                return stacked
            return super().all_gather(tensor, group, sync_grads)

    def _data_group(self, group: Any | None) -> Any | None:
        """Return the group of a collective of the program's where it names none: the ranks with different data.

        Those are one rank of each tensor group, and the ranks of this one's pipeline stage.
        """
        if group is not None:
            return group
        if self._tensor is not None:
            return self._tensor.groups.data_group
        return None if self._mesh is None else self._mesh.data_group

    @property
    def _everyone(self) -> Any | None:
        return dist.group.WORLD if _is_initialized() else None

    def _around_collective(self, group: Any | None = None) -> AbstractContextManager[None]:
        """Return a context for a collective of the program's, also inside a step. Collective inside one."""
        raise NotImplementedError

    def _largest(self, value: int) -> int:
        return int(self.reduce(torch.tensor(value, device=self.root_device), self._everyone, reduce_op="max"))

    def _whole_state_dict(self) -> dict[str, Any]:
        """Return the module's ``state_dict`` with whole values in host memory, on every rank. Collective: all ranks."""
        raise NotImplementedError


class _Stacked(torch.autograd.Function):
    """The tensors of all ranks of a group. PyTorch's backward over gloo takes a rank of the group for one of the world.

    Collective in forward and backward: the ranks of the group.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        stacked = tensor.new_empty(dist.get_world_size(group), *tensor.shape)
        dist.all_gather(list(stacked.unbind(0)), tensor, group=group)
        return stacked

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _SumOfOwn.apply(grads[0], ctx.group), None  # type: ignore[no-untyped-call]


class _SumOfOwn(torch.autograd.Function):
    """The sum over the ranks of the entry that belongs to this one: the transpose of ``_Stacked``, and the reverse.

    Collective in forward and backward: the ranks of the group.
    """

    @staticmethod
    def forward(ctx: Any, stacked: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = stacked.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total[dist.get_rank(group)]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Stacked.apply(grads[0].contiguous(), ctx.group), None  # type: ignore[no-untyped-call]


class _Launcher(_MultiProcessingLauncher):
    """Starts functions in processes and hands the whole trained parameters back to the calling process."""

    def _collect_rank_zero_results(self, trainer: pl.Trainer, results: Any) -> Any:
        strategy, module = trainer.strategy, trainer.lightning_module
        assert isinstance(strategy, ProcessHooks)
        state_dict = strategy._whole_state_dict()
        vars(module)["state_dict"] = lambda: state_dict
        try:
            return super()._collect_rank_zero_results(trainer, results)
        finally:
            del vars(module)["state_dict"]


def _any(facts: Mapping[int, Facts], name: str) -> str:
    """Return the fact of some rank that is not empty, or an empty string."""
    return next((one[name] for one in facts.values() if one[name]), "")


def tell_before_callbacks(trainer: Any) -> None:
    """Let a Trainer tell the other ranks of an error before callbacks act on it, which may fail. No collective."""
    vars(trainer)["_run_stage"] = partial(_run_stage, trainer)


def _run_stage(trainer: Any) -> Any:
    try:
        return type(trainer)._run_stage(trainer)
    except _TunerExitException:
        raise
    except BaseException as error:
        Peers.of_world().tell(error)
        raise


def _is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()
