"""Papers by name: those in ``acp_repro.papers``, and those of other packages.

Another package adds a paper with an entry point, and its suites then say ``paper: NAME``::

    [project.entry-points."acp_repro.papers"]
    NAME = "their_package.paper:PAPER"
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil

from .. import papers
from .errors import UnknownName
from .paper import Paper

ENTRY_POINTS = "acp_repro.papers"


def paper_names() -> list[str]:
    """Ours first, then those of other packages."""
    ours = sorted(module.name for module in pkgutil.iter_modules(papers.__path__) if module.ispkg)
    others = sorted(point.name for point in importlib.metadata.entry_points(group=ENTRY_POINTS))
    return list(dict.fromkeys([*ours, *others]))


def find_paper(name: str) -> Paper:
    """The paper called ``name``.

    Raises:
        UnknownName: there is none; the message names those there are.
    """
    if name not in paper_names():
        raise UnknownName.among(f"no paper {name!r}", name, paper_names())
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS, name=name):
        return point.load()
    return importlib.import_module(f"{papers.__name__}.{name}.paper").PAPER
