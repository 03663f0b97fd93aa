"""Every head of a trained model on a text, as a page to look at: ``explore(model, tokens, tokenizer)``.

``python -m acp_repro.inspect CHECKPOINT --html heads.html`` writes the same page to a file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common import lazy

if TYPE_CHECKING:
    from .explorer import Explorer, explore
    from .looking import look
    from .read import DecoderHeads, read_heads

__all__ = ["DecoderHeads", "Explorer", "explore", "look", "read_heads"]

__getattr__, __dir__ = lazy.names(
    __name__,
    {
        "DecoderHeads": "read",
        "Explorer": "explorer",
        "explore": "explorer",
        "look": "looking",
        "read_heads": "read",
    },
)
