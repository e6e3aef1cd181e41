"""Directories that DeepSpeed's ZeRO stages 1 to 3 wrote, read as a checkpoint dictionary. DeepSpeed is not needed.

Note [Layout]
    ``[zero_pp_rank_<r>_]mp_rank_00_model_states.pt`` holds names, shapes, buffers and frozen parameters,
    ``[bf16_]zero_pp_rank_<r>_mp_rank_00_optim_states.pt`` rank r's part of the flat fp32 groups and of the base
    optimizer's state, which has the same layout. ``param_shapes`` has one dictionary per flat group, in flat order.

    Stages 1 and 2: a group is one vector, its parameters one after the other, padded at the end and cut into N equal
    parts. The last part may lack its padding.
    Stage 3: each parameter is cut into N parts of ``ceil(numel / N)`` elements, the last ones padded; rank r's vector
    of a group has its parts one after the other.

    As ``deepspeed/utils/zero_to_fp32.py`` reads them.

    Of a program with ``deepspeed.moe.layer.MoE`` each expert has a file, and groups of experts are those of several
    ranks: Note [Layout] of ``deepspeed_experts.py``.

    With AutoTP each tensor rank t has such files, with ``mp_rank_<t>`` in their names, of its parts of the parameters.
    Each rank is read by itself, and the parts are joined (``tensor_ranks.py``).
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint.autotp import CutRules
from lightning_zero.checkpoint.deepspeed_experts import (
    NOT_ONE_SAVE,
    ExpertName,
    Layer,
    expert_name,
    expert_ranks,
    further_names,
    is_of_experts,
    merged_groups,
    other_values,
    our_name,
    possible_orders,
    read_layers,
    refuse_tensor_ranks,
    regroup,
    regroup_schedule,
    stack,
)
from lightning_zero.checkpoint.joined import Copies, JoinedTensors, same
from lightning_zero.checkpoint.planner import Segment
from lightning_zero.checkpoint.stored import StoredTensor
from lightning_zero.checkpoint.tensor_ranks import PREFIX, TensorRank, join
from lightning_zero.checkpoint.unpickling import DynamicScale, load_deepspeed, require_first_name

__all__ = ["find_deepspeed", "read_deepspeed"]

MODEL_STATES = "*mp_rank_*_model_states.pt"
OPTIMIZER_STATES = "*_optim_states.pt"
OF_PIPELINES = ("layer_*-model_states.pt", "*expert*_states.pt")

# Entries that DeepSpeed puts beside the user's own; those that hold progress are kept under "deepspeed".
PROGRESS = ("lr_scheduler", "global_steps", "global_samples", "skipped_steps", "ds_version")
INTERNAL = frozenset(
    {
        "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments",
        "shared_params", "data_sampler", "random_ltd", "sparse_tensor_module_names", "csr_tensor_module_names",
        "dp_world_size", "mp_world_size", "ds_config", "autoep_layers", "ds_autoep_layers", "universal_checkpoint_info",
        "checkpoint_parallel_dimensions", "num_experts", *PROGRESS,
    }
)  # fmt: skip


def find_deepspeed(path: Path) -> Path | None:
    """Return the folder with the files of the last tag, or None if this is no directory of DeepSpeed."""
    latest = path / "latest"
    candidates = [path / latest.read_text().strip()] if latest.is_file() else [path, path / "checkpoint"]
    return next((folder for folder in candidates if any(folder.glob(MODEL_STATES))), None)


def read_deepspeed(folder: Path, rules: CutRules | None = None, copies: Copies = "equal") -> dict[str, Any]:
    """Read a folder of DeepSpeed's ZeRO as a strategy's checkpoint.

    ``state_dict`` has the fp32 masters, and buffers and frozen parameters as they are. ``optimizer_states`` are by
    parameter name; of experts without ZeRO there are none, and a warning says so. Tensors are ``StoredTensor``s: files
    are mapped into memory and read tensor by tensor. Entries that the user or Lightning put into the client state are
    beside them; DeepSpeed's own progress is under ``deepspeed``.

    Args:
        folder: The files of a tag.
        rules: How parameters are cut over tensor ranks, where the files do not say it.
        copies: For values that all tensor ranks have: ``"equal"`` refuses those that differ, ``"first"`` takes those of
            the first rank.

    Raises:
        ValueError: A file is missing, exchanged, damaged, or of a program with pipeline parallelism or AutoEP; or parts
            of tensor ranks cannot be joined.
        pickle.UnpicklingError: A file names something that could run code.
    """
    files = _files_by_tensor_rank(folder)
    ranks = [_read_rank(folder, *own) if own[1] else _read_weights(folder, *own[0]) for own in files]
    if len(ranks) > 1:
        return join(folder, ranks, rules, copies)
    if rules is not None:
        raise ValueError(f"`{folder}` has parameters as a whole: it was written without tensor ranks. Give no plan.")
    return ranks[0].content


def _read_rank(folder: Path, model_files: Sequence[Path], optimizer_files: Sequence[Path]) -> TensorRank:
    """Read the files of a tensor rank."""
    models = [load_deepspeed(path) for path in model_files]
    optimizers = [_entry(load_deepspeed(path), "optimizer_state_dict", path) for path in optimizer_files]
    stage = int(_entry(optimizers[0], "zero_stage", optimizer_files[0]))
    if stage == 3 and len(models) != len(optimizers):
        raise ValueError(f"`{folder}` has model states of {len(models)} ranks and {len(optimizers)} optimizer states.")
    _check_axes(folder, models[0])
    _require_names(model_files[0], models[0])
    layers = read_layers(folder, models[0])
    _check_world(optimizers, optimizer_files, models[0] if layers else {})
    source = _Partitions(folder, len(optimizers), stage)
    if layers and isinstance(optimizers[0][BASE_STATE[stage]], list):
        raise ValueError(
            f"`{folder}` was written with `elastic_checkpoint`, so it has no options of parameter groups, which would"
            " say to which group the experts belong. Load it in DeepSpeed, and save it again without this key."
        )
    content = _content(source, models, optimizers, layers)
    buffers = frozenset(name.removeprefix(PREFIX) for name in models[0]["buffer_names"])
    return TensorRank(content, buffers, models[0].get("universal_checkpoint_info") or {})


def _read_weights(folder: Path, path: Path) -> TensorRank:
    """Read the files of a program with experts and without ZeRO."""
    model = load_deepspeed(path)
    if model.get("param_shapes") is not None:
        raise ValueError(
            f"`{folder}` was written with ZeRO, and lacks the optimizer states of its ranks (`{OPTIMIZER_STATES}`)."
            " Copy the files of all ranks into one folder: on several nodes each may have written its own."
        )
    _check_axes(folder, model)
    layers = read_layers(folder, model)
    warnings.warn(
        f"`{folder}` was written without ZeRO: its optimizer states (`expp_rank_*`) have no names of parameters, so"
        " weights alone are converted, in the dtype of the model. Load them with `lightning_zero.load_pretrained` and"
        " begin a new fit, or save the checkpoint with ZeRO.",
        stacklevel=4,
    )
    module: dict[str, Any] = model["module"]
    buffers = {name: _full_precision(module[name]) for name in model.get("buffer_names", ()) if name in module}
    values = {**module, **buffers, **_from_files(JoinedTensors(folder), model, layers, {})}
    return TensorRank({**_client_state(model), "state_dict": _named(values, values)}, frozenset(), {})


def _rank_of(path: Path) -> int:
    """Return r of ``zero_pp_rank_<r>_``; names without it are those of rank 0."""
    _, _, tail = path.name.partition("zero_pp_rank_")
    return int(tail.split("_")[0]) if tail else 0


def _tensor_rank_of(path: Path) -> int:
    """Return t of ``mp_rank_<t>_``."""
    found = re.search(r"mp_rank_(\d+)_", path.name)
    return int(found[1]) if found else 0


def _files_by_tensor_rank(folder: Path) -> list[tuple[list[Path], list[Path]]]:
    """Return the model files and the optimizer files of every tensor rank, in the order of the data ranks."""
    paths = [
        sorted((path for path in folder.glob(pattern) if not is_of_experts(path)), key=_rank_of)
        for pattern in (MODEL_STATES, OPTIMIZER_STATES)
    ]
    experts = [path for path in folder.iterdir() if is_of_experts(path)]
    if not paths[0]:
        raise ValueError(
            f"`{folder}` lacks `mp_rank_00_model_states.pt`, and has files of experts (`{experts[0].name}`). Copy the"
            " files of all ranks into one folder: on several nodes each may have written its own."
        )
    _check_kinds(folder, experts, paths[1])
    num_ranks = 1 + max(_tensor_rank_of(path) for files in paths for path in files)
    found = [
        tuple([one for one in files if _tensor_rank_of(one) == rank] for files in paths) for rank in range(num_ranks)
    ]
    for rank, (models, optimizers) in enumerate(found):
        for files in (models, optimizers) if paths[1] else (models,):
            _check_files(folder, rank, files)
    if experts and num_ranks > 1:
        refuse_tensor_ranks(folder, found[1][0][0])
    return found  # type: ignore[return-value]


def _check_files(folder: Path, tensor_rank: int, files: Sequence[Path]) -> None:
    if not files:
        raise ValueError(
            f"`{folder}` lacks files of tensor rank {tensor_rank} (`*mp_rank_{tensor_rank:02d}*`), and has some of"
            " others."
        )
    absent = [rank for rank, path in enumerate(files) if _rank_of(path) != rank]
    if absent:
        raise ValueError(f"`{folder}` lacks the file of rank {absent[0]} beside `{files[-1].name}`.")
    for path in files:
        require_first_name(path)


def _check_kinds(folder: Path, experts: Sequence[Path], optimizers: Sequence[Path]) -> None:
    """Refuse files of programs that are not read, and those of two saves.

    With ZeRO the files of experts' optimizer states have none: DeepSpeed before 0.19.5 wrote them nevertheless.
    """
    if any(path not in experts for pattern in OF_PIPELINES for path in folder.glob(pattern)):
        raise ValueError(f"`{folder}` is of a program with pipeline parallelism: not supported.")
    if not optimizers and not experts:
        raise ValueError(f"`{folder}` has no `{OPTIMIZER_STATES}`: it was not written by ZeRO stage 1, 2 or 3.")
    tensor_rank = next((path for path in experts if _tensor_rank_of(path)), None)
    if tensor_rank is not None:
        refuse_tensor_ranks(folder, tensor_rank)
    for path in experts if optimizers else ():
        if path.match(OPTIMIZER_STATES) and _entry(load_deepspeed(path), "optimizer", path) is not None:
            raise ValueError(
                f"`{path}` was written without ZeRO, and `{optimizers[0]}` with it: one of them was left from another"
                " save. Remove the files of the other save."
            )


def _check_axes(folder: Path, model: Mapping[str, Any]) -> None:
    """Refuse checkpoints of other numbers of tensor ranks than there are files, and of other axes."""
    num_ranks = len({_tensor_rank_of(path) for path in folder.glob(MODEL_STATES) if not is_of_experts(path)})
    axes = model.get("checkpoint_parallel_dimensions") or {}
    written = {int(size) for size in (model.get("mp_world_size"), axes.get("tp_degree")) if size is not None}
    if written - {num_ranks}:
        raise ValueError(
            f"`{folder}` was written by {max(written)} tensor ranks, and has the files of {num_ranks}. A file is"
            " missing, or left from another save."
        )
    if axes.get("pp_degree", 1) != 1:
        raise ValueError(f"`{folder}` is of a program with pipeline parallelism: not supported.")
    if model.get("ds_autoep_layers") or model.get("autoep_layers"):
        raise ValueError(
            f"`{folder}` is of a program with AutoEP (`expert_parallel` in DeepSpeed's configuration): not supported."
            " Experts of `deepspeed.moe.layer.MoE` are."
        )


def _require_names(path: Path, model: Mapping[str, Any]) -> None:
    """Refuse a model file that does not say which parameters the flat groups hold, and which tensors are buffers."""
    absent = next((key for key in ("param_shapes", "buffer_names") if model.get(key) is None), None)
    if absent is not None:
        raise ValueError(
            f"`{path}` has no `{absent}`: it is of a DeepSpeed that does not write names of parameters beside experts."
            " Load the checkpoint with DeepSpeed 0.19.3 or later, and save it again."
        )


def _check_world(optimizers: Sequence[Mapping[str, Any]], files: Sequence[Path], model: Mapping[str, Any]) -> None:
    count = _entry(optimizers[0], "partition_count", files[0])
    world = model.get("dp_world_size", max(count) if isinstance(count, list | tuple) else count)
    if world != len(files):
        raise ValueError(
            f"`{files[0].parent}` was written by {world} ranks, and has the optimizer states of {len(files)}. A file is"
            " missing, or left from another save."
        )


def _entry(content: Any, key: str, path: Path) -> Any:
    if not isinstance(content, dict) or key not in content:
        raise ValueError(f"`{path}` has no entry `{key}`: it is not a file of ZeRO.")
    return content[key]


def _client_state(model: Mapping[str, Any]) -> dict[str, Any]:
    mine = {key: value for key, value in model.items() if key not in INTERNAL}
    mine["deepspeed"] = {key: model[key] for key in PROGRESS if model.get(key) is not None}
    return mine


def _loss_scale(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of a dynamic loss scale: the precision plugins read the first names, ``GradScaler`` the others.

    A fixed scale is one of the configuration.
    """
    saved = optimizer.get("loss_scaler")
    if not isinstance(saved, DynamicScale) or "cur_scale" not in vars(saved):
        return {}
    found = {"scale_factor": 2.0, "scale_window": 1000, "cur_iter": 0, "last_overflow_iter": -1, **vars(saved)}
    steps, last_overflow = int(found["cur_iter"]), int(found["last_overflow_iter"])
    entry = {
        "scale": float(found["cur_scale"]),
        "steps": steps,
        "last_overflow": last_overflow,
        **({"hysteresis": int(found["cur_hysteresis"])} if "cur_hysteresis" in found else {}),
        "growth_factor": float(found["scale_factor"]),
        "backoff_factor": 1 / found["scale_factor"],
        "growth_interval": int(found["scale_window"]),
        "_growth_tracker": max(steps - last_overflow - 2, 0) % int(found["scale_window"]),
    }
    return {"MixedPrecision": entry}


