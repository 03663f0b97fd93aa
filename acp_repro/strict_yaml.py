"""Strict YAML: a file as frozen dataclasses, or one line that says what is wrong with it and where."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

import yaml

T = TypeVar("T")


class SuiteError(ValueError):
    """A suite file is wrong; the message is one line with file, key and the fix."""


def load_as(cls: type[T], path: Path) -> T:
    """The YAML file at ``path`` as an instance of the dataclass ``cls``.

    Raises:
        SuiteError: not YAML, an unknown key, a wrong type, or a value that ``cls`` refuses.
    """
    try:
        content = yaml.load(path.read_text(), Loader=_Loader)
    except yaml.YAMLError as error:
        raise SuiteError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    return _build(cls, content, str(path), "")


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads 2e-3 as a number (as YAML 1.2 does) and refuses a key given twice."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", node.start_mark
                )
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def _build(cls, content: Any, file: str, where: str):
    """``content`` as an instance of the dataclass ``cls``, every key and type checked."""
    label = f"{file}: {where}" if where else file
    if not isinstance(content, dict):
        raise SuiteError(f"{label}: must be a mapping of keys, got {_shown(content)}")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    prefix = f"{where}." if where else ""
    for key in content:
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, 1)
            hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(fields)}"
            raise SuiteError(f"{file}: {prefix}{key}: unknown key; {hint}")
    values = {}
    for name, one in fields.items():
        if name in content:
            values[name] = _convert(hints[name], content[name], file, prefix + name)
        elif one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING:
            raise SuiteError(f"{file}: {prefix}{name}: missing; it has no default")
    try:
        return cls(**values)
    except ValueError as error:
        raise SuiteError(f"{file}: {prefix}{error}") from None


def _convert(hint, value, file: str, where: str):
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, file, where)
    if origin is list and isinstance(value, list):
        return [_convert(arguments[0], x, file, f"{where}[{i}]") for i, x in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {str(k): _convert(arguments[1], x, file, f"{where}.{k}") for k, x in value.items()}
    options = arguments if origin in (typing.Union, types.UnionType) else (hint,)
    for option in options:
        if dataclasses.is_dataclass(option) and isinstance(value, dict):
            return _build(option, value, file, where)
        option = typing.get_origin(option) or option
        if option is tuple and isinstance(value, list):
            return tuple(value)
        if option is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        if isinstance(value, option) and (option is bool or not isinstance(value, bool)):
            return value
    names = " or ".join("null" if o is type(None) else getattr(o, "__name__", str(o)) for o in options)
    raise SuiteError(f"{file}: {where}: must be {names}, got {_shown(value)}")


def _shown(value: Any) -> str:
    return f"{value!r} ({type(value).__name__})"
