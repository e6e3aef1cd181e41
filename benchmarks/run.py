"""Measure every promise about the time of a step and print the table: ``python -m benchmarks.run [--quick]``.

About an hour on an otherwise idle machine; ``--only 10m-64tok`` picks the rows whose name contains the text.
The exit status is 1 when a bound fails.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from benchmarks.step import Comparison, measure, rows
from benchmarks.table import Row, append, heading

__all__ = ["PROMISES"]

FSDP2_BOUNDS = {512: 0.9, 64: 0.6}


def _promises() -> list[Comparison]:
    """Return every row; a bound fails when the whole 95 % interval of the ratio lies above it."""
    promises: list[Comparison] = []
    for model in ("10m", "57m"):
        for tokens, bound in FSDP2_BOUNDS.items():
            shape = Comparison(model=model, tokens=tokens, stage=3, opponent="fsdp2", bound=bound)
            promises.append(shape)
            promises += [replace(shape, stage=stage, opponent="ddp", bound=1.1) for stage in (1, 2)]
            promises += [replace(shape, stage=stage, opponent="floor", bound=1.05) for stage in range(4)]
    promises.append(Comparison(model="wide", tokens=512, stage=3, opponent="plain", bound=1.03))
    return promises


PROMISES = _promises()


def main() -> None:
    """Run the chosen rows one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny model, 3 pairs, no verdicts, nothing kept")
    parser.add_argument("--only", default="", help="text that a row's name contains, as in engine3/fsdp2 or 57m-64tok")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--no-csv", action="store_true", help="print only")
    options = parser.parse_args()
    promises = [replace(promise, pairs=options.pairs) for promise in PROMISES if options.only in promise.name]
    if not promises:
        names = ", ".join(promise.name for promise in PROMISES)
        parser.error(f"`--only {options.only}` is in the name of no row. The rows are: {names}.")
    if options.quick:
        promises = list(dict.fromkeys(replace(p, model="tiny", tokens=64, pairs=3, bound=None) for p in promises))
    print(heading(), flush=True)
    verdicts: list[str] = []
    for promise in promises:
        measured = _measured(promise)
        print(*measured, sep="\n", flush=True)
        verdicts += [row.verdict for row in measured]
        if not (options.quick or options.no_csv):
            append(measured, "step")
    raise SystemExit("FAIL" in verdicts)


def _measured(promise: Comparison) -> list[Row]:
    try:
        return rows(promise, measure(promise))
    except RuntimeError as error:
        print(f"{promise.name}: {error}")
        return [promise.row(verdict="FAIL")]


if __name__ == "__main__":
    main()
