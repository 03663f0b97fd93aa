"""Tables 1 and 3: tests over paired items, significant differences, and the contents of the tables."""

import math

import numpy as np
import pandas as pd
import pytest

from acp_repro.pipeline.evaluation.catalogue import COLUMNS
from analysis.acp import paired, table1
from analysis.tables import UnfitRecords
from analysis.verdict import Word


def items(method: str, values, task: str = "piqa", metric: str = "acc", seed: int = 0, weight: float = 1.0):
    """``lm_eval_items`` records of one run."""
    return pd.DataFrame(
        {
            "architecture": "pro",
            "size": "125M",
            "context_length_tokens": 4096,
            "log_pruning_tolerance": -10.0 if method == "acp" else math.nan,
            "seed": seed,
            "task": task,
            "metric": metric,
            "item": range(len(values)),
            "value": values,
            "weight": weight,
        }
    )


def right(count: int, of: int = 1000, first: int = 0) -> np.ndarray:
    """``count`` right answers of ``of``, from item ``first`` on."""
    values = np.zeros(of)
    values[first : first + count] = 1
    return values


NESTED = pd.concat([items("acp", right(500)), items("exact", right(530))])


@pytest.mark.parametrize(
    ("records", "verdict", "low", "high"),
    [
        # 500 and 530 right of 1000: the same 500 and 30 more, or 265 of each alone.
        (NESTED, paired.DIFFERS, 0, 1e-6),
        (pd.concat([items("acp", right(500)), items("exact", right(530, first=470))]), paired.SAME, 0.1, 1),
        # Two seeds with the same difference show that the method is not its cause.
        (pd.concat([NESTED, items("acp", right(535), seed=1)]), paired.AS_RUNS, 0, 1),
        (pd.concat([NESTED, items("acp", right(510), seed=1)]), paired.DIFFERS, 0, 1),
    ],
)
def test_only_significant_differences_count(records, verdict, low, high):
    (row,) = paired.differences(records).itertuples()
    assert row.verdict == verdict and row.difference == pytest.approx(-0.03)
    assert low <= row.p_value <= high


def test_pairs_of_the_paper_define_run_variance_without_a_second_seed():
    gaps = paired.paper_gaps()
    assert gaps["wikitext", "word_perplexity"] == pytest.approx(math.log(31.64 / 31.05))  # Table 3, 8k
    assert gaps["winogrande", "acc"] == pytest.approx(0.0213)  # Table 3, 4k: 48.78 and 50.91
    assert len(gaps) == 12 and all(column.guess is not None for column in COLUMNS if column.is_accuracy)
    small = pd.concat([items("acp", right(500), "winogrande"), items("exact", right(520), "winogrande")])
    (row,) = paired.differences(small).itertuples()
    assert row.verdict == paired.AS_RUNS and row.adjusted_p_value < 1e-4


def test_perplexities_are_compared_by_their_log_likelihoods():
    random = np.random.default_rng(0)
    exact = random.normal(-3, 1, 300)
    both = pd.concat(
        [
            items("acp", exact - 0.1 + random.normal(0, 0.05, 300), "lambada_openai", "perplexity"),
            items("exact", exact, "lambada_openai", "perplexity"),
            items("acp", exact * 50, "wikitext", "word_perplexity", weight=50.0),
            items("exact", exact * 50 + random.normal(0, 1, 300), "wikitext", "word_perplexity", weight=50.0),
        ]
    )
    lambada, wiki = paired.differences(both).itertuples()
    assert lambada.exact == pytest.approx(math.exp(-exact.mean()))
    assert lambada.acp / lambada.exact == pytest.approx(math.exp(0.1), rel=0.01)
    assert (lambada.verdict, wiki.verdict) == (paired.DIFFERS, paired.SAME)


def pairs(task: str, *counts: tuple[int, int], metric: str = "acc") -> pd.DataFrame:
    """One seed per pair (correct with ACP, correct without) of 1000 items."""
    return pd.concat(
        [
            items(method, right(count), task, metric, seed)
            for seed, both in enumerate(counts)
            for method, count in zip(("acp", "exact"), both, strict=True)
        ]
    )


