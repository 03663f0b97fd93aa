"""The measurements of LAP: counts, and the computation saved by removal."""

from types import SimpleNamespace

import pytest
import torch

from acp_repro.lap.decoder import Decoding
from acp_repro.lap.encoder import encode_removed
from acp_repro.papers.lap.measure.keep_ratio_by_word import kind_of, measure_keep_ratio_by_word
from acp_repro.papers.lap.measure.removal_time import _compare, held_bytes
from tests.lap.tiny import TEXTS, model
from tests.suites import slow_every_other

CPU = torch.device("cpu")


def test_decoder_cache_size_matches_its_formula(built):
    memory = built.encode(TEXTS)
    state = Decoding(built.t5, memory.vectors, memory.mask, 5)
    tensors = [memory.vectors, *(part for layer in state._memory for part in layer)]
    assert held_bytes(built, memory.vectors) == sum(t.numel() * t.element_size() for t in tensors)


def test_blocks_after_a_gate_process_remaining_tokens(monkeypatch):
    """Tensors shrink after a gate that drops tokens and keep their length otherwise."""
    built = model()
    ids = built.token_ids(TEXTS)
    real, eos = ids != built.t5.config.pad_token_id, ids == built.t5.config.eos_token_id
    lengths = []
    for block in built.t5.encoder.block:
        block.layer[1].register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    with torch.no_grad():
        vectors, *_ = encode_removed(built.t5.encoder, ids, real, eos, built.pruning)
    gates = built.encode_tokens(ids, "removed").kept.sum(-1).amax(-1).tolist()
    del lengths[len(built.t5.encoder.block) :]  # of the second encoding
    assert lengths == [ids.shape[1], gates[0], gates[0], gates[1]]  # gates follow blocks 0 and 2
    assert vectors.shape[1] == gates[1] < gates[0] < ids.shape[1]


def test_measurement_order_is_balanced_between_masks_and_removal(built, monkeypatch):
    trained = SimpleNamespace(model=built, device=CPU)
    slow_every_other(monkeypatch)
    masked, removed = _compare(trained, built, built.token_ids([TEXTS[2]]))
    for column in ("encoder_ms", "decoder_ms"):
        assert masked[column] == pytest.approx(removed[column]) == pytest.approx(1020)


def test_scores_of_truncated_reconstructions():
    pytest.importorskip("sacrebleu", reason="pip install -e '.[lap]'")
    from acp_repro.papers.lap.measure.reconstruction import _scores

    trained = SimpleNamespace(task=SimpleNamespace(tokenizer=model().tokenizer))
    rows = [model().tokenizer.encode(text) for text in ("a cat sat", "a mat")]
    found = _scores(trained, rows, [rows[0][:-1], rows[1]])
    total = sum(map(len, rows))
    assert found["token_accuracy"] == pytest.approx((total - 1) / total)
    assert found["edits_per_token"] == pytest.approx(1 / total) and found["exact_match"] == 0.5


def test_keep_ratio_is_averaged_over_texts(built):
    pytest.importorskip("sacrebleu", reason="pip install -e '.[lap]'")
    from acp_repro.papers.lap.measure.reconstruction import measure_reconstruction

    rows = [built.token_ids([text])[0].tolist() for text in TEXTS]
    trained = SimpleNamespace(
        model=built,
        run=SimpleNamespace(name="tiny"),
        task=SimpleNamespace(tokenizer=built.tokenizer),
        measure_settings=SimpleNamespace(scored_texts=9),
        heldout_rows=lambda most: rows,
        batches=lambda rows: [built.token_ids(TEXTS[:2]), built.token_ids(TEXTS[2:])],
    )
    records = {record["decoding"]: record["keep_ratio"] for record in measure_reconstruction(trained)}
    with torch.no_grad():
        alone = [built(torch.tensor([row]), mask="soft") for row in rows]
    soft = sum((one.lengths[-1] / one.lengths[0]).item() for one in alone) / len(rows)
    removed = sum((one.kept[-1] / one.kept[0]).item() for one in alone) / len(rows)
    assert records["soft"] == pytest.approx(soft, rel=1e-5)
    assert records["removed"] == records["free"] == pytest.approx(removed, rel=1e-5)


def test_majority_class_is_computed_on_scored_texts(monkeypatch):
    pytest.importorskip("sklearn", reason="pip install -e '.[lap]'")
    from acp_repro.papers.lap.measure import probe

    for name in ("_votes", "_bag_of_words"):
        monkeypatch.setattr(probe, name, lambda *_: 0.5)
    monkeypatch.setattr(probe, "_features", lambda trained, rows, kind: [torch.ones(2, 4)] * len(rows))
    train, heldout = (
        [SimpleNamespace(text="a cat", label=label) for label in labels]
        for labels in ([0, 0, 0, 1, None], [1, 1, 0, None])
    )
    trained = SimpleNamespace(
        run=SimpleNamespace(pruning=SimpleNamespace(max_length=64)),
        task=SimpleNamespace(
            tokenizer=model().tokenizer, texts=SimpleNamespace(train=train, heldout=heldout)
        ),
        measure_settings=SimpleNamespace(scored_texts=9, probe_texts=9),
    )
    records = probe.measure_probe(trained)
    assert all(record["majority_class"] == pytest.approx(2 / 3) for record in records)
    assert {(record["train_texts"], record["measured_texts"]) for record in records} == {(4, 3)}


@pytest.mark.parametrize(
    ("word", "first", "kind"),
    [
        (" cat", False, "word start"),
        ("cat", False, "word inside"),
        ("cat", True, "word start"),
        (" 12", False, "number"),
        ("12", True, "number"),
        (".", False, "punctuation"),
        (" (", False, "punctuation"),
    ],
)
def test_words_start_at_a_space_or_at_the_beginning(word, first, kind):
    assert kind_of(word, first) == kind


def test_counts_follow_the_gates_of_the_model(built):
    ids = built.token_ids(TEXTS)
    rows = [[i for i in row if i != built.t5.config.pad_token_id] for row in ids.tolist()]
    trained = SimpleNamespace(
        model=built,
        task=SimpleNamespace(tokenizer=built.tokenizer, rows=lambda split: rows),
        measure_settings=SimpleNamespace(scored_texts=9),
        heldout_rows=lambda most: rows[:most],
        batches=lambda rows: [ids],
    )
    records = measure_keep_ratio_by_word(trained)
    kept = int(built.encode_ids(ids).kept.sum()) - len(rows)  # EOS apart
    for grouping in ("kind", "frequency", "place"):
        part = [record for record in records if record["grouping"] == grouping]
        assert sum(record["tokens"] for record in part) == sum(map(len, rows)) - len(rows)
        assert sum(record["kept_tokens"] for record in part) == kept
    shown = [built.tokenizer.tokens(row[:-1]) for row in rows]
    begins = sum(word.strip() != "," and (not i or word[0] == " ") for r in shown for i, word in enumerate(r))
    (starts,) = (record for record in records if record["group"] == "word start")
    assert starts["tokens"] == begins
