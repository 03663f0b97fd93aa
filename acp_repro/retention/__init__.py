"""Adaptive Retention: an encoder that learns which tokens to keep under a budget (Section 3).

    from acp_repro.retention import RetentionConfig, retain
    model = retain(AutoModelForSequenceClassification.from_pretrained(...), RetentionConfig(budget=0.3))

The components (:class:`RetentionScorer`, :func:`hard_concrete`, :func:`keep_top`) need only torch. Putting
them into an encoder needs transformers. Names load on first use.
"""

from typing import TYPE_CHECKING

from acp_repro.common import lazy

if TYPE_CHECKING:
    from .budget import keep_top, token_budgets
    from .config import PROFILES, RetentionConfig
    from .cost import encoder_cost
    from .encoders import Encoder, register_encoder
    from .gates import hard_concrete
    from .retention import GateRecord, Retention
    from .scorer import RetentionScorer, running_summary
    from .trainer import RetentionCallback
    from .wrap import from_pretrained, retain

_HOME = {
    "Encoder": "encoders",
    "GateRecord": "retention",
    "PROFILES": "config",
    "Retention": "retention",
    "RetentionCallback": "trainer",
    "RetentionConfig": "config",
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

__all__ = [
    "PROFILES",
    "Encoder",
    "GateRecord",
    "Retention",
    "RetentionCallback",
    "RetentionConfig",
    "RetentionScorer",
    "encoder_cost",
    "from_pretrained",
    "hard_concrete",
    "keep_top",
    "register_encoder",
    "retain",
    "running_summary",
    "token_budgets",
]

__getattr__, __dir__ = lazy.names(__name__, _HOME)
