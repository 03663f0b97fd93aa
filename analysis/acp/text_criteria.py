"""Checks of what the ACP paper says besides its figures and tables; see ``criteria``."""

from __future__ import annotations

import pandas as pd

from acp_repro.common.statistics import LEVEL, homogeneity
from acp_repro.papers.acp.claims import (
    LAYERS_EFFECT,
    SETTLED_PERCENT,
    SHARE_POINTS,
    SPARSE_PERCENT,
    TASKS_P_VALUE,
)
from acp_repro.papers.acp.plan.cost import attention_share_of_flops

from .. import style
from ..verdict import Status, Verdict, in_range
from . import models, paired, statistics
from .criteria import TOO_COARSE, in_order, listed

# Where Appendix F's gain is "most obvious": a long prefill and a large batch.
LONG_TOKENS, LARGE_BATCH = 2**14, 16
TENTHS = 10  # of a training run, in which its speed is compared


def attention_sped_up(attention_time: pd.DataFrame) -> Verdict:
    """Met if every run's attention is faster by the paper's range of times; beyond if some more."""
    table = statistics.time_reduction(attention_time)
    table = in_order(table.assign(times=table["exact"] / table["acp"]))
    low, high = models.PUBLISHED.range("figure2", "attention_speedup")
    ours = listed(table, "times", digits=1, unit=" times")
    return in_range(table["times"], low, high, ours, unit=" times", nothing=1.0)


def attention_share() -> Verdict:
    """Met if the formula gives attention the shares that the paper prints, within :data:`SHARE_POINTS`."""
    table = models.PUBLISHED.table.query("quantity == 'attention_share_of_flops'")
    table = table.astype({"context_length_tokens": int})
    percent = [
        100 * attention_share_of_flops(models.paper_size(row.size), row.context_length_tokens)
        for row in table.itertuples()
    ]
    met = ((table["low"] - percent).abs() <= SHARE_POINTS).all()
    return Verdict.of(bool(met), listed(table.assign(percent=percent), digits=1))


