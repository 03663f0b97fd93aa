"""Tables 1 and 2: scores of every method at one budget, 50 % and 30 % of the tokens."""

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
    """One row per method and gate position, one column per task and score; a bag of words and the rows that
    only the paper has follow."""
    test = records[records["split"] == "test"]
    one_each(test, [*_KEY, "seed"], item)
    ours = naming.means(test, _KEY).assign(source="measured")
    ours["row"] = [naming.row_name(m, g) for m, g in zip(ours["method"], ours["gates"], strict=True)]
    ours["column"] = [naming.score_name(row) for row in ours.itertuples()]
    paper = naming.PUBLISHED.table.query("item == @item").rename(columns={"low": "mean", "method": "row"})
    paper = paper.assign(source="paper", column=paper["quantity"].str.replace("_", " ") + ", paper")
    values = pd.concat([ours, paper], ignore_index=True)
    values = values[["source", "row", "column", "mean", "std", "count"]]
    quoted = {
        name: {row.column: f"{row.mean:.1f}" for row in of.itertuples()}
        for name, of in paper.groupby("row", sort=False)
    }
    order, rows = list(naming.METHODS), []
    by_row = sorted(
        ours.groupby(["method", "gates"]), key=lambda group: (order.index(group[0][0]), group[0][1])
    )
    for (method, gates), of in by_row:
        cells = {row.column: _cell(row) for row in of.itertuples()}
        rows.append(
            {"method": naming.row_name(method, gates)} | cells | quoted.get(naming.METHODS[method], {})
        )
    words = {naming.score_name(row): f"{row.score_percent:.1f}" for row in _of_words(bag).itertuples()}
    rows.append({"method": "Bag of words"} | words)
    done = set(ours["method"].map(naming.METHODS))
    rows += [{"method": f"{name} (quoted)"} | cells for name, cells in quoted.items() if name not in done]
    columns = ["method", *dict.fromkeys(ours["column"]), *dict.fromkeys(paper["column"])]
    return drawing.Table(pd.DataFrame(rows, columns=columns).fillna("–"), values)


def _of_words(bag: pd.DataFrame) -> pd.DataFrame:
    """The best test score of a bag of words over its settings, by task and score: an optimistic baseline."""
    test = bag[bag["split"] == "test"]
    return test.groupby([*_TASK, "metric"], as_index=False, sort=False)["score_percent"].max()


def unlearnt(score: pd.DataFrame, bag: pd.DataFrame) -> pd.MultiIndex:
    """The (task, encoder) pairs whose dense model scores more than ``UNLEARNT_POINTS`` below a bag of words
    on the test split."""
    dense = score[(score["split"] == "test") & (score["method"] == "dense")]
    dense = dense.groupby([*_TASK, "metric"], as_index=False, sort=False)["score_percent"].mean()
    both = dense.merge(_of_words(bag), on=[*_TASK, "metric"]).groupby(_TASK, sort=False).first()
    return both.index[both["score_percent_y"] - both["score_percent_x"] > UNLEARNT_POINTS]


def left_out(score: pd.DataFrame, bag: pd.DataFrame) -> str:
    """The tasks of :func:`unlearnt` as a sentence; empty if there are none."""
    tasks = " and ".join(unlearnt(score, bag).unique("dataset"))
    why = f"because the dense model scores more than {UNLEARNT_POINTS} points below a bag of words"
    return f"The comparison excludes {tasks}, {why}. " if tasks else ""


def _cell(row: Any) -> str:
    """ "91.5 ± 0.2 (3)": mean, standard deviation and number of seeds; the mean alone for one seed."""
    return f"{row.mean:.1f}" + (f" ± {row.std:.1f} ({row.count:.0f})" if row.count > 1 else "")


