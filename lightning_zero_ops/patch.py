"""Put this package's ops into a model of Hugging Face's: matching modules, their replacement, and undoing it.

Note [Patches]
    A module's ``forward`` is replaced on the instance; its class, parameters, names and hooks stay, so units,
    checkpoints and optimizers notice nothing. A replacement is an object of this file that holds the module: it
    pickles and copies with the model. A class of Hugging Face's is matched by the code of its ``forward`` and of its
    methods that this calls, which must be that of Llama's, Gemma's, OLMo 2's, Phi 3's, T5's or GPT-2's: most families
    have copies of these. A subclass, a class of that name from elsewhere, or a function that somebody has put into a
    class or a module of Hugging Face's may compute something else.

    * ``rms_norm``, ``layer_norm``: the norm's ``forward``; results have the dtype that the module's own would have.
    * ``swiglu``, ``geglu``: the ``forward`` of a gated MLP with such an activation.
    * ``rotary``: attention runs its own ``forward`` with another function in the place of ``apply_rotary_pos_emb``.
    * ``cross_entropy``: where the model gets ``labels`` in training, its head computes the loss inside of its own
      ``forward`` (so that hooks of the engine, which may gather its weight, run as before) and ``logits`` of the output
      are None. In evaluation nothing changes.

Note [Decided per call]
    A model is edited after it was patched: its embeddings are resized, its head is replaced or wrapped, hooks are
    added, a loss is set, a method is replaced. So every call asks whether the module still matches; where
    it is not, and under forward-mode differentiation and transforms of ``torch.func``, the forward of the class runs.
    Hooks that are not the engine's would see a loss in the place of logits, so with them it runs too. A compiler asks
    while it traces, and guards the attributes of classes and functions that it read.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as global_hooks

from lightning_zero_ops.cross_entropy import linear_cross_entropy
from lightning_zero_ops.gated import geglu, swiglu
from lightning_zero_ops.norms import layer_norm, rms_norm
from lightning_zero_ops.registry import is_transformed
from lightning_zero_ops.rotary import apply_rotary

__all__ = ["Change", "Patch", "patch_model", "unpatch_model"]

_ROTARY = "apply_rotary_pos_emb"
_HALVES = "rotate_half"
# Of `nn.RMSNorm(eps=None)`: PyTorch takes the epsilon of the dtype it computes in, which is fp32 for 16 bits too.
_FP32_EPS = torch.finfo(torch.float32).eps


def _is_like(kind: type, *templates: tuple[str, str]) -> bool:
    """Whether a class is of Hugging Face's models and computes as one of these does, given by family and name."""
    if not kind.__module__.startswith("transformers.models."):
        return False
    return any(_same_methods(kind, _template(family, name)) for family, name in templates)


@cache
def _template(family: str, name: str) -> Any:
    """Return a class or a function of a family, or None where this version of transformers has none."""
    try:
        return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name, None)
    except ImportError:
        return None


def _methods(kind: type) -> dict[str, Any]:
    """Return the forward of a class and the methods that it calls on its module, by name."""
    found: dict[str, Any] = {}
    names = ["forward"]
    while names:
        name = names.pop()
        method = getattr(kind, name, None)
        if name in found or not isinstance(method, types.FunctionType) or method is vars(nn.Module).get(name):
            continue
        found[name] = method
        names += inspect.unwrap(method).__code__.co_names
    return found


def _has_own(module: nn.Module, methods: Iterable[str]) -> bool:
    """Whether somebody has put one of these methods, but for ``forward``, on the instance."""
    return any(name != "forward" and name in module.__dict__ for name in methods)


def _same_methods(kind: type, template: Any) -> bool:
    if template is None:
        return False
    found, expected = _methods(kind), _methods(template)
    return found.keys() == expected.keys() and all(_same_code(found[name], expected[name]) for name in expected)


def _same_code(function: Any, template: Any) -> bool:
    return (
        _is_of(function, "transformers.")
        and _is_of(template, "transformers.")
        and (function is template or _essence(function) == _essence(template))
    )


def _is_of(function: Any, package: str) -> bool:
    """Whether a function and all that wrap it were written in modules whose names start with ``package``.

    Asks for their globals: a function that somebody puts in the place of one often has the other names of that.
    """
    while isinstance(function, types.FunctionType):
        if not function.__globals__.get("__name__", "").startswith(package):
            return False
        if not hasattr(function, "__wrapped__"):
            return True
        function = function.__wrapped__
    return False


