"""Masked language modelling as a pipeline step, and runs that start from its weights."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("sklearn", reason="pip install -e '.[retention]'")

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

from acp_repro import measure
from acp_repro import train as train_command
from acp_repro.papers.retention.paper import PAPER
from acp_repro.papers.retention.pretraining import EncoderTask, look_at_neighbours
from acp_repro.pipeline.errors import SuiteError
from acp_repro.pipeline.planner import training_groups
from acp_repro.pipeline.records import read_records
from acp_repro.pipeline.suite_file import load_suite
from acp_repro.pipeline.training.run_folder import TrainingError
from acp_repro.pipeline.training.trainer import train

CPU = torch.device("cpu")
SHAPE = "num_hidden_layers: 2, hidden_size: 16, num_attention_heads: 2, intermediate_size: 16"
YAML = f"""
description: a test
paper: retention
pretraining:
  words:
    data: {{corpus: text, path: words, heldout: words/3.txt, tokenizer: {{bpe: 290}}}}
    max_tokens: 12
    batch_sequences: 8
    micro_batch_sequences: 4
    steps: 12
    learning_rate: 1e-2
    neighbour_heads: true
datasets:
  toy: {{corpus: cuad, path: toy.jsonl, options: {{least: 2}}, max_tokens: 24, epochs: 1, batch_examples: 8}}
backbones:
  mini: {{pretrained_on: words, {SHAPE}}}
grid:
  - {{dataset: [toy], backbone: [mini], method: [top], budget: [0.5]}}
  - {{dataset: [toy], backbone: [mini], method: [dense]}}
  - {{dataset: [words], backbone: [mini], method: [mlm]}}
