"""T5's decoder over a memory, where each layer attends to the last N tokens ("Architecture").

:func:`decode_teacher` decodes all positions of a text at once. :class:`Decoding` decodes token by token, with
a cache of N + 1 keys per layer and the same logits; :func:`write_greedily` generates texts with it.
"""

import functools
import math

import torch
from torch import Tensor

from .blocks import T5, decoder_block, keys_and_values
from .encoder import relative_bias


def logits_of(t5: T5, hidden: Tensor) -> Tensor:
    """The head of a ``T5ForConditionalGeneration``, (..., D) -> (..., V) float; T5 1.0 scales the input."""
    if t5.config.scale_decoder_outputs:
        hidden = hidden * t5.config.d_model**-0.5
    return t5.lm_head(hidden)


def decode_teacher(t5: T5, memory: Tensor, memory_mask: Tensor, inputs: Tensor, window: int | None) -> Tensor:
    """Logits (B, T, V) float of each next token, given the true tokens before it.

    Args:
        memory: (B, M, D), any floating dtype.
        memory_mask: (B, M) float, added to the scores of cross-attention.
        inputs: (B, T) integer, shifted right.
        window: N; None for all earlier tokens.
    """
    stack = t5.decoder
    hidden = stack.dropout(stack.embed_tokens(inputs))
    length = inputs.shape[1]
    position = torch.arange(length, device=inputs.device)
    bias = relative_bias(stack.block[0].layer[0].SelfAttention, position, position)[None]
    distance = position[:, None] - position  # a token attends to itself and to ``window`` earlier tokens
    seen = (distance >= 0) & (distance <= (length if window is None else window))
    scores = bias.masked_fill(~seen, -math.inf)
    cross = memory_mask[:, None, None, :].to(hidden.dtype)
    for block in stack.block:
        keys_values = keys_and_values(block.layer[1].EncDecAttention, memory)
        hidden = decoder_block(block, hidden, scores, keys_values, cross)
    return logits_of(t5, stack.dropout(stack.final_layer_norm(hidden)))


class Decoding:
    """The state of free-running decoding: keys and values of the memory and of the last N + 1 tokens.

    Args:
        memory, memory_mask: see :func:`decode_teacher`.
        window: N; None caches all tokens.
    """

    def __init__(self, t5: T5, memory: Tensor, memory_mask: Tensor, window: int | None):
        self._t5, self._window = t5, window
        self._seen = 0  # number of tokens that the last one attends to, including itself
        self._mask = memory_mask[:, None, None, :]
        self._memory = [keys_and_values(b.layer[1].EncDecAttention, memory) for b in t5.decoder.block]
        self._past: list[tuple[Tensor, Tensor] | None] = [None] * len(self._memory)

    def step(self, tokens: Tensor) -> Tensor:
        """Logits (B, V) float after one more token of each text: (B,) integer."""
        stack = self._t5.decoder
        hidden = stack.embed_tokens(tokens[:, None])
        self._seen = self._seen + 1 if self._window is None else min(self._seen, self._window) + 1
        place = torch.arange(self._seen, device=tokens.device)
        bias = relative_bias(stack.block[0].layer[0].SelfAttention, place[-1:], place)
        for index, block in enumerate(stack.block):
            remember = functools.partial(self._remember, index)
            hidden = decoder_block(block, hidden, bias, self._memory[index], self._mask, remember)
        return logits_of(self._t5, stack.final_layer_norm(hidden))[:, 0]

    def keep(self, rows: Tensor) -> None:
        """Continues with the selected texts only: (B,) bool or integer."""
        self._mask = self._mask[rows]
        self._memory = [(k[rows], v[rows]) for k, v in self._memory]
        self._past = [None if past is None else (past[0][rows], past[1][rows]) for past in self._past]

    def _remember(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if (past := self._past[layer]) is not None:
            keys, values = torch.cat([past[0], keys], 2), torch.cat([past[1], values], 2)
        keys, values = keys[:, :, -self._seen :], values[:, :, -self._seen :]
        self._past[layer] = keys, values
        return keys, values


def write_greedily(
    t5: T5, memory: Tensor, memory_mask: Tensor, window: int | None, most: int
) -> list[list[int]]:
    """Token ids of each text by greedy decoding, without EOS.

    Args:
        memory, memory_mask, window: see :class:`Decoding`; (B, M, D) and (B, M) float.
        most: the maximum number of tokens in a text. A text that reaches EOS leaves the batch.
    """
    state = Decoding(t5, memory, memory_mask, window)
    rows: list[list[int]] = [[] for _ in range(len(memory))]
    going = list(range(len(memory)))
    tokens = torch.full((len(memory),), t5.config.decoder_start_token_id, device=memory.device)
    for _ in range(most):
        tokens = state.step(tokens).argmax(-1)
        goes_on = tokens != t5.config.eos_token_id
        if not goes_on.all():
            state.keep(goes_on)
            tokens = tokens[goes_on]
            going = [row for row, on in zip(going, goes_on.tolist(), strict=True) if on]
        if not going:
            break
        for row, token in zip(going, tokens.tolist(), strict=True):
            rows[row].append(token)
    return rows
