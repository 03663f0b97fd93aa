"""Adaptive Retention: an encoder that learns which tokens to keep under a budget (Section 3).

    from acp_repro.retention import RetentionConfig, retain
    model = retain(AutoModelForSequenceClassification.from_pretrained(...), RetentionConfig(budget=0.3))

Torch alone is needed by the parts (:class:`RetentionScorer`, :func:`hard_concrete`, :func:`keep_top`), and
transformers by what puts them into an encoder. Names load on first use.
"""

from __future__ import annotations

from acp_repro.common import lazy

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

__getattr__, __dir__ = lazy.names(__name__, _HOME)
