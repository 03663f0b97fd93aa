"""The ledger as Markdown: REPRODUCTION.md, a page of claims for each paper, and the README's table."""

from __future__ import annotations

import html
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from acp_repro.pipeline.paper import Paper, Suite

from .. import style
from ..ledger import Row
from ..tables import markdown_table
from ..verdict import Word
from .missing import gaps

CLAIMS = Path("docs/claims")
MARKERS = {
    "savings": ("<!-- from claims.json: make reproduction -->", "<!-- end -->"),
    "answers": ("<!-- answers from claims.json -->", "<!-- end of answers -->"),
}
# The README's summary: a property, the claim that has its result, and the models.
QUESTIONS = (
    ("Safety: attention weight that a query loses", "acp.figureA1.1", "760M at 4k, every head"),
    ("Training loss, ACP − exact (nats, 90 % CI)", "acp.text.19", "125M to 760M, 4k to 16k"),
    ("Training at ε = e^-20", "acp.text.36", "125M at 4k, undertrained"),
    ("Inference with identical weights", "acp.text.34", "125M at 4k (undertrained) and 16k"),
    ("Attention time saved at the paper's pruned ratio", "acp.table_speed.1", "12 heads, one H100"),
    ("Throughput gain at the paper's pruned ratio", "acp.table_speed.2", "125M and 760M, 4k and 16k"),
)


def summary(rows: Iterable[Row]) -> str:
    """ "62 claims: 12 proved; 8 checked by a test; ..."."""
    words = Counter(row.verdict for row in rows)
    plural = {Word.MISPRINT: "misprints"}
    counts = [f"{words[w]} {plural.get(w, w) if words[w] > 1 else w}" for w in Word if words[w]]
    return f"{words.total()} claims: {'; '.join(counts)}"


def reproduction(
    rows: Sequence[Row], models: Iterable[Mapping], papers: Sequence[Paper], suites: Sequence[Suite]
) -> str:
    """REPRODUCTION.md."""
    of_paper = {paper.name: [row for row in rows if row.id.startswith(f"{paper.name}.")] for paper in papers}
    counts = [
        [paper.name, *(str(Counter(r.verdict for r in of_paper[paper.name])[word] or "–") for word in Word)]
        for paper in papers
    ]
    changed: dict[str, list[str]] = {}
    for row in rows:
        if row.changed:
            changed.setdefault(row.changed, []).append(f"`{row.id}`")
    missing = [
        [paper.name, *gap]
        for paper in papers
        for gap in gaps(
            paper.name, of_paper[paper.name], [suite for suite in suites if suite.paper.name == paper.name]
        )
    ]
    parts = [
        "# Reproduction: what holds of what the papers claim",
        "One line a claim. Its link has the paper's words, the criterion, all numbers and what measures it "
        "again. [What verdicts mean](docs/pipeline.md#verdicts). `make reproduction` writes "
        "this page, [claims.json](claims.json) and the tables of the [README](README.md).",
        _table(("Paper", *Word), counts),
        "Of several suites (sets of trainings) the one nearest to the paper's size and context decides, "
        "whatever its answer. n is of trainings unless it says more. Brackets: 90 %.",
    ]
    for paper in papers:
        note = Path(__file__).with_name(f"{paper.name}.md").read_text(encoding="utf-8").strip()
        parts += [f"## {paper.title}", note, _lines(of_paper[paper.name])]
    parts += [
        "## Criteria that changed after scores were seen",
        "Before, the suite with most shapes that could tell decided. That moved Figure 7.",
        _table(("before", "claims"), ((words, ", ".join(ids)) for words, ids in changed.items())),
        "## Trained models",
        "Of ACP, FoX (Pro) unless named; held-out loss in nats, by seed. Pairs of two codes: "
        "[text.19](docs/claims/acp.md#text19).",
        _models(models),
        "## What is missing",
        _table(("paper", "missing", "made by"), missing),
    ]
    return "\n\n".join(parts) + "\n"


def _models(models: Iterable[Mapping]) -> str:
    """A line for each pair, trained with ACP and exact; its seeds share the line."""
    pairs: dict[tuple[str, str], dict[str, list[Mapping]]] = {}
    for one in models:
        pattern = r"(.*?)-(?:acp([\d.]*)|(exact))(.*?)(?:-seed\d+)?"
        name, tolerance, exact, rest = re.fullmatch(pattern, one["run"]).groups()
        name += rest + (f", e^-{tolerance}" if tolerance else "")
        sides = pairs.setdefault((one["suite"], name), {"acp": [], "exact": []})
        sides["exact" if exact else "acp"].append(one)
    rows, suite = [], ""
    for (of_suite, name), pair in pairs.items():
        every = [*pair["acp"], *pair["exact"]]
        losses = ([f"{x['loss_nats']:.4f}" if "loss_nats" in x else "–" for x in y] for y in pair.values())
        sides = map(", ".join, losses)
        pruned = [f"{x['pruned_percent']:.1f}" for x in pair["acp"] if "pruned_percent" in x]
        minutes = f"{sum(x['gpu_minutes'] for x in every):.0f}"
        commit = next((x["commit"][:7] for x in every if "commit" in x), "")
        shown, suite, tokens = of_suite * (of_suite != suite), of_suite, style.count_label(every[0]["tokens"])
        rows.append((shown, name.removeprefix("pro-"), tokens, *sides, ", ".join(pruned), minutes, commit))
    header = ("suite", "model", "tokens", "loss, ACP", "loss, exact", "pruned %", "GPU min", "commit")
    return _table(header, rows)


