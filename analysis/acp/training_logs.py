"""Derived numbers of a training log, for Figures 2 and A5."""

import numpy as np
import pandas as pd

from ..tables import one_each

CHANGE_POINTS = 2.0  # a layer has changed if its pruned ratio is further from its first value


def layer_percents(records: pd.DataFrame) -> pd.DataFrame:
    """The pruned percentage of the run with ACP: one row per number of ``tokens``, one column per layer."""
    layers = records[records["layer"].notna()]
    one_each(layers, ["run", "step", "layer"], "training_log")
    return 100 * layers.pivot_table(index="tokens", columns="layer", values="pruned_ratio")


def before_change(records: pd.DataFrame) -> float:
    """The tokens at the last log entry before any layer has changed by :data:`CHANGE_POINTS`."""
    percent = layer_percents(records)
    changed = ((percent - percent.iloc[0]).abs() > CHANGE_POINTS).any(axis=1)
    return float(percent.index[max(int(changed.argmax()) - 1, 0)])


def mean_pruned(records: pd.DataFrame) -> pd.DataFrame:
    """``tokens`` and ``percent`` pruned of the run with ACP, the mean over its layers."""
    layers = records[records["layer"].notna()]
    table = layers.groupby("tokens")["pruned_ratio"].mean().mul(100)
    return table.rename("percent").reset_index()


def losses(records: pd.DataFrame) -> pd.DataFrame:
    """The mean training loss of each run between the log points of the run with the fewest points."""
    points = {run: rows.drop_duplicates("step") for run, rows in records.groupby("run")}
    sums = {
        run: np.cumsum(
            [[0, 0], *zip(rows["averaged_steps"], rows["averaged_steps"] * rows["loss_nats"], strict=True)], 0
        )
        for run, rows in points.items()
    }
    fewest = min(points, key=lambda run: len(points[run]))
    # The end of the longest first window.
    start = max(steps_and_sums[1, 0] for steps_and_sums in sums.values())
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
