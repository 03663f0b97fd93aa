"""The backends of forgetting attention in one table: where each runs, its grid, its two passes, its decoding.

A new backend is a class here and an entry in :data:`BACKENDS`. Calls, the custom operator, decoding, caches
and benchmarks read that table; error messages list its names. :class:`.checks.AttentionCall` has the shapes.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import os
import warnings
from types import ModuleType

import torch
from torch import Tensor

from . import blockwise, reference
from .boundary import find_boundary
from .checks import AttentionCall
from .decay import cumulative_log_fgate, log_fgate_grad
from .kvcache import PagedKVCache
from .threshold import check_floor

# Found once, at import: a traced function may not look for packages.
HAS_TRITON = importlib.util.find_spec("triton") is not None
NEEDS_TRITON = (
    "implementation='triton' needs triton: `pip install triton`, or take implementation='blockwise'"
)


@functools.cache
def kernels() -> ModuleType:
    """The package of Triton kernels, imported on first use because the other backends do not need Triton."""
    return importlib.import_module(".triton", __package__)


class Backend:
    """The parts of an implementation; one without a kernel for a part inherits it from here.

    Attributes:
        dtypes: allowed dtypes of q, k and v.
        least_clamped: c clamps log gates from here to the floor, and is exact for those below.
        by_autograd: whether PyTorch differentiates ``forward``, to any order and in any mode. Such a backend
            has no ``backward`` and is not an operator.
    """

    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)
    least_clamped = -math.inf
    by_autograd = False

    def supports(self, device: torch.device) -> bool:
        """Whether ``implementation="auto"`` may choose it on ``device``, for calls of any shape."""
        return False

    def check(self, device: torch.device) -> None:
        """Raises ImportError or ValueError, in one line, if it cannot run on ``device``."""

    def block_sizes(self, head_dim: int, dtype: torch.dtype) -> tuple[int, int]:
        """(block_q, block_k), the grid that it prunes on, in tokens."""
        return 64, 64  # docs/lab-notebook/attention-kernels.md compares sizes

    def grid(self, call: AttentionCall) -> tuple[int, int]:
        """:meth:`block_sizes` of a call."""
        return self.block_sizes(call.q.shape[3], call.q.dtype)

    def saved_shape(self, q: Tensor) -> tuple[int, ...]:
        """The shape of the float32 tensor that ``forward`` saves for ``backward``; by default (B, H, Tq)."""
        return q.shape[:3]

    def forward(
        self, call: AttentionCall, for_backward: bool = True
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        """Equation 3 at block level.

        Returns:
            out (B, H, Tq, D) like q; the saved tensor, float32, of :meth:`saved_shape`; c (B, H, Tk) float64;
            boundary (B, H, M) int32. Without ``for_backward`` the second and third may be None.
        """
        raise NotImplementedError

    def backward(
        self, dout, call: AttentionCall, out, saved, c, boundary
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients of out with respect to q, k, v and log_fgate, in the shapes and dtypes of these."""
        raise NotImplementedError

    def attend(self, call: AttentionCall, c, boundary) -> tuple[Tensor, Tensor]:
        """The first two results of :meth:`forward` where c and the boundary are given."""
        raise NotImplementedError

    def partial_gradients(
        self, dout, call: AttentionCall, out, saved, c, boundary
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """:meth:`backward`, with dk and dv (B, Hkv, Tk, D) in float32 because they are parts of sums."""
        raise NotImplementedError

    def write(self, cache: PagedKVCache, k: Tensor, v: Tensor, log_fgate: Tensor) -> None:
        """:meth:`PagedKVCache.write`."""
        cache.write(k, v, log_fgate)

    def decode(self, q, cache: PagedKVCache, start_block, threshold, seq_start, sm_scale, window_size):
        """Output (B, H, T, D) of the newest T tokens; ``start_block`` is first moved forward, in place."""
        cache.advance(start_block, threshold, q.shape[2], seq_start, window_size)
        return blockwise.decode(q, cache, start_block, seq_start, sm_scale, window_size)

    def search(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """The first stage of a call: c (B, H, Tk) float64, and n_m (B, H, M) int32 of each query block."""
        c, seqlen_q = cumulative_log_fgate(call.log_fgate.detach()), call.q.shape[2]
        block_q, block_k = self.grid(call)
        if call.threshold is None and call.seq_start is None and call.window_size is None:
            return c, c.new_zeros((*c.shape[:2], -(-seqlen_q // block_q)), dtype=torch.int32)
        options = (call.seq_start, call.window_size)
        return c, find_boundary(c, call.threshold, seqlen_q, block_q, block_k, *options)


class Reference(Backend):
    """The equations, dense, on the grid that `blockwise` prunes on."""

    dtypes = (*Backend.dtypes, torch.float64)
    by_autograd = True

    def forward(self, call, for_backward=True):
        q, k, v, log_fgate, threshold, seq_start, sm_scale, _, window_size = call
        c, start_index = self.search(call)
        kept = None
        if threshold is not None:
            kept = reference.kept_entries(start_index, q.shape[2], k.shape[2], *self.grid(call))
        out, lse = reference.forgetting_attention(
            q, k, v, log_fgate, seq_start=seq_start, sm_scale=sm_scale, kept=kept, window_size=window_size
        )
        return out, lse, c, start_index

    def decode(self, q, cache, start_block, threshold, seq_start, sm_scale, window_size):
        cache.advance(start_block, threshold, q.shape[2], seq_start, window_size)
        return reference.decode(q, cache, start_block, seq_start, sm_scale, window_size)


class Blockwise(Backend):
    """PyTorch that skips blocks; the default on a CPU."""

    least_clamped = -torch.finfo(torch.float32).max  # gates of 0 are exact

    def supports(self, device):
        return True

    def saved_shape(self, q):
        return (0,)

    def forward(self, call, for_backward=True):
        check_floor(call, self.least_clamped)
        c, start_index = self.search(call)
        return *self.attend(call, c, start_index), c, start_index

    def attend(self, call, c, boundary):
        out = blockwise.forward(call, c, boundary, *self.grid(call))
        # The backward pass computes its softmax again, which costs less here than keeping row sums.
        return out, c.new_empty(0, dtype=torch.float32)

    def backward(self, dout, call, out, saved, c, boundary):
        dq, dk, dv, dc = blockwise.backward(dout, call, c, boundary, *self.grid(call))
        return dq, dk, dv, log_fgate_grad(dc, call.log_fgate)

    def partial_gradients(self, dout, call, out, saved, c, boundary):
        wide = call._replace(q=call.q.float(), k=call.k.float(), v=call.v.float())
        return self.backward(dout.float(), wide, out, saved, c, boundary)


class Triton(Backend):
    """Kernels for any GPU that Triton supports. For tests they also run in Triton's interpreter on a CPU."""

    portable = False  # whether the kernels that are written for one GPU architecture are excluded

    def supports(self, device):
        return HAS_TRITON and device.type == "cuda"

    def check(self, device):
        if not HAS_TRITON:
            raise ImportError(NEEDS_TRITON)
        if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(
                "implementation='triton' needs tensors on a GPU (or TRITON_INTERPRET=1 in the "
                "environment, a slow interpreter for tests); on a CPU take implementation='blockwise'"
            )

    def block_sizes(self, head_dim, dtype):
        return kernels().block_sizes(head_dim, dtype)

    def forward(self, call, for_backward=True):
        q, k, v, log_fgate, threshold, seq_start, sm_scale, _, window_size = call
        check_floor(call, self.least_clamped)
        tensor, number = (None, threshold) if isinstance(threshold, float) else (threshold, None)
        constants = (sm_scale, self.grid(call), window_size, self.portable, for_backward, number)
        return kernels().forward_pass(q, k, v, log_fgate, tensor, seq_start, constants)

    def backward(self, dout, call, out, saved, c, boundary):
        q, k, v, log_fgate, _, seq_start, sm_scale, _, window_size = call
        constants = (sm_scale, self.grid(call), window_size, self.portable)
        tensors = (dout, q, k, v, log_fgate, out, saved, c, boundary, seq_start)
        return kernels().backward_pass(*tensors, constants)

    def attend(self, call, c, boundary):
        options = (call.seq_start, call.sm_scale, *self.grid(call), call.window_size)
        return kernels().forward(call.q, call.k, call.v, c, boundary, *options, portable=self.portable)

    def partial_gradients(self, dout, call, out, saved, c, boundary):
        options = (call.seq_start, call.sm_scale, *self.grid(call), call.window_size)
        tensors = (dout, call.q, call.k, call.v, out, saved, c, boundary)
        dq, dk, dv, dc = kernels().backward(*tensors, *options, portable=self.portable, shares=True)
        dk, dv = (x.unflatten(1, (call.k.shape[1], -1)).sum(2) for x in (dk, dv))
        return dq, dk, dv, kernels().log_fgate_grad(dc, call.log_fgate)

    def write(self, cache, k, v, log_fgate):
        # Compiled code has kernels of its own, and cannot trace ours.
        if torch.compiler.is_compiling():
            cache.write(k, v, log_fgate)
        else:
            kernels().write_kvcache(cache, k, v, log_fgate)

    def decode(self, q, cache, start_block, threshold, seq_start, sm_scale, window_size):
        return kernels().decode(q, cache, start_block, threshold, seq_start, sm_scale, window_size)

    def search(self, call):
        c = kernels().cumulative_log_fgate(call.log_fgate)
        options = (*self.grid(call), call.seq_start, call.window_size)
        return c, kernels().find_boundary(c, call.threshold, call.q.shape[2], *options)


class TritonPortable(Triton):
    """:class:`Triton` without the kernels that are written for one GPU architecture."""

    portable = True


# Keys are the names that ``implementation`` accepts. The last one that supports a device is its fastest.
BACKENDS: dict[str, Backend] = {
    "reference": Reference(),
    "blockwise": Blockwise(),
    "triton-portable": TritonPortable(),
    "triton": Triton(),
}


def choose_implementation(device: torch.device) -> str:
    """The name that ``implementation="auto"`` stands for: triton on a GPU, blockwise elsewhere."""
    chosen = [name for name, backend in BACKENDS.items() if backend.supports(device)][-1]
    if device.type == "cuda" and chosen == "blockwise":
        warnings.warn(
            "triton is not installed, so forgetting_attention runs the slow blockwise path on the "
            "GPU; `pip install triton` brings the kernels",
            stacklevel=3,
        )
    return chosen


def find_backend(implementation: str) -> Backend:
    """The backend of that name.

    Raises:
        ValueError: no backend has that name; the message lists the names. ``"auto"`` is none of them:
            :func:`choose_implementation` gives the name that it stands for.
    """
    if implementation not in BACKENDS:
        raise ValueError(
            f"implementation must be one of {[*BACKENDS]}, or 'auto' in a call with tensors "
            f"(choose_implementation(device) returns the name that 'auto' selects), got {implementation!r}"
        )
    return BACKENDS[implementation]