# -- Tensors -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Place:
    """The place of a tensor: its flat group, its offset in there (at stage 3 in a rank's vector), its shape."""

    group: int
    offset: int
    shape: torch.Size


@dataclasses.dataclass(frozen=True)
class _Parameter:
    """A parameter that is trained.

    Attributes:
        name: DeepSpeed's; of experts the name here.
        places: Its place, or that of every expert.
        ranks: Data ranks that have the parts of each.
        expert: Names the layer, and the tensor in the module of an expert; None for other parameters.
    """

    name: str
    places: Sequence[_Place]
    ranks: Sequence[Sequence[int]]
    expert: ExpertName | None = None


def _content(
    source: _Partitions, models: Sequence[Any], optimizers: Sequence[Any], layers: Mapping[str, Layer]
) -> dict[str, Any]:
    masters = [optimizer[FLAT_GROUPS[source.stage]] for optimizer in optimizers]
    parameters = _parameters(source, models[0], optimizers=optimizers, layers=layers, masters=masters)
    # Experts are there under further names of their layer.
    module = {name: value for name, value in models[0]["module"].items() if expert_name(name) is None}
    buffers = [name for name in models[0]["buffer_names"] if name in module]
    values = {one.name: source.whole(one.name, one, lambda rank, group: masters[rank][group]) for one in parameters}
    values |= _from_files(source.stacks, models[0], layers, values)
    values |= _frozen(source, models)
    values |= {name: _full_precision(module[name]) for name in buffers}
    values |= _left_in_module(module, values, source.stage)
    for alias, name in _shared(models[0], values).items():
        values[alias] = values[name]
    for alias, name in further_names(models[0], layers).items():
        stacks = [ExpertName(name, 0, tensor) for tensor in layers[name].tensors]
        values |= {one._replace(layer=alias).stacked: values[one.stacked] for one in stacks if one.stacked in values}
    strip = _strip(values)
    content = {
        **_loss_scale(optimizers[0]),
        **_client_state(models[0]),
        "state_dict": _named(values, [*dict.fromkeys([*module, *values])]),
        "optimizer_states": [_optimizer(source, parameters, optimizers, strip)],
    }
    experts = {our_name(one.name)[strip:] for one in parameters if one.expert is not None}
    return _regrouped(content, experts) if experts else content


