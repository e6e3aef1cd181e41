"""Steps of a LightningModule in pipeline stages: batches cut, losses scaled, logged values on all ranks.

Every stage runs the user's ``training_step`` once per micro-batch, as Lightning does per batch under gradient
accumulation: losses, gradients and logged numbers are the means over the micro-batches, by their numbers of samples.
Evaluation runs whole batches.

Note [Batches that do not divide]
    A batch is cut as ``torch.tensor_split`` does, so micro-batches of a step have up to two sizes, each with messages
    of its own shapes, and a batch with fewer samples than micro-batches has fewer of these. All copies of the model
    have the same number in a step, the smallest of any copy, because at ZeRO stage 3 every micro-batch gathers. A
    micro-batch counts by its share of the samples, so that a mean over samples is that of the batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_zero.comm.mesh import Mesh
from lightning_zero.comm.p2p import P2P
from lightning_zero.comm.peers import failure_named, is_pretended
from lightning_zero.config import Pipeline
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.step_control import StepControl
from lightning_zero.errors import PipelineError
from lightning_zero.lightning.flops import uncounted
from lightning_zero.lightning.pipeline_logging import LoggedValue, Logs, MetricStates, in_order
from lightning_zero.lightning.places import modules_of
from lightning_zero.lightning.rank_zero_calls import replaced
from lightning_zero.lightning.step_outputs import joined_outputs, nbytes_of
from lightning_zero.lightning.trainer_state import TrainerState
from lightning_zero.parallel.module_state import set_buffer, unregistered_modules
from lightning_zero.parallel.pipeline.explicit_steps import ExplicitStep, ExplicitSteps
from lightning_zero.parallel.pipeline.pipeline import PipelineRunner, PipelineStage
from lightning_zero.parallel.pipeline.schedule.microbatches import (
    batch_digest,
    list_of_samples,
    num_samples,
    rebuilt,
    shapes_of,
    split_batch,
    weighted_mean,
)
from lightning_zero.parallel.pipeline.schedule.plan import most_microbatches
from lightning_zero.parallel.pipeline.schedule.reduce_policy import device_bytes, reduces_once
from lightning_zero.parallel.pipeline.schedule.streams import RandomState, RandomStreams, torch_states
from lightning_zero.parallel.pipeline.stages.backward_attributes import BackwardAttributes
from lightning_zero.parallel.pipeline.stages.generators import Draws
from lightning_zero.parallel.pipeline.stages.own_changes import own_modules
from lightning_zero.parallel.pipeline.stages.placed_attributes import PlacedAttributes
from lightning_zero.parallel.pipeline.stages.split import Split, modules_around
from lightning_zero.parallel.pipeline.stages.state_around import StateAround
from lightning_zero.parallel.pipeline.traced_steps import TracedStep, TracedSteps
from lightning_zero.parallel.pipeline.tracing.loss_normalization import Denominators, count_elements

__all__ = ["PipelinedSteps", "refuse_program"]

_CHUNKS = "pipeline_chunks"  # key of a rank's random states

_MOST_BYTES = 2**16  # of an entry beside the loss that all stages are sent

Contexts = Callable[[], AbstractContextManager[Any]]


class PipelinedSteps:
    """Runs the steps of one module.

    Args:
        module: The LightningModule.
        engine: Holds this stage's parameters.
        split: The cut of the module.
        pipeline: The options.
        mesh: The ranks.
        device: Device of this rank.
    """

    def __init__(
        self, module: Any, engine: ZeroEngine, *, split: Split, pipeline: Pipeline, mesh: Mesh, device: torch.device
    ) -> None:
        _refuse_metrics_in_blocks(module, split)
        # - The cut, the mesh, the runner
        self._split = split
        self._module = module
        self._engine = engine
        self._mesh = mesh
        self._device = device
        engine.internals.checkpoints.gather_module_buffers = partial(self._gather_buffers, mesh.broadcast)
        engine.internals.fits.parts = self
        mesh.traffic.share_ledger(engine.internals.communicator.traffic)
        self._modules = modules_of(module)
        # - How it runs
        self._streams = RandomStreams(device)
        self._pipeline = pipeline
        self._is_explicit = hasattr(module, "pipeline_step")
        self._logs = Logs(module)
        self._draws = Draws(module, modules_around(module, split), split.num_chunks, is_repeated=not self._is_explicit)
        self._stage = PipelineStage(
            module,
            split,
            mesh,
            device,
            self._steps,
            self._streams,
            self._draws,
            PlacedAttributes(module, split),
            BackwardAttributes.of(module, split, mesh.stage),
            self._logs,
        )
        self._keeps_gradients = self._reduces_once(pipeline) or pipeline.reduces_once
        self.runner: PipelineRunner[Any] = PipelineRunner(
            self._stage,
            pipeline,
            route=ExplicitSteps(self._stage) if self._is_explicit else TracedSteps(self._stage),
            around=StateAround(module, split, mesh.stage, device, is_repeated=not self._is_explicit),
            p2p=P2P(mesh, device),
            keeps_gradients=self._keeps_gradients,
        )
        # - Messages from the last stage to the others
        self._metrics = MetricStates(module, mesh.data_group)
        self._trainer_state = TrainerState(module)
        # - The losses of a step
        self._has_counts: bool | None = None  # whether their numbers of elements can be told before; None: not tried
        self._sizes: list[int] = [1]  # of the micro-batches that are running
        self._denominators: Denominators | None = None  # of the batch that is running
        self._warnings = _Warnings()

    def for_next_run(self) -> PipelinedSteps:
        """Return the steps for another run of the module: new ones if it has got other modules. Collective: all ranks.

        Programs make modules without parameters anew in `setup`, and all that knows modules here knows the old ones.
        """
        now = modules_of(self._module)
        if now.keys() == self._modules.keys() and all(now[name] is child for name, child in self._modules.items()):
            return self
        steps = PipelinedSteps(
            self._module,
            self._engine,
            split=self._split,
            pipeline=self._pipeline,
            mesh=self._mesh,
            device=self._device,
        )
        steps.runner.around.follow(self.runner.around)
        return steps

    def end(self) -> None:
        """Give all ranks the module buffers of blocks, which may be read everywhere then. Collective: all ranks."""
        self._gather_buffers(self._mesh.broadcast if is_pretended() else self._broadcast_to_all)
        self.runner.around.end_buffers()

    def _broadcast_to_all(self, value: Any, stage: int, what: str) -> Any:
        """Return the object of a stage's first rank; the mesh may have seen an error. Collective: all ranks."""
        values = [value]
        with failure_named(f"broadcast of {what}"):
            dist.broadcast_object_list(values, stage * self._mesh.copies)
        return values[0]

    @property
    def _steps(self) -> StepControl:
        return self._engine.internals.steps

    @contextmanager
    def around_hooks(self) -> Iterator[None]:
        """Warn once, on each rank that draws, of random numbers between the backward and the optimizer's step."""
        before = torch_states(self._device)
        yield
        if not all(map(torch.equal, before, torch_states(self._device))):
            self._warnings.once(
                "draws between backward and step",
                "Code between the backward and the optimizer's step draws random numbers (`on_after_backward`,"
                " `on_before_optimizer_step`, `configure_gradient_clipping`). Every pipeline stage draws the same ones,"
                " each for its own parameters: noise of gradients would be the same on all stages. Draw noise from a"
                " new generator for each parameter (`p.grad.normal_(generator=...)`), seeded by its place and the step;"
                " a number that is drawn once for all parameters is right.",
                warn=warnings.warn,
            )

    def _reduces_once(self, pipeline: Pipeline) -> bool:
        units = self._engine.internals.fits.units
        trained = [buffer for unit in units for buffer in unit.buffers if buffer.kind.trained]
        needed = sum(buffer.layout.padded_numel * buffer.kind.reduce.itemsize for buffer in trained)
        once = reduces_once(pipeline.reduce, needed, device_bytes(self._device, dist.get_world_size()))
        return not self._stage.any_copy(not once, "agreement on when to reduce")

    def summary(self) -> str:
        """Return a line or two with the blocks of every stage, and when gradients are reduced."""
        lines = [self._split.summary()]
        if self._engine.stage == 3:
            often = "batch" if self._keeps_gradients else "micro-batch"
            lines.append(f"gradients of this stage are reduced once per {often}")
        return "\n".join(lines)

    # -- Training ------------------------------------------------------------------------------------------------------

    def training_step(self, args: tuple[Any, ...], *, context: Contexts, scale: float, is_first: bool) -> Any:
        """Run forwards and backwards of one batch and return its loss: () without a graph, the same on all stages.

        With what a step returns beside the loss it is a dictionary; see ``joined_outputs``.
        Collective: all ranks.

        Args:
            args: The batch, and the other arguments of ``training_step``.
            context: Of the precision plugin, around every micro-batch.
            scale: Factor of the loss in backward, besides the micro-batch's share of the samples.
            is_first: The gradients so far are about to be dropped by Lightning.
        """
        batch, *rest = args
        self.runner.hooks.require_none()
        if is_first:
            self._steps.begin_gradients()
        reduces = self._steps.is_last_microbatch

        def loss_of(output: Any, index: int) -> Tensor:
            return _loss(output) * (scale * self._sizes[index] / sum(self._sizes))

        self._metrics.begin()
        self._trainer_state.begin()
        with torch.enable_grad():
            step = self._prepare(
                "training_step", batch, rest=rest, context=context, number=self._pipeline.num_microbatches
            )
        self.runner.hooks.require_none()  # it has run the step
        with self._denominated(step), self._logs.recording(), self._metrics.recording(), torch.enable_grad():
            outputs = self.runner.train(step, loss_of, reduces=reduces)
        if reduces:
            self.runner.hooks.add_joined(self._steps.sum_shared_gradients())
        return self._returned(outputs)

    def _returned(self, outputs: list[Any]) -> Any:
        """Return the loss of a batch, and entries beside it, on all stages. Collective: all ranks of a copy."""
        own: dict[str, Any] | None = None  # of the last stage
        message: tuple[Any, ...] | None = None
        if outputs:
            loss = weighted_mean([_loss(output).detach() for output in outputs], self._sizes)
            if isinstance(outputs[0], dict):
                own, left_out = joined_outputs(outputs, self._sizes)
                large = [name for name, value in own.items() if nbytes_of(value) > _MOST_BYTES]
                sent = {name: _to_device(value, "cpu") for name, value in own.items() if name not in large}
                message = loss.cpu(), sent, left_out, large
            else:
                message = loss.cpu(), None, [], []
        mean, entries, left_out, large = self._share(message)
        if left_out or large:
            self._warn_of_outputs(left_out, large)
        loss = torch.as_tensor(mean, device=self._device)
        if entries is None:
            return loss
        return {"loss": loss, **_to_device(entries if own is None else own, self._device)}

    def _warn_of_outputs(self, left_out: list[str], large: list[str]) -> None:
        """Say once which entries of a step's output hooks are not given."""
        parts = []
        if left_out:
            parts.append(
                f"{', '.join(map(repr, left_out))}, because only floating-point scalars (as means), and tensors and"
                " lists with an item for each sample (joined) can be those of several micro-batches"
            )
        if large:
            parts.append(f"{', '.join(map(repr, large))} on the last pipeline stage alone, because of their size")
        self._warnings.once(
            "outputs",
            f"`training_step` returns entries beside the loss that hooks find not everywhere: {'; '.join(parts)}. Keep"
            " the value in an attribute of the LightningModule, or log it.",
        )

    def _prepare(self, name: str, batch: Any, *, rest: list[Any], context: Contexts, number: int) -> Any:
        """Cut a batch, compare batches and steps of all stages, and return the step for the runner's route.

        Collective: all ranks.

        Args:
            name: Of the method that the step runs.
            batch: The whole batch.
            rest: Of the method's arguments.
            context: Of the precision plugin, around every micro-batch.
            number: Micro-batches of a step, the same on all ranks.
        """
        pieces = self._pieces(batch, number)
        others = tuple(one for one in rest[1:] if isinstance(one, int))  # `dataloader_idx`
        num_new, num_lacking, is_uneven = self._agree(name, batch, pieces, number=number, others=others)
        if num_lacking:
            fewer = number - num_lacking
            pieces = self._pieces(batch, fewer)
            num_new, _, _ = self._agree(name, batch, pieces, number=fewer, others=others)
        self._sizes = _sizes_of(pieces)
        if num_lacking or is_uneven:
            self._warn_of_sizes(number)
        step = self._step(name, pieces, rest, context)
        if num_new:
            self._warnings.note_new(shapes_of(pieces[0]))
        with self._logs.describing(), self._metrics.muted(), self._saves_refused(), uncounted():
            kinds = [(shapes_of(piece), others) for piece in pieces]
            self.runner.prepare(step, name, kinds, num_described=num_new)
        return step

    @contextmanager
    def _saves_refused(self) -> Iterator[None]:
        """Refuse to write a checkpoint in a run that only describes a step, as one in which a flag is guessed."""
        trainer = getattr(self._module, "_trainer", None)
        with nullcontext() if trainer is None else replaced(trainer, "save_checkpoint", _refuse_save):
            yield

    def _pieces(self, batch: Any, number: int) -> list[Any]:
        pieces = split_batch(batch, number)
        if len(pieces) > 1:
            self._require_no_list(batch)
        most = most_microbatches(self._pipeline.schedule, self._mesh.stages, len(pieces))
        return pieces if number == 1 or most == len(pieces) else split_batch(batch, most)

    def _require_no_list(self, batch: Any) -> None:
        """Refuse a batch with a tensor for each sample in a list, or warn once where that is not certain.

        Raises:
            ValueError: The list is as long as the DataLoader's ``batch_size``, and its tensors are longer.
        """
        loader = getattr(getattr(self._module, "_trainer", None), "train_dataloader", None)
        size = getattr(loader, "batch_size", None)
        found = list_of_samples(batch, size if isinstance(size, int) else None)
        if found is None:
            return
        path, length, first = found
        message = (
            f"`{path}` is a list of {length} tensors whose first dimension is {first}. `pipeline` cuts batches along"
            f" the first dimension of their tensors, so this one has {first} samples. If the list has a tensor for each"
            " sample, let `collate_fn` return a dictionary of stacked tensors, or use `Pipeline(microbatches=1)`."
        )
        if isinstance(size, int) and first > size:  # no last batch of fewer samples
            raise ValueError(f"{message} The DataLoader has `batch_size={size}`.")
        self._warnings.once("a tensor for each sample", message)

    def _agree(
        self, name: str, batch: Any, pieces: list[Any], *, number: int, others: tuple[int, ...]
    ) -> tuple[int, int, bool]:
        """Compare batches and numbers of micro-batches.

        Collective: all ranks.

        Args:
            name: Of the method.
            batch: The whole batch.
            pieces: The micro-batches.
            number: Micro-batches of a step, the same on all ranks.
            others: Arguments of the method that may decide what it does.

        Returns:
            How many kinds of micro-batches are to be described, how many micro-batches a copy lacks, and, where none
            does, whether those of a copy differ in size.
        """
        num_new = self._require_same(batch, self.runner.num_new(name, [(shapes_of(piece), others) for piece in pieces]))
        is_uneven = len(set(_sizes_of(pieces))) > 1
        numbers = [num_new, 2 * (number - len(pieces)) + is_uneven]  # two travel in one message
        num_new, both = self._steps.communicator.agree_on(numbers, "agreement on a new kind of step")
        return num_new, both // 2, bool(both % 2)

    def _warn_of_sizes(self, number: int) -> None:
        """Say once that micro-batches of some copy differ from those of other batches."""
        sizes = ", ".join(map(str, self._sizes)) if len(self._sizes) > 1 else "one of all samples"
        whose = f"a batch, whose micro-batches are {sizes}"
        if len(self._sizes) == number and len(set(self._sizes)) == 1:
            whose = "a batch of another copy of the model, whose micro-batches differ in size"
        self._warnings.once(
            "does not divide",
            f"`Pipeline(microbatches={number})` does not divide {whose}. They count by"
            " their samples, so a loss that is a mean over samples is that of the batch. For a loss that is a sum over"
            " samples use batches of one size that is a multiple, and `drop_last=True` in the DataLoader.",
        )

    def _step(self, name: str, pieces: list[Any], rest: list[Any], context: Contexts) -> Any:
        """Return the step for the runner's route."""
        module = self._module

        def traced(piece: Any, index: int) -> Any:
            with context(), self._running(index):
                return getattr(module, name)(piece, *rest)

        def begin(piece: Any, index: int) -> Any:
            with self._logs.microbatch(index, self._sizes[index]):
                return module.pipeline_step(piece, *rest)

        def finish(output: Any, piece: Any, index: int) -> Any:
            with self._running(index):
                return module.pipeline_loss(output, piece, *rest)

        apart = self._trainer_state.put_back
        if self._is_explicit:
            return ExplicitStep(begin, finish, context, pieces, apart)
        return TracedStep(traced, pieces, apart, self._metrics.given, self._logs.given)

    @contextmanager
    def _running(self, index: int) -> Iterator[None]:
        watching = nullcontext() if self._denominators is None else self._denominators.microbatch(index)
        with self._logs.microbatch(index, self._sizes[index]), watching:
            yield

    @contextmanager
    def _denominated(self, step: Any) -> Iterator[None]:
        """Let losses have the denominators of the batch. Collective: all ranks of the last stage."""
        self._denominators = self._survey(step)
        try:
            yield
            if self._denominators is not None:
                self._denominators.check()
        finally:
            self._denominators = None

    def _survey(self, step: Any) -> Denominators | None:
        """Return the denominators of a batch's losses, on the last stage. Collective: all its ranks."""
        if len(self._sizes) == 1 or not self.runner.is_last:
            return None
        counts: list[Tensor | None] = []
        if self._has_counts is not False:
            with self._logs.recording(), self._metrics.muted(), torch.enable_grad():
                self.runner.survey(step, lambda run: counts.append(count_elements(run)))
        if self._has_counts is None:
            is_known = any(count is not None for count in counts)
            self._has_counts = self._stage.any_copy(is_known, "agreement on the kind of losses")
        known = [count for count in counts if count is not None]
        return Denominators(torch.stack(known).tolist() if known and len(known) == len(counts) else None, self._sizes)

    # -- Evaluation ----------------------------------------------------------------------------------------------------

    def evaluation_step(self, name: str, args: tuple[Any, ...], *, context: Contexts) -> Any:
        """Run ``validation_step`` or ``test_step`` and return its output on the last stage, elsewhere None.

        Collective: all ranks.
        """
        output = self._evaluate(name, args, context)
        self._share(None)
        return output

    def predict_step(self, args: tuple[Any, ...], *, context: Contexts) -> Any:
        """Run ``predict_step`` and return its output on all stages. Collective: all ranks."""
        return _to_device(self._share(_to_device(self._evaluate("predict_step", args, context), "cpu")), self._device)

    def _evaluate(self, name: str, args: tuple[Any, ...], context: Contexts) -> Any:
        batch, *rest = args
        self._metrics.begin()
        self._trainer_state.begin()
        step = self._prepare(name, batch, rest=rest, context=context, number=1)
        with self._logs.recording(), self._metrics.recording():
            return self.runner.evaluate(step, name)

    # -- Messages between stages ---------------------------------------------------------------------------------------

    def _share(self, value: Any) -> Any:
        """Send a value, logged values, metrics and changed state from the last stage to all, and log them."""
        message: list[Any] = [None] * 7
        if self.runner.is_last:
            logged = self._logs.merged()
            metrics, changes = self._metrics.collect(logged, len(self._sizes)), self.runner.around.changes()
            draws, told, of_trainer = self._draws.told(), self._logs.on_rank_zero.told(), self._trainer_state.changes()
            message = [value, logged, metrics, changes, draws, told, of_trainer]
        last = self.runner.last_stage
        value, logged, metrics, changes, draws, told, of_trainer = self._mesh.broadcast(
            message, last, "the result of a batch"
        )
        if self._is_explicit:
            front = (self._logs.merged(), self._logs.on_rank_zero.told()) if self._mesh.stage == 0 else None
            of_front, told_in_front = self._mesh.broadcast(front, 0, "values that `pipeline_step` logs")
            logged, told = [*of_front, *logged], told.behind(told_in_front)
        else:
            logged = in_order([*self._logged_elsewhere(logged), *logged])
        self._draws.settle(draws)
        logged = self._filled_in(logged)
        if not self.runner.is_last:
            self._metrics.apply(metrics)
            self.runner.around.take(changes)
            self._trainer_state.take(of_trainer)
        self._logs.replay(logged, self._mesh.data_group, self._device)
        self._logs.on_rank_zero.make(told)
        return value

    def _logged_elsewhere(self, logged: list[LoggedValue]) -> list[LoggedValue]:
        """Return values that other stages alone have logged: in hooks on their blocks that read values.

        Collective if the step is new, or was found to log such values: all ranks of a copy.

        Raises:
            PipelineError: A step begins to do so in a later batch.
        """
        known = {one.key for one in logged}
        mine = [one for one in self._logs.merged() if one.key not in known and not one.is_elsewhere]
        if self.runner.is_new or self._logs.are_elsewhere:
            everyone = [one for found in self._mesh.gather(mine, "values that one stage logs") for one in found]
            self._logs.are_elsewhere |= bool(everyone)
            return everyone
        if mine:
            raise PipelineError(
                f"`self.log({mine[0].name!r}, ...)` is called on one pipeline stage alone, by a block or a hook on it,"
                " and was not in the first batch of this kind: the other stages do not expect the value. Log it from"
                " the first batch on, or log it in the step after the blocks."
            )
        return []

    def _filled_in(self, logged: list[LoggedValue]) -> list[LoggedValue]:
        """Give values that were logged the numbers of the stage that computes them. Collective: all ranks of a copy.

        Returns:
            The values, without those that a block was expected to log and has not.

        Raises:
            PipelineError: No stage has a value.
        """
        missing = [one for one in logged if one.is_elsewhere]
        if not missing:
            return logged
        mine = {one.key: (one.value, one.options) for one in self._logs.merged() if not one.is_elsewhere}
        everyone = self._mesh.gather({one.key: mine.get(one.key) for one in missing}, "values to be logged")
        for one in missing:
            found = next((found[one.key] for found in everyone if found[one.key] is not None), None)
            if found is not None:
                one.value, one.options = found  # the block may log in some micro-batches only
            elif not one.is_of_block:
                raise PipelineError(
                    f"`self.log({one.name!r}, ...)` logs a value of an earlier pipeline stage after the blocks of"
                    f" `{self._split.blocks}`, where no stage has it. Log it where it is computed, let the block return"
                    " the value, or let it keep the value in an attribute of its own (`self.entropy = ...`), not in a"
                    " dictionary or object outside of it."
                )
        return [one for one in logged if not one.is_elsewhere]

    def _require_same(self, batch: Any, num_new: int) -> int:
        """Raise where the stages of a copy have different batches; let them draw the same random numbers.

        Returns:
            The largest ``num_new`` of all stages.
        """
        state = RandomState(self._device)
        mine = torch.tensor([batch_digest(batch), state.digest(), num_new], dtype=torch.int64, device="cpu")
        everyone = self._mesh.gather_numbers(mine, "the comparison of batches")
        if len({int(one[0]) for one in everyone}) > 1:
            raise PipelineError(
                "The stages of a pipeline were given different batches. Every rank of a copy of the model must read the"
                " same data: give the sampler `**trainer.strategy.distributed_sampler_kwargs` (as Lightning does), use"
                " `seed_everything(..., workers=True)`, and no random transforms that are not seeded."
            )
        if len({int(one[1]) for one in everyone}) > 1:
            self._mesh.broadcast(state, 0, "the random state of a batch").moved_to(self._device).restore()
        return max(int(one[2]) for one in everyone)

    def timings(self, steps: int) -> dict[str, float]:
        """Return seconds of work per step and stage, and the bubble's share, since the last call.

        Nothing where devices wait for messages: the host goes on, and its clock tells nothing. Collective: all ranks of
        a copy.
        """
        if self.runner.lets_device_wait:
            return {}
        timing = self.runner.timing
        mine = torch.tensor([timing.busy_s, timing.total_s], dtype=torch.float64, device="cpu")
        everyone = self._mesh.gather_numbers(mine, "timings")
        timing.busy_s = timing.total_s = 0.0
        row = {f"pipeline/busy_s_{stage}": float(one[0]) / steps for stage, one in enumerate(everyone)}
        # A step lasts as long as on the first stage, which is done last: the others wait for it, here or elsewhere.
        busy, total = sum(float(one[0]) for one in everyone), max(float(one[1]) for one in everyone)
        return {**row, "pipeline/bubble_share": 1.0 - busy / (total * self._mesh.stages) if total else 0.0}

    def random_states(self) -> dict[str, Any]:
        """Return the random numbers of this stage's chunks, for a checkpoint."""
        return {_CHUNKS: {"of": self._cut, "states": self._streams.plain()}}

    def take_random_states(self, states: Mapping[str, Any]) -> str | None:
        """Restore the states that ``random_states`` has returned; return why not if another pipeline saved them."""
        saved = states.get(_CHUNKS, {"of": "no pipeline"})
        if saved["of"] != self._cut:
            return (
                f"The checkpoint was saved with {saved['of']} and is resumed with {self._cut}: the random numbers"
                " inside the model (dropout) are not those of an uninterrupted run."
            )
        self._streams.take(saved["states"])
        return None

    @property
    def _cut(self) -> str:
        return f"{self._mesh.stages} pipeline stages ({self._split.num_chunks} chunks)"

    def _gather_buffers(self, broadcast: Callable[[Any, int, str], Any]) -> None:
        """Give all stages the module buffers of the stage that computes with them, for a checkpoint.

        Collective: all ranks.

        Args:
            broadcast: Returns the object of a stage, see ``Mesh.broadcast``.
        """
        for stage in range(self._mesh.stages):
            mine = {
                (name, key): None if buffer is None else buffer.cpu()
                for name, child in own_modules(self._stage.module, self._split, stage).items()
                for key, buffer in child._buffers.items()
            }
            found = broadcast(mine if self._mesh.stage == stage else None, stage, "module buffers of blocks")
            for (name, key), value in found.items() if self._mesh.stage != stage else ():
                set_buffer(self._stage.module.get_submodule(name), key, value, self._device)
        around = {key: buffer.cpu() for key, buffer in self.runner.around.buffers().items()}
        found = broadcast(
            around if self.runner.is_last else None, self.runner.last_stage, "module buffers around the blocks"
        )
        if not self.runner.is_last:
            self.runner.around.fill(found)


