"""Adaptive Retention: an encoder that learns which tokens to keep under a budget (Section 3).

    from acp_repro.retention import RetentionConfig, retain
    model = retain(AutoModelForSequenceClassification.from_pretrained(...), RetentionConfig(budget=0.3))

The components (:class:`RetentionScorer`, :func:`hard_concrete`, :func:`keep_top`) need only torch. Putting
them into an encoder needs transformers. Names load on first use.
"""

from __future__ import annotations

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
    **{"Encoder": "encoders", "register_encoder": "encoders", "encoder_cost": "cost"},
    **{"GateRecord": "retention", "Retention": "retention", "RetentionCallback": "trainer"},
    **{"PROFILES": "config", "RetentionConfig": "config", "hard_concrete": "gates"},
    **{"RetentionScorer": "scorer", "running_summary": "scorer"},
    **{"from_pretrained": "wrap", "retain": "wrap", "keep_top": "budget", "token_budgets": "budget"},
}

__all__ = ["PROFILES", "Encoder", "GateRecord", "Retention", "RetentionCallback", "RetentionConfig"]
__all__ += ["RetentionScorer", "encoder_cost", "from_pretrained", "hard_concrete", "keep_top"]
__all__ += ["register_encoder", "retain", "running_summary", "token_budgets"]

__getattr__, __dir__ = lazy.names(__name__, _HOME)
