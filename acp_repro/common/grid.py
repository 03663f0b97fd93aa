"""The largest pruned ratio that a grid of blocks allows, and the kinds of heads (Section 4.3). No imports."""

LOCAL, GLOBAL = 0.95, 0.05  # the outer bins of Figure 4
KINDS = ("local", "intermediate", "global")


def largest_pruned_ratio(seqlen: int, block_q: int, block_k: int) -> float:
    """The largest possible pruned ratio: that of a head that keeps two keys per query.

    These are the query's own key (D_ii = 0) and the previous key, whose decay is a single gate. No gate of a
    trained model is near delta. Each row of blocks therefore keeps the diagonal blocks and the block of the
    key before its first query.

    Args:
        seqlen, block_q, block_k: sizes in tokens.
    """
    pruned = causal = 0
    for first in range(0, seqlen, block_q):
        last = min(first + block_q, seqlen) - 1
        pruned += max(first - 1, 0) // block_k
        causal += last // block_k + 1
    return pruned / causal


def head_kind(pruned_ratio: float, largest: float) -> str | None:
    """``local`` if at least 95 % of the prunable blocks are pruned, ``global`` if less than 5 %, otherwise
    ``intermediate`` (Section 4.3); None if the grid has no prunable blocks.

    The ratio is relative to the prunable blocks, because at short contexts the diagonal blocks and their
    neighbours are more than 5 % of all blocks, and no head could be local.

    Args:
        largest: from :func:`largest_pruned_ratio`.
    """
    if not largest:
        return None
    share = pruned_ratio / largest
    return "local" if share >= LOCAL else "global" if share < GLOBAL else "intermediate"
