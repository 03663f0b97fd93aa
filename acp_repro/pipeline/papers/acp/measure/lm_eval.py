"""Downstream tasks of the LM Evaluation Harness, and each of their items (Tables 1 and 3)."""

from __future__ import annotations

import shutil
from typing import Any

from acp_repro.common import files
from acp_repro.pipeline import state
from acp_repro.pipeline.data import prepare

from ..evaluation.catalogue import COLUMNS
from ..evaluation.evaluation import HARNESS_VERSION, TaskResult, evaluate, harness_model, identity
from ..evaluation.tasks import load_tasks
from ..trained import TrainedFoX

_SHOWN = {(column.task, column.metric) for column in COLUMNS}


def measure_lm_eval(trained: TrainedFoX) -> list[dict[str, Any]]:
    """One record a task and metric, with the standard error of sampling its items. ``begins_with_bos`` is
    missing in records whose prompts did not begin with BOS."""
    results = trained.once(evaluate_run)
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
        for result in results
        for name, metric in result.metrics.items()
    ]


def evaluate_run(trained: TrainedFoX) -> list[TaskResult]:
    """The results of ``measure.lm_eval_tasks``. Finished tasks are kept in ``.make/SUITE/lm_eval/RUN`` until
    all records are written, so that a stopped evaluation can continue."""
    run, asked = trained.run, trained.measure_settings
    tasks, notes = load_tasks(asked.lm_eval_tasks, asked.lm_eval_data)
    for note in notes:
        print(f"note: {note}")
    tokenizer = prepare(run.data).tokenizer
    lm = harness_model(trained.model, tokenizer, max_length=run.context_length, dtype=run.training.dtype)
    kept = state.MAKE / run.suite / "lm_eval" / run.name
    results = evaluate(
        lm,
        tasks,
        items=asked.lm_eval_items,
        kept=kept,
        identity=identity(trained.model, files.sha256_of(run.weights_file)),
        say=lambda line: print(f"{run.name}: {line}"),
    )
    trained.when_written(lambda: shutil.rmtree(kept))
    return results


def measure_lm_eval_items(trained: TrainedFoX) -> list[dict[str, Any]]:
    """One record an item and metric of the columns of Tables 1 and 3: 1 or 0 for right or wrong; for a
    perplexity the log-likelihood in nats, and ``weight`` is its number of words."""
    return [
        {"task": result.task, "metric": name, "item": number, "value": value, "weight": weight}
        for result in trained.once(evaluate_run)
        for name, metric in result.metrics.items()
        if (result.task, name) in _SHOWN
        for number, (value, weight) in enumerate(metric.items)
    ]
