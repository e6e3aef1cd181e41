"""The plan of a whole model: read, given or found for every kind of block, and verified."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import FunctionType, MethodType

import torch
from torch import nn

from lightning_zero.moe.layer import MoE
from lightning_zero.parallel.tensor.blocks import (
    Block,
    Call,
    Capture,
    ResultsRead,
    blocks_of,
    capture,
    distinct_blocks,
    leaving_results,
    results_read,
)
from lightning_zero.parallel.tensor.check import LIMIT, BlockCheck, check_block
from lightning_zero.parallel.tensor.model_plan import model_plan
from lightning_zero.parallel.tensor.plan import TensorParallel, TensorPlan, matches
from lightning_zero.parallel.tensor.resolution import names_of, params_cut_apart, resolve
from lightning_zero.parallel.tensor.search import find_plan, integers_of, reads_its_number
from lightning_zero.parallel.tensor.streams import with_sequence
from lightning_zero.parallel.tensor.vocabulary import is_vocabulary_rule, vocabulary_plan

__all__ = ["ModelPlan", "PlannedBlock", "plan_model"]

_LEAKS = "code outside of the block reads a tensor that the block computes and does not return"


@dataclass(frozen=True)
class PlannedBlock:
    """The plan of one kind of block, or of a module outside of the blocks.

    Attributes:
        names: Of all blocks of this kind.
        plan: With names relative to the block.
        check: None where the model does not call the block, so that it stays whole.
        numel: Elements of the parameters of one of them.
        cut_numel: Those that are cut.
    """

    names: tuple[str, ...]
    plan: TensorPlan
    check: BlockCheck | None
    numel: int
    cut_numel: int


@dataclass(frozen=True)
class ModelPlan:
    """A verified plan of a model.

    Attributes:
        plan: With the model's names.
        size: Number of ranks.
        blocks: Its parts.
        numel: Elements of all parameters.
        cut_numel: Those that are cut.
        notes: Sentences on parts that stay whole.
    """

    plan: TensorPlan
    size: int
    blocks: tuple[PlannedBlock, ...]
    numel: int
    cut_numel: int
    notes: tuple[str, ...] = ()

    @property
    def cut_fraction(self) -> float:
        """The part of the parameters, by elements, of which a rank has its share alone."""
        return self.cut_numel / max(self.numel, 1)

    def lines(self) -> list[str]:
        """Return the plan, the cut fraction and the checks in words."""
        rows = []
        for planned in self.blocks:
            alike = f" and {len(planned.names) - 1} more" if len(planned.names) > 1 else ""
            share = planned.cut_numel / max(planned.numel, 1)
            state = "is not called" if planned.check is None else f"largest error {planned.check.error:.1e}"
            if planned.check is not None and not planned.check.is_right:
                is_cut = bool(planned.plan.patterns)
                state = "WRONG, " + state if is_cut else "computes something else in each run, and stays whole"
            rows.append(f"  {planned.names[0]}{alike}: {share:.1%} cut, {state}")
        return [
            f"tensor parallelism over {self.size} ranks: {self.cut_fraction:.1%} of {self.numel} elements cut",
            *_plan_lines(self.plan),
            "checks (limit 1e-4):",
            *rows,
            *(f"note: {note}" for note in self.notes),
        ]


def plan_model(module: nn.Module, options: TensorParallel, call: Call, whole: Collection[str] = ()) -> ModelPlan:
    """Return the plan of a model for the options, verified block by block, without a process group.

    Args:
        module: The model. It is not changed. It may be without values, on the meta device.
        options: ``options.plan`` is the plan, or the way to find it.
        call: Runs a copy of the model that it is given, for example on a batch of two samples.
        whole: Names of modules that stay whole: the experts that expert parallelism divides.

    Raises:
        ValueError: The plan does not fit the model, or a block computes something else with it.
    """
    if options.size == 1:
        numel = sum(param.numel() for param in module.parameters())
        return ModelPlan(TensorPlan({}), 1, (), numel, 0, ("one rank computes everything",))
    with torch.device("cpu"):  # where copies are, also if the program makes tensors on another device by default
        return _Planner(module, options, call, whole).plan(call)


class _Planner:
    """One call of ``plan_model``."""

    _call: Call

    def __init__(self, module: nn.Module, options: TensorParallel, call: Call, whole: Collection[str]) -> None:
        self._module = module
        self._options = options
        self._whole = list(whole)
        self._size = options.size
        self._block_names = blocks_of(module)
        self._blocks = distinct_blocks(module, self._block_names)
        self._notes: list[str] = []
        self._given = self._read()
        vocabulary = self._vocabulary()
        self._outside = self._given_outside().merged(vocabulary)
        self._pieces = _pieces(self._module, self._outside, self._block_names)
        names = [*(block.name for block in self._blocks), *self._pieces]
        self._captured: Capture = capture(module, call, names, self._block_names)

    def plan(self, call: Call) -> ModelPlan:
        """Plan the blocks, then the modules outside of them."""
        self._call = call
        self._refuse_layerdrop()
        self._refuse_dropped_tokens()
        blocks = [self._planned_block(block, of) for of in self._blocks for block in self._kinds(of)]
        self._refuse_uncalled(blocks)
        outside = self._planned_pieces()
        plan = self._merged([*blocks, *outside])
        tied = params_cut_apart(self._module, plan) if self._options.plan == "auto" else []
        if tied:
            blocks = [self._without_tied(block, tied) for block in blocks]
            plan = self._merged([*blocks, *outside])
        resolution = resolve(self._module, plan, self._size)
        sections, params = resolution.sections, dict(self._module.named_parameters())
        self._refuse_uses(sections, resolution.partial)
        return ModelPlan(
            plan=plan,
            size=self._size,
            blocks=(*blocks, *outside),
            numel=sum(param.numel() for param in params.values()),
            cut_numel=sum(param.numel() for name, param in params.items() if name in sections),
            notes=tuple(self._notes),
        )

    # -- The plan before its check -------------------------------------------------------------------------------------

    def _read(self) -> TensorPlan | None:
        """Return the plan that the user or the model brings."""
        options = self._options
        if isinstance(options.plan, TensorPlan):
            options.plan.require_names(_names(self._module))
            plan = self._leaving_whole(options.plan)
            resolve(self._module, plan, self._size)  # for errors in the whole model's names
            return plan
        found = model_plan(self._module, skip_unknown=options.plan == "auto")
        if found is None and options.plan == "model":
            raise ValueError(
                f"`TensorParallel(plan='model')` needs a model that brings a plan, and `{type(self._module).__name__}`"
                " has none. Use plan='auto' or a `TensorPlan`."
            )
        return None if found is None else self._leaving_whole(found)

    def _leaving_whole(self, plan: TensorPlan) -> TensorPlan:
        """Return a plan without the modules that stay whole."""
        if not self._whole:
            return plan
        names = _names(self._module)
        left_out = plan.on_names(name for name in names if _is_inside(name, self._whole)).patterns
        if not left_out:
            return plan
        shown = f"`{left_out[0]}`" + (f" and {len(left_out) - 1} more" if len(left_out) > 1 else "")
        self._notes.append(f"`expert_parallel` divides the experts: rules for {shown} are left out")
        return plan.on_names(name for name in names if not _is_inside(name, self._whole))

    def _whole_inside(self, block: str) -> list[str]:
        """Return the names of the modules in a block that stay whole, relative to it."""
        if _is_inside(block, self._whole):
            return [""]
        prefix = f"{block}." if block else ""
        return [name.removeprefix(prefix) for name in self._whole if name.startswith(prefix)]

    def _vocabulary(self) -> TensorPlan:
        if isinstance(self._options.plan, TensorPlan) or not self._options.vocabulary:
            return TensorPlan({})
        plan, note = vocabulary_plan(self._module, self._size, self._block_names)
        if note:
            self._notes.append(note)
        return plan

    def _given_outside(self) -> TensorPlan:
        """Return the part of the given plan that is about modules outside of the blocks."""
        if self._given is None or self._options.plan == "auto" or self._block_names == [""]:
            return TensorPlan({})
        outside = self._given.on_names(name for name in _names(self._module) if not _is_inside(name, self._block_names))
        if self._options.plan == "model":
            return outside.only(lambda name: not is_vocabulary_rule(outside.rules[name]))
        return outside

    # -- Blocks --------------------------------------------------------------------------------------------------------

    def _kinds(self, block: Block) -> list[Block]:
        """Return each block alone where their forward reads its number."""
        arguments = self._captured.arguments.get(block.name)
        if arguments is None or len(block.names) == 1 or not reads_its_number(block.module, arguments):
            return [block]
        return [Block((name,), self._module.get_submodule(name)) for name in block.names]

    def _planned_block(self, block: Block, of: Block, without: Collection[str] = ()) -> PlannedBlock:
        """Plan a kind of block with the arguments of the first block that is alike but for its number."""
        arguments = self._captured.arguments.get(of.name)
        given = None if self._given is None else _naming(block.module, self._given.within(block.name))
        if arguments is None:
            self._notes.append(f"`{block.name}` is not called, and stays whole")
            return self._planned(block.names, block.module, TensorPlan({}), None)
        block = self._leaving_captured(block)
        without = [*without, *self._whole_inside(block.name)]
        is_leaking = not self._results_read.leaking.isdisjoint(block.names)
        if self._options.plan == "auto":
            if is_leaking and not self._options.sequence:
                self._notes.append(f"`{block.name}` stays whole, because {_LEAKS}")
            without = [""] if is_leaking else without
            find = partial(find_plan, block.module, arguments, self._size, given, without=without)
            found = find()
            if found.check.returns_parts and self._is_result_read(block):
                found = find(all_whole=True)
            if not self._options.sequence:
                self._refuse_hooks(block, found.plan)
                return self._planned(block.names, block.module, found.plan, found.check)
            given = found.plan
        plan = given or TensorPlan({})
        if self._options.sequence and not plan.sequence:
            plan = with_sequence(block.module, arguments, plan, self._size)
        if is_leaking and plan.patterns:
            self._refuse(
                f"Block `{block.name}` would be cut over {self._size} ranks of tensor parallelism, and {_LEAKS}: it may"
                " be a rank's part. Return the tensor, leave it on a module (`self.aux_loss = ...`) or append it to a"
                " list among the arguments, so that it is compared, or leave the block and `sequence` out."
            )
        check = check_block(block.module, arguments, plan, self._size)
        if check.is_right and check.returns_parts and self._is_result_read(block):
            check = check_block(block.module, arguments, plan, self._size, all_whole=True)
        if not check.is_right:
            hint = self._hint(block.module, of.name, check)
            self._refuse(_message(block.name, plan, check=check, size=self._size, hint=hint))
        self._refuse_hooks(block, plan)
        return self._planned(block.names, block.module, plan, check)

    def _is_result_read(self, block: Block) -> bool:
        return not self._results_read.blocks.isdisjoint(block.names)

    def _leaving_captured(self, block: Block) -> Block:
        """Return a block that keeps the results of its modules that code outside reads, so that they are compared."""
        places: dict[str, set[int]] = {}
        for full, place in self._results_read.captured:
            for name in block.names:
                if full.startswith(f"{name}."):
                    places.setdefault(full.removeprefix(f"{name}."), set()).add(place)
        return Block(block.names, leaving_results(block.module, places)) if places else block

    @cached_property
    def _results_read(self) -> ResultsRead:
        return results_read(self._module, self._call, [name for name in self._block_names if name])

    def _without_tied(self, planned: PlannedBlock, tied: Sequence[str]) -> PlannedBlock:
        """Plan a kind of block anew, without the regions of parameters that are whole under another name."""
        inside = [(name, one) for name in planned.names for one in tied if _is_inside(one, [name])]
        if not inside:
            return planned
        for _, param in inside:
            self._notes.append(f"the layers around `{param}` stay whole, because it is tied to a whole parameter")
        without = {param.rpartition(".")[0].removeprefix(name).strip(".") for name, param in inside}
        block = Block(planned.names, self._module.get_submodule(planned.names[0]))
        of = next(one for one in self._blocks if block.name in one.names)
        return self._planned_block(block, of, sorted(without))

    def _merged(self, planned: Sequence[PlannedBlock]) -> TensorPlan:
        plan = TensorPlan({})
        for one in planned:
            is_block = one.names[0] in self._block_names
            plan = plan.merged(_spread(one, self._block_names) if is_block else one.plan.under(one.names[0]))
        return plan

    def _refuse_hooks(self, block: Block, plan: TensorPlan) -> None:
        """Refuse forward hooks inside of blocks that are cut: they may see a rank's part."""
        if not plan.rules:
            return
        for name in block.names:
            for inner, child in self._module.get_submodule(name).named_modules():
                is_seen_in_parts = bool(inner) or self._options.sequence is True
                if is_seen_in_parts and (hook := _program_hook(child)):
                    whole = "" if self._options.sequence else f" register it on `{name or 'the model'}` itself,"
                    self._refuse(
                        f"`{f'{name}.{inner}'.strip('.')}` has the hook `{hook}`, and its block is cut over"
                        f" {self._size} tensor ranks: the hook may see a rank's part. Return what it takes from the"
                        f" block,{whole} or leave the block out of a `TensorPlan`; check='warn' trains all the same."
                    )

    def _planned(
        self, names: tuple[str, ...], module: nn.Module, plan: TensorPlan, check: BlockCheck | None
    ) -> PlannedBlock:
        sections = resolve(module, plan, self._size).sections
        params = dict(module.named_parameters())
        return PlannedBlock(
            names=names,
            plan=plan,
            check=check,
            numel=sum(param.numel() for param in params.values()),
            cut_numel=sum(param.numel() for name, param in params.items() if name in sections),
        )

    def _hint(self, module: nn.Module, name: str, check: BlockCheck) -> str:
        """Return a sentence on losses of routers, on sizes that cannot be divided, or on integers that should be."""
        if self._options.sequence and (
            self._whole_inside(name) or any(isinstance(one, MoE) for one in module.modules())
        ):
            return (
                " With `sequence=True` a rank has a part of the sequence, and a router's auxiliary loss, or its counts"
                " of tokens, are those of the part: leave `sequence` or them out."
            )
        for child in module.modules():
            heads = getattr(getattr(child, "config", child), "num_key_value_heads", None)
            if type(heads) is int and heads % self._size:
                return f" It has {heads} key-value heads, which {self._size} ranks do not divide: use a smaller size."
        if not isinstance(check.failure, RuntimeError):
            return ""
        found = integers_of(module, self._captured.arguments[name], self._size)
        shown = ", ".join(f"`{'.'.join(part for part in place if part)}`" for place in found[:8])
        return (
            f" Its forward reads the integers {shown}: those that count heads belong into `divided`." if shown else ""
        )

    def _refuse_uses(self, sections: Collection[str], partial_gradients: Collection[str]) -> None:
        """Refuse code outside of the blocks that would read a rank's parts, or add to gradients that are summed."""
        for name in sorted(self._captured.read_outside & set(sections)):
            self._refuse(
                f"`{name}` would be cut over {self._size} ranks of tensor parallelism, and code outside of its block"
                " reads it (a penalty, a norm, a product with it): it would see a rank's part. Read"
                " `strategy.full_param(param)` in a hook, leave the code out, or give a `TensorPlan` that leaves the"
                " parameter whole."
            )
        for name in sorted(self._captured.read_outside & set(partial_gradients)):
            self._refuse(
                f"The gradient of `{name}` is a sum over {self._size} ranks of tensor parallelism, to which each adds"
                " its part of the sequence or of the features, and code outside of its block reads it (a penalty, a"
                f" norm): its gradient would count {self._size} times. Change the values in a hook, with"
                " `torch.no_grad()`, or leave `sequence` or the rule 'partial' out."
            )
        for name, other in self._summed_apart(partial_gradients):
            self._refuse(
                f"The gradient of `{name}` is a sum over {self._size} ranks of tensor parallelism, to which each adds"
                f" its part of the sequence or of the features, and `{other}` is the same parameter outside of such a"
                f" block: its gradients there would count {self._size} times. Give the two modules parameters of their"
                " own, or leave `sequence` or the rule 'partial' out."
            )
        for name in sorted(self._captured.used_between) if self._options.sequence else ():
            self._refuse(
                f"`sequence=True` gives every rank a part of the sequence between the blocks, and code outside of them"
                f" computes with the result of `{name}`. Move the code into a block, or leave `sequence` out."
            )

    def _summed_apart(self, partial_gradients: Collection[str]) -> Iterator[tuple[str, str]]:
        """Yield names of tied parameters whose gradients are sums in one block, and none in another or outside."""

        def block_of(name: str) -> str:
            return next((block for block in self._block_names if _is_inside(name, [block])), "")

        for names in names_of(dict(self._module.named_parameters(remove_duplicate=False))):
            summed = {block_of(name): name for name in names if name in partial_gradients}
            other = next((name for name in names if block_of(name) not in summed), None)
            if summed and other is not None:
                yield next(iter(summed.values())), other

    def _refuse_layerdrop(self) -> None:
        """Refuse to divide the sequence where the first or the last block of a list may be left out."""
        found = _layerdrop(self._module) if self._options.sequence else ""
        if found:
            self._refuse(
                f"`{found}` is above 0: LayerDrop leaves blocks out, and with `sequence=True` the first block of a list"
                " divides the sequence and the last one gathers it. Set it to 0.0, or leave `sequence` out."
            )

    def _refuse_uncalled(self, blocks: Sequence[PlannedBlock]) -> None:
        """Refuse to leave a block whole between blocks that have parts of the sequence."""
        divided = {one.names[0].rpartition(".")[0] for one in blocks if one.plan.sequence}
        for one in blocks:
            if one.check is None and one.names[0].rpartition(".")[0] in divided:
                self._refuse(
                    f"Block `{one.names[0]}` is not called in the run that finds a plan, so it would stay whole, and"
                    " with `sequence=True` it would get a part of the sequence if it is called later. Call it in the"
                    " first step (no random or progressive depth), or leave `sequence` out."
                )

    def _refuse_dropped_tokens(self) -> None:
        """Refuse to divide the sequence where tokens are dropped by the number of those that a rank has."""
        for name, child in self._module.named_modules() if self._options.sequence else ():
            if isinstance(child, MoE) and child.drop_tokens:
                found, remedy = f"{name}` has `drop_tokens=True", "Use `drop_tokens=False`"
            elif _is_inside(name, self._block_names) and (key := _capacity(child)):
                found, remedy = f"{name}` has `{key}={getattr(child, key)}", "Use a router without a capacity"
            else:
                continue
            self._refuse(
                f"`{found}`, and with `sequence=True` each rank would drop tokens by the capacity for its part of the"
                f" sequence: other tokens than without. {remedy}, or leave `sequence` out."
            )

    def _refuse(self, message: str) -> None:
        if self._options.check == "refuse":
            raise ValueError(message)
        warnings.warn(message, stacklevel=4)

    # -- Outside of the blocks -----------------------------------------------------------------------------------------

    def _planned_pieces(self) -> list[PlannedBlock]:
        """Check the modules outside of the blocks. The vocabulary stays whole where it cannot be cut in all of them."""
        planned = []
        is_given = isinstance(self._options.plan, TensorPlan)
        for name in self._pieces:
            module, plan = self._module.get_submodule(name), self._outside.within(name)
            problem = ""
            check = None
            cut = {f"{name}.{inner}".strip(".") for inner in plan.rules}
            if cut & {param.rpartition(".")[0] for param in self._captured.read_outside}:
                problem = f"the weights of `{name}` are read by other modules"
            elif name in self._captured.arguments:  # else it is another name of a tied parameter
                check = check_block(module, self._captured.arguments[name], plan, self._size)
                if not check.is_right:
                    problem = _message(name, plan, check=check, size=self._size, hint="")
            if problem and is_given:
                self._refuse(problem)
            elif problem:
                self._notes.append(f"the vocabulary stays whole: {problem}")
                return []
            planned.append(self._planned((name,), module, plan, check))
        return planned


