"""The score of a bag of words: what of a task needs no encoder.

TF-IDF and logistic regression, one class against the others. It reads as many words as the encoder reads
tokens at most, which is somewhat more text. A question is a bag of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from acp_repro.pipeline.paper import Quantity, first_seeds

if TYPE_CHECKING:
    from acp_repro.pipeline.training.task import Trained

_WORDS_IN_A_ROW = (1, 2)
_INVERSE_REGULARIZATION = (1.0, 10.0, 100.0)  # scikit-learn's C


def measure(trained: Trained) -> list[dict[str, Any]]:
    """One record a setting and score, of the test split (earlier records have dev, too). Settings are single
    words or pairs as well, and a regularization; none is chosen here."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OneVsRestClassifier

    from ..texts import labelled_of
    from ..trained import SCORES

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
    from scipy.sparse import hstack
    from sklearn.feature_extraction.text import TfidfVectorizer

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


QUANTITY = Quantity(
    "bag_of_words",
    "split metric words_in_a_row inverse_regularization score_percent measured_examples",
    measure,
    lambda suite: [run for run in first_seeds(suite.dense) if not run.dataset.is_extractive],
    untrained=lambda run: True,
)
