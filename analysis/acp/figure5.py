"""Figure 5: the distribution of pruned ratios over the heads of each layer."""

from __future__ import annotations

import itertools

import pandas as pd

from acp_repro.common.statistics import LEVEL, holm, homogeneity

from .. import drawing, style
from ..verdict import Verdict, Word
from . import naming
from .figure4 import TOO_COARSE, describe, grid_limit, head_kinds, histogram

COLUMNS = 6  # columns of panels
LIKE_PAPER = ("760M", 4096)  # the model of the paper's Figure 5
LAYERS_EFFECT = 0.3  # Cohen's w, a medium effect; layers are similar below it


def draw(records: pd.DataFrame) -> drawing.Figure:
    """One histogram per layer of the heads' pruned ratios, coloured by the kind of head.

    Args:
        records: ``pruned_ratio`` records of one run.
    """
    layers = sorted(records["layer"].unique())
    columns = min(len(layers), COLUMNS)
    rows = -(-len(layers) // columns)
    figure, axes = drawing.panels(
        columns, 0.6 + 0.8 * rows, rows=rows, sharex=True, sharey=True, squeeze=False
    )
    for ax, layer in itertools.zip_longest(axes.flat, layers):
        if layer is None:
            ax.set_visible(False)
            continue
        histogram(ax, records, (records["layer"] == layer).to_numpy(), 1)
        drawing.note(ax, f"layer {layer}", (2, ax.get_ylim()[1]), (1, -1))
    axes[0, 0].set(xlim=(0, 100))
    axes[-1, columns // 2].set_xlabel("pruned ratio (%)")
    figure.supylabel("heads")
    drawing.legend(figure)
    return figure


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    records = context.records["pruned_ratio"]
    panels = "Each panel is the histogram of one layer's heads in 20 bins. Layers are counted from 0."
    return draw(records), f"{naming.heading(context.item)} {describe(records, panels)}"


def first_layers_local(pruned_ratio: pd.DataFrame) -> Verdict:
    """Reproduced if all heads of the first two layers prune more than half of the achievable maximum, in the
    model of the paper's figure. A failure is inconclusive below a tenth of the paper's tokens. The other runs
    are listed and do not decide."""
    rows = []
    for (suite, _), heads in _by_run(pruned_ratio):
        local = heads["pruned_ratio"] > grid_limit(heads)[0] / 2
        layers = local.groupby(heads["layer"]).agg(["sum", "size"]).iloc[:2]
        counts = " and ".join(f"{found} of {count}" for found, count in layers.to_numpy())
        missed, one = int((layers["size"] - layers["sum"]).sum()), heads.iloc[0]
        words = f"{naming.run_name(one)} of suite {suite}: {counts} heads"
        rows.append(one.to_dict() | {"missed": missed, "first_heads": layers["size"].sum(), "words": words})
    if not rows:
        return Verdict(Word.INCONCLUSIVE, "no model has layers past the second and enough blocks")
    table = pd.DataFrame(rows)
    others = f"All heads of both layers do so in {(table['missed'] == 0).sum()} of {len(table)} training runs"
    if named := list(table.loc[table["missed"] > 0, "words"]):
        others += "\n".join(["\nHeads that do so in layer 0 and in layer 1 of the other runs:", *named])
    like = table[(table["size"] == LIKE_PAPER[0]) & (table["context_length_tokens"] == LIKE_PAPER[1])]
    like = like[~naming.starting(like)].sort_values(["missed", "first_heads", "trained_tokens"])
    if like.empty:
        return Verdict(Word.INCONCLUSIVE, others, "no 760M model at 4k", n=len(table))
    worst = like.iloc[-1]
    enough = worst["trained_tokens"] >= naming.paper_size(LIKE_PAPER[0]).tokens / 10
    met = True if not worst["missed"] else False if enough else None
    local = f"{worst['first_heads'] - worst['missed']} of {worst['first_heads']} heads"
    short = f"{local} prune more than half of the achievable maximum"
    short += ", after too few tokens to decide" * (not enough)
    ours = f"{short}\nThis model is trained on {style.count_label(worst['trained_tokens'])} tokens\n{others}"
    return Verdict.of(met, ours, short, n=len(like))


def layers_match_model(pruned_ratio: pd.DataFrame) -> Verdict:
    """Reproduced if the kinds of heads differ between the layers past the second by less than
    :data:`LAYERS_EFFECT` in every run; contradicted if a permutation test shows a difference in another run;
    otherwise inconclusive. Undertrained runs are listed and do not decide if other runs exist."""
    found, names = {}, {}
    for run, heads in _by_run(pruned_ratio):
        counts = pd.crosstab(heads["layer"], head_kinds(heads)).iloc[2:]
        # The permutation test depends on the order of the columns.
        columns = ["intermediate", "global", "local"]
        found[run] = homogeneity(counts.reindex(columns=columns, fill_value=0))
        names[run] = f"{naming.run_name(heads.iloc[0])} of suite {run[0]}"
    if not found:
        return Verdict(Word.INCONCLUSIVE, "no run has layers past the second and enough blocks")
    settled = naming.settled(pruned_ratio)
    deciding = {run for run, _ in _by_run(settled)}
    judged = {run: one for run, one in found.items() if run in deciding}
    alike = {run for run, one in judged.items() if one.effect_high < LAYERS_EFFECT}
    adjusted = dict(zip(judged, holm([one.p_value for one in judged.values()]), strict=True))
    apart = [run for run in judged if adjusted[run] < LEVEL and run not in alike]
    each = "\n".join(
        f"{names[run]}: p = {one.p_value:.3f}, w ≤ {one.effect_high:.2f}" for run, one in found.items()
    )
    counts = (
        f"similar proportions in {len(alike)} of {len(judged)} training runs, different proportions in "
        f"{len(apart)}, undecided in {len(judged) - len(alike) - len(apart)}"
    )
    ours = (
        f"{counts}\nThe null hypothesis of p is that all these layers have one distribution of head kinds"
        f"\nThe values of p precede Holm's correction. The bound of w is one-sided at 95 %\n{each}"
    )
    met = False if apart else True if len(alike) == len(judged) else None
    return Verdict.of(met, ours, counts, n=len(judged))


def _by_run(pruned_ratio: pd.DataFrame) -> list[tuple[tuple[str, str], pd.DataFrame]]:
    """The heads of each training run that has layers past the second and enough blocks."""
    suites = pruned_ratio.get("suite", pd.Series("", pruned_ratio.index))
    groups = pruned_ratio.groupby([suites, pruned_ratio["run"]], sort=False)
    return [
        (run, heads) for run, heads in groups if heads["layer"].nunique() > 2 and grid_limit(heads)[0] > 0
    ]


def a_head_prunes_nothing(pruned_ratio: pd.DataFrame) -> Verdict:
    """Reproduced if at least one head prunes no block."""
    if grid_limit(pruned_ratio)[0] == 0:
        return TOO_COARSE
    none = pruned_ratio["pruned_blocks"] == 0
    several = (head_kinds(pruned_ratio) == "global").sum()
    return Verdict.of(bool(none.any()), f"{none.sum()} of the {several} global heads prune no block")
