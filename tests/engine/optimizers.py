"""Optimizers as other packages write them: right on segments, and not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = [
    "RIGHT",
    "WRONG",
    "Clipped",
    "Lamb",
    "Lookahead",
    "Momentum",
    "Prodigy",
    "ProdigyOpt",
    "ScheduleFree",
    "Several",
    "SometimesFactored",
    "Unfinished",
]


class Momentum(Optimizer):
    """SGD with momentum, in plain words; its subclasses change the direction of a parameter's step."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9, **options: Any) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(self.direction(group, param, self._average(group, param)), alpha=group["lr"])
        return loss

    def _average(self, group: dict[str, Any], param: Tensor) -> Tensor:
        state = self.state[param]
        if "average" not in state:
            state["average"] = torch.zeros_like(param)
        return state["average"].mul_(group["momentum"]).add_(param.grad, alpha=1 - group["momentum"])

    def direction(self, group: dict[str, Any], param: Tensor, average: Tensor) -> Tensor:
        return average


class Lion(Momentum):
    def direction(self, group: dict[str, Any], param: Tensor, average: Tensor) -> Tensor:
        return average.sign()


class Adan(Momentum):
    """Uses the difference to the gradient before."""

    def direction(self, group: dict[str, Any], param: Tensor, average: Tensor) -> Tensor:
        state = self.state[param]
        difference = param.grad - state.get("before", param.grad)
        state["before"] = param.grad.clone()
        return (average + 0.9 * difference) / (average.square() + difference.square()).sqrt().add(1e-8)


class Sophia(Momentum):
    """Divides by an estimate of the curvature that is renewed every third step, and clamps."""

    def direction(self, group: dict[str, Any], param: Tensor, average: Tensor) -> Tensor:
        state = self.state[param]
        state["step"] = state.get("step", 0) + 1
        if state["step"] % 3 == 1:
            state["hessian"] = 0.9 * state.get("hessian", 0.0) + param.grad.square()
        return (average / state["hessian"].clamp(min=1e-12)).clamp(-1, 1)


