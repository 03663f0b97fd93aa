"""The report: one Markdown page that shows existing figures and lists missing ones."""

import re
from pathlib import Path

from analysis.report.__main__ import main
from analysis.tables import markdown_table
from tests.analysis import synthetic


def test_links_of_the_report_resolve(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    synthetic.two_lengths(tmp_path)
    synthetic.write_savings()
    synthetic.draw("figure2")
    synthetic.draw("table4")
    assert main(["--suite", "mini"]) == 0
    text = Path("figures/mini/report.md").read_text("utf-8")
    files = re.findall(r'<a href="(\.\./[^"]*)"', text) + re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)
    assert len(files) >= 6
    assert all(Path("figures/mini", file).resolve().is_file() for file in files)


def test_table_escapes_cells_and_aligns_numbers():
    text = markdown_table(["a", "b"], [["1|2", "x  y"]], right=True)
    assert text == "| a | b |\n| --- | ---: |\n| 1\\|2 | x y |"
