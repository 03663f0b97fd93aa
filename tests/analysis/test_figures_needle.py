"""The figures of the needle test (3 right, 9, 11 right, A6) and A5 from synthetic results."""

import itertools

import numpy as np
import pandas as pd
import pytest

from acp_repro.pipeline.records import read_records
from acp_repro.pipeline.suite_file import load_suite
from analysis.acp import figure3_right, figureA5, tableA1, training_logs
from analysis.verdict import Word
from tests.analysis import synthetic

GRID = """grid:
  - {architecture: [pro, llama], size: [tiny], context_length: [256, 512], log_pruning_tolerance: [-10, null]}
  - {size: [tiny], context_length: [512], log_pruning_tolerance: [-10, null], needle_fraction: [0.1]}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    synthetic.two_lengths(tmp_path)
    path = tmp_path / "experiments" / "mini.yaml"
    text = path.read_text()
    start, end = text.index("grid:"), text.index("training:")
    path.write_text(text[:start] + GRID + text[end:])
    return path


def write_needle(run: str, recall, share: float = 0.0, samples: int = 3) -> list:
    """``recall(sample, depth)`` at 3 lengths and 3 depths; the answer is likelier by ten times that."""
    length = load_suite("mini").run(run).context_length
    rows = [
        {
            "method": "exact" if "exact" in run else "acp",
            "mode": "easy",
            "haystack": "held-out text",
            "needle_fraction": share,
            "evaluated_length_tokens": evaluated,
            "depth": depth,
            "haystack_sample": sample,
            "answer_tokens": 14,
            "answer_recall": recall(sample, depth),
            "exact_match": 0,
            "answer_log_likelihood_nats": 10 * recall(sample, depth) - 80,
            "answer_log_likelihood_without_needle_nats": -80,
            "answer": "eat",
        }
        for evaluated, depth, sample in itertools.product(
            (length // 4, length // 2, length), (0.0, 0.5, 1.0), range(samples)
        )
    ]
    synthetic.write(run, "needle", *rows)
    return rows


def needle_records(*runs: str):
    suite = load_suite("mini")
    return read_records(suite, "needle", [suite.run(name) for name in runs])


def pair(
    length: int = 512, acp=lambda s, d: 0.9, exact=lambda s, d: 0.9, suffix: str = "", share: float = 0.0
):
    names = [f"pro-tiny-{length}-{method}{suffix}" for method in ("acp", "exact")]
    for name, recall in zip(names, (acp, exact), strict=True):
        write_needle(name, recall, share=share)
    return needle_records(*names)


@pytest.mark.parametrize(
    ("name", "length", "suffix"), [("figure9", 256, ""), ("figureA6", 512, "-needles10")]
)
def test_heat_maps_of_a_pair(name, length, suffix):
    share = 0.1 if suffix else 0.0
    pair(length, lambda s, d: 0.5 + 0.1 * s, lambda s, d: 0.6 + 0.1 * s + 0.1 * d, suffix, share)
    caption = synthetic.draw(name)
    for number in ("60 %", "75 %", "-15.0 points [-15.0, -15.0]", "+6.0", "+7.5 nats", "-1.50"):
        assert number in caption


def test_table_a1_has_all_pairs():
    for method, recall in (("acp", 0.5), ("exact", 0.9)):
        write_needle(f"pro-tiny-512-{method}-needles10", lambda s, d, recall=recall: recall, share=0.1)
    records = needle_records(*(run.name for run in load_suite("mini").trained_with_needles))
    before = len(pd.read_csv(tableA1.HISTORY))
    table = tableA1.pairs(records)
    assert len(table) == before + 1 and table["difference_nats"].iloc[-1] == pytest.approx(4.0)
    known = records.assign(commit=table["kernel_commit"].iloc[0])
    assert len(tableA1.pairs(known)) == before  # the file already contains its results


@pytest.mark.parametrize(
    ("acp", "exact", "status"),
    [
        (lambda s, d: 0.88 + 0.02 * (s == 1), lambda s, d: 0.9 - 0.01 * (s == 2), Word.REPRODUCED),
        # The interval contains 0 and -17 points, so the absence of damage is not shown.
        (lambda s, d: 0.8 + 0.1 * (s == 1), lambda s, d: 0.9 - 0.05 * (s == 2), Word.INCONCLUSIVE),
        (lambda s, d: 0.5 + 0.01 * s, lambda s, d: 0.9, Word.CONTRADICTED),
        (lambda s, d: 0.9, lambda s, d: 0.5, Word.REPRODUCED),
        (lambda s, d: 0.0, lambda s, d: 0.1, Word.INCONCLUSIVE),
    ],
)
def test_verdict_on_retrieval(acp, exact, status):
    trained_apart = pair(512, acp, exact)
    assert figure3_right.retrieval_kept(trained_apart).word == Word.INCONCLUSIVE
    verdict = figure3_right.retrieval_kept(trained_apart.assign(run="one model"))
    assert verdict.word == status


def test_one_haystack_is_inconclusive():
    records = pair(512, lambda s, d: 0.0, lambda s, d: 0.85)
    alone = records[records["haystack_sample"] == 0].assign(run="one model")
    assert figure3_right.retrieval_kept(alone).word == Word.INCONCLUSIVE


def write_logs(looks: int = 20, last_tokens: float = 1e8) -> pd.DataFrame:
    tokens = np.linspace(last_tokens / looks, last_tokens, looks)
    for method in ("acp", "exact"):
        layers = (0, 1) if method == "acp" else (None,)
        rows = [
            {
                "step": i,
                "tokens": int(n),
                "layer": layer,
                "pruned_ratio": None if layer is None else 1.6 - 0.04 * np.log(n) + 0.02 * layer,
                "loss_nats": 20 / np.log(n),
                "averaged_steps": 1,
                "training_device": "a chip",
                "throughput_tokens_per_s": 1e5,
            }
            for i, n in enumerate(tokens)
            for layer in layers
        ]
        synthetic.write(f"pro-tiny-512-{method}", "training_log", *rows)
    suite = load_suite("mini")
    return read_records(suite, "training_log", suite.longest_trained)


def test_figure_a5():
    records = write_logs()
    caption = synthetic.draw("figureA5")
    end = 100 * (1.61 - 0.04 * np.log(1e8))
    assert f"is {end:.0f} % after 100M" in caption
    assert figureA5.epoch_ends(records, None) == []  # unknown for this corpus
    assert figureA5.epoch_ends(records, 30_000_000) == [30_000_000, 60_000_000, 90_000_000]


def test_differently_thinned_logs_are_compared_over_common_steps():
    every_step = 9 * np.exp(-np.arange(96) / 20)
    rows = [
        {"run": run, "step": end - 1, "tokens": 1000 * end, "layer": layer, "averaged_steps": end - start}
        | {"loss_nats": every_step[start:end].mean(), "log_pruning_tolerance": tolerance}
        for run, ends, layers, tolerance in (
            ("acp", [1, 24, 48, 72, 96], (0, 1), -10.0),  # evaluated at the first step, as in short runs
            ("exact", range(6, 97, 6), (None,), np.nan),
        )
        for start, end in itertools.pairwise([0, *ends])
        for layer in layers
    ]
    table = training_logs.losses(pd.DataFrame(rows)).pivot(index="tokens", columns="run", values="loss_nats")
    assert list(table.index) == [24_000, 48_000, 72_000, 96_000]
    np.testing.assert_allclose(table["acp"], table["exact"])
    np.testing.assert_allclose(table["acp"], every_step.reshape(4, 24).mean(1))
    stopped = pd.DataFrame([row for row in rows if row["run"] == "acp" or row["step"] < 60])
    assert training_logs.losses(stopped).groupby("run").size().to_dict() == {"acp": 4, "exact": 2}
