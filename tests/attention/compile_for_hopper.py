"""Compiles the Hopper kernels on any machine and prints the messages of ptxas, one line per kernel.

This is a separate script because the tests may run Triton in its interpreter. It calls the launch functions
of the project on tensors without memory; their kernels are compiled but not run.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget

sys.path.insert(0, str(Path(__file__).parents[2]))
from acp_repro.attention import PagedKVCache
from acp_repro.attention.backends import find_backend
from acp_repro.attention.triton import decode, hopper, tiles, write_kvcache
from acp_repro.attention.triton.gates import decay_terms
from acp_repro.attention.triton.norms import threshold_from_norms
from acp_repro.model import step_kernels, training_kernels
from acp_repro.retention import key_bias_kernel

BATCH, HEADS, LENGTH, HEAD_DIM = 4, 12, 4096, 64


class Device:
    """The part of a driver that Triton needs to compile without a GPU."""

    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = get_current_stream = staticmethod(lambda *_: 0)
    get_device_interface = get_active_torch_device = staticmethod(lambda: None)


def collect_launches() -> list[tuple[str, object]]:
    """Makes every launch compile its kernel and append (name, kernel) to the returned list."""
    compiled = []

    def compile_only(self, grid):
        def launch(*arguments, **options):
            kernel = self.warmup(*arguments, grid=grid, **options)
            compiled.append((f"{self.__module__.rpartition('.triton.')[2]}.{self.__name__}", kernel))

        return launch

    triton.runtime.jit.JITFunction.__getitem__ = compile_only
    triton.runtime.driver.set_active(Device())
    tiles._shared_memory = lambda device: 232_448  # bytes per block on an H100
    return compiled


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def compile_all(head_dim: int) -> Iterator[tuple[str, object]]:
    """(name, kernel) of the Hopper kernels, forward and backward: exact, pruned, pruned with padding and
    grouped-query heads, and pruned with packed keys."""
    compiled = collect_launches()
    for pruned, padded, shared, seqlen_k in (
        (False, False, 1, LENGTH),
        (True, False, 1, LENGTH),
        (True, True, 4, LENGTH),
        (True, False, HEADS, 3 * LENGTH),  # packed keys
    ):
        block_q, block_k = find_backend("triton").block_sizes(head_dim, torch.bfloat16)

        def rows(heads: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            """(B, H, T, D) in the memory layout of the model, with time before heads."""
            return empty(BATCH, LENGTH, heads, head_dim, dtype=dtype).transpose(1, 2)

        q, k, v = rows(HEADS), rows(HEADS // shared), rows(HEADS // shared)
        # Partial gradients of shared keys are summed in float32.
        grads = [rows(HEADS, torch.bfloat16 if shared == 1 else torch.float32) for _ in "kv"]
        packed = None
        if seqlen_k > LENGTH:
            k, v = empty(1, 1, BATCH * LENGTH, 2 * head_dim).chunk(2, -1)
            packed = torch.empty(BATCH, 2, dtype=torch.int64, device="meta")
            grads = [empty(1, HEADS, k.shape[2], head_dim, dtype=torch.float32) for _ in "kv"]
        lse = torch.empty(q.shape[:3], device="meta")
        c = empty(BATCH, HEADS, seqlen_k, dtype=torch.float64)
        boundary = lse.new_empty((BATCH, HEADS, LENGTH // block_q), dtype=torch.int32) if pruned else None
        seq_start = torch.empty(BATCH, dtype=torch.int64, device="meta") if padded else None
        given = (c, boundary, seq_start, head_dim**-0.5, block_q, block_k)
        grads = (rows(HEADS), *grads, c.float())
        if head_dim == 128:
            terms = decay_terms(c, seq_start, hopper.ROWS, seqlen_k)
            recompute_tiles = empty(BATCH, HEADS, LENGTH // 128, 2, dtype=torch.int32)
            hopper.launch_forward(q, k, v, rows(HEADS), lse, terms, *given[1:], recompute_tiles, packed)
        hopper.launch_backward(rows(HEADS), q, k, v, rows(HEADS), lse, *given, *grads, packed)
        yield from compiled
        compiled.clear()


def small_operations(tokens: int, head_dim: int) -> None:
    """(name, kernel) of the kernels around the attention, at the start of a sequence and after it."""
    rows, mix = empty(BATCH, tokens, HEADS * head_dim), empty(BATCH, tokens, HEADS)
    weight = empty(HEADS * head_dim)
    last = empty(BATCH, 1, HEADS, head_dim)
    for state, end in ((None, last), (last, None)):
        given = (rows, rows, mix, mix, mix, state, state, end, end, weight, weight)
        step_kernels.shift_and_norm(rows, *given, HEADS, 1e-5)
    step_kernels.add_and_norm(rows, rows, weight, 1e-5)
    wide, narrow = empty(HEADS * head_dim, HEADS * head_dim), empty(HEADS, HEADS * head_dim)
    step_kernels.multiply_rows(rows[:1, :1], [wide, narrow], [None, empty(HEADS)])
    step_kernels.norm_and_gate(empty(BATCH, HEADS, tokens, head_dim), rows, weight, 1e-5)
    step_kernels.silu_and_multiply(empty(BATCH, tokens, 6 * head_dim))


def compile_decoding() -> Iterator[tuple[str, object]]:
    """(name, kernel) of decoding, cache writes and the surrounding kernels: one pruned token, one exact
    token, several tokens with padding and grouped-query heads, and a head_dim that is not a power of two."""
    compiled = collect_launches()
    sys.modules[decode.__module__].num_splits = lambda *_: 64  # as on a GPU, for some rows
    for head_dim, tokens, group, pruned, padded in (
        (64, 1, 1, True, False),
        (64, 1, 1, False, False),
        (64, 4, 3, True, True),
        (80, 1, 1, True, True),
        (256, 8, 1, True, False),
    ):
        kv_heads = HEADS // group
        cache = PagedKVCache(
            *(empty(100, 64, head_dim) for _ in "kv"),
            empty(100, group, 64, dtype=torch.float64),
            empty(BATCH, kv_heads, 32, dtype=torch.int32),
            empty(BATCH, dtype=torch.int32),
        )
        start = empty(BATCH, HEADS, dtype=torch.int32)
        threshold = empty(BATCH, HEADS, dtype=torch.float32) if pruned else None
        seq_start = empty(BATCH, dtype=torch.int64) if padded else None
        gates = empty(BATCH, HEADS, tokens, dtype=torch.float32)
        new = [empty(BATCH, kv_heads, tokens, head_dim) for _ in "kv"]
        write_kvcache(cache, *new, gates)
        write_kvcache(cache, *new, gates, gates.double())
        small_operations(tokens, head_dim)
        q = empty(BATCH, HEADS, tokens, head_dim)
        decode(q, cache, start, threshold, seq_start, head_dim**-0.5)
        yield from compiled
        compiled.clear()


def compile_training() -> list[tuple[str, object]]:
    """(name, kernel) of the kernels around the attention in a training step, at 125M."""
    compiled = collect_launches()

    training_kernels.swiglu_backward(empty(BATCH, LENGTH, 3584), empty(BATCH, LENGTH, 1792))
    logits, labels = empty(LENGTH, 50_304), empty(LENGTH, dtype=torch.int64)
    loss, lse = training_kernels.cross_entropy(logits, labels, 50_257, -100)
    training_kernels.logits_grad(logits, labels, lse, loss, 50_257, -100)
    threshold_from_norms(*(empty(BATCH, LENGTH, HEADS, HEAD_DIM).transpose(1, 2) for _ in "qk"), 0.125, -10.0)
    return compiled


def compile_retention() -> list[tuple[str, object]]:
    """(name, kernel) of attention with a key bias at DistilBERT's shape, with and without split keys."""
    compiled = collect_launches()
    for batch in (4, 32):
        shape = (batch, 512, 3, HEADS, HEAD_DIM)
        rows = torch.empty(shape, dtype=torch.bfloat16, device="meta").requires_grad_()
        bias = torch.empty(batch, 512, device="meta").requires_grad_()
        out = key_bias_kernel.attend(*rows.permute(2, 0, 3, 1, 4), bias, 0.1, 0.125)
        out.backward(torch.empty_like(out))
    return compiled


if __name__ == "__main__":
    ptxas = triton.knobs.nvidia.ptxas.path  # the one that Triton uses on this machine
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        if "--decode" in sys.argv:
            kernels = compile_decoding()
        elif "--training" in sys.argv:
            kernels = compile_training()
        elif "--retention" in sys.argv:
            kernels = compile_retention()
        else:
            kernels = compile_all(128 if "--wide" in sys.argv else HEAD_DIM)
        for name, kernel in kernels:
            source = Path(folder) / "kernel.ptx"
            source.write_text(kernel.asm["ptx"])
            said = subprocess.run(
                [ptxas, "-v", "--gpu-name=sm_90a", source, "-o", Path(folder) / "kernel.cubin"],
                capture_output=True,
                text=True,
            )
            if said.returncode:
                sys.exit(f"{name}: ptxas ends with {said.returncode}: {said.stdout}{said.stderr}")
            print(name, " ".join(said.stderr.split()), f"shared memory: {kernel.metadata.shared}")
