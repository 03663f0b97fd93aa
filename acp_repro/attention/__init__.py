"""Forgetting attention with adaptive computation pruning (Sections 2 and 3): one call.

    from acp_repro.attention import forgetting_attention

`reference` computes the equations as written. `blockwise` skips blocks on a CPU, `triton` on a GPU. All
implementations share one signature, one threshold and one boundary, and none imports another. `backends`
lists the implementations.
"""

import functools
import math
from typing import Any, Literal, overload

import torch
from torch import Tensor

from .backends import HAS_TRITON, NEEDS_TRITON, Backend, choose_implementation, find_backend, kernels
from .boundary import (
    attention_bytes,
    attention_flops,
    causal_blocks,
    count_blocks,
    find_boundary,
    find_boundary_serial,
    token_level_pruned_ratio,
)
from .checks import (
    AttentionCall,
    check_arguments,
    check_packing,
    check_scale,
    check_values,
    check_window,
    reads_values,
)
from .context_parallel import attend_shards, bound_over_ranks, check_shards
from .decay import MOST_BETWEEN_DOCUMENTS, cumulative_log_fgate, document_starts, documents_threshold
from .decoding import check_decode_arguments, check_new_tokens, decode_op, run_decode
from .dtensor import register_dtensor_sharding
from .exchange import find_group, gather_sequence, shard_positions, shard_sequence
from .flex import as_flex
from .kvcache import PagedKVCache
from .op import attend, infer, launches_alone, register_flop_formulas, threshold_from_norms
from .reference import attention_scores, decay_bias, kept_entries, pruned_mass
from .threshold import (
    Tolerance,
    choose_pruning,
    find_threshold,
    logit_bound_from_norms,
    logit_bound_from_qk_norm,
    pruning_threshold,
    resolve_threshold,
)

__all__ = [
    "PagedKVCache",
    "as_flex",
    "attention_bytes",
    "attention_flops",
    "attention_scores",
    "causal_blocks",
    "choose_implementation",
    "count_blocks",
    "cumulative_log_fgate",
    "decay_bias",
    "explain_dispatch",
    "find_boundary",
    "find_boundary_serial",
    "forgetting_attention",
    "forgetting_attention_with_kvcache",
    "gather_sequence",
    "kept_entries",
    "logit_bound_from_norms",
    "logit_bound_from_qk_norm",
    "pruned_mass",
    "pruned_ratio",
    "pruning_grid",
    "pruning_threshold",
    "register_dtensor_sharding",
    "register_flop_formulas",
    "shard_sequence",
    "token_level_pruned_ratio",
]


def explain_dispatch(
    q: Tensor, k: Tensor, v: Tensor, *, head_first: bool = False, window_size: int | None = None
) -> str | None:
    """The reason why :func:`forgetting_attention` does not dispatch these inputs to the fastest kernels.

    Args:
        q, k, v, head_first, window_size: as in :func:`forgetting_attention`.

    Returns:
        One line, or None if the call runs on the fastest kernels.
    """
    if q.device.type != "cuda":
        return f"q is on {q.device}, where `blockwise` runs; the kernels want a GPU"
    if not HAS_TRITON:
        return NEEDS_TRITON
    if not head_first:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grid = pruning_grid("triton", q.shape[-1], q.dtype)
    return kernels().why_portable(q, k, v, *grid, window_size=_effective_window(window_size, k.shape[2]))


