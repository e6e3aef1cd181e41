"""Activation checkpointing: the same numbers, the promised bytes, at most one forward more."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from lightning_zero.config import ActivationCheckpointing
from lightning_zero.lightning.strategy import ZeroStrategy
from lightning_zero.parallel.activation import checkpointing as activation
from lightning_zero.parallel.activation.checkpointing import checkpoint_activations
from lightning_zero.storage.copies import Copies, Landing
from tests import worlds
from tests.lightning_programs import Net, assert_equal, loader, seeded, trainer, weights
from tests.references import Outcome, difference, train, train_zero
from tests.sampling import sample
from tests.simulated_device import SimulatedDevice

POLICIES = ("full", "selective", "offload")
WIDTH, HEADS = 16, 2


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.dropout = dropout

    def forward(self, x: Tensor, shift: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + F.dropout(self.out(mixed), self.dropout, self.training)
        x = x + scale * F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)
        return x if shift is None else x + shift


class Model(nn.Module):
    def __init__(self, blocks: int = 3, dropout: float = 0.0, frozen: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout=dropout) for _ in range(blocks)])
        self.head = nn.Linear(WIDTH, 13)
        if frozen:
            for block in self.blocks:
                block.qkv.requires_grad_(False)
                block.up.requires_grad_(False)
            self.embedding.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)


def _loss(module: nn.Module, rank: int, step: int) -> Tensor:
    worlds.seed(100 * rank + step)  # dropout too
    tokens = torch.randint(0, 13, (2, 6))
    return F.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten())


# -- The same numbers --------------------------------------------------------------------------------------------------


def _build(options: ActivationCheckpointing | None, dropout: float, frozen: bool) -> nn.Module:
    model = Model(dropout=dropout, frozen=frozen)
    checkpoint_activations(model, options)
    return model


def _trained(rank: int, world: int, stage: int, options: Any, dropout: float, frozen: bool) -> Outcome:
    def adamw(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([param for param in module.parameters() if param.requires_grad], lr=1e-2)

    program = partial(train, loss=_loss, optimizer=adamw, micro_batches=2, max_norm=0.5)
    return train_zero(partial(_build, options, dropout, frozen), program, rank, world, stage=stage, units=["Block"])


def _compare(rank: int, world: int, stage: int, dropout: float, frozen: bool) -> dict[str, str]:
    expected = _trained(rank, world, stage, None, dropout, frozen)
    cases = [ActivationCheckpointing(policy=policy) for policy in POLICIES] + [ActivationCheckpointing(every=2)]  # type: ignore[arg-type]
    return {str(case): difference(_trained(rank, world, stage, case, dropout, frozen), expected) for case in cases}


@pytest.mark.parametrize("frozen", sample([False, True], True), ids=["trained", "adapters"])
@pytest.mark.parametrize("dropout", sample([0.0, 0.3], 0.3), ids="dropout{}".format)
@pytest.mark.parametrize("stage", sample((0, 1, 2, 3), 3), ids="stage{}".format)
def test_every_policy_gives_the_same_bits(stage: int, dropout: float, frozen: bool) -> None:
    for found in worlds.run(_compare, 2, stage, dropout, frozen):
        assert not any(found.values()), found


class _Named(nn.Module):
    """Takes its input by name, or in an object that is no tree."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, *, hidden_states: Any) -> Tensor:
        x: Tensor = hidden_states if isinstance(hidden_states, Tensor) else hidden_states.value
        return self.layer(x)


class _Ranks:
    rank, size = 0, 1

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]


