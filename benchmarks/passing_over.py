"""The work of a pipeline stage's host besides computing: ``python -m benchmarks.passing_over``.

The last of four stages runs the forward of a micro-batch of 512 tokens in one process. Its blocks share their weights,
and so do those of other stages, which are passed over. ``host`` is all time of the run, and of the survey that tells
the denominators of its losses, outside of the modules that compute; its bound is 5 % of what the stage's modules take
for forward and backward. Seconds are those of this process's processor, which other processes change little.
"""

from __future__ import annotations

import argparse
import copy
import gc
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models import GPT, GPTShape
from benchmarks.table import Row, append, heading
from benchmarks.turns import named_device, percentiles
from lightning_zero.blocks import repeated_blocks
from lightning_zero.config import ActivationCheckpointing, Pipeline
from lightning_zero.parallel.activation.checkpointing import checkpoint_activations
from lightning_zero.parallel.pipeline.stages.sources import is_fake
from lightning_zero.parallel.pipeline.stages.split import split_module
from lightning_zero.parallel.pipeline.tracing.loss_normalization import count_elements
from lightning_zero.parallel.pipeline.tracing.module_interception import Message, ModuleInterception

__all__ = ["BOUND", "FAMILIES", "KINDS", "main", "measure"]

_Step = Callable[[Any, Tensor], Tensor]

BOUND = 0.05
WIDTH = 1024
TOKENS = 512
STAGES = 4
VOCABULARY = 1024


def _gpt(layers: int) -> tuple[nn.Module, _Step]:
    model = GPT(GPTShape(width=WIDTH, depth=1, vocabulary=VOCABULARY, context=TOKENS))
    model.blocks = _repeated(model.blocks[0], layers)
    return model, lambda model, tokens: model(tokens)


def _llama(layers: int) -> tuple[nn.Module, _Step]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=1, num_attention_heads=16,
        num_key_value_heads=16, vocab_size=VOCABULARY,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    model.model.layers = _repeated(model.model.layers[0], layers)
    config.num_hidden_layers = layers
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = number
    return model, lambda model, tokens: model(input_ids=tokens[:, :-1], labels=tokens[:, 1:]).loss


KINDS = ("plain", "checkpointed", "hooked")  # without, with activation checkpointing, with forward hooks on blocks
FAMILIES = {"gpt": _gpt, "llama": _llama}


def _repeated(block: nn.Module, times: int) -> nn.ModuleList:
    """Return blocks of their own that share their parameters."""
    return nn.ModuleList(copy.deepcopy(block, {id(one): one for one in block.parameters()}) for _ in range(times))


class _LastStage:
    """The last stage of a pipeline, alone."""

    def __init__(self, family: str, layers: int, kind: str) -> None:
        self._model, self._forward = FAMILIES[family](layers)
        checkpoint_activations(self._model, ActivationCheckpointing() if kind == "checkpointed" else None)
        for _, block in repeated_blocks(self._model) if kind == "hooked" else ():
            block.register_forward_hook(lambda module, args, output: None)
        split = split_module(self._model, Pipeline(stages=STAGES))
        self._interception = ModuleInterception(self._model, split, lambda: None)
        self._chunk = split.num_chunks - 1
        self._is_computing, self._computing_s = False, 0.0
        modules = [self._model.get_submodule(place.name) for place in split.places if place.chunk == self._chunk]
        classes = {cls: type(cls.__name__, (cls,), {"forward": self._timed(cls.forward)}) for cls in map(type, modules)}
        for module in modules:
            module.__class__ = classes[type(module)]
        leaves, _ = self._interception.arguments(lambda: self._step(0), self._chunk, ())
        fakes = [(number, leaf) for number, leaf in enumerate(leaves) if is_fake(leaf)]
        self._messages = [Message(number, tuple(leaf.shape), leaf.dtype, True) for number, leaf in fakes]

    def _timed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_computing or any(map(is_fake, args)):  # a call that is passed over is the host's
                return forward(*args, **kwargs)
            self._is_computing, started = True, time.process_time()
            try:  # a recomputation ends early, by an exception
                return forward(*args, **kwargs)
            finally:
                self._is_computing, self._computing_s = False, self._computing_s + time.process_time() - started

        return call

    def _step(self, number: int) -> Tensor:
        tokens = torch.randint(VOCABULARY, (1, TOKENS + 1), generator=torch.Generator().manual_seed(number))
        return self._forward(self._model, tokens)

    def microbatch(self, number: int) -> tuple[float, float]:
        """Run one; return the seconds of the host, and those of computing forward and backward."""
        self._computing_s = 0.0
        arrived = [torch.randn(one.shape, requires_grad=True) for one in self._messages]
        gc.disable()  # garbage of others would count
        started = time.process_time()
        with torch.no_grad():
            count_elements(lambda: self._interception.survey(lambda: self._step(number)))
        _, loss = self._interception.run(
            lambda: self._step(number),
            self._chunk,
            expected=self._messages,
            receive=lambda: arrived,
            send=lambda found: None,
        )
        host_s = time.process_time() - started - self._computing_s
        gc.enable()
        started = time.process_time()
        loss.backward()
        return host_s, self._computing_s + time.process_time() - started


def measure(family: str, layers: int, repeats: int, kind: str = "plain") -> Row:
    """Return the row of a model with ``layers`` blocks."""
    stage = _LastStage(family, layers, kind)
    found = [stage.microbatch(number) for number in range(repeats + 2)][2:]  # shapes are learned in the first ones
    ratio = median(host / computing for host, computing in found)
    return Row(
        what="passing_over", variant=f"{family}-{layers}-{kind}/last of {STAGES}",
        shape=f"{WIDTH}-{TOKENS}tok", dtype="fp32", world=1, metric="host/compute", unit="ms", ratio=f"{ratio:.4f}",
        **percentiles([1e3 * host for host, _ in found]), bound=f"{BOUND}",
        verdict="ok" if ratio <= BOUND else "MISSED", **named_device(),
    )  # fmt: skip


def main() -> None:
    """Measure from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, nargs="+", default=list(FAMILIES))
    parser.add_argument("--layers", type=int, nargs="+", default=[16, 80])
    parser.add_argument("--kind", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-csv", action="store_true", help="print only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(heading(), flush=True)
    rows = []
    for family in options.family:
        for layers in options.layers:
            for kind in options.kind:
                rows.append(measure(family, layers, options.repeats, kind))
                print(rows[-1], flush=True)
    if not options.no_csv:
        append(rows)
    raise SystemExit(any(row.verdict == "MISSED" for row in rows))


if __name__ == "__main__":
    main()
