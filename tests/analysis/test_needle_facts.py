"""Many facts: the verdict over pairs of training runs, and Table A1 with incomplete results."""

import itertools

import pandas as pd
import pytest

from analysis.acp import needle_facts
from analysis.tables import UnfitRecords
from analysis.verdict import Word


def asked(nats: float, recall: float, method: str, fact: int = 0, depth: float = 0.0) -> dict:
    return {
        "method": method,
        "needle_fraction": 0.1,
        "evaluated_length_tokens": 512,
        "depth": depth,
        "haystack_sample": 0,
        "answer_recall": recall,
        "answer_log_likelihood_nats": -nats,
        "answer_log_likelihood_without_needle_nats": -80,
        "fact": fact,
    }


def records(*differences: float, recall: float = 0.9) -> pd.DataFrame:
    """One pair per difference in nats. Fact 0 is asked twice and fact 1 once, with equal weight. ACP's
    weights are also tested without pruning, which is not a separate training run."""
    rows = []
    for (seed, apart), trained in itertools.product(enumerate(differences), ("acp", "exact")):
        shared = {"architecture": "pro", "size": "tiny", "context_length_tokens": 512, "seed": seed}
        shared |= {"run": f"{trained}-{seed}", "log_pruning_tolerance": -10.0 if trained == "acp" else None}
        nats = 2.0 + apart * (trained == "acp")
        for method in ("acp", "exact") if trained == "acp" else ("exact",):
            more = 0.0 if method == trained else 50.0
            rows += [
                shared | asked(nats + moved + more, recall, method, fact, depth)
                for fact, depth, moved in ((0, 0.0, 1.0), (0, 1.0, 1.0), (1, 0.0, -1.0))
            ]
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("differences", "status"),
    [
        ([0.06, 0.1, 0.2], Word.REPRODUCED),
        ([-3.0, -2.0, -1.0], Word.REPRODUCED),  # an improvement is not damage
        ([0.0, 0.0, 0.0], Word.INCONCLUSIVE),  # bitwise identical pairs do not predict a diverging pair
        ([0.0, 0.1, 0.2], Word.INCONCLUSIVE),
        ([0.3, 0.4, 0.5], Word.INCONCLUSIVE),  # the mean is below the margin but its interval is not
        ([-1.0, 0.0, 2.0], Word.INCONCLUSIVE),
        ([0.7, 0.8, 0.9], Word.CONTRADICTED),
        ([0.0, 0.0], Word.INCONCLUSIVE),
        ([9.0, 9.0], Word.INCONCLUSIVE),
        ([9.0], Word.INCONCLUSIVE),
    ],
)
def test_verdict_over_pairs_of_training_runs(differences, status):
    verdict = needle_facts.kept(records(*differences))
    assert verdict.word == status
    assert f"difference is {sum(differences) / len(differences):+.3f}" in verdict.ours


FAR, NEAR = records(0.7, 0.8, 0.9, -9.0), records(0.0, 0.1, 0.2)
OTHER_CODE = (FAR["seed"] == 3) & FAR["run"].str.startswith("exact")


@pytest.mark.parametrize(
    ("table", "word"),
    [
        (FAR.assign(commit=OTHER_CODE.map({True: "b", False: "a"})), Word.CONTRADICTED),  # three pairs count
        (records(0.0, 0.1, 0.2, recall=0.1), Word.INCONCLUSIVE),  # not found by the baseline
        (NEAR[NEAR["run"] == "acp-1"], Word.INCONCLUSIVE),  # not a pair
        (NEAR[NEAR["run"] != "exact-1"], Word.INCONCLUSIVE),  # two pairs
    ],
)
def test_only_complete_pairs_of_one_code_version_count(table, word):
    assert needle_facts.kept(table).word is word


def test_incomplete_or_repeated_questions_are_rejected():
    with pytest.raises(UnfitRecords, match="were not asked the same"):
        needle_facts.kept(NEAR.drop(index=0))
    with pytest.raises(UnfitRecords, match="more than one record"):
        needle_facts.kept(pd.concat([NEAR, NEAR]))