def _program_hook(module: nn.Module) -> str:
    """Return the name of a hook of the program on forwards or backwards, or nothing."""
    forward = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    for hook in (*forward, *module._backward_pre_hooks.values(), *module._backward_hooks.values()):
        shown = hook if isinstance(hook, (FunctionType, MethodType)) else type(hook)
        if shown.__module__.partition(".")[0] not in ("torch", "transformers", "lightning_zero"):
            return shown.__qualname__
    return ""


def _layerdrop(module: nn.Module) -> str:
    """Return the name of a rate of LayerDrop above 0, of a module or its configuration, or nothing."""
    for name, child in module.named_modules():
        config = getattr(child, "config", None)
        rates = {**vars(child), **{f"config.{key}": value for key, value in getattr(config, "__dict__", {}).items()}}
        for key, value in rates.items():
            if "layerdrop" in key.lower() and isinstance(value, float) and value > 0:
                return f"{name}.{key}".lstrip(".")
    return ""


def _capacity(module: nn.Module) -> str:
    """Return the name of a number of tokens that an expert takes at most, as routers have it, or nothing."""
    if getattr(module, "drop_tokens", True) is False:
        return ""
    return next((key for key, value in vars(module).items() if "capacity" in key.lower() and type(value) is int), "")


def _is_inside(name: str, blocks: Collection[str]) -> bool:
    return any(name == block or name.startswith(f"{block}.") for block in blocks)