def pruning_grid(implementation: str, head_dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """The block sizes of the grid that ``implementation`` prunes on.

    Args:
        implementation: ``"reference"``, ``"blockwise"``, ``"triton"`` or ``"triton-portable"``. The reference
            uses the grid of blockwise.
        head_dim: size of one head.
        dtype: dtype of q, k and v.

    Returns:
        (block_q, block_k), in tokens.

    Raises:
        ValueError: ``implementation`` is another name. ``"auto"`` has no grid of its own, because it depends
            on the device: :func:`choose_implementation` returns the implementation of a device.
    """
    return find_backend(implementation).block_sizes(head_dim, dtype)


def pruned_ratio(
    start_index: Tensor, q: Tensor, k: Tensor, *, head_first: bool = False, implementation: str = "auto"
) -> Tensor:
    """The ratio of pruned blocks to causal blocks of each head, the saving that the paper's Figure 2 reports.

    A causal block contains at least one entry on or below the diagonal. Every causal block that
    :func:`forgetting_attention` skips counts as pruned, also if a window, padding or a document boundary is
    the reason. To measure what the threshold adds, subtract the ratio of a call without a threshold.

    Args:
        start_index: (batch, heads, query blocks) int32, which :func:`forgetting_attention` returns with
            ``return_start_index=True``.
        q, k, head_first, implementation: the arguments of that call. Only the shapes, the dtype and the
            device of q and k are used.

    Returns:
        (batch, heads) float64, from 0 to 1, on the device of ``start_index``.

    Raises:
        ValueError: the number of query blocks does not match q, so ``head_first`` or ``implementation``
            differs from that call.
    """
    name = choose_implementation(q.device) if implementation == "auto" else implementation
    grid = pruning_grid(name, q.shape[-1], q.dtype)
    seqlen_q, seqlen_k = (x.shape[2 if head_first else 1] for x in (q, k))
    blocks = -(-seqlen_q // grid[0])
    if start_index.shape[-1] != blocks:
        raise ValueError(
            f"start_index must have {blocks} query blocks for {seqlen_q} queries (head_first={head_first}, "
            f"implementation={name!r}), got shape {tuple(start_index.shape)}; pass the arguments of the call "
            "that returned start_index"
        )
    return count_blocks(start_index, seqlen_q, seqlen_k, *grid).pruned_ratio


@overload
def forgetting_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_fgate: Tensor,
    *,
    head_first: bool = False,
    seq_start: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    window_size: int | None = None,
    sm_scale: float | None = None,
    adaptive_threshold: None | float | str | Tensor = None,
    log_pruning_tolerance: float | None = None,
    logit_bound: None | float | Tensor = None,
    return_start_index: Literal[False] = False,
    implementation: str = "auto",
    context_parallel: Any = None,
) -> Tensor: ...
@overload
def forgetting_attention(
    q: Tensor, k: Tensor, v: Tensor, log_fgate: Tensor, *, return_start_index: Literal[True], **options: Any
) -> tuple[Tensor, Tensor]: ...
def forgetting_attention(  # pyright: ignore[reportInconsistentOverload]  # options: those above
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_fgate: Tensor,
    *,
    head_first: bool = False,
    seq_start: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    window_size: int | None = None,
    sm_scale: float | None = None,
    adaptive_threshold: None | float | str | Tensor = None,
    log_pruning_tolerance: float | None = None,
    logit_bound: None | float | Tensor = None,
    return_start_index: bool = False,
    implementation: str = "auto",
    context_parallel: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``softmax(Q K^T sm_scale + D) V`` with ``D_ij = sum_{l=j+1}^{i} log f_l``, causal (Equation 2).

    ``log_pruning_tolerance`` or ``adaptive_threshold`` sets a threshold delta. The forward and the backward
    pass then skip every block of scores whose decay is entirely below delta (Equation 3 at block level).

    Args:
        q: (batch, seqlen_q, heads, head_dim), or (batch, heads, seqlen_q, head_dim) with ``head_first``.
            bfloat16, float16 or float32; float64 in the reference. Any strides.
        k, v: the same with seqlen_k >= seqlen_q; the queries are the last seqlen_q positions. k and v may
            have fewer heads, by a whole factor: query head h reads head ``h // factor`` (grouped-query
            attention).
        log_fgate: (batch, seqlen_k, heads), or (batch, heads, seqlen_k) with ``head_first``; one gate for
            each query head. float32, at most 0: ``logsigmoid(fgate_logit.float())``. Minus infinity, a gate
            of 0, is allowed. The kernels clamp log gates to -10,000, and blockwise clamps finite ones. The
            result is exact up to ``2 max||q|| max||k|| sm_scale = 9,900`` if a gate is clamped.
        seq_start: (batch,) int64, the first real token of left-padded sequences. Padded keys receive no
            attention, and the output of padded queries is 0. Padding may contain any value, including NaN.
        cu_seqlens: (documents + 1,) int32 or int64, for documents of any lengths packed one after the other
            into a batch of one. Document n has positions ``cu_seqlens[n] .. cu_seqlens[n + 1]``, so the first
            entry is 0, the last is the length, and the entries never decrease. Documents do not attend to
            each other, and blocks across documents are skipped. The gate at each document's first token is
            replaced by 0 and has a gradient of 0. The result is exact if ``2 max||q|| max||k|| sm_scale`` is
            at most 4,900.
        window_size: the number of keys W that each query sees at most: its own and the W - 1 before it, as in
            flash-linear-attention. FlashAttention's ``window_size=(left, 0)`` is W = left + 1. Blocks wholly
            before the window are skipped. If there is also a threshold, the later boundary applies.
        sm_scale: default ``1 / sqrt(head_dim)``.
        adaptive_threshold: delta, at most 0: a number, or a tensor broadcastable to (batch, heads). The
            default None selects exact attention. ``"auto"`` means ``log_pruning_tolerance=-10.0``.
        log_pruning_tolerance: log epsilon, negative, instead of ``adaptive_threshold``. The pruned weights of
            a query then sum to less than epsilon: delta is :func:`pruning_threshold`, where L is the length
            of k, or of the longest document of ``cu_seqlens``.
        logit_bound: U for ``log_pruning_tolerance``, at least ``|q.k| sm_scale`` for every query and key: a
            number, or a tensor broadcastable to (batch, heads). None computes :func:`logit_bound_from_norms`.
            :func:`logit_bound_from_qk_norm` returns U for models with QK-norm.
        return_start_index: also return the first visited key block of every query block, which depends on
            the threshold, the window and the padding.
        implementation: ``"auto"``, ``"reference"``, ``"blockwise"``, ``"triton"`` or ``"triton-portable"``.
            ``"triton-portable"`` excludes kernels for a single GPU architecture, as does the environment
            variable ``ACP_REPRO_PORTABLE=1``.
        context_parallel: the ``torch.distributed.ProcessGroup``, or ``DeviceMesh`` of one dimension, whose
            ranks share the sequence. q, k, v and log_fgate are then the shards of :func:`shard_sequence`; out
            and the start index are shards as well. All other arguments describe the whole sequence and must
            be the same on every rank; ``seq_start`` and ``cu_seqlens`` count its tokens. Each shard must be
            two chunks of whole blocks of :func:`pruning_grid`. A rank that fails ends the call on every rank
            once its process has ended.

    Returns:
        out, shaped and typed like q. ``return_start_index`` adds an int32 tensor (batch, heads, query
        blocks), in key blocks of the grid :func:`pruning_grid`.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it and what is right. Values (gates
            above 0, NaN, scores beyond a limit) are checked on the CPU. On a GPU the check would wait for the
            stream, so it runs only under ``torch.autograd.set_detect_anomaly(True)``.
        NotImplementedError: a forward-mode derivative, such as ``torch.func.jvp``, or a second derivative.
            ``implementation="reference"`` supports both. All implementations support ``torch.func.grad``,
            ``vjp``, ``jacrev`` and ``vmap``.
    """
    pruning = choose_pruning(adaptive_threshold, log_pruning_tolerance, logit_bound)
    options = (head_first, window_size, sm_scale, pruning, return_start_index)
    if (
        launches_alone((q, k, v, log_fgate))
        and (seq_start is None and cu_seqlens is None and context_parallel is None)
        and _PLAIN.issuperset(map(type, options))
        and (implementation == "triton" or (implementation == "auto" and HAS_TRITON and q.is_cuda))
    ):
        found = _kept_ready()(q, k, v, log_fgate, (implementation, options, *map(type, options)))
    else:
        group = None if context_parallel is None else find_group(context_parallel)
        found = _attend(q, k, v, log_fgate, implementation, options, seq_start, cu_seqlens, group)
    return found if return_start_index else found[0]


_PLAIN = {bool, int, float, type(None)}  # whose values, with their types, tell all about an option


@functools.cache
def _kept_ready():
    """:func:`_attend` in inference. What it has checked and launched once is only launched again."""
    return kernels().repeat_launches(lambda *call: _attend(*call[:4], *call[4][:2], launched_alone=True))


def _attend(
    q,
    k,
    v,
    log_fgate,
    implementation,
    options,
    seq_start=None,
    cu_seqlens=None,
    group=None,
    launched_alone=False,
) -> tuple[Any, Any]:
    """:func:`forgetting_attention`; with ``launched_alone`` no operator of ours is called."""
    head_first, window_size, sm_scale, pruning, return_start_index = options
    dtypes = (Backend if implementation == "auto" else find_backend(implementation)).dtypes
    check_arguments(q, k, v, log_fgate, head_first=head_first, seq_start=seq_start, dtypes=dtypes)
    if implementation == "auto":
        implementation = choose_implementation(q.device)
    find_backend(implementation).check(q.device)
    if not head_first:
        q, k, v, log_fgate = (x.transpose(1, 2) for x in (q, k, v, log_fgate))
    sm_scale = check_scale(sm_scale, q.shape[-1])
    length, find_bound = k.shape[2], logit_bound_from_norms
    if group is not None:
        check_shards(q, k, implementation)
        length *= group.size()
        find_bound = functools.partial(bound_over_ranks, group=group)
    window_size = _effective_window(window_size, length)
    if cu_seqlens is not None:
        check_packing(cu_seqlens, q, k, seq_start, length)
        if reads_values(q) and q.numel():
            spread = 2 * find_bound(q, k, sm_scale)
            check_values("2 max||q|| max||k|| sm_scale with cu_seqlens", spread, 0, MOST_BETWEEN_DOCUMENTS)
    padded_q = None
    if seq_start is not None:
        seq_start = seq_start.contiguous()
        # Memory of padding may hold anything, and in a product 0 times NaN is NaN.
        padding = shard_positions(k.shape[2], group, k.device) < seq_start[:, None, None]
        padded_q = padding[..., k.shape[2] - q.shape[2] :, None]
        q = q.masked_fill(padded_q, 0.0)
        k, v = (x.masked_fill(padding[..., None], 0.0) for x in (k, v))
        log_fgate = log_fgate.masked_fill(padding, 0.0)
    device = None if launched_alone else q.device
    threshold = _resolve_threshold(pruning, q, k, length, sm_scale, device, group)
    if cu_seqlens is not None:
        if isinstance(pruning, Tolerance) and threshold is not None:
            threshold = threshold + _longest_document_gain(cu_seqlens, length)
            # The sum must not be rounded up either, or the pruned mass could exceed epsilon by its last bit.
            threshold = torch.nextafter(threshold, torch.full_like(threshold, -math.inf))
        starts = document_starts(cu_seqlens, length)[shard_positions(k.shape[2], group, k.device)]
        log_fgate = log_fgate.masked_fill(starts, float("-inf"))
        threshold = documents_threshold(threshold, log_fgate)

    if q.numel() == 0:
        # There are no queries. Every input stays in the graph, with gradients of zero.
        out = q + (k.sum() + v.sum() + log_fgate.sum()).to(q.dtype) * 0
        start_index = torch.zeros((*q.shape[:2], 0), dtype=torch.int32, device=q.device)
    else:
        call = AttentionCall(q, k, v, log_fgate, threshold, seq_start, sm_scale, implementation, window_size)
        if group is not None:
            out, start_index = attend_shards(call, group)
        else:
            out, start_index = (infer if launched_alone else attend)(call)
    if padded_q is not None:
        out = out.masked_fill(padded_q, 0.0)  # it is 0; its gradient may be anything
    out = out if head_first else out.transpose(1, 2)
    return out, start_index if return_start_index else None


def forgetting_attention_with_kvcache(
    q: Tensor,
    cache: PagedKVCache,
    start_block: Tensor | None = None,
    *,
    k: Tensor | None = None,
    v: Tensor | None = None,
    log_fgate: Tensor | None = None,
    head_first: bool = False,
    seq_start: Tensor | None = None,
    window_size: int | None = None,
    sm_scale: float | None = None,
    adaptive_threshold: None | float | Tensor = None,
    log_pruning_tolerance: float | None = None,
    logit_bound: None | float | Tensor = None,
    implementation: str = "auto",
) -> Tensor:
    """Forgetting attention of the newest tokens over a cache, to which k, v and log_fgate are appended first.

    Each head reads only its blocks from ``start_block`` on (Appendix F). If there is a threshold,
    ``start_block`` first advances, in place and on the device. Block l is dropped when ``D`` from the oldest
    query to the block's last key is below delta. ``start_block`` never decreases, so later calls must not
    lower the threshold. If a call lowers it, reset ``start_block`` to 0 (or to the first block kept).
    On a GPU the host never waits, and the launches depend on shapes alone, so CUDA graphs can capture calls.

    Args:
        q: (batch, seqlen_q, heads, head_dim), or (batch, heads, seqlen_q, head_dim) with ``head_first``: the
            last seqlen_q tokens of each row. heads is a multiple of the cache's heads (grouped-query
            attention). The query heads that share keys, times seqlen_q, are at most 64.
        cache: keys, values and decays, see :class:`PagedKVCache`. A row may contain fewer than seqlen_q
            tokens, or none: the output of queries without a token is 0.
        start_block: (batch, heads) int32, changed in place; by default ``cache.start_block``.
        k, v: (batch, seqlen_q, kv_heads, head_dim) in the dtype of q. log_fgate: (batch, seqlen_q, heads)
            float32. ``head_first`` swaps time and heads. The tensors are the keys, values and log gates of
            the query tokens. The call adds seqlen_q to ``cache.seqlens`` of every row and writes the
            tokens to the blocks of ``cache.block_table``. If the tensors are omitted, the cache must already
            contain the query tokens.
        seq_start, window_size, sm_scale, implementation: as in :func:`forgetting_attention`. ``start_block``
            advances past the blocks that are entirely before the window of the oldest query.
        adaptive_threshold: delta, at most 0: a number or a tensor broadcastable to (batch, heads). If None,
            ``start_block`` does not advance by decay.
        log_pruning_tolerance, logit_bound: as in :func:`forgetting_attention`, but ``logit_bound`` is
            required, because the norms of later keys are unknown. L is ``cache.capacity``.

    Returns:
        out, shaped and typed like q, without gradients; 0 for queries before ``seq_start``.

    Raises:
        TypeError, ValueError: as :func:`forgetting_attention` does. Tokens are appended only if the shapes,
            dtypes and gates are right and the cache has room.
    """
    pruning = choose_pruning(adaptive_threshold, log_pruning_tolerance, logit_bound)
    starts: Any = cache.start_block if start_block is None else start_block
    q = (q if head_first else q.transpose(1, 2)).resolve_neg()
    check_decode_arguments(q, cache, starts, seq_start)
    sm_scale, window_size = check_scale(sm_scale, q.shape[-1]), check_window(window_size)
    if implementation == "auto":
        implementation = choose_implementation(q.device)
    backend = find_backend(implementation)
    backend.check(q.device)
    threshold = _resolve_threshold(pruning, q, None, cache.capacity, sm_scale, q.device)
    new = [x if head_first else x.transpose(1, 2) for x in (k, v, log_fgate) if x is not None]
    if new:
        check_new_tokens(q, cache, k, v, log_fgate, head_first)
    if not q.numel():
        out = torch.empty_like(q)
    else:
        # Compiled code needs an operator, because the work depends on numbers that it cannot know. Subclasses
        # of Tensor, such as DTensor, see operators alone.
        run = decode_op if torch.compiler.is_compiling() or type(q) is not Tensor else run_decode
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            if new:
                cache.seqlens.add_(q.shape[2])
                backend.write(cache, *new)
            options = (threshold, seq_start, sm_scale, implementation, window_size)
            out = run(q, *cache[:5], starts, *options)
    return out if head_first else out.transpose(1, 2)


def _longest_document_gain(cu_seqlens: Tensor, length: int) -> Tensor:
    """How much delta rises because no row has more keys than the longest document."""
    # Rounded down, so that the proof's inequality holds.
    longest = cu_seqlens.diff().amax().clamp(min=1).double()
    return ((length / longest).log() * (1 - 2**-20)).float()


def _effective_window(window_size: int | None, seqlen_k: int) -> int | None:
    """``window_size``, or None if it holds every key."""
    window_size = check_window(window_size)
    return None if window_size is None or window_size >= seqlen_k else window_size


def _resolve_threshold(pruning, q, k, seqlen: int, sm_scale: float, device, group=None) -> Any:
    """delta as (B, H) float32, or None for exact attention. q is head-first, and so is k.

    Without k a :class:`Tolerance` needs a bound. Without a device a number is returned as a float.
    """
    if not isinstance(pruning, Tolerance):
        return resolve_threshold(pruning, q.shape[:2], seqlen, device)
    if not q.numel():
        return None
    if pruning.logit_bound is not None or k is None:
        return resolve_threshold(pruning, q.shape[:2], seqlen, q.device)
    if group is not None:
        bound = bound_over_ranks(q, k, sm_scale, group)
        return find_threshold(bound, seqlen, pruning.log_pruning_tolerance)
    return threshold_from_norms(q, k, sm_scale, pruning.log_pruning_tolerance)
