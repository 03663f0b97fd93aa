"""Context parallelism on 2, 3 and 4 ranks (gloo, CPU) against a call in one process."""

import contextlib
import random
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from acp_repro.attention import forgetting_attention, gather_sequence, shard_sequence
from acp_repro.attention.context_parallel import attend_shards_backward_op, attend_shards_op
from acp_repro.attention.exchange import exchange_op
from tests.ranks import run_on

from .budgets import NAMES, judge, make_inputs
from .random_calls import Memory, draw_call, surroundings


@contextlib.contextmanager
def ranks_of_gloo():
    dist.init_process_group("gloo")
    yield dist.group.WORLD
    dist.destroy_process_group()  # skipped after an error, where it would wait for the other ranks


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


def draw_calls(ranks, seeds, chunk=64):
    """Calls with equal numbers of queries and keys, in chunks of ``chunk`` tokens or twice as many."""
    for seed in seeds:
        call = draw_call(seed, length=2 * chunk * ranks * (2 if ranks == 2 and seed % 2 else 1))
        if call.values["q"].shape[2] == call.values["k"].shape[2]:
            yield call


def check_calls():
    with ranks_of_gloo() as group:
        seeds = [*range(22 if group.size() == 2 else 9), 1000, 1001]
        for call in draw_calls(group.size(), seeds):
            given, options = call.place(Memory(random.Random(str(call)), call.alignment))
            with surroundings([x for x in call.words if x not in ("anomaly", "default dtype")]):
                shared = attend(given, options, group)
                again = attend(given, options, group)
                assert all(map(torch.equal, shared, again)), f"{call}: a repeated call differs"
                if group.rank():
                    continue
                alone = attend(given, options)
            assert torch.equal(shared[0], alone[0]), f"{call}: out is not bitwise identical"
            assert torch.equal(shared[1], alone[1]), f"{call}: start_index differs"
            out, start, *grads = shared
            for x, like in zip(grads, given, strict=False):
                assert x.dtype == like.dtype and x.shape == like.shape
            if not options["head_first"]:
                out, *grads = (x.transpose(1, 2) for x in (out, *grads))
            judge(dict(zip(NAMES, (out, *grads), strict=True)), call.right(start))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_random_calls(ranks):
    require_success(run_on(ranks, Path.cwd(), check_calls))


OPTIONS = [
    {"window_size": 100},
    {"log_pruning_tolerance": -1.0},
    {"window_size": 100, "log_pruning_tolerance": -5.0},
    {"implementation": "triton", "adaptive_threshold": -12.0},  # in Triton's interpreter
]


def check_special_calls():
    with ranks_of_gloo() as group:
        mesh = init_device_mesh("cpu", (group.size(),))
        q, k, v, log_fgate, dout = make_inputs(256, 256, heads=2, kv_heads=1)
        # With small scores and slow decay, pruning of a block depends on the last unit of log L.
        log_fgate = -torch.linspace(0.03, 0.1, 2)[:, None].expand_as(log_fgate).contiguous()
        given = (q * 0.1, k * 0.1, v, log_fgate, dout)
        for options in OPTIONS:
            options = options | {"head_first": True}
            shared = attend(given, options, mesh)
            if group.rank():
                continue
            alone = attend(given, options)
            for n, (a, b) in enumerate(zip(shared, alone, strict=True)):
                # out, start_index and dq are bitwise identical to one process.
                torch.testing.assert_close(a, b, rtol=0, atol=0 if n < 3 else 2e-5, msg=f"{n}, {options}")


def test_sliding_windows_and_meshes():
    require_success(run_on(2, Path.cwd(), check_special_calls))


