"""What a step does in stages besides its loss: flags and buffers that it sets, writes into parameters, collectives."""

from __future__ import annotations

import re
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_zero.config import Pipeline
from lightning_zero.errors import PipelineError
from lightning_zero.lightning.strategy import ZeroStrategy
from lightning_zero.parallel.pipeline.stages.specs import LayerSpec
from lightning_zero.parallel.pipeline.stages.split import split_module
from tests.contracts.test_pipeline_programs import Program, _fit, _loader, _pipeline
from tests.engine.optimizers import Lamb, Langevin, Lars, Prodigy, Sam, Whitened
from tests.lightning_programs import seeded, trainer
from tests.references import TinyGPT
from tests.sampling import sample
from tests.worlds import run


def _trains(make: Any, options: dict[str, Any], world: int = 2) -> None:
    expected = run(_fit, 1, make, {"stage": 0}, {}, True)[0]
    for weights in run(_fit, world, make, options, {}, True):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6, msg=name)


# -- Flags -------------------------------------------------------------------------------------------------------------


class Gates(nn.Module):
    def __init__(self, width: int, start: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.flag = start

    def forward(self, x: Tensor) -> Tensor:
        scale = 1.0 if self.flag is None or self.flag is False else 0.5 if self.flag is True else self.flag
        return x + scale * self.linear(x)


class Flagged(Program):
    """Sets flags of its blocks in some batches, and puts them back behind the blocks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.start = None if kind == "mask" else 1.0 if kind in ("number", "literal") else False
        self.net.blocks = nn.ModuleList(Gates(self.net.embedding.embedding_dim, self.start) for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        before = [1.0 for _ in self.net.blocks] if self.kind == "literal" else [one.flag for one in self.net.blocks]
        if self.kind == "always" or batch_idx % 2 == 0:
            for block in self.net.blocks:
                number = 0.2 if self.kind in ("number", "literal") else True
                block.flag = torch.full((1, 6, 1), 0.25) if self.kind == "mask" else number
        hidden = self.net.embedding(batch[0])
        for block in self.net.blocks:
            hidden = block(hidden)
        loss = F.cross_entropy(self.net.head(hidden).flatten(0, 1), batch[1].flatten())
        for block, flag in zip(self.net.blocks, before, strict=True):
            block.flag = None if self.kind == "mask" else flag
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        own = self.net.blocks[-1 if self.global_rank else 0]
        assert own.flag == self.start


@pytest.mark.parametrize("kind", sample(["flag", "mask", "always", "number", "literal"], "flag", "number", "literal"))
@pytest.mark.parametrize("microbatches", [1, 2])
def test_flags_that_are_put_back_behind_the_blocks_are_put_back_on_all_stages(kind: str, microbatches: int) -> None:
    """The stages before the last one kept them set."""
    schedule = "gpipe" if microbatches == 1 else "1f1b"
    _trains(partial(Flagged, kind), _pipeline(microbatches=microbatches, schedule=schedule))


class LaterFlag(Flagged):
    """Sets a number behind the blocks, that they read, after a batch that has put it back."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 0:
            return super().training_step(batch, batch_idx)
        loss = Program.training_step(self, batch, batch_idx)
        for block in self.net.blocks:
            block.flag = 0.1 * self.trainer.global_step
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        pass


def test_a_flag_that_was_put_back_once_is_refused_when_it_is_not() -> None:
    """The last stage's second micro-batch found the new number, and that of the first stage the old one."""
    options = _pipeline(microbatches=2, schedule="gpipe")
    with pytest.raises(PipelineError, match=r"blocks.0.flag` of `.*` is changed by code after the blocks"):
        run(_fit, 2, partial(LaterFlag, "always"), options, {}, True)


def _fit_uneven(rank: int, world: int, make: Any, options: dict[str, Any]) -> dict[str, Tensor]:
    strategy = ZeroStrategy(**options)
    fit = trainer(rank, world, strategy, max_epochs=1)
    module = seeded(make)
    fit.fit(module, _loader(1, 0, 8, 28), _loader(1, 0, 8, 28))
    return {name: strategy.full_param(param) for name, param in module.named_parameters()}


def test_flags_are_put_back_in_batches_of_several_sizes() -> None:
    """The second kind of batch was refused."""
    make = partial(Flagged, "always")
    expected = run(_fit_uneven, 1, make, {"stage": 0})[0]
    for weights in run(_fit_uneven, 2, make, _pipeline()):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6, msg=name)