def _regrouped(content: Mapping[str, Any], experts: Iterable[str]) -> dict[str, Any]:
    """Return a checkpoint with the user's parameter groups, and with schedules for them."""
    (saved,) = content["optimizer_states"]
    groups, progress = saved["param_groups"], content["deepspeed"]
    merged = merged_groups(groups, experts)
    found = dict(content)
    found["optimizer_states"] = [{**saved, "param_groups": regroup(groups, merged)}]
    if "lr_schedulers" in content:
        found["lr_schedulers"] = [regroup_schedule(one, merged, len(groups)) for one in content["lr_schedulers"]]
    if "lr_scheduler" in progress:
        schedule = regroup_schedule(progress["lr_scheduler"], merged, len(groups))
        found["deepspeed"] = {**progress, "lr_scheduler": schedule}
    return found


def _named(values: Mapping[str, Any], order: Iterable[str]) -> dict[str, Any]:
    """Return values under their names here."""
    strip = _strip(values)
    return {our_name(name)[strip:]: values[name] for name in order if name in values}


def _strip(values: Mapping[str, Any]) -> int:
    """Return how many characters Lightning's strategy has put in front of every name."""
    return len(PREFIX) if values and all(name.startswith(PREFIX) for name in values) else 0


def _parameters(
    source: _Partitions,
    model: Mapping[str, Any],
    *,
    optimizers: Sequence[Mapping[str, Any]],
    layers: Mapping[str, Layer],
    masters: Sequence[Sequence[Tensor]],
) -> list[_Parameter]:
    """Return the parameters that are trained, those of experts last."""
    places = dict(source.place(model["param_shapes"], optimizers[0].get("param_alignment_paddings")))
    every = list(range(len(optimizers)))
    plain = [_Parameter(name, [place], [every]) for name, place in places.items() if expert_name(name) is None]
    errors = []
    for is_data_first in possible_orders(model.get("ds_config")):
        experts = _experts(source, places, layers, is_data_first)
        try:
            source.check([*plain, *experts], masters)
            _require_values(source, experts, layers, masters)
        except ValueError as error:
            errors.append(error)
        else:
            return [*plain, *experts]
    raise errors[0]


