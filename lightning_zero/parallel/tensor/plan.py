"""Plans of tensor parallelism: name patterns of modules and parameters, and the way in which each is cut."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from lightning_zero.errors import nearest
from lightning_zero.option_checks import checked_fields, from_fields

__all__ = ["Cut", "CutArgument", "Packed", "Rule", "SequenceWord", "TensorParallel", "TensorPlan", "Word", "matches"]

Word = Literal["column", "row", "vocab", "partial", "column_gather", "row_split", "attention", "experts"]
SequenceWord = Literal["scatter", "gather", "copy"]
WORDS = get_args(Word)
_RULE_USE = f"Use {', '.join(repr(word) for word in WORDS)}, `Packed(...)` or `Cut(...)`."


@dataclass(frozen=True)
class Packed:
    """A column layer that computes several tensors at once, each of which is divided over the ranks.

    Args:
        sections: Sizes of their output features in order, for example those of query, key and value; or the number of
            equal ones.
    """

    sections: int | Sequence[int] = 3

    def __post_init__(self) -> None:
        object.__setattr__(self, "sections", _checked_sections("Packed", self.sections))


@dataclass(frozen=True)
class Cut:
    """A parameter that is cut along a dimension.

    Args:
        dim: The dimension; -1 is the last.
        sections: As in ``Packed``, along this dimension.
    """

    dim: int
    sections: int | Sequence[int] = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "sections", _checked_sections("Cut", self.sections))


@dataclass(frozen=True)
class CutArgument:
    """An argument of a module that has a part for every head, of which a rank takes those of its own heads.

    Args:
        dim: The dimension of the heads.
        heads: Number of heads of the whole model. The dimension may hold them several times, one sample behind the
            other, as ALiBi's ``(batch * heads, 1, length)`` does.
    """

    dim: int
    heads: int


Rule = Word | Packed | Cut


@dataclass(frozen=True)
class TensorPlan:
    """Says by name patterns which modules and parameters are cut, and how. ``*`` stands for one part of a name.

    Args:
        rules: By pattern of a module or a parameter: ``"column"`` (output features are divided), ``"row"`` (input
            features are divided, results are summed), ``Packed([...])``, ``"column_gather"`` and ``"row_split"`` (the
            same with whole tensors outside), ``"vocab"`` (an embedding, by rows), ``"attention"``
            (``nn.MultiheadAttention``), ``"experts"`` (a module with cut matrices whose results are summed),
            ``"partial"`` (whole on every rank, the gradient is a sum over the ranks), ``Cut(dim)`` (a parameter).
        divided: By pattern of a module: its integers that are divided by the number of ranks, for example
            ``["num_heads"]`` or ``["config.num_attention_heads"]``, for which the module gets a configuration of its
            own.
        arguments: By pattern of a module: its arguments, by name or position, of which every rank takes a part.
        sequence: For sequence parallelism, by pattern of a module and name or position of an argument: ``"scatter"``
            (hidden states that enter a list of blocks; its last block gathers them), ``"gather"`` (hidden states that
            enter a region), ``"copy"`` (another argument that column layers of the region read).
    """

    rules: Mapping[str, Rule]
    divided: Mapping[str, Sequence[str]] = field(default_factory=dict, kw_only=True)
    arguments: Mapping[str, Mapping[str | int, CutArgument]] = field(default_factory=dict, kw_only=True)
    sequence: Mapping[str, Mapping[str | int, SequenceWord]] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.rules, Mapping):
            raise TypeError(f"`TensorPlan(rules={self.rules!r})` must be a dict of name patterns to rules. {_RULE_USE}")
        rules = {pattern: _checked_rule(pattern, rule) for pattern, rule in self.rules.items()}
        divided = {pattern: _checked_names(pattern, names) for pattern, names in self.divided.items()}
        arguments = {
            pattern: {_position(key): _checked_argument(pattern, key, rule) for key, rule in given.items()}
            for pattern, given in self.arguments.items()
        }
        sequence = {
            pattern: {_position(key): _checked_word(pattern, key, word) for key, word in given.items()}
            for pattern, given in self.sequence.items()
        }
        object.__setattr__(self, "sequence", sequence)
        object.__setattr__(self, "rules", rules)
        object.__setattr__(self, "divided", divided)
        object.__setattr__(self, "arguments", arguments)

    @property
    def patterns(self) -> list[str]:
        """All name patterns."""
        return [*self.rules, *self.divided, *self.arguments, *self.sequence]

    @property
    def as_yaml(self) -> dict[str, Any]:
        """The plan as in YAML: its rules alone if it has no other table."""
        rules = {pattern: _to_yaml(rule) for pattern, rule in self.rules.items()}
        tables: dict[str, Any] = {
            "divided": {pattern: list(names) for pattern, names in self.divided.items()},
            "arguments": {
                pattern: {key: asdict(rule) for key, rule in given.items()} for pattern, given in self.arguments.items()
            },
            "sequence": {pattern: dict(given) for pattern, given in self.sequence.items()},
        }
        tables = {name: table for name, table in tables.items() if table}
        return {"rules": rules, **tables} if tables else rules

    def within(self, prefix: str) -> TensorPlan:
        """Return the part of the plan that is about a module, with names relative to it.

        Args:
            prefix: Name of the module.
        """

        def inner(items: Mapping[str, Any]) -> dict[str, Any]:
            cut = ((_behind(pattern, prefix), value) for pattern, value in items.items())
            return {pattern: value for pattern, value in cut if pattern is not None}

        return self._with_names(inner)

    def under(self, prefix: str) -> TensorPlan:
        """Return the plan with ``prefix`` in front of all names."""

        def outer(items: Mapping[str, Any]) -> dict[str, Any]:
            return {".".join(part for part in (prefix, pattern) if part): value for pattern, value in items.items()}

        return self._with_names(outer)

    def on_names(self, names: Iterable[str]) -> TensorPlan:
        """Return the plan with those of ``names`` that a pattern matches in the place of the pattern."""
        known = list(names)

        def spelt_out(items: Mapping[str, Any]) -> dict[str, Any]:
            return {name: one for pattern, one in items.items() for name in known if matches(pattern, name)}

        return self._with_names(spelt_out)

    def _with_names(self, change: Callable[[Mapping[str, Any]], dict[str, Any]]) -> TensorPlan:
        """Return the plan with a function of each of its tables."""
        return TensorPlan(
            change(self.rules),
            divided=change(self.divided),
            arguments=change(self.arguments),
            sequence=change(self.sequence),
        )

    def only(self, is_kept: Callable[[str], bool]) -> TensorPlan:
        """Return the entries whose pattern is kept."""
        return self._with_names(lambda items: {name: one for name, one in items.items() if is_kept(name)})

    def merged(self, other: TensorPlan) -> TensorPlan:
        """Return a plan with the entries of both; those of ``other`` win."""
        return TensorPlan(
            {**self.rules, **other.rules},
            divided={**self.divided, **other.divided},
            arguments={**self.arguments, **other.arguments},
            sequence={**self.sequence, **other.sequence},
        )

    def require_names(self, names: Iterable[str]) -> None:
        """Refuse patterns that match none of ``names``.

        Raises:
            ValueError: One does.
        """
        known = list(names)
        for pattern in self.patterns:
            if not any(matches(pattern, name) for name in known):
                raise ValueError(
                    f"`TensorPlan` names `{pattern}`, but no module or parameter has a name like it."
                    f"{nearest(pattern, known)} `*` stands for one part of a name, as in 'layers.*.mlp.fc1'."
                )


@checked_fields(use={"plan": "Use 'auto', 'model', or `TensorPlan({...})`.", "check": "Use 'refuse' or 'warn'."})
@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """Cuts the matrices of a model over neighbouring ranks, which compute every layer together (arXiv:1909.08053).

    Args:
        size: Ranks of a tensor group. They get the same batches. 1 is no tensor parallelism.
        plan: ``"auto"``: a plan is found by following gradients through each kind of block, and the model's own is
            used where none is found. ``"model"``: the plan that a Hugging Face model brings. Or a ``TensorPlan``.
        sequence: Between the cut layers every rank has a part of the sequence (arXiv:2205.05198).
        vocabulary: Cut the embedding of tokens and the head by rows of the vocabulary, where its size can be divided.
        check: When a block computes something else with the plan than without it: ``"refuse"`` to train, or
            ``"warn"``.
    """

    size: int = 2
    plan: Literal["auto", "model"] | TensorPlan | dict[str, Any] = "auto"
    sequence: bool = False
    vocabulary: bool = True
    check: Literal["refuse", "warn"] = "refuse"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"`TensorParallel(size={self.size!r})` must be a number of ranks, 1 or more.")
        if isinstance(self.plan, dict):
            given = self.plan if "rules" in self.plan else {"rules": self.plan}
            object.__setattr__(self, "plan", from_fields(TensorPlan, given))

    @classmethod
    def of(cls, value: Any) -> TensorParallel | None:
        """Return the option as a config; given are a number of ranks, a dict of fields, a config, or nothing."""
        if value is None or isinstance(value, cls):
            return value
        if isinstance(value, dict):
            return from_fields(cls, value)  # type: ignore[no-any-return]
        return cls(size=value)


def matches(pattern: str, name: str) -> bool:
    """Say whether a name has the form of a pattern, in which ``*`` stands for one part."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name) is not None


