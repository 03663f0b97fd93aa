"""Figure 2: savings in FLOPs and memory accesses, attention time, and training throughput (FoX Pro)."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from .. import drawing
from . import savings

QK_NORM = "Delta comes from the weights of QK-norm (Appendix E) at no cost."


def draw(records: Mapping[str, pd.DataFrame]) -> Figure:
    """Three panels of bars of ``pruned_ratio``, ``attention_time`` and ``throughput`` records."""
    return savings.draw(records, "figure2")


def make(found: drawing.Found) -> tuple[Figure, str]:
    return savings.make(found, "pro", QK_NORM)


if __name__ == "__main__":
    drawing.main(globals())
