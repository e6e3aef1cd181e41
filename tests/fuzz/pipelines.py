"""Random programs for pipelines: training steps that take values of early stages around the blocks in many ways.

A program is text. Its lines come in *features*, each of which works without the others, so that a program is made
smaller by leaving features out.
"""

from __future__ import annotations

import linecache
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tests.fuzz.pipeline_blocks import BLOCKS, VOCAB

__all__ = ["PipelineProgram", "batches", "draw", "module_of", "show", "smaller"]

Feature = tuple[tuple[int, str], ...]  # (place, line); see `_Places`

INIT, FRONT, EMBEDDED = -2, -1, 0  # in `__init__`; in front of the embedding; behind it, and 1 to n behind block i - 1


@dataclass(frozen=True)
class PipelineProgram:
    """A program and the options with which it is trained.

    Attributes:
        blocks: Kinds of the blocks.
        features: What the step does around them.
        tied: Whether the head has the embedding's weight.
        lengths: Of the sequences of every batch.
        flags: Plain numbers of every batch.
        options: Of ``Pipeline``.
        zero: The ZeRO stage.
        copies: Of the model.
        seed: Of the values.
    """

    blocks: tuple[str, ...]
    features: tuple[Feature, ...] = ()
    tied: bool = False
    lengths: tuple[int, ...] = (5, 5, 5)
    flags: tuple[int, ...] = (0, 0, 0)
    options: dict[str, Any] = field(default_factory=lambda: {"stages": 2, "schedule": "1f1b", "partition": "uniform"})
    zero: int = 1
    copies: int = 1
    seed: int = 0

    @property
    def world(self) -> int:
        """Number of ranks."""
        return int(self.options["stages"]) * self.copies

    @property
    def microbatches(self) -> int:
        """Pieces of a batch."""
        return int(self.options.get("microbatches") or self.options["stages"])


# -- As code -----------------------------------------------------------------------------------------------------------


def show(program: PipelineProgram) -> str:
    """Return the program as code: a class ``Program``."""
    lines: dict[int, list[str]] = {}
    for feature in program.features:
        for place, line in feature:
            lines.setdefault(place, []).extend(line.split("\n"))
    step = [*lines.get(FRONT, ()), "hidden = self.embedding(ids)", *lines.get(EMBEDDED, ())]
    for number, kind in enumerate(program.blocks):
        call = f"self.blocks[{number}](hidden, mask)"
        if kind == "ReturnsTuple":
            step.append(f"hidden, extra{number} = {call}")
        elif kind == "ReturnsDict":
            step += [f"output = {call}", f"hidden, extra{number} = output['hidden'], output['extra']"]
        else:
            step.append(f"hidden = {call}")
        step += lines.get(number + 1, ())
    head = len(program.blocks) + 1
    step += ["logits = self.head(self.norm(hidden))", *lines.get(head, ())]
    step += ["loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())", *lines.get(head + 1, ())]
    step += ["self.log('loss', loss, on_step=False, on_epoch=True)", "return loss"]
    init = [f"super().__init__({list(program.blocks)!r}, tied={program.tied})", *lines.get(INIT, ())]
    front = ["ids, labels, flag = batch['ids'], batch['labels'], batch['flag']"]
    front.append("mask = (ids > 0).to(self.shift.dtype).unsqueeze(-1)")
    return "\n".join([
        f"# zero={program.zero}, copies={program.copies}, {program.options}",
        f"# lengths={program.lengths}, flags={program.flags}, seed={program.seed}",
        "class Program(Around):",
        "    def __init__(self):",
        *(f"        {line}" for line in init),
        "",
        "    def training_step(self, batch, batch_idx):",
        *(f"        {line}" for line in [*front, *step]),
        "",
    ])  # fmt: skip


def module_of(program: PipelineProgram) -> Any:
    """Return the module of a program. Its values depend on the program's seed."""
    source = show(program)
    name = f"<pipeline program {hash(source)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    space: dict[str, Any] = {}
    exec("import torch\nimport torch.nn.functional as F\nfrom torch import nn", space)
    exec("from tests.fuzz.pipeline_blocks import *", space)
    exec(compile(source, name, "exec"), space)
    torch.manual_seed(program.seed)
    return space["Program"]()


