"""The ledger as Markdown: REPRODUCTION.md, the claims pages, the trained models, and the README's tables."""

import html
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from acp_repro.pipeline.paper import Paper, Suite

from .. import style
from ..ledger import OWN, Row
from ..tables import markdown_table
from ..verdict import MEANINGS, Word
from .missing import gaps

CLAIMS = Path("docs/claims")
CHANGE = ("old criterion", "new criterion", "verdict before", "verdict after", "commit")
LONG = 300  # characters; a longer answer is a list
FIRST = {True: "yes", False: "no", None: "–"}  # whether the criterion is older than its measurements
COMMITTED = {
    True: "before the deciding results were measured",
    False: "after some of the deciding results were measured",
    None: "",
}
# What distinguishes claims with the same sentence, by the items of the claims.
SUBJECTS = {
    "acp.figure8": "Further sizes: ",
    "acp.figure9": "Shorter contexts: ",
    "acp.figureA6": "Models trained with needles: ",
    "retention.table1": "Budget of 50 %: ",
    "retention.table2": "Budget of 30 %: ",
} | dict.fromkeys(("acp.figure10", "acp.figure11", "acp.figure11_right", "acp.table3"), "FoX (LLaMA): ")
MARKERS = {
    "savings": ("<!-- from claims.json: make reproduction -->", "<!-- end -->"),
    "answers": ("<!-- answers from claims.json -->", "<!-- end of answers -->"),
}
# The README's summary: a property, the claim that has its result, and the models.
QUESTIONS = (
    ("Safety: attention weight that a query loses", "acp.figureA1.1", "125M at 4k, every head"),
    ("Training with ACP and with exact attention: identical pairs", "acp.text.19", "125M to 760M, 4k to 16k"),
    ("Identical pairs, trained with the official kernels", "acp.text.47", "125M at 4k, below 100M tokens"),
    ("Loss of diverging pairs, ACP − exact (nats, 90 % CI)", "acp.text.39", "125M to 760M, 4k to 16k"),
    ("Inference of one model with ACP and with exact attention", "acp.text.34", "125M at 4k and 16k"),
    ("Attention time saved at the paper's pruned ratio", "acp.table_speed.1", "12 heads, one H100"),
    ("Throughput gain at the paper's pruned ratio", "acp.table_speed.2", "125M and 760M; H100 and H200"),
)


def summary(rows: Iterable[Row]) -> str:
    """ "62 claims: 12 proved, 8 tested, ..."."""
    words = Counter(row.verdict for row in rows)
    plural = {Word.ERRATUM: "errata"}
    counts = [f"{words[w]} {plural.get(w, w) if words[w] > 1 else w}" for w in Word if words[w]]
    return f"{words.total()} claims: {', '.join(counts)}"


def reproduction(rows: Sequence[Row], papers: Sequence[Paper], suites: Sequence[Suite]) -> str:
    """REPRODUCTION.md."""
    of_paper = {paper.name: [row for row in rows if row.id.startswith(f"{paper.name}.")] for paper in papers}
    counts = [
        [paper.name, *(str(Counter(r.verdict for r in of_paper[paper.name])[word] or "–") for word in Word)]
        for paper in papers
    ]
    missing = [
        [paper.name, *gap]
        for paper in papers
        for gap in gaps(
            paper.name, of_paper[paper.name], [suite for suite in suites if suite.paper.name == paper.name]
        )
    ]
    measured = [row for row in rows if row.criterion_before_run is not None]
    parts = [
        "# Reproduction results",
        "\n".join(f"- {line}" for line in MEANINGS),
        "The ID of a claim links to its criterion and its complete results. A *suite* is an experiment file. "
        "If several suites test a claim, the suite closest to the paper's setting decides, whatever its "
        "result. The column *this work* has the result of the deciding suite, and the paper's value in round "
        "brackets if the paper states one. Square brackets are 90 % intervals. `make reproduction` writes "
        "this page and [claims.json](claims.json).",
        _table(("Paper", *Word), counts),
        f"Of the {len(measured)} claims with measurements, "
        f"{sum(row.criterion_before_run for row in measured)} have a criterion that is older than every "
        "measurement (column *criterion first*, which proved and "
        "tested claims do not have). Later edits of the criterion's language do not count. "
        "[criteria.csv](analysis/reproduction/criteria.csv) lists the commits.",
    ]
    for paper in papers:
        note = Path(__file__).with_name(f"{paper.name}.md").read_text(encoding="utf-8").strip()
        parts += [f"## {paper.title}", note, _lines(of_paper[paper.name])]
    alike: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        for one in row.changed:
            alike.setdefault(_change(one), []).append(f"`{row.id}`")
    changes = (
        (", ".join(ids), *change) for change, ids in sorted(alike.items(), key=lambda each: each[1][0])
    )
    parts += [
        "## Criteria that changed after the scores were seen",
        "A new criterion decides only if an error in the old criterion forced the change. If no error "
        "forced the change, a later row restores the old criterion. Of the new criteria that "
        "still decide, two moved their claims towards the paper, from contradicted to inconclusive. Each of "
        "the two corrects an error. "
        "The old criterion of `acp.figure5.1` judged models that the paper's figure does not show. The old "
        "criterion of `lap.figure_slices.2` judged models without the article's gates. New training runs "
        "can also change a verdict between two rows of one claim. In rows of older commits, *reproduced* "
        "includes today's *reproduced at small scale*.",
        _table(("claim", *CHANGE), changes),
        "## What is missing",
        _table(("paper", "missing", "made by"), missing),
        "The published training runs of ACP are listed in [trained models](docs/trained-models.md).",
    ]
    return "\n\n".join(parts) + "\n"


