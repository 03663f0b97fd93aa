"""What attributions say of each kept vector: how far from its origin they reach, how spread they are."""

from __future__ import annotations

import ast

import pandas as pd

EOS = "</s>"


def positive(records: pd.DataFrame) -> pd.DataFrame:
    """``attribution`` records with ``share``, of a vector's positive attribution, ``distance`` in tokens
    from its origin, and ``is_eos``. Written tokens that do not stand at their place in the text are left out,
    since distances mean nothing once writing has strayed; so are vectors without positive attribution."""
    table = records[records["matches_text"]]
    table = table.assign(
        positive=table["shap_nats"].clip(lower=0),
        distance=table["written_position"] - table["kept_position"],
        is_eos=[ast.literal_eval(token) == EOS for token in table["kept_token"]],
    )
    total = table.groupby(["run", "text", "kept_position"])["positive"].transform("sum")
    return table[total > 0].assign(share=table["positive"] / total)


def by_distance(table: pd.DataFrame) -> pd.DataFrame:
    """Mean share of a vector's attribution at each distance, of EOS and of the others apart."""
    vectors = table.drop_duplicates(["run", "text", "kept_position"]).groupby("is_eos").size()
    sums = table.groupby(["is_eos", "distance"])["share"].sum().reset_index()
    sums["share"] = sums["share"] / sums["is_eos"].map(vectors)
    return sums


def near(table: pd.DataFrame, window: int) -> float | None:
    """Share of the attribution of vectors, EOS apart, within ``window`` tokens of their origin; None where
    no other vector has any."""
    others = table[~table["is_eos"].astype(bool)]
    if others.empty:
        return None
    return float(others.loc[others["distance"].abs() <= window, "positive"].sum() / others["positive"].sum())


def concentration(table: pd.DataFrame) -> pd.Series:
    """Mean share of a vector's attribution on its largest fifth of tokens, by ``is_eos``."""

    def top(shares: pd.Series) -> float:
        return shares.nlargest(max(1, round(len(shares) / 5))).sum()

    vectors = table.groupby(["is_eos", "run", "text", "kept_position"])["share"].agg(top)
    return vectors.groupby("is_eos").mean()
