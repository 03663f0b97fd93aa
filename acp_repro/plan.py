"""Estimates the cost of a suite: ``python -m acp_repro.plan --suite paper --gpu h100``.

Parameters, tokens, FLOPs, memory and GPU-hours of every run, from formulas: no model is built and torch is
not imported. `--check` compares predictions with finished runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import shutil
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from .chain.errors import SuiteError
from .chain.paper import Suite
from .chain.state import measured_run
from .chain.suite import load_suite
from .common import files
from .common.command import aligned, command, output_file, run_command
from .common.docs import plain
from .model.flops import peak_flops

if TYPE_CHECKING:
    from .papers.acp.plan import Assumptions, Cost, Speeds

PRUNED_RATIO = 0.7  # "around 70 %" (abstract), at all lengths and sizes
MFU = 0.3  # an assumption, of executed FLOPs: small models reach less, large ones more

_GPUS = "a100, h100, h200, l40s, b200, 4090"  # names in the table of model.flops.peak_flops


@command()
def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    suite = load_suite(options.suite)
    if not suite.paper.plan:
        if suite.paper.steps:
            return _print_steps(suite, options)
        raise SuiteError(f"suite {suite.name}: there is no plan for runs of paper {suite.paper.name}")
    formulas = suite.paper.load_plan()
    assumptions = formulas.Assumptions(
        gpu=options.gpu,
        ranks=options.nproc,
        mfu=options.mfu,
        pruned_ratio=options.pruned_ratio,
        vocab_size=options.vocab_size,
    )
    speeds = formulas.Speeds.find(suite, options.tokens_per_s, of_finished_runs=not options.check)
    if options.check:
        rows = _checked(suite, formulas, assumptions, speeds)
    else:
        if peak_flops(options.gpu) is None:
            raise SuiteError(
                f"--gpu {options.gpu}: not in the table of acp_repro/model/flops.py, which has {_GPUS}"
            )
        costs = [formulas.cost_of(run, assumptions, speeds) for run in suite.runs]
        rows = [_row(cost) for cost in costs]
    if not rows:
        print(f"no run of suite {suite.name} is finished: there is nothing to check", file=sys.stderr)
        return 1
    _print(f"{suite.name}: {suite.description}", rows)
    if not options.check:
        _print_totals(costs, assumptions)
    if options.csv:
        files.write_csv(options.csv, list(rows[0]), (row.values() for row in rows))
        print(f"csv: {options.csv.resolve()}")
    return 0


def _print_steps(suite: Suite, options: argparse.Namespace) -> int:
    """Prints runs and steps of a paper that has no formula for their cost."""
    if options.check:
        raise SuiteError(f"--check: paper {suite.paper.name} has no predictions to check")
    steps_of = suite.paper.load_steps()
    steps = [steps_of(run) for run in suite.runs]
    _print(
        f"{suite.name}: {suite.description}",
        [{"run": run.name, "steps": f"{n:,}"} for run, n in zip(suite.runs, steps, strict=True)],
    )
    gaps = f" ({len(suite.not_run)} more of the grid are not_run)" if suite.not_run else ""
    print(f"{len(steps)} runs{gaps}: {sum(steps):,} steps")
    print(f"FLOPs, memory and hours of runs of paper {suite.paper.name} are not estimated.")
    return 0


def _row(cost: Cost) -> dict[str, str]:
    """One line of the table, the most important values first, because a narrow terminal shows only the
    left."""
    memory = cost.memory
    return {
        "run": cost.run.name,
        "params M": _digits(cost.parameters / 1e6),
        "tokens M": _digits(cost.tokens / 1e6),
        "steps": f"{cost.steps:,}",
        "GPU-hours": _digits(cost.gpu_hours),
        "peak GB": _digits(memory.peak / 1e9),
        "EFLOP": f"{cost.nominal_flops / 1e18:.3g}",
        "executed": f"{cost.executed_flops / 1e18:.3g}",
        "tokens/s": f"{cost.tokens_per_s:,.0f}",
        "from": cost.source,
        "parallel": cost.mode,
        "states GB": _digits(memory.states / 1e9),
        "activations": _digits(memory.activations / 1e9),
        "checkpointed": _digits(memory.activations_checkpointed / 1e9),
        "logits": _digits(memory.logits / 1e9),
    }


def _checked(
    suite: Suite, formulas: ModuleType, assumptions: Assumptions, speeds: Speeds
) -> list[dict[str, str]]:
    """Predicted, measured and their ratio, for every finished run, on the machine that it ran on."""
    rows = []
    for run in suite.runs:
        found = measured_run(run)
        if found is None:
            continue
        there = dataclasses.replace(assumptions, gpu=found.device, ranks=found.ranks)
        cost = formulas.cost_of(run, there, speeds)
        memory = found.peak_memory_bytes or math.nan
        rows.append(
            {
                "run": run.name,
                "GPU-hours": _shown(cost.gpu_hours, ".3g"),
                "measured": _shown(found.gpu_seconds / 3600, ".3g"),
                "ratio": _shown(found.gpu_seconds / 3600 / cost.gpu_hours, ".2f"),
                "peak GB": _shown(cost.memory.peak / 1e9, ".1f"),
                "measured GB": _shown(memory / 1e9, ".1f"),
                "ratio GB": _shown(memory / cost.memory.peak, ".2f"),
                "from": cost.source if math.isfinite(cost.gpu_hours) else "-",
                "on": f"{found.ranks} x {found.device}",
            }
        )
    return rows


def _digits(value: float) -> str:
    """At least two digits, so that a small suite is not all zeros."""
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}" if value >= 10 else f"{value:.2g}"


def _shown(value: float, form: str) -> str:
    """A number, or a dash if it is not known: a CPU's peak, memory that was not recorded."""
    return format(value, form) if math.isfinite(value) else "-"


