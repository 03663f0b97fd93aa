"""Figure A3: one model far past the context length that it was trained with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from acp_repro.chain.paper import Claim, Item
from acp_repro.papers.acp import grid

from .. import drawing, style
from ..tables import one_each
from ..verdict import Status, Verdict
from . import by_length, models, sweeps

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(records: pd.DataFrame) -> Figure:
    """Pruned share and mean loss against the length of the context that is evaluated.

    Args:
        records: ``long_context`` records of one run.
    """
    from matplotlib import pyplot as plt

    one_each(records, ["evaluated_length_tokens"], "long_context")
    records = records.sort_values("evaluated_length_tokens")
    lengths = records["evaluated_length_tokens"]
    trained = records["context_length_tokens"].iloc[0]
    figure, axes = plt.subplots(2, 1, figsize=(style.COLUMN_INCHES, 3.2), layout="constrained", sharex=True)
    for ax, values, form, color, title, least in zip(
        axes,
        (100 * records["pruned_ratio"], records["loss_nats"]),
        ("{:.1f}", "{:.4f}"),
        style.SIZES,
        ("Attention pruned (%)", "Loss (nats a token)"),
        (5.0, 0.05),
        strict=False,
    ):
        ax.axvline(trained, color="0.6", linewidth=0.8, linestyle=":", zorder=0)
        ax.plot(lengths, values, "o-", color=color, markersize=4)
        for x, y in zip(lengths, values, strict=True):
            ax.annotate(
                form.format(y),
                (x, y),
                (0, 6),
                textcoords="offset points",
                ha="center",
                fontsize=7,
                bbox=sweeps.CLEAR,
                zorder=1.5,
            )
        ax.set_title(title)
        ax.margins(x=0.1, y=0.3)
        low, high = ax.get_ylim()
        room = max(0.0, least - (high - low)) / 2  # so that a difference of nothing looks like nothing
        ax.set_ylim(low - room, high + room)
    axes[0].annotate(
        "trained",
        (trained, 0),
        (3, 3),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        fontsize=7,
        color="0.35",
    )
    axes[1].set_xscale("log", base=2)
    axes[1].set_xticks(lengths, [style.length_label(x) for x in lengths])
    axes[1].minorticks_off()
    axes[1].set_xlabel("context length evaluated (tokens)")
    return figure


def make(found: drawing.Found) -> tuple[Figure, str]:
    records = found.records["long_context"]
    first = records.iloc[0]
    ends = records.sort_values("evaluated_length_tokens").iloc[[0, -1]]
    (short, long), shares = ends["evaluated_length_tokens"], 100 * ends["pruned_ratio"]
    caption = f"""**Figure A3.** From contexts of {style.length_label(short)} to {style.length_label(long)}
the pruned share goes from {shares.iloc[0]:.1f} to {shares.iloc[1]:.1f} %, and the loss from
{ends["loss_nats"].iloc[0]:.3f} to {ends["loss_nats"].iloc[1]:.3f} nats. The model is
{models.run_name(first)}, trained with contexts of {first["context_length_tokens"]:,} tokens (dotted). Shown
are the share of pruned blocks and the mean loss over all positions. Every length reads the same
{first["measured_tokens"]:,} held-out tokens, so only the context differs. δ follows the length evaluated.
{style.provenance(records)}"""
    return draw(records), caption


def savings_grow_past_training(long_context: pd.DataFrame, pruned_ratio: pd.DataFrame) -> Verdict:
    """Met if every longer evaluated length prunes more, from the training length on, and no smaller share of
    what the grid of ``pruned_ratio`` allows."""
    one_each(long_context, ["evaluated_length_tokens"], "long_context")
    trained = long_context["context_length_tokens"].iloc[0]
    if trained not in set(long_context["evaluated_length_tokens"]):
        return Verdict(
            Status.UNDECIDED, f"not evaluated at the training length, {style.length_label(trained)}"
        )
    blocks = [int(pruned_ratio[f"block_{side}_tokens"].iloc[0]) for side in "qk"]
    lengths, percent = long_context["evaluated_length_tokens"], 100 * long_context["pruned_ratio"]
    most = [grid.largest_pruned_ratio(length, *blocks) for length in lengths]
    columns = {"context_length_tokens": lengths, "percent": percent, "of_grid_percent": percent / most}
    return by_length.grows(long_context.assign(**columns))


ITEMS = (
    Item(
        "figureA3",
        "Contexts longer than in training",
        ("long_context", "pruned_ratio"),
        lambda suite: [suite.sweep_run],
        claims=(
            Claim(
                "Savings keep growing past the training length",
                by_length.LONGER,
                f"the same model prunes more at every longer evaluated length, {by_length.NOT_BY_THE_GRID}",
                ("long_context", "pruned_ratio"),
                savings_grow_past_training,
            ),
        ),
        ours=True,
    ),
)


if __name__ == "__main__":
    drawing.main(globals())