def _names(module: nn.Module) -> list[str]:
    """Return the names of modules and parameters."""
    modules, params = module.named_modules(remove_duplicate=False), module.named_parameters(remove_duplicate=False)
    return [*dict(modules), *dict(params)]


def _naming(module: nn.Module, plan: TensorPlan) -> TensorPlan:
    """Return the part of a plan that names something in one block; blocks of a list may differ."""
    names = _names(module)

    def known(pattern: str) -> bool:
        return any(matches(pattern, name) for name in names)

    return plan.only(known)


def _pieces(module: nn.Module, plan: TensorPlan, blocks: Sequence[str]) -> list[str]:
    """Return the largest modules around the rules of a plan that have no block inside."""
    modules = dict(module.named_modules(remove_duplicate=False))
    found: dict[str, None] = {}
    for pattern in plan.patterns:
        for name in modules:
            params = [f"{name}.{key}".lstrip(".") for key, _ in modules[name].named_parameters(recurse=False)]
            if not any(matches(pattern, one) for one in (name, *params)) or _is_inside(name, blocks):
                continue
            parts = name.split(".")
            ancestors = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
            without = [one for one in ancestors if not any(block.startswith(f"{one}.") for block in blocks)]
            found[without[0] if without else name] = None
    return list(found)


def _spread(block: PlannedBlock, blocks: Sequence[str]) -> TensorPlan:
    """Return a block's plan for all blocks of its kind: with ``*`` if the list has no others."""
    prefix = block.names[0].rpartition(".")[0]
    siblings = [name for name in blocks if name.rpartition(".")[0] == prefix]
    if len(siblings) == len(block.names) and prefix:
        return block.plan.under(f"{prefix}.*")
    result = TensorPlan({})
    for name in block.names:
        result = result.merged(block.plan.under(name))
    return result


