"""Every source file has tests: in the file that mirrors it, or in the contract that promises its behaviour."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.always

ROOT = Path(__file__).parents[2]

# Files whose behaviour shows only together with others, in whole steps or fits, and the contract that has it.
IN_CONTRACTS = {
    "lightning_zero/blocks.py": "tests/engine/units/test_partition.py",
    "lightning_zero/checkpoint/flat.py": "tests/checkpoint/test_directory.py",
    "lightning_zero/checkpoint/placeholders.py": "tests/checkpoint/test_state.py",
    "lightning_zero/checkpoint/weightfiles.py": "tests/checkpoint/test_pretrained.py",
    "lightning_zero/sharding.py": "tests/contracts/test_scopes.py",
    "lightning_zero/engine/access/gathered.py": "tests/contracts/test_between_steps.py",
    "lightning_zero/engine/access/records.py": "tests/checkpoint/test_state.py",
    "lightning_zero/engine/access/statistics.py": "tests/contracts/test_memory_formula.py",
    "lightning_zero/engine/buffers/aliases.py": "tests/contracts/test_quantised_weights.py",
    "lightning_zero/engine/buffers/disk_home.py": "tests/contracts/test_nvme.py",
    "lightning_zero/engine/buffers/disk_parameter.py": "tests/storage/test_metadata.py",
    "lightning_zero/engine/buffers/update.py": "tests/contracts/test_offload.py",
    "lightning_zero/engine/buffers/group.py": "tests/engine/units/test_grid_groups.py",
    "lightning_zero/engine/buffers/local_sums.py": "tests/engine/buffers/test_gradients.py",
    "lightning_zero/engine/buffers/node_sums.py": "tests/contracts/test_scopes.py",
    "lightning_zero/engine/buffers/spec.py": "tests/engine/buffers/test_buffer.py",
    "lightning_zero/engine/buffers/sharded_state.py": "tests/contracts/test_optimizer_states_of_segments.py",
    "lightning_zero/engine/buffers/stepped.py": "tests/engine/buffers/test_buffer.py",
    "lightning_zero/engine/buffers/whole.py": "tests/engine/buffers/test_buffer.py",
    "lightning_zero/engine/optim/step_window.py": "tests/engine/optim/test_optimizer.py",
    "lightning_zero/engine/optim/whole_gradients.py": "tests/engine/optim/test_optimizer.py",
    "lightning_zero/engine/optim/optimizer_in_backward.py": "tests/engine/runtime/test_step_in_backward.py",
    "lightning_zero/engine/optim/segment_states.py": "tests/engine/optim/test_optimizer.py",
    "lightning_zero/engine/optim/optimizer_checks.py": "tests/engine/optim/test_optimizer.py",
    "lightning_zero/engine/optim/deferred_steps.py": "tests/contracts/test_offload.py",
    "lightning_zero/engine/optim/methods.py": "tests/contracts/test_schedule_free.py",
    "lightning_zero/engine/optim/int8_moments.py": "tests/engine/optim/test_moments.py",
    "lightning_zero/engine/optim/step_rules.py": "tests/engine/optim/test_flat_step.py",
    "lightning_zero/engine/optim/streamed.py": "tests/contracts/test_simulated_device.py",
    "lightning_zero/engine/runtime/step_timing.py": "tests/engine/runtime/test_step_in_backward.py",
    "lightning_zero/engine/units/facts.py": "tests/contracts/test_ranks_differ.py",
    "lightning_zero/engine/units/pipeline_peers.py": "tests/contracts/test_pipeline_parity.py",
    "lightning_zero/engine/units/placement.py": "tests/contracts/test_offload.py",
    "lightning_zero/engine/units/remote_params.py": "tests/contracts/test_pipeline_parity.py",
    "lightning_zero/engine/units/submodules.py": "tests/contracts/test_forwards_anywhere.py",
    "lightning_zero/engine/access/arguments.py": "tests/contracts/test_bad_input.py",
    "lightning_zero/engine/checkpoint_access.py": "tests/engine/test_engine.py",
    "lightning_zero/engine/engine_state.py": "tests/engine/test_engine.py",
    "lightning_zero/engine/internals.py": "tests/contracts/test_bad_input.py",
    "lightning_zero/engine/step_control.py": "tests/engine/test_engine.py",
    "lightning_zero/engine/unit_owner.py": "tests/contracts/test_gradients_by_hand.py",
    "lightning_zero/microbatch.py": "tests/contracts/test_pipeline_reductions.py",
    "lightning_zero/errors.py": "tests/contracts/test_bad_input.py",
    "lightning_zero/lightning/averaging.py": "tests/contracts/test_averaging.py",
    "lightning_zero/lightning/checkpoint_hooks.py": "tests/contracts/test_lightning_checkpoints.py",
    "lightning_zero/lightning/run_config.py": "tests/lightning/test_estimate_command.py",
    "lightning_zero/lightning/compatibility.py": "tests/lightning/test_strategy.py",
    "lightning_zero/lightning/layer_costs.py": "tests/contracts/test_pipeline_models.py",
    "lightning_zero/lightning/loader_states.py": "tests/contracts/test_states_of_ranks.py",
    "lightning_zero/lightning/monitor.py": "tests/lightning/test_callbacks.py",
    "lightning_zero/lightning/pipeline_logging.py": "tests/contracts/test_pipeline_metrics.py",
    "lightning_zero/lightning/rank_zero_calls.py": "tests/contracts/test_pipeline_logs.py",
    "lightning_zero/lightning/trainer_state.py": "tests/contracts/test_pipeline_logs.py",
    "lightning_zero/lightning/pipelined_steps.py": "tests/contracts/test_pipeline_parity.py",
    "lightning_zero/lightning/progress.py": "tests/contracts/test_places_of_saves.py",
    "lightning_zero/lightning/rank_states.py": "tests/contracts/test_states_of_ranks.py",
    "lightning_zero/lightning/signals.py": "tests/contracts/test_signals.py",
    "lightning_zero/lightning/simulated_stages.py": "tests/contracts/test_simulated_pipelines.py",
    "lightning_zero/lightning/stage_forecast.py": "tests/contracts/test_forecast_of_stages.py",
    "lightning_zero/lightning/step_in_backward.py": "tests/engine/runtime/test_step_in_backward.py",
    "lightning_zero/lightning/uneven.py": "tests/contracts/test_lightning_data.py",
    "lightning_zero/moe/routing.py": "tests/moe/test_layer.py",
    "lightning_zero/parallel/pipeline/stages/attributes.py": "tests/contracts/test_pipeline_programs.py",
    "lightning_zero/parallel/pipeline/traced_steps.py": "tests/contracts/test_pipeline_programs.py",
    "lightning_zero/parallel/pipeline/tracing/fake_state.py": "tests/parallel/pipeline/tracing/test_whole_run.py",
    "lightning_zero/parallel/pipeline/tracing/operations.py": "tests/parallel/pipeline/tracing/test_whole_run.py",
    "lightning_zero/parallel/pipeline/tracing/outside_state.py": "tests/parallel/pipeline/tracing/test_whole_run.py",
    "lightning_zero/parallel/pipeline/tracing/escapes.py": "tests/contracts/test_pipeline_outside_values.py",
    "lightning_zero/parallel/pipeline/tracing/traces.py": "tests/contracts/test_pipeline_programs.py",
    "lightning_zero/parallel/pipeline/tracing/known_calls.py": "tests/parallel/pipeline/tracing/test_fakes.py",
    "lightning_zero/parallel/pipeline/tracing/shown_attributes.py": "tests/contracts/test_pipeline_kept_values.py",
    "lightning_zero/parallel/pipeline/tracing/module_interception.py": "tests/contracts/test_pipeline_programs.py",
    "lightning_zero/parallel/pipeline/tracing/fake_mode.py": "tests/parallel/pipeline/tracing/test_fakes.py",
    "lightning_zero/parallel/pipeline/tracing/conversions.py": "tests/contracts/test_pipeline_programs.py",
    "lightning_zero/parallel/pipeline/stages/generators.py": "tests/contracts/test_pipeline_generators.py",
    "lightning_zero/parallel/pipeline/tracing/gradient_hooks.py": "tests/contracts/test_pipeline_programs.py",
    "lightning_zero/parallel/pipeline/explicit_steps.py": "tests/contracts/test_pipeline_models.py",
    "lightning_zero/parallel/pipeline/tracing/outcomes.py": "tests/contracts/test_pipeline_late_values.py",
    "lightning_zero/parallel/pipeline/tracing/own_gradients.py": "tests/contracts/test_pipeline_outside_values.py",
    "lightning_zero/parallel/pipeline/stages/kept_attributes.py": "tests/parallel/pipeline/stages/test_state_around.py",
    "lightning_zero/parallel/pipeline/stages/own_changes.py": "tests/contracts/test_pipeline_reads_between_steps.py",
    "lightning_zero/parallel/pipeline/stages/parameter_hooks.py": "tests/contracts/test_pipeline_parameter_hooks.py",
    "lightning_zero/parallel/pipeline/stages/attribute_reads.py": "tests/contracts/test_pipeline_values_in_hooks.py",
    "lightning_zero/parallel/pipeline/tracing/object_state.py": "tests/contracts/test_pipeline_state_around.py",
    "lightning_zero/parallel/pipeline/stages/placed_attributes.py": "tests/contracts/test_pipeline_state_around.py",
    "lightning_zero/parallel/pipeline/stages/state_values.py": "tests/contracts/test_pipeline_state_around.py",
    "lightning_zero/parallel/pipeline/stages/state_marks.py": "tests/parallel/pipeline/stages/test_state_around.py",
    "lightning_zero/parallel/pipeline/tracing/recomputation.py": "tests/contracts/test_pipeline_recomputation.py",
    "lightning_zero/parallel/pipeline/tracing/replays.py": "tests/contracts/test_pipeline_programs.py",
    "lightning_zero/parallel/pipeline/stages/sources.py": "tests/contracts/test_pipeline_programs.py",
    "lightning_zero/parallel/pipeline/stages/subclasses.py": "tests/contracts/test_pipeline_outside_values.py",
    "lightning_zero/parallel/pipeline/tracing/value_reads.py": "tests/contracts/test_pipeline_caught_errors.py",
    "lightning_zero/parallel/pipeline/tracing/user_hooks.py": "tests/contracts/test_pipeline_programs.py",
    "lightning_zero/parallel/tensor/attention.py": "tests/parallel/tensor/test_transform.py",
    "lightning_zero/parallel/tensor/diagnosis.py": "tests/parallel/tensor/test_check.py",
    "lightning_zero/parallel/tensor/examples.py": "tests/parallel/tensor/test_blocks.py",
    "lightning_zero/parallel/tensor/forwards.py": "tests/parallel/tensor/test_transform.py",
    "lightning_zero/parallel/tensor/regions.py": "tests/parallel/tensor/test_search.py",
    "lightning_zero/parallel/tensor/vocabulary.py": "tests/parallel/tensor/test_planning.py",
    "lightning_zero/parallel/writable.py": "tests/parallel/activation/test_checkpointing.py",
    "lightning_zero/storage/residence.py": "tests/storage/test_disk.py",
    "lightning_zero/storage/references.py": "tests/engine/buffers/test_gradients.py",
    "lightning_zero/storage/disk_tensor.py": "tests/storage/test_disk.py",
    "lightning_zero_ops/elementwise.py": "tests/ops/test_gated.py",
    "lightning_zero_ops/selfcheck.py": "tests/engine/test_kernels_in_steps.py",
}


def _sources() -> list[str]:
    files = [path for package in ("lightning_zero", "lightning_zero_ops") for path in (ROOT / package).rglob("*.py")]
    return sorted(str(path.relative_to(ROOT)) for path in files if not path.stem.startswith("__"))


def _mirror(source: str) -> str:
    path = Path(source)
    room = Path("tests", "ops") if path.parts[0] == "lightning_zero_ops" else Path("tests", *path.parts[1:-1])
    return str(room / f"test_{path.name}")


@pytest.mark.parametrize("source", _sources())
def test_every_source_file_has_tests(source: str) -> None:
    file = ROOT / IN_CONTRACTS.get(source, _mirror(source))
    assert file.exists(), f"`{source}` has no test: write `{_mirror(source)}`, or name its contract"


def test_files_with_a_mirror_need_no_contract() -> None:
    assert [source for source in IN_CONTRACTS if (ROOT / _mirror(source)).exists()] == []
    assert set(IN_CONTRACTS) <= set(_sources())
