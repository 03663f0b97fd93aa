"""Savings of removal: time and memory of encoder and decoder against the keep ratio."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from .. import drawing, style
from ..tables import side_by_side
from ..verdict import Verdict, Word

FASTER_BELOW = 0.5  # no saving at keep ratios up to this one contradicts the claim
LESS = 0.99  # relative to all tokens kept; above this ratio, removal saves only the masks
GROWS = 0.5  # time must grow by at least this fraction of the growth of the tokens, or the host limits it
TIMES = {"encoder_ms": "encoder", "decoder_ms": "decoder"}
PANELS = {
    "encoder_ms": "encoder time",
    "decoder_ms": "decoder time",
    "encoder_peak_bytes": "encoder peak memory",
    "decoder_peak_bytes": "decoder peak memory",
    "memory_bytes": "memory held while decoding",
}


def relative(records: pd.DataFrame, column: str) -> pd.DataFrame:
    """A table with ``relative``, the ratio of removal to masking, by length and keep ratio."""
    key, sides = ["run", "length_tokens", "keep_ratio"], ("masked", "removed")
    table = side_by_side(records, key, "method", column, sides, "figure_savings")
    return table.assign(relative=table["removed"] / table["masked"])


def host_bound(records: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """The times that do not grow with the work, because the device waits for its host: the growth of the
    tokens and of the time with masks, from the shortest to the longest texts."""
    masked, found = records[records["method"] == "masked"], {}
    for column in TIMES:
        times = masked.groupby("length_tokens")[column].median()
        tokens, time = times.index[-1] / times.index[0], times.iloc[-1] / times.iloc[0]
        if tokens == 1 or time < GROWS * tokens:
            found[column] = (tokens, time)
    return found


def at_half(records: pd.DataFrame) -> str:
    """Time and memory at a keep ratio of about a half, as sentences; empty without such a keep ratio."""
    shares = records["keep_ratio"].drop_duplicates()
    half = shares[(shares - 0.5).abs() < 0.05]
    if half.empty:
        return ""
    parts = []
    for column in [column for column in PANELS if column not in host_bound(records)]:
        table = relative(records, column)
        ratios = table.loc[table["keep_ratio"].isin(half), "relative"]
        parts.append(f"{PANELS[column]} {style.span(ratios, '.2f')}")
    return f" With half of the tokens removed, relative to masking: {', '.join(parts)}."


def draw(records: pd.DataFrame) -> drawing.Figure:
    """Removal relative to masking against the keep ratio, one panel per length.

    The memory held while decoding coincides with the decoder's peak and is not drawn.

    Args:
        records: ``removal_time`` records of one run.
    """
    lengths = sorted(records["length_tokens"].unique())
    figure, axes = drawing.panels(len(lengths), 2.8, sharey=True, squeeze=False)
    for column, title in list(PANELS.items())[:-1]:
        table = relative(records, column).sort_values("keep_ratio")
        ls = "--" if column in TIMES else "-"
        colour = style.SIZES[0 if "encoder" in column else 1]
        for ax, length in zip(axes[0], lengths, strict=True):
            line = table[table["length_tokens"] == length]
            ax.plot(100 * line["keep_ratio"], 100 * line["relative"], "o", ls=ls, color=colour, label=title)
    for ax, length in zip(axes[0], lengths, strict=True):
        ax.set_title(f"Texts of {length} tokens")
        ax.axhline(100, color="0.4", lw=1, zorder=1)
        ax.set(xlim=(0, 105), ylim=(0, None), xlabel="tokens kept (%)")
    axes[0, 0].set_ylabel("relative to masking (%)")
    drawing.legend(figure, 5)
    return figure


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    records = context.records["removal_time"]
    texts, repeats = (", ".join(map(str, records[name].unique())) for name in ("measured_texts", "repeats"))
    model = context.suite.file.model
    gates = context.suite.file.pruning.config("published", "soft").gated_blocks(model.num_layers)
    after = model.num_layers - 1 - gates[-1]
    waits = " ".join(
        f"The {PANELS[column]} does not measure removal, because the device waits for the host: {tokens:.3g} "
        f"times as many tokens take only {time:.2g} times as long."
        for column, (tokens, time) in host_bound(records).items()
        if tokens > 1
    )
    where = f"After the last of {len(gates)} gates, the encoder has {after} of {model.num_layers} blocks."
    caption = f"""**Savings of removal.**{at_half(records)} The figure shows time (dashed) and peak memory
