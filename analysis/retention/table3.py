"""Table 3: the method without each of its parts."""

import math

import pandas as pd

from .. import drawing
from ..tables import one_each
from ..verdict import Verdict
from . import errors, naming

_KEY = ["dataset", "backbone", "method", "budget", "gates", "metric"]
_LOST = ["lost_points", "lost_low", "lost_high"]  # mean and ends of the interval


def tabulate(scores: pd.DataFrame, speed: pd.DataFrame) -> drawing.Table:
    """One row per ablation and budget: test scores, points lost (see :func:`_losses`), throughput relative to
    dense and peak memory, each with the paper's value."""
    test = scores[scores["split"] == "test"]
    one_each(test, [*_KEY, "seed"], "table3")
    values = naming.means(test, _KEY)
    values = values.merge(test.groupby(_KEY, as_index=False)["keep_ratio"].mean())
    longest = speed[speed["length_tokens"] == speed["length_tokens"].max()]
    longest = longest[["dataset", "backbone", "method", "budget", "gates", "peak_memory_bytes"]].assign(
        throughput_ratio=longest["dense_batch_ms"] / longest["batch_ms"]
    )
    values = values.merge(longest, how="left")
    lost = {
        (of.dataset, of.backbone, of.method_other, of.budget, of.gates): estimate.interval()
        for of, estimate, *_ in _losses(scores)
    }
    places = values[errors.SETTING].itertuples(index=False, name=None)
    values[_LOST] = [lost.get(place, (math.nan,) * 3) for place in places]
    rows = []
    printed = naming.PUBLISHED.table.query("item == 'table3'").set_index(["method", "quantity"])["low"]
    order = list(naming.METHODS)
    scored = [
        name
        for row in values.itertuples()
        for name in (naming.score_name(row), f"{row.dataset}, lost", f"{row.dataset}, kept")
    ]
    groups = values.groupby(["budget", "method", "gates"], sort=False)
    for (budget, method, gates), of_row in sorted(groups, key=lambda g: (-g[0][0], order.index(g[0][1]))):
        # Not every task's models are timed.
        known = of_row.dropna(subset=["throughput_ratio"])
        timed = (known if len(known) else of_row).iloc[0]
        ratio, memory = timed["throughput_ratio"], timed["peak_memory_bytes"]
        cells = {
            "method": f"{naming.row_name(method, gates)}, {100 * budget:g} %",
            **dict.fromkeys(scored, "–"),
            **{naming.score_name(r): f"{r.mean:.1f}" for r in of_row.itertuples()},
            **{
                f"{r.dataset}, lost": f"{r.lost_points:+.1f} [{r.lost_low:.1f}, {r.lost_high:.1f}]"
                for r in of_row.dropna(subset=_LOST).itertuples()
            },
            **{f"{r.dataset}, kept": f"{100 * r.keep_ratio:.1f} %" for r in of_row.itertuples()},
            "throughput": "–" if pd.isna(ratio) else f"{ratio:.2f}x",
            "memory, excluding weights": "–" if pd.isna(memory) else f"{memory / 2**20:,.0f} MiB",
        }
        name = naming.METHODS[method]
        for task in ("sst2", "imdb"):
            key = (name, f"{task}_{100 * budget:g}")
            cells[f"{task}, paper"] = f"{printed[key]:.1f}" if key in printed.index else "–"
        at_30 = budget == 0.3
        cells["throughput, paper"] = f"{printed[name, 'throughput']:.2f}x" if at_30 else "–"
        cells["memory, paper"] = f"{printed[name, 'memory']:.1f} GB" if at_30 else "–"
        rows.append(cells)
    return drawing.Table(pd.DataFrame(rows).fillna("–"), values)


def make(context: drawing.DrawContext) -> tuple[drawing.Table, str]:
    scores, speed = context.records["score"], context.records["speed"]
    caption = f"""**Table 3.** {_changes(scores)}Scores are means over seeds in percent, on the test split
only. *Lost* is the score of the full method minus the score of the ablation, in points with a 95 %
interval, {errors.COUNTED}. The verdict tests *lost*, whose sign can differ from the sign on the test split
alone. *Kept* is the keep ratio on the test split. *Throughput* is measured at inference with
{speed["length_tokens"].max():,} tokens, relative to the same encoder without gates. *Memory* is the peak of
a batch. According to the paper's text, the full method needs the least memory. According to the paper's
table, the full method needs the most. A dash: not measured (on a CPU, memory is not) or not applicable."""
    return tabulate(scores, speed), caption


def _losses(score: pd.DataFrame) -> list[errors.Comparison]:
    """The full method minus each ablation, on the same task, gate position and budget."""
    table = errors.settings(score)
    full, cut = table[table["method"] == "ar"], table[table["method"].str.startswith("ar_")]
    return errors.compared(full, cut, ["dataset", "backbone", "budget", "gates"])


def _changes(score: pd.DataFrame) -> str:
    """The largest loss and the largest gain of an ablation, as a sentence."""
    found = sorted(_losses(score), key=lambda one: -one.estimate.mean)
    ends = dict.fromkeys(
        f"{-one.estimate.mean:+.1f} points (*{naming.METHODS[one.row.method_other]}*, {one.place})"
        for one in (*found[:1], *found[-1:])
    )
    return f"Ablations change the score by {' to '.join(ends)}, {errors.COUNTED}. " if ends else ""


def ablations_lose(score: pd.DataFrame) -> Verdict:
    found = _losses(score)
    if not found:
        return Verdict.of(None, "no ablation was run together with the full method")
    printed = naming.PUBLISHED.table.query("item == 'table3'").set_index(["method", "quantity"])["low"]

    def printed_loss(one: errors.Comparison) -> float:
        task = f"{one.row.dataset}_{100 * one.row.budget:g}"
        both = [(naming.METHODS[method], task) for method in (one.row.method, one.row.method_other)]
        return printed[both[0]] - printed[both[1]] if set(both) <= set(printed.index) else 0.0

    def words(one: errors.Comparison) -> str:
        paper = f" (paper: {printed_loss(one):.1f})" if printed_loss(one) else ""
        ablation = naming.METHODS[one.row.method_other]
        return f"{ablation} ({one.row.dataset}, {100 * one.row.budget:g} %): {one.points}{paper}"

    return errors.above(found, words, printed_loss)