# -- Writes into parameters and module buffers -------------------------------------------------------------------------


class Tempered(nn.Linear):
    def __init__(self, width: int, size: int) -> None:
        super().__init__(width, size)
        self.register_buffer("temperature", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.temperature


class Writes(Program):
    """Writes a tensor in its step."""

    def __init__(self, how: str, size: int | None = None) -> None:
        super().__init__()
        self.how = how
        self.net.head = Tempered(self.net.embedding.embedding_dim, size or self.net.head.out_features)
        self.scale = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net.norm(self.net.body(self.net.embedding(batch[0])))
        if self.how == "buffer":
            self.net.head.temperature.mul_(0.9)
        elif self.how == "averaged":
            self.net.head.temperature.data.lerp_(hidden.detach().abs().mean(), 0.1)
        elif self.how == "assigned":
            self.net.head.temperature = self.net.head.temperature * 0.9
        elif self.how == "on zeros" and hidden.abs().mean() < 1e-4:
            with torch.no_grad():
                self.scale.fill_(2.0)
        loss = F.cross_entropy((self.scale * self.net.head(hidden)).flatten(0, 1), batch[1].flatten())
        if self.how == "data":
            self.scale.data.mul_(0.9)
        elif self.how == "clamp":
            with torch.no_grad():
                self.scale.clamp_(max=0.5)
        elif self.how == "pointed":
            self.scale.data = self.scale.data * 0.9
        elif self.how == "block":
            with torch.no_grad():
                next(self.net.blocks[-1].parameters()).mul_(0.9)
        elif self.how == "read":
            loss = loss + 1e-2 * next(self.net.blocks[-1].parameters()).pow(2).mean()
        elif self.how == "on errors" and hidden.isnan().any():
            self.net.head.reset_parameters()
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        if self.how == "hook":
            self.scale.data.clamp_(max=0.999)


@pytest.mark.parametrize(
    ("how", "name", "precision"),
    [
        ("buffer", "net.head.temperature", "32-true"),
        ("data", "scale", "32-true"),
        ("data", "scale", "bf16-true"),
        ("clamp", "scale", "32-true"),
        ("pointed", "scale", "32-true"),
    ],
)
def test_writes_that_would_count_more_than_once_are_refused(how: str, name: str, precision: str) -> None:
    """A buffer of the head was written in every run that does not count, a parameter on the last stage alone."""
    with pytest.raises(PipelineError, match=re.escape(f"The step writes into `{name}")):
        run(_fit, 2, partial(Writes, how), _pipeline(), {"precision": precision}, True)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("how", sample(["clamp", "pointed", "block"], "block"))
def test_writes_are_refused_where_parameters_come_and_go(how: str, zero: int, precision: str) -> None:
    """A parameter that has its values for a use only was passed over."""
    options = {**_pipeline(), "stage": zero}
    name = "net.blocks.3.*" if how == "block" else "scale"
    with pytest.raises(PipelineError, match=f"The step writes into `{name}` in place"):
        run(_fit, 2, partial(Writes, how), options, {"precision": precision}, True)


@pytest.mark.parametrize("zero", [1, 3])
def test_reads_of_parameters_that_come_and_go_are_no_writes(zero: int) -> None:
    _trains(partial(Writes, "read"), {**_pipeline(), "stage": zero})


def test_writes_in_a_branch_that_runs_on_zeros_only_are_refused() -> None:
    """The run without blocks that counts what a loss divides by wrote a parameter in every batch."""
    with pytest.raises(PipelineError, match="The step writes into `scale`"):
        run(_fit, 2, partial(Writes, "on zeros"), _pipeline(), {}, True)


class WritesInParts(Program):
    """A step in three parts, of which the last one writes a parameter."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.scale = nn.Parameter(torch.ones(()))

    def pipeline_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net.embedding(batch[0])

    def pipeline_loss(self, output: Any, batch: Any, batch_idx: int) -> Any:
        if self.how == "data":
            self.scale.data.mul_(0.9)
        else:
            with torch.no_grad():
                self.scale.clamp_(max=0.5)
        return F.cross_entropy((self.scale * self.net.head(self.net.norm(output))).flatten(0, 1), batch[1].flatten())


@pytest.mark.parametrize("how", ["data", "clamp"])
def test_writes_in_the_loss_of_a_step_in_parts_are_refused(how: str) -> None:
    with pytest.raises(PipelineError, match="The step writes into `scale`"):
        run(_fit, 2, partial(WritesInParts, how), _pipeline(), {}, True)


class Normalized(nn.Linear):
    """Writes its weight in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.div_(self.weight.norm(dim=1, keepdim=True))
        return super().forward(x)


class WritesInModules(Program):
    """Has an embedding, a layer and a head that write their own weights."""

    def __init__(self, is_tied: bool = False) -> None:
        super().__init__()
        size, width = self.net.embedding.num_embeddings, self.net.embedding.embedding_dim
        self.net.embedding = nn.Embedding(size, width, max_norm=1.0)
        self.net.head = Normalized(width, size)
        if is_tied:
            self.net.head.weight = self.net.embedding.weight

    def pipeline_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net.embedding(batch[0])

    def pipeline_loss(self, output: Any, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net.head(self.net.norm(output)).flatten(0, 1), batch[1].flatten())


@pytest.mark.parametrize("zero", [1, 3])
def test_modules_that_write_their_own_weights_train_in_steps_in_parts(zero: int) -> None:
    """Runs that do not count were refused for it."""
    _trains(WritesInModules, {**_pipeline(microbatches=2, schedule="1f1b"), "stage": zero})


def test_modules_that_write_weights_of_several_stages_are_refused() -> None:
    with pytest.raises(PipelineError, match="The step writes into `net.embedding.weight`"):
        run(_fit, 2, partial(WritesInModules, True), _pipeline(), {}, True)


@pytest.mark.parametrize("size", [None, 1024], ids=["small", "large"])
def test_a_branch_that_a_step_may_take_writes_nothing_before(size: int | None) -> None:
    """A head with more than a few elements was refused."""
    _trains(partial(Writes, "on errors", size), _pipeline())


def test_averages_of_hidden_states_in_buffers_train_as_without_a_pipeline() -> None:
    """`.data` has a version of its own: writes of fakes into it were taken for writes into the buffer."""
    _trains(partial(Writes, "averaged"), _pipeline(microbatches=1, schedule="gpipe"))


@pytest.mark.parametrize("how", ["assigned", "hook"])
def test_the_remedies_train_as_without_a_pipeline(how: str) -> None:
    _trains(partial(Writes, how), _pipeline(microbatches=1, schedule="gpipe"))


# -- Optimizers --------------------------------------------------------------------------------------------------------


class Steps(Program):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


@pytest.mark.parametrize("make", [Prodigy, Sam, Langevin, torch.optim.LBFGS], ids=lambda make: make.__name__)
def test_optimizers_with_numbers_over_all_parameters_are_refused_at_stage_0(make: Any) -> None:
    """Every stage had numbers of its own."""
    with pytest.raises(
        ValueError, match=r"(needs the parameters of all pipeline stages|closure).*stage 0 without `pipeline`"
    ):
        run(_fit, 2, partial(Steps, make), {**_pipeline(), "stage": 0}, {}, True)


@pytest.mark.parametrize("make", sample([Lamb, Whitened, Lars], Lamb), ids=lambda make: make.__name__)
def test_optimizers_that_step_parameters_one_by_one_train_at_stage_0(make: Any) -> None:
    _trains(partial(Steps, make), {**_pipeline(), "stage": 0})


class ForgetsByHand(torch.optim.SGD):
    """Has a ``zero_grad`` of its own, which drops every gradient."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            group["lr"] *= 0.5
        super().zero_grad(set_to_none)


class Keeps(ForgetsByHand):
    """Drops none."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass


def test_zero_grad_of_the_optimizer_is_called_once_in_a_step() -> None:
    _trains(partial(Steps, ForgetsByHand), {**_pipeline(), "stage": 0})
    with pytest.raises(PipelineError, match=r"`Keeps.zero_grad\(\)` leaves the gradient of"):
        run(_fit, 2, partial(Steps, Keeps), {**_pipeline(), "stage": 0}, {}, True)


class Counts(torch.optim.Optimizer):
    """Counts its steps in its groups, and asks for the names of its parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2, "k": 0, "total": 0.0})

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        with torch.no_grad():
            for group in self.param_groups:
                group["k"] += 1
                group["total"] += group["lr"]
                for name, param in zip(group["param_names"], group["params"], strict=True):
                    if param.grad is not None:
                        param.sub_(param.grad, alpha=group["lr"] * (0.5 if "bias" in name else 1.0))
        return loss


class OfTheHead(Program):
    """Trains its head alone: stages before the last one have no parameter of the optimizer."""

    def __init__(self, is_frozen: bool = True) -> None:
        super().__init__()
        if is_frozen:
            self.requires_grad_(False)
            self.net.head.requires_grad_(True)

    def configure_optimizers(self) -> Any:
        return Counts([(name, param) for name, param in self.named_parameters() if param.requires_grad])


@pytest.mark.parametrize("is_frozen", [True, False])
def test_optimizers_that_count_in_their_groups_train_where_stages_have_none_of_their_parameters(
    is_frozen: bool,
) -> None:
    """One stage tried the optimizer once more, and waited for the others."""
    _trains(partial(OfTheHead, is_frozen), {**_pipeline(), "stage": 0, "timeout": 60})


# -- Collectives -------------------------------------------------------------------------------------------------------


class Sums(Program):
    def on_validation_epoch_end(self) -> None:
        self.log("num", 1.0, sync_dist=True, reduce_fx="sum")
        one = torch.tensor(1.0)
        self.found = float(self.trainer.strategy.reduce(one, reduce_op="sum")), len(self.all_gather(one).view(-1))


def _sums(rank: int, world: int) -> list[float]:
    fit = trainer(rank, world, ZeroStrategy(**_pipeline()), max_epochs=1)
    module = seeded(Sums)
    copies = world // 2
    fit.fit(module, _loader(copies, rank % copies), _loader(copies, rank % copies))
    return [*module.found, float(fit.callback_metrics["num"])]


@pytest.mark.parametrize("copies", [1, 2])
def test_collectives_between_steps_count_every_copy_once(copies: int) -> None:
    """They counted it once per stage."""
    assert run(_sums, 2 * copies) == [[float(copies), float(copies), float(copies)]] * (2 * copies)


class Contrasts(Program):
    """Gathers the outputs of all copies in its step, with gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net.norm(self.net.body(self.net.embedding(batch[0]))).mean(1)
        others = self.all_gather(hidden, sync_grads=True).reshape(-1, hidden.shape[-1])
        self.log("seen", float(len(others)))
        logits = hidden @ others.t()
        first = len(hidden) * self.copy() if len(others) > len(hidden) else 0
        return F.cross_entropy(logits, torch.arange(len(hidden)) + first)

    def copy(self) -> int:
        strategy = self.trainer.strategy
        mesh = strategy._mesh  # type: ignore[attr-defined]
        return self.global_rank if mesh is None else torch.distributed.get_rank(mesh.data_group)


def _contrasts(rank: int, world: int, options: dict[str, Any], batch: int) -> dict[str, Tensor]:
    strategy = ZeroStrategy(**options)
    copies = world // (strategy.pipeline.stages if strategy.pipeline else 1)
    fit = trainer(rank, world, strategy, max_epochs=1, accumulate_grad_batches=1)
    module = seeded(Contrasts)
    fit.fit(module, _loader(copies, rank % copies, batch))
    return {name: strategy.full_param(param) for name, param in module.named_parameters()}


@pytest.mark.parametrize("copies", sample([1, 2], 2))
def test_a_step_may_gather_the_outputs_of_all_copies(copies: int) -> None:
    """The stages waited for each other until the time was out."""
    expected = run(_contrasts, copies, {"stage": 0}, 8)[0]
    one = Pipeline(stages=2, microbatches=1, schedule="gpipe")
    for weights in run(_contrasts, 2 * copies, {"stage": 1, "pipeline": one}, 8):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6, msg=name)


