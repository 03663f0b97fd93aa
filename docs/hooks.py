"""Hooks of mkdocs.yml. Every file keeps its path, so a link that works in the repository works on the site.

The site holds the pages that mkdocs.yml lists and all that they link to. A folder becomes a list of files.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<=\]\()(?!https?:|#)[^)\s#]+")
# mkdocstrings takes the second name for the type of the first, and may wrap either in tags.
SHARED_LINE = re.compile(
    r"<b><code>(?:<[^<>]*>)*(\w+),(?:</\w+>)*</code></b>\s*\(<code>((?:(?!</code>).)*)</code>\)"
)
# A formula as GitHub shows it, and before it the code in which a dollar is a dollar.
FORMULA = re.compile(r"(?s:```.*?```)|`[^`\n]*`|\$(\S[^$`\n]*)\$")
SYMBOLS = dict(leq="≤", geq="≥", iff="⇔", times="×", max="max", epsilon="ε")
SYMBOLS |= dict(alpha="α", beta="β", gamma="γ", lambda_="λ", rho="ρ")
NUMBERED = re.compile(r"(?m)^(\d+\. \S.*\n)((?: {3}.*\n|\n(?= {3}))+)")


def on_files(files, config):
    chosen = Files(file for file in files if file.src_dir != config.docs_dir)  # those of the theme
    wanted = [*re.findall(r"[\w./-]+\.md", str(config.nav)), *config.extra_css, *config.extra["polyfills"]]
    while wanted:
        path = wanted.pop()
        if path in chosen.src_uris:
            continue
        if (ROOT / path).is_file():
            file = File(path, str(ROOT), config.site_dir, config.use_directory_urls)
        elif made := _made(path):
            file = File.generated(config, path, content=made)
        else:
            continue  # mkdocs names the page that links to it
        chosen.append(file)
        if path.endswith(".md"):
            links = LINK.findall(_without_folders(file.content_string, path))
            wanted += [posixpath.normpath(f"{path}/../{link}") for link in links]
    return chosen


def on_page_markdown(markdown, page, **_):
    """What belongs to a numbered point stands three spaces in on GitHub, four for this Markdown."""
    markdown = NUMBERED.sub(lambda point: point[1] + re.sub("(?m)^ {3}", " " * 4, point[2]), markdown)
    return FORMULA.sub(_shown, _without_folders(markdown, page.file.src_uri))


def on_page_content(html, **_):
    """Docstrings name functions as Sphinx does, :func:`name`, and attributes that share a line, `k, v`."""
    html = re.sub(r":(func|class|meth|attr|data|mod|exc):(?=<code>)", "", html)
    return SHARED_LINE.sub(r"<b><code>\1</code></b>, <b><code>\2</code></b>", html)


def _shown(found: re.Match) -> str:
    """A formula as HTML: with letters for TeX's commands, and what is raised or lowered."""
    if not (text := found[1]):
        return found[0]
    text = re.sub(r"\\(?:mathrm|(sqrt))\{(\w+)\}", lambda m: ("√" if m[1] else "") + m[2], text)
    text = re.sub(r"\\([a-z]+)", lambda m: SYMBOLS.get(m[1]) or SYMBOLS[m[1] + "_"], text)
    text = text.replace("-", "−").replace("*", "&#42;")
    for sign, tag in (("_", "sub"), (r"\^", "sup")):
        text = re.sub(
            sign + r"(?:\{([^}]*)\}|(&#42;|\w))", lambda m, t=tag: f"<{t}>{m[1] or m[2]}</{t}>", text
        )
    return text


def _without_folders(markdown: str, path: str) -> str:
    """Links to folders lead to the page that stands for each."""

    def page_of(link: re.Match) -> str:
        folder = (ROOT / path).parent / link[0]
        if not folder.is_dir():
            return link[0]
        return f"{link[0].rstrip('/')}/{'README' if (folder / 'README.md').is_file() else 'index'}.md"

    return LINK.sub(page_of, markdown)


def _made(path: str) -> str | None:
    """The text of a page that no file holds: the names of a module, or the files of a folder."""
    folder, name = posixpath.split(path)
    if folder == "api":
        module = name.removesuffix(".md")
        return f"# `{module}`\n\n::: {module}\n"
    if name != "index.md" or not (ROOT / folder).is_dir():
        return None
    files = sorted(file for file in (ROOT / folder).iterdir() if file.name != "__pycache__")
    return f"# {folder}\n\n" + "".join(f"- [{file.name}]({file.name})\n" for file in files)
