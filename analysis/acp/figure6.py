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

SPARSE_PERCENT = 1.0  # of the causal entries; fewer than that over 0.1 count as "very sparse"
ZOOM_TOKENS = 128  # the first of a sequence, in which the weights of a local head can be told apart
MOST_PIXELS = 700  # per side of D: more than a page can show; at 16k tokens the whole of D takes 2 GB


def draw(records: Mapping[str, pd.DataFrame]) -> drawing.Figure:
    """One column per head, in the order of the records: D with the boundary, the large entries of A, and
    those of the first :data:`ZOOM_TOKENS` queries.

    Args:
        records: ``decay`` and ``attention_weights`` records of one run.
    """
    decay = one_each(records["decay"], ["run", "layer", "head", "position"], "decay")
    weights = records["attention_weights"]
    heads = list(decay.groupby(["layer", "head"], sort=False))
    low = 1.5 * decay["threshold_nats"].min()  # NaN for exact attention: the scale is then D's own
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
        ax.invert_yaxis()  # of the whole row
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
    bar.ax.set_ylim(0.1, 1)  # the last bar: the palest colours of its map are left out
    return figure


def _weights(ax: drawing.Axes, entries: pd.DataFrame, size: float) -> drawing.PathCollection:
    """The recorded entries of A as squares of ``size`` points squared, in the colour of their weight."""
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
    """The kind of a head and its pruned ratio."""
    limit = largest_pruned_ratio(length, int(head["block_q_tokens"]), int(head["block_k_tokens"]))
    names = {"local": "Local head", "global": "Global head", "intermediate": "Intermediate head"}
    name = names.get(head_kind(head["pruned_ratio"], limit), "Head")
    return f"{name} (layer {head['layer']}, head {head['head']}): {100 * head['pruned_ratio']:.0f} % pruned"


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
    caption = f"""**Figure 6.** {lost or "None"} of the {large:,} attention weights over 0.1 lies left of the
orange boundary, where blocks are pruned. Top: decay matrices D, whose colours end at 1.5 times the lowest
delta. Middle: attention weights A, of which only entries over 0.1 are shown.
Bottom: the same weights of the first {min(ZOOM_TOKENS, length // 2)} tokens. The heads are of {name}, on the
first held-out sequence, {length:,} tokens. Unless named by hand, they are those with the largest savings,
with a boundary that shows in the first blocks, with savings nearest to halfway, and with the smallest
savings. Titles count layers and heads from 0 and give the savings on this one sequence."""
    return draw(records), caption


def large_weights_kept(decay: pd.DataFrame, attention_weights: pd.DataFrame) -> Verdict:
    """Met if no recorded weight (over 0.1) lies left of the boundary."""
    lost, all_of_them = large_weights_lost(decay, attention_weights)
    heads = len(decay[["layer", "head"]].drop_duplicates())
    return Verdict.of(lost == 0, f"{lost} of {all_of_them:,} in the {heads} heads shown")


def large_weights_lost(decay: pd.DataFrame, attention_weights: pd.DataFrame) -> tuple[int, int]:
    """How many of the recorded weights (over 0.1) lie left of the boundary, and how many there are."""
    keys = ["layer", "head", "query_position"]
    first = decay.rename(columns={"position": "query_position"})[[*keys, "first_kept_key_position"]]
    both = attention_weights.merge(first, on=keys, validate="many_to_one")
    lost = int((both["key_position"] < both["first_kept_key_position"]).sum())
    return lost, len(both)


def weights_sparse(decay: pd.DataFrame, attention_weights: pd.DataFrame) -> Verdict:
    """Met if under :data:`SPARSE_PERCENT` of the causal entries of A are recorded, those over 0.1."""
    lengths = decay.groupby(["run", "layer", "head"])["position"].nunique()
    percent = 100 * len(attention_weights) / (lengths * (lengths + 1) / 2).sum()
    ours = f"{percent:.2g} % of entries over 0.1 in the {len(lengths)} heads shown"
    return Verdict.of(bool(percent < SPARSE_PERCENT), ours)
