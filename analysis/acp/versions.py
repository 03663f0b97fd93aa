"""The hardware and code versions of training runs and timings, and pairs of runs that differ in them."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from .. import style

# A record is measured in the environment that trained its run, so its columns describe the training too.
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
    """The differences in hardware and code between the two runs of each pair, in words. Statistical tests
    exclude pairs that differ."""
    pair = [name for name in PAIR if name in records]
    ran_on = records.reindex(columns=[*pair, *RAN_ON])
    ran_on = ran_on.assign(commit=ran_on["commit"].replace(TRAINING_CODE)).groupby(pair, dropna=False)
    found = ran_on[list(RAN_ON)].nunique().gt(1).groupby(level=list(keys), dropna=False).any()
    different = (" and two ".join(RAN_ON[name] for name in found.columns[row]) for row in found.to_numpy())
    words = (f"† marks a pair trained with two {names}" if names else "" for names in different)
    return dict(zip(found.index, words, strict=True))


def notes(unlike: dict[tuple, str], before: str = "", after: str = "") -> str:
    """The distinct texts of :func:`unlike`, which explain the mark †; empty if no pair differs."""
    found = "; ".join(dict.fromkeys(filter(None, unlike.values())))
    return f"{before}{found}{after}" if found else ""


def timed_on(*tables: pd.DataFrame) -> str:
    """One sentence per GPU and commit that names the models timed there."""
    keys, model = ["device", "commit"], ["size", "context_length_tokens"]
    each = pd.concat([table[[*keys, *model]] for table in tables]).dropna(subset="commit").drop_duplicates()
    groups = each.sort_values("context_length_tokens", kind="stable").groupby(keys, sort=False)
    return " ".join(
        f"Timed on {device} at commit {commit}: {_sizes_and_lengths(rows)}."
        for (device, commit), rows in groups
    )


def _sizes_and_lengths(models: pd.DataFrame) -> str:
    """ "125M at 4k, 8k; 360M at 16k"."""
    lengths = models.groupby("size", sort=False)["context_length_tokens"]
    return "; ".join(f"{size} at {', '.join(map(style.length_label, each))}" for size, each in lengths)
