"""The ledger as Markdown: REPRODUCTION.md, a page of claims for each paper, and the README's table."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from acp_repro.pipeline.paper import Paper, Suite

from .. import style
from ..ledger import Row
from ..verdict import Word
from .missing import ANSWERED, gaps

CLAIMS = Path("docs/claims")
MEANINGS = {
    Word.PROVED: "mathematics gives it, whatever the model; a test shows it on this code too",
    Word.CHECKED: "a test of this code shows it",
    Word.MEASURED: "the models of the line meet the criterion: the paper's range, or its words",
    Word.ANOTHER_SIZE: "the effect that the paper reports, larger or smaller than its range",
    Word.UNTOLD: "the records cannot show it, or there are none: the line says why",
    Word.CONTRADICTED: "the models of the line do not meet the criterion",
    Word.MISPRINT: "the paper is wrong as printed; the line says what is right",
}
MARKERS = {
    "savings": ("<!-- from claims.json: make reproduction -->", "<!-- end -->"),
    "answers": ("<!-- answers from claims.json -->", "<!-- end of answers -->"),
}
# The README's questions: the row that answers, and its scale.
QUESTIONS = (
    ("Is pruning safe?", "acp.figureA1.1", "760M at 4k, every head"),
    ("Does ACP change the loss of a training?", "acp.text.19", "125M to 760M, 4k to 16k, nats"),
    ("Do the same weights retrieve alike with it?", "acp.figureA6.2", "125M at 4k, 24 facts in long texts"),
    (
        "How much attention time does it save at the paper's pruned share?",
        "acp.table_speed.1",
        "12 heads, H100",
    ),
    ("How much faster is a step of decoding?", "acp.text.35", "125M, 64 x 16k and 16 x 64k, H200"),
    ("Are heads local or global?", "acp.figure4.1", "760M at 4k"),
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
        [paper.title, *(str(Counter(r.verdict for r in of_paper[paper.name])[word] or "–") for word in Word)]
        for paper in papers
    ]
    changed = [[f"[{row.id}]({_link(row)})", row.changed] for row in rows if row.changed]
    missing = [
        [paper.name, *gap]
        for paper in papers
        for gap in gaps(
            paper.name, of_paper[paper.name], [suite for suite in suites if suite.paper.name == paper.name]
        )
    ]
    parts = [
        "# Reproduction: what holds of what the papers claim",
        "One line a claim: what the paper says, what came here, the verdict, and on how many trainings or "
        "models it rests. The link leads to the criterion, all numbers, the records and the command that "
        "measures it again. `make reproduction` writes this page, [claims.json](claims.json), "
        "[docs/claims/](docs/claims) and the table of the [README](README.md) from the published records.",
        _table(("Paper", *Word), counts),
        _table(("verdict", "means"), MEANINGS.items()),
        "A verdict holds at the scale of its line and no further. Of several suites (sets of trainings) "
        "the one nearest to the paper's own size and context decides, whatever its answer; its page "
        "quotes the others. n counts trainings unless a line says otherwise.",
    ]
    for paper in papers:
        note = Path(__file__).with_name(f"{paper.name}.md").read_text(encoding="utf-8").strip()
        parts += [f"## {paper.title}", note, _lines(of_paper[paper.name])]
    parts += [
        "## Criteria that changed after scores were seen",
        _table(("claim", "what changed"), changed),
        "## Trained models",
        "The published trainings of the ACP paper: size, context, tokens, held-out loss in nats, pruned "
        "share.",
        _models(models),
        "## What is missing",
        _table(("paper", "missing", "made by"), missing),
        "## What is answered",
        "The code of these studies is at the tag `v1-full`: `git worktree add ../v1-full v1-full`. Their "
        "records and pictures stay.",
        "\n".join(f"- {line}" for line in ANSWERED),
    ]
    return "\n\n".join(parts) + "\n"


def _models(models: Iterable[Mapping]) -> str:
    header = ("suite", "run", "tokens", "loss, nats", "pruned", "GPU minutes", "commit")
    rows = (
        (
            one["suite"],
            one["run"],
            style.count_label(one["tokens"]),
            f"{one['loss_nats']:.4f}" if "loss_nats" in one else "–",
            f"{one['pruned_percent']:.1f} %" if "pruned_percent" in one else "–",
            f"{one['gpu_minutes']:.0f}",
            one.get("commit", "–"),
        )
        for one in models
    )
    return _table(header, rows)


def _lines(rows: Iterable[Row]) -> str:
    header = ("claim", "here", "verdict", "n", "more")
    return _table(
        header,
        (
            (
                row.claim + (f" *({row.where})*" if row.where else ""),
                row.ours,
                f"**{row.verdict}**",
                _count(row),
                f"[{row.id.partition('.')[2]}]({_link(row)})",
            )
            for row in rows
        ),
    )


def _count(row: Row) -> str:
    if row.n is None or row.unit == "test":
        return row.unit or "–"
    return f"{row.n:,}" if row.unit == "training" else f"{row.n:,} {row.unit}{'s' * (row.n > 1)}"


def _link(row: Row) -> str:
    return f"{CLAIMS}/{row.id.partition('.')[0]}.md#{row.id.replace('.', '')}"


def claims_page(paper: Paper, rows: Sequence[Row]) -> str:
    """docs/claims/PAPER.md: an entry with an anchor for each claim."""
    parts = [
        f"# Claims of {paper.title}",
        f"[The paper]({paper.url}) makes {summary(rows)}. Each entry has the paper's words, the criterion, "
        "all numbers, the records and what measures it again. Square brackets hold a 95 % interval unless "
        "they say otherwise. *Start of training* marks a model that saw few tokens for its size.",
    ]
    for row in rows:
        parts += [f"### {row.id}", f"**{row.claim}**{f' ({row.where})' if row.where else ''}"]
        facts = {
            "Paper": row.paper,
            "Criterion": row.criterion,
            "Verdict": f"**{row.verdict}** ({row.icml}){f', n = {row.n:,} {row.unit}' if row.n else ''}",
            "Here": row.ours,
            "Numbers": row.numbers if row.numbers != row.ours else "",
            **{f"Suite {name}": f"{verdict}: {numbers}" for name, verdict, numbers in row.others},
            "Models": row.scale,
            "Changed": row.changed,
            "Records": _records(row),
            "Again": f"`make claim ID={row.id}`: {row.cost}" if row.commands else row.cost,
        }
        parts.append("\n".join(f"- {name}: {_minus(words)}" for name, words in facts.items() if words))
    return "\n\n".join(parts) + "\n"


def _records(row: Row) -> str:
    """A link to the test, or for each quantity to the folder of its run, or to that of all its runs."""
    if row.test:
        return f"[`{row.test}`](../../{row.test.partition('::')[0]})"
    by_quantity: dict[str, list[Path]] = {}
    for path in map(Path, row.records):
        by_quantity.setdefault(path.name.partition(".")[0], []).append(path)
    links = []
    for quantity, found in by_quantity.items():
        folder = Path(os.path.commonpath([path.parent for path in found])).as_posix()
        name = f"{len(found)} runs" if len(found) > 1 else found[0].parent.name
        links.append(f"{quantity} of [{name}](../../{folder})")
    return "; ".join(links)


def readme(text: str, rows: Mapping[str, Row]) -> str:
    """README with what stands between its markers filled from the ledger."""
    answers = (
        (question, f"{rows[id].ours} ({rows[id].verdict})", scale, f"[{id}]({_link(rows[id])})")
        for question, id, scale in QUESTIONS
    )
    tables = {
        "savings": _savings(rows),
        "answers": _table(("question", "answer", "scale", "evidence"), answers),
    }
    for name, (start, end) in MARKERS.items():
        head, _, rest = text.partition(start)
        text = f"{head}{start}\n\n{tables[name]}\n\n{end}{rest.partition(end)[2]}"
    return text


def _savings(rows: Mapping[str, Row]) -> str:
    """Pruned share, attention time and training speed of 125M at each context."""
    lines = (
        ("blocks skipped", "acp.figure2.2", "about 70 %"),
        ("attention time saved", "acp.figure2.3", "50 to 70 %"),
        ("training faster by", "acp.figure2.4", "10 to 40 %"),
    )
    contexts = ("4k", "8k", "16k")
    body = (
        (name, *(f"{rows[id].values[f'125M at {length}']:.0f} %" for length in contexts), paper)
        for name, id, paper in lines
    )
    return _table(("125M", *contexts, "paper"), body)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = (header, ["---"] * len(header), *rows)
    cells = ([_minus(" ".join(cell.split())).replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _minus(words: str) -> str:
    return re.sub(r"(?<=[\s\[(])-(?=\d)", "−", words)
