"""Which kept vector each written token comes from, by SHAP ("SHAP" in the article)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from acp_repro.common.command import progress_bar
from acp_repro.lap.attribution import shap_values
from acp_repro.pipeline.paper import with_columns

from ..schema import SHOWN_TEXTS
from ..task import TrainedPruning

EVALUATIONS = 400  # of the model for each text
SHORT = range(12, 41)  # tokens of these
SAME = 0.9  # share of a long text's tokens that must be written again, or places would mean nothing
DECIMALS = 2  # of a value in nats


@with_columns(
    "text",
    "text_tokens",
    "kept_position",
    "kept_token",
    "written_position",
    "written_token",
    "matches_text",
    "shap_nats",
)
def measure_attribution(trained: TrainedPruning) -> list[dict[str, Any]]:
    """One record per text (:func:`choose_texts`), kept vector and written token (:func:`select_pairs`)."""
    tokenizer = trained.task.tokenizer
    records = []
    for number, row in enumerate(
        progress_bar(choose_texts(trained), desc=f"{trained.run.name}: attribution", leave=False)
    ):
        found = shap_values(trained.model, row, EVALUATIONS, trained.run.seed)
        words, kept = tokenizer.tokens(found.written), tokenizer.tokens(row[i] for i in found.positions)
        values = found.values.round(DECIMALS) + 0.0  # without negative zeros
        pairs = np.ones_like(values, dtype=bool) if number < SHOWN_TEXTS else select_pairs(values)
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
                    "shap_nats": float(values[vector, column]),
                }
                for column, word in enumerate(words)
                if pairs[vector, column]
            ]
    return records


def select_pairs(values: np.ndarray) -> np.ndarray:
    """Which pairs of a long text have a record: (vectors, written tokens) bool, of SHAP values so shaped.

    Most pairs lie far apart and are worth nothing. Left out, a record is a seventh of its size. Every vector
    and every written token keeps a pair, so that all are counted.
    """
    pairs = values != 0
    pairs[0], pairs[:, 0] = True, True
    return pairs


@torch.no_grad()
def choose_texts(trained: TrainedPruning) -> list[list[int]]:
    """Short texts and long texts of the held-out ones, as token ids.

    First ``SHOWN_TEXTS`` texts of 12 to 40 tokens, or simply the first texts if there are none. Then the
    first ``shap_texts`` others of ``shap_min_tokens`` tokens or more. The model must
    reconstruct at least 90 % of the tokens of such a text in their positions.
    """
    rows = trained.heldout_rows(10**9)
    shown = ([row for row in rows if len(row) in SHORT] or rows)[:SHOWN_TEXTS]
    long = [row for row in rows if len(row) >= trained.measure_settings.shap_min_tokens and row not in shown]
    found = []
    for input_ids in trained.batches(long):
        if len(found) >= trained.measure_settings.shap_texts:
            break
        memory = trained.model.encode_ids(input_ids)
        written = trained.model.decode_ids(memory.vectors, memory.mask, input_ids.shape[1])
        part = [row[:n] for row, n in zip(input_ids.tolist(), memory.lengths.tolist(), strict=True)]
        for row, ours in zip(part, written, strict=True):
            same = sum(one == two for one, two in zip(row[:-1], ours, strict=False))
            found += [row] if same + 1 >= SAME * len(row) else []
    return shown + found[: trained.measure_settings.shap_texts]
