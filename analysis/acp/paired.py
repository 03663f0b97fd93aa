"""Significance of differences between two models on downstream tasks, paired by item."""

import math

import pandas as pd

from acp_repro.common import statistics
from acp_repro.pipeline.evaluation.catalogue import COLUMNS
from acp_repro.pipeline.evaluation.comparison import is_perplexity, shown

from ..tables import UnfitRecords, one_each
from . import naming, versions
from .statistics import methods

SETTING = ["architecture", "size", "context_length_tokens"]
COLUMN = ["task", "metric"]
TASKS_P_VALUE = 0.05  # family-wise, of differences between paired runs on the downstream tasks
LEAST_PAIRS = 3  # diverging pairs that a test requires
ONE_PAIR = "only one pair of training runs"
NO_PAIR = "no run is measured with its exact pair"
NOT_COUNTED = ", which is not counted"  # appended to the text of versions.unlike
SAME, AS_RUNS, DIFFERS = "same", "as runs do", "differs"


def too_few(apart: pd.Series) -> str:
    """The reason why a test has too few pairs of training runs with one code version; empty if it has
    enough."""
    if apart.empty:
        return "no pair was trained with one version of the code"
    if (diverging := int((apart != 0).sum())) >= LEAST_PAIRS:
        return ""
    return f"diverging pairs: {diverging} of {len(apart)}, and the t test needs {LEAST_PAIRS}"


def differences(records: pd.DataFrame) -> pd.DataFrame:
    """The difference ACP − exact on every task's metric for each pair of runs (``lm_eval_items`` records)."""
    keys = [*SETTING, "seed", *COLUMN]
    records = records.assign(method=methods(records))
    one_each(records, [*keys, "method", "item"], "lm_eval_items")
    rows = []
    for key, found in records.groupby(keys, sort=False):
        sides = [side.set_index("item") for _, side in sorted(found.groupby("method"), key=lambda s: s[0])]
        if len(sides) < 2:
            continue
        found = _tested(*sides, key[-1], f"{key} with and without ACP")
        acp, exact = found.pop("first"), found.pop("second")
        row = dict(zip(keys, key, strict=True)) | {"items": len(sides[0]), "acp": acp, "exact": exact}
        rows.append(row | {"difference": acp - exact} | found)
    if not rows:
        columns = [*keys, "items", "acp", "exact", "difference", "p_value", "adjusted_p_value", "verdict"]
        return pd.DataFrame(columns=columns)
    table = pd.DataFrame(rows)
    table["adjusted_p_value"] = statistics.holm(table["p_value"].to_numpy())
    gaps = paper_gaps() | seed_gaps(records)
    table["verdict"] = [
        SAME
        if row.adjusted_p_value >= TASKS_P_VALUE
        else AS_RUNS
        if abs(apart_in_kind(row.acp, row.exact, row.metric)) <= gaps.get((row.task, row.metric), 0.0)
        else DIFFERS
        for row in table.itertuples()
    ]
    return table


def equivalences(differences: pd.DataFrame, vocabulary: float = math.inf) -> tuple[pd.DataFrame, list[str]]:
    """Two one-sided tests over pairs, for each of the paper's columns on which exact models beat chance."""
    margins, guesses = paper_gaps(), {(c.task, c.metric): c.guess for c in COLUMNS}
    columns = {key: pairs for key, pairs in differences.groupby(COLUMN, sort=False) if key in margins}
    unknown = {key for key, pairs in columns.items() if not _known(pairs, guesses[key], vocabulary)}
    guessed = {task for task, metric in unknown if not is_perplexity(metric)}
    unknown |= {key for key in columns if key[0] in guessed and is_perplexity(key[1])}
    rows = []
    for key, pairs in columns.items():
        if key in unknown:
            continue
        apart = [apart_in_kind(pair.acp, pair.exact, key[1]) for pair in pairs.itertuples()]
        estimate = statistics.over_draws(apart)
        found = statistics.equivalence(estimate, margins[key])
        row = dict(zip(COLUMN, key, strict=True)) | {"mean": estimate.mean, "margin": margins[key]}
        rows.append(row | found._asdict())
    names = [*COLUMN, "mean", "margin", *statistics.Equivalence._fields]
    table = pd.DataFrame(rows, columns=names)
    for name in ("p_value", "beyond_p_value"):
        table[f"adjusted_{name}"] = statistics.holm(table.pop(name))
    return table, [" ".join(key) for key in columns if key in unknown]


