"""What every head of a model does on a text: savings, window, gates and threshold (Section 4.3)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import pandas as pd
import torch
from torch import Tensor

from acp_repro.attention.threshold import DEFAULT_LOG_PRUNING_TOLERANCE, pruning_threshold
from acp_repro.common.grid import KINDS, head_kind, largest_pruned_ratio
from acp_repro.model import FoXForCausalLM
from acp_repro.model.capture import AttentionInputs, watch_attention


@torch.no_grad()
def inspect_heads(
    model: FoXForCausalLM,
    batches: Iterable[Tensor],
    *,
    log_pruning_tolerance: float | None = None,
    dtype: str = "float32",
) -> pd.DataFrame:
    """One row a head, over all sequences of ``batches``.

    Args:
        model: left as it was.
        batches: input_ids (B, L), all of the same L, on the model's device.
        log_pruning_tolerance: log epsilon; default: the model's own, or -10 if it is exact.
        dtype: ``"bfloat16"`` for autocast, or ``"float32"``.

    Returns:
        A frame in the order of layers and heads with the columns

        - ``pruned_ratio``: share of pruned blocks of the causal grid; ``largest_pruned_ratio``: the
          most that the grid allows at this L (:func:`largest_pruned_ratio`);
          ``token_pruned_ratio``: the same share with blocks of one token;
        - ``kind``: see :func:`head_kind`;
        - ``median_window_tokens``, ``q90_window_tokens``: keys j with ``D_ij >= delta`` of a query i,
          its own included; the smallest number that is enough for half, and for 90 %, of the queries;
        - ``mean_forget_gate``: mean of f over tokens, between 0 and 1;
        - ``logit_bound``: U, and ``threshold_nats``: delta. If they differ between sequences (without
        QK-norm), the largest U and the lowest delta; - ``context_length_tokens``, ``measured_tokens``,
        ``block_q_tokens``, ``block_k_tokens``,
          ``log_pruning_tolerance``: what it was measured with.

    Raises:
        ValueError: there is no batch, or sequences differ in length.
    """
    before = model.config.log_pruning_tolerance
    if log_pruning_tolerance is None:
        log_pruning_tolerance = DEFAULT_LOG_PRUNING_TOLERANCE if before is None else before
    tallies = [_Tally() for _ in range(model.config.num_hidden_layers)]
    device, lengths, tokens = next(model.parameters()).device, set(), 0
    model.set_log_pruning_tolerance(log_pruning_tolerance)
    try:
        with (
            watch_attention(model, lambda layer, inputs: tallies[layer].add(inputs)),
            torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"),
        ):
            for input_ids in batches:
                lengths.add(input_ids.shape[1])
                if len(lengths) > 1:
                    raise ValueError(f"sequences must be equally long, got {sorted(lengths)}")
                model.model(input_ids)
                tokens += input_ids.numel()
    finally:
        model.set_log_pruning_tolerance(before)
    if not tokens:
        raise ValueError("there is no batch to look at")
    (length,) = lengths
    rows = [tally.rows(layer, length, tokens, log_pruning_tolerance) for layer, tally in enumerate(tallies)]
    return pd.DataFrame(itertools.chain(*rows))


def layer_summary(heads: pd.DataFrame) -> pd.DataFrame:
    """One row a layer of :func:`inspect_heads`'s frame.

    Returns:
        A frame indexed by layer: ``pruned_ratio`` of all the layer's blocks, the number of ``local``,
        ``between`` and ``global`` heads, the smallest and the largest ``median_window_tokens``.
    """
    layers = heads.groupby("layer")
    return pd.DataFrame(
        {
            "pruned_ratio": layers["pruned_ratio"].mean(),  # every head has the same causal blocks
            **{kind: (heads["kind"] == kind).groupby(heads["layer"]).sum() for kind in KINDS},
            "smallest_window_tokens": layers["median_window_tokens"].min(),
            "largest_window_tokens": layers["median_window_tokens"].max(),
        }
    )


class _Tally:
    """Sums over the calls of one layer; windows as a histogram, so memory does not grow with text."""

    def __init__(self):
        self.pruned = self.token_pruned = self.windows = self.gates = 0
        self.causal = self.token_causal = 0
        self.threshold: Tensor | None = None
        self.grid: tuple[int, int] = (0, 0)

    def add(self, inputs: AttentionInputs) -> None:
        batch, heads, length, _ = inputs.q.shape
        self.grid = inputs.grid()
        blocks, entries = inputs.count(), inputs.count(1, 1)
        first_kept = inputs.boundary(1, 1).long()
        self.pruned += blocks.pruned.sum(0).cpu()
        self.causal += blocks.causal * batch
        self.token_pruned += entries.pruned.sum(0).cpu()
        self.token_causal += entries.causal * batch
        window = torch.arange(1, length + 1, device=first_kept.device) - first_kept
        slot = torch.arange(heads, device=window.device)[:, None] * (length + 1) + window
        histogram = torch.bincount(slot.flatten(), minlength=heads * (length + 1))
        self.windows += histogram.view(heads, -1).cpu()
        self.gates += inputs.log_fgate.double().exp().sum((0, 2)).cpu()
        lowest = inputs.threshold.expand(batch, heads).amin(0).cpu()
        self.threshold = lowest if self.threshold is None else self.threshold.minimum(lowest)

    def rows(self, layer: int, length: int, tokens: int, log_pruning_tolerance: float) -> Iterator[dict]:
        """One a head, with the columns of :func:`inspect_heads`."""
        most = largest_pruned_ratio(length, *self.grid)
        queries = int(self.windows[0].sum())
        zero = float(pruning_threshold(0.0, length, log_pruning_tolerance))
        for head in range(len(self.windows)):
            ratio, delta = int(self.pruned[head]) / self.causal, float(self.threshold[head])
            yield {
                "layer": layer,
                "head": head,
                "pruned_ratio": ratio,
                "largest_pruned_ratio": most,
                "token_pruned_ratio": int(self.token_pruned[head]) / self.token_causal,
                "kind": head_kind(ratio, most),
                "median_window_tokens": _quantile(self.windows[head], 0.5),
                "q90_window_tokens": _quantile(self.windows[head], 0.9),
                "mean_forget_gate": float(self.gates[head]) / queries,
                # U as the model used it, however it was computed: delta is linear in U.
                "logit_bound": (zero - delta) / 2,
                "threshold_nats": delta,
                "context_length_tokens": length,
                "measured_tokens": tokens,
                "block_q_tokens": self.grid[0],
                "block_k_tokens": self.grid[1],
                "log_pruning_tolerance": log_pruning_tolerance,
            }


def _quantile(histogram: Tensor, share: float) -> int:
    """The smallest value that at least ``share`` of the counted values do not exceed."""
    cumulative = histogram.cumsum(0)
    return int((cumulative < share * cumulative[-1]).sum())