class _Warnings:
    """Messages that are given once."""

    def __init__(self) -> None:
        self._given: set[str] = set()
        self._last: Any = None  # kind of micro-batches that was described
        self._num_alike = 0  # kinds that differ from the one before in Python numbers alone

    def once(self, what: str, message: str, *, warn: Callable[[str], None] = rank_zero_warn) -> None:
        """Give a message, from rank 0 if its cause is the same on all ranks."""
        if what not in self._given:
            self._given.add(what)
            warn(message)

    def note_new(self, kind: Any) -> None:
        """Warn of batches that differ in Python numbers, because each of them is described."""
        last, self._last = self._last, kind
        if last is None or [one[0] for one in last] != [one[0] for one in kind]:
            return
        differing = [one for one, other in zip(kind, last, strict=True) if one != other]
        if not differing or any(len(one) > 2 for one in differing):  # of a tensor or an array
            return
        self._num_alike += 1
        if self._num_alike == _MOST_ALIKE:
            self.once(
                "numbers",
                f"`{differing[0][0]}` is a Python number that differs from one batch to the next. Shapes may depend on"
                " it, so a pipeline describes the step anew for every batch, which takes up to three more runs of it."
                " Make it a tensor, or a NumPy array, if no shape depends on it.",
            )


_MOST_ALIKE = 8


