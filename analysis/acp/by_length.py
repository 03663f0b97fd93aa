"""Percentages by model size and context length: their order, their format, and growth with the length."""

import pandas as pd

from acp_repro.papers.acp.cost import attention_share_of_flops

from .. import style
from ..tables import one_each
from ..verdict import Verdict
from . import naming

SHARE_POINTS = 2.0  # the tolerance for the paper's "roughly", for the percentage of FLOPs in attention


def in_order(table: pd.DataFrame) -> pd.DataFrame:
    """The rows sorted by size and context length; each combination may occur once."""
    keys = ["size", "context_length_tokens"]
    order = {size: index for index, size in enumerate(dict.fromkeys(table["size"]))}
    one_each(table, keys, "percentages")
    return table.sort_values(keys, key=lambda c: c.map(order) if c.name == "size" else c)


def listed(
    table: pd.DataFrame,
    what: str = "Pruned blocks of",
    column: str = "percent",
    digits: int = 0,
    sign: str = "",
    unit: str = " %",
) -> str:
    """ "Pruned blocks of 0.2M: 48 % at 512, 75 % at 1k; 0.5M: 47 % at 512"; ``what`` begins the text.
    Undertrained sizes are marked, and each number names its GPU if there are several."""
    gpus, sizes = gpu_marks(table), naming.marked(table.assign(size=naming.without_tokens(table["size"])))
    return f"{what} " + "; ".join(
        f"{size}: "
        + ", ".join(
            f"{value:{sign}.{digits}f}{unit} at {style.length_label(length)}{gpu}"
            for value, length, gpu in zip(
                rows[column], rows["context_length_tokens"], gpus[rows.index], strict=True
            )
        )
        for size, rows in table.groupby(sizes, sort=False)
    )


def gpu_marks(table: pd.DataFrame) -> pd.Series:
    """ " (H200)" for each row if the table mixes several GPU models; else empty."""
    if "device" not in table or table["device"].nunique() < 2:
        return pd.Series("", table.index)
    return table["device"].map(lambda name: f" ({name.removeprefix('NVIDIA ').partition(' ')[0]})")


def by_model(table: pd.DataFrame, column: str = "percent") -> dict[str, float]:
    """The numbers by names such as "125M at 4k", for ``Verdict.values``."""
    names = table["size"] + " at " + table["context_length_tokens"].map(style.length_label) + gpu_marks(table)
    return dict(zip(names, map(float, table[column]), strict=True))


def grows(table: pd.DataFrame, what: str = "Pruned blocks of", sign: str = "") -> Verdict:
    """Reproduced if the value of every size grows with the context length; inconclusive with one context
    length. The rows of :func:`naming.settled` decide."""
    table = in_order(table.assign(size=naming.without_tokens(table["size"])))
    deciding = naming.settled(table)
    words = listed(table, what, sign=sign)
    several = [rows for _, rows in deciding.groupby("size", sort=False) if len(rows) > 1]
    where = " with a model that is not undertrained" if len(deciding) < len(table) else ""
    if not several:
        alone = f"only one context length was measured{where}"
        return Verdict.of(None, f"{alone}\n{words}", alone)
    met = all((rows["percent"].diff().iloc[1:] > 0).all() for rows in several)
    if "of_grid_percent" in table:
        words += "\n" + listed(table, "Percentage of the blocks left of the diagonal,", "of_grid_percent")
        met = met and all((rows["of_grid_percent"].diff().iloc[1:] >= 0).all() for rows in several)
    if deciding["trained_tokens"].nunique() > 1:
        tokens = deciding.assign(tokens=deciding["trained_tokens"] / 1e6)
        words += "\n" + listed(tokens, "Training tokens of", "tokens", unit="M")
    lengths = deciding["context_length_tokens"]
    ends = [deciding.loc[lengths == end, "percent"] for end in (lengths.min(), lengths.max())]
    labels = (style.length_label(end) for end in (lengths.min(), lengths.max()))
    each = ", ".join(f"{style.span(e, f'{sign}.0f')} % at {at}" for e, at in zip(ends, labels, strict=True))
    axis = "throughput gain without gradient checkpointing" if sign else "pruned blocks"
    return Verdict.of(met, words, f"{axis}: {each}", values=by_model(table), axis=f"{axis} (%)")


def attention_share() -> Verdict:
    """Reproduced if the FLOPs formula agrees with the paper's percentages within :data:`SHARE_POINTS`."""
    table = naming.PUBLISHED.table.query("quantity == 'attention_share_of_flops'")
    table = table.astype({"context_length_tokens": int})
    percent = [
        100 * attention_share_of_flops(naming.paper_size(row.size), row.context_length_tokens)
        for row in table.itertuples()
    ]
    met = ((table["low"] - percent).abs() <= SHARE_POINTS).all()
    return Verdict.of(bool(met), listed(table.assign(percent=percent), "FLOPs in the attention of", digits=1))