@pytest.mark.parametrize("is_hidden", [False, True], ids=["by-name", "in-an-object"])
@pytest.mark.parametrize("policy", [*POLICIES, "partition"])
def test_random_numbers_are_restored_on_the_devices_of_all_inputs(
    policy: Any, is_hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks called with ``hidden_states=x`` drew another dropout mask on a device when they were computed again."""
    seen: list[Any] = []
    infer = torch.utils.checkpoint._infer_device_type
    monkeypatch.setattr(torch.utils.checkpoint, "_infer_device_type", lambda *args: seen.append(args) or infer(*args))
    monkeypatch.setattr(torch, "_assert_async", lambda *args: None)  # of "partition"; it would not wait for its value
    with SimulatedDevice() as device:
        module = nn.Sequential(_Named()).to("cuda")
        options = ActivationCheckpointing(modules=[_Named], policy=policy)
        checkpoint_activations(module, options, _Ranks() if policy == "partition" else None)
        x = torch.ones(2, 4).to("cuda").requires_grad_()
        module[0](hidden_states=SimpleNamespace(value=x) if is_hidden else x).sum().backward()
        device.synchronize()
        tensors = [one for one in tree_leaves(seen) if isinstance(one, Tensor)]
        assert seen
        assert [(one.device.type, one.numel()) for one in tensors] == [("cuda", 0)]


@pytest.mark.parametrize("policy", sample(["full", "selective"], "full"))
def test_a_compiled_block_is_one_graph(policy: Any) -> None:
    module = nn.Sequential(_Named())
    checkpoint_activations(module, ActivationCheckpointing(modules=[_Named], policy=policy))
    compiled = torch.compile(module[0], backend="eager", fullgraph=True)
    x = torch.ones(2, 4).requires_grad_()
    compiled(hidden_states=x).sum().backward()
    assert x.grad is not None


class _Counts(nn.Module):
    """Counts its forwards in a module buffer, behind a place where no graph goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, witnesses: int = 0) -> Tensor:
        torch._dynamo.graph_break()
        self.seen += 1
        return self.layer(x * self.seen)


@pytest.mark.parametrize("policy", sample(["full", "selective", "offload"], "full"))
def test_a_compiled_block_whose_graph_breaks_writes_its_buffers_once(policy: Any) -> None:
    results = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(_Counts())
        checkpoint_activations(module, ActivationCheckpointing(modules=[_Counts], policy=policy))
        run = torch.compile(module[0], backend="eager") if is_compiled else module[0]
        x = torch.ones(2, 4).requires_grad_()
        for _ in range(2):
            run(x, witnesses=1).sum().backward()
        results.append((float(module[0].seen), x.grad))
    assert results[0][0] == results[1][0] == 2.0
    assert torch.equal(results[0][1], results[1][1])


class _Fills(nn.Module):
    """Replaces and adds entries of containers that it is given, behind a place where no graph goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, state: dict[str, Tensor], losses: list[Tensor]) -> Tensor:
        torch._dynamo.graph_break()
        state["x"] = torch.tanh(self.layer(state["x"]))
        losses.append(state["x"].mean())
        return state["x"]


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("policy", [None, *sample(["full", "selective", "offload"], "full")])
def test_containers_that_blocks_fill_are_those_of_the_first_run_when_it_is_compiled(
    policy: Any, is_compiled: bool
) -> None:
    """The recomputation was given the containers as the forward had left them, and computed with its own results."""
    torch.manual_seed(0)
    module = nn.Sequential(_Fills(), _Fills())
    expected = [_filled(module, module) for _ in range(2)]
    if policy is not None:
        checkpoint_activations(module, ActivationCheckpointing(modules=[_Fills], policy=policy))
    run = [torch.compile(block, backend="eager") if is_compiled else block for block in module]
    assert torch.equal(torch.stack(expected), torch.stack([_filled(module, run) for _ in range(2)]))


def _filled(module: nn.Module, blocks: Any) -> Tensor:
    """Return the gradients of a step, and how much the containers have in them."""
    module.zero_grad()
    state, losses = {"x": torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()}, list[Tensor]()
    for block in blocks:
        out = block(state, losses)
    (out.sum() + sum(losses)).backward()
    return torch.cat([*(param.grad.flatten() for param in module.parameters()), torch.tensor([float(len(losses))])])


class _Optioned(nn.Module):
    """Has arguments with the names of those of `checkpoint`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(
        self,
        x: Tensor,
        early_stop: bool = True,
        debug: Any = None,
        function: Any = torch.tanh,
        *,
        preserve_rng_state: bool = True,
        fn: float = 0.0,
        run: float = 0.0,
        module: float = 0.0,
        call: float = 0.0,
    ) -> Tensor:
        y = function(self.layer(x if early_stop else 2 * x)) * (1 if debug is None else debug)
        return y if preserve_rng_state else y * (fn + 10 * run + 100 * module + 1000 * call)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("policy", [None, *sample(["full", "selective", "offload", "auto"], "full", "auto")])