def _experts(
    source: _Partitions, places: Mapping[str, _Place], layers: Mapping[str, Layer], is_data_first: bool
) -> list[_Parameter]:
    """Return the parameters of experts, given the places of those of rank 0."""
    local: dict[tuple[str, str], dict[int, _Place]] = {}
    for name, place in places.items():
        found = expert_name(name)
        if found is not None:
            stacked = dataclasses.replace(place, shape=torch.Size([1, *place.shape]))
            local.setdefault((found.layer, found.name), {})[found.number] = stacked
    counts: dict[str, int] = {}
    for (layer, _), held in local.items():
        counts[layer] = max(counts.get(layer, 0), 1 + max(held))
    experts = []
    for (layer, name), held in local.items():
        count = counts[layer]
        if layer not in layers or len(held) < count or name not in layers[layer].tensors:
            raise ValueError(
                f"`{source.directory}`: the optimizer trains `{name}` of some experts of `{layer.rstrip('.')}`, and not"
                f" of all that have files. Experts of a layer have one structure. {NOT_ONE_SAVE}"
            )
        ranks = expert_ranks(layers[layer], count, source.world_size, is_data_first)
        own = [held[number % count] for number in range(len(ranks))]
        expert = ExpertName(layer, 0, name)
        experts.append(_Parameter(expert.stacked, own, ranks, expert))
    return experts