def _behind(pattern: str, prefix: str) -> str | None:
    """Return the part of a pattern behind a module's name, or None if it is not about the module."""
    if not prefix:
        return pattern
    depth = prefix.count(".") + 1
    parts = pattern.split(".")
    return ".".join(parts[depth:]) if matches(".".join(parts[:depth]), prefix) else None


def _checked_rule(pattern: str, rule: Any) -> Rule:
    if isinstance(rule, dict) and len(rule) == 1:  # from YAML
        rule = _from_yaml(rule)
    if isinstance(rule, (Packed, Cut)) or (isinstance(rule, str) and rule in WORDS):
        return rule  # type: ignore[return-value]
    if isinstance(rule, str):
        raise ValueError(f"`TensorPlan` has `{pattern}: {rule!r}`.{nearest(rule, WORDS)} {_RULE_USE}")
    raise TypeError(f"`TensorPlan` has `{pattern}: {rule!r}`. {_RULE_USE}")


def _to_yaml(rule: Rule) -> Any:
    if isinstance(rule, str):
        return rule
    sections = rule.sections if isinstance(rule.sections, int) else list(rule.sections)
    if isinstance(rule, Packed):
        return {"packed": sections}
    return {"cut": rule.dim if sections == 1 else {"dim": rule.dim, "sections": sections}}


