"""What the paper claims, as criteria on records: each is stated in words and checked by a pure function.

A criterion is met, not met, or undecided where the records cannot tell. The words of ``holds_if`` are
all that is checked; a criterion that our smaller models miss stays "not met", with our numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pandas as pd

from . import statistics, style

# The largest difference on Wikitext between twins in Tables 1 and 3, log(31.64 / 31.05), rounded up.
LOSS_WITHIN_NATS = 0.02
MARGINAL_POINTS = 5.0  # a difference of savings that counts as marginal or negligible
SAME_LOSS_NATS = 0.001  # of one model at two epsilons


@dataclass(frozen=True)
class Verdict:
    """What a check found: ``met`` is None where the records cannot tell; ``ours`` gives the numbers
    in the Markdown of captions."""

    met: bool | None
    ours: str


TOO_COARSE = Verdict(None, "the grid has too few blocks for any head to be local")
Records = Mapping[str, pd.DataFrame]


@dataclass(frozen=True)
class Criterion:
    claim: str
    paper: str  # the paper's value and where it stands
    holds_if: str
    quantities: tuple[str, ...]
    check: Callable[..., Verdict]  # takes the records of the quantities, in order

    def judge(self, records: Records) -> Verdict:
        """Raises:
        KeyError: a quantity is missing.
        """
        return self.check(*(records[quantity] for quantity in self.quantities))


# --- Figures 2 and 10 -------------------------------------------------------------------------------


def pruned_at_longest(pruned_ratio: pd.DataFrame, low=60.0, high=80.0) -> Verdict:
    """Met if every size prunes ``low`` to ``high`` percent at its longest context."""
    table = _mean(statistics.pruned_percent(pruned_ratio))
    longest = table.groupby("size", sort=False).tail(1)
    outside = [
        name
        for name, out in (("below", longest["percent"] < low), ("above", longest["percent"] > high))
        if out.any()
    ]
    note = f" ({' and '.join(outside)} the range)" if outside else ""
    return Verdict(not outside, _listed(longest) + note)


def savings_grow(pruned_ratio: pd.DataFrame) -> Verdict:
    """Met if every size prunes more at every longer context."""
    return _grows(statistics.pruned_percent(pruned_ratio))


def time_saved(attention_time: pd.DataFrame) -> Verdict:
    """Met if every run saves at least what the paper's range begins with."""
    table = _mean(statistics.time_reduction(attention_time))
    least, _ = style.paper_range("figure2", "attention_time_reduction")
    return Verdict(bool((table["percent"] >= least).all()), _listed(table))


def throughput_not_lower(throughput: pd.DataFrame) -> Verdict:
    """Met if no run trains slower with ACP."""
    table = _mean(statistics.throughput_gain(throughput))
    return Verdict(bool((table["percent"] >= 0).all()), _listed(table, sign="+"))


def gains_grow(throughput: pd.DataFrame) -> Verdict:
    """Met if every size gains more throughput at every longer context."""
    return _grows(statistics.throughput_gain(throughput), sign="+")


# --- Figures 3, 8, 11 -------------------------------------------------------------------------------


def losses_match(loss: pd.DataFrame) -> Verdict:
    """Met if no run's mean loss is further from its exact twin's than chance puts it.

    Chance is the largest difference between two seeds of one setting, or :data:`LOSS_WITHIN_NATS`
    where every setting has one seed.
    """
    method = loss["log_pruning_tolerance"].isna().map({True: "exact", False: "acp"})
    loss = loss.assign(method=method)
    keys = ["architecture", "size", "context_length_tokens"]
    twins = loss.pivot_table(index=[*keys, "seed"], columns="method", values="loss_nats", sort=False).dropna()
    if not {"acp", "exact"} <= set(twins.columns) or twins.empty:
        return Verdict(None, "no run is measured together with its exact twin")
    gaps = (twins["acp"] - twins["exact"]).groupby(keys).mean().reset_index(name="gap")
    seeds = loss.groupby([*keys, "method"])["loss_nats"].agg(["min", "max", "count"])
    seeds = seeds[seeds["count"] > 1]
    within = LOSS_WITHIN_NATS if seeds.empty else (seeds["max"] - seeds["min"]).max()
    chance = "" if seeds.empty else f"; two seeds differ by up to {within:.3f}"
    each = "; ".join(
        f"{row.size}, {style.length_label(row.context_length_tokens)}: {row.gap:+.4f}"
        for row in gaps.sort_values(keys[1:]).itertuples(name="Row")
    )
    return Verdict(bool((gaps["gap"].abs() < within).all()), f"ACP − exact in nats: {each}{chance}")


