from __future__ import annotations

import resource
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F

from lightning_zero.forecast.dry_run import DryRun
from lightning_zero.forecast.live_bytes import LiveBytes

MANY = 4096
GIB = 2**30


def test_nothing_large_is_computed_or_written() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with DryRun() as counter:
        weight = nn.Parameter(torch.randn(2**15, 2**15))
        loss = (weight @ torch.ones(2**15, 8)).square().mean()
        loss.backward()
        torch.optim.SGD([weight], lr=0.1, momentum=0.9).step()
        assert loss.item() == 0
        assert counter.peak.nbytes > 8 * GIB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # KiB


def test_fake_tensors_of_a_program_stay_fake_and_are_not_remembered() -> None:
    counter = DryRun()
    with counter, FakeTensorMode():
        rows, weights = torch.zeros(MANY, 16), torch.zeros(2, 16, 16)
        before = weakref.getweakrefcount(rows)
        product = torch._grouped_mm(rows, weights, torch.zeros(2, dtype=torch.int32))
        assert weakref.getweakrefcount(rows) == before
        assert product.shape == (MANY, 16)
        assert not counter.is_blank(product)  # another tensor may have its address later
        assert isinstance(product, FakeTensor)


def test_small_tensors_have_their_values() -> None:
    with DryRun():
        numbers = torch.arange(10)
        assert numbers.sum().item() == 45
        numbers += 1
        assert int(numbers.max()) == 10
        assert torch.tensor([3.0, 4.0]).norm().item() == 5
        assert torch.ones(10).repeat(MANY).shape == (10 * MANY,)


def test_values_that_are_read_of_large_tensors_are_zeros() -> None:
    with DryRun():
        large = torch.full((MANY,), 3.0)
        assert large[0].item() == 0
        assert not bool((large[:4] == 3).all())
        assert large[:4].sum().item() == 0
        positions = torch.arange(MANY)
        assert bool((positions.diff() == 1).all())


def _attention(x: Tensor) -> Any:
    q = x.view(2, 4, -1, 16)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


CALLS: dict[str, Callable[[Tensor], Any]] = {
    "product": lambda x: x.view(64, -1) @ x.view(-1, 64),
    "split": lambda x: x.chunk(3),
    "norm": lambda x: F.layer_norm(x.view(-1, 64), (64,), torch.ones(64)),
    "batch norm": lambda x: F.batch_norm(x.view(1, 4, -1), torch.zeros(4), torch.ones(4), training=True),
    "attention": _attention,
    "dropout": lambda x: F.dropout(x, 0.5, training=True),
    "loss": lambda x: F.cross_entropy(x.view(-1, 64), torch.zeros(x.numel() // 64, dtype=torch.long)),
    "sort": lambda x: x.sort(),
    "in place": lambda x: x.add_(1).mul_(2),
    "many": lambda x: torch._foreach_mul([x, x], 2.0),
    "strides": lambda x: x.view(64, -1).t() + 1,
    "convolution": lambda x: F.conv2d(x.view(1, 4, 32, -1), torch.ones(8, 4, 3, 3)),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_are_like_those_that_are_computed(name: str) -> None:
    found = []
    for counter in (LiveBytes(), DryRun()):
        with counter:
            results = torch.utils._pytree.tree_leaves(CALLS[name](torch.randn(2 * MANY)))
            found.append((counter.live, counter.peak.nbytes, [(one.shape, one.stride(), one.dtype) for one in results]))
    assert found[0] == found[1]


def test_operations_whose_results_depend_on_values_read_zeros() -> None:
    with DryRun():
        assert torch.zeros(MANY).bool().nonzero().shape[1] == 1
        assert torch.equal(torch.zeros(MANY), torch.zeros(MANY))


def test_arguments_of_equal_values_and_other_types_are_kept_apart() -> None:
    with DryRun():
        x = torch.zeros(MANY, dtype=torch.int32)
        assert (x * 1).dtype is torch.int32
        assert (x * 1.0).dtype is torch.float32
        assert (x * True).dtype is torch.int32


def test_new_tensors_have_the_default_dtype_of_their_time() -> None:
    """They had that of the first one of their size."""
    with DryRun():
        assert torch.zeros(MANY).dtype is torch.float32
        torch.set_default_dtype(torch.bfloat16)
        try:
            assert torch.zeros(MANY).dtype is torch.bfloat16
        finally:
            torch.set_default_dtype(torch.float32)


def test_threads_are_as_before() -> None:
    before = torch.get_num_threads()
    with DryRun():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_everything_is_computed_while_it_is_suspended() -> None:
    num_threads = torch.get_num_threads()
    with DryRun() as counter:
        large, whole = torch.full((MANY,), 3.0), torch.full((2**21,), 3)
        live = counter.live
        with counter.suspended():
            assert torch.full((MANY,), 3.0).sum().item() == 3 * MANY
            assert torch.get_num_threads() == num_threads
            counter.write([large, whole])
            assert 0 < large.mean().item() < 1
            assert whole.sum().item() == 0
        assert counter.live == live
        assert torch.get_num_threads() == 1
        assert torch.full((MANY,), 3.0)[0].item() == 0


def test_memory_that_nobody_has_written_is_zero() -> None:
    with DryRun():
        made = [torch.empty(8), torch.empty_like(torch.ones(8)), torch.ones(8).new_empty(4), torch.empty(3).long()]
        assert not any(bool(one.any()) for one in made)