def refuse_program(module: Any, microbatches: int) -> None:
    """Refuse parts of a LightningModule that pipeline stages cannot run; warn of those they run otherwise.

    Raises:
        ValueError: Manual optimization, a step that takes batches itself, an overridden hook that would not be called,
            one of two hooks.
        PipelineError: A metric that is no submodule.
    """
    if hasattr(module, "pipeline_step") != hasattr(module, "pipeline_loss"):
        one, other = ("step", "loss") if hasattr(module, "pipeline_step") else ("loss", "step")
        raise ValueError(
            f"`{type(module).__name__}` has `pipeline_{one}` and no `pipeline_{other}`. A step in three parts needs"
            " both: the input of the first block, and the loss of the output of the last one."
        )
    if not module.automatic_optimization:
        raise ValueError(
            "`pipeline` runs backward inside `training_step`, so manual optimization cannot work with it. Use automatic"
            " optimization, or leave `pipeline` out."
        )
    for name in ("training_step", "validation_step", "test_step", "predict_step"):
        if is_param_in_hook_signature(getattr(module, name), "dataloader_iter", explicit=True):
            raise ValueError(
                f"`{type(module).__name__}.{name}` takes a `dataloader_iter`, and `pipeline` runs a step several times,"
                " on every stage, each of which would take other batches. Let it take `batch` and `batch_idx`."
            )
    for hook in ("backward", "optimizer_zero_grad"):
        method = getattr(type(module), hook)
        if not method.__module__.startswith("lightning.pytorch."):
            raise ValueError(
                f"`{type(module).__name__}.{hook}` is overridden, and `pipeline` does not call it in time: backward"
                " runs inside `training_step`. Remove it, or `pipeline`."
            )
    _refuse_unregistered_metrics(module)
    norms = [name for name, child in module.named_modules() if isinstance(child, nn.modules.batchnorm._BatchNorm)]
    if norms and microbatches > 1:
        warnings.warn(
            f"`{norms[0]}` normalises over a batch, and `pipeline` gives it micro-batches: its statistics are those of"
            f" 1/{microbatches} of a batch. Use group or layer normalisation, or `Pipeline(microbatches=1)`.",
            stacklevel=2,
        )


