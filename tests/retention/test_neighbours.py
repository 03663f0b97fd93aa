"""Heads of the first block that begin by looking at neighbours."""

import pytest
import torch

from acp_repro.pipeline.papers.retention.neighbours import look_at_neighbours, neighbour
from acp_repro.pipeline.training.run_folder import TrainingError

from .models import transformers

SIZES = {"vocab_size": 200, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 64}
TOKENS = 200


def encoder(kind="bert", **settings):
    torch.manual_seed(0)
    if kind == "distilbert":
        sizes = {"vocab_size": 200, "dim": 128, "n_heads": 4, "hidden_dim": 64, "n_layers": 2}
    else:
        sizes = {**SIZES, "num_hidden_layers": 2}
    config = transformers.AutoConfig.for_model(kind, **{**sizes, "max_position_embeddings": 210, **settings})
    return transformers.AutoModelForMaskedLM.from_config(config).eval()


def attention(model, ids):
    """(heads, T, T): the weights of the first block."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(ids, output_attentions=True).attentions[0][0]


@pytest.mark.parametrize("kind", ["bert", "distilbert", "roberta"])
def test_each_head_looks_at_its_neighbour(kind):
    model = encoder(kind)
    ids = torch.randint(5, 200, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    before = attention(model, ids)
    assert before.amax() < 0.1
    look_at_neighbours(model)
    places = torch.arange(10, TOKENS - 10)
    for head, weights in enumerate(attention(model, ids)):
        there = places + neighbour(head)
        share = (weights[places].argmax(-1) == there).float().mean()
        assert share > 0.99 and weights[places, there].mean() > 0.4, (kind, head)
    assert [neighbour(head) for head in range(4)] == [-1, 1, -2, 2]


def test_only_the_first_block_changes_and_other_shapes_are_refused():
    plain, model = encoder(), encoder()
    look_at_neighbours(model)
    changed = {n for n, w in model.state_dict().items() if not torch.equal(w, plain.state_dict()[n])}
    assert {name for name in changed if "embeddings" not in name and "decoder" not in name} == {
        "bert.encoder.layer.0.attention.self.query.weight",
        "bert.encoder.layer.0.attention.self.key.weight",
    }
    with pytest.raises(TrainingError, match="neighbour_heads: electra has no position embeddings"):
        look_at_neighbours(encoder("electra", embedding_size=32))
