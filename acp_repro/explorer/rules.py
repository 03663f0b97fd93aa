"""The skip rules of published sparse attentions, applied to the exact scores of one head.

Each function returns the tiles that a rule skips. Tests after q.k read ``Tiles``; tests before q.k use pooled
q and k. The rules also include the decay of FoX or ALiBi, as two additional columns of q and k, which the
projects' own code does not support. docs/rules.md lists the sources, versions and differences from the
projects' code.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from acp_repro.attention.boundary import find_boundary

from .blocks import BLOCK, count_visible, known_afterwards, seen_on_the_way, settle
from .weights import SPAN, sum_by_distance


@dataclass
class HeadInputs:
    """The inputs of one head's scores for T tokens, a multiple of :data:`SPAN`.

    Attributes:
        q: (T, D) float64, multiplied by the factor of ``q.k``. k: (T, D) float64, because a rule that ranks
            weights would choose at random among those that underflow in float32. values: (T, V) float32.
        c: (T,) float64, the running sum of the log forget gates; None without decay.
        threshold: delta, one number; None without decay.
        softcap, window_size: as in :class:`LayerInputs`.
        masks: the masks of :func:`skip_by_mask`, by function and settings.
        queries, keys: q and k with two more columns, whose product is the decay ``c_i - c_j``.
    """

    q: Tensor
    k: Tensor
    values: Tensor
    c: Tensor | None = None
    threshold: Tensor | None = None
    softcap: float | None = None
    window_size: int | None = None
    masks: dict[Any, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.queries, self.keys = self.q, self.k
        if self.c is not None:
            c, ones = self.c[:, None], torch.ones_like(self.c)[:, None]
            self.queries = torch.cat([self.q, c, ones], 1)
            self.keys = torch.cat([self.k, ones, -c], 1)

    def pooled(self, rows: slice, size_q: int, size_k: int) -> Tensor:
        """Scores of the mean q of each block of ``rows`` and the mean k of each block up to the last row."""
        return pool(self.queries[rows], size_q) @ pool(self.keys[: rows.stop], size_k).T

    def last_weights(self, count: int) -> Tensor:
        """(count, T): the exact weights of the last ``count`` queries."""
        length = len(self.k)
        scores = self.queries[-count:] @ self.keys.T
        if self.softcap is not None:
            scores = self.softcap * (scores / self.softcap).tanh()
        distance = offsets(length - count, length, length, 1, 1, scores.device)
        hidden = (distance < 0) | (distance >= (self.window_size or length))
        return scores.masked_fill(hidden, -math.inf).softmax(-1)


@dataclass
class Tiles:
    """Rows ``first`` to ``last`` of a head, whole blocks of :data:`SPAN`, over N tiles of 64 keys.

    Attributes:
        maxima: (R, N), the largest score of each row in each tile, in base 2.
        largest, mass: (R, N), the largest weight and the sum of weights of each row in each tile.
    """

    head: HeadInputs
    first: int
    last: int
    maxima: Tensor
    largest: Tensor
    mass: Tensor

    @property
    def rows(self) -> slice:
        return slice(self.first, self.last)

    @property
    def visible(self) -> Tensor:
        """(R,) int64: the number of keys that each row sees."""
        return count_visible(self.first, self.last, self.head.window_size, self.mass.device)

    def blocks(self, of_rows: Tensor) -> Tensor:
        """``of_rows`` (R, ...) as (R / 64, 64, ...)."""
        return of_rows.unflatten(0, (-1, BLOCK))

    def offsets(self, size_q: int, size_k: int) -> Tensor:
        """(Q, K) int64: first query of each block of these rows minus first key of each key block."""
        return offsets(self.first, self.last, self.last, size_q, size_k, self.mass.device)

    def shown(self, size_q: int, size_k: int) -> Tensor:
        """(Q, K) bool: blocks of ``size_q`` by ``size_k`` tokens with at least one visible key."""
        distance = self.offsets(size_q, size_k)
        window = self.head.window_size or self.last
        return (distance > -size_q) & (distance < window + size_k - 1)


@dataclass(frozen=True)
class Rule:
    """A rule with its settings.

    Attributes:
        source: the project, its version and its file.
        skip: returns (R / rows, K) bool for the rows of ``Tiles``, the skipped units of ``rows`` queries by
            ``keys`` keys; None if the rule does not apply to the head.
        certified: whether every row loses less than epsilon on any text.
    """

    name: str
    source: str
    skip: Callable[[Tiles], Tensor | None]
    rows: int = BLOCK
    keys: int = BLOCK
    certified: bool = False


def pool(x: Tensor, size: int) -> Tensor:
    """(blocks, D): means of ``x`` (T, D) over blocks of ``size`` tokens; the last block may be shorter."""
    return F.pad(x, (0, 0, 0, -len(x) % size), value=math.nan).unflatten(0, (-1, size)).nanmean(1)


def offsets(first: int, last: int, keys: int, size_q: int, size_k: int, device: torch.device) -> Tensor:
    """(Q, K) int64: first query of each block, from ``first`` to ``last``, minus first key of each block."""
    starts = torch.arange(first, last, size_q, device=device)
    return starts[:, None] - torch.arange(0, keys, size_k, device=device)


def keep_top(scores: Tensor, count: int) -> Tensor:
    """Bool, True at the ``count`` largest scores of each row."""
    chosen = scores.topk(min(count, scores.shape[1]), -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)


# Tests before q.k, from the decay


def skip_by_certificate(tiles: Tiles) -> Tensor | None:
    """ACP: skips the tiles before the boundary."""
    head = tiles.head
    if head.c is None or head.threshold is None:
        return None
    c, delta = head.c[None, None], head.threshold.view(1, 1)
    boundary = find_boundary(c, delta, len(head.k), BLOCK, BLOCK)[0, 0]
    of_rows = boundary[tiles.first // BLOCK : tiles.last // BLOCK, None]
    return torch.arange(tiles.mass.shape[1], device=of_rows.device) < of_rows


def skip_by_gate(tiles: Tiles) -> Tensor | None:
    """The gate test of flash-sparse-attention before q.k, with the decay as the gate: the largest D of the
    tile minus the largest D of the query block is compared with ``log(1 / T)``."""
    c = tiles.head.c
    if c is None:
        return None
    decay = c[tiles.rows][::BLOCK, None] - c[BLOCK - 1 : tiles.last : BLOCK]
    seen = tiles.offsets(BLOCK, BLOCK) >= 0
    top = decay.masked_fill(~seen, -math.inf).clamp(max=0).amax(1, keepdim=True)
    return decay - top < -math.log(len(c))


# Online tests after q.k


def skip_by_running_sum(tiles: Tiles, threshold: float) -> Tensor:
    """The forward test of flash-sparse-attention, and our certified test: see :func:`seen_on_the_way`."""
    largest, mass, visible = map(tiles.blocks, (tiles.largest, tiles.mass, tiles.visible))
    return seen_on_the_way(largest, mass, visible, threshold)


def skip_by_final_sum(tiles: Tiles, threshold: float) -> Tensor:
    """The backward test of flash-sparse-attention, with the final sum over blocks kept by the forward."""
    kept = ~skip_by_running_sum(tiles, threshold)
    mass = tiles.blocks(tiles.mass)
    total = (mass * kept[:, None]).sum(-1, keepdim=True)
    needed = tiles.blocks(tiles.largest * tiles.visible[:, None])
    return (needed < threshold * total).all(1)


def skip_by_maximum(
    tiles: Tiles, threshold: float, rows: int = BLOCK, keys: int = BLOCK, leftwards: bool = False
) -> Tensor:
    """Skip softmax (BLASST): ``exp(tile maximum - running maximum) < threshold`` in all rows. The first
    visited tile is kept. The order is from key 0 to the diagonal, or with ``leftwards`` from the diagonal."""
    maxima = tiles.maxima.unflatten(1, (-1, keys // BLOCK)).amax(-1).unflatten(0, (-1, rows))
    if leftwards:
        maxima = maxima.flip(-1)

    def decide(kept: Tensor) -> Tensor:
        running = maxima.masked_fill(~kept[:, None], -math.inf).cummax(-1).values
        running = F.pad(running[..., :-1], (1, 0), value=-math.inf)
        return (maxima < running + math.log2(threshold)).all(1)

    skipped = settle(decide, torch.ones_like(maxima[:, 0], dtype=torch.bool))
    return skipped.flip(-1) if leftwards else skipped


def skip_rows_in_backward(tiles: Tiles, threshold: float) -> Tensor:
    """The backward of Model-Optimizer: skips a row of a tile if all its weights are below ``threshold``."""
    return tiles.largest < threshold


# Tests before q.k, from pooled q and k


def skip_unlike_means(tiles: Tiles, similarity: float, mass: float | None, share: float = 0.0) -> Tensor:
    """The first stage of SpargeAttn, 128 x 64: keeps blocks in the order of the softmax of mean q and mean k,
    up to ``mass`` or a fraction ``share`` of all key blocks. Blocks of dissimilar tokens are always kept."""
    head, size_q, size_k = tiles.head, SPAN, BLOCK
    keys = head.k - head.k.mean(0)

    def alike(x: Tensor, size: int) -> Tensor:
        return F.normalize(x, dim=1).unflatten(0, (-1, size)).mean(1).square().sum(1) > similarity

    alike_q, alike_k = alike(head.q[tiles.rows], size_q), alike(keys[: tiles.last], size_k)
    scores = head.pooled(tiles.rows, size_q, size_k)
    hidden = tiles.offsets(size_q, size_k) <= -size_q
    weights = scores.masked_fill(hidden | ~alike_k, -math.inf).softmax(1).nan_to_num(0)
    falling, order = weights.sort(dim=1, descending=True, stable=True)  # ties: leftmost block first
    if mass is None:
        count = torch.full((len(weights),), int(share * len(head.k) // size_k), device=weights.device)
    else:
        count = (falling.cumsum(1) <= mass).sum(1)
    ranks = torch.arange(weights.shape[1], device=weights.device)
    chosen = torch.zeros_like(hidden).scatter(1, order, ranks < count.clamp(min=1)[:, None])
    return ~(chosen | ~alike_k | ~alike_q[:, None])


def skip_by_antidiagonals(tiles: Tiles, stride: int, mass: float) -> Tensor:
    """XAttention, 128 x 128: keeps blocks in the order of the softmax of the mean score on each cell's
    antidiagonal, until their sum reaches ``mass``. Block 0 and the diagonal are kept."""
    head, rows, last = tiles.head, tiles.rows, tiles.last
    queries = head.queries[rows].unflatten(0, (-1, stride)).flip(1).flatten(1)
    scores = queries @ head.keys[:last].unflatten(0, (-1, stride)).flatten(1).T / stride
    weights = scores.masked_fill(tiles.offsets(stride, stride) < 0, -math.inf).softmax(1)
    cells = SPAN // stride
    weights = weights.unflatten(1, (-1, cells)).sum(-1).unflatten(0, (-1, cells)).sum(1)
    order = weights.masked_fill(tiles.offsets(SPAN, SPAN) == 0, math.inf).argsort(1, descending=True)
    falling = weights.gather(1, order)
    before = F.pad(falling.cumsum(1) - falling, (1, 0))[:, :-1]
    chosen = torch.zeros_like(order, dtype=torch.bool)
    chosen.scatter_(1, order, before < mass * weights.sum(1, keepdim=True))
    chosen[:, 0] = True
    return ~chosen


def choose_columns_and_diagonals(head: HeadInputs, gamma: float, tau: float, least: int) -> Tensor:
    """The mask of FlexPrefill for the full head, in blocks of 128: columns and diagonals with ``gamma`` of
    the weight of the last 128 queries, and in a query-aware head the blocks with ``gamma`` of the pooled
    scores."""
    length, blocks, device = len(head.k), len(head.k) // SPAN, head.k.device
    weights = head.last_weights(SPAN)
    columns, diagonals = weights.mean(0), sum_by_distance(weights) / SPAN

    def count(x: Tensor) -> int:
        tokens = int((x.sort(descending=True).values.cumsum(0) <= gamma).sum()) + 1
        return min(blocks, max(tokens // SPAN + 1, least // SPAN))

    counts = count(columns), count(diagonals)
    columns, diagonals = (x.view(blocks, SPAN).sum(1) for x in (columns, diagonals))
    pooled = head.pooled(slice(0, length), SPAN, SPAN)
    offset = offsets(0, length, length, SPAN, SPAN, device) // SPAN
    estimated, known = pooled[-1].softmax(0), columns.clone()
    mean = (estimated + known) / 2
    divergence = torch.special.xlogy(estimated, estimated / mean) + torch.special.xlogy(known, known / mean)
    aware = bool((divergence.sum() / 2).sqrt() < tau)
    if aware:
        counts = (min(blocks, least // SPAN),) * 2
    columns[0] = diagonals[0] = math.inf
    of_column, of_diagonal = (
        torch.zeros(blocks, dtype=torch.bool, device=device).index_fill(0, x.topk(n).indices, True)
        for x, n in zip((columns, diagonals), counts, strict=True)
    )
    kept = of_column | of_diagonal[offset.clamp(min=0)]
    if aware:
        falling, order = pooled.masked_fill(offset < 0, -math.inf).softmax(1).flatten().sort(descending=True)
        best = torch.zeros(blocks**2, dtype=torch.bool, device=device)
        kept |= best.index_fill(0, order[falling.cumsum(0) <= gamma * blocks], True).view_as(kept)
    return kept


def choose_lines(head: HeadInputs, columns: int, diagonals: int) -> Tensor:
    """(T / 64, T) bool: the vertical lines and diagonals of MInference, from the last 64 queries. A diagonal
    is 64 keys wide, and a run of diagonals grows in steps of 64."""
    length, device = len(head.k), head.k.device
    weights = head.last_weights(BLOCK)
    of_column, of_distance = weights.sum(0), sum_by_distance(weights)
    of_column[:30] = of_distance[:100] = math.inf
    distances = of_distance.topk(min(length, max(diagonals, 50))).indices.sort().values
    ends = torch.arange(BLOCK, length + 1, BLOCK, device=device)

    def next_end(end: Tensor) -> Tensor:
        """The first end of a diagonal after ``end`` in each block of queries; ``length + 64`` if none."""
        place = torch.searchsorted(distances, ends - end) - 1
        found = (ends - distances[place.clamp(min=0)]).clamp(min=BLOCK)
        return found.masked_fill(place < 0, length + BLOCK)

    kept = torch.zeros(len(ends), length + BLOCK, dtype=torch.bool, device=device)
    keys_before = torch.arange(1, BLOCK + 1, device=device)
    end = next_end(torch.zeros_like(ends))
    while bool((end <= length).any()):
        kept.scatter_(1, end[:, None] - keys_before, True)
        following = next_end(end)
        end = torch.where(following > end + BLOCK, following, end + BLOCK)
        end = end.masked_fill(following > length, length + BLOCK)
    kept = kept[:, :length]
    kept[:, of_column.topk(min(length, max(columns, 30))).indices] = True
    return kept


def skip_by_mask(tiles: Tiles, choose: Callable[..., Tensor], rows: int, keys: int, **how: Any) -> Tensor:
    """Skips by the mask of the full head, computed once by ``choose``, in units of ``rows`` by ``keys``."""
    name, masks = (choose, *how.items()), tiles.head.masks
    if name not in masks:
        masks[name] = choose(tiles.head, **how)
    return ~masks[name][tiles.first // rows : tiles.last // rows, : tiles.last // keys]


def skip_outside_window(tiles: Tiles, sinks: int, recent: int) -> Tensor:
    """StreamingLLM, by key: keeps the first ``sinks`` tokens and the ``recent`` latest tokens."""
    far = tiles.offsets(1, 1) >= recent
    far[:, :sinks] = False
    return far


def skip_by_mean_keys(tiles: Tiles, size: int, count: int) -> Tensor:
    """MoBA, and the selection of NSA with mean pooling instead of its MLP, by row: keeps the own block and
    the blocks with the largest product of q and mean k."""
    scores = tiles.head.pooled(tiles.rows, 1, size)
    own = tiles.offsets(1, size)
    scores = scores.masked_fill(own < 0, -math.inf).masked_fill((own >= 0) & (own < size), math.inf)
    return ~keep_top(scores, count)


def skip_by_page_bound(tiles: Tiles, page: int, tokens: int) -> Tensor:
    """Quest, by row, as in decoding: keeps the pages with the largest upper bounds on their scores."""
    head, rows, last = tiles.head, tiles.rows, tiles.last
    up, down = head.queries[rows].clamp(min=0), head.queries[rows].clamp(max=0)
    pages = head.keys[:last].unflatten(0, (-1, page))
    bound = up @ pages.amax(1).T + down @ pages.amin(1).T
    own_keys = head.keys[rows].unflatten(0, (-1, page))
    upper, lower = (run(own_keys, 1).values.flatten(0, 1) for run in (torch.cummax, torch.cummin))
    own_bound = (up * upper + down * lower).sum(1, keepdim=True)
    own = tiles.offsets(1, page)
    bound = torch.where((own >= 0) & (own < page), own_bound, bound).masked_fill(own < 0, -math.inf)
    return ~keep_top(bound, max(3, tokens // page))


def skip_at_random(tiles: Tiles, share: float) -> Tensor:
    """Skips a random fraction of the tiles; the diagonal and the first tile are kept."""
    generator = torch.Generator().manual_seed(tiles.first)
    own = tiles.offsets(BLOCK, BLOCK)
    skipped = (torch.rand(own.shape, generator=generator) < share).to(own.device) & (own != 0)
    skipped[:, 0] = False
    return skipped


FSA = "flash-sparse-attention 2.0.6, ops/triton/"
RULES = (
    Rule("ACP", "acp_repro/attention/boundary.py", skip_by_certificate, certified=True),
    *(
        Rule(
            f"certified, {name}",
            FSA + "activations.py, threshold epsilon",
            partial(skip_by_running_sum, threshold=epsilon),
            certified=True,
        )
        for name, epsilon in (("e-10", math.exp(-10)), ("1e-3", 1e-3), ("1e-2", 1e-2))
    ),
    Rule(
        "oracle, 1e-2",
        "acp_repro/explorer/blocks.py",
        lambda tiles: known_afterwards(tiles.blocks(tiles.mass), 1e-2),
        certified=True,
    ),
    Rule("FSA forward, threshold 1", FSA + "activations.py", partial(skip_by_running_sum, threshold=1.0)),
    Rule("FSA backward, threshold 1", FSA + "flash_sparse_bwd.py", partial(skip_by_final_sum, threshold=1.0)),
    Rule("FSA gate test on decay", FSA + "flash_gated_fwd.py", skip_by_gate),
    Rule(
        "BLASST 1000",
        "TensorRT-LLM, fmha/warpspec/epilogue.h",
        lambda tiles: skip_by_maximum(tiles, 1000 / len(tiles.head.k)),
    ),
    Rule(
        "BLASST 1000, diagonal first",
        "the same test in reverse order",
        lambda tiles: skip_by_maximum(tiles, 1000 / len(tiles.head.k), leftwards=True),
    ),
    Rule(
        "Model-Optimizer forward, 1e-3",
        "Model-Optimizer a2fbac7, methods/flash_skip_softmax.py",
        partial(skip_by_maximum, threshold=1e-3, rows=SPAN, keys=SPAN),
        SPAN,
        SPAN,
    ),
    Rule(
        "Model-Optimizer backward, 1e-3",
        "Model-Optimizer a2fbac7, kernels/common/attention/triton_fa.py",
        partial(skip_rows_in_backward, threshold=1e-3),
        rows=1,
    ),
    Rule(
        "SpargeAttn, top-k 0.5",
        "SpargeAttn bfd980b, spas_sage_attn/utils.py",
        partial(skip_unlike_means, similarity=-0.1, mass=None, share=0.5),
        rows=SPAN,
    ),
    Rule(
        "SpargeAttn, 0.6, CDF 0.98",
        "SpargeAttn bfd980b, spas_sage_attn/utils.py",
        partial(skip_unlike_means, similarity=0.6, mass=0.98),
        rows=SPAN,
    ),
    Rule(
        "XAttention, stride 16, 0.9",
        "x-attention e379887, xattn/src/Xattention.py",
        partial(skip_by_antidiagonals, stride=16, mass=0.9),
        SPAN,
        SPAN,
    ),
    Rule(
        "FlexPrefill, 0.9, 0.1, 512",
        "FlexPrefill a24b27b, ops/flex_prefill_attention.py",
        partial(
            skip_by_mask,
            choose=choose_columns_and_diagonals,
            rows=SPAN,
            keys=SPAN,
            gamma=0.9,
            tau=0.1,
            least=512,
        ),
        SPAN,
        SPAN,
    ),
    *(
        Rule(
            f"MInference, {columns}, {diagonals}",
            "MInference fb56c91, minference/modules/minference_forward.py",
            partial(
                skip_by_mask, choose=choose_lines, rows=BLOCK, keys=1, columns=columns, diagonals=diagonals
            ),
            keys=1,
        )
        for columns, diagonals in ((100, 800), (3500, 100))
    ),
    *(
        Rule(name, source, partial(skip_outside_window, sinks=sinks, recent=recent), 1, 1)
        for name, source, sinks, recent in (
            ("StreamingLLM, 4, 512", "streaming-llm 2e50426, kv_cache.py", 4, 512),
            ("StreamingLLM, 4, 2000", "streaming-llm 2e50426, kv_cache.py", 4, 2000),
            ("DuoAttention streaming, 64, 256", "duo-attention fe93c31", 64, 256),
        )
    ),
    Rule(
        "MoBA, 512, top 3",
        "MoBA 61e456b, moba/moba_naive.py",
        partial(skip_by_mean_keys, size=512, count=3),
        1,
        512,
    ),
    Rule(
        "NSA selection, 64, top 16",
        "native-sparse-attention bd67af5, ops/naive.py",
        partial(skip_by_mean_keys, size=64, count=16),
        rows=1,
    ),
    Rule(
        "Quest, pages of 16, 1024",
        "Quest 01c1623, evaluation/quest_attention.py",
        partial(skip_by_page_bound, page=16, tokens=1024),
        1,
        16,
    ),
    Rule("top 16 blocks", "all weights", lambda tiles: ~keep_top(tiles.blocks(tiles.mass).sum(1), 16)),
    Rule("random half", "the diagonal and the first block are kept", partial(skip_at_random, share=0.5)),
)
NOT_COMPUTABLE = {
    "SeerAttention": "its gate is distilled per model and head (SeerAttention aba03e3, attn_gate.py)",
    "flash-sparse-attention, gated": "its gates are learned per token (flash_gated_fwd.py)",
    "DuoAttention's choice of heads": "which heads stream is learned (duo-attention fe93c31)",
    "NSA's compressed branch and gates": "they need an MLP and gates that are trained with the model",
}