class CountsCalls(Momentum):
    """Has one counter for all parameters, which advances once in a call."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.calls = [0]

    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        self.calls[0] += 1
        return super().step(closure)

    def direction(self, group: dict[str, Any], param: Tensor, average: Tensor) -> Tensor:
        return average / self.calls[0]


class Lookahead(Optimizer):
    """Wraps an optimizer, has its groups, and goes back half the way every fifth step."""

    def __init__(self, base: Optimizer) -> None:
        self.base = base
        super().__init__(base.param_groups, {})
        self.param_groups = base.param_groups
        self.state: Any = defaultdict(dict)
        self.number = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
        loss = self.base.step(closure)
        self.number += 1
        for param in (param for group in self.param_groups for param in group["params"]):
            state = self.state[param]
            if "slow" not in state:
                state["slow"] = param.clone()
            elif self.number % 5 == 0:
                state["slow"].lerp_(param, 0.5)
                param.copy_(state["slow"])
        return loss


class ScheduleFree(Momentum):
    """Schedule-free SGD (arXiv:2405.15682): ``train`` and ``eval`` move the parameters."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9) -> None:
        super().__init__(params, lr, momentum, number=0, is_training=False)

    def train(self) -> None:
        self._move(True, lambda momentum: 1 - momentum)

    def eval(self) -> None:
        self._move(False, lambda momentum: 1 - 1 / momentum)

    @torch.no_grad()
    def _move(self, is_training: bool, weight: Callable[[float], float]) -> None:
        for group in self.param_groups:
            if group["is_training"] != is_training:
                for param in group["params"]:
                    if "z" in self.state[param]:
                        param.data.lerp_(self.state[param]["z"], weight(group["momentum"]))
            group["is_training"] = is_training

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        if not self.param_groups[0]["is_training"]:
            raise RuntimeError("call train() before step()")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["number"] += 1
            weight = 1 / group["number"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                z = self.state[param].setdefault("z", param.detach().clone())
                param.lerp_(z, weight)
                param.add_(param.grad, alpha=group["lr"] * (group["momentum"] * (1 - weight) - 1))
                z.sub_(param.grad, alpha=group["lr"])
        return loss


class Unfinished(Optimizer):
    """Does not call the constructor of ``Optimizer``."""

    def __init__(self, base: Optimizer) -> None:
        self.base, self.state, self.defaults = base, base.state, base.defaults
        self.param_groups = base.param_groups

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.base.step()


# -- Not right on segments ---------------------------------------------------------------------------------------------


class Whitened(Momentum):
    def direction(self, group: dict[str, Any], param: Tensor, average: Tensor) -> Tensor:
        return param.grad / param.grad.norm()


class Lamb(Momentum):
    def direction(self, group: dict[str, Any], param: Tensor, average: Tensor) -> Tensor:
        return average * (param.norm() / average.norm().clamp(min=1e-12))


class Lars(Momentum):
    """Leaves vectors alone."""

    def direction(self, group: dict[str, Any], param: Tensor, average: Tensor) -> Tensor:
        return average if param.ndim < 2 else average * (param.norm() / (average + param).norm())


class SometimesFactored(Momentum):
    """Adafactor's second moment, for large matrices, where an option says so."""

    def __init__(self, params: Any, factored: bool = True, least: int = 128, **options: Any) -> None:
        super().__init__(params, factored=factored, least=least, **options)

    def direction(self, group: dict[str, Any], param: Tensor, average: Tensor) -> Tensor:
        square = average.square()
        if group["factored"] and param.ndim >= 2 and min(param.shape) >= group["least"]:
            square = square.mean(-1, keepdim=True) * square.mean(-2, keepdim=True) / square.mean()
        return average / square.sqrt().add(1e-8)


class OnlyMatrices(Momentum):
    """Like Muon: marked matrices are orthogonalised, a bit."""

    def direction(self, group: dict[str, Any], param: Tensor, average: Tensor) -> Tensor:
        if not getattr(param, "use_muon", False):
            return average
        x = average / average.norm()
        return 1.5 * x - 0.5 * x @ x.mT @ x


class ConvCentralized(Momentum):
    """Takes the mean of kernels' gradients away."""

    def direction(self, group: dict[str, Any], param: Tensor, average: Tensor) -> Tensor:
        return average - average.mean((1, 2, 3), keepdim=True) if param.ndim == 4 else average


class Blockwise(Momentum):
    """Like optimizers of 8 bits: large tensors have one scale for a block."""

    def direction(self, group: dict[str, Any], param: Tensor, average: Tensor) -> Tensor:
        if average.numel() < 4096:
            return average
        flat = average.reshape(-1)
        scale = torch.stack([block.abs().max() for block in flat.split(256)]).repeat_interleave(256)[: flat.numel()]
        return ((flat / scale * 127).round() * scale / 127).view_as(param)


class Prodigy(Momentum):
    """Sums over all parameters: element-wise on each of them alone."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        self.size = sum(float(param.grad.abs().sum()) for param in params)
        return super().step(closure)

    def direction(self, group: dict[str, Any], param: Tensor, average: Tensor) -> Tensor:
        return average / self.size


class ProdigyOpt(Optimizer):
    """Prodigy (arXiv:2306.06101) as in `prodigyopt`: a rate over all parameters, which grows from 1e-6."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "d": 1e-6, "d0": 1e-6, "d_max": 1e-6, "d_numerator": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        first, (beta1, beta2, beta3) = self.param_groups[0], (0.9, 0.999, 0.999**0.5)
        d, d0, rate = first["d"], first["d0"], first["d"] * first["lr"]
        numerator, denominator = first["d_numerator"] * beta3, 0.0
        params = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        for param in params:
            state = self.state[param]
            if not state:
                state.update({key: torch.zeros_like(param) for key in ("s", "exp_avg", "exp_avg_sq")})
                state["p0"] = param.detach().clone()
            moved = (state["p0"] - param).reshape(-1)
            numerator += (d / d0) * rate * torch.dot(param.grad.reshape(-1), moved).item()
            state["exp_avg"].mul_(beta1).add_(param.grad, alpha=d * (1 - beta1))
            state["exp_avg_sq"].mul_(beta2).addcmul_(param.grad, param.grad, value=d * d * (1 - beta2))
            denominator += state["s"].mul_(beta3).add_(param.grad, alpha=(d / d0) * rate).abs().sum().item()
        d_hat = numerator / denominator if denominator else d
        for group in self.param_groups:
            group["d_max"] = max(group["d_max"], d_hat)
            group.update(d_numerator=numerator, d=group["d_max"])
        for param in params:
            state = self.state[param]
            param.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(group["d"] * 1e-8), value=-rate)
        return loss


class Langevin(Momentum):
    def direction(self, group: dict[str, Any], param: Tensor, average: Tensor) -> Tensor:
        return average + 0.01 * torch.randn_like(param)


