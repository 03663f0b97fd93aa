"""The contract of every paper module: train, resume, measure, plot, and repeat nothing."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from acp_repro import make, train
from acp_repro.pipeline.suite_file import load_suite
from acp_repro.pipeline.training import trainer
from tests.suites import YAML, run_here, write_suite

RETENTION = """
description: a test
paper: retention
datasets:
  toy: {corpus: cuad, path: toy.jsonl, options: {least: 2}, max_tokens: 24, epochs: 1, batch_examples: 8}
backbones:
  mini:
    {num_hidden_layers: 2, hidden_size: 16, num_attention_heads: 2, intermediate_size: 16, vocab_size: 300}
grid: [{dataset: [toy], backbone: [mini], method: [ar], budget: [0.5], gates: [after_blocks]}]
training: {learning_rate: 1e-2, open_share: 0.2, hard_share: 0.3, dtype: float32, checkpoint_every_seconds: 0}
measure: {examples: 16}
"""
LAP = """
description: a test
paper: lap
data: {corpus: file, path: texts.jsonl, vocabulary: 300}
model: {d_model: 32, d_kv: 8, d_ff: 48, num_layers: 3, num_decoder_layers: 1, num_heads: 2}
pruning: {beta: 1, tau: 1, max_length: 48}
grid: [{compression: [1], training_mask: [hard_concrete]}]
training:
  {steps: 6, batch_texts: 8, learning_rate: 3e-3, lambda_from_step: 1, lambda_ramp_steps: 4, dtype: float32,
   checkpoint_every_seconds: 0}
measure: {scored_texts: 24, batch_texts: 8}
"""


class Paper(NamedTuple):
    yaml: str
    item: str  # with few and fast results
    title: str  # in `make help`
    wrong: tuple[str, str, str]  # an edit of the suite, and its one-line error


PAPERS = {
    "acp": Paper(
        YAML.replace("[-10, null]", "[-10]"),
        "figure4",
        "Pruned ratios of attention heads",
        ("size: [tiny]", "size: [tiny, huge]", "grid[0].size: no size 'huge'"),
    ),
    "retention": Paper(RETENTION, "figureC", "", ("method: [ar]", "method: [arr]", "grid[0].method[0]")),
    "lap": Paper(
        LAP, "figure_savings", "Savings of token removal", ("tau: 1", "tau: 0", "pruning.tau: must be a")
    ),
}


class Killed(BaseException):
    """An exception that the trainer does not catch."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with all corpora. Commands of make run in this process."""
    write_suite(tmp_path)
    rows = [
        {
            "file": f"{name}{i}",
            "type": name,
            "text": f"the {name} number {i} as agreed and signed " * (1 + i % 3),
        }
        for name in ("lease", "sale", "loan")
        for i in range(24)
    ]
    (tmp_path / "toy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sentence = "the food was good bad cold warm and we liked hated it very much so come again never here"
    words = sentence.split()
    texts = [{"text": " ".join(words[i % 7 : i % 7 + 4 + i % 9])} for i in range(120)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(make, "run_words", run_here)
    torch.set_num_threads(1)
    return tmp_path


@pytest.mark.parametrize("name", PAPERS)
def test_paper_module_runs_from_suite_to_figure(name, folder, monkeypatch, capsys):
    paper = PAPERS[name]
    write_suite(folder, paper.yaml)
    (folder / "elsewhere").mkdir()
    external = folder / "elsewhere/external.yaml"  # a suite file may be anywhere
    external.write_text(paper.yaml)
    asked = [paper.item, "--suite", "mini"]

    # Errors are one line.
    before, after, words = paper.wrong
    assert before in paper.yaml
    write_suite(folder, paper.yaml.replace(before, after), "wrong")
    for suite, line in (("minii", "no such suite; experiments/ has mini, wrong"), ("wrong", words)):
        assert make.main([paper.item, "--suite", suite]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: experiments/{suite}.yaml: ") and line in error
        assert error.count("\n") == 1

    # A killed training run resumes and ends bitwise identical to an uninterrupted one.
    (run,) = load_suite("mini").runs
    steps = []

    def killed(*arguments, **options):
        steps.append(None)
        if len(steps) == 4:
            raise Killed
        return train_step(*arguments, **options)

    train_step = trainer.train_step
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(trainer, "train_step", killed)
        make.main(asked)
    assert not run.weights_file.exists()
    capsys.readouterr()
    assert make.main(asked) == 0
    output = capsys.readouterr().out
    assert "continuing from step 3" in output
    assert train.main(["--suite", str(external)]) == 0
    (other,) = load_suite(str(external)).runs
    assert run.weights_file.read_bytes() == other.weights_file.read_bytes()
    assert list(external.parent.iterdir()) == [external]

    # Trained and measured results exist, so a second call only plots.
    suite = load_suite("mini")
    kinds = [suite.paper.metric(name) for name in suite.paper.item(paper.item).metrics]
    assert kinds
    for kind in kinds:
        header, row = kind.path("mini", run.name).read_text().splitlines()[:2]
        assert tuple(header.split(",")) == suite.paper.columns(kind) and row.startswith(f"mini,{run.name},")
    picture = Path("figures/mini", f"{paper.item}.png").resolve()
    assert picture.stat().st_size > 5000 and picture.with_suffix(".pdf").is_file()
    capsys.readouterr()
    assert make.main(asked) == 0
    drawing = f"python -m analysis {paper.item} --suite mini"
    assert capsys.readouterr().out == f"{drawing}\nfigure: {picture}\n"
    assert make.main(["help", "--suite", "mini"]) == 0
    assert f"make {paper.item:<15} {paper.title}" in capsys.readouterr().out