def make(context: drawing.DrawContext) -> tuple[drawing.Table, str]:
    records, bag = context.records["score"], context.records["bag_of_words"]
    table, percent = tabulate(records, bag, context.item.name), PERCENT[context.item.name]
    caption = f"""**{context.item.label}.** {_kept(records, bag, percent)}The table has scores in percent on
the test split only: the mean over seeds, and for several seeds the standard deviation and the number of
seeds. Columns that end in "paper" and rows that end in "quoted" are the paper's and were not run here. A
dash: not measured. A dense model has no budget, so the dense row is the same in Tables 1 and 2. In the
paper, the dense scores fall with the budget. The bag of words is logistic regression on TF-IDF. The
classifier reads as many words as the encoder reads tokens, in the best of six settings on the test split.
{naming.own_tasks(records)}"""
    return table, caption


def _against(
    score: pd.DataFrame, bag: pd.DataFrame, method: str, share: float = 1.0
) -> tuple[list[errors.Comparison], list[errors.Comparison]]:
    """Adaptive Retention minus a share of another method at the same gate position and budget (dense: any).

    Returns the comparisons on the tasks that the dense model has learnt, and those on the other tasks.
    """
    table, tasks = errors.settings(score), unlearnt(score, bag)
    ours, other = table[table["method"] == "ar"], table[table["method"] == method]
    on = _TASK + ([] if method == "dense" else ["budget", "gates"])
    both: tuple[list, list] = [], []
    for one in errors.compared(ours, other, on, share):
        both[(one.row.dataset, one.row.backbone) in tasks].append(one)
    return both


def _kept(score: pd.DataFrame, bag: pd.DataFrame, percent: int) -> str:
    """The smallest and the largest share of the dense score that Adaptive Retention keeps, as a sentence."""
    found, _ = _against(score, bag, "dense")
    kept = {f"{one.row.dataset}, {naming.PLACES[one.row.gates]}": one.percent for one in found}
    ends = dict.fromkeys((min(kept, key=kept.__getitem__), max(kept, key=kept.__getitem__))) if kept else ()
    words = " to ".join(f"{kept[place]:.0f} % ({place})" for place in ends)
    subject = f"With {percent} % of the tokens, Adaptive Retention keeps "
    whole = f"{subject}{words} of the dense model's score, {errors.COUNTED}. " if words else ""
    return whole + left_out(score, bag)


def keeps_dense_score(score: pd.DataFrame, bag: pd.DataFrame) -> Verdict:
    def words(one: errors.Comparison) -> str:
        both = f"{one.scores[0]:.1f} of {one.scores[1]:.1f} ({one.percent:.1f} %)"
        return f"{one.place}: {both}, {one.points}"

    return _judge(errors.above, *_against(score, bag, "dense", KEPT_OF_DENSE), words)


def level_with_infor_coef(score: pd.DataFrame, bag: pd.DataFrame) -> Verdict:
    within = functools.partial(errors.within, margin=LEVEL_POINTS)
    return _judge(within, *_against(score, bag, "infor_coef"))


def beats_random(score: pd.DataFrame, bag: pd.DataFrame) -> Verdict:
    return _judge(errors.above, *_against(score, bag, "random"))


def beats_constraint_aware(score: pd.DataFrame, bag: pd.DataFrame) -> Verdict:
    return _judge(errors.above, *_against(score, bag, "top"))


def beats_h2o(score: pd.DataFrame, bag: pd.DataFrame) -> Verdict:
    return _judge(errors.above, *_against(score, bag, "h2o"))


def _judge(
    of: Callable[..., Verdict],
    found: Sequence[errors.Comparison],
    left: Sequence[errors.Comparison],
    words: Callable[[errors.Comparison], str] = lambda one: f"{one.place}: {one.points}",
) -> Verdict:
    """The verdict on the comparisons ``found``; the text also lists the excluded ones, ``left``."""
    out = "\n".join(["Excluded from the verdict:", *map(words, left)]) if left else ""
    if not found:
        return Verdict.of(None, out or "no task has both at the same gate position and budget", n=len(left))
    verdict = of(found, words=words)
    return replace(verdict, ours=f"{verdict.ours}\n{out}" if out else verdict.ours)
