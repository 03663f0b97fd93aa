"""The needle in a haystack with and without ACP: what Figures 3 (right), 9, 11 (right) and A6 share."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from .. import drawing, style
from . import models, needle_statistics

TITLES = {"acp": "with ACP", "exact": "without"}
ROWS = {"answer_recall": "words found (%)", "gain_nats": "the answer is likelier\nby (nats)"}


def draw(records: pd.DataFrame) -> Figure:
    """Heat maps, depth of the needle over context length: a column for each kind of model and method.

    Above, the recall of the needle's words; below, the log-likelihood of the answer, with less without the
    needle. Each cell is the mean over haystacks and seeds.

    Args:
        records: ``needle`` records with both methods for each training length, size and share of needles.
    """
    cells = needle_statistics.cells(records)
    key = needle_statistics.SETTING
    settings = cells[key].drop_duplicates().sort_values(key)
    titles = [", ".join([*parts, ""]) for parts in needle_statistics.names(settings)]
    each = list(zip(settings.itertuples(index=False, name=None), titles, strict=True))
    groups = dict(list(cells.groupby([*key, "method"])))
    columns = [(setting, title, method) for setting, title in each for method in TITLES]
    width = min(style.PAGE_INCHES, 0.9 + 1.6 * len(columns))
    figure, axes = plt.subplots(2, len(columns), figsize=(width, 3.5), squeeze=False, layout="constrained")
    largest = max(cells["gain_nats"].abs().max(), 1.0)  # less than a nat looks like the little it is
    norms = {"answer_recall": Normalize(0, 100), "gain_nats": Normalize(-largest, largest)}
    maps = {"answer_recall": "viridis", "gain_nats": "RdBu"}
    for index, (value, label) in enumerate(ROWS.items()):
        for ax, (setting, title, method) in zip(axes[index], columns, strict=True):
            table = groups[*setting, method].pivot(
                index="depth", columns="evaluated_length_tokens", values=value
            )
            image = ax.imshow(table, aspect="auto", cmap=maps[value], norm=norms[value])
            _ticks(ax, table, first=ax is axes[index, 0], last=index == 1)
            if index == 0:
                ax.set_title(f"{title}{TITLES[method]}")
        figure.colorbar(image, ax=axes[index], label=label, pad=0.01, aspect=12)
    figure.supxlabel("context length evaluated (tokens)", fontsize=8)
    return figure


def _ticks(ax: Axes, table: pd.DataFrame, first: bool, last: bool) -> None:
    """Some lengths and depths by name: a column is narrow."""
    lengths, depths = list(table.columns), list(table.index)
    shown = list(range(len(lengths) - 1, -1, -math.ceil(len(lengths) / 4)))
    ax.set_xticks(shown, [style.length_label(lengths[i]) for i in shown] if last else [])
    shown = sorted({0, len(depths) // 2, len(depths) - 1})
    ax.set_yticks(shown, [f"{100 * depths[i]:.0f}" for i in shown] if first else [])
    if first:
        ax.set_ylabel("depth (%)")
    ax.spines[:].set_visible(False)


def make(found: drawing.Found, item: str) -> tuple[Figure, str]:
    """The figure and its caption; ``item`` is its number in the paper."""
    records = found.records["needle"]
    first = records.iloc[0]
    table = needle_statistics.differences(records)
    numbers = needle_statistics.in_words(table)
    samples = records["haystack_sample"].nunique()
    means = f"Means of {samples} haystacks"
    over = "Intervals (95 %) are over haystacks; they leave out what another training seed would change."
    if each := needle_statistics.by_seed(records):
        means += " and all seeds"
        numbers += f". With ACP and exact, by seed: {each}"
        over = (
            "Intervals (95 %) are over pairs of trainings where there are several seeds, and leave out what "
            "other haystacks would change; with one seed they are over haystacks."
        )
    apart = records.groupby("method")["run"].unique()
    other = (
        "the same weights computed exactly"
        if set(apart["acp"]) & set(apart["exact"])
        else "its exact pair, trained apart"
    )
    shares = " or ".join(f"{100 * share:g} %" for share in sorted(table["needle_share"].unique()))
    trained = (
        f" Trained on text of which {shares} of the sequences hold needles of their own, of other "
        "wording, names and numbers than the test's."
        if table["needle_share"].any()
        else ""
    )
    model = f"{models.in_words(records['size'].unique())} of {models.ARCHITECTURES[first['architecture']]}"
    caption = f"""**Figure {item}.** Needle in a haystack, {first["mode"]} mode, for {model} with ACP
and for {other}: a sentence is hidden at a depth of {first["haystack"]} and asked for at the
end. Above, the share of its words in the greedy answer (not counting words like "and"); below, how much
likelier the right answer of {first["answer_tokens"]} tokens is than after the same prompt without the needle.
{means}.{trained} {numbers}. {over} {style.provenance(records)}"""
    return draw(records), caption
