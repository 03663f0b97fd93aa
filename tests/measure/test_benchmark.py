"""The benchmark of the attention kernels: timings, rejected kernels, results and figure."""

import sys

import pandas as pd
import pytest
import torch

from acp_repro.attention.boundary import count_blocks
from acp_repro.benchmark_attention import main
from acp_repro.model.capture import AttentionInputs
from acp_repro.papers.acp.paper import PAPER
from acp_repro.pipeline.benchmark import attention as benchmark
from acp_repro.pipeline.benchmark import baselines, forward
from acp_repro.pipeline.errors import RecordError
from acp_repro.pipeline.records import read_records
from acp_repro.pipeline.suite_file import load_suite
from analysis import drawing
from analysis.acp import figure_context_parallel, figure_kernel
from tests.ranks import run_on
from tests.suites import YAML

SMALL = "--device cpu --context-lengths 128 256 --heads 3 --head-dim 16 --repeats 1"


def small_problem(gates="mixed"):
    return benchmark.make_problem(256, 3, 16, gates, 512, torch.device("cpu"), torch.float32)


def test_results_without_a_run_and_their_figure(make_suite, tmp_path):
    make_suite(YAML.replace("measure: {", "measure: {gate_distribution: paper_ratio, "))
    with pytest.raises(RecordError, match="benchmark_attention --suite mini"):
        read_records(load_suite("mini"), "kernel_time")
    assert main([*SMALL.split(), "--suite", "mini", "--csv", str(tmp_path / "x" / "times.csv")]) == 0
    records = read_records(load_suite("mini"), "kernel_time")
    assert tuple(records.columns) == PAPER.columns(PAPER.metric("kernel_time")) and len(records) == 8
    assert set(records["implementation"]) == {"blockwise", "eager"}
    assert (tmp_path / "x" / "times.csv").exists() and set(records["gates"]) == {"paper_ratio"}
    # 2 products forward and 5 backward over the triangle of 3 heads of 16.
    entries = 3 * 256 * 257 / 2
    last = records.iloc[-1]
    assert last["nominal_forward_backward_tflop"] == pytest.approx(7 * 2 * entries * 16 / 1e12)
    figure_kernel.make(drawing.find("mini", "figure_kernel"))
    assert figure_kernel.limit(records).empty  # no cuDNN here, so no limit
    assert main([*SMALL.split(), "--gates", "local", "--suite", "mini", "--baselines"]) == 0
    assert set(read_records(load_suite("mini"), "kernel_time")["gates"]) == {"paper_ratio", "local"}


@pytest.mark.parametrize("heads", [12, 16, 24])
@pytest.mark.parametrize("length", [4096, 8192, 16_384, 32_768])
def test_synthetic_gates_prune_the_ratio_of_the_paper(length, heads):
    """Two heads in three prune 57 % at 4k and 65 % at 32k, so the ratio differs between lengths."""
    gates = benchmark.mean_gates("paper_ratio", heads, length, 64)
    shape = (1, heads, length)
    q = torch.zeros(1).expand(*shape, 64)  # the ratio depends only on the gates
    delta = benchmark.threshold_of(length, 64).expand(1, heads)
    inputs = AttentionInputs(q, q, q, gates[None, :, None].expand(shape), delta)
    share = count_blocks(inputs.boundary(128, 64), length, length, 128, 64).pruned_ratio.mean()
    assert 0.65 <= share <= 0.70
    assert (gates == -0.2).sum() >= heads * 2 // 3


def test_speed_limit_is_the_fastest_ungated_time_times_the_remaining_work():
    rows = [("cudnn", "no gates", 0.0, 10.0), ("triton", "acp", 0.75, 4.0), ("flex", "acp", 0.7, 9.0)]
    names = ["implementation", "method", "pruned_ratio", "forward_backward_ms"]
    others = {"forward_ms": 1.0, "nominal_forward_backward_tflop": 1.0, "length_tokens": 4096}
    hosts = dict.fromkeys(("search_ms", "gate_gradient_error", "forward_host_ms", "forward_backward_host_ms"))
    for baseline, limit, shown in ((None, 2.5, "cuDNN"), ("fa4", 2.0, "FlashAttention-4")):
        rows += [(baseline, "no gates", 0.0, 8.0)] * (baseline is not None)
        records = pd.DataFrame(rows, columns=names).assign(**others | hosts)
        found = figure_kernel.limit(records)
        assert found.to_dict() == {4096: limit} and found.name == shown