def test_arguments_with_the_names_of_those_of_checkpoint_reach_the_forward(policy: Any, is_compiled: bool) -> None:
    """`checkpoint` kept them for itself: the forward, or its recomputation, took the defaults."""
    torch.manual_seed(0)
    module = nn.Sequential(_Optioned())
    x = torch.linspace(-1, 1, 8).view(2, 4)
    options = {"early_stop": False, "debug": 3.0, "function": torch.sigmoid, "preserve_rng_state": False}
    options |= {"fn": 1.0, "run": 2.0, "module": 3.0, "call": 4.0}
    module[0](x, **options).sum().backward()
    expected = module[0].layer.weight.grad.clone()
    if policy is not None:
        checkpoint_activations(module, ActivationCheckpointing(modules=[_Optioned], policy=policy))
    module.zero_grad()
    run = torch.compile(module[0], backend="eager") if is_compiled else module[0]
    run(x, **options).sum().backward()
    assert torch.equal(module[0].layer.weight.grad, expected)


# -- What is kept ------------------------------------------------------------------------------------------------------


class _LiveBytes(TorchDispatchMode):
    """Follows the storages that operations make, other than those of a module's parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._parameters = {param.untyped_storage()._cdata for param in module.parameters()}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._parameters:
                    self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def alive(self) -> int:
        return sum(nbytes for reference, nbytes in self._made.values() if not reference.expired())


def _kept(model: nn.Module, tokens: Tensor) -> int:
    with _LiveBytes(model) as live:
        output = model(tokens)
        kept = live.alive()
    output.sum().backward()
    return kept


def _kept_per_block(options: ActivationCheckpointing | None, tokens: Tensor) -> float:
    sizes = []
    for blocks in (12, 24):
        model = Model(blocks)
        checkpoint_activations(model, options)
        sizes.append(_kept(model, tokens))
    return (sizes[1] - sizes[0]) / 12


def test_full_keeps_one_input_per_block_of_a_gpt_with_24_blocks() -> None:
    tokens = torch.randint(0, 13, (4, 32))
    one_input = tokens.numel() * WIDTH * 4
    assert _kept_per_block(ActivationCheckpointing(), tokens) == pytest.approx(one_input, rel=0.05)
    whole = Model(24)
    everything = _kept(whole, tokens)
    checkpoint_activations(whole, ActivationCheckpointing())
    assert _kept(whole, tokens) < 0.1 * everything
    assert _kept_per_block(ActivationCheckpointing(every=2), tokens) > 5 * one_input


def test_selective_keeps_the_results_of_products_and_attention_as_well() -> None:
    tokens = torch.randint(0, 13, (4, 32))
    numel = tokens.numel()
    products = numel * (3 * WIDTH + WIDTH + 4 * WIDTH + WIDTH)  # qkv, out, up, down
    attention = numel * (WIDTH + HEADS)  # and the sums of its softmax
    expected = 4 * (numel * WIDTH + products + attention)
    assert _kept_per_block(ActivationCheckpointing(policy="selective"), tokens) == pytest.approx(expected, rel=0.05)


def test_offload_keeps_one_input_per_block_and_that_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.randint(0, 13, (4, 32))
    moved: list[int] = []
    to_host = activation._Parked._to_host

    def counted(parked: Any, tensor: Tensor) -> Tensor:
        moved.append(tensor.nbytes)
        return to_host(parked, tensor)

    monkeypatch.setattr(activation._Parked, "_to_host", counted)
    one_input = tokens.numel() * WIDTH * 4
    assert _kept_per_block(ActivationCheckpointing(policy="offload"), tokens) == pytest.approx(one_input, rel=0.05)
    assert moved == [one_input] * (12 + 24)


def test_the_inputs_of_the_block_before_are_fetched_while_a_block_goes_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    model = Model(3)
    names = {id(block.norm): str(number) for number, block in enumerate(model.blocks)}
    checkpoint_activations(model, ActivationCheckpointing(policy="offload"))
    fetched: dict[int, str] = {}
    bring = Copies.bring

    def noted(copies: Copies, host: Tensor, *behind: Landing) -> tuple[Tensor, Landing]:
        order.append(f"fetch {fetched.setdefault(id(host), str(len(fetched)))}")
        return bring(copies, host, *behind)

    monkeypatch.setattr(Copies, "bring", noted)
    loss = model(torch.randint(0, 13, (1, 4))).sum()
    for block in model.blocks:
        block.norm.register_forward_hook(lambda module, *_: order.append(f"run {names[id(module)]}"))
    loss.backward()
    assert order == ["fetch 0", "fetch 1", "run 2", "fetch 2", "run 1", "run 0"]


def _flops(model: nn.Module, tokens: Tensor) -> tuple[int, int]:
    with FlopCounterMode(display=False) as forward:
        loss = model(tokens).sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("policy", POLICIES)
def test_at_most_one_forward_is_computed_again(policy: Any) -> None:
    tokens = torch.randint(0, 13, (2, 32))
    forward, backward = _flops(Model(6), tokens)
    model = Model(6)
    checkpoint_activations(model, ActivationCheckpointing(policy=policy))
    again, more = _flops(model, tokens)
    assert again == forward
    extra = more - backward
    assert 0 <= extra <= forward
    assert (extra == 0) == (policy == "selective")


# -- Modules -----------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Takes and returns more than one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, pair: Any, *, more: dict[str, Any] | None = None) -> Any:
        x, name = pair
        y = torch.tanh(self.layer(x)) * (more or {}).get("factor", 1.0)
        return {"y": y, "name": name, "x": (x, None)}


@pytest.mark.parametrize("policy", POLICIES)
def test_inputs_and_outputs_may_be_nested_and_no_tensors(policy: Any) -> None:
    model = nn.ModuleList([Odd(), Odd()])
    x = torch.randn(3, 4, requires_grad=True)

    def run() -> list[Tensor]:
        out = model[1]((model[0]((x, "a"))["y"], "b"), more={"factor": torch.tensor(2.0)})
        assert out["name"] == "b"
        if policy != "selective":  # PyTorch goes backward through it once
            out["y"].sum().backward(retain_graph=True)
        out["y"].sum().backward()
        return [x.grad.clone(), *(param.grad.clone() for param in model.parameters())]  # type: ignore[union-attr]

    expected = run()
    model.zero_grad()
    x.grad = None
    checkpoint_activations(model, ActivationCheckpointing(policy=policy))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(run(), expected, strict=True))


class Sized(nn.Module):
    """Is given a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, size: torch.Size) -> Tensor:
        assert size.numel() == x.numel()  # a tuple has none
        return torch.tanh(self.layer(x)).view(size)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_size_among_the_inputs_stays_one(policy: Any) -> None:
    model = nn.ModuleList([Sized(), Sized()])
    checkpoint_activations(model, ActivationCheckpointing(policy=policy))
    x = torch.randn(3, 4, requires_grad=True)
    model[0](x, x.shape).sum().backward()
    assert x.grad is not None


