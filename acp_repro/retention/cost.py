"""FLOPs of an encoder whose blocks process ever fewer tokens (Appendix I). Does not import torch."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class EncoderCost:
    """The cost of one example (Appendix I).

    Attributes:
        linear_flop: FLOPs of projections and feed-forward layers, 2 per multiply-add.
        attention_flop: FLOPs of scores and weighted sums, quadratic in the number of tokens.
        scorer_flop: FLOPs of the gates' scoring networks.
    """

    linear_flop: float
    attention_flop: float
    scorer_flop: float

    @property
    def flop(self) -> float:
        return self.linear_flop + self.attention_flop + self.scorer_flop


def encoder_cost(
    tokens: Sequence[float],
    hidden_size: int,
    intermediate_size: int,
    *,
    scored: Sequence[float] = (),
    scorer_width: int = 64,
    windows: Sequence[int] | None = None,
) -> EncoderCost:
    """The cost of the forward pass through all blocks of an encoder.

    Args:
        tokens: the number of tokens in each block.
        scored: the number of tokens that each gate scores.
        windows: the maximum number of keys per query in each block, for windowed attention.
    """
    linear = sum(2 * t * (4 * hidden_size**2 + 2 * hidden_size * intermediate_size) for t in tokens)
    seen = [min(t, w) for t, w in zip(tokens, windows or tokens, strict=True)]
    attention = sum(4 * t * keys * hidden_size for t, keys in zip(tokens, seen, strict=True))
    # W, U and v of Eq. 3, and the summary's chunks of at most 128 positions.
    scorer = sum(2 * t * scorer_width * (2 * hidden_size + min(t, 128) + 1) for t in scored)
    return EncoderCost(linear, attention, scorer)
