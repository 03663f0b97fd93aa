"""The fine-tuning task of an encoder with gates (Section 4.2) for the shared trainer."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from acp_repro.common import files
from acp_repro.common.errors import usage_errors
from acp_repro.model import third_party
from acp_repro.pipeline.data.sequences import Epochs, batches_by_length
from acp_repro.pipeline.run import file_of
from acp_repro.pipeline.suite_file import load_suite
from acp_repro.pipeline.training.distributed import mean_over_ranks
from acp_repro.pipeline.training.run_folder import TrainingError, check_done
from acp_repro.pipeline.training.task import Task
from acp_repro.retention import from_pretrained, retain
from acp_repro.retention.encoders import position_limit

from .backbones import fresh, start_from, vocabulary
from .pretraining import EncoderTask, PretrainingTask
from .runs import PretrainingRun, RetentionRun
from .texts import load_texts, name_inputs
from .trained import TrainedRetention

_SORTED_BATCHES = 50  # batches whose examples are sorted together by length, as in transformers' Trainer


def task_of(run: RetentionRun | PretrainingRun) -> Task:
    """The task of a run: fine-tuning or pre-training."""
    return PretrainingTask(run) if isinstance(run, PretrainingRun) else RetentionTask(run)


class RetentionTask(EncoderTask):
    """The cross-entropy of the labelled set, plus the penalty of the budget."""

    run: RetentionRun
    trained_type = TrainedRetention

    def __init__(self, run: RetentionRun):
        super().__init__(run)
        if run.start is not None:
            check_done(run.start)
        self.texts = load_texts(run)
        self.tokenizer = self.texts.tokenizer
        self._train = self.texts.encoded("train")
        self._epochs = Epochs(len(self._train), self._order)
        batch = run.dataset.batch_examples
        self._rows = run.dataset.micro_batch_examples or batch
        self.micro_batches = batch // self._rows
        self.steps = max(1, run.dataset.epochs * len(self._train) // batch)
        self.step_tokens = round(batch * float(np.mean([len(row.ids) for row in self._train])))

    def build(self) -> nn.Module:
        model = self._dense()
        model.config.classes_are = self.texts.labelled.classes_are  # for programs that display predictions
        if self.run.is_dense:
            return model
        teacher = self._teacher() if self.run.method == "top" else None
        with usage_errors():  # such as a setting that this encoder does not support
            return retain(model, self._config(), teacher)

    def _config(self):
        share = self.run.training
        hard = self.steps - round(share.hard_share * self.steps) if share.hard_share else None
        extra = {"open_steps": round(share.open_share * self.steps), "hard_from_step": hard}
        return self.run.retention_config(**extra, **self.texts.gate_settings())

    def _dense(self) -> nn.Module:
        run, texts = self.run, self.texts
        extractive = texts.labelled.is_extractive
        kind = "QuestionAnswering" if extractive else "SequenceClassification"
        auto = getattr(transformers, f"AutoModelFor{kind}")
        labels = {} if extractive else {"num_labels": len(texts.labelled.classes)}
        if run.backbone.pretrained:
            model = third_party.load_model(
                auto, run.backbone.pretrained, new_head=True, dtype=torch.float32, **labels
            )
            if run.dataset.max_tokens > (limit := position_limit(model.config)):
                raise TrainingError(
                    f"{run.name}: max_tokens exceeds the {limit} positions of the backbone; reduce it"
                )
            return model
        model = fresh(auto, run.backbone, vocabulary(texts.tokenizer), run.dataset.max_tokens, **labels)
        if run.start is None:
            return model
        return start_from(model, run.start.model_folder, run.start.pretraining.max_tokens)

    def _teacher(self) -> nn.Module:
        """The teacher of ToP: the dense model of the same task and seed."""
        suite = load_suite(str(file_of(self.run.suite)))
        (dense,) = (run for run in suite.prerequisites(self.run) if run.is_dense)
        check_done(dense)
        return load_model(dense.model_folder)

    def batch(self, index: int) -> tuple[Tensor, ...]:
        """(input_ids, attention_mask, labels), int64; every epoch contains each example once, in random
        order.
        """
        chosen = self._epochs.take(index * self._rows, self._rows)
        return self.texts.tensors([self._train[place] for place in chosen])

    def _order(self, epoch: int) -> np.ndarray:
        """The order of an epoch, (examples,) integer, optionally with batches of similar length.

        Examples that complete a batch of the previous epoch remain at the front, and examples that begin a
        batch of the next epoch remain at the end. These two batches are not grouped by length.
        """
        generator = np.random.default_rng([self.run.seed, epoch])
        order = generator.permutation(len(self._train))
        if not self.run.training.group_by_length:
            return order
        size, batch = len(order), self.run.dataset.batch_examples
        first = min(size, -epoch * size % batch)
        stop = size - (size - first) % batch
        lengths = np.array([len(row.ids) for row in self._train])
        batches = batches_by_length(order[first:stop], lengths, batch, _SORTED_BATCHES)
        generator.shuffle(batches)
        return np.concatenate([order[:first], *batches, order[stop:]])

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        return model(**name_inputs(batch, batch[0].device)).loss

    def before_step(self, model: nn.Module, step: int) -> None:
        super().before_step(model, step)
        if not self.run.is_dense:
            model.retention.step = step

    def after_step(self, model: nn.Module, step: int) -> None:
        if not self.run.is_dense:
            model.retention.ascend(mean_over_ranks(model.retention.take_violation()))

    def watch(self, model: nn.Module, *batch: Tensor) -> dict[str, Any]:
        """The multiplier of each gate, and the fraction of tokens that it counts against the budget."""
        if self.run.is_dense or not model.retention.config.is_learned:
            return {}
        training = model.training
        model.eval()  # draws no random numbers, so training stays bitwise identical
        with model.retention.recorded() as records:
            model(**name_inputs(batch[:2], batch[0].device))
        model.train(training)
        tokens = batch[1].sum()
        return {
            "multiplier": model.retention.multiplier.tolist(),
            "counted_share": [float(r.counted.sum() / tokens) for r in records],
        }

    def shown(self, watched: dict[str, Any]) -> str:
        return f"p {watched['counted_share'][-1]:.0%}" if watched else ""

    def describe(self, model: nn.Module) -> dict[str, Any]:
        return super().describe(model) | {"data": self.texts.describe()}

    def save(self, model: nn.Module, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Also writes the names of the classes, to ``classes.json``."""
        super().save(model, folder, weights)
        files.write_text(folder / "classes.json", json.dumps(list(self.texts.labelled.classes)) + "\n")

    def load(self, folder: Path, device: torch.device) -> nn.Module:
        return load_model(folder).to(device)


def load_model(folder: Path) -> nn.Module:
    """The model, with or without gates, that :meth:`RetentionTask.save` wrote; in evaluation mode."""
    config = third_party.load_config(folder)
    if getattr(config, "retention", None) is not None:
        return from_pretrained(folder).eval()
    return third_party.load_model(getattr(transformers, config.architectures[0]), folder).eval()
