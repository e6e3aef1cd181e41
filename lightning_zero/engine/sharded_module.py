"""A module in units over the ranks, with its hooks, order and reductions: assembled by ``ZeroEngine.shard``."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_zero.comm.agreement import require_same
from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.peers import is_pretended
from lightning_zero.config import Communication, MixedPrecision, Moments, Offload, StepTime
from lightning_zero.engine.access.gathered import GatheredParams
from lightning_zero.engine.access.offloaded_states import OffloadedStates
from lightning_zero.engine.access.param_index import ParamIndex
from lightning_zero.engine.access.statistics import Statistics
from lightning_zero.engine.buffers.original import RoundedWrites
from lightning_zero.engine.buffers.parameter import Owner, own
from lightning_zero.engine.optim.moments import MOMENT_FORMATS, MomentFormat
from lightning_zero.engine.optim.step_device import StepDevices
from lightning_zero.engine.runtime.hooks import Hooks
from lightning_zero.engine.runtime.order import PassOrder
from lightning_zero.engine.runtime.step_in_backward import StepInBackward
from lightning_zero.engine.runtime.step_timing import DeferredTiming, ImmediateTiming, StepTiming
from lightning_zero.engine.runtime.transforms import serve_transforms
from lightning_zero.engine.units.facts import model_facts, unit_facts
from lightning_zero.engine.units.grid_groups import GridGroups
from lightning_zero.engine.units.lowering import Lowering
from lightning_zero.engine.units.membership import Membership
from lightning_zero.engine.units.module_buffers import ModuleBuffers, buffer_facts
from lightning_zero.engine.units.nodes import find_nodes
from lightning_zero.engine.units.partition import Territory, build_unit, choose_territories
from lightning_zero.engine.units.pipeline_peers import PipelinePeers
from lightning_zero.engine.units.placement import Placement
from lightning_zero.engine.units.remote_params import RemoteParams
from lightning_zero.engine.units.unit import Unit
from lightning_zero.grid import Grid, GridPlaces, check_places
from lightning_zero.sharding import NodeRanks, ShardedOver, Sharding, ShardingScope
from lightning_zero.storage.copies import with_index
from lightning_zero.storage.store import DeviceStore

__all__ = ["EngineOptions", "ShardedModule"]

_TIMINGS: dict[StepTime, type[StepTiming]] = {
    "auto": StepTiming,
    "now": ImmediateTiming,
    "deferred": DeferredTiming,
    "backward": StepInBackward,
}

_SAME_BUFFERS = (
    "On a grid all ranks get the module buffers of rank 0. Keep a value that differs, such as the first row of a part,"
    " in a plain attribute."
)
_REMEDY = (
    "Build the same model, with the same options, on every rank: the rank, its data and random numbers must not"
    " change the layers."
)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The options of a ``ZeroEngine``; see there."""

    stage: int | Sharding | dict[str, Any]
    units: Sequence[str | type[nn.Module]] | None
    communication: Communication
    precision: MixedPrecision
    device: torch.device | None
    process_group: dist.ProcessGroup | None
    parts_group: dist.ProcessGroup | None
    offload: Offload | None
    step: StepTime
    moments: Moments

    def __post_init__(self) -> None:
        """Refuse options that are not known, or do not go together."""
        scopes = self.scopes
        if self.offload is not None:
            self.offload.check(scopes, in_pipeline=self.parts_group is not None)

    @property
    def scopes(self) -> Sharding:
        """The option ``stage`` as scopes."""
        return Sharding.of(self.stage)

    @property
    def moment_format(self) -> MomentFormat:
        """The format of the moments of AdamW and Adam."""
        return MOMENT_FORMATS[self.moments]

    @property
    def timing(self) -> type[StepTiming]:
        """When units are stepped."""
        return _TIMINGS[self.step]

    def sharding(self, world_size: int, node: ShardingScope = ShardingScope.WORLD) -> ShardedOver:
        """Return the scopes of tensors; a single rank gives up only those to be offloaded (ADR 0016).

        Args:
            world_size: Ranks over which a buffer is cut.
            node: The scope that those of a node have among them.
        """
        sharding = self.scopes.over(node)
        if world_size > 1 or (self.offload is not None and self.offload.params is not None):
            return sharding
        is_offloaded = self.offload is not None and self.offload.optimizer is not None
        leaves = bool(sharding.grads) and (is_offloaded or not self.timing.keeps_gradients)
        grads = ShardingScope.WORLD if leaves else ShardingScope.NONE
        return ShardedOver(ShardingScope.NONE, grads, ShardingScope.NONE)

    def facts(self, device: torch.device) -> dict[str, str]:
        """Return the options that decide collectives and their sums; paths, threads and timeouts may differ."""
        units = None if self.units is None else [one if isinstance(one, str) else one.__name__ for one in self.units]
        facts = {
            "stage": self.scopes.option,
            "units": units,
            "step": self.step,
            "moments": self.moments,
            "precision": self.precision,
            "communication.reduce_dtype": self.communication.reduce_dtype,
            "communication.prefetch": self.communication.prefetch,
            "offload.optimizer": self.offload and self.offload.optimizer,
            "offload.params": self.offload and self.offload.params,
            "offload.fraction": self.offload and self.offload.fraction,
            "offload.step_device": self.offload and self.offload.step_device,
        }
        return {"the type of device": device.type, **{f"`{name}`": repr(value) for name, value in facts.items()}}


