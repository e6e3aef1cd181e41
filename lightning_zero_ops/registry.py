"""The op library ``lightning_zero``: how an op is defined, and which implementation runs where.

Note [Ops]
    ``define`` takes a schema and three functions. The *reference* is plain PyTorch and runs on CPUs; the *launcher*
    starts a Triton kernel and runs on CUDA devices; the *fake* says shapes and dtypes, so ``torch.compile`` sees one
    node. ``Library.define`` and ``Library.impl`` make ops whose calls cost less than ``torch.library.custom_op``'s (ADR
    0007).

Note [Without Triton]
    Triton exists on Linux only, and needs a C compiler at run time and a GPU that it knows. The first call of an op on
    a CUDA device asks whether kernels run there (``selfcheck.kernels_agree``). Where they do not, the reference runs on
    CUDA devices too; without Triton kernels stay plain functions that nobody calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import Library

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

__all__ = [
    "HAS_TRITON",
    "KERNEL_CHECKS",
    "LIBRARY",
    "cdiv",
    "check_devices",
    "check_factor",
    "check_flat",
    "define",
    "differentiable_gradients",
    "is_transformed",
    "jit",
    "jit_for_any",
    "next_power_of_2",
    "on_device_of",
    "refuse_transforms",
    "tl",
]

HAS_TRITON = triton is not None

LIBRARY: Any = Library("lightning_zero", "DEF")  # type: ignore[no-untyped-call]

KERNEL_CHECKS: list[Callable[[torch.device], bool]] = []  # that of `selfcheck`, which checks ops defined by this file

_Function = Callable[..., Any]


def define(
    schema: str,
    *,
    reference: _Function,
    launcher: _Function,
    fake: _Function,
    backward: _Function | None = None,
    setup_context: _Function | None = None,
) -> Any:
    """Define the op ``lightning_zero::<name>`` and return it (an ``OpOverload``).

    Args:
        schema: Name, arguments and results; tensors that are written carry ``(a!)``.
        reference: Plain PyTorch implementation for CPUs.
        launcher: Starts the Triton kernel; for CUDA devices on which kernels run.
        fake: Returns empty results of the right shapes and dtypes; must not read values.
        backward: As in ``torch.library.register_autograd``.
        setup_context: As in ``torch.library.register_autograd``.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    LIBRARY.impl(name, reference, "CPU")
    LIBRARY.impl(name, _checked(launcher, reference), "CUDA")
    torch.library.register_fake(f"lightning_zero::{name}", fake, lib=LIBRARY)
    if backward is not None:
        torch.library.register_autograd(f"lightning_zero::{name}", backward, setup_context=setup_context, lib=LIBRARY)
    op = getattr(torch.ops.lightning_zero, name).default
    if op._schema.is_mutable:
        LIBRARY.impl(name, _count_writes(op), "ADInplaceOrView", with_keyset=True)
    return op


def _checked(launcher: _Function, reference: _Function) -> _Function:
    """Return a function that launches, or computes as on a CPU where kernels do not run: Note [Without Triton]."""

    def run(first: Tensor, *args: Any) -> Any:
        is_launched = HAS_TRITON and all(check(first.device) for check in KERNEL_CHECKS)
        return (launcher if is_launched else reference)(first, *args)

    return run


def _count_writes(op: Any) -> _Function:
    """Return a kernel that moves the version counters of the written arguments, which Triton leaves alone."""
    arguments = op._schema.arguments
    written = [
        (position, argument.name)
        for position, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]

    def count(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        for position, name in written:
            value = args[position] if position < len(args) else kwargs.get(name)
            tensors = [value] if isinstance(value, Tensor) else value or ()
            torch.autograd.graph.increment_version(tensors)
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args, **kwargs)

    return count


def jit(kernel: _Function) -> Any:
    """Make a Triton kernel; without Triton, leave it as it is."""
    return jit_for_any()(kernel)


def jit_for_any(*arguments: str) -> Callable[[_Function], Any]:
    """Return a decorator that makes a Triton kernel, compiled once for all values of some int32 arguments."""
    return lambda kernel: kernel if triton is None else triton.jit(kernel, do_not_specialize=list(arguments))


