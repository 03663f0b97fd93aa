"""Figure 10: Figure 2 for FoX (LLaMA), whose threshold comes from the measured norms of q and k."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from . import figure2, style

QUANTITIES = figure2.QUANTITIES
NORMS = """Delta comes from the measured norms of q and k. Reading them is no part of the attention time,
which is given delta, but of the throughput."""


def draw(records: dict[str, pd.DataFrame]) -> Figure:
    """Three panels of bars from the records of :data:`QUANTITIES`, see :func:`figure2.draw`."""
    return figure2.draw(records, "figure10")


def make(suite: str) -> tuple[Figure, str]:
    return figure2.make(suite, "figure10", "llama", NORMS)


if __name__ == "__main__":
    style.main("figure10", __doc__, make)
