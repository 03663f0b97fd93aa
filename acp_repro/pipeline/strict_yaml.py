"""Strict YAML: reads a file as frozen dataclasses, or says in one line what is wrong and where.

pydantic checks keys and types; this module turns its first finding into the line.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import typing
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union

from ..common.bounds import Must
from ..common.errors import did_you_mean
from .errors import SuiteError

T = TypeVar("T")
MOST_BYTES = 2**15  # of a suite file; the longest of the project has 8,000
_LIST = "a list"
_NAMES = {  # pydantic's names of types
    "int": "a whole number",
    "int_from_float": "a whole number",
    "float": "a number",
    "string": "text",
    "bool": "true or false",
    "list": _LIST,
    "tuple": _LIST,
    "dict": "a mapping of keys",
    "dataclass": "a mapping of keys",
}
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")


def read_yaml(path: Path) -> dict[str, Any]:
    """The content of a YAML file that holds a mapping, in JSON's types."""
    if (size := path.stat().st_size) > MOST_BYTES:
        raise SuiteError(f"{path}: has {size:,} bytes; a suite has at most {MOST_BYTES:,}")
    return parse_yaml(path.read_bytes(), path)


def parse_yaml(text: str | bytes, path: Path) -> dict[str, Any]:
    """The mapping that ``text`` is in YAML, in JSON's types; ``path`` is for errors."""
    import yaml

    try:
        content = yaml.load(text, Loader=_loader())
        content = json.loads(json.dumps(content, default=str))  # where dates are text
    except Exception as error:  # PyYAML lets many kinds through: of dates, numbers, deep nesting
        words = re.sub('in "<(unicode|byte) string>", ', "in ", " ".join(str(error).split()))
        raise SuiteError(f"{path}: not valid YAML: {words}") from None
    if not isinstance(content, dict):
        raise SuiteError(
            f"{path}: must be a mapping of keys, got {content!r}; begin with a copy of experiments/cpu.yaml"
        )
    return content


@functools.cache
def _loader() -> type:
    import yaml

    class Loader(yaml.SafeLoader):
        """Safe YAML that reads 2e-3 as a number (as YAML 1.2 does), and 2e5 as a whole number. A key given
        twice is an error, and so is an alias: a few lines of them stand for gigabytes."""

        def compose_node(self, parent, index):
            if self.check_event(yaml.AliasEvent):
                mark = self.peek_event().start_mark
                raise yaml.composer.ComposerError(None, None, "write it out instead of an alias", mark)
            return super().compose_node(parent, index)

        def construct_mapping(self, node, deep=False):
            keys = Counter(str(self.construct_object(key, deep=True)) for key, _ in node.value)
            for key, times in keys.items():
                if times > 1:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key!r} is given twice", node.start_mark
                    )
            return super().construct_mapping(node, deep)

        def construct_yaml_float(self, node):
            value = super().construct_yaml_float(node)
            is_whole = "e" in node.value.lower() and value.is_integer() and abs(value) < 2**53
            return int(value) if is_whole else value

    Loader.add_constructor("tag:yaml.org,2002:float", Loader.construct_yaml_float)
    pattern = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", pattern, list("-+0123456789"))
    return Loader


@functools.cache
def _adapter(cls: type):
    from pydantic import TypeAdapter, ValidationError

    return TypeAdapter(cls), ValidationError


def build(cls: type[T], content: dict[str, Any], path: Path) -> T:
    """``content`` of the file at ``path`` as an instance of the dataclass ``cls``."""
    adapter, invalid = _adapter(cls)
    try:  # as JSON, where a list may become a tuple
        return adapter.validate_json(json.dumps(content), strict=True)
    except invalid as error:
        raise SuiteError(f"{path}: {_in_words(cls, content, error.errors())}") from None


def _in_words(cls: type, content: dict[str, Any], errors: list[dict[str, Any]]) -> str:
    """One line for pydantic's findings.

    An unknown key comes before what is missing because of it, and a deeper place before a shallower one. What
    is wrong with a value of the right type comes before other types.
    """
    placed = [(error, _keys(content, error["loc"])) for error in errors]
    error, keys = min(
        placed, key=lambda one: (one[0]["type"] not in _UNKNOWN, -len(one[1]), one[0]["type"] != "must")
    )
    kind = error["type"]
    where = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).lstrip(".")
    if kind in _UNKNOWN:
        known = re.findall(r"\b[a-z_]\w*", " ".join(key for key, _, _ in _key_rows(cls)))
        return f"{where}: unknown key{did_you_mean(keys[-1], known)}"
    if kind in ("missing", "missing_argument"):
        return f"{where}.{error['loc'][-1]}: missing; it has no default".lstrip(".")
    if kind == "value_error":
        return f"{where}.{error['ctx']['error']}".lstrip(".")
    same = [e for e, place in placed if place == keys and (kind != "must" or e["type"] == "must")]
    wanted, value = list(dict.fromkeys(map(_wanted, same))), error["input"]
    if wanted == [_LIST] and not isinstance(value, dict):
        wanted = [f"{_LIST}, such as [{value}]"]
    near = did_you_mean(value, re.findall("'(.+?)'", str(error.get("ctx"))))
    return f"{where}: must be {' or '.join(wanted)}, got {value!r}{near}"


def _wanted(error: dict[str, Any]) -> str:
    name = error["type"].removesuffix("_type").removesuffix("_parsing")
    if name == "must":
        return error["msg"]
    return error["ctx"]["expected"].replace("'", "") if name == "literal_error" else _NAMES.get(name, name)


def _keys(content: Any, loc: Sequence[str | int]) -> list[str | int]:
    """The keys of ``loc`` that are in the file: pydantic also names the members of a union."""
    keys: list[str | int] = []
    for part in loc:
        try:
            content = content[part]
        except (KeyError, IndexError, TypeError):
            continue
        keys.append(part)
    return keys


def key_table(cls: type) -> str:
    """A table in Markdown of the keys of a file of this dataclass: what a value must be, and its default."""
    rows = [("key", "value", "default"), ("---", "---", "---"), *_key_rows(cls)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _key_rows(cls: Any, where: str = "") -> Iterator[tuple[str, str, str]]:
    hints = typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        hint, key = hints[field.name], where + field.name
        parts = [part for part in (hint, *typing.get_args(hint)) if isinstance(part, type)]
        if inside := next(filter(dataclasses.is_dataclass, parts), None):
            yield from _key_rows(
                inside, key + {list: "[].", dict: ".NAME."}.get(typing.get_origin(hint), ".")
            )
            continue
        is_made = field.default_factory is not dataclasses.MISSING
        default = field.default_factory() if is_made else field.default
        shown = "required" if default is dataclasses.MISSING else f"`{json.dumps(default)}`"
        yield f"`{key}`", _words_of(hint), shown


_TYPES = {int: _NAMES["int"], float: _NAMES["float"], bool: _NAMES["bool"], str: "text", NoneType: "null"}


def _words_of(hint: Any) -> str:
    """What a value of a type must be."""
    bounds = [one.words for one in getattr(hint, "__metadata__", ()) if isinstance(one, Must)]
    plain = hint.__origin__ if bounds else hint
    origin, inner = typing.get_origin(plain), typing.get_args(plain)
    if origin is list:
        return f"{[_LIST, *bounds][-1]}: each {_words_of(inner[0])}"
    if origin is Literal:
        return " or ".join(f"`{word}`" for word in inner)
    if origin in (Union, UnionType) and not bounds:
        return " or ".join(map(_words_of, inner))
    return [_TYPES.get(plain, _NAMES["dict"]), *bounds][-1]
