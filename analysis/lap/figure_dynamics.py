"""Training dynamics: accuracy, the overall keep ratio and the keep ratio of each gate against steps."""

from __future__ import annotations

import pandas as pd

from .. import drawing
from ..verdict import Verdict
from . import naming

MOST_KEPT = 0.99  # keep ratio above which no gate counts as removing tokens
GATES = ("#56B4E9", "#CC79A7", "#E69F00", "#555555")
STYLES = {"removed": {"lw": 2.5, "alpha": 0.45}, "soft mask": {"lw": 1, "ls": "--", "zorder": 3}}


def draw(records: pd.DataFrame) -> drawing.Figure | None:
    """(a) Accuracy and overall keep ratio, removed and soft. (b) The keep ratio of each gate. None if no gate
    removes a token, because every curve is then a line at 1.

    Args:
        records: ``dynamics`` records of one run.
    """
    if records.loc[records["series"] == "keep_ratio", "value"].min() > MOST_KEPT:
        return None
    figure, (left, right) = drawing.panels(2, 2.8, sharey=True)
    last = records["gate_index"].max()
    for name, colour, shown in (("accuracy", "#009E73", "accuracy"), ("keep_ratio", "#D55E00", "keep ratio")):
        for mask, style in STYLES.items():
            series = name if mask == "removed" else "soft_" + name.removeprefix("keep_")
            curve = records[records["series"] == series]
            if name == "keep_ratio":
                curve = curve[curve["gate_index"] == last]
            left.plot(curve["step"], curve["value"], color=colour, label=f"{shown}, {mask}", **style)
    ratios = records[records["series"] == "keep_ratio"].pivot(
        index="step", columns="gate_index", values="value"
    )
    of_gate = ratios / ratios.shift(axis=1, fill_value=1.0)
    for gate, column in enumerate(of_gate):
        right.plot(of_gate.index, of_gate[column], color=GATES[gate % 4], label=f"gate {gate + 1}")
    left.set_title("Accuracy and keep ratio")
    right.set_title("Keep ratio of each gate")
    left.set(ylim=(0, 1.03), ylabel="accuracy, keep ratio", xlabel="step")
    right.set(ylabel="keep ratio of the gate", xlabel="step")
    drawing.legend(figure)
    return figure


def make(context: drawing.DrawContext) -> tuple[drawing.Figure | None, str]:
    records = context.records["dynamics"]
    run = context.runs[0]
    name = naming.name_of(run.compression, run.training_mask)
    curves = _change(records)
    figure = draw(records)
    if figure is None:
        words = (
            f"Run {run.name} ({name}) removes no token, so the curves are not plotted. In this run, {curves}."
        )
        return None, f"**Training dynamics.** {words}"
    caption = f"""**Training dynamics.** In run {run.name} ({name}), {curves}. (a) Accuracy on held-out text
with teacher forcing, and the keep ratio. Wide lines are measured with dropped tokens removed. Dashed lines
are measured with the soft mask, whose keep ratio is {naming.SOFT_RATIO}. (b) Tokens kept by each gate,
relative to the tokens that reach the gate."""
    return figure, caption


def _change(dynamics: pd.DataFrame) -> str:
    """The change of accuracy and keep ratio during training, as part of a sentence."""
    accuracy = dynamics[dynamics["series"] == "accuracy"].set_index("step")["value"]
    kept = dynamics[dynamics["series"] == "keep_ratio"]
    kept = kept[kept["gate_index"] == kept["gate_index"].max()].set_index("step")["value"]
    late = accuracy.index >= 0.9 * accuracy.index.max()
    return (
        "from the first evaluation to the last tenth of training, the accuracy changes from "
        f"{accuracy.iloc[0]:.2f} to {accuracy[late].mean():.2f} and the keep ratio from "
        f"{100 * kept.iloc[0]:.0f} to {100 * kept[late].mean():.0f} %"
    )


def layers_compress(dynamics: pd.DataFrame) -> Verdict:
    """Met if, over the last tenth of training, each gate keeps fewer tokens than the previous gate."""
    late = dynamics[(dynamics["series"] == "keep_ratio") & (dynamics["step"] >= 0.9 * dynamics["step"].max())]
    kept = late.groupby("gate_index")["value"].mean()
    if kept.empty or dynamics["compression"].isna().all():
        return Verdict.of(None, "the run has no gates")
    ours = f"keep ratio after gates 1 to {len(kept)}: {', '.join(f'{100 * share:.0f} %' for share in kept)}"
    return Verdict.of(bool((kept.diff().iloc[1:] < 0).all()), ours)
