"""Savings and loss against epsilon: ``python -m acp_repro.sweep_epsilon [--suite S | --checkpoint FOLDER]``.

Of a suite's run, whose records it writes, or of any FoX checkpoint: the share of attention pruned by blocks
and entry by entry, the loss, and the most weight that a row loses, beside epsilon, its bound (Appendix A).
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from .chain import state
from .chain.command import choose_device, command, output_file, positive, run_command
from .chain.errors import SuiteError
from .chain.records import read_records, write_records
from .chain.suite import load_suite
from .common.errors import UsageError, UserError
from .papers.acp.epsilon_table import table, write_csv
from .papers.acp.settings import MeasureConfig
from .papers.acp.suite import FoXSuite

QUANTITY = "epsilon_sweep"
GPU_TOKENS, CPU_TOKENS = 32_768, 4096


@command()
def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    options.device = choose_device(options.device)
    try:
        rows = (_of_checkpoint if options.checkpoint else _of_suite)(options)
    except UserError:
        raise
    except (ValueError, FileNotFoundError, ImportError) as error:
        raise UsageError(str(error)) from error
    print(table(rows))
    return 0


def _of_suite(options: argparse.Namespace) -> list[dict]:
    """The suite's own sweep is the record that Figure 7 draws; one at other values is a record of its own."""
    suite = load_suite(options.suite or "cpu")
    if not isinstance(suite, FoXSuite):
        raise SuiteError(
            f"suite {suite.name} is of paper {suite.paper.name}, which has no epsilon; name one of acp"
        )
    run = suite.run(options.run) if options.run else suite.sweep_run
    quantity, usual = suite.paper.quantity(QUANTITY), suite.measure.sweep_log_pruning_tolerances
    values = options.log_pruning_tolerance or usual
    path = quantity.path(suite.name, run.name)
    if values != usual:
        path = path.with_name(f"{QUANTITY}_at_{'_'.join(f'{value:g}' for value in values)}.csv")
    state.write_stamps(suite)
    with state.measuring():
        if values == usual and not options.again and state.is_current(suite, run, quantity):
            print(f"{path}: up to date")
            return read_records(suite, QUANTITY, [run]).to_dict("records")
        return _sweep(suite, run, values, path, options.device)


def _sweep(suite: FoXSuite, run, values: list[float], path: Path, device) -> list[dict]:
    measure = dataclasses.replace(suite.measure, sweep_log_pruning_tolerances=values)
    changed = dataclasses.replace(suite, file=dataclasses.replace(suite.file, measure=measure))
    trained = suite.paper.load_task()(run).trained(changed, device)
    quantity = suite.paper.quantity(QUANTITY)
    rows = quantity.measure(trained)
    write_records(
        suite.paper,
        run,
        quantity,
        rows,
        device=trained.device_name,
        dtype=run.training.dtype,
        trained_tokens=trained.trained_tokens,
        uses_gpu=device.type == "cuda",
        path=path,
    )
    if path == quantity.path(suite.name, run.name):
        took = state.measured_run(run)
        state.write_settings(suite, run, [quantity], took and dataclasses.asdict(took))
    print(path)
    return rows


def _of_checkpoint(options: argparse.Namespace) -> list[dict]:
    from .papers.acp.checkpoint_folder import Checkpoint
    from .papers.acp.measure.epsilon_sweep import sweep_checkpoint

    checkpoint = Checkpoint.find(options.checkpoint)
    print(f"text: {checkpoint.source(options.text, options.token_ids)}")
    rows, origin = sweep_checkpoint(
        options.checkpoint,
        options.log_pruning_tolerance or MeasureConfig().sweep_log_pruning_tolerances,
        options.device,
        context_length=options.context_length,
        tokens=options.tokens or (GPU_TOKENS if options.device.type == "cuda" else CPU_TOKENS),
        text=options.text,
        token_ids=options.token_ids,
    )
    if options.csv:
        print(write_csv(options.csv, rows, origin))
    return rows


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m acp_repro.sweep_epsilon", description=__doc__)
    add = parser.add_argument
    add(
        "--log-pruning-tolerance",
        type=float,
        nargs="+",
        metavar="X",
        help="log epsilon, one or more (default: the suite's, or -1 -5 -10 -20 -40)",
    )
    add("--device", help="cpu, cuda (default: a GPU if there is one)")
    add = parser.add_argument_group("a run of a suite").add_argument
    add("--suite", help="a name in experiments/ or a YAML file (default: cpu)")
    add("--run", metavar="NAME", help="default: the suite's sweep_run")
    add("--again", action="store_true", help="measure anew what is up to date")
    add = parser.add_argument_group("any checkpoint").add_argument
    add("--checkpoint", metavar="FOLDER", help="in the authors' format, or a run folder")
    add("--text", metavar="FILE", help="default: the run's held-out text, or the book that comes along")
    add("--token-ids", metavar="FILE.npy", help="integers instead of text, fed as they are")
    add("--context-length", type=int, metavar="N", help="default: the run's, or 4096")
    add(
        "--tokens",
        type=positive,
        metavar="N",
        help=f"at most (default: {GPU_TOKENS} on a GPU; {CPU_TOKENS} on a CPU, for half a minute of waiting)",
    )
    add("--csv", type=output_file, metavar="FILE", help="also write the result there")
    options = parser.parse_args(arguments)
    if not options.checkpoint and (options.text or options.token_ids or options.csv):
        parser.error("--text, --token-ids and --csv need --checkpoint")
    if options.checkpoint and (options.suite or options.run or options.again):
        parser.error("--checkpoint is of no suite; leave out --suite, --run and --again")
    return options


if __name__ == "__main__":
    run_command(main)
