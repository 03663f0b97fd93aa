"""Which weights a fast path may read in place of calling their modules; its kernels and joint products."""

import functools
import importlib
from collections.abc import Sequence
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from acp_repro.attention.backends import HAS_TRITON

# 16-bit numbers in 16 bytes, the alignment that fast matrix kernels require.
_WHOLE_ROWS = 8
_ALIGNED = 128  # 16-bit numbers in 256 bytes, the largest alignment that kernels ask for
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


def join_weights(*groups: Sequence[nn.Linear]) -> list[tuple[Tensor, Tensor | None]]:
    """Weight and bias of one product for the plain (``is_plain``) projections of each group; see
    ``split_product``. All groups have the same sizes, so that the same kernels join them.

    Projections to a few numbers each would use kernels for matrices whose rows are not whole 16 bytes. Those
    take several times as long as kernels for aligned rows. Together, with some rows of which nobody reads the
    results, they are aligned.
    """
    sizes, like, bias = [p.out_features for p in groups[0]], groups[0][0].weight.detach(), None
    spare = -sum(sizes) % (_WHOLE_LINES if sum(sizes) > _WHOLE_LINES else _WHOLE_ROWS)
    rows, unread = sum(sizes) + spare, like[:1].expand(spare, -1)
    weight = torch.cat([x for group in groups for x in (*(p.weight for p in group), unread)])
    # In compiled code, a bias is added to its own columns. As the bias of the joint product, its gradient
    # would be a sum over all columns.
    if not torch.compiler.is_compiling() and any(p.bias is not None for group in groups for p in group):
        # Each of several biases begins at an aligned address, on which the choice of a kernel depends.
        zeros = like.new_zeros(rows if len(groups) == 1 else -(-rows // _ALIGNED) * _ALIGNED)
        blanks = [zeros[:size] for size in (*sizes, len(zeros) - sum(sizes))]
        given = [zip((*(p.bias for p in group), None), blanks, strict=True) for group in groups]
        bias = torch.cat([blank if x is None else x for one in given for x, blank in one])
    if len(groups) == 1:
        return [(weight, bias)]
    biases = [None] * len(groups) if bias is None else bias.view(len(groups), -1)[:, :rows]
    return list(zip(weight.split(rows), biases, strict=True))


def split_product(y: Tensor, *projections: nn.Linear) -> list[Tensor]:
    """``[p(x) for p in projections]`` as views of y, the product of x with their ``join_weights``."""
    sizes = [p.out_features for p in projections]
    parts = y.split([*sizes, y.shape[-1] - sum(sizes)], dim=-1)[: len(sizes)]
    if not torch.compiler.is_compiling():
        return list(parts)
    return [part if p.bias is None else part + p.bias for part, p in zip(parts, projections, strict=True)]


def joint_products(x: Tensor, *projections: nn.Linear) -> list[Tensor]:
    """``[p(x) for p in projections]`` as one product."""
    return split_product(F.linear(x, *join_weights(projections)[0]), *projections)