def test_modules_are_chosen_by_class_or_found() -> None:
    model = Model(3)
    model.nested = nn.Sequential(Odd(), nn.Sequential(Odd(), Odd()))
    choose = lambda **options: checkpoint_activations(model, ActivationCheckpointing(**options))  # noqa: E731
    assert choose() == [*model.blocks, *model.nested[1]]
    assert choose(every=2) == [model.blocks[0], model.blocks[2], model.nested[1][1]]
    assert choose(modules=["Odd", Block]) == [model.nested[0], *model.nested[1], *model.blocks]
    assert checkpoint_activations(model, None) == []
    assert all("forward" not in vars(module) for module in model.modules())
    with pytest.raises(ValueError, match="`activation_checkpointing` names `Blok`.*Did you mean|`Block`"):
        choose(modules=["Blok"])
    with pytest.raises(ValueError, match=r"^`activation_checkpointing=\[\]` names no class. Name some"):
        choose(modules=[])
    with pytest.raises(ValueError, match="`Linear` has no repeated blocks to checkpoint. Name classes"):
        checkpoint_activations(nn.Linear(2, 2), ActivationCheckpointing())


def test_a_copy_of_a_model_checkpoints_its_own_modules() -> None:
    model = Model(2)
    checkpoint_activations(model, ActivationCheckpointing(policy="offload"))
    other = copy.deepcopy(model)
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    tokens = torch.randint(0, 13, (1, 4))
    assert not other(tokens).any()
    assert model(tokens).any()
    other(tokens).sum().backward()
    assert all(param.grad is None for param in model.parameters())


