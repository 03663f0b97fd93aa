"""Accuracy, BLEU and ROUGE of held-out text: soft mask, tokens removed, and free-running."""

import pandas as pd

from .. import drawing
from ..tables import one_each, some
from ..verdict import Verdict
from . import naming

ACCURACY, BLEU, ROUGE = 0.98, 0.95, 0.94  # Section Results
COLUMNS = {
    "keep_ratio": "keep ratio",
    "token_accuracy": "accuracy",
    "bleu": "BLEU",
    "rouge_l": "ROUGE-L",
    "exact_match": "exact match",
    "edits_per_token": "edits per token",
}
DECODING = {
    "soft": "teacher forcing, soft mask",
    "removed": "teacher forcing, tokens removed",
    "free": "free-running, tokens removed",
}


def tabulate(records: pd.DataFrame) -> drawing.Table:
    """One row per run and way of decoding, then the article's row."""
    one_each(records, ["run", "decoding"], "table_scores")
    values = records[["run", "decoding", *COLUMNS]]
    names = [
        naming.name_of(c, m) for c, m in zip(records["compression"], records["training_mask"], strict=True)
    ]
    gate = records["gate"].map(naming.READINGS)
    seeds = [f", seed {seed}" if records["seed"].nunique() > 1 else "" for seed in records["seed"]]
    shown = pd.DataFrame({"model": [n + g + s for n, g, s in zip(names, gate, seeds, strict=True)]})
    shown["decoding"] = records["decoding"].map(DECODING).to_list()
    for column, title in COLUMNS.items():
        shown[title] = [f"{value:.3f}" for value in records[column]]
    printed = naming.PUBLISHED.table.query("item == 'table_scores'").set_index("quantity")["low"]
    paper = {"model": "article, Flan-T5-small on Yelp", "decoding": "teacher forcing"}
    for column, title in COLUMNS.items():
        paper[title] = f"{printed[column]:.2f}" if column in printed else "–"
    return drawing.Table(pd.concat([shown, pd.DataFrame([paper])], ignore_index=True), values)


def make(context: drawing.DrawContext) -> tuple[drawing.Table, str]:
    records = context.records["reconstruction"]
    texts = ", ".join(f"{n:,}" for n in records["measured_texts"].unique())
    caption = f"""**Scores.** {_of_run(records, context.suite.main_run.name)}The table scores the
reconstruction of {texts} held-out texts. The keep ratio counts the tokens that remain in the tensors. Under
the soft mask, the keep ratio is {naming.SOFT_RATIO}. Accuracy is the fraction of tokens that are correct at
their position. An exact match is a text that is reconstructed word for word. Edits are the Levenshtein
distance in tokens, divided by the number of tokens. A dash: not stated in the article."""
    return tabulate(records), caption


def _of_run(records: pd.DataFrame, name: str) -> str:
    """The scores of a run after removal, as sentences; empty if the run has no gates."""
    ways = records[(records["run"] == name) & records["compression"].notna()].set_index("decoding")
    if ways.empty:
        return ""
    removed, free = ways.loc["removed"], ways.loc["free"]
    return (
        f"Run {name} removes {100 * (1 - removed['keep_ratio']):.0f} % of the tokens. With teacher forcing, "
        f"the accuracy is {100 * removed['token_accuracy']:.1f} %. In free-running decoding, "
        f"{100 * free['exact_match']:.0f} % of the texts are exact matches. "
    )


def gated(reconstruction: pd.DataFrame, decoding: str) -> pd.DataFrame:
    """The ``reconstruction`` records of runs with gates and one way of decoding, by run."""
    records = one_each(reconstruction, ["run", "decoding"], "reconstruction")
    rows = records[records["compression"].notna() & (records["decoding"] == decoding)]
    return some(rows, "reconstruction, with gates").set_index("run")


@naming.of_the_article
def drops_and_reconstructs(reconstruction: pd.DataFrame) -> Verdict:
    """Met if a gated run drops tokens and reaches all three scores of the article."""
    runs = gated(reconstruction, "removed")
    drops = runs["keep_ratio"] <= naming.MOST_KEPT
    met = (runs["token_accuracy"] >= ACCURACY) & (runs["bleu"] >= BLEU) & (runs["rouge_l"] >= ROUGE) & drops
    words = {
        name: f"accuracy {r.token_accuracy:.3f}, BLEU {r.bleu:.3f}, ROUGE {r.rouge_l:.3f}, "
        f"keep ratio {100 * r.keep_ratio:.0f} %"
        for name, r in runs.iterrows()
    }
    short = (
        f"{drops.sum()} of {len(runs)} gated runs drop tokens"
        + f", and {met.sum()} of these reach the article's scores" * bool(drops.any())
    )
    ours = "\n".join([short, *naming.each_in_words(words).split("; ")])
    return Verdict.of(bool(met.any()), ours, short, n=len(runs), runs=list(runs.index))
