"""The chain on a tiny suite: weights -> records -> figure, and what it says when a link is missing."""

import json
import math
import os
import re

import matplotlib.image
import pandas as pd
import pytest
import torch

from acp_repro import train as train_command
from acp_repro.attention.boundary import find_boundary_serial
from acp_repro.attention.decay import cumulative_log_fgate
from acp_repro.common import files
from acp_repro.measure import main as measure
from acp_repro.model.capture import attention_inputs, watch_attention
from acp_repro.pipeline import provenance
from acp_repro.pipeline.errors import RecordError
from acp_repro.pipeline.papers.acp.measure import speed
from acp_repro.pipeline.papers.acp.paper import PAPER
from acp_repro.pipeline.records import read_records, write_records
from acp_repro.pipeline.suite import load_suite
from analysis import drawing
from analysis.acp import statistics
from tests.suites import YAML, records, slow_every_other, trained_run, write_suite

RUN = "pro-tiny-128-acp"


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """A working folder with one trained and measured run."""
    folder = tmp_path_factory.mktemp("chain")
    before = os.getcwd()
    os.chdir(folder)
    write_suite(folder)
    try:
        assert train_command.main(["--suite", "mini", "--run", RUN]) == 0
        for quantity in PAPER.item("figure2").quantities:
            assert measure([quantity, "--suite", "mini"]) == 0
        yield folder
    finally:
        os.chdir(before)


def test_records_carry_their_whole_provenance(chain):
    for quantity in PAPER.item("figure2").quantities:
        table = records(quantity)
        assert tuple(table.columns) == PAPER.columns(PAPER.quantity(quantity))
        assert (table["origin"] == "measured").all() and (table["run"] == RUN).all()
        assert (table["trained_tokens"] == 1536).all()
        for column in ("device", "dtype", "torch_version", "python_version"):
            assert table[column].notna().all()
        # No GPU took part, so there is no ptxas to name: missing, not zero.
        assert table["ptxas_version"].isna().all()


def test_pruned_ratio_is_the_serial_count_over_the_heldout_text(chain):
    trained = trained_run(RUN)
    table = records("pruned_ratio").set_index(["layer", "head"])
    expected = torch.zeros(2, 2, dtype=torch.int64)
    for input_ids, _ in trained.heldout_batches(256, 2):
        for layer, inputs in enumerate(attention_inputs(trained.model, input_ids)):
            c = cumulative_log_fgate(inputs.log_fgate)
            threshold = inputs.threshold.expand(c.shape[:2])
            expected[layer] += find_boundary_serial(c, threshold, 128, 64, 64).sum((0, 2))
    for layer in range(2):
        for head in range(2):
            row = table.loc[(layer, head)]
            assert row["pruned_blocks"] == expected[layer, head]
            assert row["causal_blocks"] == 3 * 2  # two sequences of two blocks a side
    assert (table["measured_tokens"] == 256).all()


def test_watching_leaves_the_model_as_it_was(chain):
    trained = trained_run(RUN)
    ids = torch.randint(0, 257, (1, 64))
    before, seen = trained.model(ids), []
    with watch_attention(trained.model, lambda layer, _: seen.append(layer)):
        assert torch.equal(trained.model(ids), before)
    trained.model(ids)
    assert seen == [0, 1]


def test_a_current_record_is_kept_and_a_stale_one_replaced(chain, capsys):
    path = chain / "results" / "mini" / RUN / "throughput.csv"
    settings = path.with_name("settings.json")
    for when in (path.stat().st_mtime_ns, 0):  # whatever its date
        os.utime(path, ns=(when, when))
        assert measure(["throughput", "--suite", "mini", "--run", RUN]) == 0
        assert "up to date" in capsys.readouterr().out and path.stat().st_mtime_ns == when
    recorded = json.loads(settings.read_text())
    proof = recorded["records"]["throughput.csv"]
    assert proof["weights"] == files.sha256_of(chain / "runs/mini" / RUN / "model/model.safetensors")
    weights, proof["weights"] = proof["weights"], "of others"
    settings.write_text(json.dumps(recorded))
    assert measure(["throughput", "--suite", "mini", "--run", RUN]) == 0
    assert path.stat().st_mtime_ns > 0
    assert json.loads(settings.read_text())["records"]["throughput.csv"]["weights"] == weights


def test_figure2_is_drawn_from_records_alone(chain, capsys, monkeypatch):
    drawing.draw("mini", "figure2")
    folder = chain / "figures" / "mini"
    assert str(folder / "figure2.png") in capsys.readouterr().out
    assert matplotlib.image.imread(folder / "figure2.png").shape[1] > 1500
    assert (folder / "figure2.pdf").stat().st_size > 5000
    caption = (folder / "figure2.md").read_text()
    assert "suite mini" in caption and "1,536 tokens" in caption


