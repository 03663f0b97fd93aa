"""The page's HTML, put together from the template, style and scripts beside this file."""

from __future__ import annotations

import html
import json
import re
from importlib import resources
from typing import Any

D3 = "7.9.0"
_SCRIPTS = (
    f"d3.v{D3}.min.js",
    "data.js",
    "parts.js",
    "model.js",
    "head.js",
    "text.js",
    "compare.js",
    "main.js",
)


def render(title: str, about: dict[str, Any], blobs: dict[str, str]) -> str:
    """The whole page.

    Args:
        about: what the page shows at first: ``models`` and ``pieces``, see ``heads.pack``.
        blobs: texts in base64, by the names under which the scripts look for them.
    """
    folder = resources.files(__package__)

    def read(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    def script(content: str, attributes: str = "") -> str:
        return f"<script{attributes}>{content}</script>"

    told = json.dumps(about, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    data = [script(told, ' type="application/json" id="about"')]
    data += [script(blob, f' type="text/plain" id="{name}"') for name, blob in blobs.items()]
    scripts = [
        f"<!-- D3, licence:\n{read('d3.LICENSE')}-->",
        *(script(f"\n{read(name)}") for name in _SCRIPTS),
    ]
    parts = {
        "title": html.escape(title),
        "style": read("style.css"),
        "d3": D3,
        "data": "\n".join(data),
        "scripts": "\n".join(scripts),
    }
    # The template is cut before it is filled, because the filling may hold braces.
    pieces = re.split(r"\{\{(\w+)\}\}", read("page.html"))
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))
