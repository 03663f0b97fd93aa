"""Whether a fast path may read the weights of a submodule in place of calling it, and its kernels."""

import functools
import importlib
from types import ModuleType

from torch import nn
from torch.nn.modules.module import _has_any_global_hook


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
