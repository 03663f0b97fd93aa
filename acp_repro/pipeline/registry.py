"""Papers by name: those in ``acp_repro.pipeline.papers``, and those of other packages, with an entry point:

``[project.entry-points."acp_repro.papers"] NAME = "their_package.paper:PAPER"``
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import pkgutil
import sys

from .errors import UnknownName
from .paper import Paper

PAPERS = "acp_repro.pipeline.papers"
GROUP = "acp_repro.papers"  # of entry points


def paper_names() -> list[str]:
    """Ours first, then those of other packages."""
    folder = importlib.import_module(PAPERS).__path__
    ours = sorted(module.name for module in pkgutil.iter_modules(folder) if module.ispkg)
    return list(dict.fromkeys([*ours, *sorted(_others(*sys.path))]))


@functools.cache
def _others(*path: str) -> dict[str, importlib.metadata.EntryPoint]:
    """Papers of other packages by name; for each ``sys.path`` all packages are asked once."""
    return {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}


def paper_module(name: str) -> str:
    """The module that defines a paper."""
    return point.module if (point := _others(*sys.path).get(name)) else f"{PAPERS}.{name}.paper"


def find_paper(name: str) -> Paper:
    """The paper called ``name``."""
    if name not in paper_names():
        raise UnknownName.among(f"no paper {name!r}", name, paper_names())
    point = _others(*sys.path).get(name)
    return point.load() if point else importlib.import_module(paper_module(name)).PAPER
