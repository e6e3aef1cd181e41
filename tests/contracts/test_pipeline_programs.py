"""What programs may do in a pipeline, and how they are refused."""

from __future__ import annotations

import random
import re
import time
import weakref
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_zero.config import Pipeline
from lightning_zero.errors import PipelineError
from lightning_zero.lightning.callbacks import ZeroMonitor
from lightning_zero.lightning.strategy import ZeroStrategy
from tests.lightning_programs import seeded, trainer
from tests.references import VOCAB, TinyGPT
from tests.sampling import sample
from tests.worlds import run


class Program(LightningModule):
    """A small decoder whose pieces a case can put together in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.net = TinyGPT(depth=4)

    def logits(self, ids: Tensor) -> Tensor:
        return self.net(ids)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.logits(batch[0]).flatten(0, 1), batch[1].flatten())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.logits(batch[0]).flatten(0, 1), batch[1].flatten()), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.logits(batch[0]).argmax(-1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


class Functional(Program):
    """Uses the embedding as the head without a name of its own."""

    def logits(self, ids: Tensor) -> Tensor:
        return F.linear(self.net.norm(self.net.body(self.net.embedding(ids))), self.net.embedding.weight)


class Around(Program):
    """Has parameters outside of the model, before and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(6, self.net.embedding.embedding_dim))
        self.temperature = nn.Parameter(torch.ones(()))

    def logits(self, ids: Tensor) -> Tensor:
        hidden = self.net.body(self.net.embedding(ids) + self.positions)
        return self.net.head(self.net.norm(hidden + 0.1 * self.positions)) * self.temperature


class ListsAround(Program):
    """Has lists of modules in front of the blocks and behind them, with skips from the ones to the others."""

    def __init__(self) -> None:
        super().__init__()
        width = self.net.embedding.embedding_dim
        self.net.downs = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.net.ups = nn.ModuleDict({f"up{number}": nn.Linear(width, width) for number in range(2)})

    def logits(self, ids: Tensor) -> Tensor:
        hidden, skips = self.net.embedding(ids), []
        for down in self.net.downs:
            hidden = down(hidden).tanh()
            skips.append(hidden)
        for block in self.net.blocks:
            hidden = block(hidden)
        for up in self.net.ups.values():
            hidden = up(hidden + skips.pop())
        return self.net.head(self.net.norm(hidden))


class Masked(Program):
    """Draws a mask inside the model and gives it to every block."""

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks = nn.ModuleList(Adds(self.net.embedding.embedding_dim) for _ in range(4))

    def logits(self, ids: Tensor) -> Tensor:
        hidden = self.net.embedding(ids) * 0.0
        mask = torch.rand(hidden.shape[1], 1)
        for block in self.net.blocks:
            hidden = block(hidden, mask=mask)
        return self.net.head(hidden)


class Adds(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        MASKS.append(mask.detach().clone())
        return x + mask * self.weight


MASKS: list[Tensor] = []  # that blocks of this rank were given


class Skip(Program):
    def logits(self, ids: Tensor) -> Tensor:
        start = self.net.embedding(ids)
        return self.net.head(self.net.norm(self.net.body(start) + start))


class AddsEarlyValue(Program):
    """Adds to its loss in place what the first stage has computed."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        start = self.net.embedding(batch[0])
        loss = F.cross_entropy(self.net.head(self.net.body(start)).flatten(0, 1), batch[1].flatten())
        loss += 10.0 * start.pow(2).mean()
        return loss


class FillsSlices(Program):
    def logits(self, ids: Tensor) -> Tensor:
        start = self.net.embedding(ids)
        kept = torch.zeros(2, *start.shape)
        kept[0] = start
        kept[1] = self.net.body(start)
        return self.net.head(kept.sum(0))


class WritesOut(Program):
    def logits(self, ids: Tensor) -> Tensor:
        start = self.net.embedding(ids)
        hidden = self.net.body(start)
        with torch.no_grad():
            scale = torch.add(start.mean((1, 2), keepdim=True), 1.0, out=torch.ones(len(ids), 1, 1))
        return self.net.head(hidden) * scale


class SkipsInPlace(Program):
    def logits(self, ids: Tensor) -> Tensor:
        start = self.net.embedding(ids)
        hidden = self.net.body(start)
        hidden += start
        return self.net.head(self.net.norm(hidden))


class WritesInto(nn.Module):
    """Changes what it is given in place, through a view."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1)
        flat *= 1.5
        return x + self.layer(x)


class SkipsWhatIsWritten(Program):
    """Needs at its end what its blocks have changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks = nn.ModuleList(WritesInto(self.net.embedding.embedding_dim) for _ in range(4))

    def logits(self, ids: Tensor) -> Tensor:
        start = self.net.embedding(ids) * 1.0
        return self.net.head(self.net.norm(self.net.body(start) + start))


class Measures(nn.Embedding):
    """Returns a number that it reads from what it computes."""

    def forward(self, ids: Tensor) -> Any:
        hidden = super().forward(ids)
        return hidden, float(hidden.detach().abs().mean())


class ReadsInside(Program):
    def __init__(self) -> None:
        super().__init__()
        self.net.embedding = Measures(VOCAB, self.net.embedding.embedding_dim)

    def logits(self, ids: Tensor) -> Tensor:
        hidden, scale = self.net.embedding(ids)
        return self.net.head(self.net.norm(self.net.body(hidden))) * scale


class ReturnsView(nn.Embedding):
    def forward(self, ids: Tensor) -> Any:
        hidden = super().forward(ids)
        return hidden, hidden[:, :1]


class WritesShared(Program):
    def __init__(self) -> None:
        super().__init__()
        self.net.embedding = ReturnsView(VOCAB, self.net.embedding.embedding_dim)

    def logits(self, ids: Tensor) -> Tensor:
        hidden, first = self.net.embedding(ids)
        hidden *= 3.0
        return self.net.head(self.net.norm(self.net.body(hidden)) + first)


class AddsMask(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        return self.layer(x) + mask


class WritesArgument(Program):
    """Changes between blocks what all of them are given."""

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks = nn.ModuleList(AddsMask(self.net.embedding.embedding_dim) for _ in range(4))

    def logits(self, ids: Tensor) -> Tensor:
        hidden = self.net.embedding(ids)
        mask = hidden.detach().mean((0, 2))[:, None] * 1.0
        for block in self.net.blocks:
            hidden = block(hidden, mask=mask)
            mask.mul_(0.5)
        return self.net.head(hidden)


class Toggles(nn.Module):
    """A block that does nothing in its first epoch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.is_on = False

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x) if self.is_on else x


