"""Lazy imports: names of a package that load on first use, so that importing the package is fast."""

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping


def names(package: str, home: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` for the ``__init__`` of a package.

    Args:
        package: ``__name__`` of the package.
        home: maps each name to the module that defines it, or to an empty string if the name is a module.
    """

    def load(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f".{home[name] or name}", package)
        return getattr(module, name) if home[name] else module

    return load, lambda: sorted({*vars(sys.modules[package]), *home})


def modules(package: str, path: Iterable[str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """:func:`names` for all modules of a package; ``path`` is its ``__path__``."""
    return names(package, {module.name: "" for module in pkgutil.iter_modules(path)})
