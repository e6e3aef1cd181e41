"""What users do wrong is refused with a message that helps, and the engine works on afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lightning_zero
from lightning_zero.config import Communication, MixedPrecision
from lightning_zero.errors import ReleasedParameterError, ShardedGradientError
from tests import worlds
from tests.references import Sharded, TinyGPT, difference, outcome, token_loss, train, train_zero
from tests.sampling import sample

# -- Options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [4, -1, True, "3", None, 1.5])
def test_unknown_stage_is_refused(stage: Any) -> None:
    from lightning_zero.engine.engine import ZeroEngine

    with pytest.raises(ValueError, match="is not a ZeRO stage. Use 0, 1, 2 or 3"):
        ZeroEngine(stage)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduce_dtype": "float32"}, "`Communication.reduce_dtype='float32'.` is not known. Use 'fp32'"),
        ({"prefetch": -1}, "`Communication.prefetch=-1.` must be a number of units"),
        ({"timeout_s": 0}, "`Communication.timeout_s=0.` must be a positive number"),
    ],
)
def test_bad_communication_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Communication(**options)


def test_compute_dtype_that_is_not_16_bit_is_refused() -> None:
    with pytest.raises(ValueError, match="compute_dtype=torch.float64.` must be torch.bfloat16, torch.float16 or None"):
        MixedPrecision(compute_dtype=torch.float64)


@pytest.mark.parametrize(
    ("units", "messages"),
    [
        (("Blok",), ["`Blok`", "Did you mean `Block`"]),
        (("blocks",), ["`blocks`", "LayerNorm"]),
        ((nn.Conv2d,), ["Conv2d"]),
    ],
    ids=["class-name", "path", "class"],
)
def test_unit_that_matches_no_module_is_refused_with_the_nearest_names(units: Any, messages: list[str]) -> None:
    from lightning_zero.engine.engine import ZeroEngine

    with pytest.raises(ValueError, match=".") as caught:
        ZeroEngine(3, units=units).shard(TinyGPT())
    for message in messages:
        assert message in str(caught.value)


# -- At run time -------------------------------------------------------------------------------------------------------


class _Whitening(torch.optim.Optimizer):
    """Needs the whole gradient of a matrix."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / parameter.grad.norm())


def _matrices(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.ndim == 2]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "LBFGS": lambda module: torch.optim.LBFGS(module.parameters()),
    "Adafactor": lambda module: torch.optim.Adafactor(module.parameters()),
    "Muon": lambda module: torch.optim.Muon(_matrices(module)),
    "_Whitening": lambda module: _Whitening(module.parameters()),
}


def _sharded(rank: int, world: int, stage: int = 3) -> Sharded:
    worlds.seed()
    return Sharded(TinyGPT(), rank, world, stage=stage, units=("Block",))


def _unchanged(trainer: Sharded) -> str:
    """Train on and compare with a run that made no mistake. Collective."""
    clean = train_zero(
        TinyGPT, lambda t: train(t, loss=token_loss), trainer.rank, trainer.world, stage=3, units=("Block",)
    )
    trainer.losses.clear()
    train(trainer, loss=token_loss)
    return difference(outcome(trainer), clean)


def _attach(rank: int, world: int, name: str) -> list[str]:
    messages = []
    for stage in (1, 2, 3):
        trainer = _sharded(rank, world, stage)
        with pytest.raises((ValueError, TypeError), match=name) as caught:
            trainer.attach(OPTIMIZERS[name](trainer.module))
        messages.append(str(caught.value))
        assert not _unchanged(trainer)
        trainer.engine.close()
    return messages


@pytest.mark.parametrize("name", sample(OPTIMIZERS, "LBFGS", "Muon"))
def test_optimizer_that_needs_whole_matrices_is_refused_by_name(name: str) -> None:
    worlds.run(_attach, 2, name)


def _matrix_optimizer_at_stage_0(rank: int, world: int) -> str:
    trainer = _sharded(rank, world, 0)
    train(trainer, loss=token_loss, optimizer=OPTIMIZERS["Adafactor"])
    return ""


def test_matrix_optimizers_work_where_nothing_is_sharded() -> None:
    assert worlds.run(_matrix_optimizer_at_stage_0, 2) == ["", ""]


