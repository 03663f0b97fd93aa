"""Figure 6: decay, pruning boundary and attention weights of a few heads on one sequence."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from acp_repro.common.grid import head_kind, largest_pruned_ratio

from .. import drawing, style
from ..tables import one_each
from ..verdict import Verdict
from . import naming, statistics

SPARSE_PERCENT = 1.0  # A is "very sparse" if a smaller percentage of its causal entries exceeds 0.1
ZOOM_TOKENS = 128  # the tokens of the bottom row, which resolves the weights of a local head
MOST_PIXELS = 700  # per side of D, beyond the resolution of a page; the whole of D at 16k tokens takes 2 GB


def draw(records: Mapping[str, pd.DataFrame]) -> drawing.Figure:
    """One column per head, in the order of the records: D with the boundary, the large entries of A, and the
    large entries of the first :data:`ZOOM_TOKENS` queries.

    Args:
        records: ``decay`` and ``attention_weights`` records of one run.
    """
    decay = one_each(records["decay"], ["run", "layer", "head", "position"], "decay")
    weights = records["attention_weights"]
    heads = list(decay.groupby(["layer", "head"], sort=False))
    low = 1.5 * decay["threshold_nats"].min()  # NaN for exact attention, whose scale is the range of D
    low = low if np.isfinite(low) else decay["cumulative_log_fgate_nats"].min()
    options = {"rows": 3, "sharex": "row", "sharey": "row", "squeeze": False}
    width = min(style.PAGE_INCHES, 0.6 + 1.7 * len(heads))
    figure, axes = drawing.panels(len(heads), 5.4, width, **options)
    for (top, middle, bottom), (key, head) in zip(axes.T, heads, strict=True):
        length = len(head)
        image = _decay(top, head, low)
        top.set_title(title(head.iloc[0], length))
        entries = weights[(weights[["layer", "head"]] == list(key)).all(axis=1)]
        _weights(middle, entries, (90 / length) ** 2 * 8)
        dots = _weights(bottom, entries, 2.5)
        zoom = min(ZOOM_TOKENS, length // 2)
        for ax in (top, middle):
            style.token_axis(ax.xaxis, length)
            style.token_axis(ax.yaxis, length)
        for axis in (bottom.xaxis, bottom.yaxis):
            axis.axes.set(**{f"{axis.axis_name}lim": (0, zoom)})
            axis.set_ticks([0, zoom // 2, zoom])
        bottom.set_xlabel("key position")
    for ax in axes[:, 0]:
        ax.set_ylabel("query position")
        ax.invert_yaxis()  # inverts the whole row, which shares its y axis
    for ax in axes.flat:
        ax.set_aspect("equal")
        ax.grid(visible=False)
        ax.axline((0, 0), slope=1, color="0.8", lw=0.5, zorder=0)
    for row, mappable, label in (
        (axes[0], image, "decay $D_{ij}$ (nats)"),
        (axes[1:], dots, "weight $A_{ij}$ over 0.1"),
    ):
        extend = "min" if mappable is image else "neither"
        bar = figure.colorbar(mappable, ax=row, shrink=0.9, aspect=22, pad=0.015, extend=extend)
        bar.set_label(label)
        bar.outline.set_visible(False)
    bar.ax.set_ylim(0.1, 1)  # hides the palest colours, which no recorded weight has
    return figure


def _weights(ax: drawing.Axes, entries: pd.DataFrame, size: float) -> drawing.PathCollection:
    """The recorded entries of A as squares of ``size`` points squared, coloured by their weight."""
    return ax.scatter(
        entries["key_position"],
        entries["query_position"],
        marker="s",
        lw=0,
        s=max(0.6, size),
        c=entries["attention_weight"],
        cmap="viridis_r",
        vmin=-0.3,
        vmax=1,
        rasterized=True,
    )


def title(head: pd.Series, length: int) -> str:
    """The kind, place and pruned ratio of a head; non-breaking spaces keep the place on one line."""
    limit = largest_pruned_ratio(length, int(head["block_q_tokens"]), int(head["block_k_tokens"]))
    names = {"local": "Local", "global": "Global", "intermediate": "Intermediate", None: "One block"}
    name = names[head_kind(head["pruned_ratio"], limit)]
    place = f"(layer\xa0{head['layer']},\xa0head\xa0{head['head']}):"
    return f"{name} {place} {100 * head['pruned_ratio']:.0f} %\xa0pruned"


def _decay(ax: drawing.Axes, head: pd.DataFrame, low: float):
    """D as an image over token positions, and the boundary as a staircase."""
    length = len(head)
    shown = np.unique(np.linspace(0, length - 1, min(length, MOST_PIXELS)).round().astype(int))
    c = head["cumulative_log_fgate_nats"].to_numpy()[shown]
    bias = np.where(shown[:, None] >= shown, c[:, None] - c, np.nan)
    image = ax.imshow(
        bias, cmap=style.decay_map(), vmin=low, vmax=0, extent=(0, length, length, 0), interpolation="nearest"
    )
    if head["threshold_nats"].notna().all():
        x, y = statistics.staircase(head["first_kept_key_position"].to_numpy())
        ax.plot(x, y, color=style.BOUNDARY, lw=1.3, solid_joinstyle="miter", clip_on=False, zorder=4)
    return image


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    records = context.records
    length = int(records["decay"]["position"].max()) + 1
    lost, large = large_weights_lost(records["decay"], records["attention_weights"])
    name = naming.run_name(records["decay"].iloc[0])
    caption = f"""{naming.heading(context.item)} Blocks left of the orange boundary are pruned. {lost} of the
{large:,} attention weights over 0.1 are left of the boundary. Each column is one head of
{name}. The top row shows the decay matrix D. The colours end at 1.5 times the lowest delta. The middle row
shows the attention weights A over 0.1. The bottom row shows the same weights of the first
{min(ZOOM_TOKENS, length // 2)} tokens. All panels show the first held-out sequence of {length:,} tokens. By
default, the heads have the largest, an intermediate and the smallest pruned ratio, and one head has a
boundary within the first blocks. Titles count layers and heads from 0 and state the pruned ratio on this
sequence."""
    return draw(records), caption


def large_weights_kept(decay: pd.DataFrame, attention_weights: pd.DataFrame) -> Verdict:
    """Reproduced if no recorded weight (over 0.1) is left of the boundary."""
    lost, all_of_them = large_weights_lost(decay, attention_weights)
    heads = len(decay[["layer", "head"]].drop_duplicates())
    return Verdict.of(
        lost == 0, f"{lost} of the {all_of_them:,} weights over 0.1 in {heads} heads are pruned"
    )


def large_weights_lost(decay: pd.DataFrame, attention_weights: pd.DataFrame) -> tuple[int, int]:
    """The number of recorded weights (over 0.1) left of the boundary, and the number of recorded weights."""
    keys = ["layer", "head", "query_position"]
    first = decay.rename(columns={"position": "query_position"})[[*keys, "first_kept_key_position"]]
    both = attention_weights.merge(first, on=keys, validate="many_to_one")
    lost = int((both["key_position"] < both["first_kept_key_position"]).sum())
    return lost, len(both)


def weights_sparse(decay: pd.DataFrame, attention_weights: pd.DataFrame) -> Verdict:
    """Reproduced if less than :data:`SPARSE_PERCENT` of the causal entries of A exceed 0.1."""
    lengths = decay.groupby(["run", "layer", "head"])["position"].nunique()
    percent = 100 * len(attention_weights) / (lengths * (lengths + 1) / 2).sum()
    ours = f"{percent:.2g} % of the attention weights of {len(lengths)} heads exceed 0.1"
    return Verdict.of(bool(percent < SPARSE_PERCENT), ours)
