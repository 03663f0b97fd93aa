"""The blocks that each rule of ``rules.py`` would skip in each head of a decoder, and the lost weight."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pandas as pd
import torch
from torch import Tensor, nn

from acp_repro.common.command import progress_bar
from acp_repro.common.errors import UsageError

from .blocks import BLOCK
from .decoders import LayerInputs, read_layers, text_config
from .heads import certified, check_ids
from .heads_table import percent, print_table
from .read import certificate
from .rules import NOT_COMPUTABLE, RULES, HeadInputs, Rule, Tiles, skip_by_running_sum
from .weights import SPAN, RowSums, head_weights

NOTHING = 1e-30  # the epsilon at which a lossless rule is compared with the certified test
MOST_LOST = 1 - 1e-6  # a row that loses more weight has no output left to renormalise
COLUMNS = ("skipped", "worst_row_loss", "mean_row_loss", "output_error", "certified_skipped")


class RuleSums(RowSums):
    """The losses of each rule in one head, accumulated in the pass of :func:`head_weights`.

    Args:
        head: the head's inputs, on the compute device.
        rules: the rules to measure.
    """

    def __init__(self, head: HeadInputs, rules: Sequence[Rule]):
        self.head, self.rules = head, rules
        self.values = torch.cat([head.values, torch.ones_like(head.values[:, :1])], 1)
        self.counts: dict[Rule, list[Tensor]] = {}  # skipped and visible units per chunk
        self.losses: dict[Rule, list[Tensor]] = {}  # (R, 2) per chunk: lost weight, and error of the output
        self.tiles: list[Tiles] = []

    def add_scores(self, first: int, block: Tensor) -> None:
        self.maxima = block.unflatten(1, (-1, BLOCK)).amax(-1)

    def add_weights(self, first: int, weights: Tensor) -> None:
        by_tile, last = weights.unflatten(1, (-1, BLOCK)), first + len(weights)
        tiles = Tiles(self.head, first, last, self.maxima, by_tile.amax(-1), by_tile.sum(-1))
        self.tiles.append(tiles)
        values = self.values[:last].unflatten(0, (-1, BLOCK))
        parts = torch.bmm(by_tile.transpose(0, 1), values).transpose(0, 1)  # (R, N, V + 1)
        out = parts.sum(1)
        for rule in self.rules:
            skipped = rule.skip(tiles)
            if skipped is None:
                continue
            # Counts are in tiles, in rows of tiles, or in a row's keys if the rule decides about these.
            keys = math.gcd(rule.keys, BLOCK)
            rows = math.gcd(rule.rows, BLOCK) if keys == BLOCK else 1
            shown = tiles.shown(rows, keys)
            skipped = skipped.repeat_interleave(rule.rows // rows, 0)
            skipped = skipped.repeat_interleave(rule.keys // keys, 1)[:, : shown.shape[1]] & shown
            self.counts.setdefault(rule, []).append(torch.stack([skipped.sum(), shown.sum()]))
            skipped = skipped.repeat_interleave(rows, 0)
            if keys == BLOCK:
                lost = torch.bmm(skipped.to(parts.dtype)[:, None], parts)[:, 0]
            else:
                lost = (weights * skipped.repeat_interleave(keys, 1)) @ self.values[:last]
            self.losses.setdefault(rule, []).append(_loss_and_error(out, lost))

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row for each rule that applies to the head, with :data:`COLUMNS`."""
        shown = [tiles.shown(BLOCK, BLOCK) for tiles in self.tiles]
        tile_count = sum(int(of_chunk.sum()) for of_chunk in shown)
        for rule, losses in self.losses.items():
            loss, error = torch.cat(losses).unbind(1)
            worst = float(loss.max())
            epsilon = min(1.0, max(worst, NOTHING))
            certified_count = sum(
                int((skip_by_running_sum(tiles, epsilon) & of_chunk).sum())
                for tiles, of_chunk in zip(self.tiles, shown, strict=True)
            )
            skipped, visible_count = torch.stack(self.counts[rule]).sum(0).tolist()
            yield {
                "rule": rule.name,
                "skipped": skipped / visible_count,
                "worst_row_loss": worst,
                "mean_row_loss": float(loss.mean(dtype=torch.float64)),
                "output_error": float(error.max() / self.head.values.abs().max()),
                "certified_skipped": certified_count / tile_count,
            }


def _loss_and_error(out: Tensor, lost: Tensor) -> Tensor:
    """(R, 2): the lost weight, and the largest error of the renormalised output without the skipped keys.

    Args:
        out, lost: (R, V + 1), each row's output and sum of weights over all keys and over the skipped keys.
    """
    share = lost[:, -1:].clamp(min=0)
    error = (out * share - lost)[:, :-1].abs().amax(1) / (1 - share[:, 0]).clamp(min=1 - MOST_LOST)
    error = torch.where(share[:, 0] > MOST_LOST, out[:, :-1].abs().amax(1), error)
    return torch.stack([share[:, 0], error], 1)


