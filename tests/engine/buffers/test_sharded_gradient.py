"""What a gradient of which a rank holds one segment allows, and that its norms are those of the whole."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero.comm.communicator import Communicator
from lightning_zero.config import Communication
from lightning_zero.engine.buffers.sharded_gradient import (
    Cut,
    ShardedGradient,
    norm_in_double,
    norm_over_ranks,
    sharded_gradient_class,
)
from lightning_zero.errors import ShardedGradientError
from tests import worlds
from tests.checkpoint.peak import peak_bytes
from tests.sampling import sample

CPU = torch.device("cpu")
ORDERS = [1.0, 2.0, 3.0, 0.0, math.inf, -math.inf]


def _shown(values: Tensor, communicator: Communicator) -> Tensor:
    gradient = values.clone()
    gradient.__class__ = sharded_gradient_class(communicator)
    return gradient


@pytest.fixture
def gradient() -> Tensor:
    return _shown(torch.linspace(-2, 3, 7), Communicator(Communication(), CPU))


ELEMENTWISE: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda g: g + 1,
    "sub": lambda g: 1 - g,
    "mul": lambda g: g * g,
    "div": lambda g: g / 2,
    "floordiv": lambda g: g // 2,
    "pow": lambda g: g**2,
    "neg": lambda g: -g,
    "abs": lambda g: abs(g),
    "compare": lambda g: g > 0,
    "in-place": lambda g: g.mul_(2).add_(1).clamp_(-1, 1),
    "augmented": lambda g: g.__imul__(0.5),
    "clamp": lambda g: torch.clamp(g, min=0),
    "clip": lambda g: torch.clip(g, -1, 1),
    "nan_to_num": lambda g: torch.nan_to_num(g, nan=0.0),
    "where": lambda g: torch.where(g > 0, g, torch.zeros(7)),
    "where, by keyword": lambda g: torch.where(g > 0, input=g, other=torch.zeros(7)),
    "max-of-two, by keyword": lambda g: torch.max(g, other=torch.zeros(7)),
    "max-of-two": lambda g: torch.max(g, torch.zeros(7)),
    "minimum": lambda g: torch.minimum(g, torch.zeros(7)),
    "isfinite": lambda g: torch.isfinite(g),
    "to": lambda g: g.to(torch.float64),
    "half": lambda g: g.bfloat16(),
    "clone": lambda g: g.clone(),
    "detach": lambda g: g.detach(),
    "data": lambda g: g.data.mul_(3),
    "masked_fill": lambda g: g.masked_fill(torch.zeros(7, dtype=torch.bool), 0.0),
    "addcmul": lambda g: torch.addcmul(g, g, g),
    "lerp": lambda g: torch.lerp(g, torch.ones(7), 0.5),
    "foreach": lambda g: torch._foreach_mul([g], 2.0)[0],
    "zeros_like": lambda g: torch.zeros_like(g),
    "copy_": lambda g: g.copy_(torch.ones(7)),
    "sigmoid": lambda g: g.sigmoid(),
    "foreach zero": lambda g: (torch._foreach_zero_([g]), g)[1],
    "foreach copy": lambda g: (torch._foreach_copy_([g], [torch.ones(7)]), g)[1],
    "foreach abs": lambda g: (torch._foreach_abs_([g]), g)[1],
    "foreach maximum": lambda g: (torch._foreach_maximum_([g], 0.5), g)[1],
    "abs_": lambda g: g.abs_(),
    "absolute": lambda g: g.absolute().negative(),
    "subtract": lambda g: g.subtract(2).multiply_(g).divide(3).true_divide_(2),
    "comparisons": lambda g: g.not_equal(0) & g.greater(-1) | (g.less_equal_(1) > 0),
    "isclose": lambda g: torch.isclose(g, torch.linspace(-2, 3, 7)),
    "arctan2": lambda g: g.arctan2(torch.ones(7)).arcsinh(),
    "log_sigmoid": lambda g: torch.nn.functional.logsigmoid(g),
    "threshold": lambda g: torch.nn.functional.threshold(g, 0.5, 0.0),
    "softsign": lambda g: torch.nn.functional.softsign(torch.nn.functional.tanhshrink(g)),
    "float_power": lambda g: g.float_power(2).fix(),
    "special": lambda g: torch.special.expit(torch.special.erf(g)),
    "floor_divide": lambda g: g.floor_divide(2) + torch.special.entr(g.abs()),
}


@pytest.mark.parametrize("name", list(ELEMENTWISE))
def test_elementwise_operations_act_on_the_segment(name: str, gradient: Tensor) -> None:
    plain = torch.linspace(-2, 3, 7)
    result, expected = ELEMENTWISE[name](gradient), ELEMENTWISE[name](plain)
    assert result.dtype == expected.dtype
    assert torch.equal(result.as_subclass(Tensor), expected)
    assert torch.equal(gradient.as_subclass(Tensor), plain)  # what was written in place


def _cut(values: Tensor, shape: tuple[int, ...], start: int) -> Tensor:
    cut = Cut("block.weight", torch.Size(shape), start, start + values.numel())
    gradient = values.clone()
    gradient.__class__ = sharded_gradient_class(Communicator(Communication(), CPU), cut)
    return gradient


BESIDE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "in-place": lambda g, mask: g.mul_(mask),
    "augmented": lambda g, mask: g.__imul__(mask),
    "left": lambda g, mask: mask * g,
    "where": lambda g, mask: torch.where(mask > 0, g, 0.0),
    "keyword": lambda g, mask: torch.add(input=g, other=mask, alpha=2),
    "foreach": lambda g, mask: torch._foreach_mul([g, g], [mask, mask])[1],
    "copy_": lambda g, mask: g.copy_(mask),
    "segment": lambda g, mask: g * mask.reshape(-1)[3:10],
    "a number": lambda g, mask: g * torch.tensor([2.0]),
    "another gradient": lambda g, mask: g * g.clone() + g,
    "dtype": lambda g, mask: g.type_as(torch.ones(3, dtype=torch.float64)).to(mask),
}


@pytest.mark.parametrize("name", list(BESIDE))
def test_whole_tensors_beside_a_gradient_are_cut(name: str) -> None:
    whole, mask = torch.linspace(-2, 3, 12).view(4, 3), torch.arange(12.0).view(4, 3)
    gradient = _cut(whole.reshape(-1)[3:10], (4, 3), 3)
    expected = whole * mask if name == "segment" else BESIDE[name](whole.clone(), mask)
    result = BESIDE[name](gradient, mask)
    assert isinstance(result, ShardedGradient)
    assert type(result) is type(gradient)
    assert torch.equal(result.as_subclass(Tensor), expected.reshape(-1)[3:10])


NOISE: dict[str, Callable[[Tensor], Any]] = {
    "dropout": lambda g: torch.nn.functional.dropout(g, 0.5),
    "dropout_": lambda g: torch.nn.functional.dropout(g, 0.5, inplace=True),
    "alpha_dropout": lambda g: torch.nn.functional.alpha_dropout(g, 0.5, training=True),
    "normal": lambda g: torch.normal(g, 2.0),
    "normal-of-two": lambda g: torch.normal(g, torch.full((4, 3), 2.0)),
    "normal-by-keyword": lambda g: torch.normal(mean=0.0, std=g.abs()),
    "bernoulli": lambda g: torch.bernoulli(g.sigmoid()),
    "randn_like": lambda g: torch.randn_like(g),
}


@pytest.mark.parametrize("name", list(NOISE))
def test_noise_is_that_of_the_whole(name: str) -> None:
    whole = torch.linspace(-2, 3, 12).view(4, 3)
    gradient = _cut(whole.reshape(-1)[3:10], (4, 3), 3)
    torch.manual_seed(1)
    expected = NOISE[name](whole)
    torch.manual_seed(1)
    result = NOISE[name](gradient)
    assert type(result) in (type(gradient), type(gradient.clone()))
    assert torch.equal(result.as_subclass(Tensor), expected.reshape(-1)[3:10])
    assert torch.equal(gradient.as_subclass(Tensor), whole.reshape(-1)[3:10])


def test_a_slice_of_everything_takes_whole_values_and_segments() -> None:
    for index in (slice(None), ..., (slice(None), slice(None)), (slice(None), ...)):
        gradient = _cut(torch.linspace(-2, 3, 7), (4, 3), 3)
        gradient[index] = gradient * 2
        assert torch.equal(gradient.as_subclass(Tensor), torch.linspace(-4, 6, 7))
        gradient[index] = torch.arange(3.0)
        assert torch.equal(gradient.as_subclass(Tensor), torch.arange(3.0).expand(4, 3).reshape(-1)[3:10])
        gradient[index] = 0.5
        assert torch.equal(gradient.as_subclass(Tensor), torch.full((7,), 0.5))


@pytest.mark.parametrize(
    "refused",
    [
        lambda g: g * torch.ones(3),
        lambda g: g.mul_(torch.ones(4, 1)),
        lambda g: torch.zeros(4, 3).add_(g),
        lambda g: torch.zeros(4, 3).copy_(g),
        lambda g: torch.add(g, g, out=torch.zeros(4, 3)),
        lambda g: torch._foreach_add_([torch.zeros(4, 3)], [g]),
        lambda g: torch.zeros(4, 3).bernoulli_(g),
    ],
    ids=["row", "column", "written", "copied", "out", "foreach", "drawn"],
)
def test_other_shapes_beside_a_gradient_are_refused_by_name(refused: Callable[[Tensor], Any]) -> None:
    gradient = _cut(torch.linspace(-2, 3, 7), (4, 3), 3)
    with pytest.raises(
        ShardedGradientError, match=r"gradient of `block.weight`, of which this rank holds elements 3 to"
    ):
        refused(gradient)


def test_gradients_of_a_list_keep_the_parameter_that_they_are_of() -> None:
    grads = [_cut(torch.ones(7), (4, 3), 3), _cut(torch.ones(2), (2, 2), 1)]
    assert [type(one) for one in torch._foreach_mul(grads, 2.0)] == [type(one) for one in grads]


def test_metadata_are_those_of_the_segment(gradient: Tensor) -> None:
    assert (gradient.shape, gradient.numel(), gradient.dtype, gradient.device) == ((7,), 7, torch.float32, CPU)
    assert gradient.is_floating_point()
    assert gradient in {gradient}
    assert isinstance(gradient, ShardedGradient)
    assert not gradient.requires_grad


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda g: g.sum(),
    "mean": lambda g: torch.mean(g),
    "var": lambda g: g.var(),
    "std": lambda g: torch.std(g),
    "prod": lambda g: g.prod(),
    "max": lambda g: g.max(),
    "min": lambda g: torch.min(g),
    "max-over-dimension": lambda g: torch.max(g, 0),
    "amax": lambda g: g.amax(),
    "aminmax": lambda g: g.aminmax(),
    "argmax": lambda g: g.argmax(),
    "median": lambda g: g.median(),
    "quantile": lambda g: g.quantile(0.5),
    "topk": lambda g: g.topk(2),
    "sort": lambda g: g.sort(),
    "cumsum": lambda g: g.cumsum(0),
    "any": lambda g: g.any(),
    "all": lambda g: torch.all(g),
    "histc": lambda g: torch.histc(g),
    "index": lambda g: g[0],
    "index-assignment": lambda g: g.__setitem__(0, 1.0),
    "iteration": lambda g: list(g),
    "view": lambda g: g.view(7, 1),
    "reshape": lambda g: g.reshape(-1),
    "flatten": lambda g: g.flatten(),
    "t": lambda g: g.t(),
    "T": lambda g: g.T,
    "T of data": lambda g: g.data.T,
    "mT": lambda g: g.mT,
    "H": lambda g: g.H,
    "mH": lambda g: g.detach().mH,
    "where it is": lambda g: torch.where(g > 0),
    "where, by keyword": lambda g: torch.where(condition=g > 0),
    "noise of its values": lambda g: torch.nn.functional.rrelu(g, training=True),
    "CUDA array": lambda g: g.__cuda_array_interface__,
    "unsqueeze": lambda g: g[None],
    "matmul": lambda g: g @ g,
    "dot": lambda g: torch.dot(g, g),
    "cat": lambda g: torch.cat([g, g]),
    "stack": lambda g: torch.stack([g, g]),
    "softmax": lambda g: g.softmax(0),
    "layer_norm": lambda g: torch.nn.functional.layer_norm(g, (7,)),
    "cosine": lambda g: torch.cosine_similarity(g, g, dim=0),
    "dist": lambda g: torch.dist(g, g),
    "item": lambda g: g.item(),
    "tolist": lambda g: g.tolist(),
    "numpy": lambda g: g.numpy(),
    "bool": lambda g: bool(g),
    "float": lambda g: float(g),
    "dropout-of-channels": lambda g: torch.nn.functional.dropout1d(g),
    "drawn into out": lambda g: torch.normal(g, 1.0, out=torch.zeros(7)),
    "svd": lambda g: torch.linalg.svdvals(g),
    "parameters_to_vector": lambda g: torch.nn.utils.parameters_to_vector([g]),
    "norm-over-dimension": lambda g: g.norm(dim=0),
    "norm-that-keeps-dimensions": lambda g: torch.linalg.vector_norm(g, 2.0, keepdim=True),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_whatever_needs_the_whole_gradient_is_refused(name: str, gradient: Tensor) -> None:
    with pytest.raises(ShardedGradientError, match=r"needs a whole gradient.*full_grad"):
        REFUSED[name](gradient)


NORMS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "vector_norm": torch.linalg.vector_norm,
    "keyword": lambda g, order: torch.linalg.vector_norm(g, ord=order),
    "linalg.norm": torch.linalg.norm,
    "torch.norm": torch.norm,
    "method": lambda g, order: g.norm(order),
    "p": lambda g, order: g.norm(p=order),
    "data": lambda g, order: g.data.norm(order),
    "detached": lambda g, order: g.detach().norm(order),
    "foreach": lambda g, order: torch._foreach_norm([g], order)[0],
}


def _norms(rank: int, world: int) -> list[str]:
    communicator = Communicator(Communication(), CPU)
    whole = torch.randn(20 * world - 7, generator=torch.Generator().manual_seed(1))
    whole[3] = 0.0
    segment = whole[rank * 20 : (rank + 1) * 20]
    wrong = []
    for name, norm in NORMS.items():
        for order in ORDERS:
            found, expected = norm(_shown(segment, communicator), order), torch.linalg.vector_norm(whole, order)
            if type(found) is not Tensor or not torch.allclose(found, expected, rtol=1e-6):
                wrong.append(f"{name} of order {order}: {found} instead of {expected}")
    for norm in (lambda g: g.norm(), torch.linalg.vector_norm, torch.linalg.norm, lambda g: g.norm("fro")):
        if not torch.allclose(norm(_shown(segment, communicator)), whole.norm(), rtol=1e-6):
            wrong.append(f"{norm} without an order")
    communicator.close()
    return wrong


@pytest.mark.parametrize("world", sample([1, 2, 3], 2))
def test_norms_of_every_order_are_those_of_the_whole_vector(world: int) -> None:
    assert worlds.run(_norms, world) == [[]] * world


def _cuts(rank: int, world: int) -> list[str]:
    communicator = Communicator(Communication(), CPU)
    whole = torch.randn(90, generator=torch.Generator().manual_seed(1))
    cuts = [[whole[30 * rank : 30 * rank + 30]], list(whole[30 * rank : 30 * rank + 30].split(7))]
    cuts += [[whole, whole[:0]] if rank == 1 else [], [whole[:0]] if rank else [whole]]
    wrong = []
    for order in ORDERS:
        found = [norm_over_ranks(cut, order, communicator).float().item() for cut in cuts]
        if len(set(found)) > 1 or not math.isclose(
            found[0], torch.linalg.vector_norm(whole, order).item(), rel_tol=1e-6
        ):
            wrong.append(f"order {order}: {found}")
    communicator.close()
    return wrong


def test_how_a_vector_is_cut_does_not_show_in_its_norm() -> None:
    assert worlds.run(_cuts, 3) == [[]] * 3


def _cuts_in_double(rank: int, world: int) -> set[float]:
    communicator = Communicator(Communication(), CPU)
    whole = torch.randn(90, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    found = set()
    for first in range(0, 91, 9):
        piece = whole.split([first, 90 - first])[rank]
        param = torch.nn.Parameter(torch.zeros_like(piece))
        param.grad = _shown(piece, communicator)
        for foreach in (True, False):
            found.add(torch.nn.utils.clip_grad_norm_([param], 1e9, foreach=foreach).item())
    communicator.close()
    return found


def test_how_a_gradient_in_fp64_is_cut_does_not_show_when_the_library_clips() -> None:
    """Each rank's norm was rounded, and squared again, so that the last bits were those of the cuts."""
    (first,), second = worlds.run(_cuts_in_double, 2)
    assert second == {first}


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_a_norm_of_complex_gradients_is_real(dtype: torch.dtype) -> None:
    """It was complex, which nothing can be compared with."""
    whole = torch.linspace(-2, 3, 7).to(dtype) * (1 + 2j)
    norm = _shown(whole, Communicator(Communication(), CPU)).norm()
    assert norm.dtype == whole.norm().dtype
    assert torch.allclose(norm, whole.norm())


