"""Training text that holds needles: facts in the corpus's own text, each asked for once more further on.

A model of a few hundred million tokens of books may never learn to look a sentence up. Where a run asks for
it (``needle_share``), that share of its training sequences is made here. Wording, names, places and numbers
are others than the test's, and every document has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from acp_repro.data import Sequences


def _words(text: str) -> list[str]:
    return text.split()


# A question about a person at a place, and how its answer begins; what follows is drawn by `_deed`.
FORMS = (
    ("What did {name} promise to do in {place}?", "In {place} {name} promised to"),
    ("What is the first duty of {name} at {place}?", "The first duty of {name} at {place} is to"),
    ("How does {name} spend the winter near {place}?", "Near {place} {name} will spend the winter to"),
    ("Why did {name} travel to {place}?", "{name} travelled to {place} to"),
    ("What was {name} told on the road to {place}?", "On the road to {place} {name} was told to"),
    ("What was the old plan of {name} for {place}?", "The old plan of {name} for {place} was to"),
    ("What must {name} never forget in {place}?", "In {place} {name} must never forget to"),
    ("Which was the hardest task of {name} at {place}?", "The hardest task of {name} at {place} was to"),
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
STATEMENT_SHARE = 0.25  # of the facts stand in the text without their question
NEEDLE_TOKENS = 0.5  # of a document's tokens belong to facts and questions, at most


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


def facts(generator: np.random.Generator) -> Iterator[tuple[str, str]]:
    """Endless pairs (as the text states it, as it is asked for), each of another person and place.

    The second ends with the answer: a model that has seen the first can know it.
    """
    taken = set()
    while True:
        name, place = _pick(generator, NAMES), _pick(generator, PLACES)
        question, answer = FORMS[int(generator.integers(len(FORMS)))]
        deed, bare = _deed(generator), bool(generator.random() < STATEMENT_SHARE)
        if (name, place) in taken and len(taken) < len(NAMES) * len(PLACES):
            continue
        taken.add((name, place))
        question = question.format(name=name, place=place)
        answer = f"{answer.format(name=name, place=place)} {deed}."
        asked = f"\n{question} Answer: {answer}\n"
        yield f"\n{answer}\n" if bare else asked, asked


def needle_document(
    filler: np.ndarray, encode: Callable[[str], np.ndarray], generator: np.random.Generator
) -> np.ndarray:
    """A document of the length of ``filler`` in which facts are stated, and asked for later.

    Of each fact the two places are uniform, the statement before the question, so that all distances up to
    the document's length occur. The rest is the beginning of ``filler``.

    Args:
        filler: (T,) token ids of ordinary text.
        encode: text to token ids.

    Returns:
        (T,) in the dtype of ``filler``; the same tokens where it is too short for one fact.
    """
    room, events = int(NEEDLE_TOKENS * len(filler)), []
    for stated, asked in facts(generator):
        pieces = [encode(stated), encode(asked)]
        room -= sum(map(len, pieces))
        if room < 0:
            break
        events += zip(sorted(generator.random(2)), pieces, strict=True)
    events.sort(key=lambda event: event[0])
    text = filler[: len(filler) - sum(len(piece) for _, piece in events)]
    cuts = [round(place * len(text)) for place, _ in events]
    parts = np.split(text, cuts)
    joined = [parts[0]]
    for part, (_, piece) in zip(parts[1:], events, strict=True):
        joined += [piece.astype(filler.dtype), part]
    return np.concatenate(joined)


class NeedleSequences:
    """A run's training batches, of which a share of sequences are needle documents.

    What batch holds which depends on the seed, the batch's number and its size alone.

    Args:
        sequences: of the corpus, the filler.
        encode: text to token ids, by the corpus's tokeniser.
        share: of the sequences, 0 to 1.
    """

    def __init__(self, sequences: Sequences, encode: Callable[[str], np.ndarray], share: float):
        self._sequences, self._encode, self._share = sequences, encode, share

    def batch(self, step: int, batch_size: int) -> tuple[Tensor, Tensor]:
        """(input_ids, labels) like `Sequences.batch`."""
        inputs, labels = self._sequences.batch(step, batch_size)
        for row in range(batch_size):
            seed = np.random.SeedSequence([self._sequences.seed, step * batch_size + row])
            generator = np.random.Generator(np.random.Philox(seed))
            if generator.random() < self._share:
                document = needle_document(labels[row].numpy(), self._encode, generator)
                labels[row].numpy()[:] = document
                inputs[row, 1:] = labels[row, :-1]
        return inputs, labels
