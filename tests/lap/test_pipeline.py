"""The paper's pipeline on a tiny suite: batches, training, resume, every metric, figure and claim."""

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from acp_repro.common.errors import UserError
from acp_repro.lap import compress
from acp_repro.papers.lap.paper import PAPER
from acp_repro.papers.lap.task import PruningTask
from acp_repro.papers.lap.texts import Batches, load_texts
from acp_repro.pipeline.data.files import DataError
from acp_repro.pipeline.errors import SuiteError
from acp_repro.pipeline.records import read_records, write_records
from acp_repro.pipeline.suite_file import load_suite
from acp_repro.pipeline.training.measuring import bring_up_to_date
from acp_repro.pipeline.training.trainer import make_optimizer, train
from analysis import drawing
from analysis.report.gather import gather
from scripts.publish import publish

YAML = """
description: a test
paper: lap
data: {corpus: file, path: texts.jsonl, label_field: stars, positive_from: 4, negative_to: 2, vocabulary: 300}
model: {d_model: 32, d_kv: 8, d_ff: 48, num_layers: 3, num_decoder_layers: 1, num_heads: 2}
pruning: {beta: 1, tau: 1, max_length: 48}
grid:
  - {compression: [1, 3], training_mask: [hard_concrete]}
  - {compression: [1], training_mask: [straight_through]}
  - {compression: [1]}
  - {compression: [null]}
training:
  {steps: 12, batch_texts: 8, learning_rate: 3e-3, lambda_below_nats: 5.6, lambda_ramp_steps: 4,
   dtype: float32}
measure:
  {scored_texts: 24, batch_texts: 8, probe_texts: 60, shap_texts: 1, timed_lengths: [12, 24], timed_texts: 2}
"""
SENTENCE = "the food was good bad cold warm and we liked hated it very much so come again never here"
WORDS = SENTENCE.split()


@pytest.mark.parametrize(
    ("warmup", "decay", "rates"), [(2, 0.4, [0.5, 1, 1, 1, 1, 1, 1, 0.775, 0.55, 0.325]), (0, 0.0, [1, 1, 1])]
)
def test_schedule_warms_up_stays_constant_and_decays_to_a_tenth(warmup, decay, rates):
    training = SimpleNamespace(learning_rate=0.1, warmup_steps=warmup, decay_share=decay, steps=len(rates))
    task = SimpleNamespace(run=SimpleNamespace(training=training))
    found = [PruningTask.learning_rate(task, step) for step in range(len(rates))]
    assert found == pytest.approx([0.1 * rate for rate in rates])


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lap")
    (folder / "experiments").mkdir()
    (folder / "experiments/mini.yaml").write_text(YAML)
    generator = torch.Generator().manual_seed(0)
    lines = []
    for number in range(240):
        picks = torch.randint(len(WORDS), (4 + number % 7,), generator=generator).tolist()
        text = " ".join(WORDS[i] for i in picks)
        lines.append(json.dumps({"text": f"{text} {number}", "stars": 1 + number % 5}))
    (folder / "texts.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def suite(work, monkeypatch):
    monkeypatch.chdir(work)
    torch.set_num_threads(1)
    load_texts.cache_clear()
    return load_suite("mini")


def train_run(run, **options):
    return train(PAPER, run, device=torch.device("cpu"), report=lambda _: None, watch_every=4, **options)


def measure_run(suite, run, metric):
    trained = PruningTask(run).trained(suite, torch.device("cpu"))
    about = {"device": "cpu", "dtype": "float32", "trained_tokens": trained.trained_tokens}
    write_records(suite, run, metric, metric.measure()(trained), **about)


def weights(run):
    return load_file(run.weights_file)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("tau: 1", "tau: 0", "pruning.tau: must be a finite number above 0, because it divides"),
        ("vocabulary: 300", "vocabulary: null", "data.vocabulary: set it for a model from scratch"),
        ("path: texts.jsonl,", "", "data.path: None, but `corpus: file` needs the path of a file"),
        ("steps: 12", "warmup_steps: 13, steps: 12", "training.warmup_steps: 13 are more than the 12 steps"),
        ("grid:", "start: {steps: 3, warmup_steps: 4}\ngrid:", "start.warmup_steps: 4 are more than the 3"),
        ("shap_texts: 1", "main_run: soft-9", "measure.main_run: suite bad has no run 'soft-9'"),
    ],
)
def test_invalid_suite_is_reported_in_one_line(suite, old, new, words):
    assert old in YAML
    Path("experiments/bad.yaml").write_text(YAML.replace(old, new))
    with pytest.raises(SuiteError, match=words):
        load_suite("bad")


