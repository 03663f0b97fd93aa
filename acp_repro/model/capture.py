"""The inputs of a model's attention, caught by hooks, so that no kernel is touched."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from acp_repro.attention import choose_implementation, gather_sequence, pruning_grid
from acp_repro.attention.backends import find_backend
from acp_repro.attention.boundary import BlockCount, count_blocks, find_boundary
from acp_repro.attention.checks import AttentionCall
from acp_repro.attention.decay import cumulative_log_fgate, cut_documents, documents_threshold

from .fox import FoXForCausalLM
from .layers import ForgettingAttentionCore


@dataclass
class AttentionInputs:
    """The arguments of one call of :class:`ForgettingAttentionCore`.

    If the call has ``cu_seqlens``, log_fgate and threshold are the values that the attention derives from
    them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_fgate: Tensor
    threshold: Tensor | None
    seq_start: Tensor | None = None
    cu_seqlens: Tensor | None = None

    def __post_init__(self) -> None:
        if self.cu_seqlens is not None:
            self.log_fgate = cut_documents(self.log_fgate, self.cu_seqlens)
            self.threshold = documents_threshold(self.threshold, self.log_fgate)

    def grid(self) -> tuple[int, int]:
        """(block_q, block_k), in tokens, on which the implementation of this device prunes."""
        return pruning_grid(choose_implementation(self.q.device), self.q.shape[-1], self.q.dtype)

    def boundary(self, block_q: int, block_k: int, threshold: Tensor | None = None) -> Tensor:
        """(B, H, M) int32: n_m on a grid of these blocks, by default under the call's threshold."""
        threshold = self.threshold if threshold is None else threshold
        if threshold is not None:
            threshold = threshold.expand(self.q.shape[:2])
        c = cumulative_log_fgate(self.log_fgate)
        return find_boundary(c, threshold, self.q.shape[2], block_q, block_k, self.seq_start)

    def count(self, *grid: int) -> BlockCount:
        """Blocks that the call prunes, on a grid of (block_q, block_k), by default that of its device."""
        (block_q, block_k), length = grid or self.grid(), self.q.shape[2]
        return count_blocks(self.boundary(block_q, block_k), length, length, block_q, block_k)

    def search(self) -> Tensor:
        """n_m (B, H, M) int32 by the running sum and search that a call runs here before its kernel."""
        name = choose_implementation(self.q.device)
        threshold = None if self.threshold is None else self.threshold.expand(self.q.shape[:2]).contiguous()
        tensors = (self.q, self.k, self.v, self.log_fgate, threshold, self.seq_start)
        return find_backend(name).search(AttentionCall(*tensors, 1.0, name))[1]


@contextlib.contextmanager
def watch_attention(model: nn.Module, on_layer: Callable[[int, AttentionInputs], None]) -> Iterator[None]:
    """While open, calls ``on_layer(layer, inputs)`` before every attention of ``model``; under context
    parallelism with whole sequences, on every rank."""
    cores = [m for m in model.modules() if isinstance(m, ForgettingAttentionCore)]

    def notify(layer: int, core: Any, arguments: tuple) -> None:
        if core.context_parallel is not None:
            whole = (gather_sequence(x, core.context_parallel, 2) for x in arguments[:4])
            arguments = (*whole, *arguments[4:])
        on_layer(layer, AttentionInputs(*arguments))

    handles = [core.register_forward_pre_hook(functools.partial(notify, i)) for i, core in enumerate(cores)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def attention_inputs(model: FoXForCausalLM, input_ids: Tensor) -> list[AttentionInputs]:
    """The inputs of every layer's attention for one batch (B, T) of token ids, int64, detached."""
    seen: dict[int, AttentionInputs] = {}
    with torch.no_grad(), watch_attention(model, seen.__setitem__):
        model.model(input_ids)
    return [seen[layer] for layer in sorted(seen)]