@pytest.mark.parametrize("name", ["ours", "eager"])
def test_correct_kernels_pass_and_wrong_kernels_are_reported(name):
    problem = small_problem()
    call = baselines.available(name, torch.device("cpu"))
    wrong, gate_error = benchmark.check_baseline(call, problem, None, True)
    assert wrong is None and gate_error < 1e-4

    def broken(*_):
        raise RuntimeError("no kernel\nfor this")

    for baseline, reason in (
        (lambda q, k, *others: call(q, k * 1.05, *others), "wrong: out"),
        (
            lambda q, k, v, gates, threshold: call(q, k, v, gates.detach() + 0 * gates, threshold),
            "wrong: its gate gradient is off by 100 %",
        ),
        (broken, "does not run: no kernel"),
    ):
        (line,) = benchmark.time_baselines(problem, "mixed", {"eager": baseline}, 1)
        assert line.startswith(f"eager, exact: {reason}")


def out_of_memory(after):
    """Eager attention that passes its check and fails after some calls."""
    calls = []

    def baseline(*arguments):
        calls.append(1)
        if len(calls) > after:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 48.00 GiB.\nand more")
        return baselines._eager(*arguments)

    return baseline


@pytest.mark.parametrize("after", [0, 1, 3])  # in its check, in forward, in forward + backward
def test_out_of_memory_is_reported_and_memory_released(after, monkeypatch):
    given_back = []
    monkeypatch.setattr(benchmark, "give_memory_back", lambda: given_back.append(sys.exc_info()))
    (line,) = benchmark.time_baselines(small_problem(), "mixed", {"eager": out_of_memory(after)}, 1)
    assert line == "eager, exact: out of memory: CUDA out of memory. Tried to allocate 48.00 GiB."
    assert given_back == [(None, None, None)]  # after the error, which references tensors, is deleted


def test_failure_at_one_length_keeps_earlier_results(tmp_path, monkeypatch):
    def stopped(q, *arguments):
        if q.shape[2] == 256:
            raise KeyboardInterrupt
        return baselines._eager(q, *arguments)

    monkeypatch.setitem(
        baselines.BASELINES, "eager", baselines.BASELINES["eager"]._replace(load=lambda: stopped)
    )
    csv = tmp_path / "times.csv"
    assert main([*SMALL.split(), "--csv", str(csv)]) == 130
    records = pd.read_csv(csv)
    assert records["method"].tolist() == ["acp", "acp auto", "exact", "exact"]
    assert set(records["length_tokens"]) == {128}


def test_flexattention_matches_the_equations():
    """Uncompiled on a CPU, which tests our block mask and decay."""
    q, k, v, log_fgate, _, threshold = small_problem()
    baselines._compiled.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baselines, "_compiled", lambda function: function)
        call = baselines.BASELINES["flex"].load()
    with torch.no_grad():
        expected = baselines._eager(q, k, v, log_fgate, None)
        for delta in (threshold, None):
            torch.testing.assert_close(call(q, k, v, log_fgate, delta), expected, rtol=1e-3, atol=1e-3)


def test_inference_forward_pass(make_suite, monkeypatch, capsys):
    make_suite()
    shapes = forward.read_shapes()
    assert len(shapes) == 86
    few = shapes[(shapes["keys"] == 63) & (shapes["dtype"] == "bfloat16")]  # one shape has a single query
    monkeypatch.setattr(forward, "read_shapes", lambda: few)
    assert main(["--inference", "--device", "cpu", "--repeats", "1", "--suite", "mini"]) == 0
    assert "3 shapes, 0 wrong" in capsys.readouterr().out
    records = read_records(load_suite("mini"), "forward_time")
    assert len(records) == 3 and records["forward_ms"].gt(0).all() and records["error_budgets"].le(1).all()
    inputs = forward.draw(next(few.itertuples()), torch.device("cpu"))
    assert forward.error(torch.zeros_like(inputs[0]), inputs) > 1


def time_exchanges():
    arguments = "--nproc 2 --context-lengths 1024 --heads 3 --head-dim 16 --repeats 1 --device cpu"
    assert main([*arguments.split(), "--csv", "times.csv"]) == 0


def test_context_parallel_ranks_send_fewer_bytes_than_all_keys(tmp_path):
    assert run_on(2, tmp_path, time_exchanges) == [(0, "")] * 2
    records = pd.read_csv(tmp_path / "times.csv").set_index(["exchange", "method"])
    assert (records["difference"] < 1e-5).all()  # all exchanges compute the same
    keys = 2 * 3 * 16 * 4 * 1024  # bytes of k and v
    forward, backward = records["forward_bytes"], records["backward_bytes"]
    assert forward["all-gather"].eq(keys).all() and forward["ring"].eq(keys).all()
    assert forward["suffixes", "exact"] == 0.75 * keys  # the causal part
    assert 0 < forward["suffixes", "acp"] < 0.5 * keys
    assert (backward["ring"] > 2 * forward["ring"]).all()
    assert records.loc["suffixes", "most_received_bytes"]["exact"] == keys / 2 + 3 * 512 * 4
    _, sent = figure_context_parallel.draw(records.reset_index()).axes
    assert [line.get_xdata()[0] < 100 for line in sent.lines] == [True, False, False]
