"""Which weights a fast path may read in place of calling their modules; its kernels and joint products."""

import functools
import importlib
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from acp_repro.attention.backends import HAS_TRITON

# 16-bit numbers in 16 bytes, the alignment that fast matrix kernels require.
_WHOLE_ROWS = 8
_WHOLE_LINES = 64  # 16-bit numbers in a memory line of 128 bytes, for larger products


@functools.cache
def kernels_of(what: str) -> ModuleType:
    """The Triton kernels of "step" or "training", imported on first use: a CPU does not require Triton."""
    return importlib.import_module(f".{what}_kernels", __package__)


def is_watched(*modules: nn.Module) -> bool:
    """Whether a call of one of ``modules`` does more than the ``forward`` of its class.

    Such a module has a hook (also those of ``nn.utils.prune`` and the older ``weight_norm``), or another
    ``forward`` (``accelerate`` moves weights in it).
    """
    return bool(_has_any_global_hook()) or any(
        "forward" in vars(module)
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        for module in modules
    )


def is_plain(*modules: nn.Module) -> bool:
    """Whether nothing notices that ``modules`` are not called.

    The modules must be ``nn.Linear`` or a class of this project, without adapter or parametrization, and have
    no hooks.
    """
    own = all(type(m) is nn.Linear or type(m).__module__.startswith("acp_repro.") for m in modules)
    return own and not is_watched(*modules)


def runs_kernels(x: Tensor) -> bool:
    """Whether ``step_kernels`` may serve a module for x: in inference on a GPU, outside of compiled code."""
    return HAS_TRITON and x.is_cuda and not (torch.is_grad_enabled() or torch.compiler.is_compiling())


def join_weights(*projections: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of one product for several plain (``is_plain``) projections; see ``split_product``.

    Projections to a few numbers each would use kernels for matrices whose rows are not whole 16 bytes. Those
    take several times as long as kernels for aligned rows. Together, with some rows of which nobody reads the
    results, they are aligned.
    """
    sizes = [p.out_features for p in projections]
    weights, bias = [p.weight for p in projections], None
    spare = -sum(sizes) % (_WHOLE_LINES if sum(sizes) > _WHOLE_LINES else _WHOLE_ROWS)
    # In compiled code, a bias is added to its own columns. As the bias of the joint product, its gradient
    # would be a sum over all columns.
    if not torch.compiler.is_compiling() and any(p.bias is not None for p in projections):
        zeros = weights[0].new_zeros(max(*sizes, spare))
        biases = [zeros[: p.out_features] if p.bias is None else p.bias for p in projections]
        bias = torch.cat([*biases, zeros[:spare]])
    weights.append(weights[0].detach()[:1].expand(spare, -1))
    return torch.cat(weights), bias


def split_product(y: Tensor, *projections: nn.Linear) -> list[Tensor]:
    """``[p(x) for p in projections]`` as views of y, the product of x with their ``join_weights``."""
    sizes = [p.out_features for p in projections]
    parts = y.split([*sizes, y.shape[-1] - sum(sizes)], dim=-1)[: len(sizes)]
    if not torch.compiler.is_compiling():
        return list(parts)
    return [part if p.bias is None else part + p.bias for part, p in zip(parts, projections, strict=True)]


def joint_products(x: Tensor, *projections: nn.Linear) -> list[Tensor]:
    """``[p(x) for p in projections]`` as one product."""
    return split_product(F.linear(x, *join_weights(*projections)), *projections)
