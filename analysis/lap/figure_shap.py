"""SHAP: the contribution of each kept vector to each written token."""

from __future__ import annotations

import ast

import numpy as np
import pandas as pd

from acp_repro.papers.lap.schema import SHOWN_TEXTS

from .. import drawing, style


def draw(records: pd.DataFrame) -> drawing.Figure:
    """A heat map with kept vectors as rows and written tokens as columns.

    Args:
        records: ``attribution`` records of one text.
    """
    values = records.pivot(index="kept_position", columns="written_position", values="shap_nats")

    def words(position: str, token: str) -> list[str]:
        first = records.drop_duplicates(position).sort_values(position)
        return [ast.literal_eval(word).strip() or "␣" for word in first[token]]

    rows, columns = values.shape
    width = min(style.PAGE_INCHES, 1.6 + 0.24 * columns)
    figure, ax = drawing.panels(height=1.6 + 0.22 * rows, width=width)
    bound = np.abs(values.to_numpy()).max()
    image = ax.imshow(values, cmap="RdBu_r", vmin=-bound, vmax=bound, aspect="auto")
    ax.set_xticks(range(columns), words("written_position", "written_token"), rotation=90)
    ax.set_yticks(range(rows), words("kept_position", "kept_token"))
    ax.set(xlabel="written token", ylabel="kept vector")
    ax.tick_params(length=0)
    ax.grid(visible=False)
    figure.colorbar(image, ax=ax, label="nats", pad=0.02, aspect=10)
    return figure


def most_added(text: pd.DataFrame) -> str:
    """The kept vector with the largest SHAP value for most written tokens, as a sentence."""
    most = text.loc[text.groupby("written_position")["shap_nats"].idxmax()]
    counts = most["kept_position"].value_counts(sort=False).sort_index()
    token = text.loc[text["kept_position"] == counts.idxmax(), "kept_token"].iloc[0]
    return (
        f"The kept vector of `{ast.literal_eval(token).strip()}` has the largest SHAP value for "
        f"{counts.max()} of the {len(most)} written tokens."
    )


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    records = context.records["attribution"]
    records = records[records["text"] < SHOWN_TEXTS]  # in longer texts, not every pair has a record
    written = records.drop_duplicates(["text", "written_position"])
    matches = written.groupby("text")["matches_text"].mean()
    chosen = matches.idxmax()  # the first of the best reconstructed texts
    first = records[records["text"] == chosen]
    quality = "exactly" if matches[chosen] == 1 else "best"
    kept, tokens = first["kept_position"].nunique(), int(first["text_tokens"].iloc[0])
    best = (matches == matches.max()).sum()
    caption = f"""**SHAP.** {most_added(first)} Each cell shows the nats that a kept vector adds to the log
probability of a written token. The model writes from the kept vectors alone. {best} of {len(matches)} short
held-out texts are reconstructed {quality}, and the figure shows the first of these texts. {kept} of
{tokens} tokens are kept. Rows are in the order of the text."""
    return draw(first), caption
