"""A decoding step: its time and the memory kept, against prompt length and batch, with and without ACP."""

from __future__ import annotations

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from .. import drawing, style
from ..tables import one_each
from .figure_kernel import RIVALS

METHODS = {"acp": "with ACP", "exact": "exact"}
COLORS = {"acp": style.SIZES[0], "exact": style.SIZES[1]}
SCOPES = {"attention": "attention of one layer", "model": "whole model"}


def draw(records: pd.DataFrame) -> Figure:
    """Milliseconds a step for attention and for a model, and the model's kept keys and values.

    Args:
        records: ``decode_time`` records of one device and one kind of gates.
    """
    one_each(records, ["scope", "implementation", "method", "batch", "length_tokens"], "decode_time")
    records = records.sort_values(["length_tokens", "batch"])
    figure, axes = plt.subplots(1, 3, figsize=(style.PAGE_INCHES, 2.9), layout="constrained")
    for ax, scope in zip(axes, SCOPES, strict=False):
        _bars(ax, records[records["scope"] == scope], "step_ms", "read_ms")
        ax.set_title(f"{SCOPES[scope].capitalize()} (ms a step)")
    models = records[records["scope"] == "model"]
    unit, size = ("GiB", 2**30) if models["kept_bytes"].max() >= 2**30 else ("MiB", 2**20)
    held = models.assign(kept=models["kept_bytes"] / size, allocated=models["allocated_bytes"] / size)
    _bars(axes[2], held, "kept", "allocated")
    axes[2].set_title(f"Keys, values, decays ({unit})")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def _bars(ax, records: pd.DataFrame, value: str, bound: str | None) -> None:
    """Groups of bars, one a batch and length; a short line where reading everything once would end."""
    groups = list(records.groupby(["batch", "length_tokens"], sort=False).groups)
    kinds = list(records.groupby(["implementation", "method"], sort=False).groups)
    kinds.sort(key=lambda kind: (kind[0] in RIVALS, kind))
    width = 0.8 / max(1, len(kinds))
    for n, (implementation, method) in enumerate(kinds):
        rows = records[(records["implementation"] == implementation) & (records["method"] == method)]
        rows = rows.set_index(["batch", "length_tokens"]).reindex(groups)
        places = [g + (n - (len(kinds) - 1) / 2) * width for g in range(len(groups))]
        ours = implementation not in RIVALS
        ax.bar(
            places,
            rows[value],
            width,
            color=COLORS[method],
            alpha=1.0 if ours else 0.4,
            label=f"{'ours' if ours else implementation}, {METHODS[method]}",
        )
        if bound is not None:
            ends = [place + width / 2 for place in places]
            starts = [place - width / 2 for place in places]
            ax.hlines(
                rows[bound],
                starts,
                ends,
                color="black",
                linewidth=1.2,
                label="reading once; allocated" if n == 0 else None,
            )
    ax.set_xticks(range(len(groups)), [f"{b} x {style.length_label(n)}" for b, n in groups], rotation=30)
    ax.set_xlabel("batch x prompt")
    ax.set_yscale("log")


def make(found: drawing.Found) -> tuple[Figure, str]:
    records = found.records["decode_time"]
    first = records.iloc[0]
    caption = f"""**A decoding step.** One token for every row after a prompt of random tokens,
gates "{first["gates"]}", {first["heads"]} heads of {first["head_dim"]}; attention alone, and a model of
random weights. Lines: reading once what the step needs (kept keys and values, and a model's weights).
Right: what the cache holds for each head, and, the line, what it has allocated. Logarithmic axes.
{style.provenance(records)}"""
    return draw(records), caption


if __name__ == "__main__":
    drawing.main(globals())
