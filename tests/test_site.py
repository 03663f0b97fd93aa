"""The documentation site builds without a broken link, and its pages load nothing from the network."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_heads_page import PATIENCE_MS, browser  # noqa: F401

ROOT = Path(__file__).parent.parent

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


def test_no_page_loads_anything_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        html = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"?([^\s\">]+)", html)
        loaded += re.findall(r"<link[^>]* href=\"?([^\s\">]+)", html)
        assert not [url for url in loaded if re.match("(https?:)?//", url)], page
