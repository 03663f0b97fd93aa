"""Attributions of each kept vector: their positions in the text, and the width of their slice."""

import ast

import numpy as np
import pandas as pd

from acp_repro.common.statistics import LEVEL, Interval

EOS = "</s>"
VECTOR = ["run", "text", "kept_position"]
SLICE = 0.5  # the fraction of a vector's attribution inside its slice
THIRDS = 3  # parts of a text
DRAWS = 10_000  # bootstrap samples


def positive(records: pd.DataFrame) -> pd.DataFrame:
    """``attribution`` records with ``share`` of a vector's positive attribution, ``distance`` in tokens from
    its origin, and ``is_eos``.

    Written tokens at a wrong position are excluded, because distances are undefined after the output
    diverges. Vectors without positive attribution are excluded too.
    """
    table = records[records["matches_text"]]
    table = table.assign(
        positive=table["shap_nats"].clip(lower=0),
        distance=table["written_position"] - table["kept_position"],
        is_eos=table["kept_token"].map({t: ast.literal_eval(t) == EOS for t in table["kept_token"].unique()}),
    )
    total = table.groupby(VECTOR)["positive"].transform("sum")
    return table[total > 0].assign(share=table["positive"] / total)


def reconstructed(records: pd.DataFrame, tokens: int, share: float) -> pd.DataFrame:
    """The records of texts with at least ``tokens`` tokens of which at least the fraction ``share`` is
    reconstructed at its position."""
    written = records.drop_duplicates(["run", "text", "written_position"])
    right = written.groupby(["run", "text"])["matches_text"].sum()
    length = written.groupby(["run", "text"])["text_tokens"].first()
    good = right.index[(length >= tokens) & (right >= share * length)]
    return records[pd.MultiIndex.from_frame(records[["run", "text"]]).isin(good)]


def by_distance(table: pd.DataFrame) -> pd.DataFrame:
    """Mean share of a vector's attribution at each distance, separately for EOS and the other vectors."""
    return _mean(table, table["distance"])


def by_third(table: pd.DataFrame) -> pd.DataFrame:
    """Mean share of a vector's attribution in each third of the text, 0 to 2, for EOS and the others."""
    return _mean(table, _third(table))


def of_third(table: pd.DataFrame, third: int) -> Interval:
    """Mean share of a vector's attribution in one third of the text, and its interval over texts."""
    return over_texts(table, table["share"].where(_third(table) == third, 0.0), table["share"])


def _third(table: pd.DataFrame) -> pd.Series:
    third = table["written_position"] * THIRDS // table["text_tokens"]
    return third.clip(upper=THIRDS - 1).rename("third")


def _mean(table: pd.DataFrame, place: pd.Series) -> pd.DataFrame:
    vectors = table.drop_duplicates(VECTOR).groupby("is_eos").size()
    sums = table.groupby(["is_eos", place])["share"].sum().reset_index()
    return sums.assign(share=sums["share"] / sums["is_eos"].map(vectors))


def behind(table: pd.DataFrame, reach: int) -> Interval | None:
    """Mean share of a vector's attribution on its origin and the ``reach`` tokens before it, without EOS;
    None if no other vector has any attribution."""
    others = table[~table["is_eos"].astype(bool)]
    held = others["share"].where(others["distance"].between(-reach, 0), 0.0)
    return None if others.empty else over_texts(others, held, others["share"])


def widths(table: pd.DataFrame) -> pd.Series:
    """The mean of :func:`width_of_each` by ``is_eos``; one half for a uniform attribution."""
    return width_of_each(table).groupby("is_eos")["width"].mean()


def width_of_each(table: pd.DataFrame) -> pd.DataFrame:
    """The fraction of the text in the shortest span that contains half of a vector's attribution: rows with
    ``is_eos``, ``run``, ``text`` and ``width``."""
    needed = table[[*VECTOR, "is_eos", "text_tokens", "written_position", "share"]]
    rows = [
        (vector["is_eos"].iloc[0], *name[:2], _shortest(vector) / vector["text_tokens"].iloc[0])
        for name, vector in needed.sort_values("written_position").groupby(VECTOR)
    ]
    return pd.DataFrame(rows, columns=["is_eos", "run", "text", "width"])


def scattered(table: pd.DataFrame) -> pd.DataFrame:
    """The same shares of each vector at random positions of its text, as a null distribution."""
    generator, parts = np.random.default_rng(0), []
    for _, text in table.groupby(["run", "text"]):
        places = text["written_position"].unique()
        parts += [
            vector.assign(written_position=generator.permutation(places)[: len(vector)])
            for _, vector in text.groupby("kept_position")
        ]
    return pd.concat(parts)


def over_texts(table: pd.DataFrame, part: pd.Series, whole: pd.Series | float = 1.0) -> Interval:
    """The sum of ``part`` over the sum of ``whole``, with a bootstrap interval over texts."""
    sums = table.assign(part=part, whole=whole).groupby(["run", "text"])[["part", "whole"]].sum().to_numpy()
    draws = np.random.default_rng(0).integers(len(sums), size=(DRAWS, len(sums)))
    parts, wholes = sums[draws].sum(axis=1).T
    low, high = np.quantile(parts / wholes, (LEVEL / 2, 1 - LEVEL / 2))
    return Interval(*map(float, (sums[:, 0].sum() / sums[:, 1].sum(), low, high)))


def _shortest(vector: pd.DataFrame) -> int:
    """The length of the shortest span of tokens with :data:`SLICE` of one vector's attribution."""
    places, shares = vector["written_position"].to_list(), vector["share"].to_list()
    best, held, start = places[-1] - places[0] + 1, 0.0, 0
    for end, share in enumerate(shares):
        held += share
        while held - shares[start] >= SLICE - 1e-9:
            held -= shares[start]
            start += 1
        if held >= SLICE - 1e-9:
            best = min(best, places[end] - places[start] + 1)
    return best
