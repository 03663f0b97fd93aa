"""Tables 1 and 2: scores of every method at one budget, 50 % and 30 % of the tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from .. import drawing
from ..tables import one_each
from ..verdict import Verdict
from . import errors, naming

KEPT_OF_DENSE = 0.95
UNLEARNT_POINTS = 5
LEVEL_POINTS = 2
PERCENT = {"table1": 50, "table2": 30}  # of the tokens
_TASK = ["dataset", "backbone"]
_KEY = [*_TASK, "method", "gates", "metric"]


def tabulate(records: pd.DataFrame, bag: pd.DataFrame, item: str) -> drawing.Table:
    """One row a method and place of its gates, one column a task and score; below, a bag of words, and what
    the paper prints."""
    test = records[records["split"] == "test"]
    one_each(test, [*_KEY, "seed"], item)
    ours = naming.means(test, _KEY).assign(source="measured")
    ours["row"] = [naming.row_name(m, g) for m, g in zip(ours["method"], ours["gates"], strict=True)]
    ours["column"] = [naming.score_name(row) for row in ours.itertuples()]
    paper = naming.PUBLISHED.table.query("item == @item").rename(columns={"low": "mean", "method": "row"})
    paper = paper.assign(source="paper", column=paper["quantity"].str.replace("_", " ") + ", paper")
    values = pd.concat([ours, paper], ignore_index=True)
    values = values[["source", "row", "column", "mean", "std", "count"]]
    order = list(naming.METHODS)
    names = sorted(
        ours.set_index(["method", "gates"]).index.unique(), key=lambda p: (order.index(p[0]), p[1])
    )
    measured = {name: {r.column: _cell(r) for r in of.itertuples()} for name, of in ours.groupby("row")}
    quoted = {
        name: dict(zip(of["column"], of["mean"].map("{:.1f}".format), strict=True))
        for name, of in paper.groupby("row", sort=False)
    }
    rows = [
        {"": naming.row_name(*name)}
        | measured[naming.row_name(*name)]
        | quoted.get(naming.METHODS[name[0]], {})
        for name in names
    ]
    rows.append(
        {"": "Bag of words"}
        | {naming.score_name(r): f"{r.score_percent:.1f}" for r in _of_words(bag).itertuples()}
    )
    done = {naming.METHODS[method] for method, _ in names}
    rows += [{"": f"{name} (quoted)"} | cells for name, cells in quoted.items() if name not in done]
    columns = ["", *dict.fromkeys(ours["column"]), *dict.fromkeys(paper["column"])]
    return drawing.Table(pd.DataFrame(rows, columns=columns).fillna("–"), values)


def _of_words(bag: pd.DataFrame) -> pd.DataFrame:
    """Of a bag of words the best of its settings on the test split, by task and score. That flatters it."""
    test = bag[bag["split"] == "test"]
    return test.groupby([*_TASK, "metric"], as_index=False, sort=False)["score_percent"].max()


def unlearnt(score: pd.DataFrame, bag: pd.DataFrame) -> pd.MultiIndex:
    """(task, encoder) whose dense model is more than ``UNLEARNT_POINTS`` below a bag of words, on the test
    split."""
    dense = score[(score["split"] == "test") & (score["method"] == "dense")]
    dense = dense.groupby([*_TASK, "metric"], as_index=False, sort=False)["score_percent"].mean()
    both = dense.merge(_of_words(bag), on=[*_TASK, "metric"]).groupby(_TASK, sort=False).first()
    return both.index[both["score_percent_y"] - both["score_percent_x"] > UNLEARNT_POINTS]


def left_out(score: pd.DataFrame, bag: pd.DataFrame) -> str:
    """Which tasks :func:`unlearnt` names, as a sentence; nothing where there are none."""
    tasks = ", ".join(unlearnt(score, bag).unique("dataset"))
    why = f"where the dense model is more than {UNLEARNT_POINTS} points below a bag of words"
    return f"Left out of this: {tasks}, {why}. " if tasks else ""


def _cell(row: Any) -> str:
    """ "91.5 ± 0.2 (3)": mean and standard deviation of so many seeds; one seed has no deviation."""
    return f"{row.mean:.1f}" + (f" ± {row.std:.1f} ({row.count:.0f})" if row.count > 1 else "")


def _seeds(table: pd.DataFrame) -> str:
    """What the cells of measured rows are of, in words."""
    counts = table[table["source"] == "measured"]["count"]
    if (counts == 1).all():
        return "one seed"
    alone = " (none: one seed)" if (counts == 1).any() else ""
    return f"mean and standard deviation over seeds, with their number in brackets{alone}"


def make(context: drawing.DrawContext) -> tuple[drawing.Table, str]:
    records, bag = context.records["score"], context.records["bag_of_words"]
    table, percent = tabulate(records, bag, context.item.name), PERCENT[context.item.name]
    caption = f"""**{context.item.label}.** {_kept(records, bag, percent)}Shown are
