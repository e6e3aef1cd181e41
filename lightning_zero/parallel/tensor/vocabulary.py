"""The embedding of tokens and the head, which are cut by rows of the vocabulary."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn

from lightning_zero.parallel.tensor.plan import Cut, Rule, TensorPlan

__all__ = ["is_vocabulary_rule", "vocabulary_plan"]


def vocabulary_plan(module: nn.Module, size: int, blocks: Collection[str]) -> tuple[TensorPlan, str]:
    """Return the rules of the embedding of tokens and the heads, and a sentence if the vocabulary stays whole.

    The embedding is the one whose number of rows is that of a linear layer's output features, else the largest.

    Args:
        module: The model.
        size: Number of ranks.
        blocks: Names of the blocks, which have none.
    """
    outside = {
        name: child
        for name, child in module.named_modules(remove_duplicate=False)
        if not any(name == block or name.startswith(f"{block}.") for block in blocks if block)
    }
    embeddings = {name: child for name, child in outside.items() if isinstance(child, nn.Embedding)}
    heads = {name: child for name, child in outside.items() if isinstance(child, nn.Linear)}
    if not embeddings:
        return TensorPlan({}), ""
    widths = {head.out_features for head in heads.values()}
    chosen = max(embeddings.values(), key=lambda one: (one.num_embeddings in widths, one.num_embeddings))
    rows = chosen.num_embeddings
    if rows % size:
        return TensorPlan({}), f"the vocabulary of {rows} tokens stays whole, because {size} ranks do not divide it"
    rules: dict[str, Rule] = {}
    cut: set[nn.Module] = set()
    for name, child in embeddings.items():
        if child.weight is chosen.weight:
            rules[name] = "vocab"
            cut.add(child)
    for name, head in heads.items():
        if head.out_features == rows and (head.weight is chosen.weight or not _is_tied(module, head.weight, name)):
            rules[name] = "column_gather"
            cut.add(head)
    rules.update(_other_names(module, cut))
    return TensorPlan(rules), ""


def is_vocabulary_rule(rule: Rule) -> bool:
    """Say whether a rule outside of the blocks cuts the vocabulary."""
    return rule in ("vocab", "column_gather")


def _is_tied(module: nn.Module, weight: Tensor, name: str) -> bool:
    return any(
        param is weight and other != f"{name}.weight"
        for other, param in module.named_parameters(remove_duplicate=False)
    )


def _other_names(module: nn.Module, cut: Collection[nn.Module]) -> dict[str, Rule]:
    """Return rules for other names of the parameters of cut modules, such as a bias that the head shares."""
    params = {id(param) for child in cut for param in child.parameters(recurse=False)}
    return {
        name: Cut(0)
        for name, param in module.named_parameters(remove_duplicate=False)
        if id(param) in params and module.get_submodule(name.rpartition(".")[0]) not in cut
    }
