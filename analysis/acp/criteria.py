"""Checks of what the ACP paper claims: pure functions from records to a verdict.

The words of each criterion stand in ``acp_repro.papers.acp.claims`` (``holds_if``), which names the function
here that checks them; ``text_criteria`` has those of the paper's text. A criterion that our smaller models
miss stays "not met", with our numbers.
"""

from __future__ import annotations

import math

import pandas as pd

from acp_repro.common.statistics import LEVEL, equivalence, over_draws
from acp_repro.papers.acp.claims import (
    FOUND_RECALL,
    LEARNT_RECALL,
    LOSS_WITHIN_NATS,
    MARGINAL_POINTS,
    PRUNED_PERCENT,
    RECALL_POINTS,
    SAME_LOSS_NATS,
)

from .. import style
from ..tables import one_each
from ..verdict import Status, Verdict, in_range
from . import models, needle_statistics, paired, statistics

ONE_PAIR = "one pair of trainings: another may differ as much"
TOO_COARSE = Verdict(Status.UNDECIDED, "the grid has too few blocks for any head to be local")


# --- Figures 2 and 10 -------------------------------------------------------------------------------


def pruned_at_longest(pruned_ratio: pd.DataFrame) -> Verdict:
    """Met if every size prunes :data:`PRUNED_PERCENT` at its longest context; beyond if some prune more."""
    longest = in_order(statistics.pruned_percent(pruned_ratio)).groupby("size", sort=False).tail(1)
    return in_range(longest["percent"], *PRUNED_PERCENT, listed(longest))


def savings_grow(pruned_ratio: pd.DataFrame) -> Verdict:
    """Met if every size prunes more at every longer context."""
    return _grows(statistics.pruned_percent(pruned_ratio))


def time_saved(attention_time: pd.DataFrame) -> Verdict:
    """Met if every run saves what the paper's range says; beyond if some save more."""
    table = in_order(statistics.time_reduction(attention_time))
    low, high = models.PUBLISHED.range("figure2", "attention_time_reduction")
    return in_range(table["percent"], low, high, listed(table))


def throughput_gained(throughput: pd.DataFrame) -> Verdict:
    """Met if every run gains what the paper's range says; beyond if some gain more."""
    table = in_order(statistics.throughput_gain(throughput))
    low, high = models.PUBLISHED.range("figure2", "throughput_gain")
    return in_range(table["percent"], low, high, listed(table, sign="+"))


def gains_grow(throughput: pd.DataFrame) -> Verdict:
    """Met if every size gains more throughput at every longer context."""
    return _grows(statistics.throughput_gain(throughput), sign="+")


# --- Figures 3, 8, 11 -------------------------------------------------------------------------------


def losses_match(loss: pd.DataFrame) -> Verdict:
    """Met if pairs of trainings rule out a mean difference of :data:`LOSS_WITHIN_NATS`; missed if they show
    one that is larger. Pairs of all sizes and lengths stand side by side.
    """
    keys = ["architecture", "size", "context_length_tokens"]
    method = loss["log_pruning_tolerance"].isna().map({True: "exact", False: "acp"})
    loss = one_each(loss.assign(method=method), [*keys, "method", "seed"], "loss")
    sides = (
        loss[loss["method"] == side].set_index([*keys, "seed"])["loss_nats"] for side in ("acp", "exact")
    )
    difference = next(sides).sub(next(sides)).dropna()
    if difference.empty:
        return Verdict(Status.UNDECIDED, "no run is measured together with its exact pair")
    each = "; ".join(
        f"{size}, {style.length_label(length)}: "
        + ", ".join(
            f"{gap:+.4f}" + (f" (seed {seed})" if len(gaps) > 1 else "")
            for seed, gap in gaps.droplevel(keys).items()
        )
        for (size, length, _), gaps in difference.groupby([*keys[1:], keys[0]])
    )
    ours = f"ACP − exact in nats: {each}"
    if len(difference) < 2:
        return Verdict(Status.UNDECIDED, f"{ONE_PAIR}. {ours}")
    estimate = over_draws(difference)
    found = equivalence(estimate, LOSS_WITHIN_NATS)
    mean = f"mean {estimate.mean:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"
    return Verdict.of(found.shown, f"{ours}; {mean}, margin {LOSS_WITHIN_NATS:g}")


# --- Tables 1 and 3 ---------------------------------------------------------------------------------