VALUES: dict[str, Callable[[nn.Parameter], Any]] = {
    "add": lambda p: p + 1,
    "item": lambda p: p[0, 0].item(),
    "linear": lambda p: nn.functional.linear(torch.ones(p.shape[1]), p),
    "sum": lambda p: p.sum(),
    "in-place": lambda p: p.detach().mul_(2),
    "numpy": lambda p: p.detach().numpy(),
    "tolist": lambda p: p.tolist(),
    "clone": lambda p: p.clone(),
    "bool": lambda p: bool((p > 0).any()),
    "copy": lambda p: p.data.copy_(torch.ones(p.shape)),
}


def _touch(rank: int, world: int, name: str) -> str:
    trainer = _sharded(rank, world)
    parameter = trainer.module.blocks[1].up.weight
    with pytest.raises(ReleasedParameterError, match="blocks.1.up.weight") as caught, torch.no_grad():
        VALUES[name](parameter)
    assert "gathered" in str(caught.value)
    wrong = _unchanged(trainer)
    trainer.engine.close()
    return wrong


@pytest.mark.parametrize("name", list(VALUES))
def test_values_of_a_released_parameter_are_refused_with_its_name_and_the_remedy(name: str) -> None:
    assert worlds.run(_touch, 2, name) == ["", ""]


NAMED: dict[str, Callable[[nn.Module, nn.Parameter], Any]] = {
    "`.data` needs": lambda module, param: param.data,
    "`.data = ...` needs": lambda module, param: setattr(param, "data", torch.ones(param.shape)),
    "`.T` needs": lambda module, param: param.T,
    "`.mT` needs": lambda module, param: param.mT,
    "`norm` needs": lambda module, param: param.norm(),
    "`state_dict..` needs .*`trainer.save_checkpoint.*`lightning_zero.export_safetensors": lambda module, param: (
        module.state_dict()
    ),
    "`state_dict..` needs .*`with lightning_zero.gathered.module.:` on every rank": lambda module, param: module.blocks[
        1
    ].state_dict(keep_vars=False),  # type: ignore[index, operator, union-attr]
}


def _name(rank: int, world: int) -> None:
    trainer = _sharded(rank, world)
    for message, read in NAMED.items():
        with pytest.raises(ReleasedParameterError, match=message):
            read(trainer.module, trainer.module.blocks[1].up.weight)
    trainer.engine.close()


def test_what_was_read_of_a_released_parameter_is_named_as_it_was_written() -> None:
    worlds.run(_name, 2)


def _look(rank: int, world: int) -> str:
    trainer = _sharded(rank, world)
    parameter = trainer.module.blocks[1].up.weight
    assert parameter.shape == (12, 6)
    assert (parameter.ndim, parameter.numel(), parameter.dtype) == (2, 72, torch.float32)
    assert (parameter.requires_grad, parameter.is_leaf, parameter.device.type) == (True, True, "cpu")
    assert isinstance(parameter, nn.Parameter)
    assert parameter.grad is None
    assert parameter.size(0) == len(parameter) == 12
    assert parameter.element_size() * parameter.nelement() == 288
    assert parameter in {parameter}
    assert "blocks.1.up.weight" in repr(parameter) or "released" in repr(parameter).lower()
    assert str(parameter)
    assert repr(trainer.module)
    assert format(parameter)
    assert sum(p.numel() for p in trainer.module.parameters()) == sum(p.numel() for p in TinyGPT().parameters())
    assert [name for name, _ in trainer.module.named_parameters()] == [n for n, _ in TinyGPT().named_parameters()]
    return _unchanged(trainer)


def test_metadata_of_a_released_parameter_are_true_and_printing_works() -> None:
    assert worlds.run(_look, 2) == ["", ""]


GRADIENTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "mean": lambda g: g.mean(),
    "sum": lambda g: g.sum(),
    "max": lambda g: g.max(),
    "min-over-a-dimension": lambda g: torch.min(g, 0),
    "std": lambda g: g.std(),
    "index": lambda g: g[0],
    "reshape": lambda g: g.view(12, 6),
    "matmul": lambda g: g @ g,
    "argmax": lambda g: g.abs().argmax(),
    "histogram": lambda g: torch.histc(g),
}


