"""Compares two evaluations of the LM Evaluation Harness item by item; does not need the harness."""

import gzip
import json
import math
import re
import zlib
from collections.abc import Collection, Iterator
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
# Keys: (significantly different, significantly equivalent), both after Holm's correction.
_VERDICTS = {
    (True, False): "differ",
    (True, True): "differ, by less than the margin",
    (False, True): "equivalent",
    (False, False): "open",
}
_DATE = re.compile(r"_\d{4}-\d\d-\d\dT[\d.+-]+$")

_ITEM = ["task", "metric", "item", "value", "weight", "document"]


def shown(mean: float, metric: str) -> float:
    """A metric from the mean of its items. A perplexity is exp of the negative mean, and
    is infinite above the largest float64; bits per byte are converted from nats."""
    if is_perplexity(metric):
        return math.exp(-mean) if -mean < math.log(np.finfo(np.float64).max) else math.inf
    return mean * _sign(metric)


def is_perplexity(metric: str) -> bool:
    """Whether a metric, with or without ``@`` and its filter, is a perplexity."""
    return metric.partition("@")[0].endswith("perplexity")


def _sign(metric: str) -> float:
    """The factor from a difference of means to one of the metric, or of logarithms of perplexities."""
    if metric.partition("@")[0] == "bits_per_byte":
        return -1 / math.log(2)
    return -1.0 if is_perplexity(metric) else 1.0


def read(path: Path) -> pd.DataFrame:
    """The items of an evaluation: ``samples_TASK_DATE.jsonl`` of the harness, a file that ``python -m
    acp_repro.evaluate`` saves, results ``lm_eval_items.csv.gz``, or a folder that contains such files.

    A row is an item of a metric: its number, ``value`` and ``weight`` as in ``evaluation.Metric``, the hash
    of its ``document`` (empty if the evaluation records none), and its ``file``.
    """
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if _choose_reader(p))
    if not files:
        what = "contains no evaluation" if path.exists() else "does not exist"
        raise UsageError(
            f"{path} {what}; give a folder with samples_*.jsonl of lm-eval --log_samples, "
            f"with results of `python -m acp_repro.evaluate`, or with {RECORDS}"
        )
    found = pd.concat([_read_file(file) for file in files], ignore_index=True)
    for task, holders in found.groupby("task")["file"].unique().items():
        if len(holders) > 1:
            raise UsageError(f"{holders[0]} and {holders[1]} both contain {task}; give one of them")
    return found


def _choose_reader(path: Path):
    name = path.name
    if re.fullmatch(r"samples_.*\.jsonl(\.gz)?", name):
        return _read_samples
    if re.fullmatch(r".+-[0-9a-f]{8,}\.json", name):
        return _read_kept
    return _read_records if name == RECORDS else None


def _read_file(path: Path) -> pd.DataFrame:
    if (reader := _choose_reader(path)) is None:
        raise UsageError(
            f"{path} is not an evaluation; give samples_*.jsonl of lm-eval, a result of `python -m "
            f"acp_repro.evaluate`, or {RECORDS}"
        )
    found = pd.DataFrame(reader(path), columns=_ITEM).assign(file=str(path))
    twice = found[found.duplicated(["task", "metric", "item"])]
    for _, row in twice.iterrows():
        raise UsageError(
            f"{path}: item {row['item']} of {row['task']} {row['metric']} appears twice; evaluate it again"
        )
    return found


def _read_samples(path: Path) -> Iterator[tuple]:
    # samples_piqa_2026-01-31T12-00-00.123456.jsonl contains samples of piqa.
    task = _DATE.sub("", path.name.removesuffix(".gz").removesuffix(".jsonl").removeprefix("samples_"))
    try:
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = text.decode().split("\n")  # splitlines() would also split texts at U+2028
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
            raise UsageError(
                f"{path}, line {place}: not a sample of lm-eval ({error}); evaluate again"
            ) from error
        for name, value in values.items():
            if value is not None:
                metric = name if kind == "none" else f"{name}@{kind}"
                yield task, metric, number, *value, str(sample.get("doc_hash") or "")


def _value(name: str, value) -> tuple[float, float] | None:
    """(value, weight) of a logged value of the harness; None if the value is not averaged over items."""
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
                yield result["task"], name, number, float(value), float(weight), ""
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}: not a result of `python -m acp_repro.evaluate` ({error})") from error


def _read_records(path: Path) -> Iterator[tuple]:
    try:
        table = pd.read_csv(path, usecols=["task", "metric", "item", "value", "weight"])
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read ({' '.join(str(error).split())})") from error
    for row in table.itertuples():
        yield row.task, row.metric, row.item, row.value, row.weight, ""


def choose(
    a: pd.DataFrame, b: pd.DataFrame, names: tuple[str, str], tasks: Collection[str], metrics: Collection[str]
) -> list[tuple[str, str]]:
    """The requested (task, metric) pairs that both evaluations contain; all pairs if none is requested."""
    first, second = ({*zip(side["task"], side["metric"], strict=True)} for side in (a, b))
    both = sorted(first & second)
    if not both:
        listed = "; ".join(", ".join(sorted({task for task, _ in keys})) for keys in (first, second))
        raise UsageError(f"{names[0]} and {names[1]} have no task in common: {listed}")
    for place, (asked, what) in enumerate(((tasks, "task"), (metrics, "mean over items"))):
        known = dict.fromkeys(key[place] for key in both)
        for name in asked:
            if name not in known:
                raise UnknownName.among(f"{name!r} is not a {what} of both evaluations", name, known)
        both = [key for key in both if not asked or key[place] in asked]
    return both


def compare(
    a: pd.DataFrame, b: pd.DataFrame, names: tuple[str, str], keys: list[tuple[str, str]], margin: float
) -> tuple[list[dict], list[str]]:
    """The difference A - B of each metric, as rows of :data:`COLUMNS`, and notes about omitted items.
    ``difference`` and ``margin`` are in the metric's units, or of the logarithms of perplexities."""
    rows, notes = [], []
    for task, metric in keys:
        one, other = (side[(side["task"] == task) & (side["metric"] == metric)] for side in (a, b))
        both = one.merge(other, on="item", suffixes=("_a", "_b"))
        differ = both["document_a"] != both["document_b"]
        both = both[~(differ & (both["document_a"] != "") & (both["document_b"] != ""))]
        if both.empty:
            raise UsageError(f"{task} {metric}: {names[0]} and {names[1]} have no item in common")
        if len(both) < max(len(one), len(other)):
            counts = f"{len(one):,} and {len(other):,}"
            notes.append(f"{task} {metric}: {len(both):,} items are in both, of {counts}")
        first, second, weights = (both[name].to_numpy() for name in ("value_a", "value_b", "weight_a"))
        for name, values in zip(names, (first, second), strict=True):
            finite(values, f"{name}: {task} {metric}", both["item"].tolist())
        if not np.array_equal(weights, both["weight_b"]):
            raise UsageError(
                f"{task} {metric}: {names[0]} and {names[1]} count different words or bytes in an item; "
                "evaluate both with the same version of the task"
            )
        apart = (first - second) * _sign(metric)
        found = paired_difference(apart, weights)
        means = [values.sum() / weights.sum() for values in (first, second)]
        rows.append(
            {
                "task": task,
                "metric": metric,
                "items": len(both),
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