class ShardedModule:
    """A module that was partitioned in place.

    Collective: all ranks.

    Args:
        module: The module.
        options: The engine's.
        holders: Which parts of the model hold a parameter, by name; None if it is whole.
        grid: The ranks as a grid; None: one axis.
        node: The ranks of this node; None: those that the launcher says.
        awaited: Parameters and buffers that need no initial values; see ``build_unit``.
        param_index: The index to fill.
        close_windows: Called when a forward or backward begins.
        owner: Makes who answers for the parameters of a unit.
    """

    def __init__(
        self,
        module: nn.Module,
        options: EngineOptions,
        holders: Mapping[str, tuple[int, ...]] | None,
        *,
        grid: Grid | None,
        node: NodeRanks | None,
        awaited: set[tuple[int, str]],
        param_index: ParamIndex,
        close_windows: Callable[[], None],
        owner: Callable[[Unit], Owner],
    ) -> None:
        serve_transforms()
        self._options = options
        self._param_index = param_index
        device = with_index(options.device or _device_of(module))
        self._lowering = Lowering(module, options.precision)
        # - Ranks
        self.communicator = Communicator(options.communication, device, options.process_group)
        self._compare(module, holders, grid, awaited)
        parts = None if holders is None else Communicator(options.communication, device, options.parts_group)
        nodes = find_nodes(options.scopes, node, self.communicator, grid=grid, parts=parts)
        self._groups = GridGroups(grid, self.communicator, options.sharding, nodes)
        sharding = self._groups.sharding(None)
        _refuse_whole_params(options, sharding)
        self.world_communicator = self.communicator  # all ranks of the model, other parts included
        self.parts: PipelinePeers | None = None  # of a model that is cut; None if it is whole
        if holders is not None and parts is not None:
            self.parts = self._take_part(module, PipelinePeers(parts, dict(module.named_parameters()), holders), grid)
            self.world_communicator = Communicator(options.communication, device)
            for one in (parts, self.world_communicator):
                one.traffic.share_ledger(self.communicator.traffic)
        # - Memory
        absent = [] if param_index.remote_params is None else param_index.remote_params.params
        territories = choose_territories(module, options.units, {id(param) for param in absent})
        require_same(self.communicator, unit_facts(territories), "units", _REMEDY)
        self.store = DeviceStore(device, keeps_freed=Placement.keeps_freed(options.offload))
        itemsize = (options.precision.compute_dtype or torch.get_default_dtype()).itemsize
        self.placement = Placement(
            options.offload,
            territories,
            communicator=self.communicator,
            sharding=sharding,
            params_ranks=sharding.params.ranks(self.communicator.world_size, self._groups.node_size),
            itemsize=itemsize,
            node=node,
            copies=self.store.copies,
        )
        self.offloaded_states = OffloadedStates(self.store, self.placement.host)
        # - Units
        self._owners: list[Owner] = []  # parameters do not hold theirs
        self._build_units(module, territories, awaited, owner)
        self.module_buffers = ModuleBuffers(module, device, self.communicator)
        self.membership = Membership(module, lambda param: param in param_index)
        # - Hooks, order, reductions
        prefetch = options.communication.prefetch
        self.timing = options.timing(self.communicator)
        self.timing.check(
            stage=options.scopes.stage, is_pipeline=self.parts is not None, obstacle=self.placement.obstacle_in_backward
        )
        reducer = self.timing.reducer(param_index.units, prefetch)
        self.rank_facts = reducer.facts
        meets = grid is not None and grid.communicates
        order = PassOrder(param_index.units, self.communicator, reducer, prefetch, meets=meets)
        self.hooks = Hooks(
            module,
            param_index.units,
            order=order,
            reducer=reducer,
            close_windows=close_windows,
            broadcast_buffers=self.module_buffers.broadcast,
            check_module=self.membership.require,
            show_original=lambda unit: self.whole.show_original(unit),
            reduces_each_backward=bool(sharding.grads),
        )
        self.step_devices = StepDevices(param_index.units, device, options.moment_format)
        fixed = options.offload.step_device if options.offload else None
        if self.parts is not None and options.offload and options.offload.optimizer and fixed is None:
            fixed = "cpu"  # parts would choose by themselves, and a parameter of several would differ in its last bits
        self.step_devices.choose(fixed, self.communicator)
        # - Reading
        self.whole = GatheredParams(
            param_index.units,
            self.communicator,
            scopes=self.hooks.scopes,
            saved=self.hooks.saved,
            order=order,
            remote_params=param_index.remote_params,
        )
        self.rounded_writes = RoundedWrites(self.communicator.rank)
        self.statistics = Statistics(
            options.scopes,
            param_index.units,
            param_index.by_id,
            communicator=self.communicator,
            store=self.store,
            stores=self.placement.stores,
            prefetch=prefetch,
            moments=options.moment_format,
            lowering=self._lowering,
        )

    @property
    def ranks_per_batch(self) -> int:
        """Neighbouring ranks that have the same batches: those of a tensor group."""
        return self.communicator.world_size // self._groups.data_ranks

    def _compare(
        self,
        module: nn.Module,
        holders: Mapping[str, tuple[int, ...]] | None,
        grid: Grid | None,
        awaited: set[tuple[int, str]],
    ) -> None:
        """Refuse ranks that differ, before a collective of theirs does not fit another's."""
        if self.communicator.world_size > 1:
            options = self._options.facts(self.communicator.device)
            facts = {**options, **model_facts(module, holders), **buffer_facts(module)}
            facts.update({} if grid is None else grid.facts())
            require_same(self.communicator, facts, "models or options", _REMEDY)
        if grid is not None:
            self._compare_grids(module, holders, grid, awaited)

    def _compare_grids(
        self,
        module: nn.Module,
        holders: Mapping[str, tuple[int, ...]] | None,
        grid: Grid,
        awaited: set[tuple[int, str]],
    ) -> None:
        """Refuse a grid that is wrong on some rank, on all of them."""
        part = 0 if holders is None else dist.get_rank(self._options.parts_group)
        held = [name for name in grid.params if holders is None or part in holders.get(name, ())]
        ranks = self._ranks()
        shapes = {name: tuple(param.shape) for name, param in module.named_parameters()}
        error = None
        try:
            grid.check(shapes, ranks)
            _refuse_parts_without_values(module, held, grid, awaited)
            places = grid.places(shapes, ranks)
        except ValueError as found:
            error, places = found, GridPlaces({}, {})
        everyone = self.communicator.gather_objects((error and str(error), places), "comparison of grids")
        if error is not None:
            raise error
        told = [text for text, _ in everyone if text is not None]
        if told:
            raise ValueError(f"`grid` is wrong on another rank. {told[0]}")
        if len(ranks) == 1 or not is_pretended():
            check_places({rank: one for rank, (_, one) in zip(ranks, everyone, strict=True)})
        if self.communicator.world_size > 1:
            values = {f"module buffer `{name}`": _checksum(one) for name, one in module.named_buffers()}
            require_same(self.communicator, values, "values of module buffers", _SAME_BUFFERS)

    def _ranks(self) -> list[int]:
        if not (dist.is_available() and dist.is_initialized()):
            return [0]
        return dist.get_process_group_ranks(self._options.process_group or dist.group.WORLD)

    def _take_part(self, module: nn.Module, parts: PipelinePeers, grid: Grid | None) -> PipelinePeers:
        """Give up the values of the parameters that other parts hold."""
        options = self._options
        self._param_index.remote_params = RemoteParams(
            module,
            parts,
            names=self._param_index.names,
            precision=options.precision,
            lowering=self._lowering,
            communication=options.communication,
            grid=grid,
            device=self.communicator.device,
            is_stepping=lambda: self.hooks.scopes.is_open and self.hooks.scopes.opened_by is None,
        )
        return parts

    def _build_units(
        self,
        module: nn.Module,
        territories: Sequence[Territory],
        awaited: set[tuple[int, str]],
        owner: Callable[[Unit], Owner],
    ) -> None:
        """Shard unit by unit, so that no rank ever holds the whole model at stage 3."""
        for index, territory in enumerate(territories):
            unit = build_unit(
                territory,
                index,
                root=module,
                awaited=awaited,
                groups=self._groups,
                precision=self._options.precision,
                lowering=self._lowering,
                communication=self._options.communication,
                store=self.store,
                home=self.placement.home(index),
                params_home=self.placement.params_home(index),
                is_shared=self.parts.is_shared if self.parts is not None else lambda param: False,
            )
            self._param_index.add(unit, territory)
            self._owners.append(owner(unit))
            self._own_params(unit, self._owners[-1])
            unit.reshard()
        if self.parts is not None:
            self.parts.start_equal(self._param_index.buffers)

    def own_params(self) -> None:
        """Answer for the parameters of all units again."""
        for unit, owner in zip(self._param_index.units, self._owners, strict=True):
            self._own_params(unit, owner)

    @staticmethod
    def _own_params(unit: Unit, owner: Owner) -> None:
        for buffer in unit.buffers:
            for param in buffer.params:
                own(param, owner)

    # -- The end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Take the hooks out, give process groups and memory back."""
        self.hooks.remove()
        self.close_groups()
        self.store.close()
        self.placement.close()

    def close_groups(self) -> None:
        """Give the process groups back."""
        self.communicator.close()
        if self.parts is not None:
            self.parts.communicator.close()
            self.world_communicator.close()


