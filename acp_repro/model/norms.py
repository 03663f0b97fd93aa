"""RMSNorm of the residual stream and of heads; in inference on a GPU with the addition before it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .modules import is_plain, kernels_of, runs_kernels


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32; returned in the dtype of x."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim), any floating dtype -> the same shape and dtype."""
        if x.dtype == self.weight.dtype:  # one kernel, which computes in float32 too
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        weight = self.weight.float()
        return F.rms_norm(x.float(), weight.shape, weight, self.eps).to(x.dtype)


class HeadRMSNorm(RMSNorm):
    """RMSNorm of each head separately: QK-norm, and the output norm of FoX (Pro).

    If ``share_across_heads``, all heads share one weight (head_dim,); otherwise the weight is (heads *
    head_dim,).
    """

    def __init__(self, num_heads: int, head_dim: int, eps: float, share_across_heads: bool = False):
        super().__init__(head_dim if share_across_heads else num_heads * head_dim, eps)
        self.head_dim = head_dim

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """(B, T, H, D) -> the same; times sigmoid(gate), the output gate, before the only rounding."""
        y = F.rms_norm(x.float(), (self.head_dim,), eps=self.eps)
        y = y * self.weight.float().view(-1, self.head_dim)
        if gate is not None:
            y = y * torch.sigmoid(gate.float())
        return y.to(x.dtype)


def add_and_norm(x: Tensor, change: Tensor | None, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    """The residual stream ``x + change`` (None: x), and its norm: in inference on a GPU by one kernel."""
    if change is None:
        return x, norm(x)
    if runs_kernels(x) and type(norm) is RMSNorm and is_plain(norm):
        return kernels_of("step").add_and_norm(x, change, norm.weight, norm.eps)
    x = x + change
    return x, norm(x)
