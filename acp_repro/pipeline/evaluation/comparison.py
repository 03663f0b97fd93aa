"""Compares two evaluations of the harness item by item, from any project, without the harness."""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from acp_repro.common.errors import UsageError
from acp_repro.common.statistics import LEVEL, equivalence, finite, holm, over_items, paired_difference
from acp_repro.pipeline.errors import UnknownName

RECORDS = "lm_eval_items.csv.gz"
COLUMNS = (
    *("task", "metric", "items", "a", "b", "difference", "low", "high", "p_value", "adjusted_p_value"),
    *("margin", "equivalence_p_value", "adjusted_equivalence_p_value", "verdict"),
)
# By whether the two differ and whether they are equivalent, both after Holm's correction.
_VERDICTS = {
    (True, False): "differ",
    (True, True): "differ, by less than the margin",
    (False, True): "equivalent",
    (False, False): "open",
}
_DATE = re.compile(r"_\d{4}-\d\d-\d\dT[\d.+-]+$")


@dataclass
class Items:
    """The items of one metric of one task: by number (value, weight), as in ``evaluation.Metric``, and a hash
    of the item's document, if the evaluation has one."""

    values: dict[int, tuple[float, float]] = field(default_factory=dict)
    documents: dict[int, str] = field(default_factory=dict)

    def common(self, other: Items) -> list[int]:
        """The numbers of items that both have, without those known to be of different documents."""
        hashes = {number: {side.documents.get(number) for side in (self, other)} for number in self.values}
        return [n for n in self.values if n in other.values and len(hashes[n] - {None}) < 2]


Evaluation = dict[tuple[str, str], Items]  # by (task, metric)


def shown(mean: float, metric: str) -> float:
    """A metric from the mean of its items: of a perplexity exp of minus the log-likelihood of a word, or that
    in bits. A perplexity above the largest float64 is infinite."""
    if is_perplexity(metric):
        return math.exp(-mean) if -mean < math.log(np.finfo(np.float64).max) else math.inf
    return mean * _sign(metric)


def is_perplexity(metric: str) -> bool:
    """Whether a metric, with or without ``@`` and its filter, is a perplexity."""
    return metric.partition("@")[0].endswith("perplexity")


def _sign(metric: str) -> float:
    """Turns a difference of means into one of the metric, or of logarithms of perplexities."""
    if metric.partition("@")[0] == "bits_per_byte":
        return -1 / math.log(2)
    return -1.0 if is_perplexity(metric) else 1.0


def read(path: Path) -> Evaluation:
    """The items of an evaluation: ``samples_TASK_DATE.jsonl`` of the harness, a file that ``python -m
    acp_repro.evaluate`` keeps, a record ``lm_eval_items.csv.gz``, or a folder that holds such files."""
    if not path.exists():
        raise UsageError(
            f"{path}: no such file or folder; give samples_*.jsonl, runs/evaluations/NAME or "
            "results/SUITE/RUN"
        )
    if path.is_file():
        return _read_file(path)
    found: Evaluation = {}
    found_in: dict[str, Path] = {}
    for file in sorted(p for p in path.rglob("*") if _choose_reader(p)):
        for key, items in _read_file(file).items():
            if (other := found_in.setdefault(key[0], file)) != file:
                raise UsageError(f"{other} and {file} hold {key[0]} both; give one of them")
            found[key] = items
    if not found:
        raise UsageError(
            f"{path} holds no evaluation: no samples_*.jsonl of lm-eval --log_samples, nothing that "
            f"`python -m acp_repro.evaluate` keeps, no {RECORDS}"
        )
    return found


def _choose_reader(path: Path):
    name = path.name
    if re.fullmatch(r"samples_.*\.jsonl(\.gz)?", name):
        return _read_samples
    if re.fullmatch(r".+-[0-9a-f]{8,}\.json", name):
        return _read_kept
    return _read_records if name == RECORDS else None


def _read_file(path: Path) -> Evaluation:
    if (reader := _choose_reader(path)) is None:
        raise UsageError(
            f"{path} is none of these: samples_*.jsonl of lm-eval, what `python -m acp_repro.evaluate` "
            f"keeps, {RECORDS}; give one of them"
        )
    found: Evaluation = {}
    for task, metric, number, value, document in reader(path):
        items = found.setdefault((task, metric), Items())
        if number in items.values:
            raise UsageError(f"{path}: item {number} of {task} {metric} appears twice; evaluate it again")
        items.values[number] = value
        if document:
            items.documents[number] = document
    return found


def task_of(path: Path) -> str:
    """``samples_piqa_2026-01-31T12-00-00.123456.jsonl`` is of piqa."""
    stem = path.name.removesuffix(".gz").removesuffix(".jsonl").removeprefix("samples_")
    return _DATE.sub("", stem)


