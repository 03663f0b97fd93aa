"""What removal saves: time of encoder and decoder and memory against the kept share."""

from __future__ import annotations

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from .. import drawing, style
from ..tables import side_by_side

PANELS = {"encoder_ms": "encoder time", "decoder_ms": "decoder time", "memory_bytes": "decoder's memory"}


def relative(records: pd.DataFrame, column: str) -> pd.DataFrame:
    """``relative``: with removal over with masks, by length and kept share."""
    table = side_by_side(
        records,
        ["run", "length_tokens", "kept_ratio"],
        "method",
        column,
        ("masked", "removed"),
        "figure_savings",
    )
    return table.assign(relative=table["removed"] / table["masked"])


def draw(records: pd.DataFrame) -> Figure:
    """Removal relative to masks against the kept share, one line a length.

    Args:
        records: ``removal_time`` records of one run.
    """
    figure, axes = plt.subplots(
        1, len(PANELS), figsize=(style.PAGE_INCHES, 2.2), sharey=True, layout="constrained"
    )
    for ax, (column, title) in zip(axes, PANELS.items(), strict=True):
        table = relative(records, column).sort_values("kept_ratio")
        for colour, (length, line) in zip(style.SIZES, table.groupby("length_tokens"), strict=False):
            ax.plot(line["kept_ratio"], line["relative"], "o-", ms=3, lw=1.1, color=colour, label=f"{length}")
        ax.axhline(1, color="0.6", lw=0.6, zorder=0)
        ax.set(title=title, xlabel="share of tokens kept", xlim=(0, 1.05), ylim=(0, None))
    axes[0].set(ylabel="removed / masked")
    axes[0].legend(title="tokens of a text")
    return figure


def make(found: drawing.Found) -> tuple[Figure, str]:
    records = found.records["removal_time"]
    texts, repeats = (", ".join(map(str, records[name].unique())) for name in ("measured_texts", "repeats"))
    caption = f"""**What removal saves.** Time and memory with dropped tokens taken out after each gate, over
the same model with masks, against the kept share, which the gates' bias sets. Batches of {texts} texts,
medians of {repeats}; the decoder writes 16 tokens, cached; memory is what it holds of the texts.
{style.provenance(records)}"""
    return draw(records), caption


if __name__ == "__main__":
    drawing.main(globals())
