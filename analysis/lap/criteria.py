"""Checks of what the LAP article claims: pure functions from records to a verdict.

The words of each criterion stand in ``acp_repro.papers.lap.claims`` (``holds_if``), which names the function
here that checks them.
"""

from __future__ import annotations

import pandas as pd

from acp_repro.common.statistics import LEVEL, p_above_guessing, share_error
from acp_repro.papers.lap.claims import (
    ACCURACY,
    BLEU,
    CLOSE,
    FASTER_BELOW,
    GAP,
    OWN_SHARE,
    OWN_WINDOW,
    ROUGE,
    SMALL_ACCURACY,
    SMALL_KEPT,
)

from ..tables import one_each
from ..verdict import Status, Verdict
from . import slices
from .figure_savings import PANELS, relative

NO_GATES = Verdict(Status.UNDECIDED, "no run with gates is measured")


def drops_and_learns(dynamics: pd.DataFrame) -> Verdict:
    """Met if the last tenth of training keeps less than the first look and is more accurate, or accurate."""
    accuracy = dynamics[dynamics["series"] == "accuracy"].set_index("step")["value"]
    kept = dynamics[dynamics["series"] == "kept_ratio"]
    kept = kept[kept["gate_index"] == kept["gate_index"].max()].set_index("step")["value"]
    late = accuracy.index >= 0.9 * accuracy.index.max()
    ends = accuracy[late].mean(), kept[late].mean()
    ours = f"accuracy {accuracy.iloc[0]:.2f} to {ends[0]:.2f}, kept {kept.iloc[0]:.0%} to {ends[1]:.0%}"
    learns = ends[0] > accuracy.iloc[0] or ends[0] >= SMALL_ACCURACY
    return Verdict.of(learns and ends[1] < kept.iloc[0], ours)


def _gated(reconstruction: pd.DataFrame, decoding: str) -> pd.DataFrame:
    records = one_each(reconstruction, ["run", "decoding"], "reconstruction")
    return records[records["compression"].notna() & (records["decoding"] == decoding)].set_index("run")


def article_scores(reconstruction: pd.DataFrame) -> Verdict:
    """Met if a gated run reaches all three scores of the article with fewer tokens."""
    runs = _gated(reconstruction, "removed")
    if runs.empty:
        return NO_GATES
    met = (
        (runs["token_accuracy"] >= ACCURACY)
        & (runs["bleu"] >= BLEU)
        & (runs["rouge_l"] >= ROUGE)
        & (runs["kept_ratio"] <= 0.95)
    )
    ours = "; ".join(
        f"{name}: {r.token_accuracy:.3f}, {r.bleu:.3f}, {r.rouge_l:.3f} at {r.kept_ratio:.0%}"
        for name, r in runs.iterrows()
    )
    return Verdict.of(met.any(), ours)


def small_goal(reconstruction: pd.DataFrame) -> Verdict:
    """Met if a gated run keeps few tokens and its accuracy."""
    runs = _gated(reconstruction, "removed")
    if runs.empty:
        return NO_GATES
    met = (runs["token_accuracy"] >= SMALL_ACCURACY) & (runs["kept_ratio"] <= SMALL_KEPT)
    return Verdict.of(
        met.any(),
        "; ".join(f"{name}: {r.token_accuracy:.3f} at {r.kept_ratio:.0%}" for name, r in runs.iterrows()),
    )


def _gap(reconstruction: pd.DataFrame, training_mask: str) -> Verdict:
    """Met if no run that was trained with such gates loses more than ``GAP`` of its accuracy by removal."""
    soft, removed = (_gated(reconstruction, name) for name in ("soft", "removed"))
    runs = removed.index[removed["training_mask"] == training_mask]
    if runs.empty:
        return Verdict(Status.ABSENT, "no such run is in the suite")
    gaps = (soft["token_accuracy"] - removed["token_accuracy"])[runs]
    ours = "; ".join(
        f"{name}: {gap:+.3f}, {removed['kept_ratio'][name]:.0%} kept" for name, gap in gaps.items()
    )
    return Verdict.of((gaps <= GAP).all(), ours)


def soft_gap(reconstruction: pd.DataFrame) -> Verdict:
    """Met if soft masks may become removal, by either reading of the gate."""
    return _gap(reconstruction, "soft")