class TogglesProgram(Program):
    """Needs at its end what a block that is switched on later has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks = nn.ModuleList(Toggles(self.net.embedding.embedding_dim) for _ in range(4))

    def on_train_epoch_start(self) -> None:
        for block in self.net.blocks:
            block.is_on = self.current_epoch > 0

    def logits(self, ids: Tensor) -> Tensor:
        hidden = first = self.net.blocks[0](self.net.embedding(ids))
        for block in self.net.blocks[1:]:
            hidden = block(hidden)
        return self.net.head(self.net.norm(hidden + 0.5 * first))


class LaterValue(Program):
    """Begins to add a value of its first stage to its loss after some steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        start = self.net.embedding(batch[0])
        loss = F.cross_entropy(self.net.head(self.net.body(start)).flatten(0, 1), batch[1].flatten())
        return loss + start.pow(2).mean() if self.global_step >= 2 else loss


class Routed(nn.Module):
    """A block with a loss of its own, as routers have it."""

    def __init__(self, width: int, keeps: str) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.keeps = keeps
        if keeps == "buffer":
            self.register_buffer("aux", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        aux = self.layer(x).pow(2).mean()
        if self.keeps == "written":
            self.aux = torch.zeros(()).add_(aux)
        elif self.keeps == "list":
            self.aux = [aux]
        elif self.keeps == "buffer":
            self.aux.detach_().copy_(aux)
        else:
            self.aux = aux
        return x + self.layer(x)


class RoutedProgram(Program):
    """Adds the losses of its blocks to its loss."""

    def __init__(self, keeps: str = "attribute", adds: str = "in-place") -> None:
        super().__init__()
        self.keeps, self.adds = keeps, adds
        self.net.blocks = nn.ModuleList(Routed(self.net.embedding.embedding_dim, keeps) for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net.head(self.net.norm(self.net.body(self.net.embedding(batch[0]))))
        loss = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        for block in self.net.blocks:
            aux = block.aux[0] if self.keeps == "list" else block.aux
            if self.adds == "in-place":
                loss += 10.0 * aux
            else:
                loss = loss + 10.0 * aux
        return loss


class Taps(Program):
    """Adds to its loss what hooks have seen of every block."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        for block in self.net.blocks:
            block.register_forward_hook(lambda module, args, output: self.seen.append(output))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.clear()
        loss = super().training_step(batch, batch_idx)
        return loss + sum(one.pow(2).mean() for one in self.seen)


class Keeps(nn.Module):
    """A block that keeps or changes something in its own way."""

    def __init__(self, width: int, how: str, kept: list[Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.how = how
        self.kept = kept
        self.stats = {"n": torch.zeros(())}

    def forward(self, x: Tensor, given: list[Tensor], scale: Tensor) -> Tensor:
        out: Tensor = x + scale * self.layer(x)
        if self.how == "shared-list":
            self.kept.append(out)
        elif self.how == "list-argument":
            given.append(out)
        elif self.how == "real-argument":
            scale.add_(1.0)
        elif self.how == "dictionary":
            self.stats["n"] += 1.0
        return out


class AddsPositions(Program):
    """Changes in place what its embedding returns."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(6, self.net.embedding.embedding_dim))

    def logits(self, ids: Tensor) -> Tensor:
        hidden = self.net.embedding(ids)
        hidden += self.positions
        return self.net.head(self.net.norm(self.net.body(hidden)))


class KeepsProgram(Program):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.net.blocks = nn.ModuleList(Keeps(self.net.embedding.embedding_dim, how, self.kept) for _ in range(4))

    def logits(self, ids: Tensor) -> Tensor:
        given: list[Tensor] = []
        self.kept.clear()
        hidden, scale = self.net.embedding(ids), torch.ones(())
        for block in self.net.blocks:
            hidden = block(hidden, given, scale)
        return self.net.head(hidden + 0.1 * sum(given + self.kept))


class Monitored(Program):
    """Has hooks that read values, and change nothing."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.net.blocks:
            block.register_forward_hook(lambda module, args, output: SEEN_VALUES.append(output.abs().mean().item()))


SEEN_VALUES: list[float] = []


class LogsEarlyValue(Program):
    """Logs what the first stage alone has, before and behind the blocks, and what all stages have."""

    def __init__(self, behind: bool = False) -> None:
        super().__init__()
        self.behind = behind

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        start = self.net.embedding(batch[0])
        self.log("tokens", batch[0].float().mean())
        self.log("start", start.detach().pow(2).mean())
        loss = F.cross_entropy(self.net.head(self.net.body(start)).flatten(0, 1), batch[1].flatten())
        self.log("loss", loss)
        if self.behind:
            self.log("behind", start.detach().mean())
        return loss


class Tally:
    """An object that is called like a function."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1


class Counts(Program):
    """Counts its steps in an attribute, in a buffer, in a block and in a norm of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.in_dictionary = {"n": 0}
        self.in_list: list[int] = []
        self.in_tensor = torch.zeros(())
        self.in_tuple: tuple[int, ...] = ()
        self.in_callable = Tally()
        self.in_array = numpy.zeros(1)
        self.register_buffer("total", torch.zeros((), dtype=torch.long))
        self.net.norm = nn.BatchNorm1d(6)
        self.net.blocks.insert(1, Counted(6))
        self.net.blocks.append(Counted(6))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        self.total += 1
        self.in_dictionary["n"] += 1
        self.in_list.append(1)
        self.in_tensor += 1
        self.in_tuple = (*self.in_tuple, 1)
        self.in_callable()
        self.in_array[0] += 1
        SEEN.append((self.steps, int(self.total)))
        return super().training_step(batch, batch_idx)


class Counted(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.calls = 0
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.count += 1
        normed: Tensor = self.norm(x)
        return normed


SEEN: list[tuple[int, int]] = []  # by the code of a step


class SkipsBlock(Program):
    def logits(self, ids: Tensor) -> Tensor:
        hidden = self.net.embedding(ids)
        for block in self.net.blocks[:2]:
            hidden = block(hidden)
        return self.net.head(self.net.norm(hidden))


class Backwards(Program):
    def logits(self, ids: Tensor) -> Tensor:
        hidden = self.net.embedding(ids)
        for block in reversed(self.net.blocks):
            hidden = block(hidden)
        return self.net.head(self.net.norm(hidden))


class HeadFirst(Program):
    """Registers its head in front of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        children = self.net._modules
        self.net._modules = {name: children[name] for name in ("head", "norm", "embedding", "blocks")}


class NoLoss(Program):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)


class Manual(Program):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnBackward(Program):
    def backward(self, loss: Tensor) -> None:
        loss.backward()


class MetricInDictionary(Program):
    def __init__(self) -> None:
        super().__init__()
        self.metrics = {"val": {"acc": MulticlassAccuracy(VOCAB)}}


class Raises(Program):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and self.trainer.strategy.global_rank == 1:
            raise KeyError("the second stage")
        return super().training_step(batch, batch_idx)


class Frozen(Program):
    def __init__(self) -> None:
        super().__init__()
        self.net.embedding.requires_grad_(False)
        self.net.blocks[0].requires_grad_(False)


class Padded(Program):
    """Gives PyTorch's encoder a padding mask, for which it makes nested tensors in an evaluation."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        width = self.net.embedding.embedding_dim
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.net.blocks = nn.TransformerEncoder(layer, 4, enable_nested_tensor=nested)

    def logits(self, ids: Tensor) -> Tensor:
        return self.net.head(self.net.norm(self.net.blocks(self.net.embedding(ids), src_key_padding_mask=ids == 0)))


@dataclass
class State:
    hidden: Tensor
    aux: Tensor


@dataclass
class Registered(State):
    pass


torch.export.register_dataclass(Registered)


class AddsToState(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, state: State) -> State:
        hidden = state.hidden + self.layer(state.hidden)
        return type(state)(hidden, state.aux + hidden.square().mean())


class States(Program):
    """Has a dataclass go from block to block."""

    def __init__(self, cls: type[State]) -> None:
        super().__init__()
        self.cls = cls
        self.net.blocks = nn.ModuleList(AddsToState(self.net.embedding.embedding_dim) for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        state = self.cls(self.net.embedding(batch[0]), torch.zeros(()))
        for block in self.net.blocks:
            state = block(state)
        return F.cross_entropy(self.net.head(state.hidden).flatten(0, 1), batch[1].flatten()) + 0.1 * state.aux


class Records(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, hidden: Tensor, record: State) -> Tensor:
        record.aux = self.layer(hidden)
        return hidden + record.aux


class Recorded(Program):
    """Gives an object to blocks, which write into it, and reads what the last one has written."""

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks = nn.ModuleList(Records(self.net.embedding.embedding_dim) for _ in range(4))

    def logits(self, ids: Tensor) -> Tensor:
        record, hidden = State(torch.zeros(()), torch.zeros(())), self.net.embedding(ids)
        for block in self.net.blocks:
            hidden = block(hidden, record)
        return self.net.head(hidden + record.aux)


class Resized(nn.Module):
    """Takes and returns a shape, as blocks of Swin do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, hidden: Tensor, size: torch.Size) -> tuple[Tensor, torch.Size]:
        assert type(size) is torch.Size
        hidden = self.layer(hidden.reshape(-1, hidden.shape[-1])).view(size)
        return hidden, hidden.shape


