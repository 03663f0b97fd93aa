"""Which tokens count as what."""

from types import SimpleNamespace

import pytest

from acp_repro.pipeline.papers.lap.measure.kept_words import kind_of, measure_kept_words
from tests.lap.tiny import TEXTS, model


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
def test_a_word_begins_with_a_space_or_the_text(word, first, kind):
    assert kind_of(word, first) == kind


def test_counts_are_of_the_models_own_choice():
    built = model()
    ids = built.token_ids(TEXTS)
    rows = [[i for i in row if i != built.t5.config.pad_token_id] for row in ids.tolist()]
    trained = SimpleNamespace(
        model=built,
        task=SimpleNamespace(tokenizer=built.tokenizer, rows=lambda split: rows),
        measure_settings=SimpleNamespace(scored_texts=9),
        heldout_rows=lambda most: rows[:most],
        batches=lambda rows: [ids],
    )
    records = measure_kept_words(trained)
    kept = int(built.encode_ids(ids).kept.sum()) - len(rows)  # EOS apart
    for grouping in ("kind", "frequency", "place"):
        part = [record for record in records if record["grouping"] == grouping]
        assert sum(record["tokens"] for record in part) == sum(map(len, rows)) - len(rows)
        assert sum(record["kept_tokens"] for record in part) == kept
    shown = [built.tokenizer.tokens(row[:-1]) for row in rows]
    begins = sum(word.strip() != "," and (not i or word[0] == " ") for r in shown for i, word in enumerate(r))
    (starts,) = (record for record in records if record["group"] == "word start")
    assert starts["tokens"] == begins
