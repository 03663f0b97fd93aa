"""Learnable attention pruning: a T5 autoencoder that learns to drop tokens it does not need.

    from acp_repro.lap import PruningAutoencoder
    model = PruningAutoencoder.from_pretrained("runs/lap/NAME/model")
    memory = model.encode(["Return the number of items in the list."])  # kept vectors, positions and tokens
    model.decode(memory)  # free running, batched, cached

Needs torch, and transformers to create or load a T5 (``pip install -e '.[lap]'``). Names load on first use:
``acp_repro.lap.config`` needs only the standard library.
"""

from typing import TYPE_CHECKING

from acp_repro.common import lazy

if TYPE_CHECKING:
    from .autoencoder import FLAN_T5_SMALL, Losses, PruningAutoencoder
    from .config import PruningConfig, PruningError
    from .encoder import Memory
    from .gates import (
        compression_loss,
        draw_noise,
        expected_lengths,
        log_gates,
        open_probability,
        pair_mask,
        soft_lengths,
        straight_through,
    )
    from .text import TextTokenizer

__all__ = [
    "FLAN_T5_SMALL",
    "Losses",
    "Memory",
    "PruningAutoencoder",
    "PruningConfig",
    "PruningError",
    "TextTokenizer",
    "compression_loss",
    "draw_noise",
    "expected_lengths",
    "log_gates",
    "open_probability",
    "pair_mask",
    "soft_lengths",
    "straight_through",
]

_HOME = dict.fromkeys(__all__, "gates") | {
    "FLAN_T5_SMALL": "autoencoder",
    "Losses": "autoencoder",
    "Memory": "encoder",
    "PruningAutoencoder": "autoencoder",
    "PruningConfig": "config",
    "PruningError": "config",
    "TextTokenizer": "text",
}
__getattr__, __dir__ = lazy.names(__name__, _HOME)
