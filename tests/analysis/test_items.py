"""Every item of every paper: its module, its files, its target of Make and its claims agree."""

import dataclasses
import pkgutil
from pathlib import Path

import pytest

import analysis
from acp_repro.pipeline.errors import SuiteError
from acp_repro.pipeline.paper import load_object
from acp_repro.pipeline.registry import find_paper, paper_names
from analysis import drawing
from analysis.acp import figure2, table2
from analysis.report.gather import paper_words
from tests.analysis import synthetic

ROOT = Path(__file__).parents[2]
PAPERS = [find_paper(name) for name in paper_names()]
ITEMS = [
    pytest.param(paper, item, id=f"{paper.name}-{item.name}") for paper in PAPERS for item in paper.items
]
MODULES = sorted(m.name for m in pkgutil.walk_packages(analysis.__path__, "analysis."))


@pytest.mark.parametrize(("paper", "item"), ITEMS)
def test_names_of_an_item_agree(paper, item):
    drawn = paper.module_of(item)
    assert item.name == item.path("some").stem and item in drawn.ITEMS
    assert drawn.__name__ == f"{paper.analysis}.{drawn.ITEMS[0].name}"  # the first gives the file its name
    assert item.is_table == (item.path("some").suffix == ".md")
    assert all(paper.quantity(name) for name in item.quantities)
    assert callable(drawn.make) and callable(drawn.tabulate if item.is_table else drawn.draw)
    assert "drawing.main(globals())" in Path(drawn.__file__).read_text(encoding="utf-8")


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_a_quantity_names_what_measures_it(paper):
    for quantity in paper.quantities:
        assert quantity is paper.quantity(quantity.name) and set(quantity.later) <= set(quantity.columns)
        assert bool(quantity.measure) != bool(quantity.command)
        if quantity.measure and quantity.has_library:
            assert callable(load_object(quantity.measure))


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_the_contents_are_what_the_modules_have(paper):
    assert tuple(item.name for item in paper.items) == paper.contents
    first = paper.contents[0]
    for contents, lost in ((paper.contents[1:], first), ((*paper.contents, "figure99"), "figure99")):
        other = dataclasses.replace(paper, contents=contents)
        with pytest.raises(SuiteError, match=f"^paper {paper.name}: {lost}: must be in its contents, and"):
            _ = other.items
    elsewhere = dataclasses.replace(paper, analysis="nowhere.at.all")
    assert elsewhere.claims == ()
    with pytest.raises(SuiteError, match=r"the package of its figures, nowhere\.at\.all, is not here"):
        elsewhere.item(first)


@pytest.mark.parametrize(("paper", "item"), [param for param in ITEMS if param.values[1].claims])
def test_claims_say_what_they_check_and_where_the_paper_says_it(paper, item):
    for claim in item.claims:
        assert callable(claim.check)
        assert claim.holds_if and claim.quantities
        assert set(claim.quantities) <= set(item.quantities)
        place = paper_words(claim, paper, item).split()[0]
        assert place in ("Abstract:", "Section", "Appendix", "Figure", "Table")


def test_the_command_line_of_an_item(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    synthetic.two_lengths(tmp_path)
    code, error = synthetic.command(monkeypatch, capsys, figure2.__name__)
    assert code == 1
    assert error.startswith("error: no records of pruned_ratio in results/mini for pro-tiny-256-acp")
    assert "make them with `python -m acp_repro.measure pruned_ratio --suite mini --run pro" in error
    code, error = synthetic.command(monkeypatch, capsys, figure2.__name__, "minii")
    assert code == 2 and "no such suite; there are mini" in error
    assert synthetic.command(monkeypatch, capsys, table2.__name__) == (0, "")
    with pytest.raises(ValueError, match="figure11_right: the grid of experiments/mini.yaml has no run of"):
        drawing.find("mini", "figure11_right")
    synthetic.write_savings()
    with pytest.raises(ValueError, match="say python -m analysis.acp.figure2 --suite mini"):
        drawing.draw("mini", "figure2", "another.figure2")
    with pytest.raises(ValueError, match="paper acp has no item 'figureC'"):
        drawing.draw("mini", "figureC", "analysis.retention.figureC")


def test_an_item_that_shares_a_file_is_drawn_by_its_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    synthetic.two_lengths(tmp_path, "pro, llama")
    synthetic.write_savings("llama")
    assert synthetic.command(monkeypatch, capsys, "analysis.acp.figure2", "mini", "figure10") == (0, "")
    assert (tmp_path / "figures/mini/figure10.png").is_file()
    code, error = synthetic.command(monkeypatch, capsys, "analysis.acp.figure2", "mini", "figure4")
    assert code == 2 and "invalid choice: 'figure4' (choose from " in error