def _require_values(
    source: _Partitions, experts: Sequence[_Parameter], layers: Mapping[str, Layer], masters: Sequence[Sequence[Tensor]]
) -> None:
    """Refuse files of experts whose weights are not the rounded masters: they are of another save, or of other ranks.

    Raises:
        ValueError: One is.
    """
    for one in experts:
        assert one.expert is not None
        parts = source.parts(one.name, one, lambda rank, group: masters[rank][group])
        path = other_values(layers[one.expert.layer], one.expert.name, parts)
        if path is not None:
            raise ValueError(
                f"`{path}` has other values than the optimizer states of its data ranks. The file or the states are of"
                " another save, or the weights were changed after the last step. Take all files from one save."
            )


# by stage: the entry with the fp32 groups, and that with the base optimizer's state
FLAT_GROUPS = {1: "single_partition_of_fp32_groups", 2: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}
BASE_STATE = {1: "base_optimizer_state", 2: "base_optimizer_state", 3: "optimizer_state_dict"}


class _Partitions:
    """Tensors cut into the parts of Note [Layout]; the source of their ``StoredTensor``s."""

    def __init__(self, directory: Path, world_size: int, stage: int) -> None:
        if stage not in FLAT_GROUPS:
            raise ValueError(f"`{directory}` is of ZeRO stage {stage}. Stages 1, 2 and 3 can be read.")
        self.directory = directory
        self.world_size = world_size
        self.stage = stage
        self.stacks = JoinedTensors(directory)  # of experts
        self._pieces: dict[str, list[tuple[int, torch.Tensor]]] = {}  # where each begins in the flattened tensor

    def place(self, groups: Any, paddings: Sequence[Sequence[int]] | None = None) -> Iterator[tuple[str, _Place]]:
        """Yield names and places of ``param_shapes``.

        Args:
            groups: Shapes by name, of each flat group.
            paddings: Elements behind each parameter, with ``parameter_alignment``.
        """
        for group, shapes in enumerate([groups] if isinstance(groups, dict) else groups):
            offset = 0
            for number, (name, shape) in enumerate(shapes.items()):
                yield name, _Place(group, offset, torch.Size(shape))
                offset += self._numel_in_vector(shape) + (0 if paddings is None else paddings[group][number])

    def _numel_in_vector(self, shape: Sequence[int]) -> int:
        return -(-prod(shape) // self.world_size) if self.stage == 3 else prod(shape)

    def check(self, parameters: Sequence[_Parameter], masters: Sequence[Sequence[torch.Tensor]]) -> None:
        """Refuse groups that do not hold exactly the parameters and their padding."""
        wanted: dict[int, int] = {}
        holders: dict[int, dict[tuple[int, ...], None]] = {}
        for place, ranks in (
            (place, ranks) for one in parameters for place, ranks in zip(one.places, one.ranks, strict=True)
        ):
            end = place.offset + self._numel_in_vector(place.shape)
            wanted[place.group] = max(end, wanted.get(place.group, 0))
            holders.setdefault(place.group, {})[tuple(ranks)] = None
        num_groups = max(wanted, default=-1) + 1
        if any(len(groups) != num_groups for groups in masters):
            raise ValueError(f"`{self.directory}` has {num_groups} groups of shapes, and {len(masters[0])} of values.")
        for group, ranks in ((group, ranks) for group, found in holders.items() for ranks in found):
            # Stages 1 and 2 pad a group to a multiple of this, and leave out some of the padding.
            align = 1 if self.stage == 3 else 2 * len(ranks)
            sizes = [masters[rank][group].numel() for rank in ranks]
            found = sizes if self.stage == 3 else [sum(sizes)]
            if any(-(-wanted[group] // align) != -(-numel // align) for numel in found):
                raise ValueError(
                    f"`{self.directory}`: group {group} has {found[0]} elements, and its parameters need"
                    f" {wanted[group]}. The files are not of one save, or the states are kept in other files (offloaded"
                    " to NVMe)."
                )

    def whole(self, key: str, one: _Parameter, read: Callable[[int, int], torch.Tensor]) -> StoredTensor:
        """Return a tensor of a parameter's shape. ``read`` has the vector of a rank's group."""
        parts = self.parts(key, one, read)
        return parts[0] if one.expert is None else stack(self.stacks, key, parts)

    def parts(self, key: str, one: _Parameter, read: Callable[[int, int], torch.Tensor]) -> list[StoredTensor]:
        """Return the tensor, or that of every expert."""
        return [
            self.add(f"{key}[{number}]" if number else key, place, [read(rank, place.group) for rank in ranks])
            for number, (place, ranks) in enumerate(zip(one.places, one.ranks, strict=True))
        ]

    def add(self, key: str, place: _Place, vectors: Sequence[torch.Tensor]) -> StoredTensor:
        """Return a tensor that lies in a flat group. ``vectors``: of the ranks."""
        numel, pieces, base = prod(place.shape), [], 0
        for rank, vector in enumerate(vectors):
            if self.stage == 3:
                part = self._numel_in_vector(place.shape)
                start, stop = rank * part, min(numel, (rank + 1) * part)
                begin = place.offset
            else:
                start, stop = max(0, base - place.offset), min(numel, base + vector.numel() - place.offset)
                begin = place.offset + start - base
                base += vector.numel()
            if start < stop:
                pieces.append((start, vector.detach()[begin : begin + stop - start]))
        return self._stored(key, pieces, vectors[0].dtype, place.shape)

    def add_fragments(self, key: str, fragments: Sequence[torch.Tensor], shape: torch.Size) -> StoredTensor:
        """Return a tensor whose parts, the last one padded, the ranks have; or one has all of it."""
        place = _Place(0, 0, shape)
        if self.stage == 3:
            return self.add(key, place, [fragment.reshape(-1) for fragment in fragments])
        return self._stored(key, [(0, fragments[0].reshape(-1)[: prod(shape)])], fragments[0].dtype, shape)

    def _stored(
        self, key: str, pieces: list[tuple[int, torch.Tensor]], dtype: torch.dtype, shape: torch.Size
    ) -> StoredTensor:
        covered = sum(piece.numel() for _, piece in pieces)
        if covered != prod(shape):
            raise ValueError(f"`{self.directory}` has {covered} of the {prod(shape)} elements of `{key}`.")
        self._pieces[key] = pieces
        return StoredTensor(self, key, shape, dtype)

    def read(self, targets: Sequence[tuple[str, Segment]]) -> None:
        """Fill the local part of segments."""
        for key, target in ((key, run) for key, held in targets for run in held.runs()):
            for start, piece in self._pieces[key]:
                lo, hi = max(start, target.start), min(start + piece.numel(), target.stop)
                if lo < hi:
                    target.local[lo - target.start : hi - target.start].copy_(piece[lo - start : hi - start])

    def identity(self, key: str) -> Any:
        """Return a key that is equal for two names of the same bytes."""
        return key


# -- Tensors outside of the flat groups --------------------------------------------------------------------------------


def _frozen(source: _Partitions, models: Sequence[Any]) -> dict[str, Any]:
    shapes = models[0].get("frozen_param_shapes") or {}
    fragments = [model.get("frozen_param_fragments") or {} for model in models]
    return {
        name: source.add_fragments(name, [part[name] for part in fragments], torch.Size(shape))
        for name, shape in shapes.items()
        if expert_name(name) is None
    }


def _from_files(
    stacks: JoinedTensors, model: Mapping[str, Any], layers: Mapping[str, Layer], known: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the tensors of experts that are not trained, or all of them, but for further names of tied ones."""
    buffers = {found[::2] for name in model.get("buffer_names", ()) if (found := expert_name(name)) is not None}
    tied = {found[::2] for name in model.get("shared_params") or {} if (found := expert_name(name)) is not None}
    values = {}
    for layer in layers.values():
        for name, tensors in layer.tensors.items():
            key = ExpertName(layer.name, 0, name).stacked
            place = (layer.name, name)
            if key not in known and not (place in tied and tensors[0].numel()):
                held = [_full_precision(tensor) if place in buffers else tensor for tensor in tensors]
                values[key] = stack(stacks, key, [tensor.detach().unsqueeze(0) for tensor in held])
    return values


def _full_precision(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.float() if buffer.dtype in (torch.float16, torch.bfloat16) else buffer


def _left_in_module(module: Mapping[str, Any], known: Mapping[str, Any], stage: int) -> dict[str, Any]:
    """Return frozen parameters of stage 1, and extra state; not the empty stand-ins of stage 3, nor tied parameters.

    A tensor rank may have a part without elements of a frozen parameter.
    """
    tensors = {name: value for name, value in module.items() if isinstance(value, torch.Tensor)}
    places = {value.data_ptr() for name, value in tensors.items() if name in known and value.numel()}
    left_out = {
        name for name, value in tensors.items() if (value.data_ptr() in places if value.numel() else stage == 3)
    }
    return {name: value for name, value in module.items() if name not in known and name not in left_out}


def _shared(model: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, str]:
    """Return the further names of tied parameters."""
    shared: dict[str, str] = dict(model.get("shared_params") or {})
    module = {name: value for name, value in model["module"].items() if isinstance(value, torch.Tensor)}
    names = {value.data_ptr(): name for name, value in module.items() if name in known and value.numel()}
    for name, value in module.items():
        if name not in known and value.numel() and value.data_ptr() in names:
            shared.setdefault(name, names[value.data_ptr()])
    return {alias: name for alias, name in shared.items() if name in known}


def _optimizer(
    source: _Partitions, parameters: Sequence[_Parameter], optimizers: Sequence[Any], strip: int
) -> dict[str, Any]:
    """Return the base optimizer's state by parameter name, steps and options of groups included."""
    bases = [optimizer[BASE_STATE[source.stage]] for optimizer in optimizers]
    options = _options_of_groups(bases[0], optimizers[0])
    _warn_of_options(source.directory, options)
    ranks = [_states_of_groups(base) for base in bases]
    members = _members(bases[0], len({place.group for one in parameters for place in one.places}))
    groups = options or [{} for _ in members]
    owner = {flat: number for number, flats in enumerate(members) for flat in flats}
    slots: dict[str, dict[str, Any]] = {}
    params: list[list[str]] = [[] for _ in groups]
    for one in parameters:
        name = our_name(one.name)[strip:]
        number = owner[one.places[0].group]
        params[number].append(name)
        step = groups[number].get("step", optimizers[0].get("base_optimizer_state_step"))
        slots[name] = _slots(source, one, ranks=ranks, name=name, step=step)
    by_group = [
        {**{key: value for key, value in group.items() if key not in ("params", "step")}, "params": held}
        for group, held in zip(groups, params, strict=True)
    ]
    return {"state": {name: found for name, found in slots.items() if found}, "param_groups": by_group}


def _slots(
    source: _Partitions, one: _Parameter, *, ranks: Sequence[Mapping[int, Any]], name: str, step: Any
) -> dict[str, Any]:
    """Return a parameter's state, given those of flat groups by rank."""
    held = [ranks[own[0]].get(place.group) or {} for place, own in zip(one.places, one.ranks, strict=True)]
    slots: dict[str, Any] = {} if step is None or not held[0] else {"step": _as_step(step)}
    for slot, value in held[0].items():
        others = [other.get(slot) for other in held[1:]]
        if isinstance(value, torch.Tensor) and value.ndim > 0 and all(isinstance(other, Tensor) for other in others):
            slots[slot] = source.whole(f"{name}.{slot}", one, _vectors(ranks, slot))
        elif all(same(other, value) for other in others):
            slots[slot] = _as_step(value) if slot == "step" else value
        else:
            raise ValueError(
                f"`{source.directory}`: `{slot}` of `{name}` differs between experts, which are stepped together."
                f" {NOT_ONE_SAVE}"
            )
    return slots


def _vectors(ranks: Sequence[Mapping[int, Any]], slot: str) -> Callable[[int, int], torch.Tensor]:
    """Return the function from rank and flat group to the vector of a slot."""

    def read(rank: int, group: int) -> torch.Tensor:
        vector: torch.Tensor = ranks[rank][group][slot].reshape(-1)
        return vector

    return read


def _as_step(value: Any) -> torch.Tensor:
    return torch.as_tensor(value, dtype=torch.float32).clone()


def _states_of_groups(base: Any) -> dict[int, Any]:
    """Return the slots of every flat group; ``elastic_checkpoint`` makes a list of them."""
    return dict(enumerate(base)) if isinstance(base, list) else dict(base["state"])


def _options_of_groups(base: Any, optimizer: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [] if isinstance(base, list) else list(base["param_groups"])


def _warn_of_options(directory: Path, groups: Sequence[Mapping[str, Any]]) -> None:
    """Warn of options of DeepSpeed's optimizers by which PyTorch's do not step."""
    if any(group.get("bias_correction", True) is False for group in groups):
        warnings.warn(
            f"`{directory}` was trained with `bias_correction=False`, which `torch.optim.Adam` and `AdamW` do not have:"
            " their first steps after resuming are larger or smaller than DeepSpeed's would be. Return an optimizer"
            " that reads this option of its groups from `configure_optimizers`.",
            stacklevel=2,
        )


def _members(base: Any, num_flat: int) -> list[list[int]]:
    """Return the flat groups of every parameter group: at stage 3 there may be several."""
    if isinstance(base, list):
        return [[flat] for flat in range(num_flat)]
    return [list(group["params"]) for group in base["param_groups"]]
