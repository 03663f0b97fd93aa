"""Texts of the needle test: handwritten prompts, scores, haystacks, and training text with needles."""

import json
import re

import numpy as np
import pytest
import torch

from acp_repro.common.errors import UsageError
from acp_repro.model import ByteTokenizer
from acp_repro.papers.acp.task import FoXTask
from acp_repro.pipeline.data import prepare
from acp_repro.pipeline.data.sources import Document
from acp_repro.pipeline.freshness import differences
from acp_repro.pipeline.needle import documents, haystack, trial
from acp_repro.pipeline.needle.prompt import WORDINGS, tokenise_needles
from tests.suites import YAML

BYTES = ByteTokenizer()
DEED = "eat a sandwich and sit in Dolores Park on a sunny day"
LENGTH = 1024
NEEDLES = (
    YAML.replace("context_length: [128]", f"context_length: [{LENGTH}]")
    .replace("[-10, null]", "[-10, null], needle_fraction: [0, 0.5]")
    .replace("micro_batch_tokens: 128", f"micro_batch_tokens: {2 * LENGTH}")
    .replace("{batch_tokens: 256", f"{{batch_tokens: {2 * LENGTH}")
)


def bytes_needle(mode="easy"):
    return tokenise_needles(BYTES.encode, BYTES.bos_id, mode)[0]


# --- prompts and scores


def test_needle_is_inserted_after_the_last_full_stop_before_its_depth():
    needle = bytes_needle()
    size = needle.haystack_tokens(600)
    hay = BYTES.encode(("The fox sleeps. " * 100)[:size]).astype(np.int64)
    bare = needle.prompt(hay, 600, None)
    assert BYTES.decode(bare) == BYTES.decode(hay) + WORDINGS["easy"][0].question and bare[0] == BYTES.bos_id
    for depth in (0, 0.3, 0.5, 1):
        prompt = needle.prompt(hay, 600, depth)
        text = BYTES.decode(prompt)
        assert len(prompt) + needle.room == 600 and prompt[0] == BYTES.bos_id
        assert text.endswith(WORDINGS["easy"][0].question) and text.count(DEED) == 1
        before = text.index(WORDINGS["easy"][0].needle)
        assert text.replace(WORDINGS["easy"][0].needle, "", 1) == BYTES.decode(bare)
        place = round(depth * size)
        assert before == (size if depth == 1 else text.rindex(".", 0, place) + 1 if depth else 0)


def test_short_contexts_and_haystacks_report_the_required_length():
    needle = bytes_needle()
    least = 600 - needle.haystack_tokens(600) + 1
    with pytest.raises(UsageError, match=f"use a length of at least {least}"):
        needle.prompt(np.zeros(100), least - 1, 0)
    assert trial.default_lengths([needle], 11_000) == [1000 * i for i in range(1, 12)]
    assert trial.default_lengths([needle], 1100)[0] == 2 * (least - 1)


@pytest.mark.parametrize(
    ("answer", "share", "exact"),
    [
        (f" {DEED}.\nWhat", 1.0, True),
        (f"The best thing to do in San Francisco is {DEED}!", 1.0, True),
        (f"{DEED} at noon", 1.0, False),
        (f"never {DEED}", 1.0, False),
        (f"\n\n {DEED.upper()}", 1.0, True),
        ("eat a sandwich on the moon", 2 / 7, False),
        (f"nothing\n{DEED}", 0.0, False),  # later text is not an answer
        ("a and in on", 0.0, False),
        ("", 0.0, False),
    ],
)
def test_scores(answer, share, exact):
    wording = WORDINGS["easy"][0]
    assert wording.recall(answer) == pytest.approx(share) and wording.is_exact(answer) is exact


# --- haystacks


def test_text_pieces_are_evenly_spaced_and_wrap_around():
    texts = [Document("a", b"abcdef", b""), Document("b", b"ghij", b"")]
    pieces = haystack.text_haystacks(texts, BYTES.encode, 6, 3)
    assert [BYTES.decode(piece) for piece in pieces] == ["abcdef", "defghi", "ghijab"]
    with pytest.raises(UsageError, match="has 10 tokens, fewer than the longest context, 11"):
        haystack.text_haystacks(texts, BYTES.encode, 11, 1)


def test_heldout_pieces_are_complete_contiguous_sequences(make_suite, tmp_path):
    corpus = prepare(make_suite().file.data)
    held = BYTES.encode((tmp_path / "heldout.txt").read_text())  # 860 bytes
    pieces = haystack.heldout_haystacks(corpus, 128, 200, 2)
    assert [len(piece) for piece in pieces] == [256, 256]
    assert (pieces[0] == held[:256]).all() and (pieces[1] == held[384:640]).all()
    with pytest.raises(UsageError, match="2 haystacks of 500 tokens take 8 held-out sequences of 128 tokens"):
        haystack.heldout_haystacks(corpus, 128, 500, 2)


# --- training text


def test_training_facts_are_asked_as_stated_and_disjoint_from_test_facts():
    generator = np.random.default_rng(0)
    found = [fact for fact, _ in zip(documents.facts(generator, []), range(300), strict=False)]
    bare = 0
    for stated, asked in found:
        answer = asked.split(" Answer: ")[1]
        assert stated in (asked, f"\n{answer}")
        bare += stated != asked
    assert 40 < bare < 110
    said = set(re.findall("[a-z]+", " ".join(asked for _, asked in found).lower()))
    own = set(re.findall("[a-z]+", (DEED + " best thing san francisco").lower()))
    assert said & own <= {"a", "and", "in", "on"}
    assert len({asked for _, asked in found}) == 300


def test_document_has_its_length_and_states_each_fact_before_the_question():
    words = " ".join(f"w{number}" for number in range(2000))
    filler = BYTES.encode(words)
    document = documents.needle_document(filler, BYTES, np.random.default_rng(1))
    text = BYTES.decode(document)
    assert len(document) == len(filler) and document.dtype == filler.dtype
    answers = re.findall(r"(?:Answer: |\n)([A-Z][^\n?]*\.)\n", text)
    assert len(answers) >= 8 and all(answers.count(answer) == 2 for answer in answers)
    quoted = [re.findall(r"\bw\d+", answer) for answer in answers]
    assert {bool(words) for words in quoted} == {True, False}
    short = BYTES.encode("short")
    assert (documents.needle_document(short, BYTES, np.random.default_rng(1)) == short).all()


def test_needle_runs_have_the_requested_share_and_pairs_share_their_data(make_suite):
    suite = make_suite(NEEDLES)
    plain, acp, _, exact = suite.runs
    before = json.loads(json.dumps(plain.as_dict()))
    assert differences(before, acp) == ["needle_fraction: 0.0, now 0.5"]
    assert suite.pairs("pro") == [plain, suite.runs[2]] == suite.needle_runs("pro", longest=True)
    assert suite.trained_with_needles == [acp, exact] and plain.setting != acp.setting
    tasks = [FoXTask(run) for run in (plain, acp, exact)]
    changed = 0
    for step in range(20):
        (_, before), (inputs, labels), (again, _) = (task.batch(step) for task in tasks)
        assert torch.equal(inputs, again) and torch.equal(inputs[:, 1:], labels[:, :-1])
        assert (inputs[:, 0] == BYTES.bos_id).all()
        rows = (labels != before).any(1)
        changed += int(rows.sum())
        assert all("Answer:" in BYTES.decode(row) for row in labels[rows])
    assert 10 <= changed <= 30