def _refuse_unregistered_metrics(module: nn.Module) -> None:
    for name, held in unregistered_modules(module):
        for child in held.modules():
            if isinstance(child, Metric):
                raise PipelineError(
                    f"`{name}` holds a `{type(child).__name__}` of torchmetrics in a plain container or object. The"
                    " last pipeline stage updates metrics and gives their states to the others, for submodules of the"
                    " LightningModule alone. Put it into an `nn.ModuleDict` or `nn.ModuleList`, or make it an"
                    " attribute of its own."
                )


def _refuse_metrics_in_blocks(module: nn.Module, split: Split) -> None:
    """Refuse metrics that stages would update of which only one has the block.

    Raises:
        PipelineError: There is one.
    """
    for place in split.places:
        held = module.get_submodule(place.name).named_modules() if place.block is not None else ()
        for name, child in held:
            if isinstance(child, Metric):
                full = f"{place.name}.{name}"
                raise PipelineError(
                    f"`{full}` is a `{type(child).__name__}` of torchmetrics inside of a block. The last pipeline stage"
                    " updates metrics and gives their states to the others, and the block may run on another one. Make"
                    " the metric an attribute of the LightningModule, let the block return the value or keep it in an"
                    " attribute, and update the metric with it behind the blocks."
                )


def _refuse_save(*args: Any, **kwargs: Any) -> NoReturn:
    raise PipelineError(
        "The step saves a checkpoint, which all ranks write together, and a pipeline stage runs only a part of the"
        " step. Save in `on_train_batch_end`, which runs on all of them."
    )


def _sizes_of(pieces: list[Any]) -> list[int]:
    """Return the samples of every micro-batch; 1 for a batch in one piece, which may have none."""
    return [num_samples(piece) for piece in pieces] if len(pieces) > 1 else [1]


def _loss(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, Tensor):
        raise PipelineError(
            f"`training_step` returned {type(output).__name__}; in a pipeline it must return the loss, or a dictionary"
            " with the key 'loss'."
        )
    return loss


def _to_device(value: Any, device: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(device)
    return rebuilt(value, lambda item: _to_device(item, device))