@pytest.mark.parametrize(
    ("measure_speed", "columns"),
    [
        (speed.measure_attention_time, ["forward_ms", "backward_ms"]),
        (speed.measure_throughput, ["throughput_tokens_per_s"]),
    ],
)
def test_the_order_favours_neither_method(chain, monkeypatch, measure_speed, columns):
    trained = trained_run(RUN)
    slow_every_other(monkeypatch)
    acp, exact = measure_speed(trained)
    assert [acp[name] for name in columns] == pytest.approx([exact[name] for name in columns])


def test_a_figure_says_which_records_are_of_other_settings(chain, capsys, monkeypatch):
    def noted():
        capsys.readouterr()
        drawing.draw("mini", "figure2")
        found = re.findall(
            rf"`python -m acp_repro.measure (.*) --suite mini --run {RUN}`", capsys.readouterr().err
        )
        return " ".join(found).split()

    def interrupted(suite, run, quantity, *rest, **facts):
        if quantity.name != first:
            raise KeyboardInterrupt
        return write_records(suite, run, quantity, *rest, **facts)

    assert noted() == []
    write_suite(chain, YAML.replace("timing_repeats: 1", "timing_repeats: 2"))
    first, *others = noted()
    assert {first, *others} == set(PAPER.item("figure2").quantities)
    with monkeypatch.context() as patch:
        patch.setattr("acp_repro.pipeline.training.measuring.write_records", interrupted)
        assert measure([first, *others, "--suite", "mini"]) == 130
    assert first not in noted()
    assert measure([first, *others, "--suite", "mini"]) == 0
    assert noted() == []


def test_missing_links_name_the_command_that_makes_them(chain, capsys, monkeypatch):
    assert measure(["throughput", "--suite", "mini", "--run", "pro-tiny-128-exact"]) == 1
    error = capsys.readouterr().err
    assert "python -m acp_repro.train --suite mini --run pro-tiny-128-exact" in error
    suite = load_suite("mini")
    with pytest.raises(
        RecordError, match="for pro-tiny-128-exact; make them with .*--run pro-tiny-128-exact`"
    ):
        read_records(suite, "throughput", suite.runs)
    assert len(read_records(suite, "throughput", suite.runs, partial=True)) == 2
    write_suite(chain, name="other")
    with pytest.raises(RecordError, match="python -m acp_repro.measure pruned_ratio --suite other"):
        drawing.draw("other", "figure2")


def test_a_record_off_the_schema_is_refused(chain):
    run = load_suite("mini").run(RUN)
    facts = {"device": "x", "dtype": "float32", "trained_tokens": 1}
    with pytest.raises(RecordError, match="must have the columns"):
        write_records(load_suite("mini"), run, PAPER.quantity("throughput"), [{"speed": 3}], **facts)
    with pytest.raises(RecordError, match="nothing was measured"):
        write_records(load_suite("mini"), run, PAPER.quantity("throughput"), [], **facts)
    item = {"task": "piqa", "metric": "acc", "item": 7, "value": math.nan, "weight": 1}
    with pytest.raises(RecordError, match="lm_eval_items: value is no finite number.*'item': 7"):
        write_records(load_suite("mini"), run, PAPER.quantity("lm_eval_items"), [item], **facts)
    assert all(column == column.lower() for quantity in PAPER.quantities for column in quantity.columns)


def test_statistics_by_hand():
    run = {"architecture": "pro", "size": "a", "context_length_tokens": 128, "seed": 0, "trained_tokens": 1}
    run["log_pruning_tolerance"] = -10.0
    heads = [{"layer": 0, "head": head, "pruned_blocks": p} for head, p in enumerate((4, 9))]
    blocks = pd.DataFrame([{**run, **head, "causal_blocks": 10} for head in heads])
    assert statistics.pruned_percent(blocks)["percent"].tolist() == [65.0]
    times = pd.DataFrame(
        [
            {**run, "method": "acp", "forward_ms": 1.0, "backward_ms": 2.0},
            {**run, "method": "exact", "forward_ms": 4.0, "backward_ms": 8.0},
        ]
    )
    assert statistics.time_reduction(times)["percent"].tolist() == [75.0]
    speed = pd.DataFrame(
        [
            {**run, "method": "acp", "throughput_tokens_per_s": 150.0},
            {**run, "method": "exact", "throughput_tokens_per_s": 100.0},
        ]
    )
    assert statistics.throughput_gain(speed)["percent"].tolist() == pytest.approx([50.0])
    with pytest.raises(ValueError, match="one of exact"):
        statistics.throughput_gain(speed[:1])


def test_a_commit_that_is_named_goes_before_the_checkout_s(monkeypatch):
    monkeypatch.setenv("ACP_REPRO_COMMIT", "0123456789ab")
    assert provenance.commit.__wrapped__() == "0123456789ab"
