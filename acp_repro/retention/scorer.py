"""The scoring network of Eq. 3 with its running summary, computed in parallel."""

import torch
from torch import Tensor, nn

from acp_repro.attention.backends import HAS_TRITON
from acp_repro.model.modules import is_plain

from .budget import compact, take

_CHUNK = 128


def running_summary(x: Tensor, decay: float) -> Tensor:
    """m_t = decay m_{t-1} + (1 - decay) x_t with m_0 = 0, for all positions at once (Eq. 3).

    Uses two small matrix products: within chunks, and from chunk to chunk. No value is divided by a power of
    the decay, so the computation does not overflow at any length.

    Args:
        x: (B, T, D) float.

    Returns:
        (B, T, D), in the dtype of x: m_1 to m_T.
    """
    batch, length, width = x.shape
    size = min(_CHUNK, length)
    chunks = -(-length // size)
    x = nn.functional.pad(x, (0, 0, 0, chunks * size - length)).view(batch, chunks, size, width)
    inside = torch.matmul(_decay_matrix(size, decay, x), x)
    if chunks > 1:
        # The summary before each chunk: the final sums of all earlier chunks, decayed by whole chunks.
        ends = inside[:, :, -1]
        carried = torch.matmul(_decay_matrix(chunks, decay**size, x), ends)
        before = nn.functional.pad(carried[:, :-1], (0, 0, 1, 0))
        powers = decay ** torch.arange(1, size + 1, device=x.device, dtype=x.dtype)
        inside = inside + powers[:, None] * before[:, :, None]
    return (1 - decay) * inside.reshape(batch, chunks * size, width)[:, :length]


def running_summary_loop(x: Tensor, decay: float) -> Tensor:
    """The recurrence of Eq. 3 as printed, x (B, T, D) float: the reference for :func:`running_summary`."""
    m, all_m = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        m = decay * m + (1 - decay) * x[:, t]
        all_m.append(m)
    return torch.stack(all_m, 1)


def _decay_matrix(size: int, decay: float, like: Tensor) -> Tensor:
    """(size, size): decay^(i - j) on and below the diagonal, 0 above."""
    at = torch.arange(size, device=like.device)
    distance = at[:, None] - at
    powers = torch.pow(torch.full((), decay, dtype=like.dtype, device=like.device), distance.clamp(min=0))
    return powers * (distance >= 0)


class RetentionScorer(nn.Module):
    """s_t = v' tanh(W h_t + U m_{t-1}) + b of Eq. 3.

    U is applied before the summary. Because both are linear, the result is the same, and the summary has
    dimension ``width`` instead of the hidden size.

    Args:
        hidden_size: size of h_t.
        width: rows of W and U.
        decay: gamma of the summary.
        initial_logit: the initial b.
    """

    def __init__(self, hidden_size: int, width: int, decay: float, initial_logit: float = 0.0):
        super().__init__()
        self.decay = decay
        self.w = nn.Linear(hidden_size, width, bias=False)
        self.u = nn.Linear(hidden_size, width, bias=False)
        self.v = nn.Linear(width, 1)
        for layer in (self.w, self.u, self.v):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
        nn.init.constant_(self.v.bias, initial_logit)

    def forward(self, hidden: Tensor, kept: Tensor | None = None) -> Tensor:
        """(B, T) float32 scores.

        Args:
            hidden: (B, T, D), any floating dtype.
            kept: (B, T) bool: the tokens that enter the summary, in order; None means all. Scores of other
                tokens are undefined.
        """
        plain = is_plain(self.w, self.u, self.v)
        if plain:  # W and U in one product
            parts = nn.functional.linear(hidden, torch.cat([self.w.weight, self.u.weight]))
        else:
            parts = torch.cat([self.w(hidden), self.u(hidden)], -1)
        if plain and has_kernels(parts, gradient=True):
            from .kernel import scan

            return scan(parts, kept, self.decay, self.v.weight.view(-1), self.v.bias)
        local_part, global_part = wide(parts).chunk(2, -1)
        indices = None if kept is None else compact(kept, kept.shape[1]).indices
        if indices is not None:  # gather to the front, then scatter back
            global_part = take(global_part, indices)
        with torch.autocast(hidden.device.type, enabled=False):  # powers of the decay need float32
            summary = running_summary(global_part, self.decay)
            before = nn.functional.pad(summary[:, :-1], (0, 0, 1, 0))
            if indices is not None:
                before = torch.empty_like(before).scatter(1, indices[..., None].expand_as(before), before)
            activity = torch.tanh(local_part + before)
            if plain:
                return nn.functional.linear(activity, wide(self.v.weight), wide(self.v.bias)).squeeze(-1)
        return wide(self.v(activity.to(hidden.dtype))).squeeze(-1)


def has_kernels(x: Tensor, gradient: bool = False) -> bool:
    """Whether Triton kernels support ``x`` of any shape and dtype, which needs a GPU and eager mode.

    If autograd records ``x``, the kernel must have a backward pass (``gradient``).
    """
    if not x.is_cuda or x.dtype == torch.float64 or torch.compiler.is_compiling():
        return False
    return (gradient or not (torch.is_grad_enabled() and x.requires_grad)) and HAS_TRITON


def wide(x: Tensor) -> Tensor:
    """``x`` in at least float32, same shape, because bfloat16 scores of different tokens would tie."""
    return x if x.dtype == torch.float64 else x.float()
