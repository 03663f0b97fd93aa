"""The probing classifier on kept vectors and its baselines."""

from __future__ import annotations

import pandas as pd

from acp_repro.common.statistics import LEVEL, p_above_guessing, share_error

from .. import drawing, style
from ..tables import one_each
from ..verdict import Verdict, Word

CLOSE = 0.05  # the largest difference in accuracy that counts as close
INTERVAL = 1.96  # standard errors to each side: 95 %
NAMES = {
    "kept_votes": "kept vectors, votes",
    "all_tokens_votes": "all tokens, gates open, votes",
    "all_tokens_mean": "all tokens, gates open, mean",
    "bag_of_words": "bag of words, logistic regression",
}
WHOLE = {"all_tokens_votes": "votes of all vectors", "all_tokens_mean": "mean of all vectors"}


def draw(records: pd.DataFrame) -> drawing.Figure:
    """A point per classifier with its 95 % interval, and the share of the majority class as a line.

    Args:
        records: ``probe`` records of one run.
    """
    records = one_each(records, ["classifier"], "figure_probing").set_index("classifier").loc[list(NAMES)]
    figure, ax = drawing.panels(height=2.1, width=style.COLUMN_INCHES * 1.3)
    errors = INTERVAL * share_error(records["accuracy"], records["measured_texts"])
    for y, (x, error) in enumerate(zip(records["accuracy"], errors, strict=True)):
        colour = "0.35" if y else "#D55E00"
        ax.errorbar(x, y, xerr=error, fmt="o", capsize=2, color=colour)
        drawing.note(ax, f"{x:.3f}", (x + error, y), (4, 0), color=colour)
    ax.set_yticks(range(len(records)), [NAMES[name] for name in records.index])
    ax.axvline(records["majority_class"].iloc[0], color="0.4", lw=1, ls="--", label="majority class")
    low = min(0.5, (records["accuracy"] - errors).min())  # 0.5 is chance
    ax.set(xlim=(low, 1), ylim=(len(records) - 0.5, -0.5), xlabel="held-out accuracy")
    drawing.legend(figure)
    return figure


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    records, question = context.records["probe"], context.suite.file.data.sides
    by_classifier = records.set_index("classifier")
    row, accuracy = by_classifier.loc["kept_votes"], 100 * by_classifier["accuracy"]
    whole = accuracy[list(WHOLE)].max()
    caption = f"""**Probing.** Small classifiers predict from frozen vectors {question}. The classifiers are
right for {accuracy["kept_votes"]:.1f} % of the texts with the kept vectors, {whole:.1f} % with all vectors,
and {accuracy["bag_of_words"]:.1f} % with a bag of words. The majority class has
{100 * row["majority_class"]:.1f} % of the texts. A classifier that does not exceed this share has not
learnt. Points are accuracies on {int(row["measured_texts"]):,} held-out texts, with 95 % intervals over
these texts. The axis does not begin at 0. The classifiers are trained on {int(row["train_texts"]):,} texts.
A text has {row["vectors_per_text"]:.1f} kept vectors on average."""
    return draw(records), caption


def probe_close(probe: pd.DataFrame) -> Verdict:
    """Met if the kept vectors are close to all tokens' vectors and clearly above the majority class."""
    found = one_each(probe, ["run", "classifier"], "probe").set_index("classifier")["accuracy"]
    texts, chance = int(probe["measured_texts"].iloc[0]), probe["majority_class"].iloc[0]
    learnt = {
        name for name in found.index if p_above_guessing(round(found[name] * texts), texts, chance) < LEVEL
    }
    kept, whole = found["kept_votes"], found[list(WHOLE)].max()
    ours = ", ".join(
        f"{words} {found[name]:.3f}{'' if name in learnt else ' (has not learnt)'}"
        for name, words in (
            ("kept_votes", "votes of kept vectors"),
            *WHOLE.items(),
            ("bag_of_words", "bag of words"),
        )
    )
    ours += f", majority class {chance:.3f}. The first has a standard error of {share_error(kept, texts):.3f}"
    close = kept >= whole - CLOSE
    if whole - CLOSE <= chance:  # a classifier that has learnt nothing would be close as well
        short = "with all tokens, the classifiers barely exceed the majority class"
        return Verdict(Word.INCONCLUSIVE, f"{short} (at most {CLOSE})\nAccuracies: {ours}", short)
    if not learnt & set(WHOLE) or (close and "kept_votes" not in learnt):
        return Verdict(Word.INCONCLUSIVE, ours, "a classifier has not learnt")
    return Verdict.of(close, ours, f"kept {kept:.3f}, all tokens {whole:.3f}")
