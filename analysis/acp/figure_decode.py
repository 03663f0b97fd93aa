"""A decoding step: its time and cache memory with and without ACP, by batch size and prompt length."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from .. import drawing, style
from ..verdict import Verdict, Word, in_range
from . import naming
from .figure_kernel import BASELINES, DRAWN

# Where Appendix F's gain is "most obvious": a long prefill and a large batch.
LONG_TOKENS, LARGE_BATCH = 2**14, 16
NONE_LARGE = f"no prompt of {LONG_TOKENS:,} tokens for {LARGE_BATCH} rows"
CLEARLY = 1.1  # the speedup above which a step is clearly faster
OWN = "This project's kernel, time with ACP: "
SHAPES = "\nA shape is the batch size times the prompt length in tokens"
_SHAPE = ["batch", "length_tokens"]
PANELS = (
    ("attention", "step_ms", "Attention time of one layer"),
    ("model", "step_ms", "Step time of the whole model"),
    ("model", "kept_bytes", "Size of the key-value cache"),
)


def draw(records: pd.DataFrame) -> drawing.Figure:
    """Attention time, step time and cache size with ACP as percentages of exact attention, by the number of
    cached tokens."""
    shapes = set(zip(records["batch"], records["length_tokens"], strict=True))
    rows = sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape))
    figure, axes = drawing.panels(3, 0.9 + 0.2 * len(rows), sharey=True)
    for ax, (scope, value, what) in zip(axes, PANELS, strict=True):
        for whose in sorted(set(records.loc[records["scope"] == scope, "implementation"])):
            official = whose in BASELINES
            sides = _decoding(records, scope, value, official)
            percent = 100 * (sides["acp"] / sides["exact"])
            look = {"color": BASELINES["official"][1], "mfc": "white", "label": "official"}
            look = look if official else {"color": style.ROLES["acp"], "label": "this work"}
            ax.plot(percent, [rows.index(row) for row in sides.index], "o", ms=5, **look)
        ax.axvline(100, color="0.4", lw=1, label="no change")
        ax.set(title=what, xlim=(0, None), xlabel="with ACP (% of exact)")
    axes[0].set_yticks(range(len(rows)), [f"{b} × {style.length_label(n)}" for b, n in rows])
    axes[0].set(ylabel="batch × prompt", ylim=(len(rows) - 0.5, -0.5))
    drawing.legend(figure)
    return figure


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    records = context.records["decode_time"]
    first = records.iloc[0]
    steps, devices = _decoding(records, "model", "step_ms"), " and ".join(records["device"].unique())
    (batch, length), step = steps.index[steps["exact"].argmax()], steps.iloc[steps["exact"].argmax()]
    caption = f"""{naming.heading(context.item)} The whole model takes {step["acp"]:.2f} ms per step with
