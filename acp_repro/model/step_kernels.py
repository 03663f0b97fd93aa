"""The small operations of a decoding step, in two kernels (Triton): token shift and QK-norm before the
attention, output norm and gate after it.

With one token a row each operation of PyTorch takes as long as its launch: forty of them a layer are a
third of a step of the 125M model. Roundings are those of the modules in ``layers``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from acp_repro.attention.triton.tiles import on_device_of


@triton.jit
def _normalised(x, D: tl.constexpr, eps):
    """x / sqrt(mean(x^2) + eps) of one row; x is 0 past D."""
    return x / tl.sqrt_rn(tl.sum(x * x, 0) / D + eps)


@triton.jit
def _shifted(z, state, mix, row, inside):
    """y = a z_before + (1 - a) z of one row, and z becomes the state."""
    before = tl.load(state + row, mask=inside, other=0.0).to(tl.float32)
    now = tl.load(z + row, mask=inside, other=0.0)
    tl.store(state + row, now.to(state.dtype.element_ty), mask=inside)
    a = tl.sigmoid(tl.load(mix).to(tl.float32))
    now32 = now.to(tl.float32)
    return (now32 + a * (before - now32)).to(z.dtype.element_ty)


@triton.jit(do_not_specialize=["heads"])
def _shift_norm_kernel(
    q,
    z_k,
    z_v,
    mix_k,
    mix_v,
    state_k,
    state_v,
    weight_q,
    weight_k,
    q_out,
    k_out,
    v_out,
    heads,
    eps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OWN_WEIGHTS: tl.constexpr,
):
    bh = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    row = bh * D + d
    weight = d
    if OWN_WEIGHTS:
        weight = (bh % heads) * D + d
    x = tl.load(q + row, mask=inside, other=0.0).to(tl.float32)
    gamma = tl.load(weight_q + weight, mask=inside, other=0.0).to(tl.float32)
    tl.store(q_out + row, (_normalised(x, D, eps) * gamma).to(q_out.dtype.element_ty), mask=inside)
    k = _shifted(z_k, state_k, mix_k + bh, row, inside).to(tl.float32)
    gamma = tl.load(weight_k + weight, mask=inside, other=0.0).to(tl.float32)
    tl.store(k_out + row, (_normalised(k, D, eps) * gamma).to(k_out.dtype.element_ty), mask=inside)
    tl.store(v_out + row, _shifted(z_v, state_v, mix_v + bh, row, inside), mask=inside)


@triton.jit(do_not_specialize=["heads"])
def _norm_gate_kernel(x, gate, weight, out, heads, eps, D: tl.constexpr, BLOCK_D: tl.constexpr):
    bh = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    row = bh * D + d
    value = tl.load(x + row, mask=inside, other=0.0).to(tl.float32)
    gamma = tl.load(weight + (bh % heads) * D + d, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row, mask=inside, other=0.0).to(tl.float32)
    y = _normalised(value, D, eps) * gamma * tl.sigmoid(g)
    tl.store(out + row, y.to(out.dtype.element_ty), mask=inside)


def shift_and_norm(
    q: Tensor,
    z: tuple[Tensor, Tensor],
    mix: tuple[Tensor, Tensor],
    states: tuple[Tensor, Tensor],
    weights: tuple[Tensor, Tensor],
    num_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of one token a row, as ``token_shift`` and ``HeadRMSNorm`` give them.

    Args:
        q: (B, 1, hidden), projected.
        z: of keys and values, (B, 1, hidden), projected and not shifted.
        mix: of keys and values, (B, 1, H), the logits of the token shift.
        states: (B, 1, H, D), the z before; they become these z, in place.
        weights: of the norms of queries and keys, (D,) or (H * D,).

    Returns:
        q, k, v: (B, H, 1, D) in the dtype of q and z.
    """
    batch, _, hidden = q.shape
    head_dim = hidden // num_heads
    q, z, mix = q.contiguous(), [x.contiguous() for x in z], [x.contiguous() for x in mix]
    out = [x.new_empty((batch, num_heads, 1, head_dim)) for x in (q, *z)]
    with on_device_of(q):
        _shift_norm_kernel[(batch * num_heads,)](
            q,
            *z,
            *mix,
            *states,
            *weights,
            *out,
            num_heads,
            eps,
            D=head_dim,
            BLOCK_D=triton.next_power_of_2(head_dim),
            OWN_WEIGHTS=weights[0].numel() > head_dim,
            num_warps=1,
        )
    return tuple(out)


def norm_and_gate(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``HeadRMSNorm`` with its gate, of one token a row.

    Args:
        x: (B, H, 1, D). gate: (B, 1, H * D). weight: (H * D,).

    Returns:
        (B, 1, H * D) in the dtype of x.
    """
    batch, heads, _, head_dim = x.shape
    x, gate = x.contiguous(), gate.contiguous()
    out = torch.empty((batch, 1, heads * head_dim), dtype=x.dtype, device=x.device)
    with on_device_of(x):
        _norm_gate_kernel[(batch * heads,)](
            x,
            gate,
            weight,
            out,
            heads,
            eps,
            D=head_dim,
            BLOCK_D=triton.next_power_of_2(head_dim),
            num_warps=1,
        )
    return out
