"""Names of a package that load on first use, so that importing the package costs nothing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping


def names(package: str, home: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` for a package's ``__init__``.

    Args:
        package: its ``__name__``.
        home: each name with the module of the package that has it; empty if the name is a module itself.
    """

    def load(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f".{home[name] or name}", package)
        return getattr(module, name) if home[name] else module

    return load, lambda: sorted({*vars(sys.modules[package]), *home})