def hard_concrete_gap(reconstruction: pd.DataFrame) -> Verdict:
    """Met if hard concrete gates may become removal."""
    return _gap(reconstruction, "hard_concrete")


def free_running(reconstruction: pd.DataFrame) -> Verdict:
    """Met if a gated run writes more than half of the texts word for word."""
    runs = _gated(reconstruction, "free")
    if runs.empty:
        return NO_GATES
    ours = "; ".join(f"{name}: {r.exact_match:.0%}" for name, r in runs.iterrows())
    return Verdict.of((runs["exact_match"] > 0.5).any(), ours)


def lambda_compresses(reconstruction: pd.DataFrame) -> Verdict:
    """Met if no larger lambda keeps more, among runs with hard concrete gates that differ in it alone."""
    runs = _gated(reconstruction, "removed")
    runs = runs[runs["training_mask"] == "hard_concrete"]
    groups = [group.sort_values("compression") for _, group in runs.groupby(["gate", "seed"])]
    groups = [group for group in groups if len(group) > 1]
    if not groups:
        return Verdict(Status.UNDECIDED, "no two runs with hard concrete gates differ in lambda alone")
    ours = "; ".join(
        f"λ {r.compression:g}: {r.kept_ratio:.0%}" for group in groups for r in group.itertuples()
    )
    return Verdict.of(all((group["kept_ratio"].diff().dropna() <= 0).all() for group in groups), ours)


def probe_close(probe: pd.DataFrame) -> Verdict:
    """Met if kept vectors are close to all tokens' vectors and clearly better than the larger class."""
    found = one_each(probe, ["run", "classifier"], "probe").set_index("classifier")["accuracy"]
    kept, whole = found["kept_votes"], found["all_tokens_votes"]
    chance = probe["larger_class"].iloc[0]
    ours = f"kept {kept:.3f}, all tokens {whole:.3f}, bag of words {found['bag_of_words']:.3f}, "
    texts = int(probe["measured_texts"].iloc[0])
    error = share_error(kept, texts)
    ours += f"larger class {chance:.3f}, standard error {error:.3f}"
    met = kept >= whole - CLOSE and kept > chance
    if met and p_above_guessing(round(kept * texts), texts, chance) >= LEVEL:
        return Verdict(Status.UNDECIDED, ours)
    return Verdict.of(met, ours)


def own_slice(attribution: pd.DataFrame) -> Verdict:
    """Met if most attribution of vectors, EOS apart, is near their origin."""
    share = slices.near(slices.positive(attribution), OWN_WINDOW)
    if share is None:
        return Verdict(Status.UNDECIDED, "no vector but EOS has positive attribution")
    return Verdict.of(share >= OWN_SHARE, f"{share:.0%} within {OWN_WINDOW} tokens")


def eos_is_global(attribution: pd.DataFrame) -> Verdict:
    """Met if the attribution of EOS is less concentrated than that of other vectors."""
    found = slices.concentration(slices.positive(attribution))
    if len(found) < 2:
        return Verdict(Status.UNDECIDED, "EOS, or every other vector, has no positive attribution")
    ours = f"on its largest fifth of tokens: EOS {found[True]:.0%}, others {found[False]:.0%}"
    return Verdict.of(found[True] < found[False], ours)


def encoder_saves(removal_time: pd.DataFrame) -> Verdict:
    """Met if the encoder with removal is faster and smaller wherever few tokens are kept."""
    return _saves(removal_time, "encoder_ms", "encoder_peak_bytes")


def decoder_saves(removal_time: pd.DataFrame) -> Verdict:
    """Met if the decoder with removal is faster and smaller wherever few tokens are kept."""
    return _saves(removal_time, "decoder_ms", "decoder_peak_bytes", "memory_bytes")


def _saves(removal_time: pd.DataFrame, *columns: str) -> Verdict:
    worst = {}
    for column in columns:
        table, title = relative(removal_time, column), PANELS[column]
        worst[title] = table.loc[table["kept_ratio"] <= FASTER_BELOW, "relative"].max()
    ours = ", ".join(f"{title} at most {value:.2f} of that with masks" for title, value in worst.items())
    if any(pd.isna(value) for value in worst.values()):
        return Verdict(Status.UNDECIDED, "no kept share was that small")
    return Verdict.of(all(value < 1 for value in worst.values()), ours)
