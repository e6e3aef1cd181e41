"""The command line, ``python -m lightning_zero COMMAND``: a command is a function, its signature the options."""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Sequence
from typing import Any

from jsonargparse import auto_cli

from lightning_zero.checkpoint.consolidate import consolidate
from lightning_zero.checkpoint.convert import convert
from lightning_zero.compat.deepspeed_yaml import convert_config
from lightning_zero.diagnostics.command import report
from lightning_zero.lightning.estimate_command import estimate
from lightning_zero.lightning.simulate_command import simulate
from lightning_zero.lightning.tensor_plan_command import tensor_plan
from lightning_zero.parallel.pipeline.schedule.picture import pipeline

__all__ = ["COMMANDS", "main"]

COMMANDS: dict[str, Any] = {
    "consolidate": consolidate,
    "convert": convert,
    "convert-config": convert_config,
    "estimate": estimate,
    "pipeline": pipeline,
    "report": report,
    "simulate": simulate,
    "tensor-plan": tensor_plan,
}
_HAVE_CONFIG = ("estimate", "simulate", "tensor-plan")


def main(args: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status: 0, 1 after an error, 2 (by ``SystemExit``) for arguments not known."""
    given = list(sys.argv[1:] if args is None else args)
    try:
        if given and given[0] in _HAVE_CONFIG:  # `auto_cli` has a `--config` of its own, and gives none to a command
            given = [re.sub(r"^--config(?==|$)", "--run", one) for one in given]
            _refuse_second_config(given)
        auto_cli(COMMANDS, args=given, prog="python -m lightning_zero")
    except (OSError, ValueError, TypeError, RuntimeError, pickle.UnpicklingError) as error:
        print("\n".join([f"error: {error}", *getattr(error, "__notes__", [])]), file=sys.stderr)
        return 1
    return 0


def _refuse_second_config(given: Sequence[str]) -> None:
    if sum(re.match(r"--run(=|$)", one) is not None for one in given) > 1:
        raise ValueError(
            f"`{given[0]}` reads one `--config`. Let the program merge several: `python program.py fit --config a.yaml"
            " --config b.yaml --print_config > run.yaml`."
        )


if __name__ == "__main__":
    sys.exit(main())
