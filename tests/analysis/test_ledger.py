"""The ledger: one row per claim, the deciding suite, and committed pages that match the rows."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pandas as pd
import pytest
import torch

from acp_repro.pipeline import freshness
from acp_repro.pipeline.paper_registry import find_paper
from acp_repro.pipeline.suite_file import load_suite, suite_names
from analysis import ledger
from analysis.acp import naming
from analysis.reproduction import claim
from analysis.reproduction.__main__ import write_pages
from analysis.rerun import duration
from analysis.verdict import Verdict, Word
from tests.analysis import synthetic

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rows():
    """The committed ledger rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        yield ledger.read()


def test_committed_pages_match_the_rows(rows, monkeypatch, tmp_path):
    for name in ("experiments", "results"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "README.md", tmp_path)
    monkeypatch.chdir(tmp_path)
    write_pages(rows, ledger.read_models(ROOT / "claims.json"))
    for page in (
        "README.md",
        "REPRODUCTION.md",
        "docs/trained-models.md",
        *(f"docs/claims/{n}.md" for n in ("acp", "lap", "retention")),
    ):
        assert (ROOT / page).read_text("utf-8") == Path(page).read_text("utf-8"), "run `make reproduction`"
    plots = re.findall(r"\(plots/([^)]+)\)", Path("docs/claims/retention.md").read_text("utf-8"))
    assert plots and all((ROOT / "docs/claims/plots" / name).is_file() for name in plots)


def test_every_claim_has_a_row_with_evidence_and_a_short_answer(rows, monkeypatch):
    monkeypatch.chdir(ROOT)
    papers = ("acp", "lap", "retention")
    assert list(rows) == [id for name in papers for id, *_ in ledger.numbered(find_paper(name))]
    bare = {row.verdict for row in rows.values() if not (row.records or row.test)}
    assert bare <= {Word.INCONCLUSIVE, Word.ERRATUM, Word.PROVED}
    files = {path for row in rows.values() for path in row.records}
    assert len(files) > 100 and all(Path(path).is_file() for path in files)
    tests = {row.test for row in rows.values()} - {""}
    assert len(tests) > 5
    for row in rows.values():
        assert row.ours and len(row.ours) <= ledger.SHORT and "…" not in row.ours, row.id
        assert "training time not recorded" not in row.cost
        assert (row.criterion_before_run is None) == (not row.records)
    for test in tests:
        file, _, function = test.partition("::")
        assert re.search(rf"^def {function}\(", Path(file).read_text("utf-8"), re.M), test


def test_rows_match_the_committed_results(monkeypatch):
    monkeypatch.chdir(ROOT)
    published = [name for name in suite_names() if load_suite(name).file.published]
    assert [name for name in published if not ledger.is_judged(name)] == [], "run `make reproduction`"
    ignore = Path(".gitignore").read_text()
    for folder in ("results", "figures"):
        assert sorted(re.findall(rf"^!/{folder}/(.*)/$", ignore, re.M)) == published != []


def judge(id: str) -> ledger.Row:
    (row,) = ledger.judge_all(id)
    return row


@pytest.fixture
def mini(tmp_path, monkeypatch):
    """Published savings of suite ``mini`` in a separate folder."""
    monkeypatch.chdir(tmp_path)
    return synthetic.published_savings(tmp_path)


def another(name: str, *pairs: tuple[bytes, bytes]) -> None:
    """Suite ``mini`` under another name, with other results at one context only."""
    shutil.copy("experiments/mini.yaml", f"experiments/{name}.yaml")
    shutil.copytree("results/mini", f"results/{name}")
    shutil.rmtree(f"results/{name}/pro-tiny-512-acp")
    for path in Path(f"results/{name}").glob("*/*.csv"):
        content = path.read_bytes()
        for old, new in pairs:
            content = content.replace(old, new)
        freshness.write_record(path, content, 1)


