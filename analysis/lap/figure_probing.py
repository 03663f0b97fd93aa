"""The probing classifier on kept vectors, against its baselines."""

from __future__ import annotations

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from .. import drawing, style
from ..tables import one_each

NAMES = {
    "kept_votes": "kept vectors, votes",
    "all_tokens_votes": "all tokens, gates open, votes",
    "all_tokens_mean": "all tokens, gates open, mean",
    "bag_of_words": "bag of words, logistic regression",
}


def draw(records: pd.DataFrame) -> Figure:
    """A bar per classifier, and the larger class as a line.

    Args:
        records: ``probe`` records of one run.
    """
    records = one_each(records, ["classifier"], "figure_probing").set_index("classifier").loc[list(NAMES)]
    figure, ax = plt.subplots(figsize=(style.COLUMN_INCHES * 1.3, 1.7), layout="constrained")
    names = [NAMES[name] for name in records.index]
    colours = ["#D55E00", *[style.PAPER] * (len(names) - 1)]
    bars = ax.barh(names, records["accuracy"], color=colours)
    ax.bar_label(bars, fmt="%.3f", padding=2, fontsize=7)
    chance = records["larger_class"].iloc[0]
    ax.axvline(chance, color="0.2", lw=0.8, ls="--")
    ax.text(chance, -0.75, "larger class", ha="center", fontsize=7, color="0.2")
    ax.set(xlim=(0.4, 1.05), xlabel="held-out accuracy")
    ax.invert_yaxis()
    return figure


def make(found: drawing.Found) -> tuple[Figure, str]:
    records, question = found.records["probe"], found.suite.file.data.sides
    row = records.set_index("classifier").loc["kept_votes"]
    caption = f"""**Probing.** Accuracy of small heads on frozen vectors: {question}. Kept vectors are
{row["vectors_per_text"]:.1f} a text. {int(row["train_texts"]):,} training texts,
{int(row["measured_texts"]):,} held-out ones. {style.provenance(records)}"""
    return draw(records), caption


if __name__ == "__main__":
    drawing.main(globals())
