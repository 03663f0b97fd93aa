"""What each head of a decoder keeps, and which blocks it could leave out: the table of ``read_heads``.

A block is 64 queries by 64 keys. It may be left out if no row of weights loses epsilon or more. Which blocks
these are is known beforehand from a certificate of decay (ACP); on the way from each block's scores
(:func:`seen_on_the_way`); or afterwards from all weights, by an oracle (:func:`known_afterwards`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

BLOCK = 64
EPSILONS = {"e-10": math.exp(-10), "1e-3": 1e-3, "1e-2": 1e-2}
SHARES = {"90": 0.9, "99": 0.99, "99.9": 0.999}
MOST_QUERIES = 512  # evenly spaced queries whose keys are sorted


def seen_on_the_way(maxima: Tensor, epsilon: float, length: int) -> Tensor:
    """(M,) bool: the blocks that a kernel leaves out when it visits them from the diagonal leftwards.

    A block is left out if its largest score lies below each row's running maximum by more than
    ``log(length / epsilon)``. Let m be a row's running maximum and l >= 1 its running sum in units of e^m.
    Each score left out adds less than epsilon / length, so together they add less than epsilon, and a weight
    is a sum over l. So each row loses less than epsilon, for any softmax and without calibration.

    Args:
        maxima: (R, M), the largest score of each row in each block, in base 2; the diagonal comes last.
    """
    # What is left out never raises the maximum, so the maximum of all blocks on the right will do.
    running = maxima.flip(1).cummax(1).values.flip(1)
    below = maxima[:, :-1] < running[:, 1:] - math.log2(length / epsilon)
    return torch.nn.functional.pad(below.all(0), (0, 1))


def known_afterwards(weights: Tensor, epsilon: float) -> int:
    """The blocks that may be left out together, so that no row of ``weights`` (R, M) loses epsilon or more.

    Blocks go in the order of their largest row sum, which is a lower bound of the best choice.
    """
    order = weights.amax(0).argsort()
    return int((weights[:, order].cumsum(1).amax(0) < epsilon).sum())


class HeadSums:
    """The sums of one head over one sequence, gathered in the pass of :func:`head_weights`.

    Args:
        outside, known: (M,) int32 each, blocks on the left of a query block that lie outside the window, and
            that the certificate leaves out besides (at least ``outside``).
        length: T.
        late: the first query whose weights count in :attr:`received_late`.
    """

    def __init__(self, outside: Tensor, known: Tensor, length: int, late: int):
        self.outside, self.certified = outside.tolist(), known.tolist()
        self.length, self.late, self.stride = length, late, -(-length // MOST_QUERIES)
        self.blocks = sum(range(1, len(known) + 1)) - sum(self.outside)
        self.known = sum(self.certified) - sum(self.outside)
        self.seen, self.seen_besides, self.after = (dict.fromkeys(EPSILONS, 0) for _ in range(3))
        self.kept_keys: list[Tensor] = []
        self.entropy = 0.0
        self.received_late = torch.zeros(length, dtype=torch.float64)

    def add_scores(self, first: int, block: Tensor) -> None:
        for m, maxima in _rows_by_block(first, block, -math.inf, Tensor.amax):
            outside = self.outside[m]
            for name, epsilon in EPSILONS.items():
                left_out = seen_on_the_way(maxima[:, outside:], epsilon, self.length)
                self.seen[name] += int(left_out.sum())
                self.seen_besides[name] += int(left_out[self.certified[m] - outside :].sum())

    def add_weights(self, first: int, block: Tensor, total: Tensor) -> None:
        weights = block / total[:, None]
        self.entropy += float(torch.special.entr(weights).sum(-1, dtype=torch.float64).sum())
        for m, sums in _rows_by_block(first, weights, 0.0, Tensor.sum):
            for name, epsilon in EPSILONS.items():
                self.after[name] += known_afterwards(sums[:, self.outside[m] :], epsilon)
        falling = weights[-first % self.stride :: self.stride].sort(-1, descending=True).values.cumsum(-1)
        shares = torch.tensor([*SHARES.values()], device=block.device, dtype=falling.dtype)
        needed = shares * falling[:, -1:].clamp(max=1)  # less than 1 where a sink takes the rest
        self.kept_keys.append(1 + (falling[:, None] < needed[..., None]).sum(-1).cpu())
        if first + len(block) > self.late:
            late = weights[max(0, self.late - first) :].sum(0, dtype=torch.float64)
            self.received_late[: len(late)] += late.cpu()

    def columns(self) -> dict[str, float]:
        """The head's columns of the table; see :func:`read_heads`."""
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


def _rows_by_block(
    first: int, block: Tensor, padding: float, reduce: Callable[[Tensor, int], Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """(m, (R, m + 1)) for each query block m of a chunk: ``reduce`` over the keys of each of its blocks."""
    padded = torch.nn.functional.pad(block, (0, -block.shape[1] % BLOCK), value=padding)
    reduced = reduce(padded.unflatten(1, (-1, BLOCK)), -1)
    for start in range(0, len(block), BLOCK):
        m = (first + start) // BLOCK
        yield m, reduced[start : start + BLOCK, : m + 1]
