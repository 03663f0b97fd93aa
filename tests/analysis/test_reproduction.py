"""REPRODUCTION.md: as generated now, one line a claim, and the right suite speaks."""

import dataclasses
import itertools
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from acp_repro.pipeline import state
from acp_repro.pipeline.paper import Claim
from acp_repro.pipeline.registry import find_paper, paper_names
from acp_repro.pipeline.suite import load_suite, suite_names
from analysis import drawing, style
from analysis.acp import by_length, claims, figure2, figure3, figure7, models
from analysis.report.gather import paper_words
from analysis.reproduction.__main__ import main
from analysis.reproduction.gather import Line, Section, gather, of_text, strongest
from analysis.reproduction.missing import gaps
from analysis.reproduction.page import render
from analysis.verdict import Status, Word
from tests.analysis import synthetic

ROOT = Path(__file__).parents[2]
TINY = "tiny (1.5k tokens, start of training)"
PAPERS = [find_paper(name) for name in paper_names()]


@pytest.fixture(scope="module")
def sections():
    """What the project's own records say now."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        yield gather()


def test_the_page_is_what_the_records_give(sections):
    assert (ROOT / "REPRODUCTION.md").read_text(encoding="utf-8") == render(sections), (
        "run `make reproduction`"
    )


def test_every_claim_of_every_paper_has_its_line(sections):
    assert [section.paper.name for section in sections] == sorted(paper.name for paper in PAPERS)
    for section in sections:
        paper = section.paper
        claims = [(claim, item) for item in paper.items for claim in item.claims]
        assert [(line.claim, line.item) for line in section.lines] == [
            *claims,
            *((c, None) for c in paper.claims),
        ]
        for line in section.lines:
            assert line.ours and (line.word is Word.UNTOLD or line.records or line.claim.test), line
            assert all(path.is_file() or (ROOT / path).is_file() for _, _, path in line.records)


def test_published_suites_are_those_that_git_takes(monkeypatch):
    monkeypatch.chdir(ROOT)
    ignore = (ROOT / ".gitignore").read_text()
    published = [name for name in suite_names() if load_suite(name).file.published]
    for folder in ("results", "figures"):
        assert sorted(re.findall(rf"^!/{folder}/(.*)/$", ignore, re.M)) == published


def test_published_records_are_of_the_present_settings(monkeypatch):
    """So a fresh clone only draws them: an edit of a suite waits until the runs are measured again."""
    monkeypatch.chdir(ROOT)
    for suite in (load_suite(name) for name in suite_names()):
        if not suite.file.published:
            continue
        for run, quantity in itertools.product(suite.runs, suite.paper.quantities):
            if not quantity.command and quantity.path(suite.name, run.name).is_file():
                assert state.is_current(suite, run, quantity), (run.name, quantity.name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [suite for suite in suite_names() if load_suite(suite).file.published])
def test_published_captions_are_what_is_written_today(name, monkeypatch):
    """Dates do not say so: a clone gives all files one date."""
    from matplotlib import pyplot as plt

    monkeypatch.chdir(ROOT)
    suite = load_suite(name)
    drawn = [item for item in suite.paper.items if item.path(name).with_suffix(".md").is_file()]
    old = []
    for item in drawn:
        found = drawing.find(name, item.name)
        _, caption = item.make(found)
        plt.close("all")
        text = item.path(name).with_suffix(".md").read_text(encoding="utf-8")
        if not text.startswith(caption.strip() + "\n"):
            old.append(f"python -m analysis {item.name} --suite {name}")
    assert drawn and not old, "\n".join(old)


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_claims_of_the_text_are_judged_in_one_way(paper):
    for claim in paper.claims:
        assert bool(claim.untested) + bool(claim.quantities) + bool(claim.test) == 1, claim
        assert bool(claim.holds_if) != bool(claim.untested)
        assert not claim.quantities or claim.check
        assert not claim.refuted or (claim.test and not claim.check)
        assert re.match(r"(Abstract|Sections?|Appendix|Figure)\b", paper_words(claim, paper))
        if claim.quantities:
            assert set(claim.quantities) <= set(paper.item(claim.item).quantities)
        if claim.test:
            file, _, function = claim.test.partition("::")
            assert re.search(rf"^def {function}\(", (ROOT / file).read_text(encoding="utf-8"), re.M), (
                claim.test
            )


@pytest.mark.parametrize("status", Status)
def test_each_finding_has_its_word(status):
    words = {
        Status.MET: "measured in the paper's range",
        Status.BEYOND: "same direction, another size",
        Status.SHORT: "same direction, another size",
        Status.MISSED: "contradicted",
    }
    assert Word.of(status) == words.get(status, "cannot be told")


def evidence(suite: str, status: Status, runs: int, tokens: int) -> Line:
    return Line(
        "",
        Claim("", ""),
        None,
        "",
        Word.of(status),
        status,
        "",
        suite=suite,
        runs=runs,
        settled=runs,
        trained_tokens=tokens,
    )


def test_the_suite_that_can_tell_and_has_most_runs_counts():
    few = evidence("few", Status.MISSED, 1, 400)
    many = evidence("many", Status.MET, 6, 100)
    blind = evidence("blind", Status.UNDECIDED, 9, 900)
    assert strongest([few, many, blind]) is many
    assert strongest([few, blind]) is few
    # Whether the verdict is good plays no part.
    assert (
        strongest([evidence("met", Status.MET, 1, 999), evidence("wide", Status.MISSED, 2, 1)]).suite
        == "wide"
    )
    assert strongest([blind]) is blind
    assert strongest([few, evidence("long", Status.MET, 1, 500)]).suite == "long"
    assert strongest([few, dataclasses.replace(many, settled=0)]) is few
    large = dataclasses.replace(few, largest=1, trained_tokens=1)
    assert strongest([few, large]) is large


@pytest.mark.parametrize(
    ("claim", "word", "ours"),
    [
        (Claim("", "", untested="nothing measures it"), Word.UNTOLD, "nothing measures it"),
        (Claim("", "", "it is so", test="tests/a.py::b"), Word.PROVED, "a test shows it, whatever the model"),
        (Claim("", "", "it is so", test="tests/a.py::b", refuted="a misprint"), Word.MISPRINT, "a misprint"),
        (
            next(claim for claim in claims.TEXT if claim.check is by_length.attention_share),
            Word.PROVED,
            "760M: 16.6 % at 4k, 44.3 % at 16k",
        ),
    ],
)
def test_claims_that_need_no_record(claim, word, ours):
    line = of_text("acp.text.1", claim, find_paper("acp"), [], {})
    assert (line.word, line.ours) == (word, ours)


@pytest.fixture
def mini(tmp_path, monkeypatch):
    """Savings of suite ``mini``, published, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return synthetic.published_savings(tmp_path)


