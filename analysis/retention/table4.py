"""Table 4: the time and memory of a batch."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from .. import drawing, style
from ..tables import one_each
from ..verdict import Verdict, in_range
from . import naming

THROUGHPUT = 1.8  # times dense, at 30 %
LATENCY_SAVED_PERCENT = (20.0, 25.0)
ABLATION_SHARE = 0.98  # of the full method's throughput; the paper's ablations have 0.78 to 0.97
EXTRA_THROUGHPUT = (0.4, 0.8)  # at 30 % minus at 50 %, relative to dense
MEMORY_SAVED_PERCENT = (35, 45)
ONE_BUDGET = "no task is timed at both budgets"
_MEMORY = "memory saved, excluding weights"


def tabulate(records: pd.DataFrame) -> drawing.Table:
    """One row per method, budget and length: time, throughput relative to dense, scorer, memory, training."""
    key = ["dataset", "backbone", "method", "budget", "gates", "length_tokens"]
    values = one_each(records[[*key, *_USED]], key, "table4").copy()
    tokens = values["batch_examples"] * values["length_tokens"]
    values["ms_per_1k_tokens"] = 1e3 * values["batch_ms"] / tokens
    values["throughput_ratio"] = values["dense_batch_ms"] / values["batch_ms"]
    values["scorer_share"] = values["scorer_ms"] / values["batch_ms"]
    values["memory_saved"] = 1 - values["peak_memory_bytes"] / values["dense_peak_memory_bytes"]
    values["training_time_ratio"] = values["training_batch_ms"] / values["dense_training_batch_ms"]
    training_memory = values["training_peak_memory_bytes"] / values["dense_training_peak_memory_bytes"]
    values["training_memory_ratio"] = training_memory
    shown = pd.DataFrame(
        {
            "setting": [_name(row) for row in values.itertuples()],
            "tokens": [f"{n:,}" for n in values["length_tokens"]],
            "ms per batch": [f"{ms:.1f}" for ms in values["batch_ms"]],
            "ms per 1k tokens": [f"{ms:.3f}" for ms in values["ms_per_1k_tokens"]],
            "throughput": [f"{x:.2f}x" for x in values["throughput_ratio"]],
            "scorer": [f"{100 * x:.1f} %" for x in values["scorer_share"]],
            _MEMORY: ["–" if pd.isna(x) else f"{100 * x:.0f} %" for x in values["memory_saved"]],
            "training time": [_ratio(x) for x in values["training_time_ratio"]],
            "training memory": [_ratio(x) for x in values["training_memory_ratio"]],
        }
    )
    paper = naming.PUBLISHED.table.query("item == 'table4'").pivot(
        index="method", columns="quantity", values="low"
    )
    quoted = pd.DataFrame(
        {
            "setting": [f"{name} (quoted, 30 %)" for name in paper.index],
            "ms per batch": [f"{1e3 * x:.0f}" for x in paper["batch_seconds"]],
            "ms per 1k tokens": [f"{1e3 * x:.0f}" for x in paper["seconds_per_1k_tokens"]],
            "throughput": [f"{x:.2f}x" for x in paper["throughput"]],
        }
    )
    return drawing.Table(pd.concat([shown, quoted], ignore_index=True).fillna("–"), values)


_USED = [
    "batch_examples",
    "batch_ms",
    "dense_batch_ms",
    "scorer_ms",
    "peak_memory_bytes",
    "dense_peak_memory_bytes",
    "training_batch_ms",
    "dense_training_batch_ms",
    "training_peak_memory_bytes",
    "dense_training_peak_memory_bytes",
]


def _ratio(x: float) -> str:
    return "–" if pd.isna(x) else f"{x:.2f}x"


def _name(row) -> str:
    budget = "" if row.method == "dense" else f", {100 * row.budget:g} %"
    return f"{row.dataset}: {naming.row_name(row.method, row.gates)}{budget}"


def _batches(records: pd.DataFrame) -> str:
    """ "256 examples of 512 tokens, 32 of 4,096"."""
    sizes = records[["batch_examples", "length_tokens"]].drop_duplicates().sort_values("length_tokens")
    (rows, length), *more = sizes.itertuples(index=False, name=None)
    return ", ".join([f"{rows} examples of {length:,} tokens", *(f"{n} of {m:,}" for n, m in more)])


def make(context: drawing.DrawContext) -> tuple[drawing.Table, str]:
    records = context.records["speed"]
    caption = f"""**Table 4.** {_saved(records)}Times are medians of repeats, on batches of
{_batches(records)}. *Throughput* is relative to the same encoder without gates. Both encoders are timed
alternately. *Scorer* is the scorer's share of the time. *Memory saved* compares the peaks of a batch,
excluding the weights. The last two columns are the time and the memory of a training step (forward and
backward, soft gates), relative to the dense model. A dash: not measured (on a CPU, memory is not). The
paper measured the quoted rows on another machine. The paper names neither the task nor the lengths."""
    return tabulate(records), caption


def _longest(speed: pd.DataFrame) -> pd.DataFrame:
    longest = speed.groupby("dataset")["length_tokens"].transform("max")
    return speed[(speed["length_tokens"] == longest) & (speed["method"] == "ar")]


def _saved(speed: pd.DataFrame) -> str:
    """Throughput and memory of Adaptive Retention at its smallest budget and longest lengths."""
    table = _longest(speed)
    if table.empty:
        return ""
    table = table[table["budget"] == table["budget"].min()]
    ratio = style.span(table["dense_batch_ms"] / table["batch_ms"], ".2f")
    memory = (1 - table["peak_memory_bytes"] / table["dense_peak_memory_bytes"]).dropna()
    less = f" and saves {style.span(100 * memory)} % of the peak memory" if len(memory) else ""
    percent = f"{100 * table['budget'].iloc[0]:g} %"
    return f"With {percent} of the tokens, inference is {ratio} times as fast as dense{less}. "


def throughput_rises(speed: pd.DataFrame) -> Verdict:
    table = _longest(speed)
    table = table[table["budget"] == 0.3].assign(length=table["length_tokens"].map("{:,} tokens".format))
    table = table.set_index(["dataset", "gates", "length"])
    ratio, ends = table["dense_batch_ms"] / table["batch_ms"], (THROUGHPUT, THROUGHPUT)
    return _judge(
        ratio,
        ends,
        "{:.2f} times",
        "Adaptive Retention at 30 % is not timed",
        suffix=" times",
        what=" the dense throughput",
        nothing=1.0,
    )


def budget_choice(speed: pd.DataFrame) -> Verdict:
    """Reproduced if the throughput relative to dense is higher at 30 % than at 50 % by EXTRA_THROUGHPUT."""
    table = _longest(speed)
    wide = _by_budget(table, table["dense_batch_ms"] / table["batch_ms"])
    return _judge(
        wide[0.3] - wide[0.5],
        EXTRA_THROUGHPUT,
        "{:+.2f}",
        ONE_BUDGET,
        suffix="",
        what=" times the dense throughput as the difference",
    )


def latency_falls(speed: pd.DataFrame) -> Verdict:
    """Reproduced if the time of a batch is lower at 30 % than at 50 % by LATENCY_SAVED_PERCENT."""
    table = _longest(speed)
    wide = _by_budget(table, table["batch_ms"])
    saved = 100 * (1 - wide[0.3] / wide[0.5])
    return _judge(saved, LATENCY_SAVED_PERCENT, "{:.0f} % less", ONE_BUDGET, what=" less time")


def memory_falls(speed: pd.DataFrame) -> Verdict:
    table = _longest(speed).dropna(subset=["peak_memory_bytes"])
    table = table.assign(percent=(100 * table["budget"]).map("{:g} %".format))
    table = table.set_index(["dataset", "gates", "percent"])
    saved = 100 * (1 - table["peak_memory_bytes"] / table["dense_peak_memory_bytes"])
    return _judge(
        saved,
        MEMORY_SAVED_PERCENT,
        "{:.0f} % less",
        "peak memory is not measured on a CPU",
        what=" less peak memory",
    )


def _judge(values: pd.Series, ends: Sequence[float], form: str, missing: str, **more: Any) -> Verdict:
    """The verdict on values, labelled by their index, against the ends of a range; ``missing`` if empty."""
    if values.empty:
        return Verdict.of(None, missing)
    words = [
        f"{', '.join(label).replace('_', ' ')}: {form.format(x)}" for label, x in values.sort_index().items()
    ]
    return in_range(values, *ends, "\n".join(words), n=len(values), unit="setting", **more)


def _by_budget(table: pd.DataFrame, values: pd.Series) -> pd.DataFrame:
    """Values by task and gate position, one column per budget; only rows with both budgets."""
    wide = table.assign(value=values).set_index(["dataset", "gates", "budget"])["value"].unstack("budget")
    return wide.reindex(columns=[0.3, 0.5]).dropna()


def ablations_slower(speed: pd.DataFrame) -> Verdict:
    """Met if the throughput of every timed ablation at 30 % is below ABLATION_SHARE of the full method's."""
    longest = speed[(speed["length_tokens"] == speed.groupby("dataset")["length_tokens"].transform("max"))]
    timed = longest[longest["budget"] == 0.3].assign(ratio=lambda t: t["dense_batch_ms"] / t["batch_ms"])
    key = ["dataset", "backbone", "gates"]
    full = timed[timed["method"] == "ar"].set_index(key)["ratio"].rename("full")
    cut = timed[timed["method"].str.startswith("ar_")].join(full, on=key).dropna(subset="full")
    if cut.empty:
        return Verdict.of(None, "no ablation is timed")
    words = "\n".join(
        f"{naming.METHODS[row.method]} ({row.dataset}): {row.ratio:.2f} times dense, full {row.full:.2f}"
        for row in cut.itertuples()
    )
    short = (
        f"ablations have {style.span(cut['ratio'], '.2f')} times the dense throughput, and the full method "
        f"has {style.span(cut['full'], '.2f')} times"
    )
    met = bool((cut["ratio"] < ABLATION_SHARE * cut["full"]).all())
    return Verdict.of(met, words, short, n=len(cut), unit="ablation")


def scorer_is_cheap(speed: pd.DataFrame) -> Verdict:
    table = _longest(speed)
    if table.empty:
        return Verdict.of(None, "Adaptive Retention is not timed")
    share = 100 * table["scorer_ms"] / table["batch_ms"]
    words = f"{share.min():.1f} to {share.max():.1f} % of a batch's time"
    return Verdict.of((share < 2).all(), words, n=len(share), unit="setting")
