"""State of the modules around the blocks: changes by code behind the blocks go to the stages in front of it.

Note [Prefixes]
    A chunk runs the step up to the first block of the next one, so it has the module buffers and attributes as code up
    to there leaves them. The last chunk runs all of the step: after a batch the other stages are given the
    values that differ there. Within a batch that would be too late: the front of the next micro-batch has run before.
    Code that reads there a value that code after its chunk changes is refused.

Note [Who reads]
    In the first batch of a kind of step all reads of attributes are noted, and chunks compare their values at its end.
    From then on only values that are known to change after a chunk are watched. A value that begins to change there in
    a later batch is refused at the end of that batch if the first batch has read it.

Note [State that is not sent]
    Of a value that is not sent (a graph, a new object, or a large tensor) the others are told a fingerprint. A stage
    that has not made the same change to it has an old value, which must not be read any more. So has a stage that has
    not run the code that the last stage has run on tensors without values.

Note [Parts]
    With ``pipeline_step`` and ``pipeline_loss`` each part runs on one stage. A value that the one changes and the other
    reads in the same micro-batch is refused in the first batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.errors import PipelineError
from lightning_zero.parallel.module_state import set_buffer
from lightning_zero.parallel.pipeline.stages.attribute_reads import AttributeReads, Key, Watch, When
from lightning_zero.parallel.pipeline.stages.attributes import Written
from lightning_zero.parallel.pipeline.stages.kept_attributes import KeptAttributes
from lightning_zero.parallel.pipeline.stages.own_changes import OwnChanges, StageChanges, own_modules
from lightning_zero.parallel.pipeline.stages.split import Split
from lightning_zero.parallel.pipeline.stages.state_marks import (
    MOST_BYTES,
    Mark,
    differ,
    fingerprint,
    has_fake,
)
from lightning_zero.parallel.pipeline.stages.state_values import Packing, Taking, Untaken

__all__ = ["Change", "StateAround"]

Exchange = Callable[[Any], list[Any]]  # returns the values of all stages

_SENT = (
    f"numbers, strings, tensors of up to {MOST_BYTES} bytes without a graph, and lists, dictionaries and attributes of"
    " objects of them"
)


@dataclass(frozen=True)
class Change:
    """A value that code behind the blocks has changed.

    Attributes:
        key: Module and attribute.
        is_buffer: It is a module buffer.
        value: The new one.
        fingerprint: Of a value that is not sent and that code in front of the blocks may have changed; else None.
            ``UNSENT`` if code behind the blocks is known to change it.
    """

    key: Key
    is_buffer: bool
    value: Any
    fingerprint: Any = None


@dataclass
class _View:
    """A chunk's module state at the end of a batch.

    Attributes:
        values: Fingerprints.
        changed: Keys that this batch has changed.
        read: The last micro-batch that has read a key before it has written it.
        touched: Keys that were read or written in any way.
        in_backward: Keys that a backward has read before it has written them.
        by_forwards: Keys that forwards have changed.
    """

    values: dict[Key, Any]
    changed: set[Key]
    read: dict[Key, int]
    touched: set[Key]
    in_backward: set[Key] = field(default_factory=set)
    by_forwards: set[Key] = field(default_factory=set)


class StateAround:
    """Keeps the state around the blocks alike on all stages.

    Call protocol:
        1. ``begin`` before a batch; ``watched`` around every run of a chunk.
        2. ``compare`` behind the first batch of a kind.
        3. ``changes`` on the last stage, and ``take`` its result on the others.

    Args:
        module: The root.
        split: The cut of the module.
        stage: Of this rank.
        device: Device of this rank.
        is_repeated: Whether all stages run the code in front of their chunks; else the first one alone does.

    Attributes:
        written: Attributes of other stages' modules that the batch has changed behind their calls; None: all changes
            count.
    """

    def __init__(self, module: nn.Module, split: Split, stage: int, device: torch.device, *, is_repeated: bool) -> None:
        # - State kept equal on all stages
        self._kept = KeptAttributes(module, split, stage)
        self._watching = AttributeReads(self._kept.all, self._kept.around, self._kept.ignored, self._refusal)
        self._root = type(module).__name__
        self._is_last = stage == (split.num_chunks - 1) % split.stages
        self._split = split
        self._device = device
        self._is_repeated = is_repeated
        # - Known changes
        self._behind: dict[str, dict[int, set[Key]]] = {}  # changed behind a chunk, by name of the step's method
        self._by_backwards: set[Key] = set()  # that backwards of the last chunk change, and its forwards do not
        self._reads: dict[str, dict[int, set[Key]]] = {}  # in later micro-batches of first batches, likewise
        self._stale: set[Key] = set()  # that the last stage has not sent
        self._own = OwnChanges(own_modules(module, split, stage), self._kept.items_of)
        self._stage = stage
        self._between: set[Key] = set()  # that must not be read until the next step
        self._sent: dict[str, set[Key]] = {}  # that it has sent, which the others may have changed since, likewise
        # - The batch that is running
        self._name = ""  # of its method
        self._is_noting = False
        self._num_run = 0  # micro-batches
        self._views: dict[int, _View] = {}  # of chunks, at the end of their last run
        self.written: Written | None = {}

    @property
    def places_changed(self) -> set[str]:
        """The names of modules with a place of which code behind the blocks changes attributes."""
        names = {name for name, _ in self._kept.reset}
        return {place.name for place in self._split.places for name in names if f"{name}.".startswith(f"{place.name}.")}

    def buffers(self) -> dict[Key, Tensor]:
        """Return the module buffers that the last stage has as all code of a step leaves them."""
        modules = self._kept.around if self._is_repeated else {}
        return {(name, key): buffer for name, child in modules.items() for key, buffer in child._buffers.items()
                if buffer is not None}  # fmt: skip

    def fill(self, buffers: Mapping[Key, Tensor]) -> None:
        """Give the module buffers the values of the last stage."""
        for (name, key), value in buffers.items():
            set_buffer(self._kept.around[name], key, value, self._device)

    def begin(self, name: str, *, is_new: bool) -> None:
        """Begin a batch.

        Args:
            name: Of the step's method.
            is_new: Reads are noted, and ``compare`` follows.
        """
        self._name, self._is_noting = name, is_new
        self._num_run = 0
        self._views.clear()
        self._kept.begin(is_new=is_new)
        self._own.begin(is_new=is_new and self._is_repeated)

    @contextmanager
    def watched(self, chunk: int, index: int) -> Iterator[None]:
        """Watch which attributes a run of a chunk reads.

        Raises:
            PipelineError: It reads state that code behind it has changed in an earlier micro-batch.
        """
        self._num_run = max(self._num_run, index + 1)
        watch = self._watch_of(chunk, index)
        start = {key: fingerprint(value) for key, _, value in self._kept.items()} if self._is_noting else {}
        with nullcontext() if watch is None else self._watching.watched(watch):
            yield
        if self._is_noting:
            before = self._views.get(chunk)
            read, touched = ({}, set()) if before is None else (before.read, before.touched)
            if watch is not None:
                read.update(dict.fromkeys(watch.seen, index))
                touched |= watch.touched
            values = {key: fingerprint(value) for key, _, value in self._kept.items()}
            in_backward, by_forwards = (set(), set()) if before is None else (before.in_backward, before.by_forwards)
            by_forwards |= {
                key
                for key in values | start
                if values.get(key) is None or values.get(key, Mark.MISSING) != start.get(key, Mark.MISSING)
            }
            self._views[chunk] = _View(values, self._kept.changed(), read, touched, in_backward, by_forwards)

    @contextmanager
    def watched_backward(self, chunk: int) -> Iterator[None]:
        """Watch which attributes a backward reads, in front of the last chunk, whose forwards have run all of the step.

        Raises:
            PipelineError: It reads state that code behind the chunk changes.
        """
        if chunk == self._split.num_chunks - 1:
            yield
            return
        refused = (self._stale | self._behind.get(self._name, {}).get(chunk, set())) - self._by_backwards
        watch = Watch(refused, is_noting=self._is_noting, is_backward=True)
        with self._watching.watched(watch) if refused or self._is_noting else nullcontext():
            yield
        if self._is_noting:
            self._views[chunk].in_backward |= watch.seen

    def _watch_of(self, chunk: int, index: int) -> Watch | None:
        is_last = chunk == self._split.num_chunks - 1
        is_noting = self._is_noting and (not self._is_repeated or index > 0 or is_last)
        refused = set(self._own.in_backward)
        if not is_last:
            refused |= self._stale
        if index > 0 and not self._is_noting:
            refused |= self._own.late
        if index > 0 and not self._is_noting and not is_last:
            refused |= self._behind.get(self._name, {}).get(chunk, set())
        return Watch(refused, is_noting) if refused or is_noting else None

    def compare(self, exchange: Exchange, *, is_in_order: bool = True) -> None:
        """Find the state that is changed behind each chunk. Collective: all ranks of a copy.

        Args:
            exchange: Returns the values of all stages.
            is_in_order: On the last stage every backward runs before the next forward.

        Raises:
            PipelineError: On all of them, where a chunk has read such a value.
        """
        given = exchange(
            (
                self._views,
                self._kept.changed_in_places(self.written if self._is_last else None),
                self._changed_alone(),
                self._kept.put_back_in_places(self.written) if self._is_last else {},
            )
        )
        everyone = {chunk: view for views, *_ in given for chunk, view in views.items()}
        last = everyone.pop(self._split.num_chunks - 1)
        self._compare_places([changed for _, changed, *_ in given], [put_back for *_, put_back in given])
        if self._is_repeated:
            alone = [changes for _, _, changes, _ in given]
            self._own.compare(alone, self._stage, self._kept.value_of, is_in_order=is_in_order)
        for key in sorted(key for key, index in last.read.items() if index > 0 and key in self._own.late):
            raise self._error(key, None)
        if not self._is_repeated:
            self._require_apart(everyone[0], last)
        in_last = given[(self._split.num_chunks - 1) % self._split.stages][2].backward.keys()
        self._by_backwards |= (last.changed | in_last) - last.by_forwards
        behind = self._behind.setdefault(self._name, {})
        reads = self._reads.setdefault(self._name, {})
        for chunk, view in sorted(everyone.items()):
            if self._is_repeated:
                self._require_on_last_stage(chunk, view, last)
            found = {key for key in last.values | view.values if self._is_behind(key, view, last)}
            read = {key for key, index in view.read.items() if index > 0}
            behind.setdefault(chunk, set()).update(found)
            reads.setdefault(chunk, set()).update(read)
            for key in sorted(found & read):
                raise self._error(key, chunk)
            for key in sorted(found & view.in_backward & last.by_forwards):
                raise self._refusal(key, When.IN_BACKWARD)

    def _changed_alone(self) -> StageChanges:
        """Return the changes of this batch in modules of this stage, and in its backward."""
        if not self._is_repeated:
            return StageChanges({}, {})
        view = self._views[max(self._views)]
        now = {key: fingerprint(value) for key, _, value in self._kept.items()}
        backward = {key: value for key, value in now.items() if differ(value, view.values.get(key, Mark.MISSING))}
        return StageChanges(self._own.changed(), backward)

    def _watch_between_steps(self) -> None:
        self._between = self._stale.union(self._own.watched())
        self._watching.watch_between_steps(self._between)

    def _compare_places(self, changed: Sequence[Mapping[Key, Any]], put_back: Sequence[Mapping[Key, Any]]) -> None:
        """Find out which values in modules of other stages code behind the blocks has changed, or has put back.

        Raises:
            PipelineError: It has run several micro-batches.
        """
        last_stage, stages = (self._split.num_chunks - 1) % self._split.stages, self._split.stages
        for key, value in put_back[last_stage].items():
            owner = changed[self._split.chunk_of(key[0]) % stages]
            if value is not None and key in owner and owner[key] != value:
                self._kept.reset.add(key)
                self._kept.put_back.add(key)
        for key, value in changed[last_stage].items():
            owner = changed[self._split.chunk_of(key[0]) % stages]  # no other stage uses the module
            if value is not None and owner.get(key, Mark.MISSING) != value:
                if key not in self._kept.put_back:
                    self._require_one_microbatch(key)
                self._kept.reset.add(key)

    def _require_one_microbatch(self, key: Key) -> None:
        if self._num_run > 1:
            raise PipelineError(
                f"`{'.'.join(filter(None, key))}` of `{self._root}` is changed by code after the blocks of"
                f" `{self._split.blocks}`, in a module of another pipeline stage, which runs the next micro-batch"
                " before that. Change it in a hook after the step (`on_train_batch_end`), which runs on all stages, or"
                " use `Pipeline(microbatches=1, schedule='gpipe')`."
            )

    def _is_behind(self, key: Key, view: _View, last: _View) -> bool:
        """Say whether code behind a chunk has changed a value."""
        if key not in last.changed and not (self._is_repeated and key in view.changed & last.touched):
            return False  # the stages had different values before, or the last one runs no code that changes it
        if key in last.values and last.values[key] is None:  # a fake, whose value an earlier stage has
            return key in last.changed and key not in view.changed
        return differ(view.values.get(key, Mark.MISSING), last.values.get(key, Mark.MISSING))

    def _require_on_last_stage(self, chunk: int, view: _View, last: _View) -> None:
        """Raise where the last stage has read state that an earlier one alone has changed."""
        for key in sorted((view.changed - last.changed) & last.read.keys()):
            if differ(view.values.get(key, Mark.MISSING), last.values.get(key, Mark.MISSING)):
                raise PipelineError(
                    f"`{'.'.join(filter(None, key))}` of `{self._root}` is changed on the pipeline stage of chunk"
                    f" {chunk} alone, and read on the last stage: by code for rank 0 (`if self.global_rank == 0`,"
                    " `@rank_zero_only`), which is to run on all ranks then, or by a block or a hook on one, from"
                    " values (`output.norm().item()`) that the last stage does not have: keep a tensor"
                    " (`output.norm().detach()`), which is sent."
                )

    def _require_apart(self, first: _View, last: _View) -> None:
        """Raise where a part of a step reads state that only the other part, on another stage, has changed."""
        for key in sorted(first.changed & (last.read.keys() | (last.changed & first.read.keys()))):
            name = ".".join(filter(None, key))
            raise PipelineError(
                f"`{name}` of `{self._root}` is changed by `pipeline_step`, which the first pipeline stage runs, and"
                " read or changed by `pipeline_loss`, which the last one runs: neither has the other's value. Compute"
                " it in both from the batch, under two names, or let it go through the blocks with the hidden states."
            )

    # -- Changes from the last stage to the others ---------------------------------------------------------------------

    def changes(self) -> list[Change]:
        """Return the state that this batch has changed, on the last stage."""
        known = set().union(*self._behind.get(self._name, {}).values()) if self._is_repeated else set()
        now = {key: (is_buffer, value) for key, is_buffer, value in self._kept.items()}
        sent = self._sent.setdefault(self._name, set())
        packing = Packing(self._kept.before, self._device)
        found = []
        for key in sorted(self._kept.all_keys()):
            is_buffer, value = now.get(key, (False, Mark.MISSING))
            is_placed = key in self._kept.reset
            if is_placed and not self._kept.is_written(key, self.written):
                continue  # its own stage has the value
            has_changed = is_placed or self._kept.has_changed(key)
            if key in known or has_changed or key in sent:
                pack = packing.pack if key in known or has_changed else packing.unchanged
                packed = pack(key, value)
                sent.add(key)
                is_elsewhere = has_fake(value)
                (self._stale.add if is_elsewhere else self._stale.discard)(key)
                told = None
                if packed is Mark.UNSENT and self._is_repeated and not is_elsewhere:
                    told = Mark.UNSENT if key in known else fingerprint(value)
                found.append(Change(key, is_buffer, packed, told))
        self._watch_between_steps()
        return found

    def take(self, changes: Iterable[Change]) -> None:
        """Take over the last stage's changes.

        Raises:
            PipelineError: A micro-batch of this batch has read an old value.
        """
        behind = self._behind.setdefault(self._name, {})
        ordered = sorted(changes, key=lambda change: change.value is not Mark.UNSENT)  # others may refer to these
        taking = Taking(self._kept.before, self._stale, self._device)
        for change in ordered:
            if self._is_repeated or not self._kept.has_changed(change.key):  # by code that the last stage does not run
                known = set().union(*behind.values())
                differs = self._take(change, taking)
                is_put_back = change.key in self._kept.put_back and not self._kept.has_changed(change.key)
                if differs and change.key in self._kept.reset and not is_put_back:
                    self._require_one_microbatch(change.key)
                elif differs and change.key not in known and not is_put_back:
                    self._note_behind(change.key)
                if change.key not in self._stale:
                    self._own.elsewhere.discard(change.key)
        self._watch_between_steps()

    def _take(self, change: Change, taking: Taking) -> bool:
        """Take over a value; say whether this stage had another one."""
        key = change.key
        space = self._kept.space(key, is_buffer=change.is_buffer)
        old = space.get(key[1], Mark.MISSING)
        if change.value is Mark.UNSENT:
            is_same = self._kept.has_changed(key) and not has_fake(old)
            if is_same and change.fingerprint is not None:
                is_same = not differ(fingerprint(old), change.fingerprint)
            if not is_same:
                self._stale.add(key)
            return not is_same
        try:
            new, differs = taking.take(change.value, old)
        except Untaken:
            self._stale.add(key)
            return True
        self._stale.discard(key)
        if new is Mark.MISSING:
            space.pop(key[1], None)
        elif new is not old:
            space[key[1]] = new
        return differs

    def _note_behind(self, key: Key) -> None:
        """Watch a value from now on; raise if it was read in this batch."""
        behind, reads = self._behind[self._name], self._reads.get(self._name, {})
        for chunk in range(self._split.num_chunks - 1):
            behind.setdefault(chunk, set()).add(key)
            if self._num_run > 1 and key in reads.get(chunk, set()):
                raise self._error(key, chunk)

    # -- Who reads -----------------------------------------------------------------------------------------------------

    def follow(self, before: StateAround) -> None:
        """Go on refusing reads of old values that another object has refused, in modules that are still there."""
        before._watching.end_between_steps()
        same = {name for name, child in self._kept.all.items() if before._kept.all.get(name) is child}
        for mine, left in (
            (self._stale, before._stale),
            (self._own.elsewhere, before._own.elsewhere),
            (self._own.in_backward, before._own.in_backward),
        ):
            mine |= {key for key in left & before._between if key[0] in same}  # the program has assigned the others
        self._watch_between_steps()

    def end_buffers(self) -> None:
        """Let the program read module buffers: all ranks have got those of the stages that compute with them."""
        for keys in (self._stale, self._own.elsewhere):
            keys -= {(name, key) for name, key in keys if key in self._kept.all[name]._buffers}
        self._watch_between_steps()

    def end_between_steps(self) -> None:
        """Let the program read everything: a step is described, which is watched by itself."""
        self._watching.end_between_steps()
        self._stale &= self._between  # the program has assigned the others

    def _refusal(self, key: Key, when: When) -> PipelineError:
        if when is When.IN_STEP:
            return self._error(key, None)
        if when is When.IN_BACKWARD:
            return PipelineError(
                f"`{'.'.join(filter(None, key))}` of `{self._root}` is changed by code after the blocks of"
                f" `{self._split.blocks}` and read in the backward, by a hook on a gradient or by code that is computed"
                " again, on a pipeline stage that does not have the new value then. Assign it before the blocks."
            )
        if key in self._own.in_backward and key not in self._stale:
            return PipelineError(
                f"`{'.'.join(filter(None, key))}` of `{self._root}` is read between two steps, and changed in the"
                " backward (by hooks on gradients or `register_full_backward_hook`) on several pipeline stages, each of"
                " which has a part of it. Log the values in these hooks (`self.log`)."
            )
        if key in self._own.elsewhere and key not in self._stale:
            return PipelineError(
                f"`{'.'.join(filter(None, key))}` of `{self._root}` is read between two steps, and changed in a step on"
                " another pipeline stage, which runs the module: this stage has an old value. Log it in the step"
                " (`self.log` after the blocks, or in the block), or let the step keep it in an attribute of the"
                " LightningModule (`self.usage = [block.usage for block in self.blocks]`), which is sent."
            )
        if self._is_last:
            return PipelineError(
                f"`{'.'.join(filter(None, key))}` of `{self._root}` is read between two steps on the last pipeline"
                " stage, which does not have its value: an earlier stage has computed it. Log it in the step"
                " (`self.log`), or let code after the blocks keep a value that they use."
            )
        return PipelineError(
            f"`{'.'.join(filter(None, key))}` of `{self._root}` is changed by a step after the blocks of"
            f" `{self._split.blocks}`, and read between two steps on a pipeline stage that does not have the new value:"
            f" {_SENT} are sent. Keep it as one of these (`.detach()`), use `self.log` or a metric of torchmetrics, or"
            " assign it before it is read."
        )

    def _error(self, key: Key, chunk: int | None) -> PipelineError:
        where = "before them" if chunk in (None, 0) else f"before the end of pipeline chunk {chunk}"
        name = ".".join(filter(None, key))
        if key in self._own.in_backward and key not in self._stale:
            return PipelineError(
                f"`{name}` of `{self._root}` is read in a step, and changed in the backward (by hooks on gradients or"
                " `register_full_backward_hook`) on some pipeline stages: the others have an old value, or a part of"
                " it. Compute it from values of the forward, or train without `pipeline`."
            )
        if key in self._own.late and key not in self._stale:
            return PipelineError(
                f"`{name}` of `{self._root}` is read in a step, and changed in the backward (by hooks on gradients or"
                " `register_full_backward_hook`), and in this schedule the forwards of later micro-batches run before"
                " it. Use `Pipeline(schedule='1f1b')` with one chunk per stage, or `microbatches=1`."
            )
        if key in self._stale:
            return PipelineError(
                f"`{name}` of `{self._root}` is changed by code after the blocks of `{self._split.blocks}` and read"
                f" {where}, on a pipeline stage that does not have the new value: {_SENT} are sent. Keep it as one of"
                " these (`.detach()`), or read it after the blocks."
            )
        return PipelineError(
            f"`{name}` of `{self._root}` is changed by code after the blocks of `{self._split.blocks}` and read"
            f" {where} in the next micro-batch, which a pipeline begins before the end of the one before. Read it"
            " after the blocks, assign it in code before them, or use `Pipeline(microbatches=1,"
            " schedule='gpipe')`."
        )
