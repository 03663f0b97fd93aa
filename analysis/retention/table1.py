"""Tables 1 and 2: scores of every method at one budget, 50 % and 30 % of the tokens."""

from __future__ import annotations

import pandas as pd

from acp_repro.chain.paper import Claim, Item

from .. import drawing, style
from ..tables import one_each
from ..verdict import Verdict
from . import errors, models

KEPT_OF_DENSE = 0.95
PERCENT = {"table1": 50, "table2": 30}  # of the tokens
_KEY = ["dataset", "backbone", "method", "gates", "metric"]


def tabulate(records: pd.DataFrame, item: str) -> drawing.Table:
    """One row a method and place of its gates, one column a task and score; below, what the paper prints.

    Args:
        records: ``score`` records.
    """
    test = records[records["split"] == "test"]
    one_each(test, [*_KEY, "seed"], item)
    ours = models.means(test, _KEY, "score_percent").assign(source="measured")
    ours["row"] = [models.row_name(m, g) for m, g in zip(ours["method"], ours["gates"], strict=True)]
    ours["column"] = ours["dataset"] + " " + ours["metric"].str.replace("_", " ")
    paper = models.PUBLISHED.table.query("item == @item").rename(columns={"low": "mean", "method": "row"})
    paper = paper.assign(source="paper", column=paper["quantity"].str.replace("_", " ") + ", paper")
    values = pd.concat([ours, paper], ignore_index=True)
    values = values[["source", "row", "column", "mean", "std", "count"]]
    order = list(models.METHODS)
    names = sorted(
        {(m, g) for m, g in zip(ours["method"], ours["gates"], strict=True)},
        key=lambda p: (order.index(p[0]), p[1]),
    )
    measured = list(dict.fromkeys(ours["column"]))
    quoted = list(dict.fromkeys(paper["column"]))
    rows = []
    for method, gates in names:
        name = models.row_name(method, gates)
        found = ours[ours["row"] == name].set_index("column")
        printed = paper[paper["row"] == models.METHODS[method]].set_index("column")["mean"]
        rows.append(
            {"": name}
            | {c: _cell(found.loc[c]) if c in found.index else "–" for c in measured}
            | {c: f"{printed[c]:.1f}" if c in printed.index else "–" for c in quoted}
        )
    done = {models.METHODS[method] for method, _ in names}
    for name in dict.fromkeys(paper["row"]):
        if name not in done:
            printed = paper[paper["row"] == name].set_index("column")["mean"]
            rows.append(
                {"": f"{name} (quoted)"}
                | dict.fromkeys(measured, "–")
                | {c: f"{printed[c]:.1f}" for c in quoted}
            )
    return drawing.Table(pd.DataFrame(rows), values)


def _cell(row: pd.Series) -> str:
    """ "91.5 ± 0.2 (3)": mean and standard deviation of so many seeds; one seed has no deviation."""
    spread = f" ± {row['std']:.1f} ({row['count']:.0f})" if row["count"] > 1 else ""
    return f"{row['mean']:.1f}{spread}"


def _seeds(table: pd.DataFrame) -> str:
    """What the cells of measured rows are of, in words."""
    counts = table[table["source"] == "measured"]["count"]
    if (counts == 1).all():
        return "one seed"
    alone = " (none: one seed)" if (counts == 1).any() else ""
    return f"mean and standard deviation over seeds, with their number in brackets{alone}"


def make(found: drawing.Found) -> tuple[drawing.Table, str]:
    records = found.records["score"]
    table, percent = tabulate(records, found.item.name), PERCENT[found.item.name]
    caption = f"""**{found.item.label}.** {_kept(records, percent)}Shown are scores in percent on the test
split. A cell is {_seeds(table.values)}. Columns that end in "paper" and rows that end in "quoted" are the
paper's and were never run here. A dash is a gap. The paper's dense row falls with the budget, though a dense
model has none. Here it is one row. {style.provenance(records)}"""
    return table, caption


