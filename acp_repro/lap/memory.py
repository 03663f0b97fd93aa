"""The output of the encoder, which is all that the decoder reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Memory:
    """The kept vectors of B texts, at most M each.

    Attributes:
        vectors: (B, M, D) float, padded.
        mask: (B, M) float, added to the scores of cross-attention; -inf for padding.
        positions: (B, M) int64, the place in its text of each vector's token; -1 for padding.
        input_ids: (B, T) int64, the whole texts, EOS included, padded.
        lengths: (B,) int64, tokens of the whole texts, EOS included.
        dropped_by: (B, T) int64, the gate that dropped a token, counted from 0; -1 for kept ones.
        tokens: for each text, the kept tokens as words; an empty list if the model has no tokeniser.
        gates: the number of gates.
    """

    vectors: Tensor
    mask: Tensor
    positions: Tensor
    input_ids: Tensor
    lengths: Tensor
    dropped_by: Tensor
    tokens: list[list[str]]
    gates: int

    @property
    def kept(self) -> Tensor:
        """(B,) int64: vectors of each text, EOS's included."""
        return (self.positions >= 0).sum(1)

    @property
    def kept_ratio(self) -> Tensor:
        """(B,) float: kept tokens over tokens."""
        return self.kept / self.lengths

    def __len__(self) -> int:
        return len(self.lengths)
