"""Captions and tables as HTML."""

from __future__ import annotations

import html
import re

from markdown_it.renderer import RendererHTML
from markdown_it.tree import SyntaxTreeNode
from markupsafe import Markup

from ..markdown import parser

MANY_COLUMNS = 8  # more are printed on a page on its side
_SYMBOLS = {
    "epsilon": "ε",
    "varepsilon": "ε",
    "delta": "δ",
    "times": "×",
    "geq": "≥",
    "leq": "≤",
    "approx": "≈",
    "cdot": "·",
    "log": "log",
    "exp": "exp",
    "max": "max",
    "infty": "∞",
}


class _Renderer(RendererHTML):
    def text(self, tokens, index, options, env) -> str:
        """A number keeps its percent sign on its line, and gets a real minus sign."""
        text = re.sub(r"(?<=\d) %", "\u00a0%", tokens[index].content)
        return html.escape(re.sub(r"(?<![^\s\[(±])-(?=[\dδ])", "\u2212", text))

    def math(self, tokens, index, options, env) -> str:
        return math(tokens[index].content)


_MARKDOWN = parser(_Renderer)


def inline(text: str) -> Markup:
    """One paragraph."""
    return Markup(_MARKDOWN.renderInline(text))


def math(source: str) -> str:
    r"""``D_{ij}``, ``e^{-10}``, ``\epsilon``: letters in italics, sub- and superscripts."""
    text = html.escape(re.sub(r"\\([A-Za-z]+)", lambda m: _SYMBOLS.get(m[1], m[1]), source))
    text = text.replace("-", "\u2212")
    text = re.sub(r"(?<![A-Za-z&])([A-Za-zδε])(?![A-Za-z;])", r"<i>\1</i>", text)
    for mark, tag in (("_", "sub"), (r"\^", "sup")):
        text = re.sub(
            mark + r"(?:\{([^}]*)\}|(<i>.</i>|.))", lambda m, tag=tag: f"<{tag}>{m[1] or m[2]}</{tag}>", text
        )
    return text


def plain(text: str) -> str:
    """The words alone, for a description of an image."""
    words = re.sub(r"<[^>]+>", "", inline(text.split("\n|")[0]))
    return " ".join(html.unescape(words).split())


def paragraphs_and_tables(text: str) -> tuple[Markup, list[Markup]]:
    """(the paragraphs, the pipe tables) of a caption file."""
    blocks = SyntaxTreeNode(_MARKDOWN.parse(text)).children
    words = [inline(block.children[0].content) for block in blocks if block.type == "paragraph"]
    paragraphs = "".join(f"<p>{one}</p>" if index else one for index, one in enumerate(words))
    return Markup(paragraphs), [_table(block) for block in blocks if block.type == "table"]


def _table(table: SyntaxTreeNode) -> Markup:
    lines = [row.children for part in table.children for row in part.children]
    header, *rows = ([cell.children[0].content for cell in cells] for cells in lines)
    classes = [' class="right"' if "right" in str(cell.attrs.get("style")) else "" for cell in lines[0]]

    def row(cells: list[str], first: str, rest: str) -> str:
        scopes = [first if cells[0] else "td", *[rest] * (len(cells) - 1)]  # an empty cell heads nothing
        return (
            "<tr>"
            + "".join(
                f"<{tag}{css}>{inline(cell)}</{tag.split()[0]}>"
                for tag, css, cell in zip(scopes, classes, cells, strict=True)
            )
            + "</tr>"
        )

    column, heading = 'th scope="col"', 'th scope="row"'
    body = "".join(row(cells, heading, "td") for cells in rows)
    head = row(header, column, column)
    many = " many" if len(header) > MANY_COLUMNS else ""
    return Markup(f'<table class="numbers{many}"><thead>{head}</thead><tbody>{body}</tbody></table>')
