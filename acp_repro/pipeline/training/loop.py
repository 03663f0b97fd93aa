"""The training loop: one run of a suite, from its folder's state to its trained weights.

A run folder holds all that explains it::

    run.json        what was run: the resolved settings, the data, ranks, versions and commit
    metrics.jsonl   one line a step
    checkpoints/    the newest two, each with the content of run.json, until the run is done
    model/          config.json and model.safetensors, in the authors' format, once it is done
    done.json       tokens, seconds, the last loss, peak memory, the hashes of weights and settings

Everything that decides the weights is a function of the settings and the step. A run that was killed
continues as if it had not been: bit for bit with the same ranks, within rounding with others. Micro-batch i
of a step goes to rank i mod ranks, so the data do not depend on the number of ranks. Under context
parallelism it goes to a group of ranks, each of which reads its shard of every sequence. DDP and FSDP2 span
all ranks, because the gradient is the mean over micro-batches and shards alike.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from ...common.command import stop_signals
from ...common.files import write_json
from ..paper import Paper
from ..run import Run
from .checkpoint import load_checkpoint
from .distributed import any_rank, check_ranks, context_group, on_rank_zero, parallelize, rank, world_size
from .optimizer import make_optimizer
from .run_folder import (
    TrainingError,
    check_same_text,
    check_unchanged,
    compiles,
    describe,
    is_done,
    lock,
    write_done,
)
from .step import compile_blocks
from .trainer import GOES_ON, Stopped, StopSignals, Trainer


def train(
    paper: Paper,
    run: Run,
    *,
    device: torch.device,
    report: Callable[[str], None] = print,
    stop_after: int | None = None,
    watch_every: int | None = None,
    position: int | None = None,
) -> Path:
    """Trains ``run``, from its newest good checkpoint if there is one, and returns its folder.

    With several ranks (``distributed.process_group``) each of them calls this. Rank 0 alone reports, locks
    and writes. An error is raised on every rank.

    Args:
        report: called with lines for the user.
        stop_after: stop after this many steps in all, with a checkpoint (for tests).
        watch_every: steps between the task's looks at the model, such as the pruned ratio of each layer.
            Default: 100, or fewer in a short run, so that it has 25 looks.
        position: the line of the progress bar, if several runs show theirs.
    """
    folder = run.folder
    if rank():
        report = str  # which prints nothing
    if on_rank_zero(lambda: is_done(run)):
        report(f"{run.name}: already done")
        if run.weights is None:
            # A killed process may have left them.
            on_rank_zero(lambda: shutil.rmtree(folder / "checkpoints", ignore_errors=True))
        return folder
    if run.weights is not None:
        raise TrainingError(
            f"{folder}: the ready weights of {run.name} are missing or changed; fetch them again, or "
            f"train them with `{run.command}`"
        )
    with contextlib.ExitStack() as stack:

        def begin() -> bool:
            stack.enter_context(lock(folder))
            check_unchanged(run)
            return is_done(run)

        if on_rank_zero(begin):  # another process has just finished it
            return folder
        task = paper.load_task()(run)
        check_ranks(run, task.micro_batches, task.context_parallel)
        torch.manual_seed(run.seed)  # the same weights on every rank
        model = task.build().to(device)
        facts = task.describe(model)
        on_rank_zero(lambda: check_same_text(run, facts["data"]))
        if task.context_parallel > 1:
            task.share_sequences(model, context_group(task.context_parallel, device))
        description = describe(run, device, facts)
        on_rank_zero(lambda: write_json(folder / "run.json", description))
        wrapped = parallelize(model, task.blocks(model), run.parallel_mode(world_size()), device)
        if compiles(run, device):
            compile_blocks(task.blocks(model), whole=task.context_parallel == 1)
        optimizer = make_optimizer(model, run.training, task.learning_rate(0), task.rates(model))

        checkpoints = folder / "checkpoints"
        first_step = load_checkpoint(checkpoints, model, optimizer, description, report) or 0
        if first_step:
            report(f"{run.name}: continuing from step {first_step}")
        looks = watch_every or max(1, min(100, task.steps // 25))
        trainer = Trainer(task, model, wrapped, optimizer, device, looks, description, position)
        signals = StopSignals(speak=rank() == 0)
        stack.enter_context(stop_signals(signals.note))
        done = trainer.run_from(first_step, stop_after, signals)
        if done:
            weights = _full_weights(model)

            def finish() -> None:
                # Weights get their name last, because Make takes them as the sign that the run is complete.
                unnamed = folder / ".model"
                unnamed.mkdir(exist_ok=True)
                task.save(model, unnamed, weights)
                # Again, because without it nobody would know the settings of the finished weights.
                write_json(folder / "run.json", description)
                write_done(run, task.step_tokens, unnamed / "model.safetensors")
                shutil.rmtree(folder / "model", ignore_errors=True)
                unnamed.replace(folder / "model")

            on_rank_zero(finish)
            on_rank_zero(lambda: shutil.rmtree(checkpoints, ignore_errors=True))
        if any(any_rank(signals.asked is not None)):  # in the last step, or since
            raise Stopped(f"{run.name} is {'done' if done else 'saved'}; {GOES_ON}")
    return folder


def _full_weights(model: nn.Module) -> dict[str, Tensor] | None:
    """All weights on the CPU of rank 0 if they are sharded; None if they are not."""
    if not isinstance(next(model.parameters()), DTensor):
        return None
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
