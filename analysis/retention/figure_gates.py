"""Where the gate stands: a dense model pruned at inference only."""

from __future__ import annotations

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from .. import drawing, style
from . import models


def draw(records: pd.DataFrame) -> Figure:
    """A panel a task: the first score against the tokens kept, a line a pruning and place of the gate.

    Args:
        records: ``pruned_dense`` records; points are means over seeds.
    """
    tasks = list(dict.fromkeys(records["dataset"]))
    figure, axes = plt.subplots(
        1,
        len(tasks),
        figsize=(max(style.COLUMN_INCHES, 2.4 * len(tasks)), 2.4),
        layout="constrained",
        squeeze=False,
    )
    for ax, task in zip(axes[0], tasks, strict=True):
        table = records[(records["dataset"] == task) & (records["metric"] == records["metric"].iloc[0])]
        dense = table[table["pruning"] == "none"]["score_percent"].mean()
        pruned = table[table["pruning"] != "none"]
        means = models.means(pruned, ["pruning", "pruning_gates", "pruning_budget"], "score_percent")
        for colour, gates in zip(style.SIZES, ("input", "after_blocks", "output"), strict=False):
            for pruning, dash in (("random", "--"), ("h2o", "-")):
                line = means[(means["pruning"] == pruning) & (means["pruning_gates"] == gates)]
                line = line.sort_values("pruning_budget")
                x, y = [*(100 * line["pruning_budget"]), 100], [*line["mean"], dense]
                label = f"{models.METHODS[pruning]}, {models.PLACES[gates]}"
                ax.plot(x, y, dash, marker="o", ms=3, color=colour, label=label)
        ax.set(xlabel="tokens kept (%)", title=task)
    axes[0][0].set_ylabel("test score (%)")
    axes[0][-1].legend(fontsize=6)
    return figure


def make(found: drawing.Found) -> tuple[Figure, str]:
    records = found.records["pruned_dense"]
    caption = f"""**Where the gate stands.** Test scores of the dense model pruned at inference only, with
random tokens and with those that receive most attention (H2O), by the place of the gate: before the first
block, after it, or after the last block, where nothing is saved. The paper's text allows all three; its
table of random pruning loses 3.7 and 8.1 points on SST-2, so its gate must stand where tokens still matter.
{style.provenance(records)}"""
    return draw(records), caption


if __name__ == "__main__":
    drawing.main(globals())
