"""Random programs train as the plain reference does, action by action; see ``tests/fuzz``."""

from __future__ import annotations

import pytest

from tests.fuzz import programs
from tests.fuzz.mutants import MUTANTS
from tests.fuzz.programs import Program
from tests.fuzz.runner import check, find
from tests.fuzz.shrinker import report, shrunk

FAST = [
    *[(2, start) for start in range(0, 120, 30)],
    *[(3, start) for start in range(1000, 1080, 20)],
    *[(4, start) for start in range(2000, 2040, 20)],  # on two nodes of two ranks
]
FOUND_FAST = ("norms_are_local", "writes_are_lost")  # the other mutants in the slow set
SLOW = [(world, start) for world in (2, 3, 4) for start in range(10_000 * world, 10_000 * world + 2000, 100)]

SGD = [{"class": "SGD"}]
ONCE = {  # what differed once, made smaller
    "penalty-outside-a-scope-two-backwards": Program(
        {"blocks": []}, {"stage": 3}, SGD, [("backward", {"scope": False, "penalty": "input", "times": 2})]
    ),
    "penalties-outside-a-scope-two-forwards": Program(
        {"blocks": []}, {"stage": 3}, SGD, [("backward", {"scope": False, "penalty": "input", "forwards": 2})] * 3
    ),
    "write-in-the-open-window": Program(
        {"blocks": []},
        {"stage": 1},
        SGD,
        [("clip_norm", {"look": False}), ("write", {"how": "open"}), ("backward", {})],
    ),
    "write-beside-the-window-behind-a-step": Program(
        {"blocks": [("b", {"kind": "linear"})]},
        {"stage": 1, "offload": {"optimizer": "cpu"}},
        [{"class": "SGD", "groups": [["blocks.b.up.weight"]]}],
        [
            ("backward", {"look": False}),
            ("edit", {"how": "assign", "look": False}),
            ("step", {"opt": 0, "look": False}),
            ("write", {"how": "open", "look": False}),
            ("backward", {}),
        ],
    ),
    "write-beside-the-window-before-a-step": Program(
        {"blocks": [("b", {"kind": "linear"})]},
        {"stage": 2, "offload": {"optimizer": "cpu"}, "step": "now"},
        [{"class": "SGD", "groups": [["blocks.b.up.weight"]]}],
        [
            ("backward", {"look": False}),
            ("clip_norm", {"look": False}),
            ("write", {"how": "open", "look": False}),
            ("step", {"opt": 0, "look": False}),
            ("backward", {}),
        ],
    ),
    "penalty-through-a-recomputed-block-with-a-frozen-norm": Program(
        {"blocks": [("a", {"kind": "linear"}), ("b", {"kind": "ff", "checkpointed": True})]},
        {"stage": 3},
        SGD,
        [
            ("freeze", {"names": ["blocks.b.norm.weight", "blocks.b.norm.bias"], "value": False}),
            ("backward", {"scope": False, "penalty": "input"}),
        ],
    ),
    "gradients-assigned-and-read-behind-a-caught-error": Program(
        {"blocks": [("a", {"kind": "linear"})]},
        {"stage": 0},
        SGD,
        [
            ("fail", {"at": "param", "module": "blocks.a", "scope": False}),
            ("assign", {"names": ["blocks.a.down.bias"]}),
            ("backward", {"use": [[], []], "scope": False, "explicit": False}),
        ],
    ),
    "assigned-gradients-clipped-by-hand-beside-reduced-ones": Program(
        {"blocks": [], "scale": True},
        {"stage": 0},
        SGD,
        [
            ("backward", {}),
            ("freeze", {"names": ["embedding.weight"], "value": False, "look": False}),
            ("assign", {"look": False}),
            ("clip_value", {"by_hand": True}),
        ],
    ),
    "optimizer-with-states-made-in-the-open-window": Program(
        {"blocks": [], "unused": True},
        {"stage": 1},
        SGD,
        [
            ("backward", {"look": False}),
            ("clip_norm", {"max_norm": 10.0, "by_hand": True, "look": False}),
            ("attach", {"optimizers": [{"class": "Adagrad", "lr": 0.01}], "look": False}),
            ("backward", {}),
            ("step", {}),
        ],
    ),
    "waiting-micro-batch-dropped-by-the-module": Program(
        {"blocks": []},
        {"stage": 0},
        [{"class": "SGD", "groups": [["norm.weight"]]}],
        [("backward", {"last": False, "look": False}), ("fail", {"at": "pre", "look": False}), ("backward", {})],
    ),
    "caught-error-in-a-backward-beside-a-kept-gradient": Program(
        {"blocks": [("b", {"kind": "linear"})]},
        {"stage": 3, "units": ["Linear"]},
        [{"class": "SGD", "groups": [["head.weight"]]}],
        [
            ("backward", {"look": False}),
            ("fail", {"at": "grad", "seed": 83, "module": "blocks.b.up", "scope": False, "look": False}),
            ("backward", {}),
        ],
    ),
    "two-optimizers-share-a-unit": Program(
        {"blocks": [("a", {"kind": "linear"})]},
        {"stage": 1},
        [{"class": "SGD", "groups": [["blocks.a.down.bias"]]}, {"class": "SGD", "groups": [["embedding.weight"]]}],
        [("closure", {"opt": 1, "look": False}), ("edit", {}), ("step", {"opt": 1})],
    ),
    "error-in-a-bare-backward": Program(
        {"blocks": [("a", {"kind": "linear"})]},
        {"stage": 3, "prefetch": 0},
        SGD,
        [("fail", {"at": "param", "module": "blocks.a.up", "scope": False}), ("step", {}), ("backward", {})],
    ),
    "two-forwards-behind-a-bare-backward": Program(
        {"blocks": [("a", {"kind": "linear", "checkpointed": True}), ("b", {"kind": "ff", "shares": "a"})]},
        {"stage": 3, "offload": {"optimizer": "cpu"}},
        [{"class": "AdamW", "options": {"eps": 0.01}}],
        [("backward", {"explicit": False, "look": False}), ("backward", {"parts": True, "forwards": 2, "look": False})],
    ),
    "forward-below-a-unit-in-the-open-window": Program(
        {"blocks": [("a", {"kind": "linear"}), ("b", {"kind": "linear"})]},
        {"stage": 1},
        SGD,
        [
            ("backward", {"look": False}),
            ("clip_norm", {"look": False}),
            ("write", {"how": "open", "look": False}),
            ("evaluate", {"what": "blocks.a.up"}),
        ],
    ),
    "forward-below-a-unit-behind-changed-gradients": Program(
        {"blocks": [("a", {"kind": "linear"}), ("b", {"kind": "linear"})]},
        {"stage": 1},
        SGD,
        [("backward", {"look": False}), ("edit", {"look": False}), ("evaluate", {"what": "blocks.a.up"})],
    ),
    "decay-by-values-of-assigned-gradients": Program(
        {"blocks": []},
        {"stage": 3},
        SGD,
        [("assign", {"look": False}), ("edit", {"how": "decay", "look": False}), ("step", {})],
    ),
    "data-pointed-elsewhere-where-a-rank-has-no-element": Program(
        {"blocks": [("a", {"kind": "linear"})]},
        {"stage": 1},
        SGD,
        [
            ("clip_norm", {"look": False}),
            ("write", {"how": "open", "names": ["blocks.a.down.bias"], "point": True, "look": False}),
            ("evaluate", {}),
        ],
    ),
    "gradients-decay-by-values-on-disks": Program(
        {"blocks": []},
        {"stage": 1, "offload": {"optimizer": "nvme"}},
        SGD,
        [("backward", {"look": False}), ("edit", {"how": "decay", "look": False}), ("step", {})],
    ),
    "modules-drop-what-waits-behind-an-average": Program(
        {"blocks": [("b", {"kind": "linear"})]},
        {"stage": 0},
        [{"class": "SGD", "groups": [["head.weight"]]}],
        [
            ("backward", {"look": False}),
            ("backward", {"last": False, "look": False}),
            ("fail", {"module": "blocks.b", "look": False}),
            ("backward", {"use": [], "look": False}),
            ("zero_grad", {"opt": 0}),
        ],
    ),
}