def took(gpu_seconds: float | None, seconds: float = 1, suite: str = "mini") -> None:
    """Records the training time of each run of a suite on one H100 and the time of each measurement."""
    paths = list(Path("results", suite).glob("*/settings.json"))
    assert paths
    for path in paths:
        content = json.loads(path.read_text())
        content["trained"] = gpu_seconds and {"gpu_seconds": gpu_seconds, "device": "H"}
        for record in content["records"].values():
            record["seconds"] = seconds
        path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("id", "word", "ours", "n"),
    [
        ("acp.figure2.1", Word.SMALL_SCALE, "70 %", 1),
        ("acp.figure2.2", Word.SMALL_SCALE, "50 % at 256, 70 % at 512", 2),
        ("acp.figure2.4", Word.MAGNITUDE, "100 to 150 %", 2),
        ("acp.figure7.2", Word.INCONCLUSIVE, "", None),
        ("acp.figure10.1", Word.INCONCLUSIVE, "", None),
        ("acp.text.34", Word.INCONCLUSIVE, "", None),
        ("acp.text.5", Word.ERRATUM, "exp(2U + $D_{ij}$)", None),
        ("acp.text.6", Word.PROVED, "", None),
        ("acp.text.9", Word.TESTED, "", None),
    ],
)
def test_ledger_rows(mini, id, word, ours, n):
    row = judge(id)
    assert (row.verdict, row.n) == (word, n) and ours in row.ours


def test_suite_nearest_to_the_paper_decides_and_others_are_quoted(mini):
    another("other", (b",5,10,0.5,", b",1,10,0.1,"))
    share, growth = judge("acp.figure2.1"), judge("acp.figure2.2")
    assert (share.suite, share.verdict) == (growth.suite, growth.verdict) == ("mini", Word.SMALL_SCALE)
    ((name, verdict, numbers),) = share.others
    assert (name, verdict) == ("other", Word.MAGNITUDE) and "10 % at 256" in numbers
    assert [one[1] for one in growth.others] == [Word.INCONCLUSIVE]  # of one context
    another("same", (b",5,10,0.5,", b",7,10,0.7,"))  # finds what mini finds, and need not be quoted
    assert judge("acp.figure2.1").others == share.others
    shutil.rmtree("results/mini/pro-tiny-512-acp")
    assert judge("acp.figure2.2").verdict is Word.INCONCLUSIVE
    # With equal numbers of runs, the longer context is nearer to the paper.
    shutil.copytree("results/mini", "results/near")
    shutil.copy("experiments/mini.yaml", "experiments/near.yaml")
    shutil.rmtree("results/near/pro-tiny-256-acp")
    synthetic.write_savings(suite="near")
    shutil.rmtree("results/near/pro-tiny-256-acp")
    assert judge("acp.figure2.1").suite == "near"


def test_cost_is_time_on_a_gpu(mini):
    took(898)
    row = judge("acp.figure2.1")  # two training runs, two records
    assert row.devices == ["H"]
    assert row.cost == "about 30 min of training on an H, about 2 s of measuring"
    assert duration(5580) == "about 1 h 33 min"


def test_theorems_are_proved_and_small_runs_are_marked_as_such(mini, monkeypatch):
    monkeypatch.setattr(naming, "at_paper_scale", lambda item, runs: True)
    row = judge("acp.figure2.1")
    assert row.verdict is Word.REPRODUCED and "(the paper's scale)" in row.scale
    table = pd.DataFrame({"swept_log_pruning_tolerance": [-10.0], "largest_pruned_mass": [1e-9]})
    claim = next(claim for id, claim, _ in ledger.numbered(find_paper("acp")) if id == "acp.figure7.4")
    assert ledger._word(claim, claim.check(table), ()) is Word.PROVED  # a theorem


