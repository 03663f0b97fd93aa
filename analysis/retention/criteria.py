"""Whether the records show what the paper on Adaptive Retention claims: the checks that its claims name."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pandas as pd

from acp_repro.common.statistics import LEVEL, Estimate, holm, share_error
from acp_repro.papers.retention.claims import KEPT_OF_DENSE, PLATEAU_POINTS, SLOPE_WITHIN

from ..verdict import Verdict
from . import figure2, figureC, figureE
from .figure2 import DEFAULTS


def _test_means(score: pd.DataFrame) -> pd.DataFrame:
    """One row a task, method, budget and place of the gates: the first score of the test split, mean over
    seeds, and its standard error in points, from the number of examples and from how seeds differ."""
    test = score[score["split"] == "test"]
    first = test.groupby("dataset")["metric"].transform("first")
    test = test[test["metric"] == first]
    key = ["dataset", "backbone", "method", "budget", "gates"]
    table = test.groupby(key, as_index=False).agg(
        mean=("score_percent", "mean"),
        std=("score_percent", "std"),
        seeds=("seed", "nunique"),
        examples=("measured_examples", "max"),
    )
    # Of a share: seeds are tested on the same examples, so more of them make it no smaller. One seed alone
    # says nothing of how seeds differ.
    of_examples = 100 * share_error((table["mean"] / 100).clip(upper=1), table["examples"])
    table["error"] = (of_examples**2 + table["std"].fillna(0.0) ** 2 / table["seeds"]) ** 0.5
    return table


def _against(score: pd.DataFrame, method: str) -> pd.DataFrame:
    """Adaptive Retention beside another method, at the same place and budget (dense: at any)."""
    table = _test_means(score)
    ours, other = table[table["method"] == "ar"], table[table["method"] == method]
    on = ["dataset", "backbone"] + ([] if method == "dense" else ["budget", "gates"])
    return ours.merge(other, on=on, suffixes=("", "_other"))


def keeps_dense_score(score: pd.DataFrame) -> Verdict:
    pairs = _against(score, "dense")
    if pairs.empty:
        return Verdict.of(None, "no task has both a dense model and Adaptive Retention")
    share = pairs["mean"] / pairs["mean_other"]
    margin = pairs["mean"] - KEPT_OF_DENSE * pairs["mean_other"]
    error = (pairs["error"] ** 2 + (KEPT_OF_DENSE * pairs["error_other"]) ** 2) ** 0.5
    words = "; ".join(
        f"{r.dataset}, {r.gates.replace('_', ' ')}: {r.mean:.1f} ± {e:.1f} of {r.mean_other:.1f} "
        f"({100 * s:.1f} %)"
        for r, s, e in zip(pairs.itertuples(), share, pairs["error"], strict=True)
    )
    return Verdict.of(_shown(margin, error), words)


def _shown(margins: Iterable[float], errors: Iterable[float]) -> bool | None:
    """Met where the interval of every margin lies above 0; missed where one lies below it, after Holm's
    correction, since one is enough then."""
    estimates = [Estimate(*pair, math.inf) for pair in zip(margins, errors, strict=True)]
    if all(one.interval().low > 0 for one in estimates):
        return True
    below = holm([one._replace(mean=-one.mean).p_above(0) for one in estimates])
    return False if 2 * below.min() < LEVEL else None


def beats_random(score: pd.DataFrame) -> Verdict:
    return _beats(score, "random")


def beats_h2o(score: pd.DataFrame) -> Verdict:
    return _beats(score, "h2o")


def _beats(score: pd.DataFrame, method: str) -> Verdict:
    pairs = _against(score, method)
    if pairs.empty:
        return Verdict.of(None, "no task has both at the same place and budget")
    gain = pairs["mean"] - pairs["mean_other"]
    error = (pairs["error"] ** 2 + pairs["error_other"] ** 2) ** 0.5
    words = "; ".join(
        f"{r.dataset}, {r.gates.replace('_', ' ')}: {g:+.1f} ± {e:.1f} points"
        for r, g, e in zip(pairs.itertuples(), gain, error, strict=True)
    )
    return Verdict.of(_shown(gain, error), words)


def ablations_lose(score: pd.DataFrame) -> Verdict:
    table = _test_means(score)
    full = table[table["method"] == "ar"]
    cut = table[table["method"].str.startswith("ar_")]
    pairs = cut.merge(full, on=["dataset", "backbone", "budget", "gates"], suffixes=("", "_full"))
    if pairs.empty:
        return Verdict.of(None, "no ablation beside the full method")
    loss = pairs["mean_full"] - pairs["mean"]
    error = (pairs["error"] ** 2 + pairs["error_full"] ** 2) ** 0.5
    words = "; ".join(
        f"{r.dataset}, {r.method.removeprefix('ar_').replace('_', ' ')}, {100 * r.budget:g} %: "
        f"{-x:+.1f} ± {e:.1f}"
        for r, x, e in zip(pairs.itertuples(), loss, error, strict=True)
    )
    return Verdict.of(_shown(loss, error), words)


def _longest(speed: pd.DataFrame) -> pd.DataFrame:
    longest = speed.groupby("dataset")["length_tokens"].transform("max")
    return speed[(speed["length_tokens"] == longest) & (speed["method"] == "ar")]


def throughput_rises(speed: pd.DataFrame) -> Verdict:
    table = _longest(speed)
    table = table[table["budget"] == 0.3]
    if table.empty:
        return Verdict.of(None, "Adaptive Retention at 30 % is not timed")
    ratio = table["dense_batch_ms"] / table["batch_ms"]
    words = "; ".join(
        f"{r.dataset}, {r.gates.replace('_', ' ')}, {r.length_tokens:,} tokens: {x:.2f}x"
        for r, x in zip(table.itertuples(), ratio, strict=True)
    )
    return Verdict.of((ratio >= 1.8).all(), words)


def scorer_is_cheap(speed: pd.DataFrame) -> Verdict:
    table = _longest(speed)
    if table.empty:
        return Verdict.of(None, "Adaptive Retention is not timed")
    share = 100 * table["scorer_ms"] / table["batch_ms"]
    return Verdict.of((share < 2).all(), f"{share.min():.1f} to {share.max():.1f} % of a batch's time")


def memory_falls(speed: pd.DataFrame) -> Verdict:
    table = _longest(speed).dropna(subset=["peak_memory_bytes"])
    if table.empty:
        return Verdict.of(None, "a CPU's peak memory is not measured")
    saved = 1 - table["peak_memory_bytes"] / table["dense_peak_memory_bytes"]
    need = table["budget"].map({0.5: 0.35, 0.3: 0.45})
    words = "; ".join(
        f"{r.dataset}, {r.gates.replace('_', ' ')}, {100 * r.budget:g} %: {100 * s:.0f} % less"
        for r, s in zip(table.itertuples(), saved, strict=True)
    )
    return Verdict.of((saved[need.notna()] >= need.dropna()).all(), words)


def budget_holds(tokens_kept: pd.DataFrame) -> Verdict:
    table = tokens_kept[(tokens_kept["layer"] > 0) & (tokens_kept["schedule"] != "profile")]
    over = table["kept_share"] - table["budget"]
    worst = table.loc[over.idxmax()]
    words = (
        f"at most {100 * worst['kept_share']:.1f} % at a budget of {100 * worst['budget']:g} % "
        f"({worst['schedule']}, layer {worst['layer']})"
    )
    return Verdict.of((over <= 0).all(), words)


def plateau(score: pd.DataFrame) -> Verdict:
    words, margins, errors = [], [], []
    for name in DEFAULTS:
        table = figure2.swept(score, name)
        for (task, _, budget, gates), line in table.groupby(["dataset", "backbone", "budget", "gates"]):
            default = line[line[name] == DEFAULTS[name]]["score_percent"]
            if len(line) < 2 or default.empty:
                continue
            off = (line["score_percent"] - default.iloc[0]).abs().max()
            # Two models on the same examples, each with the error of a share.
            of_one = share_error(default.iloc[0] / 100, line["measured_examples"].max())
            errors.append(100 * 2**0.5 * of_one)
            margins.append(PLATEAU_POINTS - off)
            place = f"{task}, {gates.replace('_', ' ')}, {100 * budget:g} %"
            words.append(f"{name.replace('_', ' ')} ({place}): {off:.1f} ± {errors[-1]:.1f} points")
    if not words:
        return Verdict.of(None, "nothing is swept")
    return Verdict.of(_shown(margins, errors), "; ".join(words))


def slack_bounded(slackness: pd.DataFrame) -> Verdict:
    table = figureC.bounds(slackness)
    beyond = table[table["weighted_slack_nats"] > table["gap_nats"]]
    words = f"it holds for {len(table) - len(beyond)} of {len(table)} gates"
    if len(beyond):
        worst = beyond.loc[(beyond["weighted_slack_nats"] - beyond["gap_nats"]).idxmax()]
        words += (
            f"; in {worst['run']} lambda A is {worst['weighted_slack_nats']:.3f} and the gap "
            f"{worst['gap_nats']:.3f} nats, so the trained model is no minimiser of the Lagrangian"
        )
    return Verdict.of(beyond.empty, words)


def unbiased(estimator: pd.DataFrame) -> Verdict:
    table = estimator[
        (estimator["relaxation"] == "hard_concrete")
        & (estimator["swept_temperature"] == DEFAULTS["temperature"])
    ]
    ok = table["relative_bias"] <= 3 * table["relative_bias_error"]
    low, high = 100 * table["relative_bias"].min(), 100 * table["relative_bias"].max()
    error = 100 * table["relative_bias_error"].max()
    words = f"the bias is {low:.1f} to {high:.1f} % of the gradient, its standard error at most {error:.2f} %"
    return Verdict.of(ok.all(), words)


def variance_falls(variance: pd.DataFrame) -> Verdict:
    found = figureE.slope(variance)
    return Verdict.of(math.isclose(found, -1, abs_tol=SLOPE_WITHIN), f"slope {found:.3f}")


def complexity_bounded(complexity: pd.DataFrame) -> Verdict:
    over = complexity["complexity_ratio"] / complexity["claimed_ratio"]
    off = (complexity["complexity_ratio"] / complexity["root_ratio"] - 1).abs().max()
    words = (
        f"up to {over.max():.1f} times the claimed M/T; within {100 * off:.0f} % of the square root of M/T"
    )
    return Verdict.of((over <= 1.01).all(), words)


def saves_more_when_longer(speed: pd.DataFrame) -> Verdict:
    table = speed[speed["method"] == "ar"].copy()
    table["ratio"] = table["dense_batch_ms"] / table["batch_ms"]
    key = ["dataset", "backbone", "budget", "gates"]
    lines = [line.sort_values("length_tokens") for _, line in table.groupby(key)]
    words = "; ".join(
        f"{line['dataset'].iloc[0]}, {line['gates'].iloc[0].replace('_', ' ')}, "
        f"{100 * line['budget'].iloc[0]:g} %: "
        + ", ".join(f"{x:.2f}x at {n:,}" for n, x in zip(line["length_tokens"], line["ratio"], strict=True))
        for line in lines
    )
    lines = [line for line in lines if len(line) > 1]
    if not lines:
        return Verdict.of(None, words or "not timed at two lengths")
    met = all((line["ratio"] >= 1).all() and line["ratio"].is_monotonic_increasing for line in lines)
    return Verdict.of(met, words)
