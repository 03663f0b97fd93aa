"""Helpers shared by tests of ``acp_repro.model``."""

import itertools

import torch

from acp_repro.model import FoXCache, FoXForCausalLM

SMALL = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 4}


def with_strong_gates(model: FoXForCausalLM) -> FoXForCausalLM:
    """Sets half of the heads to forget fast and half slowly, with norms other than 1 as after training."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("fgate_proj.bias"):
                local = torch.arange(len(parameter)) % 2 == 0
                parameter.copy_(torch.where(local, -3.0, 6.0))
            elif name.endswith("norm.weight"):
                parameter.mul_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
            elif parameter.dim() == 2:
                parameter.mul_(4.0)
    return model


def relative_error(value: torch.Tensor, right: torch.Tensor) -> float:
    """Norm of the difference divided by the norm of the reference."""
    value, right = value.detach().double(), right.detach().double()
    return ((value - right).norm() / right.norm()).item()


@torch.no_grad()
def run_in_chunks(model, ids, cuts, cache=None, seq_start=None) -> torch.Tensor:
    """Logits of the full sequence, computed chunk by chunk between ``cuts``."""
    cache = cache or FoXCache(model.config.num_hidden_layers)
    parts = []
    for start, end in itertools.pairwise([0, *cuts, ids.shape[1]]):
        parts.append(model(ids[:, start:end], cache=cache, seq_start=seq_start if start == 0 else None))
    return torch.cat(parts, dim=1)
