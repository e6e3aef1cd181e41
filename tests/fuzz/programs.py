"""Programs: what they are, and how one is drawn from a seed. All of it is plain data."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from lightning_zero.sharding import Sharding
from tests.fuzz import modules

__all__ = ["OFF", "Action", "Program", "draw", "parse", "show"]

Action = tuple[str, dict[str, Any]]

OFF: dict[str, str] = {}
"""Variants that are not drawn, because of a defect that is known: the reason by the variant's name."""


@dataclass(frozen=True)
class Program:
    """A module, how the engine holds it, and what is done with it."""

    module: dict[str, Any]
    options: dict[str, Any]
    optimizers: list[dict[str, Any]]
    actions: list[Action] = field(default_factory=list)


def show(program: Program) -> str:
    """Return a program as text that ``parse`` reads, an action per line."""
    lines = ["{"]
    for key in ("module", "options", "optimizers"):
        lines.append(f"  {key!r}: {getattr(program, key)!r},")
    lines += ["  'actions': [", *(f"    {action!r}," for action in program.actions), "  ],", "}"]
    return "\n".join(lines)


def parse(text: str) -> Program:
    """Read what ``show`` wrote."""
    return Program(**ast.literal_eval(text))


def scopes_of(options: dict[str, Any]) -> Sharding:
    """Return the option ``stage`` of a program; another stage than that of its ``scopes`` has none."""
    scopes = Sharding.of(options.get("scopes", options.get("stage", 0)))
    return scopes if scopes.stage == options.get("stage", 0) else Sharding.of(options.get("stage", 0))


def draw(seed: int, world: int, off: Collection[str] | None = None) -> Program:
    """Draw a program.

    Args:
        seed: Determines it, together with the rest.
        world: Number of ranks, which may use different blocks.
        off: Variants that are left out, by default ``OFF``.
    """
    return _Drawing(random.Random(seed), world, OFF if off is None else off).program()


_OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("AdamW", {"eps": 0.01}),
    ("AdamW", {"eps": 0.01, "weight_decay": 0.2}),
    ("AdamW", {"eps": 0.01, "foreach": True}),
    ("AdamW", {"eps": 0.01, "fused": False}),
    ("Adam", {"eps": 0.01}),
    ("Adam", {"eps": 0.01, "amsgrad": True}),
    ("Adagrad", {"eps": 0.1}),
    ("RMSprop", {"eps": 0.1, "momentum": 0.5}),
    ("NAdam", {"eps": 0.01}),
]
_OWN_STEP = ("SGD", "AdamW", "Adam")  # stepped by the engine itself
_SCOPES = {  # by stage: on two nodes of two ranks
    2: [{"params": "none", "grads": 2}],
    3: [{"params": 2, "grads": 2}, {"params": 2, "grads": "world"}],
}
_EDITS = ("mul_", "data", "clamp_", "zero_", "decay", "assign", "none")


