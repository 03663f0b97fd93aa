"""The steps of one run on one rank: it launches, reads, logs and saves."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...common.command import progress_bar
from .checkpoint import latest_checkpoint, save_checkpoint
from .distributed import any_rank, rank, world_size
from .optimizer import set_learning_rate
from .prefetch import Prefetcher
from .run_folder import RunLog, TrainingError
from .step import eager, train_step
from .task import Task

GOES_ON = "the same command continues from there"


class Stopped(KeyboardInterrupt):
    """A signal stopped the run, and a checkpoint to continue from is saved; the message says which."""


class StopSignals:
    """Notes signals to stop, as the handler of `stop_signals`. The training loop reads ``asked`` after each
    step.

    A Ctrl-C after any signal stops at once. SIGTERM and SIGHUP may arrive again, also after a Ctrl-C, because
    launchers send them too.

    Args:
        speak: after a Ctrl-C, print what happens now.
    """

    def __init__(self, speak: bool):
        self.asked: signal.Signals | None = None
        self._speak = speak

    def note(self, number: int, _) -> None:
        if self.asked is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self._speak and number == signal.SIGINT and self.asked is None:
            announce_stop()
        self.asked = signal.Signals(number)


def announce_stop() -> None:
    """Prints what a first Ctrl-C does; not by print, because a signal may interrupt a write to the stream."""
    os.write(2, b"\nstopping: a checkpoint is saved after this step; Ctrl-C again stops at once\n")


class Trainer:
    """The steps of one run on this rank.

    On a GPU the host launches a step before it reads the loss of the step before, so the GPU never waits for
    the host. All losses are read before a checkpoint, so none is written after a NaN.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        wrapped: nn.Module,
        optimizer: torch.optim.AdamW,
        device: torch.device,
        watch_every: int,
        description: dict[str, Any],
        position: int | None = None,
    ):
        self.task, self.run, self.config, self.device = task, task.run, task.run.training, device
        self.model, self.wrapped, self.optimizer = model, wrapped, optimizer
        self.watch_every, self.description, self.position = watch_every, description, position
        # (record, loss and norm, when they will be ready) of the steps that are launched but not yet read
        self.unread: list[tuple[dict[str, Any], Tensor, _Moment]] = []
        self.watched: dict[str, Any] = {}
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)  # drops those of earlier runs

    def run_from(self, first: int, stop_after: int | None, signals: StopSignals) -> bool:
        """Steps from ``first`` to the end, or to a signal on any rank; False if ``stop_after`` came first."""
        steps = self.task.steps
        last = steps if stop_after is None else min(steps, stop_after)
        with contextlib.ExitStack() as stack:
            self.log = stack.enter_context(RunLog(self.run.folder, first)) if rank() == 0 else None
            indices = (i for step in range(first, last) for i in self._micro_batches_of(step))
            self.data = stack.enter_context(Prefetcher(self.task.batch, indices, self.device))
            self.progress = stack.enter_context(
                progress_bar(
                    total=steps * self.task.step_tokens,
                    initial=first * self.task.step_tokens,
                    desc=self.run.name,
                    unit="tok",
                    unit_scale=True,
                    dynamic_ncols=True,
                    disable=rank() > 0,
                    position=self.position,
                )
            )
            saved_at = time.monotonic()
            self._restart_clock()
            for step in range(first, last):
                watch = step == first or step % self.watch_every == 0
                self._step(step, watch)
                due = rank() == 0 and time.monotonic() - saved_at >= self.config.checkpoint_every_seconds
                stop, due = any_rank(signals.asked is not None, due)
                if step + 1 < last and (stop or due):
                    path = self._save(step + 1)
                    saved_at = time.monotonic()
                    if stop:
                        raise Stopped(f"saved step {step + 1} of {steps} in {path}; {GOES_ON}")
            self._read(0)
            if last < steps:  # the last step's checkpoint is the model itself
                self._save(last)
        return last == steps

    def _micro_batches_of(self, step: int) -> Iterator[int]:
        start, sharing = step * self.task.micro_batches, self.task.context_parallel
        end = start + self.task.micro_batches
        return iter(range(start + rank() // sharing, end, world_size() // sharing))

    def _step(self, step: int, watch: bool) -> None:
        """Launches one step, and reads the losses that are due."""
        learning_rate = self.task.learning_rate(step)
        set_learning_rate(self.optimizer, learning_rate)
        self.task.before_step(self.model, step)
        batches = self._watched(self.data) if watch else self.data
        waited = self.data.waited_seconds
        loss, norm = train_step(
            self.wrapped,
            self.optimizer,
            self.task.loss,
            batches,
            self.task.micro_batches * self.task.context_parallel // world_size(),
            max_grad_norm=self.config.max_grad_norm,
            dtype=self.config.dtype,
        )
        self.task.after_step(self.model, step)
        record = {
            "step": step,
            "tokens": (step + 1) * self.task.step_tokens,
            "learning_rate": learning_rate,
            "ranks": world_size(),
            "data_wait_seconds": self.data.waited_seconds - waited,
            **(self.watched if watch else {}),
        }
        numbers = torch.stack([loss, norm]).to("cpu", non_blocking=True)
        self.unread.append((record, numbers, _Moment(self.device)))
        self._read(1 if self.device.type == "cuda" else 0)

    def _watched(self, batches: Iterator) -> Iterator:
        """``batches``, after the task's look at the first one."""
        self._read(0)
        batch = next(batches)
        with eager(self.device, self.config.dtype), torch.no_grad():
            # Without DDP, because gradients are not needed here.
            self.watched = self.task.watch(getattr(self.wrapped, "module", self.wrapped), *batch)
        self._restart_clock()
        return itertools.chain([batch], batches)

    def _read(self, keep: int) -> None:
        """Reads and logs all but the newest ``keep`` of the steps launched."""
        while len(self.unread) > keep:
            record, numbers, ready = self.unread.pop(0)
            ready.wait()
            loss, norm = numbers.tolist()
            if not (math.isfinite(loss) and math.isfinite(norm)):
                last = latest_checkpoint(self.run.folder / "checkpoints")
                raise TrainingError(
                    f"{self.run.name}: step {record['step']} gave loss {loss} and gradient norm {norm}; "
                    f"the last good checkpoint is {last}"
                )
            seconds = ready.seconds_since(self.before)
            self.before = ready
            wait = min(record.pop("data_wait_seconds") / seconds, 1.0)
            record |= {"loss_nats": loss, "grad_norm": norm, "data_wait_share": wait}
            rate = self.task.step_tokens / seconds
            record["throughput_tokens_per_s"] = rate
            if self.device.type == "cuda":
                record["peak_memory_bytes"] = torch.cuda.max_memory_allocated(self.device)
            self._write(record | self.task.speed(rate, self.device, world_size(), self.watched))

    def _write(self, record: dict[str, Any]) -> None:
        if self.log is None:
            return
        self.log.write(record)
        shown = f"loss {record['loss_nats']:.3f}, {record['throughput_tokens_per_s']:,.0f} tok/s"
        if "mfu_nominal" in record:
            shown += f", mfu {record['mfu_nominal']:.0%}"
        if words := self.task.shown(self.watched):
            shown += f", {words}"
        self.progress.set_postfix_str(shown, refresh=False)
        self.progress.update(self.task.step_tokens)

    def _save(self, steps_done: int) -> Path:
        self._read(0)
        path = save_checkpoint(
            self.run.folder / "checkpoints", steps_done, self.model, self.optimizer, self.description
        )
        self._restart_clock()
        return path

    def _restart_clock(self) -> None:
        """Restarts the clock, so that time outside of training counts for no step."""
        self.before = _Moment(self.device)


class _Moment:
    """The time at which the device has done all that was launched until now."""

    def __init__(self, device: torch.device):
        self.event = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record(torch.cuda.current_stream(device))
        self.at = time.monotonic()

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def seconds_since(self, earlier: _Moment) -> float:
        """Seconds on the device's own clock, so it does not matter when the host reads it."""
        if self.event is None:
            return self.at - earlier.at
        return earlier.event.elapsed_time(self.event) / 1e3
