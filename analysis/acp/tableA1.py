"""Table A1: every pair ever trained on text with needles, and the step at which its two trainings part."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from acp_repro.chain.paper import Item
from acp_repro.common.statistics import interval

from .. import drawing, style
from . import models, needle_statistics

# Pairs whose records later ones have replaced; the commit of each holds them.
HISTORY = Path(__file__).with_name("needle_pairs.csv")


def pairs(records: pd.DataFrame) -> pd.DataFrame:
    """One row a pair: those of :data:`HISTORY`, and of ``records`` those whose ACP run is not among them.

    Args:
        records: ``needle`` records of runs that train with needles.

    Returns:
        the columns of the file, and ``difference_nats``, ACP's negative log-likelihood of the right answer
        less the exact run's: below 0 ACP is the better.
    """
    history = pd.read_csv(HISTORY, dtype=str)
    numbers = [c for c in history if c.endswith(("_percent", "_nats"))] + ["needle_share"]
    history[numbers] = history[numbers].astype(float)
    history[["tokens", "prompts"]] = history[["tokens", "prompts"]].astype(int)
    new, unlike = [], models.unlike(records, ["seed", "needle_share"])
    for (seed, share), pair in records.groupby(["seed", "needle_share"]):
        acp, exact = (pair[pair["method"] == method] for method in needle_statistics.METHODS)
        if set(acp["commit"]) & set(history["kernel_commit"]):
            continue
        new.append(
            {
                "record_commit": f"suite {pair['suite'].iloc[0]}, seed {seed}",
                "kernel_commit": acp["commit"].iloc[0],
                "needle_share": share,
                "tokens": acp["trained_tokens"].iloc[0],
                "prompts": len(acp),
                "recall_acp_percent": 100 * acp["answer_recall"].mean(),
                "recall_exact_percent": 100 * exact["answer_recall"].mean(),
                "nll_acp_nats": -acp["answer_log_likelihood_nats"].mean(),
                "nll_exact_nats": -exact["answer_log_likelihood_nats"].mean(),
                "losses_part_at_step": "not recorded",
                "source": unlike[seed, share],
            }
        )
    table = pd.concat([history, pd.DataFrame(new)], ignore_index=True) if new else history
    return table.assign(difference_nats=table["nll_acp_nats"] - table["nll_exact_nats"])


def in_words(table: pd.DataFrame) -> str:
    """How many pairs differ, who was better then, and the mean difference with its interval."""
    apart = table[table["difference_nats"] != 0]
    mean, low, high = interval(table["difference_nats"])
    better = int((apart["difference_nats"] < 0).sum())
    return (
        f"In {len(table) - len(apart)} of {len(table)} pairs the likelihoods agree to the last digit; "
        f"where they differ, ACP is the better in {better} of {len(apart)}. Mean difference over all pairs "
        f"{mean:+.1f} nats [{low:+.1f}, {high:+.1f}]"
    )


def tabulate(records: pd.DataFrame) -> drawing.Table:
    """The pairs to read; see :func:`pairs`."""
    table = pairs(records)
    shown = pd.DataFrame(
        {
            "records of": table["record_commit"] + table["source"].str.extract("^(†)")[0].fillna(""),
            "tokens": table["tokens"].map(style.count_label),
            "text with needles (%)": (100 * table["needle_share"]).map("{:g}".format),
            "prompts": table["prompts"].map(str),
            "words found, ACP / exact (%)": _both(table, "recall_{}_percent", "{:.3g}"),
            "nats from certain, ACP / exact": _both(table, "nll_{}_nats", "{:.1f}"),
            "ACP − exact (nats)": table["difference_nats"].map("{:+.1f}".format),
            "losses differ from step": table["losses_part_at_step"],
        }
    )
    return drawing.Table(shown, table)


def make(found: drawing.Found) -> tuple[drawing.Table, str]:
    table = tabulate(found.records["needle"])
    unlike = models.unlike(found.records["needle"], ["seed"])
    caption = f"""**Table A1.** The pairs show no effect of ACP, and would not show one of less than some
nats. {in_words(table.values)} (95 %, Student's t, the pair as the unit). One training says little: the last
two pairs share their exact run, and their ACP runs are one program, trained twice from one seed. Listed is
every pair of 125M models trained on text with needles, in order. The training text changed from pair to pair.
"Nats from certain" is the mean negative log-likelihood of the right answer, 0 for a model that is sure of
it.{models.notes(unlike, " ", ".")}"""
    return table, caption


def _both(table: pd.DataFrame, column: str, form: str) -> pd.Series:
    acp, exact = (table[column.format(method)].map(form.format) for method in needle_statistics.METHODS)
    return acp + " / " + exact


ITEMS = (
    Item(
        "tableA1",
        "Every pair trained with needles",
        ("needle",),
        lambda suite: suite.trained_with_needles,
        "a pair that trains with needles (needle_share), with ACP and exact",
        ours=True,
    ),
)


if __name__ == "__main__":
    drawing.main(globals())