ACP and {step["exact"]:.2f} ms without at batch {batch} and prompts of {style.length_label(length)}, where
exact attention takes longest. A step adds one token to every sequence
after a prompt of random tokens. The model has random weights, {first["heads"]} heads of dimension
{first["head_dim"]}, and synthetic gates "{first["gates"]}": {DRAWN[first["gates"]]}. Below 100 %, ACP reduces
(a) the attention time of one layer, (b) the step time, and (c) the size of the cache per head. All times are
from {devices}. {_official(records)}"""
    return draw(records), caption


def _official(records: pd.DataFrame) -> str:
    """A sentence on the effect of ACP on the official kernel; empty if that kernel was not timed."""
    times = _decoding(records, "attention", "step_ms", official=True)
    if times.empty:
        return ""
    more = 100 * (times["acp"] / times["exact"] - 1)
    up = more[more > 0]
    return (
        f"The official kernel takes {style.span(up)} % more time with ACP in {len(up)} of {len(more)} shapes."
    )


def cache_shrinks(decode_time: pd.DataFrame) -> Verdict:
    """Reproduced if the cache of a whole model allocates less with ACP for every shape."""
    allocated = _decoding(decode_time, "model", "allocated_bytes") / 2**30
    each = _in_words(allocated, lambda row: f"{row.acp:.2f} of {row.exact:.2f}")
    less = 100 * (1 - allocated["acp"] / allocated["exact"])
    short = f"with synthetic gates, the cache allocates {style.span(less)} % fewer bytes"
    ours = f"{short}\nAllocated GiB with ACP, of those without: {each}{_assumed(decode_time, 'model')}"
    return Verdict.of(bool((less > 0).all()), ours, short, n=len(less), unit="shape")


def decoding_attention_sped_up(decode_time: pd.DataFrame) -> Verdict:
    """Reproduced if ACP reduces the time of the official attention by a percentage in the paper's range, for
    long prompts and large batches; the results of this project are listed."""
    large = _large(decode_time)
    sides = [_decoding(large, "attention", "step_ms", official) for official in (True, False)]
    if any(side.empty for side in sides):
        return Verdict(Word.INCONCLUSIVE, NONE_LARGE)
    low, high = naming.PUBLISHED.range("decoding", "attention_time_reduction")
    theirs = 100 * (1 - sides[0]["acp"] / sides[0]["exact"])
    short = (
        f"official kernels: {_in_words(sides[0], _saved).replace(' at', ' time at', 1)} "
        f"(paper: {low:g} to {high:g} % less)"
    )
    found = in_range(theirs, low, high, "")
    ours = f"{short}\n{OWN}{_in_words(sides[1], _saved)}{_assumed(large, 'attention')}"
    return replace(found, ours=ours, short=short, n=len(theirs), unit="shape")


def decoding_gains_grow(decode_time: pd.DataFrame) -> Verdict:
    """Reproduced if the official attention saves more with a longer prompt and with a larger batch."""
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
    grown = [large > 0.9 * small for small, large in pairs]
    met = all(grown) if pairs else None
    whose = "official" if len(theirs) else "this project's"
    short = (
        f"with longer prompts or larger batches, {whose} kernels save more in {sum(grown)} of {len(pairs)} "
        "comparisons"
    )
    official = f"Official kernels, time with ACP: {_in_words(theirs, _saved)}\n" * bool(len(theirs))
    ours = f"{short}\n{official}{OWN}{_in_words(own, _saved)}{_assumed(decode_time, 'attention')}"
    return Verdict.of(met, ours, short, n=len(saved), unit="shape")


def decoding_not_faster(decode_time: pd.DataFrame) -> Verdict:
    """Reproduced if no timing of a whole step of the official model is clearly faster with ACP. This
    project's model does not decide, because the paper expects a gain from its CUDA graphs."""
    theirs = decode_time.query("scope == 'model' and implementation == 'official'")
    if theirs.empty:
        return Verdict(Word.INCONCLUSIVE, "whole steps of the official model were not timed")
    turn = theirs.groupby([*_SHAPE, "method"]).cumcount().rename("turn")
    each = theirs.set_index([*_SHAPE, turn, "method"])["step_ms"].unstack("method")
    faster = (each["exact"] / each["acp"]).unstack("turn")
    met = bool((faster.max(axis=1) < CLEARLY).all())
    medians, over = style.span(faster.median(axis=1), ".2f"), (faster >= CLEARLY).sum(axis=None)
    short = f"in {over} of {faster.count().sum()} timings, ACP is at least {CLEARLY:g} times as fast"
    each = _in_words(faster, lambda row: f"{style.span(pd.Series(row[1:]).dropna(), '.2f')} times")
    ours = f"{short}\nThe medians by shape are {medians} times as fast\nRange of the timings: {each}{SHAPES}"
    return Verdict.of(met, ours, short, n=len(faster), unit="shape")


def graphs_help(decode_time: pd.DataFrame) -> Verdict:
    """Reproduced if whole steps in CUDA graphs gain a percentage in the paper's range for training, for long
    prompts and large batches."""
    every, large = (_decoding(some, "model", "step_ms") for some in (decode_time, _large(decode_time)))
    ours = f"Speed gain by shape: {_in_words(every, _gain)}{_assumed(decode_time, 'model')}"
    if large.empty:
        return Verdict(Word.INCONCLUSIVE, ours, NONE_LARGE)
    low, high = naming.PUBLISHED.range("figure2", "throughput_gain")
    found = in_range(100 * (large["exact"] / large["acp"] - 1), low, high, "")
    short = f"this project's step is faster by {_in_words(large, _gain)} (paper: {low:g} to {high:g} %)"
    return replace(found, ours=ours, short=short, n=len(large), unit="shape")


def _large(decode_time: pd.DataFrame) -> pd.DataFrame:
    """The records of large batches of long prompts."""
    return decode_time[(decode_time["length_tokens"] >= LONG_TOKENS) & (decode_time["batch"] >= LARGE_BATCH)]


def _decoding(decode_time: pd.DataFrame, scope: str, value: str, official: bool = False) -> pd.DataFrame:
    """Medians of ``value`` with and without ACP by shape, of the official implementation or of ours."""
    some = decode_time.query("scope == @scope and (implementation == 'official') == @official")
    return some.groupby([*_SHAPE, "method"])[value].median().unstack()


def _assumed(decode_time: pd.DataFrame, scope: str) -> str:
    """The assumptions behind every saving in these records."""
    kept = _decoding(decode_time, scope, "kept_bytes")
    less = style.span(100 * (1 - kept["acp"] / kept["exact"]))
    return f"{SHAPES}\nThe weights are random. Synthetic gates prune {less} % of the cache and set the saving"


def _saved(row) -> str:
    percent = 100 * (1 - row.acp / row.exact)
    return f"{abs(percent):.0f} % {'less' if percent >= 0 else 'more'}"


def _gain(row) -> str:
    return f"{100 * (row.exact / row.acp - 1):.0f} %"


def _in_words(table: pd.DataFrame, words) -> str:
    shapes = [f"{batch} x {style.length_label(length)}" for batch, length in table.index]
    return ", ".join(
        f"{words(row)} at {shape}" for shape, row in zip(shapes, table.itertuples(), strict=True)
    )
