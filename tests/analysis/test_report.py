"""The report: one page that opens from disk, says what is missing, and reads on a phone."""

import html
import re
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from analysis import drawing, style
from analysis.report.__main__ import main
from analysis.report.gather import gather
from analysis.report.html import page as as_page
from analysis.report.page import render
from tests.analysis import synthetic

VOID = {"meta", "img", "br", "hr", "link", "input"}


class Page(HTMLParser):
    """Collects what the tests ask for; fails where tags do not nest."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes another tag"

    def all(self, *names: str) -> list[tuple[str, dict]]:
        return [(tag, attributes) for tag, attributes in self.tags if tag in names]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder, page) of a suite that has Figure 2, Table 4 and losses, and nothing else."""
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
        markdown, page = (Path(f"figures/mini/report.{kind}").read_text("utf-8") for kind in ("md", "html"))
        assert render(gather("mini")) == markdown and as_page(markdown, path.parent) == page
        yield folder, page


def test_page_is_one_file_without_the_network(made):
    _, text = made
    page = Page(text)
    assert re.search("<title>[^<]*suite mini</title>", text)
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "iframe"), "the page needs no other file"
        for name in ("src", "srcset", "poster", "data"):
            assert attributes.get(name, "data:").startswith("data:")
    outside = [a["href"] for _, a in page.all("a") if a["href"].startswith("http")]
    assert outside == ["https://arxiv.org/abs/2504.06949"]  # a link to click, not a request
    assert "url(" not in text and "@import" not in text
    assert "default-src 'none'" in text


def test_links_lead_to_sections_and_to_records(made):
    folder, text = made
    page = Page(text)
    links = [a["href"] for _, a in page.all("a")]
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert {link[1:] for link in links if link.startswith("#")} == {*ids} - {"end"}
    records = [link for link in links if link.startswith("..")]
    assert len(records) >= 6 + 4
    assert all((folder / "figures" / "mini" / link).resolve().is_file() for link in records)


def words(text: str) -> str:
    text = html.unescape(re.sub(r"</?(?:p|dd|dt|li|td|th|h\d|div|section)\b[^>]*>", " ", text))
    return " ".join(re.sub(r"<[^>]*>", "", text).replace("\u00a0", " ").split())


def section(text: str, name: str) -> str:
    return re.search(rf'<section id="{name}".*?</section>', text, re.DOTALL)[0]


def test_verdicts_are_shown_with_their_numbers(made):
    _, text = made
    figure2 = words(section(text, "figure2"))
    assert "✓ measured in the paper's range About 70 % of FLOPs" in figure2
    assert "tiny (1.5k tokens, start of training): 50 % at 256, 70 % at 512" in figure2
    assert "around 70 % of the FLOPs" in figure2  # the paper's words
    assert "training): +100 % at 256, +150 % at 512 (150 % is above the range of 10 to 40 %)" in figure2
    summary = words(section(text, "claims"))
    assert "5 measured in the paper's range" in summary and "1 same direction, another size" in summary
    assert text.count("✓ measured") == 2 * 5  # once in the summary, once at its figure


def test_what_is_absent_is_named_with_its_command(made):
    _, text = made
    assert "make figure7 SUITE=mini" in words(section(text, "figure7"))
    assert "no records of <code>epsilon_sweep" in section(text, "figure7")
    figure3 = words(section(text, "figure3"))
    assert "make figure3 SUITE=mini" in figure3
    assert "not measured: pro-tiny-256-acp: loss_curve" in figure3
    elsewhere = words(section(text, "elsewhere"))
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


def test_markdown_of_captions(tmp_path):
    def shown(markdown):
        return re.search(r"<header>\n(.*)</section>", as_page(markdown, tmp_path), re.DOTALL)[1].strip()

    for markdown, expected in {
        "**a** <b> & *c d* `x*y*`": "<strong>a</strong> &lt;b&gt; &amp; <em>c d</em> <code>x*y*</code>",
        "2 * 3 * 4, -5 and 7 %": "2 * 3 * 4, \u22125 and 7\u00a0%",
        "$D_{ij}$ at $e^{-10}$": "<i>D</i><sub>ij</sub> at <i>e</i><sup>\u221210</sup>",
        r"$3 \times 10^2 \geq \delta$": "3 × 10<sup>2</sup> ≥ <i>δ</i>",
        "1 [-0.5, +2] at -δ, pro-1 and 1-2": "1 [\u22120.5, +2] at \u2212δ, pro-1 and 1-2",
    }.items():
        assert shown(markdown) == f"<p>{expected}</p>"
    table = shown("| a | b |\n| --- | ---: |\n| $\\|q\\|$ | 2 |")
    assert "<td><i>q</i></td>" not in table and "|<i>q</i>|" in table and "text-align:right" in table
