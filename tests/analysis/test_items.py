"""Declarations of the papers: items, metrics and claims are consistent."""

import pytest

from acp_repro.pipeline.paper_registry import find_paper, paper_names
from analysis import __main__ as analysis
from analysis.ledger import numbered
from tests.analysis import synthetic

PAPERS = [find_paper(name) for name in paper_names()]


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_declared_items_exist(paper):
    names = [item.name for item in paper.items]
    ids = [id for id, _, _ in numbered(paper)]
    assert 0 < len(set(names)) == len(names) and 0 < len(set(ids)) == len(ids)
    assert all(metric.command or metric.measure() for metric in paper.metrics if metric.has_library)
    for item in paper.items:
        assert {paper.metric(name).name for name in item.metrics} == {*item.metrics}
    for _, claim, _ in numbered(paper):
        shown = claim.test or claim.proof or claim.refuted
        assert claim.metrics or shown or claim.untested
        assert not (claim.untested and (claim.metrics or shown)), claim.claim
        if claim.metrics:
            assert claim.check


def test_command_plots_from_results_or_reports_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    synthetic.two_lengths(tmp_path, "pro, llama")
    assert analysis.main(["figure2", "--suite", "mini"]) == 1
    assert "python -m acp_repro.measure pruned_ratio --suite mini --run pro" in capsys.readouterr().err
    for wrong in (["figure2", "--suite", "minii"], ["figureC", "--suite", "mini"]):
        assert analysis.main(wrong) == 2
    synthetic.write_savings("llama")
    assert analysis.main(["figure10", "--suite", "mini"]) == 0
    assert (tmp_path / "figures/mini/figure10.png").is_file()
