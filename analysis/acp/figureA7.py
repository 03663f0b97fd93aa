"""Figure A7: the effect of single settings, and of two settings together, on the pruned ratio."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np
import pandas as pd

from acp_repro.papers.acp.runs import FoXRun

from .. import drawing, style
from . import figure4, naming

# A setting has an effect if it changes the pruned ratio by more than both margins, fixed before the runs.
COUNTS_POINTS = 4.0
COUNTS_SEED_GAPS = 2.0


def difference(run: FoXRun, base: FoXRun) -> str:
    """The settings of ``run`` that differ from ``base``, in words; empty for another seed of ``base``."""
    ours, theirs = run.size, base.size
    parts = []
    if run.needle_fraction != base.needle_fraction:
        parts.append(f"{100 * run.needle_fraction:g} % of sequences with needles")
    if ours.learning_rate != theirs.learning_rate:
        parts.append(f"learning rate {ours.learning_rate:g}")
    if ours.qk_norm_share_param_across_head != theirs.qk_norm_share_param_across_head:
        parts.append("QK-norm parameters shared by all heads")
    if ours.vocab_size != theirs.vocab_size:
        parts.append(f"vocabulary size {ours.vocab_size:,}")
    return " and ".join(parts)


def shares(records: pd.DataFrame, runs: Sequence[FoXRun]) -> pd.DataFrame:
    """One row per training run: its settings in words, its pruned ratio and the kinds of its heads."""
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
    """The largest difference between seeds of the base run, in percentage points; NaN for one seed."""
    base = table.loc[table["is_base"], "percent"]
    return float(base.max() - base.min()) if len(base) > 1 else float("nan")


def counts(table: pd.DataFrame) -> pd.Series:
    """Whether each setting has an effect by the criterion; False for all if the base has one seed."""
    moved = table["moved_points"].abs()
    return ~table["is_base"] & (moved > COUNTS_POINTS) & (moved > COUNTS_SEED_GAPS * seed_gap(table))


def draw(table: pd.DataFrame) -> drawing.Figure:
    """(a) The pruned ratio of each training run of :func:`shares`. (b) The kinds of its heads."""
    table = table.iloc[::-1]  # draws the first row on top
    figure, (left, right) = drawing.panels(2, 0.9 + 0.32 * len(table), sharey=True)
    places, base = np.arange(len(table)), table["is_base"].to_numpy()
    mean = table.loc[base, "percent"].mean()
    band = f"no effect: within ±{COUNTS_POINTS:g} points of the seeds"
    left.axvspan(mean - COUNTS_POINTS, mean + COUNTS_POINTS, color="0.9", lw=0, zorder=0, label=band)
    left.axvline(70, color=style.PAPER, ls="--", lw=1, label="the paper: about 70 %")
    left.plot(table["percent"][base], places[base], "o", ms=5, color="0.2", label="base run")
    left.plot(
        table["percent"][~base], places[~base], "o", ms=5, color="0.2", mfc="white", label="changed run"
    )
    for place, percent in zip(places, table["percent"], strict=True):
        drawing.note(left, f"{percent:.1f}", (percent, place), (6, 0))
    left.set_yticks(places, [textwrap.fill(words, 34) for words in table["what"]])
    left.margins(x=0.16)
    left.set(ylim=(-0.6, len(table) - 0.4), xlabel="pruned ratio (%)", title="Pruned ratio")
    start = pd.Series(0.0, index=table.index)
    for kind, colour in figure4.KINDS.items():
        right.barh(places, 100 * table[kind], 0.6, left=start, color=colour, label=figure4.WORDS[kind])
        start = start + 100 * table[kind]
    right.set(xlim=(0, 100), xlabel="heads (%)", title="Kinds of heads")
    drawing.legend(figure, 4)
    return figure


def message(table: pd.DataFrame) -> str:
    """A sentence on the settings that have an effect."""
    counted = [f"{row.what} ({row.moved_points:+.1f} points)" for row in table[counts(table)].itertuples()]
    return f"Settings with an effect: {', '.join(counted)}." if counted else "No setting has an effect."


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    records = context.records["pruned_ratio"]
    table, base = shares(records, context.runs), context.runs[0]
    gap = seed_gap(table)
    seeds = "The base has one seed." if np.isnan(gap) else f"The base seeds differ by {gap:.2g} points."
    caption = f"""{naming.heading(context.item)} {message(table)} (a) Pruned ratios of models with
{naming.in_words([base.size_name])} at {base.context_length:,} tokens. Each run is trained on
{style.count_label(base.size.tokens)} tokens and differs from the base run in the named settings. A setting
has an effect if it changes the ratio by more than {COUNTS_POINTS:g} points (the grey band) and by more than
twice the difference between two base seeds. {seeds} (b) The kinds of heads of each run."""
    return draw(table), caption
