"""Measured speeds, for a plan: from finished runs, and from throughput records. Needs no torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import median
from typing import Any, Self

from acp_repro.chain.errors import RecordError, SuiteError, UnknownName
from acp_repro.chain.paper import RESULTS
from acp_repro.chain.records import read_records
from acp_repro.chain.run import RUNS
from acp_repro.chain.state import recorded_settings
from acp_repro.chain.suite import load_suite, suite_names
from acp_repro.model.flops import same_gpu

from ..suite import FoXRun, FoXSuite

# Architecture, layers, width, head_dim, vocabulary, dtype, gradient checkpointing, context length, with ACP:
# what decides the time of a token.
Shape = tuple[Any, ...]


class Speeds:
    """Tokens a second on one GPU, by run or by shape, with where each comes from."""

    def __init__(self):
        self._by_run: dict[str, float] = {}
        self._by_shape: dict[Shape, list[tuple[float, str, Path]]] = {}

    @classmethod
    def find(cls, suite: FoXSuite, given: list[str], *, of_finished_runs: bool = True) -> Self:
        """All known speeds for the shapes of ``suite``.

        Args:
            given: ``RUN=NUMBER``, which takes precedence.
            of_finished_runs: use runs/*/*/metrics.jsonl too. False for a prediction that is compared with
                those very runs.

        Raises:
            SuiteError: an entry of ``given`` is not of that form, or names no run.
        """
        speeds = cls()
        for entry in given:
            name, _, number = entry.partition("=")
            try:
                speed = float(number)
                if not 0 < speed < math.inf:
                    raise ValueError(f"{number} is no speed")
                speeds._by_run[suite.run(name).name] = speed
            except ValueError as error:
                reason = error if isinstance(error, SuiteError) else "write RUN=NUMBER, tokens a second"
                raise SuiteError(f"--tokens-per-s {entry}: {reason}") from None
        # Finished runs are more reliable than records of short passes, so they come last and replace them.
        for name in suite_names():
            if (RESULTS / name).is_dir():
                speeds._add_records(name)
        if of_finished_runs:
            for path in sorted(RUNS.glob("*/*/metrics.jsonl")):
                speeds._add_metrics(path)
        return speeds

    def of(self, run: FoXRun, gpu: str) -> tuple[float, str] | None:
        """(tokens a second on one ``gpu``, source) of a run, or None."""
        if run.name in self._by_run:
            return self._by_run[run.name], "given"
        for speed, device, path in reversed(self._by_shape.get(_shape(run), [])):
            if same_gpu(device, gpu):
                return speed, str(path)
        return None

    def _add_metrics(self, path: Path) -> None:
        try:
            description = json.loads((path.parent / "run.json").read_text())
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            ranks = description.get("ranks", 1)
            rates = [x["throughput_tokens_per_s"] / x.get("ranks", ranks) for x in lines]
            settings = description["settings"]
            shape = _shape_of_settings(settings)
        except (OSError, ValueError, KeyError):
            return  # a run that has only begun, or is not ours
        if rates:
            rates = rates[len(rates) // 10 :]  # the first steps compile and warm up
            self._add(shape, median(rates), description["device"], path)

    def _add_records(self, name: str) -> None:
        try:
            suite = load_suite(name)
            quantity = suite.paper.quantity("throughput")
            records = read_records(suite, quantity.name, suite.runs, partial=True)
        except (SuiteError, RecordError, UnknownName):
            return  # of another paper, or nothing was timed
        for run in suite.runs:
            settings = recorded_settings(run)
            if not settings or not isinstance(run, FoXRun):
                continue  # nothing says what was timed
            shape, path = _shape_of_settings(settings["run"]), quantity.path(name, run.name)
            for row in records[records["run"] == run.name].itertuples():
                self._add((*shape[:-1], row.method == "acp"), row.throughput_tokens_per_s, row.device, path)

    def _add(self, shape: Shape, speed: float, device: str, path: Path) -> None:
        self._by_shape.setdefault(shape, []).append((speed, device, path))


def _shape(run: FoXRun) -> Shape:
    return _shape_of_settings(run.as_dict())


def _shape_of_settings(settings: dict[str, Any]) -> Shape:
    size, training, data = settings["size"], settings["training"], settings["data"]
    # The source of the vocabulary, because its size is not always known before the text is read.
    vocabulary = (data["corpus"] == "longcrawl64", json.dumps(data["tokenizer"], default=dict))
    return (
        settings["architecture"],
        size["num_hidden_layers"],
        size["hidden_size"],
        size["head_dim"],
        vocabulary,
        training["dtype"],
        training["gradient_checkpointing"],
        settings["context_length"],
        settings["log_pruning_tolerance"] is not None,
    )
