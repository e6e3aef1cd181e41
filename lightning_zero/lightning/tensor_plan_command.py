"""The command ``tensor-plan``: the plan of a model, its cut fraction and its check, without a GPU and without ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lightning_zero.lightning.first_batch import step_arguments
from lightning_zero.lightning.forecast_options import BUILDING_HOOKS, told_steps
from lightning_zero.lightning.run_sections import RunSections
from lightning_zero.parallel.tensor.blocks import Call
from lightning_zero.parallel.tensor.examples import described_inputs, run_example
from lightning_zero.parallel.tensor.plan import TensorParallel
from lightning_zero.parallel.tensor.planning import plan_model
from lightning_zero.trees import tree_leaves

__all__ = ["tensor_plan"]


def tensor_plan(
    run: Path | None = None,
    module: str | None = None,
    *,
    data: str | None = None,
    size: int | None = None,
    plan: Literal["auto", "model"] | None = None,
) -> None:
    """Show the plan of tensor parallelism of a model, the fraction of it that is cut, and the check of every block.

    The model runs once, without values, on the first batch of the configuration's ``data``, on its own
    ``example_input_array``, or on inputs in the form that a Hugging Face model describes.

    Args:
        run: Configuration of a run, also ``--config``, as ``LightningCLI`` reads it: ``model`` and ``data``, and
            ``tensor_parallel`` among the options of the strategy.
        module: The model class that a program gives to ``LightningCLI``, where ``model`` has no ``class_path``; without
            a configuration a class or function without arguments: ``package.module:name``.
        data: Likewise, the class of the data module.
        size: Number of ranks; overrides the configuration.
        plan: Where the plan comes from; overrides the configuration.
    """
    sections = RunSections.read("tensor-plan", run, module=module, data=data)
    options = _options(sections.section("trainer").get("strategy"), size, plan)
    model = _model(sections.model())
    print("\n".join(plan_model(model, options, _call(model, sections.batch())).lines()))


def _options(strategy: Any, size: int | None, plan: Literal["auto", "model"] | None) -> TensorParallel:
    """Return the options of the configuration's strategy with those of the command line."""
    given = strategy.get("init_args") if isinstance(strategy, Mapping) else None  # not of a name
    options = TensorParallel.of((given or {}).get("tensor_parallel")) or TensorParallel()
    changes: dict[str, Any] = {"size": size, "plan": plan}
    return replace(options, **{name: value for name, value in changes.items() if value is not None})


# -- The model ---------------------------------------------------------------------------------------------------------


def _model(make: Callable[[], nn.Module]) -> nn.Module:
    """Build the model without values of its parameters, or with them if it asks for values while it is built."""
    try:
        with _without_values():
            model = _built(make)
    except (RuntimeError, NotImplementedError):
        model = _built(make)
    return model.train()


def _built(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a model behind the hooks in which it may be built.

    Raises:
        ValueError: One of them needs more of a Trainer than numbers of steps.
    """
    model = make()
    if not isinstance(model, pl.LightningModule):
        return model
    with told_steps(model):
        for name, given in BUILDING_HOOKS.items():
            try:
                if is_overridden(name, model):
                    getattr(model, name)(**given)
            except (RuntimeError, NotImplementedError):
                raise
            except Exception as error:
                raise ValueError(
                    f"`tensor-plan` runs `{name}` without a Trainer, and it failed ({type(error).__name__}: {error})."
                    " Name a function that builds the model: `--module=package.module:name`."
                ) from error
    return model


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


def _call(model: nn.Module, batch: Any) -> Call:
    """Return a function that runs the model, or a copy of it, on a batch of the data module if there is one."""
    if batch is not None:
        _check_samples(batch)
        return lambda one: one.training_step(*step_arguments(one.training_step, batch))  # type: ignore[operator, arg-type]
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


def _check_samples(batch: Any) -> None:
    if any(isinstance(one, Tensor) and one.dim() and one.shape[0] == 1 for one in tree_leaves(batch)):
        raise ValueError("A plan is verified with two samples or more. Use a `batch_size` of at least 2 in `data`.")
