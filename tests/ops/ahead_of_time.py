"""Compile Triton kernels for GPUs that are not here, and read the reports.

The only file that touches Triton's internals; checked with 3.6 and 3.9.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Compilation", "Report", "assert_lean", "build", "mend_interpreter"]

VECTOR_BITS = 128
_ARITHMETIC = re.compile(r"\b(?:add|sub|mul|fma|mad|div|rcp|sqrt|rsqrt)\.(?:\w+\.)*f32\b")
_EXACT = frozenset(f"{operation}.rn.f32" for operation in ("add", "sub", "mul", "div", "sqrt"))


@dataclass(frozen=True)
class Compilation:
    """A kernel, the types of its arguments and the values of its constants.

    Args:
        kernel: What ``jit`` returned.
        types: Triton's type of every argument that is no constant: ``"*fp32"``, ``"i64"``, ``"fp32"``.
        constants: Values of the ``tl.constexpr`` arguments; an argument of value None is a constant too.
        num_warps: As the launcher passes it.
        num_stages: As the launcher passes it.
        enable_fp_fusion: As the launcher passes it.
    """

    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    enable_fp_fusion: bool = True


@dataclass(frozen=True)
class Report:
    """What the assembler says of a kernel.

    Args:
        capability: 80, 90, 100 or 120.
        registers: Registers per thread.
        spilled_bytes: Bytes of stack and local memory per thread.
        loads: Loads from global memory by width in bits.
        stores: Stores to global memory by width in bits.
        tensor_core_instructions: Number of HMMA, HGMMA, IMMA and IGMMA instructions.
        inexact: Operations in fp32 that do not round once, to the nearest: contracted or approximate ones.
    """

    capability: int
    registers: int
    spilled_bytes: int
    loads: Mapping[int, int]
    stores: Mapping[int, int]
    tensor_core_instructions: int
    inexact: frozenset[str]


def build(case: Compilation, capability: int) -> Report:
    """Compile a kernel and read its report.

    Pointers and sizes count as multiples of 16, as Triton finds them to be at a launch on aligned tensors.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    signature = {name: "constexpr" if name in case.constants else case.types[name] for name in names}
    aligned = {
        (position,): [["tt.divisibility", 16]]
        for position, name in enumerate(names)
        if signature[name].startswith("*") or signature[name] in ("i32", "i64")
    }
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=dict(case.constants), attrs=aligned)
    options = {
        "num_warps": case.num_warps, "num_stages": case.num_stages, "enable_fp_fusion": case.enable_fp_fusion,
    }  # fmt: skip
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm
    binary = made["cubin"]
    usage, code = _dump(binary, "--dump-resource-usage"), _dump(binary, "--dump-sass")
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found is not None, usage
    return Report(
        capability=capability,
        registers=int(found[1]),
        spilled_bytes=int(found[2]) + int(found[3]),
        loads=_widths(code, "LDG|LDGSTS"),
        stores=_widths(code, "STG"),
        tensor_core_instructions=len(re.findall(r"\b(?:HMMA|HGMMA|IMMA|IGMMA)\b", code)),
        inexact=frozenset(re.findall(_ARITHMETIC, made["ptx"])) - _EXACT,
    )


def _dump(binary: bytes, option: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        return subprocess.run([tool, option, file.name], check=True, capture_output=True, text=True).stdout


def _widths(code: str, instructions: str) -> dict[int, int]:
    """Count instructions by the bits that they move."""
    widths: dict[int, int] = {}
    for modifiers in re.findall(rf"\b(?:{instructions})\b((?:\.[A-Z0-9_]+)*)", code):
        named = [int(size) for size in re.findall(r"\.[US]?(8|16|64|128)\b", modifiers)]
        width = max(named, default=32)
        widths[width] = widths.get(width, 0) + 1
    return widths


def mend_interpreter() -> None:
    """Let an argument bound a loop in the interpreter of Triton 3.6, which NumPy 2.4 does not allow there."""
    import triton
    from triton.runtime import interpreter

    if not triton.__version__.startswith("3.6."):
        return
    patch = interpreter._patch_lang_tensor

    def mended(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = mended


def assert_lean(
    report: Report | str, *, is_elementwise: bool = True, scalar_loads: int = 0, multiplies: bool = False
) -> None:
    """Assert what every kernel promises.

    Args:
        report: What ``build`` returned.
        is_elementwise: Every load but ``scalar_loads`` moves 128 bits.
        scalar_loads: Loads of single values (scales, counters).
        multiplies: The kernel multiplies matrices, so it must use tensor cores.
    """
    assert isinstance(report, Report), report
    assert report.spilled_bytes == 0, report
    if is_elementwise:
        assert report.loads.get(VECTOR_BITS, 0) > 0, report
        assert sum(count for width, count in report.loads.items() if width < VECTOR_BITS) <= scalar_loads, report
    if multiplies:
        assert report.tensor_core_instructions > 0, report
