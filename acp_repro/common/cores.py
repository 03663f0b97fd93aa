"""The number of processors that can be used."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """How many cores this process may use; in a container, fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
