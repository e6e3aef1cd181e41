"""The command ``estimate``: a forecast of the memory of a run, from its configuration."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path

from lightning_zero.forecast.compare import comparison, logged_memory
from lightning_zero.forecast.report import check_picture, draw, json_of, table
from lightning_zero.lightning.estimate import estimate_memory
from lightning_zero.lightning.run_config import RunConfig
from lightning_zero.lightning.simulated_gpu import gpu_bytes

__all__ = ["estimate"]


def estimate(
    run: Path | None = None,
    module: str | None = None,
    world: int | None = None,
    *,
    data: str | None = None,
    memory: str | None = None,
    ranks_per_node: int | None = None,
    precision: str | None = None,
    only: bool = False,
    json: bool = False,
    plot: Path | None = None,
    compare: Path | None = None,
) -> None:
    """Forecast the memory of a training step per rank, for the setting of a run and others side by side.

    Nothing is trained, and no memory is taken for the model; no GPU is needed. Two steps run without values on one rank
    that pretends the others.

    Args:
        run: Configuration of a run, also ``--config``, as ``LightningCLI`` reads it: ``model``, ``data`` for the batch,
            ``optimizer``, and ``trainer`` with ``strategy`` and ``precision``.
        module: The model class that a program gives to ``LightningCLI``, where ``model`` has no ``class_path``; without
            a configuration a class or function without arguments: ``package.module:name``.
        world: Number of ranks; by default ``devices`` times ``num_nodes`` of the configuration, or 1 without one.
        data: The class of the data module, likewise.
        memory: Memory of a device, such as ``80GiB``. Names the fastest setting that fits, and prints its YAML. By it
            ``Pipeline(reduce="auto")``, ``ActivationCheckpointing(policy="auto")`` and ``Offload(fraction="auto")``
            decide, too.
        ranks_per_node: Ranks of a node, for scopes of a node; by default ``devices`` where ``world`` is not given.
        precision: Overrides that of the configuration: ``32-true``, ``64-true``, ``bf16-mixed``, ``bf16-true``,
            ``16-mixed`` or ``16-true``.
        only: Forecast the setting of the configuration alone.
        json: Print JSON, in bytes, instead of the table.
        plot: Picture to write (``.png``).
        compare: Folder of a logger of a run with ``ZeroMonitor``: prints its memory beside the forecast of the run's
            own setting.
    """
    if json and compare is not None:
        raise ValueError("`--compare` prints a table, and `--json=true` JSON. Leave one of the two out.")
    if plot is not None:
        check_picture(plot)
    logged = None if compare is None else logged_memory(compare)
    with redirect_stdout(sys.stderr):  # for what the program prints
        config = RunConfig.read("estimate", run, module=module, data=data)
        arguments = config.arguments(world=world, ranks_per_node=ranks_per_node, precision=precision)
        nbytes = gpu_bytes("memory", memory)
        forecast = estimate_memory(
            config.make,
            config.strategy,
            **arguments,
            clips=bool(config.gradient_clip_val),
            side_by_side=not only,
            memory=nbytes,
        )
    if plot is not None:
        draw(forecast, plot, nbytes)
    if json:
        print(json_of(forecast, nbytes))
        return
    print(table(forecast, nbytes))
    if logged is not None:
        print(f"\nThe forecast for {forecast.world_size} rank(s) beside the log:\n{comparison(forecast.own, logged)}")
    if nbytes is not None:
        fastest = forecast.fastest(nbytes)
        print(
            f"\nNo setting fits into {memory}: use more ranks, a smaller batch, or `Offload(params='cpu')`."
            if fastest is None
            else f"\nThe fastest setting that fits into {memory}: {fastest.setting}\n\n{forecast.yaml(fastest)}",
            end="\n" if fastest is None else "",
        )
