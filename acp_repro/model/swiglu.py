"""The feed-forward part of a block. Its product is not kept for the backward pass."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from acp_repro.attention.backends import HAS_TRITON

from .layers import Linear
from .modules import is_plain, kernels_of, runs_kernels


class SwiGLU(nn.Module):
    """down(silu(gate) * up); one matrix with the rows of gate, then those of up."""

    def __init__(self, hidden_size: int, width: int, std: float, fuse_training: bool = True):
        super().__init__()
        self.fuse_training = fuse_training
        self.gate_proj = Linear(hidden_size, 2 * width, std)
        self.down_proj = Linear(width, hidden_size, std)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, hidden) -> (B, T, hidden), in the dtype of the product."""
        gate_up = self.gate_proj(x)
        if torch.compiler.is_compiling():
            down = self.down_proj
            if self.fuse_training and torch.is_grad_enabled() and is_plain(down) and down.bias is None:
                return _Down.apply(gate_up, down.weight.to(gate_up.dtype))
        elif runs_kernels(gate_up):
            return self.down_proj(kernels_of("step").silu_and_multiply(gate_up))
        gate, up = gate_up.chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class _Down(torch.autograd.Function):
    """``silu(gate) * up`` and the projection after it, in compiled blocks, which train."""

    # The saved product would be a tenth of the memory that a block saves for its backward pass. The backward
    # pass reads both factors anyway and recomputes the product.

    @staticmethod
    def forward(gate_up: Tensor, weight: Tensor) -> Tensor:
        """(..., 2 W), (hidden, W) -> (..., hidden)."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, weight)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad: Tensor):
        gate_up, weight = ctx.saved_tensors
        grad_gate_up, product = _backward(gate_up, grad @ weight)
        grad_weight = grad.flatten(0, -2).T @ product.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return grad_gate_up, grad_weight


def _backward(gate_up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of both factors (..., 2 W), and their product (..., W) once more."""
    if gate_up.is_cuda and HAS_TRITON and gate_up.dtype != torch.float64:
        return swiglu_backward_op(gate_up, grad)
    accumulate = torch.promote_types(gate_up.dtype, torch.float32)
    gate, up = gate_up.to(accumulate).chunk(2, dim=-1)
    share, arriving = torch.sigmoid(gate), grad.to(accumulate)
    silu = gate * share
    grads = (arriving * up * share * (1 + gate * (1 - share)), arriving * silu)
    return torch.cat(grads, -1).to(gate_up.dtype), (silu * up).to(gate_up.dtype)


@torch.library.custom_op("acp_repro::swiglu_backward", mutates_args=())
def swiglu_backward_op(gate_up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """``training_kernels.swiglu_backward``, as an operator for compiled code."""
    return kernels_of("training").swiglu_backward(gate_up, grad)


@swiglu_backward_op.register_fake
def _(gate_up, grad):
    return gate_up.new_empty(gate_up.shape), grad.new_empty(grad.shape)
