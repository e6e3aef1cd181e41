from __future__ import annotations

import gc
import threading
from weakref import ref

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from lightning_zero.forecast.live_bytes import LiveBytes

KIB = 1024


def test_storages_count_from_their_operation_to_their_end() -> None:
    with LiveBytes() as counter:
        one = torch.zeros(KIB)
        view = one[:10]
        assert counter.live == 4 * KIB
        two = torch.cat([one, one])
        assert counter.live == 12 * KIB
        del one
        assert counter.live == 12 * KIB  # the view holds it
        del view, two
    assert counter.live == 0
    assert counter.peak.nbytes == 12 * KIB


def test_fake_tensors_take_no_memory() -> None:
    with LiveBytes() as counter, FakeTensorMode():
        fakes = [torch.zeros(KIB), torch.zeros(KIB) + 1]
        assert counter.live == 0
    assert len(fakes) == 2


def test_tensors_that_only_autograd_has_are_counted() -> None:
    x = torch.ones(KIB, requires_grad=True)
    with LiveBytes() as counter:
        y = x.exp().exp()  # keeps the results of both
        assert counter.live == 8 * KIB
        y.sum().backward()
        del y
        assert counter.live == 4 * KIB  # the gradient


def test_a_storage_that_is_resized_counts_with_its_new_size() -> None:
    before = torch.UntypedStorage.resize_
    with LiveBytes() as counter:
        tensor = torch.zeros(KIB)
        tensor.untyped_storage().resize_(0)
        assert counter.live == 0
        tensor.untyped_storage().resize_(4 * KIB)
        assert counter.live == 4 * KIB
    assert torch.UntypedStorage.resize_ is before


def test_the_peak_names_phase_and_module() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, KIB)), nn.Linear(KIB, 8))
    with LiveBytes() as counter:
        counter.name_modules(model)
        with counter.phase("forward"):
            output = model(torch.ones(64, 8))
        assert (counter.peak.phase, counter.peak.module) == ("forward", "2")
        loss = output.sum()
        counter.reset_peak()
        with counter.phase("backward"):
            loss.backward()
        assert (counter.peak.phase, counter.peak.module) == ("backward", "2")


def test_recomputed_modules_are_named() -> None:
    model = nn.Sequential(nn.Linear(8, KIB), nn.GELU(), nn.Linear(KIB, 8))
    with LiveBytes() as counter:
        counter.name_modules(model)
        loss = checkpoint(model, torch.ones(64, 8, requires_grad=True), use_reentrant=False).sum()
        counter.reset_peak()
        with counter.phase("backward"):
            loss.backward()
    assert counter.peak.module in ("0", "1", "2")


def test_bytes_apart_and_away_are_not_counted() -> None:
    with LiveBytes(lambda: (7, 4 * KIB), num_away=1) as counter:
        with counter.apart():
            apart = torch.zeros(KIB)
        apart.add_(1)
        here = torch.zeros(2 * KIB)
    assert counter.live == here.nbytes
    assert counter.peak.nbytes == 4 * KIB
    assert counter.peak.parts == (7, 4 * KIB)


def test_memory_from_before_is_not_counted() -> None:
    before = torch.ones(KIB)
    with LiveBytes() as counter:
        before.view(2, -1).detach().add_(1)
        assert counter.live == 0
        counter.adopt(before)
        assert counter.live == before.nbytes
        assert torch.tensor([1.0]).nbytes == 4
        kept = torch.tensor([1.0, 2.0])
        assert counter.live == before.nbytes + kept.nbytes


def test_nothing_is_counted_while_it_is_suspended() -> None:
    model = nn.Linear(8, 8)
    with LiveBytes() as counter:
        counter.name_modules(model)
        with counter.suspended():
            kept = torch.zeros(KIB)
            thread = threading.Thread(target=model, args=(torch.ones(1, 8),))
            thread.start()
            thread.join()
        assert counter.live == 0
        again = kept * 2
        assert counter.live == again.nbytes


def test_modules_that_have_run_may_end() -> None:
    with LiveBytes() as counter:
        model = nn.Linear(KIB, KIB)
        model(torch.ones(1, KIB))
        end = ref(model)
        del model
        counter.reset_peak()
        kept = torch.zeros(1)
        gc.collect()
        assert end() is None
        assert counter.live == kept.nbytes
