"""Pairs of training runs: pairs of one code version, and the verdicts on their losses."""

import hashlib
import subprocess
from pathlib import Path

import pandas as pd
import pytest
import scipy.stats

from acp_repro.papers.acp.paper import PAPER
from acp_repro.pipeline.suite_file import load_suite, suite_names
from analysis.acp import figure3, versions
from analysis.ledger import all_records, judge_claim
from analysis.tables import UnfitRecords
from analysis.verdict import Word
from tests.analysis import synthetic
from tests.suites import YAML

MEASURED, CONTRADICTED, UNTOLD = Word.REPRODUCED, Word.CONTRADICTED, Word.INCONCLUSIVE
RUN = {"architecture": "pro", "size": "a", "context_length_tokens": 512, "trained_tokens": 10**9}


def losses(*pairs: tuple[float, float]) -> pd.DataFrame:
    """One seed per pair of losses (with ACP, exact)."""
    return pd.DataFrame(
        [
            RUN | {"log_pruning_tolerance": tolerance, "seed": seed, "loss_nats": loss}
            for seed, pair in enumerate(pairs)
            for tolerance, loss in zip((-10.0, None), pair, strict=True)
        ]
    )


CASES = [
    # Two one-sided tests over pairs, at a margin of 0.002.
    ([(3.0001, 3.0), (3.2, 3.20005), (3.1, 3.1001)], MEASURED),
    ([(3.02, 3.0), (3.0211, 3.001), (3.0206, 3.0)], CONTRADICTED),
    ([(2.98, 3.0), (2.9811, 3.001), (2.9806, 3.0)], CONTRADICTED),  # an improvement is not equivalence either
    ([(3.1, 3.0), (3.1, 3.101), (3.1, 3.2), (3.25, 3.1)], UNTOLD),  # pairs do not compensate for each other
    # Few diverging pairs are inconclusive, however many bitwise identical pairs exist.
    ([(3.0001, 3.0)], UNTOLD),
    ([(3.0, 3.0), (3.1, 3.1), (3.2, 3.2)], UNTOLD),
    ([(3.0001, 3.0), (3.1, 3.1001), (3.2, 3.2), (3.3, 3.3)], UNTOLD),
]


@pytest.mark.parametrize(("pairs", "word"), CASES)
def test_losses_match_if_diverging_pairs_rule_out_a_difference(pairs, word):
    assert figure3.losses_match(losses(*pairs)).word is word


RIGHT, WRONG = [(-0.05, -0.04, -0.06), (0.001, 0.002, 0.003)], [(0.02, 0.021, 0.022)]
GAPS = {MEASURED: RIGHT, CONTRADICTED: WRONG, UNTOLD: [(-0.05, 0.04, 0.0), (-0.05, -0.04)]}


@pytest.mark.parametrize(("gaps", "word"), [(one, word) for word, some in GAPS.items() for one in some])
def test_fox_against_the_rope_baseline(make_suite, gaps, word):
    grid = f"[null], architecture: [rope, pro], seed: {[*range(len(gaps))]}"
    for run in (suite := make_suite(YAML.replace("[-10, null]", grid))).runs:
        nats = 3.0 + gaps[run.seed] * (run.architecture == "pro")
        synthetic.write(run.name, "loss", {"loss_nats": nats})
        synthetic.write(run.name, "loss_curve", *({"position": p, "loss_nats": nats} for p in (1, 127)))
    item = PAPER.item("figureA8")
    (claim,) = (claim for claim in PAPER.claims if claim.items == ("figureA8",))
    assert judge_claim(claim, item, suite, all_records(suite)).verdict.word is word
    if word is MEASURED:
        assert f"mean loss difference, FoX − RoPE: {sum(gaps) / 3:+.4f}" in synthetic.draw("figureA8")


