"""The cache: artifacts of flat files, such as the token ids of a corpus.

Opening an artifact hashes its files: half a second for 100M tokens.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np


def default_cache() -> Path:
    """``$ACP_REPRO_CACHE``, or ``cache/`` beside the nearest pyproject.toml (else here)."""
    if given := os.environ.get("ACP_REPRO_CACHE"):
        return Path(given).expanduser()
    here = Path.cwd()
    project = next((p for p in (here, *here.parents) if (p / "pyproject.toml").exists()), here)
    return project / "cache"


def map_array(path: Path, dtype: str) -> np.ndarray:
    """The file as a read-only, memory-mapped vector (n,) of ``dtype``."""
    if not path.stat().st_size:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")
