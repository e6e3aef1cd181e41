"""The command ``simulate``: a training step of one rank of any world, from the configuration of a run."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import fields
from pathlib import Path

from lightning_zero.diagnostics.rates import step_rates
from lightning_zero.forecast.clock import MachineRates
from lightning_zero.forecast.report import check_picture
from lightning_zero.forecast.simulation import draw_simulation, simulation_json, simulation_text
from lightning_zero.lightning.run_config import RunConfig
from lightning_zero.lightning.simulate import simulate_step
from lightning_zero.lightning.simulated_gpu import gpu_bytes

__all__ = ["simulate"]


def simulate(
    run: Path | None = None,
    module: str | None = None,
    world: int | None = None,
    rank: int = 0,
    *,
    data: str | None = None,
    ranks_per_node: int | None = None,
    precision: str | None = None,
    device_memory: str | None = None,
    measure: bool = False,
    tflops: float | None = None,
    tflops_fp32: float | None = None,
    memory: float | None = None,
    link: float | None = None,
    network: float | None = None,
    host: float | None = None,
    disk: float | None = None,
    latency_us: float | None = None,
    launch_us: float | None = None,
    calls: bool = True,
    json: bool = False,
    plot: Path | None = None,
) -> None:
    """Simulate a training step of one rank: its calls to other ranks in order, memory over time, a modelled time.

    Nothing is trained, and no memory is taken for the model; no GPU is needed. Three steps of the Trainer run without
    values on one rank that pretends the others. Times are modelled from rates, by default those of a node of H100.

    Args:
        run: Configuration of a run, also ``--config``, as for ``estimate``.
        module: As for ``estimate``.
        world: Number of ranks; by default ``devices`` times ``num_nodes`` of the configuration, or 1 without one.
        rank: The rank to simulate.
        data: As for ``estimate``.
        ranks_per_node: Ranks of a node; by default ``devices`` where ``world`` is not given, else 8 where they divide
            the world, or all.
        precision: Overrides that of the configuration: ``32-true``, ``64-true``, ``bf16-mixed``, ``bf16-true``,
            ``16-mixed`` or ``16-true``.
        device_memory: Memory of a GPU, such as ``80GiB``, by which ``Pipeline(reduce="auto")``,
            ``ActivationCheckpointing(policy="auto")`` and ``Offload(fraction="auto")`` decide; by default 80 GiB.
        measure: Measure rates of this machine first, in some seconds; rates that are given win.
        tflops: 10**12 operations per second of matrix products in 16 bits.
        tflops_fp32: Those of products in fp32 and fp64, as with ``32-true``.
        memory: GB per second that operations read and write on the device.
        link: GB per second that a rank sends within its node.
        network: GB per second that a rank sends to other nodes.
        host: GB per second of host memory and of copies to the device.
        disk: GB per second that a rank reads from and writes to its disks.
        latency_us: Microseconds of a collective beside its bytes.
        launch_us: Microseconds that any operation takes at least.
        calls: List the calls.
        json: Print JSON, in bytes and seconds.
        plot: Picture to write (``.png``): memory over time, and the calls.
    """
    given = {
        "tflops": tflops,
        "tflops_fp32": tflops_fp32,
        "memory": memory,
        "link": link,
        "network": network,
        "host": host,
        "disk": disk,
        "latency_us": latency_us,
        "launch_us": launch_us,
    }
    assert given.keys() == {one.name for one in fields(MachineRates)}
    set_rates = {name: value for name, value in given.items() if value is not None}
    if plot is not None:
        check_picture(plot)
    with redirect_stdout(sys.stderr):  # for what the program prints
        config = RunConfig.read("simulate", run, module=module, data=data)
        arguments = config.arguments(world=world, ranks_per_node=ranks_per_node, precision=precision)
        if config.sync_batchnorm:
            raise ValueError(
                "`sync_batchnorm: true` is not simulated yet. Leave it out, or change it for the simulation."
            )
        simulation = simulate_step(
            config.make,  # type: ignore[arg-type]
            config.strategy,
            **arguments,
            rank=rank,
            gradient_clip_val=config.gradient_clip_val,
            gradient_clip_algorithm=config.gradient_clip_algorithm,
            device_memory=gpu_bytes("device_memory", device_memory),
            rates=MachineRates(**{**(step_rates() if measure else {}), **set_rates}),
        )
    if plot is not None:
        draw_simulation(simulation, plot)
    print(simulation_json(simulation) if json else simulation_text(simulation, lists_calls=calls))
