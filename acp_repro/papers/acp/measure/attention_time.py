"""Attention time with and without ACP on the activations of a trained model (Figure 2, Table 4)."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from acp_repro.attention import choose_implementation, forgetting_attention
from acp_repro.benchmark.timing import elapsed_ms
from acp_repro.model.capture import AttentionInputs, attention_inputs
from acp_repro.training.step import autocast

from ..trained import TrainedFoX


def measure(trained: TrainedFoX) -> list[dict[str, Any]]:
    """One record a method (``acp``, ``exact``): milliseconds for all layers on the measured text.

    One forward and one backward pass (Appendix B). Both methods get the same inputs and take turns, so
    a busy machine slows both; each number is the median over repeats. The forward time holds the
    boundary search, which is also timed by itself.
    """
    rows = trained.rows
    batches = list(trained.heldout_batches(trained.measure.timing_tokens, rows))
    repeats = trained.measure.timing_repeats
    times: dict[str, list[list[float]]] = {"acp": [], "exact": []}
    progress = tqdm(
        total=(repeats + 1) * len(batches), desc=f"{trained.run.name}: attention time", unit="pass"
    )
    with progress, autocast(trained.device, trained.run.training.dtype):
        for repeat in range(repeats + 1):
            total = {method: [0.0, 0.0, 0.0] for method in times}
            for input_ids, _ in batches:
                for inputs in attention_inputs(trained.model, input_ids):
                    for method in times:
                        one = _time_one(inputs, method == "acp", trained.device)
                        total[method] = [a + b for a, b in zip(total[method], one, strict=True)]
                progress.update()
            if repeat:  # the first pass warms up
                for method in times:
                    times[method].append(total[method])
    return [
        {
            "implementation": choose_implementation(trained.device),
            "method": method,
            "measured_tokens": sum(input_ids.numel() for input_ids, _ in batches),
            "repeats": repeats,
            "forward_ms": median(t[0] for t in times[method]),
            "backward_ms": median(t[1] for t in times[method]),
            "boundary_search_ms": median(t[2] for t in times[method]) if method == "acp" else None,
        }
        for method in times
    ]


def _time_one(inputs: AttentionInputs, acp: bool, device: torch.device) -> tuple[float, float, float]:
    """(forward, backward, boundary search) milliseconds of one layer."""
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v, inputs.log_fgate)]
    threshold = inputs.threshold if acp else None

    def forward():
        return forgetting_attention(*leaves, head_first=True, adaptive_threshold=threshold)

    search = elapsed_ms(inputs.search, device)[0] if acp else 0.0
    forward_ms, out = elapsed_ms(forward, device)
    dout = torch.randn_like(out)
    backward_ms, _ = elapsed_ms(lambda: torch.autograd.grad(out, leaves, dout), device)
    return forward_ms, backward_ms, search
