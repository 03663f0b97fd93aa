"""Scores of trained models, of dense models pruned at inference, of masked tokens, and of bags of words."""

import itertools
from typing import Any

import numpy as np
import torch
from scipy.sparse import hstack
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.multiclass import OneVsRestClassifier

from acp_repro.pipeline.paper import with_columns
from acp_repro.pipeline.training.task import Trained
from acp_repro.pipeline.training.trainer import autocast

from ..schema import GATES, RIGHT, WRONG
from ..texts import load_labelled
from ..trained import SCORES, Evaluation, TrainedRetention

PRUNINGS = ("random", "h2o")
BUDGETS = (0.5, 0.3)
_ROWS = 32
_WORDS_IN_A_ROW = (1, 2)
_INVERSE_REGULARIZATION = (1.0, 10.0, 100.0)  # scikit-learn's C


@with_columns(
    "split",
    "metric",
    "score_percent",
    "loss_nats",
    "measured_examples",
    "keep_ratio",
    "items_hash",
    "items_right",
)
def measure_score(trained: TrainedRetention) -> list[dict[str, Any]]:
    """One record for each split and score, with tokens removed as at inference.

    If a score is an accuracy, ``items_right`` contains one character per example, in the order of the set.
    ``items_hash`` is the hash of the set, because runs are compared example by example.
    """
    known, records = {"items_hash": trained.texts.labelled.identity[:12]}, []
    for split in ("dev", "test"):
        found = trained.evaluate(trained.model, split)
        for record in _list_scores(found, split=split):
            right = found.right.get(record["metric"])
            signs = None if right is None else "".join(RIGHT if each else WRONG for each in right)
            records.append(record | known | {"items_right": signs})
    return records


@with_columns(
    "pruning",
    "pruning_gates",
    "pruning_budget",
    "metric",
    "score_percent",
    "loss_nats",
    "measured_examples",
    "keep_ratio",
)
def measure_pruned_dense(trained: TrainedRetention) -> list[dict[str, Any]]:
    """One record for each pruning method, gate position, budget and score on the test split; ``none`` is the
    dense model."""
    plain = trained.evaluate(trained.model, "test")
    records = _list_scores(plain, pruning="none", pruning_gates="none", pruning_budget=1.0)
    for gates, pruning, budget in itertools.product(GATES, PRUNINGS, BUDGETS):
        model = trained.pruned(method=pruning, gates=gates, budget=budget)
        columns = {"pruning": pruning, "pruning_gates": gates, "pruning_budget": budget}
        records += _list_scores(trained.evaluate(model, "test"), **columns)
    return records


def _list_scores(found: Evaluation, **columns: Any) -> list[dict[str, Any]]:
    columns |= {
        "loss_nats": found.loss_nats,
        "measured_examples": found.examples,
        "keep_ratio": found.keep_ratio,
    }
    return [{**columns, "metric": name, "score_percent": value} for name, value in found.scores.items()]


@with_columns("masked_loss_nats", "masked_accuracy_percent", "measured_tokens")
@torch.no_grad()
def measure_masked_loss(trained: Trained) -> list[dict[str, Any]]:
    """One record with fixed masks: the mean loss and the accuracy of masked tokens."""
    task, model, draw = trained.task, trained.model.eval(), np.random.default_rng(0)
    pieces = range(min(task.sequences("heldout"), trained.measure_settings.examples))
    loss, right, tokens = 0.0, 0, 0
    for first in range(0, len(pieces), _ROWS):
        given = task.masked("heldout", list(pieces[first : first + _ROWS]), draw)
        input_ids, labels = (x.to(trained.device) for x in given)
        with autocast(trained.device, trained.run.training.dtype):
            output = model(input_ids=input_ids, labels=labels)
        masked = labels >= 0
        loss += float(output.loss) * int(masked.sum())
        right += int((output.logits.argmax(-1) == labels)[masked].sum())
        tokens += int(masked.sum())
    found = {"masked_loss_nats": loss / tokens, "masked_accuracy_percent": 100 * right / tokens}
    return [found | {"measured_tokens": tokens}]


@with_columns(
    "split", "metric", "words_in_a_row", "inverse_regularization", "score_percent", "measured_examples"
)
def measure_bag_of_words(trained: Trained) -> list[dict[str, Any]]:
    """One record for each score, length of word sequences and regularization, on the test split."""
    dataset = trained.run.dataset
    whole = load_labelled(dataset).splits
    splits = {split: whole[split] for split in ("train", "test")}
    classes = {split: [row.number for row in rows] for split, rows in splits.items()}
    records = []
    for words in _WORDS_IN_A_ROW:
        bags = _bags(splits, words, dataset.max_tokens)
        for strength in _INVERSE_REGULARIZATION:
            model = OneVsRestClassifier(LogisticRegression(C=strength, solver="liblinear", random_state=0))
            model.fit(bags["train"], classes["train"])
            guesses = model.predict(bags["test"]).tolist()
            records += [
                {
                    "split": "test",
                    "metric": name,
                    "words_in_a_row": words,
                    "inverse_regularization": strength,
                    "score_percent": SCORES[name](classes["test"], guesses),
                    "measured_examples": len(guesses),
                }
                for name in dataset.scores
            ]
    return records


def _bags(splits: dict[str, list], words: int, longest: int) -> dict[str, Any]:
    """A sparse matrix for each split, one row per example, with tf-idf weights of the training split."""

    def list_columns(split: str) -> list[list[str]]:
        rows = splits[split]
        texts = [" ".join(row.text.split()[:longest]) for row in rows]
        return [texts, [row.question for row in rows]] if rows[0].question else [texts]

    readers = [TfidfVectorizer(ngram_range=(1, words), sublinear_tf=True) for _ in list_columns("train")]
    for reader, column in zip(readers, list_columns("train"), strict=True):
        reader.fit(column)
    return {
        split: hstack([r.transform(c) for r, c in zip(readers, list_columns(split), strict=True)], "csr")
        for split in splits
    }