def _change(change: Mapping[str, str]) -> tuple[str, ...]:
    return (change["old"], change["new"], change["before"] or "–", change["after"], change["commit"])


def trained_models(models: Iterable[Mapping]) -> str:
    """docs/trained-models.md."""
    return (
        "\n\n".join(
            (
                "# Trained models",
                "The table lists the published training runs of ACP: FoX (Pro) unless named otherwise. "
                "Losses are in nats on held-out text, one number per seed. "
                "[text.19](claims/acp.md#text19) marks the pairs whose runs used two versions of the code.",
                _models(models),
            )
        )
        + "\n"
    )


def _models(models: Iterable[Mapping]) -> str:
    """A table with one row per pair of an ACP and an exact model; the row has the results of all seeds."""
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
        gpus = sorted({x["device"].removeprefix("NVIDIA ").partition(" ")[0] for x in every if "device" in x})
        unknown = "; one run not recorded" * any("gpu_minutes" not in x for x in every)
        minutes = f"{sum(x.get('gpu_minutes', 0) for x in every):.0f} ({' and '.join(gpus)}){unknown}"
        commit = next((x["commit"][:7] for x in every if "commit" in x), "")
        shown, suite, tokens = of_suite * (of_suite != suite), of_suite, style.count_label(every[0]["tokens"])
        rows.append((shown, name.removeprefix("pro-"), tokens, *sides, ", ".join(pruned), minutes, commit))
    header = ("suite", "model", "tokens", "loss, ACP", "loss, exact", "pruned (%)", "GPU-minutes", "commit")
    return _table(header, rows)


def _lines(rows: Sequence[Row]) -> str:
    """A table of claims, and one list each of the proved and the tested claims."""
    shown = (Word.PROVED, Word.TESTED)
    body = (
        (
            f"[{row.id.partition('.')[2]}]({_link(row)})",
            _claim(row),
            row.ours,
            row.verdict,
            _plural(row) if row.n else "",
            FIRST[row.criterion_before_run],
        )
        for row in rows
        if row.verdict not in shown
    )
    parts = [_table(("ID", "claim", "this work", "verdict", "sample", "criterion first"), body)]
    for word in shown:
        if some := [f"- [{_claim(row)}]({_link(row)}){_place(row)}" for row in rows if row.verdict is word]:
            parts += [f"**{word.capitalize()}** for every model:", "\n".join(some)]
    return "\n\n".join(parts)


def _claim(row: Row) -> str:
    """The sentence of a claim, with its subject if others share the sentence; (ours) if no paper has it."""
    subject = SUBJECTS.get(row.id.rpartition(".")[0], "")
    return subject + row.claim + " (ours)" * row.paper.startswith(OWN)


def _place(row: Row) -> str:
    """ " (Figure 4)"; empty for a claim without a numbered figure or table."""
    return f" ({row.where})" * bool(re.search("Figure|Table", row.where))


def _plural(row: Row) -> str:
    return f"{row.n:,} {row.unit}{'s' * (row.n > 1)}"


def _anchor(row: Row) -> str:
    return row.id.partition(".")[2].replace(".", "").lower()


def _link(row: Row) -> str:
    return f"{CLAIMS}/{row.id.partition('.')[0]}.md#{_anchor(row)}"


