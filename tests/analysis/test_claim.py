"""`make claim`: a line of REPRODUCTION.md, measured again, with what it costs."""

import itertools
import shlex
from pathlib import Path

import pytest
import torch

from acp_repro.pipeline import state
from acp_repro.pipeline.registry import find_paper
from acp_repro.pipeline.suite import load_suite
from analysis.report.gather import gather as gather_report
from analysis.report.page import render
from analysis.reproduction import claim
from analysis.reproduction.again import Again, by_records
from analysis.reproduction.gather import gather, numbered
from tests.analysis import synthetic

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def lines():
    """Those of the project's own records, by their ID."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        yield {line.id: line for section in gather() for line in section.lines}


def test_most_claims_of_acp_are_quick_to_measure_again(lines):
    own = [line for id, line in lines.items() if id.startswith("acp.")]
    quick = [line for line in own if line.again and line.again.quick]
    assert len(own) == 64
    assert len(quick) >= 40
    assert sum(not line.again.suite for line in quick) >= 20  # on two CPU cores


def test_each_command_is_one_that_there_is(lines):
    """The parts of the commands are names that their commands know."""
    for line in lines.values():
        for words in line.again.commands if line.again else ():
            python, dash, module, *rest = shlex.split(words)
            assert (python, dash) == ("python", "-m")
            if module == "pytest":
                assert (ROOT / rest[-1].partition("::")[0]).is_file()
                continue
            suite = load_suite(rest[rest.index("--suite") + 1])
            for option, value in itertools.pairwise(rest):
                assert option != "--run" or suite.run(value)
            if module == "acp_repro.measure":
                assert all(suite.paper.quantity(name) for name in rest[: rest.index("--suite")])


def test_ids_are_unique_and_count_from_one():
    ids = [id for id, _, _ in numbered(find_paper("acp"))]
    assert len(set(ids)) == len(ids)
    assert {"acp.figure2.1", "acp.figureA6.1", "acp.text.1"} <= set(ids)
    assert "acp.figureA6.2" not in ids  # a control


@pytest.mark.parametrize(
    ("again", "words", "quick"),
    [
        (Again(("",)), "a test, under a minute on two CPU cores", True),
        (Again(("",), "s"), "trains nothing, measures in a time not recorded", True),
        (
            Again(("",), "s", 921.4, 0, 0, ("a GPU",)),
            "trains 921 s (a GPU), then measures in a time not recorded",
            True,
        ),
        (Again(("",), "s", 1700, 0, 200, ("a GPU",)), "trains 1,700 s (a GPU), then measures 200 s", False),
        (
            Again(("",), "s", 9, 2, 0, ("a GPU",)),
            "trains 9 s (a GPU) and 2 runs of no recorded time, then measures in a time not recorded",
            False,
        ),
    ],
)
def test_cost_in_words(again, words, quick):
    assert (again.cost, again.quick) == (words, quick)


@pytest.fixture
def mini(tmp_path, monkeypatch):
    """Savings of suite ``mini``, published, in a folder of its own; commands are noted and not run."""
    monkeypatch.chdir(tmp_path)
    synthetic.published_savings(tmp_path)
    called = []

    def run(words):
        called.append(words.removeprefix("python "))
        record = Path("results/mini/pro-tiny-512-acp/pruned_ratio.csv")
        state.write_record(record, record.read_bytes().replace(b",7,10,0.7,", b",1,10,0.1,"), 1)
        return 0

    monkeypatch.setattr(claim, "run_words", run)
    return called


def test_a_claim_is_trained_measured_and_judged_again(mini, capsys):
    assert claim.main(["acp.figure2.1"]) == 0
    runs = "--run pro-tiny-256-acp --run pro-tiny-512-acp"
    assert mini == [
        f"-m acp_repro.train --suite mini {runs}",
        f"-m acp_repro.measure pruned_ratio --suite mini {runs} --again",
    ]
    said = capsys.readouterr().out
    assert "old: measured in the paper's range: tiny (1.5k tokens, start of training): 70 % at 512" in said
    assert "cost: trains 2 runs of no recorded time, then measures in a time not recorded" in said
    assert "new: same direction, another size: tiny (1.5k tokens, start of training): 10 % at 512" in said
    assert "git diff results/mini" in said


def test_a_command_that_fails_ends_it(mini, monkeypatch, capsys):
    monkeypatch.setattr(claim, "run_words", lambda words: 3)
    assert claim.main(["acp.figure2.1"]) == 3
    assert "new:" not in capsys.readouterr().out


def test_a_claim_with_a_test_runs_it(mini, capsys):
    assert claim.main(["acp.text.4"]) == 0
    (ran,) = mini
    assert ran.startswith("-m pytest -q tests/attention/test_paper_text.py::")
    assert "new: proved or computed: the test passes" in capsys.readouterr().out


def test_a_gpu_training_does_not_begin_on_a_cpu(mini, monkeypatch, capsys):
    again = Again(("python -m acp_repro.train",), "mini", 900.0, devices=("NVIDIA H200",))
    monkeypatch.setattr("analysis.reproduction.gather.by_records", lambda *_: again)
    monkeypatch.setattr(claim, "choose_device", lambda _: torch.device("cpu"))
    assert claim.main(["acp.figure2.1"]) == 2
    assert "no GPU is here to train that" in capsys.readouterr().err and not mini
    monkeypatch.setattr(claim, "choose_device", lambda _: torch.device("cuda"))
    assert claim.main(["acp.figure2.1"]) == 0 and mini


def test_without_an_id_all_are_listed(mini, capsys):
    assert claim.main([]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == 64
    assert "a test, under a minute on two CPU cores" in next(x for x in listed if x.startswith("acp.text.4 "))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["acp.figure2"], "the ID 'acp.figure2'; did you mean acp.figure2.1, acp.figure2.2, acp.figure2.3"),
        (["lap.figure_dynamics.1"], "no suite of its paper in experiments/ says `published: true`"),
        (["acp.figure2.1", "--suite", "none"], "experiments/none.yaml: no such suite"),
        (["acp.text.1"], "nothing measures it: no suite trains a Transformer with RoPE"),
        (["acp.figure11.1"], "or name a suite to measure it on: SUITE=name"),
        (["acp.figure10.1", "--suite", "mini"], "suite mini cannot show acp.figure10.1"),
    ],
)
def test_what_cannot_be_measured_is_one_line(mini, capsys, arguments, words):
    assert claim.main(arguments) != 0
    error = capsys.readouterr().err
    assert error.startswith("error: ") and words in error and error.count("\n") == 1


def test_seconds_come_from_beside_the_records(monkeypatch):
    monkeypatch.chdir(ROOT)
    suite = load_suite("h200-long")
    item = suite.paper.item("figure4")
    again = by_records(item.claims[0], item, suite, item.runs(suite))
    assert (round(again.training_seconds), again.untimed) == (921, 0)
    assert again.devices == ("NVIDIA H200",)


def test_the_report_names_the_same_ids(mini):
    page = render(gather_report("mini"))
    suite = load_suite("mini")
    for id, _, item in numbered(suite.paper):
        if item and item.name in ("figure2", "figure7"):
            assert f"`make claim ID={id} SUITE=mini`" in page
