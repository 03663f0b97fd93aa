"""The documentation site builds without a broken link, renders equations and notebooks, offline."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_heads_page import PATIENCE_MS, browser  # noqa: F401

ROOT = Path(__file__).parent.parent
LOADED = re.compile(r"(?:<(?:script|img|iframe)[^>]* src|<link[^>]* href)=\"?([^\s\">]+)")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="make docs installs it")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_pages_load_no_external_resources(site):
    assert len(list(site.rglob("*.html"))) > 20
    for page in site.rglob("*.html"):
        loaded = LOADED.findall(page.read_text(encoding="utf-8"))
        assert not [url for url in loaded if re.match("(https?:)?//", url)], page


def test_equations_of_a_notebook_are_rendered(site, browser):  # noqa: F811
    page = browser.new_page()
    page.goto((site / "notebooks/01_forget_gates.html").as_uri())
    page.wait_for_selector(".katex", state="attached", timeout=PATIENCE_MS)
    assert page.locator(".arithmatex").count() and not page.locator(".katex-error").count()
