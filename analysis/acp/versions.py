"""Where and with which code models were trained and timed, and in what the runs of a pair differ in that."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from .. import style

# A record is measured where and when its run was trained, so it names the software of the training too.
RAN_ON = {
    "commit": "versions of the kernels",
    "torch_version": "versions of torch",
    "triton_version": "versions of triton",
    "ptxas_version": "versions of ptxas",
    "device": "kinds of device",
}
# The digest of the training code at each commit of the published runs, which shows that several commits have
# the same code. A commit that the table does not list is compared by its own name.
_TABLE = pd.read_csv(Path(__file__).with_name("training_code.csv"), dtype=str)
TRAINING_CODE = dict(zip(_TABLE["commit"], _TABLE["code"], strict=True))
PAIR = (
    *("suite", "architecture", "size", "context_length_tokens"),
    *("needle_fraction", "evaluated_length_tokens", "seed"),
)


def unlike(records: pd.DataFrame, keys: Sequence[str]) -> dict[tuple, str]:
    """What the two runs of a pair differ in besides ACP, in words. No test counts such pairs."""
    pair = [name for name in PAIR if name in records]
    ran_on = records.reindex(columns=[*pair, *RAN_ON])
    ran_on = ran_on.assign(commit=ran_on["commit"].replace(TRAINING_CODE)).groupby(pair, dropna=False)
    found = ran_on[list(RAN_ON)].nunique().gt(1).groupby(level=list(keys), dropna=False).any()
    different = (" and two ".join(RAN_ON[name] for name in found.columns[row]) for row in found.to_numpy())
    words = (f"† trained with two {names}" if names else "" for names in different)
    return dict(zip(found.index, words, strict=True))


def notes(unlike: dict[tuple, str], before: str = "", after: str = "") -> str:
    """Each of :func:`unlike` once, to stand behind the marked numbers; empty where none is marked."""
    found = "; ".join(dict.fromkeys(filter(None, unlike.values())))
    return f"{before}{found}{after}" if found else ""


def timed_on(*tables: pd.DataFrame) -> str:
    """Which models were timed on which GPU and commit, a sentence each; empty where all were on one."""
    keys, model = ["device", "commit"], ["size", "context_length_tokens"]
    each = pd.concat([table[[*keys, *model]] for table in tables]).dropna(subset="commit").drop_duplicates()
    groups = each.sort_values("context_length_tokens", kind="stable").groupby(keys, sort=False)
    if len(groups) < 2:
        return ""
    return " ".join(f"{_sizes_and_lengths(rows)}: timed on {on}, {commit}." for (on, commit), rows in groups)


def _sizes_and_lengths(models: pd.DataFrame) -> str:
    """ "125M at 4k and 8k, 360M at 16k"."""
    lengths = models.groupby("size", sort=False)["context_length_tokens"]
    return ", ".join(f"{size} at {' and '.join(map(style.length_label, each))}" for size, each in lengths)