def throughput_settles(training_log: pd.DataFrame) -> Verdict:
    """Met if training with ACP slows down at first and keeps its speed in its second half; undecided where
    the logs do not hold the speed, or too few points."""
    points = training_log[training_log["layer"].notna()].drop_duplicates("tokens").sort_values("tokens")
    points = points.dropna(subset="throughput_tokens_per_s")
    if len(points) < 2 * TENTHS:
        return Verdict(Status.UNDECIDED, "no record holds throughput while a model trains")
    tenth = (TENTHS * points["tokens"] / (points["tokens"].max() + 1)).astype(int)
    speed = points["throughput_tokens_per_s"].groupby(tenth).median()
    first, last, late = speed.iloc[0], speed.iloc[-1], speed.iloc[TENTHS // 2 :]
    furthest = 100 * (late / last - 1).abs().max()
    ours = (
        f"{style.count_label(first)} tokens/s in the first tenth, {style.count_label(last)} in the last, "
        f"within {furthest:.1f} % of that from the half on"
    )
    slower = 100 * (first / last - 1) > SETTLED_PERCENT
    return Verdict.of(bool(slower and furthest <= SETTLED_PERCENT), ours)


def seeds_differ(lm_eval_items: pd.DataFrame) -> Verdict:
    """Met if a column differs between two seeds of one setting beyond chance; else undecided."""
    table = paired.between_seeds(lm_eval_items)
    if table.empty:
        return Verdict(Status.UNDECIDED, "no setting is measured with two seeds")
    other = table[table["adjusted_p_value"] < TASKS_P_VALUE]
    counts = f"{len(other)} of {len(table)} metrics differ between two seeds"
    each = "; ".join(
        f"{row.size}, {style.length_label(row.context_length_tokens)}: {row.task} {row.metric} "
        f"{row.first:.4g} and {row.second:.4g}"
        for row in other.itertuples()
    )
    return Verdict.of(True if len(other) else None, f"{counts}: {each}" if each else counts)


def layers_match_model(pruned_ratio: pd.DataFrame) -> Verdict:
    """Met if the kinds of heads differ by less than :data:`LAYERS_EFFECT` between the layers past the second;
    missed if by more than heads that are shuffled among them; undecided where neither can be seen."""
    if pruned_ratio["layer"].nunique() < 3:
        return Verdict(Status.UNDECIDED, "the model has no layer past the second")
    if statistics.grid_limit(pruned_ratio)[0] == 0:
        return TOO_COARSE
    kinds = statistics.head_kinds(pruned_ratio)
    counts = pd.crosstab(pruned_ratio["layer"], kinds).iloc[2:]
    found = homogeneity(counts)
    ours = (
        f"{len(counts)} layers of {counts.iloc[0].sum()} heads: shuffled, they differ as much in "
        f"{100 * found.p_value:.1f} % of cases; the effect is {found.effect_high:.2f} at most"
    )
    alike = found.effect_high < LAYERS_EFFECT
    return Verdict.of(True if alike else False if found.p_value < LEVEL else None, ours)


def local_and_global_heads(pruned_ratio: pd.DataFrame) -> Verdict:
    """Met if every local head prunes more than half of its blocks, and some head none."""
    if statistics.grid_limit(pruned_ratio)[0] == 0:
        return TOO_COARSE
    local = pruned_ratio["pruned_ratio"][statistics.head_kinds(pruned_ratio) == "local"]
    none = int((pruned_ratio["pruned_blocks"] == 0).sum())
    if local.empty:
        return Verdict(Status.UNDECIDED, "no head is local")
    least = f"local heads prune {100 * local.min():.1f} % of their blocks or more"
    heads = "1 head prunes" if none == 1 else f"{none} heads prune"
    return Verdict.of(bool(local.min() > 0.5) and none > 0, f"{least}; {heads} none")


def weights_sparse(decay: pd.DataFrame, attention_weights: pd.DataFrame) -> Verdict:
    """Met if under :data:`SPARSE_PERCENT` of the causal entries of A are recorded, those over 0.1."""
    lengths = decay.groupby(["run", "layer", "head"])["position"].nunique()
    percent = 100 * len(attention_weights) / (lengths * (lengths + 1) / 2).sum()
    return Verdict.of(bool(percent < SPARSE_PERCENT), f"{percent:.2g} % of the entries")


def cache_shrinks(decode_time: pd.DataFrame) -> Verdict:
    """Met if the cache of a whole model allocates less with ACP in every row."""
    allocated = _decoding(decode_time, "model", "allocated_bytes") / 2**30
    ours = _in_words(allocated, lambda row: f"{row.acp:.2f} of {row.exact:.2f}")
    return Verdict.of(
        bool((allocated["acp"] < allocated["exact"]).all()), f"GiB allocated, batch x prompt: {ours}"
    )


def decoding_attention_sped_up(decode_time: pd.DataFrame) -> Verdict:
    """Met if long prompts and large batches save attention the paper's share of its time."""
    times = _decoding(decode_time, "attention", "step_ms").reset_index()
    times = times[(times["length_tokens"] >= LONG_TOKENS) & (times["batch"] >= LARGE_BATCH)]
    if times.empty:
        return Verdict(Status.UNDECIDED, f"no prompt of {LONG_TOKENS:,} tokens for {LARGE_BATCH} rows")
    times = times.set_index(["batch", "length_tokens"])
    low, high = models.PUBLISHED.range("decoding", "attention_time_reduction")
    saved = 100 * (1 - times["acp"] / times["exact"])
    return in_range(saved, low, high, _in_words(times, _saved))


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
    return Verdict.of(met, _in_words(times, _saved))


def decoding_not_faster(decode_time: pd.DataFrame) -> Verdict:
    """Met if no whole step is clearly faster with ACP."""
    times = _decoding(decode_time, "model", "step_ms")
    ours = _in_words(times, lambda row: f"{row.exact / row.acp:.2f} times as fast")
    return Verdict.of(bool((times["exact"] < 1.1 * times["acp"]).all()), ours)


def _decoding(decode_time: pd.DataFrame, scope: str, value: str) -> pd.DataFrame:
    """``value`` of our implementation with and without ACP, a row a batch and length."""
    ours = decode_time[(decode_time["scope"] == scope) & (decode_time["implementation"] != "official")]
    return ours.pivot(index=["batch", "length_tokens"], columns="method", values=value)


def _saved(row) -> str:
    return f"{100 * (1 - row.acp / row.exact):.0f} % less"


def _in_words(table: pd.DataFrame, words) -> str:
    lengths = [(row, f"{row.Index[0]} x {style.length_label(row.Index[1])}") for row in table.itertuples()]
    return "; ".join(f"{where}: {words(row)}" for row, where in lengths)
