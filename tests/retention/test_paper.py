"""Adaptive Retention through the pipeline: suite file, training and resume, results, tables and figures."""

import dataclasses
import json
import math
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("sklearn", reason="pip install -e '.[retention]'")

import torch
from safetensors.torch import load_file

from acp_repro import measure
from acp_repro.papers.retention import backbones, simulations
from acp_repro.papers.retention import trained as trained_module
from acp_repro.papers.retention.measure import budgets
from acp_repro.papers.retention.measure.budgets import measure_slackness
from acp_repro.papers.retention.measure.speed import measure_speed
from acp_repro.papers.retention.paper import PAPER
from acp_repro.papers.retention.schema import RIGHT, SMALLEST_VOCABULARY, BackboneConfig
from acp_repro.papers.retention.task import load_model
from acp_repro.papers.retention.texts import Texts, name_inputs, train_tokenizer
from acp_repro.papers.retention.trained import SCORES, TrainedRetention, _best_span, normalized
from acp_repro.pipeline.data.files import DataError
from acp_repro.pipeline.errors import SuiteError
from acp_repro.pipeline.planner import needs
from acp_repro.pipeline.records import read_records
from acp_repro.pipeline.suite_file import load_suite
from acp_repro.pipeline.training.task import Trained
from acp_repro.pipeline.training.trainer import train
from acp_repro.retention import RetentionConfig, retain
from acp_repro.retention.budget import floor_share
from acp_repro.retention.config import MODEL_TYPES
from analysis import drawing
from analysis.report.gather import gather
from analysis.verdict import Word
from scripts import publish

