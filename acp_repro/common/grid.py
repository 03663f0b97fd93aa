"""How much a grid of blocks lets a head save, and which heads are local (Section 4.3). No imports."""

from __future__ import annotations

LOCAL, GLOBAL = 0.95, 0.05  # the outer bins of Figure 4
KINDS = ("local", "between", "global")


def largest_pruned_ratio(seqlen: int, block_q: int, block_k: int) -> float:
    """The most that a grid can prune: the ratio of a head that keeps two keys a query.

    Those are the query's own key (D_ii = 0) and the one before, which is a single gate away. No gate of a
    trained model comes near delta. So the diagonal blocks stay, and those that touch them.

    Args:
        seqlen, block_q, block_k: in tokens.
    """
    pruned = causal = 0
    for first in range(0, seqlen, block_q):
        last = min(first + block_q, seqlen) - 1
        pruned += max(first - 1, 0) // block_k
        causal += last // block_k + 1
    return pruned / causal


def head_kind(pruned_ratio: float, largest: float) -> str | None:
    """``local`` if at least 95 % of the blocks that can be pruned are, ``global`` under 5 %, else ``between``
    (Section 4.3); None if none can be.

    Of all blocks, the diagonal and its neighbour are more than 5 % at short contexts: no head could be local.

    Args:
        largest: from :func:`largest_pruned_ratio`.
    """
    if not largest:
        return None
    share = pruned_ratio / largest
    return "local" if share >= LOCAL else "global" if share < GLOBAL else "between"
