"""The report as HTML: one self-contained page from a :class:`analysis.report.Report`."""

from __future__ import annotations

import base64
import html
import struct
from collections import Counter
from pathlib import Path

from . import style
from .report import ABSENT, MET, MISSED, MISSING, UNDECIDED, Entry, Judgement, Report
from .report_text import inline, paragraphs_and_tables, plain

# Nothing may be fetched: the browser itself refuses.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_BADGES = {
    MET: "✓ met",
    MISSED: "✗ not met",
    UNDECIDED: "? cannot be told",
    MISSING: "– not measured",
    ABSENT: "– not in this suite",
}
_CLASSES = {MET: " met", MISSED: " missed"}
_INCH = 96 * 1.05  # CSS pixels that a printed inch takes on the page


def render(report: Report) -> str:
    """The whole page; image data and style are inside it."""
    suite = report.suite
    title = f"Adaptive Computation Pruning, re-run: suite {suite.name}"
    shown = [e for e in report.entries if not e.item.optional or e.image or e.text]
    left_out = [e for e in report.entries if e not in shown]
    css = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    body = [_header(title, report, shown), '<main id="main">', _summary(shown)]
    body += [_section(entry, suite.name) for entry in shown]
    body += [_runs(report), "</main>", _footer(left_out, suite.name)]
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{html.escape(title)}</title>
<style>
{css}</style>
</head>
<body>
{"".join(body)}
</body>
</html>
"""


def _header(title: str, report: Report, shown: list[Entry]) -> str:
    facts = "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in report.facts)
    suite = report.suite
    measured = (report.runs["quantities"] != "0").sum()
    tokens = sorted({run.size.tokens for run in suite.runs})
    trained = " to ".join(style.count_label(t) for t in dict.fromkeys((tokens[0], tokens[-1])))
    sizes = ", ".join(dict.fromkeys(run.size_name for run in suite.runs))
    lengths = ", ".join(style.length_label(n) for n in sorted({run.context_length for run in suite.runs}))
    links = "".join(f'<li><a href="#{e.item.name}">{e.item.label}</a></li>' for e in shown)
    return f"""<a class="skip" href="#main">Skip to the results</a>
<header>
<h1>{html.escape(title)}</h1>
<p class="lead">{html.escape(suite.description[:1].upper() + suite.description[1:])}.</p>
<dl class="facts">
<dt>Models</dt><dd>{len(suite.runs)} runs, {measured} of them measured; {html.escape(sizes)} parameters,
contexts of {lengths} tokens, trained on {trained} tokens each (<a href="#runs">all runs</a>)</dd>
{facts}
<dt>The paper</dt><dd>Lin et al., Adaptive Computation Pruning for the Forgetting Transformer
(<a href="https://arxiv.org/abs/2504.06949">arXiv:2504.06949</a>)</dd>
</dl>
</header>
<nav aria-label="Contents"><ul>
<li><a href="#claims">Claims</a></li>{links}<li><a href="#runs">Runs</a></li>
</ul></nav>"""


def _summary(shown: list[Entry]) -> str:
    """Every criterion in one table, and how many are met."""
    pairs = [(entry, judgement) for entry in shown for judgement in entry.judgements]
    counts = Counter(judgement.status for _, judgement in pairs)
    words = {
        MET: "met",
        MISSED: "not met",
        UNDECIDED: "cannot be told from these runs",
        MISSING: "not measured",
        ABSENT: "not in this suite",
    }
    counted = ", ".join(f"{counts[status]} {words[status]}" for status in words if counts[status])
    rows = "".join(
        f"""<tr role="row"><td role="cell">{_badge(j)}</td>
<th scope="row" role="rowheader"><a href="#{e.item.name}">{inline(j.criterion.claim)}</a>
<span class="label">{e.item.label}</span></th>
<td role="cell">{inline(j.ours)}</td></tr>
"""
        for e, j in pairs
    )
    head = "".join(f'<th scope="col" role="columnheader">{c}</th>' for c in ("Verdict", "Claim", "Here"))
    return f"""<section id="claims" aria-labelledby="claims-h">
<h2 id="claims-h">What the paper claims, checked</h2>
<p>{len(pairs)} criteria: {counted}. Each is stated in words beside its figure, and only one that holds for
these runs as stated gets a check mark. The scale is given there too: models far smaller than the paper's
that miss a criterion say little against the paper, and those that meet it say little for it.</p>
<table class="claims" role="table"><thead role="rowgroup"><tr role="row">{head}</tr></thead>
<tbody role="rowgroup">
{rows}</tbody></table>
</section>"""


def _badge(judgement: Judgement) -> str:
    status = judgement.status
    return f'<span class="badge{_CLASSES.get(status, "")}">{_BADGES[status]}</span>'


def _section(entry: Entry, suite: str) -> str:
    item = entry.item
    made = entry.text if item.name.startswith("table") else entry.image
    shown = _figure(entry) if made else _absent(entry, suite)
    kind = "" if not item.ours else ' <span class="label">ours, not in the paper</span>'
    scale = f'<p class="soft">{html.escape(entry.scale)}</p>' if entry.scale and made else ""
    claims = "".join(_claim(j) for j in entry.judgements if j.status != ABSENT)
    heading = "<h3>The paper and these runs</h3>" if claims else ""
    return f"""<section id="{item.name}" aria-labelledby="{item.name}-h">
