"""The needle test with many facts: from ``needle_facts`` records to numbers and the verdict of Figure A6.

Recall of one question is one choice of a word, asked again and again. So with many facts the likelihood of
the right answer comes first and recall second.
"""

from __future__ import annotations

import pandas as pd

from acp_repro.common.statistics import LEVEL, over_draws

from ..tables import UnfitRecords, one_each
from ..verdict import Status, Verdict
from . import needle_statistics, paired, versions
from .needle_statistics import CELL, FOUND_RECALL, METHODS, SETTING

# Written before any pair was asked for many facts. On one question two exact trainings, one of them from a
# changed weight, are 0.36 nats apart. What is no more than such chance does is no damage.
MARGIN_NATS = 0.5
LEAST_PAIRS = 3


def trainings(facts: pd.DataFrame) -> pd.DataFrame:
    """Each training as it was trained; another evaluation of its weights is left out. Facts count alike.

    Returns:
        one row a training: :data:`SETTING`, ``seed``, ``method``, ``run``, the numbers of ``facts`` and
        ``prompts``, ``nats``, the negative log-likelihood of the answer, and ``recall`` in percent.

    Raises:
        UnfitRecords: two records of one prompt.
    """
    own = facts[(facts["method"] == "exact") == facts["log_pruning_tolerance"].isna()]
    one_each(own, [*CELL, "fact", "run"], "needle_facts")
    own = own.assign(nats=-own["answer_log_likelihood_nats"], recall=100 * own["answer_recall"])
    key = [*SETTING, "seed", "method", "run"]
    each = own.groupby([*key, "fact"], sort=False)
    means = each[["nats", "recall"]].mean().assign(prompts=each.size(), facts=1).groupby(key, sort=False)
    return means.agg({"facts": "sum", "prompts": "sum", "nats": "mean", "recall": "mean"}).reset_index()


def pairs(facts: pd.DataFrame) -> pd.DataFrame:
    """ACP and exact of one seed beside each other; a training alone is left out.

    Returns:
        one row a pair: :data:`SETTING`, ``seed``, and the numbers of :func:`trainings` as ``nats_acp`` and
        ``nats_exact`` and so on.

    Raises:
        UnfitRecords: see :func:`trainings`; also if the two were not asked the same.
    """
    table = trainings(facts)
    acp, exact = (table[table["method"] == method].drop(columns=["method", "run"]) for method in METHODS)
    both = acp.merge(exact, on=[*SETTING, "seed"], suffixes=("_acp", "_exact"), validate="one_to_one")
    if any((both[f"{name}_acp"] != both[f"{name}_exact"]).any() for name in ("facts", "prompts")):
        raise UnfitRecords("needle_facts: the two trainings of a pair were not asked the same")
    return both


def in_words(facts: pd.DataFrame) -> str:
    """ "Asked for 24 facts, RUN finds 84.3 % of the words and is 2.13 nats from certain; RUN ..."."""
    table = trainings(facts)
    each = "; ".join(
        f"{row.run} finds {row.recall:.3g} % of the words and is {row.nats:.2f} nats from certain"
        for row in table.itertuples()
    )
    return f"Asked for {table['facts'].max()} facts, {each}"


def kept(facts: pd.DataFrame) -> Verdict:
    """Met if ACP's mean ``nats`` is less than :data:`MARGIN_NATS` above the exact one, missed if more.

    Both are one-sided t tests over pairs of trainings, so the interval has twice their level. Undecided if
    neither shows, with fewer than :data:`LEAST_PAIRS` pairs, or where exact attention finds less than
    :data:`FOUND_RECALL` of the words."""
    table, keys = pairs(facts), [*SETTING, "seed"]
    unlike = {pair: words for pair, words in versions.unlike(facts, keys).items() if words}
    table = table[[pair not in unlike for pair in table[keys].itertuples(index=False, name=None)]]
    note = versions.notes(unlike, ". ", paired.NOT_COUNTED)
    if table.empty:
        words = f"no pair of trainings was asked for many facts, and {LEAST_PAIRS} are needed{note}"
        return Verdict(Status.UNDECIDED, f"{words}. {in_words(facts)}")
    named = needle_statistics.names(table[SETTING].drop_duplicates().sort_values(SETTING), always=True)
    told, words = [], []
    for (_, some), trained_at in zip(table.groupby(SETTING), named, strict=True):
        acp, exact = some["nats_acp"], some["nats_exact"]
        mean, low, high = over_draws(acp - exact).interval(2 * LEVEL)
        enough = len(some) >= LEAST_PAIRS and some["recall_exact"].mean() >= 100 * FOUND_RECALL
        shown = True if high < MARGIN_NATS else False if low > MARGIN_NATS else None
        told.append(shown if enough else None)
        count = f"{len(some)} pairs" if len(some) > 1 else "one pair"
        count += f" of the {LEAST_PAIRS} needed" * (len(some) < LEAST_PAIRS)
        same = int((acp == exact).sum())
        count += f", {same} of them the same to the last digit" * (len(some) > 1 and same > 0)
        ends = f" [{low:+.4f}, {high:+.4f}] (90 %)" if len(some) >= LEAST_PAIRS else ""
        asked = f"{', '.join(trained_at)}, {some['facts_acp'].max()} facts, {count}"
        recall = " and ".join(f"{some[f'recall_{method}'].mean():.3g}" for method in METHODS)
        words.append(
            f"Trained at {asked}. Nats from certain: {acp.mean():.2f} with ACP, {exact.mean():.2f} without, "
            f"difference {mean:+.4f}{ends}, margin {MARGIN_NATS:g}. Words found: {recall} %"
        )
    ours = ". ".join(words) + note
    return Verdict.of(False if False in told else all(told) or None, ours)
