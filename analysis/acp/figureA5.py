"""Figure A5: pruned ratio of each layer, and training loss, against the tokens trained."""

from __future__ import annotations

import numpy as np
import pandas as pd

from .. import drawing, style, tables
from ..verdict import Verdict, Word
from . import by_length, naming, training_logs

SETTLED_PERCENT = 5.0  # a change of training's speed that counts as none
TENTHS = 10  # of a training run, in which its speed is compared


def draw(records: pd.DataFrame, epoch_tokens: int | None = None) -> drawing.Figure:
    """(a) Pruned ratio, by layer and of all. (b) Training loss with and without ACP.

    Args:
        records: ``training_log`` records of a run with ACP and, if there is one, of its exact pair.
        epoch_tokens: the length of an epoch, whose ends are marked.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    figure, (left, right) = drawing.panels(2, 2.8)
    _pruned(left, records)
    _loss(right, records)
    limits = training_logs.before_change(records), records["tokens"].max()
    for ax in (left, right):
        for end in epoch_ends(records, epoch_tokens):
            ax.axvline(end, color="0.7", lw=0.8, ls=":", label="end of an epoch")
        ax.set(xscale="log", xlabel="tokens trained", xlim=limits)
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(lambda x, _: style.count_label(x))
    drawing.legend(figure, 3)
    return figure


def epoch_ends(records: pd.DataFrame, epoch_tokens: int | None) -> list[int]:
    """Tokens after which an epoch ended within the log; none where the length of an epoch is not known."""
    return list(range(epoch_tokens, int(records["tokens"].max()) + 1, epoch_tokens)) if epoch_tokens else []


def _pruned(ax: drawing.Axes, records: pd.DataFrame) -> None:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    shares, mean = training_logs.shares(records), training_logs.mean_pruned(records)
    layers = ScalarMappable(Normalize(shares.columns.min(), shares.columns.max()), colormaps["viridis"])
    for layer, percent in shares.items():
        ax.plot(shares.index, percent, color=layers.to_rgba(layer), lw=0.7, alpha=0.7)
    ax.figure.colorbar(layers, ax=ax, label="layer", aspect=30, pad=0.01).outline.set_visible(False)
    ax.plot(mean["tokens"], mean["percent"], color="0.1", lw=2, label="all layers")
    low, high = naming.PUBLISHED.range("figure2", "pruned_ratio")
    ax.axhline((low + high) / 2, color=style.PAPER, ls="--", label="the paper's 70 %")
    ax.set(title="Pruned ratio", ylabel="attention pruned (%)")
    ax.set_ylim(min(10 * np.floor(shares.min(axis=None) / 10), (low + high) / 2 - 10), 101)


def _loss(ax: drawing.Axes, records: pd.DataFrame) -> None:
    points = training_logs.losses(records)
    for exact, some in points.groupby(points["log_pruning_tolerance"].isna()):
        name, look = ("exact", {"alpha": 0.4, "lw": 2.5, "zorder": 1}) if exact else ("ACP", {"lw": 1})
        role = style.ROLES[name.lower()]
        ax.plot(some["tokens"], some["loss_nats"], color=role, label=f"loss, {name}", **look)
    seen = points.loc[points["tokens"] >= training_logs.before_change(records), "loss_nats"]
    ax.set_ylim(top=np.quantile(seen, 0.97) * 1.05)
    ax.set(title="Training loss", ylabel="loss (nats per token), axis cut")


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    records = context.records["training_log"]
    epoch = style.EPOCH_TOKENS.get(context.suite.name)
    return draw(records, epoch), training_logs.caption(records, len(epoch_ends(records, epoch)))


def throughput_settles(training_log: pd.DataFrame) -> Verdict:
    """Met if every run with ACP slows down by :data:`SETTLED_PERCENT` at first and keeps its speed in its
    second half; of different magnitude if one slows down by less, yet by more than it varies there.
    Undecided where logs hold too few speeds."""
    rows, points = [], training_log[training_log["layer"].notna()].dropna(subset="throughput_tokens_per_s")
    for _, run in points.drop_duplicates(["run", "tokens"]).groupby("run", sort=False):
        tenth = (TENTHS * run["tokens"] / (run["tokens"].max() + 1)).astype(int)
        speed = run["throughput_tokens_per_s"].groupby(tenth).median()
        percent = 100 * (speed / speed.iloc[-1] - 1)
        ends = {"percent": percent.iloc[0], "furthest": percent.iloc[TENTHS // 2 :].abs().max()}
        rows += [run.iloc[0].to_dict() | ends] * (len(run) >= 2 * TENTHS)
    table = by_length.in_order(tables.some(pd.DataFrame(rows), "throughput while a model trains"))
    faster, furthest = table["percent"], table["furthest"]
    within = f"within {furthest.max():.1f} %"
    ours = f"faster in the first tenth than in the last: {by_length.listed(table, digits=1)}; "
    ours += f"from the half on {within} of the last"
    settles = (furthest <= SETTLED_PERCENT).all() and (faster > furthest).all()
    short = f"{style.span(faster, '.1f')} % faster at first, then {within}"
    word = Word.REPRODUCED if (faster > SETTLED_PERCENT).all() else Word.MAGNITUDE
    return Verdict(word if settles else Word.CONTRADICTED, ours, short, n=len(table))
