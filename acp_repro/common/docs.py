"""Docstrings as text to read in a terminal."""

from __future__ import annotations

import re


def plain(doc: str) -> str:
    """``doc`` without what reStructuredText puts around names: double backticks and roles."""
    return re.sub(r":\w+:`~?\.?([^`]+)`", r"\1", doc).replace("``", "")
