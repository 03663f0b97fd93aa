"""Labelled sets for encoders: the texts of a corpus, each with a class or with an answer in the text.

Every set has three splits: ``train`` for training, ``dev`` for model selection, ``test`` for results. If a
corpus has no splits, a hash of a text's group (its document or book) determines the split, so that added
texts do not change the split of other texts.
"""

import functools
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from acp_repro.pipeline.data.corpora import find_corpus
from acp_repro.pipeline.data.files import DataError
from acp_repro.pipeline.data.sources import SPLITS, Row, is_heldout

_DEV, _TEST = 0.1, 0.2  # fractions of a corpus without splits
_LATE_DEV = 26 / 256  # fraction of the training texts, for a corpus without a dev split


@dataclass(frozen=True)
class LabelledSet:
    """A labelled set in memory.

    Attributes:
        splits: maps ``train``, ``dev`` and ``test`` to texts, whose ``number`` is the index of the class.
        classes: names of the classes in alphabetical order, by index. Empty for extractive questions.
        classes_are: what the classes name, in words.
    """

    splits: dict[str, list[Row]]
    classes: tuple[str, ...] = ()
    classes_are: str = "classes"

    @property
    def is_extractive(self) -> bool:
        return not self.classes

    @functools.cached_property
    def identity(self) -> str:
        """A SHA-256 of all texts, questions, classes and answers."""
        digest = hashlib.sha256()
        for split in SPLITS:
            for row in self.splits[split]:
                label = -1 if self.is_extractive else row.number
                digest.update(json.dumps([split, row.text, row.question, label, row.answer]).encode())
        return digest.hexdigest()


def read_labelled(corpus: str, path: str | None = None, **options: Any) -> LabelledSet:
    """A corpus as a labelled set. Blank texts and texts without a label or an answer are skipped."""
    function = find_corpus(corpus)
    if "label_field" in function.options:
        options = {"label_field": "label", **options}
    rows = [
        row
        for row in function.open(path, options).rows()
        if row.text.strip() and (row.answer or (row.label or "").strip())
    ]
    classes = tuple(sorted({row.label for row in rows if not row.answer}))
    if not rows or len(classes) == 1:
        raise DataError(f"{function.place(path)} has texts of {len(classes)} classes; two are needed")
    has_dev = any(row.split == "dev" for row in rows)
    splits: dict[str, list[Row]] = {split: [] for split in SPLITS}
    for row in rows:
        number = None if row.answer else classes.index(row.label)
        splits[_split_of(row, has_dev)].append(row._replace(number=number))
    return LabelledSet(splits, classes, function.labels.format(**function.options | options) or "classes")


def _split_of(row: Row, has_dev: bool) -> str:
    key = (row.group or row.text).encode()
    if row.split is None:
        return "test" if is_heldout(key, _TEST) else "dev" if is_heldout(key, _TEST + _DEV) else "train"
    # If the corpus has no dev split, dev is a tenth of the training texts.
    return "dev" if row.split == "train" and not has_dev and is_heldout(key, _LATE_DEV) else row.split