def _essence(function: Any) -> tuple[Any, ...]:
    """Return the parts of a function that decide its results: code without docstrings, names it reads, defaults."""
    function = inspect.unwrap(function)
    code = function.__code__
    constants = [None if isinstance(one, str) and "\n" in one else one for one in code.co_consts]
    return code.co_code, code.co_names, tuple(constants), function.__defaults__, function.__kwdefaults__


def _is_watched(module: nn.Module) -> bool:
    """Whether somebody but the engine has hooks on ``module``, or on all modules."""
    tables: list[dict[int, Any]] = [
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
        global_hooks._global_forward_pre_hooks,
        global_hooks._global_forward_hooks,
        global_hooks._global_backward_pre_hooks,
        global_hooks._global_backward_hooks,
    ]
    return any(not _is_of_engine(hook) for table in tables if table for hook in table.values())


def _is_of_engine(hook: Any) -> bool:
    origin = getattr(hook, "func", hook)  # of a `functools.partial`
    return str(getattr(origin, "__module__", "")).startswith("lightning_zero.")


class _Forward:
    """A forward that stands in for the one of a module's class, where it can: Note [Decided per call]."""

    templates: tuple[tuple[str, str], ...] = ()

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        # Of the class, as they were matched.
        self._methods = _methods(type(module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_plain() and self.suits():
            return self.fused(*args, **kwargs)
        return self.original(*args, **kwargs)

    def fused(self, *args: Any, **kwargs: Any) -> Any:
        """Compute with this package's ops."""
        raise NotImplementedError

    def suits(self) -> bool:
        """Whether the module still is as it was matched."""
        return True

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the class."""
        return type(self.module).forward(self.module, *args, **kwargs)

    def _is_plain(self) -> bool:
        """Whether the class has the methods that were matched, and no transform differentiates or batches the call."""
        kind = type(self.module)
        for name, method in self._methods.items():
            if getattr(kind, name, None) is not method:
                return False
        if len(self._methods) > 1 and _has_own(self.module, self._methods):
            return False
        return forward_ad._current_level < 0 and not is_transformed()

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the class's forward: trainers and generation read it."""
        return inspect.signature(types.MethodType(type(self.module).forward, self.module))

    @property
    def __code__(self) -> types.CodeType:
        """The code of the class's forward: ``torch.export`` reads it."""
        code: types.CodeType = inspect.unwrap(type(self.module).forward).__code__
        return code

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Match the class again, which may be another one than where the pickle was made."""
        module = state["module"]  # which may have no attributes yet
        if self.knows(type(module)):
            self.__init__(module)  # type: ignore[misc]
        else:
            self.module, self._methods = module, {"forward": None}  # so that the forward of the class runs

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forward:
        """Copy the module only: the class was matched when the model was patched, and may have been edited since."""
        other = object.__new__(type(self))
        memo[id(self)] = other
        vars(other).update(vars(self))
        other.module = copy.deepcopy(self.module, memo)
        return other

    @classmethod
    def knows(cls, kind: type) -> bool:
        """Whether this class stands in for the forward of a class of modules, as that is now."""
        return _is_like(kind, *cls.templates)

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        """Whether this class stands in for the forward of ``module``."""
        return cls.knows(type(module)) and not _has_own(module, _methods(type(module)))


# -- Norms -------------------------------------------------------------------------------------------------------------


class _RMSNorm(_Forward):
    templates = (("llama", "LlamaRMSNorm"),)

    def fused(self, hidden_states: Tensor) -> Tensor:
        norm: Any = self.module
        return rms_norm(hidden_states, norm.weight, eps=norm.variance_epsilon)


class _InputRMSNorm(_RMSNorm):
    """OLMo 2's: the result has the dtype of the input."""

    templates = (("olmo2", "Olmo2RMSNorm"),)

    def fused(self, hidden_states: Tensor) -> Tensor:
        return super().fused(hidden_states).type_as(hidden_states)


class _WeightRMSNorm(_RMSNorm):
    """T5's: the result has the dtype of the weight."""

    templates = (("t5", "T5LayerNorm"),)

    def fused(self, hidden_states: Tensor) -> Tensor:
        norm: Any = self.module
        return super().fused(hidden_states).type_as(norm.weight)


def _dtype_of_torch_norms(x: Tensor) -> torch.dtype:
    """Return the dtype of results of PyTorch's norms, at any dtype of the weight; autocast of GPUs makes it fp32."""
    return torch.float32 if x.is_cuda and torch.is_autocast_enabled("cuda") else x.dtype


def _has_rows(norm: Any) -> bool:
    """Whether a norm of PyTorch's is one over the last dimension, with a weight."""
    return len(norm.normalized_shape) == 1 and norm.weight is not None


class _TorchRMSNorm(_Forward):
    def fused(self, x: Tensor) -> Tensor:
        norm: Any = self.module
        y = rms_norm(x, norm.weight, eps=_FP32_EPS if norm.eps is None else norm.eps)
        return y.to(_dtype_of_torch_norms(x))

    def suits(self) -> bool:
        return _has_rows(self.module)

    @classmethod
    def knows(cls, kind: type) -> bool:
        return kind is nn.RMSNorm and _is_of(nn.RMSNorm.forward, "torch.")

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return super().matches(module) and _has_rows(module)


class _GemmaRMSNorm(_Forward):
    templates = (("gemma", "GemmaRMSNorm"),)

    def fused(self, x: Tensor) -> Tensor:
        norm: Any = self.module
        return rms_norm(x, norm.weight, eps=norm.eps, offset=1.0).type_as(x)


class _LayerNorm(_Forward):
    def fused(self, input: Tensor) -> Tensor:
        norm: Any = self.module
        return layer_norm(input, norm.weight, norm.bias, eps=norm.eps).to(_dtype_of_torch_norms(input))

    def suits(self) -> bool:
        return _has_rows(self.module)

    @classmethod
    def knows(cls, kind: type) -> bool:
        return kind is nn.LayerNorm and _is_of(nn.LayerNorm.forward, "torch.")

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return super().matches(module) and _has_rows(module)


# -- MLPs --------------------------------------------------------------------------------------------------------------


class _GatedMLP(_Forward):
    """Llama's MLP. That of Phi 3, which has gate and up in one product, would need copies of both: it stays."""

    activations: dict[str, Callable[[Tensor, Tensor], Tensor]] = {}
    templates, attribute = (("llama", "LlamaMLP"),), "act_fn"

    def fused(self, x: Tensor) -> Tensor:
        mlp: Any = self.module
        down: Tensor = mlp.down_proj(self.gated(mlp.gate_proj(x), mlp.up_proj(x)))
        return down

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the activation of ``gate``, times ``up``; adapters may give them two dtypes."""
        activation: Any = getattr(self.module, self.attribute)
        if gate.dtype != up.dtype:
            return activation(gate) * up  # type: ignore[no-any-return]
        return self.activations[_class_name(activation)](gate, up)

    def suits(self) -> bool:
        return self._has_op(getattr(self.module, self.attribute))

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return super().matches(module) and cls._has_op(getattr(module, cls.attribute))

    @classmethod
    def _has_op(cls, activation: Any) -> bool:
        """Whether an op computes the same as the activation: it is of a known class, and nobody has replaced it."""
        op = cls.activations.get(_class_name(activation))
        if op is None or "forward" in activation.__dict__ or _is_watched(activation):
            return False
        kind = type(activation)
        is_own = kind.forward.__globals__["__name__"] == kind.__module__
        return is_own and _has_own_gelu(activation, "none" if op is _geglu_erf else "tanh")


def _class_name(module: Any) -> str:
    """Return where the class of a module is from: a user's class may have the name of another."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _has_own_gelu(activation: Any, approximate: str) -> bool:
    """Whether an activation still calls the function that its class has given it, where it keeps one."""
    function = activation.__dict__.get("act")
    origin = getattr(function, "func", getattr(function, "__func__", function))
    if origin is nn.functional.gelu:
        return bool(getattr(function, "keywords", {}).get("approximate", "none") == approximate)
    return function is None or any(origin is method for method in vars(type(activation)).values())


class _SwiGLU(_GatedMLP):
    activations = {"torch.nn.modules.activation.SiLU": swiglu, "transformers.activations.SiLUActivation": swiglu}


def _geglu_erf(gate: Tensor, up: Tensor) -> Tensor:
    return geglu(gate, up, approximate="none")


class _GeGLU(_GatedMLP):
    activations = {
        "transformers.activations.GELUActivation": _geglu_erf,
        "transformers.activations.GELUTanh": geglu,
        "transformers.activations.PytorchGELUTanh": geglu,
        "transformers.activations.NewGELUActivation": geglu,
    }


class _T5GeGLU(_GeGLU):
    templates, attribute = (("t5", "T5DenseGatedActDense"),), "act"

    def fused(self, hidden_states: Tensor) -> Tensor:
        mlp: Any = self.module
        hidden = mlp.dropout(self.gated(mlp.wi_0(hidden_states), mlp.wi_1(hidden_states)))
        weight = mlp.wo.weight
        if isinstance(weight, Tensor) and weight.dtype not in (hidden.dtype, torch.int8):
            hidden = hidden.to(weight.dtype)
        result: Tensor = mlp.wo(hidden)
        return result


# -- Attention ---------------------------------------------------------------------------------------------------------


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Stand in for ``apply_rotary_pos_emb``."""
    if not _fits(q, cos, sin, unsqueeze_dim) or not _fits(k, cos, sin, unsqueeze_dim):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return _plainly_turned(q, cos, sin), _plainly_turned(k, cos, sin)
    if unsqueeze_dim == 1:
        return _turned(q, cos, sin), _turned(k, cos, sin)
    q, k = _turned(q.transpose(1, 2), cos, sin), _turned(k.transpose(1, 2), cos, sin)
    return q.transpose(1, 2), k.transpose(1, 2)


def _rotate_with_positions(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Stand in for that of transformers 4, which takes positions and does not read them."""
    return _rotate(q, k, cos, sin, unsqueeze_dim)


def _stand_in(function: Any) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return the stand-in with the same arguments as a family's ``apply_rotary_pos_emb``."""
    taken = inspect.getfullargspec(function)[:4]
    return next((one for one in (_rotate, _rotate_with_positions) if inspect.getfullargspec(one)[:4] == taken), None)


def _fits(x: Tensor, cos: Tensor, sin: Tensor, heads_at: int) -> bool:
    """Whether the op turns ``x``, whose heads are along the dimension ``heads_at``."""
    if heads_at not in (1, 2) or x.dim() != 4 or cos.dim() != 3 or cos.shape != sin.shape:
        return False
    if cos.shape[1] != x.shape[3 - heads_at] or cos.shape[0] not in (1, x.shape[0]) or cos.shape[2] % 2:
        return False
    return not (torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first part of a head, as long as ``cos``; Phi 3 leaves the rest."""
    width = cos.shape[-1]
    if width == x.shape[-1]:
        return apply_rotary(x, cos, sin)
    return torch.cat((apply_rotary(x[..., :width], cos, sin), x[..., width:]), -1)


def _plainly_turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Do so in plain PyTorch, with angles of any shape that can be broadcast to that of ``x``."""
    width = cos.shape[-1]
    part, rest = x[..., :width], x[..., width:]
    halves = torch.cat((-part[..., width // 2 :], part[..., : width // 2]), -1)
    turned = (part * cos + halves * sin).to(x.dtype)
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


def _is_known_rotation(names: dict[str, Any]) -> bool:
    """Whether the functions of a family's module turn halves, as Llama's, with a stand-in's arguments."""
    function, halves = names.get(_ROTARY), names.get(_HALVES)
    if function is None or halves is None or not _same_code(halves, _template("llama", _HALVES)):
        return False
    if _stand_in(function) is None:
        return False
    return any(_same_code(function, _template(family, _ROTARY)) for family in ("llama", "phi3", "olmo2"))


def _is_rewrappable(function: Any) -> bool:
    """Whether nothing wraps a function but decorators for arguments of old names, as transformers 4 has them."""
    while hasattr(function, "__wrapped__"):
        cells = function.__closure__ or ()
        if function.__globals__.get("__name__") != "transformers.utils.deprecation" or not any(
            cell.cell_contents is function.__wrapped__ for cell in cells
        ):
            return False
        function = function.__wrapped__
    return isinstance(function, types.FunctionType)


def _with_names(function: Any, names: dict[str, Any]) -> types.FunctionType:
    """Return a copy of a function that reads these global names; functions it wraps are copied too."""
    wrapped, closure = getattr(function, "__wrapped__", None), function.__closure__
    inner = None
    if wrapped is not None:
        inner, names = _with_names(wrapped, names), function.__globals__
        closure = tuple(types.CellType(inner) if cell.cell_contents is wrapped else cell for cell in closure)
    made = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    if inner is not None:
        vars(made)["__wrapped__"] = inner
    return made


class _Attention(_Forward):
    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._unwrapped = inspect.unwrap(self._methods["forward"])
        names = self._unwrapped.__globals__
        # Of the family's module, as they were matched.
        self._rotation = {name: names[name] for name in (_ROTARY, _HALVES)}
        self._function = self._with_rotary()

    def fused(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self.module, *args, **kwargs)

    def suits(self) -> bool:
        current = self._unwrapped.__globals__
        for name, function in self._rotation.items():
            if current.get(name) is not function:
                return False
        if self._is_current():
            return True
        if torch.compiler.is_compiling():  # which makes no functions
            return False
        self._function = self._with_rotary()
        return True

    def _is_current(self) -> bool:
        """Whether the copy of the forward has the names of the family's module as they are now."""
        names, current = self._names, self._unwrapped.__globals__
        for name in self._unwrapped.__code__.co_names:
            if name != _ROTARY and names.get(name) is not current.get(name):
                return False
        return True

    def _with_rotary(self) -> types.FunctionType:
        """Return the class's forward with another function under the name ``apply_rotary_pos_emb``."""
        self._names = {**self._unwrapped.__globals__, _ROTARY: _stand_in(self._rotation[_ROTARY])}
        return _with_names(self._methods["forward"], self._names)

    @classmethod
    def knows(cls, kind: type) -> bool:
        function = getattr(kind, "forward", None)
        return (
            kind.__module__.startswith("transformers.models.")
            and isinstance(function, types.FunctionType)
            and _is_rewrappable(function)
            and _ROTARY in inspect.unwrap(function).__code__.co_names
            and _is_known_rotation(inspect.unwrap(function).__globals__)
        )

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return cls.knows(type(module))


# -- Loss --------------------------------------------------------------------------------------------------------------


class _Head(_Forward):
    def __call__(self, input: Tensor, target: Tensor | None = None, **options: Any) -> Any:
        if target is None:
            return self.original(input)
        head: Any = self.module
        return linear_cross_entropy(input, head.weight, target, bias=head.bias, **options)

    @classmethod
    def knows(cls, kind: type) -> bool:
        return kind is nn.Linear and _is_of(nn.Linear.forward, "torch.")


def _loss_head(model: nn.Module) -> nn.Linear | None:
    """Return the model's head where it can compute the loss, None where logits are wanted or it is another module."""
    head = getattr(model, "lm_head", None)
    if type(head) is not nn.Linear or _is_watched(head):
        return None
    forward = vars(head).get("forward")
    if forward is None:  # a head that is new since the patch
        if not _Head.knows(nn.Linear):
            return None
        forward = vars(head)["forward"] = _Head(head)
    return head if type(forward) is _Head and forward.module is head and forward._is_plain() else None


_CAPPED_HEAD = ("gemma3", "Gemma3ForCausalLM")


class _CausalLM(_Forward):
    templates = (("llama", "LlamaForCausalLM"), _CAPPED_HEAD, ("gpt2", "GPT2LMHeadModel"))

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._is_capped = _is_like(type(module), _CAPPED_HEAD)
        # Names of the arguments that may come by position.
        self._names = tuple(self.__signature__.parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_plain():
            return self.original(*args, **kwargs)
        model: Any = self.module
        kwargs.update(zip(self._names, args, strict=False))
        wants_logits = kwargs.get("labels") is None or not model.training or "logits_to_keep" in kwargs
        if wants_logits or not _has_causal_loss(model):
            return self.original(**kwargs)
        head = _loss_head(model)
        return self.original(**kwargs) if head is None else self._with_loss(model, **kwargs)

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
        """Run the class's forward, with the head's loss in the place of its logits."""
        from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions, CausalLMOutputWithPast

        # Transformers 4 gives Gemma 3's for causal models a prefix of none of its modules: the model is its own base.
        base = model.model if model.base_model is model else model.base_model
        outputs = base(return_dict=True, **kwargs)
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        hidden = outputs.last_hidden_state
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = model.lm_head(
            hidden,
            target=shift_labels.to(hidden.device),
            ignore_index=ignore_index,
            reduction=reduction,
            softcap=model.config.final_logit_softcapping if self._is_capped else None,
        )
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
            super().matches(module) and _Head.knows(type(getattr(module, "lm_head", None))) and _has_causal_loss(module)
        )


def _has_causal_loss(model: nn.Module) -> bool:
    """Whether the model's loss is that of Hugging Face's for causal models, and nobody has replaced a part of it."""
    losses: Any = sys.modules["transformers.loss.loss_utils"]
    if torch.compiler.is_compiling() and not hasattr(model, "_loss_function"):
        # The property writes to a log, which a compiler refuses.
        function = losses.LOSS_MAPPING.get(getattr(model, "loss_type", None) or "ForCausalLM")
    else:
        function = getattr(model, "loss_function", None)
    return all(
        isinstance(one, types.FunctionType) and one.__globals__ is vars(losses) and one.__code__.co_name == name
        for name, one in {"ForCausalLMLoss": function, "fixed_cross_entropy": losses.fixed_cross_entropy}.items()
    )


# -- Patching ----------------------------------------------------------------------------------------------------------

_OPS: dict[str, tuple[type[_Forward], ...]] = {
    "rms_norm": (_RMSNorm, _InputRMSNorm, _WeightRMSNorm, _TorchRMSNorm, _GemmaRMSNorm),
    "layer_norm": (_LayerNorm,),
    "swiglu": (_SwiGLU,),
    "geglu": (_GeGLU, _T5GeGLU),
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
    """The changes that ``patch_model`` made. ``str`` of it is a table; ``undo`` takes them back."""

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
        """Give the modules their own forwards back, those that have come since too. A second call does nothing.

        Raises:
            RuntimeError: Somebody has put another forward on top of one.
        """
        _take_back(self.model, {change.op for change in self.changes})


def unpatch_model(model: nn.Module) -> None:
    """Give all modules of a model their own forwards back: of copies, of loaded models, after any ``patch_model``.

    Raises:
        RuntimeError: Somebody has put another forward on top of one.
    """
    _take_back(model, set(_OPS))


def _take_back(model: nn.Module, ops: set[str]) -> None:
    kinds = tuple(kind for op in ops for kind in _OPS[op])
    kinds += (_Head,) if "cross_entropy" in ops else ()
    covered = [name for name, module in model.named_modules() if _is_covered(module, kinds)]
    if covered:
        raise RuntimeError(
            f"Another forward was put on top of the patched one of {covered}. Take that away first, then call this"
            " again."
        )
    for module in model.modules():
        if isinstance(vars(module).get("forward"), kinds):
            del vars(module)["forward"]


def _is_covered(module: nn.Module, kinds: tuple[type[_Forward], ...]) -> bool:
    """Whether a patched forward is kept by the module, or by the forward it has, in another place."""
    forward = vars(module).get("forward")
    if forward is None or isinstance(forward, _Forward):
        return False
    # In an attribute of the module or of the forward, or in a `functools.partial`.
    kept = [*vars(module).values(), *getattr(forward, "__dict__", {}).values(), getattr(forward, "func", None)]
    kept += getattr(forward, "args", ())
    return any(isinstance(value, kinds) for value in kept)


def patch_model(model: nn.Module, ops: Sequence[str] | None = None) -> Patch:
    """Let a model of Hugging Face's compute with the ops of this package: Note [Patches]. Warns if none fits.

    Call it on every rank, before or after ``shard``. Results and gradients are those of the model up to rounding;
    16-bit ones are rounded less often.

    Args:
        model: Changed in place, on the instance: other models of its class stay as they are.
        ops: Names out of ``rms_norm``, ``layer_norm``, ``swiglu``, ``geglu``, ``rotary``, ``cross_entropy``. None: all
            that match something.

    Returns:
        The changes, with ``undo``.

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
            " Call `unpatch_model(model)` first, or `undo` of the earlier patch."
        )
    if not found:
        warnings.warn(
            f"`patch_model` knows no module of {type(model).__name__}, and changed nothing: it knows norms of PyTorch"
            " and models of Hugging Face's that compute as Llama, Gemma, OLMo 2, Phi 3, T5 or GPT-2 do.",
            stacklevel=2,
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
