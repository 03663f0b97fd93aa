"""Estimates the cost of a suite: ``python -m acp_repro.plan --suite paper --gpu h100``.

The command computes parameters, FLOPs, memory and GPU-hours of every run of ACP from formulas, without
building or training a model. Runs in float32 are for a CPU and have no GPU-hours.
"""

from .common.command import aligned, command, described_parser, positive, run_command
from .papers.acp.cost import MFU, PRUNED_RATIO, run_cost
from .papers.acp.runs import FoXSuite
from .pipeline.errors import SuiteError
from .pipeline.suite_file import load_suite

_MEMORY_GB = {"h100": 80, "h200": 141, "a100": 80, "b200": 180, "l40s": 48, "4090": 24}
_MARGIN = 1.1  # measured peaks were 0.89 to 1.09 times the formula's


@command()
def main(arguments: list[str] | None = None) -> None:
    parser = described_parser("plan", __doc__)
    add = parser.add_argument
    add("--suite", default="paper", help="a name in experiments/ or a YAML file (default: paper)")
    add("--gpu", default="h100", choices=_MEMORY_GB, help="default: h100")
    add("--nproc", type=positive, default=1, metavar="N", help="GPUs per run (default: 1)")
    options = parser.parse_args(arguments)
    suite = load_suite(options.suite)
    if not isinstance(suite, FoXSuite):
        raise SuiteError(
            f"suite {suite.name} belongs to paper {suite.paper.name}, whose cost has no formula; give a "
            "suite of acp"
        )
    gpu, ranks = options.gpu, options.nproc
    costs = [run_cost(run, gpu, ranks) for run in suite.runs]
    exchanges = any(cost.exchanged for cost in costs)
    rows = [
        (
            "run",
            "params M",
            "tokens M",
            "steps",
            "EFLOP",
            "executed",
            "GPU-hours",
            "peak GB",
            "fits",
            "sent GB",
        )
    ]
    for run, cost in zip(suite.runs, costs, strict=True):
        numbers = (cost.flops / 1e18, cost.executed_flops / 1e18, cost.gpu_hours, cost.memory / 1e9)
        fits = _MARGIN * cost.memory <= 1e9 * _MEMORY_GB[gpu]
        counts = (f"{cost.parameters / 1e6:,.1f}", f"{cost.tokens / 1e6:,.1f}", f"{cost.steps:,}")
        sent = f"{cost.exchanged / 1e9:.3g}"
        rows.append((run.name, *counts, *(f"{x:.3g}" for x in numbers), "yes" if fits else "no", sent))
    on_gpu = any(run.training.dtype != "float32" for run in suite.runs)
    shown = [row[: (10 if exchanges else 9) if on_gpu else 6] for row in rows]
    print(f"{suite.name}: {suite.description}", *aligned(shown, left=[0]), sep="\n")
    if not on_gpu:
        return
    hours = sum(cost.gpu_hours for cost in costs)
    print(
        f"{len(costs)} runs: {hours:,.4g} GPU-hours, {hours / ranks:,.4g} hours one after another on {ranks} "
        f"x {gpu}, if executed FLOPs reach {MFU:.0%} of the peak and ACP prunes {PRUNED_RATIO:.0%} of the "
        f"attention. Peak: of one GPU; it fits with {_MARGIN - 1:.0%} to spare. Measuring is not counted."
    )
    if exchanges:
        print("Sent: by all GPUs in a step, for context parallelism (training.context_parallel).")


if __name__ == "__main__":
    run_command(main)
