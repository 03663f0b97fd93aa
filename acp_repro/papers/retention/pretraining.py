"""The pre-training task of an encoder, masked language modelling, for the shared trainer."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM
from transformers.utils import logging

from acp_repro.model.third_party import load_model
from acp_repro.pipeline.data import prepare
from acp_repro.pipeline.data.sequences import Epochs
from acp_repro.pipeline.run import file_of
from acp_repro.pipeline.training.distributed import rank
from acp_repro.pipeline.training.run_folder import TrainingError
from acp_repro.pipeline.training.task import Task
from acp_repro.retention.encoders import find_encoder

from .backbones import fresh, vocabulary
from .runs import PretrainingRun, RetentionRun
from .texts import make_bert_tokenizer

_AMPLITUDE = 2.0  # amplitude of the waves, in standard deviations of the embeddings
_PEAK = 8.0  # the score at the neighbour of a head; other scores are about 0
_IGNORED = -100  # the label that the loss of transformers ignores


class EncoderTask(Task):
    """The base class of fine-tuning and pre-training; ``tokenizer`` is saved with the model."""

    run: PretrainingRun | RetentionRun
    tokenizer: Any

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then linear to 0."""
        config = self.run.training
        warmup = round(config.warmup_share * self.steps)
        if step < warmup:
            return config.learning_rate * (step + 1) / warmup
        return config.learning_rate * (self.steps - step) / max(1, self.steps - warmup)

    def before_step(self, model: nn.Module, step: int) -> None:
        """Seeds torch's generator, so that dropout and gates depend on seed, step and rank alone."""
        torch.manual_seed(((self.run.seed * 1_000_003 + step) * 1_000_003 + rank()) % 2**63)

    def save(self, model: nn.Module, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        logging.disable_progress_bar()
        state = None if weights is None else dict(weights)
        model.save_pretrained(folder, state_dict=state, max_shard_size="100GB")
        self.tokenizer.save_pretrained(folder)


class PretrainingTask(EncoderTask):
    """The cross-entropy of the masked tokens."""

    run: PretrainingRun

    def __init__(self, run: PretrainingRun):
        super().__init__(run)
        settings = run.pretraining
        with settings.data.errors_at(f"{file_of(run.suite)}: pretraining.{run.dataset_name}.data"):
            self.corpus = prepare(settings.data)
        self.tokenizer = make_bert_tokenizer(tokenizers.Tokenizer.from_str(self.corpus.tokenizer.json_text))
        self._rows = settings.micro_batch_sequences or settings.batch_sequences
        self.micro_batches = settings.batch_sequences // self._rows
        self.steps = settings.steps
        self.step_tokens = settings.batch_sequences * settings.max_tokens
        if self.sequences("train") < 1:
            raise TrainingError(f"{run.name}: the text has fewer than {settings.max_tokens} tokens; add text")
        self._epochs = Epochs(self.sequences("train"), self._order)

    def sequences(self, split: str) -> int:
        """The number of pieces of equal length into which the token stream of a split is cut."""
        return len(self.corpus.tokens(split)) // (self.run.pretraining.max_tokens - 2)

    def build(self) -> nn.Module:
        settings = self.run.pretraining
        model = fresh(
            AutoModelForMaskedLM, self.run.backbone, vocabulary(self.tokenizer), settings.max_tokens
        )
        if settings.neighbour_heads:
            look_at_neighbours(model)
        return model

    def batch(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """input_ids (B, T) int64; the masked tokens and their indices in the flattened batch, (M,) int64
        each.

        Every epoch contains each piece once, with new masks.
        """
        pieces = self._epochs.take(index * self._rows, self._rows)
        input_ids, labels = self.masked("train", pieces, np.random.default_rng([self.run.seed, 1, index]))
        labels = labels.flatten()
        places = (labels != _IGNORED).nonzero()[:, 0]
        return input_ids, labels[places], places

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.run.seed, 0, epoch]).permutation(self.sequences("train"))

    def masked(self, split: str, pieces: Sequence[int], draw: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Pieces of a split with [CLS] and [SEP], (B, T) int64, and labels: masked tokens, otherwise -100."""
        settings, tokenizer = self.run.pretraining, self.tokenizer
        length, tokens = settings.max_tokens - 2, self.corpus.tokens(split)
        ids = np.stack([tokens[p * length : (p + 1) * length] for p in pieces]).astype(np.int64)
        chosen = np.argsort(draw.random(ids.shape), axis=1)[:, : settings.masked_tokens]
        rows = np.arange(len(ids))[:, None]
        labels = np.full_like(ids, _IGNORED)
        labels[rows, chosen] = ids[rows, chosen]
        # 80 % become [MASK], 10 % a random token of the vocabulary, 10 % remain (Devlin et al. 2019).
        kind, other = draw.random(chosen.shape), draw.integers(0, self.corpus.bos_id, chosen.shape)
        told = np.where(kind < 0.9, other, ids[rows, chosen])
        ids[rows, chosen] = np.where(kind < 0.8, tokenizer.mask_token_id, told)
        ends = (0, 0), (1, 1)
        ids = np.pad(ids, ends)
        ids[:, 0], ids[:, -1] = tokenizer.cls_token_id, tokenizer.sep_token_id
        labels = np.pad(labels, ends, constant_values=_IGNORED)
        return torch.from_numpy(ids), torch.from_numpy(labels)

    def loss(self, model: nn.Module, input_ids: Tensor, labels: Tensor, places: Tensor) -> Tensor:
        """The loss, a scalar in nats. The head is computed only for masked tokens; for all tokens, the head
        would take a third of a step."""

        def chosen(_module: nn.Module, _given: Any, output: Any) -> Any:
            output["last_hidden_state"] = output.last_hidden_state.flatten(0, 1)[places][None]
            return output

        encoder = getattr(model, "module", model).base_model
        hook = encoder.register_forward_hook(chosen)
        try:
            return model(input_ids=input_ids, labels=labels[None]).loss
        finally:
            hook.remove()

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        encoder = find_encoder(model)
        return list(encoder.find_layers(encoder.find_stack(model)))

    def describe(self, model: nn.Module) -> dict[str, Any]:
        return super().describe(model) | {"data": self.corpus.describe()}

    def load(self, folder: Path, device: torch.device) -> nn.Module:
        return load_model(AutoModelForMaskedLM, folder).to(device)


@torch.no_grad()
def look_at_neighbours(model: nn.Module) -> None:
    """Modifies random weights so that heads 0, 1, 2 ... of the first block attend to offsets -1, 1, -2 ...

    From random weights, an encoder first learns token frequencies. The loss then remains constant for
    thousands of steps, until attention finds the neighbours of a mask
    (docs/lab-notebook/adaptive-retention.md).

    Let d be the head dimension. The first d dimensions of the embeddings encode only the position t, as
    sin(w t) and cos(w t) for d / 2 frequencies w. Queries project these dimensions unchanged, and keys rotate
    them back by the distance of the neighbour. A score is then a sum of cos(w (distance - neighbour)).
    """
    encoder, config = find_encoder(model), model.config
    base = getattr(model, model.base_model_prefix, model)
    embedding, size = base.embeddings.position_embeddings, config.hidden_size // config.num_attention_heads
    assert embedding.weight.shape[1] == config.hidden_size and size % 2 == 0
    block = encoder.find_layers(encoder.find_stack(model))[0]
    query, key = block.get_submodule(encoder.query), block.get_submodule(encoder.key)
    # Random, but equal for every run: evenly spaced frequencies coincide again at some larger distance.
    frequency = math.pi * torch.rand(size // 2, generator=torch.Generator().manual_seed(0))
    std = config.initializer_range
    angle = torch.arange(len(embedding.weight))[:, None] * frequency
    for each in base.embeddings.children():
        if isinstance(each, nn.Embedding):
            each.weight[:, :size] = 0
    embedding.weight[:, :size] = _AMPLITUDE * std * torch.stack([angle.sin(), angle.cos()], -1).flatten(1)
    # The norm after the embeddings divides by the deviation of word plus position, each with ``std``.
    amplitude = _AMPLITUDE / math.sqrt(2)
    gain = math.sqrt(_PEAK * math.sqrt(size) / (size / 2 * amplitude**2))
    for head in range(config.num_attention_heads):
        rows = slice(head * size, (head + 1) * size)
        query.weight[rows, :size] += gain * torch.eye(size)
        distance = (1 if head % 2 else -1) * (1 + head // 2)
        turn = frequency * distance
        key.weight[rows, :size] += gain * torch.block_diag(
            *(torch.tensor([[c, -s], [s, c]]) for c, s in zip(turn.cos(), turn.sin(), strict=True))
        )
