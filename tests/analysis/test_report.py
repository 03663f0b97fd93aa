"""The report: one page that opens from disk, says what is missing, and reads on a phone."""

import base64
import html
import io
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.image
import matplotlib.pyplot as plt
import pytest
from PIL import Image

from acp_repro.pipeline.suite import load_suite
from analysis import drawing, style
from analysis.acp import models
from analysis.report.__main__ import main
from analysis.report.gather import gather
from analysis.report.html import page as as_page
from analysis.report.page import render
from tests.analysis import synthetic

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
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


def test_a_picture_has_a_palette_and_keeps_its_resolution(made):
    with Image.open(made[0] / "figures/mini/figure2.png") as picture:
        assert picture.mode == "P" and picture.info["dpi"][0] > 50
        assert picture.convert("RGB").getpixel((0, 0)) == (255, 255, 255)


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


def test_it_leads_to_the_page_of_heads_that_lies_beside_it(made, monkeypatch):
    folder, text = made
    assert '<a href="heads.html">Every head of a model' in text
    monkeypatch.chdir(folder)
    (folder / "figures/mini/heads.html").rename("elsewhere.html")
    assert "heads.html" not in render(gather("mini"))
    Path("elsewhere.html").rename(folder / "figures/mini/heads.html")


def test_images_decode_and_are_described(made):
    _, text = made
    images = Page(text).all("img")
    assert len(images) == 1
    attributes = images[0][1]
    data = base64.b64decode(attributes["src"].removeprefix("data:image/png;base64,"), validate=True)
    height, width, _ = matplotlib.image.imread(io.BytesIO(data)).shape
    assert int(attributes["width"]) / int(attributes["height"]) == pytest.approx(width / height, rel=0.01)
    assert attributes["alt"] == "Figure 2: Bars & more for L < 9."


def words(text: str) -> str:
    text = html.unescape(re.sub(r"</?(?:p|dd|dt|li|td|th|h\d|div|section)\b[^>]*>", " ", text))
    return " ".join(re.sub(r"<[^>]*>", "", text).replace("\u00a0", " ").split())


def section(text: str, name: str) -> str:
    return re.search(rf'<section id="{name}".*?</section>', text, re.DOTALL)[0]


def test_verdicts_are_shown_with_their_numbers(made):
    _, text = made
    figure2 = words(section(text, "figure2"))
    assert "✓ met About 70 % of the FLOPs and memory accesses are pruned" in figure2
    assert "tiny (1.5k tokens, start of training): 50 % at 256, 70 % at 512" in figure2
    assert "around 70 % of the FLOPs" in figure2  # the paper's words
    assert "28,000 times as large" in figure2 and "32 times as long" in figure2
    figure3 = words(section(text, "figure3"))
    assert "✗ not met" in figure3 and "tiny (1.5k tokens, start of training), 512: +0.0300" in figure3
    summary = words(section(text, "claims"))
    # Figure 2: all five; Figures 4 and 5: all heads lie between; Table 4: 5 % of the time.
    assert "30 criteria: 5 met, 1 beyond the paper's range, 3 not met, 1 cannot be told" in summary
    assert "10 not measured" in summary
    assert text.count("✓ met") == 2 * 5  # once in the summary, once at its figure
    assert text.count("» beyond") == 2
    assert "training): +100 % at 256, +150 % at 512 (150 % is above the range of 10 to 40 %)" in figure2


def test_what_is_absent_is_named_with_its_command(made):
    _, text = made
    assert "make figure7 SUITE=mini" in words(section(text, "figure7"))
    assert "– not measured" in section(text, "figure7")
    figure3 = words(section(text, "figure3"))
    assert "make figure3 SUITE=mini" in figure3
    assert "not measured: pro-tiny-256-acp: loss_curve" in figure3
    elsewhere = words(section(text, "elsewhere"))
    assert "Figure 10, what ACP saves, FoX (LLaMA): the grid" in elsewhere
    assert "no run of FoX (LLaMA) with ACP" in elsewhere
    assert "not in this suite" not in words(section(text, "claims")).partition("Verdict")[2]


def test_table_is_shown_as_one(made):
    _, text = made
    table = section(text, "table4")
    assert "<td>16k</td>" in table and "5.0\u00a0%" in table
    assert "| L |" not in table


def test_nothing_measured_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    synthetic.two_lengths(tmp_path)
    for name, message in (
        ("mini", "error: no records in results/mini; make them with"),
        ("minni", "error: experiments/minni.yaml: no such suite; there are mini (run"),
    ):
        assert main(["--suite", name]) != 0
        assert capsys.readouterr().err.startswith(message)


def test_the_scale_is_said_in_words_that_fit_the_numbers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    synthetic.two_lengths(tmp_path)
    suite = load_suite("mini")
    words = models.caveat(suite)
    assert "are smaller (size tiny at most, against 760M)" in words
    assert "saw fewer tokens (1.5k, against 2.7B to 16B)" in words
    assert "and had shorter contexts (512 tokens at most, against 16k)" in words
    paper = Path(__file__).parents[2] / "experiments" / "paper.yaml"
    assert models.caveat(load_suite(str(paper))).startswith("The models here are as large as the paper's")
    h100 = load_suite(str(paper.with_name("h100.yaml")))
    caveat = models.caveat(h100)
    assert "those here saw fewer tokens (20M to 100M, against 2.7B to 16B); " in caveat
    assert "smaller" not in caveat and "shorter" not in caveat
    scale = {
        name: models.scale(h100.paper.item(name), h100.paper.item(name).runs(h100))
        for name in ("figure2", "figure4")
    }
    assert scale["figure2"].endswith(
        "is as large, saw 800 times as many tokens and had contexts of the same length."
    )
    assert scale["figure4"].endswith("160 times as many tokens and had contexts 4 times shorter.")


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


@pytest.mark.skipif(BROWSER is None, reason="no browser; install one, e.g. apt install chromium")
@pytest.mark.parametrize("width", [320, 1200])
def test_browser_renders_it_without_sideways_scroll(made, tmp_path, width):
    _, text = made
    # The page itself forbids scripts; this copy measures itself, in a frame as narrow as a phone,
    # for a browser without a screen has no window so narrow.
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    script = """<script>parent.postMessage("over " + (document.documentElement.scrollWidth - innerWidth)
        + " of " + innerWidth + ", " + [...document.images].every(image => image.naturalWidth), "*")
        </script></body>"""
    frame = f"""<title>-</title><script>onmessage = event => document.title = event.data</script>
        <iframe src="copy.html" style="width: {width}px; height: 900px; border: 0"></iframe>"""
    (tmp_path / "copy.html").write_text(text.replace("</body>", script), encoding="utf-8")
    (tmp_path / "frame.html").write_text(frame, encoding="utf-8")
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--hide-scrollbars",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--virtual-time-budget=3000",
        "--window-size=1300,900",
        "--dump-dom",
    ]

    def dom(page: str) -> str:
        command = [BROWSER, *flags, (tmp_path / page).as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=180).stdout

    assert f"<title>over 0 of {width}, true</title>" in dom("frame.html")
    shown = dom("copy.html")
    assert '<section id="end">' in shown and "✓ met" in shown
