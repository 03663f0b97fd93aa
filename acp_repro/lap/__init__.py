"""Learnable attention pruning: a T5 autoencoder that drops the tokens it can do without.

    from acp_repro.lap import PruningAutoencoder
    model = PruningAutoencoder.from_pretrained("runs/lap/NAME/model")
    memory = model.encode(["Return the number of items in the list."])  # kept vectors, positions and tokens
    model.decode(memory)  # free running, batched, cached

Needs torch, and transformers to make or read a T5 (``pip install -e '.[lap]'``). Names load on first use:
``acp_repro.lap.settings`` needs only the standard library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from acp_repro.common import lazy

if TYPE_CHECKING:
    from .autoencoder import FLAN_T5_SMALL, Losses, PruningAutoencoder
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
    from .memory import Memory
    from .settings import PruningConfig, PruningError
    from .text import TextTokenizer

_HOME = {
    "FLAN_T5_SMALL": "autoencoder",
    "Losses": "autoencoder",
    "Memory": "memory",
    "PruningAutoencoder": "autoencoder",
    "PruningConfig": "settings",
    "PruningError": "settings",
    "TextTokenizer": "text",
    "compression_loss": "gates",
    "expected_lengths": "gates",
    "open_probability": "gates",
    "draw_noise": "gates",
    "log_gates": "gates",
    "pair_mask": "gates",
    "soft_lengths": "gates",
    "straight_through": "gates",
}

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

__getattr__, __dir__ = lazy.names(__name__, _HOME)