# --- Figures 4, 5, 6 --------------------------------------------------------------------------------


def heads_bimodal(pruned_ratio: pd.DataFrame) -> Verdict:
    """Met if there are local and global heads, and more of both together than between."""
    if statistics.grid_limit(pruned_ratio)[0] == 0:
        return TOO_COARSE
    kinds = statistics.head_kinds(pruned_ratio)
    local, rest, everywhere = (int((kinds == k).sum()) for k in ("local", "between", "global"))
    met = local > 0 and everywhere > 0 and local + everywhere > rest
    return Verdict(met, f"{local} local, {everywhere} global, {rest} between")


def most_heads_local(pruned_ratio: pd.DataFrame) -> Verdict:
    """Met if more than half of the heads are local."""
    if statistics.grid_limit(pruned_ratio)[0] == 0:
        return TOO_COARSE
    local = statistics.head_kinds(pruned_ratio) == "local"
    return Verdict(bool(local.mean() > 0.5), f"{local.sum()} of {len(local)} heads")


def first_layers_local(pruned_ratio: pd.DataFrame) -> Verdict:
    """Met if all heads of the first two layers are local."""
    if pruned_ratio["layer"].nunique() < 3:
        return Verdict(None, "the model has too few layers for the first two to stand out")
    if statistics.grid_limit(pruned_ratio)[0] == 0:
        return TOO_COARSE
    local = statistics.head_kinds(pruned_ratio) == "local"
    layers = [heads for _, heads in local.groupby(pruned_ratio["layer"])][:2]
    each = (f"{heads.sum()} of {len(heads)} in layer {i}" for i, heads in enumerate(layers))
    return Verdict(all(heads.all() for heads in layers), ", ".join(each))


def large_weights_kept(decay: pd.DataFrame, attention_weights: pd.DataFrame) -> Verdict:
    """Met if no recorded weight (over 0.1) lies left of the boundary."""
    keys = ["layer", "head", "query_position"]
    first = decay.rename(columns={"position": "query_position"})[[*keys, "first_kept_key_position"]]
    both = attention_weights.merge(first, on=keys, validate="many_to_one")
    lost = int((both["key_position"] < both["first_kept_key_position"]).sum())
    return Verdict(lost == 0, f"{lost} of {len(both):,} such weights are pruned")


# --- Figures 7, A1, A2, A3 --------------------------------------------------------------------------


def savings_fall_with_epsilon(epsilon_sweep: pd.DataFrame) -> Verdict:
    """Met if no smaller epsilon prunes more, and the smallest prunes less than the largest."""
    table = epsilon_sweep.sort_values("swept_log_pruning_tolerance", ascending=False)
    if len(table) < 2:
        return Verdict(None, "only one epsilon")
    percent = 100 * table["block_pruned_ratio"]
    each = ", ".join(
        f"{p:.1f} % at {_e_to(e)}" for p, e in zip(percent, table["swept_log_pruning_tolerance"], strict=True)
    )
    met = percent.is_monotonic_decreasing and percent.iloc[-1] < percent.iloc[0]
    return Verdict(bool(met), each)


def default_nearly_optimal(epsilon_sweep: pd.DataFrame) -> Verdict:
    """Met if e^-1 prunes less than :data:`MARGINAL_POINTS` percentage points more than e^-10."""
    table = epsilon_sweep.set_index("swept_log_pruning_tolerance")["block_pruned_ratio"]
    if not {-1.0, -10.0} <= set(table.index):
        return Verdict(None, "the sweep lacks e^-1 or e^-10")
    more = 100 * (table[-1.0] - table[-10.0])
    return Verdict(bool(more < MARGINAL_POINTS), f"{more:.1f} points more")


def loss_unmoved(epsilon_sweep: pd.DataFrame) -> Verdict:
    """Met if the loss at e^-10 is within :data:`SAME_LOSS_NATS` of that at the smallest epsilon."""
    table = epsilon_sweep.set_index("swept_log_pruning_tolerance")["loss_nats"].sort_index()
    if -10.0 not in table.index or table.index[0] >= -10.0:
        return Verdict(None, "the sweep lacks e^-10 or a smaller epsilon")
    gap = table[-10.0] - table.iloc[0]
    words = f"{abs(gap):.6f} nats from the loss at {_e_to(table.index[0])}"
    return Verdict(bool(abs(gap) < SAME_LOSS_NATS), words)


