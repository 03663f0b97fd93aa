"""Figures 2 and 10: savings in FLOPs and memory accesses, attention time, and training throughput."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import pandas as pd

from .. import drawing, style
from ..tables import some
from ..verdict import Verdict, Word, in_range
from . import bars, by_length, naming, statistics, training_logs, versions

SIZES_POINTS = 2.0  # the margin between the pruned ratios of equal sizes
FALLING_POINTS = -1.0  # per doubling of the tokens; a ratio that falls faster has not converged
PRUNED_PERCENT = (60.0, 80.0)  # the range for the paper's "around 70 %"
OF_BLOCKS = {"paper": "about 70", "what": " of the blocks are pruned"}
# Gradient checkpointing runs the forward pass again.
CHECKPOINTED = """\
Computed for gradient checkpointing, which repeats the forward pass, as 1 − (2 forward + backward with \
ACP) / (2 forward + backward without ACP):"""
# The origin of delta.
THRESHOLD = {
    "pro": "Delta is derived from the QK-norm parameters (Appendix E) at no cost.",
    "llama": "Delta is derived from the measured norms of q and k; throughput includes these measurements, "
    "and attention time does not.",
}


def draw(records: Mapping[str, pd.DataFrame], item: str = "figure2") -> drawing.Figure:
    """Three panels of bars, with a group for each context length and a colour for each size.

    Args:
        records: ``pruned_ratio``, ``attention_time`` and ``throughput`` records, one run per bar.
        item: the item of ``paper_values.csv`` whose ranges are drawn as bands.
    """
    pruned = statistics.pruned_of_grid(records["pruned_ratio"])
    time = in_bars(statistics.time_reduction(records["attention_time"]), "{:,.0f}".format)
    speed = in_bars(statistics.throughput_gain(records["throughput"]), style.count_label)
    panels = (
        (pruned, "pruned_ratio", "Pruned blocks", "pruned ratio"),
        (time, "attention_time_reduction", "Attention time (ms in bars)", "time saved"),
        (speed, "throughput_gain", "Throughput (tokens/s in bars)", "throughput gain"),
    )
    figure, axes = drawing.panels(3, 3.1)
    for ax, (table, metric, title, axis) in zip(axes, panels, strict=True):
        bars.of_paper(ax, *naming.PUBLISHED.range(item, metric))
        bars.grouped(ax, table.assign(size=naming.without_tokens(table["size"])))
        ax.set(title=title, ylabel=f"{axis} (%)")
    for ax in axes[:2]:
        ax.set_ylim(top=105)
    sizes = naming.without_tokens(pruned["size"])
    for index, (size, tokens) in enumerate(pruned.groupby(sizes, sort=False)["trained_tokens"]):
        axes[0].bar(0, 0, label=_named(size, tokens), **bars.look(size, index, tokens.max()))
    drawing.legend(figure, 3)
    return figure


def in_bars(table: pd.DataFrame, form: Callable[[float], str]) -> pd.DataFrame:
    """The table with the column ``inside``, without and with ACP: "361 → 127"."""
    return table.assign(inside=table["exact"].map(form) + " → " + table["acp"].map(form))


def _named(size: str, tokens: pd.Series) -> str:
    """ "760M parameters, 20M to 100M tokens (pale: undertrained)"."""
    mark = " (pale: undertrained)" if naming.at_start(tokens.min(), size) else ""
    return f"{naming.in_words([size])}, {style.count_span(tokens)} tokens{mark}"


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    records, architecture = context.records, context.runs[0].architecture
    tokens = ", ".join(f"{t:,}" for t in records["attention_time"]["measured_tokens"].unique())
    pruned = statistics.pruned_of_grid(records["pruned_ratio"])
    grids = pruned.drop_duplicates("context_length_tokens").sort_values("context_length_tokens")
    maxima = ", ".join(
        f"{row.grid_percent:.1f} % at {style.length_label(row.context_length_tokens)}"
        for row in grids.itertuples()
    )
    gained = naming.span(statistics.throughput_gain(records["throughput"]), "+.0f")
    pale = (
        "Pale bars show undertrained models, which saw fewer tokens than they have parameters and fewer than "
        f"{style.count_label(naming.START_TOKENS)}. "
    )
    caption = f"""{naming.heading(context.item)} ACP prunes {naming.span(pruned)} of the causal blocks of
{naming.ARCHITECTURES[architecture]}. Training throughput changes by {gained}.
{pale if naming.starting(pruned).any() else ""}(a) Pruned blocks as a percentage of the causal blocks, on
held-out text. Black lines mark the achievable maximum of a head that keeps each query's own key and the
previous key: {maxima}. Only a closed forget gate prunes more. (b) Attention time saved, forward and backward,
including the boundary search. The bars show the times without and with ACP for {tokens} tokens, in ms. (c)
Gain of training throughput. The bars show the throughput without and with ACP, in tokens per second.
{THRESHOLD[architecture]} Grey bands show the paper's ranges for 125M to 760M parameters and 4k to 16k tokens.
The paper uses other hardware, so only percentages are comparable.
{versions.timed_on(records["attention_time"], records["throughput"])}"""
    return draw(records, context.item.name), caption


# --- claims; rows past the undertrained stage decide, see naming.settled --------------------------------


def pruned_at_longest(pruned_ratio: pd.DataFrame) -> Verdict:
    """Reproduced if every size prunes :data:`PRUNED_PERCENT` at its longest context."""
    table = by_length.in_order(statistics.pruned_percent(pruned_ratio))
    settled = naming.settled(table.groupby("size", sort=False).tail(1))["percent"]
    return in_range(settled, *PRUNED_PERCENT, by_length.listed(table), n=len(settled), **OF_BLOCKS)


def pruned_with_recipe(pruned_ratio: pd.DataFrame, training_log: pd.DataFrame) -> Verdict:
    """Reproduced if runs with the paper's recipe prune :data:`PRUNED_PERCENT` at 4k and at 16k; otherwise
    inconclusive if a ratio still falls, and contradicted if it is constant."""
    several = pruned_ratio["context_length_tokens"].nunique() > 1
    both = several and naming.records_have_paper_recipe(pruned_ratio)
    table = statistics.pruned_percent(
        some(pruned_ratio if both else None, "published runs at two lengths with the paper's recipe")
    )
    found = in_range(table["percent"], *PRUNED_PERCENT, by_length.listed(table, digits=1), **OF_BLOCKS)
    logs = training_log[training_log["layer"].notna()].groupby("run", sort=False)
    falls = {run: _points_per_doubling(log) for run, log in logs}
    each = ", ".join(f"{points:+.1f} points ({run})" for run, points in falls.items())
    missed = Word.INCONCLUSIVE if min(falls.values()) < FALLING_POINTS else Word.CONTRADICTED
    word = found.word if found.word is Word.REPRODUCED else missed
    ours = f"{found.ours}\nChange of the pruned ratio per doubling of the training tokens: {each}"
    return replace(
        found,
        word=word,
        ours=ours,
        short=found.short + ". The ratio still falls at the end" * (word is Word.INCONCLUSIVE),
        n=len(table),
    )


def _points_per_doubling(training_log: pd.DataFrame) -> float:
    """The change of the pruned ratio per doubling of the tokens, over the last two doublings of a run."""
    percent = training_logs.mean_pruned(training_log).set_index("tokens")["percent"]
    before = percent[percent.index <= percent.index[-1] / 4]
    return (percent.iloc[-1] - before.iloc[-1]) / math.log2(percent.index[-1] / before.index[-1])


def pruned_as_in_the_paper(pruned_ratio: pd.DataFrame) -> Verdict:
    """Reproduced if runs with the paper's learning rate and vocabulary size prune :data:`PRUNED_PERCENT` at
    more than 4k."""
    paper = pruned_ratio[pruned_ratio["size"].str.endswith("-lr2e-3-50k")]
    table = statistics.pruned_percent(paper).sort_values("context_length_tokens")
    longer = some(table[table["context_length_tokens"] > 4096], "pruned_ratio at more than 4k")
    more = OF_BLOCKS | {"n": len(longer), "runs": paper["run"].unique()}
    ours = (
        f"{by_length.listed(table, digits=1)}. Several runs of one length have different seeds. "
        "The run at 8k is timed (docs/training.md), and suite h100-recipe times 4k and 16k"
    )
    return in_range(longer["percent"], *PRUNED_PERCENT, ours, **more)


def savings_grow(pruned_ratio: pd.DataFrame) -> Verdict:
    """Reproduced if every size prunes more at every longer context, and no smaller fraction of the blocks
    left of the diagonal."""
    table = statistics.pruned_of_grid(pruned_ratio)
    most = [statistics.prunable_percent(*grid) for grid in table[statistics.GRID].itertuples(index=False)]
    return by_length.grows(table.assign(of_grid_percent=100 * table["percent"] / most))


def sizes_alike(pruned_ratio: pd.DataFrame) -> Verdict:
    """Reproduced if the pruned ratios of the sizes agree within :data:`SIZES_POINTS` at every length."""
    table = naming.settled(by_length.in_order(statistics.pruned_percent(pruned_ratio)))
    percent = table.groupby("context_length_tokens")["percent"].agg(["min", "max", "count"])
    percent = some(percent[percent["count"] > 1], "pruned_ratio of two sizes at one context length")
    met = bool((percent["max"] - percent["min"] < SIZES_POINTS).all())
    ends = (
        f"{row.min:.1f} to {row.max:.1f} % at {style.length_label(row.Index)}" for row in percent.itertuples()
    )
    return Verdict.of(
        met, by_length.listed(table, digits=1), f"pruned blocks: {', '.join(ends)}", n=len(table)
    )


def time_saved(attention_time: pd.DataFrame) -> Verdict:
    """Reproduced if every run saves a percentage of attention time in the paper's range."""
    found = _in_paper_range(
        statistics.time_reduction(attention_time),
        "attention_time_reduction",
        "attention time saved (%)",
        " less time",
    )
    twice = by_length.in_order(statistics.time_reduction(attention_time, forwards=2))
    return replace(found, ours=f"{found.ours}\n{by_length.listed(twice, CHECKPOINTED)}")