CPU = torch.device("cpu")
YAML = """
description: a test
paper: retention
datasets:
  toy: {corpus: cuad, path: toy.jsonl, options: {least: 2}, max_tokens: 24, epochs: 2, batch_examples: 8,
        scores: [accuracy, macro_f1]}
  asked: {corpus: qasper, path: asked.jsonl, max_tokens: 32, epochs: 2, batch_examples: 8,
          scores: [f1, exact_match]}
backbones:
  mini:
    {num_hidden_layers: 2, hidden_size: 16, num_attention_heads: 2, intermediate_size: 16, vocab_size: 300}
grid:
  - {dataset: [toy], backbone: [mini], method: [dense]}
  - {dataset: [toy], backbone: [mini], method: [random, h2o, top, infor_coef, ar], gates: [input]}
  - {dataset: [toy], backbone: [mini], method: [ar_threshold, ar_joint], budget: [0.3], gates: [input]}
  - {dataset: [toy], backbone: [mini], method: [ar], budget: [0.3], gates: [input], temperature: [0.4]}
  - {dataset: [asked], backbone: [mini], method: [ar], budget: [0.5], gates: [after_blocks]}
retention: {over_budget: keep, dropped: last}
training: {learning_rate: 1e-2, open_share: 0.3, hard_share: 0.3, dtype: float32}
measure: {examples: 16, speed_lengths_tokens: [8, 24], timing_repeats: 1}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working folder with the suite ``mini``, whose dense run is trained."""
    path = tmp_path_factory.mktemp("retention")
    (path / "experiments").mkdir()
    (path / "experiments/mini.yaml").write_text(YAML)
    words = {"lease": "the tenant rents the flat", "sale": "the buyer pays a price", "loan": "the bank lends"}
    rows = [
        {
            "file": f"{name}{i}",
            "type": name,
            "text": f"{text} number {i} as agreed today and signed " * (1 + i % 3),
        }
        for name, text in words.items()
        for i in range(24)
    ]
    (path / "toy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [
        {"input": f"the model {i} uses tanh units here", "instructions": ["what units?"], "outputs": ["tanh"]}
        for i in range(60)
    ]
    (path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        train(PAPER, load_suite("mini").run("toy-mini-dense"), device=CPU, report=str)
    return path


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return load_suite("mini")


def test_runs_of_a_suite(here):
    pair = here.run("toy-mini-ar-30-input").as_dict(), here.run("toy-mini-h2o-30-input").as_dict()
    assert [key for key in pair[0] if pair[0][key] != pair[1][key]] == ["method"]
    assert [r.name for r in here.sweeps()] == ["toy-mini-ar-30-input", "toy-mini-ar-30-input-t0.4"]
    assert {r.method for r in here.ablations()} == {"ar", "ar_threshold", "ar_joint"}


def test_times_require_no_training_and_no_data(here, tmp_path, monkeypatch):
    """Except a threshold, whose number of kept tokens is learnt."""
    untrained, trained = "toy-mini-top-30-input", "toy-mini-arthreshold-30-input"
    speed = PAPER.metric("speed")
    assert needs(here, (here.run(trained), speed)) == [here.run(trained)]
    assert needs(here, (here.run(untrained), speed)) == []
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments/mini.yaml").write_text(YAML)
    monkeypatch.chdir(tmp_path)
    assert measure.main(["speed", "--suite", "mini", "--device", "cpu", "--run", untrained]) == 0
    records = read_records(here, "speed", [here.run(untrained)])
    assert (records["trained_tokens"] == 0).all() and (records["training_batch_ms"] > 0).all()


def test_dense_model_against_itself_has_speedup_1(here, monkeypatch):
    """With a clock on which a pass takes 1 s and every second pass 4 % more."""
    model, passes = backbones.untrained(here.run("toy-mini-dense")), []
    model.register_forward_pre_hook(lambda *_: passes.append(1.04 if len(passes) % 2 else 1.0))
    monkeypatch.setattr(time, "perf_counter", lambda: sum(passes))
    trained = Trained(here, here.run("toy-mini-dense"), None, model, CPU, trained_tokens=0)
    for record in measure_speed(trained):
        for name in ("batch_ms", "training_batch_ms"):
            assert record[name] == pytest.approx(record[f"dense_{name}"])


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("dataset: [toy]", "dataset: [tay]", "grid[0].dataset: no 'tay' under datasets, which has toy"),
        ("method: [dense]", "method: [dense, ar]", "dense has no budget"),
        ("- {dataset: [toy], backbone: [mini], method: [dense]}", "", "is distilled from a dense run"),
        ("budget: [0.3]", "budget: [1.3]", "grid[2].budget[0]: must be a number in (0, 1], got 1.3"),
        ("dropped: last", "droped: last", "droped: no such setting; did you mean dropped?"),
        ("dropped: last", "budget: 0.3", "retention.budget: the grid or training sets it"),
        ("open_share: 0.3", "open_share: 0.9", "hard_share: with open_share it must not exceed 1"),
        ("{num_hidden_layers", "{model_type: distillbert, num_hidden_layers", "did you mean distilbert?"),
        ("hidden_size: 16", "hidden_size: 17", "must divide hidden_size 17"),
        ("vocab_size: 300", "vocab_size: 260", "mini.vocab_size: must be a whole number of at least 261"),
        ("grid:", "benchmarks: [tay]\ngrid:", "benchmarks: 'tay' is neither a dataset nor a run"),
    ],
)
def test_invalid_suite_is_reported_in_one_line(here, old, new, words):
    Path("experiments/wrong.yaml").write_text(YAML.replace(old, new, 1))
    with pytest.raises(SuiteError) as error:
        load_suite("wrong")
    assert words in str(error.value) and "\n" not in str(error.value)


def test_unusable_corpus_is_reported_with_suite_and_key(here):
    Path("other.jsonl").write_text("")
    Path("experiments/wrong.yaml").write_text(YAML.replace("path: toy.jsonl", "path: other.jsonl"))
    with pytest.raises(DataError, match="^experiments/wrong.yaml: datasets.toy.path: other.jsonl has texts"):
        PAPER.load_task()(load_suite("wrong").runs[0])


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_model_type_of_a_suite_supports_gates(model_type):
    """Every suite that passes validation can be trained."""
    from transformers import AutoModelForSequenceClassification as Classifier

    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    words = {"vocab_size": 300, "pad_token_id": 0, "sep_token_id": 2}
    model = backbones.fresh(Classifier, BackboneConfig(model_type=model_type, **sizes), words, 24)
    assert retain(model, RetentionConfig(0.5)).config.model_type == model_type