def batches(program: PipelineProgram, copy: int) -> list[dict[str, Any]]:
    """Return the batches of a copy of the model."""
    generator = torch.Generator().manual_seed(program.seed * 1000 + copy)
    return [
        {
            "ids": torch.randint(0, VOCAB, (2 * program.microbatches, length), generator=generator),
            "labels": torch.randint(0, VOCAB, (2 * program.microbatches, length), generator=generator),
            "flag": flag,
        }
        for length, flag in zip(program.lengths, program.flags, strict=True)
    ]


def smaller(program: PipelineProgram) -> Iterator[PipelineProgram]:
    """Yield programs that are smaller by one cut."""
    features = program.features
    size = len(features)
    while size:
        for start in range(0, len(features), size):
            yield replace(program, features=features[:start] + features[start + size :])
        size //= 2
    for change in (
        {"zero": 1}, {"copies": 1}, {"tied": False}, {"lengths": (5, 5, 5)}, {"flags": (0, 0, 0)},
        {"options": {**program.options, "schedule": "1f1b"}}, {"options": {**program.options, "microbatches": None}},
    ):  # fmt: skip
        if any(getattr(program, name) != value for name, value in change.items()):
            yield replace(program, **change)  # type: ignore[arg-type]
    for number, kind in enumerate(program.blocks):
        if kind != "Linear":
            yield replace(program, blocks=(*program.blocks[:number], "Linear", *program.blocks[number + 1 :]))


# -- Drawing -----------------------------------------------------------------------------------------------------------


