"""Training on several gloo ranks, or in one process that a test kills."""

from collections.abc import Callable
from pathlib import Path

from acp_repro.papers.acp.paper import PAPER
from acp_repro.pipeline.suite_file import load_suite
from acp_repro.pipeline.training.distributed import process_group
from acp_repro.pipeline.training.trainer import train
from tests.ranks import run_on


def train_on(
    ranks: int,
    folder: Path,
    name: str,
    *,
    stop_after: int | None = None,
    before: Callable[[], None] | None = None,
    environment: dict[str, str] | None = None,
) -> list[tuple[int, str]]:
    """Trains run ``name`` of the suite ``mini`` under ``folder`` on ``ranks`` ranks; see ``run_on``.

    Args:
        before: called in each process first; a function of a test module.
        environment: variables set in each process before that.
    """
    return run_on(ranks, folder, _train, name, stop_after, before, environment=environment)


def _train(name, stop_after, before) -> None:
    if before is not None:
        before()
    with process_group("cpu") as device:
        train(PAPER, load_suite("mini").run(name), device=device, stop_after=stop_after)
