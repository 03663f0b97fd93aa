"""The table of backends of forgetting attention: supported devices, pruning grid, both passes and decoding.

A new backend is a class in this module and an entry in :data:`BACKENDS`. Attention calls, the custom
operator, decoding, caches and benchmarks read that table, and error messages list its names.
:class:`.checks.AttentionCall` documents the shapes.
"""

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

# Evaluated once, at import, because a traced function cannot search for packages.
HAS_TRITON = importlib.util.find_spec("triton") is not None
NEEDS_TRITON = (
    "implementation='triton' requires triton: run `pip install triton`, or pass implementation='blockwise'"
)


@functools.cache
def kernels() -> ModuleType:
    """The package of Triton kernels, imported on first use because other backends do not require Triton."""
    return importlib.import_module(".triton", __package__)


class Backend:
    """The interface of an implementation, with defaults for the functions without a kernel of their own.

    Attributes:
        dtypes: allowed dtypes of q, k and v.
        least_clamped: log gates in ``[least_clamped, LOG_FGATE_FLOOR)`` are clamped to the floor; the backend
            is exact for lower ones.
        by_autograd: whether PyTorch differentiates ``forward``, to any order and in any mode. Such a backend
            has no ``backward`` and does not run as an operator.
    """

    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)
    least_clamped = -math.inf
    by_autograd = False

    def supports(self, device: torch.device) -> bool:
        """Whether ``implementation="auto"`` may select this backend on ``device``, for calls of any shape."""
        return False

    def check(self, device: torch.device) -> None:
        """Raises ImportError or ValueError, in one line, if this backend cannot run on ``device``."""

    def block_sizes(self, head_dim: int, dtype: torch.dtype) -> tuple[int, int]:
        """(block_q, block_k), the grid that it prunes on, in tokens."""
        return 64, 64  # docs/lab-notebook/attention-kernels.md compares sizes

    def grid(self, call: AttentionCall) -> tuple[int, int]:
        """:meth:`block_sizes` of a call."""
        return self.block_sizes(call.q.shape[3], call.q.dtype)

    def saved_shape(self, q: Tensor) -> tuple[int, ...]:
        """The shape of the float32 tensor that ``forward`` saves for ``backward``: (B, H, Tq) by default."""
        return q.shape[:3]

    def forward(
        self, call: AttentionCall, for_backward: bool = True
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        """Equation 3 at block level.

        Returns:
            out (B, H, Tq, D) like q; the saved tensor, float32, of :meth:`saved_shape`; c (B, H, Tk) float64;
            boundary (B, H, M) int32. Without ``for_backward``, the saved tensor and c may be None.
        """
        raise NotImplementedError

    def backward(
        self, dout, call: AttentionCall, out, saved, c, boundary
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients of out with respect to q, k, v and log_fgate, in their shapes and dtypes."""
        raise NotImplementedError

    def attend(self, call: AttentionCall, c, boundary, packed) -> tuple[Tensor, Tensor]:
        """The first two results of :meth:`forward` for a given c and boundary and packed keys.

        k and v are (1, 1, N, D), the keys of all batch rows, each row's one after another. packed (B, 2)
        int64 is the row of N at which a batch row's key 0 is or would be, and the first key that is present.
        """
        raise NotImplementedError

    def partial_gradients(
        self, dout, call: AttentionCall, out, saved, c, boundary, packed
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """:meth:`backward` of :meth:`attend`, with dk and dv in float32, because they are partial sums."""
        raise NotImplementedError

    def write(self, cache: PagedKVCache, k: Tensor, v: Tensor, log_fgate: Tensor) -> None:
        """:meth:`PagedKVCache.write`."""
        cache.write(k, v, log_fgate)

    def decode(self, q, cache: PagedKVCache, start_block, threshold, seq_start, sm_scale, window_size):
        """Output (B, H, T, D) of the newest T tokens; first advances ``start_block`` in place."""
        cache.advance(start_block, threshold, q.shape[2], seq_start, window_size)
        return blockwise.decode(q, cache, start_block, seq_start, sm_scale, window_size)

    def search(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """The first stage of a call: c (B, H, Tk) float64 and the boundary n_m (B, H, M) int32."""
        c, seqlen_q = cumulative_log_fgate(call.log_fgate.detach()), call.q.shape[2]
        block_q, block_k = self.grid(call)
        if call.threshold is None and call.seq_start is None and call.window_size is None:
            return c, c.new_zeros((*c.shape[:2], -(-seqlen_q // block_q)), dtype=torch.int32)
        options = (call.seq_start, call.window_size)
        return c, find_boundary(c, call.threshold, seqlen_q, block_q, block_k, *options)


class Reference(Backend):
    """The dense equations, pruned on the grid of `blockwise`."""

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
    """Plain PyTorch that skips pruned blocks; the default on a CPU."""

    least_clamped = -torch.finfo(torch.float32).max  # exact for gates of 0

    def supports(self, device):
        return True

    def saved_shape(self, q):
        return (0,)

    def forward(self, call, for_backward=True):
        check_floor(call, self.least_clamped)
        c, start_index = self.search(call)
        return *self.attend(call, c, start_index), c, start_index

    def attend(self, call, c, boundary, packed=None):
        out = blockwise.forward(call, c, boundary, *self.grid(call), packed)
        # The backward pass computes its softmax again, which costs less here than keeping row sums.
        return out, c.new_empty(0, dtype=torch.float32)

    def backward(self, dout, call, out, saved, c, boundary, packed=None):
        dq, dk, dv, dc = blockwise.backward(dout, call, c, boundary, *self.grid(call), packed)
        return dq, dk, dv, log_fgate_grad(dc, call.log_fgate)

    def partial_gradients(self, dout, call, out, saved, c, boundary, packed):
        wide = call._replace(q=call.q.float(), k=call.k.float(), v=call.v.float())
        return self.backward(dout.float(), wide, out, saved, c, boundary, packed)


class Triton(Backend):
    """Kernels for any GPU that Triton supports; tests also run them in Triton's interpreter on a CPU."""

    portable = False  # whether to exclude kernels for a single GPU architecture

    def supports(self, device):
        return HAS_TRITON and device.type == "cuda"

    def check(self, device):
        if not HAS_TRITON:
            raise ImportError(NEEDS_TRITON)
        if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(
                "implementation='triton' requires tensors on a GPU (or TRITON_INTERPRET=1 in the "
                "environment, a slow interpreter for tests); on a CPU pass implementation='blockwise'"
            )

    def block_sizes(self, head_dim, dtype):
        # The kernels are not imported, because compiled code calls this method and cannot trace an import.
        if not 16 <= head_dim <= 256:
            raise ValueError(f"head_dim must be from 16 to 256, got {head_dim}")
        return (128, 64) if dtype.itemsize == 2 else (64, 64)

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

    def attend(self, call, c, boundary, packed):
        options = (call.seq_start, call.sm_scale, *self.grid(call), call.window_size)
        given = (call.q, call.k, call.v, c, boundary)
        return kernels().forward(*given, *options, portable=self.portable, packed=packed)

    def partial_gradients(self, dout, call, out, saved, c, boundary, packed):
        options = (call.seq_start, call.sm_scale, *self.grid(call), call.window_size)
        tensors = (dout, call.q, call.k, call.v, out, saved, c, boundary)
        given = {"portable": self.portable, "shares": True, "packed": packed}
        dq, dk, dv, dc = kernels().backward(*tensors, *options, **given)
        if dk.shape != call.k.shape:
            dk, dv = (x.sum(1, keepdim=True) for x in (dk, dv))
        return dq, dk, dv, kernels().log_fgate_grad(dc, call.log_fgate)

    def write(self, cache, k, v, log_fgate):
        # Inductor generates its own kernels and cannot trace this one.
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
    """:class:`Triton` without the kernels for a single GPU architecture."""

    portable = True


# Keys are the names that ``implementation`` accepts. The last backend that supports a device is the fastest
# there.
BACKENDS: dict[str, Backend] = {
    "reference": Reference(),
    "blockwise": Blockwise(),
    "triton-portable": TritonPortable(),
    "triton": Triton(),
}


def choose_implementation(device: torch.device) -> str:
    """The backend that ``implementation="auto"`` selects: triton on a GPU, blockwise elsewhere."""
    chosen = [name for name, backend in BACKENDS.items() if backend.supports(device)][-1]
    if device.type == "cuda" and chosen == "blockwise":
        warnings.warn(
            "triton is not installed, so forgetting_attention runs the slow blockwise path on the "
            "GPU; run `pip install triton` for the kernels",
            stacklevel=3,
        )
    return chosen


def find_backend(implementation: str) -> Backend:
    """The backend named ``implementation``.

    Raises:
        ValueError: no backend has that name; the message lists the names. ``"auto"`` is not a backend:
            :func:`choose_implementation` returns the name that it selects.
    """
    if implementation not in BACKENDS:
        raise ValueError(
            f"implementation must be one of {[*BACKENDS]}, or 'auto' in a call with tensors "
            f"(choose_implementation(device) returns the name that 'auto' selects), got {implementation!r}"
        )
    return BACKENDS[implementation]
