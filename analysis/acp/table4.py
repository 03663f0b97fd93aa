"""Table 4: the share of attention time that the boundary search takes (Appendix D)."""

import pandas as pd

from .. import drawing, style
from ..tables import one_each
from ..verdict import Verdict, in_range
from . import by_length, naming, statistics, versions

COLUMNS = [
    *("source", "size", "trained_tokens", "context_length_tokens", "search_ms", "attention_ms", "percent")
]


def tabulate(records: pd.DataFrame) -> drawing.Table:
    """One row per context length and one column per size, for this work and then for the paper."""
    ours = statistics.search_share(records).assign(source="measured")
    paper = naming.PUBLISHED.table.query("item == 'table4' and size.notna()")
    paper = paper.rename(columns={"low": "percent"}).assign(source="paper")
    values = pd.concat([ours, paper], ignore_index=True).reindex(columns=COLUMNS)
    values = values.astype({"context_length_tokens": int})
    one_each(values, ["source", "size", "context_length_tokens"], "table4")
    wide = (
        values.assign(size=naming.marked(values))
        .pivot_table(index="context_length_tokens", columns=["source", "size"], values="percent", sort=False)
        .sort_index()
    )
    shown = pd.DataFrame({"L": wide.index.map(style.length_label)})
    for source, size in wide.columns:
        digits = "{:.1f} %" if source == "measured" else "{:.0f} %"
        shown[size if source == "measured" else f"{size}, paper"] = [
            "–" if pd.isna(value) else digits.format(value) for value in wide[source, size]
        ]
    return drawing.Table(shown, values)


def _batches(context: drawing.DrawContext, records: pd.DataFrame) -> str:
    """A sentence on the tokens per call, as the search takes a larger share of a smaller call on a GPU."""
    sizes: dict[int, dict[str, None]] = {}
    for run in context.runs:
        if run.name in set(records["run"]):
            rows = max(1, run.training.micro_batch_tokens // run.context_length)
            sizes.setdefault(rows * run.context_length, {})[run.size_name] = None
    batches = [f"{tokens:,} tokens ({', '.join(names)})" for tokens, names in sizes.items()]
    return f"Timed in batches of {' and '.join(batches)}."


def make(context: drawing.DrawContext) -> tuple[drawing.Table, str]:
    records = context.records["attention_time"]
    share = naming.span(statistics.search_share(records), ".1f")
    caption = f"""{naming.heading(context.item)} The boundary search takes {share} of the attention time of
FoX (Pro). Attention time is one forward and one backward pass with ACP at context length $L$. The last
columns are the paper's Table 4. A dash marks a missing measurement. {_batches(context, records)}
{versions.timed_on(records)}"""
    return tabulate(records), caption


def search_is_cheap(attention_time: pd.DataFrame) -> Verdict:
    """Reproduced if every run spends a percentage in the paper's range on the search; of different magnitude
    if some spend less."""
    table = by_length.in_order(statistics.search_share(attention_time))
    ours = by_length.listed(table, "Search as a percentage of the attention time,", digits=1)
    return in_range(
        naming.settled(table)["percent"],
        *naming.PUBLISHED.range("table4", "boundary_search_share"),
        ours,
        less_is_better=True,
        what=" of the attention time",
    )


def search_trend(attention_time: pd.DataFrame) -> Verdict:
    """Reproduced if the percentage falls with the model size and rises with the context length; inconclusive
    with one size or one context length."""
    shares = statistics.search_share(attention_time)
    table = naming.settled(by_length.in_order(shares.assign(size=naming.without_tokens(shares["size"]))))
    wide = table.pivot(index="size", columns="context_length_tokens", values="percent").loc[
        table["size"].unique()
    ]
    falls, rises = (wide.diff().iloc[1:] < 0).all(axis=None), (wide.iloc[:, -1] > wide.iloc[:, 0]).all()
    met = None if 1 in wide.shape else bool(falls and rises)
    ends = (
        "rises with the context length" if rises else "does not rise with the context length",
        "falls with the model size" if falls else "does not fall with the model size",
    )
    return Verdict.of(
        met,
        by_length.listed(table, "Search as a percentage of the attention time,", digits=2),
        f"the percentage of the search {' and '.join(ends)}",
        n=0 if 1 in wide.shape else len(table),
    )