class Sized(Program):
    """Gives a ``torch.Size`` from block to block, and to a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks = nn.ModuleList(Resized(self.net.embedding.embedding_dim) for _ in range(4))
        self.net.blocks[0].register_forward_hook(self._look)
        self.seen: list[Any] = []

    def _look(self, block: nn.Module, args: Any, output: Any) -> None:
        self.seen.append((type(args[1]), type(output[1])))

    def logits(self, ids: Tensor) -> Tensor:
        hidden = self.net.embedding(ids)
        size = hidden.shape
        for block in self.net.blocks:
            hidden, size = block(hidden, size)
            assert type(size) is torch.Size
        assert set(self.seen) <= {(torch.Size, torch.Size)}
        return self.net.head(self.net.norm(hidden))


class Converted(nn.Module):
    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.dtype = dtype

    def forward(self, hidden: Tensor) -> Tensor:
        self.layer = self.layer.to(self.dtype)
        return hidden + self.layer(hidden.to(self.dtype)).to(hidden.dtype)


class Converts(Program):
    """Converts modules in front of the blocks, in the blocks, and behind them."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        width = self.net.embedding.embedding_dim
        self.net.blocks = nn.ModuleList(Converted(width, getattr(torch, dtype)) for _ in range(4))

    def logits(self, ids: Tensor) -> Tensor:
        self.net.head = self.net.head.float()
        hidden = self.net.embedding.to(ids.device)(ids)
        for number, block in enumerate(self.net.blocks):
            self.net.blocks[number] = block.to(hidden.dtype)
            hidden = self.net.blocks[number](hidden)
        return self.net.head(self.net.norm.cpu()(hidden))


