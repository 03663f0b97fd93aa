"""Appendix I: savings in FLOPs and in time."""

import pandas as pd

from .. import drawing, style
from ..tables import one_each
from ..verdict import Verdict
from . import naming


def tabulate(records: pd.DataFrame) -> drawing.Table:
    """One row per method, budget and length."""
    key = ["dataset", "backbone", "method", "budget", "gates", "length_tokens"]
    columns = ["example_flop", "dense_example_flop", "batch_ms", "dense_batch_ms"]
    values = one_each(records[[*key, *columns]], key, "tableI")
    values = values[values["method"] != "dense"].copy()
    values["flop_ratio"] = values["dense_example_flop"] / values["example_flop"]
    values["time_ratio"] = values["dense_batch_ms"] / values["batch_ms"]
    shown = pd.DataFrame(
        {
            "setting": [
                f"{r.dataset}: {naming.row_name(r.method, r.gates)}, {100 * r.budget:g} %"
                for r in values.itertuples()
            ],
            "tokens": [f"{n:,}" for n in values["length_tokens"]],
            "MFLOP": [f"{x / 1e6:,.1f}" for x in values["example_flop"]],
            "dense MFLOP": [f"{x / 1e6:,.1f}" for x in values["dense_example_flop"]],
            "dense FLOPs / FLOPs": [f"{x:.2f}x" for x in values["flop_ratio"]],
            "dense time / time": [f"{x:.2f}x" for x in values["time_ratio"]],
        }
    )
    return drawing.Table(shown, values)


def make(context: drawing.DrawContext) -> tuple[drawing.Table, str]:
    records = context.records["speed"]
    table = tabulate(records)
    caption = f"""**Table I.** {_saved(table.values)}The FLOPs are those of the encoder's blocks for one
example, and the time is measured. `acp_repro.retention.cost` counts the FLOPs of projections and
feed-forward layers, attention, and the scorer. Appendix I bounds the memory of dense attention by O(T² d).
This bound is loose, because the attention matrix of a head has T² entries, whatever d is."""
    return table, caption


def _saved(values: pd.DataFrame) -> str:
    """The ranges of both ratios of Adaptive Retention, as a sentence."""
    ours = values[values["method"] == "ar"]
    if ours.empty:
        return ""
    flop, time = (style.span(ours[name], ".1f") for name in ("flop_ratio", "time_ratio"))
    return f"The dense model takes {flop} times the FLOPs and {time} times the time of Adaptive Retention. "


def saves_more_when_longer(speed: pd.DataFrame) -> Verdict:
    table = speed[speed["method"] == "ar"].copy()
    table["ratio"] = table["dense_batch_ms"] / table["batch_ms"]
    key = ["dataset", "backbone", "budget", "gates"]
    lines = [line.sort_values("length_tokens") for _, line in table.groupby(key)]
    words = "\n".join(
        f"{line['dataset'].iloc[0]}, {line['gates'].iloc[0].replace('_', ' ')}, "
        f"{100 * line['budget'].iloc[0]:g} %: "
        + ", ".join(
            f"{x:.2f} times at {n:,} tokens"
            for n, x in zip(line["length_tokens"], line["ratio"], strict=True)
        )
        for line in lines
    )
    lines = [line for line in lines if len(line) > 1]
    if not lines:
        return Verdict.of(None, words or "no task is timed at two lengths")
    met = all((line["ratio"] >= 1).all() and line["ratio"].is_monotonic_increasing for line in lines)
    first, last = (pd.Series([line["ratio"].iloc[end] for line in lines]) for end in (0, -1))
    short = (
        f"speed-up of {style.span(first, '.1f')} times at the shortest length, "
        f"{style.span(last, '.1f')} times at the longest"
    )
    return Verdict.of(met, f"{short}\n{words}", short, n=len(lines), unit="setting")