def _message(name: str, plan: TensorPlan, *, check: BlockCheck, size: int, hint: str) -> str:
    """Return the error of a plan that is wrong: block, module, tensor and remedy."""
    if check.failure is not None:
        what = f"fails ({type(check.failure).__name__}: {str(check.failure)[:300]})"
        remedy = ""
    else:
        worst = next((one for one in check.wrong if one.remedy), check.wrong[0])
        what = f"computes something else: the {worst.tensor} is off by {worst.error:.2g} of its size (limit {LIMIT:g})"
        remedy = f" Remedy: {worst.remedy}." if worst.remedy else ""
    where = ""
    if check.suspect is not None:
        module = ".".join(part for part in (name, check.suspect.module) if part)
        where = f" The first module that differs is `{module}`: {check.suspect.finding}."
    return (
        f"With this plan of tensor parallelism over {size} ranks, block `{name}` {what}.{where}{remedy}{hint} Correct"
        " the `TensorPlan`, or use plan='auto'; check='warn' trains all the same."
    )


def _plan_lines(plan: TensorPlan) -> list[str]:
    width = max((len(pattern) for pattern in plan.patterns), default=0)
    rows = [f"  {pattern:{width}}  {rule}" for pattern, rule in plan.rules.items()]
    rows += [f"  {pattern:{width}}  divides {', '.join(names)}" for pattern, names in plan.divided.items()]
    rows += [
        f"  {pattern:{width}}  cuts {', '.join(f'{key}: {rule}' for key, rule in given.items())}"
        for pattern, given in plan.arguments.items()
    ]
    rows += [
        f"  {pattern:{width}}  sequence: {', '.join(f'{word} {key}' for key, word in given.items())}"
        for pattern, given in plan.sequence.items()
    ]
    return rows or ["  nothing is cut"]
