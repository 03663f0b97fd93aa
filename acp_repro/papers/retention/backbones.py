"""The encoder of a backbone, with published weights, random weights, or weights of own pre-training."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from acp_repro.model.third_party import load_config, load_model
from acp_repro.retention import retain
from acp_repro.retention.encoders import LIKE_ROBERTA

from .runs import RetentionRun
from .schema import SPECIAL, BackboneConfig

# Maps the settings of encoders of transformers to the keys of a backbone.
_DISTILBERT = {
    "n_layers": "num_hidden_layers",
    "dim": "hidden_size",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "dropout": "dropout",
    "attention_dropout": "dropout",
}
_LIKE_BERT = {
    "num_hidden_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "dropout",
}


def vocabulary(tokenizer) -> dict[str, int]:
    """The properties of a tokenizer of transformers that :func:`fresh` needs."""
    return {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "sep_token_id": tokenizer.sep_token_id,
    }


def fresh(
    auto: type, backbone: BackboneConfig, words: Mapping[str, int], max_tokens: int, **labels: Any
) -> nn.Module:
    """A model of the backbone's shape with random weights and the head of ``auto``; ``words`` is the result
    of :func:`vocabulary`."""
    names = _DISTILBERT if backbone.model_type == "distilbert" else _LIKE_BERT
    sizes = {name: getattr(backbone, key) for name, key in names.items()}
    if backbone.model_type == "longformer":
        sizes["sep_token_id"] = words["sep_token_id"]  # its question-answering head needs it
    config = transformers.AutoConfig.for_model(
        backbone.model_type,
        vocab_size=words["vocab_size"],
        max_position_embeddings=max_tokens + _first_position(backbone.model_type, spare=2),
        pad_token_id=words["pad_token_id"],
        **sizes,
        **labels,
    )
    return auto.from_config(config)


def untrained(run: RetentionRun) -> nn.Module:
    """An encoder of a run's shape with the run's gates and random weights; reads no text.

    The head has two classes, also for questions, and the gates protect no question.
    """
    Classifier = transformers.AutoModelForSequenceClassification

    def dense() -> nn.Module:
        if run.backbone.pretrained:
            return Classifier.from_config(load_config(run.backbone.pretrained, num_labels=2))
        text = run.start and run.start.pretraining.data
        # The tokenizer of an encoder does not contain the BOS of the text.
        size = text.bpe_size - 1 + len(SPECIAL) if text else run.backbone.vocab_size
        words = {"vocab_size": size, "pad_token_id": 0, "sep_token_id": 2}
        return fresh(Classifier, run.backbone, words, run.dataset.max_tokens, num_labels=2)

    torch.manual_seed(run.seed)
    model = dense()
    if run.is_dense:
        return model
    return retain(model, run.retention_config(), dense() if run.method == "top" else None)


def start_from(model: nn.Module, folder: Path, trained_positions: int) -> nn.Module:
    """Loads the weights of the encoder from a pre-trained model in ``folder``; the head remains unchanged.

    Position embeddings beyond those of pre-training repeat them cyclically, as Longformer repeats those of
    RoBERTa (Beltagy et al. 2020, Section 5).
    """
    prefix = f"{model.base_model_prefix}."
    found = load_model(transformers.AutoModelForMaskedLM, folder).state_dict()
    weights = {name: weight for name, weight in found.items() if name.startswith(prefix)}
    ours = model.state_dict()
    first = _first_position(model.config.model_type)
    for name, weight in weights.items():
        if name.endswith("position_embeddings.weight") and name in ours:
            weights[name] = _extended(weight, len(ours[name]), first, trained_positions)
    assert weights and weights.keys() <= ours.keys(), folder
    model.load_state_dict(weights, strict=False)
    return model


def _extended(weight: Tensor, rows: int, first: int, trained: int) -> Tensor:
    """Position embeddings (rows, D) that repeat the trained ones."""
    at = torch.arange(rows)
    return weight[torch.where(at < first, at, first + (at - first) % trained)]


def _first_position(model_type: str, spare: int = 0) -> int:
    """The index of the first position: 2 for RoBERTa and its variants, ``spare`` for other encoders."""
    return 2 if model_type in LIKE_ROBERTA else spare