def test_batches_contain_each_text_once_per_epoch():
    rows = [[i + 1] * (1 + i % 9) for i in range(50)]
    batches = Batches(rows, 5, 0, seed=1)
    ids = [int(i) for index in range(10) for i in batches(index)[:, 0]]
    assert sorted(ids) == list(range(1, 51))
    assert torch.equal(batches(3), Batches(rows, 5, 0, seed=1)(3)) and not torch.equal(
        batches(3)[:, 0], batches(13)[:, 0]
    )
    padding = sum(int((batches(i) == 0).sum()) for i in range(10))
    assert padding < 25  # lengths of 1 to 9 in batches of any five would need about 200
    with pytest.raises(DataError, match="fewer than a batch"):
        Batches(rows[:3], 5, 0, seed=1)


def test_texts_are_truncated_during_length_growth(suite):
    rows = [[*range(3, 3 + 4 * i), 1] for i in range(1, 21)]
    whole, cut = Batches(rows, 20, 0, seed=1)(0), Batches(rows, 20, 0, seed=1)(0, most=10)
    assert cut.shape == (20, 10) and whole.shape == (20, 81)
    starts = set()
    for row, before in zip(cut.tolist(), whole.tolist(), strict=True):
        row, before = [i for i in row if i], [i for i in before if i]
        assert len(row) == min(10, len(before)) and row[-1] == 1
        assert row[:-1] == [*range(row[0], row[0] + len(row) - 1)] and set(row) <= set(before)
        starts.add(row[0])
    assert len(starts) > 5 and min(starts) < 20 < max(starts)  # from random positions in the text
    task = change_training(suite.runs[0], length_warmup_steps=8)
    assert [task._most_tokens(i) for i in (0, 4, 7, 8)] == [16, 32, 44, None]


def test_gated_runs_start_from_the_ungated_run(suite):
    text = YAML.replace("grid:", "start: {steps: 3, learning_rate: 1e-2, length_warmup_steps: 2}\ngrid:")
    Path("experiments/from.yaml").write_text(text)
    found = load_suite("from")
    first, run = found.run("ungated"), found.run("exact-1")
    assert (first.training.steps, run.training.steps, first.start) == (3, 12, None)
    assert found.prerequisites(run) == [first] == [run.start] and found.prerequisites(first) == []
    assert run.as_dict()["start"] == first.as_dict()  # other initial weights define another run
    train_run(first)
    trainee, before = PruningTask(run).build(), weights(first)
    assert all(torch.equal(t, before[n]) for n, t in trainee.model.t5.state_dict().items() if n in before)
    train_run(run)
    assert any(not torch.equal(t, before[n]) for n, t in weights(run).items())
    Path("experiments/from.yaml").write_text(text.replace("  - {compression: [null]}\n", ""))
    with pytest.raises(SuiteError, match=r"start: the grid has no run ungated; add {compression: \[null\]}"):
        load_suite("from")


def test_learning_rates_scale_with_weight_size(suite):
    task = change_training(suite.runs[0], scale_parameter=True)
    trainee = task.build()
    rates = task.rates(trainee)
    query = trainee.model.t5.encoder.block[0].layer[0].SelfAttention.q.weight
    assert rates[query] == pytest.approx((32 * 8) ** -0.5, rel=0.2)
    optimizer = make_optimizer(trainee, task.run.training, 0.5, rates)
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(list(trainee.parameters()))
    for group in optimizer.param_groups:
        assert {rates[p] for p in group["params"]} == {group["rate"]} == {group["lr"] / 0.5}


def test_label_polarity_and_splits(suite):
    texts = load_texts(suite.file.data)
    assert {t.label for t in texts.train} == {0, 1, None}  # three stars have no polarity
    assert not {t.text for t in texts.train} & {t.text for t in texts.heldout}
    assert len(texts.train) + len(texts.heldout) == 240 and 2 < len(texts.heldout) < 40
    with pytest.raises(DataError, match="texts.jsonl:1: no field 'body'; this record has: "):
        load_texts(dataclasses.replace(suite.file.data, text_field="body"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "data.path: other.csv is not a file; relative paths start at"),
        ("text,stars\na,1\n", "data.path: other.csv has 1 texts, so a split is empty"),
        ("text,stars\na,five\n", "data.path: other.csv: the label 'five' of 'a' is not a number"),
    ],
)
def test_unusable_corpus_is_reported_with_suite_and_key(suite, work, content, words):
    (work / "other.csv").unlink(missing_ok=True)
    if content is not None:
        (work / "other.csv").write_text(content)
    data = dataclasses.replace(suite.file.data, path="other.csv")
    with pytest.raises(DataError, match=f"^experiments/mini.yaml: {words}"):
        PruningTask(dataclasses.replace(suite.runs[0], data=data))