def tasks_match(lm_eval_items: pd.DataFrame) -> Verdict:
    """Met if pairs of trainings rule out, in every column that tells anything, a mean difference as large as
    the paper's own pairs have; missed if they show one that is larger, for the worse or for the better."""
    table = paired.differences(lm_eval_items)
    if table.empty:
        return Verdict(Status.UNDECIDED, "no run is measured together with its exact pair")
    pairs = len(table[[*paired.SETTING, "seed"]].drop_duplicates())
    if pairs < 2:
        return Verdict(Status.UNDECIDED, ONE_PAIR)
    columns, guessed = paired.equivalences(table)
    if columns.empty:
        why = f"the exact models guess in every column ({guessed})" if guessed else "no column of the paper's"
        return Verdict(Status.UNDECIDED, why)
    within, beyond = columns["p_value"] < LEVEL, columns["adjusted_beyond_p_value"] < LEVEL
    counts = f"{within.sum()} of {len(columns)} columns"
    ours = f"{pairs} pairs: {counts} differ by less than the paper's own pairs"
    for word, some in (("beyond", columns[beyond]), ("open", columns[~within & ~beyond])):
        each = ", ".join(
            f"{row.task} {row.metric} {row.mean:+.3f} [{row.low:+.3f}, {row.high:+.3f}], "
            f"margin {row.margin:.3f}"
            for row in some.itertuples(name="Row")
        )
        ours += f"; {word}: {each}" if each else ""
    ours += f"; guessed: {guessed}" if guessed else ""
    return Verdict.of(False if beyond.any() else True if within.all() else None, ours)


# --- Figures 3 (right), 9, 11 (right), A6 ------------------------------------------------------------


def retrieval_kept(needle: pd.DataFrame) -> Verdict:
    """Met if ACP's recall is not below the exact one by more than chance, wherever that one finds
    :data:`FOUND_RECALL` of the words.

    Chance is what pairs of trainings vary by, or haystacks where one model is evaluated both ways. Undecided
    where exact attention never finds it, with one pair of trainings or one haystack, or where they vary so
    much that a loss of :data:`RECALL_POINTS` would not show."""
    table = needle_statistics.differences(needle)
    ours = needle_statistics.in_words(table)
    finds = table[table["recall_exact"] >= 100 * FOUND_RECALL]
    if finds.empty:
        return Verdict(Status.UNDECIDED, f"exact attention does not find the needle either. {ours}")
    if (finds["apart"] & (finds["seeds"] < 2)).any():
        return Verdict(Status.UNDECIDED, f"{ONE_PAIR}. {ours}")
    if finds["recall_high"].isna().any():
        return Verdict(Status.UNDECIDED, f"one haystack has no interval. {ours}")
    if (finds["recall_high"] < 0).any():
        return Verdict(Status.MISSED, ours)
    if (finds["recall_low"] <= -RECALL_POINTS).any():
        return Verdict(
            Status.UNDECIDED,
            f"too few haystacks or seeds: a loss of {RECALL_POINTS:g} points would not show. {ours}",
        )
    return Verdict(Status.MET, ours)


def needle_learnt(needle: pd.DataFrame) -> Verdict:
    """Met if the exact runs' mean recall at their training length is :data:`LEARNT_RECALL` or more."""
    longest = needle[needle["evaluated_length_tokens"] == needle["context_length_tokens"]]
    if longest.empty:
        return Verdict(Status.UNDECIDED, "not tested at the training length")
    table = needle_statistics.differences(longest)
    ours = "; ".join(
        f"{row.recall_exact:.0f} % at {style.length_label(row.context_length_tokens)}"
        for row in table.itertuples(name="Row")
    )
    return Verdict.of(bool((table["recall_exact"] >= 100 * LEARNT_RECALL).all()), ours)


# --- Figures 4, 5, 6 --------------------------------------------------------------------------------


def heads_bimodal(pruned_ratio: pd.DataFrame) -> Verdict:
    """Met if there are local and global heads, and more of both together than between."""
    if statistics.grid_limit(pruned_ratio)[0] == 0:
        return TOO_COARSE
    kinds = statistics.head_kinds(pruned_ratio)
    local, rest, everywhere = (int((kinds == k).sum()) for k in ("local", "between", "global"))
    met = local > 0 and everywhere > 0 and local + everywhere > rest
    return Verdict.of(met, f"{local} local, {everywhere} global, {rest} between")


