"""Statistics of every head of a model on a text: pruned ratio, effective context, gates, and distribution of
the attention weight (Section 4.3)."""

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pandas as pd
import torch
from torch import Tensor, nn

from acp_repro.attention.decay import cumulative_log_fgate
from acp_repro.attention.threshold import DEFAULT_LOG_PRUNING_TOLERANCE, pruning_threshold
from acp_repro.common.errors import UsageError
from acp_repro.common.grid import head_kind, largest_pruned_ratio
from acp_repro.model import ForgettingAttentionLayer, FoXForCausalLM
from acp_repro.model.capture import AttentionInputs, watch_attention

from .weights import HeadWeights, cell_tokens, head_weights

STRONGEST = 8  # the number of strongest keys stored per query


@dataclass
class Head:
    """One head on the first sequence, on the CPU.

    Attributes:
        log_fgate: (T,), the log forget gates; None without gates.
        weights: sums of the head's attention weights.
        logits: (T,), ``q.k / sqrt(D)`` of each query and its strongest key, in nats; None without gates.
        threshold: delta for this sequence, in nats; None without gates.
    """

    layer: int
    head: int
    log_fgate: Tensor | None
    weights: HeadWeights
    logits: Tensor | None = None
    threshold: float | None = None


@dataclass
class ModelHeads:
    """The statistics of all heads of a model.

    Attributes:
        table: the frame of :func:`inspect_heads` over all sequences, with additional columns over the first
            sequence; see :func:`weigh_heads`.
        heads: the heads in the order of the table.
        input_ids: (T,) int64, the first sequence.
        cell: the side of a square of :attr:`HeadWeights.cells` in tokens.
        grid: the sizes of query blocks and key blocks in tokens.
        own_log_pruning_tolerance: log epsilon of the model's config; None if the model is exact.
        name, facts: the name of the model on the page, and lines about it, such as the source of the text.
        rules: the results of sparse-attention rules from :func:`head_map`; None to omit that view.
    """

    table: pd.DataFrame
    heads: list[Head]
    input_ids: Tensor
    cell: int
    grid: tuple[int, int]
    own_log_pruning_tolerance: float | None
    name: str = "the model"
    facts: Sequence[str] = ()
    rules: dict[str, Any] | None = None

    @property
    def length(self) -> int:
        """The number of tokens of the first sequence."""
        return len(self.input_ids)

    @property
    def shape(self) -> tuple[int, int]:
        """The number of layers, and of heads per layer."""
        return len({*self.table["layer"]}), len({*self.table["head"]})

    def head(self, layer: int, head: int) -> Head:
        """The head with this layer and index; KeyError if it does not exist."""
        return {(one.layer, one.head): one for one in self.heads}[layer, head]


def check_ids(tokens: Tensor | Sequence[int], vocab_size: int) -> Tensor:
    """``tokens`` as int64 ids, (sequences, T).

    Raises:
        UsageError: ``tokens`` are not integers of that shape, or not in the range 0 to ``vocab_size - 1``.
    """
    try:
        ids = torch.as_tensor(tokens)
    except (TypeError, ValueError, RuntimeError):  # such as a text, or sequences of several lengths
        ids = torch.empty(0)
    if ids.ndim not in (1, 2) or not ids.numel() or ids.dtype.is_floating_point or ids.dtype == torch.bool:
        raise UsageError(
            "tokens must be ids, (T,) or (sequences, T); encode a text with the model's tokenizer first"
        )
    ids = torch.atleast_2d(ids.long())
    least, most = int(ids.min()), int(ids.max())
    if least < 0 or most >= vocab_size:
        raise UsageError(
            f"token id {least if least < 0 else most} is not in the range 0 to {vocab_size - 1}; "
            "use the tokenizer that the model was trained with"
        )
    return ids


@contextlib.contextmanager
def certified(model: nn.Module, log_pruning_tolerance: float | None) -> Iterator[float]:
    """A context in which a FoX model computes the threshold of the certificate.

    Yields:
        log epsilon: ``log_pruning_tolerance``; if None, the model's own, or -10 if the model has none.
    """
    layers = [module for module in model.modules() if isinstance(module, ForgettingAttentionLayer)]
    before = [layer.log_pruning_tolerance for layer in layers]
    if log_pruning_tolerance is None:
        log_pruning_tolerance = next(filter(None, before), DEFAULT_LOG_PRUNING_TOLERANCE)
    for layer in layers:
        layer.log_pruning_tolerance = log_pruning_tolerance
    try:
        yield log_pruning_tolerance
    finally:
        for layer, own in zip(layers, before, strict=True):
            layer.log_pruning_tolerance = own