@pytest.mark.parametrize("name", ["toy-mini-ar-30-input", "toy-mini-arjoint-30-input"])
def test_resume_is_bitwise_identical(here, name):
    run = here.run(name)
    task = PAPER.load_task()(run)
    train(PAPER, run, device=CPU, report=str, watch_every=2)
    whole = run.weights_file.read_bytes()
    assert load_model(run.model_folder).retention.multiplier.abs().sum() > 0
    shutil.rmtree(run.folder)
    for stop in (1, task.steps // 2, task.steps - 1):  # in each phase
        train(PAPER, run, device=CPU, report=str, watch_every=3, stop_after=stop)
    train(PAPER, run, device=CPU, report=str)
    assert run.weights_file.read_bytes() == whole


@pytest.mark.slow
def test_pipeline_measures_plots_and_reports(here, capsys):
    for run in here.runs:
        train(PAPER, run, device=CPU, report=str)
    metrics = [q.name for q in PAPER.metrics if not q.command]
    assert measure.main([*metrics, "--suite", "mini", "--device", "cpu"]) == 0, capsys.readouterr().err
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulations, "SAMPLES", 2000)
        patch.setattr(simulations, "BATCHES", (1, 4))
        assert simulations.main(["--suite", "mini"]) == 0
    drawn = [item for item in PAPER.items if item.runs(here)]
    assert [item.name for item in PAPER.items if item not in drawn] == ["table6"]  # no encoder of 12 blocks
    for item in drawn:
        drawing.draw("mini", item.name)
        assert item.path("mini").stat().st_size > 100
    found = {row.id: row.verdict for entry in gather("mini").entries if entry.made for row in entry.rows}
    assert found["retention.table5.1"] is Word.TESTED
    assert found["retention.figureH.1"] is Word.CONTRADICTED  # as its root
    assert found["retention.table4.3"] is Word.INCONCLUSIVE

    scores = read_records(here, "score", here.runs)
    short = scores[(scores["budget"] == 0.3) & (scores["method"] == "ar")]
    assert (short["keep_ratio"] <= 0.3).all()
    assert (scores[scores["method"] == "dense"]["keep_ratio"] == 1).all()
    shares = scores[scores["metric"].isin(["accuracy", "exact_match"])]
    assert (shares["items_right"].str.len() == shares["measured_examples"]).all()
    right = shares["items_right"].map(lambda signs: signs.count(RIGHT) / len(signs))
    assert (100 * right).to_numpy() == pytest.approx(shares["score_percent"].to_numpy())
    assert scores[scores["metric"].isin(["macro_f1", "f1"])]["items_right"].isna().all()
    assert (scores.groupby("dataset")["items_hash"].nunique() == 1).all()
    dense = read_records(here, "pruned_dense", here.dense)
    plain = dense[dense["pruning"] == "none"].set_index("metric")["score_percent"]
    output = dense[dense["pruning_gates"] == "output"].set_index("metric")["score_percent"]
    assert (output == plain.reindex(output.index)).all()  # only [CLS] is read, so nothing is lost

    # A measured run is exported in the project format.
    given = ["--suite", "mini", "--run", "toy-mini-ar-30-input", "--name", "tiny"]
    assert publish.main(given) == 0
    ours, published = (
        load_file(f / "model.safetensors")
        for f in (here.run("toy-mini-ar-30-input").model_folder, Path("pretrained/tiny"))
    )
    assert all(torch.equal(w.bfloat16(), published[name]) for name, w in ours.items())
    assert "30%" in Path("pretrained/tiny/README.md").read_text()


def test_answer_spans_and_their_scores(here):
    run = here.run("asked-mini-ar-50-afterblocks")
    texts = Texts(run.dataset, run.backbone)
    for row in texts.encoded("train"):
        first, last = row.span
        assert row.example.text[row.offsets[first][0] : row.offsets[last][1]].strip() == "tanh"
        assert row.offsets[0] == (0, 0)  # [CLS]
    assert len(train_tokenizer(texts.labelled, 3)) == SMALLEST_VOCABULARY
    long = texts.labelled.splits["train"][0]._replace(question="what " * 100)
    assert len(texts._encode([long])[0].ids) == run.dataset.max_tokens
    assert normalized("The  tanh, unit!") == ["tanh", "unit"]
    assert SCORES["exact_match"]([("a tanh",)], ["Tanh."]) == 100
    assert SCORES["f1"]([("tanh unit", "no")], ["tanh"]) == pytest.approx(200 / 3)
    assert SCORES["accuracy"]([0, 1], [0, 0]) == 50


def test_best_span_is_inside_the_text_and_ordered():
    offsets = [(0, 0), (0, 3), (4, 8), (9, 12), (0, 0)]
    row = SimpleNamespace(offsets=offsets, example=SimpleNamespace(text="abc defg hij"))
    start, end = torch.tensor([9.0, 1, 2, 5, 9, 9]), torch.tensor([9.0, 5, 4, 1, 9, 9])
    assert _best_span(start, end, row) == "abc"  # of 1 + 5, 2 + 4 and 5 + 1, the first; not 5 + 5
    end[2] = 6.0
    assert _best_span(start, end, row) == "defg"
    start[2], end[3] = 0.0, 7.0
    assert (
        _best_span(start, end, row) == "hij" and _best_span(start - start, end, row, longest=2) == "defg hij"
    )