# The paper's pairs differ by up to 2.13 points of winogrande (Table 3, 4k: 48.78 and 50.91).
CLOSE = pairs("winogrande", (700, 701), (720, 718), (691, 690))
WORSE, BETTER = (
    pairs("winogrande", (700 + n, 700), (690 + n, 691), (720 + n, 720)) for n in (-60, 60)
)  # an improvement is not equivalence either
TWO_VERSIONS = CLOSE.assign(commit=CLOSE["log_pruning_tolerance"].map(str))
GUESSING = pairs("winogrande", (500, 501), (501, 502), (499, 500))
KNOWN = pairs("arc_easy", (400, 401), (410, 409), (405, 406))
LAMBADA = pairs("lambada_openai", (16, 16), (15, 15), (16, 16))
OF_WORDS = LAMBADA.assign(metric="perplexity", value=-4.0)
MATCH, APART, UNTOLD = Word.REPRODUCED, Word.CONTRADICTED, Word.INCONCLUSIVE


@pytest.mark.parametrize(
    ("records", "word"),
    [
        ([CLOSE], MATCH),
        ([TWO_VERSIONS], UNTOLD),
        # A bitwise identical pair does not predict another pair.
        ([pairs("winogrande", *[(700, 700)] * 3, (701, 700))], UNTOLD),
        # Neither significantly different nor equivalent.
        ([pairs("winogrande", (700, 730), (720, 690), (700, 701))], UNTOLD),
        ([WORSE], APART),
        ([BETTER], APART),
        ([CLOSE.assign(task="piqa"), WORSE], APART),
        # A chance-level model scores the same with and without ACP.
        ([GUESSING], UNTOLD),
        # 62 % of BoolQ's answers are yes, so 60 % is the chance level.
        ([pairs("boolq", (600, 601), (600, 602), (601, 600))], UNTOLD),
        ([GUESSING, KNOWN], MATCH),
        # If the accuracy of a task is at chance level, its perplexity is not evidence either.
        ([KNOWN, LAMBADA, OF_WORDS], UNTOLD),
        # A pair and a column of the paper are required.
        ([items("acp", right(500))], UNTOLD),
        ([pairs("book_last_word", (700, 701), (710, 711), (700, 702))], UNTOLD),
    ],
)
def test_tasks_match_if_pairs_rule_out_the_papers_differences(records, word):
    assert table1.tasks_match(pd.concat(records)).word is word


ONE = pd.concat([items("acp", right(700)), items("acp", right(500), "boolq"), items("exact", right(710))])
BOOLQ = items("acp", right(500), "boolq", seed=1)
OTHER = pd.concat([ONE, items("acp", right(740), seed=1), BOOLQ])


@pytest.mark.parametrize(
    ("records", "word"),
    [
        (ONE, UNTOLD),
        (pd.concat([ONE, items("acp", right(702), seed=1), BOOLQ]), UNTOLD),
        (OTHER, MATCH),
        (OTHER.assign(commit=OTHER["seed"]), UNTOLD),  # the seeds have other code
        (OTHER.assign(commit=OTHER["log_pruning_tolerance"].map(str)), MATCH),
        (OTHER.assign(value=OTHER["value"] * (OTHER["item"] < 510)), UNTOLD),  # at chance level
    ],
)
def test_seeds_differ_only_if_significant(records, word):
    assert table1.seeds_differ(records).word is word


def test_perplexity_above_the_vocabulary_size_is_undertrained():
    words = pairs("wikitext", (0, 0), (0, 0), (0, 0), metric="word_perplexity").assign(value=-math.log(99))
    (row,) = paired.equivalences(paired.differences(words), 100)[0].itertuples()
    assert row.adjusted_p_value == 0
    table, unknown = paired.equivalences(paired.differences(words), 98)
    assert table.empty and unknown == ["wikitext word_perplexity"]


def test_columns_are_corrected_for_multiple_testing():
    apart = [(700, 715), (720, 700), (710, 711)]
    one = pairs("winogrande", *apart)
    both = pd.concat([one, one.assign(task="piqa")])
    alone, together = (
        paired.equivalences(paired.differences(records))[0].set_index("task") for records in (one, both)
    )
    p_value = alone.loc["winogrande", "adjusted_p_value"]
    assert together.loc["winogrande", "adjusted_p_value"] == pytest.approx(2 * p_value)


def test_pairs_over_different_items_are_rejected():
    with pytest.raises(UnfitRecords, match="not the same items"):
        paired.differences(pd.concat([items("acp", right(5, 10)), items("exact", right(5, 9))]))
    with pytest.raises(UnfitRecords, match="more than one record"):
        paired.differences(pd.concat([items("acp", right(5, 10))] * 2))
    with pytest.raises(ValueError, match="item 1 is nan"):
        paired.differences(pd.concat([items(side, [-1.0, math.nan]) for side in ("acp", "exact")]))
