"""Downstream tasks of the LM Evaluation Harness (Tables 1 and 3)."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

from acp_repro.common import files
from acp_repro.common.errors import UserError
from acp_repro.pipeline import state
from acp_repro.pipeline.paper import Quantity

from ..unfinished import identity

if TYPE_CHECKING:
    from ..evaluation.evaluation import TaskResult
    from ..trained import TrainedFoX


def measure(trained: TrainedFoX) -> list[dict[str, Any]]:
    """One record a task and metric, with the standard error of sampling its items.

    ``value`` and ``standard_error`` are shares for accuracies, and otherwise perplexities or bits per byte.
    ``begins_with_bos`` is missing in records whose prompts did not begin with BOS.
    """
    from ..evaluation.evaluation import HARNESS_VERSION

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


class NoHarness(UserError, RuntimeError):
    """The LM Evaluation Harness is not installed."""

    def __init__(self, error: ImportError):
        super().__init__(f"the tasks need the LM Evaluation Harness ({error}); pip install -e '.[eval]'")


def evaluate_run(trained: TrainedFoX) -> list[TaskResult]:
    """The results of ``measure.lm_eval_tasks`` with the run's own tokeniser, context length and dtype.

    Finished tasks are kept in ``.make/SUITE/lm_eval/RUN`` until all records are written, so that a stopped
    evaluation can continue.

    Raises:
        NoHarness, TaskData, TaskUnavailable: see ``load_tasks``.
    """
    from acp_repro.pipeline.data import prepare

    try:
        from ..evaluation.evaluation import evaluate, harness_model
        from ..evaluation.tasks import load_tasks
    except ModuleNotFoundError as error:
        raise NoHarness(error) from None
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


LIBRARY = ("lm_eval", "eval")  # the library and our extra
QUANTITY = Quantity(
    "lm_eval",
    "task metric value standard_error items truncated_requests source harness_version begins_with_bos",
    measure,
    lambda suite: suite.in_order(suite.evaluated("pro"), suite.evaluated("llama")),
    group="lm_eval",
    library=LIBRARY,
    later=("begins_with_bos",),
)