def _reduce(rank: int, world: int) -> str:
    for stage in (1, 2, 3):
        trainer = _sharded(rank, world, stage)
        trainer.attach(torch.optim.SGD(trainer.module.parameters(), lr=0.0))
        with trainer.scope():
            loss = token_loss(trainer.module, rank, 0)
        trainer.backward(loss)
        gradient = trainer.module.blocks[1].up.weight.grad
        for name, reduction in GRADIENTS.items():
            with pytest.raises(ShardedGradientError, match="full_grad"):
                pytest.fail(f"{name}: {reduction(gradient)}")
        trainer.engine.internals.fits.optimizers[0].step()
        trainer.engine.internals.fits.optimizers[0].zero_grad()
        wrong = _unchanged(trainer)
        trainer.engine.close()
        if wrong:
            return f"stage {stage}: {wrong}"
    return ""


def test_reductions_of_a_sharded_gradient_other_than_norms_are_refused() -> None:
    assert worlds.run(_reduce, 2) == ["", ""]


def _use_before_shard(rank: int, world: int) -> list[str]:
    from lightning_zero.engine.engine import ZeroEngine

    messages = []
    module = TinyGPT()
    for call in (
        lambda engine: engine.attach(torch.optim.SGD(module.parameters(), lr=0.1)),
        lambda engine: engine.full_param(module.head.weight),
    ):
        with pytest.raises((RuntimeError, ValueError), match=".") as caught:
            call(ZeroEngine(3))
        messages.append(str(caught.value))
    return messages


def test_calls_before_shard_are_refused() -> None:
    for messages in worlds.run(_use_before_shard, 2):
        assert all("shard" in message for message in messages)


def _foreign_parameter(rank: int, world: int) -> str:
    trainer = _sharded(rank, world)
    with pytest.raises(ValueError, match=".") as caught:
        trainer.attach(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))
    wrong = _unchanged(trainer)
    trainer.engine.close()
    return wrong or ("" if "parameter" in str(caught.value) else str(caught.value))


def test_optimizer_over_parameters_of_another_module_is_refused() -> None:
    assert worlds.run(_foreign_parameter, 2) == ["", ""]


# -- Calls of an engine ------------------------------------------------------------------------------------------------


def _with_module() -> Any:
    from lightning_zero.engine.engine import ZeroEngine

    engine = ZeroEngine(3)
    engine.shard(nn.Linear(2, 1))
    return engine


def _without_module() -> Any:
    from lightning_zero.engine.engine import ZeroEngine

    return ZeroEngine(3)


MISUSE: dict[str, tuple[Callable[[], Any], str]] = {
    "gathered a name": (
        lambda: _with_module().gathered("weight").__enter__(),
        "Pass a module, a parameter, or several",
    ),
    "gathered names": (lambda: _with_module().gathered(["weight"]).__enter__(), "or several, not `'weight'`"),
    "gathered None": (lambda: _with_module().gathered(None).__enter__(), "or several, not `None`"),
    "any gathered": (lambda: lightning_zero.gathered("weight").__enter__(), "or several, not `'"),
    "load into a name": (lambda: lightning_zero.load_pretrained("module", "/"), "or several, not `'module'`"),
    "attach a name": (
        lambda: _with_module().attach("adam"),
        r"one by one, as `engine.attach\(\*optimizers\)`, not `'adam'",
    ),
    "attach a list": (lambda: _with_module().attach([]), "takes optimizers one by one.* not a `list`"),
    "attach a class": (lambda: _with_module().attach(torch.optim.SGD), "not the class `SGD`. Make each with its param"),
    "shard None": (lambda: _without_module().shard(None), "`engine.shard` takes a module, not `None`"),
    "shard a list": (lambda: _without_module().shard([nn.Linear(1, 1)]), "takes a module, not a `list`"),
    "shard a class": (lambda: _without_module().shard(nn.Linear), "takes a module, not the class `Linear`"),
    "full_param of a name": (lambda: _with_module().full_param("weight"), "`str` is no parameter"),
    "keys": (lambda: lightning_zero.ZeroStrategy(offload={1: "cpu"}), "`Offload` has no option 1. Use names of its"),
    "tokens": (lambda: lightning_zero.ZeroMonitor(tokens=5), "`tokens=5` is an `int`. Use a function"),
    "token": (lambda: lightning_zero.ZeroMonitor(token=len), "has no option `token`. Did you mean `tokens`"),
    "grad_norm": (lambda: lightning_zero.ZeroMonitor(grad_norm="yes"), "`grad_norm='yes'`.*Use True or False, or 'un"),
    "peak_tflops": (lambda: lightning_zero.ZeroMonitor(peak_tflops="1"), "`peak_tflops='1'` is a `str`. Use a number"),
    "include": (
        lambda: lightning_zero.ExportSafetensors(include=5),
        "`include=5` is an `int`. Use 'trained', a list of",
    ),
    "include a number": (lambda: lightning_zero.ExportSafetensors(include=["a", 5]), "is a list with an `int` in it"),
    "prefix": (lambda: lightning_zero.ExportSafetensors(prefix=None), "`prefix=None` is .*Use a string"),
    "spec": (lambda: lightning_zero.LayerSpec(5), "`LayerSpec` takes a class, .* got a `int`. For example"),
    "tied spec": (
        lambda: lightning_zero.TiedLayerSpec("key", nn.Linear, 1, 1, forward_fn=5),
        "`forward_fn=5` is a `int`. Use a function",
    ),
}


