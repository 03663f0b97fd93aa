"""An interactive page of every head of a trained model on a text: ``explore(model, tokens, tokenizer)``.

``python -m acp_repro.inspect CHECKPOINT --html heads.html`` writes the same page to a file.
"""

from typing import TYPE_CHECKING

from ..common import lazy

if TYPE_CHECKING:
    from .checkpoint import Checkpoint
    from .explorer import Explorer, explore
    from .heads import inspect_heads, weigh_heads
    from .read import DecoderHeads, read_heads

__all__ = ["Checkpoint", "DecoderHeads", "Explorer", "explore", "inspect_heads", "read_heads", "weigh_heads"]

__getattr__, __dir__ = lazy.names(
    __name__,
    {
        "Checkpoint": "checkpoint",
        "DecoderHeads": "read",
        "Explorer": "explorer",
        "explore": "explorer",
        "inspect_heads": "heads",
        "read_heads": "read",
        "weigh_heads": "heads",
    },
)
