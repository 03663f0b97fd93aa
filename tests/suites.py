"""A suite whose runs take a second each, for tests of the pipeline."""

import dataclasses
import importlib
import itertools
import shlex
import time
from pathlib import Path

import torch

from acp_repro.papers.acp.paper import PAPER
from acp_repro.papers.acp.task import FoXTask
from acp_repro.pipeline.records import read_records
from acp_repro.pipeline.suite_file import load_suite
from acp_repro.pipeline.training.trainer import train

YAML = """
description: a test
data: {corpus: text, path: text.txt, heldout: [heldout.txt]}
sizes:
  tiny: {num_hidden_layers: 2, hidden_size: 32, head_dim: 16, tokens: 1536, learning_rate: 1e-2}
grid:
  - {size: [tiny], context_length: [128], log_pruning_tolerance: [-10, null]}
training:
  {batch_tokens: 256, micro_batch_tokens: 128, warmup_tokens: 512, dtype: float32,
   checkpoint_every_seconds: 0}
measure: {pruned_ratio_tokens: 256, timing_tokens: 128, timing_repeats: 1, loss_tokens: 256}
"""


def write_suite(folder: Path, text: str = YAML, name: str = "mini") -> None:
    """Writes ``experiments/NAME.yaml`` and its corpus under ``folder``, the working folder."""
    (folder / "experiments").mkdir(exist_ok=True)
    (folder / "experiments" / f"{name}.yaml").write_text(text)
    words = "the quick brown fox jumps over the lazy dog while it forgets what it saw before "
    (folder / "text.txt").write_text(words * 60)
    (folder / "heldout.txt").write_text("a dog that forgets is a fox that remembers " * 20)


def run_here(words: str) -> int:
    """Runs a command of make in this process, as a replacement for ``run_words``."""
    module, *arguments = shlex.split(words)[2:]
    return importlib.import_module(module).main(arguments)


def records(metric: str, *names: str, suite: str = "mini"):
    """The results of a metric, for the named runs or for all runs with results."""
    loaded = load_suite(suite)
    return read_records(loaded, metric, [loaded.run(n) for n in names] or loaded.runs, partial=not names)


def train_run(run, device="cpu", **options):
    """Trains an ACP run."""
    return train(PAPER, run, device=torch.device(device), **options)


def with_measure(suite, **settings):
    """The suite with other measurement settings."""
    measure = dataclasses.replace(suite.measure_settings, **settings)
    return dataclasses.replace(suite, file=dataclasses.replace(suite.file, measure=measure))


def trained_run(name: str, suite: str = "mini"):
    """A finished run, loaded for measurement."""
    loaded = load_suite(suite)
    return FoXTask(loaded.run(name)).trained(loaded, torch.device("cpu"))


def slow_every_other(monkeypatch) -> None:
    """A clock on which each piece of work takes 1 s and every second one 4 % more."""
    seconds = itertools.accumulate(itertools.cycle((0.0, 1.0, 0.0, 1.04)))
    monkeypatch.setattr(time, "perf_counter", lambda: next(seconds))
