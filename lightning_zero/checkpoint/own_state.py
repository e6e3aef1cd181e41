"""Entries that an optimizer's own ``state_dict`` or its hooks add, saved beside its states and options, and loaded.

Note [Kept entries]
    Checkpoints keep ``optimizer.state`` by parameter and ``param_groups``. An overridden ``state_dict`` or a hook of it
    may add more: plain values are saved beside, as rank 0 has them. Tensors that are not in ``optimizer.state`` have no
    place in a parameter by which they could be cut for another number of ranks, so saving refuses them.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_zero.engine.optim.segment_states import SEGMENTS

__all__ = ["OTHER_STATES", "after_loading", "before_loading", "own_entries"]

OTHER_STATES = "other_states"  # key of a saved optimizer by name: entries of `optimizer.state` that are of no parameter
_KEPT = frozenset({"state", "param_groups", OTHER_STATES, SEGMENTS})
_HOOKS = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)


# -- Saving ------------------------------------------------------------------------------------------------------------


def own_entries(optimizer: Optimizer) -> dict[str, Any]:
    """Return the plain values that the optimizer saves besides the states of parameters and the options.

    Raises:
        ValueError: It saves tensors that would be lost.
    """
    others = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    lost = [f"state[{key!r}]" for key, value in others.items() if not _is_plain(value)]
    entries: dict[str, Any] = {}
    if _is_customised(optimizer):
        values = optimizer.state_dict()
        known = {id(tensor) for state in optimizer.state.values() for tensor in _leaves(state)}
        lost += _lost_states(optimizer, values.get("state", {}), known)
        entries = {key: value for key, value in values.items() if key not in _KEPT}
        elsewhere = [key for key, value in entries.items() if not _is_plain(value)]
        if len(elsewhere) < len(entries) or any(
            id(leaf) not in known for key in elsewhere for leaf in _leaves(entries[key])
        ):
            lost += [str(key) for key in elsewhere]
        entries = {key: value for key, value in entries.items() if key not in elsewhere}
    if lost:
        names = ", ".join(f"`{name}`" for name in dict.fromkeys(lost))
        raise ValueError(
            f"`{type(optimizer).__name__}.state_dict()` has {names}, which a resumed run would lose: checkpoints keep"
            " `optimizer.state` by parameter, `param_groups`, and numbers, strings and containers of them besides. Keep"
            " tensors in `optimizer.state[param]`, under names of their own, or leave entries that a resumed run"
            " need not have out of `state_dict`."
        )
    return {**entries, **({OTHER_STATES: others} if others else {})}


def _is_customised(optimizer: Optimizer) -> bool:
    """Say whether `state_dict` is not PyTorch's alone."""
    hooks = [
        *vars(optimizer).get("_optimizer_state_dict_pre_hooks", {}).values(),
        *vars(optimizer).get("_optimizer_state_dict_post_hooks", {}).values(),
    ]
    is_overridden = type(optimizer).state_dict is not Optimizer.state_dict or "state_dict" in vars(optimizer)
    return is_overridden or any(not str(hook.__module__).startswith("lightning_zero.") for hook in hooks)


def _lost_states(optimizer: Optimizer, states: Mapping[Any, Any], known: set[int]) -> list[str]:
    """Return slots of parameters that are not in `optimizer.state`, not even elsewhere."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    lost = []
    for key, slots in states.items():
        owner = params[key] if isinstance(key, int) and key < len(params) else key
        own = optimizer.state.get(owner)
        if own is None or not isinstance(slots, Mapping):
            lost += [] if own is not None else [f"state[{key!r}]"]
            continue
        lost += [
            f"state[...][{slot!r}]"
            for slot, value in slots.items()
            if slot not in own and any(id(leaf) not in known for leaf in _leaves(value))
        ]
    return lost


def _is_plain(value: Any) -> bool:
    return all(
        leaf.ndim == 0 if isinstance(leaf, torch.Tensor) else isinstance(leaf, _PLAIN) for leaf in _leaves(value)
    )


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the innermost values of containers, keys of dictionaries included."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(key)
            yield from _leaves(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


# -- Loading -----------------------------------------------------------------------------------------------------------


def before_loading(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Run the hooks before `load_state_dict` on a state whose parameters are counted; return the changed state."""
    for hook in vars(optimizer).get("_optimizer_load_state_dict_pre_hooks", {}).values():
        result = hook(optimizer, state)
        state = state if result is None else result
    return state


