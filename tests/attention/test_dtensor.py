"""Forgetting attention of DTensors on two ranks (gloo, CPU) against a call in one process."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication

from acp_repro.attention import (
    PagedKVCache,
    forgetting_attention,
    forgetting_attention_with_kvcache,
    register_dtensor_sharding,
)
from tests.ranks import run_on

from .budgets import make_inputs


def attend(inputs, placement=None, mesh=None, **options):
    """out and the gradients, as full tensors, and the collectives of both passes."""

    def place(x):
        return x if mesh is None else distribute_tensor(x, mesh, [placement])

    leaves = [place(x).requires_grad_() for x in inputs]
    with CommDebugMode() as watch, implicit_replication():  # of seq_start and the threshold
        out = forgetting_attention(*leaves, head_first=True, **options)
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    results = [out, *grads]
    if mesh is not None:
        assert all(x.placements == (placement,) for x in results)
        results = [x.full_tensor() for x in results]
    return results, watch.get_total_counts()


def check_both_passes():
    mesh = init_device_mesh("cpu", (2,))
    register_dtensor_sharding()
    inputs = make_inputs(200, 200, 4, 2, batch=2, device="cpu")[:4]
    delta = torch.full((2, 4), -12.0)
    start = {"seq_start": torch.tensor([0, 30])}
    for options in (
        {},
        start,
        {"adaptive_threshold": delta},
        {"adaptive_threshold": -12.0},
        {"window_size": 70},
        {"log_pruning_tolerance": -10.0},
    ):
        expected, _ = attend(inputs, **options)
        for placement in (Shard(0), Shard(1), Replicate()):
            found, collectives = attend(inputs, placement, mesh, **options)
            for ours, alone in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, alone, rtol=1e-5, atol=1e-5)
            assert collectives == 0, f"{placement}, {options}: {collectives} collectives"
    three = make_inputs(200, 200, 6, 3, batch=2, device="cpu")[
        :4
    ]  # three key heads do not divide: the heads are gathered
    shards = [distribute_tensor(x, mesh, [Shard(1) if x.shape[1] == 6 else Replicate()]) for x in three]
    out = forgetting_attention(*shards, head_first=True)
    torch.testing.assert_close(out.full_tensor(), forgetting_attention(*three, head_first=True))
    dist.destroy_process_group()


def check_decoding():
    mesh = init_device_mesh("cpu", (2,))
    register_dtensor_sharding()
    q, k, v, gates, _ = make_inputs(200, 200, 4, 2, batch=2, device="cpu")
    delta = torch.full((2, 4), -12.0)
    cache = PagedKVCache.allocate(2, 4, 256, 16, kv_heads=2)
    cache.seqlens.add_(200)
    cache.write(k, v, gates)
    before, last = cache.start_block.clone(), q[:, :, -1:].contiguous()
    expected = forgetting_attention_with_kvcache(last, cache, head_first=True, adaptive_threshold=delta)
    assert cache.start_block.any(), "the case prunes nothing"
    for placement in (Shard(0), Shard(1)):
        whole, rows = [Replicate()], [placement if placement == Shard(0) else Replicate()]
        blocks = (distribute_tensor(x, mesh, whole) for x in cache[:3])
        table, start, part, threshold = (
            distribute_tensor(x, mesh, [placement]) for x in (cache.block_table, before.clone(), last, delta)
        )
        shared = PagedKVCache(*blocks, table, distribute_tensor(cache.seqlens, mesh, rows), start)
        out = forgetting_attention_with_kvcache(part, shared, head_first=True, adaptive_threshold=threshold)
        assert out.placements == (placement,)
        torch.testing.assert_close(out.full_tensor(), expected)
        assert torch.equal(start.full_tensor(), cache.start_block)
    dist.destroy_process_group()


def test_two_ranks_match_one_rank_in_both_passes(tmp_path):
    assert run_on(2, tmp_path, check_both_passes) == [(0, "")] * 2


def test_two_ranks_decode_like_one(tmp_path):
    assert run_on(2, tmp_path, check_decoding) == [(0, "")] * 2
