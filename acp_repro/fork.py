"""When do a training with ACP and its exact pair separate? ``python -m acp_repro.fork --suite h200-needle``.

Trains one run of the suite several times, side by side and step by step. One training is exact, some have ACP
at several tolerances, and one is exact with one weight changed by one unit of bfloat16. Prints the first step
at which a bit of the gradients differs. Writes the differences of each step to
results/SUITE/benchmark/fork.csv.gz. No run folder is changed.
"""

from __future__ import annotations

import argparse
import functools

from .chain.provenance import device_name, made_on
from .chain.records import keep_other_machines, write_suite_records
from .chain.suite import load_suite
from .common.command import choose_device, command, described_parser, output_file, positive, run_command
from .common.errors import UsageError


@command()
def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    suite = load_suite(options.suite)
    quantity = suite.paper.quantity("fork")
    exact = [run for run in suite.runs if run.log_pruning_tolerance is None]
    run = suite.run(options.run) if options.run else (exact or list(suite.runs))[0]
    if bad := [t for t in options.log_pruning_tolerance if not t < 0]:
        raise UsageError(f"--log-pruning-tolerance {bad[0]:g}: must be log(epsilon), below 0, such as -10")
    device = choose_device(options.device)
    if not options.csv:
        keep_other_machines(suite, quantity, device_name(device), {})
    from .papers.acp.fork import measure

    print(f"{run.name}: {run.steps:,} steps in all, {min(options.steps, run.steps):,} taken")
    rows: list[dict] = []
    named = {**run.columns(), "log_pruning_tolerance": None}  # each training has its own one
    write = functools.partial(
        write_suite_records,
        suite.name,
        suite.paper,
        quantity,
        rows,
        dtype=run.training.dtype,
        path=options.csv,
        **made_on(device),
    )
    for step in measure(
        run,
        device,
        tolerances=options.log_pruning_tolerance,
        steps=options.steps,
        look_every=options.look_every,
    ):
        rows += [named | row for row in step]
        for row in step:
            if row["parts_here"]:
                print(f"\n{_in_words(row)}", flush=True)
        if step[0]["step"] % options.look_every == 0:  # a stopped command keeps its records
            write()
    for training in dict.fromkeys(row["training"] for row in rows):
        last = [row for row in rows if row["training"] == training][-1]
        state = "loss apart by" if last["weight_difference"] else "the same bits to the end; loss apart by"
        print(
            f"{training}: after {last['step'] + 1:,} steps {state} {last['loss_difference_nats']:+.2g} nats"
        )
    print(f"records: {write()}")
    return 0


def _in_words(row: dict) -> str:
    mass = row["largest_pruned_mass"]
    lost = "" if mass is None else f"; a row loses {mass:.2g} of its weight to pruning at most"
    return (
        f"{row['training']}: differs from step {row['step']:,}: {row['differing_gradients']} gradients "
        f"differ, by {row['gradient_difference']:.2g} at most ({row['most_different_gradient']}){lost}"
    )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = described_parser("fork", __doc__, as_written=True)
    add = parser.add_argument
    add("--suite", default="cpu", help="a name in experiments/ or a YAML file (default: cpu)")
    add(
        "--run",
        metavar="NAME",
        help="the run whose seed, shape and text are used (default: the suite's first exact run)",
    )
    add(
        "--log-pruning-tolerance",
        type=float,
        nargs="+",
        default=[-10.0, -40.0],
        metavar="X",
        help="log epsilon of the trainings with ACP (default: -10 -40)",
    )
    add("--steps", type=positive, default=1000, metavar="N", help="steps at most (default: %(default)s)")
    add(
        "--look-every",
        type=positive,
        default=100,
        metavar="N",
        help="steps between measurements of the pruned mass (default: %(default)s)",
    )
    add("--device", help="cpu, cuda (default: a GPU if there is one)")
    add(
        "--csv",
        type=output_file,
        metavar="FILE",
        help="write the records there, not to results/SUITE/benchmark/",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_command(main)
