"""A small model with fast- and slow-forgetting heads, in our format."""

from pathlib import Path

import torch

from acp_repro.model import FoXConfig, FoXForCausalLM
from tests.model.model_helpers import SMALL, with_strong_gates


def saved(folder: Path, architecture: str = "pro", **fields) -> FoXForCausalLM:
    """Saves a model to ``folder`` and returns it."""
    torch.manual_seed(0)
    model = with_strong_gates(FoXForCausalLM(getattr(FoXConfig, architecture)(**{**SMALL, **fields})))
    model.save_pretrained(folder)
    return model
