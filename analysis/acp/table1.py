"""Tables 1 and 3: downstream tasks of paired runs and of the paper, with standard errors and verdicts."""

import pandas as pd

from acp_repro.common.statistics import LEVEL
from acp_repro.pipeline.evaluation.catalogue import COLUMNS, PAPER_TASKS, Column

from .. import drawing, style
from ..tables import one_each
from ..verdict import Verdict, Word
from . import naming, paired, statistics, versions

NULL = [
    "The null hypothesis of p is that either seed is equally likely to score higher on an item",
    "The values of p include Holm's correction",
]
_SHOWN_VERDICT = {paired.SAME: "", paired.AS_RUNS: " (as runs)", paired.DIFFERS: " **differs**"}
_VALUES = [
    *("row", "size", "context_length_tokens", "method", "seed", "task", "metric"),
    *("value", "standard_error", "items", "p_value", "adjusted_p_value", "verdict"),
]


def tabulate(item: str, lm_eval: pd.DataFrame, lm_eval_items: pd.DataFrame) -> drawing.Table:
    """One row per run, followed by the difference of each pair and by the paper's rows."""
    columns = [column for column in COLUMNS if column.task in set(lm_eval["task"])]
    ours, apart, paper = _ours(lm_eval), _differences(lm_eval_items), _paper(item, columns)
    values = pd.concat([t for t in (ours, apart, paper) if len(t)], ignore_index=True).reindex(
        columns=_VALUES
    )
    one_each(values, [*_VALUES[:7]], item)
    with_average = any(column.quantity for column in columns)
    several_seeds = ours["seed"].nunique() > 1
    unlike = versions.unlike(lm_eval_items, _PAIR)
    rows = []
    order = {"size": pd.CategoricalDtype(values["size"].unique()), "method": pd.CategoricalDtype([*_METHODS])}
    keys = ["row", "size", "context_length_tokens", "seed", "method"]
    for key, found in values.astype(order).groupby(keys, dropna=False, observed=True):
        kind, size, length, seed, method = key
        name = f"{size}, {style.length_label(int(length))}, {_METHODS[method]}"
        name += f", seed {int(seed)}" if several_seeds and kind != "paper" else ""
        name += " (paper)" if kind == "paper" else ""
        name += unlike[size, length, seed][:1] if method == "acp - exact" else ""
        by_column = found.set_index(["task", "metric"])
        cells = {column.header: _cell(by_column, column) for column in columns}
        if with_average:
            cells["Avg ↑"] = "" if method == "acp - exact" else _average(by_column, columns)
        rows.append({"model": name} | cells)
    return drawing.Table(pd.DataFrame(rows), values)


_PAIR = ["size", "context_length_tokens", "seed"]
_METHODS = {"acp": "ACP", "exact": "exact", "acp - exact": "ACP − exact"}


def _ours(records: pd.DataFrame) -> pd.DataFrame:
    return records.assign(row="measured", method=statistics.methods(records))[_VALUES[:10]]


def _differences(records: pd.DataFrame) -> pd.DataFrame:
    table = paired.differences(records).rename(columns={"difference": "value"})
    return table.assign(row="measured", method="acp - exact").reindex(columns=_VALUES)


def _paper(item: str, columns: list[Column]) -> pd.DataFrame:
    """The paper's rows, with accuracies as fractions; the paper prints accuracies in percent."""
    table = naming.PUBLISHED.table.query("item == @item and size.notna()")
    printed = [(c.quantity, c.task, c.metric, 100 if c.is_accuracy else 1) for c in columns if c.quantity]
    named = pd.DataFrame(printed, columns=["quantity", "task", "metric", "divisor"])
    both = named.merge(table, on="quantity")
    return both.assign(row="paper", value=both["low"] / both["divisor"]).reindex(columns=_VALUES)


def _cell(found: pd.DataFrame, column: Column) -> str:
    key = (column.task, column.metric)
    if key not in found.index:
        return "–"
    row = found.loc[key]
    factor, digits = (100, 1) if column.is_accuracy else (1, 2)
    if row["method"] == "acp - exact":
        verdict = _SHOWN_VERDICT[row["verdict"]]
        return f"{factor * row['value']:+.{digits}f}".replace("-", "−") + verdict
    error = "" if pd.isna(row["standard_error"]) else f" ± {factor * row['standard_error']:.{digits}f}"
    digits = digits if error else 2
    return f"{factor * row['value']:.{digits}f}{error}"


def _average(found: pd.DataFrame, columns: list[Column]) -> str:
    keys = [(column.task, column.metric) for column in columns if column.is_accuracy and column.quantity]
    values = found.reindex(keys)["value"]
    return "–" if values.isna().any() else f"{100 * values.mean():.2f}"


def make(context: drawing.DrawContext) -> tuple[drawing.Table, str]:
    table = tabulate(context.item.name, context.records["lm_eval"], context.records["lm_eval_items"])
    return table, caption(context)