class CallsForward(Program):
    """Calls a method of its blocks, as SqueezeBERT does."""

    def logits(self, ids: Tensor) -> Tensor:
        hidden = self.net.embedding(ids)
        for block in self.net.blocks:
            hidden = block.forward(hidden)
        return self.net.head(self.net.norm(hidden))


class EndsEarly(Program):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class OtherLengths(Program):
    """Has a tensor in its batch whose first dimension is not that of the samples."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0], batch[1].T]


class Dropout(Program):
    def logits(self, ids: Tensor) -> Tensor:
        hidden = F.dropout(self.net.embedding(ids), 0.1, self.training)
        for block in self.net.blocks:
            hidden = F.dropout(block(hidden), 0.1, self.training)
        return self.net.head(self.net.norm(hidden))


def _loader(copies: int, copy: int, batch: int = 8, size: int = 32) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCAB, (size, 7), generator=generator)
    dataset = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    return DataLoader(dataset, batch, sampler=DistributedSampler(dataset, copies, copy, shuffle=False))


def _fit(rank: int, world: int, make: Any, options: dict[str, Any], program: dict[str, Any], same: bool) -> Any:
    strategy = ZeroStrategy(**options)
    copies = world // (strategy.pipeline.stages if strategy.pipeline else 1)
    lightning = trainer(rank, world, strategy, **{"max_epochs": 2, "accumulate_grad_batches": 2, **program})
    module = seeded(make)
    lightning.fit(module, _loader(*((copies, rank % copies) if same else (world, rank))))
    return {name: strategy.full_param(param) for name, param in module.named_parameters()}


def _pipeline(stages: int = 2, **options: Any) -> dict[str, Any]:
    return {"stage": 1, "pipeline": Pipeline(stages=stages, **options)}


PROGRAMS: list[tuple[Any, dict[str, Any]]] = [
    (Functional, {"shared": ["net.embedding.weight"]}),
    (Around, {}),
    (HeadFirst, {"last": ["net.head", "net.norm"]}),
    (ListsAround, {"first": ["net.downs"], "last": ["net.ups"]}),
    (Frozen, {}),
    (Monitored, {}),
    (AddsPositions, {}),
    (partial(KeepsProgram, "dictionary"), {}),
    (Skip, {}),
    (AddsEarlyValue, {}),
    (FillsSlices, {}),
    (WritesOut, {}),
    (SkipsInPlace, {}),
    *((partial(RoutedProgram, keeps), {}) for keeps in ("attribute", "written", "list", "buffer")),
    *((partial(RoutedProgram, keeps, "anew"), {}) for keeps in ("attribute", "list", "buffer")),
    (Taps, {}),
    (Recorded, {}),
    (Sized, {}),
    (partial(Converts, "float32"), {}),
    (TogglesProgram, {}),
    (partial(States, Registered), {}),
]


@pytest.mark.parametrize("case", sample(PROGRAMS, *PROGRAMS[:2]), ids=lambda case: _name(case))
@pytest.mark.parametrize("zero", sample((0, 1, 2, 3), 3))
@pytest.mark.parametrize("copies", sample((1, 2), 2))
def test_programs_train_as_without_a_pipeline(case: Any, zero: int, copies: int) -> None:
    make, options = case
    expected = run(_fit, copies, make, {"stage": 0}, {}, True)[0]
    for weights in run(_fit, 2 * copies, make, {**_pipeline(**options), "stage": zero}, {}, True):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("case", PROGRAMS, ids=lambda case: _name(case))
@pytest.mark.parametrize("cut", ["4-stages", "interleaved"])
def test_programs_train_in_other_cuts_as_without_a_pipeline(case: Any, cut: str) -> None:
    make, options = case
    stages = 4 if cut == "4-stages" else 2
    schedule = "1f1b" if cut == "4-stages" else "interleaved_1f1b"
    pipeline = _pipeline(stages, schedule=schedule, partition="uniform", microbatches=4, **options)
    expected = run(_fit, 1, make, {"stage": 0}, {}, True)[0]
    for weights in run(_fit, stages, make, pipeline, {}, True):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6, msg=name)


def _validate_padded(rank: int, world: int, nested: bool, options: dict[str, Any]) -> float:
    lightning = trainer(rank, world, ZeroStrategy(**options))
    (found,) = lightning.validate(seeded(partial(Padded, nested)), _loader(1, 0), verbose=False)
    return float(found["val_loss"])


def test_a_padding_mask_of_pytorchs_encoder_is_evaluated_as_without_a_pipeline() -> None:
    expected = run(_validate_padded, 1, False, {"stage": 0})[0]
    assert run(_validate_padded, 2, False, _pipeline()) == pytest.approx([expected] * 2, rel=1e-6)


def test_nested_tensors_between_blocks_are_refused() -> None:
    with pytest.raises(PipelineError, match="build it with `enable_nested_tensor=False`"):
        run(_validate_padded, 2, True, _pipeline())


def _log_early(rank: int, world: int, options: dict[str, Any], behind: bool) -> dict[str, float]:
    lightning = trainer(rank, world, ZeroStrategy(**options), max_epochs=1, log_every_n_steps=1)
    lightning.fit(seeded(partial(LogsEarlyValue, behind)), _loader(1, 0))
    return {name: value.item() for name, value in lightning.callback_metrics.items()}


@pytest.mark.parametrize("schedule", sample(("1f1b", "interleaved_1f1b"), "1f1b"))
def test_a_value_that_one_stage_computes_is_logged_by_all(schedule: str) -> None:
    expected = run(_log_early, 1, {"stage": 0}, False)[0]
    assert {"start", "tokens", "loss"} <= set(expected)
    for logged in run(_log_early, 2, _pipeline(schedule=schedule), False):
        assert logged == pytest.approx(expected, rel=1e-6)


def test_a_value_of_an_earlier_stage_is_logged_behind_the_blocks() -> None:
    expected = run(_log_early, 1, {"stage": 0}, True)[0]
    assert "behind" in expected
    for logged in run(_log_early, 2, _pipeline(), True):
        assert logged == pytest.approx(expected, rel=1e-6)


def _counts_of(block: Any) -> tuple[int, int, int] | None:
    """Return the counts of a block, or None where another stage has them."""
    try:
        return block.calls, int(block.count), int(block.norm.num_batches_tracked)
    except PipelineError:
        return None


def _count(rank: int, world: int, schedule: str) -> Any:
    SEEN.clear()
    strategy = ZeroStrategy(**_pipeline(schedule=schedule, microbatches=4, partition="uniform"))
    lightning = trainer(rank, world, strategy, max_epochs=1)
    module = seeded(Counts)
    lightning.fit(module, _loader(1, 0))
    blocks = [_counts_of(block) for block in module.net.blocks if isinstance(block, Counted)]
    assert (module.in_callable.calls, int(module.in_array[0])) == (module.steps,) * 2
    if schedule == "1f1b":
        others = module.in_dictionary["n"], len(module.in_list), int(module.in_tensor), len(module.in_tuple)
        assert others == (module.steps,) * 4
    return module.steps, int(module.total), list(SEEN), blocks, int(module.net.norm.num_batches_tracked)


@pytest.mark.parametrize("schedule", sample(("1f1b", "interleaved_1f1b"), "1f1b", "interleaved_1f1b"))
def test_state_that_a_step_changes_counts_every_micro_batch_once(schedule: str) -> None:
    """What a survey or a description of the step has changed is put back."""
    first, last = run(_count, 2, schedule)
    num_steps = 4 * 4  # micro-batches
    for steps, total, seen, _, _ in (first, last):
        assert (steps, total) == (num_steps, num_steps)
        assert all(mine == count for mine, count in seen)
        assert max(seen) == (num_steps, num_steps)
    for block in zip(first[3], last[3], strict=True):  # each lies on one stage
        assert None in block
        assert (num_steps, num_steps, num_steps) in block
    assert (first[4], last[4]) == (num_steps, num_steps)  # of the head, which all stages are told


@pytest.mark.parametrize("precision", sample(("bf16-mixed", "bf16-true", "16-true", "64-true"), "16-true"))
def test_precisions_train_as_without_a_pipeline(precision: str) -> None:
    """The same micro-batches one by one, so that 16-bit roundings are the same."""
    expected = run(_fit_in_pieces, 1, {"stage": 0}, precision, 4)[0]
    for weights in run(_fit_in_pieces, 2, _pipeline(), precision, 8):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6, msg=name)


def _fit_in_pieces(rank: int, world: int, options: dict[str, Any], precision: str, batch: int) -> Any:
    # With the default scale the first steps overflow where the loss is divided before it is scaled.
    scale = {"loss_scale": {"init_scale": 1024.0}} if precision == "16-true" else {}
    strategy = ZeroStrategy(**options, **scale)
    pieces = 8 // batch
    lightning = trainer(
        rank, world, strategy, precision=precision, accumulate_grad_batches=2 * pieces, gradient_clip_val=0.1
    )
    module = seeded(Program)
    lightning.fit(module, _loader(1, 0, batch))
    return {name: strategy.full_param(param) for name, param in module.named_parameters()}


def test_a_mask_drawn_inside_the_model_is_the_same_on_all_stages() -> None:
    first, second = run(_masks, 2)
    assert len(first) == len(second) == 2 * 8 * 2
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, second, strict=True))


def _masks(rank: int, world: int) -> list[Tensor]:
    MASKS.clear()
    _fit(rank, world, Masked, _pipeline(partition="uniform"), {}, True)
    return [mask for mask in MASKS if type(mask) is Tensor]


class DrawnBetween(Program):
    """Draws behind its embedding what it needs again in front of the loss, some of it for values of the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks = nn.ModuleList(Shifts(self.net.embedding.embedding_dim) for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        start = self.net.embedding(batch[0])
        noisy = F.dropout(start)
        mask, number = torch.rand(start.shape[1], 1), random.random() + float(numpy.random.rand())
        hidden = noisy + mask + number
        for block in self.net.blocks:
            hidden = block(hidden)
            F.dropout(hidden)
            shift = torch.rand(())
            hidden = hidden + shift
            mask = mask + shift
        self.log("gap", (hidden - noisy - mask - number).abs().max(), reduce_fx="max", on_step=False, on_epoch=True)
        return self.net.head(hidden).square().mean()


class Shifts(nn.Module):
    """Draws, and returns what it was given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        random.random()
        return x + 0.0 * self.weight * F.dropout(torch.ones_like(x))


def _gap(rank: int, world: int, schedule: str) -> float:
    lightning = trainer(rank, world, ZeroStrategy(**_pipeline(schedule=schedule)), max_epochs=1, log_every_n_steps=1)
    lightning.fit(seeded(DrawnBetween), _loader(1, 0))
    return lightning.callback_metrics["gap"].item()


@pytest.mark.parametrize("schedule", sample(("1f1b", "interleaved_1f1b"), "1f1b"))
def test_what_is_drawn_between_modules_is_the_same_wherever_it_is_used(schedule: str) -> None:
    assert max(run(_gap, 2, schedule)) < 1e-5


def test_dropout_trains() -> None:
    first, second = (run(_fit, 2, Dropout, _pipeline(), {}, True) for _ in range(2))
    for weights, again in zip(first, second, strict=True):
        assert all(torch.equal(weights[name], first[0][name]) for name in weights)
        assert all(torch.equal(weights[name], again[name]) for name in weights)


class LogsMore(Program):
    """Logs a number that has a graph of its own."""

    def logits(self, ids: Tensor) -> Tensor:
        logits = super().logits(ids)
        KEPT.append(sum(one() is not None for one in LOGGED))
        doubled = logits * 2.0
        LOGGED.append(weakref.ref(doubled))
        self.log("energy", (doubled**2).mean())  # autograd saves `doubled`
        return logits


LOGGED: list[weakref.ref[Tensor]] = []
KEPT: list[int] = []  # how many of them were left when the next micro-batch began


def _kept(rank: int, world: int) -> list[int]:
    LOGGED.clear()
    KEPT.clear()
    _fit(rank, world, LogsMore, _pipeline(), {}, True)
    return KEPT


def test_what_is_logged_keeps_no_graph() -> None:
    last = run(_kept, 2)[-1]
    assert len(last) > 2
    assert not any(last)


class ChangesWhatItLogged(Program):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        loss += 1.0
        self.log("more", loss)
        return loss


def _logged(rank: int, world: int) -> dict[str, Tensor]:
    strategy = ZeroStrategy(**_pipeline())
    lightning = trainer(rank, world, strategy, max_epochs=1)
    lightning.fit(seeded(ChangesWhatItLogged), _loader(1, 0))
    return lightning.callback_metrics


def test_what_is_logged_is_the_value_at_the_call() -> None:
    for logged in run(_logged, 2):
        assert logged["more"] == pytest.approx(logged["loss"] + 1.0)


def _evaluate(rank: int, world: int, options: dict[str, Any]) -> Any:
    strategy = ZeroStrategy(**options)
    copies = world // (strategy.pipeline.stages if strategy.pipeline else 1)
    lightning = trainer(rank, world, strategy)
    module = seeded(Program)
    loader = _loader(copies, rank % copies, 8, 20 * copies)  # the last batch is smaller
    validated = lightning.validate(module, loader, verbose=False)
    tested = lightning.test(module, loader, verbose=False)
    return validated, tested, lightning.predict(module, loader)


@pytest.mark.parametrize("copies", sample((1, 2), 2))
def test_validation_testing_and_prediction_are_those_without_a_pipeline(copies: int) -> None:
    expected = run(_evaluate, copies, {"stage": 0})
    for rank, (validated, tested, predicted) in enumerate(run(_evaluate, 2 * copies, _pipeline())):
        assert validated == [pytest.approx(one, rel=1e-6) for one in expected[rank % copies][0]]
        assert tested == [pytest.approx(one, rel=1e-6) for one in expected[rank % copies][1]]
        for mine, theirs in zip(predicted, expected[rank % copies][2], strict=True):
            assert torch.equal(mine, theirs)


ON_ONE_STAGE: list[tuple[Any, str]] = [
    (Functional, "`Pipeline(shared=['net.embedding.weight'])`"),
    (HeadFirst, "`Pipeline(last=['net.norm'])`"),
    (NoLoss, "`training_step` returned NoneType"),
    (partial(KeepsProgram, "shared-list"), "it changes a list that it keeps"),
    (partial(KeepsProgram, "list-argument"), "it changes a list or a dictionary among its arguments"),
    (partial(KeepsProgram, "real-argument"), "it writes into a tensor of shape ()"),
    (SkipsWhatIsWritten, "it writes into an argument that this stage has"),
    (LaterValue, "it could not be told before the step that it is needed"),
    (ReadsInside, "could not be told from the shapes of its arguments"),
    (WritesShared, "that shares memory with another one"),
    (partial(States, State), "`torch.export.register_dataclass(State)`"),
    (EndsEarly, "returns its loss times zero"),
    (CallsForward, "call `block(x)`, or cut another list with `Pipeline(module=...)`"),
    (partial(Converts, "bfloat16"), "Convert the module before training starts"),
    (WritesArgument, "which would not see the write"),
]
ON_ALL_STAGES: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (MetricInDictionary, {}, PipelineError, "`MetricInDictionary.metrics` holds a `MulticlassAccuracy`"),
    (SkipsBlock, {}, PipelineError, "`net.norm` is called between `net.blocks."),
    (Backwards, {}, PipelineError, "`net.blocks.3` is called out of turn"),
    (Manual, {}, ValueError, "manual optimization cannot work with it"),
    (OwnBackward, {}, ValueError, "`OwnBackward.backward` is overridden"),
    (OtherLengths, {"microbatches": 3}, ValueError, "`batch[0]` has 8, `batch[1]` has 6"),
    (Program, {"partition": ["blocks.9"]}, ValueError, "which is no block of `net.blocks`"),
]


FAST = (ON_ONE_STAGE[0], ON_ONE_STAGE[2], ON_ONE_STAGE[-1])


def _name(case: tuple[Any, str]) -> str:
    make = case[0]
    return (
        "-".join((make.func.__name__, *(getattr(arg, "__name__", arg) for arg in make.args)))
        if isinstance(make, partial)
        else str(make.__name__)
    )


@pytest.mark.parametrize("case", sample(ON_ONE_STAGE, *FAST), ids=_name)
def test_what_one_stage_cannot_do_is_refused(case: tuple[Any, str]) -> None:
    make, message = case
    with pytest.raises(PipelineError, match=re.escape(message)):
        run(_fit, 2, make, _pipeline(), {}, True)


def _refuse(rank: int, world: int, make: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        _fit(rank, world, make, _pipeline(**options), {"accumulate_grad_batches": 1}, True)


@pytest.mark.parametrize("case", sample(ON_ALL_STAGES, *ON_ALL_STAGES[:4]), ids=lambda case: case[0].__name__)
def test_what_a_pipeline_cannot_do_is_refused_on_all_ranks(case: Any) -> None:
    run(_refuse, 2, *case)


def _read_other_data(rank: int, world: int) -> None:
    with pytest.raises(PipelineError, match="were given different batches"):
        _fit(rank, world, Program, _pipeline(), {}, False)


def test_stages_with_different_data_are_refused() -> None:
    run(_read_other_data, 2)


def _average(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="`EMAWeightAveraging` reads all parameters"):
        _fit(rank, world, Program, _pipeline(), {"callbacks": [EMAWeightAveraging()]}, True)


def test_weight_averaging_is_refused() -> None:
    run(_average, 2)


def test_stages_that_do_not_divide_the_ranks_are_refused() -> None:
    run(_divide, 3)


def _divide(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="`pipeline=2` does not divide the 3 ranks"):
        _fit(rank, world, Program, _pipeline(), {}, True)


def test_an_error_on_one_stage_ends_all() -> None:
    started = time.monotonic()
    with pytest.raises(KeyError, match="the second stage"):
        run(_fit, 2, Raises, {**_pipeline(), "timeout": 20.0}, {}, True)
    assert time.monotonic() - started < 20.0


class BatchNorm(Program):
    def __init__(self) -> None:
        super().__init__()
        self.net.blocks.insert(1, nn.BatchNorm1d(6))


def _warn(rank: int, world: int) -> None:
    with pytest.warns(UserWarning, match="`net.blocks.1` normalises over a batch"):
        _fit(rank, world, BatchNorm, _pipeline(), {}, True)


def test_batch_norm_is_warned_of() -> None:
    run(_warn, 2)


def _decoder(rank: int, world: int, options: dict[str, Any], tied: bool, recomputes: bool = False) -> Any:
    transformers = pytest.importorskip("transformers")

    class Decoder(Program):
        def __init__(self) -> None:
            super().__init__()
            config = transformers.LlamaConfig(
                vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
                num_key_value_heads=1, tie_word_embeddings=tied,
            )  # fmt: skip
            self.net = transformers.LlamaForCausalLM(config)
            if recomputes:
                self.net.gradient_checkpointing_enable()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            mask = (batch[0] > 1).long()
            return self.net(input_ids=batch[0], attention_mask=mask, labels=batch[0]).loss

    return _fit(rank, world, Decoder, options, {"max_epochs": 1}, True)


@pytest.mark.parametrize("tied", sample((False, True), True))
@pytest.mark.parametrize("zero", sample((1, 3), 3))
def test_a_decoder_of_transformers_trains_as_without_a_pipeline(zero: int, tied: bool) -> None:
    pytest.importorskip("transformers")
    expected = run(_decoder, 2, {"stage": 0}, tied)[0]
    for weights in run(_decoder, 4, {**_pipeline(), "stage": zero}, tied, timeout_s=120.0):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6, msg=name)


def test_a_decoder_with_its_own_checkpointing_trains_as_without_a_pipeline() -> None:
    pytest.importorskip("transformers")
    expected = run(_decoder, 1, {"stage": 0}, True)[0]
    for weights in run(_decoder, 2, _pipeline(), True, True, timeout_s=120.0):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6, msg=name)


def _gather(rank: int, world: int, precision: Any) -> None:
    strategy = ZeroStrategy(**_pipeline())
    module = seeded(Around)
    ids = torch.arange(6).view(1, 6) % VOCAB
    expected = module.logits(ids).detach()
    lightning = trainer(rank, world, strategy, precision=precision, max_epochs=1, limit_train_batches=0)
    lightning.validate(module, _loader(1, 0), verbose=False)
    computing = strategy.precision_plugin.forward_context
    with pytest.raises(PipelineError, match="lies on pipeline stage"), torch.no_grad(), computing():
        module.logits(ids)
    with strategy.gathered(module), torch.no_grad(), computing():
        if rank == 0:  # nothing communicates inside
            assert torch.allclose(module.logits(ids).float(), expected, atol=1e-6 if precision == "32-true" else 0.05)
    with strategy.gathered([module.net.head.weight]):
        assert torch.isfinite(module.net.head.weight.detach()).all()
    with pytest.raises(ValueError, match="`write='rank0'` needs all parameters on rank 0"):
        strategy.gathered(module, write="rank0").__enter__()


@pytest.mark.parametrize("precision", sample(("32-true", "bf16-mixed"), "32-true"))
def test_gathered_brings_the_parameters_of_all_stages(precision: str) -> None:
    run(_gather, 2, precision)


class OnMeta(Program):
    """Is built without memory, block by block on its own stage."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta"):
                self.net = TinyGPT(depth=4)


