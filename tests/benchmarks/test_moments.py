from __future__ import annotations

import pytest

from benchmarks.moments import RULES, train


def test_rules_differ_from_one_another_after_a_few_steps() -> None:
    losses = [train(rule, 1e-3, 12) for rule in RULES]  # after fewer two of them may agree in all bits
    assert len(set(losses)) == len(RULES)
    assert losses == pytest.approx([losses[0]] * len(RULES), rel=0.01)
