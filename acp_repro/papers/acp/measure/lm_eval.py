"""Downstream tasks of the LM Evaluation Harness, and each of their items (Tables 1 and 3)."""

import shutil
from typing import Any

import torch

from acp_repro.common import files
from acp_repro.pipeline import freshness
from acp_repro.pipeline.data import prepare
from acp_repro.pipeline.evaluation.catalogue import COLUMNS
from acp_repro.pipeline.evaluation.evaluation import (
    HARNESS_VERSION,
    TaskResult,
    evaluate,
    harness_model,
    identity,
)
from acp_repro.pipeline.evaluation.tasks import load_tasks
from acp_repro.pipeline.paper import with_columns

from ..trained import TrainedFoX
from .losses import DIFFERENCES, summarize

_SHOWN = {(column.task, column.metric) for column in COLUMNS}


@with_columns(
    "task",
    "metric",
    "value",
    "standard_error",
    "items",
    "truncated_requests",
    "source",
    "harness_version",
    "begins_with_bos",
)
def measure_lm_eval(trained: TrainedFoX) -> list[dict[str, Any]]:
    """One record for each task and metric, with the standard error of sampling the items.
    ``begins_with_bos`` is missing in records whose prompts did not begin with BOS."""
    return [
        {
            "task": result.task,
            "metric": name,
            "value": metric.value,
            "standard_error": metric.standard_error,
            "items": result.items,
            "truncated_requests": result.truncated,
            "source": result.source,
            "harness_version": HARNESS_VERSION,
            "begins_with_bos": True,
        }
        for result in trained.once(evaluate_run)
        for name, metric in result.metrics.items()
    ]


def evaluate_run(trained: TrainedFoX) -> list[TaskResult]:
    """The results of ``measure.lm_eval_tasks`` with the model's present settings. Results of finished tasks
    are saved until all records are written, so that an interrupted evaluation resumes."""
    run = trained.run
    lm, tasks, kept = trained.once(_harness)
    return evaluate(
        lm,
        tasks,
        items=trained.measure_settings.lm_eval_items,
        kept=kept,
        identity=identity(trained.model, files.sha256_of(run.weights_file)),
        say=lambda line: print(f"{run.name}: {line}"),
    )


def _harness(trained: TrainedFoX) -> tuple:
    """The harness's model, shared by all evaluations of a run: equal batch sizes round identically."""
    run, asked = trained.run, trained.measure_settings
    tasks, notes = load_tasks(asked.lm_eval_tasks, asked.lm_eval_data)
    for note in notes:
        print(f"note: {note}")
    kept = freshness.MAKE / run.suite / "lm_eval" / run.name
    trained.when_written(lambda: shutil.rmtree(kept))
    tokenizer = prepare(run.data).tokenizer
    lm = harness_model(trained.model, tokenizer, max_length=run.context_length, dtype=run.training.dtype)
    return lm, tasks, kept


@with_columns("task", "metric", "item", "value", "weight")
def measure_lm_eval_items(trained: TrainedFoX) -> list[dict[str, Any]]:
    """One record for each item and metric of the columns of Tables 1 and 3: 1 or 0 for right or wrong; for a
    perplexity the log-likelihood in nats, with the number of words as ``weight``."""
    return [
        {"task": result.task, "metric": name, "item": number, "value": value, "weight": weight}
        for result in trained.once(evaluate_run)
        for name, metric in result.metrics.items()
        if (result.task, name) in _SHOWN
        for number, (value, weight) in enumerate(metric.items)
    ]


@with_columns(*DIFFERENCES)
def measure_same_weights_tasks(trained: TrainedFoX) -> list[dict[str, Any]]:
    """One record for each task, ACP - exact: the log-likelihoods of its requests, and the items that only one
    of the two answers correctly."""
    acp, exact = (
        trained.once(evaluate_run) if method == "acp" else evaluate_run(trained)
        for method in trained.methods(both=True)
    )
    rows = []
    for one, other in zip(acp, exact, strict=True):
        rated = [name for name in one.metrics if name.startswith("acc")]
        right = [zip(*(side.metrics[name].items for name in rated), strict=True) for side in (one, other)]
        changed = sum(a != b for a, b in zip(*right, strict=True)) if rated else None
        apart = torch.tensor(one.likelihoods) - torch.tensor(other.likelihoods)
        rows.append(summarize(one.task, apart, changed))
    return rows
