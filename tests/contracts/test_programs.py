"""Programs that must train exactly as under DistributedDataParallel, at every stage on two ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from lightning_zero.config import Communication, MixedPrecision
from tests import worlds
from tests.contracts.programs import gradients, optimizers, steps, weights
from tests.references import Case, TinyGPT
from tests.sampling import highest_stages, sample


def case(program: steps.Program, /, **options: Any) -> Case:
    return Case(**{"build": TinyGPT, "program": program, **options})


# Sums of squares are added in float64 by the engine, in fp32 by torch: clipped steps differ in the last bits.
_NORM = 1e-6

CASES: dict[str, Case] = {
    **{program.__name__.replace("_", "-"): case(program) for program in (
        steps.plain_loop, steps.attach_before_every_step, steps.several_backwards,
        steps.backward_twice_through_one_graph, steps.two_forwards_then_two_backwards, steps.two_losses_summed,
        steps.step_without_zero_grad, steps.zeros_instead_of_none, steps.step_with_closure, steps.step_twice,
        steps.backward_without_step, steps.gradient_penalty, steps.gradients_by_autograd_grad,
        steps.graph_built_by_backward, steps.slopes_on_one_rank,
        steps.slopes_of_leaves_at_frozen_units,
        steps.steps_inside_a_scope, steps.steps_while_a_graph_keeps_units,
        optimizers.two_optimizers_in_one_unit, optimizers.decay_by_dimensions,
        optimizers.part_of_the_parameters, optimizers.unfrozen_later,
        optimizers.unfrozen_later_in_the_optimizer, optimizers.frozen_later,
        optimizers.frozen_between_backward_and_step, optimizers.frozen_with_a_gradient_left,
        optimizers.learning_rate_schedule, optimizers.schedule_free,
        optimizers.schedule_free_in_the_wrong_mode, optimizers.methods_that_swap,
        optimizers.data_assigned_in_a_step, optimizers.lookahead, optimizers.wrapper_without_a_constructor,
        weights.clamped, weights.clamped_before_the_step, weights.state_dict_loaded,
        weights.written_by_one_rank, weights.sampled_by_one_rank, weights.validated_between,
        weights.validated_before_attach, weights.interrupted, weights.dropout,
        gradients.clipped_by_value, gradients.clipped_by_value_by_hand, gradients.edited_in_hooks,
        gradients.edited_before_the_step, gradients.dropped_before_the_step, gradients.whole_gradients_read,
    )},
    "alternating-optimizers": case(optimizers.alternating_optimizers, build=optimizers.Adversaries),
    "alternating-without-toggling": case(optimizers.alternating_without_toggling, build=optimizers.Adversaries),
    "averages-swapped": case(weights.swapped_averages(gathered=True)),
    "averages-swapped-in-the-open": case(weights.swapped_averages(gathered=False), stages=(0, 1, 2)),
    "clamped-in-the-open": case(weights.clamped_in_the_open, stages=(0, 1, 2)),
    "state-dict-loaded-in-the-open": case(weights.state_dict_loaded_in_the_open, stages=(0, 1, 2)),
    "bf16-weights-written-through-data": case(
        gradients.bf16_weights_written_through_data, stages=(0, 1, 2),
        options={"precision": MixedPrecision(compute_dtype=torch.bfloat16)},
    ),
    **{f"penalties-between-plain-steps-{bare}-{per_rank}": case(
        partial(steps.penalties_between_plain_steps, bare=bare == "bare", per_rank=per_rank == "per-rank"),
        options={"communication": Communication(prefetch=prefetch)},
    ) for bare, per_rank, prefetch in (
        ("bare", "alike", 2), ("bare", "per-rank", 1), ("explicit", "alike", 1), ("explicit", "per-rank", 2),
    )},
    "clipped-by-hand": case(gradients.clipped_by_hand, tolerance=_NORM),
    "methods-that-use-gradients": case(optimizers.methods_that_use_gradients, tolerance=_NORM),
    **{f"schedule-free-{name}": case(optimizers.schedule_free, options=options) for name, options in (
        ("offloaded", {"offload": "cpu"}), ("prefetched", {"communication": Communication(prefetch=2)}),
    )},
    "norms-logged": case(gradients.norms_logged, tolerance=_NORM),
    "norms-of-a-list": case(gradients.norms_through_parameters_to_vector, tolerance=_NORM),
}  # fmt: skip


def _check(rank: int, world: int, name: str, stages: tuple[int, ...]) -> dict[str, str]:
    return replace(CASES[name], stages=stages).check(rank, world)


@pytest.mark.parametrize(("name", "stages"), highest_stages(CASES))
def test_two_ranks_train_as_the_reference(name: str, stages: tuple[int, ...]) -> None:
    assert worlds.run(_check, 2, name, stages) == [{}, {}]


def _check_delayed(rank: int, world: int, name: str) -> dict[str, str]:
    case = replace(CASES[name], tolerance=1e-6)  # DistributedDataParallel sums in another order from 3 ranks on
    with worlds.slow_collectives(0.003 * ((rank + 1) % world), seed=rank):
        return case.check(rank, world)


@pytest.mark.parametrize(
    "name",
    sample(["plain-loop", "several-backwards", "validated-between", "clamped", "gradient-penalty"], "clamped"),
)
def test_three_ranks_of_different_speed_train_as_the_reference(name: str) -> None:
    assert worlds.run(_check_delayed, 3, name) == [{}] * 3


@pytest.mark.parametrize(
    "name", ["plain-loop", "clipped-by-hand", "edited-before-the-step", "clamped", "unfrozen-later"]
)
def test_one_rank_trains_as_the_reference(name: str) -> None:
    assert worlds.run(_check, 1, name, CASES[name].stages) == [{}]
