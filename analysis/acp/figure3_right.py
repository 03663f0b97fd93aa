"""Figures 3 and 11 (right), 9 and A6: the needle in a haystack with and without ACP."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pandas as pd

from .. import drawing, style
from ..verdict import Verdict, Word
from . import models, needle_facts, needle_statistics, paired
from .needle_statistics import FOUND_RECALL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RECALL_POINTS = 10.0  # a loss of recall that an interval must rule out to show that there is no damage
TITLES = {"acp": "with ACP", "exact": "without"}
ROWS = {
    "answer_recall": "words found (%)",
    "gain_nats": "the answer is likelier\nby (nats)",
    "nats_from_certain": "the answer is short of\ncertain by (nats)",
}


def draw(records: pd.DataFrame) -> Figure:
    """Heat maps, depth of the needle over context length: a column for each kind of model and method.

    Above, the recall of the needle's words; below, the log-likelihood of the answer, with less without the
    needle. Models that were trained to find gain nearly all there is to gain: of them, what is left to
    certainty. Each cell is the mean over haystacks and seeds.

    Args:
        records: ``needle`` records with both methods for each training length, size and share of needles.
    """
    from matplotlib import pyplot as plt
    from matplotlib.colors import Normalize

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
    short = max(cells["nats_from_certain"].max(), 1.0)
    norms = {"answer_recall": Normalize(0, 100), "gain_nats": Normalize(-largest, largest)}
    norms["nats_from_certain"] = Normalize(0, short)
    maps = {"answer_recall": "viridis", "gain_nats": "RdBu", "nats_from_certain": "magma_r"}
    below = "nats_from_certain" if cells["needle_share"].all() else "gain_nats"
    for index, value in enumerate(("answer_recall", below)):
        for ax, (setting, title, method) in zip(axes[index], columns, strict=True):
            table = groups[*setting, method].pivot(
                index="depth", columns="evaluated_length_tokens", values=value
            )
            image = ax.imshow(table, aspect="auto", cmap=maps[value], norm=norms[value])
            _ticks(ax, table, first=ax is axes[index, 0], last=index == 1)
            if index == 0:
                ax.set_title(f"{title}{TITLES[method]}")
        figure.colorbar(image, ax=axes[index], label=ROWS[value], pad=0.01, aspect=12)
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


def make(found: drawing.Found) -> tuple[Figure, str]:
    records = found.records["needle"]
    first = records.iloc[0]
    table = needle_statistics.differences(records)
    numbers = needle_statistics.in_words(table)
    samples = records["haystack_sample"].nunique()
    means = f"Means of {samples} haystacks"
    over = "Intervals (95 %) are over haystacks. They leave out what another training seed would change."
    if each := needle_statistics.by_seed(records):
        means += " and all seeds"
        numbers += f". With ACP and exact, by seed: {each}"
        over = (
            "Intervals (95 %) are over pairs of trainings where there are several seeds, else over haystacks."
            " They leave out what the other would change."
        )
    apart = records.groupby("method")["run"].unique()
    other = (
        "the same weights computed exactly"
        if set(apart["acp"]) & set(apart["exact"])
        else "its exact pair, trained apart"
    )
    shares = " or ".join(f"{100 * share:g} %" for share in sorted(table["needle_share"].unique()))
    trained = (
        f" In training {shares} of the sequences hold needles of their own. Their wording, names and numbers "
        "differ from the test's."
        if table["needle_share"].any()
        else ""
    )
    with_acp, without = (style.span(table[f"recall_{method}"], ".3g") for method in TITLES)
    finds = (
        "Neither model finds the needle."
        if not table[[f"recall_{method}" for method in TITLES]].round().any(axis=None)
        else f"With ACP the model finds {with_acp} % of the hidden words, without {without} %."
    )
    below = (
        f"how many nats the model is short of being certain of the right {first['answer_tokens']} tokens"
        if table["needle_share"].all()
        else f"how much likelier the right answer of {first['answer_tokens']} tokens is than after the same "
        "prompt without the needle"
    )
    asked = ""
    if (facts := found.records.get("needle_facts")) is not None:
        asked = f" Older pairs are in Table A1. Many facts: {needle_facts.kept(facts).ours}."
    model = f"{models.in_words(records['size'].unique())} of {models.ARCHITECTURES[first['architecture']]}"
    caption = f"""**{found.item.label}.** {finds} This is the needle in a haystack, {first["mode"]} mode: a
sentence is hidden at a depth of {first["haystack"]} and asked for at the end. The models are {model}, with
ACP and without: {other}. Above: the share of the sentence's words in the greedy answer, not counting words
like "and". Below: {below}. {means}.{trained} {numbers}. {over}{asked} {style.provenance(records)}"""
    return draw(records), caption


def retrieval_kept(needle: pd.DataFrame, facts: pd.DataFrame | None = None) -> Verdict:
    """Judged by :func:`needle_facts.kept` if there are ``facts``. Else met if ACP's recall is not below the
    exact one by more than chance, wherever that one finds :data:`FOUND_RECALL` of the words."""
    table = needle_statistics.differences(needle)
    ours = needle_statistics.in_words(table)
    if facts is not None:
        verdict = needle_facts.kept(facts)
        ours = f"{verdict.ours}. One fact, without older pairs (Table A1): {ours}"
        return replace(verdict, ours=ours)
    finds = table[table["recall_exact"] >= 100 * FOUND_RECALL]
    if finds.empty:
        why = "exact attention does not find the needle either"
        return Verdict(Word.UNTOLD, f"{why}. {ours}", why)
    if (finds["apart"] & (finds["seeds"] < 2)).any():
        return Verdict(Word.UNTOLD, f"{paired.ONE_PAIR}. {ours}", paired.ONE_PAIR)
    if finds["recall_high"].isna().any():
        return Verdict(Word.UNTOLD, f"one haystack has no interval. {ours}")
    if (finds["recall_high"] < 0).any():
        return Verdict(Word.CONTRADICTED, ours)
    if (finds["recall_low"] <= -RECALL_POINTS).any():
        return Verdict(
            Word.UNTOLD,
            f"too few haystacks or seeds: a loss of {RECALL_POINTS:g} points would not show. {ours}",
        )
    return Verdict(Word.MEASURED, ours)