def most_heads_local(pruned_ratio: pd.DataFrame) -> Verdict:
    """Met if more than half of the heads are local."""
    if statistics.grid_limit(pruned_ratio)[0] == 0:
        return TOO_COARSE
    local = statistics.head_kinds(pruned_ratio) == "local"
    return Verdict.of(bool(local.mean() > 0.5), f"{local.sum()} of {len(local)} heads")


def first_layers_local(pruned_ratio: pd.DataFrame) -> Verdict:
    """Met if all heads of the first two layers are local."""
    if pruned_ratio["layer"].nunique() < 3:
        return Verdict(Status.UNDECIDED, "the model has too few layers for the first two to stand out")
    if statistics.grid_limit(pruned_ratio)[0] == 0:
        return TOO_COARSE
    local = statistics.head_kinds(pruned_ratio) == "local"
    layers = [heads for _, heads in local.groupby(pruned_ratio["layer"])][:2]
    each = (f"{heads.sum()} of {len(heads)} in layer {i}" for i, heads in enumerate(layers))
    return Verdict.of(all(heads.all() for heads in layers), ", ".join(each))


def large_weights_kept(decay: pd.DataFrame, attention_weights: pd.DataFrame) -> Verdict:
    """Met if no recorded weight (over 0.1) lies left of the boundary."""
    keys = ["layer", "head", "query_position"]
    first = decay.rename(columns={"position": "query_position"})[[*keys, "first_kept_key_position"]]
    both = attention_weights.merge(first, on=keys, validate="many_to_one")
    lost = int((both["key_position"] < both["first_kept_key_position"]).sum())
    return Verdict.of(lost == 0, f"{lost} of {len(both):,} such weights are pruned")


# --- Figures 7, A1, A2, A3 --------------------------------------------------------------------------


def savings_fall_with_epsilon(epsilon_sweep: pd.DataFrame) -> Verdict:
    """Met if no smaller epsilon prunes more, and the smallest prunes less than the largest."""
    table = _swept(epsilon_sweep).sort_values("swept_log_pruning_tolerance", ascending=False)
    if len(table) < 2:
        return Verdict(Status.UNDECIDED, "only one epsilon")
    percent = 100 * table["block_pruned_ratio"]
    each = ", ".join(
        f"{p:.1f} % at {_e_to(e)}" for p, e in zip(percent, table["swept_log_pruning_tolerance"], strict=True)
    )
    met = percent.is_monotonic_decreasing and percent.iloc[-1] < percent.iloc[0]
    return Verdict.of(bool(met), each)


def default_nearly_optimal(epsilon_sweep: pd.DataFrame) -> Verdict:
    """Met if e^-1 prunes less than :data:`MARGINAL_POINTS` percentage points more than e^-10."""
    table = _swept(epsilon_sweep).set_index("swept_log_pruning_tolerance")["block_pruned_ratio"]
    if not {-1.0, -10.0} <= set(table.index):
        return Verdict(Status.UNDECIDED, "the sweep lacks e^-1 or e^-10")
    more = 100 * (table[-1.0] - table[-10.0])
    return Verdict.of(bool(more < MARGINAL_POINTS), f"{more:.1f} points more")


def loss_unmoved(epsilon_sweep: pd.DataFrame) -> Verdict:
    """Met if the loss at e^-10 is within :data:`SAME_LOSS_NATS` of that at the smallest epsilon."""
    table = _swept(epsilon_sweep).set_index("swept_log_pruning_tolerance")["loss_nats"].sort_index()
    if -10.0 not in table.index or table.index[0] >= -10.0:
        return Verdict(Status.UNDECIDED, "the sweep lacks e^-10 or a smaller epsilon")
    gap = table[-10.0] - table.iloc[0]
    words = f"{abs(gap):.6f} nats from the loss at {_e_to(table.index[0])}"
    return Verdict.of(bool(abs(gap) < SAME_LOSS_NATS), words)


def swept_mass_below_epsilon(epsilon_sweep: pd.DataFrame) -> Verdict:
    """Met if at every epsilon the largest pruned mass is below it."""
    return _mass_below(epsilon_sweep["largest_pruned_mass"], epsilon_sweep["swept_log_pruning_tolerance"])


def mass_below_epsilon(pruned_mass: pd.DataFrame) -> Verdict:
    """Met if the largest pruned mass of every head is below epsilon."""
    return _mass_below(pruned_mass["largest_pruned_mass"], pruned_mass["log_pruning_tolerance"])


