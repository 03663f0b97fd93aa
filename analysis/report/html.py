"""The report as one HTML page: ``report.md`` through markdown-it, with its pictures and style inside."""

from __future__ import annotations

import base64
import html
import io
import re
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.rules_inline import StateInline
from PIL import Image

_INCH = 96 * 1.05  # CSS pixels that a printed inch takes on the page
_RULES = ["backticks", "blockquote", "emphasis", "heading", "html_block", "image", "link", "list", "table"]
_BADGES = {"✓": " met", "≈": " beyond", "✗": " missed", "?": ""}
_SYMBOLS = {
    "epsilon": "ε",
    "varepsilon": "ε",
    "delta": "δ",
    "times": "×",
    "geq": "≥",
    "leq": "≤",
    "approx": "≈",
    "cdot": "·",
    "infty": "∞",
}
# Nothing may be fetched: the browser itself refuses.
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
{css}</style>
</head>
<body>
<main>
<header>
{body}</section>
</main>
</body>
</html>
"""


def page(markdown: str, folder: Path) -> str:
    """The page of a report whose pictures lie in ``folder``: one file without a reference to the network."""
    body = _MARKDOWN.render(markdown, {"folder": folder})
    body = body.replace('<div id="claims"></div>', '</header>\n<section id="claims">')
    body = re.sub(r'<div id="(\w+)"></div>', r'</section>\n<section id="\1">', body)
    body = re.sub(r"<h4>.*?</table></div>", r'<div class="claim">\g<0></div>', body, flags=re.DOTALL)
    body = re.sub(
        r"<strong>((.) [^<]*)</strong>",
        lambda m: f'<span class="badge{_BADGES[m[2]]}">{m[1]}</span>' if m[2] in _BADGES else m[0],
        body,
    )
    css = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    title = html.escape(markdown.partition("\n")[0].removeprefix("# "))
    return _PAGE.format(title=title, css=css, body=body)


class _Renderer(RendererHTML):
    def text(self, tokens, index, options, env) -> str:
        """A number keeps its percent sign on its line, and gets a real minus sign."""
        text = re.sub(r"(?<=\d) %", "\u00a0%", tokens[index].content)
        return html.escape(re.sub(r"(?<![^\s\[(±])-(?=[\dδ])", "\u2212", text))

    def math(self, tokens, index, options, env) -> str:
        r"""``D_{ij}``, ``e^{-10}``, ``\epsilon``: letters in italics, sub- and superscripts."""
        text = re.sub(r"\\([A-Za-z]+)", lambda m: _SYMBOLS.get(m[1], m[1]), tokens[index].content)
        text = html.escape(text).replace("-", "\u2212")
        text = re.sub(r"(?<![A-Za-z&])([A-Za-zδε])(?![A-Za-z;])", r"<i>\1</i>", text)
        for mark, tag in (("_", "sub"), (r"\^", "sup")):
            text = re.sub(mark + r"(?:\{([^}]*)\}|(<i>.</i>|.))", rf"<{tag}>\1\2</{tag}>", text)
        return text

    def image(self, tokens, index, options, env) -> str:
        content = (env["folder"] / tokens[index].attrs["src"]).read_bytes()
        width, height = Image.open(io.BytesIO(content)).size
        shown = round(width / 300 * _INCH)  # drawing.save writes 300 dots an inch
        alt = html.escape(self.renderInlineAsText(tokens[index].children, options, env))
        size = f'width="{shown}" height="{round(shown * height / width)}"'
        data = base64.b64encode(content).decode()
        wide = ' class="wide"' if shown > 500 else ""
        picture = f'<img{wide} {size} alt="{alt}" src="data:image/png;base64,{data}">'
        return f'<span class="scroll" tabindex="0">{picture}</span>'

    def table_open(self, tokens, index, options, env) -> str:
        return '<div class="scroll" tabindex="0"><table>'

    def table_close(self, tokens, index, options, env) -> str:
        return "</table></div>"


def _math(state: StateInline, silent: bool) -> bool:
    """``$mathematics$``, which markdown-it does not know."""
    end = state.src.find("$", state.pos + 2)
    if state.src[state.pos] != "$" or end < 0:
        return False
    if not silent:
        state.push("math", "", 0).content = state.src[state.pos + 1 : end]
    state.pos = end + 1
    return True


_MARKDOWN = MarkdownIt("zero", {"html": True}, renderer_cls=_Renderer).enable(_RULES)
_MARKDOWN.inline.ruler.before("emphasis", "math", _math)
