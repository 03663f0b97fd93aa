"""Every head of a trained model on a text, as a page to look at: ``explore(model, tokens, tokenizer)``.

``python -m acp_repro.inspect CHECKPOINT --html heads.html`` writes the same page to a file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common import lazy

if TYPE_CHECKING:
    from .checkpoint import Checkpoint
    from .explorer import Explorer, explore
    from .heads import inspect_heads, weigh_heads

__all__ = ["Checkpoint", "Explorer", "explore", "inspect_heads", "weigh_heads"]

__getattr__, __dir__ = lazy.names(
    __name__,
    {
        "Checkpoint": "checkpoint",
        "Explorer": "explorer",
        "explore": "explorer",
        "inspect_heads": "heads",
        "weigh_heads": "heads",
    },
)