def _against(score: pd.DataFrame, method: str, share: float = 1.0) -> list[errors.Comparison]:
    """Adaptive Retention less a share of another method, at the same place and budget (dense: at any)."""
    table = errors.settings(score)
    ours, other = table[table["method"] == "ar"], table[table["method"] == method]
    on = ["dataset", "backbone"] + ([] if method == "dense" else ["budget", "gates"])
    return errors.compared(ours, other, on, share)


def _kept(score: pd.DataFrame, percent: int) -> str:
    """The least and the most of the dense model's score that Adaptive Retention keeps, as a sentence."""
    found = [one for one in _against(score, "dense") if one.scores[1]]
    kept = {
        f"{one.row.dataset}, {models.PLACES[one.row.gates]}": 100 * one.scores[0] / one.scores[1]
        for one in found
    }
    ends = dict.fromkeys((min(kept, key=kept.__getitem__), max(kept, key=kept.__getitem__))) if kept else ()
    words = " to ".join(f"{kept[place]:.0f} % ({place})" for place in ends)
    subject = f"With {percent} % of the tokens, Adaptive Retention keeps "
    dense = score.loc[score["method"] == "dense", "dataset"].unique()
    left_out = ", ".join(name for name in dense if name not in {one.row.dataset for one in found})
    without = f" Left out: {left_out}, which the dense model has not learnt." if left_out else ""
    return f"{subject}{words} of the dense model's score, {errors.COUNTED}.{without} " if words else ""


def keeps_dense_score(score: pd.DataFrame) -> Verdict:
    found = _against(score, "dense", KEPT_OF_DENSE)
    if not found:
        return Verdict.of(None, "no task has both a dense model and Adaptive Retention")

    def words(one: errors.Comparison) -> str:
        mean, dense = one.scores
        half = one.estimate.interval().high - one.estimate.mean
        return f"{one.place}: {mean:.1f} ± {half:.1f} of {dense:.1f} ({100 * mean / dense:.1f} %)"

    return errors.above(found, words)


def beats_random(score: pd.DataFrame) -> Verdict:
    return _beats(score, "random")


def beats_h2o(score: pd.DataFrame) -> Verdict:
    return _beats(score, "h2o")


def _beats(score: pd.DataFrame, method: str) -> Verdict:
    found = _against(score, method)
    return errors.above(found) if found else Verdict.of(None, "no task has both at the same place and budget")


CLAIMS = (
    Claim(
        "Pruning preserves more than 95 % of the dense score",
        "Abstract: keeping only 30-50 % of tokens preserves > 95 % of full-model performance",
        f"on every task, the mean over seeds of Adaptive Retention is at least {100 * KEPT_OF_DENSE:g} % of "
        f"the dense model's. {errors.IN_WORDS}",
        ("score",),
        keeps_dense_score,
    ),
    Claim(
        "Learned retention beats random pruning",
        "Section 4.3: consistently outperforms H2O and Random across tasks and budgets",
        "on every task, the mean score of Adaptive Retention is above that of random pruning, both "
        f"fine-tuned. {errors.IN_WORDS}",
        ("score",),
        beats_random,
    ),
    Claim(
        "Learned retention beats H2O",
        "Section 4.3: consistently outperforms H2O and Random across tasks and budgets",
        "on every task, the mean score of Adaptive Retention is above that of H2O, both fine-tuned. "
        f"{errors.IN_WORDS}",
        ("score",),
        beats_h2o,
    ),
)

_NEEDS = "a dense model and pruned ones at this budget"
ITEMS = (
    Item(
        "table1",
        "Results at 50 % of the tokens",
        ("score",),
        lambda suite: suite.of_table(0.5),
        _NEEDS,
        CLAIMS,
    ),
    Item(
        "table2",
        "Results at 30 % of the tokens",
        ("score",),
        lambda suite: suite.of_table(0.3),
        _NEEDS,
        CLAIMS,
    ),
)


if __name__ == "__main__":
    drawing.main(globals())
