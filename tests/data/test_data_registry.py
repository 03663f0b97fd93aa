"""A corpus from outside of the tree: one small file with a function, and every paper can name it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from acp_repro.pipeline.data.files import DataError
from acp_repro.pipeline.data.registry import CORPORA, corpus, find_corpus
from acp_repro.pipeline.data.sources import Row

ROOT = Path(__file__).parents[2]
REVIEWS = '''
from acp_repro.pipeline.data.registry import corpus
from acp_repro.pipeline.data.sources import Row


@corpus(path="the path of the reviews", labels="opinions", sides="whether a guest would come again")
def reviews(path: str, least_words: int = 1):
    """Reviews of a guest house, a line each, behind a 1 or a 0."""
    for line in open(path, encoding="utf-8"):
        label, _, text = line.strip().partition(" ")
        if len(text.split()) >= least_words:
            yield Row(text, label)
'''
LAP = """
description: a test
paper: lap
data: {corpus: reviews, path: reviews.txt, options: {least_words: 5}, vocabulary: 300, heldout: 0.3}
grid: [{compression: [1]}]
training: {steps: 3}
"""
RETENTION = """
description: a test
paper: retention
datasets: {opinions: {corpus: reviews, path: reviews.txt}}
backbones: {tiny: {num_hidden_layers: 1, hidden_size: 16, num_attention_heads: 1}}
grid: [{dataset: [opinions], backbone: [tiny], method: [dense]}]
"""
LOOK = """
from acp_repro.pipeline.suite import load_suite
from acp_repro.pipeline.data.labelled import read_labelled
from acp_repro.pipeline.papers.lap.texts import load_texts
from analysis.lap.models import describe

lap, retention = load_suite("lap.yaml"), load_suite("retention.yaml")
texts = load_texts(lap.file.data)
assert len(texts.train) + len(texts.heldout) == 30 and {t.label for t in texts.train} == {0, 1}
assert lap.file.data.sides == "whether a guest would come again"
assert "on texts of reviews.txt" in describe(lap)
(of,) = (run.dataset for run in retention.runs)
found = read_labelled(of.corpus, of.path, **of.options)
assert (found.classes, found.classes_are) == (("0", "1"), "opinions")
assert sum(map(len, found.splits.values())) == 40 and all(found.splits.values())
"""


@pytest.fixture
def run(tmp_path):
    """Runs Python where a package is installed that brings a corpus."""
    site = tmp_path / "site"
    (site / "guests-1.0.dist-info").mkdir(parents=True)
    (site / "guest_reviews.py").write_text(REVIEWS)
    (site / "guests-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: guests\nVersion: 1.0\n")
    points = "[acp_repro.corpora]\nreviews = guest_reviews\nbroken = guest_nothing\n"
    (site / "guests-1.0.dist-info/entry_points.txt").write_text(points)
    lines = [f"{i % 2} the room {i} was {'warm' if i % 4 else ''}" for i in range(40)]
    (tmp_path / "reviews.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / "lap.yaml").write_text(LAP)
    (tmp_path / "retention.yaml").write_text(RETENTION)

    def command(*arguments):
        path = os.pathsep.join([str(site), str(ROOT)])
        environment = {**os.environ, "PYTHONPATH": path, "ACP_REPRO_CACHE": str(tmp_path / "cache")}
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    return command


def test_a_corpus_from_elsewhere_in_every_paper(run):
    pytest.importorskip("transformers", reason="pip install -e '.[lap]'")
    options = "--corpus reviews --path reviews.txt --heldout 0.3"
    code, said = run("-m", "acp_repro.pipeline.data", *options.split())
    assert code == 0 and "corpus      reviews" in said and "documents" in said, said
    code, said = run("-c", LOOK)
    assert code == 0, said


def test_errors_of_a_corpus_from_elsewhere_are_one_line(run):
    for options, words in (
        ("--corpus review", "error: corpus: 'review' is not known; did you mean reviews"),
        ("--corpus zzz", "corpus: 'zzz' is not known; use stdlib, text, .*, reviews or broken"),
        ("--corpus reviews", "error: path: None, but `corpus: reviews` needs the path of the reviews"),
        ("--corpus reviews --path x --options least=3", "options.least: unknown; .* are least_words"),
        ("--corpus facts --options examples=many", "options.examples: 'many' is no number; the default is"),
        ("--corpus broken", "error: corpus: broken: guest_nothing cannot be imported"),
    ):
        code, said = run("-m", "acp_repro.pipeline.data", *options.split())
        assert code == 1 and said.count("\n") == 1 and re.search(words, said), said


def test_one_call_in_a_notebook():
    @corpus()
    def rhymes(verse: str):
        """Two lines."""
        return [Row(f"{verse} cat", group="a"), Row(f"{verse} hat", group="b")]

    try:
        source = find_corpus("rhymes").open(options={"verse": "the"})
        assert [row.text for row in source.rows()] == ["the cat", "the hat"]
        assert [document.data for document in source.documents()] == [b"the cat", b"the hat"]
        other = find_corpus("rhymes").open(options={"verse": "a"})
        assert source.size == 14 and source.identity != other.identity
        with pytest.raises(DataError, match="options.verse: missing, and `corpus: rhymes` needs it"):
            find_corpus("rhymes").open()
    finally:
        del CORPORA["rhymes"]