def _read_samples(path: Path) -> Iterator[tuple]:
    task = task_of(path)
    try:
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = text.decode().split("\n")  # splitlines() also cuts inside texts, at U+2028
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is damaged ({error}); copy it again") from error
    for place, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            sample = json.loads(line)
            number = int(sample["doc_id"])
            kind = sample.get("filter", "none")
            values = {name: _value(name, sample.get(name)) for name in sample["metrics"]}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{path}, line {place}: no sample of lm-eval ({error})") from error
        for name, value in values.items():
            if value is not None:
                metric = name if kind == "none" else f"{name}@{kind}"
                yield task, metric, number, value, str(sample.get("doc_hash") or "")


def _value(name: str, value) -> tuple[float, float] | None:
    """(value, weight) of what the harness logs; None if it is not averaged over items."""
    if isinstance(value, int | float):
        return float(value), 1.0
    by_words = is_perplexity(name) or name == "bits_per_byte"
    if by_words and isinstance(value, list) and len(value) == 2:
        return float(value[0]), float(value[1])
    return None


def _read_kept(path: Path) -> Iterator[tuple]:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))["result"]
        for name, metric in result["metrics"].items():
            for number, (value, weight) in enumerate(metric["items"]):
                yield result["task"], name, number, (float(value), float(weight)), ""
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}: nothing that `python -m acp_repro.evaluate` keeps ({error})") from error


def _read_records(path: Path) -> Iterator[tuple]:
    try:
        table = pd.read_csv(path, usecols=["task", "metric", "item", "value", "weight"])
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read ({' '.join(str(error).split())})") from error
    for row in table.itertuples():
        yield row.task, row.metric, row.item, (row.value, row.weight), ""


def choose(
    a: Evaluation, b: Evaluation, names: tuple[str, str], tasks: Collection[str], metrics: Collection[str]
) -> list[tuple[str, str]]:
    """The requested (task, metric) that both have; all if none is requested."""
    both = sorted(set(a) & set(b))
    if not both:
        listed = "; ".join(", ".join(sorted({task for task, _ in side})) for side in (a, b))
        raise UsageError(f"{names[0]} and {names[1]} have no task in common: {listed}")
    for place, (asked, what) in enumerate(((tasks, "task"), (metrics, "mean over items"))):
        known = dict.fromkeys(key[place] for key in both)
        for name in asked:
            if name not in known:
                raise UnknownName.among(f"{name!r} is no {what} in both", name, known)
        both = [key for key in both if not asked or key[place] in asked]
    return both


def compare(
    a: Evaluation, b: Evaluation, names: tuple[str, str], keys: list[tuple[str, str]], margin: float
) -> tuple[list[dict], list[str]]:
    """A minus B for each metric, a row of :data:`COLUMNS` each, and notes of what was left out.
    ``difference`` and ``margin`` are in the metric's units, or of the logarithms of perplexities."""
    rows, notes = [], []
    for key in keys:
        task, metric = key
        one, other = a[key], b[key]
        common = one.common(other)
        if not common:
            raise UsageError(f"{task} {metric}: {names[0]} and {names[1]} have no item in common")
        if len(common) < max(len(one.values), len(other.values)):
            counts = f"{len(one.values):,} and {len(other.values):,}"
            notes.append(f"{task} {metric}: {len(common):,} items are in both, of {counts}")
        first, second = (np.array([side.values[number] for number in common]) for side in (one, other))
        for name, side in zip(names, (first, second), strict=True):
            finite(side[:, 0], f"{name}: {task} {metric}", common)
        weights = first[:, 1]
        if not np.array_equal(weights, second[:, 1]):
            raise UsageError(
                f"{task} {metric}: {names[0]} and {names[1]} count other words or bytes in an item"
            )
        apart = (first[:, 0] - second[:, 0]) * _sign(metric)
        found = paired_difference(apart, weights)
        means = [side[:, 0].sum() / weights.sum() for side in (first, second)]
        rows.append(
            {
                "task": task,
                "metric": metric,
                "items": len(common),
                "a": shown(means[0], metric),
                "b": shown(means[1], metric),
                **dict(zip(("difference", "low", "high", "p_value"), found, strict=True)),
                "margin": margin,
                "equivalence_p_value": equivalence(over_items(apart, weights), margin).p_value,
            }
        )
    for name in ("p_value", "equivalence_p_value"):
        for row, adjusted in zip(rows, holm([row[name] for row in rows]).tolist(), strict=True):
            row[f"adjusted_{name}"] = adjusted
    for row in rows:
        sure = (row["adjusted_p_value"] < LEVEL, row["adjusted_equivalence_p_value"] < LEVEL)
        row["verdict"] = _VERDICTS[sure]
    return rows, notes
