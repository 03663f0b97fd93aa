"""Context parallelism: time and bytes of three exchanges of keys, by context length and number of ranks."""

from __future__ import annotations

import pandas as pd

from .. import drawing, style
from . import naming
from .figure_kernel import DRAWN

# The exchanges of the records, with the names and colours of their lines.
EXCHANGES = {
    "suffixes": ("kept keys", style.ROLES["acp"]),
    "all-gather": ("all keys, all-gather", style.ROLES["exact"]),
    "ring": ("all keys, ring", style.PAPER),
}
_CALL = ["length_tokens", "ranks", "head_dim"]


def _sides(records: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The time in ms and the sent bytes of calls with ACP: one row per call, one column per exchange."""
    records = records[records["method"] == "acp"]
    records = records.assign(sent_bytes=records["forward_bytes"] + records["backward_bytes"])
    wide = records.set_index([*_CALL, "exchange"])[["forward_backward_ms", "sent_bytes"]].unstack()
    return wide["forward_backward_ms"], wide["sent_bytes"]


def draw(records: pd.DataFrame) -> drawing.Figure:
    """Times and bytes of the exchange of kept keys and of a ring, as percentages of an all-gather."""
    sides, titles = _sides(records), ("Forward + backward time", "Bytes sent by all ranks")
    figure, axes = drawing.panels(2, 0.9 + 0.2 * len(sides[0]), sharey=True)
    for ax, values, title in zip(axes, sides, titles, strict=True):
        for name, (label, color) in EXCHANGES.items():
            percent = 100 * values[name] / values["all-gather"]
            ax.plot(percent, range(len(values)), "o", ms=5, color=color, label=label)
        ax.set(title=title, xlim=(0, None), xlabel="% of an all-gather of all keys")
    names = [f"{style.length_label(t)}, {ranks} GPUs, {d}" for t, ranks, d in sides[0].index]
    axes[0].set_yticks(range(len(names)), names)
    axes[0].set(ylabel="tokens, ranks, head dimension", ylim=(len(names) - 0.5, -0.5))
    drawing.legend(figure)
    return figure


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    records = context.records["context_parallel"]
    first, (times, sent) = records.iloc[0], _sides(records)
    share = 100 * (sent["suffixes"] / sent["all-gather"])
    best = (times["suffixes"] / times["all-gather"]).idxmin()
    caption = f"""{naming.heading(context.item)} The exchange of kept keys sends {share.min():.0f} to
{share.max():.0f} % of the bytes of an all-gather. Relative to an all-gather, this exchange is fastest with
{style.length_label(best[0])} tokens, {best[1]} ranks and heads of dimension {best[2]}: a call takes
{times.loc[best, "suffixes"]:.3g} ms, and {times.loc[best, "all-gather"]:.3g} ms with an all-gather. Each rank
computes its queries of one sequence with ACP, {first["heads"]} heads, and synthetic gates
"{first["gates"]}": {DRAWN[first["gates"]]}. (a) Time of forward and backward, median of at most
{records["repeats"].max()} repeats. (b) Bytes of keys, values and gradients. Left of 100 %, an exchange is
faster or sends fewer bytes than an all-gather. Measured on {" and ".join(records["device"].unique())}."""
    return draw(records), caption
