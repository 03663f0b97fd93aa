"""Evaluates tasks with the harness's HFLM, saves each finished result, and estimates standard errors."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lm_eval
import lm_eval.evaluator
import tokenizers
import torch
from lm_eval.api.metrics import bits_per_byte, mean, perplexity, weighted_perplexity
from lm_eval.models.huggingface import HFLM
from pydantic import TypeAdapter

from acp_repro.common.artifacts import open_or_explain, write_manifest
from acp_repro.common.command import aligned
from acp_repro.common.digests import hash_json
from acp_repro.common.statistics import over_draws
from acp_repro.hf import ForgettingTransformerConfig, ForgettingTransformerForCausalLM, FoXTokenizer
from acp_repro.hf.conversion import bytes_tokenizer
from acp_repro.model import FoXForCausalLM
from acp_repro.model.pretrained import config_to_official
from acp_repro.model.tokenizer import BPETokenizer, Tokenizer

from .tasks import LoadedTask

HARNESS_VERSION = lm_eval.__version__
CPU_BATCH = 4  # requests; on a GPU the harness finds the largest batch that fits


def harness_model(model: FoXForCausalLM, tokenizer: Tokenizer, *, max_length: int, dtype: str) -> HFLM:
    """The harness's adapter for a model, on the device of the weights. Prompts longer than ``max_length``
    tokens are truncated on the left, including BOS."""
    with torch.device("meta"):
        config = ForgettingTransformerConfig(**config_to_official(model.config), use_cache=False)
        fox = ForgettingTransformerForCausalLM(config)
    fox.lm_head = model.lm_head
    for name, module in model.model.named_children():
        fox.model.add_module(name, module)
    bpe = isinstance(tokenizer, BPETokenizer)
    return HFLM(
        pretrained=fox,
        backend="causal",
        tokenizer=FoXTokenizer(
            tokenizer_object=tokenizers.Tokenizer.from_str(tokenizer.json_text) if bpe else bytes_tokenizer()
        ),
        max_length=max_length,
        batch_size="auto" if fox.device.type == "cuda" else CPU_BATCH,
        mixed_precision_dtype="bfloat16" if dtype == "bfloat16" else None,
        softmax_dtype="float32",
    )


def identity(model: FoXForCausalLM, weights_sha256: str) -> dict[str, Any]:
    """The key of a model for saved results; equal weights with different configs have different keys."""
    return {"weights": weights_sha256, "config": dataclasses.asdict(model.config)}


@dataclass(frozen=True)
class Metric:
    """One metric of a task, as the harness returns it, with the sampling standard error (None if unknown).

    ``items`` are (value, weight): 1 or 0 for right or wrong with weight 1, or the log-likelihood in nats with
    the number of words or bytes as weight.
    """

    value: float
    standard_error: float | None
    items: list[tuple[float, float]]


@dataclass(frozen=True)
class TaskResult:
    """The result of one task. The name of a metric with another filter than ``none`` ends in ``@FILTER``.
    ``truncated`` is the number of requests longer than the context, which lost their beginning.
    ``likelihoods`` contains the log-likelihood of every request."""

    task: str
    source: str
    metrics: dict[str, Metric]
    items: int
    truncated: int
    seconds: float
    likelihoods: list[float]


def evaluate(
    lm: HFLM,
    tasks: Sequence[LoadedTask],
    *,
    kept: Path,
    identity: dict[str, Any],
    items: int | None = None,
    again: bool = False,
    say: Callable[[str], object] = lambda line: None,
) -> list[TaskResult]:
    """The results of ``tasks``, in their order, of the first ``items`` items each, as with the harness's
    ``--limit``.

    ``kept`` is a folder with one file for each finished task. If a file has the same model (``identity``),
    items and settings, it replaces a new evaluation, unless ``again`` is set. ``say`` is called with one line
    for each task.
    """
    keys = [_key(lm, task, items, identity) for task in tasks]
    paths = [kept / f"{task.name}-{hash_json(key)[:12]}.json" for task, key in zip(tasks, keys, strict=True)]
    if again:
        for path in paths:
            path.unlink(missing_ok=True)
    results = []
    for number, (task, key, path) in enumerate(zip(tasks, keys, paths, strict=True), 1):
        where = f"[{number}/{len(tasks)}] {task.name}"
        result = _read(path, key)
        if result is None:
            there = len(task.task.eval_docs)
            say(f"{where}: {min(items or there, there):,} items, from {task.source}")
            result = _evaluate(lm, task, items)
            write_manifest(path, path, key, {"result": dataclasses.asdict(result)})
        else:
            say(f"{where}: finished before")
        results.append(result)
    return results


def _key(lm: HFLM, task: LoadedTask, items: int | None, identity: dict[str, Any]) -> dict[str, Any]:
    """All settings that affect the results."""
    settings = {
        "harness": HARNESS_VERSION,
        "task_version": str(task.task.VERSION),
        "items": items,
        "fingerprint": task.fingerprint,
        "tokenizer": hash_json(lm.tokenizer.backend_tokenizer.to_str())[:12],
        "max_length": lm.max_length,
        "dtype": str(lm.mixed_precision_dtype),
        "device": lm.device.type,
    }
    return identity | settings


def _read(path: Path, key: dict[str, Any]) -> TaskResult | None:
    with contextlib.suppress(ValueError):  # from the store, or from pydantic for a result of older code
        kept = open_or_explain(path, key, manifest=path)
        return TypeAdapter(TaskResult).validate_python(kept["result"])
    return None


def _evaluate(lm: HFLM, loaded: LoadedTask, items: int | None) -> TaskResult:
    start = time.perf_counter()
    # Every prompt begins with BOS, like every training sequence; the harness adds BOS to rolling texts.
    lm.add_bos_token = loaded.task.OUTPUT_TYPE != "loglikelihood_rolling"
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
        truncated=sum(
            len(lm.tok_encode("".join(request.args))) > lm.max_length + 1
            for request in loaded.task.instances
            if request.request_type == "loglikelihood"
        ),
        seconds=time.perf_counter() - start,
        likelihoods=[
            float(request.resps[0][0] if request.request_type == "loglikelihood" else request.resps[0])
            for request in loaded.task.instances
        ],
    )


def _metric(value: float, numbers: list[Any], aggregation: Callable) -> Metric:
    """A metric with its standard error, from the numbers that the harness averages.

    A perplexity is exp of a mean, or of a ratio of sums whose terms are sampled together. Its items are
    articles instead of words, because the words of one article are not independent.
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
    """Prints every metric with its standard error, one per line."""
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
