"""Figures 3 and 11 (right), 9 and A6: the needle in a haystack with and without ACP."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from .. import drawing, style
from ..verdict import Verdict, Word
from . import naming, needle_facts, needle_statistics, paired
from .needle_statistics import FOUND_RECALL

RECALL_POINTS = 10.0  # a loss of recall that an interval must rule out to show that there is no damage
TITLES = {"acp": "with ACP", "exact": "without"}


def draw(records: pd.DataFrame, facts: pd.DataFrame | None = None) -> drawing.Figure | None:
    """The likelihood of many facts, a panel a seed; without any a heat map a method and kind of model, depth
    of the needle over context length. None if no model finds the needle.

    Args:
        records, facts: ``needle`` and ``needle_facts`` records with both methods for each training length,
            size and share of needles.
    """
    if facts is not None:
        return _seeds(facts)
    if not _finds(records):
        return None
    cells = needle_statistics.cells(records)
    key = needle_statistics.SETTING
    settings = cells[key].drop_duplicates().sort_values(key)
    names = [", ".join([*parts, ""]) for parts in needle_statistics.names(settings)]
    groups = dict(list(cells.groupby([*key, "method"])))
    columns = [
        (groups[*setting, method], f"{name}{words}")
        for setting, name in zip(settings.itertuples(index=False, name=None), names, strict=True)
        for method, words in TITLES.items()
    ]
    figure, axes = drawing.panels(len(columns), 2.3, width=min(style.PAGE_INCHES, 0.9 + 1.6 * len(columns)))
    for ax, (table, name) in zip(axes, columns, strict=True):
        grid = table.pivot(index="depth", columns="evaluated_length_tokens", values="answer_recall")
        image = ax.imshow(grid, aspect="auto", cmap="viridis", vmin=0, vmax=100)
        lengths, depths = range(len(grid.columns))[:: -(-len(grid.columns) // 4)], (0, len(grid) - 1)
        ax.set_xticks(lengths, [style.length_label(grid.columns[i]) for i in lengths])
        ax.set_yticks(depths, [f"{100 * grid.index[i]:.0f}" for i in depths])
        ax.set_title(f"{name}: {table['answer_recall'].mean():.3g} % found")
        ax.grid(visible=False)
    axes[0].set_ylabel("depth (%)")
    figure.colorbar(image, ax=axes, label="words found (%)", pad=0.01, aspect=12)
    figure.supxlabel("context length evaluated (tokens)")
    return figure


def _seeds(facts: pd.DataFrame) -> drawing.Figure:
    """Nats that each fact is short of certain with ACP, over those of the exact run; a panel a seed."""
    own = facts[(facts["method"] == "exact") == facts["log_pruning_tolerance"].isna()]
    log_likelihood = own.groupby(["seed", "fact", "method"])["answer_log_likelihood_nats"].mean()
    seeds = list((-log_likelihood).unstack("method").dropna().groupby("seed"))
    ends = (-0.5, 0.5 - 1.02 * log_likelihood.min())
    figure, axes = drawing.panels(
        len(seeds), 2.9, width=2.33 * len(seeds), squeeze=False, sharex=True, sharey=True
    )
    for ax, (seed, nats) in zip(axes[0], seeds, strict=True):
        apart = nats["acp"] - nats["exact"]
        largest, mean = apart.abs().max(), abs(apart.mean())
        words = f"largest difference {largest:.1f}\nof the means {mean:.3f}" if largest else "all identical"
        ax.set_title(f"Seed {seed}")
        ax.text(0.97, 0.03, words, transform=ax.transAxes, ha="right", va="bottom")
        ax.axline((0, 0), slope=1, color=style.PAPER, lw=0.8, zorder=1)
        ax.scatter(nats["exact"], nats["acp"], 12, alpha=0.8)
        ax.set(xlabel="NLL, exact (nats)", xlim=ends, ylim=ends, aspect="equal")
        ax.locator_params(nbins=4)
    axes[0, 0].set_ylabel("NLL, ACP (nats)")
    return figure


def _finds(records: pd.DataFrame) -> bool:
    """Whether some model finds, at some depth and length, more than what cannot be damaged."""
    return bool(needle_statistics.cells(records)["answer_recall"].max() >= 100 * FOUND_RECALL)


def found_words(records: pd.DataFrame) -> str:
    """What both find, as a sentence."""
    means = 100 * records.groupby([*needle_statistics.SETTING, "method"])["answer_recall"].mean()
    with_acp, without = (style.span(means.xs(method, level="method"), ".3g") for method in TITLES)
    if not means.round().any():
        return "Neither model finds the needle."
    return f"With ACP the model finds {with_acp} % of the hidden words, without {without} %."


def make(context: drawing.DrawContext) -> tuple[drawing.Figure | None, str]:
    records, facts = context.records["needle"], context.records.get("needle_facts")
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
            "Intervals (95 %) are over pairs of training runs if there are several seeds, else haystacks."
            " They leave out what the other would change."
        )
    apart = records.groupby("method")["run"].unique()
    other = (
        "the same weights computed exactly"
        if set(apart["acp"]) & set(apart["exact"])
        else "its exact pair, trained apart"
    )
    shares = " or ".join(f"{100 * share:g} %" for share in sorted(table["needle_fraction"].unique()))
    trained = (
        f" In training {shares} of the sequences hold needles of their own. Their wording, names and numbers "
        "differ from the test's."
        if table["needle_fraction"].any()
        else ""
    )
    result, shown = found_words(records), "Every model finds too few words for a plot"
    if facts is not None:
        result = f"{needle_facts.kept(facts).ours}."
        shown = (
            "Each point is one of many facts, asked for in turn, with ACP and exact. NLL: the mean "
            "negative log-likelihood of the right answer, 0 if certain. The grey line: both are equal. "
            "Older pairs are in Table A1. The remaining results use a single fact and are not plotted"
        )
    elif _finds(records):
        shown = (
            'Shown is the share of the sentence\'s words in the greedy answer, not counting words like "and"'
        )
    model = f"{naming.in_words(records['size'].unique())} of {naming.ARCHITECTURES[first['architecture']]}"
    caption = f"""**{context.item.label}.** {result} This is the needle in a haystack,
{first["mode"]} mode: a sentence is hidden at a depth of {first["haystack"]} and asked for at the end. The
models are {model}, with ACP and without: {other}. {shown}. {means}.{trained} {numbers}. {over}"""
    return draw(records, facts), caption


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
        return Verdict(Word.INCONCLUSIVE, f"{why}. {ours}", why)
    if (finds["apart"] & (finds["seeds"] < 2)).any():
        return Verdict(Word.INCONCLUSIVE, f"{paired.ONE_PAIR}. {ours}", paired.ONE_PAIR)
    if finds["recall_high"].isna().any():
        return Verdict(Word.INCONCLUSIVE, f"one haystack has no interval. {ours}")
    if (finds["recall_high"] < 0).any():
        return Verdict(Word.CONTRADICTED, ours)
    if (finds["recall_low"] <= -RECALL_POINTS).any():
        return Verdict(
            Word.INCONCLUSIVE,
            f"too few haystacks or seeds: a loss of {RECALL_POINTS:g} points would not show. {ours}",
        )
    return Verdict(Word.REPRODUCED, ours)
