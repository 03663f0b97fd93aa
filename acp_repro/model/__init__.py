"""FoX, the Forgetting Transformer language model (Pro and LLaMA), with ACP in its attention.

Names load on first use: ``from acp_repro.model import FoXConfig`` imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .cache import FoXCache, generate
    from .checkpoint import load_config, load_pretrained, save_pretrained
    from .config import FoXConfig
    from .fox import FoXForCausalLM, FoXModel
    from .layers import ForgettingAttentionCore, ForgettingAttentionLayer
    from .loss import linear_cross_entropy

_HOME = {
    "FoXCache": "cache",
    "FoXConfig": "config",
    "FoXForCausalLM": "fox",
    "FoXModel": "fox",
    "ForgettingAttentionCore": "layers",
    "ForgettingAttentionLayer": "layers",
    "generate": "cache",
    "linear_cross_entropy": "loss",
    "load_config": "checkpoint",
    "load_pretrained": "checkpoint",
    "save_pretrained": "checkpoint",
}

__all__ = [
    "FoXCache",
    "FoXConfig",
    "FoXForCausalLM",
    "FoXModel",
    "ForgettingAttentionCore",
    "ForgettingAttentionLayer",
    "generate",
    "linear_cross_entropy",
    "load_config",
    "load_pretrained",
    "save_pretrained",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
