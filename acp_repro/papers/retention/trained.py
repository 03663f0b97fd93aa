"""A fine-tuned encoder, with the labelled set that it is measured on."""

import copy
import operator
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sklearn.metrics import accuracy_score, f1_score
from torch import Tensor, nn

from acp_repro.pipeline.training.task import Trained
from acp_repro.pipeline.training.trainer import autocast
from acp_repro.retention import retain

from .runs import RetentionRun
from .texts import Encoded, Texts, name_inputs

_ROWS = 64


@dataclass
class Evaluation:
    """The results of a model on a split."""

    scores: dict[str, float]  # percent
    loss_nats: float  # mean per example, without the penalty
    examples: int
    keep_ratio: float  # tokens left after the last gate, over all tokens
    right: dict[str, list[bool]]  # for scores that are an accuracy, whether each answer is right


class TrainedRetention(Trained):
    run: RetentionRun

    @property
    def texts(self) -> Texts:
        """The labelled set of the run."""
        return self.task.texts

    def pruned(self, **changes: Any) -> nn.Module:
        """A copy of a dense model with gates that need no training, such as ``method="h2o"``."""
        config = self.run.retention_config(**changes, **self.texts.gate_settings())
        model = copy.deepcopy(self.model)
        return retain(model, config).to(self.device).eval()

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: str, limit: int | None = None) -> Evaluation:
        """Scores of ``run.dataset.scores`` on a split, with hard gates as at inference."""
        model.eval()
        predicted, truth, loss, examples, kept, tokens = [], [], 0.0, 0, 0, 0
        gates = getattr(model, "retention", None)
        for rows in self.texts.batches(split, _ROWS, limit):
            inputs = name_inputs(self.texts.tensors(rows), self.device)
            with autocast(self.device, self.run.training.dtype):
                if gates is None or not gates.places:
                    output, left = model(**inputs), inputs["attention_mask"].sum()
                else:
                    with gates.recorded() as records:
                        output = model(**inputs)
                    left = records[-1].kept.sum()
            loss += float(output.loss) * len(rows)
            examples += len(rows)
            kept += int(left)
            tokens += int(inputs["attention_mask"].sum())
            predicted += self._answers(output, rows)
            truth += [
                row.example.answers if self.texts.labelled.is_extractive else row.example.number
                for row in rows
            ]
        scores = {name: SCORES[name](truth, predicted) for name in self.run.dataset.scores}
        right = {
            name: [hit(t, p) for t, p in zip(truth, predicted, strict=True)]
            for name, hit in HITS.items()
            if name in scores
        }
        return Evaluation(scores, loss / examples, examples, kept / tokens, right)

    def _answers(self, output: Any, rows: Sequence[Encoded]) -> list[Any]:
        if not self.texts.labelled.is_extractive:
            return output.logits.argmax(-1).tolist()
        starts, ends = output.start_logits.float().cpu(), output.end_logits.float().cpu()
        return [_best_span(*one) for one in zip(starts, ends, rows, strict=True)]


def _best_span(start: Tensor, end: Tensor, row: Encoded, longest: int = 64) -> str:
    """The text of the best span of at most ``longest`` tokens inside the passage."""
    inside = torch.tensor([offset != (0, 0) for offset in row.offsets])
    start, end = (x[: len(inside)].masked_fill(~inside, -torch.inf) for x in (start, end))
    total = (start[:, None] + end).masked_fill(
        ~torch.ones(len(inside), len(inside)).triu().tril(longest - 1).bool(), -torch.inf
    )
    first, last = divmod(int(total.argmax()), len(inside))
    return row.example.text[row.offsets[first][0] : row.offsets[last][1]]


# ---- scores, in percent -----------------------------------------------------------------------


def normalized(answer: str) -> list[str]:
    """The words of an answer, normalised as in SQuAD's evaluation."""
    text = "".join(c for c in answer.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def _matches(answers: Sequence[str], guess: str) -> bool:
    return any(normalized(answer) == normalized(guess) for answer in answers)


def _word_f1(answers: Sequence[str], guess: str) -> float:
    def overlap(a: list[str], g: list[str]) -> float:
        same = sum((Counter(a) & Counter(g)).values())
        return float(a == g) if not a or not g else 2 * same / (len(a) + len(g))

    return max(overlap(normalized(answer), normalized(guess)) for answer in answers)


def _mean_percent(score: Callable[..., float]) -> Callable[..., float]:
    def mean(truth: Sequence[Any], predicted: Sequence[Any]) -> float:
        return 100 * sum(score(t, p) for t, p in zip(truth, predicted, strict=True)) / len(truth)

    return mean


SCORES = {
    "accuracy": lambda truth, predicted: 100 * accuracy_score(truth, predicted),
    "micro_f1": lambda t, p: 100 * f1_score(t, p, average="micro", zero_division=0),
    "macro_f1": lambda t, p: 100 * f1_score(t, p, average="macro", zero_division=0),
    "exact_match": _mean_percent(_matches),
    "f1": _mean_percent(_word_f1),
}
# Scores that are an accuracy over examples; with one class per example, micro F1 equals accuracy.
HITS = {"accuracy": operator.eq, "micro_f1": operator.eq, "exact_match": _matches}