with dropped tokens removed, relative to the same model with masks. Removal saves time or memory where a
curve is below 100 %. The bias of the gates sets the keep ratio. {waits} Batches have {texts} texts, and
times are medians of {repeats} repeats. After removal, a batch is as long as the text with most remaining
tokens. The decoder generates 16 tokens with a cache. Peak memory is the maximum allocation, excluding the
weights. The memory held between two decoding steps consists of the vectors, their keys and values. This
memory nearly coincides with the decoder's peak and is not drawn. {where}"""
    return draw(records), caption


def encoder_time(removal_time: pd.DataFrame) -> Verdict:
    return _saves(removal_time, "encoder_ms")


def encoder_memory(removal_time: pd.DataFrame) -> Verdict:
    """Inconclusive if the peak does not fall, because it precedes the gates that drop tokens."""
    found = _saves(removal_time, "encoder_peak_bytes")
    if found.word is not Word.CONTRADICTED:
        return found
    short = "the memory peak occurs before the gates that drop tokens"
    return replace(found, word=Word.INCONCLUSIVE, ours=f"{short}\n{found.ours}", short=short)


def decoder_time(removal_time: pd.DataFrame) -> Verdict:
    return _saves(removal_time, "decoder_ms")


def decoder_memory(removal_time: pd.DataFrame) -> Verdict:
    return _saves(removal_time, "decoder_peak_bytes", "memory_bytes")


def _saves(removal_time: pd.DataFrame, *columns: str) -> Verdict:
    """Met if removal needs less at every keep ratio below 1; inconclusive if only up to ``FASTER_BELOW``."""
    worst = pd.concat({column: _worst(removal_time, column) for column in columns})
    few = worst.index.get_level_values("percent") <= 100 * FASTER_BELOW
    if not few.any():
        return Verdict(Word.INCONCLUSIVE, f"no keep ratio is {FASTER_BELOW:.0%} or less")
    if set(columns) <= set(host_bound(removal_time)):
        return Verdict(
            Word.INCONCLUSIVE, "the CPU limits the speed, so the time hardly grows with the tokens"
        )
    less = (worst["relative"] < 1) & (worst["of_all"] <= LESS)
    ratios = ", ".join(
        f"{share:.2f} with {percent:.0f} % kept"
        for percent, share in worst.loc[columns[0], "of_all"].tail(2).items()
    )
    ours = (
        f"{PANELS[column].capitalize()}, {percent:.0f} % kept: {row.relative:.2f} relative to masking, "
        f"{row.of_all:.2f} relative to keeping all tokens"
        for (column, percent), row in worst.iterrows()
    )
    met = (True if less.all() else None) if less[few].all() else False
    short = f"{PANELS[columns[0]].capitalize()} relative to keeping all tokens: {ratios}"
    more = {"n": removal_time["length_tokens"].nunique(), "unit": "length"}
    return Verdict.of(met, "\n".join([short, *ours]), short, **more)


def _worst(removal_time: pd.DataFrame, column: str) -> pd.DataFrame:
    """The maximum over lengths, by keep ratio in percent below 100: ``relative`` (to masks) and ``of_all``
    (``relative``, divided by its value with all tokens kept)."""
    table = relative(removal_time, column)
    whole = table[table["keep_ratio"] == 1].set_index("length_tokens")["relative"]
    table["of_all"] = table["relative"] / table["length_tokens"].map(whole)
    percent = (100 * table["keep_ratio"]).round().rename("percent")
    return table[table["keep_ratio"] < 1].groupby(percent)[["relative", "of_all"]].max()