def draw(seed: int, worlds: tuple[int, ...] = (2,), schedule: str | None = None) -> PipelineProgram:
    """Return the program of a seed; it runs on one of ``worlds`` ranks, and by ``schedule`` if that is given."""
    drawn = random.Random(seed)
    world = drawn.choice(worlds)
    stages = drawn.choice([2, world]) if world > 2 else 2
    schedules = ["1f1b", "gpipe", "zb_h1", *(["interleaved_1f1b"] if stages == 2 else [])]
    drawn_schedule = drawn.choice(schedules)
    blocks = tuple(drawn.choice(list(BLOCKS)) for _ in range(drawn.randint(4, 6)))
    options = {
        "stages": stages,
        "schedule": schedule or drawn_schedule,
        "microbatches": drawn.choice([stages, 2 * stages]),
        "partition": drawn.choice(["uniform", "parameters"]),
    }
    length = drawn.choice([(5, 5, 5), (5, 6, 5), (4, 5, 6)])
    flags = drawn.choice([(0, 0, 0), (0, 1, 2), (1, 2, 1)])
    program = PipelineProgram(blocks, (), drawn.random() < 0.3, length, flags, options, drawn.choice([1, 2, 3]),
                              world // stages, seed)  # fmt: skip
    makers = drawn.choices(list(FEATURES), [weight for _, weight in FEATURES.values()], k=drawn.randint(1, 5))
    return replace(
        program, features=tuple(FEATURES[name][0](_Places(drawn, blocks, number)) for number, name in enumerate(makers))
    )


class _Places:
    """Draws places and names for a feature.

    Args:
        drawn: The generator.
        blocks: Kinds of the blocks.
        number: Of the feature; names end in it.
    """

    def __init__(self, drawn: random.Random, blocks: tuple[str, ...], number: int) -> None:
        self.drawn = drawn
        self.blocks = blocks
        self.number = number
        self.first = drawn.randint(EMBEDDED, len(blocks) - 1)
        self.later = drawn.randint(self.first + drawn.choice([0, 1, 1]), len(blocks))
        self.head = len(blocks) + 1
        self.loss = len(blocks) + 2
        self.name = f"v{number}"
        self.taken = drawn.choice(_TAKEN).format(v=self.name)  # an early value

    def one(self, *texts: str) -> str:
        return self.drawn.choice(texts).format(v=self.name, k=self.number)


_TAKEN = (
    "{v} = hidden",
    "{v} = hidden",
    "{v} = hidden.detach()",
    "{v} = hidden.clone()",
    "{v} = hidden[:, :1]",
    "{v} = hidden.mean(1, keepdim=True)",
    "{v} = hidden * mask",
    "{v} = (hidden + self.shift).view(hidden.shape)",
    "with torch.no_grad():\n    {v} = 2.0 * hidden",
    "{v} = {{'kept': [hidden]}}['kept'][0]",
    "{v} = torch.where(hidden > 0, hidden, 0.1 * hidden)",
    "{v} = F.normalize(hidden, dim=-1)",
    "{v}, _ = hidden.sort(dim=1)",
)


def _mixes(places: _Places) -> Feature:
    """Mixes an early value into the hidden states."""
    mix = places.one(
        "hidden = hidden + 0.3 * {v}",
        "hidden += 0.3 * {v}",
        "hidden.add_({v}, alpha=0.2)",
        "hidden = torch.cat([hidden, {v}.expand_as(hidden)], -1)[..., ::2]",
        "hidden = torch.stack([hidden, {v}.expand_as(hidden)]).mean(0)",
        "hidden = hidden.clone()\nhidden[:, 0] = {v}[:, 0]",
        "hidden[:, 0] = {v}[:, 0]",
        "hidden[0] *= 0.5\nhidden = hidden + {v}",
        "both = torch.zeros(2, *hidden.shape, dtype=hidden.dtype)\nboth[0] = {v}\nboth[1] = hidden\n"
        "hidden = both.sum(0)",
        "hidden = torch.where(mask > 0, hidden, {v})",
        "hidden = hidden * (1.0 + 0.1 * {v}.detach())",
        "with torch.no_grad():\n    scale = torch.add({v}.mean((1, 2), keepdim=True), 1.0,"
        " out=torch.ones(len(ids), 1, 1, dtype=hidden.dtype))\nhidden = hidden * scale",
        "hidden, {v} = hidden - {v}, hidden\nhidden = hidden + {v}",
        "hidden = torch.lerp(hidden, {v}.expand_as(hidden), 0.3)",
        "{v} *= 0.5\nhidden = hidden + {v}",
    )
    return ((places.first, places.taken), (places.later, mix))


def _in_loss(places: _Places) -> Feature:
    """Adds an early value to the loss."""
    add = places.one(
        "loss += 0.1 * {v}.square().mean()",
        "loss = loss + 0.1 * {v}.square().mean()",
        "loss += 0.1 * F.mse_loss(hidden, {v}.expand_as(hidden))",
        "total = torch.zeros(2, dtype=hidden.dtype)\ntotal[0] = loss\ntotal[1] = 0.1 * {v}.square().mean()\n"
        "loss = total.sum()",
        "loss = torch.stack([loss, 0.1 * {v}.square().mean()]).sum()",
        "loss = loss + 0.1 * ({v} * hidden).mean()",
        "loss = loss * (1.0 + 0.1 * {v}.detach().mean())",
    )
    return ((places.first, places.taken), (places.loss, add))


def _in_logits(places: _Places) -> Feature:
    mix = places.one(
        "logits = logits + {v}.mean(-1, keepdim=True)",
        "logits += 0.1 * {v}.sum(-1, keepdim=True)",
        "logits[..., 0] += {v}.mean(-1)",
        "logits = logits + 0.1 * F.linear({v}, self.head.weight.detach())",
    )
    return ((places.first, places.taken), (places.head, mix))


def _states(places: _Places) -> Feature:
    """Collects hidden states."""
    name = places.name
    kept = places.one("[]", "{{}}")
    end = len(places.blocks)
    chosen = sorted(places.drawn.sample(range(end + 1), places.drawn.randint(1, end + 1)))
    appended = [(place, f"{name}.append(hidden)" if kept == "[]" else f"{name}[{place}] = hidden") for place in chosen]
    values = name if kept == "[]" else f"{name}.values()"
    used = places.drawn.choice([
        (places.loss, f"loss = loss + 0.1 * sum(one.square().mean() for one in {values})"),
        (places.loss, f"for one in {values}:\n    loss += 0.1 * one.square().mean()"),
        (places.head, f"logits = logits + torch.stack(list({values})).mean((0, 3), keepdim=False).unsqueeze(-1)"),
        (end, f"hidden = hidden + 0.1 * sum({values})"),
    ])  # fmt: skip
    return ((FRONT, f"{name} = {kept}"), *appended, used)


def _taps(places: _Places) -> Feature:
    """Registers forward hooks."""
    name, number = places.name, places.drawn.randrange(len(places.blocks))
    module = places.drawn.choice([f"self.blocks[{number}]", "self.embedding", f"self.blocks[{number}]"])
    form = places.drawn.randrange(5)
    if form == 4:
        clamp = "hidden_of(o).requires_grad and hidden_of(o).register_hook(lambda g: g.clamp(-1e-3, 1e-3)) and None"
        return (
            (INIT, f"self.blocks[{number}].register_forward_hook(lambda m, a, o: {clamp})"),
            (number + 1, f"{name} = hidden"),
            (places.loss, f"loss = loss + 0.1 * {name}.square().mean()"),
        )
    if form == 0:
        return (
            (INIT, f"self.{name} = []"),
            (INIT, f"{module}.register_forward_hook(lambda m, a, o: self.{name}.append(hidden_of(o)))"),
            (FRONT, f"self.{name}.clear()"),
            (places.loss, f"loss = loss + 0.1 * sum(one.square().mean() for one in self.{name})"),
        )
    if form == 1:
        return (
            (INIT, f"self.{name} = {{}}"),
            (INIT, f"{module}.register_forward_hook(lambda m, a, o: self.{name}.update(x=hidden_of(o).detach()))"),
            (places.loss, f"loss = loss * (1.0 + 0.1 * self.{name}['x'].mean())"),
        )
    if form == 2:
        hooked = places.drawn.choice(["self.embedding", "self.norm"])
        return ((INIT, f"{hooked}.register_forward_hook(lambda m, a, o: 0.7 * o)"),)
    return (
        (INIT, f"self.{name} = []"),
        (INIT, f"self.blocks[{number}].register_forward_pre_hook(lambda m, a: self.{name}.append(a[0]))"),
        (FRONT, f"self.{name}.clear()"),
        (places.loss, f"loss += 0.1 * self.{name}[0].square().mean()"),
    )


_KEEPERS = {"LeavesAttribute": ".aux", "LeavesList": ".aux[0]", "LeavesBuffer": ".aux", "WritesView": ".aux",
            "Averages": ".mean.mean()"}  # fmt: skip


def _auxiliary(places: _Places) -> Feature:
    """Adds up what blocks leave in themselves, or return besides."""
    found = []
    for number, kind in enumerate(places.blocks):
        if kind in _KEEPERS and kind != "Averages":
            found.append((number, f"self.blocks[{number}]{_KEEPERS[kind]}"))
        elif kind in ("ReturnsTuple", "ReturnsDict"):
            found.append((number, f"extra{number}.mean()"))
    if not found:
        return _in_loss(places)
    form = places.drawn.randrange(4)
    if form == 0:
        return tuple((places.loss, f"loss += 0.2 * {value}") for _, value in found)
    if form == 1:
        return ((places.loss, f"loss = loss + 0.2 * sum([{', '.join(value for _, value in found)}])"),)
    number, value = places.drawn.choice(found)
    later = places.drawn.randint(number + 1, len(places.blocks))
    if form == 2:
        return ((later, f"hidden = hidden + 0.1 * {value}"),)
    return (
        (FRONT, f"{places.name} = []"),
        *((number + 1, f"{places.name}.append({value})") for number, value in found),
        (places.loss, f"loss = loss + 0.2 * torch.stack({places.name}).sum()"),
    )


def _logs(places: _Places) -> Feature:
    name = places.name
    form = places.drawn.randrange(4)
    options = "on_step=False, on_epoch=True"
    if form == 0:
        return ((places.first, f"self.log('{name}', hidden.detach().mean(), {options})"),)
    if form == 1:
        return (
            (places.first, f"{name} = hidden"),
            (places.loss, f"self.log('{name}', loss.detach() + {name}.detach().mean(), {options})"),
        )
    if form == 2:
        return ((FRONT, f"self.log('{name}', ids.to(mask.dtype).mean(), {options})"),)
    return (
        (places.first, f"{name} = hidden.mean()"),
        (places.loss, f"self.log('{name}', {name}, {options})\nloss = loss + 0.1 * {name}"),
    )


def _root_buffer(places: _Places) -> Feature:
    name = places.name
    form = places.drawn.randrange(6)
    init = (INIT, f"self.register_buffer('{name}', torch.tensor(0.5))")
    use = places.drawn.choice([
        (places.later, f"hidden = hidden * (1.0 + 0.1 * self.{name})"),
        (places.loss, f"loss = loss * (1.0 + self.{name})"),
    ])  # fmt: skip
    if form == 0:
        return (init, use)
    if form == 1:
        return (init, (FRONT, f"self.{name} += 0.1"), use)
    if form == 2:
        return (init, (places.loss, f"loss = loss * (1.0 + self.{name})\nself.{name}.mul_(0.9)"))
    if form in (4, 5):  # changed behind the blocks
        change = f"self.{name}.mul_(0.9)" if form == 4 else f"self.{name} = 0.5 * self.{name} + loss.detach()"
        return (init, use, (places.loss, change))
    return (init, (places.first, f"self.{name} = 0.9 * self.{name} + 0.1"), use)


def _counter(places: _Places) -> Feature:
    name = places.name
    form = places.drawn.randrange(4)
    if form == 0:
        init, change, value = "0", f"self.{name} += 1", f"self.{name} % 3"
    elif form == 1:
        init, change, value = "[]", f"self.{name}.append(1)", f"len(self.{name}) % 3"
    elif form == 2:
        init, change, value = "{'n': 0}", f"self.{name}['n'] += 1", f"self.{name}['n'] % 3"
    else:
        init, change, value = "torch.zeros(())", f"self.{name} += 1", f"self.{name} % 3"
    at = places.drawn.choice([FRONT, places.first])
    use = places.drawn.choice([
        (places.later, f"hidden = hidden * (1.0 + 0.1 * ({value}))"),
        (places.loss, f"loss = loss * (1.0 + 0.1 * ({value}))"),
        (places.later, f"if {value} == 1:\n    hidden = hidden * 1.1"),
    ])  # fmt: skip
    return ((INIT, f"self.{name} = {init}"), (at, change), use)


def _by_flag(places: _Places) -> Feature:
    """Depends on a plain number of the batch."""
    name = places.name
    return places.drawn.choice([
        ((places.first, f"{name} = hidden"), (places.later, f"if flag > 0:\n    hidden = hidden + 0.2 * {name}")),
        ((places.first, f"{name} = hidden"), (places.loss, f"if flag > 1:\n    loss += {name}.mean()")),
        ((places.later, "hidden = hidden * (1.0 + 0.1 * flag)"),),
        (
            (places.first, f"{name} = hidden if flag == 0 else hidden.detach()"),
            (places.head, f"logits += {name}.mean()"),
        ),
        ((FRONT, "mask = mask * (flag > 0)"),),
    ])  # fmt: skip


def _masks(places: _Places) -> Feature:
    return places.drawn.choice([
        ((FRONT, "mask = torch.rand(ids.shape[1], 1, dtype=mask.dtype).expand_as(mask)"),),
        ((EMBEDDED, "mask = torch.sigmoid(hidden.detach().mean(-1, keepdim=True))"),),
        ((EMBEDDED, "mask = mask * torch.sigmoid(hidden.mean(-1, keepdim=True))"),),
        ((places.later, "mask = 0.5 * mask"),),
        ((places.later, "mask *= 0.5"),),
        ((places.loss, "loss = loss + 0.1 * (hidden * mask).mean()"),),
    ])  # fmt: skip


def _parameter(places: _Places) -> Feature:
    """Uses a parameter that every stage has."""
    return places.drawn.choice([
        ((places.later, "hidden = hidden + self.shift"),),
        ((places.later, "hidden += self.shift"),),
        ((places.later, "hidden = hidden * self.shift.exp()"), (places.loss, "loss = loss + 0.1 * self.shift.sum()")),
        ((places.first, "hidden = hidden + self.shift"), (places.later, "hidden = hidden - 0.5 * self.shift")),
    ])  # fmt: skip


def _gradient_hooks(places: _Places) -> Feature:
    hook = places.one("lambda grad: 0.5 * grad", "lambda grad: grad.clamp(-1e-3, 1e-3)")
    name = places.name
    end = places.drawn.choice([
        (places.loss, f"loss = loss + 0.1 * {name}.square().mean()"),
        (places.later, f"hidden = hidden + 0.3 * {name}"),
    ])  # fmt: skip
    return (
        (places.first, f"{name} = hidden\nif {name}.requires_grad:\n    {name}.register_hook({hook})"),
        end,
    )


def _reads(places: _Places) -> Feature:
    """Reads a value, which is refused where it is of an earlier stage."""
    return ((places.first, "hidden = hidden / (1.0 + hidden.detach().abs().max().item())"),)


FEATURES: dict[str, tuple[Callable[[_Places], Feature], float]] = {
    "mixes": (_mixes, 6.0),
    "in-loss": (_in_loss, 4.0),
    "in-logits": (_in_logits, 2.0),
    "states": (_states, 2.0),
    "taps": (_taps, 2.0),
    "auxiliary": (_auxiliary, 3.0),
    "logs": (_logs, 1.5),
    "root-buffer": (_root_buffer, 1.0),
    "counter": (_counter, 1.5),
    "by-flag": (_by_flag, 1.5),
    "masks": (_masks, 1.5),
    "parameter": (_parameter, 1.5),
    "gradient-hooks": (_gradient_hooks, 1.0),
    "reads": (_reads, 0.2),
}
