"""Verification of a plan: a block in parts is compared with the whole block.

Note [Random parameters]
    Parameters are random, biases and norms too, because with their initial values a bias that is added on every rank
    is zero and passes. Dropout and noise are off. Results, gradients of inputs and of all parameters are compared in
    fp64, where right plans differ by 1e-14 and wrong ones by 0.25 and more; in 16 bits the two would overlap. Keys have
    gradients of zero for their biases, so an error is relative to at least a tenth of the block's median gradient.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from lightning_zero.parallel.module_copies import copied
from lightning_zero.parallel.tensor.blocks import OF_EVERY_MODULE, copy_with
from lightning_zero.parallel.tensor.collectives import Ranks
from lightning_zero.parallel.tensor.cuts import ParamRecord
from lightning_zero.parallel.tensor.diagnosis import ModuleTrace, Suspect, relation, suspect
from lightning_zero.parallel.tensor.examples import Arguments, replay, tensors_of, with_own_activations
from lightning_zero.parallel.tensor.forwards import is_transposed
from lightning_zero.parallel.tensor.generators import stop_drawing
from lightning_zero.parallel.tensor.plan import TensorPlan
from lightning_zero.parallel.tensor.threads import ThreadRanks, run_threads
from lightning_zero.parallel.tensor.transform import cut_module
from lightning_zero.trees import tree_leaves

__all__ = ["LIMIT", "BlockCheck", "Difference", "check_block", "random_copy", "relative_error"]

LIMIT = 1e-4

# Cuts a copy of a block for a rank.
CutBlock = Callable[[nn.Module, Ranks], dict[str, ParamRecord]]


@dataclass(frozen=True)
class Difference:
    """A tensor that is compared.

    Attributes:
        tensor: Its name in words.
        error: Of the ranks' tensors.
        remedy: The change of the plan that would be right, if known.
        is_part: The ranks have parts of it.
    """

    tensor: str
    error: float
    remedy: str = ""
    is_part: bool = False


@dataclass(frozen=True)
class BlockCheck:
    """The outcome for one kind of block.

    Attributes:
        differences: Of all compared tensors, the errors.
        failure: The error that the block in parts raised instead.
        suspect: The first module with another result, where the block differs.
    """

    differences: tuple[Difference, ...] = ()
    failure: Exception | None = None
    suspect: Suspect | None = None

    @property
    def wrong(self) -> list[Difference]:
        """The differences above the limit, largest first."""
        return sorted((one for one in self.differences if not one.error <= LIMIT), key=lambda one: -one.error)

    @property
    def is_right(self) -> bool:
        """Whether the block in parts computes the same."""
        return self.failure is None and not self.wrong

    @property
    def returns_parts(self) -> bool:
        """Whether a result behind the first is a rank's part."""
        return any(one.is_part and one.tensor.startswith("result") for one in self.differences)

    @property
    def error(self) -> float:
        """The largest error."""
        if self.failure is not None or not self.differences:
            return float("inf")
        return max(one.error for one in self.differences)


def check_block(
    block: nn.Module,
    arguments: Arguments,
    plan: TensorPlan | CutBlock,
    size: int,
    *,
    explain: bool = True,
    exact: bool = True,
    all_whole: bool = False,
) -> BlockCheck:
    """Compare a block that ``size`` simulated ranks compute in parts with the whole block.

    Args:
        block: Is not changed; it may be without values.
        arguments: Of a call, from ``capture``.
        plan: With names relative to the block, or a function that cuts a copy of it.
        size: Number of ranks.
        explain: Find the first module that differs, where one does.
        exact: Compute in fp64, and in fp32 where an operator has none.
        all_whole: Refuse results behind the first, with gradients, that are the ranks' parts: other code reads them.
    """
    cut = partial(_cut, plan=plan) if isinstance(plan, TensorPlan) else plan
    dtype = torch.float64 if exact else torch.float32
    whole = random_copy(block, dtype)
    try:
        expected = _run(copied(whole), replay(arguments, dtype))
    except (RuntimeError, NotImplementedError) as error:
        if exact:
            return check_block(block, arguments, plan, size, explain=explain, exact=False, all_whole=all_whole)
        raise ValueError(
            f"A `{type(block).__name__}` cannot be run alone to verify its plan of tensor parallelism:"
            f" {type(error).__name__}: {error}"
        ) from error
    try:
        differences = _compare(whole, arguments, cut=cut, size=size, expected=expected, all_whole=all_whole)
    except Exception as error:
        check = BlockCheck(failure=error)
    else:
        check = BlockCheck(tuple(differences))
    if check.is_right or not explain:
        return check
    return BlockCheck(
        check.differences, check.failure, _find_suspect(whole, arguments, cut=cut, size=size, grads=expected.grads)
    )


