"""The loss scales of a buffer's gradients."""

from __future__ import annotations

from lightning_zero.engine.buffers.loss_scales import LossScales


def test_a_gradient_has_the_scale_of_its_backward_until_it_is_divided() -> None:
    scales = LossScales()
    scales.begin(64.0)
    scales.note([0, 1])
    assert [scales.of(slot, assigned=2.0) for slot in (0, 1, 2)] == [64.0, 64.0, 2.0]
    scales.unscaled([0], overflow=False)
    scales.unscaled([1], overflow=True)
    assert [scales.of(slot, assigned=2.0) for slot in (0, 1)] == [1.0, 1.0]
    assert [scales.has_overflowed(slot) for slot in (0, 1)] == [False, True]
    scales.forget([1])
    assert scales.of(1, assigned=2.0) == 2.0
    assert not scales.has_overflowed(1)


def test_earlier_gradients_are_brought_to_the_scale_of_a_backward_once() -> None:
    scales = LossScales()
    scales.begin(64.0)
    scales.note([0, 1])
    scales.unscaled([0], overflow=False)
    scales.begin(128.0)
    assert scales.changes([0, 1, 2]) == {128.0: {0}, 2.0: {1}}
    assert scales.changes([0, 1, 2]) == {}
    assert [scales.of(slot, assigned=1.0) for slot in (0, 1)] == [128.0, 128.0]


def test_a_sum_with_a_gradient_of_no_known_scale_has_none() -> None:
    scales = LossScales()
    for first, second in ((64.0, None), (None, 64.0)):
        scales.forget([0])
        for scale in (first, second):
            scales.begin(scale)
            assert scales.changes([0]) == {}
            scales.note([0])
        assert scales.of(0, assigned=1.0) is None
