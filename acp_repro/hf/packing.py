"""Converts the packed documents of transformers' collators to ``cu_seqlens`` of the attention."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from acp_repro.attention.decay import document_starts

from .configuration import ForgettingTransformerCache


def find_documents(
    tokens: Tensor, mask: Tensor | None, cache: Any, position_ids: Tensor | None, keywords: dict[str, Any]
) -> Tensor | None:
    """The starts of documents, (documents + 1,) int64, or None if each row is one document.

    Arguments are those of ``forward``; the keywords that name documents are removed from ``keywords``.
    """
    batch, length = tokens.shape[:2]
    said = {}
    if position_ids is not None:
        said["position_ids"] = _find_restarts(mask, cache, position_ids.expand(batch, length))
    if (index := keywords.pop("seq_idx", None)) is not None:
        said["seq_idx"] = F.pad(index[:, 1:] != index[:, :-1], (1, 0), value=True)
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if (ends := keywords.pop(name, None)) is not None:
            if ends[0] != 0 or ends[-1] != length or bool((ends.diff() < 0).any()):
                raise ValueError(
                    f"{name} must start with 0, be non-decreasing and end with the length {length}"
                )
            said[name] = document_starts(ends, length)[None]
    starts = [*said.values()]
    if not all(torch.equal(other, starts[0]) for other in starts):
        raise ValueError(f"{' and '.join(said)} describe different documents; pass one of them")
    if not starts or not bool(starts[0][:, 1:].any()):
        return None
    if batch > 1:
        raise ValueError(f"documents must be packed into a batch of one row, got {batch} rows")
    return F.pad(starts[0][0].nonzero()[:, 0], (0, 1), value=length)


def _find_restarts(mask: Tensor | None, cache: Any, at: Tensor) -> Tensor:
    """(B, T) bool: the first token of each row, and tokens at which the positions ``at`` restart at 0."""
    place = torch.arange(at.shape[1], device=at.device)
    held, padding = 0, 0
    if isinstance(cache, ForgettingTransformerCache) and cache.fox.length:
        held, padding = cache.fox.length, cache.fox.seq_start
        padding = 0 if padding is None else padding[:, None]
    real = torch.ones_like(at, dtype=torch.bool)
    if mask is not None and mask.shape == (len(at), held + at.shape[1]):  # other shapes raise an error later
        real = mask[:, held:].bool()
    goes_on = F.pad(real[:, :-1] & real[:, 1:], (1, 0))
    again = goes_on & (at == 0)
    counted = F.pad(at.diff() == 1, (1, 0)) | again
    # Positions of a row begin at 0 or after the cached tokens; they may or may not count its padding.
    begins = (at == held + place) | (at == held - padding)
    if not bool(torch.where(goes_on, counted, begins | ~real).all()):
        raise ValueError(
            "position_ids must count 0, 1, 2, ... in each document: FoX supports no other position ids"
        )
    return F.pad(again[:, 1:], (1, 0), value=True)
