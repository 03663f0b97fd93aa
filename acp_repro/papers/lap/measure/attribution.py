"""Which kept vector each written token comes from, by SHAP ("SHAP" in the article)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from acp_repro.chain.paper import Quantity

if TYPE_CHECKING:
    from ..trained import TrainedPruning


def measure(trained: TrainedPruning) -> list[dict[str, Any]]:
    """One record per text, kept vector and written token.

    Texts are the first held-out ones with 12 to 40 tokens, or the first ones where none has.
    """
    from acp_repro.lap.attribution import shap_values

    tokenizer = trained.task.tokenizer
    rows = trained.heldout_rows(trained.measure.scored_texts)
    wanted = [row for row in rows if 12 <= len(row) <= 40] or rows
    records = []
    for number, row in enumerate(wanted[: trained.measure.shap_texts]):
        found = shap_values(trained.model, row, trained.measure.shap_evaluations, trained.run.seed)
        words, kept = tokenizer.tokens(found.written), tokenizer.tokens(row[i] for i in found.positions)
        for vector, position in enumerate(found.positions):
            records += [
                {
                    "text": number,
                    "text_tokens": len(row),
                    "kept_position": position,
                    "kept_token": repr(kept[vector]),
                    "written_position": column,
                    "written_token": repr(word),
                    "matches_text": column < len(row) and found.written[column] == row[column],
                    "shap_nats": float(found.values[vector, column]),
                }
                for column, word in enumerate(words)
            ]
    return records


QUANTITY = Quantity(
    "attribution",
    "text text_tokens kept_position kept_token written_position written_token matches_text shap_nats",
    measure,
    lambda suite: [suite.main_run],
    large=True,
)