training: {{learning_rate: 1e-2, dtype: float32}}
measure: {{examples: 20}}
"""


def test_schedule_warms_up_and_decays_to_zero():
    training = SimpleNamespace(learning_rate=0.1, warmup_share=0.4)
    task = SimpleNamespace(run=SimpleNamespace(training=training), steps=5)
    found = [EncoderTask.learning_rate(task, step) for step in range(5)]
    assert found == pytest.approx([0.05, 0.1, 0.1, 0.2 / 3, 0.1 / 3])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("pretraining")
    (path / "experiments").mkdir()
    (path / "experiments/mini.yaml").write_text(YAML)
    kinds = {"lease": "the tenant rents the flat", "sale": "the buyer pays a price", "loan": "the bank lends"}
    rows = [
        {"file": f"{name}{i}", "type": name, "text": f"{text} number {i} as agreed today"}
        for name, text in kinds.items()
        for i in range(20)
    ]
    (path / "toy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "words").mkdir()
    for i in range(10):
        (path / f"words/{i}.txt").write_text(" ".join(f"{row['text']} {i}." for row in rows[i::3]))
    return path


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("ACP_REPRO_CACHE", str(folder / "cache"))
    return load_suite("mini")


def test_dependent_runs_start_from_the_pretrained_weights(here, capsys):
    top, dense, mlm = here.runs
    assert list(training_groups(here, here.runs)) == [[mlm], [dense], [top]]
    with pytest.raises(TrainingError, match="--run words-mini-mlm`"):
        PAPER.load_task()(dense)
    # If only the last run is requested, the command trains its dependencies first.
    assert train_command.main(["--suite", "mini", "--run", top.name, "--device", "cpu", "--jobs", "1"]) == 0
    assert all(run.weights_file.is_file() for run in here.runs)
    task = PAPER.load_task()(dense)
    started, given = task.build().state_dict(), load_file(mlm.weights_file)
    assert task.texts.tokenizer.get_vocab() == PAPER.load_task()(mlm).tokenizer.get_vocab()
    shared = [name for name in given if name.startswith("distilbert.")]
    assert len(shared) > 20
    for name in shared:
        trained = slice(12) if "position" in name else slice(None)  # the task's texts are longer
        assert torch.equal(started[name][trained], given[name][trained])
    positions = started["distilbert.embeddings.position_embeddings.weight"]
    assert len(positions) == 26 and torch.equal(positions[12:24], positions[:12])  # not the initial values


def test_resume_is_bitwise_identical(here):
    run = here.run("words-mini-mlm")
    train(PAPER, run, device=CPU, report=str)
    whole = run.weights_file.read_bytes()
    losses = [json.loads(x)["loss_nats"] for x in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.5  # the loss decreases
    shutil.rmtree(run.folder)
    train(PAPER, run, device=CPU, report=str, stop_after=5)
    assert not run.weights_file.exists()
    train(PAPER, run, device=CPU, report=str)
    assert run.weights_file.read_bytes() == whole


def test_masked_loss_is_measured_on_heldout_text(here):
    run = here.run("words-mini-mlm")
    train(PAPER, run, device=CPU, report=str)
    assert measure.main(["masked_loss", "--suite", "mini", "--device", "cpu"]) == 0
    (row,) = read_records(here, "masked_loss", [run]).to_dict("records")
    trained = PAPER.load_task()(run).trained(here, CPU)
    assert row["measured_tokens"] == 2 * 20 and 0 < row["masked_accuracy_percent"] <= 100
    ids, labels = trained.task.masked("heldout", list(range(20)), np.random.default_rng(0))
    logits = trained.model.eval()(input_ids=ids).logits[labels >= 0]
    expected = torch.nn.functional.cross_entropy(logits, labels[labels >= 0])
    assert abs(row["masked_loss_nats"] - expected.item()) < 1e-4


def test_masked_tokens_have_the_published_counts_and_probabilities(here):
    task = PAPER.load_task()(here.run("words-mini-mlm"))
    tokenizer, seen, kinds = task.tokenizer, [], []
    for index in range(120):
        ids, told_ids, places = task.batch(index)
        labels = torch.full_like(ids, -100).view(-1).index_copy(0, places, told_ids).view_as(ids)
        assert ids.shape == (4, 12)
        assert (ids[:, 0] == tokenizer.cls_token_id).all() and (ids[:, -1] == tokenizer.sep_token_id).all()
        told = labels >= 0
        assert (told.sum(1) == 2).all() and not told[:, [0, -1]].any()  # 15 % of 10
        kinds += torch.where(ids[told] == tokenizer.mask_token_id, 0, 1).tolist()
        seen += [tuple(row) for row in torch.where(told, labels, ids)[:, 1:-1].tolist()]
    assert abs(np.mean(kinds) - 0.2) < 4 * (0.16 / len(kinds)) ** 0.5
    size, length = task.sequences("train"), 10
    stream = task.corpus.tokens("train")[: size * length].reshape(size, length)
    assert sorted(seen[:size]) == sorted(map(tuple, stream.tolist()))  # every piece once per epoch


def test_masked_token_loss_matches_transformers(here):
    task = PAPER.load_task()(here.run("words-mini-mlm"))
    model = task.build().eval()
    ids, labels = task.masked("train", [0, 1, 2], np.random.default_rng(0))
    places = (labels.flatten() >= 0).nonzero()[:, 0]
    ours = task.loss(model, ids, labels.flatten()[places], places)
    expected = model(input_ids=ids, labels=labels).loss  # with the hook removed
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("kind", ["bert", "distilbert", "roberta"])
@torch.no_grad()
def test_first_block_heads_attend_to_neighbours(kind):
    names = ("hidden_size", "num_attention_heads", "intermediate_size", "num_hidden_layers")
    names = ("dim", "n_heads", "hidden_dim", "n_layers") if kind == "distilbert" else names
    sizes = dict(zip(names, (128, 4, 64, 2), strict=True), vocab_size=200, max_position_embeddings=210)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **sizes)
    model = transformers.AutoModelForMaskedLM.from_config(config, attn_implementation="eager").eval()
    ids = torch.randint(5, 200, (1, 200), generator=torch.Generator().manual_seed(1))
    assert model(ids, output_attentions=True).attentions[0].amax() < 0.1
    look_at_neighbours(model)
    places = torch.arange(10, 190)
    for weights, distance in zip(
        model(ids, output_attentions=True).attentions[0][0], (-1, 1, -2, 2), strict=True
    ):
        assert (weights[places].argmax(-1) == places + distance).float().mean() > 0.99
        assert weights[places, places + distance].mean() > 0.4


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "dataset: [words]",
            "dataset: [toy]",
            "grid[2].dataset: no 'toy' under pretraining, which has words",
        ),
        ("pretrained_on: words", "pretrained_on: word", "pretrained_on: no 'word' under pretraining"),
        ("method: [mlm]", "method: [mlm], seed: [1]", "the grid has no run words-mini-mlm; add {dataset"),
        ("method: [mlm]", "method: [mlm, dense]", "has no budget, so give it its own entry"),
        ("tokenizer: {bpe: 290}", "tokenizer: bytes", "data.tokenizer: an encoder's is {bpe: SIZE}"),
    ],
)
def test_invalid_suite_is_reported_in_one_line(here, old, new, words):
    assert old in YAML
    Path("experiments/wrong.yaml").write_text(YAML.replace(old, new, 1))
    with pytest.raises(SuiteError) as error:
        load_suite("wrong")
    assert words in str(error.value) and "\n" not in str(error.value)
