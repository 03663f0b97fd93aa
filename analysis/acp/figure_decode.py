"""A decoding step: its time and the memory kept, against prompt length and batch, with and without ACP."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from .. import drawing, style
from ..verdict import Verdict, Word, in_range
from . import naming
from .figure_kernel import BASELINES, DRAWN

# Where Appendix F's gain is "most obvious": a long prefill and a large batch.
LONG_TOKENS, LARGE_BATCH = 2**14, 16
CLEARLY = 1.1  # times as fast
_SHAPE = ["batch", "length_tokens"]
PANELS = (
    ("attention", "step_ms", "Attention of one layer"),
    ("model", "step_ms", "A step of the whole model"),
    ("model", "kept_bytes", "Keys and values held"),
)


def draw(records: pd.DataFrame) -> drawing.Figure:
    """What ACP leaves of the time of attention, of a model's step and of its cache, by batch, then length."""
    rows = sorted(set(zip(records["batch"], records["length_tokens"], strict=True)))
    figure, axes = drawing.panels(3, 0.9 + 0.2 * len(rows), sharey=True)
    for ax, (scope, value, what) in zip(axes, PANELS, strict=True):
        for whose in sorted(set(records.loc[records["scope"] == scope, "implementation"])):
            official = whose in BASELINES
            sides = _decoding(records, scope, value, official)
            percent = 100 * (sides["acp"] / sides["exact"])
            if not official:
                ax.set_title(what)
            look = {"mfc": "white", "label": "the authors'"} if official else {"label": "ours"}
            color = style.SIZES[int(official)]
            ax.plot(percent, [rows.index(row) for row in sides.index], "o", ms=5, color=color, **look)
        ax.axvline(100, color="0.4", lw=1, label="as without ACP")
        ax.set(xlim=(0, None), xlabel="with ACP (% of exact)")
    axes[0].set_yticks(range(len(rows)), [f"{b} x {style.length_label(n)}" for b, n in rows])
    axes[0].set(ylabel="batch x prompt", ylim=(len(rows) - 0.5, -0.5))
    drawing.legend(figure)
    return figure


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    records = context.records["decode_time"]
    first = records.iloc[0]
    steps = _decoding(records, "model", "step_ms")
    (batch, length), step = steps.index[steps["exact"].argmax()], steps.iloc[steps["exact"].argmax()]
    caption = f"""**A decoding step.** Where exact attention takes longest, a step of the whole model takes
{step["acp"]:.2f} ms with ACP and {step["exact"]:.2f} ms without: batch {batch}, prompts of
{style.length_label(length)}. A step adds one token to every row after a prompt of random tokens. There are
{first["heads"]} heads of {first["head_dim"]}, with gates "{first["gates"]}": {DRAWN[first["gates"]]}. The
model has random weights. Left of 100 % ACP is the better. (c) What the cache holds for each head.
{_official(records)}"""
    return draw(records), caption


def _official(records: pd.DataFrame) -> str:
    """What ACP changes in the authors' kernel, as a sentence; empty where it was not timed."""
    times = _decoding(records, "attention", "step_ms", official=True)
    if times.empty:
        return ""
    more = 100 * (times["acp"] / times["exact"] - 1)
    up = more[more > 0]
    return f"The authors' kernel is {style.span(up)} % slower with ACP in {len(up)} of {len(more)} shapes."


def cache_shrinks(decode_time: pd.DataFrame) -> Verdict:
    """Met if the cache of a whole model allocates less with ACP in every row."""
    allocated = _decoding(decode_time, "model", "allocated_bytes") / 2**30
    each = _in_words(allocated, lambda row: f"{row.acp:.2f} of {row.exact:.2f} GiB")
    ours = f"allocated: {each}{_assumed(decode_time, 'model')}"
    less = 100 * (1 - allocated["acp"] / allocated["exact"])
    short = f"{style.span(less)} % less allocated, synthetic gates"
    return Verdict.of(bool((less > 0).all()), ours, short, n=len(less), unit="shape")


def decoding_attention_sped_up(decode_time: pd.DataFrame) -> Verdict:
    """Met if long prompts and large batches save the authors' attention the paper's percentage of its
    time; ours is given next to it."""
    most = (decode_time["length_tokens"] >= LONG_TOKENS) & (decode_time["batch"] >= LARGE_BATCH)
    sides = [_decoding(decode_time[most], "attention", "step_ms", official) for official in (True, False)]
    if any(side.empty for side in sides):
        return Verdict(Word.INCONCLUSIVE, f"no prompt of {LONG_TOKENS:,} tokens for {LARGE_BATCH} rows")
    low, high = naming.PUBLISHED.range("decoding", "attention_time_reduction")
    theirs, own = (100 * (1 - times["acp"] / times["exact"]) for times in sides)
    words = f"the authors' kernels: {_in_words(sides[0], _saved)}; ours: {_in_words(sides[1], _saved)}"
    found = in_range(theirs, low, high, words + _assumed(decode_time[most], "attention"))
    short = f"authors' {style.span(theirs)} % (paper: {low:g} to {high:g} %), ours {style.span(own)} %"
    return replace(found, short=short, n=len(theirs), unit="shape")