@pytest.mark.parametrize("name", MISUSE)
def test_values_of_another_kind_are_refused_by_name(name: str) -> None:
    call, message = MISUSE[name]
    with pytest.raises((TypeError, ValueError), match=message):
        call()


_ARGUMENTS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], tuple[Any, ...]]] = {
    "shard": lambda module, optimizer: (module,),
    "gathered": lambda module, optimizer: (module,),
    "full_param": lambda module, optimizer: (module.weight,),
    "full_grad": lambda module, optimizer: (module.weight,),
    "clip_grad_norm": lambda module, optimizer: (optimizer, 1.0),
    "clip_grad_value": lambda module, optimizer: (optimizer, 1.0),
    "unscale": lambda module, optimizer: (optimizer, 1.0),
    "state_place": lambda module, optimizer: (optimizer, module.weight, "exp_avg"),
    "scope": lambda module, optimizer: ("training_step",),
    "microbatch": lambda module, optimizer: (True,),
    "broadcast_module_buffers": lambda module, optimizer: ("scopes",),
    "use_step_devices": lambda module, optimizer: ({},),
    "scaled": lambda module, optimizer: (1.0,),
    "part": lambda module, optimizer: ("chunk 1",),
    **dict.fromkeys(
        ("attach", "open_window", "close_window", "drop_gradients", "drop_remote", "whole_groups"),
        lambda module, optimizer: (optimizer,),
    ),
}  # fmt: skip
_NEED_NO_MODULE = {  # do nothing, or look up
    "close", "drop_remote", "whole_groups", "param_name", "around_collective", "has_hooks_of_program",
    "make_in_this_thread", "when_closed",
}  # fmt: skip


def _methods(owner: Any) -> list[str]:
    return [
        name
        for name, value in vars(type(owner)).items()
        if callable(value) and not name.startswith("_") and name not in _NEED_NO_MODULE
    ]


def _parts(engine: Any) -> list[Any]:
    """Return the engine and its internal parts."""
    return [engine, engine.internals.fits, engine.internals.steps, engine.internals.checkpoints]


def _call(owner: Any, name: str, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    arguments = _ARGUMENTS[name](module, optimizer) if name in _ARGUMENTS else ()
    result = getattr(owner, name)(*arguments)
    if hasattr(result, "__enter__"):
        result.__enter__()


@pytest.mark.parametrize("stage", [1, 3], ids="stage{}".format)
def test_every_call_of_a_closed_engine_says_so(stage: int) -> None:
    worlds.run(_calls_of_closed_engines, 2, stage)


def _calls_of_closed_engines(rank: int, world: int, stage: int) -> None:
    from lightning_zero.engine.engine import ZeroEngine

    for end in ("close", "unshard"):
        engine, module = ZeroEngine(stage), nn.Linear(2, 1)
        optimizer = engine.attach(torch.optim.AdamW(engine.shard(module).parameters()))
        module(torch.ones(2)).sum().backward()
        optimizer.step()
        getattr(engine, end)()
        for part in _parts(engine):
            for name in _methods(part):
                with pytest.raises(RuntimeError, match="This engine is closed, .* Make a new `ZeroEngine`"):
                    _call(part, name, module, optimizer)
        engine.close()
        if end == "close" and stage == 3:
            with pytest.raises(RuntimeError, match="This engine is closed"):
                module.weight.sum()


def test_every_call_of_an_engine_without_a_module_says_so() -> None:
    engine, module = _without_module(), nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(module.parameters())
    for name in _methods(engine):
        if name != "shard":
            with pytest.raises(
                RuntimeError, match=r"The engine holds no module yet. Call `engine.shard\(module\)` first"
            ):
                _call(engine, name, module, optimizer)
    engine.close()