@pytest.mark.parametrize("zero", sample((1, 3), 3))
def test_a_module_on_the_meta_device_is_made_real_on_its_stage(zero: int) -> None:
    outcomes = run(_fit, 4, OnMeta, {**_pipeline(), "stage": zero}, {}, True)
    for weights in outcomes:
        assert all(torch.isfinite(value).all() for value in weights.values())
        assert all(torch.equal(weights[name], outcomes[0][name]) for name in weights)


def _fit_lengths(rank: int, world: int, options: dict[str, Any]) -> Any:
    """Train with batches that are shorter on the second copy, every other time."""
    strategy = ZeroStrategy(**options)
    copies = world // (strategy.pipeline.stages if strategy.pipeline else 1)
    generator = torch.Generator().manual_seed(3)
    batches = []
    for number in range(4):
        tokens = torch.randint(0, VOCAB, (copies, 8, 7), generator=generator)[rank % copies]
        tokens = tokens[:, : 7 - (rank % copies) * (number % 2)]
        batches.append((tokens[:, :-1], tokens[:, 1:]))
    lightning = trainer(rank, world, strategy, max_epochs=2, use_distributed_sampler=False)
    module = seeded(Program)
    lightning.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return {name: strategy.full_param(param) for name, param in module.named_parameters()}