def random_copy(block: nn.Module, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """Return a copy on the CPU in training mode with random parameters, all with gradients; it draws no numbers."""
    generator = torch.Generator().manual_seed(seed)

    def one(name: str, param: nn.Parameter) -> nn.Parameter:
        owner = block.get_submodule(name.rpartition(".")[0])
        values = torch.randn(param.shape, generator=generator, dtype=torch.float64)
        if param.dim() > 1:
            fan = param.shape[0] if is_transposed(owner) else 1 if isinstance(owner, nn.Embedding) else param.shape[-1]
            values *= fan**-0.5
        else:
            values = values * 0.5 + (1.0 if name.endswith("weight") else 0.0)
        return nn.Parameter(values.to(dtype))

    result = copy_with(block, one).train()
    for child in result.modules():
        child._backward_hooks.clear()
        for key, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[key] = _real(buffer, generator, dtype)
    stop_drawing(result)
    return result


def relative_error(found: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Return the root mean square of the difference in units of that of ``expected``, which is at least ``floor``."""
    if found.shape != expected.shape:
        return float("inf")
    difference = rms(found.double() - expected.double())
    return difference / max(rms(expected), floor, 1e-300) if difference == difference else float("inf")


def rms(tensor: Tensor) -> float:
    """Return the root mean square of a tensor."""
    return tensor.double().square().mean().sqrt().item() if tensor.numel() else 0.0


def _real(buffer: Tensor, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    if buffer.device.type != "meta":
        return buffer.detach().cpu().to(dtype if buffer.is_floating_point() else buffer.dtype, copy=True)
    if buffer.is_floating_point():
        return torch.rand(buffer.shape, generator=generator).to(dtype)
    return torch.zeros(buffer.shape, dtype=buffer.dtype)


def _cut(module: nn.Module, ranks: Ranks, plan: TensorPlan) -> dict[str, ParamRecord]:
    return cut_module(module, plan, ranks)


# -- Runs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Result:
    """Results of a forward and a backward, and of a forward in ``eval`` without gradients."""

    outputs: Sequence[Tensor]  # with gradients
    left: Mapping[str, Sequence[Tensor]]  # tensors that the forwards leave on modules and in arguments, by the place
    grads: Sequence[Tensor]  # that were put into the backward
    input_grads: Sequence[Tensor | None]
    param_grads: dict[str, Tensor | None]
    evaluated: Sequence[Tensor]
    records: dict[str, ParamRecord]


def _run(
    block: nn.Module,
    arguments: Arguments,
    *,
    grads: Sequence[Tensor] | None = None,
    records: dict[str, ParamRecord] | None = None,
    ranks: Ranks | None = None,
) -> _Result:
    inputs = tensors_of(arguments)
    params = dict(block.named_parameters())
    result, left = _call(block, arguments)
    outputs = tensors_of(result)
    if not outputs:
        raise RuntimeError("it returns no tensor with a gradient")
    backward = [*outputs, *(one for tensors in left.values() for one in tensors if one.requires_grad)]
    if grads is None:
        generator = torch.Generator().manual_seed(2)
        grads = [torch.randn(one.shape, generator=generator).to(one.dtype) for one in backward]
    elif ranks is not None:
        grads = [_share_of(grad, output, ranks) for grad, output in zip(grads, backward, strict=False)]
    torch.autograd.backward(backward, grads)
    block.eval()
    with torch.no_grad():
        result, left_in_evaluation = _call(block, arguments)
    left |= {f"{words} in evaluation": found for words, found in left_in_evaluation.items()}
    return _Result(
        outputs=[one.detach() for one in outputs],
        left={words: [one.detach() for one in found] for words, found in left.items()},
        grads=grads,
        input_grads=[one.grad for one in inputs],
        param_grads={name: param.grad for name, param in params.items()},
        evaluated=_float_tensors(result),
        records=records or {},
    )


def _call(block: nn.Module, arguments: Arguments) -> tuple[object, dict[str, list[Tensor]]]:
    """Call a block; return its result, and the tensors that it leaves on its modules and in its arguments."""
    before = _attributes(block)
    args, kwargs = with_own_activations(arguments)
    given = _tensors_in((args, kwargs))
    versions = [(one, one._version) for one in given if not one.requires_grad]
    result = block(*args, **kwargs)
    left = _changed(before, _attributes(block))
    known = set(map(id, given))
    added = [one for one in _tensors_in((args, kwargs)) if id(one) not in known]
    added += [one for one, version in versions if one._version != version]
    if added:
        left["tensor that the forward leaves in its arguments"] = [one.clone() for one in added]
    return result, left


def _tensors_in(tree: object) -> list[Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, Tensor)]


def _attributes(block: nn.Module) -> dict[str, list[Tensor]]:
    """Return copies of the tensors among the buffers and attributes of all modules, with their graphs."""
    found = {}
    for name, child in block.named_modules():
        given = {**child._buffers, **{key: one for key, one in vars(child).items() if key not in OF_EVERY_MODULE}}
        for key, value in given.items():
            tensors = [one.clone() for one in _tensors_in(value)]
            if tensors:
                found[f"tensor that the forward leaves as `{f'{name}.{key}'.lstrip('.')}`"] = tensors
    return found


def _changed(before: Mapping[str, Sequence[Tensor]], after: Mapping[str, list[Tensor]]) -> dict[str, list[Tensor]]:
    def is_same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
        return len(one) == len(other) and all(map(torch.equal, one, other))

    return {words: found for words, found in after.items() if not is_same(found, before.get(words, ()))}


def _share_of(grad: Tensor, output: Tensor, ranks: Ranks) -> Tensor:
    """Return the gradient of an output, which may be this rank's shard of the whole one."""
    dim = _sharded_dim(output, grad, ranks.size)
    return grad if dim is None else grad.chunk(ranks.size, dim)[ranks.rank]


def _sharded_dim(part: Tensor, whole: Tensor, size: int) -> int | None:
    """Return the one dimension in which a part is smaller than the whole, by the number of ranks."""
    if part.dim() != whole.dim():
        return None
    smaller = [dim for dim in range(whole.dim()) if part.shape[dim] != whole.shape[dim]]
    return smaller[0] if len(smaller) == 1 and part.shape[smaller[0]] * size == whole.shape[smaller[0]] else None


def _float_tensors(tree: object) -> list[Tensor]:
    return [one for one in _tensors_in(tree) if one.is_floating_point()]


def _run_in_parts(
    whole: nn.Module, arguments: Arguments, *, cut: CutBlock, size: int, grads: Sequence[Tensor]
) -> list[_Result]:
    """Return the results of every rank; outputs that are shards get shards of the gradients."""
    dtype = next(whole.parameters()).dtype
    ranks = ThreadRanks.group(size)
    blocks, records = [], []
    for one in ranks:  # one whole copy at a time
        blocks.append(copied(whole))
        records.append(cut(blocks[-1], one))

    def work(one: ThreadRanks) -> _Result:
        return _run(blocks[one.rank], replay(arguments, dtype), grads=grads, records=records[one.rank], ranks=one)

    return run_threads(ranks, work)


# -- Comparisons -------------------------------------------------------------------------------------------------------


def _compare(
    whole: nn.Module, arguments: Arguments, *, cut: CutBlock, size: int, expected: _Result, all_whole: bool
) -> list[Difference]:
    parts = _run_in_parts(whole, arguments, cut=cut, size=size, grads=expected.grads)
    found = [
        *_differences("result {}", expected.outputs, [part.outputs for part in parts], all_whole=all_whole),
        *_left_differences(expected.left, [part.left for part in parts]),
        *_differences("result {} in evaluation", expected.evaluated, [part.evaluated for part in parts]),
        *_differences("gradient of input {}", expected.input_grads, [part.input_grads for part in parts]),
    ]
    sizes = [rms(grad) for grad in expected.param_grads.values() if grad is not None and grad.any()]
    floor = 0.1 * statistics.median(sizes) if sizes else 1.0
    for name, grad in expected.param_grads.items():
        if grad is not None:
            found.append(_param_difference(name, grad, parts, floor))
    return found


def _differences(
    words: str,
    expected: Sequence[Tensor | None],
    parts: Sequence[Sequence[Tensor | None]],
    *,
    all_whole: bool = False,
) -> list[Difference]:
    """Compare tensors one by one. Behind the first, a tensor of the ranks may be their shard, as heads' weights are."""
    if any(len(part) != len(expected) for part in parts):
        return [Difference(words.format("list"), float("inf"))]
    found = []
    for number, value in enumerate(expected):
        if value is None:
            continue
        shares = [part[number] for part in parts]
        present = [share for share in shares if share is not None]
        if len(present) < len(shares):
            found.append(Difference(words.format(number), float("inf"), "it is missing on some ranks"))
            continue
        dim = _sharded_dim(present[0], value, len(present)) if number and not all_whole else None
        if dim is not None:
            present = [torch.cat(present, dim)]
        error = max(relative_error(share, value) for share in present)
        remedy = "" if error <= LIMIT else _remedy(relation(present, value))
        found.append(Difference(words.format(number), error, remedy, is_part=dim is not None))
    return found


def _left_differences(
    expected: Mapping[str, Sequence[Tensor]], parts: Sequence[Mapping[str, Sequence[Tensor]]]
) -> list[Difference]:
    """Compare the tensors that stay on modules and in arguments, which code outside of the block may read."""
    found = []
    for words in dict.fromkeys(name for one in (expected, *parts) for name in one):
        whole = expected.get(words, ())
        shares = [part.get(words, ()) for part in parts]
        error = float("inf")
        if all(len(share) == len(whole) for share in shares):
            error = max(_error(one, other) for share in shares for one, other in zip(share, whole, strict=True))
        remedy = "" if error <= LIMIT else "return it, or leave its module out of the plan"
        found.append(Difference(words, error, remedy))
    return found


def _error(found: Tensor, expected: Tensor) -> float:
    if torch.equal(found, expected):  # with infinities too, as masks have them
        return 0.0
    if found.is_complex():
        found, expected = torch.view_as_real(found), torch.view_as_real(expected)
    return relative_error(found, expected)


def _remedy(found: str) -> str:
    if found == "sum":
        return (
            "the sum over the ranks is right, so a sum is missing: a column layer, or a row layer, is not in the plan"
        )
    if found.startswith("shard"):
        return "the ranks return parts of it: a layer behind a column layer has to be a row layer"
    return ""


def _param_difference(name: str, grad: Tensor, parts: Sequence[_Result], floor: float) -> Difference:
    words = f"gradient of parameter `{name}`"
    record = parts[0].records[name]
    shares = [part.param_grads[name] for part in parts]
    present = [share for share in shares if share is not None]
    if len(present) < len(shares):
        return Difference(words, float("inf"), "some ranks have no gradient of it")
    if record.kind == "partial":
        total = torch.stack(present).sum(0)
        error = relative_error(total, grad, floor)
        all_whole = all(relative_error(share, grad, floor) <= LIMIT for share in present)
        remedy = "every rank has the whole gradient: do not mark it 'partial'" if all_whole else ""
    elif record.kind == "cut":
        expected = [part.records[name].local(grad) for part in parts]
        error = _largest_error(present, expected, floor)
        remedy = _scale_remedy(present, expected, floor)
    else:
        error = max(relative_error(share, grad, floor) for share in present)
        is_partial = relative_error(torch.stack(present).sum(0), grad, floor) <= LIMIT
        remedy = f"the sum over the ranks is right: mark `{name}` 'partial'" if is_partial else ""
    return Difference(words, error, remedy if error > LIMIT else "")


def _largest_error(found: Sequence[Tensor], expected: Sequence[Tensor], floor: float) -> float:
    return max(relative_error(one, other, floor) for one, other in zip(found, expected, strict=True))


def _scale_remedy(found: Sequence[Tensor], expected: Sequence[Tensor], floor: float) -> str:
    size = len(found)
    if _largest_error([one / size for one in found], expected, floor) <= LIMIT:
        return f"it is {size} times too large: something behind it is summed over the ranks once too often"
    if _largest_error([one * size for one in found], expected, floor) <= LIMIT:
        return f"it is {size} times too small: a sum over the ranks behind it is missing"
    return ""


def _find_suspect(
    whole: nn.Module, arguments: Arguments, *, cut: CutBlock, size: int, grads: Sequence[Tensor]
) -> Suspect | None:
    """Run once more, with the results of all modules noted."""
    dtype = next(whole.parameters()).dtype
    traced = copied(whole)
    reference = ModuleTrace(traced)
    _run(traced, replay(arguments, dtype), grads=grads)
    ranks = ThreadRanks.group(size)
    blocks = [copied(whole) for _ in ranks]
    traces: list[ModuleTrace] = []
    try:
        for block, one in zip(blocks, ranks, strict=True):
            cut(block, one)
            traces.append(ModuleTrace(block))
        run_threads(ranks, lambda one: _run(blocks[one.rank], replay(arguments, dtype), grads=grads, ranks=one))
    except Exception:
        if len(traces) < size:
            return None
    return suspect(reference, traces)
