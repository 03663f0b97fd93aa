"""Figure A5: pruned ratio of the layers and training loss, against the training tokens."""

from __future__ import annotations

import pandas as pd

from .. import drawing, style, tables
from ..verdict import Verdict, Word
from . import by_length, naming, training_logs, versions

SETTLED_PERCENT = 5.0  # a smaller change of the training throughput is negligible
TENTHS = 10  # the parts of a training run whose throughputs are compared


def draw(records: pd.DataFrame, epoch_tokens: int | None = None) -> drawing.Figure:
    """(a) Pruned ratio of the layers. (b) Training loss with and without ACP.

    Args:
        records: ``training_log`` records of a run with ACP and, if it exists, of its exact pair.
        epoch_tokens: the length of an epoch, whose ends are marked.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    figure, (left, right) = drawing.panels(2, 2.8)
    start = {left: _pruned(left, records), right: _loss(right, records)}
    for ax, first in start.items():
        for end in epoch_ends(records, epoch_tokens):
            ax.axvline(end, color="0.7", lw=0.8, ls=":", label="end of an epoch")
        ax.set(xscale="log", xlabel="training tokens", xlim=(first, records["tokens"].max()))
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(lambda x, _: style.count_label(x))
    drawing.legend(figure, 4)
    return figure


def epoch_ends(records: pd.DataFrame, epoch_tokens: int | None) -> list[int]:
    """The numbers of tokens at which an epoch ends within the log; empty for an unknown epoch length."""
    return list(range(epoch_tokens, int(records["tokens"].max()) + 1, epoch_tokens)) if epoch_tokens else []


def _pruned(ax: drawing.Axes, records: pd.DataFrame) -> float:
    """Draws the mean and the spread of the layers; returns the first tokens of the axis."""
    layers, mean = training_logs.layer_percents(records), training_logs.mean_pruned(records)
    colour = style.ROLES["acp"]
    for low, high, alpha, name in ((0, 1, 0.15, "all layers"), (0.25, 0.75, 0.3, "half of the layers")):
        ends = (layers.quantile(end, axis=1) for end in (low, high))
        ax.fill_between(layers.index, *ends, color=colour, alpha=alpha, lw=0, label=name)
    ax.plot(mean["tokens"], mean["percent"], color=colour, lw=2, label="mean of the layers")
    low, high = naming.PUBLISHED.range("figure2", "pruned_ratio")
    ax.axhline((low + high) / 2, color=style.PAPER, ls="--", label="the paper's 70 %")
    ax.set(title="Pruned ratio", ylabel="attention pruned (%)", ylim=(None, 101))
    return training_logs.before_change(records)


def _loss(ax: drawing.Axes, records: pd.DataFrame) -> float:
    """Draws the training losses and their largest difference; returns the first tokens of the axis."""
    points = training_logs.losses(records)
    for exact, some in points.groupby(points["log_pruning_tolerance"].isna()):
        name, look = ("exact", {"alpha": 0.4, "lw": 2.5, "zorder": 1}) if exact else ("ACP", {"lw": 1})
        ax.plot(some["tokens"], some["loss_nats"], color=style.ROLES[name.lower()], label=name, **look)
    losses = points.pivot(index="tokens", columns="run", values="loss_nats").dropna()
    if losses.shape[1] == 2:
        gap = losses.diff(axis=1).iloc[:, 1].abs().max()
        words = f"largest difference:\n{gap:.2g} nats" if gap else "identical"
        ax.text(0.97, 0.97, words, transform=ax.transAxes, ha="right", va="top")
    ax.set(title="Training loss", ylabel="loss (nats per token)")
    return points["tokens"].min()


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    records = context.records["training_log"]
    epoch_tokens = style.EPOCH_TOKENS.get(context.suite.name)
    mean, first = training_logs.mean_pruned(records), training_logs.before_change(records)
    last, peak = mean.iloc[-1], mean.loc[mean["percent"].idxmax()]
    size = records["size"].iloc[0]
    paper_size = size if size in naming.PAPER_SIZES else naming.PAPER_SIZES[0]
    unlike = versions.notes(versions.unlike(records, ["size"]), after=".")
    devices = ", ".join(records["training_device"].unique())
    epochs = "Dotted lines mark the ends of epochs, after which the corpus repeats."
    caption = f"""{naming.heading(context.item)} The pruned ratio peaks at {peak["percent"]:.0f} % after
{style.count_label(peak["tokens"])} tokens and is {last["percent"]:.0f} % after
{style.count_label(last["tokens"])} tokens. The paper reports around 70 % and trains its {paper_size} model on
{style.count_label(naming.paper_size(paper_size).tokens)} tokens. The curves are from the training logs of
{" and ".join(records["run"].unique())}{unlike[:1]}, trained on {devices}. (a) Pruned ratio on the first
sequence of a batch: the mean over the layers, the range of all layers, and the range of the middle half. The
axis begins at {style.count_label(first)} tokens. Until then, no layer has changed by more than
{training_logs.CHANGE_POINTS:g} percentage points. (b) Mean training loss of the steps since the previous
point, at the same points for all runs. A mean over more steps is assumed constant over these steps. {unlike}
{epochs if epoch_ends(records, epoch_tokens) else ""}"""
    return draw(records, epoch_tokens), caption


def throughput_settles(training_log: pd.DataFrame) -> Verdict:
    """Reproduced if the throughput of every run with ACP falls by more than :data:`SETTLED_PERCENT` at first
    and is constant in the second half; of different magnitude if a fall is smaller, and still exceeds the
    variation of the second half. Runs with too few logged throughputs are excluded."""
    rows, points = [], training_log[training_log["layer"].notna()].dropna(subset="throughput_tokens_per_s")
    for _, run in points.drop_duplicates(["run", "tokens"]).groupby("run", sort=False):
        tenth = (TENTHS * run["tokens"] / (run["tokens"].max() + 1)).astype(int)
        speed = run["throughput_tokens_per_s"].groupby(tenth).median()
        percent = 100 * (speed / speed.iloc[-1] - 1)
        later = run["throughput_tokens_per_s"][tenth == 0].iloc[1:].median()
        ends = {
            "percent": percent.iloc[0],
            "later": 100 * (later / speed.iloc[-1] - 1),
            "furthest": percent.iloc[TENTHS // 2 :].abs().max(),
        }
        rows += [run.iloc[0].to_dict() | ends] * (len(run) >= 2 * TENTHS)
    table = by_length.in_order(tables.some(pd.DataFrame(rows), "training_log with enough throughputs"))
    faster, furthest = table["percent"], table["furthest"]
    ours = by_length.listed(table, "Throughput of the first tenth above the last tenth,", digits=1)
    ours += "\n" + by_length.listed(table, "The same without the first step,", "later", digits=1)
    ours += f"\nEvery tenth of the second half is within {furthest.max():.1f} % of the last tenth"
    settles = (furthest <= SETTLED_PERCENT).all() and (faster > furthest).all()
    short = f"the first tenth of training is {style.span(faster, '.1f')} % faster than the last tenth"
    word = Word.REPRODUCED if (faster > SETTLED_PERCENT).all() else Word.MAGNITUDE
    return Verdict(word if settles else Word.CONTRADICTED, ours, short, n=len(table))
