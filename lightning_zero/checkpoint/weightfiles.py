"""Files and folders that hold weights, opened without reading values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_zero.checkpoint import directory
from lightning_zero.checkpoint.paths import local_path
from lightning_zero.checkpoint.planner import METADATA
from lightning_zero.checkpoint.safetensors import SafetensorsFile, is_safetensors

__all__ = ["open_weights"]

INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLES = ("model.safetensors", "pytorch_model.bin")


def open_weights(path: Path) -> dict[str, Any]:
    """Return the tensors of a file or folder; their values are read when they are used.

    Raises:
        FileNotFoundError: There is nothing, or nothing that is known.
        ValueError: A file is damaged, or which files are meant is not clear.
    """
    path = local_path(str(path))
    if not path.exists():
        raise FileNotFoundError(f"`{path}` does not exist. Give a file or a folder; nothing is downloaded.")
    if path.is_dir() and not (path / METADATA).is_file():
        return _open_folder(path)
    if path.suffix == ".safetensors" or (path.is_file() and is_safetensors(path)):
        return dict(SafetensorsFile(path).tensors())
    content = directory.load(None, path)
    weights = content.get("state_dict", content)
    if not isinstance(weights, Mapping) or not any(isinstance(value, torch.Tensor) for value in weights.values()):
        raise ValueError(f"`{path}` holds no state dictionary, itself or under `state_dict`.")
    return {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}


def _open_folder(folder: Path) -> dict[str, Any]:
    indices = sorted(path.name for path in folder.glob("*.index.json"))
    singles = sorted(path.name for path in folder.glob("*.safetensors"))
    for index, single in zip(INDICES, SINGLES, strict=True):
        if (folder / index).is_file():
            return _open_indexed(folder / index, beside=single)
        if (folder / single).is_file():
            return open_weights(folder / single)
    if len(indices) == 1:
        return _open_indexed(folder / indices[0])
    if len(singles) == 1 and not indices:
        return open_weights(folder / singles[0])
    found = ", ".join(f"`{name}`" for name in [*indices, *singles]) or "none of these"
    raise FileNotFoundError(
        f"`{folder}` has no weights that are known: {', '.join(f'`{name}`' for name in (*INDICES, *SINGLES))}, or one"
        f" other `.safetensors` file. There is {found}. Give the file itself."
    )


def _open_indexed(index: Path, beside: str = "") -> dict[str, Any]:
    """Return the tensors of an index; refuse a file with this name beside that the index does not know.

    Raises:
        ValueError: There is one, or the index is damaged.
    """
    try:
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        files = {file: open_weights(index.parent / file) for file in sorted(set(weight_map.values()))}
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"`{index}` is damaged, or no index of weights ({error}).") from error
    if beside and beside not in files and (index.parent / beside).is_file():
        raise ValueError(
            f"`{index.parent}` has `{beside}` and `{index.name}`, which tells of other files: two sets of weights. Give"
            " the file that you mean, or remove the other."
        )
    for name, file in weight_map.items():
        if name not in files[file]:
            raise ValueError(f"`{index}` says that `{name}` is in `{file}`, which does not have it.")
    return {name: files[file][name] for name, file in weight_map.items()}