def check_compiled_calls(backend):
    with ranks_of_gloo() as group:
        leaves = [x.requires_grad_() for x in make_inputs(256, 256, batch=2, heads=4, kv_heads=2)[:4]]
        pruned = {"adaptive_threshold": "auto", "seq_start": torch.tensor([0, 70])}

        def attend_twice(*x):
            q, *others = (shard_sequence(y, group, 2) for y in x)
            q = forgetting_attention(q, *others, head_first=True, context_parallel=group)
            q = forgetting_attention(q * 1.0, *others, head_first=True, context_parallel=group, **pruned)
            return gather_sequence(q, group, 2) * 2.0

        compiled = torch.compile(attend_twice, fullgraph=True, backend=backend)
        outs = [function(*leaves) for function in (attend_twice, compiled)]
        results = [(out, *torch.autograd.grad(out.square().sum(), leaves)) for out in outs]
        assert all(map(torch.equal, *results)), "compiled code computes other bits"
        leaves[3].data[:, :, 5] = -1.0 if group.rank() else 1.0  # of the shard of rank 0
        with pytest.raises(ValueError, match=r"^log_fgate must be in [^\n]*\Z"):
            compiled(*leaves)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_code_has_no_graph_break_and_the_same_bits(backend):
    require_success(run_on(2, Path.cwd(), check_compiled_calls, backend))


def check_operators():
    with ranks_of_gloo() as group:
        for heads in (1, 4):
            q, k, v, log_fgate, dout = make_inputs(128, 128, heads=heads, kv_heads=1)
            q = q.mT.contiguous().mT  # one head keeps this layout
            options = (None, 0.25, "blockwise", None, group.group_name)
            call = (q, k, v, log_fgate, None, *options)
            torch.library.opcheck(attend_shards_op, call, test_utils="test_faketensor")
            call = (dout, q, *attend_shards_op(*call), *options)
            torch.library.opcheck(attend_shards_backward_op, call)
        for kind in ("gather", "shard", "send to next"):
            torch.library.opcheck(exchange_op, (q.requires_grad_(), kind, 2, group.group_name))


def test_operators_return_what_their_fake_implementations_declare():
    require_success(run_on(2, Path.cwd(), check_operators))


def check_errors():
    with ranks_of_gloo() as group:
        x = torch.randn(1, 128, 2, 16)
        gates = -torch.rand(1, 128, 2)
        # Every rank raises the error, even if only one rank has the invalid input.
        positive, nan = gates.clone(), x.clone()
        positive[:, 5] = 1.0 if group.rank() else -1.0
        nan[:, 5] = torch.nan if group.rank() else 0.0
        for match, given, options in (
            ("ProcessGroup or a DeviceMesh", (x, x, x, gates), {"context_parallel": 2}),
            ("multiple of 128 tokens .* got 127 queries", [t[:, :127] for t in (x, x, x, gates)], {}),
            ("decode without context_parallel", (x[:, :1], x, x, gates), {}),
            ("implementation='reference'", (x, x, x, gates), {"implementation": "reference"}),
            ("end with the length 256", (x, x, x, gates), {"cu_seqlens": torch.tensor([0, 128])}),
            ("log_fgate must be in", (x, x, x, positive), {}),
            ("NaN under 'auto'", (x, nan, x, gates), {"adaptive_threshold": "auto"}),
        ):
            with pytest.raises((TypeError, ValueError), match=match) as error:
                forgetting_attention(*given, **{"context_parallel": group} | options)
            assert "\n" not in str(error.value)
        with pytest.raises(ValueError, match="length of dimension 1, 130, .* twice the 2 ranks"):
            shard_sequence(torch.zeros(1, 130), group)


def test_unsupported_options_raise_a_one_line_error_on_every_rank():
    require_success(run_on(2, Path.cwd(), check_errors))


def fail_on_one_rank():
    with ranks_of_gloo() as group:
        x = torch.randn(1, 128, 2, 16, requires_grad=True)
        out = forgetting_attention(x, x, x, -torch.rand(1, 128, 2), context_parallel=group)
        if group.rank() == 1:
            raise MemoryError("this rank has no memory")
        out.sum().backward()


def test_failed_rank_terminates_all_ranks():
    ends = run_on(3, Path.cwd(), fail_on_one_rank)
    assert ends[1] == (1, "MemoryError: this rank has no memory")
    for code, message in (ends[0], ends[2]):
        assert code == 1
        assert re.fullmatch(
            "RuntimeError: context_parallel: an all-to-all failed, because another rank .*", message
        )