def _from_yaml(rule: dict[str, Any]) -> Any:
    ((word, value),) = rule.items()
    if word == "packed":
        return Packed(value)
    if word == "cut":
        return Cut(**value) if isinstance(value, dict) else Cut(value)
    return rule


def _checked_sections(owner: str, sections: Any) -> int | tuple[int, ...]:
    if type(sections) is int and sections > 0:
        return sections
    if isinstance(sections, Sequence) and sections and all(type(one) is int and one > 0 for one in sections):
        return tuple(sections)
    raise ValueError(f"`{owner}(sections={sections!r})` must be a number of equal sections, or a list of their sizes.")


def _checked_names(pattern: str, names: Any) -> tuple[str, ...]:
    if isinstance(names, str):
        names = [names]
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"`TensorPlan(divided={{{pattern!r}: {names!r}}})` must be a list of names of integers, for example"
            " ['num_heads']."
        )
    return tuple(names)


def _checked_argument(pattern: str, key: str | int, rule: Any) -> CutArgument:
    if isinstance(rule, dict):
        rule = from_fields(CutArgument, rule)
    if not isinstance(rule, CutArgument):
        raise TypeError(
            f"`TensorPlan(arguments={{{pattern!r}: {{{key!r}: {rule!r}}}}})` must be a `CutArgument`, for example"
            " `CutArgument(dim=1, heads=8)`."
        )
    return rule


def _checked_word(pattern: str, key: str | int, word: Any) -> SequenceWord:
    if word not in get_args(SequenceWord):
        raise ValueError(
            f"`TensorPlan(sequence={{{pattern!r}: {{{key!r}: {word!r}}}}})` is not known. Use 'scatter', 'gather' or"
            " 'copy'."
        )
    return word  # type: ignore[no-any-return]


def _position(key: str | int) -> str | int:
    return int(key) if isinstance(key, str) and key.isdigit() else key
