"""The kept vectors that each generated token depends on, by SHAP ("SHAP" in the article)."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .autoencoder import PruningAutoencoder, evaluating, pad
from .decoder import decode_teacher
from .encoder import Memory

BATCH = 64  # coalitions that are decoded together
OUT = -1e9  # the mask of a vector outside the coalition


@dataclass(frozen=True)
class Attribution:
    """SHAP values of one text.

    Attributes:
        values: (kept vectors, written tokens) float64, in nats.
        positions: the position in the text of each vector's token.
        written: ids of the tokens that the model generates from the memory, EOS last.
    """

    values: np.ndarray
    positions: list[int]
    written: list[int]


def shap_values(
    model: PruningAutoencoder, row: Sequence[int], evaluations: int = 400, seed: int = 0
) -> Attribution:
    """The contribution of each kept vector of a text to the log probability of each generated token.

    A player is a kept vector. A coalition is the memory with the other vectors masked. The value of the game
    is the log probability of each token of the model's own text, given the tokens before it.

    Args:
        row: token ids of the text with EOS.
        evaluations: maximum number of model evaluations, which limits the permutations of the estimate.
        seed: seed of the permutations.
    """
    with warnings.catch_warnings():  # from shap's dependencies; imported here, because it takes seconds
        warnings.simplefilter("ignore")
        import shap
    value, memory, written = game(model, row)
    players = int(memory.kept[0])
    explainer = shap.PermutationExplainer(value, np.zeros((1, players)), seed=seed)
    least = 2 * players + 1  # one permutation, forward and backward
    found: Any = explainer(np.ones((1, players)), max_evals=max(least, evaluations), silent=True)
    values = found.values.reshape(players, len(written))  # shap drops the axis of a single token
    return Attribution(values, memory.positions[0].tolist(), written)


@torch.no_grad()
def game(
    model: PruningAutoencoder, row: Sequence[int]
) -> tuple[Callable[[np.ndarray], np.ndarray], Memory, list[int]]:
    """The function of coalitions that SHAP explains, the memory with the players, and the written tokens.

    The function maps (coalitions, players) of 0 and 1 to (coalitions, tokens) float64 in nats.
    """
    memory = model.encode_ids(pad([row], model.t5.config.pad_token_id).to(model.device))
    written = model.decode_ids(memory.vectors, memory.mask, 2 * len(row))[0]
    written.append(model.t5.config.eos_token_id)
    target = torch.tensor([written], device=model.device)

    @torch.no_grad()
    def value(coalitions: np.ndarray) -> np.ndarray:
        parts = []
        for part in torch.from_numpy(np.asarray(coalitions, dtype=np.float32)).split(BATCH):
            inside = part.to(model.device) > 0.5
            mask = memory.mask.expand(len(part), -1).masked_fill(~inside, OUT)
            parts.append(_log_probabilities(model, memory.vectors, mask, target))
        return torch.cat(parts).double().cpu().numpy()

    return value, memory, written


def _log_probabilities(model: PruningAutoencoder, vectors: Tensor, mask: Tensor, target: Tensor) -> Tensor:
    """(coalitions, tokens) float. The memory of an empty coalition is one vector of zeros, because softmax
    would ignore equal masks."""
    count, empty = len(mask), (mask <= OUT).all(1)
    memory = torch.where(empty[:, None, None], torch.zeros_like(vectors), vectors.expand(count, -1, -1))
    inputs = model.shift_right(target).expand(count, -1)
    mask = mask.masked_fill(empty[:, None], 0.0)
    with evaluating(model):
        logits = decode_teacher(model.t5, memory, mask, inputs, model.pruning.decoder_window)
    return logits.float().log_softmax(-1).gather(2, target.expand(count, -1)[..., None])[..., 0]