def _print_totals(costs: list[Cost], assumptions: Assumptions) -> None:
    hours = sum(cost.gpu_hours for cost in costs)
    executed, nominal = (
        sum(getattr(cost, name) for cost in costs) for name in ("executed_flops", "nominal_flops")
    )
    print(
        f"{len(costs)} runs: {nominal / 1e18:,.4g} EFLOP nominal, {executed / 1e18:,.4g} executed, "
        f"{_digits(hours)} GPU-hours, {_digits(hours / assumptions.ranks)} hours one after another on "
        f"{assumptions.ranks} GPU(s)"
    )
    print(
        f"ACP runs execute {1 - assumptions.pruned_ratio:.0%} of the attention's FLOPs. "
        f"{assumptions.gpu}: {assumptions.peak_flops / 1e12:.0f} TFLOP/s at most; where no speed was "
        f"measured, {assumptions.mfu:.0%} of that on executed FLOPs. GPUs are taken to scale "
        "without loss. Measuring and writing checkpoints are not counted. EFLOP: 1e18 operations; executed: "
        "without what ACP prunes. GB of one GPU: states are weights, gradients and the optimiser's; "
        "activations are of a micro-batch, checkpointed if gradient checkpointing is on; logits with their "
        "gradient."
    )


def _print(title: str, rows: list[dict[str, str]]) -> None:
    """A table as wide as the terminal; in a pipe all columns are printed."""
    print(title)
    shown = list(rows[0])
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in shown}
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf
    while len(shown) > 2 and sum(widths[name] + 2 for name in shown) - 2 > columns:
        shown.pop()
    hidden = list(rows[0])[len(shown) :]
    left = [at for at, name in enumerate(shown) if name in ("run", "from", "parallel", "on")]
    print("\n".join(aligned([shown, *([row[name] for name in shown] for row in rows)], left)))
    if hidden:
        print(f"not shown, because the terminal is too narrow: {', '.join(hidden)} (use --csv FILE)")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m acp_repro.plan",
        description=plain(__doc__.split("\n\n")[0]),
        epilog="Speeds come from --tokens-per-s, else from finished runs and throughput records of the "
        "same shape, else from --mfu; the last column says which.",
    )
    add = parser.add_argument
    add("--suite", default="paper", help="a name in experiments/ or a YAML file (default: paper)")
    add("--gpu", default="h100", metavar="NAME", help=f"{_GPUS} (default: h100)")
    add("--nproc", type=int, default=1, metavar="N", help="GPUs that share a run (default: 1)")
    add(
        "--tokens-per-s",
        action="append",
        default=[],
        metavar="RUN=NUMBER",
        help="tokens per second of a run on one GPU (repeatable)",
    )
    add(
        "--mfu",
        type=float,
        default=MFU,
        help="share of the peak FLOP/s, where no speed is known (default: %(default)s)",
    )
    add(
        "--pruned-ratio",
        type=float,
        default=PRUNED_RATIO,
        help="share of the attention that ACP runs prune (default: %(default)s)",
    )
    add(
        "--vocab-size",
        type=int,
        metavar="V",
        help="size of the vocabulary, if the tokenizer is a file that is not here yet",
    )
    add("--check", action="store_true", help="compare predictions with finished runs")
    add("--csv", type=output_file, metavar="FILE", help="also write the table to this file")
    return parser


if __name__ == "__main__":
    run_command(main)
