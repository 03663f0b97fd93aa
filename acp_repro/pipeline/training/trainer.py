"""Trains one run of a suite; :func:`train` reads top to bottom, from the run's folder to its trained weights.

The weights depend only on the settings and the step. A run that was killed resumes without a difference:
bitwise identical with the same ranks, equal within rounding with others. Micro-batch i of a step is assigned
to rank i mod ranks, so the data do not depend on the number of ranks. Under context parallelism it is
assigned to a group of ranks, each of which reads its shard of every sequence. DDP and FSDP2 span all ranks,
because the gradient is the mean over both micro-batches and shards.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...common.command import progress_bar, stop_signals
from ..paper import Paper
from ..run import Run, TrainerConfig
from .distributed import (
    any_rank,
    check_ranks,
    context_group,
    gradient_sync,
    mean_over_ranks,
    parallelize,
    rank,
    world_size,
)
from .prefetch import Prefetcher
from .run_folder import RunFolder, TrainingError, compiles, latest_checkpoint
from .task import Task

GOES_ON = "the same command continues from there"


class Stopped(KeyboardInterrupt):
    """A signal stopped the run after a checkpoint was saved; the message names the checkpoint."""


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
    """Trains ``run``, from its newest intact checkpoint if there is one, and returns its folder.

    With several ranks (``distributed.process_group``) every rank calls this function, and errors are raised
    on every rank.

    Args:
        report: a function that rank 0 calls with lines for the user.
        stop_after: total number of steps after which to stop with a checkpoint (for tests).
        watch_every: steps between calls of `Task.watch`, which logs, for example, the pruned ratio of each
            layer. Default: 100, or fewer in a short run, which then has 25 calls.
        position: the line of the progress bar, if several runs have one.
    """
    folder = RunFolder(run, report)
    with contextlib.ExitStack() as stack:
        if folder.is_done() or not folder.begin(stack):
            return folder.path
        task = paper.load_task()(run)
        check_ranks(run, task.micro_batches, task.context_parallel)
        torch.manual_seed(run.seed)  # the same weights on every rank
        model = task.build().to(device)
        folder.describe(device, task.describe(model))
        if task.context_parallel > 1:
            task.share_sequences(model, context_group(task.context_parallel, device))
        blocks = task.blocks(model)
        wrapped = parallelize(model, blocks, run.parallel_mode(world_size()), device)
        stack.enter_context(compiled_blocks(blocks, compiles(run, device), whole=task.whole_graphs))
        optimizer = make_optimizer(model, run.training, task.learning_rate(0), task.rates(model))
        signals = StopSignals(speak=rank() == 0)
        stack.enter_context(stop_signals(signals.note))

        first = folder.load_checkpoint(model, optimizer)
        last = task.steps if stop_after is None else min(task.steps, stop_after)
        watch_every = watch_every or max(1, min(100, task.steps // 25))
        groups = world_size() // task.context_parallel
        micro_batches = range(rank() // task.context_parallel, task.micro_batches, groups)
        order = (step * task.micro_batches + i for step in range(first, last) for i in micro_batches)
        write = stack.enter_context(folder.open_log(first))
        log = stack.enter_context(StepLog(task, write, device, first, position))
        with Prefetcher(task.batch, order, device) as data:
            saved_at = time.monotonic()
            for step in range(first, last):
                learning_rate = task.learning_rate(step)
                set_learning_rate(optimizer, learning_rate)
                task.before_step(model, step)
                batches: Iterator[tuple[Tensor, ...]] = data
                watched = None
                if step == first or step % watch_every == 0:
                    log.read_all()
                    batch = next(data)
                    batches = itertools.chain([batch], data)
                    with eager(device, run.training.dtype), torch.no_grad():
                        # Without the DDP wrapper, because no gradients are computed.
                        watched = task.watch(getattr(wrapped, "module", wrapped), *batch)
                    log.restart_clock()
                waited = data.waited_seconds
                loss, norm = train_step(
                    wrapped,
                    optimizer,
                    task.loss,
                    batches,
                    len(micro_batches),
                    max_grad_norm=run.training.max_grad_norm,
                    dtype=run.training.dtype,
                )
                task.after_step(model, step)
                log.launched(step, loss, norm, learning_rate, data.waited_seconds - waited, watched)

                due = rank() == 0 and time.monotonic() - saved_at >= run.training.checkpoint_every_seconds
                stop, due = any_rank(signals.asked is not None, due)
                if step + 1 < task.steps and (stop or due or step + 1 == last):
                    log.read_all()
                    path = folder.save_checkpoint(step + 1, model, optimizer)
                    saved_at = time.monotonic()
                    log.restart_clock()
                    if stop:
                        raise Stopped(f"saved step {step + 1} of {task.steps} in {path}; {GOES_ON}")
            log.read_all()
        if last == task.steps:
            folder.finish(model, task.save, task.step_tokens)
        if any(any_rank(signals.asked is not None)):  # a signal during or after the last step
            raise Stopped(f"{run.name} is done; {GOES_ON}")
    return folder.path


# --- one optimiser step -------------------------------------------------------------------------------------


def train_step(
    model: nn.Module,
    optimizer: torch.optim.AdamW,
    loss_of: Callable[..., Tensor],
    batches: Iterator[tuple[Tensor, ...]],
    num_batches: int,
    *,
    max_grad_norm: float,
    dtype: str,
) -> tuple[Tensor, Tensor]:
    """One optimiser step over ``num_batches`` micro-batches of equal size on each rank.

    Args:
        model: the model, or its wrapper from ``distributed.parallelize``.
        loss_of: ``loss_of(model, *batch)`` is the mean loss of a batch; see ``Task.loss``.
        batches: an iterator over this rank's batches of tensors.
        max_grad_norm: gradients with a larger norm are clipped to it.
        dtype: ``bfloat16`` (autocast over float32 weights) or ``float32``.

    Returns:
        The mean loss in nats and the gradient norm before clipping, over all ranks, as float32 scalars on the
        device, because reading them would synchronise the host.
    """
    optimizer.zero_grad(set_to_none=True)
    total = accumulate_gradients(model, loss_of, batches, num_batches, dtype=dtype)
    return total, update(model, optimizer, max_grad_norm)


def accumulate_gradients(
    model: nn.Module,
    loss_of: Callable[..., Tensor],
    batches: Iterator[tuple[Tensor, ...]],
    num_batches: int,
    *,
    dtype: str,
) -> Tensor:
    """The first half of :func:`train_step`: accumulates the gradients of the mean loss and returns this loss,
    a float32 scalar."""
    device = next(model.parameters()).device
    total = torch.zeros((), device=device)
    for index in range(num_batches):
        batch = [x.to(device, non_blocking=True) for x in next(batches)]
        with gradient_sync(model, index == num_batches - 1):
            with autocast(device, dtype):
                loss = loss_of(model, *batch) / num_batches
            loss.backward()
        total += loss.detach()
    return mean_over_ranks(total)


def update(model: nn.Module, optimizer: torch.optim.AdamW, max_grad_norm: float) -> Tensor:
    """The second half of :func:`train_step`: clips the gradients and updates the weights.

    Returns:
        The gradient norm before clipping, a float32 scalar.
    """
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    optimizer.step()
    return norm


def make_optimizer(
    model: nn.Module, config: TrainerConfig, learning_rate: float, rates: Mapping[Tensor, float] | None = None
) -> torch.optim.AdamW:
    """A fused AdamW. Weight decay applies to matrices only, not to norms and biases.

    Args:
        rates: maps weights, of any shape and dtype, to multipliers of their learning rate.
    """
    rates = rates or {}
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for parameter in model.parameters():
        decay = config.weight_decay if parameter.dim() >= 2 else 0.0
        groups.setdefault((decay, rates.get(parameter, 1.0)), []).append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": group, "weight_decay": decay, "rate": rate} for (decay, rate), group in groups.items()],
        betas=(config.beta1, config.beta2),
        fused=True,
    )
    set_learning_rate(optimizer, learning_rate)
    return optimizer


def set_learning_rate(optimizer: torch.optim.AdamW, learning_rate: float) -> None:
    """Sets the learning rate of all weights, multiplied by the ``rate`` of each group."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["rate"]


