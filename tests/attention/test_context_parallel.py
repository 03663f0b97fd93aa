"""Context parallelism on 2, 3 and 4 ranks (gloo, CPU) against the call of one process."""

import contextlib
import random
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from acp_repro.attention import forgetting_attention, gather_sequence, shard_sequence
from tests.ranks import run_on

from .budgets import NAMES, judge, make_inputs
from .random_calls import Memory, draw_call, surroundings


@contextlib.contextmanager
def ranks_of_gloo():
    dist.init_process_group("gloo")
    yield dist.group.WORLD
    dist.destroy_process_group()  # not after an error: it would wait for the others


def require_success(ends):
    assert ends == [(0, "")] * len(ends)


def attend(given, options, group=None):
    """(out, start_index, gradients) of whole tensors, computed from shards on the ranks of a group."""
    q, k, v, log_fgate, dout = given
    leaves = [x.detach().requires_grad_() for x in (q, k, v, log_fgate)]
    shards, dim = leaves, 2 if options["head_first"] else 1
    if group is not None:
        shards = [shard_sequence(x, group, dim) for x in leaves]
    out, start = forgetting_attention(*shards, return_start_index=True, context_parallel=group, **options)
    if group is not None:
        out, start = gather_sequence(out, group, dim), gather_sequence(start, group, 2)
    return out.detach(), start, *torch.autograd.grad(out, leaves, dout)


def draw_calls(ranks):
    """Every call whose queries are its keys, at lengths that the ranks can shard."""
    for seed in [*range(22), 1000, 1001]:
        call = draw_call(seed, length=128 * ranks * (2 if ranks == 2 and seed % 2 else 1))
        if call.values["q"].shape[2] == call.values["k"].shape[2]:
            yield call


def check_calls():
    with ranks_of_gloo() as group:
        for call in draw_calls(group.size()):
            given, options = call.place(Memory(random.Random(str(call)), call.alignment))
            with surroundings([x for x in call.words if x not in ("anomaly", "default dtype")]):
                alone = attend(given, options)
                shared = attend(given, options, group)
                again = attend(given, options, group)
            assert torch.equal(shared[0], alone[0]), f"{call}: out is not bitwise identical"
            assert torch.equal(shared[1], alone[1]), f"{call}: start_index differs"
            assert all(map(torch.equal, shared, again)), f"{call}: a repeated call differs"
            out, start, *grads = shared
            for x, like in zip(grads, given, strict=False):
                assert x.dtype == like.dtype and x.shape == like.shape
            if not options["head_first"]:
                out, *grads = (x.transpose(1, 2) for x in (out, *grads))
            judge(dict(zip(NAMES, (out, *grads), strict=True)), call.right(start))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_random_calls(ranks):
    require_success(run_on(ranks, Path.cwd(), check_calls))
