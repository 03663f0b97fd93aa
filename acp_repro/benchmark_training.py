"""Times whole training steps on random tokens: ``python -m acp_repro.benchmark_training --suite h100``.

Shapes and settings are those of the suite's runs. The command needs no trained model, because the parameters
are random and the gates synthetic. Each number of GPUs runs in its own set of processes. The command writes
results after each model, and replaces earlier results of the same measurement only.
"""

import argparse
import itertools
import sys

from .common.command import choose_device, command, described_parser, positive, run_command
from .common.errors import UsageError
from .papers.acp.runs import FoXRun, FoXSuite
from .pipeline.errors import SuiteError
from .pipeline.paper import Metric
from .pipeline.provenance import device_name, made_on
from .pipeline.records import benchmark_rows, write_suite_records
from .pipeline.run import PARALLEL
from .pipeline.suite_file import load_suite

SHAPE = ("architecture", "size", "context_length_tokens")


@command(extra="pipeline")
def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)

    import torch

    suite = load_suite(options.suite)
    if not isinstance(suite, FoXSuite):
        raise SuiteError(
            f"suite {suite.name} belongs to paper {suite.paper.name}, whose training steps this command "
            "does not time; give a suite of acp"
        )
    options.gates = options.gates or suite.measure_settings.gate_distribution
    metric = suite.paper.metric("training_step")
    device = choose_device(options.device)
    runs = [suite.run(name) for name in options.run or ()] or recorded(suite, metric, device_name(device))
    if options.is_rank:
        return _measure(suite, runs, options)
    if device.type == "cuda" and max(options.nproc) > torch.cuda.device_count():
        raise UsageError(f"--nproc {max(options.nproc)}: this machine has {torch.cuda.device_count()} GPUs")
    from .pipeline.training.distributed import launch_ranks

    again = sys.argv[1:] if arguments is None else arguments
    for ranks, parallel in itertools.product(options.nproc, options.parallel):
        if ranks == 1 and parallel != options.parallel[0]:
            continue  # one process has only one mode
        # Each rank runs this command again; the last value of an option wins.
        words = [*again, "--is-rank", "--parallel", parallel]
        if status := launch_ranks(ranks, "acp_repro.benchmark_training", words):
            return status
    print(f"records: {metric.path(suite.name)}")
    return 0


def _shape(run: FoXRun) -> tuple[str, ...]:
    return run.architecture, run.size_name, str(run.context_length)


def recorded(suite: FoXSuite, metric: Metric, device: str) -> list[FoXRun]:
    """One run of each shape with records of this device in the suite; without records, ``run_for_heads``."""
    rows = benchmark_rows(suite.name, suite.paper, metric)
    shapes = {tuple(row[column] for column in SHAPE) for row in rows if row["device"] == device}
    first: dict[tuple, FoXRun] = {}
    for run in (suite.run_for_heads, *suite.runs):
        first.setdefault(_shape(run), run)
    return [run for shape, run in first.items() if shape in shapes] or [suite.run_for_heads]


def _measure(suite: FoXSuite, runs: list[FoXRun], options: argparse.Namespace) -> int:
    """The work of one rank. Rank 0 writes each record at once, so that a crash loses at most one model."""
    from .papers.acp.measure.training_steps import time_steps
    from .pipeline.training.distributed import on_rank_zero, process_group, world_size

    with process_group(options.device) as device:

        def write(record: dict) -> None:
            print(_in_words(record), flush=True)
            metric, dtype = suite.paper.metric("training_step"), runs[0].training.dtype
            write_suite_records(suite.name, suite.paper, metric, [record], dtype=dtype, **made_on(device))

        for run, words in itertools.product(runs, options.vocab_size):
            for record in time_steps(
                run,
                words,
                device,
                repeats=options.repeats,
                steps=options.steps,
                official=options.with_official and world_size() == 1,
                parallel=options.parallel[0],
                gates=options.gates,
            ):
                on_rank_zero(lambda record=record: write(record))
    return 0


def _in_words(record: dict) -> str:
    mfu = f", {100 * record['mfu_nominal']:.0f} % MFU" if record["mfu_nominal"] else ""
    memory = record["peak_memory_bytes"]
    memory = f", {memory / 2**30:.1f} GiB" if memory else ""
    mode = f" ({record['parallel']})" if record["ranks"] > 1 else ""
    return (
        f"{record['size']} at {record['context_length_tokens']:,}, {record['vocab_size']:,} words, "
        f"{record['ranks']}{mode} x {record['implementation']} {record['method']}: "
        f"{record['throughput_tokens_per_s']:,.0f} tokens/s{mfu}{memory}"
    )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = described_parser("benchmark_training", __doc__)
    add = parser.add_argument
    add("--suite", default="cpu", help="a name in experiments/ or a YAML file (default: cpu)")
    add(
        "--run",
        action="append",
        metavar="NAME",
        help="the run whose shape is timed (repeatable; default: one for each shape with records of "
        "this device; if none, the run whose heads the suite's figures show)",
    )
    add(
        "--vocab-size",
        type=positive,
        nargs="+",
        default=[50_257],
        metavar="N",
        help="vocabulary sizes, each a measurement (default: GPT-2's 50257)",
    )
    add(
        "--nproc",
        type=positive,
        nargs="+",
        default=[1],
        metavar="N",
        help="GPUs of this machine, each number a measurement (default: 1); a step grows with them",
    )
    add(
        "--parallel",
        choices=PARALLEL,
        nargs="+",
        default=["auto"],
        help="how several GPUs share a step, each a measurement (default: as the suite's runs do)",
    )
    add(
        "--gates",
        choices=("mixed", "paper_ratio"),
        help="which heads are local: two thirds, or so many that 65 to 70 %% is pruned at every length "
        "(default: the suite's measure.gate_distribution, else mixed)",
    )
    add("--with-official", action="store_true", help="also time the authors' model, on one GPU")
    add("--repeats", type=positive, default=3, metavar="N", help="default: %(default)s")
    add("--steps", type=positive, default=5, metavar="N", help="steps in a repeat (default: %(default)s)")
    add("--device", help="cpu, cuda (default: a GPU if there is one)")
    add("--is-rank", action="store_true", help=argparse.SUPPRESS)  # set for each rank of a launch
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_command(main)
