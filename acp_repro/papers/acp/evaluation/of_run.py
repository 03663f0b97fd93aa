"""The downstream tasks of one trained run, as its suite asks for them."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from acp_repro.chain import state
from acp_repro.common import files
from acp_repro.common.errors import UserError
from acp_repro.data import prepare

from ..trained import TrainedFoX
from ..unfinished import identity

if TYPE_CHECKING:
    from .evaluation import TaskResult


class NoHarness(UserError, RuntimeError):
    """The LM Evaluation Harness is not installed."""

    def __init__(self, error: ImportError):
        super().__init__(f"the tasks need the LM Evaluation Harness ({error}); pip install -e '.[eval]'")


def evaluate_run(trained: TrainedFoX) -> list[TaskResult]:
    """The results of ``measure.lm_eval_tasks`` with the run's own tokeniser, context length and dtype.

    Finished tasks are kept in ``.make/SUITE/lm_eval/RUN`` until all records are written, so that a long
    evaluation that is stopped goes on where it was.

    Raises:
        NoHarness, TaskData, TaskUnavailable: see ``load_tasks``.
    """
    try:
        from .evaluation import evaluate
        from .harness import FoXLM
        from .tasks import load_tasks
    except ModuleNotFoundError as error:
        raise NoHarness(error) from None
    run, asked = trained.run, trained.measure
    tasks, notes = load_tasks(asked.lm_eval_tasks, asked.lm_eval_data)
    for note in notes:
        print(f"note: {note}")
    lm = FoXLM.of(
        trained.model, prepare(run.data).tokenizer, max_length=run.context_length, dtype=run.training.dtype
    )
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
