"""Tables for papers: the Markdown of captions and cells as LaTeX with booktabs."""

from __future__ import annotations

import re

import pandas as pd

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
}
_FONTS = (
    (re.compile(r"\*\*(.+?)\*\*"), r"\\textbf{\1}"),
    (re.compile(r"`(.+?)`"), r"\\texttt{\1}"),
    (re.compile(r'"(.+?)"'), r"``\1''"),
)


def escape(markdown: str) -> str:
    """Text with ``**bold**``, `` `code` ``, ``"quotes"`` and ``$mathematics$`` as LaTeX."""
    parts = re.split(r"(\$[^$]*\$)", markdown)
    parts[::2] = ["".join(_ESCAPED.get(character, character) for character in part) for part in parts[::2]]
    text = "".join(parts)
    for pattern, command in _FONTS:
        text = pattern.sub(command, text)
    return text


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
