"""Evaluates tasks one by one, keeps the result of each finished one, and estimates standard errors."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lm_eval
import lm_eval.evaluator
from lm_eval.api.metrics import bits_per_byte, mean, perplexity, weighted_perplexity
from pydantic import TypeAdapter

from acp_repro.common import files
from acp_repro.common.command import aligned
from acp_repro.common.statistics import over_draws

from ..unfinished import Unfinished, digest
from .harness import FoXLM
from .tasks import LoadedTask

HARNESS_VERSION = lm_eval.__version__


@dataclass(frozen=True)
class Metric:
    """One metric of a task.

    Attributes:
        value: as the harness gives it: a share, a perplexity.
        standard_error: of sampling the items, in the units of ``value``; None if unknown.
        items: for each item (number, weight): correct or not with weight 1, or the log-likelihood in nats
            with its number of words or bytes.
    """

    value: float
    standard_error: float | None
    items: list[tuple[float, float]]


@dataclass(frozen=True)
class TaskResult:
    """The result of one task.

    Attributes:
        source: where the items came from, see ``LoadedTask``.
        metrics: by the harness's names; a metric of another filter than the first has it after an ``@``.
        truncated: requests that lost their beginning because they are longer than the context.
    """

    task: str
    source: str
    metrics: dict[str, Metric]
    items: int
    truncated: int
    seconds: float


def evaluate(
    lm: FoXLM,
    tasks: Sequence[LoadedTask],
    *,
    items: int | None = None,
    kept: Path | None = None,
    identity: dict[str, Any] | None = None,
    again: bool = False,
    say: Callable[[str], object] = lambda line: None,
) -> list[TaskResult]:
    """The results of ``tasks``, in their order.

    Args:
        items: only the first so many of each task, as with the harness's ``--limit``.
        kept: a folder of one file a task, written when the task is finished. A file of the same model, items
            and settings is used instead of a new evaluation; files of other settings stay beside it. Scores
            of an unfinished task are there too, and a stopped task continues from them.
        identity: stands for the model and its weights; must change with them.
        again: first delete the kept results of these tasks, finished or not. A later call without it
            continues where this one was stopped.
        say: called with one line for each finished task.
    """
    keys = [_key(lm, task, items, identity or {}) for task in tasks]
    paths = [
        kept / f"{task.name}-{digest(key)}.json" if kept else None
        for task, key in zip(tasks, keys, strict=True)
    ]
    if again:
        for path in filter(None, paths):
            path.unlink(missing_ok=True)
            path.with_suffix(".unfinished").unlink(missing_ok=True)
    results = []
    for number, (task, key, path) in enumerate(zip(tasks, keys, paths, strict=True), 1):
        where = f"[{number}/{len(tasks)}] {task.name}"
        result = _read(path, key) if path else None
        if result is None:
            there = len(task.task.eval_docs)
            say(f"{where}: {min(items or there, there):,} items, from {task.source}")
            lm.unfinished = Unfinished(path and path.with_suffix(".unfinished"), key)
            result = _evaluate(lm, task, items)
            if path:
                files.write_json(path, {"key": key, "result": dataclasses.asdict(result)})
            lm.unfinished.finish()
            lm.unfinished = None  # the model may change before its next use
        else:
            say(f"{where}: finished before")
        results.append(result)
    return results


def _key(lm: FoXLM, task: LoadedTask, items: int | None, identity: dict[str, Any]) -> dict[str, Any]:
    """All that the numbers depend on."""
    scorer = lm.scorer
    settings = {
        "harness": HARNESS_VERSION,
        "task_version": str(task.task.VERSION),
        "items": items,
        "fingerprint": task.fingerprint,
        # Two tokenisers of one size have one name.
        "tokenizer": [lm.tokenizer_name, digest(getattr(lm.tokenizer, "json_text", None))],
        "max_length": lm.max_length,
        "dtype": scorer.dtype,
        "device": scorer.device.type,
        "share_contexts": scorer.share_contexts,
        "begins_with_bos": True,
    }
    return json.loads(json.dumps(identity | settings))


def _read(path: Path, key: dict[str, Any]) -> TaskResult | None:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return TypeAdapter(TaskResult).validate_python(kept["result"]) if kept["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _evaluate(lm: FoXLM, loaded: LoadedTask, items: int | None) -> TaskResult:
    start, truncated = time.perf_counter(), lm.scorer.truncated
    # Standard errors are computed below: for a perplexity the harness would draw 100,000 bootstrap samples.
    found = lm_eval.evaluator.evaluate(lm, {loaded.name: loaded.task}, limit=items, bootstrap_iters=0)
    aggregation = loaded.task.aggregation()
    metrics = {}
    for key, value in found["results"][loaded.name].items():
        name, comma, filter_name = key.partition(",")
        if not comma or name.endswith("_stderr") or not isinstance(value, int | float):
            continue
        samples = [s for s in found["samples"][loaded.name] if s["filter"] == filter_name]
        numbers = [sample[name] for sample in samples if name in sample]
        first = filter_name == "none"
        metrics[name if first else f"{name}@{filter_name}"] = _metric(value, numbers, aggregation[name])
    return TaskResult(
        task=loaded.name,
        source=loaded.source,
        metrics=metrics,
        items=len({sample["doc_id"] for sample in found["samples"][loaded.name]}),
        truncated=lm.scorer.truncated - truncated,
        seconds=time.perf_counter() - start,
    )


def _metric(value: float, numbers: list[Any], aggregation: Callable) -> Metric:
    """A metric with its standard error, from the numbers that the harness averages.

    For a mean it is that of the harness (``mean_stderr``). A perplexity is exp of a mean, or of a ratio of
    sums whose terms are drawn together. Its items are articles, not words, because words of one article are
    not independent.
    """
    pairs = [(float(n[0]), float(n[1])) if isinstance(n, tuple) else (_number(n), 1.0) for n in numbers]
    error = None
    if aggregation in _SLOPES and len(pairs) > 1:
        error = _SLOPES[aggregation](value) * over_draws(*zip(*pairs, strict=True)).error
    return Metric(float(value), error, pairs)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


# |d value / d mean| of the harness's aggregations; its mean of squared deviations also divides by n - 1.
_SLOPES: dict[Callable, Callable[[float], float]] = {
    mean: lambda value: 1.0,
    perplexity: lambda value: value,
    weighted_perplexity: lambda value: value,
    bits_per_byte: lambda value: 1 / math.log(2),
}


def print_results(results: Sequence[TaskResult]) -> None:
    """Every metric with its standard error, a line each."""
    rows = [("task", "metric", "value", "± s.e.", "items", "from")]
    for result in results:
        for name, metric in result.metrics.items():
            error = "" if metric.standard_error is None else f"{metric.standard_error:.4f}"
            rows.append((result.task, name, f"{metric.value:.4f}", error, f"{result.items:,}", result.source))
    print("\n".join(aligned(rows, left=(0, 1, 5))))
    for result in results:
        if result.truncated:
            print(
                f"note: {result.task}: {result.truncated:,} requests were longer than the context and lost "
                "their beginning"
            )
