"""Adaptive Retention: an encoder that learns which tokens to keep under a budget (Section 3).

    from acp_repro.retention import RetentionConfig, retain
    model = retain(AutoModelForSequenceClassification.from_pretrained(...), RetentionConfig(budget=0.3))

Torch alone is needed by the parts (:class:`RetentionScorer`, :func:`hard_concrete`, :func:`keep_top`), and
transformers by what puts them into an encoder. Names load on first use.
"""

from __future__ import annotations

import importlib

_HOME = {
    "Encoder": "encoders",
    "GateRecord": "forward",
    "PROFILES": "settings",
    "Retention": "retention",
    "RetentionCallback": "trainer",
    "RetentionConfig": "settings",
    "RetentionScorer": "scorer",
    "encoder_cost": "cost",
    "from_pretrained": "wrap",
    "hard_concrete": "gates",
    "keep_top": "budget",
    "register_encoder": "encoders",
    "retain": "wrap",
    "running_summary": "scorer",
    "token_budgets": "budget",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
