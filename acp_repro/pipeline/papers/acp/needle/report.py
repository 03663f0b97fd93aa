"""The results of a test, as a table for the terminal."""

from __future__ import annotations

import pandas as pd


def in_words(rows: pd.DataFrame) -> str:
    """A table of recall in percent, depths by lengths, the totals, and an answer to read.

    Args:
        rows: of :func:`acp_repro.pipeline.papers.acp.needle.trial.try_needle`.
    """
    recall = rows.pivot_table(index="depth", columns="evaluated_length_tokens", values="answer_recall")
    lines = ["recall of the needle's words (%), by depth and context length:"]
    lines.append("   depth" + "".join(f"{length:>9}" for length in recall.columns))
    for depth, values in recall.iterrows():
        lines.append(f"{depth:>8.2f}" + "".join(f"{100 * value:>9.0f}" for value in values))
    gain = rows["answer_log_likelihood_nats"] - rows["answer_log_likelihood_without_needle_nats"]
    found = rows.loc[rows["answer_recall"].idxmax()]
    lines += [
        f"mean recall {100 * rows['answer_recall'].mean():.0f} %, exact answers "
        f"{int(rows['exact_match'].sum())} of {len(rows)}",
        f"log-likelihood of the right answer: {gain.mean():+.1f} nats with the needle "
        f"({rows['answer_log_likelihood_nats'].mean():.1f}) against without "
        f"({rows['answer_log_likelihood_without_needle_nats'].mean():.1f}), "
        f"{found['answer_tokens']} tokens",
        f"best answer ({found['evaluated_length_tokens']} tokens, depth {found['depth']:g}): "
        f"{found['answer']!r}",
    ]
    return "\n".join(lines)
