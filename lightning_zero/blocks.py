"""Finding modules by class, and the repeated blocks of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from lightning_zero.errors import nearest

__all__ = ["hookable_modules", "inner_module", "modules_of_classes", "repeated_blocks"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def modules_of_classes(
    module: nn.Module, classes: Sequence[str | type[nn.Module]], *, option: str
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules below ``module`` that are of some classes, with their names, outermost first.

    Args:
        module: Where to look; it is not itself among them.
        classes: Classes or their names, with or without the path of their Python module. Base classes count.
        option: The option in which the user named them, for the error.

    Raises:
        ValueError: No module is of one of the classes.
    """
    if isinstance(classes, (str, type)):
        classes = [classes]
    known = {type(inner_module(child)).__name__ for child in module.modules() if child is not module}
    for wanted in classes:
        found = False
        for name, child in hookable_modules(module):
            if child is not module and _matches(inner_module(child), wanted):
                found = True
                yield name, child
        if not found:
            label = wanted if isinstance(wanted, str) else wanted.__name__
            raise ValueError(
                f"`{option}` names `{label}`, but no module inside `{type(module).__name__}` has that class."
                f"{nearest(label, known)} The classes are: {', '.join(sorted(known))}."
            )


def _matches(module: nn.Module, wanted: str | type[nn.Module]) -> bool:
    if isinstance(wanted, str):
        return any(wanted in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}") for cls in type(module).__mro__)
    return isinstance(module, wanted)


def inner_module(module: nn.Module) -> nn.Module:
    """Return the user's module behind a compiled one."""
    inner = module._modules.get("_orig_mod")
    return inner if inner is not None else module


def hookable_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield modules outermost first; a compiled one stands for the module that it wraps."""
    yield prefix.rstrip("."), module
    for key, child in inner_module(module)._modules.items():
        if child is not None:
            yield from hookable_modules(child, f"{prefix}{key}.")


def repeated_blocks(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the children of containers that have siblings of their own class, and parameters; the outermost of them."""
    children = {key: child for key, child in inner_module(module)._modules.items() if child is not None}
    repeated: set[str] = set()
    if isinstance(inner_module(module), _CONTAINERS):
        by_class: dict[type, list[str]] = {}
        for key, child in children.items():
            if any(param.numel() for param in child.parameters()):
                by_class.setdefault(type(inner_module(child)), []).append(key)
        repeated = {key for keys in by_class.values() if len(keys) > 1 for key in keys}
    for key, child in children.items():
        if key in repeated:
            yield f"{prefix}{key}", child
        else:
            yield from repeated_blocks(child, f"{prefix}{key}.")