def test_an_error_in_a_forward_leaves_nothing_behind() -> None:
    model = Model(2)
    checkpoint_activations(model, ActivationCheckpointing(policy="offload"))
    with pytest.raises(IndexError):
        model(torch.tensor([[99]]))
    model(torch.tensor([[1, 2]])).sum().backward()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget_bytes": 1}, "budget_bytes=1, policy='full'.`: the budget is a number of bytes"),
        (
            {"budget_bytes": -1, "policy": "auto"},
            "budget_bytes=-1, policy='auto'.`: the budget is a number of bytes",
        ),
        ({"policy": "some"}, "policy='some'.` is not known. Use 'full', 'selective', 'offload', 'partition' or 'auto'"),
        ({"every": 0}, "every=0.` must be a number of modules"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ActivationCheckpointing(**options)


# -- Through the Trainer -----------------------------------------------------------------------------------------------


def _fit(rank: int, world: int) -> None:
    plain = trainer(rank, world, 3, max_epochs=1)
    plain.fit(seeded(Net), loader(rank, world))
    for option in (True, ["Block"], {"policy": "selective"}, ActivationCheckpointing(policy="offload")):
        fitted = trainer(rank, world, ZeroStrategy(stage=3, activation_checkpointing=option), max_epochs=1)
        fitted.fit(seeded(Net), loader(rank, world))
        assert_equal(weights(fitted), weights(plain))
        blocks = fitted.lightning_module.blocks
        assert all("forward" in vars(block) for block in blocks)
    again = trainer(rank, world, ZeroStrategy(stage=3), max_epochs=1)
    again.fit(fitted.lightning_module, loader(rank, world))
    assert all("forward" not in vars(block) for block in blocks)
    with pytest.raises(ValueError, match="`activation_checkpointing` names `Nothing`"):
        trainer(rank, world, ZeroStrategy(activation_checkpointing=["Nothing"])).fit(Net(), loader(rank, world))


def test_the_strategy_checkpoints_and_a_later_trainer_does_as_its_own_strategy_says() -> None:
    worlds.run(_fit, 2)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("prefix", [0, 2])
def test_decoders_keep_a_cache_by_default_and_a_recomputation_adds_nothing_to_it(policy: Any, prefix: int) -> None:
    """Keys and values were added to the same cache twice; padded batches failed."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config).train()
    module = copy.deepcopy(plain)
    checkpoint_activations(module, ActivationCheckpointing(policy=policy))
    ids, before = torch.randint(0, 16, (3, 6)), torch.randint(0, 16, (3, prefix))
    mask = torch.ones(3, prefix + 6, dtype=torch.long)
    mask[0, prefix : prefix + 3] = 0
    found = []
    for one in (plain, module):
        cache = transformers.DynamicCache() if prefix else None
        if prefix:
            with torch.no_grad():
                one(input_ids=before, past_key_values=cache)
        output = one(input_ids=ids, attention_mask=mask, past_key_values=cache)
        output.logits.square().mean().backward()
        found.append([output.logits, *(param.grad for param in one.parameters())])
        if prefix:
            assert cache.get_seq_length() == prefix + 6
    assert all(torch.equal(mine, other) for mine, other in zip(*found, strict=True))


# -- Inputs that are changed in place ----------------------------------------------------------------------------------


class _Doubling(nn.Module):
    """Doubles one of its inputs in place, from a call on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.first = first
        self.num_calls = 0

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls > self.first:
            shift.mul_(2.0)
        return self.linear(x + shift).sin()


class _InPlace(nn.Module):
    def __init__(self, first: int) -> None:
        super().__init__()
        self.start = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(_Doubling(first) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        shift = torch.ones_like(x)
        x = self.start(x)
        for block in self.blocks:
            x += block(x, shift)
        return x


def _train_in_place(first: int, eager: tuple[str, ...], deaf_to: str | None = None) -> list[Tensor]:
    with SimulatedDevice(eager, deaf_to) as device:
        worlds.seed()
        model = _InPlace(first).to("cuda")
        checkpoint_activations(model, ActivationCheckpointing(policy="offload"))
        for _ in range(3):
            model(torch.ones(2, 4).to("cuda")).square().mean().backward()
        device.synchronize()
        return [param.grad.cpu() for param in model.parameters() if param.grad is not None]


@pytest.mark.parametrize("first", [0, 100], ids=["inside", "behind"])
@pytest.mark.parametrize("eager", [(), ("compute",), ("others",), ("stream2",)], ids=str)
def test_an_offloaded_input_may_be_changed_in_place(first: int, eager: tuple[str, ...]) -> None:
    """Copies to the host ran beside what changed it, so that a recomputation on a device could find other values."""
    expected = _train_in_place(first, ("compute", "others"))
    for mine, theirs in zip(_train_in_place(first, eager), expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("order", "eager"), [("_hold_back_writes", "compute"), ("_to_device", "stream2")])
def test_an_order_of_an_offload_that_is_not_heard_is_missed(order: str, eager: str) -> None:
    expected = _train_in_place(100, ("compute", "others"))
    found = _train_in_place(100, (eager,), f"wait_event: parallel/activation/checkpointing.py {order}")
    assert not all(map(torch.equal, found, expected))


def test_an_input_on_a_device_that_only_some_forwards_change_in_place_is_refused() -> None:
    with pytest.raises(RuntimeError, match="has changed one of its inputs in place, and the module's forwards before"):
        _train_in_place(1, ())


class Collects(nn.Module):
    """Adds to what it was given: a loss in a dictionary, a list, and its input, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, other: Tensor, kept: dict[str, Any]) -> Tensor:
        x.mul_(2.0)
        y: Tensor = self.layer((x + other).tanh())
        kept["loss"] = kept["loss"] + 3.0 * y.mean()
        kept["outputs"].append(y)
        return y


def _gradients_of_collected(policy: str | None) -> list[Tensor]:
    torch.manual_seed(0)
    blocks = nn.ModuleList(Collects() for _ in range(3))
    if policy is not None:
        checkpoint_activations(blocks, ActivationCheckpointing(modules=["Collects"], policy=policy))
    start = torch.randn(2, 4, requires_grad=True)
    kept: dict[str, Any] = {"loss": torch.zeros(()), "outputs": []}
    hidden = start * 1.0
    for block in blocks:
        hidden = block(hidden, hidden, kept)
    (hidden.sum() + kept["loss"] + sum(one.sum() for one in kept["outputs"])).backward()
    return [start.grad, *(param.grad for param in blocks.parameters())]


def test_an_offloaded_module_may_fill_what_it_is_given_and_write_into_an_input_that_it_has_twice() -> None:
    for mine, plain in zip(_gradients_of_collected("offload"), _gradients_of_collected(None), strict=True):
        torch.testing.assert_close(mine, plain)
