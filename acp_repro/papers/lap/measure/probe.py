"""Sentiment probing: whether a classifier can predict a text's label from the kept vectors.

A small head is trained on frozen features of training texts and tested on held-out texts. As in the article,
all vectors of a text share an MLP, and their votes are summed. Baselines are trained in the same way.
"""

from typing import Any

import torch
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from acp_repro.lap.autoencoder import pad
from acp_repro.pipeline.errors import RecordError
from acp_repro.pipeline.paper import with_columns

from ..task import TrainedPruning
from ..texts import encode

HIDDEN = 64  # width of the MLP, which the article does not state
LEARNING_RATE = 2e-3
EPOCHS = 20


@with_columns("classifier", "vectors_per_text", "train_texts", "measured_texts", "accuracy", "majority_class")
def measure_probe(trained: TrainedPruning) -> list[dict[str, Any]]:
    """One record for each classifier: its accuracy on held-out texts, and that of the majority class."""
    train = _labelled(trained, "train", trained.measure_settings.probe_texts)
    test = _labelled(trained, "heldout", trained.measure_settings.scored_texts)
    labels = {
        name: torch.tensor([y for _, _, y in part]) for name, part in (("train", train), ("test", test))
    }
    if any(len(set(values.tolist())) < 2 for values in labels.values()):
        raise RecordError(
            "probe: the labels of the first texts are all of one class; set data.label_field, or raise "
            "measure.probe_texts and measure.scored_texts"
        )
    rows = []
    for kind in ("kept", "all_tokens"):
        features = [_features(trained, [row for _, row, _ in part], kind) for part in (train, test)]
        vectors = sum(map(len, features[1])) / len(features[1])
        rows.append((f"{kind}_votes", _votes(trained, features, labels), vectors))
        if kind == "all_tokens":
            pooled = [[each.mean(0, keepdim=True) for each in part] for part in features]
            rows.append(("all_tokens_mean", _votes(trained, pooled, labels), 1.0))
    rows.append(("bag_of_words", _bag_of_words(train, test, labels), None))
    share = labels["test"].float().mean().item()
    return [
        {
            "classifier": name,
            "vectors_per_text": vectors,
            "train_texts": len(train),
            "measured_texts": len(test),
            "accuracy": accuracy,
            "majority_class": max(share, 1 - share),
        }
        for name, accuracy, vectors in rows
    ]


def _labelled(trained: TrainedPruning, split: str, most: int) -> list[tuple[str, list[int], int]]:
    """(text, ids, label) of the first texts of a split that have a label and fit the model."""
    found = []
    for text in (t for t in getattr(trained.task.texts, split) if t.label is not None):
        rows = encode(trained.task.tokenizer, [text.text], trained.run.pruning.max_length)
        if rows:
            found.append((text.text, rows[0], text.label))
        if len(found) == most:
            break
    return found


@torch.no_grad()
def _features(trained: TrainedPruning, rows: list[list[int]], kind: str) -> list[Tensor]:
    """The features (M, D) float of each text: the memory, or the encoder's output with open gates."""
    model, features = trained.model, []
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    for start in range(0, len(order), trained.measure_settings.batch_texts):
        part = order[start : start + trained.measure_settings.batch_texts]
        input_ids = pad([rows[i] for i in part], trained.task.tokenizer.pad_id).to(trained.device)
        if kind == "kept":
            memory = model.encode_ids(input_ids)
            vectors, there = memory.vectors, memory.positions >= 0
        else:
            vectors = model.encode_tokens(input_ids, "none").hidden
            there = input_ids != trained.task.tokenizer.pad_id
        features += [(i, v[m].cpu()) for i, v, m in zip(part, vectors, there, strict=True)]
    return [vectors for _, vectors in sorted(features, key=lambda pair: pair[0])]


def _votes(trained: TrainedPruning, features: list[list[Tensor]], labels: dict[str, Tensor]) -> float:
    """The accuracy of sigmoid(sum of MLP(E_i)) on held-out texts."""
    torch.manual_seed(trained.run.seed)
    mean = torch.cat(features[0]).mean(0)
    scale = torch.cat(features[0]).std(0) + 1e-6
    train, test = (
        (
            pad_sequence([(v - mean) / scale for v in part], batch_first=True),
            pad_sequence([torch.ones(len(v)) for v in part], batch_first=True),
        )
        for part in features
    )
    mlp = nn.Sequential(nn.Linear(len(mean), HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))

    def votes(vectors: Tensor, there: Tensor) -> Tensor:
        return (mlp(vectors)[..., 0] * there).sum(1)

    optimizer = torch.optim.AdamW(mlp.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    target = labels["train"].float()
    for _ in range(EPOCHS):
        for part in torch.randperm(len(target)).split(64):
            loss = F.binary_cross_entropy_with_logits(votes(train[0][part], train[1][part]), target[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        return ((votes(*test) > 0) == labels["test"].bool()).float().mean().item()


def _bag_of_words(train: list, test: list, labels: dict[str, Tensor]) -> float:
    model = make_pipeline(CountVectorizer(), LogisticRegression(max_iter=1000))
    model.fit([text for text, _, _ in train], labels["train"].numpy())
    return float(model.score([text for text, _, _ in test], labels["test"].numpy()))
