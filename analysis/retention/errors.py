"""Significance of differences between two settings, for the criteria of Tables 1 to 3 and of Figure 2."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from acp_repro.common.statistics import LEVEL, Estimate, equivalence, holm, over_items, share_error
from acp_repro.papers.retention.schema import RIGHT

from ..verdict import Verdict

_TASK = ["dataset", "backbone"]
SETTING = [*_TASK, "method", "budget", "gates"]
COUNTED = "on the items of dev and test, if the records have items"  # part of captions
HOLDS, FAILS, OPEN = "Holds in", "Fails in", "Open in"
_ONE_SEED = "Each setting has one training run, so the spread over seeds is unknown"


class Comparison(NamedTuple):
    """The score difference between two settings."""

    row: Any
    estimate: Estimate
    scores: tuple[float, float]
    splits: Sequence[str]  # the splits whose items both settings answered; empty if scores are compared

    @property
    def place(self) -> str:
        """ "imdb, after blocks, 30 %"; the task is "imdb (base)" if there are several encoders."""
        return f"{self.row.task}, {self.row.gates.replace('_', ' ')}, {100 * self.row.budget:g} %"

    @property
    def percent(self) -> float:
        """The first score relative to the second."""
        return 100 * self.scores[0] / self.scores[1]

    @property
    def points(self) -> str:
        """ "+1.2 [0.8, 1.6] points"."""
        mean, low, high = self.estimate.interval()
        return f"{mean:+.1f} [{low:.1f}, {high:.1f}] points"


def settings(score: pd.DataFrame, key: Sequence[str] = SETTING) -> pd.DataFrame:
    """One row per setting, for the first score of its task.

    Columns: ``task``, its name with the encoder; ``mean``, the mean over seeds on the test split in percent,
    with its ``examples`` and ``seeds``; ``items``, an array (seeds, items) with 1 for each correct answer, by
    split and hash of the set; and ``spread``, the standard deviation over the seeds of a task, with its
    degrees of ``freedom``, from the items that all settings of the task share or from test scores.
    """
    test = score[score["split"] == "test"]
    first = test.groupby("dataset")["metric"].first()
    score = score[score["metric"] == score["dataset"].map(first)]
    key = list(key)
    table = (
        score[score["split"] == "test"]
        .groupby(key, as_index=False)
        .agg(
            mean=("score_percent", "mean"),
            variance=("score_percent", "var"),
            seeds=("seed", "nunique"),
            examples=("measured_examples", "max"),
        )
    )
    several = table["backbone"].nunique() > 1
    table["task"] = table["dataset"] + (" (" + table["backbone"] + ")" if several else "")
    items = {name: _items(rows) for name, rows in score.groupby(key)}
    table["items"] = [items[name] for name in table[key].itertuples(index=False, name=None)]
    for _, rows in table.groupby(_TASK):
        if common := set.intersection(*map(set, rows["items"])):
            table.loc[rows.index, "variance"] = [_variance(of, common) for of in rows["items"]]
    freedom = table["seeds"] - 1
    by_task = [table[name] for name in _TASK]
    table["freedom"] = freedom.groupby(by_task).transform("sum")
    table["spread"] = (
        (table["variance"].fillna(0.0) * freedom).groupby(by_task).transform("sum") / table["freedom"].clip(1)
    ) ** 0.5
    return table


def _items(rows: pd.DataFrame) -> dict[tuple[str, str], np.ndarray]:
    """Items by split, with seeds in order. A split is omitted if a seed lacks items or has other items."""
    found, seeds = {}, sorted(rows.loc[rows["split"] == "test", "seed"])
    for split, of_split in rows.sort_values("seed").groupby("split"):
        hashes, whole = set(of_split["items_hash"]), list(of_split["seed"]) == seeds
        if whole and of_split["items_right"].notna().all() and len(hashes) == 1:
            right = [[answer == RIGHT for answer in one] for one in of_split["items_right"]]
            found[split, hashes.pop()] = np.asarray(right, dtype=float)
    return found


def _variance(items: dict[tuple[str, str], np.ndarray], splits: Iterable[tuple[str, str]]) -> float:
    """The variance over seeds of the accuracy on ``splits``, in squared percent; NaN for one seed."""
    right = np.concatenate([items[split] for split in splits], axis=1).mean(1)
    return float(pd.Series(100 * right).var())


def compared(
    ours: pd.DataFrame, other: pd.DataFrame, on: Sequence[str] = _TASK, share: float = 1.0
) -> list[Comparison]:
    """Rows of :func:`settings` minus ``share`` times the rows that match in the columns ``on``."""
    pairs = ours.merge(other, on=list(on), suffixes=("", "_other"))
    return [_compare(row, share) for row in pairs.itertuples(index=False)]


def _compare(row: Any, share: float) -> Comparison:
    common = [split for split in row.items if split in row.items_other]
    if common:
        first, second = (
            np.concatenate([items[split].mean(0) for split in common])
            for items in (row.items, row.items_other)
        )
        scores, apart = (100 * first.mean(), 100 * second.mean()), over_items(first - second)
        mean = 100 * apart.mean + (1 - share) * scores[1]
        of_items = (100 * apart.error) ** 2 + ((1 - share) * _error(scores[1], len(second))) ** 2
    else:
        scores, mean = (row.mean, row.mean_other), row.mean - share * row.mean_other
        of_items = _error(row.mean, row.examples) ** 2
        of_items += (share * _error(row.mean_other, row.examples_other)) ** 2
    of_seeds = row.spread**2 * (1 / row.seeds + share**2 / row.seeds_other)
    # Degrees of freedom of a sum of two variances (Satterthwaite); those of items are practically unlimited.
    freedom = row.freedom * (1 + of_items / of_seeds) ** 2 if of_seeds else math.inf
    estimate = Estimate(mean, math.sqrt(of_items + of_seeds), freedom)
    return Comparison(row, estimate, scores, [split for split, _ in common])


def _error(percent: float, count: int) -> float:
    return 100 * share_error(min(percent / 100, 1.0), count)


def above(
    found: Sequence[Comparison],
    words: Callable[[Comparison], str],
    missed_below: Callable[[Comparison], float] = lambda one: 0.0,
) -> Verdict:
    """The joint verdict on whether each difference is above 0."""
    below = [one.estimate._replace(mean=-one.estimate.mean) for one in found]
    bounds = [-missed_below(one) for one in found]
    shown = holm([2 * one.estimate.p_above(0) for one in found]) < LEVEL
    missed = holm([2 * one.p_above(bound) for one, bound in zip(below, bounds, strict=True)]) < LEVEL
    return _joint(found, shown, missed, words, "> 0")


def within(found: Sequence[Comparison], margin: float, words: Callable[[Comparison], str]) -> Verdict:
    """The joint verdict on whether the absolute value of each difference is below ``margin`` points."""
    tests = [equivalence(one.estimate, margin) for one in found]
    same = holm([test.p_value for test in tests]) < LEVEL
    beyond = holm([test.beyond_p_value for test in tests]) < LEVEL
    return _joint(found, same, beyond, words, f"within ±{margin:g}")


def _joint(
    found: Sequence[Comparison],
    shown: Sequence[bool],
    ruled_out: Sequence[bool],
    words: Callable[[Comparison], str],
    asked: str,
) -> Verdict:
    """The joint verdict, with lists of the differences that hold, fail and are open."""
    splits = " and ".join(sorted({split for one in found for split in one.splits}))
    where = f"the items of {splits}" if splits else "test scores"
    answers = [HOLDS if yes else FAILS if no else OPEN for yes, no in zip(shown, ruled_out, strict=True)]
    lists, counts = [], []
    for answer in (HOLDS, FAILS, OPEN):
        some = [words(one) for one, its in zip(found, answers, strict=True) if its == answer]
        if some:
            lists += [f"{answer} {len(some)} of {len(found)} settings, tested on {where}:", *some]
            counts.append(f"{answer.lower()} {len(some)}")
    unpaired = list(dict.fromkeys(one.place for one in found if not one.splits))
    lists += ["Compared by test scores, not item by item:", *unpaired] if unpaired else []
    lists += [] if all(one.row.freedom for one in found) else [_ONE_SEED]
    at_input = sum(one.row.gates == "input" for one in found)
    lists.append(
        f"Gates at the input, which the paper does not describe: {at_input} of {len(found)} settings"
    )
    met = False if FAILS in answers else None if OPEN in answers else True
    short = f"{', '.join(counts)} of {len(found)} settings"
    values = {words(one).partition(": ")[0]: one.estimate.interval() for one in found}
    values = values if len(values) == len(found) else {}
    more = {"values": values, "axis": f"score difference (points, {where}, 95 % interval; criterion {asked})"}
    return Verdict.of(met, "\n".join(lists), short, n=len(found), unit="setting", **more)
