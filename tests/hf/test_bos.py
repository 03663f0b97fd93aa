"""Every interface encodes a text as the same row of tokens, with BOS first as in training."""

from __future__ import annotations

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


def in_training() -> list[int]:
    tokenizer = BPETokenizer((FOLDER / "tokenizer.json").read_text())
    ids = tokenizer.encode(SENTENCE)
    # A sequence is fed without its last token.
    ids, offsets = np.append(ids, ids[:1]), [0, len(ids) + 1]
    return TokenSequences(ids, offsets, len(ids), "train", bos_id=tokenizer.bos_id).batch(0, 1)[0][0].tolist()


def by_the_command(monkeypatch) -> list[int]:
    prompts = []
    monkeypatch.setattr(generation, "stream_tokens", lambda _, ids, *a, **k: prompts.append(ids) or [])
    assert generate.main([str(FOLDER), "--prompt", SENTENCE]) == 0
    return prompts[0][0].tolist()


def by_transformers(folder) -> list[int]:
    return AutoTokenizer.from_pretrained(folder)(SENTENCE)["input_ids"]


def by_inspect(tmp_path, length: int) -> list[int]:
    (tmp_path / "text.txt").write_text(f"{SENTENCE} and the rain fell")
    ids = TextCheckpoint(FOLDER).input_ids(length, length, text=tmp_path / "text.txt")
    return ids[0].tolist()


def nats(model, ids: list[int], tokens: int) -> float:
    """Nats per token over the last tokens."""
    ids = torch.tensor([ids])
    with torch.no_grad():
        return model.loss_per_token(ids[:, :-1], ids[:, 1:])[0, -tokens:].mean().item()


def test_perplexity_agrees_between_all_interfaces(tmp_path, monkeypatch):
    expected, model = in_training(), load_pretrained(FOLDER)
    assert convert.main([str(FOLDER), str(tmp_path / "there"), "--to", "transformers"]) == 0
    ways = {
        "shipped folder": by_transformers(FOLDER),
        "converted folder": by_transformers(tmp_path / "there"),
        "inspect": by_inspect(tmp_path, len(expected)),
        "generate": by_the_command(monkeypatch),
    }
    words = len(expected) - 2  # all except BOS and the first, which is not predicted without BOS
    right = nats(model, expected, words)
    for way, ids in ways.items():
        assert ids == expected, way
        assert nats(model, ids, words) == right, way
    # docs/model.md quotes both values.
    assert right == pytest.approx(2.25, abs=0.005)
    assert nats(model, expected[1:], words) == pytest.approx(4.65, abs=0.005)