def decoding_gains_grow(decode_time: pd.DataFrame) -> Verdict:
    """Met if the authors' attention saves more with a longer prompt and with a larger batch."""
    theirs = _decoding(decode_time, "attention", "step_ms", official=True)
    own = _decoding(decode_time, "attention", "step_ms")
    times = theirs if len(theirs) else own
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
    least, most = (100 * saved["saved"].agg(end) for end in ("min", "max"))
    whose = "the authors' kernels" if len(theirs) else "our kernels"
    ours = f"{whose}: {_in_words(times, _saved)}; ours: {_in_words(own, _saved)}"
    ours += _assumed(decode_time, "attention")
    short = f"{least:.0f} to {most:.0f} % less time by shape, {whose}"
    return Verdict.of(met, ours, short, n=len(saved), unit="shape")


def decoding_not_faster(decode_time: pd.DataFrame) -> Verdict:
    """Met if no whole step of the authors' model is clearly faster with ACP in any timing. Ours runs in CUDA
    graphs, of which the paper expects a gain."""
    theirs = decode_time.query("scope == 'model' and implementation == 'official'")
    if theirs.empty:
        return Verdict(Word.INCONCLUSIVE, "the authors' model was never timed as a whole")
    turn = theirs.groupby([*_SHAPE, "method"]).cumcount().rename("turn")
    each = theirs.set_index([*_SHAPE, turn, "method"])["step_ms"].unstack("method")
    faster = (each["exact"] / each["acp"]).unstack("turn")
    met = bool((faster.max(axis=1) < CLEARLY).all())
    medians, over = style.span(faster.median(axis=1), ".2f"), (faster >= CLEARLY).sum(axis=None)
    short = f"medians {medians} times; {over} of {faster.count().sum()} timings over {CLEARLY:g}"
    ours = _in_words(faster, lambda row: f"{style.span(pd.Series(row[1:]).dropna(), '.2f')} times as fast")
    return Verdict.of(met, ours, short, n=len(faster), unit="shape")


def graphs_help(decode_time: pd.DataFrame) -> Verdict:
    """Whether whole steps in CUDA graphs gain what training does, for long prompts of large batches."""
    most = (decode_time["length_tokens"] >= LONG_TOKENS) & (decode_time["batch"] >= LARGE_BATCH)
    every, large = (_decoding(some, "model", "step_ms") for some in (decode_time, decode_time[most]))
    ours = _in_words(every, _gain) + _assumed(decode_time, "model")
    if large.empty:
        return Verdict(Word.INCONCLUSIVE, ours, f"no prompt of {LONG_TOKENS:,} tokens for {LARGE_BATCH} rows")
    gain = 100 * (large["exact"] / large["acp"] - 1)
    ends = naming.PUBLISHED.range("figure2", "throughput_gain")
    found = in_range(gain, *ends, ours, n=len(gain), unit="shape")
    return replace(found, short=f"{found.short}, synthetic gates")


def _decoding(decode_time: pd.DataFrame, scope: str, value: str, official: bool = False) -> pd.DataFrame:
    """Medians of ``value`` with and without ACP, a row a shape: of our implementation or of the authors'."""
    some = decode_time.query("scope == @scope and (implementation == 'official') == @official")
    return some.groupby([*_SHAPE, "method"])[value].median().unstack()


def _assumed(decode_time: pd.DataFrame, scope: str) -> str:
    """What every saving of these records rests on."""
    kept = _decoding(decode_time, scope, "kept_bytes")
    less = style.span(100 * (1 - kept["acp"] / kept["exact"]))
    return f"; random weights, synthetic gates that prune {less} % of the cache: the saving follows from that"


def _saved(row) -> str:
    percent = 100 * (1 - row.acp / row.exact)
    return f"{abs(percent):.0f} % {'less' if percent >= 0 else 'more'}"


def _gain(row) -> str:
    return f"{row.exact / row.acp:.2f} times as fast"


def _in_words(table: pd.DataFrame, words) -> str:
    shapes = [f"{batch} x {style.length_label(length)}" for batch, length in table.index]
    return "; ".join(f"{shape}: {words(row)}" for shape, row in zip(shapes, table.itertuples(), strict=True))