def swept_mass_below_epsilon(epsilon_sweep: pd.DataFrame) -> Verdict:
    """Met if at every epsilon the largest pruned mass is below it."""
    return _mass_below(epsilon_sweep["largest_pruned_mass"], epsilon_sweep["swept_log_pruning_tolerance"])


def mass_below_epsilon(pruned_mass: pd.DataFrame) -> Verdict:
    """Met if the largest pruned mass of every head is below epsilon."""
    return _mass_below(pruned_mass["largest_pruned_mass"], pruned_mass["log_pruning_tolerance"])


def block_size_negligible(block_size: pd.DataFrame) -> Verdict:
    """Met if blocks of 32 and of 64 differ by less than :data:`MARGINAL_POINTS` percentage points."""
    percent = 100 * block_size.set_index("block_tokens")["pruned_ratio"]
    if not {32, 64} <= set(percent.index):
        return Verdict(None, "blocks of 32 or of 64 are not measured")
    met = abs(percent[32] - percent[64]) < MARGINAL_POINTS
    return Verdict(bool(met), f"{percent[32]:.1f} % at 32, {percent[64]:.1f} % at 64")


def savings_grow_past_training(long_context: pd.DataFrame) -> Verdict:
    """Met if every longer evaluated length prunes more, from the training length on."""
    trained = long_context["context_length_tokens"].iloc[0]
    if trained not in set(long_context["evaluated_length_tokens"]):
        return Verdict(None, f"not evaluated at the training length, {style.length_label(trained)}")
    table = long_context.sort_values("evaluated_length_tokens")
    table = table.rename(columns={"context_length_tokens": "trained"}).assign(
        context_length_tokens=table["evaluated_length_tokens"], percent=100 * table["pruned_ratio"]
    )
    return _grows(table)


# --- Table 4 ----------------------------------------------------------------------------------------


def search_is_cheap(attention_time: pd.DataFrame) -> Verdict:
    """Met if no run spends more of its attention time on the search than the paper's range ends with."""
    table = _mean(statistics.search_share(attention_time))
    _, most = style.paper_range("table4", "boundary_search_share")
    return Verdict(bool((table["percent"] <= most).all()), _listed(table, digits=1))


# --- helpers ----------------------------------------------------------------------------------------


def _mean(table: pd.DataFrame) -> pd.DataFrame:
    """Seeds averaged; context lengths in order within each size."""
    keys = ["size", "context_length_tokens"]
    order = {size: index for index, size in enumerate(dict.fromkeys(table["size"]))}
    mean = table.groupby(keys, sort=False)["percent"].mean().reset_index()
    return mean.sort_values(keys, key=lambda c: c.map(order) if c.name == "size" else c)


def _listed(table: pd.DataFrame, digits: int = 0, sign: str = "") -> str:
    """ "0.2M: 48 % at 512, 75 % at 1k; 0.5M: 47 % at 512"."""
    return "; ".join(
        f"{size}: "
        + ", ".join(
            f"{row.percent:{sign}.{digits}f} % at {style.length_label(row.context_length_tokens)}"
            for row in rows.itertuples()
        )
        for size, rows in table.groupby("size", sort=False)
    )


def _grows(table: pd.DataFrame, sign: str = "") -> Verdict:
    table = _mean(table)
    several = [r for _, r in table.groupby("size", sort=False)["percent"] if len(r) > 1]
    met = all((rows.diff().iloc[1:] > 0).all() for rows in several) if several else None
    note = "" if several else " (one context length only)"
    return Verdict(met, _listed(table, sign=sign) + note)


def _mass_below(mass: pd.Series, log_epsilon: pd.Series) -> Verdict:
    """Rows without a pruned block have no mass and say nothing."""
    has = mass.notna()
    if not has.any():
        return Verdict(None, "nothing is pruned")
    log_mass = mass[has].map(lambda m: math.log(m) if m > 0 else -math.inf)
    margin = log_epsilon[has] - log_mass
    nearest = margin.idxmin()
    return Verdict(
        bool((margin > 0).all()),
        f"nearest: {_power(mass[nearest])} where the bound is {_power(math.exp(log_epsilon[nearest]))}",
    )


def _e_to(exponent: float) -> str:
    return f"$e^{{{exponent:g}}}$"


def _power(value: float) -> str:
    """3.1e-11 -> "$3.1 \\times 10^{-11}$"."""
    digits, exponent = f"{value:.1e}".split("e")
    return f"${digits} \\times 10^{{{int(exponent)}}}$"