def test_pair_of_two_code_versions_is_shown_but_not_counted():
    records = losses((3.001, 3.0), (3.2, 3.2005), (3.099, 3.1), (3.9, 3.0))
    commits = ["one", "one", "two", "two", None, "two", "one", "two"]  # an unrecorded commit is no evidence
    found = figure3.losses_match(records.assign(commit=commits))
    assert found.n == 3 and "+0.9000" in found.ours
    for one_code in (["ca18a47ca0f3", "dd1eb2f4643d"], ["2071518815ee", "b5154bbd8eb4"]):
        assert "†" not in figure3.losses_match(records[:2].assign(commit=one_code)).ours


def test_table_lists_the_training_code_digest_of_each_published_run(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    parts = ("attention", "model", "training", "data", "pipeline/training", "pipeline/data")
    only_guide_a_run = ("/training/run_folder.py", "/training/side_by_side.py", "/training/task.py")
    digests = {}
    for suite in map(load_suite, suite_names()):
        if suite.paper is not PAPER or not suite.file.published:
            continue
        tables = all_records(suite, ("loss", "needle", "lm_eval")).values()
        for commit in {commit for table in tables for commit in table["commit"].dropna()}:
            command = ["git", "ls-tree", "-r", commit, *(f"acp_repro/{part}" for part in parts)]
            tree = subprocess.run(command, capture_output=True, text=True)
            if tree.returncode:
                pytest.skip(f"git does not have commit {commit}: git fetch --unshallow")
            lines = [line for line in tree.stdout.splitlines() if not line.endswith(only_guide_a_run)]
            digests[commit] = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
    assert digests == versions.TRAINING_CODE


def test_same_weights_are_judged_against_the_one_bit_baseline():
    names = ["loss", figure3.ONE_BIT, "needle"]
    same = pd.DataFrame({"suite": "s", "run": "one", "test": names, "items": 9, "differing_items": 1})
    for most, word in (([0.05, 0.1, 0], MEASURED), ([0, 0.1, 0.15], UNTOLD), ([0.3, 0.1, 0], CONTRADICTED)):
        records = same.assign(largest_difference_nats=most, differing_answers=None)
        assert figure3.same_weights(records).word is word


def test_equally_perturbed_runs_are_compared_in_pairs():
    near = [(3.0 + n / 1e2, 3.0005 + n / 1e2 - n / 1e4) for n in range(4)]
    for apart, count, word in ((0, 4, MEASURED), (0.01, 4, CONTRADICTED), (0, 2, UNTOLD)):
        nats = [(acp + apart, exact) for acp, exact in near][:count]
        runs = [f"{side}-nudged{n}" for n in range(count) for side in ("-acp", "-exact")]
        found = figure3.ensembles_match(losses(*nats).assign(run=runs, seed=0))
        assert found.word is word
        low, high = scipy.stats.ttest_rel(*zip(*nats, strict=True)).confidence_interval(0.9)
        assert f"[{low:+.4f}, {high:+.4f}]" in found.ours or word is UNTOLD
    with pytest.raises(UnfitRecords):
        figure3.ensembles_match(losses((3.0, 3.0)).assign(run="one"))


SAME = pd.concat(
    [losses(*[(3.0, 3.0)] * 3).assign(suite="s", run="one", step=step) for step in range(3)],
    ignore_index=True,
).replace({"log_pruning_tolerance": {-10.0: -20.0}})
ONE_DIFFERS = SAME.assign(loss_nats=SAME["loss_nats"] + 1e-7 * (SAME.index == 6))  # of seed 0 at step 1
REPEATED = pd.DataFrame({"training": [figure3.REPEAT], "diverges_here": [0]})


@pytest.mark.parametrize(
    ("records", "word"),
    [
        ([SAME], MEASURED),
        ([SAME[SAME["seed"] < 2]], UNTOLD),
        ([ONE_DIFFERS, REPEATED], CONTRADICTED),
        ([ONE_DIFFERS], UNTOLD),  # the cause may be the machine and not pruning
    ],
)
def test_runs_are_identical_if_no_step_differs(records, word):
    assert figure3.same_steps(*records).word is word
