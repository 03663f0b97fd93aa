"""Every interface encodes a text as the same row of tokens, with BOS first as in training."""

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="pip install -e '.[transformers]'")

from transformers import AutoTokenizer

from acp_repro import convert, generate, load_pretrained
from acp_repro.model import BPETokenizer, generation
from acp_repro.pipeline.data import TokenSequences
from acp_repro.pipeline.data.text_checkpoint import TextCheckpoint
from tests.conftest import SHIPPED as FOLDER

SENTENCE = "It was a dark and stormy night"  # the README's


def nats(model, ids: list[int], tokens: int) -> float:
    """Nats per token over the last tokens."""
    ids = torch.tensor([ids])
    with torch.no_grad():
        return model.loss_per_token(ids[:, :-1], ids[:, 1:])[0, -tokens:].mean().item()


def test_perplexity_agrees_between_all_interfaces(tmp_path, monkeypatch):
    tokenizer, model = BPETokenizer((FOLDER / "tokenizer.json").read_text()), load_pretrained(FOLDER)
    # In training; a sequence is fed without its last token.
    ids = tokenizer.encode(SENTENCE)
    ids, offsets = np.append(ids, ids[:1]), [0, len(ids) + 1]
    sequences = TokenSequences(ids, offsets, len(ids), "train", bos_id=tokenizer.bos_id)
    expected = sequences.batch(0, 1)[0][0].tolist()
    prompts = []
    monkeypatch.setattr(generation, "stream_tokens", lambda _, ids, *a, **k: prompts.append(ids) or [])
    assert generate.main([str(FOLDER), "--prompt", SENTENCE]) == 0
    text = tmp_path / "text.txt"
    text.write_text(f"{SENTENCE} and the rain fell")
    assert convert.main([str(FOLDER), str(tmp_path / "there"), "--to", "transformers"]) == 0
    ways = {
        "generate": prompts[0][0],
        "inspect": TextCheckpoint(FOLDER).input_ids(len(expected), len(expected), text=text)[0],
        "shipped folder": torch.tensor(AutoTokenizer.from_pretrained(FOLDER)(SENTENCE)["input_ids"]),
        "converted folder": torch.tensor(
            AutoTokenizer.from_pretrained(tmp_path / "there")(SENTENCE)["input_ids"]
        ),
    }
    for way, ids in ways.items():
        assert ids.tolist() == expected, way
    # docs/model.md quotes both values: nats per token with BOS and without, except of the first token.
    predicted = len(expected) - 2
    assert nats(model, expected, predicted) == pytest.approx(2.25, abs=0.005)
    assert nats(model, expected[1:], predicted) == pytest.approx(4.65, abs=0.005)
