"""Derived numbers of a training log (Figure A5), and how they read."""

from __future__ import annotations

import numpy as np
import pandas as pd

from .. import style
from ..tables import one_each
from . import naming, versions

CHANGE_POINTS = 2.0  # a layer further from its first pruned ratio is seen to have changed


def paper_name(records: pd.DataFrame) -> str:
    """The paper's model of this size; of a size that it lacks, its smallest."""
    size = records["size"].iloc[0]
    known = set(naming.PUBLISHED.table.query("item == 'table2'")["size"].dropna())
    return size if size in known else "125M"


def shares(records: pd.DataFrame) -> pd.DataFrame:
    """``percent`` pruned by ``tokens``, a column a layer, of the run with ACP."""
    layers = records[records["layer"].notna()]
    one_each(layers, ["run", "step", "layer"], "training_log")
    return 100 * layers.pivot_table(index="tokens", columns="layer", values="pruned_ratio")


def before_change(records: pd.DataFrame) -> float:
    """Tokens at the last look before any layer has left its first pruned ratio."""
    percent = shares(records)
    changed = ((percent - percent.iloc[0]).abs() > CHANGE_POINTS).any(axis=1)
    return float(percent.index[max(int(changed.argmax()) - 1, 0)])


def mean_pruned(records: pd.DataFrame) -> pd.DataFrame:
    """``tokens`` and ``percent`` pruned, the mean of all layers, of the run with ACP."""
    layers = records[records["layer"].notna()]
    table = layers.groupby("tokens")["pruned_ratio"].mean().mul(100)
    return table.rename("percent").reset_index()


def losses(records: pd.DataFrame) -> pd.DataFrame:
    """Each run's mean training loss between the same ``tokens``, those of the run with the fewest points."""
    points = {run: rows.drop_duplicates("step") for run, rows in records.groupby("run")}
    sums = {
        run: np.cumsum(
            [[0, 0], *zip(rows["averaged_steps"], rows["averaged_steps"] * rows["loss_nats"], strict=True)], 0
        )
        for run, rows in points.items()
    }
    fewest = min(points, key=lambda run: len(points[run]))
    start = max(steps_and_sums[1, 0] for steps_and_sums in sums.values())  # all first windows are over
    whole = sums[fewest][1:, 0] >= start
    edges, tokens = sums[fewest][1:, 0][whole], points[fewest]["tokens"][whole]
    tables = []
    for run, rows in points.items():
        steps, totals = sums[run].T
        kept = edges[edges <= steps[-1]]
        loss = np.diff(np.interp(kept, steps, totals), prepend=0) / np.diff(kept, prepend=0)
        tolerance = rows["log_pruning_tolerance"].iloc[0]
        columns = {"run": run, "tokens": tokens[: len(kept)], "log_pruning_tolerance": tolerance}
        tables.append(pd.DataFrame(columns | {"loss_nats": loss}))
    return pd.concat(tables, ignore_index=True)


def caption(records: pd.DataFrame, epochs: int = 0) -> str:
    """The caption of Figure A5."""
    mean = mean_pruned(records)
    last, peak = mean.iloc[-1], mean.loc[mean["percent"].idxmax()]
    unlike = versions.notes(versions.unlike(records, ["size"]), after=".")
    devices = ", ".join(records["training_device"].unique())
    ends = "the end of an epoch" if epochs == 1 else f"the ends of {epochs} epochs"
    again = f"Dotted: {ends}, after which the same books come again."
    return f"""**Figure A5.** The pruned ratio is {peak["percent"]:.0f} % at most, after
{style.count_label(peak["tokens"])} tokens, and {last["percent"]:.0f} % after
{style.count_label(last["tokens"])}. The paper says around 70 %, and trains its {paper_name(records)} on
{style.count_label(naming.paper_size(paper_name(records)).tokens)} tokens. The curves are from the logs of
{" and ".join(records["run"].unique())}{unlike[:1]}, trained on {devices}. The axes begin at
{style.count_label(before_change(records))} tokens: until then no layer's share has changed by more than
{CHANGE_POINTS:g} percentage points. (a) Each layer on the first sequence of a batch, and the mean of all.
(b) Mean loss of the steps since the point before, of all runs between the same points. The mean of a
longer stretch is spread evenly over it. {unlike} {again if epochs else ""}"""
