"""Eviction at equal memory: the loss after a prompt whose keys are evicted, by policy and treatment."""

from __future__ import annotations

import pandas as pd

from .. import drawing, style
from ..tables import one_each
from ..verdict import Verdict
from . import naming

NAMES = {
    "acp": "ACP",
    "window": "window and sinks",
    "lru": "least recently used",
    "random": "random, prompt protected",
    "h2o": "H2O",
    "oracle": "oracle",
}
COLOURS = (style.ROLES["acp"], *naming.COLOURS[:3], "0.5", "0.1")  # one per policy
MOST_NATS = 1e-3  # the margin between treatments of the same keys


def draw(records: pd.DataFrame) -> drawing.Figure:
    """(a) Loss increase by position with rows removed; (b) the worst row, by treatment.

    Args:
        records: ``eviction`` records of one run.
    """
    one_each(records, ["policy", "treatment", "position"], "eviction")
    figure, (left, right) = drawing.panels(2)
    treatments = [*dict.fromkeys(records["treatment"])]
    for index, (policy, name) in enumerate(NAMES.items()):
        color, line = COLOURS[index], ":" if policy == "oracle" else "-"
        rows = records[records["policy"] == policy]
        removed = rows[rows["treatment"] == "removed"].sort_values("position")
        left.plot(removed["position"], removed["loss_increase_nats"], line, color=color, label=name)
        worst = rows.groupby("treatment")["largest_loss_increase_nats"].max()[treatments]
        right.plot([x + 0.08 * (index - 2.5) for x in range(len(worst))], worst, "o", color=color)
    left.set_yscale("symlog", linthresh=MOST_NATS)
    right.set_yscale("symlog", linthresh=MOST_NATS)
    left.set(xlabel="tokens after the prompt", ylabel="loss increase (nats)", title="Rows removed")
    right.set_xticks(range(len(treatments)), treatments)
    right.set(ylabel="loss increase (nats)", title="Worst row", xlim=(-0.5, 2.5))
    drawing.legend(figure)
    return figure


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    records = context.records["eviction"]
    first = records.iloc[0]
    share = 100 * first["kept_bytes"] / first["full_bytes"]
    caption = f"""{naming.heading(context.item)} {_increases(records)}. After a prompt of
{first["prompt_tokens"]:,} tokens, each policy keeps {share:.0f} % of the bytes of the keys and values, the
percentage that ACP keeps in {naming.run_name(first)}. ACP keeps a different number of keys in each head. The
oracle keeps the keys with the largest later attention weights over all heads. The other policies keep the
same number of keys in each head. (a) Loss increase over no eviction if the evicted rows are removed from
memory. (b) The largest loss increase of a row, by treatment of the evicted keys: weights scaled by 0.1, keys
masked, or rows removed."""
    return draw(records), caption


def acp_loses_least(eviction: pd.DataFrame) -> Verdict:
    """Reproduced if removed rows raise the loss less with ACP than with each policy that does not see later
    queries, and if removing and masking rows agree within :data:`MOST_NATS` for every policy."""
    one_each(eviction, ["policy", "treatment", "position"], "eviction")
    means = _means(eviction)
    others = means["removed"].drop(["acp", "oracle"])
    gap = (means["removed"] - means["masked"]).abs().max()
    met = bool((means.loc["acp", "removed"] < others).all() and gap < MOST_NATS)
    short = (
        f"change of the loss: {means.loc['acp', 'removed']:.5f} nats with ACP, "
        f"{others.min():.3f} nats with the best baseline"
    )
    ours = f"{_increases(eviction)}\nRemoving and masking the same keys differ by at most {gap:.1e} nats"
    return Verdict.of(met, ours, short, n=len(others), unit="baseline")


def _means(records: pd.DataFrame) -> pd.DataFrame:
    """Mean loss increase in nats over bins of equal size: one row per policy, one column per treatment."""
    return records.groupby(["policy", "treatment"])["loss_increase_nats"].mean().unstack()


def _increases(records: pd.DataFrame) -> str:
    means = _means(records)["removed"].loc[[*NAMES]]
    each = ", ".join(f"{means[policy]:.2g} ({name.replace(',', ' with')})" for policy, name in NAMES.items())
    return f"Loss increase in nats with rows removed: {each}".replace("-", "−")