class _Drawing:
    """Draws one program."""

    def __init__(self, rng: random.Random, world: int, off: Collection[str]) -> None:
        self._rng = rng
        self._world = world
        self._off = off
        self._is_waiting = False  # a micro-batch before the last has run
        self._has_grads = False
        self._saved: Any = None  # the optimizers when a checkpoint was saved
        self._free: list[str] = []  # names of parameters in no optimizer
        self._clips = False

    def program(self) -> Program:
        self._module = modules.draw(self._rng)
        net = modules.build(self._module)
        self._names = [name for name, _ in net.named_parameters()]
        self._head = next(name for name, param in net.named_parameters() if param is net.head.weight)
        self._modules = [name for name, _ in net.named_modules()]
        self._blocks = [name for name, _ in self._module["blocks"]]
        self._options = self._draw_options()
        self._stage = self._options["stage"]
        self._optimizers = self._draw_optimizers()
        is_loop = self._rng.random() < 0.5
        self._clips = self._rng.random() < 0.3  # in most turns of a loop, as the engine offers it
        actions: list[Action] = []
        length = self._rng.randint(5, 16)
        while len(actions) < length:
            if self._is_early:
                actions += self._draw_early_cycle()
            elif is_loop:
                actions += self._draw_cycle()
            else:
                actions.append(self._draw_action())
        if self._is_waiting:
            actions.append(self._backward(last=True))
        looks = self._rng.choice((1.0, 0.5, 0.2, 0.0, 0.0))
        for name, arguments in actions[:-1]:
            if self._rng.random() >= looks or (self._is_early and name == "backward"):
                arguments["look"] = False
        return Program(self._module, self._options, self._optimizers, actions)

    def _allows(self, variant: str) -> bool:
        return variant not in self._off

    def _maybe(self, chance: float, variant: str = "") -> bool:
        return self._rng.random() < chance and self._allows(variant)

    # -- Options and optimizers ------------------------------------------------------------------------------------

    @property
    def _is_early(self) -> bool:
        return bool(self._options.get("step") == "backward")

    @property
    def _waits_in_node(self) -> bool:
        """Whether gradients of micro-batches cannot be looked at before the last one."""
        return scopes_of({**self._options, "stage": self._stage}).waits_in_node

    def _draw_options(self) -> dict[str, Any]:
        rng = self._rng
        options: dict[str, Any] = {"stage": rng.choice((0, 1, 1, 2, 2, 3, 3, 3, 3))}
        if self._world == 4 and options["stage"] in _SCOPES and rng.random() < 0.7:
            options["scopes"] = rng.choice(_SCOPES[options["stage"]])
        if options["stage"] == 3:
            options["prefetch"] = rng.choice((0, 1, 1, 2, 3))
        if rng.random() < 0.5:
            options["units"] = rng.choice((["Block"], ["Linear"], ["Block", "Embedding"]))
        place = rng.random()
        if place < 0.2:
            options["offload"] = {"optimizer": "cpu"}
        elif place < 0.23:
            options["offload"] = {"optimizer": "cpu", "fraction": 0.5}
        elif place < 0.26 and options["stage"] == 3:
            options["offload"] = {"optimizer": rng.choice((None, "cpu")), "params": "cpu"}
        elif place < 0.29 and self._module.get("dtype") != "fp64" and self._allows("nvme"):
            options["offload"] = {"optimizer": "nvme"}
        if self._maybe(0.25, "deferred"):
            options["step"] = rng.choice(("deferred", "deferred", "now"))
        elif self._may_step_early(options) and self._maybe(0.08, "early"):
            options["step"] = "backward"
        if self._maybe(0.1, "reduce_dtype"):
            options["reduce_dtype"] = "fp32"
        return options

    def _may_step_early(self, options: dict[str, Any]) -> bool:
        on_disks = (options.get("offload") or {}).get("optimizer") == "nvme"
        return self._module.get("dtype") != "fp64" and options["stage"] > 0 and not on_disks

    def _draw_optimizers(self) -> list[dict[str, Any]]:
        rng = self._rng
        names = list(self._names)
        if rng.random() < 0.15:
            names = sorted(rng.sample(names, max(1, len(names) - 2)), key=self._names.index)  # some are in none
        self._free = [name for name in self._names if name not in names]
        if self._is_early or rng.random() < 0.65 or not self._allows("two optimizers"):
            whole = names == self._names and rng.random() < 0.5
            return [self._draw_optimizer(None if whole else names)]
        first = set(rng.sample(names, len(names) // 2)) if rng.random() < 0.5 else set(names[: len(names) // 2])
        parts = [name for name in names if name in first], [name for name in names if name not in first]
        return [self._draw_optimizer(part) for part in parts if part]

    def _draw_optimizer(self, names: list[str] | None) -> dict[str, Any]:
        rng = self._rng
        offload = self._options.get("offload") or {}
        own = [each for each in _OPTIMIZERS if each[0] in _OWN_STEP and "amsgrad" not in each[1]]
        own = [each for each in own if not each[1].keys() & {"foreach", "fused"}]
        only_own = self._is_early or offload.get("optimizer") == "nvme"
        name, options = rng.choice(own if only_own else _OPTIMIZERS)
        spec: dict[str, Any] = {"class": name, "lr": rng.choice((0.01, 0.03))}
        if options:
            spec["options"] = dict(options)
        if names is not None:
            cut = rng.randint(0, len(names)) if rng.random() < 0.5 else 0
            spec["groups"] = [part for part in (names[:cut], names[cut:]) if part]
        return spec

    # -- Actions ---------------------------------------------------------------------------------------------------

    def _seed(self) -> int:
        return self._rng.randint(0, 99)

    def _some(self) -> list[str]:
        names = self._rng.sample(self._names, self._rng.randint(1, min(4, len(self._names))))
        return sorted(names, key=self._names.index)

    def _opt(self) -> int:
        return self._rng.randrange(len(self._optimizers))

    def _draw_action(self) -> Action:
        weights: dict[str, float] = {"backward": 6, "evaluate": 1.2, "tell": 0.5, "fail": 0.8}
        if not self._is_waiting:
            weights |= {
                "write": 0.9,
                "load": 0.3,
                "lr": 0.3,
                "attach": 0.25,
                "freeze": 0.6,
                "assign": 0.5,
                "closure": 0.3,
                "save": 0.3,
            }
            weights |= {"resume": 0.8} if self._saved == self._held else {}
            weights |= {"add_group": 1.0} if self._free else {}
            weights |= {"zero_grad": 1.5, "step": 5 if self._has_grads else 0.3}
            weights |= {"clip_norm": 1.6, "clip_value": 0.5, "edit": 1.2, "read": 1.2} if self._has_grads else {}
        if not self._allows("unused clip"):
            weights["clip_norm"] = 0
        allowed = {name: weight for name, weight in weights.items() if self._allows(name)}
        if not self._allows("assign by_grad") and not self._allows("assign random"):
            allowed.pop("assign", None)
        name = self._rng.choices(list(allowed), list(allowed.values()))[0]
        return getattr(self, f"_{name}")()  # type: ignore[no-any-return]

    def _draw_cycle(self) -> list[Action]:
        """Draw a turn of a usual loop, in which something unusual may happen anywhere."""
        whole, part = (lambda: self._backward(last=True)), (lambda: self._backward(last=False))
        turn: list[Callable[[], Action]] = [part, whole] if self._rng.random() < 0.3 else [whole]
        between = [self._clip_norm, self._clip_norm, self._clip_value, self._edit, self._read]
        if self._clips and self._rng.random() < 0.6:
            turn.append(lambda: ("clip_norm", {"opt": 0, "max_norm": self._rng.choice((0.01, 0.1))}))
        elif not self._clips and self._rng.random() < 0.6:
            turn.append(self._rng.choice(between))
        steps = [lambda opt=opt: ("step", {"opt": opt}) for opt in range(len(self._optimizers))]
        turn += steps
        turn.insert(self._rng.choice((0, len(turn))), self._zero_grad)
        actions = []
        for draw_next in turn:
            if self._rng.random() < 0.15:
                actions.append(self._draw_action())
            if self._is_waiting and draw_next not in (whole, part):
                actions.append(whole())
            actions.append(draw_next())
        return actions

    def _draw_early_cycle(self) -> list[Action]:
        """Draw what a step in the backward allows: one backward, the step, ``zero_grad``."""
        self._has_grads = False
        actions = [self._backward(last=True, plain=True), ("step", {}), ("zero_grad", {})]
        if self._rng.random() < 0.3:
            actions.append(self._rng.choice((self._evaluate, self._write, self._lr, self._save))())
            if actions[-1][0] == "save":
                actions.append(self._resume())
        return actions

    def _use(self) -> Any:
        if self._rng.random() < 0.4:
            return None

        def subset() -> list[str]:
            return [name for name in self._blocks if self._rng.random() < 0.6]

        if self._allows("ranks differ") and self._rng.random() < 0.5:
            return [subset() for _ in range(self._world)]
        return subset()

    def _backward(self, last: bool | None = None, plain: bool = False) -> Action:
        rng = self._rng
        arguments: dict[str, Any] = {"seed": self._seed()}
        use = self._use()
        if use is not None:
            arguments["use"] = use
        is_last = rng.random() > 0.25 if last is None else last
        is_last = is_last or self._waits_in_node
        if not is_last:
            arguments["last"] = False
        if self._maybe(0.3, "bare forward"):
            arguments["scope"] = False
        elif self._maybe(0.15, "parts"):
            arguments["parts"] = True
        if self._maybe(0.3, "bare backward"):
            arguments["explicit"] = False
        if self._maybe(0.2, "floats"):
            arguments["floats"] = True
        if not plain:
            if self._maybe(0.1, "penalty input"):
                arguments["penalty"] = "input"
            elif self._maybe(0.05, "penalty weights"):
                arguments["penalty"] = "weights"
            if "penalty" in arguments and not self._allows("bare penalty"):
                arguments.pop("scope", None)
            if self._maybe(0.07, "times"):
                arguments["times"] = 2
            if self._maybe(0.07, "forwards"):
                arguments["forwards"] = 2
        if arguments.get("scope", True) and arguments.get("explicit", True) and self._maybe(0.06, "idle"):
            arguments["idle"] = [rng.randrange(self._world)]
        if is_last:
            self._has_grads = True
        self._is_waiting = not is_last
        return "backward", arguments

    def _step(self) -> Action:
        return "step", {"opt": self._opt()}

    def _closure(self) -> Action:
        self._has_grads = True
        return "closure", {"opt": self._opt(), "seed": self._seed()}

    def _zero_grad(self) -> Action:
        arguments: dict[str, Any] = {"opt": self._opt()}
        if self._maybe(0.3, "module zero_grad"):
            arguments["opt"] = None
        if self._rng.random() < 0.3:
            arguments["none"] = False
        elif len(self._optimizers) == 1 or arguments["opt"] is None:
            self._has_grads = False
        return "zero_grad", arguments

    def _clip_norm(self) -> Action:
        arguments: dict[str, Any] = {"opt": self._opt(), "max_norm": self._rng.choice((0.01, 0.1, 10.0))}
        if self._maybe(0.4, "clip by hand"):
            arguments["by_hand"] = True
            if self._rng.random() < 0.5:
                arguments["opt"] = None
        return "clip_norm", arguments

    def _clip_value(self) -> Action:
        arguments: dict[str, Any] = {"opt": self._opt(), "value": self._rng.choice((0.01, 0.1))}
        if self._maybe(0.4, "clip by hand"):
            arguments["by_hand"] = True
        return "clip_value", arguments

    def _lr(self) -> Action:
        return "lr", {"opt": self._opt(), "factor": self._rng.choice((0.5, 0.0, 2.0))}

    def _attach(self) -> Action:
        if self._rng.random() < 0.5:
            return "attach", {}
        self._optimizers = self._draw_optimizers()
        return "attach", {"optimizers": self._optimizers}

    @property
    def _held(self) -> Any:
        return repr(self._optimizers), list(self._free)

    def _add_group(self) -> Action:
        names = self._free[self._rng.randrange(len(self._free)) :]
        self._free = [name for name in self._free if name not in names]
        return "add_group", {"opt": self._opt(), "names": names, "lr": self._rng.choice((0.01, 0.03))}

    def _save(self) -> Action:
        self._saved = self._held
        return "save", {"full": True} if self._rng.random() < 0.3 else {}

    def _resume(self) -> Action:
        self._has_grads = False
        if self._rng.random() < 0.5:
            return "resume", {}
        only = 3 if "params" in (self._options.get("offload") or {}) else None
        stages = [stage for stage in range(4) if only in (None, stage) and (stage > 0 or not self._is_early)]
        stage = self._rng.choice(stages)
        self._stage = stage
        return "resume", {"stage": stage}

    def _freeze(self) -> Action:
        if self._rng.random() < 0.3:
            return "freeze", {"value": True}
        names = [name for name in self._some() if name != self._head]  # a loss always needs one
        return "freeze", {"names": names, "value": self._rng.random() < 0.4}

    def _edit(self) -> Action:
        hows = [how for how in _EDITS if self._allows(f"edit {how}")]
        arguments: dict[str, Any] = {"how": self._rng.choice(hows)}
        if self._rng.random() < 0.6:
            arguments["names"] = self._some()
        return "edit", arguments

    def _assign(self) -> Action:
        self._has_grads = True
        arguments: dict[str, Any] = {"seed": self._seed()}
        if self._rng.random() < 0.6:
            arguments["names"] = self._some()
        by_grad = [
            by_grad for by_grad in (False, True) if self._allows("assign by_grad" if by_grad else "assign random")
        ]
        if self._rng.choice(by_grad):
            arguments["by_grad"] = True
            if self._maybe(0.5, "bare autograd.grad"):
                arguments["scope"] = False
        return "assign", arguments

    def _read(self) -> Action:
        kinds = ("norm", "norms", "has_grad", "params", "state_dict")
        what = self._rng.choice([what for what in kinds if self._allows(f"read {what}")])
        arguments: dict[str, Any] = {"what": what}
        if what == "norm" and self._rng.random() < 0.5:
            arguments["opt"] = self._opt()
        if what in ("norm", "norms") and self._rng.random() < 0.3:
            arguments["order"] = self._rng.choice((1.0, float("inf")))
        return "read", arguments

    def _write(self) -> Action:
        hows = ("all", "rank0", "open") if self._stage < 3 and self._allows("open write") else ("all", "rank0")
        arguments: dict[str, Any] = {"how": self._rng.choice(hows)}
        if self._rng.random() < 0.7:
            arguments["names"] = self._some()
        if self._rng.random() < 0.3:
            arguments["data"] = True
        elif arguments["how"] == "open" and self._maybe(0.4, "pointed"):
            arguments["point"] = True
        return "write", arguments

    def _load(self) -> Action:
        return "load", {}

    def _evaluate(self) -> Action:
        arguments: dict[str, Any] = {"seed": self._seed(), "mode": self._rng.choice(("no_grad", "inference", "grad"))}
        if self._rng.random() < 0.4:
            arguments["eval"] = False
        if self._rng.random() < 0.5:
            arguments["scope"] = True
        if self._maybe(0.4, "submodules"):
            blocks = [f"blocks.{name}" for name in self._blocks]
            inner = [f"{block}.up" for block in blocks]
            arguments["what"] = self._rng.choice(["embedding", "head", "norm", *blocks, *inner])
            is_unit = arguments["what"] in blocks and "Block" in self._options.get("units", ())
            if not is_unit and not self._allows("bare forwards of modules that are no units"):
                arguments["scope"] = True
        else:
            use = self._use()
            if use is not None:
                arguments["use"] = use
        return "evaluate", arguments

    def _fail(self) -> Action:
        ats = [at for at in ("scope", "pre", "post", "grad", "param") if self._allows(f"fail {at}")]
        self._has_grads = self._is_waiting = False
        arguments: dict[str, Any] = {"at": self._rng.choice(ats), "seed": self._seed()}
        arguments["module"] = self._rng.choice([name for name in self._modules if name and name != "blocks"])
        if self._rng.random() < 0.4:
            arguments["scope"] = False
        return "fail", arguments

    def _tell(self) -> Action:
        return "tell", {"verb": self._rng.choice(("flush", "offload_states", "reload_states"))}