def lines_of(section: Section, check: Callable) -> list:
    return [line for line in section.lines if line.claim.check is check]


def test_lines_say_numbers_scale_and_records(mini):
    (section,) = gather()
    pro, llama = lines_of(section, figure2.pruned_at_longest)
    assert (pro.word, pro.ours) == (Word.MEASURED, f"{TINY}: 70 % at 512")
    assert pro.scale == "mini: tiny at 256, 512; 1.5k tokens; a processor"
    assert [run for _, run, _ in pro.records] == ["pro-tiny-256-acp", "pro-tiny-512-acp"]
    assert (llama.word, llama.records) == (Word.UNTOLD, ())
    assert llama.ours == "no published suite has a run of FoX (LLaMA) with ACP"
    (fast,) = lines_of(section, figure2.attention_sped_up)
    assert fast.ours == f"{TINY}: 2.0 times at 256, 2.5 times at 512" and fast.word is Word.MEASURED
    (gained,) = lines_of(section, figure2.throughput_gained)[:1]
    assert gained.status is Status.BEYOND and gained.word is Word.ANOTHER_SIZE
    assert "| **same direction, another size** |" in render([section])
    (sweep,) = lines_of(section, figure7.default_nearly_optimal)
    assert sweep.ours == "no published records of `epsilon_sweep`; `make figure7 SUITE=mini` makes them"
    headline, row, *_ = (line for line in render([section]).splitlines() if line.startswith("| About 70 %"))
    assert (headline.count(" | "), row.count(" | ")) == (2, 6)
    assert "pruned_ratio of [2 runs](results/mini)" in row
    shutil.rmtree("results/mini/pro-tiny-512-acp")
    assert "[pro-tiny-256-acp](results/mini/pro-tiny-256-acp)" in render(gather())


def test_another_suite_that_says_otherwise_is_named(mini, monkeypatch):
    for folder in ("experiments/mini.yaml", "results/mini"):
        source = Path(folder)
        target = source.with_name(source.name.replace("mini", "other"))
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    slow = Path("results/other/pro-tiny-512-acp")
    shutil.rmtree(slow)  # fewer runs, so it does not speak
    for path in Path("results/other").glob("*/*.csv"):
        state.write_record(path, path.read_bytes().replace(b",5,10,0.5,", b",1,10,0.1,"), 1)
    (section,) = gather()
    line = lines_of(section, figure2.pruned_at_longest)[0]
    assert line.word is Word.MEASURED
    other = f"{TINY}: 10 % at 256 (10 % is below the range of 60 to 80 %)"
    assert line.ours == f"{TINY}: 70 % at 512; suite other: same direction, another size ({other})"


def test_what_another_suite_measured_and_cannot_tell_is_quoted(mini):
    """A pair of trainings that is alone in its suite shows nothing by itself, and yet is a number."""
    for folder in ("experiments/mini.yaml", "results/mini"):
        source = Path(folder)
        target = source.with_name(source.name.replace("mini", "other"))
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    shutil.rmtree("results/other/pro-tiny-512-acp")
    for path in Path("results/other").glob("*/*.csv"):
        state.write_record(path, path.read_bytes(), 1)
    (section,) = gather()
    line = lines_of(section, figure2.savings_grow)[0]
    assert line.word is Word.MEASURED
    shares = f"{TINY}: 50 % at 256{{}}; of what the grid allows: {TINY}: 65 % at 256{{}}"
    other = f"suite other cannot tell: {shares.format('', '')} (one context length only)"
    assert line.ours == f"{shares.format(', 70 % at 512', ', 79 % at 512')}; {other}"


