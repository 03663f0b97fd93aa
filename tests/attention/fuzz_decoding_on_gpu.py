"""Random decoding: consecutive steps with a shared paged cache; see :mod:`.fuzz_on_gpu`."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

import pytest
import torch

from acp_repro.attention import PagedKVCache, forgetting_attention_with_kvcache
from acp_repro.attention.backends import HAS_TRITON
from acp_repro.attention.decay import cumulative_log_fgate

from .budgets import expected, judge, require
from .fuzz_on_gpu import hunt
from .random_calls import (
    BRAIN,
    DEVICE,
    GATES,
    HALF,
    IMPLEMENTATION,
    OWN_KERNELS,
    SINGLE,
    Memory,
    surroundings,
)

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
# Tokens per step, key heads, query heads per key head, head_dim, dtype, tokens per block, columns of the
# table.
FAMILIES = [
    (1, 2, 1, 64, BRAIN, 64, 20),
    (1, 2, 4, 128, BRAIN, 64, 20),
    (3, 1, 2, 64, HALF, 32, 24),
    (1, 3, 1, 48, SINGLE, 16, 48),
    (5, 2, 3, 20, SINGLE, 32, 24),
    (8, 1, 2, 64, BRAIN, 128, 9),
]
NASTY = [math.nan, 1e9, -1e9, 0.0]  # c of unread entries: values that would prune a block or keep it


@dataclass
class Steps:
    """Decoding steps with all past tokens, as float64 on the CPU, heads first."""

    words: list[str]  # the description in a failure message
    family: tuple
    lengths: list[int]  # of the rows before the last step
    count: int
    starts: list[int] | None  # of left-padded rows
    q: torch.Tensor  # (count, B, H, T, D)
    k: torch.Tensor  # (B, Hkv, L, D)
    v: torch.Tensor
    log_fgate: torch.Tensor  # (B, H, L)
    delta: torch.Tensor | None  # (B, H)
    alignment: str
    rng: random.Random

    def __str__(self):
        return ", ".join(self.words)


def draw_steps(seed: int) -> Steps:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    family = FAMILIES[seed % len(FAMILIES)]
    if seed >= OWN_KERNELS:
        family = (rng.randint(1, 8), rng.randint(1, 3), rng.randint(1, 8), rng.randint(16, 256))
        family += (rng.choice([HALF, BRAIN, SINGLE]), rng.choice([16, 32, 64, 128]), rng.choice([9, 30]))
    tokens, kv_heads, group, head_dim, dtype, block, columns = family
    batch, count, heads = rng.choice([1, 2, 2, 3, 5]), rng.choice([1, 1, 2, 4]), kv_heads * group
    most = (columns - 1) * block
    before = [rng.choice([0, rng.randint(0, most), most]) for _ in range(batch)]  # the first step
    before = [min(n, most - tokens * count) for n in before]
    if rng.random() < 0.3:
        before = before[:1] * batch  # then seqlens may be one number, expanded
    starts = [rng.choice([0, rng.randrange(n + tokens), n]) for n in before] if rng.random() < 0.5 else None
    q = torch.randn(count, batch, heads, tokens, head_dim, generator=generator, dtype=SINGLE)
    k, v = torch.randn(2, batch, kv_heads, most, head_dim, generator=generator, dtype=SINGLE)
    falls = torch.empty(batch, heads, most, dtype=SINGLE).exponential_(generator=generator)
    gates = [rng.choice(["local", "local", "global", "open", "some closed", "steep"]) for _ in range(heads)]
    log_fgate = torch.stack([-GATES[name](falls[:, h]) for h, name in enumerate(gates)], 1).double()
    delta = torch.tensor(rng.choices([-3.0, -12.0, -40.0], k=batch * heads)).view(batch, heads)
    delta = delta.double() if rng.random() < 0.75 else None
    words = [f"seed {seed}", f"{kv_heads} * {group} heads of {head_dim}", str(dtype)[6:]]
    words += [f"{count} steps of {tokens} tokens after {before}", f"blocks of {block}", f"gates {gates}"]
    words += [f"seq_start {starts}", f"threshold {delta is not None}"]
    words += [name for name in ("default dtype", "poison", "autocast", "stream") if rng.random() < 0.2]
    lengths = [n + tokens for n in before]
    q, k, v = (x.to(dtype).double() for x in (q, k, v))
    alignment = "any" if seed >= OWN_KERNELS else "16"
    return Steps(words, family, lengths, count, starts, q, k, v, log_fgate, delta, alignment, rng)


def check_steps(case: Steps, implementation: str = IMPLEMENTATION) -> float:
    """A cache with shuffled blocks. Table entries of unread blocks are arbitrary indices, and values that
    must not be read are NaN or one of NASTY."""
    rng, (tokens, kv_heads, group, head_dim, dtype, block, columns) = case.rng, case.family
    batch, lengths, worst = len(case.lengths), case.lengths, 0.0
    sums, starts = cumulative_log_fgate(case.log_fgate), case.starts or [0] * batch
    pool = batch * kv_heads * columns + 4
    owned = torch.tensor(rng.sample(range(pool), pool - 4)).view(batch, kv_heads, columns)
    k, v = (torch.full((pool, block, head_dim), math.nan, dtype=dtype) for _ in "kv")
    c = torch.tensor(rng.choices(NASTY, k=pool * group), dtype=torch.float64)
    c = c.view(pool, group, 1).repeat(1, 1, block)
    for b, h, n in itertools.product(range(batch), range(kv_heads), range(columns)):
        page, begin, end = owned[b, h, n], n * block, min((n + 1) * block, lengths[b])
        if begin < end:
            c[page, :, : end - begin] = sums[b, h * group : (h + 1) * group, begin:end]
            real = slice(max(begin, starts[b]), end)
            for cached, x in ((k, case.k), (v, case.v)):
                cached[page, real.start - begin : end - begin] = x[b, h, real].to(dtype)
    right = torch.zeros(batch, kv_heads * group, dtype=torch.int32)
    if rng.random() < 0.3:
        right = first_kept(case, sums, lengths, starts, right) // 2
    k, v, c, start = (x.to(DEVICE) for x in (k, v, c, right))
    for step in range(case.count):
        memory = Memory(rng, case.alignment)
        # The kernels read blocks from the first that one of the heads keeps, except padding, and the block of
        # the token before the queries, whose c is added to theirs.
        first = right.view(batch, kv_heads, group).amin(-1)
        for b, n in enumerate(lengths):
            first[b] = first[b].clamp(min=starts[b] // block).clamp(max=max(0, n - tokens - 1) // block)
        column, last = torch.arange(columns), torch.tensor([-(-n // block) for n in lengths])
        read = (column >= first[..., None]) & (column < last[:, None, None])
        anything = torch.tensor(rng.choices(range(pool), k=owned.numel())).view_as(owned)
        table = torch.where(read, owned, anything).int().to(DEVICE)
        lost = owned[column.expand_as(owned) < first[..., None]].to(DEVICE)
        k[lost], v[lost], c[lost] = math.nan, math.nan, rng.choice(NASTY)
        seqlens, seq_start = place_rows(memory, lengths, torch.int32), None
        if case.starts is not None:
            seq_start = place_rows(memory, starts, torch.int64)
        cache = PagedKVCache(k, v, c, table, seqlens)
        if step:
            new = [slice(n - tokens, n) for n in lengths]
            whole = ((case.k, dtype), (case.v, dtype), (case.log_fgate, SINGLE))
            tensors = (torch.stack([x[b, :, i] for b, i in enumerate(new)]).to(t) for x, t in whole)
            write(cache, *map(memory.place, tensors))
        q, head_first = memory.place(case.q[step].to(dtype)), rng.random() < 0.5
        delta = None if case.delta is None else memory.place(case.delta.to(SINGLE))
        before = [x.clone() for x in cache[:4]]
        with surroundings(case.words):
            out = forgetting_attention_with_kvcache(
                q if head_first else q.transpose(1, 2),
                cache,
                start,
                head_first=head_first,
                seq_start=seq_start,
                adaptive_threshold=delta,
                implementation=implementation,
            )
        memory.require_unchanged()
        for name, x, y in zip(cache._fields, cache, before, strict=False):
            require(
                torch.equal(x.view(torch.uint8), y.view(torch.uint8)), f"step {step} changes cache.{name}"
            )
        right = first_kept(case, sums, lengths, starts, right)
        said = f"step {step}: start_block is {start.tolist()} and not {right.tolist()}"
        require(torch.equal(start.cpu(), right), said)
        out = out if head_first else out.transpose(1, 2)
        for b, length in enumerate(lengths):
            one = (case.q[step, b], *(x[b, :, :length] for x in (case.k, case.v, case.log_fgate)))
            keys = torch.arange(length, device=DEVICE)
            visible = (keys >= start[b, :, None, None] * block) & (keys >= starts[b])
            truth = expected(*(x[None].to(DEVICE) for x in one), visible[None], head_dim**-0.5, dtype)
            worst = max(worst, judge({"out": out[b : b + 1]}, truth))
        lengths = [n + tokens for n in lengths]
    return worst


def place_rows(memory, numbers, dtype):
    """One number per row, in a random layout: contiguous, a column of a matrix, or expanded."""
    return memory.place(torch.tensor(numbers, dtype=dtype), (0,) if len({*numbers}) == 1 else ())


def write(cache, *new):
    """Decodes with the same calls as the model."""
    if DEVICE == "cuda":
        from acp_repro.attention.triton import write_kvcache

        write_kvcache(cache, *new)
    else:
        cache.write(*new)


def first_kept(case, sums, lengths, starts, start):
    """Algorithm 1 of the paper from ``start`` on, one head at a time."""
    tokens, block, start = case.family[0], case.family[5], start.clone()
    for b, h in itertools.product(*map(range, start.shape)):
        first, n = lengths[b] - tokens, max(start[b, h].item(), starts[b] // block)
        if case.delta is not None:
            decay = sums[b, h, first] - sums[b, h]
            while n < first // block and decay[(n + 1) * block - 1] < case.delta[b, h]:
                n += 1
        start[b, h] = min(n, first // block)
    return start


@pytest.mark.skipif(
    DEVICE == "cuda" or not HAS_TRITON,
    reason="tests Triton's interpreter: run CUDA_VISIBLE_DEVICES= make test",
)
@pytest.mark.parametrize("seed", [3, 10, pytest.param(4, marks=pytest.mark.slow)])
def test_kernels_in_the_interpreter(seed):
    check_steps(draw_steps(seed), "triton")


def test_random_decoding():
    hunt("random_decoding", draw_steps, check_steps, seconds=30)
