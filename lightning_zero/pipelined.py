"""Steps of a LightningModule in pipeline stages: batches cut, losses scaled, what is logged made equal on all ranks.

Every stage runs the user's ``training_step`` once per micro-batch, as Lightning does per batch under gradient
accumulation: losses, gradients and logged numbers are the means over the micro-batches. Evaluation runs whole batches.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.comm.mail import Mailbox
from lightning_zero.comm.mesh import Mesh
from lightning_zero.config import Pipeline
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.errors import PipelineError
from lightning_zero.logged import LoggedValue, Logs, MetricStates
from lightning_zero.parallel.captured import CapturedSteps
from lightning_zero.parallel.denominators import Denominators, count_elements
from lightning_zero.parallel.handed import HandedStep, HandedSteps
from lightning_zero.parallel.keeping import device_bytes, reduces_once
from lightning_zero.parallel.microbatches import batch_digest, shapes_of, split_batch
from lightning_zero.parallel.pipeline import PipelineRunner, PipelineStage
from lightning_zero.parallel.split import Split
from lightning_zero.parallel.streams import RandomState, RandomStreams

__all__ = ["PipelinedSteps", "refuse_program"]

_CHUNKS = "pipeline_chunks"  # key of a rank's random states

Contexts = Callable[[], AbstractContextManager[Any]]


class PipelinedSteps:
    """Runs the steps of one module.

    Args:
        module: The LightningModule.
        engine: Holds this stage's parameters.
        split: What lies where.
        pipeline: The options.
        mesh: The ranks.
        device: Device of this rank.
    """

    def __init__(
        self, module: Any, engine: ZeroEngine, split: Split, pipeline: Pipeline, mesh: Mesh, device: torch.device
    ) -> None:
        # - What runs where
        self._split = split
        self._module = module
        self._engine = engine
        self._mesh = mesh
        self._device = device
        # - How it runs
        self._streams = RandomStreams(device)
        self._stage = PipelineStage(module, split, mesh, device, engine, self._streams)
        self._is_handed = hasattr(module, "pipeline_step")
        self._keeps_gradients = self._reduces_once(pipeline)
        self.runner: PipelineRunner[Any] = PipelineRunner(
            self._stage,
            pipeline,
            route=HandedSteps(self._stage) if self._is_handed else CapturedSteps(self._stage),
            mail=Mailbox(mesh, device),
            keeps_gradients=self._keeps_gradients,
        )
        # - What the last stage tells the others
        self._logs = Logs(module)
        self._metrics = MetricStates(module, mesh.copy_group)
        self._buffers = _buffers_by_stage(module, split)
        # - The losses of a step
        self._has_counts: bool | None = None  # whether their numbers of elements can be told before; None: not tried
        self._denominators: Denominators | None = None  # of the batch that is running

    def _reduces_once(self, pipeline: Pipeline) -> bool:
        trained = [buffer for unit in self._engine.units for buffer in unit.buffers if buffer.kind.trained]
        needed = sum(buffer.layout.padded_numel * buffer.kind.reduce.itemsize for buffer in trained)
        once = reduces_once(pipeline.reduce, needed, device_bytes(self._device, dist.get_world_size()))
        return not self._stage.any_copy(not once, "agreement on when to reduce")

    def summary(self) -> str:
        """Return a line or two that say what lies where, and when gradients are reduced."""
        lines = [self._split.summary()]
        if self._engine.stage == 3:
            often = "batch" if self._keeps_gradients or self._split.num_chunks > self._mesh.stages else "micro-batch"
            lines.append(f"gradients of this stage are reduced once per {often}")
        return "\n".join(lines)

    # -- Training ------------------------------------------------------------------------------------------------------

    def training_step(self, args: tuple[Any, ...], *, context: Contexts, scale: float, is_first: bool) -> Tensor:
        """Run forwards and backwards of one batch and return its loss: () without a graph, the same on all stages.

        Collective: all ranks.

        Args:
            args: The batch, and what ``training_step`` is given besides.
            context: Of the precision plugin, around every micro-batch.
            scale: Factor of the loss in backward, besides the mean over the micro-batches.
            is_first: The gradients so far are about to be dropped by Lightning.
        """
        batch, *rest = args
        number = self.runner.num_microbatches
        pieces = split_batch(batch, number)
        if is_first:
            self._engine.begin_gradients()
        reduces = self._engine.is_last_microbatch

        def loss_of(output: Any) -> Tensor:
            return _loss(output) * (scale / number)

        self._metrics.begin()
        step = self._step("training_step", pieces, rest, context)
        with torch.enable_grad():
            self._prepare(step, "training_step", batch, shapes_of(pieces[0]))
        with self._denominated(step), self._logs.recording(), torch.enable_grad():
            outputs = self.runner.train(step, loss_of, reduces=reduces)
        if reduces:
            self._engine.sum_shared_gradients()
        loss = torch.stack([_loss(output).detach().float() for output in outputs]).mean() if outputs else None
        mean = self._share(None if loss is None else loss.cpu())
        return torch.as_tensor(mean, device=self._device)

    def _prepare(self, step: Any, name: str, batch: Any, kind: Any) -> None:
        """Compare batches and steps of all stages. Collective: all ranks."""
        with self._logs.recording(), self._metrics.muted():
            changed = self.runner.is_new(step, name, kind)
            changed = self._require_same(batch, changed)
            self.runner.prepare(step, name, kind, is_new=changed)

    def _step(self, name: str, pieces: list[Any], rest: list[Any], context: Contexts) -> Any:
        """Return what the runner's route runs."""
        module = self._module

        def captured(index: int) -> Any:
            with context(), self._watching(index):
                return getattr(module, name)(pieces[index], *rest)

        def begin(index: int) -> Any:
            return module.pipeline_step(pieces[index], *rest)

        def finish(output: Any, index: int) -> Any:
            with self._watching(index):
                return module.pipeline_loss(output, pieces[index], *rest)

        return HandedStep(begin, finish, context) if self._is_handed else captured

    def _watching(self, index: int) -> AbstractContextManager[None]:
        return nullcontext() if self._denominators is None else self._denominators.microbatch(index)

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
        if self.runner.num_microbatches == 1 or not self.runner.is_last:
            return None
        counts: list[Tensor | None] = []
        if self._has_counts is not False:
            with self._logs.recording(), self._metrics.muted(), torch.enable_grad():
                self.runner.survey(step, lambda run: counts.append(count_elements(run)))
        if self._has_counts is None:
            is_known = any(count is not None for count in counts)
            self._has_counts = self._stage.any_copy(is_known, "agreement on the kind of losses")
        known = [count for count in counts if count is not None]
        return Denominators(torch.stack(known).tolist() if known and len(known) == len(counts) else None)

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
        step = self._step(name, [batch], rest, context)
        self._metrics.begin()
        self._prepare(step, name, batch, shapes_of(batch))
        with self._logs.recording():
            return self.runner.evaluate(step, name)

    # -- What the stages tell one another ------------------------------------------------------------------------------

    def _share(self, value: Any) -> Any:
        """Send a value, what was logged and the metrics from the last stage to all, and log it."""
        message: list[Any] = [None, None, None]
        if self.runner.is_last:
            logged = self._logs.merged()
            message = [value, logged, self._metrics.collect(logged)]
        dist.broadcast_object_list(message, group=self._mesh.host_group, group_src=self.runner.last_stage)
        value, logged, metrics = message
        self._fill_in([one for one in logged if one.is_elsewhere])
        if not self.runner.is_last:
            self._metrics.apply(metrics)
        self._logs.replay(logged, self._mesh.copy_group, self._device)
        return value

    def _fill_in(self, missing: list[LoggedValue]) -> None:
        """Give values that were logged the numbers of the stage that computes them. Collective: all ranks of a copy."""
        if not missing:
            return
        mine = {one.key: one.value for one in self._logs.merged() if not one.is_elsewhere}
        everyone: list[Any] = [None] * self._mesh.stages
        dist.all_gather_object(everyone, {one.key: mine.get(one.key) for one in missing}, group=self._mesh.host_group)
        for one in missing:
            one.value = next((found[one.key] for found in everyone if found[one.key] is not None), None)
            if one.value is None:
                raise PipelineError(
                    f"`self.log({one.name!r}, ...)` logs a value of an earlier pipeline stage behind the blocks of"
                    f" `{self._split.blocks}`, where no stage has it. Log it where it is computed, or call"
                    " `self.log` in front of the blocks."
                )

    def _require_same(self, batch: Any, is_new: bool) -> bool:
        """Raise where the stages of a copy have different batches; let them draw the same random numbers.

        Returns:
            Whether ``is_new`` is set on some stage.
        """
        state = RandomState(self._device)
        mine = torch.tensor([batch_digest(batch), state.digest(), is_new], dtype=torch.int64)
        everyone = [torch.empty_like(mine) for _ in range(self._mesh.stages)]
        dist.all_gather(everyone, mine, group=self._mesh.host_group)
        if len({int(one[0]) for one in everyone}) > 1:
            raise PipelineError(
                "The stages of a pipeline were given different batches. Every rank of a copy of the model must read the"
                f" same data: use a sampler with `num_replicas={self._mesh.copies}` and `rank={self._mesh.copy}` (as"
                " Lightning's own), `seed_everything(..., workers=True)`, and no random transforms that are not seeded."
            )
        if len({int(one[1]) for one in everyone}) > 1:
            states = [state]
            dist.broadcast_object_list(states, group=self._mesh.host_group, group_src=0)
            states[0].moved_to(self._device).restore()
        return any(bool(one[2]) for one in everyone)

    def timings(self, steps: int) -> dict[str, float]:
        """Return seconds of work per step and stage, and the bubble's share, since the last call.

        Collective: all ranks of a copy.
        """
        timing = self.runner.timing
        mine = torch.tensor([timing.busy_s, timing.total_s], dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(self._mesh.stages)]
        dist.all_gather(everyone, mine, group=self._mesh.host_group)
        timing.busy_s = timing.total_s = 0.0
        row = {f"pipeline/busy_s_{stage}": float(one[0]) / steps for stage, one in enumerate(everyone)}
        # A step lasts as long as on the first stage, which is done last: the others wait for it, here or elsewhere.
        busy, total = sum(float(one[0]) for one in everyone), max(float(one[1]) for one in everyone)
        return {**row, "pipeline/bubble_share": 1.0 - busy / (total * self._mesh.stages) if total else 0.0}

    def random_states(self) -> dict[str, Any]:
        """Return the random numbers of this stage's chunks, for a checkpoint."""
        return {_CHUNKS: {"of": self._cut, "states": self._streams.plain()}}

    def take_random_states(self, states: Mapping[str, Any]) -> str | None:
        """Go on from what ``random_states`` has returned; return what could not carry over."""
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

    def gather_buffers(self) -> None:
        """Give all stages the module buffers of the stage that computes with them, for a checkpoint.

        Collective: all ranks.
        """
        for stage, buffers in self._buffers.items():
            values = [[buffer.cpu() for buffer in buffers()]] if self._mesh.stage == stage else [None]
            dist.broadcast_object_list(values, group=self._mesh.host_group, group_src=stage)
            for buffer, value in zip(buffers(), values[0] or (), strict=True):
                buffer.copy_(value)