def _known(pairs: pd.DataFrame, guess: float | None, vocabulary: float) -> bool:
    """Whether the exact model of a pair beats chance on a column."""
    if guess is None:
        return bool(pairs["exact"].min() < vocabulary)
    right = [(round(pair.exact * pair.items), pair.items) for pair in pairs.itertuples()]
    p_values = [statistics.p_above_guessing(*counts, guess) for counts in right]
    return bool(min(statistics.holm(p_values)) < statistics.LEVEL)


def between_seeds(records: pd.DataFrame) -> pd.DataFrame:
    """Every task's metric for the two lowest seeds of each setting with two seeds of one code version."""
    keys = [*SETTING, "method", "code", *COLUMN]
    ran_on = records.reindex(columns=list(versions.RAN_ON)).replace({"commit": versions.TRAINING_CODE})
    code = ran_on.groupby([*ran_on], dropna=False).ngroup()
    records = records.assign(method=methods(records), code=code)
    one_each(records, [*keys, "seed", "item"], "lm_eval_items")
    rows = []
    for key, found in records.groupby(keys, sort=False):
        sides = [side.set_index("item") for _, side in found.groupby("seed")][:2]
        if len(sides) == 2:
            rows.append(dict(zip(keys, key, strict=True)) | _tested(*sides, key[-1], f"{key} at two seeds"))
    table = pd.DataFrame(rows, columns=[*keys, "first", "second", "p_value"])
    return table.assign(adjusted_p_value=statistics.holm(table["p_value"].to_numpy(dtype=float)))


def _tested(first: pd.DataFrame, second: pd.DataFrame, metric: str, what: str) -> dict[str, float]:
    """``first`` and ``second``, the metrics of two models from their items, and ``p_value``."""
    if not first.index.sort_values().equals(second.index.sort_values()):
        raise UnfitRecords(f"lm_eval_items: {what}: not the same items")
    second = second.loc[first.index]
    for side in (first, second):
        statistics.finite(side["value"], f"lm_eval_items: {what}", first.index)
    apart = (first["value"] - second["value"]).to_numpy()
    scores = {"first": score(first, metric), "second": score(second, metric)}
    return scores | {"p_value": statistics.p_value(apart)}


def score(items: pd.DataFrame, metric: str) -> float:
    """A metric from its items: their mean, or the perplexity, exp of the negative mean log-likelihood."""
    return shown(float(items["value"].sum() / items["weight"].sum()), metric)


def apart_in_kind(one: float, other: float, metric: str) -> float:
    """A difference that is comparable between models; perplexities are compared by their logarithms."""
    return math.log(one / other) if is_perplexity(metric) else one - other


def paper_gaps() -> dict[tuple[str, str], float]:
    """The largest :func:`apart_in_kind` of the paper's pairs in Tables 1 and 3, by task and metric."""
    table = naming.PUBLISHED.table.query("item in ('table1', 'table3') and size.notna()")
    sides = table.pivot(
        index=["item", "quantity", "context_length_tokens"], columns="method", values="low"
    ).reset_index("quantity")
    gaps = {}
    for column in COLUMNS:
        pairs = sides[sides["quantity"] == column.quantity]
        apart = [abs(apart_in_kind(p.acp, p.exact, column.metric)) for p in pairs.itertuples()]
        if apart:
            gaps[column.task, column.metric] = max(apart) / (100 if column.is_accuracy else 1)
    return gaps


def seed_gaps(records: pd.DataFrame) -> dict[tuple[str, str], float]:
    """The largest :func:`apart_in_kind` of two seeds of one setting, by task and metric."""
    keys = [*SETTING, "method", *COLUMN]
    scores = [(key, score(items, key[-2])) for key, items in records.groupby([*keys, "seed"], sort=False)]
    table = pd.DataFrame([(*key, value) for key, value in scores], columns=[*keys, "seed", "score"])
    gaps: dict[tuple[str, str], float] = {}
    for key, seeds in table.groupby(keys, sort=False):
        if len(seeds) > 1:
            metric = (key[-2], key[-1])
            gap = apart_in_kind(seeds["score"].max(), seeds["score"].min(), key[-1])
            gaps[metric] = max(gaps.get(metric, 0.0), gap)
    return gaps