def cdiv(numerator: int, denominator: int) -> int:
    """Return the quotient, rounded up."""
    return -(-numerator // denominator)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is not below ``number``."""
    return 1 << max(number - 1, 0).bit_length()


def differentiable_gradients(
    function: _Function, inputs: Sequence[Tensor | None], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``function(*inputs)`` in a form that has gradients itself.

    For backwards that run with ``create_graph=True``, where a kernel's result would have none.

    Args:
        function: Plain PyTorch; returns one tensor.
        inputs: Its arguments.
        grad: The gradient of its result.

    Returns:
        One gradient per input, None for those that are None or require none.
    """
    # Views of their own: an input that was computed from another one must not count in the other's gradient too.
    own = [None if tensor is None else tensor.view_as(tensor) for tensor in inputs]
    wanted = [tensor for tensor in own if tensor is not None and tensor.requires_grad]
    found = iter(torch.autograd.grad(function(*own), wanted, grad, create_graph=True))
    return tuple(next(found) if tensor is not None and tensor.requires_grad else None for tensor in own)


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` runs, such as ``vmap``; compilers trace those in their own way."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def refuse_transforms(op: str, *tensors: Tensor | None) -> None:
    """Refuse tensors that ``torch.func.grad`` or its like differentiates by, and those with a tangent.

    PyTorch knows no derivative of the op in the first case, and would drop the tangent in the second.

    Raises:
        NotImplementedError: Names the op and its substitute.
    """
    if is_transformed() and any(tensor is not None and _is_tracked(tensor) for tensor in tensors):
        raise NotImplementedError(
            f"`{op}` does not run under `torch.func.grad` and the transforms built on it (`vjp`, `jacrev`, `hessian`)."
            " Use plain PyTorch there, or `backward` and `torch.autograd.grad`, which may have a batch of gradients"
            " (`is_grads_batched=True`)."
        )
    if forward_ad._current_level < 0:
        return
    unpack: Any = forward_ad.unpack_dual
    if any(tensor is not None and unpack(tensor).tangent is not None for tensor in tensors):
        raise NotImplementedError(
            f"`{op}` has no forward-mode derivative (`torch.func.jvp`, `jacfwd`, dual tensors). Use plain PyTorch"
            " there, or reverse mode."
        )


def _is_tracked(tensor: Tensor) -> bool:
    """Whether a transform differentiates by the tensor, or by one that it was computed from."""
    functorch: Any = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_gradtrackingtensor(tensor) and tensor.requires_grad:
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Make the tensor's device current: Triton launches on the current one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def check_devices(op: str, **tensors: Tensor | None) -> None:
    """Refuse tensors on several devices: a kernel would read an address of one as an address of the other.

    Raises:
        ValueError: Names the op, the tensors and their devices.
    """
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    first = next(iter(devices))
    for name, device in devices.items():
        if device != devices[first]:
            raise ValueError(
                f"`{op}` takes tensors on one device, but `{name}` is on {device} and `{first}` on {devices[first]}."
                " Move one of them; in the place of `nn.DataParallel`, which a patched model does not follow to other"
                " GPUs, use a process per GPU."
            )


def check_factor(op: str, factor: Tensor | None, param: Tensor) -> None:
    """Refuse a factor that is not one fp32 number on the device of ``param``: kernels read no more and nothing else.

    Raises:
        ValueError: Names the op and the tensor that it got.
    """
    if factor is None or (factor.shape, factor.dtype, factor.device) == ((), torch.float32, param.device):
        return
    raise ValueError(
        f"`factor` of `{op}` must be 0-dim torch.float32 on {param.device}, got {factor.dtype} of shape"
        f" {tuple(factor.shape)} on {factor.device}."
    )


def check_flat(op: str, dtypes: Sequence[torch.dtype], **tensors: Tensor | None) -> None:
    """Refuse tensors that are not flat, contiguous, of one length and device, and of one of ``dtypes``; None passes.

    Raises:
        ValueError: Names the op, the argument and the tensor that it got.
        TypeError: A dtype is not among ``dtypes``.
    """
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first = next(iter(given))
    numel, device = given[first].numel(), given[first].device
    for name, tensor in given.items():
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(
                f"`{op}` takes flat contiguous tensors, but `{name}` has shape {tuple(tensor.shape)} and strides"
                f" {tensor.stride()}. Pass `{name}.view(-1)` of a contiguous tensor."
            )
        if tensor.numel() != numel or tensor.device != device:
            raise ValueError(
                f"`{op}` takes tensors of one length on one device, but `{name}` has {tensor.numel()} elements on"
                f" {tensor.device} and `{first}` has {numel} on {device}."
            )
        if tensor.dtype not in dtypes:
            allowed = ", ".join(str(dtype) for dtype in dtypes)
            raise TypeError(f"`{op}` takes {allowed}, but `{name}` is {tensor.dtype}. Convert it first.")