<h2 id="{item.name}-h">{item.label}: {html.escape(item.title)}{kind}</h2>
{shown}
{heading}{claims}{scale}
{_commands(entry, suite) if not entry.absent else ""}
</section>"""


def _absent(entry: Entry, suite: str) -> str:
    if entry.absent:
        return f'<p class="absent">Not in this suite: {html.escape(entry.absent)}.</p>'
    command = html.escape(f"make {entry.item.name} SUITE={suite}")
    return (
        f'<p class="absent">Not drawn yet. <code>{command}</code> measures what is missing and draws it.</p>'
    )


def _figure(entry: Entry) -> str:
    """Image or table with its caption; the wide ones scroll inside their frame on a small screen."""
    caption, tables = paragraphs_and_tables(entry.text or "")
    label = html.escape(f"{entry.item.label}: {entry.item.title}")
    frame = f'<div class="scroll" tabindex="0" role="group" aria-label="{label} (may scroll)">'
    inside = "".join(tables)
    if entry.image:
        content = entry.image.read_bytes()
        width, height = png_size(content)
        shown = round(width / 300 * _INCH)  # style.save writes 300 dots an inch
        wide = ' class="wide"' if shown > 500 else ""
        # The first sentence after "Figure N." says what is drawn; the caption below says the rest.
        alt = plain(entry.text) if entry.text else entry.item.title
        alt = f"{entry.item.label}: {alt.split('. ', 2)[1] if alt.count('. ') else alt}."
        data = base64.b64encode(content).decode()
        inside = (
            f'<img{wide} width="{shown}" height="{round(shown * height / width)}" '
            f'alt="{html.escape(alt)}" src="data:image/png;base64,{data}">'
        )
        frame = frame if wide else "<div>"
    return f"<figure>{frame}{inside}</div><figcaption>{caption}</figcaption></figure>"


def png_size(content: bytes) -> tuple[int, int]:
    """(width, height) in pixels of a PNG.

    Raises:
        ValueError: it is none.
    """
    if content[:8] != b"\x89PNG\r\n\x1a\n":
        raise ValueError("not a PNG")
    return struct.unpack(">II", content[16:24])


def _claim(judgement: Judgement) -> str:
    criterion = judgement.criterion
    rows = (("Paper", criterion.paper), ("Criterion", criterion.holds_if), ("Here", judgement.ours))
    cells = "".join(f"<dt>{k}</dt><dd>{inline(v)}</dd>" for k, v in rows)
    return f"""<div class="claim"><h4><span>{inline(criterion.claim)}</span> {_badge(judgement)}</h4>
<dl>{cells}</dl></div>
"""


def _commands(entry: Entry, suite: str) -> str:
    """How to make it again, and the records that it is drawn from."""
    name, quantities = entry.item.name, " ".join(entry.item.quantities)
    steps = [f"python -m acp_repro.measure {quantities} --suite {suite}"] if quantities else []
    steps.append(f"python -m analysis.{name.replace('-', '_')} --suite {suite}")
    items = [f"<li><code>{html.escape(step)}</code></li>" for step in steps]
    missing = [f"<li>not measured: {html.escape(line)}</li>" for line in entry.unmeasured]
    # From figures/SUITE/report.html.
    links = [
        f'<li><a href="../../{html.escape(path.as_posix())}">{html.escape(path.as_posix())}</a></li>'
        for path in entry.records
    ]
    counts = [(len(links), "record", ""), (len(missing), "run", " still to be measured")]
    title = "The steps one by one" + "".join(
        f", {count} {noun}{'s' if count > 1 else ''}{rest}" for count, noun, rest in counts if count
    )
    return f"""<p class="make">Make it again: <code>make {name} SUITE={html.escape(suite)}</code></p>
<details><summary>{title}</summary><ul>{"".join(items + missing + links)}</ul></details>"""


def _runs(report: Report) -> str:
    head = "".join(f'<th scope="col">{html.escape(c)}</th>' for c in report.runs.columns)
    rows = "".join(
        f'<tr><th scope="row">{html.escape(run)}</th>'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for run, *cells in report.runs.itertuples(index=False)
    )
    return f"""<section id="runs" aria-labelledby="runs-h">
<h2 id="runs-h">Runs</h2>
<div class="scroll" tabindex="0" role="group" aria-label="All runs (may scroll)">
<table class="numbers"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>
</section>"""


def _footer(left_out: list[Entry], suite: str) -> str:
    names = ", ".join(f"{e.item.label} ({e.item.title[:1].lower()}{e.item.title[1:]})" for e in left_out)
    absent = f"Not re-run here: {html.escape(names)}. " if names else ""
    return f"""<footer><p>{absent}Made by <code>make report SUITE={html.escape(suite)}</code> from records
alone; every number on this page is measured by us or, where marked, printed in the paper.</p></footer>"""
