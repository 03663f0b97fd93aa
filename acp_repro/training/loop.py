"""The training loop: one run of a suite, from its folder's state to its trained weights.

A run folder explains itself::

    run.json        what was run: the resolved settings, the data, versions and commit
    metrics.jsonl   one line a step
    checkpoints/    the newest two, until the run is done
    model/          config.json and model.safetensors, in the authors' format, once it is done
    done.json       tokens, seconds, the last loss, the hash of the weights

Everything that decides the weights is a function of the settings and the step, so a run that was
killed goes on bit for bit as if it had not been.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from ..data import prepare
from ..model import FoXForCausalLM, save_pretrained
from ..records import _version, commit, processor_name
from ..suite import Run
from .checkpoint import (
    load_checkpoint,
    restore_training_state,
    save_checkpoint,
    sha256_of,
    training_state,
)
from .optimizer import learning_rate_factor, make_optimizer


class TrainingError(RuntimeError):
    """The run cannot go on; the message says why and what to do."""


def train(
    run: Run,
    *,
    device: torch.device,
    report: Callable[[str], None] = print,
    stop_after: int | None = None,
) -> Path:
    """Trains ``run``, from its newest good checkpoint if there is one, and returns its folder.

    Args:
        report: takes lines for the person who waits.
        stop_after: leave after this many steps in all, with a checkpoint (for tests).

    Raises:
        TrainingError: settings changed since the folder was begun, another process trains the same
            run, or the loss is no longer finite.
        CheckpointError: a checkpoint could not be written, or none is intact.
    """
    folder = run.folder
    if is_done(run):
        report(f"{run.name}: done already")
        os.utime(folder / "model" / "model.safetensors")  # newer than the suite's file, for Make
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder):
        _check_unchanged(run, folder)
        corpus = prepare(run.data)
        sequences = corpus.sequences("train", run.context_length, run.seed)
        torch.manual_seed(run.seed)
        model = FoXForCausalLM(
            run.model_config(corpus.vocab_size), run.training.gradient_checkpointing
        ).to(device)
        optimizer = make_optimizer(model, run.training, run.size.learning_rate)
        _write_json(folder / "run.json", {**_description(run, model, device),
                                          "data": corpus.describe(run.context_length)})  # fmt: skip

        first_step, checkpoints = 0, folder / "checkpoints"
        loaded = load_checkpoint(checkpoints, report)
        if loaded is not None:
            first_step, state = loaded
            restore_training_state(model, optimizer, state)
            report(f"{run.name}: going on from step {first_step}")
        _truncate_metrics(folder / "metrics.jsonl", first_step)
        finished = _run_steps(run, model, optimizer, sequences, first_step, stop_after)
        if finished:
            save_pretrained(model, folder / "model")
            _write_json(folder / "done.json", _summary(run, folder))
            for path in checkpoints.glob("*"):
                path.unlink()
            if checkpoints.exists():
                checkpoints.rmdir()
    return folder


def num_steps(run: Run) -> int:
    return math.ceil(run.size.tokens / run.training.batch_tokens)


def is_done(run: Run) -> bool:
    """Whether the folder holds the weights of these very settings, complete."""
    try:
        done = json.loads((run.folder / "done.json").read_text())
        settings = json.loads((run.folder / "run.json").read_text())["settings"]
    except (OSError, ValueError, KeyError):
        return False
    weights = run.folder / "model" / "model.safetensors"
    return (
        settings == _as_json(run.as_dict())
        and weights.is_file()
        and sha256_of(weights) == done.get("sha256")
    )


def train_step(
    model: FoXForCausalLM,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[tuple[torch.Tensor, torch.Tensor]],
    num_batches: int,
    *,
    max_grad_norm: float,
    dtype: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One optimiser step over ``num_batches`` micro-batches of equal size.

    Returns:
        Mean loss in nats and the gradient's norm before clipping, as tensors: reading them would make
        the host wait.
    """
    device = next(model.parameters()).device
    optimizer.zero_grad(set_to_none=True)
    total = torch.zeros((), device=device)
    for _ in range(num_batches):
        input_ids, labels = (x.to(device, non_blocking=True) for x in next(batches))
        with autocast(device, dtype):
            loss = model.loss_per_token(input_ids, labels).mean() / num_batches
        loss.backward()
        total += loss.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    return total, norm


def autocast(device: torch.device, dtype: str):
    """bfloat16 autocast over float32 weights, or nothing for float32."""
    enabled = dtype == "bfloat16"
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)


