"""Derived numbers of the needle-in-a-haystack test: functions from ``needle`` records to small tables."""

import math
from typing import Any

import pandas as pd

from acp_repro.common.statistics import over_draws

from .. import style
from ..tables import one_each, side_by_side
from . import versions
from .statistics import METHODS

SETTING = ["architecture", "size", "context_length_tokens", "needle_fraction"]
CELL = [*SETTING, "seed", "evaluated_length_tokens", "depth", "haystack_sample"]
FOUND_RECALL = 0.2  # a model with a lower recall does not retrieve, so ACP cannot damage its retrieval


def cells(records: pd.DataFrame) -> pd.DataFrame:
    """Means over haystacks and seeds: one row per method, training length, evaluated length and depth."""
    table = _with_gain(records)
    side_by_side(table, CELL, "method", "answer_recall", METHODS, "needle")
    keys = [*SETTING, "method", "evaluated_length_tokens", "depth"]
    return table.groupby(keys, sort=False)["answer_recall"].mean().reset_index()


def differences(records: pd.DataFrame) -> pd.DataFrame:
    """ACP − exact of each setting, averaged over evaluated lengths, depths, haystacks and seeds."""
    table, unlike = _with_gain(records), versions.unlike(records, SETTING)
    columns = {"recall": "answer_recall", "gain": "gain_nats"}
    sides = {name: side_by_side(table, CELL, "method", columns[name], METHODS, "needle") for name in columns}
    runs = table.groupby("method")["run"].agg(set)
    apart = not runs["acp"] & runs["exact"]
    rows = []
    for setting, seeds in table.groupby(SETTING)["seed"].nunique().items():
        row = dict(zip(SETTING, setting, strict=True))
        row |= {"seeds": seeds, "apart": apart, "unlike": unlike[setting]}
        unit = "seed" if seeds > 1 else "haystack_sample"
        for name, both in sides.items():
            some = both[(both[SETTING] == list(setting)).all(axis=1)]
            differences = (some["acp"] - some["exact"]).groupby(some[unit]).mean()
            mean, low, high = over_draws(differences).interval()
            row |= {f"{name}_{method}": some[method].mean() for method in METHODS}
            row |= {f"{name}_difference": mean, f"{name}_low": low, f"{name}_high": high}
        rows.append(row)
    return pd.DataFrame(rows)


def in_words(table: pd.DataFrame) -> str:
    """The rows of :func:`differences` as sentences: "Trained at 4k: mean recall 93 % with ACP ..."."""

    def difference(row: Any, name: str, form: str) -> str:
        mean, *ends = (getattr(row, f"{name}_{part}") for part in ("difference", "low", "high"))
        unit = " points" if name == "recall" else " nats"
        if not all(map(math.isfinite, ends)):
            return f"difference {mean:{form}}{unit}"
        return f"difference {mean:{form}}{unit} [{ends[0]:{form}}, {ends[1]:{form}}]"

    def words(row: Any, named: list[str]) -> str:
        trained = ", ".join([*named, *[f"{row.seeds} seeds"] * (row.seeds > 1)]) + row.unlike[:1]
        return (
            f"Trained at {trained}: the mean recall is {row.recall_acp:.3g} % with ACP and "
            f"{row.recall_exact:.3g} % without, {difference(row, 'recall', '+.1f')}. The needle changes the "
            f"answer's log-likelihood by {row.gain_acp:+.1f} nats with ACP and {row.gain_exact:+.1f} nats "
            f"without, {difference(row, 'gain', '+.2f')}"
        )

    each = map(words, table.itertuples(name="Row"), names(table, always=True))
    return ". ".join([*each, *dict.fromkeys(filter(None, table["unlike"]))])


def by_seed(records: pd.DataFrame) -> str:
    """ "67 and 100 % (seed 0), 99 and 98 % (seed 1)": recall with ACP and exact of the settings with several
    seeds; empty if every setting has one seed."""
    means = 100 * records.groupby([*SETTING, "seed", "method"])["answer_recall"].mean().unstack("method")
    table = means.reset_index()
    table = table[table.groupby(SETTING)["seed"].transform("nunique") > 1]
    return ", ".join(
        f"{row.acp:.3g} and {row.exact:.3g} % ({', '.join([*named, f'seed {row.seed}'])})"
        for row, named in zip(table.itertuples(), names(table), strict=True)
    )


def names(table: pd.DataFrame, always: bool = False) -> list[list[str]]:
    """The parts of each row's setting that vary: training length, size and fraction of needles."""
    parts = {
        "context_length_tokens": lambda n: ("" if always else "$L$ = ") + style.length_label(n),
        "size": str,
        "needle_fraction": lambda share: f"{100 * share:g} % needles",
    }
    told = [c for c in parts if table[c].nunique() > 1 or (always and c == "context_length_tokens")]
    return [[parts[c](row[c]) for c in told] for _, row in table.iterrows()]


def _with_gain(records: pd.DataFrame) -> pd.DataFrame:
    one_each(records, [*CELL, "method"], "needle")
    gain = records["answer_log_likelihood_nats"] - records["answer_log_likelihood_without_needle_nats"]
    return records.assign(gain_nats=gain, answer_recall=100 * records["answer_recall"])
