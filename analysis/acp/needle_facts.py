"""The needle test with many needles: from ``needle_facts`` records to the verdict of Figure A6."""

import pandas as pd

from acp_repro.common.statistics import LEVEL, over_draws

from ..tables import UnfitRecords, one_each
from ..verdict import Verdict, Word
from . import needle_statistics, paired, versions
from .needle_statistics import CELL, FOUND_RECALL, METHODS, SETTING
from .paired import LEAST_PAIRS

# Fixed before any pair was evaluated on many needles. On one needle, two exact runs that differ in one
# initial parameter are 0.36 nats apart, so a smaller difference is within the variation of training runs.
MARGIN_NATS = 0.5
SAME_NATS = 0.01  # a change of a likelihood by 1 %


def training_runs(facts: pd.DataFrame) -> pd.DataFrame:
    """The means of each training run, evaluated with its training method; needles have equal weight."""
    own = facts[(facts["method"] == "exact") == facts["log_pruning_tolerance"].isna()]
    one_each(own, [*CELL, "fact", "run"], "needle_facts")
    own = own.assign(nats=-own["answer_log_likelihood_nats"], recall=100 * own["answer_recall"])
    key = [*SETTING, "seed", "method", "run"]
    each = own.groupby([*key, "fact"], sort=False)
    means = each[["nats", "recall"]].mean().assign(prompts=each.size(), facts=1).groupby(key, sort=False)
    return means.agg({"facts": "sum", "prompts": "sum", "nats": "mean", "recall": "mean"}).reset_index()


def pairs(facts: pd.DataFrame) -> pd.DataFrame:
    """The ACP run and the exact run of each seed in one row; a run without its pair is left out."""
    table = training_runs(facts)
    acp, exact = (table[table["method"] == method].drop(columns=["method", "run"]) for method in METHODS)
    both = acp.merge(exact, on=[*SETTING, "seed"], suffixes=("_acp", "_exact"), validate="one_to_one")
    if any((both[f"{name}_acp"] != both[f"{name}_exact"]).any() for name in ("facts", "prompts")):
        raise UnfitRecords("needle_facts: the two training runs of a pair were not asked the same")
    return both


def in_words(facts: pd.DataFrame) -> str:
    """ "With 24 needles, RUN has a recall of 84.3 % and an NLL of 2.13 nats; RUN ..."."""
    table = training_runs(facts)
    each = "; ".join(
        f"{row.run} has a recall of {row.recall:.3g} % and an NLL of {row.nats:.2f} nats"
        for row in table.itertuples()
    )
    return f"With {table['facts'].max()} needles, {each}"


def kept(facts: pd.DataFrame) -> Verdict:
    """Reproduced if one-sided t tests show that ACP raises the mean NLL by less than :data:`MARGIN_NATS`;
    contradicted if they show a larger rise."""
    table, keys = pairs(facts), [*SETTING, "seed"]
    unlike = {pair: words for pair, words in versions.unlike(facts, keys).items() if words}
    table = table[[pair not in unlike for pair in table[keys].itertuples(index=False, name=None)]]
    note = versions.notes(unlike, "\n", paired.NOT_COUNTED)
    if table.empty:
        words = f"no pair of training runs was evaluated on many needles, and {LEAST_PAIRS} are needed{note}"
        return Verdict(Word.INCONCLUSIVE, f"{words}\n{in_words(facts)}")
    named = needle_statistics.names(table[SETTING].drop_duplicates().sort_values(SETTING), always=True)
    told, words = [], []
    for (_, some), trained_at in zip(table.groupby(SETTING), named, strict=True):
        acp, exact = some["nats_acp"], some["nats_exact"]
        mean, low, high = over_draws(acp - exact).interval(2 * LEVEL)
        enough = not paired.too_few(acp - exact) and some["recall_exact"].mean() >= 100 * FOUND_RECALL
        shown = True if high < MARGIN_NATS else False if low > MARGIN_NATS else None
        told.append(shown if enough else None)
        count = f"{len(some)} pair{'s' * (len(some) > 1)}"
        ends = f" [{low:+.4f}, {high:+.4f}] (90 %)" if len(some) >= LEAST_PAIRS else ""
        asked = f"{', '.join(trained_at)}, {some['facts_acp'].max()} needles, {count}"
        recall = " with ACP and ".join(f"{some[f'recall_{method}'].mean():.3g} %" for method in METHODS)
        words.append(
            f"Trained at {asked}: the mean NLL is {acp.mean():.2f} nats with ACP, {exact.mean():.2f} without"
            f"\nThe mean NLL difference is {mean:+.4f} nats{ends}, and the margin is {MARGIN_NATS:g} nats"
            f"\nThe mean recall is {recall} without"
        )
    short = paired.too_few(table["nats_acp"] - table["nats_exact"])
    ours = "\n".join(filter(None, [short, *words])) + note
    met = False if False in told else all(told) or None
    return Verdict.of(met, ours, short, n=len(table), unit="pair")


def same_weights(facts: pd.DataFrame) -> Verdict:
    """Reproduced if the log-likelihood of the right answer of every prompt changes by less than
    :data:`SAME_NATS` if the same weights are evaluated with and without ACP."""
    with_acp = facts[facts["log_pruning_tolerance"].notna()]
    key = ["suite", "run", *CELL, "fact"]
    one_each(with_acp, [*key, "method"], "needle_facts")
    both = with_acp.pivot(index=key, columns="method")
    nats, answers = (both[name].reindex(columns=METHODS) for name in ("answer_log_likelihood_nats", "answer"))
    if (nats := nats.dropna()).empty:
        return Verdict(Word.INCONCLUSIVE, "no model was evaluated both with and without ACP")
    apart = (nats["acp"] - nats["exact"]).abs()
    other = (answers["acp"] != answers["exact"]).loc[nats.index].groupby(["suite", "run"]).sum()
    same = f"the likelihoods of right answers are equal in {(apart == 0).sum():,} of {len(apart):,} prompts"
    ours = f"{same}\nThe log-likelihoods differ by at most {apart.max():.2g} nats"
    ours += f"\n{other.sum()} greedy answers differ ({', '.join(map(str, other))} by training run)"
    ours += "\nWith ACP, the kernel adds partial results in another order, which can change a greedy answer"
    return Verdict.of(bool(apart.max() < SAME_NATS), ours, same, n=len(other))
