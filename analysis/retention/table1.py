"""Tables 1 and 2: scores of every method at one budget, 50 % and 30 % of the tokens."""

from __future__ import annotations

from typing import Any

import pandas as pd

from .. import drawing
from ..tables import one_each
from ..verdict import Verdict
from . import errors, models

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
    ours = models.means(test, _KEY).assign(source="measured")
    ours["row"] = [models.row_name(m, g) for m, g in zip(ours["method"], ours["gates"], strict=True)]
    ours["column"] = [_column(row) for row in ours.itertuples()]
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
    words = {_column(row): row.score_percent for row in _of_words(bag).itertuples()}
    rows.append(
        {"": "Bag of words"}
        | {c: f"{words[c]:.1f}" if c in words else "–" for c in measured}
        | dict.fromkeys(quoted, "–")
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


def _column(row: Any) -> str:
    return f"{row.dataset} {row.metric.replace('_', ' ')}"


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
    records, bag = found.records["score"], found.records["bag_of_words"]
    table, percent = tabulate(records, bag, found.item.name), PERCENT[found.item.name]
    caption = f"""**{found.item.label}.** {_kept(records, bag, percent)}Shown are
scores in percent on the test split. A cell is {_seeds(table.values)}. Columns that end in "paper" and rows
that end in "quoted" are the paper's and were never run here. A dash is a gap. The paper's dense row falls
with the budget, though a dense model has none. Here it is one row. The bag of words is TF-IDF and logistic
regression on as many words as the encoder reads tokens, the best of six settings on the test split.
{models.own_tasks(records)}"""
    return table, caption


def _against(
    score: pd.DataFrame, bag: pd.DataFrame, method: str, share: float = 1.0
) -> list[errors.Comparison]:
    """Adaptive Retention less a share of another method, at the same place and budget (dense: at any), on
    what the dense model has learnt."""
    learnt = ~pd.MultiIndex.from_frame(score[_TASK]).isin(unlearnt(score, bag))
    table = errors.settings(score[learnt])
    ours, other = table[table["method"] == "ar"], table[table["method"] == method]
    on = _TASK + ([] if method == "dense" else ["budget", "gates"])
    return errors.compared(ours, other, on, share)


def _kept(score: pd.DataFrame, bag: pd.DataFrame, percent: int) -> str:
    """The least and the most of the dense model's score that Adaptive Retention keeps, as a sentence."""
    found = [one for one in _against(score, bag, "dense") if one.scores[1]]
    kept = {
        f"{one.row.dataset}, {models.PLACES[one.row.gates]}": 100 * one.scores[0] / one.scores[1]
        for one in found
    }
    ends = dict.fromkeys((min(kept, key=kept.__getitem__), max(kept, key=kept.__getitem__))) if kept else ()
    words = " to ".join(f"{kept[place]:.0f} % ({place})" for place in ends)
    without = left_out(score, bag)
    if not words:
        return without
    subject = f"With {percent} % of the tokens, Adaptive Retention keeps "
    return f"{subject}{words} of the dense model's score. Dev items count where records hold them. {without}"


def keeps_dense_score(score: pd.DataFrame, bag: pd.DataFrame) -> Verdict:
    found = _against(score[score["split"] == "test"], bag, "dense", KEPT_OF_DENSE)
    if not found:
        return Verdict.of(None, "no task has both a dense model and Adaptive Retention")

    def words(one: errors.Comparison) -> str:
        mean, dense = one.scores
        half = one.estimate.interval().high - one.estimate.mean
        return f"{one.place}: {mean:.1f} ± {half:.1f} of {dense:.1f} ({100 * mean / dense:.1f} %)"

    return errors.above(found, words)


def level_with_infor_coef(score: pd.DataFrame, bag: pd.DataFrame) -> Verdict:
    found = _against(score, bag, "infor_coef")
    if not found:
        return Verdict.of(None, "no task has both at the same place and budget")
    return errors.within(found, LEVEL_POINTS, lambda one: f"{one.place}: {one.points}")


def beats_random(score: pd.DataFrame, bag: pd.DataFrame) -> Verdict:
    return _beats(score, bag, "random")


def beats_h2o(score: pd.DataFrame, bag: pd.DataFrame) -> Verdict:
    return _beats(score, bag, "h2o")


def _beats(score: pd.DataFrame, bag: pd.DataFrame, method: str) -> Verdict:
    found = _against(score, bag, method)
    return errors.above(found) if found else Verdict.of(None, "no task has both at the same place and budget")
