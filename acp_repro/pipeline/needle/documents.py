"""Training text with needles: facts inserted into the corpus, each followed later by a question.

A model of a few hundred million tokens of books may never learn to look up a sentence. If a run sets
``needle_fraction``, this module makes that fraction of its training sequences. Wording, names, places and
numbers differ from the test's, and every document has its own. Most answers are words of the corpus that
only the fact predicts, because from answers made of short lists models learnt the lists. Some answers
have coined words.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from torch import Tensor

from acp_repro.model.tokenizer import Tokenizer
from acp_repro.pipeline.data import Sequences


def _words(text: str) -> list[str]:
    return text.split()


# A question about a person at a place, and the beginning of its answer; `facts` draws the rest. Each ends in
# another word. When all ended in "to", models put a "to" before everything that they looked up.
FORMS = (
    ("What did {name} promise in {place}?", "In {place} {name} promised to"),
    ("What is the first duty of {name} at {place}?", "The first duty of {name} at {place} is"),
    ("How does {name} spend the winter near {place}?", "Near {place} {name} will"),
    ("Why did {name} travel to {place}?", "{name} travelled to {place} and there could"),
    ("What was {name} told on the road to {place}?", "On the road to {place} {name} was told:"),
    ("What was the old plan of {name} for {place}?", "The old plan of {name} for {place} was"),
    ("What must {name} never forget in {place}?", "In {place} {name} must"),
    ("What did they see {name} do at {place}?", "At {place} they saw {name}"),
)
NAMES = _words(
    "Abel Ada Agnes Albert Alma Amos Anton Arthur Barbara Basil Beatrice Bernard Bruno Carla Cecil Clara "
    "Conrad Cora Daniel Edgar Edith Elsa Emil Esther Eugene Felix Flora Frida Gilbert Greta Gustav Hannah "
    "Harold Helga Hugo Ida Ingrid Isaac Ivan Jonas Josef Judith Karl Laura Leo Lydia Magnus Martha Max "
    "Mina Nora Oliver Olga Oscar Otto Paula Peter Ralph Rosa Rufus Sigrid Simon Stella Theo Thora Ursula "
    "Victor Vera Walter Wanda Wilma Yvonne Zelda"
)
PLACES = _words(
    "Aberdeen Alton Antwerp Basel Bergen Boston Bremen Bristol Cairo Calais Canton Chester Cologne Cork "
    "Cracow Danzig Delft Denver Dover Dublin Durham Exeter Florence Geneva Genoa Ghent Granada Halifax "
    "Hamburg Havana Hull Jena Kent Kiel Leeds Leiden Lima Lisbon Lyon Malta Memphis Milan Munich Nantes "
    "Naples Norfolk Oslo Oxford Padua Perth Pisa Prague Quebec Riga Rouen Salem Seville Siena Smyrna "
    "Tunis Turin Utrecht Venice Verona Vienna Warsaw Windsor York Zurich"
)
VERBS = _words(
    "bring build bury buy carry clean count cover cut draw empty feed fill find fold gather guard hide "
    "hold keep lift light load lock mark measure mend move open paint plant polish print pull push raise "
    "read repair sell send sew shake show sort steal store sweep teach throw tie trade turn wash watch "
    "weigh write"
)
ADJECTIVES = _words(
    "bitter black blue brass broken brown clean cold common copper crooked damp dark deep dry dull empty "
    "false fine flat fresh green grey heavy hollow iron large late light little long loose narrow new "
    "noisy old pale plain poor quiet red rich rough round sharp short silver small soft steep strange "
    "strong sweet tall thick thin warm white wide wild wooden yellow young"
)
NOUNS = _words(
    "anchors apples barrels baskets bells bones books bottles boxes bricks buttons candles carts chains "
    "chairs clocks coats coins crowns cups doors drums eggs feathers fences flags flutes gates geese "
    "gloves goats hammers hats horses keys knives ladders lamps leaves letters maps mirrors needles nets "
    "papers pears pipes plates ropes rugs saddles sheep shells ships shoes songs spoons stones tables "
    "tents torches towers trees trunks wagons walls watches wheels windows wolves"
)
PLACED = _words("above across against along among before behind below beside beyond near over past under")
STATEMENT_SHARE = 0.25  # of the facts are in the text without their question
NEEDLE_TOKENS = 0.5  # of a document's tokens belong to facts and questions, at most
QUOTED_SHARE = 0.75  # of the answers are words of the corpus
QUOTED_WORDS = (3, 25)  # how many, from and below: with at most 12, models ended each answer by then
# The share of answers with coined words, and of their words. The second half of such a word does not follow
# from the first. Without any, models copied a sentence up to its rare name, and ended the name as their books
# do. With some in every answer they hardly learnt to copy.
COINED_ANSWERS, COINED_SHARE = 0.25, 0.2
# A fact's two places are at least this share of the document apart. Half of the distances are as often
# between 1 and 2 times as far as between 2 and 4 times: near ones are learnt first, and far ones from them.
# The other half are as often far as near. With the first kind alone, facts in the middle of long texts were
# found least.
NEAREST, EVEN_SHARE = 1 / 64, 0.5
# The share of documents that begin with a fact. Without these, models did not find a fact at the beginning of
# a text.
OPENING_SHARE = 0.25


def _pick(generator: np.random.Generator, words: list[str]) -> str:
    return words[int(generator.integers(len(words)))]


def _deed(generator: np.random.Generator) -> str:
    """What a person does, in three to a dozen words."""
    number = int(generator.integers(2, 1000))
    deed = f"{_pick(generator, VERBS)} {number} {_pick(generator, ADJECTIVES)} {_pick(generator, NOUNS)}"
    for _ in range(int(generator.integers(0, 3))):
        deed += (
            f" {_pick(generator, PLACED)} the {_pick(generator, ADJECTIVES)} {_pick(generator, NOUNS)} and "
            f"{_pick(generator, VERBS)} {_pick(generator, NOUNS)}"
        )
    return deed


def _quotation(generator: np.random.Generator, words: list[str]) -> str:
    """Some consecutive ``words``."""
    count = int(generator.integers(*QUOTED_WORDS))
    start = int(generator.integers(max(1, len(words) - count)))
    return " ".join(words[start : start + count]).strip(" .,;:!?\"'") or words[0]


def _coin(generator: np.random.Generator, words: list[str]) -> str:
    """A coined name: the beginning of one word and the end of another."""
    first, second = (_pick(generator, words).strip(" .,;:!?\"'") or _pick(generator, NAMES) for _ in range(2))
    return (first[: 1 + len(first) // 2] + second[len(second) // 2 :]).capitalize()


def _coin_words(generator: np.random.Generator, deed: str, words: list[str]) -> str:
    """``deed`` unchanged, or with some of its words replaced by coined ones."""
    if generator.random() >= COINED_ANSWERS:
        return deed
    return " ".join(
        _coin(generator, words) if generator.random() < COINED_SHARE else word for word in deed.split()
    )


def facts(generator: np.random.Generator, words: list[str]) -> Iterator[tuple[str, str]]:
    """Endless pairs (the fact, its question with the answer), each of another person and place. Answers quote
    ``words`` of the corpus, which may be empty."""
    taken = set()
    while True:
        name, place = _pick(generator, NAMES), _pick(generator, PLACES)
        question, answer = FORMS[int(generator.integers(len(FORMS)))]
        quoted, bare = generator.random(2) < (QUOTED_SHARE, STATEMENT_SHARE)
        deed = _quotation(generator, words) if quoted and words else _deed(generator)
        deed = _coin_words(generator, deed, words or NAMES)
        if (name, place) in taken and len(taken) < len(NAMES) * len(PLACES):
            continue
        taken.add((name, place))
        question = question.format(name=name, place=place)
        answer = f"{answer.format(name=name, place=place)} {deed}."
        asked = f"\n{question} Answer: {answer}\n"
        yield f"\n{answer}\n" if bare else asked, asked


def _encoded(pairs: Iterator[tuple[str, str]], tokenizer: Tokenizer) -> Iterator[list[np.ndarray]]:
    """The token ids of each pair, a few pairs at a time."""
    while some := list(itertools.islice(pairs, 8)):
        ids = tokenizer.encode_many([text for pair in some for text in pair])
        yield from (ids[i : i + 2] for i in range(0, len(ids), 2))


def needle_document(filler: np.ndarray, tokenizer: Tokenizer, generator: np.random.Generator) -> np.ndarray:
    """A document of the length of ``filler`` (T,) token ids that states facts and later asks for them.

    All distances from a fact to its question occur. Some documents begin with a fact. The rest is the
    beginning of ``filler``; answers quote its other part. A filler that is too short for one fact stays as it
    is.
    """
    room, events = int(NEEDLE_TOKENS * len(filler)), []
    opens = generator.random() < OPENING_SHARE
    words = tokenizer.decode(filler[len(filler) - room :]).split()
    for pieces in _encoded(facts(generator, words), tokenizer):
        room -= sum(map(len, pieces))
        if room < 0:
            break
        first = opens and not events  # to be found equally well from anywhere in the text
        even = first or generator.random() < EVEN_SHARE
        distance = generator.uniform(NEAREST, 1) if even else NEAREST ** generator.random()
        place = 0.0 if first else (1 - distance) * generator.random()
        events += zip((place, place + distance), pieces, strict=True)
    events.sort(key=lambda event: event[0])
    text = filler[: len(filler) - sum(len(piece) for _, piece in events)]
    cuts = [round(place * len(text)) for place, _ in events]
    parts = np.split(text, cuts)
    joined = [parts[0]]
    for part, (_, piece) in zip(parts[1:], events, strict=True):
        joined += [piece.astype(filler.dtype), part]
    return np.concatenate(joined)


class NeedleSequences:
    """A run's training batches, with a ``share`` of needle documents. Which sequences these are depends only
    on the seed, the batch's number and its size."""

    def __init__(self, sequences: Sequences, tokenizer: Tokenizer, share: float):
        self._sequences, self._tokenizer, self._share = sequences, tokenizer, share

    def batch(self, step: int, batch_size: int) -> tuple[Tensor, Tensor]:
        """(input_ids, labels) like `Sequences.batch`."""
        inputs, labels = self._sequences.batch(step, batch_size)
        for row in range(batch_size):
            seed = np.random.SeedSequence([self._sequences.seed, step * batch_size + row])
            generator = np.random.Generator(np.random.Philox(seed))
            if generator.random() < self._share:
                document = needle_document(labels[row].numpy(), self._tokenizer, generator)
                labels[row].numpy()[:] = document
                inputs[row, 1:] = labels[row, :-1]
        return inputs, labels
