"""Figure A7: what moves the pruned ratio. One training a suspect, and one of the two that lead to 70 %."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np
import pandas as pd

from acp_repro.papers.acp.runs import FoXRun

from .. import drawing, style
from . import figure4, naming

# A suspect counts if it moves the pruned ratio by more than both; written before the runs.
COUNTS_POINTS = 4.0
COUNTS_SEED_GAPS = 2.0


def difference(run: FoXRun, base: FoXRun) -> str:
    """What ``run`` does otherwise than ``base``, in words; empty where it is another seed of it."""
    ours, theirs = run.size, base.size
    parts = []
    if run.needle_fraction != base.needle_fraction:
        parts.append(f"{100 * run.needle_fraction:g} % of the text asks for facts")
    if ours.learning_rate != theirs.learning_rate:
        parts.append(f"learning rate {ours.learning_rate:g}")
    if ours.qk_norm_share_param_across_head != theirs.qk_norm_share_param_across_head:
        parts.append("QK-norm weights shared by all heads")
    if ours.vocab_size != theirs.vocab_size:
        parts.append(f"vocabulary of {ours.vocab_size:,}")
    return " and ".join(parts)


def shares(records: pd.DataFrame, runs: Sequence[FoXRun]) -> pd.DataFrame:
    """One row a training: its words, the pruned ratio and the kinds of its heads."""
    rows = []
    for run in runs:
        own = records[records["run"] == run.name]
        percent = 100 * own["pruned_blocks"].sum() / own["causal_blocks"].sum()
        what = difference(run, runs[0])
        seed = f"seed {run.seed}" if run.seed or not what else ""
        rows.append(
            {
                "run": run.name,
                "what": ", ".join(filter(None, (what, seed))),
                "is_base": not what,
                "percent": percent,
            }
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


def draw(table: pd.DataFrame) -> drawing.Figure:
    """(a) The pruned ratio of each training run of :func:`shares`. (b) The kinds of its heads."""
    table = table.iloc[::-1]  # the first on top
    figure, (left, right) = drawing.panels(2, 0.9 + 0.32 * len(table), sharey=True)
    places, base = np.arange(len(table)), table["is_base"].to_numpy()
    mean = table.loc[base, "percent"].mean()
    band = f"±{COUNTS_POINTS:g} points of the seeds: does not count"
    left.axvspan(mean - COUNTS_POINTS, mean + COUNTS_POINTS, color="0.9", lw=0, zorder=0, label=band)
    left.axvline(70, color="0.4", ls="--", lw=1, label='the paper: "about 70 %"')
    for some, look in (
        (base, {"label": "a seed"}),
        (~base, {"mfc": "white", "label": "one change, one training run"}),
    ):
        left.plot(table["percent"][some], places[some], "o", ms=5, color=style.SIZES[0], **look)
    for place, percent in zip(places, table["percent"], strict=True):
        drawing.note(left, f"{percent:.1f}", (percent, place), (6, 0))
    left.set_yticks(places, [textwrap.fill(words, 40) for words in table["what"]])
    left.margins(x=0.12)
    left.set(ylim=(-0.6, len(table) - 0.4), xlabel="pruned ratio (%)", title="Pruned ratio")
    start = pd.Series(0.0, index=table.index)
    for kind, colour in figure4.KINDS.items():
        right.barh(places, 100 * table[kind], 0.6, left=start, color=colour, label=figure4.WORDS[kind])
        start = start + 100 * table[kind]
    right.set(xlim=(0, 100), xlabel="heads (%)", title="Kinds of heads")
    drawing.legend(figure, 4)
    return figure


def message(table: pd.DataFrame) -> str:
    """Which suspects count, by the criterion, as a sentence."""
    counted = [f"{row.what} ({row.moved_points:+.1f} points)" for row in table[counts(table)].itertuples()]
    return f"What counts: {'; '.join(counted)}." if counted else "No change counts."


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    records = context.records["pruned_ratio"]
    table, base = shares(records, context.runs), context.runs[0]
    gap = seed_gap(table)
    seeds = f"The two are {gap:.2g} points apart." if gap == gap else "There is one seed."
    caption = f"""**Figure A7.** {message(table)} (a) What moves the pruned ratio of
{naming.in_words([base.size_name])} at {base.context_length:,} tokens. Each training sees
{style.count_label(base.size.tokens)} tokens and differs from the first in what its line names. That counts
if it moves the share by more than {COUNTS_POINTS:g} points (leaves the grey band) and by more than twice the
gap between two seeds of the first. {seeds} (b) The kinds of its heads."""
    return draw(table), caption
