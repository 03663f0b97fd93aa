"""The report: one Markdown page that shows what is drawn and says what is missing."""

import re
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from analysis import drawing, style
from analysis.report.__main__ import main
from analysis.tables import markdown_table
from tests.analysis import synthetic


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder, report) of a suite that has Figure 2, Table 4 and losses, and nothing else."""
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        synthetic.two_lengths(folder)
        synthetic.write_savings()
        for length, with_acp in ((256, 3.0301), (512, 3.03)):
            synthetic.write(f"pro-tiny-{length}-acp", "loss", {"loss_nats": with_acp})
            synthetic.write(f"pro-tiny-{length}-exact", "loss", {"loss_nats": 3.0})
        figure, _ = plt.subplots(figsize=(style.PAGE_INCHES, 2))
        path = Path("figures/mini/figure2.png")
        drawing.save(figure, path, "**Figure 2.** Bars & *more* for $L$ < 9. Then this.")
        synthetic.draw("table4")
        Path("figures/mini/heads.html").touch()
        assert main(["--suite", "mini"]) == 0
        yield folder, Path("figures/mini/report.md").read_text("utf-8")


def section(text: str, name: str) -> str:
    return re.search(rf'<div id="{name}"></div>(.*?)<div id=', text, re.DOTALL)[1]


def test_a_users_matplotlibrc_changes_no_figure():
    style.use_style()
    usual = dict(plt.rcParams)
    theirs = {"text.usetex": True, "font.family": "serif", "axes.facecolor": "black", "savefig.bbox": "tight"}
    with plt.rc_context(theirs):
        style.use_style()
        assert dict(plt.rcParams) == usual


def test_links_lead_to_sections_pictures_and_records(made):
    folder, text = made
    ids = set(re.findall(r'<div id="(\w+)">', text))
    assert set(re.findall(r"\]\(#(\w+)\)", text)) == ids - {"end"}
    files = re.findall(r'<a href="(\.\./[^"]*)"', text) + re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)
    assert len(files) >= 6 + 4
    assert all((folder / "figures" / "mini" / file).resolve().is_file() for file in files)


def test_verdicts_are_shown_with_their_numbers(made):
    _, text = made
    figure2 = section(text, "figure2")
    assert "**✓ measured in the paper's range** About 70 % of FLOPs" in figure2
    assert "tiny (1.5k tokens, start of training): 50 % at 256, 70 % at 512" in figure2
    assert "around 70 % of the FLOPs" in figure2  # the paper's words
    assert "training): +100 % at 256, +150 % at 512 (150 % is above the range of 10 to 40 %)" in figure2
    summary = section(text, "claims")
    assert "5 measured in the paper's range" in summary and "1 same direction, another size" in summary
    assert text.count("✓ measured") == 2 * 5  # once in the summary, once at its figure


def test_what_is_absent_is_named_with_its_command(made):
    _, text = made
    assert "`make figure7 SUITE=mini`" in section(text, "figure7")
    assert "no records of `epsilon_sweep`" in section(text, "figure7")
    figure3 = section(text, "figure3")
    assert "`make figure3 SUITE=mini`" in figure3
    assert "not measured: pro-tiny-256-acp: loss_curve" in figure3
    elsewhere = section(text, "elsewhere")
    assert "Figure 10, what ACP saves, FoX (LLaMA): the grid" in elsewhere
    assert "no run of FoX (LLaMA) with ACP" in elsewhere


def test_nothing_measured_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    synthetic.two_lengths(tmp_path)
    for name, message in (
        ("mini", "error: no records in results/mini; make them with"),
        ("minni", "error: experiments/minni.yaml: no such suite; there are mini (run"),
    ):
        assert main(["--suite", name]) != 0
        assert capsys.readouterr().err.startswith(message)


def test_a_table_escapes_its_cells_and_aligns_numbers():
    text = markdown_table(["a", "b"], [["1|2", "x  y"]], right=True)
    assert text == "| a | b |\n| --- | ---: |\n| 1\\|2 | x y |"