def _run_steps(run: Run, model, optimizer, sequences, first_step: int, stop_after) -> bool:
    """Steps from ``first_step`` to the end; False if ``stop_after`` came first."""
    config, steps = run.training, num_steps(run)
    last = steps if stop_after is None else min(steps, stop_after)
    micro_batches = config.batch_tokens // config.micro_batch_tokens
    rows = config.micro_batch_tokens // run.context_length
    checkpoints = run.folder / "checkpoints"
    saved_at = time.monotonic()
    progress = tqdm(
        total=run.size.tokens, initial=first_step * config.batch_tokens, desc=run.name,
        unit="tok", unit_scale=True, dynamic_ncols=True,
    )  # fmt: skip
    with progress, (run.folder / "metrics.jsonl").open("a") as metrics:
        for step in range(first_step, last):
            started = time.monotonic()
            factor = learning_rate_factor(step * config.batch_tokens, run.size.tokens, config)
            for group in optimizer.param_groups:
                group["lr"] = run.size.learning_rate * factor
            batches = (
                sequences.batch(step * micro_batches + i, rows) for i in range(micro_batches)
            )
            loss, norm = (
                x.item()
                for x in train_step(
                    model, optimizer, batches, micro_batches,
                    max_grad_norm=config.max_grad_norm, dtype=config.dtype,
                )
            )  # fmt: skip
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise TrainingError(_not_finite(run, step, loss, norm, model))
            seconds = time.monotonic() - started
            record = {
                "step": step,
                "tokens": (step + 1) * config.batch_tokens,
                "loss_nats": loss,
                "grad_norm": norm,
                "learning_rate": run.size.learning_rate * factor,
                "throughput_tokens_per_s": config.batch_tokens / seconds,
            }
            metrics.write(json.dumps(record) + "\n")
            metrics.flush()
            progress.update(config.batch_tokens)
            progress.set_postfix_str(f"loss {loss:.3f}", refresh=False)
            # The last step's checkpoint is the model itself.
            due = time.monotonic() - saved_at >= config.checkpoint_every_seconds
            if (due and step + 1 < steps) or (step + 1 == last < steps):
                save_checkpoint(checkpoints, step + 1, training_state(model, optimizer))
                saved_at = time.monotonic()
    return last == steps


def _not_finite(run: Run, step: int, loss: float, norm: float, model: nn.Module) -> str:
    bad = [
        name
        for name, p in model.named_parameters()
        if p.grad is not None and not p.grad.isfinite().all()
    ]
    where = f"; first gradients that are not finite: {', '.join(bad[:3])}" if bad else ""
    return (
        f"{run.name}: step {step} gave loss {loss} and gradient norm {norm}{where}. "
        f"Checkpoints before it are in {run.folder / 'checkpoints'}"
    )


def _description(run: Run, model: FoXForCausalLM, device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
    return {
        "settings": run.as_dict(),
        "command": f"python -m acp_repro.train --suite {run.suite} --run {run.name}",
        "parameters": model.config.num_parameters(),
        "device": name,
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "triton": _version("triton"), "commit": commit()},
    }


def _check_unchanged(run: Run, folder: Path) -> None:
    """Refuses to go on, or to overwrite, what was begun with other settings."""
    try:
        before = json.loads((folder / "run.json").read_text())["settings"]
    except (OSError, ValueError, KeyError):
        return
    differences = _differences(before, _as_json(run.as_dict()))
    if differences:
        raise TrainingError(
            f"{folder} was begun with other settings: {'; '.join(differences)}. Put them back, or "
            f"delete it to train anew: rm -r {folder}"
        )


def _differences(before: Any, now: Any, where: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            line
            for key in sorted(set(before) | set(now))
            for line in _differences(before.get(key), now.get(key), f"{where}.{key}".lstrip("."))
        ]
    return [] if before == now else [f"{where}: {before!r}, now {now!r}"]


def _summary(run: Run, folder: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = sum(run.training.batch_tokens / x["throughput_tokens_per_s"] for x in lines)
    tail = [x["loss_nats"] for x in lines[-max(1, len(lines) // 20) :]]
    return {
        "tokens": lines[-1]["tokens"],
        "seconds": round(seconds, 3),
        "loss_nats_last_20th": sum(tail) / len(tail),
        "sha256": sha256_of(folder / "model" / "model.safetensors"),
    }


def _truncate_metrics(path: Path, step: int) -> None:
    """Drops lines of steps that will be run again, and a last line cut short by a kill."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):
            if json.loads(line)["step"] < step:
                kept.append(line + "\n")
    temporary = path.with_name(f".{path.name}")
    temporary.write_text("".join(kept))
    temporary.replace(path)


def _as_json(value: Any) -> Any:
    """``value`` as it comes back from a JSON file, so that both compare."""
    return json.loads(json.dumps(value))


def _write_json(path: Path, value: Any) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    temporary.replace(path)


@contextlib.contextmanager
def _lock(folder: Path):
    """One process a run; the lock goes with the process, however it ends."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise TrainingError(f"{folder}: another process is training this run") from None
        yield
