"""T5's encoder with gates, in two forms that compute the same vectors.

:func:`encode_masked` keeps every token and masks; training and tests use it. :func:`encode_removed` removes
dropped tokens after each gate, so later blocks compute only the tokens that are left.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .blocks import T5, encoder_block
from .config import PruningConfig
from .gates import log_gates, open_probability, pair_mask, straight_through


@dataclass(frozen=True)
class Encoded:
    """The result of :func:`encode_masked`: S gates, B texts of T tokens.

    Attributes:
        hidden: (B, T, D) float, the encoder's output, for dropped tokens too.
        memory_mask: (B, T) float, added to the scores of cross-attention; -inf for padding.
        log_gate: (S, B, T) float32 of each gate, 0 for EOS.
        kept: (S, B, T) bool: tokens left after each gate by the evaluation rule, without padding.
        open_probability: (S, B, T) for hard concrete gates, 1 for EOS; None for other gates.
    """

    hidden: Tensor
    memory_mask: Tensor
    log_gate: Tensor
    kept: Tensor
    open_probability: Tensor | None


@dataclass(frozen=True)
class Memory:
    """The kept vectors of B texts, at most M each, which are the decoder's only input.

    Attributes:
        vectors: (B, M, D) float, padded.
        mask: (B, M) float, added to the scores of cross-attention; -inf for padding.
        positions: (B, M) int64, the position in the text of each vector's token; -1 for padding.
        input_ids: (B, T) int64, all tokens of the texts, EOS included, padded.
        lengths: (B,) int64, number of tokens of each text, EOS included.
        dropped_by: (B, T) int64, the 0-based gate that dropped a token; -1 for kept tokens.
        tokens: for each text, the kept tokens as strings; an empty list if the model has no tokeniser.
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
        """(B,) int64: number of vectors of each text, including that of EOS."""
        return (self.positions >= 0).sum(1)

    @property
    def keep_ratio(self) -> Tensor:
        """(B,) float: kept tokens divided by tokens."""
        return self.kept / self.lengths


