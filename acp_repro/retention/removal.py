"""What removes tokens at inference: gathering them into shorter tensors, and putting them back in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import key_bias
from .budget import compact, flat_rows, take, top_indices
from .scorer import has_kernels

LONGEST = 16_384  # tokens of a row that one program of ``select_kernel`` holds


@dataclass
class Call:
    """What one call of the model says of its tokens.

    Attributes:
        valid, protected: (B, T) bool.
        ids: (B, T) integer, or None.
        is_full: no mask was given, so that all tokens are valid.
        protects_more: more may be protected than the first token.
    """

    valid: Tensor
    protected: Tensor
    ids: Tensor | None
    is_full: bool = False
    protects_more: bool = True


@dataclass
class GateRecord:
    """What one gate did in one call, at the places of the original sequence.

    Attributes:
        place: 0 is the input, l is after block l.
        scores: (B, T) float32, NaN for what was dropped before or is padding.
        kept: (B, T) bool: which tokens go on.
        z: (B, T) float: what they were multiplied by.
        budget: (B,) integer M.
        counted: (B, T) float: p, or P(z > 0), as the penalty counts it; None where nothing is learned.
    """

    place: int
    scores: Tensor
    kept: Tensor
    z: Tensor
    budget: Tensor
    counted: Tensor | None


class Removal:
    """The part of a ``Pass`` that changes which tokens there are.

    Attributes:
        hidden: (B, T', D) of the T' tokens that are there; valid: (B, T') bool, which are none of filling.
        positions: (B, T') integer, where they stood in the original T.
        is_full: whether all are known to be valid.
        moved: whether tokens have left their places.
        held: (B, T, D), states of what was dropped, for ``dropped="last"``.
    """

    def _selects_in_kernel(self, ranking: Tensor) -> bool:
        """Whether one Triton kernel chooses the tokens; it holds a whole row of scores."""
        return has_kernels(ranking.detach()) and ranking.shape[1] <= LONGEST

    def _remove_by_index(
        self, index: int, ranking: Tensor, scores: Tensor, counted: Tensor | None, in_kernel: bool
    ) -> None:
        """Gathers the tokens of the best ranking; their number is the largest budget of the batch."""
        length = self.valid.shape[1]
        if self.host_budgets is None:  # nothing is read, so as if every example were as long as the batch
            width, same = self.r.budgets(self.length)[index], False
            width = length if self.r._call.protects_more else min(width, length)
        else:
            width, same = max(self.host_budgets[index]), len(set(self.host_budgets[index])) == 1
        budget = None if same else self._budget(index)
        candidates = None if self.is_full else self.valid
        rows = slots = None
        if in_kernel:
            from .select_kernel import select

            protected = None if self.protects_first else self.protected
            chosen = select(ranking.detach(), candidates, protected, budget, width)
            indices, rows, slots = chosen.indices, chosen.rows, chosen.slots
            valid = None if same else torch.arange(width, device=rows.device) < budget[:, None]
            self.r._suspects.append((self.r.places[index], chosen.is_nan.any()))
        else:
            indices, valid = top_indices(ranking, candidates, self.protected, budget, width)
        if self.r._records is not None:
            real = torch.ones_like(indices, dtype=torch.bool) if valid is None else valid
            at = torch.where(real, indices, length)
            kept = nn.functional.pad(torch.zeros_like(self.valid), (0, 1)).scatter(1, at, True)[:, :length]
            self._record(index, scores, kept, kept.float(), self._budget(index), counted)
        if width < length or not same:  # one example may keep all its tokens where others do not
            self.slots = None if self.moved else slots
            self._gather(indices, valid, rows)

    def _remove(self, kept: Tensor) -> None:
        """Gathers the kept tokens of each example into shorter tensors."""
        width = int(kept.sum(1).max())
        if width == self.valid.shape[1] and bool((kept == self.valid).all()):
            return
        if self.encoder.windowed:
            window = max(self.r.model_config.attention_window)
            width = -(-width // window) * window
            if self.config.removal == "mask":
                width = kept.shape[1]
            width = min(width, kept.shape[1])
        self._gather(*compact(kept, width))

    def _gather(self, indices: Tensor, valid: Tensor | None, rows: Tensor | None = None) -> None:
        """Leaves the tokens at ``indices`` (B, M); ``valid`` says which are none of filling, None: all.

        ``rows`` are the same as rows of all examples together, where they are known."""
        self.is_full = valid is None
        valid = torch.ones_like(indices, dtype=torch.bool) if valid is None else valid
        if rows is None:
            self.hidden = take(self.hidden, indices)
        else:
            width = self.hidden.shape[-1]
            self.hidden = self.hidden.reshape(-1, width).index_select(0, rows).view(*indices.shape, width)
        self.positions = take(self.positions, indices) if self.moved else indices
        if len(self.r.places) > 1 or self.encoder.windowed:  # a later gate, or the window, will ask
            self.protected = take(self.protected, indices) & valid
            self.ids = None if self.ids is None else take(self.ids, indices)
            self.global_ = None if self.global_ is None else take(self.global_, indices) & valid
        self.valid, self.moved = valid, True
        self.mask = self._block_mask(None)

    def _block_mask(self, bias: Tensor | None) -> Any:
        """The attention mask of what is left, in the form that the blocks take.

        Args:
            bias: (B, T) float added to the attention that a token receives.
        """
        if self.encoder.windowed:
            if bias is not None:
                raise ValueError("gate_keys: windowed attention takes no bias; leave it off")
            limits = torch.finfo(self.hidden.dtype)
            mask = torch.zeros(self.valid.shape, dtype=self.hidden.dtype, device=self.hidden.device)
            return mask.masked_fill(self.global_, limits.max).masked_fill(~self.valid, limits.min)
        if bias is None:
            if self.is_full:
                return None
            from transformers.masking_utils import create_bidirectional_mask

            return create_bidirectional_mask(
                config=self.r.model_config, inputs_embeds=self.hidden, attention_mask=self.valid.long()
            )
        implementation = self.r.model_config._attn_implementation
        if implementation not in ("sdpa", "eager"):
            raise ValueError(f"gate_keys: needs attn_implementation sdpa or eager, not {implementation}")
        if implementation == "sdpa":
            return bias.masked_fill(~self.valid, key_bias.CLOSED)[:, None, None]
        bias = bias.masked_fill(~self.valid, torch.finfo(torch.float32).min).to(self._attention_dtype())
        length = bias.shape[1]
        return bias[:, None, None].expand(-1, 1, length, length)

    def _attention_dtype(self) -> torch.dtype:
        kind = self.hidden.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.hidden.dtype

    def _hold(self) -> None:
        """Keeps the states that tokens have when they come to a gate."""
        if self.moved:
            self.held = self._spread(self.held)
        elif self.c is None:
            self.held = self.hidden
        else:
            self.held = self.hidden + (1 - self.c[..., None]).to(self.hidden.dtype) * self.held

    def _spread(self, onto: Tensor | None) -> Tensor:
        """The states that are left, at their original places; others as in ``onto``, or 0."""
        batch, length, width = self.shape
        if onto is None and self.slots is not None and has_kernels(self.hidden):
            from .select_kernel import place

            return place(self.hidden, self.slots)
        rows = flat_rows(self.positions, length)
        if not self.is_full:  # filling goes to a row past the end, which is cut off
            rows = torch.where(self.valid.view(-1), rows, batch * length)
        out = self.hidden.new_zeros(batch * length + 1, width)
        if onto is not None:
            out[:-1] = onto.reshape(-1, width)
        return out.index_copy_(0, rows, self.hidden.reshape(-1, width))[:-1].view(self.shape)

    def _in_place(self) -> Tensor:
        if self.moved:
            return self._spread(self.held)
        if self.c is not None and self.held is not None:
            return self.hidden + (1 - self.c[..., None]).to(self.hidden.dtype) * self.held
        return self.hidden
