"""Infinities, NaN and zeros with a sign: every kernel does with them what its twin for CPUs does.

Those of the cross-entropy, whose rows and labels have cases of their own, are in ``test_cross_entropy.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero_ops import adamw, adamw_int8, flat, gated, lion, norms, permute, quantize, rotary, rounding, sgd
from tests.ops.accuracy import assert_same_specials, specials
from tests.ops.processes import interpreted

NUMEL = 1000
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INF, NAN = float("inf"), float("nan")


def _norm(is_centred: bool) -> None:
    """Rows with one special value each, of zeros, of a constant; epsilon of zero; special gains and gradients."""
    for dtype, eps, hidden in itertools.product(DTYPES.values(), (1e-5, 0.0), (63, 8193)):
        x, grad = torch.randn(2, 9, hidden)
        for row, value in enumerate((0.0, INF, -INF, NAN)):
            x[row, 7] = value
            grad[4 + row % 2, row] = value
        x[6], x[7] = 0.0, 3.0
        for weight in (torch.ones(hidden), specials(hidden + 126)[63:-63]):
            args = (x.to(dtype), weight.to(dtype))
            expected = norms._reference(*args, None, eps, 0.0, is_centred)
            saved = (grad.to(dtype), *args, *expected[1:], 0.0, is_centred)
            assert_same_specials(norms._launch(*args, None, eps, 0.0, is_centred), expected)
            assert_same_specials(norms._launch_backward(*saved), norms._backward_reference(*saved))


def _gated(activation: str) -> None:
    for dtype in DTYPES.values():
        gate, up, grad = (specials(NUMEL, dtype) for _ in range(3))
        gate[:4] = torch.tensor([1e4, -1e4, 60.0, -60.0])
        args = (gate, up, activation)
        assert_same_specials([gated._launch(*args)], [gated._reference(*args)])
        assert_same_specials(gated._launch_backward(grad, *args), gated._backward_reference(grad, *args))


def _rotary() -> None:
    for dtype in DTYPES.values():
        x, cos = specials(NUMEL, dtype).view(1, 5, 20, 10), specials(200, dtype).view(1, 20, 10)
        assert_same_specials([rotary._launch(x, cos, cos + 1)], [rotary._reference(x, cos, cos + 1)])


def _permute() -> None:
    for dtype in DTYPES.values():
        slots = torch.randperm(40)
        rows = torch.empty(40, dtype=torch.int64)
        rows[slots] = torch.arange(40)
        slots[rows[:5]] = -1
        rows[:5] = -1
        index = (slots, rows.view(20, 2))
        x, y, weights = specials(NUMEL, dtype).view(20, 50), specials(2 * NUMEL, dtype).view(40, 50), torch.rand(20, 2)
        assert_same_specials([permute._launch_permute(x, *index)], [permute._permute_reference(x, *index)])
        for given in (None, weights):
            found, expected = (
                permute._launch_unpermute(y, given, *index),
                permute._unpermute_reference(y, given, *index),
            )
            assert_same_specials([found], [expected])
        saved = (x, y, weights, *index)
        assert_same_specials(permute._launch_unpermute_backward(*saved), permute._unpermute_backward_reference(*saved))


def _quantize(bits: int) -> None:
    x = specials(NUMEL)
    codes, scales = found = quantize._launch_quantize(x, bits, 64)
    assert_same_specials(found, quantize._quantize_reference(x, bits, 64))
    args = (codes.unsqueeze(0), scales.unsqueeze(0), NUMEL, bits, 64, 1.0, torch.float32)
    assert_same_specials([quantize._launch_dequantize_reduce(*args)], [quantize._dequantize_reduce_reference(*args)])


def _flat() -> None:
    for dtype in DTYPES.values():
        grad, total = specials(NUMEL, dtype), specials(NUMEL)
        for factors in ((1.0, 1.0), (0.5, 0.0), (0.5, 2.0)):
            _in_place(flat._launch_accumulate, flat._accumulate_reference, total, grad, *factors)
        for limit in (0.5, INF, 0.0):
            _in_place(flat._launch_clip_value, flat._clip_value_reference, grad, limit)
        assert_same_specials(flat._launch_sq_norm_and_finite(grad), flat._sq_norm_and_finite_reference(grad))
        assert_same_specials([flat._launch_sq_norm(grad)], [flat._sq_norm_reference(grad)])


def _rounding() -> None:
    x = specials(NUMEL)
    assert_same_specials([rounding._launch(x, 5)], [rounding._reference(x, 5)])


def _adamw() -> None:
    states = (specials(NUMEL), specials(NUMEL), specials(NUMEL).square(), torch.zeros(NUMEL).bfloat16())
    for factor in (None, torch.tensor(NAN), torch.tensor(0.0)):
        for decays in ((0.1, 0.0), (0.0, 0.1)):
            args = (*states, specials(NUMEL), factor, 3, 0.01, 0.9, 0.999, 1e-8, *decays, ())
            _in_place(adamw._launch, adamw.pytorch_step_, *args)


def _adamw_int8() -> None:
    moments = (*adamw_int8.encode_exp_avg(specials(NUMEL)), *adamw_int8.encode_exp_avg_sq(specials(NUMEL).square()))
    args = (specials(NUMEL), *moments, None, specials(NUMEL), None, 3, 0.01, 0.9, 0.999, 1e-8, 0.1, 0.0)
    _in_place(adamw_int8._launch, adamw_int8.pytorch_step_, *args)


def _lion() -> None:
    args = (specials(NUMEL), specials(NUMEL), None, specials(NUMEL), None, 0.01, 0.9, 0.99, 0.1)
    _in_place(lion._launch, lion._reference, *args)


def _sgd() -> None:
    for weight_decay in (0.1, 0.0):
        args = (specials(NUMEL), specials(NUMEL), None, specials(NUMEL), None, 2, 0.1, 0.9, 0.5, weight_decay, False)
        _in_place(sgd._launch, sgd.pytorch_step_, *args, ())


def _in_place(launch: Callable[..., Any], reference: Callable[..., Any], *args: Any) -> None:
    """Compare what the two leave in copies of the tensors; the twin's are on a CPU, also where kernels run on a GPU."""
    mine = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
    theirs = [arg.cpu().clone() if isinstance(arg, Tensor) else arg for arg in args]
    launch(*mine)
    with torch.device("cpu"):
        reference(*theirs)
    assert_same_specials(*([arg for arg in copies if isinstance(arg, Tensor)] for copies in (mine, theirs)))


INTERPRETED: dict[str, Callable[[], None]] = {
    "rms_norm": partial(_norm, False),
    "layer_norm": partial(_norm, True),
    **{activation: partial(_gated, activation) for activation in ("silu", "gelu", "gelu_tanh")},
    "rotary": _rotary,
    "permute": _permute,
    "quantize-8": partial(_quantize, 8),
    "quantize-4": partial(_quantize, 4),
    "flat": _flat,
    "rounding": _rounding,
    "adamw": _adamw,
    "adamw-int8": _adamw_int8,
    "lion": _lion,
    "sgd": _sgd,
}


@pytest.mark.parametrize("case", INTERPRETED)
def test_special_values_of_a_kernel_are_those_of_its_twin(case: str) -> None:
    assert interpreted(__name__, case) == ""