def _refuse_whole_params(options: EngineOptions, sharding: ShardedOver) -> None:
    """Refuse to offload parameters that no node shards.

    Raises:
        ValueError: ``"node"`` is ``"none"`` for them.
    """
    if options.offload is not None and options.offload.params is not None and not sharding.params:
        raise ValueError(
            f"`Offload(params={options.offload.params!r})` does not work with `{options.scopes}` here, because a node"
            " has one data rank, which keeps whole parameters. Use `params='world'` in `Sharding`, or `offload='cpu'`"
            " for the optimizer alone."
        )


def _refuse_parts_without_values(
    module: nn.Module, held: Iterable[str], grid: Grid, awaited: set[tuple[int, str]]
) -> None:
    """Refuse parts of parameters held here that are on the meta device, and that no file gives values to.

    Raises:
        ValueError: There is one: ``reset_parameters`` would draw the values of a layer of the part's size.
    """
    for name in held:
        part = grid.params[name].part
        owner, _, key = name.rpartition(".")
        is_awaited = (id(module.get_submodule(owner)), key) in awaited
        if part is not None and module.get_parameter(name).is_meta and not is_awaited:
            raise ValueError(
                f"`{name}` is a part of a parameter of shape {part.whole} and has no values: it is on the meta"
                " device. Initial values are those of the whole parameter, so make the module on the CPU before it is"
                " cut, or call `load_pretrained` before it is sharded."
            )


def _checksum(buffer: torch.Tensor) -> str:
    if buffer.is_meta or buffer.layout is not torch.strided:
        return "no values"
    return str(zlib.crc32(buffer.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()))


def _device_of(module: nn.Module) -> torch.device:
    devices = {param.device for param in module.parameters() if not param.is_meta}
    if len(devices) > 1:
        found = ", ".join(sorted(str(device) for device in devices))
        raise ValueError(f"The parameters are on several devices ({found}). Pass `device=`, or move the module to one.")
    return devices.pop() if devices else torch.device("cpu")
