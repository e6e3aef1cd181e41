"""Checks of Triton kernels without a GPU: in the interpreter, and compiled ahead of time.

``TRITON_INTERPRET`` is read when a kernel is decorated, so each kind runs in a process of its own, one per session. A
test file lists its cases under names, and asks for what came of one of them::

    INTERPRETED = {"fp32": partial(_compare, torch.float32)}  # calls the launcher, compares with the reference
    COMPILED = {"fp32": Compilation(ops._scale_kernel, {"x": "*fp32", "numel": "i64"}, {"BLOCK": 1024})}

    @pytest.mark.parametrize("case", INTERPRETED)
    def test_kernel_is_its_reference_in_the_interpreter(case):
        assert interpreted(__name__, case) == ""

    @pytest.mark.parametrize("capability", sample(CAPABILITIES, 80, 90))
    @pytest.mark.parametrize("case", sample(COMPILED, "fp32"))  # compiling takes seconds: the others are slow
    def test_kernel_compiles_without_spills(case, capability):
        assert_lean(compiled(__name__, case, capability))

``tests/ops/test_registry.py`` sees to it that no kernel is left out of either list.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import traceback
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.ops.ahead_of_time import Report

__all__ = ["CAPABILITIES", "compiled", "interpreted"]

CAPABILITIES = (80, 90, 100, 120)


def interpreted(module: str, case: str) -> str:
    """Run a case of ``INTERPRETED`` of a test file in Triton's interpreter; return an error text, or ""."""
    return _process(interpret=True).submit(_run_case, module, case).result()


def compiled(module: str, case: str, capability: int) -> Report | str:
    """Compile a case of ``COMPILED`` of a test file; return the report, or an error text."""
    return _process(interpret=False).submit(_compile_case, module, case, capability).result()


@cache
def _process(*, interpret: bool) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=context, initializer=_begin, initargs=(interpret,))


def _begin(interpret: bool) -> None:
    """Set the switch before anything imports Triton."""
    os.environ["TRITON_INTERPRET"] = "1" if interpret else "0"
    if interpret:
        from tests.ops.ahead_of_time import mend_interpreter

        mend_interpreter()


def _run_case(module: str, case: str) -> str:
    from tests import worlds

    worlds.seed()
    try:
        with worlds.poisoned_memory():
            importlib.import_module(module).INTERPRETED[case]()
    except Exception:  # whatever a kernel raises is the answer
        return traceback.format_exc()
    return ""


def _compile_case(module: str, case: str, capability: int) -> Report | str:
    from tests.ops.ahead_of_time import build

    try:
        return build(importlib.import_module(module).COMPILED[case], capability)
    except Exception:  # whatever the compiler raises is the answer
        return traceback.format_exc()