NORMS_IN: dict[str, Callable[[Tensor, torch.dtype | None], Tensor]] = {
    "vector_norm": lambda g, dtype: torch.linalg.vector_norm(g, dtype=dtype),
    "linalg.norm": lambda g, dtype: torch.linalg.norm(g, dtype=dtype),
    "torch.norm": lambda g, dtype: torch.norm(g, 2, None, False, None, dtype),
    "method": lambda g, dtype: g.norm(dtype=dtype),
    "method, by place": lambda g, dtype: g.norm(2.0, None, False, dtype),
    "foreach": lambda g, dtype: torch._foreach_norm([g], 2.0, dtype)[0],
    "foreach, by keyword": lambda g, dtype: torch._foreach_norm([g], dtype=dtype)[0],
}


@pytest.mark.parametrize("name", NORMS_IN)
def test_a_norm_has_the_dtype_that_is_asked_for(name: str) -> None:
    """It was rounded to that of the gradient."""
    bf16 = torch.bfloat16
    for values, wanted in ((bf16, None), (bf16, torch.float32), (bf16, torch.float64), (torch.cfloat, torch.cdouble)):
        whole = torch.linspace(-2, 3, 7).to(values)
        found, expected = NORMS_IN[name](_shown(whole, Communicator(Communication(), CPU)), wanted), whole.to(wanted)
        assert found.dtype == (wanted or values).to_real()
        assert torch.allclose(found, torch.linalg.vector_norm(expected))
    with pytest.raises(RuntimeError, match="dtype should be real for real inputs"):
        NORMS_IN[name](_shown(torch.ones(7), Communicator(Communication(), CPU)), torch.cfloat)


