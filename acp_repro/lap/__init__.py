"""Learnable attention pruning: a T5 autoencoder that drops the tokens it can do without.

    from acp_repro.lap import PruningAutoencoder
    model = PruningAutoencoder.from_pretrained("runs/lap/NAME/model")
    memory = model.encode(["the green cat sat on the mat"])  # kept vectors, their positions and tokens
    model.decode(memory)  # free running, batched, cached

Needs torch, and transformers where a T5 is made or read (``pip install -e '.[lap]'``).
"""

from __future__ import annotations

from .autoencoder import FLAN_T5_SMALL, Losses, Memory, PruningAutoencoder
from .gates import compression_loss, draw_noise, log_gates, pair_mask, soft_lengths, straight_through
from .settings import PruningConfig, PruningError
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
    "log_gates",
    "pair_mask",
    "soft_lengths",
    "straight_through",
]
