"""Put this package's ops into a model of Hugging Face's: what matches, what changes, and the way back.

Note [What a patch is]
    A module's ``forward`` is replaced on the instance; its class, parameters, names and hooks stay, so units,
    checkpoints and optimizers notice nothing. A replacement is an object of this file that holds the module: it pickles
    and copies with the model. Classes are matched exactly, because a subclass, or a class of that name from elsewhere,
    may compute something else.

    * ``rms_norm``, ``layer_norm``: the norm's ``forward``.
    * ``swiglu``, ``geglu``: the ``forward`` of an MLP with ``gate_proj``, ``up_proj``, ``down_proj`` and such an
      activation.
    * ``rotary``: attention runs its own ``forward`` with another function in the place of ``apply_rotary_pos_emb``.
    * ``cross_entropy``: where the model gets ``labels`` in training, its head computes the loss inside of its own
      ``forward`` (so hooks on the head, which may gather its weight, run as before) and ``logits`` of the output are
      None. In evaluation nothing changes.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero_ops.cross_entropy import linear_cross_entropy
from lightning_zero_ops.gated import geglu, swiglu
from lightning_zero_ops.norms import layer_norm, rms_norm
from lightning_zero_ops.rotary import apply_rotary

__all__ = ["Change", "Patch", "patch_model"]

_FAMILIES = ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3")
_GEMMAS = ("Gemma", "Gemma2")
_HEADED = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "GemmaForCausalLM",
    "GPT2LMHeadModel",
)
_ROTARY = "apply_rotary_pos_emb"
# Of `nn.RMSNorm(eps=None)`: PyTorch takes the epsilon of the dtype it computes in, which is fp32 for 16 bits too.
_FP32_EPS = torch.finfo(torch.float32).eps


def _is_of_transformers(module: nn.Module, names: Sequence[str]) -> bool:
    kind = type(module)
    return kind.__name__ in names and kind.__module__.startswith("transformers.models.")


class _Forward:
    """A forward that stands in for the one of a module's class."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the class's forward: trainers and generation read it."""
        return inspect.signature(self.original)

    @property
    def original(self) -> Callable[..., Any]:
        """The forward of the class, bound to the module."""
        return types.MethodType(type(self.module).forward, self.module)

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        """Whether this class stands in for the forward of ``module``."""
        raise NotImplementedError


# -- Norms -------------------------------------------------------------------------------------------------------------


class _RMSNorm(_Forward):
    def __call__(self, hidden_states: Tensor) -> Tensor:
        norm: Any = self.module
        return rms_norm(hidden_states, norm.weight, eps=norm.variance_epsilon)

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return _is_of_transformers(module, [f"{family}RMSNorm" for family in _FAMILIES])


class _TorchRMSNorm(_Forward):
    def __call__(self, x: Tensor) -> Tensor:
        norm: Any = self.module
        return rms_norm(x, norm.weight, eps=_FP32_EPS if norm.eps is None else norm.eps)

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return type(module) is nn.RMSNorm and len(module.normalized_shape) == 1 and module.weight is not None


class _GemmaRMSNorm(_Forward):
    def __call__(self, x: Tensor) -> Tensor:
        norm: Any = self.module
        return rms_norm(x, norm.weight, eps=norm.eps, offset=1.0).type_as(x)

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return _is_of_transformers(module, [f"{family}RMSNorm" for family in _GEMMAS])


class _LayerNorm(_Forward):
    def __call__(self, input: Tensor) -> Tensor:
        norm: Any = self.module
        return layer_norm(input, norm.weight, norm.bias, eps=norm.eps)

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return type(module) is nn.LayerNorm and len(module.normalized_shape) == 1 and module.weight is not None


# -- MLPs --------------------------------------------------------------------------------------------------------------


class _GatedMLP(_Forward):
    activations: dict[str, Callable[[Tensor, Tensor], Tensor]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        mlp: Any = self.module
        gated = self.activations[type(mlp.act_fn).__name__]
        down: Tensor = mlp.down_proj(gated(mlp.gate_proj(x), mlp.up_proj(x)))
        return down

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        is_known = _is_of_transformers(module, [f"{family}MLP" for family in (*_FAMILIES, *_GEMMAS)])
        return is_known and type(module.act_fn).__name__ in cls.activations


class _SwiGLU(_GatedMLP):
    activations = {"SiLUActivation": swiglu, "SiLU": swiglu}


def _geglu_erf(gate: Tensor, up: Tensor) -> Tensor:
    return geglu(gate, up, approximate="none")


class _GeGLU(_GatedMLP):
    activations = {
        "GELUActivation": _geglu_erf,
        "GELUTanh": geglu,
        "PytorchGELUTanh": geglu,
        "NewGELUActivation": geglu,
    }


# -- Attention ---------------------------------------------------------------------------------------------------------


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Stand in for ``apply_rotary_pos_emb``."""
    if unsqueeze_dim == 1:
        return apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
    return apply_rotary(q.transpose(1, 2), cos, sin).transpose(1, 2), apply_rotary(
        k.transpose(1, 2), cos, sin
    ).transpose(1, 2)


