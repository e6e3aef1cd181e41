"""Parameters and modules that cannot be sharded, refused by name before anything is changed or sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_zero.dtensors import refuse_dtensors
from lightning_zero.engine.buffers.parameter import ReleasedParameter, class_over, has_class, user_class
from lightning_zero.storage.copies import replays_graph

__all__ = ["check_new_buffers", "check_shardable", "refuse_graphs"]

Named = tuple[str, torch.Tensor]


def check_shardable(module: nn.Module) -> None:
    """Refuse parameters that the engine cannot hold, and memory that several of them share. No collective.

    Raises:
        ValueError: A parameter is lazy, distributed, sparse, of a class that cannot be kept, or shares memory, or a
            CUDA graph reads it.
    """
    refuse_dtensors(module)
    refuse_graphs(module)
    params = _params_of(module)
    for name, buffer in module.named_buffers():
        if is_lazy(buffer):
            raise ValueError(_refusal("Buffer", name, *_LAZY))
    with torch._C.DisableTorchFunctionSubclass():
        for name, param in params:
            _check_kind(name, param)
    for name, param in params:
        _check_class(name, param)
    with torch._C.DisableTorchFunctionSubclass():
        _check_memory(params, list(module.named_buffers()))


def check_new_buffers(module: nn.Module, added: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuse module buffers that share memory with parameters, in modules that a sharded module has got since.

    Raises:
        ValueError: There is one.
    """
    buffers = [(f"{name}.{key}", one) for name, child in added for key, one in child.named_buffers(recurse=False)]
    if not buffers:
        return
    with torch._C.DisableTorchFunctionSubclass():
        _check_memory(_params_of(module), buffers)


def _params_of(module: nn.Module) -> list[Named]:
    return [(name, param) for name, param in module.named_parameters() if not has_class(param, ReleasedParameter)]


def refuse_graphs(module: nn.Module) -> None:
    """Refuse modules whose forward replays a CUDA graph, which reads parameters at their former addresses.

    Raises:
        ValueError: One does.
    """
    for name, child in module.named_modules():
        if replays_graph(vars(child).get("forward")) and any(True for _ in child.parameters()):
            raise ValueError(
                f"Module `{name or type(child).__name__}` went through `make_graphed_callables`: its CUDA graph reads"
                " the memory in which its parameters were, and `shard` moves them. Leave that call out; `torch.compile`"
                " is supported."
            )


# -- Kinds of parameters -----------------------------------------------------------------------------------------------

_LAZY = (
    "has no shape before its module's first forward",
    "Run one forward of the module, with a batch of the right shape, before it is sharded, or give the layer its sizes",
)


def _check_kind(name: str, param: torch.Tensor) -> None:
    found = _unshardable(param)
    if found is not None:
        raise ValueError(_refusal("Parameter", name, *found))


def _unshardable(param: torch.Tensor) -> tuple[str, str] | None:
    """Return why a parameter cannot be sharded, and the remedy; None if it can."""
    if is_lazy(param):
        return _LAZY
    if param.is_nested:
        return "is a nested tensor", "Use one parameter per tensor, or a padded one"
    if param.is_quantized:
        return (
            f"is of PyTorch's quantised dtype {param.dtype}",
            "Keep its integers (`int_repr()`) and scales as frozen parameters or buffers",
        )
    if param.layout is not torch.strided:
        return f"has the layout {param.layout}", "Make it dense (`to_dense()`)"
    if user_class(param).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return (
            f"is a `{type(param).__name__}`, a tensor made of other tensors",
            "Make these the parameters, which are sharded then: `torchao.utils.unwrap_tensor_subclass(module)` does so"
            " before the module is sharded",
        )
    if param.is_inference():
        return "was made in inference mode, where PyTorch lets nothing train", "Build the module outside of that mode"
    if param.requires_grad and 0 in _strides(param):
        return "was expanded: several of its elements are one", "Give it values of its own (`.clone()`)"
    return None


def _strides(param: torch.Tensor) -> list[int]:
    return [stride for stride, size in zip(param.stride(), param.shape, strict=True) if size > 1]


def _check_class(name: str, param: torch.Tensor) -> None:
    """Refuse a class of which no subclass can be made."""
    user = user_class(param)
    if user is nn.Parameter:
        return
    try:
        class_over(ReleasedParameter, user)
    except TypeError as error:
        why = f"is of class `{user.__name__}`, of which the engine cannot make a subclass ({error})"
        raise ValueError(_refusal("Parameter", name, why, "Use `nn.Parameter`, or let it have subclasses")) from error


def _refusal(what: str, name: str, why: str, remedy: str) -> str:
    return f"{what} `{name}` {why}. {remedy}."


# -- Memory that is shared ---------------------------------------------------------------------------------------------


def _check_memory(params: Sequence[Named], buffers: Sequence[Named]) -> None:
    """Refuse tensors that share memory without being one object: each would get memory of its own."""
    owned = {id(param) for _, param in params}
    for (name, one), (other_name, other) in _overlapping([*params, *buffers]):
        if id(one) not in owned and id(other) not in owned:
            continue
        is_buffer = id(one) not in owned or id(other) not in owned
        what = "A buffer and a parameter" if is_buffer else "Two parameters"
        remedy = (
            "Compute it from the parameter in forward, or give it a copy (`.clone()`)"
            if is_buffer
            else "Tie them by using one object (`module.b.weight = module.a.weight`), or give one a copy (`.clone()`)"
        )
        raise ValueError(
            f"{what} share memory without being one object: `{name}` and `{other_name}`. Sharded they would drift"
            f" apart. {remedy}."
        )


def _overlapping(tensors: Iterable[Named]) -> Iterator[tuple[Named, Named]]:
    """Yield pairs of tensors with an element in common."""
    real = [
        (*_span(tensor), (name, tensor))
        for name, tensor in tensors
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() and tensor.data_ptr()
    ]
    cluster: list[Named] = []
    end = 0
    for start, stop, named in sorted(real, key=lambda entry: entry[:2]):
        if start >= end:
            cluster = []
        yield from ((other, named) for other in cluster if _meet(other[1], named[1]))
        cluster.append(named)
        end = max(end, stop)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte and the one behind the last."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def _meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether two tensors whose spans may overlap have an element in common."""
    (lo, hi), (other_lo, other_hi) = _span(one), _span(other)
    if one.device != other.device or hi <= other_lo or other_hi <= lo:
        return False
    if one.element_size() != other.element_size() or (one.is_contiguous() and other.is_contiguous()):
        return True
    return bool(torch.isin(_addresses(one), _addresses(other)).any())


def _addresses(tensor: torch.Tensor) -> torch.Tensor:
    places = torch.zeros(tuple(tensor.shape), dtype=torch.int64, device="cpu")
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        steps = torch.arange(size, device="cpu") * (stride * tensor.element_size())
        places += steps.view([-1 if axis == dim else 1 for axis in range(tensor.ndim)])
    return places.flatten() + tensor.data_ptr()
