"""Training dynamics: accuracy, the overall ratio and each gate's against steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from .. import drawing, style
from ..verdict import Verdict
from . import models

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMALL_ACCURACY = 0.9  # what a minute's model must reach
GATES = ("#56B4E9", "#CC79A7", "#E69F00", "#555555")


def draw(records: pd.DataFrame) -> Figure:
    """Two panels over the same steps: accuracy and overall ratio, removed and soft; ratio of each gate.

    Args:
        records: ``dynamics`` records of one run.
    """
    from matplotlib import pyplot as plt

    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(style.PAGE_INCHES * 0.7, 3.6), sharex=True, layout="constrained"
    )
    last = records["gate_index"].max()
    for name, colour, label in (
        ("accuracy", "#009E73", "accuracy"),
        ("kept_ratio", "#D55E00", "tokens kept"),
    ):
        for prefix, line in (("", "-"), ("soft_", (0, (2, 1.5)))):
            series = prefix + name.replace("kept_", "") if prefix else name
            curve = records[records["series"] == series]
            if name == "kept_ratio":
                curve = curve[curve["gate_index"] == last]
            suffix = ", soft mask" if prefix else ", removed"
            top.plot(curve["step"], curve["value"], color=colour, ls=line, lw=1.3, label=label + suffix)
    ratios = records[records["series"] == "kept_ratio"].pivot(
        index="step", columns="gate_index", values="value"
    )
    before = pd.concat([pd.Series(1.0, ratios.index, name=-1.0), ratios], axis=1).iloc[:, :-1]
    for gate, column in enumerate(ratios):
        share = ratios[column] / before.iloc[:, gate]
        bottom.plot(ratios.index, share, color=GATES[gate % 4], lw=1.2, label=f"gate {gate + 1}")
    top.set(ylim=(0, 1.03), ylabel="share")
    bottom.set(ylim=(0, 1.03), ylabel="kept of what\nreached the gate", xlabel="step")
    top.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    bottom.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def make(found: drawing.Found) -> tuple[Figure, str]:
    records = found.records["dynamics"]
    run = found.runs[0]
    name = models.name_of(run.compression, run.training_mask)
    caption = f"""**Training dynamics.** Run {run.name} ({name}): {drops_and_learns(records).ours}, from the
first evaluation to the last tenth of training. Above: accuracy on held-out text with teacher forcing, and
the share of tokens kept. Full lines: tokens really removed. Dashed: the soft mask; where both agree, one
line hides the other. The share that it keeps is {models.SOFT_RATIO}. Below: the share that each gate keeps
of what reaches it.
{style.provenance(records)}"""
    return draw(records), caption


def drops_and_learns(dynamics: pd.DataFrame) -> Verdict:
    """Met if the last tenth of training keeps less than the first look and is more accurate, or accurate."""
    accuracy = dynamics[dynamics["series"] == "accuracy"].set_index("step")["value"]
    kept = dynamics[dynamics["series"] == "kept_ratio"]
    kept = kept[kept["gate_index"] == kept["gate_index"].max()].set_index("step")["value"]
    late = accuracy.index >= 0.9 * accuracy.index.max()
    ends = accuracy[late].mean(), kept[late].mean()
    ours = f"accuracy {accuracy.iloc[0]:.2f} to {ends[0]:.2f}, kept {kept.iloc[0]:.0%} to {ends[1]:.0%}"
    learns = ends[0] > accuracy.iloc[0] or ends[0] >= SMALL_ACCURACY
    return Verdict.of(learns and ends[1] < kept.iloc[0], ours)
