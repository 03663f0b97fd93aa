"""Positions in the text of the attribution of a kept vector."""

from __future__ import annotations

import pandas as pd

from acp_repro.common.statistics import Interval

from .. import drawing
from ..verdict import Verdict, Word
from . import naming, slices

LONG_TOKENS = 60  # tokens of a text that is long enough to distinguish a slice from the whole text
LONG_TEXTS = 50  # the number of such texts that a verdict needs
RECONSTRUCTED = 0.9  # fraction of tokens reconstructed at their position
SLICE_OF_TEXT = 0.2  # the span of half of the attribution; 0.5 for a uniform attribution
OF_SCATTERED = 0.5  # relative to the span of the same values at random positions
LEAST_THIRD = 1 / 6  # the share of EOS's attribution on each third of the text: half of an even share
REACH = 15  # the largest distance in tokens in panel (a)
BEHIND = 10  # the distance in tokens in the caption
LABELS = {False: "kept vectors", True: "EOS"}
COLOURS = {False: "#0072B2", True: "#E69F00"}


def draw(records: pd.DataFrame) -> drawing.Figure:
    """Mean share of positive attribution by distance from the vector's origin, and by third of the text."""
    table = slices.positive(records)
    shares, thirds = slices.by_distance(table), slices.by_third(table)
    figure, (left, right) = drawing.panels(2, 2.4, width_ratios=(2, 1))
    for eos, label in LABELS.items():
        curve = shares[(shares["is_eos"] == eos) & (shares["distance"].abs() <= REACH)]
        offset = 0.2 if eos else -0.2
        left.bar(curve["distance"] + offset, 100 * curve["share"], 0.4, color=COLOURS[eos], label=label)
        part = thirds[thirds["is_eos"] == eos].set_index("third")["share"].reindex(range(slices.THIRDS))
        if len(curve):
            right.bar(part.index + offset, 100 * part.fillna(0), 0.4, color=COLOURS[eos])
    left.set_title("By distance from the token")
    right.set_title("By third of the text")
    left.set(
        xlim=(-REACH - 0.5, REACH + 0.5),
        ylim=(0, None),
        xlabel="written token − origin of the vector (tokens)",
    )
    left.set_ylabel("share of attribution (%)")
    right.axhline(100 / slices.THIRDS, color="0.4", lw=1, ls="--", label="spread evenly")
    right.set(ylim=(0, 100), xlabel="third of the text")
    right.set_xticks(range(slices.THIRDS), ["first", "second", "last"])
    drawing.legend(figure)
    return figure


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    records = context.records["attribution"]
    long = slices.reconstructed(records, LONG_TOKENS, RECONSTRUCTED)
    texts = f"held-out texts of {LONG_TOKENS} tokens or more that are reconstructed"
    if long.empty:
        long, texts = records, "held-out texts, which are short or not reconstructed"
    table = slices.positive(long)
    share, beyond = slices.behind(table, BEHIND), _beyond(table)
    behind = (
        "Only EOS has positive SHAP values."
        if share is None
        else f"{_words(share)} of the positive SHAP values of a vector other than EOS fall on the vector's "
        f"own token and the {BEHIND} tokens before (95 % bootstrap interval over texts in brackets)."
    )
    caption = f"""**Slices.** {behind} (a) Positive SHAP values by distance from the vector's own
token{beyond}. (b) The same by third of the text. Only tokens that the model writes at their position count.
The figure shows {_count(long)} {texts}."""
    return draw(long), caption


def _beyond(table: pd.DataFrame) -> str:
    """The share of the attribution outside panel (a), as the end of a sentence."""
    shares = slices.by_distance(table)
    far = shares[shares["distance"].abs() > REACH].groupby("is_eos")["share"].sum()
    parts = [f"{100 * share:.0f} % ({LABELS[bool(eos)]})" for eos, share in far.items() if share]
    return f"; beyond {REACH} tokens (not drawn): {', '.join(parts)}" if parts else ""


@naming.of_the_article
def own_slice(attribution: pd.DataFrame) -> Verdict:
    """Met if half of the attribution of vectors other than EOS falls on a short run of the text."""
    table, few = _long(attribution)
    if few or table["is_eos"].all():
        return Verdict(Word.INCONCLUSIVE, few or "only EOS has positive attribution")
    table = table[~table["is_eos"].astype(bool)]
    width, chance = (
        slices.over_texts(vectors, vectors["width"])
        for vectors in map(slices.width_of_each, (table, slices.scattered(table)))
    )
    short = f"the slice of a vector covers {100 * width.mean:.1f} % of the text"
    ours = f"{short}\nWith 95 % interval: {_words(width)}, and {_words(chance)} at random positions"
    return Verdict.of(width.mean <= min(SLICE_OF_TEXT, OF_SCATTERED * chance.mean), ours, short)


@naming.of_the_article
def eos_is_global(attribution: pd.DataFrame) -> Verdict:
    """Met if every third of the text has at least ``LEAST_THIRD`` of EOS's attribution."""
    table, few = _long(attribution)
    if few or not table["is_eos"].any():
        return Verdict(Word.INCONCLUSIVE, few or "EOS has no positive attribution")
    thirds = [slices.of_third(table[table["is_eos"]], third) for third in range(slices.THIRDS)]
    short = (
        f"{' / '.join(f'{100 * third.mean:.0f}' for third in thirds)} % of EOS's SHAP values are in the "
        "three thirds of the text"
    )
    ours = f"{short}\nFirst, second and last third, with 95 % interval: {', '.join(map(_words, thirds))}"
    return Verdict.of(min(third.mean for third in thirds) >= LEAST_THIRD, ours, short)


def _long(attribution: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Positive attributions of long reconstructed texts, and the reason if they are too few."""
    records = slices.reconstructed(attribution, LONG_TOKENS, RECONSTRUCTED)
    texts = _count(records)
    few = f"{texts} texts of {LONG_TOKENS} tokens or more are reconstructed, and {LONG_TEXTS} are needed"
    return slices.positive(records), few if texts < LONG_TEXTS else ""


def _count(records: pd.DataFrame) -> int:
    return int(records.groupby("run")["text"].nunique().sum())


def _words(share: Interval) -> str:
    """ "55.2 % (53.4 to 57.3)"."""
    return f"{100 * share.mean:.1f} % ({100 * share.low:.1f} to {100 * share.high:.1f})"
