"""Tiny random models, and a tokenizer of a few words, for the tests of pruning."""

import dataclasses

import torch

from acp_repro.lap import PruningAutoencoder, PruningConfig, TextTokenizer
from acp_repro.pipeline.data.sources import Document
from acp_repro.pipeline.data.tokenizer import train_bpe

TEXTS = ["the green cat sat on the mat", "a cat", "green mats are for green cats, said the cat on the mat"]
SHAPE = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 4, "num_decoder_layers": 2, "num_heads": 3}


def tokenizer() -> TextTokenizer:
    documents = [Document(str(i), t.encode(), t.encode()) for i, t in enumerate(TEXTS)]
    return TextTokenizer.with_special_tokens(train_bpe(documents, 270))


def model(seed: int = 0, shape=SHAPE, **settings) -> PruningAutoencoder:
    """A random model; by default about half of its tokens are dropped."""
    torch.manual_seed(seed)
    noise = "logistic" if settings.get("training_mask") == "hard_concrete" else "none"
    config = PruningConfig(**{"beta": 0.0, "tau": 0.5, "noise": noise, "max_length": 64, **settings})
    built = PruningAutoencoder.from_scratch(config, tokenizer(), **shape).eval()
    with torch.no_grad():  # signals of about 1, so that every gate drops some tokens
        for block in built.t5.encoder.block:
            block.layer[-1].DenseReluDense.wo.weight[0] *= 20
    return built


def with_settings(built: PruningAutoencoder, **settings) -> PruningAutoencoder:
    """The same weights with other settings."""
    return PruningAutoencoder(built.t5, dataclasses.replace(built.pruning, **settings), built.tokenizer)


def without_element_0(built: PruningAutoencoder) -> PruningAutoencoder:
    """Weights that never write to element 0, so that clearing it changes nothing."""
    with torch.no_grad():
        built.t5.shared.weight[:, 0] = 0
        for block in built.t5.encoder.block:
            block.layer[0].SelfAttention.o.weight[0] = 0
            block.layer[-1].DenseReluDense.wo.weight[0] = 0
    return built
