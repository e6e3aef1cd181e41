"""The loss under int8 moments, by how codes are rounded (ADR 0024): ``python -m benchmarks.moments``.

A GPT of width 64 with 2 blocks learns the bytes of this project's sources for 200 steps of AdamW; the mean loss of the
last 20 is compared with that of fp32 moments. A second moment above zero is stored as zero by no rule but ``exact``,
which keeps fp32. About a minute.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.models import GPT, GPTShape
from lightning_zero_ops import adamw_int8

__all__ = ["RULES", "train"]

SHAPE = GPTShape(width=64, depth=2, vocabulary=256, context=64)
BATCH = 8
RATES = (1e-3, 3e-3)
COUNTED = 20  # steps at the end whose losses are averaged

_Chance = Callable[[Tensor], Tensor | int]
_ONE = 1 << 16  # of 2^16 chances the share that takes the upper code is its nearness


def _nearest(values: Tensor) -> int:
    return _ONE // 2


def _away(values: Tensor) -> int:
    return _ONE - 1


def _by_chance(values: Tensor) -> Tensor:
    return torch.randint(_ONE, values.shape, dtype=torch.int32)


# How codes of the first and of the second moment are rounded.
RULES: dict[str, tuple[_Chance, _Chance] | None] = {
    "exact": None,
    "second away from zero": (_nearest, _away),
    "both to the nearest": (_nearest, _nearest),
    "second by chance": (_nearest, _by_chance),
    "both by chance": (_by_chance, _by_chance),
}


class _Moments:
    """Two moments of one parameter, rounded between steps as a rule says."""

    def __init__(self, param: nn.Parameter, rule: tuple[_Chance, _Chance] | None) -> None:
        self._param = param
        self._rule = rule
        padded = -(-param.numel() // adamw_int8.BLOCK) * adamw_int8.BLOCK
        self._first, self._second = torch.zeros(padded), torch.zeros(padded)

    def step(self, number: int, lr: float) -> None:
        """Step the parameter by AdamW."""
        numel = self._param.numel()
        assert self._param.grad is not None
        torch._fused_adamw_(
            [self._param.detach().view(-1)], [self._param.grad.reshape(-1)], [self._first[:numel]],
            [self._second[:numel]], [], [torch.full((), float(number))], lr=lr, beta1=0.9, beta2=0.999,
            weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        if self._rule is not None:
            first, second = self._rule
            self._first = adamw_int8._decode(*adamw_int8._encode(self._first, first(self._first)))
            self._second = adamw_int8._decode_root(
                *adamw_int8._encode_root(self._second.sqrt(), second(self._second))
            ).square_()


def train(rule: str, lr: float, num_steps: int) -> float:
    """Return the mean loss of the last steps."""
    torch.manual_seed(0)
    model = GPT(SHAPE)
    moments = [_Moments(param, RULES[rule]) for param in model.parameters()]
    text, batches = _sources(), torch.Generator().manual_seed(0)
    losses = []
    for number in range(1, num_steps + 1):
        starts = torch.randint(len(text) - SHAPE.context, (BATCH,), generator=batches)
        loss = model(torch.stack([text[start : start + SHAPE.context + 1] for start in starts.tolist()]))
        model.zero_grad()
        loss.backward()
        for one in moments:
            one.step(number, lr)
        losses.append(loss.item())
    return sum(losses[-COUNTED:]) / len(losses[-COUNTED:])


def _sources() -> Tensor:
    """Return the bytes of the package, (n,) int64."""
    files = sorted((Path(__file__).parents[1] / "lightning_zero").rglob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def main() -> None:
    """Print one line per rule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    print(f"{'rounding':<24}" + "".join(f"  lr {rate:g}" for rate in RATES))
    for rule in RULES:
        print(f"{rule:<24}" + "".join(f"{train(rule, rate, options.steps):10.4f}" for rate in RATES), flush=True)


if __name__ == "__main__":
    main()
