"""Adaptive Computation Pruning for the Forgetting Transformer, re-run end to end.

The names that other projects use most stand here: ``from acp_repro import forgetting_attention``. They
load on first use. Importing the package loads neither torch nor triton: ``analysis`` reads records
through :mod:`acp_repro.records` on machines that have neither.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .attention import forgetting_attention
    from .model import ForgettingAttentionLayer, FoXConfig, FoXForCausalLM, load_pretrained

__version__ = "0.1.0"

_HOME = {
    "FoXConfig": "model",
    "FoXForCausalLM": "model",
    "ForgettingAttentionLayer": "model",
    "forgetting_attention": "attention",
    "load_pretrained": "model",
}

__all__ = [
    "FoXConfig",
    "FoXForCausalLM",
    "ForgettingAttentionLayer",
    "__version__",
    "forgetting_attention",
    "load_pretrained",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
