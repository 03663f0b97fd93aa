"""Position of the gate: the score that a dense model loses if it is pruned at inference only."""

from __future__ import annotations

import pandas as pd

from .. import drawing, style
from . import naming, table1
from .figure2 import DEFAULTS

MARKS = {"random": ("o", style.SIZES[1]), "h2o": ("s", style.SIZES[2]), "ar": ("D", style.SIZES[0])}


def _dense(records: pd.DataFrame) -> pd.DataFrame:
    return records[records["pruning"] == "none"].assign(split="test")


def lost(records: pd.DataFrame, score: pd.DataFrame, bag: pd.DataFrame) -> pd.DataFrame:
    """The points that a task's first score loses relative to the dense model at the smallest budget.

    Args:
        records: ``pruned_dense`` records.
        score: ``score`` records, which contain those of Adaptive Retention.
        bag: ``bag_of_words`` records.

    Returns:
        ``dataset``, ``method``, ``place`` and ``points`` (means over seeds), ``learnt`` (whether the dense
        model has learnt the task) and ``budget``.
    """
    dense = _dense(records)
    pruned = records[records["pruning"] != "none"].drop(columns=["method", "gates", "budget"])
    names = {"pruning": "method", "pruning_gates": "gates", "pruning_budget": "budget"}
    usual = (score[list(DEFAULTS)] == list(DEFAULTS.values())).all(axis=1)
    trained = score[(score["method"] == "ar") & (score["split"] == "test") & usual]
    table = pd.concat([pruned.rename(columns=names), trained])
    first = dense.groupby("dataset")["metric"].first()
    table = table[table["metric"] == table["dataset"].map(first)]
    least = table["budget"].min()
    table = table[table["budget"] == least]
    whole = dense[dense["metric"] == dense["dataset"].map(first)].groupby("dataset")["score_percent"].mean()
    means = table.groupby(["dataset", "method", "gates"], sort=False)["score_percent"].mean().reset_index()
    points = means["dataset"].map(whole) - means["score_percent"]
    learnt = ~means["dataset"].isin(table1.unlearnt(dense, bag).unique("dataset"))
    return means.rename(columns={"gates": "place"}).assign(points=points, learnt=learnt, budget=least)


def draw(table: pd.DataFrame) -> drawing.Figure:
    """The points lost, one panel per gate position, one row per task and one marker per method.

    Args:
        table: the result of :func:`lost`.
    """
    tasks = list(dict.fromkeys(table["dataset"]))
    figure, axes = drawing.panels(2, height=1.1 + 0.2 * len(tasks), sharex=True, sharey=True)
    for ax, place in zip(axes, ("input", "after_blocks"), strict=True):
        ax.axvline(0, color="0.4", lw=1, zorder=1)
        ax.set(title=f"Gate {naming.PLACES[place]}", xlabel="points lost")
        for method, (marker, colour) in MARKS.items():
            some = table[(table["method"] == method) & (table["place"] == place)]
            rows = [tasks.index(task) for task in some["dataset"]]
            look = {"color": colour, "ls": "", "ms": 4.5, "alpha": 0.9, "label": naming.METHODS[method]}
            ax.plot(some["points"], rows, marker, **look)
    axes[0].set_yticks(range(len(tasks)), tasks)
    axes[0].set(ylabel="task", ylim=(len(tasks) - 0.5, -0.5))
    drawing.legend(figure, 3)
    return figure


def _mean_losses(table: pd.DataFrame) -> str:
    """The mean loss over tasks of random pruning and of Adaptive Retention, as a sentence; empty if the dense
    model has learnt no task."""
    if table.empty:
        return ""
    parts = [
        f"{naming.row_name(method, place)}: {points:.0f}"
        for (method, place), points in table.groupby(["method", "place"], sort=False)["points"].mean().items()
        if method != "h2o"
    ]
    tokens = f"{100 * table['budget'].iloc[0]:g} % of the tokens"
    return f"Mean loss in points with {tokens}, over {table['dataset'].nunique()} tasks. {'; '.join(parts)}."


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    records = context.records["pruned_dense"]
    table = lost(records, context.records["score"], context.records["bag_of_words"])
    at_output = table[table["place"] == "output"]["points"].abs().max()
    table = table[table["place"] != "output"]
    learnt = table[table["learnt"]]
    without = table1.left_out(_dense(records), context.records["bag_of_words"])
    caption = f"""**Position of the gate.** {_mean_losses(learnt)} {without}The panels show the points of test
score lost relative to the dense model. H2O keeps the tokens that receive most attention. Random pruning and
H2O prune the dense model at inference only, whereas Adaptive Retention is trained with its gates. A gate
after the last block saves no compute and changes a score by at most {at_output:.1f} points (not drawn). The
paper's text allows gates at the input, after blocks and at the output. In the paper's tables, random
pruning loses 3.7 points (at 50 %) and 8.1 points (at 30 %) on SST-2. The paper's gate is therefore at a
position where tokens still matter. {naming.own_tasks(records)}"""
    return draw(table), caption
