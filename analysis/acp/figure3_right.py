"""Figures 3 and 11 (right), 9 and A6: the needle-in-a-haystack test with and without ACP."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from .. import drawing, style
from ..verdict import Verdict, Word
from . import naming, needle_facts, needle_statistics, paired
from .needle_statistics import FOUND_RECALL

RECALL_POINTS = 10.0  # the loss of recall that the interval must exclude
TITLES = {"acp": "with ACP", "exact": "without"}


def draw(records: pd.DataFrame, facts: pd.DataFrame | None = None) -> drawing.Figure | None:
    """With ``facts``, the likelihoods of many needles, one panel per seed. Without ``facts``, heat maps of
    recall by depth and context length, one per method and setting. None if no model finds the needle.

    Args:
        records, facts: ``needle`` and ``needle_facts`` records with both methods for each training length,
            size and fraction of needles.
    """
    if facts is not None:
        return _seeds(facts)
    if not _finds(records):
        return None
    cells = needle_statistics.cells(records)
    key = [*needle_statistics.SETTING, "method"]
    groups = cells.groupby(key)
    names = needle_statistics.names(groups.first().reset_index())
    figure, axes = drawing.panels(len(groups), 2.3, width=min(style.PAGE_INCHES, 0.9 + 1.6 * len(groups)))
    for ax, (setting, table), parts in zip(axes, groups, names, strict=True):
        grid = table.pivot(index="depth", columns="evaluated_length_tokens", values="answer_recall")
        image = ax.imshow(grid, aspect="auto", cmap="viridis", vmin=0, vmax=100)
        lengths, depths = range(len(grid.columns))[:: -(-len(grid.columns) // 4)], (0, len(grid) - 1)
        ax.set_xticks(lengths, [style.length_label(grid.columns[i]) for i in lengths])
        ax.set_yticks(depths, [f"{100 * grid.index[i]:.0f}" for i in depths])
        name = ", ".join([*parts, TITLES[setting[-1]]])
        ax.set_title(f"{name}: {table['answer_recall'].mean():.3g} % recall")
        ax.grid(visible=False)
    axes[0].set_ylabel("depth (%)")
    figure.colorbar(image, ax=axes, label="recall (%)", pad=0.01, aspect=12)
    figure.supxlabel("context length evaluated (tokens)")
    return figure


def _seeds(facts: pd.DataFrame) -> drawing.Figure:
    """The NLL of each needle's answer with ACP against the NLL of the exact run, one panel per seed."""
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
        words = (
            f"largest difference {largest:.1f}\nmean difference {mean:.3f}" if largest else "all identical"
        )
        ax.set_title(f"Seed {seed}")
        ax.text(0.03, 0.97, words, transform=ax.transAxes, va="top")
        ax.axline((0, 0), slope=1, color=style.PAPER, lw=0.8, zorder=1)
        ax.scatter(nats["exact"], nats["acp"], 12, alpha=0.8, color=style.ROLES["acp"])
        ax.set(xlabel="NLL, exact (nats)", xlim=ends, ylim=ends, aspect="equal")
        ax.locator_params(nbins=4)
    axes[0, 0].set_ylabel("NLL, ACP (nats)")
    return figure


def _finds(records: pd.DataFrame) -> bool:
    """Whether the recall of some model reaches :data:`FOUND_RECALL` at some depth and length."""
    return bool(needle_statistics.cells(records)["answer_recall"].max() >= 100 * FOUND_RECALL)


def found_words(records: pd.DataFrame) -> str:
    """A sentence on the mean recall with and without ACP."""
    means = 100 * records.groupby([*needle_statistics.SETTING, "method"])["answer_recall"].mean()
    with_acp, without = (style.span(means.xs(method, level="method"), ".3g") for method in TITLES)
    if not means.round().any():
        return "Neither model finds the needle."
    return f"The mean recall is {with_acp} % with ACP and {without} % without."


