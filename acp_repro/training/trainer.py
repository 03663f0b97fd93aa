"""The steps of one run on one rank: launching, reading, logging, saving."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..data import TokenSequences
from ..model import FoXForCausalLM
from ..model.flops import peak_flops, training_flops_per_token
from ..suite import Run
from .checkpoint import latest_checkpoint, save_checkpoint
from .distributed import gather, on_rank_zero, rank, world_size
from .optimizer import learning_rate_factor
from .prefetch import Prefetcher
from .run_folder import TrainingError, device_name
from .step import train_step
from .watch import RunLog, first_non_finite, pruned_ratio_per_layer


def num_steps(run: Run) -> int:
    """Optimiser steps of the whole run; the last one may go past its tokens."""
    return math.ceil(run.size.tokens / run.training.batch_tokens)


class Trainer:
    """The steps of one run on this rank.

    On a GPU the host launches a step before it reads the loss of the one before, so the GPU never waits
    for the host. What is still unread is read before a checkpoint, so none is written after a NaN.
    """

    def __init__(
        self,
        run: Run,
        model: FoXForCausalLM,
        wrapped: nn.Module,
        optimizer: torch.optim.AdamW,
        sequences: TokenSequences,
        device: torch.device,
        watch_every: int,
    ):
        config = run.training
        self.run, self.config, self.device = run, config, device
        self.model, self.wrapped, self.optimizer = model, wrapped, optimizer
        self.watch_every = watch_every
        self.micro_batches = config.batch_tokens // config.micro_batch_tokens
        rows = config.micro_batch_tokens // run.context_length
        self.load = lambda index: sequences.batch(index, rows)
        # (record, loss and norm, when they will be ready) of the steps launched and not yet read
        self.unread: list[tuple[dict[str, Any], Tensor, _Moment]] = []
        self.pruned: list[float] = []
        self.peak_flops = peak_flops(device_name(device), config.dtype)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)  # of runs before this one

    def run_from(self, first: int, stop_after: int | None, tensorboard: bool) -> bool:
        """Steps from ``first`` to the end; False if ``stop_after`` came first."""
        steps = num_steps(self.run)
        last = steps if stop_after is None else min(steps, stop_after)
        self.log: RunLog | None = None
        with contextlib.ExitStack() as stack:

            def open_log() -> None:
                try:
                    log = RunLog(self.run.folder, first, tensorboard=tensorboard)
                except RuntimeError as error:
                    raise TrainingError(str(error)) from None
                self.log = stack.enter_context(log)

            on_rank_zero(open_log)
            indices = (i for step in range(first, last) for i in self._micro_batches_of(step))
            self.data = stack.enter_context(Prefetcher(self.load, indices, self.device))
            self.progress = stack.enter_context(
                tqdm(
                    total=self.run.size.tokens,
                    initial=first * self.config.batch_tokens,
                    desc=self.run.name,
                    unit="tok",
                    unit_scale=True,
                    dynamic_ncols=True,
                    disable=rank() > 0,
                )
            )
            saved_at = time.monotonic()
            self._restart_clock()
            for step in range(first, last):
                watch = step == first or step % self.watch_every == 0
                self._step(step, watch and self.run.log_pruning_tolerance is not None)
                due = time.monotonic() - saved_at >= self.config.checkpoint_every_seconds
                if step + 1 < last and on_rank_zero(lambda due=due: due):
                    self._save(step + 1)
                    saved_at = time.monotonic()
            self._read(0)
            if last < steps:  # the last step's checkpoint is the model itself
                self._save(last)
        return last == steps

    def _micro_batches_of(self, step: int) -> Iterator[int]:
        start = step * self.micro_batches
        return iter(range(start + rank(), start + self.micro_batches, world_size()))

    def _step(self, step: int, watch: bool) -> None:
        """Launches one step, and reads what is due."""
        factor = learning_rate_factor(step * self.config.batch_tokens, self.run.size.tokens, self.config)
        for group in self.optimizer.param_groups:
            group["lr"] = self.run.size.learning_rate * factor
        try:
            batches = self._watched(self.data) if watch else self.data
            waited = self.data.waited_seconds
            loss, norm = train_step(
                self.wrapped,
                self.optimizer,
                batches,
                self.micro_batches // world_size(),
                max_grad_norm=self.config.max_grad_norm,
                dtype=self.config.dtype,
            )
        except ValueError as error:  # a CPU's attention refuses gates that are NaN
            if world_size() > 1:  # the others do not know, so torchrun ends them
                raise RuntimeError(f"rank {rank()}: step {step} failed: {error}") from error
            raise TrainingError(self._diagnosis(step, f"failed ({error})")) from error
        record = {
            "step": step,
            "tokens": (step + 1) * self.config.batch_tokens,
            "learning_rate": self.run.size.learning_rate * factor,
            "ranks": world_size(),
            "data_wait_seconds": self.data.waited_seconds - waited,
            **({"pruned_ratio": self.pruned} if watch else {}),
        }
        numbers = torch.stack([loss, norm]).to("cpu", non_blocking=True)
        self.unread.append((record, numbers, _Moment(self.device)))
        self._read(1 if self.device.type == "cuda" else 0)

    def _watched(self, batches: Iterator) -> Iterator:
        """``batches``, after a look at what the first sequence of the first one prunes."""
        self._read(0)
        batch = next(batches)
        self.pruned = pruned_ratio_per_layer(self._callable(), batch[0][:1], dtype=self.config.dtype)
        self._restart_clock()
        return itertools.chain([batch], batches)

    def _read(self, keep: int) -> None:
        """Reads and logs all but the newest ``keep`` of the steps launched."""
        while len(self.unread) > keep:
            record, numbers, ready = self.unread.pop(0)
            ready.wait()
            loss, norm = numbers.tolist()
            if not (math.isfinite(loss) and math.isfinite(norm)):
                what = f"gave loss {loss} and gradient norm {norm}"
                raise TrainingError(self._diagnosis(record["step"], what))
            seconds = ready.seconds_since(self.before)
            self.before = ready
            wait = min(record.pop("data_wait_seconds") / seconds, 1.0)
            record |= {"loss_nats": loss, "grad_norm": norm, "data_wait_share": wait}
            self._write(record | self._speed(seconds))

    def _speed(self, seconds: float) -> dict[str, float]:
        rate = self.config.batch_tokens / seconds
        speed = {"throughput_tokens_per_s": rate}
        if self.device.type == "cuda":
            speed["peak_memory_bytes"] = torch.cuda.max_memory_allocated(self.device)
        if self.peak_flops is not None:
            pruned = sum(self.pruned) / len(self.pruned) if self.pruned else 0.0
            for name, ratio in (("mfu_nominal", 0.0), ("mfu_executed", pruned)):
                length = self.run.context_length
                flops = training_flops_per_token(self.model.config, length, ratio)
                speed[name] = rate * flops / (self.peak_flops * world_size())
        return speed

    def _write(self, record: dict[str, Any]) -> None:
        if self.log is None:
            return
        self.log.write(record)
        shown = f"loss {record['loss_nats']:.3f}, {record['throughput_tokens_per_s']:,.0f} tok/s"
        if "mfu_nominal" in record:
            shown += f", mfu {record['mfu_nominal']:.0%}"
        if self.pruned:
            shown += f", pruned {sum(self.pruned) / len(self.pruned):.0%}"
        self.progress.set_postfix_str(shown, refresh=False)
        self.progress.update(self.config.batch_tokens)

    def _save(self, steps_done: int) -> None:
        self._read(0)
        save_checkpoint(self.run.folder / "checkpoints", steps_done, self.model, self.optimizer)
        self._restart_clock()

    def _restart_clock(self) -> None:
        """What is not training counts for no step's time."""
        self.before = _Moment(self.device)

    def _callable(self) -> nn.Module:
        """What runs the model for a look at it: without DDP, whose gradients are not wanted then."""
        return getattr(self.wrapped, "module", self.wrapped)

    def _diagnosis(self, step: int, what: str) -> str:
        """The message, after a second, watched run over the micro-batches of the step."""
        self.data.close()
        where = "run once more, all is finite"
        for index in self._micro_batches_of(step):
            batch = (x.to(self.device) for x in self.load(index))
            lines = gather(first_non_finite(self._callable(), *batch, dtype=self.config.dtype))
            found = [line for line in lines if not line.startswith("all is finite")]
            if found:
                # Sharded gradients are sums over ranks: the rank where it arose has more to say.
                where = min(found, key=lambda line: line.startswith("the gradient of the weight"))
                break
        last = latest_checkpoint(self.run.folder / "checkpoints")
        left = f"the last good checkpoint is {last}" if last else "there is no checkpoint before it"
        return f"{self.run.name}: step {step} {what}: {where}; {left}"


class _Moment:
    """When the device has done all that was launched until now."""

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
        """On the device's own clock: when the host comes to look does not matter."""
        if self.event is None:
            return self.at - earlier.at
        return earlier.event.elapsed_time(self.event) / 1e3
