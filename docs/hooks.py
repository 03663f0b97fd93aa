"""Hooks of mkdocs.yml. Every file keeps its path, so a link that works in the repository works on the site.

The site has the pages that mkdocs.yml lists and all files that they link to. A folder becomes a list of its
files. A notebook NAME.ipynb becomes the page NAME.md.
"""

from __future__ import annotations

import json
import posixpath
import re
import subprocess
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<=\]\()(?!https?:|#)[^)\s#]+")
# mkdocstrings takes the second name for the type of the first, and may wrap either in tags.
SHARED_LINE = re.compile(
    r"<b><code>(?:<[^<>]*>)*(\w+),(?:</\w+>)*</code></b>\s*\(<code>((?:(?!</code>).)*)</code>\)"
)
FIGURE = re.compile(r'(<img [^>]*src="([^"]*figures/[^"]*\.png)"[^>]*>)')
NUMBERED = re.compile(r"(?m)^(\d+\. \S.*\n)((?: {3}.*\n|\n(?= {3}))+)")
# Settings of Material's search: explanations rank above the pages that only use the terms.
SEARCH = {
    "docs/lab-notebook": {"exclude": True},
    "docs/how-": {"boost": 4},
    "figures/": {"boost": 0.2},
    "pretrained/": {"boost": 0.2},
}
FIRST_IN_REFERENCE = {"acp_repro.attention": "forgetting_attention"}


def on_files(files, config):
    chosen = Files(file for file in files if file.src_dir != config.docs_dir)  # those of the theme
    assets = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs/site").rglob("*") if path.is_file()]
    wanted = [*re.findall(r"[\w./-]+\.md", str(config.nav)), *assets]
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
            links = LINK.findall(_to_pages(file.content_string, path))
            wanted += [posixpath.normpath(f"{path}/../{link}") for link in links]
    return chosen


def on_page_markdown(markdown, page, **_):
    """Sets the page's search and edit link, and indents the content of numbered points.

    GitHub indents such content by three spaces, Python's Markdown by four.
    """
    path = page.file.src_uri
    page.meta["search"] = next((settings for start, settings in SEARCH.items() if path.startswith(start)), {})
    page.meta.pop("tags", None)  # model cards have tags for a hub; the search would rank them first
    source = path if (ROOT / path).is_file() else _notebook(path)
    if source and (repository := _repository()):
        page.edit_url = f"{repository}/edit/main/{source}"
    markdown = NUMBERED.sub(lambda point: point[1] + re.sub("(?m)^ {3}", " " * 4, point[2]), markdown)
    return _to_pages(markdown, path)


def on_page_content(html, **_):
    """Links each figure to its file, which phones can enlarge. Docstrings name functions as Sphinx does,
    :func:`name`, and attributes that share a line, `k, v`."""
    html = FIGURE.sub(r'<a class="figure" href="\2">\1</a>', html)
    html = re.sub(r":(func|class|meth|attr|data|mod|exc):(?=<code>)", "", html)
    return SHARED_LINE.sub(r"<b><code>\1</code></b>, <b><code>\2</code></b>", html)


def _repository() -> str:
    """The repository's web address according to git, or "" if the clone has no remote on a web host."""
    git = ["git", "config", "remote.origin.url"]
    url = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    address = re.fullmatch(r"(?:https://|git@)([\w.-]+)[/:]([\w./-]+?)(?:\.git)?", url)
    return f"https://{address[1]}/{address[2]}" if address else ""


def _to_pages(markdown: str, path: str) -> str:
    """``markdown`` whose links to folders and notebooks lead to the pages made of them."""

    def page_of(link: re.Match) -> str:
        target = (ROOT / path).parent / link[0]
        if target.suffix == ".ipynb":
            return link[0].removesuffix(".ipynb") + ".md"
        if not target.is_dir():
            return link[0]
        return f"{link[0].rstrip('/')}/{'README' if (target / 'README.md').is_file() else 'index'}.md"

    return LINK.sub(page_of, markdown)


def _notebook(path: str) -> str | None:
    """The notebook that the page ``path`` is made of."""
    notebook = path.removesuffix(".md") + ".ipynb"
    return notebook if (ROOT / notebook).is_file() else None


def _made(path: str) -> str | None:
    """The text of a page without a file: the names of a module, a notebook, or the files of a folder."""
    folder, name = posixpath.split(path)
    if folder == "api":
        return _reference(name.removesuffix(".md"))
    if notebook := _notebook(path):
        cells = json.loads((ROOT / notebook).read_text(encoding="utf-8"))["cells"]
        return "\n\n".join(map(_cell, cells)) + "\n"
    if name != "index.md" or not (ROOT / folder).is_dir():
        return None
    files = sorted(file for file in (ROOT / folder).iterdir() if file.name != "__pycache__")
    return f"# {folder}\n\n" + "".join(f"- [{file.name}]({file.name})\n" for file in files)


def _reference(module: str) -> str:
    """The reference of a module from its docstrings, with its main function before the others."""
    first = FIRST_IN_REFERENCE.get(module)
    if not first:
        return f"# `{module}`\n\n::: {module}\n"
    others = f"::: {module}\n    options:\n      filters: ['!^_', '!^{first}$']\n"
    return f"# `{module}`\n\n::: {module}.{first}\n    options: {{show_root_heading: true}}\n\n{others}"


def _cell(cell: dict) -> str:
    """A notebook's cell as Markdown: text, or code and its stored outputs. Imports and plots are folded."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    outputs = [_output(output) for output in cell["outputs"]]
    code = f"```python\n{source}\n```"
    if source.startswith("import ") or any("<img" in output for output in outputs):
        code = '??? code "Code"\n\n' + re.sub("(?m)^(?=.)", " " * 4, code)
    return "\n\n".join([code, *outputs])


def _output(output: dict) -> str:
    """A picture or a table as HTML, any other output as plain text."""
    data = output.get("data", {})
    if "image/png" in data:
        return f'<div><img alt="Plot" src="data:image/png;base64,{"".join(data["image/png"]).strip()}"></div>'
    if "text/html" in data:
        table = re.sub(r"(?s)<style scoped>.*?</style>\s*", "", "".join(data["text/html"]))
        return table.replace('<table border="1" class="dataframe">', "<table>")
    return f"```text\n{''.join(output.get('text') or data.get('text/plain', '')).rstrip()}\n```"
