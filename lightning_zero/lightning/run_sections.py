"""Sections of a configuration of ``LightningCLI``, and the objects that they stand for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser, get_loader
from jsonargparse.typing import Path_fr
from torch import nn

from lightning_zero.lightning.first_batch import first_batch
from lightning_zero.lightning.forecast_options import seeded

__all__ = ["RunSections", "named"]

_ENTRY = ("class_path", "init_args", "dict_kwargs")


@dataclass(frozen=True, kw_only=True)
class RunSections:
    """A configuration, and the classes that a program gives to ``LightningCLI``.

    Attributes:
        path: Its file; None without one.
        content: Its sections.
        module: Class or function of ``model`` where the section has only its arguments, ``package.module:name``.
        data: Likewise, of ``data``.
    """

    path: Path | None
    content: Mapping[str, Any]
    module: str | None
    data: str | None

    @classmethod
    def read(cls, command: str, run: Path | None, *, module: str | None, data: str | None) -> RunSections:
        """Read a configuration.

        Args:
            command: Name of the command, for errors.
            run: The configuration.
            module: See the attribute; without a configuration it is called without arguments.
            data: Likewise.

        Raises:
            ValueError: There is neither a configuration nor a module, or the file is no configuration.
        """
        if run is None and module is None:
            raise ValueError(f"`{command}` needs a model: give `--config=run.yaml` or `--module=package.module:name`.")
        content = {} if run is None else _read_yaml(run)
        if not isinstance(content, dict):
            raise ValueError(f"`{run}` is no configuration of a run: it has no `model`.")
        return cls(path=run, content=content, module=module, data=data)

    def section(self, key: str) -> Mapping[str, Any]:
        """Return a section, which may be a file beside the configuration; an empty one if it is missing or null.

        Raises:
            ValueError: It is something else.
        """
        found = self.content.get(key)
        if isinstance(found, str) and self.path is not None and (self.path.parent / found).is_file():
            found = _read_yaml(self.path.parent / found)
        if not (found is None or isinstance(found, Mapping)):
            raise ValueError(
                f"`{key}: {self.content[key]}` of `{self.path}` is neither a section nor a file beside the"
                " configuration. Write the section there."
            )
        return found or {}

    def model(self) -> Callable[[], nn.Module]:
        """Return a function that makes the model.

        Raises:
            ValueError: Its class is not known, or does not take these arguments.
        """
        entry = self._entry("model", self.module, "--module")
        if entry is None:
            raise ValueError(
                f"`{self.path}` has no `model` with a `class_path`. Add one, or name the class that the program gives"
                " to `LightningCLI`, or a function that builds the model: `--module=package.module:name`."
            )
        make = self.maker("model", entry)

        def make_model() -> nn.Module:
            model = make()
            if not isinstance(model, nn.Module):
                raise TypeError(
                    f"`{entry['class_path']}` gives a `{type(model).__name__}`. Name one that gives an `nn.Module`."
                )
            return model

        return make_model

    def batch(self) -> Any:
        """Return the first training batch of the data module, the same one every time; None without one.

        Raises:
            ValueError: The class of the data module is not known, or it gives no batch.
        """
        entry = self._entry("data", self.data, "--data")
        if entry is None and self.content.get("data") is not None:
            raise ValueError(
                f"`data` of `{self.path}` has no `class_path`. Add that of the data module, name its class with"
                " `--data=package.module:name`, or take `data` out: without it the model's `example_input_array` is"
                " used."
            )
        if entry is None:
            return None
        with seeded():
            data = self.maker("data", entry)()
            if not callable(getattr(data, "train_dataloader", None)):
                raise ValueError(f"`data` is a `{type(data).__name__}`. Name a `LightningDataModule`.")
            try:
                data.prepare_data()
                data.setup("fit")
                return first_batch(data.train_dataloader())
            except Exception as error:
                raise ValueError(
                    f"`{type(data).__name__}` gives no batch without a Trainer ({type(error).__name__}: {error}). Mend"
                    " it, or take `data` out: without it the model's `example_input_array` is used."
                ) from error

    def _entry(self, key: str, named: str | None, option: str) -> Mapping[str, Any] | None:
        """Return the class of a section and its arguments, as ``class_path`` and ``init_args``."""
        section = self.content.get(key)
        if isinstance(section, str) and named is None:  # with a class, it is the file of a section
            section = {"class_path": section}
        has_class = isinstance(section, Mapping) and "class_path" in section
        if named is None:
            return section if has_class else None
        if has_class:
            raise ValueError(f"`{key}` of `{self.path}` has a `class_path` already. Leave `{option}={named}` out.")
        return {"class_path": named, "init_args": section}

    def maker(self, key: str, entry: Mapping[str, Any], *, skip: frozenset[str] = frozenset()) -> Callable[..., Any]:
        """Return a function that makes the object of a section, whose arguments are parsed as ``LightningCLI`` does.

        Args:
            key: The section, for errors.
            entry: ``class_path``, ``init_args`` and ``dict_kwargs``.
            skip: Arguments that the function is called with.

        Raises:
            ValueError: The class cannot be imported, or does not take these arguments.
        """
        unknown = [name for name in entry if name not in _ENTRY]
        if unknown:
            raise ValueError(f"`{key}` has `{unknown[0]}` beside `class_path`. Put it into its `init_args`.")
        path = entry["class_path"]
        make, given, more = named(path), entry.get("init_args") or {}, entry.get("dict_kwargs") or {}
        parser = ArgumentParser(exit_on_error=False)
        parsed = None
        if given:
            add = parser.add_class_arguments if isinstance(make, type) else parser.add_function_arguments
            options = {"instantiate": False} if isinstance(make, type) else {}
            try:
                add(make, key, fail_untyped=False, sub_configs=True, skip=set(skip), **options)
                with nullcontext() if self.path is None else Path_fr(self.path).relative_path_context():
                    parsed = parser.parse_object({key: given})
            except (ArgumentError, TypeError, ValueError) as error:
                raise ValueError(f"`{path}` does not take these arguments: {' '.join(str(error).split())}") from error

        def make_one(*positional: Any) -> Any:
            try:
                arguments = {} if parsed is None else vars(_instantiated(parser, parsed)[key])
                return make(*positional, **arguments, **more)
            except (RuntimeError, ValueError, OSError):
                raise
            except Exception as error:
                raise ValueError(
                    f"`{path}` cannot be made: {type(error).__name__}: {error}. Its arguments are"
                    f" {', '.join(f'`{name}`' for name in {**given, **more}) or 'none'}."
                ) from error

        return make_one


def _read_yaml(path: Path) -> Any:
    """Return the content of a configuration as ``LightningCLI`` reads it: ``1e-4`` is a number.

    Raises:
        ValueError: The file is no YAML.
    """
    try:
        return get_loader("yaml")(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise ValueError(f"`{path}` is no YAML: {place}{getattr(error, 'problem', None) or error}.") from error


def named(path: str) -> Any:
    """Return a class or function by ``package.module:name`` or ``package.module.name``."""
    package, _, name = str(path).replace(":", ".").rpartition(".")
    try:
        return getattr(importlib.import_module(package), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"`{path}` cannot be imported ({error}). Use `package.module:name`.") from error


def _instantiated(parser: ArgumentParser, parsed: Any) -> Any:
    """Make the objects inside of arguments; `instantiate_classes` is deprecated since jsonargparse 4.49."""
    return (parser.instantiate if hasattr(parser, "instantiate") else parser.instantiate_classes)(parsed)
