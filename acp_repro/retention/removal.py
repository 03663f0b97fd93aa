"""Token removal: gathers the kept tokens into shorter tensors and scatters states to their positions."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import create_bidirectional_mask

from . import key_bias
from .budget import Places, compact, flat_rows, take, top_indices
from .gates import GateInputs
from .retention import Call, Retention
from .scorer import has_kernels

LONGEST = 16_384  # the longest row, in tokens, that one program of ``select_kernel`` can process


@dataclass(kw_only=True)
class State(GateInputs):
    """The state of one call between two blocks: the T' remaining tokens and the results of the gates."""

    retention: Retention
    call: Call  # of the full sequence, with the encoder's own padding
    budgets: list[list[int]] | None  # M per gate and example; None if the host may not read them
    shape: torch.Size  # (B, T, D) of the full sequence
    given: int  # T without the encoder's own padding
    protected: Tensor  # (B, T') bool
    global_: Tensor | None  # (B, T') bool, tokens that attend to all others in a windowed encoder
    mask: Any  # attention mask of the blocks
    biased: bool = False  # whether ``mask`` is a bias on the keys
    moved: bool = False  # whether tokens are no longer at their original positions
    slots: Tensor | None = None  # (B, T), new index of each token, if tokens were gathered exactly once
    held: Tensor | None = None  # (B, T, D), states of dropped tokens, for ``dropped="last"``
    c: Tensor | None = None  # (B, T), product of all z so far, if tokens stay in place
    expected: Tensor | None = None  # (B, T), product of all p so far
    violations: list[Tensor] = field(default_factory=list)  # of the constraint, one per gate so far
    terms: list[Tensor] = field(default_factory=list)

    def budget(self, gate: int) -> Tensor:
        """(B,) integer: M of a gate, at least the number of protected tokens."""
        return torch.maximum(self.retention.budgets(self.call.lengths)[gate], self.call.needed)


def selects_in_kernel(ranking: Tensor) -> bool:
    """Whether a Triton kernel selects tokens by ``ranking`` (B, T) float32; one program reads each row."""
    return has_kernels(ranking.detach()) and ranking.shape[1] <= LONGEST


def find_places(state: State, gate: int, ranking: Tensor) -> Places:
    """The tokens with the highest ``ranking`` (B, T) float32, up to the largest budget of the batch."""
    retention, length = state.retention, state.valid.shape[1]
    if state.budgets is None:  # no length is read: every example gets the budget of the batch's length
        width, same = retention.budgets(state.shape[1])[gate], False
        width = length if state.call.protects_more else min(width, length)
    else:
        width, same = max(state.budgets[gate]), len(set(state.budgets[gate])) == 1
    budget = None if same else state.budget(gate)
    candidates = None if state.is_full else state.valid
    if not selects_in_kernel(ranking):
        return top_indices(ranking, candidates, state.protected, budget, width)
    from .select_kernel import select

    protected = None if state.call.protects_first else state.protected
    places, is_nan = select(ranking.detach(), candidates, protected, budget, width)
    retention._nan_checks.append((retention.places[gate], is_nan.any()))
    return places


def gather_kept(state: State, kept: Tensor) -> None:
    """Gathers the tokens of ``kept``, (B, T') bool, into tensors as long as the longest example."""
    retention = state.retention
    width = int(kept.sum(1).max())
    if width == state.valid.shape[1] and bool((kept == state.valid).all()):
        return
    if retention.encoder.windowed:
        window, longest = max(retention.model_config.attention_window), kept.shape[1]
        whole = retention.config.removal == "mask"
        width = longest if whole else min(-(-width // window) * window, longest)
    gather(state, compact(kept, width))


def gather(state: State, places: Places) -> None:
    """Gathers the tokens at ``places``, unless all tokens are kept."""
    indices, valid, rows, slots = places
    if valid is None and indices.shape[1] == state.valid.shape[1]:
        return
    state.slots = None if state.moved else slots
    state.is_full = valid is None
    valid = torch.ones_like(indices, dtype=torch.bool) if valid is None else valid
    state.hidden = take(state.hidden, indices, rows)
    state.positions = take(state.positions, indices) if state.moved else indices
    retention = state.retention
    if len(retention.places) > 1 or retention.encoder.windowed:  # a later gate, or the window, needs them
        state.protected = take(state.protected, indices) & valid
        state.ids = None if state.ids is None else take(state.ids, indices)
        state.global_ = None if state.global_ is None else take(state.global_, indices) & valid
    state.valid, state.moved = valid, True
    state.mask = block_mask(state)


def block_mask(state: State) -> Any:
    """The attention mask of the remaining tokens, in the blocks' format."""
    hidden, valid = state.hidden, state.valid
    if state.global_ is not None:  # a windowed encoder
        limits = torch.finfo(hidden.dtype)
        mask = torch.zeros(valid.shape, dtype=hidden.dtype, device=hidden.device)
        return mask.masked_fill(state.global_, limits.max).masked_fill(~valid, limits.min)
    if state.is_full:
        return None
    return create_bidirectional_mask(
        config=state.retention.model_config, inputs_embeds=hidden, attention_mask=valid.long()
    )


def biased_mask(state: State, bias: Tensor) -> Tensor:
    """The attention mask plus ``bias``, (B, T) float, on the scores of each token as a key."""
    implementation = state.retention.model_config._attn_implementation
    if implementation not in ("sdpa", "eager"):
        raise ValueError(f"gate_keys: needs attn_implementation sdpa or eager, not {implementation}")
    if implementation == "sdpa":
        return bias.masked_fill(~state.valid, key_bias.CLOSED)[:, None, None]
    kind, length = state.hidden.device.type, bias.shape[1]
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else state.hidden.dtype
    bias = bias.masked_fill(~state.valid, torch.finfo(torch.float32).min).to(dtype)
    return bias[:, None, None].expand(-1, 1, length, length)


def spread_states(state: State) -> Tensor:
    """(B, T, D): the states of all tokens at their positions; the stored state, or 0, for dropped tokens."""
    if not state.moved:
        if state.c is None or state.held is None:
            return state.hidden
        return state.hidden + (1 - state.c[..., None]).to(state.hidden.dtype) * state.held
    batch, length, width = state.shape
    if state.held is None and state.slots is not None and has_kernels(state.hidden):
        from .select_kernel import place

        return place(state.hidden, state.slots)
    rows = flat_rows(state.positions, length)
    if not state.is_full:  # padding is scattered to an extra row at the end, which is removed
        rows = torch.where(state.valid.view(-1), rows, batch * length)
    out = state.hidden.new_zeros(batch * length + 1, width)
    if state.held is not None:
        out[:-1] = state.held.reshape(-1, width)
    return out.index_copy_(0, rows, state.hidden.reshape(-1, width))[:-1].view(state.shape)
