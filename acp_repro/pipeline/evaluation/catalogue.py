"""The tasks of Tables 1 and 3, and two tasks that every machine can run. Standard library only."""

from dataclasses import dataclass

from acp_repro.common.errors import UserError


@dataclass(frozen=True)
class Column:
    """One column of Tables 1 and 3. ``quantity`` is its name in ``paper_values.csv``. ``guess`` is the chance
    accuracy: of a random answer, of the majority of yes and no, or of a random word of the passage."""

    task: str
    metric: str
    header: str
    quantity: str = ""
    guess: float | None = None

    @property
    def is_accuracy(self) -> bool:
        """Whether the metric is an accuracy, printed in percent; otherwise it is a perplexity."""
        return self.metric in ("acc", "acc_norm")


COLUMNS = (
    Column("wikitext", "word_perplexity", "Wiki. ppl ↓", "wikitext_perplexity"),
    Column("lambada_openai", "perplexity", "LMB. ppl ↓", "lambada_perplexity"),
    Column("lambada_openai", "acc", "LMB. acc ↑", "lambada_accuracy", 0.016),
    Column("piqa", "acc", "PIQA acc ↑", "piqa_accuracy", 0.5),
    Column("hellaswag", "acc_norm", "Hella. acc-n ↑", "hellaswag_normalized_accuracy", 0.25),
    Column("winogrande", "acc", "Wino. acc ↑", "winogrande_accuracy", 0.5),
    Column("arc_easy", "acc", "ARC-e acc ↑", "arc_easy_accuracy", 0.25),
    Column("arc_challenge", "acc_norm", "ARC-c acc-n ↑", "arc_challenge_normalized_accuracy", 0.25),
    Column("copa", "acc", "COPA acc ↑", "copa_accuracy", 0.5),
    Column("openbookqa", "acc_norm", "OBQA acc-n ↑", "openbookqa_normalized_accuracy", 0.25),
    Column("sciq", "acc", "SciQ acc ↑", "sciq_accuracy", 0.25),
    Column("boolq", "acc", "BoolQ acc ↑", "boolq_accuracy", 0.622),
    Column("book_perplexity", "word_perplexity", "Book ppl ↓"),
    Column("book_last_word", "perplexity", "Last word ppl ↓"),
    Column("book_last_word", "acc", "Last word acc ↑", guess=0.016),
)
BOOK_TASKS = ("book_perplexity", "book_last_word")  # ours, from the book that the project includes
PAPER_TASKS = tuple(dict.fromkeys(c.task for c in COLUMNS if c.task not in BOOK_TASKS))
TASKS = (*PAPER_TASKS, *BOOK_TASKS)
PADDED_IDS = 256  # a model may pad its vocabulary by fewer ids than this


def check_tokenizer(tokenizer_ids: int, model_ids: int, whose: str) -> None:
    """Rejects a tokenizer with more ids than the model, or with fewer ids than padding explains."""
    if not 0 <= model_ids - tokenizer_ids < PADDED_IDS:
        raise UserError(
            f"{whose}: the model has {model_ids} token ids and its tokenizer {tokenizer_ids}, so they do "
            "not match; give the tokenizer.json that the model was trained with"
        )
