"""Measures savings and loss for several epsilons:
``python -m acp_repro.sweep_epsilon [MODEL | --suite S]``.

MODEL is any FoX checkpoint; without MODEL the command measures a suite's run and writes its results. For each
epsilon the command prints the pruned ratio (at block level and at token level), the loss, and the largest
attention weight that a row loses, which epsilon bounds (Appendix A).
"""

from __future__ import annotations

import argparse
import math

from .common import files
from .common.command import (
    CHECKPOINT,
    DEFAULT_CONTEXT_LENGTH,
    add_text_options,
    aligned,
    bounded,
    choose_device,
    command,
    described_parser,
    output_file,
    positive,
    run_command,
)
from .explorer.checkpoint import Checkpoint
from .model.config import LogEpsilon
from .papers.acp.runs import FoXSuite
from .papers.acp.schema import SWEPT_LOG_PRUNING_TOLERANCES
from .pipeline.data.sources import check_length
from .pipeline.errors import SuiteError
from .pipeline.provenance import made_on, origin
from .pipeline.records import read_files
from .pipeline.suite_file import load_suite
from .pipeline.training.measuring import bring_up_to_date

QUANTITY = "epsilon_sweep"
GPU_TOKENS, CPU_TOKENS = 32_768, 4096
_HEADER = (
    "log epsilon",
    "blocks pruned",
    "entries pruned",
    "loss (nats)",
    "largest pruned mass",
    "bound epsilon",
)


@command(extra="pipeline")
def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    print(table((_of_checkpoint if options.model else _of_suite)(options)))
    return 0


def _of_suite(options: argparse.Namespace) -> list[dict]:
    """The suite's own sweep is the record that Figure 7 draws; a sweep at other values is a separate
    record."""
    suite = load_suite(options.suite or "cpu")
    if not isinstance(suite, FoXSuite):
        raise SuiteError(
            f"suite {suite.name} is of paper {suite.paper.name}, which has no epsilon; name a suite of acp"
        )
    run = suite.run(options.run) if options.run else suite.run_for_sweep
    metric = suite.paper.metric(QUANTITY)
    values = options.log_pruning_tolerance or SWEPT_LOG_PRUNING_TOLERANCES
    path, other = metric.path(suite.name, run.name), {}
    if values != SWEPT_LOG_PRUNING_TOLERANCES:
        path = path.with_name(f"{QUANTITY}_at_{'_'.join(f'{value:g}' for value in values)}.csv")
        other = {"path": path, "log_pruning_tolerances": values}
    bring_up_to_date(suite, [(run, metric)], options.device, again=options.force, **other)
    return read_files(suite, metric, [path]).to_dict("records")


def _of_checkpoint(options: argparse.Namespace) -> list[dict]:
    opened = Checkpoint(options.model)  # before torch is imported
    length = options.context_length or opened.context_length or DEFAULT_CONTEXT_LENGTH
    check_length(options.text, length)
    device = choose_device(options.device)

    from .papers.acp.measure.pruned_ratio import PassSettings, measure_epsilon_sweep
    from .pipeline.data.text_checkpoint import TextCheckpoint, labelled_batches

    checkpoint = TextCheckpoint(options.model)
    print(f"text: {checkpoint.source(options.text, options.token_ids)}")
    tokens = max(length, options.tokens or (GPU_TOKENS if device.type == "cuda" else CPU_TOKENS))
    ids = checkpoint.input_ids(length, tokens, text=options.text, token_ids=options.token_ids)
    settings = PassSettings(checkpoint.autocast_dtype(device), str(checkpoint.folder))
    rows = measure_epsilon_sweep(
        checkpoint.load(device), labelled_batches(ids, device), settings, options.log_pruning_tolerance
    )
    if options.csv:
        source = {
            "checkpoint": str(checkpoint.folder),
            "text": str(options.token_ids or options.text or "held-out"),
            "context_length_tokens": length,
            **origin(dtype=settings.dtype, **made_on(device)),
        }
        rows = [row | source for row in rows]
        print(files.write_csv(options.csv, list(rows[0]), (row.values() for row in rows)))
    return rows


def table(rows: list[dict]) -> str:
    """Records of ``epsilon_sweep`` as aligned text; the mass is ``-`` if nothing was pruned."""
    lines = [_HEADER]
    for row in rows:
        value, mass = row["swept_log_pruning_tolerance"], row["largest_pruned_mass"]
        lines.append(
            (
                f"{value:g}",
                f"{100 * row['block_pruned_ratio']:.1f} %",
                f"{100 * row['token_pruned_ratio']:.1f} %",
                f"{row['loss_nats']:.5f}",
                "-" if mass is None or math.isnan(mass) else f"{mass:.1e}",
                f"{math.exp(value):.1e}",
            )
        )
    return "\n".join(aligned(lines))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = described_parser("sweep_epsilon", __doc__)
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help=f"{CHECKPOINT}, instead of a suite's run")
    add(
        "--log-pruning-tolerance",
        type=bounded(LogEpsilon),
        nargs="+",
        metavar="X",
        help="log epsilon, one or more (default: -1 -5 -10 -20 -40)",
    )
    add("--device", help="cpu, cuda (default: a GPU if there is one)")
    add = parser.add_argument_group("a run of a suite").add_argument
    add("--suite", help="a name in experiments/ or a YAML file (default: cpu)")
    add("--run", metavar="NAME", help="default: the suite's run_for_sweep")
    add("--force", action="store_true", help="measure again even if up to date")
    of_checkpoint = parser.add_argument_group("any checkpoint")
    add = of_checkpoint.add_argument
    add_text_options(of_checkpoint)
    add(
        "--tokens",
        type=positive,
        metavar="N",
        help=f"read at most this many tokens (default: {GPU_TOKENS} on a GPU; {CPU_TOKENS} on a CPU, about "
        "half a minute)",
    )
    add("--csv", type=output_file, metavar="FILE", help="also write the result to this file")
    options = parser.parse_args(arguments)
    of_text = (options.text, options.token_ids, options.context_length, options.tokens)
    if not options.model and (any(of_text) or options.csv):
        parser.error("--text, --token-ids, --context-length, --tokens and --csv need a MODEL")
    if options.model and (options.suite or options.run or options.force):
        parser.error("a MODEL belongs to no suite; leave out --suite, --run and --force")
    return options


if __name__ == "__main__":
    run_command(main)
