"""Position of the gate: a dense model pruned at inference only."""

from __future__ import annotations

import pandas as pd

from .. import drawing, style
from . import naming, table1
from .figure2 import DEFAULTS

PLACES = {
    "input": "before the first block",
    "after_blocks": "after that block",
    "output": "after the last one",
}
MARKS = {"random": ("o", style.SIZES[1]), "h2o": ("s", style.SIZES[2]), "ar": ("D", style.SIZES[0])}


def _dense(records: pd.DataFrame) -> pd.DataFrame:
    return records[records["pruning"] == "none"].assign(split="test")


def lost(records: pd.DataFrame, score: pd.DataFrame, bag: pd.DataFrame) -> pd.DataFrame:
    """Points that a task's first score loses against the dense model at the least budget.

    Args:
        records, score, bag: ``pruned_dense`` records, ``score`` records with Adaptive Retention's, and
            ``bag_of_words`` records.

    Returns:
        ``dataset``, ``method``, ``place`` and ``points``, means over seeds, ``learnt``, whether the dense
        model has learnt the task, and the ``budget``.
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
    """Points lost, a panel a gate position, a row a task and a mark a method.

    Args:
        table: of :func:`lost`.
    """
    tasks = list(dict.fromkeys(table["dataset"]))
    size = {"height": 1.1 + 0.2 * len(tasks), "sharex": True, "sharey": True}
    figure, axes = drawing.panels(len(PLACES), **size)
    for ax, place in zip(axes, PLACES, strict=True):
        ax.axvline(0, color="0.4", lw=1, zorder=1)
        ax.set(title=f"Gate {naming.PLACES[place]}", xlabel="points lost")
        for method, (marker, colour) in MARKS.items():
            some = table[(table["method"] == method) & (table["place"] == place)]
            at = [tasks.index(task) for task in some["dataset"]]
            look = {"color": colour, "ls": "", "ms": 4.5, "alpha": 0.9, "label": naming.METHODS[method]}
            ax.plot(some["points"], at, marker, **look)
    axes[0].set_yticks(range(len(tasks)), tasks)
    axes[0].set(ylabel="task", ylim=(len(tasks) - 0.5, -0.5))
    drawing.legend(figure, 3)
    return figure


def message(table: pd.DataFrame) -> str:
    """What random tokens lose by the place of the gate, and Adaptive Retention, in the mean over tasks."""
    mean = table.groupby(["method", "place"])["points"].mean()
    if "random" not in mean:
        return ""
    parts = [f"{mean['random', place]:.0f} {PLACES[place]}" for place in PLACES if ("random", place) in mean]
    ours = (
        f". Adaptive Retention at the input loses {mean['ar', 'input']:.0f}"
        if ("ar", "input") in mean
        else ""
    )
    tokens = f"With {100 * table['budget'].iloc[0]:g} % of the tokens"
    tasks = table["dataset"].nunique()
    return f"{tokens}, random ones lose {', '.join(parts)} (points, mean of {tasks} tasks){ours}."


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    records = context.records["pruned_dense"]
    table = lost(records, context.records["score"], context.records["bag_of_words"])
    learnt = table[table["learnt"]]
    without = table1.left_out(_dense(records), context.records["bag_of_words"])
    caption = f"""**Position of the gate.** {message(learnt)} {without}The panels show what test scores lose
by the position of the gate. After the last block nothing is saved. The dense model is pruned at inference
only. It keeps random tokens, or those that receive most attention (H2O). Adaptive Retention is trained with
its gates. The paper's text allows all three places. In its table random pruning loses 3.7 and 8.1 points on
SST-2, so its gate must stand where tokens still matter. {naming.own_tasks(records)}"""
    return draw(table), caption
