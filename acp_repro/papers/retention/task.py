"""How an encoder with gates is fine-tuned (Section 4.2), for the shared trainer."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from acp_repro.chain.paper import Suite
from acp_repro.retention import from_pretrained, retain
from acp_repro.training.distributed import mean_over_ranks, rank
from acp_repro.training.run_folder import TrainingError, check_done
from acp_repro.training.task import Task

from .suite import RetentionRun
from .texts import Texts, inputs_of, texts_of
from .trained import TrainedRetention


class RetentionTask(Task):
    """Cross entropy of the task, and the budget's penalty."""

    run: RetentionRun

    def __init__(self, run: RetentionRun):
        super().__init__(run)
        for library in ("transformers", "sklearn"):
            if importlib.util.find_spec(library) is None:
                raise TrainingError(f"{library} is not installed; pip install -e '.[retention]'")
        self.texts: Texts = texts_of(run)
        self._train = self.texts.encoded("train")
        batch = run.dataset.batch_examples
        self._rows = run.training.micro_batch_examples or batch
        self.micro_batches = batch // self._rows
        self.steps = max(1, run.dataset.epochs * len(self._train) // batch)
        self.step_tokens = round(batch * float(np.mean([len(row.ids) for row in self._train])))

    def build(self) -> nn.Module:
        model = self._dense()
        if self.run.is_dense:
            return model
        teacher = self._teacher() if self.run.method == "top" else None
        return retain(model, self._config(), teacher)

    def _config(self):
        share = self.run.training
        hard = self.steps - round(share.hard_share * self.steps) if share.hard_share else None
        extra = {"open_steps": round(share.open_share * self.steps), "hard_from_step": hard}
        return self.run.retention_config(**extra, **self.texts.gate_settings())

    def _dense(self) -> nn.Module:
        import transformers

        backbone, texts = self.run.backbone, self.texts
        extractive = texts.labelled.is_extractive
        kind = "QuestionAnswering" if extractive else "SequenceClassification"
        auto = getattr(transformers, f"AutoModelFor{kind}")
        labels = {} if extractive else {"num_labels": len(texts.labelled.classes)}
        if backbone.pretrained:
            try:
                return auto.from_pretrained(backbone.pretrained, dtype=torch.float32, **labels)
            except OSError as error:
                reason = str(error).strip().split("\n")[0]
                raise TrainingError(
                    f"backbones.{self.run.backbone_name}.pretrained: {backbone.pretrained} cannot be loaded "
                    f"({reason}); without a network put its folder there"
                ) from error
        sizes = {
            "num_hidden_layers": backbone.num_hidden_layers,
            "hidden_size": backbone.hidden_size,
            "num_attention_heads": backbone.num_attention_heads,
            "intermediate_size": backbone.intermediate_size,
        }
        dropout = {
            name: backbone.dropout
            for name in (
                "hidden_dropout_prob",
                "attention_probs_dropout_prob",
                "dropout",
                "attention_dropout",
            )
        }
        distilbert = backbone.model_type == "distilbert"
        if distilbert:
            sizes = {
                "n_layers": backbone.num_hidden_layers,
                "dim": backbone.hidden_size,
                "n_heads": backbone.num_attention_heads,
                "hidden_dim": backbone.intermediate_size,
            }
        used = ("dropout", "attention_dropout") if distilbert else tuple(dropout)[:2]
        config = transformers.AutoConfig.for_model(
            backbone.model_type,
            vocab_size=len(texts.tokenizer),
            max_position_embeddings=self.run.dataset.max_tokens + 2,
            pad_token_id=texts.tokenizer.pad_token_id,
            **sizes,
            **{name: dropout[name] for name in used},
            **labels,
        )
        return auto.from_config(config)

    def _teacher(self) -> nn.Module:
        """The dense model of the same task and seed, which ToP is distilled from.

        Raises:
            TrainingError: the suite has none, or it is not trained.
        """
        from acp_repro.chain.suite import load_suite

        run = self.run
        like = [
            r
            for r in load_suite(run.suite).runs
            if r.is_dense
            and (r.dataset_name, r.backbone_name, r.seed) == (run.dataset_name, run.backbone_name, run.seed)
        ]
        if not like:
            raise TrainingError(f"{run.name} is distilled from a dense run of its seed; the suite has none")
        check_done(like[0])
        return load_model(like[0].model_folder)

    def batch(self, index: int) -> tuple[Tensor, ...]:
        """(input_ids, attention_mask, labels): every example once an epoch, in an order of the run's seed."""
        size, chosen = len(self._train), []
        for place in range(index * self._rows, (index + 1) * self._rows):
            epoch, within = divmod(place, size)
            chosen.append(self._train[self._order(epoch)[within]])
        return self.texts.tensors(chosen)

    def _order(self, epoch: int) -> np.ndarray:
        if getattr(self, "_epoch", None) != epoch:
            order = np.random.default_rng([self.run.seed, epoch]).permutation(len(self._train))
            self._epoch, self._permutation = epoch, order
        return self._permutation

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        return model(**inputs_of(batch, batch[0].device)).loss

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then linear to 0."""
        config = self.run.training
        warmup = round(config.warmup_share * self.steps)
        if step < warmup:
            return config.learning_rate * (step + 1) / warmup
        return config.learning_rate * (self.steps - step) / max(1, self.steps - warmup)

    def before_step(self, model: nn.Module, step: int) -> None:
        # Dropout and gates draw from torch's generator: what they draw is of seed, step and rank alone.
        torch.manual_seed(((self.run.seed * 1_000_003 + step) * 1_000_003 + rank()) % 2**63)
        if not self.run.is_dense:
            model.retention.step = step

    def after_step(self, model: nn.Module, step: int) -> None:
        if self.run.is_dense:
            return
        retention = model.retention
        retention.ascend_by(mean_over_ranks(retention.take_violation()))

    def watch(self, model: nn.Module, *batch: Tensor) -> dict[str, Any]:
        """Of each gate: its multiplier, and the share of tokens that p and the gates' openness stand for."""
        if self.run.is_dense or not model.retention.config.is_learned:
            return {}
        training = model.training
        model.eval()  # and draws nothing, so that looking changes no bit
        try:
            with model.retention.recorded() as records:
                model(**inputs_of(batch[:2], batch[0].device))
        finally:
            model.train(training)
        tokens = batch[1].sum()
        return {
            "multiplier": model.retention.multiplier.tolist(),
            "counted_share": [float(r.counted.sum() / tokens) for r in records],
        }

    def shown(self, watched: dict[str, Any]) -> str:
        shares = watched.get("counted_share")
        return f"p {shares[-1]:.0%}" if shares else ""

    def describe(self, model: nn.Module) -> dict[str, Any]:
        return {"parameters": sum(p.numel() for p in model.parameters()), "data": self.texts.describe()}

    def save(self, model: nn.Module, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        _quiet()
        state = None if weights is None else dict(weights)
        model.save_pretrained(folder, state_dict=state, max_shard_size="100GB")
        self.texts.tokenizer.save_pretrained(folder)
        names = json.dumps(list(self.texts.labelled.classes))
        (folder / "classes.json").write_text(names + "\n")

    def load(self, folder: Path, device: torch.device) -> nn.Module:
        return load_model(folder).to(device)

    def trained(self, suite: Suite, device: torch.device) -> TrainedRetention:
        found = super().trained(suite, device)
        return TrainedRetention(
            suite, self.run, self, found.model.eval(), device, found.trained_tokens, texts=self.texts
        )


def load_model(folder: Path) -> nn.Module:
    """A model with gates, or a dense one, as :meth:`RetentionTask.save` wrote it; in evaluation."""
    import transformers

    _quiet()
    config = transformers.AutoConfig.from_pretrained(folder)
    if getattr(config, "retention", None) is not None:
        return from_pretrained(folder).eval()
    return getattr(transformers, config.architectures[0]).from_pretrained(folder).eval()


def _quiet() -> None:
    """Without transformers' own progress bars for a file that takes no time."""
    from transformers.utils import logging

    logging.disable_progress_bar()
