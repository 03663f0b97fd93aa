"""Appendix I: what pruning saves in FLOPs, beside what it saves in time."""

from __future__ import annotations

import pandas as pd

from .. import drawing, style
from ..tables import one_each
from . import models


def tabulate(records: pd.DataFrame) -> drawing.Table:
    """One row a method, budget and length.

    Args:
        records: ``speed`` records.
    """
    key = ["dataset", "backbone", "method", "budget", "gates", "length_tokens"]
    columns = ["example_flop", "dense_example_flop", "batch_ms", "dense_batch_ms"]
    values = one_each(records[[*key, *columns]], key, "tableI")
    values = values[values["method"] != "dense"].copy()
    values["flop_ratio"] = values["dense_example_flop"] / values["example_flop"]
    values["time_ratio"] = values["dense_batch_ms"] / values["batch_ms"]
    shown = pd.DataFrame(
        {
            "": [
                f"{r.dataset}: {models.row_name(r.method, r.gates)}, {100 * r.budget:g} %"
                for r in values.itertuples()
            ],
            "tokens": [f"{n:,}" for n in values["length_tokens"]],
            "MFLOP": [f"{x / 1e6:,.1f}" for x in values["example_flop"]],
            "dense MFLOP": [f"{x / 1e6:,.1f}" for x in values["dense_example_flop"]],
            "fewer FLOPs": [f"{x:.2f}x" for x in values["flop_ratio"]],
            "less time": [f"{x:.2f}x" for x in values["time_ratio"]],
        }
    )
    return drawing.Table(shown, values)


def make(found: drawing.Found) -> tuple[drawing.Table, str]:
    records = found.records["speed"]
    caption = f"""**Table I.** FLOPs of the encoder's blocks for one example, projections and feed-forward
layers, attention and scorer, by the formula of `acp_repro.retention.cost`, and the measured time beside
them. Appendix I gives dense attention O(T² d) of memory; its matrix is T² a head, so the bytes of that
function have no d. {style.provenance(records)}"""
    return tabulate(records), caption


if __name__ == "__main__":
    drawing.main(globals())
