"""The little Markdown that captions and tables are written in, as HTML."""

from __future__ import annotations

import html
import re

from markupsafe import Markup

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


def inline(text: str) -> Markup:
    """One paragraph: ``**bold**``, ``*italic*``, ```code```, ``$math$``; all else is escaped.

    A number keeps its percent sign on its line, and gets a real minus sign.
    """
    pieces = re.split(r"(`[^`]+`|\$[^$]+\$)", text)
    return Markup("".join(map(_piece, pieces)))


def _piece(piece: str) -> str:
    if piece.startswith("`"):
        return f"<code>{html.escape(piece[1:-1])}</code>"
    if piece.startswith("$") and len(piece) > 1:
        return math(piece[1:-1])
    piece = re.sub(r"(?<=\d) %", "\u00a0%", piece)
    piece = re.sub(r"(?<![^\s\[(±])-(?=[\dδ])", "\u2212", piece)
    return _emphasis(html.escape(piece))


def _emphasis(text: str) -> str:
    text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", text, flags=re.DOTALL)
    return re.sub(r"(?<!\w)\*(?!\s)(.+?)(?<!\s)\*(?!\w)", r"<em>\1</em>", text, flags=re.DOTALL)


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
    paragraphs, tables = [], []
    for block in re.split(r"\n\s*\n", text.strip()):
        if block.startswith("|"):
            tables.append(Markup(_table(block)))
        elif block:
            paragraphs.append(f"<p>{inline(block)}</p>" if paragraphs else inline(block))
    return Markup("".join(paragraphs)), tables


def _table(block: str) -> str:
    header, rule, *rows = (
        [cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.splitlines()
    )
    classes = [' class="right"' if mark.endswith(":") else "" for mark in rule]

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
    return f'<table class="numbers{many}"><thead>{head}</thead><tbody>{body}</tbody></table>'