def caption(context: drawing.DrawContext) -> str:
    """The contents of the table, the columns of the paper that it lacks, and the rules of its verdicts."""
    records, items = context.records["lm_eval"], context.records["lm_eval_items"]
    lacking = [task for task in PAPER_TASKS if task not in set(records["task"])]
    apart = _differences(items)
    more = (apart["verdict"] == paired.DIFFERS).sum()
    harness = ", ".join(sorted(records["harness_version"].astype(str).unique()))
    text = [
        f"{naming.heading(context.item)} Of {len(apart)} differences between paired runs, {more} are "
        "significant and larger than the differences between seeds. The tasks are zero-shot tasks of the LM "
        f"Evaluation Harness (lm-eval {harness}) for {naming.ARCHITECTURES[context.runs[0].architecture]}. "
        'Accuracies are in percent. "acc-n" normalises log-likelihoods by length, and "ppl" is the '
        "perplexity. ± is the standard error over items. Paired tests over items compare the two runs of a "
        "pair. The tests are McNemar's exact test for accuracies and sign permutations for log-likelihoods. "
        "Their null hypothesis is that either run is equally likely to score higher on an item. Unmarked "
        'differences have p ≥ 0.05 after Holm\'s correction. "As runs" marks a significant difference that '
        "does not exceed the difference between two seeds or between two runs of the paper.",
        *(f"{name}." for name in naming.marked(records).unique() if name.endswith("undertrained)")),
    ]
    if lacking:
        text.append(f"Not measured: {', '.join(lacking)}. All averages are over the columns shown.")
    if records["begins_with_bos"].isna().any():
        text.append("Training text and pages (perplexities) begin with BOS, and prompts do not.")
    if unlike := versions.notes(versions.unlike(items, _PAIR)):
        text.append(f"{unlike}.")
    return "\n".join(text)


# --- claims ---------------------------------------------------------------------------------------------


def tasks_match(lm_eval_items: pd.DataFrame) -> Verdict:
    """Reproduced if the pairs rule out, in every column above chance level, a mean difference as large as
    those of the paper's own pairs; contradicted if they show a larger difference of either sign; inconclusive
    if fewer than half of the columns are above chance level."""
    table = paired.differences(lm_eval_items)
    if table.empty:
        return Verdict(Word.INCONCLUSIVE, paired.NO_PAIR)
    keys = [*paired.SETTING, "seed"]
    unlike = {pair: words for pair, words in versions.unlike(lm_eval_items, keys).items() if words}
    note = "\nPairs whose runs differ in code version or GPU model do not count" * bool(unlike)
    table = table[[pair not in unlike for pair in table[keys].itertuples(index=False, name=None)]]
    columns, unknown = paired.equivalences(table, naming.vocabulary(lm_eval_items))
    known, every = len(columns), len(columns) + len(unknown)
    left_out = f"\nThe exact models are at chance level on: {', '.join(unknown)}" * bool(unknown) + note
    apart = table["difference"].abs().groupby([table[key] for key in keys]).max()
    pairs, more = f"{len(apart)} pairs", {"n": len(apart) or None, "unit": "pair"}
    if why := paired.too_few(apart):
        return Verdict(Word.INCONCLUSIVE, why + left_out, why, **more)
    if not every:
        return Verdict(Word.INCONCLUSIVE, f"no column of the paper is measured{note}")
    if 2 * known < every:
        why = f"the exact models beat chance on {known} of {every} columns"
        return Verdict(Word.INCONCLUSIVE, f"{pairs}: {why}, less than half{left_out}", why, **more)
    within, beyond = (columns[f"adjusted_{name}"] < LEVEL for name in ("p_value", "beyond_p_value"))
    ours = f"{pairs}: {within.sum()} of {known} columns differ by less than the paper's own pairs"
    for word, some in (("Larger", columns[beyond]), ("Undecided", columns[~within & ~beyond])):
        each = ", ".join(
            f"{row.task} {row.metric} {row.mean:+.3f} [{row.low:+.3f}, {row.high:+.3f}], "
            f"margin {row.margin:.3f}"
            for row in some.itertuples(name="Row")
        )
        ours += f"\n{word}: {each}" if each else ""
    return Verdict.of(False if beyond.any() else True if within.all() else None, ours + left_out, **more)


def seeds_differ(lm_eval_items: pd.DataFrame) -> Verdict:
    """Reproduced if a column above chance level differs significantly between seeds; else inconclusive."""
    _, unknown = paired.equivalences(paired.differences(lm_eval_items), naming.vocabulary(lm_eval_items))
    columns = lm_eval_items["task"] + " " + lm_eval_items["metric"]
    table = paired.between_seeds(lm_eval_items[~columns.isin(unknown)])
    if table.empty:
        return Verdict(Word.INCONCLUSIVE, "no setting is measured with two seeds of one code version")
    other = table[table["adjusted_p_value"] < paired.TASKS_P_VALUE]
    counts = f"{len(other)} of {len(table)} metrics differ significantly between two seeds"
    each = [
        f"{row.task} {row.metric} of {row.size} at {style.length_label(row.context_length_tokens)}: "
        f"{row.first:.4g} and {row.second:.4g} for two seeds, p = {row.adjusted_p_value:.2g}"
        for row in other.itertuples()
    ]
    left_out = f"At chance level and therefore excluded: {', '.join(unknown)}"
    each = [*each, *NULL * bool(each), *[left_out] * bool(unknown)]
    two = table.groupby([*paired.SETTING, "method", "code"])[["first", "second"]]
    distinct = {tuple(rows[side]) for _, rows in two for side in rows}  # bitwise identical rows count once
    return Verdict.of(True if len(other) else None, "\n".join([counts, *each]), counts, n=len(distinct))