def _agrees(world: int, seeds: range) -> None:
    found = list(find(seeds, world))
    if not found:
        return
    seed, difference = found[0]
    program, difference = shrunk(programs.draw(seed, world), difference, world)
    others = (
        f"seeds {[seed for seed, _ in found]} differ; `python -m tests.fuzz --seed {seed} --world {world}` is the first"
    )
    pytest.fail(f"{others}, made smaller:\n{report(program, difference, world)}", pytrace=False)


@pytest.mark.parametrize("program", [pytest.param(program, id=name) for name, program in ONCE.items()])
def test_what_differed_once_agrees(program: Program) -> None:
    difference = check(program, 2)
    assert difference is None, report(program, difference, 2)


@pytest.mark.parametrize(("world", "start"), [pytest.param(*FAST[0], marks=pytest.mark.always), *FAST[1:]])
def test_random_programs_train_as_the_reference(world: int, start: int) -> None:
    _agrees(world, range(start, start + (30 if world == 2 else 20)))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("world", "start"), SLOW)
def test_many_random_programs_train_as_the_reference(world: int, start: int) -> None:
    _agrees(world, range(start, start + 100))


def test_a_program_is_read_as_it_is_shown() -> None:
    for seed in range(50):
        program = programs.draw(seed, 2)
        assert programs.parse(programs.show(program)) == program
        assert programs.draw(seed, 2) == program


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FOUND_FAST else [pytest.mark.slow]) for name in MUTANTS]
)
def test_broken_engines_are_found(name: str) -> None:
    by_seed = next(find(range(200), 2, mutant=MUTANTS[name], chunk=10), None)
    assert by_seed or any(check(program, 2, mutant=MUTANTS[name]) for program in ONCE.values())
