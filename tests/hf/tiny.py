"""A small model with fast- and slow-forgetting heads, in our format."""

from __future__ import annotations

from pathlib import Path

import torch

from acp_repro.model import FoXConfig, FoXForCausalLM

SMALL = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 4}


def saved(folder: Path, architecture: str = "pro", **fields) -> FoXForCausalLM:
    """Saves a model to ``folder`` and returns it."""
    torch.manual_seed(0)
    model = FoXForCausalLM(getattr(FoXConfig, architecture)(**{**SMALL, **fields}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("fgate_proj.bias"):
                parameter.copy_(torch.tensor([-3.0, 6.0]).repeat(len(parameter) // 2))
            elif parameter.dim() == 2:
                parameter.mul_(4.0)
            else:
                parameter.mul_(1 + 0.2 * torch.rand_like(parameter))
    model.save_pretrained(folder)
    return model