@pytest.mark.parametrize("norm", [torch.linalg.vector_norm, torch.norm], ids=["vector_norm", "norm"])
def test_a_norm_that_is_to_be_written_somewhere_is_refused(gradient: Tensor, norm: Callable[..., Tensor]) -> None:
    with pytest.raises(ShardedGradientError, match="does not write to `out`"):
        norm(gradient, 2.0, out=torch.zeros(()))


def test_the_norm_of_what_this_rank_has_alone_needs_no_ranks() -> None:
    assert norm_over_ranks([torch.tensor([3.0, 4.0])], 2.0, None).item() == 5.0
    assert norm_over_ranks([], 2.0, None).item() == 0.0


def _clip(rank: int, world: int) -> None:
    """The library's functions are right without knowing."""
    communicator = Communicator(Communication(), CPU)
    whole = torch.randn(30, generator=torch.Generator().manual_seed(1))
    param = torch.nn.Parameter(torch.zeros(10))
    param.grad = _shown(whole[10 * rank : 10 * rank + 10], communicator)
    for foreach in (True, False):
        norm = torch.nn.utils.clip_grad_norm_([param], 1e9, foreach=foreach)
        assert torch.allclose(norm, whole.norm())
    torch.nn.utils.clip_grad_norm_([param], 0.5)
    expected = (whole * (0.5 / (whole.norm() + 1e-6)))[10 * rank : 10 * rank + 10]
    assert torch.allclose(param.grad.as_subclass(Tensor), expected, rtol=1e-5)
    torch.nn.utils.clip_grad_value_([param], 0.01)
    assert param.grad.as_subclass(Tensor).abs().max() <= 0.01
    communicator.close()


def test_clipping_of_the_library_sees_the_whole_norm() -> None:
    worlds.run(_clip, 3)


def test_a_copy_of_a_gradient_is_plain_data(gradient: Tensor) -> None:
    with pytest.raises(ShardedGradientError):
        copy.deepcopy(gradient).sum()


@pytest.mark.parametrize("order", [2.0, 3.0, math.inf, 0.0])
def test_the_norm_of_a_large_tensor_takes_little_memory(order: float) -> None:
    values = torch.ones(2**25)
    values[7] = -3.0
    assert peak_bytes(lambda: norm_in_double(values, order)) < 2**26  # a copy in float64 has four times that
    expected = torch.linalg.vector_norm(values, order, dtype=torch.float64)
    assert torch.allclose(norm_in_double(values, order), expected, rtol=1e-15, atol=0.0)