class _Attention(_Forward):
    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._function = self._with_rotary()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self.module, *args, **kwargs)

    def _with_rotary(self) -> types.FunctionType:
        """Return the class's forward with another function under the name ``apply_rotary_pos_emb``."""
        function = type(self.module).forward
        assert isinstance(function, types.FunctionType)
        names = {**function.__globals__, _ROTARY: _rotate}
        copy = types.FunctionType(
            function.__code__, names, function.__name__, function.__defaults__, function.__closure__
        )
        copy.__kwdefaults__ = function.__kwdefaults__
        return copy

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.module = state["module"]
        self._function = self._with_rotary()

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        function = type(module).forward
        return (
            _is_of_transformers(module, [f"{family}Attention" for family in (*_FAMILIES, *_GEMMAS)])
            and isinstance(function, types.FunctionType)
            and not hasattr(function, "__wrapped__")
            and _ROTARY in function.__code__.co_names
        )


# -- Loss --------------------------------------------------------------------------------------------------------------


class _Head(_Forward):
    def __call__(self, input: Tensor, target: Tensor | None = None, **options: Any) -> Tensor:
        if target is None:
            logits: Tensor = self.original(input)
            return logits
        head: Any = self.module
        return linear_cross_entropy(input, head.weight, target, bias=head.bias, **options)


