"""The training task of a pruning autoencoder for the shared trainer."""

import functools
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from acp_repro.lap import PruningAutoencoder, draw_noise
from acp_repro.lap.autoencoder import pad
from acp_repro.pipeline.data.files import DataError
from acp_repro.pipeline.paper import Suite
from acp_repro.pipeline.run import file_of
from acp_repro.pipeline.training.run_folder import check_done, check_trained_text
from acp_repro.pipeline.training.task import Task, Trained

from .runs import PruningRun
from .schema import SHORTEST_CUT, TrainingConfig
from .texts import Batches, encode, load_texts, make_tokenizer

RUNNING_MEAN = 0.95  # decay per step of the running mean of the cross-entropy
SMALLEST_SIZE = 1e-3  # lower bound of a weight's root mean square, for its learning rate
WATCHED_TEXTS = 200


class Trainee(nn.Module):
    """The model with the schedule of lambda, whose state is saved, so that a resumed run continues it.

    Args:
        compression: lambda; None trains without gates.
    """

    def __init__(self, model: PruningAutoencoder, config: TrainingConfig, compression: float | None):
        super().__init__()
        self.model, self.compression = model, compression
        self._config = config
        # float64, so that steps count exactly
        self.register_buffer("running_nats", torch.tensor(float("inf"), dtype=torch.float64))
        self.register_buffer("steps", torch.tensor(0.0, dtype=torch.float64))
        self.register_buffer("steps_with_lambda", torch.tensor(0.0, dtype=torch.float64))

    def state_dict(self, *arguments, **options) -> dict[str, Tensor]:
        """The state dict with each weight once, because embeddings and head may share one tensor."""
        whole = super().state_dict(*arguments, **options)
        prefix = options.get("prefix", "")
        once = {prefix + name for name, _ in itertools.chain(self.named_parameters(), self.named_buffers())}
        return {name: tensor for name, tensor in whole.items() if name in once}

    def forward(self, input_ids: Tensor, noise: Tensor) -> Tensor:
        """The loss, a float32 scalar, for ids (B, T) and noise (S, B, T); counts steps in training."""
        found = self.model(input_ids, noise if noise.numel() else None, **self._options())
        loss = found.cross_entropy + self._price() * found.compression
        if self.training and torch.is_grad_enabled():
            self._count(found.cross_entropy.detach())
        return loss

    def _options(self) -> dict[str, Any]:
        """Options of the forward pass in this step: whether gates are active, and whether they see tokens."""
        config = self._config
        if self.compression is None:
            return {"mask": "none"}
        if config.lambda_below_nats is not None and not self.steps_with_lambda:
            return {"mask": "none"}
        dropout = config.token_dropout_steps
        return {"blind": True} if dropout and self.steps_with_lambda <= dropout else {}

    def _price(self) -> Tensor:
        """The present value of lambda, a scalar."""
        ramp = max(1, self._config.lambda_ramp_steps)
        done = self.steps_with_lambda - self._config.token_dropout_steps
        price = (self.compression or 0.0) * (done / ramp).clamp(0.0, 1.0)
        if self._config.lambda_off_loss is not None:
            price = price * (1 - self.running_nats / self._config.lambda_off_loss).clamp(min=0.0)
        return price.float()

    def _count(self, cross_entropy: Tensor) -> None:
        before = torch.where(torch.isinf(self.running_nats), cross_entropy, self.running_nats)
        self.running_nats.copy_(RUNNING_MEAN * before + (1 - RUNNING_MEAN) * cross_entropy)
        self.steps += 1
        below = self._config.lambda_below_nats
        if below is None:
            begins = self.steps >= self._config.lambda_from_step
        else:
            # The running mean is too noisy in the first steps.
            begins = (self.running_nats < below) & (self.steps > 1 / (1 - RUNNING_MEAN))
        self.steps_with_lambda += (begins | (self.steps_with_lambda > 0)).double()


class TrainedPruning(Trained):
    """A trained pruning autoencoder, in evaluation mode, with the held-out text that it is measured on."""

    run: PruningRun
    model: PruningAutoencoder

    def heldout_rows(self, most: int) -> list[list[int]]:
        """Token ids, with EOS, of the first held-out texts."""
        return self.task.rows("heldout", most)

    def batches(self, rows: list[list[int]]) -> Iterator[Tensor]:
        """(B, T) int64 on the model's device, in order."""
        size = self.measure_settings.batch_texts
        for start in range(0, len(rows), size):
            yield pad(rows[start : start + size], self.task.tokenizer.pad_id).to(self.device)


