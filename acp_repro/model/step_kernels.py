"""The small operations of inference, in Triton kernels.

The kernels compute each addition to the residual stream with the norm after it, token shift,
QK-norm and forget gate before the attention, the threshold, output norm and gate after the attention, and the
product inside SwiGLU. For one token per row, each operation of PyTorch costs as much
as its launch. The forty of a layer are a third of a step of the 125M model. In a prefill, each would read in
float32 what the one before it wrote. The kernels round as the modules in ``layers`` do. A short prompt waits
for the host, so launches that recur are repeated without Triton's binder (`repeat_launches`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from acp_repro.attention.threshold import qk_norm_factor
from acp_repro.attention.triton.launch import launch, repeat_launches

# Tokens of one head per program.
_MOST_ROWS = 16
# The largest number of rows that `multiply_rows` accepts: each row reads the weights again.
FEW_ROWS = 4
# `torch.promote_types` is an operator, which would prevent the replay of launches. Only the first call, which
# is not recorded, calls it.
_promote_types = functools.cache(torch.promote_types)
# Outputs of one program of `multiply_rows`, and the inputs that it multiplies in one step.
_OUTPUTS, _INPUTS = 4, 1024


@triton.jit
def _place(heads, tokens, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Row of the batch, head, tokens (ROWS, 1) and numbers of a head (1, BLOCK_D) of this program, and which
    of them are there. Heads of the same tokens are neighbours, as they are in memory."""
    h = tl.program_id(0) % heads
    tile = tl.program_id(0) // heads
    tiles = tl.cdiv(tokens, ROWS)
    b = (tile // tiles).to(tl.int64)
    t = ((tile % tiles) * ROWS + tl.arange(0, ROWS))[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (t < tokens) & (d < D)
    return b, h, t, d, inside


@triton.jit
def _normalised(x, D: tl.constexpr, eps):
    """x / sqrt(mean(x^2) + eps) of each row; x is 0 past D."""
    return x / tl.sqrt_rn(tl.sum(x * x, 1) / D + eps)[:, None]


@triton.jit
def _log_sigmoid(x):
    """min(x, 0) - log(1 + exp(-|x|)) in float32, also where the logarithm is far below 1."""
    # log(1 + y) = 2 atanh(y / (2 + y)), whose argument is at most 1/3, so nine terms of the series suffice.
    # `tl.log` of 1 + y would lose the digits of y.
    y = tl.exp(-tl.abs(x))
    s = y / (2.0 + y)
    series = tl.full(x.shape, 1.0 / 17.0, tl.float32)
    for n in tl.static_range(8):
        series = series * (s * s) + 1.0 / (15 - 2 * n)
    return tl.minimum(x, 0.0) - 2.0 * s * series


@triton.jit(do_not_specialize=["rows"])
def _products_kernel(
    x,
    weights,
    biases,
    outs,
    rows,
    SIZES: tl.constexpr,
    D: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
):
    row = (tl.program_id(0) % rows).to(tl.int64)
    first = (tl.program_id(0) // rows) * OUTPUTS
    o = first + tl.arange(0, OUTPUTS)
    for n in tl.static_range(len(weights)):
        if (tl.program_id(1) == n) & (first < SIZES[n]):
            real = o < SIZES[n]
            sums = tl.zeros([OUTPUTS, STEP], dtype=tl.float32)
            for begin in tl.static_range(0, D, STEP):
                d = begin + tl.arange(0, STEP)
                value = tl.load(x + row * D + d, mask=d < D, other=0.0).to(tl.float32)
                inside = real[:, None] & (d < D)[None, :]
                w = tl.load(weights[n] + o[:, None] * D + d[None, :], mask=inside, other=0.0)
                sums += w.to(tl.float32) * value[None, :]
            y = tl.sum(sums, 1)
            if biases[n] is not None:
                y += tl.load(biases[n] + o, mask=real, other=0.0).to(tl.float32)
            tl.store(outs[n] + row * SIZES[n] + o, y.to(outs[n].dtype.element_ty), mask=real)


@triton.jit
def _threshold_kernel(
    weight_q, weight_k, bound, delta, factor, offset, stride, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    h = tl.program_id(0)
    d = tl.arange(0, BLOCK_D)
    at = h * stride + d
    longest_q = tl.max(tl.abs(tl.load(weight_q + at, mask=d < D, other=0.0).to(tl.float32)), 0)
    longest_k = tl.max(tl.abs(tl.load(weight_k + at, mask=d < D, other=0.0).to(tl.float32)), 0)
    u = tl.maximum(longest_q * longest_k, 2.0**-126) * factor  # a product may not underflow
    tl.store(bound + h, u)
    tl.store(delta + h, (-offset - 2.0 * u) * (1.0 + 2.0**-22))


@triton.jit
def _add_norm_kernel(x, change, weight, total, out, eps, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = d < D
    at = tl.program_id(0).to(tl.int64) * D + d
    residual = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    residual += tl.load(change + at, mask=inside, other=0.0).to(tl.float32)
    residual = residual.to(total.dtype.element_ty)
    tl.store(total + at, residual, mask=inside)
    gamma = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    y = _normalised(residual.to(tl.float32), D, eps) * gamma
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _shifted(z, state, end, mix, at, slot, t, tokens, inside, hidden, TOKENS_ONE: tl.constexpr):
    """y = a z_before + (1 - a) z of some tokens of one head. For a single token, z becomes the state.

    Args:
        at: (rows, D), addresses of z. slot: (1, D), addresses of the state and of ``end``, which receives the
            z of the last token. t: (rows, 1). mix: (rows, 1).
    """
    now = tl.load(z + at, mask=inside, other=0.0)
    before = tl.load(z + at - hidden, mask=inside & (t > 0), other=0.0).to(tl.float32)
    if state is not None:
        first = tl.load(state + slot, mask=inside & (t == 0), other=0.0).to(tl.float32)
        before = tl.where(t == 0, first, before)
        if TOKENS_ONE:
            tl.store(state + slot + t, now.to(state.dtype.element_ty), mask=inside)
    if end is not None:
        tl.store(end + slot + (t - t), now.to(end.dtype.element_ty), mask=inside & (t == tokens - 1))
    a = tl.sigmoid(mix)
    now32 = now.to(tl.float32)
    return (now32 + a * (before - now32)).to(z.dtype.element_ty)


@triton.jit(do_not_specialize=["heads", "tokens", "mix_b", "mix_t"])
def _shift_norm_kernel(
    q,
    z_k,
    z_v,
    mix_k,
    mix_v,
    forget,
    state_k,
    state_v,
    end_k,
    end_v,
    weight_q,
    weight_k,
    q_out,
    k_out,
    v_out,
    gate_out,
    heads,
    tokens,
    mix_b,
    mix_t,
    eps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    OWN_WEIGHTS: tl.constexpr,
):
    b, h, t, d, inside = _place(heads, tokens, ROWS, D, BLOCK_D)
    hidden = heads * D
    at = (b * tokens + t) * hidden + h * D + d
    slot = (b * heads + h) * D + d
    out = ((b * heads + h) * tokens + t) * D + d
    mix_at = b * mix_b + t.to(tl.int64) * mix_t + h
    weight = h * D + d if OWN_WEIGHTS else d
    x = tl.load(q + at, mask=inside, other=0.0).to(tl.float32)
    gamma = tl.load(weight_q + weight, mask=d < D, other=0.0).to(tl.float32)
    tl.store(q_out + out, (_normalised(x, D, eps) * gamma).to(q_out.dtype.element_ty), mask=inside)
    mix = tl.load(mix_k + mix_at, mask=t < tokens, other=0.0).to(tl.float32)
    k = _shifted(z_k, state_k, end_k, mix, at, slot, t, tokens, inside, hidden, ROWS == 1).to(tl.float32)
    gamma = tl.load(weight_k + weight, mask=d < D, other=0.0).to(tl.float32)
    tl.store(k_out + out, (_normalised(k, D, eps) * gamma).to(k_out.dtype.element_ty), mask=inside)
    mix = tl.load(mix_v + mix_at, mask=t < tokens, other=0.0).to(tl.float32)
    v = _shifted(z_v, state_v, end_v, mix, at, slot, t, tokens, inside, hidden, ROWS == 1)
    tl.store(v_out + out, v, mask=inside)
    gate = tl.load(forget + mix_at, mask=t < tokens, other=0.0).to(tl.float32)
    tl.store(gate_out + (b * heads + h) * tokens + t, _log_sigmoid(gate), mask=t < tokens)


@triton.jit(do_not_specialize=["heads", "tokens"])
def _norm_gate_kernel(
    x,
    gate,
    weight,
    out,
    x_b,
    x_h,
    x_t,
    heads,
    tokens,
    eps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    b, h, t, d, inside = _place(heads, tokens, ROWS, D, BLOCK_D)
    at = (b * tokens + t) * (heads * D) + h * D + d
    source = b * x_b + h.to(tl.int64) * x_h + t.to(tl.int64) * x_t + d
    value = tl.load(x + source, mask=inside, other=0.0).to(tl.float32)
    gamma = tl.load(weight + h * D + d, mask=d < D, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    y = _normalised(value, D, eps) * gamma * tl.sigmoid(g)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _silu_kernel(gate_up, out, rows, width, BLOCK: tl.constexpr):
    row = (tl.program_id(0) % rows).to(tl.int64)
    column = (tl.program_id(0) // rows) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0)
    silu = (gate * tl.sigmoid(gate)).to(up.dtype)
    y = silu.to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * width + column, y.to(out.dtype.element_ty), mask=inside)


def _tiles(tokens: int) -> dict[str, int]:
    rows = min(triton.next_power_of_2(tokens), _MOST_ROWS)
    return {"ROWS": rows, "num_warps": 1 if rows < 8 else 4}


def _repeated(function: Callable) -> Callable:
    """Wraps ``function(*tensors, *numbers)``, which returns a tuple of tensors, in `repeat_launches`.

    The result of a function of one tensor is that tensor.
    """
    run = repeat_launches(lambda *arguments: function(*arguments[:-1], *arguments[-1]))

    @functools.wraps(function)
    def call(*arguments):
        tensors = [x for x in arguments if x is None or isinstance(x, Tensor)]
        found = run(*tensors, arguments[len(tensors) :])
        return found if len(found) > 1 else found[0]

    return call


@_repeated
def add_and_norm(x: Tensor, change: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``x + change`` of (..., D), and its ``RMSNorm``, both in the dtype of the sum."""
    x, change, size = x.contiguous(), change.contiguous(), x.shape[-1]
    total, out = (x.new_empty(x.shape, dtype=_promote_types(x.dtype, change.dtype)) for _ in range(2))
    launch(
        _add_norm_kernel,
        (x.numel() // size,),
        *(x, change, weight, total, out, eps),
        D=size,
        BLOCK_D=triton.next_power_of_2(size),
    )
    return total, out


def multiply_rows(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    """``[F.linear(x, w, b) ...]`` in one launch, for x (..., D) of at most ``FEW_ROWS`` rows.

    The weights (n, D) are contiguous and have the dtype of x.
    """
    x = x.contiguous()
    size = x.shape[-1]
    outs = [x.new_empty((*x.shape[:-1], len(w))) for w in weights]
    rows, sizes = x.numel() // size, tuple(map(len, weights))
    launch(
        _products_kernel,
        (rows * triton.cdiv(max(sizes), _OUTPUTS), len(weights)),
        *(x, *map(tuple, (weights, biases, outs)), rows),
        SIZES=sizes,
        D=size,
        OUTPUTS=_OUTPUTS,
        STEP=min(triton.next_power_of_2(size), _INPUTS),
        num_warps=4,
    )
    return outs


@_repeated
def bound_and_threshold(
    q_weight: Tensor, k_weight: Tensor, num_heads: int, head_dim: int, offset: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """U (H,) of ``logit_bound_from_qk_norm``, and delta (H,) of ``pruning_threshold``, bit for bit.

    ``offset`` is log L - log epsilon, of ``threshold_offset``.
    """
    bound, delta = (torch.empty(num_heads, dtype=torch.float32, device=q_weight.device) for _ in range(2))
    factor = qk_norm_factor(head_dim, 1.0 / math.sqrt(head_dim), dtype)
    launch(
        _threshold_kernel,
        (num_heads,),
        *(q_weight, k_weight, bound, delta, factor, offset, 0 if len(q_weight) == head_dim else head_dim),
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=1,
    )
    return bound, delta


@_repeated
def shift_and_norm(
    q: Tensor,
    z_k: Tensor,
    z_v: Tensor,
    mix_k: Tensor,
    mix_v: Tensor,
    forget: Tensor,
    state_k: Tensor | None,
    state_v: Tensor | None,
    end_k: Tensor | None,
    end_v: Tensor | None,
    weight_q: Tensor,
    weight_k: Tensor,
    num_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values, as ``token_shift`` and ``HeadRMSNorm`` compute them, and log forget gates.

    Args:
        q: (B, T, hidden), projected.
        z_k, z_v: of keys and values, (B, T, hidden), projected and not shifted.
        mix_k, mix_v: of keys and values, (B, T, H), the logits of the token shift.
        forget: (B, T, H), the logits of the forget gates.
        state_k, state_v: (B, 1, H, D), contiguous, z of the token before; None at the start of the sequence.
            If T = 1 they are overwritten with this z.
        end_k, end_v: (B, 1, H, D), contiguous; they receive the z of the last token. Or None.
        weight_q, weight_k: of the norms of queries and keys, (D,) or (H * D,).

    Returns:
        q, k, v: (B, H, T, D) in the dtype of q and z. log_fgate: (B, H, T) float32.
    """
    batch, tokens, hidden = q.shape
    head_dim, tiles = hidden // num_heads, _tiles(tokens)
    q, z_k, z_v = (x.contiguous() for x in (q, z_k, z_v))
    logits = [mix_k, mix_v, forget]
    if len({x.stride() for x in logits}) > 1 or forget.stride(-1) != 1:
        logits = [x.contiguous() for x in logits]
    out = [x.new_empty((batch, num_heads, tokens, head_dim)) for x in (q, z_k, z_v)]
    out.append(torch.empty((batch, num_heads, tokens), dtype=torch.float32, device=q.device))
    launch(
        _shift_norm_kernel,
        (batch * num_heads * triton.cdiv(tokens, tiles["ROWS"]),),
        *(q, z_k, z_v, *logits, state_k, state_v, end_k, end_v, weight_q, weight_k, *out),
        *(num_heads, tokens, *logits[0].stride()[:2], eps),
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        OWN_WEIGHTS=weight_q.numel() > head_dim,
        **tiles,
    )
    return tuple(out)


@_repeated
def norm_and_gate(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> tuple[Tensor]:
    """``HeadRMSNorm`` of x (B, H, T, D) with its gate (B, T, H * D): (B, T, H * D) in the dtype of x."""
    batch, heads, tokens, head_dim = x.shape
    x, gate = x if x.stride(-1) == 1 else x.contiguous(), gate.contiguous()
    out = torch.empty((batch, tokens, heads * head_dim), dtype=x.dtype, device=x.device)
    tiles = _tiles(tokens)
    launch(
        _norm_gate_kernel,
        (batch * heads * triton.cdiv(tokens, tiles["ROWS"]),),
        *(x, gate, weight, out, *x.stride()[:3], heads, tokens, eps),
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        **tiles,
    )
    return (out,)


@_repeated
def silu_and_multiply(gate_up: Tensor) -> tuple[Tensor]:
    """``silu(gate) * up``: (..., 2 W), the gate first, -> (..., W) of the same dtype."""
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], width))
    rows, block = out.numel() // width, min(triton.next_power_of_2(width), 1024)
    if rows:
        launch(
            _silu_kernel,
            (rows * triton.cdiv(width, block),),
            gate_up.contiguous(),
            out,
            rows,
            width,
            BLOCK=block,
            num_warps=4,
        )
    return (out,)
