"""The layer: a mixture of experts with DeepSpeed's arguments."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import get_args

import torch
from torch import Tensor, nn

from lightning_zero.moe.dispatch import dispatch
from lightning_zero.moe.experts import Experts
from lightning_zero.moe.routing import NoisyGatePolicy, Router, ScoreFunction, capacity_of

__all__ = ["MoE"]


class MoE(nn.Module):
    """A mixture of experts: each token is computed by ``k`` of ``num_experts`` modules.

    The arguments are those of ``deepspeed.moe.layer.MoE``; ``docs/experts.md`` has a table of what differs.

    Args:
        hidden_size: Size of a token, of the input and of the output.
        expert: One module, of which every expert starts as a copy, or ``num_experts`` modules of one structure. Gets
            ``(rows, hidden_size)`` and returns that shape.
        num_experts: Number of experts, on all ranks together.
        ep_size: 1; the option ``expert_parallel`` of the strategy distributes experts over ranks.
        k: Experts per token.
        capacity_factor: With ``drop_tokens``: an expert takes at most this times its even share of tokens in training.
        eval_capacity_factor: The same in evaluation.
        min_capacity: With ``drop_tokens``: the least number of tokens that an expert takes if it gets them.
        use_residual: Compute every token by a further module too, and mix both results by learned coefficients
            (Residual MoE, arXiv:2201.05596).
        noisy_gate_policy: In training ``"RSample"`` adds Gumbel noise to the logits that choose experts, and
            ``"Jitter"`` multiplies the router's input by random numbers within 1 %.
        drop_tokens: Whether tokens above the capacity of an expert are dropped by it.
        use_rts: With ``drop_tokens`` and ``k=1``: drop random tokens in training, in the place of the last ones.
        use_tutel: Refused: the dispatch is the same with and without Tutel.
        enable_expert_tensor_parallelism: Refused: tensor parallelism is an option of the strategy.
        top2_2nd_expert_sampling: With ``k=2``: draw the second expert in training by Gumbel noise.
        shared_expert: A module that computes every token as well; its result is added.
        score_function: ``"softmax"`` or ``"sigmoid"`` of the router's logits.
        z_loss_factor: Adds this times the mean squared log-sum-exp of the logits to the auxiliary loss.
        bias_balancing: Choose experts by scores plus a bias, which ``balance_experts`` updates (arXiv:2408.15664).
        pad_to_tokens: With ``drop_tokens`` and divided experts: ranks send as many rows to each expert as it takes of
            this number of tokens, so that no host waits for a device. The most tokens that a rank has in a call.

    Raises:
        TypeError: ``pad_to_tokens`` is no integer.
        ValueError: An argument is out of range, or does not exist here.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module | Sequence[nn.Module],
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: NoisyGatePolicy | None = None,
        drop_tokens: bool = False,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = False,
        *,
        shared_expert: nn.Module | None = None,
        score_function: ScoreFunction = "softmax",
        z_loss_factor: float = 0.0,
        bias_balancing: bool = False,
        pad_to_tokens: int | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(num_experts, ep_size, k)
        _check_padding(pad_to_tokens, drop_tokens)
        _check_capacities(capacity_factor, eval_capacity_factor, min_capacity)
        _check_choices(noisy_gate_policy, score_function, z_loss_factor)
        _refuse("use_tutel", use_tutel, "the dispatch is one permutation and grouped products in any case")
        _refuse(
            "enable_expert_tensor_parallelism",
            enable_expert_tensor_parallelism,
            "experts are not cut over tensor ranks",
        )
        modules = _modules(expert, num_experts)
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.k = k
        self.drop_tokens = drop_tokens
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor
        self.min_capacity = min_capacity
        self.pad_to_tokens = pad_to_tokens
        self.router = Router(
            hidden_size,
            num_experts,
            k=k,
            noisy_gate_policy=noisy_gate_policy,
            use_rts=use_rts and drop_tokens,
            top2_2nd_expert_sampling=top2_2nd_expert_sampling,
            score_function=score_function,
            z_loss_factor=z_loss_factor,
            is_balanced=bias_balancing,
        )
        self.experts = Experts(modules, hidden_size)
        self.shared_expert = shared_expert
        self.mlp = copy.deepcopy(modules[0]) if use_residual else None
        self.coefficient = nn.Linear(hidden_size, 2) if use_residual else None

    def extra_repr(self) -> str:
        """Show the sizes."""
        return f"hidden_size={self.hidden_size}, num_experts={self.num_experts}, k={self.k}"

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Compute tokens.

        Args:
            hidden_states: ``(..., hidden_size)``; no tokens are fine.
            used_token: ``(...)`` bool or 0 and 1: the experts do not compute other tokens; None: all are used.

        Returns:
            The output, with the shape and dtype of the input (the dtype of the experts under autocast); the auxiliary
            loss, ``()`` fp32, not yet multiplied by any factor of yours; the number of tokens that chose each expert
            here, before any was dropped, ``(num_experts,)`` int64.

        Raises:
            ValueError: Tokens have another size.
        """
        if hidden_states.shape[-1:] != (self.hidden_size,):
            raise ValueError(
                f"`hidden_states` must have shape (..., {self.hidden_size}) for `hidden_size={self.hidden_size}`, got"
                f" {tuple(hidden_states.shape)}."
            )
        tokens = hidden_states.reshape(-1, self.hidden_size)
        routing = self.router(tokens, used_token)
        experts = partial(self._run_experts, hidden_states)
        output, beside = dispatch(tokens, routing, experts, capacity=self._capacity(len(tokens)))
        return self._sum(output.view(hidden_states.shape), beside), routing.aux_loss, routing.counts

    def _run_experts(self, hidden_states: Tensor, rows: Tensor, offsets: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the results of experts, and those of ``_compute_beside``: it runs while rows travel."""
        if getattr(self.experts, "ranks", None) is None:
            return self.experts(rows, offsets), self._compute_beside(hidden_states)
        room = self._room(hidden_states.numel() // self.hidden_size)
        if self.mlp is None and self.shared_expert is None:
            return self.experts(rows, offsets, room=room), ()
        if torch.is_grad_enabled() and not hidden_states.requires_grad:
            # Results of a reentrant checkpoint have no graph if its inputs have none.
            return self.experts(rows, offsets, room=room), self._compute_beside(hidden_states)
        meanwhile = self._compute_beside
        results, *found = self.experts(rows, offsets, room=room, meanwhile=meanwhile, beside=hidden_states)
        return results, found

    def _compute_beside(self, hidden_states: Tensor) -> list[Tensor]:
        """Return the results of modules that compute every token: coefficients and residual expert, shared expert."""
        found = []
        if self.mlp is not None and self.coefficient is not None:
            found += [self.coefficient(hidden_states).softmax(-1), _first(self.mlp(hidden_states))]
        if self.shared_expert is not None:
            found.append(_first(self.shared_expert(hidden_states)))
        return found

    def _sum(self, output: Tensor, beside: Sequence[Tensor]) -> Tensor:
        """Return the results of experts together with those of ``_compute_beside``."""
        if self.mlp is not None:
            shares, residual, *beside = beside
            output = output * shares[..., :1] + residual * shares[..., 1:]
        for shared in beside:
            output = output + shared
        return output

    def _capacity(self, num_tokens: int) -> int | None:
        if not self.drop_tokens:
            return None
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        return capacity_of(num_tokens, self.num_experts, k=self.k, factor=factor, min_capacity=self.min_capacity)

    def _room(self, num_tokens: int) -> int | None:
        """Return the rows that this rank sends to each expert, if their number is fixed.

        Raises:
            ValueError: It has more tokens than it was said to have at most.
        """
        if self.pad_to_tokens is None:
            return None
        if num_tokens > self.pad_to_tokens:
            raise ValueError(
                f"`pad_to_tokens={self.pad_to_tokens}` of a mixture of experts, but this rank has {num_tokens} tokens:"
                f" there is no room for them in what the ranks exchange. Use `pad_to_tokens={num_tokens}` or more, the"
                " same on all ranks, or leave it out: the host waits once per layer then."
            )
        return self._capacity(self.pad_to_tokens)


def _first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Return the tensor of a result, which may be a tuple as in DeepSpeed, where a bias follows."""
    return result[0] if isinstance(result, tuple) else result


def _modules(expert: nn.Module | Sequence[nn.Module], num_experts: int) -> list[nn.Module]:
    if isinstance(expert, nn.Module) and not isinstance(expert, nn.ModuleList):
        return [expert] * num_experts
    modules = list(expert)
    if len(modules) != num_experts:
        raise ValueError(
            f"`expert` has {len(modules)} modules for `num_experts={num_experts}`. Give one per expert, or a single"
            " module, of which every expert is a copy."
        )
    return modules


# -- Checks ------------------------------------------------------------------------------------------------------------


def _check_sizes(num_experts: int, ep_size: int, k: int) -> None:
    if num_experts < 1:
        raise ValueError(f"`num_experts={num_experts}` must be 1 or more.")
    if ep_size < 1 or num_experts % ep_size:
        raise ValueError(
            f"`num_experts={num_experts}` does not divide by `ep_size={ep_size}`. Every rank of a group has as many"
            " experts; use a divisor of `num_experts`."
        )
    if ep_size != 1:
        raise ValueError(
            f"`ep_size={ep_size}`: expert parallelism is an option of the strategy, for all layers. Use `ep_size=1` and"
            f" `ZeroStrategy(expert_parallel={ep_size})`."
        )
    if not 1 <= k <= num_experts:
        raise ValueError(
            f"`k={k}` is out of range: a token uses 1 to `num_experts={num_experts}` experts. Lower `k`, or raise"
            " `num_experts`."
        )


def _check_capacities(factor: float, eval_factor: float, min_capacity: int) -> None:
    for name, value in {"capacity_factor": factor, "eval_capacity_factor": eval_factor}.items():
        if not 0.0 < value < float("inf"):
            raise ValueError(
                f"`{name}={value}` must be a number above 0. For no dropping at all use `drop_tokens=False`."
            )
    if min_capacity < 0:
        raise ValueError(f"`min_capacity={min_capacity}` must be 0 or more.")


def _check_padding(pad_to_tokens: int | None, drop_tokens: bool) -> None:
    if pad_to_tokens is None:
        return
    if type(pad_to_tokens) is not int:
        raise TypeError(f"`pad_to_tokens={pad_to_tokens!r}` must be a number of tokens, such as 4096, or None.")
    if pad_to_tokens < 1:
        raise ValueError(f"`pad_to_tokens={pad_to_tokens}` must be a number of tokens, 1 or more, or None.")
    if not drop_tokens:
        raise ValueError(
            f"`pad_to_tokens={pad_to_tokens}` needs `drop_tokens=True`: without a capacity an expert may get all tokens"
            " of a rank, and every expert would need room for them. Set a capacity, or leave `pad_to_tokens` out."
        )


def _check_choices(noise: str | None, score_function: str, z_loss_factor: float) -> None:
    if noise is not None and noise not in get_args(NoisyGatePolicy):
        raise ValueError(f"`noisy_gate_policy={noise!r}` is not known. Use 'RSample', 'Jitter' or None.")
    if score_function not in get_args(ScoreFunction):
        raise ValueError(f"`score_function={score_function!r}` is not known. Use 'softmax' or 'sigmoid'.")
    if not z_loss_factor >= 0.0:
        raise ValueError(f"`z_loss_factor={z_loss_factor}` must be 0 or more.")


def _refuse(name: str, value: bool, reason: str) -> None:
    if value:
        raise ValueError(f"`{name}=True` does not exist here, because {reason}. Leave it out.")
