"""Figure A7: what moves the pruned share. One training a suspect, and one of the two that lead to 70 %."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from acp_repro.pipeline.papers.acp.suite import FoXRun

from .. import drawing, style
from . import figure4, models

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A suspect counts if it moves the pruned share by more than both; written before the runs.
COUNTS_POINTS = 4.0
COUNTS_SEED_GAPS = 2.0


def difference(run: FoXRun, base: FoXRun) -> str:
    """What ``run`` does otherwise than ``base``, in words; empty where it is another seed of it."""
    ours, theirs = run.size, base.size
    parts = []
    if run.needle_share != base.needle_share:
        parts.append(f"{100 * run.needle_share:g} % of the text asks for facts")
    if ours.learning_rate != theirs.learning_rate:
        parts.append(f"learning rate {ours.learning_rate:g} (not {theirs.learning_rate:g})")
    if ours.qk_norm_share_param_across_head != theirs.qk_norm_share_param_across_head:
        parts.append("QK-norm weights shared by all heads")
    if ours.vocab_size != theirs.vocab_size:
        parts.append(f"{ours.vocab_size:,} words")
    return " and ".join(parts)


def shares(records: pd.DataFrame, runs: Sequence[FoXRun]) -> pd.DataFrame:
    """One row a training: its words, the pruned share and the kinds of its heads."""
    rows = []
    for run in runs:
        own = records[records["run"] == run.name]
        percent = 100 * own["pruned_blocks"].sum() / own["causal_blocks"].sum()
        what = difference(run, runs[0])
        rows.append(
            {"run": run.name, "what": what or f"seed {run.seed}", "is_base": not what, "percent": percent}
            | figure4.kinds(own)
        )
    table = pd.DataFrame(rows)
    return table.assign(moved_points=table["percent"] - table.loc[table["is_base"], "percent"].mean())


def seed_gap(table: pd.DataFrame) -> float:
    """The largest gap between two seeds of the base, in points; NaN of one seed."""
    base = table.loc[table["is_base"], "percent"]
    return float(base.max() - base.min()) if len(base) > 1 else float("nan")


def counts(table: pd.DataFrame) -> pd.Series:
    """Which suspects count, by the criterion; none can where the base has one seed."""
    moved = table["moved_points"].abs()
    return ~table["is_base"] & (moved > COUNTS_POINTS) & (moved > COUNTS_SEED_GAPS * seed_gap(table))


def draw(table: pd.DataFrame) -> Figure:
    """Left: the pruned share of each training. Right: the kinds of its heads.

    Args:
        table: of :func:`shares`.
    """
    from matplotlib import pyplot as plt

    table = table.iloc[::-1]  # the first on top
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(style.PAGE_INCHES, 0.9 + 0.28 * len(table)), sharey=True, layout="constrained"
    )
    places = range(len(table))
    base = table.loc[table["is_base"], "percent"]
    left.axvspan(base.mean() - COUNTS_POINTS, base.mean() + COUNTS_POINTS, color="0.93", zorder=0)
    left.axvline(70, color=style.PAPER, ls="--", lw=1)
    left.annotate("the paper", (70, 1), (0, 2), xycoords=("data", "axes fraction"), **_ABOVE)
    left.scatter(table["percent"], places, color=style.SIZES[0], s=24, zorder=3)
    for place, percent in zip(places, table["percent"], strict=True):
        left.annotate(f"{percent:.1f}", (percent, place), (0, 4), **_ABOVE)
    left.set_yticks(places, table["what"])
    left.set_ylim(-0.6, len(table) - 0.3)
    left.set_xlabel("attention pruned (%)")
    start = pd.Series(0.0, index=table.index)
    for kind, colour in figure4.KINDS.items():
        right.barh(places, 100 * table[kind], 0.6, left=start, color=colour, label=figure4.WORDS[kind])
        start = start + 100 * table[kind]
    right.set_xlim(0, 100)
    right.set_xlabel("heads (%)")
    figure.legend(loc="outside lower right", ncols=3, columnspacing=1)
    return figure


_ABOVE = {"textcoords": "offset points", "ha": "center", "va": "bottom", "fontsize": 7}


def make(found: drawing.Found) -> tuple[Figure, str]:
    records = found.records["pruned_ratio"]
    table, base = shares(records, found.runs), found.runs[0]
    counted = [f"{row.what} ({row.moved_points:+.1f} points)" for row in table[counts(table)].itertuples()]
    verdict = f"What counts: {', '.join(counted)}." if counted else "No suspect counts."
    gap = seed_gap(table)
    seeds = f"The two are {gap:.2g} points apart." if gap == gap else "There is one seed."
    caption = f"""**Figure A7.** {verdict} Shown is what moves the pruned share of
{models.in_words([base.size_name])} at {base.context_length:,} tokens. Each training sees
{style.count_label(base.size.tokens)} tokens and differs from the first in what its line names. A suspect
counts if it moves the share by more than {COUNTS_POINTS:g} points (beyond the shaded band) and by more than
twice the gap between two seeds. {seeds} Dashed: the paper's "about 70 %". {style.provenance(records)}"""
    return draw(table), caption
