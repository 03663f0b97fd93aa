"""Strict YAML: reads a file as frozen dataclasses, or raises a one-line error.

pydantic validates keys and types; the line contains the file, the key and pydantic's message.
"""

import dataclasses
import functools
import json
import re
import typing
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union

from ..common.bounds import Must
from ..common.errors import did_you_mean
from .errors import SuiteError

T = TypeVar("T")
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_MISSING = ("missing", "missing_argument")


def parse_yaml(text: str | bytes, path: Path) -> dict[str, Any]:
    """The mapping parsed from the YAML ``text``, in JSON's types; errors name ``path``."""
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
        """Safe YAML that reads 2e-3 as a number (as YAML 1.2 does), and 2e5 as an integer. Duplicate keys are
        errors, and so are aliases, because a few lines of aliases can expand to gigabytes."""

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
    """One line for pydantic's findings: the first one, except that an unknown key precedes the key that is
    missing because of the misspelling. The members of a union each have a finding of the same key."""
    unknown = [error for error in errors if error["type"] in _UNKNOWN]
    error = (unknown or errors)[0]
    where = _key_path(content, error)
    if unknown:
        known = re.findall(r"\b[a-z_]\w*", " ".join(row[0] for row in _key_rows(cls)))
        return f"{where}: unknown key{did_you_mean(error['loc'][-1], known)}"
    if error["type"] in _MISSING:
        return f"{where}: missing; the key has no default"
    if error["type"] == "value_error":  # of a __post_init__, which names the key inside
        return f"{where}.{error['ctx']['error']}".lstrip(".")
    messages = [other["msg"] for other in errors if _key_path(content, other) == where]
    wanted = " or ".join(dict.fromkeys(message.removeprefix("Input should be ") for message in messages))
    near = did_you_mean(error["input"], re.findall("'(.+?)'", wanted))
    return f"{where}: must be {wanted}, got {error['input']!r}{near}"


def _key_path(content: Any, error: dict[str, Any]) -> str:
    """The key of a finding, such as ``grid[0].size``. pydantic's location also names members of unions,
    which are no keys of the file."""
    path = ""
    for part in error["loc"]:
        try:
            content = content[part]
        except (KeyError, IndexError, TypeError):
            if error["type"] not in _MISSING:
                continue
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.lstrip(".")


def key_table(cls: type) -> str:
    """A table in Markdown of the keys of a file of this dataclass: meaning, valid values and default."""
    rows = [("key", "meaning", "value", "default"), ("---",) * 4, *_key_rows(cls)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _key_rows(cls: Any, where: str = "") -> Iterator[tuple[str, str, str, str]]:
    """The rows of :func:`key_table`. The meaning of a key is the first sentence of its entry under
    ``Attributes`` in the docstring of the class or of a base."""
    hints = typing.get_type_hints(cls, include_extras=True)
    meanings = {
        name: " ".join(text.split()).partition(". ")[0].rstrip(".")
        for base in reversed(cls.__mro__)
        for _, name, text in re.findall(r"^( +)(\w+): (.+(?:\n\1    .+)*)", base.__doc__ or "", re.M)
    }
    for field in dataclasses.fields(cls):
        hint, key = hints[field.name], where + field.name
        parts = [part for part in (hint, *typing.get_args(hint)) if isinstance(part, type)]
        if inside := next(filter(dataclasses.is_dataclass, parts), None):
            yield from _key_rows(
                inside, key + {list: "[].", dict: ".NAME."}.get(typing.get_origin(hint), ".")
            )
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        shown = "required" if default is dataclasses.MISSING else f"`{json.dumps(default)}`"
        yield f"`{key}`", meanings.get(field.name, ""), _words_of(hint), shown


_TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}


def _words_of(hint: Any) -> str:
    """What a value of a type must be."""
    bounds = [one.words for one in getattr(hint, "__metadata__", ()) if isinstance(one, Must)]
    plain = hint.__origin__ if bounds else hint
    origin, inner = typing.get_origin(plain), typing.get_args(plain)
    if origin is list:
        return f"{['a list', *bounds][-1]}, each {_words_of(inner[0])}"
    if origin is Literal:
        return " or ".join(f"`{word}`" for word in inner)
    if origin in (Union, UnionType) and not bounds:
        return " or ".join(map(_words_of, inner))
    return [_TYPES.get(plain, "a mapping of keys"), *bounds][-1]
