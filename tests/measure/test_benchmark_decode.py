"""The benchmark of a decoding step: results, memory and figure."""

import pytest
import torch

from acp_repro.attention import forgetting_attention
from acp_repro.benchmark_decode import main
from acp_repro.papers.acp.paper import PAPER
from acp_repro.pipeline.benchmark import decode as benchmark
from acp_repro.pipeline.records import read_records
from acp_repro.pipeline.suite_file import load_suite
from analysis import drawing
from analysis.acp import figure_decode


def test_results_without_a_run_and_their_figure(make_suite):
    make_suite()
    small = ["--device", "cpu", "--shapes", "1x700", "2x700", "--repeats", "2"]
    assert main([*small, "--suite", "mini"]) == 0
    records = read_records(load_suite("mini"), "decode_time")
    assert tuple(records.columns) == PAPER.columns(PAPER.metric("decode_time")) and len(records) == 8
    attention, model = (records[records["scope"] == scope] for scope in ("attention", "model"))
    assert (attention["output_error"] < 1e-6).all() and model["output_error"].isna().all()
    # 4 heads of 32 in float32, of 11 blocks; 3 are local and keep 3 blocks of -0.2 a token.
    block = 64 * 2 * 32 * 4
    exact = attention.query("method == 'exact' and batch == 2")["kept_bytes"].item()
    acp = attention.query("method == 'acp' and batch == 2")["kept_bytes"].item()
    assert exact == 2 * 4 * 11 * block and 2 * (11 + 3) * block < acp < 2 * (11 + 3 * 7) * block
    assert len(model) == 4
    assert (model["kept_bytes"] <= model["allocated_bytes"]).all()
    kept = model.set_index(["method", "batch"])["kept_bytes"]
    assert kept["acp", 2] < 0.7 * kept["exact", 2]
    figure_decode.make(drawing.find("mini", "figure_decode"))


def test_baseline_receives_the_same_problem():
    problem = benchmark.make_decode_problem(2, 200, 2, 16, "mixed", torch.device("cpu"), torch.float32)
    given = []

    def baseline(q, k, v, log_fgate, threshold):
        out = forgetting_attention(q, k, v, log_fgate, head_first=True, adaptive_threshold=threshold)
        given.append((out, threshold))
        return out

    records = benchmark.measure_attention(problem, "mixed", 1, {"baseline": baseline})
    assert [one["method"] for one in records if one["implementation"] == "baseline"] == ["acp", "exact"]
    for out, threshold in given:
        step = problem.step("exact" if threshold is None else "acp")
        torch.testing.assert_close(out, step, rtol=1e-4, atol=1e-4)


def test_incorrect_kernels_are_not_timed(monkeypatch):
    problem = benchmark.make_decode_problem(1, 200, 2, 16, "mixed", torch.device("cpu"), torch.float32)
    assert benchmark.output_error(problem, "acp") < 1e-6
    monkeypatch.setattr(benchmark, "decode_reference", lambda q, *_: torch.ones_like(q))
    with pytest.raises(AssertionError, match="an error of"):
        benchmark.measure_attention(problem, "mixed", 1, {})
