"""Pairs of trainings: which are of one code, and what their losses show."""

import subprocess
from itertools import combinations
from pathlib import Path

import pandas as pd
import pytest

from acp_repro.pipeline.papers.acp.paper import PAPER
from acp_repro.pipeline.suite import load_suite, suite_names
from analysis.acp import figure3, paired, versions
from analysis.report.gather import all_records
from analysis.tables import UnfitRecords
from analysis.verdict import Status

MET, MISSED, UNDECIDED = Status.MET, Status.MISSED, Status.UNDECIDED
RUN = {"architecture": "pro", "size": "a", "context_length_tokens": 512, "trained_tokens": 10**9}


def losses(*pairs: tuple[float, float]) -> pd.DataFrame:
    """A seed for each (with ACP, exact)."""
    return pd.DataFrame(
        [
            RUN | {"log_pruning_tolerance": tolerance, "seed": seed, "loss_nats": loss}
            for seed, pair in enumerate(pairs)
            for tolerance, loss in zip((-10.0, None), pair, strict=True)
        ]
    )


def test_losses_match_where_pairs_rule_out_the_papers_own_difference():
    close = figure3.losses_match(losses((3.001, 3.0), (3.2, 3.2), (3.099, 3.1)))
    assert close.status is MET
    # Errors 0.001 / sqrt(3), two degrees of freedom: 2.920 of them on either side.
    assert "mean of 3 pairs +0.0000 [-0.0017, +0.0017]" in close.ours
    assert "+0.0010 (seed 0), +0.0000 (seed 1), -0.0010 (seed 2)" in close.ours
    # Of one pair nobody knows what the next would be, and seeds that differ by 0.2 make nothing easier.
    one = figure3.losses_match(losses((3.0001, 3.0)))
    assert one.status is UNDECIDED and one.ours.startswith("one pair of trainings")
    noisy = losses((3.1, 3.0), (3.1, 3.1), (3.1, 3.2), (3.25, 3.1))
    assert figure3.losses_match(noisy).status is UNDECIDED
    # One pair far apart is not made up for by one that is far apart the other way, nor by an identical one.
    assert figure3.losses_match(losses((3.25, 3.0), (3.1, 3.2), (3.1, 3.1))).status is UNDECIDED
    assert figure3.losses_match(losses((3.02, 3.0), (3.0211, 3.001))).status is MISSED
    better = figure3.losses_match(losses((2.98, 3.0), (2.9811, 3.001)))
    assert better.status is MISSED  # nor is that the same
    assert figure3.losses_match(losses((3.0, 3.0))[:1]).status is UNDECIDED
    assert "-0.00004" in figure3.losses_match(losses((3.0, 3.00004), (3.0, 3.0))).ours.replace("−", "-")
    with pytest.raises(UnfitRecords, match="loss: more than one record"):
        figure3.losses_match(pd.concat([losses((3.0, 3.0))] * 2))


NOTE = "† trained with two versions of the kernels, and not counted"


def test_a_pair_of_two_codes_is_shown_and_not_counted():
    records = losses((3.001, 3.0), (3.2, 3.2), (3.099, 3.1), (3.9, 3.0))
    assert "†" not in figure3.losses_match(records.assign(commit="one", device="gpu")).ours
    commits = ["one", "one", "two", "two", None, "two", "one", "two"]  # what is not recorded says nothing
    found = figure3.losses_match(records.assign(commit=commits))
    assert "-0.0010 (seed 2), +0.9000† (seed 3); mean of 3 pairs +0.0000 [-0.0017" in found.ours
    assert found.status is MET and found.ours.endswith(f"; {NOTE}")
    first, *_, last = versions.SAME_CODE.items()  # a commit and the one whose code it has
    assert "†" not in figure3.losses_match(records[:4].assign(commit=[*first, *last])).ours
    alone = figure3.losses_match(records[:2].assign(commit=["one", "two"]))
    assert alone.status is UNDECIDED and alone.ours.startswith("no pair was trained with one version")
    other = records[:2].assign(commit="one", torch_version=["2.10", "2.11"])
    assert "+0.0010†; † trained with two versions of torch, and" in figure3.losses_match(other).ours


def test_the_margin_of_losses_is_no_more_than_the_papers_own_pairs():
    """A word is fewer than two tokens, so half of what they differ by in nats a word."""
    largest = paired.paper_gaps()["wikitext", "word_perplexity"]
    assert 0.4 * largest < figure3.LOSS_WITHIN_NATS <= largest / 2


def test_two_pairs_of_the_same_bits_are_too_few():
    same = figure3.losses_match(losses((3.0, 3.0), (3.1, 3.1)))
    assert same.status is UNDECIDED and same.ours.startswith("the same bits in 2 pairs")
    assert figure3.losses_match(losses((3.0, 3.0), (3.1, 3.1), (3.2, 3.2))).status is MET


def test_commits_of_one_code_are_those_that_git_says(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    folders = [f"acp_repro/{name}" for name in ("attention", "model", "training", "data")]
    beside = ("/training/run_folder.py", "/training/side_by_side.py", "/training/task.py")
    code = {}
    for suite in (load_suite(name) for name in suite_names()):
        if suite.paper is not PAPER or not suite.file.published:
            continue
        tables = all_records(suite, ("loss", "needle", "lm_eval")).values()
        for commit in {commit for table in tables for commit in table["commit"].dropna()}:
            tree = subprocess.run(["git", "ls-tree", "-r", commit, *folders], capture_output=True, text=True)
            if tree.returncode:
                pytest.skip(f"git does not have commit {commit}: git fetch --unshallow")
            code[commit] = [line for line in tree.stdout.splitlines() if not line.endswith(beside)]
    version = {commit: versions.SAME_CODE.get(commit, commit) for commit in code}
    assert set(versions.SAME_CODE) <= set(code)
    for one, other in combinations(code, 2):
        assert (code[one] == code[other]) is (version[one] == version[other]), (one, other)