@torch.no_grad()
def inspect_heads(
    model: FoXForCausalLM,
    batches: Iterable[Tensor],
    *,
    log_pruning_tolerance: float | None = None,
    dtype: str = "float32",
) -> pd.DataFrame:
    """A table with one row per head, over all sequences of ``batches``.

    Args:
        model: a FoX model, which is not modified.
        batches: input_ids (B, L), all with the same L, on the model's device.
        log_pruning_tolerance: log epsilon; default: the model's own, or -10 if the model is exact.
        dtype: ``"bfloat16"`` for autocast, or ``"float32"``.

    Returns:
        A frame in the order of layers and heads with the columns

        - ``pruned_ratio``: pruned blocks divided by causal blocks; ``largest_pruned_ratio``: the achievable
            maximum at this L (:func:`largest_pruned_ratio`); ``token_pruned_ratio``: the ratio with
            blocks of one token;
        - ``kind``: see :func:`head_kind`;
        - ``median_window_tokens``, ``q90_window_tokens``: effective context: the number of keys j with
            ``D_ij >= delta`` of a query i, its own included; median and 90 % quantile over the queries;
        - ``mean_forget_gate``: mean of f over tokens, from 0 to 1;
        - ``logit_bound``: U, and ``threshold_nats``: delta. If they differ between sequences (without
            QK-norm), the largest U and the lowest delta;
        - ``context_length_tokens``, ``measured_tokens``, ``block_q_tokens``, ``block_k_tokens``,
            ``log_pruning_tolerance``: the settings of the measurement.

    Raises:
        ValueError: ``batches`` is empty, or sequences differ in length.
    """
    tallies = [_Tally() for _ in range(model.config.num_hidden_layers)]
    device, lengths = next(model.parameters()).device, set()
    with (
        certified(model, log_pruning_tolerance) as log_epsilon,
        watch_attention(model, lambda layer, inputs: tallies[layer].add(inputs)),
        torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"),
    ):
        for input_ids in batches:
            lengths.add(input_ids.shape[1])
            if len(lengths) > 1:
                raise ValueError(f"sequences must be equally long, got lengths {sorted(lengths)}")
            model.model(input_ids)
    if not lengths:
        raise ValueError("`batches` is empty; pass at least one batch of token ids")
    rows = [tally.rows(layer, log_epsilon) for layer, tally in enumerate(tallies)]
    return pd.DataFrame(itertools.chain(*rows))


@torch.no_grad()
def weigh_heads(
    model: FoXForCausalLM,
    batches: Iterable[Tensor],
    *,
    log_pruning_tolerance: float | None = None,
    dtype: str = "float32",
) -> ModelHeads:
    """The heads of ``model`` on the first sequence of ``batches``, and their table over all sequences.

    Memory is linear in the sequence length.

    Args:
        batches: token ids, (B, T) int64 each.
        model, log_pruning_tolerance, dtype: as in :func:`inspect_heads`, which computes the table.

    Returns:
        The heads. The table has these columns in addition to those of ``inspect_heads``:

        - ``half_weight_tokens``: the median attention distance in tokens;
        - ``strongest_weight``: the mean weight of a query's strongest key;
        - ``first_token_weight``: the mean weight on the first token;
        - ``largest_pruned_mass``: the largest weight that a row loses by pruning;
        - ``previous_token_weight``: the mean weight on the token before the query;
        - ``induction_weight``: see :func:`_induction_weight`.

    Raises:
        UsageError: sequences are shorter than two blocks.
        ValueError: ``batches`` is empty, or sequences differ in length.
    """
    batches, again = itertools.tee(batches)
    layers: dict[int, list[Head]] = {}

    def weigh_layer(layer: int, inputs: AttentionInputs) -> None:
        least = 2 * max(inputs.grid())
        if inputs.q.shape[2] < least:
            raise UsageError(
                f"{inputs.q.shape[2]} tokens are fewer than two blocks of {least // 2}, so nothing can be "
                f"pruned; pass {least} or more (--context-length {least})"
            )
        if layer not in layers:
            layers[layer] = [*_weigh_layer(layer, inputs)]

    with watch_attention(model, weigh_layer):
        table = inspect_heads(model, batches, log_pruning_tolerance=log_pruning_tolerance, dtype=dtype)
    heads = [head for layer in sorted(layers) for head in layers[layer]]
    ids = next(again)[0].cpu()
    table = table.assign(**weight_columns(heads, ids))
    grid = int(table["block_q_tokens"].iloc[0]), int(table["block_k_tokens"].iloc[0])
    return ModelHeads(table, heads, ids, cell_tokens(len(ids)), grid, model.config.log_pruning_tolerance)


