"""Tables of heads for a terminal or a pipe."""

import pandas as pd

from acp_repro.common.grid import GLOBAL, LOCAL

from .blocks import EPSILONS


def print_heads(title: str, heads: pd.DataFrame, sort: str = "pruned") -> None:
    """Prints the frame of :func:`inspect_heads`, sorted by pruned ratio or by layer, and the means."""
    facts = heads.iloc[0]
    print_title(title, heads)
    print(
        f"log epsilon {facts['log_pruning_tolerance']:g}, "
        f"blocks of {facts['block_q_tokens']} x {facts['block_k_tokens']}\n"
    )
    if sort == "pruned":
        # Many local heads reach the achievable maximum; the token-level ratio distinguishes them.
        heads = heads.sort_values("token_pruned_ratio", ascending=False, kind="stable")
    print_table(
        {
            "layer": heads["layer"],
            "head": heads["head"],
            "pruned %": heads["pruned_ratio"].map(percent),
            "kind": [kind or "-" for kind in heads["kind"]],
            "p50": _contexts(heads, "median_window_tokens"),
            "p90": _contexts(heads, "q90_window_tokens"),
            "gate": heads["mean_forget_gate"].map("{:.3f}".format),
            "U": heads["logit_bound"].map("{:.2f}".format),
            "delta": heads["threshold_nats"].map("{:.1f}".format),
        }
    )
    print(
        f"pruned   {heads['pruned_ratio'].mean():.1%} of all blocks (achievable maximum "
        f"{facts['largest_pruned_ratio']:.1%}), {heads['token_pruned_ratio'].mean():.1%} at token level",
        "         blocks at the diagonal are never pruned, so no head can prune all of its blocks",
        f"kind     local: at least {LOCAL:.0%} of the achievable maximum; global: under {GLOBAL:.0%}",
        "p50, p90 effective context: keys that a query keeps at token level, median and 90 % quantile",
        "gate     mean forget gate; U bounds the scores, delta is the threshold in nats",
        sep="\n",
    )


def _contexts(heads: pd.DataFrame, column: str) -> list[str]:
    """Effective contexts in tokens; "all" for a global head, which keeps nearly all causal keys."""
    return [
        "all" if kind == "global" else f"{v:,}" for kind, v in zip(heads["kind"], heads[column], strict=True)
    ]


def print_decoder(title: str, heads: pd.DataFrame, sort: str = "pruned") -> None:
    """Prints the table of :func:`read_heads`: keys, distances, and prunable blocks."""
    print_title(title, heads)
    print()
    if sort == "pruned":
        heads = heads.sort_values("seen_e-10", ascending=False, kind="stable")
    print_table(
        {
            "layer": heads["layer"],
            "head": heads["head"],
            **{f"{n} % in": heads[f"keys_{n}"].map("{:,.0f}".format) for n in ("90", "99", "99.9")},
            "half": heads["half_weight_tokens"].map("{:,}".format),
            "first %": heads["first_token_weight"].map(percent),
            "nats": heads["entropy_nats"].map("{:.2f}".format),
            "known %": heads["known"].map(percent),
            "seen %": heads["seen_e-10"].map(percent),
            "oracle %": heads["after_e-10"].map(percent),
        }
    )
    mean = heads.mean(numeric_only=True)
    print(
        *(
            f"blocks  at epsilon {name}: {mean['known']:.1%} prunable a priori, "
            f"{mean[f'seen_{name}']:.1%} online, {mean[f'after_{name}']:.1%} by an oracle"
            for name in EPSILONS
        ),
        "        blocks of 64 x 64 that can be skipped with less than epsilon of any row's weight lost",
        "in      keys that receive this percentage of a query's weight: the median of the queries",
        "half    median attention distance; first: attention-sink weight; nats: entropy",
        "known   at epsilon e-10: prunable a priori; seen: online; oracle: from all weights",
        sep="\n",
    )


def percent(ratio: float) -> str:
    """A ratio in percent, with one decimal and without the sign."""
    return f"{100 * ratio:.1f}"


def print_title(title: str, heads: pd.DataFrame) -> None:
    """Prints the size of the model and of the text."""
    tokens, length = heads["measured_tokens"].iloc[0], heads["context_length_tokens"].iloc[0]
    print(f"{title}: {heads['layer'].nunique()} layers of {heads['head'].nunique()} heads")
    print(f"{tokens:,} tokens in sequences of {length:,}")


def print_table(columns: dict, labels: list[str] | None = None) -> None:
    """Prints the columns aligned to the right, after left-aligned ``labels`` of the rows if given."""
    frame = pd.DataFrame({name: list(values) for name, values in columns.items()}, index=labels)
    print(frame.to_string(index=labels is not None), end="\n\n")
