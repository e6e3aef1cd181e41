from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_zero_ops import cross_entropy, linear_cross_entropy
from lightning_zero_ops.cut_cross_entropy import Terms
from tests.ops.accuracy import assert_close, assert_same_specials, fresh
from tests.ops.ahead_of_time import Compilation, assert_lean
from tests.ops.processes import CAPABILITIES, compiled, interpreted
from tests.sampling import sample

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-2},
    "softcap": {"softcap": 5.0},
    "all": {"label_smoothing": 0.2, "z_loss": 1e-3, "softcap": 10.0, "reduction": "sum", "ignore_index": 3},
}


def _inputs(
    tokens: int, hidden: int, vocabulary: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, weight, target (some of it ignored) and bias."""
    x, bias = torch.randn(tokens, hidden, generator=generator), torch.randn(vocabulary, generator=generator)
    weight = torch.randn(vocabulary, hidden, generator=generator) * 2 / hidden**0.5
    target = torch.randint(vocabulary, (tokens,), generator=generator)
    target[1::5] = -100
    return x.to(dtype), weight.to(dtype), target, bias.to(dtype)


def _plain(x: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, **options: Any) -> Tensor:
    """Return the loss in plain PyTorch, with the logits in at least fp32."""
    options = {"ignore_index": -100, "reduction": "mean", "z_loss": 0.0, "label_smoothing": 0.0, **options}
    logits = F.linear(x, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if options.get("softcap"):
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    names = ("ignore_index", "label_smoothing")
    losses = F.cross_entropy(logits, target, reduction="none", **{name: options[name] for name in names})
    counted = target != options["ignore_index"]
    total = (losses + options["z_loss"] * logits.logsumexp(1).square() * counted).sum()
    return total / counted.sum() if options["reduction"] == "mean" else total


def _with_gradients(function: Any, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor, **options: Any) -> Any:
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weight, bias)]
    loss = function(leaves[0], leaves[1], target, bias=leaves[2], **options)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


# -- In the interpreter ------------------------------------------------------------------------------------------------


def _interpret(dtype: str, softcap: float, smoothing: float, z_loss: float) -> None:
    """Compare the launchers with the references; the interpreter truncates, so 16 bits may be one unit apart."""
    terms = Terms(-100, smoothing, z_loss, softcap)
    for tokens, vocabulary in ((1, 1), (3, 63), (2, 1000), (2, 9001)):
        logits = (3 * torch.randn(tokens, vocabulary + 7)).to(DTYPES[dtype])[:, :vocabulary]
        target = torch.randint(vocabulary, (tokens,))
        target[1:2] = -100
        factor = torch.tensor(0.25)
        found, expected = [], []
        for rows, results in ((cross_entropy._launch_rows, found), (cross_entropy._rows_reference, expected)):
            losses, grad = torch.empty(tokens), logits.clone()
            rows(grad, target, losses, factor, terms)
            results += [losses, grad]
        eps = torch.finfo(DTYPES[dtype]).eps
        torch.testing.assert_close(found[0], expected[0], rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(found[1], expected[1], rtol=max(eps, 2e-5), atol=1e-6)


INF, NAN = float("inf"), float("nan")
# Logits of a row (the others are random) and its label, in a vocabulary of more than one block of the kernel.
SPECIAL_ROWS: dict[str, tuple[list[tuple[Any, float]], int]] = {
    "one -inf": ([(5, -INF)], 3),
    "padded vocabulary": ([(slice(9000, None), -INF)], 3),
    "first block -inf": ([(slice(0, 8192), -INF)], 8500),
    "label -inf": ([(3, -INF)], 3),
    "all -inf": ([(slice(None), -INF)], 3),
    "inf": ([(5, INF)], 3),
    "label inf": ([(3, INF)], 3),
    "nan": ([(8999, NAN)], 3),
    "label too large": ([], 9001),
    "label negative": ([], -1),
    "ignored nan": ([(5, NAN)], -100),
    "ignored -inf": ([(slice(None), -INF)], -100),
    "huge": ([(5, 1e25)], 3),
    "label huge": ([(3, 1e25)], 3),
    "plain": ([], 3),
}


def _special_rows(rows: Any, softcap: float, smoothing: float, z_loss: float, dtype: torch.dtype) -> list[Tensor]:
    """Return losses and gradients of ``SPECIAL_ROWS``."""
    logits = torch.randn(len(SPECIAL_ROWS), 9001, generator=torch.Generator().manual_seed(1)).to(dtype)
    for row, (changes, _) in zip(logits, SPECIAL_ROWS.values(), strict=True):
        for at, value in changes:
            row[at] = value
    target, losses = torch.tensor([label for _, label in SPECIAL_ROWS.values()]), torch.empty(len(SPECIAL_ROWS))
    rows(logits, target, losses, torch.tensor(0.25), Terms(-100, smoothing, z_loss, softcap))
    return [losses, logits]


def _interpret_special(softcap: float, smoothing: float, z_loss: float) -> None:
    for dtype in DTYPES.values():
        options = (softcap, smoothing, z_loss, dtype)
        found = _special_rows(cross_entropy._launch_rows, *options)
        assert_same_specials(found, _special_rows(cross_entropy._rows_reference, *options))


def _interpret_all(dtype: str) -> None:
    """The loop over chunks around the kernel."""
    x, weight, target, bias = _inputs(37, 16, 50, DTYPES[dtype], torch.Generator().manual_seed(1))
    settings = (-100, 0.1, 1e-3, 5.0, True, 10, [True, True, True])
    found = cross_entropy._launch(x, weight, target, bias, *settings)
    for one, other in zip(found, cross_entropy._reference(x, weight, target, bias, *settings), strict=True):
        rtol = 1e-5 if one.dtype == torch.float32 else 2 * torch.finfo(one.dtype).eps
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol * other.abs().max().item())


INTERPRETED = {
    **{f"plain-{dtype}": partial(_interpret, dtype, 0.0, 0.0, 0.0) for dtype in DTYPES},
    **{f"terms-{dtype}": partial(_interpret, dtype, 2.0, 0.1, 1e-3) for dtype in DTYPES},
    **{f"chunks-{dtype}": partial(_interpret_all, dtype) for dtype in DTYPES},
    "special": partial(_interpret_special, 0.0, 0.0, 0.0),
    "special-terms": partial(_interpret_special, 0.0, 0.1, 1e-3),
    "special-capped": partial(_interpret_special, 2.0, 0.1, 1e-3),
}


@pytest.mark.parametrize("case", INTERPRETED)
def test_kernel_is_its_reference_in_the_interpreter(case: str) -> None:
    assert interpreted(__name__, case) == ""


# -- Ahead of time -----------------------------------------------------------------------------------------------------

COMPILED = {
    f"{dtype}-{'capped' if capped else 'plain'}": Compilation(
        cross_entropy._rows_kernel,
        {
            **{"logits": f"*{dtype}", "target": "*i64", "losses": "*fp32", "factor": "*fp32"},
            **dict.fromkeys(("stride", "vocabulary"), "i32"),
            "ignore_index": "i64",
            **dict.fromkeys(("smoothing", "z_loss", "softcap"), "fp32"),
        },
        {"CAPPED": capped, "BLOCK": cross_entropy._MAX_BLOCK},
        cross_entropy._NUM_WARPS,
    )
    for dtype in DTYPES
    for capped in (False, True)
}


@pytest.mark.parametrize("capability", sample(CAPABILITIES, 80, 90))
@pytest.mark.parametrize("case", sample(COMPILED, "bf16-plain"))
def test_kernel_compiles_without_spills_and_loads_128_bits(case: str, capability: int) -> None:
    # The label, its logit and the factor are single values.
    assert_lean(compiled(__name__, case, capability), scalar_loads=3)


# -- On this machine ---------------------------------------------------------------------------------------------------


# Type, tokens of a chunk (two chunks or five), options. Every option once in fp32, every type once; the rest is slow.
EXACT = list(itertools.product(DTYPES, (167, 80), OPTIONS))
EXACT_FAST = [("fp32", 80, name) for name in OPTIONS] + [(dtype, 167, "mean") for dtype in DTYPES]


@pytest.mark.parametrize("case", sample(EXACT, *EXACT_FAST), ids=lambda case: "-".join(map(str, case)))
def test_loss_and_its_gradients_are_as_exact_as_pytorch(case: tuple[str, int, str]) -> None:
    dtype, chunk_tokens, options = case[0], case[1], OPTIONS[case[2]]
    generator = fresh()
    found: dict[str, list[list[Tensor]]] = {"ours": [], "plain": [], "exact": []}
    # Several draws: the error of plain PyTorch in one number, the loss, says nothing.
    for _ in range(8):
        x, weight, target, bias = _inputs(333, 64, 1000, DTYPES[dtype], generator)
        target = torch.where(target < 0, options.get("ignore_index", -100), target)
        found["exact"].append(_with_gradients(_plain, x.double(), weight.double(), target, bias.double(), **options))
        found["plain"].append(_with_gradients(_plain, x, weight, target, bias, **options))
        found["ours"].append(
            _with_gradients(linear_cross_entropy, x, weight, target, bias, chunk_tokens=chunk_tokens, **options)
        )
    joined = {name: [torch.stack(parts) for parts in zip(*draws, strict=True)] for name, draws in found.items()}
    losses, *grads = zip(joined["ours"], joined["exact"], joined["plain"], strict=True)
    if dtype == "fp32":
        assert_close(*losses, is_reduction=True)
    else:
        # The logits are rounded to 16 bits, here and in plain PyTorch.
        ours, plain = ((losses[index].double() - losses[1]).abs().max() for index in (0, 2))
        assert ours <= 2 * plain
    for one in grads:
        assert_close(*one, is_reduction=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_tokens", [1, 7, 50, None])
def test_any_chunks_give_the_same_result(chunk_tokens: int | None, dtype: str) -> None:
    """More than two chunks of 16 bits are added in fp32, so that they are as exact as few."""
    x, weight, target, bias = _inputs(50, 16, 300, DTYPES[dtype], torch.Generator().manual_seed(0))
    whole = _with_gradients(linear_cross_entropy, x, weight, target, bias, chunk_tokens=1000)
    parts = _with_gradients(linear_cross_entropy, x, weight, target, bias, chunk_tokens=chunk_tokens)
    for one, other in zip(parts, whole, strict=True):
        rtol = 1e-5 if one.dtype == torch.float32 else 2 * torch.finfo(one.dtype).eps
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol * other.abs().max().item())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sums_over_many_chunks_are_rounded_once(dtype: str) -> None:
    """In 16 bits a sum over 64 chunks has several times the error of one chunk: Note [Sums over chunks]."""
    x, weight, _, bias = _inputs(1024, 16, 50, DTYPES[dtype], torch.Generator().manual_seed(0))
    target = torch.randint(50, (1024,), generator=torch.Generator().manual_seed(0))
    _, _, *exact = _with_gradients(_plain, x.double(), weight.double(), target, bias.double())
    errors = []
    for chunk_tokens in (1024, 16):
        _, _, *found = _with_gradients(linear_cross_entropy, x, weight, target, bias, chunk_tokens=chunk_tokens)
        errors.append([(one.double() - other).norm().item() for one, other in zip(found, exact, strict=True)])
    for whole, parts in zip(*errors, strict=True):
        assert parts < 1.2 * whole


@pytest.mark.parametrize("scale", [0.25, 3.0])
def test_gradient_of_the_loss_reaches_all_gradients(scale: float) -> None:
    x, weight, target, bias = _inputs(20, 8, 30, torch.float32, torch.Generator().manual_seed(0))

    def scaled(function: Any) -> Any:
        return _with_gradients(lambda *args, **kwargs: scale * function(*args, **kwargs), x, weight, target, bias)

    for one, other in zip(scaled(linear_cross_entropy), scaled(_plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def assert_scaled_gradients_are_rounded_once(dtype: torch.dtype, is_kept: bool) -> None:
    """Compare with products in fp32; third parts are 1.001 times as much in bf16."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tensors = [torch.randn(shape).to(dtype).requires_grad_() for shape in ((20, 8), (30, 8), (30,))]
    target = torch.arange(20)

    def gradients(scale: float) -> tuple[Tensor, ...]:
        loss = scale * linear_cross_entropy(*tensors[:2], target, bias=tensors[2], reduction="sum")
        return torch.autograd.grad(loss, tensors, retain_graph=is_kept)

    for one, whole in zip(gradients(1 / 3), gradients(1.0), strict=True):
        assert torch.equal(one, (whole.float() * torch.tensor(1 / 3)).to(dtype))


@pytest.mark.parametrize("is_kept", [False, True], ids=["once", "kept"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_the_gradient_of_the_loss_is_not_rounded_to_16_bits(dtype: torch.dtype, is_kept: bool) -> None:
    assert_scaled_gradients_are_rounded_once(dtype, is_kept)


def test_the_gradient_of_the_loss_is_not_rounded_to_16_bits_in_a_batch() -> None:
    x, weight, target, _ = _inputs(20, 8, 30, torch.bfloat16, torch.Generator().manual_seed(0))
    leaves, factors = (x.requires_grad_(), weight.requires_grad_()), torch.tensor([1.0, 1 / 3])
    loss = linear_cross_entropy(x, weight, target, reduction="sum")
    for whole, third in torch.autograd.grad(loss, leaves, factors, is_grads_batched=True):
        assert torch.equal(third, (whole.float() * factors[1]).bfloat16())


def test_retained_graph_gives_the_same_gradients_again() -> None:
    x, weight, target, _ = _inputs(20, 8, 30, torch.float32, torch.Generator().manual_seed(0))
    x.requires_grad_()
    weight.requires_grad_()
    loss = linear_cross_entropy(x, weight, target)
    first = torch.autograd.grad(2.0 * loss, (x, weight), retain_graph=True)
    second = torch.autograd.grad(2.0 * loss, (x, weight))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_batched_gradients_of_the_loss_reach_all_gradients() -> None:
    """They were multiplied in place by several numbers at once, which PyTorch refused by a name of its own."""
    x, weight, target, _ = _inputs(20, 8, 30, torch.float32, torch.Generator().manual_seed(0))
    leaves, factors = (x.requires_grad_(), weight.requires_grad_()), torch.tensor([1.0, -3.0])
    single = torch.autograd.grad(linear_cross_entropy(x, weight, target), leaves)
    batched = torch.autograd.grad(linear_cross_entropy(x, weight, target), leaves, factors, is_grads_batched=True)
    for one, other in zip(batched, single, strict=True):
        assert torch.equal(one, torch.stack([other, -3.0 * other]))


def test_a_batch_of_losses_has_gradients() -> None:
    """Inside of `vmap` a tensor does not say that it requires a gradient: there was none, without a word."""
    x, weight, target, _ = _inputs(20, 8, 30, torch.float32, torch.Generator().manual_seed(0))
    weights = torch.stack([weight, 2 * weight]).requires_grad_()
    losses = torch.vmap(lambda weight: linear_cross_entropy(x, weight, target))(weights)
    expected = torch.stack([_plain(x, weight, target) for weight in weights])
    torch.testing.assert_close(losses, expected)
    found, plain = (torch.autograd.grad(one.sum(), weights)[0] for one in (losses, expected))
    torch.testing.assert_close(found, plain)


def test_gradients_of_half_precision_survive_many_tokens_and_a_loss_scale() -> None:
    """Probabilities over the number of tokens are below what fp16 can hold; see Note [Headroom]."""
    x, weight, target, bias = _inputs(4096, 4, 512, torch.float16, torch.Generator().manual_seed(0))
    scaled = _with_gradients(lambda *a, **k: 2.0**12 * linear_cross_entropy(*a, **k), x, weight, target, bias)
    exact = _with_gradients(_plain, x.double(), weight.double(), target, bias.double())
    for one, other in zip(scaled[1:], exact[1:], strict=True):
        assert ((one.double() / 2**12 - other).norm() / other.norm()).item() < 2e-3


@pytest.mark.parametrize("scale", [1.0, 2.0**-6])
def test_gradients_of_half_precision_survive_the_sum_over_many_tokens(scale: float) -> None:
    """The sum needs no headroom: its gradients are not divided by tokens, and a loss scale comes in time for them."""
    x, weight, target, bias = _inputs(4096, 4, 512, torch.float16, torch.Generator().manual_seed(0))

    def scaled(*args: Any, **kwargs: Any) -> Tensor:
        return scale * linear_cross_entropy(*args, **kwargs)

    found = _with_gradients(scaled, x, weight, target, bias, reduction="sum")
    exact = _with_gradients(_plain, x.double(), weight.double(), target, bias.double(), reduction="sum")
    for one, other in zip(found[1:], exact[1:], strict=True):
        assert ((one.double() / scale - other).norm() / other.norm()).item() < 2e-3


def test_gradients_of_half_precision_are_finite_where_most_tokens_are_ignored() -> None:
    """The headroom was that of all tokens: with one that counts, its gradient overflowed at every loss scale."""
    x, weight, target, bias = _inputs(8192, 64, 512, torch.float16, torch.Generator().manual_seed(0))
    x, target = 8 * x, torch.where(torch.arange(8192) == 7, target, -100)
    found = _with_gradients(linear_cross_entropy, x, weight, target, bias)
    exact = _with_gradients(_plain, x.double(), weight.double(), target, bias.double())
    for one, other in zip(found[1:], exact[1:], strict=True):
        assert ((one.double() - other).norm() / other.norm()).item() < 2e-3


def test_gradients_of_half_precision_are_finite_where_all_tokens_have_one_label() -> None:
    """The mean over tokens was kept as their sum, which overflowed at every loss scale."""
    x, weight, target, bias = _inputs(8192, 16, 64, torch.float16, torch.Generator().manual_seed(0))
    x, weight, target = x + 12, weight / 20, torch.full_like(target, 3)
    found = _with_gradients(lambda *a, **k: 2.0**10 * linear_cross_entropy(*a, **k), x, weight, target, bias)
    exact = _with_gradients(_plain, x.double(), weight.double(), target, bias.double())
    for one, other in zip(found[1:], exact[1:], strict=True):
        assert ((one.double() / 2**10 - other).norm() / other.norm()).item() < 2e-3


@pytest.mark.parametrize("frozen", ["x", "weight", "bias", "all"])
def test_what_is_frozen_has_no_gradient(frozen: str) -> None:
    x, weight, target, bias = _inputs(20, 8, 30, torch.float32, torch.Generator().manual_seed(0))
    leaves = {"x": x, "weight": weight, "bias": bias}
    trained = [tensor.requires_grad_() for name, tensor in leaves.items() if frozen not in (name, "all")]
    loss = linear_cross_entropy(x, weight, target, bias=bias)
    assert loss.requires_grad == bool(trained)
    if trained:
        found, plain = (torch.autograd.grad(one, trained) for one in (loss, _plain(x, weight, target, bias=bias)))
        for one, other in zip(found, plain, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_second_derivatives_are_those_of_pytorch(options: dict[str, Any]) -> None:
    x, weight, target, _ = _inputs(10, 8, 30, torch.float32, torch.Generator().manual_seed(0))
    target = target.clamp(min=0)

    def penalty(function: Any) -> list[Tensor]:
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        grads = torch.autograd.grad(function(*leaves, target, **options), leaves, create_graph=True)
        return list(torch.autograd.grad(sum(grad.square().sum() for grad in grads), leaves))

    for one, other in zip(penalty(linear_cross_entropy), penalty(_plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_tokens_that_are_all_ignored_give_what_pytorch_gives() -> None:
    x, weight, _, bias = _inputs(4, 8, 30, torch.float32, torch.Generator().manual_seed(0))
    target = torch.full((4,), -100)
    loss, *grads = _with_gradients(linear_cross_entropy, x, weight, target, bias)
    assert loss.isnan()
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)
    assert linear_cross_entropy(x, weight, target, reduction="sum").item() == 0.0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_huge_logits_have_the_loss_of_pytorch(dtype: str) -> None:
    """Its square overflows above 1.8e19: without a z-loss, 0 times that made the loss NaN."""
    x = torch.tensor([[2e19, 1.0], [1.0, 1.0]], dtype=DTYPES[dtype])
    weight, target = torch.tensor([[1.0, 0.0], [0.5, 0.0], [-1.0, 0.0]], dtype=DTYPES[dtype]), torch.tensor([1, 0])
    expected = F.cross_entropy(F.linear(x, weight).float(), target)
    torch.testing.assert_close(linear_cross_entropy(x, weight, target), expected)
    torch.testing.assert_close(
        cross_entropy._whole(x, weight, target, None, Terms(-100, 0.0, 0.0, 0.0), True), expected
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_rows_that_are_not_finite_are_those_of_pytorch(smoothing: float) -> None:
    """The loss of -inf logits was NaN on a GPU, and labels outside had finite gradients, of another word."""
    losses, grads = _special_rows(cross_entropy._rows_reference, 0.0, smoothing, 0.0, torch.float32)
    logits = torch.randn(len(SPECIAL_ROWS), 9001, generator=torch.Generator().manual_seed(1))
    for index, (changes, label) in enumerate(SPECIAL_ROWS.values()):
        row = logits[index]
        for at, value in changes:
            row[at] = value
        if label in (9001, -1):
            assert losses[index].isnan()
            assert grads[index].isnan().all()
            continue
        if label == -100:
            assert losses[index] == 0
            assert not grads[index].any()
            continue
        row = row.double().requires_grad_()
        loss = F.cross_entropy(row, torch.tensor(label), label_smoothing=smoothing)
        torch.testing.assert_close(losses[index], loss.detach().float(), equal_nan=True)
        (grad,) = torch.autograd.grad(0.25 * loss, row)
        torch.testing.assert_close(grads[index], grad.float(), equal_nan=True, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_tokens_at_all_give_what_pytorch_gives(reduction: Any) -> None:
    x, weight = torch.zeros(0, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
    loss = linear_cross_entropy(x, weight, torch.zeros(0, dtype=torch.int64), reduction=reduction)
    assert loss.isnan() if reduction == "mean" else loss.item() == 0.0
    loss.backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))  # type: ignore[arg-type]


def test_hidden_states_of_no_elements_give_what_pytorch_gives() -> None:
    x, weight, bias, target = torch.randn(3, 0), torch.randn(5, 0), torch.randn(5), torch.arange(3)
    results = [_with_gradients(function, x, weight, target, bias) for function in (linear_cross_entropy, _plain)]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_leading_dimensions_are_tokens() -> None:
    x, weight, target, _ = _inputs(20, 8, 30, torch.float32, torch.Generator().manual_seed(0))
    found = linear_cross_entropy(x.view(4, 5, 8), weight, target.view(4, 5))
    assert torch.equal(found, linear_cross_entropy(x, weight, target))


def test_autocast_casts_as_for_linear() -> None:
    x, weight, target, _ = _inputs(20, 8, 30, torch.float32, torch.Generator().manual_seed(0))
    weight.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, plain = linear_cross_entropy(x, weight, target), _plain(x, weight, target)
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)
    ours, theirs = torch.autograd.grad(found, weight)[0], torch.autograd.grad(plain, weight)[0]
    torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-3)


X, W, T = torch.ones(4, 8), torch.ones(30, 8), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: linear_cross_entropy(X.double(), W.double(), T), "`x` has dtype torch.float64"),
        (lambda: linear_cross_entropy(X, W.half(), T), "`weight` has dtype torch.float16 beside `x`"),
        (lambda: linear_cross_entropy(X, W[:0], T), "`weight` must have at least one row"),
        (lambda: linear_cross_entropy(X, W[:, :4], T), r"`weight` must have shape \(30, 8\)"),
        (lambda: linear_cross_entropy(X, W, T[:3]), r"`target` must have shape \(4,\)"),
        (lambda: linear_cross_entropy(X, W, T, bias=torch.ones(8)), r"`bias` must have shape \(30,\)"),
        (lambda: linear_cross_entropy(X, W, T.float()), "`target` has dtype torch.float32"),
        (
            lambda: linear_cross_entropy(X, W, T + 30),
            "`target` contains 30. Labels are 0 to 29, or `ign",
        ),
        (lambda: linear_cross_entropy(X, W, T - 1), "`target` contains -1"),
        (lambda: linear_cross_entropy(X, W, T, reduction="none"), "`reduction='none'` is not known"),  # type: ignore[arg-type]
        (lambda: linear_cross_entropy(X, W, T, label_smoothing=1.5), "`label_smoothing=1.5` must be from 0 to 1"),
        (lambda: linear_cross_entropy(X, W, T, z_loss=-1.0), "`z_loss=-1.0` must be finite and not negative"),
        (lambda: linear_cross_entropy(X, W, T, softcap=0.0), "`softcap=0.0` must be positive and finite"),
        (lambda: linear_cross_entropy(X, W, T, chunk_tokens=0), "`chunk_tokens=0` must be at least 1"),
    ],
)
def test_wrong_arguments_are_refused(call: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()


# -- Bytes -------------------------------------------------------------------------------------------------------------


class _Bytes(TorchDispatchMode):
    """Count the bytes of storages that were made inside and are alive, on any device, the meta device too."""

    def __init__(self, *inputs: Tensor) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._changes: list[tuple[int, int]] = []  # numbers of storages, and by how many bytes more are alive
        self._numbers: dict[int, int] = {}  # of the storages that are alive
        self._seen = {tensor.untyped_storage()._cdata for tensor in inputs}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is cross_entropy._op:
            # What an op does inside is not dispatched to a mode; its implementation is plain PyTorch.
            with self:
                return cross_entropy._reference(*args, **kwargs)
        result = func(*args, **kwargs)
        for leaf in torch.utils._pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.alive += nbytes
        number = self._numbers[key] = len(self._changes)
        self._changes.append((number, nbytes))
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._forget, key, number, nbytes)

    def _forget(self, key: int, number: int, nbytes: int) -> None:
        self._seen.discard(key)
        self.alive -= nbytes
        self._changes.append((number, -nbytes))

    def peak_without(self, *tensors: Tensor) -> int:
        """Return the peak of all storages but those of tensors that are alive now."""
        left_out = {self._numbers[tensor.untyped_storage()._cdata] for tensor in tensors}
        return max(itertools.accumulate(nbytes for number, nbytes in self._changes if number not in left_out))


def _peaks(function: Callable[..., Tensor], dtype: torch.dtype, hidden: int, tokens: int = 8192) -> tuple[int, int]:
    """Return the peak of forward and backward on the meta device in two ways.

    Less the bytes of the gradients, whether or not they were alive then; and of all that is no gradient.
    """
    x = torch.empty(tokens, hidden, dtype=dtype, device="meta", requires_grad=True)
    weight = torch.empty(32000, hidden, dtype=dtype, device="meta", requires_grad=True)
    target = torch.empty(tokens, dtype=torch.int64, device="meta")
    with _Bytes(x, weight, target) as meter:
        function(x, weight, target).backward()
    assert x.grad is not None
    assert weight.grad is not None
    return meter.peak - x.grad.nbytes - weight.grad.nbytes, meter.peak_without(x.grad, weight.grad)


@pytest.mark.parametrize("hidden", sample([64, 1024, 4096], 64, 1024))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_transient_bytes_are_at_most_a_tenth_of_pytorchs(dtype: torch.dtype, hidden: int) -> None:
    """8,192 tokens, 32,000 words."""
    for ours, eager in zip(_peaks(linear_cross_entropy, dtype, hidden), _peaks(_eager, dtype, hidden), strict=True):
        print(f"{ours / 2**20:.0f} MiB of {eager / 2**20:.0f}")
        assert ours <= eager / 10


@pytest.mark.parametrize("hidden", [8192, 16384])
def test_transient_bytes_of_wide_models_are_a_tenth_where_gradients_are_none_of_them(hidden: int) -> None:
    """PyTorch's peak is before its gradients are there, so they may not be taken from it: docs/LOG.md."""
    _, ours = _peaks(linear_cross_entropy, torch.bfloat16, hidden)
    _, eager = _peaks(_eager, torch.bfloat16, hidden)
    assert ours <= eager / 10


@pytest.mark.parametrize("tokens", [32768, 65536])
def test_sums_over_chunks_of_large_vocabularies_cost_a_fifth_of_the_products(tokens: int) -> None:
    """By arithmetic, at 3.35 TB/s and 600 TFLOP/s: Note [Length of chunks]. With chunks of 128 MiB it was 1.4."""
    vocabulary, hidden = 262144, 4096
    x, weight = (torch.empty(size, hidden, dtype=torch.bfloat16, device="meta") for size in (tokens, vocabulary))
    chunks = cross_entropy._Chunks.plan(x, weight, 0)
    assert chunks.is_wide
    assert chunks.tokens * vocabulary * 2 <= 4 * vocabulary * hidden / 4
    sums = -(-tokens // chunks.tokens) * 12 * vocabulary * hidden / 3.35e12
    products = 6 * tokens * vocabulary * hidden / 600e12
    print(f"{chunks.tokens} tokens: {1e3 * sums:.0f} ms beside {1e3 * products:.0f}")
    assert sums <= products / 5


def _eager(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The usual way: logits in the dtype of the model, cross-entropy in fp32."""
    return F.cross_entropy(F.linear(x, weight).float(), target)


# -- torch.compile -----------------------------------------------------------------------------------------------------


def test_op_is_sound() -> None:
    x, weight, target, bias = _inputs(20, 8, 30, torch.float32, torch.Generator().manual_seed(0))
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    settings = (-100, 0.1, 1e-3, 5.0, True, 7, [True, True, True])
    torch.library.opcheck(cross_entropy._op, (leaves[0], leaves[1], target, leaves[2], *settings))


def test_loss_compiles_into_one_graph() -> None:
    x, weight, target, _ = _inputs(20, 8, 30, torch.float32, torch.Generator().manual_seed(0))
    leaves = [x.requires_grad_(), weight.requires_grad_()]

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return 2 * linear_cross_entropy(x, weight, target)

    compiled_loss = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled_loss(*leaves), leaves)
    for one, other in zip(found, torch.autograd.grad(2 * _plain(*leaves, target), leaves), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
