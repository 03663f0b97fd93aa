"""The keys that each head of a decoder needs and the blocks that it could skip: the table of ``read_heads``.

A block is 64 queries by 64 keys. A block may be skipped if every row loses less than epsilon of its weight.
These blocks are known a priori from a decay certificate (ACP); found online from the scores of each block
(:func:`seen_on_the_way`); or found afterwards from all weights, by an oracle (:func:`known_afterwards`).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from acp_repro.attention.boundary import find_boundary

from .weights import RowSums

BLOCK = 64
EPSILONS = {"e-10": math.exp(-10), "1e-3": 1e-3, "1e-2": 1e-2}
SHARES = {"90": 0.9, "99": 0.99, "99.9": 0.999}
MOST_QUERIES = 512  # the number of evenly spaced queries whose keys are sorted


def settle(decide: Callable[[Tensor], Tensor], kept: Tensor) -> Tensor:
    """The blocks that a kernel skips if each decision depends on the blocks kept before.

    ``decide(kept)`` returns for all blocks whether each is skipped if exactly ``kept`` are kept. The decision
    for the n-th visited block depends on n - 1 others, so it is final after at most n calls. The loop ends
    when no decision changes, usually after three calls.

    Args:
        kept: bool, initially True everywhere.
    """
    while not torch.equal(left_out := decide(kept), ~kept):
        kept = ~left_out
    return left_out


def seen_on_the_way(largest: Tensor, mass: Tensor, visible: Tensor, epsilon: float) -> Tensor:
    """(..., M) bool: the blocks that a kernel skips online, visiting them from the diagonal to the left.

    A row permits skipping a block if the block's largest score s satisfies ``exp(s - m) / l < epsilon / n``,
    where m and l are the row's running maximum and sum over the blocks kept so far, and n is the number of
    keys that the row sees. A block is skipped if all its rows permit it (the forward test of
    flash-sparse-attention with threshold epsilon). ``m + log(l)`` never decreases, so the final weight of
    each skipped key is less than epsilon / n, and fewer than n keys are skipped. Each row therefore loses
    less than epsilon, for any softmax and without calibration.

    Args:
        largest, mass: (..., R, M), the largest weight and the sum of weights of each row in each block, up to
            a factor per row. The diagonal is the last column; blocks after it have weight 0.
        visible: (..., R), n.
    """
    needed = largest * (visible.to(largest.dtype) / epsilon)[..., None]

    def decide(kept: Tensor) -> Tensor:
        sums = (mass * kept[..., None, :]).flip(-1).cumsum(-1).flip(-1)
        running = torch.nn.functional.pad(sums[..., 1:], (0, 1))
        return (needed < running).all(-2)

    return settle(decide, largest.new_ones(largest[..., 0, :].shape, dtype=torch.bool))


def known_afterwards(mass: Tensor, epsilon: float) -> Tensor:
    """(..., M) bool: blocks that can be skipped together such that every row loses less than epsilon.

    Blocks are removed in the order of their largest row sum, which gives a lower bound on the optimum.

    Args:
        mass: (..., R, M), the sum of weights of each row in each block.
    """
    order = mass.amax(-2).argsort(-1)
    sums = mass.gather(-1, order[..., None, :].expand_as(mass)).cumsum(-1)
    return torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, sums.amax(-2) < epsilon)


def count_visible(first: int, last: int, window_size: int | None, device: torch.device) -> Tensor:
    """(last - first,) int64: the number of keys that each query sees; None for no window."""
    return torch.arange(first + 1, last + 1, device=device).clamp(max=window_size or last)


class HeadSums(RowSums):
    """The sums of one head over one sequence, accumulated in the pass of :func:`head_weights`.

    Args:
        c: (T,) float64, the running sum of the log forget gates, or zeros.
        threshold: delta of the certificate, one number; None without decay.
        late: the first query that contributes to :attr:`received_late`.
        window_size: keys that a query sees, its own included; None for all.
    """

    def __init__(self, c: Tensor, threshold: Tensor | None, late: int, window_size: int | None):
        # For each query block: the blocks left of the window, and those plus the certificate's blocks.
        self.outside, self.certified = (
            find_boundary(c[None, None], delta, len(c), BLOCK, BLOCK, window_size=window_size)[0, 0].tolist()
            for delta in (None, None if threshold is None else threshold.view(1, 1))
        )
        length = len(c)
        self.length, self.late, self.stride = length, late, -(-length // MOST_QUERIES)
        self.window_size = window_size
        self.blocks = sum(range(1, len(self.outside) + 1)) - sum(self.outside)
        self.known = sum(self.certified) - sum(self.outside)
        self.seen, self.seen_besides, self.after = (dict.fromkeys(EPSILONS, 0) for _ in range(3))
        self.kept_keys: list[Tensor] = []
        self.entropy = 0.0
        self.received_late = torch.zeros(length, dtype=torch.float64)

    def add_weights(self, first: int, weights: Tensor) -> None:
        self.entropy += float(torch.special.entr(weights).sum(-1, dtype=torch.float64).sum())
        last = first + len(weights)
        visible = count_visible(first, last, self.window_size, weights.device)
        tiles = torch.nn.functional.pad(weights, (0, -weights.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
        masses, maxima = tiles.sum(-1), tiles.amax(-1)
        for start in range(0, len(weights), BLOCK):
            m = (first + start) // BLOCK
            outside, rows = self.outside[m], slice(start, start + BLOCK)
            mass, largest = (x[rows, outside : m + 1] for x in (masses, maxima))
            for name, epsilon in EPSILONS.items():
                left_out = seen_on_the_way(largest, mass, visible[rows], epsilon)
                self.seen[name] += int(left_out.sum())
                self.seen_besides[name] += int(left_out[self.certified[m] - outside :].sum())
                self.after[name] += int(known_afterwards(mass, epsilon).sum())
        falling = weights[-first % self.stride :: self.stride].sort(-1, descending=True).values.cumsum(-1)
        shares = torch.tensor([*SHARES.values()], device=weights.device, dtype=falling.dtype)
        needed = shares * falling[:, -1:].clamp(max=1)  # a learned sink receives the rest
        self.kept_keys.append(1 + (falling[:, None] < needed[..., None]).sum(-1).cpu())
        if last > self.late:
            late = weights[max(0, self.late - first) :].sum(0, dtype=torch.float64)
            self.received_late[: len(late)] += late.cpu()

    def columns(self) -> dict[str, float]:
        """The columns of the table for this head; see :func:`read_heads`."""
        keys = torch.cat(self.kept_keys).double()
        return {
            **{f"keys_{name}": float(keys[:, i].median()) for i, name in enumerate(SHARES)},
            **{f"q90_keys_{name}": float(keys[:, i].quantile(0.9)) for i, name in enumerate(SHARES)},
            "entropy_nats": self.entropy / self.length,
            "known": self.known / self.blocks,
            **{f"seen_{name}": count / self.blocks for name, count in self.seen.items()},
            **{f"seen_besides_{name}": count / self.blocks for name, count in self.seen_besides.items()},
            **{f"after_{name}": count / self.blocks for name, count in self.after.items()},
        }
