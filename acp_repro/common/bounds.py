"""Bounds of settings, declared in their types: ``Annotated[float, within("[0, 1)")]`` or ``Literal``.

pydantic validates the bounds of a suite file and quotes their descriptions in its errors. The methods depend
on torch alone, so their settings use :func:`check`. This module uses only the standard library.
"""

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import did_you_mean

T = TypeVar("T")


@dataclass(frozen=True)
class Must:
    """A bound: ``words`` describe valid values, ``holds`` tests a value, ``known`` names are suggested."""

    words: str
    holds: Callable[[Any], bool]
    known: tuple[str, ...] = ()

    def ask(self, name: str, value: Any, otherwise: str = "") -> None:
        """Raises ValueError, whose message begins with ``name``, if ``value`` violates the bound."""
        if not self.holds(value):
            near = did_you_mean(value, self.known)
            raise ValueError(f"{name}: must be {self.words}{otherwise}, got {value!r}{near}")

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        from pydantic_core import PydanticCustomError, core_schema

        def validate(value: Any) -> Any:
            if not self.holds(value):
                raise PydanticCustomError("must", "{words}", {"words": self.words})
            return value

        return core_schema.no_info_after_validator_function(validate, handler(source))


def number(words: str, holds: Callable[[float], bool], kind: Any = int | float) -> Must:
    """The bound of a number, not a bool, for which ``holds`` is true."""
    return Must(words, lambda x: isinstance(x, kind) and not isinstance(x, bool) and holds(x))


def whole(least: int) -> Must:
    """The bound of a whole number of at least ``least``."""
    return number(f"a whole number of at least {least}", lambda x: x >= least, int)


def within(interval: str) -> Must:
    """The bound of a number in an interval such as ``[0, 1)``; a square bracket includes its end."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = operator.ge if interval[0] == "[" else operator.gt
    below = operator.le if interval[-1] == "]" else operator.lt
    return number(f"a number in {interval}", lambda x: above(x, low) and below(x, high))


Count = Annotated[int, whole(1)]
CountFrom0 = Annotated[int, whole(0)]
Seed = Annotated[int, number("a whole number from 0 to 2^63 - 1", lambda x: 0 <= x < 2**63, int)]
Finite = Annotated[float, number("a finite number", math.isfinite)]
Positive = Annotated[float, number("a finite number above 0", lambda x: 0 < x < math.inf)]
PositiveOrInf = Annotated[float, number("a number above 0", lambda x: x > 0)]
NotNegative = Annotated[float, number("a finite number of at least 0", lambda x: 0 <= x < math.inf)]
Share = Annotated[float, within("[0, 1]")]
ShareBelow1 = Annotated[float, within("[0, 1)")]
Axis = Annotated[
    list[T],
    Must("a list of different values", lambda x: len(set(x)) == len(x)),
    Must("a non-empty list of different values", len),
]


def one_of(*known: str) -> Must:
    """The bound of one of several strings, as in ``Literal``."""
    *first, last = known
    words = f"{', '.join(first)} or {last}" if first else last
    return Must(words, lambda x: isinstance(x, str) and x in known, known)


def check(settings: Any) -> None:
    """Checks the bounds of a dataclass's fields; raises ValueError, which begins with the field's name."""
    for name, optional, bounds in _bounds(type(settings)):
        value = getattr(settings, name)
        for must in () if optional and value is None else bounds:
            must.ask(name, value, ", or None" if optional else "")


@functools.cache
def _bounds(cls: type) -> list[tuple[str, bool, list[Must]]]:
    """(name, whether None is valid, bounds) of each field."""
    found = []
    for name, hint in get_type_hints(cls, include_extras=True).items():
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        bounds = [must for kind in kinds for must in getattr(kind, "__metadata__", ())]
        bounds += [one_of(*get_args(kind)) for kind in kinds if get_origin(kind) is Literal]
        bounds += [Must("true or false", lambda x: isinstance(x, bool))] if bool in kinds else []
        found.append((name, NoneType in kinds, bounds))
    return found