def throughput_gained(throughput: pd.DataFrame, checkpointed: pd.DataFrame | None = None) -> Verdict:
    """Reproduced if every run gains a percentage in the paper's range. Timings with gradient checkpointing,
    which the paper uses, decide if they exist."""
    table = statistics.throughput_gain(throughput if checkpointed is None else checkpointed)
    what = f" more throughput {'without' if checkpointed is None else 'with'} gradient checkpointing"
    return _in_paper_range(table, "throughput_gain", "training throughput gain (%)", what, sign="+")


def _in_paper_range(table: pd.DataFrame, quantity: str, axis: str, what: str, sign: str = "") -> Verdict:
    """Judges ``percent`` of the runs past the undertrained stage by the paper's range of a quantity."""
    table = by_length.in_order(table)
    return in_range(
        naming.settled(table)["percent"],
        *naming.PUBLISHED.range("figure2", quantity),
        by_length.listed(table, f"{axis.partition(' (')[0].capitalize()},", sign=sign),
        what=what,
        values=by_length.by_model(table),
        axis=axis,
    )


def gains_grow(throughput: pd.DataFrame) -> Verdict:
    """Reproduced if every size gains more throughput at every longer context."""
    return by_length.grows(statistics.throughput_gain(throughput), "Training throughput gain,", sign="+")


def attention_sped_up(attention_time: pd.DataFrame) -> Verdict:
    """Reproduced if the attention of every run is faster by a factor in the paper's range."""
    table = statistics.time_reduction(attention_time)
    table = by_length.in_order(table.assign(times=table["exact"] / table["acp"]))
    ours = by_length.listed(table, "Speedup of attention in", "times", digits=1, unit=" times")
    return in_range(
        naming.settled(table)["times"],
        *naming.PUBLISHED.range("figure2", "attention_speedup"),
        ours,
        suffix=" times",
        what=" as fast",
        nothing=1.0,
    )
