"""Training text with needles: facts inserted into the corpus, each followed later by a question.

A model trained on a few hundred million tokens of books may never learn to retrieve a sentence. If a run sets
``needle_fraction``, this module generates that fraction of its training sequences. Wording, names, places and
numbers differ from those of the test and between documents. Most answers quote words of the corpus that only
the fact predicts, because models memorised answers that were drawn from short lists. Some answers contain
coined words.
"""

import itertools
from collections.abc import Iterator

import numpy as np
from torch import Tensor

from acp_repro.model.tokenizer import Tokenizer
from acp_repro.pipeline.data import Sequences


def _words(text: str) -> list[str]:
    return text.split()


# A question about a person at a place, and the beginning of its answer; `facts` generates the rest. Each
# beginning ends in another word. When all ended in "to", models put "to" before everything they retrieved.
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
STATEMENT_SHARE = 0.25  # fraction of facts without a question
NEEDLE_TOKENS = 0.5  # maximum fraction of a document's tokens in facts and questions
QUOTED_SHARE = 0.75  # fraction of answers that quote the corpus
QUOTED_WORDS = (3, 25)  # range of their length; with at most 12 words, models ended every answer by then
# The fraction of answers with coined words, and of the words in these answers. The second half of a coined
# word does not follow from the first. Without coined words, models copied a sentence up to its rare name and
# completed the name as in their books. With some in every answer, models hardly learnt to copy.
COINED_ANSWERS, COINED_SHARE = 0.25, 0.2
# The minimum distance between a fact and its question, as a fraction of the document. EVEN_SHARE of the
# distances are uniform; the others are log-uniform, because models learn short distances first and extend
# them to long ones. With log-uniform distances alone, facts in the middle of long texts were retrieved least.
NEAREST, EVEN_SHARE = 1 / 64, 0.5
# The fraction of documents that begin with a fact. Without these documents, models did not retrieve a fact at
# the beginning of a text.
OPENING_SHARE = 0.25


def _pick(generator: np.random.Generator, words: list[str]) -> str:
    return words[int(generator.integers(len(words)))]


def _deed(generator: np.random.Generator) -> str:
    """A random description of what a person does, of four words or more."""
    number = int(generator.integers(2, 1000))
    deed = f"{_pick(generator, VERBS)} {number} {_pick(generator, ADJECTIVES)} {_pick(generator, NOUNS)}"
    for _ in range(int(generator.integers(0, 3))):
        deed += (
            f" {_pick(generator, PLACED)} the {_pick(generator, ADJECTIVES)} {_pick(generator, NOUNS)} and "
            f"{_pick(generator, VERBS)} {_pick(generator, NOUNS)}"
        )
    return deed


def _quotation(generator: np.random.Generator, words: list[str]) -> str:
    """A random quotation of consecutive ``words``."""
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
    """Yields endless pairs (the fact, its question with the answer), each about another person and place.
    Answers quote ``words`` of the corpus, which may be empty."""
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
    """Yields the token ids of each pair; encodes a few pairs at a time."""
    while some := list(itertools.islice(pairs, 8)):
        ids = tokenizer.encode_many([text for pair in some for text in pair])
        yield from (ids[i : i + 2] for i in range(0, len(ids), 2))


def needle_document(filler: np.ndarray, tokenizer: Tokenizer, generator: np.random.Generator) -> np.ndarray:
    """A document (T,) as long as ``filler`` (T,), token ids, that states facts and later asks about them.

    All distances from a fact to its question occur, and some documents begin with a fact. The remaining text
    is the beginning of ``filler``; answers quote the other part. A filler that is too short for one fact is
    returned unchanged.
    """
    room, events = int(NEEDLE_TOKENS * len(filler)), []
    opens = generator.random() < OPENING_SHARE
    words = tokenizer.decode(filler[len(filler) - room :]).split()
    for pieces in _encoded(facts(generator, words), tokenizer):
        room -= sum(map(len, pieces))
        if room < 0:
            break
        first = opens and not events  # so that models retrieve it equally well from any position
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
    """The training batches of a run, with a fraction ``share`` of needle documents. The choice of sequences
    depends only on the seed, and on the index and size of the batch."""

    def __init__(self, sequences: Sequences, tokenizer: Tokenizer, share: float):
        self._sequences, self._tokenizer, self._share = sequences, tokenizer, share

    def batch(self, step: int, batch_size: int) -> tuple[Tensor, Tensor]:
        """(input_ids, labels), like ``Sequences.batch``."""
        inputs, labels = self._sequences.batch(step, batch_size)
        for row in range(batch_size):
            seed = np.random.SeedSequence([self._sequences.seed, step * batch_size + row])
            generator = np.random.Generator(np.random.Philox(seed))
            if generator.random() < self._share:
                document = needle_document(labels[row].numpy(), self._tokenizer, generator)
                labels[row].numpy()[:] = document
                inputs[row, 1:] = labels[row, :-1]
        return inputs, labels
