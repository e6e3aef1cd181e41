"""A parameter of which a rank has a part looks whole, computes as the whole does, or says that it cannot."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from lightning_zero.boxes import Part
from lightning_zero.engine.buffers.parameter import (
    PendingParameter,
    ReducedParameter,
    ReleasedParameter,
    has_class,
    restore_class,
    swap_class,
    user_class,
)
from lightning_zero.engine.buffers.part_parameter import (
    PartParameter,
    PartValues,
    computing_with_parts,
    show_as_whole,
    show_parts,
)
from lightning_zero.errors import PartialParameterError, ReleasedParameterError

SHAPE = (6, 4)
PARTS = {
    "rows": Part.along(SHAPE, 0, (2, 2)),
    "columns": Part.along(SHAPE, 1, (2, 2)),
    "packed": Part.along(SHAPE, 0, (1, 1), (4, 1)),
}
WHOLE = torch.arange(24.0).view(SHAPE) - 11.5
GRID = torch.linspace(-1, 1, 24).view(SHAPE)


def _part(part: Part) -> nn.Parameter:
    param = nn.Parameter(part.read(WHOLE).clone())
    show_as_whole({"w": param}, {"w": part})
    return param


@pytest.fixture(params=PARTS)
def part(request: pytest.FixtureRequest) -> Part:
    return PARTS[request.param]


def _in_place(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    def changed(w: Any) -> None:
        with torch.no_grad():
            change(w)

    return changed


def _kept(w: Any) -> None:
    with torch.no_grad():
        kept = w.detach().clone()
        w.mul_(2.0)
        w.lerp_(kept, 0.25)


def _pointed(w: Any) -> None:
    w.data = w.data * 0.5


def _pointed_at_a_view(w: Any) -> None:
    w.data = GRID.reshape(-1).view_as(w)


def _mantissa(w: Any) -> None:
    mantissa, exponent = torch.frexp(w)
    w.copy_(mantissa * 2 + exponent)


def _draws(draw: Callable[[Any], Any]) -> Callable[[Any], None]:
    def drawn(w: Any) -> None:
        torch.manual_seed(3)
        with torch.no_grad():
            draw(w)
        after.append(torch.rand(()))

    return drawn


after: list[Tensor] = []  # numbers that were drawn behind an initial value

CHANGES: dict[str, Callable[[Any], Any]] = {
    "clamp": _in_place(lambda w: w.clamp_(-2.0, 2.0)),
    "mul": _in_place(lambda w: w.mul_(0.9)),
    "data": lambda w: w.data.mul_(0.9),
    "add whole": _in_place(lambda w: w.add_(GRID, alpha=0.5)),
    "add row": _in_place(lambda w: w.add_(GRID[0])),
    "mul column": _in_place(lambda w: w.mul_(GRID[:, :1])),
    "scalar tensor": _in_place(lambda w: w.mul_(torch.tensor(3.0))),
    "mask of whole": _in_place(lambda w: w.masked_fill_(GRID > 0, 1.0)),
    "mask of part": _in_place(lambda w: w.masked_fill_(w > 0, 1.0)),
    "multiplied by mask": _in_place(lambda w: w.mul_((w.abs() > 3).float())),
    "where": _in_place(lambda w: w.copy_(torch.where(w > 0, w, GRID))),
    "copy whole": _in_place(lambda w: w.copy_(GRID)),
    "zero": _in_place(lambda w: w.zero_()),
    "fill": _in_place(lambda w: w.fill_(2.0)),
    "set rows": _in_place(lambda w: w.__setitem__(2, 0.0)),
    "set items": _in_place(lambda w: w.__setitem__((slice(1, 5), slice(0, 3)), GRID[1:5, :3])),
    "set where": _in_place(lambda w: w.__setitem__(w < 0, 0.0)),
    "kept copy": _kept,
    "foreach": _in_place(lambda w: torch._foreach_mul_([w], 0.5)),
    "foreach with whole": _in_place(lambda w: torch._foreach_add_([w], [GRID])),
    "pointed": _pointed,
    "pointed at a view": _pointed_at_a_view,
    "copied view": _in_place(lambda w: w.copy_(GRID.reshape(-1).view_as(w))),
    "reshaped": _in_place(lambda w: w.add_(GRID.reshape(2, 12).reshape_as(w.data))),
    "expanded": _in_place(lambda w: w.mul_(GRID[:, :1].expand_as(w))),
    "from vector": lambda w: nn.utils.vector_to_parameters(GRID.reshape(-1), [w]),
    "converted": _in_place(lambda w: w.add_(GRID.double().to(w)).add_(GRID.half().type_as(w))),
    "mantissa": _in_place(_mantissa),
    "set all to values of the part": _in_place(lambda w: w.__setitem__(slice(None), w * 2)),
    "set all to the parameter": _in_place(lambda w: w.data.__setitem__(Ellipsis, w)),
    "out of place": _in_place(lambda w: w.copy_((w * 2 - GRID).tanh())),
    "normal": _draws(lambda w: nn.init.normal_(w, std=0.1)),
    "uniform": _draws(lambda w: w.uniform_(-1, 1)),
    "kaiming": _draws(lambda w: nn.init.kaiming_uniform_(w, a=2.0)),
    "xavier": _draws(lambda w: nn.init.xavier_normal_(w)),
    "truncated": _draws(lambda w: w.copy_(nn.init.trunc_normal_(torch.empty(w.shape), std=0.1))),
    "orthogonal": _draws(lambda w: nn.init.orthogonal_(w)),
    "sparse": _draws(lambda w: nn.init.sparse_(w, 0.5)),
    "constant": _draws(lambda w: nn.init.constant_(w, 0.5)),
    "noise": _draws(lambda w: w.add_(torch.randn_like(w), alpha=0.1)),
    "noise of whole": _draws(lambda w: w.add_(torch.randn(w.shape))),
    "dropped": _draws(lambda w: w.copy_(nn.functional.dropout(w, 0.5))),
    "bernoulli": _draws(lambda w: w.bernoulli_(0.5)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_those_of_the_whole(change: str, part: Part) -> None:
    whole, param = nn.Parameter(WHOLE.clone()), _part(part)
    after.clear()
    CHANGES[change](whole)
    CHANGES[change](param)
    assert type(param) is PartParameter
    show_parts([param])
    assert type(param) is nn.Parameter
    assert torch.allclose(param.detach(), part.read(whole.detach()), rtol=0, atol=1e-6), change
    assert len({float(one) for one in after}) <= 1


def test_questions_are_answered_for_the_whole(part: Part) -> None:
    param = _part(part)
    for one in (param, param.data, param.detach(), param * 2, param.float().clone()):
        assert one.shape == torch.Size(SHAPE)
        assert (one.size(), one.size(0), one.numel(), one.dim(), one.ndim, len(one)) == (SHAPE, 6, 24, 2, 2, 6)
        assert one.stride() == (4, 1)
        assert one.nbytes == 96
    assert isinstance(param, nn.Parameter)
    assert user_class(param) is nn.Parameter
    assert torch.empty_like(param).shape == torch.Size(SHAPE)
    assert param.new_zeros(3).tolist() == [0.0] * 3
    assert "'w', shape=(6, 4)" in repr(param)
    assert "'w', shape=(6, 4)" in f"{param.data}"
    assert {param: 1}[param] == 1


REFUSED: dict[str, Callable[[Any], Any]] = {
    "norm": lambda w: w.norm(),
    "vector norm": lambda w: torch.linalg.vector_norm(w.data),
    "mean": lambda w: w.mean(),
    "sum": lambda w: (w**2).sum(),
    "max": lambda w: w.data.abs().max(),
    "std": lambda w: torch.std(w),
    "any": lambda w: w.isnan().any(),
    "equal": lambda w: torch.equal(w, GRID),
    "allclose": lambda w: torch.allclose(w, GRID),
    "view": lambda w: w.view(-1),
    "reshape": lambda w: w.reshape(2, 12),
    "flatten": lambda w: w.flatten(),
    "index": lambda w: w[0],
    "data index": lambda w: w.data[1:3].zero_(),
    "t": lambda w: w.t(),
    "T": lambda w: w.T,
    "matmul": lambda w: GRID.t() @ w,
    "linear": lambda w: nn.functional.linear(torch.ones(2, 4), w),
    "histogram": lambda w: torch.histc(w),
    "numpy": lambda w: w.detach().cpu().numpy(),
    "tolist": lambda w: w.tolist(),
    "item": lambda w: w.item(),
    "bool": bool,
    "iteration": list,
    "cat": lambda w: torch.cat([w, w]),
    "stack": lambda w: torch.stack([w]),
    "svd": lambda w: torch.linalg.svd(w),
    "softmax": lambda w: w.softmax(0),
    "sort": lambda w: w.sort(),
    "topk": lambda w: torch.topk(w, 1),
    "cumsum": lambda w: w.cumsum(0),
    "foreach norm": lambda w: torch._foreach_norm([w]),
    "vector": lambda w: nn.utils.parameters_to_vector([w]),
    "out": lambda w: torch.add(GRID, 1.0, out=w.data),
    "deepcopy": copy.deepcopy,
    "deepcopy of values": lambda w: copy.deepcopy(w.data),
    "pickle": pickle.dumps,
    "save": lambda w: torch.save(w, "/dev/null"),
    "copied into": lambda w: torch.zeros(SHAPE).copy_(w),
    "added to": lambda w: torch._foreach_add_([torch.zeros(SHAPE)], [w.data]),
    "wrong shape": lambda w: w.data.add_(torch.ones(5, 4)),
    "state_dict": lambda w: _holding(w).state_dict(),
    "vmap": lambda w: torch.func.vmap(torch.sum)(w),
    "vmap of values": lambda w: torch.func.vmap(torch.sum, in_dims=1)(w.data),
    "inside of vmap": lambda w: torch.func.vmap(lambda row: row.sum() * w)(GRID),
    "set_": lambda w: w.set_(GRID.clone()),
    "set_ of values": lambda w: w.data.set_(GRID.clone()),
    "parameter": nn.Parameter,
}


def test_compiled_functions_are_refused_by_name() -> None:
    param = _part(PARTS["rows"])
    for value in (param, param.detach()):
        with pytest.raises(Exception, match=r"`torch.compile` needs the whole parameter `w`.*full_param"):
            torch.compile(lambda one: one.norm(), backend="eager")(value)


def _holding(w: Any) -> nn.Module:
    module = nn.Module()
    module.w = w
    return module


@pytest.mark.parametrize("use", REFUSED)
def test_uses_of_all_elements_are_refused_by_name(use: str, part: Part) -> None:
    param = _part(part)
    with pytest.raises(PartialParameterError, match="`w`") as caught:
        REFUSED[use](param)
    assert "full_param" in str(caught.value)


def test_modules_compute_with_the_part(part: Part) -> None:
    param = _part(part)
    with computing_with_parts([param]):
        with computing_with_parts([param]):
            assert type(param) is nn.Parameter
        assert type(param) is nn.Parameter
        assert tuple(param.shape) == part.shape
        loss = (param * 2).sum()
    loss.backward()
    assert type(param) is PartParameter
    assert isinstance(param.grad, PartValues)
    with pytest.raises(PartialParameterError, match="`w`"):
        param.grad.norm()
    param.grad = param.grad * 2
    show_parts([param])
    assert type(param.grad) is Tensor
    assert torch.equal(param.grad, torch.full(part.shape, 4.0))


@pytest.mark.parametrize("cls", [ReducedParameter, ReleasedParameter, PendingParameter])
def test_classes_of_the_engine_keep_the_face(cls: type, part: Part) -> None:
    param = _part(part)
    swap_class(param, cls)
    assert has_class(param, cls)
    assert isinstance(param, PartParameter)
    assert param.shape == torch.Size(SHAPE)
    with computing_with_parts([param]):
        assert type(param) is cls
        restore_class(param)
        assert type(param) is nn.Parameter
        swap_class(param, cls)
    assert isinstance(param, PartParameter)
    if cls is ReleasedParameter:
        with pytest.raises(ReleasedParameterError):
            param.mul_(2)
    restore_class(param)
    assert type(param) is PartParameter


def test_hooks_on_gradients_see_parts(part: Part) -> None:
    param = nn.Parameter(part.read(WHOLE).clone())
    seen: list[Any] = []
    param.register_hook(lambda grad: (seen.append(grad), grad * 2)[1])
    show_as_whole({"w": param}, {"w": part})
    param.register_hook(lambda grad: seen.append(grad))
    param.register_post_accumulate_grad_hook(lambda one: seen.append(one.grad))
    with computing_with_parts([param]):
        loss = param.sum()
    loss.backward()
    assert [type(one) for one in seen] == [PartValues] * 3
    for one in seen:
        assert one.shape == torch.Size(SHAPE)
        with pytest.raises(PartialParameterError, match="`w`"):
            one.norm()
    show_parts([param])
    assert torch.equal(param.grad, torch.full(part.shape, 2.0))  # type: ignore[arg-type]
    param.grad = None
    show_as_whole({"w": param}, {"w": part})
    with computing_with_parts([param]):
        loss = param.square().sum()
    (grad,) = torch.autograd.grad(loss, [param])
    with pytest.raises(PartialParameterError, match="`w`"):
        grad.norm()


def test_a_whole_tensor_that_was_given_a_part_is_named() -> None:
    param, average = _part(PARTS["rows"]), WHOLE.clone()
    average.data = param.data * 0.5  # asks no class
    with pytest.raises(PartialParameterError, match=r"got parameter `w` .* Has its `data` been given a part's"):
        torch.add(average.data, param.data)


def test_elements_that_come_from_other_ranks_are_refused() -> None:
    rows, columns = _part(PARTS["rows"]), _part(PARTS["columns"])
    moved, upside_down = torch.arange(6).roll(1), torch.arange(5, -1, -1)
    with pytest.raises(PartialParameterError, match="`__setitem__` needs the whole parameter `w`"):
        rows.data[moved] = rows.detach() * 2
    columns.data[upside_down] = columns.detach()
    show_parts([columns])
    assert torch.equal(columns.detach(), PARTS["columns"].read(WHOLE.flip(0)))


@pytest.mark.parametrize("uncut_is_first", [False, True])
def test_one_hook_on_several_gradients_runs_once(uncut_is_first: bool) -> None:
    param, uncut = _part(PARTS["rows"]), nn.Parameter(torch.ones(4))
    seen: list[Any] = []
    register_multi_grad_hook([param, uncut], seen.append)
    register_multi_grad_hook([param], seen.append)
    with computing_with_parts([param]):
        losses = [(param * 2).sum(), (uncut * 3).sum()]
    (losses[uncut_is_first] + losses[not uncut_is_first]).backward()
    assert sorted(len(grads) for grads in seen) == [1, 2]
    for grads in seen:
        assert isinstance(grads[0], PartValues)
        assert [grad.shape for grad in grads[1:]] in ([], [torch.Size([4])])


def test_parts_of_other_elements_do_not_meet() -> None:
    square = Part.along((4, 4), 0, (0, 2))
    other = Part.along((4, 4), 0, (2, 2))
    first, second = nn.Parameter(torch.ones(2, 4)), nn.Parameter(torch.ones(2, 4))
    show_as_whole({"first": first, "second": second}, {"first": square, "second": other})
    with pytest.raises(PartialParameterError, match="`add` got `first` and `second`"):
        torch.add(first, second)
    with pytest.raises(PartialParameterError, match="`__setitem__` got `first` and `second`"):
        first.data[:] = second * 2
    with torch.no_grad(), pytest.raises(PartialParameterError, match="`__setitem__` got `first` and `second`"):
        first[second > 0] = 0


def test_distributed_data_parallel_is_refused() -> None:
    import torch.distributed as dist

    param = _part(PARTS["rows"])
    module = _holding(param)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(PartialParameterError, match="is cut by `tensor_parallel`"):
            nn.parallel.DistributedDataParallel(module)
    finally:
        dist.destroy_process_group()


def test_a_parameter_that_is_gone_has_no_face() -> None:
    from lightning_zero.engine.buffers import parameter

    before = len(parameter._FACES)
    param = _part(PARTS["rows"])
    assert len(parameter._FACES) == before + 1
    del param
    assert len(parameter._FACES) == before