class _CausalLM(_Forward):
    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        # Names of the arguments that may come by position.
        self._names = tuple(self.__signature__.parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self.module
        kwargs.update(zip(self._names, args, strict=False))
        if kwargs.get("labels") is None or not model.training or "logits_to_keep" in kwargs:
            return self.original(**kwargs)
        return self._with_loss(model, **kwargs)

    def _with_loss(
        self,
        model: Any,
        labels: Tensor,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Do what the class's forward does, with the head's loss in the place of its logits."""
        from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions, CausalLMOutputWithPast

        outputs = model.base_model(return_dict=True, **kwargs)
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        hidden = outputs.last_hidden_state
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = model.lm_head(hidden, shift_labels.to(hidden.device), ignore_index=ignore_index, reduction=reduction)
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        loss = loss if num_items_in_batch is None else loss / num_items_in_batch
        kept = {name: outputs[name] for name in ("past_key_values", "hidden_states", "attentions") if name in outputs}
        result: Any
        if hasattr(outputs, "cross_attentions"):
            result = CausalLMOutputWithCrossAttentions(loss=loss, cross_attentions=outputs.cross_attentions, **kept)
        else:
            result = CausalLMOutputWithPast(loss=loss, **kept)
        is_dict = model.config.return_dict if return_dict is None else return_dict
        return result if is_dict else result.to_tuple()

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return (
            _is_of_transformers(module, _HEADED)
            and type(getattr(module, "lm_head", None)) is nn.Linear
            and getattr(getattr(module, "loss_function", None), "__name__", "") == "ForCausalLMLoss"
        )


# -- Patching ----------------------------------------------------------------------------------------------------------

_OPS: dict[str, tuple[type[_Forward], ...]] = {
    "rms_norm": (_RMSNorm, _TorchRMSNorm, _GemmaRMSNorm),
    "layer_norm": (_LayerNorm,),
    "swiglu": (_SwiGLU,),
    "geglu": (_GeGLU,),
    "rotary": (_Attention,),
    "cross_entropy": (_CausalLM,),
}


@dataclass(frozen=True)
class Change:
    """One module whose forward was replaced: by which op, the module's name in the model, its class."""

    op: str
    module: str
    class_name: str


@dataclass(frozen=True)
class Patch:
    """What ``patch_model`` changed. ``str`` of it is a table; ``undo`` takes it back."""

    changes: tuple[Change, ...]
    model: nn.Module = field(repr=False)

    def __str__(self) -> str:
        """Return one line per op and class: how many modules, and the first of them."""
        lines = []
        for op, class_name in dict.fromkeys((change.op, change.class_name) for change in self.changes):
            names = [change.module for change in self.changes if (change.op, change.class_name) == (op, class_name)]
            lines.append(f"{op}: {len(names)} x {class_name} ({names[0] or 'the model'}{', ...' if names[1:] else ''})")
        return "\n".join(lines) or "nothing"

    def undo(self) -> None:
        """Give the modules their own forwards back. A second call does nothing."""
        for change in self.changes:
            vars(self.model.get_submodule(change.module)).pop("forward", None)


def patch_model(model: nn.Module, ops: Sequence[str] | None = None) -> Patch:
    """Let a Llama- or GPT-2-like model of Hugging Face's compute with the ops of this package.

    Call it on every rank, before or after ``shard``. Results and gradients are those of the model up to rounding;
    16-bit ones are rounded less often.

    Args:
        model: Changed in place, on the instance: other models of its class stay as they are.
        ops: Names out of ``rms_norm``, ``layer_norm``, ``swiglu``, ``geglu``, ``rotary``, ``cross_entropy``. None: all
            that match something.

    Returns:
        What was changed, with ``undo``.

    Raises:
        ValueError: An unknown name, a name that matches no module of this model, or a module with another forward on
            its instance (of an earlier patch). Nothing is changed then.
    """
    unknown = [op for op in ops or () if op not in _OPS]
    if unknown:
        raise ValueError(f"`ops` contains {unknown}. Known are {', '.join(_OPS)}.")
    found = [
        (Change(op, name, type(module).__name__), module, forward)
        for op in dict.fromkeys(_OPS if ops is None else ops)
        for name, module, forward in _matches(model, op)
    ]
    missing = sorted(set(ops or ()) - {change.op for change, _, _ in found})
    if missing:
        raise ValueError(
            f"`ops` contains {missing}, which match no module of {type(model).__name__}. Leave them out; with"
            " `ops=None` all that match are taken."
        )
    taken = [change.module for change, module, _ in found if "forward" in vars(module)]
    if taken:
        raise ValueError(
            f"These modules already have a forward of their own on the instance: {taken}."
            " Call `undo` of the earlier patch first."
        )
    for _, module, forward in found:
        vars(module)["forward"] = forward(module)
    return Patch(tuple(change for change, _, _ in found), model)


def _matches(model: nn.Module, op: str) -> Iterator[tuple[str, nn.Module, type[_Forward]]]:
    for name, module in model.named_modules():
        for forward in _OPS[op]:
            if not forward.matches(module):
                continue
            yield name, module, forward
            if forward is _CausalLM:
                yield f"{name}.lm_head".lstrip("."), module.get_submodule("lm_head"), _Head
