"""A process for each stage of a simulated pipeline, forked from this one."""

from __future__ import annotations

import multiprocessing
import pickle
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import TCPStore

__all__ = ["run_stages"]

T = TypeVar("T")

_TIMEOUT = timedelta(days=1)  # of a wait for a message; a stage that has failed ends the others at once


_FORK_BEHIND_BACKWARD = "fork-based multiprocessing"  # of autograd's error, where PyTorch is built with CUDA


class _RemoteError(Exception):
    """Where another process has raised an error."""


def run_stages(number: int, run: Callable[[int, Any], T]) -> list[T]:
    """Call a function in a process for each stage, at the same time, and return the results in their order.

    Args:
        number: Of stages.
        run: Called with the stage, and with a store that all stages have. Its result must pickle.

    Raises:
        Exception: The first error of a stage.
        RuntimeError: A process was ended, the system cannot fork, or autograd cannot behind a backward of this process.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        raise RuntimeError(
            "Forecasts and simulations with `pipeline` fork a process for each stage, and this system has no fork. Make"
            " them on Linux."
        )
    context = multiprocessing.get_context("fork")
    server = TCPStore("localhost", 0, is_master=True, timeout=_TIMEOUT, wait_for_workers=False)
    ends: dict[Connection, int] = {}
    processes = []
    try:
        for stage in range(number):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_serve, args=(there, stage, server.port, run), daemon=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # this process may have threads, of which a stage uses none
                process.start()
            there.close()
            processes.append(process)
            ends[here] = stage
        return _results(ends, processes)
    finally:
        for process in processes:
            process.kill()
            process.join()
        for here in ends:
            here.close()


def _results(ends: dict[Connection, int], processes: Sequence[Any]) -> list[Any]:
    found: dict[int, Any] = {}
    waiting = dict(ends)
    while waiting:
        for here in wait(list(waiting)):
            assert isinstance(here, Connection)
            stage = waiting.pop(here)
            try:
                content, told = here.recv()
            except EOFError:
                processes[stage].join()
                raise RuntimeError(
                    f"The process that simulates pipeline stage {stage} was ended, with exit code"
                    f" {processes[stage].exitcode}: memory may be short."
                ) from None
            if told is not None:
                if _FORK_BEHIND_BACKWARD in str(content):
                    content = RuntimeError(
                        "Forecasts and simulations with `pipeline` fork a process for each stage, and in a fork of a"
                        " process that has run a backward, be it of another forecast, autograd of a PyTorch with CUDA"
                        " does not run. Make them first, or in a process of their own, with"
                        " `python -m lightning_zero estimate` or `simulate`."
                    )
                raise content from _RemoteError(f"\nIn the process of pipeline stage {stage}:\n\n{told}")
            found[stage] = content
    return [found[stage] for stage in sorted(found)]


def _serve(there: Connection, stage: int, port: int, run: Callable[[int, Any], Any]) -> None:
    """Run a stage, and send its result or its error."""
    torch.set_num_threads(1)  # those of the parent are not there
    try:
        store = TCPStore("localhost", port, is_master=False, timeout=_TIMEOUT, wait_for_workers=False)
        there.send((run(stage, store), None))
    except BaseException as error:
        there.send((_picklable(error), traceback.format_exc()))


def _picklable(error: BaseException) -> BaseException:
    """Return an error that another process can read."""
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")