def test_a_pooled_claim_is_judged_once_on_all_suites(mini):
    for length, loss in ((256, 3.001), (512, 3.002)):
        for method, nats in (("acp", loss), ("exact", 3.001)):
            synthetic.write(f"pro-tiny-{length}-{method}", "loss", {"loss_nats": nats})
    other = Path("experiments/other.yaml")
    other.write_text(mini.read_text())
    for method in ("acp", "exact"):
        path = Path(f"results/mini/pro-tiny-256-{method}/loss.csv")
        copy = Path("results/other", *path.parts[2:])
        state.write_record(copy, path.read_bytes().replace(b"mini", b"other"), 1)
    (section,) = gather()
    alone, *_, line = lines_of(section, figure3.losses_match)
    assert alone.claim in claims.FIGURE3 and line.claim in claims.TEXT
    assert "mean of 2 pairs" in alone.ours and "mean of 3 pairs +0.0003 [" in line.ours
    assert (line.word, line.runs, len(line.again.commands)) == (Word.MEASURED, 6, 4)
    page = render([section])
    assert f"\n| {line.claim.claim} | ACP − exact" in page  # a headline
    assert "loss of [6 runs](results)" in page


def test_the_loss_of_each_published_pair_stands_on_the_page(sections, monkeypatch):
    monkeypatch.chdir(ROOT)
    (acp,) = (section for section in sections if section.paper.name == "acp")
    quoted = " ".join(line.ours for line in lines_of(acp, figure3.losses_match))
    published = [suite for suite in map(load_suite, suite_names()) if suite.file.published]
    for suite in (suite for suite in published if suite.paper.name == "acp"):
        loss = suite.paper.quantity("loss")
        for run in (*suite.pairs("pro"), *suite.pairs("llama")):
            name = rf"{run.size_name}( \([^)]*\))?, {style.length_label(run.context_length)}: [+-]0\."
            assert not loss.path(suite.name, run.name).is_file() or re.search(name, quoted), run


def test_what_is_missing_is_one_list(sections, monkeypatch):
    monkeypatch.chdir(ROOT)
    page = (ROOT / "REPRODUCTION.md").read_text(encoding="utf-8")
    listed = page.partition("## What is missing")[2]
    for suite in map(load_suite, suite_names()):
        assert (f"suite `{suite.name}`, " in listed) == (suite.file.published is False)
        assert (f"of suite `{suite.name}` (`not_run` in " in listed) == bool(suite.not_run)
        # A suite that somebody ran says so: it is published, or nobody waits for it.
        assert suite.file.published is not False or not (ROOT / "results" / suite.name).exists(), suite.name
    for line in (line for section in sections for line in section.lines if line.item):
        assert (f"| {line.item.label}: {line.item.title} |" in listed) == (line.status is Status.MISSING)


def test_gaps_of_a_suite_name_what_closes_them(mini):
    text = mini.read_text()
    words = "published: false\nleave_out: [figure2]\n"
    Path("experiments/never.yaml").write_text(text.replace("published: true", words))
    mini.write_text(f"{text}\nnot_run: [pro-tiny-256-exact]")
    (section,) = gather()
    suites = {gap.what.split("`")[1]: gap for gap in gaps(section) if "suite `" in gap.what}
    assert suites["never"].what == "suite `never`, 4 runs: a test"
    assert suites["never"].how == "`make all SUITE=never`"
    words = "1 run of suite `mini` (`not_run` in [its file](experiments/mini.yaml)): pro-tiny-256-exact"
    assert (suites["mini"].what, suites["mini"].how) == (
        words,
        "take them out of `not_run`; `make all SUITE=mini`",
    )
    everything = ", ".join(item.name for item in section.paper.items if not item.extra)
    path = Path("experiments/never.yaml")
    path.write_text(path.read_text().replace("leave_out: [figure2]", f"leave_out: [{everything}]"))
    (section,) = gather()
    never = next(gap for gap in gaps(section) if "`never`" in gap.what)
    assert never.how == "the commands in [its file](experiments/never.yaml)"


def test_nothing_published_is_one_line(mini, capsys):
    mini.write_text(mini.read_text().replace("published: true", ""))
    assert main([]) != 0
    assert capsys.readouterr().err == "error: no suite in experiments/ says `published: true`\n"
    assert not Path("REPRODUCTION.md").exists()


def test_a_models_scale_is_the_papers_only_if_all_of_it_is(monkeypatch):
    monkeypatch.chdir(ROOT)
    for name, expected in (("paper", True), ("h100", False)):
        suite = load_suite(name)
        item = suite.paper.item("figure2")
        assert models.at_paper_scale(item, item.runs(suite)) is expected
    large = [
        run for run in load_suite("paper").runs if run.size_name == "760M" and run.context_length == 8192
    ]
    assert not models.at_paper_scale(item, large)