def relative_bias(attention: T5, query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """T5's relative bias for given positions: (..., Q) and (..., K) integer -> (..., H, Q, K) float.

    Args:
        attention: the self-attention that contains the bias table, in the first block.
    """
    buckets = attention._relative_position_bucket(
        key_positions[..., None, :] - query_positions[..., :, None],
        bidirectional=not attention.is_decoder,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=attention.relative_attention_max_distance,
    )
    return attention.relative_attention_bias(buckets).movedim(-1, -3)


def clear_signal(hidden: Tensor) -> Tensor:
    """``hidden`` (..., D), same dtype, with element 0, which carries only the gate's signal, set to 0."""
    return torch.cat([torch.zeros_like(hidden[..., :1]), hidden[..., 1:]], -1)


def encode_masked(
    stack: T5,
    input_ids: Tensor,
    real: Tensor,
    eos: Tensor,
    config: PruningConfig,
    *,
    mask: str = "removed",
    noise: Tensor | None = None,
    credit_limit: Tensor | None = None,
    blind: bool = False,
) -> Encoded:
    """Runs the encoder on all tokens, with masks.

    Args:
        stack: the ``T5Stack`` of an encoder.
        input_ids: (B, T) integer.
        real: (B, T) bool, False for padding.
        eos: (B, T) bool, True for EOS, which is never dropped.
        mask: ``soft``: log gates are added; ``straight_through``: tokens are removed, with gradients;
            ``removed``: tokens are removed as at evaluation; ``none``: plain T5 except for element 0.
        noise: (S, B, T) float32 or None.
        credit_limit: a scalar; see ``gates.straight_through``. None for no bound.
        blind: gates ignore their tokens, as if E[0] were 0.
    """
    gated = config.gated_blocks(len(stack.block))
    hidden = stack.dropout(stack.embed_tokens(input_ids))
    position = torch.arange(input_ids.shape[1], device=input_ids.device)
    bias = relative_bias(stack.block[0].layer[0].SelfAttention, position, position)[None]
    padding = torch.zeros(real.shape, device=real.device).masked_fill(~real, -math.inf)
    scores, memory_mask, alive = bias + padding[:, None, None, :], padding, real
    log_gate, kept, probability = [], [], []
    for index, block in enumerate(stack.block):
        if index in gated:
            hidden = clear_signal(hidden)
        hidden = encoder_block(block, hidden, scores)
        if index not in gated:
            continue
        gate_noise = None if noise is None else noise[len(log_gate)]
        signal = torch.zeros_like(hidden[..., 0]) if blind else hidden[..., 0]
        gate = log_gates(signal, config, gate_noise).masked_fill(eos | ~real, 0.0)
        probability.append(open_probability(signal, config).masked_fill(eos | ~real, 1.0))
        hidden = clear_signal(hidden)
        inside = alive & (gate > config.log_threshold)
        if mask != "none":
            added = _added_mask(mask, gate, alive, inside, config, credit_limit)
            scores = scores + pair_mask(added)
            memory_mask = memory_mask + added
            alive = inside
        log_gate.append(gate)
        kept.append(inside)
    hidden = stack.dropout(stack.final_layer_norm(hidden))
    opened = torch.stack(probability) if config.training_mask == "hard_concrete" else None
    return Encoded(hidden, memory_mask, torch.stack(log_gate), torch.stack(kept), opened)


def _added_mask(
    kind: str, gate: Tensor, alive: Tensor, inside: Tensor, config: PruningConfig, credit_limit: Tensor | None
) -> Tensor:
    """(B, T): the mask that one gate adds to the scores."""
    if kind == "soft":
        return gate
    # Later gates ignore a removed token, because its mask must not be added twice.
    if kind == "straight_through":
        limit = gate.new_tensor(math.inf) if credit_limit is None else credit_limit
        return torch.where(alive, straight_through(gate, inside, limit), 0.0)
    return torch.where(inside, _kept_mask(gate, config), -math.inf)


def _kept_mask(gate: Tensor, config: PruningConfig) -> Tensor:
    """The mask of a kept token at evaluation, identical to its mask in training."""
    return torch.zeros_like(gate) if config.training_mask == "straight_through" else gate


def encode_removed(
    stack: T5, input_ids: Tensor, real: Tensor, eos: Tensor, config: PruningConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Runs the encoder and removes dropped tokens after each gate; arguments as in :func:`encode_masked`.

    After each gate a batch is truncated to its longest remaining text.

    Returns:
        ``vectors``, ``mask``, ``positions`` and ``dropped_by`` of :class:`Memory`.
    """
    gated = config.gated_blocks(len(stack.block))
    hidden = stack.dropout(stack.embed_tokens(input_ids))
    position = torch.arange(input_ids.shape[1], device=input_ids.device)
    bias = relative_bias(stack.block[0].layer[0].SelfAttention, position, position)
    positions = position.expand_as(input_ids).masked_fill(~real, -1)
    mask = torch.zeros(real.shape, device=real.device).masked_fill(~real, -math.inf)
    dropped_by = torch.full_like(positions, -1)
    scores = bias + mask[:, None, None, :]
    for index, block in enumerate(stack.block):
        if index in gated:
            hidden = clear_signal(hidden)
        hidden = encoder_block(block, hidden, scores)
        if index not in gated:
            continue
        inside = positions >= 0
        gate = log_gates(hidden[..., 0], config).masked_fill(eos | ~inside, 0.0)
        hidden = clear_signal(hidden)
        kept = inside & (gate > config.log_threshold)
        mask = mask + _kept_mask(gate, config)
        if not torch.equal(kept, inside):
            rows, columns = (inside & ~kept).nonzero(as_tuple=True)
            dropped_by[rows, positions[rows, columns]] = gated.index(index)
            hidden, mask, positions, eos = _take_kept(kept, hidden, mask, positions, eos)
        if index + 1 < len(stack.block):
            scores = _scores(bias, positions, mask)
    return stack.final_layer_norm(hidden), mask, positions, dropped_by


def _scores(bias: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
    """(B, H, M, M): the bias of the remaining positions, plus the mask of pairs; -inf for padding.

    Args:
        bias: (H, T, T), for all pairs of positions, because a look-up is cheaper than recomputing the bias.
    """
    padding = positions < 0
    place = positions.masked_fill(padding, 0)
    left = bias[:, place[:, :, None], place[:, None, :]].transpose(0, 1)
    gates = pair_mask(mask.masked_fill(padding, 0.0)).masked_fill(padding[:, None, None, :], -math.inf)
    return left.add_(gates)  # in place: this is the largest tensor of the encoder


def _take_kept(
    kept: Tensor, hidden: Tensor, mask: Tensor, positions: Tensor, eos: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kept tokens only, in order, in tensors as long as the longest text."""
    counts = kept.sum(1)
    longest = int(counts.max())
    # A stable sort moves kept tokens to the front in text order.
    order = torch.argsort((~kept).to(torch.uint8), dim=1, stable=True)[:, :longest]
    there = torch.arange(longest, device=kept.device) < counts[:, None]
    hidden = hidden.gather(1, order[..., None].expand(-1, -1, hidden.shape[-1]))
    return (
        hidden,
        mask.gather(1, order).masked_fill(~there, -math.inf),
        positions.gather(1, order).masked_fill(~there, -1),
        eos.gather(1, order) & there,
    )
