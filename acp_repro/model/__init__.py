"""FoX, the Forgetting Transformer language model (Pro and LLaMA), with ACP in its attention.

Names load on first use: ``from acp_repro.model import FoXConfig`` imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .cache import FoXCache
    from .config import FoXConfig
    from .fox import FoXForCausalLM, FoXModel, load_pretrained
    from .generation import filter_logits, generate, stream_tokens
    from .layers import ForgettingAttentionCore, ForgettingAttentionLayer
    from .loss import linear_cross_entropy
    from .pretrained import load_config, save_pretrained

_HOME = {
    "FoXCache": "cache",
    "FoXConfig": "config",
    "FoXForCausalLM": "fox",
    "FoXModel": "fox",
    "ForgettingAttentionCore": "layers",
    "ForgettingAttentionLayer": "layers",
    "filter_logits": "generation",
    "generate": "generation",
    "linear_cross_entropy": "loss",
    "load_config": "pretrained",
    "load_pretrained": "fox",
    "save_pretrained": "pretrained",
    "stream_tokens": "generation",
}

__all__ = [
    "FoXCache",
    "FoXConfig",
    "FoXForCausalLM",
    "FoXModel",
    "ForgettingAttentionCore",
    "ForgettingAttentionLayer",
    "filter_logits",
    "generate",
    "linear_cross_entropy",
    "load_config",
    "load_pretrained",
    "save_pretrained",
    "stream_tokens",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