def measure_rules(
    model: nn.Module,
    tokens: Tensor | Sequence[int],
    *,
    log_pruning_tolerance: float | None = None,
    rules: Sequence[Rule] = RULES,
    progress: bool = False,
) -> pd.DataFrame:
    """The blocks that each of ``rules`` skips and the loss in each head, on one sequence with exact weights.

    Args:
        model: a FoX model, or a causal decoder that :func:`read_heads` accepts.
        tokens: int64 ids, (T,) or (1, T); tokens after the last multiple of 128 are ignored.
        log_pruning_tolerance: log epsilon of ACP's certificate; default: the model's own, or -10.

    Returns:
        A frame with one row for each layer, head and applicable rule:

        - ``skipped``: fraction of the visible blocks of 64 x 64; of (row, block) pairs for rules by row; of
            (row, key block) pairs for finer rules;
        - ``worst_row_loss``, ``mean_row_loss``: exact attention weight on the skipped part of a row;
        - ``output_error``: largest ``|out - exact|`` of a row after renormalisation, over ``max |v|``;
        - ``certified_skipped``: fraction of blocks that the certified online test skips with epsilon =
            ``worst_row_loss``.

    Raises:
        NotReadable: as in :func:`read_heads`.
        UsageError: ``tokens`` are not ids of the model, more than one sequence, or fewer than 256.
    """
    ids = check_ids(tokens, text_config(model).vocab_size).to(next(model.parameters()).device)
    ids = ids[:, : ids.shape[1] // SPAN * SPAN]
    if len(ids) != 1 or ids.shape[1] < 2 * SPAN:
        raise UsageError(
            f"rules require one sequence of {2 * SPAN} tokens or more; increase --context-length"
        )
    found: list[dict[str, Any]] = []
    bar = progress_bar(unit="head", leave=False, disable=not progress)

    def on_layer(layer: int, inputs: LayerInputs) -> None:
        for head, of_head in enumerate(split_heads(inputs, log_epsilon)):
            sums = RuleSums(of_head, rules)
            head_weights(
                of_head.q.float(),
                of_head.k.float(),
                of_head.c,
                None,
                grid=(BLOCK, BLOCK),
                cell=len(of_head.q),
                strongest=1,
                scaling=1.0,
                softcap=inputs.softcap,
                window_size=inputs.window_size,
                sink=None if inputs.sinks is None else inputs.sinks[head],
                sums=sums,
            )
            found.extend({"layer": layer, "head": head, **row} for row in sums.rows())
            bar.update()

    with bar, certified(model, log_pruning_tolerance) as log_epsilon:
        read_layers(model, ids, on_layer)
    return pd.DataFrame(found)


def split_heads(inputs: LayerInputs, log_pruning_tolerance: float) -> Iterator[HeadInputs]:
    """The inputs of each head on the first sequence."""
    threshold = certificate(inputs, log_pruning_tolerance)
    for head in range(inputs.q.shape[1]):
        group = head // (inputs.q.shape[1] // inputs.k.shape[1])
        yield HeadInputs(
            inputs.q[0, head].double() * inputs.scaling,
            inputs.k[0, group].double(),
            inputs.values[0, group].float(),
            None if inputs.c is None else inputs.c[head],
            None if threshold is None else threshold[head],
            inputs.softcap,
            inputs.window_size,
        )


def summarize(table: pd.DataFrame) -> pd.DataFrame:
    """One row per rule, in the order of the rules: means over heads, and maxima for the worst-row columns."""
    of_all: Any = dict.fromkeys(COLUMNS, "mean") | {"worst_row_loss": "max", "output_error": "max"}
    return table.groupby("rule", sort=False).agg(of_all)


def head_map(table: pd.DataFrame, name: str, text: str, tokens: int) -> dict[str, Any]:
    """The content of ``head_map.json``; docs/rules.md documents its fields."""
    rules = {rule.name: rule for rule in RULES}
    return {
        "format": 1,
        "model": name,
        "text": text,
        "tokens": tokens // SPAN * SPAN,
        "block_tokens": BLOCK,
        "rules": [
            {
                "name": name,
                "source": rules[name].source,
                "query_tokens": rules[name].rows,
                "key_tokens": rules[name].keys,
                "certified": rules[name].certified,
                **_rounded(row),
            }
            for name, row in summarize(table).to_dict("index").items()
        ],
        "not_computable": [{"name": name, "reason": why} for name, why in NOT_COMPUTABLE.items()],
        "heads": [
            {
                "layer": layer,
                "head": head,
                "rules": {row["rule"]: _rounded(row) for row in rows.to_dict("records")},
            }
            for (layer, head), rows in cast(Any, table.groupby(["layer", "head"]))
        ],
    }


def _rounded(row: dict) -> dict[str, float]:
    return {name: float(f"{row[name]:.6g}") for name in COLUMNS}


def print_rules(table: pd.DataFrame) -> None:
    """Prints one row per rule, over all heads."""
    rules = summarize(table)
    columns = {
        "skip %": rules["skipped"].map(percent),
        "worst": rules["worst_row_loss"].map(_scientific),
        "mean": rules["mean_row_loss"].map(_scientific),
        "error": rules["output_error"].map(_scientific),
        "certified": rules["certified_skipped"].map(percent),
    }
    print_table(columns, labels=[*rules.index])
    notes = [f"not computable: {name}: {why}" for name, why in NOT_COMPUTABLE.items()]
    if without_decay := [rule.name for rule in RULES if rule.name not in rules.index]:
        notes.insert(0, f"not applicable: {', '.join(without_decay)}: the model has no forget gates or ALiBi")
    print(
        "skip       % of the visible blocks of 64 x 64 (finer rules: of their units), mean of the heads",
        "worst      exact attention weight of the skipped blocks, worst row of all heads; mean: mean row",
        "error      largest error of a row's output, over max |v|",
        "certified  % of the blocks that the certified test skips at the rule's worst-row loss",
        *notes,
        sep="\n",
    )


def _scientific(value: float) -> str:
    return f"{value:.1e}" if value else "0"
