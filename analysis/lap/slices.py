"""What attributions say of each kept vector: where in the text they lie, and how wide a slice they fill."""

from __future__ import annotations

import ast

import pandas as pd

EOS = "</s>"
VECTOR = ["run", "text", "kept_position"]
SLICE = 0.5  # of a vector's attribution, that the slice holds
THIRDS = 3  # parts of a text


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
    total = table.groupby(VECTOR)["positive"].transform("sum")
    return table[total > 0].assign(share=table["positive"] / total)


def came_back(records: pd.DataFrame, tokens: int, share: float) -> pd.DataFrame:
    """The records of texts of at least so many ``tokens``, of which at least such a ``share`` was written at
    its place."""
    written = records.drop_duplicates(["run", "text", "written_position"])
    right = written.groupby(["run", "text"])["matches_text"].sum()
    length = written.groupby(["run", "text"])["text_tokens"].first()
    good = right.index[(length >= tokens) & (right >= share * length)]
    return records[pd.MultiIndex.from_frame(records[["run", "text"]]).isin(good)]


def by_distance(table: pd.DataFrame) -> pd.DataFrame:
    """Mean share of a vector's attribution at each distance, of EOS and of the others apart."""
    return _mean(table, table["distance"])


def by_third(table: pd.DataFrame) -> pd.DataFrame:
    """Mean share of a vector's attribution in each third of the text, 0 to 2, likewise."""
    third = table["written_position"] * THIRDS // table["text_tokens"]
    return _mean(table, third.clip(upper=THIRDS - 1).rename("third"))


def _mean(table: pd.DataFrame, place: pd.Series) -> pd.DataFrame:
    vectors = table.drop_duplicates(VECTOR).groupby("is_eos").size()
    sums = table.groupby(["is_eos", place])["share"].sum().reset_index()
    return sums.assign(share=sums["share"] / sums["is_eos"].map(vectors))


def behind(table: pd.DataFrame, reach: int) -> float | None:
    """Share of the attribution of vectors, EOS apart, on their origin and the ``reach`` tokens before it;
    None where no other vector has any."""
    others = table[~table["is_eos"].astype(bool)]
    held = others.loc[others["distance"].between(-reach, 0), "positive"].sum()
    return None if others.empty else float(held / others["positive"].sum())


def widths(table: pd.DataFrame) -> pd.Series:
    """How much of the text the shortest run of tokens covers that holds half of a vector's attribution, as a
    mean share by ``is_eos``; of an attribution that is spread evenly it covers half."""
    sliced = {
        (vector["is_eos"].iloc[0], *name): _shortest(vector) / vector["text_tokens"].iloc[0]
        for name, vector in table.groupby(VECTOR)
    }
    found = pd.Series(sliced, dtype=float)
    return found.groupby(level=0).mean()


def _shortest(vector: pd.DataFrame) -> int:
    """Tokens of the shortest run that holds :data:`SLICE` of one vector's attribution."""
    ordered = vector.sort_values("written_position")
    places, shares = ordered["written_position"].to_list(), ordered["share"].to_list()
    best, held, start = places[-1] - places[0] + 1, 0.0, 0
    for end, share in enumerate(shares):
        held += share
        while held - shares[start] >= SLICE - 1e-9:
            held -= shares[start]
            start += 1
        if held >= SLICE - 1e-9:
            best = min(best, places[end] - places[start] + 1)
    return best
