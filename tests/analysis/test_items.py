"""What the papers declare: items, their quantities and claims agree with each other."""

import pytest

from acp_repro.pipeline.registry import find_paper, paper_names
from analysis import __main__ as analysis
from analysis import drawing
from analysis.ledger import numbered, paper_words
from tests.analysis import synthetic

PAPERS = [find_paper(name) for name in paper_names()]


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_what_is_declared_is_there(paper):
    names = [item.name for item in paper.items]
    ids = [id for id, _, _ in numbered(paper)]
    assert 0 < len(set(names)) == len(names) and 0 < len(set(ids)) == len(ids)
    for item in paper.items:
        assert {paper.quantity(name).name for name in item.quantities} == {*item.quantities}
    for _, claim, item in numbered(paper):
        shown = claim.test or claim.proof or claim.refuted
        assert bool(claim.quantities) + bool(shown) + bool(claim.untested) == 1
        if claim.quantities:
            assert claim.check
        place = paper_words(claim, paper, item).split()[0].strip(",:")
        assert place in ("Abstract", "Section", "Sections", "Appendix", "Figure", "Table", "Tables")


def test_the_command_draws_from_records_or_says_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    synthetic.two_lengths(tmp_path, "pro, llama")
    assert analysis.main(["figure2", "--suite", "mini"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: no records of pruned_ratio in results/mini for pro-tiny-256-acp")
    assert "make them with `python -m acp_repro.measure pruned_ratio --suite mini --run pro" in error
    assert analysis.main(["figure2", "--suite", "minii"]) == 2
    assert "no such suite; there are mini" in capsys.readouterr().err
    assert analysis.main(["figureC", "--suite", "mini"]) == 2
    assert "paper acp has no item 'figureC'" in capsys.readouterr().err
    synthetic.write_savings("llama")
    assert analysis.main(["figure10", "--suite", "mini"]) == 0
    assert (tmp_path / "figures/mini/figure10.png").is_file()
    with pytest.raises(ValueError, match="figure8: the grid of experiments/mini.yaml has no run of"):
        drawing.find("mini", "figure8")
