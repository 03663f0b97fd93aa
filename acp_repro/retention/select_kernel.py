"""Top-M selection (Eq. 7) in one Triton kernel, and scattering of states to their positions in another.

For inference on a GPU. PyTorch sorts twice and then gathers with a dozen small kernels. These kernels do not
sort: they find the M-th largest score bit by bit, and a token's new index is the number of kept tokens before
it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .budget import Places

_BLOCK_ROWS = 8


@triton.jit(do_not_specialize=["length", "width"])
def _select_kernel(
    scores,
    candidates,
    protected,
    budgets,
    indices,
    rows,
    slots,
    is_nan,
    length,
    width,
    BLOCK: tl.constexpr,
    ALL: tl.constexpr,
    FIRST: tl.constexpr,
    SAME: tl.constexpr,
):
    example = tl.program_id(0).to(tl.int64)
    start = example * length
    i = tl.arange(0, BLOCK)
    inside = i < length
    score = tl.load(scores + start + i, mask=inside, other=0.0).to(tl.float32)
    wrong = (score != score) & inside
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where(score == 0.0, 0, bits)  # -0 is 0
    # Unsigned integers in the order of the floats; the extremes mark protected tokens and non-candidates.
    key = tl.where(bits < 0, ~bits, bits | -2147483648).to(tl.uint32, bitcast=True).to(tl.int64)
    key = tl.minimum(tl.maximum(key, 1), 4294967294)
    saved = (i == 0) if FIRST else (tl.load(protected + start + i, mask=inside, other=0) != 0)
    key = tl.where(saved, 4294967295, key)
    if not ALL:
        able = tl.load(candidates + start + i, mask=inside, other=0) != 0
        key = tl.where(able, key, 0)
        wrong = wrong & able
    budget = width if SAME else tl.load(budgets + example).to(tl.int32)
    key = tl.where(inside, key, -1)
    # The largest value that at least M keys reach, which is the key of the last kept token.
    limit = tl.zeros([], dtype=tl.int64)
    for step in range(0, 32):
        higher = limit + (tl.full([], 1, tl.int64) << (31 - step))
        limit = tl.where(tl.sum((key >= higher).to(tl.int32), 0) >= budget, higher, limit)
    above = key > limit
    tied = key == limit
    left = budget - tl.sum(above.to(tl.int32), 0)
    kept = above | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= left))
    slot = tl.cumsum(kept.to(tl.int32), 0) - 1
    kept = kept & (slot < width)
    out = example * width
    tl.store(indices + out + slot, i.to(tl.int64), mask=kept)
    tl.store(rows + out + slot, start + i, mask=kept)
    tl.store(slots + start + i, tl.where(kept, slot, -1), mask=inside)
    number = tl.sum(kept.to(tl.int32), 0)
    filling = (i >= number) & (i < width)
    tl.store(indices + out + i, tl.full([BLOCK], 0, tl.int64) + (length - 1), mask=filling)
    tl.store(rows + out + i, tl.full([BLOCK], 0, tl.int64) + start + (length - 1), mask=filling)
    tl.store(is_nan + example, (tl.sum(wrong.to(tl.int32), 0) > 0).to(tl.uint8))


def select(
    scores: Tensor, candidates: Tensor | None, protected: Tensor | None, budget: Tensor | None, width: int
) -> tuple[Places, Tensor]:
    """``budget.top_indices``, plus the indices that moving states needs.

    Padding repeats the last position of the row.

    Args:
        scores: (B, T) float.
        candidates, protected: (B, T) bool; None: all are candidates, only the first is protected.
        budget: (B,) integer, at most the number of candidates of each example; None means ``width`` for all.
        width: the largest budget.

    Returns:
        The places, and (B,) bool: whether a candidate's score was NaN.
    """
    batch, length = scores.shape
    whole = scores.new_empty(2, batch, width, dtype=torch.int64)
    slots = scores.new_empty(batch, length, dtype=torch.int32)
    is_nan = scores.new_empty(batch, dtype=torch.bool)
    block = max(16, triton.next_power_of_2(length))
    with torch.cuda.device_of(scores):
        _select_kernel[(batch,)](
            scores.contiguous(),
            scores if candidates is None else candidates.contiguous().view(torch.uint8),
            scores if protected is None else protected.contiguous().view(torch.uint8),
            scores if budget is None else budget,
            whole[0],
            whole[1],
            slots,
            is_nan.view(torch.uint8),
            length,
            width,
            BLOCK=block,
            ALL=candidates is None,
            FIRST=protected is None,
            SAME=budget is None,
            num_warps=min(16, max(1, block // 256)),
        )
    valid = None if budget is None else torch.arange(width, device=scores.device) < budget[:, None]
    return Places(whole[0], valid, whole[1].view(-1), slots), is_nan


@triton.jit(do_not_specialize=["rows", "length", "kept"])
def _place_kernel(
    states, slots, out, rows, length, kept, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    slot = tl.load(slots + row, mask=inside, other=-1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    source = (row // length) * kept + slot
    there = inside & (slot >= 0)
    state = tl.load(
        states + source[:, None] * D + d[None, :], mask=there[:, None] & (d[None, :] < D), other=0.0
    )
    tl.store(out + row[:, None] * D + d[None, :], state, mask=inside[:, None] & (d[None, :] < D))


def place(states: Tensor, slots: Tensor) -> Tensor:
    """(B, T, D): ``states`` (B, M, D), same dtype, scattered in one pass; 0 at positions without a slot."""
    batch, length = slots.shape
    kept, width = states.shape[1:]
    out = states.new_empty(batch, length, width)
    rows = batch * length
    with torch.cuda.device_of(states):
        _place_kernel[(triton.cdiv(rows, _BLOCK_ROWS),)](
            states.contiguous(),
            slots,
            out,
            rows,
            length,
            kept,
            D=width,
            BLOCK_D=triton.next_power_of_2(width),
            ROWS=_BLOCK_ROWS,
        )
    return out
