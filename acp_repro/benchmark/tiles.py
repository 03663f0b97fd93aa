"""Which tiles are fastest on this GPU: each candidate is checked against the present tile, then timed.

The table in ``attention/triton/tiles.py`` comes from here. Nothing is tuned when a kernel is called.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from triton.errors import TritonError

from ..attention.backends import named
from ..attention.triton.backward import launch_backward
from ..attention.triton.forward import launch_forward
from ..attention.triton.tiles import Tile, Tiles, block_sizes, tiles_for
from .attention import Problem, make_problem
from .timing import interleaved

KERNELS = ("forward", "query_side", "key_side")
# Rounding differs between tiles, because the order of sums differs; a larger difference is an error.
_LARGEST_DIFFERENCE = 5e-3


class Timing(NamedTuple):
    tile: Tile
    milliseconds: float | None  # None if it does not run, or is wrong
    why_not: str = ""


def candidates(kernel: str, head_dim: int, dtype: torch.dtype) -> list[Tile]:
    """Tiles that divide the pruning grid and may fit; 20 to 40 of them."""
    block_q, block_k = block_sizes(head_dim, dtype)
    rows = [r for r in (32, 64, 128) if block_q % r == 0]
    columns = [c for c in (32, 64) if block_k % c == 0]
    caps = (None, 168) if kernel != "forward" else (None,)
    return [
        Tile(r, c, warps, stages, cap)
        for r, c, warps, stages, cap in itertools.product(rows, columns, (4, 8), (2, 3), caps)
        if r * c // warps >= 512 and not (warps == 8 and max(r, c) < 128)
    ]


class Bench:
    """One problem with the results of the present tiles."""

    def __init__(
        self, head_dim: int, length: int, heads: int = 12, tokens: int = 65536, device: str = "cuda"
    ):
        device, dtype = torch.device(device), torch.bfloat16
        self.problem: Problem = make_problem(length, heads, head_dim, "bimodal", tokens, device, dtype)
        q = self.problem.q
        self.grid = block_sizes(head_dim, dtype)
        self.present = tiles_for(q, *self.grid)
        self.c, self.boundary = named("triton").running_sum_and_boundary(
            self.problem.log_fgate, self.problem.threshold, length, *self.grid
        )
        self.out, self.lse = torch.empty_like(q), torch.empty(q.shape[:3], device=device)
        self.grads = [torch.empty_like(x) for x in self.problem.inputs[:3]]
        self.grads.append(torch.empty(self.c.shape, device=device))
        self.run("forward", self.present.forward)
        self.run("key_side", self.present.key_side)
        self.truth = [x.clone() for x in (self.out, self.lse, *self.grads)]

    def run(self, kernel: str, tile: Tile) -> None:
        """One pass with ``tile`` for ``kernel`` and the present tiles elsewhere."""
        p, scale = self.problem, self.problem.q.shape[-1] ** -0.5
        if kernel == "forward":
            launch_forward(
                p.q, p.k, p.v, self.out, self.lse, self.c, self.boundary, None, scale, *self.grid, tile
            )
            return
        tiles: Tiles = self.present._replace(**{kernel: tile})
        launch_backward(
            p.dout,
            p.q,
            p.k,
            p.v,
            self.out,
            self.lse,
            self.c,
            self.boundary,
            None,
            scale,
            *self.grid,
            *self.grads,
            tiles,
        )

    def time(self, kernel: str, tiles: list[Tile], repeats: int) -> list[Timing]:
        """Milliseconds of the forward, or of the whole backward with each tile in one of its places.

        Tiles take turns. A tile that is wrong or does not run is not timed.
        """
        results = [self.out, self.lse] if kernel == "forward" else self.grads
        truth = self.truth[:2] if kernel == "forward" else self.truth[2:]
        faults: dict[Tile, str] = {}
        for tile in tiles:
            for x in results:
                x.fill_(float("nan"))
            try:
                self.run(kernel, tile)
                worst = max(_difference(a, t) for a, t in zip(results, truth, strict=True))
                faults[tile] = "" if worst <= _LARGEST_DIFFERENCE else f"wrong: off by {worst:.1e}"
            except (RuntimeError, TritonError) as error:  # the tile does not fit this GPU
                faults[tile] = str(error).splitlines()[0][:60]
        calls = {t: functools.partial(self.run, kernel, t) for t, fault in faults.items() if not fault}
        device = self.problem.q.device
        times = interleaved(calls, device, repeats, warm_ups=4 if device.type == "cuda" else 1)
        for x, t in zip(results, truth, strict=True):
            x.copy_(t)  # the backward reads what the forward wrote
        return [Timing(t, median(times[t]) if t in times else None, fault) for t, fault in faults.items()]


def tune(head_dim: int, length: int, repeats: int, jobs: int | None) -> Iterator[tuple[str, list[Timing]]]:
    """Times every candidate of every kernel; yields (kernel, its timings), the present tile first."""
    bench = Bench(head_dim, length)
    every = {
        kernel: list(
            dict.fromkeys([getattr(bench.present, kernel), *candidates(kernel, head_dim, torch.bfloat16)])
        )
        for kernel in KERNELS
    }
    work = [(head_dim, kernel, tile) for kernel in KERNELS for tile in every[kernel]]
    # Compiling takes seconds each and is cached on disk by Triton, so other processes do it.
    with ProcessPoolExecutor(jobs or min(16, os.cpu_count() or 1), get_context("spawn")) as pool:
        list(pool.map(_compile, work, chunksize=4))
    for kernel, tiles in every.items():
        yield kernel, bench.time(kernel, tiles, repeats)


def _compile(job: tuple[int, str, Tile]) -> None:
    head_dim, kernel, tile = job
    Bench(head_dim, 256, heads=2, tokens=512).time(kernel, [tile], 1)


def _difference(actual: Tensor, truth: Tensor) -> float:
    return ((actual.float() - truth.float()).norm() / truth.float().norm()).item()
