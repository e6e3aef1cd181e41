"""The command ``tensor-plan``: the plan of a model, its cut fraction and its check, without a GPU and without ranks."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import yaml
from jsonargparse import get_loader
from torch import Tensor, nn

from lightning_zero.parallel.tensor.blocks import Call
from lightning_zero.parallel.tensor.examples import described_inputs, run_example
from lightning_zero.parallel.tensor.plan import TensorParallel
from lightning_zero.parallel.tensor.planning import plan_model
from lightning_zero.trees import tree_leaves

__all__ = ["built", "data_of", "entry_of", "first_batch", "named", "read_yaml", "section_of", "tensor_plan"]


def tensor_plan(
    run: Path | None = None,
    module: str | None = None,
    size: int | None = None,
    plan: Literal["auto", "model"] | None = None,
) -> None:
    """Show the plan of tensor parallelism of a model, the fraction of it that is cut, and the check of every block.

    The model runs once, without values, on the first batch of the configuration's ``data``, on its own
    ``example_input_array``, or on inputs in the form that a Hugging Face model describes.

    Args:
        run: Configuration of a run, also ``--config``, as ``LightningCLI`` reads it: ``model`` (and ``data``) with
            ``class_path`` and ``init_args``, and ``tensor_parallel`` among the options of the strategy.
        module: In place of a configuration, a class or function without arguments: ``package.module:name``.
        size: Number of ranks; overrides the configuration.
        plan: Where the plan comes from; overrides the configuration.
    """
    if (run is None) == (module is None):
        raise ValueError("`tensor-plan` needs a model: give `--config=run.yaml` or `--module=package.module:name`.")
    content = {} if run is None else read_yaml(run)
    options = _options(content, size, plan)
    model = _model(run, module, content)
    print("\n".join(plan_model(model, options, _call(model, run, content)).lines()))


def _options(content: Any, size: int | None, plan: Literal["auto", "model"] | None) -> TensorParallel:
    """Return the options of the configuration with those of the command line."""
    strategy = section_of(content, "trainer").get("strategy")
    given = section_of(section_of({"strategy": strategy}, "strategy"), "init_args").get("tensor_parallel")
    options = TensorParallel.of(given) or TensorParallel()
    changes: dict[str, Any] = {"size": size, "plan": plan}
    return replace(options, **{name: value for name, value in changes.items() if value is not None})


# -- The model ---------------------------------------------------------------------------------------------------------


def _model(config: Path | None, module: str | None, content: Any) -> nn.Module:
    """Build the model without values of its parameters, or with them if it asks for values while it is built."""
    entry = {"class_path": module} if module is not None else entry_of(config, content, "model")
    try:
        with _without_values():
            model = built(entry)
    except (RuntimeError, NotImplementedError):
        model = built(entry)
    if not isinstance(model, nn.Module):
        raise TypeError(f"`{module or 'model'}` gives a `{type(model).__name__}`. Name one that gives an `nn.Module`.")
    return model.train()


def read_yaml(path: Path) -> Any:
    """Return the content of a configuration as ``LightningCLI`` reads it: ``1e-4`` is a number.

    Raises:
        ValueError: The file is no YAML.
    """
    try:
        return get_loader("yaml")(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise ValueError(f"`{path}` is no YAML: {place}{getattr(error, 'problem', None) or error}.") from error


def section_of(content: Any, key: str) -> Mapping[str, Any]:
    """Return a section of a configuration; an empty one if it is missing, null, or one word."""
    section = content.get(key) if isinstance(content, Mapping) else None
    return section if isinstance(section, Mapping) else {}


def entry_of(config: Path | None, content: Any, key: str) -> dict[str, Any]:
    """Return the entry of a configuration that says which object is made.

    Raises:
        ValueError: There is none.
    """
    entry = content.get(key) if isinstance(content, dict) else None
    if not isinstance(entry, dict) or "class_path" not in entry:
        raise ValueError(
            f"`{config}` has no `{key}` with a `class_path`. Add one, or name a function that builds the model:"
            " `--module=package.module:name`."
        )
    return entry


def data_of(config: Path | None, content: Any) -> Any:
    """Build the data module of a configuration; None if it has none.

    Raises:
        ValueError: It has a section ``data`` that does not say which class it is.
    """
    entry = content.get("data") if isinstance(content, dict) else None
    if entry is None:
        return None
    if not isinstance(entry, dict) or "class_path" not in entry:
        raise ValueError(
            f"`data` of `{config}` has no `class_path`. Add that of the data module, or take `data` out: without it the"
            " model's `example_input_array` is used."
        )
    data = built(entry)
    if not callable(getattr(data, "train_dataloader", None)):
        raise ValueError(f"`data` of `{config}` is a `{type(data).__name__}`. Name a `LightningDataModule`.")
    return data


def built(value: Any) -> Any:
    """Build the object of a ``class_path`` and its ``init_args``, which may have others inside.

    Raises:
        ValueError: A class cannot be imported, or its constructor fails.
    """
    if isinstance(value, dict) and "class_path" in value:
        arguments = {name: built(one) for name, one in (value.get("init_args") or {}).items()}
        make = named(value["class_path"])
        try:
            return make(**arguments)
        except (ImportError, AttributeError, LookupError, AssertionError) as error:
            raise ValueError(
                f"`{value['class_path']}` cannot be made: {type(error).__name__}: {error}. Its `init_args` are"
                f" {', '.join(f'`{name}`' for name in arguments) or 'none'}."
            ) from error
    if isinstance(value, dict):
        return {key: built(one) for key, one in value.items()}
    return [built(one) for one in value] if isinstance(value, list) else value


def named(path: str | None) -> Any:
    """Return a class or function by ``package.module:name`` or ``package.module.name``."""
    package, _, name = (path or "").replace(":", ".").rpartition(".")
    try:
        return getattr(importlib.import_module(package), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"`{path}` cannot be imported ({error}). Use `package.module:name`.") from error


@contextmanager
def _without_values() -> Iterator[None]:
    """Let modules register parameters on the meta device; module buffers have their values."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


# -- A call of the model -----------------------------------------------------------------------------------------------


def _call(model: nn.Module, config: Path | None, content: Any) -> Call:
    """Return a function that runs the model, or a copy of it."""
    data = data_of(config, content)
    if data is not None:
        batch = _first_batch(data)
        return lambda one: one.training_step(batch, 0)  # type: ignore[operator]
    example = getattr(model, "example_input_array", None)
    if example is not None:
        return lambda one: run_example(one, example)
    for name, child in model.named_modules():
        inputs = described_inputs(child)
        if inputs:
            return lambda one: one.get_submodule(name)(**inputs)
    raise ValueError(
        f"`tensor-plan` does not know how `{type(model).__name__}` is called. Set its `example_input_array`, or add"
        " `data` to the configuration."
    )


def first_batch(data: Any) -> Any:
    """Return the first batch of a data module."""
    data.prepare_data()
    data.setup("fit")
    return next(iter(data.train_dataloader()))


def _first_batch(data: Any) -> Any:
    """Return the first batch of a data module, of two samples or more."""
    batch = first_batch(data)
    if any(isinstance(one, Tensor) and one.dim() and one.shape[0] == 1 for one in tree_leaves(batch)):
        raise ValueError("A plan is verified with two samples or more. Use a `batch_size` of at least 2 in `data`.")
    return batch