def _weigh_layer(layer: int, inputs: AttentionInputs) -> Iterator[Head]:
    c = cumulative_log_fgate(inputs.log_fgate[:1])[0]
    assert inputs.threshold is not None
    threshold = inputs.threshold.expand(inputs.q.shape[:2])[0]
    cell = cell_tokens(inputs.q.shape[2])
    for head in range(inputs.q.shape[1]):
        q, k = (x[0, head] for x in (inputs.q, inputs.k))
        weights = head_weights(
            q, k, c[head], threshold[head], grid=inputs.grid(), cell=cell, strongest=STRONGEST
        )
        strongest = k[weights.keys[:, 0].long()].float()
        logits = (q.float() * strongest).sum(-1) * q.shape[1] ** -0.5
        delta = float(threshold[head])
        yield Head(layer, head, inputs.log_fgate[0, head].cpu(), weights.cpu(), logits.cpu(), delta)


def weight_columns(heads: list[Head], input_ids: Tensor) -> dict[str, list[float]]:
    """The columns of :func:`weigh_heads` that are computed from weights. ``input_ids`` is (T,)."""
    every = [head.weights for head in heads]
    return {
        "half_weight_tokens": [int((w.by_distance.cumsum(0) < w.by_distance.sum() / 2).sum()) for w in every],
        "strongest_weight": [float(w.weights[:, 0].double().mean()) for w in every],
        "first_token_weight": [float(w.received[0]) / len(w.received) for w in every],
        "largest_pruned_mass": [float(w.pruned_mass.max()) for w in every],
        "previous_token_weight": [float(w.by_distance[1:2].sum()) for w in every],
        "induction_weight": [_induction_weight(w, input_ids) for w in every],
    }


def _induction_weight(weights: HeadWeights, input_ids: Tensor) -> float:
    """The mean weight on tokens that follow an earlier occurrence of the query's own token.

    The mean is over the queries whose token occurred before. Only the strongest keys of each query count, so
    the result is a lower bound on the weight of all such tokens.
    """
    keys = weights.keys.long()
    follows = (keys > 0) & (input_ids[keys - 1] == input_ids[:, None])
    repeated = len(input_ids) - len(input_ids.unique())
    return float(weights.weights[follows].double().sum()) / max(1, repeated)


class _Tally:
    """Statistics accumulated over the calls of one layer; windows are a histogram, so memory is constant."""

    def __init__(self):
        self.pruned = self.windows = self.gates = cast(Any, 0)
        self.causal = 0
        self.threshold = torch.tensor(math.inf)
        self.grid: tuple[int, int] = (0, 0)

    def add(self, inputs: AttentionInputs) -> None:
        batch, heads, length, _ = inputs.q.shape
        self.grid = inputs.grid()
        blocks = inputs.count()
        self.pruned += blocks.pruned.sum(0).cpu()
        self.causal += blocks.causal * batch
        first_kept = inputs.boundary(1, 1).long()
        window = torch.arange(1, length + 1, device=first_kept.device) - first_kept
        slot = torch.arange(heads, device=window.device)[:, None] * (length + 1) + window
        histogram = torch.bincount(slot.flatten(), minlength=heads * (length + 1))
        self.windows += histogram.view(heads, -1).cpu()
        self.gates += inputs.log_fgate.double().exp().sum((0, 2)).cpu()
        assert inputs.threshold is not None
        self.threshold = self.threshold.minimum(inputs.threshold.expand(batch, heads).amin(0).cpu())

    def rows(self, layer: int, log_pruning_tolerance: float) -> Iterator[dict]:
        """One row per head, with the columns of :func:`inspect_heads`."""
        length = self.windows.shape[1] - 1
        most = largest_pruned_ratio(length, *self.grid)
        queries = int(self.windows[0].sum())
        kept = (self.windows * torch.arange(length + 1)).sum(1)
        entries = queries * (length + 1) // 2
        zero = float(pruning_threshold(0.0, length, log_pruning_tolerance))
        for head in range(len(self.windows)):
            ratio, delta = int(self.pruned[head]) / self.causal, float(self.threshold[head])
            yield {
                "layer": layer,
                "head": head,
                "pruned_ratio": ratio,
                "largest_pruned_ratio": most,
                "token_pruned_ratio": (entries - int(kept[head])) / entries,
                "kind": head_kind(ratio, most),
                "median_window_tokens": _quantile(self.windows[head], 0.5),
                "q90_window_tokens": _quantile(self.windows[head], 0.9),
                "mean_forget_gate": float(self.gates[head]) / queries,
                # The U that the model used: delta is linear in U.
                "logit_bound": (zero - delta) / 2,
                "threshold_nats": delta,
                "context_length_tokens": length,
                "measured_tokens": queries,
                "block_q_tokens": self.grid[0],
                "block_k_tokens": self.grid[1],
                "log_pruning_tolerance": log_pruning_tolerance,
            }


def _quantile(histogram: Tensor, share: float) -> int:
    """The smallest value v such that at least a fraction ``share`` of the counted values are at most v."""
    cumulative = histogram.cumsum(0)
    return int((cumulative < share * cumulative[-1]).sum())
