"""Tables of heads for a terminal or a pipe; requires the library `rich`."""

from __future__ import annotations

import pandas as pd
from rich.console import Console
from rich.table import Table

from acp_repro.common.grid import GLOBAL, KINDS, LOCAL

from .blocks import EPSILONS
from .palette import ROLES


def print_heads(title: str, heads: pd.DataFrame, sort: str = "pruned") -> None:
    """Prints the frame of :func:`inspect_heads`, sorted by pruned ratio or by layer, and a summary per layer.

    A table drops its rightmost columns until it fits the terminal (80 columns in a pipe).
    """
    console, facts = Console(highlight=False), heads.iloc[0]
    console.out(  # without wrapping, which is left to the reader of a pipe
        f"{title}: {heads['layer'].nunique()} layers of {heads['head'].nunique()} heads",
        f"{facts['measured_tokens']:,} tokens in sequences of {facts['context_length_tokens']:,}, "
        f"log epsilon {facts['log_pruning_tolerance']:g}, "
        f"blocks of {facts['block_q_tokens']} x {facts['block_k_tokens']}\n",
        sep="\n",
    )
    if sort == "pruned":
        # Many local heads reach the achievable maximum; the token-level ratio distinguishes them.
        heads = heads.sort_values("token_pruned_ratio", ascending=False, kind="stable")
    print_table(
        console,
        {
            "layer": [f"{v}" for v in heads["layer"]],
            "head": [f"{v}" for v in heads["head"]],
            "pruned %": [f"{100 * v:.1f}" for v in heads["pruned_ratio"]],
            "kind": [v or "-" for v in heads["kind"]],
            "p50": _contexts(heads, "median_window_tokens"),
            "p90": _contexts(heads, "q90_window_tokens"),
            "gate": [f"{v:.3f}" for v in heads["mean_forget_gate"]],
            "U": [f"{v:.2f}" for v in heads["logit_bound"]],
            "delta": [f"{v:.1f}" for v in heads["threshold_nats"]],
        },
    )
    layers = [of_layer for _, of_layer in heads.groupby("layer")]  # every head has the same causal blocks
    print_table(
        console,
        {
            "layer": [f"{of_layer['layer'].iloc[0]}" for of_layer in layers],
            "pruned %": [f"{100 * of_layer['pruned_ratio'].mean():.1f}" for of_layer in layers],
            **{kind: [f"{(of_layer['kind'] == kind).sum()}" for of_layer in layers] for kind in KINDS},
            "p50 (tokens)": [_range_of_contexts(of_layer) for of_layer in layers],
        },
    )
    console.out(
        f"pruned  {heads['pruned_ratio'].mean():.1%} of all blocks (achievable maximum "
        f"{facts['largest_pruned_ratio']:.1%}), {heads['token_pruned_ratio'].mean():.1%} at token level",
        "grid    blocks at the diagonal are never pruned, so no head can prune all of its blocks",
        f"kind    local: at least {LOCAL:.0%} of the achievable maximum; global: under {GLOBAL:.0%}",
        "p50,p90 effective context: keys that a query keeps at token level, median and 90 % quantile",
        "gate    mean forget gate; U bounds the scores, delta is the threshold in nats",
        sep="\n",
    )


def _contexts(heads: pd.DataFrame, column: str) -> list[str]:
    """Effective contexts in tokens; "all" for a global head, which keeps nearly all causal keys."""
    return [
        "all" if kind == "global" else f"{v:,}" for kind, v in zip(heads["kind"], heads[column], strict=True)
    ]


def _range_of_contexts(heads: pd.DataFrame) -> str:
    contexts = _contexts(heads.sort_values(["median_window_tokens"]), "median_window_tokens")
    return f"{contexts[0]} to {contexts[-1]}"


def print_decoder(title: str, heads: pd.DataFrame, sort: str = "pruned") -> None:
    """Prints the table of :func:`read_heads`: keys, distances, and prunable blocks."""
    console, facts = Console(highlight=False), heads.iloc[0]
    console.out(
        f"{title}: {heads['layer'].nunique()} layers of {heads['head'].nunique()} heads",
        f"{facts['measured_tokens']:,.0f} tokens in sequences of {facts['context_length_tokens']:,.0f}\n",
        sep="\n",
    )
    if sort == "pruned":
        heads = heads.sort_values("seen_e-10", ascending=False, kind="stable")
    shares = {"known %": "known", "seen %": "seen_e-10", "oracle %": "after_e-10"}
    print_table(
        console,
        {
            "layer": [f"{v}" for v in heads["layer"]],
            "head": [f"{v}" for v in heads["head"]],
            **{f"{n} % in": [f"{v:,.0f}" for v in heads[f"keys_{n}"]] for n in ("90", "99", "99.9")},
            "half": [f"{v:,}" for v in heads["half_weight_tokens"]],
            "first %": [f"{100 * v:.1f}" for v in heads["first_token_weight"]],
            "nats": [f"{v:.2f}" for v in heads["entropy_nats"]],
            **{name: [f"{100 * v:.1f}" for v in heads[column]] for name, column in shares.items()},
        },
    )
    mean = heads.mean(numeric_only=True)
    console.out(
        *(
            f"blocks  at epsilon {name}: {mean['known']:.1%} prunable a priori, "
            f"{mean[f'seen_{name}']:.1%} online, {mean[f'after_{name}']:.1%} by an oracle"
            for name in EPSILONS
        ),
        "        blocks of 64 x 64 that can be skipped with less than epsilon of any row's weight lost",
        "in      keys that receive this percentage of a query's weight: the median of the queries",
        "half    median attention distance; first: attention-sink weight; nats: entropy",
        sep="\n",
    )


def print_table(console: Console, columns: dict[str, list[str]], left: tuple[str, ...] = ("kind",)) -> None:
    """Prints the columns that fit, aligned to the right unless they are in ``left``."""
    shown = list(columns)
    widths = [2 + max(map(len, [name, *columns[name]])) for name in shown]
    while len(shown) > 3 and sum(widths[: len(shown)]) > console.width:
        shown.pop()
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in shown:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    kinds = columns.get("kind", [""] * len(columns[shown[0]]))
    for kind, *cells in zip(kinds, *(columns[name] for name in shown), strict=True):
        table.add_row(*cells, style=ROLES.get(kind))
    console.print(table)
    console.print()