def block_size_negligible(block_size: pd.DataFrame) -> Verdict:
    """Met if blocks of 32 and of 64 differ by less than :data:`MARGINAL_POINTS` percentage points."""
    one_each(block_size, ["block_tokens"], "block_size")
    percent = 100 * block_size.set_index("block_tokens")["pruned_ratio"]
    if not {32, 64} <= set(percent.index):
        return Verdict(Status.UNDECIDED, "blocks of 32 or of 64 are not measured")
    met = abs(percent[32] - percent[64]) < MARGINAL_POINTS
    return Verdict.of(bool(met), f"{percent[32]:.1f} % at 32, {percent[64]:.1f} % at 64")


def savings_grow_past_training(long_context: pd.DataFrame) -> Verdict:
    """Met if every longer evaluated length prunes more, from the training length on."""
    one_each(long_context, ["evaluated_length_tokens"], "long_context")
    trained = long_context["context_length_tokens"].iloc[0]
    if trained not in set(long_context["evaluated_length_tokens"]):
        return Verdict(
            Status.UNDECIDED, f"not evaluated at the training length, {style.length_label(trained)}"
        )
    table = long_context.sort_values("evaluated_length_tokens")
    table = table.rename(columns={"context_length_tokens": "trained"}).assign(
        context_length_tokens=table["evaluated_length_tokens"], percent=100 * table["pruned_ratio"]
    )
    return _grows(table)


# --- Table 4 ----------------------------------------------------------------------------------------


def search_is_cheap(attention_time: pd.DataFrame) -> Verdict:
    """Met if every run spends on the search what the paper's range says; beyond if some spend less."""
    table = in_order(statistics.search_share(attention_time))
    low, high = models.PUBLISHED.range("table4", "boundary_search_share")
    return in_range(table["percent"], low, high, listed(table, digits=1), less_is_better=True)


# --- helpers ----------------------------------------------------------------------------------------


def in_order(table: pd.DataFrame) -> pd.DataFrame:
    """Context lengths in order within each size; one row of each is all there may be."""
    keys = ["size", "context_length_tokens"]
    order = {size: index for index, size in enumerate(dict.fromkeys(table["size"]))}
    one_each(table, keys, "percentages")
    return table.sort_values(keys, key=lambda c: c.map(order) if c.name == "size" else c)


def listed(
    table: pd.DataFrame, column: str = "percent", digits: int = 0, sign: str = "", unit: str = " %"
) -> str:
    """ "0.2M: 48 % at 512, 75 % at 1k; 0.5M: 47 % at 512"."""
    return "; ".join(
        f"{size}: "
        + ", ".join(
            f"{value:{sign}.{digits}f}{unit} at {style.length_label(length)}"
            for value, length in zip(rows[column], rows["context_length_tokens"], strict=True)
        )
        for size, rows in table.groupby("size", sort=False)
    )


def _grows(table: pd.DataFrame, sign: str = "") -> Verdict:
    table = in_order(table)
    several = [r for _, r in table.groupby("size", sort=False)["percent"] if len(r) > 1]
    met = all((rows.diff().iloc[1:] > 0).all() for rows in several) if several else None
    note = "" if several else " (one context length only)"
    return Verdict.of(met, listed(table, sign=sign) + note)


def _swept(epsilon_sweep: pd.DataFrame) -> pd.DataFrame:
    return one_each(epsilon_sweep, ["swept_log_pruning_tolerance"], "epsilon_sweep")


def _mass_below(mass: pd.Series, log_epsilon: pd.Series) -> Verdict:
    """Rows without a pruned block have no mass and say nothing."""
    has = mass.notna()
    if not has.any():
        return Verdict(Status.UNDECIDED, "nothing is pruned")
    log_mass = mass[has].map(lambda m: math.log(m) if m > 0 else -math.inf)
    margin = log_epsilon[has] - log_mass
    nearest = margin.idxmin()
    return Verdict.of(
        bool((margin > 0).all()),
        f"nearest: {_power(mass[nearest])} where the bound is {_power(math.exp(log_epsilon[nearest]))}",
    )


def _e_to(exponent: float) -> str:
    return f"$e^{{{exponent:g}}}$"


def _power(value: float) -> str:
    """3.1e-11 -> "$3.1 \\times 10^{-11}$"."""
    digits, exponent = f"{value:.1e}".split("e")
    return f"${digits} \\times 10^{{{int(exponent)}}}$"
