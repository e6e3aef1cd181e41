"""Reads of attributes with numbers."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_zero.parallel.pipeline.tracing.sent_numbers import NumberReads


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0


def test_reads_are_told_while_a_module_is_watched_and_its_class_is_made_once() -> None:
    reads, told, classes = NumberReads(), list[Any](), set[type]()
    module = _Scaled()
    for _ in range(3):
        with reads.watched([module], lambda _, name, value: told.append((name, value))):
            classes.add(type(module))
            assert module.scale == 2.0
        assert type(module) is _Scaled
        assert module.scale == 2.0
    assert told == [("scale", 2.0)] * 3
    assert len(classes) == 1  # each would hold the tensors of the micro-batch for which it was made
