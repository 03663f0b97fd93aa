"""Figure A8: FoX (Pro) against its RoPE baseline, the Transformer (Pro)."""

from __future__ import annotations

import itertools

import pandas as pd

from acp_repro.common.statistics import LEVEL, over_draws

from .. import drawing, style
from ..tables import side_by_side
from ..verdict import Verdict, Word
from . import naming, paired

ON_PAR_NATS = 0.01  # 1 % of perplexity


def rope_pairs(records: pd.DataFrame, *more: str) -> pd.DataFrame:
    """The loss difference FoX − RoPE in nats (column ``difference``) of each pair of one seed."""
    table = side_by_side(
        records,
        ["size", "context_length_tokens", "seed", *more],
        "architecture",
        "loss_nats",
        ("pro", "rope"),
        "FoX and RoPE",
    )
    return table.assign(difference=table["pro"] - table["rope"])


def fox_is_on_par(loss: pd.DataFrame, loss_curve: pd.DataFrame) -> Verdict:
    """Reproduced if the pairs rule out that FoX is worse by :data:`ON_PAR_NATS`; contradicted if they show
    that FoX is worse by more."""
    apart = rope_pairs(loss)["difference"]
    seeds = f"FoX − RoPE of each pair, in nats: {', '.join(f'{gap:+.4f}' for gap in apart)}"
    more = {"n": len(apart), "unit": "pair"}
    if len(apart) < paired.LEAST_PAIRS:
        short = f"{len(apart)} of {paired.LEAST_PAIRS} pairs exist"
        return Verdict(Word.INCONCLUSIVE, f"{short}\n{seeds}", short, **more)
    mean, low, high = over_draws(apart).interval(2 * LEVEL)
    met = True if high < ON_PAR_NATS else False if low > ON_PAR_NATS else None
    curve = rope_pairs(loss_curve, "position")
    eighth = 8 * curve["position"] // curve["context_length_tokens"]
    first, last = (f"{curve['difference'][eighth == end].mean():+.4f}" for end in (0, 7))
    short = (
        f"mean loss difference, FoX − RoPE: {mean:+.4f} nats [{low:+.4f}, {high:+.4f}], "
        f"after {style.count_span(loss['trained_tokens'])} tokens"
    )
    where = f"{first} nats in the first eighth of the context, {last} nats in the last eighth"
    return Verdict.of(met, f"{short}\nFoX − RoPE is {where}\n{seeds}", short, **more)


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    curves = rope_pairs(context.records["loss_curve"], "position")
    figure, ax = drawing.panels()
    for line, (seed, curve) in zip(itertools.cycle(("-", "--", ":")), curves.groupby("seed")):
        look = {"ls": line, "color": style.ROLES["exact"], "lw": 1}
        ax.plot(curve["position"], curve["difference"], label=f"seed {seed}", **look)
    ax.axhline(0, color="0.4", lw=0.8)
    style.token_axis(ax.xaxis, int(curves["context_length_tokens"].max()))
    ax.set(xlabel="token position", ylabel="loss, FoX − RoPE (nats)")
    verdict = fox_is_on_par(context.records["loss"], context.records["loss_curve"])
    drawing.legend(figure)
    caption = f"""{naming.heading(context.item)} The baseline is the same architecture with RoPE in place of
the forget gate. Both models use exact attention, and the two runs of one seed train on the same batches. A
curve below zero means that FoX has the lower held-out loss at that position. Result: {verdict.short}."""
    return figure, caption
