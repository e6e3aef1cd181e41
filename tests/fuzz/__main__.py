"""Run seeds; shrink those that differ: ``python -m tests.fuzz --seed 7 --world 2``."""

from __future__ import annotations

import argparse
import sys
import time

from tests.fuzz import programs
from tests.fuzz.runner import check, find
from tests.fuzz.shrinker import report, shrunk


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1, help="number of seeds, from --seed on")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--program", help="a file with a program as it is shown here, instead of a seed")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--show", action="store_true", help="show the program before it runs")
    parser.add_argument("--on", action="store_true", help="also what is switched off because of known defects")
    parser.add_argument("--limit-s", type=float, default=120.0, help="time for shrinking one program")
    arguments = parser.parse_args()
    if arguments.program is not None:
        with open(arguments.program) as file:
            program = programs.parse(file.read())
        difference = check(program, arguments.world)
        if difference is not None and not arguments.no_shrink:
            program, difference = shrunk(program, difference, arguments.world, arguments.limit_s)
        print(report(program, difference, arguments.world))
        return int(difference is not None)
    off = () if arguments.on else None
    seeds = range(arguments.seed, arguments.seed + arguments.count)
    if arguments.show:
        print(programs.show(programs.draw(arguments.seed, arguments.world, off)))
    start, failures = time.monotonic(), 0
    for seed, difference in find(seeds, arguments.world, off=off):
        failures += 1
        print(f"=== seed {seed}, action {difference.index}, {difference.kind}", flush=True)
        if arguments.no_shrink:
            print(difference.text[-1500:] if difference.kind == "crash" else difference.text[:600], flush=True)
        else:
            program = programs.draw(seed, arguments.world, off)
            program, small = shrunk(program, difference, arguments.world, arguments.limit_s)
            print(report(program, small, arguments.world), flush=True)
    print(f"{len(seeds)} seeds, {failures} differ, {time.monotonic() - start:.1f} s")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