# -- Refused -----------------------------------------------------------------------------------------------------------


class TakesBatches(Program):
    def validation_step(self, dataloader_iter: Any) -> None:  # type: ignore[override]
        next(dataloader_iter)


def test_steps_that_take_batches_themselves_are_refused() -> None:
    """Every stage took batches of its own."""
    with pytest.raises(ValueError, match=r"`TakesBatches.validation_step` takes a `dataloader_iter`"):
        run(_fit, 2, TakesBatches, _pipeline(), {}, True)


class Normed(Program):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm


@pytest.mark.parametrize(
    ("norm", "text"),
    [
        (nn.BatchNorm1d(3), "`sync_batchnorm=True` averages `norm` over all ranks, and with `pipeline`"),
        (nn.SyncBatchNorm(3), "`nn.SyncBatchNorm` averages `norm` over all ranks, and with `pipeline`"),
        (LayerSpec(nn.BatchNorm1d, 3), "`sync_batchnorm=True` averages the batch norms of `norm` over all ranks"),
    ],
    ids=["converted", "own", "specified"],
)
def test_batch_norms_over_all_ranks_are_refused(norm: nn.Module, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        run(_fit, 2, partial(Normed, norm), _pipeline(), {"sync_batchnorm": True}, True)


def test_a_model_without_batch_norms_may_have_sync_batchnorm() -> None:
    run(_fit, 2, Program, _pipeline(), {"sync_batchnorm": True}, True)


class Noisy(Program):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for param in self.parameters():
            if param.grad is not None:
                param.grad.add_(torch.randn_like(param.grad))


@pytest.mark.parametrize("zero", sample([0, 1, 3], 0, 1))
def test_noise_on_gradients_is_refused(zero: int) -> None:
    """The first parameters of all stages had the same noise."""
    with pytest.raises(PipelineError, match="`randn_like` of a gradient on a pipeline stage"):
        run(_fit, 2, Noisy, {**_pipeline(), "stage": zero}, {}, True)


class OwnNoise(Program):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for number, param in enumerate(self.parameters()):
            if param.grad is not None:
                generator = torch.Generator().manual_seed(number)
                param.grad.add_(torch.empty_like(param.grad).normal_(generator=generator), alpha=0.01)


class SharedNoise(Program):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        generator = torch.Generator().manual_seed(3)
        for param in self.parameters():
            if param.grad is not None:
                param.grad.add_(torch.empty_like(param.grad).normal_(generator=generator))


def test_noise_of_one_generator_for_all_parameters_is_refused() -> None:
    with pytest.raises(PipelineError, match="`normal_` of a gradient on a pipeline stage"):
        run(_fit, 2, SharedNoise, {**_pipeline(), "stage": 0}, {}, True)


def test_noise_of_a_generator_for_each_parameter_trains() -> None:
    _trains(OwnNoise, {**_pipeline(), "stage": 0})


# -- Names -------------------------------------------------------------------------------------------------------------


class OtherNames(Program):
    """Has second names for its blocks, some of them, one of their layers, and its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = self.net.blocks
        self.late = self.net.blocks[2:]
        self.embed = self.net.embedding
        self.inner = next(self.net.blocks[1].children())

    def logits(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.net.head(self.net.norm(hidden))


@pytest.mark.parametrize("zero", sample([0, 1, 3], 3))
def test_blocks_may_have_second_names(zero: int) -> None:
    _trains(OtherNames, {**_pipeline(), "stage": zero})


class OtherNamesFirst(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        net = TinyGPT(depth=4)
        self.blocks = net.blocks
        self.net = net


def test_a_second_name_in_front_of_the_first_one_is_named() -> None:
    with pytest.raises(ValueError, match="`net` contains the blocks of `blocks` under a second name"):
        split_module(OtherNamesFirst(), Pipeline(stages=2))


def test_no_stage_holds_blocks_of_another_by_their_second_names() -> None:
    holders = split_module(OtherNames(), Pipeline(stages=2)).holders
    for name, stages in holders.items():
        if "blocks" in name:
            assert len(stages) == 1, name


class DrawsNoise(Program):
    """Draws noise in a hook; on the last stage alone, if the others are frozen."""

    def __init__(self, hook: str, is_frozen: bool) -> None:
        super().__init__()
        self.hook = hook
        if is_frozen:
            self.requires_grad_(False)
            self.net.head.requires_grad_(True)

    def _draw(self) -> None:
        for param in self.parameters():
            if param.grad is not None:
                param.grad.add_(1e-3 * torch.randn(param.shape))

    def on_after_backward(self) -> None:
        if self.hook == "on_after_backward":
            self._draw()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.hook == "on_before_optimizer_step":
            self._draw()


def _warned(rank: int, world: int, hook: str, is_frozen: bool) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _fit(rank, world, partial(DrawsNoise, hook, is_frozen), _pipeline(), {}, True)
    return sum("between the backward and the optimizer's step draws" in str(one.message) for one in caught)


@pytest.mark.parametrize("is_frozen", [False, True], ids=["all", "last"])
@pytest.mark.parametrize("hook", ["on_after_backward", "on_before_optimizer_step"])
def test_noise_that_does_not_name_its_gradient_is_warned_of(hook: str, is_frozen: bool) -> None:
    """Nobody was told of the former hook, nor of a stage that draws alone."""
    assert run(_warned, 2, hook, is_frozen) == [0 if is_frozen else 1, 1]