def test_metrics_weight_examples_equally(here, monkeypatch):
    """The number of examples is not a multiple of the batch size."""
    run = here.run("toy-mini-ar-30-input")
    task = PAPER.load_task()(run)
    torch.manual_seed(1)
    model, rows = task.build().eval(), task.texts.encoded("test")
    model.retention.configure(open_steps=0, hard_from_step=None)
    trained = TrainedRetention(here, run, task, model, CPU, 0)
    monkeypatch.setattr(trained_module, "_ROWS", 5)
    assert len(rows) % 5
    with torch.no_grad():
        alone = [model(**name_inputs(task.texts.tensors([row]), CPU)).loss.item() for row in rows]
    found = trained.evaluate(model, "test")
    assert found.loss_nats == pytest.approx(sum(alone) / len(rows), rel=1e-5)
    lengths = [len(row.ids) for row in rows]
    assert found.keep_ratio == sum(floor_share(n, 0.3) for n in lengths) / sum(lengths)

    model.retention.configure(relaxation="sigmoid")  # without noise
    records = []
    for size in (1, 5):
        monkeypatch.setattr(budgets, "_ROWS", size)
        records += measure_slackness(trained)
    batches = [task.texts.tensors(part) for part in task.texts.batches("train", 1, 16)]
    with torch.no_grad(), model.retention.recorded() as seen:
        for one in batches:
            model(**name_inputs(one, CPU))
    shift = 0.66 * math.log(0.1 / 1.1)
    budget = sum(one.budget.item() for one in seen)
    counted = sum(1 + torch.sigmoid(one.scores[0, 1:]).sum().item() for one in seen)  # [CLS] counts fully
    opened = sum(1 + torch.sigmoid(one.scores[0, 1:] - shift).sum().item() for one in seen)
    for record in records:
        assert record["soft_loss_nats"] == pytest.approx(records[0]["soft_loss_nats"], rel=1e-5)
        assert record["budget_tokens"] == budget / len(batches)
        assert record["counted_tokens"] == pytest.approx(counted / len(batches), rel=1e-5)
        assert record["open_tokens"] == pytest.approx(opened / len(batches), rel=1e-5)
        assert record["hard_loss_nats"] != pytest.approx(record["soft_loss_nats"], rel=1e-5)


def test_longformer_question_answering_with_a_new_tokenizer(here):
    text = YAML.replace("{num_hidden_layers", "{model_type: longformer, num_hidden_layers")
    Path("experiments/long.yaml").write_text(text)
    run = load_suite("long").run("asked-mini-ar-50-afterblocks")
    train(PAPER, run, device=CPU, report=str, stop_after=2)
    task = PAPER.load_task()(run)
    config, separator = task.build().retention.config, task.tokenizer.sep_token_id
    assert (config.protect, config.sep_token_id) == ("question", separator)  # so questions are never dropped
    told = task.texts.labelled.splits["train"][0]._replace(question="what [SEP] units?")
    assert task.texts._encode([told])[0].ids.count(separator) == 3  # a separator in a text is plain text
    with pytest.raises(DataError, match="qasper: Longformer answers only texts with a question"):
        task.texts._encode([told._replace(question="")])


def group_by_length(run):
    return dataclasses.replace(run, training=dataclasses.replace(run.training, group_by_length=True))


@pytest.mark.parametrize(("order", "most_padding"), [(lambda run: run, 0.04), (group_by_length, 0.0144)])
def test_batches_contain_every_example_once_per_epoch(here, order, most_padding):
    task = PAPER.load_task()(order(here.run("toy-mini-ar-30-input")))
    every = sorted(tuple(row.ids) for row in task.texts.encoded("train"))
    size, seen, padding = len(every), [], 0
    for ids, mask, _ in map(task.batch, range(size)):  # eight epochs
        seen += [tuple(one[real > 0].tolist()) for one, real in zip(ids, mask, strict=True)]
        padding += int((mask == 0).sum())
    epochs = [seen[first : first + size] for first in range(0, len(seen), size)]
    assert len(epochs) == 8 and size % 8  # so that all epochs except the first start inside a batch
    assert all(sorted(epoch) == every for epoch in epochs) and epochs[0] != epochs[1]
    assert padding < most_padding * 8 * sum(map(len, every))
