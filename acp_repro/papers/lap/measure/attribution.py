"""SHAP attributions of each generated token to the kept vectors ("SHAP" in the article)."""

from typing import Any

import numpy as np
import torch

from acp_repro.common.command import progress_bar
from acp_repro.lap.attribution import shap_values
from acp_repro.pipeline.paper import with_columns

from ..schema import SHOWN_TEXTS
from ..task import TrainedPruning

EVALUATIONS = 400  # evaluations of the model per text
SHORT = range(12, 41)  # tokens of a short text
SAME = 0.9  # token accuracy of a long text below which positions would be meaningless
DECIMALS = 2  # of a recorded value in nats


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
    """One record for each text (:func:`choose_texts`), kept vector and generated token
    (:func:`select_pairs`).
    """
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
    """The recorded pairs of a long text, (vectors, generated tokens) bool, from SHAP values of this shape.

    The values of most pairs are 0. Without these pairs, the file has a seventh of the size. Every vector and
    every generated token keeps at least one pair, so that all are counted.
    """
    pairs = values != 0
    pairs[0], pairs[:, 0] = True, True
    return pairs


@torch.no_grad()
def choose_texts(trained: TrainedPruning) -> list[list[int]]:
    """Short and long held-out texts, as token ids.

    The short texts are the first ``SHOWN_TEXTS`` texts of 12 to 40 tokens, or the first texts of any length
    if there are none. The long texts are the first ``shap_texts`` other texts of at least ``shap_min_tokens``
    tokens of which the model reconstructs at least 90 % of the tokens at their positions.
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