def test_the_paper_has_the_scale_of_every_run_that_decides():
    item = find_paper("acp").item("figure2")
    large, small = (
        SimpleNamespace(size=naming.paper_size(name), context_length=length)
        for name, length in (("760M", 16384), ("125M", 4096))
    )
    size = SimpleNamespace(non_embedding=small.size.non_embedding, tokens=10**8)
    young = SimpleNamespace(size=size, context_length=4096)
    short = SimpleNamespace(size=small.size, context_length=512)
    assert naming.at_paper_scale(item, [large, small])
    for runs in ([small], [large, young], [large, short]):
        assert not naming.at_paper_scale(item, runs)


def test_a_measurement_that_the_paper_does_not_claim_reproduces_nothing():
    claims = {id: claim for id, claim, _ in ledger.numbered(find_paper("retention"))}
    found = Verdict.of(True, "")
    assert ledger._word(claims["retention.tableI.1"], found, ()) is Word.INCONCLUSIVE


def test_criterion_is_first_only_if_older_than_every_measurement(monkeypatch):
    times = [{"commit": name, "time": time} for name, time in (("a", "1"), ("b", "2"), ("c", "3"))]
    criteria = [{"claim": "x.y.1", "commit": "b"}]
    monkeypatch.setattr(ledger, "_history", {"commits": times, "criteria": criteria}.__getitem__)

    def first(id, *commits):
        return ledger._criterion_first(id, [SimpleNamespace(tables={"m": pd.DataFrame({"commit": commits})})])

    assert [first("x.y.1", "b", "c"), first("x.y.1", "a", "c"), first("x.y.2", "c")] == [True, False, False]
    assert first("x.y.1", "unknown") is False
    assert ledger._criterion_first("x.y.1", []) is None


def test_git_history_dates_every_changed_criterion(rows, monkeypatch):
    monkeypatch.chdir(ROOT)
    asked = ["git", "show", "-s", "--format=%ct"]
    known = {row["commit"]: row["time"] for row in ledger._history("commits")}
    assert {row["commit"] for row in ledger._history("criteria")} <= set(known)
    found = subprocess.run([*asked, *known], capture_output=True, text=True)
    if found.returncode:
        pytest.skip("the clone is shallow: git fetch --unshallow")
    assert found.stdout.split() == list(known.values())
    assert {row["claim"] for row in ledger._history("changed_criteria")} <= set(rows)
    words = {word.value for word in Word} | {""}
    assert {row[side] for row in ledger._history("changed_criteria") for side in ("before", "after")} <= words


def test_claims_json_follows_its_schema_and_loads_without_torch(rows):
    schema = json.loads((ROOT / "docs/claims/claims.schema.json").read_text("utf-8"))
    jsonschema.validate(json.loads((ROOT / "claims.json").read_text("utf-8")), schema)
    for row in json.loads((ROOT / "claims.json").read_text("utf-8"))["pretrained"]:
        card = (ROOT / "pretrained" / row["folder"] / "README.md").read_text("utf-8")
        _, front, text = card.split("---\n", 2)
        assert f"value: {float(row['value'])}\n" in front and row["value"] in text
    code = "import sys; from acp_repro import claims; print(len(claims.load()), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == [str(len(rows)), "False"]


def test_ledger_uses_the_results_as_measured(mini):
    synthetic.write("pro-tiny-256-acp", "loss", {"loss_nats": 2.5})
    took(300)
    first, second = ledger.models()
    assert (first["run"], first["pruned_percent"], first["gpu_minutes"]) == ("pro-tiny-256-acp", 50.0, 5.0)
    assert first["loss_nats"] == 2.5 and second["pruned_percent"] == 70.0 and "loss_nats" not in second
    ledger.write(ledger.judge_all("acp.figure2.1"))
    assert ledger.is_judged("mini")
    record = Path("results/mini/pro-tiny-512-acp/pruned_ratio.csv")
    freshness.write_record(record, record.read_bytes().replace(b",7,10,0.7,", b",1,10,0.1,"), 1)
    assert not ledger.is_judged("mini")


