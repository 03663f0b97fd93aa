"""The Markdown of captions and tables, which ``report.text`` writes as HTML.

``**bold**``, ``*italic*``, ```code``` and pipe tables as markdown-it has them, and ``$mathematics$``, which
it does not know; all else is text.
"""

from __future__ import annotations

from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline


def parser(renderer: type) -> MarkdownIt:
    """A parser whose ``renderer`` has a method for each kind of token, such as ``text`` and ``math``."""
    markdown = MarkdownIt("zero", renderer_cls=renderer).enable(["emphasis", "backticks", "table"])
    markdown.inline.ruler.before("emphasis", "math", _math)
    return markdown


def _math(state: StateInline, silent: bool) -> bool:
    end = state.src.find("$", state.pos + 2)
    if state.src[state.pos] != "$" or end < 0:
        return False
    if not silent:
        state.push("math", "", 0).content = state.src[state.pos + 1 : end]
    state.pos = end + 1
    return True