class Sam(Momentum):
    """Needs a closure, and the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        assert closure is not None, "needs a closure"
        with torch.enable_grad():
            closure()
        params = [param for group in self.param_groups for param in group["params"]]
        scale = 0.05 / torch.stack([param.grad.norm() for param in params]).norm()
        for param in params:
            self.state[param]["moved"] = param.grad * scale
            param.add_(self.state[param]["moved"])
        with torch.enable_grad():
            closure()
        for param in params:
            param.sub_(self.state[param]["moved"]).mul_(1 - scale)
        return super().step()


class SamWithClosure(Sam):
    """Steps plainly without a closure."""

    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        return Momentum.step(self) if closure is None else super().step(closure)


class Clipped(torch.optim.AdamW):
    """Reaches its parameters past its groups."""

    def __init__(self, params: Any, **options: Any) -> None:
        self.flat = list(params)
        super().__init__(self.flat, **options)

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_(self.flat, 1.0)
        return super().step(closure)


class AdamP(Momentum):
    """Projects directions that are nearly orthogonal to a matrix."""

    def direction(self, group: dict[str, Any], param: Tensor, average: Tensor) -> Tensor:
        flat, grad = param.reshape(len(param) if param.ndim else 1, -1), param.grad
        if param.ndim < 2 or nn.functional.cosine_similarity(flat, grad.view_as(flat)).abs().max() > 1e-9:
            return average
        return average - param * (param * average).sum()


class Guarded(Momentum):
    """Skips parameters by their gradients; ``check`` is true of all that a trial brings."""

    def __init__(self, params: Any, check: Callable[[Tensor], Any], **options: Any) -> None:
        super().__init__(params, **options)
        self.check = check

    def direction(self, group: dict[str, Any], param: Tensor, average: Tensor) -> Tensor:
        return average if self.check(param.grad) else torch.zeros_like(param)


class Several(Optimizer):
    """Wraps several optimizers, whose groups it has."""

    def __init__(self, *bases: Optimizer) -> None:
        self.bases = list(bases)
        super().__init__([group for base in bases for group in base.param_groups], {})
        self.param_groups = [group for base in bases for group in base.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for base in self.bases:
            base.step()


class StackedMaximum(Momentum):
    """Adamax as it was written once: the maximum of two stacked tensors."""

    def direction(self, group: dict[str, Any], param: Tensor, average: Tensor) -> Tensor:
        state = self.state[param]
        largest = state.setdefault("largest", torch.zeros_like(param))
        both = torch.cat([largest.mul_(0.999).unsqueeze(0), param.grad.abs().add_(1e-8).unsqueeze_(0)], 0)
        torch.max(both, 0, keepdim=False, out=(largest, largest.new_empty(0).long()))
        return average / largest


class Frozen(Momentum):
    """Nothing moves, whatever the learning rate is."""

    def direction(self, group: dict[str, Any], param: Tensor, average: Tensor) -> Tensor:
        return torch.zeros_like(param)


RIGHT: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "Momentum": Momentum,
    "Momentum-lr-0": lambda params: Momentum(params, lr=0.0),
    "Momentum-lr-tensor": lambda params: Momentum(params, lr=torch.tensor(0.0)),  # type: ignore[arg-type]
    "Lion": Lion,
    "Adan": Adan,
    "Sophia": Sophia,
    "CountsCalls": CountsCalls,
    "Lookahead": lambda params: Lookahead(torch.optim.AdamW(params, lr=0.0)),
    "ScheduleFree": ScheduleFree,
    "SometimesFactored-off": lambda params: SometimesFactored(params, factored=False),
    "maximize": lambda params: type("Own", (torch.optim.AdamW,), {})(params, maximize=True),
    "foreach": lambda params: type("Own", (torch.optim.AdamW,), {})(params, foreach=True),
    "Several": lambda params: Several(torch.optim.AdamW(params[::2]), torch.optim.AdamW(params[1::2])),
    "StackedMaximum": StackedMaximum,
}
WRONG: dict[str, tuple[Callable[[list[nn.Parameter]], Optimizer], str]] = {
    "Whitened": (Whitened, "other numbers"),
    "Lamb": (Lamb, "other numbers"),
    "Lamb-lr-0": (lambda params: Lamb(params, lr=0.0), "other numbers"),
    "Lamb-lr-tensor": (lambda params: Lamb(params, lr=torch.tensor(0.0)), "other numbers"),  # type: ignore[arg-type]
    "Lars": (Lars, "other numbers"),
    "SometimesFactored": (SometimesFactored, r"other numbers .* of shape \(300, 200\)"),
    "OnlyMatrices": (OnlyMatrices, "on shards .* raised RuntimeError: tensor.mT"),
    "ConvCentralized": (ConvCentralized, r"other numbers .* of shape \(3, 2, 3, 3\)"),
    "Blockwise": (Blockwise, "other numbers"),
    "Prodigy": (Prodigy, "other numbers"),
    "ProdigyOpt": (ProdigyOpt, "computes `dot`"),
    "Langevin": (Langevin, "other numbers"),
    "Sam": (Sam, "other numbers"),
    "SamWithClosure": (SamWithClosure, "other numbers"),
    "Lookahead-Lamb": (lambda params: Lookahead(Lamb(params)), "other numbers"),
    "differentiable": (
        lambda params: type("Own", (torch.optim.AdamW,), {})(params, differentiable=True),
        "its step raised RuntimeError: a leaf",
    ),
    "Several-Lamb": (lambda params: Several(Momentum(params[:1]), Lamb(params[1:])), "other numbers"),
    "Clipped": (Clipped, "other numbers"),
    "AdamP": (AdamP, "raised RuntimeError|computes `norm`"),
    "Guarded-finite": (lambda params: Guarded(params, lambda grad: grad.isfinite().all()), "its step computes `all`"),
    "Guarded-any": (lambda params: Guarded(params, lambda grad: grad.any()), "its step computes `any`"),
    "Guarded-item": (lambda params: Guarded(params, lambda grad: grad.reshape(-1)[-1:].sum() < 1e9), "`sum`"),
    "Frozen": (Frozen, "8 steps moved nothing with the options {.*'momentum': 0.9"),
}