def test_extra_texts_are_used_for_training_only(suite, work):
    plain = load_texts(suite.file.data)
    new = [f"a story that is new, number {i}<br /><br />and goes on" for i in range(100)]
    lines = [json.dumps({"text": text}) for text in [*new, plain.heldout[0].text, plain.train[0].text]]
    (work / "more.jsonl").write_text("\n".join(lines) + "\n")
    data = dataclasses.replace(suite.file.data, extra_path="more.jsonl")
    texts = load_texts(data)
    assert (texts.train, texts.heldout) == (plain.train, plain.heldout) and texts.hash != plain.hash
    assert list(texts.more) == [text.replace("<br /><br />", " ") for text in new]
    task, before = (PruningTask(dataclasses.replace(suite.runs[0], data=d)) for d in (data, suite.file.data))
    assert len(task.rows("train")) == len(before.rows("train")) + 100


def test_published_t5_is_trained_without_dropout(suite):
    run = suite.run("ungated")
    built = PruningTask(run).build().model
    built.t5.config.dropout_rate = 0.1  # as Flan-T5's
    built.save_pretrained("t5")
    model, data = (
        dataclasses.replace(x, **y)
        for x, y in ((run.model, {"weights": "t5"}), (run.data, {"vocabulary": None}))
    )
    task = PruningTask(dataclasses.replace(run, model=model, data=data))
    trainee = task.build()
    assert trainee.model.t5.training and trainee.model.t5.config.dropout_rate == 0
    batch = task.batch(0)
    with torch.no_grad():
        before = task.loss(trainee, *batch)
        task.watch(trainee, *batch)
        assert trainee.model.t5.training and torch.equal(task.loss(trainee, *batch), before)


def change_training(run, **changes):
    return PruningTask(dataclasses.replace(run, training=dataclasses.replace(run.training, **changes)))


def test_lambda_starts_once_the_model_copies(suite):
    task = change_training(suite.runs[0], lambda_below_nats=2.0, lambda_ramp_steps=2)
    trainee, batch = task.build().train(), task.batch(0)
    open_gates = trainee.model(batch[0], None, "none").cross_entropy.item()
    assert task.loss(trainee, *batch).item() == pytest.approx(open_gates, rel=1e-6)
    trainee.running_nats.fill_(1.0)
    trainee.steps.fill_(100)
    task.loss(trainee, *batch)
    assert trainee.steps_with_lambda == 1
    with torch.no_grad():  # evaluation does not count
        task.loss(trainee, *batch)
        assert trainee.steps_with_lambda == 1


QUALITY = {"lambda_ramp_steps": 0, "lambda_off_loss": 0.4}


@pytest.mark.parametrize(
    ("settings", "nats", "steps", "share"),
    [
        ({"lambda_below_nats": 2.0, "lambda_ramp_steps": 2}, 1.0, 1, 0.5),
        ({"token_dropout_steps": 2, "lambda_ramp_steps": 0}, 1.0, 3, 1.0),
        (QUALITY, 0.1, 5, 0.75),
        (QUALITY, 0.3, 5, 0.25),
        (QUALITY, 0.5, 5, 0.0),
        (QUALITY, math.inf, 5, 0.0),
    ],
)
def test_lambda_follows_the_steps_and_the_quality(suite, settings, nats, steps, share):
    task = change_training(suite.runs[0], **settings)
    trainee, batch = task.build().train(), task.batch(0)
    trainee.running_nats.fill_(nats)
    trainee.steps_with_lambda.fill_(steps)
    found = trainee.model(*batch)
    wanted = found.cross_entropy + share * suite.runs[0].compression * found.compression
    assert task.loss(trainee, *batch).item() == pytest.approx(wanted.item(), rel=1e-5)


