"""Figure 10: Figure 2 for FoX (LLaMA), whose threshold comes from the measured norms of q and k."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from .. import drawing
from . import savings

NORMS = """Delta comes from the measured norms of q and k. Reading them is no part of the attention time,
which is given delta, but of the throughput."""


def draw(records: Mapping[str, pd.DataFrame]) -> Figure:
    """Three panels of bars of ``pruned_ratio``, ``attention_time`` and ``throughput`` records."""
    return savings.draw(records, "figure10")


def make(found: drawing.Found) -> tuple[Figure, str]:
    return savings.make(found, "llama", NORMS)


if __name__ == "__main__":
    drawing.main(globals())
