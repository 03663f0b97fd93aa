"""A decoding step: its time and the memory kept, against prompt length and batch, with and without ACP."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from acp_repro.pipeline.paper import Claim, Item

from .. import drawing, style
from ..tables import one_each
from ..verdict import Status, Verdict, in_range
from . import models
from .figure_kernel import DRAWN, RIVALS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Where Appendix F's gain is "most obvious": a long prefill and a large batch.
LONG_TOKENS, LARGE_BATCH = 2**14, 16
PANELS = (
    ("attention", "step_ms", "Attention of one layer"),
    ("model", "step_ms", "A step of the whole model"),
    ("model", "kept_bytes", "Keys and values held"),
)


def draw(records: pd.DataFrame) -> Figure:
    """What ACP leaves of the time of attention, of a model's step, and of its cache, by batch, then length.

    Args:
        records: ``decode_time`` records of one device and one kind of gates.
    """
    one_each(records, ["scope", "implementation", "method", "batch", "length_tokens"], "decode_time")
    places = records[["batch", "length_tokens"]].drop_duplicates().sort_values(["batch", "length_tokens"])
    rows = list(places.itertuples(index=False, name=None))
    figure, axes = drawing.panels(3, 0.9 + 0.2 * len(rows), sharey=True)
    for ax, (scope, value, what) in zip(axes, PANELS, strict=True):
        for whose, some in records[records["scope"] == scope].groupby("implementation"):
            sides = some.pivot(index=["batch", "length_tokens"], columns="method", values=value)
            percent = 100 * (sides["acp"] / sides["exact"])
            official = whose in RIVALS
            if not official:
                ax.set_title(f"{what}: ACP takes {style.span(percent)} % of the exact one")
            look = {"mfc": "white", "label": "the authors' kernel"} if official else {"label": "ours"}
            color = style.SIZES[int(official)]
            ax.plot(percent, [rows.index(row) for row in sides.index], "o", ms=5, color=color, **look)
        ax.axvline(100, color="0.4", lw=1, label="as without ACP")
        ax.set(xlim=(0, None), xlabel="with ACP (% of exact)")
    axes[0].set_yticks(range(len(rows)), [f"{b} x {style.length_label(n)}" for b, n in rows])
    axes[0].set(ylabel="batch x prompt", ylim=(len(rows) - 0.5, -0.5))
    drawing.legend(figure)
    return figure


def make(found: drawing.Found) -> tuple[Figure, str]:
    records = found.records["decode_time"]
    first = records.iloc[0]
    steps = _decoding(records, "model", "step_ms")
    (batch, length), step = steps.index[steps["exact"].argmax()], steps.iloc[steps["exact"].argmax()]
    caption = f"""**A decoding step.** Where exact attention takes longest, a step of the whole model takes
{step["acp"]:.2f} ms with ACP and {step["exact"]:.2f} ms without: batch {batch}, prompts of
{style.length_label(length)}. A step adds one token to every row after a prompt of random tokens. There are
{first["heads"]} heads of {first["head_dim"]}, with gates "{first["gates"]}": {DRAWN[first["gates"]]}. The
model has random weights. Left of 100 % ACP is the better. Right: what the cache holds for each head.
{_official(records)}"""
    return draw(records), caption


def _official(records: pd.DataFrame) -> str:
    """What ACP changes in the authors' kernel, as a sentence; empty where it was not timed."""
    theirs = records[records["implementation"] == "official"]
    if theirs.empty:
        return ""
    times = theirs.pivot(index=["batch", "length_tokens"], columns="method", values="step_ms")
    percent = style.span(100 * (times["acp"] / times["exact"]))
    return f"The authors' kernel takes {percent} % of its exact time with ACP."


def cache_shrinks(decode_time: pd.DataFrame) -> Verdict:
    """Met if the cache of a whole model allocates less with ACP in every row."""
    allocated = _decoding(decode_time, "model", "allocated_bytes") / 2**30
    ours = _in_words(allocated, lambda row: f"{row.acp:.2f} of {row.exact:.2f}")
    return Verdict.of(
        bool((allocated["acp"] < allocated["exact"]).all()),
        f"GiB allocated, batch x prompt: {ours}{_assumed(decode_time, 'model')}",
    )


