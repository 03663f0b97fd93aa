"""The report: one Markdown page that shows existing figures and lists missing ones."""

import re
from pathlib import Path

import matplotlib.pyplot as plt

from analysis import style
from analysis.report.__main__ import main
from analysis.tables import markdown_table
from tests.analysis import synthetic


def test_user_matplotlibrc_has_no_effect():
    style.use_style()
    usual = dict(plt.rcParams)
    theirs = {"text.usetex": True, "font.family": "serif", "axes.facecolor": "black", "savefig.bbox": "tight"}
    with plt.rc_context(theirs):
        style.use_style()
        assert dict(plt.rcParams) == usual


def test_links_resolve_to_sections_images_and_results(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    synthetic.two_lengths(tmp_path)
    synthetic.write_savings()
    for length, with_acp in ((256, 3.0301), (512, 3.03)):
        synthetic.write(f"pro-tiny-{length}-acp", "loss", {"loss_nats": with_acp})
        synthetic.write(f"pro-tiny-{length}-exact", "loss", {"loss_nats": 3.0})
    synthetic.draw("figure2")
    synthetic.draw("table4")
    Path("figures/mini/heads.html").touch()
    assert main(["--suite", "mini"]) == 0
    text = Path("figures/mini/report.md").read_text("utf-8")
    ids = set(re.findall(r'<div id="(\w+)">', text))
    assert set(re.findall(r"\]\(#(\w+)\)", text)) == ids - {"end"}
    files = re.findall(r'<a href="(\.\./[^"]*)"', text) + re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)
    assert len(files) >= 6 + 4
    assert all(Path("figures/mini", file).resolve().is_file() for file in files)


def test_table_escapes_cells_and_aligns_numbers():
    text = markdown_table(["a", "b"], [["1|2", "x  y"]], right=True)
    assert text == "| a | b |\n| --- | ---: |\n| 1\\|2 | x y |"
