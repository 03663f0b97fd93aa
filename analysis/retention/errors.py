"""Standard errors of scores: what the criteria of Tables 1 to 3 and of Figure 2 share."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pandas as pd

from acp_repro.common.statistics import LEVEL, Estimate, holm, share_error

IN_WORDS = (
    "by 95 % intervals from the errors of the test examples and, where there are several, of seeds (one "
    "comparison contradicts it, after Holm's correction); else it cannot be told"
)


def means_on_test(score: pd.DataFrame) -> pd.DataFrame:
    """One row a task, method, budget and place of the gates: the first score of the test split, mean over
    seeds, and its standard error in points, from the number of examples and from how seeds differ."""
    test = score[score["split"] == "test"]
    first = test.groupby("dataset")["metric"].transform("first")
    test = test[test["metric"] == first]
    key = ["dataset", "backbone", "method", "budget", "gates"]
    table = test.groupby(key, as_index=False).agg(
        mean=("score_percent", "mean"),
        std=("score_percent", "std"),
        seeds=("seed", "nunique"),
        examples=("measured_examples", "max"),
    )
    # Of a share: seeds are tested on the same examples, so more of them make it no smaller. One seed alone
    # says nothing of how seeds differ.
    of_examples = 100 * share_error((table["mean"] / 100).clip(upper=1), table["examples"])
    table["error"] = (of_examples**2 + table["std"].fillna(0.0) ** 2 / table["seeds"]) ** 0.5
    return table


def shown(margins: Iterable[float], errors: Iterable[float]) -> bool | None:
    """Met where the interval of every margin lies above 0; missed where one lies below it, after Holm's
    correction, since one is enough then."""
    estimates = [Estimate(*pair, math.inf) for pair in zip(margins, errors, strict=True)]
    if all(one.interval().low > 0 for one in estimates):
        return True
    below = holm([one._replace(mean=-one.mean).p_above(0) for one in estimates])
    return False if 2 * below.min() < LEVEL else None
