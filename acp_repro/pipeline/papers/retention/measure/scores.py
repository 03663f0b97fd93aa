"""Scores: of a model as it was trained, pruned at inference only, of masked tokens, and of bags of words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.sparse import hstack
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.multiclass import OneVsRestClassifier

from acp_repro.common.gradients import without_gradients
from acp_repro.pipeline.training.step import autocast
from acp_repro.pipeline.training.task import Trained

from ..quantities import RIGHT, WRONG
from ..settings import GATES
from ..texts import labelled_of
from ..trained import SCORES, TrainedRetention

PRUNINGS = ("random", "h2o")
_ROWS = 32
_WORDS_IN_A_ROW = (1, 2)
_INVERSE_REGULARIZATION = (1.0, 10.0, 100.0)  # scikit-learn's C


def measure_score(trained: TrainedRetention) -> list[dict[str, Any]]:
    """One record a split and score; tokens are removed as at inference.

    If a score is the share of right answers, ``items_right`` has one character an example, in the set's
    order. ``items_hash`` is the hash of the set, because runs are compared example by example.
    """
    records, known = [], trained.texts.labelled.identity[:12]
    for split in ("dev", "test"):
        found = trained.evaluate(trained.model, split)
        records += [
            {
                "split": split,
                "metric": name,
                "score_percent": value,
                "loss_nats": found.loss_nats,
                "measured_examples": found.examples,
                "kept_share": found.kept_share,
                "items_hash": known,
                "items_right": _signs(found.right.get(name)),
            }
            for name, value in found.scores.items()
        ]
    return records


def _signs(right: Sequence[bool] | None) -> str | None:
    return None if right is None else "".join(RIGHT if each else WRONG for each in right)


def measure_pruned_dense(trained: TrainedRetention) -> list[dict[str, Any]]:
    """One record a pruning, place of the gate, budget and score, on the test split; ``none`` is the dense
    model."""
    plain = trained.evaluate(trained.model, "test")
    records = _records("none", "none", 1.0, plain)
    for gates in GATES:
        for pruning in PRUNINGS:
            for budget in trained.measure_settings.budgets:
                model = trained.pruned(method=pruning, gates=gates, budget=budget)
                records += _records(pruning, gates, budget, trained.evaluate(model, "test"))
    return records


def _records(pruning: str, gates: str, budget: float, found) -> list[dict[str, Any]]:
    return [
        {
            "pruning": pruning,
            "pruning_gates": gates,
            "pruning_budget": budget,
            "metric": name,
            "score_percent": value,
            "loss_nats": found.loss_nats,
            "measured_examples": found.examples,
            "kept_share": found.kept_share,
        }
        for name, value in found.scores.items()
    ]


@without_gradients
def measure_masked_loss(trained: Trained) -> list[dict[str, Any]]:
    """One record: the mean loss of a masked token, and the share predicted right; always with the same
    masks."""
    task, model, draw = trained.task, trained.model.eval(), np.random.default_rng(0)
    pieces = range(min(task.sequences("heldout"), trained.measure_settings.examples))
    loss, right, tokens = 0.0, 0, 0
    for first in range(0, len(pieces), _ROWS):
        given = task.masked("heldout", list(pieces[first : first + _ROWS]), draw)
        input_ids, labels = (x.to(trained.device) for x in given)
        with autocast(trained.device, trained.run.training.dtype):
            output = model(input_ids=input_ids, labels=labels)
        told = labels >= 0
        loss += float(output.loss) * int(told.sum())
        right += int((output.logits.argmax(-1) == labels)[told].sum())
        tokens += int(told.sum())
    return [
        {
            "masked_loss_nats": loss / tokens,
            "masked_accuracy_percent": 100 * right / tokens,
            "measured_tokens": tokens,
        }
    ]


def measure_bag_of_words(trained: Trained) -> list[dict[str, Any]]:
    """One record a setting and score, of the test split (earlier records have dev, too). Settings are single
    words or pairs as well, and a regularization; none is chosen here."""
    dataset = trained.run.dataset
    whole = labelled_of(dataset).splits
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
    """Of each split a sparse matrix, a row an example; words are weighed as the training split has them."""

    def of(split: str) -> list[list[str]]:
        rows = splits[split]
        texts = [" ".join(row.text.split()[:longest]) for row in rows]
        return [texts, [row.question for row in rows]] if rows[0].question else [texts]

    readers = [TfidfVectorizer(ngram_range=(1, words), sublinear_tf=True) for _ in of("train")]
    for reader, column in zip(readers, of("train"), strict=True):
        reader.fit(column)
    return {
        split: hstack([r.transform(c) for r, c in zip(readers, of(split), strict=True)], "csr")
        for split in splits
    }