def test_pooled_claim_is_judged_once_on_all_suites(mini):
    for length, loss in ((256, 3.001), (512, 3.002)):
        for method, nats in (("acp", loss), ("exact", 3.0)):
            synthetic.write(f"pro-tiny-{length}-{method}", "loss", {"loss_nats": nats})
    took(10)
    another("other", (b"mini", b"other"))
    row = judge("acp.text.19")
    assert (row.n, row.unit) == (3, "pair")
    assert {Path(path).parts[1] for path in row.records} == {"mini", "other"} and len(row.commands) == 4


@pytest.fixture
def again(mini, monkeypatch):
    """``make claim`` on suite ``mini`` with a ledger; commands are recorded instead of executed."""
    monkeypatch.setattr(ledger, "models", list)
    ledger.write(ledger.judge_all())
    called = []

    def run(words):
        called.append(words.removeprefix("python "))
        record = Path("results/mini/pro-tiny-512-acp/pruned_ratio.csv")
        freshness.write_record(record, record.read_bytes().replace(b",7,10,0.7,", b",1,10,0.1,"), 1)
        return 0

    monkeypatch.setattr(claim, "run_words", run)
    return called


def test_make_claim_retrains_remeasures_and_rejudges(again, monkeypatch, capsys):
    assert claim.main(["acp.figure2.1"]) == 0
    runs = "--run pro-tiny-256-acp --run pro-tiny-512-acp"
    assert again == [
        f"-m acp_repro.train --suite mini {runs}",
        f"-m acp_repro.measure pruned_ratio --suite mini {runs} --force",
    ]
    said = capsys.readouterr().out
    assert "50 % at 256, 70 % at 512" in said and "50 % at 256, 10 % at 512" in said
    assert claim.main(["acp.text.4"]) == 0 and again[-1].startswith("-m pytest -q tests/attention/")
    monkeypatch.setattr(claim, "run_words", lambda words: 3)
    assert claim.main(["acp.figure2.1"]) == 3
    assert claim.main([]) == 0 and "acp.figure2.1 " in capsys.readouterr().out


def test_small_suite_is_compared_with_its_reference_results(again, monkeypatch, capsys):
    took(90)
    shutil.copytree("results/mini", "reference/results/mini")
    assert claim.main(["acp.figure2.1", "--suite", "mini"]) == 0
    said = capsys.readouterr().out
    assert re.search("reference: reproduced at small scale: .*70 % at 512", said)
    assert re.search("new: different magnitude: .*10 % at 512", said)
    assert "  pruned_blocks: mean 3, reference 6; at most 8.6e-01 of the largest value apart" in said
    shutil.rmtree("results/mini")  # as in a fresh clone: everything must be computed at a known cost
    monkeypatch.setattr(claim, "run_words", lambda words: 3)
    assert claim.main(["acp.figure2.1", "--suite", "mini"]) == 3
    assert "cost: about 3 min of training on an H, about 2 s of measuring" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["acp.figure2"], "the ID 'acp.figure2'; did you mean acp.figure2.1, acp.figure2.2, acp.figure2.3"),
        (["acp.figure2.1", "--suite", "none"], "experiments/none.yaml: no such suite"),
        (["acp.text.1"], "nothing measures it: no suite has a run of FoX (Pro) and RoPE, both exact"),
        (["acp.text.34"], "nothing measures it: no suite has records of `same_weights`"),
        (["acp.figure11.1"], "or name a suite to measure it on: SUITE=name"),
        (["acp.figure10.1", "--suite", "mini"], "suite mini cannot show acp.figure10.1"),
    ],
)
def test_unmeasurable_claim_is_reported_in_one_line(again, capsys, arguments, words):
    assert claim.main(arguments) != 0
    error = capsys.readouterr().err
    assert error.startswith("error: ") and words in error and error.count("\n") == 1


def test_gpu_training_does_not_start_on_a_cpu(rows, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(claim, "choose_device", lambda _: torch.device("cpu"))
    assert claim.main(["acp.figure2.1"]) == 2
