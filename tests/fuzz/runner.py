"""Run programs on both sides, action by action, and say where they differ."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests import worlds
from tests.fuzz import programs
from tests.fuzz.actions import ACTIONS, make_optimizers
from tests.fuzz.programs import Program
from tests.fuzz.sides import TIMEOUT_S, Plain, Sharded, Side

__all__ = ["Difference", "check", "find"]

Mutant = Callable[[], AbstractContextManager[None]]
# Relative to the largest value of a kind (of all parameters, of all gradients, ...). The reference adds in the engine's
# order, so what is left is rounding of float32: of averages that several backwards add up, of norms, of clip factors.
TOLERANCE = 1e-6
TOLERANCE_FP64 = 1e-12  # where nothing is rounded to float32
# A program that amplifies rounding (Adam behind a clip, batch norm of few values) differs by more in float32. What is
# below this, and agrees in float64 within the bound above, is that.
AMPLIFIED = 1e-4
_LEAST = {
    "result": 1.0,
    "grad": 0.1,
}  # losses are sums of larger values; gradients may be clipped to less than they were


@dataclass(frozen=True)
class Difference:
    """Where the two sides differ.

    Args:
        index: Of the action; -1 for the set-up.
        kind: What differs ("loss", "param", "grad", "buffer", an exception's class, "crash"): shrinking keeps it.
        text: What a person reads.
    """

    index: int
    kind: str
    text: str


def check(
    program: Program, world: int, *, mutant: Mutant = nullcontext, timeout_s: float = TIMEOUT_S
) -> Difference | None:
    """Run one program in a world of ranks; return the first difference."""
    return _run([program], world, mutant, timeout_s)[0]


def find(
    seeds: Sequence[int],
    world: int,
    *,
    off: Collection[str] | None = None,
    mutant: Mutant = nullcontext,
    chunk: int = 20,
) -> Iterator[tuple[int, Difference]]:
    """Run the programs of ``seeds``, ``chunk`` of them in a call of a world, and yield those that differ."""
    for start in range(0, len(seeds), chunk):
        some = seeds[start : start + chunk]
        drawn = [programs.draw(seed, world, off) for seed in some]
        for seed, program, difference in zip(some, drawn, _run(drawn, world, mutant), strict=True):
            if difference is not None and not _is_rounding(program, world, mutant):
                yield seed, difference


def _is_rounding(program: Program, world: int, mutant: Mutant) -> bool:
    """Say whether a difference is rounding that the program amplifies: it is small, and not there in float64."""
    options = dict(program.options)
    if isinstance(options.get("offload"), dict):  # no step on a disk is in float64
        options["offload"] = {name: "cpu" if to == "nvme" else to for name, to in options["offload"].items()}
    in_double = replace(program, module={**program.module, "dtype": "fp64"}, options=options)
    is_small = _run([program], world, mutant, tolerance=AMPLIFIED) == [None]
    return is_small and program.module.get("dtype") != "fp64" and _run([in_double], world, mutant) == [None]


def _run(
    drawn: Sequence[Program],
    world: int,
    mutant: Mutant,
    timeout_s: float = TIMEOUT_S,
    tolerance: float = TOLERANCE,
) -> list[Difference | None]:
    try:
        found: list[Difference | None] = worlds.run(
            _in_rank, world, drawn, mutant, timeout_s, tolerance, timeout_s=60.0 + 5.0 * len(drawn)
        )[0]
        return found
    except Exception as error:  # a rank died, or hangs
        if len(drawn) == 1:
            text = "".join(traceback.format_exception(error))
            return [Difference(-1, "crash", text[-4000:])]
    return [_run([program], world, mutant, timeout_s, tolerance)[0] for program in drawn]


# -- In a rank ---------------------------------------------------------------------------------------------------------


def _in_rank(
    rank: int, world: int, drawn: Sequence[Program], mutant: Mutant, timeout_s: float, tolerance: float
) -> list[Difference | None]:
    group = dist.new_group(timeout=timedelta(seconds=6 * timeout_s))
    with mutant(), tempfile.TemporaryDirectory() as folder:
        return [_compare(program, group, folder, timeout_s, tolerance) for program in drawn]


def _compare(
    program: Program, group: dist.ProcessGroup, folder: str, timeout_s: float, tolerance: float
) -> Difference | None:
    plain = Plain(program.module, program.options, group)
    sharded: Sharded | None = None
    try:
        plain.attach(make_optimizers(plain, program.optimizers))
        found: tuple[str, str] | None = None
        try:
            sharded = Sharded(program.module, program.options, group, folder, timeout_s)
            sharded.attach(make_optimizers(sharded, program.optimizers))
        except Exception as error:
            found = _raised(error)
        kind_text = _agreed(found, group)
        if kind_text is not None or sharded is None:
            return Difference(-1, *(kind_text or ("", "")))
        for index, (name, arguments) in enumerate(program.actions):
            is_over, found = _act(
                plain, sharded, name, dict(arguments), program, tolerance, is_waiting=_waits(program, index)
            )
            kind_text = _agreed(found, group)
            if kind_text is not None:
                return Difference(index, *kind_text)
            if is_over:
                return None
        return None
    finally:
        if sharded is not None:
            _close(sharded)


def _close(sharded: Sharded) -> None:
    with suppress(Exception):  # what went wrong was told
        sharded.close()


def _waits(program: Program, index: int) -> bool:
    """Say whether micro-batches wait for their last one behind an action."""
    waits = False
    for name, arguments in program.actions[: index + 1]:
        if name == "backward":
            waits = not arguments.get("last", True)
        elif name in ("fail", "closure"):
            waits = False
    return waits


def _act(
    plain: Plain,
    sharded: Sharded,
    name: str,
    arguments: dict[str, Any],
    program: Program,
    tolerance: float,
    *,
    is_waiting: bool,
) -> tuple[bool, tuple[str, str] | None]:
    """Run an action on both sides; return whether the program ends here, and what differs."""
    look = arguments.pop("look", True)
    outcomes: list[Any] = []
    for side in (plain, sharded):
        torch.default_generator.manual_seed(10 * len(arguments) + plain.rank)
        try:
            outcomes.append(ACTIONS[name](side, **arguments))
        except Exception as error:
            outcomes.append(error)
    expected, actual = outcomes
    if isinstance(expected, Exception) and isinstance(actual, Exception) and type(expected) is type(actual):
        return True, None
    if isinstance(actual, Exception):
        return True, _raised(actual)
    if isinstance(expected, Exception):
        return True, (f"no {type(expected).__name__}", f"only the reference raised: {_text(expected)}")
    tolerance = min(tolerance, TOLERANCE_FP64) if _is_exact(program) else tolerance
    found = _differs("result", list(zip(map(str, range(len(expected))), actual, expected, strict=True)), tolerance)
    if found is None and look:
        reads_grads = not is_waiting and program.options.get("step") != "backward"
        try:
            found = _look(plain, sharded, tolerance, reads_grads)
        except Exception as error:
            found = _raised(error, "while it was looked at: ")
    return False, found


def _is_exact(program: Program) -> bool:
    """Say whether nothing is rounded to float32."""
    is_fp64 = program.module.get("dtype") == "fp64"
    clips = any(name == "clip_norm" for name, _ in program.actions)
    return is_fp64 and not clips and "reduce_dtype" not in program.options


def _look(plain: Plain, sharded: Sharded, tolerance: float, reads_grads: bool) -> tuple[str, str] | None:
    pairs = {"param": _values(plain, sharded, "full_param")}
    if reads_grads:
        pairs["grad"] = _values(plain, sharded, "full_grad")
    if plain.rank == 0:  # the others get rank 0's in the next forward of the root
        theirs = dict(plain.module.named_buffers())
        pairs["buffer"] = [(name, buffer, theirs[name]) for name, buffer in sharded.module.named_buffers()]
    for kind, each in pairs.items():
        found = _differs(kind, each, tolerance)
        if found is not None:
            return found
    return None


def _values(plain: Plain, sharded: Sharded, method: str) -> list[tuple[str, Any, Any]]:
    sides: tuple[Side, Side] = (sharded, plain)
    return [(name, *(getattr(side, method)(side.params[name]) for side in sides)) for name in plain.params]


def _differs(kind: str, pairs: Sequence[tuple[str, Any, Any]], tolerance: float) -> tuple[str, str] | None:
    scale = _LEAST.get(kind, 0.0)
    for _, _, expected in pairs:
        if isinstance(expected, Tensor) and expected.numel():
            scale = max(scale, expected.double().nan_to_num(0.0, 0.0, 0.0).abs().max().item())
    texts = [
        f"{kind} {name}: {text}"
        for name, actual, expected in pairs
        if (text := _unlike(actual, expected, tolerance, scale))
    ]
    return (kind, "\n".join(texts[:4])) if texts else None


def _unlike(actual: Any, expected: Any, tolerance: float, scale: float) -> str:
    if not isinstance(actual, Tensor) or not isinstance(expected, Tensor):
        same = actual is expected or (
            not isinstance(actual, Tensor) and not isinstance(expected, Tensor) and actual == expected
        )
        return "" if same else f"{_short(actual)} instead of {_short(expected)}"
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    if not actual.numel() or torch.equal(actual, expected):
        return ""
    bound = (tolerance if actual.dtype == torch.float64 else max(tolerance, TOLERANCE)) * scale
    actual, expected = actual.double(), expected.double()
    if torch.equal(actual.isnan(), expected.isnan()):
        actual, expected = actual.nan_to_num(), expected.nan_to_num()
    distance = (actual - expected).abs().max().item()
    if distance <= bound:
        return ""
    return f"differs by {distance:.3g}: {_short(actual)} instead of {_short(expected)}"


def _short(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    flat = [f"{element:.7g}" for element in value.double().reshape(-1)[:6].tolist()]
    return "[" + ", ".join(flat) + (", ..." if value.numel() > 6 else "") + "]"


def _raised(error: Exception, where: str = "") -> tuple[str, str]:
    frames = traceback.extract_tb(error.__traceback__)
    last = next((f for f in reversed(frames) if "lightning_zero" in f.filename), frames[-1])
    place = f"{last.filename.rpartition('/')[2]}:{last.name}"
    return f"{type(error).__name__} in {place}", f"{where}only the engine raised: {_text(error)}"


def _text(error: Exception) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "torch" not in f.filename][-8:]
    places = [f"  {frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}: {frame.line}" for frame in frames]
    return "\n".join([f"{type(error).__name__}: {str(error)[:600]}", *places])


def _agreed(found: tuple[str, str] | None, group: dist.ProcessGroup) -> tuple[str, str] | None:
    """Return the difference of the first rank that has one on every rank. Collective."""
    flag = torch.tensor([float(found is not None)])
    dist.all_reduce(flag, group=group)
    if not flag:
        return None
    gathered: list[tuple[str, str] | None] = [None] * group.size()
    dist.all_gather_object(gathered, found, group=group)
    mine = [(rank, each) for rank, each in enumerate(gathered) if each is not None]
    real = [pair for pair in mine if not pair[1][0].startswith("CollectiveError")] or mine  # the others waited for it
    rank, (kind, text) = real[0]
    return kind, f"rank {rank}: {text}"
