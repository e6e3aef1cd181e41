"""State around the blocks that code behind them changes and code in front of them reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_zero.config import Pipeline
from lightning_zero.lightning.strategy import ZeroStrategy
from tests.fuzz.pipeline_runner import check, report
from tests.fuzz.pipelines import EMBEDDED, FRONT, INIT, PipelineProgram, batches, module_of
from tests.lightning_programs import trainer
from tests.sampling import sample
from tests.worlds import run

LINEAR = ("Linear",) * 4
LOSS = len(LINEAR) + 2
ONE = {"stages": 2, "schedule": "gpipe", "partition": "uniform", "microbatches": 1}


class Sums:
    def __init__(self) -> None:
        self.values = [0.5]
        self.made_by = type(self)  # is not sent


class Averaged:
    def __init__(self, module: Any) -> None:
        self.params = list(module.parameters())
        self.n = 0


class Slots:
    __slots__ = ("loss",)

    def __init__(self, loss: float) -> None:
        self.loss = loss


FEATURES = {
    "buffer-in-place": (
        (INIT, "self.register_buffer('mean', torch.tensor(0.5))"),
        (EMBEDDED, "hidden = hidden * (1.0 + self.mean)"),
        (LOSS, "self.mean.mul_(0.5).add_(loss.detach())"),
    ),
    "buffer": (
        (INIT, "self.register_buffer('mean', torch.tensor(0.5))"),
        (EMBEDDED, "hidden = hidden * (1.0 + self.mean)"),
        (LOSS, "self.mean = 0.5 * self.mean + loss.detach()"),
    ),
    "tensor": (
        (INIT, "self.last = torch.tensor(0.5)"),
        (EMBEDDED, "hidden = hidden * (1.0 + self.last)"),
        (LOSS, "self.last = loss.detach()"),
    ),
    "number": (
        (INIT, "self.last = 0.5"),
        (EMBEDDED, "hidden = hidden * (1.0 + self.last)"),
        (LOSS, "self.last = loss.item()"),
    ),
    "list": (
        (INIT, "self.seen = [0.5]"),
        (EMBEDDED, "hidden = hidden * (1.0 + self.seen[-1])"),
        (LOSS, "self.seen.append(loss.item())"),
    ),
    "new-attribute": (
        (EMBEDDED, "hidden = hidden * (1.0 + getattr(self, 'last', 0.5))"),
        (LOSS, "self.last = loss.item()"),
    ),
}  # fmt: skip

CONTAINERS = {  # made, read and changed
    "nested": (
        "{'train': {'loss': {'ema': 0.5}}}",
        "['train']['loss']['ema']",
        "['train']['loss']['ema'] = loss.item()",
    ),
    "defaultdict": ("__import__('collections').defaultdict(float)", "['loss']", "['loss'] = loss.item()"),
    "deque": ("__import__('collections').deque([0.5], maxlen=2)", "[-1]", ".append(loss.item())"),
    "set": ("{0.5}", ".copy().pop()", ".clear(); self.state.add(loss.item())"),
    "array": ("__import__('numpy').zeros(2)", ".sum()", "[0] = loss.item()"),
    "list-of-arrays": ("[__import__('numpy').zeros(2)]", "[0].sum()", "[0][1] = loss.item()"),
    "namespace": ("__import__('types').SimpleNamespace(loss=0.5)", ".loss", ".loss = loss.item()"),
    "object-with-a-list": ("Sums()", ".values[-1]", ".values.append(loss.item())"),
    "object-with-slots": ("Slots(0.5)", ".loss", ".loss = loss.detach()"),
}
FEATURES |= {
    name: (
        (INIT, f"from tests.contracts.test_pipeline_state_around import Slots, Sums\nself.state = {begun}"),
        (EMBEDDED, f"hidden = hidden * (1.0 + float(self.state{read}))"),
        (LOSS, f"self.state{change}"),
    )
    for name, (begun, read, change) in CONTAINERS.items()
}
FEATURES["number-of-the-head"] = (
    (INIT, "self.head.scale = 0.5"),
    (EMBEDDED, "hidden = hidden * (1.0 + self.head.scale)"),
    (LOSS, "self.head.scale = loss.item()"),
)
PLACED = {  # in modules that other stages run
    "embedding": (
        (INIT, "self.embedding.noise = 0.5"),
        (EMBEDDED, "hidden = hidden * (1.0 + self.embedding.noise)"),
        (LOSS, "self.embedding.noise = loss.item()"),
    ),
    "blocks": (
        (INIT, "for block in self.blocks:\n    block.scale = torch.tensor(0.5)"),
        (EMBEDDED, "hidden = hidden * (1.0 + self.blocks[1].scale)"),
        (LOSS, "for block in self.blocks:\n    block.scale = loss.detach()"),
    ),
    "options": (
        (INIT, "import types\nself.options = types.SimpleNamespace(scale=1.0)\nfor block in self.blocks:\n"
               "    block.options = self.options\n"
               "    block.register_forward_hook(lambda block, args, out: out * block.options.scale)"),
        (LOSS, "self.options.scale *= 0.8"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sample([*FEATURES], "buffer-in-place", "list", "object-with-a-list"))
def test_the_next_batch_reads_what_code_behind_the_blocks_has_left(name: str) -> None:
    program = PipelineProgram(LINEAR, (FEATURES[name],), options=ONE)
    outcome = check(program)
    assert outcome.kind == "alike", report(program, outcome)


@pytest.mark.parametrize("name", sample([*FEATURES], "tensor", "new-attribute", "namespace"))
def test_reading_what_a_micro_batch_before_has_left_behind_the_blocks_is_refused(name: str) -> None:
    program = PipelineProgram(LINEAR, (FEATURES[name],), options={**ONE, "microbatches": 2})
    outcome = check(program)
    assert outcome.kind == "refused", report(program, outcome)
    assert "of `Program` is changed by code after the blocks of `blocks` and read before them" in outcome.text


@pytest.mark.parametrize("name", sample([*PLACED], "blocks"))
def test_modules_of_other_stages_have_what_code_behind_the_blocks_sets(name: str) -> None:
    program = PipelineProgram(LINEAR, (PLACED[name],), options=ONE)
    outcome = check(program)
    assert outcome.kind == "alike", report(program, outcome)


@pytest.mark.parametrize("name", sample([*PLACED], "embedding", "options"))
def test_setting_state_of_other_stages_between_micro_batches_is_refused(name: str) -> None:
    program = PipelineProgram(LINEAR, (PLACED[name],), options={**ONE, "microbatches": 2})
    outcome = check(program)
    assert outcome.kind == "refused", report(program, outcome)
    assert "in a module of another pipeline stage" in outcome.text


def test_blocks_that_count_and_are_reset_train() -> None:
    feature = (
        (INIT, "for block in self.blocks:\n    block.aux, block.step = None, 0"),
        (FRONT, "for block in self.blocks:\n    block.step += 1"),
        (2, "self.blocks[1].aux = hidden"),
        (LOSS, "for block in self.blocks:\n    block.aux = None"),
    )
    program = PipelineProgram(LINEAR, (feature,), options={**ONE, "microbatches": 2, "schedule": "1f1b"})
    outcome = check(program)
    assert outcome.kind == "alike", report(program, outcome)


ALIKE = {  # with two micro-batches
    "cleared-list": (
        (INIT, "self.seen = []"),
        (FRONT, "self.seen.clear()"),
        (EMBEDDED, "self.seen.append(hidden.detach().mean())"),
        (LOSS, "self.seen.append(loss.detach())"),
    ),
    "cleared-dictionary-of-an-object": (
        (INIT, "import types\nself.state = types.SimpleNamespace(seen={}, n=0)"),
        (FRONT, "self.state.seen.clear()\nself.state.n = 0"),
        (EMBEDDED, "self.state.seen['hidden'] = hidden.detach().mean()"),
        (LOSS, "self.state.seen['loss'] = loss.detach()\nself.state.n = loss.item()"),
    ),
    "zeroed-buffer": (
        (INIT, "self.register_buffer('total', torch.zeros(()))"),
        (FRONT, "self.total.zero_()"),
        (LOSS, "self.total += loss.detach()"),
    ),
    "counter-in-front": (
        (INIT, "self.calls = 0"),
        (FRONT, "self.calls += 1"),
        (EMBEDDED, "hidden = hidden * (1.0 + 0.1 * self.calls)"),
    ),
    "object-in-front": (
        (INIT, "import types\nself.state = types.SimpleNamespace(n=0)"),
        (FRONT, "import types\nself.state = types.SimpleNamespace(n=self.state.n + 1)"),
        (EMBEDDED, "hidden = hidden * (1.0 + 0.1 * self.state.n)"),
    ),
    "object-with-parameters": (
        (INIT, "from tests.contracts.test_pipeline_state_around import Averaged\nself.state = Averaged(self)"),
        (LOSS, "self.state.n += 1"),
    ),
    "graph-that-is-kept": (
        (INIT, "self.output = None"),
        (LOSS, "self.output = logits"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sample([*ALIKE], "cleared-list", "cleared-dictionary-of-an-object", "object-in-front"))
@pytest.mark.parametrize("schedule", sample(["1f1b", "interleaved_1f1b"], "1f1b"))
def test_state_that_no_code_in_front_of_the_blocks_reads_late_trains(name: str, schedule: str) -> None:
    program = PipelineProgram(LINEAR, (ALIKE[name],), options={**ONE, "microbatches": 2, "schedule": schedule})
    outcome = check(program)
    assert outcome.kind == "alike", report(program, outcome)


def test_a_graph_of_the_batch_before_is_refused_in_front_of_the_blocks() -> None:
    read = (EMBEDDED, "hidden = hidden if self.output is None else hidden + self.output.detach().mean()")
    program = PipelineProgram(LINEAR, ((*ALIKE["graph-that-is-kept"], read),), options=ONE)
    outcome = check(program)
    assert outcome.kind == "refused", report(program, outcome)
    assert "Keep it as one of these (`.detach()`)" in outcome.text


# -- State that begins to change in a later batch ----------------------------------------------------------------------

COUNTS = (INIT, "self.calls = 0"), (LOSS, "self.calls += 1")  # micro-batches that have run
LATE = {
    "number": ("0.5", "self.late", "loss.item()"),
    "large": ("torch.full((100, 100), 0.5)", "self.late.mean()", "loss.detach().expand(100, 100).clone()"),
    "graph": ("torch.tensor(0.5)", "self.late.detach()", "loss"),
}


def _late(name: str, microbatches: int) -> PipelineProgram:
    begun, read, changed = LATE[name]
    feature = (
        *COUNTS,
        (INIT, f"self.late = {begun}"),
        (EMBEDDED, f"hidden = hidden * (1.0 + {read})"),
        (LOSS, f"if self.calls > {microbatches}:\n    self.late = {changed}"),
    )
    return PipelineProgram(LINEAR, (feature,), options={**ONE, "microbatches": microbatches})


def test_what_begins_to_change_behind_the_blocks_in_a_later_batch_is_read_in_the_next_one() -> None:
    program = _late("number", 1)
    outcome = check(program)
    assert outcome.kind == "alike", report(program, outcome)


@pytest.mark.parametrize("case", sample(["number-2", "large-1", "large-2", "graph-1"], "number-2", "large-1"))
def test_an_old_value_of_what_begins_to_change_in_a_later_batch_is_refused(case: str) -> None:
    name, _, microbatches = case.partition("-")
    program = _late(name, int(microbatches))
    outcome = check(program)
    assert outcome.kind == "refused", report(program, outcome)
    assert "`late` of `Program` is changed by code after the blocks" in outcome.text


def test_a_large_value_of_an_embedding_that_code_behind_the_blocks_has_set_is_refused_in_front_of_them() -> None:
    feature = (
        (INIT, "self.embedding.noise = torch.full((100, 100), 0.5)"),
        (EMBEDDED, "hidden = hidden * (1.0 + self.embedding.noise.mean())"),
        (LOSS, "self.embedding.noise = loss.detach().expand(100, 100).clone()"),
    )
    program = PipelineProgram(LINEAR, (feature,), options=ONE)
    outcome = check(program)
    assert outcome.kind == "refused", report(program, outcome)
    assert "`embedding.noise` of `Program` is changed by code after the blocks" in outcome.text


def test_an_object_under_two_names_that_begins_to_change_in_a_later_batch_is_refused() -> None:
    feature = (
        *COUNTS,
        (INIT, "import types\nself.state = types.SimpleNamespace(n=0.5)\nself.norm.state = self.state"),
        (EMBEDDED, "hidden = hidden * (1.0 + self.norm.state.n)"),
        (LOSS, "if self.calls > 2:\n    self.state.n = loss.item()"),
    )
    program = PipelineProgram(LINEAR, (feature,), options={**ONE, "microbatches": 2})
    outcome = check(program)
    assert outcome.kind == "refused", report(program, outcome)
    assert "`norm.state` of `Program` is changed by code after the blocks" in outcome.text


BOTH = {
    "alike": (
        (INIT, "self.large = torch.zeros(200, 200)"),
        (FRONT, "self.large = self.large + 1.0"),
        (EMBEDDED, "hidden = hidden * (1.0 + 0.1 * self.large.mean())"),
    ),
    "behind-too": (
        *COUNTS,
        (INIT, "self.large = torch.zeros(200, 200)"),
        (FRONT, "self.large = self.large + 1.0"),
        (EMBEDDED, "hidden = hidden * (1.0 + 0.1 * self.large.mean())"),
        (LOSS, "if self.calls > 1:\n    self.large = self.large * 2.0"),
    ),
}  # fmt: skip


def test_large_tensors_that_code_in_front_changes_train() -> None:
    program = PipelineProgram(LINEAR, (BOTH["alike"],), options=ONE)
    outcome = check(program)
    assert outcome.kind == "alike", report(program, outcome)


def test_large_tensors_that_code_behind_the_blocks_changes_once_more_are_refused() -> None:
    program = PipelineProgram(LINEAR, (BOTH["behind-too"],), options=ONE)
    outcome = check(program)
    assert outcome.kind == "refused", report(program, outcome)
    assert "Keep it as one of these (`.detach()`)" in outcome.text


# -- State of other stages ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("microbatches", [1, 2])
def test_an_attribute_of_a_stage_in_the_middle_is_refused_in_front_of_the_blocks(microbatches: int) -> None:
    feature = (
        (INIT, "self.seen = 0.5"),
        (EMBEDDED, "hidden = hidden * (1.0 + self.seen)"),
        (3, "self.seen = hidden.detach().mean()"),
    )
    options = {**ONE, "stages": 4, "microbatches": microbatches}
    program = PipelineProgram(LINEAR * 2, (feature,), options=options)
    outcome = check(program)
    assert outcome.kind == "refused", report(program, outcome)
    assert "`seen` of `Program` is changed by code after the blocks" in outcome.text


def test_an_attribute_of_a_stage_in_the_middle_that_nobody_reads_trains() -> None:
    feature = (
        (INIT, "self.seen = []"),
        (FRONT, "self.seen.clear()"),
        (3, "self.seen.append(hidden)\nself.last = hidden"),
    )
    program = PipelineProgram(LINEAR * 2, (feature,), options={**ONE, "stages": 4, "microbatches": 2})
    outcome = check(program)
    assert outcome.kind == "alike", report(program, outcome)


def _saved(rank: int, world: int, folder: str) -> list[float]:
    program = PipelineProgram(LINEAR, (
        (FEATURES["buffer"][0], FEATURES["buffer"][2]),))  # fmt: skip
    module: Any = module_of(program)
    strategy = ZeroStrategy(stage=1, pipeline=Pipeline(**program.options))
    lightning = trainer(rank, world, strategy, max_epochs=1)
    lightning.fit(module, DataLoader(batches(program, 0), batch_size=None))  # type: ignore[arg-type]
    mine = float(module.mean)
    lightning.save_checkpoint(Path(folder) / "saved")
    return [mine, float(module.mean)]


def test_a_checkpoint_has_the_module_buffer_of_the_last_stage(tmp_path: Path) -> None:
    (_, first), (before, last) = run(_saved, 2, str(tmp_path))
    assert first == before == last != 0.5


# -- Numbers that blocks change ----------------------------------------------------------------------------------------

COUNTS_IN = """class Both(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block, self.state = block, {state}
    def forward(self, *args):
        {change}
        return self.block(*args) * (1.0 + 0.1 * self.state.n)
self.blocks = nn.ModuleList(Both(block) for block in self.blocks)"""
SHARED = "class Shared(nn.Module):\n    n = 0\nshared = Shared()\n"
NAMESPACE = "import types\nshared = types.SimpleNamespace(n=0)\n"
LONGEST = "self.state.n = max(self.state.n, args[0].shape[1])"
OF_BLOCKS = {
    "own-object": NAMESPACE + COUNTS_IN.format(state="types.SimpleNamespace(n=0)", change="self.state.n += 1"),
    "own-list": COUNTS_IN.format(state="types.SimpleNamespace(n=0, seen=[])", change="self.state.seen.append(1)\n"
                                 "        self.state.n = len(self.state.seen)"),
    "shared-length": SHARED + COUNTS_IN.format(state="shared", change=LONGEST),
    "shared-length-of-an-object": NAMESPACE + COUNTS_IN.format(state="shared", change=LONGEST),
}  # fmt: skip
OF_BLOCKS["own-list"] = "import types\n" + OF_BLOCKS["own-list"]
COUNTERS = {
    "module": SHARED + COUNTS_IN.format(state="shared", change="self.state.n += 1"),
    "object": NAMESPACE + COUNTS_IN.format(state="shared", change="self.state.n += 1"),
}


@pytest.mark.parametrize("name", sample([*OF_BLOCKS], "own-list", "shared-length"))
def test_numbers_that_blocks_change_train(name: str) -> None:
    program = PipelineProgram(LINEAR, (((INIT, OF_BLOCKS[name]),),), options={**ONE, "microbatches": 2})
    outcome = check(program)
    assert outcome.kind == "alike", report(program, outcome)


@pytest.mark.parametrize("name", sample([*COUNTERS], "module"))
def test_counters_that_blocks_of_several_stages_share_are_refused(name: str) -> None:
    program = PipelineProgram(LINEAR, (((INIT, COUNTERS[name]),),), options={**ONE, "microbatches": 2})
    outcome = check(program)
    assert outcome.kind == "refused", report(program, outcome)
    assert "`blocks.0` changes the number `n` of a `S" in outcome.text
