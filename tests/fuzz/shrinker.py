"""Find the smallest program that still differs in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.fuzz import modules
from tests.fuzz.programs import Program, show
from tests.fuzz.runner import Difference, check

__all__ = ["report", "shrunk"]

TIMEOUT_S = 4.0  # of the engine's collectives, while it is sought
Check = Callable[[Program], Difference | None]


def shrunk(
    program: Program, difference: Difference, world: int, limit_s: float = 60.0, check_one: Check | None = None
) -> tuple[Program, Difference]:
    """Return the smallest program found within the time that differs in the same kind, and its difference."""
    run = check_one or (lambda candidate: check(candidate, world, timeout_s=TIMEOUT_S))
    deadline = time.monotonic() + limit_s
    again = True
    while again:
        again = False
        for candidate in _smaller(program, difference):
            if time.monotonic() > deadline:
                return program, difference
            found = run(candidate)
            if found is not None and found.kind == difference.kind:
                program, difference, again = candidate, found, True
                break
    return program, difference


def report(program: Program, difference: Difference | None, world: int) -> str:
    """Return what a person reads."""
    if difference is None:
        return f"no difference on {world} ranks\n{show(program)}"
    where = "set-up" if difference.index < 0 else f"action {difference.index} {program.actions[difference.index]!r}"
    return (
        f"{where}: {difference.text}\n\nPut this into a file and run"
        f" `python -m tests.fuzz --world {world} --program FILE`:\n{show(program)}"
    )


def _smaller(program: Program, difference: Difference) -> Iterator[Program]:
    """Yield programs that are smaller by one cut, the largest cuts first."""
    actions = program.actions
    if 0 <= difference.index < len(actions) - 1:
        yield replace(program, actions=actions[: difference.index + 1])
    size = len(actions) // 2
    while size:
        for start in range(0, len(actions) - 1, size):
            left = actions[:start] + actions[min(start + size, len(actions) - 1) :]
            if len(left) < len(actions):
                yield replace(program, actions=left)
        size //= 2
    yield from _simpler_options(program)
    yield from _simpler_module(program)
    yield from _simpler_optimizers(program)
    for index, (name, arguments) in enumerate(actions):
        for fewer in _simpler_arguments(name, arguments):
            yield replace(program, actions=[*actions[:index], (name, fewer), *actions[index + 1 :]])


def _simpler_options(program: Program) -> Iterator[Program]:
    options = program.options
    for key in options:
        if key != "stage":
            yield replace(program, options={other: value for other, value in options.items() if other != key})
    if options.get("prefetch", 1) > 1:
        yield replace(program, options={**options, "prefetch": options["prefetch"] - 1})
    if "optimizer" in (options.get("offload") or {}) and options["offload"] != {"optimizer": "cpu"}:
        yield replace(program, options={**options, "offload": {"optimizer": "cpu"}})
    for stage in range(options.get("stage", 0)):
        yield replace(program, options={**options, "stage": stage})


def _simpler_module(program: Program) -> Iterator[Program]:
    spec = program.module
    blocks = spec["blocks"]
    for index, (name, block) in enumerate(blocks):
        without = [*blocks[:index], *blocks[index + 1 :]]
        yield replace(program, module={**spec, "blocks": without}, actions=_without_block(program, name))
        if block["kind"] != "linear":
            yield replace(
                program,
                module={**spec, "blocks": [*blocks[:index], (name, {**block, "kind": "linear"}), *blocks[index + 1 :]]},
            )
        for key in block.keys() - {"kind"}:
            fewer = {other: value for other, value in block.items() if other != key}
            yield replace(program, module={**spec, "blocks": [*blocks[:index], (name, fewer), *blocks[index + 1 :]]})
    for key in spec.keys() & modules.PLAIN.keys() - {"blocks"}:
        yield replace(program, module={other: value for other, value in spec.items() if other != key})


def _without_block(program: Program, gone: str) -> list[Any]:
    def cut(use: Any) -> Any:
        if not use:
            return use
        if isinstance(use[0], str):
            return [name for name in use if name != gone]
        return [cut(each) for each in use]

    return [(name, {**args, "use": cut(args["use"])} if "use" in args else args) for name, args in program.actions]


def _simpler_optimizers(program: Program) -> Iterator[Program]:
    specs = program.optimizers
    plainest: list[dict[str, Any]] = [{"class": "SGD"}]
    if specs != plainest:
        yield replace(program, optimizers=plainest)
    for index, spec in enumerate(specs):
        if len(specs) > 1:
            yield replace(program, optimizers=[*specs[:index], *specs[index + 1 :]])
        for key in spec.keys() - {"class"}:
            fewer = {other: value for other, value in spec.items() if other != key}
            yield replace(program, optimizers=[*specs[:index], fewer, *specs[index + 1 :]])
        if spec["class"] != "SGD":
            simple = {other: value for other, value in spec.items() if other != "options"} | {"class": "SGD"}
            yield replace(program, optimizers=[*specs[:index], simple, *specs[index + 1 :]])
        for place, group in enumerate(spec.get("groups") or ()):
            groups = spec["groups"]
            if len(groups) > 1:
                joined = {**spec, "groups": [*groups[:place], *groups[place + 1 :]]}
                yield replace(program, optimizers=[*specs[:index], joined, *specs[index + 1 :]])
            for name in group if len(group) > 1 else ():
                kept = [[other for other in each if other != name] for each in groups]
                yield replace(program, optimizers=[*specs[:index], {**spec, "groups": kept}, *specs[index + 1 :]])


def _simpler_arguments(name: str, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for key, value in arguments.items():
        yield {other: kept for other, kept in arguments.items() if other != key}
        if isinstance(value, list) and value:
            if key == "use" and not isinstance(value[0], str):
                yield from ({**arguments, key: each} for each in value)
                for rank, each in enumerate(value):
                    for gone in each:
                        cut = [other for other in each if other != gone]
                        yield {**arguments, key: [*value[:rank], cut, *value[rank + 1 :]]}
            elif len(value) > 1 or key == "use":
                for index in range(len(value)):
                    yield {**arguments, key: [*value[:index], *value[index + 1 :]]}
    if arguments.get("look", True):
        yield {**arguments, "look": False}
