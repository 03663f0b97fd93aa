"""The training loop: one run of a suite, from its folder's state to its trained weights.

A run folder explains itself::

    run.json        what was run: the resolved settings, the data, ranks, versions and commit
    metrics.jsonl   one line a step
    checkpoints/    the newest two, until the run is done
    model/          config.json and model.safetensors, in the authors' format, once it is done
    done.json       tokens, seconds, the last loss, peak memory, the hash of the weights

Everything that decides the weights is a function of the settings and the step. A run that was killed
goes on as if it had not been: bit for bit with the same ranks, within rounding with others. Micro-batch
i of a step goes to rank i mod ranks, so the data do not depend on the number of ranks.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from ..data import prepare
from ..model import FoXForCausalLM, save_pretrained
from ..suite import Run
from .checkpoint import load_checkpoint
from .distributed import check_ranks, on_rank_zero, parallelize, rank, world_size
from .optimizer import make_optimizer
from .run_folder import (
    TrainingError,
    check_same_text,
    check_unchanged,
    compiles,
    is_done,
    lock,
    write_description,
    write_done,
)
from .step import autocast, compile_blocks, train_step
from .trainer import Trainer, num_steps

__all__ = ["TrainingError", "autocast", "compile_blocks", "is_done", "num_steps", "train", "train_step"]


def train(
    run: Run,
    *,
    device: torch.device,
    report: Callable[[str], None] = print,
    stop_after: int | None = None,
    watch_every: int = 100,
    tensorboard: bool = False,
) -> Path:
    """Trains ``run``, from its newest good checkpoint if there is one, and returns its folder.

    With several ranks (``distributed.process_group``) each of them calls this; rank 0 alone reports,
    locks and writes, and an error is raised on every rank.

    Args:
        report: takes lines for the person who waits.
        stop_after: leave after this many steps in all, with a checkpoint (for tests).
        watch_every: steps between looks at the pruned ratio of each layer.
        tensorboard: write the metrics for TensorBoard too.

    Raises:
        TrainingError: settings changed since the folder was begun, another process trains the same
            run, or the loss is no longer finite.
        DistributedError: the ranks cannot share a step equally.
        CheckpointError: a checkpoint could not be written, or none is intact.
    """
    folder = run.folder
    if rank():
        report = _silent
    if on_rank_zero(lambda: is_done(run)):
        report(f"{run.name}: done already")
        if run.weights is None:  # a kill may have left them
            on_rank_zero(lambda: shutil.rmtree(folder / "checkpoints", ignore_errors=True))
        return folder
    if run.weights is not None:
        raise TrainingError(
            f"{folder}: the ready weights of {run.name} are missing or changed; fetch them again, or "
            f"train them with `{run.command}`"
        )
    check_ranks(run)
    with contextlib.ExitStack() as stack:

        def begin() -> None:
            stack.enter_context(lock(folder))
            check_unchanged(run)

        on_rank_zero(begin)
        corpus = prepare(run.data)
        sequences = corpus.sequences("train", run.context_length, run.seed)
        torch.manual_seed(run.seed)  # the same weights on every rank
        model = FoXForCausalLM(run.model_config(corpus.vocab_size), run.training.gradient_checkpointing).to(
            device
        )
        data = corpus.describe(run.context_length)
        on_rank_zero(lambda: check_same_text(run, data))
        on_rank_zero(lambda: write_description(run, model, device, data))
        wrapped = parallelize(model, run.parallel_mode(world_size()), device)
        if compiles(run, device):
            compile_blocks(model)
        optimizer = make_optimizer(model, run.training, run.size.learning_rate)

        checkpoints = folder / "checkpoints"
        first_step = load_checkpoint(checkpoints, model, optimizer, report) or 0
        if first_step:
            report(f"{run.name}: going on from step {first_step}")
        trainer = Trainer(run, model, wrapped, optimizer, sequences, device, watch_every)
        if trainer.run_from(first_step, stop_after, tensorboard):
            weights = _full_weights(model)

            def finish() -> None:
                # Weights get their name last: Make takes them as the sign that all is there.
                unnamed = folder / ".model"
                save_pretrained(model, unnamed, weights)
                corpus.save_tokenizer(unnamed)
                write_done(run, unnamed / "model.safetensors")
                shutil.rmtree(folder / "model", ignore_errors=True)
                unnamed.replace(folder / "model")

            on_rank_zero(finish)
            on_rank_zero(lambda: shutil.rmtree(checkpoints, ignore_errors=True))
    return folder


def _full_weights(model: FoXForCausalLM) -> dict[str, Tensor] | None:
    """All weights on the CPU of rank 0, where they are sharded; None where they are whole."""
    if not isinstance(next(model.parameters()), DTensor):
        return None
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def _silent(_: str) -> None:
    pass
