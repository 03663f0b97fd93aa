"""Strict YAML: a file as frozen dataclasses, or one line that says what is wrong with it and where.

pydantic checks keys and types; this module turns its first finding into the one line.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from .errors import SuiteError

T = TypeVar("T")


def read_yaml(path: Path) -> dict[str, Any]:
    """The content of a YAML file that holds a mapping.

    Raises:
        SuiteError: not YAML, or no mapping.
    """
    import yaml

    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_loader())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SuiteError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise SuiteError(f"{path}: must be a mapping of keys, got {_shown(content)}")
    return content


@functools.cache
def _loader() -> type:
    import yaml

    class Loader(yaml.SafeLoader):
        """Safe YAML that reads 2e-3 as a number (as YAML 1.2 does) and refuses a key given twice."""

        def construct_mapping(self, node, deep=False):
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            for key in keys:
                if keys.count(key) > 1:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key!r} is given twice", node.start_mark
                    )
            return super().construct_mapping(node, deep)

    pattern = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", pattern, list("-+0123456789"))
    return Loader


def build(cls: type[T], content: dict[str, Any], path: Path) -> T:
    """``content`` of the file at ``path`` as an instance of the dataclass ``cls``.

    Raises:
        SuiteError: an unknown key, a wrong type, or a value that ``cls`` refuses.
    """
    from pydantic import TypeAdapter, ValidationError

    # As JSON, where a list may be a tuple, and a key is text whatever YAML made of it.
    text = json.dumps(content, default=str)
    try:
        return TypeAdapter(cls).validate_json(text, strict=True)
    except ValidationError as error:
        # A wrong key matters more than what is missing because of it.
        order = {"extra_forbidden": 0, "unexpected_keyword_argument": 0}
        first = min(error.errors(), key=lambda e: order.get(e["type"], 1))
        same_place = [e for e in error.errors() if _plain(cls, e["loc"]) == _plain(cls, first["loc"])]
        raise SuiteError(f"{path}: {_in_words(cls, first, same_place)}") from None


def _in_words(cls: type, error: dict[str, Any], same_place: list[dict[str, Any]]) -> str:
    loc = _plain(cls, error["loc"])
    where = _joined(loc)
    kind = error["type"]
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        known = [field.name for field in dataclasses.fields(_class_at(cls, loc[:-1]))]
        near = difflib.get_close_matches(str(loc[-1]), known, 1)
        hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
        return f"{where}: unknown key; {hint}"
    if kind in ("missing", "missing_argument"):
        return f"{where}: missing; it has no default"
    if kind == "value_error":
        return f"{where}.{error['ctx']['error']}" if where else str(error["ctx"]["error"])
    if kind == "dataclass_type":
        return f"{where}: must be a mapping of keys, got {_shown(error['input'])}"
    wanted = dict.fromkeys(_wanted(one) for one in same_place)
    if _is_optional(cls, loc):
        wanted["null"] = None
    return f"{where}: must be {' or '.join(wanted)}, got {_shown(error['input'])}"


def _wanted(error: dict[str, Any]) -> str:
    name = error["type"].removesuffix("_type").removesuffix("_parsing")
    names = {"int_from_float": "int", "string": "str", "literal_error": "one of the known words"}
    return names.get(name, name)


def _joined(loc: Sequence[str | int]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")


def _plain(cls: type, loc: Sequence[str | int]) -> tuple[str | int, ...]:
    """``loc`` without the names of a union's members, which pydantic puts in."""
    plain: list[str | int] = []
    for part in loc:
        if isinstance(part, int) or _step(_type_at(cls, plain), part) is not None:
            plain.append(part)
        elif dataclasses.is_dataclass(_type_at(cls, plain)) and part == loc[-1]:
            plain.append(part)  # an unknown key
    return tuple(plain)


def _type_at(cls: Any, loc: Sequence[str | int]) -> Any:
    for part in loc:
        cls = _step(cls, part)
    return cls


def _class_at(cls: Any, loc: Sequence[str | int]) -> type:
    found = _type_at(cls, loc)
    return next(one for one in _members(found) if dataclasses.is_dataclass(one))


def _step(hint: Any, part: str | int) -> Any:
    """The type of a key or an element, or None if there is none."""
    for one in _members(hint):
        origin, arguments = typing.get_origin(one), typing.get_args(one)
        if dataclasses.is_dataclass(one):
            hints = typing.get_type_hints(one)
            if part in {field.name for field in dataclasses.fields(one)}:
                return hints[part]
        elif (origin is list and isinstance(part, int)) or (origin is dict and isinstance(part, str)):
            return arguments[-1]
    return None


def _members(hint: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return tuple(o for o in typing.get_args(hint) if o is not type(None)) if is_union else (hint,)


def _is_optional(cls: type, loc: Sequence[str | int]) -> bool:
    return type(None) in typing.get_args(_type_at(cls, loc))


def _shown(value: Any) -> str:
    return f"{value!r} ({type(value).__name__})"
