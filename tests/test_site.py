"""The documentation site: it builds with no broken link, shows what the Markdown says and loads nothing."""

import importlib
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from tests.test_heads_page import PATIENCE_MS, browser  # noqa: F401

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "notebooks" / "README.md"]
TAGS = ("li", "ol", "tr", "pre", "img", "h2", "h3")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="make docs installs it")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder


def built(site, page):
    page = page.relative_to(ROOT)
    return site / (page.with_name("index.html") if page.name == "README.md" else page.with_suffix(".html"))


def count(html):
    return {tag: count for tag, count in Counter(re.findall(r"<(\w+)", html)).items() if tag in TAGS}


def test_each_page_shows_what_its_markdown_says(site):
    """GitHub's Markdown is CommonMark; the site's is stricter on lists."""
    assert PAGES
    for page in PAGES:
        html = built(site, page).read_text(encoding="utf-8")
        shown = html.partition("<article")[2].partition("</article")[0]
        said = MarkdownIt("commonmark").enable("table").render(page.read_text(encoding="utf-8"))
        assert count(shown) == count(said), page


def test_no_page_loads_anything_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        html = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"?([^\s\">]+)", html)
        loaded += re.findall(r"<link[^>]* href=\"?([^\s\">]+)", html)
        assert not [url for url in loaded if re.match("(https?:)?//", url)], page


@pytest.mark.parametrize("name", ["attention", "explorer", "hf", "lap", "model", "retention"])
def test_every_public_name_has_its_entry(site, name):
    module = f"acp_repro.{name}"
    page = (site / "api" / f"{module}.html").read_text(encoding="utf-8")
    public = importlib.import_module(module).__all__
    # A constant has no docstring, and so no entry.
    assert not [name for name in public if f'id="{module}.{name}"' not in page and not name.isupper()]
    assert ":func:" not in page


def test_a_page_from_disk_has_search_and_formulas_and_cuts_no_code(site, browser):  # noqa: F811
    tab = browser.new_page(viewport={"width": 1280, "height": 860})
    tab.set_default_timeout(PATIENCE_MS)
    tab.goto((site / "REPRODUCTION.html").as_uri())
    assert "$" not in tab.inner_text("article") and tab.inner_text("sub >> nth=0") == "ij"
    tab.goto((site / "docs" / "attention.html").as_uri())
    cut = "code => code.scrollWidth > code.clientWidth"
    assert not tab.evaluate(f"[...document.querySelectorAll('pre > code')].some({cut})")
    tab.click(".md-search__input")
    tab.keyboard.type("boundary")
    tab.wait_for_selector(".md-search-result__item")