def claims_page(paper: Paper, rows: Sequence[Row]) -> str:
    """docs/claims/PAPER.md: an entry with an anchor for each claim."""
    parts = [
        f"# Claims of {paper.title}",
        f"This page lists {summary(rows)} ([paper]({paper.url})). "
        "[REPRODUCTION.md](../../REPRODUCTION.md) defines the verdicts.",
        Path(__file__).with_name(f"{paper.name}_terms.md").read_text(encoding="utf-8").strip(),
    ]
    for row in rows:
        parts.append(f'<a id="{_anchor(row)}"></a>\n\n### {_minus(_claim(row))}{_place(row)}: {row.verdict}')
        facts = {
            "ID": f"`{row.id}`",
            "Paper": _sentence(row.paper),
            "Criterion": _sentence(row.criterion),
            "Criterion committed": COMMITTED[row.criterion_before_run],
            "Proof": row.proof,
            "This work": _answer(row.ours, row.ours if is_plotted(row) else row.numbers),
            "Sample": _plural(row) if row.n else "",
            **{f"Suite `{name}`, {verdict}": _answer("", numbers) for name, verdict, numbers in row.others},
            "Results": _records(row),
            "Re-run": f"`make claim ID={row.id}`: {row.cost}" if row.commands else row.cost,
        }
        parts.append(
            "\n".join(f"- {name}: {_minus(words)}" for name, words in facts.items() if words).replace(
                ": \n", ":\n"
            )
        )
        if row.changed:
            parts.append(_table(CHANGE, map(_change, row.changed)))
        if is_plotted(row):
            parts += [
                f"![{row.claim}: {row.axis}](plots/{row.id}.png)",
                "<details><summary>All numbers</summary>"
                + "\n<br>".join(_facts(html.escape(_minus(row.numbers))))
                + "</details>",
            ]
        if row.scale:
            parts.append(
                "<details><summary>Models and machine</summary>"
                + html.escape(row.scale).replace(". ", "\n<br>")
                + "</details>"
            )
    return "\n\n".join(parts) + "\n"


def _answer(first: str, numbers: str) -> str:
    """``first`` and the sentences of ``numbers``, without repetition; as a list if they are long."""
    facts = [first] * (first not in _sentence(numbers)) + _facts(_sentence(numbers))
    start, end = ("", " ") if sum(map(len, facts)) < LONG else ("\n    - ", "")
    return end.join(start + fact.removesuffix(".") + "." * (fact[-1:] != ":") for fact in facts)


def _facts(numbers: str) -> list[str]:
    return numbers.split("\n" if "\n" in numbers or len(numbers) < LONG else "; ")


def _sentence(words: str) -> str:
    return words and f"{words[:1].upper()}{words[1:].removesuffix('.')}."


def is_plotted(row: Row) -> bool:
    """Whether the page shows the numbers of a claim as a plot, because there are more than six."""
    return len(row.values) > 6


def _records(row: Row) -> str:
    """Links to the test, and for each metric to the folder of its run or the common folder of its runs."""
    links = [f"[`{row.test}`](../../{row.test.partition('::')[0]})"] * bool(row.test)
    by_quantity: dict[str, list[Path]] = {}
    for path in map(Path, row.records):
        by_quantity.setdefault(path.name.partition(".")[0], []).append(path)
    for metric, found in by_quantity.items():
        folder = Path(os.path.commonpath([path.parent for path in found])).as_posix()
        name = f"{len(found)} runs" if len(found) > 1 else found[0].parent.name
        links.append(f"{metric} of [{name}](../../{folder})")
    return "; ".join(links)


def readme(text: str, rows: Mapping[str, Row]) -> str:
    """README with the tables between its markers, rendered from the ledger."""
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
    """Pruned ratio, attention time and throughput of 125M at each context of the deciding suite."""
    lines = (
        ("attention blocks pruned", "acp.figure2.2", "about 70 %"),
        ("attention time saved", "acp.figure2.3", "50 to 70 %"),
        ("training throughput gain, with gradient checkpointing", "acp.figure2.4", "10 to 40 %"),
    )
    contexts = [
        name.rpartition(" at ")[2] for name in rows["acp.figure2.2"].values if name.startswith("125M")
    ]
    body = []
    for name, id, paper in lines:
        found = {
            label.partition(" (")[0].rpartition(" at ")[2]: value
            for label, value in rows[id].values.items()
            if label.startswith("125M")
        }
        body.append((name, *(f"{found[length]:.0f} %" for length in contexts), paper))
    return _table(("FoX (Pro) 125M, paper's recipe", *contexts, "paper, 125M to 760M"), body)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return _minus(markdown_table(header, rows))


def _minus(words: str) -> str:
    return re.sub(r"(?<=[\s\[(])-(?=\d)", "−", words)
