"""Tables for papers: the Markdown of captions and cells as LaTeX with booktabs."""

from __future__ import annotations

import re

import pandas as pd
from markdown_it.renderer import RendererHTML

from .markdown import parser

_ESCAPED = {
    **{character: f"\\{character}" for character in "%&#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "−": r"$-$",
    "–": "--",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "×": r"$\times$",
    "†": r"\textdagger{}",
}


class _Renderer(RendererHTML):
    def text(self, tokens, index, options, env) -> str:
        return "".join(_ESCAPED.get(character, character) for character in tokens[index].content)

    def math(self, tokens, index, options, env) -> str:
        return f"${tokens[index].content}$"

    def code_inline(self, tokens, index, options, env) -> str:
        return rf"\texttt{{{self.text(tokens, index, options, env)}}}"

    def renderToken(self, tokens, index, options, env) -> str:
        token = tokens[index]
        return {"strong": r"\textbf{", "em": r"\emph{"}[token.tag] if token.nesting > 0 else "}"


_MARKDOWN = parser(_Renderer)


def escape(markdown: str) -> str:
    """Markdown and ``"quotes"`` as LaTeX."""
    return re.sub('"(.+?)"', r"``\1''", _MARKDOWN.renderInline(markdown))


def table(shown: pd.DataFrame, caption: str) -> str:
    """A ``table*`` environment; needs ``\\usepackage{booktabs}``.

    Args:
        shown: text in every cell.
        caption: its number in front (``**Table 4.**``) is left to LaTeX.
    """
    words = re.sub(r"^\*\*Table [^*]*\*\*\s*", "", " ".join(caption.split()))
    text = shown.map(escape).rename(columns=escape)
    body = text.to_latex(
        index=False, escape=False, caption=escape(words), column_format="l" + "r" * (text.shape[1] - 1)
    )
    return body.replace(r"{table}", r"{table*}")
