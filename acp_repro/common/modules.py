"""Whether a fast path may read the weights of a submodule in place of calling it."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

_OWN = ("torch.nn.modules.", "acp_repro.")


def is_watched(*modules: nn.Module) -> bool:
    """Whether a call of one of ``modules`` does more than its class says.

    It has a hook (also those of ``nn.utils.prune`` and the older ``weight_norm``), or another ``forward``
    (``accelerate`` moves weights in it).
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

    They are classes of torch or of this project, which an adapter or a parametrization is not, and nobody
    watches them.
    """
    own = all(type(module).__module__.startswith(_OWN) for module in modules)
    return own and not is_watched(*modules)
