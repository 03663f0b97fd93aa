"""Which kept vector each written token comes from, by SHAP ("SHAP" in the article)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from acp_repro.common.errors import UsageError
from acp_repro.lap.autoencoder import pad
from acp_repro.lap.decoder import decode_teacher

from ..trained import TrainedPruning

BATCH = 64


def shap_values(trained: TrainedPruning, row: list[int], evaluations: int) -> tuple[np.ndarray, list[int]]:
    """SHAP values of one text's kept vectors for each token that the model writes of it freely.

    A player is a kept vector; a coalition is the memory with the others masked; the value is the log
    probability of each token of the model's own text, the tokens before it given.

    Args:
        evaluations: of the model; the permutations of the estimate are as many as that allows.

    Returns:
        (kept vectors, written tokens) float64 in nats, and the written tokens' ids, EOS last.

    Raises:
        UsageError: the library shap is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import shap
    except ImportError:
        raise UsageError("the heat map needs the library shap: pip install -e '.[lap]'") from None
    value, players, written = game(trained, row)
    explainer = shap.PermutationExplainer(value, np.zeros((1, players)), seed=trained.run.seed)
    least = 2 * players + 1  # one permutation, forwards and backwards
    found = explainer(np.ones((1, players)), max_evals=max(least, evaluations), silent=True)
    return found.values[0], written


@torch.no_grad()
def game(
    trained: TrainedPruning, row: list[int]
) -> tuple[Callable[[np.ndarray], np.ndarray], int, list[int]]:
    """The function of coalitions that SHAP explains, its number of players, and the written tokens.

    The function takes (coalitions, players) of 0 and 1 and gives (coalitions, tokens) in nats.
    """
    model, tokenizer = trained.model, trained.task.tokenizer
    memory = model.encode_ids(pad([row], tokenizer.pad_id).to(trained.device))
    written = model.decode_ids(memory.vectors, memory.mask, 2 * len(row))[0] + [tokenizer.eos_id]
    target = torch.tensor([written], device=trained.device)

    @torch.no_grad()
    def value(coalitions: np.ndarray) -> np.ndarray:
        parts = []
        for part in torch.from_numpy(np.asarray(coalitions, dtype=np.float32)).split(BATCH):
            inside = part.to(trained.device) > 0.5
            mask = memory.mask.expand(len(part), -1).masked_fill(~inside, -1e9)
            parts.append(_log_probabilities(trained, memory.vectors, mask, target))
        return torch.cat(parts).double().cpu().numpy()

    return value, int(memory.kept[0]), written


def _log_probabilities(trained: TrainedPruning, vectors: Tensor, mask: Tensor, target: Tensor) -> Tensor:
    """(coalitions, tokens). Where nothing is left, all masks are alike and softmax would not see them:
    then the memory is one vector of zeros."""
    model, count = trained.model, len(mask)
    empty = (mask <= -1e9).all(1)
    memory = torch.where(empty[:, None, None], torch.zeros_like(vectors), vectors.expand(count, -1, -1))
    logits = decode_teacher(
        model.t5,
        memory,
        mask.masked_fill(empty[:, None], 0.0),
        model.shifted(target).expand(count, -1),
        model.pruning.decoder_window,
    )
    return logits.float().log_softmax(-1).gather(2, target.expand(count, -1)[..., None])[..., 0]


def measure(trained: TrainedPruning) -> list[dict[str, Any]]:
    """One record per text, kept vector and written token.

    Texts are the first held-out ones with 12 to 40 tokens, or the first ones where none has.
    """
    tokenizer = trained.task.tokenizer
    rows = trained.heldout_rows(trained.measure.scored_texts)
    wanted = [row for row in rows if 12 <= len(row) <= 40] or rows
    records = []
    for number, row in enumerate(wanted[: trained.measure.shap_texts]):
        values, written = shap_values(trained, row, trained.measure.shap_evaluations)
        memory = trained.model.encode_ids(pad([row], tokenizer.pad_id).to(trained.device))
        words = tokenizer.tokens(written)
        for vector, position in enumerate(memory.positions[0].tolist()):
            records += [
                {
                    "text": number,
                    "text_tokens": len(row),
                    "kept_position": position,
                    "kept_token": repr(memory.tokens[0][vector]),
                    "written_position": column,
                    "written_token": repr(word),
                    "matches_text": column < len(row) and written[column] == row[column],
                    "shap_nats": float(values[vector, column]),
                }
                for column, word in enumerate(words)
            ]
    return records