def after_loading(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Give an optimizer whose states are loaded its own entries, and call the hooks behind `load_state_dict`.

    Args:
        optimizer: The optimizer.
        saved: Its state, with the parameters counted; entries of `state` under other keys are those of no parameter.

    Raises:
        ValueError: The checkpoint has tensors that are of no parameter.
    """
    known = {number for group in saved["param_groups"] for number in group["params"]}
    optimizer.state.update(copy.deepcopy({key: value for key, value in saved["state"].items() if key not in known}))
    entries = {key: value for key, value in saved.items() if key not in _KEPT}
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        tensors = [key for key, value in entries.items() if not _is_plain(value)]
        if tensors:
            raise ValueError(
                f"The checkpoint has {', '.join(f'`{key}`' for key in tensors)} of `{type(optimizer).__name__}`, which"
                " cannot be divided among the ranks. Keep tensors in `optimizer.state[param]`."
            )
        _load_entries(optimizer, entries)
    for hook in vars(optimizer).get("_optimizer_load_state_dict_post_hooks", {}).values():
        hook(optimizer)


def _load_entries(optimizer: Optimizer, entries: Mapping[str, Any]) -> None:
    """Call the optimizer's own `load_state_dict` without states, and leave states and hooks as they are.

    Behind PyTorch's part of it (`super().load_state_dict`, or that of an optimizer that it wraps) the optimizer has its
    states and groups.

    Raises:
        ValueError: It asks for entries that are not there.
    """
    groups = optimizer.param_groups
    numbers = iter(range(sum(len(group["params"]) for group in groups)))
    counted = [{**group, "params": [next(numbers) for _ in group["params"]]} for group in groups]
    with ExitStack() as stack:
        for wrapped in _wrapped_by(optimizer):
            stack.enter_context(_kept(wrapped, _shared(wrapped, optimizer), hooks=vars(wrapped)))
        stack.enter_context(_kept(optimizer, _shared(optimizer, optimizer), hooks={}))
        try:
            optimizer.load_state_dict({"state": {}, "param_groups": counted, **copy.deepcopy(dict(entries))})
        except LookupError as error:
            raise ValueError(
                f"`{type(optimizer).__name__}.load_state_dict` was called without the states of parameters and without"
                f" tensors that its `state_dict` adds ({type(error).__name__}: {error}). Read them from"
                " `self.state[param]` behind `super().load_state_dict(...)`, where they are loaded."
            ) from error


@contextmanager
def _kept(optimizer: Optimizer, values: Mapping[str, Any], hooks: Mapping[str, Any]) -> Iterator[None]:
    """Leave attributes of an optimizer as they are, between its `load_state_dict` and `hooks` behind it too.

    Options of groups that are loaded are taken over.
    """

    def put_back(optimizer: Optimizer) -> None:
        groups = values.get("param_groups", optimizer.param_groups)
        for mine, changed in zip(groups, optimizer.param_groups, strict=True):
            mine.update({key: value for key, value in changed.items() if key != "params"})
        vars(optimizer).update(values)

    before = {name: vars(optimizer).get(name, OrderedDict()) for name in _HOOKS}
    pre_hooks, post_hooks = (hooks.get(name, {}) for name in _HOOKS)
    during = OrderedDict(pre_hooks), OrderedDict({-1: put_back, **post_hooks})
    vars(optimizer).update(zip(_HOOKS, during, strict=True))
    try:
        yield
        put_back(optimizer)
    finally:
        vars(optimizer).update({**before, **values})


def _shared(optimizer: Optimizer, other: Optimizer) -> dict[str, Any]:
    """Return the states and groups that an optimizer itself has, as far as another one has them too."""
    groups = {id(group) for group in other.param_groups}
    is_shared = {
        "state": optimizer.state is other.state,
        "param_groups": any(id(group) in groups for group in optimizer.param_groups),
    }
    return {name: value for name, value in vars(optimizer).items() if is_shared.get(name)}


def _wrapped_by(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that an optimizer has, at any depth."""
    found = {id(optimizer): optimizer}
    left = [optimizer]
    while left:
        for value in _leaves(list(vars(left.pop()).values())):
            if isinstance(value, Optimizer) and id(value) not in found:
                found[id(value)] = value
                left.append(value)
    return list(found.values())[1:]
