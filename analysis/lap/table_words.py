"""Keep ratio of tokens by kind, by frequency, and by position in the text."""

import ast

import pandas as pd

from .. import drawing

GROUPINGS = {
    "kind": "kind of token",
    "frequency": "fifth by frequency (1: most frequent)",
    "place": "tenth of the text",
}


def tabulate(records: pd.DataFrame) -> drawing.Table:
    """The keep ratio of each group of tokens, one row per group.

    Args:
        records: ``keep_ratio_by_word`` records of one run.
    """
    values = records.loc[records["grouping"].isin(GROUPINGS), ["grouping", "group", "tokens", "kept_tokens"]]
    rank = pd.to_numeric(values["group"], errors="coerce")
    place = values["grouping"].map(list(GROUPINGS).index)
    values = (
        values.assign(place=place, rank=rank)
        .sort_values(["place", "rank"], ignore_index=True)
        .drop(columns=["place", "rank"])
    )
    values["keep_ratio"] = values["kept_tokens"] / values["tokens"]
    shown = pd.DataFrame(
        {
            "grouping": values["grouping"].map(GROUPINGS),
            "group": values["group"].astype(str),
            "tokens": values["tokens"].map("{:,}".format),
            "keep ratio": values["keep_ratio"].map("{:.1%}".format),
        }
    )
    return drawing.Table(shown, values)


def make(context: drawing.DrawContext) -> tuple[drawing.Table, str]:
    records = context.records["keep_ratio_by_word"]
    tokens = records[(records["grouping"] == "token") & (records["tokens"] >= 10)]
    ordered = tokens.assign(share=tokens["kept_tokens"] / tokens["tokens"]).sort_values("share")

    def listed(table: pd.DataFrame) -> str:
        return ", ".join(
            f"`{ast.literal_eval(row.group).strip()}` {100 * row.share:.0f} %" for row in table.itertuples()
        )

    caption = f"""**Kept tokens.** The table has the keep ratio of held-out tokens: the fraction that every
gate keeps, without EOS. Of the hundred most frequent tokens, the gates keep these six least often:
{listed(ordered.head(6))}. The gates keep these six most often: {listed(ordered.tail(6))}."""
    return tabulate(records), caption
