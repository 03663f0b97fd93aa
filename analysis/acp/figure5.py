"""Figure 5: how the savings are spread over the heads of each layer."""

from __future__ import annotations

import itertools

import pandas as pd

from acp_repro.common.statistics import LEVEL, holm, homogeneity

from .. import drawing, style
from ..verdict import Verdict, Word
from . import naming
from .figure4 import TOO_COARSE, describe, grid_limit, head_kinds, histogram

COLUMNS = 6  # of panels
LIKE_PAPER = ("760M", 4096)  # the model of the paper's Figure 5
TRAINED = ["trained_tokens", "size"]
LAYERS_EFFECT = 0.3  # Cohen's w, a medium effect: layers that are less apart are alike


def draw(records: pd.DataFrame) -> drawing.Figure:
    """A histogram a layer: how many of its heads have each pruned ratio, coloured by the kind of head.

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
    for ax in axes[:, 0]:
        ax.set_ylabel("heads")
    axes[-1, columns // 2].set_xlabel("pruned ratio (%)")
    drawing.legend(figure)
    return figure


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    records = context.records["pruned_ratio"]
    panels = "Each panel is the histogram of one layer's heads in 20 bins. Layers are counted from 0."
    return draw(records), f"**Figure 5.** {describe(records, panels)}"


def first_layers_local(pruned_ratio: pd.DataFrame) -> Verdict:
    """Met if all heads of the first two layers prune most of the achievable maximum, in the model of the
    paper's figure; a miss is inconclusive below a tenth of the paper's tokens. Other runs are counted
    next to it."""
    words, short_of, like = [], [], {}
    for run, heads in _by_run(pruned_ratio):
        local = heads["pruned_ratio"] > grid_limit(heads)[0] / 2
        layers = [some for _, some in local.groupby(heads["layer"])][:2]
        counts = " and ".join(f"{some.sum()} of {len(some)}" for some in layers)
        short_of.append(sum(int((~some).sum()) for some in layers))
        one = heads.iloc[0]
        if (one["size"], one["context_length_tokens"]) == LIKE_PAPER and not naming.at_start(*one[TRAINED]):
            like[run] = short_of[-1], sum(map(len, layers)), one["trained_tokens"]
        words.append(f"{naming.run_name(heads.iloc[0])} ({run[0]}) {counts}")
    if not short_of:
        return Verdict(Word.INCONCLUSIVE, "no model has layers past the second, and blocks enough")
    named = [one for one, count in zip(words, short_of, strict=True) if count]
    others = f"all in {short_of.count(0)} of {len(short_of)} training runs"
    others += f"; others, in layers 0 and 1: {'; '.join(named)}" if named else ""
    if not like:
        return Verdict(Word.INCONCLUSIVE, others, "no 760M model at 4k", n=len(short_of))
    missed, heads, tokens = max(like.values())
    enough = tokens >= naming.paper_size(LIKE_PAPER[0]).tokens / 10
    short = f"{heads - missed} of {heads} heads of 760M at 4k"
    met = True if not missed else False if enough else None
    return Verdict.of(met, f"{short}, after {style.count_label(tokens)} tokens; {others}", short, n=len(like))


def layers_match_model(pruned_ratio: pd.DataFrame) -> Verdict:
    """Met if in every run the kinds of heads differ by less than :data:`LAYERS_EFFECT` between the layers
    past the second; missed if in one by more than heads that are shuffled among them; undecided where neither
    can be seen. Undertrained runs are printed alone, where there are others."""
    found, names = {}, {}
    for run, heads in _by_run(pruned_ratio):
        counts = pd.crosstab(heads["layer"], head_kinds(heads)).iloc[2:]
        # The permutation test depends on the order of the columns.
        columns = ["intermediate", "global", "local"]
        found[run] = homogeneity(counts.reindex(columns=columns, fill_value=0))
        names[run] = f"{naming.run_name(heads.iloc[0])} ({run[0]})"
    if not found:
        return Verdict(Word.INCONCLUSIVE, "no run has layers past the second, and blocks enough")
    settled = naming.settled(pruned_ratio)
    deciding = {run for run, _ in _by_run(settled)}
    judged = {run: one for run, one in found.items() if run in deciding}
    alike = {run for run, one in judged.items() if one.effect_high < LAYERS_EFFECT}
    adjusted = dict(zip(judged, holm([one.p_value for one in judged.values()]), strict=True))
    apart = [run for run in judged if adjusted[run] < LEVEL and run not in alike]
    each = "; ".join(
        f"{names[run]} {100 * one.p_value:.1f} %, {one.effect_high:.2f}" for run, one in found.items()
    )
    counts = f"alike in {len(alike)} of {len(judged)} training runs, apart in {len(apart)}"
    ours = f"{counts}. Cases that differ as much when shuffled, and largest effect: {each}"
    met = False if apart else True if len(alike) == len(judged) else None
    return Verdict.of(met, ours, counts, n=len(judged))


def _by_run(pruned_ratio: pd.DataFrame) -> list[tuple[tuple[str, str], pd.DataFrame]]:
    """The heads of each training that has layers past the second, and blocks enough."""
    suites = pruned_ratio.get("suite", pd.Series("", pruned_ratio.index))
    groups = pruned_ratio.groupby([suites, pruned_ratio["run"]], sort=False)
    return [
        (run, heads) for run, heads in groups if heads["layer"].nunique() > 2 and grid_limit(heads)[0] > 0
    ]


def a_head_prunes_nothing(pruned_ratio: pd.DataFrame) -> Verdict:
    """Met if some head prunes no block."""
    if grid_limit(pruned_ratio)[0] == 0:
        return TOO_COARSE
    none = pruned_ratio["pruned_blocks"] == 0
    several = (head_kinds(pruned_ratio) == "global").sum()
    return Verdict.of(bool(none.any()), f"{none.sum()} of {several} global heads")