def warmup_and_cosine(before: int, step: int, warmup: int, total: int) -> float:
    """The fraction of the peak learning rate (Appendix B). All arguments have one unit, such as tokens.

    The schedule is linear from 0 over ``warmup``, then a cosine to 0 at ``total``. The warm-up includes the
    step's own tokens, so that the first step changes the weights.

    Args:
        before: tokens before the step.
        step: tokens of the step.
    """
    if before + step <= warmup:
        return (before + step) / warmup
    done = min((before - warmup) / max(total - warmup, 1), 1.0)
    return 0.5 * (1.0 + math.cos(math.pi * max(done, 0.0)))


def autocast(device: torch.device, dtype: str):
    """A context with bfloat16 autocast over float32 weights; it has no effect for float32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == "bfloat16")


@contextlib.contextmanager
def eager(device: torch.device, dtype: str) -> Iterator[None]:
    """A context in which torch.compile is disabled and autocast for ``dtype`` is enabled."""
    with torch.compiler.set_stance("force_eager"), autocast(device, dtype):
        yield


@contextlib.contextmanager
def compiled_blocks(
    blocks: Sequence[nn.Module], enabled: bool, *, whole: bool = True, backend: str = "inductor"
) -> Iterator[None]:
    """A context in which, if ``enabled``, each block's forward is compiled: to one graph that all blocks
    share or, without ``whole``, to several graphs, if a block calls a function that cannot be traced.

    The names of weights do not change. Only ``forward`` is compiled, so FSDP2's hooks and gradient
    checkpointing are outside the graph. Graphs of other models are dropped, because torch.compile caches only
    a few graphs per function.
    """
    if enabled:
        torch.compiler.reset()
        for block in blocks:
            block.forward = torch.compile(block.forward, fullgraph=whole, dynamic=False, backend=backend)
    try:
        yield
    finally:
        for block in blocks:
            block.__dict__.pop("forward", None)


# --- log and signals ----------------------------------------------------------------------------------------


class StepLog(contextlib.AbstractContextManager):
    """Reads the losses of launched steps, checks that they are finite, and writes them to the run's folder.

    On a GPU the host launches a step before it reads the previous step's loss, so the GPU never waits for the
    host. All losses are read before a checkpoint is written, so no checkpoint follows a NaN.
    """

    def __init__(
        self,
        task: Task,
        write: Callable[[dict[str, Any]], None],
        device: torch.device,
        first: int,
        position: int | None,
    ):
        self.task, self.write, self.device = task, write, device
        self.progress = progress_bar(
            total=task.steps * task.step_tokens,
            initial=first * task.step_tokens,
            desc=task.run.name,
            unit="tok",
            unit_scale=True,
            dynamic_ncols=True,
            disable=rank() > 0,
            position=position,
        )
        # (record, loss and norm, the moment they are ready) of steps that are launched but not yet read
        self.unread: list[tuple[dict[str, Any], Tensor, _Moment]] = []
        self.watched: dict[str, Any] = {}
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)  # discards the peak of earlier runs
        self.restart_clock()

    def __exit__(self, *_) -> None:
        self.progress.close()

    def launched(
        self,
        step: int,
        loss: Tensor,
        norm: Tensor,
        learning_rate: float,
        waited_seconds: float,
        watched: dict[str, Any] | None,
    ) -> None:
        """Adds a launched step, and reads the steps that are due."""
        if watched is not None:
            self.watched = watched
        record = {
            "step": step,
            "tokens": (step + 1) * self.task.step_tokens,
            "learning_rate": learning_rate,
            "ranks": world_size(),
            "data_wait_seconds": waited_seconds,
            **(watched or {}),
        }
        numbers = torch.stack([loss, norm]).to("cpu", non_blocking=True)
        self.unread.append((record, numbers, _Moment(self.device)))
        self._read(1 if self.device.type == "cuda" else 0)

    def read_all(self) -> None:
        """Reads all launched steps."""
        self._read(0)

    def restart_clock(self) -> None:
        """Restarts the clock, so that no step includes time outside of training."""
        self.before = _Moment(self.device)

    def _read(self, keep: int) -> None:
        """Reads and logs all launched steps except the newest ``keep``."""
        while len(self.unread) > keep:
            record, numbers, ready = self.unread.pop(0)
            ready.wait()
            loss, norm = numbers.tolist()
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise TrainingError(
                    f"{self.task.run.name}: step {record['step']} gave loss {loss} and gradient norm {norm}; "
                    f"the last good checkpoint is {latest_checkpoint(self.task.run)}"
                )
            seconds = ready.seconds_since(self.before)
            self.before = ready
            wait = min(record.pop("data_wait_seconds") / seconds, 1.0)
            rate = self.task.step_tokens / seconds
            record |= {"loss_nats": loss, "grad_norm": norm, "data_wait_share": wait}
            record["throughput_tokens_per_s"] = rate
            if self.device.type == "cuda":
                record["peak_memory_bytes"] = torch.cuda.max_memory_allocated(self.device)
            record |= self.task.speed(rate, self.device, world_size(), self.watched)
            self.write(record)
            self._show(record)

    def _show(self, record: dict[str, Any]) -> None:
        shown = f"loss {record['loss_nats']:.3f}, {record['throughput_tokens_per_s']:,.0f} tok/s"
        if "mfu_nominal" in record:
            shown += f", mfu {record['mfu_nominal']:.0%}"
        if words := self.task.shown(self.watched):
            shown += f", {words}"
        self.progress.set_postfix_str(shown, refresh=False)
        self.progress.update(self.task.step_tokens)


class _Moment:
    """The time at which the device finishes all work launched so far."""

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
        """Seconds since ``earlier`` on the device's own clock, independent of when the host reads it."""
        if self.event is None:
            return self.at - earlier.at
        return earlier.event.elapsed_time(self.event) / 1e3


class StopSignals:
    """Records stop signals, as the handler of `stop_signals`. :func:`train` reads ``asked`` after each step.

    Ctrl-C after any signal stops at once. Repeated SIGTERM and SIGHUP have no effect, also after Ctrl-C,
    because launchers send them too.

    Args:
        speak: print a message after the first Ctrl-C.
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
    """Reports the first Ctrl-C; writes to the descriptor, because a signal may interrupt a buffered write."""
    os.write(2, b"\nstopping: a checkpoint is saved after this step; Ctrl-C again stops at once\n")