@pytest.mark.parametrize("zero", sample((1, 2, 3), 3))
def test_copies_may_have_batches_of_different_lengths(zero: int) -> None:
    """A copy with a length that is new to it once began gathers that the other copy did not join."""
    expected = run(_fit_lengths, 2, {"stage": 0})[0]
    for weights in run(_fit_lengths, 4, {**_pipeline(), "stage": zero}):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("schedule", sample(("1f1b", "interleaved_1f1b"), "interleaved_1f1b"))
def test_units_inside_blocks_are_not_gathered_where_blocks_do_not_compute(schedule: str) -> None:
    options = {**_pipeline(schedule=schedule), "stage": 3, "units": ["Linear", "Block"]}
    expected = run(_fit, 2, Program, {"stage": 0}, {}, True)[0]
    for weights in run(_fit, 4, Program, options, {}, True):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6, msg=name)


def _watch(rank: int, world: int, folder: str) -> None:
    program = {"callbacks": ZeroMonitor(), "logger": TensorBoardLogger(folder), "log_every_n_steps": 1}
    _fit(rank, world, Program, _pipeline(), program, True)


def test_tensorboard_shows_the_time_of_every_stage_and_the_bubble(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run(_watch, 2, str(tmp_path))
    events = accumulator.EventAccumulator(str(next(tmp_path.rglob("events.*")).parent)).Reload()
    names = ["pipeline/busy_s_0", "pipeline/busy_s_1", "pipeline/bubble_share"]
    assert set(names) <= set(events.Tags()["scalars"])
    for name in names:
        values = [event.value for event in events.Scalars(name)]
        assert len(values) == 4
        assert all(0.0 < value < 1.0 for value in values), name
