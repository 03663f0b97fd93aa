"""Compares fresh records of a small suite with its committed reference records, column by column."""

from collections.abc import Iterable, Iterator, Mapping

import pandas as pd

from acp_repro.pipeline.paper import RESULTS, Suite
from acp_repro.pipeline.provenance import ORIGIN_COLUMNS

from .. import ledger
from ..rerun import REFERENCE


def read(suite: Suite, names: Iterable[str]) -> dict[str, pd.DataFrame]:
    """The reference records of a suite by metric, of the metrics in ``names`` that have any."""
    found = {}
    for metric in map(suite.paper.metric, names):
        ours = [path.relative_to(RESULTS) for _, path in ledger.record_paths(suite, metric, suite.runs)]
        if there := [path for one in ours if (path := REFERENCE / one).is_file()]:
            tables = [pd.read_csv(path, dtype={"size": str, "commit": str}) for path in there]
            found[metric.name] = pd.concat(tables).reset_index(drop=True)
    return found


def compare(
    suite: Suite, fresh: Mapping[str, pd.DataFrame], reference: Mapping[str, pd.DataFrame]
) -> Iterator[str]:
    """For each metric a line that names the reference, and a line for each measured column."""
    unmeasured = ["suite", "run", "trained_tokens", "order", *suite.paper.run_columns, *ORIGIN_COLUMNS]
    for name in [name for name in reference if name in fresh]:
        new, old = fresh[name], reference[name]
        old = old[old["run"].isin(new["run"])].reset_index(drop=True)
        device, commit = (", ".join(old[column].unique()) for column in ("device", "commit"))
        yield f"{name} ({len(new)} rows), against {len(old)} rows of commit {commit} on {device}:"
        if len(new) != len(old):
            continue
        for column in new.columns.difference(unmeasured, sort=False):
            if not column.endswith("_samples_ms"):
                yield f"  {column}: {_difference(new[column], old[column])}"


def _difference(new: pd.Series, old: pd.Series) -> str:
    if new.equals(old):
        return "identical"
    if not (pd.api.types.is_numeric_dtype(new) and pd.api.types.is_numeric_dtype(old)):
        return f"differs in {(new != old).sum()} of {len(new)} rows"
    if str(new.name).endswith(("_ms", "_per_s")):
        ratio = (new / old).dropna()
        return f"{ratio.median():.2f} times the reference ({ratio.min():.2f} to {ratio.max():.2f})"
    most = (new - old).abs().max() / old.abs().max()
    return f"mean {new.mean():.4g}, reference {old.mean():.4g}; at most {most:.1e} of the largest value apart"