def make(context: drawing.DrawContext) -> tuple[drawing.Figure | None, str]:
    records, facts = context.records["needle"], context.records.get("needle_facts")
    first, table = records.iloc[0], needle_statistics.differences(records)
    if facts is not None:
        found = needle_facts.kept(facts).ours.replace("\n", ". ")
        result = f"{found[:1].upper()}{found[1:]}."
        shown = (
            "Each point is one of many needles, with its NLL with ACP and in the exact run. NLL is the mean "
            "negative log-likelihood of the right answer, and is 0 for certainty. Grey lines mark equality. "
            "Table A1 lists the older pairs. The remaining results use a single needle and are not plotted"
        )
    else:
        result = found_words(records)
        shown = (
            "Each cell shows the recall: the percentage of the needle's words in the greedy answer, without "
            'function words such as "and"'
            if _finds(records)
            else "The recall of every model is too low for a plot"
        )
    apart = records.groupby("method")["run"].unique()
    shared = set(apart["acp"]) & set(apart["exact"])
    runs = "the same weights with and without ACP" if shared else "separate runs with ACP and exact attention"
    fractions = " or ".join(f"{100 * share:g} %" for share in sorted(table["needle_fraction"].unique()))
    trained = (
        f" In training, {fractions} of the sequences contain needles with other wording, names and numbers."
        if table["needle_fraction"].any()
        else ""
    )
    seeds = needle_statistics.by_seed(records)
    unit = "pairs of training runs if several seeds exist, and otherwise haystacks" if seeds else "haystacks"
    each = f" Mean recall with ACP and exact, by seed: {seeds}." if seeds else ""
    size = naming.in_words(records["size"].unique())
    caption = f"""{naming.heading(context.item)} {result} The test in {first["mode"]} mode hides a sentence,
the needle, in {first["haystack"]} and asks for the sentence at the end. The models have {size} and
are {runs} of {naming.ARCHITECTURES[first["architecture"]]}. {shown}. Numbers are means over
{records["haystack_sample"].nunique()} haystacks{" and all seeds" * bool(seeds)}.{trained}
{needle_statistics.in_words(table)}.{each} The 95 % intervals are over {unit}."""
    return draw(records, facts), caption


def retrieval_kept(needle: pd.DataFrame, facts: pd.DataFrame | None = None) -> Verdict:
    """With ``facts``, the verdict of :func:`needle_facts.kept`. Otherwise reproduced if the recall with ACP
    is not significantly below the exact recall in any setting with an exact recall of
    :data:`FOUND_RECALL`."""
    table = needle_statistics.differences(needle)
    ours = needle_statistics.in_words(table).replace(". ", "\n")
    if facts is not None:
        verdict = needle_facts.kept(facts)
        ours = f"{verdict.ours}\nWith one needle, and without the older pairs of Table A1:\n{ours}"
        return replace(verdict, ours=ours)
    finds = table[table["recall_exact"] >= 100 * FOUND_RECALL]
    if finds.empty:
        why = "exact attention does not find the needle"
        return Verdict(Word.INCONCLUSIVE, f"{why}\n{ours}", why)
    if (finds["apart"] & (finds["seeds"] < 2)).any():
        return Verdict(Word.INCONCLUSIVE, f"{paired.ONE_PAIR}\n{ours}", paired.ONE_PAIR)
    if finds["recall_high"].isna().any():
        return Verdict(Word.INCONCLUSIVE, f"one haystack gives no interval\n{ours}")
    if (finds["recall_high"] < 0).any():
        return Verdict(Word.CONTRADICTED, ours)
    if (finds["recall_low"] <= -RECALL_POINTS).any():
        return Verdict(
            Word.INCONCLUSIVE,
            f"too few haystacks or seeds to exclude a loss of {RECALL_POINTS:g} points\n{ours}",
        )
    return Verdict(Word.REPRODUCED, ours)
