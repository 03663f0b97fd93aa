"""The keys that each head of a decoder needs, and the blocks that it could skip: ``read_heads``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import pandas as pd
import torch
from torch import Tensor, nn

from acp_repro.attention import threshold_from_norms
from acp_repro.common.command import progress_bar

from .blocks import BLOCK, HeadSums
from .decoders import LayerInputs, NotReadable, read_layers, text_config
from .heads import STRONGEST, Head, ModelHeads, certified, check_ids, weight_columns
from .weights import cell_tokens, head_weights

LATE = 8  # scorers are judged by the weight that the last eighth of the queries puts on earlier keys
SINKS = 4
MOST_HEADS = 256  # with more heads, the page stores a quarter of the squares, instead of 33 kB per head


class Scorer(Protocol):
    """A method that scores the keys of a cache, with the interface of kvpress."""

    def score(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """(B, Hkv, T): scores; keys with larger scores are evicted later.

        Args:
            attentions: None, as in kvpress with sdpa. A scorer that raises AssertionError is called again
                with the weights (B, H, T, T), whose memory is quadratic in the length.
            kwargs: keyword arguments of the attention layer's forward, including ``position_embeddings``.
        """
        ...


@dataclass
class DecoderHeads(ModelHeads):
    """The result of :func:`read_heads`. ``Explorer(heads, tokenizer=...)`` creates its page.

    Attributes:
        skipped: one line for each skipped layer, with the reason.
    """

    skipped: Sequence[str] = ()

    def _repr_html_(self) -> str:
        lines = "".join(f"<p>skipped: {line}</p>" for line in self.skipped)
        return self.table.to_html(index=False, float_format="{:.4g}".format) + lines


def read_heads(
    model: nn.Module,
    tokens: Tensor | Sequence[int],
    *,
    log_pruning_tolerance: float | None = None,
    scorers: Mapping[str, Scorer] | None = None,
    budget: float = 0.5,
    progress: bool = False,
) -> DecoderHeads:
    """The heads of a causal decoder on ``tokens``. Memory is linear in the sequence length.

    Args:
        model: a FoX model, or a causal decoder of transformers; the model is not modified.
        tokens: int64 ids, (T,) or (sequences, T), without padding.
        log_pruning_tolerance: log epsilon of the certificate; default: the model's own, or -10.
        scorers: methods that select keys, by name: your own, or presses of kvpress, whose compression ratio
            is ignored.
        budget: fraction of the keys that a scorer may keep.
        progress: show a progress bar of heads if stderr is a terminal.

    Returns:
        A table with one row per head, over all sequences:

        - ``keys_90``, ``keys_99``, ``keys_99.9``: keys that receive this percentage of a query's weight on
            keys, the median over at most 512 evenly spaced queries; ``q90_keys_90`` and so on: their 90 %
            quantile;
        - ``entropy_nats``: mean entropy of a row of weights; a learned sink (gpt-oss) is not a key and is
            not counted, so a row with a sink sums to less than 1;
        - over the first sequence: ``half_weight_tokens``, the median attention distance;
            ``strongest_weight``, the mean weight of a query's strongest key; ``first_token_weight``, its
            mean weight on the first token; ``largest_pruned_mass``, the largest weight of a row on the
            certificate's blocks; ``sink_weight``, the mean weight of a learned sink;
            ``previous_token_weight`` and ``induction_weight`` as in :func:`weigh_heads`;
        - ``known``: fraction of the blocks of 64 x 64, within the causal triangle and the window, that the
            certificate of FoX's gates or ALiBi's slopes skips before q and k are multiplied; 0 without
            decay;
        - ``seen_e-10``, ``seen_1e-3``, ``seen_1e-2``: fraction that :func:`seen_on_the_way` skips at this
            epsilon; ``seen_besides_e-10`` and so on: of these, the blocks that the certificate keeps;
        - ``after_e-10``, ``after_1e-3``, ``after_1e-2``: fraction that the oracle skips
            (:func:`known_afterwards`);
        - with ``scorers``: ``lost_NAME``, the weight of the last eighth of the queries on earlier keys that
            NAME does not keep; likewise for ``oracle`` (the keys with the most weight in this head),
            ``window`` (the first 4 keys and the latest ones) and ``random``.

    Raises:
        NotReadable: the model has no causal attention that can be read, has fewer positions than there are
            tokens, or does not expose its values to scorers (FoX, BLOOM, MPT).
        UsageError: ``tokens`` are not ids of the model.
    """
    config = text_config(model)
    ids = check_ids(tokens, config.vocab_size).to(next(model.parameters()).device)
    length, late = ids.shape[1], ids.shape[1] - ids.shape[1] // LATE
    count = config.num_hidden_layers * getattr(config, "num_attention_heads", getattr(config, "num_heads", 1))
    cell = cell_tokens(length, 256 if count <= MOST_HEADS else 128)
    rows: dict[int, list[list[dict[str, float]]]] = {}
    first: dict[tuple[int, int], Head] = {}
    generator = torch.Generator().manual_seed(0)

    def on_layer(layer: int, inputs: LayerInputs) -> None:
        if scorers and inputs.score is None:
            raise NotReadable(
                "scorers require a model whose attention uses the AttentionInterface of transformers; "
                f"this one is a {type(model).__name__}"
            )
        threshold = certificate(inputs, log_epsilon)
        chosen = {name: cast(Any, inputs.score)(scorer) for name, scorer in (scorers or {}).items()}
        heads = rows.setdefault(layer, [[] for _ in range(inputs.q.shape[1])])
        for head, found in enumerate(heads):
            group = inputs.q.shape[1] // inputs.k.shape[1]
            q, k = inputs.q[0, head], inputs.k[0, head // group]
            delta = None if threshold is None else threshold[head]
            own_c = q.new_zeros(length, dtype=torch.float64) if inputs.c is None else inputs.c[head]
            sums = HeadSums(own_c, delta, late, inputs.window_size)
            weights = head_weights(
                q,
                k,
                own_c,
                delta,
                grid=(BLOCK, BLOCK),
                cell=cell,
                strongest=STRONGEST,
                scaling=inputs.scaling,
                softcap=inputs.softcap,
                window_size=inputs.window_size,
                sink=None if inputs.sinks is None else inputs.sinks[head],
                sums=sums,
            )
            if not found:
                first[layer, head] = Head(layer, head, None, weights.cpu())
            columns = sums.columns()
            if scorers:
                kept = {name: scores[head // group] for name, scores in chosen.items()}
                columns |= _losses(sums.received_late, late, budget, kept, generator)
            found.append(columns)
            bar.update()

    for scorer in (scorers or {}).values():
        getattr(scorer, "post_init_from_model", lambda _: None)(model)  # as in kvpress
    skipped: list[str] = []
    bar = progress_bar(unit="head", leave=False, disable=not progress)
    with bar, certified(model, log_pruning_tolerance) as log_epsilon:
        for row in ids.split(1):
            skipped = read_layers(model, row, on_layer)
    table = pd.DataFrame(
        {"layer": layer, "head": head, **pd.DataFrame(found).mean().to_dict()}
        for layer in sorted(rows)
        for head, found in enumerate(rows[layer])
    )
    heads = [first[one] for one in sorted(first)]
    table["sink_weight"] = [max(0.0, 1 - float(head.weights.received.sum()) / length) for head in heads]
    table = table.assign(**weight_columns(heads, ids[0].cpu()))
    table = table.assign(context_length_tokens=length, measured_tokens=ids.numel())
    name = Path(getattr(model.config, "name_or_path", "") or type(model).__name__).name
    return DecoderHeads(table, heads, ids[0].cpu(), cell, (BLOCK, BLOCK), None, name, skipped=skipped)


def certificate(inputs: LayerInputs, log_pruning_tolerance: float) -> Tensor | None:
    """(H,) delta of the first sequence; None without decay."""
    if inputs.threshold is not None or inputs.c is None:
        return inputs.threshold
    return threshold_from_norms(inputs.q, inputs.k, inputs.scaling, log_pruning_tolerance)[0]


def _losses(
    received: Tensor, late: int, budget: float, scores: dict[str, Tensor], generator: torch.Generator
) -> dict[str, float]:
    """The weight that the queries from ``late`` on lose if a fraction ``budget`` of the earlier keys is kept.

    Args:
        received: (T,) float64, the weight of these queries on each key.
    """
    needed, places = received[:late], torch.arange(late)
    recent = torch.where(places < SINKS, late, places)
    choices = {"oracle": needed, "window": recent, "random": torch.rand(late, generator=generator)}
    choices |= {name: of_key[:late] for name, of_key in scores.items()}
    count = round(budget * late)
    return {
        f"lost_{name}": float(
            (needed.sum() - needed[of_key.topk(count).indices].sum()) / (len(received) - late)
        )
        for name, of_key in choices.items()
    }
