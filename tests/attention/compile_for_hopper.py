"""Compiles the kernels for Hopper on any machine; prints what ptxas says of each, one line a kernel.

A script of its own, because the tests may have Triton in its interpreter.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

sys.path.insert(0, str(Path(__file__).parents[2]))
from acp_repro.attention.triton import hopper


class Device:
    """Enough of a driver for Triton to compile without a GPU."""

    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = get_current_stream = staticmethod(lambda *_: 0)
    get_device_interface = get_active_torch_device = staticmethod(lambda: None)


def compile_all():
    triton.runtime.driver.set_active(Device())
    options = dict(hopper._OPTIONS, BLOCK_Q=128, BLOCK_K=64, ROWS=64, D=64, HEAVIEST_FIRST=True)
    sizes, strides = (48, 12, 12, 4096, 32), (4096 * 768, 64, 768)
    x = torch.empty(4, 12, 4096, 64, dtype=torch.bfloat16, device="meta").as_strided(
        (4, 12, 4096, 64), (*strides, 1)
    )
    numbers = torch.empty(48, 4096, device="meta")
    pairs = torch.empty(48, 4096, dtype=torch.int64, device="meta")
    starts = torch.empty(48, 32, dtype=torch.int32, device="meta")
    matrix = TensorDescriptor(
        x, list(x.shape), list(x.stride()), [1, 1, 64, 64], gl.NVMMASharedLayout(128, 16, 4)
    )
    flat = gl.NVMMASharedLayout(0, 32, 2)
    of_pairs = pairs.view(torch.int32)
    of_pairs = TensorDescriptor(of_pairs, list(of_pairs.shape), [8192, 1], [1, 128], flat)
    tail = TensorDescriptor(numbers, [4096 * 48], [1], [64], gl.NVMMASharedLayout(0, 32, 1))
    for boundary, seq_start, shared in ((None, None, 1), (starts, None, 1), (starts, pairs, 4)):
        common = dict(
            options, HAS_BOUNDARY=boundary is not None, HAS_START=seq_start is not None, SHARED=shared
        )
        grads = x if shared == 1 else x.float()
        yield hopper.query_side_kernel.warmup(
            matrix,
            matrix,
            matrix,
            matrix,
            tail,
            x,
            numbers,
            x,
            numbers,
            pairs,
            pairs,
            pairs,
            boundary,
            seq_start,
            *strides,
            *strides,
            *sizes,
            0.18,
            0.125,
            grid=(1,),
            **common,
        )
        yield hopper.key_side_kernel.warmup(
            matrix,
            matrix,
            matrix,
            matrix,
            of_pairs,
            of_pairs,
            of_pairs,
            grads,
            grads,
            numbers,
            numbers,
            pairs,
            boundary,
            seq_start,
            *strides,
            *strides,
            *sizes,
            0.18,
            0.125,
            COUNT=256,
            grid=(1,),
            **common,
        )


if __name__ == "__main__":
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        for kernel in compile_all():
            source = Path(folder) / "kernel.ptx"
            source.write_text(kernel.asm["ptx"])
            said = subprocess.run(
                [ptxas, "-v", "--gpu-name=sm_90a", source, "-o", Path(folder) / "kernel.cubin"],
                capture_output=True,
                text=True,
                check=True,
            ).stderr
            print(" ".join(said.split()))
