"""Table A1: every pair trained on text with needles, and the step at which its two runs diverge."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pandas as pd

from acp_repro.common.statistics import over_draws

from .. import drawing, style
from . import naming, needle_facts, needle_statistics, versions

# Pairs whose records were replaced by later records; the commit of each pair contains its records.
HISTORY = Path(__file__).with_name("needle_pairs.csv")


def pairs(
    records: pd.DataFrame,
    perturbed: Collection[str] = (),
    facts: pd.DataFrame | None = None,
    losses: pd.DataFrame | None = None,
) -> pd.DataFrame:
    """One row per pair: the pairs of :data:`HISTORY` and the other pairs of ``records``."""
    texts = ("record_commit", "kernel_commit", "steps", "losses_part_at_step", "source")
    history = pd.read_csv(HISTORY, dtype=dict.fromkeys(texts, str)).assign(is_null=False)
    asked = None if facts is None else needle_facts.training_runs(facts).set_index("run")
    new = []
    for _, some in records.groupby(["seed", "needle_fraction"]):
        null = some["run"].isin(perturbed)
        acp, exact = (some[~null & (some["method"] == method)] for method in needle_statistics.METHODS)
        if not set(acp["commit"]) & set(history["kernel_commit"]):
            new.append(_row(acp, exact, asked, losses) | {"is_null": False})
        if null.any():
            new.append(_row(some[null], exact, asked, losses) | {"is_null": True})
    table = pd.concat([history, pd.DataFrame(new)], ignore_index=True) if new else history
    return table.assign(difference_nats=table["nll_acp_nats"] - table["nll_exact_nats"])


def _row(
    acp: pd.DataFrame, exact: pd.DataFrame, asked: pd.DataFrame | None, losses: pd.DataFrame | None
) -> dict[str, Any]:
    """A row of :func:`pairs` from the ``needle`` records of two runs; ``asked`` has the means over many
    needles, by run."""
    row = {
        "record_commit": f"suite {acp['suite'].iloc[0]}, seed {acp['seed'].iloc[0]}",
        "kernel_commit": acp["commit"].iloc[0],
        "needle_fraction": acp["needle_fraction"].iloc[0],
        "tokens": acp["trained_tokens"].iloc[0],
        "prompts": len(acp),
        "losses_part_at_step": parts_at(losses, acp["run"].iloc[0], exact["run"].iloc[0]),
        "source": next(iter(versions.unlike(pd.concat([acp, exact]), ["seed"]).values())),
    }
    for method, one in (("acp", acp), ("exact", exact)):
        row[f"recall_{method}_percent"] = 100 * one["answer_recall"].mean()
        row[f"nll_{method}_nats"] = -one["answer_log_likelihood_nats"].mean()
        if asked is not None and one["run"].iloc[0] in asked.index:
            many = asked.loc[one["run"].iloc[0]]
            row[f"facts_recall_{method}_percent"], row[f"facts_nll_{method}_nats"] = many[["recall", "nats"]]
    return row


def parts_at(losses: pd.DataFrame | None, *runs: str) -> str:
    """The first step, counted from 0, at which the losses of two training runs differ, in words."""
    if losses is None or not set(runs) <= set(losses["run"]):
        return "not recorded"
    one, other = (losses[losses["run"] == run].set_index("step")["loss_nats"] for run in runs)
    one, other = one.align(other, join="inner")
    differ = one.index[one != other]
    return f"{differ[0]:,}" if len(differ) else "no difference seen"


def in_words(table: pd.DataFrame) -> str:
    """Sentences on the number of differing pairs, the sign and the mean of the differences, without nulls."""
    table = table[~table["is_null"]]
    apart = table[table["difference_nats"] != 0]
    mean, low, high = over_draws(table["difference_nats"]).interval()
    better = int((apart["difference_nats"] < 0).sum())
    return (
        f"In {len(table) - len(apart)} of {len(table)} pairs the likelihoods are identical. Among the other "
        f"pairs, ACP is better in {better} of {len(apart)}. The mean NLL difference over all pairs, ACP − "
        f"exact, is {mean:+.1f} nats [{low:+.1f}, {high:+.1f}]"
    )


def _half_width(table: pd.DataFrame) -> float:
    """Half the width of the interval of :func:`in_words`, in nats."""
    _, low, high = over_draws(table.loc[~table["is_null"], "difference_nats"]).interval()
    return (high - low) / 2


def tabulate(table: pd.DataFrame) -> drawing.Table:
    """The table of :func:`pairs` for readers."""
    marks = table["is_null"].map({True: ", the null", False: ""})
    marks += table["source"].str.extract("^(†)")[0].fillna("")
    columns = {
        "commit or suite": table["record_commit"] + marks,
        "tokens": table["tokens"].map(style.count_label),
        "sequences with needles (%)": (100 * table["needle_fraction"]).map("{:g}".format),
        "prompts": table["prompts"].map(str),
        "recall, ACP / exact (%)": _both(table, "recall_{}_percent", "{:.3g}"),
        "NLL (nats), ACP / exact": _both(table, "nll_{}_nats", "{:.1f}"),
        "ACP − exact (nats)": table["difference_nats"].map("{:+.1f}".format),
        "many needles: recall, ACP / exact (%)": _both(table, "facts_recall_{}_percent", "{:.3g}"),
        "many needles: NLL (nats), ACP / exact": _both(table, "facts_nll_{}_nats", "{:.2f}"),
        "first differing step": table["losses_part_at_step"],
    }
    return drawing.Table(pd.DataFrame(columns), table)


def make(context: drawing.DrawContext) -> tuple[drawing.Table, str]:
    records, facts = context.records["needle"], context.records.get("needle_facts")
    perturbed = [run.name for run in context.runs if run.perturb_init]
    table = pairs(records, perturbed, facts, context.records.get("step_losses"))
    null = (
        " The null pair consists of two exact runs. The run in ACP's place starts with one weight moved by "
        "one unit in the last place."
        if table["is_null"].any()
        else ""
    )
    many = "" if facts is None else f" The evaluation on many needles uses {facts['fact'].nunique()} needles."
    unlike = dict(enumerate(source for source in table["source"].dropna() if source.startswith("†")))
    caption = f"""{naming.heading(context.item)} The pairs show no effect of ACP, and cannot show an effect
below {_half_width(table):.1f} nats. {in_words(table)} (95 %, Student's t over pairs). A single pair is weak
evidence. For example, pair d43912a and the next pair share their exact run, and their ACP runs train the same
program from one seed. The table lists every pair of 125M models trained on text with needles, in order.{null}
The training text changed from pair to pair until d43912a. NLL is the mean negative log-likelihood of the
right answer, and is 0 for certainty.{many}{versions.notes(unlike, " ", ".")}"""
    return tabulate(table), caption


def _both(table: pd.DataFrame, column: str, form: str) -> pd.Series:
    """Two columns in one, with "–" for a missing measurement."""
    names = [column.format(method) for method in needle_statistics.METHODS]
    acp, exact = (table.reindex(columns=names)[name].map(form.format).replace("nan", "–") for name in names)
    return acp + " / " + exact
