"""Names of a package that load on first use, so that importing the package costs nothing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping


def names(package: str, home: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` for a package's ``__init__``.

    Args:
        package: its ``__name__``.
        home: each name with the module of the package that has it.
    """

    def load(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{home[name]}", package), name)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted({*vars(sys.modules[package]), *home})
