"""Accuracy, BLEU and ROUGE of held-out text: soft mask, tokens removed, and written freely."""

from __future__ import annotations

import pandas as pd

from .. import drawing, style
from ..tables import one_each
from . import models

COLUMNS = {
    "kept_ratio": "kept",
    "token_accuracy": "accuracy",
    "bleu": "BLEU",
    "rouge_l": "ROUGE-L",
    "exact_match": "whole texts",
    "edits_per_token": "edits a token",
}
DECODING = {
    "soft": "true tokens before, soft mask",
    "removed": "true tokens before, tokens removed",
    "free": "written freely, tokens removed",
}


def tabulate(records: pd.DataFrame) -> drawing.Table:
    """One row per run and way of decoding, then the article's row.

    Args:
        records: ``reconstruction`` records.
    """
    one_each(records, ["run", "decoding"], "table_scores")
    values = records[["run", "decoding", *COLUMNS]]
    names = [
        models.name_of(c, m) for c, m in zip(records["compression"], records["training_mask"], strict=True)
    ]
    gate = records["gate"].map(models.READINGS)
    shown = pd.DataFrame({"model": [n + g for n, g in zip(names, gate, strict=True)]})
    shown["decoding"] = records["decoding"].map(DECODING).to_list()
    for column, title in COLUMNS.items():
        shown[title] = [f"{value:.3f}" for value in records[column]]
    paper = {"model": "article, Flan-T5-small on Yelp", "decoding": "true tokens before"}
    for column, title in COLUMNS.items():
        table = models.PUBLISHED.table
        rows = table[(table["item"] == "table_scores") & (table["quantity"] == column)]
        paper[title] = f"{rows['low'].iloc[0]:.2f}" if len(rows) else "–"
    return drawing.Table(pd.concat([shown, pd.DataFrame([paper])], ignore_index=True), values)


def make(found: drawing.Found) -> tuple[drawing.Table, str]:
    records = found.records["reconstruction"]
    texts = ", ".join(f"{n:,}" for n in records["measured_texts"].unique())
    caption = f"""**Scores.** Reconstruction of {texts} held-out texts. *Kept* under the soft
mask is {models.SOFT_RATIO}; otherwise the share of tokens really left.
Accuracy is of tokens at their place; *whole texts* come back word for word; edits are Levenshtein's, of
tokens. A dash: the article does not say.
{style.provenance(records)}"""
    return tabulate(records), caption


if __name__ == "__main__":
    drawing.main(globals())
