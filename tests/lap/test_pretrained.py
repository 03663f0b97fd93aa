"""The pretrained model of the project: its properties and the two documented interfaces."""

from pathlib import Path

import pytest
import torch

from acp_repro.lap import PruningAutoencoder
from acp_repro.papers.lap.texts import encode, load_texts
from acp_repro.pipeline.suite_file import load_suite

ROOT = Path(__file__).parents[2]
(FOLDER,) = (ROOT / "pretrained").glob("lap-*")
TEXT = "She went to the window and looked out at the rain."


@pytest.fixture(scope="module")
def shipped():
    return PruningAutoencoder.from_pretrained(FOLDER)


def test_pretrained_model_is_small_and_matches_its_card(shipped, monkeypatch):
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 4_000_000
    monkeypatch.chdir(ROOT)
    run = load_suite("lap-english").main_run
    assert shipped.pruning == run.pruning_config()
    assert run.command in (FOLDER / "README.md").read_text()


@pytest.mark.slow
def test_pretrained_model_keeps_its_accuracy_with_fewer_tokens(shipped, monkeypatch):
    """The suite's target accuracy on held-out sentences, with tokens removed."""
    monkeypatch.chdir(ROOT)
    data = load_suite("lap-english").file.data
    texts = [text.text for text in load_texts(data).heldout]
    rows = encode(shipped.tokenizer, texts, shipped.pruning.max_length)[:100]
    right = tokens = kept = 0
    with torch.no_grad():
        for row in rows:
            losses = shipped(torch.tensor([row]))
            right += float(losses.correct) * len(row)
            kept += int(losses.kept[-1])
            tokens += len(row)
    assert right / tokens >= 0.96 and kept / tokens <= 0.45


def test_documented_encode_and_decode_calls(shipped):
    texts = ["Return the number of items in the list.", "He asked me if I had seen the new house.", TEXT]
    memory = shipped.encode(texts)
    assert shipped.decode(memory) == texts and (memory.kept < 0.6 * memory.lengths).all()
    assert memory.vectors.shape[:2] == memory.positions.shape == (3, int(memory.kept.max()))
    for row, text in enumerate(texts):
        ids = shipped.tokenizer.encode(text)
        places = memory.positions[row][memory.positions[row] >= 0].tolist()
        assert places[-1] == len(ids)  # EOS
        assert memory.tokens[row][:-1] == shipped.tokenizer.tokens(ids[i] for i in places[:-1])