scores in percent on the test split. A cell is {_seeds(table.values)}. Columns that end in "paper" and rows
that end in "quoted" are the paper's and were never run here. A dash is a gap. The paper's dense row falls
with the budget, though a dense model has none. Here it is one row. The bag of words is TF-IDF and logistic
regression on as many words as the encoder reads tokens, the best of six settings on the test split.
{naming.own_tasks(records)}"""
    return table, caption


def _against(
    score: pd.DataFrame, bag: pd.DataFrame, method: str, share: float = 1.0
) -> tuple[list[errors.Comparison], list[errors.Comparison]]:
    """Adaptive Retention less a share of another method, at the same place and budget (dense: at any), on
    what the dense model has learnt, and on what it has not."""
    table, tasks = errors.settings(score), unlearnt(score, bag)
    ours, other = table[table["method"] == "ar"], table[table["method"] == method]
    on = _TASK + ([] if method == "dense" else ["budget", "gates"])
    both: tuple[list, list] = [], []
    for one in errors.compared(ours, other, on, share):
        both[(one.row.dataset, one.row.backbone) in tasks].append(one)
    return both


def _kept(score: pd.DataFrame, bag: pd.DataFrame, percent: int) -> str:
    """The least and the most of the dense model's score that Adaptive Retention keeps, as a sentence."""
    found, _ = _against(score[score["split"] == "test"], bag, "dense")
    kept = {f"{one.row.dataset}, {naming.PLACES[one.row.gates]}": one.percent for one in found}
    ends = dict.fromkeys((min(kept, key=kept.__getitem__), max(kept, key=kept.__getitem__))) if kept else ()
    words = " to ".join(f"{kept[place]:.0f} % ({place})" for place in ends)
    subject = f"With {percent} % of the tokens, Adaptive Retention keeps "
    whole = f"{subject}{words} of the dense model's test score. " if words else ""
    return whole + left_out(score, bag)


def keeps_dense_score(score: pd.DataFrame, bag: pd.DataFrame) -> Verdict:
    found, left = _against(score, bag, "dense", KEPT_OF_DENSE)

    def words(one: errors.Comparison) -> str:
        half = one.estimate.interval().high - one.estimate.mean
        return f"{one.place}: {one.scores[0]:.1f} ± {half:.1f} of {one.scores[1]:.1f} ({one.percent:.1f} %)"

    return _judge(errors.above, found, left, words)


def level_with_infor_coef(score: pd.DataFrame, bag: pd.DataFrame) -> Verdict:
    within = functools.partial(errors.within, margin=LEVEL_POINTS)
    both = _against(score, bag, "infor_coef")
    return _judge(within, *both, lambda one: f"{one.place}, {100 * one.row.budget:g} %: {one.points}")


def beats_random(score: pd.DataFrame, bag: pd.DataFrame) -> Verdict:
    return _judge(errors.above, *_against(score, bag, "random"))


def beats_constraint_aware(score: pd.DataFrame, bag: pd.DataFrame) -> Verdict:
    return _judge(
        errors.above,
        *_against(score, bag, "top"),
        lambda one: f"{one.place}, {100 * one.row.budget:g} %: {one.points}",
    )


def beats_h2o(score: pd.DataFrame, bag: pd.DataFrame) -> Verdict:
    return _judge(errors.above, *_against(score, bag, "h2o"))


def _judge(
    of: Callable[..., Verdict],
    found: Sequence[errors.Comparison],
    left: Sequence[errors.Comparison],
    words: Callable[[errors.Comparison], str] = lambda one: f"{one.place}: {one.points}",
) -> Verdict:
    """The verdict on what is learnt; what is left out is named."""
    out = f"left out: {'; '.join(map(words, left))}" if left else ""
    if not found:
        return Verdict.of(None, out or "no task has both at the same place and budget", n=len(left))
    verdict = of(found, words=words)
    return replace(verdict, ours=f"{verdict.ours}; {out}" if out else verdict.ours)