def test_gates_first_drop_at_random_without_penalty(suite):
    pruning = dataclasses.replace(suite.runs[0].pruning, hard_concrete_signal_limit=6.0)
    run = dataclasses.replace(suite.runs[0], pruning=pruning)
    task = change_training(run, token_dropout_steps=2, lambda_ramp_steps=0)
    trainee, batch = task.build().train(), task.batch(0)
    signal = trainee.model.t5.encoder.block[0].layer[-1].DenseReluDense.wo.weight

    def loss_and_slope(steps):
        trainee.steps_with_lambda.fill_(steps)
        trainee.zero_grad()
        loss = task.loss(trainee, *batch)
        loss.backward()
        return loss.item(), float(signal.grad[0].abs().max())

    open_gates, blind, priced = (loss_and_slope(steps) for steps in (0, 1, 3))
    assert blind[0] != open_gates[0] and open_gates[1] == blind[1] == 0 < priced[1]
    assert trainee.model(*batch, blind=True).cross_entropy.item() == pytest.approx(blind[0], rel=1e-5)


def test_evaluation_weights_texts_equally(suite):
    """The number of held-out texts is not a multiple of the batch size."""
    task = PruningTask(suite.runs[0])
    trainee, rows = task.build(), task.rows("heldout")
    assert len(rows) % task.run.training.batch_texts
    with torch.no_grad():  # so that every gate drops tokens
        for block in trainee.model.t5.encoder.block:
            block.layer[-1].DenseReluDense.wo.weight[0] *= 60
    found = task.watch(trainee, *task.batch(0))
    assert 0 < found["keep_ratio"][1] < found["keep_ratio"][0] < 1
    with torch.no_grad():
        model = trainee.model.eval()
        removed = [model(torch.tensor([row]), mask="removed") for row in rows]
        soft = [model(torch.tensor([row]), mask="soft") for row in rows]
    wanted = {
        "accuracy": torch.cat([one.correct for one in removed]).mean(),
        "soft_accuracy": torch.cat([one.correct for one in soft]).mean(),
        "keep_ratio": torch.cat([one.kept[1:] / one.kept[0] for one in removed], 1).mean(1),
        "soft_ratio": torch.cat([one.lengths[1:] / one.lengths[0] for one in soft], 1).mean(1),
    }
    for name, value in wanted.items():
        torch.testing.assert_close(torch.tensor(found[name]), value.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_every_metric_figure_and_claim(suite, monkeypatch):
    for library in ("sacrebleu", "rouge_score", "rapidfuzz", "sklearn", "shap"):
        pytest.importorskip(library, reason="pip install -e '.[lap]'")
    for run in suite.runs:
        train_run(run)
        for metric in PAPER.metrics:
            if run in metric.runs(suite):
                measure_run(suite, run, metric)
    scores = read_records(suite, "reconstruction").set_index(["run", "decoding"])
    assert (
        scores.loc[("ungated", "soft"), "keep_ratio"] == scores.loc[("ungated", "removed"), "keep_ratio"] == 1
    )
    assert scores.loc[("ungated", "soft"), "bleu"] == scores.loc[("ungated", "removed"), "bleu"]
    for item in PAPER.items:
        assert drawing.draw("mini", item.name).is_file()
    judged = [row for entry in gather("mini").entries for row in entry.rows]
    assert len(judged) == sum(len(item.claims) for item in PAPER.items)
    assert not any(row.missing for row in judged)


def test_failed_measurement_does_not_affect_others(suite, capsys):
    run = suite.run("ungated")
    train_run(run)
    broken = dataclasses.replace(PAPER.metric("reconstruction"), measure=lambda: len)
    with pytest.raises(UserError, match="1 of 2 records could not be measured"):
        bring_up_to_date(suite, [(run, broken), (run, PAPER.metric("dynamics"))], "cpu", again=True)
    said = capsys.readouterr()
    assert "dynamics.csv" in said.out and "reconstruction.csv" not in said.out and "has no len()" in said.err


def test_run_is_exported_in_the_project_format(suite, tmp_path, capsys):
    pytest.importorskip("sacrebleu", reason="pip install -e '.[lap]'")
    run, metric = suite.runs[1], PAPER.metric("reconstruction")
    train_run(run)
    measure_run(suite, run, metric)
    folder = publish(suite, run, tmp_path / "lap-tiny")
    assert run.command in (folder / "README.md").read_text()
    assert compress.main([str(folder), "--text", "the food was good"]) == 0
