"""Papers by name: the packages in ``acp_repro.papers``."""

import importlib
import pkgutil

from .errors import UnknownName
from .paper import Paper

PAPERS = "acp_repro.papers"


def paper_names() -> list[str]:
    """The names of all papers, sorted."""
    folder = importlib.import_module(PAPERS).__path__
    return sorted(module.name for module in pkgutil.iter_modules(folder) if module.ispkg)


def find_paper(name: str) -> Paper:
    """The paper called ``name``."""
    if name not in paper_names():
        raise UnknownName.among(f"no paper {name!r}", name, paper_names())
    return importlib.import_module(f"{PAPERS}.{name}.paper").PAPER