class PruningTask(Task):
    """Reconstruction of the run's texts from a decreasing number of tokens."""

    run: PruningRun
    trained_type = TrainedPruning

    def __init__(self, run: PruningRun):
        super().__init__(run)
        with run.data.errors_at(f"{file_of(run.suite)}: data"):
            self.texts = load_texts(run.data)
        self._start: PruningAutoencoder | None = None
        if run.model.weights is None:
            self.tokenizer = make_tokenizer(self.texts, run.data.vocabulary)
        else:
            self._start = PruningAutoencoder.from_t5(
                run.model.weights, run.pruning_config(), dropout_rate=0.0
            )
            self.tokenizer = self._start.tokenizer
        self.steps = run.training.steps

    # Properties that only training needs are computed on first use.
    @functools.cached_property
    def _rows(self) -> list[list[int]]:
        return self.rows("train")

    @functools.cached_property
    def _batches(self) -> Batches:
        run, rows = self.run, self._rows  # outside errors_at, because errors of the rows name another key
        with run.data.errors_at(f"{file_of(run.suite)}: training.batch_texts"):
            return Batches(rows, run.training.batch_texts, self.tokenizer.pad_id, run.seed)

    @functools.cached_property
    def step_tokens(self) -> int:
        """Mean number of tokens per step."""
        return round(self.run.training.batch_texts * sum(map(len, self._rows)) / len(self._rows))

    def rows(self, split: str, most: int | None = None) -> list[list[int]]:
        """Token ids, with EOS, of the texts of a split that fit the model."""
        texts = [text.text for text in getattr(self.texts, split)]
        texts += self.texts.more if split == "train" else ()
        rows = encode(self.tokenizer, texts, self.run.pruning.max_length)
        if not rows:
            raise DataError(
                f"{file_of(self.run.suite)}: pruning.max_length: no text of {split} has at most "
                f"{self.run.pruning.max_length} tokens; raise it, or add shorter texts"
            )
        return rows if most is None else rows[:most]

    def build(self) -> Trainee:
        config, start = self.run.pruning_config(), self.run.start
        if start is not None:
            check_done(start)
            model = PruningAutoencoder.from_pretrained(start.model_folder)
            model = PruningAutoencoder(model.t5, config, self.tokenizer)
        elif self._start is not None:
            model = self._start
        else:
            model = PruningAutoencoder.from_scratch(config, self.tokenizer, **self.run.model.shape)
        # A T5 that was loaded from a folder is in evaluation mode.
        return Trainee(model, self.run.training, self.run.compression).train()

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        """Token ids (B, T) int64, and the noise (S, B, T) float32 of the gates or an empty tensor."""
        input_ids = self._batches(index, self._most_tokens(index))
        config = self.run.pruning_config()
        shape = self.run.model if self._start is None else self._start.t5.config
        gates = len(config.gated_blocks(shape.num_layers))
        generator = torch.Generator().manual_seed(self.run.seed * 1_000_003 + index)
        noise = draw_noise((gates, *input_ids.shape), config, generator)
        return input_ids, torch.empty(0) if noise is None else noise

    def _most_tokens(self, index: int) -> int | None:
        steps, most = self.run.training.length_warmup_steps, self.run.pruning.max_length
        if index >= steps:
            return None
        return SHORTEST_CUT + (most - SHORTEST_CUT) * index // steps

    def loss(self, model: nn.Module, input_ids: Tensor, noise: Tensor) -> Tensor:
        return model(input_ids, noise)

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then constant, then linear to a tenth."""
        config = self.run.training
        rate = config.learning_rate * min(1.0, (step + 1) / max(1, config.warmup_steps))
        tail = config.decay_share * config.steps
        done = max(0.0, step - (config.steps - tail)) / tail if tail else 0.0
        return rate * (1 - 0.9 * done)

    def rates(self, model: nn.Module) -> dict[Tensor, float]:
        if not self.run.training.scale_parameter:
            return {}
        sizes = {p: float(p.detach().float().square().mean().sqrt()) for p in model.parameters()}
        return {p: float(f"{max(size, SMALLEST_SIZE):.1e}") for p, size in sizes.items()}

    def watch(self, model: nn.Module, input_ids: Tensor, noise: Tensor) -> dict[str, Any]:
        """Means over held-out texts with removed tokens, and (``soft_``) with the mask of training.

        ``soft_ratio`` is the article's L(s) / L(0), or for hard concrete gates the expected keep ratio.
        """
        rows, size = self.rows("heldout", WATCHED_TEXTS), self.run.training.batch_texts
        sums: dict[str, Any] = {}
        model.eval()
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            ids = pad(part, self.tokenizer.pad_id).to(input_ids.device)
            removed, soft = model.model(ids, mask="removed"), model.model(ids, mask="soft")
            means = {
                "accuracy": removed.correct.mean(),
                "keep_ratio": (removed.kept[1:] / removed.kept[0]).mean(1),
                "soft_accuracy": soft.correct.mean(),
                "soft_ratio": (soft.lengths[1:] / soft.lengths[0]).mean(1),
            }
            for name, value in means.items():
                sums[name] = sums.get(name, 0) + value * len(part)
        model.train()
        return {name: (value / len(rows)).tolist() for name, value in sums.items()}

    def shown(self, watched: dict[str, Any]) -> str:
        return f"accuracy {watched['accuracy']:.2f}, kept {watched['keep_ratio'][-1]:.0%}" if watched else ""

    def describe(self, model: nn.Module) -> dict[str, Any]:
        counts = {"train_texts": len(self._rows), "heldout_texts": len(self.rows("heldout"))}
        return super().describe(model) | {"data": {"hash": self.texts.hash, **counts}}

    def save(self, model: nn.Module, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        if weights is not None:  # drop the prefix of the enclosing Trainee
            weights = {n.removeprefix("model."): t for n, t in weights.items() if n.startswith("model.")}
        model.model.save_pretrained(folder, weights)

    def load(self, folder: Path, device: torch.device) -> PruningAutoencoder:
        return PruningAutoencoder.from_pretrained(folder, device)

    def trained(self, suite: Suite, device: torch.device) -> Trained:
        check_trained_text(self.run, self.run.data.corpus, self.texts.hash)
        return super().trained(suite, device)