def _lines(rows: Sequence[Row]) -> str:
    """A table; what tests show in a sentence for each of the two verdicts."""
    shown = (Word.PROVED, Word.CHECKED)
    body = (
        (f"[{row.id.partition('.')[2]}]({_link(row)})", row.claim, row.ours, row.verdict, _count(row))
        for row in rows
        if row.verdict not in shown
    )
    parts = [_table(("", "claim", "here", "verdict", "n"), body)]
    for word in shown:
        if some := [f"[{row.claim}]({_link(row)})" for row in rows if row.verdict is word]:
            parts.append(f"**{word.capitalize()}**, whatever the model: {'; '.join(some)}.")
    return "\n\n".join(parts)


def _count(row: Row) -> str:
    return "" if row.n is None else f"{row.n:,}" if row.unit == "training" else _plural(row)


def _plural(row: Row) -> str:
    return f"{row.n:,} {row.unit}{'s' * (row.n > 1)}"


def _link(row: Row) -> str:
    paper, _, name = row.id.partition(".")
    return f"{CLAIMS}/{paper}.md#{name.replace('.', '').lower()}"


def claims_page(paper: Paper, rows: Sequence[Row]) -> str:
    """docs/claims/PAPER.md: an entry with an anchor for each claim."""
    parts = [
        f"# Claims of {paper.title}",
        f"[The paper]({paper.url}) makes {summary(rows)}. Each entry has the paper's words, the criterion, "
        "all numbers, the records and what measures it again. Square brackets hold a 95 % interval (of "
        "losses 90 %) unless they say otherwise. Intervals are without Holm's correction, verdicts with it, "
        "so an interval may be clear of the bound where the verdict is “cannot be told”. *Start of training* "
        "marks a model that saw few tokens for its size.",
    ]
    for row in rows:
        parts += [
            f"### {row.id.partition('.')[2]}",
            f"**{row.claim}**{f' ({row.where})' if row.where else ''}",
        ]
        numbers = row.numbers if row.numbers != row.ours else ""
        facts = {
            "Paper": row.paper,
            "Criterion": row.criterion,
            "Verdict": f"**{row.verdict}**{f', n = {_plural(row)}' if row.n else ''}",
            "Here": row.ours,
            "Numbers": "" if is_plotted(row) else _items(numbers),
            **{f"Suite {name}": _items(f"{verdict}: {numbers}") for name, verdict, numbers in row.others},
            "Models": row.scale,
            "Changed": row.changed,
            "Records": _records(row),
            "Again": f"`make claim ID={row.id}`: {row.cost}" if row.commands else row.cost,
        }
        lines = (f"- {name}: {_minus(words)}" for name, words in facts.items() if words)
        parts.append("\n".join(lines).replace(": \n", ":\n"))
        if is_plotted(row):
            folded = html.escape(_minus(numbers)).replace("; ", "\n<br>")
            parts.append(f"![{row.claim}: {row.axis}](plots/{row.id}.png)")
            parts.append(f"<details><summary>All numbers</summary>{folded}</details>")
    return "\n\n".join(parts) + "\n"


def _items(words: str) -> str:
    """An item a line where one line would be too long to read."""
    return words if len(words) < 300 else "\n    - " + words.replace("; ", "\n    - ")


def is_plotted(row: Row) -> bool:
    """Whether the page shows its numbers as a plot: where they are more than six."""
    return len(row.values) > 6


def _records(row: Row) -> str:
    """A link to the test, or for each metric to the folder of its run, or to that of all its runs."""
    if row.test:
        return f"[`{row.test}`](../../{row.test.partition('::')[0]})"
    by_quantity: dict[str, list[Path]] = {}
    for path in map(Path, row.records):
        by_quantity.setdefault(path.name.partition(".")[0], []).append(path)
    links = []
    for metric, found in by_quantity.items():
        folder = Path(os.path.commonpath([path.parent for path in found])).as_posix()
        name = f"{len(found)} runs" if len(found) > 1 else found[0].parent.name
        links.append(f"{metric} of [{name}](../../{folder})")
    return "; ".join(links)


def readme(text: str, rows: Mapping[str, Row]) -> str:
    """README with what stands between its markers filled from the ledger."""
    answers = (
        (question, f"**{rows[id].ours}**", scale, f"[{rows[id].verdict}]({_link(rows[id])})")
        for question, id, scale in QUESTIONS
    )
    tables = {
        "savings": _savings(rows),
        "answers": _table(("property", "result", "models", "verdict"), answers),
    }
    for name, (start, end) in MARKERS.items():
        head, _, rest = text.partition(start)
        text = f"{head}{start}\n\n{tables[name]}\n\n{end}{rest.partition(end)[2]}"
    return text


def _savings(rows: Mapping[str, Row]) -> str:
    """Pruned share, attention time and training speed of 125M at each context."""
    lines = (
        ("attention blocks pruned", "acp.figure2.2", "about 70 %"),
        ("attention time saved", "acp.figure2.3", "50 to 70 %"),
        ("training throughput gain", "acp.figure2.4", "10 to 40 %"),
    )
    contexts = ("4k", "8k", "16k")
    body = (
        (name, *(f"{rows[id].values[f'125M at {length}']:.0f} %" for length in contexts), paper)
        for name, id, paper in lines
    )
    return _table(("context length", *contexts, "paper, 125M to 760M"), body)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return _minus(markdown_table(header, rows))


def _minus(words: str) -> str:
    return re.sub(r"(?<=[\s\[(])-(?=\d)", "−", words)