def refuse_program(module: Any, microbatches: int) -> None:
    """Refuse what a LightningModule does that pipeline stages cannot do; warn of what they do otherwise.

    Raises:
        ValueError: Manual optimization, an overridden hook that would not be called, one of two hooks.
    """
    if hasattr(module, "pipeline_step") != hasattr(module, "pipeline_loss"):
        one, other = ("step", "loss") if hasattr(module, "pipeline_step") else ("loss", "step")
        raise ValueError(
            f"`{type(module).__name__}` has `pipeline_{one}` and no `pipeline_{other}`. A step in three parts needs"
            " both: what the first block is called with, and what is done with the output of the last one."
        )
    if not module.automatic_optimization:
        raise ValueError(
            "`pipeline` runs backward inside `training_step`, so manual optimization cannot work with it. Use automatic"
            " optimization, or leave `pipeline` out."
        )
    for hook in ("backward", "optimizer_zero_grad"):
        method = getattr(type(module), hook)
        if not method.__module__.startswith("lightning.pytorch."):
            raise ValueError(
                f"`{type(module).__name__}.{hook}` is overridden, and `pipeline` does not call it in time: backward"
                " runs inside `training_step`. Remove it, or `pipeline`."
            )
    norms = [name for name, child in module.named_modules() if isinstance(child, nn.modules.batchnorm._BatchNorm)]
    if norms and microbatches > 1:
        warnings.warn(
            f"`{norms[0]}` normalises over a batch, and `pipeline` gives it micro-batches: its statistics are those of"
            f" 1/{microbatches} of a batch. Use group or layer normalisation, or `Pipeline(microbatches=1)`.",
            stacklevel=2,
        )


def _buffers_by_stage(module: Any, split: Split) -> dict[int, Callable[[], list[Tensor]]]:
    names: dict[int, list[str]] = {}
    for place in split.places:
        names.setdefault(place.chunk % split.stages, []).append(place.name)

    def buffers_of(stage: int) -> Callable[[], list[Tensor]]:
        return lambda: [buffer for name in names[stage] for buffer in module.get_submodule(name).buffers()]

    return {stage: buffers_of(stage) for stage in sorted(names) if buffers_of(stage)()}


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
    if isinstance(value, dict):
        return {key: _to_device(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_to_device(item, device) for item in value)
    return value