def decoding_attention_sped_up(decode_time: pd.DataFrame) -> Verdict:
    """Met if long prompts and large batches save attention the paper's share of its time."""
    most = (decode_time["length_tokens"] >= LONG_TOKENS) & (decode_time["batch"] >= LARGE_BATCH)
    times = _decoding(decode_time[most], "attention", "step_ms")
    if times.empty:
        return Verdict(Status.UNDECIDED, f"no prompt of {LONG_TOKENS:,} tokens for {LARGE_BATCH} rows")
    low, high = models.PUBLISHED.range("decoding", "attention_time_reduction")
    saved = 100 * (1 - times["acp"] / times["exact"])
    ours = _in_words(times, _saved) + _assumed(decode_time[most], "attention")
    return in_range(saved, low, high, ours)


def decoding_gains_grow(decode_time: pd.DataFrame) -> Verdict:
    """Met if the share saved grows with the prompt and with the batch, where the other stays."""
    times = _decoding(decode_time, "attention", "step_ms")
    saved = (1 - times["acp"] / times["exact"]).rename("saved").reset_index()
    pairs = [
        (small.saved, large.saved)
        for small in saved.itertuples()
        for large in saved.itertuples()
        if (large.batch, large.length_tokens) != (small.batch, small.length_tokens)
        and (large.batch == small.batch) + (large.length_tokens == small.length_tokens) == 1
        and large.batch >= small.batch
        and large.length_tokens >= small.length_tokens
    ]
    met = all(large > 0.9 * small for small, large in pairs) if pairs else None
    return Verdict.of(met, _in_words(times, _saved) + _assumed(decode_time, "attention"))


def decoding_not_faster(decode_time: pd.DataFrame) -> Verdict:
    """Met if no whole step is clearly faster with ACP."""
    times = _decoding(decode_time, "model", "step_ms")
    ours = _in_words(times, lambda row: f"{row.exact / row.acp:.2f} times as fast")
    met = bool((times["exact"] < 1.1 * times["acp"]).all())
    return Verdict.of(met, ours + _assumed(decode_time, "model"))


def _decoding(decode_time: pd.DataFrame, scope: str, value: str) -> pd.DataFrame:
    """``value`` of our implementation with and without ACP, a row a batch and length."""
    ours = decode_time[(decode_time["scope"] == scope) & (decode_time["implementation"] != "official")]
    return ours.pivot(index=["batch", "length_tokens"], columns="method", values=value)


def _assumed(decode_time: pd.DataFrame, scope: str) -> str:
    """What every saving of these records rests on."""
    kept = _decoding(decode_time, scope, "kept_bytes")
    pruned = style.span(100 * (1 - kept["acp"] / kept["exact"]))
    drawn = f"gates drawn so that {pruned} % of the cache is pruned"
    return f"; random weights, {drawn}: the saving follows from that"


def _saved(row) -> str:
    return f"{100 * (1 - row.acp / row.exact):.0f} % less"


def _in_words(table: pd.DataFrame, words) -> str:
    lengths = [(row, f"{row.Index[0]} x {style.length_label(row.Index[1])}") for row in table.itertuples()]
    return "; ".join(f"{where}: {words(row)}" for row, where in lengths)


ITEMS = (
    Item("figure_decode", "Time and memory of a decoding step", ("decode_time",), ours=True, extra=True),
)
SHRINKS = Claim(
    "Dropping pruned keys and values saves memory while decoding",
    "Appendix F and Section 6: thus reducing memory consumption and memory accesses",
    "at every batch and length the cache of a whole model allocates fewer bytes with ACP. The gates are "
    "drawn so that two heads in three are local",
    ("decode_time",),
    cache_shrinks,
    item="figure_decode",
)
SPED_UP = Claim(
    "Attention takes 50 % to 60 % less time in a decoding step",
    "=decoding.attention_time_reduction",
    "the time of attention falls by the paper's range. Batches have at least 16 prompts of at least 16k "
    "tokens. The gates are drawn so that two heads in three are local",
    ("decode_time",),
    decoding_attention_sped_up,
    item="figure_decode",
)
GAINS_GROW = Claim(
    "Attention in decoding gains most with long prefill and large batches",
    "Appendix F: wall-clock time improvement is most obvious there",
    "ACP saves a larger share of attention's time for the longer of two prompts of one batch. The same "
    "holds for the larger of two batches of one prompt. A share that is less than a tenth smaller counts too",
    ("decode_time",),
    decoding_gains_grow,
    item="figure_decode",
)
NOT_FASTER = Claim(
    "Decoding as a whole is not clearly faster",
    "Appendix F: no clear improvement in end-to-end decoding throughput, as kernel launches bound it",
    "no whole step is more than a tenth faster with ACP",
    ("decode_time",),
    decoding_not_faster,
    item="figure_decode",
)


if __name__ == "__main__":
    drawing.main(globals())
