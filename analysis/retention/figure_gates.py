"""Where the gate stands: a dense model pruned at inference only."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pandas as pd

from .. import drawing, style
from . import models, table1

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = 3
PLACES = {
    "input": "before the first block",
    "after_blocks": "after that block",
    "output": "after the last one",
}


def draw(records: pd.DataFrame) -> Figure:
    """A panel a task: its first score against the tokens kept, a line a pruning and place of the gate; all on
    one axis from 0 to 100 %, so that panels compare.

    Args:
        records: ``pruned_dense`` records; points are means over seeds.
    """
    from matplotlib import pyplot as plt

    tasks = list(dict.fromkeys(records["dataset"]))
    columns = min(_COLUMNS, len(tasks))
    rows = -(-len(tasks) // columns)
    size = (max(style.COLUMN_INCHES, style.PAGE_INCHES * columns / _COLUMNS), 2.0 * rows + 0.6)
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, sharey=True)
    for ax, task in itertools.zip_longest(axes.flat, tasks):
        if task is None:
            ax.axis("off")
            continue
        table = records[records["dataset"] == task]
        metric = table["metric"].iloc[0]
        table = table[table["metric"] == metric]
        dense = table[table["pruning"] == "none"]["score_percent"].mean()
        pruned = table[table["pruning"] != "none"]
        means = models.means(pruned, ["pruning", "pruning_gates", "pruning_budget"])
        for colour, gates in zip(style.SIZES, ("input", "after_blocks", "output"), strict=False):
            for pruning, dash in (("h2o", "-"), ("random", "--")):  # the dashed on top: some are the same
                line = means[(means["pruning"] == pruning) & (means["pruning_gates"] == gates)]
                line = line.sort_values("pruning_budget")
                x, y = [*(100 * line["pruning_budget"]), 100], [*line["mean"], dense]
                label = f"{models.METHODS[pruning]}, {models.PLACES[gates]}"
                ax.plot(x, y, dash, marker="o", ms=3, color=colour, label=label)
        ax.set(title=f"{task}: {metric.replace('_', ' ')}", ylim=(0, 100))
    for ax in axes[:, 0]:
        ax.set_ylabel("test score (%)")
    for ax in axes.flat[max(0, len(tasks) - columns) : len(tasks)]:  # the lowest of each column
        ax.set_xlabel("tokens kept (%)")
    handles, labels = axes[0][0].get_legend_handles_labels()
    columns = max(2, columns)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=6.5, handlelength=3)
    return figure


def random_scores(records: pd.DataFrame) -> str:
    """What random tokens score at the least budget by the place of the gate, in the mean over tasks."""
    first = records.groupby("dataset", sort=False)["metric"].transform("first")
    random = records[(records["metric"] == first) & (records["pruning"] == "random")]
    if random.empty:
        return ""
    least = random["pruning_budget"].min()
    random = random[random["pruning_budget"] == least]
    by_place = random.pivot_table(index="dataset", columns="pruning_gates", values="score_percent").dropna()
    if by_place.empty:
        return ""
    means = by_place.mean()
    parts = [f"{means[gates]:.0f} % {words}" for gates, words in PLACES.items() if gates in means]
    over = f". These are means over {len(by_place)} tasks" if len(by_place) > 1 else ""
    return f"With {100 * least:g} % of the tokens, random ones score {', '.join(parts)}{over}. "


def of_learnt(records: pd.DataFrame, bag: pd.DataFrame) -> str:
    """What random tokens score on tasks that the dense model has learnt, and a sentence on the others."""
    dense = records[records["pruning"] == "none"].assign(split="test")
    others = pd.MultiIndex.from_frame(records[["dataset", "backbone"]]).isin(table1.unlearnt(dense, bag))
    return random_scores(records[~others]) + table1.left_out(dense, bag)


def make(found: drawing.Found) -> tuple[Figure, str]:
    records = found.records["pruned_dense"]
    first = of_learnt(records, found.records["bag_of_words"])
    caption = f"""**Where the gate stands.** {first}Shown are test scores by the place of the
gate. After the last block nothing is saved, and both lines may lie on each other. The dense model is pruned
at inference only. It keeps random tokens, or those that receive most attention (H2O). The paper's text
allows all three places. In its table random pruning loses 3.7 and 8.1 points on SST-2, so its gate must stand
where tokens still matter.
{models.own_tasks(records)}{style.provenance(records)}"""
    return draw(records), caption
